"""Reads the nodes of a Keras model from its configuration, as plain values; nothing is imported or run.

It reads functional and sequential models of Keras 2.6 and 3.  Models inside models are flattened.
"""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple

from ipucnn.aliases import KerasLayer, KerasModel, PlainDict, PlainValue, Tensor, TensorShape
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.models.blueprint import FIRST, INPUT_LAYER, INPUT_NAME, Blueprint, Node
from ipucnn.text import shown_value

_MODELS = ("Functional", "Sequential", "Model")
# Most calls of layers and models that are read.
MAX_CALLS = 3000
FUNCTIONAL_HINT = "give a functional or sequential model with one input and one output"
# Name of an operation on tensors, in Keras 3 or Keras 2.6 -> the layer that computes the same.
LAYER_OF_OPERATION = {
    "Add": "Add", "Subtract": "Subtract", "Multiply": "Multiply", "Maximum": "Maximum", "Minimum": "Minimum",
    "Relu": "ReLU", "sub": "Subtract", "mul": "Multiply", **{n: n.title() for n in
    ("add", "subtract", "multiply", "maximum", "minimum")}, "relu": "ReLU",
}  # fmt: skip

# Names in Keras 2.6 -> the class of Keras 3 of the same operation.
_OF_KERAS_3 = {"truediv": "TrueDivide", "divide": "Divide", "bias_add": "Add"}

Call = Tuple[str, int]
"""A layer's name, and the number of the call, from 0."""


def read_blueprint(model: KerasModel, name: Optional[str] = None) -> Blueprint:
    """The blueprint of a functional model with one input and one output, without inner models.

    Args:
        name: name of the network for messages; None for the model's.

    Raises:
        ConfigurationError: the model has several inputs or outputs.
    """
    with warnings.catch_warnings():
        # Keras 2.6 warns that it could not find custom layers when loading; nothing is loaded here.
        warnings.simplefilter("ignore")
        nodes = read_nodes(name or model.name, "Functional", model.get_config())
    calls: Dict[str, int] = {}
    for node in nodes:
        if not node.has_layer:
            continue
        layer, number = node.layer_in(model), calls.get(node.layer, 0)
        calls[node.layer] = number + 1
        node.layer_class, node.config = type(layer), layer.get_config()
        node.config.pop("name", None)  # a user's get_config may leave it out
        node.channels = output_shape(layer, number)[-1]
    return Blueprint(nodes, nodes[-1].name)


def output_shape(layer: KerasLayer, call: int = 0) -> TensorShape:
    """The shape of the (first) output of a call of a layer, with the batch."""
    node = layer._inbound_nodes[call]
    return _first_shape(node.output_tensors if hasattr(node, "output_tensors") else node.outputs)


def input_shape(layer: KerasLayer, call: int = 0) -> TensorShape:
    """The shape of the (first) input of a call of a layer, with the batch."""
    return _first_shape(layer._inbound_nodes[call].input_tensors)


def num_calls(layer: KerasLayer) -> int:
    """The number of calls of a layer in the networks that were built of it."""
    return len(layer._inbound_nodes)


def _first_shape(tensors: Tensor) -> TensorShape:
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0]
    return tuple(tensors.shape)


def read_nodes(name: str, kind: str, config: PlainValue, canonical: bool = False) -> List[Node]:
    """Reads the nodes of a model in an order in which they can run, from the input to the output.

    Args:
        name: name of the network, for messages.
        kind: class name of the model.
        config: configuration of the model.
        canonical: whether layers get canonical names: without slashes, commas and blanks, and layers that Keras named
            by its counter are numbered from zero, separately in each model.

    Raises:
        ConfigurationError: there are several inputs or outputs, or layers that are not listed or not connected.
        DataError: the configuration is damaged.
    """
    reader = _Reader(name, canonical)
    try:
        output = reader.expand({"class_name": kind, "config": config}, (), "", None, True)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(
            f"{name} is damaged: {shown_value(repr(error))}", "save it again with Keras"
        ) from None
    # The input is the first node that reads nothing; a model may be listed in any order.
    return sorted(reader.nodes, key=lambda node: (node.name == output, bool(node.inputs)))


