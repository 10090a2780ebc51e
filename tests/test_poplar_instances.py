"""Several instances under ``poprun``: processes on the double of the SDK that exchange what IPUs and hosts would."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from poplar_double import installed

from ipucnn import cli
from ipucnn.training.checkpoints import load_checkpoint

ROOT = Path(__file__).parents[1]
SMALL = ["--micro-batch-size", "2", "--limit-train", "32", "--limit-eval", "8", "--seed", "1"]


def poprun(index, total=4, local=2, ipus=1):
    """The variables that poprun sets for an instance."""
    values = dict(NUM_TOTAL_REPLICAS=total, NUM_LOCAL_REPLICAS=local, NUM_IPUS_PER_REPLICA=ipus)
    values.update(REPLICA_INDEX_OFFSET=index * local, LOCAL_INSTANCE_INDEX=index)
    return {"POPDIST_" + name: str(value) for name, value in values.items()}


def start(tmp_path, index, *args, **layout):
    """An instance in a process of its own."""
    env = {**os.environ, **poprun(index, **layout), "POPLAR_DOUBLE_EXCHANGE": str(tmp_path / "exchange")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")
    (tmp_path / "exchange").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "poplar_double.run", *map(str, args)],
        cwd=str(tmp_path),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_instances_train_what_one_process_trains(tmp_path, capfd):
    """Same weights, moving statistics and optimizer state; one of them writes and speaks."""
    flags = ["cifar_resnet8", "--dataset", "digits", *SMALL, "--num-replicas", 2, "--num-epochs", 1, "--json"]
    flags += ["--limit-train", 16]
    flags += ["--gradient-accumulation-count", 2, "--optimizer-params", '{"momentum": 0.9}']
    every = ["--ckpt-all-instances", "--checkpoint-dir", tmp_path / "checkpoints"]
    started = [
        start(tmp_path, index, "train", *flags, *every, "--run-dir", tmp_path / "both", total=2, local=1)
        for index in (0, 1)
    ]
    with installed():
        assert cli.run(["train", *map(str, flags), "--run-dir", str(tmp_path / "one")]) == 0
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert '"validation"' in ended[0][0] and ended[1][0] == ""
    both = load_checkpoint(tmp_path / "checkpoints" / "last.npz")
    one = load_checkpoint(tmp_path / "one" / "checkpoints" / "last.npz")
    second = load_checkpoint(tmp_path / "checkpoints" / "instance-1" / "last.npz")
    assert all(np.array_equal(second.weights[name], both.weights[name]) for name in both.weights)
    for there, here in ((one.weights, both.weights), (one.slots, both.slots)):
        assert list(there) == list(here)
        for name in there:
            np.testing.assert_allclose(here[name], there[name], rtol=0, atol=1e-5, err_msg=name)
    assert any("moving" in name for name in one.weights)
    rows = [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("both", "one")]
    assert rows[0] == rows[1] > 0


def test_instances_compile_where_there_are_no_ipus(monkeypatch, tmp_path, capfd):
    for index in (0, 1):
        for name, value in poprun(index).items():
            monkeypatch.setenv(name, value)
        with installed(num_ipus=0) as machine:
            flags = ["--num-replicas", "4", "--compile-only", "--executable-cache", str(tmp_path / "cache")]
            assert cli.run(["train", "toy_model", *SMALL, *flags, "--run-dir", str(tmp_path / "run")]) == 0
            assert machine.config["leaves"]["experimental.multi_replica_distribution.process_count"] == 2
        out, err = capfd.readouterr()
        assert bool(out) == (index == 0) and "Traceback" not in err
    assert not (tmp_path / "run").exists() and list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_a_signal_to_one_instance_ends_all_at_the_same_place(tmp_path):
    flags = ["toy_model", *SMALL, "--num-replicas", 2, "--num-epochs", 4000, "--run-dir", tmp_path / "run"]
    started = [start(tmp_path, index, "train", *flags, total=2, local=1) for index in (0, 1)]
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert [process.poll() for process in started] == [None, None], started[0].communicate()
        time.sleep(0.2)
    started[1].send_signal(signal.SIGINT)
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [143, 130], ended
    assert "interrupted after" in ended[0][1] and "Traceback" not in ended[0][1] + ended[1][1]
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.npz").meta["weight_updates"] > 0


@pytest.mark.parametrize(
    ("command", "text", "hint"),
    [
        (["evaluate", "run"], "only `ipucnn train` runs under it", "ipucnn evaluate"),
        (["infer", "run", "image.png"], "only `ipucnn train` runs under it", "ipucnn infer"),
        (["benchmark", "toy_model"], "only `ipucnn train` runs under it", "ipucnn benchmark"),
        (
            ["train", "unet", "--kfold", "2", "--device", "ipu"],
            "only `ipucnn train` runs under it",
            "--kfold",
        ),
        (["train", "toy_model", "--device", "cpu"], "2 instances", "without poprun"),
        (["train", "toy_model", "--num-replicas", "4"], "need the same seed", "--seed 1"),
        (["train", "toy_model", "--seed", "1"], "the program 1", "--num-replicas 4"),
        (
            ["train", "toy_model", "--seed", "1", "--num-replicas", "4", "--select-ipu", "1"],
            "poprun chooses the IPUs",
            "drop it",
        ),
    ],
)
def test_what_does_not_run_under_poprun(command, text, hint, monkeypatch, tmp_path, capfd):
    for name, value in poprun(1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with installed():
        code = cli.run(command)
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err
    assert err.count("error:") == err.count("hint:") == 1 and text in err and hint in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "values",
    [
        {"NUM_TOTAL_REPLICAS": "four"},
        {"NUM_LOCAL_REPLICAS": ""},
        {"NUM_LOCAL_REPLICAS": "3"},
        {"REPLICA_INDEX_OFFSET": "1"},
        {"REPLICA_INDEX_OFFSET": "4"},
        {"NUM_IPUS_PER_REPLICA": "0"},
    ],
)
def test_variables_that_poprun_does_not_set_like_this(values, monkeypatch, tmp_path, capfd):
    for name, value in {**poprun(1), **{"POPDIST_" + k: v for k, v in values.items()}}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with installed():
        assert cli.run(["train", "toy_model", "--num-replicas", "4", "--seed", "1"]) == 2
    err = capfd.readouterr().err
    assert err.count("error:") == err.count("hint:") == 1 and "Traceback" not in err
    assert not list(tmp_path.iterdir())
