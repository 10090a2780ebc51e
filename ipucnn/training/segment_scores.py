"""The scores of a membrane segmentation in the ISBI 2012 challenge: V^Rand and V^Info, foreground-restricted.

Arganda-Carreras et al. 2015, "Crowdsourcing the creation of image segmentation algorithms for connectomics",
Frontiers in Neuroanatomy 9:142.  A segmentation is the set of 4-connected components of the pixels that are
cell.  With T the components of the truth, S those of the prediction, over the n pixels that are cell in the
truth (the membrane of the truth is left out, hence foreground-restricted):

  V^Rand  compares the components of two pixels drawn at random.  split = P(both in one of S | both in one of T),
          which is lower if cells are split; merge = P(both in one of T | both in one of S), which is lower if
          cells are merged.
  V^Info  I(S; T) is the information that S and T share.  split = I / H(S), merge = I / H(T).

The score of both is the harmonic mean of split and merge.  Each pixel that is membrane in the prediction and cell
in the truth is its own component, as in the challenge's script (RandError, VariationOfInformation of Fiji's
Trainable Segmentation).  As in the script, pairs of V^Rand are counted over all images, and V^Info is the mean
over images.  The script of the final leader board ("after border thinning") first thins the prediction's
membranes to lines, so that their width does not count.  Both kinds are computed.
"""

import functools
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.compiled import HAS_KERNELS, import_numba, jit

SCORES = ("rand", "info", "rand_thinned", "info_thinned")
"""The scores of a segmentation, by their names in reports."""

THRESHOLDS = tuple(i / 10 for i in range(10))
"""Probabilities above which a pixel is cell: those of the script without 1.0, which no probability exceeds."""


