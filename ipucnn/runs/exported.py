"""Exported ONNX and TFLite files in place of a run: what an export's folder says, and a session that runs its file.

Only files are taken that :mod:`ipucnn.runs.export` wrote and verified, and that are still what they were then: what
stands beside a file says how images are brought to it, and what its outputs are.  A file runs in a process of its own
(:class:`RuntimeProcess`), whose memory is bounded and which ends with this one: whoever can write the file can write
its ``export.json`` too, and what it computes may take any time and memory.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Literal, Optional, Tuple

import msgspec
import numpy as np

from ipucnn.aliases import Annotated, KerasModel, Tensor
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import DatasetInfo
from ipucnn.documents import Above0, Finite, Natural, Positive, misfit, read_record
from ipucnn.errors import ConfigurationError, DataError, MissingError
from ipucnn.filesystem import absolute, is_file, is_folder, open_regular
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.models.registry import get_model
from ipucnn.runs import runtimes
from ipucnn.runs.checkpoints import colours_of_masks, trained_facts
from ipucnn.sessions.session import DeviceInfo, Session
from ipucnn.text import printable, shown_value
from ipucnn.training.checkpoints import Setup
from ipucnn.training.losses import LossFunction

RECORD, LABELS = "export.json", "labels.json"
_HINT = "give the file in a folder that `ipucnn export` wrote, with what lies beside it"
_LEAST_BYTES, _BYTES_PER_FILE, _BYTES_PER_INPUT = 2 * 2**30, 8, 128
"""Memory of the runtime's process: at least, and for each byte of the file and of a batch's float32 images.

