"""Scores of predictions, written from their definitions: one sample and one pixel at a time, in Python's floats."""

import math
from dataclasses import dataclass, field
from typing import Any, Dict, List

import numpy as np


@dataclass
class NaiveScores:
    """The scores of all samples of a positive weight.

    Attributes:
        losses: the loss of each such sample.
        result: the figures of a validation.
        confusion: counts [true class][predicted class].
        bins: number of the bin of a confidence -> its predictions, as pairs (confidence, whether it is right).
    """

    losses: List[float] = field(default_factory=list)
    result: Dict[str, float] = field(default_factory=dict)
    confusion: List[List[int]] = field(default_factory=list)
    bins: Dict[int, Any] = field(default_factory=dict)

    @property
    def calibration_error(self) -> float:
        n = sum(map(len, self.bins.values()))
        return sum(
            len(b) / n * abs(sum(hit for _, hit in b) / len(b) - sum(c for c, _ in b) / len(b))
            for b in self.bins.values()
        )


def probabilities_of(logits: Any) -> List[float]:
    powers = [math.exp(float(x) - float(max(logits))) for x in logits]
    return [p / sum(powers) for p in powers]


def naive_scores(
    logits: np.ndarray, labels: np.ndarray, weights: Any, loss: str = "cross_entropy", smoothing: float = 0.0
) -> NaiveScores:
    classes = logits.shape[-1]
    scores = NaiveScores(confusion=[[0] * classes for _ in range(classes)])
    total, top5 = [], 0
    for sample, truths, weight in zip(logits, labels, weights):
        if not weight:
            continue
        known = [(row, k) for row, k in zip(sample.reshape(-1, classes), np.ravel(truths).tolist()) if k >= 0]
        shares, entropies = [probabilities_of(row) for row, _ in known], []
        for (row, label), p in zip(known, shares):
            order = sorted(range(classes), key=lambda c: (-row[c], c))
            target = [(1 - smoothing) * (c == label) + smoothing / classes for c in range(classes)]
            entropies.append(-sum(t * math.log(q) for t, q in zip(target, p) if t))
            scores.confusion[label][order[0]] += 1
            top5 += label in order[:5]
            for m in range(15):
                if m / 15 < max(p) <= (m + 1) / 15:
                    scores.bins.setdefault(m, []).append((max(p), order[0] == label))
        value = math.fsum(entropies) / len(known)
        if loss == "bce_dice":
            for k in range(1, classes):  # each class alone, then their mean
                overlap = sum(p[k] for (_, label), p in zip(known, shares) if label == k)
                both = sum(p[k] for p in shares) + sum(label == k for _, label in known)
                value += (1 - (2 * overlap + 1) / (both + 1)) / (classes - 1)
        scores.losses.append(value)
        total.append(float(weight))
    matrix, n = scores.confusion, math.fsum(total)
    pixels = sum(map(sum, matrix))
    scores.result = {
        "samples": n,
        "loss": math.fsum(w * value for w, value in zip(total, scores.losses)) / n,
        "accuracy": sum(matrix[k][k] for k in range(classes)) / pixels,
    }
    if labels.ndim == 1:
        if classes > 5:
            scores.result["top5"] = top5 / n
        return scores
    right = [matrix[k][k] for k in range(classes)]
    either = [sum(matrix[k]) + sum(row[k] for row in matrix) - right[k] for k in range(classes)]
    dice = [2 * r / (r + e) if e else 1.0 for r, e in zip(right, either)]
    present = [k for k in range(1, classes) if either[k]]
    scores.result["dice"] = sum(dice[k] for k in present) / len(present) if present else 1.0
    scores.result["iou"] = sum(right[k] / either[k] for k in present) / len(present) if present else 1.0
    if classes == 2:
        foreground = sum(matrix[1])
        scores.result["dice_background"] = dice[0]
        scores.result["dice_all_foreground"] = 2 * foreground / (foreground + pixels)
    else:
        scores.result.update({f"dice_class_{k}": score for k, score in enumerate(dice) if either[k]})
    return scores
