"""The environment that ``poprun`` gives to an instance."""

from typing import Any, Dict


def variables(index: int, total: int = 4, local: int = 2, ipus: int = 1) -> Dict[str, str]:
    """Returns the variables of an instance.

    Args:
        index: number of the instance.
        total, local: replicas of all instances, and of each.
        ipus: IPUs of a replica.
    """
    values = dict(NUM_TOTAL_REPLICAS=total, NUM_LOCAL_REPLICAS=local, NUM_IPUS_PER_REPLICA=ipus)
    values.update(REPLICA_INDEX_OFFSET=index * local, LOCAL_INSTANCE_INDEX=index)
    return {"POPDIST_" + name: str(value) for name, value in values.items()}


def poprun(monkeypatch: Any, index: int = 0, **layout: int) -> None:
    """Makes this process an instance until the test ends."""
    for name, value in variables(index, **layout).items():
        monkeypatch.setenv(name, value)
