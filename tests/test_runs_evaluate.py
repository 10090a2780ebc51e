"""ipucnn evaluate: every sample once, metrics against naive ones, Keras weight files, figures, bad input."""

import csv
import json
import math
import os
import re
import shlex
import shutil
import warnings
import zipfile
from pathlib import Path
from statistics import harmonic_mean
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.data_sets import write_class_folders
from support.refusals import Refusal, check_refused
from support.scores import naive_scores
from support.streams import RAW
from support.trained_runs import run_of
from support.weight_files import layers_of, write_keras_2, write_keras_3

from ipucnn.datasets.base import ArrayExamples, data_source
from ipucnn.reports.evaluate import draw_evaluation, worst_pairs
from ipucnn.runs.evaluate import measured
from ipucnn.runs.records import Evaluation
from ipucnn.training.checkpoints import load_checkpoint, save_checkpoint
from ipucnn.training.evaluation import EvaluationTotals

LENET = ["--model-name", "lenet", "--dataset", "digits", "--limit-eval", "37"]


@tries(5, slow=12)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 70),
    micro_batch=st.integers(1, 9),
    replicas=st.integers(1, 4),
    classes=st.integers(2, 12),
    smoothing=st.sampled_from([None, 0.1]),
    as_a_run=st.booleans(),
)
def test_every_sample_counts_once_and_metrics_equal_a_naive_reference(
    seed, n, micro_batch, replicas, classes, smoothing, as_a_run
):
    from ipucnn.datasets.pipeline import eval_batches
    from ipucnn.runs.setup import evaluation_batches

    rng = np.random.default_rng(seed)
    # The images are the logits: 1 x classes pixels; few different values, so that some are equal.
    images = rng.integers(0, 30, (n, 1, classes, 1)).astype(np.uint8)
    labels = rng.integers(0, classes, n).astype(np.int32)
    examples = ArrayExamples(images, labels)
    source = data_source(
        examples,
        examples,
        name="x",
        class_names=[str(i) for i in range(classes)],
        location="",
        augmentation="none",
    )
    shape = (1, classes, 1)
    if as_a_run:
        setup = SimpleNamespace(
            source=source,
            input_shape=shape,
            output_shape=None,
            record=SimpleNamespace(input_range="raw", size_step=1, own=None),
            input_range=RAW,
            config=SimpleNamespace(pipeline_num_parallel=2),
        )
        batches = evaluation_batches(setup, micro_batch * replicas)
    else:
        batches = eval_batches(
            examples, source.info, batch_size=micro_batch * replicas, input_shape=shape, input_range=RAW
        )
    shapes = set()

    def predict(x):
        shapes.add(tuple(x.shape))
        return x.numpy()[:, 0, :, 0] / 4.0 - 3.0

    totals = EvaluationTotals(classes, label_smoothing=smoothing)
    pairs = ((batch, predict(batch[0])) for batch in batches)
    assert sum(len(truth) for truth, *_ in measured(pairs, totals)) == totals.samples == n
    assert len(shapes) == 1 and shapes.pop()[0] % (micro_batch * replicas) == 0
    expected = naive_scores(images[:, 0, :, 0] / 4.0 - 3.0, labels, np.ones(n), smoothing=smoothing or 0.0)
    result, confusion = totals.result(), expected.confusion
    assert result.pop("calibration_error") == pytest.approx(expected.calibration_error, abs=1e-6)
    assert result == pytest.approx(expected.result, rel=1e-6)
    assert totals.confusion.tolist() == confusion
    for i, row in enumerate(totals.classes([str(i) for i in range(classes)])):
        right, claimed = confusion[i][i], sum(line[i] for line in confusion)
        assert row["count"] == sum(confusion[i]) and row["predicted"] == claimed
        assert row["accuracy"] == (right / sum(confusion[i]) if sum(confusion[i]) else None)
        assert row["precision"] == (right / claimed if claimed else None)
        if right:
            assert row["f1"] == pytest.approx(harmonic_mean([row["accuracy"], row["precision"]]))
        else:
            assert row["f1"] == (0 if claimed + sum(confusion[i]) else None)


def test_most_confused_pairs_come_first():
    matrix = [[5, 2, 0], [7, 1, 2], [0, 0, 9]]
    assert worst_pairs(matrix) == [(7, 1, 0), (2, 0, 1), (2, 1, 2)]
    assert len(worst_pairs(np.ones((30, 30), int).tolist())) == 10


