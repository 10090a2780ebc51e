"""Rules for options that have no effect in a run, or exclude each other, checked before data is read: a table for runs,
and one each for evaluations and exports.

An option without effect is refused if it is typed, so that users do not wait for its effect.  Presets, plans and saved
configurations also carry options for other runs, so their options are accepted.
"""

from dataclasses import replace
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import OF_16_BITS, Resolved
from ipucnn.config.rules import OF_PATCHES, OfTask, Rule, check_rules, task_rules
from ipucnn.config.values import norm_of
from ipucnn.errors import ConfigurationError
from ipucnn.runs.requests import IPU, EvaluateRequest, ExportRequest
from ipucnn.runs.runtimes import ONNX, TFLITE
from ipucnn.runs.setup import loss_name
from ipucnn.sessions.factory import runs_on_ipus
from ipucnn.sessions.group import Mpi, ProcessGroup
from ipucnn.sessions.host.division import check_sharing
from ipucnn.training.program import BatchLayout, Layout, auto_loss_scaling_conflicts


class RunFacts(NamedTuple):
    """The facts that the rules depend on.

    Attributes:
        resolved: the configuration of the run, with the origin of each value, and the network.
        layout: batch, replicas and stages, from ``make_layout``.
        group: the processes of the run.
    """

    resolved: Resolved
    layout: Layout
    group: ProcessGroup

    @property
    def on_ipus(self) -> bool:
        """Whether the run is on this machine's IPUs."""
        return runs_on_ipus(self.resolved.config.device)

    @property
    def segments(self) -> bool:
        """Whether the network predicts a class for each pixel."""
        return bool(self.resolved.record.task == "segmentation")


Reason = Rule[RunConfig, RunFacts]
"""A reason why options have no effect; :func:`_rules` makes it a rule about each of them."""


def _lack(applies: Callable[[RunConfig, RunFacts], bool], why: str, remedy: str = "") -> Reason:
    """Returns the reason why an option has no effect.

    Args:
        applies: function that decides whether it applies.
        why: the text that follows "has no effect".
        remedy: the change that gives the option its effect; empty if there is none.
    """
    hint = "{drop[it]}" + (f", or {remedy}" if remedy else "")
    return Rule(applies, "{option} has no effect " + why, hint)


def _on_ipus(reason: Reason) -> Reason:
    """Returns a reason that applies only on IPUs.  Elsewhere the options are recorded, and the run says so."""
    return replace(reason, applies=lambda c, f: f.on_ipus and reason.applies(c, f))


def _rules(
    names: Iterable[str], *reasons: Reason, has_off: bool = True, typed_only: bool = True
) -> List[Reason]:
    """Returns the rules about each of the options; see ``config.rules.Rule``."""
    return [
        replace(reason, option=name, has_off=has_off, typed_only=typed_only)
        for name in names
        for reason in reasons
    ]


def _scaling_texts(config: RunConfig, facts: RunFacts) -> Dict[str, str]:
    named, changes = auto_loss_scaling_conflicts(config)
    return {
        "also": f", and does not go with {', '.join(named)}" if named else "",
        "use": f"16.16 {' '.join(changes)}" if changes else "16.16 or 16.32",
    }


