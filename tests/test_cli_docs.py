"""What is written twice is the same: the option reference and its declarations, dependencies and their pins."""

import re
from pathlib import Path

from ipucnn.config import reference

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "configuration.md"


def test_the_option_reference_is_current():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert reference.insert(text) == text, "run: python -m ipucnn.config.reference --write"


def test_the_sdk_s_environment_has_what_the_tests_environment_has():
    """Both lists pin the same versions; TensorFlow and Keras are the SDK's own wheels there."""
    own = {"tensorflow", "keras"}
    pins = {
        name: {
            line.split("==")[0].lower(): line
            for line in (ROOT / "constraints" / name).read_text().splitlines()
            if not line.startswith("#")
        }
        for name in ("py38.txt", "sdk.txt")
    }
    assert own & set(pins["py38.txt"]) == own
    assert pins["sdk.txt"] == {name: line for name, line in pins["py38.txt"].items() if name not in own}


def test_what_is_depended_on_is_pinned_for_the_oldest_versions():
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("\n]\n")[0]
    wanted = {
        re.split(r"[<>=;\[ ]", line.strip().strip('",'))[0].lower()
        for line in text.splitlines()
        if line.strip().startswith('"') and "python_version >= '3.9'" not in line
    }
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints" / "py38.txt").read_text().splitlines()
    }
    assert {"typer", "jinja2", "psutil"} <= wanted and wanted <= pinned
