"""Damaged files of a run folder: anything that no run writes counts as absent, never as a report."""

import copy
import json

from hypothesis import given
from hypothesis import strategies as st

from ipucnn.reports.train import report_rows
from ipucnn.runs.folder import ENVIRONMENT, REPORT, RunFolder

FIGURES = {"samples": 360, "loss": 2.08, "accuracy": 0.23, "top5": 0.75}
DEVICE = {"kind": "cpu", "name": "CPU", "num_cores": 2, "memory_bytes": 2**34}
WHOLE = {
    "model": "toy_model",
    "dataset": {
        "name": "digits",
        "location": "embedded",
        "train": 1437,
        "evaluation": 360,
        "class_names": ["0"],
    },
    "program": {"num_epochs": 1},
    "compilation": {
        "device": DEVICE,
        "num_layers": 7,
        "num_parameters": 5418,
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
        "first_weight_update": 0,
    },
    "checkpoints": ["best.npz", "last.npz"],
    "trained_samples": 1408,
    "validation": {**FIGURES, "dice": 0.5, "iou": 0.4},
    "best_validation": FIGURES,
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
    assert RunFolder(tmp_path).read_report() == WHOLE


@given(place=st.sampled_from(places(WHOLE)), value=VALUES, remove=st.booleans())
def test_malformed_report_is_absent_or_can_be_shown(tmp_path_factory, place, value, remove):
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
    loaded = RunFolder(folder).read_report()
    if loaded is not None:
        assert report_rows(loaded, "r", None)


@given(
    data=st.binary(max_size=30)
    | st.sampled_from([b"[" * 100_000, b"[1]", b"NaN", b"9" * 10_000, b'{"a": 1}'])
)
def test_arbitrary_bytes_are_not_a_report(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    for name in (REPORT, ENVIRONMENT):
        (folder / name).write_bytes(data)
    assert RunFolder(folder).read_report() is None
    assert RunFolder(folder).add_environment({"python": "3"})[-1]["python"] == "3"
