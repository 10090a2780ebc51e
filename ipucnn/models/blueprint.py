"""A network as plain data that can be edited and built again: nodes, which are calls of layers.

A blueprint is made of a Keras model's public configuration (``keras_config.py``), of the data in a checkpoint
(``own.py``), or by the builder of a registered network.  It is edited as a list, and assembled into a new model.
``keras.models.clone_model`` can replace a layer, but cannot rewire or rename layers in both Keras 2.6 and Keras 3, and
it fails on operations that are not layers (``x + 3`` in MobileNetV3).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, Tensor

INPUT_NAME = "input"
"""The name of the input of every network."""
INPUT_LAYER = "InputLayer"
FIRST = "x"
"""The name of the first argument of an operation, if it is a number."""


class LayerSample(NamedTuple):
    """What a layer computes with fixed weights: by it a class is known again whose code may lie in any file.

    Attributes:
        inputs: shape of each tensor that it was given, whose values follow from it.
        outputs: some of the numbers that it returned, in evaluation and then in training.
    """

    inputs: Tuple[Tuple[int, ...], ...]
    outputs: Tuple[float, ...]


@dataclass(eq=False)
class Node:
    """A call of a layer, or of an operation on tensors.

    Attributes:
        name: unique name; that of the layer for its first call.
        kind: class name of the layer, or the name under which Keras records the operation.
        config: settings of the layer without its name, equal in all calls of the layer.
        inputs: names of the nodes that it reads, in the order of its arguments.
        layer: name of the layer, which several nodes may call.
        layer_class: class of the layer; None for Keras' own class of the name ``kind``, and for an operation.
        arguments: (name, value) of further arguments of the call; the name of a positional one is "", or FIRST if it
            comes before the first tensor.
        place: names of the models that contain the layer in the model that was read, from the outermost, and the
            layer's name in the innermost.
        is_operation: whether it is an operation, which must be replaced or removed.
        is_own: whether the layer's class is a user's own.
        infers: whether it, or a model that contains it, is called with ``training=False``.
        sample: what a layer of a user's own class computes; None for others, and if it is not known.
        channels: last dimension of the output, if it is known without building the network.
    """

    name: str
    kind: str
    config: Dict[str, Any]
    inputs: List[str]
    layer: str = ""
    layer_class: Optional[type] = None
    arguments: Tuple[Tuple[str, Any], ...] = ()
    place: Tuple[str, ...] = ()
    is_operation: bool = False
    is_own: bool = False
    infers: bool = False
    sample: Optional[LayerSample] = None
    channels: Optional[int] = None

    def __post_init__(self) -> None:
        self.layer = self.layer or self.name

    @property
    def stock(self) -> str:
        """The kind of a layer of Keras' own or of an operation; "" for a user's own layer, whose class may be called
        as one of Keras is and compute something else."""
        return "" if self.is_own else self.kind

    @property
    def has_layer(self) -> bool:
        """Whether a layer of the model whose configuration was read computes it, and no operation."""
        return not self.is_operation and bool(self.place)

    @property
    def constants(self) -> List[float]:
        """The numbers among an operation's arguments."""
        return [value for _, value in self.arguments if type(value) in (int, float)]

    def replace(self, layer_class: type, config: KerasConfig) -> None:
        """Changes the class and the settings of the layer; its name stays."""
        self.layer_class, self.kind = layer_class, layer_class.__name__
        self.config, self.is_operation, self.arguments = dict(config), False, ()

    def layer_in(self, model: KerasModel) -> KerasLayer:
        """The layer itself in the model whose configuration was read.

        Raises:
            ValueError: the node is not of that configuration, or no layer computes it.
        """
        if not self.has_layer:
            raise ValueError(f"{self.name} names no layer of a model")
        for part in self.place:
            model = next(layer for layer in model.layers if layer.name == part)
        return model


def named(layer_class: type, name: str, inputs: List[str], **config: object) -> Node:
    """A node that calls a new layer of a class."""
    return Node(name, layer_class.__name__, config, inputs, layer_class=layer_class)


