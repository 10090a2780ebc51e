"""Checkpoints: portable files that models of both Keras 2.6 and Keras 3 load.

A checkpoint is an uncompressed NumPy archive: ``weights/<layer>/<weight>`` and ``slots/<layer>/<weight>/<slot>`` in the
project's canonical names, and ``meta``, a JSON text with the run's position and a SHA-256 over the whole content.

Reading accepts only what :func:`save_checkpoint` writes: stored members of plain little-endian numbers.  It executes
nothing and decompresses nothing, and arrays take no more memory than the size of the file.
"""

import contextlib
import errno
import hashlib
import json
import re
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Container, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ipucnn.aliases import Annotated, KerasVariable, PlainValue
from ipucnn.config import bounds
from ipucnn.documents import Above0, Figures, Finite, Natural, Positive, load_record, mismatch
from ipucnn.errors import DataError
from ipucnn.filesystem import open_regular, shown
from ipucnn.text import shown_value

FORMAT = "ipucnn-checkpoint-2"
_HINT = "give a checkpoint or run folder that `ipucnn train` wrote"
_HINT_ON_WEIGHTS = f"{_HINT}, or weights that Keras saved (.weights.h5, .h5, .keras)"
META_BYTES = 2**28
"""The maximum length of the JSON text, which includes the lines of ``metrics.jsonl``."""
_TYPES = {"weights": ("<f4", "<f2"), "slots": ("<f4", "<f2", "<i8", "<i4")}
"""The allowed types of arrays, by the first part of their names."""
_ARRAY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([ -~]{1,20})', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,12}, ?){0,8}(?:\d{1,12})?)\), \} *\n",
    re.DOTALL,
)
_DAMAGES = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, KeyError, OverflowError, struct.error,
)  # fmt: skip
"""The errors that ``zipfile`` and NumPy raise for bytes that are no checkpoint."""


@dataclass
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        weights: float32 (float16 for 16-bit runs) arrays by canonical name.
        slots: optimizer state by ``<weight>/<slot>``.
        meta: ``model``, ``num_classes``, ``input_shape``, ``weight_updates``, ``seed`` (always present in a file) and
            any other facts from the writer; see :class:`CheckpointFacts`.
    """

    weights: Dict[str, Any]
    slots: Dict[str, Any]
    meta: Dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Returns the SHA-256 over the whole content."""
        return digest_of(_by_member(self.weights, self.slots), self.meta)


_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class _Header(msgspec.Struct):
    format: str
    sha256: str


