"""The layer graph of a Keras model, the same from Keras 2.6 and Keras 3.

Imports no TensorFlow by itself: whoever has a model has it.
"""

import math
import warnings
from typing import Any, Dict, List, Set, Tuple

from ipucnn.errors import ConfigurationError
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph

# Class name of a Keras layer -> op_class, for those that need no closer look.
_OP_CLASSES = {
    "InputLayer": "input",
    "Conv2DTranspose": "transposed_conv",
    "Dense": "matmul",
    "BatchNormalization": "norm",
    "GroupNormalization": "norm",
    "LayerNormalization": "norm",
    "ReLU": "activation",
    "LeakyReLU": "activation",
    "Softmax": "activation",
    "Activation": "activation",
    "HardSwish": "activation",
    "HardSigmoid": "activation",
    "Dropout": "elementwise",
    "SpatialDropout2D": "elementwise",
    "Rescaling": "elementwise",
    "Add": "elementwise",
    "Subtract": "elementwise",
    "Average": "elementwise",
    "Multiply": "elementwise",
    "MaxPooling2D": "pool",
    "AveragePooling2D": "pool",
    "GlobalMaxPooling2D": "pool",
    "GlobalAveragePooling2D": "pool",
    "UpSampling2D": "resize",
    "Concatenate": "concat",
    "Reshape": "reshape",
    "Flatten": "reshape",
    "ZeroPadding2D": "reshape",
    "Cropping2D": "reshape",
    "SubsamplePad": "reshape",
}
_CONVOLUTIONS = ("Conv2D", "GroupedConv2D", "DepthwiseConv2D")
# Activations whose gradient is a function of their output; the others' needs their input.
_FROM_OUTPUT = ("relu", "relu6", "leaky_relu", "sigmoid", "hard_sigmoid", "tanh", "softmax", "elu", "selu")
# Second half of a separable convolution.
_POINTWISE = "/pointwise"


_Call = Tuple[str, int]  # a layer's name and which of its calls


def graph_of(model: Any, name: str) -> LayerGraph:
    """The layer graph of a built Keras functional model with one input and one output.

    Raises:
        ConfigurationError: a layer whose cost the planner doesn't know, several inputs or outputs.
    """
    with warnings.catch_warnings():
        # Keras 2.6 warns of custom layers that it would not find when loading; nothing is loaded here.
        warnings.simplefilter("ignore")
        config = model.get_config()
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ConfigurationError(
            f"{name} has {len(model.inputs)} inputs and {len(model.outputs)} outputs; plans need one of each",
            "give a network with one input and one output",
        )
    by_name = {layer.name: layer for layer in model.layers}
    calls = _calls(config["layers"])
    shapes: Dict[Tuple[str, int], Tuple[int, ...]] = {}
    names: Dict[Tuple[str, int], str] = {}
    layers: List[Layer] = []
    tied: List[Tuple[str, str]] = []
    for (layer_name, call), sources in calls:
        keras_layer = by_name.get(layer_name)
        if keras_layer is None:
            raise ConfigurationError(
                f"operation '{layer_name}' of {name} is not a layer",
                "build the network of Keras layers alone",
            )
        own = layer_name if call == 0 else f"{layer_name}/call{call}"
        inputs = [names[source] for source in sources]
        input_shapes = [shapes[source] for source in sources]
        shape = _sample_shape(keras_layer, call)
        made = _layers(keras_layer, own, inputs, input_shapes, shape, first_call=call == 0)
        if call > 0:
            tied.append((layer_name, made[-1].name))
        elif len(made) > 1:
            tied.append((made[0].name, made[-1].name))
        layers += made
        shapes[layer_name, call], names[layer_name, call] = shape, made[-1].name
    layers = _crops_first(layers, by_name)
    tied += _shared_weights(model, layers)
    input_shape = layers[0].output_shape
    if len(input_shape) != 3:
        raise ConfigurationError(
            f"the input of {name} is {input_shape}, not (height, width, channels)",
            "give a network that takes images",
        )
    return LayerGraph(name, input_shape, layers[-1].output_shape[-1], tuple(layers), tuple(tied))  # type: ignore[arg-type]


