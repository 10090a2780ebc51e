"""A Keras functional model as plain data that can be edited and built again.

``keras.models.clone_model`` can swap a layer for another one, but neither rewire nor rename on Keras 2.6
and Keras 3 alike, and it stumbles over operations that are not layers (``x + 3`` in MobileNetV3).  A
blueprint is read from the model's public configuration, edited as a list, and assembled into a new model.
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
    """One layer and where its inputs come from.

    Attributes:
        name: name of the layer, unique in the blueprint.
        kind: class name of the layer, or of the operation where Keras records a bare operation.
        layer_class: class of the layer; None for a bare operation, which has to be edited away.
        config: what ``layer_class.from_config`` takes.
        inputs: names of the steps it reads, in the order of its arguments.
        channels: last dimension of its output.
        constants: numbers among a bare operation's arguments.
    """

    name: str
    kind: str
    layer_class: Optional[type]
    config: Dict[str, Any]
    inputs: List[str]
    channels: Optional[int] = None
    constants: List[float] = field(default_factory=list)


@dataclass
class Blueprint:
    """Steps in topological order, the first the input; ``output`` names the one that is returned."""

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
        """Puts layers at a position, of which the first reads ``source`` and each other one the one before it.

        Args:
            chain: (name, class, settings) of each.

        Returns:
            The name of the last.
        """
        for name, kind, config in chain:
            step = Step(name, kind.__name__, kind, {"name": name, **config}, [source])
            self.steps.insert(position, step)
            position, source = position + 1, name
        return source

    def reroute(self, old: str, new: str) -> None:
        """Makes everything that reads ``old`` read ``new``."""
        for step in self.steps:
            step.inputs = [new if name == old else name for name in step.inputs]
        if self.output == old:
            self.output = new

    def bypass(self, names: Iterable[str]) -> None:
        """Removes steps of one input, connecting their readers to that input."""
        doomed: Set[str] = set(names)
        for name in doomed:
            step = self[name]
            if len(step.inputs) != 1:
                raise ValueError(f"{name} has {len(step.inputs)} inputs and can't be bypassed")
            self.reroute(name, step.inputs[0])
        self.steps = [step for step in self.steps if step.name not in doomed]

    def rename(self, new_name: Callable[[Step], str]) -> None:
        """Renames every step.

        Raises:
            ValueError: if two steps would get the same name.
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
    """The blueprint of a functional model with one input and one output in which every layer is called once.

    Raises:
        ValueError: if a layer is shared.
    """
    with warnings.catch_warnings():
        # Keras 2.6 warns of custom layers that it would not find when loading; nothing is loaded here.
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


def layer_order(model: KerasModel) -> List[str]:
    """Names of the network's steps in order: what splits refer to."""
    return [step.name for step in read_blueprint(model).steps]


def stages_by_layer(order: Sequence[str], splits: Sequence[str]) -> Dict[str, int]:
    """The stage of each layer of the network: a split opens the next one.

    Args:
        order: names of the layers in the order in which they run.
        splits: layers that open stages 1, 2, ...

    Raises:
        ValueError: a split that is no layer of the network, or out of order.
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
    """Builds the model.

    Args:
        blueprint: its first step, the input, is taken by ``inputs``.
        inputs: Keras tensor of the images.
        name: of the model.
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
