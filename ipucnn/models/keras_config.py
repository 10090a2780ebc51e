"""The calls of a Keras model's layers, read off its configuration as plain values: nothing is looked up or run.

Read are functional and sequential models of Keras 2.6 and 3.  Models inside models are taken apart.
"""

from __future__ import annotations

import re
from typing import (
    Any,
    Collection,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, PlainDict, PlainValue
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.text import shown_value

INPUT_NAME = "input"
"""What the input of every network is called."""
MAX_CALLS = 3000
INPUT_LAYER = "InputLayer"
_MODELS = ("Functional", "Sequential", "Model")
_FUNCTIONAL = "give a functional or sequential model with one input and one output"
# Layers that compute what an operation on tensors does: by the operation's name in Keras 3, and in Keras 2.6.
LAYER_OF_OPERATION = {
    "Add": "Add", "Subtract": "Subtract", "Multiply": "Multiply", "Maximum": "Maximum", "Minimum": "Minimum",
    "Relu": "ReLU", "sub": "Subtract", "mul": "Multiply", **{n: n.title() for n in
    ("add", "subtract", "multiply", "maximum", "minimum")}, "relu": "ReLU",
}  # fmt: skip

Call = Tuple[str, int]
"""A layer's name, and which of its calls."""


class LayerCall(NamedTuple):
    """A call of a layer.

    Attributes:
        call: the layer's name and the number of the call. The name of a layer in a model begins with the model's.
        kind: class of the layer, or name of the operation.
        settings: of the layer.
        reads: the calls whose tensors it reads.
        shapes: of these tensors with the batch, as the configuration has them; None where it does not.
        arguments: (name, value) of its further arguments; the name of a positional one is "".
        place: names of the models the layer is in, and its name there.
        is_operation: it is an operation on tensors and no layer.
        is_stock: the configuration says that the class is Keras' own.
        is_trained: neither the layer nor a model around it is frozen.
    """

    call: Call
    kind: str
    settings: KerasConfig
    reads: Tuple[Call, ...]
    shapes: Tuple[Any, ...]
    arguments: Tuple[Tuple[str, Any], ...]
    place: Tuple[str, ...]
    is_operation: bool
    is_stock: bool
    is_trained: bool

    @property
    def name(self) -> str:
        return self.call[0]

    def layer_in(self, model: KerasModel) -> Optional[KerasLayer]:
        """The layer itself, of the model whose configuration was read; None for an operation."""
        for part in self.place:
            model = next((layer for layer in model.layers if layer.name == part), None)
            if model is None:
                return None
        return model


def read_calls(name: str, kind: str, config: PlainValue, renumbers: bool = False) -> List[LayerCall]:
    """The calls of a model's layers in an order in which they can run; the first is the input, the last the output.

    Args:
        name: of the network, for messages.
        kind: class of the model.
        config: of the model.
        renumbers: layers that Keras named by its counter are numbered from zero, in each model by itself.

    Raises:
        ConfigurationError: several inputs or outputs, or layers that are not listed, not connected, or too many.
        DataError: the configuration is damaged.
    """
    reader = _Reader(name, renumbers)
    try:
        output = reader.expand(kind, config, (), "", None, 0, True)
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
        self._places: Dict[str, Tuple[str, ...]] = {}
        self._num_calls = 0

    def _fail(self, what: str, hint: str = _FUNCTIONAL) -> NoReturn:
        raise ConfigurationError(f"{self.name}: {what}", hint)

    def _count(self, number: int) -> None:
        self._num_calls += number
        if self._num_calls > MAX_CALLS:
            self._fail(f"more than {MAX_CALLS:,} layers", "give a smaller network")

    def expand(
        self,
        kind: PlainValue,
        config: PlainDict,
        place: Tuple[str, ...],
        prefix: str,
        source: Optional[Call],
        number: int,
        is_trained: bool,
    ) -> Call:
        """Adds the calls of a model's layers for one call of the model.

        Args:
            place: names of the models around its layers.
            prefix: of the names of its layers.
            source: what it reads; None for the outermost.
            number: of the call.

        Returns:
            The call that is the model's output.
        """
        where = f"'{shown_value(prefix[:-1])}'" if prefix else "the network"
        entries = config.get("layers") if isinstance(config, dict) else None
        if kind not in _MODELS or not isinstance(entries, list) or not entries:
            self._fail(f"{where} is a {shown_value(kind)}, which does not list its layers")
        is_trained = is_trained and config.get("trainable", True) is not False
        if kind == "Sequential" or "input_layers" not in config:
            entries = _chain(config, entries)
            first, last = entries[0]["name"], (entries[-1]["name"], 0)
        else:
            (first, _), last = (self._end(config, key, where) for key in ("input_layers", "output_layers"))
        by_name: Dict[str, PlainDict] = {}
        for entry in entries:
            own = _text(entry.get("name") or entry["config"]["name"], "name")
            if by_name.setdefault(own, entry) is not entry:
                self._fail(f"two layers '{shown_value(own)}'", "rename one of them")
        nodes = {own: list(entry["inbound_nodes"]) or [()] for own, entry in by_name.items()}
        self._count(sum(map(len, nodes.values())))
        arguments = {(own, call): _arguments(node) for own in nodes for call, node in enumerate(nodes[own])}
        renamed = _numbered(by_name) if self._renumbers else {}
        done: Dict[Call, Call] = {}
        # Keras 2.6 counts the calls of some models from 1.
        sources = {
            of: [call if call in arguments else (call[0], call[1] - 1) for call in arguments[of][0]]
            for of in arguments
        }
        last = last if last in arguments else (last[0], last[1] - 1)
        for own, call in self._ordered(sources):
            entry, reads, (_, shapes, others) = by_name[own], sources[own, call], arguments[own, call]
            what, settings = _text(entry["class_name"], "class_name"), entry["config"]
            name = prefix + renamed.get(own, own).replace("/", "_")
            flat = number * len(nodes[own]) + call
            if (what == INPUT_LAYER) != (own == first):
                problem = "is no input" if own == first else "is a second input, and a network has one"
                self._fail(f"'{shown_value(own)}' {problem}")
            if what != INPUT_LAYER and not reads:
                self._fail(f"layer '{shown_value(own)}' reads no tensor")
            if own == first and source is not None:
                done[own, call] = source
            elif what in _MODELS:
                if len(reads) != 1:
                    self._fail(f"model '{shown_value(name)}' reads {len(reads)} tensors")
                done[own, call] = self.expand(
                    what, settings, (*place, own), f"{name}_", done[reads[0]], flat, is_trained
                )
            else:
                if self._places.setdefault(name, (*place, own)) != (*place, own):
                    self._fail(f"two layers are called '{shown_value(name)}'", "rename one of them")
                done[own, call] = (name, flat)
                self.calls.append(
                    LayerCall(
                        (name, flat),
                        _operation(entry) if _is_operation(entry) else what,
                        dict(settings),
                        tuple(done[read] for read in reads),
                        tuple(shapes),
                        tuple(others),
                        (*place, own),
                        _is_operation(entry),
                        entry.get("registered_name") in (None, what)
                        and str(entry.get("module", "keras")).startswith("keras"),
                        is_trained and settings.get("trainable", True) is not False,
                    )
                )
        if last not in done:
            self._fail(f"its output '{shown_value(last[0])}' is no layer of it")
        return done[last]

    def _end(self, config: PlainDict, key: str, where: str) -> Call:
        """The one input or output."""
        ends, _, _ = _arguments(config[key] if isinstance(config[key], list) else list(config[key].values()))
        names = list(dict.fromkeys(name for name, _ in ends))
        if len(names) != 1:
            listed = ", ".join(map(shown_value, names))
            self._fail(f"{where} has {len(names)} {key.split('_')[0]}s ({listed}), and one is taken")
        return ends[0]

    def _ordered(self, reads: Mapping[Call, Sequence[Call]]) -> List[Call]:
        """Calls in the given order as far as each comes after those that it reads."""
        ordered: List[Call] = []
        done: Set[Call] = set()
        waiting = list(reads)
        while waiting:
            ready = next((i for i, call in enumerate(waiting) if done.issuperset(reads[call])), None)
            if ready is None:
                self._fail(f"layer '{shown_value(waiting[0][0])}' reads a layer that is not there, or itself")
            ordered.append(waiting.pop(ready))
            done.add(ordered[-1])
        return ordered


def _chain(config: PlainDict, layers: Sequence[PlainDict]) -> List[PlainDict]:
    """The entries of a sequential model as those of a functional one."""
    chain = [{**layer, "name": layer["config"]["name"]} for layer in layers]
    if chain[0]["class_name"] != INPUT_LAYER:
        shape = config.get("build_input_shape")
        first = {"name": INPUT_NAME, "batch_shape": shape}
        chain.insert(0, {"class_name": INPUT_LAYER, "name": INPUT_NAME, "config": first})
    for before, layer in zip([None, *chain], chain):
        layer["inbound_nodes"] = [] if before is None else [[[before["name"], 0, 0, {}]]]
    return chain


def _text(value: PlainValue, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a layer has {key} = {shown_value(repr(value))[:60]}")
    return value


def _arguments(node: PlainValue) -> Tuple[List[Call], List[Any], List[Tuple[str, Any]]]:
    """The calls whose tensors a call reads, the tensors' shapes, and its further arguments."""
    reads: List[Call] = []
    shapes: List[Any] = []
    others: List[Tuple[str, Any]] = []

    def read(history: Sequence[PlainValue], shape: PlainValue, key: str) -> None:
        source, call, tensor = history[:3]
        if type(source) is not str or type(call) is not int:
            raise ValueError(f"a layer reads {shown_value(repr([source, call]))[:60]}")
        reads.append((source, call))
        shapes.append(shape)
        if tensor:
            others.append((key, f"output {tensor + 1} of {source}"))

    def walk(value: PlainValue, key: str) -> None:
        num_reads, num_others = len(reads), len(others)
        if isinstance(value, dict):
            if value.get("class_name") == "__keras_tensor__":  # Keras 3
                read(value["config"]["keras_history"], value["config"].get("shape"), key)
                return
            for inner in value.values():
                walk(inner, key)
        elif isinstance(value, (list, tuple)):
            if len(value) in (3, 4) and type(value[0]) is str and type(value[1]) is int:  # Keras 2.6
                read(value, None, key)
                for name, inner in (value[3] if len(value) == 4 else {}).items():
                    walk(inner, name)
                return
            for inner in value:
                walk(inner, key)
        is_empty = value is None or (isinstance(value, (list, tuple)) and not value)
        if len(reads) == num_reads and not is_empty and key != "name":
            others[num_others:] = [(key, value)]  # without tensors, as a whole

    if isinstance(node, dict):
        for value in node.get("args") or ():
            walk(value, "")
        for key, value in (node.get("kwargs") or {}).items():
            walk(value, key)
    else:
        walk(node, "")
    return reads, shapes, others


def _is_operation(entry: PlainDict) -> bool:
    return entry["class_name"] in ("TFOpLambda", "SlicingOpLambda") or ".ops" in str(entry.get("module"))


def _operation(entry: PlainDict) -> str:
    """Name of an operation."""
    if entry["class_name"] == "TFOpLambda":
        return str(entry["config"].get("function")).rpartition(".")[2]
    return str(entry["class_name"])


def snake_case(kind: str) -> str:
    """The name Keras gives a layer of a class: ``MaxPooling2D`` -> ``max_pooling2d``."""
    partly = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", kind)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", partly).lower()


def counted_from_zero(named: Iterable[Tuple[str, str, str, Collection[str]]]) -> Dict[str, str]:
    """The names that a fresh process would give: add, add_1, add_2, ...

    Args:
        named: (name, the part of it that may be counted, the name without a number, what Keras may have written for
            that) of the layers.

    Returns:
        New names, of those that Keras counts.
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
    """The names that a fresh process would give, for those that Keras counts."""
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