# The command.


@pytest.fixture(scope="module")
def trained():
    return run_of("lenet")


def evaluated(run, *args):
    code, out, err = run("evaluate", *args, "--json")
    assert code == 0, err
    result = json.loads(out)
    result["measured"].pop("wall_s")
    return result


SIZES = {"first": lambda _: (30, 20), "second": lambda _: (31, 20), "third": lambda _: (30, 21)}


def an_image_less(folder):
    os.remove(folder / "a" / "3.bmp")


def exchanged_labels(folder):
    """All names and sizes stay."""
    (folder / "a" / "3.bmp").rename("kept")
    (folder / "b" / "3.bmp").rename(folder / "a" / "3.bmp")
    Path("kept").rename(folder / "b" / "3.bmp")


def from_training_to_evaluation(folder):
    (folder.with_name("train") / "a" / "3.bmp").rename(folder.with_name("val") / "a" / "of_training.bmp")


@pytest.mark.slow_cases("train-from_training_to_evaluation")
@pytest.mark.slow_cases("-an_image_less", "val-exchanged_labels")
@pytest.mark.parametrize(
    "parts, change",
    [
        ("", an_image_less),
        ("", exchanged_labels),
        ("train", from_training_to_evaluation),
        ("val", exchanged_labels),
    ],
)
def test_a_set_that_changed_since_training_is_named(lightly, succeeds, report, tmp_path, run, parts, change):
    classes = {(part, name): 10 for part in (["train", "val"] if parts else [""]) for name in ("a", "b")}
    write_class_folders(tmp_path / "set", classes, form="BMP", ending="bmp")
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    succeeds("train", "toy_model", "--dataset", "set", *words, "--run-dir", "r")
    said = "images that were trained on may be among those that are evaluated now"
    assert not any(said in note for note in report("evaluate", "r")["notes"])
    change(tmp_path / "set" / parts)
    for words in ([], ["--dataset", "set"]):
        assert any(said in note for note in report("evaluate", "r", *words)["notes"])
    again = Refusal(["train", "--resume", "--run-dir", "r", "--num-epochs", 2], "is not as it was for r/")
    check_refused(run, again, unchanged=[tmp_path / "r"])


@pytest.mark.slow
def test_a_set_is_that_of_training_however_its_folder_is_spelt(
    lightly, succeeds, report, tmp_path, monkeypatch, run
):
    """A run of a version that named the images of "." otherwise has another division of unchanged files."""
    set_folder = tmp_path / "set"
    write_class_folders(set_folder, {("", name): 10 for name in ("ant", "bee")}, form="BMP", ending="bmp")
    words = ["toy_model", "--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    names, split = {}, ["--split", "eval", "--format", "csv"]
    for place, dataset, folder in (
        (tmp_path, "set", "outside"),
        (set_folder, "imagefolder", "../inside"),
    ):
        monkeypatch.chdir(place)
        succeeds("train", *words, "--dataset", dataset, "--run-dir", folder)
        names[folder] = [line.split(",")[0] for line in succeeds("infer", folder, *split)[0].splitlines()]
    assert len(names["outside"]) == 5 and all(names["outside"] == names[folder] for folder in names)
    assert all((set_folder / name).is_file() for name in names["outside"][1:])
    monkeypatch.chdir(set_folder)
    of_data = report("evaluate", "../outside", "--dataset", ".")["dataset"]
    assert (of_data["size"], of_data["stored"]) == (4, 4)
    more = ["train", "--resume", "--num-epochs", "2", "--run-dir"]
    succeeds(*more, "../outside", "--dataset", ".")
    with monkeypatch.context() as patch:
        patch.setattr("ipucnn.datasets.base.name_in_set", lambda path, folder: path[len(str(folder)) + 1 :])
        succeeds("train", *words, "--dataset", "imagefolder", "--run-dir", "../older")
    hint = (
        "bring its files back if they changed (if not, another version of ipucnn divided the set otherwise)"
    )
    check_refused(run, Refusal([*more, "../older"], "is not as it was for", hint))
    assert any("is not as it was in training" in note for note in report("evaluate", "../older")["notes"])
    succeeds("train", *words, "--dataset", "imagefolder", "--run-dir", "../new", "--weights", "../older")


@pytest.mark.parametrize("options", ["--dataset 'a set'", "--dataset imagefolder --dataset-path 'a set'"])
def test_data_of_other_classes_get_the_options_of_those_of_training(
    lightly, succeeds, run, tmp_path, options
):
    """The hint is typed; no data set lies in a checkpoint."""
    write_class_folders(tmp_path / "a set", {("", name): 4 for name in ("a", "b")}, form="BMP", ending="bmp")
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    succeeds("train", "toy_model", *shlex.split(options), *words, "--run-dir", "run")
    (tmp_path / "other.py").write_text(
        "import numpy as np\n"
        "pair = np.zeros((4, 16, 16, 3), np.uint8), np.arange(4)\n"
        "def load(): return pair, pair\n"
    )
    command = ["evaluate", "run", "--dataset", "other.py:load"]
    hint = f"hint: give the data set it was trained on: {options}"
    check_refused(run, Refusal(command, "run/checkpoints/last.npz has 2 classes", hint, 3))
    succeeds("evaluate", "run", *shlex.split(options))


def test_images_of_another_set_that_were_trained_on_are_counted(lightly, succeeds, report, tmp_path):
    classes = {(part, name): 6 for part in ("train", "val") for name in ("a", "b")}
    write_class_folders(tmp_path / "set", classes)
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    succeeds("train", "toy_model", "--dataset", "set", *words, "--run-dir", "r")
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "set" / "val", other / "train")
    shutil.copytree(tmp_path / "set" / "val", other / "val")

    def said():
        return [
            note for note in report("evaluate", "r", "--dataset", "other")["notes"] if "trained on" in note
        ]

    assert said() == []
    for k in range(3):
        shutil.copy(tmp_path / "set" / "train" / "b" / f"{k}.png", other / "val" / "b" / f"more{k}.png")
    (note,) = said()
    assert note.startswith(
        "3 of the 15 images of imagefolder (other) are among those that the network was trained on"
    )
    (tmp_path / "set").rename(tmp_path / "elsewhere")
    (note,) = said()
    assert note.startswith(
        "if the network, or the weights that it began with, was trained on some of the images"
    )


