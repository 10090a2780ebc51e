"""The types of an opened data set: its facts, and indexable examples for training and for evaluation.

This module does not import TensorFlow; :mod:`ipucnn.datasets.pipeline` turns examples into ``tf.data``.
"""

import hashlib
import math
import os
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.datasets.formats import name_in_set, same_name
from ipucnn.datasets.hashing import LIMIT, permutation
from ipucnn.datasets.limits import LARGEST_FILE_BYTES, MAX_IMAGE_PIXELS, TOO_LARGE, check_memory
from ipucnn.datasets.problems import Unused
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import open_regular, read_bytes, read_text, shown

ImageShape = Tuple[Optional[int], Optional[int], int]
_READ_BYTES = 2**20


IMAGENET_MEAN = (123.675, 116.28, 103.53)
"""Per-channel mean of ImageNet's training images in 0..255 units (0.485, 0.456, 0.406 on [0, 1])."""
IMAGENET_STD = (58.395, 57.12, 57.375)
"""Per-channel standard deviation of ImageNet's training images in 0..255 units."""


@dataclass(frozen=True)
class DatasetInfo:
    """Facts of an opened data set, after limits are applied.

    Attributes:
        name: the registered name.
        task: "classification" or "segmentation".
        num_classes: labels are 0 .. num_classes - 1.
        image_shape: (height, width, channels) of the stored images; None if images differ in size.
        num_train, num_eval: examples after ``--limit-train`` and ``--limit-eval``.
        class_names: one name per class.
        location: "embedded (scikit-learn)", "generated", or the folder it was read from.
        mean, std: per stored channel, in 0..255 units, of the whole training set.
        warnings: messages for the user (a partial set, skipped files), one line each.
        training_warnings: messages that matter only for training, one line each.
        augmentation: the training augmentation that fits, one of ``AUGMENTATION_NAMES``.
        patchwise: whether networks see patches of the images at their own scale, with mirrored borders.
        own_split: whether ipucnn chose the evaluation examples, and not the publisher of the set.
        max_image_pixels: the most pixels of an image file; larger ones are not decoded.
        crops: the data set whose crops of photographs are used; see ``images.crops_of``.
        left_out: damaged files, pages and records that were left out.
        decoded: whether images come from files or records that may be damaged, so that some can be left out.
        class_colours: red, green and blue of each class if masks have colours, else empty.
        mask_values: the stored value of each class in grey masks and in those with a palette, else empty.
        unused: files and folders in the set's folder that are not read, by reason.
        choice: what of the set's folder serves for what; empty if nothing was chosen.
        division: the one of ``warnings`` that says which examples ipucnn holds out; empty if there is none.
    """

    name: str
    task: str
    num_classes: int
    image_shape: ImageShape
    num_train: int
    num_eval: int
    class_names: Tuple[str, ...]
    location: str
    mean: Tuple[float, ...]
    std: Tuple[float, ...]
    warnings: Tuple[str, ...] = ()
    training_warnings: Tuple[str, ...] = ()
    augmentation: str = "none"
    patchwise: bool = False
    own_split: bool = False
    max_image_pixels: int = MAX_IMAGE_PIXELS
    crops: str = ""
    left_out: Tuple[str, ...] = ()
    decoded: bool = False
    class_colours: Tuple[Tuple[int, int, int], ...] = ()
    mask_values: Tuple[int, ...] = ()
    unused: Tuple[Unused, ...] = ()
    choice: str = ""
    division: str = ""


Indices = Union[np.ndarray, Sequence[int]]


@dataclass(frozen=True)
class ArrayExamples:
    """Images of one size, in memory.

    Attributes:
        images: uint8 [n, h, w, c].
        labels: int32 [n] of classes, or uint8 [n, h, w] of masks, int16 if pixels are ignored (``patches.IGNORED``).
        names: the images' file names, for reports; empty if the images are not files.
    """

    images: np.ndarray
    labels: np.ndarray
    names: Tuple[str, ...] = ()

    @property
    def masks(self) -> np.ndarray:
        """The labels, where they are masks."""
        return self.labels

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(
                f"images must be uint8 [n, h, w, c], not {self.images.dtype} {self.images.shape}"
            )
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, indices: Union[Indices, slice]) -> "ArrayExamples":
        names = tuple(np.array(self.names)[indices].tolist()) if self.names else ()
        return ArrayExamples(self.images[indices], self.labels[indices], names)


