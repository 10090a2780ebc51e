"""Layers that see each sample by itself, and do what Keras' own do, but faster, or where those can't.

- ``DepthwiseConv2D``: oneDNN makes every other convolution of EfficientNet at 32x32 two to four times faster on a CPU,
  but takes 15 to 80 ms for the weight gradient of one depthwise layer with an output of 4x4 or less (128 samples, 2
  cores), where a sum over the kernel's taps takes 1 to 2 ms.  ``benchmarks/depthwise.py`` prints both.
- ``GroupedConv2D``: TensorFlow's CPU kernels have no gradients for grouped convolutions (neither 2.6 nor 2.21), and
  their forward pass is slower than one convolution per group.
- ``Cropping2D``: on an IPU TensorFlow's crop is a view of the whole tensor, which stays in memory and is what travels
  between pipeline stages.  ``custom_ops/crop.cpp`` copies the part; where it was not built, and on other devices, the
  plain crop is used.  The numbers are the same.
- ``SubsamplePad``, ``HardSigmoid`` and ``HardSwish``, which not every version of Keras has.
"""

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import Tensor, TensorShape
from ipucnn.models.custom_ops import crop_library

# Outputs of at most this many pixels take the sum over taps; measured by benchmarks/depthwise.py.
MAX_TAP_SUM_PIXELS = 16


def padding_before(size: int, kernel: int, stride: int, padding: str) -> Tuple[int, int]:
    """(output size, zeros before the first pixel) of one dimension, as TensorFlow pads."""
    if padding == "VALID":
        return (size - kernel) // stride + 1, 0
    output = -(-size // stride)
    return output, max((output - 1) * stride + kernel - size, 0) // 2


def tap_ranges(size: int, kernel: int, stride: int, padding: str) -> List[Tuple[int, int, int, int]]:
    """For each tap that meets the image in one dimension: (tap, first output, one past the last, first input)."""
    output, before = padding_before(size, kernel, stride, padding)
    ranges = []
    for tap in range(kernel):
        inside = [o for o in range(output) if 0 <= o * stride + tap - before < size]
        if inside:
            ranges.append((tap, inside[0], inside[-1] + 1, inside[0] * stride + tap - before))
    return ranges


def _phases(x: Tensor, stride: int) -> List[List[Any]]:
    """x[:, a::stride, b::stride] for every a, b, in one transposition (a strided slice is 20 times slower)."""
    if stride == 1:
        return [[x]]
    height, width, channels = (int(d) for d in x.shape[1:])
    rows, columns = -(-height // stride), -(-width // stride)
    x = tf.pad(x, [[0, 0], [0, rows * stride - height], [0, columns * stride - width], [0, 0]])
    x = tf.transpose(tf.reshape(x, [-1, rows, stride, columns, stride, channels]), [2, 4, 0, 1, 3, 5])
    return [[x[a, b] for b in range(stride)] for a in range(stride)]


def tap_sum_filter_gradient(
    x: Tensor, dy: Tensor, kernel: Tuple[int, int], stride: int, padding: str
) -> Tensor:
    """Weight gradient of a depthwise convolution with multiplier 1, one sum per kernel tap.

    Args:
        x: input (n, h, w, c); h, w and c static.
        dy: gradient of the output (n, h', w', c).
        kernel: kernel height and width.

    Returns:
        (kernel height, kernel width, c, 1).
    """
    height, width, channels = (int(d) for d in x.shape[1:])
    rows = {t[0]: t for t in tap_ranges(height, kernel[0], stride, padding)}
    columns = {t[0]: t for t in tap_ranges(width, kernel[1], stride, padding)}
    phases = _phases(x, stride)
    zeros = tf.zeros([channels], x.dtype)
    taps = []
    for a in range(kernel[0]):
        for b in range(kernel[1]):
            if a not in rows or b not in columns:
                taps.append(zeros)
                continue
            _, i0, i1, xi = rows[a]
            _, j0, j1, xj = columns[b]
            phase = phases[xi % stride][xj % stride]
            xi, xj = xi // stride, xj // stride
            window = phase[:, xi : xi + i1 - i0, xj : xj + j1 - j0]
            taps.append(tf.reduce_sum(tf.reshape(window * dy[:, i0:i1, j0:j1], [-1, channels]), axis=0))
    return tf.reshape(tf.stack(taps), [kernel[0], kernel[1], channels, 1])


def depthwise_conv2d(x: Tensor, kernel: Tensor, stride: int, padding: str) -> Tensor:
    """``tf.nn.depthwise_conv2d`` (NHWC, multiplier 1, one stride) with the faster weight gradient."""
    strides = [1, stride, stride, 1]
    size = (int(kernel.shape[0]), int(kernel.shape[1]))

    @tf.custom_gradient
    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        y = tf.raw_ops.DepthwiseConv2dNative(input=x, filter=kernel, strides=strides, padding=padding)

        def gradient(dy: Tensor) -> Any:
            dx = tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
                input_sizes=tf.shape(x), filter=kernel, out_backprop=dy, strides=strides, padding=padding
            )
            return dx, tap_sum_filter_gradient(x, dy, size, stride, padding)

        return y, gradient

    return convolve(x, kernel)


class DepthwiseConv2D(keras.layers.DepthwiseConv2D):
    """Keras' layer, with the weight gradient of :func:`tap_sum_filter_gradient` where it is the faster one."""

    def call(self, inputs: Tensor) -> Tensor:
        height, width = inputs.shape[1], inputs.shape[2]
        strides = tuple(self.strides)
        if (
            height is None
            or width is None
            or self.depth_multiplier != 1
            or strides[0] != strides[1]
            or any(d != 1 for d in tuple(self.dilation_rate))
            or self.data_format != "channels_last"
            or self._output_pixels(height, width) > MAX_TAP_SUM_PIXELS
        ):
            return super().call(inputs)
        kernel = tf.convert_to_tensor(
            self.depthwise_kernel if hasattr(self, "depthwise_kernel") else self.kernel
        )
        outputs = depthwise_conv2d(inputs, kernel, strides[0], self.padding.upper())
        if self.use_bias:
            outputs = outputs + tf.convert_to_tensor(self.bias)
        return outputs if self.activation is None else self.activation(outputs)

    def _output_pixels(self, height: int, width: int) -> int:
        padding = self.padding.upper()
        return (
            padding_before(height, self.kernel_size[0], self.strides[0], padding)[0]
            * padding_before(width, self.kernel_size[1], self.strides[1], padding)[0]
        )


def native_groups() -> bool:
    """Whether an accelerator is visible whose kernels know groups."""
    return any(tf.config.list_physical_devices(kind) for kind in ("GPU", "IPU"))


@keras.utils.register_keras_serializable(package="ipucnn")
class GroupedConv2D(keras.layers.Conv2D):
    """``keras.layers.Conv2D`` with ``groups`` and its weights; one convolution per group on a CPU."""

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
            # The kernel is (height, width, in / groups, out): its last axis holds one group after the other.
            parts = zip(tf.split(inputs, self.groups, axis=-1), tf.split(kernel, self.groups, axis=-1))
            outputs = tf.concat([tf.nn.conv2d(x, k, **options) for x, k in parts], axis=-1)
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, tf.convert_to_tensor(self.bias))
        return outputs if self.activation is None else self.activation(outputs)


