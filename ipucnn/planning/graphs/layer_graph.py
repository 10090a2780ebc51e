"""Declares the layer graph: a network as the planner sees it, without TensorFlow.

Layers are in the model's canonical order, in which they run.  Pipeline stages are runs of that order, so a plan is a
choice of cuts; a tensor that skips over a cut is carried through it (Poplar: "every subsequent pipeline stage must have
its inputs as the outputs of the previous stage").
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Collection, Dict, List, Optional, Set, Tuple

from ipucnn.documents import load_record, to_record
from ipucnn.errors import ConfigurationError, DataError, did_you_mean
from ipucnn.text import shown_value

SCHEMA_VERSION = 1
_HINT = "ask ipucnn to read the layers of the network again, from a build of it"

OTHER = "other"
"""A layer whose class the planner does not model: counted by the bytes it reads and writes, and its MACs."""
OP_CLASSES = (
    "input",
    "conv",
    "grouped_conv",
    "depthwise_conv",
    "transposed_conv",
    "matmul",
    "norm",
    "activation",
    "elementwise",
    "pool",
    "resize",
    "concat",
    "reshape",
    OTHER,
)
PRODUCT_CLASSES = frozenset(("conv", "grouped_conv", "depthwise_conv", "transposed_conv", "matmul"))
"""Convolutions and matrix products."""
MAX_LAYERS = 3000
"""The size limit of a graph: the planner's tables grow with the square of it."""
_MAX_NUMBER = 2**48


@dataclass(frozen=True)
class Layer:
    """One layer, or one half of a separable convolution.

    Attributes:
        name: canonical layer name.
        op_class: one of ``OP_CLASSES``; dropout is "elementwise", padding and cropping are "reshape".
        inputs: names of the layers it reads, in the order of its arguments.
        output_shape: the shape of one sample, channels last: (height, width, channels) or (features,).
        kernel: height and width of a convolution's or pool's window; (1, 1) if there is none.
        strides: the strides of that window.
        groups: the groups of a convolution: 1 if it is not grouped, the input channels if it is depthwise.
        input_channels: the last dimension of the first input, 0 for the input layer.
        macs: multiply-accumulates of the forward pass of one sample.
        num_parameters: the number of elements in all weights, moving statistics included.
        num_trainable: the number of elements in the trainable weights.
        kept: names of the layers whose output this layer's backward pass needs.
    """

    name: str
    op_class: str
    inputs: Tuple[str, ...]
    output_shape: Tuple[int, ...]
    kernel: Tuple[int, int] = (1, 1)
    strides: Tuple[int, int] = (1, 1)
    groups: int = 1
    input_channels: int = 0
    macs: int = 0
    num_parameters: int = 0
    num_trainable: int = 0
    kept: Tuple[str, ...] = ()

    @property
    def output_elements(self) -> int:
        """Returns the number of elements in the output of one sample."""
        return math.prod(self.output_shape)


