"""Faster implementations of Keras' layers for CPUs.

Weights, names and results are those of Keras' layers, except for the order of sums.  The network, its shapes, and
whether there is work for all cores decide which layers are replaced:

- A convolution whose kernel is 1x1 with stride 1, or whose output is one pixel, is a matrix product.  oneDNN's
  convolutions are slower than a plain product for small images, and the ones without oneDNN are slower still.
- In training, batch norm and the activation after it are one function, and so are a convolution and its weight
  gradient: ``operations.py`` has them, and says which are compiled.
- In evaluation, batch norm is folded into the convolution before it.
- A layer that adds zeros before a convolution is skipped if the convolution's own ``SAME`` padding adds the same ones.
- Two plain slices take every second pixel for the skips of CIFAR's ResNets: a strided slice is many times slower.

GPUs and IPUs compute the layers as they are.
"""

import functools
from dataclasses import dataclass, field
from typing import Callable, Container, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasLayer, Tensor
from ipucnn.models.blueprint import Node
from ipucnn.models.keras_config import num_calls
from ipucnn.models.layers.micro_batches import BatchNormalization
from ipucnn.models.layers.per_sample import SubsamplePad
from ipucnn.sessions.host import operations

# The output of a layer as a function of its input.
Compute = Callable[[Tensor], Tensor]
# A convolution without bias as a function of its input and its kernel.
Convolve = Callable[[Tensor, Tensor], Tensor]


@dataclass
class FastLayers:
    """The replacements of layers, by the layers' names.

    Attributes:
        training, inference: the functions that replace layers in training and in inference.  Layers that a neighbour
            computes as well are replaced by :func:`unchanged`.
    """

    training: Dict[str, Compute] = field(default_factory=dict)
    inference: Dict[str, Compute] = field(default_factory=dict)


def unchanged(x: Tensor) -> Tensor:
    """Returns the input of a layer that a neighbour computes as well.

    In training these are activations after a normalisation, in inference batch norms after a convolution, and in both
    zero padding before a convolution.
    """
    return x


def find_fast_layers(
    nodes: Sequence[Node], layers: Dict[str, KerasLayer], needed: Container[str]
) -> FastLayers:
    """Chooses the layers of a pipeline stage to replace by faster functions.

    Args:
        nodes: the nodes of the stage, in order.
        layers: the layers of all nodes, by name.
        needed: the layers whose output is needed, so that the next layer must not be computed together with them.
    """
    fast = FastLayers()
    names_of_stage = {node.name for node in nodes}
    readers: Dict[str, List[str]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node.name)

    def next_of(name: str) -> Optional[KerasLayer]:
        """Returns the only layer that reads this one's output, if they may be computed together."""
        following = readers.get(name, [])
        return None if name in needed or len(following) != 1 else layers[following[0]]

    for node in nodes:
        if num_calls(layers[node.name]) > 1:
            continue
        name, layer, following = node.name, layers[node.name], next_of(node.name)
        if isinstance(layer, BatchNormalization):
            if not layer.moves:
                continue  # It uses no statistics of the batch.
            activation = "linear" if following is None else _activation(following)
            if following is not None and activation != "linear":
                fast.training[following.name] = unchanged
            fast.training[name] = _normalisation(layer, activation)
        elif isinstance(layer, SubsamplePad):
            subsample = _subsample_pad(layer)
            if subsample is not None:
                fast.training[name] = fast.inference[name] = subsample
        else:
            before = node.inputs[0]
            # Zero padding that another stage computes cannot be skipped.
            zeros = layers[before] if before in names_of_stage and next_of(before) is layer else None
            convolve = _convolution(layer, zeros)
            if convolve is None:
                continue
            if convolve.has_zeros:
                fast.training[before] = fast.inference[before] = unchanged
            if convolve.is_faster:
                fast.training[name] = _layer(layer, convolve.convolve)
                fast.inference[name] = fast.training[name]
            if isinstance(following, BatchNormalization) and _is_linear(layer):
                fast.inference[following.name] = unchanged
                fast.inference[name] = _folded(layer, convolve.convolve, following)
    return fast


