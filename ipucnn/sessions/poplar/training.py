"""Training on IPUs.  One execution is one ``fit`` of one epoch.

In an accumulation step every replica computes, in the SDK's Keras, the logits of one micro-batch, its loss
(:class:`MicroBatchLoss`), and the gradients, which are those of the loss times the loss scale.  The SDK adds them to
the replica's accumulated gradients, as ``gradient_accumulation_reduction_method`` says (``options.py`` passes it on).
Moving statistics of batch norm move with every micro-batch, or are gradients themselves (``MovedByGradient``).  After
the last step of a weight update the SDK sums over replicas, and ``optimizer.py`` divides by the scale and applies.

The SDK keeps the compiled program from one ``fit`` to the next.  Loss and metrics are Keras classes with this program's
formulas, not Keras's reductions: the loss is the mean over a micro-batch, in float32, times the loss scale; the metrics
are means over the real samples of an execution.
"""

import zlib
from typing import Callable, Dict, List, Optional, Tuple, Union

import numpy as np
import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import Tensor, TfDataset, TfVariable
from ipucnn.models.names import statistics_of
from ipucnn.sessions.evaluated import why_statistics_are_lost
from ipucnn.sessions.poplar.batches import BatchStream, training_batches
from ipucnn.sessions.poplar.device import Ipus
from ipucnn.sessions.poplar.model import DeviceModel
from ipucnn.sessions.poplar.optimizer import (
    DeviceOptimizer,
    ReplicaMean,
    StatisticsUpdate,
    WeightUpdate,
    make_optimizer,
)
from ipucnn.sessions.session import TrainingTask
from ipucnn.training.losses import Loss, correct
from ipucnn.training.optimizers import LossScaler
from ipucnn.training.program import SEED_MASK


def _like_logits(labels: Tensor, logits: Tensor) -> Tensor:
    """Returns labels in the shape that losses take: Keras 2.6 turned (n,) into (n, 1); mixed labels are like logits."""
    if labels.dtype.is_floating and labels.shape[-1] == logits.shape[-1]:
        return tf.cast(labels, tf.float32)
    return tf.cast(tf.reshape(labels, logits.shape[:-1]), tf.int32)


class MicroBatchLoss(keras.losses.Loss):
    """The loss of one micro-batch, as Keras takes it.

    Args:
        function: the loss.
        scale: the number or variable that multiplies the loss; the optimizer divides the gradients by it.
    """

    def __init__(self, function: Loss, scale: Union[float, TfVariable]) -> None:
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
        name: the name of the metric.
        mean: the function that averages the result over replicas; None: each replica keeps its own.
        divides_by_all: whether to divide the sum over samples of weight 1 by the number of all samples.  Replicas then
            have one denominator, and their mean is right even if they have different numbers of samples of weight 1.
    """

    def __init__(
        self,
        figure: Callable[[Tensor, Tensor, Optional[Tensor]], Tensor],
        name: str,
        mean: Optional[ReplicaMean] = None,
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
    loss: Loss,
    mean: Optional[ReplicaMean] = None,
    divides_by_all: bool = False,
    penalty: Optional[Callable[[], Tensor]] = None,
) -> List[SampleMean]:
    """Returns loss and accuracy of an execution as the host session reports them; see :class:`SampleMean`.

    Args:
        penalty: the function that gives what regularizers add to the loss; None: nothing.
    """

    def mean_loss(labels: Tensor, logits: Tensor, counts: Optional[Tensor]) -> Tensor:
        of_data = data_loss(labels, logits, counts)
        return of_data if penalty is None else of_data + penalty()

    def data_loss(labels: Tensor, logits: Tensor, counts: Optional[Tensor]) -> Tensor:
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


class Float32View:
    """A float32 view of a variable of another type."""

    def __init__(self, variable: TfVariable) -> None:
        self._variable = variable
        self.shape, self.dtype = variable.shape, tf.float32

    def numpy(self) -> np.ndarray:
        """Returns the values as float32."""
        return self._variable.numpy().astype(np.float32)

    def assign(self, values: Union[Tensor, np.ndarray]) -> None:
        """Assigns values, rounded to the variable's type."""
        values = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
        self._variable.assign(values.astype(self._variable.dtype.as_numpy_dtype))


def portable(variable: TfVariable) -> Union[TfVariable, Float32View]:
    """Returns the variable itself if it is float32, else a float32 view."""
    return variable if variable.dtype.name == "float32" else Float32View(variable)


