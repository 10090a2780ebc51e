"""The input of the exact search: seconds and bytes of items, and the objective.

The search cuts a sequence of n items into stages.  Items are the runs of layers between neighbouring legal cuts.  Cut c
opens a stage at item c.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np

from ipucnn.hardware import System
from ipucnn.planning.cost.layer_times import layer_times, transfers_s
from ipucnn.planning.cost.memory import MemoryModel, limit_bytes
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.program import Placement, PlannedProgram
from ipucnn.planning.schedules import Schedule, is_recomputed


def item_starts(graph: LayerGraph) -> Tuple[int, ...]:
    """Returns the index of the first layer of each item: 0, then the legal cuts."""
    return (0, *graph.cuts)


@dataclass(frozen=True)
class StageTables:
    """Times and memory of items and of runs of items.

    Attributes:
        forward_s: (n,) seconds of an item's forward pass of one micro-batch; those of a run add up.
        backward_s: (n,) likewise, without recomputation; 0 for inference.
        stage_s: the same two for each stage, if an item's time depends on its stage; () if it does not.
        cut_s: (n + 1,) seconds in which everything that crosses cut c, including tensors that skip over the cut, moves
            from one IPU to the next, in one direction; 0 at 0 and n.
        capacity_bytes: the bytes available to a stage on its IPU.
        memory_bytes: (number of stages, stage) -> (n, n + 1): bytes of items i .. j - 1 as that stage; inf where
            j <= i.
        recompute: whether stages repeat their forward pass in their backward pass, see ``is_recomputed``.
        training: whether gradients flow back over the cuts.
        checkpoint_bytes: (n + 1,) bytes stored between forward and backward pass for a segment that opens at c, if
            Sequential stages are recomputation segments on one IPU; None if each stage has its own IPU.
            ``memory_bytes`` is then the size of a segment while it runs, and ``capacity_bytes`` the memory beside the
            weights; the checkpoints of all segments and the largest segment share it.
        fixed_bytes: the bytes beside ``capacity_bytes`` on that one IPU, wherever the cuts are.
        within: (number of stages, stage, capacity) -> (n, n + 1): whether items i .. j - 1 take at most the capacity as
            that stage, if that can be computed without their bytes.
        options: the tables of each setting, in order of preference, if each stage may have one of several (not for
            segments on one IPU); see ``choice``.  No item is faster under a later one, and the seconds above are those
            of the first.
        allowed: (n, n + 1) whether items i .. j - 1 may be a stage, whatever they take; None: all may.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    cut_s: np.ndarray
    capacity_bytes: float
    memory_bytes: Callable[[int, int], np.ndarray]
    recompute: bool = False
    training: bool = True
    checkpoint_bytes: Optional[np.ndarray] = None
    fixed_bytes: float = 0.0
    stage_s: Tuple[Tuple[np.ndarray, np.ndarray], ...] = ()
    within: Optional[Callable[[int, int, float], np.ndarray]] = None
    options: Tuple["StageTables", ...] = ()
    allowed: Optional[np.ndarray] = None
    _choices: Dict[Tuple[int, int], np.ndarray] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def num_items(self) -> int:
        return len(self.forward_s)

    @property
    def one_ipu(self) -> bool:
        """Tells whether the stages are segments on one IPU."""
        return self.checkpoint_bytes is not None

    def seconds(self, stage: int) -> Tuple[np.ndarray, np.ndarray]:
        """Returns (n,) seconds of the items' forward and backward passes as that stage."""
        return self.stage_s[stage] if self.stage_s else (self.forward_s, self.backward_s)

    def least_seconds(self) -> Tuple[np.ndarray, np.ndarray]:
        """Returns (n,) seconds like ``seconds``, for each item in the stage in which it is fastest."""
        forward, backward = (np.min(each, axis=0) for each in zip(*(self.stage_s or [self.seconds(0)])))
        return forward, backward

    def sums(self, stage: int) -> Tuple[np.ndarray, np.ndarray]:
        """Returns (n + 1,) seconds of all items before each one, forward and backward, as that stage."""
        forward, backward = self.seconds(stage)
        return np.append(0.0, np.cumsum(forward)), np.append(0.0, np.cumsum(backward))

    def choice(self, num_stages: int, stage: int) -> np.ndarray:
        """Returns (n, n + 1): the first option with which items i .. j - 1 fit as that stage; their number if none."""
        key = (num_stages, stage)
        if key not in self._choices:
            choice: np.ndarray = np.full(
                (self.num_items, self.num_items + 1), len(self.options), dtype=np.int8
            )
            for number in range(len(self.options) - 1, -1, -1):
                choice[self.options[number].fits(num_stages, stage)] = number
            self._choices[key] = choice
        return self._choices[key]

    def fits(self, num_stages: int, stage: int) -> np.ndarray:
        """Returns (n, n + 1): whether items i .. j - 1 fit as that stage, by themselves."""
        fitting: np.ndarray
        if self.options:
            fitting = self.choice(num_stages, stage) < len(self.options)
        elif self.within is not None:
            fitting = self.within(num_stages, stage, self.capacity_bytes)
        else:
            fitting = self.memory_bytes(num_stages, stage) <= self.capacity_bytes
        return fitting if self.allowed is None else fitting & self.allowed

    def limited_to(self, allowed: np.ndarray) -> "StageTables":
        """Returns the tables with these runs alone as stages; which option a run takes stays the same."""
        limited = replace(self, allowed=allowed)
        limited._choices.update(self._choices)
        return limited

    def recomputes(self, num_stages: int, stage: int) -> bool:
        """Tells whether that stage repeats its forward pass."""
        return self.recompute and self.training and is_recomputed(stage, num_stages)


