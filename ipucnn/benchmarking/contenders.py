"""The sides that can be measured: the session's training and inference, and plain Keras' fit and predict."""

import itertools
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ipucnn.benchmarking.measure import Side
from ipucnn.errors import UserError
from ipucnn.sessions.session import CompilationReport, Session

MakeDataset = Callable[[int, int], Any]
"""(first weight update, samples per element) -> infinite tf.data.Dataset of (images, labels)."""


class VoidError(UserError):
    """A result that is not finite: what was measured is no benchmark of the network."""


class SessionTraining(Side):
    """Weight updates of a session; a unit is one of them.

    Args:
        session: compiled for a Program.
        dataset: of the elements it wants.
        fixed_updates: weight updates of an execution, None to choose by time.
        lead: elements to compute off the clock before each execution.
    """

    name = "session"

    def __init__(
        self, session: Session, dataset: Any, fixed_updates: Optional[int] = None, lead: int = 0
    ) -> None:
        assert session.program is not None
        per_update = session.program.num_micro_batches // session.program.fused_micro_batches
        self._lead = -(-lead // per_update)
        self._session, self._batches = session, session.feed(dataset)
        self.samples_per_unit = session.program.global_batch_size
        self.fixed_units = fixed_updates

    def prepare(self, num_units: int) -> None:
        """Uses up what the pipeline made ready while other sides had their turn."""
        if self._lead:
            self._session.execute(self._batches, self._lead)

    def execute(self, num_units: int) -> None:
        """The session itself refuses losses that are not finite."""
        self._session.execute(self._batches, num_units)


class SessionInference(Side):
    """Predictions of a session; a unit is one micro-batch, which replicas take in turn.

    Args:
        session: with ``compile_prediction`` called for elements of the data set.
        images: infinite data set of images, ``fused`` micro-batches in each element.
        micro_batch_size: samples.
        fused: micro-batches computed as one.
        fixed_micro_batches: of an execution over all replicas, None to choose by time.
        lead: elements to compute off the clock before each execution.
    """

    name = "session"

    def __init__(
        self,
        session: Session,
        images: Any,
        micro_batch_size: int,
        fused: int,
        fixed_micro_batches: Optional[int] = None,
        lead: int = 0,
    ) -> None:
        self._session, self._batches = session, iter(images)
        self.samples_per_unit, self.granule = micro_batch_size, fused
        self.fixed_units = fixed_micro_batches
        self._lead = lead
        self._samples = 0
        self._logits: List[Any] = []

    def prepare(self, num_units: int) -> None:
        """Uses up what the pipeline made ready while other sides had their turn."""
        if self._lead:
            self._session.predict(itertools.islice(self._batches, self._lead))

    def execute(self, num_units: int) -> None:
        """Logits of ``num_units`` micro-batches, on the host."""
        self._samples = num_units * self.samples_per_unit
        self._logits = self._session.predict(itertools.islice(self._batches, num_units // self.granule))

    def check(self) -> None:
        """Refuses logits that are not finite, or not of all images."""
        computed = sum(len(logits) for logits in self._logits)
        if computed != self._samples:
            raise ValueError(f"an execution of {self._samples} images computed {computed}")
        _require_finite(self._logits)


class KerasTraining(Side):
    """Plain Keras ``fit``; a unit is one weight update of as many accumulated micro-batches as the session's.

    Args:
        model: compiled.
        dataset: infinite, of single micro-batches.
        micro_batches: per unit.
        micro_batch_size: samples.
    """

    name = "keras"

    def __init__(self, model: Any, dataset: Any, micro_batches: int, micro_batch_size: int) -> None:
        self._model, self._dataset, self._micro_batches = model, dataset, micro_batches
        self.samples_per_unit = micro_batches * micro_batch_size
        self._loss = 0.0

    def execute(self, num_units: int) -> None:
        """One call of ``fit``."""
        steps = num_units * self._micro_batches
        history = self._model.fit(self._dataset, epochs=1, steps_per_epoch=steps, shuffle=False, verbose=0)
        self._loss = float(history.history["loss"][-1])

    def check(self) -> None:
        """Refuses a loss that is not finite."""
        _require_finite([np.asarray(self._loss)])


class KerasInference(Side):
    """Plain Keras ``predict``; a unit is one micro-batch.

    Args:
        model: any Keras model.
        images: infinite data set of single micro-batches.
        micro_batch_size: samples.
    """

    name = "keras"

    def __init__(self, model: Any, images: Any, micro_batch_size: int) -> None:
        self._model, self._images = model, images
        self.samples_per_unit = micro_batch_size
        self._logits: Any = None

    def execute(self, num_units: int) -> None:
        """One call of ``predict``, which returns NumPy arrays."""
        self._logits = self._model.predict(self._images, steps=num_units, verbose=0)

    def check(self) -> None:
        """Refuses logits that are not finite."""
        _require_finite([self._logits])


def _require_finite(arrays: List[Any]) -> None:
    if not arrays or not all(np.size(array) for array in arrays):
        raise ValueError("an execution without results")
    if not all(np.isfinite(array).all() for array in arrays):
        raise VoidError(
            "the results are NaN or infinite: nothing that was measured counts",
            "benchmark without the option that causes it; a smaller --learning-rate, for training",
        )


def images_only(dataset: Any) -> Any:
    """The images of a data set of (images, labels)."""
    import tensorflow as tf

    return dataset.map(tf.autograph.experimental.do_not_convert(lambda images, labels: images))


def constant_batch(dataset: Any) -> Any:
    """The first element of a data set, over and over, from memory."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensors(next(iter(dataset))).repeat()


def keras_model(
    model: Any, optimizer: Any, learning_rate: float, loss_name: str, smoothing: Any, accumulate: int
) -> Tuple[Any, int, str]:
    """The same network of Keras' own layers, compiled for ``fit``, and what that is, in words.

    Args:
        model: from ``build_model``.
        optimizer: ``OptimizerSettings``.
        learning_rate: constant.
        loss_name: of ``make_loss``.
        smoothing: label smoothing or None.
        accumulate: micro-batches per weight update.

    Returns:
        (model, micro-batches that Keras accumulates, description).
    """
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn.benchmarking.stock import stock_copy
    from ipucnn.compat import KERAS_3
    from ipucnn.training.losses import make_loss

    copy = stock_copy(model)
    name, params, differs = keras_optimizer(optimizer, KERAS_3)
    accumulated = accumulate if KERAS_3 else 1
    if accumulated > 1:
        params["gradient_accumulation_steps"] = accumulated
    own = make_loss(loss_name, smoothing)

    def loss(labels: Any, logits: Any) -> Any:
        # Keras 2.6 makes (n, 1) of labels (n,).
        return own(logits, tf.reshape(tf.cast(labels, tf.int32), tf.shape(logits)[:-1]), 1)

    made = getattr(keras.optimizers, name)(learning_rate, **params)
    # XLA on CPUs compiles for minutes and multiplies more slowly than oneDNN; Keras 2.6 has no such argument.
    without_xla = {"jit_compile": False} if KERAS_3 else {}
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    copy.compile(made, loss, metrics=[accuracy], **without_xla)
    description = f"Keras {keras.__version__} fit, {name}"
    if accumulate > 1:
        description += f", {accumulate} accumulated" if KERAS_3 else ", no accumulation (it has none)"
    description += "".join(f"; {text}" for text in differs)
    return copy, accumulated, description


def keras_optimizer(optimizer: Any, is_keras_3: bool) -> Tuple[str, Dict[str, Any], List[str]]:
    """Keras' optimizer that is nearest.

    Args:
        optimizer: ``OptimizerSettings``.
        is_keras_3: else 2.6, which has neither AdamW nor weight decay.

    Returns:
        (class in ``keras.optimizers``, arguments but the learning rate, what differs in words).
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
    params = {key: optimizer.params[key] for key in keys}
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
    return name, params, differs


def compile_session(
    session: Session,
    model: Any,
    program: Any,
    optimizer: Any,
    loss: Any,
    rate: float,
    make_dataset: MakeDataset,
) -> CompilationReport:
    """Compiles a session for training at a constant learning rate."""

    def schedule(updates: Any) -> Any:
        return np.full(np.shape(updates), rate, np.float32)

    return session.compile(model, program, optimizer, loss, schedule, make_dataset)
