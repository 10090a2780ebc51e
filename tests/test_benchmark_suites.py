"""Suites of benchmarks: their files, plans, folders, resuming, results, and what is said of them."""

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipucnn import cli
from ipucnn.benchmarking.records import BenchmarkReport, SuiteResult, from_plain
from ipucnn.benchmarking.suites import file as files
from ipucnn.benchmarking.suites import run as process
from ipucnn.benchmarking.suites.plan import check_rows, plan_suite
from ipucnn.benchmarking.suites.result import finished_row, intensity, read_suite, speedups, to_csv, totals
from ipucnn.benchmarking.suites.run import SuiteRun, _difference, suite_folder
from ipucnn.config.request import RunRequest
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.reports.speedup_figure import draw_speedups

ROOT = Path(__file__).resolve().parent.parent
ROOT = Path(__file__).parents[1]

SMALL = """
title: two small ones
epoch-images: 100
defaults: {host-generated-data: True, seed: 3}
rows:
  - model: lenet
    for-each: {mode: [inference, training], micro-batch-size: [2, 4]}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


def request(model=None, **flags):
    return RunRequest("benchmark", flags, model)


def plan(text=SMALL, model=None, flags=None, **options):
    return plan_suite(files.parse_suite(text, "s.yml", "s"), request(model, **(flags or {})), **options)


def valid(data):
    """The result, after it was read as ``--versus`` reads it."""
    from_plain(data, SuiteResult, "suite", "")
    return data


# -- files


def test_for_each_gives_a_row_for_each_combination():
    rows = files.parse_suite(SMALL, "s.yml", "s").rows
    assert [[c.value for c in row.for_each] for row in rows] == [
        ["inference", 2], ["inference", 4], ["training", 2], ["training", 4]
    ]  # fmt: skip
    assert [row.id for row in plan().rows] == [
        "lenet-inference-micro-batch-size-2",
        "lenet-inference-micro-batch-size-4",
        "lenet-training-micro-batch-size-2",
        "lenet-training-micro-batch-size-4",
    ]


def test_a_row_takes_the_place_of_defaults_and_flags_of_both():
    text = """
base: &base {dropout: 0.5}
defaults: {micro-batch-size: 2, for-each: {image-size: [40, 48]}, mode: training, min-time: 4}
rows:
  - lenet
  - {model: lenet, micro-batch-size: 8, image-size: 36, executions: 7, <<: *base}
