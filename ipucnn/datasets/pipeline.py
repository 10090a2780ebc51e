"""``tf.data`` batches for training, evaluation and inference, from any source.

The order of epoch e is a permutation that is a pure function of (seed, e), and a sample's augmentation is a pure
function of (seed, epoch, index).  Neither depends on the batch size, on the sample at which the run starts, or on the
number of threads.  So a run sees the same samples after an interruption, or with another number of fused micro-batches.
"""

import itertools
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Optional, Tuple, Union

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.datasets.augmentation import AUGMENTATIONS, draws, shift_right
from ipucnn.datasets.base import (
    ArrayExamples,
    DatasetInfo,
    DataSource,
    Examples,
    ImageFiles,
    MaskedExamples,
)
from ipucnn.datasets.hashing import AUGMENT, ORDER, chain, draw, stream_state
from ipucnn.datasets.pixels import InputRange, pixel_mean
from ipucnn.datasets.preprocessing import prepare_labels, prepare_range, prepare_size
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.machine import num_cores
from ipucnn.text import printable

if TYPE_CHECKING:
    from ipucnn.datasets.mixing import Mixing

InputShape = Tuple[int, int, int]
LARGE_BATCH_BYTES = 64 * 2**20
SMALLEST_GROUP = 64
LARGEST_GROUP_BYTES = 4 * 2**20
FILES_AT_ONCE = 32
READ_AHEAD_BYTES = 4 * 2**20
_ALIGNED_BYTES = 64
"""Alignment of TensorFlow's tensors in memory (EIGEN_MAX_ALIGN_BYTES)."""
NOTHING = -1
"""The index of a padding image, for the last batch of an evaluation."""
STAGES = ("read", "decode", "augment", "batch")
"""The stages of a training sample, in this order; see ``until`` of :class:`Stream`."""