class _Reader:
    def __init__(self, name: str, canonical: bool) -> None:
        self.name, self._canonical = name, canonical
        self.nodes: List[Node] = []
        self._calls = itertools.count(1)
        # Name of each layer -> its number of calls so far, and its place.
        self._called: Dict[str, Tuple[int, Tuple[str, ...]]] = {}

    def _fail(self, what: str, hint: str = FUNCTIONAL_HINT) -> NoReturn:
        raise ConfigurationError(f"{self.name}: {what}", hint)

    def expand(
        self,
        model: PlainDict,
        place: Tuple[str, ...],
        prefix: str,
        source: Optional[str],
        is_trained: bool,
        infers: bool = False,
    ) -> str:
        """Adds the nodes of a model for one call of the model.

        Args:
            model: class and configuration of the model.
            place: names of the models that contain its layers.
            prefix: prefix for the names of its layers.
            source: the node whose tensor it reads; None for the outermost model.
            is_trained: whether no model around it is frozen.
            infers: whether it, or a model around it, is called with ``training=False``.

        Returns:
            The name of the node that is the model's output.
        """
        where = f"'{shown_value(prefix[:-1])}'" if prefix else "the network"
        entries, first, last = self._entries(model, where)
        is_trained = is_trained and model["config"].get("trainable", True) is not False
        calls: _Calls = {
            local: [([], [])]
            if local == first
            else [_call_of(entry, node) for node in entry["inbound_nodes"]]
            for local, entry in entries.items()
        }
        for local, of_layer in calls.items():
            if local != first and not (of_layer and all(reads for reads, _ in of_layer)):
                self._fail(f"layer '{shown_value(local)}' reads no tensor")
        calls, last = _counted_calls(calls, last)
        renamed = _numbered(entries) if self._canonical else {}
        outputs: Dict[Call, str] = {}
        for local, number in self._ordered(calls):
            if next(self._calls) > MAX_CALLS:  # models without layers have no nodes to count
                self._fail(f"more than {MAX_CALLS:,} layers", "give a smaller network")
            entry, (reads, others) = entries[local], calls[local][number]
            name = prefix + renamed.get(local, local)
            # Lists of names on the command line are divided at blanks and commas.
            name = re.sub(r"[/,\s]", "_", name) if self._canonical else name
            inputs = [outputs[read] for read in reads]
            if local == first and source is not None:
                outputs[local, number] = source
            elif entry["class_name"] in _MODELS:
                if len(inputs) != 1:
                    self._fail(f"model '{shown_value(name)}' reads {len(inputs)} tensors")
                if any(other != ("training", False) for other in others):
                    given = ", ".join(f"{key}={value}"[:40] for key, value in others)
                    self._fail(
                        f"model '{shown_value(name)}' is called with {shown_value(given)}",
                        "call it with one tensor alone, or with training=False",
                    )
                outputs[local, number] = self.expand(
                    entry, (*place, local), f"{name}_", inputs[0], is_trained, infers or bool(others)
                )
            else:
                node = self._node(entry, name, (*place, local), inputs, others)
                if not is_trained:
                    node.config["trainable"] = False
                node.infers = infers
                self.nodes.append(node)
                outputs[local, number] = node.name
        if last not in outputs:
            self._fail(f"its output '{shown_value(last[0])}' is no layer of it")
        return outputs[last]

    def _entries(self, model: PlainDict, where: str) -> Tuple[Dict[str, PlainDict], str, Call]:
        """A model's layers by name, the name of its input, and the call that is its output."""
        kind, config = model["class_name"], model["config"]
        layers = config.get("layers") if isinstance(config, dict) else None
        if kind not in _MODELS or not isinstance(layers, list) or not layers:
            hint = (
                "return keras.Model(images, outputs) itself, and not a class of your own"
                if kind in _MODELS
                else ""
            )
            self._fail(
                f"{where} is a {shown_value(kind)}, which does not list its layers", hint or FUNCTIONAL_HINT
            )
        if kind == "Sequential" or "input_layers" not in config:
            layers = _chain(config, layers)
            first, last = layers[0]["name"], (layers[-1]["name"], 0)
        else:
            (first, _), last = (self._end(config, key, where) for key in ("input_layers", "output_layers"))
        entries: Dict[str, PlainDict] = {}
        for entry in layers:
            local, layer_class = entry.get("name") or entry["config"]["name"], entry["class_name"]
            if type(local) is not str or type(layer_class) is not str:
                raise ValueError(f"a layer has name = {local!r}, class_name = {layer_class!r}")
            if entries.setdefault(local, entry) is not entry:
                self._fail(f"two layers '{shown_value(local)}'", "rename one of them")
            if (layer_class == INPUT_LAYER) != (local == first):
                problem = "is no input" if local == first else "is a second input, and a network has one"
                self._fail(f"'{shown_value(local)}' {problem}")
        return entries, first, last

    def _node(
        self,
        entry: PlainDict,
        name: str,
        place: Tuple[str, ...],
        inputs: List[str],
        others: Sequence[Tuple[str, PlainValue]],
    ) -> Node:
        """The node of a call of a layer."""
        number, known_place = self._called.get(name, (0, place))
        if known_place != place:
            self._fail(f"two layers are called '{shown_value(name)}'", "rename one of them")
        self._called[name] = number + 1, place
        kind, is_operation = entry["class_name"], _is_operation(entry)
        is_stock = entry.get("registered_name") in (None, kind) and is_of_keras(entry.get("module", "keras"))
        operation, own_name = _operation(entry), name
        if ".activations" in str(entry.get("module")) and is_stock:
            place = ()  # keras.activations.relu is an operation with the name and the settings of a layer
        ranks = sorted(set(_ranks(entry["inbound_nodes"]))) if is_operation else []
        if len(ranks) > 1 and len(inputs) > 1:
            self._fail(
                f"operation '{shown_value(name)}' combines tensors of {ranks[0]} and {ranks[-1]} dimensions, which the "
                "layer that replaces it would match otherwise",
                "bring them to one number of dimensions: keras.layers.Reshape((1, 1, channels))",
            )
        if number and self._canonical and not any(key.endswith("_initializer") for key in entry["config"]):
            name = own_name = f"{name}_call{number}"  # without weights, each call can have a layer of its own
        elif number:
            own_name = f"{name}/call{number}"
        return Node(
            own_name,
            LAYER_OF_OPERATION.get(operation, operation) if is_operation else kind,
            dict(entry["config"]),
            inputs,
            name,
            arguments=tuple(others),
            place=place,
            is_operation=is_operation,
            is_own=not (is_stock or is_operation),
        )

    def _end(self, config: PlainDict, key: str, where: str) -> Call:
        """The call that is the model's only input or output.

        Raises:
            ConfigurationError: the model has several of them.
        """
        ends, _ = _arguments(config[key] if isinstance(config[key], list) else list(config[key].values()))
        names = list(dict.fromkeys(name for name, _ in ends))
        if len(names) != 1:
            listed = ", ".join(map(shown_value, names))
            self._fail(f"{where} has {len(names)} {key.split('_')[0]}s ({listed}), and one is taken")
        return ends[0]

    def _ordered(self, calls: _Calls) -> List[Call]:
        """Sorts calls so that each comes after those that it reads, and otherwise keeps their order."""
        reads = {
            (local, number): set(node[0])
            for local, of_layer in calls.items()
            for number, node in enumerate(of_layer)
        }
        ordered: List[Call] = []
        placed: Set[Call] = set()
        waiting = list(reads)
        while waiting:
            ready = next((i for i, call in enumerate(waiting) if placed >= reads[call]), None)
            if ready is None:
                self._fail(f"layer '{shown_value(waiting[0][0])}' reads a layer that is not there, or itself")
            ordered.append(waiting.pop(ready))
            placed.add(ordered[-1])
        return ordered


