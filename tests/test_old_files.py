"""Reads files that revision cd09a5d wrote (``tests/data/cd09a5d``): a run, a plan, a suite and its result."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.refusals import Refusal, check_refused

OLD = Path(__file__).parent / "data" / "cd09a5d"


@pytest.fixture
def old(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_old_run_is_listed_evaluated_used_and_continued(old, run, report):
    saved = json.loads((old / "run" / "report.json").read_text())
    (row,) = report("runs", "old")
    assert (row["model"], row["state"], row["weight_updates"]) == ("toy_model", "finished", 8)
    measured = report("evaluate", "old/run")["measured"]
    for name in ("accuracy", "loss"):
        assert measured[name] == pytest.approx(saved["validation"][name], rel=1e-5)
    assert len(report("infer", "old/run", "--split", "eval")) == 40
    code, _, err = run("train", "--resume", "--run-dir", "old/run")
    assert code == 0 and "finished" in err and (old / "run" / "report.html").exists()
    code, out, err = run("train", "--resume", "--run-dir", "old/run", "--num-epochs", "3", "--json")
    assert code == 0 and "continuing after weight update 8" in err, err
    assert json.loads(out)["trained_samples"] == 3 * 64
    rows = [json.loads(line) for line in (old / "run" / "metrics.jsonl").read_text().splitlines()]
    former = [json.loads(line) for line in (OLD / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[: len(former)] == former and rows[-1]["weight_updates"] == 12
    assert np.isfinite(rows[-1]["loss"])


def test_old_plan_is_trained_and_compared(old, run, report):
    program = report("train", "--plan", "old/plan.yml", "--dry-run")["program"]
    assert program["pipeline_splits"] == ["max_pooling2d_1"] and program["precision"] == "16.16"
    assert program["gradient_accumulation_count"] == 32
    code, out, err = run(
        "plan-splits", "toy_model", "--dataset", "digits", "--stages", "2", "--compare", "old/plan.yml"
    )
    assert code == 0 and "plan.yml" in out, err


def test_old_suite_and_result_are_refused_with_their_replacement(old, run):
    (old / "new.yml").write_text("title: small\nrows:\n  - benchmark toy_model --host-generated-data\n")
    check_refused(
        run,
        Refusal("benchmark --suite old/suite.yml", "unknown field `defaults`", "options: --flag value"),
        Refusal("benchmark --suite old/new.yml --versus old/suite.json", "version", code=3),
    )
