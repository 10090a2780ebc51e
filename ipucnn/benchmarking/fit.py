"""Mode fit: trains for whole epochs, by the session or by plain Keras, for the time of a step and the accuracy."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, List, Optional, Tuple

from ipucnn.aliases import KerasModel, PlainDict, TfDataset
from ipucnn.benchmarking.contenders import keras_model
from ipucnn.benchmarking.measure import Report
from ipucnn.benchmarking.settings import KERAS, data_kind
from ipucnn.benchmarking.statistics import throughput
from ipucnn.config.resolve import Resolved
from ipucnn.datasets.base import DataSource
from ipucnn.errors import ConfigurationError, UserError
from ipucnn.machine import fix_threads, peak_memory_bytes, reset_peak_memory
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.host.workers import threads_of_training
from ipucnn.training.optimizers import settings_of_run
from ipucnn.training.program import Program, make_layout, make_program

if TYPE_CHECKING:
    from ipucnn.sessions.session import Session
    from ipucnn.training.losses import LossFunction

Trained = Tuple[List[float], PlainDict, str]
"""(seconds of each epoch, what compiling found, what trained in words)."""


class Fit:
    """Validates everything that can be without TensorFlow on construction; :meth:`run` does the work.

    The first epoch compiles, so its time does not count.

    Args:
        resolved: the configuration, with a seed.
        engine: session or keras.
        verbose: let TensorFlow speak.
        system: IPU machine to predict for, None for the smallest that suits.
        source: an opened data set to take in place of the chosen one.

    Raises:
        UserError: whatever is wrong with the configuration or the data.
    """

    def __init__(
        self,
        resolved: Resolved,
        engine: str,
        verbose: bool = False,
        system: Optional[str] = None,
        source: Optional[DataSource] = None,
    ) -> None:
        from ipucnn.sessions.factory import check_device

        config = replace(resolved.config, validation=False, checkpoints=False)
        self.resolved, self.engine, self.verbose = replace(resolved, config=config), engine, verbose
        check_device(config.device)
        self.system = system
        self.loss_name = run_setup.loss_name(config, resolved.record.task)
        run_setup.check_padding(config, self.loss_name)
        if config.num_epochs < 2:
            raise ConfigurationError(
                f"mode fit with num-epochs {config.num_epochs}: the first epoch compiles and does not count",
                "num-epochs: 3",
            )
        layout = make_layout(config)
        batching = layout.batching
        updates = batching.num_replicas * batching.gradient_accumulation_count
        if engine == KERAS and (updates > 1 or layout.num_stages > 1):
            raise ConfigurationError(
                "engine keras has no replicas, accumulation or stages: that is the session's",
                "engine: session, or leave those options out",
            )
        if engine == KERAS and config.precision != "32.32":
            raise ConfigurationError(
                f"engine keras with precision {config.precision}: Keras is measured in 32 bits",
                "engine: session, or precision: 32.32",
            )
        if config.seed is None:
            raise ValueError("a row needs a seed")
        self.seed: int = config.seed
        self.setup = run_setup.prepare(self.resolved, self.seed, source=source)
        run_setup.build_options(self.setup)
        self.program: Program = make_program(config, self.setup.source.info.num_train, seed=self.seed)
        if config.fused_micro_batches:  # a number, and neither none nor measure
            self.program = self.program.with_checked_fused(config.fused_micro_batches)
        self.optimizer = settings_of_run(config, self.program.global_batch_size)
        self.schedule = run_setup.learning_rates(config, self.program)

    def run(self, report: Report) -> PlainDict:
        """Trains and evaluates.

        Returns:
            The keys of a benchmark's report that make sense here, and ``epochs``, ``accuracy`` and ``loss``.

        Raises:
            UserError: NaN, or what the session cannot do.
        """
        from ipucnn.sessions.factory import create_session, runs_on_ipus

        if self.engine != KERAS and not runs_on_ipus(self.resolved.config.device):
            fix_threads(threads_of_training(self.resolved.config, self.program), required=False)
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        session = create_session(
            self.resolved.config.device, verbose=self.verbose, config=self.resolved.config
        )
        if self.engine != KERAS:
            self.setup = run_setup.move_preprocessing(self.setup, session)
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.planning.search.smallest_change import would_fit
        from ipucnn.planning.splits import settle_splits
        from ipucnn.runs.provenance import environment
        from ipucnn.training.losses import make_loss

        reset_peak_memory()
        report("building the network", 0, 0, "")
        model = run_setup.build(self.setup)
        self.program = settle_splits(self.program, model, self.resolved, None)
        name, config = self.resolved.record.name, self.resolved.config
        session.would_fit = would_fit(model, name, self.program, config)
        loss = make_loss(self.loss_name, self.resolved.config.label_smoothing)
        with data_errors():
            run = self._keras if self.engine == KERAS else self._session
            seconds, compilation, description = run(session, model, loss, report)
            report("evaluating", 0, 0, "")
            session.prepare_evaluation(model, loss)
            metrics = session.evaluate(run_setup.evaluation_batches(self.setup, 64, session))
        samples = self.program.samples_per_epoch
        info = self.setup.source.info
        return {
            "model": self.resolved.record.name,
            "started": started,
            "seed": self.seed,
            "input_shape": list(self.setup.input_shape),
            "data": {
                "kind": data_kind(self.resolved.config),
                "name": info.name,
                "location": info.location,
                "num_images": info.num_train,
            },
            "program": self.program.to_dict(),
            "device": asdict(session.device),
            "environment": environment(),
            "compilation": compilation,
            "epochs": [{"samples": samples, "wall_s": wall_s} for wall_s in seconds],
            "measured": self._measured(samples, seconds[1:], compilation),
            "accuracy": metrics["accuracy"],
            "loss": metrics["loss"],
            "predicted": [] if self.engine == KERAS else self._predicted(model),
            "notes": [description, *self.program.warnings],
            "void": None,
        }

    def _measured(self, samples: int, seconds: List[float], compilation: PlainDict) -> PlainDict:
        speed = throughput([samples] * len(seconds), seconds, self.seed)
        flop = 6.0 * compilation["macs_per_sample"]
        return {
            "images_per_s": speed.to_dict(),
            # As Keras' progress bar and the SDK count: a step is a micro-batch, whichever replica takes it.
            "step_s": self.program.micro_batch_size / speed.value,
            "step_samples": self.program.micro_batch_size,
            "num_executions": len(seconds),
            "flop_per_image": flop,
            "flop_per_s": flop * speed.value,
            "share_of_matmul_peak": None,
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def _dataset(self, first_update: int, samples_per_element: int) -> TfDataset:
        """Infinite training batches from a weight update on."""
        return run_setup.training_batches(
            self.setup, self.program, first_update, samples_per_element, shard=(1, 0)
        )

    def _session(self, session: Session, model: KerasModel, loss: LossFunction, report: Report) -> Trained:
        from ipucnn.sessions.session import ExecutionFinished

        compilation = session.compile(model, self.program, self.optimizer, loss, self.schedule, self._dataset)
        assert session.program is not None
        self.program = session.program
        per_epoch = self.program.weight_updates_per_epoch
        seconds: List[float] = []
        before = time.perf_counter()
        for event in session.train(self._dataset):
            if not isinstance(event, ExecutionFinished) or event.weight_updates % per_epoch:
                continue
            now = time.perf_counter()
            seconds.append(now - before)
            self._tell(report, seconds)
            before = now
        session.recompute_statistics(self._dataset)
        p = self.program
        steps = p.weight_updates_per_execution * p.gradient_accumulation_count
        return (
            seconds,
            {
                "num_parameters": compilation.num_parameters,
                "num_trainable_parameters": compilation.num_trainable_parameters,
                "macs_per_sample": compilation.macs_per_sample,
                "compile_s": compilation.trace_s + session.first_update_s,
            },
            f"session, executions of {steps} micro-batch{'es' if steps > 1 else ''} per replica",
        )

    def _keras(self, session: Session, model: KerasModel, loss: LossFunction, report: Report) -> Trained:
        import numpy as np
        from tensorflow import keras

        rate = float(self.schedule(np.arange(1))[0])
        copy, _, description = keras_model(
            model, self.optimizer, rate, self.loss_name, self.resolved.config.label_smoothing, 1
        )
        seconds: List[float] = []
        tell = self._tell

        class Clock(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
                self.before = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: object = None) -> None:
                seconds.append(time.perf_counter() - self.before)
                tell(report, seconds)

        steps = self.program.weight_updates_per_epoch
        copy.fit(
            self._dataset(0, self.program.micro_batch_size),
            epochs=self.program.num_epochs,
            steps_per_epoch=steps,
            callbacks=[Clock()],
            shuffle=False,
            verbose=0,
        )
        model.set_weights(copy.get_weights())
        return seconds, _counted(model), description

    def _tell(self, report: Report, seconds: List[float]) -> None:
        report("epochs", len(seconds), self.program.num_epochs, f"{seconds[-1]:.2f} s")

    def _predicted(self, model: KerasModel) -> List[PlainDict]:
        """The predicted columns; none where the network has no layer graph."""
        from ipucnn.benchmarking.prediction import Wanted, predict_columns

        wanted = Wanted(self.resolved.config, self.program, training=True, system=self.system)
        try:
            found = predict_columns(model, self.resolved.record.name, wanted)
            return [prediction.to_dict() for prediction in found]
        except UserError:
            return []


def _counted(model: KerasModel) -> PlainDict:
    """The counts of a network that a session's compilation report would have."""
    from ipucnn.models.counts import count_macs, count_parameters

    return {
        "num_parameters": int(model.count_params()),
        "num_trainable_parameters": count_parameters(model),
        "macs_per_sample": count_macs(model),
        "compile_s": None,
    }
