"""Runs in several processes: their options, their start, and their results."""

import filecmp
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ipucnn.machine import num_cores
from ipucnn.sessions.group import Alone

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from ipucnn.__main__ import main; main()"


# The launcher of the MPI in the extra `mpi`, which `dev` includes.
MPIEXEC = Path(sysconfig.get_path("scripts")) / "mpiexec"
needs_mpi = pytest.mark.skipif(
    not MPIEXEC.exists(), reason="MPICH is not installed: pip install 'ipucnn[mpi]'"
)


FLAGS = (
    "cifar_resnet8 --dataset digits --limit-train 16 --limit-eval 9 --seed 1 --micro-batch-size 2 "
    "--gradient-accumulation-count 2 --num-replicas 2 --num-epochs 1 --image-size 8 --validation-micro-batch-size 4 "
    f"--max-workers 2 --precise-batch-norm 0 --threads {num_cores()}"
).split()


def with_values(flags, **values):
    """Returns flags with other values; a value of None removes the flag."""
    flags = list(flags)
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if flag in flags:
            place = flags.index(flag)
            del flags[place : place + 2]
        flags += [] if value is None else [flag, str(value)]
    return flags


def environment(**more):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **more,
    }


def completed(folder, words, **more):
    """Runs words after ``python``, or a program given by its absolute path, and returns the completed process."""
    words = [*([] if str(words[0]).startswith("/") else [sys.executable]), *map(str, words)]
    return subprocess.run(
        words, cwd=str(folder), env=environment(**more), capture_output=True, text=True, timeout=580
    )


def mpiexec(folder, *programs, count=2, **more):
    """Runs words after ``python`` in ``count`` processes, or several lists of words in one process each."""
    parts = [["-n", count, sys.executable, *programs]]
    if isinstance(programs[0], (list, tuple)):
        parts = [["-n", 1, sys.executable, *words] for words in programs]
    joined = [word for part in parts for word in (":", *part)][1:]
    return completed(folder, [MPIEXEC, *joined], **more)


def launch(folder, *words, workers=2):
    """Trains in several processes, or in one."""
    words = ["-c", PROGRAM, "train", *words]
    return completed(folder, words) if workers == 1 else mpiexec(folder, *words, count=workers)


@dataclass(frozen=True)
class Given(Alone):
    """A group whose processes exchange values that a test gives: (place, value of this process) -> values by rank."""

    values: Any = None

    def gather(self, place, value):
        return self.values(place, value)


def assert_same(one, two):
    names = ["metrics.jsonl", *(f"checkpoints/{p.name}" for p in (one / "checkpoints").iterdir())]
    assert len(names) > 1 and sorted(p.name for p in (two / "checkpoints").iterdir()) == sorted(
        p.name for p in (one / "checkpoints").iterdir()
    )
    for name in names:
        assert filecmp.cmp(str(one / name), str(two / name), shallow=False), name


def left_out(report, names=("wall_s", "network_s", "scores_s", "images_per_s", "files")):
    """Returns a report without times, which vary between runs, and without paths."""
    if isinstance(report, dict):
        return {name: left_out(value, names) for name, value in report.items() if name not in names}
    return [left_out(value, names) for value in report] if isinstance(report, list) else report
