"""Metrics as sums that add up over batches: nothing is averaged before all samples are in."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.aliases import Tensor


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
        classes the background's ``true_negatives``, ``predicted_background`` and ``actual_background`` too, with more
        classes ``right_of_K`` and ``either_of_K`` of each: pixels that are K in both, and the sum of those in either).
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
    for number in range(classes):
        true = tf.cast(tf.equal(labels, number), tf.float32) * counts
        found = tf.cast(tf.equal(predicted, number), tf.float32) * counts
        sums[f"right_of_{number}"] = tf.reduce_sum(true * found)
        sums[f"either_of_{number}"] = tf.reduce_sum(true) + tf.reduce_sum(found)
    return sums


@dataclass
class MetricTotals:
    """Float64 totals over batches."""

    totals: Dict[str, float] = field(default_factory=dict)

    def add(self, sums: "Mapping[str, Union[float, Tensor]]") -> None:
        """Adds what :func:`batch_sums` returned, or its values."""
        for key, value in sums.items():
            self.totals[key] = self.totals.get(key, 0.0) + float(np.asarray(value))

    def result(self) -> Dict[str, float]:
        """Means over samples: ``samples``, ``loss``, ``accuracy``, and ``top5`` or ``dice`` and ``iou``.

        With two classes of pixels also ``dice_background``, the score of class 0, and ``dice_all_foreground``,
        what calling every pixel foreground scores: the figure that ``dice`` has to beat.  With more classes
        ``dice_class_K`` of each; of one that is neither there nor predicted it is 1.
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
        for key, right in t.items():
            if key.startswith("right_of_"):
                number = key[len("right_of_") :]
                both = t[f"either_of_{number}"]
                result[f"dice_class_{number}"] = 2 * right / both if both else 1.0
        return result


# The ISBI 2012 challenge's scores of a membrane segmentation: V^Rand and V^Info, foreground-restricted.
#
# Arganda-Carreras et al. 2015, "Crowdsourcing the creation of image segmentation algorithms for connectomics",
# Frontiers in Neuroanatomy 9:142.  A segmentation is the set of 4-connected components of the pixels that are
# cell.  With T the components of the truth, S those of the prediction, over the n pixels that are cell in the
# truth (the membrane of the truth is left out, hence foreground-restricted):
#
#   V^Rand  two pixels drawn at random are in one component.  split = P(in one of S | in one of T), which pieces
#           of cells lower; merge = P(in one of T | in one of S), which cells that flow together lower.
#   V^Info  I(S; T) is the information that S and T share.  split = I / H(S), merge = I / H(T).
#
# The score of both is the harmonic mean of split and merge.  Where the prediction has membrane in a cell of the
# truth, each pixel is a component of its own, as in the challenge's script (RandError, VariationOfInformation
# of Fiji's Trainable Segmentation).  As there, pairs of V^Rand are counted over all images together, and V^Info
# is the mean over images.  The script for the final leader board thins the membranes first; these scores
# do not.


__all__ = ["THRESHOLDS", "Overlaps", "SegmentScores", "information", "overlaps", "pairs", "segment_pixels"]

THRESHOLDS = tuple(i / 10 for i in range(10))
"""Probabilities above which a pixel is cell; the script's, without 1.0, above which there is nothing."""


