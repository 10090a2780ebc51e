"""Reads Keras' weight files, and loads their weights into a model from ``build_model``.

Nothing in such a file is executed or deserialised.  For weights, only HDF5 data sets and the attributes with names of
layers are read.  A model's configuration, which can contain code (the function of a Lambda layer) or names of functions
to call, is read as plain values (``keras_config.py``).

Weights have one of three layouts:

- HDF5 of Keras 2 (``save_weights("w.h5")``; below ``model_weights`` for ``save("m.h5")``, also in Keras 3): the
  attribute ``layer_names`` lists the layers in the network's order, and ``weight_names`` of each layer its tensors;
- HDF5 of Keras 3 (``w.weights.h5``): ``layers/conv2d_1/vars/0``, counted per class of layer, without an order across
  classes; since about Keras 3.4 the attribute ``name`` of ``vars`` is the layer's name;
- a zip of Keras 3 (``m.keras``) that contains the second layout as ``model.weights.h5``.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np

from ipucnn.aliases import HdfItem, KerasModel, TfVariable
from ipucnn.documents import MAX_RECORD_BYTES, load_record
from ipucnn.errors import DataError, MissingError, UserError
from ipucnn.filesystem import open_regular, shown, user_error_of
from ipucnn.models.blueprint import Node
from ipucnn.models.keras_config import counted_from_zero, read_blueprint, read_nodes, snake_case
from ipucnn.models.names import base_name, named_weights
from ipucnn.text import counted, quoted

_OPTIONS = "--model-name, --norm-layer, --image-size, --base-filters"
_MODEL_HINT = f"name the network and options it was written with: {_OPTIONS}"
HINT = "give weights that Keras saved: .weights.h5, .h5 or .keras"
_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_FILTERS = (1, 2, 3)
"""HDF5's filters for deflate, shuffle and checksums; for any other filter HDF5 loads a library."""
_NO_WEIGHTS = ("rescaling", "seed_generator")
"""Kinds of layers whose values are not weights of the network."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer in a file or in a model.

    Attributes:
        name: the layer's name; "" if a file does not have it.
        kind: the layer's class in snake case; "" if a file does not have it.
        tensors: HDF5 data sets, not read yet, or variables, in the order of the layer's weights.
        weights: canonical names of the weights; only for a model.
        position: the layer's number among those of its kind; only for a file.
        is_statistics: whether it is a Normalization layer, whose mean and variance prepare the images.
        parts: the layers inside, if a file of Keras 2 lists a model in a model, or a layer of layers, as one.
    """

    name: str
    kind: str
    tensors: Tuple[Any, ...]
    weights: Tuple[str, ...] = ()
    position: int = 0
    is_statistics: bool = False
    parts: Tuple[LayerWeights, ...] = ()

    @property
    def shapes(self) -> List[Tuple[int, ...]]:
        """The shapes of the tensors."""
        return [tuple(int(n) for n in tensor.shape) for tensor in self.tensors]


@contextmanager
def _open_layers(path: Path, statistics: bool = False) -> Iterator[Tuple[List[LayerWeights], bool]]:
    """Opens a weight file, whose tensors can be read inside the ``with`` block.

    Args:
        statistics: whether to yield the Normalization layers, with mean and variance, in place of the others.

    Yields:
        Its layers with weights, and whether they are in the network's order.

    Raises:
        DataError: the file is absent, damaged, or not a Keras weight file.
        MissingError: h5py is not installed.
    """
    h5py = _h5py(path)
    try:
        with h5py.File(_hdf5_of(path), "r") as file:
            yield _read_layout(file, path, statistics)
    except UserError:
        raise
    except Exception as error:
        # For damaged files h5py raises OSError, KeyError, RuntimeError, ValueError and others.
        raise _damaged(error, path, HINT) from error


