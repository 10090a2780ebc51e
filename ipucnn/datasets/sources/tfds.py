"""Any classification set in the format of TensorFlow Datasets (TFDS), read into memory.

Training reads samples in any order, which TFDS's files do not support.  So a set is kept in memory: decoded if all
images have one size, else as encoded bytes.  Sets that take more than half of the memory are rejected.
"""

import io
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, List, Optional, Sequence, Tuple, Type

import numpy as np

import ipucnn
from ipucnn.aliases import TfdsBuilder
from ipucnn.datasets.base import (
    ArrayExamples,
    DataSource,
    EncodedExamples,
    Examples,
    data_source,
)
from ipucnn.datasets.formats import base_name
from ipucnn.datasets.forms import pillow
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory, check_pixels
from ipucnn.datasets.sources.tfrecord import read_example, scan_records
from ipucnn.documents import load_record
from ipucnn.errors import DataError, MissingError, UserError
from ipucnn.events import Progress, emit
from ipucnn.filesystem import shown, user_error_of
from ipucnn.system_programs import run_program
from ipucnn.text import printable

EVAL_SPLITS = ("validation", "val", "valid", "test")
"""Names of splits for evaluation, in the order of folders of images: ``test`` serves only if nothing else does.

That of ``imagenet2012`` has no labels.
"""
_OTHER_HINT = "choose another data set, or pass images in class folders with --dataset DIR"
AUGMENTATION = {
    "mnist": "shift",
    "fashion_mnist": "shift_flip",
    "cifar10": "crop_flip",
    "cifar100": "crop_flip",
}


# Nothing is imported from the current folder.
_PREPARE = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import json
try:
    sys.path.insert(0, sys.argv[3])  # the same ipucnn
    from ipucnn.datasets.sources.tfds import import_tfds
    builder = import_tfds().builder(sys.argv[1], data_dir=sys.argv[2])
    builder.download_and_prepare()
    answer = {"folder": str(getattr(builder, "data_path", None) or builder.data_dir)}
