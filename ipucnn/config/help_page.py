"""Help pages: Rich panels laid out for narrow terminals, without Typer's own renderer (slow to import)."""

import re
import textwrap
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

MAX_WIDTH = 120
_DEFAULT = re.compile(r"\[(default: .*|required)\]$", re.DOTALL)


class Row(NamedTuple):
    """One line of a panel: what to type, the placeholder of its value, what it means."""

    names: str
    metavar: str
    help: str


class PipeConsole(Console):
    """A console that leaves a closed pipe to ``cli`` instead of exiting with 1, and shows text as it is.

    Names of classes, files and folders may have ``[red]`` or ``:smile:`` in them, which Rich would obey.
    """

    def __init__(self, **details: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **details})

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_page(usage: str, about: str, panels: Sequence[Tuple[str, Sequence[Row]]], epilog: str = "") -> None:
    """Prints a help page on stdout, in panels as wide as the terminal up to 120 columns."""
    console = PipeConsole(highlight=False)
    width = max(40, min(console.width, MAX_WIDTH))
    console.print(Text.assemble(("Usage: ", "yellow"), (usage, "bold")), width=width)
    for paragraph in filter(None, about.strip().split("\n\n")):
        console.print()
        console.print(Text(" ".join(paragraph.split())), width=width)
    console.print()
    heads = [len(row.names) + len(row.metavar) + 1 for _, rows in panels for row in rows]
    left = min([(width - 4) * 2 // 5, 34, max(heads, default=0)])
    for title, rows in panels:
        if rows:
            lines = Text("\n").join([line for row in rows for line in _lay_out(row, left, width - 4)])
            console.print(Panel(lines, title=title, title_align="left", border_style="dim", width=width))
    if epilog:
        console.print(Text(epilog), width=width)


def _lay_out(row: Row, left: int, width: int) -> List[Text]:
    """The lines of one row: names on the left, help on the right; long names have a line of their own."""
    head = Text(row.names, "bold cyan")
    if row.metavar:
        if len(row.names) + 1 + len(row.metavar) <= width:
            head.append(" " + row.metavar, "yellow")
        else:
            head.append("\n    " + row.metavar, "yellow")
    wrapped = [_styled(text) for text in _wrap(row.help, width - left - 1)]
    if len(head) <= left and wrapped:
        first = wrapped.pop(0)
        lines = [Text.assemble(head, " " * (left + 1 - len(head)), first)]
    else:
        lines = [head]
    return lines + [Text.assemble(" " * (left + 1), text) for text in wrapped]


def _wrap(text: str, width: int) -> List[str]:
    """Wraps help text; its ``[default: ...]`` goes on the last line if it fits there, else on its own."""
    match = _DEFAULT.search(text)
    if match is None:
        return textwrap.wrap(text, width)
    lines = textwrap.wrap(text[: match.start()].strip(), width)
    note = match.group(0)
    if lines and len(lines[-1]) + 1 + len(note) <= width:
        return [*lines[:-1], f"{lines[-1]} {note}"]
    return lines + textwrap.wrap(note, width)


def _styled(line: str) -> Text:
    text = Text(line)
    start = line.rfind("[default:")
    if start >= 0:
        text.stylize("dim", start)
    return text


def print_command_help(command: Any, ctx: Any) -> None:
    """Prints the help page of a Typer command or group from its parameters."""
    panels: Dict[str, List[Row]] = {"Arguments": []}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            panels["Arguments"].append(_argument_row(param))
        else:
            title = getattr(param, "rich_help_panel", None) or "Options"
            panels.setdefault(title, []).append(_option_row(param))
    if "General" in panels and "Options" in panels:
        panels["General"] += panels.pop("Options")
    usage = " ".join([ctx.command_path, "[OPTIONS]", *_argument_names(command)])
    print_page(usage, command.help or "", list(panels.items()), command.epilog or "")


def _argument_names(command: Any) -> List[str]:
    names = []
    for param in command.params:
        if param.param_type_name == "argument":
            name = _argument_name(param)
            names.append(name if param.required else f"[{name}]")
    return names


def _argument_name(param: Any) -> str:
    name = (param.metavar or param.name).strip("[]").rstrip(".").upper()
    return name + ("..." if param.nargs != 1 else "")


def _argument_row(param: Any) -> Row:
    name = _argument_name(param)
    text = getattr(param, "help", None) or ""
    return Row(name, "", f"{text}  [required]" if param.required and "[" not in text else text)


def _option_row(param: Any) -> Row:
    names = ", ".join(sorted(param.opts, key=lambda opt: not opt.startswith("--")))
    if param.secondary_opts:
        # The positive and the negative form, then the other spellings.
        negative = "--no-" if param.secondary_opts[0].startswith("--no-") else param.secondary_opts[0]
        names = ", ".join([f"{param.opts[0]} / {negative}", *param.opts[1:]])
        if negative == "--no-":
            names = names.replace("--", "--[no-]", 1).replace(" / --no-", "", 1)
    text = param.help or ""
    default = param.default
    if isinstance(param.show_default, str):
        default = param.show_default
    shown = default is not None and default is not False and default != [] and param.show_default
    if shown and "[default:" not in text and not callable(default):
        text += f"  [default: {default}]"
    return Row(names, _metavar(param), text)


def _metavar(param: Any) -> str:
    if getattr(param, "is_flag", False) or getattr(param, "count", False):
        return ""
    if param.metavar:
        return param.metavar
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is not None:
        choices = getattr(descriptor, "choices", None)
        if choices:
            return "|".join(str(getattr(choice, "value", choice)) for choice in choices)
        name = getattr(descriptor.annotation, "__name__", "text")
    else:
        choices = getattr(param.type, "choices", None)
        if choices:
            return "|".join(map(str, choices))
        name = param.type.name
    name = name.lower().replace(" range", "")
    return {"str": "TEXT", "string": "TEXT", "integer": "INT"}.get(name, name.upper())
