"""Prepares what a session runs on, from a resolved configuration: the data set, the shapes, and the network.

Everything before :func:`build` and the batches works without TensorFlow, so that a wrong option or a damaged data set
is reported at once.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Tuple, TypeVar

import numpy as np

from ipucnn.aliases import KerasModel, TfDataset
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.datasets.base import IN_MEMORY, DataSource, FileExamples, MaskedExamples
from ipucnn.datasets.limits import check_memory
from ipucnn.datasets.pixels import InputRange, check_channels, in_8_bits
from ipucnn.errors import ConfigurationError, DataError, InfeasibleError
from ipucnn.models.preprocessing import ImageScaling
from ipucnn.models.registry import ModelRecord
from ipucnn.planning.network import InputShape, input_shape_for, network_options
from ipucnn.python_files import is_python_name
from ipucnn.sessions.evaluated import StatisticsImages
from ipucnn.sessions.session import Predictor, Session
from ipucnn.text import counted, quoted, shown_value
from ipucnn.training.program import Program, make_layout
from ipucnn.training.schedules import make_schedule

if TYPE_CHECKING:
    from ipucnn.models.build import BuildOptions


@dataclass(frozen=True)
class Setup:
    """A run's data and shapes, before TensorFlow is imported.

    Attributes:
        resolved: configuration, model record, data set choice.
        source: the opened data set.
        input_shape: (height, width, channels) the network is built for.
        output_shape: (height, width) of a segmentation network's logits, None for classification.
        seed: the seed of the run.
        input_range: the range of the images that the input pipeline delivers: the network's range, or that of pixels
            if the session converts them to it.
    """

    resolved: Resolved
    source: DataSource
    input_shape: InputShape
    output_shape: Optional[Tuple[int, int]]
    seed: int
    input_range: InputRange

    def with_source(self: "SomeSetup", source: DataSource) -> "SomeSetup":
        """Returns the setup with another data set, whose statistics its range may have."""
        return self.in_range(self.input_range.name, source)

    def in_range(self: "SomeSetup", name: str, source: Optional[DataSource] = None) -> "SomeSetup":
        """Returns the setup with a range of this name, and with a data set; None: the same one."""
        source = source or self.source
        return replace(self, source=source, input_range=InputRange.of(name, source.info, self.input_shape[2]))

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
        """The words that name the user's own Python files; a later command must repeat them to run those files."""
        dataset, network_file = self.config.dataset, self.record.own
        words = ["--dataset", dataset] if dataset is not None and is_python_name(dataset) else []
        return (
            [*words, "--model-name", network_file.name]
            if network_file is not None and network_file.has_own_code
            else words
        )


SomeSetup = TypeVar("SomeSetup", bound=Setup)


def move_preprocessing(setup: SomeSetup, session: Session) -> Tuple[SomeSetup, Session]:
    """Leaves the last step of preprocessing to the session, if the configuration asks for it and the session can do it.

    Returns:
        The setup, and the session for it.

    Raises:
        ConfigurationError: the network's range cannot be made in one operation, as the configuration requires.
    """
    setup = with_network_range(setup)
    session = session.with_pixels(setup.input_range)
    return setup.in_range("raw") if session.takes_pixels else setup, session


def with_network_range(setup: SomeSetup) -> SomeSetup:
    """Returns the setup with the range that a function's network needs, after calling the function.

    Call it after the session was created, because it may import TensorFlow.

    Raises:
        ConfigurationError: the network scales its images itself, and ``--normalise`` names another range.
    """
    own = setup.record.own
    if own is None or own.make is None:
        return setup
    own.call(setup.input_shape, setup.source.info.num_classes, setup.seed)
    return setup.in_range(range_name(setup.config.normalise, setup.record))


def draw_seed() -> int:
    """Draws a seed from the system's entropy."""
    return random.SystemRandom().randrange(2**31)


def range_name(normalise: str, record: ModelRecord) -> str:
    """Returns the name of the range of images that a network is trained with, one of ``pixels.INPUT_RANGES``.

    Raises:
        ConfigurationError: each image of a segmentation network is to be normalised by itself, but the network sees
            patches of images; or nobody says whether a user's own network scales its images itself.
    """
    is_typed = normalise != "network"
    scaling = ImageScaling(None) if record.own is None else record.own.image_scaling
    if not scaling.is_certain and not is_typed:
        raise ConfigurationError(
            f"{shown_value(record.name)}: its layer {shown_value(scaling.layer)} may scale the images, but "
            f"{scaling.doubt}",
            "use --normalise raw if it takes pixels of 0..255, --normalise unit if it takes 0..1, or standard",
        )
    rescaling = scaling.layer if scaling.is_certain else None
    name = normalise if is_typed else record.input_range if rescaling is None else "raw"
    if rescaling is not None and name != "raw":
        raise ConfigurationError(
            f"{shown_value(record.name)} scales pixels of 0..255 itself, in its layer {shown_value(rescaling)}, and "
            f"--normalise {name} would scale them before",
            "use --normalise network",
        )
    if is_typed and record.task == "segmentation":
        raise ConfigurationError(
            f"--normalise {name}: {record.name} sees patches, not whole images", "use --normalise network"
        )
    return name


