"""From a resolved configuration to what a session runs on: the data set, the shapes, and how the network is built.

Everything up to :func:`build` and :func:`evaluation_batches` is done without TensorFlow, so that a wrong option or a
damaged data set is told of at once.  At the end stands what is refused before data is read: options without effect,
and what no device here can do.
"""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

import numpy as np

from ipucnn.aliases import KerasModel, TfDataset
from ipucnn.config.options import BY_NAME, SPECS, RunConfig
from ipucnn.config.resolve import FLAG, OF_16_BITS, Resolved
from ipucnn.config.values import CUSTOM_EPSILON, moves_once, norm_of
from ipucnn.datasets.base import DatasetInfo, DataSource, FileExamples
from ipucnn.datasets.damaged import refuse_damaged
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.models.registry import ModelRecord
from ipucnn.python_files import is_python_name
from ipucnn.sessions.factory import runs_on_ipus
from ipucnn.sessions.host.workers import Workers, check_share, check_sharing, find_workers
from ipucnn.sessions.poplar.popdist import Instances, find_instances
from ipucnn.sessions.session import Session
from ipucnn.text import counted, size_text
from ipucnn.training.program import Layout, Program, auto_loss_scaling_conflicts, make_layout
from ipucnn.training.schedules import make_schedule

if TYPE_CHECKING:
    from ipucnn.models.build import BuildOptions


InputShape = Tuple[int, int, int]
"""(height, width, channels)."""


@dataclass(frozen=True)
class Setup:
    """A run's data and shapes, before TensorFlow is imported.

    Attributes:
        resolved: configuration, model record, data set choice.
        source: the opened data set.
        input_shape: (height, width, channels) the network is built for.
        output_shape: (height, width) of a segmentation network's logits, None for classification.
        seed: of the run.
        input_range: the range of the images that the input pipeline delivers: the network's, or "raw" where the
            session brings them to it.
    """

    resolved: Resolved
    source: DataSource
    input_shape: InputShape
    output_shape: Optional[Tuple[int, int]]
    seed: int
    input_range: str

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.resolved.config

    @property
    def record(self) -> ModelRecord:
        """The model's registry record."""
        record: ModelRecord = self.resolved.record
        return record

    @property
    def own_files(self) -> List[str]:
        """The options that name the user's own Python files: none is run again that a command line does not name."""
        dataset, own = self.config.dataset, self.record.own
        words = ["--dataset", dataset] if dataset is not None and is_python_name(dataset) else []
        return [*words, "--model-name", own.name] if own is not None and own.has_own_code else words


SomeSetup = TypeVar("SomeSetup", bound=Setup)


def move_preprocessing(setup: SomeSetup, session: Session) -> SomeSetup:
    """The setup with the last step of preprocessing left to the session, if the configuration says so and it can.

    Raises:
        ConfigurationError: the network's range cannot be made in the one operation that was asked for.
    """
    from ipucnn.datasets.preprocessing import channel_affine

    affine = channel_affine(setup.input_range, setup.source.info, setup.input_shape[2])
    return replace(setup, input_range="raw") if session.take_preprocessing(affine) else setup


def input_range(config: RunConfig, record: ModelRecord) -> str:
    """The range of the images that a network is trained with, one of ``preprocessing.INPUT_RANGES``.

    Raises:
        ConfigurationError: images of a segmentation network by themselves: it sees tiles of them.
    """
    if config.normalise == "network":
        return record.input_range
    if record.task == "segmentation":
        raise ConfigurationError(
            f"--normalise {config.normalise}: {record.name} sees tiles, not whole images", "drop it"
        )
    return config.normalise


def input_shape_for(record: ModelRecord, image_shape: Sequence[Optional[int]]) -> InputShape:
    """The input of a network without ``--image-size``: the data set's size, at least the network's smallest.

    Data sets of many sizes take the network's own size, as its home data set does.  Of a network of one's own the
    data decide what it leaves open, the channels too.
    """
    height, width = image_shape[0], image_shape[1]
    if record.own is not None:
        shape = zip(record.own.input_shape, image_shape, record.input_shape)
        height, width, channels = (own or given or usual for own, given, usual in shape)
        return int(height), int(width), int(channels)
    if height is None or width is None:
        return record.input_shape
    return max(height, record.min_size), max(width, record.min_size), record.input_shape[2]


