"""From splits and settings to the whole ``PipelinePlan``: stages, memory, profile, comparison."""

from dataclasses import replace
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

import ipucnn
from ipucnn.planning.constants import DEFAULT_CONSTANTS
from ipucnn.planning.cost.layer_times import cut_bytes, program_times
from ipucnn.planning.cost.memory import MemoryModel, segments_on_one_ipu
from ipucnn.planning.cost.schedule import stage_starts, update_s
from ipucnn.planning.pipeline_plan import (
    ComparisonRow,
    IpuPlan,
    PipelinePlan,
    ProfileLayer,
    StagePlan,
    SystemFacts,
)
from ipucnn.planning.search.planner import LIMITS, Candidate, Planner
from ipucnn.planning.settings import PlanSettings
from ipucnn.planning.verdict import CATEGORIES
from ipucnn.training.batching import nearest_multiples, next_power_of_two, overlap_length

__all__ = ["assemble", "compare"]


def assemble(
    planner: Planner, candidate: Candidate, *, planned: bool, build: Mapping[str, Any], **details: Any
) -> PipelinePlan:
    """Everything about a candidate.

    Args:
        planned: whether the planner chose its splits.
        build: options that decide the network's layers, for the record.
        details: further fields of the plan: comparison, pareto, no_fit, assumed.
    """
    graph, system, settings = planner.graph, planner.system, candidate.settings
    prediction, solution = candidate.prediction, candidate.solution
    fixed = DEFAULT_CONSTANTS.micro_batch_s
    bound = solution.lower_bound_s + fixed
    tick = prediction.tick_s
    if planned and solution.optimal:
        bound = tick  # the two are sums of the same numbers in another order
    # Splits that were given may be a best one, too.
    optimal = solution.optimal and tick <= bound * (1 + 1e-9)
    single = update_s(_stage_parameters(planner, candidate), replace(settings, num_replicas=1), system)
    steady = settings.gradient_accumulation_count * tick
    return PipelinePlan(
        model=graph.model,
        input_shape=tuple(graph.input_shape),
        num_classes=graph.num_classes,
        build=dict(build),
        settings=settings,
        system=SystemFacts(
            system.name, system.title, system.ipu.title, system.num_ipus, float(system.ipu.sram_bytes)
        ),
        splits=candidate.splits,
        planned=planned,
        occupied_ipus=settings.num_replicas * next_power_of_two(settings.num_ipus_per_replica),
        memory_limit=candidate.memory_limit,
        stages=_stages(planner, candidate),
        ipus=_ipus(candidate),
        predicted_tick_s=tick,
        predicted_lower_bound_s=min(bound, tick),
        gap=0.0 if optimal else max(0.0, tick / bound - 1),
        optimal=optimal,
        predicted_images_per_s=prediction.images_per_s,
        predicted_transfer_s=prediction.transfer_s,
        predicted_fixed_s=fixed,
        predicted_fill_drain_s=max(0.0, prediction.weight_update_s - prediction.update_s - steady),
        predicted_update_s=prediction.update_s,
        predicted_all_reduce_s=prediction.update_s - single,
        predicted_weight_update_s=prediction.weight_update_s,
        predicted_latency_s=prediction.latency_s,
        predicted_host_bytes_per_s=prediction.host_bytes_per_s,
        predicted_host_limit_images_per_s=prediction.host_limit_images_per_s,
        bottleneck=prediction.bottleneck,
        profile=_profile(planner, candidate),
        ipucnn_version=ipucnn.__version__,
        **details,
    )


def _stage_parameters(planner: Planner, candidate: Candidate) -> List[float]:
    layers = planner.graph.layers
    return [
        float(sum(layer.num_trainable for layer in layers[stage.first : stage.last]))
        for stage in candidate.prediction.stages
    ]


