"""One training run: from a resolved configuration to events, files in the run folder, and a report."""

import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Union

from ipucnn.config.resolve import Resolved
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.runs import checkpointing
from ipucnn.runs import setup as run_setup
from ipucnn.runs.folder import BEST, LAST, METRICS, TIMINGS
from ipucnn.runs.interrupts import Interrupted, InterruptGuard
from ipucnn.runs.report import Timer, training_report
from ipucnn.runs.resume import check_same_run, find_start
from ipucnn.runs.splits import plan_differences, settle_splits
from ipucnn.sessions.session import (
    CheckpointDue,
    CompilationReport,
    ExecutionFinished,
    Progress,
    Stopped,
    ValidationDue,
)
from ipucnn.training.optimizers import make_settings
from ipucnn.training.program import Program, make_layout, make_program
from ipucnn.training.schedules import make_schedule


@dataclass(frozen=True)
class Started:
    """The model is built and traced; training begins."""

    program: Program
    compilation: CompilationReport
    folder: Path
    dataset: Any


@dataclass(frozen=True)
class Validated:
    """Metrics over the whole evaluation set after ``weight_updates``."""

    weight_updates: int
    metrics: Dict[str, float]
    is_best: bool
    wall_s: float


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was written."""

    path: Path


@dataclass(frozen=True)
class Notes:
    """Lines to tell the user."""

    lines: List[str]


RunEvent = Union[Started, Progress, ExecutionFinished, Validated, CheckpointSaved, Notes]


class TrainingRun:
    """Validates everything that can be without TensorFlow on construction; :meth:`events` does the work.

    Args:
        resolved: the configuration.
        verbose: let TensorFlow speak.

    Raises:
        UserError: whatever is wrong with the configuration, the data or the run folder.
    """

    def __init__(self, resolved: Resolved, verbose: bool = False) -> None:
        from ipucnn.sessions.factory import check_device

        start = find_start(resolved)
        resolved = start.resolved
        config = resolved.config
        self.start = start
        self.verbose = verbose
        self.resolved = resolved
        check_device(config.device)
        run_setup.check_supported(config)
        run_setup.loss_name(config, resolved.record.task)
        self.seed = config.seed if config.seed is not None else random.SystemRandom().randrange(2**31)
        self.folder = start.folder
        self._check_flags()
        make_layout(config)  # before data is touched; the rest of the Program needs the size of the data set
        self.setup = run_setup.prepare(resolved, self.seed)
        run_setup.build_options(self.setup)
        self.info = self.setup.source.info
        self.program = make_program(config, self.info.num_train, seed=self.seed)
        self.optimizer = make_settings(
            config.optimizer,
            config.optimizer_params,
            global_batch_size=self.program.global_batch_size,
            weight_decay=config.weight_decay,
            l2_regularization=config.l2_regularization,
        )
        self.schedule = make_schedule(
            config.lr_schedule,
            config.lr_schedule_params,
            global_batch_size=self.program.global_batch_size,
            weight_updates_per_epoch=self.program.weight_updates_per_epoch,
            num_epochs=self.program.num_epochs,
            learning_rate=config.learning_rate,
            warmup=config.lr_warmup_params,
            staircase=config.lr_staircase,
        )
        if config.fused_micro_batches is not None:
            self.program = self.program.with_checked_fused(config.fused_micro_batches)
        elif start.checkpoint is not None:
            # How many micro-batches are computed as one decides about rounding: a continued run keeps it.
            fused = int(start.checkpoint.meta.get("program", {}).get("fused_micro_batches", 0))
            self.program = self.program.with_fused(fused)
        self.state = checkpointing.RunState([])
        self.compilation: Optional[CompilationReport] = None
        self.timer = Timer()
        self.final_report: Dict[str, Any] = {}
        self.environment: Dict[str, Any] = {}
        self.processes: List[Dict[str, Any]] = []
        self.fresh_weights = 0
        self.first_weight_update = 0
        self.statistics_updates = 0
        self._settled_at = -1
        self._saved_at = -1

    def _check_flags(self) -> None:
        """What cannot be seen in the configuration alone: files, and flags that would have no effect."""
        config, origins = self.resolved.config, self.resolved.origins
        if config.weights not in (None, "imagenet") and not Path(str(config.weights)).expanduser().exists():
            raise DataError(
                f"--weights {config.weights} does not exist", "give a checkpoint, a run folder, or imagenet"
            )
        if config.weights == "imagenet" and self.resolved.record.keras_application is None:
            raise ConfigurationError(
                f"there are no ImageNet weights for {config.model_name}",
                "`ipucnn models --json` lists keras_application for the networks that have them",
            )
        norm = config.norm_layer["name"]
        if origins["bn_momentum"] == "flag" and norm not in ("batch_norm", "custom_batch_norm"):
            raise ConfigurationError(f"--bn-momentum has no effect with norm-layer {norm}", "drop it")
        both = origins["ipus"] == "flag" == origins["num_replicas"]
        if both and make_layout(config).batching.num_replicas != config.num_replicas:
            raise ConfigurationError(
                f"--ipus {config.ipus} and --num-replicas {config.num_replicas} contradict each other",
                "give one of them",
            )

    @property
    def warnings(self) -> List[str]:
        """What the user should know before the run starts, one line each."""
        lines = [*self.info.warnings, *self.program.warnings]
        lines += plan_differences(self.resolved, self.setup.input_shape, self.info.num_classes)
        if self.program.samples_discarded_per_epoch:
            lines.append(
                f"{self.program.samples_discarded_per_epoch} of {self.info.num_train} training samples are "
                f"discarded in each epoch (others each time): {self.program.weight_updates_per_epoch} weight "
                f"updates x {self.program.global_batch_size} samples"
            )
        norm = self.setup.config.norm_layer["name"]
        if self.program.num_stages > 1 and norm in ("batch_norm", "custom_batch_norm"):
            lines.append(
                "pipelined batch norm: its moving statistics are recomputed over training batches before each "
                "validation and checkpoint, because IPUs do not update them correctly in a pipeline"
            )
        return lines

    def _dataset(self, first_update: int, samples_per_element: int) -> Any:
        from ipucnn.datasets.pipeline import train_batches

        p, config = self.program, self.setup.config
        epoch, update = divmod(first_update, p.weight_updates_per_epoch)
        return train_batches(
            self.setup.source,
            batch_size=samples_per_element,
            samples_per_epoch=p.samples_per_epoch,
            input_shape=self.setup.input_shape,
            input_range=self.setup.record.input_range,
            augment=config.augment,
            seed=self.seed,
            start_epoch=epoch,
            start_sample=update * p.global_batch_size,
            shuffle=config.shuffle,
            num_parallel=config.pipeline_num_parallel,
            output_shape=self.setup.output_shape,
        )

    @property
    def best(self) -> Optional[Dict[str, float]]:
        """Metrics of the best validation so far."""
        return self.state.best

    @property
    def last_validation(self) -> Optional[Dict[str, float]]:
        """Metrics of the latest validation."""
        return self.state.last_validation

    def events(self) -> Iterator[RunEvent]:
        """Builds, compiles, trains and writes the run folder.  A finished run yields nothing.

        Raises:
            Interrupted: by SIGINT or SIGTERM, after a checkpoint.
            NotFiniteError: the loss became NaN or infinite.
        """
        if self.start.report is not None:
            self.final_report = self.start.report
            if self.setup.config.clean_dir:
                self.folder.clean(self.final_report.get("checkpoints", ()))
            return
        try:
            with InterruptGuard() as guard:
                yield from self._events(guard)
        finally:
            self.folder.unlock()

    def _events(self, guard: InterruptGuard) -> Iterator[RunEvent]:
        from ipucnn.sessions.factory import create_session

        config = self.setup.config
        session = create_session(config.device, verbose=self.verbose)
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.runs.tensorboard import EventWriter
        from ipucnn.training.losses import make_loss

        self.timer = Timer()
        model = run_setup.build(self.setup)
        self._load_weights(model)
        saved = None if self.start.checkpoint is None else self.start.checkpoint.meta.get("program", {})
        self.program = settle_splits(self.program, model, self.resolved, saved)
        check_same_run(self.start, self._saved_config(), self.program, self.info)
        loss = make_loss(run_setup.loss_name(config, self.setup.record.task), config.label_smoothing)
        with data_errors():
            self.compilation = session.compile(
                model, self.program, self.optimizer, loss, self.schedule, self._dataset
            )
        assert session.program is not None
        self.program = session.program
        notes = self._open_folder(session)
        # From here on there is something to save: signals wait for the end of a slice or batch.
        guard.deferred = True
        if notes:
            yield Notes(notes)
        yield Started(self.program, self.compilation, self.folder.path, self.info)
        curves = EventWriter(self.folder.path / "tensorboard", self.first_weight_update)
        try:
            with data_errors():
                if config.training:
                    for event in session.train(self._dataset):
                        yield from self._handle(event, session, curves, guard)
                        if guard.exit_code is not None:
                            self._interrupted(session, guard.exit_code)
                elif config.checkpoint_input_dir is not None:
                    yield from self._validate_each(session, curves, guard)
                if config.validation and self.state.last_validation is None:
                    yield from self._handle(ValidationDue(0, 0), session, curves, guard)
                yield from self._finish(session)
        finally:
            curves.close()

    def _open_folder(self, session: Any) -> List[str]:
        """Makes or reopens the run folder, and puts the session where the checkpoint was written.

        Returns:
            Lines to tell the user.
        """
        start = self.start
        if start.checkpoint is not None:
            self.state = checkpointing.restore(start.checkpoint, session.state, str(start.checkpoint_path))
            self.first_weight_update = session.state.weight_updates
        if start.in_place and start.checkpoint is not None:
            self.folder.lock()
            self.folder.reopen(self._saved_config(), self.program, self.state.history)
        else:
            self.folder.create(self._saved_config(), self.program)
            for line in self.state.history:
                self.folder.append(METRICS, line)
        from ipucnn.runs.provenance import changes, environment

        self.environment = environment()
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.processes = self.folder.add_environment(
            {"started": started, "first_weight_update": self.first_weight_update, **self.environment}
        )
        if start.checkpoint is None or len(self.processes) < 2:
            return []
        return [
            f"warning: {change}; the result may differ in bytes from an uninterrupted run"
            for change in changes(self.processes[-2], self.environment)
        ]

    def _handle(self, event: Any, session: Any, curves: Any, guard: InterruptGuard) -> Iterator[RunEvent]:
        if isinstance(event, Progress):
            yield event
        elif isinstance(event, ExecutionFinished):
            self.timer.add(event)
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
            session.state.events_done += 1
            points = {f"train/{k}": v for k, v in event.metrics.items()}
            points.update(
                {"train/learning_rate": event.learning_rate, "train/images_per_s": event.images_per_s}
            )
            curves.scalars(event.weight_updates, points)
            yield event
        elif isinstance(event, ValidationDue):
            yield from self._validation(event, session, curves, guard)
        elif isinstance(event, CheckpointDue):
            self._settle_statistics(session)
            session.state.events_done += 1
            numbered = self._save(session, f"checkpoint-{event.weight_updates:08d}.npz", LAST)
            self._saved_at = event.weight_updates
            yield CheckpointSaved(self.folder.link_checkpoint(numbered, LAST))

    def _record(self, computed: Dict[str, Any], measured: Dict[str, Any]) -> None:
        """One row of history: what was computed, and beside it how long that took."""
        line = json.dumps(computed) + "\n"
        self.state.history.append(line)
        self.folder.append(METRICS, line)
        which = {key: computed[key] for key in ("event", "weight_updates")}
        self.folder.append(TIMINGS, json.dumps({**which, **measured}) + "\n")

    def _validation(
        self, event: ValidationDue, session: Any, curves: Any, guard: InterruptGuard
    ) -> Iterator[RunEvent]:
        self._settle_statistics(session)
        started = time.perf_counter()
        batch = self.program.validation_micro_batch_size * self.program.validation_num_replicas
        try:
            metrics = session.evaluate(run_setup.evaluation_batches(self.setup, batch), lambda: guard.is_set)
        except Stopped:
            # Not counted as done: a continued run validates here.
            assert guard.exit_code is not None
            self._interrupted(session, guard.exit_code)
        wall_s = time.perf_counter() - started
        checkpointing.require_finite_loss(metrics, event.weight_updates)
        figure = "dice" if "dice" in metrics else "accuracy"
        is_best = self.state.best is None or metrics[figure] > self.state.best[figure]
        self._record(
            {"event": "validation", "weight_updates": event.weight_updates, **metrics}, {"wall_s": wall_s}
        )
        self.state.last_validation = metrics
        if is_best:
            self.state.best = metrics
        session.state.events_done += 1
        points = {f"validation/{k}": v for k, v in metrics.items() if k != "samples"}
        curves.scalars(event.weight_updates, points)
        yield Validated(event.weight_updates, metrics, is_best, wall_s)
        if is_best and self.setup.config.checkpoints and self.setup.config.training:
            yield CheckpointSaved(self._save(session, BEST))

    def _validate_each(self, session: Any, curves: Any, guard: InterruptGuard) -> Iterator[RunEvent]:
        """Validates every good checkpoint of ``checkpoint_input_dir``, in the order they were trained."""
        folder = Path(str(self.setup.config.checkpoint_input_dir)).expanduser()
        checkpoints, skipped = checkpointing.list_checkpoints(folder)
        yield Notes([f"warning: {note}; passed over" for note in skipped])
        for path in checkpoints:
            updates = checkpointing.load_for_validation(path, session.state)
            self._settled_at = updates
            yield Notes([f"checkpoint {path}"])
            yield from self._validation(ValidationDue(updates, 0), session, curves, guard)

    def _settle_statistics(self, session: Any) -> None:
        """Recomputes the moving statistics of a pipelined batch norm, once per position."""
        position = session.state.weight_updates
        if self.setup.config.training and position != self._settled_at:
            self.statistics_updates = session.recompute_statistics(self._dataset)
            self._settled_at = position

    def _save(self, session: Any, *names: str) -> Path:
        """Writes a checkpoint under the first name; ``names`` are what it will be found under."""
        import numpy as np

        state, config = session.state, self.setup.config
        self.state.written = tuple(sorted({*self.state.written, *names}))
        meta = {
            "model": config.model_name,
            # Without its place, so that the same run anywhere gives the same file.
            "config": replace(self._saved_config(), run_dir=None, checkpoint_dir=None).to_yaml(),
            "num_classes": self.info.num_classes,
            "input_shape": list(self.setup.input_shape),
            "dataset": self.info.name,
            "image_shape": list(self.info.image_shape),
            "class_names": list(self.info.class_names),
            "mean": list(self.info.mean),
            "std": list(self.info.std),
            "seed": self.seed,
            "program": self.program.to_dict(),
            **checkpointing.position(state, self.state),
        }
        rate = float(self.schedule(np.asarray([state.weight_updates]))[0])
        return self.folder.write_checkpoint(
            names[0], checkpointing.arrays(state.weights, rate), checkpointing.arrays(state.slots, rate), meta
        )

    def _interrupted(self, session: Any, exit_code: int) -> None:
        done = f"interrupted after {session.state.weight_updates} of {self.program.num_weight_updates} weight updates"
        config = self.setup.config
        if not (config.training and config.checkpoints):
            raise Interrupted(exit_code, f"{done}; nothing saved", None)
        self._settle_statistics(session)
        path = self._save(session, LAST)
        raise Interrupted(
            exit_code,
            f"{done}; checkpoint {path}",
            f"continue it with: ipucnn train --resume --run-dir {self.folder.path}",
        )

    def _finish(self, session: Any) -> Iterator[RunEvent]:
        config = self.setup.config
        if config.training and config.checkpoints and self._saved_at != session.state.weight_updates:
            self._settle_statistics(session)
            yield CheckpointSaved(self._save(session, LAST))
        self.final_report = training_report(self, session)
        self.folder.write_report(self.final_report)
        if config.clean_dir:
            self.folder.clean(self.state.written)

    def _saved_config(self) -> Any:
        config = self.setup.config
        checkpoints = str(self.folder.checkpoints) if config.checkpoint_dir else None
        return replace(
            config,
            seed=self.seed,
            run_dir=str(self.folder.path),
            checkpoint_dir=checkpoints,
            overwrite=False,
            resume=False,
        )

    def _load_weights(self, model: Any) -> None:
        weights = self.setup.config.weights
        if weights is None or self.start.checkpoint is not None:
            return
        if weights == "imagenet":
            from ipucnn.models.build import load_imagenet_weights

            self.fresh_weights = load_imagenet_weights(model, self.setup.record)
            return
        from ipucnn.runs.load import load_starting_weights

        self.fresh_weights = len(load_starting_weights(model, Path(weights).expanduser()))
