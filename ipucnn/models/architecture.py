"""A network as data: names of stock Keras layers with plain settings, and what each of them reads.

This is what a network of a user's own becomes, whether a function of a Python file made it or Keras saved it as a
``.keras`` file, and what a checkpoint keeps of it.  Making a network of such data looks up layers in a list by the
names of their classes and gives them numbers and words; nothing in it can be code.  So data from others, as a run
folder's, can make no other than a wrong network.

It is made of the calls that ``keras_config.py`` reads.  What training could not compute as Keras would is refused by
name: shared layers, calls with arguments, regularizers, constraints, random and remembering layers, other types of
numbers.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import KerasLayer, KerasModel, PlainValue, Tensor
from ipucnn.errors import ConfigurationError, DataError, text_of
from ipucnn.models.blueprint import Blueprint, Step, assemble
from ipucnn.models.keras_config import INPUT_NAME, LAYER_OF_OPERATION, LayerCall
from ipucnn.text import counted, shown_value

MAX_LAYERS = 3000
# Four times the features of ImageNet-21k's classifier; a layer of more would fill memory before anything is said of it.
MAX_FEATURES = 2**16
PER_SAMPLE = (
    "Activation", "Add", "Average", "AveragePooling2D", "BatchNormalization", "Concatenate", "Conv2D",
    "Conv2DTranspose", "Cropping2D", "Dense", "DepthwiseConv2D", "Dropout", "ELU", "Flatten", "GlobalAveragePooling2D",
    "GlobalMaxPooling2D", "GroupNormalization", "Identity", "LayerNormalization", "LeakyReLU", "MaxPooling2D",
    "Maximum", "Minimum", "Multiply", "PReLU", "Permute", "ReLU", "Rescaling", "Reshape", "SeparableConv2D", "Softmax",
    "SpatialDropout2D", "Subtract", "UpSampling2D", "ZeroPadding2D",
)  # fmt: skip
"""Stock layers that compute each sample by itself and remember nothing, and those that are exchanged for such ones."""
_PREPROCESSING = ("Rescaling", "Normalization")
# Layers of Keras that augment images, besides those called Random...
_AUGMENTING = ("AugMix", "CutMix", "MixUp", "RandAugment")
_OFF_BY_DEFAULT = ("Dropout", "SpatialDropout2D")
_ACTIVATIONS = (
    "elu", "exponential", "gelu", "hard_sigmoid", "leaky_relu", "linear", "relu", "relu6", "selu", "sigmoid", "silu",
    "softmax", "softplus", "softsign", "swish", "tanh",
)  # fmt: skip
_INITIALIZERS = (
    "Constant", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "Identity", "LecunNormal", "LecunUniform",
    "Ones", "RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling", "Zeros",
)  # fmt: skip
# Settings that are not the layer's: how it is called, of what type, and what it was built on.
_NOT_SETTINGS = ("name", "dtype", "batch_input_shape", "batch_shape", "build_config", "quantization_config")
_NOT_OF_INITIALIZERS = ("seed", "dtype", "input_axes", "output_axes")
# What Keras 2.6 or 3 writes of depthwise and separable convolutions, whose own class it is not: 1, or overridden.
_WITHOUT_EFFECT = ("groups", "kernel_initializer", "bias_initializer", "filters")
_FUNCTIONAL = "give a functional or sequential model with one input and one output"


class Layer(NamedTuple):
    """A layer of an architecture.

    Attributes:
        name: unique.
        kind: name of a class of ``PER_SAMPLE``; of a class of the user's own that class's.
        settings: plain values; None for a class of the user's own, which has them itself.
        inputs: names of the layers it reads.
    """

    name: str
    kind: str
    settings: Optional[Dict[str, Any]]
    inputs: Tuple[str, ...]


class Architecture(NamedTuple):
    """A network as data; the layers come after those that they read, and "input" is none of them.

    Attributes:
        layers: in the order in which they run.
        input_shape: (height, width, channels), None where any will do.
        notes: what was left out of it, a sentence each.
    """

    layers: Tuple[Layer, ...]
    input_shape: Tuple[Optional[int], ...]
    notes: Tuple[str, ...] = ()

    @property
    def own_layers(self) -> Tuple[str, ...]:
        """Names of the layers of classes of the user's own."""
        return tuple(layer.name for layer in self.layers if layer.settings is None)

    @property
    def num_outputs(self) -> Optional[int]:
        """Logits of the last layer, where it says how many."""
        settings = self.layers[-1].settings or {}
        units = settings.get("units")
        return units if isinstance(units, int) else None

    def to_data(self) -> Dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"input_shape": list(self.input_shape), "layers": [list(layer) for layer in self.layers]}


