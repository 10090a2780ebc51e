"""Layers as the host computes them on a CPU, where that is faster than what Keras' layers do.

Weights, names and results are those of the layers; results differ by the order of sums.  Which layers are computed
otherwise follows from the network, its shapes, and whether there is work for all cores:

- A convolution whose kernel is 1x1 with stride 1, or whose output is one pixel, is a matrix product.  oneDNN's
  convolutions lose to a plain product at the sizes of small images, and the ones without oneDNN lose by more.
- In training, batch norm with the activation after it, and the weight gradient of depthwise convolutions on small
  images, are compiled by Numba (``kernels.py``), from Python 3.9 on.
- In evaluation, batch norm is folded into the convolution before it.
- Zeros that a layer adds before a convolution are left to it, where its own padding, ``SAME``, would be the same.
- Every second pixel, which the skips of CIFAR's ResNets take, is two plain slices: a strided one is many times slower.

GPUs and IPUs compute the layers as they are.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasLayer, Tensor, TensorShape
from ipucnn.compiled import HAS_KERNELS
from ipucnn.models.blueprint import Step
from ipucnn.models.layers.micro_batches import BatchNormalization, ghost_batch_norm
from ipucnn.models.layers.per_sample import SubsamplePad

# A layer: its output of its input.
Compute = Callable[[Tensor], Tensor]
# A convolution without its bias: of its input and its kernel.
Convolve = Callable[[Tensor, Tensor], Tensor]

# Depthwise convolutions of more output pixels leave their weight gradient to TensorFlow.
MAX_KERNEL_PIXELS = 16


@dataclass
class FastLayers:
    """What is computed otherwise than the layers do, by the layers' names.

    Attributes:
        training, inference: how.
        done_in_training: layers that one beside them computes as well: activations that the normalisation before them
            computes already, and zeros that are left to the convolution after them.
        done_in_inference: the same: batch norms that the convolution before them computes already, and zeros.
    """

    training: Dict[str, Compute] = field(default_factory=dict)
    inference: Dict[str, Compute] = field(default_factory=dict)
    done_in_training: List[str] = field(default_factory=list)
    done_in_inference: List[str] = field(default_factory=list)


def find_fast_layers(
    steps: Sequence[Step], layers: Dict[str, KerasLayer], needed: Sequence[str], alone: bool
) -> FastLayers:
    """
    Args:
        steps: of one pipeline stage, in order.
        layers: of all steps, by name.
        needed: layers whose output leaves the stage.
        alone: what leaves each layer is needed, so none may be computed with another.
    """
    found = FastLayers()
    own = {step.name for step in steps}
    readers: Dict[str, List[str]] = {}
    for step in steps:
        for name in step.inputs:
            readers.setdefault(name, []).append(step.name)

    def next_of(name: str) -> Optional[KerasLayer]:
        """The one layer that reads this one's output, if they may be computed together."""
        following = readers.get(name, [])
        return None if alone or name in needed or len(following) != 1 else layers[following[0]]

    for step in steps:
        name, layer, following = step.name, layers[step.name], next_of(step.name)
        if isinstance(layer, BatchNormalization):
            if not layer.trainable:
                continue  # Frozen: it knows no statistics of the batch.
            activation = "linear" if following is None else _activation(following)
            if HAS_KERNELS and following is not None and activation != "linear":
                found.done_in_training.append(following.name)
            if HAS_KERNELS:
                found.training[name] = _normalisation(layer, activation)
        elif isinstance(layer, SubsamplePad):
            subsample = _subsample_pad(layer)
            if subsample is not None:
                found.training[name] = found.inference[name] = subsample
        else:
            before = step.inputs[0]
            # What another stage computes, this one cannot leave out.
            zeros = layers[before] if before in own and next_of(before) is layer else None
            convolve = _convolution(layer, zeros)
            if convolve is None:
                continue
            if convolve.has_zeros:
                found.done_in_training.append(step.inputs[0])
                found.done_in_inference.append(step.inputs[0])
            if convolve.is_faster:
                found.training[name] = _layer(layer, convolve.convolve)
                found.inference[name] = found.training[name]
            if isinstance(following, BatchNormalization) and _is_linear(layer):
                found.done_in_inference.append(following.name)
                found.inference[name] = _folded(layer, convolve.convolve, following)
    return found


