"""The Program: exactly what will execute, computed before anything does.

Both sessions take the same Program; it is printed, saved with the run as ``program.json`` and compared on
resume.  No TensorFlow here.
"""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import List, Sequence, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.config.options import AUTO, RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.text import counted
from ipucnn.training import batching as arithmetic
from ipucnn.training.batching import Batching, Warn


@dataclass(frozen=True)
class Program:
    """What executes. Counts are per run unless the name says otherwise; sizes in samples."""

    # Batch arithmetic
    micro_batch_size: int
    gradient_accumulation_count: int
    num_replicas: int
    global_batch_size: int
    gradient_accumulation_reduction_method: str
    dbn_replica_group_size: int
    # Epochs and executions
    num_epochs: int
    weight_updates_per_epoch: int
    samples_per_epoch: int
    samples_discarded_per_epoch: int
    weight_updates_per_execution: int
    steps_per_execution: int
    num_executions: int
    # Host events, in executions; 0: never
    executions_per_checkpoint: int
    first_checkpoint_execution: int
    executions_per_validation: int
    # Validation
    validation_micro_batch_size: int
    validation_num_replicas: int
    # Pipeline
    num_stages: int
    pipeline_splits: Tuple[str, ...]
    device_mapping: Tuple[int, ...]
    pipeline_schedule: str
    recomputation: bool
    available_memory_proportion: Tuple[float, ...]
    ipus_per_replica: int
    num_ipus: int
    # Numbers
    precision: str
    loss_scaling: float
    seed: int
    # The host's choice of how many micro-batches to compute as one (0: not chosen yet)
    fused_micro_batches: int = 0
    # Who chose the splits: "given", "plan FILE", or "planned for SYSTEM"; empty without a pipeline
    splits_from: str = field(default="", compare=False)
    # Samples of weight 0 that fill up the last weight update of each epoch (--pad-dataset)
    samples_padded_per_epoch: int = 0
    # More than 1 where checkpoints, which end an execution, are more frequent than logs
    executions_per_log: int = 1
    # In 16 bits the loss scale is found while training, and ``loss_scaling`` is not used
    auto_loss_scaling: bool = False
    # What is done to gradients, weights and images beyond the optimizer and the set's own augmentation; 0: not done
    clip_gradient_norm: float = 0.0
    ema_decay: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    random_erasing: float = 0.0
    # Layers whose weights stay as they are, in the network's order; empty until the network is known
    frozen_layers: Tuple[str, ...] = ()
    warnings: Tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_weight_updates(self) -> int:
        """Weight updates of the whole run."""
        return self.weight_updates_per_epoch * self.num_epochs

    def samples_before(self, weight_updates: int) -> int:
        """Samples that count in so many weight updates from the start; padding does not."""
        epochs = weight_updates // self.weight_updates_per_epoch
        return weight_updates * self.global_batch_size - epochs * self.samples_padded_per_epoch

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per weight update over all replicas."""
        return self.gradient_accumulation_count * self.num_replicas

    @property
    def batching(self) -> Batching:
        """The three factors of the global batch."""
        return Batching(self.micro_batch_size, self.gradient_accumulation_count, self.num_replicas)

    @property
    def layout(self) -> "Layout":
        """The part that needs no data set."""
        return Layout(
            self.batching, self.num_stages, self.device_mapping, self.ipus_per_replica, self.warnings
        )

    def with_splits(self, splits: Sequence[str], splits_from: str = "given") -> "Program":
        """The same program with the pipeline splits filled in (their number is checked), and who chose them."""
        if len(splits) != self.num_stages - 1:
            raise ValueError(f"{len(splits)} splits for {self.num_stages} stages")
        return replace(self, pipeline_splits=tuple(splits), splits_from=splits_from)

    def with_frozen(self, frozen_layers: Sequence[str]) -> "Program":
        """The same program with the layers filled in whose weights stay as they are."""
        return replace(self, frozen_layers=tuple(frozen_layers))

    def with_fused(self, fused_micro_batches: int) -> "Program":
        """The same program with the host's choice filled in."""
        return replace(self, fused_micro_batches=fused_micro_batches)

    def with_checked_fused(self, fused: int) -> "Program":
        """:meth:`with_fused` for a number that a user gave.

        Raises:
            ConfigurationError: it does not divide a weight update into whole groups of micro-batches.
        """
        group = self.dbn_replica_group_size
        legal = [d for d in arithmetic.divisors(self.num_micro_batches) if d % group == 0]
        if fused not in legal:
            near = sorted(sorted(legal, key=lambda d: (abs(d - fused), d))[:2])
            raise ConfigurationError(
                f"--fused-micro-batches {fused} does not divide the {self.num_micro_batches} micro-batches of "
                "a weight update into whole groups",
                "use --fused-micro-batches " + " or ".join(map(str, near)),
            )
        return self.with_fused(fused)

    def to_dict(self) -> PlainDict:
        """Plain values, ready for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """The program as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: PlainDict) -> "Program":
        """The inverse of :meth:`to_dict`; raises ``TypeError`` on unknown or missing keys."""
        fields: PlainDict = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


