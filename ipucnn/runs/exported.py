"""Exported networks in place of a run: what the folder of an export says, and a session that runs its file.

Only files are taken that :mod:`ipucnn.runs.export` wrote and proved, and that are still what they were then: what
stands beside a file says how images are brought to it, and what its outputs are.  An ONNX or TFLite file is numbers and
operations of its runtime alone.  A SavedModel executes what is in it, which may be anything: it is taken only where the
user says that it can be trusted.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

import numpy as np

from ipucnn import json_fields
from ipucnn.aliases import KerasModel, PlainValue, Tensor
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import DatasetInfo
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError, MissingError, text_of
from ipucnn.filesystem import Kind, entries, is_file, is_link, kind_of, open_regular
from ipucnn.json_fields import is_count, is_mapping, is_text
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.models.registry import get_model
from ipucnn.runs import runtimes
from ipucnn.runs.checkpoints import colours_of_masks, trained_facts
from ipucnn.sessions.session import DeviceInfo, Session
from ipucnn.text import shown_value
from ipucnn.training.checkpoints import META
from ipucnn.training.losses import LossFunction

RECORD, LABELS = "export.json", "labels.json"
_SAVED_MODEL = "saved_model.pb"
_HINT = "give the file in a folder that `ipucnn export` wrote, with what lies beside it"
_NEEDED = ("config", "seed", "dataset", "class_names", "image_shape", "mean", "std")
_SETUP: json_fields.Fields = {name: META[name] for name in (*_NEEDED, "class_colours")}
_FIELDS: json_fields.Fields = {
    "format": ("a text", is_text),
    "model": ("a text", is_text),
    "file": ("a text", is_text),
    "input": ("a mapping", is_mapping),
    "output": ("a mapping", is_mapping),
    "files": ("a mapping", is_mapping),
    "weights": ("a mapping", is_mapping),
    "setup": ("a mapping", is_mapping),
}


def is_exported(path: Path) -> bool:
    """Whether a path is that of an exported network, which can be run in place of a run: a file, or a folder of one."""
    return path.suffix.lower() in runtimes.ENDINGS or is_saved_model(path) or is_file(path / RECORD)


def is_saved_model(path: Path) -> bool:
    """Whether a folder is a SavedModel."""
    return is_file(path / _SAVED_MODEL)


def describe_setup(
    config: RunConfig, seed: int, info: DatasetInfo, class_names: Iterable[str]
) -> Dict[str, Any]:
    """What ``export.json`` has to say for :class:`ExportedNetwork` to open the export again."""
    return {
        "config": config.to_yaml(),
        "seed": seed,
        "dataset": info.name,
        "class_names": list(class_names),
        "image_shape": list(info.image_shape),
        **colours_of_masks(info),
        "mean": list(info.mean),
        "std": list(info.std),
    }


@dataclass(frozen=True)
class ExportedNetwork:
    """An exported file with what stands beside it; what a ``checkpoints.TrainedRun`` is of a run.

    Attributes:
        path: of the file.
        form: its format.
        record: ``export.json``.
    """

    path: Path
    form: str
    record: Mapping[str, Any]

    @property
    def config(self) -> RunConfig:
        """Of the run that was exported."""
        return RunConfig.from_yaml(self.record["setup"]["config"], str(self.path.parent / RECORD))

    @property
    def seed(self) -> int:
        """Of that run."""
        return int(self.record["setup"]["seed"])

    @property
    def input_shape(self) -> Tuple[int, int, int]:
        """(height, width, channels)."""
        height, width, channels = self.record["input"]["shape"][1:]
        return int(height), int(width), int(channels)

    @property
    def num_classes(self) -> int:
        """Outputs of an image or pixel."""
        return len(self.record["setup"]["class_names"])

    @property
    def facts(self) -> DatasetInfo:
        """The facts of the data that it was trained on, as far as they are known."""
        return trained_facts(self.record["setup"], self.record["model"], self.num_classes, self.path)

    @property
    def summary(self) -> Dict[str, Any]:
        """What identifies the weights that are used, for reports."""
        updates = self.record["weights"].get("weight_updates")
        return {"checkpoint": str(self.path), "model": self.record["model"], "weight_updates": updates}

    def options(self) -> Dict[str, Any]:
        """What decides about the network, its images and its data, as options: what a benchmark of it takes."""
        config = self.config
        names = ("norm_layer", "base_filters", "normalise", "dataset", "dataset_path", "host_generated_data")
        found = {name: getattr(config, name) for name in names}
        chosen = {name: value for name, value in found.items() if value not in (None, False)}
        return {**chosen, "image_size": self.input_shape[:2]}

    @property
    def takes_pixels(self) -> bool:
        """Whether it takes pixels of 0..255 and brings them to its range itself."""
        return bool(self.record["input"].get("dtype") == "uint8")

    def fill(self, model: KerasModel) -> None:
        """The weights are in the file."""

    def session(self) -> "RuntimeSession":
        """Runs the file."""
        return RuntimeSession(self)


def read_exported(path: Path, trust: bool = False) -> ExportedNetwork:
    """Opens an exported network.

    Args:
        path: an ONNX or TFLite file, a SavedModel's folder, or the folder that an export was written to.
        trust: what is in a SavedModel may be executed.

    Raises:
        ConfigurationError: a SavedModel that nobody said can be trusted, or trust in what executes nothing.
        DataError: it is absent, nothing beside it says what it is, or it is not what was proved.
        MissingError: its runtime is not installed.
    """
    if is_file(path / RECORD):
        record = _read_record(path)
        path = path / str(record["file"])
    elif not (is_file(path) or is_saved_model(path)):
        raise DataError(f"exported network {path} does not exist", _HINT)
    elif not is_file(path.parent / RECORD):
        raise DataError(
            f"{path} has no {RECORD} beside it, which says how images are brought to it and what its classes are",
            _HINT,
        )
    else:
        record = _read_record(path.parent)
    form = runtimes.SAVED_MODEL if is_saved_model(path) else runtimes.ENDINGS.get(path.suffix.lower())
    if form is None or form != record["format"]:
        raise DataError(
            f"{path} is an export of the format {shown_value(record['format'])}, which is not run in place of a run",
            "export the run as onnx, tflite or saved-model",
        )
    if form == runtimes.SAVED_MODEL and not trust:
        raise ConfigurationError(
            f"{path} is a SavedModel, which executes whatever was put into it, and --trust is not given",
            "add --trust if you made it; files of ONNX and TFLite execute nothing: ipucnn export RUN --format onnx",
        )
    if form != runtimes.SAVED_MODEL and trust:
        raise ConfigurationError(f"--trust: {path} executes nothing, so there is nothing to trust", "drop it")
    if read_record(path.parent / LABELS, _HINT) != record["setup"]["class_names"]:
        raise DataError(f"{path.parent / LABELS} has other classes than {RECORD}", _HINT)
    _check_files(path, record["files"])
    missing = [name for name in runtimes.missing_packages(form) if name not in ("onnx", "tf2onnx")]
    if missing:
        raise MissingError(
            f"{path} runs in {missing[0]}, which is not installed",
            "install what exports need with: python -m pip install 'ipucnn[export]'",
        )
    return ExportedNetwork(path, form, record)


def _read_record(folder: Path) -> Dict[str, Any]:
    record = read_record(folder / RECORD, _HINT)
    problem = _problem(record)
    if problem:
        raise DataError(f"{folder / RECORD} {problem}", _HINT)
    found: Dict[str, Any] = record
    return found


def _check_files(path: Path, files: Mapping[str, PlainValue]) -> None:
    """Refuses a network whose files are others than were proved, or more."""
    pending, there = [path], {}
    while pending:
        place = pending.pop()
        if kind_of(place) is Kind.FOLDER and (place == path or not is_link(place)):
            pending += entries(place)
        else:
            there[place.relative_to(path.parent).as_posix()] = place
    for name in sorted({*files, *there}):
        said = files.get(name)
        is_same = (
            name in there and isinstance(said, dict) and said.get("sha256") == file_digest(there[name])[0]
        )
        if not is_same:
            raise DataError(
                f"{path.parent / name} is not the file that was proved: its SHA-256 is not that of {RECORD}",
                "export the run again",
            )


def _problem(record: PlainValue) -> str:
    """What is wrong with an ``export.json``, in words; "" if nothing is."""
    if not isinstance(record, dict):
        return "is no mapping"
    problem = json_fields.wrong_field(record, _FIELDS, _FIELDS)
    problem = problem or json_fields.wrong_field(record["setup"], _SETUP, _NEEDED)
    if problem:
        return problem
    if not record["file"] or Path(record["file"]).name != record["file"]:
        return f"has the file {json_fields.brief(record['file'])}, which is no name of one beside it"
    setup, shape = record["setup"], record["input"].get("shape")
    if not (isinstance(shape, list) and len(shape) == 4 and all(map(is_count, shape[1:])) and all(shape[1:])):
        return "has no shape of the input"
    if shape[3] not in (1, 3) or not (shape[0] is None or (is_count(shape[0]) and shape[0])):
        return f"has the shape of the input {json_fields.brief(shape)}, which is none of images"
    if record["input"].get("dtype") not in ("uint8", "float32"):
        return "lacks input.dtype, uint8 or float32"
    if record["output"].get("name") not in ("logits", "probabilities"):
        return "lacks output.name, logits or probabilities"
    for name in ("mean", "std"):
        if len(setup[name]) not in (1, 3) or len(setup[name]) != len(setup["mean"]):
            return f"has the {name} {json_fields.brief(setup[name])}, not one number for each channel"
    try:
        get_model(record["model"])
        RunConfig.from_yaml(setup["config"], RECORD)
    except ConfigurationError as error:
        return f"does not describe a run: {error.message}"
    return ""


def file_digest(path: Path) -> Tuple[str, int]:
    """SHA-256 of a file, and its bytes."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        for part in iter(lambda: file.read(2**20), b""):
            digest.update(part)
            size += len(part)
    return digest.hexdigest(), size


