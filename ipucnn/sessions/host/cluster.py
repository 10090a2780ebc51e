"""Several workers that train one network on the host: how they meet, and what they exchange.

Worker 0 listens at its address, and the others connect to it before TensorFlow is imported (:func:`join`).  They tell
each other what decides the result, and keep the connections: small values go over them (:meth:`Cluster.exchange`),
and a worker that dies or falls silent is noticed by them.  Gradients are gathered by TensorFlow's own collectives.
``tf.distribute.MultiWorkerMirroredStrategy`` sets these up, and is used for nothing else: the training loop is the
session's own.

Every worker computes every weight update from the same gathered numbers, in the same order, so that nothing has to be
sent back.  TensorFlow is imported inside of functions.
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
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn import __version__, interrupts
from ipucnn.aliases import PlainValue, Tensor
from ipucnn.config.options import RunConfig
from ipucnn.errors import EXIT_WORKERS, ConfigurationError, UserError, WorkersError
from ipucnn.machine import BYTE_PACKAGES, BYTE_VARIABLES, cpu_name
from ipucnn.sessions.host.workers import GO_ON, GRACE_S, SECRET_VARIABLE, SILENCE_S, Workers, split_address
from ipucnn.text import printable, shown_value

HEARTBEAT_S = 1.0
# TensorFlow's servers find each other within this time, or never.
_SERVERS_S = 300
# Connecting is tried again so often until the first worker is there.
_RETRY_S = 0.2
_MAX_FRAME_BYTES = 2**28
# What comes of others who are at an address by chance, or on purpose.
_NO_WORKER = (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
# Of who has not proved yet that it belongs here, nothing longer is read.
_MAX_GREETING_BYTES = 2**10
_LENGTH = struct.Struct(">I")
# Of TensorFlow's collectives: any number that its own strategies, which count from 1, do not use.
_GROUP_KEY = 1_000_003
# Of a value that workers exchange, so many bytes are under way at a time, over all of them.
_PIECE_BYTES = 2**26


# -- what has to be the same ------------------------------------------------------------------------------------------


def facts_of_machine() -> Dict[str, Any]:
    """What of this process can change the last digits of a result, but for the threads, which worker 0 decides."""
    facts: Dict[str, Any] = {"processor": cpu_name(), "python": ".".join(map(str, sys.version_info[:2]))}
    for package in BYTE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    facts.update({name: os.environ.get(name) for name in BYTE_VARIABLES})
    return facts


def _differences(everyone: Sequence[Mapping[str, PlainValue]], part: str) -> List[str]:
    """What the workers have otherwise than worker 0, one line each: the same verdict on all of them.

    Args:
        everyone: their facts, in their order.
        part: which of them: ``run`` or ``machine``.
    """
    return [
        f"worker {rank} has {name} {shown_value(other[part].get(name))}, and worker 0 has {shown_value(value)}"
        for rank, other in enumerate(everyone)
        for name, value in everyone[0][part].items()
        if other[part].get(name) != value
    ]


# -- connections ------------------------------------------------------------------------------------------------------


class _Link:
    """A connection to another worker: frames of JSON, each after its length; an empty one is a heartbeat."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.heard = time.monotonic()
        # When it said that it ends; None while it goes on.
        self.ended: Optional[float] = None
        self.inbox: queue.Queue[Any] = queue.Queue()
        self._socket = connection
        # When what is under way has to be over, whatever comes; None: never.
        self._until: Optional[float] = None
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, value: object) -> None:
        """Sends a value; raises OSError where nobody is there to take it."""
        self.send_bytes(json.dumps(value).encode())

    def send_bytes(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, limit_bytes: int = _MAX_FRAME_BYTES) -> Any:
        """The next value; None for a heartbeat.

        Args:
            limit_bytes: how long it may be.

        Raises:
            OSError: the connection is gone.
            ValueError: it is none of ours.
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
                # Who sends a byte now and then gets no more time than who sends none.
                self._socket.settimeout(max(1e-3, self._until - time.monotonic()))
            part = self._socket.recv(min(length - len(data), 2**20))
            if not part:
                raise ConnectionError("closed")
            data += part
            self.heard = time.monotonic()
        return bytes(data)

    def set_deadline(self, seconds: Optional[float]) -> None:
        """From now on so much time is left for all that is sent and received; None: any."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()


class _SentAway(ValueError):
    """Who connected does not belong here, for the reason that it was told."""


