"""What ``poprun`` told this process: which instance of how many it is, and with how many replicas."""

from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Optional

from ipucnn.errors import UserError
from ipucnn.sessions.poplar.popdist import Instances, find_instances

__all__ = ["Poprun", "find_poprun"]


@dataclass(frozen=True)
class Poprun:
    """The POPDIST_* variables, interpreted.

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
            f"instance {found.index + 1} of {found.count}, {self.num_local_replicas} of {found.total_replicas} "
            f"replica(s), {found.ipus_per_replica} IPU(s) each; {writes} checkpoints and logs"
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
