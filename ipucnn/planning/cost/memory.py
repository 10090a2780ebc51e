"""Predicts the bytes on an IPU, by category, of a stage (a range of layers at a pipeline position) and a program.

The categories at the fullest moment, the backward pass of a micro-batch (the forward pass in inference), are:
  weights           variables, with the fp16 copies of fp32 ones that 16.32 computes with
  accumulators      of the gradients, if micro-batches are accumulated
  optimizer_state   slots, unless offloaded
  stash             what other micro-batches in flight keep between their forward and their backward pass.  The FIFO
                    of stage s holds multiplier x (S - 1 - s) of them (Grouped 2, Interleaved 1, Sequential 0;
                    Poplar's pipeline_fifo_inserter): all kept activations, or under recomputation the stage's inputs.
                    Of stages that share an IPU, those not at work keep one more
  live_activations  of the micro-batch at work: kept ones, gradients or outputs around the layer at work, and tensors
                    that have arrived from or wait to leave for the neighbours
  temporaries       of the convolution at work: rearranged operands and partial sums (bounded by
                    availableMemoryProportion)
  code              vertices, exchange and control; layers of equal shapes share it

A tensor that skips over the stage is live in it, but needs no stash of its own.

All bytes are whole numbers, so sums are exact in any order.  The search and the forecast of a program have the same.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.hardware import IPU
from ipucnn.planning.cost.layer_times import layer_times, stage_starts
from ipucnn.planning.graphs.layer_graph import (
    PRODUCT_CLASSES,
    Layer,
    LayerGraph,
    goes_back,
    kept_outputs,
)
from ipucnn.planning.program import Placement, PlannedProgram, StageProportions

# The ratio of the fullest tile to the mean one.
_IMBALANCE = 1.04

# Code of a whole Mk2 IPU.  Its authors set it to agree with a public profile (popliner's test data,
# EfficientNet-EdgeTPU-L inference: 259 MB = 171 variables + 35 vertices + 43 exchange + 9 control).  It scales with the
# tiles.
_FIXED_CODE_BYTES = 20e6
_PRODUCT_CODE_BYTES = 0.45e6  # per distinct convolution and pass
_OTHER_CODE_BYTES = 0.12e6  # per distinct other operation
_TRAINING_REUSE = 0.75  # the passes of a training share some of it
_CODE_TILES = 1472

# More micro-batches than any FIFO holds.
_DEEPEST = 1 << 14

_IN_PLACE = ("activation", "norm", "elementwise", "reshape")

# The fill below which a stage counts as fitting, and the fill above which it does not fit.  There are too few public
# reports of programs that do not fit for a sharp edge.  Among the public configurations (benchmarks/fit_cost_model.py
# --memory), the fullest that fits is at 1.03 here, and the emptiest reported out of memory at 0.81.  Both lie between
# the bounds.
FITS_BELOW = 0.80
FITS_NOT_ABOVE = 1.15

# Public configurations of results/published_fits.csv by tenths of predicted fill: the number that fit, and the total.
# The same command prints them.
_PUBLISHED = {
    0: (2, 2),
    2: (3, 3),
    3: (2, 2),
    4: (12, 12),
    5: (7, 7),
    6: (10, 10),
    7: (9, 9),
    8: (14, 16),
    9: (2, 4),
    10: (1, 1),
    11: (0, 4),
}
LAST_BIN = max(_PUBLISHED)


def published_bin(fill: float) -> int:
    """Returns the tenth of an IPU's memory of a fill; fills beyond the fullest published one are in the last."""
    return min(int(fill * 10 + 1e-9), LAST_BIN)


def published_at(fill: float) -> Tuple[int, int]:
    """Returns how many public configurations with about that predicted fill are known to fit, and their number."""
    return _PUBLISHED.get(published_bin(fill), (0, 0))


