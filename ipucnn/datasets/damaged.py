"""Image files that cannot be decoded: rejected before a run computes anything, or left out with ``--skip-damaged``."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Dict, List

from ipucnn.datasets.base import DataSource, FileExamples
from ipucnn.datasets.classes import absent
from ipucnn.datasets.forms import open_image
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size
from ipucnn.machine import num_cores, side_by_side
from ipucnn.text import counted, printable

CHECKED_BYTES = 256 * 2**20
"""Parts with more bytes are not checked before the run, which would take minutes; the run ends at a damaged image."""
MOST_NAMED = 50
HINT = "replace them, or add --skip-damaged to go on without them"


def refuse_damaged(source: DataSource) -> None:
    """Decodes all images of a small folder before a run computes anything.

    Raises:
        DataError: images cannot be read; the message names up to ``MOST_NAMED`` of them.
    """
    damaged: Dict[str, str] = {}
    for examples in (source.train, source.eval):
        if isinstance(examples, FileExamples) and _num_bytes(examples) <= CHECKED_BYTES:
            damaged.update(_unreadable(examples, source))
    if damaged:
        total = len(source.train) + len(source.eval)
        raise DataError(
            f"{len(damaged):,} of {counted(total, 'image')} cannot be read: {_named(damaged)}", HINT
        )


def without_damaged(source: DataSource) -> DataSource:
    """Returns the source without the images that cannot be decoded; a warning counts and names them.

    Raises:
        DataError: no training image, no evaluation image, or no training image of a class can be read.
    """
    parts: List[FileExamples] = []
    damaged: Dict[str, str] = {}
    for examples, purpose in ((source.train, "training"), (source.eval, "evaluation")):
        assert isinstance(examples, FileExamples)
        bad = _unreadable(examples, source)
        if len(bad) == len(examples):
            raise DataError(f"no image for {purpose} can be read: {_named(bad)}", "give other images")
        parts.append(examples.subset([k for k, path in enumerate(examples.paths) if path not in bad]))
        damaged.update(bad)
    if not damaged:
        return source
    train, evaluation = parts
    before, names = absent(source.train, source.info.class_names), source.info.class_names
    emptied = [name for name in absent(train, names) if name not in before]
    if emptied:
        raise DataError(
            f"--skip-damaged leaves no training image of {', '.join(map(printable, emptied))}: {_named(damaged)}",
            "replace the damaged images, or remove the folders of these classes",
        )
    warning = f"{counted(len(damaged), 'damaged image')} left out (--skip-damaged): {_named(damaged)}"
    info = replace(
        source.info,
        num_train=len(train),
        num_eval=len(evaluation),
        warnings=(*source.info.warnings, warning),
        left_out=tuple(damaged),
    )
    return replace(source, info=info, train=train, eval=evaluation)


def _unreadable(examples: FileExamples, source: DataSource) -> Dict[str, str]:
    """Returns the paths of the images that cannot be decoded, each with the reason.  All cores decode."""
    channels, most = source.info.image_shape[2] or 3, source.info.max_image_pixels

    def reason(index: int) -> str:
        try:
            open_image(examples.encoded(index), examples.describe(index), channels, most, strict=True)
        except DataError as error:
            return error.message
        return ""

    reasons = side_by_side(reason, ((index,) for index in range(len(examples))), num_cores())
    return {path: why for path, why in zip(examples.paths, reasons) if why}


def _num_bytes(examples: FileExamples) -> int:
    total = 0
    for path in examples.paths:
        with contextlib.suppress(DataError):  # decoding reports it
            total += file_size(Path(path))
        if total > CHECKED_BYTES:
            break
    return total


def _named(damaged: Dict[str, str]) -> str:
    more = len(damaged) - MOST_NAMED
    reasons = [printable(why) for why in list(damaged.values())[:MOST_NAMED]]
    return "; ".join(reasons) + (f"; and {more:,} more" if more > 0 else "")
