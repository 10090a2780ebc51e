"""``ipu_tensorflow_addons.keras``: the layers that the session uses, in stock TensorFlow."""

import types
from typing import Any, Dict

import tensorflow as tf
from tensorflow import keras

from .facts import FACTS, checked, signature_of


class _Dropout(keras.layers.Layer):
    """Draws masks from the IPUs' seed."""

    machine: Any = None

    def __init__(self, rate: float, noise_shape: Any, seed: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if seed is not None:
            raise NotImplementedError("the double draws from the IPUs' seed only")
        self.rate, self.noise_shape, self.seed = rate, noise_shape, seed

    def call(self, inputs: Any, training: Any = None) -> Any:
        if not training:
            return inputs
        shape = self.noise_shape or inputs.shape
        if self.noise_shape and shape[0] not in (1, None, inputs.shape[0]):
            # Replicas that share batch norm's statistics are one batch here, but each has its own masks.
            shape = [inputs.shape[0], *shape[1:]]
        if any(d is None for d in shape):
            raise ValueError("the noise shape must be static")
        drawn = self.machine.generator.uniform(shape)
        return inputs * tf.cast(drawn >= self.rate, inputs.dtype) / tf.cast(1.0 - self.rate, inputs.dtype)

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "rate": self.rate, "noise_shape": self.noise_shape, "seed": self.seed}

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


class _GroupNormalization(keras.layers.Layer):
    """Group norm; the strided grouping puts channels g, g + groups, ... into one group."""

    def __init__(
        self,
        groups: int,
        channels_axis: int,
        center: bool,
        scale: bool,
        epsilon: float,
        beta_initializer: Any,
        gamma_initializer: Any,
        strided_channel_grouping: bool,
        trainable: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, **kwargs)
        if not (center and scale):
            raise NotImplementedError("the double has group norm with offset and factor only")
        self.groups, self.epsilon, self.channels_axis = groups, epsilon, channels_axis
        self.strided = strided_channel_grouping
        self._initializers = (beta_initializer, gamma_initializer)

    def build(self, input_shape: Any) -> None:
        axis, rank = self.channels_axis, len(input_shape)
        if axis > rank - 1:
            raise ValueError("Axis is out of bounds.")
        axis = axis + rank if axis < 0 else axis
        channels = int(input_shape[axis])
        if self.groups > channels:
            raise ValueError(f"Invalid groups {self.groups} for {channels} channels.")
        if channels % self.groups:
            raise ValueError(f"{channels} channels are not a multiple of {self.groups} groups")
        if axis not in (1, rank - 1):
            raise ValueError("channels_axis must be 1 or the last")
        if axis != rank - 1:
            raise NotImplementedError("the double normalises the last axis only")
        beta, gamma = ("glorot_uniform" if i is None else i for i in self._initializers)
        self.beta = self.add_weight(name="beta", shape=(channels,), initializer=beta)
        self.gamma = self.add_weight(name="gamma", shape=(channels,), initializer=gamma)
        super().build(input_shape)

    def call(self, inputs: Any, training: Any = None) -> Any:
        shape = tf.shape(inputs)
        channels = int(inputs.shape[-1])
        size = channels // self.groups
        split = [size, self.groups] if self.strided else [self.groups, size]
        x = tf.reshape(tf.cast(inputs, tf.float32), [shape[0], -1, *split])
        axes = [1, 2] if self.strided else [1, 3]
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        x = tf.reshape((x - mean) * tf.math.rsqrt(variance + self.epsilon), shape)
        y = x * tf.cast(self.gamma, tf.float32) + tf.cast(self.beta, tf.float32)
        return tf.cast(y, inputs.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def build(machine: Any) -> Dict[str, types.ModuleType]:
    """Builds the modules, each layer behind its recorded signature."""
    dropout = type("Dropout", (_Dropout,), {"machine": machine})
    group_norm = type("GroupNormalization", (_GroupNormalization,), {})
    layers = types.ModuleType("ipu_tensorflow_addons.keras.layers")
    for name, kind in (("Dropout", dropout), ("GroupNormalization", group_norm)):
        signature = signature_of(FACTS["callables"]["addons.layers." + name]["params"])
        setattr(layers, name, checked(signature, name, kind))
    root, keras_part = (types.ModuleType(n) for n in ("ipu_tensorflow_addons", "ipu_tensorflow_addons.keras"))
    root.__path__ = keras_part.__path__ = []  # type: ignore[attr-defined]
    root.keras, keras_part.layers = keras_part, layers  # type: ignore[attr-defined]
    return {
        "ipu_tensorflow_addons": root,
        "ipu_tensorflow_addons.keras": keras_part,
        "ipu_tensorflow_addons.keras.layers": layers,
    }
