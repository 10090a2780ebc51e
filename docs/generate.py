"""Writes the parts of these pages that commands derive: `make generated`.

The tables of commands and exit codes in commands.md come from the program's own table of commands and from its errors,
that of findings in verify-dataset.md from verify-dataset; the pictures of terminals in images/ from what they print.
"""

import signal
import sys
from pathlib import Path
from typing import Dict

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from ipucnn import errors  # noqa: E402
from ipucnn.command_table import COMMANDS, ROOT_OPTIONS  # noqa: E402
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


PARTS = {
    "commands.md": {"commands": commands, "exit codes": exit_codes},
    "verify-dataset.md": {"findings": findings},
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
