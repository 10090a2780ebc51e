"""Reads the layer graph of a built Keras model, with the same result from Keras 2.6 and Keras 3.

This module imports no TensorFlow: a caller that has a model has imported it already.
"""

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, PlainValue, TensorShape
from ipucnn.errors import ConfigurationError
from ipucnn.models.keras_config import output_shape, read_blueprint, stock_kind
from ipucnn.planning.graphs.layer_graph import OTHER, PRODUCT_CLASSES, Layer, LayerGraph

Shape = Tuple[int, ...]
Config = Mapping[str, Any]

# Class names of Keras layers by op_class, for those that need no further inspection.
_CLASSES = {
    "input": ("InputLayer",),
    "transposed_conv": ("Conv2DTranspose",),
    "matmul": ("Dense",),
    "norm": ("BatchNormalization", "GroupNormalization", "LayerNormalization"),
    "activation": (
        *("ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax"),
        *("Activation", "HardSwish", "HardSigmoid"),
    ),
    "elementwise": (
        *("Dropout", "SpatialDropout2D", "GaussianDropout", "GaussianNoise", "Rescaling", "Normalization"),
        *("Add", "Subtract", "Average", "Multiply", "Maximum", "Minimum"),
    ),
    "pool": ("MaxPooling2D", "AveragePooling2D", "GlobalMaxPooling2D", "GlobalAveragePooling2D"),
    "resize": ("UpSampling2D",),
    "concat": ("Concatenate",),
    "reshape": ("Reshape", "Flatten", "Identity", "ZeroPadding2D", "Cropping2D", "SubsamplePad"),
}
OP_CLASSES = {kind: op_class for op_class, kinds in _CLASSES.items() for kind in kinds}
CONVOLUTIONS = ("Conv2D", "GroupedConv2D", "DepthwiseConv2D")
SEPARABLE = "SeparableConv2D"
# Activations whose gradient is a function of their output; the others' needs their input.
FROM_OUTPUT = ("relu", "relu6", "leaky_relu", "sigmoid", "hard_sigmoid", "tanh", "softmax", "elu", "selu")
# Functions of the layers that compute an activation.
_ACTIVATIONS = {
    **{"ReLU": "relu", "LeakyReLU": "relu", "ELU": "elu", "Softmax": "softmax", "PReLU": "prelu"},
    **{"HardSigmoid": "hard_sigmoid", "HardSwish": "hard_swish"},
}

# Suffix of the second half of a separable convolution.
_POINTWISE = "/pointwise"


class _Facts(NamedTuple):
    """The properties of a Keras layer that determine the layer graph.

    Attributes:
        kind: its class name.
        settings: its configuration.
        weights: their shapes, the kernel first.
        num_trainable: the number of trained elements in the weights.
    """

    kind: str
    settings: Config
    weights: Tuple[Shape, ...]
    num_trainable: int


def graph_of(model: KerasModel, name: str) -> LayerGraph:
    """Returns the layer graph of a built Keras functional model with one input and one output.

    A layer whose class the planner does not model becomes an ``OTHER``.

    Raises:
        ConfigurationError: several inputs or outputs, an operation that is no layer, or an input that is no image.
    """
    shapes: Dict[str, Shape] = {}
    names: Dict[str, str] = {}
    kinds: Dict[str, str] = {}
    layers: List[Layer] = []
    tied: List[Tuple[str, str]] = []
    num_calls: Dict[str, int] = {}
    for node in read_blueprint(model, name).nodes:
        if not node.has_layer:
            raise ConfigurationError(
                f"operation '{node.name}' of {name} is not a layer", "build the network of Keras layers alone"
            )
        layer, number = node.layer_in(model), num_calls.get(node.layer, 0)
        num_calls[node.layer] = number + 1
        facts, shape = _facts(layer), _sample_shape(layer, number)
        inputs = [names[source] for source in node.inputs]
        input_shapes = [shapes[source] for source in node.inputs]
        parts = _layers(facts, node.name, inputs, input_shapes, shape, first_call=number == 0)
        if number > 0:
            tied.append((node.layer, parts[-1].name))
        elif len(parts) > 1:
            tied.append((parts[0].name, parts[-1].name))
        layers += parts
        kinds.update((part.name, facts.kind) for part in parts)
        shapes[node.name], names[node.name] = shape, parts[-1].name
    layers = _crops_first(layers, kinds)
    for first, last in _shared_weights(model):
        tied.append((first, last + _POINTWISE if last + _POINTWISE in kinds else last))
    input_shape = layers[0].output_shape
    if len(input_shape) != 3:
        raise ConfigurationError(
            f"the input of {name} is {input_shape}, not (height, width, channels)",
            "give a network that takes images",
        )
    return LayerGraph(name, input_shape, layers[-1].output_shape[-1], tuple(layers), tuple(tied))


