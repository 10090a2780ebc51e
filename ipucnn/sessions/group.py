"""The processes of one run: this one alone, several that MPI connects, or the instances of ``poprun``.

:func:`find_group` decides which of them it is from the launcher's environment variables.  Without a launcher no library
is imported.  In every kind of group, the process of rank 0 prints and writes.

``poprun`` sets POPDIST_* in each instance, beside the variables of the MPI that it uses itself.
"""

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, List, Mapping, Optional

from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.text import counted

if TYPE_CHECKING:
    import numpy as np

    from ipucnn.sessions.mpi import Connection


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run, and this one among them.

    Attributes:
        size: the number of processes.
        rank: the number of this process, from 0.
    """

    size: int = 1
    rank: int = 0

    @property
    def under_poprun(self) -> bool:
        """Returns whether ``poprun`` started this process."""
        return isinstance(self, Popdist)

    @property
    def num_workers(self) -> int:
        """The number of the host's processes that share a weight update; 1 for instances of ``poprun``."""
        return self.size if isinstance(self, Mpi) else 1


@dataclass(frozen=True)
class Alone(ProcessGroup):
    """A process that trains alone; the other group of the host session, :class:`Mpi`, has the same methods."""

    def gather(self, place: str, value: object) -> List[Any]:
        """Returns the values of all processes, by rank; all processes have to call this at the same place.

        Args:
            place: the name of the place, which detects processes at different places.
            value: a plain JSON value; floats keep every bit.
        """
        return [value]

    def gather_array(self, values: "np.ndarray") -> "np.ndarray":
        """Returns float32 (size, n), the values of each process by rank, from float32 (n,) of the same length."""
        return values[None]

    def sum_array(self, values: "np.ndarray") -> "np.ndarray":
        """Returns the sum of float32 (n,) over processes, in the order that is fastest."""
        return values

    def from_rank_0(self, place: str, value: object) -> Any:
        """Returns the value of rank 0 in all processes."""
        return self.gather(place, value)[0]


@dataclass(frozen=True)
class Popdist(ProcessGroup):
    """The instances of ``poprun``; each runs some of the replicas on its share of the data.

    They exchange no values here: the Poplar session does that, once the IPUs are configured.

    Attributes:
        ipus_per_replica: the value given to ``poprun``.
        total_replicas: the replicas of all instances.
    """

    ipus_per_replica: int = 1
    total_replicas: int = 1

    @property
    def local_replicas(self) -> int:
        """Returns the replicas of one instance."""
        return self.total_replicas // self.size

    @property
    def local_ipus(self) -> int:
        """Returns the IPUs that ``poprun`` chose for one instance."""
        return self.local_replicas * self.ipus_per_replica


@dataclass(frozen=True)
class Launched:
    """The processes that the variables of a launcher describe.

    Attributes:
        launcher: the launcher's command: mpiexec or srun.
        rank: the rank of this process.
        size: the number of processes; None: only MPI knows it.
        local_rank: the rank among the processes of this machine, as far as the variables say.
    """

    launcher: str
    rank: int
    size: Optional[int]
    local_rank: int

    @property
    def words(self) -> List[str]:
        """Returns the words in front of a command that start as many processes again."""
        return [self.launcher, "-n", str(self.size)]

    @property
    def text(self) -> str:
        """Returns what was started, for messages."""
        processes = "several processes" if self.size is None else counted(self.size, "process")
        return f"{self.launcher} started {processes}"


@dataclass(frozen=True)
class Mpi(Alone):
    """Processes that MPI connects; they share the micro-batches of a weight update."""

    launched: Launched = Launched("mpiexec", 0, None, 0)
    connection: "Connection" = None  # type: ignore[assignment]

    def gather(self, place: str, value: object) -> List[Any]:
        received = [
            json.loads(data) for data in self.connection.gather_bytes(json.dumps([place, value]).encode())
        ]
        for rank, (other, _) in enumerate(received):
            if other != place:
                raise RuntimeError(f"rank {rank} is at '{other}', and this process at '{place}'")
        return [value for _, value in received]

    def gather_array(self, values: "np.ndarray") -> "np.ndarray":
        return self.connection.gather_array(values)

    def sum_array(self, values: "np.ndarray") -> "np.ndarray":
        return self.connection.sum_array(values)


# -- who started this process -----------------------------------------------------------------------------------------

# Rank, number of processes, and rank on the machine.  Sources: Open MPI, "Environment variables set by mpirun"
# (docs.open-mpi.org, running-apps); MPICH, "Using the Hydra Process Manager" and the PMI-1 and PMI-2 interfaces, which
# Slurm's mpi/pmi2 plugin has too; PMIx Standard 4, "Process-related environment variables"; srun(1), "OUTPUT
# ENVIRONMENT VARIABLES".  The batch script of a job has its variables (SLURM_NTASKS), too, so only a step's are read.
# Launchers that run inside a Slurm job inherit the variables of a step, so those come last.
_STEP_SIZE = "SLURM_STEP_NUM_TASKS"
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PMIX_RANK", _STEP_SIZE, "SLURM_LOCALID"),
    ("SLURM_PROCID", _STEP_SIZE, "SLURM_LOCALID"),
)
_POPDIST = "POPDIST_"
_TOTAL = _POPDIST + "NUM_TOTAL_REPLICAS"


