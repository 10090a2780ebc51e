"""Dropout without state: the mask is a pure function of the run's seed, the micro-batch and the layer.

Keras' Dropout advances a generator whose state is not saved with the model, so a resumed run draws other
masks.  Here the mask comes from the execution context's seed; ``noise_shape=(None, 1, 1, 1)`` gives drop
connect (stochastic depth).
"""

import zlib
from typing import Any, Dict, Optional, Sequence

import tensorflow as tf
from tensorflow import keras

from ipucnn.models.layers.context import current_context


def static_or(static: Any, dynamic: Any) -> Any:
    """A dimension's static size where it is known, the tensor otherwise."""
    return dynamic if static is None else int(static)


class Dropout(keras.layers.Layer):
    """Inverted dropout (Srivastava et al. 2014), ``x * mask / (1 - rate)``.

    Args:
        rate: probability of zeroing, in [0, 1).
        noise_shape: mask shape, None for the input's size in that dimension; None for the full shape.
    """

    def __init__(
        self, rate: float, noise_shape: Optional[Sequence[Optional[int]]] = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise ValueError(f"rate must be in [0, 1), got {rate}")
        self.rate = float(rate)
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)
        self.supports_masking = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        if not training or self.rate == 0:
            return inputs
        dynamic = tf.shape(inputs)
        static = inputs.shape
        wanted = self.noise_shape or (None,) * len(static)
        shape = [static_or(static[i], dynamic[i]) if n is None else n for i, n in enumerate(wanted)]
        context = current_context()
        if context is None:
            noise = tf.random.uniform(shape)
        else:
            slot = context.seed_slots.get(self.name, 0)
            context.seed_slots[self.name] = slot + 1
            # The layer's name keeps the streams of two layers apart, whatever the order they are traced in.
            own = zlib.crc32(f"{self.name}/{slot}".encode()) & 0x7FFFFFFF
            # Each micro-batch draws by itself, so that the masks do not depend on how many are fused.
            parts = context.num_micro_batches
            part_shape = [shape[0] if wanted[0] is not None else shape[0] // parts, *shape[1:]]
            seeds = context.seeds + tf.constant([own, 0], tf.int32)
            drawn = [tf.random.stateless_uniform(part_shape, seed=seeds[i]) for i in range(parts)]
            if wanted[0] is not None:  # one mask for all samples of a micro-batch
                drawn = [tf.repeat(d, static_or(static[0], dynamic[0]) // parts, axis=0) for d in drawn]
            noise = tf.concat(drawn, axis=0) if parts > 1 else drawn[0]
        keep = tf.cast(noise >= self.rate, inputs.dtype)
        return inputs * (keep * (1.0 / (1.0 - self.rate)))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "rate": self.rate, "noise_shape": self.noise_shape}
