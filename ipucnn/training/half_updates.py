"""Weight updates of 16-bit weights: computed in float32, weights and state rounded to 16 bits.

TensorFlow's kernels compute in the weights' type, where a squared gradient above 65504 makes the state infinite and the
weight not a number.  The formulas are those of the kernels that :mod:`ipucnn.training.optimizers` calls.
"""

from typing import Any, Callable, List, Tuple

import tensorflow as tf

_Slot = Callable[[str], Any]
_Update = Tuple[Any, List[Tuple[Any, Any]]]
"""What is added to the weight, and (slot, its new value)."""


def update_half(
    settings: Any, is_adaptive: bool, variable: Any, slot: _Slot, gradient: Any, rate: Any, count: Any
) -> List[Any]:
    """One weight update of a 16-bit variable.

    Args:
        settings: ``OptimizerSettings``.
        is_adaptive: LARS scales the rate of this weight.
        variable: the weight.
        slot: slot name -> its variable, of the weight's type.
        gradient, rate, count: gradient, learning rate, and number of this weight update from 1 on.

    Returns:
        The operations.
    """
    weight = tf.cast(tf.convert_to_tensor(variable), tf.float32)
    gradient, rate = tf.cast(gradient, tf.float32), tf.cast(rate, tf.float32)
    if settings.l2_regularization:
        gradient = gradient + settings.l2_regularization * weight
    step = {"sgd": _momentum, "lars": _lars, "rmsprop": _rmsprop}.get(settings.name, _adam)
    change, state = step(
        settings.params, is_adaptive, weight, slot, gradient, rate, tf.cast(count, tf.float32)
    )
    if settings.weight_decay and settings.name != "lars":
        change = change - rate * settings.weight_decay * weight
    done = [own.assign(_rounded(value, own.dtype)) for own, value in state]
    return [*done, variable.assign(_rounded(weight + change, variable.dtype))]


def _rounded(value: Any, dtype: Any) -> Any:
    """To 16 bits; what is too large becomes the largest number, as on IPUs without ``--fp-exceptions``."""
    return tf.cast(tf.clip_by_value(value, dtype.min, dtype.max), dtype)


def _read(variable: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def _momentum(
    p: Any, is_adaptive: bool, weight: Any, slot: _Slot, gradient: Any, rate: Any, count: Any
) -> _Update:
    if not p["momentum"]:
        return -rate * gradient, []
    moved = p["momentum"] * _read(slot("momentum")) - rate * gradient
    change = p["momentum"] * moved - rate * gradient if p["nesterov"] else moved
    return change, [(slot("momentum"), moved)]


def _lars(
    p: Any, is_adaptive: bool, weight: Any, slot: _Slot, gradient: Any, rate: Any, count: Any
) -> _Update:
    if is_adaptive:
        weight_norm, gradient_norm = tf.norm(weight), tf.norm(gradient)
        gradient = gradient + p["weight_decay"] * weight
        denominator = gradient_norm + p["weight_decay"] * weight_norm + (p["epsilon"] or 1e-7)
        usable = tf.logical_and(weight_norm > 0, gradient_norm > 0)
        rate = rate * tf.where(usable, p["eeta"] * weight_norm / denominator, 1.0)
    return _momentum(p, is_adaptive, weight, slot, gradient, rate, count)


def _adam(
    p: Any, is_adaptive: bool, weight: Any, slot: _Slot, gradient: Any, rate: Any, count: Any
) -> _Update:
    m = p["beta_1"] * _read(slot("m")) + (1.0 - p["beta_1"]) * gradient
    v = p["beta_2"] * _read(slot("v")) + (1.0 - p["beta_2"]) * tf.square(gradient)
    corrected = rate * tf.sqrt(1.0 - tf.pow(p["beta_2"], count)) / (1.0 - tf.pow(p["beta_1"], count))
    return -corrected * m / (tf.sqrt(v) + p["epsilon"]), [(slot("m"), m), (slot("v"), v)]


def _rmsprop(
    p: Any, is_adaptive: bool, weight: Any, slot: _Slot, gradient: Any, rate: Any, count: Any
) -> _Update:
    square = p["rho"] * _read(slot("mean_square")) + (1.0 - p["rho"]) * tf.square(gradient)
    moved = p["momentum"] * _read(slot("momentum")) + rate * gradient * tf.math.rsqrt(square + p["epsilon"])
    return -moved, [(slot("mean_square"), square), (slot("momentum"), moved)]
