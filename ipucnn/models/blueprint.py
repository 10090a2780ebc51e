"""A Keras functional model as plain data that can be edited and built again.

``keras.models.clone_model`` can replace a layer, but cannot rewire or rename layers in both Keras 2.6 and Keras 3, and
it fails on operations that are not layers (``x + 3`` in MobileNetV3).  A blueprint is read from the model's public
configuration, edited as a list, and assembled into a new model.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, Tensor
from ipucnn.models.keras_config import read_calls


@dataclass
class Step:
    """A layer and the sources of its inputs.

    Attributes:
        name: name of the layer, unique in the blueprint.
        kind: class name of the layer; for a bare operation, the name under which Keras records it.
        layer_class: class of the layer; None for a bare operation, which must be replaced or removed, and for a layer
            whose class is still to be looked up by its kind.
        config: argument of ``layer_class.from_config``.
        inputs: names of the steps that it reads, in the order of its arguments.
        channels: last dimension of its output.
        constants: numbers among a bare operation's arguments.
        is_own: whether the class is the user's own, in a network of the user's.
    """

    name: str
    kind: str
    layer_class: Optional[type]
    config: Dict[str, Any]
    inputs: List[str]
    channels: Optional[int] = None
    constants: List[float] = field(default_factory=list)
    is_own: bool = False


@dataclass
class Blueprint:
    """Steps in topological order, of which the first is the input; ``output`` is the name of the output step."""

    steps: List[Step]
    output: str

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def consumers(self, name: str) -> List[Step]:
        """The steps that read ``name``."""
        return [step for step in self.steps if name in step.inputs]

    def insert(self, position: int, source: str, chain: Iterable[Tuple[str, type, KerasConfig]]) -> str:
        """Inserts a chain of layers: the first reads ``source``, and each other one the layer before it.

        Args:
            position: index of the first in ``steps``.
            source: name of the step that the first reads.
            chain: (name, class, settings) of each layer.

        Returns:
            The name of the last layer.
        """
        for name, kind, config in chain:
            step = Step(name, kind.__name__, kind, {"name": name, **config}, [source])
            self.steps.insert(position, step)
            position, source = position + 1, name
        return source

    def reroute(self, old: str, new: str) -> None:
        """Makes all readers of ``old`` read ``new``."""
        for step in self.steps:
            step.inputs = [new if name == old else name for name in step.inputs]
        if self.output == old:
            self.output = new

    def bypass(self, names: Iterable[str]) -> None:
        """Removes steps of one input, and connects their readers to that input."""
        removed: Set[str] = set(names)
        for name in removed:
            step = self[name]
            if len(step.inputs) != 1:
                raise ValueError(f"{name} has {len(step.inputs)} inputs and can't be bypassed")
            self.reroute(name, step.inputs[0])
        self.steps = [step for step in self.steps if step.name not in removed]

    def rename(self, new_name: Callable[[Step], str]) -> None:
        """Renames every step.

        Raises:
            ValueError: two steps would get the same name.
        """
        table = {step.name: new_name(step) for step in self.steps}
        counts = Counter(table.values())
        if len(counts) < len(table):
            clash = sorted(name for name, count in counts.items() if count > 1)
            raise ValueError(f"renaming gives two layers the same name: {clash}")
        for step in self.steps:
            step.name = table[step.name]
            step.config["name"] = step.name
            step.inputs = [table[name] for name in step.inputs]
        self.output = table[self.output]


def read_blueprint(model: KerasModel) -> Blueprint:
    """Reads the blueprint of a functional model with one input and one output in which every layer is called once.

    Raises:
        ValueError: a layer is called several times.
    """
    with warnings.catch_warnings():
        # Keras 2.6 warns that it could not find custom layers when loading; nothing is loaded here.
        warnings.simplefilter("ignore")
        calls = read_calls(model.name, "Functional", model.get_config())
    names = {call.name: call.place[-1] for call in calls}
    steps = []
    for call in calls:
        if call.call[1]:
            raise ValueError(f"layer {names[call.name]} is called {call.call[1] + 1} times")
        layer = None if call.is_operation else call.layer_in(model)
        steps.append(
            Step(
                name=names[call.name],
                kind=call.kind.capitalize() if call.is_operation else call.kind,
                layer_class=None if layer is None else type(layer),
                config={} if layer is None else layer.get_config(),
                inputs=[names[source] for source, _ in call.reads],
                channels=None if layer is None else _channels(layer),
                constants=[value for _, value in call.arguments if type(value) in (int, float)],
            )
        )
    return Blueprint(steps, steps[-1].name)


def _channels(layer: KerasLayer) -> Optional[int]:
    output = layer.output[0] if isinstance(layer.output, list) else layer.output
    return output.shape[-1]


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
        blueprint: the steps; ``inputs`` replaces the first one, the input.
        inputs: Keras tensor of the images.
        name: name of the model.

    Raises:
        ValueError: the blueprint has a bare operation.
    """
    from tensorflow import keras

    tensors = {blueprint.steps[0].name: inputs}
    for step in blueprint.steps[1:]:
        if step.layer_class is None:
            raise ValueError(f"operation {step.kind} ({step.name}) is not a layer")
        layer = step.layer_class.from_config(step.config)  # type: ignore[attr-defined]
        arguments = [tensors[source] for source in step.inputs]
        tensors[step.name] = layer(arguments[0] if len(arguments) == 1 else arguments)
    return keras.Model(inputs, tensors[blueprint.output], name=name)
