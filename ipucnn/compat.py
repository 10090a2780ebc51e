"""Differences between Keras 2.6, which the Poplar SDK ships, and Keras 3.  Importing needs TensorFlow."""

import os
from typing import Any

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasVariable

KERAS_VERSION = tuple(int(p) for p in keras.__version__.split(".")[:2])
KERAS_3 = KERAS_VERSION >= (3, 0)


def tf_variable(weight: KerasVariable) -> tf.Variable:
    """The tf.Variable of a Keras weight, which Keras 3 wraps and Keras 2.6 does not."""
    return weight.value if KERAS_3 and not isinstance(weight, tf.Variable) else weight


def enable_determinism() -> None:
    """Makes TensorFlow compute the same bytes from the same inputs.

    TensorFlow 2.8 and newer have a function for it; 2.6 reads an environment variable.
    """
    enable = getattr(tf.config.experimental, "enable_op_determinism", None)
    if enable is not None:
        enable()
    else:
        os.environ["TF_DETERMINISTIC_OPS"] = "1"


def is_determinism_enabled() -> bool:
    """Whether TensorFlow refuses random operations without a seed; 2.6 never does."""
    asks = getattr(_switch(), "is_op_determinism_enabled", None)
    return asks is not None and bool(asks())


def disable_determinism() -> None:
    """Undoes :func:`enable_determinism`; TensorFlow's public interface has no function for it."""
    disable = getattr(_switch(), "disable_op_determinism", None)
    if disable is not None:
        disable()


def _switch() -> Any:
    """TensorFlow's module that has both functions, in 2.8 and newer."""
    from tensorflow.python.framework import config

    return config
