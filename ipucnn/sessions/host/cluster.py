"""Connects several workers that train one network on the host, and exchanges values between them.

Worker 0 listens at its address, and the others connect to it before TensorFlow is imported (:func:`join`).  They
compare everything that decides the result, and keep the connections.  The connections carry small values
(:meth:`Cluster.exchange`) and heartbeats, which detect a worker that dies or falls silent.  TensorFlow's own
collectives gather the gradients (``collectives.py``).

Every worker computes every weight update from the same gathered numbers, in the same order, so nothing has to be sent
back.
"""

import base64
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import math
import os
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn import __version__, interrupts
from ipucnn.aliases import PlainValue, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.errors import EXIT_WORKERS, ConfigurationError, UserError, WorkersError
from ipucnn.machine import BYTE_PACKAGES, BYTE_VARIABLES, cpu_name
from ipucnn.sessions.host.workers import GO_ON, GRACE_S, SECRET_VARIABLE, SILENCE_S, Workers, split_address
from ipucnn.text import printable, shown_value

if TYPE_CHECKING:
    from ipucnn.sessions.host.collectives import Collectives

HEARTBEAT_S = 1.0
# Time between attempts to connect to worker 0.
_RETRY_S = 0.2
_MAX_FRAME_BYTES = 2**28
# Errors that another program can cause by connecting, or by listening at a worker's address, by accident or on purpose.
_PEER_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
# The longest frame that is read from a peer before it is authenticated.
_MAX_GREETING_BYTES = 2**10
_LENGTH = struct.Struct(">I")
# Bytes of an exchanged array that are in transit at a time, over all workers.
_PIECE_BYTES = 2**26


# -- facts that have to be equal --------------------------------------------------------------------------------------


def facts_of_machine() -> Dict[str, Any]:
    """Returns the facts of this process that can change the last digits of a result.

    The number of threads is not among them, as worker 0 decides it for all workers.
    """
    facts: Dict[str, Any] = {"processor": cpu_name(), "python": ".".join(map(str, sys.version_info[:2]))}
    for package in BYTE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    facts.update({name: os.environ.get(name) for name in BYTE_VARIABLES})
    return facts


def _differences(everyone: Sequence[Mapping[str, PlainValue]], part: str) -> List[str]:
    """Returns the differences between each worker and worker 0, one line each; all workers get the same lines.

    Args:
        everyone: the facts of all workers, in their order.
        part: the part of the facts to compare: ``run`` or ``machine``.
    """
    return [
        f"worker {rank} has {name} {shown_value(other[part].get(name))}, and worker 0 has {shown_value(value)}"
        for rank, other in enumerate(everyone)
        for name, value in everyone[0][part].items()
        if other[part].get(name) != value
    ]


# -- connections ------------------------------------------------------------------------------------------------------


class _Link:
    """A connection to another worker: frames of JSON, each preceded by its length; an empty frame is a heartbeat."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.heard = time.monotonic()
        # The time at which the worker announced its end; None while it runs.
        self.ended: Optional[float] = None
        self.inbox: queue.Queue[Any] = queue.Queue()
        self._socket = connection
        # The time by which sending and receiving have to finish; None: no deadline.
        self._until: Optional[float] = None
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, value: object) -> None:
        """Sends a value; raises OSError if the connection is gone."""
        self.send_bytes(json.dumps(value).encode())

    def send_bytes(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, limit_bytes: int = _MAX_FRAME_BYTES) -> Any:
        """Returns the next value; None for a heartbeat.

        Args:
            limit_bytes: the longest frame to accept.

        Raises:
            OSError: the connection is gone.
            ValueError: the frame is too long or is not JSON.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        self.heard = time.monotonic()
        if length > limit_bytes:
            raise ValueError("a frame that is too long")
        return json.loads(self._read(length)) if length else None

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            if self._until is not None:
                # A peer that sends single bytes gets no more time than one that sends none.
                self._socket.settimeout(max(1e-3, self._until - time.monotonic()))
            part = self._socket.recv(min(length - len(data), 2**20))
            if not part:
                raise ConnectionError("closed")
            data += part
            self.heard = time.monotonic()
        return bytes(data)

    def set_deadline(self, seconds: Optional[float]) -> None:
        """Limits the time for everything that is sent and received from now on; None: no limit."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()


class _Refused(ValueError):
    """A peer was refused; the message is the reason that was sent to it."""


def _proof(nonce: str, rank: int, count: int) -> str:
    """Returns the HMAC of a nonce, a rank and a count, which proves knowledge of the run's secret."""
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    return hmac.new(secret, f"{nonce} {rank} {count}".encode(), hashlib.sha256).hexdigest()


