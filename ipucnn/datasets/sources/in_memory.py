"""Data sets in Python's memory: arrays passed to ``ipucnn.train`` and ``ipucnn.evaluate`` in place of a name, and data
sets that users' functions return."""

import contextlib
import hashlib
from dataclasses import replace
from typing import AbstractSet, Any, Callable, Dict, Iterable, KeysView, List, Mapping, Sequence, Sized, Tuple

import msgspec
import numpy as np

from ipucnn.datasets.base import (
    AUGMENTATION_NAMES,
    ArrayExamples,
    DatasetInfo,
    DataSource,
    EncodedExamples,
    Examples,
    FileExamples,
    MaskedExamples,
    RecordExamples,
    data_source,
)
from ipucnn.datasets.classes import alike_line, written_alike
from ipucnn.datasets.formats import same_name
from ipucnn.datasets.segmentation.masks import (
    MaskClasses,
    check_no_objects,
    classes_of_values,
    have_grey_edges,
    mask_values,
    notes_on_classes,
)
from ipucnn.datasets.sources.imagefolder import HELD_OUT_SHARE, held_out
from ipucnn.errors import DataError
from ipucnn.text import counted, printable, shown_value

PREFIX = "arrays-"
"""The prefix of the arrays' name in a run's configuration."""
_ARRAYS_HINT = (
    "dataset=(images, labels), or ((images, labels), (eval_images, eval_labels)), and class names after them"
)
_ARRAYS = "the arrays of dataset="
_kept: Dict[str, Tuple[Tuple[Any, ...], Tuple[str, ...]]] = {}


def keep(given: object, is_evaluated: bool, share: float = HELD_OUT_SHARE) -> str:
    """Keeps arrays for this process under a name; equal arrays have the same name in all processes.

    Args:
        given: (images, labels), or two such pairs for training and evaluation; then, optionally, the class names.
        is_evaluated: whether all of a single pair is for evaluation; otherwise a share of each class is held out.
        share: this share.

    Returns:
        The name for ``--dataset`` in this process.

    Raises:
        DataError: ``given`` has another form.
    """
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise DataError(f"dataset={shown_value(type(given).__name__)} is no pair of arrays", _ARRAYS_HINT)
    train, evaluation, *names = given
    notes: Tuple[str, ...] = ()
    if hasattr(train, "shape"):
        pair = _plain_arrays((train, evaluation), "dataset=")
        train, evaluation = (pair, pair) if is_evaluated else _divided(*pair, share)
        if not is_evaluated:
            notes = (
                f"{len(evaluation[0]):,} of the {len(pair[0]):,} images of dataset= are held out for evaluation",
            )
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in (train, evaluation)):
        is_listed = isinstance(train, (tuple, list)) and len(train) and hasattr(train[0], "shape")
        if is_listed:
            _check_one_size(train, "dataset=: the images")
        hint = "make arrays of lists: dataset=(np.stack(images), np.array(labels))"
        raise DataError("dataset= has no two pairs of arrays", hint if is_listed else _ARRAYS_HINT)
    dataset_parts = (train, evaluation, *names)
    digest = hashlib.sha256(repr(names).encode())
    for part in (train, evaluation):
        for array in map(np.asarray, part):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    name = f"{PREFIX}{digest.hexdigest()[:12]}"
    _kept[name] = dataset_parts, notes
    return name


def is_divided(name: str) -> bool:
    """Returns whether arrays are kept by this name of which a share was held out."""
    return name in _kept and bool(_kept[name][1])


def find(name: str) -> Callable[[], DataSource]:
    """Returns the function that opens the arrays with a name.

    Raises:
        DataError: this process has no arrays with the name.
    """
    if name not in _kept:
        raise DataError(
            f"data set {shown_value(name)} was given as arrays, and is in the memory of that Python alone",
            "give them again, in Python: dataset=(images, labels)",
        )
    dataset_parts, notes = _kept[name]

    def open_arrays() -> DataSource:
        source = source_of(dataset_parts, name, _ARRAYS)
        warnings = (*source.info.warnings, *notes)
        return replace(source, info=replace(source.info, own_split=bool(notes), warnings=warnings))

    return open_arrays


