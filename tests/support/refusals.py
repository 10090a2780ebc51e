"""Commands that are refused, as rows of a table: the command, words of its error and of its hint, and its exit code."""

import shlex
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence, Union


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


def check_refused(run: Callable[..., Any], *rows: Refusal, command: Sequence[Any] = ()) -> None:
    """Checks that each command shows one error and one hint, prints nothing else, and writes nothing.

    Args:
        run: the fixture ``run``; the commands run in its folder.
        rows: the commands.
        command: the words that all of them begin with.
    """
    for row in rows:
        words = [*command, *(shlex.split(row.command) if isinstance(row.command, str) else row.command)]
        before = _files()
        code, out, err = run(*words, columns=2000)
        lines = {
            kind: [line for line in err.splitlines() if line.startswith(kind)] for kind in ("error:", "hint:")
        }
        assert (code, out) == (row.code, ""), f"{row}\n{err}"
        assert len(lines["error:"]) == 1 == len(lines["hint:"]), f"{row}\n{err}"
        assert row.error in lines["error:"][0] and row.hint in lines["hint:"][0], f"{row}\n{err}"
        assert _files() == before, row


def _files() -> Any:
    """Returns the files below the current folder, with their times of change, and the folders."""
    paths = sorted(Path().rglob("*"))
    return [(path, 0 if path.is_dir() else path.lstat().st_mtime_ns) for path in paths]
