"""Writes a run's figures for other tools: TensorBoard, Weights & Biases, and the log that MLPerf's rules require.

The :class:`~ipucnn.runs.recorder.Recorder` calls the trackers; none of them changes the run.
"""

import dataclasses
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from types import ModuleType
from typing import Callable, Mapping, Optional

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, DataError, MissingError
from ipucnn.filesystem import absolute, append_text, exists, make_folder, make_new_file, remove_file
from ipucnn.training.optimizers import OptimizerSettings
from ipucnn.training.program import Program


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
        import tensorflow as tf

        try:
            self._writer.write(event.SerializeToString())  # type: ignore[attr-defined]
            self._writer.flush()
        except tf.errors.OpError as error:
            raise DataError(
                f"TensorBoard events cannot be written: {error.message}", "free some space"
            ) from None

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
        ConfigurationError: the library refuses a value, or would take settings from the current folder.
    """

    def __init__(self, config: RunConfig, folder: Path, began: str) -> None:
        wandb = import_wandb()
        if exists(_SETTINGS):
            raise ConfigurationError(
                f"--wandb: {_SETTINGS} in this folder would decide where the run is logged to",
                "move it away; WANDB_ENTITY and WANDB_BASE_URL say the same",
            )
        name = config.wandb_run_name or folder.name
        if config.fold is not None:
            name += f" fold {config.fold}"
        key = f"{socket.gethostname()} {absolute(folder)} {began}"
        try:
            self._run = wandb.init(
                project="ipucnn",
                name=name,
                tags=list(config.wandb_tags),
                id=hashlib.sha256(key.encode()).hexdigest()[:16],
                resume="allow",
                config=dataclasses.asdict(config),
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
            raise MissingError(
                f"--wandb: Weights & Biases does not start: {_first_line(error)}",
                "type: wandb login; or log to the run folder alone with WANDB_MODE=offline",
            ) from None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=1 if failed else 0)


POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


class MlperfLog(Tracker):
    """The log ``mlperf.log``, in the format of MLPerf's logging library: ``:::MLLOG`` and a JSON object per line.

    Keys and their order follow MLPerf's rules for training (github mlcommons/logging, mllog/constants.py and
    compliance_checker).  The submitter has to add the keys that only they know (organisation, division, status,
    platform), and the clearing of caches, which this program does not do.

    Args:
        path: the log's file.  An earlier one is deleted, so a continued run logs only its last part.
        check: a function called before each line, which raises if another process has continued the run.
        program: the Program of the run.
        target: the figure that a validation has to reach; None without a target.
    """

    def __init__(
        self, path: Path, check: Callable[[], None], program: Program, target: Optional[float] = None
    ) -> None:
        check()
        remove_file(path)
        self._path, self._check, self._program = path, check, program
        self._is_reached, self._target = target is None, target
        self._is_open = False

    def write(
        self, event_type: str, key: str, value: object = None, at: Optional[float] = None, **facts: PlainValue
    ) -> None:
        """Adds a line.

        Args:
            event_type: POINT, START or END.
            key, value: a key of MLPerf's constants, and its value.
            at: the time in seconds since 1970; None: now.
            facts: further metadata.
        """
        self._check()
        entry = {
            "namespace": "",
            "time_ms": int((time.time() if at is None else at) * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"file": "ipucnn/runs/trackers.py", "lineno": 0, **facts},
        }
        append_text(self._path, f":::MLLOG {json.dumps(entry)}\n")

    def settings(self, started: float, optimizer: OptimizerSettings, values: PlainDict) -> None:
        """Logs the initialisation and the hyperparameters of the run.

        Args:
            started: the start of the initialisation, in seconds since 1970.
            optimizer: the settings of the optimizer.
            values: further keys of MLPerf; for LARS, keys that begin with ``opt_`` get the prefix ``lars_``.
        """
        self.write(START, "init_start", at=started)
        params, prefix = optimizer.params, "lars_" if optimizer.name == "lars" else ""
        decay = params.get("weight_decay", optimizer.weight_decay or optimizer.l2_regularization)
        values = {
            "global_batch_size": self._program.global_batch_size,
            "gradient_accumulation_steps": self._program.gradient_accumulation_count,
            **values,
            "opt_weight_decay": decay,
            **({"opt_momentum": params["momentum"]} if "momentum" in params else {}),
            **({(prefix or "opt_") + "epsilon": params["epsilon"]} if "epsilon" in params else {}),
        }
        self.write(POINT, "opt_name", optimizer.name)
        for key, value in values.items():
            self.write(POINT, prefix + key if key.startswith("opt_") else key, value)
        self.write(END, "init_stop")

    def training_begins(self, weight_updates: int) -> None:
        self._is_open = True
        self.write(START, "run_start")
        self._begin_block(weight_updates)

    def _begin_block(self, weight_updates: int) -> None:
        updates = (self._program.executions_per_validation or 1) * self._program.weight_updates_per_execution
        epochs = updates / self._program.weight_updates_per_epoch
        self.write(START, "block_start", first_epoch_num=self._epoch(weight_updates), epoch_count=epochs)

    def _epoch(self, weight_updates: int) -> float:
        """Returns the number of finished epochs, as an int if it is whole."""
        done = weight_updates / self._program.weight_updates_per_epoch
        return int(done) if done == int(done) else done

    def validation_begins(self, weight_updates: int) -> None:
        if self._is_open:
            epoch = self._epoch(weight_updates)
            self.write(END, "block_stop", first_epoch_num=epoch)
            self.write(START, "eval_start", epoch_num=epoch)

    def validated(self, weight_updates: int, figure: float, is_last: bool) -> None:
        if not self._is_open:
            return
        self._is_reached = self._target is None or figure >= self._target
        self.write(POINT, "eval_accuracy", figure, epoch_num=self._epoch(weight_updates))
        self.write(END, "eval_stop", epoch_num=self._epoch(weight_updates))
        if is_last:
            self.close()
        else:
            self._begin_block(weight_updates)

    def close(self, failed: bool = False) -> None:
        if self._is_open:
            self._is_open = False
            self.write(END, "run_stop", status="success" if self._is_reached and not failed else "aborted")