except Exception as error:
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    answer = {"error": [number, text if number is None else error.strerror, path]}
print(json.dumps(answer))
"""


def import_tfds() -> ModuleType:
    """Imports TFDS, which then refuses modules that data sets name.  Raises MissingError."""
    try:
        import tensorflow_datasets

        # TFDS imports its own dependencies at first use.
        tensorflow_datasets.disable_progress_bar()
        connector = tensorflow_datasets.features.FeatureConnector
    except ImportError as error:
        raise MissingError(
            "reading a TFDS data set needs the package tensorflow-datasets", 'pip install "ipucnn[tfds]"'
        ) from error
    refuse_foreign_features(connector)
    return tensorflow_datasets


def refuse_foreign_features(connector: Type[Any]) -> None:
    """Prevents TFDS from importing modules that a data set's ``features.json`` names, except TFDS's own.

    A prepared set may come from anybody, and TFDS imports the module of each class that it names.

    Args:
        connector: ``tfds.features.FeatureConnector``, changed in place.
    """
    find = connector.cls_from_name.__func__
    if getattr(find, "refuses_foreign", False):
        return

    def cls_from_name(cls: type, python_class_name: str) -> Type[Any]:
        if not python_class_name.startswith("tensorflow_datasets.core.features."):
            raise DataError(
                f"the data set's features.json names {shown(python_class_name)}, which is no feature of TFDS",
                "prepare the data set with features of TFDS alone",
            )
        return find(cls, python_class_name)

    cls_from_name.refuses_foreign = True  # type: ignore[attr-defined]
    connector.cls_from_name = classmethod(cls_from_name)


def prepare(name: str, data_dir: Path) -> Path:
    """Downloads and prepares a TFDS set below ``data_dir``; returns the folder of its version.

    Raises:
        MissingError: the set does not exist, the network fails, or tensorflow-datasets is not installed.
        DataError: the folder cannot be written.
    """
    import_tfds()
    # A process of its own: preparing imports TensorFlow, see `_read_split`.
    package = str(Path(ipucnn.__file__).resolve().parents[1])
    ran = run_program([sys.executable, "-c", _PREPARE, name, str(data_dir), package], timeout_s=None)
    with suppress(ValueError, KeyError, TypeError):
        answer = load_record(ran.output.splitlines()[-1] if ran.output else "")
        if "folder" in answer:
            return Path(answer["folder"])
        number, reason, path = answer["error"]
        error = None if number is None else user_error_of(OSError(number, reason, path))
        raise error or MissingError(
            f"cannot prepare tfds:{name}: {reason}", "check the name and the network, or prepare it elsewhere"
        )
    raise MissingError(
        f"cannot prepare tfds:{name}: {ran.problem}", "prepare it elsewhere, with tensorflow_datasets"
    )


def _features(builder: TfdsBuilder, tfds: ModuleType, name: str) -> Tuple[str, str]:
    """Returns the names of the image and the class in an example: the supervised keys, or the only ones.

    Raises:
        DataError: there is none, or there are several and no supervised keys.
    """
    features = dict(builder.info.features.items())
    images = sorted(key for key, f in features.items() if isinstance(f, tfds.features.Image))
    labels = sorted(key for key, f in features.items() if isinstance(f, tfds.features.ClassLabel))
    supervised = builder.info.supervised_keys
    if supervised and supervised[0] in images and supervised[1] in labels:
        return supervised[0], supervised[1]
    if not images or not labels:
        raise DataError(
            f"data set {name} has no image with a class: it holds {', '.join(sorted(features))}", _OTHER_HINT
        )
    for kind, keys in (("images", images), ("classes", labels)):
        if len(keys) > 1:
            raise DataError(
                f"data set {name} has several {kind}, and no supervised keys: {', '.join(keys)}",
                f'prepare it again with supervised_keys=("{images[0]}", "{labels[0]}"), for example, in DatasetInfo',
            )
    return images[0], labels[0]


def open_builder(name: str, folder: Path) -> Tuple[TfdsBuilder, str, str]:
    """Returns TFDS's builder of a prepared version, and the names of the image and the class in its examples.

    Raises:
        MissingError: tensorflow-datasets is not installed.
        DataError: the description is damaged, or the set is no 8-bit image classification set.
    """
    tfds = import_tfds()
    try:
        builder = tfds.builder_from_directory(str(folder))
        image_key, label_key = _features(builder, tfds, name)
        feature = builder.info.features[image_key]
        if np.dtype(feature.np_dtype) != np.uint8 or feature.shape[-1] not in (1, 3):
            raise DataError(f"data set {name} has no 8-bit images of 1 or 3 channels", _OTHER_HINT)
    except DataError:
        raise
    except Exception as error:  # for example, an info file that is not JSON
        raise _cannot_read(name, folder, error) from error
    return builder, image_key, label_key


def _cannot_read(name: str, folder: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return user_error_of(error) or DataError(
        f"cannot read {name} in {folder}: {reason}", "prepare the data set again"
    )


def eval_split(builder: TfdsBuilder) -> Optional[str]:
    """Returns the name of the split for evaluation, or None."""
    splits = builder.info.splits
    return next((name for name in EVAL_SPLITS if name in splits and splits[name].num_examples > 0), None)


def unread(builder: TfdsBuilder, keys: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Returns the features with images or classes that serve for nothing, and such splits."""
    tfds, splits = import_tfds(), builder.info.splits
    kinds = (tfds.features.Image, tfds.features.ClassLabel)
    features = [key for key, feature in builder.info.features.items() if isinstance(feature, kinds)]
    read = {"train", eval_split(builder)}
    return sorted({*features} - {*keys}), [name for name in splits if name not in read]


def _choice(builder: TfdsBuilder, keys: Sequence[str]) -> str:
    """Returns what of a set serves for what, in words; "" if nothing was chosen."""
    features, splits = unread(builder, keys)
    words = (
        [f"images from {keys[0]}, classes from {keys[1]}, nothing from {', '.join(features)}"]
        if features
        else []
    )
    if splits:
        words.append(
            f"evaluation on {eval_split(builder) or 'a part of train'}, nothing on {', '.join(splits)}"
        )
    return "; ".join(words)


def _eval_split_of(builder: TfdsBuilder, name: str) -> Optional[str]:
    """Returns the split for evaluation of a set that can be trained on; None if a part of training serves as one."""
    available = builder.info.splits
    if "train" not in available:
        raise DataError(
            f"data set {name} has no part 'train': it has {', '.join(available) or 'none'}", _OTHER_HINT
        )
    return eval_split(builder)


