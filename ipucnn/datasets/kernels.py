"""What every photograph goes through, compiled: the checksum of its record, and the antialiased resizing of a crop.

The checksum is that of ``tfrecord.crc32c``; pixels are those of Pillow's ``Image.resize``, but for rounding in between.
Importing this imports Numba, and compiles the functions or loads them from its cache.  Two operations are written as
instructions of LLVM, since its compiler does not find them by itself.
"""

from typing import Callable, Optional, Tuple

import numpy as np

from ipucnn.compiled import import_numba, jit

numba = import_numba()

from llvmlite import ir  # noqa: E402 - once Numba was imported as it has to be
from numba.core import cgutils  # noqa: E402
from numba.core.registry import cpu_target  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

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


@intrinsic  # type: ignore[untyped-decorator]
def _crc_of_eight(typing, state, word):  # type: ignore[no-untyped-def]
    """The state after eight more bytes, by the instruction that x86 has for it since SSE 4.2; both are uint64."""

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        bits = ir.IntType(64)
        kind = ir.FunctionType(bits, [bits, bits])
        named = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.64.64")
        return builder.call(named, arguments)

    return numba.uint64(numba.uint64, numba.uint64), code


@jit(inline="always", fastmath=False)
def _by_instruction(data, at, state, tables):  # type: ignore[no-untyped-def]
    """The state after the eight bytes from ``at`` on."""
    word = np.uint64(0)
    for k in range(8):
        word |= np.uint64(data[at + k]) << np.uint64(8 * k)
    return np.uint32(_crc_of_eight(np.uint64(state), word))  # type: ignore[call-arg]


@jit(inline="always", fastmath=False)
def _by_tables(data, at, state, tables):  # type: ignore[no-untyped-def]
    """The same on other processors (Kounavis and Berry 2005, "slicing by 8")."""
    low = np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)
    high = np.uint32(data[at + 2]) << np.uint32(16) | np.uint32(data[at + 3]) << np.uint32(24)
    state = np.uint32(state ^ low ^ high)
    return np.uint32(
        tables[7, state & 255]
        ^ tables[6, state >> 8 & 255]
        ^ tables[5, state >> 16 & 255]
        ^ tables[4, state >> 24]
        ^ tables[3, data[at + 4]]
        ^ tables[2, data[at + 5]]
        ^ tables[1, data[at + 6]]
        ^ tables[0, data[at + 7]]
    )


