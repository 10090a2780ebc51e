"""The few places where Keras 2.6 (what the Poplar SDK ships) and Keras 3 differ.  Importing needs TensorFlow."""

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasVariable

KERAS_VERSION = tuple(int(p) for p in keras.__version__.split(".")[:2])
KERAS_3 = KERAS_VERSION >= (3, 0)


def tf_variable(weight: KerasVariable) -> tf.Variable:
    """The tf.Variable behind a Keras weight (Keras 3 wraps it, Keras 2.6 does not)."""
    return weight.value if KERAS_3 and not isinstance(weight, tf.Variable) else weight


def enable_determinism() -> None:
    """Asks TensorFlow for the same bytes from the same inputs (2.8 has the call; 2.6 a variable that it reads)."""
    enable = getattr(tf.config.experimental, "enable_op_determinism", None)
    if enable is not None:
        enable()
    else:
        import os

        os.environ["TF_DETERMINISTIC_OPS"] = "1"
