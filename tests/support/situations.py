"""Situations in which commands of ``tests/refusals`` are typed: each fills the current folder."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Callable, Dict

import pytest
from PIL import Image

from ipucnn import cli
from ipucnn.runs.requests import FORMATS
from ipucnn.runs.runtimes import missing_packages
from support.data_sets import noise, write_class_folders, write_mnist, write_pairs
from support.own_networks import RESIDUAL
from support.trained_runs import train
from support.weight_files import write_weight_files


def _photographs() -> None:
    write_class_folders(
        Path("photos"), {(part, name): 2 for part in ("train", "val") for name in ("ant", "bee")}
    )


def _masks() -> None:
    write_pairs(Path("masks"), [(noise(k, 24, 20, 3), noise(k, 24, 20) // 128) for k in range(4)])


def _nothing() -> None:
    pass


_LENET = "lenet --dataset digits --limit-train 16 --limit-eval 8 --num-epochs 2 --seed 7 --micro-batch-size 4"
_UNET = (
    "unet --dataset membranes --limit-train 4 --limit-eval 1 --num-epochs 1 --image-size 204 --base-filters 2"
)


@functools.lru_cache(maxsize=None)
def _trained(line: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ipucnn-tests-"))
    atexit.register(shutil.rmtree, str(folder), ignore_errors=True)
    return train(folder / "run", line, lightly=True)


def _copy_run(line: str, name: str) -> None:
    shutil.copytree(str(_trained(line)), name)


@functools.lru_cache(maxsize=None)
def _weight_files() -> Path:
    folder = _trained(_LENET).parent / "weights"
    folder.mkdir()
    write_weight_files(folder, _trained(_LENET) / "checkpoints" / "last.npz")
    return folder


def _copy_files(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.copy(str(path), path.name)


@functools.lru_cache(maxsize=None)
def _plan(words: str) -> str:
    assert cli.run([*words.split(), "--save", "plan.yml"]) == 0
    return Path("plan.yml").read_text(encoding="utf-8")


def _write_plan(words: str) -> None:
    Path("plan.yml").write_text(_plan(words), encoding="utf-8")


def _layer_graph() -> None:
    from ipucnn import cli

    words = ("plan-splits", "lenet", "--dataset", "digits", "--stages", "2")
    assert cli.run([*words, "--save-graph", "graph.json"]) == 0


def _images() -> None:
    Path("in").mkdir()
    for k in range(2):
        Image.fromarray(noise(k, 8, 8)).save(f"in/{k}.png")


def _packages_for_exports() -> None:
    missing = [name for form in FORMATS for name in missing_packages(form)]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed")


SITUATIONS: Dict[str, Callable[[], object]] = {
    "nothing": _nothing,
    "TensorFlow": _nothing,  # the command may import it
    "photographs": _photographs,
    "masks": _masks,
    "an own network": lambda: Path("net.py").write_text(RESIDUAL),
    "files of mnist": lambda: write_mnist(Path("data")),
    "a plan": lambda: _write_plan("plan-splits lenet --stages 2 --dataset digits"),
    "a plan for inference": lambda: _write_plan("plan-splits lenet --stages 2 --dataset digits --inference"),
    "a layer graph": _layer_graph,
    "images": _images,
    "an image of cells": lambda: Image.fromarray(noise(0, 204, 204)).save("x.png"),
    "a run": lambda: _copy_run(_LENET, "run"),
    "weight files": lambda: _copy_files(_weight_files()),
    "a run of a U-Net": lambda: _copy_run(_UNET, "cells"),
    "folds": lambda: _copy_run(f"{_LENET} --kfold 2", "folds"),
    "packages for exports": _packages_for_exports,
    "a file": lambda: Path("file").write_text("x"),
    "a folder": lambda: Path("folder").mkdir(),
    "a circular link": lambda: Path("circle").symlink_to("circle"),
}


def make_situation(name: str) -> None:
    """Fills the current folder; ``a run with OPTIONS`` is a run of LeNet with these options of ``train``, too."""
    beginning = "a run with "
    if name.startswith(beginning):
        _copy_run(f"{_LENET} {name[len(beginning) :]}", "run")
    else:
        SITUATIONS[name]()
