"""``cifar10`` and ``cifar100`` from their original files, the Python (pickle) or the binary version.

The formats are described at https://www.cs.toronto.edu/~kriz/cifar.html (Krizhevsky, 2009).
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ipucnn.aliases import PlainValue
from ipucnn.datasets.base import ArrayExamples, DataSource, data_source, read_file
from ipucnn.datasets.limits import check_memory
from ipucnn.datasets.problems import STRICT, Problems
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file
from ipucnn.text import printable

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32
AGAIN = "copy or download the file again"


@dataclass
class Layout:
    """The files of one version of a set, and the number of images in a full training file."""

    train: Tuple[str, ...]
    test: str
    per_train_file: int
    meta: str
    label_key: str

    @property
    def binary(self) -> bool:
        return self.test.endswith(".bin")


_BATCHES = tuple(f"data_batch_{n}" for n in range(1, 6))
_BINARY = tuple(f"{name}.bin" for name in _BATCHES)
LAYOUTS: Dict[str, Tuple[Layout, ...]] = {
    "cifar10": (
        Layout(_BATCHES, "test_batch", 10000, "batches.meta", "labels"),
        Layout(_BINARY, "test_batch.bin", 10000, "batches.meta.txt", "labels"),
    ),
    "cifar100": (
        Layout(("train",), "test", 50000, "meta", "fine_labels"),
        Layout(("train.bin",), "test.bin", 50000, "fine_label_names.txt", "fine_labels"),
    ),
}
NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
TEST_SIZE = 10000


def find_layout(name: str, folder: Path) -> Optional[Layout]:
    """Returns the version of ``name`` in ``folder``, complete or not, or None."""
    for layout in LAYOUTS[name]:
        # Only files count, because an image folder also has train/ and test/.  cifar100's names are common (many
        # folders hold a file "meta"), so two of them are needed.
        present = [n for n in (*layout.train, layout.test, layout.meta) if is_file(folder / n)]
        if len(present) >= (2 if name == "cifar100" else 1):
            return layout
    return None


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


def read_pickle(path: Path, label_key: str, num_classes: Optional[int]) -> Tuple[np.ndarray, np.ndarray]:
    """Reads one file of the Python version: images uint8 [n, 32, 32, 3] and integer labels [n].  Raises DataError.

    Without ``num_classes``, labels are not checked against the number of classes.
    """
    content = _text_keys(safe_unpickle(read_file(str(path)), str(path)))
    if "data" not in content or label_key not in content:
        raise DataError(f"{path} is not a CIFAR batch: it lacks 'data' or '{label_key}'", AGAIN)
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
    return _checked(path, data, np.array(labels, np.int64), num_classes)


def read_binary(
    path: Path, num_label_bytes: int, num_classes: Optional[int]
) -> Tuple[np.ndarray, np.ndarray]:
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
    return _checked(path, records[:, num_label_bytes:], records[:, num_label_bytes - 1], num_classes)


def _checked(
    path: Path, planes: np.ndarray, labels: np.ndarray, num_classes: Optional[int]
) -> Tuple[np.ndarray, np.ndarray]:
    if len(planes) != len(labels):
        raise DataError(f"{path} has {len(planes)} images but {len(labels)} labels", AGAIN, "count-mismatch")
    if len(planes) == 0:
        raise DataError(f"{path} has no images", AGAIN)
    if num_classes is not None:
        wrong = labels[(labels < 0) | (labels >= num_classes)]
        if len(wrong):
            raise DataError(f"{path} has label {wrong[0]}; its classes are 0 to {num_classes - 1}", AGAIN)
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


def read_class_names(name: str, folder: Path, layout: Layout) -> Tuple[str, ...]:
    """Reads the class names from their file; without it, returns CIFAR-10's known names, or numbers for CIFAR-100."""
    path = folder / layout.meta
    if not is_file(path):
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


def read_parts(
    name: str, folder: Path, layout: Layout, problems: Problems = STRICT
) -> Dict[str, List[Tuple[str, np.ndarray, np.ndarray]]]:
    """Returns the files of "train" and "eval" that are present: name, images and labels of each.

    Raises:
        DataError: a file is damaged, or the set takes more than half of the memory.  If ``problems`` does not raise,
            files that cannot be read are left out, and labels are not compared with the number of classes.
    """
    parts: Dict[str, List[Tuple[str, np.ndarray, np.ndarray]]] = {"train": [], "eval": []}
    names = {"train": layout.train, "eval": (layout.test,)}
    present = [folder / n for part in names.values() for n in part if is_file(folder / n)]
    # The bytes of the files, the arrays of each file, and the concatenated arrays.
    check_memory(3 * sum(map(file_size, present)), f"{name} in {printable(str(folder))}")
    num_classes = NUM_CLASSES[name] if problems is STRICT else None
    for part, files in parts.items():
        # Without any file, the part as a whole is missing.
        for path in (folder / n for n in names[part] if any(folder / n in present for n in names[part])):
            if path not in present:
                problems.find("missing-file", part, path.name)
                continue
            with problems.noting(part, path.name, path):
                if layout.binary:
                    images, labels = read_binary(path, 1 if name == "cifar10" else 2, num_classes)
                else:
                    images, labels = read_pickle(path, layout.label_key, num_classes)
                files.append((path.name, images, labels))
                if len(images) < layout.per_train_file and len(names[part]) > 1:
                    text = f"{path.name}: {len(images):,} of {layout.per_train_file:,}"
                    problems.find("fewer-samples", part, text, 0)
    return parts


def open_cifar(name: str, folder: Path) -> DataSource:
    """Reads ``cifar10`` or ``cifar100``; missing training files and short files cause a warning.

    Raises:
        DataError: there is no training file or no test file, a file is damaged, or the set takes more than half of the
            memory.
    """
    layout = find_layout(name, folder)
    hint = f"copy the {name} files there, or pass --dataset {name} --download"
    if layout is None:
        raise DataError(f"{folder} has no {name} files", hint)
    parts, warnings = [], []
    sizes = {"training": layout.per_train_file * len(layout.train), "test": TEST_SIZE}
    for (kind, full), files in zip(sizes.items(), read_parts(name, folder, layout).values()):
        if not files:
            names = ", ".join(layout.train if kind == "training" else (layout.test,))
            raise DataError(f"{folder} has no {kind} file of {name} ({names})", hint)
        file_names, *columns = zip(*files)
        images, labels = map(np.concatenate, columns)
        parts.append(ArrayExamples(images, labels.astype(np.int32)))
        if len(images) < full:
            kind = "train" if kind == "training" else kind
            names = ", ".join(file_names)
            warnings.append(f"{name} is partial: {len(images):,} of {full:,} {kind} images ({names})")
    return data_source(
        *parts,
        name=name,
        class_names=read_class_names(name, folder, layout),
        location=str(folder),
        augmentation="crop_flip",
        warnings=tuple(warnings),
    )
