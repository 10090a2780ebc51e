"""The replicas of one model: each one's own values, and the reductions over all of them, in all instances."""

from functools import partial
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf
from tensorflow import keras

from .distribution import components

KERAS_3 = int(keras.__version__.split(".")[0]) >= 3


def variable_of(weight: Any) -> Any:
    """Returns TensorFlow's variable of a Keras weight; for a container, the component that is on the IPUs."""
    return components(weight.value if KERAS_3 and not isinstance(weight, tf.Variable) else weight)[0]


class Replicas:
    """Replicas run one after the other, each with its own copy of untrained variables (moving statistics, metrics)."""

    def __init__(self, machine: Any, model: Any) -> None:
        self._machine, self._model = machine, model
        self._copies: List[List[Any]] = []
        self._local: List[Any] = []
        self._averaged: List[int] = []
        self._halves: List[Any] = []

    def open(self, count: int) -> None:
        """Starts every replica with the model's values."""
        model = self._model
        metrics = [v for m in model.metrics for v in m.variables]
        self._local = [variable_of(v) for v in [*model.non_trainable_weights, *metrics]]
        self._copies = [[v.numpy() for v in self._local] for _ in range(count)]
        self._halves = _half_batch_norms(model)
        self.round_halves()

    def load(self, replica: int) -> None:
        """Copies a replica's values into the model."""
        if len(self._copies) > 1:
            for variable, value in zip(self._local, self._copies[replica]):
                variable.assign(value)

    def save(self, replica: int) -> None:
        """Copies the model's values into a replica."""
        self.round_halves()
        if len(self._copies) > 1:
            self._copies[replica] = [v.numpy() for v in self._local]

    def round_halves(self) -> None:
        """Rounds float16 batch norms: the SDK keeps their parameters in float16, stock Keras in float32."""
        for variable in self._halves:
            variable.assign(tf.cast(tf.cast(variable, tf.float16), variable.dtype))

    def sum_gradients(self, sums: List[List[Any]]) -> List[Any]:
        """Sums a weight's gradients, one list for each replica, over the replicas of all instances."""
        local = [sum(parts[1:], parts[0]) for parts in zip(*sums)]
        if self._machine.num_processes == 1:
            return local
        everywhere = self._machine.gather_on_ipus("gradients", [g.numpy() for g in local])
        return [tf.constant(sum(parts[1:], parts[0])) for parts in zip(*everywhere)]

    # --- cross_replica_sum and _mean in a weight update ------------------------------------------------

    def reduced(self, x: Any, mean: bool) -> Any:
        """Returns the sum or mean of a variable that each replica has its own copy of."""
        for i, local in enumerate(self._local):
            if local is variable_of(x):
                self._averaged.append(i)
                result = tf.numpy_function(partial(self._over_all, i, mean), [], local.dtype)
                result.set_shape(local.shape)
                return result
        raise NotImplementedError("the double reduces variables that are not trained, and nothing else")

    def _over_all(self, index: int, mean: bool) -> Any:
        local = (
            [copy[index] for copy in self._copies] if len(self._copies) > 1 else [self._local[index].numpy()]
        )
        parts = [part for one in self._machine.gather_on_ipus("cross_replica", local) for part in one]
        total = np.sum(parts, axis=0, dtype=np.float32)
        return (total / len(parts) if mean else total).astype(local[0].dtype)

    def take_averaged(self) -> None:
        """Gives every replica the variables that were assigned a mean in a weight update."""
        self.round_halves()
        if len(self._copies) > 1:
            for i in set(self._averaged):
                for copy in self._copies:
                    copy[i] = self._local[i].numpy()


def _half_batch_norms(model: Any) -> List[Any]:
    """Returns variables of batch norms whose policy is float16 and that Keras holds in float32."""
    variables = []
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization) and _variable_type(layer) == "float16":
            variables += [v for v in map(variable_of, layer.weights) if v.dtype != tf.float16]
    return variables


def _variable_type(layer: Any) -> str:
    policy = layer.dtype_policy if KERAS_3 else layer._dtype_policy
    return str(policy.variable_dtype)


class Reductions:
    """Collects the values that each replica's metrics reduce, in call order, then returns the reduced values."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self._collected: List[Any] = []
        self._reduced_from: List[Any] = []
        self._next = 0

    def close(self, replicas: int) -> bool:
        """Ends the collection after all replicas of this instance; returns whether any of them reduced a value."""
        everywhere = self._machine.gather_on_ipus("metrics", self._collected) if self._collected else [[]]
        each = len(self._collected) // replicas
        self._reduced_from = [[value for one in everywhere for value in one[i::each]] for i in range(each)]
        return bool(self._reduced_from)

    def reduced(self, x: Any, mean: bool) -> Any:
        """Adds the operation that reduces when it runs, while metrics or a hook of the optimizer are traced."""
        machine, x = self._machine, tf.convert_to_tensor(x)
        result = tf.numpy_function(lambda value: machine.replicas.reduction_of(value, mean), [x], x.dtype)
        result.set_shape(x.shape)
        return result

    def reduction_of(self, value: Any, mean: bool) -> Any:
        """Takes one value of one replica, or returns its reduction."""
        value = np.asarray(value)
        if not self._reduced_from:
            self._collected.append(value)
            return value
        self._next += 1
        parts = self._reduced_from[(self._next - 1) % len(self._reduced_from)]
        total = np.sum(parts, axis=0, dtype=np.float32)
        return (total / len(parts) if mean else total).astype(value.dtype)


def combine(machine: Any, results: List[Dict[str, float]], mean: bool) -> Dict[str, float]:
    """Sums or averages every replica's metrics over the replicas of all instances."""
    names = list(results[0])
    rows = [np.array([one[name] for name in names], np.float64) for one in results]
    rows = [row for one in machine.gather_on_ipus("metrics", rows) for row in one]
    total = np.sum(rows, axis=0) / (len(rows) if mean else 1)
    return {name: float(value) for name, value in zip(names, total)}
