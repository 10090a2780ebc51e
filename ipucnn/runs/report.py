"""``report.json``: what a training run came to, and what its figures are of."""

import time
from typing import Any, Dict, Optional


def training_report(run: Any, session: Any) -> Dict[str, Any]:
    """The report of a ``TrainingRun`` that is over.

    Throughput and times are of this process: of a run that was continued, of its last part.
    """
    assert run.compilation is not None
    timer = run.timer
    images_per_s = timer.images_per_s
    forward_flops = 2 * run.compilation.macs_per_sample
    return {
        "model": run.setup.config.model_name,
        "dataset": {
            "name": run.info.name,
            "location": run.info.location,
            "train": run.info.num_train,
            "evaluation": run.info.num_eval,
            "class_names": list(run.info.class_names),
            "validated_pixels": _validated_pixels(run.setup),
        },
        "program": run.program.to_dict(),
        "compilation": {
            **(session.compilation or run.compilation).to_dict(),
            "first_update_s": session.first_update_s,
            "compile_s": run.compilation.trace_s + session.first_update_s,
        },
        "measured": {
            "images_per_s": images_per_s,
            # A training step is counted as three forward passes: forward, and the two backward products.
            "flop_per_s": images_per_s * forward_flops * 3,
            "train_s": timer.busy_s,
            "wall_s": time.perf_counter() - timer.started,
            "first_weight_update": run.first_weight_update,
        },
        "moving_statistics": (
            f"recomputed over {run.statistics_updates} weight updates' batches"
            if run.statistics_updates
            else "running"
        ),
        "checkpoints": run.checkpoint_names(session.state.weight_updates),
        "checkpoints_deleted": run.setup.config.clean_dir,
        "trained_samples": run.program.samples_before(session.state.weight_updates),
        "validation": run.state.last_validation,
        "best_validation": run.state.best,
        "processes": [
            {key: process.get(key) for key in ("started", "first_weight_update", "command")}
            for process in run.processes
        ],
        "environment": run.environment,
    }


def _validated_pixels(setup: Any) -> Optional[Dict[str, Any]]:
    """``inner`` of ``of`` (height, width): where an unpadded network sees each image once, and predicts its centre.

    None where all pixels are judged, or there are none.
    """
    if setup.output_shape is None or setup.source.info.tiled:
        return None
    inner, of = [int(n) for n in setup.output_shape], [int(n) for n in setup.input_shape[:2]]
    return None if inner == of else {"inner": inner, "of": of}


class Timer:
    """Adds up what executions measured.

    Attributes:
        started: when the work began, ``time.perf_counter()``.
        busy_s: time in weight updates, without compiling.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.busy_s = 0.0
        self._samples = 0.0

    def add(self, execution: Any) -> None:
        """Counts an ``ExecutionFinished``."""
        self.busy_s += execution.wall_s
        self._samples += execution.images_per_s * execution.wall_s

    @property
    def images_per_s(self) -> float:
        """Steady throughput, 0 where nothing was timed."""
        return self._samples / self.busy_s if self.busy_s else 0.0
