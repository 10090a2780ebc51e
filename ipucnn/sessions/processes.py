"""The processes of one run: the instances of a program under ``poprun``, or the workers of the host session.

``poprun`` sets POPDIST_* in each process.  Each instance runs some of the replicas on its share of the
data; the first one writes checkpoints and logs.  ``host/workers.py`` finds workers.
"""

import os
from dataclasses import dataclass
from typing import Mapping, Optional

from ipucnn.errors import ConfigurationError
from ipucnn.text import counted

_PREFIX = "POPDIST_"
_TOTAL = _PREFIX + "NUM_TOTAL_REPLICAS"
_HINT = "poprun sets these variables: start the program with it, or unset them"


@dataclass(frozen=True)
class Instances:
    """The processes of one run, and the number of this one.

    Attributes:
        count: number of instances; 1 without ``poprun``.
        index: number of this instance, from 0.
        ipus_per_replica: the value given to ``poprun``; None without it.
        total_replicas: replicas of all instances; None without ``poprun``.
    """

    count: int = 1
    index: int = 0
    ipus_per_replica: Optional[int] = None
    total_replicas: Optional[int] = None

    @property
    def local_replicas(self) -> int:
        """Returns the replicas of one instance."""
        return (self.total_replicas or 1) // self.count

    @property
    def local_ipus(self) -> int:
        """Returns the IPUs that ``poprun`` chose for one instance; 0 without it."""
        return 0 if self.total_replicas is None else self.local_replicas * (self.ipus_per_replica or 1)

    @property
    def num_shares(self) -> int:
        """Returns the parts into which the replicas are divided; the host's workers divide micro-batches instead."""
        return self.count if self.under_poprun else 1

    @property
    def under_poprun(self) -> bool:
        """Returns whether ``poprun`` started this process."""
        return self.total_replicas is not None

    @property
    def is_writer(self) -> bool:
        """Returns whether this process writes the run folder."""
        return self.index == 0


def find_instances(environment: Optional[Mapping[str, str]] = None) -> Instances:
    """Returns the instances that the variables of ``poprun`` describe; without them, this process alone.

    Raises:
        ConfigurationError: instances with different numbers of replicas.
    """
    env = os.environ if environment is None else environment
    if _TOTAL not in env:
        return Instances()
    total = _number(env, "NUM_TOTAL_REPLICAS", None)
    local = _number(env, "NUM_LOCAL_REPLICAS", total)
    if local < 1 or total % local or env.get("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "1") == "0":
        raise ConfigurationError(
            f"{total} replicas are not spread evenly over the instances of poprun",
            "use a --num-instances that divides --num-replicas",
        )
    offset = _number(env, "REPLICA_INDEX_OFFSET", 0)
    ipus = _number(env, "NUM_IPUS_PER_REPLICA", 1)
    if offset % local or not 0 <= offset < total or ipus < 1:
        raise ConfigurationError(
            f"POPDIST_REPLICA_INDEX_OFFSET {offset} and POPDIST_NUM_IPUS_PER_REPLICA {ipus} fit no instance of "
            f"{counted(local, 'replica')} among {total}",
            _HINT,
        )
    return Instances(total // local, offset // local, ipus, total)


def _number(env: Mapping[str, str], name: str, default: Optional[int]) -> int:
    """Returns a number that ``poprun`` set.

    Raises:
        ConfigurationError: it is not a number.
    """
    text = env.get(_PREFIX + name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{_PREFIX}{name}={text!r} is no number", _HINT) from None
