"""Events: how the work of a command reports its progress, and the one loop over them.

Work is a generator of events whose return value is its result.  :func:`show` runs it, passes the events to a view, and
returns the result.  A command shows them on the screen, with ``--json``, too, which changes only how the result is
printed; the Python interface has views of its own.  Code that a generator cannot reach, such as a library's callback or
the reader of a file deep inside, calls :func:`emit`.
"""

from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Callable, Generator, Optional, TypeVar

Result = TypeVar("Result")
LOADING = "loading TensorFlow and building the network"
OPENING = "opening the data set"
"""Descriptions of work that several commands begin with."""


class Event:
    """Something that happened in the work of a command."""


@dataclass(frozen=True)
class Began(Event):
    """A longer piece of work began, which cannot be counted.

    Attributes:
        work: its description.
    """

    work: str


@dataclass(frozen=True)
class Progress(Event):
    """A part of a piece of work is done.

    Attributes:
        work: the description of the piece.
        done, total: how many of its parts are done, and of how many; the total is None if it is not known.
        figures: what was measured so far, in words.
    """

    work: str
    done: int
    total: Optional[int]
    figures: str = ""


@dataclass(frozen=True)
class Note(Event):
    """A line for the user: a note, a warning, or an input that cannot be read."""

    line: str


@dataclass(frozen=True)
class Item(Event):
    """A part of the result is known, such as a classified image; each command has kinds of its own.

    Attributes:
        position, total: its number, from 0, and the number of all.
    """

    position: int
    total: int


Events = Generator[Event, None, Result]
"""The events of some work, and its result as the return value."""


class View:
    """Gets the events of some work; this one shows nothing.  It is a context manager around the work."""

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, event: Event) -> None:
        """Gets the next event."""


_NOBODY = View()
_view: "ContextVar[View]" = ContextVar("view", default=_NOBODY)


def show(work: Events[Result], view: View = _NOBODY) -> Result:
    """Runs some work to its end, and returns its result.

    Args:
        work: the work.
        view: gets its events, and those that :func:`emit` passes.
    """
    token = _view.set(view)
    try:
        with view, closing(work):
            go_on: Callable[[], Event] = partial(next, work)
            while True:
                try:
                    event = go_on()
                except StopIteration as end:
                    result: Result = end.value
                    return result
                try:
                    view.show(event)
                    go_on = partial(next, work)
                except KeyboardInterrupt as interruption:
                    # The work decides what is left of it, also if the signal arrived while an event was shown.
                    go_on = partial(work.throw, interruption)
    finally:
        _view.reset(token)


def emit(event: Event) -> None:
    """Passes an event to the view of the work that is running, if any."""
    _view.get().show(event)


def during(work: str, function: Callable[[], Result]) -> Events[Result]:
    """Yields that a piece of work began, and returns the result of the function that does it."""
    yield Began(work)
    return function()
