"""Computes the work of one product (convolution or matrix product, any pass) on the tiles; holds the cost constants.

Each pass of a convolution is a product of groups: M rows by N output channels, summed over R channels and k kernel
elements.  It is partitioned over the tiles: a tile takes M/m rows of N/n channels, R/r of the sum and G/g groups, where
g n r m <= tiles, as in Poplar's planner (poplibs, ConvPlan).  A tile then
  - receives its share of the input (with the kernel's halo) and of the weights;
  - multiplies, with the best of three units: AMP (blocks of channels, padded; groups smaller than a block are
    combined into one, with zeros off the diagonal), SLIC (few input channels per group) or plain vectors;
  - if r > 1, receives its part of the partial sums of r tiles and adds them.
The planner takes the cheapest partition whose temporary bytes are within the bound.  If there is none, it takes the one
with the fewest bytes.
"""

from dataclasses import dataclass, fields, replace
from typing import Tuple, Union

import numpy as np

from ipucnn.hardware import IPU, System

# Units of work of an operation (per tile; the last axis of all work arrays).
FEATURES = ("unit_cycles", "blocks", "received_bytes", "moved_bytes", "transposed_bytes", "steps")


@dataclass(frozen=True)
class CostConstants:
    """Cycles per unit of work, and one time.

    Attributes:
        block_cycles: to start one pass of the workers over one weight block, beyond loading it.
        received_byte_cycles: per byte a tile receives in an exchange, rearranging included; 0.25 is the wire alone.
        moved_byte_cycles: per byte an element-wise vertex reads or writes, all vertex overheads included.
        transposed_byte_cycles: per byte of the operands of a weight gradient.  The matrix unit needs them
            position-major, while activations are stored channel-major.
        step_cycles: one bulk-synchronous step: synchronisation, exchange set-up, vertex start.
        micro_batch_s: feeds and loop around one micro-batch.
    """

    block_cycles: float
    received_byte_cycles: float
    moved_byte_cycles: float
    transposed_byte_cycles: float
    step_cycles: float
    micro_batch_s: float

    def fixed_s(self, system: System) -> float:
        """Returns the seconds of feeds and loop around one micro-batch on a system."""
        return self.micro_batch_s * system.calibration.fixed

    @property
    def cycles_per_unit(self) -> np.ndarray:
        """Returns the cycles of one unit of each of ``FEATURES``; a unit cycle is one cycle."""
        return np.array(
            [
                1.0,
                self.block_cycles,
                self.received_byte_cycles,
                self.moved_byte_cycles,
                self.transposed_byte_cycles,
                self.step_cycles,
            ]
        )


# ``benchmarks/fit_cost_model.py`` reproduces the values: least squares of the logarithms of predicted over published
# throughput together with a prior for each constant (the script names its sources).  The rows are those marked for
# calibration in a table of published figures: ResNet-50 inference on a C600, training of ResNet-50, ResNeXt-101,
# EfficientNet-B4 G16 and U-Net on Mk2 and Bow.  The script prints the errors, also with a network left out.  Everything
# else in the model is a fact of ``ipucnn.hardware``, a count of steps or a size of the network.
DEFAULT_CONSTANTS = CostConstants(
    block_cycles=204.0,
    received_byte_cycles=0.308,
    moved_byte_cycles=0.122,
    transposed_byte_cycles=1.37,
    step_cycles=294.0,
    micro_batch_s=60e-6,
)

# 80 of 100 measurements are expected between the predicted throughput over this factor and the throughput times it.
# The factor is the quantile of the errors of the 20 published rows of 4 networks, each predicted by constants fitted
# without its network (``benchmarks/fit_cost_model.py`` prints it).  13 of the rows are inference of one network, so
# there are too few for separate factors of training and inference, or of few and many IPUs.
BAND_SHARE = 0.8
BAND_FACTOR = 1.135


_STEPS = 3  # receive, rearrange, multiply
_REDUCTION_STEPS = 2  # receive partial sums, add


@dataclass(frozen=True)
class Products:
    """n products; every field is an array of shape (n,).

    Attributes:
        groups: G, the number of groups.
        rows: M, per group; output positions, or kernel elements and input channels in a weight gradient.
        outputs: N, output channels per group.
        reduction: R, per group; input channels, or positions in a weight gradient.
        taps: k, kernel elements that each output sums over; 1 / stride^2 of the kernel in a strided data gradient.
        kernel_width: the kernel's width, for SLIC's padding.
        reach: input positions along one axis that a tile's patch adds beyond its share: the halo.
        density: input positions per output position along an axis: the stride, or its inverse.
        weight_gradient: whether the rows are (channel, tap) pairs and the sum runs over positions.
        channels: input channels per group in a weight gradient (its rows are ``channels`` x taps of the kernel).
    """

    groups: np.ndarray
    rows: np.ndarray
    outputs: np.ndarray
    reduction: np.ndarray
    taps: np.ndarray
    kernel_width: np.ndarray
    reach: np.ndarray
    density: np.ndarray
    weight_gradient: np.ndarray
    channels: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, rows: np.ndarray) -> "Products":
        """Returns the products with those indices (or under that mask)."""
        return Products(*(getattr(self, field.name)[rows] for field in fields(self)))

    def columns(self) -> "Products":
        """Returns the products with a last axis of length 1, to be broadcast against partitions."""
        return Products(*(getattr(self, field.name)[:, None] for field in fields(self)))


