"""The cores and memory of this machine that this process may use, and the processor's name.

All queries of the system are here.  psutil answers most of them; the limits of control groups and the processor's
description are read from Linux's files, whose paths no user chooses.
"""

import collections
import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Callable, Deque, Iterable, Iterator, List, Optional, Sequence, Tuple, TypeVar

# Files of both versions of control groups: memory limit, use, and the part that is reclaimable pages of files.
_FILES = ("memory.max", "memory.current", "inactive_file")
_FILES_OF_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
# Packages and environment variables that can change the last digits of a result, besides processor and threads.
BYTE_PACKAGES = ("tensorflow", "keras", "numpy")
BYTE_VARIABLES = ("TF_DETERMINISTIC_OPS", "TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS")


_Result = TypeVar("_Result")


def num_cores() -> int:
    """CPU cores that this process may keep busy: those of its affinity, or fewer if a control group has a quota.

    Part of a core counts as one, so that the whole quota is used.
    """
    quota = cpu_quota()
    return schedulable_cores() if quota is None else min(schedulable_cores(), max(1, math.ceil(quota)))


def schedulable_cores() -> int:
    """CPU cores in the affinity of this process (``taskset``, cpusets); other libraries start a thread for each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota() -> Optional[float]:
    """Processor time per time that the tightest control group of this process allows, in cores; None if unlimited."""
    return min(cpu_quotas(), default=None)


# Number of threads per operation, if the run fixes it, and whether any other number is an error.
_fixed_threads: Optional[int] = None
_are_required = False


def fix_threads(number: Optional[int], required: bool = True) -> None:
    """Fixes the number of threads per operation, independent of the cores, because it determines the order of sums.

    It must be called before TensorFlow is imported.

    Args:
        number: threads per operation; None for one per core.
        required: whether it is an error if TensorFlow already runs with another number in this process; otherwise
            that number is used.
    """
    global _fixed_threads, _are_required
    _fixed_threads, _are_required = number, number is not None and required


def fixed_threads() -> Optional[int]:
    """The number of threads from :func:`fix_threads`; None if it is not fixed."""
    return _fixed_threads


def are_threads_required() -> bool:
    """Whether :func:`fix_threads` required its number of threads."""
    return _are_required


def operation_threads() -> int:
    """Threads per operation: the fixed number, else one for each core that this process may use."""
    return _fixed_threads or num_cores()


def operations_at_once() -> int:
    """Number of operations, of :func:`operation_threads` threads each, that keep all cores busy."""
    return max(1, num_cores() // operation_threads())


def parallel_map(
    function: Callable[..., _Result], arguments: Iterable[Sequence[object]], at_once: int
) -> Iterator[_Result]:
    """Yields ``function(*given)`` for each of ``arguments``, in their order, with ``at_once`` threads.

    At most twice as many are begun or waiting, so that threads have work while the oldest one is not done.
    """
    if at_once == 1:
        for given in arguments:
            yield function(*given)
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    with ThreadPoolExecutor(at_once) as pool:
        waiting: Deque[Future[_Result]] = collections.deque()
        for given in arguments:
            waiting.append(pool.submit(function, *given))
            if len(waiting) == 2 * at_once:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def host_memory_bytes() -> int:
    """Physical memory of the machine in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def address_space_bytes() -> Optional[int]:
    """The limit of this process' address space in bytes; None if there is none."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def available_bytes() -> int:
    """Bytes that this process can use without swapping: the least of the system's and its control groups' memory."""
    import psutil

    return min([int(psutil.virtual_memory().available), *group_memories()])


_PROCESS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def _folders_of_groups(controller: str, process: Path, root: Path) -> Iterator[Tuple[Path, bool]]:
    """Yields the folders of the control groups of this process, from the innermost out.

    Args:
        controller: name of the limited resource.
        process: file that names the groups.
        root: folder of the groups.

    Yields:
        A folder, which may be absent, and whether its files are those of version 1.
    """
    lines: List[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = process.read_text().splitlines()
    for line in lines:
        _, controllers, place = (line.split(":", 2) + ["", ""])[:3]
        is_version_1 = controllers != ""
        if is_version_1 and controller not in controllers.split(","):
            continue
        top = root / controller if is_version_1 else root
        inner = top / place.lstrip("/")
        # Inside a container the path is often the host's; the top folder is then the container's own group.
        for folder in dict.fromkeys([inner, *inner.parents, top]):
            if folder == top or top in folder.parents:
                yield folder, is_version_1


def group_memories(process: Path = _PROCESS, root: Path = _ROOT) -> Iterator[int]:
    """Yields the bytes that each control group of this process may still use, from the innermost out.

    Args:
        process: file that names the groups.
        root: folder of the groups.
    """
    for folder, is_version_1 in _folders_of_groups("memory", process, root):
        files = _FILES_OF_VERSION_1 if is_version_1 else _FILES
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limit = int((folder / files[0]).read_text())
            yield max(0, limit - _used_bytes(folder, *files[1:]))


def cpu_quotas(process: Path = _PROCESS, root: Path = _ROOT) -> Iterator[float]:
    """Yields the processor time that each control group of this process allows per time, in cores.

    Args:
        process: file that names the groups.
        root: folder of the groups.
    """
    for folder, is_version_1 in _folders_of_groups("cpu", process, root):
        # The quota and its period in microseconds; "max" and -1 are no limit.
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_version_1 else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, " ".join((folder / name).read_text() for name in files).split())
            if quota > 0 and period > 0:
                yield quota / period


def _used_bytes(folder: Path, used: str, reclaimable: str) -> int:
    """Memory in use by a group in bytes; 0 if unknown.

    Reclaimable pages of files are subtracted, because reading much data fills the group with them.
    """
    num_bytes = 0
    with contextlib.suppress(OSError, ValueError):
        num_bytes = int((folder / used).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == reclaimable:
                num_bytes -= int(number)
    return max(0, num_bytes)


def reset_peak_memory() -> bool:
    """Resets the process' peak memory; returns False if the system does not support that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> Optional[int]:
    """Peak resident memory of the process in bytes since its start or :func:`reset_peak_memory`; None if unknown."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def cpu_name() -> Optional[str]:
    """The CPU's model name as Linux reports it, else Python's name of the processor; None if unknown."""
    import platform

    return _cpu_field("model name") or platform.processor() or platform.machine() or None


def cpu_flags() -> Tuple[str, ...]:
    """Instruction sets of the processor as Linux lists them; empty if unknown."""
    return tuple(_cpu_field("flags").split())


def _cpu_field(name: str) -> str:
    """The first processor's value of a field in /proc/cpuinfo; "" if absent."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
