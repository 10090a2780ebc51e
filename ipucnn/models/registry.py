"""The registry of models, which describes each network before it is built.  It never imports TensorFlow.

A network is a row of :data:`MODELS`, which names its builder in a module of ``ipucnn.models.families``.  The module is
imported when the network is built.
"""

import fnmatch
import functools
import importlib
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipucnn.aliases import PlainValue
from ipucnn.documents import MAX_RECORD_BYTES, load_record
from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean
from ipucnn.filesystem import expand, new_file, read_text, shown
from ipucnn.python_files import (
    MODELS_GROUP,
    OwnFunction,
    entry_points,
    find_function,
    is_python_name,
    label_of,
)
from ipucnn.text import counted, quoted, shown_value

if TYPE_CHECKING:
    from ipucnn.models.blueprint import Blueprint
    from ipucnn.models.own import OwnNetwork

NORMS = ("batch", "group", "none")
NETWORK_FILES = (".keras", ".h5", ".hdf5")
"""Extensions of files in which Keras saves a whole model, or its weights."""
LAYER_GRAPH = ".json"
"""Extension of a layer graph, which can only be planned."""
SAVED_MODEL = "saved_model.pb"
"""The file by which the folder of a SavedModel is known."""
OWN = "own"
"""Name of the family of users' own networks."""


@dataclass(frozen=True)
class ModelRecord:
    """A registered network; the defaults are those of a classifier for ImageNet.

    Its parameters and multiply-accumulates are in ``ipucnn.models.counts``.

    Attributes:
        name: name on the command line; ``-`` and ``_`` are the same, and case does not matter.
        family: group in tables, of networks that share a builder or a paper.
        paper: short citation.
        builder: function of the images' Keras tensor, the number of classes and ``builder_args``; it imports
            TensorFlow itself.
        builder_args: keyword arguments of ``builder``.
        task: "classification" (logits per image) or "segmentation" (logits per pixel).
        home_dataset: default data set, to which input shape and classes belong.
        input_shape: (height, width, channels) of the default data set's images at the network's input.
        min_size: smallest height and width that can be built.
        num_classes: classes of the default data set.
        input_range: range of the inputs from the pipeline: "standard" (minus the data set's mean, over its standard
            deviation), "unit" [0, 1], "tf" [-1, 1], "raw" [0, 255], "caffe" (BGR minus the ImageNet mean),
            "torch" (ImageNet mean and standard deviation on [0, 1]).
        keras_application: name in ``keras.applications`` whose ImageNet weights fit, or None.
        requires: oldest version of Keras that has the network, such as "Keras 2.8", or None.
        default_norm: normalisation of the network as published: "batch", "group" or "none".
        norms: the normalisations with which it can be built.
        size_step, size_offset: legal sizes are ``size_offset`` modulo ``size_step``; with 1 and 0 all sizes are legal.
        file: file of a network that is not registered; for a layer graph, only the file describes the network.
        own: description of a user's own network.
    """

    name: str
    family: str
    paper: str
    builder: "Callable[..., Blueprint]"
    builder_args: Mapping[str, Any] = field(default_factory=dict)
    task: str = "classification"
    home_dataset: str = "imagenet"
    input_shape: Tuple[int, int, int] = (224, 224, 3)
    min_size: int = 32
    num_classes: int = 1000
    input_range: str = "torch"
    keras_application: Optional[str] = None
    requires: Optional[str] = None
    default_norm: str = "batch"
    norms: Tuple[str, ...] = NORMS
    size_step: int = 1
    size_offset: int = 0
    file: Optional[Path] = None
    own: "Optional[OwnNetwork]" = None

    @property
    def notes(self) -> List[str]:
        """Remarks about a user's own network, once it was built; none about a registered one."""
        return [] if self.own is None else self.own.notes


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _family(function: str) -> "Callable[..., Blueprint]":
    """The builder "MODULE.FUNCTION" of ``ipucnn.models.families``, whose module is imported when it is called."""
    module, _, name = function.partition(".")

    def build(*arguments: object, **named: object) -> "Blueprint":
        family: Any = importlib.import_module(f"ipucnn.models.families.{module}")
        blueprint: Blueprint = getattr(family, name)(*arguments, **named)
        return blueprint

    return build


