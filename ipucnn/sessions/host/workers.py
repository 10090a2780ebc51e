"""Reads the workers of a run from ``TF_CONFIG`` or Slurm, and refuses combinations that cannot work.

All checks run before TensorFlow is imported.
"""

import ipaddress
import itertools
import json
import math
import os
import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipucnn.config.bounds import MAX_CLUSTER
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import ENDS_RUN, RESUMABLE
from ipucnn.errors import ConfigurationError
from ipucnn.machine import num_cores, operation_threads
from ipucnn.sessions.host.division import num_fused_batches
from ipucnn.sessions.processes import Instances, find_instances
from ipucnn.text import counted, printable, shown_value
from ipucnn.training.batching import divisors
from ipucnn.training.program import Program

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


def find_group(trusted_network: bool) -> Instances:
    """Returns the group of processes of this one: instances under ``poprun``, else workers, else this process alone.

    Args:
        trusted_network: whether addresses of workers may be public.

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


def group_of_environment() -> Instances:
    """Returns the group of processes of a command that does not train, and so has no options about workers.

    Such a command starts no servers of TensorFlow, so addresses may be public.

    Raises:
        ConfigurationError: the variables that name the group are not valid.
    """
    return find_group(trusted_network=True)


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


def resume_command(folder: Path, user_files: Sequence[str]) -> str:
    """Returns the command that continues a run, with the same number of workers if ``ipucnn launch`` started it.

    Args:
        folder: the run folder.
        user_files: the command-line words that name the user's own files.
    """
    count = os.environ.get(LAUNCH_VARIABLE, "")
    launch = ["launch", "-n", count, "--"] if count.isdigit() else []
    words = ["ipucnn", *launch, "train", "--resume", "--run-dir", str(folder), *user_files]
    return shlex.join(words)


def sharers(workers: int, devices: int) -> str:
    """Returns a phrase for the workers and devices that share a weight update."""
    if devices == 1:
        return counted(workers, "worker")
    return f"{devices} devices" if workers == 1 else f"{workers} workers with {devices} devices each"


def check_sharing(program: Program, config: RunConfig, workers: int, devices: int = 1) -> None:
    """Refuses numbers of workers and devices that cannot share a weight update evenly.

    They share its groups of fused micro-batches.  If the size of these groups is not chosen yet, they share the
    smallest indivisible units: micro-batches, or groups of them whose replicas share batch norm's statistics.

    Args:
        program: the Program of the run.
        config: the options of the run, with ``max_workers``.
        workers: the number of workers.
        devices: the number of devices of each worker.

    Raises:
        ConfigurationError: the division is uneven; the message has the numbers that work.
    """
    all_devices, most = workers * devices, config.max_workers
    who, num_groups = sharers(workers, devices), num_fused_batches(program)
    if program.fused_micro_batches:
        for sharing, name in ((all_devices, who), (most, sharers(most, 1))):
            if num_groups % sharing:
                groups = f"{counted(num_groups, 'group')} of fused micro-batches"
                raise ConfigurationError(
                    f"{name} cannot share the {groups} of a weight update evenly",
                    f"use {_legal(num_groups)} of them, or begin a new run with --max-workers {sharing}",
                )
        return
    if most > 1 and most % all_devices:
        raise ConfigurationError(
            f"--max-workers {most} with {who}: it has to be a multiple of {all_devices}",
            f"use {_legal(most, devices if workers > 1 else 1)} of them; a new run can have another --max-workers, for "
            f"example {most * all_devices}",
        )
    sharing, group_size = max(most, all_devices), program.dbn_replica_group_size
    if num_groups % sharing:
        times = sharing // math.gcd(num_groups, sharing)
        what = counted(num_groups, "micro-batch")
        if group_size > 1:
            what = (
                f"{counted(num_groups, 'group')} of {group_size} replicas that share batch norm's statistics"
            )
        raise ConfigurationError(
            f"a weight update has {what}, which {who if sharing == all_devices else sharers(sharing, 1)} cannot share "
            "evenly",
            f"add --gradient-accumulation-count {program.gradient_accumulation_count * times}, and divide "
            f"--micro-batch-size by {times} to keep the global batch"
            + (f"; or share the weight update among {_legal(num_groups)} of them" if num_groups > 1 else ""),
        )


def notes_of_sharing(
    workers: Optional[Workers],
    config: RunConfig,
    program: Program,
    is_new: bool,
    num_devices: Tuple[int, int] = (1, 1),
) -> List[str]:
    """Returns notes to print at the start: who trains, how a weight update is shared, and who could join uninvited.

    Args:
        workers: the workers of the run; None: this process is alone.
        config: the options of the run.
        program: the Program, with its number of fused micro-batches.
        is_new: whether the run begins, rather than continues from a checkpoint.
        num_devices: the number of each worker's devices that take part, and the number of all its devices.
    """
    fused, (devices, present) = program.fused_micro_batches, num_devices
    count, lines = 1 if workers is None else workers.count, []
    num_groups, sharing = num_fused_batches(program), count * devices
    if sharing > 1:
        threads = "" if workers is None else f", {counted(operation_threads(), 'thread')} each"
        lines.append(
            f"{sharers(count, devices)}{threads}: a weight update is {counted(num_groups, 'group')} of "
            f"{counted(fused, 'fused micro-batch')}, {num_groups // sharing} for each "
            f"{'worker' if devices == 1 else 'device'}"
        )
    if devices < present:
        lines.append(
            f"{devices} of {present} devices {'takes' if devices == 1 else 'take'} part: more cannot share the "
            f"{counted(program.num_micro_batches, 'micro-batch')} of a weight update evenly"
            + (", or other workers have no more" if count > 1 else "")
        )
    if workers is not None:
        lines.append(
            f"TensorFlow's servers ({', '.join(workers.addresses)}) listen on every network of their machines, without "
            "authentication"
        )
    if is_new and config.fused_micro_batches is None and config.max_workers < sharing:
        lines.append(
            f"the groups of fused micro-batches are those of --max-workers {sharing}: a run with another number of "
            f"workers{' or devices' if devices > 1 else ''} gives the same bytes if it begins with that option"
        )
    if workers is not None and not os.environ.get(SECRET_VARIABLE):
        lines.append(
            f"warning: {SECRET_VARIABLE} is not set, so that whoever reaches worker 0 in time can take the place of a "
            "worker; set it to the same text on all of them"
        )
    return lines


def _legal(shares: int, devices: int = 1) -> str:
    """Returns the numbers of workers with ``devices`` devices each that divide ``shares`` evenly, as text."""
    legal = ["1"] if shares % devices else [str(count) for count in divisors(shares // devices)]
    return ", ".join(legal if len(legal) < 10 else [*legal[:8], "..."])


def threads_of_training(program: Program, sharing: int) -> int:
    """Returns the default number of threads per operation of a new run: half of the cores, or all of them.

    It is half of them if every worker can compute two groups of fused micro-batches in parallel.  Operations on small
    images are too short to keep all cores busy, and two operations wait less for each other than the halves of one.
    Runs that begin with the same ``--max-workers`` on equal machines have the same number, for any number of workers
    and devices.

    Args:
        program: the Program, with the number of fused micro-batches if it is known.
        sharing: the number of workers that share the run, or ``--max-workers`` if that is larger.
    """
    cores = num_cores()
    is_shared = cores % 2 == 0 and num_fused_batches(program) % (2 * sharing) == 0
    return cores // 2 if is_shared else cores


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