class SetupFacts(msgspec.Struct, kw_only=True):
    """The facts about the set-up of a run, which an export keeps as well.

    Attributes:
        config_text: YAML of the run's configuration.
        image_shape: height and width, None if images differ in size, and channels.
        class_colours: red, green and blue of each class.
        mask_values: the stored value of each class in masks.
        mean, std: one value per channel, or one for all channels.
    """

    config_text: str = msgspec.field(default="", name="config")
    seed: Natural
    dataset: str = ""
    class_names: List[str] = []
    class_colours: List[Tuple[_Byte, _Byte, _Byte]] = []
    mask_values: List[Natural] = []
    image_shape: Tuple[Optional[Natural], Optional[Natural], Natural] = (None, None, 0)
    mean: Tuple[Finite, ...] = (0.0,)
    std: Tuple[Above0, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not {len(self.mean), len(self.std)} <= {1, 3}:
            raise ValueError("mean and std have one or three numbers")


class _Program(msgspec.Struct):
    weight_updates_per_epoch: Natural = 0
    fused_micro_batches: Positive = 1


class _Position(msgspec.Struct):
    losses: List[Finite]
    hits: List[Finite]
    events_done: Natural
    earlier_losses: List[Finite] = []
    earlier_hits: List[Finite] = []


class _Run(msgspec.Struct):
    """The state of a run; ``history`` has the rows of ``metrics.jsonl``."""

    history: str
    best: Optional[Figures]
    last_validation: Optional[Figures]
    notes: List[str] = []

    def __post_init__(self) -> None:
        if self.history and not self.history.endswith("\n"):
            raise ValueError("history is cut short")
        if not all(isinstance(load_record(line), dict) for line in self.history.split("\n")[:-1]):
            raise ValueError("a line of history is no row")


class CheckpointFacts(SetupFacts, kw_only=True):
    """The types of a checkpoint's facts, some of which are optional; see :class:`Checkpoint`."""

    model: str
    num_classes: Positive
    input_shape: Tuple[Positive, Positive, Positive]
    weight_updates: Natural
    num_eval: Natural = 0
    data_sha256: str = ""
    threads: Annotated[int, msgspec.Meta(ge=1, le=bounds.MAX_THREADS)] = 1
    program: Union[_Program, UnsetType] = UNSET
    position: Union[_Position, UnsetType] = UNSET
    run: Union[_Run, UnsetType] = UNSET


def _by_member(weights: Mapping[str, np.ndarray], slots: Mapping[str, np.ndarray]) -> Dict[str, np.ndarray]:
    """Returns all arrays by their names in the file."""
    return {
        f"{part}/{name}": array
        for part, arrays in (("weights", weights), ("slots", slots))
        for name, array in arrays.items()
    }


def digest_of(arrays: Mapping[str, np.ndarray], header: Mapping[str, PlainValue]) -> str:
    """Returns the SHA-256 over the facts, except for their own checksum, and over all arrays."""
    digest = hashlib.sha256()
    facts = {key: value for key, value in header.items() if key != "sha256"}
    digest.update(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode("ascii"))
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(
            f"\n{len(name)} {name} {array.dtype.str} {array.shape}\n".encode("utf-8", "surrogatepass")
        )
        digest.update(array.tobytes())
    return digest.hexdigest()


def save_checkpoint(
    path: Path,
    weights: Mapping[str, np.ndarray],
    slots: Mapping[str, np.ndarray],
    meta: Mapping[str, PlainValue],
) -> None:
    """Writes a checkpoint to ``path`` (not atomic: see ``ipucnn.filesystem.write_atomically``).

    Args:
        path: the file; its name need not end in .npz.
        weights, slots: arrays by name.
        meta: facts that JSON can represent.
    """
    arrays = _by_member(weights, slots)
    # A round trip through JSON makes the checksum cover what a reader sees: tuples become lists.
    header = json.loads(json.dumps({**meta, "format": FORMAT}))
    header["sha256"] = digest_of(arrays, header)
    text: Any = np.frombuffer(json.dumps(header).encode("utf-8"), dtype=np.uint8)
    # np.savez is unsuitable: it takes the names as keyword arguments, and writes the time of day into the archive.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in {"meta": text, **arrays}.items():
            entry = zipfile.ZipInfo(name + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(entry, "w", force_zip64=True) as handle:
                np.lib.format.write_array(handle, np.asarray(array, order="C"), allow_pickle=False)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        DataError: the file is absent, not a checkpoint, damaged, or has unknown facts or arrays, which the message
            names.
    """
    name = f"checkpoint {shown(path)}"
    arrays: Dict[str, Any] = {}
    with _opened(path) as archive:
        header = _facts(archive, name)
        for member in archive.namelist():
            key, types = member[: -len(".npy")], _TYPES.get(member.partition("/")[0])
            if types is not None:
                what = f"{name}: the array '{shown_value(key)}'"
                arrays[key] = _array(archive.read(member), types, what)
            elif member != "meta.npy":
                raise DataError(f"{name} has '{shown_value(member)}', which no checkpoint has", _HINT)
    if digest_of(arrays, header) != header["sha256"]:
        raise DataError(f"{name} is damaged: its checksum does not match", _HINT)
    _check_facts(header, name)
    for member, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(
                f"{name}: the array '{shown_value(member)}' is not finite",
                "its training diverged; use another",
            )
    return Checkpoint(
        {k[len("weights/") :]: v for k, v in arrays.items() if k.startswith("weights/")},
        {k[len("slots/") :]: v for k, v in arrays.items() if k.startswith("slots/")},
        {k: v for k, v in header.items() if k not in ("format", "sha256")},
    )


def read_meta(path: Path) -> Dict[str, Any]:
    """Returns the facts of a checkpoint without reading its arrays; the checksum is not verified.

    Raises:
        DataError: the file is absent, not a checkpoint, or has facts that no checkpoint has.
    """
    name = f"checkpoint {shown(path)}"
    with _opened(path) as archive:
        header = _facts(archive, name)
    _check_facts(header, name)
    return header


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens an archive without compressed members.

    Raises:
        DataError: the file cannot be read, or the block raises an error for a file that is no checkpoint.
    """
    with open_regular(path, hint=_HINT) as file:
        size = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                is_stored = all(m.compress_type == zipfile.ZIP_STORED for m in members)
                if not is_stored or sum(m.file_size for m in members) > size:
                    raise zipfile.BadZipFile
                yield archive
        except (*_DAMAGES, OSError) as error:
            if (
                isinstance(error, OSError) and error.errno != errno.EINVAL
            ):  # EINVAL: a position before the beginning of the file
                raise
            file.seek(0)
            other = _other_format(path.name, file)
            if other:
                raise DataError(f"{shown(path)} is {other}, which is not read", _HINT_ON_WEIGHTS) from error
            raise DataError(f"{shown(path)} is damaged or no checkpoint", _HINT) from error


def _other_format(name: str, file: BinaryIO) -> str:
    """Returns what a file of weights that other programs write is, by its beginning, members or ending; else ""."""
    begin = file.read(9)
    if begin[:1] == b"\x80" and begin[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle, as PyTorch and others write for weights"
    if begin[8:] == b"{" and int.from_bytes(begin[:8], "little") < META_BYTES:
        return "a file of safetensors"
    with contextlib.suppress(*_DAMAGES, OSError):
        if any(member.endswith("/data.pkl") for member in zipfile.ZipFile(file).namelist()):
            return "a file of PyTorch"
    if re.search(r"\.index\Z|\.data-\d+-of-\d+\Z", name):
        return "a part of a checkpoint of TensorFlow"
    return {"onnx": "a network in ONNX", "tflite": "a network in TFLite"}.get(
        name.rpartition(".")[2].lower(), ""
    )


def _facts(archive: zipfile.ZipFile, name: str) -> Dict[str, Any]:
    """Reads the facts, and checks their format and that they have a checksum."""
    if archive.getinfo("meta.npy").file_size > META_BYTES:
        raise zipfile.BadZipFile
    text = _array(archive.read("meta.npy"), ("|u1",), f"{name}: the facts").tobytes()
    try:
        header = load_record(text.decode("utf-8"), META_BYTES)
    except ValueError as error:
        raise DataError(f"{name} is damaged: its facts are not readable ({error})", _HINT) from None
    if mismatch(header, _Header):
        raise DataError(f"{name} is not an ipucnn checkpoint", _HINT)
    if header["format"] != FORMAT:
        raise DataError(f"{name} has the format '{shown_value(header['format'])}', not '{FORMAT}'", _HINT)
    return header


def _check_facts(header: Mapping[str, PlainValue], name: str) -> None:
    problem = mismatch(header, CheckpointFacts)
    if problem:
        raise DataError(f"{name} is damaged: {problem}", _HINT)


def _array(data: bytes, types: Tuple[str, ...], what: str) -> Any:
    """Returns the array of a member; matches the header with a pattern, rather than evaluating it as NumPy does."""
    end = 10 + int.from_bytes(data[8:10], "little")
    match = _ARRAY_HEADER.fullmatch(data[:end])
    kind = "" if match is None else match.group(1).decode("ascii")
    if match is None or kind not in types:
        raise DataError(f"{what} is not stored row by row as {' or '.join(types)}", _HINT)
    shape = [int(number) for number in match.group(2).replace(b" ", b"").split(b",") if number]
    return np.frombuffer(data, np.dtype(kind), offset=end).reshape(shape)


def assign_weights(
    variables: Mapping[str, KerasVariable], checkpoint: Checkpoint, *, what: str, skip: Container[str] = ()
) -> None:
    """Copies a checkpoint's weights into variables of the same names and shapes.

    Args:
        variables: tf.Variables by canonical name.
        checkpoint: the checkpoint to copy from.
        what: the name of the checkpoint in error messages, for example its path.
        skip: the names of variables to leave unchanged.

    Raises:
        DataError: a weight is missing, superfluous or of another shape.
    """
    copied = {name: v for name, v in variables.items() if name not in skip}
    for name, variable in copied.items():
        value = checkpoint.weights.get(name)
        if value is None:
            raise DataError(
                f"{what} is of another model: it has no weight {name}",
                "build the model it was trained with (its config.yml lies in the run folder)",
            )
        if tuple(value.shape) != tuple(variable.shape):
            raise DataError(
                f"{what} does not fit: {name} is {tuple(value.shape)}, the model's is {tuple(variable.shape)}",
                "use the image size, classes and normalisation it was trained with",
            )
    extra = [name for name in checkpoint.weights if name not in variables]
    if extra:
        raise DataError(
            f"{what} is of another model: it has a weight {extra[0]} that the model lacks",
            "build the model it was trained with (its config.yml lies in the run folder)",
        )
    for name, variable in copied.items():
        variable.assign(checkpoint.weights[name].astype(np.float32, copy=False))
