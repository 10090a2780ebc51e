"""Writes the parts of these pages that commands derive: `make generated`.

The tables of commands and exit codes in commands.md come from the program's own table of commands and from its errors,
that of findings in verify-dataset.md from verify-dataset, the reference of options in configuration.md from their
declarations and presets, the tables of results.md and host-session.md from ../results; the pictures of terminals in
images/ from what they print.
"""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Tuple

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import result_tables  # noqa: E402

from ipucnn import errors  # noqa: E402
from ipucnn.command_table import COMMANDS, ROOT_OPTIONS  # noqa: E402
from ipucnn.config.command import default_text  # noqa: E402
from ipucnn.config.options import PANELS, SPECS  # noqa: E402
from ipucnn.config.parameters import METHODS, SYMBOLS  # noqa: E402
from ipucnn.config.presets import BUILT_IN_FOLDER, keys_in_presets  # noqa: E402
from ipucnn.config.spec import OptionSpec  # noqa: E402
from ipucnn.config.values import plain_number  # noqa: E402
from ipucnn.datasets.verification.findings import CODES  # noqa: E402

BEGIN, END = "<!-- {0}: begin (written by python docs/generate.py) -->", "<!-- {0}: end -->"


def commands() -> str:
    """A table of the commands, and the examples of each."""
    lines = ["| command | what it does |", "| --- | --- |"]
    lines += [f"| `ipucnn {command.name}` | {command.summary} |" for command in COMMANDS.values()]
    lines += [f"| `ipucnn {names.replace(', ', '`, `')}` | {text} |" for names, text in ROOT_OPTIONS]
    for command in COMMANDS.values():
        lines += ["", f"## {command.name}", ""]
        lines += [f"- `{line}`<br>{about}" for line, about in command.examples]
    return "\n".join(lines)


def exit_codes() -> str:
    """A table of the exit codes; the meanings are those of the exceptions that end with them."""
    meanings: Dict[int, str] = {
        errors.EXIT_OK: "The work is done.",
        errors.EXIT_BUG: "A bug of ipucnn: please report it with the traceback.",
    }
    own = (kind for kind in errors.UserError.__subclasses__() if kind.__module__ == errors.__name__)
    for kind in own:
        meanings[kind.exit_code] = (kind.__doc__ or "").strip().partition("\n\n")[0]
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        code = getattr(errors, f"EXIT_{number.name}")
        meanings[code] = f"Ended by {number.name}; a training run saves a checkpoint first."
    lines = ["| exit code | meaning |", "| --- | --- |"]
    return "\n".join(lines + [f"| {code} | {meanings[code]} |" for code in sorted(meanings)])


def findings() -> str:
    """A table of what verify-dataset can find."""
    lines = ["| code | severity | what | what to do |", "| --- | --- | --- | --- |"]
    for name, code in CODES.items():
        more = [
            word for word, holds in (("partial", code.partial), ("published", code.as_published)) if holds
        ]
        severity = code.severity + (f" ({', '.join(more)})" if more else "")
        lines.append(f"| `{name}` | {severity} | {code.message} | {code.hint} |")
    return "\n".join(lines)


def options() -> str:
    """A table per panel: key, what it takes, default, meaning, commands."""
    lines: List[str] = []
    for panel in PANELS:
        lines += [f"### {panel.PANEL}", "", str(panel.__doc__), ""]
        lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [_row(spec) for spec in SPECS if spec.panel == panel.PANEL]
        lines.append("")
    lines += _published_table()
    return "\n".join(lines).rstrip()


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
    text = "Configurations of Graphcore's public applications and tutorials, and the presets that reproduce them: "
    lines += [
        text + "`ipucnn train --config NAME`, or `train unet` for the U-Net with `--nb-ipus-per-replica 4`.",
        "",
    ]
    lines += ["| preset | typed there | from | system | result there |", "| --- | --- | --- | --- | --- |"]
    for one in published():
        typed = "<br>".join(f"`{_escape(command)}`" for command in one.commands)
        lines.append(f"| `{one.preset}` | {typed} | {_escape(one.source)} | {one.system} | {one.result} |")
    return [*lines, ""]


def keys() -> str:
    """For each option that takes a dictionary the formulas, keys and an example of its methods."""
    lines: List[str] = []
    for option, symbols in SYMBOLS.items():
        lines += [f"### Keys of {option.replace('_', '-')}", "", symbols]
        for method in METHODS:
            if method.option == option:
                lines += ["", f"**{method.name}**: `{method.formula}`. {method.differs}".rstrip(), ""]
                lines += [f"- `{key.name}` ({key.shown_default}): {key.help}" for key in method.keys]
                lines += [f"- For example `{method.example}`"]
        lines.append("")
    return "\n".join(lines).rstrip()


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
    minimum, maximum, above, below = spec.within
    sides = (("at least", minimum), ("above", above), ("at most", maximum), ("below", below))
    return "".join(f", {word} {plain_number(bound)}" for word, bound in sides if bound is not None)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


PARTS = {
    "configuration.md": {"keys": keys, "options": options},
    "commands.md": {"commands": commands, "exit codes": exit_codes},
    "verify-dataset.md": {"findings": findings},
    "host-session.md": {"weight update": result_tables.weight_updates},
    "results.md": result_tables.PARTS,
}


def insert(page: str, document: str) -> str:
    """The text of a page with each part between its two markers replaced by the current one."""
    for name, part in PARTS[page].items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = document.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the document has no {begin} ... {end}")
        document = f"{before}{begin}\n\n{part()}\n\n{end}{after}"
    return document


if __name__ == "__main__":
    import pictures

    for page in PARTS:
        path = DOCS / page
        path.write_text(insert(page, path.read_text(encoding="utf-8")), encoding="utf-8")
    pictures.draw_terminals()
    result_tables.draw_sizes()
