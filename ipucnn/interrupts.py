"""SIGINT, SIGTERM and SIGHUP: each ends the program in order, with the exit code that belongs to it, at any moment.

A signal is noted and, unless there is something to save first, raised as :class:`Interruption`.  That is a
``KeyboardInterrupt``, which libraries let pass.  Some do not: NumPy's C code makes an ImportError of it, Python itself
prints and drops what is raised in a finalizer.  So nothing relies on the exception alone.  What comes out of importing,
building and tracing while a signal is noted counts as the interruption (:class:`InterruptGuard`, ``ipucnn.cli``), and
:func:`check` ends what went on although it should have ended.

Signals that this process was started to ignore (``nohup``, the background of a script) stay ignored.
"""

import contextlib
import os
import signal
import sys

from ipucnn.errors import EXIT_SIGHUP, EXIT_SIGINT, EXIT_SIGTERM, UserError

# The program listens before it imports anything slow, and ``typing`` is slow.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any, Dict, Iterator, NoReturn, Optional, Type

_EXIT_CODES = {
    getattr(signal, name): code
    for name, code in (("SIGINT", EXIT_SIGINT), ("SIGTERM", EXIT_SIGTERM), ("SIGHUP", EXIT_SIGHUP))
    if hasattr(signal, name)
}
# How long after an interruption was dropped it is raised again: long enough for what dropped it to be over.
_AGAIN_S = 0.05
# The first is noted, the second raised whatever there is to save; who sends a third wants the process gone.
_SIGNALS_TO_DIE = 3


class Interruption(KeyboardInterrupt):
    """Raised where a signal came.

    Attributes:
        exit_code: that of the signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"interrupted (exit code {exit_code})")
        self.exit_code = exit_code


class Interrupted(UserError):
    """The command was ended by a signal; the message says what it had reached and whether that is saved."""

    def __init__(self, exit_code: int, message: str, hint: "Optional[str]" = None) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class _State:
    """What signals did to this process, and what the next one is to do."""

    exit_code: "Optional[int]" = None
    count = 0
    deferred = False
    # The whole process listens, not only what is inside an InterruptGuard.
    listens = False
    # There is nothing to clean up, so that nothing needs to be raised.
    at_once = False
    # A library has threads that would not survive the destructors of C++ at the end of the process.
    skips_destructors = False
    # Where what ends the process is told, past Python's streams.
    stderr = 2


_state = _State()


def noted() -> "Optional[int]":
    """The exit code of the signal that came; None if none did."""
    return _state.exit_code


def note(code: int) -> None:
    """Notes a signal that another process of the run got, as if it had come to this one.

    Args:
        code: its exit code.
    """
    if _state.exit_code is None:
        _state.exit_code = code
        _state.count += 1


def skip_destructors() -> None:
    """Has the process end, once its work is done and its exit functions have run, without the destructors of C++.

    TensorFlow's server can't be stopped from Python (``tensorflow/python/training/server_lib.py``: ``Server`` has no
    ``stop``), and a thread of its collectives that still runs when its destructor comes ends a process with SIGABRT
    ("terminate called without an active exception"), after everything was written.
    """
    _state.skips_destructors = True


def exit_process(code: "Optional[int]") -> "NoReturn":
    """Ends the process, whose streams are flushed, in the way that what it did allows.

    Args:
        code: its exit code; None is 0.
    """
    if _state.exit_code is not None:
        # What was cut off in its middle, half-imported libraries and threads that wait, would not end in order.
        os._exit(code or 0)
    if _state.skips_destructors:
        import atexit

        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code or 0)
    sys.exit(code)


def check() -> None:
    """Ends what a library went on with although a signal came.

    Raises:
        Interruption: a signal was noted, and nothing is to be saved first.
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
    tell("interrupted\n")
    os._exit(code)


def tell(text: str) -> None:
    """Writes to stderr, past Python's streams: for what ends the process at once, in any thread."""
    with contextlib.suppress(OSError):
        os.write(_state.stderr, text.encode())


