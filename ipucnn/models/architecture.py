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
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from ipucnn.aliases import KerasLayer, KerasModel, PlainValue, Tensor
from ipucnn.errors import ConfigurationError, DataError, text_of
from ipucnn.models.blueprint import Blueprint, Step, assemble
from ipucnn.models.formulas import (
    ACTIVATIONS,
    STORED_ACTIVATIONS,
    formulas,
    spelt_settings,
    stored_activation,
    stored_settings,
)
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
# Layers without weights that pixels pass before they are scaled.
_MOVES_PIXELS = (
    "AveragePooling2D", "Cropping2D", "Dropout", "Flatten", "GlobalAveragePooling2D", "GlobalMaxPooling2D", "Identity",
    "MaxPooling2D", "Permute", "Reshape", "SpatialDropout2D", "UpSampling2D", "ZeroPadding2D",
)  # fmt: skip
_OFF_BY_DEFAULT = ("Dropout", "SpatialDropout2D")
_INITIALIZERS = (
    "Constant", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "Identity", "LecunNormal", "LecunUniform",
    "Ones", "RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling", "Zeros",
)  # fmt: skip
_ACTIVATION_SETTINGS = ("activation", "recurrent_activation", "final_activation")
# Entries of a layer's configuration that are not settings: its name, its type, and the shapes that it was built for.
_NOT_SETTINGS = ("name", "dtype", "batch_input_shape", "batch_shape", "build_config", "quantization_config")
_NOT_OF_INITIALIZERS = ("seed", "dtype", "input_axes", "output_axes")
# Settings of Conv2D that Keras 2.6 or 3 also writes for depthwise and separable convolutions: 1, or overridden.
_WITHOUT_EFFECT = ("groups", "kernel_initializer", "bias_initializer", "filters")


class Scaling(NamedTuple):
    """The numbers with which a network begins: pixels x factor + offset, one for all channels or one per channel."""

    factor: np.ndarray
    offset: np.ndarray

    def equals(self, other: Scaling) -> bool:
        """Whether two scalings of pixels of 0..255 differ by rounding only."""
        ends = [np.float64(end) * one.factor + one.offset for end in (0, 255) for one in (self, other)]
        return all(
            np.allclose(mine, theirs, rtol=1e-5, atol=1e-5) for mine, theirs in zip(ends[::2], ends[1::2])
        )


def scaling_of(layers: Iterable[Step]) -> Scaling:
    """The scaling of the Rescaling layers that follow each other from the input on; 1 and 0 without any."""
    factor, offset, source = np.float64(1), np.float64(0), INPUT_NAME
    for layer in layers:
        if layer.inputs == [source] and layer.kind == "Rescaling":
            scale, shift = (np.asarray(layer.config.get(key, 0.0), np.float64) for key in ("scale", "offset"))
            factor, offset, source = factor * scale, offset * scale + shift, layer.name
    return Scaling(np.asarray(factor), np.asarray(offset))


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

    @property
    def first_rescaling(self) -> Optional[str]:
        """Name of the layer that scales the images before any layer with weights; None if there is none.

        A network with such a layer takes pixels of 0..255.
        """
        unscaled = {INPUT_NAME}
        for layer in self.layers:
            if unscaled.isdisjoint(layer.inputs):
                continue
            if layer.kind == "Rescaling":
                return layer.name
            if layer.kind in _MOVES_PIXELS:
                unscaled.add(layer.name)
        return None

    @property
    def frozen_layers(self) -> Tuple[str, ...]:
        """Names of the frozen layers that have weights."""
        return tuple(
            layer.name
            for layer in self.layers
            if layer.config.get("trainable") is False
            and (layer.is_own or any(key.endswith("_initializer") for key in layer.config))
        )

    @property
    def scaling(self) -> Scaling:
        """The scaling at the beginning of the network."""
        return scaling_of(self.layers)

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
                settings = _plain_settings(f"layer '{shown_value(name)}'", kind, settings)
            layers.append(Step(name, kind, None, settings or {}, list(inputs), is_own=settings is None))
            known.add(name)
        return Architecture(tuple(layers), shape)
    except (TypeError, ValueError, KeyError, ConfigurationError) as error:
        reason = text_of(error)
        raise DataError(
            f"{what} has no network that can be read: {shown_value(reason)}", "give another checkpoint"
        ) from None


