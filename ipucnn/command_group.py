"""The root Typer group, which has the commands' names and imports a command when it is used."""

import functools
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

import typer
import typer.core

from ipucnn.aliases import ClickCommand, ClickContext, ClickError, ClickParameter, PlainDict, PlainValue
from ipucnn.command_line import HELP, VERBOSE, VERSION, CommandLine, items
from ipucnn.command_table import ABOUT, COMMANDS, Command
from ipucnn.config.command import (
    completer,
    help_of,
    own_options,
    read_options,
    run_options,
)
from ipucnn.config.shared_options import CommandOptions
from ipucnn.config.spec import OptionSpec
from ipucnn.config.values import FALSE_WORDS, TRUE_WORDS
from ipucnn.errors import ConfigurationError, UnknownOption, UserError
from ipucnn.text import shown_value

CONTEXT = {"help_option_names": list(HELP)}
# Typer does not export the base class of its usage errors, and its module depends on the version of Typer.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def user_error(error: ClickError) -> UserError:
    """Converts a usage error of Typer into a ``ConfigurationError`` with a hint."""
    ctx = getattr(error, "ctx", None)
    if ctx is None:
        return ConfigurationError(_sentence(error), "`ipucnn --help` lists the commands")
    path = ctx.command_path
    params = ctx.command.get_params(ctx)
    hint = f"`{path} --help` lists the options"
    kind = type(error).__name__
    if kind == "NoSuchOption":
        from ipucnn.config.help_page import suggest, word_to_look_for

        typed = shown_value(error.option_name)
        word = word_to_look_for(params, error.option_name)
        hint = f"`{path} --help-all` shows all options"
        if word is not None:
            hint = (
                f"`{path} --help {shown_value(word)}` shows the options about that, `{path} --help-all` all"
            )
        return UnknownOption(f"{path}: no option {typed}", suggest(params, error.option_name) or hint)
    if kind == "BadOptionUsage":
        hint = f"`{path} --help {error.option_name.lstrip('-')}` says what it takes"
    return ConfigurationError(f"{path}: {_sentence(error)}", hint)


def _sentence(error: ClickError) -> str:
    """The error's message on one line, without a full stop."""
    message = " ".join(error.format_message().split()).rstrip(".")
    return message[:1].lower() + message[1:]


class LazyGroup(typer.core.TyperGroup):
    """A group that imports each command on its first use."""

    def list_commands(self, ctx: ClickContext) -> List[str]:
        return list(COMMANDS)

    def get_command(self, ctx: ClickContext, cmd_name: str) -> Optional[ClickCommand]:
        command = COMMANDS.get(cmd_name.replace("_", "-"))
        if command is None:
            return None
        return _command(command)


def _module(known: Command) -> ModuleType:
    return importlib.import_module(f"ipucnn.commands.{known.module or known.function}")


def options_class(known: Command) -> Type[CommandOptions]:
    """Returns the class that declares a command's options."""
    of: Type[CommandOptions] = getattr(_module(known), known.options)
    return of


@functools.lru_cache(maxsize=None)
def _command(known: Command) -> ClickCommand:
    """Makes Typer's command of a command; cached for the process, because it takes as long as parsing ten times."""
    module, of = _module(known), options_class(known)

    def run(**params: PlainValue) -> None:
        getattr(module, known.function)(_read(known, params))

    # Typer's own classes of options differ between its versions; a signature is the same for all.
    specs = [*own_options(of), *run_options(of, known.name)]
    parameters = [_parameter(spec, help_of(spec, of, known.name)) for spec in specs]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = getattr(module, known.function).__doc__
    app = typer.Typer(add_completion=False)
    app.command(known.name, cls=RunCommand, context_settings=CONTEXT)(run)
    return typer.main.get_command(app)


def _read(known: Command, params: PlainDict) -> CommandOptions:
    typed = {name: value for name, value in params.items() if value not in (None, [])}
    return read_options(options_class(known), known.name, typed)