def _activation(layer: KerasLayer) -> str:
    """The kernels' name of an activation layer; "linear" of whatever they do not know."""
    config = layer.get_config()
    if type(layer) is keras.layers.Activation:
        names = {"relu": "relu", "relu6": "relu6", "swish": "swish", "silu": "swish"}
        # Of a function that Keras does not know the name is a dictionary.
        return names.get(str(config["activation"]), "linear")
    if type(layer) is keras.layers.ReLU and not (config.get("negative_slope") or config.get("threshold")):
        bound = config["max_value"]  # in Keras 2.6 an array
        return {None: "relu", 6.0: "relu6"}.get(None if bound is None else float(bound), "linear")
    return "linear"


def _is_linear(layer: KerasLayer) -> bool:
    return layer.get_config()["activation"] == "linear"


# What is compiled.


def _numpy(
    function: Callable[..., object], inputs: Sequence[Tensor], shapes: Sequence[TensorShape]
) -> List[Tensor]:
    """What a function of float32 arrays returns, of these static shapes; it has no side effects."""
    outputs = tf.compat.v1.py_func(function, inputs, [tf.float32] * len(shapes), stateful=False)
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    for output, shape in zip(outputs, shapes):
        output.set_shape(shape)
    return outputs


def normalise(
    x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, parts: int, activation: str
) -> Tuple[Tensor, Tensor, Tensor]:
    """``kernels.forward`` with its gradient; mean and biased variance have none."""
    from ipucnn.sessions.host import kernels

    channels = int(x.shape[-1])

    def forward(
        x: np.ndarray, gamma: np.ndarray, beta: np.ndarray
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        return kernels.forward(x, gamma, beta, epsilon, parts, activation)

    def backward(
        dy: np.ndarray,
        x: np.ndarray,
        gamma: np.ndarray,
        beta: np.ndarray,
        mean: np.ndarray,
        variance: np.ndarray,
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        return kernels.backward(dy, x, gamma, beta, mean, variance, epsilon, activation)

    @tf.custom_gradient
    def compute(x: Tensor, gamma: Tensor, beta: Tensor) -> Any:
        y, mean, variance = _numpy(forward, [x, gamma, beta], [x.shape, [parts, channels], [parts, channels]])

        def gradient(dy: Tensor, *_: object) -> Any:
            return _numpy(backward, [dy, x, gamma, beta, mean, variance], [x.shape, [channels], [channels]])

        return (y, tf.stop_gradient(mean), tf.stop_gradient(variance)), gradient

    return compute(x, gamma, beta)


def _normalisation(layer: KerasLayer, activation: str) -> Compute:
    """Batch norm in training, with the activation after it."""
    from ipucnn.sessions.host import kernels

    activate = {"linear": tf.identity, "relu": tf.nn.relu, "relu6": tf.nn.relu6, "swish": tf.nn.swish}[
        activation
    ]

    def compute(inputs: Tensor) -> Tensor:
        is_activated = False

        def ghost_norm(
            x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, num_groups: int
        ) -> Tuple[Tensor, Tensor, Tensor]:
            nonlocal is_activated
            channels = int(x.shape[-1])
            if x.shape.num_elements() is None or not kernels.share_all_cores(num_groups, channels):
                return ghost_batch_norm(x, gamma, beta, epsilon, num_groups)
            is_activated = True
            y, mean, variance = normalise(x, gamma, beta, epsilon, num_groups, activation)
            rows = x.shape.num_elements() // (num_groups * channels)
            return y, mean, variance * (rows / max(rows - 1.0, 1.0))

        outputs = layer.normalised(inputs, ghost_norm)
        return outputs if is_activated else activate(outputs)

    return compute


# Convolutions.


class _Convolution(NamedTuple):
    """A convolution as a function of its kernel.

    Attributes:
        is_faster: than the layer.
        has_zeros: it adds those of the layer before it, too.
    """

    convolve: Convolve
    is_faster: bool
    has_zeros: bool


class _Geometry(NamedTuple):
    """The image that a convolution is given, and how it is padded."""

    size: Tuple[int, int]
    padding: str


def _convolution(layer: KerasLayer, before: Optional[KerasLayer]) -> Optional[_Convolution]:
    """None of what is no convolution, or one of a kind that is left alone.

    Args:
        before: the layer that the convolution alone reads, if they may be computed together.
    """
    if isinstance(layer, keras.layers.DepthwiseConv2D):
        find: Callable[[KerasLayer, _Geometry], Optional[Tuple[Convolve, bool]]] = _depthwise
    elif type(layer) is keras.layers.Conv2D and layer.groups == 1:
        find = _dense
    else:
        return None
    if None in tuple(layer.input.shape)[1:] or layer.data_format != "channels_last":
        return None
    geometry = None if before is None else _with_zeros(layer, before)
    own = _Geometry(tuple(layer.input.shape[1:3]), layer.padding.upper())
    found = find(layer, geometry or own)
    return (
        None
        if found is None
        else _Convolution(found[0], found[1] or geometry is not None, geometry is not None)
    )


def _with_zeros(layer: KerasLayer, before: KerasLayer) -> Optional[_Geometry]:
    """A convolution and the zeros that the layer before it adds, as one; None where TensorFlow has no name for that."""
    if type(before) is not keras.layers.ZeroPadding2D or layer.padding.upper() != "VALID":
        return None
    if tuple(layer.dilation_rate) != (1, 1):
        return None
    size = tuple(before.input.shape[1:3])
    for k in range(2):
        output, first = _padding_before(size[k], layer.kernel_size[k], layer.strides[k], "SAME")
        last = max((output - 1) * layer.strides[k] + layer.kernel_size[k] - size[k], 0) - first
        if tuple(before.padding[k]) != (first, last):
            return None
    return _Geometry(size, "SAME")


def _kernel(layer: KerasLayer) -> Tensor:
    """A convolution's kernel; Keras 2.6 has another name for a depthwise one."""
    return tf.convert_to_tensor(
        layer.depthwise_kernel if hasattr(layer, "depthwise_kernel") else layer.kernel
    )


def _layer(layer: KerasLayer, convolve: Convolve) -> Compute:
    """The convolution with bias and activation."""

    def compute(x: Tensor) -> Tensor:
        y = convolve(x, _kernel(layer))
        if layer.use_bias:
            y = tf.nn.bias_add(y, tf.convert_to_tensor(layer.bias))
        return y if _is_linear(layer) else layer.activation(y)

    return compute


def _folded(layer: KerasLayer, convolve: Convolve, norm: KerasLayer) -> Compute:
    """The convolution with the batch norm after it, by the moving statistics."""

    def compute(x: Tensor) -> Tensor:
        factor, offset = norm.affine()
        if layer.use_bias:
            offset = offset + factor * tf.convert_to_tensor(layer.bias)
        kernel = _kernel(layer)
        outputs = (x.shape[0] or 0) * tf.TensorShape(layer.output.shape[1:]).num_elements()
        if 0 < outputs < kernel.shape.num_elements():
            # Of a few samples the output is the smaller of the two that can be multiplied.
            return convolve(x, kernel) * factor + offset
        is_depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
        folded = kernel * (tf.reshape(factor, kernel.shape[-2:]) if is_depthwise else factor)
        return tf.nn.bias_add(convolve(x, folded), offset)

    return compute


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


class _Window(NamedTuple):
    """The taps of a kernel that meet the image, and the pixels they meet, where the output is one pixel."""

    taps: Tuple[slice, slice]
    pixels: Tuple[slice, slice]

    def of_image(self, x: Tensor) -> Tensor:
        if all(pixels == slice(0, size) for pixels, size in zip(self.pixels, x.shape[1:3])):
            return x
        return x[:, self.pixels[0], self.pixels[1]]


def _window(layer: KerasLayer, geometry: _Geometry) -> Optional[_Window]:
    """None where the output has more pixels than one, or the kernel is spread."""
    if tuple(layer.dilation_rate) != (1, 1):
        return None
    rows, columns = (
        tap_ranges(geometry.size[k], layer.kernel_size[k], layer.strides[k], geometry.padding)
        for k in range(2)
    )
    if any(last != 1 for _, _, last, _ in (*rows, *columns)):
        return None
    return _Window(
        (slice(rows[0][0], rows[-1][0] + 1), slice(columns[0][0], columns[-1][0] + 1)),
        (slice(rows[0][3], rows[-1][3] + 1), slice(columns[0][3], columns[-1][3] + 1)),
    )


def _dense(layer: KerasLayer, geometry: _Geometry) -> Tuple[Convolve, bool]:
    """A convolution over all channels, and whether it is faster than the layer: a matrix product, if it is one."""
    window = _window(layer, geometry)
    is_pointwise = tuple(layer.kernel_size) == tuple(layer.strides) == (1, 1)
    options = {
        "strides": list(layer.strides),
        "padding": geometry.padding,
        "dilations": list(layer.dilation_rate),
    }

    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        if is_pointwise:
            pixels = x.shape[1:3]
        elif window is not None:
            x, kernel, pixels = window.of_image(x), kernel[window.taps], [1, 1]
        else:
            return tf.nn.conv2d(x, kernel, **options)
        outputs = int(kernel.shape[-1])
        inputs = kernel.shape.num_elements() // outputs
        y = tf.matmul(tf.reshape(x, [-1, inputs]), tf.reshape(kernel, [inputs, outputs]))
        return tf.reshape(y, [-1, *pixels, outputs])

    return convolve, is_pointwise or window is not None


def _depthwise(layer: KerasLayer, geometry: _Geometry) -> Optional[Tuple[Convolve, bool]]:
    """A depthwise convolution with multiplier 1 and one stride, and whether it is faster than the layer."""
    if (
        layer.depth_multiplier != 1
        or layer.strides[0] != layer.strides[1]
        or tuple(layer.dilation_rate) != (1, 1)
    ):
        return None
    window = _window(layer, geometry)
    stride, padding = layer.strides[0], geometry.padding
    _, height, width, _ = layer.output.shape
    is_small = HAS_KERNELS and height * width <= MAX_KERNEL_PIXELS

    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        if window is None and is_small:
            return depthwise(x, kernel, stride, padding)
        if window is None:
            return tf.nn.depthwise_conv2d(x, kernel, [1, stride, stride, 1], padding)
        products = window.of_image(x) * kernel[window.taps][..., 0]
        if tuple(products.shape[1:3]) == (1, 1):
            return products
        return tf.reduce_sum(products, axis=[1, 2], keepdims=True)

    return convolve, is_small or window is not None


def depthwise(x: Tensor, kernel: Tensor, stride: int, padding: str) -> Tensor:
    """``tf.nn.depthwise_conv2d`` (multiplier 1, static sizes) with the weight gradient of the kernels."""
    from ipucnn.sessions.host import kernels

    strides = [1, stride, stride, 1]
    size = (int(kernel.shape[0]), int(kernel.shape[1]))
    top, left = (_padding_before(int(x.shape[k + 1]), size[k], stride, padding)[1] for k in range(2))
    weight_gradient = functools.partial(
        kernels.depthwise_filter, kernel=size, stride=stride, before=(top, left)
    )

    @tf.custom_gradient
    def convolve(x: Tensor, kernel: Tensor) -> Any:
        y = tf.raw_ops.DepthwiseConv2dNative(input=x, filter=kernel, strides=strides, padding=padding)

        def gradient(dy: Tensor) -> Any:
            dx = tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
                input_sizes=tf.shape(x), filter=kernel, out_backprop=dy, strides=strides, padding=padding
            )
            return [dx, *_numpy(weight_gradient, [x, dy], [kernel.shape])]

        return y, gradient

    return convolve(x, kernel)


def _subsample_pad(layer: KerasLayer) -> Optional[Compute]:
    """None of images of odd sizes, or of unknown ones."""
    _, height, width, channels = layer.input.shape
    if height is None or width is None or height % 2 or width % 2:
        return None

    def compute(x: Tensor) -> Tensor:
        rows = tf.slice(tf.reshape(x, [-1, 2 * width * channels]), [0, 0], [-1, width * channels])
        pixels = tf.slice(tf.reshape(rows, [-1, 2 * channels]), [0, 0], [-1, channels])
        pixels = tf.reshape(pixels, [-1, height // 2, width // 2, channels])
        return tf.pad(pixels, [[0, 0], [0, 0], [0, 0], [0, layer.channels - channels]])

    return compute
