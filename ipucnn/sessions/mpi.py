"""Connects the processes of one run through MPI: exchanges bytes and arrays, bounds every wait, and ends all together.

Calls of MPI never block, and are made under one lock.  A wait tests its request, at first without a pause, because the
others are often nearly there; then with pauses, so that processes that share cores do not take them from each other.
Between tests it sees signals, failures and silence.  A thread of each process answers the others that ask whether it
is alive, also while it compiles or writes a checkpoint.
"""

import atexit
import json
import os
import sys
import threading
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Protocol, Tuple

import numpy as np

from ipucnn import interrupts
from ipucnn.errors import EXIT_BUG, EXIT_WORKERS, MissingError, UserError, WorkersError
from ipucnn.text import printable

# The hint if a process is lost.
GO_ON = "continue with --resume, on any number of processes that fits"
INSTALL = (
    "pip install 'ipucnn[mpi]', or on a cluster mpi4py alone, built with the site's MPI: docs/cluster.md"
)
# After this time a wait asks who is alive; `--rank-timeout` changes it.
TIMEOUT_S = 600.0
# The time for an answer, which waits for the lock and for Python's interpreter lock.
ANSWER_S = 30.0
# The time for the others to end in the same way after one process ended with an error.
GRACE_S = 10.0
# The longest wait for MPI to connect the processes.
CONNECT_S = 600
# The tests of a request before the first pause; MPI moves data only while a request is tested.
_TESTS = 200
# A pause is this share of the time waited so far, within limits, so a wait ends at most so much too late.
_PAUSE, _SHORTEST_S, _LONGEST_S = 0.02, 2e-5, 1e-3
_NOTICES_S = 0.1
# Notices between processes, as tags: a question, its answer by a process that works or has ended, the end of a process,
# and the exit code of all.
_ASK, _ALIVE, _GONE, _OUTCOME, _CODE = range(1, 6)


class _Request(Protocol):
    """A collective operation that has begun."""

    def Test(self) -> bool:
        """Returns whether it has ended."""


class RankFailed(UserError):
    """Another process ended with an error, which this one reports for it."""

    def __init__(self, rank: int, outcome: "Outcome") -> None:
        self.exit_code, message, hint, self.traceback = outcome
        super().__init__(f"rank {rank}: {message}", hint)


Outcome = Tuple[int, str, Optional[str], str]
"""The end of a process: exit code, message (empty if there is none), hint, and the lines of a traceback."""


def mismatch(launcher: str) -> str:
    """Returns the hint for processes that a launcher started, and MPI does not connect."""
    if launcher == "srun":
        return "use srun --mpi=pmix or --mpi=pmi2, whichever your MPI supports (srun --mpi=list), or its own mpiexec"
    own = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    which = own if os.path.exists(own) else "the mpiexec"
    return f"start it with {which} of the MPI that mpi4py was built with (python -m mpi4py --mpi-library-version)"


