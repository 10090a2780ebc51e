"""What each of the optimisations of Graphcore's public U-Net does to memory and throughput, by the planner's model.

The README of that application names eleven of them.  Each one is an option here, or a part of the program;
what is predicted is the program with this one alone the other way round.  What the model has no terms for is
said to be "not modelled", with the reason: nothing is guessed.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import System
from ipucnn.planning.cost.layer_times import stage_starts
from ipucnn.planning.cost.memory import FITS_BELOW, program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.search.planner import PROPORTIONS
from ipucnn.planning.settings import PlanSettings, largest, percentages, smallest, uniform

__all__ = ["NOT_MODELLED", "Optimisation", "Outcome", "crops_moved", "dropout_mask_bytes", "optimisations"]

NOT_MODELLED = "not modelled"
_CROP = "_crop"


@dataclass(frozen=True)
class Outcome:
    """What is predicted for a program; nothing in it was measured.

    Attributes:
        predicted_fill: share of its memory that the fullest IPU takes.
        predicted_images_per_s: of all replicas; None where the model knows of memory alone.
        verdict: "fits", "uncertain" or "does not fit".
    """

    predicted_fill: float
    predicted_images_per_s: Optional[float]
    verdict: str


@dataclass(frozen=True)
class Optimisation:
    """One optimisation: what the program does, what it could do instead, and what that would bring.

    Attributes:
        number: in the public README.
        option: the flag as ``plan-splits`` takes it, or what decides it.
        here, instead: the setting of the program, and the other one.
        outcome: with ``instead``; None where it is not modelled.
        note: why not, or what is left out.
    """

    number: int
    name: str
    option: str
    here: str
    instead: str
    outcome: Optional[Outcome]
    note: str = ""


def optimisations(
    graph: LayerGraph,
    splits: Sequence[str],
    settings: PlanSettings,
    system: System,
    *,
    loss_scaling: float = 0.0,
    exchange_target: Optional[str] = None,
) -> Tuple[Outcome, List[Optimisation]]:
    """The program's own prediction, and all eleven optimisations.

    Args:
        splits: legal ones, each of their stages on an IPU of its own.
        loss_scaling: 0 is none.
        exchange_target: of Poplar's internal exchange; None: its own default, cycles.

    Raises:
        ConfigurationError: no pipeline, stages that share an IPU, or no training.
    """
    if (
        settings.num_stages < 2
        or settings.num_ipus_per_replica != settings.num_stages
        or not settings.training
    ):
        raise ConfigurationError(
            "--optimisations compares settings of a training pipeline with a stage on each IPU",
            "--stages 4 --schedule Interleaved --training",
        )

    def judge(**changes: Any) -> Outcome:
        return _outcome(graph, splits, replace(settings, **changes), system)

    base = judge()
    return base, [
        _pipelining(graph, settings, system),
        _switch(
            2, "reduced precision", "--precision", settings.precision, "32.32", "16.16", judge, "precision"
        ),
        _switch(
            2, "16-bit partials", "--half-partials", *_on_off(settings.half_partials), judge, "half_partials"
        ),
        _loss_scaling(loss_scaling, base),
        _switch(
            4,
            "recomputation",
            "--recomputation on|off",
            *_on_off(settings.recomputation),
            judge,
            "recomputation",
        ),
        _one_proportion(graph, splits, settings, system),
        _switch(
            6,
            "schedule",
            "--pipeline-schedule",
            settings.schedule,
            "Interleaved",
            "Grouped",
            judge,
            "schedule",
        ),
        _exchange(exchange_target),
        _dropout(graph, splits, settings, system),
        _own_proportions(graph, splits, settings, system),
        _switch(
            10,
            "offloaded optimizer state",
            "--optimizer-state-offloading",
            *_on_off(settings.optimizer_state_offloading),
            judge,
            "optimizer_state_offloading",
        ),
        _crops(graph, splits, settings, system),
    ]


def _outcome(
    graph: LayerGraph,
    splits: Sequence[str],
    settings: PlanSettings,
    system: System,
    more_bytes: Sequence[float] = (),
) -> Outcome:
    """What is predicted for a program.

    Args:
        more_bytes: on each IPU beyond what the model has.
    """
    memory = program_memory(graph, splits, settings, system.ipu)
    prediction = predict(graph, splits, settings, system)
    if more_bytes:
        memory = [replace(one, stash_bytes=one.stash_bytes + more) for one, more in zip(memory, more_bytes)]
    fullest = max(memory, key=lambda one: one.fill)
    return Outcome(fullest.fill, prediction.images_per_s, fullest.verdict)


def _on_off(on: bool) -> Tuple[str, bool, bool]:
    """The words of a switch, and its two values."""
    return "on" if on else "off", True, False


def _switch(
    number: int, name: str, option: str, here: str, one: Any, other: Any, judge: Any, field: str
) -> Optimisation:
    """A setting with two values, of which the program has one."""
    words = {True: "on", False: "off"}
    first, second = (
        words.get(value, str(value)) if isinstance(value, bool) else value for value in (one, other)
    )
    instead = other if here == first else one
    shown = second if here == first else first
    return Optimisation(number, name, option, here, shown, judge(**{field: instead}))


def _pipelining(graph: LayerGraph, settings: PlanSettings, system: System) -> Optimisation:
    """The same IPUs with a whole network on each, of stages with proportions of their own the largest for all."""
    count = settings.num_stages
    alone = settings.restaged(
        1,
        available_memory_proportion=largest(settings.available_memory_proportion),
        num_replicas=settings.num_replicas * count,
        gradient_accumulation_count=math.ceil(settings.gradient_accumulation_count / count),
        recomputation=False,
    )
    outcome = _outcome(graph, (), alone, system)
    accumulated = f"{settings.gradient_accumulation_count} to {alone.gradient_accumulation_count}"
    note = f"without it recomputation is off, too, and micro-batches are accumulated {accumulated}"
    instead = f"1 stage, {count} replicas"
    return Optimisation(1, "pipelining", "--pipeline-splits", f"{count} stages", instead, outcome, note)


def _loss_scaling(scale: float, base: Outcome) -> Optimisation:
    here, instead = (f"{scale:g}", "none") if scale else ("none", "128")
    note = "a factor on the loss and its inverse on the gradients: numbers change, not what is computed"
    return Optimisation(3, "loss scaling", "--loss-scaling", here, instead, base, note)


def _exchange(target: Optional[str]) -> Optimisation:
    here = target or "cycles"
    return Optimisation(
        7,
        "internal exchange",
        "--internal-exchange-optimization-target",
        here,
        "memory" if here == "cycles" else "cycles",
        None,
        "the model has one figure for exchange code and time",
    )


def _percent(settings: PlanSettings) -> str:
    return " ".join(f"{value:g}" for value in percentages(settings.available_memory_proportion)) + "%"


def _one_proportion(
    graph: LayerGraph, splits: Sequence[str], settings: PlanSettings, system: System
) -> Optimisation:
    """Poplar's default for all stages; from that, the smallest that is tried."""
    (least,) = smallest(settings.available_memory_proportion)
    share = PROPORTIONS[0] if least.limited(PROPORTIONS[0]) != uniform(PROPORTIONS[0])[0] else PROPORTIONS[-1]
    instead = replace(settings, available_memory_proportion=uniform(share))
    outcome = _outcome(graph, splits, instead, system)
    name, option = "convolution options", "--available-memory-proportion"
    return Optimisation(5, name, option, _percent(settings), _percent(instead), outcome)


