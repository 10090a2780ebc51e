"""Pipelines in any order of the layers where there are too many down-sets to look at: a linear program bounds all of
them, and its answers are orders in which fast ones are found.

The program asks how much of each item, between 0 and 1, is in each of the down-sets D_1, D_2, ... before the stages but
the first.  Of item v in D_s there is z[s, v]; X + Y + w (T_0 + T_1) is made as small as possible where

    z[s, v] <= z[s, u]                    where v reads u: D_s holds what its members read
    z[s, v] <= z[s + 1, v]                D_s is a part of D_(s+1)
    t[s, e] >= z[s, m] - z[s, r]          where tensor e is made by m and read by r; t >= 0
    a_s (z[s + 1] - z[s]) <= X            the two loads of each stage, see ``minmax``; z[0] = 0 and z[stages] = 1
    b_s (z[s + 1] - z[s]) <= Y
    sum_e seconds_e t[s, e] + idle <= T_c of each cut, in its class c

Where a stage's memory is known from below (``Memory``), it is

    sum_v bytes_v (z[s + 1, v] - z[s, v]) + sum_e bytes_e (t[s, e] + t[s + 1, e]) + n sum_e bytes_e i[s, e]
        <= what is left
    i[s, e] >= t[s, e] - t[s + 1, e]      where a stage that recomputes holds n times what it reads; i >= 0; of tensors
                                          whose readers all have a backward pass

Every pipeline is such a z of zeros and ones, and its tick the value, so no tick is below the least value.  What the
solver says of the least value is not believed.  For multipliers p >= 0 of the rows A z <= b and costs c, whatever they
are, c z >= c z + p (A z - b) = -p b + (c + p A) z, and each term of this is least at one end of its unknown's range
(Neumaier and Shcherbina 2004).  That sum is the bound, and the solver's multipliers make it a good one.

Where the bound leaves a gap, an item and a down-set are chosen, and pipelines with the item in the down-set are bounded
apart from those without (branch and bound).  The items in the order of sum_s z[s, v] run behind all that they read, so
every answer gives an order, and between its prefixes a fast pipeline is looked for.
"""

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipucnn.planning.cost.memory import LeastBytes
from ipucnn.planning.search import minmax
from ipucnn.planning.search.down_sets import Chains, Items
from ipucnn.planning.search.tables import StageTables

# Unknowns above which a linear program is not solved, and of all programs of a search together: under a minute.
_MOST_UNKNOWNS, _ALL_UNKNOWNS = 60_000, 400_000
_MOST_PROGRAMS = 80

# A smaller gap, as a fraction of the bound, is not worth another program.
WORTH_A_SEARCH = 0.005

# Dynamic programs over the prefixes of an order.
_MOST_EVALUATIONS = 40

# Orders in which pipelines that fit are looked for.
_MOST_ORDERS = 24

# Shares that are nearer to 0 or 1 are rounded.
_ROUNDING = 1e-6


class Memory(NamedTuple):
    """What the stages of any pipeline hold at least, and what they may hold.

    Attributes:
        least: see ``LeastBytes``.
        capacity_bytes: of a stage.
        bytes_per_s: of what crosses a cut in the seconds of ``Items.tensors``.
        fitting: the cuts and the tick of the fastest pipeline that fits in an order of the items, if one is faster than
            the tick that is given; None if none is.
    """

    least: LeastBytes
    capacity_bytes: float
    bytes_per_s: float
    fitting: Callable[[Sequence[int], float], Optional[Tuple[List[int], float]]]


class _Part(NamedTuple):
    """Pipelines with some items on a side of some cuts, and what the linear program says of them.

    Attributes:
        sides: (stages - 1, items) 1 where an item is before the cut, -1 where it is behind it, 0 where either may be.
        bound_s: none of them that is faster than the best pipeline has a shorter tick.
        shares: (stages - 1, items) how much of each item is before each cut.
    """

    sides: np.ndarray
    bound_s: float
    shares: np.ndarray


def num_unknowns(items: Items, num_stages: int) -> int:
    """Of the linear program, but for a few."""
    return (num_stages - 1) * (len(items.before) + len(items.tensors))


def is_solved(items: Items, num_stages: int) -> bool:
    """Whether the linear program is small enough to be solved; else there is a bound of minimum cuts alone."""
    return num_unknowns(items, num_stages) <= _MOST_UNKNOWNS


