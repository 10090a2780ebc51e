"""The registry of models: what each network is, before anything is built.  Never imports TensorFlow.

The records stand beside their builders, in ``MODELS`` of each module of ``ipucnn.models.families``; a module that is
put there is found.
"""

import fnmatch
import functools
import importlib
import pkgutil
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ipucnn.errors import ConfigurationError, UserError, did_you_mean
from ipucnn.filesystem import exists, expand
from ipucnn.models.blueprint import Blueprint
from ipucnn.text import shown_value

TASKS = ("classification", "segmentation")
INPUT_RANGES = ("standard", "unit", "tf", "raw", "caffe", "torch")
NORMS = ("batch", "group", "none")
NETWORK_FILES = (".keras", ".json")
"""Endings of files that hold a network: a model that Keras saved, a layer graph."""


@dataclass(frozen=True)
class ModelRecord:
    """One registered network; the defaults are those of a classifier for ImageNet.

    How many parameters and multiply-accumulates it has is counted on its layers: ``ipucnn.models.counts``.

    Attributes:
        name: as typed on the command line; ``-`` and ``_`` are the same and case does not matter.
        family: networks that share a builder or a paper, for grouping in tables.
        paper: short citation.
        builder: a function at the top level of its module, called with the images' Keras tensor, the number of classes
            and ``builder_args``; it imports TensorFlow itself.
        builder_args: keyword arguments of that function.
        task: "classification" (logits per image) or "segmentation" (logits per pixel).
        home_dataset: the data set the recorded input shape and classes belong to.
        input_shape: (height, width, channels) of the home data set's images as the network takes them.
        min_size: smallest height and width that build.
        num_classes: classes of the home data set.
        input_range: what the pipeline must deliver: "standard" (minus the data set's mean, over its standard
            deviation), "unit" [0, 1], "tf" [-1, 1], "raw" [0, 255], "caffe" (BGR minus the ImageNet mean),
            "torch" (ImageNet mean and standard deviation on [0, 1]).
        keras_application: name in ``keras.applications`` whose ImageNet weights fit, or None.
        requires: what has to be installed for it beyond the package itself, as "Keras 2.8", or None.
        default_norm: normalisation of the network as published: "batch", "group" or "none".
        norms: the normalisations it can be built with.
        size_step, size_offset: legal sizes are ``size_offset`` modulo ``size_step``; 1 and 0: all are.
        file: that holds the network, of one that is not registered: then nothing else here says what it is.
    """

    name: str
    family: str
    paper: str
    builder: Callable[..., Blueprint]
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

    def __post_init__(self) -> None:
        for value, choices in (
            (self.task, TASKS),
            (self.input_range, INPUT_RANGES),
            (self.default_norm, self.norms),
        ):
            if value not in choices:
                raise ValueError(f"{self.name}: {value!r} is not one of {choices}")


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def collect(records: Iterable[ModelRecord]) -> Dict[str, ModelRecord]:
    """The records by the key under which a name is looked up.

    Raises:
        ValueError: if two have the same name (also when it differs only in case, ``-`` or ``_``).
    """
    found: Dict[str, ModelRecord] = {}
    for record in records:
        other = found.setdefault(_key(record.name), record)
        if other is not record:
            raise ValueError(f"model {record.name!r} is registered already, as {other.name!r}")
    return found


@functools.lru_cache(maxsize=None)
def _records() -> Dict[str, ModelRecord]:
    """Every family's records."""
    # The families need this module's ModelRecord, so they can't be imported at the top.
    from ipucnn.models import families

    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return collect(record for module in modules for record in module.MODELS)


