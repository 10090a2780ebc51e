"""Runs ``fit``, a command of suites that trains as ``ipucnn train`` would, with ``keras.Model.fit``."""

import sys
import time
from dataclasses import replace
from typing import Callable, List, Optional, Tuple

from ipucnn.aliases import KerasModel, Tensor
from ipucnn.benchmarking.figures import figures_of_fit
from ipucnn.benchmarking.records import Figures
from ipucnn.benchmarking.suite import Parse, SuiteCommand, given_options
from ipucnn.config.resolve import Resolved
from ipucnn.errors import MemoryErrors, UserError
from ipucnn.runs import setup as run_setup
from ipucnn.training.optimizer_settings import settings_of_run
from ipucnn.training.program import Program, make_program


def main(parse: Parse) -> None:
    """Trains as the command line specifies, and prints figures as JSON: the process of a row of a suite."""
    try:
        options = given_options(parse(["train", *sys.argv[2:]]).values())
        print(fit(SuiteCommand("fit", sys.argv[2], options).resolve()).to_json())
    except UserError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)


def fit(resolved: Resolved) -> Figures:
    """Trains and evaluates; the first epoch compiles, so its time does not count.

    Raises:
        UserError: an error in the configuration or the data.
    """
    validates = resolved.config.validation
    config = replace(resolved.config, validation=False, checkpoints=False)
    resolved = replace(resolved, config=config)
    setup = run_setup.prepare(resolved, config.seed or 0)
    program = make_program(config, setup.source.info.num_train, seed=setup.seed)
    from ipucnn.sessions.factory import create_session

    session = create_session(config.device, config=config)
    from ipucnn.benchmarking.contenders import keras_optimizer
    from ipucnn.compat import KERAS_3
    from ipucnn.datasets.pipeline import data_errors
    from ipucnn.models.counts import count_macs, count_parameters
    from ipucnn.training.losses import Loss

    _, _, differs = keras_optimizer(settings_of_run(config, program.global_batch_size), KERAS_3)
    model = run_setup.build(setup)
    loss = Loss(run_setup.loss_name(config, resolved.record.task), config.label_smoothing)
    # The session's own hint names options that Keras' loop does not have.
    too_large = MemoryErrors(
        "out of memory in Keras' loop", "use a smaller --micro-batch-size or --image-size"
    )
    with too_large, data_errors():
        seconds, training_accuracy = _train(model, setup, program, loss)
        accuracy = None
        if validates:
            predictor = session.predictor(model)
            batches = run_setup.evaluation_batches(setup, 64, predictor)
            accuracy = predictor.evaluate(batches, loss)["accuracy"]
    return figures_of_fit(
        program.to_dict(),
        {"num_trainable_parameters": count_parameters(model), "macs_per_sample": count_macs(model)},
        setup.input_shape,
        device=session.device.name,
        data=setup.source.info.name,
        images_per_s=program.samples_per_epoch * len(seconds[1:]) / sum(seconds[1:]),
        training_accuracy=training_accuracy,
        accuracy=accuracy,
        notes=[*differs, *setup.record.notes],
    )


def _train(
    model: KerasModel, setup: run_setup.Setup, program: Program, loss: Callable[..., Tensor]
) -> Tuple[List[float], Optional[float]]:
    """Trains the model by Keras' own fit; returns the seconds of each epoch, and the accuracy in the last."""
    import numpy as np
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn.benchmarking.contenders import keras_model

    config = setup.config
    num_updates = program.num_epochs * program.weight_updates_per_epoch
    rates: np.ndarray = run_setup.learning_rates(config, program)(np.arange(num_updates)).astype(np.float32)

    class Rates(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        """The rate of each weight update, as the run's schedule has it."""

        def __call__(self, step: Tensor) -> Tensor:
            # Keras asks for one more after the last update.
            return tf.gather(rates, tf.minimum(tf.cast(step, tf.int32), num_updates - 1))

    rate = float(rates[0]) if (rates == rates[0]).all() else Rates()
    copy, _, _ = keras_model(model, settings_of_run(config, program.global_batch_size), rate, loss, 1)
    seconds: List[float] = []

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        """Records the times of epochs."""

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.before = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            seconds.append(time.perf_counter() - self.before)

    history = copy.fit(
        run_setup.training_batches(setup, program, 0, program.micro_batch_size, shard=(1, 0)),
        epochs=program.num_epochs,
        steps_per_epoch=program.weight_updates_per_epoch,
        callbacks=[Clock()],
        shuffle=False,
        verbose=0,
    )
    model.set_weights(copy.get_weights())
    accuracies = [values for key, values in history.history.items() if "accuracy" in key]
    return seconds, accuracies[0][-1] if accuracies else None