_Reads = Tuple[List[Call], List[Tuple[str, Any]]]
_Calls = Mapping[str, Sequence[_Reads]]
"""Name of a layer -> the result of :func:`_arguments` for each of its calls."""


def _counted_calls(calls: _Calls, last: Call) -> Tuple[_Calls, Call]:
    """The calls and the last one with numbers from 0: Keras counts those of some models from 1."""
    largest: Dict[str, int] = {}
    for name, number in [last, *(read for layer in calls.values() for reads, _ in layer for read in reads)]:
        largest[name] = max(number, largest.get(name, 0))
    from_one = {name for name, number in largest.items() if number == len(calls.get(name, ()))}

    def counted(call: Call) -> Call:
        return call[0], call[1] - (call[0] in from_one)

    return {
        name: [([counted(read) for read in reads], others) for reads, others in layer]
        for name, layer in calls.items()
    }, counted(last)


def _chain(config: PlainDict, layers: Sequence[PlainDict]) -> List[PlainDict]:
    """Converts the layer entries of a sequential model to those of a functional model."""
    chain = [{**layer, "name": layer["config"]["name"]} for layer in layers]
    if chain[0]["class_name"] != INPUT_LAYER:
        shape = config.get("build_input_shape")
        first = {"name": INPUT_NAME, "batch_shape": shape}
        chain.insert(0, {"class_name": INPUT_LAYER, "name": INPUT_NAME, "config": first})
    for previous, layer in zip([None, *chain], chain):
        layer["inbound_nodes"] = [] if previous is None else [[[previous["name"], 0, 0, {}]]]
    return chain