def from_data(data: PlainValue, what: str) -> Architecture:
    """What :meth:`Architecture.to_data` gave, checked as if others had written it.

    Args:
        what: that holds it, for messages.

    Raises:
        DataError: it is none.
    """
    try:
        shape = tuple(data["input_shape"])
        if len(shape) != 3 or any(n is not None and (type(n) is not int or n < 1) for n in shape):
            raise ValueError(f"an input of {shape}")
        known = {INPUT_NAME}
        layers: List[Layer] = []
        if not 0 < len(data["layers"]) <= MAX_LAYERS:
            raise ValueError(f"{len(data['layers'])} layers")
        for name, kind, settings, inputs in data["layers"]:
            if not isinstance(name, str) or name in known or not isinstance(kind, str):
                raise ValueError(f"a layer {name!r}")
            if not inputs or not set(inputs) <= known:
                raise ValueError(f"layer {name!r} reads {inputs!r}")
            if settings is not None:
                if kind not in PER_SAMPLE:
                    raise ValueError(f"layer {name!r} is of the class {kind!r}")
                settings = _plain_settings(f"layer '{shown_value(name)}'", settings)
            layers.append(Layer(name, kind, settings, tuple(inputs)))
            known.add(name)
        return Architecture(tuple(layers), shape)
    except (TypeError, ValueError, KeyError, ConfigurationError) as error:
        reason = text_of(error)
        raise DataError(
            f"{what} has no network that can be read: {shown_value(reason)}", "give another checkpoint"
        ) from None


# --- from a model of Keras


Own = Dict[str, Tuple[type, Dict[str, Any]]]
"""Class and configuration of each layer whose class is the user's own."""


class _Reader:
    """Makes layers of the calls of a model.

    Args:
        name: of the network, for messages.
        model: the model itself; None of one in a file.
    """

    def __init__(self, name: str, model: Optional[KerasModel]) -> None:
        self.name, self._model = name, model
        self.own: Own = {}
        self.live: Dict[str, KerasLayer] = {}

    def fail(self, what: str, hint: str) -> ConfigurationError:
        return ConfigurationError(f"{self.name}: {what}", hint)

    def layer_of(self, call: LayerCall, num_calls: int, inputs: Tuple[str, ...]) -> Layer:
        """The layer of a call.

        Args:
            num_calls: of the layer.
            inputs: names of the layers it reads.
        """
        name, kind = call.name, call.kind
        shown_name = f"layer '{shown_value(name)}'"
        live = None if self._model is None or call.is_operation else call.layer_in(self._model)
        is_stock = call.is_stock if live is None else _is_stock(live)
        if (kind.startswith("Random") or kind in _AUGMENTING) and (
            live is None or type(live).__module__.split(".")[0] in ("keras", "tensorflow")
        ):
            raise self.fail(
                f"{shown_name} ({shown_value(kind)}) augments images, which is done to the data and not in the network",
                "leave it out, and add --augment to the command (or --mixup, --cutmix, --random-erasing)",
            )
        if num_calls != 1:
            raise self.fail(f"{shown_name} is called {num_calls} times", "give each call a layer of its own")
        # Keras 3 notes the default of Dropout as if it had been given.
        others = [
            f"{key}={value}"[:40] if key else str(value)[:40]
            for key, value in call.arguments
            if not (kind in _OFF_BY_DEFAULT and key == "training" and value is False)
        ]
        if call.is_operation:
            return Layer(name, self._layer_for(name, kind, inputs, others), {}, inputs)
        if others:
            raise self.fail(
                f"{shown_name} ({shown_value(kind)}) is called with {shown_value(', '.join(others))}",
                "call it with one tensor, or one list of them, alone; trainable=False freezes a layer",
            )
        if kind == "Lambda":
            raise self.fail(
                f"{shown_name} is a Lambda layer, whose function no file can keep",
                "write it as a class: class Mine(keras.layers.Layer)",
            )
        if live is not None:
            self.live[name] = live
        if not is_stock and live is not None:
            self.own[name] = type(live), {**call.settings, "name": name}
            return Layer(name, kind, None, inputs)
        if not is_stock:
            raise self.fail(
                f"{shown_name} is of the class {shown_value(kind)}, which is not Keras' own",
                "name the function that makes the network: --model my_net.py:build",
            )
        if kind not in PER_SAMPLE and kind not in _PREPROCESSING:
            raise self.fail(
                f"{shown_name} is a {shown_value(kind)}, which may mix the samples of a batch, or keep "
                "something from one batch to the next",
                "use another layer, or a class of your own, whose micro-batches are computed one by one",
            )
        settings: Dict[str, Any] = {}
        if kind != "Normalization":
            settings = _plain_settings(f"{self.name}: {shown_name} ({kind})", call.settings)
        if not call.is_trained:
            settings["trainable"] = False
        return Layer(name, kind, settings, inputs)

    def _layer_for(self, name: str, operation: str, inputs: Sequence[str], others: Sequence[str]) -> str:
        """The class of layers that computes what an operation does."""
        kind = LAYER_OF_OPERATION.get(operation)
        if kind is None:
            raise self.fail(
                f"'{shown_value(name)}' is the operation {shown_value(operation)}, which is no layer",
                "use a layer of Keras in its place, or write it as a class of layers",
            )
        if others or (kind == "ReLU") != (len(inputs) == 1):
            raise self.fail(
                f"operation '{shown_value(name)}' reads {counted(len(inputs), 'tensor')} and numbers besides "
                f"({shown_value(', '.join(others))})",
                "use a layer in its place, such as keras.layers.Rescaling",
            )
        return kind


