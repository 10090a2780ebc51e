"""Writes ``mlperf.log`` in the format of MLPerf's logging library: ``:::MLLOG`` and a JSON object per line.

Keys and their order follow MLPerf's rules for training (github mlcommons/logging, mllog/constants.py and
compliance_checker).  The submitter has to add the keys that only they know (organisation, division, status, platform),
and the clearing of caches, which this program does not do.
"""

import json
import time
from typing import Optional

import numpy as np

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.runs.context import RunContext
from ipucnn.runs.folder import MLPERF
from ipucnn.runs.trackers import Tracker
from ipucnn.training.schedules import largest_rate

_EVENT_TYPES = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
"""Type of a line by the last word of its key; all others are points in time."""


class MlperfLog(Tracker):
    """The log of a run.  An earlier one is deleted, so a continued run logs only its last part.

    Args:
        context: the run.
        started: the start of the initialisation, in seconds since 1970.
    """

    def __init__(self, context: RunContext, started: float) -> None:
        self._context, self._is_open = context, False
        self._is_reached = context.config.target_accuracy is None
        context.folder.delete(MLPERF)
        program, optimizer, rates = context.program, context.optimizer, context.schedule
        params, prefix = optimizer.params, "lars_" if optimizer.name == "lars" else ""
        warmup = (context.config.lr_warmup_params or {}).get("warmup_epochs", 0)
        decay = optimizer.weight_decay or optimizer.l2_regularization
        settings: PlainDict = {
            "opt_name": optimizer.name,
            "global_batch_size": program.global_batch_size,
            "gradient_accumulation_steps": program.gradient_accumulation_count,
            "seed": context.seed,
            "train_samples": context.info.num_train,
            "eval_samples": context.info.num_eval,
            f"{prefix}opt_base_learning_rate": largest_rate(rates, program.num_weight_updates),
            f"{prefix}opt_end_learning_rate": float(rates(np.array([program.num_weight_updates - 1]))[0]),
            f"{prefix}opt_learning_rate_warmup_epochs": float(warmup),
            f"{prefix}opt_weight_decay": params.get("weight_decay", decay),
            f"{prefix}opt_momentum": params.get("momentum"),
            f"{prefix or 'opt_'}epsilon": params.get("epsilon"),
        }
        self.write("init_start", at=started)
        for key, value in settings.items():
            if value is not None:
                self.write(key, value)
        self.write("init_stop")

    def write(self, key: str, value: object = None, at: Optional[float] = None, **facts: PlainValue) -> None:
        """Adds a line with a key of MLPerf's constants, its value, the time ``at`` (None: now) and further facts."""
        entry = {
            "namespace": "",
            "time_ms": int((time.time() if at is None else at) * 1000),
            "event_type": _EVENT_TYPES.get(key.rpartition("_")[2], "POINT_IN_TIME"),
            "key": key,
            "value": value,
            "metadata": {"file": "ipucnn/runs/mlperf.py", "lineno": 0, **facts},
        }
        self._context.folder.append(MLPERF, f":::MLLOG {json.dumps(entry)}\n")

    def _epochs(self, weight_updates: int) -> float:
        """Returns a number of epochs, as an int if it is whole."""
        epochs = weight_updates / self._context.program.weight_updates_per_epoch
        return int(epochs) if epochs == int(epochs) else epochs

    def training_begins(self, weight_updates: int) -> None:
        self._is_open = True
        self.write("run_start")
        self._begin_block(weight_updates)

    def _begin_block(self, weight_updates: int) -> None:
        program = self._context.program
        length = (program.executions_per_validation or 1) * program.weight_updates_per_execution
        epochs = length / program.weight_updates_per_epoch
        self.write("block_start", first_epoch_num=self._epochs(weight_updates), epoch_count=epochs)

    def validation_begins(self, weight_updates: int) -> None:
        if self._is_open:
            self.write("block_stop", first_epoch_num=self._epochs(weight_updates))
            self.write("eval_start", epoch_num=self._epochs(weight_updates))

    def validated(self, weight_updates: int, figure: float, is_last: bool) -> None:
        if not self._is_open:
            return
        target, epoch = self._context.config.target_accuracy, self._epochs(weight_updates)
        self._is_reached = target is None or figure >= target
        self.write("eval_accuracy", figure, epoch_num=epoch)
        self.write("eval_stop", epoch_num=epoch)
        if is_last:
            self.close()
        else:
            self._begin_block(weight_updates)

    def close(self, failed: bool = False) -> None:
        if self._is_open:
            self._is_open = False
            self.write("run_stop", status="success" if self._is_reached and not failed else "aborted")
