"""Turns rows of published IPU results into programs of this package: network, splits, settings, system.

Rows are those of ``results/published.csv`` and of a ``published_fits_and_splits.json``.  This module alone decides what
the model needs and a row doesn't say (optimizer slots, split names of another framework).
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipucnn.errors import UserError
from ipucnn.hardware import System, get_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.layer_times import LayerTimes, program_times, stage_starts
from ipucnn.planning.cost.products import CostConstants
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.graphs.extract import layer_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.settings import PlanSettings, Proportions, StageProportions, uniform
from ipucnn.training.program import stage_proportions

# Published name -> registered name, after `_` and case are folded; the group size distinguishes the G16 variants.
_NAMES = {
    "resnet50-v1.5": "resnet50",
    "resnet-50": "resnet50",
    "resnet50 (validation graph of training app)": "resnet50",
    "resnet-50 group norm": "resnet50",
    "efficientnet-4 g1 group norm 16.32": "efficientnet-b4",
    "resnext-101": "resnext101_32x4d",
    "resnext101-32x4d": "resnext101_32x4d",
    "unet-medical-572": "unet",
    "unet-medical": "unet",
    "inception-v3": "inceptionv3",
    "mobilenet-v1": "mobilenet",
    "mobilenet-v2": "mobilenetv2",
    "mobilenet-v3-small": "mobilenetv3-small",
    "mobilenet-v3-large": "mobilenetv3-large",
    "efficientnet-0": "efficientnet-b0",
    "efficientnet-1": "efficientnet-b1",
    "efficientnet-4": "efficientnet-b4",
}

# Segments of the public one-IPU ResNet-50 configurations, and the checkpoints of the PyTorch one with 35 of them:
# the adds 0-3, 5-7, 9, 11, 12, and everything in the last stage, which is then one segment without recomputation.
SEVEN_SEGMENTS = tuple(
    f"conv{n}_out" for n in ("2_block1", "2_block3", "3_block1", "3_block3", "4_block1", "4_block4")
)
_RESNET_BLOCKS = [
    f"conv{stage}_block{b}" for stage, n in ((2, 3), (3, 4), (4, 6), (5, 3)) for b in range(1, n + 1)
]
TEN_CHECKPOINTS = tuple(f"{_RESNET_BLOCKS[i]}_out" for i in (0, 1, 2, 3, 5, 6, 7, 9, 11, 12))

_EFFICIENTNET_REPEATS = {"0": (1, 2, 2, 3, 3, 4, 1), "1": (2, 3, 3, 4, 4, 5, 2), "4": (2, 4, 4, 6, 6, 8, 2)}
_TIMM_PARTS = {"conv_pw": "expand_conv", "conv_dw": "dwconv", "conv_pwl": "project_conv"}


class Skipped(Exception):
    """Raised for a row that can't be judged; the text says why."""


@dataclass(frozen=True)
class Program:
    """A row as a program of this package."""

    label: str
    graph: LayerGraph
    splits: Tuple[str, ...]
    settings: PlanSettings
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


def registered_name(row: Dict[str, Any]) -> str:
    """Returns the name of the row's network in the registry.

    Raises:
        Skipped: it is not registered.
    """
    if row["model"].startswith("each row"):
        raise Skipped("not one configuration")
    name = row["model"].lower().replace("_", "-")
    name = _NAMES.get(name, name)
    if row.get("group_dim") == 16:
        name += "-g16"
    try:
        return get_model(name).name
    except UserError:
        raise Skipped(f"network {row['model']} is not registered") from None


def _graph(name: str, row: Dict[str, Any]) -> LayerGraph:
    record = get_model(name)
    size = row.get("image_size") or record.input_shape[0]
    if record.family == "cifar_resnet" and size == 224:
        shape, classes = (224, 224, 3), 1000  # the public configuration trains it on ImageNet
    else:
        shape, classes = (size, size, record.input_shape[2]), record.num_classes
    grouped = str(row.get("norm", "")).startswith("group") or "group norm" in row["model"]
    norm = "group" if grouped and record.default_norm != "none" else None
    return layer_graph(record, BuildOptions(shape, classes, norm=norm))


def _efficientnet_block(variant: str, index: int) -> str:
    """Translates an MBConv block's running number to its name, such as block4a."""
    for group, count in enumerate(_EFFICIENTNET_REPEATS[variant], start=1):
        if index < count:
            return f"block{group}{'abcdefghijk'[index]}"
        index -= count
    raise Skipped(f"no block {index}")


def _first_of(graph: LayerGraph, prefix: str) -> str:
    for layer in graph.layers:
        if layer.name.startswith(prefix):
            return layer.name
    raise Skipped(f"no layer of {graph.model} starts with '{prefix}'")


