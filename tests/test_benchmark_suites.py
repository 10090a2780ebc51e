"""Suites: command lines in YAML, typed options, rows in separate processes, tables and speed-ups."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from msgspec import structs
from support.refusals import Refusal, check_raises, check_refused

from ipucnn.benchmarking import suite_run
from ipucnn.benchmarking.figures import figures_of_benchmark, figures_of_run
from ipucnn.benchmarking.keras_fit import fit
from ipucnn.benchmarking.records import Row
from ipucnn.benchmarking.suite import SuiteCommand, find_suite, given_options, parse_suite, plan_suite
from ipucnn.benchmarking.suite_run import (
    read_suite,
    speedups,
    with_figures,
    with_kept_rows,
    write_result,
)
from ipucnn.command_group import parse_line
from ipucnn.config.options import SPECS, RunConfig, specs_for
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.reports.suite import columns, draw_speedups
from ipucnn.runs.compare import read_run
from ipucnn.system_programs import Ran

SMALL = """
title: small networks
epoch-images: 100
options: --host-generated-data --image-size 32 --optimizer-params {}
rows:
  - benchmark lenet {--inference,--training} --micro-batch-size {1,8}
  - two replicas: ipucnn benchmark toy_model --training --num-replicas 2 --image-size 40
"""
pytestmark = pytest.mark.usefixtures("run")
PROGRAM = dict(
    micro_batch_size=8, gradient_accumulation_count=1, num_replicas=1, num_stages=1, global_batch_size=8
)


def plan(text=SMALL, model=None, typed=""):
    options = given_options(parse_line(["benchmark", "lenet", *shlex.split(typed)]).values())
    return plan_suite(parse_suite(text, "s.yml", "s", parse_line), model, options)


def report(images_per_s=100.0, **changes):
    speed = {"value": images_per_s, "lower": None, "upper": None}
    values = {
        "executions": [],
        "program": PROGRAM,
        "measured": {"images_per_s": speed, "step_s": 0.1, "peak_memory_bytes": 10},
        "compilation": {"num_trainable_parameters": 100, "macs_per_sample": 50, "compile_s": 1.0},
        "device": {"name": "CPU"},
        "data": {"name": "random"},
        "input_shape": [32, 32, 1],
        "predicted": [{"images_per_s": 400.0, "num_ipus": 2}],
        "notes": ["a note"],
    }
    return {**values, **changes}


def answering(monkeypatch, *codes):
    """Makes rows end with these exit codes, then with 0, without a process; returns the list of their words."""
    ran = []

    def run_command(words, verbose):
        ran.append(words)
        code = codes[len(ran) - 1] if len(ran) <= len(codes) else 0
        if code == "interrupt":
            raise KeyboardInterrupt
        if code:
            stderr = "noise\nerror: it broke\nhint: fix it\n"
            return Ran(True, "", stderr, f"ended with exit code {code}", exit_code=code)
        return Ran(True, json.dumps(report(100.0 * len(ran))))

    monkeypatch.setattr(suite_run, "run_command", run_command)
    return ran


# -- files


def test_braces_and_names_expand_to_rows():
    rows = plan().rows
    assert [row.id for row in rows] == [
        *("lenet-inference-micro-batch-size-1", "lenet-inference-micro-batch-size-8"),
        *("lenet-training-micro-batch-size-1", "lenet-training-micro-batch-size-8", "two-replicas"),
    ]
    every = "--host-generated-data --optimizer-params '{}'"
    assert rows[1].command == (
        f"benchmark lenet --seed 1 --image-size 32 {every} --inference --micro-batch-size 8"
    )
    assert rows[4].command == (
        f"benchmark toy_model --seed 1 --image-size 40 {every} --training --num-replicas 2"
    )
    assert [row.mode for row in rows] == ["inference"] * 2 + ["training"] * 3


def test_ids_are_names_of_files_and_typed_numbers_are_exact():
    line = "train lenet --host-generated-data --learning-rate"
    names = {"測試": "0.123456789", "'..'": "1e-05", ".a.": "1"}
    text = "rows:\n" + "".join(f"  - {name}: {line} {rate}\n" for name, rate in names.items())
    rows = plan(text).rows
    assert [row.id for row in rows] == ["lenet", "lenet-2", "a"]
    rates = [row.command.split("--learning-rate ")[1].split()[0] for row in rows]
    assert rates == list(names.values())


@pytest.mark.slow
def test_built_in_suites_have_their_rows():
    ulhpc = find_suite("ulhpc", parse_line)
    assert (len(plan_suite(ulhpc, None, {}).rows), ulhpc.epoch_images) == (84, 50000)
    assert len({row.model for row in ulhpc.rows}) == 21
    assert {row.resolve().config.precision for row in ulhpc.rows} == {"32.32"}
    steps = find_suite("keras-tutorial", parse_line)
    ids = [row.id for row in plan_suite(steps, None, {}).rows]
    assert ids == ["plain", "ipu", "steps-per-execution", "replication", "pipelining"]
    assert [row.command for row in steps.rows] == ["fit", *["train"] * 4]
    configs = [row.resolve().config for row in steps.rows]
    assert configs[4].device_mapping == (0, 1)
    # The SDK of the tutorial adds the gradients of replicas and of micro-batches; those of replicas are averaged here.
    assert [config.learning_rate / config.num_replicas for config in configs] == [0.01] * 5
    assert configs[4].gradient_accumulation_reduction_method == "sum"


def test_typed_options_replace_those_of_rows():
    rows = plan(typed="--dataset digits --training --micro-batch-size 4").rows
    assert [row.id for row in rows] == ["lenet", "two-replicas"], "equal rows are one"
    assert [row.notes for row in rows] == [["stands for 4 equal rows"], []]
    typed = ("--dataset digits", "--training", "--micro-batch-size 4")
    assert [words in rows[0].command for words in typed] == [True] * 3
    assert "--host-generated-data" not in rows[0].command
    assert [row.model for row in plan(model="toy*").rows] == ["toy_model"]
    check_raises(ConfigurationError, "no row of vgg16", "", plan, model="vgg16")
    text, words = "rows: [train lenet]", "--compare-with has no effect"
    check_raises(ConfigurationError, words, "", plan, text, typed="--compare-with keras")


def test_a_row_that_is_there_twice_needs_a_name():
    """One of the two would be left out."""
    row = "benchmark lenet --micro-batch-size 2"
    with pytest.raises(ConfigurationError, match=r"row 2: it is row 1 again") as raised:
        plan(f"rows:\n  - {row}\n  - {row}\n")
    assert "`- again: COMMAND`" in raised.value.hint
    assert len(plan(f"rows:\n  - {row}\n  - again: {row}\n").rows) == 2


def test_a_title_may_be_a_number_or_empty():
    result = plan("title: 2024\nabout: 5\noptions:\nrows: [benchmark lenet]")
    assert (result.title, result.about) == ("2024", "5")
    assert plan("title:\nabout:\nrows: [benchmark lenet]").title == ""


SUMS = """
options: --host-generated-data --gradient-accumulation-reduction-method sum
rows:
  - one: benchmark lenet --training --gradient-accumulation-count 1
  - four: benchmark toy_model --training --gradient-accumulation-count 4