"""
    rows = plan(text).rows
    assert [(r.resolved.config.micro_batch_size, r.resolved.config.image_size) for r in rows] == [
        (2, (40, 40)), (2, (48, 48)), (8, (36, 36))
    ]  # fmt: skip
    assert rows[2].resolved.config.dropout == 0.5 and rows[2].settings.limits.min_executions == 7
    assert {r.mode for r in rows} == {"training"} and {r.settings.limits.min_time_s for r in rows} == {4.0}
    flagged = plan(text, flags={"image_size": "64"}, mode="inference", measuring={"min_time_s": 1.0})
    assert [r.resolved.config.image_size for r in flagged.rows] == [(64, 64)] * 2
    assert {r.mode for r in flagged.rows} == {"inference"}
    assert {r.settings.limits.min_time_s for r in flagged.rows} == {1.0}
    assert "1 rows that would be the same" in flagged.notes[0]


def test_a_data_set_on_the_command_line_replaces_the_suites_generated_images():
    row = plan(flags={"dataset": "digits"}).rows[0]
    assert row.resolved.config.dataset == "digits" and not row.resolved.config.host_generated_data
    assert row.resolved.choice.name == "digits"


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("rows:\n  - lenett\n", 2, "did you mean 'lenet'"),
        ("rows:\n  - model: vgg9*\n", 2, "no network matches"),
        ("rows:\n  - model: lenet\n    micro-bach-size: 3\n", 3, "did you mean 'micro-batch-size'"),
        ("rows:\n  - model: lenet\n    micro-batch-size: 0\n", 3, "micro-batch-size: 0"),
        ("rows:\n  - model: lenet\n    mode: trainin\n", 3, "did you mean 'training'"),
        ("rows:\n  - model: lenet\n    run-dir: x\n", 3, "share one folder"),
        ("rows:\n  - model: lenet\n    executions: 2.5\n", 3, "whole number"),
        ("rows:\n  - model: lenet\n    for-each: {seeed: [1]}\n", 3, "did you mean 'seed'"),
        ("rows:\n  - model: lenet\n    for-each: {seed: 1}\n", 3, "list of values"),
        ("rows:\n  - model: lenet\n    for-each: 3\n", 3, "map keys"),
        ("rows:\n  - mode: training\n", 2, "no model"),
        ("rows:\n  - [a]\n", 2, "mapping"),
        ("rows: []\n", None, "no rows"),
        ("", None, "no rows"),
        ("row:\n  - lenet\n", 1, "did you mean 'rows'"),
        ("epoch-images: many\nrows: [lenet]\n", 1, "whole number"),
        ("rows: [lenet\n", 2, "not readable as YAML"),
        ("rows:\n  - {model: lenet, engine: keras}\n", 2, "mode fit"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(text, line, words, capsys):
    Path("my.yml").write_text(text)
    code = cli.run(["benchmark", "--suite", "my.yml"])
    err = capsys.readouterr().err
    assert code == 2 and words in err and "hint: " in err
    assert f"my.yml, line {line}" in err if line else "my.yml" in err


@pytest.mark.parametrize(
    "args, words",
    [
        (["--suite", "ulhcp"], "did you mean 'ulhpc'"),
        (["--suite", "absent.yml"], "no such file"),
        (["--suite", "ulhpc", "--rows", "xeption"], "did you mean 'xception'"),
        (["unet", "--suite", "ulhpc"], "no row of unet"),
        (["lenet*", "--baseline", "x"], "--versus"),
        (["lenet", "--resume"], "--suite NAME"),
        (["xyz*"], "no network matches"),
        (["lenet*", "--resume", "--overwrite"], "give one of them"),
    ],
)
def test_mistakes_on_the_command_line(args, words, capsys):
    assert cli.run(["benchmark", *args]) == 2
    assert words in capsys.readouterr().err


def test_every_row_is_checked_before_the_first_runs(capsys, monkeypatch):
    monkeypatch.setattr(process.RowProcess, "__call__", lambda *a: pytest.fail("a row was run"))
    Path("my.yml").write_text(
        "rows:\n  - {model: lenet, host-generated-data: True}\n  - {model: lenet, loss: bce_dice}\n"
    )
    assert cli.run(["benchmark", "--suite", "my.yml"]) == 2
    err = capsys.readouterr().err
    assert "row lenet-inference-2" in err and "bce_dice" in err and not Path("runs").exists()


def test_planning_needs_no_tensorflow():
    program = (
        "import sys; from ipucnn import cli; code = cli.run(sys.argv[1:]); "
        "assert 'tensorflow' not in sys.modules; sys.exit(code)"
    )
    args = ["benchmark", "--suite", "ulhpc", "--rows", "vgg*", "--image-size", "32", "--loss", "bce_dice"]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}", *args],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "row vgg16-inference" in done.stderr, done.stderr


def test_the_ulhpc_suite():
    made = plan_suite(files.find_suite("ulhpc"), request(image_size="32"))
    assert len(made.rows) == 84 and len({row.resolved.record.name for row in made.rows}) == 21
    by_id = {row.id: row for row in made.rows}
    assert by_id["inceptionv3-training-micro-batch-size-32"].resolved.config.image_size == (75, 75)
    assert "75x75 instead of 32x32" in by_id["inceptionv3-training-micro-batch-size-32"].notes[0]
    assert {(r.mode, r.resolved.config.micro_batch_size) for r in made.rows} == {
        (mode, batch) for mode in ("inference", "training") for batch in (1, 32)
    }
    assert {r.resolved.config.precision for r in made.rows} == {"32.32"}
    only = plan_suite(files.find_suite("ulhpc"), request("resnet*"), mode="training", only=["resnet50*"])
    assert [row.name for row in only.rows] == ["resnet50-keras"] * 2 + ["resnet50v2"] * 2


def test_the_keras_tutorial_suite():
    made = plan_suite(files.find_suite("keras-tutorial"), request(dataset="digits"))
    check_rows(made)
    assert [(r.name, r.engine, r.mode) for r in made.rows] == [
        ("plain", "keras", "fit"),
        *((name, "session", "fit") for name in ("ipu", "steps-per-execution", "replication", "pipelining")),
    ]
    configs = [row.resolved.config for row in made.rows]
    assert [c.num_replicas for c in configs] == [1, 1, 1, 2, 1] and configs[4].pipeline_splits == (
        "max_pooling2d_1",
    )
    assert {(c.optimizer, c.learning_rate, c.micro_batch_size, c.num_epochs) for c in configs} == {
        ("sgd", 0.01, 64, 3)
    }


def test_wildcards_without_a_suite(capsys):
    assert (
        cli.run(["benchmark", "efficientnet-b[0-2]", "--host-generated-data", "--print-config", "--json"])
        == 0
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["model"] for row in rows] == [f"efficientnet-b{n}" for n in range(3)]
    assert rows[0]["options"]["host-generated-data"] is True
    assert cli.run(["benchmark", "--suite", "keras-tutorial", "--dataset", "digits", "--print-config"]) == 0
    assert "pipelining" in capsys.readouterr().out


# -- running, with made-up figures

FAKE_PREDICTED = [
    {"system": "m2000", "precision": p, "images_per_s": rate, "step_s": 0.1, "num_ipus": 1, "memory": []}
    for p, rate in (("32.32", 4000.0), ("16.16", 8000.0))
]


def answer(row, images_per_s=100.0, **changes):
    """What a row's process would say."""
    config = row.resolved.config
    training = row.mode == "training"
    report = {
        "input_shape": [28, 28, 1],
        "program": {
            "micro_batch_size": config.micro_batch_size,
            "num_replicas": config.num_replicas,
            "num_stages": 1,
            "global_batch_size": config.micro_batch_size,
            "gradient_accumulation_count": 1,
        },
        "device": {"name": "a CPU"},
        "environment": {"tensorflow": "2.x"},
        "data": {"kind": "host-generated", "name": "random"},
        "warmup": {"steady": True},
        "predicted": FAKE_PREDICTED,
        "notes": [],
        "compilation": {"compile_s": 0.5, "macs_per_sample": 1000, "num_trainable_parameters": 50},
        "measured": {
            "images_per_s": {"value": images_per_s, "lower": images_per_s - 1, "upper": images_per_s + 1},
            "step_s": config.micro_batch_size / images_per_s,
            "num_executions": 10,
            "flop_per_image": 2000.0 * (3 if training else 1),
            "flop_per_s": 1e6,
            "share_of_matmul_peak": 0.1,
            "peak_memory_bytes": 10**9,
        },
        "comparison": None,
        "void": None,
    }
    return {"report": {**report, **changes}, "exit_code": 0}


