"""16-bit arithmetic on a host: values are kept in float32 tensors that lie on float16's grid.

A CPU's float16 kernels are slow, and accumulate in float16, which an IPU does not.  So operations are computed in
float32, and their results are rounded (:class:`Rounding`): to nearest, ties to even, or stochastically.  Stochastic
rounding rounds up with a probability equal to the part that is cut off (Gupta et al. 2015, arXiv:1502.02551), so its
mean is exact.

Random bits have no state.  They are a function of the run's seed, the weight update, the place (a layer's output, its
gradient, the weights, ...), the micro-batch and the position in it.  So a resumed run draws the same bits as an
uninterrupted one, and the bits do not depend on how many micro-batches are computed as one batch.

XLA compiles the functions into one pass over memory; as single operations they take ten.
"""

import functools
import zlib
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence

import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.config.options import RunConfig

# Bits of float32 numbers.
_SIGN, _REST = -(2**31), 2**31 - 1
_INFINITY, _NOT_A_NUMBER = 0x7F800000, 0x7FC00000
_MAX_FINITE = 0x477FE000
_SMALLEST_NORMAL = 0x38800000  # 2**-14
# float32 has 13 bits of a fraction that float16 lacks.
_LOST = 0x1FFF
_SUBNORMAL_STEPS = 2.0**24  # steps per 1.0 of the numbers below the smallest normal one
# The message of an operation that detects a floating-point exception contains this; a place follows.
EXCEPTION = "floating-point exception in "


@dataclass(frozen=True)
class Arithmetic:
    """The number formats and rounding that a session computes with.

    Attributes:
        precision: "16.16", "16.32" or "32.32": bits of activations, and of weights and optimizer state.
        stochastic_rounding: "OFF"; "ON"; or "RI": only where all replicas compute the same, which is in the weight
            update (the SDK's ``REPLICA_IDENTICAL_ONLY``).
        nanoo: whether overflow gives not-a-number; otherwise the largest finite number (Poplar's
            ``FloatingPointBehaviour``).
        fp_exceptions: whether overflow and values that are not finite stop the run.
    """

    precision: str = "32.32"
    stochastic_rounding: str = "OFF"
    nanoo: bool = False
    fp_exceptions: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> "Arithmetic":
        """Returns the arithmetic of a configuration."""
        return cls(config.precision, config.stochastic_rounding, config.nanoo, config.fp_exceptions)

    @property
    def is_half(self) -> bool:
        """Returns whether activations have 16 bits."""
        return self.precision != "32.32"

    @property
    def is_plain(self) -> bool:
        """Returns whether the results of float32 operations are used unchanged."""
        return not (self.is_half or self.fp_exceptions)


