"""A small network, programs for it, and training it on a session."""

from dataclasses import replace
from typing import Any, Dict, List, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

from ipucnn.compat import KERAS_3
from ipucnn.config.options import RunConfig
from ipucnn.models.layers.micro_batches import BatchNormalization, Dropout, GroupNormalization
from ipucnn.sessions.evaluated import (
    EvaluatedWeights,
    Statistics,
    StatisticsImages,
    evaluated_weights,
    statistics_policy,
)
from ipucnn.sessions.session import DeviceInfo, TrainingTask, train
from ipucnn.training.losses import Loss
from ipucnn.training.optimizer_settings import make_settings
from ipucnn.training.program import BuiltProgram, Layers
from ipucnn.training.program import make_program as program_of

CPU = DeviceInfo("cpu", "test", 2, 8 * 2**30)
SIZE, CLASSES, MOMENTUM, EPSILON = 6, 3, 0.8, 1e-3
# Name, parameters and further settings of an optimizer.
SGD: Any = ("sgd", {"momentum": 0.9}, {})
PLAIN: Any = ("sgd", {"momentum": 0.0}, {})


def make_program(batch=2, accumulate=1, replicas=1, **changes) -> BuiltProgram:
    """Returns a program of one epoch without checkpoints and validations; ``changes`` are its fields.

    With 0 fused micro-batches, :func:`make_trainer` lets the session choose them.

    Args:
        changes: fields of the program, and ``updates_per_epoch`` (4).
    """
    updates = changes.pop("updates_per_epoch", 4)
    per_execution = changes.pop("weight_updates_per_execution", updates)
    config = RunConfig(
        micro_batch_size=batch,
        gradient_accumulation_count=accumulate,
        num_replicas=replicas,
        steps_per_execution=per_execution * accumulate,
        checkpoints=False,
        validation=False,
    )
    program = BuiltProgram.of(
        program_of(config, updates * batch * accumulate * replicas, seed=1), Layers((), "", ()), 0
    )
    changes.setdefault("validation_num_replicas", replicas * changes.get("ipus_per_replica", 1))
    return replace(program, **changes)


def with_fused(program: BuiltProgram, number: int) -> BuiltProgram:
    """Returns the program with a number of fused micro-batches."""
    return replace(program, fused_micro_batches=number)


def drawn(model: Any, seed: int) -> Any:
    """Returns the model with drawn weights; moving statistics stay."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        if not weight.name.split("/")[-1].startswith("moving"):
            weight.assign(rng.normal(0.3, 0.4, weight.shape))
    return model


def chain(shape: Any, *layers: Any, seed: Any = None, batch_size: Any = None, **options: Any) -> Any:
    """Returns a network of layers, one after the other.

    Args:
        shape: of an image.
        seed: for the weights; None: as Keras draws them.
        batch_size: the size of a batch; None: any.
        options: of the input, such as ``dtype``.
    """
    # Not batch_size=: in the scope of a strategy, Keras 2.6 divides it by the replicas.
    x = inputs = keras.Input(batch_shape=(batch_size, *shape), name="input", **options)
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, x)
    return model if seed is None else drawn(model, seed)


def restart_names() -> None:
    """Makes Keras count the names of layers from zero; Keras 3 would also collect garbage, which takes 30 ms."""
    keras.backend.clear_session(**({"free_memory": False} if KERAS_3 else {}))


def make_model(norm: str, seed: int = 3, dropout: float = 0.0) -> Any:
    """Returns two convolutions, each with a norm, dropout and drop connect; no two layers are alike.

    Args:
        norm: batch, custom (batch norm whose statistics move once per weight update), group or none.
    """
    restart_names()
    inputs = keras.Input((SIZE, SIZE, 2), name="input")
    x = inputs
    for i in range(2):
        x = keras.layers.Conv2D(4, 3, padding="same", use_bias=norm == "none", name=f"conv{i}")(x)
        if norm in ("batch", "custom"):
            options = {"momentum": MOMENTUM, "epsilon": EPSILON, "moves_once": norm == "custom"}
            x = BatchNormalization(name=f"norm{i}", **options)(x)
        elif norm == "group":
            x = GroupNormalization(groups=2, epsilon=EPSILON, name=f"norm{i}")(x)
        x = keras.layers.ReLU(name=f"relu{i}")(x)
        if dropout:
            x = Dropout(dropout, (None, 1, 1, 1) if i == 0 else None, name=f"dropout{i}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return drawn(keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(x)), seed)


def frozen(model: Any, layers: Any) -> Any:
    """Returns the model with some of its layers frozen."""
    for name in layers:
        model.get_layer(name).trainable = False
    return model


def data(samples: int, seed: int) -> Any:
    """Returns images and labels."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(0.5, 1.0, (samples, SIZE, SIZE, 2)).astype(np.float32),
        rng.integers(0, CLASSES, samples).astype(np.int32),
    )