@pytest.mark.slow
def test_shares_and_limits_hide_no_image_that_was_trained_on(lightly, succeeds, report, tmp_path):
    write_class_folders(tmp_path / "set", {("", name): 10 for name in ("a", "b")})
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    succeeds("train", "toy_model", "--dataset", "set", *words, "--run-dir", "r")
    out, _ = succeeds("infer", "r", "--split", "eval", "--format", "csv")
    held_out = {Path(line.split(",")[0]).name for line in out.splitlines()[1:]}
    assert len(held_out) >= 1
    for more in ([], ["--dataset", "set"]):
        found = report("evaluate", "r", *more, "--validation-fraction", "0.5")
        (note,) = [note for note in found["notes"] if "that the network was trained on" in note]
        assert note.startswith("6 of the 10 images of imagefolder (set) are among those"), note
        assert not any(
            "trained on" in note for note in report("evaluate", "r", *more, "--limit-eval", "2")["notes"]
        )
    os.remove(tmp_path / "set" / "a" / "0.png")
    notes = report("evaluate", "r", "--limit-eval", "2")["notes"]
    assert any("is not as it was in training" in note for note in notes)


def test_what_cannot_be_compared_with_training_is_said(lightly, succeeds, report, tmp_path):
    """Nothing is said of images that only lie there now, and of those of the first weights nothing is known."""
    for name in ("first", "second", "third"):
        write_class_folders(tmp_path / name, {("", kind): 5 for kind in ("a", "b")}, size=SIZES[name])
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    succeeds("train", "toy_model", "--dataset", "first", *words, "--run-dir", "r")
    succeeds("train", "toy_model", "--dataset", "second", *words, "--weights", "r", "--run-dir", "tuned")

    def said(run, data):
        return [note for note in report("evaluate", run, "--dataset", data)["notes"] if "trained on" in note]

    assert said("r", "third") == []
    maybe = "if the network, or the weights that it began with, was trained on some of the images"
    assert said("tuned", "third")[0].startswith(maybe)
    shutil.copy(tmp_path / "third" / "a" / "0.png", tmp_path / "first" / "a" / "new.png")
    assert said("r", "third")[0].startswith(maybe)


