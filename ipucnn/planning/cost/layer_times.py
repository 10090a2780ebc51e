"""Computes the cycles of every layer's forward and backward pass on one IPU.

``cost.products`` partitions convolutions and matrix products over the tiles.  Everything else is counted by the bytes
that its vertices read and write.  An IPU runs one operation at a time on all its tiles, so a stage takes the sum over
its layers.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.hardware import IPU, collective_latency_s
from ipucnn.planning.cost.products import (
    DEFAULT_CONSTANTS,
    FEATURES,
    CostConstants,
    Products,
    partition_products,
)
from ipucnn.planning.graphs.layer_graph import (
    OTHER,
    PRODUCT_CLASSES,
    Layer,
    LayerGraph,
    is_frozen,
    needs_gradient,
)
from ipucnn.planning.program import PlannedProgram, StageProportions

PASSES = ("forward", "backward_data", "backward_weights")

# Steps of a training norm in each direction: two sums over all tiles (partial sums, exchange, final sums), a few small
# operations on them, broadcast, whitening, scale and offset.
_NORM_STEPS = 10
# A data gradient reads the weights transposed and flipped: an exchange and a copy.  Before a weight gradient both
# operands are transposed; after it, the sum is added to its accumulator.
_FLIP_STEPS = 2
_TRANSPOSE_STEPS = 2
_ACCUMULATE_STEPS = 1
# A sum over all positions, as in a global pool or the gradient of a broadcast factor.
_REDUCE_STEPS = 4

_Key = Tuple[float, ...]


@dataclass(frozen=True)
class LayerTimes:
    """The predicted times of a graph's layers for one micro-batch, in the graph's order.

    Attributes:
        forward_s: (n,) seconds of the forward pass; a recomputation takes the same.
        backward_s: (n,) seconds of the backward pass without recomputation; 0 for inference.
        work: (n, 3, len(FEATURES)) the work from which the seconds are computed, by pass, per tile.
        temporary_bytes: (n, 3) bytes per tile, by pass.
        shared_s: (n,) seconds in which replicas share their statistics, in each pass; 0 if they do not.
        clock_hz: cycles in a second, ``IPU.computing_hz``.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    work: np.ndarray
    temporary_bytes: np.ndarray
    shared_s: np.ndarray
    clock_hz: float

    def with_constants(self, constants: CostConstants) -> "LayerTimes":
        """Returns the times of the same partitions with other constants; a new search could find better ones."""
        forward, backward = _seconds(self.work, self.shared_s, self.clock_hz, constants)
        return replace(self, forward_s=forward, backward_s=backward)


def _seconds(
    work: np.ndarray, shared_s: np.ndarray, clock_hz: float, constants: CostConstants
) -> Tuple[np.ndarray, np.ndarray]:
    seconds = work @ constants.cycles_per_unit / clock_hz
    seconds[:, :2] += shared_s[:, None]
    return seconds[:, 0], seconds[:, 1:].sum(axis=1)


def output_bytes(graph: LayerGraph, settings: PlannedProgram) -> np.ndarray:
    """Returns (n,) bytes of each layer's output for one micro-batch."""
    elements = np.array([layer.output_elements for layer in graph.layers], dtype=float)
    return elements * (settings.micro_batch_size * settings.element_bytes)


def _is_product(layer: Layer) -> bool:
    return layer.op_class in PRODUCT_CLASSES or (layer.op_class == OTHER and layer.macs > 0)