def nothing(*_):
    pass


def test_each_finished_row_is_on_disk_at_once(tmp_path):
    made, folder, seen = plan(), tmp_path / "r", []

    def run_row(row, log, update):
        saved = valid(json.loads((folder / "suite.json").read_text()))
        seen.append([r["status"] for r in saved["rows"]])
        lines = list(csv.DictReader(io.StringIO((folder / "suite.csv").read_text())))
        assert [line["status"] for line in lines] == seen[-1]
        return answer(row)

    SuiteRun(made, folder, resume=False, options={}).run(run_row, nothing, nothing)
    assert seen == [["done"] * n + ["pending"] * (4 - n) for n in range(4)]
    assert sorted(p.name for p in (folder / "reports").iterdir()) == sorted(f"{r.id}.json" for r in made.rows)


def test_a_failing_row_ends_nothing_and_is_tried_again(tmp_path):
    made, folder = plan(), tmp_path / "r"
    ran = []

    def run_row(row, log, update):
        ran.append(row.id)
        if row.id == made.rows[1].id:
            return {"error": "its process was ended by SIGKILL", "hint": "less", "exit_code": 1}
        if row.id == made.rows[2].id:
            return {**answer(row, void="NaN", measured=None, hint="lower it"), "exit_code": 2}
        return answer(row)

    result = SuiteRun(made, folder, resume=False, options={}).run(run_row, nothing, nothing)
    assert [row.status for row in result.rows] == ["done", "failed", "failed", "done"]
    assert [row.exit_code for row in result.rows] == [0, 1, 2, 0]
    assert [row.error for row in result.failed] == ["its process was ended by SIGKILL", "NaN"]
    assert [row.notes for row in result.failed] == [["less"], ["lower it"]]
    valid(json.loads((folder / "suite.json").read_text()))
    first, ran[:] = list(ran), []
    again = SuiteRun(made, folder, resume=True, options={})
    assert again.num_kept == 2
    result = again.run(lambda row, log, update: ran.append(row.id) or answer(row), nothing, nothing)
    assert first == [row.id for row in made.rows] and ran == [made.rows[1].id, made.rows[2].id]
    assert {row.status for row in result.rows} == {"done"}


def test_an_interrupt_keeps_the_finished_rows(tmp_path):
    made, folder = plan(), tmp_path / "r"
    rows = iter(made.rows)

    def run_row(row, log, update):
        next(rows)
        if row.id == made.rows[2].id:
            raise KeyboardInterrupt
        return answer(row)

    with pytest.raises(KeyboardInterrupt):
        SuiteRun(made, folder, resume=False, options={}).run(run_row, nothing, nothing)
    assert [r.status for r in read_suite(folder).rows] == ["done", "done", "pending", "pending"]
    assert SuiteRun(made, folder, resume=True, options={}).num_kept == 2


@pytest.mark.parametrize(
    "flags, options, words",
    [
        ({"image_size": "40"}, {}, "image-size is none, asked for is 40"),
        ({"seed": "4"}, {}, "seed is 3, asked for is 4"),
        ({}, {"mode": "inference"}, "not asked for"),
        ({}, {"measuring": {"min_time_s": 3.0}}, "min_time_s is 10.0, asked for is 3.0"),
    ],
)
def test_another_configuration_is_refused(tmp_path, flags, options, words):
    folder = tmp_path / "r"
    SuiteRun(plan(), folder, resume=False, options={}).run(lambda row, *_: answer(row), nothing, nothing)
    before = (folder / "suite.json").read_bytes()
    with pytest.raises(ConfigurationError, match="holds another configuration") as error:
        SuiteRun(plan(flags=flags, **options), folder, resume=True, options={})
    assert words in error.value.message
    assert (folder / "suite.json").read_bytes() == before


