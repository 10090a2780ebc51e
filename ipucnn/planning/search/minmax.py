"""Exact search for pipelined schedules: the sum of a few maxima over the stages, as small as possible.

Grouped and Interleaved ticks are X + Y + w (T_0 + T_1), where every stage s has to meet a_s <= X and b_s <= Y
(forward and backward seconds; under Interleaved odd stages the other way round), and every cut of class c has
to meet cut_s <= T_c.  Given X and T a dynamic program over prefixes finds the smallest Y, memory
included.  The search over X and T is branch and bound: a box of thresholds can't hold anything better than its
lower corner together with the smallest Y of its upper corner.  It ends with a proof of optimality.
"""

import heapq
from typing import Dict, List, NamedTuple, Optional, Protocol, Tuple, Union

import numpy as np

from ipucnn.planning.search.tables import StageTables

# What a dynamic program makes as small as possible.  Other goals, 0 and 1, stand for the largest cut of that class.
LOAD, TRANSFER = -1, -2


class MinMaxResult(NamedTuple):
    """The best starts (empty if nothing fits), a proved lower bound of the tick, and how many dynamic programs ran."""

    starts: Tuple[int, ...]
    lower_bound_s: float
    num_evaluations: int


class Box(NamedTuple):
    """Splits with ``x_low < X <= x_high`` and T_c in levels ``t_low[c] .. t_high[c]`` of class c."""

    x_low: float
    x_high: float
    t_low: Tuple[int, ...]
    t_high: Tuple[int, ...]


class _Loads:
    """The stages' two loads and the cuts' classes for one number of stages and schedule."""

    def __init__(self, tables: StageTables, num_stages: int, schedule: str) -> None:
        self.tables, self.num_stages, self.n = tables, num_stages, tables.num_items
        self.weight = tables.transfer_directions
        # Sums of the items before each, as each stage: a stage's seconds depend on its position, too.
        self.sums = [tables.sums(num_stages, stage) for stage in range(num_stages)]
        self.alternates = schedule == "Interleaved" and tables.training
        # While the even stages go forward and the odd ones backward, only the cuts that open odd stages are at work,
        # in both directions; in the next half-tick only the others.  An exchange waits for the longest of its cuts.
        num_classes = 2 if self.alternates and num_stages > 2 else 1
        # Not by np.unique, which imports the masked arrays: a tenth of the time of a small search.
        own = np.array(sorted(set(tables.cut_s[1 : self.n].tolist()))) if num_stages > 1 else np.zeros(1)
        self.levels = [own] * num_classes
        self.fits = [tables.fits(num_stages, stage).ravel() for stage in range(num_stages)]
        self._guides: Dict[int, Tuple[np.ndarray, np.ndarray]] = {}

    def cut_class(self, stage: int) -> int:
        """Class of the cut that opens a stage."""
        return (stage - 1) % len(self.levels)

    def group(self, stage: int) -> int:
        """The first stage whose loads are those of this one."""
        if len(self.tables.stage_s) == self.num_stages:
            return stage
        last = stage == self.num_stages - 1 and self.tables.recompute
        return stage if last else stage % 2 if self.alternates else 0

    def guide(self, stage: int, swap: bool) -> Tuple[np.ndarray, np.ndarray]:
        """(n + 1,) a and b of all items before each; the loads of runs are their differences but for rounding."""
        group = self.group(stage)
        if group not in self._guides:
            zero: np.ndarray = np.zeros(self.n + 1, dtype=int)
            a, b = self.pair(stage, zero, np.arange(self.n + 1))
            self._guides[group] = a, b
        a, b = self._guides[group]
        return (b, a) if swap else (a, b)

    def pair(
        self, stage: int, i: np.ndarray, j: np.ndarray, swap: bool = False
    ) -> Tuple[np.ndarray, np.ndarray]:
        """(a, b) of items i .. j - 1 as a stage; ``swap`` gives (b, a)."""
        forward, backward = self.sums[stage]
        ahead = forward[j] - forward[i]
        back = backward[j] - backward[i]
        if self.tables.recomputes(self.num_stages, stage):
            back = back + ahead
        if self.alternates and stage % 2:
            ahead, back = back, ahead
        return (back, ahead) if swap else (ahead, back)

    def maxima(self, starts: Tuple[int, ...]) -> Tuple[float, float, List[float]]:
        """(X, Y, T) of a split."""
        bounds = np.array([*starts, self.n])
        pairs = [self.pair(s, bounds[s], bounds[s + 1]) for s in range(self.num_stages)]
        t = [0.0] * len(self.levels)
        for stage in range(1, self.num_stages):
            c = self.cut_class(stage)
            t[c] = max(t[c], float(self.tables.cut_s[starts[stage]]))
        return max(float(a) for a, _ in pairs), max(float(b) for _, b in pairs), t

    def first_box(self, below_s: float) -> Box:
        """A box that holds all splits with a tick below that.

        No stage has a larger load than everything at once, its forward pass repeated.  The box begins below 0 so that
        loads of 0 are inside; and it is not empty where all loads are 0.
        """
        total = max(float(forward[-1] + backward[-1]) for forward, backward in self.sums) * 2
        top = tuple(len(own) - 1 for own in self.levels)
        return Box(-1.0, max(total, 1e-300), (0,) * len(top), top)

    def least(
        self, x: float, y: float, t: List[float], swap: bool, goal: int
    ) -> Optional[Tuple[float, Tuple[int, ...]]]:
        """See ``_least``."""
        return _least(self, x, y, t, swap, goal)

    def value(self, x: float, y: float, t: List[float]) -> float:
        """The tick; monotone in each argument also after rounding, so that bounds hold exactly."""
        return x + y + self.weight * sum(t)


