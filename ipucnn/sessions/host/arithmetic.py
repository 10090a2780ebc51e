"""16-bit arithmetic on a host: values are kept in float32 tensors that lie on float16's grid.

A CPU's float16 kernels are slow, and add up in float16, which an IPU does not.  So operations are computed in float32,
and what leaves them is rounded (:class:`Rounding`): to nearest, ties to even, or stochastically.  Stochastic rounding
goes up with the probability of the part that is cut off (Gupta et al. 2015, arXiv:1502.02551), so its mean is exact.

Random bits have no state.  They are a function of the run's seed, the weight update, the place (a layer's output, its
gradient, the weights, ...), the micro-batch and the position in it; so a resumed run draws what an uninterrupted one
would, and they do not depend on how many micro-batches are computed as one.

The functions are compiled by XLA, which makes one pass over memory of them; as single operations they take ten.
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
_SUBNORMAL_STEPS = 2.0**24  # in 1, of numbers below the smallest normal one
# Part of the message of an operation that found a floating-point exception; a place follows.
EXCEPTION = "floating-point exception in "


@dataclass(frozen=True)
class Arithmetic:
    """In what numbers a session computes.

    Attributes:
        precision: "16.16", "16.32" or "32.32": of activations, and of weights and optimizer state.
        stochastic_rounding: "OFF"; "ON"; or "RI": only where all replicas compute the same, which is in the weight
            update (the SDK's ``REPLICA_IDENTICAL_ONLY``).
        nanoo: overflow gives not-a-number; else the largest finite number (Poplar's ``FloatingPointBehaviour``).
        fp_exceptions: overflow and values that are not finite stop the run.
    """

    precision: str = "32.32"
    stochastic_rounding: str = "OFF"
    nanoo: bool = False
    fp_exceptions: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> "Arithmetic":
        """That of a configuration."""
        return cls(config.precision, config.stochastic_rounding, config.nanoo, config.fp_exceptions)

    @property
    def is_half(self) -> bool:
        """Whether activations have 16 bits."""
        return self.precision != "32.32"

    @property
    def is_plain(self) -> bool:
        """Whether nothing is done to what float32 operations give."""
        return not (self.is_half or self.fp_exceptions)


def _mix(h: Tensor) -> Tensor:
    """A permutation of 32-bit numbers in which every bit of the input changes each bit of the output half of the time.

    Multiplications and shifts as in MurmurHash3's finalizer, with the constants that Wellons' search found less biased.
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        h = tf.bitwise.bitwise_xor(h, tf.bitwise.right_shift(h, tf.constant(shift, tf.uint32)))
        h = h * tf.constant(factor, tf.uint32)
    return tf.bitwise.bitwise_xor(h, tf.bitwise.right_shift(h, tf.constant(15, tf.uint32)))


def _finish(x: Tensor, magnitude: Tensor, rounded: Tensor, overflow_to_nan: bool) -> Tensor:
    """Gives rounded magnitudes (bits) the sign of x, and treats what is too large or not a number."""
    largest = tf.constant(_NOT_A_NUMBER if overflow_to_nan else _MAX_FINITE)
    rounded = tf.where(rounded > _MAX_FINITE, largest, rounded)
    rounded = tf.where(magnitude > _INFINITY, magnitude, rounded)
    sign = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _SIGN)
    return tf.bitcast(tf.bitwise.bitwise_or(rounded, sign), tf.float32)


def nearest(x: Tensor, overflow_to_nan: bool = False) -> Tensor:
    """float32 numbers rounded to float16's, to nearest, ties to even.

    Args:
        x: float32 of any shape.
        overflow_to_nan: what becomes of numbers that round to more than 65504; else 65504 with their sign.
    """
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _REST)
    is_odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(magnitude, 13), 1)
    rounded = tf.bitwise.bitwise_and(magnitude + (is_odd + _LOST // 2), ~_LOST)
    # Adding and taking away a large number would do as well, but TensorFlow's optimizer takes both out.
    steps = tf.round(tf.bitcast(magnitude, tf.float32) * _SUBNORMAL_STEPS)
    small = tf.bitcast(steps * (1.0 / _SUBNORMAL_STEPS), tf.int32)
    rounded = tf.where(magnitude < _SMALLEST_NORMAL, small, rounded)
    return _finish(x, magnitude, rounded, overflow_to_nan)


def stochastic(x: Tensor, keys: Tensor, overflow_to_nan: bool = False) -> Tensor:
    """float32 numbers rounded to one of the two neighbours among float16's, so that the mean is right.

    Args:
        x: float32 (rows, n).
        keys: uint32 (rows,), the random streams of the rows.
        overflow_to_nan: as for :func:`nearest`.
    """
    positions = tf.cast(tf.range(tf.shape(x)[1]), tf.uint32) * tf.constant(0x9E3779B1, tf.uint32)
    bits = _mix(keys[:, tf.newaxis] + positions[tf.newaxis])
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _REST)
    added = tf.bitcast(tf.bitwise.right_shift(bits, tf.constant(19, tf.uint32)), tf.int32)
    rounded = tf.bitwise.bitwise_and(magnitude + added, ~_LOST)
    # Subnormal numbers: 24 random bits against all that is cut off.
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
    """:func:`nearest` or :func:`stochastic`, compiled by XLA once in a process, of all arguments but the last."""
    bound = functools.partial(rounding, overflow_to_nan=overflow_to_nan)
    traced: Callable[..., Tensor] = tf.function(bound, autograph=False, jit_compile=True)
    return traced


class Rounding:
    """How values are rounded in one traced pass.

    Args:
        arithmetic: of the session.
        streams: uint32 (micro-batches,), different for every micro-batch of every weight update; None: to nearest.
    """

    def __init__(self, arithmetic: Arithmetic, streams: Optional[Tensor] = None) -> None:
        self._arithmetic = arithmetic
        self._streams = streams

    def values(self, x: Tensor, place: str) -> Tensor:
        """Values of any shape whose first dimension holds the micro-batches one after the other, rounded.

        Args:
            x: float32.
            place: in the program; random numbers of different places are independent.
        """
        a = self._arithmetic
        if a.is_half:
            # Exceptions are found as what overflow leaves behind.
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
        """What leaves a layer, rounded, as is the gradient that comes back to it."""
        if self._arithmetic.is_plain:
            return x

        @tf.custom_gradient
        def rounded(x: Tensor) -> Any:
            return self.values(x, place), lambda dy: self.values(dy, f"the gradient of {place}")

        return rounded(x)

    def images(self, x: Tensor) -> Tensor:
        """The network's input, rounded: always to nearest, as the host of an IPU does it."""
        if not self._arithmetic.is_half:
            return x
        return _like(compiled(nearest)(tf.reshape(x, [-1])), x)

    def all(self, tensors: Sequence[Tensor], place: str) -> List[Tensor]:
        """Tensors that have nothing to do with micro-batches, rounded at once."""
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
    """The random streams of some micro-batches.

    Args:
        seed: of the run.
        weight_update: scalar int64.
        micro_batches: int (m,), numbers within the weight update.

    Returns:
        uint32 (m,).
    """
    high = tf.cast(tf.bitwise.right_shift(weight_update, tf.constant(32, tf.int64)), tf.uint32)
    key = tf.constant(seed & 0xFFFFFFFF, tf.uint32)
    for part in (high, tf.cast(weight_update & 0xFFFFFFFF, tf.uint32), tf.cast(micro_batches, tf.uint32)):
        # An odd factor first, so that small numbers do not meet in the sum.
        key = _mix(key * tf.constant(0x9E3779B1, tf.uint32) + part)
    return key
