"""Checkpoints: one portable file that Keras 2.6 and Keras 3 models both load.

An uncompressed NumPy archive: ``weights/<layer>/<weight>`` and ``slots/<layer>/<weight>/<slot>`` in the
project's canonical names, and ``meta``, a JSON text with the run's position and a SHA-256 over all of it.

A file is read by this module alone, which knows no more than what :func:`save_checkpoint` writes: stored members,
one after the other, of plain little-endian numbers.  Nothing in it is executed, nothing expands, and no more
memory is taken than the file is long.
"""

import contextlib
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
from ipucnn.documents import Above0, Figures, Finite, Natural, Positive, load_record, misfit
from ipucnn.errors import DataError, InfeasibleError
from ipucnn.filesystem import open_regular, shown
from ipucnn.machine import available_bytes
from ipucnn.text import shown_value, size_text

FORMAT = "ipucnn-checkpoint-2"
_HINT = "give a checkpoint or run folder that `ipucnn train` wrote"
_AGAIN = "train again; checkpoints of this kind were written before the checksum covered the run's position"
_MORE_MEMORY = "end other programs, raise the limit (ulimit -v), or use a machine with more memory"
META_BYTES = 2**28
"""How long the JSON text may be: the lines of ``metrics.jsonl`` are in it."""
_WEIGHT_TYPES = ("<f4", "<f2")
_SLOT_TYPES = (*_WEIGHT_TYPES, "<i8", "<i4")
_META_TYPES = ("|u1",)
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END_BYTES = 22
"""Of the end of the index, without a comment."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ARRAY_HEADER = re.compile(
    r"\{'descr': '([^']{1,20})', 'fortran_order': (True|False), 'shape': \(((?:\d{1,12}, ?)*(?:\d{1,12})?)\), \} *\n"
)


@dataclass
class Checkpoint:
    """A read checkpoint.

    Attributes:
        weights: float32 (float16 of 16-bit runs) arrays by canonical name.
        slots: optimizer state by ``<weight>/<slot>``.
        meta: ``model``, ``num_classes``, ``input_shape``, ``weight_updates``, ``seed`` (a read checkpoint has
            them) and whatever else the writer put in; see :class:`Facts`.
    """

    weights: Dict[str, Any]
    slots: Dict[str, Any]
    meta: Dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of everything in it."""
        arrays = {f"weights/{k}": v for k, v in self.weights.items()}
        arrays.update({f"slots/{k}": v for k, v in self.slots.items()})
        return digest_of(arrays, self.meta)


_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class _Header(msgspec.Struct):
    format: str
    sha256: str