def _largest_tile(record: ModelRecord, side: int) -> int:
    """The largest legal input whose output lies within ``side`` pixels; the smallest legal one if none does."""
    margin = int(record.builder_args.get("margin", 0))
    largest = record.min_size
    for size in range(record.min_size, side + margin + 1):
        if (size - record.size_offset) % record.size_step == 0:
            largest = size
    return largest


def tile_shape_for(record: ModelRecord, image_shape: Sequence[Optional[int]]) -> InputShape:
    """The input of a network for tiles of images without ``--image-size``: its own size, or less for small images, and
    the images' channels."""
    sides = [
        min(own, _largest_tile(record, int(side or 0)))
        for own, side in zip(record.input_shape, image_shape[:2])
    ]
    return sides[0], sides[1], image_shape[2] or record.input_shape[2]


def _check_tile(record: ModelRecord, info: DatasetInfo, shape: Sequence[int], outputs: Sequence[int]) -> None:
    """Refuses images smaller than what the network predicts of a tile.

    Raises:
        DataError: they are.
    """
    for axis, image, inner, full in zip(("high", "wide"), info.image_shape, outputs, shape):
        if image is not None and image < inner:
            smaller = _largest_tile(record, image)
            raise DataError(
                f"the images of {info.name} are {image} pixels {axis}, and the network predicts the inner {inner} "
                f"of its {full}",
                f"--image-size {smaller} or less"
                if smaller < full
                else "the data set's images are too small",
            )


def _fold(source: DataSource, config: RunConfig, seed: int) -> DataSource:
    """A fold of a data set; limits keep some of the fold's own examples."""
    from ipucnn.datasets.base import limit_source, select_fold

    assert config.kfold is not None and config.fold is not None
    fold = select_fold(source, config.kfold, config.fold)
    return limit_source(fold, config.limit_train, config.limit_eval, seed)


def prepare(
    resolved: Resolved,
    seed: int,
    trained_shape: Optional[InputShape] = None,
    source: Optional[DataSource] = None,
) -> Setup:
    """Opens the data set and fixes the shapes.

    Args:
        resolved: the configuration.
        seed: of generated sets and of which samples a limit keeps.
        trained_shape: the input shape of a trained network, which then holds whatever the options say.
        source: an opened data set to take in place of the chosen one.

    Raises:
        ConfigurationError: an image size the network cannot take.
        DataError: files absent or damaged.
    """
    from ipucnn.datasets.registry import DATASETS, check_divides, known_as, open_dataset
    from ipucnn.models.registry import output_shape, validate_input_shape

    config, record = resolved.config, resolved.record
    wanted = trained_shape
    if wanted is None and config.image_size is not None:
        wanted = (*config.image_size, record.input_shape[2])
        if record.own is None:  # of which the data say the channels
            validate_input_shape(record, wanted)
    if source is None:
        if resolved.origins["validation_fraction"] == FLAG:
            check_divides(resolved.choice, config.validation_fraction)
        folded = config.kfold is not None and config.fold is not None
        if resolved.command != "train" and resolved.origins["dataset"] == FLAG:
            # The folds are those of the data set that the network was trained on: of another one all is taken.
            folded = False
        known = DATASETS.get(known_as(resolved.choice.like or "") or "")
        source = open_dataset(
            resolved.choice,
            download=config.download,
            limit_train=None if folded else config.limit_train,
            limit_eval=None if folded else config.limit_eval,
            seed=seed,
            image_shape=wanted or (known and known.image_shape) or record.input_shape,
            num_classes=(known and known.num_classes) or record.num_classes,
            max_image_pixels=config.max_image_pixels,
            validation_fraction=config.validation_fraction,
            allow_partial=config.allow_partial,
            skip_damaged=config.skip_damaged,
            # A weight update's at least: whatever the batch is, there is noise for it.
            least_train=make_layout(config).batching.global_batch_size if config.synthetic_data else 0,
        )
        if resolved.origins["skip_damaged"] == FLAG and not isinstance(source.train, FileExamples):
            raise ConfigurationError(
                f"--skip-damaged has no effect: {resolved.choice.name} is no folder of image files", "drop it"
            )
        if not config.skip_damaged:
            refuse_damaged(source)
        if folded:
            source = _fold(source, config, seed)
    if wanted is not None:
        shape = wanted
        if record.own is not None and trained_shape is None:
            shape = (*wanted[:2], input_shape_for(record, source.info.image_shape)[2])
    elif source.info.tiled and resolved.choice.name != record.home_dataset:
        shape = tile_shape_for(record, source.info.image_shape)
    elif resolved.choice.name == record.home_dataset:
        shape = record.input_shape
    else:
        shape = input_shape_for(record, source.info.image_shape)
    if source.info.tiled:
        channels = source.info.image_shape[2]
        if trained_shape is not None and trained_shape[2] != channels:
            kinds = ["grey" if n == 1 else "colour" for n in (channels, trained_shape[2])]
            raise DataError(
                f"the images of {source.info.name} are {kinds[0]}, and the network was trained on {kinds[1]} ones",
                f"take {kinds[1]} images, or train on {kinds[0]} ones",
            )
        shape = (*shape[:2], channels)
    validate_input_shape(record, shape)
    outputs = output_shape(record, shape) if record.task == "segmentation" else None
    if source.info.tiled and outputs is not None:
        _check_tile(record, source.info, shape, outputs)
    return Setup(resolved, source, shape, outputs, seed, input_range(config, record))