def _ceil_divide(a: np.ndarray, b: Union[np.ndarray, float]) -> np.ndarray:
    return np.ceil(a / b)


def partition_work(
    products: Products, factors: Tuple[np.ndarray, ...], ipu: IPU, arithmetic: str, constants: CostConstants
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns work and temporary bytes of products under given partitions.

    Args:
        products: fields of shape (n, 1), see ``Products.columns``.
        factors: by groups, output channels, input channels and positions; the arrays broadcast to (n, s).

    Returns:
        work (n, s, len(FEATURES)) and temporary bytes (n, s), both per tile.
    """
    p = products
    element_bytes = 4 if arithmetic == "float_float" else 2
    partial_bytes = 2 if arithmetic == "half_half" else 4
    by_groups, by_outputs, by_reduction, by_rows = factors
    # A tile's share
    tile = replace(
        p,
        groups=_ceil_divide(p.groups, by_groups),
        rows=_ceil_divide(p.rows, by_rows),
        outputs=_ceil_divide(p.outputs, by_outputs),
        reduction=_ceil_divide(p.reduction, by_reduction),
    )
    cycles, starts = _unit_cycles(p, tile, ipu, arithmetic, element_bytes)
    unit = np.argmin(cycles + constants.block_cycles * starts, axis=0)
    unit_cycles, unit_starts = (np.take_along_axis(each, unit[None], axis=0)[0] for each in (cycles, starts))

    # Bytes received: the input patch, the weights (or, in a weight gradient, activations and output gradients).
    positions = np.where(p.weight_gradient, tile.reduction, tile.rows)
    # A tile's positions are assumed to form a square.  A side reads `density` input positions per position, and the
    # halo, but at most the whole image.
    patch = (np.sqrt(positions) * p.density + p.reach) ** 2
    patch = np.minimum(patch, np.where(p.weight_gradient, p.reduction, p.rows) * p.density**2)
    channels = np.minimum(_ceil_divide(p.channels, by_rows), p.channels)
    input_channels = np.where(p.weight_gradient, channels, tile.reduction)
    input_bytes = tile.groups * input_channels * patch * element_bytes
    taps = np.where(p.weight_gradient, 1, p.taps)
    other_bytes = tile.groups * tile.outputs * tile.reduction * taps * element_bytes
    partials_bytes = tile.groups * tile.rows * tile.outputs * partial_bytes
    # r tiles have partial sums of the same outputs.  Each adds up 1/r of them, which it receives from the r - 1 others:
    # a reduce-scatter, which moves (r - 1) / r of the partial sums into each tile.
    summed = by_reduction > 1
    reduced_bytes = np.where(summed, partials_bytes * (1 - 1 / by_reduction), 0.0)
    received = input_bytes + other_bytes + reduced_bytes
    # A weight gradient sums over positions, which have to become the unit's input channels.  So both operands are
    # transposed, the activations once per column of the kernel, shifted (poplibs: expandDims).
    transposed = np.where(p.weight_gradient, input_bytes * p.kernel_width + other_bytes, 0.0)
    steps = _STEPS + _REDUCTION_STEPS * summed

    features = (unit_cycles, unit_starts, received, reduced_bytes, transposed, steps)
    work = np.stack(np.broadcast_arrays(*features), axis=-1)
    return work, input_bytes + other_bytes + partials_bytes + reduced_bytes


def _unit_cycles(
    p: Products, tile: Products, ipu: IPU, arithmetic: str, element_bytes: int
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns (3, n, s) cycles of a tile's share on AMP, on SLIC and on vectors, and how often each of them starts."""
    # AMP: as many groups smaller than a block are combined as fit into a block.
    amp = ipu.amp[arithmetic]
    fitting = np.where(p.weight_gradient, np.inf, amp.input_channels / p.reduction)
    fitting = np.floor(np.minimum(amp.output_channels / p.outputs, fitting))
    combined = np.clip(fitting, 1, tile.groups)
    # Tiles share the positions of a weight gradient.
    channels_scale = np.where(p.weight_gradient, 1.0, combined)
    rows_scale = np.where(p.weight_gradient, combined, 1.0)
    blocks = (
        _ceil_divide(tile.groups, combined)
        * _ceil_divide(tile.outputs * combined, amp.output_channels)
        * _ceil_divide(tile.reduction * channels_scale, amp.input_channels)
        * p.taps
    )
    load_cycles = amp.input_channels * amp.output_channels * element_bytes / ipu.weight_load_bytes_per_cycle
    # The workers of a tile take the rows in turns; workers without a row in the last turn wait for the others.
    rounds: np.ndarray = _ceil_divide(tile.rows * rows_scale, ipu.num_workers) * ipu.num_workers
    amp_cycles = blocks * (load_cycles + amp.cycles_per_position * rounds)

    # SLIC and vectors: a start for each row of the kernel and each four sums, over four input channels at most.
    macs = tile.groups * tile.rows * tile.outputs * tile.reduction * p.taps
    vector_cycles = macs / ipu.vector_macs_per_cycle[element_bytes]
    kernel_rows = np.maximum(p.taps / p.kernel_width, 1)
    small_blocks = _ceil_divide(tile.groups * tile.outputs, 4) * _ceil_divide(tile.reduction, 4) * kernel_rows
    slic_cycles = np.full(macs.shape, np.inf)
    if ipu.slic_macs_per_channel and element_bytes == 2:
        rate = ipu.slic_macs_per_channel * np.minimum(p.reduction, ipu.slic_max_channels)
        padding = _ceil_divide(p.kernel_width, ipu.slic_kernel_width) * ipu.slic_kernel_width / p.kernel_width
        slic_cycles = np.where(p.weight_gradient, np.inf, macs * padding / rate)
    starts = np.broadcast_arrays(blocks, small_blocks, small_blocks)
    return np.stack([amp_cycles, slic_cycles, vector_cycles]), np.stack(starts)


def _factors(limit: int, fine: bool) -> np.ndarray:
    """Returns 1, 2, 4, ... up to ``limit``, with 3, 6, 12, ... between them if ``fine``."""
    values = {limit}
    for base in (1, 3) if fine else (1,):
        while base < limit:
            values.add(base)
            base *= 2
    return np.array(sorted(values), dtype=float)


def _candidates(products: Products, ipu: IPU) -> Tuple[np.ndarray, ...]:
    """Returns partitions to try for products of one kind: an (n, s) array per axis, and whether the tiles suffice.

    These are all combinations of the factors, with the remaining tiles given to the rows.  A product's factors do not
    depend on the other products of the call.
    """
    coarse = bool(products.weight_gradient.any())
    tiles = ipu.num_tiles
    # No unit gains from fewer than four channels a tile.
    limits = [
        np.minimum(products.groups, tiles),
        np.minimum(_ceil_divide(products.outputs, 4), tiles),
        np.minimum(_ceil_divide(products.reduction, 4), tiles),
    ]
    fine = (not coarse, True, not coarse)
    factors = [_factors(int(limit.max()), grain) for limit, grain in zip(limits, fine)]
    grid: Tuple[np.ndarray, ...] = tuple(np.meshgrid(*factors, indexing="ij"))
    tried = [np.minimum(axis.ravel()[None, :], limit[:, None]) for axis, limit in zip(grid, limits)]
    used = tried[0] * tried[1] * tried[2]
    by_rows = np.clip(np.floor(tiles / used + 1e-9), 1, products.rows[:, None])
    return (*tried, by_rows, used <= tiles)


def partition_products(
    products: Products, ipu: IPU, arithmetic: str, bound_bytes: float, constants: CostConstants
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns (n, len(FEATURES)) work and (n,) temporary bytes per tile of each product under the best partition.

    That is the cheapest partition whose temporary bytes are within the bound, else the one with the fewest.
    """
    num = len(products)
    work, temporary = np.zeros((num, len(FEATURES))), np.zeros(num)
    # Products of one kind share their candidates; few kinds keep the arrays dense, and small ones keep them in cache.
    grouped = products.groups > 1
    for kind in range(4):
        chosen = np.flatnonzero((grouped == bool(kind & 1)) & (products.weight_gradient == bool(kind & 2)))
        for start in range(0, len(chosen), 32):
            rows = chosen[start : start + 32]
            part = products.take(rows)
            *tried, possible = _candidates(part, ipu)
            all_work, bytes_ = partition_work(part.columns(), tuple(tried), ipu, arithmetic, constants)
            cycles = np.where(possible, all_work @ constants.cycles_per_unit, np.inf)
            bytes_ = np.where(possible, bytes_, np.inf)
            fitting = np.where(bytes_ <= bound_bytes, cycles, np.inf)
            best = np.where(
                np.isfinite(fitting).any(axis=1), np.argmin(fitting, axis=1), np.argmin(bytes_, axis=1)
            )
            indices = np.arange(len(rows))
            work[rows] = all_work[indices, best]
            temporary[rows] = bytes_[indices, best]
    return work, temporary
