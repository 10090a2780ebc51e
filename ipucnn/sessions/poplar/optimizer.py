"""Weight updates on IPUs: the host session's arithmetic in a Keras optimizer.

The optimizer is a Keras class, so that the SDK can accumulate gradients and offload state.  The arithmetic is that of
:class:`ipucnn.training.optimizers.Optimizer`, which keeps its state by weight name for checkpoints.  Learning rates
come from a table that is filled before each execution: each weight update has its own rate, and the IPUs need only one
program.
"""

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasVariable, Tensor, TfVariable
from ipucnn.compat import KERAS_3, tf_variable
from ipucnn.models.layers.micro_batches import moving_average, unbiased_variance
from ipucnn.models.names import is_moving_statistic, statistics_of
from ipucnn.sessions.poplar.model import DeviceModel, MovedByGradient
from ipucnn.training.optimizer_settings import OptimizerSettings
from ipucnn.training.optimizers import LossScaler, Optimizer, penalty_weight
from ipucnn.training.program import Program

ReplicaMean = Callable[[Tensor], Tensor]
"""Averages a tensor over replicas."""
Gradients = List[Tuple[Tensor, TfVariable]]
"""Pairs of a gradient and its variable."""


def make_optimizer(settings: OptimizerSettings, network: DeviceModel, program: Program) -> Optimizer:
    """Returns the arithmetic of a network's optimizer; moving statistics that have gradients are not its weights."""
    moved = statistics_of([*network.norms, *(norm.name for norm in network.moved_once)])
    ids, variables = {id(tf_variable(v)) for v in network.model.trainable_weights}, network.weights.items()
    weights = {name: v for name, v in variables if id(v) in ids and not is_moving_statistic(name)}
    statistics = {name: v for name, v in variables if name in moved}
    return Optimizer(settings, weights, statistics, network.penalties, penalty_weight(program))


def _underlying(variable: TfVariable) -> TfVariable:
    """Returns the variable below Keras's wrappers.

    A 16-bit layer has its 32-bit weights in an AutoCastVariable; under PopDist an update receives one component of a
    mirrored variable.
    """
    variable = getattr(variable, "_variable", variable)
    reference = getattr(variable, "_distributed_container", None)
    container = reference() if callable(reference) else None
    return variable if container is None else container


def _key(variable: KerasVariable) -> int:
    """Returns a number that a variable and its wrappers share."""
    return id(_underlying(tf_variable(variable)))


class StatisticsUpdate:
    """Moves the statistics of batch norm that move once per weight update; see :class:`MovedByGradient`.

    Args:
        norms: the batch norm layers.
        program: the Program with replicas and accumulation.
        mean: the function that averages a tensor over replicas.
    """

    def __init__(self, norms: Sequence[MovedByGradient], program: Program, mean: ReplicaMean) -> None:
        self._replicas, self._mean = program.num_replicas, mean
        is_sum = program.gradient_accumulation_reduction_method == "sum"
        self._steps = float(program.gradient_accumulation_count if is_sum else 1)
        self._pairs: List[Tuple[int, int]] = []
        self._of: Dict[int, Tuple[MovedByGradient, bool]] = {}
        for norm in norms:
            mean_key, variance_key = _key(norm.moving_mean), _key(norm.moving_variance)
            self._pairs.append((mean_key, variance_key))
            self._of.update({mean_key: (norm, False), variance_key: (norm, True)})

    def __contains__(self, variable: TfVariable) -> bool:
        return _key(variable) in self._of

    def add_spread(self, gradients: Gradients) -> Gradients:
        """Adds to one replica's variance the squared difference of its mean from the mean of all replicas, before
        gradients are summed over replicas."""
        if self._replicas == 1:
            return gradients
        by_key = {_key(variable): gradient for gradient, variable in gradients}
        for mean_key, variance_key in self._pairs:
            mean = tf.cast(by_key[mean_key], tf.float32)
            spread = tf.square((mean - self._mean(mean)) / self._steps) * self._steps
            by_key[variance_key] = tf.cast(by_key[variance_key], tf.float32) + spread
        return [(by_key[_key(variable)], variable) for _, variable in gradients]

    def move(self, gradient: Tensor, variable: TfVariable) -> Tensor:
        """Updates one moving statistic from its gradients, summed over replicas."""
        norm, is_variance = self._of[_key(variable)]
        new = tf.cast(gradient, tf.float32) / (self._steps * self._replicas)
        if is_variance:
            new = unbiased_variance(new, norm.numbers * self._replicas)
        return variable.assign(moving_average(tf.convert_to_tensor(variable), new, norm.momentum))


