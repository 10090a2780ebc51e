"""Evaluation of a segmentation network on whole images: pixels, the scores of the ISBI 2012 challenge, a baseline."""

import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples
from ipucnn.errors import DataError
from ipucnn.runs.images.segmentation import TiledNetwork
from ipucnn.runs.infer_masks import foreground_probability
from ipucnn.runs.trained import Subject
from ipucnn.training.evaluation import EvaluationTotals
from ipucnn.training.segment_scores import SegmentScores

__all__ = ["JudgedImage", "MaskEvaluation", "class_figures", "has_membranes", "mean_dice"]


@dataclass(frozen=True)
class JudgedImage:
    """An image that was evaluated.

    Attributes:
        row: ``image``, ``accuracy``, ``dice`` of each class, and where the truth is membranes ``rand`` and ``info``.
        image: uint8 [h, w, c].
        truth, predicted: [h, w] classes.
        class_names: of all classes.
    """

    row: Dict[str, Any]
    image: Any
    truth: Any
    predicted: Any
    class_names: Tuple[str, ...]


class MaskEvaluation:
    """Evaluates images one by one.

    Args:
        subject: the network and the set.
        network: for images of any size.
        totals: where losses and pixels go.
    """

    def __init__(self, subject: Subject, network: TiledNetwork, totals: EvaluationTotals) -> None:
        self._info, self._examples = subject.setup.source.info, subject.setup.source.eval
        if not isinstance(self._examples, ArrayExamples):
            raise DataError(f"data set {self._info.name} has no masks", "take one with masks")
        self._network, self._totals = network, totals
        self._scores = SegmentScores() if has_membranes(self._info.class_names) else None
        self._baseline = SegmentScores((0.5,)) if self._scores is not None else None
        self.rows: List[Dict[str, Any]] = []
        self._network_s = self._scores_s = 0.0

    def run(
        self,
        on_image: Callable[[JudgedImage], None] = lambda image: None,
        on_batch: Callable[[int], None] = lambda done: None,
    ) -> int:
        """All images of the evaluation set.

        Returns:
            How many there were.
        """
        images, masks = self._examples.images, self._examples.labels
        for i in range(len(self._examples)):
            on_image(self._one(i, images[i], np.asarray(masks[i])))
            on_batch(i + 1)
        return len(self._examples)

    def _one(self, number: int, image: Any, truth: Any) -> JudgedImage:
        self._network.prepare(image.shape)
        started = time.perf_counter()
        logits = self._network.logits(image)
        self._network_s += time.perf_counter() - started
        before = self._totals.confusion.copy()
        predicted = self._totals.add(logits[np.newaxis], truth[np.newaxis])[0][0]
        figures = class_figures(self._totals.confusion - before)
        row: Dict[str, Any] = {
            "image": f"{self._info.name}/eval/{number}",
            "accuracy": figures["accuracy"],
            "dice": figures["dice"],
        }
        if self._scores is not None and self._baseline is not None:
            started = time.perf_counter()
            own = self._scores.add(foreground_probability(logits), truth)
            row.update({"rand": None, "info": None} if own is None else own)
            self._baseline.add(np.ones(truth.shape), truth)
            self._scores_s += time.perf_counter() - started
        self.rows.append(row)
        return JudgedImage(row, image, truth, predicted, self._info.class_names)

    def report(self) -> Dict[str, Any]:
        """``dice`` and ``iou`` of each class, ``scores`` of the challenge (None without membranes), ``baseline``: what
        calling every pixel the most frequent class scores, a row for each image, and how long the network (once it
        was built) and the challenge's scores took.
        """
        confusion = self._totals.confusion
        most = int(confusion.sum(axis=1).argmax())
        trivial = np.zeros_like(confusion)
        trivial[:, most] = confusion.sum(axis=1)
        baseline = {"class": self._info.class_names[most], **class_figures(trivial), "scores": None}
        if self._baseline is not None and most == 1:
            found = self._baseline.result()
            if found is not None:
                baseline["scores"] = {name: part["score"] for name, part in found.items()}
        figures = class_figures(confusion)
        return {
            "dice": figures["dice"],
            "iou": figures["iou"],
            "scores": None if self._scores is None else self._scores.result(),
            "baseline": baseline,
            "images": self.rows,
            "network_s": self._network_s,
            "scores_s": self._scores_s,
            "tile_sizes": self._network.tile_sizes,
            "views": self._network.views,
        }


def has_membranes(class_names: Sequence[str]) -> bool:
    """Whether a set's truth is membranes between cells, which the challenge's scores are for."""
    return tuple(class_names) == ("membrane", "cell")


def class_figures(confusion: Any) -> Dict[str, Any]:
    """``accuracy``, and ``dice`` and ``iou`` of each class, from counts [true, predicted].

    Of a class that is neither there nor predicted both are None.
    """
    right = np.diag(confusion).astype(float)
    both = (confusion.sum(axis=0) + confusion.sum(axis=1)).astype(float)

    def shares(numerator: Any, denominator: Any) -> List[Optional[float]]:
        return [float(a / b) if b else None for a, b in zip(numerator, denominator)]

    return {
        "accuracy": float(right.sum() / confusion.sum()),
        "dice": shares(2 * right, both),
        "iou": shares(right, both - right),
    }


def mean_dice(row: Dict[str, Any]) -> float:
    """What images are ranked by, from worst to best: the mean Dice of the classes."""
    return float(np.mean([value for value in row["dice"] if value is not None]))
