"""Rules for options that have no effect in a run, or exclude each other: one table, checked before data is read.

An option without effect is refused if it is typed, so that users do not wait for its effect.  Presets, plans and saved
configurations also carry options for other runs, so their options are accepted.
"""

from typing import Callable, NamedTuple, Tuple, Union

from ipucnn.config.options import BY_NAME, SPECS, RunConfig
from ipucnn.config.resolve import FLAG, OF_16_BITS, Resolved
from ipucnn.config.values import norm_of
from ipucnn.errors import ConfigurationError
from ipucnn.runs.setup import loss_name
from ipucnn.sessions.factory import runs_on_ipus
from ipucnn.sessions.group import Mpi, ProcessGroup, find_instances, find_launched
from ipucnn.sessions.host.division import check_sharing
from ipucnn.training.program import Program, auto_loss_scaling_conflicts


class Facts(NamedTuple):
    """The facts that the rules depend on.

    Attributes:
        resolved: the configuration of the run, with the origin of each value, and the network.
        layout: batch, replicas and stages, from ``make_layout``.
    """

    resolved: Resolved
    layout: Program

    @property
    def on_ipus(self) -> bool:
        """Whether the run is on this machine's IPUs."""
        return runs_on_ipus(self.resolved.config.device)

    @property
    def segments(self) -> bool:
        """Whether the network predicts a class for each pixel."""
        return bool(self.resolved.record.task == "segmentation")


Test = Callable[[RunConfig, Facts], bool]
"""Decides from configuration and facts whether an obstacle applies."""


class Obstacle(NamedTuple):
    """A reason why options have no effect.

    Attributes:
        applies: the test for the reason.
        what: the text that follows the option in the error; ``{c}`` is the configuration.
        hint: the change that gives the option its effect; empty if there is none.
        is_lack: whether the error says "has no effect", and the hint begins with "drop it".
    """

    applies: Test
    what: Union[str, Callable[[RunConfig], str]]
    hint: Union[str, Callable[[RunConfig], str]] = ""
    is_lack: bool = True

    def error(self, option: str, config: RunConfig) -> ConfigurationError:
        """Returns the error for an option.

        Args:
            option: the option as it was typed.
            config: the configuration, which error and hint may name values of.
        """
        reason = self.what.format(c=config) if isinstance(self.what, str) else self.what(config)
        hint = self.hint if isinstance(self.hint, str) else self.hint(config)
        if not self.is_lack:
            return ConfigurationError(option + reason, hint)
        return ConfigurationError(
            f"{option} has no effect {reason}", f"drop it, or {hint}" if hint else "drop it"
        )


class Rule(NamedTuple):
    """Options, and the reasons why they may have no effect.

    Attributes:
        names: the options.
        obstacles: the reasons; the first that applies is reported.
        ipu_only: whether the rule holds only on IPUs.  On a CPU or GPU the options are recorded, and the run says so.
        has_off: whether the default, or False, switches the option off, so that it may be typed in every run.
        typed_only: whether values from a preset, a plan or a run are accepted.
    """

    names: Tuple[str, ...]
    obstacles: Tuple[Obstacle, ...]
    ipu_only: bool = False
    has_off: bool = True
    typed_only: bool = True


def _scaling_lack(config: RunConfig) -> str:
    named = auto_loss_scaling_conflicts(config)[0]
    return "in 32 bits" + (f", and does not go with {', '.join(named)}" if named else "")


def _scaling_hint(config: RunConfig) -> str:
    changes = auto_loss_scaling_conflicts(config)[1]
    return f"use --precision 16.16 {' '.join(changes)}" if changes else "use --precision 16.16 or 16.32"


