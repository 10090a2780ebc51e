"""Throughput of a pipelined program: ticks, fill and drain, weight update, host.

All IPUs advance in lock-step, a tick at a time.  In a tick every IPU runs what the schedule gives it for one
micro-batch of each of its stages, then the stages exchange.

  Grouped      a tick holds a forward and a backward pass: micro-batch m is at stage s going forward in tick m + s and
               going backward in tick m + 2 (S - 1) - s.  A tick takes max forward + max backward over the IPUs.
  Interleaved  a tick holds one pass: forward at 2 m + s, backward at 2 m + 2 S - 1 - s.  Stages alternate, and a tick
               takes the longest pass, forward or backward, that any IPU has in it.
  Sequential   one micro-batch at a time: the sum of all.

Ticks while the pipeline fills or drains cost what the stages at work in them cost.
"""

from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.hardware import IPU, System
from ipucnn.planning.constants import DEFAULT_CONSTANTS, CostConstants
from ipucnn.planning.cost.layer_times import LayerTimes, program_times, transfers_s
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.settings import PlanSettings

__all__ = ["Prediction", "StageTime", "predict", "schedule_s", "stage_starts", "update_s"]


@dataclass(frozen=True)
class StageTime:
    """Predicted seconds of one stage for one micro-batch.

    Attributes:
        first, last: layers ``first .. last - 1`` of the graph.
        backward_s: with the recomputation.
        receive_s: transfer of its input from the stage before (one direction); 0 on the same IPU.
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
        images_per_s: of all replicas.
        stages: per stage.
        tick_s: a tick of the full pipeline (Interleaved: two half-ticks; Sequential: one micro-batch), with transfers.
        transfer_s: part of it that is transfers between IPUs.
        update_s: weight update with the all-reduce; 0 for inference.
        weight_update_s: all micro-batches of a weight update, with fill and drain, and the update.
        latency_s: one micro-batch through all forward passes.
        host_bytes_per_s: input the program takes at this throughput.
        host_limit_images_per_s: what the host can feed.
        bottleneck: "stage 2 forward and stage 3 backward", "transfer before stage 1", "host", ...
    """

    images_per_s: float
    stages: Tuple[StageTime, ...]
    tick_s: float
    transfer_s: float
    update_s: float
    weight_update_s: float
    latency_s: float
    host_bytes_per_s: float
    host_limit_images_per_s: float
    bottleneck: str


def stage_starts(graph: LayerGraph, splits: Sequence[str]) -> List[int]:
    """First layer of each stage: 0, then the layers named, each of which opens a stage."""
    return [0, *(graph.index(name) for name in splits)]


def update_s(
    stage_parameters: Sequence[float],
    settings: PlanSettings,
    system: System,
    constants: CostConstants = DEFAULT_CONSTANTS,
) -> float:
    """Seconds of one weight update.

    Args:
        stage_parameters: trainable parameters of each stage.

    IPUs work side by side, each on its own parameters: the all-reduce over the replicas, the optimizer's element-wise
    pass (weight, gradient, state; read and written), and streaming the state in and out where it is offloaded.
    """
    if not settings.training:
        return 0.0
    per_ipu = np.zeros(settings.num_ipus_per_replica)
    np.add.at(per_ipu, list(settings.mapping), np.asarray(stage_parameters, dtype=float))
    parameters = float(per_ipu.max())
    ipu = system.ipu
    # Gradient read, weight and states read and written; the accumulator is cleared: one write.
    moved = parameters * settings.weight_bytes * (4 + 2 * settings.optimizer_slots)
    seconds = moved / ipu.num_tiles * constants.moved_byte_cycles / ipu.clock_hz
    if settings.num_replicas > 1:
        seconds += parameters * settings.weight_bytes / system.all_reduce_bytes_per_s
    if settings.offloads_optimizer_state and settings.optimizer_slots and system.remote_bytes_per_s:
        streamed = 2 * settings.optimizer_slots * settings.weight_bytes * parameters
        seconds += streamed / system.remote_bytes_per_s
    return seconds


def _tick_s(
    forward: np.ndarray,
    backward: np.ndarray,
    receive: np.ndarray,
    f: np.ndarray,
    b: np.ndarray,
    settings: PlanSettings,
) -> float:
    """Seconds of a tick in which the stages of mask f go forward and those of b backward.

    Under Grouped all go forward, then all go backward; under Interleaved each does its own at the same time.
    """
    ahead, back = np.zeros((2, settings.num_ipus_per_replica))
    ipus = np.asarray(settings.mapping)
    np.add.at(ahead, ipus[f], forward[f])
    np.add.at(back, ipus[b], backward[b])
    # A stage's output leaves after its forward pass, the gradient of its input after its backward pass.
    out: np.ndarray = np.append(receive[1:], 0.0)
    exchange = max(out[f], default=0.0) + max(receive[b], default=0.0)
    if settings.schedule == "Interleaved":
        return float((ahead + back).max() + exchange)
    return float(ahead.max() + back.max() + exchange)


