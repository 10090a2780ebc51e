"""Computes the timeline of a plan: what each stage does from the first micro-batch to the weight update."""

import itertools
from dataclasses import dataclass
from typing import Dict, Iterable, List, Tuple

from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.schedules import Ticks

# Full ticks that are shown before the rest is left out.
SHOWN_TICKS = 3


@dataclass(frozen=True)
class Span:
    """A pass of a stage, or (``stage`` -1) an exchange between IPUs, during which all wait.

    Attributes:
        kind: "forward", "recompute", "backward" or "transfer".
        micro_batch: its number from 0 within the weight update; -1 for a transfer.
        start_s, end_s: the times since the start of the weight update.
    """

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Phase:
    """ "fill", "steady" or "drain"; Sequential pipelines are steady all the time."""

    name: str
    num_ticks: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one weight update, without the optimizer's.

    Attributes:
        num_ticks: the ticks of the weight update, see ``Ticks``.
        omitted_ticks: the number of full ticks left out of ``spans``, all between ``omitted_from_s`` and
            ``omitted_to_s``.
        end_s: the end of the last tick.
    """

    spans: Tuple[Span, ...]
    phases: Tuple[Phase, ...]
    num_ticks: int
    omitted_ticks: int
    omitted_from_s: float
    omitted_to_s: float
    end_s: float


def timeline(plan: PipelinePlan, shown_ticks: int = SHOWN_TICKS) -> Timeline:
    """Returns the timeline of a plan: the work of each stage from the first micro-batch to the weight update.

    Full ticks are all alike.  A few are shown and the rest is left out, so that a timeline stays small whatever the
    accumulation count.

    Args:
        shown_ticks: the number of full ticks to show, at least 1; under Interleaved, pairs of half-ticks.
    """
    settings = plan.settings
    ticks = Ticks(settings.order, plan.num_stages, settings.gradient_accumulation_count)
    walk = _Walk(plan, ticks)
    break_at = min(ticks.full_start + shown_ticks * ticks.period, ticks.full_end)
    omitted = ticks.full_end - break_at
    bounds: Dict[int, float] = {}
    now = omitted_from = omitted_to = 0.0
    for t in itertools.chain(range(break_at), range(break_at + omitted, ticks.num_ticks + 1)):
        if omitted and t == break_at + omitted:
            omitted_from = now
            now = omitted_to = now + omitted // ticks.period * plan.predicted_tick_s
        bounds[t] = now
        if t < ticks.num_ticks:
            now = walk.run(t, now)
    edges = (0, ticks.full_start, ticks.full_end, ticks.num_ticks)
    phases = tuple(
        Phase(name, b - a, bounds[a], bounds[b])
        for name, a, b in zip(("fill", "steady", "drain"), edges, edges[1:])
        if b > a
    )
    return Timeline(tuple(walk.spans), phases, ticks.num_ticks, omitted, omitted_from, omitted_to, now)


class _Walk:
    """Walks through the ticks of a plan and records the spans of each."""

    def __init__(self, plan: PipelinePlan, ticks: Ticks) -> None:
        self.plan, self.ticks = plan, ticks
        self.spans: List[Span] = []

    def run(self, t: int, now: float) -> float:
        """Records the spans of tick t, which begins at ``now``; returns when it ends."""
        order, stages = self.ticks.schedule, self.ticks.stages
        if t % self.ticks.period == 0:
            now += self.plan.predicted_fixed_s
        if order.is_sequential:
            for s in stages:
                now = self._passes({s: t}, "forward", self._exchange(self._receives([s]), now), {})
            for s in reversed(stages) if self.plan.settings.training else ():
                now = self._passes({s: t}, "backward", now, {})
                now = self._exchange(self._receives([s]), now)
            return now
        forward, backward = self.ticks.at(t)
        # A stage's output after its forward pass is what the next stage receives.
        ahead_s = self._receives([s + 1 for s in forward if s + 1 < len(stages)])
        if order.alternates:
            free: Dict[int, float] = {}
            end = self._passes(forward, "forward", now, free)
            now = self._exchange(ahead_s, max(end, self._passes(backward, "backward", now, free)))
        else:
            now = self._exchange(ahead_s, self._passes(forward, "forward", now, {}))
            now = self._passes(backward, "backward", now, {})
        return self._exchange(self._receives(backward), now)

    def _receives(self, stages: Iterable[int]) -> float:
        """Returns the seconds until all of these stages have received the tensors that cross the cuts before them."""
        return max((self.plan.stages[stage].predicted_receive_s for stage in stages), default=0.0)

    def _exchange(self, seconds: float, now: float) -> float:
        if seconds > 0:
            self.spans.append(Span("transfer", -1, -1, now, now + seconds))
        return now + seconds

    def _passes(self, going: Dict[int, int], kind: str, now: float, free: Dict[int, float]) -> float:
        """Runs passes side by side, those on one IPU one after the other; ``free`` holds when each IPU can start."""
        end = now
        for s, m in going.items():
            stage, ipu = self.plan.stages[s], self.plan.settings.mapping[s]
            begin = free.get(ipu, now)
            parts = (
                [("forward", stage.predicted_forward_s)]
                if kind == "forward"
                else [("recompute", stage.predicted_recompute_s), ("backward", stage.predicted_backward_s)]
            )
            for name, seconds in parts:
                if seconds > 0:
                    self.spans.append(Span(name, s, m, begin, begin + seconds))
                begin += seconds
            free[ipu] = begin
            end = max(end, begin)
        return end