class _Runs(NamedTuple):
    """Runs of items i .. j - 1 whose loads are within thresholds, in the order of j and then of i.

    Attributes:
        offsets: (n + 2,) where the runs that end before each j begin.
        first: (runs,) i.
        place: (runs,) index of [i, j] in a flat (n, n + 1) table.
        load: (runs,) b of the run.
    """

    offsets: np.ndarray
    first: np.ndarray
    place: np.ndarray
    load: np.ndarray


def _reach(
    loads: _Loads, stage: int, fixed: np.ndarray, x: float, y: float, swap: bool, ahead: bool
) -> np.ndarray:
    """How far runs of a stage reach from each of some items with a <= x and b <= y.

    Args:
        fixed: one end of each run.
        ahead: the largest j of runs from i, else the smallest i of runs to j.
    """
    n = loads.n
    # Found in sums that are rounded differently from the loads, and then moved until the loads themselves say so.
    guesses = []
    for sums, most in zip(loads.guide(stage, swap), (x, y)):
        aim = sums[fixed] + most if ahead else sums[fixed] - most
        guesses.append(np.searchsorted(sums, aim, side="right" if ahead else "left") - (1 if ahead else 0))
    far = np.minimum(*guesses) if ahead else np.maximum(*guesses)
    far = np.clip(far, fixed, n) if ahead else np.clip(far, 0, fixed)
    step = 1 if ahead else -1

    def within(ends: np.ndarray) -> np.ndarray:
        a, b = loads.pair(stage, fixed, ends, swap) if ahead else loads.pair(stage, ends, fixed, swap)
        allowed: np.ndarray = (a <= x) & (b <= y)
        return allowed

    while True:
        moved = np.clip(far + step, 0, n)
        more = (moved != far) & within(moved)
        if not more.any():
            break
        far = np.where(more, moved, far)
    while True:
        less = (far != fixed) & ~within(far)
        if not less.any():
            return far
        far = np.where(less, far - step, far)


def _windows(loads: _Loads, x: float, y: float, swap: bool) -> Optional[List[Tuple[int, int]]]:
    """First and last item at which each stage can open if loads are at most x and y; the last is (n, n).

    Loads grow with the run, so the stages before can't reach further than greedily filled ones, empty ones
    among them: an item may be too much for a stage and not for the next, whose loads are others.
    """
    n, k = loads.n, loads.num_stages
    high, low = [0] * (k + 1), [n] * (k + 1)
    for stage in range(k):
        reach = int(_reach(loads, stage, np.array([high[stage]]), x, y, swap, ahead=True)[0])
        high[stage + 1] = min(reach, n - (k - 1 - stage))
    if high[k] != n:
        return None
    for stage in range(k - 1, -1, -1):
        reach = int(_reach(loads, stage, np.array([low[stage + 1]]), x, y, swap, ahead=False)[0])
        low[stage] = max(reach, stage)
    if low[0] > 0 or any(low[s] > high[s] for s in range(k + 1)):
        return None
    low[0] = 0
    return list(zip(low, high))


