"""Handles SIGINT, SIGTERM and SIGHUP: each ends the program cleanly, with the signal's exit code, at any moment.

A signal is noted and, unless something has to be saved first, raised as :class:`Interruption`.  That is a
``KeyboardInterrupt``, which most libraries do not catch.  NumPy's C code converts it into an ImportError, so while a
signal is noted, any exception from importing, building or tracing counts as the interruption (:class:`InterruptGuard`,
``ipucnn.cli``).  Python drops exceptions in finalizers: :func:`check` or a second signal ends the work after that.

Signals that were ignored when this process started (``nohup``, background jobs of a script) stay ignored.
"""

import contextlib
import os
import signal
import sys

from ipucnn.errors import EXIT_SIGHUP, EXIT_SIGINT, EXIT_SIGTERM, UserError

# The handlers are installed before anything slow is imported, and ``typing`` is slow.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any, Callable, Dict, Iterator, NoReturn, Optional, Type

_EXIT_CODES: "Dict[int, int]" = {
    signal.SIGINT: EXIT_SIGINT,
    signal.SIGTERM: EXIT_SIGTERM,
    signal.SIGHUP: EXIT_SIGHUP,
}
# The first signal is noted, the second is raised even if something is to be saved, the third ends the process.
_SIGNALS_TO_DIE = 3


class Interruption(KeyboardInterrupt):
    """The exception that a signal raises.

    Attributes:
        exit_code: exit code of the signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"interrupted (exit code {exit_code})")
        self.exit_code = exit_code


class Interrupted(UserError):
    """A signal ended the command; the message says how far it got and whether that is saved."""

    def __init__(self, exit_code: int, message: str, hint: "Optional[str]" = None) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class _State:
    """The signals that this process received, and the effect of the next one."""

    exit_code: "Optional[int]" = None
    count = 0
    deferred = False
    # The handlers are installed for the whole process, not only inside an InterruptGuard.
    listens = False
    # There is nothing to clean up, so a signal ends the process immediately and raises nothing.
    at_once = False
    # File descriptor for last messages, which bypass Python's streams.
    stderr = 2
    # Ends the process at once: (exit code) -> None.
    end: "Callable[[int], object]" = staticmethod(os._exit)


_state = _State()


def noted() -> "Optional[int]":
    """The exit code of the noted signal; None if there was none."""
    return _state.exit_code


def is_command() -> bool:
    """Whether this process was started for one command, so that nothing else runs in it."""
    return _state.listens


def note(code: int) -> None:
    """Notes a signal that another process of the run received, as if this process had received it.

    Args:
        code: exit code of the signal.
    """
    if _state.exit_code is None:
        _state.exit_code = code
        _state.count += 1


def exit_process(code: "Optional[int]") -> "NoReturn":
    """Ends the process, whose streams are already flushed; skips clean-up that is unsafe after a signal.

    Args:
        code: exit code; None is 0.
    """
    if _state.exit_code is not None:
        # After a signal, half-imported libraries and waiting threads cannot be cleaned up safely.
        os._exit(code or 0)
    sys.exit(code)


def check() -> None:
    """Ends work that a library continued after a signal.

    Raises:
        Interruption: a signal was noted, and nothing has to be saved first.
    """
    if _state.exit_code is not None and not _state.deferred:
        raise Interruption(_state.exit_code)


def _handle(number: int, frame: "Optional[FrameType]") -> None:
    code = _EXIT_CODES[number]
    _state.count += 1
    is_first = _state.exit_code is None
    if is_first:
        _state.exit_code = code
    if _state.at_once or _state.count >= _SIGNALS_TO_DIE:
        _end_at_once(code)
    if not (is_first and _state.deferred):
        raise Interruption(code)


def _end_at_once(code: int) -> "NoReturn":
    write_to_stderr("interrupted\n")
    _state.end(code)
    os._exit(code)


def end_with(end: "Callable[[int], object]") -> None:
    """Ends the process at once by this function of the exit code, in place of ``os._exit``."""
    _state.end = end


def write_to_stderr(text: str) -> None:
    """Writes to stderr, bypassing Python's streams: for messages before the process ends, from any thread."""
    with contextlib.suppress(OSError):
        os.write(_state.stderr, text.encode())


