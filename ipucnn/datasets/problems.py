"""What happens at a damaged file, in every command: the readers of all data sets yield items and problems.

A reader turns each error about a file, page or record into a :class:`Problem` (:func:`item_or_problem`,
:func:`guarded`) and continues with the next one.  It does not know who reads.  :func:`readable` passes the items on,
and gives each problem to a function that decides:

- ``train``, ``evaluate``, ``export``, ``infer --split``: :class:`Passed` raises the first error.
- With ``--skip-damaged``, :class:`Passed` leaves out what is damaged (:func:`is_damaged`), and counts and names it.
- ``verify-dataset`` collects all problems (``verification/survey.py``).

Image files of class folders, and images in records, are decoded when they are needed, and a damaged one ends the run
there.  So ``damaged.py`` decodes the files of a small part before ``train``, ``evaluate``, ``export`` or ``benchmark``
begins, and with ``--skip-damaged`` all files and records; it also has the hint of a run that ends at an image.
``infer --split`` names and counts each of these images that it cannot read, as ``infer IMAGE...`` does, and continues
(``runs/infer.py``).  Of sets of TensorFlow Datasets, whose library reads them, the first damaged sample ends the run.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, TypeVar, Union

from ipucnn.errors import DataError
from ipucnn.filesystem import shown
from ipucnn.text import counted, printable

Item = TypeVar("Item")
MOST_NAMED = 3
MOST_DAMAGED = 50
"""The most damaged files that a message names."""
_DAMAGED = ("empty-file", "truncated", "checksum", "unreadable")
"""The codes that only errors of reading and decoding have."""


@dataclass(frozen=True)
class Problem:
    """A file, folder or sample that is damaged, absent, or no part of the set.

    Attributes:
        code: a key of ``verification.findings.CODES``.
        subset: "train" or "eval"; None for the set as a whole.
        name: the file, folder or sample.
        reason: the problem in a few words; "" if the name says it.
        error: the error that ends training; None if training goes on without the file.
        count: number of files, samples or classes with the problem.
        path: the file; None if the problem is not about one file.
        has_rest: whether it is about the part of a file that cannot be read, of an unknown number of samples.
    """

    code: str
    subset: Optional[str]
    name: str
    reason: str = ""
    error: Optional[DataError] = None
    count: int = 1
    path: Optional[Path] = None
    has_rest: bool = False


def is_damaged(problem: Problem) -> bool:
    """Whether a file, page or record cannot be decoded, so that ``--skip-damaged`` leaves it out.

    Images of a kind or size that is not read are whole, and are never left out.
    """
    return problem.error is not None and problem.code in _DAMAGED


def problem_of(
    error: DataError, subset: Optional[str], name: str, path: Optional[Path] = None, place: str = ""
) -> Problem:
    """Returns the problem of a file or sample that a reader rejected.

    Its name in the problem replaces the path or the ``place`` in the words of the error.
    """
    reason = error.message
    paths = () if path is None else (printable(str(path)), str(path), shown(path))
    # The whole path, and not that of a file below it, or the point of a sentence for the folder ".".
    mentions = (
        re.search(rf"(?<![^\s('\"`\[]){re.escape(text)}(?=[\s,:;)'\"`\[]|\.?$|\.\s)", reason)
        for text in (place, *paths)
        if text
    )
    mention = next(filter(None, mentions), None)
    reason = reason if mention is None else reason[mention.end() :]
    return Problem(error.code, subset, name, reason.strip(" :,"), error, path=path)


def item_or_problem(
    read: Callable[[], Item], subset: Optional[str], name: str, path: Optional[Path] = None, place: str = ""
) -> Union[Item, Problem]:
    """Returns what ``read`` returns, or the problem of the file or sample that it rejects; see :func:`problem_of`."""
    try:
        return read()
    except DataError as error:
        return problem_of(error, subset, name, path, place)


def guarded(
    items: Iterable[Union[Item, Problem]], subset: Optional[str], name: str, path: Path
) -> Iterator[Union[Item, Problem]]:
    """Yields items; an error that ends them becomes the last one, as a problem of the file."""
    try:
        yield from items
    except DataError as error:
        yield replace(problem_of(error, subset, name, path), has_rest=True)


def readable(items: Iterable[Union[Item, Problem]], report: Callable[[Problem], None]) -> Iterator[Item]:
    """Yields the items, and calls ``report`` with each problem."""
    for item in items:
        if isinstance(item, Problem):
            report(item)
        else:
            yield item


@dataclass(frozen=True)
class Unused:
    """Files or folders that are not read, for one reason: their number, and the first of them."""

    reason: str
    count: int
    examples: Tuple[str, ...]


class Passed:
    """Raises the first error among problems, and keeps those without an error.

    Args:
        skip_damaged: whether to keep the errors of damaged files, too.

    Attributes:
        damaged: the problems of those.
    """

    def __init__(self, skip_damaged: bool = False) -> None:
        self._examples: Dict[str, List[str]] = {}
        self._counts: Dict[str, int] = {}
        self._skips = skip_damaged
        self.damaged: List[Problem] = []

    def __call__(self, problem: Problem) -> None:
        if problem.error is not None:
            if not (self._skips and is_damaged(problem)):
                raise problem.error
            self.damaged.append(problem)
            return
        self._counts[problem.reason] = self._counts.get(problem.reason, 0) + problem.count
        names = self._examples.setdefault(problem.reason, [])
        if len(names) < MOST_NAMED:
            names.append(problem.name)

    @property
    def left_out(self) -> Tuple[str, ...]:
        """The names of the damaged files, pages and records."""
        return tuple(problem.name for problem in self.damaged)

    @property
    def unused(self) -> Tuple[Unused, ...]:
        """What was left out, by reason."""
        return tuple(
            Unused(reason, count, tuple(self._examples[reason])) for reason, count in self._counts.items()
        )


def with_unused(text: str, unused: Iterable[Unused]) -> str:
    """Returns a message with words about all that is left out of a set."""
    parts = [
        f"{counted(one.count, 'file')} ({one.reason}: {', '.join(one.examples)}"
        + (", ..." if one.count > len(one.examples) else "")
        + ")"
        for one in unused
    ]
    return f"{text}: left out {', '.join(parts)}" if parts else text


def unused_line(location: str, unused: Sequence[Unused]) -> Tuple[str, ...]:
    """Returns one line about all that is left out of a set; none if nothing is."""
    return (with_unused(location, unused),) if unused else ()


SEVERAL = "several pages or frames: the first of each is used"
SHOWS_WHITE = "transparent parts: white is laid under them"
INKS = "four inks (CMYK): they become RGB without a profile of colours"
OTHER_COLOURS = "a colour profile (ICC) of other colours than sRGB's: it is not applied"
IS_STRETCHED = "more than 8 bits: each one's own dark and bright become 0 and 255"


def remark_lines(
    remarks: Iterable[str], files: Callable[[int], str] = lambda count: counted(count, "file")
) -> List[str]:
    """Returns a line for each kind of remark on files, in order.

    Args:
        remarks: the remarks of all files, words after "files have".
        files: function that returns the words for a number of files.
    """
    counts = sorted(Counter(remarks).items())
    return [f"{files(count)} {'has' if count == 1 else 'have'} {remark}" for remark, count in counts]


def named_damage(damaged: Sequence[Problem]) -> str:
    """Returns the messages of up to ``MOST_DAMAGED`` problems, and the number of others."""
    more = len(damaged) - MOST_DAMAGED
    reasons = [printable(one.error.message if one.error else one.name) for one in damaged[:MOST_DAMAGED]]
    return "; ".join(reasons) + (f"; and {more:,} more" if more > 0 else "")


def left_out_line(damaged: Sequence[Problem], sample: str = "image") -> Tuple[str, ...]:
    """Returns one line about what ``--skip-damaged`` leaves out; none if that is nothing.

    It has the number of samples, and for files of which that is not known the number of files.
    """
    num_samples = sum(one.count for one in damaged if not one.has_rest)
    num_files = sum(one.has_rest for one in damaged)
    parts = [counted(num_samples, f"damaged {sample}")] if num_samples else []
    parts += [f"the unread part of {counted(num_files, 'file')}"] if num_files else []
    return (f"{' and '.join(parts)} left out (--skip-damaged): {named_damage(damaged)}",) if parts else ()


def check_any_left(num_train: int, num_eval: int, damaged: Sequence[Problem]) -> None:
    """Rejects a set of which ``--skip-damaged`` leaves nothing.

    Raises:
        DataError: no image for training, or none for evaluation, is left.
    """
    for count, purpose in ((num_train, "training"), (num_eval, "evaluation")):
        if not count and damaged:
            raise DataError(
                f"no image for {purpose} can be read: {named_damage(damaged)}", "give other images"
            )
