"""Several instances under ``poprun``: processes on the test double of the SDK that exchange data as IPUs do."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence
from poplar_double import installed
from poplar_double import run as double
from support.poprun import poprun, variables
from support.refusals import Refusal, check_refused

from ipucnn import cli
from ipucnn.training.checkpoints import load_checkpoint

ROOT = Path(__file__).parents[1]
SMALL = ["--micro-batch-size", "2", "--limit-train", "32", "--limit-eval", "8", "--seed", "1"]


def start(tmp_path, index, *args, **layout):
    """Starts an instance in a process of its own."""
    env = {**os.environ, **variables(index, **layout), "POPLAR_DOUBLE_EXCHANGE": str(tmp_path / "exchange")}
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


def together(tmp_path, *commands, **layout):
    """Runs commands, one after the other, in two instances; returns the output of each."""
    arguments = [word for command in commands for word in (*command, "+")][:-1]
    started = [start(tmp_path, index, *arguments, **layout) for index in (0, 1)]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert ended[1][0] == "" and "Traceback" not in ended[0][1] + ended[1][1]
    return [ended[0][0], *(err for _, err in ended)]


def with_another(monkeypatch, capfd, tmp_path, *commands, **layout):
    """Does the same with this process as the first instance, which saves one import of TensorFlow."""
    arguments = [str(word) for command in commands for word in (*command, "+")][:-1]
    capfd.readouterr()
    other = start(tmp_path, 1, *arguments, **layout)
    try:
        with monkeypatch.context() as patch:
            poprun(patch, 0, **layout)
            patch.setenv("POPLAR_DOUBLE_EXCHANGE", str(tmp_path / "exchange"))
            patch.setenv("POPLAR_DOUBLE_TIMEOUT_S", "280")  # the other instance is still starting
            code = double.main(arguments)
        out, err = capfd.readouterr()
        other_out, silent = other.communicate(timeout=300)
    finally:
        other.kill()
        other.wait()
    assert (code, other.returncode) == (0, 0), (err, silent)
    assert other_out == "" and "Traceback" not in err + silent
    return [out, err, silent]


def documents(text):
    """Parses the JSON documents that follow one another in a text."""
    values, decoder, at = [], json.JSONDecoder(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        values.append(value)
        while at < len(text) and text[at].isspace():
            at += 1
    return values


def test_documented_pod16_command_runs(tmp_path, capfd, monkeypatch):
    page = (ROOT / "docs" / "ipu.md").read_text(encoding="utf-8")
    section = page.split("### A POD16 with a public configuration")[1]
    words = shlex.split(section.split("```console")[1].split("```")[0].replace("\\\n", ""))
    at = words.index("ipucnn")
    options = dict(word[2:].split("=") for word in words[1:at])
    total, ipus = int(options["num-replicas"]), int(options["ipus-per-replica"])
    layout = {"total": total, "local": total // int(options["num-instances"]), "ipus": ipus}
    poprun(monkeypatch, 0, **layout)
    monkeypatch.chdir(tmp_path)
    with installed():
        assert cli.run([*words[at + 1 :], "--dry-run", "--json"]) == 0
    program = json.loads(capfd.readouterr().out)["program"]
    assert (program["num_ipus"], program["num_replicas"], program["global_batch_size"]) == (16, 4, 8192)


@pytest.mark.slow
def test_two_instances_equal_one_process(tmp_path, capfd, monkeypatch):
    """Weights, moving statistics and optimizer state are equal; the instances share samples out, each of which counts
    once in the results; one instance writes files and prints.
    """
    flags = "toy_model_bn --dataset digits --micro-batch-size 2 --limit-train 16 --limit-eval 8 --seed 1"
    flags += " --num-replicas 2 --num-epochs 1 --gradient-accumulation-count 2 --json"
    flags = [*flags.split(), "--optimizer", "sgd", "--optimizer-params", '{"momentum": 0.9}']
    every = ["--ckpt-all-instances", "--checkpoint-dir", tmp_path / "checkpoints"]
    run, sizes = tmp_path / "one", ["--limit-eval", 37, "--device", "ipu", "--json"]
    evaluate = ["evaluate", run, *sizes]
    with installed():
        assert cli.run(["train", *map(str, flags), "--run-dir", str(run)]) == 0
        capfd.readouterr()
        assert cli.run([str(a) for a in (*evaluate, "--predictions", tmp_path / "one.csv")]) == 0
    (alone,) = documents(capfd.readouterr().out)
    out, err, silent = with_another(
        monkeypatch,
        capfd,
        tmp_path,
        ["train", *flags, *every, "--run-dir", tmp_path / "both"],
        [*evaluate, "--predictions", tmp_path / "both.csv"],
        total=2,
        local=1,
    )
    trained, inferred = documents(out)
    assert trained["validation"]["samples"] == 8
    assert len(json.loads((tmp_path / "both" / "environment.json").read_text())) == 1
    both = load_checkpoint(tmp_path / "checkpoints" / "last.npz")
    one = load_checkpoint(run / "checkpoints" / "last.npz")
    second = load_checkpoint(tmp_path / "checkpoints" / "instance-1" / "last.npz")
    assert all(np.array_equal(second.weights[name], both.weights[name]) for name in both.weights)
    for expected, shared in ((one.weights, both.weights), (one.slots, both.slots)):
        assert list(expected) == list(shared)
        for name in expected:
            np.testing.assert_allclose(shared[name], expected[name], rtol=0, atol=1e-5, err_msg=name)
    assert any("moving" in name for name in one.weights)
    rows = [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("both", "one")]
    assert rows[0] == rows[1] > 0
    for figures in (alone["measured"], inferred["measured"]):
        del figures["wall_s"]
    assert inferred == alone and inferred["measured"]["samples"] == 37
    assert (tmp_path / "both.csv").read_text() == (tmp_path / "one.csv").read_text()
    assert "predictions in" in err and "predictions in" not in silent
    poprun(monkeypatch, 1)
    for options, text in ((("--device", "cpu"), "2 instances"), (("--select-ipu", "3"), "poprun chooses")):
        with installed():
            assert cli.run(["evaluate", str(run), *options]) == 2
        assert text in capfd.readouterr().err


@pytest.mark.slow
def test_two_instances_write_the_masks_of_one_process(tmp_path, capfd, monkeypatch):
    """Evaluation and inference of whole images in patches give the figures and files of one process.  Training ends
    normally, although the instances compute pictures of predictions together.
    """
    train = "train unet --dataset random --image-size 188 --base-filters 2 --seed 1 --micro-batch-size 1"
    train += " --gradient-accumulation-count 2 --steps-per-execution 2 --num-replicas 2 --limit-train 4"
    train = f"{train} --limit-eval 2 --num-epochs 1 --json --run-dir".split()
    commands = [
        ["evaluate", "run", "--device", "ipu", "--json", "--contact-sheet", "sheet.png"],
        ["infer", "run", "--split", "eval", "--device", "ipu", "--json", "--output", "masks", "--overlay"],
    ]
    alone, both = tmp_path / "alone", tmp_path / "both"
    alone.mkdir()
    monkeypatch.chdir(alone)
    with installed():
        for command in ([*train, "run"], *commands):
            assert cli.run([str(word) for word in command]) == 0, capfd.readouterr().err
    expected = documents(capfd.readouterr().out)
    shutil.copytree(alone / "run", both / "run")
    out, err, silent = together(both, *commands, [*train, "trained"], total=2, local=1)
    shared = documents(out)
    assert len(shared) == len(expected) == 3 and "sheet.png" in err and "masks" not in silent
    for name in ("loss", "accuracy", "dice", "samples"):
        assert shared[0]["measured"][name] == pytest.approx(expected[1]["measured"][name], rel=1e-4), name
    assert len(shared[0]["segmentation"]["images"]) == 2 == shared[2]["validation"]["samples"]
    assert (both / "trained" / "predictions.png").exists()
    assert {"random-eval-mask.tif", "random-eval-overlay.tif"} <= {
        path.name for path in (both / "masks").iterdir()
    }
    one, two = (pages(root / "masks" / "random-eval-probability.tif") for root in (alone, both))
    assert np.abs(one - two).max() <= 1e-4 and len(one) == 2


def pages(path):
    """Returns the pages of a TIFF, as floats."""
    with Image.open(path) as stack:
        return np.stack([np.asarray(page, np.float64) for page in ImageSequence.Iterator(stack)])


@pytest.mark.slow
def test_two_instances_infer_and_benchmark_together(tmp_path, capfd):
    run = tmp_path / "run"
    infer = ["infer", run, "--split", "eval", "--limit-eval", 37, "--device", "ipu", "--json"]
    with installed():
        assert cli.run(["train", "toy_model", *SMALL, "--num-epochs", "1", "--run-dir", str(run)]) == 0
        capfd.readouterr()
        assert cli.run([str(a) for a in infer]) == 0
    alone = json.loads(capfd.readouterr().out)
    bench = "benchmark toy_model --host-generated-data --micro-batch-size 2 --num-replicas 4"
    bench = f"{bench} --executions 3 --min-time 0.01 --max-time 60 --seed 1 --json".split()
    out, err, silent = together(
        tmp_path,
        infer,
        [*bench, "--inference", "--steps-per-execution", 3, "--run-dir", tmp_path / "inference"],
        [*bench, "--training", "--gradient-accumulation-count", 2, "--run-dir", tmp_path / "training"],
    )
    assert err.count("report in") == 2 and "report in" not in silent
    inferred, *reports = documents(out)
    assert inferred == alone and len(inferred["results"]) == 37
    for report, samples in zip(reports, (2 * 3 * 4, 2 * 2 * 4)):
        assert report == json.loads((tmp_path / report["mode"] / "report.json").read_text())
        assert report["void"] is None and len(report["executions"]) >= 3
        units = report["execution"]["weight_updates"] or 1
        assert all(each["samples"] == samples * units for each in report["executions"])
        assert report["program"]["num_replicas"] == 4
        assert any("2 instances of poprun" in note for note in report["notes"])


@pytest.mark.slow
def test_two_instances_cross_validate(tmp_path, capfd):
    flags = "train toy_model --dataset digits --micro-batch-size 2 --limit-train 24 --seed 1 --json"
    flags = f"{flags} --kfold 2 --num-replicas 4 --num-epochs 1".split()
    out, err, silent = together(tmp_path, [*flags, "--run-dir", tmp_path / "both"])
    with installed():
        assert cli.run([str(a) for a in (*flags, "--run-dir", tmp_path / "one")]) == 0
    shared = json.loads((tmp_path / "both" / "folds.json").read_text())
    alone = json.loads((tmp_path / "one" / "folds.json").read_text())
    assert (
        json.loads(out)["folds"] == shared["folds"] and "fold 2 of 2" in err and "fold 2 of 2" not in silent
    )
    assert [row["held_out"] for row in shared["folds"]] == [row["held_out"] for row in alone["folds"]]
    for name, value in alone["mean"].items():
        assert shared["mean"][name] == pytest.approx(value, abs=1e-4), name
    for fold in ("fold-1", "fold-2"):
        both, one = (
            load_checkpoint(tmp_path / root / fold / "checkpoints" / "last.npz") for root in ("both", "one")
        )
        for name in one.weights:
            np.testing.assert_allclose(both.weights[name], one.weights[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_instances_compile_without_ipus(monkeypatch, tmp_path, capfd):
    for index in (0, 1):
        poprun(monkeypatch, index)
        with installed(num_ipus=0) as machine:
            flags = ["--num-replicas", "4", "--compile-only", "--executable-cache", str(tmp_path / "cache")]
            assert cli.run(["train", "toy_model", *SMALL, *flags, "--run-dir", str(tmp_path / "run")]) == 0
            distribution = "experimental.multi_replica_distribution.process_"
            leaves = machine.config["leaves"]
            assert (leaves[distribution + "count"], leaves[distribution + "index"]) == (2, index)
            assert machine.calls("popdist.init") and machine.calls("PopDistStrategy")
            assert not machine.calls("IPUStrategy")
            # Two replicas of one IPU; none of them is attached.
            assert machine.calls("set_ipu_config") == [dict(ipus_per_replica=1, configure_device=False)]
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


REFUSED = (
    Refusal("benchmark toy_model", "need the same seed", "--seed 1"),
    Refusal("benchmark toy_model --seed 1", "the program 1", "--num-replicas 4"),
    Refusal("benchmark toy_model --seed 1 --mode data", "--mode data is for one process", "drop it"),
    Refusal(
        "benchmark toy_model --seed 1 --compare-with keras",
        "--compare-with keras is for one process",
        "without poprun",
    ),
    Refusal(
        "benchmark --suite keras-tutorial", "started 2 instances", "without poprun: ipucnn benchmark --suite"
    ),
    Refusal("train unet --kfold 2 --seed 1 --num-replicas 4", "--kfold", "--run-dir DIR"),
    Refusal("train unet --kfold 2 --run-dir r --num-replicas 4", "the same seed", "--seed 1"),
    Refusal("train toy_model --device cpu", "2 instances", "without poprun"),
    Refusal("train toy_model --num-replicas 4", "need the same seed", "--seed 1"),
    Refusal("train toy_model --seed 1", "the program 1", "--num-replicas 4"),
    Refusal(
        "train toy_model --seed 1 --num-replicas 4 --select-ipu 1",
        "poprun chooses the IPUs",
        "--select-ipu none",
    ),
)


def test_commands_of_one_process_are_refused_under_poprun(run, monkeypatch):
    poprun(monkeypatch, 1)
    for words in ("plan-splits lenet --stages 2 --save p.yml", "export run --format keras", "runs", "models"):
        name = words.split()[0]
        error = f"poprun started 2 instances, and `ipucnn {name}` runs in one"
        check_refused(run, Refusal(words, error, f"type it without poprun: ipucnn {name} ..."))


def test_commands_that_poprun_cannot_run_are_refused(run, monkeypatch):
    poprun(monkeypatch, 1)
    with installed():
        check_refused(run, *REFUSED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NUM_TOTAL_REPLICAS", "four"),
        ("NUM_LOCAL_REPLICAS", ""),
        ("NUM_LOCAL_REPLICAS", "3"),
        ("REPLICA_INDEX_OFFSET", "1"),
        ("REPLICA_INDEX_OFFSET", "4"),
        ("NUM_IPUS_PER_REPLICA", "0"),
    ],
)
def test_inconsistent_poprun_variables_are_refused(run, name, value, monkeypatch):
    poprun(monkeypatch, 1)
    monkeypatch.setenv("POPDIST_" + name, value)
    with installed():
        check_refused(run, Refusal("train toy_model --num-replicas 4 --seed 1", ""))
