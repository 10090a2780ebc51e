"""Finds out who the workers of a run are, from ``TF_CONFIG`` or Slurm, and refuses what cannot work.

Everything here is looked at before TensorFlow is imported.
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
from ipucnn.sessions.poplar.popdist import Instances, find_instances
from ipucnn.text import counted, printable, shown_value
from ipucnn.training.batching import divisors
from ipucnn.training.program import Program

SECRET_VARIABLE = "IPUCNN_SECRET"
TF_CONFIG = "TF_CONFIG"
# How many workers ``ipucnn launch`` started; it sets this for each of them, and nobody else does.
LAUNCH_VARIABLE = "IPUCNN_LAUNCH"
# A worker that says nothing for so long has left: it was stopped, or its machine or network is gone.
SILENCE_S = 30.0
# How long the others may take to end by themselves after one worker ended with an error, which may be theirs, too.
GRACE_S = 5.0
# What to do where a worker is lost: of a run, and of what keeps nothing.
GO_ON = "continue with --resume on any number of workers that fits"
BEGIN_AGAIN = "type the same command again, with any number of workers"
# Ports of workers under Slurm begin here, at one of so many, chosen by the number of the job.
_SLURM_PORTS, _SLURM_NUM_PORTS = 20_000, 10_000
# Of a Slurm node list, and the characters of a host's name (RFC 1035).
_MOST_NODES, _LONGEST_NAME = 2**16, 253


@dataclass(frozen=True)
class Workers(Instances):
    """The workers of a run, and which one this process is.

    Attributes:
        addresses: ``host:port`` of each.
        source: who named them, for messages.
    """

    addresses: Tuple[str, ...] = ()
    source: str = ""


def find_group(config: RunConfig) -> Instances:
    """The group of processes that this one belongs to: instances under ``poprun``, else workers, else it is alone.

    Raises:
        ConfigurationError: what names the group makes no sense.
    """
    instances = find_instances(os.environ)
    workers = find_workers(config, os.environ)
    if instances.is_distributed and workers is not None:
        raise ConfigurationError(
            f"poprun started this process, and {workers.source} names workers of the host session",
            "use one of them: poprun for IPUs, workers for CPUs and GPUs",
        )
    return instances if workers is None else workers


def group_of_environment() -> Instances:
    """The group of processes of a command that trains nothing, and so has no options of its own to name workers.

    TensorFlow's servers are not started for it, so that addresses may be public.

    Raises:
        ConfigurationError: what names the group makes no sense.
    """
    return find_group(RunConfig(trusted_network=True))


def compared_options(config: RunConfig) -> Dict[str, Any]:
    """What all workers have to be told alike, by flag."""
    compared = (
        spec for spec in SPECS if spec.name not in RESUMABLE or spec.name in (*ENDS_RUN, "max_workers")
    )
    return {spec.flag: spec.yaml_value(getattr(config, spec.name)) for spec in compared}


def find_workers(config: RunConfig, env: Mapping[str, str]) -> Optional[Workers]:
    """Reads ``TF_CONFIG`` or Slurm's variables; None: one worker.

    Raises:
        ConfigurationError: both of them name workers, or what they say makes no sense.
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
    """The tasks of a job step.  A batch script's own process is no step, and one worker."""
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
    """The names that a Slurm node list stands for: ``a[1-3,07],b`` is a1, a2, a3, a07 and b.

    Raises:
        ValueError: it is no node list, or one of more than 65,536 nodes.
    """
    nodes: List[str] = []
    for part in re.findall(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*(?:,|$)", text):
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part.rstrip(",")):
            expanded = list(itertools.islice(_expand_range(piece), _MOST_NODES + 1))
            # Before they are made: two ranges of 65,536 would take all memory.
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
    """``2(x3),1`` is 2, 2, 2 and 1."""
    tasks: List[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item)
        if match is None:
            raise ValueError(f"{shown_value(text)} does not say how many tasks a node has")
        times = int(match.group(2) or 1)
        if len(tasks) + times > _MOST_NODES:
            raise ValueError(f"{shown_value(text)} has more than {_MOST_NODES:,} nodes")
        tasks += [int(match.group(1))] * times
    return tasks


def split_address(address: str, source: str) -> Tuple[str, int]:
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


def resume_command(folder: Path, own_files: Sequence[str]) -> str:
    """What to type to continue a run: with as many workers, if ``ipucnn launch`` started this one.

    Args:
        own_files: words that name files of the user's own.
    """
    count = os.environ.get(LAUNCH_VARIABLE, "")
    launch = ["launch", "-n", count, "--"] if count.isdigit() else []
    words = ["ipucnn", *launch, "train", "--resume", "--run-dir", str(folder), *own_files]
    return shlex.join(words)


