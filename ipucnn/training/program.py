"""The Program: a complete description of a run, in parts that are each complete once they exist.

A :class:`Layout` is known from options alone; for a user's own network without ``--micro-batch-size``, the number of
training samples decides that option first.  A :class:`Program` adds what the data set, the seed and the number of
instances decide, before TensorFlow is imported.  A :class:`BuiltProgram` adds what the network and the device decide;
both sessions take it, and it is printed, saved with the run as ``program.json``, and compared when a run is resumed.
This module does not import TensorFlow.
"""

import json
import math
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Callable, List, Optional, Sequence, Tuple, Type, TypeVar

from ipucnn.aliases import PlainDict
from ipucnn.config.bounds import MAX_COUNT
from ipucnn.config.options import AUTO, RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.text import counted
from ipucnn.training.batching import (
    alternatives,
    check_distributed_batch_norm,
    divisors,
    nearest_multiples,
    next_power_of_two,
    overlap_length,
    parse_frequency,
    updates_from_steps_per_execution,
    updates_per_event,
)

Warn = Callable[[str], None]
# The bits of seeds, and the modulus of the numbers of micro-batches, on which random masks depend.
SEED_MASK = 0x7FFFFFFF


_Self = TypeVar("_Self", bound="_Part")


class _Part:
    """A part of a Program, which is printed and saved as plain values."""

    def to_dict(self) -> PlainDict:
        """Returns all fields as plain values, ready for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Returns all fields as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls: Type[_Self], values: PlainDict) -> _Self:
        """Returns the part that values of :meth:`to_dict` or of a larger part describe.

        Raises:
            TypeError: a value is missing.
        """
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}  # type: ignore[arg-type]
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in known.items()})


@dataclass(frozen=True)
class BatchLayout(_Part):
    """The micro-batches of a weight update; options alone decide them.  Sizes are in samples."""

    micro_batch_size: int
    gradient_accumulation_count: int
    num_replicas: int
    global_batch_size: int
    gradient_accumulation_reduction_method: str
    dbn_replica_group_size: int

    @property
    def num_micro_batches(self) -> int:
        """Returns the micro-batches per weight update over all replicas."""
        return self.gradient_accumulation_count * self.num_replicas


@dataclass(frozen=True)
class PipelineLayout(_Part):
    """The stages of a replica and their IPUs; options alone decide them."""

    num_stages: int
    device_mapping: Tuple[int, ...]
    pipeline_schedule: str
    recomputation: bool
    available_memory_proportion: Tuple[float, ...]
    ipus_per_replica: int
    num_ipus: int


@dataclass(frozen=True)
class Layout(PipelineLayout, BatchLayout):
    """All that options alone decide: batch, pipeline, numbers, and changes to gradients, weights and images.

    Attributes:
        auto_loss_scaling: whether the loss scale is adjusted during training; ``loss_scaling`` is then not used.
        clip_gradient_norm, ema_decay, mixup, cutmix, random_erasing: 0 if off.
        warnings: remarks on the options, one line each.
    """

    precision: str
    loss_scaling: float
    auto_loss_scaling: bool
    clip_gradient_norm: float
    ema_decay: float
    mixup: float
    cutmix: float
    random_erasing: float
    warnings: Tuple[str, ...] = field(compare=False)


@dataclass(frozen=True)
class EpochPlan(_Part):
    """The weight updates, executions and events of a run, which depend on the number of training samples, too.

    Attributes:
        samples_padded_per_epoch: the samples of weight 0 that pad the last weight update of an epoch.
        executions_per_log: more than 1 if checkpoints, which end an execution, are more frequent than logs.
        executions_per_checkpoint, executions_per_validation: 0 if there are none.
        validation_num_replicas: the replicas of the validation model, in one process.
    """

    num_epochs: int
    weight_updates_per_epoch: int
    samples_per_epoch: int
    samples_discarded_per_epoch: int
    samples_padded_per_epoch: int
    weight_updates_per_execution: int
    steps_per_execution: int
    num_executions: int
    executions_per_log: int
    executions_per_checkpoint: int
    first_checkpoint_execution: int
    executions_per_validation: int
    validation_micro_batch_size: int
    validation_num_replicas: int
    seed: int

    @property
    def num_weight_updates(self) -> int:
        """Returns the weight updates of the whole run."""
        return self.weight_updates_per_epoch * self.num_epochs


@dataclass(frozen=True)
class Program(EpochPlan, Layout):
    """The arithmetic of a run: complete once options and data are known, before the network is built."""

    def samples_before(self, weight_updates: int) -> int:
        """Returns the samples in the first ``weight_updates`` weight updates, without padding."""
        epochs = weight_updates // self.weight_updates_per_epoch
        return weight_updates * self.global_batch_size - epochs * self.samples_padded_per_epoch

    @property
    def padding_scale(self) -> float:
        """Returns all samples of a padded weight update divided by those that are not padding."""
        return self.global_batch_size / max(self.global_batch_size - self.samples_padded_per_epoch, 1)


@dataclass(frozen=True)
class Layers(_Part):
    """What a run does with the layers of its network; the network decides it.

    Attributes:
        pipeline_splits: the layers that open the stages after the first.
        splits_from: the source of the splits: "given", "plan FILE", or "planned for SYSTEM"; empty without a pipeline.
        frozen_layers: the layers whose weights are not trained, in the network's order.
    """

    pipeline_splits: Tuple[str, ...]
    splits_from: str = field(compare=False)
    frozen_layers: Tuple[str, ...]


@dataclass(frozen=True)
class BuiltProgram(Layers, Program):
    """A Program, its network's layers, and the number of fused micro-batches of its device: what a session runs.

    ``program.json`` and checkpoints have it.
    """

    fused_micro_batches: int

    @classmethod
    def of(cls, program: Program, layers: Layers, fused_micro_batches: int) -> "BuiltProgram":
        """Returns the program of a built network."""
        return cls(**vars(program), **vars(layers), fused_micro_batches=fused_micro_batches)


def ipus_of_stages(
    pipeline_splits: Sequence[str], device_mapping: Sequence[int], ipus: Optional[int]
) -> Tuple[int, ...]:
    """Returns the IPU of each pipeline stage, counted from 0 within a replica.

    Raises:
        ConfigurationError: splits, mapping and IPUs imply different numbers of stages.
    """
    is_auto, mapping = tuple(pipeline_splits) == (AUTO,), tuple(device_mapping)
    splits = 0 if is_auto else len(pipeline_splits)
    if is_auto and ipus is None and not mapping:
        raise ConfigurationError(
            "--pipeline-splits auto, but nothing says how many stages there are",
            "add --ipus-per-replica K; `ipucnn plan-splits MODEL --ipus N` finds the best number",
        )
    if mapping and splits and len(mapping) != splits + 1:
        raise ConfigurationError(
            f"--device-mapping names {counted(len(mapping), 'stage')}, but there are {splits + 1} with "
            f"{counted(splits, 'pipeline split')}",
            f"give {splits + 1} numbers in --device-mapping",
        )
    mapping = mapping or tuple(range(splits + 1 if splits else ipus or 1))
    used = max(mapping) + 1
    if ipus not in (None, used):
        what, instead = f"--device-mapping, which uses {counted(used, 'IPU')}", ""
        if not device_mapping:
            what = f"{used} stages, opened by {counted(splits, 'pipeline split')}"
            instead = ", or --pipeline-splits auto"
        elif splits + 1 == ipus:
            instead = f", or --device-mapping {' '.join(map(str, range(ipus)))}"
        raise ConfigurationError(
            f"--ipus-per-replica {ipus} does not suit {what}",
            f"use --ipus-per-replica {used}{instead}",
        )
    if set(mapping) != set(range(used)):
        raise ConfigurationError(
            f"--device-mapping {' '.join(map(str, mapping))} leaves IPUs out",
            "number the IPUs of a replica from 0 without gaps, for example 0 1 1 0",
        )
    return mapping


def stage_proportions(percentages: Sequence[float], num_stages: int) -> Tuple[Tuple[float, float], ...]:
    """Returns the values of ``--available-memory-proportion`` for each pipeline stage.

    Args:
        percentages: the values of the option.
        num_stages: the number of pipeline stages.

    Returns:
        Each stage's shares of convolutions and of matrix products, in (0, 1]; empty if one value, or none, applies to
        all.

    Raises:
        ConfigurationError: the number of values does not fit the number of stages.
    """
    shares = [value / 100 for value in percentages]
    if len(shares) < 2:
        return ()
    if num_stages > 1 and len(shares) == num_stages:
        return tuple((share, share) for share in shares)
    if num_stages > 1 and len(shares) == 2 * num_stages:
        return tuple(zip(shares[0::2], shares[1::2]))
    raise ConfigurationError(
        f"--available-memory-proportion has {len(shares)} values for {counted(num_stages, 'stage')}",
        f"give 1, {num_stages} (per stage) or {2 * num_stages} (convolutions and matrix products of each stage)"
        if num_stages > 1
        else "give one value",
    )


def _check_auto_loss_scaling(config: RunConfig, warn: Warn) -> None:
    """Checks that automatic loss scaling comes with plain SGD at a constant rate, as in the public application.

    Raises:
        ConfigurationError: there are conflicting options; the message names all of them.
    """
    named, changes = auto_loss_scaling_conflicts(config)
    if named:
        raise ConfigurationError(
            f"--auto-loss-scaling does not go with {', '.join(named)}",
            f"use {' '.join(changes)}, or a loss scale of your own: --loss-scaling 128 --no-auto-loss-scaling",
        )
    if config.loss_scaling:
        warn(f"--loss-scaling {config.loss_scaling:g} is not used: --auto-loss-scaling finds the loss scale")


def auto_loss_scaling_conflicts(config: RunConfig) -> Tuple[Tuple[str, ...], Tuple[str, ...]]:
    """Returns the options that conflict with automatic loss scaling, and the replacement of each."""
    is_sgd, momentum = config.optimizer == "sgd", config.optimizer_params.get("momentum")
    plain = "--optimizer-params '{momentum: 0}'"  # also when changing the optimizer, as presets have momentum
    others = (
        (not is_sgd, f"--optimizer {config.optimizer}", f"--optimizer sgd {plain}"),
        (is_sgd and momentum, f"momentum {momentum}", plain),
        (config.weight_decay, f"--weight-decay {config.weight_decay:g}", "--weight-decay 0"),
        (config.lr_schedule != "const", f"--lr-schedule {config.lr_schedule}", "--lr-schedule const"),
        (config.lr_warmup_params, "--lr-warmup-params", "--lr-warmup-params none"),
    )
    conflicts = [other for other in others if other[0]]
    return tuple(what for _, what, _ in conflicts), tuple(instead for _, _, instead in conflicts)


def _replicas(config: RunConfig, ipus_per_replica: int, is_fixed: bool) -> int:
    """Returns the requested number of replicas, or the number that fills the requested IPUs.

    Raises:
        ConfigurationError: the IPUs are not a multiple of a replica's, or contradict the number of replicas.
    """
    ipus, replicas = config.ipus, config.num_replicas
    if ipus is None:
        return replicas
    if ipus % ipus_per_replica:
        raise ConfigurationError(
            f"--ipus {ipus} is not a multiple of the {counted(ipus_per_replica, 'IPU')} that one replica takes",
            f"use --ipus {alternatives(nearest_multiples(ipus, ipus_per_replica))}",
        )
    filled = ipus // ipus_per_replica
    if replicas != filled and (is_fixed or replicas > 1):
        raise ConfigurationError(
            f"--ipus {ipus} makes {counted(filled, 'replica')} of {counted(ipus_per_replica, 'IPU')}, but "
            f"--num-replicas is {replicas}",
            f"use --ipus {replicas * ipus_per_replica}, or --num-replicas {filled}",
        )
    return filled


def _accumulation(config: RunConfig, num_stages: int, num_replicas: int, warn: Warn) -> int:
    """Returns the requested gradient accumulation count, or the one nearest to the requested global batch.

    Raises:
        ConfigurationError: the schedule does not allow the count, or the global batch does not fit into 32 bits,
            although each of its factors may be legal.
    """
    size, count, batch = (
        config.micro_batch_size,
        config.gradient_accumulation_count,
        config.global_batch_size,
    )
    base, per_step = overlap_length(config.pipeline_schedule, num_stages), size * num_replicas
    rule = f"the {config.pipeline_schedule} schedule with {num_stages} stages needs a multiple of {base}"
    if count is not None and count % base:
        raise ConfigurationError(
            f"--gradient-accumulation-count {count} is not possible: {rule}",
            f"use --gradient-accumulation-count {alternatives(nearest_multiples(count, base))}",
        )
    if batch is not None:
        count = max(1, math.floor(Fraction(batch, per_step * base) + Fraction(1, 2))) * base
        if count * per_step != batch:
            because = f"; {rule}" if base > 1 else ""
            warn(
                f"global batch size {batch:,} is not a multiple of micro-batch {size:,} x "
                f"{counted(num_replicas, 'replica')}{because}: using {count * per_step:,} "
                f"(gradient accumulation count {count:,})"
            )
    count = count or base
    if count * per_step > MAX_COUNT:
        raise ConfigurationError(
            f"the global batch of {count * per_step:,} samples (micro-batch {size:,} x accumulation {count:,} x "
            f"{counted(num_replicas, 'replica')}) is above {MAX_COUNT:,}",
            f"lower --gradient-accumulation-count to {max(1, MAX_COUNT // per_step)} or less, or one of the others",
        )
    return count


def validation_replicas(
    in_pipeline: bool, num_replicas: int, ipus_per_replica: int, num_instances: int = 1
) -> int:
    """Returns the number of replicas of the validation model on the IPUs of training, in one process.

    The model has a pipeline as in training, or each IPU has the whole model.

    Args:
        in_pipeline: whether the model has a pipeline (``--pipeline-validation-model``).
        num_replicas: the number of replicas in training, over all processes.
        ipus_per_replica: the number of IPUs of a replica in training.
        num_instances: the number of processes of ``poprun``, which share the samples; each has its own IPUs.
    """
    whole = 1 if in_pipeline else ipus_per_replica
    return num_replicas * whole // num_instances


def evaluation_replicas(config: RunConfig) -> int:
    """Returns the replicas of a network that is evaluated by itself: without a pipeline, on the IPUs of training.

    Raises:
        ConfigurationError: the IPUs are not a multiple of a replica's, or contradict the number of replicas.
    """
    if config.validation_num_replicas is not None:
        return config.validation_num_replicas
    mapping = ipus_of_stages(config.pipeline_splits, config.device_mapping or (), config.ipus_per_replica)
    ipus_per_replica = next_power_of_two(max(mapping) + 1)
    return validation_replicas(False, _replicas(config, ipus_per_replica, False), ipus_per_replica)


def make_layout(config: RunConfig, is_num_replicas_typed: bool = False) -> Layout:
    """Returns all that options alone decide, without a data set.

    Args:
        config: the options.
        is_num_replicas_typed: whether a number of replicas that is the default may not be replaced either.

    Raises:
        ConfigurationError: a combination is illegal; the hint has the nearest legal values.
    """
    warnings: List[str] = []
    if config.auto_loss_scaling and config.precision != "32.32":  # in 32 bits a typed option is refused
        _check_auto_loss_scaling(config, warnings.append)
    mapping = ipus_of_stages(config.pipeline_splits, config.device_mapping or (), config.ipus_per_replica)
    stages, used = len(mapping), max(mapping) + 1
    if stages == 1 and config.recomputation:
        raise ConfigurationError(
            "--recomputation needs a pipeline: it recomputes stages",
            "add --ipus-per-replica 2, or --no-recomputation",
        )
    stage_proportions(config.available_memory_proportion, stages)
    ipus_per_replica = next_power_of_two(used)
    if ipus_per_replica != used:
        warnings.append(f"a replica of {used} IPUs occupies {ipus_per_replica}: IPUs come in powers of two")
    replicas = _replicas(config, ipus_per_replica, is_num_replicas_typed)
    accumulation = _accumulation(config, stages, replicas, warnings.append)
    check_distributed_batch_norm(config.dbn_replica_group_size, replicas, ipus_per_replica)
    return Layout(
        micro_batch_size=config.micro_batch_size,
        gradient_accumulation_count=accumulation,
        num_replicas=replicas,
        global_batch_size=config.micro_batch_size * accumulation * replicas,
        gradient_accumulation_reduction_method=config.gradient_accumulation_reduction_method,
        dbn_replica_group_size=config.dbn_replica_group_size,
        num_stages=stages,
        device_mapping=mapping,
        pipeline_schedule=config.pipeline_schedule,
        recomputation=config.recomputation,
        available_memory_proportion=tuple(config.available_memory_proportion),
        ipus_per_replica=ipus_per_replica,
        num_ipus=replicas * ipus_per_replica,
        precision=config.precision,
        loss_scaling=config.loss_scaling,
        auto_loss_scaling=config.auto_loss_scaling and config.precision != "32.32",
        clip_gradient_norm=config.clip_gradient_norm or 0.0,
        ema_decay=config.ema_decay or 0.0,
        mixup=config.mixup or 0.0,
        cutmix=config.cutmix or 0.0,
        random_erasing=config.random_erasing or 0.0,
        warnings=tuple(warnings),
    )


def make_program(config: RunConfig, num_samples: int, *, seed: int, num_instances: int = 1) -> Program:
    """Turns a configuration and a training-set size into the Program.

    Args:
        config: the configuration, whose options are valid one by one; combinations are checked here.
        num_samples: the number of training samples.
        seed: the run's seed (drawn by the caller if the configuration has none).
        num_instances: the number of processes of ``poprun`` that share the replicas.

    Raises:
        ConfigurationError: a combination is illegal; the hint has the nearest legal values.
    """
    layout = make_layout(config)
    warnings, size = list(layout.warnings), layout.global_batch_size
    per_epoch = config.weight_updates_per_epoch
    if per_epoch in (None, -1):
        # Whole weight updates: remaining samples are discarded, or padded to one more.  A prescribed number may exceed
        # the data set: another permutation of it then starts within the epoch.
        if num_samples < size and not config.pad_dataset:
            raise ConfigurationError(
                f"the global batch of {size:,} samples ({layout.micro_batch_size:,} x "
                f"{layout.gradient_accumulation_count:,} x {layout.num_replicas:,}) is larger than the training set of "
                f"{num_samples:,}",
                _smaller_batch(config, layout, num_samples),
            )
        per_epoch = max(1, -(-num_samples // size)) if config.pad_dataset else num_samples // size
    if per_epoch * config.num_epochs > MAX_COUNT:
        raise ConfigurationError(
            f"{config.num_epochs} epochs of {per_epoch} weight updates are {per_epoch * config.num_epochs}, and a run "
            f"has at most {MAX_COUNT}",
            f"use --num-epochs {MAX_COUNT // per_epoch} or less",
        )
    samples = num_samples if config.pad_dataset else per_epoch * size
    updates, per_log, per_checkpoint = _periods(config, layout, per_epoch, warnings.append)
    validation = 0
    if config.validation and config.validation_freq > 0:
        validation = max(1, round(Fraction(per_epoch, updates) * config.validation_freq))
    # The fields of the layout; its warnings are among those of this function.
    values: PlainDict = {**vars(layout), "warnings": tuple(warnings)}
    return Program(
        **values,
        num_epochs=config.num_epochs,
        weight_updates_per_epoch=per_epoch,
        samples_per_epoch=samples,
        samples_discarded_per_epoch=max(0, num_samples - samples),
        samples_padded_per_epoch=per_epoch * size - samples,
        weight_updates_per_execution=updates,
        steps_per_execution=updates * layout.gradient_accumulation_count,
        num_executions=per_epoch * config.num_epochs // updates,
        executions_per_log=per_log,
        executions_per_checkpoint=per_checkpoint,
        first_checkpoint_execution=int(-(-(config.first_ckpt_epoch * per_epoch) // updates)),
        executions_per_validation=validation,
        validation_micro_batch_size=config.validation_micro_batch_size or config.micro_batch_size,
        validation_num_replicas=config.validation_num_replicas
        or validation_replicas(
            config.pipeline_validation_model, layout.num_replicas, layout.ipus_per_replica, num_instances
        ),
        seed=seed,
    )


def _smaller_batch(config: RunConfig, layout: Layout, num_samples: int) -> str:
    """Returns the hint for a global batch that is larger than the data set.

    It suggests a smaller accumulation count if that is enough, else a smaller micro-batch, else fewer replicas.
    """
    base = overlap_length(layout.pipeline_schedule, layout.num_stages)
    size, replicas = layout.micro_batch_size, layout.num_replicas
    if num_samples < base:
        return f"take a larger data set: a weight update of this schedule takes at least {base:,} samples"
    options = []
    count = num_samples // (size * replicas * base) * base
    if not count:
        count, size = base, num_samples // (replicas * base)
        if not size:
            size, replicas = 1, num_samples // base
            if config.ipus is None or config.num_replicas > 1:
                options.append(f"--num-replicas {replicas}")
            if config.ipus is not None:
                options.append(f"--ipus {replicas * layout.ipus_per_replica}")
        options.append(f"--micro-batch-size {size}")
    if config.global_batch_size is not None:
        options.append(f"--global-batch-size {size * count * replicas}")
    elif count != layout.gradient_accumulation_count:
        options.append(f"--gradient-accumulation-count {count}")
    return f"use {' '.join(options)}, or less"


def _periods(config: RunConfig, layout: Layout, per_epoch: int, warn: Warn) -> Tuple[int, int, int]:
    """Returns the weight updates of an execution, and the executions from one log, and one checkpoint, to the next.

    An execution normally ends with a log.  If checkpoints are requested more often than logs, its length is the
    greatest common divisor of both periods, as in the public application (``program_steps.py``).  Without checkpoints
    their period is 0.

    Raises:
        ConfigurationError: a prescribed length, or the period of less than one log per epoch, does not divide the
            epochs evenly.
    """
    epochs, steps, total = config.num_epochs, config.steps_per_execution, per_epoch * config.num_epochs
    saves = Fraction(0)
    if config.checkpoints:
        saves = parse_frequency(1 if config.ckpts_per_epoch is None else config.ckpts_per_epoch)
    per_checkpoint = updates_per_event(per_epoch, epochs, saves) if saves else 0
    if steps is not None:
        count = layout.gradient_accumulation_count
        per_log = updates = updates_from_steps_per_execution(steps, count, per_epoch, epochs)
    else:
        logs = parse_frequency(config.logs_per_epoch)
        if 0 < logs < 1 and (logs * epochs).denominator != 1:
            possible = "".join(f" or 1/{d}" for d in divisors(epochs)[1:])
            raise ConfigurationError(
                f"it is not possible to log {_shown(1 / logs)} epochs at a time for {epochs} epochs",
                f"use --logs-per-epoch 1{possible}, or another --num-epochs",
            )
        per_log = updates = updates_per_event(per_epoch, epochs, logs) if logs else total
        if config.ckpts_per_epoch is not None and saves:
            updates = math.gcd(per_log, min(per_log, per_checkpoint))
        if not logs and updates == per_log:
            warn(
                f"--logs-per-epoch 0: the entire training run of {counted(total, 'weight update')} is one execution"
            )
        elif logs >= 1 and per_epoch != logs * per_log:
            warn(
                f"{_shown(logs)} logs per epoch are not possible with {counted(per_epoch, 'weight update')} per "
                f"epoch: logging {counted(per_epoch // per_log, 'time')} per epoch"
            )
        elif 0 < logs < 1 and total != logs * epochs * per_log:
            warn(
                f"{_shown(logs)} logs per epoch are not possible with {counted(total, 'weight update')} in "
                f"{counted(epochs, 'epoch')}: logging {counted(total // per_log, 'time')} in the run"
            )
    executions = 0
    if saves:
        exact = Fraction(per_epoch, updates) / saves
        # Executions that are shorter than logs are as short as checkpoints require.
        executions = per_checkpoint // updates if updates < per_log else max(1, round(exact))
        if executions != exact and config.ckpts_per_epoch is not None:
            warn(
                f"{float(saves):g} checkpoints per epoch do not fall on the end of an execution: "
                f"writing {float(Fraction(per_epoch, updates) / executions):.4g} per epoch"
            )
    return updates, per_log // updates, executions


def _shown(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
