"""Loss and metrics of a model on IPUs, in Keras' classes over this program's formulas.

Keras' own reductions are passed by: the loss is the mean over a micro-batch, in float32, times the loss scale;
the metrics are means over the samples of an execution that count.
"""

from typing import Any, Callable, List, Optional

import tensorflow as tf
from tensorflow import keras


def _like_logits(labels: Any, logits: Any) -> Any:
    """Labels as the losses take them: Keras 2.6 makes (n, 1) of (n,)."""
    return tf.cast(tf.reshape(labels, logits.shape[:-1]), tf.int32)


class MicroBatchLoss(keras.losses.Loss):
    """``make_loss``'s function of one micro-batch.

    Args:
        function: (logits, labels, 1[, weights]) -> (1,).
        scale: what the loss is multiplied by; the optimizer divides the gradients by it.
    """

    def __init__(self, function: Callable[..., Any], scale: float) -> None:
        # Keras divides other reductions by the strategy's replicas: 1 with IPUStrategy, all under PopDist.
        super().__init__(reduction="sum", name="objective")
        self._own, self._scale = function, scale

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        labels = _like_logits(y_true, y_pred)
        weights = [] if sample_weight is None else [tf.reshape(sample_weight, [-1])]
        return self._own(y_pred, labels, 1, *weights)[0] * self._scale

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self(y_true, y_pred)


class SampleMean(keras.metrics.Metric):
    """Mean of a figure over the samples whose weight is not 0.

    Args:
        figure: (labels, logits, weights 0 or 1) -> the mean over the micro-batch's samples that count.
        name: of the metric.
        mean: over replicas, of the result; None: each replica has its own.
    """

    def __init__(
        self,
        figure: Callable[[Any, Any, Any], Any],
        name: str,
        mean: Optional[Callable[[Any], Any]] = None,
    ) -> None:
        super().__init__(name=name)
        self._figure, self._mean = figure, mean
        self._total = self.add_weight(name="total", shape=(), initializer="zeros")
        self._count = self.add_weight(name="count", shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        size = float(y_pred.shape[0])
        if sample_weight is None:
            counts, number = None, tf.constant(size)
        else:
            counts = tf.cast(tf.reshape(sample_weight, [-1]) > 0, tf.float32)
            number = tf.reduce_sum(counts)
        figure = self._figure(_like_logits(y_true, y_pred), y_pred, counts)
        self._total.assign_add(tf.cast(figure, tf.float32) * number)
        self._count.assign_add(number)

    def result(self) -> Any:
        result = tf.math.divide_no_nan(
            tf.convert_to_tensor(self._total), tf.maximum(tf.convert_to_tensor(self._count), 1.0)
        )
        return result if self._mean is None else self._mean(result)

    def reset_state(self) -> None:
        self._total.assign(0.0)
        self._count.assign(0.0)

    reset_states = reset_state


def make_metrics(loss: Callable[..., Any], mean: Optional[Callable[[Any], Any]] = None) -> List[SampleMean]:
    """Loss and accuracy, as the host session reports them of an execution; ``mean`` is over replicas."""

    def mean_loss(labels: Any, logits: Any, counts: Any) -> Any:
        if counts is None:
            return loss(logits, labels, 1)[0]
        size = float(logits.shape[0])
        return loss(logits, labels, 1, counts)[0] * (size / tf.maximum(tf.reduce_sum(counts), 1.0))

    def accuracy(labels: Any, logits: Any, counts: Any) -> Any:
        right = tf.cast(tf.equal(tf.argmax(logits, -1, output_type=tf.int32), labels), tf.float32)
        right = tf.reduce_mean(tf.reshape(right, [int(logits.shape[0]), -1]), axis=1)
        if counts is None:
            return tf.reduce_mean(right)
        return tf.reduce_sum(right * counts) / tf.maximum(tf.reduce_sum(counts), 1.0)

    return [SampleMean(mean_loss, "mean_loss", mean), SampleMean(accuracy, "accuracy", mean)]
