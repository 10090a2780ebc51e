"""The root Typer group: knows the commands' names, and imports a command when it is asked for."""

import importlib
from typing import Any, List

import typer
import typer.core

from ipucnn import __version__
from ipucnn.command_table import ABOUT, COMMANDS
from ipucnn.config.arguments import RunCommand
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import shown_value

CONTEXT = {"help_option_names": ["--help", "-h"]}


class LazyGroup(typer.core.TyperGroup):
    """A group whose commands are imported one by one, on use."""

    def list_commands(self, ctx: Any) -> List[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name.replace("_", "-"))
        if command is None:
            return None
        module = importlib.import_module(f"ipucnn.commands.{command.module}")
        app = typer.Typer(add_completion=False)
        app.command(command.name, cls=RunCommand, context_settings=CONTEXT)(getattr(module, command.function))
        return typer.main.get_command(app)

    def resolve_command(self, ctx: Any, args: List[str]) -> Any:
        name = args[0]
        if name.replace("_", "-") not in COMMANDS and not ctx.resilient_parsing:
            raise ConfigurationError(
                f"no command '{shown_value(name)}'",
                did_you_mean(name, COMMANDS) or "the commands are " + ", ".join(COMMANDS),
            )
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ipucnn {__version__}")
        raise typer.Exit()


def build_root(with_completion: bool = True) -> Any:
    """The root command, ready to parse.

    Typer loads its value converters (0.3 s) for every option whose value is not a bool when it parses.  Its
    help and completion options are of that kind: ``cli`` prints the help, ``with_completion`` adds the rest.
    """
    app = typer.Typer(cls=LazyGroup, name="ipucnn", add_help_option=False, add_completion=with_completion)

    @app.callback(help=ABOUT)
    def root(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
        verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more on stderr."),
    ) -> None:
        # RunCommand hands ``verbose`` on to the command.
        pass

    return typer.main.get_command(app)
