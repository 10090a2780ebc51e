"""The planner's tables from the cost and memory model."""

from typing import Dict, Tuple

import numpy as np

from ipucnn.hardware import System
from ipucnn.planning.constants import DEFAULT_CONSTANTS, CostConstants
from ipucnn.planning.cost import layer_times, transfers_s
from ipucnn.planning.graph import LayerGraph
from ipucnn.planning.memory_model import MemoryModel, segments_on_one_ipu
from ipucnn.planning.settings import PlanSettings
from ipucnn.planning.stages import StageTables, item_starts

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
        settings: its number of stages isn't used: the planner asks for several.  Sequential stages without a device
            mapping, or with all on one IPU, are recomputation segments of that IPU; otherwise each stage has its own.
        max_fill: share of an IPU's memory that a plan may take; ``verdict.FITS_BELOW`` for plans that surely fit.
    """
    starts = item_starts(graph)
    times = layer_times(graph, settings, system.ipu, constants)
    model = MemoryModel(graph, settings, system.ipu, starts, constants)
    n = len(starts)
    one_ipu = segments_on_one_ipu(settings)
    cut_s = np.zeros(n + 1)
    if not one_ipu:
        cut_s[1:n] = transfers_s(graph, starts[1:], settings, system.ipu)
    common = dict(
        forward_s=np.add.reduceat(times.forward_s, starts),
        backward_s=np.add.reduceat(times.backward_s, starts),
        cut_s=cut_s,
        recompute=settings.recomputation and settings.training,
        training=settings.training,
    )
    capacity = max_fill * system.ipu.sram_bytes
    if one_ipu:
        fixed, segments, checkpoints = model.one_ipu()
        return StageTables(
            capacity_bytes=max(0.0, capacity - fixed),
            memory_bytes=lambda num_stages, stage: segments,
            checkpoint_bytes=checkpoints,
            **common,
        )
    known: Dict[Tuple[int, bool], np.ndarray] = {}

    def memory(num_stages: int, stage: int) -> np.ndarray:
        # A stage's memory depends on how many follow it, and on whether any does.
        key = (num_stages - 1 - stage, stage == num_stages - 1)
        if key not in known:
            known[key] = model.total(num_stages, stage)
        return known[key]

    return StageTables(capacity_bytes=capacity, memory_bytes=memory, **common)