@dataclass(frozen=True)
class Stream:
    """Settings of the training batches.

    Attributes:
        batch_size: samples per batch, any number; an epoch need not be a whole number of batches.
        samples_per_epoch: number of samples after which the next epoch's permutation begins.  If it is smaller than the
            set, each epoch leaves out different samples.  If it is larger, further permutations of the epoch follow.
        input_shape: (height, width, channels) of the network's input.
        input_range: the range of the network's input.
        augment: whether to apply the source's training augmentation.
        seed: seed of order and augmentation, any integer.
        start_epoch, start_sample: the start of the stream; ``start_sample`` samples of that epoch are skipped
            without being read.
        shuffle: whether to permute the examples; False takes the stored order in every epoch.
        num_parallel: batches (images, for files) prepared at the same time.  It is limited to twice the cores, because
            more would only cost memory.  None lets TensorFlow choose.
        output_shape: (h', w') of the logits of a segmentation network; masks are cropped to it.
        weigh_padding: whether batches are (images, labels, weights float32 [batch]).  The weight is 1 for the first
            permutation of an epoch, and 0 for the samples of further ones, which are padding.
        until: the stage to stop after, to measure it; only the result of "batch" is for a network.
            For arrays, "read" gathers stored pixels, "decode" makes floats of the network's size, "augment" augments
            them, and "batch" does the rest.  For files, stages before "batch" return single samples: "read" the bytes,
            "decode" the centre of the image, and "augment" a random crop instead.
        shard: (count, index) to take every ``count``-th batch from number ``index`` on; the others are not read.
        mixing: erasing and mixing of images, not for patchwise sets; batches are then whole micro-batches.
    """

    batch_size: int
    samples_per_epoch: int
    input_shape: InputShape
    input_range: InputRange
    augment: bool
    seed: int
    start_epoch: int = 0
    start_sample: int = 0
    shuffle: bool = True
    num_parallel: Optional[int] = None
    output_shape: Optional[Tuple[int, int]] = None
    weigh_padding: bool = False
    until: str = "batch"
    shard: Tuple[int, int] = (1, 0)
    mixing: "Optional[Mixing]" = None

    def rounds(self, num_examples: int) -> int:
        """Returns the number of permutations of the examples in an epoch."""
        return -(-self.samples_per_epoch // num_examples)

    @property
    def augments(self) -> bool:
        """Whether the stages up to ``until`` augment the samples."""
        return self.augment and STAGES.index(self.until) >= STAGES.index("augment")


Tickets = Tuple[Tensor, Tensor, Tensor]
"""(epochs, rounds, indices) of samples, int64 [batch] each."""


def train_batches(source: DataSource, stream: Stream) -> tf.data.Dataset:
    """Returns infinite batches of (images float32 [batch, h, w, c], labels int32 [batch] or [batch, h', w']).

    If a file cannot be decoded, the iterator raises an error at its batch; wrap the loop in :func:`data_errors` to get
    a DataError.  Raises ConfigurationError if a batch or an epoch has no samples, and DataError if the set has none.
    """
    if stream.batch_size < 1 or stream.samples_per_epoch < 1:
        raise ConfigurationError(
            f"batch size {stream.batch_size} and {stream.samples_per_epoch} samples per epoch must be positive",
            "use a smaller --micro-batch-size, or more samples",
        )
    examples = source.train
    _require_examples(examples, source.info)
    order = sample_order(
        len(examples),
        samples_per_epoch=stream.samples_per_epoch,
        seed=stream.seed,
        start_epoch=stream.start_epoch,
        start_sample=stream.start_sample,
        shuffle=stream.shuffle,
    )
    if stream.shard[0] > 1:
        order = order.batch(stream.batch_size, drop_remainder=True).shard(*stream.shard).unbatch()
    rounds = stream.rounds(len(examples))
    if isinstance(examples, MaskedExamples):
        batches = _grouped(_patches(examples, source.info, stream), stream, order, rounds)
    elif isinstance(examples, ArrayExamples):
        batches = _grouped(_arrays(examples, source.info, stream), stream, order, rounds)
    else:
        batches = _file_batches(examples, source.info, stream, order)
    if stream.until != "batch":
        return batches
    return batches.prefetch(_prefetch(stream.batch_size, stream.input_shape))


def _arrays(
    examples: ArrayExamples, info: DatasetInfo, stream: Stream
) -> Callable[[Tickets], Tuple[Tensor, ...]]:
    """Returns the function that makes batches of images in memory."""
    augmentation = AUGMENTATIONS[info.augmentation if stream.augments else "none"]
    stored_images, stored_labels = tf.constant(examples.images), tf.constant(examples.labels)

    def prepare(tickets: Tickets) -> Tuple[Tensor, ...]:
        random = draws(stream.seed, *tickets, augmentation.num_draws)
        images, labels = tf.gather(stored_images, tickets[2]), tf.gather(stored_labels, tickets[2])
        if stream.until == "read":
            return images, labels
        if not augmentation.after_resize:
            images, labels = augmentation.apply(images, labels, random)
        images = prepare_size(images, stream.input_shape)
        if augmentation.after_resize:
            images, labels = augmentation.apply(images, labels, random)
        if stream.until != "batch":
            return images, labels
        labels = prepare_labels(labels, stream.input_shape, stream.output_shape)
        return _mixed(images, labels, info, stream, tickets)

    return prepare


def _patches(
    examples: MaskedExamples, info: DatasetInfo, stream: Stream
) -> Callable[[Tickets], Tuple[Tensor, ...]]:
    """Returns the function that makes batches of patches of images in memory."""
    from ipucnn.datasets.segmentation.warp import ELASTIC_DRAWS, StoredImages, training_patches

    stored = StoredImages(examples)
    size = stream.input_shape[:2]

    def prepare(tickets: Tickets) -> Tuple[Tensor, ...]:
        random = draws(stream.seed, *tickets, ELASTIC_DRAWS)
        images, labels = training_patches(
            stored,
            tickets[2],
            random,
            size,
            stream.output_shape or size,
            stream.augments,
        )
        images = prepare_range(images, stream.input_shape, stream.input_range)
        return images, tf.cast(labels, tf.int32)

    return prepare


def _grouped(
    prepare: Callable[[Tickets], Tuple[Tensor, ...]], stream: Stream, order: tf.data.Dataset, rounds: int
) -> tf.data.Dataset:
    """Makes batches of images in memory; one call prepares several small ones, whose cost is mostly per call."""
    batch_size = stream.batch_size
    is_whole, group = stream.until == "batch", _group(batch_size, stream.input_shape)

    def prepare_group(numbers: Tensor) -> Tuple[Tensor, ...]:
        tickets = split_ticket(numbers, rounds)
        columns = prepare(tickets)
        if stream.weigh_padding and is_whole:
            columns = (*columns, _first_round(tickets[1]))
        if group == 1 or not is_whole:
            return columns
        return tuple(tf.reshape(x, [group, batch_size, *x.shape[1:]]) for x in columns)

    batches = order.batch(group * batch_size, drop_remainder=True)
    batches = _map(batches, prepare_group, parallel_calls(stream.num_parallel))
    return batches.unbatch() if group > 1 and is_whole else batches


def _file_batches(
    examples: ImageFiles, info: DatasetInfo, stream: Stream, order: tf.data.Dataset
) -> tf.data.Dataset:
    """Makes batches of images that are decoded when they are needed."""
    batch_size, parallel = stream.batch_size, parallel_calls(stream.num_parallel)
    rounds = stream.rounds(len(examples))
    all_labels = tf.constant(examples.labels)
    if stream.until == "read":
        return _map(order, lambda ticket: _read_in_python(examples, ticket & (2**32 - 1)), parallel)
    files_per_call = _files_at_once(batch_size)

    def decode(numbers: Tensor) -> Tuple[Tensor, ...]:
        epochs, turns, indices = split_ticket(numbers, rounds)
        random = (stream.seed, epochs, turns) if stream.augments else None
        images = _decode_in_python(examples, info, stream.input_shape, random, indices)
        return images, tf.gather(all_labels, indices), numbers

    def finish(images: Tensor, labels: Tensor, numbers: Tensor) -> Tuple[Tensor, ...]:
        tickets = split_ticket(numbers, rounds)
        columns = _mixed(prepare_size(images, stream.input_shape), labels, info, stream, tickets)
        return (*columns, _first_round(tickets[1])) if stream.weigh_padding else columns

    calls = order.batch(files_per_call, drop_remainder=True)
    if stream.until != "batch":
        return _map(calls, lambda numbers: decode(numbers)[:2], parallel).unbatch()
    return _joined(calls, decode, finish, batch_size, files_per_call, parallel)


def _joined(
    calls: tf.data.Dataset,
    decode: Callable[..., Tuple[Tensor, ...]],
    finish: Callable[..., Tuple[Tensor, ...]],
    batch_size: int,
    at_once: int,
    parallel: int,
) -> tf.data.Dataset:
    """Makes batches of files: decodes ``at_once`` images per call, then finishes each batch as a whole."""
    if at_once == batch_size:
        return _map(calls, lambda *call: finish(*decode(*call)), parallel)

    def join(*parts: Tensor) -> Tuple[Tensor, ...]:
        return finish(*(tf.reshape(part, [batch_size, *part.shape[2:]]) for part in parts))

    batches = _map(calls, decode, parallel).batch(batch_size // at_once, drop_remainder=True)
    return _map(batches, join, parallel)


def _mixed(
    images: Tensor, labels: Tensor, info: DatasetInfo, stream: Stream, tickets: Tickets
) -> Tuple[Tensor, ...]:
    """Mixes images of the network's size and their labels, and scales the images to the network's range."""
    if stream.mixing is not None:
        mean = pixel_mean(info, stream.input_shape)
        images, labels = stream.mixing.apply(images, labels, stream.seed, tickets, mean)
    return prepare_range(images, stream.input_shape, stream.input_range), labels


def _first_round(turns: Tensor) -> Tensor:
    """Returns float32 weights: 1 in the first permutation of an epoch, 0 in later ones."""
    return tf.cast(tf.equal(turns, 0), tf.float32)


def eval_batches(
    examples: Examples,
    info: DatasetInfo,
    *,
    batch_size: int,
    input_shape: InputShape,
    input_range: InputRange,
    output_shape: Optional[Tuple[int, int]] = None,
    num_parallel: Optional[int] = None,
    patch_step: int = 1,
    shard: Tuple[int, int] = (1, 0),
    part: Tuple[int, int] = (1, 0),
) -> tf.data.Dataset:
    """Returns batches with every sample exactly once, in stored order: (images, labels, weights float32 [batch]).

    Images and labels are those of :func:`train_batches` without augmentation.  The last batch is padded with zeros of
    weight 0, so that all batches have one static shape.

    The samples of a patchwise set are the patches that cover each image, at multiples of ``patch_step``.  Every pixel
    counts in one patch and has the label IGNORED in others; the weight of a patch is its number of pixels that count.

    Args:
        shard: (count, index) to take every ``count``-th batch from number ``index`` on; the others are not read.
        part: (count, index) to take number ``index`` of ``count`` equal parts of each batch; the others are not read.
            The last part is padded if the batch does not divide evenly.
    """
    _require_examples(examples, info)
    part_size = at_once = _part_size(batch_size, part)
    count = len(examples)
    if isinstance(examples, MaskedExamples):
        size = (input_shape[0], input_shape[1])
        count, read = evaluation_patches(examples, part_size, size, output_shape or size, patch_step)

        def finish(images: Tensor, labels: Tensor, weights: Tensor) -> Tuple[Tensor, ...]:
            return prepare_range(images, input_shape, input_range), labels, weights

    else:
        stored_labels = tf.constant(examples.labels)
        stored_images = None
        if isinstance(examples, ArrayExamples) and has_stored_form(examples, info):
            stored_images = tf.constant(examples.images)
        else:
            at_once = _files_at_once(part_size)

        def pixels_and_labels(row: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
            real = row < count
            present = tf.where(real, row, 0)
            if stored_images is not None:
                images = tf.gather(stored_images, present)
            else:
                images = _decode_in_python(examples, info, input_shape, None, tf.where(real, row, NOTHING))
            return images, tf.gather(stored_labels, present), real

        read = pixels_and_labels

        def finish(images: Tensor, labels: Tensor, weights: Tensor) -> Tuple[Tensor, ...]:
            images = prepare_range(prepare_size(images, input_shape), input_shape, input_range)
            labels = prepare_labels(labels, input_shape, output_shape)
            return _masked(images, weights), _masked(labels, weights), tf.cast(weights, tf.float32)

    rows = _eval_rows(count, batch_size, shard, part)
    calls = tf.data.Dataset.from_tensor_slices(rows.reshape(-1, at_once))
    batches = _joined(calls, read, finish, part_size, at_once, parallel_calls(num_parallel))
    batches = batches.apply(tf.data.experimental.assert_cardinality(len(rows)))
    return batches.prefetch(_prefetch(part_size, input_shape))


def has_stored_form(examples: ArrayExamples, info: DatasetInfo) -> bool:
    """Returns whether images have the size and channels of the set that the network was trained on.

    Images with masks may have any size, and keep it.
    """
    return info.task == "segmentation" or examples.images.shape[1:] == tuple(info.image_shape)


def _masked(values: Tensor, real: Tensor) -> Tensor:
    """Returns values [b, ...] with zeros in place of those that are not ``real``, bool [b]."""
    keep = tf.reshape(real, [-1] + [1] * (values.shape.rank - 1))
    return tf.where(keep, values, tf.zeros_like(values))


def _part_size(batch_size: int, part: Tuple[int, int]) -> int:
    """Returns the number of samples in one part of a batch."""
    return -(-batch_size // part[0])


def _eval_rows(count: int, batch_size: int, shard: Tuple[int, int], part: Tuple[int, int]) -> np.ndarray:
    """Returns the sample numbers of each batch of an evaluation of ``count`` samples, see :func:`eval_batches`.

    The result is int64 [batches, samples]; the number ``count`` stands for padding.
    """
    num_batches, size = -(-count // batch_size), _part_size(batch_size, part)
    rows: np.ndarray = np.full((num_batches, size * part[0]), count, np.int64)
    rows[:, :batch_size] = np.minimum(np.arange(num_batches * batch_size), count).reshape(
        num_batches, batch_size
    )
    return rows[shard[1] :: shard[0], size * part[1] : size * (part[1] + 1)]


def constant_batch(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set that repeats the first element of ``batches`` from memory."""
    return tf.data.Dataset.from_tensors(next(iter(batches))).repeat()


_raised: Dict[str, DataError] = {}
"""Errors raised in functions that TensorFlow calls, by name: TensorFlow passes on only an error's text."""


@contextmanager
def data_errors() -> Iterator[None]:
    """Replaces the TensorFlow error of a pipeline by the DataError of the file that caused it."""
    try:
        yield
    except tf.errors.OpError as error:
        match = re.search(r"ipucnn-data-error-\d+", str(error))
        if match is None or match.group() not in _raised:
            raise
        raise _raised[match.group()] from None


def _crossing(error: DataError) -> ValueError:
    """Stores an error, and returns one for TensorFlow whose text is the name that :func:`data_errors` looks up."""
    name = f"ipucnn-data-error-{next(_numbers)}"
    _raised[name] = error
    return ValueError(name)


_numbers = itertools.count()


def _read_in_python(examples: ImageFiles, index: Tensor) -> Tensor:
    """Returns the bytes of one encoded image, as a string tensor."""

    def read(position: np.int64) -> bytes:
        try:
            return examples.encoded(int(position))
        except DataError as error:
            raise _crossing(error) from error

    return tf.numpy_function(read, [index], tf.string)


def _decode_in_python(
    examples: Union[ArrayExamples, ImageFiles],
    info: DatasetInfo,
    input_shape: InputShape,
    random: Optional[Tuple[int, Tensor, Tensor]],
    indices: Tensor,
) -> Tensor:
    """Decodes n images to uint8 [n, h, w, stored channels], with zeros for each index ``NOTHING``.

    Images in memory that have another size or other channels than the stored ones are converted as files are.
    ``random`` is (seed, epochs, rounds) for random crops, or None for those of evaluation.
    """
    from ipucnn.datasets import images as image_files

    size, channels = (input_shape[0], input_shape[1]), info.image_shape[2]
    if random is None:
        size = image_files.crop_of_evaluation(info, input_shape)[0]

    def decode(positions: Tensor, epochs: Tensor, turns: Tensor) -> Tensor:
        images = _aligned((len(positions), *size, channels))
        words = (word.astype(np.uint64) for word in (epochs, turns, positions))
        states = draw(random[0], AUGMENT, *words) if random is not None else positions
        try:
            with tf.device("/CPU:0"):
                read = _read_ahead(examples, positions.tolist())
                for image, (data, origin), state in zip(images, read, states.tolist()):
                    if not origin:
                        image[:] = 0
                    elif random is None:
                        image[:] = image_files.pixels_for_evaluation(data, origin, info, input_shape)
                    else:
                        assert isinstance(data, bytes)  # arrays are augmented as tensors
                        image_files.decode_for_training(
                            data, origin, image, state, info.max_image_pixels, info.crops
                        )
        except DataError as error:
            from ipucnn.datasets.damaged import hint_where_run_ends

            hint = hint_where_run_ends(error, info)
            raise _crossing(DataError(printable(error.message), hint, error.code)) from error
        return images

    epochs, turns = random[1:] if random is not None else (indices, indices)
    images = tf.numpy_function(decode, [indices, epochs, turns], tf.uint8)
    images.set_shape((indices.shape[0], size[0], size[1], channels))
    return images


def _read_ahead(
    examples: Union[ArrayExamples, ImageFiles], positions: List[int]
) -> Iterator[Tuple[Union[bytes, np.ndarray], str]]:
    """Yields each image, encoded or as pixels, and its name in messages, which is empty for ``NOTHING``.

    Several images are read before the first is decoded, so that the code and data of reading stay in the processor's
    cache; decoding evicts them.
    """
    if isinstance(examples, ArrayExamples):
        yield from ((examples.images[at], "image" if at != NOTHING else "") for at in positions)
        return
    read: List[Tuple[bytes, str]] = []
    num_bytes = 0
    for position in positions:
        read.append(
            (examples.encoded(position), examples.describe(position)) if position != NOTHING else (b"", "")
        )
        num_bytes += len(read[-1][0])
        if num_bytes >= READ_AHEAD_BYTES:
            yield from read
            read, num_bytes = [], 0
    yield from read


def _aligned(shape: Tuple[int, ...]) -> np.ndarray:
    """Returns an uninitialised uint8 array, aligned so that TensorFlow uses it without a copy."""
    buffer: np.ndarray = np.empty(int(np.prod(shape)) + _ALIGNED_BYTES, np.uint8)
    first = -buffer.ctypes.data % _ALIGNED_BYTES
    return buffer[first : first + int(np.prod(shape))].reshape(shape)


def _files_at_once(batch_size: int) -> int:
    """Returns the number of image files per call, a divisor of the batch; a call costs as much as reading one file."""
    return max(count for count in range(1, FILES_AT_ONCE + 1) if batch_size % count == 0)


def _map(batches: tf.data.Dataset, function: Callable[..., Tensor], parallel: int) -> tf.data.Dataset:
    """Maps a function over batches in order, without AutoGraph, which is not needed and would wrap errors."""
    function = tf.autograph.experimental.do_not_convert(function)
    return batches.map(function, num_parallel_calls=parallel, deterministic=True)


def _require_examples(examples: Examples, info: DatasetInfo) -> None:
    if len(examples) == 0:
        raise DataError(
            f"data set {info.name} in {info.location} has no images for this",
            "check --dataset-path and --limit-train",
        )


def parallel_calls(num_parallel: Optional[int]) -> int:
    """Returns the number of parallel calls for ``--pipeline-num-parallel``, at most twice the cores."""
    if num_parallel is None:
        return tf.data.AUTOTUNE
    return max(1, min(num_parallel, 2 * num_cores()))


def buffered_elements(batch_size: int, input_shape: InputShape, num_parallel: Optional[int]) -> int:
    """Returns the most batches that :func:`train_batches` prepares ahead of its consumer."""
    calls = max(parallel_calls(num_parallel), num_cores())
    return _prefetch(batch_size, input_shape) + calls * _group(batch_size, input_shape)


def _group(batch_size: int, input_shape: InputShape) -> int:
    """Returns the number of batches that one call prepares from images in memory."""
    batch_bytes = _batch_bytes(batch_size, input_shape)
    return max(1, min(SMALLEST_GROUP // batch_size, LARGEST_GROUP_BYTES // batch_bytes))


def _batch_bytes(batch_size: int, input_shape: InputShape) -> int:
    return batch_size * int(np.prod(input_shape)) * 4


def _prefetch(batch_size: int, input_shape: InputShape) -> int:
    """Returns the number of batches to prefetch: four, or two if they are large."""
    return 2 if _batch_bytes(batch_size, input_shape) > LARGE_BATCH_BYTES else 4


# The order of training samples: a pure function of (seed, epoch) that can start at any sample directly.


def sample_order(
    size: int, *, samples_per_epoch: int, seed: int, start_epoch: int, start_sample: int, shuffle: bool
) -> tf.data.Dataset:
    """Returns infinite int64 scalars, one per sample: (epoch * rounds per epoch + round) * 2**32 + index.

    An epoch with more samples than the set has consists of several permutations, its rounds.  Each permutation is
    computed by sorting hashes when it begins, so a late start replays nothing.
    """
    rounds = -(-samples_per_epoch // size)
    start_epoch, start_sample = (
        start_epoch + start_sample // samples_per_epoch,
        start_sample % samples_per_epoch,
    )
    first_turn, first_skip = start_epoch * rounds + start_sample // size, start_sample % size
    state = stream_state(seed, ORDER)

    def one_round(turn: Tensor) -> tf.data.Dataset:
        indices = tf.range(size, dtype=tf.int64)
        if shuffle:
            epoch_state = chain(tf.constant(state, tf.int64), turn // rounds, shift_right)
            keys = chain(chain(epoch_state, turn % rounds, shift_right), indices, shift_right)
            # With 31 bits of hash above the index, sorting the numbers orders the indices by hash.
            indices = tf.sort(shift_right(keys, 1) * 2**32 + indices) & (2**32 - 1)
        end = tf.minimum(tf.constant(size, tf.int64), samples_per_epoch - (turn % rounds) * size)
        begin = tf.where(turn == first_turn, tf.constant(first_skip, tf.int64), tf.constant(0, tf.int64))
        return tf.data.Dataset.from_tensor_slices(turn * 2**32 + indices[begin:end])

    turns = tf.data.Dataset.range(first_turn, 2**31)
    return turns.flat_map(tf.autograph.experimental.do_not_convert(one_round))


def split_ticket(tickets: Tensor, rounds: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Splits the numbers that :func:`sample_order` yields into (epoch, round, index)."""
    turn = shift_right(tickets, 32)
    return turn // rounds, turn % rounds, tickets & (2**32 - 1)


# Batches of evaluation patches: the arithmetic of ``segmentation.patches`` with TensorFlow's gathers.


def num_evaluation_samples(examples: Examples, output: Tuple[int, ...], step: int) -> int:
    """Returns the number of images, or, of images with masks of any sizes, of the patches that cover them.

    ``output`` is the size that a network predicts of a patch, and ``step`` is that of :func:`evaluation_patches`.
    """
    if not isinstance(examples, MaskedExamples):
        return len(examples)
    from ipucnn.datasets.segmentation.patches import patch_table

    return len(patch_table(examples.sizes, (output[0], output[1]), step))


def evaluation_patches(
    examples: MaskedExamples, batch_size: int, size: Tuple[int, int], output: Tuple[int, int], step: int
) -> Tuple[int, Callable[[Tensor], Tuple[Tensor, Tensor, Tensor]]]:
    """Returns the patches that cover all images; each pixel counts once.

    Args:
        examples: the images and masks.
        batch_size: number of patches in a batch.
        size: (height, width) of the network's input.
        output: (height, width) of the network's prediction, the centre of its input.
        step: grid spacing in pixels; patches begin at its multiples.

    Returns:
        The number of patches, and a function for ``tf.data`` that takes the numbers of a batch's patches, int64
        [batch_size].  The function returns float32 images [batch_size, *size, c] in 0..255, int32 labels
        [batch_size, *output], and float32 weights [batch_size]: the number of pixels that count in each patch, which
        is an integer, so that sums are exact, and 0 if all pixels of a patch are ignored.  For numbers beyond the last
        patch it returns zeros of weight 0.
    """
    from ipucnn.datasets.segmentation.patches import IGNORED, patch_table
    from ipucnn.datasets.segmentation.warp import StoredImages, wide

    patches = patch_table(examples.sizes, output, step)
    stored, table = StoredImages(examples), tf.constant(patches)
    top, left = (size[0] - output[0]) // 2, (size[1] - output[1]) // 2

    def cut(numbers: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        is_real = wide(numbers < len(patches))
        which, row, column, first_row, first_column = tf.unstack(
            tf.gather(table, tf.where(numbers < len(patches), numbers, 0)), axis=1
        )
        rows = wide(row) - top + tf.range(size[0], dtype=tf.int64)[:, tf.newaxis]
        columns = wide(column) - left + tf.range(size[1], dtype=tf.int64)
        places = stored.rows(which, rows) + stored.columns(which, columns)
        images = tf.cast(tf.gather(stored.pixels, places), tf.float32) * tf.cast(
            is_real[..., tf.newaxis], tf.float32
        )
        inner = slice(top, top + output[0]), slice(left, left + output[1])
        heights, widths = map(wide, stored.sizes(which))
        rows, columns = rows[:, inner[0]], columns[:, :, inner[1]]
        counts = (rows >= wide(first_row)) & (rows < heights)
        counts = counts & (columns >= wide(first_column)) & (columns < widths) & is_real
        labels = tf.where(
            counts, tf.cast(tf.gather(stored.labels, places[:, inner[0], inner[1]]), tf.int32), IGNORED
        )
        weights = tf.cast(tf.math.count_nonzero(labels >= 0, axis=(1, 2)), tf.float32)
        images.set_shape((batch_size, *size, examples.pixels.shape[1]))
        labels.set_shape((batch_size, *output))
        return images, labels, weights

    return len(patches), cut
