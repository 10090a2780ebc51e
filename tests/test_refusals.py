"""Every refusal in ``tests/refusals``: exit code, error and hint, whole; then the hint is typed, and works."""

import builtins
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from support.refused import all_refusals, ways
from support.situations import make_situation


@pytest.fixture
def situation(run, monkeypatch):
    """Makes the situation of a refusal in a new folder, which becomes the current one."""

    def enter(folder, refusal, files):
        folder.mkdir()
        monkeypatch.chdir(folder)
        for name in refusal.given:
            make_situation(name)
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
        for line in refusal.first:
            subprocess.run(line, shell=True, check=True)

    return enter


@pytest.fixture
def imported(monkeypatch):
    """Returns a list that grows when code imports TensorFlow, even if it was imported before."""
    real, names = builtins.__import__, []

    def note(name, *args, **options):
        if name.partition(".")[0] in ("tensorflow", "keras"):
            names.append(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", note)
    return names


def contents():
    """Returns the files below the current folder with their times of change, and the folders."""
    return [(path, path.is_dir() or path.lstat().st_mtime_ns) for path in sorted(Path().rglob("*"))]


@pytest.mark.parametrize("refusal", all_refusals(), ids=str)
def test_a_refused_command_says_why_and_its_hint_works(refusal, run, situation, imported, tmp_path):
    situation(tmp_path / "refused", refusal, refusal.files)
    imported.clear()  # by a run that the situation has
    before = contents()
    code, out, err = run(*shlex.split(refusal.command), columns=4000)
    err = err.replace(os.getcwd(), "HERE")
    shown = tuple(line for line in err.splitlines() if line.startswith(("error:", "hint:")))
    assert (code, shown, out) == (refusal.code, refusal.ending, ""), err
    assert err.endswith("\n".join(shown) + "\n") and contents() == before
    assert not imported or "TensorFlow" in refusal.given
    if "not typed:" in refusal.notes:
        return
    typed = ways(refusal)
    assert typed or "nothing to type:" in refusal.notes, f"{refusal.ending[1]}: nothing to type"
    then, expected = refusal.notes.get("then", "0: (").split(": ", 1)
    for number, way in enumerate(typed):
        stops = {"--print-config", "--dry-run", "--help", "--executions"} & set(way.words)
        assert stops or way.words[0] not in ("train", "benchmark"), (
            f"{way.words} would take long: add `typed with`"
        )
        situation(tmp_path / str(number), refusal, way.files)
        if way.shell:
            subprocess.run(way.shell, shell=True, check=True)
        code, _, err = run(*way.words, columns=4000)
        line = f"{way.shell}\nipucnn {' '.join(way.words)}\n{err}"
        assert code == int(then) and expected.rpartition(" (")[0] in err and refusal.ending[0] not in err, (
            line
        )
        os.chdir(tmp_path)