@contextlib.contextmanager
def stderr_kept_at(descriptor: int) -> "Iterator[None]":
    """Sends last messages to this file descriptor inside the block, while descriptor 2 is redirected."""
    previous, _state.stderr = _state.stderr, descriptor
    try:
        yield
    finally:
        _state.stderr = previous


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def listen() -> None:
    """Installs the handlers for the whole process; until :func:`begin`, signals end it immediately."""
    _state.at_once = _state.listens = True
    for number in _EXIT_CODES:
        if not _is_ignored(number):
            signal.signal(number, _handle)
    sys.excepthook = _excepthook
    sys.unraisablehook = _unraisablehook


def reinstall_handlers() -> None:
    """Reinstalls the handlers after a library's C code replaced them, which Python does not notice."""
    for number in _EXIT_CODES:
        if signal.getsignal(number) is _handle:
            signal.signal(number, _handle)


@contextlib.contextmanager
def left_to_the_system(seconds: int) -> "Iterator[None]":
    """Restores the system's own signal actions inside the block, and ends the process after ``seconds`` (SIGALRM).

    It is for C code that blocks Python while it waits for other processes, where Python's handlers would never run.
    There must be nothing to save.
    """
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    check()
    numbers = [number for number in _EXIT_CODES if signal.getsignal(number) is _handle]
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in (*numbers, signal.SIGALRM)}
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def begin() -> None:
    """Makes signals raise from now on, because there may be something to clean up."""
    _state.at_once = False


def finish() -> None:
    """Ignores signals from now on: the work is done and the exit code is known.

    Python removes its handlers before it ends, and TensorFlow takes a while to end.
    """
    for number in _EXIT_CODES:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_IGN)


def _excepthook(
    kind: "Type[BaseException]", error: BaseException, traceback: "Optional[TracebackType]"
) -> None:
    """Prints no interruption that C code dropped (``PyErr_Print``), because it is noted."""
    if not isinstance(error, Interruption):
        sys.__excepthook__(kind, error, traceback)


def _unraisablehook(unraisable: "Any") -> None:
    """Prints no interruption that Python dropped in a finalizer or a callback, because it is noted."""
    if not isinstance(unraisable.exc_value, Interruption):
        sys.__unraisablehook__(unraisable)


_NOTHING_DONE = "interrupted before the first weight update of this command; it trained nothing"


class InterruptGuard:
    """Guards a run: any exception that ends it after a signal, with nothing to save, becomes :class:`Interrupted`.

    Args:
        hint: what to do if the run ends before there is anything to save.
    """

    def __init__(self, hint: "Optional[str]" = None) -> None:
        self._hint = hint
        self._former: Dict[int, Any] = {}

    @property
    def exit_code(self) -> "Optional[int]":
        """The exit code of the noted signal; None if there was none."""
        return _state.exit_code

    @property
    def is_set(self) -> bool:
        """Whether a signal was noted."""
        return _state.exit_code is not None

    def defer(self) -> None:
        """Defers signals from now on, because there is something to save: the first is noted, the second raised."""
        _state.deferred = True

    def end_before_training(self) -> "NoReturn":
        """Ends a run that has trained nothing yet; with several instances, another one may have received the signal.

        Raises:
            Interrupted: always.
        """
        raise Interrupted(_state.exit_code or EXIT_SIGTERM, _NOTHING_DONE, self._hint)

    def __enter__(self) -> "InterruptGuard":
        import threading

        if threading.current_thread() is threading.main_thread():
            for number in _EXIT_CODES:
                if not _is_ignored(number):
                    self._former[number] = signal.signal(number, _handle)
        return self

    def __exit__(
        self,
        kind: "Optional[Type[BaseException]]",
        error: "Optional[BaseException]",
        traceback: "Optional[TracebackType]",
    ) -> None:
        code, was_deferred = _state.exit_code, _state.deferred
        _state.deferred = False
        for number, handler in self._former.items():
            # None: the handler is not Python's but, for example, MPI's; Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        count = _state.count
        if not _state.listens:
            # The exception reports the signal; later work in this process was not interrupted.
            _state.exit_code, _state.count = None, 0
        if was_deferred and isinstance(error, UserError) and not isinstance(error, Interrupted):
            # An error while the run was saved determines the exit code.
            _state.exit_code = None
        if error is None or code is None or isinstance(error, (Interrupted, GeneratorExit)):
            return
        if not was_deferred:
            raise Interrupted(code, _NOTHING_DONE, self._hint) from None
        if isinstance(error, Interruption) or (count > 1 and not isinstance(error, UserError)):
            raise Interrupted(code, "interrupted at once; what was not saved is lost", self._hint) from None
