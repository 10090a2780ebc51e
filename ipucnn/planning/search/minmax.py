"""Searches exactly for pipelined schedules: minimises a sum of a few maxima over the stages.

Grouped and Interleaved ticks are X + Y + w (T_0 + T_1).  Every stage s has to meet a_s <= X and b_s <= Y (forward and
backward seconds; under Interleaved odd stages have them swapped), and every cut of class c has to meet cut_s <= T_c.
Given X and T, a dynamic program over prefixes finds the smallest Y that fits into memory.  The search over X and T is
branch and bound: nothing in a box of thresholds is better than its lower corner combined with the smallest Y of its
upper corner.  The search ends with a proof of optimality.
"""

import heapq
from bisect import bisect_left, bisect_right
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ipucnn.planning.schedules import Schedule
from ipucnn.planning.search.tables import StageTables

# Sums are rounded differently from loads, so lookups among sums are given this much slack.
_MORE = 1 + 1e-9
# Number of run ends that a dynamic program processes together.
_COLUMNS = 64
_LARGEST = float(np.finfo(float).max)


SearchResult = Tuple[Tuple[int, ...], float]
"""The best starts (empty if nothing fits), and a proved bound of the tick."""


class Box(NamedTuple):
    """The splits with ``x_low < X <= x_high`` and T_c in levels ``t_low[c] .. t_high[c]`` of class c."""

    x_low: float
    x_high: float
    t_low: Tuple[int, ...]
    t_high: Tuple[int, ...]


class Least(NamedTuple):
    """The result of a dynamic program over prefixes.

    Attributes:
        value: the minimum.
        starts: the starts of a split that attains it.
        cuts: by class, a lower bound of the largest cut of any split within the thresholds.
    """

    value: float
    starts: Tuple[int, ...]
    cuts: List[float]


