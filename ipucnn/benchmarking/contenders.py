"""The work to time: a session's training and inference, plain Keras' fit and predict, and a reference workload.

Two programs that share a CPU with others do not slow down alike: a large matrix product loses little where many small
operations lose much.  So the reference workload, which executions are compared with, resembles networks: convolutions
of few channels, activations, pooling, a dense layer, forward and backward, several operations at a time.  It belongs to
the benchmark, not to the measured code, so no change to networks or sessions changes it.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import numpy as np

from ipucnn.aliases import KerasLayer, KerasModel, Tensor, TfDataset
from ipucnn.benchmarking.rounds import Contender, Reference
from ipucnn.errors import UserError
from ipucnn.sessions.session import Predictor, Session, Trainer, execute
from ipucnn.training.optimizer_settings import OptimizerSettings
from ipucnn.training.program import BuiltProgram

REFERENCE = (
    "a reference workload right before and after each execution: two forward passes and one with gradients of four 3x3 "
    "convolutions of 16 channels on 8 images of 32x32, pooling and a dense layer, repeated"
)
_SHARE = 0.5
_LEAST_S, _MOST_S = 0.02, 1.0
_FORWARD_PASSES = 2
_IMAGES = 8


class VoidError(UserError):
    """The error of a result that is not finite: the measurement is no benchmark of the network."""


class SessionTraining(Contender):
    """The weight updates of a session; a unit is one update.

    Args:
        trainer: the session's trainer of a Program.
        dataset: the data set of the trainer's elements.
        fixed_updates: the weight updates of an execution, None to choose by time.
        lead: the elements to compute before each execution, outside the timed part.
    """

    name = "session"

    def __init__(
        self, trainer: Trainer, dataset: TfDataset, fixed_updates: Optional[int] = None, lead: int = 0
    ) -> None:
        self._lead = -(-lead // trainer.division.num_groups)
        self._trainer, self._batches = trainer, trainer.feed(dataset)
        self.samples_per_unit = trainer.program.global_batch_size
        self.fixed_units = fixed_updates

    def prepare(self, num_units: int) -> None:
        """Uses up the elements that the pipeline prepared during the turns of others."""
        if self._lead:
            execute(self._trainer, self._batches, self._lead)

    def execute(self, num_units: int) -> None:
        """Runs ``num_units`` weight updates; the session itself refuses losses that are not finite."""
        execute(self._trainer, self._batches, num_units)


class SessionInference(Contender):
    """The predictions of a session; a unit is one micro-batch, which replicas take in turn.

    Args:
        session: the session.
        predictor: its predictor, compiled for elements of the data set.
        images: an infinite data set of images, with the program's fused micro-batches in each element.
        program: the program, for the sizes of micro-batches and elements.
        fixed_micro_batches: the micro-batches of an execution over all replicas, None to choose by time.
        lead: the elements to compute before each execution, outside the timed part.
        num_instances: the number of ``poprun`` instances, each of which computes its part of an execution's units.
    """

    name = "session"

    def __init__(
        self,
        session: Session,
        predictor: Predictor,
        images: TfDataset,
        program: BuiltProgram,
        fixed_micro_batches: Optional[int] = None,
        lead: int = 0,
        num_instances: int = 1,
    ) -> None:
        self._session, self._predictor, self._batches = session, predictor, iter(images)
        self.samples_per_unit = program.micro_batch_size
        self.granule = program.fused_micro_batches * num_instances
        self._num_instances = num_instances
        self.fixed_units = fixed_micro_batches
        self._lead = lead
        self._samples = 0
        self._logits: List[Any] = []

    def prepare(self, num_units: int) -> None:
        """Uses up the elements that the pipeline prepared during the turns of others."""
        if self._lead:
            self._predictor.predict(itertools.islice(self._batches, self._lead))

    def execute(self, num_units: int) -> None:
        """Computes logits of ``num_units`` micro-batches, on the host; it ends when all instances have theirs."""
        self._samples = num_units * self.samples_per_unit // self._num_instances
        self._logits = self._predictor.predict(itertools.islice(self._batches, num_units // self.granule))
        self._session.any_instance(False)

    def check(self) -> None:
        """Refuses logits that are not finite, or do not cover all images."""
        computed = sum(len(logits) for logits in self._logits)
        if computed != self._samples:
            raise ValueError(f"an execution of {self._samples} images computed {computed}")
        _require_finite(self._logits)


class KerasTraining(Contender):
    """Plain Keras ``fit``; a unit is one weight update of as many accumulated micro-batches as the session's.

    Args:
        model: a compiled model.
        dataset: an infinite data set of single micro-batches.
        micro_batches: the micro-batches per unit.
        micro_batch_size: the samples of a micro-batch.
    """

    name = "keras"

    def __init__(
        self, model: KerasModel, dataset: TfDataset, micro_batches: int, micro_batch_size: int
    ) -> None:
        self._model, self._dataset, self._micro_batches = model, dataset, micro_batches
        self.samples_per_unit = micro_batches * micro_batch_size
        self._loss = 0.0

    def execute(self, num_units: int) -> None:
        """Calls ``fit`` once."""
        steps = num_units * self._micro_batches
        history = self._model.fit(self._dataset, epochs=1, steps_per_epoch=steps, shuffle=False, verbose=0)
        self._loss = float(history.history["loss"][-1])

    def check(self) -> None:
        """Refuses a loss that is not finite."""
        _require_finite([np.asarray(self._loss)])


class KerasInference(Contender):
    """Plain Keras ``predict``; a unit is one micro-batch.

    Args:
        model: any Keras model.
        images: an infinite data set of single micro-batches.
        micro_batch_size: the samples of a micro-batch.
    """

    name = "keras"

    def __init__(self, model: KerasModel, images: TfDataset, micro_batch_size: int) -> None:
        self._model, self._images = model, images
        self.samples_per_unit = micro_batch_size
        self._logits: Any = None

    def execute(self, num_units: int) -> None:
        """Calls ``predict`` once, which returns NumPy arrays."""
        self._logits = self._model.predict(self._images, steps=num_units, verbose=0)

    def check(self) -> None:
        """Refuses logits that are not finite."""
        _require_finite([self._logits])


def _require_finite(arrays: List[Tensor]) -> None:
    if not arrays or not all(np.size(array) for array in arrays):
        raise ValueError("an execution without results")
    if not all(np.isfinite(array).all() for array in arrays):
        raise VoidError(
            "the results are NaN or infinite: nothing that was measured counts",
            "benchmark without the option that causes it; a smaller --learning-rate, for training",
        )


def stock_copy(model: KerasModel) -> KerasModel:
    """Returns the network and weights of a model of ``build_model`` in Keras' own layers."""
    from tensorflow import keras

    from ipucnn.models.layers import micro_batches
    from ipucnn.models.layers.per_sample import GroupedConv2D

    def clone(layer: KerasLayer) -> KerasLayer:
        config = layer.get_config()
        if isinstance(layer, micro_batches.BatchNormalization):
            keep = ("name", "momentum", "epsilon", "center", "scale")
            return keras.layers.BatchNormalization(**{k: config[k] for k in keep})
        if isinstance(layer, micro_batches.GroupNormalization):
            if not hasattr(keras.layers, "GroupNormalization"):  # Keras 2.6
                return micro_batches.GroupNormalization.from_config(config)
            return keras.layers.GroupNormalization(
                config["groups"], epsilon=config["epsilon"], name=layer.name
            )
        if isinstance(layer, micro_batches.Dropout):
            return keras.layers.Dropout(config["rate"], config["noise_shape"], name=layer.name)
        if isinstance(layer, GroupedConv2D):
            return keras.layers.Conv2D.from_config(config)
        return type(layer).from_config(config)

    copy = keras.models.clone_model(model, clone_function=clone)
    copy.set_weights(model.get_weights())
    return copy