def _accept(workers: Workers, until: float) -> Dict[int, _Link]:
    """Waits, on worker 0, until all other workers are connected.  Peers that do not know the secret are refused.

    Raises:
        WorkersError: a worker did not connect in time.
        ConfigurationError: worker 0 cannot listen at its address.
    """
    host, port = split_address(workers.addresses[0], workers.source)
    # It listens on all interfaces: a host name may resolve here to a different address than on the other workers.
    listens_at = {"localhost": "127.0.0.1"}.get(host, host if _is_loopback(host) else "")
    links: Dict[int, _Link] = {}
    problem = ""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((listens_at, port), family=family, backlog=workers.count)
    except OSError as error:
        raise ConfigurationError(
            f"worker 0 cannot listen at {workers.addresses[0]}: {os.strerror(error.errno or 0)}",
            "use another port, and make sure that only one worker is number 0",
        ) from None
    with listener, contextlib.ExitStack() as failed:
        listener.settimeout(_RETRY_S)
        while len(links) < workers.count - 1:
            interrupts.check()
            if time.monotonic() > until:
                missing = [str(r) for r in range(1, workers.count) if r not in links]
                raise WorkersError(
                    f"worker{'s' * (len(missing) > 1)} {', '.join(missing)} of {workers.count} did not connect to "
                    f"{workers.addresses[0]} in time{problem}",
                    "start them with the same command, or raise --start-timeout",
                )
            try:
                link = _Link(-1, listener.accept()[0])
            except socket.timeout:
                continue
            try:
                link.set_deadline(GRACE_S)
                link.rank = _welcome(link, workers, links)
            except _PEER_ERRORS as error:
                if isinstance(error, _Refused):
                    problem = f"; one was sent away, as {error}"
                link.close()
            else:
                links[link.rank] = link
                failed.callback(link.close)
        failed.pop_all()
    return links


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _welcome(link: _Link, workers: Workers, links: Mapping[int, _Link]) -> int:
    """Returns the rank of the worker that has connected.  Sends other peers the reason, and raises ValueError."""
    nonce = secrets.token_hex(16)
    link.send({"nonce": nonce})
    greeting = link.receive(_MAX_GREETING_BYTES)
    rank, count = int(greeting["rank"]), int(greeting["count"])
    problem = ""
    if not hmac.compare_digest(str(greeting["proof"]), _proof(nonce, rank, count)):
        problem = f"it has another secret ({SECRET_VARIABLE})"
    elif count != workers.count:
        problem = f"it was started with {count} workers, and worker 0 with {workers.count}"
    elif not 0 < rank < count or rank in links:
        problem = f"there is a worker {rank} already"
    if problem:
        link.send({"problem": problem})
        raise _Refused(problem)
    link.send({"proof": _proof(str(greeting["nonce"]), 0, count)})
    return rank


def _connect(workers: Workers, until: float) -> _Link:
    """Connects any worker but the first to worker 0.

    Raises:
        WorkersError: worker 0 could not be reached in time.
        ConfigurationError: worker 0 belongs to another cluster.
    """
    host, port = split_address(workers.addresses[0], workers.source)
    while True:
        interrupts.check()
        if time.monotonic() > until:
            raise WorkersError(
                f"worker 0 could not be reached at {workers.addresses[0]} in time",
                "start it with the same command, or raise --start-timeout",
            )
        try:
            link = _Link(0, socket.create_connection((host, port), timeout=GRACE_S))
        except OSError:
            time.sleep(_RETRY_S)
            continue
        try:
            link.set_deadline(GRACE_S)
            challenge = secrets.token_hex(16)
            nonce = str(link.receive(_MAX_GREETING_BYTES)["nonce"])
            proof = _proof(nonce, workers.index, workers.count)
            link.send({"rank": workers.index, "count": workers.count, "nonce": challenge, "proof": proof})
            answer = link.receive(_MAX_GREETING_BYTES)
            if "problem" in answer:
                raise ConfigurationError(
                    f"worker 0 at {workers.addresses[0]} refused worker {workers.index}: "
                    f"{printable(str(answer['problem']))}",
                    "start all workers of a run with the same command and the same secret",
                )
            if not hmac.compare_digest(str(answer["proof"]), _proof(challenge, 0, workers.count)):
                raise ConfigurationError(
                    f"the program that listens at {workers.addresses[0]} does not know this run's secret "
                    f"({SECRET_VARIABLE})",
                    "give all workers the same one",
                )
            return link
        except _PEER_ERRORS:
            link.close()
            time.sleep(_RETRY_S)