class Relaxation:
    """Bounds of the tick of any pipeline in any order, and pipelines that come near them.

    Args:
        below_s: tick of a pipeline that is known; the bounds are of those that are faster.
        memory: without it pipelines are looked for, and bounded, whether they fit or not.

    Attributes:
        best_s, cuts: the shortest tick found, ``below_s`` without cuts at first, and its down-sets before the stages,
            the empty one first, as masks of items.
    """

    def __init__(
        self,
        items: Items,
        tables: StageTables,
        num_stages: int,
        schedule: str,
        idle_s: float,
        below_s: float,
        memory: Optional[Memory] = None,
    ) -> None:
        self.items, self.tables, self.k, self.idle_s = items, tables, num_stages, idle_s
        self.memory, self.num_orders = memory, 0
        self.schedule, self.weight = schedule, tables.transfer_directions
        self.alternates = schedule == "Interleaved" and tables.training
        self.best_s, self.cuts = below_s, []  # type: float, List[int]
        n = len(items.before)
        # [v, u]: whether u is v or runs before it in any order.
        self.ancestors: np.ndarray = np.eye(n, dtype=bool)
        for item, before in enumerate(items.before):
            for source in before:
                self.ancestors[item] |= self.ancestors[source]
        self.again = [tables.recomputes(num_stages, stage) for stage in range(num_stages)]
        k, forward, backward = num_stages, float(tables.forward_s.sum()), float(tables.backward_s.sum())
        # The stages share out all work, and an item is in one stage.
        self.least_x = self.least_y = self.transfers_s = 0.0
        again = forward if any(self.again) else 0.0
        if self.alternates:
            # Both loads of all stages; the last one's forward pass is not repeated, and takes at most X + Y.
            self.work_s = (forward + backward + again) / (k + bool(again))
        else:
            self.least_x = max(forward / k, float(tables.forward_s.max()))
            self.least_y = max(backward / k, float(tables.backward_s.max()))
            # Backward passes with what they repeat fill k Y + X: X and Y are least together where X is least.
            self.work_s = self.least_x + max(self.least_y, (backward + again - self.least_x) / k)

    def run(self) -> float:
        """Looks for faster pipelines; returns a tick that none is below, which is at most ``best_s``."""
        bound_s = self._minimum_cuts()
        if not is_solved(self.items, self.k) or self.best_s <= bound_s * (1 + WORTH_A_SEARCH):
            return bound_s
        allowed = float(_ALL_UNKNOWNS)
        if self.memory is not None:
            # Most of them are solved sooner, but for those with the inputs of stages that recompute.
            allowed *= 2 if not self.memory.least.inputs.any() else 0.4
        size = num_unknowns(self.items, self.k)
        return max(bound_s, self._branch_and_bound(min(_MOST_PROGRAMS, int(allowed / size))))

    # --- on which sides of the cuts items are

    def _most(self) -> Tuple[float, float, float]:
        """What X + Y, X and Y may be in a pipeline that is faster than the best."""
        both = self.best_s - self.transfers_s
        if self.alternates:
            return both, both, both
        work = float(self.tables.forward_s.sum() + self.tables.backward_s.sum())
        for _ in range(self.k if any(self.again) else 0):
            # As above, where X is largest.
            self.least_y = max(self.least_y, (work - (both - self.least_y)) / self.k)
        return both, both - self.least_y, both - self.least_x

    def _sides(self) -> Optional[np.ndarray]:
        """``_Part.sides`` of all pipelines that are faster than the best; None if there is none.

        With all that runs before it an item may be more than the stages before a cut hold: then it is behind the cut.
        """
        both, x, y = self._most()
        k, n, slack = self.k, len(self.items.before), 1 + 1e-9
        f, b = self.tables.forward_s, self.tables.backward_s
        # Of each stage what its forward pass and its backward pass may take, the latter with what it repeats.
        swaps = [self.alternates and stage % 2 == 1 for stage in range(k)]
        ahead, back = [y if s else x for s in swaps], [x if s else y for s in swaps]
        ahead = [min(own) if again else own[0] for *own, again in zip(ahead, back, self.again)]
        limits = [(f, ahead), (b, back)]
        limits.append((f + b, [min(both, own) if again else both for own, again in zip(back, self.again)]))
        if any(self.again):
            limits.append(
                (
                    2 * f + b,
                    [both + (0 if again else min(own, both)) for own, again in zip(ahead, self.again)],
                )
            )
        sides: np.ndarray = np.zeros((k - 1, n), dtype=np.int8)
        for load, most in limits:
            until, behind = self.ancestors @ load, load @ self.ancestors
            for stage in range(1, k):
                sides[stage - 1][until > sum(most[:stage]) * slack] |= 2
                sides[stage - 1][behind > sum(most[stage:]) * slack] |= 1
        sides[:, 0] |= 1
        if self.ancestors[n - 1].all():
            sides[:, n - 1] |= 2
        if (sides == 3).any():
            return None
        sides[sides == 2] = -1
        return self._closed(sides)

    def _closed(self, sides: np.ndarray) -> Optional[np.ndarray]:
        """With what follows: an item is before a cut with all that it reads, and before later cuts; else None."""
        before, behind = sides > 0, sides < 0
        before = np.logical_or.accumulate(before @ self.ancestors, axis=0)
        behind = np.logical_or.accumulate((behind @ self.ancestors.T)[::-1], axis=0)[::-1]
        if (before & behind).any():
            return None
        closed: np.ndarray = before.astype(np.int8) - behind.astype(np.int8)
        return closed

    # --- minimum cuts

    def _minimum_cuts(self) -> float:
        """A bound of the tick without the linear program, and what the cuts take at least, ``transfers_s``.

        Of each cut there are items that are surely before it, and items that are surely behind it.  Least crosses at a
        minimum cut of the tensors between them (Ford and Fulkerson), closed under what items read.
        """
        while True:
            sides = self._sides()
            if sides is None:
                return self.best_s
            classes: List[List[float]] = [[0.0], [0.0]]
            for stage in range(1, self.k):
                own = self._cut_s(sides[stage - 1])
                classes[(stage - 1) % 2 if self.alternates and self.k > 2 else 0].append(own)
            found = self.weight * sum(max(own) for own in classes)
            if found <= self.transfers_s * (1 + 1e-9):
                return min(self.best_s, self.work_s + self.transfers_s)
            self.transfers_s = found

    def _cut_s(self, sides: np.ndarray) -> float:
        """Least seconds of a cut with items on these sides of it."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import maximum_flow

        n = len(self.items.before)
        total = sum(seconds for seconds, _, _ in self.items.tensors)
        scale = (1 << 29) / total if total else 1.0
        rows, columns, capacity = [], [], []  # type: List[int], List[int], List[int]
        large, source, sink = 1 << 30, n + len(self.items.tensors), n + len(self.items.tensors) + 1

        def edge(a: int, b: int, most: int) -> None:
            rows.append(a)
            columns.append(b)
            capacity.append(most)

        for item, reads in enumerate(self.items.before):
            for other in reads:
                edge(item, other, large)
            if sides[item] > 0:
                edge(source, item, large)
            elif sides[item] < 0:
                edge(item, sink, large)
        for number, (seconds, maker, readers) in enumerate(self.items.tensors):
            # Rounded down: still a bound.
            edge(maker, n + number, int(seconds * scale))
            for reader in readers:
                edge(n + number, reader, large)
        size = sink + 1
        network = coo_matrix(
            (np.array(capacity, dtype=np.int32), (rows, columns)), shape=(size, size)
        ).tocsr()
        return float(maximum_flow(network, source, sink).flow_value) / scale + self.idle_s

    # --- the linear program

    def _branch_and_bound(self, most_programs: int) -> float:
        """A bound of the tick, from that many linear programs or one more."""
        self.make_program()
        nothing: np.ndarray = np.zeros((self.k - 1, len(self.items.before)), dtype=np.int8)
        root = self._part(nothing, 0.0)
        solved, parts, follow = 1, [] if root is None else [root], root
        while parts and solved < most_programs:
            lowest = min(parts, key=lambda part: part.bound_s)
            if self.best_s <= lowest.bound_s * (1 + WORTH_A_SEARCH):
                break
            # Down to where nothing is open, as this finds fast pipelines, and on with the part of the least bound.
            part = follow or lowest
            place, follow = self._open(part), None
            if place is None:
                if part is lowest:
                    break
                continue
            parts = [other for other in parts if other is not part]
            for side in (1, -1):
                given = part.sides.copy()
                given[place] = side
                child = self._part(given, part.bound_s)
                solved += 1
                if child is not None:
                    parts.append(child)
                    follow = child if follow is None or child.bound_s < follow.bound_s else follow
            parts = [other for other in parts if other.bound_s < self.best_s]
            if follow is not None and follow.bound_s >= self.best_s:
                follow = None
        return min([self.best_s, *(part.bound_s for part in parts)])

    def _open(self, part: _Part) -> Optional[Tuple[int, int]]:
        """The cut and the item of which most work follows, whatever its side; None if all are on a side."""
        work = self.tables.forward_s + self.tables.backward_s
        shares = part.shares
        behind, before = work * (1 - shares), work * shares
        follows: np.ndarray = np.minimum(behind @ self.ancestors.T, before @ self.ancestors)
        follows[(shares < _ROUNDING) | (shares > 1 - _ROUNDING)] = -1.0
        cut, item = divmod(int(np.argmax(follows)), shares.shape[1])
        return (cut, item) if follows[cut, item] >= 0 else None

    def make_program(self) -> None:
        """The rows A z <= b of the program and its costs, in parts of the best tick."""
        from scipy.sparse import csr_matrix

        k, n, tensors = self.k, len(self.items.before), self.items.tensors
        self.scale = 1 / self.best_s
        # All items read the first, most of them in that they read another.
        reads = [
            (v, u) for v, before in enumerate(self.items.before) for u in before if u or len(before) == 1
        ]
        later, earlier = np.array(reads).T
        crossing = [(e, m, r) for e, (_, m, readers) in enumerate(tensors) for r in readers]
        tensor, maker, reader = np.array(crossing).T
        first = (k - 1) * n
        x = first + (k - 1) * len(tensors)
        classes = 2 if self.alternates and k > 2 else 1
        rows, columns, values = [], [], []  # type: List[np.ndarray], List[np.ndarray], List[np.ndarray]
        most: List[float] = []

        def at_most(limit: float, count: int, *terms: Tuple[np.ndarray, object]) -> None:
            """``count`` rows with one entry of each term's columns, or one row with all of them."""
            for column, value in terms:
                own = np.arange(count) if count > 1 else np.zeros(len(column), dtype=int)
                rows.append(own + len(most))
                columns.append(column)
                values.append(np.broadcast_to(np.asarray(value, dtype=float), column.shape))
            most.extend([limit] * count)

        every, seconds = np.arange(n), np.array([size for size, _, _ in tensors]) * self.scale
        for cut in range(k - 1):
            z, t = cut * n, first + cut * len(tensors)
            at_most(0.0, len(later), (z + later, 1.0), (z + earlier, -1.0))
            if cut < k - 2:
                at_most(0.0, n, (z + every, 1.0), (z + n + every, -1.0))
            at_most(0.0, len(maker), (z + maker, 1.0), (z + reader, -1.0), (t + tensor, -1.0))
            own = np.array([x + 2 + cut % classes])
            at_most(-self.idle_s * self.scale, 1, (t + np.arange(len(tensors)), seconds), (own, -1.0))
        for stage in range(k):
            ahead, back = self.tables.forward_s * self.scale, self.tables.backward_s * self.scale
            if self.again[stage]:
                back = back + ahead
            a, b = (back, ahead) if self.alternates and stage % 2 else (ahead, back)
            for load, column in ((a, x), (b, x + 1)):
                terms = [(np.array([column]), -1.0)]  # type: List[Tuple[np.ndarray, object]]
                if stage < k - 1:
                    terms.append((stage * n + every, load))
                if stage:
                    terms.append(((stage - 1) * n + every, -load))
                at_most(0.0 if stage < k - 1 else -float(load.sum()), 1, *terms)
        size = x + 2 + classes
        if self.memory is not None:
            size = self._memory_rows(at_most, n, first, size)
        self.costs = np.zeros(size)
        self.costs[x : x + 2], self.costs[x + 2 : x + 2 + classes] = 1.0, self.weight
        self.most = np.array(most)
        self.rows = csr_matrix(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
            shape=(len(most), len(self.costs)),
        )
        # No load is more than everything twice, and no cut more than all tensors.
        work = 2 * float(self.tables.forward_s.sum() + self.tables.backward_s.sum()) * self.scale
        self.ends = np.concatenate(
            [
                np.ones(x),
                [work] * 2,
                [seconds.sum() + self.idle_s * self.scale] * classes,
                np.ones(size - (x + 2 + classes)),
            ]
        )

    def _memory_rows(self, at_most: Callable[..., None], n: int, first: int, size: int) -> int:
        """Adds the rows of memory, in parts of the capacity.

        Args:
            at_most: adds rows.
            n, first, size: items, the first t, and all unknowns so far.

        Returns:
            The number of all unknowns.
        """
        assert self.memory is not None
        least, capacity = self.memory.least, self.memory.capacity_bytes
        sizes = (
            np.array([seconds for seconds, _, _ in self.items.tensors]) * self.memory.bytes_per_s / capacity
        )
        waits = [all(least.goes_back[reader] for reader in readers) for _, _, readers in self.items.tensors]
        every, tensors, k = np.arange(n), np.arange(len(sizes)), self.k
        for stage in range(k):
            own = least.items[stage] / capacity
            left = 1.0 - float(least.fixed[stage]) / capacity
            terms = []  # type: List[Tuple[np.ndarray, object]]
            if stage < k - 1:
                terms += [
                    (stage * n + every, own),
                    (first + stage * len(sizes) + tensors, least.crossing * sizes),
                ]
            else:
                left -= float(own.sum())
            if stage:
                opens: np.ndarray = first + (stage - 1) * len(sizes) + tensors
                terms += [((stage - 1) * n + every, -own), (opens, least.crossing * sizes)]
                if least.inputs[stage]:
                    # What is received is read, or passed on.
                    terms.append((size + tensors, float(least.inputs[stage]) * sizes * waits))
                    rows = [(opens, 1.0), (size + tensors, -1.0)]  # type: List[Tuple[np.ndarray, object]]
                    if stage < k - 1:
                        rows.append((first + stage * len(sizes) + tensors, -1.0))
                    at_most(0.0, len(sizes), *rows)
                    size += len(sizes)
            # What is left may be negative where the last stage's items are taken from it.
            at_most(left + 1e-9, 1, *terms)
        return size

    def _part(self, given: np.ndarray, least_s: float) -> Optional[_Part]:
        """Pipelines with items on given sides, None if none of them is faster than the best.

        Args:
            least_s: a bound of theirs that is known.
        """
        from scipy.optimize import linprog

        own = self._sides()
        if own is None or (own * given < 0).any():
            return None
        sides = self._closed(np.where(given != 0, given, own).astype(np.int8))
        if sides is None:
            return None
        low, high = np.zeros(len(self.costs)), self.ends.copy()
        known = sides.ravel()
        low[: len(known)][known > 0] = 1.0
        high[: len(known)][known < 0] = 0.0
        found = linprog(
            self.costs, self.rows, self.most, bounds=np.stack([low, high], axis=1), method="highs-ipm"
        )
        if found.x is None or found.ineqlin.marginals is None:
            return _Part(sides, least_s, np.where(sides == 0, 0.5, sides > 0))
        shares = np.clip(found.x[: len(known)].reshape(sides.shape), 0.0, 1.0)
        part = _Part(sides, max(least_s, self.proved_s(-found.ineqlin.marginals, low, high)), shares)
        self._look_between(part.shares)
        return part if part.bound_s < self.best_s else None

    def proved_s(self, multipliers: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
        """A bound of the program's value where its unknowns are between those ends, whatever the multipliers are."""
        multipliers = np.maximum(0.0, multipliers)
        slopes = self.costs + self.rows.T @ multipliers
        value = float(np.minimum(slopes * low, slopes * high).sum() - multipliers @ self.most)
        # A little less, for the rounding of sums.
        return value / self.scale * (1 - 1e-9)

    def _look_between(self, shares: np.ndarray) -> None:
        """A faster pipeline between the prefixes of an order, and between them and the best one's down-sets."""
        total = shares.sum(axis=0).round(6)
        order = sorted(range(len(total)), key=lambda v: (-total[v], v))
        masks, mask = {0, *self.cuts}, 0
        for item in order:
            mask |= 1 << item
            masks.add(mask)
        if self.memory is not None:
            if self.num_orders < _MOST_ORDERS:
                self.num_orders += 1
                fitting = self.memory.fitting(order, self.best_s * (1 - 1e-9))
                if fitting is not None:
                    self.cuts, self.best_s = fitting
            return
        chosen = sorted(masks, key=lambda own: (bin(own).count("1"), own))
        chains = Chains(self.items, chosen, self.tables, self.k, self.schedule, self.idle_s)
        search = minmax.Search(chains, _MOST_EVALUATIONS, self.best_s * (1 - 1e-9))
        search.run()
        if search.starts:
            self.best_s, self.cuts = search.value, [chosen[i] for i in search.starts]