def keras_model(
    model: KerasModel,
    optimizer: OptimizerSettings,
    learning_rate: Union[float, Callable[[Tensor], Tensor]],
    loss: Callable[..., Tensor],
    accumulate: int,
) -> Tuple[KerasModel, int, str]:
    """Returns the network in Keras' own layers, compiled for ``fit``, and a description.

    Args:
        model: the model from ``build_model``.
        optimizer: the optimizer's settings.
        learning_rate: the constant learning rate, or a schedule of Keras.
        loss: a function like ``Loss``.
        accumulate: the micro-batches per weight update.

    Returns:
        (model, micro-batches that Keras accumulates, description).
    """
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn.compat import KERAS_3
    from ipucnn.training.losses import correct

    copy = stock_copy(model)
    name, params, differs = keras_optimizer(optimizer, KERAS_3)
    accumulated = accumulate if KERAS_3 else 1
    if accumulated > 1:
        params["gradient_accumulation_steps"] = accumulated

    def as_labels(values: Tensor, logits: Tensor) -> Tensor:
        # Keras makes class numbers floats, and Keras 2.6 turns (n,) into (n, 1).  Shares of mixed images stay.
        if values.shape.rank == logits.shape.rank and values.shape[-1] == logits.shape[-1]:
            return values
        return tf.reshape(tf.cast(values, tf.int32), tf.shape(logits)[:-1])

    def keras_loss(labels: Tensor, logits: Tensor) -> Tensor:
        return loss(logits, as_labels(labels, logits), 1)

    def accuracy(labels: Tensor, logits: Tensor) -> Tensor:
        return correct(logits, as_labels(labels, logits))

    compiled_optimizer = getattr(keras.optimizers, name)(learning_rate, **params)
    # XLA on CPUs compiles for minutes and multiplies more slowly than oneDNN; Keras 2.6 has no such argument.
    without_xla = {"jit_compile": False} if KERAS_3 else {}
    copy.compile(compiled_optimizer, keras_loss, metrics=[accuracy], **without_xla)
    description = f"Keras {keras.__version__} fit, {name}"
    if accumulate > 1:
        description += f", {accumulate} accumulated" if KERAS_3 else ", no accumulation (it has none)"
    description += "".join(f"; {text}" for text in differs)
    return copy, accumulated, description