def parse_line(words: Sequence[str]) -> CommandOptions:
    """Returns the options of the command in a command line, without running it.

    Args:
        words: the name of the command, and what follows it.
    """
    known = COMMANDS[words[0]]
    context = _command(known).make_context(f"ipucnn {words[0]}", list(words[1:]))
    return _read(known, context.params)


def _parameter(spec: OptionSpec, help: str) -> inspect.Parameter:
    """Returns the parameter by which Typer knows an option; its value is a text, several texts, or a truth value."""
    is_list = spec.kind.is_list
    annotation: Any = Optional[List[str]] if is_list else Optional[str]
    details: PlainDict = {"help": help, "metavar": spec.metavar, "autocompletion": completer(spec)}
    if spec.argument:
        default = typer.Argument(... if spec.is_required else None, show_default=False, **details)
    else:
        flags = ["--" + key for key in spec.keys]
        details.update(rich_help_panel=spec.panel or None, show_default=False)
        if spec.is_bool:
            annotation, details["metavar"] = Optional[bool], None
            # Each name with the one that switches it off.
            off = (*spec.off_flags, *("",) * len(flags))
            flags = [f"{on}/{no}" if no else on for on, no in zip(flags, off)]
            if spec.name == "verbose":
                flags += VERBOSE[1:]
        default = typer.Option(None, *flags, **details)
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def print_help(line: CommandLine) -> None:
    """Prints the help that a command line asks for.

    Raises:
        ConfigurationError: nothing is about the words.
    """
    from ipucnn.config.help_page import print_command_help

    known, words = line.command, line.help or ()
    if known is None:
        print_matches(" ".join(words))
        return
    command = _command(known)
    # Parsing, even of nothing, would load Typer's converters, which takes 0.3 s.
    context = typer.Context(command, info_name=f"ipucnn {known.name}")
    common = () if line.is_all_help else tuple(known.common.split())
    print_command_help(command, context, common, words, known.examples)


def print_matches(words: str) -> None:
    """Prints the commands, and the options of all commands, whose help contains the words, and methods of their name.

    Raises:
        ConfigurationError: no command or option matches.
    """
    from ipucnn.config.help_page import HelpRow, find_options, has_word, method_rows, option_row, print_page
    from ipucnn.config.parameters import SYMBOLS, methods_about

    root = build_root(with_completion=False)
    ctx = root.make_context("ipucnn", [], resilient_parsing=True)
    commands, options = [], {}  # type: List[HelpRow], Dict[Tuple[str, str], Tuple[HelpRow, List[str]]]
    for known in COMMANDS.values():
        about = " ".join(f"{known.name} {known.summary} {known.examples_text} {known.synonyms}".split())
        if all(has_word(about, word) for word in words.split()):
            commands.append(HelpRow(known.name, "", known.summary))
        command = root.get_command(ctx, known.name)
        for param in find_options(command.params, words):
            row = option_row(param)
            options.setdefault((row.names, row.help), (row, []))[1].append(known.name)
    methods = methods_about(words, tuple(SYMBOLS))
    if not commands and not options and not methods:
        raise ConfigurationError(
            f"ipucnn --help {shown_value(words)}: no command and no option is about that",
            "`ipucnn --help` lists the commands, docs/glossary.md explains the words",
        )
    rows = [
        HelpRow(row.names, row.metavar, f"{', '.join(takers)}: {row.help}")
        for row, takers in options.values()
    ]
    topic = shown_value(words)
    print_page(
        "ipucnn COMMAND [OPTIONS]",
        "",
        [
            (f"Commands about {topic}", commands),
            (f"Options about {topic}", rows),
            *((method.title, method_rows(method)) for method in methods),
        ],
    )