def build_options(setup: Setup) -> "BuildOptions":
    """The ``BuildOptions`` of a run, checked as far as that is possible without TensorFlow.

    Raises:
        ConfigurationError: an option the network can't have.
    """
    classes = setup.source.info.num_classes
    return network_options(setup.record, setup.config, setup.input_shape, classes, setup.seed)


def network_options(
    record: ModelRecord, config: RunConfig, input_shape: InputShape, num_classes: int, seed: int = 0
) -> "BuildOptions":
    """The ``BuildOptions`` of a configuration, for whatever input and classes.

    Raises:
        ConfigurationError: an option the network can't have.
    """
    from ipucnn.models.build import BuildOptions, check_options
    from ipucnn.planning.graphs.extract import check_weights_fit

    norm: Dict[str, Any] = dict(config.norm_layer)
    options = BuildOptions(
        input_shape=input_shape,
        num_classes=num_classes,
        norm=norm_of(norm),
        norm_momentum=float(norm.get("momentum", config.bn_momentum)),
        norm_epsilon=norm.get("epsilon", CUSTOM_EPSILON if moves_once(norm) else None),
        norm_moves_once=moves_once(norm),
        norm_groups=norm.get("num_groups"),
        norm_channels_per_group=norm.get("channels_per_group"),
        dropout=config.dropout,
        base_filters=config.base_filters,
        seed=seed,
    )
    check_options(record, options)
    check_weights_fit(record, options)
    return options


def learning_rates(config: RunConfig, program: Program) -> Callable[[np.ndarray], np.ndarray]:
    """Weight updates (int array) -> learning rates of a training run.

    Raises:
        ConfigurationError: parameters that the schedule does not have.
    """
    return make_schedule(
        config.lr_schedule,
        config.lr_schedule_params,
        global_batch_size=program.global_batch_size,
        weight_updates_per_epoch=program.weight_updates_per_epoch,
        num_epochs=program.num_epochs,
        learning_rate=config.learning_rate,
        warmup=config.lr_warmup_params,
        staircase=config.lr_staircase,
    )


def build(setup: Setup) -> "KerasModel":
    """Builds the model of a run (imports TensorFlow)."""
    from ipucnn.models.build import build_model

    return build_model(setup.record, build_options(setup))


