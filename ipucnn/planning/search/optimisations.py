"""What each of the optimisations of Graphcore's public U-Net does to memory and throughput, by the planner's model.

The README of that application names eleven of them.  Each is an option here, or a part of the program.  What is
predicted is the program with one of them the other way round and everything else as it is.  Where the model has no
terms for one, it is said to be "not modelled", with the reason: nothing is guessed.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import System
from ipucnn.planning.cost.layer_times import stage_starts
from ipucnn.planning.cost.memory import FITS_BELOW, program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.search.planner import PROPORTIONS
from ipucnn.planning.settings import PlanSettings, largest, percentages, smallest, uniform

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
        exchange_target: of Poplar's internal exchange; without, its own default holds, which is cycles.

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
    program = _Program(graph, splits, settings, system)
    base = program.outcome()
    offloading = "--optimizer-state-offloading"
    return base, [
        program.pipelining(),
        program.switch(2, "reduced precision", "--precision", precision=("32.32", "16.16")),
        program.switch(2, "16-bit partials", "--half-partials", half_partials=(True, False)),
        _loss_scaling(loss_scaling, base),
        program.switch(4, "recomputation", "--recomputation on|off", recomputation=(True, False)),
        program.one_proportion(),
        program.switch(6, "schedule", "--pipeline-schedule", schedule=("Interleaved", "Grouped")),
        _exchange(exchange_target),
        program.dropout(),
        program.own_proportions(),
        program.switch(10, "offloaded optimizer state", offloading, optimizer_state_offloading=(True, False)),
        program.crops(),
    ]


@dataclass(frozen=True)
class _Program:
    """The program whose optimisations are looked at."""

    graph: LayerGraph
    splits: Sequence[str]
    settings: PlanSettings
    system: System

    def outcome(self, more_bytes: Sequence[float] = ()) -> Outcome:
        """What is predicted for it.

        Args:
            more_bytes: on each IPU, what it holds beyond what the model has.
        """
        memory = program_memory(self.graph, self.splits, self.settings, self.system.ipu)
        prediction = predict(self.graph, self.splits, self.settings, self.system)
        if more_bytes:
            memory = [
                replace(one, stash_bytes=one.stash_bytes + more) for one, more in zip(memory, more_bytes)
            ]
        fullest = max(memory, key=lambda one: one.fill)
        return Outcome(fullest.fill, prediction.images_per_s, fullest.verdict)

    def switch(self, number: int, name: str, option: str, **choice: Tuple[object, object]) -> Optimisation:
        """A setting with two values, of which the program has one.

        Args:
            choice: the field of the settings and its values; a program with neither is compared with the first.
        """
        ((field, values),) = choice.items()
        here = getattr(self.settings, field)
        instead = values[1] if here == values[0] else values[0]
        change: Dict[str, Any] = {field: instead}
        outcome = replace(self, settings=replace(self.settings, **change)).outcome()
        return Optimisation(number, name, option, _word(here), _word(instead), outcome)

    def pipelining(self) -> Optimisation:
        """The same IPUs with a whole network on each.

        Where stages have proportions of their own, the whole network has the largest of them.
        """
        settings, count = self.settings, self.settings.num_stages
        alone = settings.restaged(
            1,
            available_memory_proportion=largest(settings.available_memory_proportion),
            num_replicas=settings.num_replicas * count,
            gradient_accumulation_count=math.ceil(settings.gradient_accumulation_count / count),
            recomputation=False,
        )
        outcome = replace(self, splits=(), settings=alone).outcome()
        accumulated = f"{settings.gradient_accumulation_count} to {alone.gradient_accumulation_count}"
        note = f"without it recomputation is off, too, and micro-batches are accumulated {accumulated}"
        instead = f"1 stage, {count} replicas"
        return Optimisation(1, "pipelining", "--pipeline-splits", f"{count} stages", instead, outcome, note)

    def one_proportion(self) -> Optimisation:
        """Poplar's default for all stages; in a program that has it, the smallest that is tried."""
        (least,) = smallest(self.settings.available_memory_proportion)
        default = PROPORTIONS[0]
        share = default if least.limited(default) != uniform(default)[0] else PROPORTIONS[-1]
        instead = replace(self.settings, available_memory_proportion=uniform(share))
        outcome = replace(self, settings=instead).outcome()
        name, option = "convolution options", "--available-memory-proportion"
        return Optimisation(5, name, option, _percent(self.settings), _percent(instead), outcome)

    def own_proportions(self) -> Optimisation:
        """For each stage the largest proportion with which its IPU surely fits.

        In a program whose stages have proportions of their own, the largest of them for all.
        """
        settings = self.settings
        name, option = "options of each stage", "--available-memory-proportion, one per stage"
        if settings.has_own_proportions:
            chosen = largest(settings.available_memory_proportion)
        else:
            shares = [PROPORTIONS[-1]] * settings.num_stages
            # From the smallest to the largest, so that the largest that fits is what stays.
            for share in reversed(PROPORTIONS):
                own = replace(settings, available_memory_proportion=uniform(share))
                memory = program_memory(self.graph, self.splits, own, self.system.ipu)
                shares = [share if one.fill < FITS_BELOW else kept for one, kept in zip(memory, shares)]
            chosen = tuple(uniform(share)[0] for share in shares)
        instead = replace(settings, available_memory_proportion=chosen)
        outcome = replace(self, settings=instead).outcome()
        note = ""
        if instead == settings:
            tried = ", ".join(f"{100 * share:g}" for share in PROPORTIONS)
            note = f"of {tried}% no stage has room for more"
        return Optimisation(9, name, option, _percent(settings), _percent(instead), outcome, note)

    def dropout(self) -> Optimisation:
        """The masks beside everything else; their time is not modelled."""
        masks = dropout_mask_bytes(self.graph, self.splits, self.settings)
        outcome = replace(self.outcome(masks), predicted_images_per_s=None)
        stage = int(np.argmax(masks))
        note = f"masks of {masks[stage] / 2**20:.1f} MiB on IPU {stage}; their time is not modelled"
        return Optimisation(8, "IPU dropout", "always on IPUs", "seed kept", "mask kept", outcome, note)

    def crops(self) -> Optimisation:
        """The crops of skips where their readers are, or the other way round."""
        name, option = "crops before they are sent", "order of the network's layers"
        early, late = (crops_moved(self.graph, self.splits, first)[0] for first in (True, False))
        if early.layers == late.layers:
            return Optimisation(11, name, option, "no crops", "no crops", None, "the network has none")
        here_early = self.graph.layers == early.layers
        moved, opened = crops_moved(self.graph, self.splits, not here_early)
        outcome = replace(self, graph=moved, splits=opened).outcome()
        words = ("where they begin", "where they end")
        here, instead = words if here_early else words[::-1]
        note = "crops are copies here; the stock crop is in place, and keeps all of the skip alive, too"
        return Optimisation(11, name, option, here, instead, outcome, note)


def _word(value: object) -> str:
    """A setting's value as a user gives it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _percent(settings: PlanSettings) -> str:
    return " ".join(f"{value:g}" for value in percentages(settings.available_memory_proportion)) + "%"


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