def build_root(with_completion: bool = True) -> ClickCommand:
    """Builds the root command, ready to parse.

    Typer loads its value converters, which takes 0.3 s, if a command has an option whose value is not a bool.
    Typer's own help and completion options are of that kind, so ``cli`` prints the help itself, and only
    ``with_completion`` adds the completion options.
    """
    app = typer.Typer(cls=LazyGroup, name="ipucnn", add_help_option=False, add_completion=with_completion)

    @app.callback(help=ABOUT)
    def root(
        version: bool = typer.Option(False, VERSION, help="Print the version."),
        verbose: bool = typer.Option(False, *VERBOSE, help="Say more on stderr."),
    ) -> None:
        # ``command_line`` reads both; they are here for the completion of the shell.
        pass

    return typer.main.get_command(app)


# The Typer command class: it takes option values as users of argparse type them, and prints its own help page.
#
# Arguments are rewritten before Typer parses them: ``--a_b`` becomes ``--a-b``; ``--validation False`` becomes
# ``--no-validation``; ``--pipeline-splits A B C`` becomes one flag per value, up to the next ``-`` option.


class RunCommand(typer.core.TyperCommand):
    """A command that takes options with ``_`` or ``-``, booleans with a value, and lists separated by spaces.

    Values are as typed: their declarations convert them.  Typer's own conversion would take 0.2 s to import and set
    up, and would change nothing.
    """

    def parse_args(self, ctx: ClickContext, args: List[str]) -> List[str]:
        if ctx.resilient_parsing:  # completion
            return list(super().parse_args(ctx, args))
        table = {option: param for param in self.params for option in (*param.opts, *param.secondary_opts)}
        try:
            given, rest, order = self.make_parser(ctx).parse_args(rewrite(args, table))
        except USAGE_ERROR as error:
            # Click does not set the context of some usage errors; the hint needs it.
            error.ctx = error.ctx or ctx
            raise user_error(error) from None
        if rest:
            extra = " ".join(map(shown_value, rest))
            raise ConfigurationError(
                f"{ctx.command_path}: got unexpected extra arguments ({extra})",
                f"`{ctx.command_path} --help` lists the options",
            )
        for param in self.params:
            value = given.get(param.name)
            # The value of an option that was not typed differs between versions of Click.
            if not isinstance(value, (str, bool, list, tuple)) or value == ():
                if param.required:
                    from ipucnn.config.help_page import usage_line

                    raise ConfigurationError(
                        f"{ctx.command_path}: missing argument '{param.metavar}'",
                        f"usage: {usage_line(self, ctx)}",
                    )
                value = None
            ctx.params[param.name] = list(value) if isinstance(value, tuple) else value
            times = order.count(param)
            if times > 1 and not getattr(param, "multiple", False) and param.name != "verbose":
                line = (
                    f"note: {param.opts[0]} is given {times} times: the last one counts, {shown_value(value)}"
                )
                print(line, file=sys.stderr, flush=True)
        return []


def rewrite(args: List[str], table: Dict[str, ClickParameter]) -> List[str]:
    """Rewrites the arguments into the plain forms that Typer parses.

    Args:
        args: the arguments as typed.
        table: every option string of the command -> its parameter.

    Raises:
        ConfigurationError: VALUE of ``--flag=VALUE`` is neither true nor false.
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
            typed, rest = ([value], rest) if value is not None else items(rest)
            for item in typed or [""]:
                plain += [name, item]
        elif value is not None or getattr(param, "is_flag", False) or not rest:
            plain.append(name + equals + text)
        else:
            plain += [name, rest.pop(0)]
    return plain


def _boolean(
    name: str, value: Optional[str], param: ClickParameter, rest: List[str]
) -> Tuple[str, List[str]]:
    """The positive or negative form of a boolean option, and the remaining arguments."""
    if value is None and rest and rest[0].lower() in (*TRUE_WORDS, *FALSE_WORDS):
        value, rest = rest[0], rest[1:]
    word = "true" if value is None else value.lower()
    if word not in (*TRUE_WORDS, *FALSE_WORDS):
        raise ConfigurationError(
            f"{name} {shown_value(value)}: must be True or False",
            f"{param.opts[0]} or {param.secondary_opts[0]}",
        )
    is_positive = (word in TRUE_WORDS) == (name in param.opts)
    return (param.opts if is_positive else param.secondary_opts)[0], rest
