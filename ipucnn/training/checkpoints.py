"""Checkpoints: one portable file that Keras 2.6 and Keras 3 models both load.

An uncompressed NumPy archive: ``weights/<layer>/<weight>`` and ``slots/<layer>/<weight>/<slot>`` in the
project's canonical names, and ``meta``, a JSON text with the run's position and a SHA-256 over all arrays.
Nothing in it is executed when it is read.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence, Tuple

import numpy as np

from ipucnn.errors import DataError

FORMAT = "ipucnn-checkpoint-1"
_HINT = "give a checkpoint or run folder that `ipucnn train` wrote"
_ZIP = b"PK\x03\x04"


@dataclass
class Checkpoint:
    """A read checkpoint.

    Attributes:
        weights: float32 arrays by canonical name.
        slots: optimizer state by ``<weight>/<slot>``.
        meta: ``model``, ``num_classes``, ``input_shape``, ``weight_updates``, ``seed`` (a read checkpoint has
            them) and whatever else the writer put in.
    """

    weights: Dict[str, Any]
    slots: Dict[str, Any]
    meta: Dict[str, Any] = field(default_factory=dict)


def _digest(arrays: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def save_checkpoint(
    path: Path, weights: Mapping[str, Any], slots: Mapping[str, Any], meta: Mapping[str, Any]
) -> None:
    """Writes a checkpoint to ``path`` (not atomic: see ``ipucnn.filesystem.write_atomically``).

    Args:
        path: the file; its name need not end in .npz.
        weights, slots: arrays by name.
        meta: JSON-able facts.
    """
    arrays = {f"weights/{k}": np.asarray(v) for k, v in weights.items()}
    arrays.update({f"slots/{k}": np.asarray(v) for k, v in slots.items()})
    header = {"format": FORMAT, "sha256": _digest(arrays), **meta}
    text: Any = np.frombuffer(json.dumps(header).encode("utf-8"), dtype=np.uint8)
    # Not np.savez: it takes the names as keyword arguments and stamps the time of day into the archive.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in {"meta": text, **arrays}.items():
            entry = zipfile.ZipInfo(name + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(entry, "w", force_zip64=True) as handle:
                np.lib.format.write_array(handle, np.asarray(array, order="C"), allow_pickle=False)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        DataError: absent, not a checkpoint, damaged, or without the facts that every checkpoint has.
    """
    header, arrays = _read(path)
    if header["format"] != FORMAT:
        raise DataError(f"checkpoint {path} has the unknown format {header['format']!r}", _HINT)
    if _digest(arrays) != header["sha256"]:
        raise DataError(f"checkpoint {path} is damaged: its checksum does not match", _HINT)
    _check_facts(header, path, _HINT)
    return Checkpoint(
        {k[len("weights/") :]: v for k, v in arrays.items() if k.startswith("weights/")},
        {k[len("slots/") :]: v for k, v in arrays.items() if k.startswith("slots/")},
        {k: v for k, v in header.items() if k not in ("format", "sha256")},
    )


def read_meta(path: Path) -> Dict[str, Any]:
    """The facts of a checkpoint without its arrays: for a look at what it is; nothing is verified.

    Raises:
        DataError: absent, or not a checkpoint.
    """
    return _read(path, ("meta",))[0]


def _read(path: Path, names: Sequence[str] = ()) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """The facts and the arrays of a checkpoint: those named, or all.

    Raises:
        DataError: absent, or not a checkpoint.
    """
    hint = _HINT
    if not path.is_file():
        raise DataError(f"checkpoint {path} does not exist", hint)
    try:
        with open(path, "rb") as handle:
            start = handle.read(len(_ZIP))
    except OSError as error:
        raise DataError(f"checkpoint {path} cannot be read: {error.strerror or error}", hint) from None
    if start != _ZIP:
        # np.load would take it for a pickle, and advise to load it unsafely.
        raise DataError(f"{path} is damaged or no checkpoint", hint)
    try:
        # NumPy 1.19 prints a traceback of its own where it finds out itself that an archive is broken.
        zipfile.ZipFile(str(path)).close()
        with np.load(str(path), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in names or archive.files}
        header = json.loads(bytes(arrays.pop("meta")).decode("utf-8"))
        if not {"format", "sha256"} <= set(header):
            raise KeyError
    except KeyError:
        raise DataError(f"{path} is not an ipucnn checkpoint", hint) from None
    except Exception as error:
        # A damaged archive makes zipfile and NumPy raise almost anything, from BadZipFile to NotImplementedError.
        # What they say is about their own options, and worth reading with --verbose only.
        raise DataError(f"{path} is damaged or no checkpoint", hint) from error
    return header, arrays


def _check_facts(meta: Mapping[str, Any], path: Path, hint: str) -> None:
    """Refuses a checkpoint that another program wrote, before its user meets a KeyError."""
    expected = {
        "model": lambda value: isinstance(value, str),
        "num_classes": lambda value: _is_count(value) and value > 0,
        "input_shape": lambda value: (
            isinstance(value, list) and len(value) == 3 and all(_is_count(n) and n > 0 for n in value)
        ),
        "weight_updates": _is_count,
        "seed": lambda value: isinstance(value, int),
    }
    for name, is_right in expected.items():
        if name not in meta:
            raise DataError(f"checkpoint {path} lacks {name}", hint)
        if not is_right(meta[name]):
            raise DataError(f"checkpoint {path} has the {name} {meta[name]!r}", hint)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def assign_weights(
    variables: Mapping[str, Any], checkpoint: Checkpoint, *, what: str, skip: Any = ()
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
