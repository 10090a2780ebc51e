"""Computes the figures of ``ipucnn evaluate`` from sums over batches in int64 and float64, averaged only at the end.

NumPy computes them from logits, so the figures of a large set are exact to float64 rounding, and do not depend on the
batch size, the session or the version of TensorFlow.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.errors import DataError
from ipucnn.training.metrics import mean_scores

NUM_BINS = 15
"""Bins of the calibration error, as many as in Guo et al. 2017 (arXiv:1706.04599)."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns float64 (..., classes) for logits (..., classes), shifted by the largest so that nothing overflows."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def soft_dice(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the soft Dice of one image, 2 sum(p t) / (sum(p p) + sum(t t)), averaged over all classes.

    The public U-Net application reports its mean over images as the accuracy (``losses.py``,
    ``dice_coef_accuracy_fn``).

    Args:
        logits: (h, w, classes).
        labels: integer (h, w).
    """
    probabilities = np.exp(log_softmax(logits))
    truth = np.arange(logits.shape[-1]) == np.asarray(labels)[..., np.newaxis]
    overlap = (probabilities * truth).sum(axis=(0, 1))
    total = (probabilities**2).sum(axis=(0, 1)) + truth.sum(axis=(0, 1))
    return float(((2.0 * overlap + 1e-6) / (total + 1e-6)).mean())


def ranks(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns int64 (n,): the number of classes that rank before the label in logits (n, classes).

    The lower of two classes with equal logits ranks first, as in argmax.
    """
    label_logits = np.take_along_axis(logits, labels[:, None], axis=1)
    lower = np.arange(logits.shape[1])[None] < labels[:, None]
    return ((logits > label_logits) | ((logits == label_logits) & lower)).sum(axis=1)


class EvaluationTotals:
    """Sums over the samples of an evaluation; for segmentation, over their pixels.

    Args:
        num_classes: the number of classes; labels are 0 .. num_classes - 1.
        loss: "cross_entropy" or "bce_dice" (cross-entropy plus 1 - mean soft Dice of the foreground classes, for each
            sample separately).
        label_smoothing: the label smoothing of the cross-entropy.
    """

    def __init__(
        self, num_classes: int, loss: str = "cross_entropy", label_smoothing: Optional[float] = None
    ) -> None:
        self.num_classes = num_classes
        self.samples = 0
        self.confusion: np.ndarray = np.zeros((num_classes, num_classes), np.int64)
        self._dice_loss = loss == "bce_dice"
        self._smoothing = float(label_smoothing or 0.0)
        self._pixels = False
        self._loss = 0.0
        self._top5 = 0
        self._bin_counts: np.ndarray = np.zeros(NUM_BINS, np.int64)
        self._bin_right: np.ndarray = np.zeros(NUM_BINS, np.int64)
        self._bin_confidence: np.ndarray = np.zeros(NUM_BINS, np.float64)

    def add(self, logits: np.ndarray, labels: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Adds samples, none of which is padding.

        Args:
            logits: (n, classes) or (n, h, w, classes).
            labels: integer (n,) or (n, h, w).

        Returns:
            The predicted classes, int64, and their probabilities, float64, shaped like ``labels``.

        Raises:
            DataError: an output of the network is NaN or infinite, or a label is not a class.
        """
        logits, labels = np.asarray(logits), np.asarray(labels, np.int64)
        if not np.isfinite(logits).all():
            raise DataError(
                "the network's outputs are not finite: its weights are damaged, or its training diverged",
                "evaluate an earlier checkpoint with --checkpoint",
            )
        if labels.size and (labels.min() < 0 or labels.max() >= self.num_classes):
            raise DataError(
                f"labels from {labels.min()} to {labels.max()} for {self.num_classes} classes",
                "check the data set",
            )
        logs = log_softmax(logits)
        self.samples += len(labels)
        self._pixels = labels.ndim > 1
        self._loss += float(self._losses(logs, labels).sum())
        flat, truth = logs.reshape(-1, self.num_classes), labels.reshape(-1)
        # The prediction comes from the logits: rounding could make two entries of ``logs`` equal, and change it.
        predicted = logits.reshape(-1, self.num_classes).argmax(axis=1)
        cells = np.bincount(truth * self.num_classes + predicted, minlength=self.num_classes**2)
        self.confusion += cells.reshape(self.num_classes, self.num_classes)
        if not self._pixels:
            self._top5 += int((ranks(logits, labels) < 5).sum())
        confidence = np.exp(flat.max(axis=1, initial=-np.inf))
        self._add_to_bins(confidence, predicted == truth)
        return predicted.reshape(labels.shape), confidence.reshape(labels.shape)

    def _losses(self, logs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns the loss of each sample, float64 (n,)."""
        label_logs = np.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]
        loss = -label_logs
        if self._smoothing:
            loss = (1.0 - self._smoothing) * loss - self._smoothing * logs.mean(axis=-1)
        loss = loss.reshape(len(labels), int(np.prod(labels.shape[1:]))).mean(axis=1)
        if self._dice_loss:
            truth = np.arange(1, self.num_classes) == labels[..., None]
            foreground = np.exp(logs[..., 1:])
            axes = tuple(range(1, logs.ndim - 1))
            overlap = (foreground * truth).sum(axis=axes)
            total = foreground.sum(axis=axes) + truth.sum(axis=axes)
            # As ipucnn.training.losses, with a micro-batch of one sample.
            loss = loss + (1.0 - (2.0 * overlap + 1.0) / (total + 1.0)).mean(axis=-1)
        return loss

    def _add_to_bins(self, confidence: np.ndarray, is_right: np.ndarray) -> None:
        # Bin m holds confidences in ((m - 1) / M, m / M] (Guo et al. 2017, section 2).
        bins = np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        self._bin_counts += np.bincount(bins, minlength=NUM_BINS)
        self._bin_right += np.bincount(bins[is_right], minlength=NUM_BINS)
        self._bin_confidence += np.bincount(bins, weights=confidence, minlength=NUM_BINS)

    def result(self) -> Dict[str, Any]:
        """Returns ``samples``, ``loss``, ``accuracy``, ``top5`` or ``dice`` and ``iou``, and ``calibration_error``.

        Accuracy and calibration of a segmentation network are over pixels.  With two classes, Dice and IoU are those of
        class 1; with more, they are means over all classes but class 0 (``metrics.mean_scores``).

        Raises:
            ValueError: nothing was added.
        """
        if not self.samples:
            raise ValueError("no sample was added")
        matrix = self.confusion
        units = int(matrix.sum())
        result: Dict[str, Any] = {
            "samples": self.samples,
            "loss": self._loss / self.samples,
            "accuracy": int(np.trace(matrix)) / units,
        }
        if self._pixels:
            either = (matrix.sum(axis=0) + matrix.sum(axis=1)).tolist()
            result["dice"], result["iou"] = mean_scores(list(zip(np.diag(matrix).tolist(), either)))
        else:
            result["top5"] = self._top5 / units
        gaps = np.abs(self._bin_right - self._bin_confidence)
        result["calibration_error"] = float(gaps.sum() / units)
        return result

    def bins(self) -> List[Dict[str, Any]]:
        """Returns the reliability diagram: bounds, ``count``, mean ``confidence`` and ``accuracy`` of each bin.

        The means of an empty bin are None.
        """
        rows = []
        for i in range(NUM_BINS):
            count = int(self._bin_counts[i])
            rows.append(
                {
                    "lower": i / NUM_BINS,
                    "upper": (i + 1) / NUM_BINS,
                    "count": count,
                    "confidence": float(self._bin_confidence[i]) / count if count else None,
                    "accuracy": int(self._bin_right[i]) / count if count else None,
                }
            )
        return rows

    def classes(self, names: Sequence[str]) -> List[Dict[str, Any]]:
        """Returns figures of each class.

        They are ``count`` (true samples or pixels), ``predicted``, ``accuracy`` (recall), ``precision`` and ``iou``.
        A ratio with denominator 0 is None.
        """
        matrix = self.confusion
        rows = []
        for i, name in enumerate(names):
            count, predicted = int(matrix[i].sum()), int(matrix[:, i].sum())
            right = int(matrix[i, i])
            either = count + predicted - right
            rows.append(
                {
                    "class": i,
                    "name": name,
                    "count": count,
                    "predicted": predicted,
                    "accuracy": right / count if count else None,
                    "precision": right / predicted if predicted else None,
                    "iou": right / either if either else None,
                }
            )
        return rows
