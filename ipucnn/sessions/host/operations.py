"""Operations of TensorFlow that ``kernels.py`` computes: their declaration, and the functions that call them.

TensorFlow's C interface registers them in its tables of operations and kernels, as a C++ library of operations would
(``tensorflow/c/ops.h``, ``tensorflow/c/kernels.h``).
"""

import ctypes
import functools
from typing import Any, Callable, List, Sequence, Tuple

import tensorflow as tf

from ipucnn.aliases import Tensor, TensorShape
from ipucnn.compiled import HAS_KERNELS, tensorflow_library
from ipucnn.errors import MissingError

# Inputs and outputs of each operation; its name in TensorFlow begins with PREFIX.
PREFIX = "Ipucnn"
_NORM = ("x: float", "gamma: float", "beta: float")
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
        "_filter_gradient",
        ("kernel: float", "x: float", "dy: float", "settings: int64"),
        ("gradient: float",),
    ),
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

    settings = kernels.settings_of_filter(
        tuple(dy.shape), int(kernel.shape[0]), stride, (before[0], before[1])
    )

    def compute(kernel: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        inputs = [kernel, x, dy, tf.constant(settings, tf.int64)]
        return _apply("DepthwiseFilterGradient", inputs, [kernel.shape])[0]

    return _in_graph(compute, kernel, x, dy)