def _facts(layer: KerasLayer) -> _Facts:
    return _Facts(
        stock_kind(layer) or f"{type(layer).__name__} of the user's",
        layer.get_config(),
        tuple(tuple(int(n) for n in weight.shape) for weight in layer.weights),
        sum(_size(weight.shape) for weight in layer.trainable_weights),
    )


def _activation_of(config: Config) -> str:
    """Returns the name of a layer's activation; "linear" if it has none."""
    value = config.get("activation", "linear")
    if isinstance(value, dict):
        value = value.get("config", value.get("class_name"))
    return str(value).lower() if value else "linear"


def _pair(value: PlainValue) -> Tuple[int, int]:
    """Returns height and width from one number or two."""
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _crops_first(layers: List[Layer], kinds: Dict[str, str]) -> List[Layer]:
    """Returns the layers with every crop directly behind the layer that it crops; Keras places it before its reader.

    So wherever the network is cut, the smaller tensor is sent and kept on the IPUs behind the cut.
    """
    crops = [layer for layer in layers if kinds[layer.name] == "Cropping2D"]
    if not crops:
        return layers
    ordered = [layer for layer in layers if layer not in crops]
    for crop in crops:
        position = next(i for i, layer in enumerate(ordered) if layer.name == crop.inputs[0])
        ordered.insert(position + 1, crop)
    return ordered


def _sample_shape(layer: KerasLayer, call: int) -> Shape:
    """Returns the output shape of one sample."""
    shape = output_shape(layer, call)[1:]
    if any(n is None for n in shape):
        raise ConfigurationError(
            f"layer '{layer.name}' has the shape {shape}: plans need a fixed image size",
            "build the network for one --image-size",
        )
    return tuple(int(n) for n in shape)


def _size(shape: TensorShape) -> int:
    return math.prod(int(n) for n in shape)


def _shared_weights(model: KerasModel) -> List[Tuple[str, str]]:
    """Returns pairs of different layers that share a weight."""
    holder: Dict[int, str] = {}
    pairs = []
    for layer in model.layers:
        for weight in layer.weights:
            first = holder.setdefault(id(weight), layer.name)
            if first != layer.name and (first, layer.name) not in pairs:
                pairs.append((first, layer.name))
    return pairs


def _layers(
    facts: _Facts,
    name: str,
    inputs: List[str],
    input_shapes: List[Shape],
    shape: Shape,
    first_call: bool,
) -> List[Layer]:
    """Returns a Keras layer as one layer of the graph, or as two for a separable convolution."""
    kind, config = facts.kind, facts.settings
    common: Dict[str, Any] = dict(
        inputs=tuple(inputs),
        output_shape=shape,
        input_channels=input_shapes[0][-1] if input_shapes else 0,
        # Later calls use the weights of the first.
        num_parameters=sum(map(_size, facts.weights)) if first_call else 0,
        num_trainable=facts.num_trainable if first_call else 0,
    )
    if kind == SEPARABLE:
        return _separable(facts, name, common)
    op_class, channels = _op_class(kind, config, common["input_channels"]), common["input_channels"]
    is_convolution = kind in (*CONVOLUTIONS, "Conv2DTranspose")
    kernel, strides, groups = (1, 1), (1, 1), 1
    if is_convolution:
        kernel, strides = _pair(config["kernel_size"]), _pair(config["strides"])
    if kind in CONVOLUTIONS:
        groups = channels if op_class == "depthwise_conv" else int(config.get("groups", 1))
    elif op_class == "pool":
        pooled = not kind.startswith("Global")
        kernel = _pair(config["pool_size"]) if pooled else input_shapes[0][:2]  # type: ignore[assignment]
        strides = _pair(config["strides"] or config["pool_size"]) if pooled else kernel
    # A transposed convolution uses its kernel once per position of the input, other layers once per position of the
    # output.
    positions = input_shapes[0] if kind == "Conv2DTranspose" else shape
    used = facts.weights[:1] if is_convolution or kind == "Dense" else ()
    if op_class == OTHER:
        # Only its weights are known: a matrix or kernel is assumed to be used at each position.
        used = tuple(weight for weight in facts.weights if len(weight) > 1)
    macs = sum(map(_size, used)) * math.prod(positions[:-1])
    kept = _kept(facts, op_class, name, inputs)
    return [
        Layer(name, op_class, kernel=kernel, strides=strides, groups=groups, macs=macs, kept=kept, **common)
    ]