_PIPELINE = Obstacle(
    lambda c, f: f.layout.num_stages == 1,
    "without a pipeline",
    "make one: --ipus-per-replica 2 --pipeline-splits auto",
)
_IN_PIPELINE = Obstacle(lambda c, f: f.layout.num_stages > 1, "in a pipeline")
# The SDK keeps the optimizer's state in remote memory only with gradient accumulation.
_ACCUMULATION = Obstacle(
    lambda c, f: f.layout.num_stages == f.layout.gradient_accumulation_count == 1,
    "without a pipeline or gradient accumulation",
    "use --gradient-accumulation-count 2 or more",
)
_REPLICAS = Obstacle(
    lambda c, f: f.layout.num_replicas == 1, "with one replica", "use --num-replicas 2 or more"
)
_PREPROCESSING = Obstacle(
    lambda c, f: not (c.eight_bit_transfer or c.accelerator_side_preprocess),
    "where the host preprocesses",
    "add --eight-bit-transfer or --accelerator-side-preprocess",
)
_RECOMPUTATION = Obstacle(
    lambda c, f: not c.recomputation, "without recomputation", "add --recomputation, in a pipeline"
)
_TRAINING = Obstacle(lambda c, f: not c.training, "with --no-training")
_VALIDATION = Obstacle(lambda c, f: not c.validation, "without validation", "drop --no-validation")
_CHECKPOINTS = Obstacle(lambda c, f: not c.checkpoints, "without checkpoints", "drop --no-checkpoints")
_WANDB = Obstacle(lambda c, f: not c.wandb, "without Weights & Biases", "add --wandb")
_DRY_RUN = Obstacle(lambda c, f: not c.dry_run, "in a run that trains", "add --dry-run")
_SHOWN = Obstacle(lambda c, f: c.dry_run, "with --dry-run")
_INSTANCES = Obstacle(
    lambda c, f: not find_instances().under_poprun, "without several instances", "start them with poprun"
)
_CHECKPOINT_DIR = Obstacle(
    lambda c, f: not c.checkpoint_dir, "without a folder for them", "add --checkpoint-dir DIR"
)
_WORKERS = Obstacle(
    lambda c, f: find_launched() is None,
    "in one process",
    "start several: mpiexec -n 2 ipucnn train ...",
)
_BATCH_NORM = Obstacle(lambda c, f: norm_of(c.norm_layer) != "batch", "with norm-layer {c.norm_layer[name]}")
_SAVED_STATISTICS = Obstacle(
    lambda c, f: not c.training, "with --no-training: checkpoints have the statistics that are evaluated"
)
_UNSEEN_STATISTICS = Obstacle(
    lambda c, f: not (c.validation or c.checkpoints), "without validation and checkpoints"
)
# In 32 bits nothing is rounded, and the SDK computes a loss scale only from 16-bit gradients.
_HALF = Obstacle(lambda c, f: c.precision == "32.32", "in 32 bits", "use --precision 16.16 or 16.32")
_HOST_SESSION = Obstacle(lambda c, f: True, "on IPUs: it is a choice of the host session")
_NO_IPU = Obstacle(
    lambda c, f: not f.on_ipus,
    "with --device {c.device}, which is no IPU here",
    "type it in the Poplar SDK's environment",
)
_COMPILES = Obstacle(lambda c, f: c.compile_only, "with --compile-only")
_ONE_IMAGE = Obstacle(
    lambda c, f: c.micro_batch_size == 1,
    "where --micro-batch-size is 1: it mixes the images of a micro-batch",
    "use --micro-batch-size 2 or more",
)
_MASKS = Obstacle(
    lambda c, f: f.segments,
    " is for classes, and {c.model_name} predicts one for each pixel",
    "drop it",
    is_lack=False,
)
_DICE = Obstacle(
    lambda c, f: loss_name(c, f.resolved.record.task) == "bce_dice",
    " with the bce_dice loss: Dice couples the samples of a micro-batch, padding too",
    "drop --pad-dataset, or use --loss cross_entropy",
    is_lack=False,
)
_NO_MASKS = Obstacle(
    lambda c, f: c.loss == "bce_dice" and not f.segments,
    " needs a segmentation network",
    "use --loss cross_entropy",
    is_lack=False,
)
_NO_IMAGENET = Obstacle(
    lambda c, f: c.weights == "imagenet" and f.resolved.record.keras_application is None,
    ": there are no ImageNet weights for {c.model_name}",
    "`ipucnn models --json` lists keras_application for the networks that have them",
    is_lack=False,
)
_OTHER_REPLICAS = Obstacle(
    lambda c, f: f.resolved.origins["num_replicas"] == FLAG and f.layout.num_replicas != c.num_replicas,
    " and --num-replicas {c.num_replicas} contradict each other",
    "give one of them",
    is_lack=False,
)