def _product_keys(
    layer: Layer, source: Layer, batch: int, data_gradient: bool, training: bool
) -> List[Optional[_Key]]:
    """Returns the ``Products`` fields for each pass of a convolution or matrix product; None for skipped passes."""
    taps = layer.kernel[0] * layer.kernel[1]
    width = layer.kernel[1]
    groups = layer.groups
    size = float(np.sqrt(taps))
    stride = float(np.sqrt(layer.strides[0] * layer.strides[1]))
    # A dense layer on (h, w, c) multiplies at every position, as a 1x1 convolution does.
    small, large = (
        batch * int(np.prod(shape[:-1], dtype=int)) for shape in (layer.output_shape, source.output_shape)
    )
    near, far = layer.output_shape[-1] // groups, layer.input_channels // groups
    if layer.op_class == OTHER:  # the number of channels that gives its MACs
        far = max(1, round(layer.macs / layer.output_elements))
    swapped = layer.op_class == "transposed_conv"
    if swapped:  # it is the data gradient of the convolution in the opposite direction
        small, large, near, far = large, small, far, near
    # A convolution reads patches `stride` apart, each of `size`; a kernel smaller than its stride leaves gaps.
    density, reach = min(stride, size), max(0.0, size - stride)
    gather = (groups, small, near, far, taps, width, reach, density, False, 0)
    # Its data gradient sums over the kernel elements whose patches hold a position: taps / stride^2 of them.
    filled = large if size >= stride else small * taps
    share = max(1.0, taps / stride**2)
    scatter = (groups, filled, far, near, share, width, reach / stride, 1 / density, False, 0)
    weights = (groups, far * taps, near, small, 1, width, reach, density, True, far)
    forward, backward = (scatter, gather) if swapped else (gather, scatter)
    if not training:
        return [forward, None, None]
    return [forward, backward if data_gradient else None, None if is_frozen(layer) else weights]


def _moved(layer: Layer, inputs: int, training: bool, folded: bool) -> List[Tuple[float, float]]:
    """Returns (elements moved, steps) of a layer's work outside products, forward and backward, for one sample."""
    out = float(layer.output_elements)
    kind = layer.op_class
    if kind in PRODUCT_CLASSES:
        taps = layer.kernel[0] * layer.kernel[1]
        weights = taps * layer.input_channels // layer.groups * layer.output_shape[-1]
        biased = layer.num_trainable > weights
        fused = layer.name in layer.kept  # it has an activation of its own
        # Adding a bias reads and writes the output, and so does an activation.  Backward the bias sums the gradient,
        # and the activation reads output and gradient and writes a gradient.
        return [
            (2 * out * (biased + fused), biased + fused),
            (out * (biased + 3 * fused), 2 * biased + fused),
        ]
    if kind == "norm":
        if not training:
            return [(0, 0) if folded else (2 * out, 1), (0, 0)]
        # The statistics read the input, and normalising reads and writes it.  Backward two sums read input and
        # gradient; then both are read again and a gradient is written.
        return [(3 * out, _NORM_STEPS), (5 * out, _NORM_STEPS)]
    if kind == "activation":
        # Backward reads output and gradient.
        return [(2 * out, 1), (3 * out, 1)]
    if kind == "elementwise":
        # A sum passes its gradient on as it is; a product reads the other factors.
        back = (3.0 * inputs, 2 + (_REDUCE_STEPS if inputs < out * len(layer.inputs) else 0))
        return [(inputs + out, 2), back if layer.kept else (0, 0)]
    if kind == "pool":
        window = layer.kernel[0] * layer.kernel[1] * out if max(layer.kernel) > 1 else inputs
        whole = layer.output_shape[:2] == (1, 1) or len(layer.output_shape) == 1
        return [(window + out, _REDUCE_STEPS if whole else 2), (window + 2 * inputs, 2)]
    if kind == OTHER:
        # Every tensor once in each direction; backward also the inputs.
        return [(inputs + out, 1), (2 * inputs + out, 1)]
    if kind in ("resize", "concat"):
        return [(inputs + out, 1), (inputs + out, 1)]
    if kind == "reshape" and out < inputs:  # cropping copies; padding and a change of shape are views
        return [(2 * out, 1), (inputs + out, 1)]
    return [(0, 0), (0, 0)]


