"""Where text goes: results to stdout, everything else to stderr, bars and colour only on a terminal."""

import os
import re
import sys
from typing import Any, TextIO

from ipucnn.text import printable

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


def console(stream: TextIO) -> Any:
    """A Rich console for a stream; in a pipe it is plain and of fixed width (COLUMNS overrides)."""
    from ipucnn.config.help_page import PipeConsole

    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    file: Any = stream if stream.isatty() else _Unpadded(stream)
    return PipeConsole(file=file, highlight=False, soft_wrap=False, width=width)


def note(message: str) -> None:
    """One line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)