def test_what_is_left_out_of_the_set_of_training_is_said_again(lightly, succeeds, tmp_path):
    classes = {(part, name): 8 for part in ("train", "val") for name in ("a", "b")}
    write_class_folders(tmp_path / "set", classes)
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--skip-damaged"]
    succeeds("train", "toy_model", "--dataset", "set", *words, "--run-dir", "r")
    for k in range(3):
        (tmp_path / "set" / "val" / "a" / f"{k}.png").write_bytes(b"")
    for command in (["evaluate", "r"], ["infer", "r", "--split", "eval"]):
        _, err = succeeds(*command)
        assert re.search("^warning: .*3 .*damaged", err, re.MULTILINE), err


@pytest.mark.slow
def test_another_set_without_parts_is_evaluated_whole_and_that_of_training_is_not(
    lightly, succeeds, report, tmp_path
):
    for name in ("mine", "yours"):
        write_class_folders(tmp_path / name, {("", kind): 5 for kind in ("a", "b")}, form="BMP", ending="bmp")
    (tmp_path / "yours" / "a" / "0.bmp").write_bytes((tmp_path / "yours" / "a" / "1.bmp").read_bytes())
    (tmp_path / "yours" / "a" / "0.bmp").rename(tmp_path / "yours" / "a" / "10.bmp")
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    succeeds("train", "toy_model", "--dataset", "mine", *words, "--run-dir", "r")

    def evaluate(*args):
        found = report("evaluate", "r", *args)
        words = ("for evaluation", "was trained on")
        said = [note for note in found["notes"] if any(word in note for word in words)]
        return found["dataset"]["size"], found["dataset"]["stored"], said

    size, stored, notes = evaluate("--dataset", "yours")
    assert (size, stored) == (10, 10)
    out, _ = succeeds("infer", "r", "--split", "eval", "--dataset", "mine", "--format", "csv")
    held_out = {line.split(",")[0] for line in out.splitlines()[1:]}
    images = Path("mine").rglob("*.bmp")
    trained = {path.read_bytes() for path in images if str(path.relative_to("mine")) not in held_out}
    shared = sum(path.read_bytes() in trained for path in Path("yours").rglob("*.bmp"))
    assert notes == [
        "all 10 images of imagefolder (yours) are for evaluation",
        f"{shared} of the 10 images of imagefolder (yours) are among those that the network was trained on: scores "
        "come out too high",
    ]
    assert evaluate("--dataset", "yours", "--limit-eval", "4")[:2] == (4, 10)
    held_out = (
        "mine has no train/ and val/: 2 of its 10 images, the same in every run, are held out for evaluation"
    )
    for where in (["mine"], ["imagefolder", "--dataset-path", "mine"]):
        size, stored, (note,) = evaluate("--dataset", *where)
        assert (size, stored) == (2, 2) and held_out in note
    # A copy is the set of training; files of equal names and sizes are not.
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    assert evaluate("--dataset", "copy")[:2] == (2, 2)
    (tmp_path / "copy" / "a" / "0.bmp").rename(tmp_path / "elsewhere.bmp")
    (tmp_path / "copy" / "a" / "0.bmp").symlink_to(tmp_path / "elsewhere.bmp")
    assert evaluate("--dataset", "copy")[:2] == (2, 2)
    for path in (tmp_path / "copy").rglob("*.bmp"):
        path.write_bytes(path.read_bytes()[:-90] + bytes(90))
    assert evaluate("--dataset", "copy")[:2] == (10, 10)
    (tmp_path / "mine").rename(tmp_path / "moved")
    assert evaluate("--dataset", "moved", "--limit-eval", "1")[:2] == (1, 2)
    # Where it lay, other images are not those of training, although the place is.
    (tmp_path / "yours").rename(tmp_path / "mine")
    found = report("evaluate", "r", "--dataset", "mine")
    assert found["dataset"]["size"] == 2 and any("is not as it was in training" in n for n in found["notes"])
    (tmp_path / "mine").rename(tmp_path / "yours")
    size, stored, (_, note) = evaluate("--dataset", "yours", "--validation-fraction", "0.4")
    assert (size, stored) == (4, 4) and "4 of its 10 images" in note
    out, _ = succeeds("infer", "r", "--split", "eval", "--dataset", "yours", "--format", "csv")
    names = [line.split(",")[0] for line in out.splitlines()[1:]]
    assert names == [f"{kind}/{k}.bmp" for kind, ks in (("a", (1, 10, 2, 3, 4)), ("b", range(5))) for k in ks]


