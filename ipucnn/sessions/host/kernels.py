"""Normalisation with its activation, and depthwise weight gradients, compiled for this CPU by Numba.

TensorFlow's operations make a pass over memory each, and a batch norm with its activation takes about twenty of them in
a weight update.  Here a part of the batch stays in the core's cache from step to step, so that memory is read and
written about five times.

A part is what shares statistics: a micro-batch (or a group of replicas) for batch norm, a sample for group norm.  Its
rows are the numbers that it has of a channel.  Rows are added up in blocks: in float32 within a block, in float64
over blocks.  Nothing depends on how many threads share the work.

Importing this imports Numba, and compiles the functions or loads them from its cache, which lies beside this file (or
in the user's folder of caches).
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional, Tuple

import numpy as np

from ipucnn.aliases import NumbaType
from ipucnn.compiled import import_numba
from ipucnn.compiled import jit as _jit
from ipucnn.machine import operation_threads

numba = import_numba()

ACTIVATIONS = ("linear", "relu", "relu6", "swish")
BLOCK_ROWS = 64
# A thread gets at least this many numbers, and at least so many channels (a cache line).
THREAD_NUMBERS = 2**14
THREAD_CHANNELS = 16
# Numbers of weight gradients that are added up in one block of samples.
BLOCK_SAMPLES = 8
# Rows of few channels are folded until they have as many numbers.
FOLDED_WIDTH = 64
ALIGNMENT = 64  # what TensorFlow wants of an array that it takes without a copy

_LINEAR, _RELU, _RELU6, _SWISH = range(4)
_ZERO, _ONE, _SIX = np.float32(0), np.float32(1), np.float32(6)


def _array(kind: NumbaType, dimensions: int, readonly: bool = False) -> Any:
    return numba.types.Array(kind, dimensions, "C", readonly=readonly)


_X3, _X4, _X1 = (_array(numba.float32, dimensions, readonly=True) for dimensions in (3, 4, 1))
_Y3, _Y4, _Y2 = (_array(numba.float32, dimensions) for dimensions in (3, 4, 2))
_INT = numba.int64


@_jit(inline="always")
def _exponential(z):  # type: ignore[no-untyped-def]
    """(e, n) with exp(z) = e * 2**n: Cephes' expf, without a branch."""
    z = min(max(z, np.float32(-87)), np.float32(87))
    n = np.floor(z * np.float32(1.44269504) + np.float32(0.5))
    q = z - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * q + np.float32(1.3981999507e-3)
    p = p * q + np.float32(8.3334519073e-3)
    p = p * q + np.float32(4.1665795894e-2)
    p = p * q + np.float32(1.6666665459e-1)
    p = p * q + np.float32(5.0000001201e-1)
    return p * q * q + q + np.float32(1), n


@_jit(_X3, _X1, _X1, numba.float32, _INT, _INT, _INT, _Y3, _Y2, _Y2, _INT, _INT, _INT, _INT)
def _forward(  # type: ignore[no-untyped-def]
    x, gamma, beta, epsilon, activation, per_group, fold, y, mean, variance, first, last, left, right
):
    """Of parts ``first`` to ``last`` the channels ``left`` to ``right``; all of them where ``fold`` rows are one."""
    rows, width = x.shape[1], right - left
    channels = width // fold
    own, factor, offset = (
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.empty(width, np.float32),
    )
    bits = np.empty(width, np.int32)
    power = bits.view(np.float32)
    total = np.empty(width, np.float64)
    for part in range(first, last):
        for moment in range(2):
            total[:] = 0.0
            for start in range(0, rows, BLOCK_ROWS):
                own[:] = _ZERO
                if moment == 0:
                    for r in range(start, min(start + BLOCK_ROWS, rows)):
                        x_ = x[part, r, left:right]
                        for c in range(width):
                            own[c] += x_[c]
                else:
                    for r in range(start, min(start + BLOCK_ROWS, rows)):
                        x_ = x[part, r, left:right]
                        for c in range(width):
                            d = x_[c] - factor[c]
                            own[c] += d * d
                for c in range(width):
                    total[c] += own[c]
            for group in range(0, channels, per_group):
                together = 0.0
                for c in range(group, group + per_group):
                    for k in range(c, width, channels):
                        together += total[k]
                together /= float(rows * fold * per_group)
                for c in range(group, group + per_group):
                    if moment == 0:
                        mean[part, left + c] = together
                        for k in range(c, width, channels):
                            factor[k] = together
                    else:
                        variance[part, left + c] = together
        for c in range(channels):
            own_factor = gamma[left + c] / np.sqrt(variance[part, left + c] + epsilon)
            own_offset = beta[left + c] - mean[part, left + c] * own_factor
            for k in range(c, width, channels):
                factor[k] = own_factor
                offset[k] = own_offset
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
                    own[c] = e
                    bits[c] = (np.int32(n) + np.int32(127)) << np.int32(23)
                for c in range(width):
                    z = x_[c] * factor[c] + offset[c]
                    y_[c] = z / (_ONE + own[c] * power[c])