class RuntimeSession(Session):
    """Predicts with an exported file in its own runtime, on the CPU; it trains nothing.

    Args:
        network: as it was read.
    """

    def __init__(self, network: ExportedNetwork) -> None:
        self.device = DeviceInfo("cpu", cpu_name() or "CPU", num_cores(), host_memory_bytes())
        self._network = network
        self._loaded: Optional[runtimes.Loaded] = None

    @property
    def runtime(self) -> str:
        """Name and version of what runs the file, once it is loaded."""
        assert self._loaded is not None
        return self._loaded.runtime

    def take_preprocessing(self, affine: object) -> bool:
        """Images come as the description of the input has them."""
        return False

    def prepare_evaluation(self, model: KerasModel, loss: Optional[LossFunction]) -> None:
        """Loads the file; ``model`` is not looked at."""
        network = self._network
        try:
            self._loaded = runtimes.load(network.form, network.path, num_cores())
        except Exception as error:
            reason = " ".join(text_of(error).split())[:300]
            raise DataError(
                f"{network.path} cannot be loaded: {type(error).__name__}: {reason}", _HINT
            ) from error

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """float32 logits of each element; of probabilities their logarithms."""
        return [self._logits(np.asarray(images)) for images in dataset]

    def _logits(self, images: np.ndarray) -> np.ndarray:
        assert self._loaded is not None
        described = self._network.record["input"]
        height, width = self._network.input_shape[:2]
        if images.shape[1:3] != (height, width):
            raise ConfigurationError(
                f"{self._network.path} takes images of {height}x{width}, and these have "
                f"{images.shape[1]}x{images.shape[2]}",
                "drop --tile-size, or export the network again for another size",
            )
        if self._network.takes_pixels:
            images = np.clip(np.rint(images), 0, 255).astype(np.uint8)
        size = described["shape"][0] or len(images)
        run = self._loaded.run
        found = np.concatenate([run(part) for part in runtimes.batches(images, size)])[: len(images)]
        if self._network.record["output"]["name"] == "probabilities":
            found = np.log(np.maximum(found, np.finfo(np.float32).tiny))
        return found
