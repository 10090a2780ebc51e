"""``--print-config``: prints every option's value and its origin on stdout."""

import json
import os
import sys

from ipucnn.config.options import specs_for
from ipucnn.config.resolve import Resolved
from ipucnn.config.spec import OptionSpec
from ipucnn.text import printable

WIDTH_IN_A_PIPE = 140


def value_text(spec: OptionSpec, value: object) -> str:
    """Returns a value as the user would type it; ``-`` for none."""
    plain = spec.yaml_value(value)
    if isinstance(plain, dict):
        return json.dumps(plain)
    if isinstance(plain, list):
        return " ".join(map(str, plain)) or "-"
    return "-" if plain is None else str(plain)


def print_config(resolved: Resolved, as_json: bool) -> None:
    """Prints key, value and origin of each option that the command takes, as a table or JSON."""
    rows = [
        (spec, getattr(resolved.config, spec.name), resolved.origins[spec.name])
        for spec in specs_for(resolved.command)
    ]
    if as_json:
        options = {
            spec.key: {"value": spec.yaml_value(value), "origin": origin} for spec, value, origin in rows
        }
        print(
            json.dumps({"command": resolved.command, "preset": resolved.preset, "options": options}, indent=2)
        )
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ipucnn.config.help_page import PipeConsole

    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = PipeConsole(highlight=False, width=None if narrow else WIDTH_IN_A_PIPE)
    shown = [(spec, printable(value_text(spec, value)), printable(origin)) for spec, value, origin in rows]
    keys, values, origins = zip(*((len(spec.key), _longest(text), _longest(o)) for spec, text, o in shown))
    # Five columns are blank: one on the left and two after each column but the last.
    is_wide = max(keys) + max(values) + max(origins) + 5 <= console.width
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold", min_width=max(values) if is_wide else None)
    if is_wide:
        table.add_column("from", overflow="fold", min_width=max(origins), max_width=max(32, max(origins)))
    panel = ""
    for spec, text, origin in shown:
        if spec.panel != panel:
            panel = spec.panel
            table.add_section()
        style = "dim" if origin == "default" else ""
        if is_wide:
            table.add_row(spec.key, Text(text), Text(origin), style=style)
        else:
            table.add_row(spec.key, Text(text), style=style)
            if origin != "default":
                table.add_row("", Text(f"from {origin}"), style="dim")
    console.print(table)


def _longest(text: str) -> int:
    """Returns the length of the longest word, which must not be broken."""
    return max(map(len, text.split()), default=0)
