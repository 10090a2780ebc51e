"""A network as data: names of stock Keras layers with plain settings, and the inputs of each layer.

A user's own network is converted to this form, whether a function of a Python file made it or Keras saved it as a
``.keras`` file, and checkpoints store it in this form.  Building a network from it looks up the layers' classes by name
in a fixed list, and passes them numbers and words; none of the data is run as code.  So data from others, such as a run
folder, can at worst give a wrong network.

It is converted from the calls that ``keras_config.py`` reads.  Everything that training would not compute as Keras does
is refused by name: shared layers, calls with arguments, regularizers, constraints, random layers, layers with state,
and number types other than float32.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from dataclasses import replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import KerasLayer, KerasModel, PlainValue, Tensor
from ipucnn.errors import ConfigurationError, DataError, text_of
from ipucnn.models.blueprint import Blueprint, Step, assemble
from ipucnn.models.keras_config import (
    FUNCTIONAL_HINT,
    INPUT_NAME,
    LAYER_OF_OPERATION,
    MAX_CALLS,
    PREPROCESSING,
    LayerCall,
)
from ipucnn.text import counted, shown_value

# Three times the 21,841 classes of ImageNet-21k; a larger layer could fill memory before any check refuses it.
MAX_FEATURES = 2**16
PER_SAMPLE = (
    "Activation", "Add", "Average", "AveragePooling2D", "BatchNormalization", "Concatenate", "Conv2D",
    "Conv2DTranspose", "Cropping2D", "Dense", "DepthwiseConv2D", "Dropout", "ELU", "Flatten", "GlobalAveragePooling2D",
    "GlobalMaxPooling2D", "GroupNormalization", "Identity", "LayerNormalization", "LeakyReLU", "MaxPooling2D",
    "Maximum", "Minimum", "Multiply", "PReLU", "Permute", "ReLU", "Rescaling", "Reshape", "SeparableConv2D", "Softmax",
    "SpatialDropout2D", "Subtract", "UpSampling2D", "ZeroPadding2D",
)  # fmt: skip
"""Stock layers that compute each sample separately and have no state, and layers that are replaced by such ones."""
# Keras layers that augment images, in addition to those whose names begin with Random.
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
# Entries of a layer's configuration that are not settings: its name, its type, and the shapes that it was built for.
_NOT_SETTINGS = ("name", "dtype", "batch_input_shape", "batch_shape", "build_config", "quantization_config")
_NOT_OF_INITIALIZERS = ("seed", "dtype", "input_axes", "output_axes")
# Settings of Conv2D that Keras 2.6 or 3 also writes for depthwise and separable convolutions: 1, or overridden.
_WITHOUT_EFFECT = ("groups", "kernel_initializer", "bias_initializer", "filters")


class Architecture(NamedTuple):
    """A network as data; each layer comes after the layers that it reads, and "input" is not one of the layers.

    Attributes:
        layers: layers in the order in which they run; a stock layer has no class yet, and a class of the user's own
            that is known only from a checkpoint has no settings.
        input_shape: (height, width, channels); None for a size that is not fixed.
        notes: a sentence for each thing that was left out.
    """

    layers: Tuple[Step, ...]
    input_shape: Tuple[Optional[int], ...]
    notes: Tuple[str, ...] = ()

    @property
    def own_layers(self) -> Tuple[str, ...]:
        """Names of the layers whose classes are the user's own."""
        return tuple(layer.name for layer in self.layers if layer.is_own)

    @property
    def num_outputs(self) -> Optional[int]:
        """Number of logits, from the last layer's ``units``; None if it has none."""
        units = self.layers[-1].config.get("units")
        return units if isinstance(units, int) else None

    def to_data(self) -> Dict[str, Any]:
        """The architecture as plain values, for a checkpoint."""
        layers = [[s.name, s.kind, None if s.is_own else s.config, tuple(s.inputs)] for s in self.layers]
        return {"input_shape": list(self.input_shape), "layers": layers}


def from_data(data: PlainValue, what: str) -> Architecture:
    """Reads the data of :meth:`Architecture.to_data`, which are not trusted.

    Args:
        what: name of their source, for messages.

    Raises:
        DataError: they are not an architecture.
    """
    try:
        shape = tuple(data["input_shape"])
        if len(shape) != 3 or any(n is not None and (type(n) is not int or n < 1) for n in shape):
            raise ValueError(f"an input of {shape}")
        known = {INPUT_NAME}
        layers: List[Step] = []
        if not 0 < len(data["layers"]) <= MAX_CALLS:
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
            layers.append(Step(name, kind, None, settings or {}, list(inputs), is_own=settings is None))
            known.add(name)
        return Architecture(tuple(layers), shape)
    except (TypeError, ValueError, KeyError, ConfigurationError) as error:
        reason = text_of(error)
        raise DataError(
            f"{what} has no network that can be read: {shown_value(reason)}", "give another checkpoint"
        ) from None