def falling(rate: float = 0.05) -> Any:
    """Returns a schedule with a lower learning rate in each weight update."""
    return lambda updates: np.full(np.shape(updates), rate, np.float32) / (1 + np.asarray(updates))


def constant(rate: float) -> Any:
    """Returns a schedule with one learning rate."""
    return lambda updates: np.full(np.shape(updates), rate, np.float32)


def batches(program: BuiltProgram, *parts: Any) -> Any:
    """Returns the data argument of ``train``: the arrays, repeated, from a weight update on."""

    def make(first: int, per_element: int) -> Any:
        endless = tf.data.Dataset.from_tensor_slices(parts).repeat()
        return endless.skip(first * program.global_batch_size).batch(per_element, drop_remainder=True)

    return make


class Trained(NamedTuple):
    """The result of a training: trained weights with recomputed statistics, slots, events, origin of the statistics."""

    weights: Dict[str, np.ndarray]
    slots: Dict[str, np.ndarray]
    events: List[Any]
    statistics: str
    trainer: Any


def make_trainer(
    session: Any,
    model: Any,
    program: BuiltProgram,
    optimizer: Any = SGD,
    schedule: Any = None,
    loss: Any = "cross_entropy",
    make_dataset: Any = None,
) -> Any:
    """Returns a session's trainer.

    Args:
        loss: name of a loss, or a function.
        make_dataset: data set function for the trace.
    """
    name, params, more = optimizer
    settings = make_settings(name, params, global_batch_size=program.global_batch_size, **more)
    function = Loss(loss) if isinstance(loss, str) else loss
    division = session.divide(model, program, program.fused_micro_batches or None)
    program = with_fused(program, division.fused_micro_batches)
    return session.trainer(
        TrainingTask(model, program, division, settings, function, schedule or falling(), make_dataset)
    )


def set_state(state: Any, weights: Any, slots: Any, weight_updates: int) -> None:
    """Sets the state of a trainer to that of another one."""
    for variables, values in ((state.weights, weights), (state.slots, slots)):
        for name, value in values.items():
            variables[name].assign(value)
    state.weight_updates = weight_updates


def run(
    session: Any,
    model: Any,
    program: BuiltProgram,
    optimizer: Any,
    images: Any,
    labels: Any,
    loss: str = "cross_entropy",
    weights: Any = None,
    state: Any = None,
    schedule: Any = None,
) -> Trained:
    """Trains a program from the start, or from a state: weights, slots, weight updates.

    Args:
        weights: sample weights; None: all samples count.
    """
    trainer = make_trainer(session, model, program, optimizer, schedule, loss)
    if state is not None:
        set_state(trainer.state, *state)
    make_dataset = batches(program, images, labels, *([] if weights is None else [weights]))
    events = list(train(trainer, make_dataset))
    evaluated = evaluated_now(trainer, make_dataset)
    recomputed = {name: v for name, v in evaluated.values.items() if name not in evaluated.resumed}
    return Trained(
        {**values(trainer.state.weights), **recomputed},
        values(trainer.state.slots),
        events,
        evaluated.statistics,
        trainer,
    )


def values(variables: Any) -> Dict[str, np.ndarray]:
    """Returns the values of variables, by name."""
    return {name: variable.numpy() for name, variable in variables.items()}


def evaluated_now(trainer: Any, make_dataset: Any) -> EvaluatedWeights:
    """Returns the evaluated weights of a run without precise batch norm."""
    policy = statistics_policy(RunConfig(), trainer.program)
    return evaluated_weights(trainer, policy, make_dataset, lambda: None)


def measured(trainer: Any, images: Any, size: int) -> EvaluatedWeights:
    """Returns the evaluated weights of a run with precise batch norm, over batches of ``size`` images."""
    dataset = tf.data.Dataset.from_tensor_slices((images,)).batch(size)
    batches = StatisticsImages(dataset, len(dataset), size)
    return evaluated_weights(trainer, Statistics.MEASURED, None, lambda: batches)