def _h5py(path: Path) -> Any:
    """The module h5py, which is imported for this file.

    Raises:
        MissingError: it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingError(
            f"reading {shown(path)} needs h5py: {error}", "install it with: python -m pip install h5py"
        ) from None
    return h5py


def _text(file: HdfItem, attribute: str) -> str:
    """An attribute of an HDF5 file that is one text; an array could repeat a long one without end.

    Raises:
        ValueError: it is something else.
    """
    if file.attrs.get_id(attribute).shape != ():
        raise ValueError(f"{attribute} is no text")
    return os.fsdecode(file.attrs[attribute])


def _is_hdf5(path: Path, hint: str = HINT) -> bool:
    """Whether a file is HDF5, by its first bytes; ``hint`` says what to give instead of an unusable one."""
    with open_regular(path, hint=hint) as handle:
        return handle.read(len(_HDF5)) == _HDF5


def _hdf5_of(path: Path) -> Any:
    """The argument for h5py: the path, or the HDF5 file inside a zip."""
    return str(path) if _is_hdf5(path) else io.BytesIO(_zip_member(path, "model.weights.h5", HINT))


def _zip_member(path: Path, name: str, hint: str) -> bytes:
    """A file inside of a zip; ``hint`` says what to give instead of an unusable one."""
    with open_regular(path, hint=hint) as handle:
        is_zip = handle.read(len(_ZIP)) == _ZIP
    if not is_zip:
        raise DataError(f"{shown(path)} was not saved by Keras: it is neither HDF5 nor a zip", hint)
    with zipfile.ZipFile(path) as archive:
        members = [entry for entry in archive.infolist() if entry.filename == name]
        if len(members) != 1:
            raise DataError(f"{shown(path)} was not saved by Keras: it holds no {name}", hint)
        if name.endswith(".json") and members[0].file_size > MAX_RECORD_BYTES:
            raise DataError(f"{shown(path)}: its {name} is larger than any network's", hint)
        return archive.read(members[0])


def read_configuration(path: Path, hint: str) -> Any:
    """Reads the configuration of the whole model in a file, as plain values; None for weights alone.

    Args:
        hint: what to give instead of an unusable file.

    Raises:
        DataError: the file is absent, damaged, larger than any network's, or not one that Keras saved.
    """
    try:
        if _is_hdf5(path, hint):
            return _hdf5_configuration(path)
        return load_record(_zip_member(path, "config.json", hint).decode("utf-8"))
    except UserError:
        raise
    except Exception as error:
        # For damaged zips zipfile and its decompressors raise BadZipFile, zlib.error, EOFError, RuntimeError and
        # others; the JSON reader raises ValueErrors.
        raise _damaged(error, path, hint) from error


def keras_of_file(path: Path) -> int:
    """The major version of the Keras that saved a whole model, which spelt its settings: also 2 wrote ``.keras``.

    Raises:
        DataError: the file is damaged.
    """
    try:
        if _is_hdf5(path):
            with _h5py(path).File(str(path), "r") as file:
                version = _text(file, "keras_version") if "keras_version" in file.attrs else "2"
        else:
            with zipfile.ZipFile(path) as archive:
                if "metadata.json" not in archive.namelist():
                    return 3  # written by hand
            version = load_record(_zip_member(path, "metadata.json", HINT).decode("utf-8"))["keras_version"]
        return int(version.split(".")[0])
    except UserError:
        raise
    except Exception as error:
        raise _damaged(error, path, HINT) from error  # see `read_configuration`


def _damaged(error: Exception, path: Path, hint: str) -> UserError:
    """The error of a file that a library cannot read: the machine's, else that the file is damaged."""
    reason = " ".join(str(error).split())[:200]
    return user_error_of(error) or DataError(f"{shown(path)} is damaged: {reason}", hint)


def read_model(path: Path) -> Optional[List[Node]]:
    """The nodes of a whole model in a file, with canonical names; None for weights alone.

    A model with several inputs or outputs, or a configuration that cannot be read, counts as weights alone.
    """
    try:
        config = read_configuration(path, HINT)
        if config is None:
            return None
        return read_nodes(path.name, str(config["class_name"]), config["config"], canonical=True)
    except (UserError, ImportError, OSError, RuntimeError, KeyError, TypeError, ValueError):
        return None  # reading the weights reports what is wrong with a damaged file


