"""One training run: from a resolved configuration to events, files in the run folder, and a report."""

import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Union

from ipucnn.config.resolve import Resolved
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.runs import setup as run_setup
from ipucnn.runs.folder import BEST, LAST, RunFolder, check_new, check_new_checkpoints, default_run_dir
from ipucnn.runs.interrupts import Interrupted, InterruptGuard
from ipucnn.sessions.session import (
    CheckpointDue,
    CompilationReport,
    ExecutionFinished,
    Progress,
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


RunEvent = Union[Started, Progress, ExecutionFinished, Validated, CheckpointSaved]


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

        config = resolved.config
        self.verbose = verbose
        self.resolved = resolved
        check_device(config.device)
        run_setup.check_supported(config)
        run_setup.loss_name(config, resolved.record.task)
        self.seed = config.seed if config.seed is not None else random.SystemRandom().randrange(2**31)
        default = default_run_dir(config.model_name, resolved.choice.name)
        path = Path(config.run_dir).expanduser() if config.run_dir else default
        check_new(path, config.overwrite)
        checkpoint_dir = (
            str(Path(config.checkpoint_dir).expanduser().absolute()) if config.checkpoint_dir else None
        )
        if checkpoint_dir is not None:
            check_new_checkpoints(Path(checkpoint_dir), config.overwrite)
        self.folder = RunFolder(path, checkpoint_dir)
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
        self.best: Optional[Dict[str, float]] = None
        self.last_validation: Optional[Dict[str, float]] = None
        self.compilation: Optional[CompilationReport] = None
        self._busy_s = 0.0
        self._timed_samples = 0.0
        self._started = 0.0
        self.final_report: Dict[str, Any] = {}
        self.fresh_weights = 0
        self._settled_at = -1
        self._last_at = -1
        self._written: Set[str] = set()
        self.statistics_updates = 0

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

    def _validate(self, session: Any) -> Dict[str, float]:
        dataset = run_setup.evaluation_batches(
            self.setup, self.program.validation_micro_batch_size * self.program.validation_num_replicas
        )
        result: Dict[str, float] = session.evaluate(dataset)
        return result

    def events(self) -> Iterator[RunEvent]:
        """Builds, compiles, trains and writes the run folder.

        Raises:
            Interrupted: by SIGINT or SIGTERM, after a checkpoint.
            NotFiniteError: the loss became NaN or infinite.
        """
        from ipucnn.sessions.factory import create_session

        config = self.setup.config
        session = create_session(config.device, verbose=self.verbose)
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.training.losses import make_loss

        self._started = time.perf_counter()
        model = run_setup.build(self.setup)
        self._load_weights(model)
        self.program = self._with_splits(model)
        loss = make_loss(run_setup.loss_name(config, self.setup.record.task), config.label_smoothing)
        with data_errors():
            self.compilation = session.compile(
                model, self.program, self.optimizer, loss, self.schedule, self._dataset
            )
        assert session.program is not None
        self.program = session.program
        self.folder.create(self._saved_config(), self.program)
        yield Started(self.program, self.compilation, self.folder.path, self.info)
        from ipucnn.runs.tensorboard import EventWriter

        events = EventWriter(self.folder.path / "tensorboard")
        try:
            with InterruptGuard() as guard, data_errors():
                if config.training:
                    for event in session.train(self._dataset):
                        yield from self._handle(event, session, events)
                        if guard.exit_code is not None:
                            self._interrupted(session, guard.exit_code)
                if config.validation and self.last_validation is None:
                    yield from self._handle(ValidationDue(0, 0), session, events)
                yield from self._finish(session)
        finally:
            events.close()

    def _handle(self, event: Any, session: Any, events: Any) -> Iterator[RunEvent]:
        if isinstance(event, Progress):
            yield event
        elif isinstance(event, ExecutionFinished):
            self._busy_s += event.wall_s
            self._timed_samples += event.images_per_s * event.wall_s
            row = {
                "event": "execution",
                "execution": event.execution,
                "weight_updates": event.weight_updates,
                "epoch": event.epoch,
                "samples": event.samples,
                **event.metrics,
                "learning_rate": event.learning_rate,
                "wall_s": event.wall_s,
                "images_per_s": event.images_per_s,
            }
            self.folder.append_metrics(row)
            curves = {f"train/{k}": v for k, v in event.metrics.items()}
            curves.update(
                {"train/learning_rate": event.learning_rate, "train/images_per_s": event.images_per_s}
            )
            events.scalars(event.weight_updates, curves)
            yield event
        elif isinstance(event, ValidationDue):
            self._settle_statistics(session)
            started = time.perf_counter()
            metrics = self._validate(session)
            wall_s = time.perf_counter() - started
            self.last_validation = metrics
            figure = "dice" if "dice" in metrics else "accuracy"
            is_best = self.best is None or metrics[figure] > self.best[figure]
            self.folder.append_metrics(
                {"event": "validation", "weight_updates": event.weight_updates, **metrics, "wall_s": wall_s}
            )
            curves = {f"validation/{k}": v for k, v in metrics.items() if k != "samples"}
            events.scalars(event.weight_updates, curves)
            yield Validated(event.weight_updates, metrics, is_best, wall_s)
            if is_best:
                self.best = metrics
                if self.setup.config.checkpoints:
                    yield CheckpointSaved(self._save(session, BEST))
        elif isinstance(event, CheckpointDue):
            self._settle_statistics(session)
            numbered = self._save(session, f"checkpoint-{event.weight_updates:08d}.npz")
            self._last_at = event.weight_updates
            yield CheckpointSaved(self.folder.link_checkpoint(numbered, LAST))

    def _settle_statistics(self, session: Any) -> None:
        """Recomputes the moving statistics of a pipelined batch norm, once per position."""
        position = session.state.weight_updates
        if self.setup.config.training and position != self._settled_at:
            self.statistics_updates = session.recompute_statistics(self._dataset)
            self._settled_at = position

    def _save(self, session: Any, name: str) -> Path:
        state = session.state
        config = self.setup.config
        meta = {
            "model": config.model_name,
            "config": self._saved_config().to_yaml(),
            "num_classes": self.info.num_classes,
            "input_shape": list(self.setup.input_shape),
            "dataset": self.info.name,
            "image_shape": list(self.info.image_shape),
            "class_names": list(self.info.class_names),
            "mean": list(self.info.mean),
            "std": list(self.info.std),
            "weight_updates": state.weight_updates,
            "seed": self.seed,
            "program": self.program.to_dict(),
        }
        self._written.update((name, LAST) if name.startswith("checkpoint-") else (name,))
        return self.folder.write_checkpoint(
            name,
            {k: v.numpy() for k, v in state.weights.items()},
            {k: v.numpy() for k, v in state.slots.items()},
            meta,
        )

    def _interrupted(self, session: Any, exit_code: int) -> None:
        self._settle_statistics(session)
        path = self._save(session, LAST)
        done = f"{session.state.weight_updates} of {self.program.num_weight_updates} weight updates"
        raise Interrupted(
            exit_code,
            f"interrupted after {done}; checkpoint {path}",
            f"evaluate it with: ipucnn evaluate {self.folder.path}",
        )

    def _finish(self, session: Any) -> Iterator[RunEvent]:
        config = self.setup.config
        if config.training and config.checkpoints and self._last_at != session.state.weight_updates:
            self._settle_statistics(session)
            yield CheckpointSaved(self._save(session, LAST))
        self.final_report = self.report(session)
        self.folder.write_report(self.final_report)
        if config.clean_dir:
            for name in self._written:
                (self.folder.checkpoints / name).unlink()

    def report(self, session: Any) -> Dict[str, Any]:
        """What ``report.json`` holds: measured figures of this machine, and what they are of."""
        import numpy as np
        import tensorflow as tf
        from tensorflow import keras

        from ipucnn import __version__

        assert self.compilation is not None
        images_per_s = self._timed_samples / self._busy_s if self._busy_s else 0.0
        forward_flops = 2 * self.compilation.macs_per_sample
        return {
            "model": self.setup.config.model_name,
            "dataset": {
                "name": self.info.name,
                "location": self.info.location,
                "train": self.info.num_train,
                "evaluation": self.info.num_eval,
            },
            "program": self.program.to_dict(),
            "compilation": {
                **self.compilation.to_dict(),
                "first_update_s": session.first_update_s,
                "compile_s": self.compilation.trace_s + session.first_update_s,
            },
            "measured": {
                "images_per_s": images_per_s,
                # A training step is counted as three forward passes: forward, and the two backward products.
                "flop_per_s": images_per_s * forward_flops * 3,
                "train_s": self._busy_s,
                "wall_s": time.perf_counter() - self._started,
            },
            "moving_statistics": (
                f"recomputed over {self.statistics_updates} weight updates' batches"
                if self.statistics_updates
                else "running"
            ),
            "checkpoints": sorted(self._written) if not self.setup.config.clean_dir else [],
            "trained_samples": session.state.weight_updates * self.program.global_batch_size,
            "validation": self.last_validation,
            "best_validation": self.best,
            "environment": {
                "ipucnn": __version__,
                "python": ".".join(map(str, sys.version_info[:3])),
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
                "numpy": np.__version__,
                "command": " ".join(sys.argv),
                "threads": os.cpu_count(),
            },
        }

    def _saved_config(self) -> Any:
        from dataclasses import replace

        config = self.setup.config
        checkpoints = str(self.folder.checkpoints) if config.checkpoint_dir else None
        return replace(config, seed=self.seed, run_dir=str(self.folder.path), checkpoint_dir=checkpoints)

    def _load_weights(self, model: Any) -> None:
        weights = self.setup.config.weights
        if weights is None:
            return
        if weights == "imagenet":
            from ipucnn.models.build import load_imagenet_weights

            self.fresh_weights = load_imagenet_weights(model, self.setup.record)
            return
        from ipucnn.runs.load import load_starting_weights

        self.fresh_weights = len(load_starting_weights(model, Path(weights).expanduser()))

    def _with_splits(self, model: Any) -> Program:
        program = self.program
        if program.num_stages == 1:
            return program
        from ipucnn.models.names import canonical_names

        names = canonical_names(model)
        splits = program.pipeline_splits or tuple(run_setup.choose_splits(model, program.num_stages))
        run_setup.check_splits(splits, names)
        return program.with_splits(splits)
