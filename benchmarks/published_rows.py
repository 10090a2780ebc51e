"""Turns rows of published IPU results into programs of this package: network, splits, settings, system.

Rows are those of ``results/published.csv`` (throughputs) and ``results/published_fits.csv`` (what fits).  This module
alone decides what the model needs and a row of throughputs does not say.
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

# Segments of the public one-IPU ResNet-50 configurations, and the checkpoints of the PyTorch one with 35 of them:
# the adds 0-3, 5-7, 9, 11, 12, and everything in the last stage, which is then one segment without recomputation.
SEVEN_SEGMENTS = tuple(
    f"conv{n}_out" for n in ("2_block1", "2_block3", "3_block1", "3_block3", "4_block1", "4_block4")
)
_RESNET_BLOCKS = [
    f"conv{stage}_block{b}" for stage, n in ((2, 3), (3, 4), (4, 6), (5, 3)) for b in range(1, n + 1)
]
TEN_CHECKPOINTS = tuple(f"{_RESNET_BLOCKS[i]}_out" for i in (0, 1, 2, 3, 5, 6, 7, 9, 11, 12))


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


def _first_of(graph: LayerGraph, prefix: str) -> str:
    for layer in graph.layers:
        if layer.name.startswith(prefix):
            return layer.name
    raise ValueError(f"no layer of {graph.model} starts with '{prefix}'")


def throughput_program(row: Dict[str, str]) -> Program:
    """Turns a row of results/published.csv into a program.

    Raises:
        ValueError: the splits of the network are not known.
    """
    name, training = row["network"], row["task"] == "train"
    record, size = get_model(name), int(row["image_size"])
    graph = layer_graph(record, BuildOptions((size, size, record.input_shape[2]), record.num_classes))
    num_ipus = int(row["ipus"])
    settings: Dict[str, Any] = dict(
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_count=int(row["gradient_accumulation"]),
        num_replicas=int(row["replicas"]),
        num_stages=int(row["stages"]),
        precision=row["precision"],
        training=training,
        recomputation=training,
    )
    splits: Tuple[str, ...] = ()
    label = f"{name} {row['task']} {row['ipu']} x{num_ipus} mb {row['micro_batch']} {row['precision']}"
    if not training:
        return Program(label, graph, (), PlannedProgram(**settings), get_system(row["ipu"]))
    if name == "resnet50":
        manual = row["recomputation"] == "10 checkpoints"
        splits = TEN_CHECKPOINTS if manual else SEVEN_SEGMENTS
        settings.update(
            schedule="Sequential",
            num_stages=len(splits) + 1,
            available_memory_proportion=uniform(0.16 if manual else 0.145),
            dbn_replica_group_size=1 if manual else 2,
            eight_bit_transfer=True,
        )
    elif name == "efficientnet-b4-g16":
        splits = (_first_of(graph, "block4a_"),)
        settings.update(available_memory_proportion=uniform(0.4), optimizer_slots=2)
    elif name == "resnext101_32x4d":
        splits = ("conv4_block4_out",)
    elif name == "unet":
        splits = tuple(
            graph.layers[graph.index(last) + 1].name
            for last in (
                "encoder_block_1_maxpooling",
                "decoder_block_0_transpose",
                "decoder_block_2_transpose",
            )
        )
        settings.update(available_memory_proportion=by_stage((0.7, 0.3, 0.45, 0.7), 4))
        # Its pipeline keeps the SDK's default for the optimizer state: offloaded.
        settings.update(optimizer_state_offloading=True)
    else:
        raise ValueError(f"splits of {name} are not known")
    prefix = {"mk2": "", "bow": "bow-"}[row["ipu"]]
    small = {"mk2": "m2000", "bow": "bow-2000"}[row["ipu"]]
    system = get_system(small if num_ipus <= 4 else f"{prefix}pod{num_ipus}")
    return Program(label, graph, splits, PlannedProgram(**settings), system)


def by_stage(shares: Sequence[float], num_stages: int) -> Proportions:
    """Reads availableMemoryProportion: one for all stages, one each, or one each for forward and backward pass."""
    if len(shares) == 1:
        return uniform(shares[0])
    pairs = stage_proportions([100 * share for share in shares], num_stages)
    return tuple(StageProportions(ahead, ahead, back, back) for ahead, back in pairs)


def memory_program(row: Dict[str, str]) -> Program:
    """Turns a row of results/published_fits.csv into a program."""
    record, size = get_model(row["network"]), int(row["image_size"])
    shape = (size, size, record.input_shape[2])
    graph = layer_graph(record, BuildOptions(shape, int(row["classes"]), norm=row["norm"] or None))
    splits = tuple(row["splits"].split())
    shares = [float(share) for share in row["available_memory_proportion"].split()]
    settings = PlannedProgram(
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_count=int(row["gradient_accumulation"]),
        num_stages=len(splits) + 1,
        schedule=row["schedule"] or "Grouped",
        precision=row["precision"],
        recomputation=row["recomputation"] == "on",
        available_memory_proportion=by_stage(shares, len(splits) + 1),
        training=row["task"] == "train",
        optimizer_slots=int(row["optimizer_slots"]),
        optimizer_state_offloading=row["optimizer_state_offloading"] == "on",
        half_partials=row["half_partials"] == "on",
    )
    label = (
        f"{row['network']} {row['task']} {row['ipu']} mb {row['micro_batch']} {row['precision']} {len(splits) + 1} "
        f"{settings.schedule}"
    )
    return Program(label, graph, splits, settings, get_system({"mk1": "mk1-16", "mk2": "pod16"}[row["ipu"]]))
