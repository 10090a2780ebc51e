"""Compares the processes of one run before they train: whatever decides the result has to be equal in all of them."""

import contextlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ipucnn import __version__
from ipucnn.aliases import PlainValue, TfVariable
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.machine import BYTE_PACKAGES, BYTE_VARIABLES, cpu_name
from ipucnn.sessions.group import Alone
from ipucnn.text import shown_value


def compared_options(config: RunConfig) -> Dict[str, Any]:
    """Returns the options that have to be equal in all processes, by flag."""
    compared = (spec for spec in SPECS if spec.decides_result)
    return {spec.flag: spec.yaml_value(getattr(config, spec.name)) for spec in compared}


def facts_of_machine() -> Dict[str, Any]:
    """Returns the facts of this process that can change the last digits of a result.

    The number of threads is not among them, because rank 0 decides it for all processes.
    """
    facts: Dict[str, Any] = {"processor": cpu_name(), "python": ".".join(map(str, sys.version_info[:2]))}
    for package in BYTE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    facts.update({name: os.environ.get(name) for name in BYTE_VARIABLES})
    return facts


def _differences(everyone: Sequence[Mapping[str, PlainValue]], part: str) -> List[str]:
    """Returns the differences between each process and rank 0, one line each; all processes get the same lines.

    Args:
        everyone: the facts of all processes, by rank.
        part: the part of the facts to compare: ``run`` or ``machine``.
    """
    return [
        f"rank {rank} has {name} {shown_value(other[part].get(name))}, and rank 0 has {shown_value(value)}"
        for rank, other in enumerate(everyone)
        for name, value in everyone[0][part].items()
        if other[part].get(name) != value
    ]


def agree(
    group: Alone, config: RunConfig, run: Mapping[str, PlainValue], threads: int
) -> Tuple[int, List[str]]:
    """Compares the runs of all processes, before TensorFlow is imported.

    Args:
        group: the processes.
        config: the options, with ``require_same_bytes``.
        run: the plain values that have to be equal in all processes, by name.
        threads: the number of threads per operation that this process would choose.

    Returns:
        The number of threads that share an operation in each process, and the differences between processes that can
        change the last digits of a result.

    Raises:
        ConfigurationError: the processes would not train the same network, or would not compute the same bytes although
            that is required.
    """
    facts = {"run": {"ipucnn": __version__, **run}, "machine": facts_of_machine(), "threads": threads}
    everyone = group.gather("facts", facts)
    for difference in _differences(everyone, "run")[:1]:
        raise ConfigurationError(
            difference, "start all processes with the same command, data and version of ipucnn"
        )
    warnings = _differences(everyone, "machine")
    if warnings and config.require_same_bytes:
        raise ConfigurationError(
            f"--require-same-bytes: {warnings[0]}",
            "use machines of one type with the same installation, or add --no-require-same-bytes",
        )
    return int(everyone[0]["threads"]), warnings


def require_same_weights(group: Alone, variables: Mapping[str, TfVariable]) -> None:
    """Refuses processes whose weights (or other variables) differ, in all processes alike.

    Raises:
        ConfigurationError: the values of a process differ; the message names its rank.
    """
    if group.size == 1:
        return
    from ipucnn.training.checkpoints import digest_of

    values = {name: variable.numpy() for name, variable in variables.items()}
    everyone = group.gather("weights", digest_of(values, {}))
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ConfigurationError(
                f"rank {rank} begins with other weights than rank 0: they do not belong together",
                "give all processes the same network and the same --weights file",
            )