def has_statistics(path: Path) -> bool:
    """Whether a weight file has the mean and variance of a Normalization layer."""
    with _open_layers(path, statistics=True) as (layers, _):
        return bool(layers)


def _hdf5_configuration(path: Path) -> Any:
    """The configuration of the model in an HDF5 file that ``model.save`` wrote; None for weights alone."""
    with _h5py(path).File(str(path), "r") as file:
        if "model_config" not in file.attrs:
            return None
        text, is_compiled = _text(file, "model_config"), "training_config" in file.attrs
    config = load_record(text)
    # A ``.keras`` file has the optimizer and the loss under this key.
    return {"compile_config": is_compiled, **config}


def read_statistics(path: Path, node: Node) -> Optional[Tuple[np.ndarray, np.ndarray]]:
    """Mean and variance of a Normalization layer that were measured before the file was saved; None without them."""
    name = "_".join(node.place).replace("/", "_")
    with _open_layers(path, statistics=True) as (layers, _):
        for layer in layers:
            if name in (layer.name, layer.name.replace("/", "_")) and len(layer.tensors) == 2:
                mean, variance = (np.asarray(tensor[()], np.float64) for tensor in layer.tensors)
                return mean, variance
    return None


def _read_layout(file: HdfItem, path: Path, statistics: bool) -> Tuple[List[LayerWeights], bool]:
    root = _child(file, "model_weights", path) if "model_weights" in file else file
    if "layer_names" in root.attrs or "layer_names0" in root.attrs:
        listed, in_order = _legacy_layers(root, path), True
    elif "layers" in file:
        listed, in_order = _counted_layers(_child(file, "layers", path), path, set(), ""), False
    else:
        raise DataError(f"{path} is HDF5, but holds no layers of a Keras model", HINT)
    layers = [layer for layer in listed if layer.tensors and layer.is_statistics == statistics]
    if not layers and not statistics:
        raise DataError(f"{path} holds no weights", HINT)
    return layers, in_order


def _legacy_layers(root: HdfItem, path: Path) -> List[LayerWeights]:
    layers = []
    for name in _names(root, "layer_names"):
        group = _child(root, name, path)
        weights = _names(group, "weight_names")
        # The third one counts the images.
        is_statistics = [base_name(weight) for weight in weights] == ["mean", "variance", "count"]
        tensors = tuple(
            _tensor(group, weight, path) for weight in (weights[:2] if is_statistics else weights)
        )
        inside: Dict[str, List[Any]] = {}
        for weight, tensor in zip(weights, tensors):
            inside.setdefault(weight.rpartition("/")[0], []).append(tensor)
        # A model in a model that was built with the outer one has the outer one's name before its own.
        parts = [
            LayerWeights(f"{name}/{f'/{key}'.partition(f'/{name}/')[2] or key}", "", tuple(of_part))
            for key, of_part in inside.items()
        ]
        layers.append(
            LayerWeights(
                name, "", tensors, is_statistics=is_statistics, parts=tuple(parts) if len(parts) > 1 else ()
            )
        )
    return layers


def _names(group: HdfItem, attribute: str) -> List[str]:
    """The list of names in an attribute; Keras splits long lists into ``<attribute>0``, ``<attribute>1``, ..."""
    names, part = list(group.attrs.get(attribute, ())), 0
    while f"{attribute}{part}" in group.attrs:
        names += list(group.attrs[f"{attribute}{part}"])
        part += 1
    return [name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in names]


