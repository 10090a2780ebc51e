"""Losses per micro-batch, reduced in float32 for any type of logits.

A loss maps logits and labels of several fused micro-batches to one value for each; a loss that couples samples (Dice)
does so only within a micro-batch, as on an IPU.
"""

from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.training.program import Program


def class_numbers(labels: Tensor) -> Tensor:
    """Returns labels as class numbers; for a mixed image, that of the class with the larger share."""
    return tf.argmax(labels, -1, output_type=tf.int32) if labels.dtype.is_floating else labels


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns float32, above 0 for each sample or pixel whose class has the largest logit, and else 0.

    The mean over a sample is the share of right pixels among those that are not ignored.
    """
    truth = class_numbers(labels)
    right = tf.cast(tf.equal(tf.argmax(logits, -1, output_type=truth.dtype), truth), tf.float32)
    if len(truth.shape) == 1:
        return right
    counts = tf.cast(truth >= 0, tf.float32)
    axes = list(range(1, len(truth.shape)))
    pixels = float(np.prod(truth.shape[1:]))
    return right * (pixels / tf.maximum(tf.reduce_sum(counts, axis=axes, keepdims=True), 1.0))


def cross_entropy_per_sample(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns the softmax cross-entropy, averaged over the pixels of a sample that are not ignored.

    Args:
        logits: (n, classes) or (n, h, w, classes).
        labels: int32 (n,) or (n, h, w); pixels below 0 are ignored.  float32 (n, classes) for mixed images.
        label_smoothing: probability spread evenly over all classes (Szegedy et al. 2016, arXiv:1512.00567).

    Returns:
        float32 (n,).
    """
    logits, labels = tf.cast(logits, tf.float32), tf.convert_to_tensor(labels)
    is_mixed = labels.dtype.is_floating
    pixels = not is_mixed and len(labels.shape) > 1
    if is_mixed:
        loss = tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    else:
        known = tf.maximum(labels, 0) if pixels else labels
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=known, logits=logits)
    if label_smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    if not pixels:
        return loss
    counts = tf.cast(labels >= 0, tf.float32)
    axes = list(range(1, len(labels.shape)))
    # The sum needs float32: float16 ends at 65504, and an output of 388x388 has 150,544 pixels.
    return tf.reduce_sum(loss * counts, axis=axes) / tf.maximum(tf.reduce_sum(counts, axis=axes), 1.0)


def balanced_weights(labels: np.ndarray, num_classes: int) -> Tuple[float, ...]:
    """Returns the weight of each class: all samples / (classes that have samples x samples of the class).

    The weights of all samples have a mean of 1, and those of each class the same sum (King and Zeng 2001, "Logistic
    Regression in Rare Events Data"; ``class_weight="balanced"`` of scikit-learn).  Classes without samples have 0.

    Args:
        labels: the classes of all training samples, int (n,).
        num_classes: the number of classes.
    """
    counts = np.bincount(labels, minlength=num_classes)
    present = int(np.count_nonzero(counts))
    return tuple(len(labels) / (present * count) if count else 0.0 for count in counts.tolist())


def padding_scale(program: Program, update: Tensor) -> Tensor:
    """Returns the factor of losses in weight update number ``update``: all samples divided by those without padding.

    It turns means over all samples of the weight update into means over its samples without padding.
    """
    is_last = tf.equal((update + 1) % program.weight_updates_per_epoch, 0)
    return tf.where(is_last, program.padding_scale, 1.0)


def _dice_per_micro_batch(logits: Tensor, labels: Tensor, num_micro_batches: int) -> Tensor:
    """Returns 1 - Dice (Milletari et al. 2016, arXiv:1606.04797, with sums for squares), float32 (micro-batches,).

    It averages the Dice of the foreground classes, so that a rare class counts as much as a common one.
    """
    classes = int(logits.shape[-1])
    probabilities = tf.nn.softmax(tf.cast(logits, tf.float32))
    truth = tf.one_hot(labels, classes, dtype=tf.float32)  # all 0 where the label is negative
    probabilities = probabilities * tf.cast(labels >= 0, tf.float32)[..., tf.newaxis]
    probabilities = tf.reshape(probabilities, [num_micro_batches, -1, classes])[..., 1:]
    truth = tf.reshape(truth, [num_micro_batches, -1, classes])[..., 1:]
    overlap = tf.reduce_sum(probabilities * truth, axis=1)
    total = tf.reduce_sum(probabilities, axis=1) + tf.reduce_sum(truth, axis=1)
    return tf.reduce_mean(1.0 - (2.0 * overlap + 1.0) / (total + 1.0), axis=1)


@dataclass(frozen=True)
class Loss:
    """A loss, which training differentiates; :mod:`ipucnn.training.evaluation` computes it from float64 logits.

    Pixels with a negative label are ignored (``ipucnn.datasets.segmentation.patches.IGNORED``): the cross-entropy of a
    sample is the mean over its other pixels, and 0 if it has none.

    Attributes:
        name: cross_entropy, or bce_dice (cross-entropy plus Dice, for segmentation).
        label_smoothing: the label smoothing of the cross-entropy.
        class_weights: the factor of a sample's cross-entropy for each class, as Keras's ``class_weight``: the mean is
            still over the number of samples.  A mixed image has the mean of its classes' factors by share.  Empty: all
            are 1.
    """

    name: str
    label_smoothing: Optional[float] = None
    class_weights: Tuple[float, ...] = ()

    def __call__(
        self, logits: Tensor, labels: Tensor, num_micro_batches: int, weights: Optional[Tensor] = None
    ) -> Tensor:
        """Returns the loss of each fused micro-batch, float32 (micro-batches,).

        With weights (n,), each sample's cross-entropy is multiplied by its weight; the mean is still over all samples.
        """
        per_sample = cross_entropy_per_sample(logits, labels, float(self.label_smoothing or 0.0))
        if self.class_weights:
            of_classes = tf.constant(self.class_weights, tf.float32)
            labels = tf.convert_to_tensor(labels)
            is_mixed = labels.dtype.is_floating
            per_sample *= tf.linalg.matvec(labels, of_classes) if is_mixed else tf.gather(of_classes, labels)
        if weights is not None:
            if self.name == "bce_dice":
                raise ValueError("Dice couples the samples of a micro-batch: it has no weights")
            per_sample = per_sample * weights
        value = tf.reduce_mean(tf.reshape(per_sample, [num_micro_batches, -1]), axis=1)
        if self.name == "bce_dice":
            value = value + _dice_per_micro_batch(logits, labels, num_micro_batches)
        return value
