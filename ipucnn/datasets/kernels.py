"""What every photograph goes through, compiled: the checksum of its record, and the antialiased resizing of a crop.

The checksum is that of ``tfrecord.crc32c``; pixels are those of Pillow's ``Image.resize``, but for rounding in between.
Importing this imports Numba, and compiles the functions or loads them from its cache.
"""

from typing import Any, Tuple

import numpy as np

from ipucnn.compiled import import_numba, jit

numba = import_numba()

_BYTES, _PIXELS, _WORDS = (
    numba.types.Array(kind, dimensions, "C", readonly=readonly)
    for kind, dimensions, readonly in (
        (numba.uint8, 1, True),
        (numba.uint8, 3, True),
        (numba.uint32, 2, False),
    )
)
_WEIGHT_BITS = 22
"""Pillow's weights of 8-bit pixels are multiples of 2**-22 (libImaging/Resample.c, PRECISION_BITS)."""


@jit(_BYTES, _WORDS, numba.uint32[::1], fastmath=False)
def _checksum(data, tables, found):  # type: ignore[no-untyped-def]
    """The CRC32C of some bytes into ``found[0]``, eight of them in a step (Kounavis and Berry 2005, "slicing by 8")."""
    state, at, count = np.uint32(0xFFFFFFFF), 0, len(data)
    while at + 8 <= count:
        low = np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)
        high = np.uint32(data[at + 2]) << np.uint32(16) | np.uint32(data[at + 3]) << np.uint32(24)
        state = np.uint32(state ^ low ^ high)
        state = np.uint32(
            tables[7, state & 255]
            ^ tables[6, state >> 8 & 255]
            ^ tables[5, state >> 16 & 255]
            ^ tables[4, state >> 24]
            ^ tables[3, data[at + 4]]
            ^ tables[2, data[at + 5]]
            ^ tables[1, data[at + 6]]
            ^ tables[0, data[at + 7]]
        )
        at += 8
    while at < count:
        state = np.uint32(tables[0, (state ^ data[at]) & 255] ^ state >> np.uint32(8))
        at += 1
    found[0] = state ^ np.uint32(0xFFFFFFFF)


def crc32c(data: bytes, tables: Any) -> int:
    """The CRC32C of some bytes.

    Args:
        data: the bytes.
        tables: uint32 [8, 256]: the effect of each byte, with 0 to 7 zero bytes after it.
    """
    found: Any = np.empty(1, np.uint32)
    _checksum(np.frombuffer(data, np.uint8), tables, found)
    return int(found[0])


@jit(inline="always", fastmath=False)
def _weights(begin, end, length, offset, there, count):  # type: ignore[no-untyped-def]
    """Of each of ``count`` numbers between ``begin`` and ``end``: the first pixel, how many, and their weights.

    Pixels are numbered from ``offset``, and ``there`` of the line's ``length`` are at hand.
    """
    step = (end - begin) / count
    reach = max(step, 1.0)
    firsts, nums = np.empty(count, np.int64), np.empty(count, np.int64)
    weights = np.zeros((count, int(np.ceil(reach)) * 2 + 1), np.int32)
    shares = np.empty(weights.shape[1], np.float64)
    for k in range(count):
        centre = begin + (k + 0.5) * step
        first = max(0, int(centre - reach + 0.5), offset)
        num = min(length, int(centre + reach + 0.5), offset + there) - first
        total = 0.0
        for j in range(num):
            shares[j] = max(0.0, 1.0 - abs((j + first - centre + 0.5) * (1.0 / reach)))
            total += shares[j]
        for j in range(num):
            share = shares[j] / total if total != 0.0 else shares[j]
            weights[k, j] = int(0.5 + share * (1 << _WEIGHT_BITS))
        firsts[k], nums[k] = first - offset, num
    return firsts, nums, weights


@jit(
    _PIXELS, numba.types.UniTuple(numba.float64, 4), numba.types.UniTuple(numba.int64, 4), numba.boolean,
    numba.uint8[:, :, ::1], fastmath=False,
)  # fmt: skip
def _resize(pixels, box, place, mirrored, out):  # type: ignore[no-untyped-def]
    """First along the columns, where neighbours are added up together, then along the rows; both rounded to 8 bits."""
    num_rows, num_columns, _ = pixels.shape
    height, width, _ = out.shape
    half, shift = np.int32(1 << (_WEIGHT_BITS - 1)), np.int32(_WEIGHT_BITS)
    firsts, nums, weights = _weights(box[0], box[2], place[2], place[0], num_columns, width)
    tops, talls, heavy = _weights(box[1], box[3], place[3], place[1], num_rows, height)
    first = 3 * firsts[0]
    count = 3 * (firsts[width - 1] + nums[width - 1]) - first
    flat = pixels.reshape(num_rows, 3 * num_columns)
    sums, line = np.empty(count, np.int32), np.empty(count, np.int32)
    for y in range(height):
        top, weight = flat[tops[y], first : first + count], heavy[y, 0]
        for x in range(count):
            sums[x] = half + np.int32(top[x]) * weight
        for j in range(1, talls[y]):
            row, weight = flat[tops[y] + j, first : first + count], heavy[y, j]
            for x in range(count):
                sums[x] += np.int32(row[x]) * weight
        for x in range(count):
            line[x] = sums[x] >> shift
        target = out[y]
        for x in range(width):
            share, num, part = weights[x], nums[x], line[3 * firsts[x] - first :]
            red, green, blue = half, half, half
            for j in range(num):
                red += part[3 * j] * share[j]
                green += part[3 * j + 1] * share[j]
                blue += part[3 * j + 2] * share[j]
            to = width - 1 - x if mirrored else x
            target[to, 0], target[to, 1], target[to, 2] = red >> shift, green >> shift, blue >> shift


def resize(
    pixels: Any,
    place: Tuple[int, int, int, int],
    box: Tuple[float, float, float, float],
    size: Tuple[int, int],
    mirrored: bool,
) -> Any:
    """uint8 [*size, 3]: as Pillow's bilinear ``resize``, a box of an image of which only a part was decoded.

    Args:
        pixels: uint8 [h, w, 3], the part: the box and as many pixels around it as the filter reaches, unless the image
            ends there.
        place: the part's left and top in the image, and the image's width and height.
        box: left, top, right and bottom in the image.
        size: (height, width).
        mirrored: left for right.
    """
    out: Any = np.empty((*size, 3), np.uint8)
    _resize(pixels, tuple(float(side) for side in box), place, mirrored, out)
    return out