RULES: Tuple[Rule, ...] = (
    Rule(("mixup", "cutmix", "random_erasing"), (_MASKS,), typed_only=False),
    Rule(("loss",), (_NO_MASKS,), typed_only=False),
    Rule(("pad_dataset",), (_DICE,), typed_only=False),
    Rule(("weights",), (_NO_IMAGENET,), typed_only=False),
    Rule(("ipus",), (_OTHER_REPLICAS,)),
    Rule(("plot_schedule", "draw_samples"), (_DRY_RUN,)),
    Rule(("compile_only",), (_NO_IPU, _SHOWN), typed_only=False),
    # The driver aborts the process if there is no device of that number (poplar_executor.cc).
    Rule(("select_ipu",), (_COMPILES,), typed_only=False),
    Rule(("clean_dir",), (_CHECKPOINTS,)),
    Rule(("bn_momentum",), (_BATCH_NORM,), has_off=False),
    Rule(("dbn_replica_group_size",), (_BATCH_NORM,)),
    Rule(("precise_batch_norm",), (_SAVED_STATISTICS, _UNSEEN_STATISTICS, _BATCH_NORM)),
    Rule(tuple(name for name in OF_16_BITS if name != "auto_loss_scaling"), (_HALF,)),
    Rule(("auto_loss_scaling",), (_HALF._replace(what=_scaling_lack, hint=_scaling_hint),)),
    Rule(("target_accuracy", "early_stopping", "mlperf_logging"), (_TRAINING, _VALIDATION)),
    Rule(("mixup", "cutmix"), (_TRAINING,)),
    Rule(("mixup", "cutmix"), (_ONE_IMAGE,), typed_only=False),
    Rule(("clip_gradient_norm", "ema_decay", "random_erasing"), (_TRAINING,)),
    Rule(("wandb_run_name", "wandb_tags"), (_WANDB,)),
    Rule(("ckpt_all_instances",), (_INSTANCES, _CHECKPOINTS, _CHECKPOINT_DIR)),
    Rule(("reduction", "rank_timeout", "require_same_bytes"), (_WORKERS,)),
    Rule(("fused_preprocessing",), (_PREPROCESSING,), ipu_only=True),
    Rule(
        ("offload_activations", "offload_gradient_accumulation_buffers", "pipeline_schedule"),
        (_PIPELINE,),
        ipu_only=True,
    ),
    Rule(("recomputation_mode",), (_RECOMPUTATION,), ipu_only=True),
    Rule(("pipeline_validation_model",), (_PIPELINE, _VALIDATION), ipu_only=True),
    Rule(("optimizer_state_offloading",), (_ACCUMULATION,), ipu_only=True),
    Rule(("replicated_optimizer_state_sharding",), (_REPLICAS,), ipu_only=True),
    Rule(("accelerator_side_reduction",), (_IN_PIPELINE, _REPLICAS), ipu_only=True),
    Rule(tuple(spec.name for spec in SPECS if not spec.ipu_effect), (_HOST_SESSION,), ipu_only=True),
)


def check_rules(facts: Facts) -> None:
    """Refuses the first option that has no effect, or that another option excludes.

    Raises:
        ConfigurationError: such an option is set; the error names it and the reason.
    """
    config = facts.resolved.config
    for rule in RULES:
        for name in rule.names:
            spec, value = BY_NAME[name], getattr(config, name)
            # True counts as a request even if it is the default.
            is_off = rule.has_off and (value is False if spec.is_bool else value == spec.default)
            passes = rule.typed_only and facts.resolved.origins[name] != FLAG
            if is_off or passes or (rule.ipu_only and not facts.on_ipus):
                continue
            for obstacle in rule.obstacles:
                if obstacle.applies(config, facts):
                    option = spec.flag if spec.is_bool else f"{spec.flag} {spec.typed_text(value)}"
                    raise obstacle.error(option, config)


def check_group(group: ProcessGroup, config: RunConfig, draws: bool = True) -> None:
    """Refuses processes that cannot work together: on the wrong device, or without a common seed.

    Args:
        group: the group of processes.
        config: the configuration of the run.
        draws: whether weights or the order of data are drawn at random, which must be the same in all processes.

    Raises:
        ConfigurationError: the processes cannot work together.
    """
    if group.size == 1:
        return
    on_ipus = runs_on_ipus(config.device)
    if isinstance(group, Mpi) and on_ipus:
        raise ConfigurationError(
            f"{group.launched.text} of the host session, and this is an IPU's",
            "use --device cpu, or start instances for IPUs with poprun",
        )
    if not isinstance(group, Mpi) and not on_ipus:
        raise ConfigurationError(
            f"poprun started {group.size} instances, and only IPUs work together",
            "start it without poprun: one process has all replicas on a CPU or GPU",
        )
    if draws and config.seed is None:
        kind = "processes" if isinstance(group, Mpi) else "instances of poprun"
        raise ConfigurationError(f"{group.size} {kind} need the same seed, and none is given", "add --seed 1")


def refuse_instances(command: str) -> None:
    """Refuses ``poprun`` for a command that runs in one process.

    Raises:
        ConfigurationError: ``poprun`` started this process.
    """
    if find_instances().under_poprun:
        raise ConfigurationError(
            f"poprun started this, and `ipucnn {command}` works in one process",
            f"type it without poprun: ipucnn {command} ...",
        )


def check_workers(group: ProcessGroup, config: RunConfig, program: Program) -> None:
    """Refuses workers that cannot share a weight update, before TensorFlow is imported.

    Args:
        group: the group of processes.
        config: the configuration of the run.
        program: the Program, with the number of fused micro-batches if that is known.

    Raises:
        ConfigurationError: they cannot share it; the error lists the numbers of workers that can.
    """
    count = group.size if isinstance(group, Mpi) else 1
    # `--devices all` counts as 1: only TensorFlow can count the devices.
    devices = max(config.devices or 1, 1)
    check_sharing(program, config, count, devices)
