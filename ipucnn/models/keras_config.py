"""Reads the calls of a Keras model's layers from its configuration, as plain values; nothing is imported or run.

It reads functional and sequential models of Keras 2.6 and 3.  Models inside models are flattened.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Set, Tuple

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, PlainDict, PlainValue
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.text import shown_value

INPUT_NAME = "input"
"""The name of the input of every network."""
MAX_CALLS = 3000
INPUT_LAYER = "InputLayer"
PREPROCESSING = ("Rescaling", "Normalization")
"""Layers that prepare images, which is done in the input pipeline."""
_MODELS = ("Functional", "Sequential", "Model")
FUNCTIONAL_HINT = "give a functional or sequential model with one input and one output"
# Name of an operation on tensors, in Keras 3 or Keras 2.6 -> the layer that computes the same.
LAYER_OF_OPERATION = {
    "Add": "Add", "Subtract": "Subtract", "Multiply": "Multiply", "Maximum": "Maximum", "Minimum": "Minimum",
    "Relu": "ReLU", "sub": "Subtract", "mul": "Multiply", **{n: n.title() for n in
    ("add", "subtract", "multiply", "maximum", "minimum")}, "relu": "ReLU",
}  # fmt: skip

Call = Tuple[str, int]
"""A layer's name, and the number of the call, from 0."""


class LayerCall(NamedTuple):
    """A call of a layer.

    Attributes:
        call: the layer's name and the number of the call; names of layers in an inner model begin with its name.
        kind: class name of the layer, or name of the operation.
        settings: configuration of the layer.
        reads: the calls whose tensors it reads.
        arguments: (name, value) of its further arguments; the name of a positional one is "".
        place: names of the models that contain the layer, from the outermost, and the layer's name in the innermost.
        is_operation: whether it is an operation on tensors instead of a layer.
        is_stock: whether the class is Keras' own according to the configuration.
        is_trained: whether neither the layer nor a model around it is frozen.
    """

    call: Call
    kind: str
    settings: KerasConfig
    reads: Tuple[Call, ...]
    arguments: Tuple[Tuple[str, Any], ...]
    place: Tuple[str, ...]
    is_operation: bool
    is_stock: bool
    is_trained: bool

    @property
    def name(self) -> str:
        return self.call[0]

    def layer_in(self, model: KerasModel) -> Optional[KerasLayer]:
        """The layer itself in the model whose configuration was read; None for an operation."""
        for part in self.place:
            model = next((layer for layer in model.layers if layer.name == part), None)
            if model is None:
                return None
        return model


def read_calls(name: str, kind: str, config: PlainValue, renumbers: bool = False) -> List[LayerCall]:
    """Reads the calls of a model's layers in an order in which they can run, from the input to the output.

    Args:
        name: name of the network, for messages.
        kind: class name of the model.
        config: configuration of the model.
        renumbers: whether to number layers that Keras named by its counter from zero, separately in each model.

    Raises:
        ConfigurationError: there are several inputs or outputs, or too many layers, or layers that are not listed or
            not connected.
        DataError: the configuration is damaged.
    """
    reader = _Reader(name, renumbers)
    try:
        output = reader.expand({"class_name": kind, "config": config}, (), "", None, True)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(
            f"{name} is damaged: {shown_value(repr(error))}", "save it again with Keras"
        ) from None
    # The input is the first call that reads nothing; a model may be listed in any order.
    return sorted(reader.calls, key=lambda call: (call.call == output, bool(call.reads)))