class NotMadeError(ValueError):
    """The class of a layer does not make it from its settings; the cause says why.

    Attributes:
        node: a call of the layer.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(f"layer {node.layer} ({node.kind}) is not made from its settings")
        self.node = node


@dataclass
class Blueprint:
    """Nodes in an order in which they can run, of which the first is the input; ``output`` is the last node's name."""

    nodes: List[Node]
    output: str

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def consumers(self, name: str) -> List[Node]:
        """The nodes that read ``name``."""
        return [node for node in self.nodes if name in node.inputs]

    def insert(self, position: int, chain: Iterable[Node]) -> None:
        """Inserts nodes; ``position`` is the index of the first."""
        self.nodes[position:position] = chain

    def reroute(self, old: str, new: str) -> None:
        """Makes all readers of ``old`` read ``new``."""
        for node in self.nodes:
            node.inputs = [new if name == old else name for name in node.inputs]
        if self.output == old:
            self.output = new

    def bypass(self, names: Iterable[str]) -> None:
        """Removes nodes of one input, and connects their readers to that input."""
        for name in set(names):
            node = self[name]
            if len(node.inputs) != 1:
                raise ValueError(f"{name} has {len(node.inputs)} inputs and can't be bypassed")
            self.reroute(name, node.inputs[0])
            self.nodes.remove(node)

    def rename(self, new_name: Callable[[Node], str]) -> None:
        """Renames every node and its layer.

        Raises:
            ValueError: two nodes would get the same name.
        """
        table = {node.name: new_name(node) for node in self.nodes}
        clash = sorted(name for name, count in Counter(table.values()).items() if count > 1)
        if clash:
            raise ValueError(f"renaming gives two layers the same name: {clash}")
        for node in self.nodes:
            node.name, node.layer = table[node.name], table[node.layer]
            node.inputs = [table[name] for name in node.inputs]
        self.output = table[self.output]


def remove_softmax(blueprint: Blueprint) -> bool:
    """Removes the softmax at the end, which is a layer of its own or the last layer's activation.

    Returns:
        Whether there was one.
    """
    last = blueprint[blueprint.output]
    if last.is_own or (last.stock != "Softmax" and last.config.get("activation") != "softmax"):
        return False
    if last.stock == "Softmax" and last.config.get("axis", -1) not in (-1, 1):
        return False  # over the batch, or unknown
    if last.stock in ("Activation", "Softmax"):
        blueprint.bypass([last.name])
    else:
        last.config = {**last.config, "activation": "linear"}
    return True


def stages_by_layer(order: Sequence[str], splits: Sequence[str]) -> Dict[str, int]:
    """The pipeline stage of each layer; every split begins the next stage.

    Args:
        order: names of the layers in the order in which they run.
        splits: names of the first layers of stages 1, 2, ...

    Raises:
        ValueError: a split is not a layer of the network, or is out of order.
    """
    stages, stage = {}, 0
    remaining = list(splits)
    for name in order:
        if remaining and name == remaining[0]:
            stage += 1
            remaining.pop(0)
        stages[name] = stage
    if remaining:
        raise ValueError(f"split {remaining[0]} is no layer of the network, or out of order")
    return stages


def assemble(blueprint: Blueprint, inputs: Tensor, name: str) -> KerasModel:
    """Builds the model of a blueprint.

    Args:
        blueprint: the nodes; ``inputs`` replaces the first one, the input.
        inputs: Keras tensor of the images.
        name: name of the model.

    Raises:
        ValueError: the blueprint has an operation.
        NotMadeError: a layer cannot be made, whatever the images' size.
    """
    from tensorflow import keras

    tensors = {blueprint.nodes[0].name: inputs}
    layers: Dict[str, KerasLayer] = {}
    for node in blueprint.nodes[1:]:
        if node.is_operation:
            raise ValueError(f"operation {node.kind} ({node.name}) is not a layer")
        if node.layer not in layers:
            layer_class: Any = node.layer_class or getattr(keras.layers, node.kind)
            try:
                layers[node.layer] = layer_class.from_config({**node.config, "name": node.layer})
            except Exception as error:
                raise NotMadeError(node) from error
        arguments = [tensors[source] for source in node.inputs]
        tensors[node.name] = layers[node.layer](arguments[0] if len(arguments) == 1 else arguments)
    return keras.Model(inputs, tensors[blueprint.output], name=name)
