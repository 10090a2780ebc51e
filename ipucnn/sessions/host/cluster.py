"""Several workers that train one network on the host: who they are, how they find each other, and what they exchange.

Worker 0 listens at its address, and the others connect to it before TensorFlow is imported (:func:`join`).  They tell
each other what decides the result, and keep the connections: small values go over them (:meth:`Cluster.exchange`),
and a worker that dies or falls silent is noticed by them.  Gradients are gathered by TensorFlow's own collectives.
``tf.distribute.MultiWorkerMirroredStrategy`` sets these up, and is used for nothing else: the training loop is the
session's own.

Every worker computes every weight update from the same gathered numbers, in the same order, so that nothing has to be
sent back.  TensorFlow is imported inside of functions.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import queue
import re
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn import __version__, interrupts
from ipucnn.aliases import Tensor
from ipucnn.config.options import RunConfig
from ipucnn.errors import EXIT_WORKERS, ConfigurationError, UserError, WorkersError
from ipucnn.machine import cpu_name
from ipucnn.sessions.poplar.popdist import Instances, find_instances
from ipucnn.text import printable, shown_value

SECRET_VARIABLE = "IPUCNN_SECRET"
TF_CONFIG = "TF_CONFIG"
# A worker that says nothing for so long has left: it was stopped, or its machine or network is gone.
SILENCE_S = 30.0
HEARTBEAT_S = 1.0
# How long the others may take to end by themselves after one worker ended with an error, which may be theirs, too.
GRACE_S = 5.0
# Connecting is tried again so often until the first worker is there.
_RETRY_S = 0.2
_MAX_FRAME_BYTES = 2**28
_LENGTH = struct.Struct(">I")
# Of TensorFlow's collectives: any number that its own strategies, which count from 1, do not use.
_GROUP_KEY = 1_000_003
# Ports of workers under Slurm begin here, at one of so many, chosen by the number of the job.
_SLURM_PORTS, _SLURM_NUM_PORTS = 20_000, 10_000
# What can change the last digits, beside the threads, which worker 0 decides.
_PACKAGES = ("tensorflow", "keras", "numpy")
_VARIABLES = ("TF_DETERMINISTIC_OPS", "TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS")


@dataclass(frozen=True)
class Workers(Instances):
    """The workers of a run, and which one this process is.

    Attributes:
        addresses: ``host:port`` of each.
        source: who named them, for messages.
    """

    addresses: Tuple[str, ...] = ()
    source: str = ""


def find_group(config: RunConfig, environment: Optional[Mapping[str, str]] = None) -> Instances:
    """The group of processes that this one belongs to: instances under ``poprun``, else workers, else it is alone.

    Raises:
        ConfigurationError: what names the group makes no sense.
    """
    env = os.environ if environment is None else environment
    instances = find_instances(env)
    workers = find_workers(config, env)
    if instances.is_distributed and workers is not None:
        raise ConfigurationError(
            f"poprun started this process, and {workers.source} names workers of the host session",
            "use one of them: poprun for IPUs, workers for CPUs and GPUs",
        )
    return instances if workers is None else workers


def find_workers(config: RunConfig, env: Mapping[str, str]) -> Optional[Workers]:
    """Reads ``TF_CONFIG``, Slurm's variables, or ``--hosts`` and ``--rank``; None: one worker.

    Raises:
        ConfigurationError: two of them name workers, or what they say makes no sense.
    """
    found = [w for w in (_from_tf_config(env), _from_slurm(env), _from_options(config)) if w is not None]
    if len(found) > 1:
        raise ConfigurationError(
            f"{found[0].source} and {found[1].source} both name the workers",
            "drop one of them; `srun` and `ipucnn launch` need no --hosts",
        )
    if not found:
        return None
    workers = found[0]
    if workers.count == 1:
        return None
    for address in workers.addresses:
        _split(address, workers.source)
    if len(set(workers.addresses)) < workers.count:
        twice = next(a for a in workers.addresses if workers.addresses.count(a) > 1)
        raise ConfigurationError(
            f"{workers.source} has the address {shown_value(twice)} twice",
            "give each worker a port of its own",
        )
    if not config.trusted_network:
        for address in workers.addresses:
            _require_private(address)
    return workers


def _from_tf_config(env: Mapping[str, str]) -> Optional[Workers]:
    text = env.get(TF_CONFIG)
    if not text:
        return None
    hint = (
        'it looks like {"cluster": {"worker": ["A:5000", "B:5000"]}, "task": {"type": "worker", "index": 0}}'
    )
    try:
        told = json.loads(text)
        cluster, task = told.get("cluster") or {}, told.get("task") or {}
        others = sorted(set(cluster) - {"chief", "worker"})
        addresses = [str(a) for job in ("chief", "worker") for a in cluster.get(job) or []]
        kind, index = task.get("type", "worker"), int(task.get("index", 0))
        first = {"chief": 0, "worker": len(cluster.get("chief") or [])}
        if addresses and (kind not in first or not 0 <= index < len(cluster.get(kind) or [])):
            raise ValueError(f"it has no task {index} of the type {shown_value(kind)}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{TF_CONFIG} cannot be used: {printable(str(error))}", hint) from None
    if others:
        raise ConfigurationError(
            f"{TF_CONFIG} has tasks of the type {shown_value(others[0])}, and training has workers alone",
            "leave chief and worker in it, or unset it",
        )
    if not addresses:
        return None
    return Workers(len(addresses), first[kind] + index, addresses=tuple(addresses), source=TF_CONFIG)


def _from_slurm(env: Mapping[str, str]) -> Optional[Workers]:
    """The tasks of a job step.  A batch script's own process is no step, and one worker."""
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env:
        return None
    hint = "srun sets these variables: start the program with it, or unset them"
    try:
        count, rank = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_PROCID"])
        if count == 1:
            return None
        nodes = expand_nodes(env["SLURM_STEP_NODELIST"])
        tasks = _tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
        number = int(env.get("SLURM_JOB_ID", "0")) + 100 * int(env.get("SLURM_STEP_ID", "0"))
        if len(nodes) != len(tasks) or sum(tasks) != count or not 0 <= rank < count:
            raise ValueError(f"task {rank} of {count} on {len(nodes)} node(s) with {tasks} tasks")
    except (KeyError, ValueError) as error:
        what = f"{error.args[0]} is not set" if isinstance(error, KeyError) else printable(str(error))
        raise ConfigurationError(f"Slurm's variables cannot be used: {what}", hint) from None
    if max(tasks) > 1 and env.get("SLURM_DISTRIBUTION", "block").startswith(("cyclic", "plane", "arbitrary")):
        raise ConfigurationError(
            f"Slurm deals the tasks out in the order '{printable(env['SLURM_DISTRIBUTION'])}'",
            "use srun --distribution=block",
        )
    first = _SLURM_PORTS + number % _SLURM_NUM_PORTS
    addresses = [f"{node}:{first + k}" for node, on_node in zip(nodes, tasks) for k in range(on_node)]
    return Workers(count, rank, addresses=tuple(addresses), source="srun")


