"""``fit``, ``evaluate`` and ``predict`` of a model on the double: the SDK's checks, then stock TensorFlow.

Replicas run one after the other, each with its own copy of what is not trained (moving statistics, metrics);
gradients are accumulated per replica and averaged over replicas before the optimizer is applied once.
"""

import hashlib
import json
import os
import time
from typing import Any, Dict, List, Optional

import numpy as np
import tensorflow as tf
from tensorflow import keras

from . import rules
from .facts import FACTS
from .machine import ProcessAborted

_KERAS_3 = int(keras.__version__.split(".")[0]) >= 3


def _variable(weight: Any) -> Any:
    return weight.value if _KERAS_3 and not isinstance(weight, tf.Variable) else weight


def _unpack(element: Any) -> Any:
    """(x, y, weights) of an element, as Keras takes them."""
    parts = element if isinstance(element, tuple) else (element,)
    return (*parts, None, None)[:3]


class Engine:
    """Runs one model."""

    def __init__(self, extension: Any) -> None:
        self._extension, self._model = extension, extension.model
        self._machine = extension.machine
        self._ready: Dict[Any, int] = {}
        self._functions: Dict[str, Any] = {}
        self._copies: List[List[Any]] = []
        self._local: List[Any] = []
        self._averaged: List[int] = []

    def forget(self) -> None:
        """Drops compiled programs, as every change of options does."""
        self._ready, self._functions = {}, {}

    # --- compiling -------------------------------------------------------------------------------------

    def _steps_per_execution(self) -> int:
        steps = getattr(self._model, "_steps_per_execution", None)
        steps = self._model.steps_per_execution if steps is None else steps
        return int(steps.numpy()) if hasattr(steps, "numpy") else int(steps)

    def _compile(self, kind: str, steps: int, spec: Any) -> int:
        """Checks and "compiles" a program; returns its replicas."""
        machine, extension = self._machine, self._extension
        replicas = rules.num_replicas(machine, extension)
        if machine.config["leaves"]["experimental.multi_replica_distribution.process_count"] > 1:
            pass  # the device's IPUs are those of this process
        key = (kind, steps, repr(tf.nest.map_structure(lambda s: (s.shape, s.dtype.name), spec)))
        if self._ready.get(key):
            return self._ready[key]
        if getattr(self._model, "run_eagerly", False):
            raise RuntimeError("run_eagerly is not supported on IPUs")
        training = kind == "fit"
        accumulation = extension.accumulation or 1
        pipelined = bool(rules.stages_of(extension))
        if pipelined:
            rules.check_pipeline(machine, extension, training, steps)
            accumulation = extension.pipelining or 1
        elif training:
            self._check_accumulation()
        if training:
            optimizer = self._model.optimizer
            if (accumulation > 1 or pipelined) and "minimize" in vars(type(optimizer)):
                raise ValueError("the optimizer overrides minimize and cannot accumulate gradients")
            if steps % accumulation:
                raise RuntimeError(
                    f"steps_per_execution {steps} is not a multiple of gradient_accumulation_steps_per_replica "
                    f"{accumulation}"
                )
        depth = extension.infeed.get("prefetch_depth", 3) or 3
        if not 1 <= depth <= 255:
            raise ValueError("prefetch_depth must be from 1 to 255")
        for name in extension.outfeed:
            if name not in FACTS["outfeed_keywords"]:
                raise TypeError(f"IPUOutfeedQueue got an unexpected keyword argument {name}")
        rules.check_feed(spec)
        rules.check_poplar(machine, extension, replicas)
        self._ready[key] = replicas
        self._announce(key)
        return replicas

    def _check_accumulation(self) -> None:
        for name in self._extension.accumulation_keywords:
            if name not in FACTS["accumulation_keywords"]:
                raise TypeError(f"GradientAccumulationOptimizerV2 got an unexpected keyword argument {name}")
        keywords = self._extension.accumulation_keywords
        if (
            keywords.get("replicated_optimizer_state_sharding")
            and keywords.get("offload_weight_update_variables") is False
        ):
            raise ValueError("replicated_optimizer_state_sharding needs offload_weight_update_variables")

    def _announce(self, key: Any) -> None:
        """The driver's progress bar on file descriptor 1, unless the program is in the executable cache."""
        machine = self._machine
        machine.programs.append((self._model.name, *key))
        folder = machine.flags.get("executable_cache_path")
        leaves = {k: str(v) for k, v in machine.config["leaves"].items()}
        # Not the model's configuration: names that Keras counts up differ from process to process.
        shapes = [
            (layer.name, [str(part.shape) for part in tf.nest.flatten(layer.output)])
            for layer in self._model.layers
        ]
        text = json.dumps([key, leaves, shapes], sort_keys=True)
        if folder:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest() + ".poplar_exec")
            if os.path.exists(path):
                return
            with open(path, "w", encoding="utf-8") as handle:
                handle.write(text)
        if machine.flags.get("show_progress_bar", "auto") == "true":
            os.write(1, f"Compiling module cluster_{len(machine.programs)}:\n".encode())
            for percent, stage in ((1, 0), (3, 1), (20, 2), (70, 3), (100, 4)):
                bar = ("#" * (percent // 2)).ljust(50)
                end = "\n" if percent == 100 else "\r"
                text = FACTS["progress"]["stages"][stage]
                os.write(
                    1, f"\x1b[2K[{bar}] {percent}% {text} [Elapsed: 00:00:0{percent // 20}.5]{end}".encode()
                )

    # --- data ------------------------------------------------------------------------------------------

    def _dataset(self, x: Any, y: Any, batch_size: Any, sample_weight: Any) -> Any:
        if isinstance(x, tf.data.Dataset):
            return x
        if not isinstance(x, (np.ndarray, tf.Tensor, tuple, list, dict)):
            raise ValueError(f"{type(x).__name__} is no input that IPUs take")
        parts = x if y is None else ((x, y) if sample_weight is None else (x, y, sample_weight))
        length = len(tf.nest.flatten(x)[0])
        size = 32 if batch_size is None else batch_size
        if length % size:
            raise ValueError(f"{length} samples are not a multiple of the batch size {size}")
        return tf.data.Dataset.from_tensor_slices(parts).batch(size, drop_remainder=True)

    def _elements(self, dataset: Any) -> Any:
        """Elements as IPUs get them: an end is the end of the process, synthetic data is zeros."""
        flags = self._machine.flags
        words = flags.get("synthetic_data_categories", "").split(",")
        if "use_synthetic_data" in flags or "infeed" in words:
            while True:
                yield tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), dataset.element_spec)
        for element in dataset:
            yield tf.nest.map_structure(
                lambda t: tf.cast(t, tf.float32) if t.dtype == tf.float64 else t, element
            )
        raise ProcessAborted("Infeed dataset iterator out of range. Are you trying to dequeue more elements?")

    # --- replicas --------------------------------------------------------------------------------------

    def _open(self, replicas: int, training: bool) -> None:
        model = self._model
        metrics = [v for m in model.metrics for v in m.variables] if training else []
        self._local = [_variable(v) for v in [*model.non_trainable_weights, *metrics]]
        self._copies = [[v.numpy() for v in self._local] for _ in range(replicas)]

    def _load(self, replica: int) -> None:
        if len(self._copies) > 1:
            for variable, value in zip(self._local, self._copies[replica]):
                variable.assign(value)

    def _save(self, replica: int) -> None:
        if len(self._copies) > 1:
            self._copies[replica] = [v.numpy() for v in self._local]

    def cross_replica_mean(self, variable: Any) -> Any:
        """The mean over replicas of a variable that each has its own copy of."""
        if len(self._copies) == 1:
            return tf.convert_to_tensor(variable)
        for i, local in enumerate(self._local):
            if local is _variable(variable):
                self._averaged.append(i)
                return tf.constant(np.mean([copy[i] for copy in self._copies], axis=0, dtype=np.float32))
        raise NotImplementedError("the double averages variables that are not trained, and nothing else")

    # --- fit -------------------------------------------------------------------------------------------

    def _build(self, spec: Any) -> None:
        """Makes what Keras makes in its first step: the variables of losses and metrics."""
        x, y, w = _unpack(tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), spec))
        outputs = self._model(x, training=False)
        if _KERAS_3:
            self._model.compute_loss(x, y, outputs, w, training=False)
            if self._model._compile_metrics is not None:
                self._model._compile_metrics.update_state(y, outputs, w)
        else:
            self._model.compiled_loss(y, outputs, w)
            self._model.compiled_metrics.update_state(y, outputs, w)
        self._model.reset_metrics()

    def _losses(self, x: Any, y: Any, w: Any, outputs: Any, update: bool) -> Any:
        model = self._model
        if _KERAS_3:
            loss = model.compute_loss(x, y, outputs, w, training=True)
            if update:
                model._loss_tracker.update_state(loss)
                if model._compile_metrics is not None:
                    model._compile_metrics.update_state(y, outputs, w)
            return loss
        loss = model.compiled_loss(y, outputs, w, regularization_losses=model.losses)
        if update:
            model.compiled_metrics.update_state(y, outputs, w)
        return loss

    def _train_step(self, group: int) -> Any:
        """Gradients of one micro-batch (of each of ``group`` replicas that share batch norm statistics)."""
        name = f"train{group}"
        if name not in self._functions:
            model = self._model

            def step(elements: Any) -> Any:
                x = [_unpack(e)[0] for e in elements]
                merged = x[0] if group == 1 else tf.nest.map_structure(lambda *p: tf.concat(p, 0), *x)
                with tf.GradientTape() as tape:
                    outputs = model(merged, training=True)
                    parts = tf.split(outputs, group) if group > 1 else [outputs]
                    total = tf.add_n(
                        [self._losses(*_unpack(e), part, True) for e, part in zip(elements, parts)]
                    )
                    total = total / tf.cast(group, total.dtype)
                variables = [_variable(v) for v in model.trainable_weights]
                return tape.gradient(total, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)

            self._functions[name] = tf.function(step, autograph=False)
        return self._functions[name]

    def _execute(self, elements: Any, steps: int, replicas: int) -> None:
        extension, model = self._extension, self._model
        pipelined = bool(rules.stages_of(extension))
        count = (extension.pipelining if pipelined else extension.accumulation) or 1
        method = extension.reduction.name
        group = self._machine.config["leaves"]["norms.experimental.distributed_batch_norm_replica_group_size"]
        step = self._train_step(group)
        trained_statistics = [v.numpy() for v in map(_variable, model.non_trainable_weights)]
        for _ in range(steps // count):
            sums: List[Any] = [None] * replicas
            for n in range(count):
                for first in range(0, replicas, group):
                    batch = tuple(next(elements) for _ in range(group))
                    self._load(first)
                    gradients = step(batch)
                    for replica in range(first, first + group):
                        self._save(replica)
                    for replica in range(first, first + group):
                        sums[replica] = _accumulate(sums[replica], gradients, method, n, count)
            # Keras reduces with SUM, which IPUStrategy makes a cross_replica_sum.
            total = [sum(parts) for parts in zip(*sums)]
            self._load(0)
            self._averaged = []
            self._machine.replicas = self
            try:
                model.optimizer.apply_gradients(zip(total, _trainable(model)))
            finally:
                self._machine.replicas = None
            for i in set(self._averaged):
                for copy in self._copies:
                    copy[i] = self._local[i].numpy()
        if pipelined:
            # The SDK warns that it does not update moving statistics correctly: here, not at all.
            for variable, value in zip(map(_variable, model.non_trainable_weights), trained_statistics):
                variable.assign(value)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: Optional[int] = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: Optional[int] = None,
        shuffle: bool = True,
    ) -> Any:
        """``Model.fit`` on IPUs."""
        model, machine = self._model, self._machine
        _require_compiled(model)
        dataset = self._dataset(x, y, batch_size, sample_weight)
        rules.check_feed(dataset.element_spec)
        per_execution = self._steps_per_execution()
        replicas = rules.num_replicas(machine, self._extension)
        cardinality = int(dataset.cardinality())
        steps = rules.steps_per_replica(cardinality, steps_per_epoch, replicas, per_execution)
        per_execution = min(per_execution, steps)
        if cardinality >= 0 and cardinality < (epochs - initial_epoch) * steps:
            raise ValueError("the data set has too few elements")
        self._compile("fit", per_execution, dataset.element_spec)
        machine.note(
            "fit",
            model=model.name,
            steps_per_epoch=steps_per_epoch,
            per_execution=per_execution,
            epochs=epochs,
        )
        if machine.config["leaves"]["device_connection.type"].name == "PRE_COMPILE":
            return _History({})
        self._build(dataset.element_spec)
        handler = keras.callbacks.CallbackList(callbacks, add_history=True, model=model, epochs=epochs)
        handler.on_train_begin()
        elements = self._elements(dataset)
        for epoch in range(initial_epoch, epochs):
            model.reset_metrics()
            handler.on_epoch_begin(epoch)
            self._open(replicas, training=True)
            for done in range(0, steps, per_execution):
                self._execute(elements, per_execution, replicas)
                handler.on_train_batch_end(done + per_execution - 1, {})
            handler.on_epoch_end(epoch, self._results(replicas))
            self._load(0)
        handler.on_train_end()
        return model.history

    def _results(self, replicas: int) -> Dict[str, float]:
        """The last replica's metrics, or their mean over replicas if that was asked for and is no pipeline.

        Metrics that average over replicas by themselves are asked twice: once for what each replica has, and once
        more when all have been heard.
        """
        asked = _Asked()
        self._machine.replicas = asked
        try:
            for replica in range(replicas):
                self._read(replicas, replica)
            asked.close(replicas)
            return self._read(replicas, None)
        finally:
            self._machine.replicas = None

    def _read(self, replicas: int, only: Optional[int]) -> Dict[str, float]:

        def of(replica: int) -> Dict[str, float]:
            self._load(replica)
            if _KERAS_3:
                return {k: float(v) for k, v in self._model.get_metrics_result().items()}
            return {m.name: float(m.result()) for m in self._model.metrics}

        if only is not None:
            return of(only)
        method = self._extension.metric_reduction
        if method not in ("SUM", "MEAN") or rules.stages_of(self._extension):
            return of(replicas - 1)
        all_of = [of(r) for r in range(replicas)]
        sums = {k: sum(values[k] for values in all_of) for k in all_of[0]}
        return {k: v / replicas if method == "MEAN" else v for k, v in sums.items()}

    # --- evaluate and predict --------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """``Model.evaluate``: not used by the session, which predicts."""
        raise NotImplementedError("the double does not evaluate: predict, and compare on the host")

    def predict(
        self,
        x: Any,
        batch_size: Optional[int] = None,
        verbose: Any = 0,
        steps: Optional[int] = None,
        callbacks: Any = None,
    ) -> Any:
        """``Model.predict`` on IPUs."""
        machine, model = self._machine, self._model
        dataset = self._dataset(x, None, batch_size, None)
        per_execution = self._steps_per_execution()
        replicas = rules.num_replicas(machine, self._extension)
        each = rules.steps_per_replica(int(dataset.cardinality()), steps, replicas, per_execution)
        per_execution = min(per_execution, each)
        self._compile("predict", per_execution, dataset.element_spec)
        machine.note("predict", model=model.name, steps=each, per_execution=per_execution, replicas=replicas)
        if "predict" not in self._functions:

            def forward(element: Any) -> Any:
                return model(_unpack(element)[0], training=False)

            self._functions["predict"] = tf.function(forward, autograph=False)
        elements = self._elements(dataset)
        found = [self._functions["predict"](next(elements)) for _ in range(each * replicas)]
        if isinstance(found[0], (list, tuple)):
            return [np.concatenate([np.asarray(f[i]) for f in found]) for i in range(len(found[0]))]
        return np.concatenate([np.asarray(f) for f in found])


