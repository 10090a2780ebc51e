"""Commands that compare run folders: the list, the differences of two, their curves, and the page of one."""

import html
import json
import os
import re
import shutil
import threading
import time
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import markupsafe
import msgspec
import numpy as np
import pytest
from support.data_sets import write_class_folders
from support.refusals import Refusal, check_refused
from support.trained_runs import train

from ipucnn.filesystem import locked
from ipucnn.reports import units
from ipucnn.reports.runs import print_runs
from ipucnn.runs import compare
from ipucnn.runs.compare import read_run, runs_of, sort_runs, summary
from ipucnn.runs.records import ClassScores, EvaluatedDataset, Evaluation

LINE = (
    "mnist_cnn --dataset digits --limit-train 32 --limit-eval 20 --micro-batch-size 8 --num-epochs 2 --seed 3"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Trains two runs of one command, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("compare") / "runs"
    for name, more in (("first", ""), ("again", ""), ("faster", "--learning-rate 0.5")):
        line = f"{LINE} --gradient-accumulation-count 1 --logs-per-epoch 4 {more}"
        train(folder / name, line, lightly=True)
    return folder


def test_the_list_describes_each_run(folder, run, report):
    rows = report("runs", folder)
    assert [Path(row["run"]).name for row in rows] == ["again", "faster", "first"]
    history = [json.loads(line) for line in (folder / "first" / "metrics.jsonl").read_text().splitlines()]
    row, last = rows[2], max(r["weight_updates"] for r in history)
    assert (row["model"], row["dataset"], row["state"]) == ("mnist_cnn", "digits", "finished")
    assert row["value"] == max(r["accuracy"] for r in history if r["event"] == "validation")
    assert row["weight_updates"] == row["num_weight_updates"] == last
    files = {p.stat().st_ino: p.stat().st_size for p in (folder / "first").rglob("*") if p.is_file()}
    assert row["size_bytes"] == sum(files.values())
    assert 0 <= row["age_s"] < 3600
    # Names are shown whole, and other columns are cut.
    out = run("runs", folder, columns=24 + max(len(row["run"]) for row in rows))[1]
    assert all(row["run"] in out for row in rows)


def test_states_of_runs(folder, tmp_path):
    path = tmp_path / "r"
    shutil.copytree(str(folder / "first"), str(path))
    report = json.loads((path / "report.json").read_text())
    (path / "report.json").write_text(json.dumps({**report, "ended_early": "accuracy reached"}))
    assert summary(read_run(path))["state"] == "ended early"
    (path / "report.json").unlink()
    assert summary(read_run(path))["state"] == "stopped"
    handle = locked(path)
    if handle is not None:
        assert summary(read_run(path))["state"] == "running"


def test_the_size_of_a_run_counts_each_file_once_and_external_checkpoints(report, lightly):
    report("train", *LINE.split(), "--run-dir", "r", "--checkpoint-dir", "elsewhere")
    Path("elsewhere/notes.txt").write_text("not of the run")
    files = {p.stat().st_ino: p for p in [*Path("r").rglob("*"), *Path("elsewhere").glob("*.npz")]}
    assert len(list(Path("elsewhere").glob("*.npz"))) >= 2
    row = summary(read_run(Path("r")))
    assert row["size_bytes"] == sum(p.stat().st_size for p in files.values() if p.is_file())


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Los_Angeles", "UTC"])
def test_the_age_of_a_run_counts_from_its_start_in_its_own_zone(folder, tmp_path, monkeypatch, zone):
    path = tmp_path / "r"
    shutil.copytree(str(folder / "first"), str(path))
    processes = json.loads((path / "environment.json").read_text())
    ages = {}
    for hours, when in ((0, "now"), (8, "8 hours")):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            begun = time.localtime(time.time() - 3600 * hours - 1)
            processes[-1]["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", begun)
        time.tzset()
        (path / "environment.json").write_text(json.dumps(processes))
        ages[when] = summary(read_run(path))["age_s"]
    assert 0 <= ages["now"] < 60 and 8 * 3600 <= ages["8 hours"] < 8 * 3600 + 60


def test_a_run_can_start_while_it_is_read(folder, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    flock, taken = fcntl.flock, []

    def watched(handle, how):
        taken.append(how)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", watched)
    assert read_run(folder / "first").state == "finished"
    assert taken == [fcntl.LOCK_SH | fcntl.LOCK_NB]
    # A reader may hold its lock for a while.
    handle = os.open(str(folder / "first"), os.O_RDONLY)
    flock(handle, taken[0])
    timer = threading.Timer(0.1, os.close, [handle])
    timer.start()
    lock = locked(folder / "first")
    timer.join()
    assert lock is not None
    os.close(lock)


def test_sorting_puts_unknown_values_last():
    rows = [
        {"run": str(i), "value": value, "age_s": age, "time_s": i, "size_bytes": -i}
        for i, (value, age) in enumerate([(0.5, 30.0), (None, None), (0.9, 2.0)])
    ]
    order = {
        by: [row["run"] for row in sort_runs(rows, by)] for by in ("name", "accuracy", "age", "time", "size")
    }
    assert order["name"] == ["0", "1", "2"] and order["accuracy"] == ["2", "0", "1"]
    assert (
        order["age"] == ["2", "0", "1"]
        and order["time"] == ["2", "1", "0"]
        and order["size"] == ["0", "1", "2"]
    )


def test_damaged_runs_are_named_and_the_others_listed(folder, run, tmp_path):
    (tmp_path / "runs").mkdir()
    shutil.copytree(str(folder / "first"), str(tmp_path / "runs" / "good"))
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "config.yml").write_text("nothing: of use\n")
    (tmp_path / "runs" / "notes").mkdir()
    code, out, err = run("runs", "--json")
    assert code == 3 and [row["run"] for row in json.loads(out)] == ["runs/good"]
    assert "left out: runs/bad/config.yml is damaged" in err and "1 of 2 runs could not be read" in err


def test_two_runs_of_one_command_are_equal(folder, run, report):
    near = f"did you mean '{folder / 'first'}'"
    check_refused(run, Refusal(["diff", folder / "frist", folder / "again"], "", near, 3))
    # Benchmarks and cross-validations are not runs to compare with.
    bench, folds = folder / "nowhere", folder / "nowhere-kfold"
    shutil.copytree(folder / "first", bench)
    for file in ("environment.json", "metrics.jsonl"):
        (bench / file).unlink()
    folds.mkdir()
    shutil.copy(folder / "first" / "config.yml", folds)
    (folds / "folds.json").write_text("{}")
    code, _, err = run("diff", folder / "nowhere1", folder / "again", columns=1000)
    shutil.rmtree(bench)
    shutil.rmtree(folds)
    names = ", ".join(str(folder / name) for name in ("again", "faster", "first"))
    assert code == 3 and f"hint: there are: {names}\n" in err
    code, out, _ = run("diff", folder / "first", folder / "again")
    assert code == 0 and out.splitlines()[-1] == "equal" and "the same bytes in all" in out
    compared = report("diff", folder / "first", folder / "again")
    assert compared["equal"] and not compared["options"] and list(compared["places"]) == ["run-dir"]
    assert compared["data_sha256"][0] == compared["data_sha256"][1] is not None


@pytest.mark.parametrize(
    ("dataset", "path", "label"),
    [
        ("photos", ".", "photos"),
        ("./photos/", ".", "photos"),
        ("imagefolder", "some/photos", "photos"),
        ("imagemasks", "photos/", "photos"),
        ("tfds:a/b", ".", "tfds:a/b"),
        ("sub/data.py:load", ".", "data.py:load"),
        ("digits", ".", "digits"),
    ],
)
def test_runs_shows_one_name_for_data_however_typed(folder, dataset, path, label):
    run = read_run(folder / "first")
    assert (
        summary(replace(run, config=replace(run.config, dataset=dataset, dataset_path=path)))["dataset"]
        == label
    )


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["sky", "old tree"], "Dice of old tree 0.5000"), (["a", "b", "c"], "mean Dice 0.5000")],
)
@pytest.mark.parametrize("has_report", [True, False])
def test_runs_names_the_class_of_a_dice_score(folder, names, shown, has_report, monkeypatch, capsys):
    run = read_run(folder / "first")
    monkeypatch.setattr(compare.RunRecord, "facts", {"class_names": names})
    dataset = msgspec.structs.replace(run.report.dataset, class_names=names)
    report = msgspec.structs.replace(run.report, dataset=dataset) if has_report else None
    history = [{"event": "validation", "weight_updates": 1, "dice": 0.5}]
    print_runs([summary(replace(run, report=report, history=history))])
    assert shown in capsys.readouterr().out


