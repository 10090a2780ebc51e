"""Collects facts about this machine: processor, memory, GPUs, disk, data sets, and TensorFlow.

It only collects and draws no conclusions.  TensorFlow is imported in a process of its own, so a crash or hang is a
result, too.
"""

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional

from ipucnn.errors import DataError, MissingError, UserError
from ipucnn.filesystem import free_bytes
from ipucnn.machine import available_bytes, cpu_name, cpu_quota, host_memory_bytes, num_cores
from ipucnn.sessions.poplar.errors import translate_output
from ipucnn.system_programs import Ran, run_program


@dataclass(frozen=True)
class Host:
    """Processor and memory.

    Attributes:
        num_cores: the cores that this process may use, among ``num_cores_present``.
        cpu_quota: the processor time that its control groups allow, in cores; None if they set no quota.
        memory_bytes, available_bytes: the physical memory, and its free part.
    """

    cpu: Optional[str]
    num_cores: int
    num_cores_present: int
    cpu_quota: Optional[float]
    memory_bytes: int
    available_bytes: int


def find_host() -> Host:
    """Returns the processor and memory of this machine."""
    present = os.cpu_count() or 1
    return Host(cpu_name(), num_cores(), present, cpu_quota(), host_memory_bytes(), available_bytes())


@dataclass(frozen=True)
class Disk:
    """The place of new runs.

    Attributes:
        folder: the existing folder nearest to the runs' folder.
        free_bytes: the free space for this user.
        writable: whether files can be created there.
    """

    folder: str
    free_bytes: int
    writable: bool


def find_disk(folder: Path) -> Disk:
    """Returns the disk of an existing or future folder."""
    place = folder
    # If the current folder was removed, the path is shown as typed.
    with contextlib.suppress(OSError):
        place = folder.absolute()
    while not os.path.isdir(place) and place != place.parent:
        place = place.parent
    return Disk(str(place), free_bytes(place), os.access(place, os.W_OK | os.X_OK))


def find_datasets(path: Path) -> Dict[str, Optional[str]]:
    """Returns the place of each data set; None if it is not in ``path``; "embedded" if it needs no files."""
    from ipucnn.datasets.formats import find_set
    from ipucnn.datasets.registry import DATASETS

    places: Dict[str, Optional[str]] = {}
    for name, record in DATASETS.items():
        if name == "imagefolder":
            continue
        if not record.files:
            places[name] = "embedded" if name != "random" else "generated"
            continue
        try:
            found = find_set(name, path)
        except (OSError, RuntimeError, DataError):
            found = None
        places[name] = None if found is None else str(found.location)
    return places


PROBE_TIMEOUT_S = 180.0

# Run by the same Python; it writes one line of JSON after a mark, because libraries print to stdout as well.
_MARK = "ipucnn-probe:"
# ``-c`` puts the current folder first on the path.  Anybody may have put files there, so they must not be imported.
_CODE = f"""
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import json, os
answer = {{}}
# Keras 3 imports matplotlib, which would take its settings from there.
exists = os.path.exists
os.path.exists = lambda path: path != "matplotlibrc" and exists(path)
import tensorflow as tf
answer["tensorflow"] = tf.__version__
from tensorflow import keras
answer["keras"] = keras.__version__
import numpy
answer["numpy"] = numpy.__version__
answer["gpus"] = len(tf.config.list_physical_devices("GPU"))
tf.linalg.matmul(tf.ones([2, 3]), tf.ones([3, 2])).numpy()
try:
    from ipucnn.sessions.host import operations
    answer["compiled_layers"] = operations.compiled_layers()
except Exception as error:  # of a package that is damaged; TensorFlow itself works
    answer["compiled_layers"] = str(error)
try:
    from tensorflow.python import ipu
    answer["ipu"] = hasattr(ipu, "config")
except ImportError as error:
    answer["ipu"], answer["ipu_error"] = False, str(error)
print({_MARK!r} + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Probe:
    """The result of importing TensorFlow.

    Attributes:
        answer: versions, number of GPUs, whether ``tensorflow.python.ipu`` can be imported; empty after a failure.
        error: the error, None if there is none.
    """

    answer: Dict[str, Any]
    error: Optional[UserError]


def probe_tensorflow(timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
    """Imports TensorFlow and Keras and looks for GPUs and the IPU package, in another process."""
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}
    ran = run_program([sys.executable, "-c", _CODE], timeout_s, variables)
    if ran.problem is None:
        lines = [line for line in ran.output.splitlines() if line.startswith(_MARK)]
        try:
            return Probe(json.loads(lines[-1][len(_MARK) :]), None)
        except (IndexError, ValueError):
            return Probe(
                {},
                MissingError(
                    "importing TensorFlow ended the process without an error", "install TensorFlow again"
                ),
            )
    return Probe({}, _probe_error(ran))


def _probe_error(ran: Ran) -> UserError:
    if ran.signal_name == "SIGILL":
        return MissingError(
            "TensorFlow dies of an illegal instruction when it is imported: it was built for another processor",
            "use the Poplar SDK's wheel for this processor: amd_znver1 or intel_skylake512",
        )
    known = translate_output(ran.errors)
    if known is not None:
        return known
    last = [line.strip() for line in ran.errors.splitlines() if line.strip()][-1:]
    said = f": {last[0]}" if last else ""
    return MissingError(
        f"TensorFlow cannot be imported: the process {ran.problem}{said}",
        "python -c 'import tensorflow' shows all of it; install the requirements again where it is damaged",
    )