# --- from a Keras model


Statistics = Callable[[LayerCall], Optional[Tuple[np.ndarray, np.ndarray]]]
"""A function that returns mean and variance of a Normalization layer, which were measured; None if they are absent."""


def _layer_of(
    network: str,
    call: LayerCall,
    num_calls: int,
    inputs: List[str],
    model: Optional[KerasModel],
    statistics: Statistics,
) -> Step:
    """The layer of a call, checked.

    Args:
        network: name of the network, for messages.
        num_calls: number of calls of the layer.
        inputs: names of the layers that it reads.
        model: the network itself; None for one in a file.
        statistics: see :data:`Statistics`.

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
    if kind == "Normalization":
        return _rescaling(where, call, inputs, live, statistics)
    settings = _plain_settings(f"{where} ({kind})", kind, call.settings, _keras_of(live))
    if live is not None:
        _check_activations(where, live, settings)
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


def _keras_of(live: Optional[KerasLayer]) -> int:
    """The major version of the Keras that spelt a layer's settings: .keras files are of Keras 3."""
    if live is None:
        return 3
    from ipucnn.compat import KERAS_3

    return 3 if KERAS_3 else 2


def _check_activations(where: str, live: KerasLayer, settings: Mapping[str, PlainValue]) -> None:
    """Refuses a function of the user's own that has the name of one of Keras' activations; Keras 2.6 saves only names.

    Raises:
        ConfigurationError: an activation is such a function.
    """
    import tensorflow as tf
    from tensorflow import keras

    known = formulas()
    for key in _ACTIVATION_SETTINGS:
        name, function = settings.get(key), getattr(live, key, None)
        if name is None or function is None:
            continue
        name = known.get(str(name), str(name))
        if function not in (keras.activations.get(name), getattr(tf.nn, name, None)):
            raise ConfigurationError(
                f"{where} has an activation of your own, {shown_value(name)}, which has the name of one of Keras",
                "write it as a class of layers: class Mine(keras.layers.Layer)",
            )


def _rescaling(
    where: str, call: LayerCall, inputs: List[str], live: Optional[KerasLayer], statistics: Statistics
) -> Step:
    """A Normalization layer as a Rescaling layer with the same numbers: (x - mean) / max(deviation, 1e-7).

    Raises:
        ConfigurationError: its numbers are not known, or there is not one number per channel or for all.
    """
    given = call.settings.get("mean"), call.settings.get("variance")
    measured = statistics(call) if live is None else (live.mean, live.variance)
    if given[0] is not None and live is None:
        measured = tuple(np.asarray(_plain(value, where, "mean")) for value in given)  # type: ignore[assignment]
    if measured is None or measured[0] is None:
        raise ConfigurationError(
            f"{where} (Normalization) has no mean and variance",
            "call its adapt() before the network is saved",
        )
    mean, variance = (np.squeeze(np.asarray(value, np.float64)) for value in measured)
    axis = call.settings.get("axis")
    axes = list(axis) if isinstance(axis, (list, tuple)) else [] if axis is None else [axis]
    if axes not in ([], [-1], [3]) or mean.ndim > 1 or not np.isfinite([*mean.flat, *variance.flat]).all():
        raise ConfigurationError(
            f"{where} (Normalization) has other numbers than one per channel", "use axis=-1 or axis=None"
        )
    deviation = np.maximum(np.sqrt(variance), 1e-7)
    factor, offset = 1 / deviation, -mean / deviation
    if call.settings.get("invert"):
        factor, offset = deviation, mean
    return Step(call.name, "Rescaling", None, {"scale": factor.tolist(), "offset": offset.tolist()}, inputs)


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


