"""``cifar10`` and ``cifar100`` from their original files, the Python (pickle) or the binary version.

The formats are described at https://www.cs.toronto.edu/~kriz/cifar.html (Krizhevsky, 2009).
"""

import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Tuple, Union

import numpy as np

from ipucnn.aliases import PlainValue
from ipucnn.datasets.base import ArrayExamples, ArrayFile, DataSource, data_source, read_file
from ipucnn.datasets.formats import CifarFiles, Found
from ipucnn.datasets.problems import Passed, Problem, item_or_problem, readable
from ipucnn.errors import DataError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32
AGAIN = "copy or download the file again"


NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
TEST_SIZE = 10000


def safe_unpickle(data: bytes, origin: str) -> Dict[Any, PlainValue]:
    """Returns the dictionary in one of CIFAR's pickles, with Python 2's strings read as latin-1.

    A pickle can call any function it names, so names resolve only to functions of this module.  These rebuild arrays
    and their types from bytes, because NumPy's own ``__setstate__`` takes flags that let a file choose memory
    addresses.

    Raises:
        DataError: the pickle is damaged, or names any other function.  Nothing it names is called.
    """
    names = _names_in_pickles()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Callable[..., object]:
            key = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
            if key not in names:
                raise pickle.UnpicklingError(f"it names {key[:160]}, which could run code")
            return names[key]

    try:
        content = Unpickler(io.BytesIO(data), encoding="latin1").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError("it is not a CIFAR batch: it lacks a dictionary")
        return {key: getattr(value, "array", value) for key, value in content.items()}
    except Exception as error:  # a damaged file can provoke any error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{origin} is no CIFAR pickle: {reason}",
            "nothing in it was run; get the file again from a source you trust",
            "unreadable",
        ) from None


def _names_in_pickles() -> Dict[str, Callable[..., object]]:
    """Returns replacements for the names in CIFAR's pickles, new for each file, because a file may set attributes on
    them."""

    class Array:
        array: Any = None

        def __setstate__(self, state: PlainValue) -> None:
            _, shape, dtype, is_fortran, raw = state
            raw = raw.encode("latin1") if isinstance(raw, str) else raw  # a string of Python 2
            self.array = np.frombuffer(raw, dtype.code).reshape(shape, order="F" if is_fortran else "C")

    class Dtype:
        def __init__(self, code: str, *_: object) -> None:
            if code not in ("b1", "u1", "i4", "i8", "f4", "f8"):
                raise pickle.UnpicklingError(f"it holds an array of the type {code!r:.20}")
            self.code = code

        def __setstate__(self, state: PlainValue) -> None:
            if state[1] not in "|<":
                raise pickle.UnpicklingError(f"it holds an array of the byte order {state[1]!r:.20}")

    def from_buffer(raw: bytes, dtype: Dtype, shape: Tuple[int, ...], order: str) -> Array:
        array = Array()
        array.__setstate__((1, shape, dtype, order == "F", raw))
        return array

    return {
        "numpy.ndarray": Array,
        "numpy.dtype": Dtype,
        "numpy.core.multiarray._reconstruct": lambda *_: Array(),
        "numpy.core.numeric._frombuffer": from_buffer,  # protocol 5
        "__builtin__.bytes": lambda: b"",
        "_codecs.encode": lambda text, _: text.encode("latin1"),  # bytes that Python 3 wrote in protocol 2
    }


def _text_keys(content: Mapping[object, PlainValue]) -> Dict[str, PlainValue]:
    """Returns a dictionary with ``str`` keys; keys are bytes in pickles of Python 3."""
    texts = {k.decode("latin1") if type(k) is bytes else k: v for k, v in content.items()}
    return {k: v for k, v in texts.items() if type(k) is str}


def read_pickle(path: Path, label_key: str) -> Tuple[np.ndarray, np.ndarray]:
    """Reads one file of the Python version: images uint8 [n, 32, 32, 3] and integer labels [n].  Raises DataError."""
    content = _text_keys(safe_unpickle(read_file(str(path)), str(path)))
    if "data" not in content or label_key not in content:
        raise DataError(f"{path} is not a CIFAR batch: it lacks 'data' or '{label_key}'", AGAIN, "unreadable")
    data = content["data"]
    is_array = isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == PIXELS
    if not is_array or data.dtype != np.uint8:
        raise DataError(
            f"{path}: 'data' is not an array of bytes with {PIXELS} columns", AGAIN, "wrong-dtype"
        )
    labels = content[label_key]
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu":
        labels = labels.tolist()
    # Only numbers reach NumPy: it reads memory at the address that an object's ``__array_interface__`` names.
    is_list = type(labels) in (list, tuple)
    if not is_list or not all(type(label) is int and -(2**31) <= label < 2**31 for label in labels):
        raise DataError(f"{path}: '{label_key}' is not a list of whole numbers", AGAIN)
    return _checked(path, data, np.array(labels, np.int64))


