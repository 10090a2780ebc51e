"""Exported ONNX and TFLite files in place of a run: reads an export's folder, and runs its file in a session.

Only unchanged files that :mod:`ipucnn.runs.export` wrote and verified are accepted, because ``export.json`` beside them
describes their input and outputs.  A file runs in a process of its own
(:class:`RuntimeProcess`), because its runtime may crash.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterable, Iterator, List, Literal, Optional, Sequence, Tuple

import msgspec
import numpy as np

from ipucnn.aliases import Annotated, KerasModel, MemoryAdvice, PlainDict, Tensor
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.pixels import INPUT_RANGES, InputRange, in_8_bits
from ipucnn.documents import Above0, Finite, Natural, Positive, read_record, read_struct
from ipucnn.errors import ConfigurationError, DataError, MissingError
from ipucnn.filesystem import open_regular
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.models.registry import get_model
from ipucnn.runs import runtimes
from ipucnn.runs.checkpoints import form_of_masks
from ipucnn.sessions.session import DeviceInfo, Predictor, Session
from ipucnn.text import printable, shown_value
from ipucnn.training.checkpoints import SetupFacts

RECORD, LABELS = "export.json", "labels.json"
_HINT = "give the file in a folder that `ipucnn export` wrote, with what lies beside it"
_BATCH = 32


class _Setup(SetupFacts, kw_only=True):
    """The facts of a checkpoint that an exported network needs."""

    config_text: str = msgspec.field(name="config")
    dataset: str
    class_names: List[str]
    image_shape: Tuple[Optional[Natural], Optional[Natural], Natural]
    mean: Tuple[Finite, ...]
    std: Tuple[Above0, ...]
    data_sha256: Optional[str] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std have other numbers of channels")


class _Input(msgspec.Struct):
    """The exported network's input; ``shape`` includes the batch."""

    name: str
    shape: Tuple[Optional[Positive], Positive, Positive, Literal[1, 3]]
    dtype: Literal["uint8", "float32"]
    name_of_range: str = msgspec.field(name="range")

    def __post_init__(self) -> None:
        if self.name_of_range not in INPUT_RANGES:
            raise ValueError(f"the range {self.name_of_range} is unknown")


class _Output(msgspec.Struct):
    name: Literal["logits", "probabilities"]
    shape: List[Optional[Natural]]


class _File(msgspec.Struct):
    sha256: str


class _Weights(msgspec.Struct):
    weight_updates: Optional[int] = None


class ExportRecord(msgspec.Struct):
    """The part of ``export.json`` that is needed to run the file beside it."""

    format: str
    model: str
    file: Annotated[str, msgspec.Meta(pattern="^[^/]+$")]
    input: _Input
    output: _Output
    files: Dict[str, _File]
    weights: _Weights
    setup: _Setup
    threshold: Optional[float] = None


def is_exported(path: Path) -> bool:
    """Whether a path is a file, or the folder, of an exported network that can replace a run."""
    return path.suffix.lower() in runtimes.ENDINGS or (path / RECORD).is_file()


def describe_setup(
    config: RunConfig, seed: int, info: DatasetInfo, class_names: Iterable[str], data_sha256: Optional[str]
) -> Dict[str, Any]:
    """Returns ``setup`` of ``export.json``, from which :class:`ExportedNetwork` restores the run's configuration."""
    return {
        "config": config.to_yaml(),
        "seed": seed,
        "dataset": info.name,
        "class_names": list(class_names),
        "image_shape": list(info.image_shape),
        **form_of_masks(info),
        "mean": list(info.mean),
        "std": list(info.std),
        "data_sha256": data_sha256,
    }


