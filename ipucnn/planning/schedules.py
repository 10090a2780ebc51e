"""Defines the schedules of a pipeline: what runs when, and the resulting ticks, FIFOs and recomputation.

All IPUs advance in lock-step, a tick at a time (Poplar's pipeline_visitor).  In a tick every IPU runs the schedule's
passes for one micro-batch of each of its stages, then the stages exchange.

  Grouped      a tick holds a forward and a backward pass: micro-batch m is at stage s going forward in tick m + s and
               going backward in tick m + 2 (S - 1) - s.
  Interleaved  a tick holds one pass: forward at 2 m + s, backward at 2 m + 2 S - 1 - s.  Even stages go forward while
               odd ones go backward, then the other way round.
  Sequential   one micro-batch at a time passes through all stages and back.

Without training nothing goes backward, and Interleaved is Grouped.  Under recomputation every stage but the last
repeats its forward pass in its backward pass.  Poplar never recomputes the last one, because its activations are still
in memory.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.training.batching import overlap_length

GROUPED, INTERLEAVED, SEQUENTIAL = SCHEDULES = ("Grouped", "Interleaved", "Sequential")


def is_recomputed(stage: int, num_stages: int) -> bool:
    """Tells whether recomputation repeats the forward pass of a stage."""
    return stage < num_stages - 1


@dataclass(frozen=True)
class Schedule:
    """A schedule of training or of forward passes only."""

    name: str
    training: bool = True

    @property
    def is_sequential(self) -> bool:
        """Tells whether one stage is at work at a time."""
        return self.name == SEQUENTIAL

    @property
    def alternates(self) -> bool:
        """Tells whether a full tick is two half-ticks, in which even and odd stages change places."""
        return self.name == INTERLEAVED and self.training

    @property
    def unit(self) -> str:
        """Returns the unit that a timeline counts, in the plural."""
        return "micro-batches" if self.is_sequential else "half-ticks" if self.alternates else "ticks"

    @property
    def directions(self) -> int:
        """Returns how often a cut is crossed for a micro-batch: forward, and backward in training."""
        return 2 if self.training else 1

    @property
    def fifo_factor(self) -> int:
        """Returns the FIFO depth between a stage's passes per later stage (Poplar's pipeline_fifo_inserter)."""
        return {GROUPED: 2, INTERLEAVED: 1, SEQUENTIAL: 0}[self.name] if self.training else 0

    def multiple(self, num_stages: int) -> int:
        """Returns the number whose multiples are legal micro-batch counts; forward-only pipelines accept any."""
        return overlap_length(self.name, num_stages) if self.training else 1

    def default_mapping(self, num_stages: int) -> Tuple[int, ...]:
        """Returns the default IPU of each stage: one each, except that Sequential stages share one as segments."""
        return (0,) * num_stages if self.is_sequential else tuple(range(num_stages))

    def partial_tick_s(
        self,
        forward: np.ndarray,
        backward: np.ndarray,
        receive: np.ndarray,
        ahead: Sequence[int],
        back: Sequence[int],
        mapping: Sequence[int],
    ) -> float:
        """Returns the seconds of a pipeline tick in which the stages ``ahead`` go forward and ``back`` backward.

        Under Grouped all go forward, then all go backward; under Interleaved each does its own at the same time.

        Args:
            forward, backward: (stages,) seconds of each stage, recomputation in the backward pass.
            receive: (stages,) seconds of the transfer into each stage, in one direction.
            mapping: the IPU of each stage.
        """
        going, coming = np.zeros((2, max(mapping) + 1))
        ipus = np.asarray(mapping)
        np.add.at(going, ipus[list(ahead)], forward[list(ahead)])
        np.add.at(coming, ipus[list(back)], backward[list(back)])
        # A stage's output leaves after its forward pass, the gradient of its input after its backward pass.
        out: np.ndarray = np.append(receive[1:], 0.0)
        exchange = max(out[list(ahead)], default=0.0) + max(receive[list(back)], default=0.0)
        if self.alternates:
            return float((going + coming).max() + exchange)
        return float(going.max() + coming.max() + exchange)

    def tick_s(
        self,
        forward: np.ndarray,
        backward: np.ndarray,
        receive: np.ndarray,
        mapping: Optional[Sequence[int]] = None,
    ) -> float:
        """Returns the seconds a full pipeline takes for one more micro-batch; for the arguments see ``partial_tick_s``.

        F and B are the stages' forward and backward seconds, recomputation included, C those of the cuts between them.

          Grouped      max F + max B + 2 max C
          Interleaved  max(F even, B odd) + max(F odd, B even) + 2 max C(even to odd) + 2 max C(odd to even)
          Sequential   sum F + sum B + 2 sum C
        """
        if self.is_sequential:
            return float(sum(forward) + sum(backward) + self.directions * sum(receive))
        phases, nothing = self._phases(len(forward)), np.zeros(len(forward))
        ipus = range(len(forward)) if mapping is None else mapping
        computing = [self.partial_tick_s(forward, backward, nothing, *phase, ipus) for phase in phases]
        # The search adds thresholds in this order: its bounds hold to the last bit.
        exchanging = [max(receive[1:][part :: len(phases)], default=0.0) for part in range(len(phases))]
        return float(sum(computing) + self.directions * sum(exchanging))

    def _phases(self, num_stages: int) -> List[Tuple[Sequence[int], Sequence[int]]]:
        """Returns the stages that go forward and backward between the exchanges of a full tick; not for Sequential."""
        stages = range(num_stages)
        if self.alternates:
            return [(stages[0::2], stages[1::2]), (stages[1::2], stages[0::2])]
        return [(stages, stages if self.training else stages[:0])]

    def longest_passes(
        self, forward: np.ndarray, backward: np.ndarray, mapping: Sequence[int]
    ) -> List[Dict[int, str]]:
        """Returns the passes that make a full tick as long as it is, without transfers; not for Sequential.

        Returns:
            Stage -> "forward" or "backward" of the IPU that works longest, for each part of the tick in which all IPUs
            work side by side: the forward and the backward passes under Grouped, the two halves under Interleaved.
        """
        parts = self._phases(len(forward))
        if not self.alternates:
            parts = [
                part for ahead, back in parts for part in ((ahead, ()), ((), back)) if any(map(len, part))
            ]
        longest = []
        for ahead, back in parts:
            passes = {**dict.fromkeys(ahead, "forward"), **dict.fromkeys(back, "backward")}
            work = np.zeros(max(mapping) + 1)
            for stage, direction in passes.items():
                work[mapping[stage]] += (forward if direction == "forward" else backward)[stage]
            busiest = int(work.argmax())
            longest.append({stage: passes[stage] for stage in sorted(passes) if mapping[stage] == busiest})
        return longest

    def least_tick_s(
        self, forward_s: np.ndarray, backward_s: np.ndarray, num_stages: int, recomputed: bool
    ) -> float:
        """Returns a lower bound of any splits' tick: evenly shared work, no transfers.

        Args:
            forward_s, backward_s: (items,) seconds.
            recomputed: whether stages are recomputed.
        """
        forward, backward = float(forward_s.sum()), float(backward_s.sum())
        if self.is_sequential:
            return forward + backward
        tick = max((forward + backward) / num_stages, float((forward_s + backward_s).max()))
        repeated = forward if recomputed else 0.0
        # The last stage is not recomputed, but its forward pass takes at most a tick, hence the added ones.
        if self.alternates and num_stages > 1:
            # Even and odd stages go backward in different halves, and one half has at most (S + 1) / 2 of them.
            return max(tick, (repeated + backward) / ((num_stages + 1) // 2 + recomputed))
        if self.name == GROUPED and self.training:
            return max(tick, (forward + repeated + backward) / (num_stages + recomputed))
        return tick


class Ticks:
    """The ticks of a weight update, and what runs in each of them.

    A tick is one micro-batch's forward and backward pass under Grouped, one pass under Interleaved (a half-tick), all
    passes of one micro-batch under Sequential.

    Attributes:
        num_ticks: the ticks of the weight update, filling and draining included.
        period: the number of ticks after which full ones repeat.
        full_start, full_end: the range of ticks in which every stage is at work; equal if there is no such tick.
    """

    def __init__(self, schedule: Schedule, num_stages: int, num_micro_batches: int) -> None:
        self.stages, self.count = range(num_stages), num_micro_batches
        self.schedule = schedule
        self.period = 2 if schedule.alternates else 1
        last, count = num_stages - 1, num_micro_batches
        # The ramp is the first full tick, if there are enough micro-batches to fill the pipeline.
        if schedule.is_sequential:
            self.num_ticks, self._ramp = count, 0
        elif schedule.alternates:
            self.num_ticks, self._ramp = 2 * (count + last), 2 * last + 1
        else:
            self._ramp = schedule.directions * last
            self.num_ticks = count + self._ramp
        self.full_end = 2 * count - 1 if schedule.alternates else count
        self.full_start = min(self._ramp, self.full_end)

    @property
    def edges(self) -> List[int]:
        """Returns the ticks that are not full: those of filling, then those of draining."""
        return [*range(self.full_start), *range(self.full_end, self.num_ticks)]

    def at(self, tick: int) -> Tuple[Dict[int, int], Dict[int, int]]:
        """Returns the micro-batches that go forward and backward in a tick, by stage; not for Sequential."""
        ahead = {s: tick - s for s in self.stages}
        back = {s: tick - self._ramp + s for s in self.stages} if self.schedule.training else {}
        if self.schedule.alternates:
            # Micro-batch m goes forward in tick 2 m + s, and backward in 2 m + 2 S - 1 - s.  The distance is odd, so
            # the ticks of the two passes never coincide.
            ahead, back = ({s: x // 2 for s, x in going.items() if x % 2 == 0} for going in (ahead, back))
        forward, backward = (
            {s: m for s, m in going.items() if 0 <= m < self.count} for going in (ahead, back)
        )
        return forward, backward