def _proof(nonce: str, rank: int, count: int) -> str:
    """What only who knows the run's secret can say."""
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    return hmac.new(secret, f"{nonce} {rank} {count}".encode(), hashlib.sha256).hexdigest()


def _accept(workers: Workers, until: float) -> Dict[int, _Link]:
    """Worker 0: waits for the others.  Who does not know the secret is sent away, and waited for no longer.

    Raises:
        WorkersError: they did not come in time.
        ConfigurationError: the address is not to be had, or one of them is of another cluster.
    """
    host, port = split_address(workers.addresses[0], workers.source)
    # It listens everywhere: the name of a machine may stand for another of its addresses than the others reach.
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
            except _NO_WORKER as error:
                if isinstance(error, _SentAway):
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
    """Which worker has connected.  Raises ValueError for who does not belong here, and tells them why."""
    nonce = secrets.token_hex(16)
    link.send({"nonce": nonce})
    told = link.receive(_MAX_GREETING_BYTES)
    rank, count = int(told["rank"]), int(told["count"])
    problem = ""
    if not hmac.compare_digest(str(told["proof"]), _proof(nonce, rank, count)):
        problem = f"it has another secret ({SECRET_VARIABLE})"
    elif count != workers.count:
        problem = f"it was told of {count} workers, and worker 0 of {workers.count}"
    elif not 0 < rank < count or rank in links:
        problem = f"there is a worker {rank} already"
    if problem:
        link.send({"problem": problem})
        raise _SentAway(problem)
    link.send({"proof": _proof(str(told["nonce"]), 0, count)})
    return rank


