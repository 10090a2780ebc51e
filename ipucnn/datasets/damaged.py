"""Damaged images of files and records, which are decoded when they are needed: found before a run, or where it ends.

``problems.py`` says what happens at a damaged file in every command.
"""

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ipucnn.datasets.base import IN_MEMORY, DatasetInfo, DataSource, FileExamples, ImageFiles
from ipucnn.datasets.classes import absent
from ipucnn.datasets.forms import open_image
from ipucnn.datasets.problems import Problem, check_any_left, item_or_problem, left_out_line, named_damage
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size
from ipucnn.machine import num_cores, side_by_side
from ipucnn.text import counted, printable

CHECKED_BYTES = 256 * 2**20
"""Parts with more bytes are not checked before the run, which would take minutes; the run ends at a damaged image."""
HINT = "replace them, or add --skip-damaged to go on without them"


def refuse_damaged(source: DataSource) -> None:
    """Decodes all images of a small folder before a run computes anything.

    Raises:
        DataError: images cannot be read; the message names them.
    """
    damaged: Dict[str, str] = {}
    for examples in (source.train, source.eval):
        if isinstance(examples, FileExamples) and _num_bytes(examples) <= CHECKED_BYTES:
            damaged.update(_damaged(examples, source).values())
    if damaged:
        total = len(source.train) + len(source.eval)
        raise DataError(
            f"{len(damaged):,} of {counted(total, 'image')} cannot be read: {named_damage(damaged)}", HINT
        )


def without_damaged(source: DataSource) -> DataSource:
    """Returns a source of encoded images without those that cannot be decoded; a warning counts and names them.

    Raises:
        DataError: no training image, no evaluation image, or no training image of a class can be read.
    """
    parts: List[ImageFiles] = []
    damaged: Dict[str, str] = {}
    for examples in (source.train, source.eval):
        assert not isinstance(examples, IN_MEMORY)
        bad = _damaged(examples, source)
        parts.append(examples.subset([k for k in range(len(examples)) if k not in bad]))
        damaged.update(bad.values())
    train, evaluation = parts
    check_any_left(len(train), len(evaluation), damaged)
    if not damaged:
        return source
    before, names = absent(source.train, source.info.class_names), source.info.class_names
    emptied = [name for name in absent(train, names) if name not in before]
    if emptied:
        raise DataError(
            f"--skip-damaged leaves no training image of {', '.join(map(printable, emptied))}: "
            f"{named_damage(damaged)}",
            "replace the damaged images, or remove the folders of these classes",
        )
    info = replace(
        source.info,
        num_train=len(train),
        num_eval=len(evaluation),
        warnings=(*source.info.warnings, *left_out_line(damaged)),
        left_out=(*source.info.left_out, *damaged),
    )
    return replace(source, info=info, train=train, eval=evaluation)


def _damaged(examples: ImageFiles, source: DataSource) -> Dict[int, Tuple[str, str]]:
    """Returns path or name, and the reason, of each image that cannot be decoded, by its number.  All cores decode."""
    channels, most = source.info.image_shape[2] or 3, source.info.max_image_pixels

    def decode(index: int) -> Optional[Problem]:
        def read() -> None:
            open_image(examples.encoded(index), examples.describe(index), channels, most, strict=True)

        name = examples.paths[index] if isinstance(examples, FileExamples) else examples.describe(index)
        return item_or_problem(read, None, name)

    results = side_by_side(decode, ((index,) for index in range(len(examples))), num_cores())
    return {
        index: (problem.name, problem.error.message)
        for index, problem in enumerate(results)
        if problem is not None and problem.error is not None
    }


def _num_bytes(examples: FileExamples) -> int:
    total = 0
    for path in examples.paths:
        with contextlib.suppress(DataError):  # decoding reports it
            total += file_size(Path(path))
        if total > CHECKED_BYTES:
            break
    return total


def hint_where_run_ends(error: DataError, info: DatasetInfo) -> str:
    """Returns the hint for a run that ends at a file that cannot be read, with the command that lists all of them."""
    hints = [error.hint] if error.hint else []
    if info.location:
        folder = shlex.quote(printable(info.location))
        hints.append(
            f"ipucnn verify-dataset --dataset-path {folder} names every damaged file, --skip-damaged leaves them out"
        )
    return "; ".join(hints)
