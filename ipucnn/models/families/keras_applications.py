"""Networks taken from Keras Applications as they are: VGG, Inception, Xception, DenseNet, NASNet, ..."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

from ipucnn.aliases import KerasModel, PlainValue, Tensor
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


def application_record(
    name: str,
    application_name: str,
    family: str,
    paper: str,
    size: int = 224,
    builder: Callable[..., Blueprint] = build_application,
    **fields: PlainValue,
) -> ModelRecord:
    """The record of a network of Keras Applications, whose ImageNet weights fit it.

    Args:
        size: of the images that Keras' weights were trained on.
        fields: of the record, where they are not those of a classifier for ImageNet.
    """
    return ModelRecord(
        name,
        family,
        paper,
        builder,
        {"application_name": application_name},
        input_shape=(size, size, 3),
        keras_application=application_name,
        **fields,
    )


_VGG = "Simonyan and Zisserman 2015, Very deep convolutional networks, arXiv:1409.1556"
_INCEPTION = "Szegedy et al. 2016, Rethinking Inception, arXiv:1512.00567"
_XCEPTION = "Chollet 2017, Xception, arXiv:1610.02357"
_DENSENET = "Huang et al. 2017, Densely connected networks, arXiv:1608.06993"
_NASNET = "Zoph et al. 2018, Learning transferable architectures, arXiv:1707.07012"
_WITHOUT_NORM: Dict[str, Any] = {"input_range": "caffe", "default_norm": "none", "norms": ("none",)}
_TF: Dict[str, Any] = {"input_range": "tf"}

MODELS = (
    application_record("vgg16", "VGG16", "vgg", _VGG, **_WITHOUT_NORM),
    application_record("vgg19", "VGG19", "vgg", _VGG, **_WITHOUT_NORM),
    application_record("inceptionv3", "InceptionV3", "inception", _INCEPTION, 299, min_size=75, **_TF),
    application_record("xception", "Xception", "xception", _XCEPTION, 299, min_size=71, **_TF),
    application_record("densenet121", "DenseNet121", "densenet", _DENSENET),
    application_record("densenet169", "DenseNet169", "densenet", _DENSENET),
    application_record("densenet201", "DenseNet201", "densenet", _DENSENET),
    application_record("nasnetmobile", "NASNetMobile", "nasnet", _NASNET, **_TF),
)
