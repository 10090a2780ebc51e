"""Cross-validation: folds are runs of their own, continue where they stopped, and are averaged."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from light_training import train_lightly
from support.data_sets import noise, write_pairs
from support.own_networks import assert_equal
from support.refusals import Refusal, check_refused
from support.trained_runs import report_of, train

from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.datasets.base import fold_of_each, pool, select_fold
from ipucnn.datasets.sources.embedded import open_digits
from ipucnn.errors import DataError
from ipucnn.events import OPENING, Began
from ipucnn.filesystem import is_locked
from ipucnn.machine import operation_threads
from ipucnn.reports.console import Screen
from ipucnn.runs.kfold import CrossValidation, FoldFinished, FoldStarted, mean_and_deviation
from ipucnn.runs.sources import WeightsArgument
from ipucnn.runs.train import TrainingRun
from ipucnn.runs.trained import open_trained
from ipucnn.training import checkpoints

LINE = (
    "toy_model --dataset digits --limit-train 60 --limit-eval 30 --kfold 3 --num-epochs 2 --micro-batch-size 10 "
    "--learning-rate 0.1 --seed 5"
)
OPTIONS = ["train", *LINE.split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs a cross-validation of three folds, and returns its folder."""
    return train(tmp_path_factory.mktemp("kfold") / "cv", LINE)


@pytest.fixture(scope="module")
def light_whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("light") / "cv", LINE, lightly=True)


def folds_of(folder):
    return json.loads((folder / "folds.json").read_text())


def test_every_example_is_held_out_once(light_whole):
    report = folds_of(light_whole)
    held_out = [set(row["held_out"]) for row in report["folds"]]
    assert [len(numbers) for numbers in held_out] == [30] * 3 and len(set.union(*held_out)) == 90
    assert report["missing"] == []
    assert [(row["train"], row["evaluation"]) for row in report["folds"]] == [(60, 30)] * 3
    # A fold continued on a machine with other cores sums in the same order.
    assert report["threads"] == operation_threads()
    for row in report["folds"]:
        assert (light_whole / row["run"] / "report.json").is_file() and (
            light_whole / row["run"] / "config.yml"
        ).is_file()


def test_mean_and_deviation_are_over_the_folds(light_whole):
    report = folds_of(light_whole)
    for key in ("loss", "accuracy"):
        values = np.array([row["validation"][key] for row in report["folds"]])
        assert report["mean"][key] == pytest.approx(values.mean())
        assert report["std"][key] == pytest.approx(values.std(ddof=1))
        for row in report["folds"]:
            assert report_of(light_whole / row["run"])["validation"][key] == row["validation"][key]
    assert mean_and_deviation([3.0]) == (3.0, None)


def test_folds_that_end_early_say_so(lightly, tmp_path, succeeds):
    """Their ends are chosen on the examples that they hold out."""
    out, err = succeeds(*OPTIONS, "--target-accuracy", 0.001, "--run-dir", "cv")
    rows = folds_of(tmp_path / "cv")["folds"]
    reports = [json.loads((tmp_path / "cv" / row["run"] / "report.json").read_text()) for row in rows]
    assert [row["ended_early"] for row in rows] == [report["ended_early"] for report in reports]
    for row, report in zip(rows, reports):
        assert row["weight_updates"] == report["target"]["weight_updates"] == 6  # the first of two epochs
        assert (
            f"; ended early: {row['ended_early']}" in err
            and "reached the target of 0.001" in row["ended_early"]
        )
    assert (
        "ended early: fold 1, 2, 3, by validations on the examples held out: figures may be too good" in out
    )


def test_classes_are_distributed_over_all_folds():
    examples = pool(open_digits())
    assert len(examples) == 1797
    folds = fold_of_each(examples, 5)
    for label in range(10):
        counts = np.bincount(folds[examples.labels == label], minlength=6)[1:]
        assert counts.max() - counts.min() <= 1
    assert np.bincount(folds).max() - np.bincount(folds)[1:].min() <= 1


