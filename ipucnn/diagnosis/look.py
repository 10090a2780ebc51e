"""Processor, memory, GPUs, disk and data sets of this machine."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ipucnn.diagnosis import tools
from ipucnn.errors import DataError
from ipucnn.filesystem import absolute
from ipucnn.machine import available_bytes, cpu_name, host_memory_bytes, num_cores

__all__ = ["Disk", "Gpu", "Host", "find_datasets", "find_gpus", "look_at_disk", "look_at_host"]


@dataclass(frozen=True)
class Host:
    """Processor and memory.

    Attributes:
        num_cores: that this process may use; of ``num_cores_present``.
        memory_bytes, available_bytes: physical memory, and what of it is free; 0 where the system does not tell.
    """

    cpu: Optional[str]
    num_cores: int
    num_cores_present: int
    memory_bytes: int
    available_bytes: int


def look_at_host() -> Host:
    """The processor and memory of this machine."""
    present = os.cpu_count() or 1
    usable = num_cores()
    return Host(cpu_name(), usable, present, host_memory_bytes(), available_bytes())


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    name: str
    memory_bytes: int
    driver: str


def find_gpus(timeout_s: float = tools.TIMEOUT_S) -> Tuple[List[Gpu], Optional[str]]:
    """The GPUs that the NVIDIA driver lists and CUDA_VISIBLE_DEVICES leaves, and why there are none.

    TensorFlow is not asked: whether it can use them, ``probe`` says.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    listed = tools.run(query, timeout_s)
    if not listed.found:
        return [], "nvidia-smi is not on PATH"
    if listed.problem is not None:
        return [], f"nvidia-smi {listed.problem}"
    found: Dict[str, Gpu] = {}
    uuids: Dict[str, str] = {}
    for line in listed.output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            continue
        index, uuid, name, mebibytes, driver = cells
        # Cards that share the host's memory have "[N/A]".
        size = int(mebibytes) * 2**20 if mebibytes.isdigit() else 0
        found[index], uuids[index] = Gpu(name, size, driver), uuid
    if not found:
        return [], "nvidia-smi lists no GPU"
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(found.values()), None
    visible = _visible(wanted, uuids)
    if not visible:
        return [], f"CUDA_VISIBLE_DEVICES={wanted} hides {len(found)} GPU(s)"
    return [found[index] for index in visible], None


def _visible(wanted: str, uuids: Dict[str, str]) -> List[str]:
    """Indices that CUDA_VISIBLE_DEVICES names; as in CUDA, the first that does not exist ends the list."""
    visible: List[str] = []
    for word in (part.strip() for part in wanted.split(",")):
        match = [
            index
            for index, uuid in uuids.items()
            if word == index or (len(word) > 4 and uuid.startswith(word))
        ]
        if not match:
            break
        visible += match[:1]
    return visible


@dataclass(frozen=True)
class Disk:
    """Where runs are written.

    Attributes:
        folder: that exists, the nearest to where runs go.
        free_bytes: for this user.
        writable: whether files can be made there.
    """

    folder: str
    free_bytes: int
    writable: bool


def look_at_disk(folder: Path) -> Disk:
    """The disk a folder is on, or would be made on."""
    # os.path's question, which takes every error for no: what is looked for is a folder that can be used.
    there = folder
    with contextlib.suppress(
        DataError
    ):  # the current folder was removed: then the path is told as it was typed
        there = absolute(folder)
    while not os.path.isdir(there) and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = 0
    return Disk(str(there), free, os.access(there, os.W_OK | os.X_OK))


def find_datasets(path: Path) -> Dict[str, Optional[str]]:
    """Where each data set lies; None for those that are not in ``path``; "embedded" for those that need no files."""
    from ipucnn.datasets.catalog import DATASETS, find_location

    found: Dict[str, Optional[str]] = {}
    for name, record in DATASETS.items():
        if name == "imagefolder":
            continue
        if not record.files:
            found[name] = "embedded" if name != "random" else "generated"
            continue
        try:
            location = find_location(name, path)
        except (OSError, RuntimeError, DataError):
            location = None
        found[name] = None if location is None else str(location)
    return found