The largest activations of the registry's networks are some 30 times as large as their images.
"""
_BATCH = 32


class _Setup(Setup, kw_only=True):
    """What of a checkpoint's facts an exported network needs."""

    config_text: str = msgspec.field(name="config")
    dataset: str
    class_names: List[str]
    image_shape: Tuple[Optional[Natural], Optional[Natural], Natural]
    mean: Tuple[Finite, ...]
    std: Tuple[Above0, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std have other numbers of channels")


class _Input(msgspec.Struct):
    """``shape`` is that of a batch of images."""

    shape: Tuple[Optional[Positive], Positive, Positive, Literal[1, 3]]
    dtype: Literal["uint8", "float32"]


class _Output(msgspec.Struct):
    name: Literal["logits", "probabilities"]
    shape: List[Optional[Natural]]


class _File(msgspec.Struct):
    sha256: str


class _Weights(msgspec.Struct):
    weight_updates: Optional[int] = None


class ExportRecord(msgspec.Struct):
    """What of ``export.json`` is needed to run the file that lies beside it."""

    format: str
    model: str
    file: Annotated[str, msgspec.Meta(pattern="^[^/]+$")]
    input: _Input
    output: _Output
    files: Dict[str, _File]
    weights: _Weights
    setup: _Setup


def is_exported(path: Path) -> bool:
    """Whether a path is that of an exported network, which can be run in place of a run: a file, or a folder of one."""
    return path.suffix.lower() in runtimes.ENDINGS or is_file(path / RECORD)


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
        record: ``export.json``.
        config: of the run that was exported.
    """

    path: Path
    record: ExportRecord
    config: RunConfig

    @property
    def seed(self) -> int:
        """Of that run."""
        return self.record.setup.seed

    @property
    def input_shape(self) -> Tuple[int, int, int]:
        """(height, width, channels)."""
        return self.record.input.shape[1:]

    @property
    def num_classes(self) -> int:
        """Outputs of an image or pixel."""
        return len(self.record.setup.class_names)

    @property
    def facts(self) -> DatasetInfo:
        """The facts of the data that it was trained on, as far as they are known."""
        return trained_facts(
            msgspec.structs.asdict(self.record.setup), self.record.model, self.num_classes, self.path
        )

    @property
    def summary(self) -> Dict[str, Any]:
        """What identifies the weights that are used, for reports."""
        updates = self.record.weights.weight_updates
        return {"checkpoint": str(self.path), "model": self.record.model, "weight_updates": updates}

    @property
    def takes_pixels(self) -> bool:
        """Whether it takes pixels of 0..255 and brings them to its range itself."""
        return self.record.input.dtype == "uint8"

    def fill(self, model: KerasModel) -> None:
        """The weights are in the file."""

    def session(self) -> "RuntimeSession":
        """Runs the file."""
        return RuntimeSession(self)


def read_exported(path: Path) -> ExportedNetwork:
    """Opens an exported network.

    Args:
        path: an ONNX or TFLite file, or the folder that an export was written to.

    Raises:
        ConfigurationError: it is a SavedModel, which would execute whatever is in it.
        DataError: it is absent, nothing beside it says what it is, or it is not what was verified.
        MissingError: its runtime is not installed.
    """
    is_whole_folder = is_file(path / RECORD)
    if not is_whole_folder and not is_file(path):
        raise DataError(f"exported network {path} does not exist", _HINT)
    folder = path if is_whole_folder else path.parent
    if not is_file(folder / RECORD):
        raise DataError(
            f"{path} has no {RECORD} beside it, which says how images are brought to it and what its classes are",
            _HINT,
        )
    record, config = _read_record(folder / RECORD)
    path = folder / record.file if is_whole_folder else path
    if is_folder(path):
        raise ConfigurationError(
            f"{path} is a SavedModel, which is not run in place of a run: it executes whatever was put into it",
            "name the run that it was exported from; or export that run as onnx or tflite, and name the file",
        )
    form = runtimes.ENDINGS.get(path.suffix.lower())
    if form is None or form != record.format:
        raise DataError(
            f"{path} is an export of the format {shown_value(record.format)}, which is not run in place of a run",
            "export the run as onnx or tflite",
        )
    if read_record(path.parent / LABELS, _HINT) != record.setup.class_names:
        raise DataError(f"{path.parent / LABELS} has other classes than {RECORD}", _HINT)
    if path.name not in record.files or record.files[path.name].sha256 != file_digest(path)[0]:
        raise DataError(
            f"{path} is not the file that was verified: its SHA-256 is not that of {RECORD}",
            "export the run again",
        )
    missing = [name for name in runtimes.missing_packages(form) if name not in ("onnx", "tf2onnx")]
    if missing:
        raise MissingError(
            f"{path} runs in {missing[0]}, which is not installed",
            "install what exports need with: python -m pip install 'ipucnn[export]'",
        )
    return ExportedNetwork(path, record, config)


def _read_record(path: Path) -> Tuple[ExportRecord, RunConfig]:
    """What an ``export.json`` says, and the configuration in it.

    Raises:
        DataError: naming what is wrong with it.
    """
    data = read_record(path, _HINT)
    problem = misfit(data, ExportRecord)
    if problem:
        raise DataError(f"{path} is damaged: {problem}", _HINT)
    record = msgspec.convert(data, ExportRecord)
    try:
        get_model(record.model)
        return record, RunConfig.from_yaml(record.setup.config_text, RECORD)
    except ConfigurationError as error:
        raise DataError(f"{path} does not describe a run: {error.message}", _HINT) from None


def file_digest(path: Path) -> Tuple[str, int]:
    """SHA-256 of a file, and its bytes."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        for part in iter(lambda: file.read(2**20), b""):
            digest.update(part)
            size += len(part)
    return digest.hexdigest(), size


class RuntimeFailed(Exception):
    """The runtime cannot load or run a file; the message says why, on one line."""


class RuntimeProcess:
    """An exported network in its own runtime, in a process that cannot import ipucnn; it ends with this object.

    Args:
        form: one of ``runtimes.FORMATS``.
        path: of the file or SavedModel.
        threads: of the runtime; 0 for its own choice.
        memory_bytes: what the process may take beside its runtime; 0 for no limit.

    Attributes:
        runtime: its name and version.
        inputs, outputs: what the file says it takes and gives.

    Raises:
        RuntimeFailed: the file cannot be loaded.
    """

    def __init__(self, form: str, path: Path, threads: int = 0, memory_bytes: int = 0) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, runtimes.__file__, form, str(absolute(path)), str(threads), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=os.path.dirname(runtimes.__file__),
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )
        self.close = weakref.finalize(self, _end, self._process)
        answer = self._answer()
        self.runtime, self.inputs, self.outputs = answer["runtime"], answer["inputs"], answer["outputs"]

    def run(self, images: np.ndarray) -> np.ndarray:
        """The outputs of a batch.

        Raises:
            RuntimeFailed: the file cannot be run.
        """
        outputs: np.ndarray = self._answer(images)
        return outputs

    def _answer(self, images: Optional[np.ndarray] = None) -> Any:
        """Hands images over, if there are any; returns what the process answers."""
        try:
            if images is not None:
                with contextlib.suppress(BrokenPipeError):  # the answer says why
                    runtimes.send(self._process.stdin, images)
            answer = runtimes.receive(self._process.stdout)
        except BaseException:
            self._process.kill()  # a signal came, and what the file computes may never end
            raise
        if answer is None:
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read()[-2000:].decode("utf-8", "replace").strip().splitlines()
            answer = {"error": lines[-1] if lines else f"it ended with code {code}"}
        if isinstance(answer, dict) and "error" in answer:
            self._process.kill()
            raise RuntimeFailed(printable(" ".join(answer["error"].split()))[:300])
        return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


