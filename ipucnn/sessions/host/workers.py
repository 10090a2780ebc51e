"""Reads the workers of a run from ``TF_CONFIG`` or Slurm, and refuses combinations that cannot work.

All checks run before TensorFlow is imported.
"""

import ipaddress
import itertools
import json
import os
import re
import socket
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from ipucnn.config.bounds import MAX_CLUSTER
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import ENDS_RUN, RESUMABLE
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.processes import Instances, find_instances
from ipucnn.text import counted, printable, shown_value

SECRET_VARIABLE = "IPUCNN_SECRET"
TF_CONFIG = "TF_CONFIG"
# The number of workers that ``ipucnn launch`` started; only ``ipucnn launch`` sets it, for each of them.
LAUNCH_VARIABLE = "IPUCNN_LAUNCH"
# A worker that sends nothing for this long counts as lost: it was stopped, or its machine or network is gone.
SILENCE_S = 30.0
# The time for the other workers to end by themselves after one ended with an error, which they may have as well.
GRACE_S = 5.0
# The hints if a worker is lost: for a run, and for commands that save nothing.
GO_ON = "continue with --resume on any number of workers that fits"
BEGIN_AGAIN = "type the same command again, with any number of workers"
# The first port of the workers under Slurm, and the size of the range; the job's number chooses a port in it.
_SLURM_PORTS, _SLURM_NUM_PORTS = 20_000, 10_000
# The most nodes in a Slurm node list, and the most characters in a host name (RFC 1035).
_MOST_NODES, _LONGEST_NAME = 2**16, 253


@dataclass(frozen=True)
class Workers(Instances):
    """The workers of a run, and the number of this one.

    Attributes:
        addresses: ``host:port`` of each worker.
        source: the source of the addresses, for messages.
    """

    addresses: Tuple[str, ...] = ()
    source: str = ""


def find_group(trusted_network: bool = True) -> Instances:
    """Returns the group of processes of this one: instances under ``poprun``, else workers, else this process alone.

    Args:
        trusted_network: whether addresses of workers may be public.  They may for commands that do not train, because
            these start no servers of TensorFlow.

    Raises:
        ConfigurationError: the variables that name the group are not valid.
    """
    instances = find_instances(os.environ)
    workers = find_workers(os.environ, trusted_network)
    if instances.under_poprun and workers is not None:
        raise ConfigurationError(
            f"poprun started this process, and {workers.source} names workers of the host session",
            "use one of them: poprun for IPUs, workers for CPUs and GPUs",
        )
    return instances if workers is None else workers


def compared_options(config: RunConfig) -> Dict[str, Any]:
    """Returns the options that have to be equal on all workers, by flag."""
    compared = (
        spec for spec in SPECS if spec.name not in RESUMABLE or spec.name in (*ENDS_RUN, "max_workers")
    )
    return {spec.flag: spec.yaml_value(getattr(config, spec.name)) for spec in compared}


