"""Refused commands as rows (command, error, hint, exit code), and calls that raise such an error."""

import shlex
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence, Type, Union

import pytest

from ipucnn.errors import UserError


class Refusal(NamedTuple):
    """A command that is refused.

    Attributes:
        command: the words after ``ipucnn``, as typed, or as a list where they are values of a test.
        error, hint: words of the error line and of the hint line.
        code: the exit code.
    """

    command: Union[str, Sequence[Any]]
    error: str
    hint: str = ""
    code: int = 2


def check_refused(
    run: Callable[..., Any],
    *rows: Refusal,
    command: Sequence[Any] = (),
    alone: bool = False,
    unchanged: Sequence[Path] = (),
) -> None:
    """Checks that each command shows one error and one hint, prints nothing else, and writes nothing.

    Args:
        run: the fixture ``run``; the commands run in its folder.
        rows: the commands.
        command: the words that all of them begin with.
        alone: whether stderr may have no further lines, except that layers are read.
        unchanged: folders elsewhere in which nothing may be written, either.
    """
    for row in rows:
        words = [*command, *(shlex.split(row.command) if isinstance(row.command, str) else row.command)]
        before = _files(unchanged)
        code, out, err = run(*words, columns=2000)
        lines = [line for line in err.splitlines() if not line.startswith("reading the layers")]
        errors, hints = ([line for line in lines if line.startswith(kind)] for kind in ("error:", "hint:"))
        assert (code, out, len(errors), len(hints)) == (row.code, "", 1, 1), f"{row}\n{err}"
        assert row.error in errors[0] and row.hint in hints[0], f"{row}\n{err}"
        assert len(lines) == 2 or not alone, f"{row}\n{err}"
        assert _files(unchanged) == before, row


def check_raises(
    kind: Type[UserError], error: str, hint: str, call: Callable[..., Any], *args: Any, **options: Any
) -> UserError:
    """Checks that a call raises an error of this kind with these words in its message and in its hint; returns it."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert error in caught.value.message and "\n" not in caught.value.message
    assert caught.value.hint and hint in caught.value.hint
    return caught.value


def _files(more: Sequence[Path]) -> Any:
    """Returns the files below the current folder and ``more``, with their times of change, and the folders."""
    paths = sorted(path for folder in (Path(), *more) for path in folder.rglob("*"))
    return [(path, 0 if path.is_dir() else path.lstat().st_mtime_ns) for path in paths]