def loss_name(config: RunConfig, task: str) -> str:
    """The loss ``auto`` stands for, checked against the task.

    Raises:
        ConfigurationError: a Dice loss for classification.
    """
    if config.loss == "auto":
        return "bce_dice" if task == "segmentation" else "cross_entropy"
    if config.loss == "bce_dice" and task != "segmentation":
        raise ConfigurationError("--loss bce_dice needs a segmentation network", "use --loss cross_entropy")
    return config.loss


def check_padding(config: RunConfig, loss: str) -> None:
    """Refuses a padded data set where padding would change the loss.

    Raises:
        ConfigurationError: the loss is a Dice loss.
    """
    if config.pad_dataset and loss == "bce_dice":
        raise ConfigurationError(
            "--pad-dataset with the bce_dice loss: Dice couples the samples of a micro-batch, padding too",
            "drop --pad-dataset, or use --loss cross_entropy",
        )


def training_batches(
    setup: Setup, program: Program, first_update: int, samples_per_element: int, shard: Tuple[int, int]
) -> "TfDataset":
    """Training batches without end from a weight update on, as sessions ask for them.

    Args:
        program: says how many samples an epoch has.
        first_update: the weight update to begin with.
        samples_per_element: of each batch.
        shard: (count, index) of the instances that train together.
    """
    from ipucnn.datasets.mixing import Mixing
    from ipucnn.datasets.pipeline import Stream, constant_batch, train_batches

    config = setup.config
    epoch, update = divmod(first_update, program.weight_updates_per_epoch)
    if config.synthetic_data == "ipu":
        epoch = update = 0  # the same batch, wherever training begins
    mixing = None
    if config.mixup or config.cutmix or config.random_erasing:
        mixing = Mixing(
            program.micro_batch_size,
            setup.source.info.num_classes,
            config.mixup or 0.0,
            config.cutmix or 0.0,
            config.random_erasing,
        )
    batches = train_batches(
        setup.source,
        Stream(
            batch_size=samples_per_element,
            # Padding is taken from a further permutation of the epoch.
            samples_per_epoch=program.samples_per_epoch + program.samples_padded_per_epoch,
            weigh_padding=program.samples_padded_per_epoch > 0,
            input_shape=setup.input_shape,
            input_range=setup.input_range,
            augment=config.augment,
            seed=setup.seed,
            start_epoch=epoch,
            start_sample=update * program.global_batch_size,
            shuffle=config.shuffle,
            num_parallel=config.pipeline_num_parallel,
            output_shape=setup.output_shape,
            shard=shard,
            mixing=mixing,
        ),
    )
    return constant_batch(batches) if config.synthetic_data == "ipu" else batches


# Training images that --precise-batch-norm measures over, where one batch is not more.
STATISTICS_SAMPLES = 1024


