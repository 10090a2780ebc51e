"""A progress bar over samples or images, on a terminal only."""

import sys
from typing import Any, Optional

from ipucnn.reports.console import console, is_interactive, note
from ipucnn.text import printable


class ItemProgress:
    """A bar on stderr that appears with the first :meth:`update` and is gone at the end; nothing in a pipe.

    Args:
        what: what is done, before the bar.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Optional[Any] = None
        self._task: Any = None

    def __enter__(self) -> "ItemProgress":
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
        self._bar.update(self._task, completed=done)

    def line(self, text: str) -> None:
        """A line on stderr, above the bar."""
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(printable(text)), soft_wrap=True)
        else:
            note(text)