class Connection:
    """The connection to the other processes.

    Args:
        started: what the launcher started, for messages.

    Attributes:
        size, rank: the number of processes, and the number of this one.
        timeout_s: the time after which a wait asks who is alive.

    Raises:
        MissingError: mpi4py is not installed, or cannot be used.
    """

    def __init__(self, started: str) -> None:
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except ImportError as error:
            raise MissingError(
                f"{started}, and mpi4py cannot be imported: {printable(str(error))}", INSTALL
            ) from None
        except RuntimeError as error:
            raise MissingError(
                f"{started}, and mpi4py has no MPI: {printable(str(error))}", INSTALL
            ) from None
        # While it connects, MPI waits for processes that start late, and lets no handler of Python run.
        with interrupts.left_to_the_system(CONNECT_S), warnings.catch_warnings():
            # mpi4py warns of another launcher's variables; the processes that MPI connects decide.
            warnings.simplefilter("ignore")
            if not MPI.Is_initialized():
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
        interrupts.reinstall_handlers()
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise MissingError(
                f"{started}, and this MPI cannot be called from several threads", mismatch("mpiexec")
            )
        self._mpi: Any = MPI
        self.size, self.rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
        self.timeout_s = TIMEOUT_S
        self._lock = threading.RLock()
        self._values, self._notices = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
        # Notices on their way, with their data; the state of each process that answered; how the others ended.
        self._sent: List[Tuple[Any, bytes]] = []
        self._answers: Dict[int, int] = {}
        self._outcomes: Dict[int, Outcome] = {}
        self._code: Optional[int] = None
        # The last collective operation, with its arrays: after an error, MPI goes on to fill them.
        self._request: Optional[_Request] = None
        self._has_ended = self._is_closed = False
        if self.size > 1:
            threading.Thread(target=self._answer, daemon=True).start()
            # A process that ends at a third signal would leave the others waiting.
            interrupts.end_with(self.abort)
            # Of a program that uses the Python interface; ``cli`` calls ``leave`` before.
            atexit.register(self._leave_at_exit)

    @property
    def version(self) -> str:
        """Returns the name and version of the MPI library."""
        return str(self._mpi.Get_library_version()).split("\n")[0].strip("\0 ")

    # -- exchange

    def gather_bytes(self, data: bytes) -> List[bytes]:
        """Returns the bytes of all processes, by rank."""
        lengths: np.ndarray = np.empty(self.size, np.int64)
        self._wait(lambda: self._values.Iallgather(np.array([len(data)], np.int64), lengths))
        received: np.ndarray = np.empty(int(lengths.sum()), np.uint8)
        starts = np.cumsum(lengths) - lengths
        target = [received, lengths.tolist(), starts.tolist(), self._mpi.BYTE]
        self._wait(lambda: self._values.Iallgatherv([data, len(data), self._mpi.BYTE], target))
        return [received[start : start + length].tobytes() for start, length in zip(starts, lengths)]

    def gather_array(self, values: np.ndarray) -> np.ndarray:
        """Returns float32 (size, n), by rank, from float32 (n,) of the same length in all processes."""
        gathered: np.ndarray = np.empty((self.size, values.size), np.float32)
        self._wait(lambda: self._values.Iallgather(np.ascontiguousarray(values), gathered))
        return gathered

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of float32 (n,) over processes, in the order that MPI chooses."""
        total = np.empty_like(values)
        self._wait(lambda: self._values.Iallreduce(np.ascontiguousarray(values), total))
        return total

    # -- waits

    def _wait(self, begin: Callable[[], _Request]) -> None:
        """Begins a collective operation, and waits for its end.

        Raises:
            RankFailed: another process ended with an error; only rank 0 raises it, and reports it.
            WorkersError: MPI lost a process.
            Interruption: a signal was noted, and there is nothing to save.
        """
        try:
            with self._lock:
                self._request = begin()
            self._until(self._request.Test)
        except self._mpi.Exception as error:
            raise WorkersError(f"MPI lost another process: {printable(str(error))}", GO_ON) from None

    def _until(self, is_done: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Waits until ``is_done``, called under the lock, returns true; returns false after ``seconds``."""
        begun = answered = noticed = time.monotonic()
        asked: Optional[float] = None
        tests = 0
        while True:
            with self._lock:
                if is_done():
                    return True
                now = time.monotonic()
                if now - noticed > _NOTICES_S:
                    noticed = now
                    self._take_notices()
            if not self._has_ended:
                self._check()
            if now - begun > seconds:
                return False
            if asked is None and now - answered > self.timeout_s:
                asked = now
                self._ask()
            elif asked is not None and (len(self._answers) == self.size - 1 or now - asked > self._answer_s):
                self._require_answers()
                answered, asked = now, None
            tests += 1
            if tests < _TESTS:
                os.sched_yield()
            else:
                time.sleep(min(max(_SHORTEST_S, _PAUSE * (now - begun)), _LONGEST_S))

    def _check(self) -> None:
        """Ends a wait after a signal, and on rank 0 after an error of another process."""
        interrupts.check()
        failed = [rank for rank, (code, *_) in self._outcomes.items() if code]
        if failed and self.rank == 0:
            raise RankFailed(failed[0], self._outcomes[failed[0]])

    # -- notices

    def _send(self, rank: int, tag: int, value: object = None) -> None:
        """Begins to send a notice; call it under the lock."""
        data = json.dumps(value).encode()
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self._sent.append((self._notices.Isend([data, len(data), self._mpi.BYTE], rank, tag), data))

    def _take_notices(self) -> None:
        """Receives the notices that have arrived, and answers questions; call it under the lock."""
        status = self._mpi.Status()
        while self._notices.Iprobe(status=status):
            data = bytearray(status.Get_count(self._mpi.BYTE))
            rank, tag = status.Get_source(), status.Get_tag()
            self._notices.Recv([data, len(data), self._mpi.BYTE], rank, tag)
            value = json.loads(bytes(data))
            if tag == _ASK:
                self._send(rank, _GONE if self._has_ended else _ALIVE)
            elif tag == _OUTCOME:
                self._outcomes[rank] = (int(value[0]), str(value[1]), value[2], str(value[3]))
            elif tag == _CODE:
                self._code = int(value)
            else:
                self._answers[rank] = tag

    def _answer(self) -> None:
        """Answers questions as long as the process runs, in a thread of its own."""
        while True:
            time.sleep(2 * _NOTICES_S)
            with self._lock:
                if self._is_closed:
                    return
                self._take_notices()

    @property
    def _answer_s(self) -> float:
        return min(ANSWER_S, self.timeout_s)

    def _ask(self) -> None:
        """Asks all other processes whether they are alive."""
        with self._lock:
            self._answers = {}
            for rank in range(self.size):
                if rank != self.rank:
                    self._send(rank, _ASK)

    def _require_answers(self) -> None:
        """Ends all processes if one has not answered, or has left while this one waits for it."""
        accepted = (_ALIVE, _GONE) if self._has_ended else (_ALIVE,)
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = [rank for rank in others if self._answers.get(rank) not in accepted]
        if not silent:
            return
        if self.rank == min(rank for rank in range(self.size) if rank not in silent):
            which = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
            waited = self.timeout_s + self._answer_s
            interrupts.write_to_stderr(
                f"error: {which} of {self.size} did not answer for {waited:g} s, and the others end\nhint: {GO_ON}\n"
            )
        else:
            time.sleep(GRACE_S / 5)  # the message comes first
        self.abort(EXIT_WORKERS)

    # -- ends

    def abort(self, code: int) -> None:
        """Ends all processes at once; the launcher reports the exit code."""
        time.sleep(_NOTICES_S)  # for the launcher to pass on what was printed
        self._is_closed = True
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def leave(self, code: int, message: str = "", hint: Optional[str] = None, traceback: str = "") -> int:
        """Waits until all processes end, and disconnects; returns the exit code of all of them.

        Rank 0 reports errors that it does not have itself.  If a process ended with an error and another does not end
        within ``GRACE_S``, the latter waits for the former, so that all are ended at once.

        Args:
            code: the exit code of this process.
            message, hint, traceback: the error of this process, which rank 0 has printed already.
        """
        if self._is_closed:
            return code
        self._has_ended = True
        if self.rank:
            with self._lock:
                self._send(0, _OUTCOME, (code, message, hint, traceback))
            self._until(lambda: self._code is not None)
            code = int(self._code or 0)
        else:
            code = self._collect((code, message, hint, traceback))
        with self._lock:
            self._is_closed = True
            for request, _ in self._sent:
                request.Wait()
            self._mpi.Finalize()
        return code

    def _collect(self, own: Outcome) -> int:
        """Collects on rank 0 how the other processes ended, reports it, and tells them the exit code."""
        outcomes = self._outcomes
        reported = any(own[1:] == (f"rank {rank}: {end[1]}", *end[2:]) for rank, end in outcomes.items())

        def has_failed() -> bool:
            return len(outcomes) == self.size - 1 or any(end[0] for end in (own, *outcomes.values()))

        self._until(has_failed)
        self._until(lambda: len(outcomes) == self.size - 1, 0 if reported else GRACE_S)
        code = own[0] or next((end[0] for _, end in sorted(outcomes.items()) if end[0]), 0)
        printed = {(own[1], own[3])}
        for rank, (other, message, hint, traceback) in sorted(outcomes.items()):
            is_same_signal = other == own[0] > 128
            is_printed = reported or is_same_signal or (message, traceback) in printed
            if other and message and not is_printed:
                printed.add((message, traceback))
                lines = f"{traceback}error: rank {rank}: {message}\n" + (f"hint: {hint}\n" if hint else "")
                interrupts.write_to_stderr(lines)
        if len(outcomes) < self.size - 1:
            self.abort(code)
        with self._lock:
            for rank in range(1, self.size):
                self._send(rank, _CODE, code)
        return code

    def _leave_at_exit(self) -> None:
        """Leaves when a program ends that uses the Python interface; an exception that ends it is a failure."""
        error = getattr(sys, "last_value", None)
        code = 0 if error is None else getattr(error, "exit_code", EXIT_BUG)
        self.leave(code, "" if error is None else printable(str(error).split("\n")[0]))