# Of the attributes that ``custom_ops/crop.cpp`` reads; raised with what it computes.
_VERSION = 1

_Borders = Tuple[Tuple[int, int], Tuple[int, int]]


def on_ipu() -> bool:
    """Whether what is traced now runs on IPUs: in the scope of the SDK's strategies, alone or under poprun."""
    names = {base.__name__ for base in type(tf.distribute.get_strategy()).__mro__}
    return not names.isdisjoint(("IPUStrategyV1", "PopDistStrategy"))


def _custom_op(
    inputs: Tensor, operation: str, shape: Tuple[int, ...], attributes: str, library: Path
) -> Tensor:
    """One of the library's operations, (batch, height, width, channels) -> ``shape``."""
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
    """The part of an image as a tensor of its own, with its gradient, through the Poplar operation.

    The gradient takes nothing but the part's gradient, so the whole image need not be kept for the backward pass.

    Args:
        inputs: (batch, height, width, channels), all known.
        borders: ((top, bottom), (left, right)) pixels to cut off.
        library: with the operations.
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
        # With sizes that are not known Keras infers shapes; the SDK runs nothing of the kind.
        if library is None or not tf.TensorShape(inputs.shape).is_fully_defined():
            return super().call(inputs)
        return copying_crop(inputs, self.cropping, library)


@keras.utils.register_keras_serializable(package="ipucnn")
class SubsamplePad(keras.layers.Layer):
    """Every second pixel, with zeros appended as new channels.

    Args:
        channels: channels of the output, at least those of the input.
    """

    def __init__(self, channels: int, **kwargs: Any) -> None:
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
    """``relu6(x + 3) / 6``; Keras 2.6 has another function of this name and writes this one as operations."""

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
