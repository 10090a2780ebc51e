"""Computes batch norm with its activation, and weight gradients of convolutions, with functions that Numba compiles.

Each of TensorFlow's operations makes a pass over memory, and a batch norm with its activation takes about twenty of
them in a weight update.  Here a part of the batch stays in the core's cache from step to step, so that memory is read
and written about five times.

A part is the samples that share statistics: a micro-batch, or the micro-batches of a group of replicas.  It has one row
for each value of a channel.  Rows are added up in blocks: in float32 within a block, in float64 over blocks.

The work is divided into tasks, and each thread takes the next one until none is left.  Tasks are independent, so the
result does not depend on the number of threads; and a thread that the system wakes late just takes fewer tasks.

The functions are operations of TensorFlow: its C interface registers them, and calls compiled code without the
interpreter's lock (``tensorflow/c/kernels.h``, ``tensorflow/c/ops.h``).  TensorFlow allocates their results.

``_forward`` and ``_backward`` are long because each is one function for the compiler: divided into inlined functions
they gave the same bytes in twice the time.

Importing this module imports Numba, and compiles the functions or loads them from Numba's cache, which is next to this
file (or in the user's cache folder).
"""

import functools
import math
import os
import threading
from typing import Any, List, NamedTuple, Tuple

import numpy as np

from ipucnn.aliases import NumbaType
from ipucnn.compiled import (
    TENSORFLOW_FUNCTIONS,
    TILE_OUTPUTS,
    VECTOR,
    c_function,
    import_numba,
    tensorflow_library,
)
from ipucnn.compiled import jit as _jit
from ipucnn.machine import operation_threads, operations_at_once

numba = import_numba()
from llvmlite import binding, ir  # noqa: E402 - after ``import_numba``, which sets Numba up
from numba.core import cgutils  # noqa: E402

tensorflow_library()

ACTIVATIONS = ("linear", "relu", "relu6", "swish")
BLOCK_ROWS = 64
# The numbers per thread that make waking another one worthwhile.  If channels are divided among tasks, a task has at
# least THREAD_CHANNELS of them (a cache line), and there are THREAD_TASKS tasks for each thread.
THREAD_NUMBERS = 2**14
THREAD_CHANNELS = 16
THREAD_TASKS = 2
# With fewer numbers, TensorFlow computes batch norm.
LEAST_NUMBERS = 2**17
# Samples per block in the sums of depthwise weight gradients.
BLOCK_SAMPLES = 8
# Rows with few channels are folded until they have this many numbers.
FOLDED_WIDTH = 64
# A tile of the weight gradient of a convolution over all channels has these numbers of input channels, and TILE_OUTPUTS
# output channels.  AVX2 has sixteen registers of VECTOR numbers; the largest tile takes twelve of them, two output
# channels' vectors and an input.
TILE_INPUTS = (6, 4, 2)
# The pixels, input channels and output channels of a block that is multiplied at once.  A column of tiles reads 12 KB,
# which stay in the first cache, and a block has 190 KB, which stay in the second one.
BLOCK_PIXELS = 96
BLOCK_INPUTS = 32 * TILE_INPUTS[0]
BLOCK_OUTPUTS = 16 * TILE_OUTPUTS
# Rows of this many pixels for each pixel of a kernel's row but one are worth the products with zeros between them.
SHARED_COLUMNS = 6

_LINEAR, _RELU, _RELU6, _SWISH = range(4)
_ZERO, _ONE, _SIX = np.float32(0), np.float32(1), np.float32(6)
_INT = numba.int64
_Y1, _Y2, _Y3, _Y4 = (numba.types.Array(numba.float32, dimensions, "C") for dimensions in (1, 2, 3, 4))
_PROGRESS = numba.types.Array(_INT, 1, "C")


@_jit(inline="always")
def _exponential(z):  # type: ignore[no-untyped-def]
    """Returns (e, n) with exp(z) = e * 2**n: Cephes' expf, without a branch."""
    z = min(max(z, np.float32(-87)), np.float32(87))
    n = np.floor(z * np.float32(1.44269504) + np.float32(0.5))
    q = z - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * q + np.float32(1.3981999507e-3)
    p = p * q + np.float32(8.3334519073e-3)
    p = p * q + np.float32(4.1665795894e-2)
    p = p * q + np.float32(1.6666665459e-1)
    p = p * q + np.float32(5.0000001201e-1)
    return p * q * q + q + np.float32(1), n


@numba.extending.intrinsic
def _count(typing: object, progress: NumbaType, place: NumbaType, number: NumbaType) -> Any:
    """Computes progress[place] += number as one atomic operation; returns the value before."""

    def generate(context: NumbaType, builder: NumbaType, signature: NumbaType, given: NumbaType) -> Any:
        array = context.make_array(signature.args[0])(context, builder, given[0])
        address = builder.gep(array.data, [given[1]])
        return builder.atomic_rmw("add", address, given[2], "seq_cst")

    return _INT(progress, _INT, _INT), generate


@numba.extending.intrinsic
def _pointer(typing: object, address: NumbaType, zero: NumbaType) -> Any:
    """Returns an address as a pointer to numbers of the type of ``zero``."""

    def generate(context: NumbaType, builder: NumbaType, signature: NumbaType, given: NumbaType) -> Any:
        return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(zero)(_INT, zero), generate


@numba.extending.intrinsic
def _stack(typing: object) -> Any:
    """Returns the address of CELLS integers in the caller's stack frame."""

    def generate(context: NumbaType, builder: NumbaType, signature: NumbaType, given: NumbaType) -> Any:
        cells = cgutils.alloca_once(builder, context.get_value_type(_INT), size=CELLS)
        return builder.ptrtoint(cells, context.get_value_type(_INT))

    return _INT(), generate