def test_another_machine_is_refused(tmp_path):
    folder = tmp_path / "r"
    SuiteRun(plan(), folder, resume=False, options={}).run(lambda row, *_: answer(row), nothing, nothing)
    saved = json.loads((folder / "suite.json").read_text())
    saved["machine"]["cpu"] = "another CPU"
    (folder / "suite.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigurationError, match="measured with cpu another CPU") as error:
        SuiteRun(plan(), folder, resume=True, options={})
    assert "--versus" in error.value.hint


def test_where_data_lies_is_no_other_configuration(tmp_path):
    assert plan(flags={"dataset_path": "/elsewhere"}).rows[0].identity() == plan().rows[0].identity()


def test_a_drawn_seed_is_kept(tmp_path):
    text = SMALL.replace(", seed: 3", "")
    first, second = plan(text), plan(text)
    assert first.seed != second.seed
    assert plan(text, seed=first.seed).rows[0].identity() == first.rows[0].identity()


@pytest.mark.parametrize("left", ["mine.txt", "config.yml"])
def test_folders_that_hold_something_else_are_refused(tmp_path, left):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / left).write_text("x")
    for options in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(ConfigurationError, match=left):
            suite_folder("s", str(tmp_path / "r"), **options)


def test_default_folders(tmp_path):
    assert suite_folder("s", None, resume=False, overwrite=False) == Path("runs/s-suite")
    Path("runs/s-suite").mkdir(parents=True)
    (tmp_path / "runs/s-suite/suite.json").write_text("{}")
    assert suite_folder("s", None, resume=True, overwrite=False) == Path("runs/s-suite")
    assert suite_folder("s", None, resume=False, overwrite=False) == Path("runs/s-suite-2")
    with pytest.raises(ConfigurationError, match="already exists"):
        suite_folder("s", "runs/s-suite", resume=False, overwrite=False)


def test_there_must_be_a_suite_to_go_on_with(fake, capsys):
    """The folder of a single benchmark is none, nor is one that something else left."""
    Path("runs/my-benchmark").mkdir(parents=True)
    Path("runs/my-benchmark/report.json").write_text("{}")
    code, _, err = call(capsys, "--suite", "my.yml", "--resume")
    assert code == 2 and "there is no runs/my-suite to go on with" in err
    Path("runs/my-suite").mkdir()
    # An empty folder of that name is no suite that has begun.
    code, _, err = call(capsys, "--suite", "my.yml", "--resume")
    assert code == 2 and "there is no runs/my-suite to go on with" in err
    for path in ("runs/my-suite", "absent"):
        code, _, err = call(capsys, "--suite", "my.yml", "--resume", "--run-dir", path)
        assert code == 2 and "holds no suite to go on with" in err
    Path("runs/my-suite/report.json").write_text("{}")
    code, _, err = call(capsys, "--suite", "my.yml", "--resume")
    assert code == 2 and "it holds report.json" in err
    assert not fake.ran and [p.name for p in Path("runs/my-benchmark").iterdir()] == ["report.json"]


# -- figures


def test_the_figures_of_a_row():
    row = plan().rows[3]
    got = finished_row(row, answer(row, 50.0), 3.0, epoch_images=103)
    assert got.flop_per_parameter == 2 * 1000 * 4 / 50 == intensity(1000, 4, 50)
    assert got.epoch_s == pytest.approx(100 / 50)  # 25 whole batches of 4
    assert (got.images_per_s, got.images_per_s_lower, got.images_per_s_upper) == (50.0, 49.0, 51.0)
    forward = plan().rows[1]
    assert finished_row(forward, answer(forward), 3.0, epoch_images=103).epoch_s is None


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e6), st.integers(1, 64), st.booleans(), st.booleans()), max_size=8),
    st.integers(64, 60000),
)
def test_the_total_is_the_sum_over_training_rows(rates, images):
    training = plan().rows[2]
    rows, want, predicted, failed = [], 0.0, 0.0, 0
    for rate, batch, works, knows in rates:
        reply = answer(training, rate)
        reply["report"]["program"] = {**reply["report"]["program"], "global_batch_size": batch}
        if not knows:
            reply["report"]["predicted"] = []
        if not works:
            reply = {"error": "x", "exit_code": 1}
        rows.append(finished_row(training, reply, 1.0, images))
        steps = 0
        while (steps + 1) * batch <= images:
            steps += 1
        if works:
            want += steps * batch / rate
            predicted += steps * batch / 4000.0
        failed += not works
    got = totals(rows, images)
    assert got.num_rows == len(rates) and got.num_measured == len(rates) - failed
    if got.num_measured:
        assert got.measured_s == pytest.approx(want)
    else:
        assert got.measured_s is None
    if got.num_measured and all(knows for _, _, works, knows in rates if works):
        assert got.predicted_s == pytest.approx(predicted)
    else:
        assert got.predicted_s is None


def finished(rates, text=SMALL, **options):
    made = plan(text, **options)
    run = SuiteRun(made, Path("unused"), resume=False, options={})
    replies = (answer(row, rate) for row, rate in zip(made.rows, rates))
    run.result.rows = [
        finished_row(row, reply, 1.0, run.result.epoch_images) for row, reply in zip(made.rows, replies)
    ]
    run.result.totals = totals(run.result.rows, run.result.epoch_images)
    return run.result


