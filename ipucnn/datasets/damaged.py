"""Damaged images of files and records, which are decoded when they are needed: found before a run, or where it ends.

``problems.py`` says what happens at a damaged file in every command.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Union

import numpy as np

from ipucnn.datasets.base import IN_MEMORY, DatasetInfo, DataSource, FileExamples, ImageFiles
from ipucnn.datasets.classes import absent
from ipucnn.datasets.forms import displayed, opened, remarks_on
from ipucnn.datasets.problems import (
    Passed,
    Problem,
    check_any_left,
    is_damaged,
    item_or_problem,
    left_out_line,
    named_damage,
    problem_of,
    remark_lines,
)
from ipucnn.errors import DataError
from ipucnn.machine import num_cores, parallel_map
from ipucnn.text import counted, printable, quoted

CHECKED_BYTES = 256 * 2**20
"""Parts with more bytes are not checked before the run, which would take minutes; the run ends at a damaged image."""
SAMPLED = 32
"""Images of such a part that are opened, evenly spread, to find what :func:`remarks_on` says."""
HINT = "replace them, or add --skip-damaged to go on without them"


def refuse_damaged(source: DataSource) -> DataSource:
    """Decodes all images of a small folder, and a few of a large one, before a run computes anything.

    Returns:
        The source with a warning for each kind of :func:`remarks_on` files, which counts them.

    Raises:
        DataError: images of a small folder cannot be read; the message names them.  Its hint is about the first that is
            not damaged, but of a kind or size that is not read, if there is one.
    """
    problems: List[Problem] = []
    remarks: List[str] = []
    num_decoded = 0
    for examples in (source.train, source.eval):
        if isinstance(examples, FileExamples) and len(examples):
            is_small = _num_bytes(examples) <= CHECKED_BYTES
            sample = np.unique(np.linspace(0, len(examples) - 1, SAMPLED).astype(int))
            decoded = _decode(examples if is_small else examples.subset(sample), source)
            problems += decoded.problems.values() if is_small else ()
            num_decoded += decoded.num_readable
            remarks += decoded.remarks
    if problems:
        total = len(source.train) + len(source.eval)
        whole = next((problem.error for problem in problems if not is_damaged(problem)), None)
        raise DataError(
            f"{len(problems):,} of {counted(total, 'image')} cannot be read: {named_damage(problems)}",
            HINT if whole is None else whole.hint,
        )
    return _with_remarks(source, remarks, num_decoded)


def _with_remarks(source: DataSource, remarks: Sequence[str], num_decoded: int) -> DataSource:
    """Returns the source with a warning for each kind of remark on the ``num_decoded`` images."""
    total = len(source.train) + len(source.eval)

    def files(count: int) -> str:
        if num_decoded == total:
            return counted(count, "file")
        return f"{count:,} of {num_decoded:,} files that were opened, of {total:,},"

    warnings = (*source.info.warnings, *remark_lines(remarks, files))
    return replace(source, info=replace(source.info, warnings=warnings))


def without_damaged(source: DataSource) -> DataSource:
    """Returns a source of encoded images without those that cannot be decoded; a warning counts and names them.

    Raises:
        DataError: no training image, no evaluation image, or no training image of a class can be read; or an image is
            not damaged, but of a kind or size that is not read.
    """
    parts: List[ImageFiles] = []
    passed = Passed(skip_damaged=True)
    remarks: List[str] = []
    for examples in (source.train, source.eval):
        assert not isinstance(examples, IN_MEMORY)
        decoded = _decode(examples, source)
        bad = decoded.problems
        remarks += decoded.remarks
        for problem in bad.values():
            passed(problem)
        parts.append(examples.subset([k for k in range(len(examples)) if k not in bad]))
    train, evaluation = parts
    damaged = passed.damaged
    check_any_left(len(train), len(evaluation), damaged)
    if not damaged:
        return _with_remarks(source, remarks, len(train) + len(evaluation))
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
        left_out=(*source.info.left_out, *passed.left_out),
    )
    source = replace(source, info=info, train=train, eval=evaluation)
    return _with_remarks(source, remarks, len(train) + len(evaluation))


class _Decoded(NamedTuple):
    """What decoding the images of a part showed.

    Attributes:
        problems: the problem of each image that cannot be read, by its number.
        num_readable: number of the others.
        remarks: what :func:`remarks_on` says about each of them.
    """

    problems: Dict[int, Problem]
    num_readable: int
    remarks: List[str]


def _decode(examples: ImageFiles, source: DataSource) -> _Decoded:
    """Decodes all images.  All cores decode."""
    channels, most = source.info.image_shape[2] or 3, source.info.max_image_pixels

    def decode(index: int) -> Union[List[str], Problem]:
        def read() -> List[str]:
            origin = examples.describe(index)
            with opened(examples.encoded(index), origin, most, strict=True) as file:
                page = file.page()
                displayed(page, origin, channels)
                return remarks_on(file, page)

        name = examples.name(index) if isinstance(examples, FileExamples) else examples.describe(index)
        return item_or_problem(read, None, name)

    results = list(parallel_map(decode, ((index,) for index in range(len(examples))), num_cores()))
    problems = {index: result for index, result in enumerate(results) if isinstance(result, Problem)}
    remarks = [remark for result in results if not isinstance(result, Problem) for remark in result]
    return _Decoded(problems, len(examples) - len(problems), remarks)


def _num_bytes(examples: FileExamples) -> int:
    total = 0
    for path in examples.paths:
        with contextlib.suppress(OSError):  # decoding reports it
            total += Path(path).stat().st_size
        if total > CHECKED_BYTES:
            break
    return total


def hint_where_run_ends(error: DataError, info: DatasetInfo) -> str:
    """Returns the hint for a run that ends at a file that cannot be read, with the command that lists all of them."""
    hints = [error.hint] if error.hint else []
    if info.location and is_damaged(problem_of(error, None, "")):
        hints.append(
            f"ipucnn verify-dataset --dataset-path {quoted(info.location)} names every damaged file, --skip-damaged "
            "leaves them out"
        )
    return "; ".join(hints)
