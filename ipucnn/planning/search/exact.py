"""Searches exactly for the fastest split that fits, with its proof, or a certificate that nothing fits.

The split is optimal among all splits of the layers in the given order.  Stages that consist of parts of parallel
branches are not searched.  ``minmax`` searches Grouped and Interleaved pipelines.  This module searches Sequential
stages, which run one after the other, either on an IPU each or all on one.
"""

import heapq
from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple

import numpy as np

from ipucnn.planning.schedules import GROUPED, SEQUENTIAL, Schedule
from ipucnn.planning.search import minmax
from ipucnn.planning.search.minmax import SearchResult
from ipucnn.planning.search.tables import StageTables, tick_s


@dataclass(frozen=True)
class Solution:
    """The best split into a number of stages.

    Attributes:
        starts: first item of each stage, the first is 0; empty if nothing fits.
        objective_s: the split's ``tick_s``, of :func:`with_updates` with its share of the update; inf if nothing fits.
        lower_bound_s: the proved bound: no split that fits is faster.
    """

    starts: Tuple[int, ...]
    objective_s: float
    lower_bound_s: float

    @property
    def feasible(self) -> bool:
        """Tells whether any split fits."""
        return bool(self.starts)

    @property
    def optimal(self) -> bool:
        """Tells whether the split is proved to be a fastest one."""
        return self.feasible and self.lower_bound_s >= self.objective_s


def solve(
    tables: StageTables,
    num_stages: int,
    schedule: str = GROUPED,
    max_evaluations: Optional[int] = None,
    below_s: float = np.inf,
) -> Solution:
    """Returns the fastest split into exactly ``num_stages`` stages.

    Args:
        tables: times and memory of the items.
        num_stages: the number of stages, at most the number of items.
        schedule: one of ``SCHEDULES``; Sequential for segments on one IPU.
        max_evaluations: the number of dynamic programs after which the search of a Grouped or Interleaved pipeline
            stops with a gap.  If None, the search continues until the split is proved to be optimal.
        below_s: the upper limit of the tick: only faster splits are searched for, which takes less time than a full
            search.

    Returns:
        The solution; without starts if nothing fits, or if nothing that fits is faster than ``below_s``.
    """
    if tables.one_ipu:
        starts, bound_s = _OneIpu(tables, num_stages).run(below_s), np.inf
    elif schedule == SEQUENTIAL:
        starts, bound_s = _search_sequential(tables, num_stages)
    else:
        starts, bound_s = minmax.search(tables, num_stages, schedule, max_evaluations, below_s)
    value = tick_s(tables, starts, schedule) if starts else np.inf
    if not value < below_s:
        return Solution((), np.inf, np.inf)
    return Solution(starts, value, min(value, bound_s))


def with_updates(
    tables: StageTables,
    solution: Solution,
    schedule: str,
    count: int,
    parameters: np.ndarray,
    update_s: Callable[[float], float],
    below_s: float = np.inf,
) -> Solution:
    """Returns the split with the shortest ``tick_s + update_s / count``, from the one with the shortest tick.

    The update of the weights takes as long as that of the stage with the most parameters, P.  A split that may be the
    best has the shortest tick for some limit of P.  Of the splits with a tick, one with a small P is taken; the limit
    falls below it, and the ticks rise.  The search ends if no split within the limit can be better than the best.

    Args:
        tables: the tables of ``solution``, whose stages have an IPU each.
        solution: the split with the shortest tick.
        count: the micro-batches of a weight update.
        parameters: (n,) trainable parameters of the items.
        update_s: the seconds of an update whose largest stage has so many parameters; it does not fall.
        below_s: as for :func:`solve`.  Of splits that are no better than such a tick with the shortest update, any may
            be returned, with a bound below it.
    """
    before: np.ndarray = np.append(0, np.cumsum(parameters))
    runs, stages = before[None, :] - before[:-1, None], len(solution.starts)
    least_s = update_s(before[-1] / stages) / count

    def largest(starts: Tuple[int, ...]) -> int:
        return max(int(runs[i, j]) for i, j in zip(starts, [*starts[1:], tables.num_items]))

    if not solution.optimal:
        value_s = solution.objective_s + update_s(largest(solution.starts)) / count
        return Solution(solution.starts, value_s, solution.lower_bound_s + least_s)
    best, found_s, best_s = solution.starts, np.inf, below_s + least_s
    limited, tick = tables, solution
    while tick.feasible:
        starts = tick.starts
        if schedule != SEQUENTIAL:
            starts = minmax.lightest(limited, starts, schedule, runs)
        value_s = tick.objective_s + update_s(largest(starts)) / count
        if value_s < found_s:
            best, found_s, best_s = starts, value_s, min(value_s, best_s)
        # No split below the limit has a shorter tick than this one, so its update has to be shorter than the rest.
        limit = _largest_below((best_s - tick.objective_s) * count, update_s, largest(starts))
        if limit < before[-1] / stages:
            break
        limited = tables.limited_to(runs <= limit)
        tick = solve(limited, stages, schedule, below_s=min(below_s, best_s - least_s))
    return Solution(best, found_s, best_s)