def _largest_patch(record: ModelRecord, side: int) -> int:
    """Returns the largest legal input size whose output is at most ``side`` pixels; else the smallest legal one."""
    margin = int(record.builder_args.get("margin", 0))
    largest = record.min_size
    for size in range(record.min_size, side + margin + 1):
        if (size - record.size_offset) % record.size_step == 0:
            largest = size
    return largest


def _smallest_sides(source: DataSource) -> Tuple[int, int]:
    """Returns the smallest height and the smallest width of the images of a set."""
    parts = [part.sizes for part in (source.train, source.eval) if isinstance(part, MaskedExamples)]
    height, width = np.concatenate(parts).min(axis=0).tolist()
    return height, width


def patch_shape_for(record: ModelRecord, smallest: Tuple[int, int], channels: int) -> InputShape:
    """Returns the input shape of a network that sees patches of images, without ``--image-size``.

    The size is the network's default, or less if the smallest height and width of the images are smaller.
    """
    sides = [min(usual, _largest_patch(record, side)) for usual, side in zip(record.input_shape, smallest)]
    return sides[0], sides[1], channels


def _check_patch(
    record: ModelRecord, source: DataSource, shape: Sequence[int], outputs: Sequence[int]
) -> None:
    """Refuses images smaller than the output that the network predicts for a patch.

    Raises:
        DataError: an image is smaller.
    """
    for axis, image, inner, full in zip(("high", "wide"), _smallest_sides(source), outputs, shape):
        if image < inner:
            smaller = _largest_patch(record, image)
            which = "the images" if source.info.image_shape[0] is not None else "the smallest images"
            raise DataError(
                f"{which} of {source.info.name} are {image} pixels {axis}, and the network predicts the inner {inner} "
                f"of its {full}",
                f"--image-size {smaller} or less"
                if smaller < full
                else "the data set's images are too small",
            )


def fold_of(source: DataSource, config: RunConfig, seed: int) -> DataSource:
    """Selects a fold of a data set, then applies the limits to the examples of the fold."""
    from ipucnn.datasets.base import limit_source, select_fold
    from ipucnn.datasets.classes import with_absent_named

    assert config.kfold is not None and config.fold is not None
    fold = with_absent_named(select_fold(source, config.kfold, config.fold), f"fold {config.fold}")
    return limit_source(fold, config.limit_train, config.limit_eval, seed)


def _open_source(resolved: Resolved, seed: int, requested_shape: Optional[InputShape]) -> DataSource:
    """Opens the chosen data set, or a fold of it."""
    from ipucnn.datasets.registry import (
        DATASETS,
        ReaderOptions,
        check_divides,
        known_as,
        needs_files,
        open_dataset,
    )

    config, record = resolved.config, resolved.record
    if resolved.origins["validation_fraction"].is_typed:
        check_divides(resolved.choice, config.validation_fraction)
    folded = config.kfold is not None and config.fold is not None
    if resolved.command != "train" and resolved.origins["dataset"].is_typed:
        # The folds belong to the data set that the network was trained on; another data set is used whole.
        folded = False
    known = DATASETS.get(known_as(resolved.choice.like or "") or "")
    source = open_dataset(
        resolved.choice,
        ReaderOptions(
            seed=seed,
            image_shape=requested_shape or (known and known.image_shape) or record.input_shape,
            num_classes=(known and known.num_classes) or record.num_classes,
            max_image_pixels=config.max_image_pixels,
            # Noise for at least one weight update, however large the batch is.
            least_train=make_layout(config).global_batch_size if config.synthetic_data else 0,
            validation_fraction=config.validation_fraction,
            allow_partial=config.allow_partial,
            skip_damaged=config.skip_damaged,
            has_class_weights=config.class_weights is not None,
        ),
        download=config.download,
        limit_train=None if folded else config.limit_train,
        limit_eval=None if folded else config.limit_eval,
    )
    if resolved.origins["skip_damaged"].is_typed and not source.info.decoded:
        raise ConfigurationError(
            f"--skip-damaged has no effect: {source.info.name} is held in memory, so nothing is decoded",
            "drop it",
        )
    # infer names each file that it cannot read, and continues.
    if resolved.command != "infer" and not config.skip_damaged and isinstance(source.train, FileExamples):
        from ipucnn.datasets.damaged import refuse_damaged

        source = refuse_damaged(source)
    source = fold_of(source, config, seed) if folded else source
    choice = resolved.choice
    is_users = choice.make is not None or needs_files(choice.name)
    if resolved.command != "train" or not is_users or choice.is_absent:
        return source
    from ipucnn.datasets.repeated import trained_and_evaluated
    from ipucnn.datasets.sources.in_memory import PREFIX

    place = [] if config.dataset_path == Path(".") else ["--dataset-path", quoted(config.dataset_path)]
    named = [] if config.dataset is None else [quoted(config.dataset)]
    is_typed = not str(config.dataset).startswith(PREFIX)  # arrays have no name on a command line
    command = " ".join(["ipucnn verify-dataset", *named, *place]) if is_typed else ""
    lines = trained_and_evaluated(source, command)
    return replace(
        source, info=replace(source.info, training_warnings=(*source.info.training_warnings, *lines))
    )


