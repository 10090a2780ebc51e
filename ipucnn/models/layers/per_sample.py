"""Layers that compute each sample separately, for cases in which Keras' layers are slower or unavailable.

- ``GroupedConv2D``: TensorFlow's CPU kernels have no gradients for grouped convolutions (neither 2.6 nor 2.21), and
  their forward pass is slower than one convolution per group.
- ``Cropping2D``: on an IPU TensorFlow's crop is a view of the whole tensor, so the whole tensor stays in memory and is
  sent between pipeline stages.  ``custom_ops/crop.cpp`` copies the cropped part.  If it was not built, and on other
  devices, the plain crop is used.  The results are the same.
- ``SubsamplePad``, ``HardSigmoid`` and ``HardSwish``: not every version of Keras has them.
"""

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import Tensor, TensorShape
from ipucnn.models.custom_ops import crop_library


def native_groups() -> bool:
    """Whether a GPU or IPU is visible, whose kernels support groups; ``--device cpu`` hides them."""
    return any(tf.config.get_visible_devices(kind) for kind in ("GPU", "IPU"))


@keras.utils.register_keras_serializable(package="ipucnn")
class GroupedConv2D(keras.layers.Conv2D):
    """``keras.layers.Conv2D`` with the same weights, which runs one convolution per group on a CPU."""

    def call(self, inputs: Tensor) -> Tensor:
        kernel = tf.convert_to_tensor(self.kernel)
        options = {
            "strides": list(self.strides),
            "padding": self.padding.upper(),
            "dilations": list(self.dilation_rate),
        }
        if self.groups == 1 or native_groups():
            outputs = tf.nn.conv2d(inputs, kernel, **options)
        else:
            # The kernel is (height, width, in / groups, out); the groups are consecutive on its last axis.
            parts = zip(tf.split(inputs, self.groups, axis=-1), tf.split(kernel, self.groups, axis=-1))
            outputs = tf.concat([tf.nn.conv2d(x, k, **options) for x, k in parts], axis=-1)
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, tf.convert_to_tensor(self.bias))
        return outputs if self.activation is None else self.activation(outputs)


# Version of the attributes for ``custom_ops/crop.cpp``; it increases when the operation's results change.
_VERSION = 1

_Borders = Tuple[Tuple[int, int], Tuple[int, int]]


def on_ipu() -> bool:
    """Whether the current trace is for IPUs: in the scope of one of the SDK's strategies, alone or under poprun."""
    names = {base.__name__ for base in type(tf.distribute.get_strategy()).__mro__}
    return not names.isdisjoint(("IPUStrategyV1", "PopDistStrategy"))


def _custom_op(
    inputs: Tensor, operation: str, shape: Tuple[int, ...], attributes: str, library: Path
) -> Tensor:
    """Applies an operation of the library, (batch, height, width, channels) -> ``shape``."""
    from tensorflow.python import ipu

    outputs = ipu.custom_ops.precompiled_user_op(
        [inputs],
        str(library),
        outs={"output_types": [inputs.dtype], "output_shapes": [tf.TensorShape(shape)]},
        name=operation,
        op_name=operation,
        attributes=attributes,
    )
    return outputs[0]


def copying_crop(inputs: Tensor, borders: _Borders, library: Path) -> Tensor:
    """Copies a part of the images to a new tensor with the Poplar operation, which also has the gradient.

    The gradient needs only the part's gradient, so the whole images need not be stored for the backward pass.

    Args:
        inputs: (batch, height, width, channels), with static sizes.
        borders: ((top, bottom), (left, right)) pixels to cut off.
        library: path of the library with the operations.
    """
    (top, bottom), (left, right) = borders
    batch, height, width, channels = (int(size) for size in inputs.shape)
    whole = (batch, height, width, channels)
    part = (batch, height - top - bottom, width - left - right, channels)
    attributes = " ".join(map(str, (_VERSION, top, left, bottom, right, height, width)))

    @tf.custom_gradient
    def crop(image: Tensor) -> Tensor:
        def gradient(of_part: Tensor) -> Tensor:
            return _custom_op(of_part, "PadNHWC", whole, attributes, library)

        return _custom_op(image, "CropNHWC", part, attributes, library), gradient

    return crop(inputs)


@keras.utils.register_keras_serializable(package="ipucnn")
class Cropping2D(keras.layers.Cropping2D):
    """``keras.layers.Cropping2D`` that copies on IPUs if the custom operation was built."""

    def call(self, inputs: Tensor) -> Tensor:
        library: Optional[Path] = crop_library() if on_ipu() else None
        # Sizes are unknown only while Keras infers shapes; the SDK runs only static shapes.
        if library is None or not tf.TensorShape(inputs.shape).is_fully_defined():
            return super().call(inputs)
        return copying_crop(inputs, self.cropping, library)


@keras.utils.register_keras_serializable(package="ipucnn")
class SubsamplePad(keras.layers.Layer):
    """Takes every second pixel and appends channels of zeros.

    Args:
        channels: channels of the output, at least those of the input.
    """

    def __init__(self, channels: int, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.channels = int(channels)

    def call(self, inputs: Tensor) -> Tensor:
        missing = self.channels - int(inputs.shape[-1])
        return tf.pad(inputs[:, ::2, ::2, :], [[0, 0], [0, 0], [0, 0], [0, missing]])

    def compute_output_shape(self, input_shape: TensorShape) -> TensorShape:
        batch, height, width, _ = input_shape
        return (batch, (height + 1) // 2, (width + 1) // 2, self.channels)

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "channels": self.channels}


@keras.utils.register_keras_serializable(package="ipucnn")
class HardSigmoid(keras.layers.Layer):
    """``relu6(x + 3) / 6``; in Keras 2.6 this name is another function, and this one consists of operations."""

    def call(self, inputs: Tensor) -> Tensor:
        return tf.nn.relu6(inputs + 3.0) * (1.0 / 6.0)

    def compute_output_shape(self, input_shape: TensorShape) -> TensorShape:
        return input_shape


@keras.utils.register_keras_serializable(package="ipucnn")
class HardSwish(keras.layers.Layer):
    """``x * relu6(x + 3) / 6``, Howard et al. 2019, section 5.2."""

    def call(self, inputs: Tensor) -> Tensor:
        return inputs * (tf.nn.relu6(inputs + 3.0) * (1.0 / 6.0))

    def compute_output_shape(self, input_shape: TensorShape) -> TensorShape:
        return input_shape