def find_launched(environment: Optional[Mapping[str, str]] = None) -> Optional[Launched]:
    """Returns the several processes that a launcher of MPI started; None: this process is alone, or under ``poprun``.

    Raises:
        ConfigurationError: a variable is no number.
    """
    env = os.environ if environment is None else environment
    if _TOTAL in env:
        return None
    for rank_name, size_name, local_name in _LAUNCHERS:
        if rank_name not in env or (rank_name == "SLURM_PROCID" and size_name not in env):
            continue
        size = _number(env, size_name, "its launcher") if size_name in env else None
        rank = _number(env, rank_name, "its launcher")
        if size == 1 and rank == 0:
            return None
        if size == 1:
            size = None  # inherited from a step of Slurm, in which another launcher started several processes
        is_step = size is not None and env.get(_STEP_SIZE) == str(size)
        local = _number(env, local_name, "its launcher", rank)
        return Launched("srun" if is_step else "mpiexec", rank, size, local)
    return None


def find_instances(environment: Optional[Mapping[str, str]] = None) -> ProcessGroup:
    """Returns the instances that the variables of ``poprun`` describe; without them, this process alone.

    Raises:
        ConfigurationError: instances with different numbers of replicas.
    """
    env = os.environ if environment is None else environment
    if _TOTAL not in env:
        return Alone()
    total = _of_popdist(env, "NUM_TOTAL_REPLICAS")
    local = _of_popdist(env, "NUM_LOCAL_REPLICAS", total)
    if local < 1 or total % local or env.get("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "1") == "0":
        raise ConfigurationError(
            f"{total} replicas are not spread evenly over the instances of poprun",
            "use a --num-instances that divides --num-replicas",
        )
    offset = _of_popdist(env, "REPLICA_INDEX_OFFSET", 0)
    ipus = _of_popdist(env, "NUM_IPUS_PER_REPLICA", 1)
    if offset % local or not 0 <= offset < total or ipus < 1:
        raise ConfigurationError(
            f"POPDIST_REPLICA_INDEX_OFFSET {offset} and POPDIST_NUM_IPUS_PER_REPLICA {ipus} fit no instance of "
            f"{counted(local, 'replica')} among {total}",
            _start_with("poprun"),
        )
    return Popdist(total // local, offset // local, ipus, total)


def check_starter(command: str, in_processes: bool, in_instances: bool) -> None:
    """Refuses several processes of a command that runs in one.

    Args:
        command: the words of the command.
        in_processes: whether processes of MPI may run it together.
        in_instances: whether instances of ``poprun`` may.

    Raises:
        ConfigurationError: they may not.
    """
    launched, instances = find_launched(), find_instances()
    if launched is not None and not in_processes:
        started, starter = launched.text, launched.launcher
    elif instances.under_poprun and not in_instances:
        started, starter = f"poprun started {counted(instances.size, 'instance')}", "poprun"
    else:
        return
    raise ConfigurationError(
        f"{started}, and `{command}` runs in one", f"type it without {starter}: {command} ..."
    )


def _of_popdist(env: Mapping[str, str], name: str, default: Optional[int] = None) -> int:
    return _number(env, _POPDIST + name, "poprun", default)


def _number(env: Mapping[str, str], name: str, launcher: str, default: Optional[int] = None) -> int:
    """Returns a number that a launcher set.

    Raises:
        ConfigurationError: it is not a number.
    """
    text = env.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is no number", _start_with(launcher)) from None


def _start_with(launcher: str) -> str:
    return f"{launcher} sets these variables: start the program with it, or unset them"


# The processes that MPI has connected.
_connected: Optional[ProcessGroup] = None


def find_group() -> ProcessGroup:
    """Returns the group of this process; the first call under a launcher of MPI connects its processes.

    Raises:
        ConfigurationError: the variables that describe the group are not valid.
        MissingError: a launcher started several processes, and MPI does not connect them.
    """
    global _connected
    launched = find_launched()
    if launched is None:
        return find_instances()
    _connected = _connected or _connect(launched)
    return _connected


def _connect(launched: Launched) -> ProcessGroup:
    """Connects the processes of a launcher.

    Raises:
        MissingError: mpi4py is not installed, or it uses another MPI than the launcher's.
    """
    from ipucnn.sessions.mpi import Connection, mismatch

    connection = Connection(launched.text)
    size = connection.size
    if size == 1 and launched.size is None and not launched.rank:
        return Alone()
    if size != (launched.size or size) or connection.rank != launched.rank:
        problem = f"{launched.text}, and MPI connects {counted(size, 'process')}"
        raise MissingError(
            f"{problem}: mpi4py uses another MPI than the launcher", mismatch(launched.launcher)
        )
    return Mpi(size, connection.rank, replace(launched, size=size), connection)


def is_connected() -> bool:
    """Returns whether MPI has connected several processes."""
    return isinstance(_connected, Mpi)


def leave(code: int, message: str = "", hint: Optional[str] = None, traceback: str = "") -> int:
    """Waits until all processes that MPI connects end; returns the exit code of all, or ``code`` in other groups.

    Args:
        code: the exit code of this process.
        message, hint, traceback: the error that ends it.
    """
    if not isinstance(_connected, Mpi):
        return code
    return _connected.connection.leave(code, message, hint, traceback)


def resume_words() -> List[str]:
    """Returns the words in front of ``ipucnn`` that start as many processes of MPI again; none for other groups."""
    connected = _connected.launched if isinstance(_connected, Mpi) else None
    launched = find_launched() if _connected is None else connected
    return [] if launched is None else launched.words