@pytest.mark.slow
def test_single_fold_equals_the_fold_of_the_cross_validation(whole, tmp_path, run, succeeds):
    out, _ = succeeds(*OPTIONS, "--run-dir", "cv", "--fold", 2)
    assert "not trained: fold 1, 3" in out
    assert_equal("cv/fold-2", whole / "fold-2")
    history = "fold-2/metrics.jsonl"
    assert Path("cv", history).read_bytes() == (whole / history).read_bytes()
    report = folds_of(tmp_path / "cv")
    assert (report["missing"], report["std"]["accuracy"]) == ([1, 3], None)
    # The other folds are further parts of the same cross-validation.
    other = [*OPTIONS, "--run-dir", "cv", "--fold", 3]
    check_refused(run, Refusal(other, "is a cross-validation already, with fold 2", "add --resume"))
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        succeeds(*other, "--resume")
    assert folds_of(tmp_path / "cv")["missing"] == [1]


def stop(patch, number):
    """Sends a signal after the first epoch of a trained fold: the first, second, ..."""
    events, begun = TrainingRun.events, []

    def stopped(self, begin):
        begun.append(self)
        for event in events(self, begin):
            if len(begun) == number and type(event).__name__ == "ExecutionFinished":
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    patch.setattr(TrainingRun, "events", stopped)


@pytest.mark.slow
def test_cross_validation_continues_at_the_fold_where_it_stopped(
    lightly, light_whole, tmp_path, monkeypatch, run, succeeds
):
    folder = tmp_path / "cv"
    with monkeypatch.context() as patch:
        stop(patch, 2)
        code, _, error = run(*OPTIONS, "--run-dir", folder)
    assert code == 130 and f"--resume --run-dir {folder}" in error and "error: fold 2: interrupted" in error
    assert folds_of(folder)["missing"] == [2, 3]
    before = (folder / "fold-1" / "report.json").read_bytes()
    _, error = succeeds("train", "--resume", "--run-dir", folder)
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


def test_a_full_disk_loses_no_fold(lightly, light_whole, tmp_path, monkeypatch, run, succeeds):
    real, names = checkpoints.save_checkpoint, []

    def save(path, *content):
        names.append(str(path))
        if sum("fold-2" in name for name in names) > 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, *content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_checkpoint", save)
        code, _, error = run(*OPTIONS, "--run-dir", "cv")
    assert code == 3 and "error: fold 2: " in error and "No space left on device" in error
    hint = error.splitlines()[-1]
    assert hint == "hint: free some space, and continue it with: ipucnn train --resume --run-dir cv"
    assert folds_of(tmp_path / "cv")["missing"] == [2, 3]
    succeeds("train", "--resume", "--run-dir", "cv")
    for name in ("fold-1/metrics.jsonl", "fold-2/metrics.jsonl", "fold-3/metrics.jsonl"):
        assert Path("cv", name).read_bytes() == (light_whole / name).read_bytes()


@pytest.mark.slow
def test_events_report_finished_folds(lightly, tmp_path):
    flags = {"dataset": "digits", "limit_train": "20", "limit_eval": "10", "kfold": "2", "micro_batch_size": "5",
             "run_dir": str(tmp_path / "cv"), "checkpoints": False, "validation": False}  # fmt: skip
    validation = CrossValidation(resolve("train", flags, model="toy_model"))
    rows = [event.row for event in validation.events() if isinstance(event, FoldFinished)]
    assert [row.fold for row in rows] == [1, 2] and rows[0].validation is None
    assert validation.report().mean == {}


@pytest.mark.slow
def test_fold_is_evaluated_on_its_held_out_part(whole, report):
    measured = report("evaluate", whole / "fold-3")["measured"]
    assert measured["accuracy"] == pytest.approx(folds_of(whole)["folds"][2]["validation"]["accuracy"])


def train_on_pairs(place, validates=False):
    """Trains one fold of two; returns it, its data, and the same images with other labels."""
    images = noise(3, 4, 8, 8)
    masks = (images > 127).astype(np.uint8) * 255
    data, other = (
        write_pairs(place / "data", zip(images, masks)),
        write_pairs(place / "other", zip(images, ~masks)),
    )
    line = (
        f"unet --dataset imagemasks --dataset-path '{data}' --image-size 188 --base-filters 1 --norm-layer none "
        "--no-augment --num-epochs 1 --kfold 2 --fold 1"
    )
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch, evaluates=validates)
        return train(place / "cv", line if validates else f"{line} --no-validation"), data, other


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory):
    return train_on_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.mark.slow
