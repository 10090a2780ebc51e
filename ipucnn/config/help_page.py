"""Help pages: Rich panels for narrow terminals, without Typer's own renderer, which is slow to import."""

import re
import textwrap
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ipucnn.aliases import ClickCommand, ClickContext, ClickParameter
from ipucnn.config.parameters import SYMBOLS, Method, methods_about
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import shown_value

MAX_WIDTH = 120
LEAST_WIDTH, LEAST_HELP_WIDTH = 30, 40
_DEFAULT = re.compile(r"\[(default: .*|required)\]$", re.DOTALL)


class HelpRow(NamedTuple):
    """One line of a panel: the option's names, the placeholder of its value, and its meaning."""

    names: str
    metavar: str
    help: str


class PipeConsole(Console):
    """A console that shows text without markup, and lets ``cli`` handle a closed pipe instead of exiting with 1.

    Names of classes, files and folders may contain ``[red]`` or ``:smile:``, which Rich would interpret.
    """

    def __init__(self, **details: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **details})
        if self.width < LEAST_WIDTH:  # COLUMNS=1 would make text illegible; other widths follow the terminal
            self.width = LEAST_WIDTH

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_page(
    usage: str, about: str, panels: Sequence[Tuple[str, Sequence[HelpRow]]], epilog: str = ""
) -> None:
    """Prints a help page on stdout, in panels as wide as the terminal up to 120 columns."""
    console = PipeConsole(highlight=False)
    console.width = max(LEAST_HELP_WIDTH, console.width)
    width = min(console.width, MAX_WIDTH)
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


def _lay_out(row: HelpRow, left: int, width: int) -> List[Text]:
    """Returns the lines of one row: names on the left, help on the right; long names have a separate line."""
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
    """Wraps help text; its ``[default: ...]`` goes on the last line if it fits, else on a separate one."""

    def wrap(part: str) -> List[str]:
        # Options contain hyphens, and must stay whole to be copied.
        return textwrap.wrap(part, width, break_on_hyphens=False)

    match = _DEFAULT.search(text)
    if match is None:
        return wrap(text)
    lines = wrap(text[: match.start()].strip())
    note = match.group(0)
    if lines and len(lines[-1]) + 1 + len(note) <= width:
        return [*lines[:-1], f"{lines[-1]} {note}"]
    return lines + wrap(note)


def _styled(line: str) -> Text:
    text = Text(line)
    start = line.rfind("[default:")
    if start >= 0:
        text.stylize("dim", start)
    return text


def print_command_help(
    command: ClickCommand,
    ctx: ClickContext,
    common: Sequence[str] = (),
    words: Sequence[str] = (),
    examples: Sequence[Tuple[str, str]] = (),
) -> None:
    """Prints the help page of a Typer command from its parameters.

    Args:
        command: the command.
        ctx: its context.
        common: names of the options to show; all options if empty.
        words: search words; only the options about them are shown.
        examples: command lines with their descriptions.

    Raises:
        ConfigurationError: no option is about the words.
    """
    usage = usage_line(command, ctx)
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    options = [param for param in params if param.param_type_name != "argument"]
    arguments = [param for param in params if param.param_type_name == "argument"]
    if words and not (len(words) == 1 and _is_network(words[0], arguments)):
        searched = " ".join(words)
        rows = [option_row(param) for param in find_options(options, searched)]
        methods = methods_about(searched, [str(param.name) for param in options])
        if not (rows or methods):
            raise ConfigurationError(
                f"{ctx.command_path} --help {shown_value(searched)}: no option is about that",
                f"`{ctx.command_path} --help-all` shows all options",
            )
        pages = [(f"Options about {shown_value(searched)}", rows)]
        print_page(usage, "", pages + [(method.title, method_rows(method)) for method in methods])
        return
    panels: Dict[str, List[HelpRow]] = {"Arguments": [_argument_row(param) for param in arguments]}
    if common:
        named = {name: param for param in options for name in (*param.opts, *param.secondary_opts)}
        panels["Common options"] = [option_row(named[name]) for name in common]
        panels["More help"] = [
            HelpRow("--help WORD", "", "Show the options about a word: `--help batch`, `--help checkpoint`."),
            HelpRow("--help-all", "", f"Show all {len(options)} options."),
        ]
    else:
        for param in options:
            title = getattr(param, "rich_help_panel", None) or "Options"
            panels.setdefault(title, []).append(option_row(param))
        if "General" in panels and "Options" in panels:
            panels["General"] += panels.pop("Options")
    panels["Examples"] = [HelpRow(line, "", about) for line, about in examples]
    print_page(usage, command.help or "", list(panels.items()), command.epilog or "")


def method_rows(method: Method) -> List[HelpRow]:
    """Returns the formula of a schedule, warm-up, optimizer or norm, its keys, and an example."""
    keys = [HelpRow(key.name, "", f"{key.help}  [{key.shown_default}]") for key in method.keys]
    words = [HelpRow("where", "", SYMBOLS[method.option])]
    differs = [HelpRow("note", "", method.differs)] if method.differs else []
    return [
        HelpRow("formula", "", method.formula),
        *keys,
        *words,
        *differs,
        HelpRow("example", "", method.example),
    ]


def _is_network(word: str, arguments: Sequence[ClickParameter]) -> bool:
    """Whether a word after ``--help`` is a network of a command that takes one; the command's page is then shown."""
    from ipucnn.models.registry import list_models

    takes_model = any(param.name == "model" for param in arguments)
    return takes_model and word in {record.name for record in list_models()}


