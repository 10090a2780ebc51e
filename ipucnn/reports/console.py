"""Streams: results go to stdout, everything else to stderr; bars and colours appear only on a terminal.

Also the parts that reports share: tables, and a bar over samples or images.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import textwrap
import time
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Literal,
    Mapping,
    Optional,
    Sequence,
    TextIO,
    Tuple,
    Union,
    cast,
)

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.events import Began, Event, Note, Progress, View
from ipucnn.text import counted, is_interactive, printable

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.progress import Progress as RichProgress
    from rich.table import Column, Table
    from rich.text import Text

PIPE_WIDTH = 120
Side = Literal["left", "right"]
TEXT: Side = "left"
NUMBER: Side = "right"
"""Alignment of the cells in a column of :func:`text_table`."""


class _Unpadded:
    """A stream that removes the trailing blanks of Rich's lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(" +(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(stream: TextIO) -> Console:
    """Returns a Rich console for a stream; in a pipe it is plain and of fixed width (COLUMNS overrides)."""
    from ipucnn.config.help_page import PipeConsole

    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    file = stream if stream.isatty() else cast(TextIO, _Unpadded(stream))
    return PipeConsole(file=file, highlight=False, soft_wrap=False, width=width)


def note(message: str) -> None:
    """Prints a line on stderr; on a terminal it is wrapped between words."""
    print(_for_stderr(message), file=sys.stderr, flush=True)


