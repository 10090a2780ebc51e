"""Trained runs that several test files evaluate, predict with and export; each is trained on first use."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

_LINES = {
    "lenet": "lenet --dataset digits --limit-train 320 --limit-eval 37 --num-epochs 2 --seed 7 --micro-batch-size 32",
    "resnet": "cifar_resnet8 --dataset digits --limit-train 64 --limit-eval 40 --num-epochs 1 --seed 1 "
    "--micro-batch-size 8 --no-validation",
    "unet": "unet --dataset membranes --limit-train 4 --limit-eval 2 --num-epochs 1 --seed 7 --image-size 204 "
    "--base-filters 2",
}


@functools.lru_cache(maxsize=None)
def run_of(name: str) -> Path:
    """Returns the run folder, which no test may change."""
    from ipucnn import cli

    folder = Path(tempfile.mkdtemp(prefix="ipucnn-tests-")) / name
    atexit.register(shutil.rmtree, str(folder.parent), ignore_errors=True)
    assert cli.run(["train", *_LINES[name].split(), "--run-dir", str(folder)]) == 0
    return folder
