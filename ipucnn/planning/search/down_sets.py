"""Down-sets of a network and the pipelines between them: what is searched where the order of the layers is open.

What has run before a cut is a down-set: a set of items that holds all that its members read.  A pipeline is a chain of
down-sets, each inside the next, and every pipeline of any topological order is one.  Seconds of a stage are differences
of its two down-sets' sums, and what crosses a cut is a matter of its down-set alone, so that the search over chains is
the one over cuts of a single order (``minmax``), with down-sets in the place of cuts (Tarnawski et al. 2020, "Efficient
algorithms for device placement of DNN graph operators"; the down-sets are their ideals).
"""

import heapq
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.search import minmax
from ipucnn.planning.search.tables import StageTables, item_starts

# Down-sets up to which the search over all of them is tried.
MOST_DOWN_SETS = 50_000

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
        found = minmax.maxima(self, self.cut_s, starts)
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
        both: float = np.inf,
    ) -> Optional[minmax.Least]:
        """As ``minmax``'s, over chains of down-sets."""
        k = self.num_stages
        windows = self._windows(x, y, t, swap)
        best, steps = np.zeros(1), []  # type: np.ndarray, List[Tuple[np.ndarray, np.ndarray, np.ndarray]]
        cuts = [0.0] * len(t)
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
                reached = self._reached(stage, opens, ends[part], best, x, y, swap)
                chosen[part], values[part] = reached.argmin(axis=0), reached.min(axis=0)
            best = values
            reachable = ends[np.isfinite(best)]
            if stage < k - 1 and len(reachable):
                c = self.cut_class(stage + 1)
                cuts[c] = max(cuts[c], float(self.cut_s[reachable].min()))
            steps.append((opens, ends, chosen))
        if not np.isfinite(best).any():
            return None
        starts = [self.n]
        for opens, ends, chosen in reversed(steps):
            starts.append(int(opens[chosen[np.searchsorted(ends, starts[-1])]]))
        return minmax.Least(float(best[0]), tuple(reversed(starts[1:])), cuts)

    def _reached(
        self,
        stage: int,
        opens: np.ndarray,
        ends: np.ndarray,
        best: np.ndarray,
        x: float,
        y: float,
        swap: bool,
    ) -> np.ndarray:
        """(opens, ends): what the stage between two down-sets makes of the best before it; inf where it can't be."""
        a, b = self.pair(stage, opens[:, None], ends[None, :], swap)
        i, j = np.nonzero((a <= x) & (b <= y) & (a + b <= self._most_s()))
        inside = opens[i] != ends[j]
        for word in self.masks.T:
            inside &= (word[opens[i]] & ~word[ends[j]]) == 0
        i, j = i[inside], j[inside]
        reached = np.full(a.shape, np.inf)
        reached[i, j] = np.maximum(best[i], b[i, j])
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
