"""A plan's pipeline as spans of time: what each stage does from the first micro-batch to the weight update.

The order is the schedule's (see ``predict``), the durations are the plan's.  Full ticks are all alike: of many of them
a few are told and the rest is left out, so that a timeline stays small whatever the accumulation count.
"""

import itertools
from dataclasses import dataclass
from typing import Dict, List, Tuple

from ipucnn.planning.pipeline_plan import PipelinePlan

__all__ = ["PASSES", "Phase", "Span", "Timeline", "timeline"]

PASSES = ("forward", "recompute", "backward")

# Full ticks that are told before the rest is left out.
_TOLD_TICKS = 3


@dataclass(frozen=True)
class Span:
    """What a stage is at, or (``stage`` -1) an exchange between IPUs, for which all wait.

    Attributes:
        kind: one of ``PASSES``, or "transfer".
        micro_batch: from 0 within the weight update; -1 for a transfer.
        start_s, end_s: since the start of the weight update.
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
    """The spans of one weight update up to the optimizer's.

    Attributes:
        num_ticks: of the weight update.  A tick is one micro-batch's forward and backward pass under Grouped, one
            pass under Interleaved (a half-tick), all passes of one micro-batch under Sequential.
        omitted_ticks: how many full ticks are left out of ``spans``, all together, from ``omitted_from_s`` on to
            ``omitted_to_s``.
        end_s: of the last tick.
    """

    spans: Tuple[Span, ...]
    phases: Tuple[Phase, ...]
    num_ticks: int
    omitted_ticks: int
    omitted_from_s: float
    omitted_to_s: float
    end_s: float


def timeline(plan: PipelinePlan, told_ticks: int = _TOLD_TICKS) -> Timeline:
    """The timeline of a plan.

    Args:
        told_ticks: full ticks that are told, at least 1; under Interleaved pairs of half-ticks.
    """
    schedule = _Schedule(plan)
    told = told_ticks * schedule.period
    omitted = max(0, schedule.steady_end - schedule.steady_start - told)
    omitted -= omitted % schedule.period
    break_at = schedule.steady_start + told
    spans: List[Span] = []
    bounds: Dict[int, float] = {}
    now = omitted_from = omitted_to = 0.0
    ticks = [range(schedule.num_ticks)]
    if omitted:
        ticks = [range(break_at), range(break_at + omitted, schedule.num_ticks)]
    for t in itertools.chain(*ticks):
        if omitted and t == break_at + omitted:
            omitted_from = now
            now = omitted_to = now + omitted // schedule.period * schedule.full_s
        bounds[t] = now
        now = schedule.run(t, now, spans)
    if omitted and break_at + omitted == schedule.num_ticks:
        omitted_from = now
        now = omitted_to = now + omitted // schedule.period * schedule.full_s
    bounds[schedule.num_ticks] = now
    edges = (0, schedule.steady_start, schedule.steady_end, schedule.num_ticks)
    phases = tuple(
        Phase(name, b - a, bounds[a], bounds[b])
        for name, a, b in zip(("fill", "steady", "drain"), edges, edges[1:])
        if b > a
    )
    return Timeline(tuple(spans), phases, schedule.num_ticks, omitted, omitted_from, omitted_to, now)


class _Schedule:
    """Ticks of a plan's schedule.

    Attributes:
        period: ticks after which full ones repeat.
        full_s: seconds of that many full ticks.
        steady_start, steady_end: the ticks between them are full; equal if none is.
    """

    def __init__(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.stages = range(plan.num_stages)
        self.mapping = plan.settings.mapping
        self.count = plan.settings.gradient_accumulation_count
        self.full_s = plan.predicted_tick_s
        self.kind = plan.settings.schedule
        training = plan.settings.training
        if self.kind != "Sequential" and not training:
            self.kind = "inference"
        last = plan.num_stages - 1
        self.period = 2 if self.kind == "Interleaved" else 1
        self.num_ticks, ramp = {
            "Sequential": (self.count, 0),
            "inference": (self.count + last, last),
            "Grouped": (self.count + 2 * last, 2 * last),
            "Interleaved": (2 * (self.count + last), 2 * last + 1),
        }[self.kind]
        self.ramp = ramp
        end = 2 * self.count - 1 if self.kind == "Interleaved" else self.count
        self.steady_start = min(ramp, end)
        self.steady_end = max(self.steady_start, end)

    def _going(self, t: int) -> Tuple[Dict[int, int], Dict[int, int]]:
        """Micro-batches that go forward and backward in tick t, by stage."""
        if self.kind == "Interleaved":
            f = {s: (t - s) // 2 for s in self.stages if (t - s) % 2 == 0}
            b = {s: (t - self.ramp + s) // 2 for s in self.stages if (t - self.ramp + s) % 2 == 0}
        else:
            f = {s: t - s for s in self.stages}
            b = {s: t - self.ramp + s for s in self.stages} if self.kind == "Grouped" else {}
        forward, backward = ({s: m for s, m in going.items() if 0 <= m < self.count} for going in (f, b))
        return forward, backward

    def run(self, t: int, now: float, spans: List[Span]) -> float:
        """Adds the spans of tick t, which begins at ``now``; returns when it ends."""
        if self.kind != "Interleaved" or t % 2 == 0:
            now += self.plan.predicted_fixed_s
        if self.kind == "Sequential":
            for s in self.stages:
                now = self._forward({s: t}, now, spans, self._receives(s))
            for s in reversed(self.stages) if self.plan.settings.training else ():
                now = self._backward({s: t}, now, spans)
            return now
        forward, backward = self._going(t)
        if self.kind == "Interleaved":
            free: Dict[int, float] = {}
            end = self._passes(forward, "forward", now, spans, free)
            end = max(end, self._passes(backward, "backward", now, spans, free))
            end = _exchange(max((self._sends(s) for s in forward), default=0.0), end, spans)
            return _exchange(max((self._receives(s) for s in backward), default=0.0), end, spans)
        now = self._passes(forward, "forward", now, spans, {})
        now = _exchange(max((self._sends(s) for s in forward), default=0.0), now, spans)
        return self._backward(backward, now, spans)

    def _receives(self, stage: int) -> float:
        return self.plan.stages[stage].predicted_receive_s

    def _sends(self, stage: int) -> float:
        """Seconds in which a stage's output moves on."""
        return self._receives(stage + 1) if stage + 1 < self.plan.num_stages else 0.0

    def _forward(self, going: Dict[int, int], now: float, spans: List[Span], receive_s: float) -> float:
        return self._passes(going, "forward", _exchange(receive_s, now, spans), spans, {})

    def _backward(self, going: Dict[int, int], now: float, spans: List[Span]) -> float:
        now = self._passes(going, "backward", now, spans, {})
        return _exchange(max((self._receives(s) for s in going), default=0.0), now, spans)

    def _passes(
        self, going: Dict[int, int], kind: str, now: float, spans: List[Span], free: Dict[int, float]
    ) -> float:
        """Runs passes side by side, those on one IPU one after the other; ``free`` is when each IPU can start."""
        end = now
        for s, m in going.items():
            stage, ipu = self.plan.stages[s], self.mapping[s]
            begin = free.get(ipu, now)
            parts = (
                [("forward", stage.predicted_forward_s)]
                if kind == "forward"
                else [("recompute", stage.predicted_recompute_s), ("backward", stage.predicted_backward_s)]
            )
            for name, seconds in parts:
                if seconds > 0:
                    spans.append(Span(name, s, m, begin, begin + seconds))
                begin += seconds
            free[ipu] = begin
            end = max(end, begin)
        return end


def _exchange(seconds: float, now: float, spans: List[Span]) -> float:
    if seconds > 0:
        spans.append(Span("transfer", -1, -1, now, now + seconds))
    return now + seconds
