"""Splits of a network in any order of its layers: a stage is then any convex set of them, not a run of one order.

What has run before a cut is a down-set: a set of items that holds all that its members read.  A pipeline is a chain of
down-sets, each inside the next, and every pipeline of any topological order is one.  Seconds of a stage are differences
of its two down-sets' sums, and what crosses a cut is a matter of its down-set alone, so that the search over chains is
the one over cuts of a single order (``minmax``), with down-sets in the place of cuts (Tarnawski et al. 2020, "Efficient
algorithms for device placement of DNN graph operators"; the down-sets are their ideals).

Memory is not part of this search: it gives a bound of the tick, and an order of the layers.  In that order the exact
search finds the fastest splits that fit; where they meet the bound, no splits in any order are faster.
"""

import heapq
from dataclasses import replace
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import IPU
from ipucnn.planning.cost.layer_times import output_bytes
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.search import minmax
from ipucnn.planning.search.planner import Candidate, Planner
from ipucnn.planning.search.tables import StageTables, item_starts
from ipucnn.planning.settings import PlanSettings
from ipucnn.text import counted

# Down-sets up to which the search over all of them is tried.
MOST_DOWN_SETS = 50_000

# Down-sets over which the least crosses: the search over them finds short ticks quickly.
_PROMISING = 8_000

# Dynamic programs of a search over down-sets before it is given up with a gap.
_MOST_EVALUATIONS = 400

# Pairs of down-sets that are looked at at once.
_PAIRS = 2_000_000


class Items(NamedTuple):
    """The items of a graph as a network of their own.

    Attributes:
        before: of each item those it reads.
        tensors: (bytes or seconds, item that makes it, items that read it) of everything that leaves an item.
    """

    before: Tuple[Tuple[int, ...], ...]
    tensors: Tuple[Tuple[float, int, Tuple[int, ...]], ...]


def items_of(graph: LayerGraph, sizes: Sequence[float]) -> Items:
    """The items of a graph (``item_starts``); a tensor's size is that of the layer that makes it."""
    starts = item_starts(graph)
    ends = [*starts[1:], len(graph.layers)]
    item_of = [item for item, (first, last) in enumerate(zip(starts, ends)) for _ in range(first, last)]
    before: List[Set[int]] = [set() for _ in starts]
    readers: List[Set[int]] = [set() for _ in graph.layers]
    for i, layer in enumerate(graph.layers):
        for name in layer.inputs:
            source = graph.index(name)
            if item_of[source] != item_of[i]:
                before[item_of[i]].add(item_of[source])
                readers[source].add(item_of[i])
    tensors = tuple(
        (float(sizes[i]), item_of[i], tuple(sorted(found))) for i, found in enumerate(readers) if found
    )
    # Everything comes behind the first item, which holds the input.
    own = [tuple(sorted(found | ({0} if item else set()))) for item, found in enumerate(before)]
    return Items(tuple(own), tensors)


class _Growth:
    """How down-sets grow, as masks of bits.

    Attributes:
        ready: the items that read nothing.
    """

    def __init__(self, items: Items) -> None:
        self._needs = [sum(1 << i for i in before) for before in items.before]
        self._after: List[List[int]] = [[] for _ in self._needs]
        for item, before in enumerate(items.before):
            for i in before:
                self._after[i].append(item)
        self.ready = sum(1 << item for item, need in enumerate(self._needs) if not need)

    @staticmethod
    def by_one(mask: int, ready: int) -> Iterator[Tuple[int, int]]:
        """The down-sets with one of the items more that are ready, and which."""
        while ready:
            bit = ready & -ready
            ready ^= bit
            yield mask | bit, bit.bit_length() - 1

    def ready_after(self, grown: int, ready: int, item: int) -> int:
        """The items that are ready once one of them has joined."""
        ready ^= 1 << item
        for other in self._after[item]:
            if not self._needs[other] & ~grown:
                ready |= 1 << other
        return ready


