"""Training on IPUs: batches, loss and optimizer.  One execution is one ``fit`` of one epoch.

All executions take their batches from one iterator.  Batches that are prefetched at the end of one execution therefore
begin the next, and events happen at the same weight updates as on the host.  The SDK keeps the compiled program from
one ``fit`` to the next.

- Batches are static micro-batches of int32 labels, accumulation step by accumulation step, replica by replica, as on
  the host.
- Loss and metrics are Keras classes with this program's formulas, not Keras's reductions: the loss is the mean over a
  micro-batch, in float32, times the loss scale; the metrics are means over the real samples of an execution.
- Optimizers are Keras classes, too, so that the SDK can accumulate gradients and offload state.  The arithmetic is that
  of :class:`ipucnn.training.optimizers.Optimizer`, which keeps its state by weight name for checkpoints.  Learning
  rates come from a table that is filled before each execution: each weight update has its own rate, and the IPUs need
  only one program.
"""

import zlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import Tensor, TfDataset, TfVariable
from ipucnn.compat import KERAS_3, tf_variable
from ipucnn.models.names import MOVING_STATISTICS, is_moving_statistic
from ipucnn.sessions.device_preprocessing import Preprocessing
from ipucnn.sessions.poplar.device import Device
from ipucnn.sessions.poplar.model import DeviceModel, MovedByGradient
from ipucnn.sessions.processes import Instances
from ipucnn.training.losses import LossFunction, correct, padding_scale
from ipucnn.training.optimizers import LossScaler, Optimizer, OptimizerSettings
from ipucnn.training.program import SEED_MASK, Program
from ipucnn.training.schedules import Schedule

# Computes the mean of a tensor over replicas.
_Mean = Callable[[Tensor], Tensor]
Gradients = List[Tuple[Tensor, TfVariable]]
"""Pairs of a gradient and its variable."""


def _micro_batches(dataset: TfDataset, size: int) -> TfDataset:
    """A data set in elements of ``size`` samples."""
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape[0] == size:
        return dataset
    return dataset.unbatch().batch(size, drop_remainder=True)


