"""Duplicated text stays the same: the option reference and its declarations, dependencies and their pins."""

import re
import shlex

import pytest
from support.scripts import ROOT, load_script

from ipucnn.command_table import COMMANDS


def test_generated_parts_of_the_documentation_are_current():
    generate = load_script("docs/generate.py")
    pages = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in generate.PARTS}
    for name, text in pages.items():
        assert generate.insert(name, text) == text, "run: python docs/generate.py"
    text = pages["commands.md"]
    for command in COMMANDS:
        assert f"| `ipucnn {command}` |" in text


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_examples_in_help_use_existing_options(command, run):
    assert COMMANDS[command].examples
    for line, _ in COMMANDS[command].examples:
        program, name, *args = shlex.split(line)
        code, help_page, _ = run(name, "--help-all" if COMMANDS[name].common else "--help", columns=160)
        assert program == "ipucnn" and code == 0
        # Options after -- belong to another command.
        of_command = args[: args.index("--")] if "--" in args else args
        for option in (arg for arg in of_command if arg.startswith("--")):
            assert re.search(rf"(?<![\w-])(--\[no-\]{option[2:]}|{option})(?![\w-])", help_page), line


def test_the_sdk_and_test_environments_pin_the_same_versions():
    """Both lists pin the same versions, except TensorFlow and Keras, which are the SDK's wheels, and MPI, which poprun
    has itself.
    """
    of_sdk, of_tests = {"tensorflow", "keras"}, {"mpi4py", "mpich"}
    pins = {
        name: {
            line.split("==")[0].lower(): line
            for line in (ROOT / "constraints" / name).read_text().splitlines()
            if not line.startswith("#")
        }
        for name in ("py38.txt", "sdk.txt")
    }
    assert of_sdk & set(pins["py38.txt"]) == of_sdk
    assert pins["sdk.txt"] == {
        name: line for name, line in pins["py38.txt"].items() if name not in of_sdk | of_tests
    }


def test_all_dependencies_are_pinned_for_the_oldest_versions():
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("\n]\n")[0]
    required = {
        re.split(r"[<>=;\[ ]", line.strip().strip('",'))[0].lower()
        for line in text.splitlines()
        if line.strip().startswith('"') and "python_version >= '3.9'" not in line
    }
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints" / "py38.txt").read_text().splitlines()
    }
    assert {"typer", "jinja2", "psutil"} <= required and required <= pinned