def statistics_batches(setup: Setup) -> Tuple["TfDataset", int, int]:
    """The training images that batch norm's statistics are measured over: the same ones each time, drawn with the seed.

    Returns:
        The batches, how many there are, and of how many images each.

    Raises:
        ConfigurationError: one batch alone is too much for the host's memory.
    """
    from ipucnn.datasets.pipeline import Stream, train_batches

    num_images = len(setup.source.train)
    size = min(setup.config.precise_batch_norm, num_images)
    _check_fits(size, setup.input_shape, "--precise-batch-norm")
    count = max(1, min(num_images, STATISTICS_SAMPLES) // size)
    batches = train_batches(
        setup.source,
        Stream(
            batch_size=size,
            samples_per_epoch=size * count,
            input_shape=setup.input_shape,
            input_range=setup.input_range,
            augment=False,
            seed=setup.seed,
            num_parallel=setup.config.pipeline_num_parallel,
            output_shape=setup.output_shape,
        ),
    )
    return batches.take(count), count, size


def evaluation_batches(setup: Setup, batch_size: int, session: Optional[Session] = None) -> "TfDataset":
    """The evaluation set in fixed shapes of at least ``batch_size``: whole multiples, for the host's speed.

    Args:
        session: that evaluates: of its share alone images are read; None: of all of them.

    Raises:
        ConfigurationError: one batch alone is too much for the host's memory.
    """
    from ipucnn.datasets.pipeline import eval_batches, num_evaluation_samples

    _check_fits(batch_size, setup.input_shape, "--validation-micro-batch-size")
    pixels = setup.input_shape[0] * setup.input_shape[1]
    samples = num_evaluation_samples(
        setup.source.eval, setup.source.info, setup.output_shape or setup.input_shape, setup.record.size_step
    )
    wanted = max(1, min(128, 128 * 64 * 64 // pixels, samples))
    return eval_batches(
        setup.source.eval,
        setup.source.info,
        batch_size=batch_size * max(1, wanted // batch_size),
        input_shape=setup.input_shape,
        input_range=setup.input_range,
        output_shape=setup.output_shape,
        num_parallel=setup.config.pipeline_num_parallel,
        tile_step=setup.record.size_step,
        shard=(1, 0) if session is None else session.evaluation_shard,
        part=(1, 0) if session is None else session.evaluation_part,
    )


def _check_fits(batch_size: int, input_shape: InputShape, flag: str) -> None:
    """Refuses batches that surely do not fit, rather than making them smaller: an IPU is to run what was asked for."""
    from ipucnn.machine import host_memory_bytes

    memory_bytes = host_memory_bytes()
    # One batch that is computed and two that wait for it, float32.
    sample_bytes = 3 * 4 * input_shape[0] * input_shape[1] * input_shape[2]
    needed_bytes = batch_size * sample_bytes
    if memory_bytes and needed_bytes > memory_bytes:
        raise ConfigurationError(
            f"batches of {counted(batch_size, 'image')} need {size_text(needed_bytes)}, and the machine has "
            f"{size_text(memory_bytes)}",
            f"lower {flag}; at the very most {counted(memory_bytes // sample_bytes, 'image')} fit",
        )


# --- what is refused before data is read
#
# An option that is typed and would reach nothing is refused, so that nobody waits for its effect.  That holds only for
# what is typed: presets, plans and saved configurations carry options for other runs, too.

# What a run lacks, to follow "has no effect", and how it gets that ("": it cannot); None where nothing is lacking.
Lack = Optional[Tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    """One option that needs another.

    Attributes:
        name: the option.
        lacks: (config, layout) -> what the run lacks for it.
        ipu_only: the rule is about IPUs.  Elsewhere the option is recorded for them, which the run says.
        has_off: its default, or False, asks for nothing, and may be typed anywhere.
    """

    name: str
    lacks: Callable[[RunConfig, Layout], Lack]
    ipu_only: bool = True
    has_off: bool = True


def _pipeline(config: RunConfig, layout: Layout) -> Lack:
    if layout.num_stages > 1:
        return None
    return "without a pipeline", "make one: --ipus-per-replica 2 --pipeline-splits auto"


def _accumulation(config: RunConfig, layout: Layout) -> Lack:
    # The SDK keeps the state of the optimizer in remote memory only under gradient accumulation.
    if layout.num_stages > 1 or layout.batching.gradient_accumulation_count > 1:
        return None
    return "without a pipeline or gradient accumulation", "use --gradient-accumulation-count 2 or more"


def _replicas(config: RunConfig, layout: Layout) -> Lack:
    return None if layout.batching.num_replicas > 1 else ("with one replica", "use --num-replicas 2 or more")


def _reduction(config: RunConfig, layout: Layout) -> Lack:
    return ("in a pipeline", "") if layout.num_stages > 1 else _replicas(config, layout)


def _preprocessing(config: RunConfig, layout: Layout) -> Lack:
    if config.eight_bit_transfer or config.accelerator_side_preprocess:
        return None
    return "where the host preprocesses", "add --eight-bit-transfer or --accelerator-side-preprocess"


def _recomputation(config: RunConfig, layout: Layout) -> Lack:
    return None if config.recomputation else ("without recomputation", "add --recomputation, in a pipeline")


def _validation(config: RunConfig, layout: Layout) -> Lack:
    return _pipeline(config, layout) or (None if config.validation else ("without validation", ""))


def _validations(config: RunConfig, layout: Layout) -> Lack:
    if not config.training:
        return "with --no-training", ""
    return None if config.validation else ("without validation", "drop --no-validation")


def _wandb(config: RunConfig, layout: Layout) -> Lack:
    return None if config.wandb else ("without Weights & Biases", "add --wandb")


def _own_checkpoints(config: RunConfig, layout: Layout) -> Lack:
    if not find_instances().is_distributed:
        return "without several instances", "start them with poprun"
    if not config.checkpoints:
        return "without checkpoints", "drop --no-checkpoints"
    return None if config.checkpoint_dir else ("without a folder for them", "add --checkpoint-dir DIR")


def _workers(config: RunConfig, layout: Layout) -> Lack:
    if find_workers(config, os.environ) is not None:
        return None
    return "for one worker", "start several: with `ipucnn launch`, srun or TF_CONFIG"


def _training(config: RunConfig, layout: Layout) -> Lack:
    return None if config.training else ("with --no-training", "")


def _batch_norm(config: RunConfig, layout: Layout) -> Lack:
    norm = config.norm_layer
    return None if norm_of(norm) == "batch" else (f"with norm-layer {norm['name']}", "")


def _precise_batch_norm(config: RunConfig, layout: Layout) -> Lack:
    if not config.training:
        return "with --no-training: checkpoints have the statistics that are evaluated", ""
    is_seen = config.validation or config.checkpoints
    return _batch_norm(config, layout) if is_seen else ("without validation and checkpoints", "")


def _half(config: RunConfig, layout: Layout) -> Lack:
    # Nothing is rounded in 32 bits, and the SDK looks at gradients of 16 bits alone to find a loss scale.
    return None if config.precision != "32.32" else ("in 32 bits", "use --precision 16.16 or 16.32")


def _auto_loss_scaling(config: RunConfig, layout: Layout) -> Lack:
    lack = _half(config, layout)
    named, changes = auto_loss_scaling_conflicts(config)
    if lack is None or not named:
        return lack
    return f"{lack[0]}, and does not go with {', '.join(named)}", f"use --precision 16.16 {' '.join(changes)}"


def _host_session(config: RunConfig, layout: Layout) -> Lack:
    return "on IPUs: it is a choice of the host session", ""


RULES: Tuple[Rule, ...] = (
    Rule("bn_momentum", _batch_norm, ipu_only=False, has_off=False),
    Rule("dbn_replica_group_size", _batch_norm, ipu_only=False),
    Rule("precise_batch_norm", _precise_batch_norm, ipu_only=False),
    *(Rule(name, _half, ipu_only=False) for name in OF_16_BITS if name != "auto_loss_scaling"),
    Rule("auto_loss_scaling", _auto_loss_scaling, ipu_only=False),
    Rule("target_accuracy", _validations, ipu_only=False),
    Rule("early_stopping", _validations, ipu_only=False),
    Rule("mlperf_logging", _validations, ipu_only=False),
    *(
        Rule(name, _training, ipu_only=False)
        for name in ("clip_gradient_norm", "ema_decay", "mixup", "cutmix", "random_erasing")
    ),
    Rule("wandb_run_name", _wandb, ipu_only=False),
    Rule("wandb_tags", _wandb, ipu_only=False),
    Rule("ckpt_all_instances", _own_checkpoints, ipu_only=False),
    *(
        Rule(name, _workers, ipu_only=False)
        for name in ("reduction", "start_timeout", "require_same_bytes", "trusted_network")
    ),
    Rule("fused_preprocessing", _preprocessing),
    Rule("offload_activations", _pipeline),
    Rule("offload_gradient_accumulation_buffers", _pipeline),
    Rule("recomputation_mode", _recomputation),
    Rule("pipeline_validation_model", _validation),
    Rule("pipeline_schedule", _pipeline),
    Rule("optimizer_state_offloading", _accumulation),
    Rule("replicated_optimizer_state_sharding", _replicas),
    Rule("accelerator_side_reduction", _reduction),
    *(Rule(spec.name, _host_session) for spec in SPECS if not spec.ipu_effect),
)


def check_effects(config: RunConfig, origins: Mapping[str, str], layout: Layout) -> None:
    """Refuses the first typed option that would have no effect.

    Args:
        config: of the run.
        origins: where each of its values is from.
        layout: from ``make_layout``.

    Raises:
        ConfigurationError: naming what the run lacks.
    """
    on_ipus = runs_on_ipus(config.device)
    for rule in RULES:
        spec, value = BY_NAME[rule.name], getattr(config, rule.name)
        # Of an option that is on by default, True is asked for, too.
        is_off = rule.has_off and (value is False if spec.is_bool else value == spec.default)
        if origins[rule.name] != FLAG or is_off or (rule.ipu_only and not on_ipus):
            continue
        lack = rule.lacks(config, layout)
        if lack is not None:
            shown = spec.flag if spec.is_bool else f"{spec.flag} {value}"
            what, hint = lack
            raise ConfigurationError(
                f"{shown} has no effect {what}", f"drop it, or {hint}" if hint else "drop it"
            )


def check_compile_only(config: RunConfig) -> None:
    """Refuses ``--compile-only`` where there is nothing to compile for.

    Raises:
        ConfigurationError: the device is no IPU, or one that must be there is named.
    """
    if config.compile_only and not runs_on_ipus(config.device):
        raise ConfigurationError(
            f"--compile-only compiles for IPUs, and --device {config.device} is none here",
            "drop it, or type it in the Poplar SDK's environment",
        )
    if config.compile_only and config.select_ipu is not None:
        # The driver ends the process where it has no device to take that number of (poplar_executor.cc).
        raise ConfigurationError(
            f"--select-ipu {config.select_ipu}: --compile-only takes no device", "drop one of them"
        )


def refuse_instances(command: str) -> None:
    """Refuses ``poprun`` for a command that works in one process.

    Raises:
        ConfigurationError: ``poprun`` started this process.
    """
    if find_instances().is_distributed:
        raise ConfigurationError(
            f"poprun started this, and `ipucnn {command}` works in one process",
            f"type it without poprun: ipucnn {command} ...",
        )


def check_instances(instances: Instances, config: RunConfig, draws: bool = True) -> None:
    """Refuses instances that would not work together: away from each other, or with seeds of their own.

    Args:
        draws: random numbers are drawn that must be the same in all of them, for weights or the data's order.

    Raises:
        ConfigurationError: no seed is given, or the device is no IPU; of workers, that it is one.
    """
    if isinstance(instances, Workers):
        if runs_on_ipus(config.device):
            raise ConfigurationError(
                f"{instances.source} names {instances.count} workers, which are of the host session, and this is an "
                "IPU's",
                "use --device cpu, or start instances for IPUs with poprun",
            )
        if config.seed is None:
            raise ConfigurationError(
                f"{instances.count} workers need the same seed, and none is given", "add --seed 1"
            )
        return
    if instances.count > 1 and not runs_on_ipus(config.device):
        raise ConfigurationError(
            f"poprun started {counted(instances.count, 'instance')}, and only IPUs work together",
            "start it without poprun: one process has all replicas on a CPU or GPU",
        )
    if instances.count > 1 and draws and config.seed is None:
        raise ConfigurationError(
            f"{instances.count} instances of poprun need the same seed, and none is given", "add --seed 1"
        )


def check_workers(instances: Instances, config: RunConfig, program: Program) -> None:
    """Refuses workers that cannot share a weight update, before TensorFlow is imported.

    Args:
        instances: the group of processes.
        config: of the run.
        program: with the number of fused micro-batches, if it is known.

    Raises:
        ConfigurationError: with the numbers of workers that can.
    """
    count = instances.count if isinstance(instances, Workers) else 1
    # How many all of them are is known when TensorFlow has looked.
    devices = max(config.devices or 1, 1)
    if program.fused_micro_batches:
        chunks = program.num_micro_batches // program.fused_micro_batches
        check_share(chunks, count, devices)
        check_share(chunks, config.max_workers)
    elif max(count * devices, config.max_workers) > 1:
        check_sharing(
            program.num_micro_batches // program.dbn_replica_group_size,
            program.dbn_replica_group_size,
            count,
            config.max_workers,
            devices,
            accumulation=program.gradient_accumulation_count,
        )