# -- the cluster ------------------------------------------------------------------------------------------------------


# The types of TensorFlow's errors for workers that cannot be reached.  Their messages name a collective, a connection,
# or TensorFlow's own heartbeats (``StartAbort`` of base_collective_executor.cc, the health check of
# collective_all_reduce_strategy.py, the coordination service).
_UNREACHED = ("UnavailableError", "DeadlineExceededError", "AbortedError", "CancelledError")
_UNREACHED_WORDS = ("Collective", "GRPC", "CoordinationService", "oordination service", "eartbeat")
# Types of errors that a fault of this worker can raise as well.  The word ``Collective`` is no evidence here: the name
# of the operation, ``CollectiveGatherV2``, is part of the message of any error near one.
_UNCLEAR = ("InternalError", "FailedPreconditionError", "UnknownError")
_UNCLEAR_WORDS = ("Collective ops is aborted by", *_UNREACHED_WORDS[1:])


def _is_of_collectives(error: BaseException) -> bool:
    """Returns whether an error of TensorFlow means that workers cannot reach each other any more."""
    kind = type(error)
    if not kind.__module__.startswith("tensorflow."):
        return False
    words: Sequence[str] = _UNREACHED_WORDS if kind.__name__ in _UNREACHED else ()
    words = _UNCLEAR_WORDS if kind.__name__ in _UNCLEAR else words
    return any(word in str(error) for word in words)