def _stages(planner: Planner, candidate: Candidate) -> Tuple[StagePlan, ...]:
    graph, settings = planner.graph, candidate.settings
    layers = graph.layers
    starts = stage_starts(graph, candidate.splits)
    model = MemoryModel(graph, settings, planner.system.ipu, starts)
    received = [0.0, *cut_bytes(graph, starts[1:], settings)]
    found = []
    for number, stage in enumerate(candidate.prediction.stages):
        own = layers[stage.first : stage.last]
        crossing = graph.crossing(stage.first) if number else ()
        # What the layer behind the cut reads is the stage's input; all else that crosses is on its way to others.
        skips = tuple(name for name in crossing if name not in own[0].inputs)
        memory = model.entry(number, number + 1, settings.num_stages, number)
        found.append(
            StagePlan(
                stage=number,
                ipu=stage.ipu,
                first_layer=own[0].name,
                last_layer=own[-1].name,
                num_layers=len(own),
                macs=sum(layer.macs for layer in own),
                num_parameters=sum(layer.num_parameters for layer in own),
                predicted_forward_s=stage.forward_s,
                predicted_backward_s=stage.backward_s - stage.recompute_s,
                predicted_recompute_s=stage.recompute_s,
                predicted_receive_s=stage.receive_s,
                received_bytes=float(received[number]),
                skips=skips,
                predicted_memory_bytes=memory.categories(),
            )
        )
    return tuple(found)


def _ipus(candidate: Candidate) -> Tuple[IpuPlan, ...]:
    mapping = candidate.settings.mapping
    return tuple(
        IpuPlan(
            ipu=number,
            stages=tuple(stage for stage, ipu in enumerate(mapping) if ipu == number),
            predicted_memory_bytes={name: memory.categories()[name] for name in CATEGORIES},
            capacity_bytes=memory.capacity_bytes,
            predicted_fill=memory.fill,
            verdict=memory.verdict,
        )
        for number, memory in enumerate(candidate.ipus)
    )


def _profile(planner: Planner, candidate: Candidate) -> Tuple[ProfileLayer, ...]:
    graph = planner.graph
    starts = stage_starts(graph, candidate.splits)
    times = program_times(graph, starts, candidate.settings, planner.system.ipu)
    cumulative: Any = np.cumsum(times.forward_s + times.backward_s)
    stage_of: Any = np.searchsorted(starts, np.arange(len(graph.layers)), side="right") - 1
    return tuple(
        ProfileLayer(
            name=layer.name,
            op_class=layer.op_class,
            stage=int(stage_of[i]),
            predicted_forward_s=float(times.forward_s[i]),
            predicted_backward_s=float(times.backward_s[i]),
            predicted_cumulative_s=float(cumulative[i]),
        )
        for i, layer in enumerate(graph.layers)
    )


def compare(
    planner: Planner, candidate: Candidate, others: Dict[str, Sequence[str]]
) -> Tuple[ComparisonRow, ...]:
    """Other splits under a candidate's settings, each against the best splits that take no more memory.

    The planner's limit holds for the best ones, unless the others take more: then those may, too.  So they are
    never slower, whatever the model says of memory.

    Args:
        others: name -> legal splits, of any number of stages.
    """
    rows = []
    for name, splits in others.items():
        settings = _restaged(candidate.settings, len(splits) + 1)
        limit = candidate.memory_limit if candidate.memory_limit in LIMITS else min(LIMITS)
        judged = planner.judge(splits, settings, limit, quickly=True)
        fixed = DEFAULT_CONSTANTS.micro_batch_s
        best = judged.solution.objective_s + fixed
        # Where stages share an IPU the planner knows a bound only: see ``Planner.tables``.
        shared = not segments_on_one_ipu(settings) and settings.num_ipus_per_replica < settings.num_stages
        tick = judged.prediction.tick_s if shared else planner.tick_s(splits, settings) + fixed
        rows.append(
            ComparisonRow(
                name=name,
                splits=tuple(splits),
                predicted_tick_s=tick,
                predicted_images_per_s=judged.prediction.images_per_s,
                predicted_fill=judged.predicted_fill,
                verdict=judged.verdict,
                predicted_best_tick_s=best,
                ratio=tick / best,
            )
        )
    return tuple(rows)


def _restaged(settings: PlanSettings, num_stages: int) -> PlanSettings:
    """The same settings for another number of stages, with the nearest legal accumulation count."""
    if num_stages == settings.num_stages:
        return settings
    base = overlap_length(settings.schedule, num_stages)
    count = nearest_multiples(settings.gradient_accumulation_count, base)[-1]
    mapping = None
    if settings.schedule == "Sequential" and not segments_on_one_ipu(settings):
        mapping = tuple(range(num_stages))
    return settings.restaged(
        num_stages,
        gradient_accumulation_count=count,
        device_mapping=mapping,
        recomputation=settings.recomputation and num_stages > 1,
    )
