"""What the planner is told about a network, and what it answers.

The planner cuts a sequence of n items, the runs of layers between neighbouring legal cuts, into stages.  Cut c
opens a stage at item c.
"""

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np

from ipucnn.planning.graphs.layer_graph import LayerGraph

__all__ = ["Infeasibility", "Solution", "StageTables", "item_starts", "pipeline_ticks", "tick_s"]


def item_starts(graph: LayerGraph) -> Tuple[int, ...]:
    """Index of the first layer of each item: 0, then the legal cuts."""
    return (0, *graph.cuts)


@dataclass(frozen=True)
class StageTables:
    """Times and memory of items and of runs of items.

    Attributes:
        forward_s: (n,) seconds of an item's forward pass of one micro-batch; those of a run add up.
        backward_s: (n,) likewise, without recomputation; 0 for inference.
        stage_s: the same two for each stage of a pipeline of so many stages, where an item takes longer in one stage
            than in another; none: they are the same in all.  Other numbers of stages have the two above.
        cut_s: (n + 1,) seconds in which everything that crosses cut c moves from one IPU to the next, in one
            direction, tensors that skip over the cut included; 0 at 0 and n.
        capacity_bytes: that a stage may take on its IPU.
        memory_bytes: (number of stages, stage) -> (n, n + 1): bytes of items i .. j - 1 as that stage; entries
            with j <= i are not read.
        recompute: every stage but the last repeats its forward pass in its backward pass (the last one's
            activations are still there: Poplar never recomputes it).
        training: whether gradients flow back over the cuts.
        checkpoint_bytes: None: each stage has its own IPU.  (n + 1,): Sequential stages are recomputation
            segments on one IPU; bytes stored between forward and backward pass for a segment that opens at
            c.  ``memory_bytes`` is then what a segment takes while it runs, and ``capacity_bytes`` what the
            weights leave; the checkpoints of all segments and the largest segment share it.

    Raises:
        ValueError: arrays of the wrong shape, negative or not finite.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    cut_s: np.ndarray
    capacity_bytes: float
    memory_bytes: Callable[[int, int], np.ndarray]
    recompute: bool = False
    training: bool = True
    checkpoint_bytes: Optional[np.ndarray] = None
    stage_s: Tuple[Tuple[np.ndarray, np.ndarray], ...] = ()
    _allowed: Dict[Tuple[int, int], np.ndarray] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        n = len(self.forward_s)
        shapes = {"forward_s": n, "backward_s": n, "cut_s": n + 1, "checkpoint_bytes": n + 1}
        for name, length in shapes.items():
            value = getattr(self, name)
            if value is None and name == "checkpoint_bytes":
                continue
            object.__setattr__(self, name, _checked(name, value, length))
        own = tuple((_checked("stage_s", f, n), _checked("stage_s", b, n)) for f, b in self.stage_s)
        object.__setattr__(self, "stage_s", own)
        if self.cut_s[0] or self.cut_s[n]:
            raise ValueError("nothing crosses the cuts before the first and behind the last item")
        if self.one_ipu and self.cut_s.any():
            raise ValueError("segments on one IPU have no transfers: cut_s must be 0")

    @property
    def num_items(self) -> int:
        return len(self.forward_s)

    @property
    def one_ipu(self) -> bool:
        """Whether the stages are segments on one IPU."""
        return self.checkpoint_bytes is not None

    @property
    def transfer_directions(self) -> int:
        """How often a cut is crossed for a micro-batch: forward, and backward in training."""
        return 2 if self.training else 1

    def seconds(self, num_stages: int, stage: int) -> Tuple[np.ndarray, np.ndarray]:
        """(n,) seconds of the items' forward and backward passes as that stage."""
        if num_stages == len(self.stage_s):
            return self.stage_s[stage]
        return self.forward_s, self.backward_s

    def least_seconds(self, num_stages: int) -> Tuple[np.ndarray, np.ndarray]:
        """(n,) likewise, of the stage in which each item is fastest."""
        own = [self.seconds(num_stages, stage) for stage in range(num_stages)]
        return np.min([f for f, _ in own], axis=0), np.min([b for _, b in own], axis=0)

    def sums(self, num_stages: int, stage: int) -> Tuple[np.ndarray, np.ndarray]:
        """(n + 1,) seconds of all items before each, forward and backward, as that stage."""
        forward, backward = self.seconds(num_stages, stage)
        return np.append(0.0, np.cumsum(forward)), np.append(0.0, np.cumsum(backward))

    def memory(self, num_stages: int, stage: int) -> np.ndarray:
        """(n, n + 1) bytes of items i .. j - 1 as stage ``stage`` of ``num_stages``; inf where j <= i."""
        n = self.num_items
        table = np.array(self.memory_bytes(num_stages, stage), dtype=np.float64)
        if table.shape != (n, n + 1):
            raise ValueError(f"memory_bytes gave shape {table.shape}, wanted ({n}, {n + 1})")
        table[np.tri(n, n + 1, dtype=bool)] = np.inf
        return table

    def fits(self, num_stages: int, stage: int) -> np.ndarray:
        """(n, n + 1): whether items i .. j - 1 fit as that stage, by themselves."""
        key = (num_stages, stage)
        if key not in self._allowed:
            if any(known != num_stages for known, _ in self._allowed):
                self._allowed.clear()  # large networks: a megabyte each
            self._allowed[key] = self.memory(num_stages, stage) <= self.capacity_bytes
        return self._allowed[key]

    def recomputes(self, num_stages: int, stage: int) -> bool:
        """Whether that stage repeats its forward pass."""
        return self.recompute and self.training and stage < num_stages - 1