@_jit(_X3, _X3, _X1, _X1, numba.float32, _INT, _INT, _INT, _array(numba.float32, 2, True),
      _array(numba.float32, 2, True), _Y3, _Y2, _Y2, _INT, _INT, _INT, _INT)  # fmt: skip
def _backward(  # type: ignore[no-untyped-def]
    dy,
    x,
    gamma,
    beta,
    epsilon,
    activation,
    per_group,
    fold,
    mean,
    variance,
    dx,
    dgamma,
    dbeta,
    first,
    last,
    left,
    right,
):
    """The gradients of x, and of each part those of gamma and beta."""
    rows, width = x.shape[1], right - left
    channels = width // fold
    own, own_x = np.empty(width, np.float32), np.empty(width, np.float32)
    centre, factor, offset = (
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.empty(width, np.float32),
    )
    bits = np.empty(width, np.int32)
    power = bits.view(np.float32)
    total, total_x = np.empty(width, np.float64), np.empty(width, np.float64)
    for part in range(first, last):
        for c in range(channels):
            own_factor = gamma[left + c] / np.sqrt(variance[part, left + c] + epsilon)
            own_offset = beta[left + c] - mean[part, left + c] * own_factor
            for k in range(c, width, channels):
                centre[k] = mean[part, left + c]
                factor[k] = own_factor
                offset[k] = own_offset
        total[:] = 0.0
        total_x[:] = 0.0
        for start in range(0, rows, BLOCK_ROWS):
            own[:] = _ZERO
            own_x[:] = _ZERO
            for r in range(start, min(start + BLOCK_ROWS, rows)):
                dy_ = dy[part, r, left:right]
                x_ = x[part, r, left:right]
                dx_ = dx[part, r, left:right]
                # Before the activation, into dx.
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
                    own[c] += dx_[c]
                    own_x[c] += dx_[c] * (x_[c] - centre[c])
            for c in range(width):
                total[c] += own[c]
                total_x[c] += own_x[c]
        # Ioffe and Szegedy 2015, arXiv:1502.03167, section 3; with channel groups Wu and He 2018, arXiv:1803.08494.
        for group in range(0, channels, per_group):
            of_g, of_gx = 0.0, 0.0
            for c in range(group, group + per_group):
                inverse = 1.0 / np.sqrt(np.float64(variance[part, left + c]) + epsilon)
                of_c, of_cx = 0.0, 0.0
                for k in range(c, width, channels):
                    of_c += total[k]
                    of_cx += total_x[k]
                dbeta[part, left + c] = of_c
                dgamma[part, left + c] = of_cx * inverse
                of_g += of_c * gamma[left + c]
                of_gx += of_cx * gamma[left + c]
            of_g /= float(rows * fold * per_group)
            of_gx /= float(rows * fold * per_group)
            for c in range(group, group + per_group):
                inverse = 1.0 / np.sqrt(np.float64(variance[part, left + c]) + epsilon)
                for k in range(c, width, channels):
                    own[k] = inverse * inverse * inverse * of_gx
                    own_x[k] = inverse * of_g
        for r in range(rows):
            x_ = x[part, r, left:right]
            dx_ = dx[part, r, left:right]
            for c in range(width):
                dx_[c] = dx_[c] * factor[c] - (x_[c] - centre[c]) * own[c] - own_x[c]


@_jit(_X4, _X4, _INT, _INT, _INT, _array(numba.float32, 4), _INT, _INT)
def _depthwise_filter(x, dy, stride, top, left, sums, first, last):  # type: ignore[no-untyped-def]
    """Of each block of samples the weight gradient (block, kernel height, kernel width, channels)."""
    samples, height, width, channels = x.shape
    for block in range(first, last):
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


_lock = threading.Lock()
_pool: Optional[ThreadPoolExecutor] = None


