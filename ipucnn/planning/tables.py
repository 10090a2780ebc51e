"""The planner's tables from the cost and memory model."""

from typing import Any, Dict, Tuple

import numpy as np

from ipucnn.hardware import System
from ipucnn.planning.constants import DEFAULT_CONSTANTS, CostConstants
from ipucnn.planning.cost.layer_times import layer_times, transfers_s
from ipucnn.planning.cost.memory import MemoryModel, segments_on_one_ipu
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.search.tables import StageTables, item_starts
from ipucnn.planning.settings import PlanSettings, StageProportions

__all__ = ["stage_tables"]


def stage_tables(
    graph: LayerGraph,
    settings: PlanSettings,
    system: System,
    constants: CostConstants = DEFAULT_CONSTANTS,
    max_fill: float = 1.0,
) -> StageTables:
    """What the planner needs to know about a graph under some settings.

    Args:
        settings: the planner may ask for other numbers of stages than theirs; availableMemoryProportion is then as
            ``PlanSettings.proportions_of`` says.  Sequential stages without a device mapping, or with all on one IPU,
            are recomputation segments of that IPU; otherwise each stage has its own.
        max_fill: share of an IPU's memory that a plan may take; ``verdict.FITS_BELOW`` for plans that surely fit.
    """
    starts = item_starts(graph)

    def seconds(stage: int, num_stages: int) -> Tuple[np.ndarray, np.ndarray]:
        own = settings.proportions_of(stage, num_stages)
        times = layer_times(graph, settings, system.ipu, constants, own)
        return np.add.reduceat(times.forward_s, starts), np.add.reduceat(times.backward_s, starts)

    # No pipeline has 0 stages: what holds for every number of them but that of the settings.
    forward_s, backward_s = seconds(0, 0)
    count = settings.num_stages if settings.has_own_proportions else 0
    model = MemoryModel(graph, settings, system.ipu, starts, constants)
    n = len(starts)
    one_ipu = segments_on_one_ipu(settings)
    cut_s = np.zeros(n + 1)
    if not one_ipu:
        cut_s[1:n] = transfers_s(graph, starts[1:], settings, system.ipu)
    common: Dict[str, Any] = dict(
        forward_s=forward_s,
        backward_s=backward_s,
        stage_s=tuple(seconds(stage, count) for stage in range(count)),
        cut_s=cut_s,
        recompute=settings.recomputation and settings.training,
        training=settings.training,
    )
    capacity = max_fill * system.ipu.sram_bytes
    if one_ipu:
        fixed, checkpoints = model.one_ipu()
        return StageTables(
            capacity_bytes=max(0.0, capacity - fixed),
            memory_bytes=model.segment,
            checkpoint_bytes=checkpoints,
            **common,
        )
    known: Dict[Tuple[int, bool, StageProportions], np.ndarray] = {}

    def memory(num_stages: int, stage: int) -> np.ndarray:
        # A stage's memory depends on how many follow it, on whether any does, and on its proportions.
        own = settings.proportions_of(stage, num_stages)
        key = (num_stages - 1 - stage, stage == num_stages - 1, own)
        if key not in known:
            known[key] = model.total(num_stages, stage)
        return known[key]

    return StageTables(capacity_bytes=capacity, memory_bytes=memory, **common)
