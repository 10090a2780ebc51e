"""The option reference in Markdown: ``python -m ipucnn.config.reference`` prints it.

With ``--write`` it goes into docs/configuration.md of the source tree.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Tuple

from ipucnn import documents
from ipucnn.config.options import PANELS, SPECS
from ipucnn.config.presets import BUILT_IN_FOLDER, keys_in_presets
from ipucnn.config.signature import default_text
from ipucnn.config.spec import OptionSpec
from ipucnn.config.values import plain_number

BEGIN = "<!-- options: begin (written by python -m ipucnn.config.reference) -->"
END = "<!-- options: end -->"
SOURCES = Path(__file__).resolve().parents[2]
DOCUMENT = SOURCES / "docs" / "configuration.md"
# Key -> the test that shows what the option does, as "module.py::function".
TESTS = SOURCES / "tests" / "option_tests.yml"


def reference() -> str:
    """A table per panel (key, what it takes, default, meaning, commands), and one of what each option acts on."""
    lines: List[str] = [BEGIN, ""]
    for panel in PANELS:
        lines += [f"### {panel.PANEL}", "", str(panel.__doc__), ""]
        lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [_row(spec) for spec in SPECS if spec.panel == panel.PANEL]
        lines.append("")
    lines += [*_effects(), *_published_table(), END, ""]
    return "\n".join(lines)


def effects(spec: OptionSpec) -> Tuple[str, str]:
    """What a run on the host and one on IPUs make of an option, in a word or two."""
    if spec.warning:
        return "a warning", "a warning"
    return "acts" if spec.host_effect else "none", "acts" if spec.ipu_effect else "none"


def _effects() -> List[str]:
    """The table of effects; it names tests, which only the source tree has."""
    tests = documents.load(TESTS.read_text(encoding="utf-8"))
    lines = ["### Effects", "", "What acts on an option, and the test (in `tests/`) that shows it.", ""]
    lines += ["| key | on the host | on IPUs | test |", "| --- | --- | --- | --- |"]
    for spec in SPECS:
        lines.append(f"| `{spec.key}` | {' | '.join(effects(spec))} | `{tests.get(spec.key, '-')}` |")
    return [*lines, ""]


@dataclass(frozen=True)
class Published:
    """A configuration that others published: the preset that stands for it, and what its comments say of it."""

    preset: str
    source: str
    commands: Tuple[str, ...]
    system: str
    result: str


def published() -> List[Published]:
    """The configurations of the public applications, as the comments above their presets have them."""
    found = []
    for path in sorted(BUILT_IN_FOLDER.glob("*.yml")):
        said: Dict[str, List[str]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            word, _, text = line.partition(": ")
            if word in ("# source", "# command", "# system", "# result"):
                said.setdefault(word[2:], []).append(text)
            elif said and not line.startswith("#"):
                name = line.split(":")[0]
                (source,), (system,), (result,) = (said[key] for key in ("source", "system", "result"))
                found.append(Published(name, source, tuple(said["command"]), system, result))
                said = {}
    return found


def _published_table() -> List[str]:
    lines = ["### Published configurations", ""]
    text = "What Graphcore's public applications and tutorials describe, and the preset that stands for it: "
    lines += [
        text + "`ipucnn train --config NAME`, or `train unet` for the U-Net with `--nb-ipus-per-replica 4`.",
        "",
    ]
    lines += ["| preset | typed there | from | system | result there |", "| --- | --- | --- | --- | --- |"]
    for one in published():
        typed = "<br>".join(f"`{_escape(command)}`" for command in one.commands)
        lines.append(f"| `{one.preset}` | {typed} | {_escape(one.source)} | {one.system} | {one.result} |")
    return [*lines, ""]


def _row(spec: OptionSpec) -> str:
    notes = [_escape(spec.help)]
    if spec.aliases:
        notes.append("Also " + ", ".join(f"`{alias}`" for alias in spec.aliases) + ".")
    if not spec.in_yaml:
        notes.append("A flag only.")
    if not spec.host_effect and spec.panel != "IPU only":
        notes.append("No effect on the host.")
    if not spec.ipu_effect and spec.panel != "Host session":
        notes.append("No effect on IPUs.")
    if "train" in spec.commands and len(spec.commands) > 1:
        notes.append("Commands: " + ", ".join(spec.commands) + ".")
    value = spec.metavar or "True, False"
    default = _escape(default_text(spec))
    shown = default if spec.default is None else f"`{default}`"
    if spec.key in keys_in_presets():
        shown = f"the preset's, else {shown}"
    return f"| `{spec.key}` | {_escape(value)}{_bounds(spec)} | {shown} | {' '.join(notes)} |"


def _bounds(spec: OptionSpec) -> str:
    bounds = []
    sides = (
        ("at least", spec.minimum),
        ("above", spec.above),
        ("at most", spec.maximum),
        ("below", spec.below),
    )
    for word, bound in sides:
        if bound is not None:
            bounds.append(f"{word} {plain_number(bound)}")
    return (", " + ", ".join(bounds)) if bounds else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def insert(document: str) -> str:
    """The document with the part between the two markers replaced by the current reference."""
    before, _, rest = document.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return before + reference().rstrip("\n") + after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(insert(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(reference(), end="")