def schedule_s(
    forward: np.ndarray,
    backward: np.ndarray,
    receive: np.ndarray,
    settings: PlanSettings,
    micro_batch_s: float,
) -> Tuple[float, float]:
    """(seconds of all micro-batches of a weight update, seconds of a tick of the full pipeline).

    Args:
        forward, backward: seconds of each stage, recomputation in the backward pass.
        receive: transfer into each stage, one direction.
        micro_batch_s: fixed cost of a tick.
    """
    num, count = len(forward), settings.gradient_accumulation_count
    s = np.arange(num)
    if settings.schedule == "Sequential":
        directions = 2 if settings.training else 1
        tick = float(forward.sum() + backward.sum() + directions * receive.sum()) + micro_batch_s
        return count * tick, tick
    nothing: np.ndarray = np.zeros(num, dtype=bool)

    def active(batch: np.ndarray) -> np.ndarray:
        return (batch >= 0) & (batch < count)

    def cost(f: np.ndarray, b: np.ndarray) -> float:
        return _tick_s(forward, backward, receive, f, b, settings)

    everything: np.ndarray = np.ones(num, dtype=bool)
    if not settings.training:
        tick = cost(everything, nothing) + micro_batch_s
        first = num - 1
        edges = [*range(first), *range(max(first, count), count + first)]
        total = sum(cost(active(t - s), nothing) + micro_batch_s for t in edges)
        return total + (count + first - len(edges)) * tick, tick
    if settings.schedule == "Grouped":
        tick = cost(everything, everything) + micro_batch_s
        ramp = 2 * (num - 1)
        edges = [*range(ramp), *range(max(ramp, count), count + ramp)]
        total = sum(cost(active(t - s), active(t - ramp + s)) + micro_batch_s for t in edges)
        return total + (count + ramp - len(edges)) * tick, tick
    even, odd = s % 2 == 0, s % 2 == 1
    halves = [cost(even, odd), cost(odd, even)]
    tick = sum(halves) + micro_batch_s
    end, ramp = 2 * (count + num - 1), 2 * num - 1
    # From half-tick ``ramp``, an odd one, to before ``full`` the pipeline is full.
    full = max(ramp, 2 * count - 1)
    total = (full - ramp) // 2 * sum(halves)
    for t in (*range(min(ramp, end)), *range(full, end)):
        f = ((t - s) % 2 == 0) & active((t - s) // 2)
        b = ((t - ramp + s) % 2 == 0) & active((t - ramp + s) // 2)
        total += cost(f, b)
    return total + (count + num - 1) * micro_batch_s, tick


def _stage_times(
    graph: LayerGraph, starts: Sequence[int], times: LayerTimes, settings: PlanSettings, ipu: IPU
) -> List[StageTime]:
    ends = [*starts[1:], len(graph.layers)]
    mapping = settings.mapping
    crossing = transfers_s(graph, starts[1:], settings, ipu)
    stages = []
    for stage, (first, last) in enumerate(zip(starts, ends)):
        forward = float(times.forward_s[first:last].sum())
        # The last stage goes backward right after going forward: nothing to recompute.
        again = settings.training and settings.recomputation and stage < len(starts) - 1
        recompute = forward if again else 0.0
        backward = float(times.backward_s[first:last].sum()) + recompute
        moves = stage > 0 and mapping[stage] != mapping[stage - 1]
        receive = float(crossing[stage - 1]) if moves else 0.0
        stages.append(StageTime(first, last, mapping[stage], forward, recompute, backward, receive))
    return stages


def _host_limit(graph: LayerGraph, settings: PlanSettings, system: System) -> Tuple[float, float]:
    """(bytes of one sample, samples per second that the host can feed the IPUs in use)."""
    element = 1 if settings.eight_bit_transfer else settings.element_bytes
    sample = float(np.prod(graph.input_shape)) * element + 4  # and its label
    share = min(1.0, settings.num_ipus / system.num_ipus)
    # A machine's link serves its own IPUs; a program on part of a machine has all of it.
    machines = max(1.0, np.ceil(system.num_ipus / 4))
    used = max(1.0, np.ceil(share * machines))
    return sample, system.host_bytes_per_s * used / machines / sample


def _bottleneck(stages: Sequence[StageTime], settings: PlanSettings) -> str:
    if len(stages) == 1 or settings.schedule == "Sequential":
        return "compute"
    forward = max(range(len(stages)), key=lambda i: stages[i].forward_s)
    backward = max(range(len(stages)), key=lambda i: stages[i].backward_s)
    link = max(range(len(stages)), key=lambda i: stages[i].receive_s)
    if stages[link].receive_s > stages[forward].forward_s + stages[backward].backward_s:
        return f"transfer before stage {link}"
    if not settings.training or forward == backward:
        return f"stage {forward}"
    return f"stage {forward} forward and stage {backward} backward"


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
        splits: names of the layers that open stages 1, 2, ...; one less than stages, in the graph's order.
        times: of the layers, where they are there already.

    Raises:
        ValueError: splits that are not one less than the stages, or out of order.
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
    total, tick = schedule_s(forward, backward, receive, settings, constants.micro_batch_s)
    parameters = [
        sum(layer.num_trainable for layer in graph.layers[stage.first : stage.last]) for stage in stages
    ]
    update = update_s(parameters, settings, system, constants)
    images = settings.global_batch_size / (total + update)
    sample_bytes, limit = _host_limit(graph, settings, system)
    still = schedule_s(forward, backward, 0 * receive, settings, constants.micro_batch_s)[1]
    return Prediction(
        images_per_s=min(images, limit),
        stages=tuple(stages),
        tick_s=tick,
        transfer_s=tick - still,
        update_s=update,
        weight_update_s=total + update,
        latency_s=float(forward.sum() + receive.sum()) + constants.micro_batch_s,
        host_bytes_per_s=min(images, limit) * sample_bytes,
        host_limit_images_per_s=limit,
        bottleneck="host" if limit < images else _bottleneck(stages, settings),
    )