def _own_proportions(
    graph: LayerGraph, splits: Sequence[str], settings: PlanSettings, system: System
) -> Optimisation:
    """Each stage the largest proportion with which its IPU surely fits; from those, the largest for all."""
    name, option = "options of each stage", "--available-memory-proportion, one per stage"
    if settings.has_own_proportions:
        chosen = largest(settings.available_memory_proportion)
    else:
        fills = [
            [
                one.fill
                for one in program_memory(
                    graph, splits, replace(settings, available_memory_proportion=uniform(share)), system.ipu
                )
            ]
            for share in PROPORTIONS
        ]
        chosen = tuple(
            uniform(
                next(
                    (share for share, row in zip(PROPORTIONS, fills) if row[stage] < FITS_BELOW),
                    PROPORTIONS[-1],
                )
            )[0]
            for stage in range(settings.num_stages)
        )
    instead = replace(settings, available_memory_proportion=chosen)
    outcome = _outcome(graph, splits, instead, system)
    note = ""
    if instead == settings:
        tried = ", ".join(f"{100 * share:g}" for share in PROPORTIONS)
        note = f"of {tried}% no stage has room for more"
    return Optimisation(9, name, option, _percent(settings), _percent(instead), outcome, note)


def dropout_mask_bytes(graph: LayerGraph, splits: Sequence[str], settings: PlanSettings) -> List[float]:
    """Per stage, what the masks of stock dropout take: a byte an element of each micro-batch, at work or in flight."""
    bounds = [*stage_starts(graph, splits), len(graph.layers)]
    found = []
    for stage in range(settings.num_stages):
        layers = graph.layers[bounds[stage] : bounds[stage + 1]]
        elements = sum(layer.output_elements for layer in layers if _is_dropout(layer))
        depth = settings.stash_multiplier * (settings.num_stages - 1 - stage)
        found.append(float(elements * settings.micro_batch_size * (depth + 1)))
    return found


