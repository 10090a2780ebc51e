"""The IPUs that the driver's command line tools list, and who uses them.

Formats of gc-info and gc-monitor: Graphcore Command Line Tools documentation, versions 1.0 to 1.3.
"""

import re
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Set, Tuple

from ipucnn.diagnosis import tools

__all__ = ["Ipus", "find_ipus", "parse_devices", "parse_info", "parse_processes"]


@dataclass(frozen=True)
class Process:
    """A process that uses IPUs."""

    pid: int
    command: str
    user: str
    ipus: Tuple[int, ...]


@dataclass(frozen=True)
class Ipus:
    """What the tools say.

    Attributes:
        tool_found: gc-info is on PATH.
        problem: why it said nothing, None if it did.
        num_ipus: single IPUs; of an IPU-POD those of the active partition.
        device_sizes: IPUs of the devices that can be asked for, rising.
        partition: name of the active partition, None for PCIe cards.
        board, architecture, driver: e.g. "M2000", "ipu2", "1.3.0"; None where not told.
        processes: that use IPUs now; None where gc-monitor did not say.
    """

    tool_found: bool
    problem: Optional[str] = None
    num_ipus: int = 0
    device_sizes: Tuple[int, ...] = ()
    partition: Optional[str] = None
    board: Optional[str] = None
    architecture: Optional[str] = None
    driver: Optional[str] = None
    processes: Optional[Tuple[Process, ...]] = None

    @property
    def num_busy(self) -> int:
        """IPUs that processes use."""
        return len({ipu for process in self.processes or () for ipu in process.ipus})


def find_ipus(timeout_s: float = tools.TIMEOUT_S) -> Ipus:
    """Asks gc-info and gc-monitor."""
    listed = tools.run(["gc-info", "--list-devices"], timeout_s)
    if not listed.found:
        return Ipus(False, "gc-info is not on PATH")
    if listed.problem is not None:
        said = _last_line(listed.errors) or _last_line(listed.output)
        return Ipus(True, f"gc-info {listed.problem}" + (f": {said}" if said else ""))
    partition, single, sizes = parse_devices(listed.output)
    if not single:
        return Ipus(True, "gc-info lists no IPU", partition=partition)
    info = parse_info(
        tools.run(["gc-info", "--device-id", str(min(single)), "--device-info"], timeout_s).output
    )
    monitor = tools.run(["gc-monitor", "--no-card-info"], timeout_s)
    return Ipus(
        tool_found=True,
        num_ipus=len(single),
        device_sizes=tuple(sorted(sizes)),
        partition=partition,
        board=info.get("board type"),
        architecture=info.get("ipu architecture"),
        driver=info.get("driver version") or info.get("server version"),
        processes=None if monitor.problem else tuple(parse_processes(monitor.output)),
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def parse_devices(text: str) -> Tuple[Optional[str], Set[int], Set[int]]:
    """What ``gc-info --list-devices`` prints.

    Returns:
        The active partition (None: there is none), ids of the single IPUs, and sizes of the devices.
    """
    partition: Optional[str] = None
    active = True
    single: Set[int] = set()
    sizes: Set[int] = set()
    members = 0
    for line in text.splitlines():
        named = re.match(r"\s*Partition:\s*'?([^\s'\[]+)'?(.*)", line)
        device = re.match(r"\s*-\+-\s*Id:\s*\[(\d+)\],\s*(?:target|type):\s*\[([^\]]*)\]", line)
        if named is not None:
            # Other partitions are listed with --all-partitions, without [active].
            active = "[active]" in named.group(2) or partition is None
            partition = partition or named.group(1)
        elif not active:
            continue
        elif device is not None:
            sizes |= {members} - {0}
            members = 0
            if device.group(2).strip().lower() != "multi ipu":
                single.add(int(device.group(1)))
                sizes.add(1)
        elif re.match(r"\s*\|---", line):
            members += 1
    return partition, single, sizes | ({members} - {0})


def parse_info(text: str) -> Dict[str, str]:
    """Attributes that ``gc-info --device-info`` prints, a line each."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip().lower(): value.strip() for key, colon, value in pairs if colon and value.strip()}


def parse_processes(text: str) -> List[Process]:
    """The processes in ``gc-monitor``'s table, which has a row per process and IPU."""
    titles: List[str] = []
    found: Dict[int, Process] = {}
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "PID" in cells:
            titles = cells
        elif titles and len(cells) == len(titles):
            _add_row(found, dict(zip(titles, cells)))
    return list(found.values())


def _add_row(found: Dict[int, Process], row: Mapping[str, str]) -> None:
    if not row["PID"].isdigit():
        return
    pid = int(row["PID"])
    ids = tuple(int(number) for number in re.findall(r"\d+", row.get("ID", "")))
    before = found[pid].ipus if pid in found else ()
    found[pid] = Process(pid, row.get("Command", ""), row.get("User", ""), tuple(sorted({*before, *ids})))
