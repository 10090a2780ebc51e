"""Computes what runs when in a pipelined program: its throughput, and a plan's timeline.

The throughput consists of ticks, fill and drain, the weight update and the host.

``planning/schedules.py`` defines the ticks.  A tick in which the pipeline fills or drains costs what the stages at work
in it cost.
"""

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.hardware import IPU, System
from ipucnn.planning.cost.layer_times import LayerTimes, program_times, stage_starts, transfers_s
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS, CostConstants
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.schedules import Ticks
from ipucnn.planning.settings import PlanSettings

if TYPE_CHECKING:
    from ipucnn.planning.pipeline_plan import PipelinePlan


@dataclass(frozen=True)
class StageTime:
    """The predicted seconds of one stage for one micro-batch.

    Attributes:
        first, last: the stage has layers ``first .. last - 1`` of the graph.
        backward_s: the backward pass with the recomputation.
        receive_s: the transfer of its input from the stage before (one direction); 0 on the same IPU.
    """

    first: int
    last: int
    ipu: int
    forward_s: float
    recompute_s: float
    backward_s: float
    receive_s: float


@dataclass(frozen=True)
class Prediction:
    """What the model predicts for a program; nothing in it was measured.

    Attributes:
        images_per_s: the throughput of all replicas.
        stages: the times of each stage.
        tick_s: a tick of the full pipeline (Interleaved: two half-ticks; Sequential: one micro-batch), with transfers.
        transfer_s: the part of the tick spent on transfers between IPUs.
        update_s: a weight update with the all-reduce; 0 for inference.
        all_reduce_s: the part of the update spent on the all-reduce over the replicas.
        weight_update_s: all micro-batches of a weight update, with fill and drain, and the update.
        latency_s: one micro-batch through all forward passes.
        host_bytes_per_s: the input that the program takes at this throughput.
        host_limit_images_per_s: the throughput that the host can feed.
        bottleneck: "stage 2 forward and stage 3 backward", "transfer before stage 1", "host", ...
    """

    images_per_s: float
    stages: Tuple[StageTime, ...]
    tick_s: float
    transfer_s: float
    update_s: float
    all_reduce_s: float
    weight_update_s: float
    latency_s: float
    host_bytes_per_s: float
    host_limit_images_per_s: float
    bottleneck: str


def update_s(
    stage_parameters: Sequence[float],
    settings: PlanSettings,
    system: System,
    constants: CostConstants = DEFAULT_CONSTANTS,
) -> float:
    """Returns the seconds of one weight update.

    Args:
        stage_parameters: the trainable parameters of each stage.

    IPUs work side by side, each on its own parameters.  The time covers the all-reduce over the replicas, the
    optimizer's element-wise pass (weight, gradient, state; read and written), and streaming the state in and out if it
    is offloaded.
    """
    if not settings.training:
        return 0.0
    per_ipu = np.zeros(settings.num_ipus_per_replica)
    np.add.at(per_ipu, list(settings.mapping), np.asarray(stage_parameters, dtype=float))
    parameters = float(per_ipu.max())
    ipu = system.ipu
    # The gradient is read, weight and states are read and written; clearing the accumulator is one write.
    moved = parameters * settings.weight_bytes * (4 + 2 * settings.optimizer_slots)
    seconds = moved / ipu.num_tiles * constants.moved_byte_cycles / ipu.computing_hz
    seconds += system.all_reduce_s(parameters * settings.weight_bytes, settings.num_replicas)
    if settings.offloads_optimizer_state and settings.optimizer_slots and system.remote_bytes_per_s:
        streamed = 2 * settings.optimizer_slots * settings.weight_bytes * parameters
        seconds += streamed / system.remote_bytes_per_s
    return seconds


def schedule_s(
    forward: np.ndarray,
    backward: np.ndarray,
    receive: np.ndarray,
    settings: PlanSettings,
    micro_batch_s: float,
) -> Tuple[float, float]:
    """Returns (seconds of all micro-batches of a weight update, seconds of a tick of the full pipeline).

    Args:
        forward, backward: the seconds of each stage, with recomputation in the backward pass.
        receive: the transfer into each stage, in one direction.
        micro_batch_s: the fixed cost of a tick.
    """
    count, order = settings.gradient_accumulation_count, settings.order
    tick = order.tick_s(forward, backward, receive, settings.mapping) + micro_batch_s
    if order.is_sequential:
        return count * tick, tick
    ticks = Ticks(order, len(forward), count)
    num_full = (ticks.num_ticks - len(ticks.edges)) // ticks.period
    total = num_full * (tick - micro_batch_s)
    for t in ticks.edges:
        ahead, back = ticks.at(t)
        total += order.partial_tick_s(forward, backward, receive, list(ahead), list(back), settings.mapping)
    # Feeds and loop cost time once per micro-batch, which takes two half-ticks under Interleaved.
    return total + ticks.num_ticks // ticks.period * micro_batch_s, tick