@dataclass(frozen=True)
class ExportedNetwork:
    """An exported file and the record beside it; the counterpart of ``checkpoints.TrainedRun`` for a run.

    Attributes:
        path: the file.
        record: ``export.json``.
        config: the configuration of the exported run.
    """

    path: Path
    record: ExportRecord
    config: RunConfig

    @property
    def meta(self) -> Dict[str, Any]:
        """The facts of the exported weights, as a checkpoint has them."""
        record = self.record
        return {
            **msgspec.structs.asdict(record.setup),
            "model": record.model,
            "num_classes": len(record.setup.class_names),
            "input_shape": record.input.shape[1:],
            "weight_updates": record.weights.weight_updates,
        }

    @property
    def takes_pixels(self) -> bool:
        """Whether it takes pixels of 0..255 and normalises them itself."""
        return self.record.input.dtype == "uint8"

    def session(self) -> "RuntimeSession":
        """Returns a session that runs the file."""
        return RuntimeSession(self)


def read_exported(path: Path) -> ExportedNetwork:
    """Opens an exported network.

    Args:
        path: an ONNX or TFLite file, or the folder of an export.

    Raises:
        ConfigurationError: it is a SavedModel, which would execute any code in it.
        DataError: it does not exist, has no ``export.json`` beside it, or has changed since its verification.
        MissingError: its runtime is not installed.
    """
    is_whole_folder = (path / RECORD).is_file()
    if not is_whole_folder and not path.is_file():
        raise DataError(f"exported network {path} does not exist", _HINT)
    folder = path if is_whole_folder else path.parent
    if not (folder / RECORD).is_file():
        raise DataError(
            f"{path} has no {RECORD} beside it, which says how images are brought to it and what its classes are",
            _HINT,
        )
    record, config = _read_record(folder / RECORD)
    path = folder / record.file if is_whole_folder else path
    if path.is_dir():
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
    """Reads an ``export.json`` and the configuration in it.

    Raises:
        DataError: the file is damaged or describes no run; the message names the problem.
    """
    record = read_struct(path, ExportRecord, _HINT)
    try:
        get_model(record.model)
        return record, RunConfig.from_yaml(record.setup.config_text, RECORD)
    except ConfigurationError as error:
        raise DataError(f"{path} does not describe a run: {error.message}", _HINT) from None


def file_digest(path: Path) -> Tuple[str, int]:
    """Returns the SHA-256 of a file and its size in bytes."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        for part in iter(lambda: file.read(2**20), b""):
            digest.update(part)
            size += len(part)
    return digest.hexdigest(), size


class RuntimeFailed(Exception):
    """The runtime cannot load or run a file; the message is one line with the reason."""


def outputs_of(
    run: Callable[[np.ndarray], np.ndarray],
    images: np.ndarray,
    batch: Optional[int],
    shape: Sequence[Optional[int]],
) -> np.ndarray:
    """Returns the float32 outputs [images, *shape] of a file for images, in batches of one size.

    Args:
        run: the function from the images of a batch to its outputs.
        images: the file's inputs.
        batch: the images of a batch; None: see ``runtimes.batches``.
        shape: the shape of one image's outputs.

    Raises:
        RuntimeFailed: the outputs have another type or shape.
    """
    outputs = []
    for part in runtimes.batches(images, batch):
        result, expected = run(part), [len(part), *shape]
        if result.dtype != np.float32 or list(result.shape) != expected:
            raise RuntimeFailed(
                f"its outputs are {result.dtype} {list(result.shape)}, not float32 {expected}"
            )
        outputs.append(result)
    return np.concatenate(outputs)[: len(images)]


class RuntimeProcess:
    """Runs an exported network in its own runtime, in a process that cannot import ipucnn and ends with this object.

    Args:
        record: see ``runtimes.load``.
        threads: threads of the runtime; 0 for its own choice.

    Attributes:
        runtime: its name and version.

    Raises:
        RuntimeFailed: the file cannot be loaded.
    """

    def __init__(self, record: PlainDict, threads: int = 0) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, runtimes.__file__, json.dumps(record), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=os.path.dirname(runtimes.__file__),
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )
        self.close = weakref.finalize(self, _end, self._process, self._errors)
        self.runtime: str = self._answer()["runtime"]

    def run(self, images: np.ndarray) -> np.ndarray:
        """Returns the outputs of a batch.

        Raises:
            RuntimeFailed: the file cannot be run.
        """
        outputs: np.ndarray = self._answer(images)
        return outputs

    def _answer(self, images: Optional[np.ndarray] = None) -> Any:
        """Sends images, if any, and returns the process's answer."""
        try:
            if images is not None:
                with contextlib.suppress(BrokenPipeError):  # the answer has the reason
                    runtimes.send(self._process.stdin, images)
            answer = runtimes.receive(self._process.stdout)
        except BaseException:
            self._process.kill()  # after a signal: the file's computation may never end
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