"""
NO_SUM = "--gradient-accumulation-reduction-method sum has no effect without gradient accumulation"


def test_an_option_for_all_rows_is_left_out_of_those_where_it_has_no_effect():
    one, four = plan(SUMS).rows
    assert "reduction-method" not in one.command and one.notes == [f"left out: {NO_SUM}"]
    assert "reduction-method sum" in four.command and four.notes == []
    assert plan(SUMS, model="lenet").rows == [one], "the rows that are not selected have a use for it"
    mixed = "rows: [fit lenet --gradient-accumulation-count 1, train toy_model --host-generated-data]"
    session = "--steps-per-execution 1 --fp-exceptions"
    fit_row, train_row = plan(f"options: --precision 32.32 --num-epochs 2 {session}\n{mixed}").rows
    assert {note.split(" has no effect in fit")[0] for note in fit_row.notes} == {
        *("left out: --steps-per-execution 1", "left out: --fp-exceptions")
    }
    shared = "options: --dataset digits --no-shuffle --loss cross_entropy --optimizer adam"
    inference, training = plan(f"{shared}\nrows: [benchmark lenet, benchmark lenet --training]").rows
    assert inference.notes == [
        "without effect in inference: shuffle, optimizer, loss; --training measures weight updates"
    ]
    assert training.notes == []
    assert "--steps-per-execution" not in fit_row.command and "--fp-exceptions" not in fit_row.command
    assert all(word in train_row.command for word in session.split()) and train_row.notes == []
    # One that the command of a row does not have.
    measured, trained = plan(
        "options: --dataset digits --min-time 0.3\nrows: [benchmark lenet, train toy_model --num-epochs 2]"
    ).rows
    assert "--min-time 0.3" in measured.command and measured.notes == []
    assert "min-time" not in trained.command and "--dataset digits" in trained.command
    assert trained.notes == ["left out: train has no option --min-time"]
    typed = plan("rows: [benchmark lenet, train toy_model]", typed="--min-time 0.3").rows
    assert [row.notes for row in typed] == [[], trained.notes]
    typed = plan("rows: [benchmark lenet, train toy_model]", typed="--inference").rows
    assert [row.notes for row in typed] == [[], ["left out: train has no option --inference"]]
    # Typed beside --suite.
    one, four = plan(SUMS.replace("-reduction-method sum", "-count 2"), typed=NO_SUM.split(" has")[0]).rows
    assert ("sum" in one.command, "sum" in four.command) == (False, True)


@pytest.mark.parametrize(
    "text, typed, message",
    [
        (SUMS.replace("count 4", "count 1"), "", f"s.yml, row 1 (one): {NO_SUM}"),
        (
            "rows: [train lenet, train toy_model]",
            "--gradient-accumulation-count 1 --gradient-accumulation-reduction-method sum",
            f"s.yml, row 1 (lenet): {NO_SUM}",
        ),
        # A row's own.
        (SUMS.replace("count 1", "count 1 --gradient-accumulation-reduction-method sum"), "", NO_SUM),
        (
            "options: --num-epochs 2\nrows: [benchmark lenet]",
            "",
            "s.yml: options: no row has an option --num-epochs",
        ),
        # It is not left out of the rows that it spoils.
        ("options: --kfold 5\nrows: [train lenet, train toy_model]", "", "--kfold 5: a row is one run"),
        (
            "options: --no-training\nrows: [train lenet, train toy_model]",
            "",
            "--no-training: a row is one run",
        ),
    ],
)
def test_an_option_for_all_rows_that_has_no_effect_in_any_or_spoils_one_is_refused(text, typed, message):
    check_raises(ConfigurationError, message, "drop", plan, text, typed=typed)


def test_an_image_size_is_adapted_to_the_network():
    (row,) = plan("rows: [benchmark inceptionv3 --host-generated-data --image-size 32]").rows
    assert "--image-size 75x75" in row.command and "75x75 instead of 32x32" in row.notes[0]


# -- running


@pytest.mark.slow
def test_a_failed_row_does_not_stop_the_others(monkeypatch, run):
    Path("my.yml").write_text(SMALL)
    ran = answering(monkeypatch, 0, 3)
    code, out, err = run(
        *["benchmark", "--suite", "my.yml", "--seed", "3", "--run-dir", "s", "--executions", "5"]
    )
    assert code == 3 and "1 of 5 rows failed" in err and "it broke" in err and len(ran) == 5
    assert (
        ran[0][:2] == ["benchmark", "lenet"]
        and ran[0][-4] == "--run-dir"
        and ran[0][-3].startswith("s/rows/")
    )
    assert all(words[words.index("--executions") + 1] == "5" for words in ran)
    result = read_suite(Path("s"))
    assert [row.status for row in result.rows] == ["done", "failed", "done", "done", "done"]
    assert result.rows[1].error == "it broke" and result.rows[0].images_per_s == 100
    # Only whole batches count: 12 of 8 in 100 images.
    assert result.rows[2].epoch_s == 96 / 300 and result.rows[0].epoch_s is None
    assert (
        Path("s/suite.csv").read_text().startswith("device,data,image_height")
        and Path("s/speedup.png").exists()
    )
    assert "total epoch time" in out and "failed" in out and "a note" in out
    retry = shlex.split(err.split("to try them again: ")[-1])[1:]
    for width in (60, 80, 160):
        code, out, err = run(*retry, columns=width)
        assert code == 0 and max(map(len, out.splitlines())) <= width, err
    assert len(ran) == 6, "only the one that had failed ran again"


@pytest.mark.slow
def test_an_interrupted_suite_resumes(monkeypatch, run):
    Path("my.yml").write_text(SMALL)
    ran = answering(monkeypatch, 0, "interrupt")
    code, _, err = run("benchmark", "--suite", "my.yml", "--dataset-path", "here")
    assert code == 130 and "1 of 5 rows are finished" in err
    resume = shlex.split(err.strip().split("go on with ")[-1])[1:]
    first = read_suite(Path("runs/my-suite")).rows[0]
    ran = answering(monkeypatch)
    other = plan_suite(find_suite("my.yml", parse_line), None, {"prefetch_depth": "7"})
    check_raises(ConfigurationError, "holds another suite", "", with_kept_rows, other, Path("runs/my-suite"))
    # The same suite may read and write other files.
    code, _, err = run(*[word.replace("here", "there") for word in resume], "--executable-cache", "programs")
    assert code == 0 and len(ran) == 4 and "1 of 5 rows in runs/my-suite have a result" in err, err
    assert read_suite(Path("runs/my-suite")).rows[0] == first
    saved = json.loads(Path("runs/my-suite/suite.json").read_text())
    saved["machine"]["cpu"] = "another CPU"
    Path("runs/my-suite/suite.json").write_text(json.dumps(saved))
    check_refused(run, Refusal(resume, "measured with cpu another CPU", "--versus"))


def test_results_of_other_versions_are_refused(tmp_path):
    old = {"kind": "ipucnn benchmark suite", "schema_version": 3, "suite": "s", "rows": []}
    (tmp_path / "suite.json").write_text(json.dumps(old))
    check_raises(DataError, "has schema_version 3, this ipucnn reads 4", "", read_suite, tmp_path)


@pytest.mark.slow
def test_real_rows(run):
    Path("my.yml").write_text("""