def _largest_below(seconds: float, of: Callable[[float], float], end: int) -> int:
    """Returns the largest number from 0 to before ``end`` of which a function that does not fall is below ``seconds``.

    It is -1 if there is none.
    """
    low, high = -1, end - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if of(middle) < seconds else (low, middle - 1)
    return low


# --- Sequential schedules


def _search_sequential(tables: StageTables, num_stages: int) -> SearchResult:
    """Searches stages on an IPU each: the shortest path over cuts, O(stages x n^2).

    The cuts determine the transfers, the stages without recomputation, and each item's time, which depends on its
    stage.
    """
    n = tables.num_items
    transfer_s: np.ndarray = Schedule(SEQUENTIAL, tables.training).directions * tables.cut_s[1:]
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    sources: List[np.ndarray] = []
    for stage in range(num_stages):
        cost_s = _run_s(tables, num_stages, stage)[:, 1:] + transfer_s
        reached = np.where(tables.fits(num_stages, stage)[:, 1:], best[:n, None] + cost_s, np.inf)
        sources.append(reached.argmin(axis=0))
        best[1:] = reached.min(axis=0)
        best[0] = np.inf
    if not np.isfinite(best[n]):
        return (), np.inf
    starts, end = [], n
    for source in reversed(sources):
        end = int(source[end - 1])
        starts.append(end)
    # The sum's own rounding is no gap: every split was compared.
    return tuple(reversed(starts)), np.inf


def _run_s(tables: StageTables, num_stages: int, stage: int) -> np.ndarray:
    """Returns (n, n + 1) seconds of items i .. j - 1 as a stage of a Sequential pipeline, without transfers."""
    if tables.options:
        options_s = [_run_s(option, num_stages, stage) for option in tables.options]
        return np.choose(np.minimum(tables.choice(num_stages, stage), len(options_s) - 1), options_s)
    forward, backward = tables.sums(stage)
    ahead = forward[None, :] - forward[:-1, None]
    cost: np.ndarray = ahead + (backward[None, :] - backward[:-1, None])
    return cost + ahead if tables.recomputes(num_stages, stage) else cost


