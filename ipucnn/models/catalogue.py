"""The registered models.  Importing this module fills the registry; it never imports TensorFlow."""

from typing import Any, Dict, Tuple

from ipucnn.models.counts import MACS, PARAMETERS
from ipucnn.models.registry import ModelRecord, register

_APPLICATIONS = "ipucnn.models.families.keras_applications:build_application"
_NONE = ("none",)

_HE = "He et al. 2016, Residual learning, arXiv:1512.03385"
_TAN = "Tan and Le 2019, EfficientNet, arXiv:1905.11946"
_TAN_V2 = "Tan and Le 2021, EfficientNetV2, arXiv:2104.00298"
_MASTERS = "Masters et al. 2021, Making EfficientNet more efficient, arXiv:2106.03640"
_VGG = "Simonyan and Zisserman 2015, Very deep convolutional networks, arXiv:1409.1556"
_DENSENET = "Huang et al. 2017, Densely connected networks, arXiv:1608.06993"
_MOBILENET_V3 = "Howard et al. 2019, Searching for MobileNetV3, arXiv:1905.02244"


def _add(name: str, **fields: Any) -> None:
    fields.setdefault("task", "classification")
    register(ModelRecord(name=name, parameters=PARAMETERS[name], macs=MACS[name], **fields))


def _imagenet(name: str, family: str, paper: str, size: int = 224, **fields: Any) -> None:
    """A network for ImageNet's 1000 classes that works from 32x32 on, unless ``fields`` say otherwise."""
    fields = {"min_size": 32, "input_range": "torch", **fields}
    shape = (size, size, 3)
    _add(
        name,
        family=family,
        paper=paper,
        home_dataset="imagenet",
        input_shape=shape,
        num_classes=1000,
        **fields,
    )


def _application(
    name: str, family: str, application: str, paper: str, input_range: str, **fields: Any
) -> None:
    """A network of Keras Applications; ``input_range`` is what its ImageNet weights were trained with."""
    fields = {"builder": _APPLICATIONS, **fields}
    args: Dict[str, Any] = {"application_name": application}
    _imagenet(
        name,
        family,
        paper,
        input_range=input_range,
        keras_application=application,
        builder_args=args,
        **fields,
    )


def _small(name: str, paper: str, builder: str, **fields: Any) -> None:
    fields = {"input_range": "standard", "home_dataset": "mnist", "input_shape": (28, 28, 1), **fields}
    builder = f"ipucnn.models.families.small:{builder}"
    _add(
        name,
        family="small",
        paper=paper,
        builder=builder,
        num_classes=10,
        default_norm="none",
        norms=_NONE,
        **fields,
    )


_small(
    "toy_model",
    "none: two convolutions and a dense layer",
    "build_toy_model",
    home_dataset="cifar10",
    input_shape=(32, 32, 3),
    min_size=10,
)
_small(
    "mnist_cnn",
    "Keras documentation, Simple MNIST convnet, 2015",
    "build_mnist_cnn",
    min_size=10,
    input_range="unit",
)
_small(
    "lenet",
    "LeCun et al. 1998, Gradient-based learning, doi:10.1109/5.726791",
    "build_lenet",
    min_size=12,
)

