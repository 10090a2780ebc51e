"""SIGINT and SIGTERM end a run with a checkpoint; a second one ends it at once."""

import signal
import threading
from types import FrameType
from typing import Any, Dict, Optional

from ipucnn.errors import EXIT_SIGINT, EXIT_SIGTERM, UserError

_EXIT_CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}


class Interrupted(UserError):
    """The run was ended by a signal; what it had reached is saved."""

    def __init__(self, exit_code: int, message: str, hint: Optional[str]) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class InterruptGuard:
    """While active, a first SIGINT or SIGTERM raises :class:`Interrupted` at once, or is noted to be acted upon.

    Attributes:
        exit_code: that of the signal that was noted, else None.
        deferred: whether signals are noted; set once there is something to save first.
    """

    def __init__(self) -> None:
        self.exit_code: Optional[int] = None
        self.deferred = False
        self._former: Dict[Any, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a signal was noted."""
        return self.exit_code is not None

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        code = _EXIT_CODES[signal.Signals(number)]
        if self.exit_code is not None:
            raise SystemExit(code)
        self.exit_code = code
        if not self.deferred:
            raise Interrupted(code, "interrupted before the first weight update; nothing was trained", None)

    def __enter__(self) -> "InterruptGuard":
        if threading.current_thread() is threading.main_thread():
            for number in _EXIT_CODES:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
