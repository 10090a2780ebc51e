"""Training, evaluation and inference as a user runs them, on the embedded data and small networks."""

import contextlib
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.own_networks import assert_equal
from support.trained_runs import rows

from ipucnn import cli
from ipucnn.config.resolve import resolve
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.names import named_weights
from ipucnn.models.registry import get_model
from ipucnn.runs.sources import find_starting_weights
from ipucnn.training.checkpoints import load_checkpoint

SMALL = ["--limit-train", "320", "--limit-eval", "100", "--num-epochs", "2", "--seed", "7"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a small run with replicas and accumulation; returns the run folder and printed JSON."""
    folder = tmp_path_factory.mktemp("runs")
    command = ["train", "mnist_cnn", "--replicas", "2", "--micro-batch-size", "8", "--gradient-accumulation-count", "2",
               "--validation-freq", "1", "--run-dir", str(folder / "r"), "--json", *SMALL]  # fmt: skip
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(command)
    assert code == 0, err.getvalue()
    return folder / "r", json.loads(out.getvalue()), err.getvalue()


def test_the_run_folder_holds_everything(trained):
    folder, report, stderr = trained
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert {"config.yml", "program.json", "metrics.jsonl", "report.json"} <= files
    assert {"checkpoints/last.npz", "checkpoints/best.npz"} <= files
    assert any(name.startswith("tensorboard/events") for name in files)
    assert not [name for name in files if name.endswith(".tmp")]
    written = json.loads((folder / "report.json").read_text())
    assert {**written, "run_dir": str(folder)} == {k: v for k, v in report.items() if k != "knn_accuracy"}
    executions, (*_, last) = rows(folder, "execution"), rows(folder, "validation")
    assert executions[1]["loss"] < executions[0]["loss"]
    assert report["validation"] == {k: v for k, v in last.items() if k in report["validation"]}
    first = stderr.splitlines()[0]
    assert all(
        word in first for word in ("digits", "mnist", "--dataset-path")
    )  # which data, why, and what to do


@pytest.mark.slow
def test_the_saved_configuration_gives_the_same_run(trained, succeeds):
    folder, _, _ = trained
    succeeds("train", "--config-path", folder / "config.yml", "--run-dir", "again")
    assert_equal(folder, "again")


def test_starting_from_a_run_with_other_classes_keeps_the_backbone(trained, run, tmp_path):
    folder = trained[0]
    model = build_model(get_model("mnist_cnn"), BuildOptions((10, 10, 1), 4, norm="none", seed=3))
    fresh = {k: v.numpy() for k, v in named_weights(model).items()}
    resolved = resolve("train", {"weights": str(folder), "dataset": "digits"}, model="mnist_cnn")
    info = SimpleNamespace(class_names=tuple("abcd"))
    setup = SimpleNamespace(source=SimpleNamespace(info=info), record=resolved.record)
    num_fresh, _ = find_starting_weights(resolved).start(setup, model)
    checkpoint = load_checkpoint(folder / "checkpoints" / "best.npz")
    head = list(fresh)[-2:]
    assert {name.split("/")[-1] for name in head} == {"kernel", "bias"} and num_fresh == 2
    for name, value in named_weights(model).items():
        expected = fresh[name] if name in head else checkpoint.weights[name]
        np.testing.assert_array_equal(value.numpy(), expected)


@pytest.mark.slow
def test_pipelined_training_chooses_checked_splits(lightly, succeeds, tmp_path):
    succeeds(
        "train", "toy_model", "--ipus-per-replica", "2", "--micro-batch-size", "4", *SMALL, "--run-dir", "p"
    )
    program = json.loads((tmp_path / "p" / "program.json").read_text())
    assert program["num_stages"] == 2 and len(program["pipeline_splits"]) == 1
    assert program["gradient_accumulation_count"] % 4 == 0 and program["num_ipus"] == 2


@pytest.mark.slow
def test_last_checkpoint_is_written_elsewhere_and_cleaned_on_request(lightly, succeeds, tmp_path):
    options = ["--micro-batch-size", 32, "--no-validation", "--ckpts-per-epoch", 0]
    args = ["train", "toy_model", *options, *SMALL]
    succeeds(*args, "--checkpoint-dir", "ck", "--run-dir", "r1")
    assert [p.name for p in (tmp_path / "ck").iterdir()] == ["last.npz"]
    succeeds("evaluate", "r1")
    succeeds("evaluate", "ck/last.npz")
    (tmp_path / "ck2").mkdir()
    (tmp_path / "ck2" / "mine.npz").write_bytes(b"x")
    out, _ = succeeds(*args, "--checkpoint-dir", "ck2", "--run-dir", "r2", "--clean-dir")
    assert "evaluate it" not in out and "tensorboard --logdir r2/tensorboard" in out
    assert [p.name for p in (tmp_path / "ck2").iterdir()] == ["mine.npz"]
