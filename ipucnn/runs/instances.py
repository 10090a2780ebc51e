"""One run in several processes under ``poprun``: they compute the same, and one of them writes."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ipucnn.errors import ConfigurationError
from ipucnn.runs.folder import RunFolder
from ipucnn.sessions.poplar.popdist import Instances


def check_seed(instances: Instances, config: Any) -> None:
    """Instances that draw seeds of their own would train different networks.

    Raises:
        ConfigurationError: no seed is given.
    """
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