class _Asked:
    """Hears what each replica wants averaged, in the order of the calls, and answers with the means."""

    def __init__(self) -> None:
        self._heard: List[Any] = []
        self._means: List[Any] = []
        self._next = 0

    def close(self, replicas: int) -> None:
        """All replicas were heard."""
        each = len(self._heard) // replicas
        self._means = [np.mean(self._heard[i::each], axis=0, dtype=np.float32) for i in range(each)]

    def cross_replica_mean(self, value: Any) -> Any:
        if not self._means:
            self._heard.append(np.asarray(value))
            return value
        self._next += 1
        return tf.constant(self._means[(self._next - 1) % len(self._means)])


class _History:
    def __init__(self, history: Dict[str, Any]) -> None:
        self.history = history
        self.started = time.time()


def _trainable(model: Any) -> Any:
    return model.trainable_weights


def _require_compiled(model: Any) -> None:
    if getattr(model, "optimizer", None) is None:
        raise RuntimeError("You must compile your model before training/testing. Use model.compile()")


def _accumulate(sums: Any, gradients: Any, method: str, n: int, count: int) -> Any:
    if method == "RUNNING_MEAN":
        sums = [tf.zeros_like(g) for g in gradients] if sums is None else sums
        return [s * (n / (n + 1.0)) + g / (n + 1.0) for s, g in zip(sums, gradients)]
    scaled = [g / float(count) for g in gradients] if method == "MEAN" else list(gradients)
    return scaled if sums is None else [s + g for s, g in zip(sums, scaled)]
