"""``fit``, ``evaluate`` and ``predict`` of a model on the test double: the SDK's checks, then stock TensorFlow.

Replicas run one after the other; gradients are accumulated per replica and summed over replicas before the optimizer
is applied once.  All code that IPUs would run is traced in the strategy's ``run``.
"""

import hashlib
import json
import os
from typing import Any, Dict, List, Set

import numpy as np
import tensorflow as tf
from tensorflow import keras

from . import rules
from .errors import invalid
from .facts import FACTS
from .feeding import ARRAYS, Data, unpack
from .replicas import KERAS_3, Reductions, Replicas, combine, variable_of
from .rounding import rounded_at_random

# Arguments of fit that the test double does not implement; the session trains one epoch at a time.
_LACKING = ("validation_split", "validation_data", "class_weight", "callbacks", "initial_epoch", "verbose")


class Engine:
    """Runs one model."""

    def __init__(self, extension: Any) -> None:
        self._extension, self._model = extension, extension.model
        self._machine = extension.machine
        self._ready: Dict[Any, int] = {}
        self._functions: Dict[str, Any] = {}
        self._written: Set[int] = set()
        self._built = False
        self._replicas = Replicas(self._machine, self._model)

    def forget(self) -> None:
        """Drops compiled programs, as every change of options and every ``compile`` does."""
        self._ready, self._functions, self._built = {}, {}, False

    def _run(self, name: str, make: Any, *args: Any) -> Any:
        """Runs a function in a replica's context, traced on its first call; without a device it is only traced."""
        if name not in self._functions:
            self._functions[name] = tf.function(self._placed(name, make()), autograph=False)
        function, strategy = self._functions[name], self._extension.strategy
        with strategy.scope():
            if not self._machine.is_precompiling:
                return strategy.run(function, args=args)
            traced = strategy.extended.call_for_each_replica(lambda: function.get_concrete_function(*args))
        self._written.update(_written(traced.graph))
        return tf.nest.map_structure(
            lambda out: None if out is None else tf.zeros(out.shape, out.dtype), traced.structured_outputs
        )

    def _fill_with_zeros(self) -> None:
        """Fills variables that a program writes with zeros: without a device, all outputs of a program are zeros."""
        for handle in self._written:
            variable = self._machine.placed.get(handle)
            if variable is not None:
                variable.assign(tf.zeros(variable.shape, variable.dtype))

    def _placed(self, name: str, function: Any) -> Any:
        """Wraps a function to check that its variables are on the IPUs, and to note what rounds stochastically."""
        machine = self._machine

        def call(*args: Any) -> Any:
            outputs = function(*args)
            graph = tf.compat.v1.get_default_graph()
            machine.check_placed(graph)
            behaviour = machine.config["leaves"]["floating_point_behaviour.esr"].name
            machine.rounded_at_random[self._model.name, name] = rounded_at_random(graph, behaviour)
            return outputs

        return call

    # --- compiling -------------------------------------------------------------------------------------

    def _steps_per_execution(self) -> int:
        steps = getattr(self._model, "_steps_per_execution", None)
        if steps is None:
            steps = getattr(self._model, "steps_per_execution", None)
        if steps is None:  # never compiled
            return 1
        return int(steps.numpy()) if hasattr(steps, "numpy") else int(steps)

    def _compile(self, kind: str, steps: int, spec: Any) -> int:
        """Checks and "compiles" a program; returns the number of its replicas."""
        machine, extension = self._machine, self._extension
        replicas = rules.num_replicas(machine, extension)
        key = (kind, steps, repr(tf.nest.map_structure(lambda s: (s.shape, s.dtype.name), spec)))
        if self._ready.get(key):
            return self._ready[key]
        if getattr(self._model, "run_eagerly", False):
            raise RuntimeError("run_eagerly is not supported on IPUs")
        training = kind == "fit"
        pipelined = bool(rules.stages_of(extension))
        if pipelined or (training and (extension.accumulation or 1) > 1):
            _check_optimizer(getattr(self._model, "optimizer", None))
        if training:
            count = rules.accumulation(extension, pipelined)
            if steps % count:
                raise RuntimeError(
                    f"steps_per_execution {steps} is not a multiple of gradient_accumulation_steps_per_replica {count}"
                )
            if not pipelined and count > 1:
                rules.check_accumulation(extension)
            if pipelined or count > 1:
                keywords_of_update = (
                    extension.pipelining_keywords if pipelined else extension.accumulation_keywords
                )
                rules.check_remote_memory(machine, keywords_of_update)
                rules.check_shared_out_state(machine, keywords_of_update, replicas)
        rules.check_io_tiles(machine)
        if pipelined:
            rules.check_pipeline(machine, extension, training, steps)
        rules.check_queues(extension)
        rules.check_feed(spec)
        rules.check_poplar(machine, extension, replicas)
        self._ready[key] = replicas
        self._announce(key)
        if training:
            keywords = extension.pipelining_keywords if pipelined else extension.accumulation_keywords
            rules.check_loaded(machine, keywords if pipelined or count > 1 else {})
        if machine.config["leaves"]["device_connection.type"].name == "NEVER":
            # poplar_executable.cc
            raise invalid("Trying to run an executable on a device that was configured for compilation only.")
        return replicas

    def _announce(self, key: Any) -> None:
        """Writes the driver's progress bar to file descriptor 1, unless the program is in the executable cache.

        The cache's key has the number of IPUs, but not which device is attached, or when.
        """
        machine = self._machine
        machine.programs.append((self._model.name, *key))
        folder = machine.flags.get("executable_cache_path")
        elsewhere = (
            "device_connection.",
            "auto_select_ipus",
            "select_ipus",
            "experimental.multi_replica_distribution.",
        )
        leaves = {k: str(v) for k, v in machine.config["leaves"].items() if not k.startswith(elsewhere)}
        # Not the model's configuration: Keras numbers names, so they differ from process to process.
        shapes = [
            (layer.name, [str(part.shape) for part in tf.nest.flatten(layer.output)])
            for layer in self._model.layers
        ]
        text = json.dumps([key, leaves, machine.total_ipus, shapes], sort_keys=True)
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

    # --- fit -------------------------------------------------------------------------------------------

    def _build(self, spec: Any) -> None:
        """Makes the variables of losses, metrics and the optimizer, which Keras makes in its first step."""
        if self._built:
            return
        model, self._built = self._model, True
        x, y, w = unpack(tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), spec))

        def first() -> None:
            outputs = model(x, training=False)
            if KERAS_3:
                model.compute_loss(x, y, outputs, w, training=False)
                if model._compile_metrics is not None:
                    model._compile_metrics.update_state(y, outputs, w)
                if not model.optimizer.built:
                    model.optimizer.build(model.trainable_variables)
            else:
                model.compiled_loss(y, outputs, w)
                model.compiled_metrics.update_state(y, outputs, w)

        with self._extension.strategy.scope():
            self._extension.strategy.extended.call_for_each_replica(first)
            model.reset_metrics()

    def _losses(self, x: Any, y: Any, w: Any, outputs: Any) -> Any:
        model = self._model
        if KERAS_3:
            loss = model.compute_loss(x, y, outputs, w, training=True)
            model._loss_tracker.update_state(loss)
            if model._compile_metrics is not None:
                model._compile_metrics.update_state(y, outputs, w)
            return loss
        loss = model.compiled_loss(y, outputs, w, regularization_losses=model.losses)
        model.compiled_metrics.update_state(y, outputs, w)
        return loss

    def _gradients(self, elements: Any) -> Any:
        """Computes the gradients of one micro-batch (one of each replica if several share batch norm statistics)."""
        model, group = self._model, len(elements)

        def step(*elements: Any) -> Any:
            x = [unpack(e)[0] for e in elements]
            merged = x[0] if group == 1 else tf.nest.map_structure(lambda *p: tf.concat(p, 0), *x)
            with tf.GradientTape() as tape:
                outputs = model(merged, training=True)
                parts = tf.split(outputs, group) if group > 1 else [outputs]
                total = tf.add_n([self._losses(*unpack(e), part) for e, part in zip(elements, parts)])
                total = total / tf.cast(group, total.dtype)
            gradients = tape.gradient(total, [variable_of(v) for v in model.trainable_weights])
            _check_gradients(gradients, model.trainable_weights)
            return gradients

        return self._run(f"train{group}", lambda: step, *elements)

    def _transformed(self, sums: List[Any]) -> List[Any]:
        """Returns each replica's gradients after the optimizer's hook that Keras calls before summing over replicas.

        A hook that reduces over replicas runs twice, as metrics do.
        """
        hook = getattr(self._model.optimizer, "_transform_unaggregated_gradients", None)
        if hook is None:
            return sums
        trained = list(self._model.trainable_weights)

        def transform(*given: Any) -> List[Any]:
            return [g for g, _ in hook(list(zip(given, trained)))]

        self._machine.replicas = reductions = Reductions(self._machine)
        try:
            transformed = [self._run("transform", lambda: transform, *one) for one in sums]
            if reductions.close(len(sums)):
                transformed = [self._run("transform", lambda: transform, *one) for one in sums]
        finally:
            self._machine.replicas = None
        return transformed

    def _apply(self, gradients: List[Any]) -> None:
        """Runs one weight update: the optimizer in a graph, as in the SDK."""
        model = self._model
        trained = list(model.trainable_weights)

        def apply(*given: Any) -> None:
            # Keras 2 would sum them over replicas here.
            summed = {} if KERAS_3 else {"experimental_aggregate_gradients": False}
            model.optimizer.apply_gradients(list(zip(given, trained)), **summed)

        self._machine.replicas = self._replicas
        try:
            self._run("apply", lambda: apply, *gradients)
        finally:
            self._machine.replicas = None

    def _execute(self, elements: Any, steps: int, count: int) -> None:
        extension, model, replicas = self._extension, self._model, self._replicas
        pipelined = bool(rules.stages_of(extension))
        accumulates = rules.accumulation(extension, pipelined)
        method = extension.reduction.name
        group = rules.statistics_group(self._machine, count)
        statistics = [v.numpy() for v in map(variable_of, model.non_trainable_weights)]
        for _ in range(steps // accumulates):
            sums: List[Any] = [None] * count
            for n in range(accumulates):
                for first in range(0, count, group):
                    batch = [next(elements) for _ in range(group)]
                    replicas.load(first)
                    before = _moving_variances(model, group)
                    gradients = self._gradients(batch)
                    _unbias_as_a_replica(before, group, int(unpack(batch[0])[1].shape[0]))
                    for replica in range(first, first + group):
                        replicas.save(replica)
                        sums[replica] = _accumulate(sums[replica], gradients, method, n, accumulates)
            # Keras reduces with SUM, which IPUStrategy turns into a cross_replica_sum.
            total = replicas.sum_gradients(self._transformed(sums))
            replicas.load(0)
            self._apply(total)
            replicas.take_averaged()
        if pipelined:
            # The SDK warns that it does not update moving statistics correctly: here they are not updated.
            for variable, value in zip(map(variable_of, model.non_trainable_weights), statistics):
                variable.assign(value)

    def fit(
        self,
        *,
        x: Any,
        y: Any,
        batch_size: Any,
        epochs: int,
        sample_weight: Any,
        steps_per_epoch: Any,
        **others: Any,
    ) -> Any:
        """Trains as ``Model.fit`` on IPUs.  Keras' other arguments only matter with validation data or a generator."""
        model, machine = self._model, self._machine
        _require_compiled(model)
        if others["validation_split"] and isinstance(x, tf.data.Dataset):
            raise ValueError("validation_split takes tensors and arrays only")
        for name in _LACKING:
            if others[name]:
                raise NotImplementedError(f"the double lacks {name} of fit")
        if epochs != 1:
            raise NotImplementedError("the double trains one epoch")
        if isinstance(x, ARRAYS):
            raise NotImplementedError("the double trains on data sets")
        data = Data(x, y, sample_weight, batch_size, steps_per_epoch)
        spec = data.dataset.element_spec
        rules.check_feed(spec)
        per_execution = self._steps_per_execution()
        replicas = rules.num_replicas(machine, self._extension)
        steps = data.steps_per_replica(replicas, per_execution)
        per_execution = min(per_execution, steps)
        self._compile("fit", per_execution, spec)
        machine.note("fit", model=model.name, steps_per_epoch=steps_per_epoch, per_execution=per_execution)
        self._build(spec)
        elements, logs = data.elements(machine), {}
        model.reset_metrics()
        self._replicas.open(replicas)
        for _ in range(steps // per_execution):
            self._execute(elements, per_execution, replicas)
            logs = self._results(replicas)
        self._replicas.load(0)
        self._fill_with_zeros()
        model.history = keras.callbacks.History()
        model.history.set_model(model)
        model.history.on_train_begin()
        model.history.on_epoch_end(0, logs)
        return model.history

    def _results(self, count: int) -> Dict[str, float]:
        """Returns the last replica's metrics, or those of all replicas reduced, if requested and not in a pipeline.

        Metrics that reduce over replicas themselves run twice: first to collect each replica's values, then with the
        reduced values.
        """
        if self._machine.is_synthetic("outfeed"):
            return dict.fromkeys(self._read(0), 0.0)
        reductions = Reductions(self._machine)
        self._machine.replicas = reductions
        try:
            for replica in range(count):
                self._read(replica)
            reductions.close(count)
            method = self._extension.metric_reduction
            if method == "NONE" or rules.stages_of(self._extension):
                return self._read(count - 1)
            if method == "LIST":
                raise NotImplementedError("the double has no metrics in lists")
            return combine(self._machine, [self._read(r) for r in range(count)], method == "MEAN")
        finally:
            self._machine.replicas = None

    def _read(self, replica: int) -> Dict[str, float]:
        """Computes one replica's metrics in a graph."""
        model = self._model

        def results() -> Any:
            if KERAS_3:
                return model.get_metrics_result()
            return {m.name: m.result() for m in model.metrics}

        self._replicas.load(replica)
        return {k: float(v) for k, v in self._run("metrics", lambda: results).items()}

    def _forward(self, elements: List[Any]) -> List[Any]:
        """Returns the outputs of replicas that share batch norm statistics, of one micro-batch each.

        Their micro-batches are one batch here.  Outputs with one row per sample are split again; other outputs go to
        each replica unchanged.
        """
        model, group = self._model, len(elements)

        def forward(*elements: Any) -> Any:
            x = [unpack(e)[0] for e in elements]
            if group == 1:
                return [model(x[0], training=False)]
            merged = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *x)
            size = int(tf.nest.flatten(merged)[0].shape[0])
            outputs = model(merged, training=False)
            _check_samples_stay_apart(tf.compat.v1.get_default_graph(), size)
            each = tf.nest.map_structure(
                lambda y: tf.split(y, group) if y.shape[0] == size else [y] * group, outputs
            )
            flat = [each] if hasattr(outputs, "shape") else each
            parts = list(zip(*flat))
            return (
                [part[0] for part in parts] if hasattr(outputs, "shape") else [list(part) for part in parts]
            )

        return list(self._run(f"predict{group}", lambda: forward, *elements))

    # --- evaluate and predict --------------------------------------------------------------------------

    def evaluate(self, **arguments: Any) -> Any:
        """Evaluates as ``Model.evaluate``: the session does not use it, it predicts."""
        raise NotImplementedError("the double lacks evaluate: predict, and compare on the host")

    def predict(self, *, x: Any, batch_size: Any, steps: Any, callbacks: Any, **others: Any) -> Any:
        """Predicts as ``Model.predict`` on IPUs."""
        machine, model = self._machine, self._model
        if callbacks:
            raise NotImplementedError("the double lacks callbacks of predict")
        data = Data(x, batch_size=batch_size, steps=steps)
        spec = data.dataset.element_spec
        per_execution = self._steps_per_execution()
        replicas = rules.num_replicas(machine, self._extension)
        each = data.steps_per_replica(replicas, per_execution)
        per_execution = min(per_execution, each)
        self._compile("predict", per_execution, spec)
        machine.note("predict", model=model.name, steps=each, per_execution=per_execution, replicas=replicas)

        elements = data.elements(machine)
        group = rules.statistics_group(machine, replicas)
        results = [
            outputs
            for _ in range(each * replicas // group)
            for outputs in self._forward([next(elements) for _ in range(group)])
        ]
        if machine.is_precompiling:
            # One dequeue follows every execution; it returns one element of each replica.
            results = results[: each // per_execution * replicas]
        elif machine.is_synthetic("outfeed"):
            # _get_all_batch_results: zeros of the batches of one replica.
            results = [tf.nest.map_structure(tf.zeros_like, one) for one in results[:each]]
        if isinstance(results[0], (list, tuple)):
            return [np.concatenate([np.asarray(f[i]) for f in results]) for i in range(len(results[0]))]
        return np.concatenate([np.asarray(f) for f in results])


def _require_compiled(model: Any) -> None:
    if getattr(model, "optimizer", None) is None:
        raise RuntimeError("You must compile your model before training/testing. Use model.compile()")


def _check_optimizer(optimizer: Any) -> None:
    """Checks that ``minimize`` of a class is its parent's, which gradient accumulation requires."""
    if optimizer is None:
        return
    kind, parent = type(optimizer).__mro__[:2]
    if getattr(kind, "minimize", None) is not getattr(parent, "minimize", None):
        raise ValueError("the optimizer overrides minimize and cannot accumulate gradients")


def _check_gradients(gradients: List[Any], weights: List[Any]) -> None:
    """Checks that every weight has a gradient, with accumulation and without."""
    missing = [w.name for g, w in zip(gradients, weights) if g is None]
    if missing:
        raise ValueError(f"Variable {missing[0]} has `None` for gradient.")


def _check_samples_stay_apart(graph: Any, size: int) -> None:
    """Refuses sums over samples outside of batch norm's operation: here they would include all replicas of a group."""
    for op in graph.get_operations():
        if op.type not in ("Mean", "Sum", "Max", "Min", "Prod") or op.inputs[0].shape[:1] != (size,):
            continue
        axes = np.ravel(tf.get_static_value(op.inputs[1]))
        if 0 in [int(axis) % len(op.inputs[0].shape) for axis in axes]:
            raise NotImplementedError(f"the double lacks {op.type} over the samples of replicas: {op.name}")


def _written(graph: Any) -> Set[int]:
    """Returns the ``id`` of handles of the variables that a traced function writes, itself or in a branch or loop."""
    outer = {inner.name: id(handle) for handle, inner in graph.captures}
    kinds = ("Assign", "ResourceApply", "ResourceScatter", "If", "While", "Case")
    writes = [op for op in graph.get_operations() if op.type.startswith(kinds)]
    return {outer[tensor.name] for op in writes for tensor in op.inputs if tensor.name in outer}


def _is_stock_of_keras_3(layer: Any) -> bool:
    return KERAS_3 and isinstance(layer, keras.layers.BatchNormalization)


def _moving_variances(model: Any, group: int) -> List[Any]:
    """Returns (layer, its moving variance) of each batch norm whose variance differs from that of IPUs."""
    variances = [(layer, getattr(layer, "moving_variance", None)) for layer in model.layers]
    return [
        (layer, variable_of(v).numpy())
        for layer, v in variances
        if v is not None and (group > 1 or _is_stock_of_keras_3(layer))
    ]


def _unbias_as_a_replica(before: List[Any], group: int, micro_batch_size: int) -> None:
    """Makes moving variances unbiased as IPUs do: those of a group with N/(N-1) of one replica's N.

    Those of stock Keras 3, which are biased, are corrected, too; the SDK has Keras 2.6 and its kernel's variance.
    """
    for layer, old in before:
        variable, momentum = variable_of(layer.moving_variance), layer.momentum
        if np.array_equal(variable.numpy(), old):
            continue  # not moved: a layer whose statistics wait for the weight update
        numbers = micro_batch_size * int(np.prod([int(n) for n in layer.output.shape[1:-1]]))
        group_numbers = numbers * group
        biased = (variable.numpy().astype(np.float64) - momentum * old) / (1 - momentum)
        if not _is_stock_of_keras_3(layer):
            biased *= (group_numbers - 1) / group_numbers
        local = biased * numbers / max(numbers - 1, 1)
        variable.assign((momentum * old + (1 - momentum) * local).astype(old.dtype))


def _accumulate(sums: Any, gradients: Any, method: str, n: int, count: int) -> Any:
    if count == 1:
        return gradients
    if method == "RUNNING_MEAN":
        sums = [tf.zeros_like(g) for g in gradients] if sums is None else sums
        return [s * (n / (n + 1.0)) + g / (n + 1.0) for s, g in zip(sums, gradients)]
    scaled = [g / float(count) for g in gradients] if method == "MEAN" else list(gradients)
    return scaled if sums is None else [s + g for s, g in zip(sums, scaled)]
