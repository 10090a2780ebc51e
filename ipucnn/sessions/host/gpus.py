"""The GPUs that NVIDIA's driver lists, and the share of each process, before TensorFlow is imported."""

import os
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

from ipucnn.errors import ConfigurationError
from ipucnn.sessions.group import Alone
from ipucnn.system_programs import TIMEOUT_S, run_program
from ipucnn.text import counted


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    name: str
    memory_bytes: int
    driver: str
    uuid: str = field(default="", compare=False)


def find_gpus(timeout_s: float = TIMEOUT_S) -> Tuple[List[Gpu], Optional[str]]:
    """Returns the GPUs that the NVIDIA driver lists and CUDA_VISIBLE_DEVICES selects, and the reason if there are none.

    Whether TensorFlow can use them is not checked here; ``probe`` does that.
    """
    columns = "index,uuid,name,memory.total,driver_version"
    listed = run_program(["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"], timeout_s)
    if not listed.is_on_path:
        return [], "nvidia-smi is not on PATH"
    if listed.problem is not None:
        return [], f"nvidia-smi {listed.problem}"
    gpus: Dict[str, Gpu] = {}
    for line in listed.output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5:
            index, uuid, name, mebibytes, driver = cells
            # Cards that share the host's memory have "[N/A]".
            size = int(mebibytes) * 2**20 if mebibytes.isdigit() else 0
            gpus[index] = Gpu(name, size, driver, uuid)
    if not gpus:
        return [], "nvidia-smi lists no GPU"
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    visible: List[Gpu] = []
    for word in map(str.strip, named.split(",")):
        by_uuid = (gpu for gpu in gpus.values() if len(word) > 4 and gpu.uuid.startswith(word))
        gpu = gpus.get(word) or next(by_uuid, None)
        if gpu is None:
            break  # as in CUDA, where the first word that names no GPU ends the list
        visible.append(gpu)
    hidden = f"CUDA_VISIBLE_DEVICES={named} hides {counted(len(gpus), 'GPU')}"
    return visible, None if visible else hidden


def share_gpus(group: Alone) -> None:
    """Divides GPUs that several processes see among them, in the order of ranks, for TensorFlow in this process.

    Processes of one machine see the same GPUs, unless their launcher gave each its own.

    Raises:
        ConfigurationError: GPUs cannot be divided evenly; all processes raise it.
    """
    if group.size == 1:
        return
    everyone = group.gather("GPUs", [gpu.uuid for gpu in find_gpus()[0]])
    for seen in everyone:
        sharing = everyone.count(seen)
        if len(seen) % sharing:
            fitting = [str(n) for n in range(1, len(seen) + 1) if len(seen) % n == 0]
            raise ConfigurationError(
                f"{sharing} processes on one machine cannot share {counted(len(seen), 'GPU')} evenly",
                f"start {' or '.join(fitting)} there, or add --device cpu",
            )
    seen = everyone[group.rank]
    if not seen:
        return
    # Numbers in CUDA_VISIBLE_DEVICES are CUDA's, which may differ from those of nvidia-smi, so its words are kept.
    words = os.environ["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in os.environ else seen
    number, share = everyone[: group.rank].count(seen), len(seen) // everyone.count(seen)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(words[number * share : (number + 1) * share])
