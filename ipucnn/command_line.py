"""A command line as one value: the command, its words, the help that is asked for, ``-v``.  Imports no Typer."""

import re
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from ipucnn.command_table import COMMANDS, Command
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import shown_value

HELP, ALL_HELP = ("--help", "-h"), "--help-all"
HELP_WORDS = (*HELP, ALL_HELP)
"""The words that ask for help."""
VERBOSE = ("--verbose", "-v")
VERSION = "--version"
_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?")


@dataclass(frozen=True)
class CommandLine:
    """What was typed after ``ipucnn``.

    Attributes:
        args: all words.
        name: the first word that is not ``-v``; empty if there is none.
        words: the words that follow it.
        help: the words that follow ``--help`` or ``--help-all``; None if no help is asked for.
        is_all_help: whether all options are to be shown, not only the common ones.
        is_verbose: whether ``-v`` was typed.
    """

    args: Tuple[str, ...]
    name: str
    words: Tuple[str, ...]
    help: Optional[Tuple[str, ...]]
    is_all_help: bool
    is_verbose: bool

    @property
    def command(self) -> Optional[Command]:
        """The command; None if the line names none that exists."""
        return COMMANDS.get(self.name.replace("_", "-"))

    def check_command(self) -> None:
        """Refuses an unknown command.

        Raises:
            ConfigurationError: the hint has the commands.
        """
        if self.name and not self.name.startswith("-") and self.command is None:
            raise ConfigurationError(
                f"no command '{shown_value(self.name)}'",
                did_you_mean(self.name, COMMANDS) or "the commands are " + ", ".join(COMMANDS),
            )


def read_command_line(args: Sequence[str]) -> CommandLine:
    """Reads the words after ``ipucnn``; ``ipucnn --help COMMAND`` becomes ``ipucnn COMMAND --help``."""
    options = list(args[: args.index("--")] if "--" in args else args)
    is_verbose = not set(VERBOSE).isdisjoint(options)
    position = next((number for number, word in enumerate(args) if word not in VERBOSE), len(args))
    name, words = (args[position], tuple(args[position + 1 :])) if position < len(args) else ("", ())
    asked = next((number for number, word in enumerate(options) if word in HELP_WORDS), None)
    if not name:
        return CommandLine(tuple(args), "", (), (), False, is_verbose)
    if asked is None:
        return CommandLine(tuple(args), name, words, None, False, is_verbose)
    is_all = options[asked] == ALL_HELP
    if asked > position:
        topic, _ = items([word for word in options[asked + 1 :] if word not in VERBOSE])
        return CommandLine(tuple(args), name, words, tuple(topic), is_all, is_verbose)
    topic = [word for word in args[asked + 1 :] if not word.startswith("-")]
    line = CommandLine(tuple(args), "", (), tuple(topic), is_all, is_verbose)
    of_command = CommandLine(tuple(args), topic[0], (), (), is_all, is_verbose) if len(topic) == 1 else line
    return of_command if of_command.command is not None else line


def items(rest: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Returns the values of a list option, up to the next option, and the remaining arguments."""
    count = 0
    while count < len(rest) and (not rest[count].startswith("-") or _NEGATIVE_NUMBER.fullmatch(rest[count])):
        count += 1
    return list(rest[:count]), list(rest[count:])