def _runs(
    loads: _Loads, stage: int, x: float, y: float, swap: bool, opens: Tuple[int, int], ends: Tuple[int, int]
) -> _Runs:
    """The runs that a stage may be as far as its loads are concerned, with i and j in those windows."""
    low, high = ends
    end = np.arange(low, high + 1)
    begins = np.maximum(_reach(loads, stage, end, x, y, swap, ahead=False), opens[0])
    counts = np.maximum(np.minimum(end, opens[1] + 1) - begins, 0)
    offsets: np.ndarray = np.zeros(loads.n + 2, dtype=int)
    offsets[low + 1 : high + 2] = np.cumsum(counts)
    offsets[high + 2 :] = offsets[high + 1]
    end = np.repeat(end, counts)
    first = np.arange(len(end)) - np.repeat(offsets[low : high + 1] - begins, counts)
    load = loads.pair(stage, first, end, swap)[1]
    return _Runs(offsets, first, first * (loads.n + 1) + end, load)


def _least(
    loads: _Loads, x: float, y: float, t: List[float], swap: bool = False, goal: int = LOAD
) -> Optional[Tuple[float, Tuple[int, ...]]]:
    """How good the best of the splits with a <= x, b <= y and cuts <= t is, and its starts; None if there is no such.

    best[s][j] = min over i of max(best[s - 1][i], b_s[i, j]), over those i, j that the thresholds and the
    memory allow; or with cut_s[j] in the place of b_s[i, j], or with a sum in the place of the maximum.

    Args:
        swap: a and b change roles.
        goal: LOAD: the smallest max b.  TRANSFER: the smallest sum of cut_s.  c: the smallest max cut_s of class c.
    """
    windows = _windows(loads, x, y, swap)
    if windows is None:
        return None
    n, k, cut_s = loads.n, loads.num_stages, loads.tables.cut_s
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    bests = [best]
    known: Dict[int, _Runs] = {}
    # Stages with wide windows share the runs that are the same for them; narrow ones have less of their own.
    shared = sum(high - low for low, high in windows) > n
    everywhere = (0, n)

    def runs_of(stage: int) -> _Runs:
        key = loads.group(stage) if shared else stage
        if key not in known:
            spans = (everywhere, everywhere) if shared else (windows[stage], windows[stage + 1])
            known[key] = _runs(loads, stage, x, y, swap, *spans)
        return known[key]

    def reached(stage: int, low: int, high: int) -> Tuple[np.ndarray, np.ndarray]:
        """The runs of a stage that end at ``low`` to ``high``, and what each would make of the best so far."""
        runs = runs_of(stage)
        part = slice(int(runs.offsets[low]), int(runs.offsets[high + 1]))
        values = bests[stage][runs.first[part]]
        if goal == LOAD:
            values = np.maximum(values, runs.load[part])
        fits = loads.fits[stage][runs.place[part]]
        if not fits.all():
            values[~fits] = np.inf
        return runs.offsets[low : high + 2] - part.start, values

    def with_cut(values: np.ndarray, stage: int, end: Union[int, slice]) -> np.ndarray:
        if goal == TRANSFER:
            return values + cut_s[end]
        if goal != LOAD and stage < k - 1 and loads.cut_class(stage + 1) == goal:
            return np.maximum(values, cut_s[end])
        return values

    for stage in range(k):
        low, high = windows[stage + 1]
        offsets, values = reached(stage, low, high)
        least = np.minimum.reduceat(np.append(values, np.inf), offsets[:-1])
        least[offsets[:-1] == offsets[1:]] = np.inf
        least = with_cut(least, stage, slice(low, high + 1))
        if stage < k - 1:
            least[cut_s[low : high + 1] > t[loads.cut_class(stage + 1)]] = np.inf
        if not np.isfinite(least).any():
            return None
        best = np.full(n + 1, np.inf)
        best[low : high + 1] = least
        bests.append(best)
    # The best opening for where each stage ends, read from the end of the network to its beginning.  Of equally good
    # ones the first: ties fall to early cuts.
    starts = [n]
    for stage in range(k - 1, -1, -1):
        end = starts[-1]
        values = with_cut(reached(stage, end, end)[1], stage, end)
        source = int(np.flatnonzero(values == bests[stage + 1][end])[0])
        runs = runs_of(stage)
        starts.append(int(runs.first[int(runs.offsets[end]) + source]))
    return float(best[n]), tuple(reversed(starts[1:]))