def test_batch_size_does_not_change_the_metrics(trained, run):
    first = evaluated(run, trained)
    assert first["measured"]["samples"] == first["dataset"]["size"] == 37
    for micro_batch, replicas in ((5, 3), (64, 2)):
        other_batch = evaluated(
            run, trained, "--validation-micro-batch-size", micro_batch, "--validation-num-replicas", replicas
        )
        assert other_batch["confusion_matrix"] == first["confusion_matrix"]
        for name, value in first["measured"].items():
            assert other_batch["measured"][name] == pytest.approx(value, abs=1e-6)


def test_a_confusion_matrix_that_is_too_wide_becomes_a_list(trained, run):
    code, out, _ = run("evaluate", trained, columns=30)
    assert code == 0 and max(len(line) for line in out.splitlines()) <= 30
    text = " ".join(out.split())
    assert "confused most often" in text and "confusion matrix" not in text


@pytest.mark.slow
def test_evaluation_figure_is_written(trained, run, tmp_path, monkeypatch):
    code, out, err = run("evaluate", trained, "--plot", "f.SVG", "--json")
    assert code == 0 and "f.SVG" in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["f.SVG"]
    assert (tmp_path / "f.SVG").read_bytes().startswith(b"<?xml")
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        draw_evaluation(msgspec.json.decode(out, type=Evaluation), tmp_path / "f", suffix)
        assert (tmp_path / "f").read_bytes().startswith(start)
    # The reliability diagram shows the number of predictions above each bin that has some.
    result, figures = json.loads(out), []
    for number, (row, count) in enumerate(zip(result["calibration"], [0, 1200, 3, *[0] * 12])):
        row.update(count=count, accuracy=0.5, confidence=(number + 0.5) / 15)
    monkeypatch.setattr("ipucnn.reports.evaluate.save_figure", lambda figure, *_: figures.append(figure))
    draw_evaluation(msgspec.convert(result, Evaluation), tmp_path / "f", ".png")
    texts = [(text.get_text(), round(text.xy[0] * 15, 3)) for text in figures[0].axes[1].texts]
    assert texts == [("1,200", 1.5), ("3", 2.5)]