def expand_nodes(text: str) -> List[str]:
    """The names that a Slurm node list stands for: ``a[1-3,07],b`` is a1, a2, a3, a07 and b.

    Raises:
        ValueError: it is no node list, or one of more than 65,536 nodes.
    """
    nodes: List[str] = []
    for part in re.findall(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*(?:,|$)", text):
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part.rstrip(",")):
            names = [name + more for name in names for more in _expand_range(piece)]
            if len(names) + len(nodes) > 2**16:
                raise ValueError(f"the node list {shown_value(text)} is too long")
        nodes += [name for name in names if name]
    if not nodes or any(not re.fullmatch(r"[\w.-]+", node) for node in nodes):
        raise ValueError(f"{shown_value(text)} is no node list")
    return nodes


def _expand_range(piece: str) -> Iterator[str]:
    if not piece.startswith("["):
        yield piece
        return
    for item in piece[1:-1].split(","):
        first, dash, last = item.partition("-")
        numbers = range(int(first), int(last if dash else first) + 1)
        if len(numbers) > 2**16:
            raise ValueError(f"the range {shown_value(item)} is too long")
        for number in numbers:
            yield str(number).zfill(len(first))


def _tasks_per_node(text: str) -> List[int]:
    """``2(x3),1`` is 2, 2, 2 and 1."""
    tasks: List[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item)
        if found is None:
            raise ValueError(f"{shown_value(text)} does not say how many tasks a node has")
        tasks += [int(found.group(1))] * int(found.group(2) or 1)
    return tasks


