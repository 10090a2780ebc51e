"""Canonical names of layers and weights, which splits, presets and checkpoints use with every version of Keras.

If the versions of Keras agree on a name, it is the canonical one.  They differ in DenseNet and MobileNetV3 (a slash or
an underscore between the parts), in layers named by a counter that continues from one model to the next (Inception,
Xception, NASNet), and in the input.  The name of a weight is ``<layer>/<weight>``.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Tuple

import numpy as np

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, TfVariable
from ipucnn.models.blueprint import INPUT_NAME, Blueprint
from ipucnn.models.keras_config import counted_from_zero, snake_case
from ipucnn.models.settings import penalty_of

MOVING_STATISTICS = ("moving_mean", "moving_variance")
# Keras 3 shortened the names of these weights; the older, longer name distinguishes two kernels of a layer.
_KERAS_3_NAMES = {"DepthwiseConv2D": {"kernel": "depthwise_kernel"}}


def is_moving_statistic(name: str) -> bool:
    """Whether a weight is one of batch norm's moving statistics."""
    return name.rsplit("/", 1)[-1] in MOVING_STATISTICS


def statistics_of(norms: Iterable[str]) -> List[str]:
    """The names of the moving statistics of batch norms: mean and variance of each."""
    return [f"{norm}/{moving}" for norm in norms for moving in MOVING_STATISTICS]


def moved_statistics(model: KerasModel) -> List[str]:
    """The names of the moving statistics that training changes; ``model`` has the batch norms of this package."""
    kept = tuple(f"{layer.name}/" for layer in model.layers if not getattr(layer, "moves", True))
    return [n for n in named_weights(model) if is_moving_statistic(n) and not n.startswith(kept)]


def number_from_zero(blueprint: Blueprint, keep: Tuple[str, ...] = ()) -> None:
    """Numbers layers that Keras named by a counter as in a new process: add, add_1, add_2, ...

    Args:
        keep: names that look like Keras' counted names, but are the network's own.
    """
    table = counted_from_zero(
        (node.name, node.name, snake_case(node.kind), (snake_case(node.kind),))
        for node in blueprint.nodes
        if node.name not in keep
    )
    blueprint.rename(lambda node: table.get(node.name, node.name))


def name_input(blueprint: Blueprint) -> None:
    """Names the first node ``input``."""
    first = blueprint.nodes[0]
    blueprint.rename(lambda node: INPUT_NAME if node is first else node.name)


def base_name(weight: str) -> str:
    """Returns the last part of a weight's name: ``conv2d/kernel:0`` -> ``kernel``."""
    return weight.split("/")[-1].split(":")[0]


def named_weights(model: KerasModel) -> Dict[str, TfVariable]:
    """All weights of a flat functional model by canonical name, as tf.Variables, in layer order."""
    return {
        f"{layer.name}/{name}": weight for layer in model.layers for name, weight in weights_of(layer).items()
    }


def weights_of(layer: KerasLayer) -> Dict[str, TfVariable]:
    """The weights of a layer by their canonical names in it, as tf.Variables.

    A layer that contains layers can have several weights of the same name; from the second on they are numbered.
    """
    from ipucnn.compat import tf_variable

    weights: Dict[str, TfVariable] = {}
    renamed = {}
    for kind in type(layer).__mro__:
        renamed.update(_KERAS_3_NAMES.get(kind.__name__, {}))
    for weight in layer.weights:
        base = base_name(weight.name)
        first = name = renamed.get(base, base)
        number = 0
        while name in weights:
            number += 1
            name = f"{first}_{number}"
        weights[name] = tf_variable(weight)
    return weights


def penalties(model: KerasModel) -> Dict[str, Tuple[float, float]]:
    """The factors of the L1 and L2 norms that regularizers add to the loss, by the weight's canonical name.

    Keras 3 adds those of trained weights alone, and so does training here.
    """
    return {
        f"{layer.name}/{weight}": factors
        for layer in model.layers
        if layer.trainable
        for weight, factors in penalties_of(layer.get_config()).items()
    }


def penalties_of(config: KerasConfig) -> Dict[str, Tuple[float, float]]:
    """The factors of the L1 and L2 norms in a layer's settings, by the name of the weight in the layer."""
    factors = {}
    for key, value in config.items():
        weight, _, word = key.rpartition("_")
        if word == "regularizer" and value is not None and weight != "activity":
            weight += "_kernel" if weight in ("depthwise", "pointwise") else ""
            factors[weight] = penalty_of(value)
    return factors


def added_to_loss(factors: Mapping[str, Tuple[float, float]], weights: Mapping[str, TfVariable]) -> float:
    """What Keras' regularizers add to the loss: the sum of l1 sum |w| + l2 sum w^2 over the weights that are there."""
    total = 0.0
    for name, (l1, l2) in factors.items():
        if name in weights:
            values = np.asarray(weights[name].numpy(), np.float64)
            total += l1 * float(np.abs(values).sum()) + l2 * float(np.square(values).sum())
    return total
