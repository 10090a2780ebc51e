"""This program's optimizers as Keras optimizers, so that the SDK can accumulate and offload around them.

The arithmetic is that of :class:`ipucnn.training.optimizers.Optimizer`; state is kept there, by weight name, and goes
into the same checkpoints.  The learning rate is read from a table that is filled before each execution: every
weight update of an execution has its own rate, without a program of its own on the IPU.
"""

from typing import Any, Callable, List, Sequence

import tensorflow as tf
from tensorflow import keras

from ipucnn.compat import KERAS_3
from ipucnn.training.optimizers import Optimizer


def underlying(variable: Any) -> Any:
    """What a variable and its guises have in common.

    A layer of 16 bits has its 32-bit weights in Keras' AutoCastVariable; under PopDist an update is given the part of a
    mirrored variable.
    """
    variable = getattr(variable, "_variable", variable)
    reference = getattr(variable, "_distributed_container", None)
    container = reference() if callable(reference) else None
    return variable if container is None else container


class WeightUpdate:
    """What both kinds of Keras optimizers do with one weight's gradient.

    Args:
        optimizer: the arithmetic and its state.
        num_rates: weight updates of an execution.
        scale: what the gradients are multiplied by: the loss scale, and the number of replicas, because Keras'
            optimizers sum over replicas and ``IPUStrategy`` counts as one of them (``num_replicas_in_sync``), so
            that nothing divides.
        averaged: moving statistics, to be averaged over replicas once per weight update.
        mean: the mean of a tensor over replicas.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_rates: int,
        scale: float,
        averaged: Sequence[Any],
        mean: Callable[[Any], Any],
    ) -> None:
        self._optimizer, self._scale = optimizer, scale
        self._averaged, self._mean = list(averaged), mean
        self._index = {id(underlying(v)): index for index, v in enumerate(optimizer.variables)}
        self.resize(num_rates)

    def resize(self, num_rates: int) -> None:
        """Makes the table anew, for so many weight updates; what was compiled with the former one is void."""
        self.num_rates = num_rates
        self.rates = tf.Variable(tf.zeros([num_rates], tf.float32), trainable=False, name="learning_rates")

    def set_rates(self, first: int, rates: Sequence[float]) -> None:
        """Fills the table for the weight updates from number ``first`` on."""
        table = [0.0] * self.num_rates
        for offset, rate in enumerate(rates):
            table[(first + offset) % self.num_rates] = float(rate)
        self.rates.assign(table)

    def apply(self, gradient: Any, variable: Any, iterations: Any) -> List[Any]:
        """Updates one weight; the first one takes the moving statistics along.

        Each replica has moving statistics of its own.  Their recursion is linear, so averaging them once per weight
        update is the same as averaging the statistics of every micro-batch, and the host session's formula.
        """
        count = tf.cast(iterations, tf.float32)
        rate = tf.gather(self.rates, tf.cast(iterations, tf.int32) % self.num_rates)
        index = self._index[id(underlying(variable))]
        # Not in 16 bits: what the loss scale kept from underflowing would be lost again.
        gradient = tf.cast(gradient, tf.float32)
        if self._scale != 1.0:
            gradient = gradient / self._scale
        done = self._optimizer.apply_one(index, gradient, rate, count)
        if index == 0:
            done += [moving.assign(self._mean(moving)) for moving in self._averaged]
        return done


if KERAS_3:

    class DeviceOptimizer(keras.optimizers.Optimizer):
        """Keras 3, for the double."""

        def __init__(self, update: WeightUpdate) -> None:
            super().__init__(learning_rate=1.0, name="device_optimizer")
            self._update = update

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            from ipucnn.compat import tf_variable

            self._update.apply(tf.convert_to_tensor(gradient), tf_variable(variable), self.iterations.value)

        def get_config(self) -> Any:
            raise NotImplementedError("state is kept by weight name, in the session")

else:

    class DeviceOptimizer(keras.optimizers.Optimizer):  # type: ignore[no-redef]
        """Keras 2.6: only the hooks that every subclass has; ``minimize`` is left alone, as the SDK demands."""

        def __init__(self, update: WeightUpdate) -> None:
            super().__init__(name="device_optimizer")
            self._update = update

        def _create_slots(self, var_list: Any) -> None:
            pass

        def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
            return tf.group(*self._update.apply(grad, var, self.iterations))

        def get_config(self) -> Any:
            raise NotImplementedError("state is kept by weight name, in the session")