def _divided(
    images: np.ndarray, labels: np.ndarray, share: float
) -> Tuple[Tuple[np.ndarray, ...], Tuple[np.ndarray, ...]]:
    """Splits arrays into training and evaluation; a share of each class, or of all images with masks, is held out."""
    if not images.ndim or not labels.ndim or len(images) != len(labels):
        counts = [f"{len(part):,}" if part.ndim else "no list of" for part in (images, labels)]
        raise DataError(f"dataset= has {counts[0]} images and {counts[1]} labels", _ARRAYS_HINT)
    classes = labels.reshape(len(labels), -1)[:, 0] if labels.ndim < 3 else np.zeros(len(labels), int)
    chosen = held_out(classes, [str(number) for number in range(len(labels))], share)
    if not chosen.any():
        raise DataError("dataset= has no class of two images, of which one could be held out", _ARRAYS_HINT)
    return (images[~chosen], labels[~chosen]), (images[chosen], labels[chosen])


# Data sets that a user's function returned.

_HINT = "return (train_images, train_labels), (eval_images, eval_labels): docs/own-networks.md"
_MOST_CLASSES = 2**17
_MOST_VALUES = 2**8
_ONE_CLASS = "give masks > 0, which are one class"
_UNLABELLED = (
    "pixels without a label are left out only where masks are files: save them with 255 there, and the line "
    "`255 ignore` in DIR/classes.txt (docs/microscopy.md)"
)
# The attribute of each kind of examples that holds its images or their names, and the type of its items.
_CONTENTS: Dict[type, Tuple[str, type]] = {
    ArrayExamples: ("names", str),
    FileExamples: ("paths", str),
    EncodedExamples: ("data", bytes),
    RecordExamples: ("paths", str),
}


def source_of(made: object, name: str, location: str) -> DataSource:
    """Converts the result of a user's function to a data set.

    Args:
        made: a DataSource; or two pairs, for training and evaluation, and optionally the class names after them.  A
            pair is images, uint8 [n, h, w] or [n, h, w, 1 or 3], and labels: integers [n] or [n, 1], or masks, uint8
            [n, h, w] or [n, h, w, 1].
        name: name of the set.
        location: source of the set, for messages.

    Raises:
        DataError: ``made`` has another form.
    """
    if isinstance(made, DataSource):
        return _checked(made, location)
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
        raise DataError(f"{location} returned {shown_value(type(made).__name__)}, and no two pairs", _HINT)
    train, evaluation = (
        _examples(part, purpose, location) for part, purpose in zip(made, ("training", "evaluation"))
    )
    if train.images.shape[1:] != evaluation.images.shape[1:] or train.labels.ndim != evaluation.labels.ndim:
        raise DataError(
            f"{location}: images of training are {train.images.shape[1:]}, those of evaluation "
            f"{evaluation.images.shape[1:]}, or one has masks and the other classes",
            _form(location),
        )
    is_masks, is_named = train.labels.ndim == 3, len(made) == 3
    default_names: Sequence[object] = ()
    if is_masks and (not is_named or _length(made[2]) == 2):
        train, evaluation, default_names = _classes_of_masks(train, evaluation, is_named, location)
    if is_named and _is_pair(made[2]):
        hint = "give two of them, or join two: (train_images, train_labels), (eval_images, eval_labels)"
        raise DataError(f"{location}: there are three pairs of images and labels, wanted two", hint)
    most = max(int(train.labels.max()), int(evaluation.labels.max()))
    given = made[2] if is_named else default_names or range(most + 1)
    names: List[str] = []
    with contextlib.suppress(TypeError):  # not iterable
        # The order of a set is arbitrary, and a dictionary's need not be that of the labels.
        is_ordered = not isinstance(given, (str, AbstractSet, Mapping)) or isinstance(given, KeysView)
        names = [_class_name(name) for name in given] if is_ordered else []
    if len({*map(same_name, names)}) < len(names) or "" in names:
        names = []
    if not names:
        text = f"{location}: the names of the classes are {shown_value(repr(given))}"
        hint = "give a name for each label, as in ['cat', 'dog'] for the labels 0 and 1"
        raise DataError(f"{text}, wanted a list of different texts in the order of labels", hint)
    if most >= len(names):
        text = f"{location}: a label is {most}, and there are {len(names)} names of classes"
        raise DataError(
            text, f"give {most + 1} names, for the labels 0 to {most}, or number the labels from 0"
        )
    parts = [_as_masked(part) if is_masks else part for part in (train, evaluation)]
    source = data_source(
        *parts,
        name=name,
        task="segmentation" if is_masks else "classification",
        class_names=names,
        location=location,
        augmentation="elastic" if is_masks else "crop_flip",
        patchwise=is_masks,
        decoded=False,
    )
    warnings = list(source.info.warnings)
    if is_masks:
        classes = MaskClasses(tuple(names), tuple(range(len(names))))
        warnings += notes_on_classes(classes, is_named, _ONE_CLASS)
    alike = written_alike(names)
    if alike:
        warnings.append(alike_line(location, alike))
    largest = max(int(part.images.max()) for part in (train, evaluation))
    if largest == 1:
        warnings.append(
            f"{location}: the largest value of all images is 1, and pixels are 0 to 255: np.uint8(images) of images of "
            "0 to 1 is 0 nearly everywhere, and np.uint8(np.rint(255 * images)) is right"
        )
    return replace(source, info=replace(source.info, warnings=tuple(warnings)))


