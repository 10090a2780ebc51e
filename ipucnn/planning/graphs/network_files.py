"""Networks that users bring in files: a model that Keras 3 saved, or a layer graph as JSON.

Of a ``.keras`` file the configuration is read, as plain values: its layers are known by the names of their classes
(``stock_layers``), nothing is looked up, unpickled or run, and TensorFlow is not needed.  What Keras recorded of the
tensors is compared with the arithmetic here.  A layer of another class is counted by the bytes it reads and writes and
by its weights, where the file has them; one whose output nobody recorded is refused, and so are models of more than one
input or output, and Lambda layers, which are code.  Models within models are taken apart.
"""

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.documents import MAX_RECORD_BYTES
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import read_text, shown
from ipucnn.models.keras_files import open_keras_file, read_configuration
from ipucnn.models.registry import NETWORK_FILES
from ipucnn.planning.graphs.keras_graph import Call, Calls, LayerFacts, calls_of, graph_of_calls, tensors_of
from ipucnn.planning.graphs.layer_graph import MAX_LAYERS, LayerGraph
from ipucnn.planning.graphs.stock_layers import Arithmetic, BadLayer, Shape, arithmetic, is_known
from ipucnn.text import shown_value

HINT = f"give a network that Keras 3 saved as NAME{NETWORK_FILES[0]}, or a layer graph of --save-graph"
_JSON_HINT = (
    "docs/planner.md has the fields of a layer graph; a new one: ipucnn plan-splits MODEL --save-graph"
)
_MAX_NAME = 200
_NESTED = ("Functional", "Sequential", "Model")
_FUNCTIONAL_HINT = "save a functional or sequential model with one input and one output"


def read_network(path: Path) -> LayerGraph:
    """The layer graph in a file; its ``model`` is the path.

    Raises:
        DataError: absent, damaged, or of a network that plans can't be made for.
    """
    name = shown(path)
    if path.suffix.lower() == NETWORK_FILES[0]:
        graph = _read_keras(path, name)
    else:
        text = read_text(path, MAX_RECORD_BYTES, hint=HINT)
        try:
            graph = LayerGraph.from_json(text, name)
        except DataError as error:
            raise DataError(_naming(name, error.message), f"{_JSON_HINT} {name}") from None
    for layer in graph.layers:
        if not 0 < len(layer.name) <= _MAX_NAME or not layer.name.isprintable():
            raise DataError(
                f"{name}: layer '{shown_value(layer.name)}': names have 1 to {_MAX_NAME} visible characters",
                "rename it",
            )
    return graph


def _naming(name: str, message: str) -> str:
    """A message that names the file, if it did not already."""
    return message if name in message else f"{name}: {message}"


def _read_keras(path: Path, name: str) -> LayerGraph:
    saved = read_configuration(path, HINT)
    try:
        return _Network(path, name, saved).graph()
    except (ConfigurationError, DataError) as error:
        # What is wrong is wrong with the file, not with what was typed.
        raise DataError(_naming(name, error.message), error.hint) from None
    except BadLayer as error:
        raise DataError(f"{name}: {error}", HINT) from None


class _Entry(NamedTuple):
    """A layer as the file has it: its class, where that is from, its configuration, and whether it is trained."""

    kind: str
    settings: PlainDict
    is_trained: bool


