"""Metrics as sums over batches, which are averaged only after the last batch."""

from dataclasses import dataclass, field
from typing import Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.aliases import Tensor
from ipucnn.training.losses import LossFunction, correct


def batch_sums(logits: Tensor, labels: Tensor, weights: Tensor, per_sample_loss: Tensor) -> Dict[str, Tensor]:
    """Returns the sums of one batch for the totals: float32 scalars, but ``samples``, the sum of weights, is float64.

    Args:
        logits: (n, classes) or (n, h, w, classes).
        labels: int32 (n,) or (n, h, w); pixels below 0 are ignored.
        weights: float32 (n,), 0 for padding; for patches, the number of pixels that count.
        per_sample_loss: float32 (n,).

    Returns:
        ``samples``, ``loss``, ``top1`` and ``top5`` (weighted counts).  For segmentation ``top1`` counts pixel
        fractions, and ``top5`` is replaced by ``pixels``, the number of pixels that count, and for each class K by
        ``actual_K``, ``right_of_K`` and ``either_of_K``: the pixels that are K in truth, those that are K in both truth
        and prediction, and the sum of those in truth and those in prediction.
    """
    import tensorflow as tf

    logits = tf.cast(logits, tf.float32)
    right = correct(logits, labels)
    sums = {
        "samples": tf.reduce_sum(tf.cast(weights, tf.float64)),
        "loss": tf.reduce_sum(per_sample_loss * weights),
    }
    if len(logits.shape) == 2:
        sums["top1"] = tf.reduce_sum(right * weights)
        k = min(5, int(logits.shape[-1]))
        # The lower of two classes with equal logits ranks first, as in argmax; a label's logit that is not finite is
        # never right.
        label_logits = tf.gather(logits, labels, axis=1, batch_dims=1)[:, None]
        classes = tf.range(tf.shape(logits)[1], dtype=labels.dtype)[None]
        before = tf.logical_or(
            logits > label_logits, tf.logical_and(tf.equal(logits, label_logits), classes < labels[:, None])
        )
        rank = tf.reduce_sum(tf.cast(before, tf.int32), axis=1)
        is_among = tf.logical_and(rank < k, tf.math.is_finite(label_logits[:, 0]))
        sums["top5"] = tf.reduce_sum(tf.cast(is_among, tf.float32) * weights)
        return sums
    # Only pixels that are not ignored, in samples that are not padding, count.
    known = tf.cast(labels >= 0, tf.float32)
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
    pixels = tf.maximum(tf.reduce_sum(known, axis=[1, 2]), 1.0)
    sums["top1"] = tf.reduce_sum(tf.reduce_sum(right, axis=[1, 2]) / pixels * weights)
    counts = known * tf.cast(weights > 0, tf.float32)[:, None, None]
    sums["pixels"] = tf.reduce_sum(counts)
    for number in range(int(logits.shape[-1])):
        true = tf.cast(tf.equal(labels, number), tf.float32) * counts
        claimed = tf.cast(tf.equal(predicted, number), tf.float32) * counts
        sums[f"actual_{number}"] = tf.reduce_sum(true)
        sums[f"right_of_{number}"] = tf.reduce_sum(true * claimed)
        sums[f"either_of_{number}"] = sums[f"actual_{number}"] + tf.reduce_sum(claimed)
    return sums


SumsOfLogits = Callable[[Tensor, Tensor, Tensor], Dict[str, Tensor]]


def traced_sums(loss: Optional[LossFunction]) -> SumsOfLogits:
    """Returns :func:`batch_sums` as a function of logits, labels and weights, traced once for each shape.

    Args:
        loss: the loss of each sample; None if the function is never called.
    """
    import tensorflow as tf

    def sums(logits: Tensor, labels: Tensor, weights: Tensor) -> Dict[str, Tensor]:
        assert loss is not None
        return batch_sums(logits, labels, weights, loss(logits, labels, tf.shape(labels)[0]))

    traced: SumsOfLogits = tf.function(sums, autograph=False)
    return traced


@dataclass
class MetricTotals:
    """Float64 totals over batches."""

    totals: Dict[str, float] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Union[float, Tensor]]) -> None:
        """Adds the result of :func:`batch_sums`, as tensors or as numbers."""
        for key, value in sums.items():
            self.totals[key] = self.totals.get(key, 0.0) + float(np.asarray(value))

    def result(self) -> Dict[str, float]:
        """Returns means over samples: ``samples``, ``loss``, ``accuracy``, and ``top5`` or ``dice`` and ``iou``.

        With two classes of pixels it also returns ``dice_background``, the score of class 0, and
        ``dice_all_foreground``, the score of predicting foreground for every pixel, which is the baseline for ``dice``.
        With more classes ``dice`` and ``iou`` are the means of :func:`mean_scores`, and ``dice_class_K`` is the score
        of each class, 1 if it is neither present nor predicted.
        """
        t = self.totals
        n = t.get("samples", 0.0)
        if not n:
            return {"samples": 0.0}
        result = {"samples": n, "loss": t["loss"] / n, "accuracy": t["top1"] / n}
        if "top5" in t:
            result["top5"] = t["top5"] / n
        numbers = [key[len("right_of_") :] for key in t if key.startswith("right_of_")]
        if not numbers:
            return result
        counts = [(t[f"right_of_{k}"], t[f"either_of_{k}"]) for k in numbers]
        result["dice"], result["iou"] = mean_scores(counts)
        scores = [2 * right / both if both else 1.0 for right, both in counts]
        if len(numbers) > 2:
            result.update({f"dice_class_{k}": score for k, score in zip(numbers, scores)})
        elif len(numbers) == 2:
            foreground = t["actual_1"]
            result["dice_background"] = scores[0]
            result["dice_all_foreground"] = (
                2 * foreground / (foreground + t["pixels"]) if t["pixels"] else 1.0
            )
        return result


def mean_scores(counts: Sequence[Tuple[float, float]]) -> Tuple[float, float]:
    """Returns the means of Dice and IoU over all classes but class 0: the main scores of three or more classes.

    Args:
        counts: for each class, the pixels that have it in both truth and prediction, and the sum of those that have it
            in truth and those that have it in prediction.

    Returns:
        The mean Dice and the mean IoU.  Classes that are neither present nor predicted do not count; both means are 1
        if no other class is left.
    """
    known = [(right, both) for right, both in counts[1:] if both]
    if not known:
        return 1.0, 1.0
    dice, iou = zip(*((2 * right / both, right / (both - right)) for right, both in known))
    return sum(dice) / len(dice), sum(iou) / len(iou)