def _mix(h: Tensor) -> Tensor:
    """Permutes 32-bit numbers so that flipping any input bit flips each output bit half of the time.

    It multiplies and shifts as MurmurHash3's finalizer does, with the less biased constants from Wellons' search.
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        h = tf.bitwise.bitwise_xor(h, tf.bitwise.right_shift(h, tf.constant(shift, tf.uint32)))
        h = h * tf.constant(factor, tf.uint32)
    return tf.bitwise.bitwise_xor(h, tf.bitwise.right_shift(h, tf.constant(15, tf.uint32)))


def _finish(x: Tensor, magnitude: Tensor, rounded: Tensor, overflow_to_nan: bool) -> Tensor:
    """Gives rounded magnitudes (bits) the sign of x, and handles overflow and not-a-number."""
    largest = tf.constant(_NOT_A_NUMBER if overflow_to_nan else _MAX_FINITE)
    rounded = tf.where(rounded > _MAX_FINITE, largest, rounded)
    rounded = tf.where(magnitude > _INFINITY, magnitude, rounded)
    sign = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _SIGN)
    return tf.bitcast(tf.bitwise.bitwise_or(rounded, sign), tf.float32)


def nearest(x: Tensor, overflow_to_nan: bool = False) -> Tensor:
    """Rounds float32 numbers to float16's grid, to nearest, ties to even.

    Args:
        x: float32 of any shape.
        overflow_to_nan: whether numbers that round to more than 65504 become not-a-number; otherwise they become 65504
            with their sign.
    """
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _REST)
    is_odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(magnitude, 13), 1)
    rounded = tf.bitwise.bitwise_and(magnitude + (is_odd + _LOST // 2), ~_LOST)
    # Adding and subtracting a large number would round as well, but TensorFlow's optimizer removes both.
    steps = tf.round(tf.bitcast(magnitude, tf.float32) * _SUBNORMAL_STEPS)
    small = tf.bitcast(steps * (1.0 / _SUBNORMAL_STEPS), tf.int32)
    rounded = tf.where(magnitude < _SMALLEST_NORMAL, small, rounded)
    return _finish(x, magnitude, rounded, overflow_to_nan)


def stochastic(x: Tensor, keys: Tensor, overflow_to_nan: bool = False) -> Tensor:
    """Rounds float32 numbers to one of their two float16 neighbours at random, so that the mean is exact.

    Args:
        x: float32 (rows, n).
        keys: uint32 (rows,), the random streams of the rows.
        overflow_to_nan: as for :func:`nearest`.
    """
    positions = tf.cast(tf.range(tf.shape(x)[1]), tf.uint32) * tf.constant(0x9E3779B1, tf.uint32)
    bits = _mix(keys[:, tf.newaxis] + positions[tf.newaxis])
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _REST)
    random_bits = tf.bitcast(tf.bitwise.right_shift(bits, tf.constant(19, tf.uint32)), tf.int32)
    rounded = tf.bitwise.bitwise_and(magnitude + random_bits, ~_LOST)
    # Subnormal numbers: compare 24 random bits with the whole part that is cut off.
    steps = tf.bitcast(magnitude, tf.float32) * _SUBNORMAL_STEPS
    whole = tf.floor(steps)
    chance = tf.cast(
        tf.bitcast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.int32), tf.float32
    )
    up = tf.where(chance * 2.0**-24 < steps - whole, 1.0, 0.0)
    small = tf.bitcast((whole + up) * (1.0 / _SUBNORMAL_STEPS), tf.int32)
    rounded = tf.where(magnitude < _SMALLEST_NORMAL, small, rounded)
    return _finish(x, magnitude, rounded, overflow_to_nan)


@functools.lru_cache(maxsize=None)
def compiled(rounding: Callable[..., Tensor], overflow_to_nan: bool = False) -> Callable[..., Tensor]:
    """Returns :func:`nearest` or :func:`stochastic` compiled by XLA, once per process, with the last argument bound."""
    bound = functools.partial(rounding, overflow_to_nan=overflow_to_nan)
    traced: Callable[..., Tensor] = tf.function(bound, autograph=False, jit_compile=True)
    return traced


class Rounding:
    """Rounds the values of one traced pass.

    Args:
        arithmetic: the session's arithmetic.
        streams: uint32 (micro-batches,), different for every micro-batch of every weight update; None: to nearest.
    """

    def __init__(self, arithmetic: Arithmetic, streams: Optional[Tensor] = None) -> None:
        self._arithmetic = arithmetic
        self._streams = streams

    def values(self, x: Tensor, place: str) -> Tensor:
        """Rounds values of any shape whose first dimension holds the micro-batches one after the other.

        Args:
            x: float32.
            place: the name of a place in the program; random numbers of different places are independent.
        """
        a = self._arithmetic
        if a.is_half:
            # Overflow has to leave not-a-number for the check below to detect it.
            overflow_to_nan = a.nanoo or a.fp_exceptions
            if self._streams is None:
                rounded = compiled(nearest, overflow_to_nan)(tf.reshape(x, [-1]))
            else:
                keys = _mix(self._streams + tf.constant(zlib.crc32(place.encode()), tf.uint32))
                rows = tf.reshape(x, [tf.shape(self._streams)[0], -1])
                if x.shape.num_elements() is not None and self._streams.shape[0] is not None:
                    rows = tf.reshape(x, [int(self._streams.shape[0]), -1])
                rounded = compiled(stochastic, overflow_to_nan)(rows, keys)
            x = _like(rounded, x)
        return tf.debugging.check_numerics(x, EXCEPTION + place) if a.fp_exceptions else x

    def layer_output(self, x: Tensor, place: str) -> Tensor:
        """Rounds the output of a layer, and the gradient that comes back to it."""
        if self._arithmetic.is_plain:
            return x

        @tf.custom_gradient
        def rounded(x: Tensor) -> Any:
            return self.values(x, place), lambda dy: self.values(dy, f"the gradient of {place}")

        return rounded(x)

    def images(self, x: Tensor) -> Tensor:
        """Rounds the network's input, always to nearest, as the host of an IPU does."""
        if not self._arithmetic.is_half:
            return x
        return _like(compiled(nearest)(tf.reshape(x, [-1])), x)

    def all(self, tensors: Sequence[Tensor], place: str) -> List[Tensor]:
        """Rounds tensors that have no micro-batch dimension, all in one operation."""
        if self._arithmetic.is_plain or not tensors:
            return list(tensors)
        flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
        sizes = [int(t.shape.num_elements()) for t in tensors]
        parts = tf.split(self.values(flat, place), sizes)
        return [_like(part, t) for part, t in zip(parts, tensors)]


def _like(values: Tensor, x: Tensor) -> Tensor:
    values = tf.reshape(values, tf.shape(x))
    values.set_shape(x.shape)
    return values


def streams(seed: int, weight_update: Tensor, micro_batches: Tensor) -> Tensor:
    """Returns the random streams of some micro-batches.

    Args:
        seed: the run's seed.
        weight_update: scalar int64.
        micro_batches: int (m,), numbers within the weight update.

    Returns:
        uint32 (m,).
    """
    high = tf.cast(tf.bitwise.right_shift(weight_update, tf.constant(32, tf.int64)), tf.uint32)
    key = tf.constant(seed & 0xFFFFFFFF, tf.uint32)
    for part in (high, tf.cast(weight_update & 0xFFFFFFFF, tf.uint32), tf.cast(micro_batches, tf.uint32)):
        # Multiplying by an odd factor first keeps the sums of small numbers distinct.
        key = _mix(key * tf.constant(0x9E3779B1, tf.uint32) + part)
    return key