def find_options(params: Sequence[ClickParameter], words: str) -> List[ClickParameter]:
    """Returns the options of a command that are about ``words``; matching names come first.

    Case, ``-``, ``_`` and spaces make no difference.  An option must be about each of several words.  If no option is
    about ``num-classes`` as one word, the result is the options about both ``num`` and ``classes``.
    """
    parts = re.split("[-_ ]+", words.strip("-_ "))
    return _about(params, words, words.split() or [words]) or _about(params, words, parts)


def _about(params: Sequence[ClickParameter], whole: str, words: Sequence[str]) -> List[ClickParameter]:
    """Returns the options that are about all of ``words``, or about ``whole``, which the words are parts of."""
    options = [param for param in params if param.param_type_name != "argument"]
    ranks = [min(max(_rank(param, word) for word in words), _rank(param, whole)) for param in options]
    about = [(rank, param) for rank, param in zip(ranks, options) if rank < _NOT_ABOUT]
    return [param for _, param in sorted(about, key=lambda pair: pair[0])]


# Ranks of an option for a word: the word is one of its names, its name in other programs, a part of a name, a word of
# its help, or none of these.
_NAME, _WISH, _PART, _TEXT, _NOT_ABOUT = range(5)


def _rank(param: ClickParameter, word: str) -> int:
    sought = _folded(word)
    names = {_folded(name) for name in (*param.opts, *param.secondary_opts)}
    if not sought:
        return _NOT_ABOUT
    if sought in names:
        return _NAME
    if sought in map(_folded, wishes_of(param)):
        return _WISH
    if any(sought in name for name in names):
        return _PART
    return _TEXT if has_word(f"{param.help or ''} {param.metavar or ''}", word) else _NOT_ABOUT


def has_word(text: str, word: str) -> bool:
    """Whether a text contains a word, or a word that begins with it: "separate" does not contain "rate".

    A word of several parts matches whether its parts are joined or apart: "what-if" matches "what if".
    """
    sought, inside = (" ".join(re.findall("[a-z0-9]+", part.lower())) for part in (word, text))
    return bool(sought) and any(f" {form}" in f" {inside}" for form in (sought, sought.replace(" ", "")))


def wishes_of(param: ClickParameter) -> List[str]:
    """Returns the names of an option in other programs."""
    from ipucnn.config.options import find_spec

    spec = find_spec(param.opts[0].lstrip("-"))
    return spec.synonyms.split() if spec is not None and spec.name == param.name else []


def _folded(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def suggest(params: Sequence[ClickParameter], typed: str) -> Optional[str]:
    """Returns ``did you mean '--x'?`` for an unknown option; None if no option has such a meaning or spelling."""
    options = [param for param in params if param.param_type_name != "argument"]
    meant = [param.opts[0] for param in options if _rank(param, typed) <= _WISH]
    if meant:
        return "did you mean " + " or ".join(f"'{name}'" for name in meant[:3]) + "?"
    names = [name for param in options for name in (*param.opts, *param.secondary_opts)]
    return did_you_mean(typed, [name for name in names if name.startswith("--")], cutoff=0.8)


def word_to_look_for(params: Sequence[ClickParameter], typed: str) -> Optional[str]:
    """Returns the longest part of an unknown option, or all of it, for which ``--help WORD`` finds options."""
    whole = typed.strip("-")
    parts = sorted((part for part in re.split("[-_]+", whole) if len(part) >= 4), key=len, reverse=True)
    return next((word for word in (whole, *parts) if find_options(params, word)), None)


def usage_line(command: ClickCommand, ctx: ClickContext) -> str:
    """Returns a command's usage: its path, and its arguments in order."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    names = [_argument_name(param) if param.required else f"[{_argument_name(param)}]" for param in arguments]
    return " ".join([ctx.command_path, "[OPTIONS]", *names])


def _argument_name(param: ClickParameter) -> str:
    name = (param.metavar or param.name).strip("[]").rstrip(".").upper()
    return name + ("..." if param.nargs != 1 else "")


def _argument_row(param: ClickParameter) -> HelpRow:
    text = getattr(param, "help", None) or ""
    required = "  [required]" if param.required and "[" not in text else ""
    return HelpRow(_argument_name(param), "", text + required)


def option_row(param: ClickParameter) -> HelpRow:
    """Returns an option's line of a help page."""
    if param.name == "help":
        return HelpRow(
            "--help, -h, --help-all",
            "[WORD]",
            "Show this page; with WORD only the options about it; with --help-all every option.",
        )
    names = ", ".join(sorted(param.opts, key=lambda name: not name.startswith("--")))
    if param.secondary_opts:
        # The positive and the negative form come first, then the other spellings.
        negative = "--no-" if param.secondary_opts[0].startswith("--no-") else param.secondary_opts[0]
        names = ", ".join([f"{param.opts[0]} / {negative}", *param.opts[1:]])
        if negative == "--no-":
            names = names.replace("--", "--[no-]", 1).replace(" / --no-", "", 1)
    text = param.help or ""
    default = param.show_default if isinstance(param.show_default, str) else param.default
    if param.show_default and default not in (None, False) and "[default:" not in text:
        text += f"  [default: {default}]"
    return HelpRow(names, "" if param.is_flag else param.metavar, text)