def _as_masked(part: ArrayExamples) -> MaskedExamples:
    """Returns images and masks in memory as those of files are kept, which networks see as patches."""
    count, height, width, channels = part.images.shape
    sizes: np.ndarray = np.full((count, 2), (height, width), np.int64)
    return MaskedExamples(part.images.reshape(-1, channels), part.labels.reshape(-1), sizes)


def _class_name(name: object) -> str:
    """Returns a text or a whole number as text; "" for everything else, which is no name."""
    is_number = isinstance(name, (int, np.integer)) and not isinstance(name, bool)
    return str(name) if is_number or isinstance(name, str) else ""


def _is_pair(given: object) -> bool:
    """Returns whether something is a pair of arrays or lists, and no names of two classes."""
    # Not np.ndim, which converts lists, and refuses those of different lengths.
    return (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and all(isinstance(part, (tuple, list)) or getattr(part, "ndim", 0) for part in given)
    )


def _check_one_size(images: object, what: str) -> None:
    """Refuses a list of images of different sizes, and an array of such images.

    Raises:
        DataError: two of them have different sizes.
    """
    if isinstance(images, (tuple, list)) or (isinstance(images, np.ndarray) and images.dtype == object):
        sizes = list(dict.fromkeys(np.shape(image) for image in images))
        if len(sizes) > 1:
            raise DataError(
                f"{what} have different sizes, such as {sizes[0]} and {sizes[1]}",
                "make all images one size, or save them as files in class folders, where they may have any: "
                "docs/own-images.md",
            )


def _length(names: object) -> int:
    return len(names) if isinstance(names, Sized) else 0