def _call_of(entry: PlainDict, node: PlainValue) -> _Reads:
    """The result of :func:`_arguments` for a call, with further arguments of a layer that are tensors.

    A layer is called again with one tensor, or one list of them, in its first argument.
    """
    reads, others = _arguments(node)
    if _is_operation(entry):
        return reads, others
    if isinstance(node, dict):  # Keras 3
        arguments = [("", value) for value in node.get("args") or ()]
        arguments += [*(node.get("kwargs") or {}).items()]
        tensors = [(key, value) for key, value in arguments if _has_tensor(value)]
        if len(tensors) == 1 and tensors[0][0] in ("", "x", "inputs") and _is_plain(tensors[0][1]):
            return reads, others
        if len(tensors) > 1:
            return reads, [
                *others,
                *((key, "a tensor" if key else "a second tensor") for key, _ in tensors[1:]),
            ]
        return reads, [
            *others,
            *((key, "a tensor" if key else "tensors in a dict or in lists") for key, _ in tensors),
        ]
    kinds = {type(history[0]) for history in node if isinstance(history, (list, tuple)) and history}
    named = [
        key
        for history in node
        if isinstance(history, (list, tuple)) and len(history) == 4 and isinstance(history[3], dict)
        for key, value in history[3].items()
        if isinstance(value, (dict, list, tuple)) and _arguments(value)[0]
    ]
    others = [*others, *((key, "a tensor") for key in dict.fromkeys(named))]
    return reads, [*others, *([("", "tensors in lists")] if kinds - {str} else [])]


def _is_tensor(value: PlainValue) -> bool:
    return isinstance(value, dict) and value.get("class_name") == "__keras_tensor__"


def _has_tensor(value: PlainValue) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return _is_tensor(value) or any(map(_has_tensor, inner))


def _is_plain(value: PlainValue) -> bool:
    """Whether an argument of Keras 3 is a tensor, or a list of tensors alone."""
    return all(map(_is_tensor, value if isinstance(value, (list, tuple)) else [value]))