@dataclass(frozen=True)
class MaskedExamples:
    """Images of any sizes with masks, in memory; networks see patches of them.

    Attributes:
        pixels: uint8 [pixels, c] of all images, one behind another, each row by row.
        labels: the class of each of these pixels, uint8 [pixels], int16 if some are ignored (``patches.IGNORED``).
        sizes: int64 [n, 2], height and width of each image.
        names: the images' file names, for reports; empty if the images are not files.
    """

    pixels: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    names: Tuple[str, ...] = ()

    @classmethod
    def of(cls, images: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> "MaskedExamples":
        """Returns examples of images, uint8 [h, w, c] each, and masks, [h, w] each."""
        sizes: np.ndarray = np.array([image.shape[:2] for image in images], np.int64)
        pixels = np.concatenate([image.reshape(-1, image.shape[-1]) for image in images])
        return cls(pixels, np.concatenate([mask.reshape(-1) for mask in masks]), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def starts(self) -> np.ndarray:
        """The first pixel of each image, and the number of all pixels: int64 [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.sizes[:, 0] * self.sizes[:, 1])])

    @property
    def images(self) -> Tuple[np.ndarray, ...]:
        """The images, uint8 [h, w, c] each."""
        return self._cut(self.pixels)

    @property
    def masks(self) -> Tuple[np.ndarray, ...]:
        """The classes of their pixels, integers [h, w] each."""
        return self._cut(self.labels)

    def _cut(self, values: np.ndarray) -> Tuple[np.ndarray, ...]:
        parts = np.split(values, self.starts[1:-1]) if len(self) else []
        return tuple(part.reshape(*size, *values.shape[1:]) for part, size in zip(parts, self.sizes))

    def subset(self, indices: Union[Indices, slice]) -> "MaskedExamples":
        numbers: np.ndarray = np.arange(len(self))[indices]
        starts = self.starts
        names = tuple(self.names[number] for number in numbers) if self.names else ()
        rows = [slice(starts[number], starts[number + 1]) for number in numbers] or [slice(0)]
        if (np.diff(numbers) == 1).all():  # one run of images needs no copy
            rows = [slice(rows[0].start, rows[-1].stop)]
        pixels, labels = (
            values[rows[0]] if len(rows) == 1 else np.concatenate([values[part] for part in rows])
            for values in (self.pixels, self.labels)
        )
        return MaskedExamples(pixels, labels, self.sizes[numbers], names)


class ArrayFile(NamedTuple):
    """The samples in one file of a set.

    Attributes:
        subset: "train" or "eval".
        path: the file of the images.
        images: uint8 [n, h, w, c].
        label_path: the file of the labels.
        labels: integers [n], or fewer if they are damaged.
    """

    subset: str
    path: Path
    images: np.ndarray
    label_path: Path
    labels: np.ndarray

    def examples(self, num_classes: int) -> ArrayExamples:
        """Returns the samples.  Raises DataError if a label is none of the classes."""
        wrong = self.labels[(self.labels < 0) | (self.labels >= num_classes)]
        if len(wrong):
            text = f"{self.label_path} has label {wrong[0]}; its classes are 0 to {num_classes - 1}"
            raise DataError(text, "copy or download the file again", "label-range")
        return ArrayExamples(self.images, self.labels.astype(np.int32))


@dataclass(frozen=True)
class FileExamples:
    """Image files of any size, decoded when they are needed.

    Attributes:
        paths: one file per example.
        labels: int32 [n] of classes.
        folder: the folder of the set, below which are the files' names; empty if it has none.
    """

    paths: Tuple[str, ...]
    labels: np.ndarray
    folder: str = ""

    def __len__(self) -> int:
        return len(self.paths)

    def encoded(self, index: int) -> bytes:
        """Returns the bytes of one image file.  Raises DataError if it cannot be read."""
        return read_file(self.paths[index])

    def describe(self, index: int) -> str:
        return f"image {self.paths[index]}"

    def name(self, index: int) -> str:
        """Returns the name of one image file in the set."""
        return name_in_set(self.paths[index], self.folder) if self.folder else self.paths[index]

    def subset(self, indices: Indices) -> "FileExamples":
        return replace(self, paths=tuple(self.paths[i] for i in indices), labels=self.labels[indices])


@dataclass(frozen=True)
class EncodedExamples:
    """Encoded images (JPEG, PNG) of any size, in memory.

    Attributes:
        data: the bytes of each image.
        labels: int32 [n] of classes.
        origin: the source of the images, for messages.
    """

    data: Tuple[bytes, ...]
    labels: np.ndarray
    origin: str

    def __len__(self) -> int:
        return len(self.data)

    def encoded(self, index: int) -> bytes:
        return self.data[index]

    def describe(self, index: int) -> str:
        return f"image {index} of {self.origin}"

    def subset(self, indices: Indices) -> "EncodedExamples":
        return EncodedExamples(tuple(self.data[i] for i in indices), self.labels[indices], self.origin)


@dataclass(frozen=True)
class RecordExamples:
    """Encoded images in TFRecord files, read one by one when they are needed.

    Attributes:
        paths: the files.
        shards: int32 [n], the index in ``paths`` of each example's file.
        numbers: int32 [n], the number of each example's record in its file, from 0.
        places: int64 [n], the byte at which each record begins.
        labels: int32 [n] of classes.
    """

    paths: Tuple[str, ...]
    shards: np.ndarray
    numbers: np.ndarray
    places: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, index: int) -> bytes:
        """Returns the bytes of one image.  Raises DataError if the record is damaged or has no image."""
        from ipucnn.datasets.sources.tfrecord import read_example

        data = read_example(*self._place(index), {"image/encoded": bytes})["image/encoded"]
        assert isinstance(data, bytes)
        return data

    def describe(self, index: int) -> str:
        from ipucnn.datasets.sources.tfrecord import place_of

        return f"the image in {place_of(*self._place(index))}"

    def _place(self, index: int) -> Tuple[str, int, int]:
        return self.paths[self.shards[index]], int(self.numbers[index]), int(self.places[index])

    def subset(self, indices: Indices) -> "RecordExamples":
        columns = (column[indices] for column in (self.shards, self.numbers, self.places, self.labels))
        return RecordExamples(self.paths, *columns)


ImageFiles = Union[FileExamples, EncodedExamples, RecordExamples]
"""Examples that are decoded one by one; their types have ``encoded`` and ``describe``."""
Examples = Union[ArrayExamples, MaskedExamples, ImageFiles]
IN_MEMORY = (ArrayExamples, MaskedExamples)
"""Examples whose pixels are in memory; their types have ``images``, ``masks`` and ``names``."""
InMemory = Union[ArrayExamples, MaskedExamples]


@dataclass(frozen=True)
class DataSource:
    """An opened data set: its facts, and its training and evaluation examples.

    Attributes:
        held_out: for a cross-validation fold, the indices in the pool of the examples in ``eval``; else empty.
        pool_sha256: for a cross-validation fold, the :func:`fingerprint` of the pool, the same for every fold.
    """

    info: DatasetInfo
    train: Examples
    eval: Examples
    held_out: Tuple[int, ...] = ()
    pool_sha256: str = ""


AUGMENTATION_NAMES = ("none", "digits", "shift", "shift_flip", "crop", "crop_flip", "dihedral", "elastic")


_MOST_READ, _MOST_BEGUN, _BEGINNING = 2**28, 1000, 2**16
"""The bytes of files that :func:`fingerprint` reads whole; the number of others that it begins, and their bytes."""


def fingerprint(source: DataSource) -> str:
    """Returns the SHA-256 of the data that a run is trained and evaluated on.

    It covers all pixels (or encoded bytes) and labels of sets in memory; names, sizes and labels of image files; and
    names and sizes of record files with the places and labels of their records.  The bytes of image files are read,
    too, if a part has at most ``_MOST_READ`` of them; of more, and of record files, the beginnings of a thousand,
    because all would take as long as an epoch.
    """
    digest = hashlib.sha256()
    for examples in (source.train, source.eval):
        digest.update(np.ascontiguousarray(examples.labels).tobytes())
        if isinstance(examples, MaskedExamples):
            digest.update(str(examples.sizes.tolist()).encode())
            digest.update(np.ascontiguousarray(examples.pixels).data)
        elif isinstance(examples, ArrayExamples):
            digest.update(str(examples.images.shape).encode())
            digest.update(np.ascontiguousarray(examples.images).data)
        elif isinstance(examples, EncodedExamples):
            for data in examples.data:
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)
        else:
            if isinstance(examples, RecordExamples):
                digest.update(np.ascontiguousarray(examples.shards).tobytes())
                digest.update(np.ascontiguousarray(examples.places).tobytes())
            sizes = [_size_of(path) for path in examples.paths]
            # A set of records may lie in any folder; the folder of an image is its class.
            num_parts = 1 if isinstance(examples, RecordExamples) else 2
            for path, size in zip(examples.paths, sizes):
                name = "/".join(Path(path).parts[-num_parts:])
                digest.update(f"{name} {size}\n".encode("utf-8", "surrogateescape"))
            is_small = isinstance(examples, FileExamples) and sum(sizes) <= _MOST_READ
            step, piece = (1, -1) if is_small else (-(-len(sizes) // _MOST_BEGUN) or 1, _BEGINNING)
            for path in examples.paths[::step]:
                with suppress(DataError), open_regular(Path(path)) as file:  # a reader reports it
                    digest.update(hashlib.sha256(file.read(piece)).digest())
    return digest.hexdigest()


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


_FREELY_BYTES = 2**24  # room for files that say they are empty, as those of /proc do


def read_file(path: str) -> bytes:
    """Returns the bytes of a file, without waiting for a FIFO or a device.

    Raises DataError if it cannot be read, is larger than an image can be, or would take more than half of the memory.
    """
    try:
        size = os.stat(path).st_size
    except (OSError, ValueError):
        size = 0  # reading it raises the error
    if size > LARGEST_FILE_BYTES:
        raise DataError(
            f"{shown(path)} has {size:,} bytes, more than an image can have",
            "take it out of the set",
            TOO_LARGE,
        )
    if size > 2**28:  # a check for each photograph would take time
        check_memory(size, shown(path), "take it out of the set, or use a machine with more memory")
    hint = "check that the file exists and is readable"
    try:
        return read_bytes(Path(path), max(size, _FREELY_BYTES), hint)
    except DataError as error:
        raise DataError(error.message, error.hint, "unreadable") from error


CLASSES_FILE = "classes.txt"
"""The file of the classes of records, with one name a line, and of masks, with a value or colour before each name."""
_MOST_CLASSES_BYTES = 2**24


def class_lines(path: Path) -> List[Tuple[int, str]]:
    """Returns the lines of a ``classes.txt`` or another table, with their numbers and without blanks at their ends.

    Blank lines, and those that begin with #, are left out.

    Raises DataError if it cannot be read, or is no UTF-8 text; a byte order mark and any ends of lines are allowed.
    """
    lines = enumerate(read_text(path, _MOST_CLASSES_BYTES).splitlines(), 1)
    stripped = [(number, line.strip()) for number, line in lines]
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def file_digest(path: Path, kind: str = "sha256") -> str:
    """Returns the hexadecimal digest of a file, read in blocks.  Raises DataError if it cannot be read."""
    digest = hashlib.new(kind)
    with open_regular(path) as file:
        for block in iter(partial(file.read, _READ_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def channel_statistics(images: np.ndarray) -> Tuple[Tuple[float, ...], Tuple[float, ...]]:
    """Returns the exact mean and standard deviation per channel of uint8 [n, h, w, c], in 0..255 units.

    The standard deviation of a constant channel is reported as 1, so that dividing by it is harmless.
    """
    return moments(
        np.bincount(images[..., channel].reshape(-1), minlength=256) for channel in range(images.shape[-1])
    )


def moments(histograms: Iterable[np.ndarray]) -> Tuple[Tuple[float, ...], Tuple[float, ...]]:
    """Returns the same as :func:`channel_statistics`, from one histogram of the 256 values per channel."""
    values: np.ndarray = np.arange(256, dtype=np.float64)
    mean, std = [], []
    for counts in histograms:
        total = max(int(counts.sum()), 1)
        centre = float((counts * values).sum() / total)
        spread = math.sqrt(float((counts * (values - centre) ** 2).sum() / total))
        mean.append(round(centre, 6))
        std.append(round(spread, 6) or 1.0)
    return tuple(mean), tuple(std)


def parse_limit(limit: Optional[str], size: int, option: str) -> int:
    """Returns how many of ``size`` examples ``limit`` keeps: "500" or "10%" (rounded, at least one).

    A number beyond ``size`` keeps all.  Raises ConfigurationError for anything that is neither a positive
    number nor a percentage above 0 and up to 100; ``option`` names the flag in the message.
    """
    if limit is None:
        return size
    text = str(limit).strip()
    percent = text.endswith("%")
    try:
        value = float(text[:-1]) if percent else int(text)
    except ValueError:
        value = -1
    if not math.isfinite(value) or value <= 0 or (percent and value > 100):
        raise ConfigurationError(
            f"{option} {text}: expected a positive number of images or a percentage up to 100%",
            f"for example {option} 500 or {option} 10%",
        )
    return max(1, min(size, round(size * value / 100))) if percent else min(size, int(value))


def limit_source(
    source: DataSource, limit_train: Optional[str], limit_eval: Optional[str], seed: int
) -> DataSource:
    """Keeps as many examples as the limits allow.

    It keeps the first examples of a permutation that depends only on ``seed`` and the size of the set, in their stored
    order.  A smaller limit therefore keeps a subset of what a larger limit keeps.
    """
    num_train = parse_limit(limit_train, len(source.train), "--limit-train")
    num_eval = parse_limit(limit_eval, len(source.eval), "--limit-eval")
    train, evaluation, held_out = source.train, source.eval, source.held_out
    if num_train < len(train):
        train = train.subset(np.sort(permutation(len(train), seed, LIMIT, 0)[:num_train]))
    if num_eval < len(evaluation):
        kept = np.sort(permutation(len(evaluation), seed, LIMIT, 1)[:num_eval])
        evaluation = evaluation.subset(kept)
        held_out = tuple(held_out[i] for i in kept) if held_out else ()
    info = replace(source.info, num_train=num_train, num_eval=num_eval)
    return DataSource(info, train, evaluation, held_out, source.pool_sha256)


def data_source(
    train: Examples,
    evaluation: Examples,
    *,
    class_names: Sequence[str],
    task: str = "classification",
    channels: int = 3,
    **facts: Any,
) -> DataSource:
    """Returns a source of examples; ``facts`` are further attributes of :class:`DatasetInfo`, tuples where
    it has sequences.

    Shape, mean and standard deviation are those of training images in memory.  Encoded images have any size,
    ``channels`` channels, and ImageNet's statistics: measuring them would mean decoding every photograph.
    """
    shape: ImageShape = (None, None, channels)
    mean: Tuple[float, ...] = IMAGENET_MEAN
    std: Tuple[float, ...] = IMAGENET_STD
    if channels == 1:
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)
    if isinstance(train, ArrayExamples):
        shape = tuple(int(n) for n in train.images.shape[1:])  # type: ignore[assignment]
        mean, std = channel_statistics(train.images)
    elif isinstance(train, MaskedExamples) and isinstance(evaluation, MaskedExamples):
        sizes = np.unique(np.concatenate([train.sizes, evaluation.sizes]), axis=0).tolist()
        shape = (*(sizes[0] if len(sizes) == 1 else (None, None)), train.pixels.shape[1])
        mean, std = channel_statistics(train.pixels)
    info = DatasetInfo(
        task=task,
        num_classes=len(class_names),
        image_shape=shape,
        num_train=len(train),
        num_eval=len(evaluation),
        class_names=tuple(class_names),
        mean=mean,
        std=std,
        **{"decoded": not isinstance(train, IN_MEMORY), **facts},
    )
    return DataSource(info, train, evaluation)


# Cross-validation: the training and evaluation examples of each fold.


def fold_of_each(examples: InMemory, num_folds: int) -> np.ndarray:
    """Returns the fold, from 1, that evaluates each example: int64 [n].  Fold sizes differ by at most one.

    Neighbouring slices of a volume look alike, so a fold of masks is a run of consecutive slices.  Images of
    classes are dealt out class by class, so that every fold has its share of each class.
    """
    count = len(examples)
    if isinstance(examples, ArrayExamples) and examples.labels.ndim == 1:
        folds: np.ndarray = np.empty(count, np.int64)
        folds[np.argsort(examples.labels, kind="stable")] = np.arange(count) % num_folds + 1
        return folds
    return np.arange(count) * num_folds // count + 1


def pool(source: DataSource) -> InMemory:
    """Returns the examples to split into folds: those for training, and those for evaluation if ``own_split``.

    Raises:
        ConfigurationError: the images are not in memory.
    """
    train, evaluation = source.train, source.eval
    if not isinstance(train, IN_MEMORY) or type(train) is not type(evaluation):
        raise ConfigurationError(
            f"--kfold: the images of {source.info.name} are files, which are not split into folds",
            "make the folds as folders of your own, or use a data set that is read into memory",
        )
    examples = joined(train, evaluation) if source.info.own_split else train
    assert isinstance(examples, IN_MEMORY)
    return examples


def joined(train: Examples, evaluation: Examples) -> Examples:
    """Returns the examples of both parts, of one type, in their stored order: files in the order of their names."""
    values = {}
    for field in fields(train):
        first, second = (getattr(part, field.name) for part in (train, evaluation))
        if isinstance(first, np.ndarray):
            values[field.name] = np.concatenate([first, second])
        elif isinstance(first, tuple):
            is_whole = field.name != "names" or (first and second)
            values[field.name] = (*first, *second) if is_whole else ()
        else:
            values[field.name] = first
    both = type(train)(**values)
    if not isinstance(both, FileExamples):
        return both
    names = [[same_name(part) for part in path.split(os.sep)] for path in both.paths]
    return both.subset(sorted(range(len(both)), key=names.__getitem__))


def select_fold(source: DataSource, num_folds: int, fold: int) -> DataSource:
    """Returns the data set split for cross-validation: fold ``fold`` of 1 .. ``num_folds`` evaluates, the others train.

    Mean and standard deviation are those of the fold's own training images.

    Raises:
        ConfigurationError: more folds than examples, or images that are not in memory.
    """
    examples = pool(source)
    if num_folds > len(examples):
        raise ConfigurationError(
            f"--kfold {num_folds}: {source.info.name} has {len(examples)} examples",
            f"--kfold {len(examples)} or less",
        )
    is_held_out = fold_of_each(examples, num_folds) == fold
    held_out = np.nonzero(is_held_out)[0]
    train, evaluation = examples.subset(np.nonzero(~is_held_out)[0]), examples.subset(held_out)
    mean, std = channel_statistics(train.images if isinstance(train, ArrayExamples) else train.pixels)
    info = replace(source.info, num_train=len(train), num_eval=len(evaluation), mean=mean, std=std)
    everything = fingerprint(DataSource(source.info, examples, examples.subset(held_out[:0])))
    return DataSource(info, train, evaluation, tuple(int(i) for i in held_out), everything)


# A baseline to print beside a network's accuracy: nearest neighbours on the raw pixels.


def knn_accuracy(source: DataSource, k: int = 3) -> float:
    """Returns the accuracy in [0, 1] of ``k`` nearest neighbours (Euclidean, raw pixels) on the evaluation examples.

    It is for small in-memory classification sets: every evaluation image is compared with every training image.
    Raises ConfigurationError for other sets.
    """
    train, evaluation = source.train, source.eval
    if not (
        source.info.task == "classification"
        and isinstance(train, ArrayExamples)
        and isinstance(evaluation, ArrayExamples)
    ):
        raise ConfigurationError(
            f"nearest neighbours need in-memory class labels, which {source.info.name} lacks",
            "choose a data set of images with classes, such as digits",
        )
    from sklearn.neighbors import KNeighborsClassifier

    classifier = KNeighborsClassifier(n_neighbors=min(k, len(train)))
    classifier.fit(train.images.reshape(len(train), -1).astype(np.float32), train.labels)
    predicted = classifier.predict(evaluation.images.reshape(len(evaluation), -1).astype(np.float32))
    return float(np.mean(predicted == evaluation.labels))