# --- from a Keras model


def _layer_of(
    network: str, call: LayerCall, num_calls: int, inputs: List[str], model: Optional[KerasModel]
) -> Step:
    """The layer of a call, checked.

    Args:
        network: name of the network, for messages.
        num_calls: number of calls of the layer.
        inputs: names of the layers that it reads.
        model: the network itself; None for one in a file.

    Raises:
        ConfigurationError: training would not compute the layer as Keras does.
    """
    name, kind = call.name, call.kind
    where = f"{network}: layer '{shown_value(name)}'"
    live = None if model is None or call.is_operation else call.layer_in(model)
    is_stock = call.is_stock if live is None else _is_stock(live)
    if (kind.startswith("Random") or kind in _AUGMENTING) and (
        live is None or type(live).__module__.split(".")[0] in ("keras", "tensorflow")
    ):
        raise ConfigurationError(
            f"{where} ({shown_value(kind)}) augments images, which is done to the data and not in the network",
            "leave it out, and add --augment to the command (or --mixup, --cutmix, --random-erasing)",
        )
    if num_calls != 1:
        raise ConfigurationError(f"{where} is called {num_calls} times", "give each call a layer of its own")
    # Keras 3 records Dropout's default as if it had been given.
    others = [
        f"{key}={value}"[:40] if key else str(value)[:40]
        for key, value in call.arguments
        if not (kind in _OFF_BY_DEFAULT and key == "training" and value is False)
    ]
    if call.is_operation:
        return Step(name, _layer_for(network, call, len(inputs), others), None, {}, inputs)
    if others:
        raise ConfigurationError(
            f"{where} ({shown_value(kind)}) is called with {shown_value(', '.join(others))}",
            "call it with one tensor, or one list of them, alone; trainable=False freezes a layer",
        )
    if kind == "Lambda":
        raise ConfigurationError(
            f"{where} is a Lambda layer, whose function no file can keep",
            "write it as a class: class Mine(keras.layers.Layer)",
        )
    if not is_stock and live is not None:
        return Step(name, kind, type(live), {**call.settings, "name": name}, inputs, is_own=True)
    if not is_stock:
        raise ConfigurationError(
            f"{where} is of the class {shown_value(kind)}, which is not Keras' own",
            "name the function that makes the network: --model my_net.py:build",
        )
    if kind not in PER_SAMPLE and kind not in PREPROCESSING:
        raise ConfigurationError(
            f"{where} is a {shown_value(kind)}, which may mix the samples of a batch, or keep something from one "
            "batch to the next",
            "use another layer, or a class of your own, whose micro-batches are computed one by one",
        )
    settings: Dict[str, Any] = {}
    if kind != "Normalization":
        settings = _plain_settings(f"{where} ({kind})", call.settings)
        if live is not None:
            _check_untrained(network, live, settings)
    if not call.is_trained:
        settings["trainable"] = False
    return Step(name, kind, None, settings, inputs)


def _layer_for(network: str, call: LayerCall, num_inputs: int, others: Sequence[str]) -> str:
    """The name of the layer class that computes the same as an operation."""
    kind = LAYER_OF_OPERATION.get(call.kind)
    if kind is None:
        raise ConfigurationError(
            f"{network}: '{shown_value(call.name)}' is the operation {shown_value(call.kind)}, which is no layer",
            "use a layer of Keras in its place, or write it as a class of layers",
        )
    if others or (kind == "ReLU") != (num_inputs == 1):
        raise ConfigurationError(
            f"{network}: operation '{shown_value(call.name)}' reads {counted(num_inputs, 'tensor')} and numbers "
            f"besides ({shown_value(', '.join(others))})",
            "use a layer in its place, such as keras.layers.Rescaling",
        )
    return kind


def _check_untrained(network: str, live: KerasLayer, settings: Mapping[str, PlainValue]) -> None:
    """Refuses a layer whose weights were loaded, which shows in weights that no longer equal their initial 0 or 1.

    Raises:
        ConfigurationError: the weights were loaded; the message names the layer.
    """
    for weight in live.weights:
        base = weight.name.split("/")[-1].split(":")[0]
        kind = (settings.get(f"{base}_initializer") or {}).get("class_name")
        if kind in ("Zeros", "Ones") and (weight.numpy() != (kind == "Ones")).any():
            raise ConfigurationError(
                f"{network} returned a network whose weights were loaded (layer '{shown_value(live.name)}'), and "
                "training draws its own with the seed",
                "return it untrained (weights=None); --weights begins with weights that were trained",
            )