def read_binary(path: Path, num_label_bytes: int) -> Tuple[np.ndarray, np.ndarray]:
    """Reads one file of the binary version: images uint8 [n, 32, 32, 3] and integer labels [n].  Raises DataError.

    A record is the label (the last of ``num_label_bytes``; CIFAR-100 has a coarse label before it), then the
    red, green and blue planes.
    """
    raw, record = read_file(str(path)), num_label_bytes + PIXELS
    if len(raw) % record:
        raise DataError(
            f"{path} is truncated: {len(raw)} bytes are not whole records of {record}", AGAIN, "truncated"
        )
    records: np.ndarray = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return _checked(path, records[:, num_label_bytes:], records[:, num_label_bytes - 1])


def _checked(path: Path, planes: np.ndarray, labels: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    if len(planes) != len(labels):
        raise DataError(f"{path} has {len(planes)} images but {len(labels)} labels", AGAIN, "count-mismatch")
    if len(planes) == 0:
        raise DataError(f"{path} has no images", AGAIN)
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


def version_of(found: Found) -> CifarFiles:
    """Returns the version of a set that was found."""
    assert found.cifar is not None
    return found.cifar


def read_class_names(name: str, folder: Path, layout: CifarFiles) -> Tuple[str, ...]:
    """Reads the class names from their file; without it, returns CIFAR-10's known names, or numbers for CIFAR-100."""
    path = folder / layout.meta
    if not path.is_file():
        return CIFAR10_CLASSES if name == "cifar10" else tuple(str(n) for n in range(100))
    data = read_file(str(path))
    if layout.binary:
        names: PlainValue = data.decode("latin1").split()
    else:
        key = "label_names" if name == "cifar10" else "fine_label_names"
        names = _text_keys(safe_unpickle(data, str(path))).get(key, ())
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, (str, bytes)) for n in names):
            raise DataError(f"{path}: '{key}' is not a list of texts", AGAIN)
    if len(names) != NUM_CLASSES[name]:
        raise DataError(f"{path} lists {len(names)} class names, not {NUM_CLASSES[name]}", AGAIN)
    return tuple(str(n, "latin1") if isinstance(n, bytes) else n for n in names)


def read_files(name: str, folder: Path, layout: CifarFiles) -> Iterator[Union[ArrayFile, Problem]]:
    """Yields the images and labels of each file, training first; absent and damaged files are problems.

    Raises:
        DataError: the set takes more than half of the memory.
    """
    names = {"train": layout.train, "eval": (layout.test,)}
    present = [folder / n for part in names.values() for n in part if (folder / n).is_file()]
    for part, file_names in names.items():
        # Without any file, the part as a whole is missing.
        for path in (folder / n for n in file_names if any(folder / n in present for n in file_names)):
            if path not in present:
                yield Problem("missing-file", part, path.name)
                continue
            read = (
                partial(read_binary, path, 1 if name == "cifar10" else 2)
                if layout.binary
                else partial(read_pickle, path, layout.label_key)
            )
            arrays = item_or_problem(read, part, path.name, path)
            if isinstance(arrays, Problem):
                yield arrays
                continue
            images, labels = arrays
            yield ArrayFile(part, path, images, path, labels)
            if len(images) < layout.per_train_file and len(file_names) > 1:
                reason = f"{len(images):,} of {layout.per_train_file:,}"
                yield Problem("fewer-samples", part, path.name, reason, count=0)


def open_cifar(found: Found) -> DataSource:
    """Reads ``cifar10`` or ``cifar100``; missing training files and short files cause a warning.

    Raises:
        DataError: there is no training file or no test file, a file is damaged, or the set takes more than half of the
            memory.
    """
    name, folder, layout = found.name, found.location, version_of(found)
    hint = f"copy the {name} files there, or pass --dataset {name} --download"
    parts, warnings = [], []
    present = list(readable(read_files(name, folder, layout), Passed()))
    for subset, kind, names, full in (
        ("train", "training", layout.train, layout.per_train_file * len(layout.train)),
        ("eval", "test", (layout.test,), TEST_SIZE),
    ):
        files = [file for file in present if file.subset == subset]
        if not files:
            raise DataError(f"{folder} has no {kind} file of {name} ({', '.join(names)})", hint)
        examples = [file.examples(NUM_CLASSES[name]) for file in files]
        images, labels = (
            np.concatenate([getattr(one, key) for one in examples]) for key in ("images", "labels")
        )
        parts.append(ArrayExamples(images, labels))
        if len(images) < full:
            kind = "train" if kind == "training" else kind
            file_names = ", ".join(file.path.name for file in files)
            warnings.append(f"{name} is partial: {len(images):,} of {full:,} {kind} images ({file_names})")
    return data_source(
        *parts,
        name=name,
        class_names=read_class_names(name, folder, layout),
        location=str(folder),
        augmentation="crop_flip",
        warnings=tuple(warnings),
    )
