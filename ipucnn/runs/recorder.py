"""Handles the events of a training session: history, validation, checkpoints, curves, report.

The recorder begins when the network is compiled and the run folder is open for this process.  The order of its steps
ensures that a run can continue from every checkpoint.
"""

import json
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from ipucnn.aliases import KerasModel, PlainDict, TfDataset
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.spec import Effect
from ipucnn.config.values import norm_of
from ipucnn.datasets.base import DatasetInfo, DataSource
from ipucnn.errors import EXIT_SIGTERM
from ipucnn.events import Event, Note
from ipucnn.interrupts import Interrupted, InterruptGuard
from ipucnn.machine import operation_threads, peak_memory_bytes
from ipucnn.runs import checkpoints
from ipucnn.runs import setup as run_setup
from ipucnn.runs.context import RunContext
from ipucnn.runs.early_end import early_end, figure_of
from ipucnn.runs.folder import BEST, LAST, METRICS, TENSORBOARD, TIMINGS
from ipucnn.runs.mlperf import MlperfLog
from ipucnn.runs.provenance import changes, environment
from ipucnn.runs.records import Compilation, Measured, Report, ReportedDataset, Target
from ipucnn.runs.resume import RunState, position, resume_command
from ipucnn.runs.setup import Setup
from ipucnn.runs.trackers import Curves, Tracker, WeightsAndBiases
from ipucnn.runs.validated import load_validated
from ipucnn.sessions.evaluated import (
    AS_TRAINED,
    evaluated_weights,
    replaced,
    slots_to_save,
    statistics_policy,
)
from ipucnn.sessions.session import (
    CheckpointDue,
    CompilationReport,
    ExecutionFinished,
    MakeDataset,
    NotFiniteError,
    Session,
    Stopped,
    Trainer,
    UpdatesDone,
    ValidationDue,
    is_checkpoint_due,
)
from ipucnn.text import counted
from ipucnn.training.program import BuiltProgram

if TYPE_CHECKING:
    from ipucnn.runs.images.segmentation import SegmentedImage

# Share of the time of weight updates that collectives of workers may take without a warning.
LARGEST_SHARE = 0.25
# A validation loss above this multiple of the loss of equal probabilities for all classes gets a warning.
EXPLODED = 10


@dataclass(frozen=True)
class Started(Event):
    """The model is built and traced; training begins."""

    program: BuiltProgram
    compilation: CompilationReport
    folder: Path
    dataset: DatasetInfo


@dataclass(frozen=True)
class Validated(Event):
    """Metrics over the whole evaluation set after ``weight_updates``."""

    weight_updates: int
    metrics: Dict[str, float]
    wall_s: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was written."""

    path: Path


@dataclass(frozen=True)
class Predicted(Event):
    """Predictions of a segmentation network for some images; drawn before the run counts as finished."""

    images: "List[SegmentedImage]"


class Timer:
    """Adds up the time and the samples of executions.

    Attributes:
        started: ``time.perf_counter()`` at the beginning of the work.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._logged_s = self._logged_samples = 0.0
        # The last execution, if it was not logged: its figures cover all executions since the last logged one.
        self._open: Optional[ExecutionFinished] = None

    def add(self, execution: ExecutionFinished) -> None:
        """Counts an execution."""
        self._open = execution
        if execution.is_logged:
            self._logged_s, self._logged_samples = self.busy_s, self._samples
            self._open = None

    @property
    def busy_s(self) -> float:
        """Seconds spent in weight updates, without compiling."""
        return self._logged_s + (self._open.wall_s if self._open is not None else 0.0)

    @property
    def _samples(self) -> float:
        timed = self._open
        return self._logged_samples + (timed.images_per_s * timed.wall_s if timed is not None else 0.0)

    @property
    def images_per_s(self) -> float:
        """Steady throughput in images per second; 0 if nothing was timed."""
        return self._samples / self.busy_s if self.busy_s else 0.0


