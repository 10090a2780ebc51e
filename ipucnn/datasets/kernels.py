"""Compiled, antialiased resizing of a crop.

The pixels are those of Pillow's ``Image.resize``, except for rounding between the two passes.
Importing this module imports Numba, and compiles the functions or loads them from its cache.  One operation is
written as LLVM instructions, because the compiler does not find them by itself.
"""

from typing import Tuple

import numpy as np

from ipucnn.compiled import import_numba, jit

numba = import_numba()

from llvmlite import ir  # noqa: E402 - after ``import_numba``, which sets Numba up
from numba.core import cgutils  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

_PIXELS = numba.types.Array(numba.uint8, 3, "C", readonly=True)
_WEIGHT_BITS = 22
"""Pillow's weights of 8-bit pixels are multiples of 2**-22 (libImaging/Resample.c, PRECISION_BITS)."""


@jit(inline="always", fastmath=False)
def _weights(begin, end, length, offset, num_decoded, count):  # type: ignore[no-untyped-def]
    """Returns the first source pixel, the number of source pixels, and their weights for each of ``count`` outputs.

    The outputs lie between ``begin`` and ``end`` of a line of ``length`` pixels, of which ``num_decoded`` pixels from
    ``offset`` on are decoded.  Source pixels are numbered from ``offset``.
    """
    step = (end - begin) / count
    reach = max(step, 1.0)
    firsts, nums = np.empty(count, np.int64), np.empty(count, np.int64)
    weights = np.zeros((count, int(np.ceil(reach)) * 2 + 1), np.int32)
    shares = np.empty(weights.shape[1], np.float64)
    for k in range(count):
        centre = begin + (k + 0.5) * step
        first = max(0, int(centre - reach + 0.5), offset)
        num = min(length, int(centre + reach + 0.5), offset + num_decoded) - first
        total = 0.0
        for j in range(num):
            shares[j] = max(0.0, 1.0 - abs((j + first - centre + 0.5) * (1.0 / reach)))
            total += shares[j]
        for j in range(num):
            share = shares[j] / total if total != 0.0 else shares[j]
            weights[k, j] = int(0.5 + share * (1 << _WEIGHT_BITS))
        firsts[k], nums[k] = first - offset, num
    return firsts, nums, weights


@intrinsic  # type: ignore[untyped-decorator]
def _add_up(typing, line, first, weights, count, out, at):  # type: ignore[no-untyped-def]
    """Writes a weighted sum of ``count`` pixels of a line, rounded to 8 bits, to ``out[at]`` and the next two items.

    Red, green, blue and the next number form one vector of four, so both ``line`` and ``out`` need one more number
    after the last pixel.  The value that ``out`` gets there means nothing.
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number, byte = ir.IntType(32), ir.IntType(8)
        vector = ir.VectorType(number, 4)

        def pointer(which, index):  # type: ignore[no-untyped-def]
            array = context.make_array(signature.args[which])(context, builder, arguments[which])
            return builder.gep(array.data, [index])

        pixel, weight = pointer(0, arguments[1]), pointer(2, ir.Constant(ir.IntType(64), 0))
        sums = cgutils.alloca_once_value(builder, ir.Constant(vector, [1 << (_WEIGHT_BITS - 1)] * 4))
        undefined, broadcast = ir.Constant(vector, ir.Undefined), ir.Constant(vector, [0] * 4)
        with cgutils.for_range(builder, arguments[3]) as loop:
            weight_vector = builder.load(builder.gep(weight, [loop.index]))
            weight_vector = builder.insert_element(undefined, weight_vector, ir.Constant(number, 0))
            weight_vector = builder.shuffle_vector(weight_vector, undefined, broadcast)
            place = builder.gep(pixel, [builder.mul(loop.index, ir.Constant(loop.index.type, 3))])
            values = builder.load(builder.bitcast(place, vector.as_pointer()), align=4)
            builder.store(builder.add(builder.load(sums), builder.mul(values, weight_vector)), sums)
        rounded = builder.lshr(builder.load(sums), ir.Constant(vector, [_WEIGHT_BITS] * 4))
        rounded = builder.trunc(rounded, ir.VectorType(byte, 4))
        builder.store(rounded, builder.bitcast(pointer(4, arguments[5]), rounded.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return numba.void(line, numba.int64, weights, numba.int64, out, numba.int64), code


@jit(
    _PIXELS, numba.types.UniTuple(numba.float64, 4), numba.types.UniTuple(numba.int64, 4),
    numba.boolean, numba.uint8[:, :, ::1], fastmath=False,
)  # fmt: skip
def _resize(pixels, box, place, mirrored, out):  # type: ignore[no-untyped-def]
    """Resizes along the columns, in vectors of neighbours, then along the rows; rounds to 8 bits after each pass."""
    num_rows, num_columns, _ = pixels.shape
    height, width, _ = out.shape
    half, shift = np.int32(1 << (_WEIGHT_BITS - 1)), np.int32(_WEIGHT_BITS)
    firsts, nums, weights = _weights(box[0], box[2], place[2], place[0], num_columns, width)
    tops, talls, heavy = _weights(box[1], box[3], place[3], place[1], num_rows, height)
    first = 3 * firsts[0]
    count = 3 * (firsts[width - 1] + nums[width - 1]) - first
    flat = pixels.reshape(num_rows, 3 * num_columns)
    # Each output sums the same number of pixels, some with weight 0, so that the processor predicts the loop's end.
    # Loops stand for ``max`` and for the assignment of a slice, whose compilation takes three seconds.
    most = nums[0]
    for x in range(1, width):
        most = max(most, nums[x])
    sums, line = np.empty(count, np.int32), np.zeros(count + 3 * most + 1, np.int32)
    last, flat_out = np.empty(3 * width + 1, np.uint8), out.reshape(3 * width * height)
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
        into, at = (flat_out, 3 * width * y) if y < height - 1 else (last, 0)
        for to in range(width):
            x = width - 1 - to if mirrored else to
            _add_up(line, 3 * firsts[x] - first, weights[x], most, into, at + 3 * to)  # type: ignore[call-arg]
    for x in range(3 * width):
        flat_out[3 * width * (height - 1) + x] = last[x]


def resize(
    pixels: np.ndarray,
    place: Tuple[int, int, int, int],
    box: Tuple[float, float, float, float],
    mirrored: bool,
    out: np.ndarray,
) -> None:
    """Resizes a box of a partly decoded image as Pillow's bilinear ``resize`` does.

    Args:
        pixels: the decoded part, uint8 [h, w, 3]: the box and as many pixels around it as the filter reaches, or up to
            the image's border.
        place: the part's left and top in the image, and the image's width and height.
        box: left, top, right and bottom in the image.
        mirrored: whether to swap left and right.
        out: uint8 [height, width, 3], the array to write to.
    """
    _resize(pixels, tuple(float(side) for side in box), place, mirrored, out)