class _Reader:
    def __init__(self, name: str, renumbers: bool) -> None:
        self.name, self._renumbers = name, renumbers
        self.calls: List[LayerCall] = []
        # Name of each layer -> its number of calls so far, and its place.
        self._called: Dict[str, Tuple[int, Tuple[str, ...]]] = {}
        self._num_calls = 0

    def _fail(self, what: str, hint: str = FUNCTIONAL_HINT) -> NoReturn:
        raise ConfigurationError(f"{self.name}: {what}", hint)

    def _count(self, number: int) -> None:
        self._num_calls += number
        if self._num_calls > MAX_CALLS:
            self._fail(f"more than {MAX_CALLS:,} layers", "give a smaller network")

    def expand(
        self, model: PlainDict, place: Tuple[str, ...], prefix: str, source: Optional[Call], is_trained: bool
    ) -> Call:
        """Adds the calls of a model's layers for one call of the model.

        Args:
            model: class and configuration of the model.
            place: names of the models that contain its layers.
            prefix: prefix for the names of its layers.
            source: the call whose tensor it reads; None for the outermost model.
            is_trained: whether no model around it is frozen.

        Returns:
            The call that is the model's output.
        """
        where = f"'{shown_value(prefix[:-1])}'" if prefix else "the network"
        entries, first, last = self._entries(model, where)
        is_trained = is_trained and model["config"].get("trainable", True) is not False
        nodes = {
            local: [_arguments(node) for node in entry["inbound_nodes"]] for local, entry in entries.items()
        }
        nodes[first] = [([], [])]
        for local, calls in nodes.items():
            if local != first and not (calls and all(reads for reads, _ in calls)):
                self._fail(f"layer '{shown_value(local)}' reads no tensor")
        self._count(sum(map(len, nodes.values())))
        renamed = _numbered(entries) if self._renumbers else {}
        outputs: Dict[Call, Call] = {}
        for local, number in self._ordered(nodes):
            entry, (reads, others) = entries[local], nodes[local][number]
            name = prefix + renamed.get(local, local).replace("/", "_")
            if local == first and source is not None:
                outputs[local, number] = source
            elif entry["class_name"] in _MODELS:
                if len(reads) != 1:
                    self._fail(f"model '{shown_value(name)}' reads {len(reads)} tensors")
                outputs[local, number] = self.expand(
                    entry, (*place, local), f"{name}_", outputs[_known(reads[0], nodes)], is_trained
                )
            else:
                node = ([outputs[_known(read, nodes)] for read in reads], others)
                outputs[local, number] = self._add(entry, name, (*place, local), node, is_trained)
        if _known(last, nodes) not in outputs:
            self._fail(f"its output '{shown_value(last[0])}' is no layer of it")
        return outputs[_known(last, nodes)]

    def _entries(self, model: PlainDict, where: str) -> Tuple[Dict[str, PlainDict], str, Call]:
        """A model's layers by name, the name of its input, and the call that is its output."""
        kind, config = model["class_name"], model["config"]
        layers = config.get("layers") if isinstance(config, dict) else None
        if kind not in _MODELS or not isinstance(layers, list) or not layers:
            self._fail(f"{where} is a {shown_value(kind)}, which does not list its layers")
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

    def _add(
        self, entry: PlainDict, name: str, place: Tuple[str, ...], node: _Node, is_trained: bool
    ) -> Call:
        """Adds a call of a layer."""
        number, known_place = self._called.get(name, (0, place))
        if known_place != place:
            self._fail(f"two layers are called '{shown_value(name)}'", "rename one of them")
        self._called[name] = number + 1, place
        kind, settings, is_operation = entry["class_name"], dict(entry["config"]), _is_operation(entry)
        reads, arguments = node
        is_stock = entry.get("registered_name") in (None, kind)
        self.calls.append(
            LayerCall(
                (name, number),
                _operation(entry) if is_operation else kind,
                settings,
                tuple(reads),
                tuple(arguments),
                place,
                is_operation,
                is_stock and str(entry.get("module", "keras")).startswith("keras"),
                is_trained and settings.get("trainable", True) is not False,
            )
        )
        return name, number

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

    def _ordered(self, nodes: _Nodes) -> List[Call]:
        """Sorts calls so that each comes after those that it reads, and otherwise keeps their order."""
        reads = {
            (local, number): {_known(read, nodes) for read in node[0]}
            for local, calls in nodes.items()
            for number, node in enumerate(calls)
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


_Node = Tuple[List[Call], List[Tuple[str, Any]]]
_Nodes = Mapping[str, Sequence[_Node]]
"""Name of a layer -> the result of :func:`_arguments` for each of its calls."""


def _known(call: Call, nodes: _Nodes) -> Call:
    """A call counted from 0: Keras 2.6 counts the calls of some models from 1."""
    name, number = call
    return call if number < len(nodes.get(name, ())) else (name, number - 1)


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


def _arguments(node: PlainValue) -> _Node:
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
            walk(value, "")
        for key, value in (node.get("kwargs") or {}).items():
            walk(value, key)
    else:
        walk(node, "")
    return reads, others


def _is_operation(entry: PlainDict) -> bool:
    return entry["class_name"] in ("TFOpLambda", "SlicingOpLambda") or ".ops" in str(entry.get("module"))


def _operation(entry: PlainDict) -> str:
    """The name of an operation, as in ``LAYER_OF_OPERATION``."""
    if entry["class_name"] == "TFOpLambda":
        return str(entry["config"].get("function")).rpartition(".")[2]
    return str(entry["class_name"])


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
            kind, spelt = LAYER_OF_OPERATION.get(operation, kind), name.rpartition(".")[2]
            bases.add(snake_case(operation))
        base = snake_case(kind)
        bases |= {base, "model"} if base == "functional" else {base}
        counted.append((name, spelt, base, bases))
    return counted_from_zero(counted)
