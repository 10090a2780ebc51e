"""What a training run does with its session's events: history, validation, checkpoints, report."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, Sequence

from ipucnn.config.options import BY_NAME
from ipucnn.config.resolve import RESUMABLE
from ipucnn.errors import EXIT_SIGTERM
from ipucnn.interrupts import Interrupted, InterruptGuard
from ipucnn.runs import checkpoints
from ipucnn.runs import setup as run_setup
from ipucnn.runs.events import CheckpointSaved, Notes, RunEvent, Validated
from ipucnn.runs.folder import BEST, LAST, METRICS, TIMINGS
from ipucnn.runs.report import training_report
from ipucnn.sessions.session import CheckpointDue, ExecutionFinished, Progress, Stopped, ValidationDue


def _portable(config: Any) -> Any:
    """A configuration without what does not decide the result, so that the same run anywhere gives the same file.

    The data set's path stays: a checkpoint alone can be evaluated where it was trained.
    """
    keep = ("dataset_path", "num_epochs")
    return replace(config, **{name: BY_NAME[name].default for name in RESUMABLE if name not in keep})


def _num_images(weight: float, info: Any) -> int:
    """Images that a validation saw, from the sum of its weights: pixels of tiled sets, else samples."""
    height, width = info.image_shape[:2]
    count, rest = divmod(weight, height * width) if info.tiled else (weight, 0)
    if rest or count != int(count):
        raise RuntimeError(f"the validation's weights add up to {weight:g}, which are no whole images")
    return int(count)


class Recorder:
    """Handles events in such an order that every checkpoint is a place to go on from.

    What an event does to history and state is done before it is counted in ``state.events_done``, and a
    checkpoint is written only after that.

    Args:
        run: the ``TrainingRun``.
        session: that trains it.
        curves: TensorBoard's ``EventWriter``.
        guard: knows whether a signal asked the run to end.
    """

    def __init__(self, run: Any, session: Any, curves: Any, guard: InterruptGuard) -> None:
        self._run = run
        self._session = session
        self._curves = curves
        self._guard = guard
        self._settled_at = -1
        self._saved_at = -1

    def handle(self, event: Any) -> Iterator[RunEvent]:
        """Does what an event of the session asks for.

        Raises:
            Interrupted: a signal asked the run to end; it is saved.
            UserError: the loss or the weights are no longer finite, or a file cannot be written.
        """
        if isinstance(event, Progress):
            yield event
        elif isinstance(event, ExecutionFinished):
            yield from self._execution(event)
        elif isinstance(event, ValidationDue):
            yield from self._validation(event)
        elif isinstance(event, CheckpointDue):
            self._settle_statistics()
            self._session.state.events_done += 1
            numbered = self._save(checkpoints.checkpoint_name(event.weight_updates))
            self._saved_at = event.weight_updates
            yield CheckpointSaved(self._run.folder.link_checkpoint(numbered, LAST))
        if self._session.any_instance(self._guard.is_set):
            self._interrupt()

    def _execution(self, event: ExecutionFinished) -> Iterator[RunEvent]:
        self._run.timer.add(event)
        self._record(
            {
                "event": "execution",
                "execution": event.execution,
                "weight_updates": event.weight_updates,
                "epoch": event.epoch,
                "samples": event.samples,
                **event.metrics,
                "learning_rate": event.learning_rate,
            },
            {"wall_s": event.wall_s, "images_per_s": event.images_per_s},
        )
        self._session.state.events_done += 1
        points = {f"train/{k}": v for k, v in event.metrics.items()}
        points.update({"train/learning_rate": event.learning_rate, "train/images_per_s": event.images_per_s})
        self._curves.scalars(event.weight_updates, points)
        yield event

    def _record(self, computed: Dict[str, Any], measured: Dict[str, Any]) -> None:
        """One row of history: what was computed, and beside it how long that took."""
        line = json.dumps(computed) + "\n"
        self._run.state.history.append(line)
        self._run.folder.append(METRICS, line)
        which = {key: computed[key] for key in ("event", "weight_updates")}
        self._run.folder.append(TIMINGS, json.dumps({**which, **measured}) + "\n")

    def _validation(self, event: ValidationDue) -> Iterator[RunEvent]:
        run, state = self._run, self._run.state
        self._settle_statistics()
        started = time.perf_counter()
        batch = run.program.validation_micro_batch_size * run.program.validation_num_replicas
        batches = run_setup.evaluation_batches(run.setup, batch)
        try:
            metrics = self._session.evaluate(batches, lambda: self._guard.is_set)
        except Stopped:
            # Not counted as done: a continued run validates here.
            self._interrupt()
        wall_s = time.perf_counter() - started
        checkpoints.require_finite_loss(metrics, event.weight_updates)
        metrics = {**metrics, "samples": _num_images(metrics["samples"], run.info)}
        figure = "dice" if "dice" in metrics else "accuracy"
        is_best = state.best is None or metrics[figure] > state.best[figure]
        self._record(
            {"event": "validation", "weight_updates": event.weight_updates, **metrics}, {"wall_s": wall_s}
        )
        state.last_validation = metrics
        if is_best:
            state.best = metrics
        self._session.state.events_done += 1
        points = {f"validation/{k}": v for k, v in metrics.items() if k != "samples"}
        self._curves.scalars(event.weight_updates, points)
        yield Validated(event.weight_updates, metrics, is_best, wall_s)
        if is_best and run.setup.config.checkpoints and run.setup.config.training:
            yield CheckpointSaved(self._save(BEST))

    def validate_each(self, checkpoints: Sequence[Path]) -> Iterator[RunEvent]:
        """Validates checkpoints, in the order given."""
        for path in checkpoints:
            updates = checkpoints.load_for_validation(path, self._session.state)
            yield Notes([f"checkpoint {path}"])
            yield from self.handle(ValidationDue(updates, 0))

    def _settle_statistics(self) -> None:
        """Recomputes the moving statistics of a pipelined batch norm, once per position."""
        position = self._session.state.weight_updates
        if self._run.setup.config.training and position != self._settled_at:
            self._run.statistics_updates = self._session.recompute_statistics(self._run.dataset)
            self._settled_at = position

    def _save(self, name: str) -> Path:
        """Writes a checkpoint."""
        import numpy as np

        run, state, info = self._run, self._session.state, self._run.info
        meta = {
            "model": run.setup.config.model_name,
            "config": _portable(run.saved_config()).to_yaml(),
            "num_classes": info.num_classes,
            "input_shape": list(run.setup.input_shape),
            "dataset": info.name,
            "image_shape": list(info.image_shape),
            "class_names": list(info.class_names),
            "num_eval": info.num_eval,
            "mean": list(info.mean),
            "std": list(info.std),
            "data_sha256": run.data_sha256,
            "seed": run.seed,
            "program": run.program.to_dict(),
            **checkpoints.position(state, run.state),
        }
        rate = float(run.schedule(np.asarray([state.weight_updates]))[0])
        weights, slots = (checkpoints.arrays(values, rate) for values in (state.weights, state.slots))
        path: Path = run.folder.write_checkpoint(name, weights, slots, meta)
        return path

    def _interrupt(self) -> None:
        """Saves and ends; of several instances all end where one of them got a signal."""
        exit_code = self._guard.exit_code or EXIT_SIGTERM
        run, config = self._run, self._run.setup.config
        updates = f"{self._session.state.weight_updates} of {run.program.num_weight_updates} weight updates"
        if not (config.training and config.checkpoints):
            raise Interrupted(exit_code, f"interrupted after {updates}; nothing saved", None)
        self._settle_statistics()
        path = self._save(LAST)
        raise Interrupted(
            exit_code,
            f"interrupted after {updates}; checkpoint {path}",
            f"continue it with: ipucnn train --resume --run-dir {run.folder.path}",
        )

    def finish(self) -> Iterator[RunEvent]:
        """The last checkpoint and the report."""
        run, config = self._run, self._run.setup.config
        if config.training and config.checkpoints and self._saved_at != self._session.state.weight_updates:
            self._settle_statistics()
            yield CheckpointSaved(self._save(LAST))
        run.final_report = training_report(run, self._session)
        run.folder.write_report(run.final_report)
        if config.clean_dir:
            run.folder.clean(run.final_report["checkpoints"])
        if self._session.any_instance(self._guard.is_set):
            # It came too late to save anything, but what follows, the next fold above all, is not wanted.
            raise Interrupted(
                self._guard.exit_code or EXIT_SIGTERM,
                f"interrupted when everything was done and saved in {run.folder.path}",
                None,
            )
