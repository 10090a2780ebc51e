"""The Typer command class: takes option values as users of argparse type them, prints its own help page.

Rewritten before Typer parses: ``--a_b`` is ``--a-b``; ``--validation False`` is ``--no-validation``;
``--pipeline-splits A B C`` is one flag per value, up to the next ``-`` option.
"""

import re
from typing import Any, Dict, List, Optional, Tuple

import typer
import typer.core

from ipucnn.config.values import FALSE_WORDS, TRUE_WORDS
from ipucnn.errors import ConfigurationError
from ipucnn.text import shown_value

_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?")


class RunCommand(typer.core.TyperCommand):
    """A command whose options may be typed with ``_`` or ``-``, booleans with a value, lists with spaces."""

    def parse_args(self, ctx: Any, args: List[str]) -> List[str]:
        typed = args[: args.index("--")] if "--" in args else args
        if not ctx.resilient_parsing and {"--help", "-h"} & set(typed):
            # Before Typer parses, for which it would load its converters: half of the time of a help page.
            print(ctx.get_help(), end="")
            raise typer.Exit()
        table = {option: param for param in self.params for option in (*param.opts, *param.secondary_opts)}
        if ctx.parent is not None and ctx.parent.params.get("verbose") and "--verbose" in table:
            args = ["--verbose", *args]
        try:
            return super().parse_args(ctx, rewrite(args, table))
        except Exception as error:
            # Typer leaves some usage errors without the command they are about; the hint needs it.
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ipucnn.config.help_page import print_command_help

        print_command_help(self, ctx)


def rewrite(args: List[str], table: Dict[str, Any]) -> List[str]:
    """The arguments in the plain forms Typer parses.

    Args:
        args: as typed.
        table: every option string of the command -> its parameter.

    Raises:
        ConfigurationError: for ``--flag=VALUE`` where VALUE is neither true nor false.
    """
    plain: List[str] = []
    rest = list(args)
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*plain, token, *rest]
        if not token.startswith("--"):
            plain.append(token)
            continue
        name, equals, text = token.partition("=")
        name = name.replace("_", "-")
        value: Optional[str] = text if equals else None
        param = table.get(name)
        if param is None:
            plain.append(name + equals + text)
        elif param.secondary_opts:
            flag, rest = _boolean(name, value, param, rest)
            plain.append(flag)
        elif getattr(param, "multiple", False):
            items, rest = ([value], rest) if value is not None else _items(rest)
            for item in items or [""]:
                plain += [name, item]
        elif value is not None or getattr(param, "is_flag", False) or not rest:
            plain.append(name + equals + text)
        else:
            plain += [name, rest.pop(0)]
    return plain


def _boolean(name: str, value: Optional[str], param: Any, rest: List[str]) -> Tuple[str, List[str]]:
    """The positive or negative form of a boolean option, and the arguments left."""
    if value is None and rest and rest[0].lower() in (*TRUE_WORDS, *FALSE_WORDS):
        value, rest = rest[0], rest[1:]
    word = "true" if value is None else value.lower()
    if word not in (*TRUE_WORDS, *FALSE_WORDS):
        raise ConfigurationError(
            f"{name} {shown_value(value)}: must be True or False",
            f"{param.opts[0]} or {param.secondary_opts[0]}",
        )
    wanted = (word in TRUE_WORDS) == (name in param.opts)
    return (param.opts if wanted else param.secondary_opts)[0], rest


def _items(rest: List[str]) -> Tuple[List[str], List[str]]:
    """The values of a list option: everything up to the next option."""
    count = 0
    while count < len(rest) and (not rest[count].startswith("-") or _NEGATIVE_NUMBER.fullmatch(rest[count])):
        count += 1
    return rest[:count], rest[count:]