class Recorder:
    """Handles events in an order in which a run can continue from every checkpoint.

    An event changes history and state first, and is then counted in ``state.events_done``; a checkpoint is written
    only after that.  The recorder is a context manager: inside it the trackers (``trackers.py``), such as
    TensorBoard's curves, are open.

    Args:
        context: the run, whose folder only this process writes.
        session: the session.
        trainer: its trainer of the run.
        batches: a function that returns training batches from a weight update on.
        state: history and validations so far; changed in place.
        guard: the guard that knows whether a signal asked the run to end.
        timer: the timer of this process's part of the run.
        remarks: notes on the network and the weights that it begins with, for the report.

    Attributes:
        report: the end report, which :meth:`save_last` makes.
    """

    def __init__(
        self,
        context: RunContext,
        session: Session,
        trainer: Trainer,
        batches: MakeDataset,
        state: RunState,
        guard: InterruptGuard,
        timer: Timer,
        remarks: Sequence[str],
    ) -> None:
        self._context, self._session, self._trainer, self._batches = context, session, trainer, batches
        self._remarks = remarks
        self._state, self._guard, self._timer = state, guard, timer
        self._config, self._folder, self._program = context.config, context.folder, trainer.program
        self._num_devices = len(trainer.division.devices)
        self._saved = context.saved_config(self._num_devices)
        self._first_weight_update = trainer.state.weight_updates
        self._has_warned = False
        self._saved_at = -1
        self._policy = statistics_policy(context.config, trainer.program)
        self._evaluated_at, self._evaluated = -1, AS_TRAINED
        self._end = early_end(state.history, self._config)
        self._is_ended_by_others = False
        self._trackers: List[Tracker] = []
        # The end of the first slice of weight updates, after which nothing of training is left to compile.
        self._compiled_at: Optional[float] = None
        self._time_to_train_s: Optional[float] = None
        self._environment: PlainDict = {}
        self._processes: List[PlainDict] = []
        self.report: Optional[Report] = None

    def __enter__(self) -> "Recorder":
        folder, config = self._folder.path, self._config
        if not self._folder.writes:
            return self
        self._trackers.append(Curves(folder / TENSORBOARD, self._first_weight_update))
        if config.wandb:
            self._trackers.append(WeightsAndBiases(self._saved, folder, self._processes[0]["started"]))
        if config.mlperf_logging:
            started = time.time() - (time.perf_counter() - self._timer.started)
            self._trackers.append(MlperfLog(self._context, started))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for tracker in self._trackers:
            tracker.close(failed=kind is not None)

    @property
    def _has_target(self) -> bool:
        """Whether a validation reached ``--target-accuracy``."""
        return self._end is not None and self._end.option == "target_accuracy"

    @property
    def _reason(self) -> Optional[str]:
        """The reason to end early; None if the run goes on."""
        if self._end is not None:
            return self._end.reason
        return "another process of the run ended it" if self._is_ended_by_others else None

    @property
    def is_over(self) -> bool:
        """Whether the run ends early at this weight update, and every event due at it is handled."""
        state = self._trainer.state
        if self._reason is None:
            return False
        done = state.weight_updates // self._program.weight_updates_per_execution
        # The execution's event, its validation, and its checkpoint if one is due.
        due = 2 + is_checkpoint_due(self._program, done)
        return not 0 < state.events_done < due

    def _plot(self, weight_updates: int, points: Dict[str, float]) -> None:
        """Adds one point to each named curve."""
        self._folder.check_writer()
        for tracker in self._trackers:
            tracker.scalars(weight_updates, points)

    def note_process(self, is_continued: bool) -> List[str]:
        """Adds this process to ``environment.json``; returns warnings if a run is continued in another environment."""
        self._environment = environment()
        self._environment["device"] = self._session.device.kind
        if self._session.device.kind != "ipu":
            self._environment["devices"] = self._num_devices
            self._environment["deterministic_operations"] = self._config.deterministic_operations
        if self._trainer.sharing is not None:
            self._environment["workers"] = self._trainer.sharing.workers
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._processes = self._folder.add_environment(
            {"started": started, "first_weight_update": self._first_weight_update, **self._environment}
        )
        if not is_continued or len(self._processes) < 2:
            return []
        return [
            f"warning: {change}; the result may differ in bytes from an uninterrupted run"
            for change in changes(self._processes[-2], self._environment)
        ]

    def handle(self, event: Event) -> Iterator[Event]:
        """Records, validates or saves, as an event of the session requires.

        Raises:
            Interrupted: a signal asked the run to end; the run is saved.
            UserError: the loss or the weights are no longer finite, or a file cannot be written.
        """
        if self._compiled_at is None and isinstance(event, (UpdatesDone, ExecutionFinished)):
            self._compiled_at = time.perf_counter()
            for tracker in self._trackers:
                tracker.training_begins(self._first_weight_update)
        if isinstance(event, UpdatesDone):
            yield event
        elif isinstance(event, ExecutionFinished):
            yield from self._execution(event)
        elif isinstance(event, ValidationDue):
            yield from self._validation(event)
        elif isinstance(event, CheckpointDue):
            self._prepare_evaluated_weights()
            self._trainer.state.events_done += 1
            numbered = self._save(checkpoints.checkpoint_name(event.weight_updates))
            self._saved_at = event.weight_updates
            yield CheckpointSaved(self._folder.link_checkpoint(numbered.name, LAST))
            self._delete_older()
        if self._session.any_instance(self._guard.is_set):
            self._interrupt()

    def _execution(self, event: ExecutionFinished) -> Iterator[Event]:
        self._timer.add(event)
        if not event.is_logged:
            self._trainer.state.events_done += 1
            return
        scale = {} if event.loss_scaling is None else {"loss_scaling": event.loss_scaling}
        self._record(
            {
                "event": "execution",
                "execution": event.execution,
                "weight_updates": event.weight_updates,
                "epoch": event.epoch,
                "samples": event.samples,
                **event.metrics,
                "learning_rate": event.learning_rate,
                **scale,
            },
            {"wall_s": event.wall_s, "images_per_s": event.images_per_s},
        )
        self._trainer.state.events_done += 1
        points = {f"train/{k}": v for k, v in event.metrics.items()}
        points.update({f"train/{name}": value for name, value in scale.items()})
        points.update({"train/learning_rate": event.learning_rate, "train/images_per_s": event.images_per_s})
        self._plot(event.weight_updates, points)
        yield event

    def _record(self, computed: PlainDict, measured: PlainDict) -> None:
        """Appends a row to the history and a row to the timings.

        Args:
            computed: the row of ``metrics.jsonl``, the same in every run with the same seed.
            measured: the times, which differ from run to run; they go to ``timings.jsonl``.
        """
        line = json.dumps(computed) + "\n"
        self._state.history.append(line)
        self._folder.append(METRICS, line)
        row_key = {key: computed[key] for key in ("event", "weight_updates")}
        self._folder.append(TIMINGS, json.dumps({**row_key, **measured}) + "\n")

    def _validation(self, event: ValidationDue) -> Iterator[Event]:
        state, program = self._state, self._program
        self._prepare_evaluated_weights()
        for tracker in self._trackers:
            tracker.validation_begins(event.weight_updates)
        started = time.perf_counter()
        try:
            with self.as_evaluated():
                metrics = self._trainer.predictor.evaluate(
                    self._validation_batches, self._trainer.loss, lambda: self._guard.is_set
                )
        except Stopped:
            # Not counted in events_done, so that a continued run repeats this validation.
            self._interrupt()
        wall_s = time.perf_counter() - started
        if not np.isfinite(metrics.get("loss", 0.0)):
            raise NotFiniteError(
                f"the validation loss is {metrics['loss']} after weight update {event.weight_updates:,}",
                "lower the learning rate",
            )
        metrics = {**metrics, "samples": _num_images(metrics["samples"], self._context.source)}
        figure = metrics[figure_of(metrics)]
        is_best = state.best is None or figure > state.best[figure_of(metrics)]
        self._record(
            {"event": "validation", "weight_updates": event.weight_updates, **metrics}, {"wall_s": wall_s}
        )
        state.last_validation = metrics
        if is_best:
            state.best = metrics
        self._trainer.state.events_done += 1
        self._end = early_end(state.history, self._config)
        self._is_ended_by_others = self._session.any_instance(self._end is not None)
        if self._has_target and self._compiled_at is not None:
            self._time_to_train_s = time.perf_counter() - self._compiled_at
        is_last = self._reason is not None or event.weight_updates == program.num_weight_updates
        for tracker in self._trackers:
            tracker.validated(event.weight_updates, figure, is_last)
        points = {f"validation/{k}": v for k, v in metrics.items() if k != "samples"}
        self._plot(event.weight_updates, points)
        yield Validated(event.weight_updates, metrics, wall_s)
        yield from self._warn_of_loss(metrics["loss"])
        if is_best and self._config.checkpoints and self._config.training:
            yield CheckpointSaved(self._save(BEST, is_whole=False))

    @cached_property
    def _validation_batches(self) -> TfDataset:
        """The batches of each validation.  Each reads them anew; making the data set takes longer than many of them."""
        batch = self._program.validation_micro_batch_size * self._program.validation_num_replicas
        return run_setup.evaluation_batches(self._context, batch, self._trainer.predictor)

    def _warn_of_loss(self, loss: float) -> Iterator[Note]:
        """Warns, once in a run, that a validation loss is far above the loss of equal probabilities."""
        chance_loss = float(np.log(max(self._context.info.num_classes, 2)))
        if self._has_warned or loss <= EXPLODED * chance_loss:
            return
        self._has_warned = True
        causes = "training may have diverged (lower the learning rate)"
        if norm_of(self._config.norm_layer) == "batch":
            causes += ", or batch norm's moving statistics lag behind (lower --bn-momentum, train for longer)"
        yield Note(
            f"warning: validation loss {loss:,.6g}, where equal probabilities have {chance_loss:.2f}: {causes}"
        )

    def validate_each(self, paths: Sequence[Path], model: KerasModel) -> Iterator[Event]:
        """Validates checkpoints, in the order given."""
        for path in paths:
            updates = load_validated(self._context, path, self._trainer.state, model)
            yield Note(f"checkpoint {path}")
            yield from self.handle(ValidationDue(updates))

    def _prepare_evaluated_weights(self) -> None:
        """Prepares the weights to evaluate and save, once per weight update."""
        position = self._trainer.state.weight_updates
        if self._config.training and position != self._evaluated_at:
            images = partial(run_setup.statistics_batches, self._context)
            self._evaluated = evaluated_weights(self._trainer, self._policy, self._batches, images)
            self._evaluated_at = position

    def as_evaluated(self) -> ContextManager[None]:
        """Gives the network the weights of the latest validation or checkpoint inside the block."""
        return replaced(self._trainer.state.weights, self._evaluated.values)

    def _delete_older(self) -> None:
        """Deletes the numbered checkpoints of this run that are older than those that ``--keep-checkpoints`` keeps.

        If a process was killed before it deleted them, the process that continues the run does.
        """
        keep = self._config.keep_checkpoints
        if keep is not None:
            names = self._checkpoint_names(self._trainer.state.weight_updates)
            self._folder.clean([name for name in names if name not in (BEST, LAST)][:-keep])

    def _save(self, name: str, is_whole: bool = True) -> Path:
        """Writes a checkpoint; without ``is_whole`` it has only weights, and a run cannot continue from it."""
        context, state, info = self._context, self._trainer.state, self._context.info
        meta = {
            "model": self._config.model_name,
            "config": _portable(self._saved).to_yaml(),
            "num_classes": info.num_classes,
            "input_shape": list(context.input_shape),
            "dataset": info.name,
            "image_shape": list(info.image_shape),
            "class_names": list(info.class_names),
            "num_eval": info.num_eval,
            **checkpoints.form_of_masks(info),
            "mean": list(info.mean),
            "std": list(info.std),
            "data_sha256": context.data_sha256,
            "seed": context.seed,
            "program": self._program.to_dict(),
            **(position(state, self._state) if is_whole else {"weight_updates": state.weight_updates}),
        }
        if context.record.own is not None:
            meta["network"] = context.record.own.to_data()
        if self._session.device.kind != "ipu":
            meta["threads"] = operation_threads()
        rate = float(context.schedule(np.asarray([state.weight_updates]))[0])
        with self.as_evaluated():
            weights = checkpoints.arrays(state.weights, rate)
        if not is_whole:
            return self._folder.write_checkpoint(name, weights, {}, meta)
        slots = checkpoints.arrays(slots_to_save(state, self._evaluated), rate)
        return self._folder.write_checkpoint(name, weights, slots, meta)

    def _interrupt(self) -> None:
        """Saves the run and raises Interrupted; all instances do so if one of them received a signal."""
        exit_code = self._guard.exit_code or EXIT_SIGTERM
        total = self._program.num_weight_updates
        updates = f"{self._trainer.state.weight_updates:,} of {counted(total, 'weight update')}"
        if not (self._config.training and self._config.checkpoints):
            raise Interrupted(exit_code, f"interrupted after {updates}; nothing saved", None)
        # All processes measure statistics and read weights together, also those that write nothing.
        self._prepare_evaluated_weights()
        path = self._save(LAST)
        raise Interrupted(
            exit_code,
            f"interrupted after {updates}; checkpoint {path}",
            f"continue it with: {resume_command(self._folder.path, self._context.own_files)}",
        )

    def save_last(self) -> Iterator[Event]:
        """Writes the last checkpoint, and makes the report that :meth:`finish` writes."""
        config = self._config
        if config.training and config.checkpoints and self._saved_at != self._trainer.state.weight_updates:
            updates = self._trainer.state.weight_updates
            numbered = checkpoints.checkpoint_name(updates)
            is_missing = numbered not in self._checkpoint_names(updates)
            # Processes that save measure together, so all of them do if one does: each has listed a folder of its own.
            if updates == self._first_weight_update and not self._session.any_instance(is_missing):
                # A process that was killed before it wrote the report left this checkpoint, which stays as it is.
                last = self._folder.link_checkpoint(numbered, LAST)
            else:
                self._prepare_evaluated_weights()
                last = self._save(LAST)
            yield CheckpointSaved(last)
        if config.training and config.checkpoints:
            self._delete_older()
        self.report = self._make_report()

    def finish(self) -> Iterator[Event]:
        """Writes the report last, because a run with a report counts as finished."""
        config = self._config
        yield from self._warn_of_collectives()
        assert self.report is not None
        self._folder.write_report(self.report)
        if config.clean_dir:
            self._folder.clean(self.report.checkpoints)
        if self._session.any_instance(self._guard.is_set):
            # The signal came too late to interrupt this run, but the next fold must not begin.
            raise Interrupted(
                self._guard.exit_code or EXIT_SIGTERM,
                f"interrupted when everything was done and saved in {self._folder.path}",
                None,
            )

    def _warn_of_collectives(self) -> Iterator[Note]:
        """Warns if adding up gradients over workers took more than LARGEST_SHARE of the time."""
        sharing, train_s = self._trainer.sharing, self._timer.busy_s
        if sharing is None or sharing.collective_s <= LARGEST_SHARE * train_s:
            return
        advice = "a larger --gradient-accumulation-count or --fused-micro-batches"
        if sharing.reduction == "ordered":
            advice += ", or --reduction allreduce, which gives other last digits"
        yield Note(
            f"warning: {sharing.collective_s / train_s:.0%} of the time went into gathering gradients of "
            f"{sharing.workers} processes, or waiting for them; less does with {advice}"
        )

    def _make_report(self) -> Report:
        """Returns the content of ``report.json``: results, data set, Program and environment.

        Throughput and times are those of this process: in a continued run, those of its last part.
        """
        context, trainer, timer, info = self._context, self._trainer, self._timer, self._context.info
        program, compilation, first = self._program, trainer.compilation, self._first_weight_update
        images_per_s = timer.images_per_s or None
        trained = program.samples_before(trainer.state.weight_updates)
        return Report(
            model=self._config.model_name,
            dataset=ReportedDataset(
                name=info.name,
                location=info.location,
                choice=info.choice,
                train=info.num_train,
                evaluation=info.num_eval,
                class_names=list(info.class_names),
                left_out=list(info.left_out),
                unused=list(info.unused),
                validated_pixels=_validated_pixels(context),
                warnings=[*info.warnings, *info.training_warnings],
            ),
            notes=list(self._remarks),
            program=program.to_dict(),
            compilation=Compilation.of(compilation),
            measured=Measured(
                images_per_s=images_per_s,
                # A weight update counts as three forward passes: forward, and both products of the backward pass.
                flop_per_s=images_per_s and images_per_s * 2 * compilation.macs_per_sample * 3,
                train_s=timer.busy_s,
                wall_s=time.perf_counter() - timer.started,
                peak_memory_bytes=peak_memory_bytes(),
                sharing=trainer.sharing,
                first_weight_update=first,
                samples=trained - program.samples_before(first),
            ),
            ended_early=self._reason if self._is_early else None,
            target=self._target(),
            averaged_weights=bool(self._config.ema_decay and self._config.training),
            moving_statistics=self._evaluated.statistics,
            checkpoints=self._checkpoint_names(trainer.state.weight_updates),
            checkpoints_deleted=self._config.clean_dir,
            trained_samples=trained,
            validation=self._state.last_validation,
            best_validation=self._state.best,
            processes=[
                {key: process.get(key) for key in ("started", "first_weight_update", "command")}
                for process in self._processes
            ],
            environment=self._environment,
        )

    @property
    def _is_early(self) -> bool:
        """Whether weight updates are left."""
        return self._trainer.state.weight_updates < self._program.num_weight_updates

    def _target(self) -> Optional[Target]:
        """Returns whether ``--target-accuracy`` was reached, and the time that took; None without the option.

        Time to train begins when compiling ends, after the first weight update (on IPUs: execution) of the process.  It
        ends with the validation that reaches the target, and includes everything between.  It is not known for a
        continued run.
        """
        target = self._config.target_accuracy
        if target is None:
            return None
        whole = self._first_weight_update == 0
        return Target(
            accuracy=target,
            reached=self._has_target,
            weight_updates=self._end.weight_updates if self._end is not None and self._has_target else None,
            time_to_train_s=self._time_to_train_s if whole else None,
        )

    def _checkpoint_names(self, weight_updates: int) -> List[str]:
        """Returns the names of this run's checkpoints that exist after ``weight_updates``."""
        first = 0 if self._context.start.target.is_own else self._first_weight_update
        names = checkpoints.written_names(self._program, first, weight_updates)
        return sorted({path.name for path in self._folder.checkpoint_files()}.intersection(names))