def _classes_of_masks(
    train: ArrayExamples, evaluation: ArrayExamples, is_named: bool, location: str
) -> Tuple[ArrayExamples, ArrayExamples, Tuple[str, ...]]:
    """Returns masks of 0 and one other value, such as 255, as classes 0 and 1, and the names of classes without names.

    This is the rule for files of masks without a table.

    Args:
        train, evaluation: the examples.
        is_named: whether two classes are named.
        location: source of the set, for messages.

    Raises:
        DataError: masks without names of classes have neither 0 and one other value nor 0, 1, 2, ... without a gap, or
            seem to number objects.
    """
    masks = [mask_values(mask) for part in (train, evaluation) for mask in part.labels]
    values = sorted({value for of_mask in masks for value in of_mask})
    if is_named and (len(values) > 2 or values == list(range(len(values)))):
        return train, evaluation, ()
    try:
        if not is_named:
            check_no_objects(masks, f"{location}: the masks")
        classes = classes_of_values(values, f"{location}: the masks have")
    except DataError as error:
        hint = (
            "number the classes 0, 1, 2, ..., and return their names after the arrays: (images, masks), (eval_images, "
            f"eval_masks), ['background', 'cell', ...]; if the values number objects, {_ONE_CLASS}"
        )
        raise DataError(error.message, "give masks > 127" if have_grey_edges(masks) else hint) from None
    if classes.any_other:
        train, evaluation = (
            replace(part, labels=(part.labels != 0).astype(np.uint8)) for part in (train, evaluation)
        )
    return train, evaluation, classes.names


def _conversion(images: np.ndarray) -> str:
    """Returns a hint for images of a type, or of a shape, that are not read."""
    dtype = images.dtype
    if dtype == np.uint8:
        return "give grey images, or red, green and blue as the last axis"
    if dtype.kind == "f":
        if not np.isfinite(images).all():
            known = np.isfinite(images.reshape(len(images), -1)).all(axis=1)
            if not known.any():
                return "give images of numbers: each of them has values that are none (NaN, infinite)"
            return (
                "leave out images with values that are no numbers: known = np.isfinite(images.reshape(len(images), "
                "-1)).all(axis=1); images, labels = images[known], labels[known]"
            )
        least, most = (images.min(), images.max()) if images.size else (0, 1)
        if least >= 0 and most <= 1:
            return "convert them: np.uint8(np.rint(255 * images))"
        if least >= 0 and most <= 255:
            return "convert them: np.uint8(np.rint(images))"
        return f"bring their numbers, from {least:.3g} to {most:.3g}, to 0..255, and convert them: np.uint8(images)"
    if dtype.kind == "b":
        return "convert them: 255 * np.uint8(images)"
    if dtype.kind == "O":
        return "make one array of numbers: np.array(images.tolist())"
    if dtype.kind not in "iu":
        return "give the pixels of images as numbers of 0 to 255: np.uint8"
    if images.min() < 0:
        return "bring their numbers to 0..255, and convert them: np.uint8(images)"
    bits = int(images.max()).bit_length()
    if bits <= 8:
        return "convert them: np.uint8(images)"
    return f"convert them, of {bits} bits, alike in both parts: np.uint8(images // {2 ** (bits - 8)})"


def _plain_arrays(part: Iterable[object], what: str) -> Tuple[np.ndarray, np.ndarray]:
    """Returns images and labels as arrays.

    Raises:
        DataError: a NumPy array masks some of its values, which plain arrays would show.
        TypeError, ValueError: ``part`` is no pair of arrays.
    """
    images, labels = part
    _check_one_size(images, f"{what}: the images")
    arrays = np.asarray(images), np.asarray(labels)
    if np.ma.is_masked(images):
        raise DataError(f"{what}: the images have masked values", "give them a value: images.filled(0)")
    if np.ma.is_masked(labels):
        hint = (
            "leave out their images: known = ~labels.mask; images, labels = images[known], labels.data[known]"
        )
        hint = _UNLABELLED if arrays[1].ndim > 2 else hint
        raise DataError(f"{what}: the labels have masked values", hint)
    return arrays