def _activation(layer: KerasLayer) -> str:
    """Returns the kernels' name of an activation layer; "linear" for any layer that the kernels do not support."""
    config = layer.get_config()
    if type(layer) is keras.layers.Activation:
        # The configuration of a function unknown to Keras is a dictionary.
        name = str(config["activation"])
        name = "swish" if name == "silu" else name
        return name if name in operations.ACTIVATIONS else "linear"
    if type(layer) is keras.layers.ReLU and not (config.get("negative_slope") or config.get("threshold")):
        bound = config["max_value"]  # in Keras 2.6 an array
        return {None: "relu", 6.0: "relu6"}.get(None if bound is None else float(bound), "linear")
    return "linear"


def _is_linear(layer: KerasLayer) -> bool:
    return layer.get_config()["activation"] == "linear"


def _normalisation(layer: KerasLayer, activation: str) -> Compute:
    """Returns batch norm in training, with the activation after it, as one function."""
    norm = functools.partial(operations.batch_norm, activation=activation)
    return lambda inputs: layer.normalised(inputs, norm)


# Convolutions.


class _Convolution(NamedTuple):
    """A convolution as a function of its input and its kernel.

    Attributes:
        is_faster: whether the function is faster than the layer.
        has_zeros: whether it also adds the zeros of the layer before it.
    """

    convolve: Convolve
    is_faster: bool
    has_zeros: bool


class _Geometry(NamedTuple):
    """The size of a convolution's input image, and its padding."""

    size: Tuple[int, int]
    padding: str


def _convolution(layer: KerasLayer, before: Optional[KerasLayer]) -> Optional[_Convolution]:
    """Returns a convolution layer as a function; None for other layers, and for kinds that are not replaced.

    Args:
        layer: the layer.
        before: the layer whose output only this one reads, if they may be computed together.
    """
    if type(layer) is keras.layers.DepthwiseConv2D:
        find: Callable[[KerasLayer, _Geometry], Optional[Tuple[Convolve, bool]]] = _depthwise
    elif type(layer) is keras.layers.Conv2D and layer.groups == 1:
        find = _dense
    else:
        return None
    if None in tuple(layer.input.shape)[1:] or layer.data_format != "channels_last":
        return None
    geometry = None if before is None else _with_zeros(layer, before)
    unpadded = _Geometry(tuple(layer.input.shape[1:3]), layer.padding.upper())
    function = find(layer, geometry or unpadded)
    if function is None:
        return None
    convolve, is_faster = function
    has_zeros = geometry is not None
    return _Convolution(convolve, is_faster or has_zeros, has_zeros)


def _with_zeros(layer: KerasLayer, before: KerasLayer) -> Optional[_Geometry]:
    """Returns the geometry of a convolution that includes the zeros of the layer before it.

    Returns None if none of TensorFlow's paddings is equivalent.
    """
    if type(before) is not keras.layers.ZeroPadding2D or layer.padding.upper() != "VALID":
        return None
    if tuple(layer.dilation_rate) != (1, 1):
        return None
    size = tuple(before.input.shape[1:3])
    for k in range(2):
        _, *zeros = operations.padding_of(size[k], layer.kernel_size[k], layer.strides[k], "SAME")
        if list(before.padding[k]) != zeros:
            return None
    return _Geometry(size, "SAME")


def _kernel(layer: KerasLayer) -> Tensor:
    """Returns a convolution's kernel; Keras 2.6 has another attribute for a depthwise one."""
    return tf.convert_to_tensor(
        layer.depthwise_kernel if hasattr(layer, "depthwise_kernel") else layer.kernel
    )


def _layer(layer: KerasLayer, convolve: Convolve) -> Compute:
    """Returns the convolution with bias and activation as one function."""

    def compute(x: Tensor) -> Tensor:
        y = convolve(x, _kernel(layer))
        if layer.use_bias:
            y = tf.nn.bias_add(y, tf.convert_to_tensor(layer.bias))
        return y if _is_linear(layer) else layer.activation(y)

    return compute


def _folded(layer: KerasLayer, convolve: Convolve, norm: KerasLayer) -> Compute:
    """Returns the convolution with the batch norm after it, which uses the moving statistics, as one function."""

    def compute(x: Tensor) -> Tensor:
        factor, offset = norm.affine()
        if layer.use_bias:
            offset = offset + factor * tf.convert_to_tensor(layer.bias)
        kernel = _kernel(layer)
        outputs = (x.shape[0] or 0) * tf.TensorShape(layer.output.shape[1:]).num_elements()
        if 0 < outputs < kernel.shape.num_elements():
            # With few samples the output is smaller than the kernel, so scaling the output is cheaper.
            return convolve(x, kernel) * factor + offset
        is_depthwise = type(layer) is keras.layers.DepthwiseConv2D
        folded = kernel * (tf.reshape(factor, kernel.shape[-2:]) if is_depthwise else factor)
        return tf.nn.bias_add(convolve(x, folded), offset)

    return compute


