"""Reads the tensors of weight files that Keras wrote.  Nothing in such a file is executed or deserialised.

Only HDF5 data sets and the attributes that name layers are read.  The model's configuration, which can hold
code (the function of a Lambda layer) or names of functions to call, is never looked at.  Three layouts:

- HDF5 of Keras 2 (``save_weights("w.h5")``, below ``model_weights`` with ``save("m.h5")``, also of Keras 3): the
  attribute ``layer_names`` lists the layers in the network's order, ``weight_names`` of each its tensors;
- HDF5 of Keras 3 (``w.weights.h5``): ``layers/conv2d_1/vars/0``, counted per class of layer, in no order across
  classes; since Keras 3.4 or so the attribute ``name`` of ``vars`` is the layer's name;
- a zip of Keras 3 (``m.keras``) that holds the latter as ``model.weights.h5``.
"""

import io
import re
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple

from ipucnn.errors import DataError, MissingError, UserError

HINT = "give weights that Keras saved: .weights.h5, .h5 or .keras"
EXTENSIONS = (".h5", ".hdf5", ".keras")
_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_ZIP_MEMBER = "model.weights.h5"
# Layers of preprocessing and of random numbers: what they hold are no weights of the network.
_NO_WEIGHTS = re.compile(r"(normalization|rescaling|seed_generator)(_\d+)?")


@dataclass(frozen=True)
class FileLayer:
    """A layer of a file that has weights.

    Attributes:
        name: the layer's name, "" where the file does not tell.
        kind: its class in snake case, "" where the file does not tell.
        position: its number among the layers of its kind.
        tensors: HDF5 data sets in the order of the layer's weights, not read yet.
    """

    name: str
    kind: str
    position: int
    tensors: Tuple[Any, ...]

    @property
    def shapes(self) -> List[Tuple[int, ...]]:
        """The shapes of the tensors."""
        return [tuple(int(n) for n in tensor.shape) for tensor in self.tensors]


@dataclass(frozen=True)
class KerasFile:
    """The layers with weights of a file; ``in_order`` says whether they stand in the network's order."""

    layers: Tuple[FileLayer, ...]
    in_order: bool


def is_keras_file(path: Path) -> bool:
    """Whether a path is a weight file of Keras by its name."""
    return path.name.lower().endswith(EXTENSIONS)


@contextmanager
def open_keras_file(path: Path) -> Iterator[KerasFile]:
    """Opens a weight file; its tensors can be read inside the ``with``.

    Raises:
        DataError: absent, damaged, or not a weight file of Keras.
        MissingError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingError(
            f"reading {path} needs h5py: {error}", "install it with: python -m pip install h5py"
        ) from None
    try:
        with h5py.File(_hdf5_of(path), "r") as file:
            yield _read_layout(file, path)
    except UserError:
        raise
    except Exception as error:
        # A damaged file makes h5py raise OSError, KeyError, RuntimeError, ValueError and more.
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())}", HINT) from error


def _hdf5_of(path: Path) -> Any:
    """What h5py opens: the path, or the HDF5 file inside a zip."""
    try:
        with open(path, "rb") as handle:
            start = handle.read(8)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", HINT) from None
    if start == _HDF5:
        return str(path)
    if not start.startswith(_ZIP):
        raise DataError(f"{path} is no weight file of Keras: it is neither HDF5 nor a zip", HINT)
    with zipfile.ZipFile(path) as archive:
        if _ZIP_MEMBER not in archive.namelist():
            raise DataError(f"{path} is no weight file of Keras: it holds no {_ZIP_MEMBER}", HINT)
        return io.BytesIO(archive.read(_ZIP_MEMBER))


def _read_layout(file: Any, path: Path) -> KerasFile:
    root = _child(file, "model_weights", path) if "model_weights" in file else file
    if "layer_names" in root.attrs or "layer_names0" in root.attrs:
        found, in_order = _legacy_layers(root, path), True
    elif "layers" in file:
        found, in_order = _counted_layers(_child(file, "layers", path), path, set()), False
    else:
        raise DataError(f"{path} is HDF5, but holds no layers of a Keras model", HINT)
    layers = tuple(layer for layer in found if layer.tensors)
    if not layers:
        raise DataError(f"{path} holds no weights", HINT)
    return KerasFile(layers, in_order)


def _legacy_layers(root: Any, path: Path) -> List[FileLayer]:
    layers = []
    for name in _names(root, "layer_names"):
        if _NO_WEIGHTS.fullmatch(name):
            continue
        group = _child(root, name, path)
        tensors = tuple(_tensor(group, weight, path) for weight in _names(group, "weight_names"))
        layers.append(FileLayer(name, "", 0, tensors))
    return layers


def _names(group: Any, attribute: str) -> List[str]:
    """A list of names in an attribute; Keras cuts long ones into ``<attribute>0``, ``<attribute>1``, ..."""
    if attribute in group.attrs:
        found = list(group.attrs[attribute])
    else:
        found, part = [], 0
        while f"{attribute}{part}" in group.attrs:
            found += list(group.attrs[f"{attribute}{part}"])
            part += 1
    return [name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in found]


def _counted_layers(container: Any, path: Path, seen: Set[Any]) -> List[FileLayer]:
    """The layers below a ``layers`` group of Keras 3, nested models flattened."""
    import h5py

    layers: List[FileLayer] = []
    for key in sorted(container, key=_count_of):
        if _NO_WEIGHTS.fullmatch(key):
            continue
        group = _child(container, key, path)
        place = h5py.h5o.get_info(group.id).addr
        if place in seen or not isinstance(group, h5py.Group):
            raise DataError(
                f"{path} is no weight file of Keras: {group.name} is not a layer of its own", HINT
            )
        seen.add(place)
        if "layers" in group:
            layers += _counted_layers(_child(group, "layers", path), path, seen)
            continue
        kind, position = _count_of(key)
        if "vars" in group:
            variables = _child(group, "vars", path)
            name = variables.attrs.get("name", "")
            tensors = tuple(_tensor(variables, number, path) for number in sorted(variables, key=int))
            layers.append(FileLayer(str(name), kind, position, tensors))
    return layers


def _count_of(key: str) -> Tuple[str, int]:
    """``conv2d_3`` -> ("conv2d", 3); the first of a class has no number."""
    match = re.fullmatch(r"(.*?)(?:_(\d+))?", key, re.DOTALL)
    assert match is not None
    return match.group(1), int(match.group(2) or 0)


def _child(group: Any, name: str, path: Path) -> Any:
    """An object inside the file itself; links could lead into any other file of this machine."""
    import h5py

    for part in name.strip("/").split("/"):
        if not isinstance(group.get(part, getlink=True), h5py.HardLink):
            raise DataError(f"{path} is no weight file of Keras: {name} is absent, or a link elsewhere", HINT)
        group = group[part]
    return group


def _tensor(group: Any, name: str, path: Path) -> Any:
    import h5py

    tensor = _child(group, name, path)
    if (
        not isinstance(tensor, h5py.Dataset)
        or tensor.is_virtual
        or tensor.external
        or tensor.dtype.kind != "f"
    ):
        raise DataError(
            f"{path} is no weight file of Keras: {tensor.name} is not a stored float tensor", HINT
        )
    return tensor


def by_kind(layers: Tuple[FileLayer, ...]) -> Dict[str, List[FileLayer]]:
    """Layers of each class in the order of their numbers; nested models keep theirs."""
    found: Dict[str, List[FileLayer]] = {}
    for layer in layers:
        found.setdefault(layer.kind, []).append(layer)
    return found
