"""Errors a user can cause, each with what to do about it, and the exit code it ends with.

``ipucnn.cli.main`` is the only place that renders them: ``error: what`` and ``hint: what to type`` on
stderr, no traceback.  Anything else that escapes is a bug (exit code 1).
"""

# Signals are listened for before anything slow is imported; this module is needed for it, ``typing`` and ``difflib``
# are slow.
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
# A signal's exit code is 128 and its number, as of what a shell reports.
EXIT_SIGHUP = 129
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class UserError(Exception):
    """An error a user can cause.

    Args:
        message: what is wrong, with the offending value and the reason; one line.
        hint: what to type or change; one line, or None where nothing helps.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: "Optional[str]" = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """The message and, on a second line, the hint: what Python shows where nobody catches the error."""
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ConfigurationError(UserError):
    """A flag, a YAML key or a combination of them is wrong."""

    exit_code = EXIT_USAGE


class DataError(UserError):
    """A data set, image, checkpoint or weights file is absent, damaged or of the wrong kind.

    Args:
        code: which finding of ``verify-dataset`` it is.
    """

    exit_code = EXIT_DATA

    def __init__(self, message: str, hint: "Optional[str]" = None, code: str = "unreadable") -> None:
        super().__init__(message, hint)
        self.code = code


class InfeasibleError(UserError):
    """No plan exists, or the model does not fit."""

    exit_code = EXIT_INFEASIBLE


class ThresholdError(UserError):
    """A result missed the threshold it was asked to reach."""

    exit_code = EXIT_THRESHOLD


class MissingError(UserError):
    """A device or an optional package that the command needs is not here."""

    exit_code = EXIT_MISSING


class WorkersError(UserError):
    """A worker did not come in time, or left before the end."""

    exit_code = EXIT_WORKERS


def text_of(error: BaseException) -> str:
    """What an error says, to be quoted in another one: of a ``UserError`` the message without its hint."""
    return error.message if isinstance(error, UserError) else str(error)


def did_you_mean(name: str, choices: "Iterable[str]", cutoff: float = 0.6) -> "Optional[str]":
    """Returns ``did you mean 'a' or 'b'?`` for the choices closest to ``name``, or None if none is close.

    Args:
        cutoff: the share of characters, in order, that two names have in common at least.
    """
    if len(name) > 200:
        return None  # no name is as long, and comparing takes time
    import difflib

    names = list(choices)
    folded = {c.lower().replace("_", "-"): c for c in names}
    close = difflib.get_close_matches(name.lower().replace("_", "-"), list(folded), n=3, cutoff=cutoff)
    if not close:
        return None
    return "did you mean " + " or ".join(f"'{folded[c]}'" for c in close) + "?"