def test_speed_ups_of_predicted_ipus():
    found = speedups(finished([100.0, 200.0, 400.0, 8000.0]))
    assert [p.speedup for p in found.points] == [40.0, 20.0, 10.0, 0.5]
    assert [(p.training, p.batch, p.intensity) for p in found.points] == [
        (False, 2, 80.0), (False, 4, 160.0), (True, 2, 80.0), (True, 4, 160.0)
    ]  # fmt: skip
    assert found.second == "predicted, 1 IPU of m2000, 32.32" and found.first == "measured, a CPU"
    assert found.totals == {
        "num_rows": 2,
        "first_s": pytest.approx(100 / 400 + 100 / 8000),
        "second_s": pytest.approx(200 / 4000),
    }


def test_speed_ups_of_another_result():
    found = speedups(finished([10.0, 10.0, 10.0, 10.0]), finished([5.0, 20.0, 30.0, 40.0]), "b.json")
    assert [p.speedup for p in found.points] == [0.5, 2.0, 3.0, 4.0] and found.second == "a CPU (b.json)"
    half = finished([5.0, 20.0], mode="inference")
    found = speedups(finished([10.0] * 4), half, "b.json")
    assert len(found.points) == 2 and found.num_without == 2
    found = speedups(finished([1.0, 1.0], mode="training"), half, "b.json")
    assert found.points == () and found.num_without == 2


FUSED = SMALL.replace("mode: [inference, training], micro-batch-size: [2, 4]", "fused-micro-batches: [1, 8]")


def test_rows_are_paired_by_what_they_do():
    """Rows that differ only in an option without a column are not mixed up, whatever they are called."""
    first = finished([10.0, 100.0], FUSED)
    assert len({row.work for row in first.rows}) == 2
    assert [p.speedup for p in speedups(first, finished([10.0, 100.0], FUSED)).points] == [1.0, 1.0]
    swapped = finished(
        [100.0, 10.0], FUSED.replace("[1, 8]", "[8, 1]").replace("lenet", "lenet\n    name: x")
    )
    found = speedups(first, swapped)
    assert [p.speedup for p in found.points] == [1.0, 1.0] and found.differences == ()
    # Two of another name and the same work: which of them is meant cannot be told.
    twice = finished(
        [1.0, 2.0], "rows: [{name: a, model: lenet, micro-batch-size: 2, seed: 3, host-generated-data: True, "
        "fused-micro-batches: 1}, {name: b, model: lenet, micro-batch-size: 2, seed: 4, "
        "host-generated-data: True, fused-micro-batches: 1}]"
    )  # fmt: skip
    one = finished([5.0], FUSED.replace("[1, 8]", "[1]"), flags={"micro_batch_size": "2"})
    assert twice.rows[0].work == twice.rows[1].work == one.rows[0].work
    assert speedups(one, twice).points == ()


def test_what_rows_of_one_id_differ_in_is_said():
    first, second = finished([10.0] * 4), finished([20.0] * 4, flags={"norm_layer": "{name: group_norm}"})
    found = speedups(first, second)
    assert [p.speedup for p in found.points] == [2.0] * 4
    assert len(found.differences) == 1 and "group_norm" in found.differences[0]
    assert "4 rows" in found.differences[0] and found.differences[0].startswith("norm-layer")


def test_a_csv_has_what_the_json_has():
    result = finished([100.0, 200.0, 400.0, 8000.0])
    valid(json.loads(result.to_json()))
    lines = list(csv.DictReader(io.StringIO(to_csv(result.rows))))
    for line, row in zip(lines, result.rows):
        for key, value in row.to_dict().items():
            if key in ("options", "predicted", "notes"):
                continue
            assert line[key] == ("" if value is None else str(value))
        assert float(line["predicted_images_per_s"]) == 4000 and line["predicted_precision"] == "32.32"
        assert float(line["predicted_16_16_images_per_s"]) == 8000


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON"),
        ("[]", "no result"),
        ('{"kind": "ipucnn benchmark suite", "schema_version": 9}', "schema_version 9"),
        ('{"kind": "ipucnn benchmark suite", "schema_version": 2, "suite": "s"}', "damaged"),
        (None, "there is no such file"),
    ],
)
def test_results_that_cannot_be_compared_with(text, words):
    if text is not None:
        Path("b.json").write_text(text)
    with pytest.raises(DataError, match=words):
        read_suite(Path("b.json"))


def test_a_damaged_row_is_refused(tmp_path):
    folder = tmp_path / "r"
    SuiteRun(plan(), folder, resume=False, options={}).run(lambda row, *_: answer(row), nothing, nothing)
    assert read_suite(folder).rows
    saved = json.loads((folder / "suite.json").read_text())
    del saved["rows"][1]["images_per_s"]
    (folder / "suite.json").write_text(json.dumps(saved))
    with pytest.raises(DataError, match="done has no images_per_s"):
        read_suite(folder)


