"""Reads the IPUs of this machine from the driver's command line tools.

Formats of gc-info: Graphcore Command Line Tools documentation, versions 1.0 to 1.3, with its "Device attributes".
"""

import re
from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional, Tuple

from ipucnn.system_programs import TIMEOUT_S, run_program


@dataclass(frozen=True)
class Device:
    """A device that a program can use: one IPU, or several together.

    Attributes:
        id: the id as ``--select-ipu`` accepts it.
        ipus: the ids of its single IPUs.
    """

    id: int
    ipus: Tuple[int, ...]


@dataclass(frozen=True)
class ListedIpus:
    """The IPUs as gc-info describes them.

    Attributes:
        tool_found: whether gc-info is on PATH.
        problem: why it gave no answer, None if it did.
        devices: the devices that can be requested; on an IPU-POD those of the active partition.
        partition: the name of the active partition, None for PCIe cards.
        board, architecture, driver, firmware: e.g. "M2000", "ipu2", "1.3.0", "2.4.4"; None if not reported.
        remote_buffers: whether programs can keep tensors outside of the IPUs; None if not reported.
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

    @property
    def num_ipus(self) -> int:
        """Returns the number of single IPUs."""
        return len({ipu for device in self.devices for ipu in device.ipus})

    @property
    def device_sizes(self) -> Tuple[int, ...]:
        """Returns the devices' numbers of IPUs, ascending."""
        return tuple(sorted({len(device.ipus) for device in self.devices}))

    def to_dict(self) -> Dict[str, Any]:
        """Returns plain values, ready for JSON; all keys are always present."""
        return {**asdict(self), "num_ipus": self.num_ipus, "device_sizes": self.device_sizes}


def find_ipus(timeout_s: float = TIMEOUT_S) -> ListedIpus:
    """Runs gc-info and returns the IPUs."""
    listed = run_program(["gc-info", "--list-devices"], timeout_s)
    if not listed.is_on_path:
        return ListedIpus(False, "gc-info is not on PATH")
    if listed.problem is not None:
        said = (listed.errors or listed.output).strip().splitlines()[-1:]
        return ListedIpus(True, ": ".join([f"gc-info {listed.problem}", *said]))
    partition, devices = parse_devices(listed.output)
    single = [device.id for device in devices if device.ipus == (device.id,)]
    if not single:
        return ListedIpus(True, "gc-info lists no IPU", partition=partition)
    info = parse_info(
        run_program(["gc-info", "--device-id", str(min(single)), "--device-info"], timeout_s).output
    )
    return ListedIpus(
        tool_found=True,
        devices=devices,
        partition=partition,
        board=info.get("board type"),
        architecture=info.get("ipu architecture"),
        driver=info.get("driver version") or info.get("server version"),
        firmware=info.get("firmware version"),
        remote_buffers={"1": True, "0": False}.get(info.get("remote buffers supported", "")),
    )


def parse_devices(text: str) -> Tuple[Optional[str], Tuple[Device, ...]]:
    """Parses the output of ``gc-info --list-devices``.

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
    """Parses the attributes from ``gc-info --device-info``, one per line, without unavailable ones."""
    pairs = (line.partition(":") for line in text.splitlines())
    attributes = {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}
    return {key: value for key, value in attributes.items() if value not in ("", "N/A")}