class _Network:
    """A saved model, taken apart into calls of layers.

    Args:
        path: of the file.
        name: for messages.
        saved: what its configuration holds.
    """

    def __init__(self, path: Path, name: str, saved: PlainValue) -> None:
        self.path, self.name = path, name
        self._entries: Dict[str, _Entry] = {}
        self._calls: Calls = []
        # Of each layer the prefix of the model that it is in, and its name there.
        self._places: Dict[str, Tuple[str, str]] = {}
        self._recorded: Dict[Call, Shape] = {}
        self._arithmetic: Dict[str, Arithmetic] = {}
        self._weights: Optional[Dict[str, Tuple[Shape, ...]]] = None
        self._saved = saved

    def graph(self) -> LayerGraph:
        output = self._expand(_mapping(self._saved, self.name), "", None, 0, True)
        if output != self._calls[-1][0]:
            position = next(i for i, (call, _) in enumerate(self._calls) if call == output)
            self._calls.append(self._calls.pop(position))
        return graph_of_calls(self.name, self._calls, self._look)

    # --- models within models

    def _expand(
        self, model: PlainValue, prefix: str, source: Optional[Call], number: int, is_trained: bool
    ) -> Call:
        """Adds the calls of a model's layers for one call of the model, and returns the call that is its output.

        Args:
            prefix: before the names of its layers.
            source: what it reads; None for the outermost.
            number: of the call.
        """
        kind, config = _text(model, "class_name"), _mapping(model.get("config"), prefix or self.name)
        layers = config.get("layers")
        if kind not in _NESTED or not isinstance(layers, list) or not layers:
            raise DataError(
                f"{self.name} is a {shown_value(kind)}, whose layers the file does not list", _FUNCTIONAL_HINT
            )
        is_trained = is_trained and config.get("trainable", True) is True
        entries = self._sequence(config, layers) if kind == "Sequential" else layers
        (first,), (last,) = (
            self._ends(config, entries, key, prefix) for key in ("input_layers", "output_layers")
        )
        by_name: PlainDict = {}
        for entry in entries:
            own = _text(entry, "name", _mapping(_mapping(entry, self.name).get("config"), self.name))
            if by_name.setdefault(own, entry) is not entry:
                raise DataError(f"{self.name} has two layers '{shown_value(own)}'", "rename one of them")
            entry.setdefault("name", own)
            if not isinstance(entry.setdefault("inbound_nodes", []), list):
                raise BadLayer(f"layer '{shown_value(own)}' has no list of its calls")
        nodes = {own: max(1, len(entry["inbound_nodes"])) for own, entry in by_name.items()}
        done: Dict[Call, Call] = {}
        for (own, call), reads in calls_of(entries):
            entry = by_name[own]
            self._record(entry, call, prefix, done)
            flat = number * nodes[own] + call
            sources = [done[read] for read in reads]
            if _text(entry, "class_name") in _NESTED:
                if len(sources) != 1:
                    what = f"'{shown_value(prefix + own)}' of {self.name} reads {len(sources)} tensors"
                    raise DataError(what, _FUNCTIONAL_HINT)
                done[own, call] = self._expand(entry, f"{prefix}{own}_", sources[0], flat, is_trained)
            elif own == first[0] and source is not None:
                done[own, call] = source
            else:
                if self._places.setdefault(f"{prefix}{own}", (prefix, own)) != (prefix, own):
                    what = f"{self.name} has two layers '{shown_value(prefix + own)}'"
                    raise DataError(what, "rename one of them, or the model that one is in")
                done[own, call] = self._add(entry, f"{prefix}{own}", flat, sources, is_trained)
        if last not in done:
            raise DataError(f"{self.name}: its output '{shown_value(last[0])}' is no layer of it", HINT)
        return done[last]

    def _add(self, entry: PlainValue, name: str, number: int, sources: List[Call], is_trained: bool) -> Call:
        kind, config = _text(entry, "class_name"), _mapping(entry["config"], name)
        if kind == "Lambda":
            raise DataError(
                f"'{shown_value(name)}' of {self.name} is a Lambda layer: its function is code, which is not read",
                "use a layer of Keras in its place, or write the layer graph by hand (docs/planner.md)",
            )
        if kind == "InputLayer" and sources:
            raise DataError(f"the input '{shown_value(name)}' of {self.name} reads another layer", HINT)
        # Operations are called as layers are (Add), and take numbers besides tensors.
        module = str(entry.get("module") or "")
        kind = (
            f"{kind} operation" if ".ops" in module and kind not in ("Add", "Subtract", "Multiply") else kind
        )
        trained = is_trained and config.get("trainable", True) is True
        self._entries.setdefault(name, _Entry(kind, config, trained))
        self._calls.append(((name, number), sources))
        if len(self._calls) > MAX_LAYERS:
            raise DataError(f"{self.name} has more than {MAX_LAYERS:,} layers", "plan a smaller part of it")
        return name, number

    def _sequence(self, config: PlainDict, layers: List[PlainValue]) -> List[Any]:
        """The layers of a sequential model as those of a functional one."""
        chain = [dict(_mapping(layer, self.name)) for layer in layers]
        if chain[0].get("class_name") != "InputLayer":
            shape = config.get("build_input_shape")
            if shape is None:
                raise DataError(
                    f"{self.name} was never built: nothing says what images it takes",
                    "call model.build((None, 224, 224, 3)) before model.save",
                )
            first = {"class_name": "InputLayer", "config": {"name": "input", "batch_shape": shape}}
            chain.insert(0, first)
        before: Optional[str] = None
        for layer in chain:
            own = _text(_mapping(layer.get("config"), self.name), "name")
            layer["name"] = own
            layer["inbound_nodes"] = [] if before is None else [[[before, 0, 0, {}]]]
            before = own
        return chain

    def _ends(self, config: PlainDict, entries: List[PlainValue], key: str, prefix: str) -> List[Call]:
        """The one input or output."""
        if key not in config:  # a sequential model
            entry = entries[0 if key == "input_layers" else -1]
            return [(entry["name"], 0)]
        found = _references(config[key])
        if len(found) != 1:
            what = f"'{prefix[:-1]}' of {self.name}" if prefix else self.name
            names = ", ".join(shown_value(own) for own, _ in found)
            raise DataError(
                f"{what} has {len(found)} {key.split('_')[0]}s ({names}); plans need one", _FUNCTIONAL_HINT
            )
        return found

    def _record(self, entry: PlainValue, call: int, prefix: str, done: Dict[Call, Call]) -> None:
        """Notes the shapes that the file gives for what a call reads."""
        nodes = entry["inbound_nodes"]
        for tensor, shape in tensors_of(nodes[call]) if call < len(nodes) else ():
            known = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape[1:])
            if known and tensor in done:
                self._recorded.setdefault(done[tensor], tuple(shape[1:]))

    # --- layers

    def _look(self, call: Call, inputs: Sequence[Shape]) -> Tuple[LayerFacts, Shape]:
        """A layer and what it returns."""
        name, entry = call[0], self._entries[call[0]]
        where = f"{self.name}: layer '{shown_value(name)}'"
        try:
            if entry.kind == "InputLayer":
                return LayerFacts(name, entry.kind, entry.settings, (), 0), _input_shape(entry.settings)
            if not is_known(entry.kind):
                return self._unknown(call, entry)
            found = arithmetic(entry.kind, entry.settings, inputs)
        except BadLayer as error:
            raise DataError(f"{where} ({shown_value(entry.kind)}) {error}", HINT) from None
        first = self._arithmetic.setdefault(name, found)
        if (first.trainable, first.fixed) != (found.trainable, found.fixed):
            raise DataError(f"{where} has other weights in its second call than in its first", HINT)
        recorded = self._recorded.get(call, found.output)
        if recorded != found.output:
            raise DataError(f"{where} returns {found.output}, and the file says {recorded}", HINT)
        trained = sum(map(_product, found.trainable)) if entry.is_trained else 0
        facts = LayerFacts(name, entry.kind, entry.settings, (*found.trainable, *found.fixed), trained)
        return facts, found.output

    def _unknown(self, call: Call, entry: _Entry) -> Tuple[LayerFacts, Shape]:
        if call not in self._recorded:
            raise DataError(
                f"{self.name}: layer '{shown_value(call[0])}' is a {shown_value(entry.kind)}, no stock layer of Keras, "
                "and nothing in the file says what it returns",
                "let a stock layer follow it, or write the layer graph by hand (docs/planner.md)",
            )
        weights = self._weights_of(call[0])
        trained = sum(map(_product, weights)) if entry.is_trained else 0
        return LayerFacts(call[0], entry.kind, entry.settings, weights, trained), self._recorded[call]

    def _weights_of(self, name: str) -> Tuple[Shape, ...]:
        """The shapes of a layer's weights in the file, () where it has none of that name."""
        if self._weights is None:
            self._weights = {}
            try:
                with open_keras_file(self.path) as file:
                    self._weights = {layer.name: tuple(layer.shapes) for layer in file.layers}
            except UserError:
                pass  # a network may be saved without weights
        return self._weights.get(self._places[name][1], ())