def _for_stderr(message: str) -> str:
    text = printable(message)
    if not sys.stderr.isatty():
        return text
    # A word that is longer than the line stays whole, such as a path.
    lines = textwrap.wrap(
        text,
        console(sys.stderr).width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def plain_table(**details: PlainValue) -> Table:
    """Returns a table with only a line below its head; ``details`` are Rich's own."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold", **details)


def text_table(
    columns: Mapping[str, Side],
    rows: Iterable[Sequence[Union[str, Text]]],
    whole_numbers: bool = False,
    **details: PlainValue,
) -> Table:
    """Returns a table of texts without markup; columns of text are wrapped if they are too wide.

    Args:
        columns: titles, each with TEXT or NUMBER.
        rows: cells of each row.
        whole_numbers: whether the titles of numbers are not wrapped either; for :func:`print_table`, because Rich
            drops columns for such titles.
        details: Rich's own.
    """
    from rich.text import Text

    table = plain_table(**details)
    for title, side in columns.items():
        table.add_column(
            Text(title),
            justify=side,
            overflow="fold" if side == TEXT else "ellipsis",
            no_wrap=whole_numbers and side == NUMBER,
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _spans(column: Column) -> Tuple[int, int]:
    """Returns the smallest width of a column that breaks no word, and the smallest that wraps nothing."""
    from rich.cells import cell_len

    texts = [str(column.header), *(str(cell) for cell in column._cells)]
    most = max(map(cell_len, texts))
    words = [word for text in texts for word in text.split()]
    return most if column.no_wrap else max(map(cell_len, words), default=0), most


def _room(out: Console, table: Table, columns: Sequence[Column]) -> int:
    """Returns the width that is left for the texts of some columns of a table."""
    _, right, _, left = table.padding
    return out.width - 2 - (left + right + 1) * (len(columns) - 1)  # a blank at each edge


def is_whole(table: Table, out: Console) -> bool:
    """Whether :func:`print_table` prints all columns side by side."""
    return sum(_spans(column)[0] for column in table.columns) <= _room(out, table, table.columns)


def print_table(out: Console, table: Table, keys: int = 1, left_out: Sequence[str] = ()) -> None:
    """Prints a table of texts without breaking a word, unless a word is wider than the screen.

    If the table is too wide, the columns ``left_out`` are dropped one after the other.  The others are narrowed to
    their longest words; those that still do not fit follow in a table below, which repeats the first ``keys`` columns.
    """
    from rich.text import Text

    if table.title is not None:
        out.print(Text(str(table.title), style="bold"))
    columns = list(table.columns)
    for title in left_out:
        if sum(_spans(column)[0] for column in columns) <= _room(out, table, columns):
            break
        columns = [column for column in columns if str(column.header) != title]
    first, rest = columns[:keys], columns[keys:]
    while True:
        count = len(rest)
        while True:
            shown = [*first, *rest[:count]]
            spare = _room(out, table, shown) - sum(_spans(column)[0] for column in shown)
            if spare >= 0 or count <= 1:
                break
            count -= 1
        rest = rest[count:]
        part = copy.copy(table)
        part.title, part.caption = None, None if rest else table.caption
        part.columns = [replace(column, _index=i, _cells=column._cells) for i, column in enumerate(shown)]
        if sum(_spans(column)[1] for column in shown) > _room(out, table, shown) and spare >= 0:
            # Rich would narrow the widest columns and break words.
            widths = [_spans(column)[0] for column in part.columns]
            for _ in range(spare):
                _, narrowest = min(
                    (width, i) for i, width in enumerate(widths) if width < _spans(part.columns[i])[1]
                )
                widths[narrowest] += 1
            for column, width in zip(part.columns, widths):
                column.width = width
        out.print(part)
        if not rest:
            return


def fits(table: Union[Table, Group], out: Console) -> bool:
    """Whether the screen has room for all of a table without wrapping."""
    from rich.measure import Measurement

    return Measurement.get(out, out.options.update(width=100_000), table).maximum <= out.width


def print_lines(out: Console, *lines: str) -> None:
    """Prints lines as they are: they are not wrapped, so that commands in them can be copied."""
    from rich.text import Text

    for line in lines:
        out.print(Text(printable(line)), soft_wrap=True)


def wrapped(parts: Sequence[Text], between: str, width: int, indent: int) -> Text:
    """Returns parts joined into lines of at most ``width``, each indented by ``indent``; no part is broken."""
    from rich.text import Text

    text, column = Text(" " * indent), indent
    for part in parts:
        if column > indent and column + len(between) + part.cell_len > width:
            text.append("\n" + " " * indent)
            column = indent
        if column > indent:
            text.append(between)
            column += len(between)
        text.append_text(part)
        column += part.cell_len
    return text


def fact_table(rows: Iterable[Tuple[str, Union[str, Text]]], **details: PlainValue) -> Table:
    """Returns a table of names and values, one pair per line."""
    from rich.text import Text

    table = plain_table(show_header=False, **details)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value) if isinstance(value, str) else value)
    return table


def titled(title: str, table: Union[Table, Group]) -> Group:
    """Returns a title above a table; Rich's own would be wrapped to the table's width."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table)


BEGAN, ITEMS, EXECUTIONS, ROWS, TRAINING = "began", "items", "executions", "rows", "training"
"""What a bar counts: nothing, parts of a piece of work, timed executions, rows of a suite, or weight updates."""
_OF_ONE_WORK = (BEGAN, ITEMS)
"""Bars of one piece of work, whose time begins with it; the others go on with the next piece."""
_EVERY_S = 15.0
"""Least seconds between lines of executions in a pipe."""


class Screen(View):
    """Shows events on stderr: a line for each note, and below them a bar if a person watches.

    Args:
        bar: the bar of ``Progress`` events: ITEMS, EXECUTIONS, ROWS or TRAINING.
        take: a function that gets each other event, such as an item, and may return events to show for it.
    """

    def __init__(
        self, bar: str = ITEMS, take: Callable[[PlainValue], Optional[Iterable[Event]]] = lambda item: None
    ) -> None:
        self._kind, self._take = bar, take
        self._bar: Optional[RichProgress] = None
        self._shown = ("", "")
        self._said = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, event: Event) -> None:
        """Shows an event."""
        if isinstance(event, Note):
            self._said = time.monotonic()
            self._print(event.line)
        elif isinstance(event, Began):
            self._draw(BEGAN, Progress(event.work, 0, None))
        elif isinstance(event, Progress):
            self._draw(self._kind, event)
        else:
            for part in self._take(event) or ():
                self.show(part)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(_for_stderr(line)), soft_wrap=True)
        else:
            note(line)

    def _draw(self, kind: str, event: Progress) -> None:
        """Shows progress in a bar of some kind, which takes the place of another kind's."""
        # While a bar is shown, Rich has its own stream in the place of stderr, which may say that it is no terminal.
        if self._bar is None and not is_interactive(sys.stderr):
            if kind == EXECUTIONS and time.monotonic() - self._said > _EVERY_S:
                self.show(Note(_line(event, "execution")))
            return
        details: PlainDict = {"total": event.total, "completed": event.done, "figures": event.figures}
        shown = (kind, event.work if kind in _OF_ONE_WORK else "")
        if self._bar is not None and shown == self._shown:
            self._bar.update(self._bar.task_ids[0], description=event.work, **details)
            return
        self.__exit__()
        self._bar, self._shown = _rich_bar(kind), shown
        self._bar.add_task(event.work, **details)
        self._bar.start()


def _rich_bar(kind: str) -> RichProgress:
    from rich import progress

    texts = "{task.description}", "{task.fields[figures]}", "left"
    work, figures, word = (progress.TextColumn(text, markup=False) for text in texts)
    bar, elapsed = progress.BarColumn(bar_width=None), progress.TimeElapsedColumn()
    count, left = progress.MofNCompleteColumn(), (word, progress.TimeRemainingColumn(compact=True))
    columns: Dict[str, Tuple[progress.ProgressColumn, ...]] = {
        BEGAN: (progress.SpinnerColumn(), work, elapsed),
        ITEMS: (work, bar, count, *left),
        EXECUTIONS: (work, bar, figures, elapsed),
        ROWS: (count, progress.BarColumn(bar_width=20), figures, work),
        TRAINING: (work, bar, figures, elapsed, *left),
    }
    return progress.Progress(*columns[kind], console=console(sys.stderr), transient=True)


def _line(event: Progress, unit: str) -> str:
    """Returns progress as a line for a pipe."""
    count = f": {counted(event.done, unit)}" if event.done > 1 else ""
    if event.total:
        count = f": {event.done} of {counted(event.total, unit)}"
    return f"{event.work}{count}" + (f", {event.figures}" if event.figures else "")