def _share(
    function: Callable[..., None], numbers: int, counts: Tuple[int, int], step: int, *given: NumbaType
) -> None:
    """Calls ``function(*given, first, last, left, right)`` for all of counts[0] x counts[1], in several threads.

    Args:
        numbers: how much work there is.
        step: ``left`` and ``right`` are multiples of it.
    """
    global _pool
    parts, channels = counts
    threads = max(1, min(operation_threads(), numbers // THREAD_NUMBERS))
    by_part = min(parts, threads)
    wanted = -(-threads // by_part)
    width = max(step, -(-max(THREAD_CHANNELS, -(-channels // wanted)) // step) * step)
    tasks = [
        (parts * k // by_part, parts * (k + 1) // by_part, left, min(left + width, channels))
        for k in range(by_part)
        for left in range(0, channels, width)
    ]
    if len(tasks) > 1:
        with _lock:
            if _pool is None:
                _pool = ThreadPoolExecutor(max(1, operation_threads() - 1), "kernels")
        others = [_pool.submit(function, *given, *task) for task in tasks[1:]]
        function(*given, *tasks[0])
        for other in others:
            other.result()
    else:
        function(*given, *tasks[0])


def share_all_cores(parts: int, channels: int, channel_groups: int) -> bool:
    """Whether a normalisation has work for all cores here; TensorFlow's kernels share the rows of a part, too."""
    return parts * min(channel_groups, max(1, channels // THREAD_CHANNELS)) >= operation_threads()


def _fold(x: np.ndarray, parts: int) -> int:
    """How many rows of few channels are taken as one of many: short inner loops are slow."""
    channels = x.shape[-1]
    rows, fold = x.size // (parts * channels), 1
    while fold * channels < FOLDED_WIDTH and rows % (2 * fold) == 0:
        fold *= 2
    return fold


def empty(shape: Tuple[int, ...]) -> np.ndarray:
    """A float32 array that TensorFlow takes as it is."""
    size = int(np.prod(shape)) * 4
    memory: np.ndarray = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(np.float32).reshape(shape)


def forward(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    epsilon: float,
    parts: int,
    channel_groups: int,
    activation: str,
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normalises each (part, group of channels) by its own mean and variance.

    Args:
        x: (parts * n, ..., channels), float32.
        gamma, beta: (channels,).
        epsilon: added to the variance.
        channel_groups: groups of neighbouring channels; as many as channels for batch norm.
        activation: one of ``ACTIVATIONS``.

    Returns:
        y as x; means and biased variances (parts, channels).
    """
    channels = x.shape[-1]
    fold = _fold(x, parts)
    grouped = x.reshape(parts, -1, fold * channels)
    y, mean, variance = empty(grouped.shape), empty((parts, channels)), empty((parts, channels))
    per_group = channels // channel_groups
    _share(
        _forward, x.size, (parts, fold * channels), fold * channels if fold > 1 else per_group, grouped, gamma, beta,
        np.float32(epsilon), ACTIVATIONS.index(activation), per_group, fold, y, mean, variance,
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
    channel_groups: int,
    activation: str,
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients of x, gamma and beta, of ``forward``'s y."""
    parts, channels = mean.shape
    fold = _fold(x, parts)
    grouped = x.reshape(parts, -1, fold * channels)
    dx, dgamma, dbeta = empty(grouped.shape), empty((parts, channels)), empty((parts, channels))
    per_group = channels // channel_groups
    _share(
        _backward, x.size, (parts, fold * channels), fold * channels if fold > 1 else per_group,
        dy.reshape(grouped.shape), grouped, gamma, beta, np.float32(epsilon), ACTIVATIONS.index(activation), per_group,
        fold, mean, variance, dx, dgamma, dbeta,
    )  # fmt: skip
    sums = (np.sum(of, axis=0, dtype=np.float64).astype(np.float32) for of in (dgamma, dbeta))
    return (dx.reshape(x.shape), *sums)  # type: ignore[return-value]


def depthwise_filter(
    x: np.ndarray, dy: np.ndarray, kernel: Tuple[int, int], stride: int, before: Tuple[int, int]
) -> np.ndarray:
    """The weight gradient of a depthwise convolution with multiplier 1.

    Args:
        x: (n, h, w, c).
        dy: (n, h', w', c).
        kernel: its height and width.
        before: rows of zeros above, and columns left of the image.

    Returns:
        (kernel height, kernel width, c, 1).
    """
    blocks = -(-len(x) // BLOCK_SAMPLES)
    sums = empty((blocks, *kernel, x.shape[-1]))

    def of_blocks(first: int, last: int, *_: int) -> None:
        _depthwise_filter(x, dy, stride, *before, sums, first, last)

    _share(of_blocks, dy.size * kernel[0], (blocks, 1), 1)
    return np.sum(sums, axis=0, dtype=np.float64).astype(np.float32)[..., np.newaxis]
