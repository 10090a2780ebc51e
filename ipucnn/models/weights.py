"""Copying weights between models whose layers stand in the same order."""

from typing import Any, List

from ipucnn.errors import ConfigurationError

_PREPROCESSING = ("Rescaling", "Normalization")


def weight_layers(model: Any) -> List[Any]:
    """The layers that have weights, input preprocessing left out, in the model's order."""
    return [layer for layer in model.layers if layer.weights and type(layer).__name__ not in _PREPROCESSING]


def copy_weights(source: Any, target: Any) -> int:
    """Copies weights by position.

    Args:
        source: a model with the same layers under any names.
        target: the model to fill; its last layer keeps its own weights where the shapes differ.

    Returns:
        The number of weights (tensors) that were left as they were.

    Raises:
        ConfigurationError: if the layers do not match; nothing has been changed then.
    """
    sources, targets = weight_layers(source), weight_layers(target)
    plan, skipped = [], 0
    problem = None
    if len(sources) != len(targets):
        problem = f"{len(sources)} layers with weights against {len(targets)}"
    else:
        for i, (old, new) in enumerate(zip(sources, targets)):
            shapes = [[tuple(w.shape) for w in layer.weights] for layer in (old, new)]
            if shapes[0] == shapes[1]:
                plan.append((old, new))
            elif i == len(targets) - 1:
                skipped = len(new.weights)
            else:
                problem = f"layer {new.name} has weights of shapes {shapes[1]}, the source {shapes[0]}"
                break
    if problem:
        raise ConfigurationError(
            f"the weights do not fit {target.name}: {problem}",
            "pretrained weights need the network's own norm, input channels and filters",
        )
    for old, new in plan:
        new.set_weights(old.get_weights())
    return skipped