def _split(graph: LayerGraph, name: str) -> str:
    """Returns the canonical name of the layer at which a published split name opens a stage.

    Raises:
        Skipped: the name is not understood.
    """
    known = {layer.name for layer in graph.layers}
    if name in known:
        return name
    variant = re.search(r"-b(\d)", graph.model)
    if "resne" in graph.model:
        match = re.fullmatch(r"stage(\d)/unit(\d+)/relu", name)
        if match:  # after the add of that unit, its relu opens the next stage
            return f"conv{int(match[1]) + 1}_block{match[2]}_out"
        match = re.fullmatch(r"layer(\d)/(\d+)", name)
        if match:  # torchvision counts blocks from 0
            return f"conv{int(match[1]) + 1}_block{int(match[2]) + 1}_1_conv"
    if variant:
        if name == "block0":
            return _first_of(graph, "block1a_")
        match = re.fullmatch(r"(block\d[a-z])(?:/b)?", name)
        if match:  # "block2a/b" lies inside the block, at its second convolution
            return f"{match[1]}_dwconv" if name.endswith("/b") else _first_of(graph, match[1] + "_")
        match = re.fullmatch(r"_blocks/(\d+)(/_project_conv)?", name)
        if match:
            block = _efficientnet_block(variant[1], int(match[1]))
            return _first_of(graph, block + ("_project_conv" if match[2] else "_"))
        match = re.fullmatch(r"blocks/(\d)/(\d)(?:/(\w+))?", name)
        if match:
            block = f"block{int(match[1]) + 1}{'abcdefghijk'[int(match[2])]}_"
            return _first_of(graph, block + _TIMM_PARTS.get(match[3] or "", ""))
    match = re.fullmatch(r"mb_block/(\d+)(?:/seq/0)?", name)
    if match:
        number = int(match[1])
        return _first_of(graph, "expanded_conv_" + (f"{number}_" if number else ""))
    raise Skipped(f"split name '{name}' is not understood")


def _optimizer_slots(name: Optional[str]) -> int:
    """Returns the state tensors per weight; public EfficientNets use RMSprop with momentum."""
    if name is None:
        return 1
    name = name.lower()
    return 2 if "rmsprop" in name or "adam" in name else 0 if name == "sgd" else 1


def throughput_program(row: Dict[str, str]) -> Program:
    """Turns a row of results/published.csv into a program.

    Raises:
        Skipped: the splits of the network are not known.
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
        return Program(label, graph, (), PlanSettings(**settings), get_system(row["ipu"]))
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
        raise Skipped(f"splits of {name} are not known")
    prefix = {"mk2": "", "bow": "bow-"}[row["ipu"]]
    small = {"mk2": "m2000", "bow": "bow-2000"}[row["ipu"]]
    system = get_system(small if num_ipus <= 4 else f"{prefix}pod{num_ipus}")
    return Program(label, graph, splits, PlanSettings(**settings), system)


def by_stage(shares: Sequence[float], num_stages: int) -> Proportions:
    """Reads availableMemoryProportion: one for all stages, one each, or one each for forward and backward pass."""
    if len(shares) == 1:
        return uniform(shares[0])
    pairs = stage_proportions([100 * share for share in shares], num_stages)
    return tuple(StageProportions(ahead, ahead, back, back) for ahead, back in pairs)


def memory_program(row: Dict[str, Any]) -> Program:
    """Turns a row of published fits into a program.

    Raises:
        Skipped: the network or a split name is unknown here.
    """
    name = registered_name(row)
    graph = _graph(name, row)
    training = row["task"] == "train"
    generation = row["ipu_generation"].split("/")[0]
    opens: List[str] = list(row.get("stage_opens_at") or [])
    if row.get("stages", row.get("n_ipus_per_replica", 1)) > 1 and not opens:
        raise Skipped("its splits are not published")
    splits = tuple(_split(graph, split) for split in opens)
    recompute = str(row.get("recompute", "not set"))
    checkpoints = row.get("n_recompute_checkpoints") or 0
    schedule = str(row.get("schedule", "Grouped")).split()[0]
    if recompute.startswith("7 segments"):
        splits, schedule, recompute = SEVEN_SEGMENTS, "Sequential", "on"
    # PopTorch recomputes inside the stages of a pipelined training by default, and that application passes its own flag
    # only for unpipelined runs; TF1's pipelines say what they do.
    explicit_off = recompute.startswith("off") and row.get("framework") != "PyTorch"
    on = recompute.startswith(("on", "manual")) or (len(splits) > 0 and not explicit_off)
    if len(splits) == 0 and checkpoints:
        splits, schedule = TEN_CHECKPOINTS, "Sequential"
    proportions = row.get("available_memory_proportion") or [0.6]
    precision = str(row.get("precision", "16.16")).split()[0]
    settings = PlanSettings(
        micro_batch_size=row["micro_batch"],
        gradient_accumulation_count=max(row.get("ga_seen") or [2 * len(splits) + 2]),
        num_stages=len(splits) + 1,
        schedule=schedule,
        precision={"fp16": "16.16"}.get(precision, precision),
        recomputation=training and on,
        available_memory_proportion=by_stage(proportions, len(splits) + 1),
        training=training,
        optimizer_slots=_optimizer_slots(row.get("optimiser")),
        optimizer_state_offloading=bool(row.get("optimiser_state_offload")),
        half_partials=bool(row.get("half_partials", True)),
    )
    system = get_system({"mk1": "mk1-16", "mk2": "pod16"}[generation])
    label = (
        f"{name} {row['task']} {generation} mb {row['micro_batch']} {precision} {len(splits) + 1} {schedule}"
    )
    return Program(label, graph, splits, settings, system)


def with_splits(program: Program, splits: Tuple[str, ...]) -> Program:
    """Returns the same program with other splits."""
    settings = dataclasses.replace(program.settings, num_stages=len(splits) + 1)
    return dataclasses.replace(program, splits=splits, settings=settings)
