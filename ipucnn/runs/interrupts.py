"""SIGINT and SIGTERM end a run at the next slice with a checkpoint; a second one ends it at once."""

import signal
import threading
from types import FrameType
from typing import Any, Dict, Optional

from ipucnn.errors import EXIT_SIGINT, EXIT_SIGTERM, UserError

_EXIT_CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}


class Interrupted(UserError):
    """The run was ended by a signal after it saved a checkpoint."""

    def __init__(self, exit_code: int, message: str, hint: Optional[str]) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class InterruptGuard:
    """While active, notes the first SIGINT or SIGTERM in ``exit_code`` instead of raising."""

    def __init__(self) -> None:
        self.exit_code: Optional[int] = None
        self._former: Dict[Any, Any] = {}

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if self.exit_code is not None:
            raise SystemExit(_EXIT_CODES[signal.Signals(number)])
        self.exit_code = _EXIT_CODES[signal.Signals(number)]

    def __enter__(self) -> "InterruptGuard":
        if threading.current_thread() is threading.main_thread():
            for number in _EXIT_CODES:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
