"""Batch norm and convolutions of the host: by functions that Numba compiles, or by TensorFlow's operations.

Layers call :func:`batch_norm`, :func:`depthwise_conv2d` and :func:`conv2d`, which choose: :func:`why_not` decides once
in a process whether compiled functions can be used, and the shapes of the tensors whether they are faster.
``kernels.py`` has these functions.  They are operations of TensorFlow: its C interface registers them in its tables of
operations and kernels, as a C++ library of operations would (``tensorflow/c/ops.h``, ``tensorflow/c/kernels.h``).
"""

import ctypes
import functools
from typing import Any, Callable, List, Sequence, Tuple

import tensorflow as tf

from ipucnn.aliases import Tensor, TensorShape
from ipucnn.compiled import HAS_KERNELS, TILE_OUTPUTS, VECTOR, multiplies_faster, tensorflow_library
from ipucnn.errors import MissingError
from ipucnn.models.layers.micro_batches import ghost_batch_norm, unbiased_variance

ACTIVATIONS = {"linear": tf.identity, "relu": tf.nn.relu, "relu6": tf.nn.relu6, "swish": tf.nn.swish}
"""TensorFlow's functions for the activations that are compiled with batch norm."""
# TensorFlow computes the weight gradient of depthwise convolutions with more output pixels.
MAX_KERNEL_PIXELS = 16
# It computes that of other convolutions with fewer pairs of an input and an output channel.
LEAST_PAIRS = 1024

# Inputs and outputs of each operation; its name in TensorFlow begins with PREFIX.
PREFIX = "Ipucnn"
_NORM = ("x: float", "gamma: float", "beta: float")
_FILTER = ("kernel: float", "x: float", "dy: float", "settings: int64")
OPERATIONS = {
    "Normalise": (
        "_normalise",
        (*_NORM, "epsilon: float", "settings: int64"),
        ("y: float", "mean: float", "variance: float"),
    ),
    "NormaliseGradient": (
        "_normalise_gradient",
        ("dy: float", *_NORM, "mean: float", "variance: float", "epsilon: float", "settings: int64"),
        ("dx: float", "dgamma: float", "dbeta: float"),
    ),
    "DepthwiseFilterGradient": (
        "_depthwise_filter_gradient",
        _FILTER,
        ("gradient: float",),
    ),
    "FilterGradient": ("_filter_gradient", _FILTER, ("gradient: float",)),
}


@functools.lru_cache(maxsize=None)
def why_not() -> str:
    """Returns the reason why TensorFlow computes all layers itself; empty if it can call compiled code."""
    if not HAS_KERNELS:
        return "Numba's last version for Python 3.8 is slower than TensorFlow"
    try:
        tensorflow_library()
    except MissingError as error:
        return error.message
    return ""


def compiled_layers() -> str:
    """Returns what is compiled: "yes", "yes, but ..." or the reason why nothing is."""
    if why_not():
        return why_not()
    return "yes" if multiplies_faster() else "yes, but weight gradients of depthwise convolutions only"


def batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, parts: int, activation: str
) -> Tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`ghost_batch_norm` of ``parts`` groups, and one of ``ACTIVATIONS`` of its first result."""
    if not why_not() and x.shape.num_elements() is not None:
        from ipucnn.sessions.host import kernels

        numbers, channels = x.shape.num_elements(), int(x.shape[-1])
        if kernels.is_faster(numbers, parts, channels):
            y, mean, variance = normalise(x, gamma, beta, epsilon, parts, activation)
            return y, mean, unbiased_variance(variance, numbers // (parts * channels))
    y, mean, unbiased = ghost_batch_norm(x, gamma, beta, epsilon, parts)
    return ACTIVATIONS[activation](y), mean, unbiased


def has_compiled_gradient(output_pixels: int) -> bool:
    """Returns whether the weight gradient of a depthwise convolution is compiled, with so many pixels of its output."""
    return not why_not() and output_pixels <= MAX_KERNEL_PIXELS


def padding_of(size: int, kernel: int, stride: int, padding: str) -> Tuple[int, int, int]:
    """Returns (output size, zeros before the first pixel, zeros after the last one) of one dimension in TensorFlow."""
    if padding == "VALID":
        return (size - kernel) // stride + 1, 0, 0
    output = -(-size // stride)
    zeros = max((output - 1) * stride + kernel - size, 0)
    return output, zeros // 2, zeros - zeros // 2


def depthwise_conv2d(x: Tensor, kernel: Tensor, stride: int, padding: str) -> Tensor:
    """Computes ``tf.nn.depthwise_conv2d`` of static sizes and multiplier 1, with the fastest weight gradient.

    Args:
        x, kernel, padding: as for TensorFlow's function.
        stride: the stride in both dimensions.
    """
    strides = [1, stride, stride, 1]
    sides = [padding_of(int(x.shape[k + 1]), int(kernel.shape[k]), stride, padding) for k in range(2)]
    if not has_compiled_gradient(sides[0][0] * sides[1][0]):
        return tf.nn.depthwise_conv2d(x, kernel, strides, padding)

    @tf.custom_gradient
    def convolve(x: Tensor, kernel: Tensor) -> Any:
        y = tf.raw_ops.DepthwiseConv2dNative(input=x, filter=kernel, strides=strides, padding=padding)

        def gradient(dy: Tensor) -> Any:
            dx = tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
                input_sizes=tf.shape(x), filter=kernel, out_backprop=dy, strides=strides, padding=padding
            )
            return [dx, depthwise_filter_gradient(kernel, x, dy, stride, [before for _, before, _ in sides])]

        return y, gradient

    return convolve(x, kernel)


def has_compiled_filter_gradient(kernel_shape: Sequence[int], dilations: Sequence[int]) -> bool:
    """Returns whether the weight gradient of a convolution over all channels is compiled.

    Args:
        kernel_shape: (height, width, input channels, output channels).
        dilations: of height and width.
    """
    inputs, outputs = kernel_shape[2:]
    has_whole_vectors = inputs % VECTOR == 0 and outputs % TILE_OUTPUTS == 0
    is_supported = has_whole_vectors and tuple(dilations) == (1, 1)
    return is_supported and inputs * outputs >= LEAST_PAIRS and not why_not() and multiplies_faster()


def conv2d(
    x: Tensor, kernel: Tensor, strides: Sequence[int], padding: str, dilations: Sequence[int]
) -> Tensor:
    """Computes ``tf.nn.conv2d`` over all channels, with the fastest weight gradient if sizes are static.

    Args:
        x, kernel, padding: as for TensorFlow's function.
        strides, dilations: of height and width.
    """
    if x.shape.num_elements() is None or not has_compiled_filter_gradient(kernel.shape, dilations):
        return tf.nn.conv2d(x, kernel, list(strides), padding, dilations=list(dilations))
    sides = [padding_of(int(x.shape[k + 1]), int(kernel.shape[k]), strides[k], padding) for k in range(2)]
    options = {"strides": [1, *strides, 1], "padding": padding}

    @tf.custom_gradient
    def convolve(x: Tensor, kernel: Tensor) -> Any:
        y = tf.raw_ops.Conv2D(input=x, filter=kernel, **options)

        def gradient(dy: Tensor) -> Any:
            dx = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(x), filter=kernel, out_backprop=dy, **options
            )
            return [dx, filter_gradient(kernel, x, dy, strides, [before for _, before, _ in sides])]

        return y, gradient

    return convolve(x, kernel)


@functools.lru_cache(maxsize=None)
def _register() -> None:
    """Registers the operations, once in a process.

    Raises:
        RuntimeError: TensorFlow refuses one.
    """
    from ipucnn.sessions.host.kernels import CALLBACKS

    library = tensorflow_library()
    address, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int

    def call(name: str, result: object, *given: Tuple[object, object]) -> Any:
        function = getattr(library, name)
        function.restype, function.argtypes = result, [kind for kind, _ in given]
        return function(*(value for _, value in given))

    def callback(name: str) -> Tuple[object, object]:
        return address, CALLBACKS[name].address

    def checked(name: str, *given: Tuple[object, object]) -> None:
        status = call("TF_NewStatus", address)
        call(name, None, *given, (address, status))
        code, message = (
            call("TF_GetCode", number, (address, status)),
            call("TF_Message", text, (address, status)),
        )
        call("TF_DeleteStatus", None, (address, status))
        if code:
            raise RuntimeError(f"{name}: {message.decode(errors='replace')}")

    for name, (compute, inputs, outputs) in OPERATIONS.items():
        builder = call("TF_NewOpDefinitionBuilder", address, (text, f"{PREFIX}{name}".encode()))
        for given in inputs:
            call("TF_OpDefinitionBuilderAddInput", None, (address, builder), (text, given.encode()))
        for given in outputs:
            call("TF_OpDefinitionBuilderAddOutput", None, (address, builder), (text, given.encode()))
        call("TF_OpDefinitionBuilderSetShapeInferenceFunction", None, (address, builder), callback("_shapes"))
        checked("TF_RegisterOpDefinition", (address, builder))
        kernel = call(
            "TF_NewKernelBuilder",
            address,
            (text, f"{PREFIX}{name}".encode()),
            (text, b"CPU"),
            (address, None),
            callback(compute),
            (address, None),
        )
        checked("TF_RegisterKernelBuilder", (text, f"{PREFIX}{name}".encode()), (address, kernel))


def _in_graph(function: Callable[..., object], *inputs: Tensor) -> Any:
    """Calls a function in a graph, because only graphs can have operations that no Python function stands for."""
    return tf.function(function)(*inputs) if tf.executing_eagerly() else function(*inputs)


def _apply(name: str, inputs: Sequence[Tensor], shapes: Sequence[TensorShape]) -> List[Tensor]:
    """Returns the results of an operation of the graph, which have these static shapes."""
    _register()
    graph = tf.compat.v1.get_default_graph()
    outputs = graph.create_op(PREFIX + name, list(inputs), [tf.float32] * len(shapes)).outputs
    for output, shape in zip(outputs, shapes):
        output.set_shape(shape)
    return list(outputs)


def normalise(
    x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, parts: int, activation: str
) -> Tuple[Tensor, Tensor, Tensor]:
    """Normalises each channel of each part by its own mean and variance.

    Args:
        x: (parts * n, ..., channels), float32, of static shape.
        gamma, beta: (channels,).
        epsilon: the number to add to the variance.
        parts: the number of parts.
        activation: one of ``kernels.ACTIVATIONS``.

    Returns:
        y, shaped like x; means and biased variances (parts, channels), which have no gradient.
    """
    from ipucnn.sessions.host import kernels

    shape = tuple(x.shape)

    @tf.custom_gradient
    def compute(x: Tensor, gamma: Tensor, beta: Tensor) -> Any:
        settings = tf.constant(kernels.settings_of_norm(shape, parts, activation), tf.int64)
        more, statistics = [tf.constant(epsilon, tf.float32), settings], [parts, shape[-1]]
        y, mean, variance = _apply("Normalise", [x, gamma, beta, *more], [shape, statistics, statistics])

        def gradient(dy: Tensor, *_: Tensor) -> List[Tensor]:
            inputs = [dy, x, gamma, beta, mean, variance, *more]
            return _apply("NormaliseGradient", inputs, [shape, shape[-1:], shape[-1:]])

        return (y, tf.stop_gradient(mean), tf.stop_gradient(variance)), gradient

    outputs: Tuple[Tensor, Tensor, Tensor] = _in_graph(compute, x, gamma, beta)
    return outputs


def depthwise_filter_gradient(
    kernel: Tensor, x: Tensor, dy: Tensor, stride: int, before: Sequence[int]
) -> Tensor:
    """Returns the weight gradient of a depthwise convolution with multiplier 1.

    Args:
        kernel: (kernel height, kernel width, c, 1); only its shape is used.
        x: (n, h, w, c).
        dy: (n, h', w', c).
        stride: the stride in both dimensions.
        before: rows of zeros above, and columns of zeros left of the image.
    """
    from ipucnn.sessions.host import kernels

    settings = kernels.settings_of_depthwise_filter(
        tuple(dy.shape), int(kernel.shape[0]), stride, (before[0], before[1])
    )

    return _apply_filter("DepthwiseFilterGradient", kernel, x, dy, settings)


def filter_gradient(
    kernel: Tensor, x: Tensor, dy: Tensor, strides: Sequence[int], before: Sequence[int]
) -> Tensor:
    """Returns the weight gradient of a convolution over all channels.

    Args:
        kernel: (kernel height, kernel width, c, c'); only its shape is used.
        x: (n, h, w, c).
        dy: (n, h', w', c').
        strides: of height and width.
        before: rows of zeros above, and columns of zeros left of the image.
    """
    from ipucnn.sessions.host import kernels

    settings = kernels.settings_of_filter(
        tuple(kernel.shape), tuple(dy.shape), (strides[0], strides[1]), (before[0], before[1])
    )
    return _apply_filter("FilterGradient", kernel, x, dy, settings)


def _apply_filter(name: str, kernel: Tensor, x: Tensor, dy: Tensor, settings: Sequence[int]) -> Tensor:
    """Returns the result of an operation that computes a weight gradient."""

    def compute(kernel: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        return _apply(name, [kernel, x, dy, tf.constant(settings, tf.int64)], [kernel.shape])[0]

    return _in_graph(compute, kernel, x, dy)