def test_pictures_without_matplotlib_are_refused(trained, run, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_refused(run, Refusal(["evaluate", trained, "--plot", "f.png"], "--plot draws", "pip install", 6))
    check_refused(run, Refusal(["plot", trained], "ipucnn plot draws with matplotlib", "pip install", 6))


# Keras weights.


def foreign(layers):
    return {f"my_layer_{9 - i}": weights for i, weights in enumerate(layers.values())}


@pytest.mark.slow
def test_keras_files_of_every_layout_give_the_run_s_metrics(trained, run, tmp_path):
    # All 360 samples: a limit selects by seed, and only a run has one.
    expected, layers = (
        evaluated(run, trained, "--limit-eval", "100%"),
        layers_of(trained / "checkpoints" / "last.npz"),
    )
    assert expected["dataset"]["size"] == expected["dataset"]["stored"] == 360
    smoothed = expected["measured"].pop(
        "loss"
    )  # the run's loss has its label smoothing, of which a file says nothing
    write_keras_2(tmp_path / "a.weights.h5", layers)
    write_keras_2(tmp_path / "b.h5", foreign(layers), below="model_weights")
    write_keras_3(tmp_path / "c.weights.h5", layers)
    write_keras_3(tmp_path / "d.weights.h5", layers, with_names=False)
    with zipfile.ZipFile(str(tmp_path / "e.keras"), "w") as archive:
        archive.writestr("config.json", "not even JSON")
        archive.write(str(tmp_path / "d.weights.h5"), "model.weights.h5")
    (tmp_path / "f.keras").write_bytes((tmp_path / "b.h5").read_bytes())
    for path in sorted(tmp_path.glob("?.*")):
        result = evaluated(run, path.name, *LENET[:4])
        assert result["confusion_matrix"] == expected["confusion_matrix"], path
        assert result["measured"].pop("loss") != pytest.approx(smoothed)
        assert result["measured"] == pytest.approx(expected["measured"], abs=1e-6)
        assert result["checkpoint"] == path.name
    code, out, err = run("evaluate", "lenet", "--weights", "a.weights.h5", *LENET[2:])
    assert code == 0 and "37 of 37" in out and "data set digits" in err


def test_a_cut_weight_file_is_refused(trained, run, tmp_path):
    write_keras_2(tmp_path / "cut.h5", layers_of(trained / "checkpoints" / "last.npz"))
    os.truncate(tmp_path / "cut.h5", 9000)
    check_refused(run, Refusal(["evaluate", "cut.h5", *LENET], "cut.h5 is damaged", code=3))


@pytest.mark.slow
def test_the_keras_files_of_a_folder_are_validated_in_the_order_of_their_epochs(trained, run, tmp_path):
    layers = layers_of(trained / "checkpoints" / "last.npz")
    zeros = {name: {w: 0 * value for w, value in weights.items()} for name, weights in layers.items()}
    folder = tmp_path / "saved"
    folder.mkdir()
    write_keras_2(folder / "epoch_10.0.h5", layers)
    write_keras_2(folder / "epoch_2.0.h5", zeros)
    words = ("train", *LENET, "--device", "cpu", "--seed", "1", "--micro-batch-size", "32")
    of_folder = ("--checkpoint-input-dir", "saved", "--run-dir")
    code, _, err = run(*words, "--no-training", *of_folder, "v")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "v" / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_updates"] for row in rows] == [2 * 44, 10 * 44]
    assert rows[0]["loss"] == pytest.approx(math.log(10)) and rows[1]["accuracy"] > 2 * rows[0]["accuracy"]
    # They have no training position; a new run can begin with the weights of one of them.
    hint = "validate them with --no-training, or start from one of them: --weights saved/epoch_10.0.h5"
    check_refused(run, Refusal([*words, *of_folder, "t"], "", hint, 3))
    few = ("--limit-train", "320", "--num-epochs", "1", "--run-dir", "t")
    code, _, err = run(*words, "--weights", "saved/epoch_10.0.h5", *few)
    assert (
        code == 0 and json.loads((tmp_path / "t" / "report.json").read_text())["validation"]["accuracy"] > 0.5
    )
    (folder / "epoch_11.0.h5").write_bytes(b"no HDF5")
    check_refused(run, Refusal([*words, "--no-training", *of_folder, "w"], "epoch_11.0.h5", code=3))


@pytest.mark.slow
def test_files_of_the_installed_keras_are_read(trained, run, tmp_path):
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.keras_files import load_keras_weights
    from ipucnn.models.names import named_weights
    from ipucnn.models.registry import get_model

    for name, shape in (("cifar_resnet8", (16, 16, 3)), ("mobilenet", (32, 32, 3))):
        first, second = (build_model(get_model(name), BuildOptions(shape, 4, seed=seed)) for seed in (1, 2))
        first.save_weights(str(tmp_path / "w.weights.h5"))
        load_keras_weights(second, tmp_path / "w.weights.h5")
        for (key, a), b in zip(named_weights(first).items(), named_weights(second).values()):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=key)


@pytest.mark.parametrize("extension", [".keras", ".h5"])
def test_code_in_a_keras_file_is_never_executed(run, tmp_path, extension):
    from tensorflow import keras

    from ipucnn.compat import KERAS_3
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.registry import get_model

    model = build_model(get_model("lenet"), BuildOptions((28, 28, 1), 10, norm="none"))
    mark = str(tmp_path / "executed")
    bomb = keras.layers.Lambda(eval(f"lambda x: (open({mark!r}, 'w').close(), x)[1]"))
    path = tmp_path / f"m{extension}"
    keras.Model(model.input, bomb(model.output)).save(str(path))
    (tmp_path / "executed").unlink()
    code, out, err = run("evaluate", path, *LENET, "--image-size", "28")
    assert code == 0 and "37 of 37" in out, err
    assert not (tmp_path / "executed").exists()
    # The file does contain live code: Keras runs it if trusted.
    keras.models.load_model(str(path), **({"safe_mode": False} if KERAS_3 else {}))
    assert (tmp_path / "executed").exists()


