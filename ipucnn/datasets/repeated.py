"""Finds evaluation images that a network is also trained on: their scores come out too high."""

import hashlib
import os
from collections import Counter
from typing import Iterator, List, Set

import numpy as np

from ipucnn.datasets.base import (
    IN_MEMORY,
    DataSource,
    EncodedExamples,
    Examples,
    FileExamples,
    RecordExamples,
    read_file,
)
from ipucnn.errors import DataError
from ipucnn.text import counted

MOST_BYTES = 256 * 2**20
"""Files of equal size are compared unless those of a set have more bytes together: that would take minutes."""


def trained_and_evaluated(source: DataSource) -> List[str]:
    """Returns a line if evaluation images are training images, too, pixel for pixel or as equal files.

    Images in record files are not compared.
    """
    if any(isinstance(part, RecordExamples) for part in (source.train, source.eval)):
        return []
    train, evaluation = source.train, source.eval
    known = _sizes_of_both(train, evaluation)
    seen = set(_digests(train, known))
    shared = sum(digest in seen for digest in _digests(evaluation, known)) if seen else 0
    if not shared:
        return []
    return [
        f"{shared:,} of {counted(len(evaluation), 'evaluation image')} {'is' if shared == 1 else 'are'} among the "
        "training images, too: scores come out too high; `ipucnn verify-dataset` names them"
    ]


def _sizes_of_both(train: Examples, evaluation: Examples) -> Set[int]:
    """Returns the sizes in bytes that files of both parts have; none if they are too many to read."""
    if not (isinstance(train, FileExamples) and isinstance(evaluation, FileExamples)):
        return set()
    sizes = [Counter(map(_size, part.paths)) for part in (train, evaluation)]
    both = (set(sizes[0]) & set(sizes[1])) - {-1}
    num_bytes = sum(size * count for one in sizes for size, count in one.items() if size in both)
    return both if num_bytes <= MOST_BYTES else set()


def _digests(examples: Examples, sizes: Set[int]) -> Iterator[bytes]:
    """Yields a digest of each image; of files, of those that have one of the sizes and can be read."""
    if isinstance(examples, IN_MEMORY):
        for image in examples.images:
            shape = "x".join(map(str, image.shape)).encode()
            yield hashlib.blake2b(
                np.ascontiguousarray(image).data, digest_size=16, person=shape[:16]
            ).digest()
    elif isinstance(examples, EncodedExamples):
        yield from (hashlib.blake2b(data, digest_size=16).digest() for data in examples.data)
    elif isinstance(examples, FileExamples):
        for path in examples.paths:
            if _size(path) in sizes:
                try:
                    yield hashlib.blake2b(read_file(path), digest_size=16).digest()
                except DataError:  # whoever decodes it reports it
                    continue


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