class Setup(msgspec.Struct, kw_only=True):
    """The facts that say how a run was set up; an export keeps them, too.

    Attributes:
        config: YAML of the run's configuration.
        image_shape: height and width, None where images differ, and channels.
        class_colours: red, green and blue of each class.
        mean, std: of each channel, or one for all.
    """

    config: str = ""
    seed: Natural
    dataset: str = ""
    class_names: List[str] = []
    class_colours: List[Tuple[_Byte, _Byte, _Byte]] = []
    image_shape: Tuple[Optional[Natural], Optional[Natural], Natural] = (None, None, 0)
    mean: Tuple[Finite, ...] = (0.0,)
    std: Tuple[Above0, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not {len(self.mean), len(self.std)} <= {1, 3}:
            raise ValueError("mean and std have one or three numbers")


class _Program(msgspec.Struct):
    weight_updates_per_epoch: Natural = 0
    fused_micro_batches: Natural = 0


class _Position(msgspec.Struct):
    losses: List[Finite]
    hits: List[Finite]
    events_done: Natural
    earlier_losses: List[Finite] = []
    earlier_hits: List[Finite] = []


class _Run(msgspec.Struct):
    """``history`` has the rows of ``metrics.jsonl``."""

    history: str
    best: Optional[Figures]
    last_validation: Optional[Figures]

    def __post_init__(self) -> None:
        if self.history and not self.history.endswith("\n"):
            raise ValueError("history is cut short")
        if not all(isinstance(load_record(line), dict) for line in self.history.split("\n")[:-1]):
            raise ValueError("a line of history is no row")


class Facts(Setup, kw_only=True):
    """What each fact of a checkpoint is, of those that it has; see :class:`Checkpoint`."""

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


def digest_of(arrays: Mapping[str, np.ndarray], header: Mapping[str, PlainValue]) -> str:
    """SHA-256 over the facts, their own checksum left out, and over all arrays."""
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
        meta: JSON-able facts.
    """
    arrays = {f"weights/{k}": np.asarray(v) for k, v in weights.items()}
    arrays.update({f"slots/{k}": np.asarray(v) for k, v in slots.items()})
    # Through JSON once, so that the checksum is over what a reader sees: tuples become lists.
    header = json.loads(json.dumps({**meta, "format": FORMAT}))
    header["sha256"] = digest_of(arrays, header)
    text: Any = np.frombuffer(json.dumps(header).encode("utf-8"), dtype=np.uint8)
    # Not np.savez: it takes the names as keyword arguments and stamps the time of day into the archive.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in {"meta": text, **arrays}.items():
            entry = zipfile.ZipInfo(name + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(entry, "w", force_zip64=True) as handle:
                np.lib.format.write_array(handle, np.asarray(array, order="C"), allow_pickle=False)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        DataError: absent, not a checkpoint, damaged, or with facts or arrays that no checkpoint has, naming them.
        InfeasibleError: memory does not suffice.
    """
    name = f"checkpoint {shown(path)}"
    arrays: Dict[str, Any] = {}
    with _reading(path) as (file, size):
        allowed = available_bytes() // 2
        if size > allowed:
            raise InfeasibleError(
                f"{name} needs {size_text(size)} of memory, and half of what is free is {size_text(allowed)}",
                _MORE_MEMORY,
            )
        members = _members(file, size)
        header = _header_of(members, file, name)
        for member, num_bytes in members:
            if member in arrays:
                raise DataError(f"{name} has '{shown_value(member)}' twice", _HINT)
            if not member.startswith(("weights/", "slots/")):
                raise DataError(f"{name} has '{shown_value(member)}', which no checkpoint has", _HINT)
            types = _WEIGHT_TYPES if member.startswith("weights/") else _SLOT_TYPES
            arrays[member] = _array(file, num_bytes, types, f"{name}: the array '{shown_value(member)}'")
    if digest_of(arrays, header) != header["sha256"]:
        raise DataError(f"{name} is damaged: its checksum does not match", _HINT)
    problem = misfit(header, Facts)
    if problem:
        raise DataError(f"{name} is damaged: {problem}", _HINT)
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
    """The facts of a checkpoint without its arrays: for a look at what it is; its checksum is not verified.

    Raises:
        DataError: absent, not a checkpoint, or with facts that no checkpoint has.
        InfeasibleError: memory does not suffice.
    """
    name = f"checkpoint {shown(path)}"
    with _reading(path) as (file, size):
        header = _header_of(_members(file, size), file, name)
    problem = misfit(header, Facts)
    if problem:
        raise DataError(f"{name} is damaged: {problem}", _HINT)
    return header


class _DamagedError(Exception):
    """The bytes are not those of a checkpoint."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Tuple[BinaryIO, int]]:
    """The opened file and its length.

    Raises:
        DataError: it cannot be read, or the block found that it is no checkpoint.
        InfeasibleError: memory does not suffice to read it, which says nothing about the file.
    """
    with open_regular(path, hint=_HINT) as file:
        size = file.seek(0, 2)
        file.seek(0)
        try:
            yield file, size
        except MemoryError:
            raise InfeasibleError(
                f"memory does not suffice to read checkpoint {shown(path)}", _MORE_MEMORY
            ) from None
        except (_DamagedError, UnicodeDecodeError, struct.error, OverflowError) as error:
            raise DataError(f"{shown(path)} is damaged or no checkpoint", _HINT) from error


def _members(file: BinaryIO, size: int) -> Iterator[Tuple[str, int]]:
    """Name and length of each member; the file stands at its first byte, and is left wherever.

    They are read from their own headers, one after the other: none can lie over another, expand, or claim more bytes
    than there are.  Of the index at the end of the archive, which says the same for other programs, only the end is
    looked at.
    """
    at = 0
    while True:
        file.seek(at)
        start = file.read(_LOCAL_HEADER.size)
        if start[:4] == _CENTRAL and at:
            file.seek(max(0, size - _END_BYTES))
            end = file.read(_END_BYTES)
            if end[:4] != _END or end[-2:] != b"\0\0":
                raise _DamagedError  # cut short, or something was added
            return
        if len(start) < _LOCAL_HEADER.size or start[:4] != _LOCAL:
            raise _DamagedError
        _, _, flags, method, _, _, _, packed, num_bytes, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(start)
        name, extra = file.read(name_bytes), file.read(extra_bytes)
        if num_bytes == 0xFFFFFFFF and extra[:2] == b"\x01\x00" and len(extra) >= 20:
            num_bytes, packed = struct.unpack("<QQ", extra[4:20])
        at += _LOCAL_HEADER.size + name_bytes + extra_bytes
        # Flag 11 says that the name is UTF-8; encrypted, compressed or streamed members have others.
        if method != 0 or flags & ~0x800 or packed != num_bytes or num_bytes > size - at:
            raise _DamagedError
        text = name.decode("utf-8" if flags & 0x800 else "cp437")
        if not text.endswith(".npy"):
            raise _DamagedError
        yield text[: -len(".npy")], num_bytes
        at += num_bytes


def _header_of(members: Iterator[Tuple[str, int]], file: BinaryIO, name: str) -> Dict[str, Any]:
    """The facts, which are the first member."""
    member, num_bytes = next(members)
    if member != "meta" or num_bytes > META_BYTES:
        raise _DamagedError
    text = _array(file, num_bytes, _META_TYPES, "the facts")
    try:
        header = load_record(text.tobytes().decode("utf-8"), META_BYTES)
    except ValueError as error:
        raise DataError(f"{name} is damaged: its facts are not readable ({error})", _HINT) from None
    if misfit(header, _Header):
        raise DataError(f"{name} is not an ipucnn checkpoint", _HINT)
    if header["format"] != FORMAT:
        hint = _AGAIN if header["format"] == "ipucnn-checkpoint-1" else _HINT
        raise DataError(f"{name} has the format '{shown_value(header['format'])}', not '{FORMAT}'", hint)
    return header


def _array(file: BinaryIO, num_bytes: int, types: Tuple[str, ...], what: str) -> Any:
    """The array of a member of that length, at whose first byte the file stands.

    The header is matched, not evaluated.
    """
    start = file.read(10)
    if num_bytes < 10 or start[:8] != b"\x93NUMPY\x01\x00":
        raise _DamagedError
    header_bytes = int.from_bytes(start[8:10], "little")
    text = file.read(min(header_bytes, num_bytes - 10)).decode("latin-1")
    match = _ARRAY_HEADER.fullmatch(text)
    if match is None:
        kind = re.search(r"'descr': *(.{1,40})", text)
        if kind is None or types == _META_TYPES:
            raise _DamagedError
        raise DataError(
            f"{what} is of the type '{shown_value(kind.group(1))}', not {' or '.join(types)}", _HINT
        )
    kind_text, fortran, shape_text = match.groups()
    if kind_text not in types and types == _META_TYPES:
        raise _DamagedError
    if kind_text not in types:
        raise DataError(f"{what} is of the type '{shown_value(kind_text)}', not {' or '.join(types)}", _HINT)
    shape = tuple(int(number) for number in shape_text.replace(" ", "").split(",") if number)
    if fortran == "True" or len(shape) > 8:
        raise DataError(f"{what} is not stored row by row, in at most 8 dimensions", _HINT)
    wanted = np.dtype(kind_text).itemsize
    for length in shape:
        wanted *= length
    left = num_bytes - 10 - header_bytes
    if wanted != left:
        raise DataError(f"{what} has the shape {shape} and {left} bytes, not {wanted}", _HINT)
    data = file.read(left)
    if len(data) != left:
        raise _DamagedError
    try:
        return np.frombuffer(data, np.dtype(kind_text)).reshape(shape)
    except ValueError as error:  # beside a length of 0 there can be others that no array has
        raise _DamagedError from error


def assign_weights(
    variables: Mapping[str, KerasVariable], checkpoint: Checkpoint, *, what: str, skip: Container[str] = ()
) -> None:
    """Copies a checkpoint's weights into variables of the same names and shapes.

    Args:
        variables: tf.Variables by canonical name.
        checkpoint: what to copy.
        what: for the error, for example the path.
        skip: names left as they are.

    Raises:
        DataError: a weight is missing, superfluous or of another shape.
    """
    wanted = {name: v for name, v in variables.items() if name not in skip}
    for name, variable in wanted.items():
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
    for name, variable in wanted.items():
        variable.assign(checkpoint.weights[name].astype(np.float32, copy=False))
