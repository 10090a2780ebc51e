"""Every report formats numbers in the same way."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import ipucnn
from ipucnn.events import Began, Note, Progress, show
from ipucnn.reports import units
from ipucnn.reports.console import EXECUTIONS, Screen
from ipucnn.text import counted

PERCENTAGES = {
    **{0.145: "15%", 0.125: "13%", 0.804: "80%", 1.155: "116%", 0.0: "0%", 1.0: "100%", 0.0995: "10%"},
    **{0.0994: "9.9%", 0.0414: "4.1%", 0.0415: "4.2%", 0.05: "5%", 0.00045: "0.045%"},
}


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.count, 0, "0"),
        (units.count, 999, "999"),
        (units.count, 1_234_567, "1.23 M"),
        (units.count, 4_089_184_256, "4.09 G"),
        (units.count, 75_290, "75.3 k"),
        (units.count, 25_000_000, "25.0 M"),
        (units.count, 999_700, "1.00 M"),  # not 1e+03 k
        (units.count, 4_049_571, "4.05 M"),
        (units.number, 15372.0, "15,370"),
        (units.number, 15.372, "15.37"),
        (units.number, None, ""),
        (units.seconds, 0.0001234, "123.4 us"),
        (units.seconds, 0.5, "500 ms"),
        (units.seconds, 0.0, "0 ms"),
        (units.size, 15.62 * 2**30, "15.6 GiB"),
        (units.size, 512 * 2**20, "512 MiB"),
        (units.size, 2.5 * 2**10, "2.5 KiB"),
        (units.size, None, ""),
        (units.duration, 59.94, "59.9 s"),
        (units.duration, 59.97, "1 min 0 s"),
        (units.duration, 75.2, "1 min 15 s"),
        (units.duration, 3_700, "1 h 1 min"),
        (units.column_milliseconds, 0.00213, "2.13"),
        (units.milliseconds, 0, "0 ms"),
        (units.milliseconds, 6e-5, "60 \u00b5s"),
        (units.milliseconds, 5e-8, "0.05 \u00b5s"),
        (units.milliseconds, 4e-10, "0.0 \u00b5s"),
        (units.milliseconds, 2.134e-3, "2.13 ms"),
        (units.milliseconds, 0.2514, "251 ms"),
        (units.milliseconds, 1.5, "1,500 ms"),
        (units.milliseconds, 75, "75 s"),
        (units.rate, 9.1234, "9.12"),
        *((units.percent, share, text) for share, text in PERCENTAGES.items()),
    ],
)
def test_numbers_as_text(show, value, text):
    assert show(value) == text


def test_reports_format_bytes_and_counts_in_one_module():
    """Powers of 1024 and of 1000 are in one module with their units."""
    pattern = re.compile(r"""2 ?\*\* ?[234]0\b.*iB|["'] ?[kMG]["']""")
    reports = Path(ipucnn.__file__).parent / "reports"
    lines = [
        f"{path.name}: {line.strip()}"
        for path in sorted(reports.rglob("*.py"))
        if path.name != "units.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line)
    ]
    assert lines == []


@given(st.integers(0, 2000))
def test_percentages_are_at_most_half_a_point_off(tenths):
    thousandths = 100 + tenths
    value = int(units.percent(thousandths / 1000).rstrip("%"))
    assert -5 < 10 * value - thousandths <= 5


@pytest.mark.parametrize(
    "number, noun, text",
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (1437, "weight update", "1,437 weight updates"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "epoch", "2 epochs"),
        (10, "class", "10 classes"),
        (3, "copy", "3 copies"),
        (3, "key", "3 keys"),
    ],
)
def test_numbers_of_things(number, noun, text):
    assert counted(number, noun) == text


def working():
    yield Began("reading")
    yield Began("loading")
    yield Note("a warning")
    for done in (3, 4):
        yield Progress("counting", done, 4)
    yield "an item"


def shown():
    """Shows work; returns the items that were taken."""
    taken = []
    show(working(), Screen(take=taken.append))
    return taken


def test_bars_follow_each_other_on_a_terminal_and_notes_last(monkeypatch, capsys):
    screen = io.StringIO()
    monkeypatch.setattr(
        "ipucnn.reports.console.console",
        lambda stream: Console(file=screen, force_terminal=True, width=80, color_system=None),
    )
    monkeypatch.setattr("ipucnn.reports.console.is_interactive", lambda stream: True)
    assert shown() == ["an item"]
    texts = [screen.getvalue().find(text) for text in ("reading", "loading", "a warning", "counting", "4/4")]
    assert texts == sorted(texts) and texts[0] >= 0
    monkeypatch.setattr("ipucnn.reports.console.is_interactive", lambda stream: False)
    before = screen.getvalue()
    assert shown() == ["an item"]
    assert screen.getvalue() == before and capsys.readouterr().err == "a warning\n"


def test_a_pipe_gets_lines_of_long_measurements(monkeypatch, capsys):
    """Every 15 seconds, unless a note has just been printed."""
    now = [0.0]
    monkeypatch.setattr("ipucnn.reports.console.time.monotonic", lambda: now[0])
    view = Screen(EXECUTIONS)
    for seconds, event in (
        (10, Progress("warm-up", 2, None)),
        (16, Progress("warm-up", 3, None)),
        (20, Note("warm-up is over")),
        (32, Progress("measured", 1, 8, "5 images/s")),
        (36, Progress("measured", 2, 8, "5 images/s")),
    ):
        now[0] = seconds
        view.show(event)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warm-up: 3 executions", "warm-up is over", "measured: 2 of 8 executions, 5 images/s"]