def sharers(workers: int, devices: int) -> str:
    """Who shares a weight update, in words."""
    if devices == 1:
        return counted(workers, "worker")
    return f"{devices} devices" if workers == 1 else f"{workers} workers with {devices} devices each"


def check_sharing(program: Program, config: RunConfig, workers: int, devices: int = 1) -> None:
    """Refuses workers, of so many devices each, that cannot share a weight update evenly.

    They share its chunks; where it is not known how many micro-batches are one chunk, they share those that are
    computed together in any case.

    Raises:
        ConfigurationError: with what would do.
    """
    together, most = workers * devices, config.max_workers
    who = sharers(workers, devices)
    if program.fused_micro_batches:
        chunks = program.num_micro_batches // program.fused_micro_batches
        for sharing, name in ((together, who), (most, sharers(most, 1))):
            if chunks % sharing:
                raise ConfigurationError(
                    f"{name} cannot share the {counted(chunks, 'chunk')} of a weight update evenly",
                    f"use {_legal(chunks)} of them; a new run with --max-workers {sharing} makes chunks for {sharing}",
                )
        return
    if most > 1 and most % together:
        raise ConfigurationError(
            f"--max-workers {most} with {who}: it has to be a multiple of {together}",
            f"use {_legal(most, devices if workers > 1 else 1)} of them; a new run can have another --max-workers, for "
            f"example {most * together}",
        )
    sharing, group_size = max(most, together), program.dbn_replica_group_size
    num_groups = program.num_micro_batches // group_size
    if num_groups % sharing:
        times = sharing // math.gcd(num_groups, sharing)
        what = counted(num_groups, "micro-batch")
        if group_size > 1:
            what = (
                f"{counted(num_groups, 'group')} of {group_size} replicas that share batch norm's statistics"
            )
        raise ConfigurationError(
            f"a weight update has {what}, which {who if sharing == together else sharers(sharing, 1)} cannot share "
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
    """What to tell at the start: who trains, how a weight update is shared, and who could take part uninvited.

    Args:
        workers: of the run; None: this process is alone.
        config: the run's.
        program: with its number of fused micro-batches.
        is_new: the run begins, and does not go on from a checkpoint.
        num_devices: of each worker, that take part, and that there are.
    """
    fused, (devices, present) = program.fused_micro_batches, num_devices
    count, lines = 1 if workers is None else workers.count, []
    chunks, together = program.num_micro_batches // fused, count * devices
    if together > 1:
        threads = "" if workers is None else f", {counted(operation_threads(), 'thread')} each"
        lines.append(
            f"{sharers(count, devices)}{threads}: a weight update is {chunks} chunks of "
            f"{counted(fused, 'micro-batch')}, {chunks // together} for each {'worker' if devices == 1 else 'device'}"
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
    if is_new and config.fused_micro_batches is None and config.max_workers < together:
        lines.append(
            f"the chunks are those of --max-workers {together}: a run with another number of workers"
            f"{' or devices' if devices > 1 else ''} gives the same bytes if it begins with that option"
        )
    if workers is not None and not os.environ.get(SECRET_VARIABLE):
        lines.append(
            f"warning: {SECRET_VARIABLE} is not set, so that whoever reaches worker 0 in time can take the place of a "
            "worker; set it to the same text on all of them"
        )
    return lines


def _legal(shares: int, devices: int = 1) -> str:
    """The numbers of workers, of so many devices each, that divide so many shares."""
    legal = ["1"] if shares % devices else [str(count) for count in divisors(shares // devices)]
    return ", ".join(legal if len(legal) < 10 else [*legal[:8], "..."])


def threads_of_training(config: RunConfig, program: Program, workers: int = 1) -> int:
    """How many threads share an operation of a new run, unless it is told: half of the cores, or all of them.

    Half of them where every worker can compute two chunks side by side.  Operations on small images are too short to
    keep all cores busy, and two of them wait less for each other than the halves of one.  Runs that begin with the same
    ``--max-workers`` on like machines have as many, however many workers and devices there are.

    Args:
        config: of the run.
        program: with the number of fused micro-batches, if it is known.
        workers: that share the run.
    """
    cores = num_cores()
    units = program.num_micro_batches // (program.fused_micro_batches or program.dbn_replica_group_size)
    is_shared = cores % 2 == 0 and units % (2 * max(workers, config.max_workers)) == 0
    return cores // 2 if is_shared else cores


def require_one(what: str, config: RunConfig, hint: str = "") -> None:
    """Refuses several workers for what runs in one process.

    Args:
        what: that is, for the message.
        config: with ``trusted_network``.
        hint: what else there is to do.

    Raises:
        ConfigurationError: there are several.
    """
    workers = find_workers(config, os.environ)
    if workers is not None:
        raise ConfigurationError(
            f"{workers.source} names {workers.count} workers, and {what} is one process",
            f"start it once: without srun and TF_CONFIG{hint}",
        )
