"""Sums and maxima over all ranges of a sequence at once.

Tables have shape (n, n + 1); [a, b] is about the items a .. b - 1 and has a meaning where b > a.
"""

from typing import Any, List, Sequence

import numpy as np

__all__ = ["distinct_sum", "range_maximum", "range_sum"]


def range_sum(values: np.ndarray) -> np.ndarray:
    """[a, b]: sum of the items' values."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return prefix[None, :] - prefix[:-1, None]


def range_maximum(values: np.ndarray) -> np.ndarray:
    """[a, b]: largest of the items' values; 0 where b <= a."""
    n = len(values)
    table = np.zeros((n, n + 1))
    for a in range(n):
        table[a, a + 1 :] = np.maximum.accumulate(values[a:])
    return table


def distinct_sum(
    occurrences: Sequence[Any],
    weights: Any,
    num_items: int,
    after: Any = None,
) -> np.ndarray:
    """[a, b]: sum of the weights of the things that occur at least once in items a .. b - 1.

    A thing counts where its first occurrence at or after a lies before b.  For an occurrence u and the one before it,
    p, that is the rectangle p < a <= u < b, so that everything is a sum of rectangles: O(occurrences + n^2).

    Args:
        occurrences: for each thing the items in which it occurs, ascending.
        after: for each thing an item: it counts only in ranges that begin behind that item; None: in all.
    """
    corners = np.zeros((num_items + 1, num_items + 1))
    rows: List[int] = []
    columns: List[int] = []
    signed: List[float] = []
    for thing, (items, weight) in enumerate(zip(occurrences, weights)):
        before = -1 if after is None else int(after[thing])
        for item in items:
            if item > before:
                rows += [before + 1, item + 1]
                columns += [item + 1, item + 1]
                signed += [weight, -weight]
                before = item
    np.add.at(corners, (rows, columns), signed)
    return corners.cumsum(axis=0).cumsum(axis=1)[:num_items]