class _Loads:
    """The stages' two loads and the cuts' classes for one number of stages and schedule."""

    def __init__(self, tables: StageTables, num_stages: int, schedule: str) -> None:
        self.tables, self.num_stages, self.n = tables, num_stages, tables.num_items
        order = Schedule(schedule, tables.training)
        self.weight, self.alternates = order.directions, order.alternates
        # Sums of the items before each one, for each stage: a stage's seconds depend on its position, too.
        self.sums = [tables.sums(stage) for stage in range(num_stages)]
        # If a stage uses the first of several settings with which its run fits, these sums are those of the fastest
        # setting.
        self.options = [[option.sums(stage) for option in tables.options] for stage in range(num_stages)]
        # For each stage, the first stage with the same loads.
        self.groups = [self._group(stage) for stage in range(num_stages)]
        # While the even stages go forward and the odd ones backward, only the cuts that open odd stages transfer, in
        # both directions; in the next half-tick only the others.  An exchange waits for the longest of its cuts.
        num_classes = 2 if self.alternates and num_stages > 2 else 1
        # Not np.unique, which imports masked arrays: that takes a tenth of the time of a small search.
        levels = np.array(sorted(set(tables.cut_s[1 : self.n].tolist()))) if num_stages > 1 else np.zeros(1)
        self.levels = [levels] * num_classes
        self.fits = [tables.fits(num_stages, stage) for stage in range(num_stages)]
        # For each stage (n,) the last item before which a run may end and fit if it opens at or before each item.
        self.reach = [_reach(fits) for fits in self.fits]
        self._lists: Dict[int, Tuple[List[float], List[float]]] = {}
        self._pairs: Dict[Tuple[int, int], List[List[float]]] = {}

    def cut_class(self, stage: int) -> int:
        """Returns the class of the cut that opens a stage."""
        return (stage - 1) % len(self.levels)

    def _group(self, stage: int) -> int:
        if self.tables.stage_s:
            return stage
        last = stage == self.num_stages - 1 and self.tables.recompute
        return stage if last else stage % 2 if self.alternates else 0

    def lists(self, stage: int) -> Tuple[List[float], List[float]]:
        """Returns (n + 1,) a and b of all items before each; loads of runs are their differences, up to rounding."""
        group = self.groups[stage]
        if group not in self._lists:
            every: np.ndarray = np.arange(self.n + 1)
            a, b = self._ordered(stage, *self._passes(self.sums[stage], 0 * every, every))
            self._lists[group] = a.tolist(), b.tolist()
        return self._lists[group]

    def first(self, stage: int, end: int, x: float, y: float) -> int:
        """Returns a lower bound of the first item from which a run up to ``end`` fits with a <= x and b <= y."""
        a, b = self.lists(stage)
        return max(
            bisect_left(a, (a[end] - x) / _MORE),
            bisect_left(b, (b[end] - y) / _MORE),
            bisect_left(self.reach[stage], end),
        )

    def block(
        self, stage: int, opens: np.ndarray, ends: np.ndarray, swap: bool
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the loads of all runs from an item of ``opens`` to before one of ``ends``, and whether they fit.

        Returns:
            (ends, opens) arrays: a, b, and whether the run fits.
        """
        column = ends[:, None]
        a, b = self._pair(stage, opens, column)
        allowed = self.fits[stage].T[column, opens]
        return (b, a, allowed) if swap else (a, b, allowed)

    def _pair(self, stage: int, i: np.ndarray, j: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        if not self.tables.options:
            return self._ordered(stage, *self._passes(self.sums[stage], i, j))
        # A run that fits with none of the settings has no load of its own: any of them will do.
        chosen = np.minimum(self.tables.choice(self.num_stages, stage)[i, j], len(self.options[stage]) - 1)
        first = int(chosen.min())
        if first == int(chosen.max()):
            return self._ordered(stage, *self._passes(self.options[stage][first], i, j))
        passes = zip(*(self._passes(sums, i, j) for sums in self.options[stage]))
        return self._ordered(stage, *(np.choose(chosen, each) for each in passes))

    @staticmethod
    def _passes(
        sums: Tuple[np.ndarray, np.ndarray], i: np.ndarray, j: np.ndarray
    ) -> Tuple[np.ndarray, np.ndarray]:
        forward, backward = sums
        return forward[j] - forward[i], backward[j] - backward[i]

    def _ordered(self, stage: int, ahead: np.ndarray, back: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        if self.tables.recomputes(self.num_stages, stage):
            back = back + ahead
        return (back, ahead) if self.alternates and stage % 2 else (ahead, back)

    def in_pairs(self, stage: int) -> List[List[float]]:
        """Returns the sums, as in ``lists``, that add up to at most X + Y over this stage's run and the next one's.

        No a is above X and no b above Y.  So a of one stage and b of its neighbour add up to at most X + Y, if both are
        seconds of the same pass.
        """
        if not self.alternates or stage + 1 >= self.num_stages:
            return []
        key = (self.groups[stage], self.groups[stage + 1])
        if key not in self._pairs:
            (a, b), (c, d) = self.lists(stage), self.lists(stage + 1)
            self._pairs[key] = [first for first, second in ((a, d), (b, c)) if first == second]
        return self._pairs[key]

    def maxima(self, starts: Tuple[int, ...]) -> Tuple[float, float, List[float]]:
        """Returns (X, Y, T) of a split."""
        bounds = np.array([*starts, self.n])
        pairs = [self._pair(s, bounds[s], bounds[s + 1]) for s in range(self.num_stages)]
        t = [0.0] * len(self.levels)
        for stage in range(1, self.num_stages):
            c = self.cut_class(stage)
            t[c] = max(t[c], float(self.tables.cut_s[starts[stage]]))
        return max(float(a) for a, _ in pairs), max(float(b) for _, b in pairs), t

    def first_box(self) -> Box:
        """Returns a box that holds all splits.

        No stage has a larger load than all items at once under the slowest setting with their forward pass repeated.
        The box begins below 0 so that it includes loads of 0, and it is not empty if all loads are 0.
        """
        every = [*self.sums, *(sums for of_stage in self.options for sums in of_stage)]
        total = max(float(forward[-1] + backward[-1]) for forward, backward in every) * 2
        top = tuple(len(levels) - 1 for levels in self.levels)
        return Box(-1.0, max(total, 1e-300), (0,) * len(top), top)

    def value(self, x: float, y: float, t: List[float]) -> float:
        """Returns the tick.  It is monotone in each argument after rounding, too, so bounds hold exactly."""
        return x + y + self.weight * sum(t)


def _reach(fits: np.ndarray) -> List[int]:
    """Returns for each item the last one before which a run that opens at that item or earlier may end and fit."""
    n = len(fits)
    last = n - fits[:, ::-1].argmax(axis=1)
    last[~fits.any(axis=1)] = 0
    reach: List[int] = np.maximum.accumulate(last).tolist()
    return reach


def _windows(
    loads: _Loads, x: float, y: float, swap: bool, both: float = np.inf
) -> Optional[List[Tuple[int, int]]]:
    """Returns the first and last item at which each stage can open if loads are at most x and y; the last is (n, n).

    Loads grow with the run, so the stages before cannot reach further than greedily filled ones.  Greedily filled
    stages may be empty: an item may be too much for one stage and not for the next, whose loads differ.  Neither can
    they reach further than runs that fit.

    Args:
        both: the limit of x + y; no a is above x and no b above y, so a of a stage and b of its neighbour add up to at
            most this.
    """
    n, k = loads.n, loads.num_stages
    if swap:
        x, y = y, x
    lists = [loads.lists(stage) for stage in range(k)]
    pairs = [loads.in_pairs(stage) if both < np.inf else [] for stage in range(k)]
    high, low = [0] * (k + 1), [n] * (k + 1)
    high[1:] = [n - (k - stage) for stage in range(1, k + 1)]
    for stage in range(k):
        item = high[stage]
        a, b = lists[stage]
        reach = min(bisect_right(a, (a[item] + x) * _MORE), bisect_right(b, (b[item] + y) * _MORE)) - 1
        reach = min(reach, loads.reach[stage][item] if item < n else n)
        high[stage + 1] = min(high[stage + 1], max(reach, item))
        for sums in pairs[stage]:
            reach = bisect_right(sums, (sums[item] + both) * _MORE) - 1
            high[stage + 2] = min(high[stage + 2], max(reach, item))
    if high[k] != n:
        return None
    low[:k] = range(k)
    for stage in range(k - 1, -1, -1):
        item = low[stage + 1]
        low[stage] = max(low[stage], min(loads.first(stage, item, x, y), item))
        for sums in pairs[stage - 1] if stage else ():
            reach = bisect_left(sums, (sums[low[stage + 1]] - both) / _MORE)
            low[stage - 1] = max(low[stage - 1], min(reach, item))
    if low[0] > 0 or any(low[s] > high[s] for s in range(k + 1)):
        return None
    return list(zip(low, high))


def _least(
    loads: _Loads,
    x: float,
    y: float,
    t: List[float],
    swap: bool = False,
    transfer: bool = False,
    both: float = np.inf,
    weights: Optional[np.ndarray] = None,
) -> Optional[Least]:
    """Returns the best split with a <= x, b <= y and cuts <= t; None if there is none.

    best[s][j] = min over i of max(best[s - 1][i], b_s[i, j]), over those i, j that the thresholds and the memory allow.
    With ``transfer``, cut_s[j] takes the place of b_s[i, j], and a sum that of the maximum.  With ``weights``,
    weights[i, j] takes its place.

    Args:
        swap: whether a and b change roles.
        transfer: whether to minimise the sum of cut_s instead of the largest b.
        both: see ``_windows``; splits with a larger x + y may be left out.
        weights: (n, n + 1) the weight of items i .. j - 1 as a stage, to minimise the largest.
    """
    windows = _windows(loads, x, y, swap, both)
    if windows is None:
        return None
    n, k, cut_s = loads.n, loads.num_stages, loads.tables.cut_s
    # Places at which a stage may open, by class of cut; the last stage ends before n.
    legal = [np.flatnonzero(cut_s <= most) for most in t]
    cuts = [0.0] * len(t)

    def reached(stage: int, opens: np.ndarray, before: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns (ends, opens) values: the best before each opening, extended by the run from there to each end."""
        a, b, fits = loads.block(stage, opens, ends, swap)
        allowed = (a <= x) & fits
        if transfer:
            return np.where(allowed & (b <= y), before + cut_s[ends][:, None], np.inf)
        if weights is not None:
            return np.where(allowed & (b <= y), np.maximum(weights[opens, ends[:, None]], before), np.inf)
        return np.where(allowed, np.maximum(b, before), np.inf)

    # The places where each stage can open, the best value at each, and the previous stage's opening that gave it.
    places: List[np.ndarray] = [np.zeros(1, dtype=int)]
    best = np.zeros(1)
    sources: List[np.ndarray] = []
    for stage in range(k):
        ends = np.array([n])
        if stage < k - 1:
            first_end, last_end = windows[stage + 1]
            places_of = legal[loads.cut_class(stage + 1)]
            ends = places_of[
                places_of.searchsorted(first_end) : places_of.searchsorted(last_end, side="right")
            ]
        least = np.full(len(ends), np.inf)
        source: np.ndarray = np.zeros(len(ends), dtype=int)
        # Some of the ends at a time: their runs begin near each other.
        for begin in range(0, len(ends), _COLUMNS):
            part = slice(begin, begin + _COLUMNS)
            first = loads.first(stage, int(ends[begin]), *((y, x) if swap else (x, y)))
            low, high = (int(places[stage].searchsorted(place)) for place in (first, ends[part][-1]))
            if low < high:
                values = reached(stage, places[stage][low:high], best[low:high], ends[part])
                # The first of equally good ones: ties resolve to early cuts.
                chosen = values.argmin(axis=1)
                least[part] = values[np.arange(len(chosen)), chosen]
                source[part] = chosen + low
        kept = np.isfinite(least) if transfer or weights is not None else least <= min(y, _LARGEST)
        if not kept.any():
            return None
        places.append(ends[kept])
        sources.append(source[kept])
        best = least[kept]
        if stage < k - 1:
            c = loads.cut_class(stage + 1)
            cuts[c] = max(cuts[c], float(cut_s[places[-1]].min()))
    starts, at = [], 0
    for stage in range(k - 1, -1, -1):
        at = int(sources[stage][at])
        starts.append(int(places[stage][at]))
    return Least(float(best[0]), tuple(reversed(starts)), cuts)


class _Search:
    """A branch and bound search over thresholds."""

    def __init__(
        self,
        loads: _Loads,
        max_evaluations: Optional[int],
        below_s: float,
    ) -> None:
        self.loads, self.limit = loads, max_evaluations
        self.value, self.starts = below_s, ()  # type: Tuple[float, Tuple[int, ...]]
        self.heap: List[Tuple[float, int, Box, Tuple[float, float, List[float]]]] = []
        self.num_evaluations = self.num_boxes = 0

    def _least(self, x: float, y: float, t: List[float], both: float, swap: bool = False) -> Optional[Least]:
        self.num_evaluations += 1
        return _least(self.loads, x, y, t, swap, both=both)

    def _levels(self, index: Tuple[int, ...]) -> List[float]:
        return [float(levels[i]) for levels, i in zip(self.loads.levels, index)]

    def _offer(self, starts: Tuple[int, ...]) -> Tuple[float, float, List[float]]:
        maxima = self.loads.maxima(starts)
        value = self.loads.value(*maxima)
        if value < self.value:
            self.value, self.starts = value, starts
        return maxima

    def evaluate(self, box: Box) -> None:
        """Finds the smallest Y in a box, and the smallest X for that Y, and files the box under its bound."""
        low, high = self._levels(box.t_low), self._levels(box.t_high)
        # The largest Y that can beat the best split (plus a little for rounding).
        y_limit = both = np.inf
        if np.isfinite(self.value):
            y_limit = (self.value - max(box.x_low, 0.0) - self.loads.weight * sum(low)) * (1 + 1e-12)
            both = (self.value - self.loads.weight * sum(low)) * (1 + 1e-12)
        least = self._least(box.x_high, y_limit, high, both)
        if least is None:
            return
        corner = self._offer(least.starts)
        narrow = self._least(least.value, box.x_high, high, both, swap=True)
        if narrow is not None:  # else nothing with that Y is better than the best split
            corner = self._offer(narrow.starts)
        # No split that is better than the best one has smaller cuts than these.
        levels = (
            int(np.searchsorted(levels_of, cut)) for levels_of, cut in zip(self.loads.levels, least.cuts)
        )
        self.file(box._replace(t_low=tuple(map(max, box.t_low, levels))), corner)

    def file(self, box: Box, corner: Tuple[float, float, List[float]]) -> None:
        """Cuts away the dominated part of a box and keeps the rest under its lower bound, unless it cannot be better.

        Args:
            corner: (X, Y, T) of a split in the box's upper corner: Y is the smallest in the box, and X the smallest for
                that Y.
        """
        x, y, t = corner
        low = self._levels(box.t_low)
        bound = self.loads.value(max(box.x_low, 0.0), y, low)
        # Everything in the box has Y >= y, so where X >= x and T >= t nothing is better than this split.
        wider = [c for c in range(len(t)) if t[c] > low[c]]
        if not wider:
            box = box._replace(x_high=min(box.x_high, float(np.nextafter(x, -np.inf))))
        elif x <= box.x_low and len(wider) == 1:
            c = wider[0]
            t_high = list(box.t_high)
            t_high[c] = min(t_high[c], int(np.searchsorted(self.loads.levels[c], t[c])) - 1)
            box = box._replace(t_high=tuple(t_high))
        if box.x_high > box.x_low and bound < self.value:
            self.num_boxes += 1
            heapq.heappush(self.heap, (bound, self.num_boxes, box, corner))

    def _halves(self, box: Box) -> List[Box]:
        """Halves a box along its widest threshold."""
        low, high = self._levels(box.t_low), self._levels(box.t_high)
        widths = [self.loads.weight * (b - a) for a, b in zip(low, high)]
        middle = box.x_low + (box.x_high - box.x_low) / 2
        c = int(np.argmax(widths))
        if widths[c] > 0 and (widths[c] >= box.x_high - box.x_low or not box.x_low < middle < box.x_high):
            level = (box.t_low[c] + box.t_high[c]) // 2
            below, above = list(box.t_high), list(box.t_low)
            below[c], above[c] = level, level + 1
            return [box._replace(t_high=tuple(below)), box._replace(t_low=tuple(above))]
        if not box.x_low < middle < box.x_high:
            return [box]
        return [box._replace(x_high=middle), box._replace(x_low=middle)]

    def run(self) -> float:
        """Searches to the end or the limit; returns the lower bound."""
        self.evaluate(self.loads.first_box())
        while self.heap:
            bound, _, box, corner = self.heap[0]
            if bound >= self.value:
                break
            if self.limit is not None and self.num_evaluations >= self.limit:
                return min(bound, self.value)
            heapq.heappop(self.heap)
            x, _, t = corner
            known = x <= box.x_high and all(a <= b for a, b in zip(t, self._levels(box.t_high)))
            for part in self._halves(box):
                if known and part != box and (part.x_high, part.t_high) == (box.x_high, box.t_high):
                    self.file(part, corner)  # the same upper corner
                else:
                    self.evaluate(part)
        return self.value


def search(
    tables: StageTables,
    num_stages: int,
    schedule: str,
    max_evaluations: Optional[int] = None,
    below_s: float = np.inf,
) -> SearchResult:
    """Returns the fastest split for a pipelined schedule.

    Among splits with the same maxima it takes one with the least transfer, and among those one with early cuts.

    Args:
        schedule: a schedule whose stages work at the same time.
        max_evaluations: the number of dynamic programs after which to stop with a gap.  If None, the search ends with a
            proof.
        below_s: the upper limit of the tick: only faster splits are searched for.  The result has no starts if there is
            none.
    """
    loads = _Loads(tables, num_stages, schedule)
    state = _Search(loads, max_evaluations, below_s)
    bound = state.run()
    if not state.starts:
        return (), bound
    x, y, t = loads.maxima(state.starts)
    chosen = _least(loads, x, y, t, transfer=True)
    assert chosen is not None
    return chosen.starts, bound


def lightest(
    tables: StageTables, starts: Tuple[int, ...], schedule: str, weights: np.ndarray
) -> Tuple[int, ...]:
    """Returns a split no slower than another one whose heaviest stage weighs the least.

    It is the lightest of those with at most the other's maxima X, Y and T.  One with the same tick and other maxima may
    be lighter.  Among equally light ones it has the least transfer, and then early cuts.

    Args:
        starts: a split that fits.
        schedule: as for :func:`search`.
        weights: (n, n + 1) the weight of items i .. j - 1 as a stage; it grows with the run.
    """
    loads = _Loads(tables, len(starts), schedule)
    x, y, t = loads.maxima(starts)
    least = _least(loads, x, y, t, weights=weights)
    assert least is not None
    light = _Loads(tables.limited_to(weights <= least.value), len(starts), schedule)
    chosen = _least(light, x, y, t, transfer=True)
    assert chosen is not None
    return chosen.starts