def stage_tables(
    graph: LayerGraph,
    settings: PlannedProgram,
    system: System,
    memory_limit: float,
    memory: MemoryModel,
) -> StageTables:
    """Returns the planner's tables for a graph under some settings.

    Args:
        settings: the settings.  If their stages have the same availableMemoryProportion, the planner may request other
            numbers of stages than theirs.
        memory_limit: the share of an IPU's memory that a stage may take.
        memory: the memory model of the graph's items under these settings.
    """
    starts = item_starts(graph)

    def seconds(stage: int) -> Tuple[np.ndarray, np.ndarray]:
        times = layer_times(graph, settings, system.ipu, proportions=settings.proportions_of(stage))
        return np.add.reduceat(times.forward_s, starts), np.add.reduceat(times.backward_s, starts)

    forward_s, backward_s = seconds(0)
    n = len(starts)
    is_segmented = settings.placement is Placement.SEGMENTS
    cut_s = np.zeros(n + 1)
    if not is_segmented:
        cut_s[1:n] = transfers_s(graph, starts[1:], settings, system.ipu)
    common: Dict[str, Any] = dict(
        forward_s=forward_s,
        backward_s=backward_s,
        stage_s=tuple(map(seconds, range(settings.num_stages if settings.proportions_differ else 0))),
        cut_s=cut_s,
        recompute=settings.recomputation and settings.training,
        training=settings.training,
    )
    capacity = limit_bytes(memory_limit, system.ipu)
    if is_segmented:
        fixed, checkpoints, segment = memory.one_ipu()
        segment = np.where(np.tri(n, n + 1, dtype=bool), np.inf, segment)
        return StageTables(
            capacity_bytes=capacity - fixed,
            fixed_bytes=fixed,
            memory_bytes=lambda num_stages, stage: segment,
            checkpoint_bytes=checkpoints,
            **common,
        )
    return StageTables(capacity_bytes=capacity, memory_bytes=memory.total, within=memory.fits, **common)


def chosen_options(tables: StageTables, starts: Sequence[int]) -> Tuple[int, ...]:
    """Returns the index of the option each stage of a split uses: the first that fits, else the last."""
    count, bounds = len(starts), [*starts, tables.num_items]
    most = len(tables.options) - 1
    return tuple(
        min(int(tables.choice(count, stage)[bounds[stage], bounds[stage + 1]]), most)
        for stage in range(count)
    )


def tick_s(tables: StageTables, starts: Sequence[int], schedule: str) -> float:
    """Returns a full pipeline's seconds for one more micro-batch, the planner's objective (``Schedule.tick_s``)."""
    num_stages, bounds = len(starts), [*starts, tables.num_items]
    chosen = [tables] * num_stages
    if tables.options:
        chosen = [tables.options[number] for number in chosen_options(tables, starts)]
    ahead, back = np.zeros((2, num_stages))
    for stage, (i, j) in enumerate(zip(bounds, bounds[1:])):
        forward, backward = chosen[stage].sums(stage)
        ahead[stage] = forward[j] - forward[i]
        back[stage] = backward[j] - backward[i]
        if tables.recomputes(num_stages, stage):
            back[stage] += ahead[stage]
    return Schedule(schedule, tables.training).tick_s(ahead, back, tables.cut_s[list(starts)])
