"""Printed output fits the screen at any width: no line is wider, no word is broken, nothing is cut off.

Exempt are, by name: lines to be pasted (commands, YAML, paths); errors and hints, which are one line each so that they
can be searched and pasted; the drawings of plans, whose width is that of the screen; and ``models`` in a pipe, which
prints one line for each network for programs to read.
"""

import io
import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from light_training import benchmark_briefly
from PIL import Image
from support.trained_runs import train

from ipucnn import cli
from ipucnn.command_table import COMMANDS
from ipucnn.runs import runtimes, verification

WIDTHS = (80, 130)
WIDE = 700
TO_PASTE = re.compile(
    r"(ipucnn |evaluate it: |see its curves: |\s*- ipucnn |[\w-]+_plan:|  [a-z-]+: |error: |hint: |report in "
    r"|(programs|figure|contact sheet|predictions of|written|picture).* in |written: )"
)
DRAWING = re.compile(r"\s*(IPU|stage)s? \d+(-\d+)? |\s*- forward|timeline, predicted")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\")
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])(?:;\d+)*m")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes a folder with a run and the report of a benchmark, of a second each."""
    folder = tmp_path_factory.mktemp("screens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        line = "lenet --dataset digits --num-epochs 1 --limit-train 160 --limit-eval 40 --seed 1"
        for name, more in (("run", ""), ("run2", "--learning-rate 0.1"), ("folds", "--kfold 2")):
            train(name, f"{line} {more}", lightly=True)
        benchmark = "benchmark lenet --host-generated-data --micro-batch-size 2 --executions 3 --min-time 0.1"
        benchmark_briefly(patch)
        assert cli.run([*benchmark.split(), "--max-time", "6", "--run-dir", "bench"]) == 0
        patch.setattr(verification, "RuntimeProcess", runtimes.load)
        assert cli.run(["export", "run", "--format", "keras", "--output", "exported"]) == 0
        for n, name in enumerate(("flat", "good", "broken", "twice")):
            (folder / "data" / ("ab"[n % 2])).mkdir(parents=True, exist_ok=True)
            image = Image.new("L", (16, 16), 10 * n)
            image.putpixel((n, 3), 200)
            for k in range(5):
                image.putpixel((k, 9), 20 * k)
                image.save(folder / "data" / "ab"[n % 2] / f"{name}-{k}.png")
        (folder / "data" / "a" / "broken-0.png").write_bytes(b"nothing")
        (folder / "data" / "a" / "notes.txt").write_text("notes")
    return folder


def show_report():
    from ipucnn.reports.train import print_report
    from ipucnn.runs.folder import RunFolder

    report = RunFolder(Path("run")).read_report()
    print_report(report, "run", 0.97, 123456789)
    return 0


def show_folds():
    from ipucnn.reports.train import print_folds
    from ipucnn.runs.records import Folds

    report = msgspec.json.decode(Path("folds/folds.json").read_bytes(), type=Folds)
    print_folds(report, "folds", [str(n) for n in range(10)], [])
    return 0


def show_export():
    from ipucnn.reports.evaluate import print_export

    print_export(
        {**json.loads(Path("exported/export.json").read_text(encoding="utf-8")), "folder": "exported"}
    )
    return 0


def show_benchmark():
    from ipucnn.benchmarking.baseline import read_report
    from ipucnn.reports.benchmark import print_benchmark

    print_benchmark(read_report(Path("bench/report.json")))
    return 0


SCREENS = {
    "help": "",
    **{f"{name} --help": f"{name} --help" for name in COMMANDS},
    "train --help-all": "train --help-all",
    "train --help WORD": "train --help patience",
    "models": "models *net5*",
    "doctor": "doctor",
    "dry run": "train cifar_resnet8 --dataset digits --replicas 2 --dry-run --seed 1",
    "configuration": "train lenet --print-config",
    "plan": "plan-splits cifar_resnet8 --stages 2",
    "plan of a search": "plan-splits lenet --ipus 2 --micro-batch-size 8 --global-batch-size 16",
    "optimisations": "plan-splits cifar_resnet8 --stages 2 --optimisations",
    "verified": "verify-dataset digits",
    "evaluation": "evaluate run",
    "predictions": "infer run --split eval --limit-eval 8",
    "end of a run": show_report,
    "benchmark": show_benchmark,
    "layers": "models cifar_resnet8 --summary",
    "plan beside rules": "plan-splits resnet50 --stages 4 --compare params --compare equal-layers",
    "judged splits": "plan-splits cifar_resnet8 --splits conv3_block1_add",
    "suite": "benchmark --suite keras-tutorial --print-config --seed 1",
    "runs": "runs .",
    "difference": "diff run run2",
    "curves": "plot run run2",
    "folds": show_folds,
    "export": show_export,
    "damaged": "verify-dataset data",
}
NEEDS_A_RUN = (
    *("evaluation", "predictions", "end of a run", "benchmark", "runs", "difference", "curves", "folds"),
    *("export", "damaged"),
)
PIPED_WHOLE = ("models", "layers")
CODES = {"damaged": 3}


def printed(name, width, monkeypatch, terminal=False, **environment):
    """Returns stdout and stderr of a command."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("CI", "1")  # no progress bars
    monkeypatch.delenv("NO_COLOR", raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    out, err = (Terminal(), Terminal()) if terminal else (io.StringIO(), io.StringIO())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    command = SCREENS[name]
    code = command() if callable(command) else cli.run(command.split())
    assert code == CODES.get(name, 0), err.getvalue()
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue())


def checked(text):
    return [
        line
        for line in ESCAPES.sub("", text).splitlines()
        if not TO_PASTE.match(line) and not DRAWING.match(line)
    ]


def words(lines):
    """Returns words with letters, without surrounding punctuation."""
    parts = re.split(r"[\s│]+", " ".join(lines))
    return {
        word
        for word in (one.strip(".,;:()'\"`") for one in parts)
        if re.search("[A-Za-z]{2}", word) and "/" not in word
    }


# Words of the drawings' legend about ticks that are not drawn
NOT_DRAWN = {"more", "ticks", "tick", "alike", "follow", "follows", "and", "the", "drain"}


def broken(name, shown, wide, width):
    lines = checked(shown)
    too_wide = [line for line in lines if len(line) > width]
    return (
        too_wide,
        sorted(words(lines) - words(checked(wide)) - NOT_DRAWN),
        [line for line in lines if "…" in line],
    )


@pytest.fixture
def short_folder():
    """Makes a folder with a short name: screens print folders, and a path may be longer than a line."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        yield folder


@pytest.mark.slow_cases(
    "difference",
    "damaged",
    "benchmark",
    "configuration",
    "curves",
    "end of a run",
    "evaluation",
    "judged splits",
    "layers",
    "optimisations",
    "plan",
    "plan beside rules",
    "plan of a search",
    "predictions",
)
@pytest.mark.parametrize("name", sorted(SCREENS))
def test_screens_fit(name, monkeypatch, request, short_folder):
    if name in NEEDS_A_RUN:
        monkeypatch.chdir(request.getfixturevalue("trained"))
    else:
        monkeypatch.chdir(short_folder)
    wide = printed(name, WIDE, monkeypatch).out
    for width in () if name in PIPED_WHOLE else WIDTHS:
        assert broken(name, printed(name, width, monkeypatch).out, wide, width) == ([], [], []), width
    shown = printed(name, 80, monkeypatch, terminal=True, NO_COLOR="1")
    assert not COLOURS.search(shown.out + shown.err)
    assert broken(name, shown.out, wide, 80) == ([], [], [])
    assert [line for line in checked(shown.err) if len(line) > 80] == []


def test_a_broken_word_is_noticed():
    wide = "images per second"
    assert broken("x", "images per sec\nond", wide, 20) == ([], ["ond", "sec"], [])
    assert broken("x", "images per second", wide, 10)[0] == ["images per second"]
    assert broken("x", "imag…", wide, 80)[2] == ["imag…"]


@pytest.mark.slow_cases("command0-what0", "command1-what1", "command4-what4")
@pytest.mark.parametrize(
    ("command", "what"),
    [
        (
            ["plan-splits", "lenet", "--ipus", "2", "--micro-batch-size", "8", "--html", "page.html"],
            ("searching",),
        ),
        (["plan-splits", "cifar_resnet8", "--splits", "conv3_block1_add"], ("predicting",)),
        (["plan-splits", "cifar_resnet8", "--stages", "2", "--optimisations"], ("predicting",)),
        (["models", "lenet", "--summary"], ("loading TensorFlow",)),
        (["export", "run", "--format", "keras"], ("loading TensorFlow", "writing the network", "verifying")),
    ],
)
def test_slow_commands_show_progress_on_a_terminal(
    command, what, monkeypatch, request, tmp_path, in_this_process
):
    if "run" in command:
        monkeypatch.chdir(request.getfixturevalue("trained"))
        command = [*command, "--output", str(tmp_path / "exported")]
    else:
        monkeypatch.chdir(tmp_path)
    # An export takes longer: one suffices.
    for watched in (True,) if "export" in command else (True, False):
        monkeypatch.delenv("CI", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        err = Terminal() if watched else io.StringIO()
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        assert cli.run(command) == 0, err.getvalue()
        assert [word for word in what if (word in err.getvalue()) != watched] == []