class Cluster:
    """The connected workers of a run; without arguments, a single worker.

    Attributes:
        count: the number of workers.
        rank: the number of this worker.
        warnings: the differences between workers that can change the last digits of a result.
        collectives: TensorFlow's collectives; None: they are not started, or there is a single worker.
        hint: the advice to print if a worker is lost.
    """

    def __init__(self, workers: Workers = Workers(), links: Optional[Dict[int, _Link]] = None) -> None:
        self.hint = GO_ON
        self._addresses = workers.addresses
        self.count, self.rank = workers.count, workers.index
        self.warnings: List[str] = []
        self.collectives: Optional[Collectives] = None
        self._links = links or {}
        self._is_closed = False
        # While TensorFlow's servers connect, no Python thread of their processes runs, so no heartbeats are sent.
        self._may_be_silent = False
        for link in self._links.values():
            link.set_deadline(None)
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()
        if self._links:
            threading.Thread(target=self._watch, daemon=True).start()

    def exchange(self, what: str, value: object) -> List[Any]:
        """Returns the values of all workers, in their order; every worker has to call this at the same place.

        Args:
            what: the name of the place, which detects workers at different places.
            value: a plain JSON value; floats keep every bit.
        """
        if self.count == 1:
            return [value]
        if self.rank:
            self._send(0, [what, value])
            values = self._receive(0, what)
        else:
            values = [value] + [self._receive(rank, what) for rank in range(1, self.count)]
            for rank in range(1, self.count):
                self._send(rank, [what, values])
        return list(values)

    def from_worker_0(self, what: str, value: object) -> Any:
        """Returns the value of worker 0 on all workers."""
        return self.exchange(what, value)[0]

    def exchange_arrays(self, what: str, array: Optional[np.ndarray]) -> List[np.ndarray]:
        """Returns the arrays of all workers that have one, in the order of workers.

        Args:
            what: the name of the place, as for :meth:`exchange`.
            array: float32, of any size; None: this worker has none.
        """
        if self.count == 1:
            return [] if array is None else [array]
        shapes = self.exchange(what, None if array is None else list(array.shape))
        data = b"" if array is None else np.ascontiguousarray(array, np.float32).tobytes()
        longest = max(0 if shape is None else 4 * math.prod(shape) for shape in shapes)
        parts: List[List[bytes]] = [[] for _ in shapes]
        size = _PIECE_BYTES // self.count
        for first in range(0, longest, size):
            pieces = self.exchange(what, base64.b64encode(data[first : first + size]).decode())
            for part, piece in zip(parts, pieces):
                part.append(base64.b64decode(piece))
        return [
            np.frombuffer(b"".join(part), np.float32).reshape(shape)
            for shape, part in zip(shapes, parts)
            if shape is not None
        ]

    def require_same_weights(self, variables: Mapping[str, TfVariable]) -> None:
        """Refuses workers whose weights (or other variables) differ, on all workers alike.

        Raises:
            ConfigurationError: a worker's values differ; the message names the worker.
        """
        if self.count == 1:
            return
        from ipucnn.training.checkpoints import digest_of

        values = {name: variable.numpy() for name, variable in variables.items()}
        everyone = self.exchange("weights", digest_of(values, {}))
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ConfigurationError(
                    f"worker {rank} begins with other weights than worker 0: they do not belong together",
                    "give all workers the same network and the same --weights file",
                )

    def any_signal(self, flag: bool) -> bool:
        """Returns whether a flag is set on any worker.  A signal that one worker received is noted on all of them."""
        if self.count == 1:
            return flag
        states = self.exchange("signals", [flag, interrupts.noted()])
        codes = [code for _, code in states if code is not None]
        if codes:
            interrupts.note(codes[0])
        return any(flag for flag, _ in states)

    def close(self, error: Optional[BaseException] = None) -> None:
        """Disconnects from the other workers.

        Without an error, or after an interruption, it waits for all workers to arrive here.  After an error of
        TensorFlow's collectives it waits until the watching thread knows which worker is lost, and ends this process.
        After any other error it notifies the workers, so that they end too.

        Raises:
            WorkersError: ``error`` comes from TensorFlow's collectives, and it is not known which worker is lost.
        """
        if self._is_closed or self.count == 1:
            return
        lost: Optional[WorkersError] = None
        try:
            if error is None or isinstance(error, (interrupts.Interrupted, GeneratorExit)):
                self.exchange("end", None)
            elif _is_of_collectives(error):
                # TensorFlow's own heartbeats may detect first that a worker is gone.  The watching thread then finds
                # out which one, and ends this process (``_leave``).
                until = time.monotonic() + SILENCE_S + GRACE_S
                while time.monotonic() < until:
                    interrupts.check()
                    time.sleep(0.1)
                lost = WorkersError(
                    f"worker {self.rank} lost the others: TensorFlow's collectives failed", self.hint
                )
        except BaseException:  # the others are gone, which no longer matters
            if error is None:
                raise
        finally:
            self._is_closed = True
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send({"ended": self.rank, "signal": interrupts.noted()})
                if error is None:
                    link.close()
        if lost is not None:
            raise lost from error

    def _send(self, rank: int, value: object) -> None:
        try:
            self._links[rank].send(value)
        except OSError:
            self._wait_for_the_end()

    def _receive(self, rank: int, what: str) -> Any:
        link = self._links[rank]
        while True:
            interrupts.check()
            try:
                place, value = link.inbox.get(timeout=0.5)
            except queue.Empty:
                continue
            if place != what:
                raise RuntimeError(f"worker {rank} is at '{place}', and this one at '{what}'")
            return value

    def _wait_for_the_end(self) -> None:
        """Waits until the listening thread ends the process, or a signal arrives."""
        while True:
            interrupts.check()
            time.sleep(0.1)

    def _listen(self, link: _Link) -> None:
        """Receives the values of another worker, in a thread of its own."""
        while not self._is_closed:
            try:
                value = link.receive()
            except _PEER_ERRORS:
                if link.ended is None:
                    self._leave(link.rank)
                return
            if isinstance(value, dict) and "left" in value:
                self._leave(int(value["left"]))
            elif isinstance(value, dict):
                self._ended(int(value["ended"]), value.get("signal"), link)
                link.ended = time.monotonic()
            elif value is not None:
                link.inbox.put(value)

    def _ended(self, rank: int, code: Optional[int], link: _Link) -> None:
        """Handles the end of another worker by an error or a signal.

        It notifies the remaining workers, and raises the signal in this process.
        """
        if self._is_closed:
            return
        for other in self._links.values():
            if other is not link:
                with contextlib.suppress(OSError):
                    other.send({"ended": rank, "signal": code})
        if code is not None and interrupts.noted() is None:
            with contextlib.suppress(ValueError):
                os.kill(os.getpid(), signal.Signals(code - 128))

    def _watch(self) -> None:
        """Sends heartbeats, and checks for those of the other workers."""
        while not self._is_closed:
            slept = time.monotonic()
            time.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - slept > SILENCE_S / 2:
                # This process itself was suspended, so the messages of the others have not been read yet.
                for link in self._links.values():
                    link.heard = now
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send_bytes(b"")
                if self._is_closed:
                    return
                is_silent = now - link.heard > SILENCE_S and not self._may_be_silent
                if is_silent or (link.ended is not None and now - link.ended > GRACE_S):
                    self._leave(link.rank)

    def _leave(self, rank: int) -> None:
        """Ends this process, because it cannot continue without worker ``rank``."""
        if self._is_closed:
            return
        self._is_closed = True
        for link in self._links.values() if self.rank == 0 else ():
            # The others are connected to worker 0 alone; without this message they would report that worker 0 left.
            with contextlib.suppress(OSError):
                link.send({"left": rank})
        code = interrupts.noted()
        lines = f"error: worker {rank} left\nhint: {self.hint}\n"
        interrupts.write_to_stderr(lines if code is None else "interrupted\n")
        os._exit(EXIT_WORKERS if code is None else code)

    def require_ports(self) -> None:
        """Refuses ports that other programs use, on all workers alike.

        A process that waits inside TensorFlow for a server that did not start handles no signals and no messages.

        Raises:
            ConfigurationError: a port is in use; the message names the worker.
        """
        _, port = split_address(self._addresses[self.rank], "the workers")
        problem = ""
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.create_server(("", port), family=family).close()
            except OSError as error:
                # A machine may have addresses of one kind only.
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    problem = os.strerror(error.errno or 0)
        for rank, reason in enumerate(self.exchange("ports", problem)):
            if reason:
                raise ConfigurationError(
                    f"TensorFlow's server of worker {rank} cannot start at {self._addresses[rank]}: "
                    f"{printable(str(reason))}",
                    "use another port",
                )

    def start_collectives(self) -> None:
        """Starts TensorFlow's server and collectives; call it before anything else that uses TensorFlow."""
        if self.count == 1 or self.collectives is not None:
            return
        from ipucnn.sessions.host.collectives import Collectives

        # TensorFlow holds Python's global lock while it waits for the servers of all workers: no signal is handled and
        # no heartbeat sent as long as one of them still imports.  So all workers begin together, and the wait is short.
        self.require_ports()
        self._may_be_silent = True
        self.collectives = Collectives(self._addresses, self.rank)
        self.exchange("servers", None)
        self._may_be_silent = False


