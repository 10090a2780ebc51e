"""Batches for training, evaluation and inference as ``tf.data``, from any source.

The order of epoch e is a permutation that is a pure function of (seed, e), and a sample's augmentation one of
(seed, epoch, index): neither depends on the batch size, on where the run starts, or on the number of threads.
A run that was cut anywhere, or that changes how many micro-batches it fuses, sees the same samples.
"""

import itertools
import re
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.datasets.augmentation import AUGMENTATIONS, draws, shift_right
from ipucnn.datasets.base import ArrayExamples, DatasetInfo, DataSource, Examples, ImageFiles
from ipucnn.datasets.hashing import AUGMENT, ORDER, chain, draw, stream_state
from ipucnn.datasets.preprocessing import pixel_mean, prepare_labels, prepare_range, prepare_size
from ipucnn.datasets.segmentation.tiles import IGNORED, counted, seen, tile_places
from ipucnn.datasets.segmentation.warp import ELASTIC_DRAWS, training_tiles
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
"""Where TensorFlow's tensors begin in memory (EIGEN_MAX_ALIGN_BYTES)."""
NOTHING = -1
"""The index of an image that is not there: what the last batch of an evaluation is filled up with."""
STAGES = ("read", "decode", "augment", "batch")
"""What a training sample goes through, in this order; see ``until`` of :class:`Stream`."""