def _crops_first(layers: List[Layer], by_name: Dict[str, Any]) -> List[Layer]:
    """The layers with every crop right behind what it crops, where Keras has it in front of what reads it.

    Wherever the network is then cut, it is the smaller tensor that is sent to and kept on the IPUs after.
    """
    crops = [layer for layer in layers if type(by_name.get(layer.name)).__name__ == "Cropping2D"]
    if not crops:
        return layers
    ordered = [layer for layer in layers if layer not in crops]
    for crop in crops:
        position = next(i for i, layer in enumerate(ordered) if layer.name == crop.inputs[0])
        ordered.insert(position + 1, crop)
    return ordered


def _calls(entries: List[Dict[str, Any]]) -> List[Tuple[_Call, List[_Call]]]:
    """Every call of every layer with the calls it reads, in the model's order as far as it is topological."""
    calls: List[Tuple[_Call, List[_Call]]] = []
    for entry in entries:
        name = entry.get("name") or entry["config"]["name"]
        nodes = entry["inbound_nodes"] or [None]
        for number, node in enumerate(nodes):
            calls.append(((name, number), [] if node is None else _sources(node)))
    # A layer's later calls may read what runs after its first one.
    ordered: List[Tuple[_Call, List[_Call]]] = []
    done: Set[_Call] = set()
    waiting = calls
    while waiting:
        ready = next(i for i, (_, sources) in enumerate(waiting) if done.issuperset(sources))
        ordered.append(waiting[ready])
        done.add(waiting[ready][0])
        waiting = waiting[:ready] + waiting[ready + 1 :]
    return ordered


def _sources(node: Any) -> List[_Call]:
    """(layer name, number of its call) of each tensor a node reads."""
    if isinstance(node, dict):
        # Keras 3: tensors anywhere among the arguments, with their history.
        if node.get("class_name") == "__keras_tensor__":
            history = node["config"]["keras_history"]
            return [(history[0], int(history[1]))]
        return [source for value in node.values() for source in _sources(value)]
    if isinstance(node, (list, tuple)):
        # Keras 2.6: [name, call, tensor, keyword arguments], or a list of these.
        if len(node) >= 3 and isinstance(node[0], str) and isinstance(node[1], int):
            return [(node[0], node[1])]
        return [source for value in node for source in _sources(value)]
    return []


def _sample_shape(layer: Any, call: int) -> Tuple[int, ...]:
    """Output shape of one sample."""
    node = layer._inbound_nodes[call]
    outputs = node.output_tensors if hasattr(node, "output_tensors") else node.outputs
    while isinstance(outputs, (list, tuple)):
        outputs = outputs[0]
    shape = tuple(outputs.shape)[1:]
    if any(n is None for n in shape):
        raise ConfigurationError(
            f"layer '{layer.name}' has the shape {shape}: plans need a fixed image size",
            "build the network for one --image-size",
        )
    return tuple(int(n) for n in shape)


def _size(weights: Any) -> int:
    return sum(math.prod(int(n) for n in weight.shape) for weight in weights)


def _shared_weights(model: Any, layers: List[Layer]) -> List[Tuple[str, str]]:
    """Pairs of different layers that hold the same weight."""
    known = {layer.name for layer in layers}
    holder: Dict[int, str] = {}
    pairs = []
    for layer in model.layers:
        for weight in layer.weights:
            first = holder.setdefault(id(weight), layer.name)
            if first != layer.name and (first, layer.name) not in pairs:
                last = layer.name + _POINTWISE
                pairs.append((first, last if last in known else layer.name))
    return pairs


def _pair(value: Any) -> Tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _activation(layer: Any) -> str:
    """Name of a layer's activation; "linear" where there is none."""
    config = layer.get_config()
    value = config.get("activation", "linear")
    if isinstance(value, dict):
        value = value.get("config", value.get("class_name"))
    return str(value).lower() if value else "linear"