def _is_stock(layer: KerasLayer) -> bool:
    """Whether a layer's class is Keras' own class of that name."""
    from tensorflow import keras

    return type(layer) is getattr(keras.layers, type(layer).__name__, None)


def own_layers(model: KerasModel) -> Tuple[str, ...]:
    """Names of the layers of a built network whose classes are neither from Keras nor from this package."""
    return tuple(
        layer.name
        for layer in model.layers
        if not _is_stock(layer) and not type(layer).__module__.startswith("ipucnn.models.")
    )


def _plain_settings(where: str, config: PlainValue) -> Dict[str, Any]:
    """The settings of a stock layer as plain values, checked.

    Raises:
        ConfigurationError: a setting is not a plain value, or training does not support it.
    """
    settings: Dict[str, Any] = {}
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
            options = {} if value is None else dict(value.get("config") or {})
            options = {k: _plain(v, where, key) for k, v in options.items() if k not in _NOT_OF_INITIALIZERS}
            settings[key] = None if value is None else {"class_name": kind, "config": options}
        elif key in ("activation", "recurrent_activation", "final_activation"):
            name = "linear" if value is None else value
            if name not in _ACTIVATIONS:
                raise ConfigurationError(
                    f"{where} has an activation of your own, {shown_value(str(name))[:60]}",
                    f"use one of {', '.join(_ACTIVATIONS)}, or a class of layers",
                )
            settings[key] = name
        else:
            settings[key] = _plain(value, where, key)
            if key in ("filters", "units") and isinstance(value, int) and value > MAX_FEATURES:
                raise ConfigurationError(f"{where} has {value:,} {key}", f"use at most {MAX_FEATURES:,}")
    if settings.get("data_format") not in (None, "channels_last"):
        raise ConfigurationError(
            f"{where} has its channels first", "put them last: data_format='channels_last'"
        )
    return settings


def _plain(value: object, where: str, key: str) -> Any:
    """Converts a setting to a number, word, truth value, or a list of them; raises ConfigurationError for others."""

    def of_numpy(number: object) -> Any:
        if getattr(number, "shape", None) == () and hasattr(number, "item"):
            return number.item()
        raise TypeError

    def refuse(_: object) -> None:
        # In some settings, such as Constant's value, Keras would take a mapping for an object to import.
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
    """The number type of a layer, from the forms in which Keras 2.6 and 3 write it."""
    while isinstance(value, dict):
        value = (value.get("config") or {}).get("name", value.get("class_name"))
    return "float32" if value is None else str(value)


def architecture_of(
    name: str, calls: Sequence[LayerCall], model: Optional[KerasModel] = None
) -> Architecture:
    """The architecture of a functional or sequential model.

    Args:
        name: name of the network, for messages.
        calls: calls of its layers.
        model: the model itself, which provides layers of the user's own classes; None for one in a file.

    Raises:
        ConfigurationError: training would not compute a layer as Keras does; the message names it.
    """
    num_calls = Counter(call.name for call in calls)
    names = {calls[0].call: INPUT_NAME}
    layers: List[Step] = []
    for call in calls[1:]:
        names[call.call] = call.name
        if call.name == INPUT_NAME:
            raise ConfigurationError(
                f"{name}: a layer is called '{INPUT_NAME}', as the images are", "rename it"
            )
        inputs = [names[read] for read in call.reads]
        layers.append(_layer_of(name, call, num_calls[call.name], inputs, model))
    shape = calls[0].settings.get("batch_shape", calls[0].settings.get("batch_input_shape"))
    sizes: Tuple[Optional[int], ...] = (None, None, None)
    if isinstance(shape, (list, tuple)):
        sizes = tuple(shape[1:])
        if len(sizes) != 3 or any(n is not None and (not isinstance(n, int) or n < 1) for n in sizes):
            raise ConfigurationError(
                f"{name}: takes {shown_value(str(sizes))} instead of images (height, width and channels)",
                FUNCTIONAL_HINT,
            )
    layers, notes = _between_images_and_logits(name, layers, names[calls[-1].call])
    return Architecture(tuple(layers), sizes, tuple(notes))