@dataclass(frozen=True)
class Stream:
    """Which training batches are made, and how.

    Attributes:
        batch_size: samples per batch; any number, whole epochs need not be whole batches.
        samples_per_epoch: after how many samples the next epoch's permutation begins.  Fewer than the set
            has: each epoch leaves others out.  More: further permutations of the same epoch follow.
        input_shape: (height, width, channels) of the network's input.
        input_range: what the network wants; see :func:`ipucnn.datasets.preprocessing.normalise`.
        augment: whether to apply the source's training augmentation.
        seed: of order and augmentation, any integer.
        start_epoch, start_sample: where to begin; ``start_sample`` samples of that epoch are skipped
            without being read.
        shuffle: False takes the stored order in every epoch.
        num_parallel: batches (images, for files) prepared at once; beyond twice the cores it would only
            cost memory and is cut.  None lets TensorFlow choose.
        output_shape: (h', w') of the logits of a segmentation network: masks are cropped to it.
        weigh_padding: batches are (images, labels, weights float32 [batch]): 1 for the first permutation of an
            epoch, 0 for what further ones fill it up with.
        until: the stage to stop after, to measure it; what is delivered is then not for a network.  Of arrays:
            "read" gathers stored pixels, "decode" makes floats of the network's size, "augment" augments, and
            "batch" does the rest.  Of files, single samples until "batch": "read" delivers bytes, "decode" the
            centre of the image, "augment" a random crop instead.
        shard: (count, index): every ``count``-th batch from number ``index`` on; the others are not read.
        mixing: what else is done to images that are no tiles; batches are then whole micro-batches.
    """

    batch_size: int
    samples_per_epoch: int
    input_shape: InputShape
    input_range: str
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
        """How many permutations of the examples an epoch goes through."""
        return -(-self.samples_per_epoch // num_examples)

    @property
    def augments(self) -> bool:
        """Whether samples are augmented before the stage to stop after."""
        return self.augment and STAGES.index(self.until) >= STAGES.index("augment")


Tickets = Tuple[Tensor, Tensor, Tensor]
"""(epochs, rounds, indices) of samples, int64 [batch] each."""


def train_batches(source: DataSource, stream: Stream) -> tf.data.Dataset:
    """Infinite batches of (images float32 [batch, h, w, c], labels int32 [batch] or [batch, h', w']).

    A file that cannot be decoded raises when its batch is asked for; wrap the loop in
    :func:`data_errors` to get a DataError.
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
    if not isinstance(examples, ArrayExamples):
        batches = _file_batches(examples, source.info, stream, order)
    else:
        make = _tiles if source.info.tiled else _arrays
        rounds = stream.rounds(len(examples))
        batches = _grouped(make(examples, source.info, stream), stream, order, rounds)
    if stream.until != "batch":
        return batches
    return batches.prefetch(_prefetch(stream.batch_size, stream.input_shape))


def _arrays(
    examples: ArrayExamples, info: DatasetInfo, stream: Stream
) -> Callable[[Tickets], Tuple[Tensor, ...]]:
    """What makes batches of images in memory."""
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


def _tiles(
    examples: ArrayExamples, info: DatasetInfo, stream: Stream
) -> Callable[[Tickets], Tuple[Tensor, ...]]:
    """What makes batches of tiles of images in memory."""
    stored_images, stored_labels = tf.constant(examples.images), tf.constant(examples.labels)
    size = stream.input_shape[:2]

    def prepare(tickets: Tickets) -> Tuple[Tensor, ...]:
        random = draws(stream.seed, *tickets, ELASTIC_DRAWS)
        images, labels = training_tiles(
            stored_images,
            stored_labels,
            tickets[2],
            random,
            size,
            stream.output_shape or size,
            stream.augments,
        )
        images = prepare_range(images, stream.input_shape, stream.input_range, info)
        return images, tf.cast(labels, tf.int32)

    return prepare


def _grouped(
    prepare: Callable[[Tickets], Tuple[Tensor, ...]], stream: Stream, order: tf.data.Dataset, rounds: int
) -> tf.data.Dataset:
    """Batches of what is in memory; small ones are prepared several at a time: most of their cost is per call."""
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
    """Batches of images that are decoded when they are needed."""
    batch_size, parallel = stream.batch_size, parallel_calls(stream.num_parallel)
    rounds = stream.rounds(len(examples))
    all_labels = tf.constant(examples.labels)
    if stream.until == "read":
        return _map(order, lambda ticket: _read_in_python(examples, ticket & (2**32 - 1)), parallel)
    at_once = _files_at_once(batch_size)

    def decode(numbers: Tensor) -> Tuple[Tensor, ...]:
        epochs, turns, indices = split_ticket(numbers, rounds)
        random = (stream.seed, epochs, turns) if stream.augments else None
        images = _decode_in_python(examples, info, stream.input_shape, random, indices)
        return images, tf.gather(all_labels, indices), numbers

    def finish(images: Tensor, labels: Tensor, numbers: Tensor) -> Tuple[Tensor, ...]:
        tickets = split_ticket(numbers, rounds)
        columns = _mixed(prepare_size(images, stream.input_shape), labels, info, stream, tickets)
        return (*columns, _first_round(tickets[1])) if stream.weigh_padding else columns

    calls = order.batch(at_once, drop_remainder=True)
    if stream.until != "batch":
        return _map(calls, lambda numbers: decode(numbers)[:2], parallel).unbatch()
    return _joined(calls, decode, finish, batch_size, at_once, parallel)


def _joined(
    calls: tf.data.Dataset,
    decode: Callable[..., Tuple[Tensor, ...]],
    finish: Callable[..., Tuple[Tensor, ...]],
    batch_size: int,
    at_once: int,
    parallel: int,
) -> tf.data.Dataset:
    """Batches of files, each decoded in calls of ``at_once`` and finished as a whole."""
    if at_once == batch_size:
        return _map(calls, lambda *call: finish(*decode(*call)), parallel)

    def join(*parts: Tensor) -> Tuple[Tensor, ...]:
        return finish(*(tf.reshape(part, [batch_size, *part.shape[2:]]) for part in parts))

    batches = _map(calls, decode, parallel).batch(batch_size // at_once, drop_remainder=True)
    return _map(batches, join, parallel)


def _mixed(
    images: Tensor, labels: Tensor, info: DatasetInfo, stream: Stream, tickets: Tickets
) -> Tuple[Tensor, ...]:
    """Images of the network's size and their labels, mixed and in the network's range."""
    if stream.mixing is not None:
        mean = pixel_mean(info, stream.input_shape)
        images, labels = stream.mixing.apply(images, labels, stream.seed, tickets, mean)
    return prepare_range(images, stream.input_shape, stream.input_range, info), labels


def _first_round(turns: Tensor) -> Tensor:
    """float32: 1 in the first permutation of an epoch, 0 in those after."""
    return tf.cast(tf.equal(turns, 0), tf.float32)


def eval_batches(
    examples: Examples,
    info: DatasetInfo,
    *,
    batch_size: int,
    input_shape: InputShape,
    input_range: str,
    output_shape: Optional[Tuple[int, int]] = None,
    num_parallel: Optional[int] = None,
    tile_step: int = 1,
    shard: Tuple[int, int] = (1, 0),
    part: Tuple[int, int] = (1, 0),
) -> tf.data.Dataset:
    """Every sample exactly once, in stored order: (images, labels, weights float32 [batch]).

    Images and labels are those of :func:`train_batches` without augmentation.  The last batch is filled up
    with zeros of weight 0, so that all batches have one static shape.

    Of a tiled set the samples are the tiles that cover each image, at multiples of ``tile_step``: every pixel
    counts in one of them and has the label IGNORED in others, and the weight of a tile is the number of pixels that
    count in it.

    Args:
        shard: (count, index): every ``count``-th batch from number ``index`` on; the others are not read.
        part: (count, index): number ``index`` of ``count`` equal parts of each batch, of which the last is filled up
            where they do not come out even; the others are not read.
    """
    _require_examples(examples, info)
    if info.tiled:
        assert isinstance(examples, ArrayExamples)
        size = (input_shape[0], input_shape[1])
        parallel = parallel_calls(num_parallel)
        own_size = _part_size(batch_size, part)
        num_tiles, cut = evaluation_tiles(examples, own_size, size, output_shape or size, tile_step)

        def prepare_tiles(numbers: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
            images, labels, weights = cut(numbers)
            return prepare_range(images, input_shape, input_range, info), labels, weights

        rows = tf.data.Dataset.from_tensor_slices(_eval_rows(num_tiles, batch_size, shard, part))
        batches = _map(rows, prepare_tiles, parallel)
        return batches.prefetch(_prefetch(own_size, input_shape))
    indices = _eval_rows(len(examples), batch_size, shard, part)
    batch_size = _part_size(batch_size, part)
    parallel = parallel_calls(num_parallel)
    stored_labels = tf.constant(examples.labels)

    def masked(values: Tensor, real: Tensor) -> Tensor:
        keep = tf.reshape(real, [-1] + [1] * (values.shape.rank - 1))
        return tf.where(keep, values, tf.zeros_like(values))

    def finish(images: Tensor, labels: Tensor, real: Tensor) -> Tuple[Tensor, ...]:
        images = prepare_range(prepare_size(images, input_shape), input_shape, input_range, info)
        labels = prepare_labels(labels, input_shape, output_shape)
        return masked(images, real), masked(labels, real), tf.cast(real, tf.float32)

    if isinstance(examples, ArrayExamples):
        stored_images = tf.constant(examples.images)

        def prepare(row: Tensor) -> Tuple[Tensor, ...]:
            real = row < len(examples)
            row = tf.where(real, row, 0)
            return finish(tf.gather(stored_images, row), tf.gather(stored_labels, row), real)

        batches = _map(tf.data.Dataset.from_tensor_slices(indices), prepare, parallel)
    else:
        at_once = _files_at_once(batch_size)

        def decode(row: Tensor) -> Tuple[Tensor, ...]:
            real = row < len(examples)
            images = _decode_in_python(examples, info, input_shape, None, tf.where(real, row, NOTHING))
            return images, tf.gather(stored_labels, tf.where(real, row, 0)), real

        calls = tf.data.Dataset.from_tensor_slices(indices.reshape(-1, at_once))
        batches = _joined(calls, decode, finish, batch_size, at_once, parallel)
        batches = batches.apply(tf.data.experimental.assert_cardinality(len(indices)))
    return batches.prefetch(_prefetch(batch_size, input_shape))


def _part_size(batch_size: int, part: Tuple[int, int]) -> int:
    """Samples of a batch that are one of its parts."""
    return -(-batch_size // part[0])


def _eval_rows(count: int, batch_size: int, shard: Tuple[int, int], part: Tuple[int, int]) -> np.ndarray:
    """int64 [batches, samples]: the numbers of what an evaluation of ``count`` samples takes, see :func:`eval_batches`;
    ``count`` itself stands for none."""
    num_batches, size = -(-count // batch_size), _part_size(batch_size, part)
    rows: np.ndarray = np.full((num_batches, size * part[0]), count, np.int64)
    rows[:, :batch_size] = np.minimum(np.arange(num_batches * batch_size), count).reshape(
        num_batches, batch_size
    )
    return rows[shard[1] :: shard[0], size * part[1] : size * (part[1] + 1)]


def constant_batch(batches: tf.data.Dataset) -> tf.data.Dataset:
    """The first element of a data set, over and over, from memory."""
    return tf.data.Dataset.from_tensors(next(iter(batches))).repeat()


_raised: Dict[str, DataError] = {}
"""Errors of functions that TensorFlow calls, until they are raised again: only a text of theirs crosses it."""


@contextmanager
def data_errors() -> Iterator[None]:
    """Raises the DataError of a file in place of the TensorFlow error of the pipeline that met it."""
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(r"ipucnn-data-error-\d+", str(error))
        if found is None or found.group() not in _raised:
            raise
        raise _raised[found.group()] from None


def _crossing(error: DataError) -> ValueError:
    """What TensorFlow is told in place of an error: the name under which :func:`data_errors` finds it."""
    name = f"ipucnn-data-error-{next(_numbers)}"
    _raised[name] = error
    return ValueError(name)


_numbers = itertools.count()


def _read_in_python(examples: ImageFiles, index: Tensor) -> Tensor:
    """The bytes of one encoded image, as a string."""

    def read(position: np.int64) -> bytes:
        try:
            return examples.encoded(int(position))
        except DataError as error:
            raise _crossing(error) from error

    return tf.numpy_function(read, [index], tf.string)


def _decode_in_python(
    examples: ImageFiles,
    info: DatasetInfo,
    input_shape: InputShape,
    random: Optional[Tuple[int, Tensor, Tensor]],
    indices: Tensor,
) -> Tensor:
    """uint8 [n, h, w, stored channels] of n encoded images, zeros where an index is ``NOTHING``; ``random`` is (seed,
    epochs, rounds) or None."""
    from ipucnn.datasets import images as image_files

    size, channels = (input_shape[0], input_shape[1]), info.image_shape[2]

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
                        image_files.decode_for_training(
                            data, origin, image, state, info.max_image_pixels, info.crops
                        )
        except DataError as error:
            hint = _hint_of_file(error, info)
            raise _crossing(DataError(printable(error.message), hint, error.code)) from error
        return images

    epochs, turns = random[1:] if random is not None else (indices, indices)
    images = tf.numpy_function(decode, [indices, epochs, turns], tf.uint8)
    images.set_shape((indices.shape[0], size[0], size[1], channels))
    return images


def _hint_of_file(error: DataError, info: DatasetInfo) -> str:
    """What to do about a file that cannot be read, and what names the others: training ends at the first one."""
    hints = [error.hint] if error.hint else []
    if info.location:
        folder = shlex.quote(printable(info.location))
        hints.append(
            f"ipucnn verify-dataset --dataset-path {folder} names every damaged file, --skip-damaged leaves them out"
        )
    return "; ".join(hints)


def _read_ahead(examples: ImageFiles, positions: List[int]) -> Iterator[Tuple[bytes, str]]:
    """Each encoded image and what messages call it, both empty for ``NOTHING``.

    Some are read before the first is decoded: what reading needs is in the processor's cache then, from which decoding
    drives it out.
    """
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
    """uint8 at a place from which TensorFlow takes it over without a copy."""
    buffer: np.ndarray = np.empty(int(np.prod(shape)) + _ALIGNED_BYTES, np.uint8)
    first = -buffer.ctypes.data % _ALIGNED_BYTES
    return buffer[first : first + int(np.prod(shape))].reshape(shape)


def _files_at_once(batch_size: int) -> int:
    """How many image files one call decodes: a divisor of the batch, because each call costs as much as reading one."""
    return max(count for count in range(1, FILES_AT_ONCE + 1) if batch_size % count == 0)


def _map(batches: tf.data.Dataset, function: Callable[..., Tensor], parallel: int) -> tf.data.Dataset:
    """Maps in order.  AutoGraph has nothing to convert here, and would wrap the errors raised on the way."""
    function = tf.autograph.experimental.do_not_convert(function)
    return batches.map(function, num_parallel_calls=parallel, deterministic=True)


def _require_examples(examples: Examples, info: DatasetInfo) -> None:
    if len(examples) == 0:
        raise DataError(
            f"data set {info.name} in {info.location} has no images for this",
            "check --dataset-path and --limit-train",
        )


def parallel_calls(num_parallel: Optional[int]) -> int:
    """How many elements are prepared at once of what ``--pipeline-num-parallel`` asks for."""
    if num_parallel is None:
        return tf.data.AUTOTUNE
    return max(1, min(num_parallel, 2 * num_cores()))


def buffered_elements(batch_size: int, input_shape: InputShape, num_parallel: Optional[int]) -> int:
    """How many batches :func:`train_batches` has ready or under way at most, if nobody takes any."""
    calls = max(parallel_calls(num_parallel), num_cores())
    return _prefetch(batch_size, input_shape) + calls * _group(batch_size, input_shape)


def _group(batch_size: int, input_shape: InputShape) -> int:
    """How many batches of images in memory are prepared by one call."""
    batch_bytes = _batch_bytes(batch_size, input_shape)
    return max(1, min(SMALLEST_GROUP // batch_size, LARGEST_GROUP_BYTES // batch_bytes))


def _batch_bytes(batch_size: int, input_shape: InputShape) -> int:
    return batch_size * int(np.prod(input_shape)) * 4


def _prefetch(batch_size: int, input_shape: InputShape) -> int:
    """Two batches ready; four where they are small enough for that to cost nothing."""
    return 2 if _batch_bytes(batch_size, input_shape) > LARGE_BATCH_BYTES else 4


# The order samples are trained on: a pure function of (seed, epoch), entered anywhere at once.


def sample_order(
    size: int, *, samples_per_epoch: int, seed: int, start_epoch: int, start_sample: int, shuffle: bool
) -> tf.data.Dataset:
    """Infinite int64 scalars, one per sample: (epoch * rounds per epoch + round) * 2**32 + index.

    An epoch of more samples than the set has goes through several permutations, its rounds.  Each is sorted
    out of hashes when it is reached, so starting late replays nothing.
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
            # 31 bits of hash above the index: sorting sorts by hash and carries the index along.
            indices = tf.sort(shift_right(keys, 1) * 2**32 + indices) & (2**32 - 1)
        end = tf.minimum(tf.constant(size, tf.int64), samples_per_epoch - (turn % rounds) * size)
        begin = tf.where(turn == first_turn, tf.constant(first_skip, tf.int64), tf.constant(0, tf.int64))
        return tf.data.Dataset.from_tensor_slices(turn * 2**32 + indices[begin:end])

    turns = tf.data.Dataset.range(first_turn, 2**31)
    return turns.flat_map(tf.autograph.experimental.do_not_convert(one_round))


def split_ticket(tickets: Tensor, rounds: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(epoch, round, index) of what :func:`sample_order` yields."""
    turn = shift_right(tickets, 32)
    return turn // rounds, turn % rounds, tickets & (2**32 - 1)


# Evaluation tiles as batches: the arithmetic of :mod:`ipucnn.datasets.segmentation.tiles` with TensorFlow's gathers.


def num_evaluation_samples(examples: Examples, info: DatasetInfo, output: Tuple[int, ...], step: int) -> int:
    """What is evaluated one by one: images, or the tiles that cover them, of which a network predicts ``output``."""
    if not info.tiled:
        return len(examples)
    assert isinstance(examples, ArrayExamples)
    height, width = examples.images.shape[1:3]
    return len(examples) * len(tile_places((height, width), (output[0], output[1]), step))


def evaluation_tiles(
    examples: ArrayExamples, batch_size: int, size: Tuple[int, int], output: Tuple[int, int], step: int
) -> Tuple[int, Callable[[Tensor], Tuple[Tensor, Tensor, Tensor]]]:
    """The tiles that cover all images, each pixel once.

    Args:
        examples: ``ArrayExamples`` with masks.
        batch_size: tiles of a batch.
        size: of the network's input.
        output: of what it predicts, the centre of that.
        step: tiles begin at multiples of it.

    Returns:
        How many there are; and a function for ``tf.data``, of the numbers of a batch's tiles, int64 [batch_size]; where
        no tile has the number, it gives zeros of weight 0.  It returns float32 images [batch_size, *size, c] in
        0..255, int32 labels [batch_size, *output], and float32 weights [batch_size], how many pixels count in a
        tile: whole numbers, whose sum is exact.
    """
    num, height, width, channels = examples.images.shape
    places = counted((height, width), output, step)
    rows, columns = seen((height, width), output, size, step)
    top, left = (size[0] - output[0]) // 2, (size[1] - output[1]) // 2
    sizes = np.float32(places.sum(axis=(1, 2)))
    stored = tf.constant(examples.images.reshape(-1, channels))
    classes = tf.constant(np.ascontiguousarray(examples.labels).reshape(-1))
    rows, columns = tf.constant(rows), tf.constant(columns)
    counts, sizes = tf.constant(places), tf.constant(sizes)

    def cut(numbers: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        is_real = numbers < num * len(places)
        tile = numbers % len(places)
        first = tf.where(is_real, numbers // len(places), 0) * (height * width)
        pixels = (
            first[:, tf.newaxis, tf.newaxis]
            + tf.gather(rows, tile)[:, :, tf.newaxis] * width
            + tf.gather(columns, tile)[:, tf.newaxis, :]
        )
        inner = pixels[:, top : top + output[0], left : left + output[1]]
        real = is_real[:, tf.newaxis, tf.newaxis]
        images = tf.cast(tf.gather(stored, pixels), tf.float32) * tf.cast(real[..., tf.newaxis], tf.float32)
        labels = tf.cast(tf.gather(classes, inner), tf.int32)
        labels = tf.where(tf.gather(counts, tile) & real, labels, IGNORED)
        weights = tf.gather(sizes, tile) * tf.cast(is_real, tf.float32)
        images.set_shape((batch_size, *size, channels))
        labels.set_shape((batch_size, *output))
        return images, labels, weights

    return num * len(places), cut
