"""Cross-validation: folds are runs of their own, continue where they stopped, and are averaged."""

import json
import os
import re
import shlex
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
from light_training import train_lightly
from PIL import Image

from ipucnn import cli
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.datasets.base import fold_of_each, pool, select_fold
from ipucnn.datasets.sources.embedded import open_digits
from ipucnn.machine import operation_threads
from ipucnn.runs import kfold
from ipucnn.runs.kfold import CrossValidation, FoldFinished, mean_and_deviation

OPTIONS = [
    "train", "toy_model", "--dataset", "digits", "--limit-train", "60", "--limit-eval", "30", "--kfold", "3",
    "--num-epochs", "2", "--micro-batch-size", "10", "--learning-rate", "0.1", "--seed", "5",
]  # fmt: skip


def run(folder, *options):
    return cli.run([*OPTIONS, "--run-dir", str(folder), *map(str, options)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs a cross-validation of three folds, and returns its folder."""
    folder = tmp_path_factory.mktemp("kfold") / "cv"
    assert run(folder, "--json") == 0
    return folder


@pytest.fixture(scope="module")
def light_whole(tmp_path_factory):
    """Does the same with light training."""
    folder = tmp_path_factory.mktemp("light") / "cv"
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        assert run(folder, "--json") == 0
    return folder


def folds_of(folder):
    return json.loads((folder / "folds.json").read_text())


def test_every_example_is_held_out_once(whole):
    report = folds_of(whole)
    held_out = [set(row["held_out"]) for row in report["folds"]]
    assert [len(numbers) for numbers in held_out] == [30] * 3 and len(set.union(*held_out)) == 90
    assert report["missing"] == []
    assert [(row["train"], row["evaluation"]) for row in report["folds"]] == [(60, 30)] * 3
    # A fold continued on a machine with other cores sums in the same order.
    assert report["threads"] == operation_threads()
    for row in report["folds"]:
        assert (whole / row["run"] / "report.json").is_file() and (
            whole / row["run"] / "config.yml"
        ).is_file()


def test_folds_hold_out_every_example_once():
    source = open_digits()
    images = pool(source).images
    parts = [select_fold(source, 4, fold) for fold in range(1, 5)]
    assert sorted(i for part in parts for i in part.held_out) == list(range(1797))
    for part in parts:
        assert len(part.train) + len(part.eval) == 1797
        np.testing.assert_array_equal(part.eval.images, images[list(part.held_out)])
        rest = sorted(set(range(1797)) - set(part.held_out))
        np.testing.assert_array_equal(part.train.images, images[rest])


def test_mean_and_deviation_are_over_the_folds(whole):
    report = folds_of(whole)
    for key in ("loss", "accuracy"):
        values = np.array([row["validation"][key] for row in report["folds"]])
        assert report["mean"][key] == pytest.approx(values.mean())
        assert report["std"][key] == pytest.approx(values.std(ddof=1))
        for row in report["folds"]:
            fold_report = json.loads((whole / row["run"] / "report.json").read_text())
            assert fold_report["validation"][key] == row["validation"][key]
    assert mean_and_deviation([3.0]) == (3.0, None)


def test_classes_are_distributed_over_all_folds():
    examples = pool(open_digits())
    assert len(examples) == 1797
    folds = fold_of_each(examples, 5)
    for label in range(10):
        counts = np.bincount(folds[examples.labels == label], minlength=6)[1:]
        assert counts.max() - counts.min() <= 1
    assert np.bincount(folds).max() - np.bincount(folds)[1:].min() <= 1


def test_single_fold_equals_the_fold_of_the_cross_validation(whole, tmp_path, capsys):
    assert run(tmp_path / "cv", "--fold", 2) == 0
    assert "not trained: fold 1, 3" in capsys.readouterr().out
    for name in ("metrics.jsonl", "checkpoints/last.npz"):
        one, other = tmp_path / "cv" / "fold-2" / name, whole / "fold-2" / name
        if name.endswith("npz"):
            a, b = np.load(one), np.load(other)
            arrays = [key for key in a.files if not key.startswith("__")]
            assert arrays and all((a[key] == b[key]).all() for key in arrays if a[key].dtype == np.float32)
        else:
            assert one.read_bytes() == other.read_bytes()
    report = folds_of(tmp_path / "cv")
    assert (report["missing"], report["std"]["accuracy"]) == ([1, 3], None)
    # The other folds are further parts of the same cross-validation.
    assert run(tmp_path / "cv", "--fold", 3) == 2
    error = capsys.readouterr().err
    assert "is a cross-validation already, with fold 2" in error and "add --resume" in error
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        assert run(tmp_path / "cv", "--fold", 3, "--resume") == 0
    assert folds_of(tmp_path / "cv")["missing"] == [1]


def stop(patch, number):
    """Sends a signal after the first epoch of a trained fold: the first, second, ..."""
    real, calls = kfold.TrainingRun._events, []

    def stopped(self, guard, cluster):
        calls.append(self)
        for event in real(self, guard, cluster):
            if len(calls) == number and type(event).__name__ == "ExecutionFinished":
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    patch.setattr(kfold.TrainingRun, "_events", stopped)


def test_cross_validation_continues_at_the_fold_where_it_stopped(
    lightly, light_whole, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "cv"
    capsys.readouterr()
    with monkeypatch.context() as patch:
        stop(patch, 2)
        assert run(folder) == 130
    error = capsys.readouterr().err
    assert f"--resume --run-dir {folder}" in error and "error: fold 2: interrupted" in error
    assert folds_of(folder)["missing"] == [2, 3]
    before = (folder / "fold-1" / "report.json").read_bytes()
    assert cli.run(["train", "--resume", "--run-dir", str(folder)]) == 0
    error = capsys.readouterr().err
    assert "fold-1 is finished" in error and "continuing after weight update" in error
    assert (folder / "fold-1" / "report.json").read_bytes() == before
    for fold in (1, 2, 3):
        name = f"fold-{fold}/metrics.jsonl"
        assert (folder / name).read_bytes() == (light_whole / name).read_bytes()
        configs = [
            RunConfig.from_yaml((root / f"fold-{fold}" / "config.yml").read_text())
            for root in (folder, light_whole)
        ]
        assert replace(configs[0], run_dir="") == replace(configs[1], run_dir="")
        names = f"fold-{fold}/checkpoints/last.npz", f"fold-{fold}/report.html"
        assert (folder / names[0]).read_bytes() == (light_whole / names[0]).read_bytes()
        assert (folder / names[1]).exists()
    ours, theirs = folds_of(folder), folds_of(light_whole)
    for key in ("mean", "std", "seed", "kfold"):
        assert ours[key] == theirs[key]


def test_events_report_finished_folds(lightly, tmp_path):
    flags = {"dataset": "digits", "limit_train": "20", "limit_eval": "10", "kfold": "2", "micro_batch_size": "5",
             "run_dir": str(tmp_path / "cv"), "checkpoints": False, "validation": False}  # fmt: skip
    validation = CrossValidation(resolve("train", flags, model="toy_model"))
    rows = [event.row for event in validation.events() if isinstance(event, FoldFinished)]
    assert [row["fold"] for row in rows] == [1, 2] and rows[0]["validation"] is None
    assert validation.report()["mean"] == {}


@pytest.mark.parametrize(
    "options, code, words",
    [
        (["--fold", "4"], 2, "numbered from 1 to 3"),
        (["--kfold", "0"], 2, "--kfold"),
        (["--kfold", "1798"], 2, "has 1797 examples"),
        (["--no-training"], 2, "nothing to do"),
        (["--checkpoint-dir", "elsewhere"], 2, "every fold"),
    ],
)
def test_invalid_cross_validations_are_refused(tmp_path, capsys, options, code, words):
    assert run(tmp_path / "cv", *options) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "cv").exists()


def test_existing_folders_are_refused(whole, tmp_path, capsys):
    assert run(whole) == 2
    assert "--resume continues it" in capsys.readouterr().err
    assert run(whole / "fold-1") == 2
    assert "holds checkpoints" in capsys.readouterr().err
    assert run(whole, "--resume", "--num-epochs", "2", "--learning-rate", "0.2") == 2
    assert "--learning-rate 0.2" in capsys.readouterr().err
    assert cli.run(["train", "toy_model", "--dataset", "digits", "--fold", "1"]) == 2
    assert "without --kfold" in capsys.readouterr().err


def test_image_files_are_not_split(tmp_path, capsys):
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "x.png")
    code = cli.run(
        ["train", "toy_model", "--dataset", str(tmp_path), "--kfold", "2", "--run-dir", str(tmp_path / "cv")]
    )
    assert code == 2 and "are files" in capsys.readouterr().err


def test_fold_is_evaluated_on_its_held_out_part(whole, capsys):
    assert cli.run(["evaluate", str(whole / "fold-3"), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert measured["accuracy"] == pytest.approx(folds_of(whole)["folds"][2]["validation"]["accuracy"])


def write_pairs(folder, inverted=False, num=4):
    """Writes pairs of 8x8 pixels; inverted: the same images with inverted masks."""
    rng = np.random.default_rng(3)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for i in range(num):
        image = rng.integers(0, 256, (8, 8)).astype(np.uint8)
        Image.fromarray(image).save(folder / "images" / f"{i}.png")
        mask = (image > 127) != inverted
        Image.fromarray(mask.astype(np.uint8) * 255).save(folder / "masks" / f"{i}.png")
    return folder


def pairs_options(data, folder):
    return [
        "train", "unet", "--dataset", "imagemasks", "--dataset-path", str(data), "--image-size", "188",
        "--base-filters", "1", "--norm-layer", "none", "--no-augment", "--num-epochs", "1", "--kfold", "2",
        "--run-dir", str(folder),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory):
    """Trains one fold of two; returns it, its data, and the same images with other labels."""
    place = tmp_path_factory.mktemp("pairs")
    data, other = write_pairs(place / "data"), write_pairs(place / "other", inverted=True)
    assert cli.run([*pairs_options(data, place / "cv"), "--fold", "1"]) == 0
    return place / "cv", data, other


@pytest.mark.parametrize("has_list", [True, False])
def test_folds_of_other_labels_are_refused(of_pairs, tmp_path, capsys, has_list):
    """Without folds.json, a finished fold's checkpoint knows its data."""
    whole, _, other = of_pairs
    copy = tmp_path / "cv"
    shutil.copytree(str(whole), str(copy))
    if not has_list:
        (copy / "folds.json").unlink()
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    resume = ["train", "unet", "--resume", "--run-dir", str(copy), "--dataset-path", str(other)]
    for more in (["--kfold", "2", "--fold", "2"], ["--kfold", "2"], *([[]] if has_list else [])):
        assert cli.run([*resume, *more]) == 2
        error = capsys.readouterr().err
        assert "images or labels differ" in error and "another --run-dir" in error
        assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_validation_counts_whole_images(of_pairs):
    (row,) = folds_of(of_pairs[0])["folds"]
    assert row["validation"]["samples"] == 2 and isinstance(row["validation"]["samples"], int)


def test_all_folds_have_the_checksum_of_the_same_data():
    source = open_digits()
    parts = [select_fold(source, 3, fold) for fold in (1, 2)]
    labels = source.train.labels.copy()
    labels[0] = (labels[0] + 1) % 10
    changed = replace(source, train=replace(source.train, labels=labels))
    assert parts[0].pool_sha256 == parts[1].pool_sha256 != select_fold(changed, 3, 1).pool_sha256


@pytest.mark.parametrize("command", ["evaluate", "infer"])
def test_fold_must_be_named(whole, capsys, command):
    images = [str(whole)] if command == "infer" else []
    assert cli.run([command, str(whole), *images]) == 3
    error = capsys.readouterr().err
    assert "is a cross-validation" in error and f"ipucnn {command} {whole / 'fold-1'}" in error


def test_a_fold_may_move_its_checkpoints(whole, tmp_path, capsys):
    """A fold is a run like any other; only a cross-validation refuses a folder of checkpoints."""
    fold = shutil.copytree(whole / "fold-1", tmp_path / "fold-1")
    (fold / "checkpoints").rename(tmp_path / "elsewhere")
    saved = (fold / "config.yml").read_text(encoding="utf-8")
    changed = re.sub(r"^checkpoint-dir: .*$", f"checkpoint-dir: {tmp_path / 'elsewhere'}", saved, flags=re.M)
    assert changed != saved
    (fold / "config.yml").write_text(changed, encoding="utf-8")
    assert cli.run(["evaluate", str(fold)]) == 0
    assert cli.run(["train", "--resume", "--run-dir", str(fold), "--num-epochs", "9", "--dry-run"]) == 0
    capsys.readouterr()


def test_a_run_may_contain_a_folder_that_is_called_like_a_fold(whole, tmp_path, capsys):
    run = shutil.copytree(whole / "fold-1", tmp_path / "run")
    (run / "fold-images").mkdir()
    assert cli.run(["evaluate", str(run)]) == 0
    capsys.readouterr()


def test_the_hint_for_a_fold_can_be_typed(whole, tmp_path, capsys):
    place = shutil.copytree(whole, tmp_path / ("my folds " + "x" * 150) / ("y" * 200))
    assert cli.run(["evaluate", str(place)]) == 3
    hint = capsys.readouterr().err.splitlines()[-1]
    assert shlex.split(hint.partition("name a fold: ")[2]) == ["ipucnn", "evaluate", str(place / "fold-1")]


def test_time_of_a_fold_includes_all_its_processes(whole):
    for row in folds_of(whole)["folds"]:
        lines = (whole / row["run"] / "timings.jsonl").read_text().splitlines()
        times = [json.loads(line) for line in lines]
        assert row["train_s"] == pytest.approx(sum(t["wall_s"] for t in times if t["event"] == "execution"))


def test_stopped_first_fold_continues(lightly, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cv"
    capsys.readouterr()
    with monkeypatch.context() as patch:
        stop(patch, 1)
        assert run(folder, "--fold", 1) == 130
    command = f"ipucnn train --resume --run-dir {folder} --kfold 3 --fold 1"
    assert command in capsys.readouterr().err
    assert cli.run(command.split()[1:]) == 0
    assert "continuing after weight update" in capsys.readouterr().err
    (row,) = folds_of(folder)["folds"]
    fold_report = json.loads((folder / "fold-1" / "report.json").read_text())
    assert row["train_s"] > fold_report["measured"]["train_s"]