@dataclass(frozen=True)
class StageMemory:
    """The predicted whole bytes of a stage or an IPU, by category; they include the factor for the fullest tile.

    Attributes:
        capacity_bytes: the IPU's memory.
    """

    weights_bytes: float
    accumulators_bytes: float
    optimizer_state_bytes: float
    stash_bytes: float
    live_activations_bytes: float
    temporaries_bytes: float
    code_bytes: float
    capacity_bytes: float

    def categories(self) -> Dict[str, float]:
        """Returns the bytes by category, in the order of ``CATEGORIES``."""
        return {name: getattr(self, f"{name}_bytes") for name in CATEGORIES}

    @property
    def total_bytes(self) -> float:
        return sum(self.categories().values())

    @property
    def fill(self) -> float:
        """Returns the share of the IPU's memory."""
        return self.total_bytes / self.capacity_bytes

    @property
    def verdict(self) -> str:
        """Returns "fits", "uncertain" or "does not fit"."""
        if self.fill < FITS_BELOW:
            return "fits"
        return "uncertain" if self.fill <= FITS_NOT_ABOVE else "does not fit"


CATEGORIES = tuple(
    field.name[: -len("_bytes")] for field in fields(StageMemory) if field.name != "capacity_bytes"
)


def limit_bytes(share: float, ipu: IPU) -> float:
    """Returns the whole bytes of a share of an IPU's memory; of a fill (``StageMemory.fill``) its bytes themselves."""
    # The quotient of whole numbers is off by far less than a thousandth of a byte.
    return float(np.floor(share * ipu.sram_bytes + 1e-3))


def _on_fullest_tile(bytes_: np.ndarray) -> np.ndarray:
    """Returns whole bytes with the factor for the fullest tile."""
    whole: np.ndarray = np.rint(_IMBALANCE * bytes_)
    return whole


# Sums and maxima over all ranges of a sequence at once.  Tables have shape (n, n + 1); [a, b] describes the items a ..
# b - 1 and is defined where b > a.


def range_sum(values: np.ndarray) -> np.ndarray:
    """Returns a table; [a, b] is the sum of the items' values."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return prefix[None, :] - prefix[:-1, None]


def range_maximum(values: np.ndarray) -> np.ndarray:
    """Returns a table; [a, b] is the largest of the items' values, and 0 where b <= a."""
    n = len(values)
    table = np.zeros((n, n + 1))
    for a in range(n):
        table[a, a + 1 :] = np.maximum.accumulate(values[a:])
    return table


def distinct_sum(
    occurrences: Sequence[Union[np.ndarray, Sequence[int]]],
    weights: Union[np.ndarray, Sequence[float]],
    num_items: int,
    after: Optional[np.ndarray] = None,
) -> np.ndarray:
    """Returns a table; [a, b] is the sum of the weights of the things that occur at least once in items a .. b - 1.

    A thing counts if its first occurrence at or after a lies before b.  For an occurrence u and the previous one p,
    that is the rectangle p < a <= u < b.  So the table is a sum of rectangles: O(occurrences + n^2).

    Args:
        occurrences: for each thing, the items in which it occurs, ascending.
        after: for each thing, an item: the thing counts only in ranges that begin behind that item.  None: it counts in
            all.
    """
    corners = np.zeros((num_items + 1, num_items + 1))
    rows: List[int] = []
    columns: List[int] = []
    signed: List[float] = []
    for thing, (items, weight) in enumerate(zip(occurrences, weights)):
        before = -1 if after is None else int(after[thing])
        for item in items:
            if item > before:
                rows += [before + 1, item + 1]
                columns += [item + 1, item + 1]
                signed += [weight, -weight]
                before = item
    np.add.at(corners, (rows, columns), signed)
    return corners.cumsum(axis=0).cumsum(axis=1)[:num_items]


