"""The first day on an IPU-POD in docs/ipu.md: its commands print the forms shown, on the test double of the SDK."""

import os
import re
import shlex
from pathlib import Path

import pytest
from poplar_double import installed
from test_doctor import INFO, POD, tool  # noqa: F401 - a fixture

PAGE = Path(__file__).parents[1] / "docs" / "ipu.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## A first day on an IPU-POD")[2].partition("\n## ")[0]
BLOCKS = [block.splitlines() for block in re.findall(r"```console\n(.*?)```", SECTION, re.DOTALL)]
SHOWN = {block[0][2:]: block[1:] for block in BLOCKS if block[0].startswith("$ ") and len(block) > 1}


def form(line):
    """Returns a line with numbers replaced and blanks collapsed."""
    return " ".join(re.sub(r"\d[\d.,]*", "#", line).split())


def missing(line, succeeds):
    """Runs a command; returns the lines shown whose form it does not print."""
    out, err = succeeds(*shlex.split(line)[1:])
    forms = {form(row) for row in (out + err).splitlines()}
    return [row for row in SHOWN[line] if row and row != "..." and form(row) not in forms]


@pytest.fixture(autouse=True)
def pod(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p7")
    monkeypatch.delenv("POPDIST_NUM_TOTAL_REPLICAS", raising=False)


def test_ten_lines_are_shown():
    lines = [line for block in BLOCKS for line in block]
    typed = [line for line in lines if line.startswith(("source", "export", "python", "$ "))]
    assert len(typed) == 10 and len(SHOWN) == 3


def test_doctor_prints_the_forms_shown(tool, succeeds):  # noqa: F811 - the fixture
    tool("gc-info", list_devices=POD, device_info=INFO)
    (line,) = (line for line in SHOWN if "doctor" in line)
    with installed(sdk="3.3"):
        assert missing(line, succeeds) == []


@pytest.mark.slow
def test_the_first_network_prints_the_forms_shown(succeeds):
    for line in SHOWN:
        if "doctor" not in line:
            with installed(sdk="3.3"):
                assert missing(line, succeeds) == []