def open_tfds(name: str, folder: Path) -> DataSource:
    """Reads the prepared version in ``folder`` (the one with dataset_info.json).

    Raises:
        MissingError: tensorflow-datasets is not installed.
        DataError: the set is damaged, is no 8-bit image classification set, or takes more than half of the memory.
    """
    builder, *keys = open_builder(name, folder)
    shape = tuple(builder.info.features[keys[0]].shape)
    one_size = None not in shape
    parts: List[Examples] = []
    try:
        split = _eval_split_of(builder, name)
        stored = [builder.info.splits[s] for s in filter(None, ("train", split))]
        needed = sum(s.num_examples * int(np.prod(shape)) if one_size else s.num_bytes for s in stored)
        hint = "store it as an image folder, DIR/{train,val}/CLASS/*, and pass --dataset DIR"
        check_memory(needed, f"data set {name}", hint)
        for part in filter(None, ("train", split)):
            data, labels = _read_split(builder, part, (keys[0], keys[1]), name)
            if len(data) == 0:
                raise DataError(f"data set {name} has no images in '{part}'", "prepare the data set again")
            if labels.min() < 0:
                raise DataError(f"data set {name} has images without a class in '{part}'", _OTHER_HINT)
            origin = f"{name} ({part})"
            parts.append(
                ArrayExamples(_decoded(data, shape, origin), labels)
                if one_size
                else EncodedExamples(tuple(data), labels, origin)
            )
        if split is None:
            whole = parts[0]
            end = min(round(0.9 * len(whole)), len(whole) - 1)
            parts = [whole.subset(np.arange(end)), whole.subset(np.arange(end, len(whole)))]
            if not end:
                raise DataError(
                    f"data set {name} has one image alone, and none can be held out", "choose another"
                )
    except DataError:
        raise
    except Exception as error:  # for example, damaged records or a missing shard
        raise _cannot_read(name, folder, error) from error
    train, evaluation = parts
    choice = _choice(builder, keys)
    divided = "" if split else f"{name} has no part for evaluation: the last 10 % of train serve as one"
    return data_source(
        train,
        evaluation,
        name=name,
        class_names=builder.info.features[keys[1]].names,
        location=str(folder),
        channels=shape[-1],
        augmentation=AUGMENTATION.get(base_name(name), "crop") if one_size else "none",
        warnings=tuple(line for line in (choice and f"{name}: {choice}", divided) if line),
        own_split=bool(divided),
        division=divided,
        choice=choice,
    )


def _read_split(
    builder: TfdsBuilder, split: str, keys: Tuple[str, str], name: str
) -> Tuple[List[bytes], np.ndarray]:
    """Reads the encoded images and the classes of a split, in the stored order.

    TFDS would import TensorFlow for it, which then could not be told the threads and devices of a run.
    """
    info, (image, label) = builder.info.splits[split], keys
    data: List[bytes] = []
    labels: List[int] = []
    for path in (Path(str(path)) for path in info.filepaths):
        if ".tfrecord" not in path.name:
            raise DataError(
                f"data set {name} is stored in {shown(path)}, which is no TFRecord file",
                "prepare it again with file_format='tfrecord'",
            )
        for number, at, _, _ in scan_records(path):
            features = read_example(str(path), number, at, {image: bytes, label: int})
            data.append(features[image])  # type: ignore[arg-type]
            labels.append(features[label])  # type: ignore[arg-type]
            emit(Progress(f"reading {name}", len(data), info.num_examples))
    if len(data) != info.num_examples:
        raise DataError(
            f"data set {name} has {len(data):,} images in '{split}', and its description says {info.num_examples:,}",
            "prepare the data set again",
        )
    return data, np.array(labels, np.int32)


def stored_pixels(data: bytes, channels: int, origin: str) -> np.ndarray:
    """Decodes an image of a set whose images have one size, as TFDS does: as stored, without tags of orientation.

    Transparency is dropped, and of 16 bits the high byte counts (``tf.io.decode_image``).

    Returns:
        uint8 [height, width, channels].

    Raises:
        DataError: it cannot be decoded, or has more pixels than any image may have.
    """
    try:
        with pillow().open(io.BytesIO(data)) as image:
            check_pixels(image.width, image.height, MAX_IMAGE_PIXELS, origin)
            image.load()
            image.info.pop("transparency", None)
            if image.mode.startswith("I"):
                high = (np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)
                return np.repeat(high[..., np.newaxis], channels, axis=2)
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
            return pixels.reshape(*pixels.shape[:2], channels)
    except DataError:
        raise
    except Exception as error:  # Pillow raises nearly any type for damaged images
        text = f"{origin} cannot be decoded: {printable(str(error))}"
        raise DataError(text, "prepare the data set again", "unreadable") from error


def _decoded(data: List[bytes], shape: Tuple[int, int, int], origin: str) -> np.ndarray:
    """Decodes images of one size, and releases their encoded form; uint8 [n, height, width, channels]."""
    images: np.ndarray = np.empty((len(data), *shape), np.uint8)
    for number in range(len(data)):
        name = f"image {number} of {origin}"
        pixels = stored_pixels(data[number], shape[2], name)
        if pixels.shape != shape:
            size = "x".join(map(str, pixels.shape[:2]))
            raise DataError(
                f"{name} has {size} pixels, not {shape[0]}x{shape[1]}", "prepare the data set again"
            )
        images[number], data[number] = pixels, b""
    return images