def test_runs_counts_the_weight_updates_of_the_last_checkpoint(folder):
    """A signal within an execution saves a checkpoint, but adds no row to the history."""
    whole = read_run(folder / "first")
    stopped = replace(whole, report=None, history=whole.history[:1])
    assert summary(stopped)["weight_updates"] == whole.weight_updates > stopped.weight_updates


def test_a_stopped_run_is_compared_up_to_its_end(folder, run, report):
    shutil.copytree(str(folder / "first"), "r")
    rows = (folder / "first" / "metrics.jsonl").read_text().splitlines(keepends=True)

    def last_line(kept):
        Path("r/metrics.jsonl").write_text("".join(kept))
        for runs in (("r", folder / "first"), (folder / "first", "r")):
            code, out, _ = run("diff", *runs)
            assert code == 0 and not report("diff", *runs)["equal"]
        return out.splitlines()[-1]

    updates = [json.loads(row)["weight_updates"] for row in rows]
    assert last_line(rows[:2]) == f"equal as far as both go ({updates[1]} of {updates[-1]} weight updates)"
    without = [row for row in rows if '"validation"' not in row]
    assert (
        last_line(without) == f"equal as far as both go ({len(without)} of {len(rows)} rows of the history)"
    )
    assert last_line([]) == "not comparable"
    shutil.rmtree("r/checkpoints")
    assert last_line(rows) == "equal as far as is known: of the samples it is not"