def training_batches(
    dataset: TfDataset,
    program: Program,
    first_update: int,
    takes_seeds: bool,
    preprocess: Preprocessing,
    instances: Instances,
) -> TfDataset:
    """The data set for ``fit``.

    Args:
        dataset: (images, labels[, weights 0 or 1]) of this instance, from ``first_update`` on.
        program: the Program with the batch sizes.
        first_update: number of the first weight update.
        takes_seeds: the model's second input is the seeds of the micro-batch.
        preprocess: the last step of preprocessing.
        instances: this instance has every ``count``-th micro-batch, from ``index`` on.

    Returns:
        (images or (images, seeds), labels[, weights]).  In the last weight update of an epoch, weights are larger than
        1, so that the mean over all samples is the mean over the real ones.
    """
    p, size = program, program.micro_batch_size
    run_seed = tf.constant(p.seed & SEED_MASK, tf.int32)

    def prepare(index: Tensor, element: Tuple[Tensor, ...]) -> Tuple[Any, ...]:
        images, labels, *weights = element
        number = first_update * p.num_micro_batches + index * instances.count + instances.index
        images = tf.ensure_shape(preprocess.pack(images), [size, *images.shape[1:]])
        labels = labels if labels.dtype.is_floating else tf.cast(labels, tf.int32)
        labels = tf.ensure_shape(labels, [size, *labels.shape[1:]])
        inputs = images
        if takes_seeds:
            seed = tf.stack([run_seed, tf.cast(number % SEED_MASK, tf.int32)])
            inputs = (images, tf.tile(seed[None], [size, 1]))
        if not weights:
            return inputs, labels
        counts = tf.ensure_shape(tf.cast(weights[0], tf.float32), [size])
        if p.gradient_accumulation_reduction_method != "sum":
            counts = counts * padding_scale(p, number // p.num_micro_batches)
        return inputs, labels, counts

    prepared = (
        _micro_batches(dataset, size)
        .enumerate()
        .map(tf.autograph.experimental.do_not_convert(prepare), num_parallel_calls=2, deterministic=True)
    )
    return prepared.prefetch(max(4, 2 * p.num_replicas // instances.count))


class Stream(Iterable[Tuple[Any, ...]]):
    """Batches for ``fit`` from one iterator: each execution takes as many as it needs.

    ``fit`` iterates over its data set from the beginning (keras/ipu/extensions/data_adapter.py and extensions_base.py
    of graphcore/keras make an infeed for each call), and the SDK's Keras refuses iterators.  Therefore each call
    receives a new data set that takes its elements from one lasting iterator.  The infeed sees resources that functions
    of a data set hold: driver/tools/infeed_iterator.cc of graphcore/tensorflow r2.6 wraps the device for this.

    Args:
        batches: all batches of the run, from the first execution on.
    """

    def __init__(self, batches: TfDataset) -> None:
        with tf.device("/CPU:0"):
            self._iterator = iterator = iter(batches)

            def following(_: Tensor) -> Tuple[Tensor, ...]:
                element: Tuple[Tensor, ...] = next(iterator)
                return element

            # Made once, because making it traces a function.
            everything = tf.data.Dataset.range(2**62)
            self._rest = everything.map(tf.autograph.experimental.do_not_convert(following))

    def __iter__(self) -> Iterator[Tuple[Any, ...]]:
        batches: Iterator[Tuple[Any, ...]] = self._iterator
        return batches

    def take(self, count: int) -> TfDataset:
        """The next ``count`` elements; reading them consumes them."""
        with tf.device("/CPU:0"):
            return self._rest.take(count)


def _like_logits(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels in the shape that losses take, where Keras 2.6 turned (n,) into (n, 1); mixed labels are like logits."""
    if labels.dtype.is_floating and labels.shape[-1] == logits.shape[-1]:
        return tf.cast(labels, tf.float32)
    return tf.cast(tf.reshape(labels, logits.shape[:-1]), tf.int32)


class MicroBatchLoss(keras.losses.Loss):
    """The loss function of ``make_loss`` for one micro-batch.

    Args:
        function: (logits, labels, 1[, weights]) -> (1,).
        scale: number or variable that multiplies the loss; the optimizer divides the gradients by it.
    """

    def __init__(self, function: LossFunction, scale: Union[float, TfVariable]) -> None:
        # Keras divides other reductions by the strategy's number of replicas: 1 with IPUStrategy, all with PopDist.
        super().__init__(reduction="sum", name="objective")
        self._function, self._scale = function, scale

    def __call__(self, y_true: Tensor, y_pred: Tensor, sample_weight: Optional[Tensor] = None) -> Tensor:
        labels = _like_logits(y_true, y_pred)
        weights = [] if sample_weight is None else [tf.reshape(sample_weight, [-1])]
        return self._function(y_pred, labels, 1, *weights)[0] * self._scale

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        return self(y_true, y_pred)


class SampleMean(keras.metrics.Metric):
    """Mean of a figure over the samples whose weight is not 0.

    Args:
        figure: (labels, logits, weights 0 or 1) -> the mean over the samples of weight 1 of the micro-batch.
        name: name of the metric.
        mean: averages the result over replicas; None: each replica keeps its own.
        divides_by_all: the sum over samples of weight 1 is divided by the number of all samples.  Replicas then have
            one denominator, and their mean is right even if they have different numbers of samples of weight 1.
    """

    def __init__(
        self,
        figure: Callable[[Tensor, Tensor, Optional[Tensor]], Tensor],
        name: str,
        mean: Optional[_Mean] = None,
        divides_by_all: bool = False,
    ) -> None:
        super().__init__(name=name)
        self._figure, self._mean, self._divides_by_all = figure, mean, divides_by_all
        self._total = self.add_weight(name="total", shape=(), initializer="zeros")
        self._count = self.add_weight(name="count", shape=(), initializer="zeros")

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Optional[Tensor] = None) -> None:
        size = float(y_pred.shape[0])
        if sample_weight is None:
            counts, number = None, tf.constant(size)
        else:
            counts = tf.cast(tf.reshape(sample_weight, [-1]) > 0, tf.float32)
            number = tf.reduce_sum(counts)
        figure = self._figure(_like_logits(y_true, y_pred), y_pred, counts)
        self._total.assign_add(tf.cast(figure, tf.float32) * number)
        self._count.assign_add(size if self._divides_by_all else number)

    def result(self) -> Tensor:
        result = tf.math.divide_no_nan(
            tf.convert_to_tensor(self._total), tf.maximum(tf.convert_to_tensor(self._count), 1.0)
        )
        return result if self._mean is None else self._mean(result)

    def reset_state(self) -> None:
        self._total.assign(0.0)
        self._count.assign(0.0)

    reset_states = reset_state


def make_metrics(
    loss: LossFunction, mean: Optional[_Mean] = None, divides_by_all: bool = False
) -> List[SampleMean]:
    """Loss and accuracy of an execution as the host session reports them; see :class:`SampleMean`."""

    def mean_loss(labels: Tensor, logits: Tensor, counts: Optional[Tensor]) -> Tensor:
        if counts is None:
            return loss(logits, labels, 1)[0]
        size = float(logits.shape[0])
        return loss(logits, labels, 1, counts)[0] * (size / tf.maximum(tf.reduce_sum(counts), 1.0))

    def accuracy(labels: Tensor, logits: Tensor, counts: Optional[Tensor]) -> Tensor:
        right = tf.reduce_mean(tf.reshape(correct(logits, labels), [int(logits.shape[0]), -1]), axis=1)
        if counts is None:
            return tf.reduce_mean(right)
        return tf.reduce_sum(right * counts) / tf.maximum(tf.reduce_sum(counts), 1.0)

    return [
        SampleMean(mean_loss, "mean_loss", mean, divides_by_all),
        SampleMean(accuracy, "accuracy", mean, divides_by_all),
    ]


def underlying(variable: TfVariable) -> TfVariable:
    """The variable below Keras's wrappers.

    A 16-bit layer has its 32-bit weights in an AutoCastVariable; under PopDist an update receives one component of a
    mirrored variable.
    """
    variable = getattr(variable, "_variable", variable)
    reference = getattr(variable, "_distributed_container", None)
    container = reference() if callable(reference) else None
    return variable if container is None else container


class MovingStatistics:
    """Moving statistics of batch norm that move once per weight update; see :class:`MovedByGradient`.

    Args:
        norms: the batch norm layers.
        program: the Program with replicas and accumulation.
        mean: averages a tensor over replicas.
    """

    def __init__(self, norms: Sequence[MovedByGradient], program: Program, mean: _Mean) -> None:
        self._replicas, self._mean = program.num_replicas, mean
        is_sum = program.gradient_accumulation_reduction_method == "sum"
        self._steps = float(program.gradient_accumulation_count if is_sum else 1)
        self._pairs: List[Tuple[int, int]] = []
        self._of: Dict[int, Tuple[MovedByGradient, bool]] = {}
        for norm in norms:
            mean_id, variance_id = (
                id(underlying(tf_variable(v))) for v in (norm.moving_mean, norm.moving_variance)
            )
            self._pairs.append((mean_id, variance_id))
            self._of.update({mean_id: (norm, False), variance_id: (norm, True)})

    def __contains__(self, variable: TfVariable) -> bool:
        return id(underlying(tf_variable(variable))) in self._of

    def add_spread(self, gradients: Gradients) -> Gradients:
        """Adds to one replica's variance the squared difference of its mean from the mean of all replicas, before
        gradients are summed over replicas."""
        if self._replicas == 1:
            return gradients
        by_variable = {id(underlying(tf_variable(variable))): gradient for gradient, variable in gradients}
        for mean_id, variance_id in self._pairs:
            mean = tf.cast(by_variable[mean_id], tf.float32)
            spread = tf.square((mean - self._mean(mean)) / self._steps) * self._steps
            by_variable[variance_id] = tf.cast(by_variable[variance_id], tf.float32) + spread
        return [(by_variable[id(underlying(tf_variable(variable)))], variable) for _, variable in gradients]

    def move(self, gradient: Tensor, variable: TfVariable) -> Tensor:
        """Updates one moving statistic from its gradients, summed over replicas."""
        norm, is_variance = self._of[id(underlying(variable))]
        new = tf.cast(gradient, tf.float32) / (self._steps * self._replicas)
        if is_variance:
            everywhere = float(norm.numbers * self._replicas)
            new = new * (everywhere / max(everywhere - 1.0, 1.0))
        return variable.assign(tf.convert_to_tensor(variable) * norm.momentum + new * (1.0 - norm.momentum))


class WeightUpdate:
    """Applies gradients; both generations of Keras optimizers call it.

    Args:
        optimizer: the arithmetic and its state.
        num_rates: weight updates of an execution.
        scale: the factor in the gradients: the loss scale times the number of replicas.  Keras's optimizers sum over
            replicas, and nothing divides, because ``IPUStrategy`` counts as one replica (``num_replicas_in_sync``).
        averaged: moving statistics that are averaged over replicas once per weight update.
        mean: averages a tensor over replicas.
        moved: statistics that move once per weight update.
        scaler: automatic loss scaling; its scale is not part of ``scale``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_rates: int,
        scale: float,
        averaged: Sequence[TfVariable],
        mean: _Mean,
        moved: Optional[MovingStatistics] = None,
        scaler: Optional[LossScaler] = None,
    ) -> None:
        self._moved, self._scaler = moved, scaler
        self._beyond: Optional[Tensor] = None
        self._optimizer, self._scale = optimizer, scale
        self._averaged, self._mean = list(averaged), mean
        self._names = {id(underlying(v)): name for name, v in optimizer.weights.items()}
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
        if self._moved is not None and variable in self._moved:
            moved = self._moved.move(gradient, variable)
            with tf.control_dependencies([moved]):
                return [moved, *self._optimizer.average_statistics(count, only=underlying(variable))]
        rate = tf.gather(self.rates, tf.cast(iterations, tf.int32) % self.num_rates)
        name = self._names[id(underlying(variable))]
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
            if self._moved is None:
                with tf.control_dependencies(done):
                    done += self._optimizer.average_statistics(count)
        return done

    def before_reduction(self, gradients: Gradients) -> Gradients:
        """One replica's accumulated gradients, ready to be summed over replicas."""
        return gradients if self._moved is None else self._moved.add_spread(gradients)

    def after_reduction(self, gradients: Gradients) -> Gradients:
        """The gradients of a weight update, summed over replicas: clipped, and without the automatic loss scale."""
        if self._scaler is None and not self._optimizer.settings.clip_gradient_norm:
            return gradients
        trained = [n for n, (_, v) in enumerate(gradients) if self._moved is None or v not in self._moved]
        values = [gradients[n][0] for n in trained]
        if self._scaler is not None:
            # Here the scale is the number of replicas: the host checks the mean over replicas.
            values, self._beyond = self._scaler.unscaled(values, self._scale)
        clipped = dict(zip(trained, self._optimizer.clipped(values, self._scale)))
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


class Float32View:
    """A float32 view of a variable of another type."""

    def __init__(self, variable: TfVariable) -> None:
        self._variable = variable
        self.shape, self.dtype = variable.shape, tf.float32

    def numpy(self) -> np.ndarray:
        """The values as float32."""
        return self._variable.numpy().astype(np.float32)

    def assign(self, values: Union[Tensor, np.ndarray]) -> None:
        """Assigns values, rounded to the variable's type."""
        values = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
        self._variable.assign(values.astype(self._variable.dtype.as_numpy_dtype))


def portable(variable: TfVariable) -> Union[TfVariable, Float32View]:
    """The variable itself if it is float32, else a float32 view."""
    return variable if variable.dtype.name == "float32" else Float32View(variable)


class TrainedNetwork:
    """A network that IPUs train.

    Args:
        device: the IPUs.
        program: the Program to run.
        made: the network built for training, with the SDK's options set.
        optimizer: checked settings.
        loss: the function of ``make_loss``.
        schedule: weight updates (int array) -> learning rates.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        made: DeviceModel,
        optimizer: OptimizerSettings,
        loss: LossFunction,
        schedule: Schedule,
    ) -> None:
        self._device, self._program = device, program
        self._loss, self._schedule = loss, schedule
        self.made = made
        # A pipeline reports only the last replica's figures, over that replica's samples.
        self._divides_by_all = bool(program.samples_padded_per_epoch) and (
            program.num_stages == 1 or program.num_replicas == 1
        )
        self._scale: Union[float, TfVariable] = program.loss_scaling or 1.0
        norms, mean = made.moved_once, device.mean_over_replicas
        with device.scope():
            self._optimizer = _make_optimizer(optimizer, made)
            scaler, static = None, self._scale
            self._slots = dict(self._optimizer.slots)
            if program.auto_loss_scaling:
                scaler, static = LossScaler(self._optimizer.num_weights), 1.0
                self._scale = scaler.factor
                self._slots.update(scaler.slots)
            self._update = WeightUpdate(
                self._optimizer,
                program.weight_updates_per_execution,
                static * program.num_replicas,
                self._averaged(),
                mean,
                MovingStatistics(norms, program, mean) if norms else None,
                scaler,
            )
            self._compile(program.steps_per_execution)

    @property
    def weights(self) -> Dict[str, Union[TfVariable, Float32View]]:
        """float32 variables, or views, by canonical name."""
        return {name: portable(v) for name, v in self.made.weights.items()}

    @property
    def slots(self) -> Dict[str, Union[TfVariable, Float32View]]:
        """The optimizer's state, in the same form."""
        return {name: portable(v) for name, v in self._slots.items()}

    def _averaged(self) -> List[TfVariable]:
        """Moving statistics that differ between replicas; a pipeline recomputes them instead."""
        p = self._program
        if p.num_replicas == p.dbn_replica_group_size or p.num_stages > 1 or self.made.moved_once:
            return []
        names = [f"{norm}/{moving}" for norm in self.made.norms for moving in MOVING_STATISTICS]
        return [self.made.weights[name] for name in names]

    def _compile(self, steps_per_execution: int) -> None:
        p = self._program
        mean: Optional[_Mean] = None
        if self._device.config.accelerator_side_reduction and p.num_stages == 1 and p.num_replicas > 1:
            # The IPUs average metrics over replicas themselves, which a pipeline cannot.
            mean = self._device.mean_over_replicas
        self.made.model.compile(
            optimizer=DeviceOptimizer(self._update),
            loss=MicroBatchLoss(self._loss, self._scale),
            weighted_metrics=make_metrics(self._loss, mean, self._divides_by_all),
            steps_per_execution=steps_per_execution,
        )
        self._steps = steps_per_execution

    def stream(self, dataset: TfDataset, first: int) -> Stream:
        """The batches of all executions from a weight update on.

        Args:
            dataset: (images, labels[, weights]) of this instance, from weight update ``first`` on.
        """
        device, takes_seeds = self._device, self.made.takes_seeds
        return Stream(
            training_batches(dataset, self._program, first, takes_seeds, device.preprocess, device.instances)
        )

    def execute(self, stream: Stream, first: int, count: int) -> Tuple[float, float]:
        """Runs one execution.

        Args:
            stream: its next batches are those of weight update ``first``.
            first: weight updates done before.
            count: weight updates to run.

        Returns:
            Mean loss and accuracy, the same on every instance.
        """
        p, update, made, instances = self._program, self._update, self.made, self._device.instances
        steps = count * p.gradient_accumulation_count
        if count > update.num_rates or steps > self._steps:
            with self._device.scope():
                update.resize(max(count, update.num_rates))
                self._compile(steps)
        update.set_rates(first, self._schedule(np.arange(first, first + count)))
        made.model.optimizer.iterations.assign(first)
        local_steps = steps * (p.num_replicas // instances.count)
        if self._draws_random_numbers():
            self._device.reset_seed(_seed(p.seed, first))
        with self._device.running(training=True):
            history = made.model.fit(
                stream.take(local_steps),
                epochs=1,
                steps_per_epoch=local_steps,
                verbose=0,
                shuffle=False,
            )
        figures = [float(history.history[name][-1]) for name in ("mean_loss", "accuracy")]
        if self._divides_by_all:
            real = p.samples_before(first + count) - p.samples_before(first)
            figures = [value * count * p.global_batch_size / real for value in figures]
        loss, hit = self._device.mean_over_instances(figures)
        return float(loss), float(hit)

    def _draws_random_numbers(self) -> bool:
        """Whether the program uses the IPUs' random number generator."""
        layers = {type(layer).__name__ for layer in self.made.model.layers}
        return self._device.config.stochastic_rounding != "OFF" or "Dropout" in layers


def _make_optimizer(settings: OptimizerSettings, made: DeviceModel) -> Optimizer:
    ids = {id(tf_variable(v)) for v in made.model.trainable_weights}
    ids -= {id(tf_variable(v)) for norm in made.moved_once for v in (norm.moving_mean, norm.moving_variance)}
    weights = {name: v for name, v in made.weights.items() if id(v) in ids}
    frozen = tuple(f"{layer.name}/" for layer in made.model.layers if not layer.trainable)
    moving = [name for name in made.weights if is_moving_statistic(name) and not name.startswith(frozen)]
    statistics = {name: made.weights[name] for name in moving}
    return Optimizer(settings, weights, statistics)


def _seed(run_seed: int, weight_update: int) -> int:
    """The IPUs' seed of an execution, a function of its first weight update: continued runs draw the same numbers."""
    return zlib.crc32(f"{run_seed}/{weight_update}".encode()) & 0x7FFFFFFF