def _from_options(config: RunConfig) -> Optional[Workers]:
    if not config.hosts:
        if config.rank is not None:
            raise ConfigurationError(
                f"--rank {config.rank} without --hosts", "add --hosts A:5000,B:5000, the same on each worker"
            )
        return None
    count = len(config.hosts)
    if config.rank is None and count > 1:
        raise ConfigurationError(
            f"--hosts names {count} workers, and not which of them this is",
            "add --rank 0 on the first, 1 ...",
        )
    rank = config.rank or 0
    if rank >= count:
        raise ConfigurationError(
            f"--rank {rank} with {count} address(es) in --hosts",
            f"workers count from 0: at most --rank {count - 1}",
        )
    return Workers(count, rank, addresses=config.hosts, source="--hosts")


def _split(address: str, source: str) -> Tuple[str, int]:
    """Host and port of an address."""
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigurationError(
            f"{source}: {shown_value(address)} is no address of a worker",
            "give HOST:PORT, for example 10.0.0.1:5000",
        )
    return host, int(port)


def _require_private(address: str) -> None:
    """Refuses what is reached from everywhere.

    Raises:
        ConfigurationError: the address is public, or its name means nothing here.
    """
    host, port = _split(address, "the workers")
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise ConfigurationError(
            f"the name {shown_value(host)} of a worker is not known here", "check it, or give the IP address"
        ) from None
    public = sorted(ip for ip in found if not ipaddress.ip_address(ip.partition("%")[0]).is_private)
    if public:
        raise ConfigurationError(
            f"worker {shown_value(address)} has the public address {public[0]}: TensorFlow's servers run what anyone "
            "who reaches them sends",
            "use addresses of a private network, or add --trusted-network where a firewall keeps others out",
        )


# -- what has to be the same ------------------------------------------------------------------------------------------


def facts_of_machine() -> Dict[str, Any]:
    """What of this process can change the last digits of a result."""
    facts: Dict[str, Any] = {"processor": cpu_name(), "python": ".".join(map(str, sys.version_info[:2]))}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    facts.update({name: os.environ.get(name) for name in _VARIABLES})
    return facts


