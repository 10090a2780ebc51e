"""Runs that tests evaluate, predict with and export; those that several files use are trained on first use."""

import atexit
import functools
import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import pytest
from light_training import train_lightly

# Exports need weights and statistics, and no learning.
_LIGHT = ("resnet",)
_LINES = {
    "lenet": "lenet --dataset digits --limit-train 320 --limit-eval 37 --num-epochs 2 --seed 7 --micro-batch-size 32",
    "resnet": "cifar_resnet8 --dataset digits --limit-train 64 --limit-eval 40 --num-epochs 1 --seed 1 "
    "--micro-batch-size 8 --no-validation",
    "unet": "unet --dataset membranes --limit-train 4 --limit-eval 2 --num-epochs 1 --seed 7 --image-size 204 "
    "--base-filters 2",
}


def train(folder: Path, line: str, lightly: bool = False) -> Path:
    """Runs ``ipucnn train LINE`` and returns the run folder.

    Args:
        folder: the run folder.
        line: the words after ``ipucnn train``.
        lightly: whether to compile nothing, see ``light_training``.
    """
    from ipucnn import cli

    with pytest.MonkeyPatch.context() as patch:
        if lightly:
            train_lightly(patch)
        assert cli.run(["train", *shlex.split(line), "--run-dir", str(folder)]) == 0
    return folder


def rows(folder: Union[str, Path], event: Optional[str] = None) -> List[Dict[str, Any]]:
    """Returns the rows of a run's history, or those of one kind of event."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if event in (None, row["event"])]


def report_of(folder: Union[str, Path]) -> Dict[str, Any]:
    """Returns the report in a run folder."""
    return json.loads((Path(folder) / "report.json").read_text())


@functools.lru_cache(maxsize=None)
def run_of(name: str) -> Path:
    """Returns the run folder, which no test may change."""
    folder = Path(tempfile.mkdtemp(prefix="ipucnn-tests-")) / name
    atexit.register(shutil.rmtree, str(folder.parent), ignore_errors=True)
    return train(folder, _LINES[name], lightly=name in _LIGHT)
