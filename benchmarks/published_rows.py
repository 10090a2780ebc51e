"""Turns rows of published IPU results into programs of this package: network, splits, settings, system.

Rows are those of ``results/published.csv`` (throughputs) and ``results/published_fits.csv`` (what fits).
"""

from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

from ipucnn.hardware import System, get_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.layer_times import LayerTimes, program_times, stage_starts
from ipucnn.planning.cost.products import CostConstants
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.graphs.extract import layer_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.program import PlannedProgram, Proportions, StageProportions, uniform
from ipucnn.training.program import stage_proportions


@dataclass(frozen=True)
class Program:
    """A row as a program of this package."""

    label: str
    graph: LayerGraph
    splits: Tuple[str, ...]
    settings: PlannedProgram
    system: System

    def times(self, constants: CostConstants) -> LayerTimes:
        """Returns the times of the layers, each under its own stage's availableMemoryProportion."""
        starts = stage_starts(self.graph, self.splits)
        return program_times(self.graph, starts, self.settings, self.system.ipu, constants)

    def images_per_s(self, constants: CostConstants, times: Optional[LayerTimes] = None) -> float:
        """Predicts the throughput; passing ``times`` reuses the tile plans in them."""
        times = self.times(constants) if times is None else times.with_constants(constants)
        prediction = predict(self.graph, self.splits, self.settings, self.system, constants, times)
        return prediction.images_per_s


def program_of(row: Dict[str, str]) -> Program:
    """Turns a row of published throughputs or fits into a program; what a row does not say has the default."""
    record, size = get_model(row["network"]), int(row["image_size"])
    shape = (size, size, record.input_shape[2])
    classes = int(row.get("classes") or record.num_classes)
    graph = layer_graph(record, BuildOptions(shape, classes, norm=row.get("norm") or None))
    splits = tuple(row["splits"].split())
    num_stages = len(splits) + 1
    settings: Dict[str, Any] = {
        name: int(row[column])
        for name, column in {
            "micro_batch_size": "micro_batch",
            "gradient_accumulation_count": "gradient_accumulation",
            "num_replicas": "replicas",
            "dbn_replica_group_size": "dbn_replica_group_size",
            "optimizer_slots": "optimizer_slots",
        }.items()
        if row.get(column)
    }
    switches = ("recomputation", "half_partials", "optimizer_state_offloading", "eight_bit_transfer")
    settings.update({name: row[name] == "on" for name in switches if name in row})
    if row["available_memory_proportion"]:
        shares = [float(share) for share in row["available_memory_proportion"].split()]
        settings["available_memory_proportion"] = by_stage(shares, num_stages)
    program = PlannedProgram(
        num_stages=num_stages,
        schedule=row["schedule"] or "Grouped",
        precision=row["precision"],
        training=row["task"] == "train",
        **settings,
    )
    label = (
        f"{row['network']} {row['task']} {row['system']} mb {row['micro_batch']} {row['precision']} {num_stages} "
        f"{program.schedule}"
    )
    return Program(label, graph, splits, program, get_system(row["system"]))


def by_stage(shares: Sequence[float], num_stages: int) -> Proportions:
    """Reads availableMemoryProportion: one for all stages, one each, or one each for forward and backward pass."""
    if len(shares) == 1:
        return uniform(shares[0])
    pairs = stage_proportions([100 * share for share in shares], num_stages)
    return tuple(StageProportions(ahead, ahead, back, back) for ahead, back in pairs)