@pytest.mark.slow
def test_strange_names_of_classes_and_files_are_printable_everywhere(trained, run, tmp_path):
    names = ["ab", "a\x1b[31mb", "东京", os.fsdecode(b"\xff"), "$x_{$", *"56789"]
    for name in names:
        for part in ("train", "val"):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(str(folder / "x.png"))
    (tmp_path / "data" / "val" / "ab" / "x.png").rename(
        tmp_path / "data" / "val" / "ab" / os.fsdecode(b"\xfe.png")
    )
    checkpoint = load_checkpoint(trained / "checkpoints" / "last.npz")
    args = [os.fsdecode(b"\xfd.npz"), "--dataset", "imagefolder", "--dataset-path", "data"]
    meta = {**checkpoint.meta, "class_names": sorted(names)}
    save_checkpoint(tmp_path / args[0], checkpoint.weights, {}, meta)
    with warnings.catch_warnings():  # "$x_{$" is no formula
        warnings.filterwarnings("error", "Glyph")
        code, out, err = run("evaluate", *args, "--predictions", "p.csv", "--plot", "p.png", columns=160)
    assert code == 0, err
    text = (tmp_path / "p.csv").read_text(encoding="utf-8")
    for where in (out, text):
        assert "a\\x1b[31mb" in where and "东京" in where and "\\udcff" in where
        where.encode("utf-8")
    rows = [*csv.DictReader(text.splitlines())]
    assert "data/val/a\x1b[31mb/x.png" in {row["image"] for row in rows}  # the name of the file
    assert "\x1b" not in out + "".join(row["label"] + row["prediction"] for row in rows)
    assert "\\udcfe.png" in text and "\\udcfd.npz" in out
    code, out, _ = run("evaluate", *args, "--json")
    assert {row["name"] for row in json.loads(out)["classes"]} >= {"东京", "\\udcff"}
    (tmp_path / "data" / "val" / "ab" / os.fsdecode(b"\xfe.png")).write_bytes(b"no image")
    check_refused(run, Refusal(["evaluate", *args], "\\udcfe.png", code=3))


def test_a_batch_beyond_memory_is_refused(trained, run, monkeypatch):
    option = "--validation-micro-batch-size"
    with monkeypatch.context() as patched:
        patched.setattr("ipucnn.datasets.limits.available_bytes", lambda: 2**20)
        check_refused(
            run, Refusal(["evaluate", trained, option, 2**20], "1,048,576 images needs", f"lower {option}", 4)
        )

    def too_large(*_, **__):
        raise MemoryError

    monkeypatch.setattr("ipucnn.sessions.host.session.HostPredictor.logits", too_large)
    check_refused(run, Refusal(["evaluate", trained], "do not fit into memory", "lower", 4))


@pytest.mark.slow
def test_run_of_another_folder_hints_at_its_data_path(run, tmp_path, monkeypatch, lightly):
    """A run's relative data path does not exist in another folder: the hint says what to type."""
    home = tmp_path / "home"
    for label, name in enumerate("ab"):
        (home / "my photos" / name).mkdir(parents=True)
        for k in range(4):
            pixels = np.full((12, 12, 3), 40 * k + 90 * label, np.uint8)
            Image.fromarray(pixels).save(home / "my photos" / name / f"{k}.png")
    (tmp_path / "else").mkdir()
    small = ["--image-size", "32", "--micro-batch-size", "2", "--global-batch-size", "2", "--num-epochs", "1"]
    ways = (
        (["--dataset", "imagefolder", "--dataset-path", "my photos"], "--dataset-path"),
        (["--dataset", "./my photos"], "--dataset"),
    )
    for number, (data, flag) in enumerate(ways):
        monkeypatch.chdir(home)
        code, _, err = run("train", "lenet", *data, *small, "--run-dir", f"runs/{number}")
        assert code == 0 and "few training images: the smallest class" in err, err
        monkeypatch.chdir(tmp_path / "else")
        evaluate = ["evaluate", f"../home/runs/{number}"]
        hint = f"from here, add {flag} '../home/my photos'"
        check_refused(run, Refusal(evaluate, "", hint, 3 if flag == "--dataset-path" else 2))
        code, out, err = run(*evaluate, flag, "../home/my photos")
        assert code == 0 and "samples seen" in out, err
        # A wrong value has its own hint, wherever the data are.
        code, _, err = run(*evaluate, "--validation-micro-batch-size", "0")
        assert code == 2 and "another folder" not in err and "--validation-micro-batch-size" in err
        # Notes about training do not appear in evaluation.
        assert "few training images" not in err
    (home / "my photos").rename(home / "gone")
    check_refused(run, Refusal("evaluate ../home/runs/0", "", "add --dataset-path DIR", 3))
    code, _, err = run("evaluate", "../home/runs/0", "--dataset-path", "nowhere")
    assert code == 3 and "nowhere does not exist" in err and "another folder" not in err