@pytest.mark.parametrize("has_list", [True, False])
def test_folds_of_other_labels_are_refused(of_pairs, run, has_list):
    """Without folds.json, a finished fold's checkpoint knows its data."""
    whole, _, other = of_pairs
    shutil.copytree(str(whole), "cv")
    if not has_list:
        Path("cv/folds.json").unlink()
    resume = ["train", "unet", "--resume", "--run-dir", "cv", "--dataset-path", other]
    for more in (["--kfold", "2", "--fold", "2"], ["--kfold", "2"], *([[]] if has_list else [])):
        check_refused(run, Refusal([*resume, *more], "images or labels differ", "another --run-dir"))


@pytest.mark.slow
def test_typed_pairs_are_evaluated_whole_unless_they_are_those_of_the_fold(of_pairs, tmp_path):
    whole, data, other = of_pairs
    copied = shutil.copytree(str(data), str(tmp_path / "copied"))

    def evaluated(*flags):
        trained = open_trained(WeightsArgument("evaluate", str(whole / "fold-1"), dict(*flags)))
        return trained.num_stored, trained.source.eval.names, trained.notes

    names = [f"images/{k}.png" for k in range(4)]
    assert evaluated()[:2] == (2, tuple(names[:2]))
    for folder in (data, copied):
        stored, held_out, (note,) = evaluated({"dataset": str(folder)}.items())
        assert (stored, held_out) == (2, tuple(names[:2])) and note.startswith(
            "2 of the 4 pairs of imagemasks"
        )
    stored, every, notes = evaluated({"dataset": str(other)}.items())
    assert (stored, every) == (4, tuple(names)) and notes[0].startswith("all 4 pairs of imagemasks")
    assert (
        notes[1].startswith("2 of the 4 images of imagemasks")
        and "that the network was trained on" in notes[1]
    )


@pytest.mark.slow
def test_validation_counts_whole_images(tmp_path):
    (row,) = folds_of(train_on_pairs(tmp_path, validates=True)[0])["folds"]
    assert row["validation"]["samples"] == 2 and isinstance(row["validation"]["samples"], int)


def test_all_folds_have_the_checksum_of_the_same_data():
    source = open_digits()
    parts = [select_fold(source, 3, fold) for fold in (1, 2)]
    labels = source.train.labels.copy()
    labels[0] = (labels[0] + 1) % 10
    changed = replace(source, train=replace(source.train, labels=labels))
    assert parts[0].pool_sha256 == parts[1].pool_sha256 != select_fold(changed, 3, 1).pool_sha256


def test_a_fold_may_move_its_checkpoints(light_whole, succeeds):
    """A fold is a run like any other; only a cross-validation refuses a folder of checkpoints."""
    shutil.copytree(light_whole / "fold-1", "fold-1")
    Path("fold-1/checkpoints").rename("elsewhere")
    Path("fold-1/fold-images").mkdir()  # a run may contain a folder that is called like a fold
    saved = Path("fold-1/config.yml").read_text(encoding="utf-8")
    changed = re.sub(r"^checkpoint-dir: .*$", "checkpoint-dir: elsewhere", saved, flags=re.M)
    assert changed != saved
    Path("fold-1/config.yml").write_text(changed, encoding="utf-8")
    succeeds("evaluate", "fold-1")
    succeeds("train", "--resume", "--run-dir", "fold-1", "--num-epochs", 9, "--dry-run")


def test_a_fold_trains_on_as_a_run_with_a_folder_of_checkpoints(
    lightly, light_whole, tmp_path, run, succeeds
):
    shutil.copytree(light_whole, "cv")
    given = ["--checkpoint-input-dir", "cv/fold-1/checkpoints", "--num-epochs", 3]
    _, error = succeeds("train", "--resume", "--run-dir", "cv/fold-1", *given)
    assert "continuing after weight update" in error
    assert report_of(tmp_path / "cv" / "fold-1")["program"]["num_epochs"] == 3


def test_the_hint_for_a_fold_can_be_typed(light_whole, tmp_path, run):
    place = shutil.copytree(light_whole, tmp_path / ("my folds " + "x" * 150) / ("y" * 200))
    code, _, error = run("evaluate", place)
    hint = error.splitlines()[-1]
    assert code == 3
    assert shlex.split(hint.partition("name a fold in its place: ")[2]) == [str(place / "fold-1")]