def test_unreadable_lines_are_reported_and_prevent_equality(folder, run, report):
    shutil.copytree(str(folder / "first"), "r")
    text = (folder / "first" / "metrics.jsonl").read_text()
    Path("r/metrics.jsonl").write_text(f"[1, 2]\nno row\n{text}" + '{"event": "half')
    code, out, err = run("diff", folder / "first", "r")
    warning = "warning: 2 lines of r/metrics.jsonl cannot be read, and are left out"
    assert (
        code == 0
        and out.splitlines()[-1] == "equal as far as can be read"
        and warning in " ".join(err.split())
    )
    assert not report("diff", folder / "first", "r")["equal"]
    for words in (("runs", "."), ("plot", "r", "--output", "x.svg")):
        code, _, err = run(*words)
        assert code == 0 and warning in " ".join(err.split()), err
    Path("r/metrics.jsonl").write_text(text + '{"event": "half')  # the history of a killed run
    code, out, err = run("diff", folder / "first", "r")
    assert code == 0 and out.splitlines()[-1] == "equal" and "warning" not in err


@pytest.mark.slow
def test_folds_of_a_cross_validation_are_runs_and_benchmarks_are_not(folder, run, report):
    shutil.copytree(str(folder / "first"), "runs/folds/fold-1")
    shutil.copytree(str(folder / "again"), "runs/folds/fold-2")
    Path("runs/measured").mkdir()
    for place in ("folds", "measured"):
        shutil.copy(str(folder / "first" / "config.yml"), f"runs/{place}/config.yml")
    for name in ("report.json", "program.json"):
        shutil.copy(str(folder / "first" / name), f"runs/measured/{name}")
    assert [row["run"] for row in report("runs")] == ["runs/folds/fold-1", "runs/folds/fold-2"]
    shutil.copytree("runs/folds/fold-2", "runs/folds/fold-10")
    assert [row["run"].rpartition("-")[2] for row in report("runs")] == ["1", "2", "10"]
    assert [path.name for path in runs_of(Path("runs/folds"))] == ["fold-1", "fold-2", "fold-10"]
    shutil.rmtree("runs/folds/fold-10")
    Path("runs/folds/fold-2/environment.json").unlink()  # still a run
    assert len(report("runs")) == 2
    error = "runs/folds is a cross-validation of 2 folds"
    check_refused(run, Refusal(["diff", "runs/folds", folder / "first"], error, "runs/folds/fold-1", 3))
    code, _, err = run("plot", "runs/folds", "--output", "x.svg")
    assert code == 0 and "curves of 2 runs" in err


@pytest.mark.slow
def test_different_contents_of_a_network_file_are_reported(run, report, lightly):
    text = "from tensorflow import keras\n\n\ndef build(shape, classes):\n    x = keras.Input(shape)\n"
    text += "    y = keras.layers.Dense(classes)(keras.layers.Flatten()(x))\n    return keras.Model(x, y)\n"
    for name, more in (("one", ""), ("two", ""), ("three", "# changed\n")):
        Path("net.py").write_text(text + more)
        words = LINE.replace("mnist_cnn", "net.py:build").split()
        report("train", *words, "--gradient-accumulation-count", 1, "--num-epochs", 1, "--run-dir", name)
    assert run("diff", "one", "two")[1].splitlines()[-1] == "equal"
    assert list(report("diff", "one", "three")["options"]) == ["the network's file"]
    shutil.rmtree("two/checkpoints")
    compared = report("diff", "one", "two")
    assert compared["options"] == {} and not compared["equal"]  # unknown values are not a difference


