"""``mnist`` and ``fashion_mnist`` from their original idx files, plain or gzipped.

The format (LeCun, Cortes, Burges, http://yann.lecun.com/exdb/mnist) is: two zero bytes, a type (8: unsigned
byte), the number of dimensions, each dimension as a big-endian 32-bit integer, then the data.
"""

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO, Dict, Iterator, Tuple, Union

import numpy as np

from ipucnn.datasets.base import ArrayFile, DataSource, data_source
from ipucnn.datasets.formats import Found
from ipucnn.datasets.problems import Passed, Problem, item_or_problem, readable
from ipucnn.errors import DataError
from ipucnn.filesystem import open_regular
from ipucnn.text import printable

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
            raise DataError(f"{name} is not a gzip file", AGAIN, "unreadable")
        stream = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            return _read_idx(
                stream, name, num_dimensions, path.stat().st_size * (_DEFLATED if is_packed else 1)
            )
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            # gzip's message for a wrong checksum.
            is_changed = str(error).startswith("CRC check failed")
            code = "truncated" if isinstance(error, EOFError) else "checksum" if is_changed else "unreadable"
            raise DataError(f"cannot read {name}: {error}", AGAIN, code) from error


# The most bytes that a packed one holds: deflate's longest match for two bits.
_DEFLATED = 1032


def _read_idx(
    stream: Union[BinaryIO, gzip.GzipFile], name: str, num_dimensions: int, at_most: int
) -> np.ndarray:
    """Reads the array from a stream of ``at_most`` bytes."""
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
        raise DataError(f"{name} has no data: its header says {shown}", AGAIN, "unreadable")
    data = stream.read(min(size, at_most) + 1)
    if len(data) < size:
        num_bytes = header_bytes + len(data)
        text = f"{name} is truncated: {num_bytes} bytes where its header ({shown}) says {header_bytes + size}"
        raise DataError(text, AGAIN, "truncated")
    if len(data) > size:
        raise DataError(
            f"{name} has trailing bytes: more than the {header_bytes + size} that its header ({shown}) says",
            AGAIN,
            "unreadable",
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_part(found: Found, part: str) -> Iterator[Union[ArrayFile, Problem]]:
    """Yields the images [n, h, w, 1] of "train" or "eval" with their labels [n], which are none if they cannot be read.

    Files that are absent or damaged, and numbers of images and labels that differ, are problems.
    """
    arrays: Dict[str, Tuple[Path, np.ndarray]] = {}
    for kind, num_dimensions, path in zip(("images", "labels"), (3, 1), found.parts[part]):
        if not path.is_file():
            hint = f"copy all four idx files there, or pass --dataset {found.name} --download"
            missing = f"{path.name} (plain or .gz)"
            absent = DataError(f"{found.name} in {found.location} lacks {missing}", hint, "missing-file")
            yield Problem("missing-file", part, missing, error=absent)
            continue
        array = item_or_problem(partial(read_idx, path, num_dimensions), part, path.name, path)
        if isinstance(array, Problem):
            yield array
        else:
            arrays[kind] = path, array
    if "images" not in arrays:
        return
    image_path, images = arrays["images"]
    label_path, labels = arrays.get("labels", (image_path, np.zeros(0, np.uint8)))
    if len(arrays) == 2 and len(images) != len(labels):
        text = f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels"
        reason = f"{len(images)} images, {len(labels)} labels"
        differs = DataError(text, AGAIN, "count-mismatch")
        yield Problem("count-mismatch", part, image_path.name, reason, differs)
    yield ArrayFile(part, image_path, images[..., np.newaxis], label_path, labels)


def open_idx(found: Found) -> DataSource:
    """Reads ``mnist`` or ``fashion_mnist``.  Raises DataError naming the file that is absent or damaged."""
    name, parts, warnings = found.name, [], []
    for part, full in FULL_SIZE.items():
        (file,) = readable(read_part(found, part), Passed())
        parts.append(file.examples(len(CLASS_NAMES[name])))
        if len(file.images) < full:
            warnings.append(f"{name} is partial: {len(file.images):,} of {full:,} {part} images")
    if parts[0].images.shape[1:] != parts[1].images.shape[1:]:
        raise DataError(f"{name} in {found.location}: train and test images differ in size", AGAIN)
    return data_source(
        *parts,
        name=name,
        class_names=CLASS_NAMES[name],
        location=str(found.location),
        augmentation=AUGMENTATION[name],
        warnings=tuple(warnings),
    )