def _named_splits(config: RunConfig) -> Tuple[str, ...]:
    """The splits that the configuration names; none where the planner is to choose them."""
    return () if config.pipeline_splits == (AUTO,) else tuple(config.pipeline_splits)


def _stages(config: RunConfig) -> int:
    """Number of pipeline stages the configuration asks for."""
    splits = len(_named_splits(config))
    wanted = config.ipus_per_replica
    if config.pipeline_splits == (AUTO,) and wanted is None and not config.device_mapping:
        raise ConfigurationError(
            "--pipeline-splits auto, but nothing says how many stages there are",
            "add --ipus-per-replica K; `ipucnn plan-splits MODEL --ipus N` finds the best number",
        )
    if config.device_mapping:
        stages = len(config.device_mapping)
        if splits and splits + 1 != stages:
            raise ConfigurationError(
                f"--device-mapping names {counted(stages, 'stage')}, but there are {splits + 1} with "
                f"{counted(splits, 'pipeline split')}",
                f"give {splits + 1} numbers in --device-mapping",
            )
        if wanted not in (None, max(config.device_mapping) + 1):
            raise ConfigurationError(
                f"--ipus-per-replica {wanted} does not suit --device-mapping, which uses "
                f"{counted(max(config.device_mapping) + 1, 'IPU')}",
                f"use --ipus-per-replica {max(config.device_mapping) + 1}, or drop it",
            )
        return stages
    if splits:
        if wanted not in (None, splits + 1):
            raise ConfigurationError(
                f"--ipus-per-replica {wanted} does not suit {splits + 1} stages, opened by "
                f"{counted(splits, 'pipeline split')}",
                f"use --ipus-per-replica {splits + 1}, or drop --pipeline-splits to have them chosen",
            )
        return splits + 1
    return wanted or 1


def _mapping(config: RunConfig, num_stages: int) -> Tuple[int, ...]:
    mapping = tuple(config.device_mapping) if config.device_mapping else tuple(range(num_stages))
    used = sorted(set(mapping))
    if used != list(range(len(used))):
        raise ConfigurationError(
            f"--device-mapping {' '.join(map(str, mapping))} leaves IPUs out",
            "number the IPUs of a replica from 0 without gaps, for example 0 1 1 0",
        )
    return mapping


def _check_pipeline(config: RunConfig, num_stages: int) -> None:
    if num_stages == 1 and config.recomputation:
        raise ConfigurationError(
            "--recomputation needs a pipeline: it recomputes stages",
            "add --ipus-per-replica N or --pipeline-splits, or drop --recomputation",
        )
    stage_proportions(config.available_memory_proportion, num_stages)