@dataclass(frozen=True)
class LayerGraph:
    """A network's layers in the order in which they run; ``layers[0]`` is the input, the last is the output.

    Attributes:
        model: the registry name, or a name chosen by the graph's author.
        input_shape: (height, width, channels).
        num_classes: logits per image or pixel.
        layers: the layers; each reads only layers before it.
        tied: pairs of layers that have to be in one stage, the earlier one first: calls that share weights (Poplar
            keeps a variable on one IPU), the two halves of a separable convolution.

    Raises:
        DataError: the layers contradict each other.
    """

    model: str
    input_shape: Tuple[int, int, int]
    num_classes: int
    layers: Tuple[Layer, ...]
    tied: Tuple[Tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        position = self._position
        if len(self.layers) > MAX_LAYERS:
            raise DataError(
                f"layer graph of {self.model}: {len(self.layers):,} layers, more than {MAX_LAYERS:,}",
                "join layers that are never split",
            )
        if len(position) != len(self.layers):
            names = [layer.name for layer in self.layers]
            raise DataError(f"layer graph of {self.model}: '{_first_repeated(names)}' is there twice", _HINT)
        if not self.layers or self.layers[0].op_class != "input":
            raise DataError(f"layer graph of {self.model}: its first layer is not an input", _HINT)
        for i, layer in enumerate(self.layers):
            self._check(i, layer, position)
        for first, last in self.tied:
            if first not in position or last not in position or position[first] >= position[last]:
                raise DataError(f"layer graph of {self.model}: '{first}' and '{last}' can't be tied", _HINT)

    @cached_property
    def _position(self) -> Dict[str, int]:
        return {layer.name: i for i, layer in enumerate(self.layers)}

    def __hash__(self) -> int:
        # Hashing all layers takes milliseconds, so the hash covers only these fields; equal graphs have equal ones.
        return hash((self.model, self.input_shape, self.num_classes, len(self.layers)))

    @cached_property
    def last_use(self) -> Tuple[int, ...]:
        """Returns the position of the last layer that reads each layer's output; its own position if none does."""
        last_use = list(range(len(self.layers)))
        for i, layer in enumerate(self.layers):
            for name in layer.inputs:
                last_use[self._position[name]] = i
        return tuple(last_use)

    def _check(self, i: int, layer: Layer, position: Dict[str, int]) -> None:
        where = f"layer graph of {self.model}, layer '{shown_value(layer.name)}'"
        if layer.op_class not in OP_CLASSES:
            hint = did_you_mean(layer.op_class, OP_CLASSES) or f"it is one of {', '.join(OP_CLASSES)}"
            raise DataError(f"{where}: unknown op_class '{layer.op_class}'", hint)
        if (layer.op_class == "input") != (i == 0) or bool(layer.inputs) != (i > 0):
            raise DataError(f"{where}: the first layer, and no other, is the input", _HINT)
        for name in layer.inputs:
            if position.get(name, i) >= i:
                raise DataError(f"{where} reads '{name}', which is not a layer before it", _HINT)
        for name in layer.kept:
            if position.get(name, i + 1) > i:
                raise DataError(
                    f"{where} keeps '{name}', which is neither itself nor a layer before it", _HINT
                )
        positive = (*layer.output_shape, *layer.kernel, *layer.strides, layer.groups)
        counts = (layer.input_channels, layer.macs, layer.num_parameters, layer.num_trainable)
        if not layer.output_shape or min(positive) < 1 or min(counts) < 0:
            raise DataError(f"{where}: sizes must be at least 1 and counts at least 0", _HINT)
        if max(*positive, *counts, layer.output_elements) > _MAX_NUMBER:
            raise DataError(f"{where}: no size or count may be above {_MAX_NUMBER:,}", _HINT)
        if layer.op_class in PRODUCT_CLASSES:
            ends = (layer.input_channels, layer.output_shape[-1])
            if layer.input_channels != self.layers[position[layer.inputs[0]]].output_shape[-1]:
                raise DataError(
                    f"{where}: input_channels must be the last dimension of its first input", _HINT
                )
            if any(n % layer.groups for n in ends):
                raise DataError(f"{where}: {layer.groups} groups of {ends[0]} and {ends[1]} channels", _HINT)
        if layer.num_trainable > layer.num_parameters:
            raise DataError(
                f"{where}: {layer.num_trainable} of {layer.num_parameters} weights trainable", _HINT
            )

    def index(self, name: str) -> int:
        """Returns the position of a layer.

        Raises:
            ConfigurationError: there is no layer of that name.
        """
        try:
            return self._position[name]
        except KeyError:
            hint = did_you_mean(name, self._position)
            raise ConfigurationError(f"'{name}' is not a layer of {self.model}", hint) from None

    @property
    def total_macs(self) -> int:
        """Returns the multiply-accumulates of the forward pass of one sample."""
        return sum(layer.macs for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """Returns the number of elements in all weights, moving statistics included."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_trainable(self) -> int:
        """Returns the number of elements in the trainable weights."""
        return sum(layer.num_trainable for layer in self.layers)

    def crossing(self, cut: int) -> Tuple[str, ...]:
        """Returns the layers before ``cut`` whose output a layer at or after ``cut`` reads, in their order.

        A skip over several stages is in the crossing of each cut between its ends.
        """
        return tuple(
            self.layers[i].name for i in range(min(cut, len(self.layers))) if self.last_use[i] >= cut
        )

    @property
    def cuts(self) -> Tuple[int, ...]:
        """Returns the positions at which a stage may open, ascending.

        Excluded are the input, the first layer behind it (the first stage would be empty), and layers between two tied
        ones.
        """
        legal = [True] * len(self.layers)
        legal[:2] = [False] * min(2, len(self.layers))
        for first, last in self.tied:
            for cut in range(self._position[first] + 1, self._position[last] + 1):
                legal[cut] = False
        return tuple(cut for cut, allowed in enumerate(legal) if allowed)

    def to_json(self) -> str:
        """Returns the graph as JSON text; ``from_json`` reads it."""
        data = {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "input_shape": self.input_shape,
            "num_classes": self.num_classes,
            "tied": self.tied,
            "layers": [asdict(layer) for layer in self.layers],
        }
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, name: Optional[str] = None) -> "LayerGraph":
        """Reads ``to_json``'s text.  ``tied`` and a layer's fields with defaults may be left out.

        Args:
            name: the network's name, in place of the one in the text.

        Raises:
            DataError: the text is wrong; the message says how.
        """
        try:
            data = load_record(text)
        except ValueError as error:
            raise DataError(f"layer graph is not JSON: {error}", _HINT) from None
        version = data.pop("schema_version", None) if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise DataError(
                f"layer graph has schema_version {version!r}, this ipucnn reads {SCHEMA_VERSION}",
                "write it again with this version",
            )
        if name is not None:
            data["model"] = name
        graph = to_record(data, LayerGraph, "layer graph", _HINT)
        if graph.input_shape != graph.layers[0].output_shape or not 0 < graph.num_classes <= _MAX_NUMBER:
            raise DataError(
                "layer graph: input_shape is not its first layer's, or num_classes is none", _HINT
            )
        return graph


def unknown_layers(graph: LayerGraph) -> Tuple[str, ...]:
    """Returns the names of the layers that the planner does not model."""
    return tuple(layer.name for layer in graph.layers if layer.op_class == OTHER)


def estimates(graph: LayerGraph) -> List[str]:
    """Returns how the planner counted layers that it does not model: one sentence, or an empty list."""
    unknown = unknown_layers(graph)
    if not unknown:
        return []
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    return [
        "layers of classes that the planner has no model of are counted by the bytes they read and write and by their "
        f"weights, an estimate: {', '.join(map(shown_value, unknown[:5]))}{more}"
    ]


def frozen_graph(graph: LayerGraph, names: Collection[str]) -> LayerGraph:
    """Returns the graph with some layers frozen.

    Args:
        names: the layers of the network; for a separable convolution both halves are frozen.
    """
    frozen = {*names}
    layers = [
        replace(layer, num_trainable=0) if layer.name.partition("/")[0] in frozen else layer
        for layer in graph.layers
    ]
    return replace(graph, layers=tuple(layers))


def needs_gradient(graph: LayerGraph) -> Set[str]:
    """Returns the layers whose output depends on a trained weight, so that a gradient flows back to them."""
    trained = {layer.name for layer in graph.layers if layer.num_trainable}
    # A later call has no weights of its own: it uses those of the first.
    trained |= {last for first, last in graph.tied if first in trained}
    needing: Set[str] = set()
    for layer in graph.layers:
        if layer.name in trained or any(name in needing for name in layer.inputs):
            needing.add(layer.name)
    return needing


def goes_back(graph: LayerGraph) -> Set[str]:
    """Returns the layers that a backward pass goes through: all if the graph marks no layer as trained."""
    return needs_gradient(graph) or {layer.name for layer in graph.layers}


def is_frozen(layer: Layer) -> bool:
    """Tells whether the layer has weights, none of which is trained."""
    return layer.num_parameters > 0 and not layer.num_trainable


def kept_outputs(graph: LayerGraph) -> Dict[str, Tuple[str, ...]]:
    """Returns what each layer's backward pass needs: its ``kept``, if it has such a pass and trains its weights."""
    backward, kept_of = goes_back(graph), {}
    for layer in graph.layers:
        kept = layer.kept if layer.name in backward else ()
        if is_frozen(layer) and graph.num_trainable and layer.op_class in PRODUCT_CLASSES:
            # Its input is needed only for the gradient of its weights.
            kept = tuple(name for name in kept if name == layer.name)
        kept_of[layer.name] = kept
    return kept_of


def _first_repeated(names: List[str]) -> str:
    return next(name for i, name in enumerate(names) if name in names[:i])