def _tile(inputs: int) -> Any:
    """Returns the function that adds x^T dy, of ``inputs`` columns of x and TILE_OUTPUTS columns of dy, to a sum.

    Compilers do not keep the sums in registers by themselves, so it is written in LLVM's language.  Its arguments are
    the address of x and the bytes from row to row, the same of dy, the number of rows (at least 1), and the address of
    the sum and the bytes from row to row.
    """

    @numba.extending.intrinsic
    def add_products(  # type: ignore[no-untyped-def]
        typing, x, x_pitch, dy, dy_pitch, rows, total, total_pitch
    ):
        def generate(context: NumbaType, builder: NumbaType, signature: NumbaType, given: NumbaType) -> Any:
            x, x_pitch, dy, dy_pitch, rows, total, total_pitch = given
            number, integer = ir.FloatType(), context.get_value_type(_INT)
            vector = ir.VectorType(number, VECTOR)
            undefined, zeros = ir.Constant(vector, ir.Undefined), ir.Constant(vector, [0.0] * VECTOR)
            firsts = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR)
            multiply_add = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{VECTOR}f32"
            )

            def at(address: NumbaType, kind: NumbaType, place: int) -> Any:
                return builder.gep(builder.inttoptr(address, kind.as_pointer()), [integer(place)])

            before, loop, after = builder.block, *map(builder.append_basic_block, ("loop", "after"))
            builder.branch(loop)
            builder.position_at_end(loop)
            counters = [builder.phi(integer) for _ in range(3)]
            sums = [[builder.phi(vector) for _ in range(2)] for _ in range(inputs)]
            row, x_row, dy_row = counters
            dy_vectors = [builder.load(at(dy_row, vector, k), align=4) for k in range(2)]
            new_sums = []
            for i in range(inputs):
                one = builder.insert_element(
                    undefined, builder.load(at(x_row, number, i), align=4), ir.IntType(32)(0)
                )
                factor = builder.shuffle_vector(one, undefined, firsts)
                new_sums.append(
                    [builder.call(multiply_add, [factor, dy_vectors[k], sums[i][k]]) for k in range(2)]
                )
            steps = (integer(1), x_pitch, dy_pitch)
            for counter, first, step in zip(counters, (integer(0), x, dy), steps):
                counter.add_incoming(first, before)
                counter.add_incoming(builder.add(counter, step), loop)
            for i in range(inputs):
                for k in range(2):
                    sums[i][k].add_incoming(zeros, before)
                    sums[i][k].add_incoming(new_sums[i][k], loop)
            next_row = row.incomings[1][0]
            builder.cbranch(builder.icmp_signed("<", next_row, rows), loop, after)
            builder.position_at_end(after)
            for i in range(inputs):
                address = builder.add(total, builder.mul(total_pitch, integer(i)))
                for k in range(2):
                    place = at(address, vector, k)
                    total_ = builder.fadd(builder.load(place, align=4), new_sums[i][k])
                    builder.store(total_, place, align=4)
            return context.get_dummy_value()

        return numba.void(*[_INT] * 7), generate

    return add_products


@numba.extending.intrinsic
def _copy(typing: object, source: NumbaType, target: NumbaType) -> Any:
    """Copies VECTOR numbers from one address to another."""

    def generate(context: NumbaType, builder: NumbaType, signature: NumbaType, given: NumbaType) -> Any:
        pointer = ir.VectorType(ir.FloatType(), VECTOR).as_pointer()
        numbers = builder.load(builder.inttoptr(given[0], pointer), align=4)
        builder.store(numbers, builder.inttoptr(given[1], pointer), align=4)
        return context.get_dummy_value()

    return numba.void(_INT, _INT), generate


_add_six, _add_four, _add_two = map(_tile, TILE_INPUTS)


# The state of one piece of work is a block of memory: counters, each on a cache line of its own, the arguments of the
# function, and the buffers of each thread.  The last thread that lets go of the block frees it, so that a thread which
# wakes late still finds it.
_TAKEN, _ENDED, _HOLDERS, _THREADS = 0, 8, 16, 24
_KIND, _TASKS, _ADDRESS, _BUFFERS, _BUFFER_SIZE, _EPSILON, _GIVEN = range(32, 39)
_BLOCK = 64
# Cells on the stack: handles of tensors, one that is zero, and dimensions.
CELLS, _ZERO_CELL, _DIMENSIONS = 24, 11, 12
# The integers that an operation is given, at most.
_SETTINGS = 9
# Checks of the other threads' progress before the core is yielded to the system; together they take some ten
# microseconds.
_LOOKS = 1000
_NORMALISE, _NORMALISE_GRADIENT, _DEPTHWISE_FILTER, _FILTER = range(4)
# Float32 numbers of buffers per number of a task's row.
_FORWARD_BUFFERS, _BACKWARD_BUFFERS = 6, 12


