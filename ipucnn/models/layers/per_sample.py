"""Depthwise convolution whose weight gradient is fast on CPUs for small images.

oneDNN makes every other convolution of EfficientNet at 32x32 two to four times faster on a CPU, but takes 15
to 80 ms for the weight gradient of one depthwise layer with an output of 4x4 or less (128 samples, 2
cores), where a sum over the kernel's taps takes 1 to 2 ms.  ``benchmarks/depthwise.py`` prints both.
"""

from typing import Any, List, Tuple

import tensorflow as tf
from tensorflow import keras

# Outputs of at most this many pixels take the sum over taps; measured by benchmarks/depthwise.py.
MAX_TAP_SUM_PIXELS = 16


def _padding_before(size: int, kernel: int, stride: int, padding: str) -> Tuple[int, int]:
    """(output size, zeros before the first pixel) of one dimension, as TensorFlow pads."""
    if padding == "VALID":
        return (size - kernel) // stride + 1, 0
    output = -(-size // stride)
    return output, max((output - 1) * stride + kernel - size, 0) // 2


def tap_ranges(size: int, kernel: int, stride: int, padding: str) -> List[Tuple[int, int, int, int]]:
    """For each tap that meets the image in one dimension: (tap, first output, one past the last, first input)."""
    output, before = _padding_before(size, kernel, stride, padding)
    ranges = []
    for tap in range(kernel):
        inside = [o for o in range(output) if 0 <= o * stride + tap - before < size]
        if inside:
            ranges.append((tap, inside[0], inside[-1] + 1, inside[0] * stride + tap - before))
    return ranges


def _phases(x: Any, stride: int) -> List[List[Any]]:
    """x[:, a::stride, b::stride] for every a, b, in one transposition (a strided slice is 20 times slower)."""
    if stride == 1:
        return [[x]]
    height, width, channels = (int(d) for d in x.shape[1:])
    rows, columns = -(-height // stride), -(-width // stride)
    x = tf.pad(x, [[0, 0], [0, rows * stride - height], [0, columns * stride - width], [0, 0]])
    x = tf.transpose(tf.reshape(x, [-1, rows, stride, columns, stride, channels]), [2, 4, 0, 1, 3, 5])
    return [[x[a, b] for b in range(stride)] for a in range(stride)]


def tap_sum_filter_gradient(x: Any, dy: Any, kernel: Tuple[int, int], stride: int, padding: str) -> Any:
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


def depthwise_conv2d(x: Any, kernel: Any, stride: int, padding: str) -> Any:
    """``tf.nn.depthwise_conv2d`` (NHWC, multiplier 1, one stride) with the faster weight gradient."""
    strides = [1, stride, stride, 1]
    size = (int(kernel.shape[0]), int(kernel.shape[1]))

    @tf.custom_gradient
    def convolve(x: Any, kernel: Any) -> Any:
        y = tf.raw_ops.DepthwiseConv2dNative(input=x, filter=kernel, strides=strides, padding=padding)

        def gradient(dy: Any) -> Any:
            dx = tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
                input_sizes=tf.shape(x), filter=kernel, out_backprop=dy, strides=strides, padding=padding
            )
            return dx, tap_sum_filter_gradient(x, dy, size, stride, padding)

        return y, gradient

    return convolve(x, kernel)


class DepthwiseConv2D(keras.layers.DepthwiseConv2D):
    """Keras' layer, with the weight gradient of :func:`tap_sum_filter_gradient` where it is the faster one."""

    def call(self, inputs: Any) -> Any:
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
            _padding_before(height, self.kernel_size[0], self.strides[0], padding)[0]
            * _padding_before(width, self.kernel_size[1], self.strides[1], padding)[0]
        )