_PIPELINE = _lack(
    lambda c, f: f.layout.num_stages == 1,
    "without a pipeline",
    "make one: --ipus-per-replica 2 --pipeline-splits auto",
)
_IN_PIPELINE = _lack(lambda c, f: f.layout.num_stages > 1, "in a pipeline")
# The SDK keeps the optimizer's state in remote memory, and shares it out, only with gradient accumulation.
_ACCUMULATION = _lack(
    lambda c, f: f.layout.num_stages == f.layout.gradient_accumulation_count == 1,
    "without a pipeline or gradient accumulation",
    "use --gradient-accumulation-count 2 or more",
)
_REPLICAS = _lack(lambda c, f: f.layout.num_replicas == 1, "with one replica", "use --num-replicas 2 or more")
_PREPROCESSING = _lack(
    lambda c, f: not (c.eight_bit_transfer or c.accelerator_side_preprocess),
    "where the host preprocesses",
    "add --eight-bit-transfer or --accelerator-side-preprocess",
)
_RECOMPUTATION = _lack(
    lambda c, f: not c.recomputation, "without recomputation", "add --recomputation, in a pipeline"
)
_TRAINING = _lack(lambda c, f: not c.training, "with --no-training")
_VALIDATION = _lack(lambda c, f: not c.validation, "without validation", "{drop[validation]}")
_CHECKPOINTS = _lack(lambda c, f: not c.checkpoints, "without checkpoints", "{drop[checkpoints]}")
_WANDB = _lack(lambda c, f: not c.wandb, "without Weights & Biases", "add --wandb")
_DRY_RUN = _lack(lambda c, f: not c.dry_run, "in a run that trains", "add --dry-run")
_SHOWN = _lack(lambda c, f: c.dry_run, "with --dry-run")
_INSTANCES = _lack(
    lambda c, f: not f.group.under_poprun, "without several instances", "start them with poprun"
)
_CHECKPOINT_DIR = _lack(
    lambda c, f: not c.checkpoint_dir, "without a folder for them", "add --checkpoint-dir DIR"
)
_WORKERS = _lack(
    lambda c, f: not isinstance(f.group, Mpi),
    "in one process",
    "start several: mpiexec -n 2 ipucnn train ...",
)
_BATCH_NORM = _lack(lambda c, f: norm_of(c.norm_layer) != "batch", "with norm-layer {norm_layer[name]}")
_SAVED_STATISTICS = _lack(
    lambda c, f: not c.training, "with --no-training: checkpoints have the statistics that are evaluated"
)
_UNSEEN_STATISTICS = _lack(
    lambda c, f: not (c.validation or c.checkpoints), "without validation and checkpoints"
)
# In 32 bits nothing is rounded, and the SDK computes a loss scale only from 16-bit gradients.
_HALF = _lack(lambda c, f: c.precision == "32.32", "in 32 bits", "use --precision 16.16 or 16.32")
_HOST_SESSION = _lack(lambda c, f: True, "on IPUs: it is a choice of the host session")
_NO_IPU = _lack(
    lambda c, f: not f.on_ipus,
    "with --device {device}, which is no IPU here",
    "type it in the Poplar SDK's environment",
)
_COMPILES = _lack(lambda c, f: c.compile_only, "with --compile-only")
_CONSTANT = _lack(
    lambda c, f: c.lr_schedule == "const" and not c.lr_warmup_params,
    "where the learning rate is constant",
    "use --lr-schedule cosine",
)
_ONE_BATCH = _lack(
    lambda c, f: f.layout.gradient_accumulation_count == 1,
    "without gradient accumulation",
    "use --gradient-accumulation-count 2 or more",
)
_CLASSES = _lack(
    lambda c, f: not f.segments, "on a network that classifies: it leaves out images without a mask"
)
_OWN_MOMENTUM = _lack(
    lambda c, f: "momentum" in c.norm_layer, "beside the momentum {norm_layer[momentum]} of norm-layer"
)
_ONE_IMAGE = _lack(
    lambda c, f: c.micro_batch_size == 1,
    "where --micro-batch-size is 1: it mixes the images of a micro-batch",
    "use --micro-batch-size 2 or more",
)
_MASKS: Reason = Rule(
    lambda c, f: f.segments,
    "{option} is for classes, and {model_name} predicts one for each pixel",
    "{drop[it]}",
)
_DICE: Reason = Rule(
    lambda c, f: loss_name(c, f.resolved.record.task) == "bce_dice",
    "{option} with the bce_dice loss: Dice couples the samples of a micro-batch, padding too",
    "{drop[pad_dataset]}, or use --loss cross_entropy",
)
_RANDOM: Reason = Rule(
    lambda c, f: c.weights is None,
    "{option} without --weights: these layers would keep random numbers",
    "add --weights RUN, the run that they were trained in, or {drop[freeze]}",
)
_NO_IMAGENET: Reason = Rule(
    lambda c, f: c.weights == "imagenet" and f.resolved.record.keras_application is None,
    "{option}: there are no ImageNet weights for {model_name}",
    "`ipucnn models --json` lists keras_application for the networks that have them",
)

_SCALING = replace(
    _lack(_HALF.applies, "in 32 bits{also}", "use --precision {use}"),
    texts=_scaling_texts,
)

HOST_SESSION_RULES: Tuple[Reason, ...] = tuple(
    _rules((spec.name for spec in SPECS if not spec.ipu_effect), _on_ipus(_HOST_SESSION))
)
"""The rules about options that IPUs cannot use, whether they train or predict."""

