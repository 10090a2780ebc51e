"""Scores of predictions: sums over batches in int64 and float64, averaged only at the end.

NumPy computes them from logits, so the figures of a large set are exact to float64 rounding, and do not depend on the
batch size, the session or the version of TensorFlow.  The loss is that of :mod:`ipucnn.training.losses`, whose float32
formula training differentiates.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.aliases import Tensor
from ipucnn.errors import DataError

Sums = Dict[str, Union[float, List[int]]]
"""The sums of a batch by name, as plain JSON values: a number, or the numbers of pixels of each class."""

NUM_BINS = 15
"""Bins of the calibration error, as many as in Guo et al. 2017 (arXiv:1706.04599)."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns float64 (..., classes) for logits (..., classes), shifted by the largest so that nothing overflows."""
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def soft_dice(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the soft Dice of one image, 2 sum(p t) / (sum(p p) + sum(t t)), averaged over all classes.

    The sums are over the pixels that are not ignored.

    The public U-Net application reports its mean over images as the accuracy (``losses.py``,
    ``dice_coef_accuracy_fn``).

    Args:
        logits: (h, w, classes).
        labels: integer (h, w); pixels below 0 are ignored.
    """
    known = np.asarray(labels) >= 0
    probabilities = np.exp(log_softmax(logits)) * known[..., np.newaxis]
    truth = np.arange(logits.shape[-1]) == np.asarray(labels)[..., np.newaxis]
    overlap = (probabilities * truth).sum(axis=(0, 1))
    total = (probabilities**2).sum(axis=(0, 1)) + truth.sum(axis=(0, 1))
    return float(((2.0 * overlap + 1e-6) / (total + 1e-6)).mean())


def in_top5(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns bool (n,): whether fewer than five classes rank before the label in logits (n, classes).

    The lower of two classes with equal logits ranks first, as in argmax.  A label's logit that is not finite is never
    right.
    """
    label_logits = np.take_along_axis(logits, labels[:, None], axis=1)
    lower = np.arange(logits.shape[1])[None] < labels[:, None]
    before = (logits > label_logits) | ((logits == label_logits) & lower)
    return (before.sum(axis=1) < 5) & np.isfinite(label_logits[:, 0])


class Predictions:
    """The predictions for the samples of a batch, without its padding.

    Args:
        logits: (n, classes) or (n, h, w, classes).
        labels: integer (n,) or (n, h, w); pixels below 0 are ignored.
        weights: (n,), 0 for padding; for patches, the number of pixels that count.

    Attributes:
        labels: int64, the true classes.
        classes: int64, the predicted classes, shaped like ``labels``.
        logs: float64, the logarithms of the probabilities; NaN where the logits are not finite.

    Raises:
        DataError: a label is not a class.
    """

    @np.errstate(invalid="ignore")
    def __init__(
        self,
        logits: Union[np.ndarray, Tensor],
        labels: Union[np.ndarray, Tensor],
        weights: Union[np.ndarray, Tensor],
    ) -> None:
        labels = np.asarray(labels, np.int64)
        self._weights: np.ndarray = np.asarray(weights, np.float64)
        self.num_classes = np.shape(logits)[-1]
        # Before padding goes: a mask of nothing but wrong labels has weight 0, too.
        _check_labels(labels, -1 if labels.ndim > 1 else 0, self.num_classes)
        is_sample = self._weights > 0
        self._weights = self._weights[is_sample]
        self._logits: np.ndarray = np.asarray(logits)[is_sample]
        self.labels: np.ndarray = labels[is_sample]
        self.logs = log_softmax(self._logits)
        # The prediction comes from the logits: rounding could make two entries of ``logs`` equal, and change it.
        self.classes: np.ndarray = self._logits.argmax(axis=-1)

    @np.errstate(invalid="ignore")
    def sums(self, loss: str = "cross_entropy", label_smoothing: Optional[float] = None) -> Sums:
        """Returns the sums of the batch for :class:`Totals`.

        Args:
            loss: "cross_entropy" or "bce_dice" (cross-entropy plus 1 - mean soft Dice of the foreground classes, for
                each sample separately).
            label_smoothing: the label smoothing of the cross-entropy.

        Returns:
            ``samples``, the sum of the weights, and ``loss``.  For classification, the weights of ``right`` predictions
            and, of six classes or more, of those in the ``top5``; for segmentation, lists of the pixels of each class:
            those that have it in truth (``actual``), in the prediction (``predicted``) and in both (``right``).
        """
        weights = self._weights
        losses = self._losses(loss, float(label_smoothing or 0.0))
        sums: Sums = {"samples": float(weights.sum()), "loss": float((losses * weights).sum())}
        if self.labels.ndim == 1:
            sums["right"] = float(weights[self.classes == self.labels].sum())
            if self.num_classes > 5:  # of fewer, all are the five most probable ones
                sums["top5"] = float(weights[in_top5(self._logits, self.labels)].sum())
            return sums
        known = self.labels >= 0
        actual, predicted = self.labels[known], self.classes[known]
        right = actual[actual == predicted]
        for name, classes in (("actual", actual), ("predicted", predicted), ("right", right)):
            sums[name] = np.bincount(classes, minlength=self.num_classes).tolist()
        return sums

    def _losses(self, name: str, smoothing: float) -> np.ndarray:
        """Returns the loss of each sample, float64 (n,): that of training with micro-batches of one sample."""
        labels, logs, known = self.labels, self.logs, self.labels >= 0
        losses = -np.take_along_axis(logs, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        if smoothing:
            losses = (1.0 - smoothing) * losses - smoothing * logs.mean(axis=-1)
        axes = tuple(range(1, labels.ndim))
        losses = (losses * known).sum(axis=axes) / np.maximum(known.sum(axis=axes), 1)
        if name == "bce_dice":
            truth = np.arange(1, self.num_classes) == labels[..., None]
            foreground = np.exp(logs[..., 1:]) * known[..., None]
            overlap = (foreground * truth).sum(axis=axes)
            total = foreground.sum(axis=axes) + truth.sum(axis=axes)
            losses = losses + (1.0 - (2.0 * overlap + 1.0) / (total + 1.0)).mean(axis=-1)
        return losses


def _check_labels(labels: np.ndarray, least: int, num_classes: int) -> None:
    if labels.size and (labels.min() < least or labels.max() >= num_classes):
        raise DataError(
            f"labels from {labels.min()} to {labels.max()} for {num_classes} classes",
            "check the data set",
        )


class Totals:
    """The sums over all batches of a validation."""

    def __init__(self) -> None:
        self._sums: Dict[str, np.ndarray] = {}

    def add(self, sums: Sums) -> None:
        """Adds the result of :meth:`Predictions.sums`."""
        for key, value in sums.items():
            self._sums[key] = self._sums.get(key, 0) + np.asarray(value)

    def result(self) -> Dict[str, float]:
        """Returns means over samples: ``samples``, ``loss``, ``accuracy``, and ``dice`` and ``iou`` of masks.

        Of six classes of images or more there is ``top5``.

        The accuracy of a segmentation network is over the pixels that count.  With two classes of pixels there are
        also ``dice_background``, the score of class 0, and ``dice_all_foreground``, the score of predicting foreground
        for every pixel, which is the baseline for ``dice``.  With more classes ``dice`` and ``iou`` are the means of
        :func:`mean_scores`, and ``dice_class_K`` is the score of each class that is present or predicted.
        """
        t = {key: value.tolist() for key, value in self._sums.items()}
        n = t.get("samples", 0.0)
        if not n:
            return {"samples": 0.0}
        result = {"samples": n, "loss": t["loss"] / n}
        if "actual" not in t:
            top5 = {"top5": t["top5"] / n} if "top5" in t else {}
            return {**result, "accuracy": t["right"] / n, **top5}
        pixels = sum(t["actual"])
        result["accuracy"] = sum(t["right"]) / max(pixels, 1)
        counts = [(r, a + p) for r, a, p in zip(t["right"], t["actual"], t["predicted"])]
        result["dice"], result["iou"] = mean_scores(counts)
        if len(counts) > 2:
            scores = enumerate(counts)
            result.update({f"dice_class_{k}": 2 * right / both for k, (right, both) in scores if both})
        elif len(counts) == 2:
            foreground, (right, both) = t["actual"][1], counts[0]
            result["dice_background"] = 2 * right / both if both else 1.0
            result["dice_all_foreground"] = 2 * foreground / (foreground + pixels) if pixels else 1.0
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


def confusion_matrix(truth: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns the counts int64 [true, predicted] of labels and predictions of one shape; labels below 0 are ignored."""
    known = truth >= 0
    cells = np.bincount(
        truth[known].astype(np.int64) * num_classes + predicted[known], minlength=num_classes**2
    )
    return cells.reshape(num_classes, num_classes)


def class_figures(confusion: np.ndarray) -> Dict[str, Any]:
    """Returns ``accuracy``, and ``dice`` and ``iou`` of each class, from counts [true, predicted].

    Both are None for a class that occurs neither in the truth nor in the prediction.
    """
    right = np.diag(confusion).astype(float)
    both = (confusion.sum(axis=0) + confusion.sum(axis=1)).astype(float)

    def shares(numerator: np.ndarray, denominator: np.ndarray) -> List[Optional[float]]:
        return [float(a / b) if b else None for a, b in zip(numerator, denominator)]

    return {
        "accuracy": float(right.sum() / confusion.sum()),
        "dice": shares(2 * right, both),
        "iou": shares(right, both - right),
    }


class EvaluationTotals:
    """The sums of ``ipucnn evaluate``, with a confusion matrix and a reliability diagram.

    Args:
        num_classes: the number of classes; labels are 0 .. num_classes - 1.
        loss, label_smoothing: as for :meth:`Predictions.sums`.
    """

    def __init__(
        self, num_classes: int, loss: str = "cross_entropy", label_smoothing: Optional[float] = None
    ) -> None:
        self.num_classes = num_classes
        self.samples = 0
        self.confusion: np.ndarray = np.zeros((num_classes, num_classes), np.int64)
        self._loss = (loss, label_smoothing)
        self._totals = Totals()
        self._bin_counts: np.ndarray = np.zeros(NUM_BINS, np.int64)
        self._bin_right: np.ndarray = np.zeros(NUM_BINS, np.int64)
        self._bin_confidence: np.ndarray = np.zeros(NUM_BINS, np.float64)

    def add(self, logits: np.ndarray, labels: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Adds samples, none of which is padding.

        Args:
            logits: (n, classes) or (n, h, w, classes).
            labels: integer (n,) or (n, h, w); pixels below 0 are ignored.

        Returns:
            The predicted classes, int64, and their probabilities, float64, shaped like ``labels``.

        Raises:
            DataError: an output of the network is NaN or infinite, or a label is not a class.
        """
        if not np.isfinite(logits).all():
            raise DataError(
                "the network's outputs are not finite: its weights are damaged, or its training diverged",
                "evaluate an earlier checkpoint with --checkpoint",
            )
        counted = np.asarray(labels) >= 0
        # The loss of masks is a mean over all pixels that count, whatever the sizes of the images.
        weights = np.ones(len(labels)) if counted.ndim == 1 else counted.sum(axis=(1, 2))
        predictions = Predictions(logits, labels, weights)
        self._totals.add(predictions.sums(*self._loss))
        self.samples += len(labels)
        confidence = np.exp(predictions.logs.max(axis=-1))
        self.confusion += confusion_matrix(predictions.labels, predictions.classes, self.num_classes)
        known = predictions.labels >= 0
        self._add_to_bins(confidence[known], (predictions.labels == predictions.classes)[known])
        return predictions.classes, confidence

    def _add_to_bins(self, confidence: np.ndarray, is_right: np.ndarray) -> None:
        # Bin m holds confidences in ((m - 1) / M, m / M] (Guo et al. 2017, section 2).
        bins = np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        self._bin_counts += np.bincount(bins, minlength=NUM_BINS)
        self._bin_right += np.bincount(bins[is_right], minlength=NUM_BINS)
        self._bin_confidence += np.bincount(bins, weights=confidence, minlength=NUM_BINS)

    def result(self) -> Dict[str, Any]:
        """Returns the scores of :meth:`Totals.result` but those of single classes, and ``calibration_error``.

        Loss, accuracy and calibration of a segmentation network are over pixels; :meth:`Totals.result` defines scores.

        Raises:
            ValueError: nothing was added.
        """
        if not self.samples:
            raise ValueError("no sample was added")
        scores = self._totals.result()
        names = [name for name in ("loss", "accuracy", "top5", "dice", "iou") if name in scores]
        gaps = np.abs(self._bin_right - self._bin_confidence)
        return {
            "samples": self.samples,
            **{name: scores[name] for name in names},
            "calibration_error": float(gaps.sum() / int(self.confusion.sum())),
        }

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

        They are ``count`` (true samples or pixels), ``predicted``, ``accuracy`` (recall), ``precision``, ``f1`` and
        ``iou``.  A ratio with denominator 0 is None.
        """
        matrix = self.confusion
        figures = class_figures(matrix)
        rows = []
        for i, name in enumerate(names):
            count, predicted = int(matrix[i].sum()), int(matrix[:, i].sum())
            right = int(matrix[i, i])
            rows.append(
                {
                    "class": i,
                    "name": name,
                    "count": count,
                    "predicted": predicted,
                    "accuracy": right / count if count else None,
                    "precision": right / predicted if predicted else None,
                    "f1": figures["dice"][i],
                    "iou": figures["iou"][i],
                }
            )
        return rows