def _other_work(
    graph: LayerGraph, batch: int, element_bytes: int, weight_bytes: int, training: bool, num_tiles: int
) -> np.ndarray:
    """Returns (n, 3, len(FEATURES)) work outside products: element-wise operations, sums of gradients, rearranging."""
    consumers = Counter(name for layer in graph.layers for name in layer.inputs)
    by_name = {layer.name: layer for layer in graph.layers}
    with_gradient = needs_gradient(graph)
    moved = np.zeros((len(graph.layers), len(PASSES)))  # activations of one sample
    steps = np.zeros_like(moved)
    for i, layer in enumerate(graph.layers):
        sources = [by_name[name] for name in layer.inputs]
        flows = any(name in with_gradient for name in layer.inputs)
        # In inference a batch norm right after a product is folded into its weights.
        folded = bool(sources) and sources[0].op_class in PRODUCT_CLASSES and consumers[sources[0].name] == 1
        elements = sum(source.output_elements for source in sources)
        forward, backward = _moved(layer, elements, training, folded)
        moved[i, 0], steps[i, 0] = forward
        if not training:
            continue
        if flows or layer.num_trainable:
            moved[i, 1], steps[i, 1] = backward
        # The gradients of the branches that read one tensor are added.
        more = consumers.get(layer.name, 1) - 1
        if more > 0 and layer.name in with_gradient:
            moved[i, 1] += 3 * more * layer.output_elements
            steps[i, 1] += 2 * more
        if _is_product(layer):
            steps[i, 1] += _FLIP_STEPS if flows else 0
            steps[i, 2] += 0 if is_frozen(layer) else _TRANSPOSE_STEPS
        if layer.num_trainable:
            steps[i, 2] += _ACCUMULATE_STEPS
    work = np.zeros((*moved.shape, len(FEATURES)))
    work[..., FEATURES.index("moved_bytes")] = moved * (batch * element_bytes / num_tiles)
    work[..., FEATURES.index("steps")] = steps
    if training:  # the gradient is read, its accumulator read and written
        weights = np.array([layer.num_trainable for layer in graph.layers], dtype=float)
        work[:, 2, FEATURES.index("moved_bytes")] += 3 * weights * weight_bytes / num_tiles
    return work


