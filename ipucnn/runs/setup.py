"""From a resolved configuration to what a session runs on: the data set, the shapes, and how the network is built.

Everything up to :func:`build` and :func:`evaluation_batches` is done without TensorFlow, so that a wrong option or a
damaged data set is told of at once.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence, Tuple, TypeVar

import numpy as np

from ipucnn.aliases import KerasModel, TfDataset
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import FLAG, Resolved
from ipucnn.config.values import norm_of
from ipucnn.datasets.base import DatasetInfo, DataSource
from ipucnn.errors import ConfigurationError, DataError, InfeasibleError
from ipucnn.models.registry import ModelRecord
from ipucnn.sessions.session import Session
from ipucnn.training.program import Program
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


SomeSetup = TypeVar("SomeSetup", bound=Setup)


def move_preprocessing(setup: SomeSetup, session: Session) -> SomeSetup:
    """The setup with the last step of preprocessing left to the session, if the configuration says so and it can.

    Raises:
        ConfigurationError: the network's range cannot be made in the one operation that was asked for.
    """
    from ipucnn.datasets.preprocessing import channel_affine

    affine = channel_affine(setup.record.input_range, setup.source.info, setup.input_shape[2])
    return replace(setup, input_range="raw") if session.take_preprocessing(affine) else setup


def check_supported(config: RunConfig) -> None:
    """Refuses what this version cannot do, rather than doing something else.

    Raises:
        ConfigurationError: naming the option.
    """
    for spec in SPECS:
        value = getattr(config, spec.name)
        if spec.refused and value != spec.default:
            what, instead = spec.refused
            raise ConfigurationError(
                f"{spec.flag}: {what} is not available in this version", f"drop it; {instead}"
            )
    if config.clean_dir and not config.checkpoints:
        raise ConfigurationError("--clean-dir without --checkpoints has nothing to clean", "drop one of them")


def input_shape_for(record: ModelRecord, image_shape: Sequence[Optional[int]]) -> InputShape:
    """The input of a network without ``--image-size``: the data set's size, at least the network's smallest.

    Data sets of many sizes take the network's own size, as its home data set does.
    """
    height, width = image_shape[0], image_shape[1]
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
    """The input of a network for tiles of images without ``--image-size``: its own size, or less for small images."""
    sides = [
        min(own, _largest_tile(record, int(side or 0)))
        for own, side in zip(record.input_shape, image_shape[:2])
    ]
    return sides[0], sides[1], record.input_shape[2]


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
    from ipucnn.datasets.registry import open_dataset
    from ipucnn.models.registry import output_shape, validate_input_shape

    config, record = resolved.config, resolved.record
    wanted = trained_shape
    if wanted is None and config.image_size is not None:
        wanted = (*config.image_size, record.input_shape[2])
        validate_input_shape(record, wanted)
    if source is None:
        folded = config.kfold is not None and config.fold is not None
        if resolved.command != "train" and resolved.origins["dataset"] == FLAG:
            # The folds are those of the data set that the network was trained on: of another one all is taken.
            folded = False
        source = open_dataset(
            resolved.choice,
            download=config.download,
            limit_train=None if folded else config.limit_train,
            limit_eval=None if folded else config.limit_eval,
            seed=seed,
            image_shape=wanted or record.input_shape,
            num_classes=record.num_classes,
            max_image_pixels=config.max_image_pixels,
        )
        if folded:
            source = _fold(source, config, seed)
    if wanted is not None:
        shape = wanted
    elif source.info.tiled and resolved.choice.name != record.home_dataset:
        shape = tile_shape_for(record, source.info.image_shape)
    elif resolved.choice.name == record.home_dataset:
        shape = record.input_shape
    else:
        shape = input_shape_for(record, source.info.image_shape)
    validate_input_shape(record, shape)
    outputs = output_shape(record, shape) if record.task == "segmentation" else None
    if source.info.tiled and outputs is not None:
        _check_tile(record, source.info, shape, outputs)
    return Setup(resolved, source, shape, outputs, seed, record.input_range)


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

    norm: Dict[str, Any] = dict(config.norm_layer)
    options = BuildOptions(
        input_shape=input_shape,
        num_classes=num_classes,
        norm=norm_of(norm),
        norm_momentum=float(norm.get("momentum", config.bn_momentum)),
        norm_epsilon=norm.get("epsilon"),
        norm_groups=norm.get("num_groups"),
        norm_channels_per_group=norm.get("channels_per_group"),
        dropout=config.dropout,
        base_filters=config.base_filters,
        seed=seed,
    )
    check_options(record, options)
    _check_weights_fit(record, options)
    return options


def _check_weights_fit(record: ModelRecord, options: "BuildOptions") -> None:
    """Refuses a network whose weights are more than the machine's memory, before anything is made of it.

    How many weights there would be is estimated from the layer graph that is shipped: the weights of the last layer
    grow with the number of classes, those of a layer that reads a flattened image with its area, and those of all
    layers with the square of the base filters.

    Raises:
        InfeasibleError: naming both.
    """
    from ipucnn.models.build import BuildOptions

    filters = (options.base_filters or 0) / record.builder_args.get("base_filters", 1)
    pixels, own_pixels = (shape[0] * shape[1] for shape in (options.input_shape, record.input_shape))
    if (
        options.num_classes <= 10 * max(record.num_classes, 1000)
        and filters <= 4
        and pixels <= 16 * own_pixels
    ):
        return
    from ipucnn.machine import host_memory_bytes
    from ipucnn.planning.graphs.extract import known_graph

    graph = known_graph(record, BuildOptions(record.input_shape, record.num_classes))
    memory_bytes = host_memory_bytes()
    if graph is None or not memory_bytes:
        return
    flattened = {layer.name for layer in graph.layers if layer.op_class == "reshape"}
    last = [layer.name for layer in graph.layers if layer.num_parameters][-1]
    num_weights = 0.0
    for layer in graph.layers:
        grown = max(1.0, filters) ** 2
        if flattened & set(layer.inputs) and layer.op_class == "matmul":
            grown *= pixels / own_pixels
        if layer.name == last:
            grown *= options.num_classes / record.num_classes
        num_weights += grown * layer.num_parameters
    # Four bytes each, and the network is made twice: as Keras has it, and with the layers exchanged.
    needed_bytes = 8 * num_weights
    if needed_bytes > memory_bytes:
        height, width, channels = options.input_shape
        raise InfeasibleError(
            f"{record.name} for {options.num_classes} classes and images of {height}x{width}x{channels} has some "
            f"{num_weights:.2g} weights, which take {needed_bytes / 2**30:.4g} GiB while it is made, and the machine "
            f"has {memory_bytes / 2**30:.4g} GiB",
            "lower the classes, --image-size or --base-filters",
        )


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
    from ipucnn.datasets.pipeline import train_batches

    config = setup.config
    epoch, update = divmod(first_update, program.weight_updates_per_epoch)
    return train_batches(
        setup.source,
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
    )


def evaluation_batches(setup: Setup, batch_size: int) -> "TfDataset":
    """The evaluation set in fixed shapes of at least ``batch_size``: whole multiples, for the host's speed.

    Raises:
        ConfigurationError: one batch alone is too much for the host's memory.
    """
    from ipucnn.datasets.pipeline import eval_batches

    _check_fits(batch_size, setup.input_shape)
    pixels = setup.input_shape[0] * setup.input_shape[1]
    wanted = max(1, min(128, 128 * 64 * 64 // pixels, len(setup.source.eval)))
    return eval_batches(
        setup.source.eval,
        setup.source.info,
        batch_size=batch_size * max(1, wanted // batch_size),
        input_shape=setup.input_shape,
        input_range=setup.input_range,
        output_shape=setup.output_shape,
        num_parallel=setup.config.pipeline_num_parallel,
        tile_step=setup.record.size_step,
    )


def _check_fits(batch_size: int, input_shape: InputShape) -> None:
    """Refuses batches that surely do not fit, rather than making them smaller: an IPU is to run what was asked for."""
    from ipucnn.machine import host_memory_bytes

    memory_bytes = host_memory_bytes()
    # One batch that is computed and two that wait for it, float32.
    sample_bytes = 3 * 4 * input_shape[0] * input_shape[1] * input_shape[2]
    needed_bytes = batch_size * sample_bytes
    if memory_bytes and needed_bytes > memory_bytes:
        raise ConfigurationError(
            f"batches of {batch_size} images need {needed_bytes / 2**30:.4g} GiB, and the machine has "
            f"{memory_bytes / 2**30:.4g} GiB",
            f"lower --validation-micro-batch-size; at the very most {memory_bytes // sample_bytes} images fit",
        )
