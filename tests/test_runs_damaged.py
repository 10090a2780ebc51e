"""Damaged files of a run folder: anything that no run writes is refused, and never counts as absent."""

import copy
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refusal, check_refused
from support.trained_runs import train

from ipucnn.errors import DataError
from ipucnn.reports.train import report_rows
from ipucnn.runs.folder import ENVIRONMENT, PROGRAM, REPORT, THRESHOLDS, RunFolder
from ipucnn.runs.records import plain
from ipucnn.runs.writer import RunWriter

FIGURES = {"samples": 360, "loss": 2.08, "accuracy": 0.23, "top5": 0.75}
DEVICE = {"kind": "cpu", "name": "CPU", "num_cores": 2, "memory_bytes": 2**34}
WHOLE = {
    "model": "toy_model",
    "dataset": {
        "name": "digits",
        "location": "embedded",
        "choice": "",
        "train": 1437,
        "evaluation": 360,
        "class_names": ["0"],
        "left_out": [],
        "unused": [],
        "validated_pixels": None,
        "warnings": [],
    },
    "notes": [],
    "program": {"num_epochs": 1},
    "compilation": {
        "device": DEVICE,
        "num_layers": 7,
        "num_parameters": 5418,
        "num_trainable_parameters": 5418,
        "trace_s": 1.0,
        "first_update_s": 0.1,
        "macs_per_sample": 46400,
        "num_graph_operations": 384,
        "fused_micro_batches": 1,
        "cached": False,
        "compile_s": 1.1,
    },
    "measured": {
        "images_per_s": 14436.4,
        "flop_per_s": 4.0e9,
        "train_s": 0.1,
        "wall_s": 2.2,
        "peak_memory_bytes": 2**30,
        "sharing": None,
        "first_weight_update": 0,
        "samples": 1408,
    },
    "ended_early": None,
    "target": None,
    "averaged_weights": False,
    "moving_statistics": "running",
    "checkpoints": ["best.npz", "last.npz"],
    "checkpoints_deleted": False,
    "trained_samples": 1408,
    "validation": {**FIGURES, "dice": 0.5, "iou": 0.4},
    "best_validation": FIGURES,
    "processes": [],
    "environment": {"python": "3.11"},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value, path=()):
    """Returns the path to every value in nested mappings."""
    paths = [path] if path else []
    for key, item in value.items() if isinstance(value, dict) else ():
        paths += places(item, (*path, key))
    return paths


def test_complete_report_is_accepted(tmp_path):
    (tmp_path / REPORT).write_text(json.dumps(WHOLE))
    assert plain(RunFolder(tmp_path).read_report()) == WHOLE


def test_reports_of_runs_before_the_choice_of_data_was_recorded_are_read(tmp_path):
    report = copy.deepcopy(WHOLE)
    del report["dataset"]["choice"]
    (tmp_path / REPORT).write_text(json.dumps(report))
    assert plain(RunFolder(tmp_path).read_report())["dataset"] == {**report["dataset"], "choice": ""}


@given(place=st.sampled_from(places(WHOLE)), value=VALUES, remove=st.booleans())
def test_malformed_report_is_refused_or_can_be_shown(tmp_path_factory, place, value, remove):
    folder = tmp_path_factory.mktemp("run")
    report = copy.deepcopy(WHOLE)
    part = report
    for key in place[:-1]:
        part = part[key]
    if remove:
        del part[place[-1]]
    else:
        part[place[-1]] = value
    (folder / REPORT).write_text(json.dumps(report))
    try:
        loaded = RunFolder(folder).read_report()
    except DataError as error:
        assert "report.json" in error.message and "mv " in error.hint
    else:
        report["dataset"].setdefault("choice", "")
        assert plain(loaded) == report and report_rows(loaded, "r", None)


@pytest.mark.slow
@given(
    data=st.binary(max_size=30)
    | st.sampled_from([b"[" * 100_000, b"[1]", b"NaN", b"9" * 10_000, b'{"a": 1}'])
)
def test_arbitrary_bytes_are_refused_and_stay(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("run")
    folder = RunWriter(path)
    for name, read in (
        (REPORT, folder.read_report),
        (ENVIRONMENT, lambda: folder.add_environment({"python": "3"})),
        (PROGRAM, folder.read_program),
        (THRESHOLDS, lambda: folder.keep_threshold(1, 0.5)),
    ):
        if data == b'{"a": 1}' and name == PROGRAM:
            continue
        (path / name).write_bytes(data)
        with pytest.raises(DataError, match=name):
            read()
        assert (path / name).read_bytes() == data


def test_absent_files_are_empty(tmp_path):
    folder = RunFolder(tmp_path)
    assert (folder.read_report(), folder.processes(), folder.read_program()) == (None, [], {})
    assert (folder.thresholds(), folder.checkpoint_facts()) == ({}, {})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    train(path, "toy_model --dataset digits --limit-train 32 --num-epochs 1 --seed 1 --no-validation")
    return path


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("damage", ["not JSON", "a folder", "a link to nothing"])
@pytest.mark.parametrize("name", [REPORT, ENVIRONMENT, PROGRAM])
def test_what_cannot_be_read_ends_the_commands_and_loses_nothing(finished, tmp_path, run, name, damage):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / name
    path.unlink()
    if damage == "not JSON":
        path.write_text("{")
    elif damage == "a folder":
        path.mkdir()
    else:
        path.symlink_to("absent")
    before = contents(tmp_path / "run")
    commands = ["diff run run", "plot run"]
    if name != PROGRAM:  # a continued run writes it again
        commands += ["train --resume --run-dir run", "train --resume --run-dir run --num-epochs 2"]
    refusals = [
        Refusal(command, f"run/{name}", f"mv run/{name} run/{name}.damaged", 3) for command in commands
    ]
    check_refused(run, *refusals)
    assert contents(tmp_path / "run") == before
    code, _, err = run("runs", ".")
    assert code == 3 and f"left out: run/{name}" in err


def test_a_damaged_checkpoint_is_not_an_absent_one(finished, tmp_path, run):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "last.npz").write_bytes(b"PK")
    (tmp_path / "run" / REPORT).unlink()
    check_refused(run, Refusal("diff run run", "run/checkpoints/last.npz", code=3))
