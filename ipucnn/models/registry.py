"""The registry of models: what each network is, before anything is built.  Never imports TensorFlow."""

import fnmatch
import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import shown_value

TASKS = ("classification", "segmentation")
INPUT_RANGES = ("standard", "unit", "tf", "raw", "caffe", "torch")
NORMS = ("batch", "group", "none")


@dataclass(frozen=True)
class ModelRecord:
    """One registered network.

    Attributes:
        name: as typed on the command line; ``-`` and ``_`` are the same and case does not matter.
        family: networks that share a builder or a paper, for grouping in tables.
        task: "classification" (logits per image) or "segmentation" (logits per pixel).
        home_dataset: the data set the recorded input shape and classes belong to.
        input_shape: (height, width, channels) of the home data set's images as the network takes them.
        min_size: smallest height and width that build.
        num_classes: classes of the home data set.
        parameters: trainable parameters at ``input_shape`` and ``num_classes``, with ``default_norm``.
        macs: multiply-accumulates of the convolutions and dense layers, one sample, one forward pass.
        paper: short citation.
        input_range: what the pipeline must deliver: "standard" (minus the data set's mean, over its standard
            deviation), "unit" [0, 1], "tf" [-1, 1], "raw" [0, 255], "caffe" (BGR minus the ImageNet mean),
            "torch" (ImageNet mean and standard deviation on [0, 1]).
        keras_application: name in ``keras.applications`` whose ImageNet weights fit, or None.
        requires: what has to be installed for it beyond the package itself, as "Keras 2.8", or None.
        builder: "module:function", imported only when the model is built.
        builder_args: keyword arguments of that function.
        default_norm: normalisation of the network as published: "batch", "group" or "none".
        norms: the normalisations it can be built with.
        size_step, size_offset: legal sizes are ``size_offset`` modulo ``size_step``; 1 and 0: all are.
    """

    name: str
    family: str
    task: str
    home_dataset: str
    input_shape: Tuple[int, int, int]
    min_size: int
    num_classes: int
    parameters: int
    macs: int
    paper: str
    input_range: str
    builder: str
    keras_application: Optional[str] = None
    requires: Optional[str] = None
    builder_args: Mapping[str, Any] = field(default_factory=dict)
    default_norm: str = "batch"
    norms: Tuple[str, ...] = NORMS
    size_step: int = 1
    size_offset: int = 0

    def __post_init__(self) -> None:
        for value, choices in (
            (self.task, TASKS),
            (self.input_range, INPUT_RANGES),
            (self.default_norm, self.norms),
        ):
            if value not in choices:
                raise ValueError(f"{self.name}: {value!r} is not one of {choices}")


_records: Dict[str, ModelRecord] = {}


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def register(record: ModelRecord) -> ModelRecord:
    """Adds a record.

    Raises:
        ValueError: if the name is taken (also when it differs only in case, ``-`` or ``_``).
    """
    key = _key(record.name)
    if key in _records:
        raise ValueError(f"model {record.name!r} is registered already, as {_records[key].name!r}")
    _records[key] = record
    return record


def _load() -> Dict[str, ModelRecord]:
    # The catalogue registers itself on import; it needs this module, so it can't be imported at the top.
    from ipucnn.models import catalogue  # noqa: F401

    return _records


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
    records = _load()
    try:
        return records[_key(name)]
    except KeyError:
        hint = did_you_mean(name, (r.name for r in records.values()))
        raise ConfigurationError(
            f"unknown model '{shown_value(name)}'", hint or "ipucnn models lists them all"
        ) from None


def list_models(pattern: str = "*", exclude: Iterable[str] = ()) -> List[ModelRecord]:
    """The records whose names match a wildcard, in natural order.

    Args:
        pattern: shell wildcard (``*``, ``?``, ``[...]``) on the name.
        exclude: wildcards of names to leave out.
    """
    unwanted = [_key(e) for e in exclude]
    found = [
        record
        for key, record in _load().items()
        if fnmatch.fnmatchcase(key, _key(pattern)) and not any(fnmatch.fnmatchcase(key, e) for e in unwanted)
    ]
    return sorted(found, key=lambda record: natural_key(record.name))