def _checked(name: str, value: Any, length: int) -> np.ndarray:
    """``value`` as an array of that many numbers.

    Raises:
        ValueError: of another shape, negative or not finite.
    """
    array = np.asarray(value, dtype=np.float64)
    if array.shape != (length,) or length < 1:
        raise ValueError(f"{name} has shape {array.shape}, wanted ({length},)")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} must be finite and not negative")
    return array


@dataclass(frozen=True)
class Infeasibility:
    """Why no split into ``num_stages`` stages fits.

    Attributes:
        num_stages: that were asked for.
        item: an item that exceeds the capacity at every stage position, alone or with any neighbours; None if
            there is none.
        ranges: runs (first item, one past the last) none of which fits into one stage, at whatever position and
            with whatever neighbours.  Each needs a cut inside it, and no cut is inside two of them, so r of them
            need r + 1 stages: with r >= num_stages they prove the case, with fewer the exhausted search does.
        fewest_stages: the smallest number of stages, at most ``max_stages``, into which some split fits; None
            if there is none.
        max_stages: the largest number of stages that was tried.
    """

    num_stages: int
    item: Optional[int]
    ranges: Tuple[Tuple[int, int], ...]
    fewest_stages: Optional[int]
    max_stages: int


@dataclass(frozen=True)
class Solution:
    """The best split into a number of stages.

    Attributes:
        schedule: "Grouped", "Interleaved" or "Sequential".
        starts: first item of each stage, the first is 0; empty if nothing fits.
        objective_s: ``tick_s`` of the split; inf if nothing fits.
        lower_bound_s: no split that fits is faster than this.
        num_evaluations: dynamic programs that the search ran.
        infeasibility: why nothing fits, None if something does.
    """

    schedule: str
    num_stages: int
    starts: Tuple[int, ...]
    objective_s: float
    lower_bound_s: float
    num_evaluations: int = 0
    infeasibility: Optional[Infeasibility] = None

    @property
    def feasible(self) -> bool:
        return self.infeasibility is None

    @property
    def optimal(self) -> bool:
        """Whether the split is proved to be a fastest one."""
        return self.feasible and self.lower_bound_s >= self.objective_s

    @property
    def gap(self) -> float:
        """By how much a better split could be faster at most, as a fraction of the lower bound; nan if infeasible."""
        if not self.feasible:
            return float("nan")
        if self.optimal:
            return 0.0
        return self.objective_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else float("inf")


def tick_s(tables: StageTables, starts: Sequence[int], schedule: str) -> float:
    """Seconds that a full pipeline takes for one more micro-batch: the planner's objective.

    All IPUs work in lock-step (Poplar's pipeline_visitor), computing and then exchanging.  F and B are the
    stages' forward and backward seconds, recomputation included, C the seconds of the cuts between them.

      Grouped      max F + max B + 2 max C: all go forward, then all go backward.
      Interleaved  even stages go forward while odd ones go backward, then the other way round:
                   max(F even, B odd) + max(F odd, B even) + 2 max C(even to odd) + 2 max C(odd to even).
      Sequential   sum F + sum B + 2 sum C: one micro-batch passes through all stages and back.

    Without training there is no B, C counts once, and Interleaved is Grouped.
    """
    num_stages, n = len(starts), tables.num_items
    bounds = [*starts, n]
    ahead, back = [], []
    for stage in range(num_stages):
        forward, backward = tables.sums(num_stages, stage)
        i, j = bounds[stage], bounds[stage + 1]
        own = float(forward[j] - forward[i])
        ahead.append(own)
        back.append(float(backward[j] - backward[i]) + (own if tables.recomputes(num_stages, stage) else 0.0))
    cuts = [float(tables.cut_s[c]) for c in starts[1:]]
    directions = tables.transfer_directions
    if schedule == "Sequential":
        return sum(ahead) + sum(back) + directions * sum(cuts)
    if schedule == "Interleaved" and tables.training:
        first = max(ahead[0::2] + back[1::2])
        second = max(ahead[1::2] + back[0::2])
        return first + second + directions * (max(cuts[0::2], default=0.0) + max(cuts[1::2], default=0.0))
    return max(ahead) + max(back) + directions * max(cuts, default=0.0)


def pipeline_ticks(schedule: str, num_stages: int, num_micro_batches: int, training: bool = True) -> int:
    """Ticks of ``tick_s`` in which a pipeline takes that many micro-batches, filling and draining included.

    Forward and backward pass of a micro-batch at one stage are 2 (S - 1 - s) ticks apart under Grouped, and
    S - 1 - s under Interleaved (Poplar's pipeline_fifo_inserter).
    """
    if schedule == "Sequential":
        return num_micro_batches
    fill = num_stages - 1
    return num_micro_batches + (2 * fill if schedule == "Grouped" and training else fill)
