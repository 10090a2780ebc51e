"""Networks taken from Keras Applications as they are: VGG, Inception, Xception, DenseNet, NASNet, ..."""

from __future__ import annotations

from typing import Tuple

from ipucnn.aliases import KerasModel, Tensor
from ipucnn.models.blueprint import Blueprint, read_blueprint
from ipucnn.models.names import number_from_zero, underscores
from ipucnn.models.registry import ModelRecord


def application(name: str, inputs: Tensor, num_classes: int) -> KerasModel:
    """A model of Keras Applications with random weights.

    The input tensor is handed over, so the application does not check its size: the registry's minimum,
    which is what the layers need, counts.
    """
    from tensorflow import keras

    return getattr(keras.applications, name)(
        include_top=True, weights=None, input_tensor=inputs, classes=num_classes
    )


def build_application(
    inputs: Tensor, num_classes: int, application_name: str, keep: Tuple[str, ...] = ()
) -> Blueprint:
    """The blueprint of a Keras application under canonical names.

    Args:
        inputs: Keras tensor of the images.
        num_classes: units of the last layer.
        application_name: attribute of ``keras.applications``.
        keep: layer names that look counted by Keras, but are the network's own.
    """
    from ipucnn.models.editing import strip_preprocessing

    blueprint = read_blueprint(application(application_name, inputs, num_classes))
    strip_preprocessing(blueprint)
    underscores(blueprint)
    number_from_zero(blueprint, keep)
    return blueprint


MODELS = (
    *(
        ModelRecord(
            name=f"vgg{num_layers}",
            family="vgg",
            paper="Simonyan and Zisserman 2015, Very deep convolutional networks, arXiv:1409.1556",
            builder=build_application,
            builder_args={"application_name": f"VGG{num_layers}"},
            input_range="caffe",
            keras_application=f"VGG{num_layers}",
            default_norm="none",
            norms=("none",),
        )
        for num_layers in (16, 19)
    ),
    ModelRecord(
        name="inceptionv3",
        family="inception",
        paper="Szegedy et al. 2016, Rethinking Inception, arXiv:1512.00567",
        builder=build_application,
        builder_args={"application_name": "InceptionV3"},
        input_shape=(299, 299, 3),
        min_size=75,
        input_range="tf",
        keras_application="InceptionV3",
    ),
    ModelRecord(
        name="xception",
        family="xception",
        paper="Chollet 2017, Xception, arXiv:1610.02357",
        builder=build_application,
        builder_args={"application_name": "Xception"},
        input_shape=(299, 299, 3),
        min_size=71,
        input_range="tf",
        keras_application="Xception",
    ),
    *(
        ModelRecord(
            name=f"densenet{num_layers}",
            family="densenet",
            paper="Huang et al. 2017, Densely connected networks, arXiv:1608.06993",
            builder=build_application,
            builder_args={"application_name": f"DenseNet{num_layers}"},
            keras_application=f"DenseNet{num_layers}",
        )
        for num_layers in (121, 169, 201)
    ),
    ModelRecord(
        name="nasnetmobile",
        family="nasnet",
        paper="Zoph et al. 2018, Learning transferable architectures, arXiv:1707.07012",
        builder=build_application,
        builder_args={"application_name": "NASNetMobile"},
        input_range="tf",
        keras_application="NASNetMobile",
    ),
)
