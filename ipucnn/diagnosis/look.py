"""What is on this machine: processor, memory, GPUs, disk, data sets, IPUs, ``poprun``, and whether TensorFlow works.

Looks and judges nothing.  Formats of gc-info and gc-monitor: Graphcore Command Line Tools documentation, versions 1.0
to 1.3.  TensorFlow is imported in a process of its own: its crash or hang is an answer, too.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ipucnn.errors import DataError, MissingError, UserError
from ipucnn.filesystem import absolute
from ipucnn.machine import available_bytes, cpu_name, host_memory_bytes, num_cores
from ipucnn.sessions.poplar.errors import translate_output
from ipucnn.sessions.poplar.popdist import Instances, find_instances
from ipucnn.text import counted

# The machine's programs (gc-info, nvidia-smi, ...), run for what they print and never waited for in vain.

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Ran:
    """What became of a program.

    Attributes:
        found: it is on PATH.
        output, errors: stdout and stderr; empty if it was not found or did not end.
        problem: None if it ended with 0, else what happened, in a few words.
        signal_name: e.g. "SIGILL" where a signal ended it.
    """

    found: bool
    output: str = ""
    errors: str = ""
    problem: Optional[str] = None
    signal_name: Optional[str] = None


def find_program(program: str) -> Optional[str]:
    """The absolute path of a program, from the absolute folders of PATH; None if it is in none of them.

    A relative folder (``.``, or nothing between two colons) is the one the user happens to be in, where anybody may
    have put a program of that name.
    """
    folders = [
        folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)
    ]
    return shutil.which(program, path=os.pathsep.join(folders)) if folders else None


def run_program(
    command: Sequence[str], timeout_s: float = TIMEOUT_S, variables: Optional[Mapping[str, str]] = None
) -> Ran:
    """Runs a program and everything it starts, for at most ``timeout_s``; never raises.

    Args:
        command: program, then arguments.
        variables: of its environment; None: this process's.
    """
    program = command[0] if os.path.isabs(command[0]) else find_program(command[0])
    if program is None:
        return Ran(False, problem="not found")
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if variables is None else dict(variables),
            start_new_session=True,
        )
    except OSError as error:
        return Ran(True, problem=f"cannot be run: {error.strerror or error}")
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Ran(True, problem=f"did not answer within {timeout_s:g} s")
    except BaseException:
        _kill(process)
        raise
    texts = output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")
    if process.returncode < 0:
        name = signal_name(-process.returncode)
        return Ran(True, *texts, problem=f"died of {name}", signal_name=name)
    problem = f"ended with exit code {process.returncode}" if process.returncode else None
    return Ran(True, *texts, problem=problem)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process with its children, which would keep the pipes open."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (OSError, AttributeError):
        process.kill()
    # What left the session of the process may hold the pipes open, and is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1.0)


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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


def find_gpus(timeout_s: float = TIMEOUT_S) -> Tuple[List[Gpu], Optional[str]]:
    """The GPUs that the NVIDIA driver lists and CUDA_VISIBLE_DEVICES leaves, and why there are none.

    TensorFlow is not asked: whether it can use them, ``probe`` says.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    listed = run_program(query, timeout_s)
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
        return [], f"CUDA_VISIBLE_DEVICES={wanted} hides {counted(len(found), 'GPU')}"
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
    # Where the current folder was removed, the path is told as it was typed.
    with contextlib.suppress(DataError):
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
    from ipucnn.datasets.registry import DATASETS, find_location

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


@dataclass(frozen=True)
class Poprun:
    """What ``poprun`` told this process: the POPDIST_* variables, interpreted.

    Attributes:
        instances: of the run, and which of them this is; one without ``poprun``, or where ``problem`` is.
        problem: why the variables make no sense, None if they do.
    """

    instances: Instances = field(default_factory=Instances)
    problem: Optional[UserError] = None

    @property
    def num_local_replicas(self) -> Optional[int]:
        """Replicas of this instance; None without ``poprun``."""
        total = self.instances.total_replicas
        return None if total is None else self.instances.local_replicas

    @property
    def line(self) -> str:
        """In words; empty without ``poprun``."""
        if self.problem is not None:
            return self.problem.message
        found = self.instances
        if not found.is_distributed:
            return ""
        writes = "writes" if found.is_writer else "leaves to the first"
        return (
            f"instance {found.index + 1} of {found.count}, {self.num_local_replicas} of "
            f"{counted(found.total_replicas or 0, 'replica')}, {counted(found.ipus_per_replica or 0, 'IPU')} each; "
            f"{writes} checkpoints and logs"
        )

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON; keys are always there."""
        found = self.instances
        return {
            "is_distributed": found.is_distributed,
            "num_instances": found.count,
            "instance": found.index,
            "total_replicas": found.total_replicas,
            "local_replicas": self.num_local_replicas,
            "ipus_per_replica": found.ipus_per_replica,
            "problem": None if self.problem is None else self.problem.message,
        }


def find_poprun(variables: Mapping[str, str]) -> Poprun:
    """What the environment variables of a process say; never raises."""
    try:
        return Poprun(find_instances(variables))
    except UserError as error:
        return Poprun(problem=error)


@dataclass(frozen=True)
class Process:
    """A process that uses IPUs."""

    pid: int
    command: str
    user: str
    ipus: Tuple[int, ...]


@dataclass(frozen=True)
class Ipus:
    """What the driver's command line tools say: the IPUs, and who uses them.

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


def find_ipus(timeout_s: float = TIMEOUT_S) -> Ipus:
    """Asks gc-info and gc-monitor."""
    listed = run_program(["gc-info", "--list-devices"], timeout_s)
    if not listed.found:
        return Ipus(False, "gc-info is not on PATH")
    if listed.problem is not None:
        said = _last_line(listed.errors) or _last_line(listed.output)
        return Ipus(True, f"gc-info {listed.problem}" + (f": {said}" if said else ""))
    partition, single, sizes = parse_devices(listed.output)
    if not single:
        return Ipus(True, "gc-info lists no IPU", partition=partition)
    info = parse_info(
        run_program(["gc-info", "--device-id", str(min(single)), "--device-info"], timeout_s).output
    )
    monitor = run_program(["gc-monitor", "--no-card-info"], timeout_s)
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


PROBE_TIMEOUT_S = 180.0

# Run by the same Python; writes one line of JSON after a mark, as libraries print to stdout as well.
_MARK = "ipucnn-probe:"
# The current folder, which ``-c`` puts first on the path, is anybody's: what lies there is not to be imported.
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
    from tensorflow.python import ipu
    answer["ipu"] = hasattr(ipu, "config")
except ImportError as error:
    answer["ipu"], answer["ipu_error"] = False, str(error)
print({_MARK!r} + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Probe:
    """What came of importing TensorFlow.

    Attributes:
        answer: versions, number of GPUs, whether ``tensorflow.python.ipu`` can be imported; empty if it failed.
        error: what went wrong, None if nothing did.
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
            "of the Poplar SDK's wheels use the one for this processor (amd_znver1 or intel_skylake512)",
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