def _hint_of_many(labels: np.ndarray, axis: int) -> str:
    """Returns a hint for labels with several numbers along an axis for each image or pixel."""
    what = "image" if labels.ndim == 2 else "pixel"
    if labels.dtype.kind not in "biuf" or not np.isfinite(labels).all() or (labels < 0).any():
        return f"give one number for each {what}, its class"
    sums = labels.sum(axis=axis)
    if np.isin(labels, (0, 1)).all():
        if (sums == 1).all():
            return f"give numbers in place of one-hot labels: labels.argmax(axis={axis})"
        hint = f"each {what} has one class, and here some have several or none"
        if what == "pixel" or not (sums == 1).any():
            return hint
        return (
            f"{hint}: train on the others, one = labels.sum(axis=1) == 1; images, labels = images[one], "
            "labels[one].argmax(axis=1)"
        )
    if np.allclose(sums, 1, atol=1e-3):
        return f"if they are probabilities, give the most probable class: labels.argmax(axis={axis})"
    return f"give one number for each {what}, its class"


def _label_hint(labels: np.ndarray, shape: Tuple[int, ...]) -> str:
    """Returns a hint for labels of images of a ``shape`` that are no whole numbers, or have another shape, or ""."""
    if labels.ndim == 4 and labels.shape[:3] != shape[:3] and (len(labels), *labels.shape[2:]) == shape[:3]:
        if labels.shape[1] == 1:
            return "leave out the axis of length 1: labels[:, 0]"
        return _hint_of_many(labels, 1)
    if labels.ndim in (2, 4) and labels.shape[:-1] == shape[: labels.ndim - 1] and labels.shape[-1] > 1:
        return _hint_of_many(labels, -1)
    if labels.dtype.kind == "f":
        return "convert them if they are whole numbers: labels.astype(int)"
    if labels.dtype.kind in "UO":
        return (
            "number them alike in both pairs: names = sorted(set(train_labels)); labels = np.searchsorted(names, "
            "labels); and return names after the pairs"
        )
    return ""


def _form(location: str) -> str:
    """Returns the hint that says what the user's arrays or function should be."""
    return _ARRAYS_HINT if location == _ARRAYS else _HINT


def _examples(part: object, what: str, location: str) -> ArrayExamples:
    """Converts one pair of arrays to examples.  Raises DataError if they are not images and labels."""
    try:
        images, labels = _plain_arrays(part, f"{location}: {what}")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise DataError(f"{location}: {what} is no pair of arrays", _form(location)) from None
    if not images.size:
        raise DataError(f"{location}: there are no images of {what}", _form(location))
    images = images[..., np.newaxis] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        raise DataError(
            f"{location}: images of {what} are {images.dtype} {images.shape}, wanted uint8 of 0 to 255 "
            "[n, height, width, 1 or 3]",
            _conversion(images),
        )
    labels = labels[..., 0] if labels.ndim in (2, 4) and labels.shape[-1] == 1 else labels
    is_masks = labels.ndim == 3 and labels.shape == images.shape[:3]
    if labels.dtype.kind not in "iub" or not (labels.ndim == 1 or is_masks) or len(labels) != len(images):
        raise DataError(
            f"{location}: labels of {what} are {labels.dtype} {labels.shape} for {len(images)} images, wanted a whole "
            "number for each, or for each of their pixels",
            _label_hint(labels, images.shape) or _form(location),
        )
    low, high = int(labels.min()), int(labels.max())
    most = (_MOST_VALUES if is_masks else _MOST_CLASSES) - 1
    if low < 0 or high > most:
        hint = "number the classes from 0"
        if is_masks and low < 0:
            hint += f"; {_UNLABELLED}"
        elif is_masks:
            hint += f"; if the values number objects, or are 0 and one other, {_ONE_CLASS}"
        elif low < 0:
            hint += "; leave out images without a class: known = labels >= 0; images = images[known]; "
            hint += "labels = labels[known]"
        text = f"{location}: labels of {what} are {low} to {high}, wanted numbers from 0 to {most}"
        raise DataError(text, hint)
    return ArrayExamples(np.ascontiguousarray(images), labels.astype(np.uint8 if is_masks else np.int32))


