"""Predicts the throughput of a program.

It consists of ticks, fill and drain, the weight update and the host.

``planning/schedules.py`` defines the ticks.  A tick in which the pipeline fills or drains costs what the stages at work
in it cost.
"""

from dataclasses import dataclass, replace
from typing import Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.hardware import IPU, System
from ipucnn.planning.cost.layer_times import LayerTimes, program_times, stage_starts, transfers_s
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS, CostConstants
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.program import PlannedProgram
from ipucnn.planning.schedules import Ticks


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
        bottleneck: "stage 2 forward and stage 3 backward", "transfer before stage 1", "host", "update of the weights"
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
    settings: PlannedProgram,
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
    settings: PlannedProgram,
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
    graph: LayerGraph, starts: Sequence[int], times: LayerTimes, settings: PlannedProgram, ipu: IPU
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


def host_limit(graph: LayerGraph, settings: PlannedProgram, system: System) -> Tuple[float, float]:
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
    forward: np.ndarray,
    backward: np.ndarray,
    receive: np.ndarray,
    settings: PlannedProgram,
    transfer_s: float,
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
    settings: PlannedProgram,
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
    bottleneck = bottleneck_of(forward, backward, receive, settings, tick - still)
    if limit < images:
        bottleneck = "host"
    elif update > total:
        bottleneck = "update of the weights"
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
        bottleneck=bottleneck,
    )
