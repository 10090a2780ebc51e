"""Writes a run's figures for other tools: TensorBoard, and Weights & Biases.  ``mlperf.py`` is a further tracker.

The :class:`~ipucnn.runs.recorder.Recorder` calls the trackers; none of them changes the run.
"""

import hashlib
import os
import socket
import time
from pathlib import Path
from types import ModuleType
from typing import Mapping

from ipucnn.config.options import SPECS, RunConfig
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.filesystem import make_folder, make_new_file, user_error_of


class Tracker:
    """The interface through which the recorder reports a run; each subclass overrides the events that it uses."""

    def training_begins(self, weight_updates: int) -> None:
        """Called after the first slice of weight updates, when nothing of training is left to compile."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each named curve."""

    def validation_begins(self, weight_updates: int) -> None:
        """Called before each validation."""

    def validated(self, weight_updates: int, figure: float, is_last: bool) -> None:
        """Called after each validation.

        Args:
            weight_updates: the position of the run.
            figure: Dice of a segmentation network, else accuracy.
            is_last: whether training ends with this validation.
        """

    def close(self, failed: bool = False) -> None:
        """Called at the end of the run.

        Args:
            failed: whether an error or a signal ended the run.
        """


class Curves(Tracker):
    """TensorBoard's curves: one event file in ``folder``.  The constructor imports TensorFlow.

    The file has only scalars, written with TensorFlow's record writer, so TensorBoard need not be installed.

    Args:
        folder: the folder of the event files.
        first_step: the step at which a run is continued; TensorBoard ignores later points of earlier files.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        import tensorflow as tf

        make_folder(folder)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._writer = tf.io.TFRecordWriter(str(make_new_file(folder, name)))
        self._event = tf.compat.v1.Event
        # The first record names the format's version; TensorBoard refuses a file without it.
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))
        log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write(self._event(wall_time=now, step=first_step, session_log=log))

    def _write(self, event: object) -> None:
        self._writer.write(event.SerializeToString())  # type: ignore[attr-defined]
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        import tensorflow as tf

        points = [tf.compat.v1.Summary.Value(tag=tag, simple_value=float(v)) for tag, v in values.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=tf.compat.v1.Summary(value=points)))

    def close(self, failed: bool = False) -> None:
        self._writer.close()


def import_wandb() -> ModuleType:
    """Imports the library of Weights & Biases.

    Raises:
        MissingError: the library is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise MissingError(
            "--wandb: the library of Weights & Biases is not installed",
            "install it with: pip install 'ipucnn[wandb]'; or drop --wandb",
        ) from None
    module: ModuleType = wandb
    return module


_SETTINGS = Path("wandb", "settings")
"""The file in the current folder from which the library takes settings, no matter who put it there."""


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class WeightsAndBiases(Tracker):
    """The run's curves at Weights & Biases (project ``ipucnn``), or with ``WANDB_MODE=offline`` in the run folder.

    All parts of an interrupted run are one run there: its id is a hash of the host, the run folder's path, and the
    time at which the run began.

    Args:
        config: the configuration of the run.
        folder: the run folder, in which the library keeps its files.
        began: the start of the run's first process, as ``environment.json`` has it.

    Raises:
        MissingError: the library has no account to log to, or does not start.
        DataError: it cannot write its files.
        ConfigurationError: the library refuses a value, or would take settings from the current folder.
    """

    def __init__(self, config: RunConfig, folder: Path, began: str) -> None:
        wandb = import_wandb()
        if _SETTINGS.exists():
            raise ConfigurationError(
                f"--wandb: {_SETTINGS} in this folder would decide where the run is logged to",
                "move it away; WANDB_ENTITY and WANDB_BASE_URL say the same",
            )
        name = config.wandb_run_name or folder.name
        if config.fold is not None:
            name += f" fold {config.fold}"
        key = f"{socket.gethostname()} {folder.absolute()} {began}"
        try:
            self._run = wandb.init(
                project="ipucnn",
                name=name,
                tags=list(config.wandb_tags),
                id=hashlib.sha256(key.encode()).hexdigest()[:16],
                resume="allow",
                config={spec.name: spec.yaml_value(getattr(config, spec.name)) for spec in SPECS},
                dir=str(folder),
                # No git is started to find out where a result comes from (docs/security.md).
                settings=wandb.Settings(disable_git=True),
            )
        except ValueError as error:
            raise ConfigurationError(
                f"--wandb: the library refuses a value: {_first_line(error)}",
                "correct --wandb-run-name, --wandb-tags (64 characters each) or the WANDB_ variables",
            ) from None
        except (wandb.errors.Error, OSError) as error:
            raise user_error_of(error) or MissingError(
                f"--wandb: Weights & Biases does not start: {_first_line(error)}",
                "type: wandb login; or log to the run folder alone with WANDB_MODE=offline",
            ) from None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=1 if failed else 0)