def keras_optimizer(optimizer: OptimizerSettings, is_keras_3: bool) -> Tuple[str, Dict[str, Any], List[str]]:
    """Returns the most similar optimizer of Keras.

    Args:
        optimizer: the optimizer's settings.
        is_keras_3: whether Keras is version 3; otherwise it is 2.6, which has neither AdamW nor weight decay.

    Returns:
        (class in ``keras.optimizers``, arguments without the learning rate, differences in words).
    """
    keys = {
        "sgd": ("momentum", "nesterov"),
        "lars": ("momentum", "nesterov"),
        "adam": ("beta_1", "beta_2", "epsilon"),
        "adamw": ("beta_1", "beta_2", "epsilon"),
        "rmsprop": ("rho", "momentum", "epsilon"),
    }[optimizer.name]
    names = {"sgd": "SGD", "lars": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop"}
    name = names[optimizer.name]
    # Keras 3 takes no whole number as a momentum.
    params = {k: optimizer.params[k] if k == "nesterov" else float(optimizer.params[k]) for k in keys}
    if optimizer.clip_gradient_norm:
        params["global_clipnorm"] = optimizer.clip_gradient_norm
    differs: List[str] = []
    if optimizer.name == "lars":
        differs.append("SGD instead of LARS: less arithmetic, and no weight decay")
    elif is_keras_3:
        # Decoupled as here: w -= learning rate * decay * w.  Keras' own default for AdamW is 0.004.
        if optimizer.weight_decay or name == "AdamW":
            params["weight_decay"] = optimizer.weight_decay
    else:
        if name == "AdamW":
            name = "Adam"
            differs.append("Adam instead of AdamW, which it does not have")
        if optimizer.weight_decay:
            differs.append("no weight decay (it has none)")
    if optimizer.l2_regularization:
        differs.append("no L2 regularization, which the session has")
    if "weight_decay" in params and not optimizer.decay_biases_and_norms:
        differs.append("weight decay of biases and norms, too")
    return name, params, differs


class ReferenceWorkload(Reference):
    """The reference workload on the session's device; calling it returns the seconds of one repetition.

    Args:
        place: TensorFlow's name of the device.
        repetitions: the number of repetitions per call; None to adapt it to the executions.
    """

    def __init__(self, place: str = "/CPU:0", repetitions: Optional[int] = None) -> None:
        import tensorflow as tf

        self._place = place
        with tf.device(place):
            self._images = tf.random.stateless_uniform([_IMAGES, 32, 32, 16], [1, 2])
            kernels = [tf.random.stateless_uniform([3, 3, 16, 16], [i, 3]) * 0.1 - 0.05 for i in range(4)]
            self._weights = [*kernels, tf.random.stateless_uniform([16 * 16 * 16, 64], [5, 6]) * 0.01]
        self._repeat = tf.function(self._work, autograph=False)
        self._fixed = repetitions
        self.repetitions = repetitions or 1
        self()
        self._best_s = min(self()[0] for _ in range(5))

    def suit(self, execution_s: float) -> None:
        """Sets the number of repetitions to half the length of an execution: at least 20 ms, at most 1 s."""
        if self._fixed is not None:
            return
        seconds = min(max(_SHARE * execution_s, _LEAST_S), _MOST_S)
        self.repetitions = max(1, round(seconds / max(self._best_s, 1e-9)))

    def _work(self, count: Tensor) -> Tensor:
        import tensorflow as tf

        def network(images: Tensor) -> Tensor:
            x = images
            for kernel in self._weights[:-1]:
                x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
            x = tf.nn.max_pool2d(x, 2, 2, "SAME")
            return tf.reduce_mean(tf.matmul(tf.reshape(x, [_IMAGES, -1]), self._weights[-1]))

        def body(i: Tensor, carried: Tensor) -> Tuple[Tensor, Tensor]:
            # Each repetition depends on the one before, so that none is moved out of the loop or dropped.
            for _ in range(_FORWARD_PASSES):
                carried = network(self._images + carried * 1e-9)
            with tf.GradientTape() as tape:
                tape.watch(self._weights)
                result = network(self._images + carried * 1e-9)
            gradients = tape.gradient(result, self._weights)
            return i + 1, tf.add_n([tf.reduce_sum(g) for g in gradients]) * 1e-9

        start = (tf.constant(0), tf.constant(0.0))
        return tf.while_loop(lambda i, _: i < count, body, start, parallel_iterations=1)[1]

    def __call__(self) -> Tuple[float, float]:
        """Runs the workload; returns seconds and processor seconds of one repetition."""
        import tensorflow as tf

        with tf.device(self._place):
            count = tf.constant(self.repetitions)
            wall, cpu = time.perf_counter(), time.process_time()
            self._repeat(count).numpy()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall / self.repetitions, cpu / self.repetitions