def _layers(
    layer: Any,
    name: str,
    inputs: List[str],
    input_shapes: List[Tuple[int, ...]],
    shape: Tuple[int, ...],
    first_call: bool,
) -> List[Layer]:
    """A Keras layer as one layer of the graph, or two for a separable convolution."""
    kind = type(layer).__name__
    common: Dict[str, Any] = dict(
        inputs=tuple(inputs),
        output_shape=shape,
        input_channels=input_shapes[0][-1] if input_shapes else 0,
        # Later calls use the weights of the first.
        num_parameters=_size(layer.weights) if first_call else 0,
        num_trainable=_size(layer.trainable_weights) if first_call else 0,
    )
    if kind == "SeparableConv2D":
        return _separable(layer, name, common)
    op_class = _op_class(layer, kind, common["input_channels"])
    kernel, strides, groups = (1, 1), (1, 1), 1
    if kind in _CONVOLUTIONS or kind == "Conv2DTranspose":
        kernel, strides = _pair(layer.kernel_size), _pair(layer.strides)
        groups = (
            common["input_channels"] if op_class == "depthwise_conv" else int(getattr(layer, "groups", 1))
        )
    elif op_class == "pool":
        pooled = not kind.startswith("Global")
        kernel = _pair(layer.pool_size) if pooled else input_shapes[0][:2]  # type: ignore[assignment]
        strides = _pair(layer.strides) if pooled else kernel
    # A transposed convolution uses its kernel once per position of the input, the others of the output.
    positions = input_shapes[0] if kind == "Conv2DTranspose" else shape
    has_kernel = kind in _CONVOLUTIONS or kind in ("Conv2DTranspose", "Dense")
    return [
        Layer(
            name=name,
            op_class=op_class,
            kernel=kernel,
            strides=strides,
            groups=groups,
            macs=_size(layer.weights[:1]) * math.prod(positions[:-1]) if has_kernel else 0,
            kept=_kept(layer, kind, op_class, name, inputs),
            **common,
        )
    ]


def _op_class(layer: Any, kind: str, input_channels: int) -> str:
    if kind not in _CONVOLUTIONS:
        if kind not in _OP_CLASSES:
            raise ConfigurationError(
                f"layer '{layer.name}' is a {kind}, whose cost the planner doesn't know",
                f"it knows {', '.join(sorted((*_OP_CLASSES, *_CONVOLUTIONS)))}",
            )
        return _OP_CLASSES[kind]
    groups = int(getattr(layer, "groups", 1))
    if kind == "DepthwiseConv2D" or (groups > 1 and groups == input_channels):
        return "depthwise_conv"
    return "grouped_conv" if groups > 1 else "conv"


def _kept(layer: Any, kind: str, op_class: str, name: str, inputs: List[str]) -> Tuple[str, ...]:
    """Names of the layers whose outputs the backward pass needs."""
    kept: List[str] = []
    if op_class in ("conv", "grouped_conv", "depthwise_conv", "transposed_conv", "matmul"):
        # Its own output stands for what a fused activation needs: that, or its equally large input.
        kept = [*inputs, *([name] if _activation(layer) != "linear" else [])]
    elif op_class == "norm" or kind == "Multiply":
        kept = list(inputs)
    elif kind in ("MaxPooling2D", "GlobalMaxPooling2D"):
        kept = [*inputs, name]  # the gradient goes where input and output are equal
    elif kind in ("Dropout", "SpatialDropout2D"):
        kept = [name] if layer.rate > 0 else []  # its mask can't be drawn again
    elif op_class == "activation":
        function = {"ReLU": "relu", "LeakyReLU": "relu", "Softmax": "softmax", "HardSigmoid": "hard_sigmoid"}
        activation = function.get(kind) or ("hard_swish" if kind == "HardSwish" else _activation(layer))
        if activation != "linear":
            kept = [name] if activation in _FROM_OUTPUT else list(inputs)
    return tuple(dict.fromkeys(kept))


def _separable(layer: Any, name: str, common: Dict[str, Any]) -> List[Layer]:
    """The depthwise half under the layer's own name, and the pointwise half behind it."""
    depthwise, pointwise = layer.weights[:2]
    height, width, channels = common["output_shape"]
    middle = int(pointwise.shape[2])
    in_depthwise = _size([depthwise])
    own_weights = common["num_parameters"] > 0
    activation = [name + _POINTWISE] if _activation(layer) != "linear" else []
    return [
        Layer(
            name=name,
            op_class="depthwise_conv",
            inputs=common["inputs"],
            output_shape=(height, width, middle),
            kernel=_pair(layer.kernel_size),
            strides=_pair(layer.strides),
            groups=common["input_channels"],
            input_channels=common["input_channels"],
            macs=in_depthwise * height * width,
            num_parameters=in_depthwise if own_weights else 0,
            num_trainable=min(in_depthwise, common["num_trainable"]),
            kept=common["inputs"],
        ),
        Layer(
            name=name + _POINTWISE,
            op_class="conv",
            inputs=(name,),
            output_shape=(height, width, channels),
            input_channels=middle,
            macs=_size([pointwise]) * height * width,
            num_parameters=common["num_parameters"] - (in_depthwise if own_weights else 0),
            num_trainable=max(0, common["num_trainable"] - in_depthwise),
            kept=(name, *activation),
        ),
    ]