RUN_RULES: Tuple[Reason, ...] = (
    *_rules(("mixup", "cutmix", "random_erasing", "class_weights"), _MASKS, typed_only=False),
    *_rules(("pad_dataset",), _DICE, typed_only=False),
    *_rules(("weights",), _NO_IMAGENET, typed_only=False),
    *_rules(("freeze",), _RANDOM, typed_only=False),
    *_rules(("plot_schedule", "draw_samples"), _DRY_RUN),
    *_rules(("compile_only",), _NO_IPU, _SHOWN, typed_only=False),
    # The driver aborts the process if there is no device of that number (poplar_executor.cc).
    *_rules(("select_ipu",), _COMPILES, typed_only=False),
    *_rules(
        ("clean_dir", "checkpoint_dir", "ckpts_per_epoch", "first_ckpt_epoch", "keep_checkpoints"),
        _CHECKPOINTS,
    ),
    *_rules(("validation_freq",), _VALIDATION),
    *_rules(("bn_momentum",), _BATCH_NORM, _OWN_MOMENTUM, has_off=False),
    *_rules(("dbn_replica_group_size",), _BATCH_NORM),
    *_rules(("precise_batch_norm",), _SAVED_STATISTICS, _UNSEEN_STATISTICS, _BATCH_NORM),
    *_rules((name for name in OF_16_BITS if name != "auto_loss_scaling"), _HALF),
    *_rules(("auto_loss_scaling",), _SCALING),
    *_rules(("target_accuracy", "early_stopping", "mlperf_logging"), _TRAINING, _VALIDATION),
    *_rules((spec.name for spec in SPECS if spec.updates_only), _TRAINING),
    *_rules(("mixup", "cutmix"), _ONE_IMAGE, typed_only=False),
    *_rules(("lr_staircase",), _CONSTANT),
    *_rules(("gradient_accumulation_reduction_method",), _ONE_BATCH),
    *_rules(("allow_partial",), _CLASSES),
    *_rules(("pipeline_schedule",), _PIPELINE),
    *_rules(("wandb_run_name", "wandb_tags"), _WANDB),
    *_rules(("ckpt_all_instances",), _INSTANCES, _CHECKPOINTS, _CHECKPOINT_DIR),
    *_rules(("reduction", "rank_timeout", "require_same_bytes"), _WORKERS),
    *_rules(("fused_preprocessing",), _on_ipus(_PREPROCESSING)),
    *_rules(
        ("offload_activations", "offload_gradient_accumulation_buffers"),
        _on_ipus(_PIPELINE),
    ),
    *_rules(("recomputation_mode",), _on_ipus(_RECOMPUTATION)),
    *_rules(("pipeline_validation_model",), _on_ipus(_PIPELINE), _on_ipus(_VALIDATION)),
    *_rules(("optimizer_state_offloading",), _on_ipus(_ACCUMULATION)),
    *_rules(("replicated_optimizer_state_sharding",), _on_ipus(_REPLICAS), _on_ipus(_ACCUMULATION)),
    *_rules(("accelerator_side_reduction",), _on_ipus(_IN_PIPELINE), _on_ipus(_REPLICAS)),
    *HOST_SESSION_RULES,
)


EVALUATION_RULES: Tuple[Rule[EvaluateRequest, OfTask], ...] = tuple(
    task_rules(
        ("predictions", "--predictions", False), ("contact_sheet", "--contact-sheet", True), *OF_PATCHES
    )
)

_FOR_IPUS = "the program for an IPU is the network itself, from images in its range to logits"
EXPORT_RULES: Tuple[Rule[ExportRequest, None], ...] = (
    Rule(
        lambda request, _: request.form == IPU and request.raw_uint8,
        f"--raw-uint8: {_FOR_IPUS}",
        "drop --raw-uint8; input.json says how images are brought to the range",
    ),
    Rule(
        lambda request, _: request.form == IPU and request.probabilities,
        f"--probabilities: {_FOR_IPUS}",
        "drop --probabilities",
    ),
    Rule(
        lambda request, _: request.form == IPU and request.batch is None,
        "--format ipu: the program for an IPU is compiled for one number of images, and --batch gives none",
        "add for example --batch 8",
    ),
    Rule(
        lambda request, _: request.opset is not None and request.form != ONNX,
        "--opset {opset}: only ONNX files have one",
        "drop it, or --format onnx",
    ),
    Rule(
        lambda request, _: request.half and request.form not in (ONNX, TFLITE),
        "--half: weights of 16 bits can be written as onnx and tflite, not as {form}",
        "drop it, or --format onnx",
    ),
    Rule(
        lambda request, _: request.int8 and request.form != TFLITE,
        "--int8: networks of 8-bit integers can be written as tflite, not as {form}",
        "drop it, or --format tflite",
    ),
    Rule(
        lambda request, _: request.int8 and request.half,
        "--int8 --half: the weights are stored in 8 or in 16 bits",
        "drop one of them",
    ),
)


def check_run_rules(facts: RunFacts, rules: Sequence[Reason] = RUN_RULES) -> None:
    """Refuses the first option that has no effect, or that another option excludes.

    Args:
        facts: the facts that the rules depend on.
        rules: those of training, or those that hold for what is done instead.

    Raises:
        ConfigurationError: such an option is set; the error names it and the reason.
    """
    resolved = facts.resolved
    loss_name(resolved.config, resolved.record.task)  # refuses a loss for another task
    check_rules(rules, resolved.config, facts, resolved.origins, resolved.command)


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


def check_workers(
    group: ProcessGroup, config: RunConfig, batch: BatchLayout, fused: Optional[int] = None
) -> None:
    """Refuses workers that cannot share a weight update, before TensorFlow is imported.

    Args:
        group: the group of processes.
        config: the configuration of the run.
        batch: the micro-batches of a weight update.
        fused: the number of fused micro-batches; None: it is not fixed.

    Raises:
        ConfigurationError: they cannot share it; the error lists the numbers of workers that can.
    """
    # `--devices all` counts as 1: only TensorFlow can count the devices.
    devices = max(config.devices or 1, 1)
    check_sharing(batch, config, group.num_workers, devices, fused)