class TrainedNetwork:
    """A network that IPUs train.

    Args:
        ipus: the IPUs.
        task: what is trained.
        network: its network built for training, with the SDK's options set.
    """

    def __init__(self, ipus: Ipus, task: TrainingTask, network: DeviceModel) -> None:
        program = self._program = task.program
        self._ipus, self._loss, self._schedule = ipus, task.loss, task.schedule
        self.network = network
        # A pipeline reports only the last replica's figures, over that replica's samples.
        self._divides_by_all = bool(program.samples_padded_per_epoch) and (
            program.num_stages == 1 or program.num_replicas == 1
        )
        self._scale: Union[float, TfVariable] = program.loss_scaling or 1.0
        norms, mean = network.moved_once, ipus.mean_over_replicas
        with ipus.scope():
            self._optimizer = make_optimizer(task.optimizer, network, program)
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
                StatisticsUpdate(norms, program, mean) if norms else None,
                scaler,
            )
            self._compile(program.steps_per_execution)

    @property
    def weights(self) -> Dict[str, Union[TfVariable, Float32View]]:
        """Returns float32 variables, or views, by canonical name."""
        return {name: portable(v) for name, v in self.network.weights.items()}

    @property
    def slots(self) -> Dict[str, Union[TfVariable, Float32View]]:
        """Returns the optimizer's state, in the same form."""
        return {name: portable(v) for name, v in self._slots.items()}

    def _averaged(self) -> List[TfVariable]:
        """Returns the moving statistics that differ between replicas; those that are lost are not read."""
        p = self._program
        if (
            why_statistics_are_lost(p)
            or self.network.moved_once
            or p.num_replicas == p.dbn_replica_group_size
        ):
            return []
        return [self.network.weights[name] for name in statistics_of(self.network.norms)]

    def _compile(self, steps_per_execution: int) -> None:
        p = self._program
        mean: Optional[ReplicaMean] = None
        if self._ipus.config.accelerator_side_reduction and p.num_stages == 1 and p.num_replicas > 1:
            # The IPUs average metrics over replicas themselves, which a pipeline cannot.
            mean = self._ipus.mean_over_replicas
        # In a pipeline the stage that computes the loss cannot read the weights of the others.
        has_penalty = self._optimizer.penalties and p.num_stages == 1
        penalty = self._optimizer.penalty if has_penalty else None
        self.network.model.compile(
            optimizer=DeviceOptimizer(self._update),
            loss=MicroBatchLoss(self._loss, self._scale),
            weighted_metrics=make_metrics(self._loss, mean, self._divides_by_all, penalty),
            steps_per_execution=steps_per_execution,
        )
        self._steps = steps_per_execution

    def stream(self, dataset: TfDataset, first: int) -> BatchStream:
        """Returns the batches of all executions from a weight update on.

        Args:
            dataset: (images, labels[, weights]) of this instance, from weight update ``first`` on.
        """
        ipus, takes_seeds = self._ipus, self.network.takes_seeds
        return BatchStream(
            training_batches(dataset, self._program, first, takes_seeds, ipus.preprocess, ipus.instances)
        )

    def execute(self, stream: BatchStream, first: int, count: int) -> Tuple[float, float]:
        """Runs one execution.

        Args:
            stream: the batches, which continue with weight update ``first``.
            first: the weight updates done before.
            count: the weight updates to run.

        Returns:
            Mean loss and accuracy, the same on every instance.
        """
        p, update, model, instances = self._program, self._update, self.network.model, self._ipus.instances
        steps = count * p.gradient_accumulation_count
        if count > update.num_rates or steps > self._steps:
            with self._ipus.scope():
                update.resize(max(count, update.num_rates))
                self._compile(steps)
        update.set_rates(first, self._schedule(np.arange(first, first + count)))
        model.optimizer.iterations.assign(first)
        local_steps = steps * (p.num_replicas // instances.size)
        if self._draws_random_numbers():
            self._ipus.reset_seed(_seed(p.seed, first))
        with self._ipus.running(training=True):
            history = model.fit(
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
        loss, hit = self._ipus.exchange.mean_over_instances(figures)
        return float(loss), float(hit)

    def _draws_random_numbers(self) -> bool:
        """Returns whether the program uses the IPUs' random number generator."""
        # Dropout is the addons' class, which is none of Keras's or of this package's.
        layers = {type(layer).__name__ for layer in self.network.model.layers}
        return self._ipus.config.stochastic_rounding != "OFF" or "Dropout" in layers


def _seed(run_seed: int, weight_update: int) -> int:
    """Returns the IPUs' seed of an execution: continued runs draw the same numbers."""
    return zlib.crc32(f"{run_seed}/{weight_update}".encode()) & SEED_MASK
