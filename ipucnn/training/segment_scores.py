"""The ISBI 2012 challenge's scores of a membrane segmentation: V^Rand and V^Info, foreground-restricted.

Arganda-Carreras et al. 2015, "Crowdsourcing the creation of image segmentation algorithms for connectomics",
Frontiers in Neuroanatomy 9:142.  A segmentation is the set of 4-connected components of the pixels that are
cell.  With T the components of the truth, S those of the prediction, over the n pixels that are cell in the
truth (the membrane of the truth is left out, hence foreground-restricted):

  V^Rand  two pixels drawn at random are in one component.  split = P(in one of S | in one of T), which pieces
          of cells lower; merge = P(in one of T | in one of S), which cells that flow together lower.
  V^Info  I(S; T) is the information that S and T share.  split = I / H(S), merge = I / H(T).

The score of both is the harmonic mean of split and merge.  Where the prediction has membrane in a cell of the
truth, each pixel is a component of its own, as in the challenge's script (RandError, VariationOfInformation
of Fiji's Trainable Segmentation).  As there, pairs of V^Rand are counted over all images together, and V^Info
is the mean over images.  The script for the final leader board thins the membranes first; these scores
do not.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

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