def _is_dropout(layer: Layer) -> bool:
    return layer.op_class == "elementwise" and len(layer.inputs) == 1 and "dropout" in layer.name


def _dropout(
    graph: LayerGraph, splits: Sequence[str], settings: PlanSettings, system: System
) -> Optimisation:
    """The masks beside everything else; their time is not modelled."""
    masks = dropout_mask_bytes(graph, splits, settings)
    outcome = _outcome(graph, splits, settings, system, masks)
    stage = int(np.argmax(masks))
    note = f"masks of {masks[stage] / 2**20:.1f} MiB on IPU {stage}; their time is not modelled"
    outcome = replace(outcome, predicted_images_per_s=None)
    return Optimisation(8, "IPU dropout", "always on IPUs", "seed kept", "mask kept", outcome, note)


def crops_moved(graph: LayerGraph, splits: Sequence[str], early: bool) -> Tuple[LayerGraph, Tuple[str, ...]]:
    """The network with each crop right after the layer that it crops (early), or right before its reader.

    Returns:
        It and the splits, each opening its stage with the same layer apart from crops: a crop before its
        reader goes to the reader's stage.
    """
    crops = {layer.name: layer for layer in graph.layers if layer.name.endswith(_CROP)}
    readers = {name: layer.name for layer in graph.layers for name in layer.inputs if name in crops}
    anchors = {(crop.inputs[0] if early else readers[name]): crop for name, crop in crops.items()}
    layers: List[Layer] = []
    for layer in graph.layers:
        if layer.name in crops:
            continue
        crop = anchors.get(layer.name)
        layers += [layer] if crop is None else [layer, crop] if early else [crop, layer]
    moved = replace(graph, layers=tuple(layers))
    names = [layer.name for layer in graph.layers]
    opened = []
    for split in splits:
        first = next(name for name in names[graph.index(split) :] if name not in crops)
        place = moved.index(first)
        before = moved.layers[place - 1]
        opened.append(before.name if not early and before.name in crops else first)
    return moved, tuple(opened)


def _crops(graph: LayerGraph, splits: Sequence[str], settings: PlanSettings, system: System) -> Optimisation:
    name, option = "crops before they are sent", "order of the network's layers"
    early, late = (crops_moved(graph, splits, first)[0] for first in (True, False))
    if early.layers == late.layers:
        return Optimisation(11, name, option, "no crops", "no crops", None, "the network has none")
    here_early = graph.layers == early.layers
    moved, opened = crops_moved(graph, splits, not here_early)
    outcome = _outcome(moved, opened, settings, system)
    words = ("where they begin", "where they end")
    here, instead = words if here_early else words[::-1]
    note = "crops are copies here; the stock crop is in place, and keeps all of the skip alive, too"
    return Optimisation(11, name, option, here, instead, outcome, note)
