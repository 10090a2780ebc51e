"""What the planner knows of Keras' stock layers: their classes, and the shapes of weights and outputs.

The shapes follow from a layer's configuration and the shapes that it reads, so that a network is read from its file
without building it: no class of the file is looked up, and nothing in it runs.  Shapes are those of one sample,
channels last.
"""

import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import PlainValue

Shape = Tuple[int, ...]
Config = Mapping[str, Any]

# Class name of a Keras layer -> op_class, for those that need no closer look.
OP_CLASSES = {
    "InputLayer": "input",
    "Conv2DTranspose": "transposed_conv",
    "Dense": "matmul",
    "BatchNormalization": "norm",
    "GroupNormalization": "norm",
    "LayerNormalization": "norm",
    "ReLU": "activation",
    "LeakyReLU": "activation",
    "PReLU": "activation",
    "ELU": "activation",
    "Softmax": "activation",
    "Activation": "activation",
    "HardSwish": "activation",
    "HardSigmoid": "activation",
    "Dropout": "elementwise",
    "SpatialDropout2D": "elementwise",
    "GaussianDropout": "elementwise",
    "GaussianNoise": "elementwise",
    "Rescaling": "elementwise",
    "Normalization": "elementwise",
    "Add": "elementwise",
    "Subtract": "elementwise",
    "Average": "elementwise",
    "Multiply": "elementwise",
    "Maximum": "elementwise",
    "Minimum": "elementwise",
    "MaxPooling2D": "pool",
    "AveragePooling2D": "pool",
    "GlobalMaxPooling2D": "pool",
    "GlobalAveragePooling2D": "pool",
    "UpSampling2D": "resize",
    "Concatenate": "concat",
    "Reshape": "reshape",
    "Flatten": "reshape",
    "Identity": "reshape",
    "ZeroPadding2D": "reshape",
    "Cropping2D": "reshape",
    "SubsamplePad": "reshape",
}
CONVOLUTIONS = ("Conv2D", "GroupedConv2D", "DepthwiseConv2D")
SEPARABLE = "SeparableConv2D"
# Activations whose gradient is a function of their output; the others' needs their input.
FROM_OUTPUT = ("relu", "relu6", "leaky_relu", "sigmoid", "hard_sigmoid", "tanh", "softmax", "elu", "selu")

_MOST = 2**31


class BadLayer(ValueError):
    """A configuration that is none of its class; the text says what is wrong with it."""


class Arithmetic(NamedTuple):
    """Shapes of a layer's trainable weights, of its other weights, and of its output."""

    trainable: List[Shape]
    fixed: List[Shape]
    output: Shape


def activation_of(config: Config) -> str:
    """Name of a layer's activation; "linear" where there is none."""
    value = config.get("activation", "linear")
    if isinstance(value, dict):
        value = value.get("config", value.get("class_name"))
    return str(value).lower() if value else "linear"


