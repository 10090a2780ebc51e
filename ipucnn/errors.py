"""Errors that a user can cause, each with a hint and an exit code.

Only ``ipucnn.cli.main`` prints them, as ``error: what`` and ``hint: what to type`` on stderr, without a traceback.
Any other exception that reaches it is a bug (exit code 1).
"""

# Signal handlers are installed before anything slow is imported, and they need this module; ``typing`` and
# ``difflib`` are slow.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Optional

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_DATA = 3
EXIT_INFEASIBLE = 4
EXIT_THRESHOLD = 5
EXIT_MISSING = 6
EXIT_WORKERS = 7
# The exit code of a signal is 128 plus its number, as shells report it.
EXIT_SIGHUP = 129
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class UserError(Exception):
    """An error that a user can cause.

    Args:
        message: one line: the problem, the offending value and the reason.
        hint: one line: what to type or change; None if nothing helps.

    Attributes:
        traceback: the lines of Python's traceback to print before the message; "" for none.
    """

    exit_code = EXIT_USAGE
    traceback = ""

    def __init__(self, message: str, hint: "Optional[str]" = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """The message and, on a second line, the hint; Python prints this for an uncaught error."""
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ConfigurationError(UserError):
    """A flag, a YAML key or a combination of them is wrong.

    Args:
        unused: name of the typed option that would be accepted from a preset, but has no effect; "" for other errors.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: "Optional[str]" = None, unused: str = "") -> None:
        super().__init__(message, hint)
        self.unused = unused


class UnknownOption(ConfigurationError):
    """A command has no option of that name."""


class DataError(UserError):
    """A data set, image, checkpoint or weights file is absent, damaged or of the wrong kind.

    Args:
        code: identifier of the finding in the report of ``verify-dataset``.
    """

    exit_code = EXIT_DATA

    def __init__(self, message: str, hint: "Optional[str]" = None, code: str = "unusable") -> None:
        super().__init__(message, hint)
        self.code = code


class NoSpaceError(DataError):
    """A disk or a quota is full."""


class InfeasibleError(UserError):
    """No plan exists, or the model does not fit."""

    exit_code = EXIT_INFEASIBLE


class OutOfMemoryError(InfeasibleError):
    """Work did not fit into the memory of the host or of its GPUs."""


class ThresholdError(UserError):
    """A result missed its required threshold."""

    exit_code = EXIT_THRESHOLD


class MissingError(UserError):
    """A device or an optional package that the command needs is missing."""

    exit_code = EXIT_MISSING


class WorkersError(UserError):
    """Another process of the run was lost, or continues this run."""

    exit_code = EXIT_WORKERS


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether Python or TensorFlow could not allocate memory."""
    import sys

    if system_error_in(error) is not None:
        return False  # TensorFlow's type of a full disk is that of exhausted memory

    # Without TensorFlow the error is none of its errors; while it is imported it may have none yet.
    of_tensorflow = getattr(sys.modules.get("tensorflow"), "errors", None)
    exhausted = getattr(of_tensorflow, "ResourceExhaustedError", MemoryError)
    return isinstance(error, (MemoryError, OutOfMemoryError, exhausted))


def system_error_in(error: BaseException) -> "Optional[OSError]":
    """Returns the system's error about a file that TensorFlow reports as ``PATH; REASON``; None for any other error."""
    import errno
    import os

    path, semicolon, reason = str(getattr(error, "message", "")).rpartition("; ")
    number = next((number for number in errno.errorcode if os.strerror(number) == reason), None)
    return OSError(number, reason, path) if semicolon and number is not None else None


class MemoryErrors:
    """A block that converts exhausted memory; the outermost block knows best which options the user has.

    Args:
        message: the work that does not fit.
        hint: the option to change.

    Raises:
        OutOfMemoryError: memory ran out within the block.
    """

    def __init__(self, message: str, hint: str) -> None:
        self._error = OutOfMemoryError(message, hint)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: "Optional[BaseException]", traceback: object) -> None:
        if error is not None and is_out_of_memory(error):
            raise self._error from error


def text_of(error: BaseException) -> str:
    """The text of an error, for use in another message, without a terminal's colours; for a ``UserError`` its message
    without the hint."""
    import re

    return error.message if isinstance(error, UserError) else re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def did_you_mean(name: str, choices: "Iterable[str]", cutoff: float = 0.6) -> "Optional[str]":
    """Returns ``did you mean 'a' or 'b'?`` for the choices closest to ``name``, or None if none is close.

    Args:
        cutoff: least similarity of two names: the share of characters that they have in common, in order.
    """
    if len(name) > 200:
        return None  # no choice is that long, and comparing takes time
    import difflib

    names = list(choices)
    folded = {c.lower().replace("_", "-"): c for c in names}
    close = difflib.get_close_matches(name.lower().replace("_", "-"), list(folded), n=3, cutoff=cutoff)
    if not close:
        return None
    return "did you mean " + " or ".join(f"'{folded[c]}'" for c in close) + "?"
