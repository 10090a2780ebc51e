"""What this machine has and leaves to this process: cores, memory, and the processor's name.

The one place that asks the system about itself.  psutil answers where it can; what it does not know, the limits of
control groups and the processor's own description, is read from Linux's files, which no user chooses.
"""

import collections
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Deque, Iterable, Iterator, List, Optional, Sequence, Tuple, TypeVar

# What is assumed to be available where no system tells.
_UNKNOWN_MEMORY = 4 * 2**30
# Of both versions of control groups: limit, use, and the use that is files' pages, which are given up when needed.
_FILES = ("memory.max", "memory.current", "inactive_file")
_FILES_OF_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
# Packages and environment variables that can change the last digits of a result, beside processor and threads.
BYTE_PACKAGES = ("tensorflow", "keras", "numpy")
BYTE_VARIABLES = ("TF_DETERMINISTIC_OPS", "TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS")
# What psutil raises where the system does not have or does not show what is asked for.
_UNKNOWN = (OSError, ValueError, KeyError, NotImplementedError)


_Result = TypeVar("_Result")


def num_cores() -> int:
    """CPU cores that this process may use; a container or ``taskset`` may leave it fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# How many threads share an operation, where the run says so, and whether it insists.
_fixed_threads: Optional[int] = None
_are_required = False


def fix_threads(number: Optional[int], required: bool = True) -> None:
    """Sets how many threads share an operation, whatever cores there are: it decides the order of sums.

    Call it before TensorFlow is imported; None leaves it to the number of cores.

    Args:
        number: of threads.
        required: where TensorFlow works with another number in this process already, that is an error; otherwise
            that number holds.
    """
    global _fixed_threads, _are_required
    _fixed_threads, _are_required = number, number is not None and required


def fixed_threads() -> Optional[int]:
    """What :func:`fix_threads` was told."""
    return _fixed_threads


def are_threads_required() -> bool:
    """Whether :func:`fix_threads` was told that no other number will do."""
    return _are_required


def operation_threads() -> int:
    """How many threads share an operation: as fixed, else one for each core that this process may use."""
    return _fixed_threads or num_cores()


def operations_at_once() -> int:
    """How many operations, each shared by :func:`operation_threads`, keep all cores busy."""
    return max(1, num_cores() // operation_threads())


def side_by_side(
    function: Callable[..., _Result], arguments: Iterable[Sequence[object]], at_once: int
) -> Iterator[_Result]:
    """``function(*given)`` for each of ``arguments``, in their order; ``at_once`` of them are computed in threads."""
    if at_once == 1:
        for given in arguments:
            yield function(*given)
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    with ThreadPoolExecutor(at_once) as pool:
        waiting: Deque[Future[_Result]] = collections.deque()
        for given in arguments:
            waiting.append(pool.submit(function, *given))
            if len(waiting) == at_once:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def host_memory_bytes() -> int:
    """Physical memory of the machine, 0 where the system does not tell."""
    import psutil

    with contextlib.suppress(*_UNKNOWN):
        return int(psutil.virtual_memory().total)
    return 0


def free_bytes() -> Optional[int]:
    """Memory that the system can give without swapping; None where it does not tell."""
    import psutil

    with contextlib.suppress(*_UNKNOWN):
        return int(psutil.virtual_memory().available)
    return None


def swap_bytes() -> Tuple[int, int]:
    """Swap space that there is, and how much of it is free; 0 where the system does not tell."""
    import psutil

    with contextlib.suppress(*_UNKNOWN):
        swap = psutil.swap_memory()
        return int(swap.total), int(swap.free)
    return 0, 0


def available_bytes() -> int:
    """Memory that can be taken without swapping: what the system has left, or this process' container may use."""
    free = free_bytes()
    limits = [group.available_bytes for group in control_groups()]
    return min(limits if free is None else [free, *limits], default=_UNKNOWN_MEMORY)


@dataclass(frozen=True)
class ControlGroup:
    """A group of processes, this one among them, whose memory is limited.

    Attributes:
        limit_bytes: that they may take together.
        used_bytes: that they have taken and cannot give back; pages of files can be given back.
    """

    limit_bytes: int
    used_bytes: int = 0

    @property
    def available_bytes(self) -> int:
        """What they may still take."""
        return max(0, self.limit_bytes - self.used_bytes)


def control_groups(
    process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[ControlGroup]:
    """The control groups that limit this process' memory, of both versions, from the innermost out.

    Args:
        process: file that names them.
        root: folder that has them.
    """
    lines: List[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = process.read_text().splitlines()
    for line in lines:
        _, controllers, place = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            top, files = root, _FILES
        elif "memory" in controllers.split(","):
            top, files = root / "memory", _FILES_OF_VERSION_1
        else:
            continue
        inner = top / place.lstrip("/")
        # Inside a container the path is often that of the host; the top is then the container's own group.
        for folder in dict.fromkeys([inner, *inner.parents, top]):
            if folder == top or top in folder.parents:
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    limit = int((folder / files[0]).read_text())
                    yield ControlGroup(limit, _used_bytes(folder, *files[1:]))


def _used_bytes(folder: Path, used: str, reclaimable: str) -> int:
    """What a group has taken and keeps; 0 where it does not tell.  Reading much data fills it with files' pages."""
    taken = 0
    with contextlib.suppress(OSError, ValueError):
        taken = int((folder / used).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == reclaimable:
                taken -= int(number)
    return max(0, taken)


def reset_peak_memory() -> bool:
    """Starts the process's high-water mark of memory again, where Linux allows it; whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> Optional[int]:
    """The most resident memory of the process since it began or :func:`reset_peak_memory`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def cpu_name() -> Optional[str]:
    """The CPU's model name as Linux reports it, else what Python knows."""
    import platform

    return _cpu_field("model name") or platform.processor() or platform.machine() or None


def cpu_flags() -> Tuple[str, ...]:
    """Instruction sets of the processor as Linux lists them; empty where it does not tell."""
    return tuple(_cpu_field("flags").split())


def _cpu_field(name: str) -> str:
    """The first processor's value in /proc/cpuinfo; empty where there is none."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
