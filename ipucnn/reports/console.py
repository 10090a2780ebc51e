"""Where text goes: results to stdout, everything else to stderr, bars and colour only on a terminal.

And what the reports share: tables, and a bar over samples or images.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Iterable, Optional, TextIO, Tuple, Union, cast

from ipucnn.text import printable

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.progress import Progress, TaskID
    from rich.table import Table
    from rich.text import Text

PIPE_WIDTH = 120


def is_interactive(stream: TextIO) -> bool:
    """Whether a person watches the stream: a terminal, and neither CI nor a dumb terminal."""
    return stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


class _Unpadded:
    """A stream without the blanks that Rich fills its lines with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(" +(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(stream: TextIO) -> Console:
    """A Rich console for a stream; in a pipe it is plain and of fixed width (COLUMNS overrides)."""
    from ipucnn.config.help_page import PipeConsole

    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    file = stream if stream.isatty() else cast(TextIO, _Unpadded(stream))
    return PipeConsole(file=file, highlight=False, soft_wrap=False, width=width)


def note(message: str) -> None:
    """One line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def plain_table(**details: Any) -> Table:
    """A table with a line below its head and nothing else; ``details`` are Rich's own."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold", **details)


def fact_table(rows: Iterable[Tuple[str, Union[str, Text]]], **details: Any) -> Table:
    """Names and what they stand for, a pair to a line."""
    from rich.text import Text

    table = plain_table(show_header=False, **details)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value) if isinstance(value, str) else value)
    return table


def titled(title: str, table: Table) -> Group:
    """A title above a table; Rich's own is wrapped to the table's width."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table)


class ItemProgress:
    """A bar on stderr that appears with the first :meth:`update` and is gone at the end; nothing in a pipe.

    Args:
        what: what is done, before the bar.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Optional[Progress] = None
        self._task: Optional[TaskID] = None

    def __enter__(self) -> ItemProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, done: int, total: int) -> None:
        """So many of all are done."""
        if not is_interactive(sys.stderr):
            return
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn(self._what, markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("left"),
                TimeRemainingColumn(compact=True),
                console=console(sys.stderr),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        assert self._task is not None
        self._bar.update(self._task, completed=done)

    def line(self, text: str) -> None:
        """A line on stderr, above the bar."""
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(printable(text)), soft_wrap=True)
        else:
            note(text)