@lru_cache(maxsize=256)
def _partitioned(
    graph: LayerGraph,
    batch: int,
    arithmetic: str,
    element_bytes: int,
    weight_bytes: int,
    proportions: StageProportions,
    training: bool,
    ipu: IPU,
    constants: CostConstants,
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns work and temporary bytes, see ``LayerTimes``; one search per distinct operation."""
    by_name = {layer.name: layer for layer in graph.layers}
    with_gradient = needs_gradient(graph)
    # For each bound of temporary bytes: its distinct products, and the (layer, pass, product number) of each use.
    distinct: Dict[float, Dict[_Key, int]] = {}
    where: Dict[float, List[Tuple[int, int, int]]] = {}
    for i, layer in enumerate(graph.layers):
        if _is_product(layer):
            flows = layer.inputs[0] in with_gradient
            keys = _product_keys(layer, by_name[layer.inputs[0]], batch, flows, training)
            for pass_, key in enumerate(keys):
                if key is not None:
                    share = _proportion(proportions, layer, pass_)
                    known = distinct.setdefault(share, {})
                    where.setdefault(share, []).append((i, pass_, known.setdefault(key, len(known))))
    work = _other_work(graph, batch, element_bytes, weight_bytes, training, ipu.num_tiles)
    temporary = np.zeros((len(graph.layers), len(PASSES)))
    names = [field.name for field in fields(Products)]
    for share, known in distinct.items():
        columns = dict(zip(names, np.array(list(known), dtype=float).T))
        columns["weight_gradient"] = columns["weight_gradient"].astype(bool)
        bound_bytes = share * ipu.sram_per_tile_bytes
        product_work, product_bytes = partition_products(
            Products(**columns), ipu, arithmetic, bound_bytes, constants
        )
        at_layer, at_pass, of = np.array(where[share]).T
        work[at_layer, at_pass] += product_work[of]
        temporary[at_layer, at_pass] = product_bytes[of]
    for array in (work, temporary):
        array.flags.writeable = False  # all callers share the cached arrays
    return work, temporary


def _proportion(proportions: StageProportions, layer: Layer, pass_: int) -> float:
    """Returns the availableMemoryProportion with which Poplar plans a product."""
    if layer.op_class == "matmul":
        return proportions.backward_matmul if pass_ else proportions.matmul
    return proportions.backward_convolution if pass_ else proportions.convolution


def layer_times(
    graph: LayerGraph,
    settings: PlannedProgram,
    ipu: IPU,
    constants: CostConstants = DEFAULT_CONSTANTS,
    proportions: Optional[StageProportions] = None,
) -> LayerTimes:
    """Returns the predicted time of each layer for one micro-batch on one IPU.

    Args:
        proportions: the availableMemoryProportion; None for that of the first stage, which applies to all stages unless
            the settings say otherwise.
    """
    work, temporary = _partitioned(
        graph,
        settings.micro_batch_size,
        settings.arithmetic,
        settings.element_bytes,
        settings.weight_bytes,
        proportions or settings.proportions_of(0),
        settings.training,
        ipu,
        constants,
    )
    latency_s = collective_latency_s(settings.dbn_replica_group_size) if settings.training else 0.0
    shared_s = np.zeros(len(graph.layers))
    if latency_s:
        shared_s[[layer.op_class == "norm" for layer in graph.layers]] = latency_s
    forward, backward = _seconds(work, shared_s, ipu.computing_hz, constants)
    return LayerTimes(forward, backward, work, temporary, shared_s, ipu.computing_hz)


def stage_starts(graph: LayerGraph, splits: Sequence[str]) -> List[int]:
    """Returns the first layer of each stage: 0, then the named layers, each of which opens a stage."""
    return [0, *(graph.index(name) for name in splits)]


def program_times(
    graph: LayerGraph,
    starts: Sequence[int],
    settings: PlannedProgram,
    ipu: IPU,
    constants: CostConstants = DEFAULT_CONSTANTS,
) -> LayerTimes:
    """Returns ``layer_times`` with each stage's own availableMemoryProportion.

    Args:
        starts: the first layer of each stage.
    """
    joined = layer_times(graph, settings, ipu, constants)
    for stage, first in enumerate(starts if settings.proportions_differ else ()):
        of_stage = layer_times(graph, settings, ipu, constants, settings.proportions_of(stage))
        names = ("forward_s", "backward_s", "work", "temporary_bytes")
        arrays = {
            name: np.concatenate([getattr(joined, name)[:first], getattr(of_stage, name)[first:]])
            for name in names
        }
        joined = replace(joined, **arrays)
    return joined


def cut_bytes(graph: LayerGraph, cuts: Sequence[int], settings: PlannedProgram) -> np.ndarray:
    """Returns the bytes of one micro-batch that cross each cut: every tensor made before it and used at or after it."""
    outputs = output_bytes(graph, settings)
    change = np.zeros(len(outputs) + 2)
    np.add.at(change, np.arange(len(outputs)) + 1, outputs)
    np.add.at(change, np.array(graph.last_use) + 1, -outputs)
    crossing: np.ndarray = np.cumsum(change)[np.asarray(cuts, dtype=int)]
    return crossing


def transfers_s(graph: LayerGraph, cuts: Sequence[int], settings: PlannedProgram, ipu: IPU) -> np.ndarray:
    """Returns (cuts,) seconds in which a micro-batch crosses each cut between IPUs in one direction, with skips.

    An IPU in the middle of a pipeline receives from one neighbour and sends as much to the other, one after the other,
    and waits before each.  So a cut costs time at both its ends.  AutoPipe, Graphcore's own planner, counts it this
    way, too.
    """
    idle_s = 2 * ipu.link_idle_cycles / ipu.clock_hz
    return 2 * cut_bytes(graph, cuts, settings) / ipu.link_bytes_per_s + idle_s
