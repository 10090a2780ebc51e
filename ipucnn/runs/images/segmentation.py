"""Segments whole images: overlapping patches of images of any size, and pictures of a few images of a data set.

The patches implement the overlap-tile strategy of Ronneberger et al. 2015 (section 2 and figure 2).

An unpadded network's output is ``margin`` pixels smaller than its input, half of it on each side.  Outputs cover the
image without gaps. The input of each is the output's area with its surroundings; beyond the border, the image is
mirrored as often as necessary.

A pixel's logits depend on the patch's position only through the poolings.  Convolutions, norms with fixed statistics
and activations treat all positions alike, but each of the four poolings halves the image on a grid that starts at the
patch's corner.  So a pixel's logits depend only on the pixels within 92 + 15 pixels of it, and on the patch's corner
modulo 2^4 = 16, the network's ``size_step``.  The offset of every patch's corner from the image's corner is a multiple
of it. So for all patch sizes the result is that of one pass over the whole image, up to the order in which floats are
summed. Outputs are 4 more than a multiple of 16 wide: neighbouring patches share 4 rows or columns, on which they
agree.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np
from scipy import special

from ipucnn.config.values import norm_of
from ipucnn.datasets.base import IN_MEMORY, InMemory, MaskedExamples
from ipucnn.datasets.pixels import in_8_bits
from ipucnn.datasets.segmentation.patches import mirror, patch_starts, patch_table
from ipucnn.errors import ConfigurationError, MemoryErrors
from ipucnn.events import Item, Note, emit
from ipucnn.models.registry import ModelRecord, nearest_legal_sizes, output_shape
from ipucnn.runs.images.outputs import Classes, class_colours
from ipucnn.runs.network_input import COST_OF_PATCHES
from ipucnn.runs.predicting import check_finite
from ipucnn.runs.setup import Setup
from ipucnn.runs.trained import TrainedSetup
from ipucnn.sessions.session import Predictor

TEST_TIME_AUGMENTATIONS = (1, 2, 4, 8)
"""Legal numbers of versions: the first of an image's eight rotated and mirrored versions are averaged."""

OUTPUTS = (68, 132, 260, 516)
"""Heights and widths of patches' outputs to choose from: only a few, because a network is built and traced for each."""
WHOLE_STEP, MOST_WHOLE = 64, 2116
"""Step and maximum, in pixels, of the outputs of patches that hold a whole image.

The step lets images of many sizes share a few networks.  The maximum holds without ``--patch-size``.
"""
# Pixels of a batch's input: one patch of 700 x 700, or several small ones.
BATCH_PIXELS = 700 * 700
NUM_PICTURES = 3

Size = Tuple[int, int]
"""Height and width."""
_Key = TypeVar("_Key")


def choose_patch(height: int, width: int, outputs: Sequence[int], margin: int, step: int) -> int:
    """Returns the output size with which an image takes the fewest input pixels; the smallest of equal ones."""

    def cost(output: int) -> int:
        count = len(patch_starts(height, output, step)) * len(patch_starts(width, output, step))
        return count * (output + margin) ** 2

    return min(sorted(outputs), key=cost)


def check_patch_size(record: ModelRecord, size: Optional[int]) -> None:
    """Refuses an input size that the network cannot take, or whose outputs leave gaps.

    Raises:
        ConfigurationError: the size is not legal; the hint has the nearest legal ones.
    """
    if size is None:
        return
    margin, step = int(record.builder_args["margin"]), record.size_step
    smallest = nearest_legal_sizes(record, margin + step)[-1]
    legal = nearest_legal_sizes(record, max(size, smallest))
    if legal != [size]:
        raise ConfigurationError(
            f"--patch-size {size}: {record.name} takes patches of {smallest} pixels and more, "
            f"{record.size_offset} above a multiple of {step}",
            f"--patch-size {' or '.join(map(str, legal))}",
        )


def check_test_time_augmentation(versions: int) -> None:
    """Refuses numbers of versions that are not in ``TEST_TIME_AUGMENTATIONS``.

    Raises:
        ConfigurationError: the number is not legal; the hint has the nearest legal one.
    """
    if versions not in TEST_TIME_AUGMENTATIONS:
        near = min(TEST_TIME_AUGMENTATIONS, key=lambda number: abs(number - versions))
        raise ConfigurationError(
            f"--test-time-augmentation {versions}: it averages {', '.join(map(str, TEST_TIME_AUGMENTATIONS))} versions",
            f"use --test-time-augmentation {near}",
        )


