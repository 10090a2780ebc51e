"""Metrics as sums that add up over batches: nothing is averaged before all samples are in."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Dict

import numpy as np

if TYPE_CHECKING:
    from ipucnn.compat import Tensor


def batch_sums(
    logits: "Tensor", labels: "Tensor", weights: "Tensor", per_sample_loss: "Tensor"
) -> "Dict[str, Tensor]":
    """What one batch adds to the totals, as float32 scalars; ``samples``, the sum of the weights, as float64.

    Args:
        logits: (n, classes) or (n, h, w, classes).
        labels: int32 (n,) or (n, h, w); pixels below 0 are ignored.
        weights: float32 (n,), 0 for padding; of tiles, the pixels that count.
        per_sample_loss: float32 (n,).

    Returns:
        ``samples``, ``loss``, ``top1`` and ``top5`` (weighted counts; for segmentation ``top1`` counts pixel
        fractions and the confusion counts ``true_positives``, ``predicted`` and ``actual`` are added, with two
        classes the background's ``true_negatives``, ``predicted_background`` and ``actual_background`` too).
    """
    import tensorflow as tf

    logits = tf.cast(logits, tf.float32)
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
    sums = {
        "samples": tf.reduce_sum(tf.cast(weights, tf.float64)),
        "loss": tf.reduce_sum(per_sample_loss * weights),
    }
    if len(logits.shape) == 2:
        hits = tf.cast(tf.equal(predicted, labels), tf.float32)
        sums["top1"] = tf.reduce_sum(hits * weights)
        k = min(5, int(logits.shape[-1]))
        # Of equal logits the lower class comes first, as argmax has it; what is not a number is never right.
        own = tf.gather(logits, labels, axis=1, batch_dims=1)[:, None]
        classes = tf.range(tf.shape(logits)[1], dtype=labels.dtype)[None]
        before = tf.logical_or(logits > own, tf.logical_and(tf.equal(logits, own), classes < labels[:, None]))
        rank = tf.reduce_sum(tf.cast(before, tf.int32), axis=1)
        right = tf.logical_and(rank < k, tf.math.is_finite(own[:, 0]))
        sums["top5"] = tf.reduce_sum(tf.cast(right, tf.float32) * weights)
        return sums
    # Counts are of pixels that are not ignored, in samples that are not padding.
    known = tf.cast(labels >= 0, tf.float32)
    hits = tf.cast(tf.equal(predicted, labels), tf.float32)
    own_pixels = tf.maximum(tf.reduce_sum(known, axis=[1, 2]), 1.0)
    sums["top1"] = tf.reduce_sum(tf.reduce_sum(hits, axis=[1, 2]) / own_pixels * weights)
    counts = known * tf.cast(weights > 0, tf.float32)[:, None, None]
    classes = int(logits.shape[-1])
    foreground = tf.cast(labels > 0, tf.float32) * counts
    claimed = tf.cast(predicted > 0, tf.float32) * counts
    sums["true_positives"] = tf.reduce_sum(hits * foreground)
    sums["predicted"] = tf.reduce_sum(claimed)
    sums["actual"] = tf.reduce_sum(foreground)
    if classes == 2:
        sums["true_negatives"] = tf.reduce_sum(hits * (counts - foreground))
        sums["predicted_background"] = tf.reduce_sum(counts - claimed)
        sums["actual_background"] = tf.reduce_sum(counts - foreground)
    return sums


@dataclass
class MetricTotals:
    """Float64 totals over batches."""

    totals: Dict[str, float] = field(default_factory=dict)

    def add(self, sums: "Dict[str, Tensor]") -> None:
        """Adds what :func:`batch_sums` returned."""
        for key, value in sums.items():
            self.totals[key] = self.totals.get(key, 0.0) + float(np.asarray(value))

    def result(self) -> Dict[str, float]:
        """Means over samples: ``samples``, ``loss``, ``accuracy``, and ``top5`` or ``dice`` and ``iou``.

        With two classes of pixels also ``dice_background``, the score of class 0, and ``dice_all_foreground``,
        what calling every pixel foreground scores: the figure that ``dice`` has to beat.
        """
        t = self.totals
        n = t.get("samples", 0.0)
        if not n:
            return {"samples": 0.0}
        result = {"samples": n, "loss": t["loss"] / n, "accuracy": t["top1"] / n}
        if "top5" in t:
            result["top5"] = t["top5"] / n
        if "true_positives" in t:
            both = t["predicted"] + t["actual"]
            union = both - t["true_positives"]
            result["dice"] = 2 * t["true_positives"] / both if both else 1.0
            result["iou"] = t["true_positives"] / union if union else 1.0
        if "true_negatives" in t:
            both = t["predicted_background"] + t["actual_background"]
            result["dice_background"] = 2 * t["true_negatives"] / both if both else 1.0
            pixels = t["actual"] + t["actual_background"]
            result["dice_all_foreground"] = 2 * t["actual"] / (t["actual"] + pixels) if pixels else 1.0
        return result