def eight_more() -> Callable[..., np.int64]:
    """Which of the two can be compiled: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may name another processor than this one,
    and LLVM ends the process at an instruction that it does not have."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return _by_instruction if "+sse4.2" in features else _by_tables


_eight_more = eight_more()


@jit(inline="always", fastmath=False)
def _varint(data, at, end):  # type: ignore[no-untyped-def]
    """A number of 7 bits a byte, lowest first, and where it ends; -1 where it does not end in time."""
    value = 0
    for k in range(9):
        if at >= end:
            break
        byte = np.int64(data[at])
        value |= (byte & 127) << (7 * k)
        at += 1
        if byte < 128:
            return value, at
    return -1, end + 1


@jit(fastmath=False)
def _field(data, at, end):  # type: ignore[no-untyped-def]
    """Number, begin and end of the field that begins at a byte of a message; an end of -1 where none does."""
    key, begin = _varint(data, at, end)
    kind, length = key & 7, -1
    if kind == 2:
        length, begin = _varint(data, begin, end)
    elif kind == 0:
        length = _varint(data, begin, end)[1] - begin
    elif kind == 1:
        length = 8
    elif kind == 5:
        length = 4
    if key < 0 or length < 0 or length > end - begin:
        return -1, -1, -1
    return key >> 3, begin, begin + length


@jit(inline="always", fastmath=False)
def _is_right(data, at, end, tables):  # type: ignore[no-untyped-def]
    """Whether the checksum of the bytes from ``at`` to ``end`` stands behind them, as TFRecord files store it."""
    state = np.uint32(0xFFFFFFFF)
    while at + 8 <= end:
        state = _eight_more(data, at, state, tables)
        at += 8
    while at < end:
        state = np.uint32(tables[0, (state ^ data[at]) & 255] ^ state >> np.uint32(8))
        at += 1
    crc = np.int64(state ^ np.uint32(0xFFFFFFFF))
    masked = ((crc >> 15 | crc << 17) & 0xFFFFFFFF) + 0xA282EAD8
    is_right = True
    for k in range(4):
        is_right = is_right and data[end + k] == masked >> (8 * k) & 255
    return is_right


@jit(_BYTES, _BYTES, _WORDS, numba.int64[::1], fastmath=False)
def _look_at_record(data, name, tables, found):  # type: ignore[no-untyped-def]
    at, count = 12, len(data) - 4
    found[0] = 2 - 2 * np.int64(_is_right(data, 12, count, tables))
    found[0] = found[0] if _is_right(data, 0, 8, tables) else 1
    found[1] = found[2] = -1
    while at < count:
        number, entry, features_end = _field(data, at, count)
        if features_end < 0:
            return
        at = features_end
        while number == 1 and entry < features_end:
            number_2, part, entry_end = _field(data, entry, features_end)
            if entry_end < 0:
                return
            entry = entry_end
            is_named, feature, feature_end = False, -1, -1
            while number_2 == 1 and part < entry_end:
                number_3, begin, part = _field(data, part, entry_end)
                if part < 0:
                    return
                if number_3 == 1:
                    if is_named:
                        return
                    is_named = part - begin == len(name)
                    for k in range(len(name)):
                        is_named = is_named and data[begin + k] == name[k]
                elif number_3 == 2:
                    feature, feature_end = begin, part
            if is_named:
                kind, values, values_end = _field(data, feature, feature_end)
                first, begin, end = _field(data, values, values_end)
                if kind == 1 and first == 1:
                    found[1], found[2] = begin, end
                return


def look_at_record(record: bytes, name: str, tables: np.ndarray) -> Tuple[int, int, int]:
    """Whether a record is as it was written, and where in it the first value of a feature is.

    Args:
        record: with its length and checksums, as it stands in a file.
        name: the feature, whose values are bytes.
        tables: uint32 [8, 256]: the effect of each byte on the checksum, with 0 to 7 zero bytes after it.

    Returns:
        0, or 1 where the checksum of the length is wrong, or 2 where that of the content is; begin and end of the
        value, or -1 for both where the message is not as simple as it should be: ``tfrecord.read_features`` is to say
        what it is then.
    """
    found: np.ndarray = np.empty(3, np.int64)
    _look_at_record(np.frombuffer(record, np.uint8), np.frombuffer(name.encode(), np.uint8), tables, found)
    return tuple(found.tolist())


@jit(_BYTES, numba.int64[::1], fastmath=False)
def _plain_jpeg_size(data, found):  # type: ignore[no-untyped-def]
    at, size, seen = 2, len(data), False
    found[:] = 0
    while at + 4 <= size and data[0] == 0xFF and data[1] == 0xD8:
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0xFF, 0x00, 0x01) or 0xD0 <= marker <= 0xD9:
            at += 1
            continue
        begin, end = at + 4, at + 2 + max(2, np.int64(data[at + 2]) << 8 | np.int64(data[at + 3]))
        at, end = end, min(end, size)
        if marker == 0xDA:
            break
        is_mpf = end - begin >= 4 and data[begin] == 77 and data[begin + 1] == 80 and data[begin + 2] == 70
        is_frame = marker in (0xC0, 0xC1, 0xC2)
        is_odd = is_frame and (seen or end - begin < 6 or data[begin] != 8 or data[begin + 5] != 3)
        if marker == 0xE1 or is_odd or (is_mpf and data[begin + 3] == 0):
            found[0] = 0
            return
        if is_frame:
            found[0] = np.int64(data[begin + 3]) << 8 | np.int64(data[begin + 4])
            found[1] = np.int64(data[begin + 1]) << 8 | np.int64(data[begin + 2])
            seen = True


def plain_jpeg_size(data: bytes) -> Optional[Tuple[int, int]]:
    """As ``image_headers.plain_jpeg_size``."""
    found: np.ndarray = np.empty(2, np.int64)
    _plain_jpeg_size(np.frombuffer(data, np.uint8), found)
    width, height = found.tolist()
    return (width, height) if width and height else None


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


@intrinsic  # type: ignore[untyped-decorator]
def _add_up(typing, line, first, weights, count, out, at):  # type: ignore[no-untyped-def]
    """A weighted sum of ``count`` pixels of a line, rounded to 8 bits, into ``out[at]`` and the two after it.

    Red, green, blue and the number that follows are one vector: of that number both ``line`` and ``out`` have to have
    one after the last pixel, and what comes into ``out`` there means nothing.
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number, byte = ir.IntType(32), ir.IntType(8)
        four = ir.VectorType(number, 4)

        def pointer(which, index):  # type: ignore[no-untyped-def]
            array = context.make_array(signature.args[which])(context, builder, arguments[which])
            return builder.gep(array.data, [index])

        pixel, weight = pointer(0, arguments[1]), pointer(2, ir.Constant(ir.IntType(64), 0))
        sums = cgutils.alloca_once_value(builder, ir.Constant(four, [1 << (_WEIGHT_BITS - 1)] * 4))
        nothing, everywhere = ir.Constant(four, ir.Undefined), ir.Constant(four, [0] * 4)
        with cgutils.for_range(builder, arguments[3]) as loop:
            own = builder.load(builder.gep(weight, [loop.index]))
            own = builder.insert_element(nothing, own, ir.Constant(number, 0))
            own = builder.shuffle_vector(own, nothing, everywhere)
            place = builder.gep(pixel, [builder.mul(loop.index, ir.Constant(loop.index.type, 3))])
            values = builder.load(builder.bitcast(place, four.as_pointer()), align=4)
            builder.store(builder.add(builder.load(sums), builder.mul(values, own)), sums)
        found = builder.lshr(builder.load(sums), ir.Constant(four, [_WEIGHT_BITS] * 4))
        found = builder.trunc(found, ir.VectorType(byte, 4))
        builder.store(found, builder.bitcast(pointer(4, arguments[5]), found.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return numba.void(line, numba.int64, weights, numba.int64, out, numba.int64), code


@jit(
    _PIXELS, numba.types.UniTuple(numba.float64, 4), numba.types.UniTuple(numba.int64, 4),
    numba.boolean, numba.uint8[:, :, ::1], fastmath=False,
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
    # As many pixels for each, some with a weight of 0: a processor foresees the end of such loops.
    most = nums.max()
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
    flat_out[3 * width * (height - 1) :] = last[:-1]


def resize(
    pixels: np.ndarray,
    place: Tuple[int, int, int, int],
    box: Tuple[float, float, float, float],
    mirrored: bool,
    out: np.ndarray,
) -> None:
    """As Pillow's bilinear ``resize``, a box of an image of which only a part was decoded.

    Args:
        pixels: uint8 [h, w, 3], the part: the box and as many pixels around it as the filter reaches, unless the image
            ends there.
        place: the part's left and top in the image, and the image's width and height.
        box: left, top, right and bottom in the image.
        mirrored: left for right.
        out: uint8 [height, width, 3], which is written.
    """
    _resize(pixels, tuple(float(side) for side in box), place, mirrored, out)