def pair(value: PlainValue) -> Tuple[int, int]:
    """Height and width of what is given as one number or two."""
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def arithmetic(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    """The shapes of a stock layer, as Keras computes them.

    Args:
        kind: its class, which ``is_known``.
        config: what its ``get_config`` gave when it was saved.
        inputs: what it reads.

    Raises:
        BadLayer: a configuration, or inputs, that no layer of the class has.
    """
    if not inputs:
        raise BadLayer("reads nothing")
    if config.get("data_format", "channels_last") not in (None, "channels_last"):
        raise BadLayer("has its channels first, and IPUs' networks have them last")
    return _ARITHMETIC[kind](kind, config, inputs)


def is_known(kind: str) -> bool:
    """Whether ``arithmetic`` knows the class."""
    return kind in _ARITHMETIC


def _whole(config: Config, key: str, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST:
        raise BadLayer(f"has {key} = {_short(value)}, wanted a whole number from {least}")
    return value


def _wholes(config: Config, key: str, length: int, least: int = 1) -> Shape:
    value = config.get(key)
    values: Any = [value] * length if isinstance(value, int) else value
    good = isinstance(values, (list, tuple)) and len(values) == length
    if not good or any(
        not isinstance(n, int) or isinstance(n, bool) or not least <= n < _MOST for n in values
    ):
        raise BadLayer(f"has {key} = {_short(value)}, wanted {length} whole numbers from {least}")
    return tuple(values)


def _short(value: object) -> str:
    return repr(value)[:60]


def _flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise BadLayer(f"has {key} = {_short(value)}, wanted true or false")
    return value


def _image(inputs: Sequence[Shape]) -> Tuple[int, int, int]:
    shape = inputs[0]
    if len(shape) != 3:
        raise BadLayer(f"reads {shape}, wanted height, width and channels")
    return shape


def _windows(side: int, window: int, stride: int, padding: object) -> int:
    """Windows along a side."""
    if padding not in ("same", "valid"):
        raise BadLayer(f"has padding = {_short(padding)}, wanted same or valid")
    number = -(-side // stride) if padding == "same" else (side - window) // stride + 1
    if number < 1:
        raise BadLayer(f"has a window of {window} on {side} pixels")
    return number


def _bias(config: Config, size: int) -> List[Shape]:
    return [(size,)] if _flag(config, "use_bias", True) else []


def _convolution(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    height, width, channels = _image(inputs)
    kernel, strides = _wholes(config, "kernel_size", 2), _wholes(config, "strides", 2)
    dilation = _wholes({"dilation_rate": 1, **config}, "dilation_rate", 2)
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilation)]
    padding = config.get("padding", "valid")
    if kind == "Conv2DTranspose":
        filters, given = _whole(config, "filters"), config.get("output_padding")
        more = None if given is None else _wholes(config, "output_padding", 2, 0)
        sides = [
            _transposed(side, reach[i], strides[i], padding, None if more is None else more[i])
            for i, side in enumerate((height, width))
        ]
        return Arithmetic([(*kernel, filters, channels), *_bias(config, filters)], [], (*sides, filters))
    sides = [
        _windows(side, size, stride, padding) for side, size, stride in zip((height, width), reach, strides)
    ]
    if kind == "Conv2D":
        filters, groups = _whole(config, "filters"), _whole({"groups": 1, **config}, "groups")
        if channels % groups or filters % groups:
            raise BadLayer(f"has {groups} groups of {channels} channels and {filters} filters")
        weights = [(*kernel, channels // groups, filters)]
        return Arithmetic([*weights, *_bias(config, filters)], [], (*sides, filters))
    each = _whole({"depth_multiplier": 1, **config}, "depth_multiplier")
    depthwise, filters = (*kernel, channels, each), channels * each
    if kind == "DepthwiseConv2D":
        return Arithmetic([depthwise, *_bias(config, filters)], [], (*sides, filters))
    filters = _whole(config, "filters")
    pointwise = (1, 1, channels * each, filters)
    return Arithmetic([depthwise, pointwise, *_bias(config, filters)], [], (*sides, filters))


def _transposed(side: int, reach: int, stride: int, padding: object, more: Optional[int]) -> int:
    """A side of a transposed convolution's output, as Keras' ``compute_conv_transpose_output_shape`` has it."""
    if padding == "valid":
        return (side - 1) * stride + reach + (max(reach, stride) - reach if more is None else more)
    if padding == "same":
        return int(side * stride if more is None else (side - 1) * stride + reach % 2 + more)
    raise BadLayer(f"has padding = {_short(padding)}, wanted same or valid")


def _dense(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    units, shape = _whole(config, "units"), inputs[0]
    return Arithmetic([(shape[-1], units), *_bias(config, units)], [], (*shape[:-1], units))


def _axis(axis: object, rank: int) -> int:
    """Position in a sample's shape of an axis that is counted with the batch."""
    if not isinstance(axis, int) or isinstance(axis, bool) or not (-rank <= axis < 0 or 0 < axis <= rank):
        raise BadLayer(f"has axis = {_short(axis)}, and reads {rank} dimensions besides the batch")
    return axis - 1 if axis > 0 else rank + axis


def _norm(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    shape, axes = inputs[0], config.get("axis", -1)
    own = tuple(shape[_axis(axis, len(shape))] for axis in (axes if isinstance(axes, list) else [axes]))
    trainable = [own] * (_flag(config, "scale", True) + _flag(config, "center", True))
    return Arithmetic(trainable, [own, own] if kind == "BatchNormalization" else [], shape)


def _preprocessing_norm(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    shape, axes = inputs[0], config.get("axis", -1)
    kept = axes if isinstance(axes, list) else [] if axes is None else [axes]
    own = tuple(shape[_axis(axis, len(shape))] for axis in kept)
    # A mean that was given is part of the configuration; one that was measured is a weight, as their number is.
    return Arithmetic([], [own, own, ()] if config.get("mean") is None else [], shape)


def _parametric(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    shape = inputs[0]
    given = config.get("shared_axes")
    shared = {_axis(axis, len(shape)) for axis in (given if isinstance(given, list) else [])}
    return Arithmetic([tuple(1 if i in shared else n for i, n in enumerate(shape))], [], shape)


def _same(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    if "Dropout" in kind and not isinstance(config.get("rate"), (int, float)):
        raise BadLayer(f"has rate = {_short(config.get('rate'))}, wanted a number")
    return Arithmetic([], [], inputs[0])


def _merge(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    rank = max(map(len, inputs))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in inputs]
    output = tuple(max(sizes) for sizes in zip(*padded))
    if any(n not in (1, m) for shape in padded for n, m in zip(shape, output)):
        raise BadLayer(f"reads {', '.join(map(str, inputs))}, which do not go together")
    return Arithmetic([], [], output)


def _pool(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    height, width, channels = _image(inputs)
    if kind.startswith("Global"):
        sides: Shape = (1, 1) if _flag(config, "keepdims", False) else ()
        return Arithmetic([], [], (*sides, channels))
    window = _wholes(config, "pool_size", 2)
    strides = window if config.get("strides") is None else _wholes(config, "strides", 2)
    padding = config.get("padding", "valid")
    sides = tuple(_windows(s, k, stride, padding) for s, k, stride in zip((height, width), window, strides))
    return Arithmetic([], [], (*sides, channels))


def _resize(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    height, width, channels = _image(inputs)
    by = _wholes(config, "size", 2)
    return Arithmetic([], [], (height * by[0], width * by[1], channels))


def _concatenate(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    first = inputs[0]
    axis = _axis(config.get("axis", -1), len(first))
    for shape in inputs:
        if len(shape) != len(first) or any(n != m for i, (n, m) in enumerate(zip(shape, first)) if i != axis):
            raise BadLayer(f"reads {', '.join(map(str, inputs))}, which do not go together")
    joined = sum(shape[axis] for shape in inputs)
    return Arithmetic([], [], (*first[:axis], joined, *first[axis + 1 :]))


def _reshape(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    size = math.prod(inputs[0])
    if kind == "Flatten":
        return Arithmetic([], [], (size,))
    target = config.get("target_shape")
    if not isinstance(target, list) or any(not isinstance(n, int) or n < -1 or n == 0 for n in target):
        raise BadLayer(f"has target_shape = {_short(target)}, wanted whole numbers")
    known = math.prod(n for n in target if n > 0)
    if target.count(-1) > 1 or size % known or (-1 not in target and size != known):
        raise BadLayer(f"has target_shape = {_short(target)}, and reads {size} numbers")
    return Arithmetic([], [], tuple(size // known if n == -1 else n for n in target))


def _borders(kind: str, config: Config, inputs: Sequence[Shape]) -> Arithmetic:
    height, width, channels = _image(inputs)
    key, sign = ("padding", 1) if kind == "ZeroPadding2D" else ("cropping", -1)
    given = config.get(key)
    if not isinstance(given, list) or len(given) != 2:
        raise BadLayer(f"has {key} = {_short(given)}, wanted two pairs of whole numbers")
    ends = [_wholes({key: side}, key, 2, 0) for side in given]
    sides = tuple(side + sign * sum(own) for side, own in zip((height, width), ends))
    if min(sides) < 1:
        raise BadLayer(f"crops {height}x{width} pixels by {_short(given)}")
    return Arithmetic([], [], (*sides, channels))


_Formula = Callable[[str, Config, Sequence[Shape]], Arithmetic]
_BY_FORMULA: Tuple[Tuple[_Formula, Tuple[str, ...]], ...] = (
    (_convolution, ("Conv2D", "DepthwiseConv2D", "Conv2DTranspose", SEPARABLE)),
    (_dense, ("Dense",)),
    (_norm, ("BatchNormalization", "GroupNormalization", "LayerNormalization")),
    (_preprocessing_norm, ("Normalization",)),
    (_parametric, ("PReLU",)),
    (_same, ("ReLU", "LeakyReLU", "ELU", "Softmax", "Activation", "Identity")),
    (_same, ("Dropout", "SpatialDropout2D", "GaussianDropout", "GaussianNoise", "Rescaling")),
    (_merge, ("Add", "Subtract", "Average", "Multiply", "Maximum", "Minimum")),
    (_pool, ("MaxPooling2D", "AveragePooling2D", "GlobalMaxPooling2D", "GlobalAveragePooling2D")),
    (_resize, ("UpSampling2D",)),
    (_concatenate, ("Concatenate",)),
    (_reshape, ("Reshape", "Flatten")),
    (_borders, ("ZeroPadding2D", "Cropping2D")),
)
_ARITHMETIC: Dict[str, _Formula] = {kind: formula for formula, kinds in _BY_FORMULA for kind in kinds}
