"""Memory of stages and of whole programs; what it is made of stands in ``memory_model``."""

from dataclasses import replace
from typing import List, Sequence

import numpy as np

from ipucnn.hardware import IPU
from ipucnn.planning.constants import DEFAULT_CONSTANTS, CostConstants
from ipucnn.planning.cost.memory import MemoryModel, segments_on_one_ipu
from ipucnn.planning.cost.schedule import stage_starts
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.settings import PlanSettings
from ipucnn.planning.verdict import CATEGORIES, FITS_BELOW, FITS_NOT_ABOVE, StageMemory

__all__ = [
    "CATEGORIES",
    "FITS_BELOW",
    "FITS_NOT_ABOVE",
    "StageMemory",
    "memory_table",
    "program_memory",
    "stage_memory",
]


def stage_memory(
    graph: LayerGraph,
    first: int,
    last: int,
    stage: int,
    settings: PlanSettings,
    ipu: IPU,
    constants: CostConstants = DEFAULT_CONSTANTS,
) -> StageMemory:
    """The memory of layers ``first .. last - 1`` as stage ``stage`` of ``settings.num_stages``.

    Of segments that share an IPU it is one segment's part, with its own weights and checkpoint.
    """
    starts = sorted({0, first, last} - {len(graph.layers)})
    model = MemoryModel(graph, settings, ipu, starts, constants)
    a = starts.index(first)
    return model.entry(a, a + 1, settings.num_stages, stage)


def memory_table(
    graph: LayerGraph,
    item_starts: Sequence[int],
    num_stages: int,
    stage: int,
    settings: PlanSettings,
    ipu: IPU,
    constants: CostConstants = DEFAULT_CONSTANTS,
) -> np.ndarray:
    """(n, n + 1): total bytes of items a .. b - 1 as stage ``stage`` of ``num_stages``; inf where b <= a."""
    return MemoryModel(graph, settings, ipu, item_starts, constants).total(num_stages, stage)


def program_memory(
    graph: LayerGraph,
    splits: Sequence[str],
    settings: PlanSettings,
    ipu: IPU,
    constants: CostConstants = DEFAULT_CONSTANTS,
) -> List[StageMemory]:
    """The memory of each IPU of a replica.

    Stages that share an IPU add up, but only one of them is at work at a time, and they share code.
    """
    starts = stage_starts(graph, splits)
    model = MemoryModel(graph, settings, ipu, starts, constants)
    stages = [model.entry(s, s + 1, settings.num_stages, s) for s in range(len(starts))]
    ipus = []
    for number in range(settings.num_ipus_per_replica):
        own = [s for s, place in enumerate(settings.mapping) if place == number]
        busiest = max(own, key=lambda s: stages[s].live_activations_bytes + stages[s].temporaries_bytes)
        sums = {
            name: sum(getattr(stages[s], name) for s in own)
            for name in ("weights_bytes", "accumulators_bytes", "optimizer_state_bytes", "stash_bytes")
        }
        if segments_on_one_ipu(settings) and not (settings.training and settings.recomputation):
            # Without checkpoints everything that is kept stays, once.
            sums["stash_bytes"] = float(model.tables(len(starts), 0)["stash"][0, len(starts)])
        code = model.joint_code_bytes([(s, s + 1) for s in own])
        ipus.append(replace(stages[busiest], code_bytes=code, **sums))
    return ipus