def _between_images_and_logits(network: str, layers: List[Step], output: str) -> Tuple[List[Step], List[str]]:
    """The layers, output layer last, without preprocessing at the beginning and softmax at the end; and notes."""
    notes: List[str] = []
    for first in [layer for layer in layers if layer.kind in PREPROCESSING]:
        # The preprocessing layers before this one have been removed.
        if next(layer.inputs for layer in layers if layer.name == first.name) != [INPUT_NAME]:
            continue
        layers = _without(layers, first.name)
        output = INPUT_NAME if output == first.name else output
        notes.append(
            f"its layer {first.name} ({first.kind}) is left out: images come normalised (--normalise)"
        )
    for layer in layers:
        if layer.kind == "Normalization":
            raise ConfigurationError(
                f"{network}: layer '{shown_value(layer.name)}' (Normalization) does not read the images themselves",
                "put it first, where it is left out, for images come normalised",
            )
    by_name = {layer.name: layer for layer in layers}
    last = by_name.get(output)
    if last is not None and (last.kind == "Softmax" or _activation(last) == "softmax"):
        notes.append("its softmax at the end is left out: loss and metrics take logits")
        if last.kind in ("Softmax", "Activation"):
            layers = _without(layers, last.name)
            last = by_name.get(last.inputs[0])
        else:
            last = replace(last, config={**last.config, "activation": "linear"})
    if last is None:
        raise ConfigurationError(
            f"{network}: it has no layer with weights between images and output",
            "end it with keras.layers.Dense",
        )
    activation = _activation(last)
    if activation != "linear" or last.kind in ("ReLU", "Softmax"):
        end = last.kind if activation == "linear" else activation
        raise ConfigurationError(
            f"{network}: its last layer '{shown_value(last.name)}' ends in {end}, and training takes logits",
            "end it with a keras.layers.Dense(num_classes) without activation, or with softmax",
        )
    return [*(layer for layer in layers if layer.name != last.name), last], notes


def _activation(layer: Step) -> Any:
    return "linear" if layer.is_own else layer.config.get("activation", "linear")


def _without(layers: Sequence[Step], name: str) -> List[Step]:
    """The layers without one layer, which has one input; its readers now read that input."""
    (source,) = next(layer.inputs for layer in layers if layer.name == name)
    return [
        replace(layer, inputs=[source if read == name else read for read in layer.inputs])
        for layer in layers
        if layer.name != name
    ]


# --- to a network


def blueprint_of(architecture: Architecture, images: Tensor, what: str) -> Tuple[Blueprint, KerasModel]:
    """The blueprint of an architecture, still with stock layers, and the Keras model built from it.

    Args:
        images: Keras tensor of the images.
        what: name of the network, for messages.

    Raises:
        ConfigurationError: Keras can't build the network, or this version of Keras lacks one of its layers.
    """
    from tensorflow import keras

    steps = [Step(INPUT_NAME, "InputLayer", keras.layers.InputLayer, {}, [], int(images.shape[-1]))]
    for layer in architecture.layers:
        if layer.is_own:
            kind, config = layer.layer_class, dict(layer.config)
        else:
            kind = getattr(keras.layers, layer.kind, None)
            if kind is None:
                raise ConfigurationError(
                    f"{what}: layer '{shown_value(layer.name)}' is a {layer.kind}, which this Keras lacks",
                    "use a newer TensorFlow",
                )
            config = {**_accepted(kind, layer.config, layer.name, what), "name": layer.name}
        steps.append(replace(layer, layer_class=kind, config=config, inputs=list(layer.inputs)))
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
        axes = [] if layer.is_own else layer.config.get("axis", [])
        if any(axis % len(shape) == 0 for axis in (axes if isinstance(axes, list) else [axes])):
            raise ConfigurationError(
                f"{what}: layer '{shown_value(step.name)}' has axis = {axes}, which mixes the samples of a batch",
                "name an axis of a sample's own, such as axis=-1",
            )
        step.channels = int(shape[-1]) if len(shape) > 1 and shape[-1] is not None else None
    return blueprint, model


def _accepted(kind: type, settings: Dict[str, PlainValue], name: str, what: str) -> Dict[str, Any]:
    """The settings that this version of Keras' layer takes; the others must have no effect.

    Raises:
        ConfigurationError: a setting that the layer does not take would have an effect.
    """
    known = {"trainable", *inspect.signature(kind.__init__).parameters}  # type: ignore[misc]
    for key, value in settings.items():
        if key not in known and key not in _WITHOUT_EFFECT and value not in (None, False, "linear"):
            raise ConfigurationError(
                f"{what}: layer '{shown_value(name)}' has {key} = {shown_value(str(value))}, which this Keras does not "
                "know",
                "use a newer TensorFlow",
            )
    return {key: value for key, value in settings.items() if key in known}
