"""Runs of several workers in processes of their own: their options, their start, and their results."""

import filecmp
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from ipucnn.machine import num_cores

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from ipucnn.__main__ import main; main()"


def tf_config(addresses, index=0, kind="worker", **more):
    """Returns the environment variable that names the workers and this one."""
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": addresses, **more}, "task": {"type": kind, "index": index}}
        )
    }


def addresses(count):
    """Returns free addresses of this machine."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    free = tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    for one in sockets:
        one.close()
    return free


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


def launch(folder, *words, workers=2, command="train"):
    """Runs a command with several workers, or with one."""
    launched = ["launch", "-n", workers, "--"] if workers > 1 else []
    return completed(folder, ["-c", PROGRAM, *launched, command, *words])


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
