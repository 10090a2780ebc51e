"""Simulates a pipeline tick by tick from its dependencies alone: an independent check of the planner's formulas.

Micro-batches move through queues.  A stage takes the next one whose input (or gradient) an earlier exchange
brought; all stages compute at once and wait for the slowest; then everything computed moves at once and all
wait for the slowest transfer.  No formula for the fill, the depth of the stash or the tick is used.
"""

from dataclasses import dataclass
from typing import List, Sequence, Tuple

import numpy as np
from support.oracle import free_tables

from ipucnn.planning.search.tables import StageTables

Operation = Tuple[str, int, int]  # "F" or "B", stage, micro-batch


@dataclass(frozen=True)
class Simulation:
    """The operations of a simulated pipeline and their times.

    Attributes:
        phases: the operations that ran in each phase (all compute, then exchange).
        phase_s: seconds of each phase.
        num_phases_per_tick: phases after which the schedule repeats.
        max_in_flight: per stage, the most micro-batches that were between their forward and backward pass.
    """

    phases: Tuple[Tuple[Operation, ...], ...]
    phase_s: Tuple[float, ...]
    num_phases_per_tick: int
    max_in_flight: Tuple[int, ...]

    @property
    def total_s(self) -> float:
        return sum(self.phase_s)

    @property
    def num_ticks(self) -> int:
        return -(-len(self.phases) // self.num_phases_per_tick)

    @property
    def longest_tick_s(self) -> float:
        """Returns the longest run of phases that makes a tick: of the full pipeline, if it was ever full."""
        width = self.num_phases_per_tick
        return max(sum(self.phase_s[t : t + width]) for t in range(0, len(self.phases), width))


class _Pipeline:
    def __init__(self, tables: StageTables, starts: Sequence[int], num_micro_batches: int) -> None:
        self.tables, self.starts, self.count = tables, list(starts), num_micro_batches
        num_stages, ends = len(self.starts), [*starts[1:], tables.num_items]
        self.last = num_stages - 1
        stage_seconds = [tables.seconds(stage) for stage in range(num_stages)]
        self.forward_s, self.backward_s = (
            [float(np.sum(seconds[way][i:j])) for seconds, i, j in zip(stage_seconds, starts, ends)]
            for way in (0, 1)
        )
        for stage in range(num_stages):
            if tables.recomputes(num_stages, stage):
                self.backward_s[stage] += self.forward_s[stage]
        self.inputs: List[List[int]] = [[] for _ in self.starts]
        self.gradients: List[List[int]] = [[] for _ in self.starts]
        self.inputs[0] = list(range(num_micro_batches))
        self.in_flight = [0] * num_stages
        self.max_in_flight = [0] * num_stages
        self.phases: List[Tuple[Operation, ...]] = []
        self.phase_s: List[float] = []
        self.finished = 0

    @property
    def done(self) -> bool:
        return self.finished == self.count

    def phase(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        """Runs the given stages' passes that have an input, and exchanges.

        Under Interleaved, forward and backward results of one phase move in two exchanges.
        """
        ran: List[Operation] = []
        ran += [("F", s, self.inputs[s].pop(0)) for s in forward if self.inputs[s]]
        ran += [("B", s, self.gradients[s].pop(0)) for s in backward if self.gradients[s]]
        compute, ahead, back = 0.0, 0.0, 0.0
        for kind, stage, batch in ran:
            compute = max(compute, self.forward_s[stage] if kind == "F" else self.backward_s[stage])
            if kind == "F":
                self.in_flight[stage] += 1
                self.max_in_flight[stage] = max(self.max_in_flight[stage], self.in_flight[stage])
                if stage < self.last:
                    ahead = max(ahead, float(self.tables.cut_s[self.starts[stage + 1]]))
                    self.inputs[stage + 1].append(batch)
                elif self.tables.training:
                    self.gradients[stage].append(batch)
                else:
                    self.finished += 1
            else:
                self.in_flight[stage] -= 1
                if stage > 0:
                    back = max(back, float(self.tables.cut_s[self.starts[stage]]))
                    self.gradients[stage - 1].append(batch)
                else:
                    self.finished += 1
        self.phases.append(tuple(ran))
        self.phase_s.append(compute + ahead + back)


def simulate(tables: StageTables, starts: Sequence[int], schedule: str, num_micro_batches: int) -> Simulation:
    """Runs ``num_micro_batches`` micro-batches through the stages that open at ``starts``, and back in training.

    Raises:
        ValueError: an unknown schedule.
    """
    pipeline = _Pipeline(tables, starts, num_micro_batches)
    stages = list(range(len(starts)))
    width = 1
    if schedule == "Sequential":
        width = len(stages) * (2 if tables.training else 1)
        while not pipeline.done:
            for stage in stages:
                pipeline.phase([stage], [])
            for stage in reversed(stages) if tables.training else ():
                pipeline.phase([], [stage])
    elif not tables.training and schedule in ("Grouped", "Interleaved"):
        while not pipeline.done:
            pipeline.phase(stages, [])
    elif schedule == "Grouped":
        width = 2
        while not pipeline.done:
            pipeline.phase(stages, [])
            pipeline.phase([], stages)
    elif schedule == "Interleaved":
        width = 2
        even, odd = stages[0::2], stages[1::2]
        while not pipeline.done:
            pipeline.phase(even, odd)
            pipeline.phase(odd, even)
    else:
        raise ValueError(f"unknown schedule {schedule!r}")
    return Simulation(tuple(pipeline.phases), tuple(pipeline.phase_s), width, tuple(pipeline.max_in_flight))


def simulate_stages(
    forward: np.ndarray,
    backward: np.ndarray,
    receive: np.ndarray,
    schedule: str,
    num_micro_batches: int,
    training: bool = True,
) -> Simulation:
    """Simulates stages of given seconds; ``receive`` is the transfer into each of them, in one direction."""
    tables = free_tables(forward, backward, np.append(receive, 0.0), training=training)
    return simulate(tables, range(len(forward)), schedule, num_micro_batches)
