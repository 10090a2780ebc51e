"""The IPUs of this machine, as the driver's command line tools describe them.

Formats of gc-info and gc-monitor: Graphcore Command Line Tools documentation, versions 1.0 to 1.3, with its "Device
attributes".
"""

import re
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from ipucnn.diagnosis.programs import TIMEOUT_S, run_program


@dataclass(frozen=True)
class Process:
    """A process that uses IPUs."""

    pid: int
    command: str
    user: str
    ipus: Tuple[int, ...]


@dataclass(frozen=True)
class Device:
    """A device that a program can take: an IPU, or several together.

    Attributes:
        id: as ``--select-ipu`` takes it.
        ipus: ids of its single IPUs.
    """

    id: int
    ipus: Tuple[int, ...]


@dataclass(frozen=True)
class Ipus:
    """What the driver's command line tools say: the IPUs, and who uses them.

    Attributes:
        tool_found: gc-info is on PATH.
        problem: why it said nothing, None if it did.
        devices: that can be asked for; of an IPU-POD those of the active partition.
        partition: name of the active partition, None for PCIe cards.
        board, architecture, driver, firmware: e.g. "M2000", "ipu2", "1.3.0", "2.4.4"; None where not told.
        remote_buffers: whether programs can keep tensors outside of the IPUs; None where not told.
        processes: that use IPUs now; None where gc-monitor did not say.
    """

    tool_found: bool
    problem: Optional[str] = None
    devices: Tuple[Device, ...] = ()
    partition: Optional[str] = None
    board: Optional[str] = None
    architecture: Optional[str] = None
    driver: Optional[str] = None
    firmware: Optional[str] = None
    remote_buffers: Optional[bool] = None
    processes: Optional[Tuple[Process, ...]] = None

    @property
    def num_ipus(self) -> int:
        """Single IPUs."""
        return len({ipu for device in self.devices for ipu in device.ipus})

    @property
    def device_sizes(self) -> Tuple[int, ...]:
        """IPUs of the devices, rising."""
        return tuple(sorted({len(device.ipus) for device in self.devices}))

    @property
    def busy(self) -> Set[int]:
        """Ids of the IPUs that processes use."""
        return {ipu for process in self.processes or () for ipu in process.ipus}

    @property
    def num_busy(self) -> int:
        """How many they are."""
        return len(self.busy)

    @property
    def free_devices(self) -> Optional[Tuple[int, ...]]:
        """Ids of the devices of which no IPU is in use; None where nothing says who uses them."""
        if self.processes is None:
            return None
        return tuple(device.id for device in self.devices if not self.busy.intersection(device.ipus))

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON; keys are always there."""
        own = {**asdict(self), "num_ipus": self.num_ipus, "device_sizes": self.device_sizes}
        return {**own, "num_busy": self.num_busy}


def find_ipus(timeout_s: float = TIMEOUT_S) -> Ipus:
    """Asks gc-info and gc-monitor."""
    listed = run_program(["gc-info", "--list-devices"], timeout_s)
    if not listed.found:
        return Ipus(False, "gc-info is not on PATH")
    if listed.problem is not None:
        said = _last_line(listed.errors) or _last_line(listed.output)
        return Ipus(True, f"gc-info {listed.problem}" + (f": {said}" if said else ""))
    partition, devices = parse_devices(listed.output)
    single = [device.id for device in devices if device.ipus == (device.id,)]
    if not single:
        return Ipus(True, "gc-info lists no IPU", partition=partition)
    info = parse_info(
        run_program(["gc-info", "--device-id", str(min(single)), "--device-info"], timeout_s).output
    )
    monitor = run_program(["gc-monitor", "--no-card-info"], timeout_s)
    return Ipus(
        tool_found=True,
        devices=devices,
        partition=partition,
        board=info.get("board type"),
        architecture=info.get("ipu architecture"),
        driver=info.get("driver version") or info.get("server version"),
        firmware=info.get("firmware version"),
        remote_buffers={"1": True, "0": False}.get(info.get("remote buffers supported", "")),
        processes=None if monitor.problem else tuple(parse_processes(monitor.output)),
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def parse_devices(text: str) -> Tuple[Optional[str], Tuple[Device, ...]]:
    """What ``gc-info --list-devices`` prints.

    Returns:
        The active partition (None: there is none), and its devices.
    """
    partition: Optional[str] = None
    active = True
    devices: Dict[int, Tuple[int, ...]] = {}
    last = -1
    for line in text.splitlines():
        named = re.match(r"\s*Partition:\s*'?([^\s'\[]+)'?(.*)", line)
        device = re.match(r"\s*-\+-\s*Id:\s*\[(\d+)\],\s*(?:target|type):\s*\[([^\]]*)\]", line)
        member = re.match(r"\s*\|---\s*(?:PCIe )?Id:\s*\[(\d+)\]", line)
        if named is not None:
            # Other partitions are listed with --all-partitions, without [active].
            active = "[active]" in named.group(2) or partition is None
            partition = partition or named.group(1)
        elif not active:
            continue
        elif device is not None:
            last = int(device.group(1))
            devices[last] = () if device.group(2).strip().lower() == "multi ipu" else (last,)
        elif member is not None and last in devices:
            devices[last] += (int(member.group(1)),)
    return partition, tuple(Device(number, ipus) for number, ipus in devices.items() if ipus)


def parse_info(text: str) -> Dict[str, str]:
    """Attributes that ``gc-info --device-info`` prints, a line each; without those that are not available."""
    pairs = (line.partition(":") for line in text.splitlines())
    found = {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}
    return {key: value for key, value in found.items() if value not in ("", "N/A")}


def _rows(text: str, title: str) -> Iterator[Dict[str, str]]:
    """The rows of a table with | between its cells, below the row of titles in which ``title`` is."""
    titles: List[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if title in cells:
            titles = cells
        elif titles and len(cells) == len(titles) > 1:
            yield dict(zip(titles, cells))


def parse_processes(text: str) -> List[Process]:
    """The processes in ``gc-monitor``'s table, which has a row per process and IPU."""
    found: Dict[int, Process] = {}
    for row in _rows(text, "PID"):
        _add_row(found, row)
    return list(found.values())


def _add_row(found: Dict[int, Process], row: Mapping[str, str]) -> None:
    if not row["PID"].isdigit():
        return
    pid = int(row["PID"])
    ids = tuple(int(number) for number in re.findall(r"\d+", row.get("ID", "")))
    before = found[pid].ipus if pid in found else ()
    found[pid] = Process(pid, row.get("Command", ""), row.get("User", ""), tuple(sorted({*before, *ids})))