def prepare(
    resolved: Resolved,
    seed: int,
    trained_shape: Optional[InputShape] = None,
    source: Optional[DataSource] = None,
) -> Setup:
    """Opens the data set and fixes the shapes.

    Args:
        resolved: the configuration.
        seed: the seed that generates synthetic sets, and chooses the samples that a limit keeps.
        trained_shape: the input shape of a trained network; it overrides the options.
        source: an opened data set to use in place of the chosen one.

    Raises:
        ConfigurationError: the network cannot take the image size.
        DataError: files are absent or damaged.
    """
    from ipucnn.models.registry import output_shape, validate_input_shape

    config, record = resolved.config, resolved.record
    requested_shape = trained_shape
    if requested_shape is None and config.image_size is not None:
        requested_shape = (*config.image_size, record.input_shape[2])
        if (
            record.own is None
        ):  # the data decide the channels of a user's own network, so its shape is checked below
            validate_input_shape(record, requested_shape)
    source = source or _open_source(resolved, seed, requested_shape)
    if requested_shape is not None:
        shape = requested_shape
        if record.own is not None and trained_shape is None:
            shape = (*requested_shape[:2], input_shape_for(record, source.info.image_shape)[2])
    elif source.info.patchwise and resolved.choice.name != record.home_dataset:
        shape = patch_shape_for(record, _smallest_sides(source), source.info.image_shape[2])
    elif resolved.choice.name == record.home_dataset:
        shape = record.input_shape
    else:
        shape = input_shape_for(record, source.info.image_shape)
    if source.info.patchwise:
        channels = source.info.image_shape[2]
        if trained_shape is not None and trained_shape[2] != channels:
            kinds = ["grey" if n == 1 else "colour" for n in (channels, trained_shape[2])]
            raise DataError(
                f"the images of {source.info.name} are {kinds[0]}, and the network was trained on {kinds[1]} ones",
                f"take {kinds[1]} images, or train on {kinds[0]} ones",
            )
        shape = (*shape[:2], channels)
    check_channels(source.info.image_shape[2], shape[2])
    validate_input_shape(record, shape)
    outputs = output_shape(record, shape) if record.task == "segmentation" else None
    if source.info.patchwise and outputs is not None:
        _check_patch(record, source, shape, outputs)
    network_range = InputRange.of(range_name(config.normalise, record), source.info, shape[2])
    return Setup(resolved, source, shape, outputs, seed, network_range)


def build_options(setup: Setup) -> "BuildOptions":
    """Returns the ``BuildOptions`` of a run, checked as far as that is possible without TensorFlow.

    Raises:
        ConfigurationError: the network does not support an option.
    """
    classes = setup.source.info.num_classes
    return network_options(setup.record, setup.config, setup.input_shape, classes, setup.seed)


def learning_rates(config: RunConfig, program: Program) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the schedule of a training run: a function from weight updates (int array) to learning rates.

    Raises:
        ConfigurationError: the schedule does not have a parameter.
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

    model = build_model(setup.record, build_options(setup))
    range_name(setup.config.normalise, setup.record)  # only now the layers of a function's network are known
    return model


def loss_name(config: RunConfig, task: str) -> str:
    """Returns the loss of a run: ``auto`` is replaced by the loss of the task, and other losses are checked.

    Raises:
        ConfigurationError: a Dice loss is chosen for classification.
    """
    if config.loss == "auto":
        return "bce_dice" if task == "segmentation" else "cross_entropy"
    if config.loss == "bce_dice" and task != "segmentation":
        raise ConfigurationError("--loss bce_dice needs a segmentation network", "use --loss cross_entropy")
    return config.loss


