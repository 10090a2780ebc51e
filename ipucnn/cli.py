"""The command line: finds the command, renders errors, sets exit codes.

Only the command that runs is imported.  The root help page and ``--version`` do not even need Typer.
"""

import contextlib
import errno
import os
import sys
from typing import Any, Iterable, Iterator, List, NoReturn, Optional, Sequence, TextIO, Tuple

from ipucnn import __version__, interrupts
from ipucnn.command_line import VERBOSE, VERSION, CommandLine, read_command_line
from ipucnn.command_table import Command, print_root_help
from ipucnn.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_SIGINT,
    ConfigurationError,
    MissingError,
    UserError,
    text_of,
)
from ipucnn.sessions.group import check_starter, find_group, find_launched, is_connected, leave
from ipucnn.sessions.role import ALONE, Role, find_role
from ipucnn.text import printable, shown_value

COMPLETE_VARIABLE = "_IPUCNN_COMPLETE"


def main(args: Optional[Sequence[str]] = None) -> NoReturn:
    """Runs the command line and exits with its exit code."""
    interrupts.listen()
    _make_streams_usable()
    _take_programs_from_fixed_folders()
    code: Any
    try:
        interrupts.begin()
        code = run(list(sys.argv[1:] if args is None else args))
        interrupts.finish()
    except SystemExit as ending:
        code = ending.code
    except interrupts.Interruption as interruption:
        # The signal arrived while the command's last message was written.
        code = interruption.exit_code
    interrupts.finish()
    _flush_streams()
    interrupts.exit_process(leave(int(code or 0), *_last_error))


def _take_programs_from_fixed_folders() -> None:
    """Removes relative folders from PATH: anybody may have put programs into the current folder.

    Libraries run programs by name: Python's ``platform`` runs ``uname``, for example, and ``ctypes`` a compiler.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    fixed = [folder for folder in folders if os.path.isabs(folder)]
    if fixed != folders:
        os.environ["PATH"] = os.pathsep.join(fixed or ["/usr/bin", "/bin"])


def _make_streams_usable() -> None:
    """Wraps the standard streams so that work continues if they are closed, lose their reader, or lack characters."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next opened file gets this number, and the libraries' output would go into it.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    sys.stdout = _Stream(sys.stdout, has_result=True)  # type: ignore[assignment]
    sys.stderr = _Stream(sys.stderr, has_result=False)  # type: ignore[assignment]


# The reader is gone for good: a pipe without a reader, a closed terminal, a lost network file.
_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENOTCONN, errno.ESTALE)