def test_how_the_work_was_done_is_no_difference(folder, report, tmp_path):
    shutil.copytree(str(folder / "first"), str(tmp_path / "other"))
    config = tmp_path / "other" / "config.yml"
    config.write_text(re.sub("pipeline-num-parallel: .*", "pipeline-num-parallel: 3", config.read_text()))
    compared = report("diff", folder / "first", tmp_path / "other")
    assert compared["equal"] and not compared["options"] and "pipeline-num-parallel" in compared["places"]


def test_the_one_changed_option_and_the_first_differing_update_are_found(folder, run, report):
    compared = report("diff", folder / "first", folder / "faster")
    assert list(compared["options"]) == ["learning-rate"] and not compared["equal"]
    assert compared["options"]["learning-rate"][1] == 0.5
    # The rate differs from the first weight update on; its loss still comes from the same weights.
    assert (compared["history"]["after"], compared["history"]["weight_updates"]) == (0, 1)
    assert list(compared["history"]["figures"]) == ["learning_rate"]
    _, out, _ = run("diff", folder / "first", folder / "faster")
    assert "the histories first differ at weight update 1\n" in out
    rates = [
        json.loads(p.read_text().splitlines()[0])["learning_rate"]
        for p in sorted(folder.glob("f*/metrics.jsonl"))
    ]
    for other, code in (("faster", 5), ("first", 0)):
        assert run("diff", folder / "first", folder / other, "--exit-code")[0] == code
    (row,) = (line.split() for line in out.splitlines() if line.startswith(" learning_rate"))
    assert row[1:] == [f"{rate:.4g}" for rate in reversed(rates)]
    assert out.splitlines()[-1] == "different: options, histories"


def test_plotting_a_folder_of_runs_names_the_runs(folder, run):
    check_refused(run, Refusal(["plot", folder], "", f"wrote: {folder / 'again'}, ", 3))


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (0.25, 0.5, ["0.25", "0.5"]),
        (0.123456, 0.123457, ["0.123456", "0.123457"]),
        (1 / 3, float(np.nextafter(1 / 3, 1)), ["0.3333333333333333", "0.3333333333333334"]),
        (3, 4, ["3", "4"]),
        (None, 0.5, ["-", "0.5"]),
    ],
)
def test_two_values_are_shown_with_enough_digits_to_differ(folder, run, first, second, shown):
    rows = (folder / "first" / "metrics.jsonl").read_text().splitlines(keepends=True)
    for name, value in (("a", first), ("b", second)):
        shutil.copytree(str(folder / "first"), name)
        changed = json.dumps({**json.loads(rows[0]), "loss": value}) + "\n"
        Path(name, "metrics.jsonl").write_text("".join([changed, *rows[1:]]))
    (row,) = (line.split() for line in run("diff", "a", "b")[1].splitlines() if line.startswith(" loss"))
    assert row[1:] == shown


def test_one_changed_number_in_a_history_is_found(folder, tmp_path, report):
    path = tmp_path / "changed"
    shutil.copytree(str(folder / "first"), str(path))
    lines = (path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    number = [i for i, row in enumerate(rows) if row["event"] == "execution"][-1]
    rows[number]["loss"] = rows[number]["loss"] * (1 + 2e-16)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "exec')
    difference = report("diff", folder / "first", path)["history"]
    assert difference["weight_updates"] == rows[number]["weight_updates"] == difference["after"] + 1
    assert list(difference["figures"]) == ["loss"]


@pytest.mark.slow
@pytest.mark.slow_cases("pdf")
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_curves_of_several_runs_are_drawn(folder, run, ending):
    code, out, err = run("plot", folder / "first", folder / "faster", "--output", f"both.{ending}")
    assert code == 0 and out == "" and f"curves of 2 runs in both.{ending}" in err
    data = Path(f"both.{ending}").read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]) and len(data) > 5000


