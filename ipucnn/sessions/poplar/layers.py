"""Layers that only the models on IPUs have: seeded dropout, preprocessing, batch statistics as outputs."""

import zlib
from typing import Any, Dict, Optional, Sequence

import tensorflow as tf
from tensorflow import keras

SEEDS_NAME = "micro_batch_seeds"


class SeededDropout(keras.layers.Layer):
    """The masks of ``ipucnn.models.layers.Dropout``, with the micro-batch's seeds as a second input.

    Inside ``fit`` nobody says which micro-batch is under way, so that comes with the data.  The host draws the same
    masks: the layer's name and the micro-batch's number are the seed.

    Args:
        rate: probability of zeroing.
        noise_shape: as for the host's layer.
        micro_batch_size: samples of a micro-batch; the input may hold several, as in distributed batch norm.
        always: drop outside of training, too (for the statistics of a training forward pass).
    """

    def __init__(
        self,
        rate: float,
        noise_shape: Optional[Sequence[Optional[int]]],
        micro_batch_size: int,
        always: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.rate = float(rate)
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)
        self.micro_batch_size = int(micro_batch_size)
        self.always = bool(always)

    def call(self, inputs: Any, training: Any = None) -> Any:
        x, seeds = inputs
        if not (training or self.always) or self.rate == 0:
            return x
        size = self.micro_batch_size
        parts = (x.shape[0] or size) // size
        wanted = self.noise_shape or (None,) * len(x.shape)
        shape = [size if wanted[0] is None else wanted[0]]
        shape += [int(x.shape[i]) if n is None else n for i, n in enumerate(wanted) if i]
        # The first draw of this layer in a micro-batch; see ipucnn.models.layers.Dropout.
        own = zlib.crc32(f"{self.name}/0".encode()) & 0x7FFFFFFF
        drawn = []
        for part in range(parts):
            seed = seeds[part * size] + tf.constant([own, 0], tf.int32)
            noise = tf.random.stateless_uniform(shape, seed=seed)
            drawn.append(tf.repeat(noise, size // shape[0], axis=0) if shape[0] != size else noise)
        noise = tf.concat(drawn, axis=0) if parts > 1 else drawn[0]
        keep = tf.cast(noise >= self.rate, x.dtype)
        return x * (keep * tf.cast(1.0 / (1.0 - self.rate), x.dtype))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape[0]

    def get_config(self) -> Dict[str, Any]:
        own = {"rate": self.rate, "noise_shape": self.noise_shape}
        own.update(micro_batch_size=self.micro_batch_size, always=self.always)
        return {**super().get_config(), **own}


class Preprocess(keras.layers.Layer):
    """The network's input range from pixels 0 to 255, on the IPU.

    Args:
        affine: ``ChannelAffine``.
        fused: ``ipu.image_ops.normalise_image``, which does it in one operation; or None.
        compute: type of the result.
    """

    def __init__(self, affine: Any, fused: Any, compute: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._affine, self._fused, self._compute = affine, fused, compute

    def call(self, inputs: Any) -> Any:
        affine = self._affine
        if self._fused is not None:
            offsets = tf.constant(affine.offsets, self._compute)
            factors = tf.constant(affine.factors, self._compute)
            # The operation pads three channels to four, and makes 16 bits of 8.
            return tf.cast(self._fused(inputs, offsets, factors, affine.scale)[..., :3], self._compute)
        images = tf.cast(inputs, tf.float32)
        if affine.reverse:
            images = tf.reverse(images, axis=[-1])
        images = (images * affine.scale - tf.constant(affine.offsets)) * tf.constant(affine.factors)
        return tf.cast(images, self._compute)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


class BatchStatistics(keras.layers.Layer):
    """Batch norm by the statistics of its input, which it returns too: (normalised, mean, variance).

    Mean and unbiased variance are float32 (1, channels), so that ``predict`` stacks those of all micro-batches.
    """

    def __init__(self, epsilon: float, center: bool, scale: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epsilon, self.center, self.scale = float(epsilon), bool(center), bool(scale)

    def build(self, input_shape: Any) -> None:
        channels = (int(input_shape[-1]),)
        self.gamma = self.add_weight(name="gamma", shape=channels, initializer="ones") if self.scale else None
        self.beta = self.add_weight(name="beta", shape=channels, initializer="zeros") if self.center else None
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        x = tf.cast(inputs, tf.float32)
        axes = list(range(len(x.shape) - 1))
        mean, variance = tf.nn.moments(x, axes)
        factor = tf.math.rsqrt(variance + self.epsilon)
        if self.gamma is not None:
            factor = factor * tf.cast(tf.convert_to_tensor(self.gamma), tf.float32)
        offset = -mean * factor
        if self.beta is not None:
            offset = offset + tf.cast(tf.convert_to_tensor(self.beta), tf.float32)
        count = 1.0
        for axis in axes:
            count *= float(x.shape[axis])
        unbiased = variance * (count / max(count - 1.0, 1.0))
        return tf.cast(x * factor + offset, inputs.dtype), mean[None], unbiased[None]

    def compute_output_shape(self, input_shape: Any) -> Any:
        channels = input_shape[-1]
        return input_shape, (1, channels), (1, channels)

    def get_config(self) -> Dict[str, Any]:
        own = {"epsilon": self.epsilon, "center": self.center, "scale": self.scale}
        return {**super().get_config(), **own}
