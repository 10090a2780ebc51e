"""Why nothing fits: the item or ranges that fit nowhere, and the fewest stages that would."""

from typing import List, Optional, Tuple

import numpy as np

from ipucnn.planning.search.exact import search_one_ipu
from ipucnn.planning.search.tables import Infeasibility, StageTables

__all__ = ["explain", "fewest_stages", "some_split_fits"]


def some_split_fits(tables: StageTables, num_stages: int) -> bool:
    """Whether any split into that many stages fits, whatever its speed."""
    n = tables.num_items
    if num_stages > n:
        return False
    if tables.one_ipu:
        return bool(search_one_ipu(tables, num_stages).starts)
    reached: np.ndarray = np.zeros(n + 1, dtype=bool)
    reached[0] = True
    for stage in range(num_stages):
        reached = tables.fits(num_stages, stage)[reached[:n]].any(axis=0)
        if not reached.any():
            return False
    return bool(reached[n])


def fewest_stages(tables: StageTables, max_stages: int) -> Optional[int]:
    """The smallest number of stages into which some split fits; more stages stash more, so all are tried."""
    for num_stages in range(1, min(max_stages, tables.num_items) + 1):
        if some_split_fits(tables, num_stages):
            return num_stages
    return None


def _blocking_ranges(tables: StageTables, num_stages: int) -> List[Tuple[int, int]]:
    """Runs of items none of which any stage can hold, as many as a sweep from the left finds.

    Neighbours share an item at most, so that no cut is inside two of them.
    """
    n = tables.num_items
    least = np.full((n, n + 1), np.inf)
    for stage in range(num_stages):
        least = np.minimum(least, tables.memory(num_stages, stage))
    # Over all runs that contain items i .. j - 1: they start at or before i and end at or behind j.
    within = np.minimum.accumulate(np.minimum.accumulate(least, axis=0)[:, ::-1], axis=1)[:, ::-1]
    blocked = (within > tables.capacity_bytes) & ~np.tri(n, n + 1, dtype=bool)
    ranges: List[Tuple[int, int]] = []
    first = 0
    for j in range(1, n + 1):
        starts = np.flatnonzero(blocked[first:j, j])
        if len(starts):
            start = first + int(starts[-1])
            ranges.append((start, j))
            first = j - 1 if j - start > 1 else j
    return ranges


def explain(tables: StageTables, num_stages: int, max_stages: int) -> Infeasibility:
    """The certificate for a number of stages into which nothing fits.

    Args:
        max_stages: up to which more stages are tried.
    """
    ranges = _blocking_ranges(tables, num_stages)
    return Infeasibility(
        num_stages=num_stages,
        item=next((i for i, j in ranges if j == i + 1), None),
        ranges=tuple(ranges),
        fewest_stages=fewest_stages(tables, max_stages),
        max_stages=min(max_stages, tables.num_items),
    )
