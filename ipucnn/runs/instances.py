"""One run in several processes under ``poprun``: they compute the same, and one of them writes."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ipucnn.errors import ConfigurationError
from ipucnn.runs.folder import RunFolder
from ipucnn.sessions.factory import runs_on_ipus
from ipucnn.sessions.poplar.popdist import Instances, find_instances


def refuse_instances(command: str) -> None:
    """Refuses ``poprun`` for a command that runs in one process.

    Raises:
        ConfigurationError: ``poprun`` started this process.
    """
    if find_instances().is_distributed:
        raise ConfigurationError(
            f"poprun started this, and `ipucnn {command}` is one process: only `ipucnn train` runs under it",
            f"type it without poprun: ipucnn {command} ...",
        )


def check_instances(instances: Instances, config: Any) -> None:
    """Refuses instances that would train different networks: with seeds of their own, or away from each other.

    Raises:
        ConfigurationError: no seed is given, or the device is no IPU.
    """
    if instances.count > 1 and not runs_on_ipus(config.device):
        raise ConfigurationError(
            f"poprun started {instances.count} instances, and only IPUs are trained together",
            "start it without poprun: one process has all replicas on a CPU or GPU",
        )
    if instances.count > 1 and config.seed is None:
        raise ConfigurationError(
            f"{instances.count} instances of poprun need the same seed, and none is given", "add --seed 1"
        )


def own_folder(instances: Instances, folder: RunFolder) -> RunFolder:
    """The run folder for the instance that writes; for the others one that goes away with them."""
    if instances.is_writer:
        return folder
    path = Path(tempfile.mkdtemp(prefix="ipucnn-instance-"))
    atexit.register(shutil.rmtree, str(path), ignore_errors=True)
    return RunFolder(path / "run")
