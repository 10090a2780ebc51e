"""Networks that users bring in files: a model that Keras 3 saved, or a layer graph as JSON.

Of a ``.keras`` file the configuration is read, as plain values: its layers are known by the names of their classes
(``stock_layers``), nothing is looked up, unpickled or run, and TensorFlow is not needed.  What Keras recorded of the
tensors is compared with the arithmetic here.  A layer of another class is counted by the bytes it reads and writes and
by its weights, where the file has them; one whose output nobody recorded is refused, and so are models of more than one
input or output, and Lambda layers, which are code.  Models within models are taken apart.
"""

import contextlib
import math
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.documents import MAX_RECORD_BYTES
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import read_text, shown
from ipucnn.models.keras_config import INPUT_LAYER, Call, LayerCall
from ipucnn.models.keras_files import open_keras_file, read_saved_calls
from ipucnn.models.registry import NETWORK_FILES
from ipucnn.planning.graphs.keras_graph import LayerFacts, graph_of_calls
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.graphs.stock_layers import Arithmetic, BadLayer, Shape, arithmetic, is_known
from ipucnn.text import shown_value

HINT = f"give a network that Keras 3 saved as NAME{NETWORK_FILES[0]}, or a layer graph of --save-graph"
_JSON_HINT = (
    "docs/planner.md has the fields of a layer graph; a new one: ipucnn plan-splits MODEL --save-graph"
)
_MAX_NAME = 200


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
    try:
        calls = read_saved_calls(path, name, HINT)
        return graph_of_calls(name, calls, _SavedNetwork(path, name, calls).look)
    except (ConfigurationError, DataError) as error:
        # What is wrong is wrong with the file, not with what was typed.
        raise DataError(_naming(name, error.message), error.hint) from None
    except BadLayer as error:
        raise DataError(f"{name}: {error}", HINT) from None


class _SavedNetwork:
    """What is known of the layers of a saved model.

    Args:
        path: of the file.
        name: for messages.
        calls: of its layers.
    """

    def __init__(self, path: Path, name: str, calls: Sequence[LayerCall]) -> None:
        self.path, self.name = path, name
        self._recorded: Dict[Call, Shape] = {}
        for call in calls:
            for source, shape in zip(call.reads, call.shapes):
                if isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape[1:]):
                    self._recorded.setdefault(source, tuple(shape[1:]))
        self._arithmetic: Dict[str, Arithmetic] = {}
        self._weights: Optional[Dict[str, Tuple[Shape, ...]]] = None

    def look(self, call: LayerCall, inputs: Sequence[Shape]) -> Tuple[LayerFacts, Shape]:
        """A layer and what it returns."""
        name, kind, settings = call.name, call.kind, call.settings
        where = f"{self.name}: layer '{shown_value(name)}'"
        if kind == "Lambda":
            raise DataError(
                f"'{shown_value(name)}' of {self.name} is a Lambda layer: its function is code, which is not read",
                "use a layer of Keras in its place, or write the layer graph by hand (docs/planner.md)",
            )
        # Operations are called as layers are (Add), and take numbers besides tensors.
        if call.is_operation and kind not in ("Add", "Subtract", "Multiply"):
            kind = f"{kind} operation"
        try:
            if kind == INPUT_LAYER:
                return LayerFacts(name, kind, settings, (), 0), _input_shape(settings)
            if not is_known(kind):
                return self._unknown(call, kind)
            found = arithmetic(kind, settings, inputs)
        except BadLayer as error:
            raise DataError(f"{where} ({shown_value(kind)}) {error}", HINT) from None
        first = self._arithmetic.setdefault(name, found)
        if (first.trainable, first.fixed) != (found.trainable, found.fixed):
            raise DataError(f"{where} has other weights in its second call than in its first", HINT)
        recorded = self._recorded.get(call.call, found.output)
        if recorded != found.output:
            raise DataError(f"{where} returns {found.output}, and the file says {recorded}", HINT)
        trained = sum(map(math.prod, found.trainable)) if call.is_trained else 0
        return LayerFacts(name, kind, settings, (*found.trainable, *found.fixed), trained), found.output

    def _unknown(self, call: LayerCall, kind: str) -> Tuple[LayerFacts, Shape]:
        if call.call not in self._recorded:
            raise DataError(
                f"{self.name}: layer '{shown_value(call.name)}' is a {shown_value(kind)}, no stock layer of Keras, "
                "and nothing in the file says what it returns",
                "let a stock layer follow it, or write the layer graph by hand (docs/planner.md)",
            )
        weights = self._weights_of(call.place[-1])
        trained = sum(map(math.prod, weights)) if call.is_trained else 0
        return LayerFacts(call.name, kind, call.settings, weights, trained), self._recorded[call.call]

    def _weights_of(self, name: str) -> Tuple[Shape, ...]:
        """The shapes of a layer's weights in the file, () where it has none of that name."""
        if self._weights is None:
            self._weights = {}
            with contextlib.suppress(UserError), open_keras_file(self.path) as file:
                # A network may be saved without weights.
                self._weights = {layer.name: tuple(layer.shapes) for layer in file.layers}
        return self._weights.get(name, ())


def _input_shape(config: PlainDict) -> Shape:
    shape = config.get("batch_shape", config.get("batch_input_shape"))
    if shape is None:
        raise BadLayer("says nothing of the images: call model.build((None, 224, 224, 3)) before model.save")
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