def tap_ranges(size: int, kernel: int, stride: int, padding: str) -> List[Tuple[int, int, int, int]]:
    """Returns (tap, first output, one past the last output, first input) of each tap that overlaps the image.

    All numbers are those of one dimension.
    """
    output, before, _ = operations.padding_of(size, kernel, stride, padding)
    ranges = []
    for tap in range(kernel):
        inside = [o for o in range(output) if 0 <= o * stride + tap - before < size]
        if inside:
            ranges.append((tap, inside[0], inside[-1] + 1, inside[0] * stride + tap - before))
    return ranges


class _Window(NamedTuple):
    """The taps of a kernel that overlap the image, and the pixels they cover, if the output is one pixel."""

    taps: Tuple[slice, slice]
    pixels: Tuple[slice, slice]

    def of_image(self, x: Tensor) -> Tensor:
        if all(pixels == slice(0, size) for pixels, size in zip(self.pixels, x.shape[1:3])):
            return x
        return x[:, self.pixels[0], self.pixels[1]]


def _window(layer: KerasLayer, geometry: _Geometry) -> Optional[_Window]:
    """Returns the window of a convolution; None if the output has more than one pixel, or the kernel is dilated."""
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
    """Returns a convolution over all channels as a function, and whether it is faster than the layer.

    It is faster if it can be computed as a matrix product, or if its weight gradient is compiled.
    """
    window = _window(layer, geometry)
    is_pointwise = tuple(layer.kernel_size) == tuple(layer.strides) == (1, 1)
    kernel_shape = (*layer.kernel_size, int(layer.input.shape[-1]), layer.filters)
    is_compiled = operations.has_compiled_filter_gradient(kernel_shape, layer.dilation_rate)

    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        if is_pointwise:
            pixels = x.shape[1:3]
        elif window is not None:
            x, kernel, pixels = window.of_image(x), kernel[window.taps], [1, 1]
        else:
            return operations.conv2d(x, kernel, layer.strides, geometry.padding, layer.dilation_rate)
        outputs = int(kernel.shape[-1])
        inputs = kernel.shape.num_elements() // outputs
        y = tf.matmul(tf.reshape(x, [-1, inputs]), tf.reshape(kernel, [inputs, outputs]))
        return tf.reshape(y, [-1, *pixels, outputs])

    return convolve, is_pointwise or window is not None or is_compiled


def _depthwise(layer: KerasLayer, geometry: _Geometry) -> Optional[Tuple[Convolve, bool]]:
    """Returns a depthwise convolution as a function, and whether it is faster than the layer.

    Returns None unless the multiplier is 1, both strides are equal, and the kernel is not dilated.
    """
    if (
        layer.depth_multiplier != 1
        or layer.strides[0] != layer.strides[1]
        or tuple(layer.dilation_rate) != (1, 1)
    ):
        return None
    window = _window(layer, geometry)
    stride, padding = layer.strides[0], geometry.padding
    _, height, width, _ = layer.output.shape

    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        if window is None:
            return operations.depthwise_conv2d(x, kernel, stride, padding)
        products = window.of_image(x) * kernel[window.taps][..., 0]
        if tuple(products.shape[1:3]) == (1, 1):
            return products
        return tf.reduce_sum(products, axis=[1, 2], keepdims=True)

    return convolve, window is not None or operations.has_compiled_gradient(height * width)


def _subsample_pad(layer: KerasLayer) -> Optional[Compute]:
    """Returns a faster function for the layer; None if the image's height or width is odd or unknown."""
    _, height, width, channels = layer.input.shape
    if height is None or width is None or height % 2 or width % 2:
        return None

    def compute(x: Tensor) -> Tensor:
        rows = tf.slice(tf.reshape(x, [-1, 2 * width * channels]), [0, 0], [-1, width * channels])
        pixels = tf.slice(tf.reshape(rows, [-1, 2 * channels]), [0, 0], [-1, channels])
        pixels = tf.reshape(pixels, [-1, height // 2, width // 2, channels])
        return tf.pad(pixels, [[0, 0], [0, 0], [0, 0], [0, layer.channels - channels]])

    return compute