def _counted_layers(container: HdfItem, path: Path, seen: Set[int], prefix: str) -> List[LayerWeights]:
    """The layers below a ``layers`` group of Keras 3, with nested models flattened.

    Args:
        prefix: prefix for the names of the layers, from the names of the models around them.
    """
    import h5py

    layers: List[LayerWeights] = []
    for key in sorted(container, key=_count_of):
        kind, position = _count_of(key)
        if kind in _NO_WEIGHTS:
            continue
        group = _child(container, key, path)
        place = h5py.h5o.get_info(group.id).addr
        if place in seen or not isinstance(group, h5py.Group):
            raise DataError(
                f"{path} is no weight file of Keras: {group.name} is not a layer of its own", HINT
            )
        seen.add(place)
        variables = _child(group, "vars", path) if "vars" in group else {}
        name = str(getattr(variables, "attrs", {}).get("name", ""))
        if "layers" in group:
            inner = f"{prefix}{name}_" if name else ""
            layers += _counted_layers(_child(group, "layers", path), path, seen, inner)
            continue
        is_statistics = kind == "normalization"
        numbers = sorted(variables, key=int)[: 2 if is_statistics else None]
        tensors = tuple(_tensor(variables, number, path) for number in numbers)
        name = f"{prefix}{name}" if name else ""
        layers.append(LayerWeights(name, kind, tensors, position=position, is_statistics=is_statistics))
    return layers


def _count_of(key: str) -> Tuple[str, int]:
    """Splits a key into class and number: ``conv2d_3`` -> ("conv2d", 3); the first of a class has no number."""
    match = re.fullmatch(r"(.*?)(?:_(\d+))?", key, re.DOTALL)
    assert match is not None
    return match.group(1), int(match.group(2) or 0)


def _child(group: HdfItem, name: str, path: Path) -> HdfItem:
    """An object inside the file itself; links are refused, because they could open any other file on this machine."""
    import h5py

    for part in name.strip("/").split("/"):
        if not isinstance(group.get(part, getlink=True), h5py.HardLink):
            raise DataError(f"{path} is no weight file of Keras: {name} is absent, or a link elsewhere", HINT)
        group = group[part]
    return group


def _tensor(group: HdfItem, name: str, path: Path) -> HdfItem:
    import h5py

    tensor = _child(group, name, path)
    is_stored = isinstance(tensor, h5py.Dataset) and not (tensor.is_virtual or tensor.external)
    if is_stored and tensor.dtype.kind == "f":
        plist = tensor.id.get_create_plist()
        has_filters = all(plist.get_filter(i)[0] in _FILTERS for i in range(plist.get_nfilters()))
        if has_filters:
            return tensor
    raise DataError(f"{path} is no weight file of Keras: {tensor.name} is not a stored float tensor", HINT)


# --- into a model

# Class of a layer of this project -> the class in a file that stock Keras wrote.
_STOCK_KINDS = {"grouped_conv2d": "conv2d"}


def load_keras_weights(model: KerasModel, path: Path, new_head: bool = False) -> Tuple[List[str], List[str]]:
    """Copies all weights of a file into a model from ``build_model``.

    Args:
        model: the model.
        path: the file.
        new_head: whether the last layer may be for other classes than the file's; its weights then stay as they are.

    Returns:
        The names of the weights that stay as they are, and notes for the user, see :func:`read_keras_weights`.

    Raises:
        DataError: the file is absent, damaged, or of another model; the model is then unchanged.
    """
    values, notes = read_keras_weights(model, path, new_head)
    weights = named_weights(model)
    for name, array in values.items():
        weights[name].assign(array)
    return [name for name in weights if name not in values], notes


def read_keras_weights(
    model: KerasModel, path: Path, new_head: bool = False
) -> Tuple[Dict[str, np.ndarray], List[str]]:
    """Reads the weights of a file, by the canonical names of a model from ``build_model``.

    Layers are matched by their names if all names and shapes agree: canonical ones, from the configuration of a whole
    model, or those in the file, also numbered from zero.  Otherwise they are matched by position: in the network's
    order if the file has it, else by number among the layers of one class.

    Returns:
        The weights, without those of a last layer of other shapes if there may be a ``new_head``; and a note for the
        user if they were matched by position.

    Raises:
        DataError: the file is absent, damaged, or of another model, or positions do not tell its layers apart.
    """
    targets = _targets(model)
    with _open_layers(path) as (layers, in_order):
        layers = _without_subsampling(layers, model)
        pairs, notes = _match(layers, in_order, targets, path, model, new_head)
        pairs = [(layer, target) for layer, target in pairs if layer.shapes == target.shapes]
        values = [[np.asarray(tensor[()], np.float32) for tensor in layer.tensors] for layer, _ in pairs]
    for (_, target), arrays in zip(pairs, values):
        if not all(np.isfinite(array).all() for array in arrays):
            raise DataError(
                f"{path}: the weights of layer {target.name} are not finite",
                "its training diverged; use others",
            )
    return {
        name: array
        for (_, target), arrays in zip(pairs, values)
        for name, array in zip(target.weights, arrays)
    }, notes