def join(
    workers: Workers,
    config: RunConfig,
    run: Mapping[str, PlainValue],
    threads: int,
    connected: Optional[Cluster] = None,
) -> Tuple[Cluster, int]:
    """Connects the workers, and compares their runs, before TensorFlow is imported.

    Args:
        workers: the workers of this run.
        config: the options, with ``start_timeout`` and ``require_same_bytes``.
        run: the plain values that have to be equal on all workers, by name.
        threads: the number of threads per operation that this worker would choose.
        connected: the cluster of an earlier run with the same workers; None: the workers are not connected yet.

    Returns:
        The cluster, and the number of threads that share an operation on each worker.

    Raises:
        WorkersError: a worker did not connect.
        ConfigurationError: the workers would not train the same network, or would not compute the same bytes although
            that is required.
    """
    cluster = connected
    if cluster is None:
        until = time.monotonic() + config.start_timeout
        links = {0: _connect(workers, until)} if workers.index else _accept(workers, until)
        cluster = Cluster(workers, links)
    try:
        facts = {
            "run": {"ipucnn": __version__, **run},
            "machine": facts_of_machine(),
            "threads": threads,
        }
        everyone = cluster.exchange("facts", facts)
        for difference in _differences(everyone, "run")[:1]:
            raise ConfigurationError(
                difference, "start all workers with the same command, data and version of ipucnn"
            )
        cluster.warnings = _differences(everyone, "machine")
        if cluster.warnings and config.require_same_bytes:
            raise ConfigurationError(
                f"--require-same-bytes: {cluster.warnings[0]}",
                "use machines of one type with the same installation, or drop --require-same-bytes",
            )
    except UserError as error:
        cluster.close(error)
        raise
    return cluster, int(everyone[0]["threads"])
