"""Errors of the Poplar SDK's TensorFlow as errors of this program; which ones are known is in ``error_cases``."""

import contextlib
import re
from typing import Iterator, Optional, Tuple

from ipucnn.errors import UserError
from ipucnn.sessions.poplar.error_cases import CASES, Case, ErrorContext, Match

__all__ = ["CASES", "Case", "ErrorContext", "poplar_errors", "recognise", "translate", "translate_output"]


def recognise(text: str, classes: Tuple[str, ...]) -> Optional[Tuple[Case, Match]]:
    """The case a message belongs to.

    Args:
        text: of the exception, or what a process wrote on stderr.
        classes: names of the exception's class and its bases; empty for stderr, which may hold any case.
    """
    for case in CASES:
        if classes and not set(classes) & set(case.classes):
            continue
        found = re.search(case.pattern, text)
        if found is not None:
            groups = {key: value for key, value in found.groupdict().items() if value is not None}
            rest = text[found.end() :].lstrip(" :").partition("\n")[0].strip()
            return case, Match(groups, text, rest)
    return None


def translate(exception: BaseException, context: Optional[ErrorContext] = None) -> Optional[UserError]:
    """The error for the user, or None for what is not known here (a bug, or somebody else's error).

    Args:
        exception: as the SDK's TensorFlow raised it; AutoGraph's "in user code:" around a text does not matter.
        context: makes hints better.
    """
    if isinstance(exception, UserError):
        return None
    classes = tuple(
        c.__name__ for c in type(exception).__mro__ if c not in (object, BaseException, Exception)
    )
    found = recognise(str(exception), classes)
    if found is None:
        return None
    case, match = found
    return case.make(match, context or ErrorContext())


def translate_output(stderr: str) -> Optional[UserError]:
    """The error for the user from what a process wrote before it aborted, or None."""
    found = recognise(stderr, ())
    return None if found is None else found[0].make(found[1], ErrorContext())


@contextlib.contextmanager
def poplar_errors(context: Optional[ErrorContext] = None) -> Iterator[None]:
    """Turns known errors of the SDK into errors of this program; others pass.

    Raises:
        UserError: with the SDK's exception as its cause.
    """
    try:
        yield
    except Exception as exception:
        error = translate(exception, context)
        if error is None:
            raise
        raise error from exception