def _version(image: np.ndarray, number: int) -> np.ndarray:
    """Returns a version of [h, w, ...]: 0 as it is, 1 mirrored, 2 and 3 these turned by 180 degrees, 4 to 7 by 90."""
    mirrored = image[:, ::-1] if number & 1 else image
    return np.rot90(mirrored, 2 * (number >> 1 & 1) + (number >> 2 & 1))


def _restored(image: np.ndarray, number: int) -> np.ndarray:
    """Inverts :func:`_version`."""
    turned = np.rot90(image, -(2 * (number >> 1 & 1) + (number >> 2 & 1)))
    return turned[:, ::-1] if number & 1 else turned


class PatchwiseNetwork:
    """A segmentation network for images of any size; it is built for each patch size when that is first needed.

    Args:
        trained: the network and its weights.
        patch_size: height and width of a patch's input; None chooses by the image.  Networks with group norm normalise
            each patch by its own statistics; they then take images up to ``MOST_WHOLE`` pixels as one patch, and larger
            ones in patches of their training size.
        verbose: whether to show TensorFlow's messages.
        test_time_augmentation: one of ``TEST_TIME_AUGMENTATIONS``; the paper averages the probabilities of 7 rotated
            versions of its input (section 4).
        command: the command that predicts.

    Attributes:
        notes: remarks on the network and its weights, known after the first image.
        device: kind of the device it runs on, known after the first image.
        patch_sizes: (height, width) of the inputs used so far.
        busy_s: seconds that :meth:`each` took for logits, without building the network.
    """

    def __init__(
        self,
        trained: TrainedSetup,
        patch_size: Optional[int] = None,
        verbose: bool = False,
        test_time_augmentation: int = 1,
        command: str = "infer",
    ) -> None:
        check_test_time_augmentation(test_time_augmentation)
        self._command = command
        self.notes: List[str] = []
        self.test_time_augmentation = test_time_augmentation
        self._trained, self._verbose = trained, verbose
        record = trained.record
        check_patch_size(record, patch_size)
        self._margin, self._step = int(record.builder_args["margin"]), record.size_step
        self._patch_size = patch_size
        # The size of a patch's output; None chooses by the image.
        self._fixed: Optional[Size] = None
        if patch_size is not None:
            self._fixed = (patch_size - self._margin, patch_size - self._margin)
        elif trained.weights.is_exported:
            # An exported network takes patches of one size.
            self._fixed = self._output_of_training()
        self._is_patch_normalised = norm_of(trained.config.norm_layer) == "group"
        self._predictors: Dict[Size, Predictor] = {}
        self.device = ""
        self.busy_s = 0.0

    @property
    def patch_sizes(self) -> List[Size]:
        return sorted(map(self._input, self._predictors))

    def _input(self, output: Size) -> Size:
        return output[0] + self._margin, output[1] + self._margin

    def _output_of_training(self) -> Size:
        smallest = nearest_legal_sizes(self._trained.record, self._margin + self._step)[-1]
        height, width = (max(side, smallest) - self._margin for side in self._trained.input_shape[:2])
        return height, width

    def warn_of_seams(self, sizes: Iterable[Sequence[int]]) -> Iterator[Note]:
        """Yields a warning if images of some (height, width) will be cut into patches that may differ at their seams.

        Group norm computes its statistics for each patch, so that two patches normalise the same surroundings
        differently.
        """
        if not self._is_patch_normalised:
            return
        cut = [size for size in sizes if any(side > out for side, out in zip(size, self._output(size)))]
        if not cut:
            return
        height, width = max(size[0] for size in cut), max(size[1] for size in cut)
        whole = nearest_legal_sizes(self._trained.record, max(height, width) + self._margin)[-1]
        remedy = f"--patch-size {whole} takes the largest image, {height}x{width}, as one patch"
        if self._trained.weights.is_exported:
            remedy = "the run that was exported takes an image as one patch"
        patch = "x".join(map(str, self._input(self._output((height, width)))))
        text = (
            f"group norm takes its statistics of each patch of {patch} pixels instead of the whole image: "
            f"{COST_OF_PATCHES}, and seams may show; {remedy}"
        )
        self.notes.append(text)  # the figures depend on it
        yield Note(f"warning: {text}")

    def each(
        self, images: Iterable[Tuple[_Key, np.ndarray]]
    ) -> Iterator[Tuple[_Key, np.ndarray, np.ndarray]]:
        """Yields each image's key, the image and its logits, in order.

        Args:
            images: (key, uint8 [h, w, channels]).

        Raises:
            DataError, InfeasibleError: see :meth:`logits`.
        """
        for key, image in images:
            self.prepare(image.shape)
            started = time.perf_counter()
            logits = self.logits(image)
            self.busy_s += time.perf_counter() - started
            yield key, image, logits

    def prepare(self, image_shape: Sequence[int]) -> None:
        """Builds the network for the patches of an image in any rotation; call it before measuring time."""
        self._predictor(self._output(image_shape))

    def _output(self, image_shape: Sequence[int]) -> Size:
        height, width = image_shape[:2]
        if self._fixed is not None:
            return self._fixed
        if not self._is_patch_normalised:
            side = choose_patch(height, width, OUTPUTS, self._margin, self._step)
            return side, side
        trained = max(self._output_of_training())
        offset = OUTPUTS[0] % WHOLE_STEP
        whole = -((offset - max(height, width)) // WHOLE_STEP) * WHOLE_STEP + offset
        if max(height, width) <= trained or whole > MOST_WHOLE:
            return trained, trained
        return whole, whole

    def logits(self, image: np.ndarray) -> np.ndarray:
        """Returns float32 [h, w, classes] of uint8 [h, w, channels].

        With test-time augmentation, they are the logarithm of the mean probability.

        Raises:
            DataError: the network's outputs are not finite.
            InfeasibleError: a patch does not fit into memory.
        """
        return check_finite(self._outcome(image))

    def _outcome(self, image: np.ndarray) -> np.ndarray:
        """Returns the result of :meth:`logits`, finite or not."""
        if self.test_time_augmentation == 1:
            return self._logits(image)
        mean: Union[float, np.ndarray] = 0.0
        for number in range(self.test_time_augmentation):
            logits = self._logits(_version(image, number))
            if not np.isfinite(logits).all():
                return np.full((*image.shape[:2], logits.shape[-1]), np.nan, np.float32)
            probabilities = special.softmax(logits, axis=-1)
            mean = mean + _restored(probabilities, number) / self.test_time_augmentation
        return np.log(np.maximum(mean, np.finfo(np.float32).tiny)).astype(np.float32)

    def _logits(self, image: np.ndarray) -> np.ndarray:
        height, width = image.shape[:2]
        output = self._output(image.shape)
        predictor = self._predictor(output)
        corners = patch_table([(height, width)], output, self._step)[:, 1:3].tolist()
        input_height, input_width = self._input(output)
        batch = min(len(corners), max(1, BATCH_PIXELS // (input_height * input_width)))
        result: Any = None
        for first in range(0, len(corners), batch):
            group = corners[first : first + batch]
            patches = self._predict(
                predictor, [self._patch(image, corner, output) for corner in group], batch
            )
            if result is None:
                result = np.empty((height, width, patches.shape[-1]), np.float32)
            for (row, column), patch in zip(group, patches):
                region = result[row : row + output[0], column : column + output[1]]
                region[...] = patch[: region.shape[0], : region.shape[1]]
        return result

    def _patch(self, image: np.ndarray, corner: Sequence[int], output: Size) -> np.ndarray:
        """Returns uint8 [input height, input width, channels]: the area of a patch's output with its surroundings."""
        rows, columns = (
            mirror(np.arange(side) + first - self._margin // 2, length)
            for first, side, length in zip(corner, self._input(output), image.shape[:2])
        )
        return image[rows[:, None], columns]

    def _predict(self, predictor: Predictor, patches: List[np.ndarray], batch: int) -> np.ndarray:
        """Returns the logits of patches, in a batch of one fixed shape."""
        from ipucnn.datasets.preprocessing import prepare_range

        trained = self._trained
        stacked = np.zeros((batch, *patches[0].shape), np.float32)
        stacked[: len(patches)] = patches
        shape = (*patches[0].shape[:2], trained.input_shape[2])
        images = prepare_range(stacked, shape, trained.input_range)
        with MemoryErrors(
            f"patches of {shape[0]}x{shape[1]} pixels do not fit into memory",
            f"--patch-size {OUTPUTS[0] + self._margin}",
        ):
            return predictor.predict([images])[0][: len(patches)]

    def _predictor(self, output: Size) -> Predictor:
        """Returns the predictor of the network built for patches of that output size."""
        if output not in self._predictors:
            record, shape = self._trained.record, (*self._input(output), self._trained.input_shape[2])
            session = self._trained.session(self._verbose)
            setup = replace(self._trained, input_shape=shape, output_shape=output_shape(record, shape))
            predictor, notes = setup.load(session, self._command)
            for note in notes:
                if note not in self.notes:
                    self.notes.append(note)
                    emit(Note(f"note: {note}"))
            self._predictors[output] = predictor
            self.device = predictor.device.kind
        return self._predictors[output]


def class_probabilities(logits: np.ndarray) -> List[np.ndarray]:
    """Returns float32 [h, w] arrays from logits [h, w, classes]: of class 1 for two classes, else of each class."""
    if logits.shape[-1] == 2:
        return [foreground_probability(logits)]
    shares = special.softmax(logits.astype(np.float64), axis=-1)
    return [np.float32(share) for share in np.moveaxis(shares, -1, 0)]


def foreground_probability(logits: np.ndarray) -> np.ndarray:
    """Returns float32 [h, w]: softmax of class 1 from logits [h, w, 2], without overflow."""
    gap = (logits[..., 1] - logits[..., 0]).astype(np.float64)
    return np.float32(special.expit(gap))


@dataclass(frozen=True)
class SegmentedImage:
    """A segmented image, or a segmented page of a volume.

    Attributes:
        name: name of the image, with the page's number if there are several.
        image: uint8 [h, w, c].
        predicted: [h, w], the class of each pixel.
        classes: names and colours of the classes.
        truth: [h, w], IGNORED at pixels that do not count, if known.
        probability: float32 [h, w]: of class 1 if there are two classes, else of the most probable class.
        mean_dice: score that ranks images, if the truth is known.
    """

    name: str
    image: np.ndarray
    predicted: np.ndarray
    classes: Classes
    truth: Optional[np.ndarray] = None
    probability: Optional[np.ndarray] = None
    mean_dice: float = 1.0


@dataclass(frozen=True)
class Segmented(Item):
    """An image, or a page of a volume, was segmented."""

    image: SegmentedImage


def predicted_images(setup: Setup, predictor: Predictor) -> List[SegmentedImage]:
    """Returns the first, the last and evenly spaced evaluation images in between, with truth and prediction.

    Args:
        setup: the run's setup, whose evaluation images are an array.
        predictor: the predictor of the network.
    """
    examples, info = setup.source.eval, setup.source.info
    assert isinstance(examples, IN_MEMORY)
    classes = Classes(tuple(info.class_names), class_colours(info.num_classes, info.class_colours))
    spread = np.linspace(0, len(examples) - 1, min(NUM_PICTURES, len(examples)))
    return [_predicted(setup, predictor, examples, round(float(number)), classes) for number in spread]


def _predicted(
    setup: Setup, predictor: Predictor, examples: InMemory, number: int, classes: Classes
) -> SegmentedImage:
    """Returns an image, cut to the pixels that are predicted."""
    from ipucnn.datasets.pipeline import eval_batches
    from ipucnn.datasets.preprocessing import crop_centre, prepare_size
    from ipucnn.datasets.segmentation.patches import stitch

    one = examples.subset([number])
    name = one.names[0] if one.names else f"evaluation image {number}"
    batches = eval_batches(
        one,
        setup.source.info,
        batch_size=1,
        input_shape=setup.input_shape,
        input_range=setup.input_range,
        output_shape=setup.output_shape,
        patch_step=setup.record.size_step,
    )
    patches, truths = [], []
    for images, labels, _ in batches:
        patches.append(predictor.predict([images])[0][0].argmax(axis=-1).astype(np.uint8))
        truths.append(labels.numpy()[0])
    if isinstance(one, MaskedExamples):
        (image,), (truth,) = one.images, one.masks
        predicted = stitch(patches, image.shape[:2], setup.record.size_step)
        return SegmentedImage(name, image, predicted, classes, truth)
    sized = in_8_bits(prepare_size(one.images, setup.input_shape))
    assert setup.output_shape is not None  # set in segmentation networks
    inner, whole = ("x".join(map(str, size)) for size in (setup.output_shape, setup.input_shape[:2]))
    name += "" if inner == whole else f", the inner {inner} of {whole} pixels"
    image = crop_centre(sized, *setup.output_shape)[0]
    return SegmentedImage(name, image, patches[0], classes, truths[0])