def training_batches(
    setup: Setup, program: Program, first_update: int, samples_per_element: int, shard: Tuple[int, int]
) -> "TfDataset":
    """Returns endless training batches from a weight update on.

    Args:
        setup: the run's data and shapes.
        program: the Program, which defines the samples of an epoch.
        first_update: the weight update to begin with.
        samples_per_element: the number of samples in each batch.
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
            # The padding comes from another permutation of the same epoch.
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


@dataclass(frozen=True)
class TrainingSample:
    """A sample as training sees it, before its pixels are brought to the network's range.

    Attributes:
        name: the file of the image, or its number in the set.
        image: uint8 [h, w, channels], rounded.
        label: the class; the share of each class, float32, for a mixed image; or the mask of the network's output.
    """

    name: str
    image: np.ndarray
    label: np.ndarray


def training_samples(setup: Setup, program: Program, count: int) -> List[TrainingSample]:
    """Returns the first samples of a run (imports TensorFlow); ``--draw-samples`` shows them."""
    from ipucnn.datasets.pipeline import data_errors, sample_order, split_ticket

    setup, batch, examples = setup.in_range("raw"), program.micro_batch_size, setup.source.train
    samples_per_epoch = program.samples_per_epoch + program.samples_padded_per_epoch
    order = sample_order(
        len(examples),
        samples_per_epoch=samples_per_epoch,
        seed=setup.seed,
        start_epoch=0,
        start_sample=0,
        shuffle=setup.config.shuffle,
    )
    rounds = -(-samples_per_epoch // len(examples))
    indices = [int(split_ticket(ticket, rounds)[2]) for ticket in order.take(count)]
    names = examples.names if isinstance(examples, IN_MEMORY) else ()
    samples: List[TrainingSample] = []
    with data_errors():
        for images, labels, *_ in training_batches(setup, program, 0, batch, (1, 0)).take(-(-count // batch)):
            for image, label in zip(in_8_bits(images), labels.numpy()):
                if len(samples) < count:
                    index = indices[len(samples)]
                    name = names[index] if names else f"{setup.source.info.name}/train/{index}"
                    name = examples.name(index) if isinstance(examples, FileExamples) else name
                    samples.append(TrainingSample(name, image, label))
    return samples


# Training images that --precise-batch-norm measures statistics over; a larger batch raises the number.
STATISTICS_SAMPLES = 1024


def statistics_batches(setup: Setup) -> StatisticsImages:
    """Returns the training images for measuring batch norm's statistics: the same ones each time."""
    from ipucnn.datasets.pipeline import Stream, train_batches

    num_images = len(setup.source.train)
    size = min(setup.config.precise_batch_norm, num_images)
    _check_batch(size, setup.input_shape, "--precise-batch-norm")
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
    return StatisticsImages(batches.take(count), count, size)


def evaluation_batches(setup: Setup, batch_size: int, predictor: Optional[Predictor] = None) -> "TfDataset":
    """Returns the evaluation set in batches of one fixed shape: a multiple of ``batch_size``, for the host's speed.

    Args:
        setup: the run's data and shapes.
        batch_size: the smallest number of samples in a batch.
        predictor: the predictor that evaluates; only its share of the images is read.  None: all images are read.
    """
    from ipucnn.datasets.pipeline import eval_batches, num_evaluation_samples

    _check_batch(batch_size, setup.input_shape, "--validation-micro-batch-size")
    pixels = setup.input_shape[0] * setup.input_shape[1]
    samples = num_evaluation_samples(
        setup.source.eval, setup.output_shape or setup.input_shape, setup.record.size_step
    )
    fast = max(1, min(128, 128 * 64 * 64 // pixels, samples))
    if setup.record.own is not None and setup.record.own.may_mix_samples:
        fast = batch_size
    return eval_batches(
        setup.source.eval,
        setup.source.info,
        batch_size=batch_size * max(1, fast // batch_size),
        input_shape=setup.input_shape,
        input_range=setup.input_range,
        output_shape=setup.output_shape,
        num_parallel=setup.config.pipeline_num_parallel,
        patch_step=setup.record.size_step,
        shard=(1, 0) if predictor is None else predictor.shard,
        part=(1, 0) if predictor is None else predictor.part,
    )


def _check_batch(batch_size: int, input_shape: InputShape, option: str) -> None:
    """Refuses batches that cannot fit, instead of making them smaller: an IPU must run the batch that was chosen."""
    # One batch in computation and two prefetched ones, in float32.
    needed = 3 * 4 * batch_size * input_shape[0] * input_shape[1] * input_shape[2]
    check_memory(
        needed, f"reading batches of {counted(batch_size, 'image')}", f"lower {option}", InfeasibleError
    )