def _plain_settings(
    where: str, layer_kind: str, config: PlainValue, keras: Optional[int] = None
) -> Dict[str, Any]:
    """The settings of a stock layer as plain values, checked, with the spellings of ``formulas.py``.

    Args:
        where: the layer, for messages.
        layer_kind: its class.
        config: its settings.
        keras: the major version of the Keras that spelt them; None for the settings of an architecture.

    Raises:
        ConfigurationError: a setting is not a plain value, or training does not support it.
    """
    settings: Dict[str, Any] = {}
    for key, value in stored_settings(layer_kind, dict(config)).items():
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
        elif key in _ACTIVATION_SETTINGS:
            name = "linear" if value is None else value
            if keras is not None and name in ACTIVATIONS:
                name = stored_activation(name, keras)
            if name not in STORED_ACTIVATIONS:
                raise ConfigurationError(
                    f"{where} has an activation of your own, {shown_value(str(name))[:60]}",
                    f"use one of {', '.join(ACTIVATIONS)}, or a class of layers",
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

    if isinstance(value, dict) and value.get("class_name") in ("__numpy__", "__tensor__"):  # of Keras 3
        value = (value.get("config") or {}).get("value")

    def of_numpy(number: object) -> Any:
        return np.asarray(number).tolist() if hasattr(number, "__array__") else refuse(number)

    def refuse(_: object) -> NoReturn:
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
    name: str,
    calls: Sequence[LayerCall],
    model: Optional[KerasModel] = None,
    statistics: Statistics = lambda call: None,
) -> Architecture:
    """The architecture of a functional or sequential model.

    Args:
        name: name of the network, for messages.
        calls: calls of its layers.
        model: the model itself, which provides layers of the user's own classes; None for one in a file.
        statistics: see :data:`Statistics`; only for a file.

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
        layers.append(_layer_of(name, call, num_calls[call.name], inputs, model, statistics))
    shape = calls[0].settings.get("batch_shape", calls[0].settings.get("batch_input_shape"))
    sizes: Tuple[Optional[int], ...] = (None, None, None)
    if isinstance(shape, (list, tuple)):
        sizes = tuple(shape[1:])
        if len(sizes) != 3 or any(n is not None and (not isinstance(n, int) or n < 1) for n in sizes):
            raise ConfigurationError(
                f"{name}: takes {shown_value(str(sizes))} instead of images (height, width and channels)",
                FUNCTIONAL_HINT,
            )
    layers, notes = _up_to_logits(name, layers, names[calls[-1].call])
    architecture = Architecture(tuple(layers), sizes)
    if architecture.first_rescaling is not None:
        notes.append(f"it takes pixels of 0..255, which its layer {architecture.first_rescaling} scales")
    return architecture._replace(notes=tuple(notes))


def preprocessing_of(name: str, calls: Sequence[LayerCall], statistics: Statistics) -> Optional[Scaling]:
    """The scaling at the beginning of a whole model; None if it has no Rescaling and no Normalization.

    Args:
        name: name of the model, for messages.
        calls: calls of its layers; the first is the input.
        statistics: see :data:`Statistics`.

    Raises:
        ConfigurationError: such a layer does not follow the input, or its numbers are not known.
    """
    names = {calls[0].call: INPUT_NAME}
    steps: List[Step] = []
    for call in calls[1:]:
        names[call.call] = call.name
        if call.kind not in PREPROCESSING:
            continue
        inputs, where = [names[read] for read in call.reads], f"{name}: layer '{shown_value(call.name)}'"
        if inputs != [steps[-1].name if steps else INPUT_NAME]:
            raise ConfigurationError(
                f"{where} ({call.kind}) does not follow the images, so its numbers cannot be those of the images",
                "use the network of the file itself: save it as .keras",
            )
        if call.kind == "Normalization":
            steps.append(_rescaling(where, call, inputs, None, statistics))
        else:
            settings = _plain_settings(where, call.kind, call.settings, 3)
            steps.append(Step(call.name, call.kind, None, settings, inputs))
    return scaling_of(steps) if steps else None


def _up_to_logits(network: str, layers: List[Step], output: str) -> Tuple[List[Step], List[str]]:
    """The layers, output layer last, without softmax at the end; and notes."""
    notes: List[str] = []
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
            where = f"{what}: layer '{shown_value(layer.name)}'"
            settings = spelt_settings(where, layer.kind, layer.config)
            config = {**_accepted(kind, settings, layer.name, what), "name": layer.name}
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