@_jit(_Y3, _Y1, _Y1, numba.float32, _INT, _INT, _INT, _Y3, _Y2, _Y2, _PROGRESS, _Y1)
def _forward(  # type: ignore[no-untyped-def]
    x, gamma, beta, epsilon, activation, fold, most, y, mean, variance, progress, buffers
):
    """Normalises and activates x.

    A task has up to ``most`` channels of one part; all of its channels if ``fold`` rows are folded into one.
    """
    rows = x.shape[1]
    splits = -(-x.shape[2] // most)
    scratch, factor, offset = buffers[:most], buffers[most : 2 * most], buffers[2 * most : 3 * most]
    power = buffers[3 * most : 4 * most]
    bits = power.view(np.int32)
    total = buffers[4 * most : 6 * most].view(np.float64)
    while True:
        task = _count(progress, _TAKEN, 1)
        if task >= len(x) * splits:
            return
        part, left = task // splits, task % splits * most
        right = min(left + most, x.shape[2])
        width = right - left
        channels = width // fold
        for moment in range(2):
            total[:] = 0.0
            for start in range(0, rows, BLOCK_ROWS):
                scratch[:] = _ZERO
                if moment == 0:
                    for r in range(start, min(start + BLOCK_ROWS, rows)):
                        x_ = x[part, r, left:right]
                        for c in range(width):
                            scratch[c] += x_[c]
                else:
                    for r in range(start, min(start + BLOCK_ROWS, rows)):
                        x_ = x[part, r, left:right]
                        for c in range(width):
                            d = x_[c] - factor[c]
                            scratch[c] += d * d
                for c in range(width):
                    total[c] += scratch[c]
            for c in range(channels):
                moment_of_channel = 0.0
                for k in range(c, width, channels):
                    moment_of_channel += total[k]
                moment_of_channel /= float(rows * fold)
                if moment == 0:
                    mean[part, left + c] = moment_of_channel
                    for k in range(c, width, channels):
                        factor[k] = moment_of_channel
                else:
                    variance[part, left + c] = moment_of_channel
        for c in range(channels):
            channel_factor = gamma[left + c] / np.sqrt(variance[part, left + c] + epsilon)
            channel_offset = beta[left + c] - mean[part, left + c] * channel_factor
            for k in range(c, width, channels):
                factor[k] = channel_factor
                offset[k] = channel_offset
        for r in range(rows):
            x_ = x[part, r, left:right]
            y_ = y[part, r, left:right]
            if activation == _LINEAR:
                for c in range(width):
                    y_[c] = x_[c] * factor[c] + offset[c]
            elif activation == _RELU:
                # Comparisons in this direction let not-a-number pass.
                for c in range(width):
                    z = x_[c] * factor[c] + offset[c]
                    y_[c] = _ZERO if z < _ZERO else z
            elif activation == _RELU6:
                for c in range(width):
                    z = x_[c] * factor[c] + offset[c]
                    y_[c] = _ZERO if z < _ZERO else (_SIX if z > _SIX else z)
            else:
                for c in range(width):
                    e, n = _exponential(-(x_[c] * factor[c] + offset[c]))
                    scratch[c] = e
                    bits[c] = (np.int32(n) + np.int32(127)) << np.int32(23)
                for c in range(width):
                    z = x_[c] * factor[c] + offset[c]
                    y_[c] = z / (_ONE + scratch[c] * power[c])
        _count(progress, _ENDED, 1)


@_jit(_Y3, _Y3, _Y1, _Y1, numba.float32, _INT, _INT, _INT, _Y2, _Y2, _Y3, _Y2, _Y2, _PROGRESS, _Y1)
def _backward(  # type: ignore[no-untyped-def]
    dy, x, gamma, beta, epsilon, activation, fold, most, mean, variance, dx, dgamma, dbeta, progress, buffers
):
    """Computes the gradient of x, and those of gamma and beta for each part; the tasks are those of ``_forward``.

    ``dx`` may be ``dy``: each number is read before it is written.
    """
    rows = x.shape[1]
    splits = -(-x.shape[2] // most)
    block_dy, block_dy_x = buffers[:most], buffers[most : 2 * most]
    centre, factor, offset = (
        buffers[2 * most : 3 * most],
        buffers[3 * most : 4 * most],
        buffers[4 * most : 5 * most],
    )
    power, row = buffers[5 * most : 6 * most], buffers[6 * most : 7 * most]
    bits = power.view(np.int32)
    total, total_x = (
        buffers[8 * most : 10 * most].view(np.float64),
        buffers[10 * most : 12 * most].view(np.float64),
    )
    while True:
        task = _count(progress, _TAKEN, 1)
        if task >= len(x) * splits:
            return
        part, left = task // splits, task % splits * most
        right = min(left + most, x.shape[2])
        width = right - left
        channels = width // fold
        for c in range(channels):
            channel_factor = gamma[left + c] / np.sqrt(variance[part, left + c] + epsilon)
            channel_offset = beta[left + c] - mean[part, left + c] * channel_factor
            for k in range(c, width, channels):
                centre[k] = mean[part, left + c]
                factor[k] = channel_factor
                offset[k] = channel_offset
        total[:] = 0.0
        total_x[:] = 0.0
        for start in range(0, rows, BLOCK_ROWS):
            block_dy[:] = _ZERO
            block_dy_x[:] = _ZERO
            for r in range(start, min(start + BLOCK_ROWS, rows)):
                dy_ = dy[part, r, left:right]
                x_ = x[part, r, left:right]
                dx_ = dx[part, r, left:right]
                # ``row`` is the gradient before the activation.  It is a buffer of its own, because loops over arrays
                # that are the same, as dy and dx may be, are not vectorised.
                if activation == _LINEAR:
                    for c in range(width):
                        row[c] = dy_[c]
                elif activation == _RELU:
                    for c in range(width):
                        z = x_[c] * factor[c] + offset[c]
                        row[c] = dy_[c] if z > _ZERO else _ZERO
                elif activation == _RELU6:
                    for c in range(width):
                        z = x_[c] * factor[c] + offset[c]
                        row[c] = dy_[c] if _ZERO < z < _SIX else _ZERO
                else:
                    for c in range(width):
                        e, n = _exponential(-(x_[c] * factor[c] + offset[c]))
                        row[c] = e
                        bits[c] = (np.int32(n) + np.int32(127)) << np.int32(23)
                    for c in range(width):
                        z = x_[c] * factor[c] + offset[c]
                        s = _ONE / (_ONE + row[c] * power[c])
                        row[c] = dy_[c] * (s + z * s * (_ONE - s))
                # Two loops: LLVM vectorises a loop only up to eight comparisons of its arrays' addresses.
                for c in range(width):
                    dx_[c] = row[c]
                for c in range(width):
                    block_dy[c] += row[c]
                    block_dy_x[c] += row[c] * (x_[c] - centre[c])
            for c in range(width):
                total[c] += block_dy[c]
                total_x[c] += block_dy_x[c]
        # Ioffe and Szegedy 2015, arXiv:1502.03167, section 3.
        for c in range(channels):
            inverse = 1.0 / np.sqrt(np.float64(variance[part, left + c]) + epsilon)
            sum_dy, sum_dy_x = 0.0, 0.0
            for k in range(c, width, channels):
                sum_dy += total[k]
                sum_dy_x += total_x[k]
            dbeta[part, left + c] = sum_dy
            dgamma[part, left + c] = sum_dy_x * inverse
            mean_dy = sum_dy * gamma[left + c] / float(rows * fold)
            mean_dy_x = sum_dy_x * gamma[left + c] / float(rows * fold)
            for k in range(c, width, channels):
                block_dy[k] = inverse * inverse * inverse * mean_dy_x
                block_dy_x[k] = inverse * mean_dy
        for r in range(rows):
            x_ = x[part, r, left:right]
            dx_ = dx[part, r, left:right]
            for c in range(width):
                dx_[c] = dx_[c] * factor[c] - (x_[c] - centre[c]) * block_dy[c] - block_dy_x[c]
        _count(progress, _ENDED, 1)


@_jit(_Y4, _Y4, _INT, _INT, _INT, _Y4, _PROGRESS)
def _depthwise_filter(x, dy, stride, top, left, sums, progress):  # type: ignore[no-untyped-def]
    """Computes weight gradients; a task is that of a block of samples, (kernel height, kernel width, channels)."""
    samples, height, width, channels = x.shape
    while True:
        block = _count(progress, _TAKEN, 1)
        if block >= len(sums):
            return
        sums[block] = _ZERO
        for n in range(block * BLOCK_SAMPLES, min((block + 1) * BLOCK_SAMPLES, samples)):
            for i in range(dy.shape[1]):
                for a in range(sums.shape[1]):
                    h = i * stride + a - top
                    if h < 0 or h >= height:
                        continue
                    for j in range(dy.shape[2]):
                        for b in range(sums.shape[2]):
                            w = j * stride + b - left
                            if w < 0 or w >= width:
                                continue
                            s_, x_, dy_ = sums[block, a, b], x[n, h, w], dy[n, i, j]
                            for c in range(channels):
                                s_[c] += x_[c] * dy_[c]
        _count(progress, _ENDED, 1)


@_jit(inline="always")
def _pitch(channels):  # type: ignore[no-untyped-def]
    """Returns the numbers from pixel to pixel of a block: an odd number of cache lines.

    Pixels that are a power of two apart would have to share a few places of a cache.
    """
    return (-(-channels // 16) | 1) * 16


@_jit(_Y4, _Y4, _INT, _INT, _INT, _INT, _INT, _Y4, _PROGRESS, _Y1)
def _filter(  # type: ignore[no-untyped-def]
    x, dy, stride_down, stride_right, top, left, most, gradient, progress, buffers
):
    """Computes the weight gradient of a convolution over all channels.

    A task is that of one row of the kernel and of up to ``most`` input channels.  Blocks of pixels are copied, so that
    they lie in a cache as they are read, and multiplied: for each pixel of the kernel the sum of x^T dy.

    With wide images and stride 1, a block of x serves all pixels of a kernel's row, from one pixel to the right for
    each: rows of x have the zeros of the padding, and rows of dy as many zeros after them.
    """
    _, height, width, inputs = x.shape
    samples, rows, columns, outputs = dy.shape
    kernel_height, kernel_width = gradient.shape[:2]
    splits = -(-inputs // most)
    x_pitch, dy_pitch = 4 * _pitch(most), 4 * _pitch(min(outputs, BLOCK_OUTPUTS))
    x_block = buffers.ctypes.data
    is_shared = stride_right == 1 and columns >= SHARED_COLUMNS * (kernel_width - 1)
    more = kernel_width - 1 if is_shared else 0
    dy_block = x_block + (BLOCK_PIXELS + kernel_width - 1) * x_pitch
    zeros = dy_block + BLOCK_PIXELS * dy_pitch
    buffers[(zeros - x_block) // 4 :] = _ZERO
    row_pixels = columns + more
    pixels = samples * rows * row_pixels
    while True:
        task = _count(progress, _TAKEN, 1)
        if task >= kernel_height * splits:
            return
        a, first = task // splits, task % splits * most
        taken = min(most, inputs - first)
        gradient[a, :, first : first + taken] = _ZERO
        for output in range(0, outputs, BLOCK_OUTPUTS):
            given = min(BLOCK_OUTPUTS, outputs - output)
            for start in range(0, pixels, BLOCK_PIXELS):
                size = min(BLOCK_PIXELS, pixels - start)
                row, j = start // row_pixels, start % row_pixels
                for p in range(size):
                    source = zeros
                    if j < columns:
                        source = dy.ctypes.data + 4 * ((row * columns + j) * outputs + output)
                    for c in range(0, 4 * given, 4 * VECTOR):
                        _copy(source + c, dy_block + p * dy_pitch + c)
                    j += 1
                    if j == row_pixels:
                        row, j = row + 1, 0
                for b in range(kernel_width):
                    from_block = x_block + b * x_pitch if is_shared else x_block
                    first_column = 0 if is_shared else b
                    row, j = start // row_pixels, start % row_pixels
                    n, i = row // rows, row % rows
                    for p in range(0 if b == 0 or not is_shared else size + more, size + more):
                        h, w = i * stride_down + a - top, j * stride_right + first_column - left
                        source = zeros
                        if 0 <= h < height and 0 <= w < width and n < samples:
                            source = x.ctypes.data + 4 * (((n * height + h) * width + w) * inputs + first)
                        for c in range(0, 4 * taken, 4 * VECTOR):
                            _copy(source + c, x_block + p * x_pitch + c)
                        j += 1
                        if j == row_pixels:
                            i, j = i + 1, 0
                            if i == rows:
                                n, i = n + 1, 0
                    for o in range(0, given, TILE_OUTPUTS):
                        c, from_dy = 0, dy_block + 4 * o
                        total = gradient[a, b, first, output + o :].ctypes.data
                        while c < taken:
                            from_x, to = from_block + 4 * c, total + 4 * c * outputs
                            if taken - c >= 6:
                                _add_six(from_x, x_pitch, from_dy, dy_pitch, size, to, 4 * outputs)
                                c += 6
                            elif taken - c >= 4:
                                _add_four(from_x, x_pitch, from_dy, dy_pitch, size, to, 4 * outputs)
                                c += 4
                            else:
                                _add_two(from_x, x_pitch, from_dy, dy_pitch, size, to, 4 * outputs)
                                c += 2
        _count(progress, _ENDED, 1)


# C functions.  Addresses are integers, which processors pass as they pass pointers.


def _function(name: str, result: NumbaType, *arguments: NumbaType) -> Any:
    assert name in TENSORFLOW_FUNCTIONS or not name.startswith("TF_"), name
    return numba.types.ExternalFunction(name, result(*arguments))


_NONE, _INT32 = numba.void, numba.int32
_aligned_alloc = _function("aligned_alloc", _INT, _INT, _INT)
_free = _function("free", _NONE, _INT)
_read = _function("read", _INT, _INT32, _INT, _INT)
_write = _function("write", _INT, _INT32, _INT, _INT)
_sched_yield = _function("sched_yield", _INT32)
_new_status = _function("TF_NewStatus", _INT)
_delete_status = _function("TF_DeleteStatus", _NONE, _INT)
_get_code = _function("TF_GetCode", _INT32, _INT)
_set_status = _function("TF_SetStatus", _NONE, _INT, _INT32, _INT)
_get_input = _function("TF_GetInput", _NONE, _INT, _INT32, _INT, _INT)
_allocate_output = _function("TF_AllocateOutput", _INT, _INT, _INT32, _INT32, _INT, _INT32, _INT, _INT)
_forward_input_or_allocate_output = _function(
    "TF_ForwardInputOrAllocateOutput", _INT, _INT, _INT, _INT32, _INT32, _INT, _INT32, _INT, _INT
)
_tensor_data = _function("TF_TensorData", _INT, _INT)
_count_elements = _function("TF_TensorElementCount", _INT, _INT)
_num_dims = _function("TF_NumDims", _INT32, _INT)
_dim = _function("TF_Dim", _INT, _INT, _INT32)
_delete_tensor = _function("TF_DeleteTensor", _NONE, _INT)
_failure = _function("TF_OpKernelContext_Failure", _NONE, _INT, _INT)
_set_unknown_shape = _function("TF_ShapeInferenceContextSetUnknownShape", _NONE, _INT, _INT)
_new_shape = _function("TF_NewShapeHandle", _INT)
_delete_shape = _function("TF_DeleteShapeHandle", _NONE, _INT)
_get_input_shape = _function("TF_ShapeInferenceContextGetInput", _NONE, _INT, _INT32, _INT, _INT)
_set_output_shape = _function("TF_ShapeInferenceContextSetOutput", _NONE, _INT, _INT32, _INT, _INT)

# TF_DataType and TF_Code of tensorflow/c.
_FLOAT = 1
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED = 3, 8


@_jit(inline="always")
def _integers(address, size):  # type: ignore[no-untyped-def]
    return numba.carray(_pointer(address, np.int64(0)), size, np.int64)


@_jit(inline="always")
def _floats(address, shape):  # type: ignore[no-untyped-def]
    return numba.carray(_pointer(address, np.float32(0)), shape, np.float32)


# An assignment of a slice would take longer to compile than a whole kernel.
@_jit(inline="always")
def _copy_integers(source, number, target, first):  # type: ignore[no-untyped-def]
    for i in range(number):
        target[first + i] = source[i]


def _take_tasks(block):  # type: ignore[no-untyped-def]
    """Takes tasks of a piece of work until none is left."""
    state = _integers(block, _BLOCK)
    size = state[_BUFFER_SIZE]
    buffers = _floats(state[_BUFFERS] + _count(state, _THREADS, 1) * size * 4, size)
    a, kind = state[_GIVEN:], state[_KIND]
    if kind == _DEPTHWISE_FILTER:
        _depthwise_filter(
            _floats(a[0], (a[1], a[2], a[3], a[4])), _floats(a[5], (a[6], a[7], a[8], a[9])), a[12], a[13], a[14],
            _floats(a[15], (state[_TASKS], a[10], a[11], a[4])), state,
        )  # fmt: skip
        return
    if kind == _FILTER:
        _filter(
            _floats(a[0], (a[1], a[2], a[3], a[4])), _floats(a[5], (a[6], a[7], a[8], a[9])), a[12], a[13], a[14],
            a[15], a[16], _floats(a[17], (a[10], a[11], a[4], a[9])), state, buffers,
        )  # fmt: skip
        return
    epsilon = _floats(block + 8 * _EPSILON, 1)[0]
    shape, fold, most, activation = (a[0], a[1], a[2]), a[3], a[4], a[5]
    channels = a[2] // fold
    x, gamma, beta = _floats(a[6], shape), _floats(a[7], (channels,)), _floats(a[8], (channels,))
    mean, variance = _floats(a[9], (a[0], channels)), _floats(a[10], (a[0], channels))
    if kind == _NORMALISE:
        _forward(
            x, gamma, beta, epsilon, activation, fold, most, _floats(a[11], shape), mean, variance, state, buffers,
        )  # fmt: skip
    else:
        _backward(
            _floats(a[12], shape), x, gamma, beta, epsilon, activation, fold, most, mean, variance,
            _floats(a[11], shape), _floats(a[13], (a[0], channels)), _floats(a[14], (a[0], channels)), state,
            buffers,
        )  # fmt: skip


# It is called by name: Numba compiles a function again into each one that calls it, here the four kernels into eleven.
_TASKS_C = c_function(_take_tasks, _INT)
binding.add_symbol("ipucnn_take_tasks", _TASKS_C.address)
_work = _function("ipucnn_take_tasks", _NONE, _INT)


@_jit(_INT, _INT)
def _let_go(block, holders):  # type: ignore[no-untyped-def]
    if _count(_integers(block, _BLOCK), _HOLDERS, -holders) == holders:
        _free(block)


@_jit(_INT, _INT, _INT, _INT, _INT, _INT, _INT, returns=_INT)
def _new_block(kind, tasks, threads, buffer_size, more, cells, status):  # type: ignore[no-untyped-def]
    """Returns a block of work, held once, with ``more`` float32 numbers after the buffers; 0 after an error."""
    if _get_code(status) != 0:
        return 0
    buffer_size = -(-buffer_size // 16) * 16
    block = _aligned_alloc(64, 8 * _BLOCK + -(-4 * (threads * buffer_size + more) // 64) * 64)
    if block:
        state = _integers(block, _BLOCK)
        state[:] = 0
        state[_HOLDERS], state[_ADDRESS], state[_KIND], state[_TASKS] = 1, block, kind, tasks
        state[_BUFFERS], state[_BUFFER_SIZE] = block + 8 * _BLOCK, buffer_size
    else:
        _set_status(status, _RESOURCE_EXHAUSTED, cells + 8 * _ZERO_CELL)
    return block


@_jit(_INT, _INT)
def _give_epsilon(block, tensor):  # type: ignore[no-untyped-def]
    """Writes the number of a tensor into a block of work."""
    _floats(block + 8 * _EPSILON, 1)[0] = _floats(_tensor_data(tensor), 1)[0]


@_jit(_INT, _INT, _INT)
def _share(block, threads, pipe):  # type: ignore[no-untyped-def]
    """Does a piece of work with up to ``threads`` threads: this one, and those that read its address from the pipe."""
    state = _integers(block, _BLOCK)
    _count(state, _HOLDERS, threads - 1)
    for _ in range(threads - 1):
        if _write(pipe, block + 8 * _ADDRESS, 8) != 8:  # The pipe is full: this thread does more of the work.
            _let_go(block, 1)
    _work(block)
    looks = 0
    while _count(state, _ENDED, 0) < state[_TASKS]:
        looks += 1
        if looks % _LOOKS == 0:
            _sched_yield()


@_jit(_INT)
def _serve(pipe):  # type: ignore[no-untyped-def]
    """Helps with each piece of work whose address comes through the pipe, until the pipe is closed."""
    cell = _stack()
    while True:
        size = _read(pipe, cell, 8)
        if size == 8:
            block = _integers(cell, 1)[0]
            _work(block)
            _let_go(block, 1)
        elif size == 0:
            return


# The compute functions of the operations.  Cells on the stack keep the handles of tensors, inputs first, and from
# _DIMENSIONS on the dimensions of an output.


@_jit(_INT, _INT, _INT, _INT, returns=numba.boolean)
def _take_inputs(context, number, cells, status):  # type: ignore[no-untyped-def]
    _integers(cells, CELLS)[:] = 0
    for i in range(number):
        _get_input(context, i, cells + 8 * i, status)
    return _get_code(status) == 0


@_jit(numba.boolean, _INT, _INT, returns=numba.boolean)
def _is_accepted(is_consistent, cells, status):  # type: ignore[no-untyped-def]
    """Returns whether the inputs of an operation belong together; an error is in the status if they do not."""
    if not is_consistent:
        _set_status(status, _INVALID_ARGUMENT, cells + 8 * _ZERO_CELL)
    return is_consistent


@_jit(_INT, _INT, _INT)
def _end(context, cells, status):  # type: ignore[no-untyped-def]
    """Deletes the handles of tensors, and reports an error if there was one."""
    for tensor in _integers(cells, _DIMENSIONS):
        if tensor:
            _delete_tensor(tensor)
    if _get_code(status) != 0:
        _failure(context, status)
    _delete_status(status)


@_jit(_INT, _INT, _INT, _INT, _INT, _INT, _INT, returns=_INT)
def _output(context, number, cell, rank, may_reuse, cells, status):  # type: ignore[no-untyped-def]
    """Allocates an output with the dimensions in the cells; returns the address of its numbers, or 0.

    If ``may_reuse``, it is the memory of input 0, if nobody else reads that.
    """
    tensors = _integers(cells, CELLS)
    size = 4
    for dimension in tensors[_DIMENSIONS : _DIMENSIONS + rank]:
        size *= dimension
    dimensions = cells + 8 * _DIMENSIONS
    if may_reuse:
        tensors[_ZERO_CELL] = 0
        tensors[cell] = _forward_input_or_allocate_output(
            context, cells + 8 * _ZERO_CELL, 1, number, dimensions, rank, cells + 8 * _ZERO_CELL, status
        )
    else:
        tensors[cell] = _allocate_output(context, number, _FLOAT, dimensions, rank, size, status)
    tensors[_ZERO_CELL] = 0
    return _tensor_data(tensors[cell]) if _get_code(status) == 0 else 0


@_jit(_INT, _INT, returns=_INT)
def _copy_dimensions(tensor, cells):  # type: ignore[no-untyped-def]
    """Copies the dimensions of a tensor to the cells; returns their number."""
    rank = _num_dims(tensor)
    for k in range(rank):
        _integers(cells, CELLS)[_DIMENSIONS + k] = _dim(tensor, k)
    return rank


@_jit(_INT)
def _compute_normalise(context):  # type: ignore[no-untyped-def]
    """Computes (x, gamma, beta, epsilon, settings) -> (y, mean, variance)."""
    cells, status = _stack(), _new_status()
    tensors = _integers(cells, CELLS)
    if _take_inputs(context, 5, cells, status):
        s = _integers(_tensor_data(tensors[4]), _SETTINGS)
        channels = s[2] // s[3]
        is_consistent = _count_elements(tensors[0]) == s[0] * s[1] * s[2] and s[0] * s[1] * s[2] > 0
        for i in (1, 2):
            is_consistent &= _count_elements(tensors[i]) == channels
        if _is_accepted(is_consistent, cells, status):
            rank = _copy_dimensions(tensors[0], cells)
            y = _output(context, 0, 5, rank, False, cells, status)
            tensors[_DIMENSIONS], tensors[_DIMENSIONS + 1] = s[0], channels
            mean = _output(context, 1, 6, 2, False, cells, status)
            variance = _output(context, 2, 7, 2, False, cells, status)
            block = _new_block(_NORMALISE, s[6], s[7], _FORWARD_BUFFERS * s[4], 0, cells, status)
            if block:
                _give_epsilon(block, tensors[3])
                a = _integers(block, _BLOCK)[_GIVEN:]
                _copy_integers(s, 6, a, 0)
                for i in range(3):
                    a[6 + i] = _tensor_data(tensors[i])
                a[9], a[10], a[11] = mean, variance, y
                _share(block, s[7], s[8])
                _let_go(block, 1)
    _end(context, cells, status)


@_jit(_Y2, _Y1)
def _add_up(rows, total):  # type: ignore[no-untyped-def]
    """Adds up rows in float64, in their order."""
    for c in range(len(total)):
        number = 0.0
        for r in range(len(rows)):
            number += rows[r, c]
        total[c] = number


@_jit(_INT)
def _compute_normalise_gradient(context):  # type: ignore[no-untyped-def]
    """Computes (dy, x, gamma, beta, mean, variance, epsilon, settings) -> (dx, dgamma, dbeta)."""
    cells, status = _stack(), _new_status()
    tensors = _integers(cells, CELLS)
    if _take_inputs(context, 8, cells, status):
        s = _integers(_tensor_data(tensors[7]), _SETTINGS)
        channels = s[2] // s[3]
        is_consistent = s[0] * s[1] * s[2] > 0
        for i in range(2):
            is_consistent &= _count_elements(tensors[i]) == s[0] * s[1] * s[2]
        for i in (2, 3):
            is_consistent &= _count_elements(tensors[i]) == channels
        for i in (4, 5):
            is_consistent &= _count_elements(tensors[i]) == s[0] * channels
        if _is_accepted(is_consistent, cells, status):
            rank = _copy_dimensions(tensors[1], cells)
            dx = _output(context, 0, 8, rank, True, cells, status)
            tensors[_DIMENSIONS] = channels
            dgamma = _output(context, 1, 9, 1, False, cells, status)
            dbeta = _output(context, 2, 10, 1, False, cells, status)
            more = 2 * s[0] * channels
            block = _new_block(_NORMALISE_GRADIENT, s[6], s[7], _BACKWARD_BUFFERS * s[4], more, cells, status)
            if block:
                _give_epsilon(block, tensors[6])
                state = _integers(block, _BLOCK)
                a = state[_GIVEN:]
                _copy_integers(s, 6, a, 0)
                for i in range(5):
                    a[6 + i] = _tensor_data(tensors[1 + i])
                a[11], a[12] = dx, _tensor_data(tensors[0])
                a[13] = state[_BUFFERS] + s[7] * state[_BUFFER_SIZE] * 4
                a[14] = a[13] + 4 * s[0] * channels
                _share(block, s[7], s[8])
                _add_up(_floats(a[13], (s[0], channels)), _floats(dgamma, channels))
                _add_up(_floats(a[14], (s[0], channels)), _floats(dbeta, channels))
                _let_go(block, 1)
    _end(context, cells, status)


@_jit(_INT, _INT, _INT, returns=numba.boolean)
def _are_of_a_convolution(x, dy, kernel):  # type: ignore[no-untyped-def]
    """Returns whether the ranks, samples and input channels of these tensors belong together."""
    has_ranks = _num_dims(x) == 4 and _num_dims(dy) == 4 and _num_dims(kernel) == 4
    return has_ranks and _dim(x, 0) == _dim(dy, 0) and _dim(x, 3) == _dim(kernel, 2)


@_jit(inline="always")
def _give_convolution(block, x, dy, kernel):  # type: ignore[no-untyped-def]
    """Writes x, dy and the kernel's size into the first twelve arguments of a block of work; returns all arguments."""
    given = _integers(block, _BLOCK)[_GIVEN:]
    given[0], given[5] = _tensor_data(x), _tensor_data(dy)
    for k in range(4):
        given[1 + k], given[6 + k] = _dim(x, k), _dim(dy, k)
    given[10], given[11] = _dim(kernel, 0), _dim(kernel, 1)
    return given


@_jit(_INT)
def _compute_depthwise_filter(context):  # type: ignore[no-untyped-def]
    """Computes (kernel, x, dy, settings) -> the gradient of the kernel."""
    cells, status = _stack(), _new_status()
    tensors = _integers(cells, CELLS)
    if _take_inputs(context, 4, cells, status):
        s = _integers(_tensor_data(tensors[3]), _SETTINGS)
        x, dy, kernel = tensors[1], tensors[2], tensors[0]
        is_consistent = _are_of_a_convolution(x, dy, kernel)
        is_consistent = is_consistent and _dim(dy, 3) == _dim(x, 3) and _dim(kernel, 3) == 1
        if _is_accepted(is_consistent, cells, status):
            total = _output(context, 0, 4, _copy_dimensions(kernel, cells), False, cells, status)
            blocks = -(-_dim(x, 0) // BLOCK_SAMPLES)
            size = _dim(kernel, 0) * _dim(kernel, 1) * _dim(x, 3)
            block = _new_block(_DEPTHWISE_FILTER, blocks, s[3], 0, blocks * size, cells, status)
            if block:
                a = _give_convolution(block, x, dy, kernel)
                _copy_integers(s, 3, a, 12)
                a[15] = _integers(block, _BLOCK)[_BUFFERS]
                _share(block, s[3], s[4])
                _add_up(_floats(a[15], (blocks, size)), _floats(total, size))
                _let_go(block, 1)
    _end(context, cells, status)


@_jit(_INT)
def _compute_filter(context):  # type: ignore[no-untyped-def]
    """Computes (kernel, x, dy, settings) -> the gradient of the kernel, of a convolution over all channels."""
    cells, status = _stack(), _new_status()
    tensors = _integers(cells, CELLS)
    if _take_inputs(context, 4, cells, status):
        s = _integers(_tensor_data(tensors[3]), _SETTINGS)
        x, dy, kernel = tensors[1], tensors[2], tensors[0]
        is_consistent = _are_of_a_convolution(x, dy, kernel) and _dim(dy, 3) == _dim(kernel, 3)
        is_consistent = is_consistent and _dim(x, 3) % VECTOR == 0 and _dim(dy, 3) % TILE_OUTPUTS == 0
        if _is_accepted(is_consistent, cells, status):
            gradient = _output(context, 0, 4, _copy_dimensions(kernel, cells), False, cells, status)
            outputs = min(_dim(dy, 3), BLOCK_OUTPUTS)
            x_pixels = BLOCK_PIXELS + _dim(kernel, 1) - 1
            buffer_size = x_pixels * _pitch(s[4]) + BLOCK_PIXELS * _pitch(outputs) + max(s[4], outputs)
            block = _new_block(_FILTER, s[5], s[6], buffer_size, 0, cells, status)
            if block:
                a = _give_convolution(block, x, dy, kernel)
                _copy_integers(s, 5, a, 12)
                a[17] = gradient
                _share(block, s[6], s[7])
                _let_go(block, 1)
    _end(context, cells, status)


@_jit(_INT, _INT)
def _infer_shapes(context, status):  # type: ignore[no-untyped-def]
    """Gives the first output the shape of the first input; the others are set where the operation is made."""
    shape = _new_shape()
    _set_unknown_shape(context, status)
    _get_input_shape(context, 0, shape, status)
    _set_output_shape(context, 0, shape, status)
    _delete_shape(shape)


class _Parts(NamedTuple):
    """The division of a normalisation into tasks.

    Attributes:
        shape: (parts, folded rows, numbers of a folded row).
        fold: the number of rows that are folded into one, because short inner loops are slow.
        most: the maximum number of a row's numbers in one task.
        tasks: the number of tasks.
    """

    shape: Tuple[int, int, int]
    fold: int
    most: int
    tasks: int


@functools.lru_cache(maxsize=None)
def _cut(shape: Tuple[int, ...], parts: int, cores: int) -> _Parts:
    channels = shape[-1]
    numbers = math.prod(shape)
    rows, fold = numbers // (parts * channels), 1
    while fold * channels < FOLDED_WIDTH and rows % (2 * fold) == 0:
        fold *= 2
    width = fold * channels
    # A task has all channels, or fewer if there are too few parts to keep all threads busy.
    step = width if fold > 1 else 1
    tasks_per_part = -(-cores * THREAD_TASKS // parts)
    numbers_per_task = max(THREAD_CHANNELS, -(-width // tasks_per_part))
    most = min(width, -(-numbers_per_task // step) * step)
    return _Parts((parts, rows // fold, width), fold, most, parts * -(-width // most))


def is_faster(numbers: int, parts: int, channels: int) -> bool:
    """Returns whether normalising ``numbers`` numbers is faster here than with TensorFlow's operations.

    It has to have work for all cores: TensorFlow's operations also divide a part's rows.
    """
    tasks = parts * max(1, channels // THREAD_CHANNELS)
    return numbers >= LEAST_NUMBERS and tasks >= operation_threads()


def _threads(numbers: int, tasks: int) -> int:
    """Returns the number of threads that share ``tasks`` tasks with ``numbers`` numbers."""
    return max(1, min(operation_threads(), numbers // THREAD_NUMBERS, tasks))


_helpers: List[threading.Thread] = []


@functools.lru_cache(maxsize=None)
def _pipe() -> Tuple[int, int]:
    """Returns the pipe that takes the addresses of pieces of work to the helpers; writing to it never waits."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    return reads, writes


def _pipe_to_helpers(threads: int) -> int:
    """Returns the end of the pipe to write to, after starting as many helpers as ``threads`` threads can need."""
    if threads == 1:
        return -1
    reads, writes = _pipe()
    while len(_helpers) < (threads - 1) * operations_at_once():
        _helpers.append(threading.Thread(target=_serve, args=(reads,), name="kernels", daemon=True))
        _helpers[-1].start()
    return writes


def settings_of_norm(shape: Tuple[int, ...], parts: int, activation: str) -> List[int]:
    """Returns the integers that the operations of a normalisation are given.

    Args:
        shape: that of its input, (parts * n, ..., channels).
        parts: the number of parts.
        activation: one of ``ACTIVATIONS``.
    """
    cut = _cut(shape, parts, operation_threads())
    threads = _threads(math.prod(shape), cut.tasks)
    activation_number = ACTIVATIONS.index(activation)
    return [
        *cut.shape, cut.fold, cut.most, activation_number, cut.tasks, threads, _pipe_to_helpers(threads)
    ]  # fmt: skip


def settings_of_depthwise_filter(
    dy_shape: Tuple[int, ...], kernel_height: int, stride: int, before: Tuple[int, int]
) -> List[int]:
    """Returns the integers that the weight gradient of a depthwise convolution is given.

    Args:
        dy_shape: the shape of the convolution's output.
        kernel_height: the rows of the kernel.
        stride: the stride in both dimensions.
        before: rows of zeros above, and columns of zeros left of the image.
    """
    threads = _threads(math.prod(dy_shape) * kernel_height, -(-dy_shape[0] // BLOCK_SAMPLES))
    return [stride, *before, threads, _pipe_to_helpers(threads)]


def settings_of_filter(
    kernel_shape: Tuple[int, ...],
    dy_shape: Tuple[int, ...],
    strides: Tuple[int, int],
    before: Tuple[int, int],
) -> List[int]:
    """Returns the integers that the weight gradient of a convolution over all channels is given.

    Args:
        kernel_shape: (height, width, input channels, output channels).
        dy_shape: the shape of the convolution's output.
        strides: down and right.
        before: rows of zeros above, and columns of zeros left of the image.
    """
    height, width, inputs, _ = kernel_shape
    # Input channels are divided among tasks if the kernel has too few rows to keep all threads busy.
    tasks_per_row = -(-operation_threads() * THREAD_TASKS // height) if operation_threads() > 1 else 1
    # Whole tiles and whole vectors: a copied vector must not reach beyond the last pixel.
    step = math.lcm(TILE_INPUTS[0], VECTOR)
    most = min(BLOCK_INPUTS, -(-inputs // (step * tasks_per_row)) * step)
    tasks = height * -(-inputs // most)
    threads = _threads(math.prod(dy_shape) * height * width, tasks)
    return [*strides, *before, most, tasks, threads, _pipe_to_helpers(threads)]


# TensorFlow calls these.  The first argument of a compute function is the state of the operation, which has none.
def _normalise(state, context):  # type: ignore[no-untyped-def]
    _compute_normalise(context)


def _normalise_gradient(state, context):  # type: ignore[no-untyped-def]
    _compute_normalise_gradient(context)


def _depthwise_filter_gradient(state, context):  # type: ignore[no-untyped-def]
    _compute_depthwise_filter(context)


def _filter_gradient(state, context):  # type: ignore[no-untyped-def]
    _compute_filter(context)


def _shapes(context, status):  # type: ignore[no-untyped-def]
    _infer_shapes(context, status)


CALLBACKS = {
    function.__name__: c_function(function, _INT, _INT)
    for function in (_normalise, _normalise_gradient, _depthwise_filter_gradient, _filter_gradient, _shapes)
}
"""The C functions by name; they have to live as long as the process."""