def _without_subsampling(layers: List[LayerWeights], model: KerasModel) -> List[LayerWeights]:
    """The layers without the constant convolutions that ``editing.stock_model`` writes in place of SubsamplePad."""
    left = sum(type(layer).__name__ == "SubsamplePad" for layer in model.layers)
    kept = []
    for layer in layers:
        shape = layer.shapes[0]
        is_identity = len(layer.tensors) == 1 and len(shape) == 4 and shape[:2] == (1, 1)
        if left and is_identity and np.array_equal(layer.tensors[0][()][0, 0], np.eye(shape[2], shape[3])):
            left -= 1
        else:
            kept.append(layer)
    return kept


def _targets(model: KerasModel) -> List[LayerWeights]:
    layers: Dict[str, Dict[str, TfVariable]] = {}
    for name, variable in named_weights(model).items():
        layers.setdefault(name.rpartition("/")[0], {})[name] = variable
    kinds = {layer.name: snake_case(type(layer).__name__) for layer in model.layers}
    return [
        LayerWeights(name, kinds[name], tuple(variables.values()), tuple(variables))
        for name, variables in layers.items()
    ]


def _match(
    layers: List[LayerWeights],
    in_order: bool,
    targets: Sequence[LayerWeights],
    path: Path,
    built: KerasModel,
    new_head: bool,
) -> Tuple[List[Tuple[LayerWeights, LayerWeights]], List[str]]:
    """Pairs of layers of the file and of the model, with equal shapes except for a new head; and notes for the user.

    Raises:
        DataError: the layers cannot be paired.
    """
    model = built.name

    def fit(layer: LayerWeights, target: LayerWeights) -> bool:
        is_head = new_head and target is targets[-1]
        return layer.shapes == target.shapes or (is_head and _differ_in_classes(layer.shapes, target.shapes))

    if len(layers) != len(targets):
        # Frozen layers come last in a model in a model, so that only names tell its layers apart.
        in_order = in_order and not any(layer.parts for layer in layers)
        layers = [part for layer in layers for part in layer.parts or (layer,)]
    if len(layers) != len(targets):
        raise DataError(
            f"{path} is of another model: it has {len(layers)} layers with weights, "
            f"{model} has {len(targets)}",
            f"{_MODEL_HINT}; or the file's own network: --model-name {quoted(path)}"
            if read_model(path) is not None
            else _MODEL_HINT,
        )
    for named in _named(layers, targets, path):
        if all(target.name in named and fit(named[target.name], target) for target in targets):
            return [(named[target.name], target) for target in targets], []
    ordered = layers if in_order else _by_class(layers, targets)
    if ordered is None:
        raise DataError(
            f"{path} is of another model: its layers are of other classes than {model}'s", _MODEL_HINT
        )
    for layer, target in zip(ordered, targets):
        if not fit(layer, target):
            name = f"layer {layer.name}" if layer.name else f"{layer.kind} number {layer.position + 1}"
            raise DataError(
                f"{path} does not fit: its {name} has weights of {_shown(layer.shapes)}, "
                f"{model}'s {target.name} of {_shown(target.shapes)}",
                _MODEL_HINT
                if target is not targets[-1]
                else "use a data set with as many classes, or other weights"
                if _differ_in_classes(layer.shapes, target.shapes)
                else "give images of the size for which it was saved, with --image-size, or other weights",
            )
    confusable = _confusable(built, targets, in_order)
    if confusable is not None:
        raise DataError(
            f"{path} does not name its layers as {model} does, and {' and '.join(confusable)} have weights of equal "
            "shapes and no order, so it does not tell which are whose",
            f"save the whole model as .keras, whose layers have the names of {model}'s",
        )
    count = counted(len(targets), "layer")
    return list(zip(ordered, targets)), [
        f"the weights of {count} in {shown(path)} are matched by position, because their names are not {model}'s"
    ]