def _is_stock(layer: KerasLayer) -> bool:
    """Whether a layer is exactly of the class of Keras that its class is called after."""
    from tensorflow import keras

    return type(layer) is getattr(keras.layers, type(layer).__name__, None)


def own_layers(model: KerasModel) -> Tuple[str, ...]:
    """Names of the layers of a built network whose classes are neither Keras' nor this package's."""
    return tuple(
        layer.name
        for layer in model.layers
        if not _is_stock(layer) and not type(layer).__module__.startswith("ipucnn.models.")
    )


def _plain_settings(where: str, config: PlainValue) -> Dict[str, Any]:
    """Settings of a stock layer as numbers and words that are known.

    Raises:
        ConfigurationError: one of them is something else, or would have an effect that training does not have.
    """
    found: Dict[str, Any] = {}
    for key, value in dict(config).items():
        if key in _NOT_SETTINGS:
            if key == "dtype" and _type_name(value) != "float32":
                raise ConfigurationError(
                    f"{where} computes in {shown_value(_type_name(value))}",
                    "leave types out of the network: --precision 16.16 trains in 16 bits",
                )
            continue
        if key.endswith(("_regularizer", "_constraint")):
            if value is not None:
                hint = "drop it; --weight-decay and --l2-regularization hold for the whole network"
                raise ConfigurationError(f"{where} has a {key}, which training does not know", hint)
            continue
        if key.endswith("_initializer"):
            kind = value.get("class_name") if isinstance(value, dict) else None
            if value is not None and kind not in _INITIALIZERS:
                shown_kind = shown_value(kind or value)
                raise ConfigurationError(
                    f"{where} has {key} {shown_kind}, which has no seeded version",
                    f"use one of {', '.join(_INITIALIZERS)}",
                )
            own = {} if value is None else dict(value.get("config") or {})
            own = {k: _plain(v, where, key) for k, v in own.items() if k not in _NOT_OF_INITIALIZERS}
            found[key] = None if value is None else {"class_name": kind, "config": own}
        elif key in ("activation", "recurrent_activation", "final_activation"):
            name = "linear" if value is None else value
            if name not in _ACTIVATIONS:
                raise ConfigurationError(
                    f"{where} has an activation of your own, {shown_value(str(name))[:60]}",
                    f"use one of {', '.join(_ACTIVATIONS)}, or a class of layers",
                )
            found[key] = name
        else:
            found[key] = _plain(value, where, key)
            if key in ("filters", "units") and isinstance(value, int) and value > MAX_FEATURES:
                raise ConfigurationError(f"{where} has {value:,} {key}", f"use at most {MAX_FEATURES:,}")
    if found.get("data_format") not in (None, "channels_last"):
        raise ConfigurationError(
            f"{where} has its channels first", "put them last: data_format='channels_last'"
        )
    return found