def natural_key(name: str) -> List[Tuple[int, int, str]]:
    """Sort key that puts ``resnet18`` before ``resnet101``."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.findall(r"\d+|\D+", _key(name))
    ]


def get_model(name: str) -> ModelRecord:
    """The record of a model.

    Raises:
        ConfigurationError: if there is none of that name; the hint has the closest ones.
    """
    records = _records()
    try:
        return records[_key(name)]
    except KeyError:
        if is_network_file(name):
            raise ConfigurationError(
                f"{shown_value(name)} is a file, and this takes a network by its name, as `ipucnn models` lists them",
                f"networks in files can be planned: ipucnn plan-splits {shown_value(name)}",
            ) from None
        hint = did_you_mean(name, (r.name for r in records.values()))
        raise ConfigurationError(
            f"unknown model '{shown_value(name)}'", hint or "ipucnn models lists them all"
        ) from None


def find_network(name: str) -> ModelRecord:
    """The record of what MODEL names where it may be a file: of a registered network, else of the network in a file.

    A file is named by its ending, .keras or .json, or by any path at which there is something.  It is not read here.

    Raises:
        ConfigurationError: it names neither.
    """
    path = _path_of(name) if _key(name) not in _records() else None
    if path is None:
        return get_model(name)
    if not is_network_file(name):
        raise ConfigurationError(
            f"{shown_value(name)} is not a network: its name ends in neither {' nor '.join(NETWORK_FILES)}",
            f"save it with Keras 3 as NAME{NETWORK_FILES[0]}, or name a network of `ipucnn models`",
        )
    return ModelRecord(name, "file", "", _no_builder, home_dataset="none", file=path)


def is_network_file(name: str) -> bool:
    """Whether a network's name is that of a file that holds it."""
    return name.lower().endswith(NETWORK_FILES)


def _path_of(name: str) -> Optional[Path]:
    """The path that a name stands for, if it is one."""
    try:
        path = expand(name, "MODEL")
        return path if is_network_file(name) or exists(path, "MODEL") else None
    except UserError:  # no path can be that
        return None


def _no_builder(*_: Any, **__: Any) -> Blueprint:
    raise ConfigurationError("networks in files are planned, not built", "name a network of `ipucnn models`")


def list_models(pattern: str = "*", exclude: Iterable[str] = ()) -> List[ModelRecord]:
    """The records whose names match a wildcard, in natural order.

    Args:
        pattern: shell wildcard (``*``, ``?``, ``[...]``) on the name.
        exclude: wildcards of names to leave out.
    """
    unwanted = [_key(e) for e in exclude]
    found = [
        record
        for key, record in _records().items()
        if fnmatch.fnmatchcase(key, _key(pattern)) and not any(fnmatch.fnmatchcase(key, e) for e in unwanted)
    ]
    return sorted(found, key=lambda record: natural_key(record.name))


# --- sizes


def _is_legal(record: ModelRecord, size: int) -> bool:
    return size >= record.min_size and (size - record.size_offset) % record.size_step == 0


def nearest_legal_sizes(record: ModelRecord, size: int) -> List[int]:
    """The legal heights or widths just below and just above ``size`` (``size`` itself if it is legal)."""
    if _is_legal(record, size):
        return [size]
    below = size - (size - record.size_offset) % record.size_step
    above = below + record.size_step
    smallest = record.min_size + (record.size_offset - record.min_size) % record.size_step
    return sorted({max(smallest, candidate) for candidate in (below, above)})


def validate_input_shape(record: ModelRecord, input_shape: Sequence[int]) -> None:
    """Refuses sizes the network can't be built with.

    Args:
        record: the model.
        input_shape: (height, width, channels).

    Raises:
        ConfigurationError: too small, not on the network's size grid, or not three positive numbers.
    """
    if len(input_shape) != 3 or any(int(n) != n or n < 1 for n in input_shape):
        raise ConfigurationError(
            f"{record.name} takes images as height, width, channels, got {tuple(input_shape)}",
            "for example --image-size 32 or --image-size 32x48",
        )
    for axis, size in zip(("height", "width"), input_shape[:2]):
        if _is_legal(record, size):
            continue
        nearest = " or ".join(str(n) for n in nearest_legal_sizes(record, size))
        reason = f"at least {record.min_size}"
        if record.size_step > 1:
            reason += f" and {record.size_offset} more than a multiple of {record.size_step}"
        raise ConfigurationError(
            f"{record.name} can't take images of {axis} {size}: it must be {reason}",
            f"nearest legal {axis}: {nearest} (--image-size)",
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