def stage_proportions(percentages: Sequence[float], num_stages: int) -> Tuple[Tuple[float, float], ...]:
    """What ``--available-memory-proportion`` says of single pipeline stages.

    Returns:
        Shares of each stage's forward and backward pass, in (0, 1]; nothing where one value, or none, holds for all.

    Raises:
        ConfigurationError: values for another number of stages.
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


def _periods(
    config: RunConfig, updates_per_epoch: int, per_execution: int, executions_per_log: int, warn: Warn
) -> Tuple[int, int, int]:
    """(executions per checkpoint, first checkpoint execution, executions per validation)."""
    executions_per_epoch = Fraction(updates_per_epoch, per_execution)
    checkpoint = 0
    frequency = _checkpoint_frequency(config)
    if frequency > 0:
        exact = executions_per_epoch / frequency
        checkpoint = max(1, round(exact))
        if executions_per_log > 1:
            per_checkpoint = arithmetic.updates_per_event(updates_per_epoch, config.num_epochs, frequency)
            checkpoint = per_checkpoint // per_execution
        if checkpoint != exact and config.ckpts_per_epoch is not None:
            possible = float(executions_per_epoch / checkpoint)
            warn(
                f"{float(frequency):g} checkpoints per epoch do not fall on the end of an execution: "
                f"writing {possible:.4g} per epoch"
            )
    first = int(-(-(config.first_ckpt_epoch * updates_per_epoch) // per_execution))
    validation = 0
    if config.validation and config.validation_freq > 0:
        validation = max(1, round(executions_per_epoch * config.validation_freq))
    return checkpoint, first, validation


def _check_auto_loss_scaling(config: RunConfig, warn: Warn) -> None:
    """Automatic loss scaling goes with plain SGD at one learning rate, as in the public application.

    Raises:
        ConfigurationError: naming all that it does not go with.
    """
    if not config.auto_loss_scaling or config.precision == "32.32":
        return  # it has no effect in 32 bits, where it is refused if it was typed
    named, changes = auto_loss_scaling_conflicts(config)
    if named:
        raise ConfigurationError(
            f"--auto-loss-scaling does not go with {', '.join(named)}",
            f"use {' '.join(changes)}, or a loss scale of your own: --loss-scaling 128 --no-auto-loss-scaling",
        )
    if config.loss_scaling:
        warn(f"--loss-scaling {config.loss_scaling:g} is not used: --auto-loss-scaling finds the loss scale")


def auto_loss_scaling_conflicts(config: RunConfig) -> Tuple[Tuple[str, ...], Tuple[str, ...]]:
    """The options that automatic loss scaling does not go with, and what to give instead of each."""
    is_sgd, momentum = config.optimizer == "sgd", config.optimizer_params.get("momentum")
    plain = "--optimizer-params '{momentum: 0}'"  # beside another optimizer, too: presets have one
    others = (
        (not is_sgd, f"--optimizer {config.optimizer}", f"--optimizer sgd {plain}"),
        (is_sgd and momentum, f"momentum {momentum}", plain),
        (config.weight_decay, f"--weight-decay {config.weight_decay:g}", "--weight-decay 0"),
        (config.lr_schedule != "const", f"--lr-schedule {config.lr_schedule}", "--lr-schedule const"),
        (config.lr_warmup_params, "--lr-warmup-params", "--lr-warmup-params none"),
    )
    conflicts = [other for other in others if other[0]]
    return tuple(what for _, what, _ in conflicts), tuple(instead for _, _, instead in conflicts)


@dataclass(frozen=True)
class Layout:
    """What of a Program needs no data set: batch, pipeline and IPUs."""

    batching: Batching
    num_stages: int
    device_mapping: Tuple[int, ...]
    ipus_per_replica: int
    warnings: Tuple[str, ...]


def make_layout(config: RunConfig) -> Layout:
    """Checks and computes the part of the Program that needs no data set.

    Raises:
        ConfigurationError: an illegal combination, with the nearest legal values.
    """
    warnings: List[str] = []
    warn = warnings.append
    _check_auto_loss_scaling(config, warn)
    stages = _stages(config)
    _check_pipeline(config, stages)
    mapping = _mapping(config, stages)
    ipus_per_replica = arithmetic.next_power_of_two(max(mapping) + 1)
    if ipus_per_replica != max(mapping) + 1:
        warn(f"a replica of {max(mapping) + 1} IPUs occupies {ipus_per_replica}: IPUs come in powers of two")
    replicas = config.num_replicas
    if config.ipus is not None:
        filled = arithmetic.replicas_for_ipus(config.ipus, ipus_per_replica)
        if replicas not in (1, filled):
            raise ConfigurationError(
                f"--ipus {config.ipus} makes {counted(filled, 'replica')} of {counted(ipus_per_replica, 'IPU')}, but "
                f"--num-replicas is {replicas}",
                f"drop one of them, or use --ipus {replicas * ipus_per_replica}",
            )
        replicas = filled
    batch = arithmetic.make_batching(
        config.micro_batch_size,
        replicas,
        config.gradient_accumulation_count,
        config.global_batch_size,
        schedule=config.pipeline_schedule,
        num_stages=stages,
        warn=warn,
    )
    arithmetic.check_distributed_batch_norm(config.dbn_replica_group_size, replicas, ipus_per_replica)
    return Layout(batch, stages, mapping, ipus_per_replica, tuple(warnings))


def validation_replicas(
    config: RunConfig, num_replicas: int, ipus_per_replica: int, num_instances: int = 1
) -> int:
    """Replicas of the validation model on the IPUs that training has, in one process.

    The model has a pipeline as in training, or is whole on each IPU.

    Args:
        num_replicas: of training, in all processes.
        num_instances: processes of ``poprun``, which share the samples; each has IPUs of its own.
    """
    if config.pipeline_validation_model:
        return num_replicas // num_instances
    return num_replicas * ipus_per_replica // num_instances


def make_program(config: RunConfig, num_samples: int, *, seed: int, num_instances: int = 1) -> Program:
    """Turns a configuration and a training-set size into the Program.

    Args:
        config: validated option by option; combinations are checked here.
        num_samples: training samples.
        seed: the run's seed (drawn by the caller if the configuration has none).
        num_instances: processes of ``poprun`` that share the replicas.

    Raises:
        ConfigurationError: an illegal combination, with the nearest legal values.
    """
    layout = make_layout(config)
    batch, stages, replicas = layout.batching, layout.num_stages, layout.batching.num_replicas
    ipus_per_replica = layout.ipus_per_replica
    warnings = list(layout.warnings)
    warn = warnings.append
    epoch = arithmetic.make_epoch(
        num_samples,
        batch,
        config.weight_updates_per_epoch,
        config.pad_dataset,
        arithmetic.overlap_length(config.pipeline_schedule, stages),
        config.global_batch_size is not None,
    )
    arithmetic.check_length(epoch.weight_updates, config.num_epochs)
    updates, executions_per_log = _execution_length(config, batch, epoch.weight_updates, warn)
    checkpoint, first, validation = _periods(config, epoch.weight_updates, updates, executions_per_log, warn)
    return Program(
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_count=batch.gradient_accumulation_count,
        num_replicas=replicas,
        global_batch_size=batch.global_batch_size,
        gradient_accumulation_reduction_method=config.gradient_accumulation_reduction_method,
        dbn_replica_group_size=config.dbn_replica_group_size,
        num_epochs=config.num_epochs,
        weight_updates_per_epoch=epoch.weight_updates,
        samples_per_epoch=epoch.samples,
        samples_discarded_per_epoch=epoch.samples_discarded,
        samples_padded_per_epoch=epoch.samples_padded,
        weight_updates_per_execution=updates,
        executions_per_log=executions_per_log,
        auto_loss_scaling=config.auto_loss_scaling and config.precision != "32.32",
        steps_per_execution=updates * batch.gradient_accumulation_count,
        num_executions=epoch.weight_updates * config.num_epochs // updates,
        executions_per_checkpoint=checkpoint,
        first_checkpoint_execution=first,
        executions_per_validation=validation,
        validation_micro_batch_size=config.validation_micro_batch_size or batch.micro_batch_size,
        validation_num_replicas=config.validation_num_replicas
        or validation_replicas(config, replicas, ipus_per_replica, num_instances),
        num_stages=stages,
        pipeline_splits=_named_splits(config),
        device_mapping=layout.device_mapping,
        pipeline_schedule=config.pipeline_schedule,
        recomputation=config.recomputation,
        available_memory_proportion=tuple(config.available_memory_proportion),
        ipus_per_replica=ipus_per_replica,
        num_ipus=replicas * ipus_per_replica,
        precision=config.precision,
        loss_scaling=config.loss_scaling,
        seed=seed,
        clip_gradient_norm=config.clip_gradient_norm or 0.0,
        ema_decay=config.ema_decay or 0.0,
        mixup=config.mixup or 0.0,
        cutmix=config.cutmix or 0.0,
        random_erasing=config.random_erasing or 0.0,
        warnings=tuple(warnings),
    )


def _checkpoint_frequency(config: RunConfig) -> Fraction:
    """Checkpoints per epoch; 0 for none."""
    if not config.checkpoints:
        return Fraction(0)
    return arithmetic.parse_frequency(1 if config.ckpts_per_epoch is None else config.ckpts_per_epoch)


def _execution_length(
    config: RunConfig, batch: Batching, updates_per_epoch: int, warn: Warn
) -> Tuple[int, int]:
    """Weight updates of an execution, and executions from one log to the next.

    An execution ends with a log.  Where checkpoints were asked for more often than logs, it is as long as both allow:
    the greatest common divisor of both periods, as in the public application (``program_steps.py``).
    """
    epochs, steps = config.num_epochs, config.steps_per_execution
    if steps is not None:
        return arithmetic.updates_from_steps_per_execution(steps, batch, updates_per_epoch, epochs), 1
    frequency = arithmetic.parse_frequency(config.logs_per_epoch)
    warnings: List[str] = []
    per_log = updates = arithmetic.weight_updates_per_log(
        updates_per_epoch, epochs, frequency, warnings.append
    )
    checkpoints = _checkpoint_frequency(config)
    if config.ckpts_per_epoch is not None and checkpoints:
        per_checkpoint = arithmetic.updates_per_event(updates_per_epoch, epochs, checkpoints)
        if per_checkpoint < per_log:
            updates = math.gcd(per_log, per_checkpoint)
    # One log in all is one execution, and told of as such, unless checkpoints come between.
    for warning in warnings if frequency or updates == per_log else []:
        warn(warning)
    return updates, per_log // updates