def _plain(value: object, where: str, key: str) -> Any:
    """Numbers, words, truth values, and lists of them."""

    def of_numpy(number: object) -> Any:
        if getattr(number, "shape", None) == () and hasattr(number, "item"):
            return number.item()
        raise TypeError

    def refuse(_: object) -> None:
        # Keras takes a mapping in some of them, as in the value of Constant, for an object that it is to import.
        raise TypeError

    try:
        plain = json.loads(json.dumps(value, default=of_numpy), object_pairs_hook=refuse)
    except (TypeError, ValueError, RecursionError):
        raise ConfigurationError(
            f"{where} has {key} = {shown_value(str(value))[:60]}, which is no number, word or list of them",
            "use plain values",
        ) from None
    return plain


def _type_name(value: PlainValue) -> str:
    """The type of numbers of a layer, as Keras 2.6 and 3 write it."""
    while isinstance(value, dict):
        value = (value.get("config") or {}).get("name", value.get("class_name"))
    return "float32" if value is None else str(value)


def architecture_of(
    name: str, calls: Sequence[LayerCall], model: Optional[KerasModel] = None
) -> Tuple[Architecture, Own, Dict[str, KerasLayer]]:
    """The architecture of a functional or sequential model.

    Args:
        name: of the network, for messages.
        calls: of its layers.
        model: the model itself, of which layers of the user's own classes may be taken; None of one in a file.

    Returns:
        The architecture; classes of the user's own; and the layers of ``model``, by the names they have now.

    Raises:
        ConfigurationError: something in it that cannot be trained as Keras would, by name.
    """
    reader = _Reader(name, model)
    num_calls = Counter(call.name for call in calls)
    names = {calls[0].call: INPUT_NAME}
    layers: List[Layer] = []
    for call in calls[1:]:
        names[call.call] = call.name
        if call.name == INPUT_NAME:
            raise reader.fail(f"a layer is called '{INPUT_NAME}', as the images are", "rename it")
        layers.append(reader.layer_of(call, num_calls[call.name], tuple(names[read] for read in call.reads)))
    shape = calls[0].settings.get("batch_shape", calls[0].settings.get("batch_input_shape"))
    sizes: Tuple[Optional[int], ...] = (None, None, None)
    if isinstance(shape, (list, tuple)):
        sizes = tuple(shape[1:])
        if len(sizes) != 3 or any(n is not None and (not isinstance(n, int) or n < 1) for n in sizes):
            raise reader.fail(
                f"takes {shown_value(str(sizes))}, wanted images: height, width and channels", _FUNCTIONAL
            )
    layers, notes = _between_images_and_logits(reader, layers, names[calls[-1].call])
    return Architecture(tuple(layers), sizes, tuple(notes)), reader.own, reader.live


