"""Finds evaluation images that a network is also trained on: their scores come out too high."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

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
from ipucnn.filesystem import open_regular
from ipucnn.text import counted

_PIECE = 2**14


def trained_and_evaluated(source: DataSource, command: str) -> List[str]:
    """Returns a line if evaluation images are training images, too; ``command``, or "" for none, names them."""
    shared = num_shared(source.train, source.eval)
    if not shared:
        return []
    return [
        f"{shared:,} of {counted(len(source.eval), 'evaluation image')} {'is' if shared == 1 else 'are'} among the "
        f"training images, too: scores come out too high{f'; `{command}` names them' if command else ''}"
    ]


def num_shared(train: Examples, evaluation: Examples) -> Optional[int]:
    """Returns how many evaluation images are training images, too, pixel for pixel or as equal files.

    The result is None for images that are not compared: those in record files, and files with pixels in memory.
    """
    if isinstance(train, FileExamples) and isinstance(evaluation, FileExamples):
        return _equal_files(train.paths, evaluation.paths)
    kinds = {IN_MEMORY if isinstance(part, IN_MEMORY) else type(part) for part in (train, evaluation)}
    if len(kinds) > 1 or isinstance(train, (FileExamples, RecordExamples)):
        return None
    seen = set(_digests(train))
    return sum(digest in seen for digest in _digests(evaluation))


def _equal_files(train: Sequence[str], evaluation: Sequence[str]) -> int:
    """Returns the number of evaluation files that are equal to a file of training.

    Sizes tell most files apart, and pieces of files the rest; only files that agree in both are read whole.
    """
    for digest_of in (_size, _pieces, _whole):
        digests = [[digest_of(path) for path in paths] for paths in (train, evaluation)]
        both = (set(digests[0]) & set(digests[1])) - {None}
        train, evaluation = (
            [path for path, digest in zip(paths, found) if digest in both]
            for paths, found in zip((train, evaluation), digests)
        )
    return len(evaluation)


def _size(path: str) -> Optional[int]:
    try:
        return os.stat(path).st_size
    except OSError:  # whoever decodes the file reports it
        return None


def _pieces(path: str) -> Optional[bytes]:
    """Returns a digest of the size of a file and of four pieces of it; None if it cannot be read."""
    try:
        with open_regular(Path(path)) as file:
            size, pieces = os.fstat(file.fileno()).st_size, [b""] * 4
            for k in range(4):
                file.seek(max(0, size - _PIECE) * k // 3)
                pieces[k] = file.read(_PIECE)
    except DataError:
        return None
    return blake2b(b"%d " % size + b"".join(pieces), digest_size=16).digest()


def _whole(path: str) -> Optional[bytes]:
    try:
        return blake2b(read_file(path), digest_size=16).digest()
    except DataError:
        return None


def _digests(examples: Examples) -> Iterator[bytes]:
    """Yields a digest of each image that is held in memory."""
    if isinstance(examples, IN_MEMORY):
        for image in examples.images:
            shape = "x".join(map(str, image.shape)).encode()
            yield blake2b(np.ascontiguousarray(image).data, digest_size=16, person=shape[:16]).digest()
    elif isinstance(examples, EncodedExamples):
        yield from (blake2b(data, digest_size=16).digest() for data in examples.data)