for _layers in (8, 20, 32, 44, 56):
    _add(
        f"cifar_resnet{_layers}",
        family="cifar_resnet",
        home_dataset="cifar10",
        input_shape=(32, 32, 3),
        min_size=8,
        num_classes=10,
        paper=_HE + ", section 4.2",
        input_range="standard",
        builder="ipucnn.models.families.cifar_resnet:build_cifar_resnet",
        builder_args={"blocks": (_layers - 2) // 6},
    )

_BASIC: Tuple[Tuple[str, Tuple[int, ...]], ...] = (("resnet18", (2, 2, 2, 2)), ("resnet34", (3, 4, 6, 3)))
for _name, _blocks in _BASIC:
    _imagenet(
        _name, "resnet", _HE, builder="ipucnn.models.families.resnet:build_resnet", builder_args={"blocks": _blocks}
    )
for _layers in (50, 101, 152):
    _imagenet(
        f"resnet{_layers}",
        "resnet",
        _HE + " (v1.5)",
        builder="ipucnn.models.families.resnet:build_keras_resnet_v1_5",
        builder_args={"application_name": f"ResNet{_layers}"},
    )
_application("resnet50-keras", "resnet", "ResNet50", _HE + " (v1)", "caffe")
_application(
    "resnet50v2", "resnet", "ResNet50V2", "He et al. 2016, Identity mappings, arXiv:1603.05027", "tf"
)
_imagenet(
    "resnext101_32x4d",
    "resnet",
    "Xie et al. 2017, Aggregated residual transformations, arXiv:1611.05431",
    builder="ipucnn.models.families.resnet:build_resnet",
    builder_args={"blocks": (3, 4, 23, 3), "bottleneck": True, "groups": 32, "group_width": 4},
)

for _variant, _size in enumerate((224, 240, 260, 300, 380, 456, 528, 600)):
    _application(
        f"efficientnet-b{_variant}", "efficientnet", f"EfficientNetB{_variant}", _TAN, "torch", size=_size
    )
for _variant, _size, _width, _depth, _dropout in ((0, 224, 1.0, 1.0, 0.2), (4, 380, 1.4, 1.8, 0.4)):
    _imagenet(
        f"efficientnet-b{_variant}-g16",
        "efficientnet",
        _MASTERS,
        size=_size,
        builder="ipucnn.models.families.efficientnet:build_grouped_efficientnet",
        builder_args={
            "width": _width,
            "depth": _depth,
            "dropout": _dropout,
            "group_size": 16,
            "expand_ratio": 4,
        },
    )
for _letter, _size in (
    ("b0", 224),
    ("b1", 240),
    ("b2", 260),
    ("b3", 300),
    ("s", 384),
    ("m", 480),
    ("l", 480),
):
    _application(
        f"efficientnetv2-{_letter}",
        "efficientnetv2",
        f"EfficientNetV2{_letter.upper()}",
        _TAN_V2,
        "torch" if _letter.startswith("b") else "tf",
        size=_size,
        requires="Keras 2.8",
    )

for _layers in (16, 19):
    _application(f"vgg{_layers}", "vgg", f"VGG{_layers}", _VGG, "caffe", default_norm="none", norms=_NONE)
_application(
    "inceptionv3",
    "inception",
    "InceptionV3",
    "Szegedy et al. 2016, Rethinking Inception, arXiv:1512.00567",
    "tf",
    size=299,
    min_size=75,
)
_application(
    "xception",
    "xception",
    "Xception",
    "Chollet 2017, Xception, arXiv:1610.02357",
    "tf",
    size=299,
    min_size=71,
)
for _layers in (121, 169, 201):
    _application(f"densenet{_layers}", "densenet", f"DenseNet{_layers}", _DENSENET, "torch")
_application(
    "mobilenet",
    "mobilenet",
    "MobileNet",
    "Howard et al. 2017, MobileNets, arXiv:1704.04861",
    "tf",
    builder="ipucnn.models.families.mobilenet:build_mobilenet",
)
_application(
    "mobilenetv2", "mobilenet", "MobileNetV2", "Sandler et al. 2018, MobileNetV2, arXiv:1801.04381", "tf"
)
for _name in ("Small", "Large"):
    _application(
        f"mobilenetv3-{_name.lower()}",
        "mobilenet",
        f"MobileNetV3{_name}",
        _MOBILENET_V3,
        "tf",
        builder="ipucnn.models.families.mobilenet:build_mobilenet_v3",
    )
_application(
    "nasnetmobile",
    "nasnet",
    "NASNetMobile",
    "Zoph et al. 2018, Learning transferable architectures, arXiv:1707.07012",
    "tf",
)

_add(
    "unet",
    family="unet",
    task="segmentation",
    home_dataset="isbi2012",
    input_shape=(572, 572, 1),
    min_size=188,
    num_classes=2,
    paper="Ronneberger et al. 2015, U-Net, arXiv:1505.04597",
    input_range="standard",
    builder="ipucnn.models.families.unet:build_unet",
    builder_args={"base_filters": 64, "margin": 184},
    default_norm="none",
    size_step=16,
    size_offset=12,
)
