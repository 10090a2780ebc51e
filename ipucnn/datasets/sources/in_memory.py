"""Data sets of Python's memory: arrays that ``ipucnn.train`` and ``ipucnn.evaluate`` are given in place of a name."""

import hashlib
from dataclasses import replace
from typing import Any, Callable, Dict, Tuple

import numpy as np

from ipucnn.datasets.base import DataSource, source_of
from ipucnn.datasets.sources.imagefolder import HELD_OUT_SHARE, held_out
from ipucnn.errors import DataError
from ipucnn.text import shown_value

PREFIX = "arrays-"
"""What the names begin with under which they stand in a run's configuration."""
_HINT = (
    "dataset=(images, labels), or ((images, labels), (eval_images, eval_labels)), and class names after them"
)
_kept: Dict[str, Tuple[Tuple[Any, ...], Tuple[str, ...]]] = {}


def keep(given: object, is_evaluated: bool) -> str:
    """Keeps arrays for this process; the same ones have the same name everywhere.

    Args:
        given: (images, labels), or two such pairs, for training and for evaluation; names of the classes after them.
        is_evaluated: all of one pair is for evaluation; otherwise a share of each class is held out.

    Returns:
        The name that ``--dataset`` takes in this process.

    Raises:
        DataError: it is neither.
    """
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise DataError(f"dataset={shown_value(type(given).__name__)} is no pair of arrays", _HINT)
    train, evaluation, *names = given
    notes: Tuple[str, ...] = ()
    if hasattr(train, "shape"):
        pair = np.asarray(train), np.asarray(evaluation)
        train, evaluation = (pair, pair) if is_evaluated else _divided(*pair)
        if not is_evaluated:
            notes = (
                f"{len(evaluation[0]):,} of the {len(pair[0]):,} images of dataset= are held out for evaluation",
            )
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in (train, evaluation)):
        raise DataError("dataset= has no two pairs of arrays", _HINT)
    made = (train, evaluation, *names)
    digest = hashlib.sha256(repr(names).encode())
    for part in (train, evaluation):
        for array in map(np.asarray, part):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    name = f"{PREFIX}{digest.hexdigest()[:12]}"
    _kept[name] = made, notes
    return name


def find(name: str) -> Callable[[], DataSource]:
    """What opens the arrays that are kept under a name.

    Raises:
        DataError: this process has none.
    """
    if name not in _kept:
        raise DataError(
            f"data set {shown_value(name)} was given as arrays, and is in the memory of that Python alone",
            "give them again, in Python: dataset=(images, labels)",
        )
    made, notes = _kept[name]

    def open_arrays() -> DataSource:
        source = source_of(made, name, "the arrays of dataset=")
        return replace(source, info=replace(source.info, own_split=bool(notes), warnings=notes))

    return open_arrays


def _divided(images: np.ndarray, labels: np.ndarray) -> Tuple[Tuple[np.ndarray, ...], Tuple[np.ndarray, ...]]:
    """Training and evaluation: a share of each class, or of all images with masks, is held out."""
    if len(images) != len(labels):
        raise DataError(f"dataset= has {len(images):,} images and {len(labels):,} labels", _HINT)
    classes = labels.reshape(len(labels), -1)[:, 0] if labels.ndim < 3 else np.zeros(len(labels), int)
    chosen: np.ndarray = np.zeros(len(labels), bool)
    for label in np.unique(classes):
        (numbers,) = np.nonzero(classes == label)
        chosen[
            [numbers[place] for place in held_out([str(number) for number in numbers], HELD_OUT_SHARE)]
        ] = True
    if not chosen.any():
        raise DataError("dataset= has no class of two images, of which one could be held out", _HINT)
    return (images[~chosen], labels[~chosen]), (images[chosen], labels[chosen])