# -- the command, with made-up figures


class Fake(process.RowProcess):
    """Rows without a process; those in ``broken`` fail, ``stop`` is interrupted."""

    broken, stop, ran = (), None, []

    def __call__(self, row, log, update):
        type(self).ran.append(row.id)
        if row.id == self.stop:
            raise KeyboardInterrupt
        if row.id in self.broken:
            return {"error": "its process was ended by SIGSEGV", "hint": None, "exit_code": 1}
        return answer(row, 1000.0 * len(self.ran))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(process, "RowProcess", Fake)
    monkeypatch.setattr(Fake, "ran", [])
    monkeypatch.setattr("ipucnn.reports.speedup_figure.draw_speedups", lambda _, path, suffix: path.touch())
    Path("my.yml").write_text(SMALL)
    return Fake


def call(capsys, *args):
    code = cli.run(["benchmark", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_whole_suite(fake, capsys, monkeypatch):
    monkeypatch.setattr("ipucnn.reports.speedup_figure.draw_speedups", draw_speedups)
    code, out, err = call(capsys, "--suite", "my.yml", "--image-size", "40")
    assert code == 0, err
    folder = Path("runs/my-suite")
    names = {p.name for p in folder.iterdir()}
    assert names == {"suite.json", "suite.csv", "plan.json", "reports", "speedup.png", "speedup.svg"}
    assert "[4/4] lenet-training-micro-batch-size-4: 4,000 images/s" in err and "about" in err
    assert "two small ones" in out and "total epoch time" in out and "set by --image-size 40" in out
    assert "measured 0.1 s: one epoch of 100 images on each of 2 training rows" in out
    assert "\x1b" not in out + err
    saved = valid(json.loads((folder / "suite.json").read_text()))
    assert saved["options"] == {"image-size": "40"} and saved["seed"] == 3
    assert (folder / "speedup.png").stat().st_size > 5000
    # Resuming what is finished runs nothing, and compares.
    monkeypatch.setattr("ipucnn.reports.speedup_figure.draw_speedups", lambda _, path, suffix: path.touch())
    code, out, err = call(
        capsys, "--suite", "my.yml", "--image-size", "40", "--resume", "--versus", folder, "--json"
    )
    assert code == 0 and json.loads(out) == saved and len(fake.ran) == 4
    assert "4 of 4 rows in runs/my-suite have a result" in err
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(capsys, "--suite", "my.yml", "--image-size", "40", "--resume", "--versus", folder)
    assert max(map(len, out.splitlines())) <= 80 and "a CPU (runs/my-suite)" in " ".join(out.split())
    code, _, err = call(capsys, "--suite", "my.yml", "--run-dir", folder)
    assert code == 2 and "already exists" in err
    code, _, err = call(capsys, "--suite", "my.yml", "--run-dir", folder, "--overwrite")
    assert code == 0 and len(fake.ran) == 8


def test_failures_are_told_at_the_end(fake, capsys, monkeypatch):
    bad = "lenet-inference-micro-batch-size-4"
    monkeypatch.setattr(fake, "broken", (bad,))
    code, out, err = call(capsys, "--suite", "my.yml")
    assert code == 1 and f"[2/4] {bad}: failed: its process was ended by SIGSEGV" in err
    assert "1 of 4 rows failed" in err and "failed" in out and "Traceback" not in err
    assert (
        err.count("hint: ") == 1 and "ipucnn benchmark --suite my.yml --run-dir runs/my-suite --resume" in err
    )
    monkeypatch.setattr(fake, "broken", ())
    ran = len(fake.ran)
    assert call(capsys, "--suite", "my.yml", "--resume")[0] == 0 and len(fake.ran) == ran + 1


def test_ctrl_c_tells_how_to_go_on(fake, capsys, monkeypatch):
    monkeypatch.setattr(fake, "stop", "lenet-training-micro-batch-size-2")
    options = (
        "lenet",
        "--suite",
        "my.yml",
        "--min-time",
        "3",
        "--executions",
        "4",
        "--no-shuffle",
        "--seed",
        "7",
    )
    code, out, err = call(capsys, *options)
    assert code == 130 and "2 of 4 rows are finished" in err and "2 of 4 measured" in out
    again = (
        next(line for line in err.splitlines() if "--resume" in line).split("go on with ipucnn ")[1].split()
    )
    monkeypatch.setattr(fake, "stop", None)
    before = len(fake.ran)
    assert cli.run(again) == 0, capsys.readouterr().err
    assert fake.ran[before:] == ["lenet-training-micro-batch-size-2", "lenet-training-micro-batch-size-4"]


def test_what_cannot_be_compared_is_said_before_and_loses_nothing(fake, capsys, monkeypatch):
    assert call(capsys, "--suite", "my.yml", "--training", "--run-dir", "other")[0] == 0
    versus = ("--versus", "other/suite.json")
    before = len(fake.ran)
    code, out, err = call(capsys, "--suite", "my.yml", "--inference", *versus)
    assert code == 3 and "no finished row of it is like" in err and not out
    assert len(fake.ran) == before and not Path("runs").exists()
    # The rows that have a counterpart fail: everything else is still there, and so is their exit code.
    monkeypatch.setattr(fake, "broken", tuple(fake.ran))
    code, out, err = call(capsys, "--suite", "my.yml", *versus)
    assert code == 1 and "2 of 4 rows have no counterpart" in err and "2 of 4 rows failed" in err
    assert "no finished row has a counterpart in --versus other/suite.json" in err
    assert "2 of 4 measured" in out and "--versus other/suite.json --run-dir" in err
    monkeypatch.setattr(fake, "stop", fake.ran[0])
    code, out, err = call(capsys, "--suite", "my.yml", *versus)
    assert code == 130 and "2 of 4 measured" in out and "--versus other/suite.json" in err


def test_a_narrow_table_breaks_no_word(fake, capsys, monkeypatch):
    Path("my.yml").write_text("""
epoch-images: 100
defaults: {host-generated-data: True, seed: 3, mode: training}
rows:
  - model: mobilenetv3-large
    for-each: {fused-micro-batches: [1, 8], num-replicas: [1, 2], optimizer: [sgd, adam]}
  - {model: lenet, gradient-accumulation-count: 2}
""")
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(capsys, "--suite", "my.yml")
    assert code == 0, err
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    head = " ".join(lines[: next(n for n, line in enumerate(lines) if "mobilenet" in line)])
    assert all(word in head for word in ("measured", "images/s", "speed-up", "batch", "mode"))
    table = out.split("rows")[0]
    assert table.count("mobilenetv3-large") == 8
    assert table.count("fused-micro-batches 8") == 4 and table.count("optimizer adam") == 4
    assert "repl." in table and "optimizer-params" not in table and "FLOP" not in table
    lenet = next(line for line in lines if line.strip().startswith("lenet"))
    assert "optimizer" not in lenet


def test_fit_rows_say_what_they_ignore(capsys):
    text = """
defaults: {model: lenet, dataset: digits, seed: 1, num-epochs: 2}
rows:
  - {name: a, mode: fit, executions: 20}
  - {name: b}
"""
    made = plan(text, measuring={"max_time_s": 20.0})
    assert made.rows[0].notes == ("executions has no effect in mode fit, which trains for whole epochs",)
    assert made.rows[1].notes == () and "--max-time: without effect on the 1 row of mode fit" in made.notes[0]
    with pytest.raises(ConfigurationError, match="--max-time: all rows are of mode fit"):
        plan(text, measuring={"max_time_s": 20.0}, only=["a"])


def test_checking_draws_no_images(capsys, monkeypatch):
    from ipucnn.datasets.sources import embedded as random_data

    drawn = random_data.open_random

    def watched(height, width, *rest, **more):
        assert height * width == 1, "images were drawn"
        return drawn(height, width, *rest, **more)

    monkeypatch.setattr(random_data, "open_random", watched)
    flags = {"image_size": "4000", "micro_batch_size": "1"}
    check_rows(plan(SMALL + "  - {model: lenet, mode: fit, num-epochs: 2}\n", flags=flags))
    huge = ("--suite", "ulhpc", "--image-size", "60000")
    assert call(capsys, *huge, "--print-config")[0] == 0
    code, _, err = call(capsys, *huge, "--rows", "vgg16")
    assert code == 4 and "row vgg16-inference-micro-batch-size-1: " in err
    assert "GiB" in err and "--image-size" in err


# -- processes


def planned():
    return plan("rows: [{model: lenet, host-generated-data: True, micro-batch-size: 2, seed: 1}]").rows[0]


@pytest.mark.parametrize(
    "program, words",
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL (the system may have been out of memory)"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import sys; sys.exit('a fault of the library')", "it last said: a fault of the library"),
        ("import sys; sys.stdin.buffer.read(1)", "ended with exit code 0 and without a result"),
    ],
)
def test_a_process_that_dies_is_a_failed_row(tmp_path, program, words):
    run_row = process.RowProcess(command=[sys.executable, "-c", program])
    got = run_row(planned(), tmp_path / "x.log", nothing)
    assert words in got["error"] and got["exit_code"] == 1
    assert (tmp_path / "x.log").exists() == ("last said" in got["error"])


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(DataError, match="cannot be started") as caught:
        process.RowProcess()(planned(), tmp_path / "gone" / "log", nothing)
    assert caught.value.hint


