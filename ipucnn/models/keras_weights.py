"""Puts the weights of a Keras file into a model of the registry: by layer names where they agree, else by position."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.errors import DataError
from ipucnn.models.keras_files import FileLayer, KerasFile, by_kind, open_keras_file

HINT = "name the network and options it was written with: --model-name, --norm-layer, --image-size, --base-filters"
# What this project's own layers are called in a file that stock Keras wrote.
_STOCK_KINDS = {"grouped_conv2d": "conv2d"}


@dataclass(frozen=True)
class _Target:
    name: str
    kind: str
    variables: Tuple[Any, ...]

    @property
    def shapes(self) -> List[Tuple[int, ...]]:
        return [tuple(int(n) for n in variable.shape) for variable in self.variables]


def load_keras_weights(model: Any, path: Path) -> None:
    """Copies all weights of a file into a model from ``build_model``; all of them, or none.

    Layers are matched by their canonical names if all agree in name and shapes.  Otherwise by position: in
    the network's order where the file keeps it, else by number among the layers of one class.

    Raises:
        DataError: the file is absent, damaged, or of another model; nothing has been changed then.
    """
    targets = _targets(model)
    with open_keras_file(path) as file:
        pairs = _match(file, targets, path, model.name)
        values = [[np.asarray(tensor[()], np.float32) for tensor in layer.tensors] for layer, _ in pairs]
    for (_, target), arrays in zip(pairs, values):
        if not all(np.isfinite(array).all() for array in arrays):
            raise DataError(
                f"{path}: the weights of layer {target.name} are not finite",
                "its training diverged; use others",
            )
    for (_, target), arrays in zip(pairs, values):
        for variable, array in zip(target.variables, arrays):
            variable.assign(array)


def _targets(model: Any) -> List[_Target]:
    from ipucnn.models.weight_names import named_weights

    layers: Dict[str, List[Any]] = {}
    for name, variable in named_weights(model).items():
        layers.setdefault(name.rpartition("/")[0], []).append(variable)
    kinds = {layer.name: _snake(type(layer).__name__) for layer in model.layers}
    return [_Target(name, kinds[name], tuple(variables)) for name, variables in layers.items()]


def _snake(kind: str) -> str:
    """A class as Keras 3 writes it in files: ``DepthwiseConv2D`` -> ``depthwise_conv2d``."""
    spaced = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", kind)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", spaced).lower()


def _match(
    file: KerasFile, targets: Sequence[_Target], path: Path, model: str
) -> List[Tuple[FileLayer, _Target]]:
    """Pairs of layers with equal shapes.

    Raises:
        DataError: there is no such pairing.
    """
    if len(file.layers) != len(targets):
        raise DataError(
            f"{path} is of another model: it has {len(file.layers)} layers with weights, "
            f"{model} has {len(targets)}",
            HINT,
        )
    named = {layer.name.replace("/", "_"): layer for layer in file.layers}
    if all(target.name in named and named[target.name].shapes == target.shapes for target in targets):
        return [(named[target.name], target) for target in targets]
    ordered = list(file.layers) if file.in_order else _by_class(file, targets)
    if ordered is None:
        raise DataError(f"{path} is of another model: its layers are of other classes than {model}'s", HINT)
    for layer, target in zip(ordered, targets):
        if layer.shapes != target.shapes:
            name = f"layer {layer.name}" if layer.name else f"{layer.kind} number {layer.position + 1}"
            raise DataError(
                f"{path} does not fit: its {name} has weights of {_shown(layer.shapes)}, "
                f"{model}'s {target.name} of {_shown(target.shapes)}",
                HINT
                if target is not targets[-1]
                else "use a data set with as many classes, or other weights",
            )
    return list(zip(ordered, targets))


def _by_class(file: KerasFile, targets: Sequence[_Target]) -> Optional[List[FileLayer]]:
    """The file's layers in the order of the targets, the n-th of a class for the n-th; None if classes differ."""
    found = by_kind(file.layers)
    kinds = [target.kind for target in targets]
    if {kind: len(layers) for kind, layers in found.items()} != {k: kinds.count(k) for k in kinds}:
        kinds = [_STOCK_KINDS.get(kind, kind) for kind in kinds]
        if {kind: len(layers) for kind, layers in found.items()} != {k: kinds.count(k) for k in kinds}:
            return None
    waiting = {kind: iter(layers) for kind, layers in found.items()}
    return [next(waiting[kind]) for kind in kinds]


def _shown(shapes: Sequence[Tuple[int, ...]]) -> str:
    return " + ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