def find_workers(env: Mapping[str, str], trusted_network: bool = False) -> Optional[Workers]:
    """Reads the workers from ``TF_CONFIG`` or Slurm's variables; returns None for one worker.

    Raises:
        ConfigurationError: both sources name workers, or the values are not valid.
    """
    by_variable, by_slurm = _from_tf_config(env), _from_slurm(env)
    if by_variable is not None and by_slurm is not None:
        raise ConfigurationError(
            f"{by_variable.source} and {by_slurm.source} both name the workers",
            f"unset {TF_CONFIG}, or start the program without srun",
        )
    workers = by_variable or by_slurm
    if workers is None or workers.count == 1:
        return None
    if workers.count > MAX_CLUSTER:
        raise ConfigurationError(
            f"{workers.source} names {workers.count:,} workers, and {MAX_CLUSTER:,} are the most",
            "start fewer workers, with more cores each",
        )
    for address in workers.addresses:
        split_address(address, workers.source)
    if len(set(workers.addresses)) < workers.count:
        twice = next(a for a in workers.addresses if workers.addresses.count(a) > 1)
        raise ConfigurationError(
            f"{workers.source} has the address {shown_value(twice)} twice",
            "give each worker a port of its own",
        )
    if not trusted_network:
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
        named = json.loads(text)
        cluster, task = named.get("cluster") or {}, named.get("task") or {}
        others = sorted(set(cluster) - {"chief", "worker"})
        addresses = [str(a) for job in ("chief", "worker") for a in cluster.get(job) or []]
        kind, index = task.get("type", "worker"), int(task.get("index", 0))
        first = {"chief": 0, "worker": len(cluster.get("chief") or [])}
        if addresses and (kind not in first or not 0 <= index < len(cluster.get(kind) or [])):
            raise ValueError(f"it has no task {index} of the type {shown_value(kind)}")
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
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
    """Returns the tasks of a Slurm job step as workers; None for one task, and for a batch script's own process."""
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env:
        return None
    hint = "srun sets these variables: start the program with it, or unset them"
    try:
        count, rank = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_PROCID"])
        if count == 1:
            return None
        if count > MAX_CLUSTER:
            raise ValueError(f"there are {count:,} tasks, and {MAX_CLUSTER:,} workers are the most")
        nodes = expand_nodes(env["SLURM_STEP_NODELIST"])
        tasks = _tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
        number = int(env.get("SLURM_JOB_ID", "0")) + 100 * int(env.get("SLURM_STEP_ID", "0"))
        if len(nodes) != len(tasks) or sum(tasks) != count or not 0 <= rank < count:
            raise ValueError(f"task {rank} of {count} on {counted(len(nodes), 'node')} with {tasks} tasks")
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
    """Returns the node names of a Slurm node list: ``a[1-3,07],b`` is a1, a2, a3, a07 and b.

    Raises:
        ValueError: the text is not a node list, or has more than 65,536 nodes.
    """
    nodes: List[str] = []
    for part in re.findall(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*(?:,|$)", text):
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part.rstrip(",")):
            expanded = list(itertools.islice(_expand_range(piece), _MOST_NODES + 1))
            # The check comes before the product: two ranges of 65,536 would take all memory.
            if len(names) * len(expanded) + len(nodes) > _MOST_NODES:
                raise ValueError(f"the node list {shown_value(text)} is too long")
            names = [name + more for name in names for more in expanded]
            if any(len(name) > _LONGEST_NAME for name in names):
                raise ValueError(f"{shown_value(text)} is no node list")
        nodes += [name for name in names if name]
    if not nodes or any(not re.fullmatch(r"[\w.-]+", node) for node in nodes):
        raise ValueError(f"{shown_value(text)} is no node list")
    return nodes


def _expand_range(piece: str) -> Iterator[str]:
    if not piece.startswith("["):
        yield piece
        return
    for item in piece[1:-1].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item)
        numbers = range(0) if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
        if match is None or not numbers:
            raise ValueError(f"{shown_value(item)} is no range of nodes")
        for number in numbers:
            yield str(number).zfill(len(match[1]))


def _tasks_per_node(text: str) -> List[int]:
    """Returns the number of tasks on each node: ``2(x3),1`` is 2, 2, 2 and 1."""
    tasks: List[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item)
        if match is None:
            raise ValueError(f"{shown_value(text)} does not say how many tasks a node has")
        repetitions = int(match.group(2) or 1)
        if len(tasks) + repetitions > _MOST_NODES:
            raise ValueError(f"{shown_value(text)} has more than {_MOST_NODES:,} nodes")
        tasks += [int(match.group(1))] * repetitions
    return tasks


def split_address(address: str, source: str) -> Tuple[str, int]:
    """Returns host and port of an address.

    Raises:
        ConfigurationError: the address is not valid.
    """
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigurationError(
            f"{source}: {shown_value(address)} is no address of a worker",
            "give HOST:PORT, for example 10.0.0.1:5000",
        )
    return host, int(port)


def _require_private(address: str) -> None:
    """Refuses public addresses.

    Raises:
        ConfigurationError: the address is public, or its host name cannot be resolved here.
    """
    host, port = split_address(address, "the workers")
    try:
        ips = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise ConfigurationError(
            f"the name {shown_value(host)} of a worker is not known here", "check it, or give the IP address"
        ) from None
    public = sorted(ip for ip in ips if not ipaddress.ip_address(ip.partition("%")[0]).is_private)
    if public:
        raise ConfigurationError(
            f"worker {shown_value(address)} has the public address {public[0]}: TensorFlow's servers run what anyone "
            "who reaches them sends",
            "use addresses of a private network, or add --trusted-network where a firewall keeps others out",
        )


def require_one(what: str, trusted_network: bool, hint: str = "") -> None:
    """Refuses several workers for work that runs in one process.

    Args:
        what: the name of the work, for the message.
        trusted_network: see :func:`find_group`.
        hint: an addition to the hint of the message.

    Raises:
        ConfigurationError: there are several workers.
    """
    workers = find_workers(os.environ, trusted_network)
    if workers is not None:
        raise ConfigurationError(
            f"{workers.source} names {workers.count} workers, and {what} is one process",
            f"start it once: without srun and TF_CONFIG{hint}",
        )
