"""Image files that cannot be decoded: refused before a run computes anything, or left out with ``--skip-damaged``."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Tuple

from ipucnn.datasets.base import DataSource, FileExamples
from ipucnn.datasets.images import open_image
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size
from ipucnn.machine import num_cores
from ipucnn.text import counted, printable

CHECKED_BYTES = 256 * 2**20
"""More bytes than this are not decoded ahead, which would take minutes: a run ends at the first damaged image."""
MOST_NAMED = 50
HINT = "replace them, or add --skip-damaged to go on without them"


def refuse_damaged(source: DataSource) -> None:
    """Decodes the images of a folder, if they are few, before anything is computed.

    Raises:
        DataError: naming all that cannot be read.
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
    """A folder's images without those that cannot be decoded, which a warning counts and names.

    Raises:
        DataError: none of a part can be read.
    """
    parts: List[FileExamples] = []
    damaged: Dict[str, str] = {}
    for examples, what in ((source.train, "training"), (source.eval, "evaluation")):
        assert isinstance(examples, FileExamples)
        bad = _unreadable(examples, source)
        if len(bad) == len(examples):
            raise DataError(f"no image for {what} can be read: {_named(bad)}", "give other images")
        parts.append(examples.subset([k for k, path in enumerate(examples.paths) if path not in bad]))
        damaged.update(bad)
    if not damaged:
        return source
    train, evaluation = parts
    told = f"{counted(len(damaged), 'damaged image')} left out (--skip-damaged): {_named(damaged)}"
    info = replace(
        source.info,
        num_train=len(train),
        num_eval=len(evaluation),
        warnings=(*source.info.warnings, told),
        left_out=tuple(damaged),
    )
    return replace(source, info=info, train=train, eval=evaluation)


def _unreadable(examples: FileExamples, source: DataSource) -> Dict[str, str]:
    """Why each of the images that cannot be decoded cannot, by its path; all cores decode."""
    channels, most = source.info.image_shape[2] or 3, source.info.max_image_pixels

    def reason(index: int) -> str:
        try:
            open_image(examples.encoded(index), examples.describe(index), channels, most)
        except DataError as error:
            return error.message
        return ""

    with ThreadPoolExecutor(num_cores()) as pool:
        reasons: Tuple[str, ...] = tuple(pool.map(reason, range(len(examples))))
    return {path: why for path, why in zip(examples.paths, reasons) if why}


def _num_bytes(examples: FileExamples) -> int:
    total = 0
    for path in examples.paths:
        with contextlib.suppress(DataError):  # which decoding tells
            total += file_size(Path(path))
        if total > CHECKED_BYTES:
            break
    return total


def _named(damaged: Dict[str, str]) -> str:
    more = len(damaged) - MOST_NAMED
    reasons = [printable(why) for why in list(damaged.values())[:MOST_NAMED]]
    return "; ".join(reasons) + (f"; and {more:,} more" if more > 0 else "")