def _arguments(node: PlainValue) -> _Reads:
    """The calls whose tensors a call reads, and (name, value) of its further arguments."""
    reads: List[Call] = []
    others: List[Tuple[str, Any]] = []

    def read(history: Sequence[PlainValue], key: str) -> None:
        source, call, tensor = history[:3]
        if type(source) is not str or type(call) is not int:
            raise ValueError(f"a layer reads {shown_value(repr([source, call]))[:60]}")
        reads.append((source, call))
        if tensor:
            others.append((key, f"output {tensor + 1} of {source}"))

    def walk(value: PlainValue, key: str) -> None:
        num_reads, num_others = len(reads), len(others)
        if isinstance(value, dict):
            if value.get("class_name") == "__keras_tensor__":  # Keras 3
                read(value["config"]["keras_history"], key)
                return
            for inner in value.values():
                walk(inner, key)
        elif isinstance(value, (list, tuple)):
            if len(value) in (3, 4) and type(value[0]) is str and type(value[1]) is int:  # Keras 2.6
                if value[0] == "_CONSTANT_VALUE":
                    others.append((FIRST, value[2]))
                else:
                    read(value, key)
                for name, inner in (value[3] if len(value) == 4 else {}).items():
                    walk(inner, name)
                return
            for inner in value:
                walk(inner, key)
        is_empty = value is None or (isinstance(value, (list, tuple)) and not value)
        if len(reads) == num_reads and not is_empty and key != "name":
            others[num_others:] = [(key, value)]  # a value without tensors is kept as a whole

    if isinstance(node, dict):
        for value in node.get("args") or ():
            walk(value, "" if reads else FIRST)
        for key, value in (node.get("kwargs") or {}).items():
            walk(value, key)
    else:
        walk(node, "")
    return reads, others


def _ranks(value: PlainValue) -> Iterator[int]:
    """Yields the numbers of dimensions of the tensors in recorded calls; Keras 2.6 does not record them."""
    if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
        yield len(value["config"]["shape"])
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _ranks(part)


def _is_operation(entry: PlainDict) -> bool:
    module = str(entry.get("module"))
    return entry["class_name"] in ("TFOpLambda", "SlicingOpLambda") or (
        is_of_keras(module) and ".ops" in module
    )


def _operation(entry: PlainDict) -> str:
    """The name of an operation, as in ``LAYER_OF_OPERATION``."""
    if entry["class_name"] == "TFOpLambda":
        return str(entry["config"].get("function")).rpartition(".")[2]
    return str(entry["class_name"])


def is_of_keras(module: PlainValue) -> bool:
    """Whether a module is one of Keras or of TensorFlow."""
    return str(module).partition(".")[0] in ("keras", "tensorflow")


def stock_kind(layer: KerasLayer) -> str:
    """The name of a layer's class if it is of Keras or of this package; "" for a user's own class.

    That may be called as one of Keras is, or extend one, and compute something else.
    """
    module = type(layer).__module__
    return type(layer).__name__ if is_of_keras(module) or module.startswith("ipucnn.models.") else ""


def snake_case(kind: str) -> str:
    """The default name of a Keras layer of a class: ``MaxPooling2D`` -> ``max_pooling2d``."""
    partly = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", kind)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", partly).lower()


def counted_from_zero(named: Iterable[Tuple[str, str, str, Iterable[str]]]) -> Dict[str, str]:
    """The names that Keras would give layers in a new process: add, add_1, add_2, ...

    Args:
        named: for each layer (name, part of the name that may end in a counter, new name without a number,
            possible spellings by Keras of the name without a number).

    Returns:
        Old name -> new name, for the layers that Keras named by its counter.
    """
    counted: Dict[str, List[Tuple[int, str]]] = {}
    for name, spelt, base, bases in named:
        match = re.fullmatch(f"(?:{'|'.join(map(re.escape, sorted(bases)))})(?:_(\\d+))?", spelt)
        if match:
            counted.setdefault(base, []).append((int(match.group(1) or 0), name))
    return {
        name: f"{base}_{position}" if position else base
        for base, names in counted.items()
        for position, (_, name) in enumerate(sorted(names, key=lambda pair: pair[0]))
    }


def _numbered(entries: Mapping[str, PlainDict]) -> Dict[str, str]:
    """The new names of layer entries that Keras named by its counter, see :func:`counted_from_zero`."""
    counted = []
    for name, entry in entries.items():
        kind, spelt, bases = entry["class_name"], name, set()
        if _is_operation(entry):
            operation = _operation(entry)
            named = {**_OF_KERAS_3, **LAYER_OF_OPERATION}
            kind, spelt = named.get(operation, kind), name.rpartition(".")[2]
            bases.add(snake_case(operation))
        base = snake_case(kind)
        bases |= {base, "model"} if base == "functional" else {base}
        counted.append((name, spelt, base, bases))
    return counted_from_zero(counted)