class Choices(Protocol):
    """What the search asks of the places at which stages may open, whatever they are.

    Attributes:
        weight: how often a cut is crossed for a micro-batch.
        levels: of each class of cuts the seconds that a cut may take, ascending.
    """

    weight: int
    levels: List[np.ndarray]

    def first_box(self, below_s: float) -> Box: ...
    def maxima(self, starts: Tuple[int, ...]) -> Tuple[float, float, List[float]]: ...
    def value(self, x: float, y: float, t: List[float]) -> float: ...
    def least(
        self, x: float, y: float, t: List[float], swap: bool, goal: int
    ) -> Optional[Tuple[float, Tuple[int, ...]]]: ...


class Search:
    """Branch and bound over thresholds."""

    def __init__(self, loads: Choices, max_evaluations: Optional[int], below_s: float) -> None:
        self.loads, self.limit = loads, max_evaluations
        self.value, self.starts = below_s, ()  # type: Tuple[float, Tuple[int, ...]]
        self.heap: List[Tuple[float, int, Box, Tuple[float, float, List[float]]]] = []
        self.num_evaluations = self.num_boxes = 0

    def _least(
        self, x: float, y: float, t: List[float], swap: bool = False, goal: int = LOAD
    ) -> Optional[Tuple[float, Tuple[int, ...]]]:
        self.num_evaluations += 1
        return self.loads.least(x, y, t, swap, goal)

    def _levels(self, index: Tuple[int, ...]) -> List[float]:
        return [float(own[i]) for own, i in zip(self.loads.levels, index)]

    def _offer(self, starts: Tuple[int, ...]) -> Tuple[float, float, List[float]]:
        maxima = self.loads.maxima(starts)
        value = self.loads.value(*maxima)
        if value < self.value:
            self.value, self.starts = value, starts
        return maxima

    def evaluate(self, box: Box) -> None:
        """Finds the smallest Y in a box, and the smallest X that goes with it, and files the box under its bound."""
        low, high = self._levels(box.t_low), self._levels(box.t_high)
        # What Y may be at most to beat the best split (a little more: rounding).
        y_limit = np.inf
        if np.isfinite(self.value):
            y_limit = (self.value - max(box.x_low, 0.0) - self.loads.weight * sum(low)) * (1 + 1e-12)
        found = self._least(box.x_high, y_limit, high)
        if found is None:
            return
        y, starts = found
        self._offer(starts)
        narrow = self._least(y, box.x_high, high, swap=True)
        assert narrow is not None  # the split just found meets these thresholds
        corner = self._offer(narrow[1])
        # No split that is better than the best one has cuts below these.
        t_low = list(box.t_low)
        for c in range(len(low)):
            if np.isfinite(y_limit) and box.t_low[c] < box.t_high[c]:
                short = self._least(box.x_high, y_limit, high, goal=c)
                assert short is not None  # the split found above meets these thresholds
                self._offer(short[1])
                t_low[c] = max(t_low[c], int(np.searchsorted(self.loads.levels[c], short[0])))
        self.file(box._replace(t_low=tuple(t_low)), corner)

    def file(self, box: Box, corner: Tuple[float, float, List[float]]) -> None:
        """Cuts away what is dominated and keeps the rest, under its lower bound, unless it can't be better.

        Args:
            corner: (X, Y, T) of a split of the box's upper corner: Y the smallest in the box, X the smallest with it.
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
        """Halves a box across the threshold that matters most."""
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
        self.evaluate(self.loads.first_box(self.value))
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
) -> MinMaxResult:
    """Fastest split for a pipelined schedule.

    Of splits with the same maxima it takes one with the least transfer, and of those one with early cuts.

    Args:
        schedule: "Grouped" or "Interleaved".
        max_evaluations: dynamic programs after which to stop with a gap.  Without, the search ends with a proof.
        below_s: only splits with a shorter tick are looked for; without starts there is none.
    """
    loads = _Loads(tables, num_stages, schedule)
    state = Search(loads, max_evaluations, below_s)
    bound = state.run()
    if not state.starts:
        return MinMaxResult((), bound, state.num_evaluations)
    x, y, t = loads.maxima(state.starts)
    chosen = _least(loads, x, y, t, goal=TRANSFER)
    assert chosen is not None
    return MinMaxResult(chosen[1], bound, state.num_evaluations)