class WeightUpdate:
    """Applies gradients; both generations of Keras optimizers call it.

    Args:
        optimizer: the arithmetic and its state.
        num_rates: the weight updates of an execution.
        scale: the factor in the gradients: the loss scale times the number of replicas.  Keras's optimizers sum over
            replicas, and nothing divides, because ``IPUStrategy`` counts as one replica (``num_replicas_in_sync``).
        averaged: the moving statistics that are averaged over replicas once per weight update.
        mean: the function that averages a tensor over replicas.
        statistics: the object that moves the statistics that move once per weight update; None: there are none.
        scaler: automatic loss scaling, whose scale is not part of ``scale``; None: the loss scale is fixed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_rates: int,
        scale: float,
        averaged: Sequence[TfVariable],
        mean: ReplicaMean,
        statistics: Optional[StatisticsUpdate] = None,
        scaler: Optional[LossScaler] = None,
    ) -> None:
        self._statistics, self._scaler = statistics, scaler
        self._beyond: Optional[Tensor] = None
        self._optimizer, self._scale = optimizer, scale
        self._averaged, self._mean = list(averaged), mean
        self._names = {_key(v): name for name, v in optimizer.weights.items()}
        self.resize(num_rates)

    def resize(self, num_rates: int) -> None:
        """Makes a new table of learning rates for ``num_rates`` weight updates; programs must be compiled again."""
        self.num_rates = num_rates
        self.rates = tf.Variable(tf.zeros([num_rates], tf.float32), trainable=False, name="learning_rates")

    def set_rates(self, first: int, rates: Iterable[float]) -> None:
        """Fills the table for the weight updates from number ``first`` on."""
        table = [0.0] * self.num_rates
        for offset, rate in enumerate(rates):
            table[(first + offset) % self.num_rates] = float(rate)
        self.rates.assign(table)

    def apply(self, gradient: Tensor, variable: TfVariable, iterations: Tensor) -> List[Tensor]:
        """Updates one weight, or a statistic that has a gradient.  The first weight's update also averages statistics.

        Each replica has its own moving statistics.  Their recursion is linear, so averaging them once per weight update
        equals averaging the statistics of every micro-batch, which is the host session's formula.
        """
        count = tf.cast(iterations, tf.float32)
        if self._statistics is not None and variable in self._statistics:
            moved = self._statistics.move(gradient, variable)
            with tf.control_dependencies([moved]):
                return [moved, *self._optimizer.average_statistics(count, only=_underlying(variable))]
        rate = tf.gather(self.rates, tf.cast(iterations, tf.int32) % self.num_rates)
        name = self._names[_key(variable)]
        is_first = name == next(iter(self._optimizer.weights))
        # In 32 bits: in 16 bits, values that the loss scale kept from underflowing would be lost.
        gradient = tf.cast(gradient, tf.float32)
        if self._scale != 1.0:
            gradient = gradient / self._scale
        done = self._optimizer.apply_one(name, gradient, rate, count)
        if is_first and self._scaler is not None:
            done += self._scaler.rescale(self._beyond, iterations)
        if is_first:
            done += [moving.assign(self._mean(moving)) for moving in self._averaged]
            if self._statistics is None:
                with tf.control_dependencies(done):
                    done += self._optimizer.average_statistics(count)
        return done

    def before_reduction(self, gradients: Gradients) -> Gradients:
        """Returns one replica's accumulated gradients, ready to be summed over replicas."""
        return gradients if self._statistics is None else self._statistics.add_spread(gradients)

    def after_reduction(self, gradients: Gradients) -> Gradients:
        """Adds the penalties to the gradients of a weight update, summed over replicas, clips them, and removes the
        automatic loss scale."""
        optimizer = self._optimizer
        if self._scaler is None and not optimizer.settings.clip_gradient_norm and not optimizer.penalties:
            return gradients
        trained = [n for n, (_, v) in enumerate(gradients) if v not in (self._statistics or ())]
        values = [gradients[n][0] for n in trained]
        if self._scaler is not None:
            # Here the scale is the number of replicas: the host checks the mean over replicas.
            values, self._beyond = self._scaler.unscaled(values, self._scale)
        names = [self._names[_key(gradients[n][1])] for n in trained]
        values = optimizer.penalized(names, values, self._scale)
        clipped = dict(zip(trained, optimizer.clipped(values, self._scale)))
        return [(clipped.get(n, gradient), variable) for n, (gradient, variable) in enumerate(gradients)]


if KERAS_3:

    class DeviceOptimizer(keras.optimizers.Optimizer):
        """Keras 3, which only the test double has."""

        def __init__(self, update: WeightUpdate) -> None:
            super().__init__(learning_rate=1.0, name="device_optimizer")
            self._update = update

        def _transform_unaggregated_gradients(self, grads_and_vars: Gradients) -> Gradients:
            return self._update.before_reduction(grads_and_vars)

        def apply_gradients(self, grads_and_vars: Gradients) -> Any:
            return super().apply_gradients(self._update.after_reduction(list(grads_and_vars)))

        def update_step(self, gradient: Tensor, variable: TfVariable, learning_rate: Tensor) -> None:
            self._update.apply(tf.convert_to_tensor(gradient), tf_variable(variable), self.iterations.value)

else:

    class DeviceOptimizer(keras.optimizers.Optimizer):  # type: ignore[no-redef]
        """Keras 2.6: overrides only the hooks of subclasses, and not ``minimize``, which the SDK forbids."""

        def __init__(self, update: WeightUpdate) -> None:
            super().__init__(name="device_optimizer")
            self._update = update

        def _transform_unaggregated_gradients(self, grads_and_vars: Gradients) -> Gradients:
            return self._update.before_reduction(grads_and_vars)

        def _transform_gradients(self, grads_and_vars: Gradients) -> Gradients:
            return self._update.after_reduction(grads_and_vars)

        def _create_slots(self, var_list: Sequence[TfVariable]) -> None:
            pass

        def _resource_apply_dense(self, grad: Tensor, var: TfVariable, apply_state: object = None) -> Tensor:
            return tf.group(*self._update.apply(grad, var, self.iterations))