def _checked(made: DataSource, location: str) -> DataSource:
    """Checks a user's DataSource, and returns it with labels of the type that readers return.

    Raises:
        DataError: facts and examples contradict each other, or do not have their documented types.
    """

    def need(is_right: object, what: str) -> None:
        if not is_right:
            raise DataError(
                f"{location}: the DataSource {what}", "ipucnn.datasets.base.DatasetInfo says what is right"
            )

    info, kind = made.info, type(made.info).__name__
    need(isinstance(info, DatasetInfo), f"has info of the type {kind}")
    try:
        info = msgspec.convert({key: _plain(value) for key, value in vars(info).items()}, DatasetInfo)
    except msgspec.ValidationError as error:
        need(False, f"has wrong facts: {printable(str(error))}")
    is_masks, channels = info.task == "segmentation", info.image_shape[2]
    need(info.task in ("classification", "segmentation"), f"has task = {shown_value(repr(info.task))}")
    need(channels in (1, 3), f"has image_shape = {info.image_shape}, of neither 1 nor 3 channels")
    num_names = len(info.class_names)
    need(
        0 < info.num_classes == num_names, f"has num_classes = {info.num_classes} and {num_names} class_names"
    )
    for key, values in (("mean", info.mean), ("std", info.std)):
        is_right = (
            len(values) == channels and np.isfinite(values).all() and (key == "mean" or min(values) > 0)
        )
        need(is_right, f"has {key} = {shown_value(repr(values))} for {counted(channels, 'channel')}")
    shown = f"augmentation = {shown_value(repr(info.augmentation))}, which is unknown or for files of images and masks"
    need(info.augmentation in AUGMENTATION_NAMES and info.augmentation != "elastic", f"has {shown}")
    need(not info.patchwise, "has patchwise = True, which is for files of images and masks")
    parts: List[Examples] = []
    for what, number in (("train", info.num_train), ("eval", info.num_eval)):
        examples = getattr(made, what)
        kind = type(examples).__name__
        need(isinstance(examples, tuple(_CONTENTS)), f"has {what} of the type {kind}")
        shape: Tuple[int, ...] = (len(examples),)
        if isinstance(examples, ArrayExamples):
            size, shape = examples.images.shape[1:], examples.images.shape[: 3 if is_masks else 1]
            is_right = all(side in (None, given) for side, given in zip(info.image_shape, size))
            need(is_right, f"has {what} of {size} and image_shape = {info.image_shape}")
            is_right = len(examples.names) in (0, len(examples))
            need(is_right, f"has {what} with other numbers of names than of images")
        else:
            need(not is_masks, f"has masks in {kind}, which is for classes")
        attribute, content = next(_CONTENTS[cls] for cls in _CONTENTS if isinstance(examples, cls))
        is_right = all(isinstance(value, content) for value in getattr(examples, attribute))
        need(is_right, f"has {what} with {attribute} that are not all {content.__name__}")
        has_all = number == len(examples) > 0
        need(has_all, f"says num_{what} = {number}, and has {len(examples)} examples")
        labels: np.ndarray = np.zeros(0, object)
        # Lists of several lengths are an error; an older NumPy makes objects of them.
        with contextlib.suppress(ValueError):
            labels = np.asarray(examples.labels)
        shown = "lists" if labels.dtype == object else f"{labels.dtype} {labels.shape}"
        is_right = labels.dtype.kind in "iu" and labels.shape == shape
        need(is_right, f"has labels of {what} that are {shown}, wanted whole numbers {shape}")
        low, high = int(labels.min()), int(labels.max())
        text = f"has labels of {what} from {low} to {high}, and {info.num_classes} classes"
        need(0 <= low <= high < info.num_classes, text)
        parts.append(replace(examples, labels=labels.astype(np.uint8 if is_masks else np.int32)))
    sizes = {part.images.shape[1:] for part in parts if isinstance(part, ArrayExamples)}
    need(len(sizes) < 2 or is_masks, f"has arrays of different sizes, {sorted(sizes)}")
    if len(sizes) == 1:
        info = replace(info, image_shape=sizes.pop())
    return replace(made, info=info, train=parts[0], eval=parts[1])


def _plain(value: object) -> object:
    """Converts NumPy's numbers, alone or in a tuple, to Python's."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value