def _refuse_differences(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Refuses workers that would not train the same network; all of them come to the same verdict.

    Raises:
        ConfigurationError: naming the worker and what differs.
    """
    for rank, other in enumerate(everyone):
        for name, value in everyone[0]["run"].items():
            theirs = other["run"].get(name)
            if theirs != value:
                raise ConfigurationError(
                    f"worker {rank} has {name} {shown_value(theirs)}, and worker 0 has {shown_value(value)}",
                    "start all workers with the same command, data and version of ipucnn",
                )


def _byte_differences(everyone: Sequence[Mapping[str, Any]]) -> List[str]:
    """What differs that can change the last digits, one line each."""
    return [
        f"worker {rank} has {name} {shown_value(other['machine'].get(name))}, and worker 0 has {shown_value(value)}"
        for rank, other in enumerate(everyone)
        for name, value in everyone[0]["machine"].items()
        if other["machine"].get(name) != value
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
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, value: Any) -> None:
        """Sends a value; raises OSError where nobody is there to take it."""
        self.send_bytes(json.dumps(value).encode())

    def send_bytes(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next value; None for a heartbeat.

        Raises:
            OSError: the connection is gone.
            ValueError: it is none of ours.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        self.heard = time.monotonic()
        if length > _MAX_FRAME_BYTES:
            raise ValueError("a frame that is too long")
        return json.loads(self._read(length)) if length else None

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self._socket.recv(min(length - len(data), 2**20))
            if not part:
                raise ConnectionError("closed")
            data += part
            self.heard = time.monotonic()
        return data

    def set_timeout(self, seconds: Optional[float]) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()


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
    host, port = _split(workers.addresses[0], workers.source)
    loopback = host == "localhost" or _is_loopback(host)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    links: Dict[int, _Link] = {}
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1" if loopback and ":" not in host else host if loopback else "", port))
            listener.listen(workers.count)
        except OSError as error:
            raise ConfigurationError(
                f"worker 0 cannot listen at {workers.addresses[0]}: {error.strerror}", "use another port"
            ) from None
        listener.settimeout(_RETRY_S)
        while len(links) < workers.count - 1:
            interrupts.check()
            if time.monotonic() > until:
                missing = [str(r) for r in range(1, workers.count) if r not in links]
                raise WorkersError(
                    f"worker(s) {', '.join(missing)} of {workers.count} did not come to {workers.addresses[0]} in time",
                    "start them with the same command, or raise --start-timeout",
                )
            try:
                connection = listener.accept()[0]
            except socket.timeout:
                continue
            link = _Link(-1, connection)
            try:
                link.set_timeout(GRACE_S)
                rank = _welcome(link, workers, links)
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                link.close()
                continue
            link.rank = rank
            links[rank] = link
    except BaseException:
        for link in links.values():
            link.close()
        raise
    finally:
        listener.close()
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
    told = link.receive()
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
        raise ValueError(problem)
    link.send({"proof": _proof(str(told["nonce"]), 0, count)})
    return rank


def _connect(workers: Workers, until: float) -> _Link:
    """Every other worker: connects to worker 0.

    Raises:
        WorkersError: it was not there in time.
        ConfigurationError: it is of another cluster.
    """
    host, port = _split(workers.addresses[0], workers.source)
    while True:
        interrupts.check()
        try:
            link = _Link(0, socket.create_connection((host, port), timeout=GRACE_S))
        except OSError:
            if time.monotonic() > until:
                raise WorkersError(
                    f"worker 0 was not at {workers.addresses[0]} in time",
                    "start it with the same command, or raise --start-timeout",
                ) from None
            time.sleep(_RETRY_S)
            continue
        try:
            own = secrets.token_hex(16)
            nonce = str(link.receive()["nonce"])
            proof = _proof(nonce, workers.index, workers.count)
            link.send({"rank": workers.index, "count": workers.count, "nonce": own, "proof": proof})
            answer = link.receive()
            if "problem" in answer:
                raise ConfigurationError(
                    f"worker 0 at {workers.addresses[0]} sent worker {workers.index} away: "
                    f"{printable(str(answer['problem']))}",
                    "start all workers of a run with the same command and the same secret",
                )
            if not hmac.compare_digest(str(answer["proof"]), _proof(own, 0, workers.count)):
                raise ConfigurationError(
                    f"who listens at {workers.addresses[0]} does not know this run's secret ({SECRET_VARIABLE})",
                    "give all workers the same one",
                )
            return link
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            link.close()
            time.sleep(_RETRY_S)


# -- the cluster ------------------------------------------------------------------------------------------------------


class Cluster:
    """The workers of a run, connected; of one worker alone if nothing else is said.

    Attributes:
        count: of workers.
        rank: which of them this one is.
        warnings: what differs between them that can change the last digits.
        place: TensorFlow's name of this worker, to precede that of a device; "" for one worker.
    """

    def __init__(self, workers: Optional[Workers] = None, links: Optional[Dict[int, _Link]] = None) -> None:
        self.workers = workers
        self.count = 1 if workers is None else workers.count
        self.rank = 0 if workers is None else workers.index
        self.addresses = () if workers is None else workers.addresses
        self.warnings: List[str] = []
        self.place = ""
        self._links = links or {}
        self._on_leaving: List[Callable[[], None]] = []
        self._is_closed = False
        self._strategy: Any = None
        self._num_collectives = 0
        self._collective_s: Any = None
        for link in self._links.values():
            link.set_timeout(None)
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()
        if self._links:
            threading.Thread(target=self._watch, daemon=True).start()

    def exchange(self, what: str, value: Any) -> List[Any]:
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

    def first(self, what: str, value: Any) -> Any:
        """What worker 0 has, on all of them."""
        return self.exchange(what, value)[0]

    def any_signal(self, flag: bool) -> bool:
        """Whether a flag is set on any worker.  A signal that one of them got is then noted on all."""
        if self.count == 1:
            return flag
        told = self.exchange("signals", [flag, interrupts.noted()])
        codes = [code for _, code in told if code is not None]
        if codes:
            interrupts.note(codes[0])
        return any(flag for flag, _ in told)

    def on_leaving(self, function: Callable[[], None]) -> None:
        """What is done before this process ends because another worker left."""
        self._on_leaving.append(function)

    def close(self, error: Optional[BaseException] = None) -> None:
        """Parts with the others: in order, where all of them come here; else they are told to end as well."""
        if self._is_closed or self.count == 1:
            return
        try:
            if error is None or isinstance(error, (interrupts.Interrupted, GeneratorExit)):
                self.exchange("end", None)
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

    def _send(self, rank: int, value: Any) -> None:
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
            except (OSError, ValueError):
                if link.ended is None:
                    self._leave(link.rank)
                return
            if isinstance(value, dict):
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
            time.sleep(HEARTBEAT_S)
            now = time.monotonic()
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send_bytes(b"")
                if self._is_closed:
                    return
                is_silent = now - link.heard > SILENCE_S
                if is_silent or (link.ended is not None and now - link.ended > GRACE_S):
                    self._leave(link.rank)

    def _leave(self, rank: int) -> None:
        """Ends this process: without the other worker there is nothing that it can do."""
        if self._is_closed:
            return
        self._is_closed = True
        code = interrupts.noted()
        lines = (
            f"error: worker {rank} left\nhint: continue with --resume on any number of workers that fits\n"
        )
        for function in self._on_leaving:
            with contextlib.suppress(Exception):
                function()
        with contextlib.suppress(OSError):
            os.write(2, (lines if code is None else "interrupted\n").encode())
        os._exit(EXIT_WORKERS if code is None else code)

    # -- TensorFlow's part

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
        try:
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

    def gather(self, values: Tensor) -> Tensor:
        """What each worker has, in their order, inside a compiled function.

        Args:
            values: float32 (n,), of the same length everywhere.

        Returns:
            float32 (workers, n).
        """
        import tensorflow as tf

        self._num_collectives += 1
        size = values.shape[0]
        with tf.device(f"{self.place}/device:CPU:0"):
            with tf.control_dependencies([values]):
                begun = self._now()
            with tf.control_dependencies([begun]):
                gathered = tf.raw_ops.CollectiveGatherV2(
                    input=tf.identity(values),
                    group_size=self.count,
                    group_key=_GROUP_KEY,
                    instance_key=self._num_collectives,
                    ordering_token=[],
                    communication_hint="ring",
                    timeout_seconds=0.0,
                )
            with tf.control_dependencies([gathered]):
                self.collective_s.assign_add(self._now() - begun)
        return tf.reshape(gathered, [self.count, size])

    def _now(self) -> Tensor:
        """Seconds, when its turn comes; TensorFlow's own time stamps are refused where operations are deterministic."""
        import tensorflow as tf

        return tf.numpy_function(lambda: np.float64(time.perf_counter()), [], tf.float64)

    @property
    def collective_s(self) -> Any:
        """A variable: seconds in collectives so far, waiting for other workers included."""
        if self._collective_s is None:
            import tensorflow as tf

            with tf.init_scope():
                self._collective_s = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        return self._collective_s


def join(workers: Workers, config: RunConfig, run: Mapping[str, Any], threads: int) -> Tuple[Cluster, int]:
    """Connects the workers, and compares what they are going to do; before TensorFlow is imported.

    Args:
        workers: of this run.
        config: with ``start_timeout`` and ``require_same_bytes``.
        run: what has to be the same on all of them, by its name; plain values.
        threads: that share an operation, as this worker would have it.

    Returns:
        The cluster, and the number of threads that share an operation on each worker.

    Raises:
        WorkersError: not all of them came.
        ConfigurationError: they would not train the same network, or not to the same bytes where that is required.
    """
    until = time.monotonic() + config.start_timeout
    links = {0: _connect(workers, until)} if workers.index else _accept(workers, until)
    cluster = Cluster(workers, links)
    try:
        own = {
            "run": {"ipucnn": __version__, **run},
            "machine": facts_of_machine(),
            "threads": threads,
        }
        everyone = cluster.exchange("facts", own)
        _refuse_differences(everyone)
        cluster.warnings = _byte_differences(everyone)
        if cluster.warnings and config.require_same_bytes:
            raise ConfigurationError(
                f"--require-same-bytes: {cluster.warnings[0]}",
                "use machines of one type with the same installation, or drop --require-same-bytes",
            )
    except UserError as error:
        cluster.close(error)
        raise
    return cluster, int(everyone[0]["threads"])


def check_sharing(num_groups: int, group_size: int, workers: int, max_workers: int) -> None:
    """Refuses numbers of workers that no number of fused micro-batches lets share a weight update evenly.

    Args:
        num_groups: of micro-batches in a weight update, that are computed together in any case.
        group_size: micro-batches of one.
        workers: that there are.
        max_workers: that are to share a weight update later.

    Raises:
        ConfigurationError: with what would do.
    """
    if max_workers > 1 and max_workers % workers:
        raise ConfigurationError(
            f"--max-workers {max_workers} with {workers} workers: it has to be a multiple of their number",
            f"use --max-workers {max_workers * workers}, or leave it out",
        )
    sharing = max(max_workers, workers)
    if num_groups % sharing:
        what = f"{num_groups} micro-batch(es)"
        if group_size > 1:
            what = f"{num_groups} group(s) of {group_size} replicas that share batch norm's statistics"
        raise ConfigurationError(
            f"a weight update has {what}, which {sharing} workers cannot share evenly",
            f"use a divisor of {num_groups}, or more --gradient-accumulation-count or --num-replicas",
        )


def check_share(num_chunks: int, workers: int) -> None:
    """Refuses workers that cannot share a weight update's chunks evenly.

    Raises:
        ConfigurationError: with the numbers of workers that can.
    """
    if num_chunks % workers:
        legal = [str(d) for d in range(1, num_chunks + 1) if num_chunks % d == 0]
        shown = ", ".join(legal if len(legal) < 10 else [*legal[:8], "..."])
        raise ConfigurationError(
            f"{workers} workers cannot share {num_chunks} chunk(s) of micro-batches per weight update evenly",
            f"use {shown} worker(s); a new run with --max-workers {workers} makes chunks for {workers}",
        )


def require_one(command: str, config: RunConfig) -> None:
    """Refuses several workers for what runs in one process.

    Raises:
        ConfigurationError: there are several.
    """
    workers = find_workers(config, os.environ)
    if workers is not None:
        raise ConfigurationError(
            f"{workers.source} names {workers.count} workers, and `ipucnn {command}` is one process",
            "start it once: without srun, TF_CONFIG and --hosts",
        )
