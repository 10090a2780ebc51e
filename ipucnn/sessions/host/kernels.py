"""Computes batch norm with its activation, and depthwise weight gradients, with functions that Numba compiles.

Each of TensorFlow's operations makes a pass over memory, and a batch norm with its activation takes about twenty of
them in a weight update.  Here a part of the batch stays in the core's cache from step to step, so that memory is read
and written about five times.

A part is the samples that share statistics: a micro-batch, or the micro-batches of a group of replicas.  It has one row
for each value of a channel.  Rows are added up in blocks: in float32 within a block, in float64 over blocks.

The work is divided into tasks, and each thread takes the next one until none is left.  Tasks are independent, so the
result does not depend on the number of threads; and a thread that the system wakes late just takes fewer tasks.

``_forward`` and ``_backward`` are long because each is one function for the compiler: divided into inlined functions
they gave the same bytes in twice the time.

Importing this module imports Numba, and compiles the functions or loads them from Numba's cache, which is next to this
file (or in the user's cache folder).
"""

import contextlib
import functools
import math
import queue
import threading
import time
from typing import Any, Callable, List, NamedTuple, Tuple

import numpy as np

from ipucnn.aliases import NumbaType
from ipucnn.compiled import import_numba
from ipucnn.compiled import jit as _jit
from ipucnn.machine import operation_threads, operations_at_once

numba = import_numba()

ACTIVATIONS = ("linear", "relu", "relu6", "swish")
BLOCK_ROWS = 64
# The numbers per thread that make waking another one worthwhile.  If channels are divided among tasks, a task has at
# least THREAD_CHANNELS of them (a cache line), and there are THREAD_TASKS tasks for each thread.
THREAD_NUMBERS = 2**14
THREAD_CHANNELS = 16
THREAD_TASKS = 2
# With fewer numbers, TensorFlow's call of a Python function takes longer than the passes over memory that it saves.
LEAST_NUMBERS = 2**17
# Samples per block in the sums of depthwise weight gradients.
BLOCK_SAMPLES = 8
# Rows with few channels are folded until they have this many numbers.
FOLDED_WIDTH = 64
ALIGNMENT = 64  # bytes; TensorFlow takes arrays with this alignment without a copy

_LINEAR, _RELU, _RELU6, _SWISH = range(4)
_ZERO, _ONE, _SIX = np.float32(0), np.float32(1), np.float32(6)


def _array(kind: NumbaType, dimensions: int, readonly: bool = False) -> Any:
    return numba.types.Array(kind, dimensions, "C", readonly=readonly)


_X1, _X2, _X3, _X4 = (_array(numba.float32, dimensions, readonly=True) for dimensions in (1, 2, 3, 4))
_Y2, _Y3, _Y4 = (_array(numba.float32, dimensions) for dimensions in (2, 3, 4))
_INT = numba.int64


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


# The progress of one piece of work: the numbers of tasks taken and tasks ended, each on its own cache line.
_TAKEN, _ENDED, _PROGRESS_SIZE = 0, 8, 16
_PROGRESS = _array(_INT, 1)


@numba.extending.intrinsic
def _count(typing: object, progress: NumbaType, place: NumbaType, number: NumbaType) -> Any:
    """Computes progress[place] += number as one atomic operation; returns the value before."""

    def generate(context: NumbaType, builder: NumbaType, signature: NumbaType, given: NumbaType) -> Any:
        array = context.make_array(signature.args[0])(context, builder, given[0])
        address = builder.gep(array.data, [given[1]])
        return builder.atomic_rmw("add", address, given[2], "seq_cst")

    return _INT(progress, _INT, _INT), generate


@_jit(_PROGRESS, _INT, _INT, returns=numba.boolean)
def _have_ended(progress, tasks, looks):  # type: ignore[no-untyped-def]
    """Returns whether all tasks have ended, after checking at most ``looks`` times."""
    for _ in range(looks):  # noqa: SIM110 - Numba compiles no generators into any()
        if _count(progress, _ENDED, 0) >= tasks:
            return True
    return False