def down_sets(items: Items, at_most: int = MOST_DOWN_SETS) -> Optional[List[int]]:
    """All down-sets as masks of bits, small ones first; None if there are more than ``at_most``."""
    growth = _Growth(items)
    level, found = {0: growth.ready}, [0]
    while level:
        larger: Dict[int, int] = {}
        for mask, ready in level.items():
            for grown, item in growth.by_one(mask, ready):
                if grown not in larger:
                    larger[grown] = growth.ready_after(grown, ready, item)
        found += larger
        if len(found) > at_most:
            return None
        level = larger
    return found


class Chains:
    """Loads of the stages between down-sets, in the place of ``minmax``'s loads between cuts."""

    def __init__(
        self,
        items: Items,
        masks: Sequence[int],
        tables: StageTables,
        num_stages: int,
        schedule: str,
        idle_s: float = 0.0,
    ) -> None:
        self.num_stages, self.n = num_stages, len(masks) - 1
        self.tables, self.weight = tables, tables.transfer_directions
        count = len(items.before)
        width = -(-count // 64)
        packed = b"".join(mask.to_bytes(8 * width, "little") for mask in masks)
        self.masks: np.ndarray = np.frombuffer(packed, dtype="<u8").reshape(len(masks), width)
        inside = np.unpackbits(
            np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), -1), axis=1, bitorder="little"
        )
        self.inside = inside[:, :count].astype(bool)
        self.forward_s = self.inside @ tables.forward_s
        self.backward_s = self.inside @ tables.backward_s
        self.cut_s = np.zeros(len(masks))
        for seconds, source, readers in items.tensors:
            self.cut_s += seconds * (self.inside[:, source] & ~self.inside[:, list(readers)].all(axis=1))
        self.cut_s[1:-1] += idle_s
        self.alternates = schedule == "Interleaved" and tables.training
        num_classes = 2 if self.alternates and num_stages > 2 else 1
        own = np.unique(self.cut_s[1:-1]) if num_stages > 1 else np.zeros(1)
        self.levels = [own] * num_classes
        # Only chains with a shorter tick are looked for; their cuts take at least the other.
        self.below_s, self.transfers_s = np.inf, 0.0

    def cut_class(self, stage: int) -> int:
        return (stage - 1) % len(self.levels)

    def pair(
        self, stage: int, i: np.ndarray, j: np.ndarray, swap: bool = False
    ) -> Tuple[np.ndarray, np.ndarray]:
        """(a, b) of what is in down-set j and not in i as a stage; ``swap`` gives (b, a)."""
        ahead = self.forward_s[j] - self.forward_s[i]
        back = self.backward_s[j] - self.backward_s[i]
        if self.tables.recomputes(self.num_stages, stage):
            back = back + ahead
        if self.alternates and stage % 2:
            ahead, back = back, ahead
        return (back, ahead) if swap else (ahead, back)

    def first_box(self, below_s: float) -> minmax.Box:
        """As ``minmax``'s.

        All stages together take at least the forward and the backward pass, and the cut before each stage is one of
        those that the stages around it can hold at all.  What one of these takes the others can't: in turns each bound
        narrows the others.
        """
        forward, backward = float(self.forward_s[-1]), float(self.backward_s[-1])
        top = tuple(len(own) - 1 for own in self.levels)
        x_low, x, low = -1.0, max(2 * (forward + backward), 1e-300), [0] * len(top)
        if not np.isfinite(below_s) or self.num_stages == 1:
            return minmax.Box(x_low, x, tuple(low), top)
        k, least_x, least_y = self.num_stages, 0.0, 0.0
        if not self.alternates:
            least_x = max(forward / k, float(self.tables.forward_s.max()))
            least_y = max(backward / k, float(self.tables.backward_s.max()))
            x_low = least_x * (1 - 1e-9) - 1e-300
        high = list(top)
        self.below_s = below_s
        while True:
            transfers = self.transfers_s = self.weight * sum(
                float(own[i]) for own, i in zip(self.levels, low)
            )
            most = (below_s - transfers) * (1 + 1e-9)
            x, y = most - least_y, most - least_x
            if x < x_low or y < 0:
                return minmax.Box(x_low, x_low, tuple(low), tuple(high))
            for c, own in enumerate(self.levels):
                spare = (most - least_x - least_y) / self.weight + float(own[low[c]])
                high[c] = max(low[c], int(np.searchsorted(own, spare, side="right")) - 1)
            t = [float(own[i]) for own, i in zip(self.levels, high)]
            windows = self._windows(x, y, t, False)
            found = list(low)
            for stage in range(1, k):
                c = self.cut_class(stage)
                if not len(windows[stage]):
                    return minmax.Box(x_low, x_low, tuple(low), tuple(high))
                least = float(self.cut_s[windows[stage]].min())
                found[c] = max(found[c], int(np.searchsorted(self.levels[c], least)))
            if self.tables.recompute and self.tables.training and not self.alternates:
                # Stages but the last take their forward pass twice, and the last one's is at most x.
                least_y = max(least_y, (forward + backward - x) / k)
            if found == low:
                return minmax.Box(x_low, x, tuple(low), tuple(high))
            low = found

    def maxima(self, starts: Tuple[int, ...]) -> Tuple[float, float, List[float]]:
        bounds = np.array([*starts, self.n])
        pairs = [self.pair(s, bounds[s], bounds[s + 1]) for s in range(self.num_stages)]
        t = [0.0] * len(self.levels)
        for stage in range(1, self.num_stages):
            c = self.cut_class(stage)
            t[c] = max(t[c], float(self.cut_s[starts[stage]]))
        found = max(float(a) for a, _ in pairs), max(float(b) for _, b in pairs), t
        self.below_s = min(self.below_s, self.value(*found))
        return found

    def value(self, x: float, y: float, t: List[float]) -> float:
        return x + y + self.weight * sum(t)

    def _windows(self, x: float, y: float, t: List[float], swap: bool) -> List[np.ndarray]:
        """The down-sets before each stage that the stages before and behind it can hold at all."""
        k, slack = self.num_stages, 1 + 1e-12
        # Of each stage the most that its forward and its backward pass may take, without the recomputation.
        ahead, back = [], []
        for stage in range(k):
            first, second = (y, x) if swap != (self.alternates and stage % 2 == 1) else (x, y)
            ahead.append(min(first, second) if self.tables.recomputes(k, stage) else first)
            back.append(second)
        total_f, total_b = self.forward_s[-1], self.backward_s[-1]
        found = [np.array([0])]
        both = self._most_s()
        for stage in range(1, k):
            # Recomputing stages together take their forward and backward passes in what the backward ones may.
            again = [s for s in range(k) if self.tables.recomputes(k, s)]
            front, rear = [s for s in again if s < stage], [s for s in again if s >= stage]
            allowed = (
                (self.cut_s <= t[self.cut_class(stage)])
                & (self.forward_s <= sum(ahead[:stage]) * slack)
                & (self.backward_s <= sum(back[:stage]) * slack)
                & (total_f - self.forward_s <= sum(ahead[stage:]) * slack)
                & (total_b - self.backward_s <= sum(back[stage:]) * slack)
            )
            # No stage's two loads together are more than X + Y.
            twice = total_f if rear and k - 1 not in rear else 0.0
            done = self.forward_s * (2 if front else 1) + self.backward_s
            left = total_f + total_b + twice - done
            last = min(ahead[k - 1], both) if twice else 0.0
            allowed &= (done <= stage * both * slack) & (left <= ((k - stage) * both + last) * slack)
            if len(front) == stage:
                allowed &= self.forward_s + self.backward_s <= sum(back[:stage]) * slack
            if rear:
                last = sum(ahead[s] for s in range(stage, k) if s not in again)
                allowed &= (
                    total_f + total_b - self.forward_s - self.backward_s <= (sum(back[stage:]) + last) * slack
                )
            allowed[0] = allowed[-1] = False
            found.append(np.flatnonzero(allowed))
        return [*found, np.array([self.n])]

    def _most_s(self) -> float:
        """What X + Y may be in a chain that is faster than the best so far."""
        return (self.below_s - self.transfers_s) * (1 + 1e-9)

    def least(
        self,
        x: float,
        y: float,
        t: List[float],
        swap: bool = False,
        goal: int = minmax.LOAD,
        both: float = np.inf,
    ) -> Optional[Tuple[float, Tuple[int, ...]]]:
        """As ``minmax``'s, over chains of down-sets."""
        k = self.num_stages
        windows = self._windows(x, y, t, swap)
        best, steps = np.zeros(1), []  # type: np.ndarray, List[Tuple[np.ndarray, np.ndarray, np.ndarray]]
        for stage in range(k):
            keep = np.isfinite(best)
            opens, best, ends = windows[stage][keep], best[keep], windows[stage + 1]
            if not len(opens) or not len(ends):
                return None
            values = np.full(len(ends), np.inf)
            chosen: np.ndarray = np.zeros(len(ends), dtype=int)
            step = max(1, _PAIRS // len(opens))
            for begin in range(0, len(ends), step):
                part = slice(begin, begin + step)
                reached = self._reached(stage, opens, ends[part], best, x, y, swap, goal)
                chosen[part], values[part] = reached.argmin(axis=0), reached.min(axis=0)
            best = values
            steps.append((opens, ends, chosen))
        if not np.isfinite(best).any():
            return None
        starts = [self.n]
        for opens, ends, chosen in reversed(steps):
            starts.append(int(opens[chosen[np.searchsorted(ends, starts[-1])]]))
        return float(best[0]), tuple(reversed(starts[1:]))

    def _reached(
        self,
        stage: int,
        opens: np.ndarray,
        ends: np.ndarray,
        best: np.ndarray,
        x: float,
        y: float,
        swap: bool,
        goal: int,
    ) -> np.ndarray:
        """(opens, ends): what the stage between two down-sets makes of the best before it; inf where it can't be."""
        a, b = self.pair(stage, opens[:, None], ends[None, :], swap)
        i, j = np.nonzero((a <= x) & (b <= y) & (a + b <= self._most_s()))
        inside = opens[i] != ends[j]
        for word in self.masks.T:
            inside &= (word[opens[i]] & ~word[ends[j]]) == 0
        i, j = i[inside], j[inside]
        reached = np.full(a.shape, np.inf)
        if goal == minmax.LOAD:
            reached[i, j] = np.maximum(best[i], b[i, j])
        elif goal == minmax.TRANSFER:
            reached[i, j] = best[i] + self.cut_s[ends[j]]
        else:
            counts = stage < self.num_stages - 1 and self.cut_class(stage + 1) == goal
            reached[i, j] = np.maximum(best[i], self.cut_s[ends[j]] if counts else 0.0)
        return reached


# --- more down-sets than can be looked at


def promising(items: Items, at_most: int = MOST_DOWN_SETS) -> List[int]:
    """Down-sets over which the least crosses, as many of each size; every one grows out of one of those before it.

    A chain among them is a pipeline, and often a fast one; that it is a fastest one is not proved by them.
    """
    growth, count = _Growth(items), len(items.before)
    made = [0.0] * count
    read: List[List[Tuple[float, int]]] = [[] for _ in range(count)]
    for seconds, source, readers in items.tensors:
        made[source] += seconds
        for reader in readers:
            read[reader].append((seconds, sum(1 << i for i in readers)))
    width = max(1, at_most // count)
    level, found = {0: (0.0, growth.ready)}, [0]
    while level:
        larger: Dict[int, Tuple[float, int]] = {}
        for mask, (crossing, ready) in level.items():
            for grown, item in growth.by_one(mask, ready):
                if grown not in larger:
                    gone = sum(seconds for seconds, readers in read[item] if not readers & ~grown)
                    larger[grown] = crossing + made[item] - gone, growth.ready_after(grown, ready, item)
        kept = heapq.nsmallest(width, larger.items(), key=lambda entry: entry[1][0])
        level = dict(kept)
        found += level
    return found


class Bound:
    """A bound of the tick of any pipeline in any order, where there are too many down-sets to look at.

    The stages share out all work, so that no two loads are both below an even share.  A cut that leaves neither side
    more than its stages can hold separates items that are surely before it from items that are surely behind it: least
    crosses at a minimum cut of the tensors between them (Ford and Fulkerson), closed under what items read.
    """

    def __init__(
        self, items: Items, tables: StageTables, num_stages: int, schedule: str, idle_s: float
    ) -> None:
        self.items, self.tables, self.k, self.idle_s = items, tables, num_stages, idle_s
        self.weight = tables.transfer_directions
        self.again = tables.recompute and tables.training
        self.alternates = schedule == "Interleaved" and tables.training
        n = len(items.before)
        # [v, u]: whether u is v or runs before it in any order.
        self.ancestors: np.ndarray = np.eye(n, dtype=bool)
        for item, before in enumerate(items.before):
            for source in before:
                self.ancestors[item] |= self.ancestors[source]

    def bound_s(self, below_s: float) -> float:
        """No pipeline has a shorter tick; at most ``below_s``, which some pipeline has."""
        k, forward, backward = self.k, float(self.tables.forward_s.sum()), float(self.tables.backward_s.sum())
        again = forward if self.again else 0.0
        least_x = least_y = 0.0
        if self.alternates:
            # Both loads of all stages; the last one's forward pass is not repeated, and takes at most X + Y.
            work = (forward + backward + again) / (k + bool(self.again))
        else:
            least_x = max(forward / k, float(self.tables.forward_s.max()))
            least_y = max(
                (backward + again - (least_x if self.again else 0.0)) / k, float(self.tables.backward_s.max())
            )
            # Backward passes with what they repeat fill k Y + X: least together where X is least.
            work = least_x + least_y
        transfers = 0.0
        while True:
            most = below_s - transfers
            classes: List[List[float]] = [[0.0], [0.0]]
            for stage in range(1, k):
                own = self._cut_s(stage, most, most - least_y, most - least_x)
                classes[(stage - 1) % 2 if self.alternates and k > 2 else 0].append(own)
            found = self.weight * sum(max(own) for own in classes)
            if found <= transfers * (1 + 1e-9):
                return min(below_s, work + transfers)
            transfers = found

    def _cut_s(self, stage: int, both: float, x: float, y: float) -> float:
        """Least seconds of the cut before a stage if no stage takes more than these; inf if there is none."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import maximum_flow

        k, n, slack = self.k, len(self.items.before), 1 + 1e-9
        f, b = self.tables.forward_s, self.tables.backward_s
        twice = f * (2 if self.again else 1) + b
        spare = min(x, both) if self.again else 0.0
        limits = [(twice, stage * both, (k - stage) * both + spare)]
        if not self.alternates:
            limits += [(f, stage * x, (k - stage) * x), (b, stage * y, (k - stage) * y)]
        behind: np.ndarray = np.zeros(n, dtype=bool)
        before: np.ndarray = np.zeros(n, dtype=bool)
        for load, front, rear in limits:
            # With all that runs before it an item is more than the stages before the cut hold: it is behind the cut.
            behind |= self.ancestors @ load > front * slack
            before |= load @ self.ancestors > rear * slack
        before[0] = behind[n - 1] = True
        if (before & behind).any():
            return float("inf")
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
            if before[item]:
                edge(source, item, large)
            if behind[item]:
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


# --- from a planned pipeline to the best one in any order


class AnyOrder(NamedTuple):
    """The best splits in any order of the layers.

    Attributes:
        planner: of the network in that order.
        candidate: the splits, with a bound of the tick in any order that fits or not.
        one_order: whether the network has no other order.
    """

    planner: Planner
    candidate: Candidate
    one_order: bool


def check_any_order(settings: PlanSettings) -> None:
    """Refuses pipelines whose stages are not searched in other orders than the network's.

    Raises:
        ConfigurationError: naming what is in the way.
    """
    if settings.schedule == "Sequential" or settings.num_stages == 1:
        raise ConfigurationError(
            f"--orders: a {settings.schedule} pipeline of {counted(settings.num_stages, 'stage')} is planned in the "
            "network's own order",
            "add --schedule Grouped or Interleaved, and --stages 2 or more; or drop --orders",
        )
    if settings.has_own_proportions:
        raise ConfigurationError(
            "--orders: stages with proportions of memory of their own are searched in the network's own order only",
            "give one --available-memory-proportion for all stages",
        )


def check_all_orders(graph: LayerGraph) -> None:
    """Refuses graphs of which not all orders would be searched: some layers stay together whatever the order.

    Raises:
        ConfigurationError: naming what is in the way.
    """
    # The parts of a separable convolution share one layer's place, and nothing lies between them.
    shared = [pair for pair in graph.tied if abs(graph.index(pair[1]) - graph.index(pair[0])) > 1]
    opened = [layer.name for layer in graph.layers if graph.layers[0].name in layer.inputs]
    why = f"{' and '.join(shared[0])} share weights" if shared else ""
    if len(opened) > 1:
        why = f"the input feeds {' and '.join(opened[:2])}"
    if why:
        raise ConfigurationError(
            f"--orders: in {graph.model} {why}, so that some layers keep their places and not every order is searched",
            "drop --orders",
        )


def in_any_order(planner: Planner, candidate: Candidate) -> AnyOrder:
    """The fastest splits in any order, of a candidate's settings and memory.

    Every order is searched where there are at most ``MOST_DOWN_SETS`` down-sets.  Where there are more, those over
    which little crosses are, and the bound is one of work and of minimum cuts.

    Raises:
        ConfigurationError: the graph has layers that stay together whatever the order, so that not all orders would be
            searched.
    """
    check_all_orders(planner.graph)
    settings, ipu = candidate.settings, planner.system.ipu
    count, schedule = settings.num_stages, settings.schedule
    items = items_of(planner.graph, _seconds(planner.graph, settings, ipu))
    idle_s = 2 * ipu.link_idle_cycles / ipu.clock_hz
    tables = planner.tables(settings, candidate.memory_limit)
    masks = down_sets(items)
    if masks is not None and len(masks) == len(items.before) + 1:
        return AnyOrder(planner, candidate, True)
    best = AnyOrder(planner, candidate, False)
    own_s = candidate.solution.objective_s

    def searched(chosen: Sequence[int]) -> Tuple[Optional[List[int]], float]:
        """The cuts of the fastest chain of these down-sets if it is faster than the best so far, and their bound."""
        chains = Chains(items, chosen, tables, count, schedule, idle_s)
        # What is as fast as the best so far, but for rounding, is not looked for.
        search = minmax.Search(chains, _MOST_EVALUATIONS, best.candidate.solution.objective_s * (1 - 1e-9))
        bound_s = search.run()
        return ([chosen[i] for i in search.starts] if search.starts else None), bound_s

    def kept(cuts: Optional[Sequence[int]]) -> AnyOrder:
        if cuts is None:
            return best
        graph = reordered(planner.graph, [*cuts[1:]], len(items.before))
        other = Planner(graph, planner.system)
        found = other.best(settings, candidate.memory_limit)
        if found is None or found.solution.objective_s >= best.candidate.solution.objective_s:
            return best
        return AnyOrder(other, found, False)

    best = kept(searched(promising(items, _PROMISING))[0])
    if masks is not None:
        cuts, bound_s = searched(masks)
        best = kept(cuts)
    else:
        shortest = best.candidate.solution.objective_s
        bound_s = Bound(items, tables, count, schedule, idle_s).bound_s(shortest)
    found = best.candidate.solution
    bound_s = min(bound_s, own_s, found.objective_s)
    if bound_s >= found.objective_s * (1 - 1e-8):
        bound_s = found.objective_s  # sums of the same numbers in another order
    proved = replace(best.candidate, solution=replace(found, lower_bound_s=bound_s))
    return best._replace(candidate=proved)


def _seconds(graph: LayerGraph, settings: PlanSettings, ipu: IPU) -> Sequence[float]:
    """Of each layer's output the seconds in which it crosses a cut."""
    seconds: List[float] = (2 * output_bytes(graph, settings) / ipu.link_bytes_per_s).tolist()
    return seconds


def reordered(graph: LayerGraph, cuts: Sequence[int], num_items: int) -> LayerGraph:
    """The graph with its layers stage by stage; within a stage they keep their order.

    Args:
        cuts: the down-sets before the stages but the first, as masks of items.
    """
    bounds = [*item_starts(graph), len(graph.layers)]
    order: List[int] = []
    done = 0
    for mask in [*cuts, (1 << num_items) - 1]:
        order += [item for item in range(num_items) if (mask & ~done) >> item & 1]
        done = mask
    layers = tuple(layer for item in order for layer in graph.layers[bounds[item] : bounds[item + 1]])
    return replace(graph, layers=layers)
