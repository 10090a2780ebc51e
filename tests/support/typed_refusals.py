"""Types a command of ``tests/refusals``, and then its hint."""

import builtins
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from support.refused import Refusal, ways
from support.situations import make_situation

_STOPS = {"--print-config", "--dry-run", "--help", "--executions"}


def check_refusal(
    refusal: Refusal, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Checks exit code, error and hint, and that nothing else is shown or written; then the hint is typed."""
    _enter(folder / "refused", refusal, refusal.files)
    before = _contents()
    with monkeypatch.context() as patch:
        imported = _imported(patch)
        code, out, err = run(*shlex.split(refusal.command), columns=4000)
    err = err.replace(os.getcwd(), "HERE")
    shown = tuple(line for line in err.splitlines() if line.startswith(("error:", "hint:")))
    assert (code, shown, out) == (refusal.code, refusal.ending, ""), err
    assert err.endswith("\n".join(shown) + "\n") and _contents() == before
    assert not imported or "TensorFlow" in refusal.given
    if "not typed:" in refusal.notes:
        return
    typed = ways(refusal)
    assert typed or "nothing to type:" in refusal.notes, f"{refusal.ending[1]}: nothing to type"
    then, expected = refusal.notes.get("then", "0: (").split(": ", 1)
    for number, way in enumerate(typed):
        assert _STOPS & set(way.words) or way.words[0] not in ("train", "benchmark"), (
            f"{way.words} would take long: add `typed with`"
        )
        _enter(folder / str(number), refusal, way.files)
        if way.shell:
            subprocess.run(way.shell, shell=True, check=True)
        # Rich takes ten times as long for the table of a configuration as the command for all else.
        has_table = "--print-config" in way.words or way.words[0] == "plan-splits"
        as_json = ["--json"] if has_table and "--json" not in way.words else []
        code, _, err = run(*way.words, *as_json, columns=4000)
        line = f"{way.shell}\nipucnn {' '.join(way.words)}\n{err}"
        assert code == int(then) and expected.rpartition(" (")[0] in err, line
        assert refusal.ending[0] not in err, line


def _enter(folder: Path, refusal: Refusal, files: Dict[str, str]) -> None:
    """Makes the situation of a refusal in a new folder, which becomes the current one."""
    folder.mkdir()
    os.chdir(folder)
    for name in refusal.given:
        make_situation(name)
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    for line in refusal.first:
        subprocess.run(line, shell=True, check=True)


def _contents() -> List[Any]:
    """Returns the files below the current folder with their times of change, and the folders."""
    return [(path, path.is_dir() or path.lstat().st_mtime_ns) for path in sorted(Path().rglob("*"))]


def _imported(patch: pytest.MonkeyPatch) -> List[str]:
    """Returns a list that grows when code imports TensorFlow, even if it was imported before."""
    real, names = builtins.__import__, []  # type: Callable[..., Any], List[str]

    def note(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] in ("tensorflow", "keras"):
            names.append(name)
        return real(name, *args, **options)

    patch.setattr(builtins, "__import__", note)
    return names
