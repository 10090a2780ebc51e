"""Networks of Keras Applications without changes: VGG, Inception, Xception, DenseNet, NASNet, ..."""

from __future__ import annotations

from typing import Tuple

from ipucnn.aliases import KerasModel, Tensor
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.keras_config import read_blueprint
from ipucnn.models.names import number_from_zero


def application(name: str, inputs: Tensor, num_classes: int) -> KerasModel:
    """Builds a model of Keras Applications with random weights.

    Because the input is passed as a tensor, the application does not check its size.  The registry's minimum size
    applies instead, which is the smallest that the layers allow.
    """
    from tensorflow import keras

    return getattr(keras.applications, name)(
        include_top=True, weights=None, input_tensor=inputs, classes=num_classes
    )


def build_application(
    inputs: Tensor, num_classes: int, application_name: str, keep: Tuple[str, ...] = ()
) -> Blueprint:
    """Builds the blueprint of a Keras application with canonical names.

    Args:
        inputs: Keras tensor of the images.
        num_classes: units of the last layer.
        application_name: attribute of ``keras.applications``.
        keep: names of layers that look like Keras' counted names, but are the network's own.
    """
    blueprint = read_blueprint(application(application_name, inputs, num_classes))
    # Keras 2.6's ``conv1/conv`` is Keras 3's ``conv1_conv``.
    blueprint.rename(lambda node: node.name.replace("/", "_"))
    number_from_zero(blueprint, keep)
    return blueprint