options: --dataset digits --limit-train 64 --device cpu --micro-batch-size 8
rows:
  - benchmark lenet --executions 3 --min-time 0.01 --max-time 20
  - train lenet --num-epochs 2 --limit-eval 32
  - plain: fit lenet --num-epochs 2 --limit-eval 32 --gradient-accumulation-count 1
  - fit lenet --num-epochs 2 --gradient-accumulation-count 1 --micro-batch-size 65
""")
    code, out, err = run("benchmark", "--suite", "my.yml", "--run-dir", "r", "--seed", "1")
    assert code == 2 and "1 of 4 rows failed" in err, err
    rows = {row.id: row for row in read_suite(Path("r")).rows}
    assert all(row.images_per_s > 0 for row in rows.values() if row.status == "done")
    trained = [row for row in rows.values() if row.training_accuracy is not None]
    assert len(trained) == 2 and all(row.accuracy is not None and row.step_s > 0 for row in trained)
    assert "held-out" in out and os.listdir("r/rows")


def fit_of(line):
    options = given_options(parse_line(["train", *shlex.split(line)]).values())
    return SuiteCommand("fit", line.split()[0], options).resolve()


FIT = (
    "lenet --dataset digits --limit-train 64 --limit-eval 128 --micro-batch-size 16 --num-epochs 2 --device cpu "
    "--gradient-accumulation-count 1 --seed 1"
)


@pytest.mark.slow
def test_fit_trains_as_the_session_does(run):
    options = (
        "--optimizer adam --optimizer-params {} --learning-rate 0.003 --lr-schedule cosine --lr-schedule-params {} "
        """--lr-warmup-params '{"warmup_mode": "shift", "warmup_epochs": 1}' --clip-gradient-norm 0.5 """
        "--mixup 0.4 --random-erasing 0.5 --label-smoothing 0.1"
    )
    figures = fit(fit_of(f"{FIT} {options}"))
    code, out, err = run("train", *shlex.split(f"{FIT} {options}"), "--run-dir", "r", "--json")
    assert code == 0, err
    trained = figures_of_run(json.loads(out), read_run(Path("r")))
    assert (figures.accuracy, figures.training_accuracy) == (trained.accuracy, trained.training_accuracy)
    assert figures.accuracy > 0.15, "another schedule would give another accuracy"
    assert fit(fit_of(f"{FIT} --no-validation")).accuracy is None


@pytest.mark.slow
def test_fit_reads_all_options_that_are_declared_to_affect_it():
    read = set()

    class Recorded(RunConfig):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    resolved = fit_of(FIT)
    values = {spec.name: getattr(resolved.config, spec.name) for spec in SPECS}
    fit(replace(resolved, config=Recorded(**values)))
    declared = {spec.name for spec in specs_for("train") if spec.keras_effect}
    assert declared - read == set()
    assert not any(spec.keras_effect for spec in SPECS if not spec.host_effect)


def test_a_row_of_fit_says_what_its_preset_has_and_keras_has_not():
    Path("mine.yml").write_text(
        "mine: {ema-decay: 0.9, early-stopping: 2, validation-freq: 2, num-epochs: 3}"
    )
    more = "--gradient-accumulation-count 1 --precision 32.32 --config-path mine.yml --config mine"
    (row,) = plan(f"rows: [fit lenet {more}]").rows
    assert row.notes == [
        f"Keras' own loop has no {option} (preset mine)" for option in ("ema-decay 0.9", "early-stopping 2")
    ]


def test_a_row_whose_run_cannot_be_read_fails(monkeypatch):
    row = plan("rows: [train lenet]").rows[0]
    monkeypatch.setattr(suite_run, "run_command", lambda words, verbose: Ran(True, "{}"))
    failed = suite_run._finished(row, Path("absent"), None, False)
    assert failed.status == "failed" and "absent" in failed.error


# -- results


def rows_of(*speeds):
    rows = []
    for k, speed in enumerate(speeds):
        row = Row(id=f"r{k}", name=f"r{k}", model="lenet", command="benchmark lenet", mode="training")
        rows.append(with_figures(row, figures_of_benchmark(report(speed)), 100))
    return rows


def test_an_epoch_below_a_global_batch_has_no_time():
    row = Row(id="r", name="r", model="lenet", command="benchmark lenet", mode="training")
    assert with_figures(row, figures_of_benchmark(report()), 7).epoch_s is None
    assert with_figures(row, figures_of_benchmark(report()), 8).epoch_s == 8 / 100


def test_speedups_of_another_machine_and_of_ipus():
    result = plan()
    first = structs.replace(result, rows=rows_of(100.0, 200.0))
    second = structs.replace(
        result, rows=[*rows_of(50.0), structs.replace(rows_of(1, 1)[1], micro_batch_size=9)]
    )
    compared = speedups(first, second, "there")
    assert [(row.id, times, ipus) for row, times, ipus in compared.pairs] == [("r0", 0.5, None)]
    assert compared.first_s == 96 / 100 and compared.second_s == 96 / 50
    predicted = speedups(first)
    assert [(times, ipus) for _, times, ipus in predicted.pairs] == [(4.0, 2), (2.0, 2)]
    assert "speed-up" in columns(first, predicted)
    write_result(Path(), first)
    assert len(Path("suite.csv").read_text().splitlines()) == 3
    draw_speedups(predicted, ".svg", Path("a.svg"))
    draw_speedups(predicted, ".svg", Path("b.svg"))
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()


def test_names_in_a_figure_cover_no_other_name(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_speedups(speedups(structs.replace(plan(), rows=rows_of(*range(100, 112)))), ".png", tmp_path / "x")
    (axes,), renderer = drawn[0].axes, FigureCanvasAgg(drawn[0]).get_renderer()
    boxes = []
    for text in axes.texts:
        text.update_positions(renderer)
        boxes.append(Text.get_window_extent(text, renderer))  # without the line to its point
    assert len(boxes) == 12 and all(axes.bbox.fully_containsx(box.x0) for box in boxes)
    assert not any(one.overlaps(other) for k, one in enumerate(boxes) for other in boxes[:k])


@pytest.mark.slow
def test_versus_with_another_suite_is_refused_before_any_row_runs(monkeypatch, run):
    ran = answering(monkeypatch)
    result = plan()
    Path("other.json").write_text(structs.replace(result, rows=rows_of(100.0)).to_json())
    line = "benchmark --suite ulhpc --versus other.json"
    check_refused(run, Refusal(line, "no row of it is one of this suite", code=3))
    assert not ran