def _stage_times(
    graph: LayerGraph, starts: Sequence[int], times: LayerTimes, settings: PlanSettings, ipu: IPU
) -> List[StageTime]:
    ends = [*starts[1:], len(graph.layers)]
    mapping = settings.mapping
    crossing = transfers_s(graph, starts[1:], settings, ipu)
    stages = []
    for stage, (first, last) in enumerate(zip(starts, ends)):
        forward = float(times.forward_s[first:last].sum())
        recompute = forward if settings.recomputes(stage) else 0.0
        backward = float(times.backward_s[first:last].sum()) + recompute
        moves = stage > 0 and mapping[stage] != mapping[stage - 1]
        receive = float(crossing[stage - 1]) if moves else 0.0
        stages.append(StageTime(first, last, mapping[stage], forward, recompute, backward, receive))
    return stages


def host_limit(graph: LayerGraph, settings: PlanSettings, system: System) -> Tuple[float, float]:
    """Returns (bytes of one sample, samples per second that the host can feed to the IPUs of the program)."""
    element = 1 if settings.eight_bit_transfer else settings.element_bytes
    sample = float(np.prod(graph.input_shape)) * element + 4  # the label takes 4 bytes
    share = min(1.0, settings.occupied_ipus / system.num_ipus)
    # An M2000 or Bow-2000 has four IPUs and its own link to its host.  A machine's link serves its own IPUs; a program
    # on part of a machine has all of it.
    machines = max(1.0, np.ceil(system.num_ipus / 4))
    used = max(1.0, np.ceil(share * machines))
    return sample, system.host_bytes_per_s * used / machines / sample


def bottleneck_of(
    forward: np.ndarray, backward: np.ndarray, receive: np.ndarray, settings: PlanSettings, transfer_s: float
) -> str:
    """Returns the name of what takes most of a tick: the passes of stages, or a transfer.

    Args:
        forward, backward, receive: as for ``schedule_s``.
        transfer_s: the part of the tick spent on transfers.
    """
    order = settings.order
    computing_s = order.tick_s(forward, backward, 0 * receive, settings.mapping)
    if transfer_s > computing_s:
        return f"transfer before stage {int(receive.argmax())}"
    if len(forward) == 1 or order.is_sequential:
        return "compute"
    longest = order.longest_passes(forward, backward, settings.mapping)
    if all(passes.keys() == longest[0].keys() for passes in longest):
        return _stages(longest[0])
    names = []
    for passes in longest:
        for direction in dict.fromkeys(passes.values()):
            names.append(f"{_stages([s for s, each in passes.items() if each == direction])} {direction}")
    return " and ".join(names)


def _stages(numbers: Iterable[int]) -> str:
    words = [str(number) for number in numbers]
    return f"stage{'s' if len(words) > 1 else ''} {' and '.join(words)}"


def predict(
    graph: LayerGraph,
    splits: Sequence[str],
    settings: PlanSettings,
    system: System,
    constants: CostConstants = DEFAULT_CONSTANTS,
    times: Optional[LayerTimes] = None,
) -> Prediction:
    """Predicts the throughput of a program.

    Args:
        splits: the names of the layers that open stages 1, 2, ...; one fewer than stages, in the graph's order.
        times: the times of the layers, if they are known already.

    Raises:
        ValueError: splits that are not one fewer than the stages, or out of order.
    """
    starts = stage_starts(graph, splits)
    if len(starts) != settings.num_stages or any(a >= b for a, b in zip(starts, starts[1:])):
        raise ValueError(f"splits {list(splits)} do not open {settings.num_stages - 1} stages in order")
    if times is None:
        times = program_times(graph, starts, settings, system.ipu, constants)
    stages = _stage_times(graph, starts, times, settings, system.ipu)
    forward, backward, receive = (
        np.array([getattr(stage, name) for stage in stages])
        for name in ("forward_s", "backward_s", "receive_s")
    )
    total, tick = schedule_s(forward, backward, receive, settings, constants.fixed_s(system))
    parameters = [
        sum(layer.num_trainable for layer in graph.layers[stage.first : stage.last]) for stage in stages
    ]
    update = update_s(parameters, settings, system, constants)
    images = settings.global_batch_size / (total + update)
    sample_bytes, limit = host_limit(graph, settings, system)
    # The same tick without transfers; the difference is the transfers' part.
    still = settings.order.tick_s(forward, backward, 0 * receive, settings.mapping) + constants.fixed_s(
        system
    )
    return Prediction(
        images_per_s=min(images, limit),
        stages=tuple(stages),
        tick_s=tick,
        transfer_s=tick - still,
        update_s=update,
        all_reduce_s=update - update_s(parameters, replace(settings, num_replicas=1), system, constants),
        weight_update_s=total + update,
        latency_s=float(forward.sum() + receive.sum()) + constants.fixed_s(system),
        host_bytes_per_s=min(images, limit) * sample_bytes,
        host_limit_images_per_s=limit,
        bottleneck="host"
        if limit < images
        else bottleneck_of(forward, backward, receive, settings, tick - still),
    )


PASSES = ("forward", "recompute", "backward")

# Full ticks that are shown before the rest is left out.
SHOWN_TICKS = 3


@dataclass(frozen=True)
class Span:
    """A pass of a stage, or (``stage`` -1) an exchange between IPUs, during which all wait.

    Attributes:
        kind: one of ``PASSES``, or "transfer".
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


def timeline(plan: "PipelinePlan", shown_ticks: int = SHOWN_TICKS) -> Timeline:
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

    def __init__(self, plan: "PipelinePlan", ticks: Ticks) -> None:
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