def _spans(weights: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Returns [k]: the sum of the weights of the spans first .. last that contain k."""
    change = np.zeros(len(weights) + 2)
    np.add.at(change, first, weights)
    np.add.at(change, last + 1, -weights)
    return np.cumsum(change)[: len(weights)]


def _signature(layer: Layer, shapes: Dict[str, Tuple[int, ...]]) -> Tuple[object, ...]:
    """Returns a signature: layers with equal signatures share their code."""
    inputs = tuple(shapes[name] for name in layer.inputs)
    return (layer.op_class, layer.output_shape, inputs, layer.kernel, layer.strides, layer.groups)


def _code_bytes(signature: Tuple[object, ...], training: bool) -> float:
    """Returns the bytes of an operation's code in all its passes on ``_CODE_TILES`` tiles."""
    if signature[0] == "input":
        return 0.0
    one = _PRODUCT_CODE_BYTES if signature[0] in PRODUCT_CLASSES else _OTHER_CODE_BYTES
    # Forward, gradient of the inputs, gradient of the weights.
    return one * (3 * _TRAINING_REUSE if training else 1.0)


class _Uses:
    """The readers and keepers of each layer's output in a graph, by layer number, and the layers that share code."""

    def __init__(self, graph: LayerGraph) -> None:
        layers = graph.layers
        index = {layer.name: i for i, layer in enumerate(layers)}
        self.readers: List[List[int]] = [[] for _ in layers]
        self.keepers: List[List[int]] = [[] for _ in layers]
        kept, backward = kept_outputs(graph), goes_back(graph)
        for i, layer in enumerate(layers):
            for name in layer.inputs:
                self.readers[index[name]].append(i)
            for name in kept[layer.name]:
                self.keepers[index[name]].append(i)
        self.goes_back = np.array([layer.name in backward for layer in layers], dtype=float)
        self.elements = np.array([layer.output_elements for layer in layers], dtype=float)
        self.last_read = np.array(graph.last_use)
        self.alive = _spans(self.elements, np.arange(len(layers)), self.last_read)
        for i, layer in enumerate(layers):
            # An element-wise operation overwrites an input that no later layer reads.
            if layer.op_class in _IN_PLACE and any(self.last_read[index[name]] == i for name in layer.inputs):
                self.alive[i] -= self.elements[i]
        self.counts = np.array([(layer.num_parameters, layer.num_trainable) for layer in layers], dtype=float)
        shapes = {layer.name: layer.output_shape for layer in layers}
        self.alike: Dict[Tuple[object, ...], List[int]] = {}
        for i, layer in enumerate(layers):
            self.alike.setdefault(_signature(layer, shapes), []).append(i)


_uses = lru_cache(maxsize=4)(_Uses)


class RangeCounts:
    """Contents of a graph's ranges that do not depend on the settings, in elements of a sample; see ``MemoryModel``."""

    def __init__(self, graph: LayerGraph, item_starts: Sequence[int], training: bool) -> None:
        uses, layers = _uses(graph), graph.layers
        starts, n = np.asarray(item_starts), len(item_starts)
        item_of: Any = np.searchsorted(starts, np.arange(len(layers)), side="right") - 1
        # The host delivers the images, so they are an input of every range that reads them.
        made_in = np.where([layer.op_class == "input" for layer in layers], -1, item_of)
        if training:
            kept_at = [item_of[layers_of] for layers_of in uses.keepers]
            self.kept = distinct_sum(kept_at, uses.elements, n)
            self.kept_inside = self.kept - distinct_sum(kept_at, uses.elements, n, after=made_in)
        else:
            self.kept = self.kept_inside = np.zeros((n, n + 1))
        self.inputs = distinct_sum(
            [item_of[layers_of] for layers_of in uses.readers], uses.elements, n, after=made_in
        )
        going_back = np.add.reduceat(uses.goes_back, starts)
        if training:
            # A range without a backward pass stores no inputs: its layers and all before are frozen.
            self.inputs *= range_sum(going_back) > 0
        crossing = _spans(uses.elements, np.arange(len(layers)) + 1, uses.last_read)
        self.crossing = np.array([0.0, *crossing[starts[1:]], 0.0])
        # The next images arrive in a buffer of their own while a micro-batch is at work.
        self.arriving = np.array([uses.elements[0], *self.crossing[1:-1]])
        self.weights, self.trainable = (
            range_sum(np.add.reduceat(column, starts)) for column in uses.counts.T
        )
        self.code_at = [[int(item) for item in item_of[layers_of]] for layers_of in uses.alike.values()]
        self.code_bytes = [_code_bytes(signature, training) for signature in uses.alike]
        self.code = distinct_sum(self.code_at, self.code_bytes, n)
        # Stages hold what their layers keep at least once each, recomputed or not.
        whole = bool((self.inputs + self.kept_inside >= self.kept).all())
        self.least_kept = float(self.kept[0, n]) * whole


class MemoryModel:
    """The memory of a graph's ranges under some settings.

    Ranges are given in items: item a extends from layer ``item_starts[a]`` to the next item.  Tables are those of
    ``range_sum``: [a, b] describes the items a .. b - 1.

    Args:
        counts: the counts of these items, if they are known already.

    Attributes:
        item_starts: (n + 1,) first layer of each item, and the number of layers.
        sample_bytes: the bytes per element of one sample in ``counts``, for a micro-batch.
        alive: (layers,) bytes around a layer at work: tensors made before or by it and read by it or later.
    """

    def __init__(
        self,
        graph: LayerGraph,
        settings: PlannedProgram,
        ipu: IPU,
        item_starts: Sequence[int],
        counts: Optional[RangeCounts] = None,
    ) -> None:
        self.graph, self.settings, self.ipu = graph, settings, ipu
        self.num_items = len(item_starts)
        self.item_starts = np.array([*item_starts, len(graph.layers)])
        self.counts = counts or RangeCounts(graph, item_starts, settings.training)
        # Whole numbers far below 2^53, so their products are exact.
        self.sample_bytes = float(settings.micro_batch_size * settings.element_bytes)
        self.alive = _uses(graph).alive * self.sample_bytes
        self._working: Dict[StageProportions, Tuple[np.ndarray, np.ndarray]] = {}
        self._within: Dict[Tuple[bool, StageProportions, float], np.ndarray] = {}
        self._tiles = ipu.num_tiles / _CODE_TILES
        # 16.32 keeps a 32-bit master of each weight beside the 16-bit one used in products.
        weight = settings.weight_bytes + (2 if settings.precision == "16.32" else 0)
        accumulated = settings.training and settings.gradient_accumulation_count > 1
        slots = settings.optimizer_slots if settings.training and not settings.offloads_optimizer_state else 0
        self._per_weight = weight, settings.weight_bytes * accumulated, settings.weight_bytes * slots

    def working(self, stage: int) -> Tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of the layers at work under the availableMemoryProportion of a stage.

        Returns:
            (layers,) bytes of the temporaries of a layer's largest pass, and a table of the largest sum of them and
            ``alive`` in each range.
        """
        share = self.settings.proportions_of(stage)
        if share not in self._working:
            times = layer_times(self.graph, self.settings, self.ipu, proportions=share)
            temporaries = times.temporary_bytes.max(axis=1) * self.ipu.num_tiles
            largest = np.maximum.reduceat(self.alive + temporaries, self.item_starts[:-1])
            self._working[share] = temporaries, range_maximum(largest)
        return self._working[share]

    @cached_property
    def resident(self) -> Dict[str, np.ndarray]:
        """The tables of the always resident bytes, by category; they are the same at every pipeline position."""
        counts = self.counts
        weight, accumulator, slots = self._per_weight
        return {
            "weights": _on_fullest_tile(weight * counts.weights),
            "accumulators": _on_fullest_tile(accumulator * counts.trainable),
            "optimizer_state": _on_fullest_tile(slots * counts.trainable),
            "code": _on_fullest_tile(self._tiles * (_FIXED_CODE_BYTES + counts.code)),
        }

    @cached_property
    def _all_resident(self) -> np.ndarray:
        """The sum of ``resident``; inf where b <= a."""
        whole: np.ndarray = sum(self.resident.values())  # type: ignore[assignment]
        return np.where(np.tri(*whole.shape, dtype=bool), np.inf, whole)

    def _activations(self, num_stages: int, stage: int) -> Tuple[np.ndarray, np.ndarray]:
        """Returns whole bytes: of each micro-batch in the FIFO, and of live activations with temporaries.

        For segments on one IPU, the first table holds what a segment leaves behind it, once.
        """
        settings, counts = self.settings, self.counts
        scale = self.sample_bytes
        at_work = self.working(stage)[1]
        is_recomputed = settings.training and settings.recomputation
        if settings.placement is Placement.SEGMENTS:
            # Segments pass tensors on in place.  The inputs of a recomputed segment wait as its checkpoint.
            if is_recomputed:
                stash = np.broadcast_to(scale * counts.crossing[:-1, None], counts.kept.shape)
                work = scale * counts.kept_inside + at_work
            else:
                stash, work = scale * counts.kept, at_work
            return _on_fullest_tile(stash), _on_fullest_tile(work + scale * counts.arriving[0])
        if settings.recomputes(stage, num_stages):
            stash = scale * counts.inputs
            work = scale * (counts.inputs + counts.kept_inside) + at_work
        else:
            stash = scale * counts.kept
            work = stash + at_work
        work = work + scale * (counts.arriving[:, None] + counts.crossing[None, :])
        return _on_fullest_tile(stash), _on_fullest_tile(work)

    def kept_bytes(self, num_stages: int, stage: int) -> float:
        """Returns the bytes that the item of a stage's number, as that stage, keeps of a waiting micro-batch."""
        return float(self._activations(num_stages, stage)[0][stage, stage + 1])

    def depth(self, num_stages: int, stage: int) -> int:
        """Returns the number of micro-batches in the FIFO of a stage.

        A micro-batch returns to a stage after it has passed through all later ones in both directions.  Until then its
        data wait in a FIFO, which is deeper the more stages follow.
        """
        if self.settings.placement is Placement.SEGMENTS:
            return 1
        return self.settings.order.fifo_factor * (num_stages - 1 - stage)

    def total(self, num_stages: int, stage: int) -> np.ndarray:
        """Returns (n, n + 1): the bytes of items a .. b - 1 as that stage; inf where b <= a."""
        stash, work = self._activations(num_stages, stage)
        return self._all_resident + work + self.depth(num_stages, stage) * stash

    def fits(self, num_stages: int, stage: int, most_bytes: float) -> np.ndarray:
        """Returns (n, n + 1): whether items a .. b - 1 take at most ``most_bytes`` as that stage."""
        # Stages with the same proportions differ only in the depth of their FIFO, except for the last, which keeps all.
        key = (stage == num_stages - 1, self.settings.proportions_of(stage), most_bytes)
        if key not in self._within:
            stash, work = self._activations(num_stages, stage)
            room = most_bytes - (self._all_resident + work)
            # The most micro-batches in the FIFO; -1 if the range takes more with an empty one.
            counts: np.ndarray = np.full(room.shape, float(_DEEPEST))
            np.divide(room, stash, out=counts, where=stash > 0)
            np.clip(np.floor(counts, out=counts), -1, _DEEPEST, out=counts)
            counts[room < 0] = -1
            self._within[key] = counts.astype(np.int16)
        allowed: np.ndarray = self._within[key] >= self.depth(num_stages, stage)
        return allowed

    def entry(self, a: int, b: int, num_stages: int, stage: int) -> StageMemory:
        """Returns the memory of items a .. b - 1 as that stage; its sum is that of ``total``."""
        stash, work = self._activations(num_stages, stage)
        first, last = self.item_starts[a], self.item_starts[b]
        temporary = self.working(stage)[0]
        fullest = first + int(np.argmax((self.alive + temporary)[first:last]))
        temporaries = float(_on_fullest_tile(temporary[fullest]))
        return StageMemory(
            **{f"{name}_bytes": float(table[a, b]) for name, table in self.resident.items()},
            stash_bytes=self.depth(num_stages, stage) * float(stash[a, b]),
            live_activations_bytes=float(work[a, b]) - temporaries,
            temporaries_bytes=temporaries,
            capacity_bytes=float(self.ipu.sram_bytes),
        )

    def one_ipu(self) -> Tuple[float, np.ndarray, np.ndarray]:
        """Returns the memory of recomputation segments on one IPU.

        Returns:
            Bytes that are resident wherever the cuts are; (n + 1,) bytes of the checkpoint of a segment that opens at
            an item; and (n, n + 1) bytes of items a .. b - 1 as the segment at work.
        """
        stash, work = self._activations(2, 0)
        n = self.num_items
        fixed, checkpoints = float(self._all_resident[0, n]), np.zeros(n + 1)
        if self.settings.training and self.settings.recomputation:
            checkpoints[:n] = stash[:, n]
        else:
            # Without checkpoints everything that is kept stays, once.
            fixed += float(stash[0, n])
        return fixed, checkpoints, work

    def joint_code_bytes(self, items: Sequence[int]) -> float:
        """Returns the bytes of code of several items on one IPU."""
        total = _FIXED_CODE_BYTES
        for places, size in zip(self.counts.code_at, self.counts.code_bytes):
            total += size * any(place in items for place in places)
        return float(_on_fullest_tile(np.array(self._tiles * total)))


def program_memory(
    graph: LayerGraph,
    splits: Sequence[str],
    settings: PlannedProgram,
    ipu: IPU,
) -> List[StageMemory]:
    """Returns the memory of each IPU of a replica.

    The memory of stages that share an IPU adds up, and they share code.  While one of them is at work, the others keep
    what their next backward pass needs; of a Sequential micro-batch that is going back, only the stages before it do.
    """
    starts = stage_starts(graph, splits)
    model, count = MemoryModel(graph, settings, ipu, starts), len(starts)
    stages = [model.entry(s, s + 1, count, s) for s in range(count)]
    kept, is_shared = (
        [model.kept_bytes(count, s) for s in range(count)],
        settings.placement is Placement.SHARED,
    )
    ipus = []
    for number in range(settings.num_ipus_per_replica):
        members = [s for s, place in enumerate(settings.mapping) if place == number]
        waiting = dict.fromkeys(members, 0.0)
        for s in members if is_shared else ():
            others = [r for r in members if r < s or (r > s and not settings.order.is_sequential)]
            waiting[s] = sum(kept[r] for r in others)
        at_work = {s: stages[s].live_activations_bytes + stages[s].temporaries_bytes for s in members}
        busiest = max(members, key=lambda s: at_work[s] + waiting[s])
        sums = {
            f"{name}_bytes": sum(getattr(stages[s], f"{name}_bytes") for s in members)
            for name in ("weights", "accumulators", "optimizer_state", "stash")
        }
        sums["stash_bytes"] += waiting[busiest]
        sums["code_bytes"] = model.joint_code_bytes(members)
        if settings.placement is Placement.SEGMENTS:
            fixed, checkpoints, _ = model.one_ipu()
            sums = {f"{name}_bytes": float(table[0, count]) for name, table in model.resident.items()}
            sums["stash_bytes"] = fixed - sum(sums.values()) + float(checkpoints.sum())
        ipus.append(replace(stages[busiest], **sums))
    return ipus