def _between_images_and_logits(
    reader: _Reader, layers: List[Layer], output: str
) -> Tuple[List[Layer], List[str]]:
    """The layers without preprocessing at the beginning and softmax at the end; the last one ends the network."""
    notes: List[str] = []
    while True:
        first = next((x for x in layers if x.kind in _PREPROCESSING and x.inputs == (INPUT_NAME,)), None)
        if first is None:
            break
        layers = _without(layers, first)
        output = INPUT_NAME if output == first.name else output
        notes.append(
            f"its layer {first.name} ({first.kind}) is left out: images come normalised (--normalise)"
        )
    for layer in layers:
        if layer.kind == "Normalization":
            raise reader.fail(
                f"layer '{shown_value(layer.name)}' (Normalization) does not read the images themselves",
                "put it first, where it is left out, for images come normalised",
            )
    last = next((layer for layer in layers if layer.name == output), None)
    if last is not None and (last.kind == "Softmax" or (last.settings or {}).get("activation") == "softmax"):
        if last.kind in ("Softmax", "Activation"):
            layers = _without(layers, last)
            output = last.inputs[0]
        else:
            end = last._replace(settings={**(last.settings or {}), "activation": "linear"})
            layers = [end if layer is last else layer for layer in layers]
        notes.append("its softmax at the end is left out: loss and metrics take logits")
        last = next((layer for layer in layers if layer.name == output), None)
    if last is None:
        raise reader.fail(
            "it has no layer with weights between images and output", "end it with keras.layers.Dense"
        )
    activation = (last.settings or {}).get("activation", "linear")
    if activation != "linear" or last.kind in ("ReLU", "Softmax"):
        raise reader.fail(
            f"its last layer '{shown_value(last.name)}' ends in {activation if activation != 'linear' else last.kind}, "
            "and training takes logits",
            "end it with a keras.layers.Dense(num_classes) without activation, or with softmax",
        )
    rest = [layer for layer in layers if layer.name != output]
    return [*rest, next(layer for layer in layers if layer.name == output)], notes


def _without(layers: Sequence[Layer], doomed: Layer) -> List[Layer]:
    """The layers without one of one input, whose readers read that input."""
    return [
        layer._replace(
            inputs=tuple(doomed.inputs[0] if name == doomed.name else name for name in layer.inputs)
        )
        for layer in layers
        if layer is not doomed
    ]


# --- into a network


def blueprint_of(
    architecture: Architecture, own: Own, images: Tensor, what: str
) -> Tuple[Blueprint, KerasModel]:
    """The steps of a network, with stock layers, and what Keras makes of them.

    Args:
        own: classes of the user's own.
        images: Keras tensor.
        what: the network, for messages.

    Raises:
        ConfigurationError: Keras can't build it, or this Keras lacks a layer of it.
    """
    from tensorflow import keras

    steps = [Step(INPUT_NAME, "InputLayer", keras.layers.InputLayer, {}, [], int(images.shape[-1]))]
    for layer in architecture.layers:
        if layer.settings is None:
            kind, config = own[layer.name]
        else:
            found = getattr(keras.layers, layer.kind, None)
            if found is None:
                raise ConfigurationError(
                    f"{what}: layer '{shown_value(layer.name)}' is a {layer.kind}, which this Keras lacks",
                    "use a newer TensorFlow",
                )
            kind = found
            config = {**_accepted(kind, layer.settings, layer.name, what), "name": layer.name}
        steps.append(Step(layer.name, layer.kind, kind, config, list(layer.inputs)))
    blueprint = Blueprint(steps, architecture.layers[-1].name)
    try:
        model = assemble(blueprint, images, "own")
    except Exception as error:
        text = " ".join(text_of(error).split())
        raise ConfigurationError(
            f"{what} cannot be built for images of {'x'.join(map(str, images.shape[1:]))}: {shown_value(text)}",
            "change the network or --image-size",
        ) from error
    for step, layer in zip(steps[1:], architecture.layers):
        shape = model.get_layer(step.name).output.shape
        axes = (layer.settings or {}).get("axis", [])
        if any(axis % len(shape) == 0 for axis in (axes if isinstance(axes, list) else [axes])):
            raise ConfigurationError(
                f"{what}: layer '{shown_value(step.name)}' has axis = {axes}, which mixes the samples of a batch",
                "name an axis of a sample's own, such as axis=-1",
            )
        step.channels = int(shape[-1]) if len(shape) > 1 and shape[-1] is not None else None
    return blueprint, model


def _accepted(kind: type, settings: Dict[str, PlainValue], name: str, what: str) -> Dict[str, Any]:
    """Those of the settings that this Keras' layer takes; others must say nothing."""
    known = {"trainable", *inspect.signature(kind.__init__).parameters}  # type: ignore[misc]
    for key, value in settings.items():
        if key not in known and key not in _WITHOUT_EFFECT and value not in (None, False, "linear"):
            raise ConfigurationError(
                f"{what}: layer '{shown_value(name)}' has {key} = {shown_value(str(value))}, which this Keras does not "
                "know",
                "use a newer TensorFlow",
            )
    return {key: value for key, value in settings.items() if key in known}