def segment_pixels(predicted: np.ndarray, truth: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """The components that the pixels of cells belong to.

    Args:
        predicted, truth: bool [h, w], True where there is cell.

    Returns:
        int64 [n] numbers of the truth's components and of the prediction's, of the pixels that are cell in the truth.
    """
    from scipy.ndimage import label  # its default structure connects 4 neighbours

    components = label(truth)[0]
    inside = components > 0
    true = components[inside].astype(np.int64)
    found, count = label(predicted)
    found = found[inside].astype(np.int64)
    alone = found == 0
    found[alone] = count + 1 + np.arange(int(alone.sum()))
    return true, found


@dataclass(frozen=True)
class Overlaps:
    """How the truth's components and the prediction's overlap: what all the scores are sums over.

    Attributes:
        both: int64 [m] pixels in one component of each, of the m pairs of components that have any.
        in_true, in_found: int64 [t], [f] pixels of each component.
        true, found: int64 [m] the two components of each pair.
    """

    both: np.ndarray
    in_true: np.ndarray
    in_found: np.ndarray
    true: np.ndarray
    found: np.ndarray


def overlaps(true: np.ndarray, found: np.ndarray) -> Overlaps:
    """Counts pixels.

    scikit-learn's ``pair_confusion_matrix`` and ``homogeneity_completeness_v_measure`` count the same, each of
    them twice, which takes a second per image and threshold where most pixels are components of their own.

    Args:
        true, found: of :func:`segment_pixels`.
    """
    width = int(found.max()) + 1 if len(found) else 1
    keys, both = np.unique(true * width + found, return_counts=True)
    return Overlaps(both, np.bincount(true), np.bincount(found), keys // width, keys % width)


def pairs(counts: Overlaps) -> np.ndarray:
    """float64 [3]: ordered pairs of pixels, a pixel with itself included, that are in one component of both, of the
    truth, and of the prediction.
    """
    sizes = (counts.both, counts.in_true, counts.in_found)
    return np.array([float((size.astype(np.int64) ** 2).sum()) for size in sizes])


def information(counts: Overlaps) -> Tuple[float, float, float]:
    """(split, merge, score) of V^Info; a share of no information is 1.

    Args:
        counts: of at least one pixel.
    """
    pixels = float(counts.both.sum())
    # p_ij log(p_ij / (p_i p_j)), in which each term is exact where the components are the same.
    expected = counts.in_true[counts.true] * (counts.in_found[counts.found] / pixels)
    shared = max(float((counts.both / pixels * np.log(counts.both / expected)).sum()), 0.0)
    split, merge = (
        min(shared / entropy, 1.0) if entropy > 0 else 1.0
        for entropy in (_entropy(counts.in_found, pixels), _entropy(counts.in_true, pixels))
    )
    score = 2 * split * merge / (split + merge) if split + merge else 0.0
    return split, merge, score


def _entropy(sizes: np.ndarray, pixels: float) -> float:
    shares = sizes[sizes > 0] / pixels
    return float(-(shares * np.log(shares)).sum())


class SegmentScores:
    """V^Rand and V^Info over several images and thresholds.

    Args:
        thresholds: probabilities above which a pixel is cell; 0.5 must be one of them.
    """

    def __init__(self, thresholds: Sequence[float] = THRESHOLDS) -> None:
        self._thresholds = tuple(thresholds)
        self._middle = self._thresholds.index(0.5)
        self._pairs: np.ndarray = np.zeros((len(self._thresholds), 3))
        self._information: List[List[Tuple[float, float, float]]] = []

    def add(self, cell: np.ndarray, truth: np.ndarray) -> Optional[Dict[str, float]]:
        """Adds an image.

        Args:
            cell: [h, w] probability of cell in [0, 1].
            truth: [h, w], nonzero where there is cell.

        Returns:
            ``rand`` and ``info`` of this image alone at threshold 0.5; None if its truth has no cell, in
            which case it counts nowhere.
        """
        truth = np.asarray(truth) > 0
        if not truth.any():
            return None
        own, measures = [], []
        for threshold in self._thresholds:
            counts = overlaps(*segment_pixels(np.asarray(cell) > threshold, truth))
            own.append(pairs(counts))
            measures.append(information(counts))
        self._pairs += own
        self._information.append(measures)
        return {"rand": _rand(own[self._middle])["score"], "info": measures[self._middle][2]}

    def result(self) -> Optional[Dict[str, Any]]:
        """``rand`` and ``info``, each with ``score``, ``split`` and ``merge`` at 0.5 and, below ``best``, at the
        ``threshold`` with the highest score; None if no image had a cell.
        """
        if not self._information:
            return None
        measures = np.mean(self._information, axis=0)
        rand = [_rand(counts) for counts in self._pairs]
        info = [dict(zip(("split", "merge", "score"), map(float, row))) for row in measures]
        return {"rand": self._with_best(rand), "info": self._with_best(info)}

    def _with_best(self, rows: List[Dict[str, float]]) -> Dict[str, Any]:
        best = max(range(len(rows)), key=lambda i: rows[i]["score"])
        return {**rows[self._middle], "best": {"threshold": self._thresholds[best], **rows[best]}}


def _rand(counts: np.ndarray) -> Dict[str, float]:
    both, true, found = (float(count) for count in counts)
    return {"split": both / true, "merge": both / found, "score": 2 * both / (true + found)}
