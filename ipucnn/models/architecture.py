"""A network as data: names of stock Keras layers with plain settings, and what each of them reads.

This is what a network of a user's own becomes, whether a function of a Python file made it or Keras saved it as a
``.keras`` file, and what a checkpoint keeps of it.  Making a network of such data looks up layers in a list by the
names of their classes and gives them numbers and words; nothing in it can be code.  So data from others, as a run
folder's, can make no other than a wrong network.

Read are the configurations of functional and sequential models of Keras 2.6 and 3, with models inside models taken
apart.  What training could not compute as Keras would is refused by name: shared layers, calls with arguments,
regularizers, constraints, random and remembering layers, other types of numbers.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ipucnn.aliases import KerasLayer, KerasModel, PlainValue, Tensor
from ipucnn.errors import ConfigurationError, DataError, text_of
from ipucnn.models.blueprint import Blueprint, Step, assemble
from ipucnn.models.names import INPUT_NAME, snake_case
from ipucnn.text import shown_value

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
_MODELS = ("Functional", "Sequential", "Model")
# Operations on tensors that a layer computes, too: by their names in Keras 3, and in Keras 2.6.
_OPERATIONS = {
    "Add": "Add", "Subtract": "Subtract", "Multiply": "Multiply", "Maximum": "Maximum", "Minimum": "Minimum",
    "Relu": "ReLU", "sub": "Subtract", "mul": "Multiply", **{n: n.title() for n in
    ("add", "subtract", "multiply", "maximum", "minimum")}, "relu": "ReLU",
}  # fmt: skip
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
        known, layers = {INPUT_NAME}, []  # type: Set[str], List[Layer]
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
    """Takes a model apart.

    Args:
        name: of the model, for messages.
        renumbers: layers that Keras named by its counter are numbered from zero, in each model by itself.
    """

    def __init__(self, name: str, renumbers: bool) -> None:
        self.name, self.renumbers = name, renumbers
        self.layers: List[Layer] = []
        self.own: Own = {}
        self.live: Dict[str, KerasLayer] = {}
        self._names: Set[str] = {INPUT_NAME}

    def fail(self, what: str, hint: str) -> ConfigurationError:
        return ConfigurationError(f"{self.name}: {what}", hint)

    def read(
        self,
        kind: str,
        config: PlainValue,
        model: Optional[KerasModel],
        prefix: str,
        source: str,
        is_trained: bool,
    ) -> Tuple[str, Any]:
        """Adds the layers of a model that reads ``source``.

        Args:
            kind, config: of the model.
            model: the model itself, None of one in a file.

        Returns:
            The name of its last layer, and the shape of its input (None: it says none).
        """
        where = f"'{shown_value(prefix[:-1])}'" if prefix else "the network"
        entries = config.get("layers") if isinstance(config, dict) else None
        if not isinstance(entries, list) or not entries:
            raise self.fail(f"{where} is a {shown_value(kind)}, which does not list its layers", _FUNCTIONAL)
        is_trained = is_trained and config.get("trainable", True) is not False
        chained = kind == "Sequential" or "input_layers" not in config
        first: Optional[str] = None
        if not chained:
            first, output = (self._end(config, key, where) for key in ("input_layers", "output_layers"))
        done: Dict[str, str] = {}
        shape, last = config.get("build_input_shape"), source
        names = self._numbered(entries) if self.renumbers else {}
        waiting = [dict(entry) for entry in entries]
        while waiting:
            left = []
            for entry in waiting:
                settings = entry.get("config")
                own = entry.get("name") or (settings or {}).get("name")
                what = str(entry.get("class_name"))
                if not isinstance(settings, dict) or not isinstance(own, str):
                    raise self.fail("a layer has no name or no settings", _FUNCTIONAL)
                if _augments(what, own, model):
                    raise self.fail(
                        f"layer '{shown_value(own)}' ({shown_value(what)}) augments images, which is done to the data "
                        "and not in the network",
                        "leave it out, and add --augment to the command (or --mixup, --cutmix, --random-erasing)",
                    )
                if what == "InputLayer":
                    if not chained and own != first:
                        raise self.fail(
                            f"'{shown_value(own)}' is a second input, and a network has one", _FUNCTIONAL
                        )
                    done[own] = source
                    shape = settings.get("batch_shape", settings.get("batch_input_shape", shape))
                    continue
                reads = [last] if chained else self._reads(entry, own, what)
                if not chained:
                    if any(read not in done for read in reads):
                        left.append(entry)
                        continue
                    reads = [done[read] for read in reads]
                name = prefix + names.get(own, own).replace("/", "_")
                if what in _MODELS:
                    if len(reads) != 1:
                        raise self.fail(
                            f"model '{shown_value(name)}' reads {len(reads)} tensors", _FUNCTIONAL
                        )
                    inner = None if model is None else _layer(model, own)
                    done[own] = self.read(what, settings, inner, name + "_", reads[0], is_trained)[0]
                else:
                    self._add(entry, what, settings, name, reads, is_trained, model, own)
                    done[own] = name
                last = done[own]
            if len(left) == len(waiting):
                raise self.fail("its layers read each other in a circle, or read none of it", _FUNCTIONAL)
            waiting = left
        if chained:
            return last, shape
        if output not in done:
            raise self.fail(f"its output '{shown_value(output)}' is no layer of it", _FUNCTIONAL)
        return done[output], shape

    def _end(self, config: Dict[str, PlainValue], key: str, where: str) -> str:
        """The one input or output."""
        found = list(dict.fromkeys(_references(config.get(key))))
        if len(found) != 1:
            kind = key.split("_")[0]
            names = ", ".join(map(shown_value, found))
            raise self.fail(f"{where} has {len(found)} {kind}s ({names}), and one is trained", _FUNCTIONAL)
        return found[0]

    def _reads(self, entry: Dict[str, PlainValue], name: str, kind: str) -> List[str]:
        """What the one call of a layer reads."""
        nodes = entry.get("inbound_nodes") or []
        shown_name = shown_value(name)
        if len(nodes) != 1:
            raise self.fail(
                f"layer '{shown_name}' is called {len(nodes)} times", "give each call a layer of its own"
            )
        tensors, others = _arguments(nodes[0])
        # Keras 3 notes the default of Dropout as if it had been given.
        others = [text for text in others if not (kind in _OFF_BY_DEFAULT and text == "training=False")]
        if others and not _is_operation(entry):
            raise self.fail(
                f"layer '{shown_name}' ({shown_value(kind)}) is called with {shown_value(', '.join(others))}",
                "call it with one tensor, or one list of them, alone; trainable=False freezes a layer",
            )
        if not tensors or (others and _is_operation(entry)):
            raise self.fail(
                f"operation '{shown_name}' reads more than tensors ({shown_value(', '.join(others))})",
                "use a layer in its place, such as keras.layers.Rescaling",
            )
        return tensors

    def _numbered(self, entries: Sequence[PlainValue]) -> Dict[str, str]:
        """The names that a fresh process would give, for those that Keras counts."""
        counted: Dict[str, List[Tuple[int, str]]] = {}
        for entry in entries:
            name = entry.get("name") or entry["config"]["name"]
            kind = (
                _OPERATIONS.get(_operation(entry), entry["class_name"])
                if _is_operation(entry)
                else entry["class_name"]
            )
            base = snake_case(kind)
            spelt = name.rpartition(".")[2] if _is_operation(entry) else name
            bases = {base, snake_case(_operation(entry))} if _is_operation(entry) else {base}
            bases |= {"model"} if base == "functional" else set()
            match = re.fullmatch(f"(?:{'|'.join(map(re.escape, bases))})(?:_(\\d+))?", spelt)
            if match:
                counted.setdefault(base, []).append((int(match.group(1) or 0), name))
        found = {}
        for base, names in counted.items():
            for position, (_, name) in enumerate(sorted(names, key=lambda pair: pair[0])):
                found[name] = base if position == 0 else f"{base}_{position}"
        return found

    def _add(
        self,
        entry: Dict[str, PlainValue],
        kind: str,
        config: Dict[str, PlainValue],
        name: str,
        reads: List[str],
        is_trained: bool,
        model: Optional[KerasModel],
        own: str,
    ) -> None:
        shown_name = f"layer '{shown_value(name)}'"
        if name in self._names:
            raise self.fail(f"two layers are called '{shown_value(name)}'", "rename one of them")
        if len(self.layers) >= MAX_LAYERS:
            raise self.fail(f"more than {MAX_LAYERS:,} layers", "train a smaller network")
        self._names.add(name)
        if _is_operation(entry):
            operation = _operation(entry)
            if operation not in _OPERATIONS:
                raise self.fail(
                    f"'{shown_value(name)}' is the operation {shown_value(operation)}, which is no layer",
                    "use a layer of Keras in its place, or write it as a class of layers",
                )
            kind = _OPERATIONS[operation]
            if (kind == "ReLU") != (len(reads) == 1):
                raise self.fail(
                    f"operation '{shown_value(name)}' reads {len(reads)} tensors and numbers besides",
                    "use a layer in its place, such as keras.layers.Rescaling",
                )
            self.layers.append(Layer(name, kind, {}, tuple(reads)))
            return
        if kind == "Lambda":
            raise self.fail(
                f"{shown_name} is a Lambda layer, whose function no file can keep",
                "write it as a class: class Mine(keras.layers.Layer)",
            )
        live = None if model is None else _layer(model, own)
        if live is not None:
            self.live[name] = live
            if not _is_stock(live):
                self.layers.append(Layer(name, kind, None, tuple(reads)))
                self.own[name] = type(live), {**config, "name": name}
                return
        elif entry.get("registered_name") not in (None, kind) or not str(
            entry.get("module", "keras")
        ).startswith("keras"):
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
        settings = (
            {} if kind == "Normalization" else _plain_settings(f"{self.name}: {shown_name} ({kind})", config)
        )
        if not is_trained:
            settings["trainable"] = False
        self.layers.append(Layer(name, kind, settings, tuple(reads)))


def _augments(kind: str, name: str, model: Optional[KerasModel]) -> bool:
    """Whether a layer is one of Keras' that augment images, and no class of the user's own that is called so."""
    if not (kind.startswith("Random") or kind in _AUGMENTING):
        return False
    return model is None or type(_layer(model, name)).__module__.split(".")[0] in ("keras", "tensorflow")


def _is_operation(entry: Mapping[str, PlainValue]) -> bool:
    """Whether an entry is a bare operation on tensors."""
    return entry.get("class_name") in ("TFOpLambda", "SlicingOpLambda") or ".ops" in str(
        entry.get("module") or ""
    )


def _operation(entry: Mapping[str, PlainValue]) -> str:
    """Its name."""
    if entry.get("class_name") == "TFOpLambda":
        return str(entry["config"].get("function")).rpartition(".")[2]
    return str(entry.get("class_name"))


def _layer(model: KerasModel, name: str) -> KerasLayer:
    return next(layer for layer in model.layers if layer.name == name)


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


def _references(value: PlainValue) -> List[str]:
    """Names in [name, call, tensor], or lists of them."""
    if isinstance(value, (list, tuple)) and len(value) == 3 and isinstance(value[0], str):
        return [value[0]]
    if isinstance(value, dict):
        value = list(value.values())
    return [name for item in value for name in _references(item)] if isinstance(value, (list, tuple)) else []


def _arguments(node: PlainValue) -> Tuple[List[str], List[str]]:
    """The tensors that a call reads, and its further arguments as text."""
    if isinstance(node, dict):  # Keras 3
        arguments, named = list(node.get("args") or ()), dict(node.get("kwargs") or {})
        if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)):
            arguments = list(arguments[0])
            is_list = True
        else:
            is_list = False
        tensors = [_keras_tensor(value) for value in arguments]
        others = [str(value)[:40] for value, tensor in zip(arguments, tensors) if tensor is None]
        for key, value in named.items():
            tensor = _keras_tensor(value)
            if tensor is not None:
                tensors.append(tensor)
            elif value is not None:
                others.append(f"{key}={value}"[:40])
        found = [tensor for tensor in tensors if tensor is not None]
        if len(found) > 1 and not is_list and not others:
            # Layers take a list; of operations these are the operands.
            return found, []
        return found, others
    entries = node if node and isinstance(node[0], (list, tuple)) else [node]
    found, others = [], []
    for entry in entries:
        found.append(str(entry[0]))
        for key, value in (entry[3] if len(entry) > 3 else {}).items():
            if _references(value) and len(_references(value)) == 1 and isinstance(value, (list, tuple)):
                found.append(_references(value)[0])
            elif value is not None and key != "name":
                others.append(f"{key}={value}"[:40])
    return found, others


def _keras_tensor(value: object) -> Optional[str]:
    if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
        history = (value.get("config") or {}).get("keras_history")
        if isinstance(history, (list, tuple)) and len(history) == 3 and history[2] == 0:
            return str(history[0])
    return None


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
            own = (
                {}
                if value is None
                else {k: v for k, v in dict(value.get("config") or {}).items() if k != "seed"}
            )
            own = {k: v for k, v in own.items() if k not in ("dtype", "input_axes", "output_axes")}
            own = {k: _plain(v, where, key) for k, v in own.items()}
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


def read_architecture(
    name: str, kind: str, config: PlainValue, model: Optional[KerasModel] = None, renumbers: bool = False
) -> Tuple[Architecture, Own, Dict[str, KerasLayer]]:
    """The architecture of a functional or sequential model.

    Args:
        name: of the network, for messages.
        kind: class of the model.
        config: its configuration.
        model: the model itself, of which layers of the user's own classes may be taken; None of one in a file.
        renumbers: see ``_Reader``.

    Returns:
        The architecture; classes of the user's own; and the layers of ``model``, by the names they have now.

    Raises:
        ConfigurationError: something in it that cannot be trained as Keras would, by name.
    """
    reader = _Reader(name, renumbers)
    output, shape = reader.read(kind, config, model, "", INPUT_NAME, True)
    if not isinstance(shape, (list, tuple)):
        sizes: Tuple[Optional[int], ...] = (None, None, None)
    elif len(shape) != 4 or any(n is not None and (not isinstance(n, int) or n < 1) for n in shape[1:]):
        raise reader.fail(
            f"takes {shown_value(str(tuple(shape[1:])))}, wanted images: height, width and channels",
            _FUNCTIONAL,
        )
    else:
        sizes = tuple(shape[1:])
    layers, notes = _between_images_and_logits(reader, output)
    return Architecture(tuple(layers), sizes, tuple(notes)), reader.own, reader.live


def _between_images_and_logits(reader: _Reader, output: str) -> Tuple[List[Layer], List[str]]:
    """The layers without preprocessing at the beginning and softmax at the end; the last one ends the network."""
    layers, notes = reader.layers, []  # type: List[Layer], List[str]
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
