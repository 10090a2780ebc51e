"""``--print-config``: prints every option's value and its origin on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, List, Sequence, Tuple

from ipucnn.aliases import PlainValue
from ipucnn.config.options import specs_for
from ipucnn.config.origin import DEFAULT, Origin
from ipucnn.config.resolve import Resolved
from ipucnn.config.spec import OptionSpec
from ipucnn.reports.console import console, is_whole, plain_table, print_table
from ipucnn.text import printable

if TYPE_CHECKING:
    from rich.table import Table


def print_config(resolved: Resolved, as_json: bool) -> None:
    """Prints key, value and origin of each option that the command takes, as a table or JSON."""
    rows = [
        (spec, getattr(resolved.config, spec.name), resolved.origins[spec.name])
        for spec in specs_for(resolved.command)
    ]
    if as_json:
        options = {
            spec.key: {"value": spec.yaml_value(value), "origin": str(origin)} for spec, value, origin in rows
        }
        shown = {"command": resolved.command, "preset": resolved.preset, "options": options}
        print(json.dumps(shown, indent=2))
        return
    out, table = console(sys.stdout), _table(rows, ("key", "value", "from"))
    print_table(out, table if is_whole(table, out) else _table(rows, ("key", "value")))


def _table(rows: List[Tuple[OptionSpec, PlainValue, Origin]], titles: Sequence[str]) -> Table:
    """Returns a table of options; without a column for the origin, it stands below the values that have one."""
    from rich.text import Text

    table = plain_table(padding=(0, 1, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    panel = ""
    for spec, value, origin in rows:
        if spec.panel != panel:
            panel = spec.panel
            table.add_section()
        style = "dim" if origin == DEFAULT else ""
        # An empty list as it is typed, where it differs from none.
        nothing = "-" if value is None or not spec.optional else "''"
        cells = [Text(printable(spec.typed_text(value) or nothing)), Text(printable(str(origin)))]
        table.add_row(spec.key, *cells[: len(titles) - 1], style=style)
        if len(titles) == 2 and origin != DEFAULT:
            table.add_row("", Text(printable(f"from {origin}")), style="dim")
    return table