def _connect(workers: Workers, until: float) -> _Link:
    """Every other worker: connects to worker 0.

    Raises:
        WorkersError: it was not there in time.
        ConfigurationError: it is of another cluster.
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
        except _NO_WORKER:
            link.close()
            time.sleep(_RETRY_S)


# -- the cluster ------------------------------------------------------------------------------------------------------


# Kinds of TensorFlow's errors by which it says that others cannot be reached; what comes with them names a collective,
# a connection, or its own heartbeats (``StartAbort`` of base_collective_executor.cc, the health check of
# collective_all_reduce_strategy.py, the coordination service).
_UNREACHED = ("UnavailableError", "DeadlineExceededError", "AbortedError", "CancelledError")
_UNREACHED_WORDS = ("Collective", "GRPC", "CoordinationService", "oordination service", "eartbeat")
# Kinds that a fault of this worker may have as well: the name of an operation, ``CollectiveGatherV2``, stands in any
# error near one, and says nothing.
_UNCLEAR = ("InternalError", "FailedPreconditionError", "UnknownError")
_UNCLEAR_WORDS = ("Collective ops is aborted by", *_UNREACHED_WORDS[1:])


def _is_of_collectives(error: BaseException) -> bool:
    """Whether TensorFlow says that workers cannot reach each other any more, in whichever of its ways."""
    kind = type(error)
    if not kind.__module__.startswith("tensorflow."):
        return False
    words: Sequence[str] = _UNREACHED_WORDS if kind.__name__ in _UNREACHED else ()
    words = _UNCLEAR_WORDS if kind.__name__ in _UNCLEAR else words
    return any(word in str(error) for word in words)


class Cluster:
    """The workers of a run, connected; of one worker alone if nothing else is said.

    Attributes:
        count: of workers.
        rank: which of them this one is.
        warnings: what differs between them that can change the last digits.
        place: TensorFlow's name of this worker, to precede that of a device; "" for one worker.
        collective_s: a variable: seconds in collectives so far, waiting for other workers included.
        received_bytes: of each collective that was made, by its number: what a worker gets of it.
        hint: what to do where a worker is lost.
    """

    def __init__(self, workers: Optional[Workers] = None, links: Optional[Dict[int, _Link]] = None) -> None:
        self.hint = GO_ON
        self.workers = workers
        self.count = 1 if workers is None else workers.count
        self.rank = 0 if workers is None else workers.index
        self.addresses = () if workers is None else workers.addresses
        self.warnings: List[str] = []
        self.place = ""
        self._links = links or {}
        self._is_closed = False
        # While TensorFlow's servers look for each other nothing else of their processes runs.
        self._may_be_silent = False
        self._strategy: Any = None
        self._num_collectives = 0
        self.received_bytes: Dict[int, int] = {}
        self.collective_s: Any = None
        for link in self._links.values():
            link.set_deadline(None)
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()
        if self._links:
            threading.Thread(target=self._watch, daemon=True).start()

    def exchange(self, what: str, value: object) -> List[Any]:
        """The values of all workers, in their order; every worker has to call this at the same place.

        Args:
            what: the place, to notice if they are not at the same one.
            value: plain, as JSON has it; floats keep every bit.
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

    def first(self, what: str, value: object) -> Any:
        """What worker 0 has, on all of them."""
        return self.exchange(what, value)[0]

    def exchange_arrays(self, what: str, array: Optional[np.ndarray]) -> List[np.ndarray]:
        """The arrays of all workers, in their order; of those who have none, nothing.

        Args:
            what: the place, as for :meth:`exchange`.
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

    def require_same(self, what: str, digest: str) -> None:
        """Refuses workers that do not have the same; all of them come to the same verdict.

        Raises:
            ConfigurationError: naming the worker.
        """
        everyone = self.exchange(what, digest)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ConfigurationError(
                    f"worker {rank} begins with other {what} than worker 0: they do not belong together",
                    "give all workers the same network and the same --weights file",
                )

    def any_signal(self, flag: bool) -> bool:
        """Whether a flag is set on any worker.  A signal that one of them got is then noted on all."""
        if self.count == 1:
            return flag
        told = self.exchange("signals", [flag, interrupts.noted()])
        codes = [code for _, code in told if code is not None]
        if codes:
            interrupts.note(codes[0])
        return any(flag for flag, _ in told)

    def close(self, error: Optional[BaseException] = None) -> None:
        """Parts with the others: in order, where all of them come here; else they are told to end as well.

        Raises:
            WorkersError: ``error`` is one of TensorFlow's collectives, and who of the others is gone was not found out.
        """
        if self._is_closed or self.count == 1:
            return
        lost: Optional[WorkersError] = None
        try:
            if error is None or isinstance(error, (interrupts.Interrupted, GeneratorExit)):
                self.exchange("end", None)
            elif _is_of_collectives(error):
                # TensorFlow has heartbeats of its own, and may have noticed first that a worker is gone.  Which one it
                # is the thread that watches finds out, and ends this process (``_leave``).
                until = time.monotonic() + SILENCE_S + GRACE_S
                while time.monotonic() < until:
                    interrupts.check()
                    time.sleep(0.1)
                lost = WorkersError(
                    f"worker {self.rank} lost the others: TensorFlow's collectives failed", self.hint
                )
        except BaseException:  # they are gone, which matters no more
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
        """The thread that listens ends the process; what comes first is a signal, or that."""
        while True:
            interrupts.check()
            time.sleep(0.1)

    def _listen(self, link: _Link) -> None:
        """Takes what another worker sends, in a thread of its own."""
        while not self._is_closed:
            try:
                value = link.receive()
            except _NO_WORKER:
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
        """Another worker ended with an error or by a signal: tells the others, and passes the signal on to this one."""
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
        """Sends heartbeats, and looks for those of the others."""
        while not self._is_closed:
            slept = time.monotonic()
            time.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - slept > SILENCE_S / 2:
                # It was this process that was held up: what the others said meanwhile has not been read yet.
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
        """Ends this process: without the other worker there is nothing that it can do."""
        if self._is_closed:
            return
        self._is_closed = True
        for link in self._links.values() if self.rank == 0 else ():
            # They hear of each other through worker 0 alone, and would say that it was the one who left.
            with contextlib.suppress(OSError):
                link.send({"left": rank})
        code = interrupts.noted()
        lines = f"error: worker {rank} left\nhint: {self.hint}\n"
        interrupts.tell(lines if code is None else "interrupted\n")
        os._exit(EXIT_WORKERS if code is None else code)

    # -- TensorFlow's part

    def require_ports(self) -> None:
        """Refuses ports that other programs have; all workers come to the same verdict.

        Who waits in TensorFlow for a server that did not start hears no signal, and nothing of the other workers.

        Raises:
            ConfigurationError: naming the worker.
        """
        _, port = split_address(self.addresses[self.rank], "the workers")
        problem = ""
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.create_server(("", port), family=family).close()
            except OSError as error:
                # A machine may have addresses of one kind only.
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    problem = os.strerror(error.errno or 0)
        for rank, told in enumerate(self.exchange("TensorFlow is there", problem)):
            if told:
                raise ConfigurationError(
                    f"TensorFlow's server of worker {rank} cannot start at {self.addresses[rank]}: "
                    f"{printable(str(told))}",
                    "use another port",
                )

    def start_collectives(self) -> None:
        """Makes TensorFlow's server and collectives; before anything else is done with TensorFlow."""
        if self.workers is None or self._strategy is not None:
            return
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(self.workers.addresses)}),
            task_type="worker",
            task_id=self.rank,
            rpc_layer="grpc",
        )
        # TensorFlow waits for the servers of all workers without letting go of Python: no signal would be heard, and no
        # heartbeat sent, for as long as one of them still imports.  So they begin together, and it is soon over.
        self.require_ports()
        self._may_be_silent = True
        # From here on there may be a server, also where what follows fails.
        interrupts.skip_destructors()
        try:
            with interrupts.left_to_the_system(_SERVERS_S):
                self._strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        except (tf.errors.OpError, RuntimeError) as error:
            raise ConfigurationError(
                f"TensorFlow's server of worker {self.rank} cannot start at {self.workers.addresses[self.rank]}: "
                f"{printable(str(error).splitlines()[0])}",
                "use other ports, and addresses of the machines that the workers run on",
            ) from None
        self.place = f"/job:worker/replica:0/task:{self.rank}"
        # TensorFlow's notifier of preemptions takes SIGTERM for itself.
        interrupts.listen_again()
        self.exchange("servers are there", None)
        self._may_be_silent = False
        # Not while something is traced: a function that makes a variable is traced twice.
        with tf.device(f"{self.place}/device:CPU:0"):
            self.collective_s = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def gather(self, values: Tensor) -> Tensor:
        """What each worker has, in their order, inside a compiled function.

        Args:
            values: float32 (n,), of the same length everywhere.

        Returns:
            float32 (workers, n).
        """
        import tensorflow as tf

        def collect(values: Tensor, **details: object) -> Tensor:
            return tf.raw_ops.CollectiveGatherV2(input=values, **details)

        gathered = self._collective(values, collect, self.count)
        return tf.reshape(gathered, [self.count, values.shape[0]])

    def add(self, values: Tensor) -> Tensor:
        """The sum over workers, in whatever order is fastest, inside a compiled function.

        Args:
            values: float32 (n,), of the same length everywhere.
        """
        import tensorflow as tf

        def reduce(values: Tensor, **details: object) -> Tensor:
            return tf.raw_ops.CollectiveReduceV2(input=values, merge_op="Add", final_op="Id", **details)

        # A ring sends each part of the sum around twice, but to one worker.
        return tf.ensure_shape(self._collective(values, reduce, 2), values.shape)

    def _collective(self, values: Tensor, collect: Callable[..., Tensor], received: int) -> Tensor:
        """One of TensorFlow's collectives, timed.

        Args:
            received: how often the size of ``values`` a worker gets.
        """
        import tensorflow as tf

        self._num_collectives += 1
        self.received_bytes[self._num_collectives] = 4 * received * int(values.shape[0])
        with tf.device(f"{self.place}/device:CPU:0"):
            with tf.control_dependencies([values]):
                begun = self._now()
            with tf.control_dependencies([begun]):
                result = collect(
                    tf.identity(values),
                    group_size=self.count,
                    group_key=_GROUP_KEY,
                    instance_key=self._num_collectives,
                    ordering_token=[],
                    communication_hint="ring",
                    timeout_seconds=0.0,
                )
            with tf.control_dependencies([result]):
                self.collective_s.assign_add(self._now() - begun)
        return result

    def _now(self) -> Tensor:
        """Seconds, when its turn comes; TensorFlow's own time stamps are refused where operations are deterministic."""
        import tensorflow as tf

        return tf.numpy_function(lambda: np.float64(time.perf_counter()), [], tf.float64)


def join(
    workers: Workers,
    config: RunConfig,
    run: Mapping[str, PlainValue],
    threads: int,
    met: Optional[Cluster] = None,
) -> Tuple[Cluster, int]:
    """Connects the workers, and compares what they are going to do; before TensorFlow is imported.

    Args:
        workers: of this run.
        config: with ``start_timeout`` and ``require_same_bytes``.
        run: what has to be the same on all of them, by its name; plain values.
        threads: that share an operation, as this worker would have it.
        met: the workers who met before, for an earlier run; None: they are still to meet.

    Returns:
        The cluster, and the number of threads that share an operation on each worker.

    Raises:
        WorkersError: not all of them came.
        ConfigurationError: they would not train the same network, or not to the same bytes where that is required.
    """
    cluster = met
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