def test_time_of_a_fold_includes_all_its_processes(light_whole):
    for row in folds_of(light_whole)["folds"]:
        lines = (light_whole / row["run"] / "timings.jsonl").read_text().splitlines()
        times = [json.loads(line) for line in lines]
        assert row["train_s"] == pytest.approx(sum(t["wall_s"] for t in times if t["event"] == "execution"))


def test_signals_while_an_event_is_shown_reach_the_run_of_the_fold(lightly, tmp_path, monkeypatch, run):
    show = Screen.show

    def signalled(screen, event):
        show(screen, event)
        if type(event).__name__ == "ExecutionFinished":
            os.kill(os.getpid(), signal.SIGINT)  # deferred, because there is something to save
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Screen, "show", signalled)
    code, _, error = run(*OPTIONS, "--run-dir", tmp_path / "cv")
    assert code == 130
    assert "error: fold 1: interrupted at once; what was not saved is lost" in error
    assert f"continue it with: ipucnn train --resume --run-dir {tmp_path / 'cv'}" in error
    assert not any(map(is_locked, (tmp_path / "cv", tmp_path / "cv" / "fold-1")))


@pytest.mark.slow
def test_the_data_set_is_opened_between_two_folds_only(lightly, tmp_path, monkeypatch, run):
    seen = []
    show = Screen.show
    monkeypatch.setattr(Screen, "show", lambda screen, event: seen.append(event) or show(screen, event))
    code, _, error = run(*OPTIONS, "--run-dir", tmp_path / "cv", "--no-checkpoints")
    assert code == 0, error
    steps = [
        event for event in seen if event == Began(OPENING) or isinstance(event, (FoldStarted, FoldFinished))
    ]
    names = [type(event).__name__ for event in steps]
    assert names == ["Began", *["FoldStarted", "FoldFinished", "Began"] * 3][:-1]
    assert all((tmp_path / "cv" / f"fold-{fold}" / "report.html").is_file() for fold in (1, 2, 3))


@pytest.mark.slow
def test_stopped_first_fold_continues(lightly, tmp_path, monkeypatch, run, succeeds):
    folder = tmp_path / "cv"
    with monkeypatch.context() as patch:
        stop(patch, 1)
        code, _, error = run(*OPTIONS, "--run-dir", folder, "--fold", 1)
    command = f"ipucnn train --resume --run-dir {folder} --kfold 3 --fold 1"
    assert code == 130 and command in " ".join(error.split()), error
    _, error = succeeds(*command.split()[1:])
    assert "continuing after weight update" in error
    (row,) = folds_of(folder)["folds"]
    assert row["train_s"] > report_of(folder / "fold-1")["measured"]["train_s"]


@pytest.mark.slow
def test_no_other_process_goes_on_between_two_folds(lightly, tmp_path, run):
    """The cross-validation is locked from before it is read until its end, also while no fold is."""
    flags = {"dataset": "digits", "limit_train": "20", "limit_eval": "10", "kfold": "2", "micro_batch_size": "5",
             "run_dir": str(tmp_path / "cv"), "validation": False, "seed": "1"}  # fmt: skip
    resolved = resolve("train", flags, model="toy_model")
    command = f"train --resume --run-dir {tmp_path / 'cv'}"
    for number, event in enumerate(CrossValidation(resolved).events()):
        if number and isinstance(event, (FoldStarted, FoldFinished)):
            before = {path: path.read_bytes() for path in tmp_path.glob("cv/**/*") if path.is_file()}
            check_refused(
                run, Refusal(command, f"{tmp_path / 'cv'} is in use by another process", "wait for it")
            )
            assert before == {path: path.read_bytes() for path in tmp_path.glob("cv/**/*") if path.is_file()}
    validation = CrossValidation(
        resolve("train", {"resume": "true", "run_dir": flags["run_dir"]}, model="toy_model")
    )
    assert is_locked(validation.root)
    list(validation.events())
    assert not is_locked(validation.root) and not any(map(is_locked, validation.root.glob("fold-*")))
    (tmp_path / "cv" / "folds.json").write_text("[]")
    with pytest.raises(DataError, match=r"folds\.json is damaged") as error:
        CrossValidation(resolve("train", {"resume": "true", "run_dir": flags["run_dir"]}, model="toy_model"))
    assert "mv " in error.value.hint and not is_locked(validation.root)
    del error
    (tmp_path / "cv" / "folds.json").unlink()
    code, _, err = run(*command.split())
    assert code == 0, err