def _portable(config: RunConfig) -> RunConfig:
    """Removes the options that do not change the result, so that the same run gives the same file on any machine.

    Two others stay: the data set's path, so that a checkpoint without its run folder can be evaluated where it was
    trained, and the number of epochs, on which schedules depend.
    """
    keep = ("dataset_path", "num_epochs")
    others = (spec for spec in SPECS if spec.effect is not Effect.RESULT and spec.name not in keep)
    return replace(config, **{spec.name: spec.default for spec in others})


def _num_images(weight: float, source: DataSource) -> int:
    """Returns the number of images in a validation.

    Args:
        weight: the sum of the validation's weights: pixels that count if images are split into patches
            (``info.patchwise``), else samples.
        source: the data set.
    """
    if not source.info.patchwise:
        return int(weight)
    counted = np.count_nonzero(source.eval.labels >= 0)
    if weight != counted:
        raise RuntimeError(f"the validation covers {weight:,g} pixels, and {counted:,} count in the data set")
    return len(source.eval)


def _validated_pixels(setup: Setup) -> Optional[Dict[str, Tuple[int, int]]]:
    """Returns the predicted region ``inner`` of the input ``of`` (height, width).

    It is smaller than the input if an unpadded network sees each image once, and predicts its centre.  The result is
    None if all pixels are validated, or if the network does not predict pixels.
    """
    if setup.output_shape is None or setup.source.info.patchwise:
        return None
    inner, whole = ((int(shape[0]), int(shape[1])) for shape in (setup.output_shape, setup.input_shape))
    return None if inner == whole else {"inner": inner, "of": whole}