class RuntimeSession(Session):
    """Predicts with an exported file in its own runtime, on the CPU, in a process of its own; it trains nothing.

    Args:
        network: as it was read.
    """

    def __init__(self, network: ExportedNetwork) -> None:
        self.device = DeviceInfo("cpu", cpu_name() or "CPU", num_cores(), host_memory_bytes())
        self._network = network
        self._process: Optional[RuntimeProcess] = None

    def take_preprocessing(self, affine: object) -> bool:
        """Images come as the description of the input has them."""
        return False

    def prepare_evaluation(self, model: KerasModel, loss: Optional[LossFunction]) -> None:
        """Starts the process, which loads the file; ``model`` is not looked at."""
        path, shape = self._network.path, self._network.record.input.shape
        size = 4 * int(np.prod(shape[1:])) * max(_BATCH, shape[0] or 0)
        most = _LEAST_BYTES + _BYTES_PER_FILE * file_digest(path)[1] + _BYTES_PER_INPUT * size
        form, most = self._network.record.format, min(most, host_memory_bytes() or most)
        with self._errors("loaded"):
            self._process = RuntimeProcess(form, path, num_cores(), most)

    @contextlib.contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except RuntimeFailed as error:
            raise DataError(f"{self._network.path} cannot be {done}: {error}", _HINT) from None

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """float32 logits of each element; of probabilities their logarithms."""
        return [self._logits(np.asarray(images)) for images in dataset]

    def _logits(self, images: np.ndarray) -> np.ndarray:
        assert self._process is not None
        record = self._network.record
        height, width = self._network.input_shape[:2]
        if images.shape[1:3] != (height, width):
            raise ConfigurationError(
                f"{self._network.path} takes images of {height}x{width}, and these have "
                f"{images.shape[1]}x{images.shape[2]}",
                "drop --tile-size, or export the network again for another size",
            )
        if self._network.takes_pixels:
            images = np.clip(np.rint(images), 0, 255).astype(np.uint8)
        parts = runtimes.batches(images, record.input.shape[0] or min(_BATCH, len(images)))
        with self._errors("run"):
            outputs = np.concatenate([self._process.run(part) for part in parts])[: len(images)]
        shape = [len(images), *record.output.shape[1:]]
        if outputs.dtype != np.float32 or list(outputs.shape) != shape:
            raise DataError(
                f"{self._network.path} gives {outputs.dtype} {list(outputs.shape)}, not float32 {shape}",
                _HINT,
            )
        if record.output.name == "probabilities":
            outputs = np.log(np.maximum(outputs, np.finfo(np.float32).tiny))
        return outputs
