"""Canonical names: what splits, presets and checkpoints call a layer or a weight on every version of Keras.

Where the versions of Keras agree their names are the canonical ones.  They differ in DenseNet and MobileNetV3
(a slash or an underscore between the parts), in layers named by a counter that runs on from one model to
the next (Inception, Xception, NASNet), and in the input.  A weight is called ``<layer>/<weight>``.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

from ipucnn.aliases import KerasModel, TfVariable
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.keras_config import INPUT_NAME, counted_from_zero, snake_case

MOVING_STATISTICS = ("moving_mean", "moving_variance")
# Keras 3 shortened the names of these weights; the longer, older one tells two kernels of a layer apart.
_KERAS_3_NAMES = {"DepthwiseConv2D": {"kernel": "depthwise_kernel"}}


def is_moving_statistic(name: str) -> bool:
    """Whether a weight is one of batch norm's moving statistics."""
    return name.rsplit("/", 1)[-1] in MOVING_STATISTICS


def moved_statistics(model: KerasModel) -> List[str]:
    """The names of the moving statistics that training moves: those of frozen layers stay as they are."""
    frozen = tuple(f"{layer.name}/" for layer in model.layers if not layer.trainable)
    return [
        name for name in named_weights(model) if is_moving_statistic(name) and not name.startswith(frozen)
    ]


def canonical_names(model: KerasModel) -> List[str]:
    """Layer names of a model from ``build_model`` in the order in which they run; the first is the input."""
    return [layer.name for layer in model.layers]


def number_from_zero(blueprint: Blueprint, keep: Tuple[str, ...] = ()) -> None:
    """Numbers the layers that Keras named by a counter as a fresh process would: add, add_1, add_2, ...

    Args:
        keep: names that look counted, but are the network's own.
    """
    table = counted_from_zero(
        (step.name, step.name, snake_case(step.kind), (snake_case(step.kind),))
        for step in blueprint.steps
        if step.name not in keep
    )
    blueprint.rename(lambda step: table.get(step.name, step.name))


def underscores(blueprint: Blueprint) -> None:
    """Keras 2.6's ``conv1/conv`` under Keras 3's name ``conv1_conv``."""
    blueprint.rename(lambda step: step.name.replace("/", "_"))


def name_input(blueprint: Blueprint) -> None:
    """Names the first step ``input``."""
    first = blueprint.steps[0]
    blueprint.rename(lambda step: INPUT_NAME if step is first else step.name)


def named_weights(model: KerasModel) -> Dict[str, TfVariable]:
    """All weights of a flat functional model by canonical name, as tf.Variables, in layer order.

    A layer that holds layers itself may have several weights of one name: from the second on they are numbered.
    """
    from ipucnn.compat import tf_variable

    weights: Dict[str, TfVariable] = {}
    for layer in model.layers:
        renamed = {}
        for kind in type(layer).__mro__:
            renamed.update(_KERAS_3_NAMES.get(kind.__name__, {}))
        for weight in layer.weights:
            base = weight.name.split("/")[-1].split(":")[0]
            first = name = f"{layer.name}/{renamed.get(base, base)}"
            number = 0
            while name in weights:
                number += 1
                name = f"{first}_{number}"
            weights[name] = tf_variable(weight)
    return weights
