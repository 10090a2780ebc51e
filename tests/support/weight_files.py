"""Weight files as Keras writes them, and damaged ones; checkpoints that lack something."""

import zipfile
from pathlib import Path
from typing import Any, Dict, Optional

import h5py
import numpy as np

from ipucnn.training.checkpoints import load_checkpoint, save_checkpoint

Layers = Dict[str, Dict[str, Any]]


def layers_of(checkpoint: Path) -> Layers:
    """Returns layer -> its weights, in the network's order, of a checkpoint of LeNet."""
    layers: Layers = {}
    for name, value in load_checkpoint(checkpoint).weights.items():
        layers.setdefault(name.split("/")[0], {})[name.split("/")[1]] = value
    order = ["conv1", "conv3", "dense5", "dense6", "dense7"]
    assert sorted(layers) == order
    return {name: {w: layers[name][w] for w in ("kernel", "bias")} for name in order}


def write_keras_2(path: Path, layers: Layers, below: Optional[str] = None) -> None:
    """Writes weights as Keras 2 does."""
    with h5py.File(str(path), "w") as file:
        root = file.create_group(below) if below else file
        root.attrs["layer_names"] = [name.encode() for name in ["input", *layers]]
        for name, weights in {"input": {}, **layers}.items():
            group = root.create_group(name)
            group.attrs["weight_names"] = [f"{name}/{w}:0".encode() for w in weights]
            for weight, value in weights.items():
                group[f"{name}/{weight}:0"] = value


def write_keras_3(path: Path, layers: Layers, with_names: bool = True) -> None:
    """Writes weights as Keras 3 does."""
    with h5py.File(str(path), "w") as file:
        counts: Dict[str, int] = {}
        for name, weights in layers.items():
            kind = "conv2d" if name.startswith("conv") else "dense"
            number = counts.get(kind, 0)
            counts[kind] = number + 1
            variables = file.create_group(f"layers/{kind}{f'_{number}' if number else ''}/vars")
            if with_names:
                variables.attrs["name"] = name
            for i, value in enumerate(weights.values()):
                variables[str(i)] = value
        file.create_group("layers/dropout/seed_generator/vars")["0"] = np.zeros(2, np.uint32)
        file.create_group("optimizer/vars")["0"] = np.zeros((), np.int64)


def write_weight_files(folder: Path, checkpoint: Path) -> None:
    """Writes a whole weight file, good.h5, and damaged or unsuitable ones, from a checkpoint of LeNet."""
    layers, saved = layers_of(checkpoint), load_checkpoint(checkpoint)
    write_keras_2(folder / "good.h5", layers)
    (folder / "empty.keras").write_bytes(b"")
    with zipfile.ZipFile(str(folder / "other.keras"), "w") as archive:
        archive.writestr("readme", "x")
    with h5py.File(str(folder / "foreign.h5"), "w") as file:
        file["data"] = np.zeros(3)
    write_keras_2(folder / "few.h5", dict(list(layers.items())[:-1]))
    three = {"kernel": np.zeros((84, 3)), "bias": np.zeros(3)}
    write_keras_2(folder / "classes.h5", {**layers, "dense7": three})
    write_keras_3(
        folder / "shape.h5", {**layers, "conv3": {"kernel": np.zeros((3, 3, 6, 16)), "bias": np.zeros(16)}}
    )
    not_finite = {**layers["dense6"], "bias": np.full(84, np.nan, np.float32)}
    write_keras_2(folder / "nan.h5", {**layers, "dense6": not_finite})
    write_keras_2(folder / "link.h5", layers)
    with h5py.File(str(folder / "link.h5"), "r+") as file:
        del file["conv1/conv1/kernel:0"]
        file["conv1/conv1/kernel:0"] = h5py.ExternalLink("good.h5", "conv1/conv1/kernel:0")
    write_keras_3(folder / "loop.h5", layers)
    with h5py.File(str(folder / "loop.h5"), "r+") as file:
        file["layers/functional/layers"] = file["layers"]
    np.save(str(folder / "array.npy"), np.array([{}], dtype=object))
    save_checkpoint(folder / "bare.npz", saved.weights, {}, {"model": "lenet"})
    other = {**saved.meta, "config": saved.meta["config"].replace("lenet", "mnist_cnn")}
    save_checkpoint(folder / "mixed.npz", saved.weights, {}, other)
    for name, lacking in (("seedless.npz", "seed"), ("classless.npz", "class_names")):
        rest = {key: value for key, value in saved.meta.items() if key != lacking}
        save_checkpoint(folder / name, saved.weights, {}, rest)