def _end(process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
    process.kill()
    process.communicate()
    errors.close()


class RuntimeSession(Session):
    """Runs an exported file in its own runtime, on the CPU, in a separate process; it cannot train.

    Args:
        network: the exported network.
        scales_to: the range that rounded pixels are brought into; None: images arrive as the file takes them.
    """

    def __init__(self, network: ExportedNetwork, scales_to: Optional[InputRange] = None) -> None:
        self.device = DeviceInfo("cpu", cpu_name() or "CPU", num_cores(), host_memory_bytes())
        self._network, self._scales_to = network, scales_to
        self.takes_pixels = scales_to is not None

    def with_pixels(self, input_range: InputRange) -> "RuntimeSession":
        """Rounds and scales pixels for a file of scaled images, if its run sent images to the device in 8 bits."""
        is_scaled = self._network.config.eight_bit_transfer and not self._network.takes_pixels
        return RuntimeSession(self._network, input_range) if is_scaled else self

    def predictor(
        self, model: KerasModel, memory_advice: Optional[MemoryAdvice] = None, shares: bool = True
    ) -> "RuntimePredictor":
        """Starts the process, which loads the file; the arguments are not used."""
        return RuntimePredictor(self._network, self.device, self._scales_to)


class RuntimePredictor(Predictor):
    """Predicts with an exported file; see :class:`RuntimeSession`.

    Args:
        network: the exported network.
        device: the CPU.
        scales_to: see :class:`RuntimeSession`.
    """

    def __init__(
        self, network: ExportedNetwork, device: DeviceInfo, scales_to: Optional[InputRange] = None
    ) -> None:
        self.device, self._network, self._scales_to = device, network, scales_to
        with self._errors("loaded"):
            record = {**msgspec.to_builtins(network.record), "file": str(network.path.absolute())}
            self._process = RuntimeProcess(record, num_cores())

    @contextlib.contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except RuntimeFailed as error:
            raise DataError(f"{self._network.path} cannot be {done}: {error}", _HINT) from None

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Returns float32 logits of each element; if the file returns probabilities, their logarithms."""
        return [self._logits(np.asarray(images)) for images in dataset]

    def _logits(self, images: np.ndarray) -> np.ndarray:
        record = self._network.record
        height, width = record.input.shape[1:3]
        if images.shape[1:3] != (height, width):
            raise ConfigurationError(
                f"{self._network.path} takes images of {height}x{width}, and these have "
                f"{images.shape[1]}x{images.shape[2]}",
                "drop --patch-size, or export the network again for another size",
            )
        if self._network.takes_pixels or self._scales_to is not None:
            images = in_8_bits(images)
        if self._scales_to is not None:
            images = np.asarray(self._scales_to.apply(np.float32(images)))
        batch, shape = record.input.shape[0] or min(_BATCH, len(images)), record.output.shape[1:]
        with self._errors("run"):
            outputs = outputs_of(self._process.run, images, batch, shape)
        if record.output.name == "probabilities":
            outputs = np.log(np.maximum(outputs, np.finfo(np.float32).tiny))
        return outputs