def test_the_page_of_a_run_is_self_contained_and_matches_the_files(folder):
    text = (folder / "first" / "report.html").read_text()
    xml.dom.minidom.parseString(text.replace("<!DOCTYPE html>", ""))
    assert "<h1>mnist_cnn on digits</h1>" in text and "prefers-color-scheme: dark" in text
    for word in ("<script", "src=", "href=", "@import", "url("):
        assert word not in text
    report = json.loads((folder / "first" / "report.json").read_text())
    best = max(row["accuracy"] for row in read_run(folder / "first").rows("validation"))
    assert f"{best:.2%}" in text and f"{report['environment']['cpu']}" in text
    assert "weight updates per epoch" in text
    assert units.duration(report["measured"]["wall_s"]) in text  # as in the terminal
    assert (
        text.count("<polyline") == 5
    )  # training and validation curves of loss and accuracy, and the learning rate
    points = re.search(r'<polyline points="([^"]+)" class="curve training"', text).group(1).split()
    assert len(points) == len(read_run(folder / "first").rows("execution"))


@pytest.mark.slow
def test_the_page_of_a_run_has_its_warnings_and_notes(succeeds, tmp_path):
    write_class_folders(tmp_path / "<set>", {(part, name): 4 for part in ("train", "val") for name in "ab"})
    shutil.copy(tmp_path / "<set>/train/a/0.png", tmp_path / "<set>/val/a/0.png")
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--run-dir", "r"]
    succeeds("train", "toy_model", "--dataset", "<set>", *words)
    text, report = Path("r/report.html").read_text(), json.loads(Path("r/report.json").read_text())
    lines = [*report["dataset"]["warnings"], *report["notes"]]
    assert any("scores come out too high" in line for line in lines)
    for line in [*lines, report["dataset"]["choice"]]:
        assert html.escape(line, quote=False) in text or markupsafe.escape(line) in text


def test_an_evaluation_adds_its_confusion_matrix_to_the_page(folder, run, report):
    shutil.copytree(str(folder / "first"), "r")
    counts = report("evaluate", "r", "--report")["confusion_matrix"]
    text = Path("r/report.html").read_text()
    assert "20 samples of digits, checkpoint r/checkpoints/last.npz" in text
    table = xml.dom.minidom.parseString(text.replace("<!DOCTYPE html>", "")).getElementsByTagName("table")
    shown = next(t for t in table if t.getAttribute("class") == "confusion")
    shares = [
        float(re.search("[0-9]+", cell.getAttribute("style")).group())
        for cell in shown.getElementsByTagName("td")
    ]
    assert 0 < max(shares) <= 40  # text stays legible on the darkest cell
    names = [row.firstChild.firstChild.data for row in table[-1].getElementsByTagName("tr")]
    program = json.loads(Path("r/program.json").read_text())
    assert names == [name.replace("_", " ") for name, value in sorted(program.items()) if value]
    cells = [int(cell.firstChild.data) for cell in shown.getElementsByTagName("td")]
    assert cells == [count for row in counts for count in row]


@pytest.mark.parametrize(
    ("classes", "scores"),
    [
        (["background", "cell"], "Dice of cell 0.8123, IoU 0.6839"),
        (["road", "sky", "tree"], "mean Dice 0.8123 and IoU 0.6839, without road"),
    ],
)
def test_the_page_has_the_scores_of_evaluated_masks(folder, classes, scores):
    from ipucnn.reports.runs import run_page

    evaluation = Evaluation(
        checkpoint="last.npz",
        model="unet",
        weight_updates=1,
        task="segmentation",
        dataset=EvaluatedDataset("imagemasks", "cells/plate", 3, 3),
        notes=[],
        device="cpu",
        measured={"dice": 0.81234, "iou": 0.68391},
        classes=[ClassScores(k, name, 9, 9, 1.0, 1.0, 1.0, 1.0) for k, name in enumerate(classes)],
        calibration=[],
        confusion_matrix=[[9] * len(classes)] * len(classes),
    )
    assert f"pixels of plate, checkpoint last.npz; {scores}." in run_page(
        read_run(folder / "first"), evaluation
    )


def test_hostile_names_are_escaped(folder, tmp_path):
    from ipucnn.reports.runs import run_page

    shutil.copytree(str(folder / "first"), str(tmp_path / "r"))
    path = tmp_path / "r" / "environment.json"
    processes = json.loads(path.read_text())
    processes[-1]["command"] = "</pre><script>alert(1)</script>\x00"
    path.write_text(json.dumps(processes))
    text = run_page(read_run(tmp_path / "r"))
    assert "<script" not in text and "&lt;script&gt;" in text and "\x00" not in text