class _OneIpu:
    """Segments on one IPU: the checkpoints of all segments and the largest segment share the capacity.

    The work is the same wherever the cuts are, except for the last segment, which is not recomputed.  So the best split
    is one whose last segment opens earliest.  For a limit M on the bytes of a segment, a dynamic program gives the
    least checkpoint bytes of the segments before each opening e of the last segment.  The search over M is branch and
    bound: for M_low < M <= M_high, an e is possible only if it is possible with M_high's checkpoints and M_low's
    segments.
    """

    def __init__(self, tables: StageTables, num_stages: int) -> None:
        self.tables, self.k, self.n = tables, num_stages, tables.num_items
        self.memory = [tables.memory_bytes(num_stages, stage) for stage in range(num_stages)]
        assert tables.checkpoint_bytes is not None
        self.checkpoint = np.asarray(tables.checkpoint_bytes)
        self.most = self.n
        forward, backward = tables.sums(0)
        # (n + 1,) seconds of a micro-batch if the last segment opens at each item.
        recomputed_s = forward if tables.recompute and tables.training else 0.0 * forward
        self.tick_s = forward[-1] + backward[-1] + recomputed_s

    def least_largest(self) -> np.ndarray:
        """Returns (most,) the least bytes of the largest segment before an opening e of the last one.

        It is the recurrence of the checkpoints, with a maximum in place of the sum and without a limit.
        """
        m = self.most
        least = np.full(m, np.inf)
        least[0] = 0.0
        for stage in range(self.k - 1):
            least = np.maximum(least[:, None], self.memory[stage][:m, :m]).min(axis=0)
        return least

    def least_checkpoints(self, limit: float) -> Tuple[np.ndarray, List[np.ndarray]]:
        """Returns (most,) least checkpoint bytes for each last opening e, with segments up to ``limit``; sources."""
        m = self.most
        best = np.full(m, np.inf)
        best[0] = self.checkpoint[0]
        sources = []
        before: Optional[np.ndarray] = None
        for memory in self.memory[:-1]:
            if memory is not before:
                # By end and opening of a segment: infinite if it is too large.
                before, taken = memory, memory[:m, :m].T
                more = np.where(taken > limit, np.inf, 0.0)
            reached = best + more
            source = reached.argmin(axis=1)
            best = reached[np.arange(m), source] + self.checkpoint[:m]
            sources.append(source)
        return best, sources

    def starts(self, last: int, sources: List[np.ndarray]) -> Tuple[int, ...]:
        opens = [last]
        for source in reversed(sources):
            opens.append(int(source[opens[-1]]))
        return tuple(reversed(opens))

    def largest(self, starts: Tuple[int, ...]) -> float:
        """Returns the bytes of the largest segment, the last one excluded."""
        ends = (*starts[1:], self.n)
        return max(
            (float(self.memory[s][i, j]) for s, (i, j) in enumerate(zip(starts, ends)) if j < self.n),
            default=0.0,
        )

    def earliest(self, low: float, checkpoints: np.ndarray) -> Optional[int]:
        """Returns the first e that can open the last segment if the others' largest takes at least ``low`` bytes."""
        largest = np.maximum(self.memory[-1][: self.most, self.n], self.largest_before)
        total = checkpoints + np.maximum(largest, low)
        possible = np.flatnonzero(total <= self.tables.capacity_bytes)
        return int(possible[0]) if len(possible) else None

    def run(self, below_s: float = np.inf) -> Tuple[int, ...]:
        """Returns the best starts; empty if nothing that fits has a tick below ``below_s``."""
        best_last, best = self.n, ()  # type: Tuple[int, Tuple[int, ...]]
        if np.isfinite(below_s):
            best_last = int(np.searchsorted(self.tick_s[: self.n], below_s))
        # Bytes of the last segment with its own checkpoint and the first segment's.
        last = (
            self.checkpoint[: self.n]
            + self.memory[-1][:, self.n]
            + (self.checkpoint[0] if self.k > 1 else 0.0)
        )
        if not (last[:best_last] <= self.tables.capacity_bytes).any():
            return ()
        # Later openings of the last segment can be no better, so no earlier segment needs the items behind this one.
        self.most = max(1, best_last)
        self.largest_before = self.least_largest()
        heap = [(0, 0.0, float(self.tables.capacity_bytes))]
        while heap:
            bound, low, high = heapq.heappop(heap)
            if bound >= best_last:
                break
            checkpoints, sources = self.least_checkpoints(high)
            last = self.earliest(low, checkpoints)
            if last is None or last >= best_last:
                continue
            starts = self.starts(last, sources)
            taken = self.largest(starts)
            total = checkpoints[last] + max(taken, float(self.memory[-1][last, self.n]))
            if total <= self.tables.capacity_bytes:
                # Nothing in this interval opens its last segment earlier.
                best_last, best = last, starts
                continue
            # With at least `taken` bytes this e is impossible; the rest of the interval is below.
            heapq.heappush(heap, (last, low, float(np.nextafter(taken, -np.inf))))
            middle = (taken + high) / 2
            for part in ((taken, middle), (float(np.nextafter(middle, np.inf)), high)):
                if part[0] <= part[1]:
                    heapq.heappush(heap, (last, *part))
        return best


# --- why nothing fits


def some_split_fits(tables: StageTables, num_stages: int) -> bool:
    """Tells whether any split into ``num_stages`` stages fits, whatever its speed."""
    n = tables.num_items
    if num_stages > n:
        return False
    if tables.one_ipu:
        return bool(_OneIpu(tables, num_stages).run())
    # The items before which the stages so far can end; speed and the cuts in between do not matter.
    reached: np.ndarray = np.zeros(n + 1, dtype=bool)
    reached[0] = True
    for stage in range(num_stages):
        reached = tables.fits(num_stages, stage)[reached[:n]].any(axis=0)
        if not reached.any():
            return False
    return bool(reached[n])


def blocking_ranges(tables: StageTables, num_stages: int) -> List[Tuple[int, int]]:
    """Returns runs (first item, one past the last) that fit into no stage, at any position and with any neighbours.

    A sweep from the left finds them.  Each run needs a cut inside it, and no cut is inside two of them, so r runs need
    r + 1 stages.  If r >= num_stages, or if a run is a single item, they prove that nothing fits.
    """
    n = tables.num_items
    least = np.full((n, n + 1), np.inf)
    for stage in range(num_stages):
        least = np.minimum(least, tables.memory_bytes(num_stages, stage))
    # Minimum over all runs that contain items i .. j - 1: they start at or before i and end at or behind j.
    within = np.minimum.accumulate(np.minimum.accumulate(least, axis=0)[:, ::-1], axis=1)[:, ::-1]
    blocked = (within > tables.capacity_bytes) & ~np.tri(n, n + 1, dtype=bool)
    ranges: List[Tuple[int, int]] = []
    first = 0
    for j in range(1, n + 1):
        starts = np.flatnonzero(blocked[first:j, j])
        if len(starts):
            start = first + int(starts[-1])
            ranges.append((start, j))
            # The last cut inside a run of several items is before its last item, so the next run may begin with that
            # item.  A run of one item has no cut inside and shares nothing.
            first = j - 1 if j - start > 1 else j
    return ranges