@pytest.mark.parametrize("plan", ["{}", '{"rows": 5}', '{"rows": [1, {}, {"id": [2]}]}', "[]"])
def test_a_damaged_plan_is_another_configuration(plan):
    assert _difference(json.loads(plan), {"rows": [{"id": "a"}]}) == "it has no row a"


def test_a_process_tells_progress_and_results(tmp_path):
    program = (
        "import json; print(json.dumps({'progress': ['warm-up', 1, 2, 'x']})); "
        "print(json.dumps({'error': 'wrong', 'hint': 'right', 'exit_code': 3}))"
    )
    told = []
    run_row = process.RowProcess(command=[sys.executable, "-c", program])
    got = run_row(planned(), tmp_path / "x.log", lambda *progress: told.append(progress))
    assert told == [("warm-up", 1, 2, "x")] and got == {"error": "wrong", "hint": "right", "exit_code": 3}
    assert not (tmp_path / "x.log").exists()


def test_a_line_that_was_cut_off_is_no_result(tmp_path):
    program = 'import os; os.write(1, b\'{"report": {"void": n\'); os.kill(os.getpid(), 9)'
    got = process.RowProcess(command=[sys.executable, "-c", program])(planned(), tmp_path / "x.log", nothing)
    assert "ended by SIGKILL" in got["error"]