def segment_pixels(
    predicted: np.ndarray, truth: np.ndarray, thin: bool = False
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the components of the pixels that are cell in the truth.

    Args:
        predicted, truth: bool (h, w), True for cell.
        thin: whether to thin the membranes of the prediction first.

    Returns:
        The number of each pixel's component in the truth, and in the prediction, both int64 (n,).
    """
    from scipy.ndimage import label  # its default structure connects 4 neighbours

    components = label(truth)[0]
    inside = components > 0
    true_components = components[inside].astype(np.int64)
    everywhere = thinned_components(predicted) if thin else label(predicted)[0]
    predicted_components = everywhere[inside].astype(np.int64)
    is_membrane = predicted_components == 0
    predicted_components[is_membrane] = int(everywhere.max()) + 1 + np.arange(int(is_membrane.sum()))
    return true_components, predicted_components


# The states of a pixel while membranes are flooded, besides the positive number of a component.
_DAM, _DRY, _WAITING, _OUTSIDE = 0, -2, -3, -4


def thinned_components(cell: np.ndarray) -> np.ndarray:
    """Returns the components of cells after thinning the membranes to lines.

    Components grow into the membrane around them, all at the same pace, until they meet, which leaves a dam.  This is
    the watershed of Vincent and Soille (IEEE PAMI 13(6), 1991, algorithm 4.1, its flooding of one level) with 4
    neighbours, as the challenge's script applies it to a mask.  If a membrane has an even width, the order of pixels
    decides on which side the dam is.  The order here is that of the script: column by column, and for each pixel the
    neighbours to the left, above, to the right and below.

    Args:
        cell: bool (h, w), True for cell.

    Returns:
        int64 (h, w) numbers of components from 1 on, 0 on dams.  An image without any cell is one component.
    """
    from scipy.ndimage import binary_dilation, label

    components, count = label(cell)
    if not count:
        return np.ones(cell.shape, np.int64)
    # Columns are stored as rows with a frame: neighbours are 1 and ``step`` away, and need no check of bounds.
    framed = np.pad(np.where(cell, components, _DRY).T, 1, constant_values=_OUTSIDE)
    state: np.ndarray = np.ascontiguousarray(framed, np.int64)
    shore = binary_dilation(state > 0) & (state == _DRY)
    reached = np.flatnonzero(shore)
    if len(reached):
        state[shore] = _WAITING
        queue: np.ndarray = np.zeros(int((~cell).sum()), np.int64)
        queue[: len(reached)] = reached
        _flood()(state.reshape(-1), queue, len(reached), state.shape[1])
    return state[1:-1, 1:-1].T


def _flood_level(pixels, queue, filled, step):  # type: ignore[no-untyped-def]
    """Floods ``pixels`` in place, from the first ``filled`` entries of ``queue`` on; it has room for all dry pixels."""
    at = 0
    while at < filled:
        pixel = queue[at]
        at += 1
        component, meet = _DAM, False
        for neighbour in (pixel - step, pixel - 1, pixel + step, pixel + 1):
            state = pixels[neighbour]
            if state > 0:
                if component != _DAM and component != state:
                    meet = True
                component = state
            elif state == _DRY:
                pixels[neighbour] = _WAITING
                queue[filled] = neighbour
                filled += 1
        # A pixel whose only flooded neighbours are dams becomes a dam.
        pixels[pixel] = _DAM if meet else component


@functools.lru_cache(maxsize=None)
def _flood() -> Callable[[np.ndarray, np.ndarray, int, int], None]:
    """Returns :func:`_flood_level`, compiled if Numba is in use; otherwise it runs on lists, which are faster."""
    if HAS_KERNELS:
        numba = import_numba()
        numbers = numba.int64[::1]
        compiled: Callable[[np.ndarray, np.ndarray, int, int], None] = jit(
            numbers, numbers, numba.int64, numba.int64
        )(_flood_level)
        return compiled

    def interpreted(pixels: np.ndarray, queue: np.ndarray, filled: int, step: int) -> None:
        values = pixels.tolist()
        _flood_level(values, queue.tolist(), filled, step)
        pixels[:] = values

    return interpreted


@dataclass(frozen=True)
class Overlaps:
    """The overlaps of the truth's components with the prediction's, over which all scores are sums.

    Attributes:
        both: int64 (m,), the number of pixels in both components of each of the m pairs that overlap.
        in_true, in_predicted: int64 (t,), (p,), the number of pixels in each component of truth and prediction.
        true, predicted: int64 (m,), the components of each pair in the truth and in the prediction.
    """

    both: np.ndarray
    in_true: np.ndarray
    in_predicted: np.ndarray
    true: np.ndarray
    predicted: np.ndarray


def overlaps(true: np.ndarray, predicted: np.ndarray) -> Overlaps:
    """Counts the pixels in each pair of components.

    scikit-learn's ``pair_confusion_matrix`` and ``homogeneity_completeness_v_measure`` count the same, but twice each,
    which takes a second per image and threshold if most pixels are their own components.

    Args:
        true, predicted: the components of the truth and of the prediction from :func:`segment_pixels`.
    """
    width = int(predicted.max()) + 1 if len(predicted) else 1
    keys, both = np.unique(true * width + predicted, return_counts=True)
    return Overlaps(both, np.bincount(true), np.bincount(predicted), keys // width, keys % width)


def pairs(counts: Overlaps) -> np.ndarray:
    """Returns float64 (3,), the pairs of pixels that share a component in both, in the truth, and in the prediction.

    Pairs are ordered, and the pair of a pixel with itself is included.
    """
    sizes = (counts.both, counts.in_true, counts.in_predicted)
    return np.array([float((size.astype(np.int64) ** 2).sum()) for size in sizes])


def information(counts: Overlaps) -> Tuple[float, float, float]:
    """Returns (split, merge, score) of V^Info; split or merge is 1 if its entropy is 0.

    Args:
        counts: the overlaps of at least one pixel.
    """
    pixels = float(counts.both.sum())
    # p_ij log(p_ij / (p_i p_j)); each term is exact if the components are the same.
    expected = counts.in_true[counts.true] * (counts.in_predicted[counts.predicted] / pixels)
    shared = max(float((counts.both / pixels * np.log(counts.both / expected)).sum()), 0.0)
    split, merge = (
        min(shared / entropy, 1.0) if entropy > 0 else 1.0
        for entropy in (_entropy(counts.in_predicted, pixels), _entropy(counts.in_true, pixels))
    )
    score = 2 * split * merge / (split + merge) if split + merge else 0.0
    return split, merge, score


def _entropy(sizes: np.ndarray, pixels: float) -> float:
    shares = sizes[sizes > 0] / pixels
    return float(-(shares * np.log(shares)).sum())


class SegmentScores:
    """V^Rand and V^Info over several images and thresholds, for membranes as predicted and for thinned ones.

    Args:
        thresholds: probabilities above which a pixel is cell; 0.5 must be one of them.
    """

    def __init__(self, thresholds: Sequence[float] = THRESHOLDS) -> None:
        self._thresholds = tuple(thresholds)
        self._middle = self._thresholds.index(0.5)
        self._predicted, self._thinned = (_Sums(len(self._thresholds)) for _ in range(2))

    def add(self, cell: np.ndarray, truth: np.ndarray) -> Optional[Dict[str, float]]:
        """Adds an image.

        Args:
            cell: (h, w) probability of cell in [0, 1].
            truth: (h, w), above 0 for cell; ignored pixels are left out as membranes are.

        Returns:
            Each of ``SCORES`` for this image alone at threshold 0.5; None if its truth has no cell, in which case the
            image is ignored.
        """
        truth = np.asarray(truth) > 0
        if not truth.any():
            return None
        masks = [np.asarray(cell) > threshold for threshold in self._thresholds]
        scores: Dict[str, float] = {}
        for sums, ending in ((self._predicted, ""), (self._thinned, "_thinned")):
            counted: List[Overlaps] = []
            for number, mask in enumerate(masks):
                # Most pixels are far from any threshold: neighbouring ones often give the same mask.
                same = number > 0 and np.array_equal(mask, masks[number - 1])
                counted.append(
                    counted[-1] if same else overlaps(*segment_pixels(mask, truth, thin=bool(ending)))
                )
            of_image = sums.add(counted)
            scores["rand" + ending] = _rand(of_image[self._middle])["score"]
            scores["info" + ending] = sums.information[-1][self._middle][2]
        return {name: scores[name] for name in SCORES}

    def result(self) -> Optional[Dict[str, Any]]:
        """Returns ``score``, ``split`` and ``merge`` for each of ``SCORES``; None if no image had a cell.

        The values are those at threshold 0.5; ``best`` has those at the ``threshold`` with the highest score.
        """
        if not self._predicted.information:
            return None
        scores_by_name = {}
        for sums, ending in ((self._predicted, ""), (self._thinned, "_thinned")):
            measures = np.mean(sums.information, axis=0)
            info = [dict(zip(("split", "merge", "score"), map(float, row))) for row in measures]
            scores_by_name["rand" + ending] = self._with_best([_rand(counts) for counts in sums.pairs])
            scores_by_name["info" + ending] = self._with_best(info)
        return {name: scores_by_name[name] for name in SCORES}

    def _with_best(self, rows: List[Dict[str, float]]) -> Dict[str, Any]:
        best = max(range(len(rows)), key=lambda i: rows[i]["score"])
        return {**rows[self._middle], "best": {"threshold": self._thresholds[best], **rows[best]}}


class _Sums:
    """The sums over images for each threshold.

    Attributes:
        pairs: float64 (thresholds, 3), the sums of :func:`pairs` over images.
        information: the results of :func:`information` for each image and threshold.
    """

    def __init__(self, thresholds: int) -> None:
        self.pairs: np.ndarray = np.zeros((thresholds, 3))
        self.information: List[List[Tuple[float, float, float]]] = []

    def add(self, counted: Sequence[Overlaps]) -> np.ndarray:
        """Adds an image, with its overlaps at each threshold; returns the pairs of this image."""
        pairs_of_image: np.ndarray = np.array([pairs(counts) for counts in counted])
        self.pairs += pairs_of_image
        self.information.append([information(counts) for counts in counted])
        return pairs_of_image


def _rand(counts: np.ndarray) -> Dict[str, float]:
    both, true, predicted = (float(count) for count in counts)
    return {"split": both / true, "merge": both / predicted, "score": 2 * both / (true + predicted)}