@_jit(_X3, _X1, _X1, numba.float32, _INT, _INT, _INT, _Y3, _Y2, _Y2, _PROGRESS)
def _forward(  # type: ignore[no-untyped-def]
    x, gamma, beta, epsilon, activation, fold, most, y, mean, variance, progress
):
    """Normalises and activates x.

    A task has up to ``most`` channels of one part; all of its channels if ``fold`` rows are folded into one.
    """
    rows = x.shape[1]
    splits = -(-x.shape[2] // most)
    scratch, factor, offset = (
        np.empty(most, np.float32),
        np.empty(most, np.float32),
        np.empty(most, np.float32),
    )
    bits = np.empty(most, np.int32)
    power = bits.view(np.float32)
    total = np.empty(most, np.float64)
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


@_jit(_X3, _X3, _X1, _X1, numba.float32, _INT, _INT, _INT, _X2, _X2, _Y3, _Y2, _Y2, _PROGRESS)
def _backward(  # type: ignore[no-untyped-def]
    dy,
    x,
    gamma,
    beta,
    epsilon,
    activation,
    fold,
    most,
    mean,
    variance,
    dx,
    dgamma,
    dbeta,
    progress,
):
    """Computes the gradient of x, and those of gamma and beta for each part; the tasks are those of ``_forward``."""
    rows = x.shape[1]
    splits = -(-x.shape[2] // most)
    block_dy, block_dy_x = np.empty(most, np.float32), np.empty(most, np.float32)
    centre, factor, offset = (
        np.empty(most, np.float32),
        np.empty(most, np.float32),
        np.empty(most, np.float32),
    )
    bits = np.empty(most, np.int32)
    power = bits.view(np.float32)
    total, total_x = np.empty(most, np.float64), np.empty(most, np.float64)
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
                # dx first receives the gradient before the activation.
                if activation == _LINEAR:
                    for c in range(width):
                        dx_[c] = dy_[c]
                elif activation == _RELU:
                    for c in range(width):
                        z = x_[c] * factor[c] + offset[c]
                        dx_[c] = dy_[c] if z > _ZERO else _ZERO
                elif activation == _RELU6:
                    for c in range(width):
                        z = x_[c] * factor[c] + offset[c]
                        dx_[c] = dy_[c] if _ZERO < z < _SIX else _ZERO
                else:
                    for c in range(width):
                        e, n = _exponential(-(x_[c] * factor[c] + offset[c]))
                        dx_[c] = e
                        bits[c] = (np.int32(n) + np.int32(127)) << np.int32(23)
                    for c in range(width):
                        z = x_[c] * factor[c] + offset[c]
                        s = _ONE / (_ONE + dx_[c] * power[c])
                        dx_[c] = dy_[c] * (s + z * s * (_ONE - s))
                for c in range(width):
                    block_dy[c] += dx_[c]
                    block_dy_x[c] += dx_[c] * (x_[c] - centre[c])
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


@_jit(_X4, _X4, _INT, _INT, _INT, _Y4, _PROGRESS)
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


# Checks of the other threads' progress before the core is yielded to the system; together they take some ten
# microseconds.
_LOOKS = 1000

_Call = Tuple[Callable[..., None], Tuple[object, ...]]
_calls: "queue.SimpleQueue[_Call]" = queue.SimpleQueue()
_lock = threading.Lock()
_helpers: List[threading.Thread] = []


def _help() -> None:
    while True:
        function, arguments = _calls.get()
        # A thread that cannot allocate its buffers takes no task; the waiting thread then does all of them.
        with contextlib.suppress(MemoryError):
            function(*arguments)
        del function, arguments  # This releases the arrays of the call before the next one arrives.


def _share(function: Callable[..., None], threads: int, tasks: int, *given: object) -> None:
    """Calls ``function(*given, progress)`` in several threads, which take the tasks in turn.

    Args:
        function: the compiled function, which takes tasks until none is left.
        threads: the maximum number of busy threads.
        tasks: the number of tasks.
        given: the arguments of the function.
    """
    progress: np.ndarray = np.zeros(_PROGRESS_SIZE, np.int64)
    others = min(threads, tasks) - 1
    if others < 1:
        function(*given, progress)
        return
    num_helpers = others * operations_at_once()
    if len(_helpers) < num_helpers:
        with _lock:
            while len(_helpers) < num_helpers:
                _helpers.append(threading.Thread(target=_help, name="kernels", daemon=True))
                _helpers[-1].start()
    for _ in range(others):
        _calls.put((function, (*given, progress)))
    function(*given, progress)
    while not _have_ended(progress, tasks, _LOOKS):
        time.sleep(0)


def is_faster(numbers: int, parts: int, channels: int) -> bool:
    """Returns whether normalising ``numbers`` numbers is faster here than with TensorFlow's operations.

    It has to have work for all cores: TensorFlow's operations also divide a part's rows.
    """
    tasks = parts * max(1, channels // THREAD_CHANNELS)
    return numbers >= LEAST_NUMBERS and tasks >= operation_threads()


def _threads(numbers: int) -> int:
    """Returns the number of threads that share work on ``numbers`` numbers."""
    return min(operation_threads(), numbers // THREAD_NUMBERS)


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


def empty(shape: Tuple[int, ...]) -> np.ndarray:
    """Returns an uninitialised float32 array with the alignment that TensorFlow takes without a copy."""
    size = math.prod(shape)
    memory: np.ndarray = np.empty(size + ALIGNMENT // 4, np.float32)
    start = -memory.ctypes.data % ALIGNMENT // 4
    return memory[start : start + size].reshape(shape)


def forward(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    epsilon: float,
    parts: int,
    activation: str,
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normalises each channel of each part by its own mean and variance.

    Args:
        x: (parts * n, ..., channels), float32.
        gamma, beta: (channels,).
        epsilon: the number to add to the variance.
        parts: the number of parts.
        activation: one of ``ACTIVATIONS``.

    Returns:
        y, shaped like x; means and biased variances (parts, channels).
    """
    cut = _cut(x.shape, parts, operation_threads())
    y, statistics = empty(cut.shape), empty((2, parts, x.shape[-1]))
    mean, variance = statistics[0], statistics[1]
    _share(
        _forward, _threads(x.size), cut.tasks, x.reshape(cut.shape), gamma, beta, np.float32(epsilon),
        ACTIVATIONS.index(activation), cut.fold, cut.most, y, mean, variance,
    )  # fmt: skip
    return y.reshape(x.shape), mean, variance


def backward(
    dy: np.ndarray,
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    epsilon: float,
    activation: str,
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the gradients of x, gamma and beta from dy, the gradient of ``forward``'s y."""
    cut = _cut(x.shape, len(mean), operation_threads())
    dx, sums = empty(cut.shape), np.empty((2, *mean.shape), np.float32)
    _share(
        _backward, _threads(x.size), cut.tasks, dy.reshape(cut.shape), x.reshape(cut.shape), gamma, beta,
        np.float32(epsilon), ACTIVATIONS.index(activation), cut.fold, cut.most, mean, variance, dx,
        sums[0], sums[1],
    )  # fmt: skip
    dgamma, dbeta = np.sum(sums, axis=1, dtype=np.float64).astype(np.float32)
    return dx.reshape(x.shape), dgamma, dbeta


def depthwise_filter(
    x: np.ndarray, dy: np.ndarray, kernel: Tuple[int, int], stride: int, before: Tuple[int, int]
) -> np.ndarray:
    """Returns the weight gradient of a depthwise convolution with multiplier 1.

    Args:
        x: (n, h, w, c).
        dy: (n, h', w', c).
        kernel: height and width of the kernel.
        stride: the stride in both dimensions.
        before: rows of zeros above, and columns of zeros left of the image.

    Returns:
        (kernel height, kernel width, c, 1).
    """
    blocks = -(-len(x) // BLOCK_SAMPLES)
    sums = empty((blocks, *kernel, x.shape[-1]))
    _share(_depthwise_filter, _threads(dy.size * kernel[0]), blocks, x, dy, stride, *before, sums)
    return np.sum(sums, axis=0, dtype=np.float64).astype(np.float32)[..., np.newaxis]
