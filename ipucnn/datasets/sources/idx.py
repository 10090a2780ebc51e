"""``mnist`` and ``fashion_mnist`` from their original idx files, plain or gzipped.

The format (LeCun, Cortes, Burges, http://yann.lecun.com/exdb/mnist) is: two zero bytes, a type (8: unsigned
byte), the number of dimensions, each dimension as a big-endian 32-bit integer, then the data.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, Dict, Optional, Tuple, Union

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, data_source
from ipucnn.datasets.limits import check_memory
from ipucnn.datasets.problems import STRICT, Problems
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file, open_regular
from ipucnn.text import printable

FILES: Dict[str, str] = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "eval_images": "t10k-images-idx3-ubyte",
    "eval_labels": "t10k-labels-idx1-ubyte",
}
FULL_SIZE = {"train": 60000, "eval": 10000}
CLASS_NAMES: Dict[str, Tuple[str, ...]] = {
    "mnist": tuple(str(n) for n in range(10)),
    "fashion_mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}
AUGMENTATION = {"mnist": "shift", "fashion_mnist": "shift_flip"}
# The third byte of files with other types of numbers than unsigned bytes.
_OTHER_TYPES = (0x09, 0x0B, 0x0C, 0x0D, 0x0E)
AGAIN = "copy or download the file again"


def find_file(folder: Path, stem: str) -> Optional[Path]:
    """Returns the plain or gzipped file of that name, also with the name that some tools unpack to (``idx3.ubyte``)."""
    for name in (stem, stem + ".gz", stem.replace("-idx", ".idx"), stem.replace("-idx", ".idx") + ".gz"):
        if is_file(folder / name):
            return folder / name
    return None


def has_files(folder: Path) -> bool:
    """Returns whether any of the four files lies in ``folder``."""
    return any(find_file(folder, stem) is not None for stem in FILES.values())


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Reads the uint8 array of an idx file.

    At most one byte more than the header announces is read or unpacked.

    Raises:
        DataError: the file is unreadable, is not idx of unsigned bytes with ``num_dimensions`` dimensions, is larger
            than half of the memory, or has another length than its header announces.
    """
    name = printable(str(path))
    with open_regular(path, hint=AGAIN) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not is_packed and path.suffix == ".gz":
            raise DataError(f"{name} is not a gzip file", AGAIN)
        stream = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            return _read_idx(stream, name, num_dimensions, None if is_packed else file_size(path))
        except (OSError, EOFError, zlib.error) as error:
            # gzip's message for a wrong checksum.
            is_changed = str(error).startswith("CRC check failed")
            code = "truncated" if isinstance(error, EOFError) else "checksum" if is_changed else "unreadable"
            raise DataError(f"cannot read {name}: {error}", AGAIN, code) from error


def _read_idx(
    stream: Union[BinaryIO, gzip.GzipFile], name: str, num_dimensions: int, num_stored: Optional[int]
) -> np.ndarray:
    """Reads the array from a stream of ``num_stored`` bytes; None if the length is unknown."""
    header_bytes = 4 + 4 * num_dimensions
    header = stream.read(header_bytes)
    if len(header) < header_bytes:
        text = f"{name} is truncated: {len(header)} bytes, not even its header of {header_bytes}"
        raise DataError(text, AGAIN, "truncated")
    magic, *shape = struct.unpack(f">{1 + num_dimensions}I", header)
    if magic != 0x0800 + num_dimensions:
        raise DataError(
            f"{name} is not an idx file of {num_dimensions}-dimensional bytes: "
            f"it starts with {magic:#010x}, not {0x0800 + num_dimensions:#010x}",
            "check that images and labels are not swapped, or download the file again",
            "wrong-dtype" if magic >> 8 in _OTHER_TYPES else "unreadable",
        )
    size, shown = math.prod(shape), "x".join(map(str, shape))
    if not size:
        raise DataError(f"{name} has no data: its header says {shown}", AGAIN)
    at_most = size if num_stored is None else min(size, num_stored - header_bytes)
    check_memory(at_most, f"{name} of {shown} bytes")
    data = stream.read(at_most + 1)
    if len(data) < size:
        num_bytes = header_bytes + len(data)
        text = f"{name} is truncated: {num_bytes} bytes where its header ({shown}) says {header_bytes + size}"
        raise DataError(text, AGAIN, "truncated")
    if len(data) > size:
        raise DataError(
            f"{name} has trailing bytes: more than the {header_bytes + size} that its header ({shown}) says",
            AGAIN,
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_part(
    folder: Path, part: str, name: str, problems: Problems = STRICT
) -> Dict[str, Tuple[Path, np.ndarray]]:
    """Returns "images" [n, h, w] and "labels" [n] of "train" or "eval", each with its file.

    Raises:
        DataError: a file is absent or cannot be read, or the two differ in length.  If ``problems`` does not raise, the
            result lacks files that cannot be read.
    """
    arrays: Dict[str, Tuple[Path, np.ndarray]] = {}
    for kind, num_dimensions in (("images", 3), ("labels", 1)):
        stem = FILES[f"{part}_{kind}"]
        path = find_file(folder, stem)
        if path is None:
            hint = f"copy all four idx files there, or pass --dataset {name} --download"
            missing = f"{stem} (plain or .gz)"
            problems.refuse(
                DataError(f"{name} in {folder} lacks {missing}", hint, "missing-file"), part, missing
            )
            continue
        with problems.noting(part, path.name, path):
            arrays[kind] = path, read_idx(path, num_dimensions)
    if len(arrays) == 2:
        (image_path, images), (label_path, labels) = arrays["images"], arrays["labels"]
        if len(images) != len(labels):
            text = f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels"
            example = f"{image_path.name}: {len(images)} images, {len(labels)} labels"
            problems.refuse(DataError(text, AGAIN, "count-mismatch"), part, example)
    return arrays


def open_idx(name: str, folder: Path) -> DataSource:
    """Reads ``mnist`` or ``fashion_mnist``.  Raises DataError naming the file that is absent or damaged."""
    parts, warnings = [], []
    for part, full in FULL_SIZE.items():
        arrays = read_part(folder, part, name)
        images, (path, labels) = arrays["images"][1], arrays["labels"]
        if labels.max() > 9:
            raise DataError(f"{path} has label {labels.max()}; {name} has classes 0 to 9", AGAIN)
        parts.append(ArrayExamples(images[..., np.newaxis], labels.astype(np.int32)))
        if len(images) < full:
            warnings.append(f"{name} is partial: {len(images):,} of {full:,} {part} images")
    if parts[0].images.shape[1:] != parts[1].images.shape[1:]:
        raise DataError(f"{name} in {folder}: train and test images differ in size", AGAIN)
    return data_source(
        *parts,
        name=name,
        class_names=CLASS_NAMES[name],
        location=str(folder),
        augmentation=AUGMENTATION[name],
        warnings=tuple(warnings),
    )