def _product(shape: Shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _mapping(value: PlainValue, where: str) -> PlainDict:
    if not isinstance(value, dict):
        raise DataError(
            f"{shown_value(where)} holds {shown_value(repr(value))[:60]} where a layer should be", HINT
        )
    return value


def _text(data: PlainDict, key: str, other: Optional[PlainDict] = None) -> str:
    value = data.get(key) or (other or {}).get(key)
    if not isinstance(value, str):
        raise BadLayer(f"a layer has {key} = {shown_value(repr(value))[:60]}, wanted text")
    return value


def _references(value: PlainValue) -> List[Call]:
    """[name, call, tensor] or lists of them."""
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        if not isinstance(value[1], int):
            raise BadLayer(f"refers to {shown_value(repr(value))[:60]}")
        return [(value[0], value[1])]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        raise BadLayer(f"refers to {shown_value(repr(value))[:60]}")
    return [reference for item in value for reference in _references(item)]


def _input_shape(config: PlainDict) -> Shape:
    shape = config.get("batch_shape", config.get("batch_input_shape"))
    if not isinstance(shape, list) or len(shape) != 4:
        raise BadLayer(
            f"takes {shown_value(repr(shape))[:60]}, wanted images: batch, height, width and channels"
        )
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape[1:]):
        raise BadLayer(
            f"takes images of any size ({', '.join(map(str, shape[1:]))}), and plans need one: "
            "give keras.Input a height and a width"
        )
    return tuple(shape[1:])