def _named(
    layers: Sequence[LayerWeights], targets: Sequence[LayerWeights], path: Path
) -> Iterator[Dict[str, LayerWeights]]:
    """Yields the layers of a file by name: by canonical names, by the names in the file, and by those from zero.

    Of layers in models in models Keras 2 writes the outermost name and the innermost one.  The configuration of a whole
    model says which they are; without one, names that end alike are tried last.
    """
    own = {layer.name.replace("/", "_"): layer for layer in layers}
    if len(own) < len(layers):
        return  # names are absent, or do not tell layers apart
    nodes = read_model(path)
    if nodes is not None:
        for ends in (False, True):
            found: Dict[str, Dict[Tuple[str, ...], str]] = {}
            for place, name in ((node.place, node.layer) for node in nodes if node.place):
                parts = (*place[:1], *place[1:][-1:]) if ends else place
                found.setdefault("_".join(parts).replace("/", "_"), {}).setdefault(place, name)
            canonical = {name: next(iter(of.values())) for name, of in found.items() if len(of) == 1}
            yield {canonical.get(name, name): layer for name, layer in own.items()}
    yield own
    bases = {name: re.sub(r"_\d+$", "", name) for name in own}
    from_zero = counted_from_zero((name, name, base, (base,)) for name, base in bases.items())
    yield {from_zero[name]: layer for name, layer in own.items()}
    fitting: Dict[str, List[LayerWeights]] = {}
    for layer in layers:
        outer, _, inner = layer.name.partition("/")
        for target in targets:
            if target.name in (layer.name, f"{outer}_{inner}") or (
                target.name.startswith(f"{outer}_") and target.name.endswith(f"_{inner}")
            ):
                fitting.setdefault(target.name, []).append(layer)
    named = {name: of_target[0] for name, of_target in fitting.items() if len(of_target) == 1}
    if len({layer.name for layer in named.values()}) == len(layers):
        yield named


def _confusable(
    model: KerasModel, targets: Sequence[LayerWeights], in_order: bool
) -> Optional[Tuple[str, str]]:
    """Names of two layers with equal shapes of which neither reads the other's output; None if there are none.

    Args:
        in_order: whether layers of different classes may be mistaken for each other, too.
    """
    before: Dict[str, Set[str]] = {}
    for node in read_blueprint(model).nodes:
        before[node.name] = set(node.inputs).union(*(before[source] for source in node.inputs))
    for i, first in enumerate(targets):
        for second in targets[i + 1 :]:
            is_alike = first.shapes == second.shapes and (in_order or first.kind == second.kind)
            if is_alike and first.name not in before[second.name] and second.name not in before[first.name]:
                return first.name, second.name
    return None


def _by_class(layers: List[LayerWeights], targets: Sequence[LayerWeights]) -> Optional[List[LayerWeights]]:
    """The file's layers in the order of the targets, matched by number within a class; None if the classes differ."""
    of_file = Counter(layer.kind for layer in layers)
    for names in ({}, _STOCK_KINDS):  # type: Dict[str, str]
        kinds = [names.get(target.kind, target.kind) for target in targets]
        if Counter(kinds) == of_file:
            # The file's layers are in the order of their numbers, within nested models too.
            waiting = {kind: iter([layer for layer in layers if layer.kind == kind]) for kind in of_file}
            return [next(waiting[kind]) for kind in kinds]
    return None


def _differ_in_classes(shapes: Sequence[Tuple[int, ...]], others: Sequence[Tuple[int, ...]]) -> bool:
    """Whether the weights of two layers differ in their last dimension alone, the number of classes of a last layer."""
    return [shape[:-1] for shape in shapes] == [shape[:-1] for shape in others] and shapes != others


def _shown(shapes: Sequence[Tuple[int, ...]]) -> str:
    return " + ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