def _application(
    name: str,
    application_name: str,
    family: str,
    paper: str,
    size: int = 224,
    builder: str = "keras_applications.build_application",
    **fields: PlainValue,
) -> ModelRecord:
    """The record of a network from Keras Applications, with ImageNet weights.

    Args:
        size: height and width of the images on which Keras' weights were trained.
        fields: fields of the record that differ from those of a classifier for ImageNet.
    """
    return ModelRecord(
        name,
        family,
        paper,
        _family(builder),
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
_RESNET = "He et al. 2016, Residual learning, arXiv:1512.03385"
_IDENTITY = "He et al. 2016, Identity mappings, arXiv:1603.05027"
_RESNEXT = "Xie et al. 2017, Aggregated residual transformations, arXiv:1611.05431"
_MOBILENET = "Howard et al. 2017, MobileNets, arXiv:1704.04861"
_MOBILENET_V2 = "Sandler et al. 2018, MobileNetV2, arXiv:1801.04381"
_MOBILENET_V3 = "Howard et al. 2019, Searching for MobileNetV3, arXiv:1905.02244"
_EFFICIENTNET = "Tan and Le 2019, EfficientNet, arXiv:1905.11946"
_GROUPED = "Masters et al. 2021, Making EfficientNet more efficient, arXiv:2106.03640"
_EFFICIENTNET_V2 = "Tan and Le 2021, EfficientNetV2, arXiv:2104.00298"

_CIFAR: Dict[str, Any] = {"home_dataset": "cifar10", "input_shape": (32, 32, 3), "num_classes": 10}
_MNIST: Dict[str, Any] = {"home_dataset": "mnist", "input_shape": (28, 28, 1), "num_classes": 10}
_WITHOUT_NORM: Dict[str, Any] = {"default_norm": "none", "norms": ("none",)}
_STANDARD: Dict[str, Any] = {"input_range": "standard"}
_CAFFE: Dict[str, Any] = {"input_range": "caffe"}
_TF: Dict[str, Any] = {"input_range": "tf"}
_V3: Dict[str, Any] = {"builder": "mobilenet.build_mobilenet_v3", **_TF}

MODELS: Tuple[ModelRecord, ...] = (
    ModelRecord(
        "toy_model",
        "small",
        "none: two convolutions and a dense layer",
        _family("small.build_toy_model"),
        min_size=10,
        **_STANDARD,
        **_CIFAR,
        **_WITHOUT_NORM,
    ),
    ModelRecord(
        "toy_model_bn",
        "small",
        "none: two convolutions with batch norm and a dense layer",
        _family("small.build_toy_model_bn"),
        min_size=27,
        **_STANDARD,
        **_CIFAR,
    ),
    ModelRecord(
        "mnist_cnn",
        "small",
        "Keras documentation, Simple MNIST convnet, 2015",
        _family("small.build_mnist_cnn"),
        min_size=10,
        input_range="unit",
        **_MNIST,
        **_WITHOUT_NORM,
    ),
    ModelRecord(
        "lenet",
        "small",
        "LeCun et al. 1998, Gradient-based learning, doi:10.1109/5.726791",
        _family("small.build_lenet"),
        min_size=12,
        **_STANDARD,
        **_MNIST,
        **_WITHOUT_NORM,
    ),
    *(
        ModelRecord(
            f"cifar_resnet{num_layers}",
            "cifar_resnet",
            f"{_RESNET}, section 4.2",
            _family("cifar_resnet.build_cifar_resnet"),
            {"blocks": (num_layers - 2) // 6},
            min_size=8,
            **_STANDARD,
            **_CIFAR,
        )
        for num_layers in (8, 20, 32, 44, 56)
    ),
    ModelRecord("resnet18", "resnet", _RESNET, _family("resnet.build_resnet"), {"blocks": (2, 2, 2, 2)}),
    ModelRecord("resnet34", "resnet", _RESNET, _family("resnet.build_resnet"), {"blocks": (3, 4, 6, 3)}),
    *(
        ModelRecord(
            f"resnet{num_layers}",
            "resnet",
            f"{_RESNET} (v1.5)",
            _family("resnet.build_keras_resnet_v1_5"),
            {"application_name": f"ResNet{num_layers}"},
        )
        for num_layers in (50, 101, 152)
    ),
    _application("resnet50-keras", "ResNet50", "resnet", f"{_RESNET} (v1)", **_CAFFE),
    _application("resnet50v2", "ResNet50V2", "resnet", _IDENTITY, **_TF),
    ModelRecord(
        "resnext101_32x4d",
        "resnet",
        _RESNEXT,
        _family("resnet.build_resnet"),
        {"blocks": (3, 4, 23, 3), "bottleneck": True, "groups": 32, "group_width": 4},
    ),
    *(
        _application(f"efficientnet-b{number}", f"EfficientNetB{number}", "efficientnet", _EFFICIENTNET, size)
        for number, size in enumerate((224, 240, 260, 300, 380, 456, 528, 600))
    ),
    *(
        ModelRecord(
            f"efficientnet-{variant}-g16",
            "efficientnet",
            _GROUPED,
            _family("efficientnet.build_grouped_efficientnet"),
            {"width": width, "depth": depth, "dropout": dropout, "group_size": 16, "expand_ratio": 4},
            input_shape=(size, size, 3),
        )
        for variant, size, width, depth, dropout in (("b0", 224, 1.0, 1.0, 0.2), ("b4", 380, 1.4, 1.8, 0.4))
    ),
    *(
        _application(
            f"efficientnetv2-{variant}",
            f"EfficientNetV2{variant.upper()}",
            "efficientnetv2",
            _EFFICIENTNET_V2,
            size,
            requires="Keras 2.8",
            input_range="torch" if variant.startswith("b") else "tf",
        )
        for variant, size in zip(("b0", "b1", "b2", "b3", "s", "m", "l"), (224, 240, 260, 300, 384, 480, 480))
    ),
    _application(
        "mobilenet", "MobileNet", "mobilenet", _MOBILENET, builder="mobilenet.build_mobilenet", **_TF
    ),
    _application("mobilenetv2", "MobileNetV2", "mobilenet", _MOBILENET_V2, **_TF),
    _application("mobilenetv3-small", "MobileNetV3Small", "mobilenet", _MOBILENET_V3, **_V3),
    _application("mobilenetv3-large", "MobileNetV3Large", "mobilenet", _MOBILENET_V3, **_V3),
    _application("vgg16", "VGG16", "vgg", _VGG, **_CAFFE, **_WITHOUT_NORM),
    _application("vgg19", "VGG19", "vgg", _VGG, **_CAFFE, **_WITHOUT_NORM),
    _application("inceptionv3", "InceptionV3", "inception", _INCEPTION, 299, min_size=75, **_TF),
    _application("xception", "Xception", "xception", _XCEPTION, 299, min_size=71, **_TF),
    _application("densenet121", "DenseNet121", "densenet", _DENSENET),
    _application("densenet169", "DenseNet169", "densenet", _DENSENET),
    _application("densenet201", "DenseNet201", "densenet", _DENSENET),
    _application("nasnetmobile", "NASNetMobile", "nasnet", _NASNET, **_TF),
    ModelRecord(
        "unet",
        "unet",
        "Ronneberger et al. 2015, U-Net, arXiv:1505.04597",
        _family("unet.build_unet"),
        {"base_filters": 64, "margin": 184},
        task="segmentation",
        home_dataset="isbi2012",
        input_shape=(572, 572, 1),
        min_size=188,
        num_classes=2,
        default_norm="none",
        size_step=16,
        size_offset=12,
        **_STANDARD,
    ),
)


@functools.lru_cache(maxsize=None)
def _records() -> Dict[str, ModelRecord]:
    return {_key(record.name): record for record in MODELS}


def natural_key(name: str) -> List[Tuple[int, int, str]]:
    """The sort key of a name that puts ``resnet18`` before ``resnet101``."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.findall(r"\d+|\D+", _key(name))
    ]


def get_model(name: str) -> ModelRecord:
    """The record of a model by its name from any source, such as a run folder, a plan or an exported file.

    For a user's own network the record has only the name and cannot be built.  A file is read only if the command line
    names it (:func:`find_network`); checkpoints hold such networks themselves (:func:`saved_network`).

    Raises:
        ConfigurationError: there is no model of that name; the hint has the closest names.
    """
    records = _records()
    try:
        return records[_key(name)]
    except KeyError:
        if is_own_name(name) or name in entry_points(MODELS_GROUP):
            from ipucnn.models import own  # imported here because it needs NumPy

            return _own_record(own.OwnNetwork(name, "", needs=_hint_to_name(name)))
        hint = did_you_mean(name, [*(r.name for r in records.values()), *entry_points(MODELS_GROUP)])
        raise ConfigurationError(
            f"unknown model '{shown_value(name)}'", hint or "`ipucnn models` lists them all"
        ) from None


def find_network(name: str, plans: bool = False) -> ModelRecord:
    """The record of the command line's MODEL: a registered network, or a user's own.

    A Python file is read here, and run when the network is built.  For a file that Keras saved, the layers are read.

    Args:
        name: the name as typed.
        plans: whether the network is only planned and may be a layer graph.

    Raises:
        ConfigurationError: the name is not a network.
        DataError: the Keras file is absent or damaged, or another form of a model.
    """
    if _key(name) in _records():
        return get_model(name)
    if is_python_name(name):
        function: Optional[OwnFunction] = find_function(name, "build")
    else:  # a package's source folder may be here under the name that it offers
        function = None if is_network_file(name) else entry_points(MODELS_GROUP).get(name)
    path = _path_of(name) if function is None else function.path
    if function is None and path is None:
        return get_model(name)
    from ipucnn.models import own  # imported here because it needs NumPy

    if function is not None:
        return replace(_own_record(own.of_function(function)), file=path)
    assert path is not None
    refuse_other_form(path)
    if not is_network_file(name):
        endings = ", ".join((*NETWORK_FILES, LAYER_GRAPH))
        raise ConfigurationError(
            f"{shown_value(name)} is not a network: its name ends in none of {endings}, .py:FUNCTION",
            f"save it with Keras as NAME{NETWORK_FILES[0]}, or name a network of `ipucnn models`",
        )
    if is_layer_graph(name) and plans:
        return ModelRecord(name, "file", "", _no_builder, home_dataset="none", file=path)
    if is_layer_graph(name):
        raise ConfigurationError(
            f"{shown_value(name)} is a file with a layer graph, from which no network can be built",
            f"it can be planned: ipucnn plan-splits {quoted(name)}",
        )
    return replace(_own_record(own.of_keras_file(name, path)), file=path)


def refuse_other_form(path: Path) -> None:
    """Refuses the forms of a Keras model that are no file of ``NETWORK_FILES``; the hint makes one.

    Raises:
        DataError: the path is a SavedModel's folder, or a file with the text of ``model.to_json()``.
    """
    if os.path.isfile(path / SAVED_MODEL):
        what = "a SavedModel of TensorFlow, which holds operations and not layers"
        how, read = "if Keras 2 saved it, make a file of it there", "load_model({})"
    elif path.suffix.lower() == LAYER_GRAPH and _is_architecture(path):
        what = "the architecture of a Keras model, as model.to_json() gives it, without weights"
        how, read = "make a file of it", "model_from_json(open({}).read())"
    else:
        return
    whole = path if path.name else path.absolute()
    stem = (whole.stem if whole.is_file() else whole.name) or "model"
    # A file of that name may have the weights of the same model.
    new = new_file(whole.parent / f"{stem}.h5")
    source, target = (json.dumps(str(one), ensure_ascii=False) for one in (path, new))
    line = quoted(f"from tensorflow.keras import models; models.{read.format(source)}.save({target})")
    raise DataError(f"{shown(path)} is {what}", f"{how}: python -c {line}")


def _is_architecture(path: Path) -> bool:
    """Whether a file has the text of Keras' ``model.to_json()``; a file that cannot be read is reported elsewhere."""
    try:
        data = load_record(read_text(path, MAX_RECORD_BYTES, hint=""))
    except (UserError, ValueError):
        return False
    return isinstance(data, dict) and {"class_name", "config"} <= set(data)


def saved_network(name: str, data: PlainValue, what: str, needs: str) -> ModelRecord:
    """The record of a user's own network from a checkpoint; no file that the checkpoint names is read or run.

    Args:
        name: name of the network in the run.
        data: the checkpoint's entry.
        what: name of the checkpoint, for messages.
        needs: the hint to name the Python file, if the network has layers that are only in that file.

    Raises:
        DataError: the checkpoint has no network.
    """
    from ipucnn.models import own  # imported here because it needs NumPy

    return _own_record(own.of_checkpoint(name, data, what, needs))


def check_buildable(record: ModelRecord) -> None:
    """Refuses a user's own network whose Python file is needed but was not named.

    Raises:
        ConfigurationError: the file was not named; the hint says what to type.
    """
    if record.own is not None:
        record.own.check_buildable()


def check_same_network(record: ModelRecord, meta: Mapping[str, PlainValue], what: str) -> None:
    """Refuses a user's file that has changed since a checkpoint, and notes the network that was trained.

    Args:
        record: record of the network.
        meta: metadata of the checkpoint.
        what: name of the checkpoint, for messages.

    Raises:
        ConfigurationError: the digests differ.
    """
    own, network = record.own, meta.get("network")
    if own is None or not isinstance(network, dict):
        return
    if network.get("sha256") != own.sha256:
        raise ConfigurationError(
            f"{shown_value(record.name)} has changed since {what} was written",
            "bring back what it was, or train it anew with another --run-dir",
        )
    from ipucnn.models.own import of_checkpoint  # imported here because it needs NumPy

    trained = of_checkpoint(record.name, network, what, "")
    own.trained_as, own.trained_scaling = trained.architecture, trained.trained_scaling


def _own_record(own: "OwnNetwork") -> ModelRecord:
    """The record of a user's own network, a classifier; the data determine sizes and classes that it leaves open."""
    height, width, channels = own.input_shape
    return ModelRecord(
        own.name,
        OWN,
        "",
        own.blueprint,
        home_dataset="none",
        input_shape=(height or 224, width or 224, channels or 3),
        min_size=1,
        num_classes=own.num_classes or 1000,
        input_range="standard" if own.first_rescaling is None else "raw",
        own=own,
    )


def assumption(record: ModelRecord, image_size: Optional[Tuple[int, int]]) -> Optional[str]:
    """A note on the image size and classes that are assumed for a function's network without a data set, or None.

    It is shown before the network is built, because 1,000 classes and images of 224x224 can make a user's own network
    very large.

    Args:
        record: the network.
        image_size: requested (height, width).
    """
    if record.own is None or record.own.architecture is not None:
        return None
    images = "" if image_size is not None else f"images of {'x'.join(map(str, record.input_shape))} and "
    return f"{shown_value(record.name)}: {images}{counted(record.num_classes, 'class')} are assumed"


def is_own_name(name: str) -> bool:
    """Whether a network's name means a function in a Python file, or a file that Keras saved."""
    return is_python_name(name) or is_keras_file(name)


def is_keras_file(name: str) -> bool:
    """Whether a file's name is that of a model or of weights that Keras saved."""
    return name.lower().endswith(NETWORK_FILES)


def is_network_file(name: str) -> bool:
    """Whether a network's name is that of a file that contains the network as data."""
    return is_keras_file(name) or is_layer_graph(name)


def is_layer_graph(name: str) -> bool:
    """Whether a network's name is that of a layer graph, which can be planned but not run."""
    return name.lower().endswith(LAYER_GRAPH)


def folder_name(name: str) -> str:
    """The name of a network in names of folders."""
    return label_of(name) if is_own_name(name) else name


def _hint_to_name(name: str) -> str:
    return f"name it on the command line: {shown_value(name)}"


def _path_of(name: str) -> Optional[Path]:
    """The path of a name that means a network file, a Python file or an existing path; None for other names."""
    try:
        path = expand(name)
        return path if is_network_file(name) or is_python_name(name) or path.exists() else None
    except (UserError, OSError):  # not a possible path, or a link to where nobody may look
        return None


def _no_builder(*_: object, **__: object) -> "Blueprint":
    raise ConfigurationError("layer graphs are planned, not built", "name a network of `ipucnn models`")


def list_models(pattern: str = "*") -> List[ModelRecord]:
    """The records whose names match a shell wildcard (``*``, ``?``, ``[...]``), in natural order."""
    records = [record for key, record in _records().items() if fnmatch.fnmatchcase(key, _key(pattern))]
    return sorted(records, key=lambda record: natural_key(record.name))


# --- sizes


def _is_legal(record: ModelRecord, size: int) -> bool:
    return size >= record.min_size and (size - record.size_offset) % record.size_step == 0


def nearest_legal_sizes(record: ModelRecord, size: int) -> List[int]:
    """The closest legal heights or widths below and above ``size``, or only ``size`` if it is legal."""
    if _is_legal(record, size):
        return [size]
    below = size - (size - record.size_offset) % record.size_step
    above = below + record.size_step
    smallest = record.min_size + (record.size_offset - record.min_size) % record.size_step
    return sorted({max(smallest, candidate) for candidate in (below, above)})


def validate_input_shape(record: ModelRecord, input_shape: Sequence[int]) -> None:
    """Refuses sizes with which the network can't be built.

    Args:
        record: the model's record.
        input_shape: (height, width, channels).

    Raises:
        ConfigurationError: a size is too small or not on the network's size grid, or the shape is not three positive
            integers.
    """
    if len(input_shape) != 3 or any(int(n) != n or n < 1 for n in input_shape):
        raise ConfigurationError(
            f"{record.name} takes images as height, width, channels, got {tuple(input_shape)}",
            "for example --image-size 32 or --image-size 32x48",
        )
    if record.own is not None:
        record.own.check_input(input_shape)
        return
    for axis, size in zip(("height", "width"), input_shape[:2]):
        if _is_legal(record, size):
            continue
        nearest = " or ".join(str(n) for n in nearest_legal_sizes(record, size))
        reason = f"at least {record.min_size}"
        if record.size_step > 1:
            reason += f" and {record.size_offset} more than a multiple of {record.size_step}"
        raise ConfigurationError(
            f"{record.name} can't take images of {axis} {size}: it must be {reason}",
            f"the nearest legal {axis}: --image-size {nearest}",
        )
    if record.keras_application is not None and input_shape[2] not in (1, 3):
        raise ConfigurationError(
            f"{record.name} takes 1 or 3 channels, got {input_shape[2]}", "convert the images to grey or RGB"
        )


def output_shape(record: ModelRecord, input_shape: Sequence[int]) -> Optional[Tuple[int, int]]:
    """(height, width) of a segmentation network's logits; None for a classifier.

    U-Net's convolutions are not padded: each side of the output is 184 pixels shorter than the input's.
    """
    if record.task != "segmentation":
        return None
    validate_input_shape(record, input_shape)
    margin = int(record.builder_args["margin"])
    return int(input_shape[0]) - margin, int(input_shape[1]) - margin