class _Stream:
    """A standard stream that discards all further output once its reader is gone.

    Args:
        stream: Python's stream.
        has_result: True for stdout: an error such as a full disk is raised as a ``DataError``.  For stderr it is
            ignored, because messages are not worth ending the work, and later ones may be written again.
    """

    def __init__(self, stream: TextIO, has_result: bool) -> None:
        self._stream, self._has_result = stream, has_result

    def write(self, text: str) -> int:
        with self._guarded():
            return self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._guarded():
            self._stream.flush()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:
                self.silence()
            elif self._has_result:
                from ipucnn.filesystem import error_of

                self.silence()
                raise error_of(error, "standard output", "cannot be written") from error

    def silence(self) -> None:
        """Discards the buffer and all further output."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _flush_streams() -> None:
    """Flushes the streams; if that fails, silences them, because Python would try again and exit with its own code."""
    for stream in (sys.stdout, sys.stderr):
        underlying = getattr(stream, "_stream", stream)
        try:
            underlying.flush()
        except OSError:
            stream.silence()  # type: ignore[union-attr]


def run(args: List[str]) -> int:
    """Runs the command line and returns the exit code."""
    line, role = read_command_line(args), ALONE
    try:
        role = find_role()
        with role.output():
            code = _dispatch(line)
            sys.stdout.flush()  # results are buffered, so errors of writing them can appear only now
    except KeyboardInterrupt as interruption:
        return _interrupted(getattr(interruption, "exit_code", EXIT_SIGINT), role)
    except Exception as error:
        if interrupts.noted() is not None and not isinstance(error, interrupts.Interrupted):
            return _interrupted(EXIT_SIGINT, role)
        return _report(error, line, role)
    return code if interrupts.noted() is None else _interrupted(code, role)


def _prints(role: Role, error: Optional[UserError] = None) -> bool:
    """Returns whether this process prints an error, or whether another one prints it."""
    if is_connected() or not isinstance(error, (MissingError, _Bug)):
        return role.prints_errors
    # The others are not told, and need not have the same bug.
    return role.prints_own_errors or isinstance(error, _Bug)


class _Bug(UserError):
    """An error that no user caused."""

    exit_code = EXIT_BUG


def _report(error: Exception, line: CommandLine, role: Role) -> int:
    """Prints an error and returns the exit code; a bug, and with -v any error of Python, comes with a traceback."""
    user_error: Optional[UserError] = error if isinstance(error, UserError) else None
    if user_error is None:
        from ipucnn.filesystem import user_error_of

        user_error = user_error_of(error, _smaller(line.command))
        if user_error is None or line.is_verbose:
            import traceback

            user_error = user_error or _Bug("this is a bug in ipucnn; the lines above say where")
            user_error.traceback = "".join(
                traceback.format_exception(type(error), error, error.__traceback__)
            )
        user_error.__cause__ = error
    _print_error(user_error, line.is_verbose, _prints(role, user_error))
    return user_error.exit_code


def _smaller(command: Optional[Command]) -> str:
    """Returns the options of the command that reduce the memory it needs, for a hint."""
    from ipucnn.config.options import specs_for

    if command is None or command.name == "verify-dataset":
        return ""  # it checks images one by one, in their own size
    flags = {spec.name: spec.flag for spec in specs_for(command.name)}
    batch = flags.get("micro_batch_size", flags.get("validation_micro_batch_size"))
    return " or ".join(filter(None, (batch, flags.get("image_size"))))


def _interrupted(code: int, role: Role) -> int:
    """Prints "interrupted" and returns the exit code of the signal, or ``code`` if there was no signal."""
    signalled = interrupts.noted()
    if role.prints_errors:
        _print_line("interrupted")
    return code if signalled is None else signalled


def _dispatch(line: CommandLine) -> int:
    if COMPLETE_VARIABLE not in os.environ:
        line.check_command()
        if line.help is not None and not line.name.startswith("-"):
            if line.command is None and not line.help:
                print_root_help()
            else:
                from ipucnn.command_group import print_help

                print_help(line)
            return EXIT_OK
        if line.name == VERSION:
            print(f"ipucnn {__version__}")
            return EXIT_OK
        _join_processes(line.command)
    import typer

    from ipucnn.command_group import USAGE_ERROR, build_root, user_error

    first_argument, args = line.name, list(line.args)
    if line.command is not None:
        args = [line.command.name, *[VERBOSE[0]] * line.is_verbose, *line.words]
    root = build_root(with_completion=COMPLETE_VARIABLE in os.environ or "comp" in first_argument)
    is_completion = "completion" in first_argument
    if COMPLETE_VARIABLE in os.environ:
        root.main(args=args, prog_name="ipucnn", complete_var=COMPLETE_VARIABLE)
        return EXIT_OK
    try:
        with root.make_context("ipucnn", args) as ctx:
            root.invoke(ctx)
    except typer.Exit as ending:
        if not is_completion or not ending.exit_code:
            return int(ending.exit_code)
        # Typer detects the shell from the parent process; where it cannot, it exits without a hint.
        raise ConfigurationError(
            f"{shown_value(first_argument)}: the shell that this was started from is not known",
            "run it in bash, zsh, fish or PowerShell",
        ) from None
    except (OSError, RuntimeError, KeyError) as error:  # pathlib's errors if the home folder is not known
        if not is_completion:
            raise
        raise ConfigurationError(
            f"{shown_value(first_argument)}: the shell's settings cannot be written: {error}",
            "set HOME to a folder that you may write to; `ipucnn --show-completion` prints the lines to add by hand",
        ) from error
    except typer.Abort:
        return EXIT_SIGINT
    except USAGE_ERROR as error:
        raise user_error(error) from None
    return EXIT_OK


def _join_processes(command: Optional[Command]) -> None:
    """Connects the processes that a launcher of MPI started, for a command that they run together.

    Raises:
        ConfigurationError: the command runs in one process, and MPI's launcher or ``poprun`` started several.
        MissingError: MPI does not connect them.
    """
    if command is not None:
        check_starter(f"ipucnn {command.name}", command.in_processes, command.in_instances)
        if find_launched() is not None:
            find_group()


LONGEST_MESSAGE = 3000
"""Characters of a message; longer ones, which repeat input at length, are shortened."""


# Message, hint and traceback of the error that ended the command, for the other processes of MPI.
_last_error: Tuple[str, Optional[str], str] = ("", None, "")


def _print_error(error: UserError, verbose: bool, is_printed: bool) -> None:
    global _last_error
    _last_error = (_bounded(error.message), error.hint and _bounded(error.hint), error.traceback)
    if not is_printed:
        return
    sys.stderr.write(error.traceback)
    _print_line(f"error: {_last_error[0]}")
    if error.hint:
        _print_line(f"hint: {_last_error[1]}")
    cause = error.__cause__
    while verbose and cause is not None:
        _print_line(f"caused by: {type(cause).__name__}: {text_of(cause)}")
        cause = cause.__cause__


def _bounded(text: str) -> str:
    """Shortens a long message in its middle; long ones repeat input at length."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    return f"{text[:half]}...{text[-half:]} ({len(text):,} characters)"


def _print_line(line: str) -> None:
    """Prints a line on stderr; on a terminal the word before the colon is coloured."""
    line = printable(line)
    word, colon, rest = line.partition(":")
    if colon and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        colour = "31" if word == "error" else "36"
        line = f"\033[1;{colour}m{word}:\033[0m{rest}"
    print(line, file=sys.stderr, flush=True)