def _op_class(kind: str, config: Config, input_channels: int) -> str:
    if kind not in CONVOLUTIONS:
        return OP_CLASSES.get(kind, OTHER)
    groups = 0 if kind == "DepthwiseConv2D" else int(config.get("groups", 1))
    if groups == 0 or (groups > 1 and groups == input_channels):
        return "depthwise_conv"
    return "grouped_conv" if groups > 1 else "conv"


def _kept(facts: _Facts, op_class: str, name: str, inputs: List[str]) -> Tuple[str, ...]:
    """Returns the names of the layers whose outputs the backward pass needs."""
    kind = facts.kind
    if op_class in PRODUCT_CLASSES:
        # A fused activation needs its output or its input, which has the same size; its own output represents either.
        kept = [*inputs, *([name] if _activation_of(facts.settings) != "linear" else [])]
    elif op_class == "norm" or kind in ("Multiply", "Maximum", "Minimum"):
        kept = inputs
    elif kind in ("MaxPooling2D", "GlobalMaxPooling2D") or op_class == OTHER:
        kept = [*inputs, name]  # the gradient goes where input and output are equal
    elif kind in ("Dropout", "SpatialDropout2D", "GaussianDropout"):
        kept = [name] if facts.settings["rate"] > 0 else []  # its mask cannot be drawn again
    elif op_class == "activation":
        activation = _ACTIVATIONS.get(kind) or _activation_of(facts.settings)
        kept = [] if activation == "linear" else [name] if activation in FROM_OUTPUT else inputs
    else:
        kept = []
    return tuple(dict.fromkeys(kept))


def _separable(facts: _Facts, name: str, common: KerasConfig) -> List[Layer]:
    """Returns the depthwise half under the layer's own name, and the pointwise half behind it."""
    depthwise, pointwise = facts.weights[:2]
    height, width, channels = common["output_shape"]
    middle = pointwise[2]
    in_depthwise, num_parameters = _size(depthwise), common["num_parameters"]
    of_depthwise = min(in_depthwise, num_parameters)  # none in a later call
    trained = min(in_depthwise, common["num_trainable"])
    activation = [name + _POINTWISE] if _activation_of(facts.settings) != "linear" else []
    first = Layer(
        name=name,
        op_class="depthwise_conv",
        inputs=common["inputs"],
        output_shape=(height, width, middle),
        kernel=_pair(facts.settings["kernel_size"]),
        strides=_pair(facts.settings["strides"]),
        groups=common["input_channels"],
        input_channels=common["input_channels"],
        macs=in_depthwise * height * width,
        num_parameters=of_depthwise,
        num_trainable=trained,
        kept=common["inputs"],
    )
    second = Layer(
        name=name + _POINTWISE,
        op_class="conv",
        inputs=(name,),
        output_shape=(height, width, channels),
        input_channels=middle,
        macs=_size(pointwise) * height * width,
        num_parameters=num_parameters - of_depthwise,
        num_trainable=common["num_trainable"] - trained,
        kept=(name, *activation),
    )
    return [first, second]