@contextlib.contextmanager
def stderr_kept_at(descriptor: int) -> "Iterator[None]":
    """Inside it, file descriptor 2 leads elsewhere, and what ends the process is told at this one."""
    former, _state.stderr = _state.stderr, descriptor
    try:
        yield
    finally:
        _state.stderr = former


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def listen() -> None:
    """Takes over the signals of the whole process; until :func:`begin` they end it at once."""
    _state.at_once = _state.listens = True
    for number in _EXIT_CODES:
        if not _is_ignored(number):
            signal.signal(number, _handle)
    sys.excepthook = _excepthook
    sys.unraisablehook = _unraisablehook


def listen_again() -> None:
    """Takes the signals back from a library whose C code took them, which Python does not know of."""
    for number in _EXIT_CODES:
        if signal.getsignal(number) is _handle:
            signal.signal(number, _handle)


@contextlib.contextmanager
def left_to_the_system(seconds: int) -> "Iterator[None]":
    """Inside it, a signal ends the process without Python, and so does the time when it is over (SIGALRM).

    For C code that keeps Python from running while it waits for others: no handler of Python's would ever be called.
    Nothing must be there that has to be saved.
    """
    import threading

    alarm = getattr(signal, "SIGALRM", None)
    if alarm is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    check()
    numbers = [number for number in _EXIT_CODES if signal.getsignal(number) is _handle]
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (*numbers, alarm)}
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in former.items():
            signal.signal(number, handler)


def begin() -> None:
    """From here on there may be something to clean up: signals are raised."""
    _state.at_once = False


def finish() -> None:
    """The work is done and its exit code is known: signals change nothing any more.

    Python takes its handlers away before it ends, and TensorFlow takes a while to.
    """
    for number in (*_EXIT_CODES, getattr(signal, "SIGALRM", None)):
        if number is not None and signal.getsignal(number) in (_handle, _handle_again):
            signal.signal(number, signal.SIG_IGN)


def _excepthook(
    kind: "Type[BaseException]", error: BaseException, traceback: "Optional[TracebackType]"
) -> None:
    """C code prints an exception (``PyErr_Print``) before it replaces it by its own."""
    if isinstance(error, Interruption):
        _raise_again()
    else:
        sys.__excepthook__(kind, error, traceback)


def _unraisablehook(unraisable: "Any") -> None:
    """What is raised in a finalizer or a callback of the garbage collector goes no further."""
    if isinstance(unraisable.exc_value, Interruption):
        _raise_again()
    else:
        sys.__unraisablehook__(unraisable)


def _handle_again(number: int, frame: "Optional[FrameType]") -> None:
    check()


def _raise_again() -> None:
    try:
        signal.signal(signal.SIGALRM, _handle_again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    except (AttributeError, ValueError):
        pass  # no such timer on this system, or not the main thread: ``check`` is asked later


_NOTHING_DONE = "interrupted before the first weight update; nothing was trained"


class InterruptGuard:
    """Around a run: what ends it while a signal is noted and nothing is there to save becomes :class:`Interrupted`.

    Args:
        hint: what to do where the run is ended before there was anything to save.
    """

    def __init__(self, hint: "Optional[str]" = None) -> None:
        self._hint = hint
        self._former: Dict[int, Any] = {}

    @property
    def exit_code(self) -> "Optional[int]":
        """That of the signal that was noted, else None."""
        return _state.exit_code

    @property
    def is_set(self) -> bool:
        """Whether a signal was noted."""
        return _state.exit_code is not None

    def defer(self) -> None:
        """From here on there is something to save: a first signal is noted and not raised; a second one is."""
        _state.deferred = True

    def end_before_training(self) -> "NoReturn":
        """Ends the run where nothing was trained yet; of several instances another one may have got the signal.

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
            # None: a handler that is not Python's, of MPI for example; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        count = _state.count
        if not _state.listens:
            # The exception alone tells: what runs next in this process was not interrupted.
            _state.exit_code, _state.count = None, 0
        if was_deferred and isinstance(error, UserError) and not isinstance(error, Interrupted):
            # What went wrong while the run was saved is what its exit code tells.
            _state.exit_code = None
        if error is None or code is None or isinstance(error, (Interrupted, GeneratorExit)):
            return
        if not was_deferred:
            raise Interrupted(code, _NOTHING_DONE, self._hint) from None
        if isinstance(error, Interruption) or (count > 1 and not isinstance(error, UserError)):
            raise Interrupted(code, "interrupted at once; what was not saved is lost", self._hint) from None