def test_an_interrupt_ends_the_process(tmp_path):
    program = (
        "import json, time; print(json.dumps({'progress': ['a', 0, 0, '']}), flush=True); time.sleep(600)"
    )
    run_row = process.RowProcess(command=[sys.executable, "-c", program])

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_row(planned(), tmp_path / "x.log", interrupt)


def test_real_rows_fail_alone(capsys, monkeypatch):
    """One row's process dies, the other's figures stand, and its report is a benchmark's."""
    real = process.RowProcess

    class First(real):
        def __call__(self, row, log, update):
            dying = row.resolved.record.name == "mnist_cnn"
            command = [sys.executable, "-c", "import os; os.abort()"] if dying else None
            return real(command=command)(row, log, update)

    monkeypatch.setattr(process, "RowProcess", First)
    Path("my.yml").write_text("""
defaults: {dataset: digits, limit-train: "64", min-time: 0, executions: 3, steps-per-execution: 1, seed: 1}
rows: [mnist_cnn, lenet]
""")
    code, _, err = call(capsys, "--suite", "my.yml", "--run-dir", "r")
    assert code == 1 and "1 of 2 rows failed" in err, err
    saved = valid(json.loads(Path("r/suite.json").read_text()))
    bad, good = saved["rows"]
    assert bad["status"] == "failed" and "SIGABRT" in bad["error"] and bad["images_per_s"] is None
    assert good["status"] == "done" and good["images_per_s"] > 0 and good["data_kind"] == "real"

    report = json.loads(Path("r/reports/lenet-inference.json").read_text())
    from_plain(report, BenchmarkReport, "report", "")
    assert report["measured"]["images_per_s"]["value"] == good["images_per_s"]
    samples = sum(e["samples"] for e in report["executions"])
    assert good["images_per_s"] == pytest.approx(samples / sum(e["wall_s"] for e in report["executions"]))


# -- mode fit


LADDER = """
defaults: {model: lenet, dataset: digits, limit-train: "64", limit-eval: "32", mode: fit, micro-batch-size: 16,
           num-epochs: 2, seed: 1,
           optimizer: sgd, optimizer-params: {}, learning-rate: 0.05, lr-schedule: const, lr-schedule-params: {},
           gradient-accumulation-count: 1, augment: False, weight-decay: 0}
rows:
  - {name: plain, engine: keras}
  - {name: ipu, logs-per-epoch: 1}
  - {name: pipelining, gradient-accumulation-count: 4, pipeline-splits: [pool4], device-mapping: [0, 1]}
"""


def test_the_steps_of_a_ladder_train():
    made = plan(LADDER)
    check_rows(made)
    answers = {row.name: process.run_here(row, nothing) for row in made.rows}
    rows = {row.name: finished_row(row, answers[row.name], 1.0) for row in made.rows}
    assert {row.status for row in rows.values()} == {"done"}, rows
    assert rows["pipelining"].loss != rows["ipu"].loss and rows["pipelining"].num_stages == 2
    # Plain Keras takes the same steps on the same batches, up to rounding.
    assert rows["plain"].loss == pytest.approx(rows["ipu"].loss, rel=1e-3)
    for name, row in rows.items():
        epochs = answers[name]["report"]["epochs"]
        assert len(epochs) == 2 and row.num_executions == 1
        assert row.images_per_s == pytest.approx(epochs[1]["samples"] / epochs[1]["wall_s"])
        assert row.step_s == pytest.approx(16 / row.images_per_s)
        assert math.isfinite(row.loss) and 0 <= row.accuracy <= 1
    assert rows["plain"].predicted == [] and rows["ipu"].predicted[0].images_per_s > 0


@pytest.mark.parametrize(
    "change, words",
    [
        ("num-epochs: 1", "the first epoch compiles"),
        ("engine: keras\n    num-replicas: 2", "no replicas"),
        ("engine: keras\n    precision: 16.16", "32 bits"),
        ("model: unet\n    dataset: membranes\n    pad-dataset: True", "pad-dataset with the bce_dice"),
    ],
)
def test_what_mode_fit_refuses(change, words):
    text = LADDER.split("rows:")[0] + f"rows:\n  - name: x\n    {change}\n"
    with pytest.raises(UserError, match=words):
        check_rows(plan(text))
