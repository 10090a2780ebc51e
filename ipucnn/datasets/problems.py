"""Problems in the files of a data set.

Readers yield items (samples, or the files of a class) and problems, in the order of the files.  :func:`readable` passes
the items on and gives each problem to a function: training's :class:`Passed` raises the first error, and
``verify-dataset`` collects all problems (``verification/survey.py``).  A reader does not know which of the two reads.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Tuple, TypeVar, Union

from ipucnn.errors import DataError
from ipucnn.filesystem import shown
from ipucnn.text import counted, printable

Item = TypeVar("Item")
MOST_NAMED = 3


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
    """

    code: str
    subset: Optional[str]
    name: str
    reason: str = ""
    error: Optional[DataError] = None
    count: int = 1
    path: Optional[Path] = None


def problem_of(
    error: DataError, subset: Optional[str], name: str, path: Optional[Path] = None, place: str = ""
) -> Problem:
    """Returns the problem of a file or sample that a reader rejected.

    Its name in the problem replaces the path or the ``place`` in the words of the error.
    """
    reason = error.message
    paths = () if path is None else (printable(str(path)), str(path), shown(path))
    mention = next((text for text in (place, *paths) if text and text in reason), None)
    reason = reason if mention is None else reason.partition(mention)[2]
    return Problem(error.code, subset, name, reason.strip(" :,"), error, path=path)


def guarded(
    items: Iterable[Union[Item, Problem]], subset: Optional[str], name: str, path: Path
) -> Iterator[Union[Item, Problem]]:
    """Yields items; an error that ends them becomes the last one, as a problem of the file."""
    try:
        yield from items
    except DataError as error:
        yield problem_of(error, subset, name, path)


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
    """Raises the first error among problems, and keeps those without an error."""

    def __init__(self) -> None:
        self._examples: Dict[str, List[str]] = {}
        self._counts: Dict[str, int] = {}

    def __call__(self, problem: Problem) -> None:
        if problem.error is not None:
            raise problem.error
        self._counts[problem.reason] = self._counts.get(problem.reason, 0) + problem.count
        names = self._examples.setdefault(problem.reason, [])
        if len(names) < MOST_NAMED:
            names.append(problem.name)

    @property
    def unused(self) -> Tuple[Unused, ...]:
        """What was left out, by reason."""
        return tuple(
            Unused(reason, count, tuple(self._examples[reason])) for reason, count in self._counts.items()
        )


def unused_line(location: str, unused: Iterable[Unused]) -> Tuple[str, ...]:
    """Returns one line about all that is left out of a set; none if nothing is."""
    parts = [
        f"{counted(one.count, 'file')} ({one.reason}: {', '.join(one.examples)}"
        + (", ..." if one.count > len(one.examples) else "")
        + ")"
        for one in unused
    ]
    return (f"{location}: left out {', '.join(parts)}",) if parts else ()
