"""``ipucnn benchmark`` as a user runs it: measurements, reports, comparisons, refusals and interrupts."""

import dataclasses
import itertools
import json
import random
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.benchmark_reports import filled
from support.refusals import Refusal, check_raises, check_refused

from ipucnn.benchmarking import contenders, peak, records
from ipucnn.benchmarking import run as running
from ipucnn.benchmarking.job import make_job
from ipucnn.benchmarking.records import BenchmarkReport, from_plain
from ipucnn.benchmarking.report import first_report
from ipucnn.benchmarking.rounds import Clocks
from ipucnn.benchmarking.settings import DEFAULTS, BenchmarkSettings, make_settings
from ipucnn.commands.benchmark import Benchmark
from ipucnn.config.command import read_options
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError, DataError, InfeasibleError
from ipucnn.events import show
from ipucnn.sessions.host.session import HostPredictor
from ipucnn.sessions.session import DeviceInfo
from ipucnn.training.program import BuiltProgram, Layers, make_program

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("short_benchmarks", "run")
QUICK = "--min-time 0 --executions 3 --seed 1"
SMALL = "lenet --host-generated-data --micro-batch-size 4"
LIMITS = msgspec.structs.replace(
    DEFAULTS, min_executions=3, min_time_s=0.0, max_warmup_s=0.0, execution_s=0.01
)


def benchmark(run, line, code=0):
    """Runs ``benchmark``, checks its exit code, and returns stdout and stderr."""
    ended, out, err = run("benchmark", *line.split(), columns=160)
    assert ended == code, err
    return out, err


def valid(report):
    """Returns the report after reading it as ``--baseline`` does."""
    from_plain(report, BenchmarkReport, "report", "")
    return report


def per_second(rows):
    return sum(row["samples"] for row in rows) / sum(row["wall_s"] for row in rows)


@pytest.mark.parametrize("rival", [None, pytest.param("keras", marks=pytest.mark.slow)])
def test_figures_follow_from_the_executions(run, rival):
    """``tests/golden`` has the fields that no time decides."""
    program = "--replicas 2 --micro-batch-size 4 --gradient-accumulation-count 3 --steps-per-execution 3"
    compared = f"--compare-with {rival}" if rival else ""
    line = f"lenet --training --dataset digits {program} {compared} --json {QUICK} --executions 6"
    report = json.loads(benchmark(run, line)[0])
    figures, comparison, speed = report["measured"], report["comparison"], report["measured"]["images_per_s"]
    assert speed["value"] == pytest.approx(per_second(report["executions"]))
    assert speed["lower"] <= speed["value"] <= speed["upper"]
    assert figures["step_s"] == pytest.approx(figures["step_samples"] / speed["value"])
    assert figures["flop_per_image"] == 6 * report["compilation"]["macs_per_sample"]
    assert figures["flop_per_s"] == pytest.approx(figures["flop_per_image"] * speed["value"])
    peak_flop_per_s = figures["matmul_peak"]["flop_per_s"]
    assert figures["share_of_matmul_peak"] == pytest.approx(figures["flop_per_s"] / peak_flop_per_s)
    assert {row["samples"] for row in report["executions"]} == {report["execution"]["samples"]}
    assert len(report["executions"]) >= 6 and (comparison is not None) == bool(rival)
    if rival:
        assert len(comparison["executions"]) == len(report["executions"])
        assert comparison["images_per_s"]["value"] == pytest.approx(per_second(comparison["executions"]))
        ratio = speed["value"] / comparison["images_per_s"]["value"]
        assert comparison["ratio"]["value"] == pytest.approx(ratio)


def measured(**changes):
    """Returns settings for a call of the library."""
    return dataclasses.replace(BenchmarkSettings(limits=LIMITS), **changes)


def resolved(model="lenet", **flags):
    return resolve("benchmark", {"host_generated_data": True, "seed": "1", **flags}, model=model)


def test_a_preset_may_name_the_weights_of_its_network(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("model-name: resnet50-keras\nweights: imagenet\n", encoding="utf-8")
    flags = {"host_generated_data": True, "image_size": "32", "seed": "1"}
    make_job(resolve("benchmark", flags, config_path=str(file)), measured(mode="training"))


@pytest.mark.slow
def test_the_session_computes_the_same_logits_as_keras():
    """Both sides of a comparison run the same network: their logits of the same images agree."""
    job = make_job(resolved("cifar_resnet8", micro_batch_size="2"), measured())
    from ipucnn.runs.setup import build
    from ipucnn.sessions.factory import create_session

    model = build(job.setup)
    predictor = create_session("cpu").predictor(model)
    predictor.compile((2, *job.setup.input_shape))
    copy = contenders.stock_copy(model)
    images = [np.random.RandomState(i).uniform(size=(2, *job.setup.input_shape)) for i in range(3)]
    images = [image.astype(np.float32) for image in images]
    logits = predictor.predict(images)
    for image, ours in zip(images, logits):
        np.testing.assert_allclose(ours, copy.predict_on_batch(image), rtol=1e-4, atol=1e-5)
    norms = [type(layer).__module__ for layer in copy.layers if type(layer).__name__ == "BatchNormalization"]
    assert norms and all(module.startswith("keras") for module in norms)


def test_a_pipeline_is_predicted_when_one_ipu_is_too_small():
    from ipucnn.benchmarking.prediction import PredictionRequest, predict_ipu
    from ipucnn.models.build import BuildOptions
    from ipucnn.models.registry import get_model
    from ipucnn.planning.graphs.extract import layer_graph

    record = get_model("resnet50-keras")
    graph = layer_graph(record, BuildOptions(record.input_shape, record.num_classes))
    work = make_job(resolved(), measured())
    program = dataclasses.replace(
        work.program,
        micro_batch_size=24,
        gradient_accumulation_count=30,
        num_replicas=4,
    )
    column = predict_ipu(graph, PredictionRequest(work.resolved.config, program, (), training=True), "16.16")
    assert column.ipus_per_replica > 1 and len(column.splits) == len(column.memory) - 1 > 0
    assert column.num_ipus == 4 * column.ipus_per_replica
    assert column.system != "m2000" and column.images_per_s > 0
    assert any("does not fit on one IPU" in note for note in column.notes)
    small = predict_ipu(
        graph, PredictionRequest(work.resolved.config, program, (), training=True, system="m2000"), "16.16"
    )
    assert any("more than the 4" in note for note in small.notes)


@pytest.mark.slow
def test_a_full_disk_voids_the_result_and_is_no_bug(monkeypatch):
    def broken(self, dataset):
        raise OSError(28, "No space left on device", "/tmp/cache")

    monkeypatch.setattr(HostPredictor, "predict", broken)
    report, code = show(running.run(make_job(resolved(), measured())))
    assert (report.void, code, report.traceback) == ("/tmp/cache: No space left on device", 3, None)
    assert "free some space" in report.hint


OUT_OF_MEMORY = (
    "Graph execution error:\n\nDetected at node 'net/conv' defined at:\n"
    "{{function_node __wrapped__Conv2D_device_/job:localhost/CPU:0}} OOM when allocating tensor with "
    "shape[9,28,28,6] and type float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu "
    "[[{{node net/conv}}]] [Op:Conv2D]\nHint: something"
)


@pytest.mark.parametrize(
    ("error", "text", "void", "exit_code", "hint"),
    [
        ("InternalError", "the device is gone\nsecond line", "InternalError: the device is gone", 1, None),
        (
            "ResourceExhaustedError",
            OUT_OF_MEMORY,
            "out of memory: OOM when allocating tensor with shape[9,28,28,6] and type float",
            4,
            "use a smaller --micro-batch-size or --image-size, or --fused-micro-batches 1",
        ),
        ("ValueError", "shapes do not match\nsecond line", "ValueError: shapes do not match", 1, None),
    ],
)
def test_an_error_of_the_device_voids_the_result(monkeypatch, error, text, void, exit_code, hint):
    import tensorflow as tf

    def broken(self, dataset):
        raise ValueError(text) if error == "ValueError" else getattr(tf.errors, error)(None, None, text)

    monkeypatch.setattr(HostPredictor, "predict", broken)
    report, code = show(running.run(make_job(resolved(), measured())))
    assert (report.void, code, report.hint) == (void, exit_code, hint)
    if exit_code == 1:
        assert "def broken" not in report.traceback and error in report.traceback
    valid(report.to_dict())


def test_images_beyond_memory_are_refused_before_they_are_drawn():
    work = resolved("resnet50-keras", image_size="60000", micro_batch_size="100")
    check_raises(InfeasibleError, "of 60000x60000x3 needs", "--image-size", make_job, work, measured())


@pytest.mark.parametrize(
    "given, least",
    [({"max_time": 5.0}, 5.0), ({"max_time": 50.0}, 10.0), ({}, 10.0)],
)
def test_the_default_min_time_is_at_most_max_time(given, least):
    assert make_settings(**given).limits.min_time_s == least


def test_differences_of_keras_optimizers_are_reported():
    from ipucnn.training.optimizer_settings import make_settings as optimizer

    def of(name, is_keras_3, **more):
        return contenders.keras_optimizer(optimizer(name, {}, global_batch_size=8, **more), is_keras_3)

    assert of("adam", True, weight_decay=0.01)[1]["weight_decay"] == 0.01
    assert of("adamw", True)[1]["weight_decay"] == 0.0  # not Keras's default 0.004
    assert of("adamw", True)[0] == "AdamW" and of("adamw", False)[0] == "Adam"
    assert of("sgd", True, weight_decay=0.01)[2] == []
    for name, is_keras_3, more, words in (
        ("lars", True, {}, "SGD instead of LARS"),
        ("sgd", False, {"weight_decay": 0.01}, "no weight decay"),
        ("sgd", True, {"l2_regularization": 0.01}, "no L2"),
        ("adamw", True, {"decay_biases_and_norms": False}, "weight decay of biases and norms"),
    ):
        assert words in "; ".join(of(name, is_keras_3, **more)[2])


def test_an_execution_without_results_is_refused(monkeypatch):
    """An execution fails if logits are missing or not finite."""

    class Lazy:
        logit = 0.0

        def any_instance(self, flag):
            return flag

        def predict(self, batches):
            return [np.full((4, 10), self.logit) for _ in list(batches)[:2]]

    lazy = Lazy()
    side = contenders.SessionInference(
        lazy,
        lazy,
        itertools.repeat(0),
        BuiltProgram.of(make_program(RunConfig(micro_batch_size=2), 8, seed=0), Layers((), "", ()), 2),
    )
    side.execute(4)
    side.check()
    for units in (1, 6):
        side.execute(units)
        with pytest.raises(ValueError, match=f"of {2 * units} images computed"):
            side.check()
    monkeypatch.setattr(Lazy, "logit", np.nan)
    side.execute(4)
    with pytest.raises(contenders.VoidError, match="NaN"):
        side.check()


def baseline_of(work):
    """Returns a complete benchmark report with made-up figures."""
    report = first_report(work, DeviceInfo("cpu", "CPU", 1, 1), {}).to_dict()
    speed = records.Interval(100.0, None, None)
    row = records.Execution(16, 0.1, 0.1, 0.02, 0.02)
    facts = {"micro_batches": 4, "samples": 16, "fused_micro_batches": 2, "reference_repetitions": 1}
    parts = {
        "executions": [row] * 20,
        "execution": filled(records.ExecutionFacts, **facts),
        "measured": filled(records.MeasuredFigures, images_per_s=speed, num_executions=20),
    }
    return json.loads(json.dumps({**report, **msgspec.to_builtins(parts)}))


@pytest.fixture(scope="module")
def whole_baseline():
    return json.dumps(baseline_of(make_job(resolved(micro_batch_size="4"), measured())))


def against(report, settings=None, **flags):
    Path("b.json").write_text(json.dumps(report) if isinstance(report, dict) else report)
    flags = {"micro_batch_size": "4", **flags}
    settings = settings or measured()
    return make_job(resolved(**flags), dataclasses.replace(settings, baseline=Path("b.json")))


def test_executions_are_as_long_as_those_of_the_baseline(whole_baseline):
    """The run fuses as many micro-batches as the baseline: executions of 4 cannot hold the 64 of the host's default."""
    assert against(whole_baseline).fused == 2
    report = json.loads(whole_baseline)
    report["execution"]["samples"] = 20
    check_raises(DataError, "20 samples are no multiple of 8", "", against, report)
    del report["settings"]["compare_with"]
    check_raises(DataError, "required field `compare_with`", "", against, report)


@pytest.mark.parametrize(
    "change, flags, reason",
    [
        (("input_shape", [32, 32, 1]), {}, r"input shape \[32, 32, 1\], this run \[28, 28, 1\]"),
        (("data.num_images", 7), {}, "data num images 7, this run 1024"),
        (("data.name", "digits"), {}, "data name digits, this run random"),
        (("settings.compare_with", "keras"), {}, "--compare-with keras, this run none"),
        (("mode", "training"), {}, "mode training, this run inference"),
        (("scope", "end-to-end"), {}, "measured --mode end-to-end"),
        (("program.num_stages", 2), {}, "num stages 2, this run 1"),
        (("options.norm-layer", "made_up"), {}, "--norm-layer made_up"),
        ((), {"micro_batch_size": "8"}, "--micro-batch-size 4, this run 8"),
        ((), {"steps_per_execution": "2"}, "--steps-per-execution none, this run 2"),
        ((), {"fused_micro_batches": "1"}, "--fused-micro-batches none, this run 1"),
        ((), {"image_size": "64"}, "input shape"),
    ],
)
def test_baselines_of_other_settings_are_refused(whole_baseline, change, flags, reason):
    report = json.loads(whole_baseline)
    if change:
        *parents, last = change[0].split(".")
        place = report
        for key in parents:
            place = place[key]
        place[last] = change[1]
    with pytest.raises(ConfigurationError, match=reason):
        against(report, **flags)


def test_a_baseline_may_have_another_seed_and_other_paths(whole_baseline):
    against(whole_baseline, seed="7", run_dir="elsewhere")


class Clock:
    """A clock for benchmarks that advances only when a test advances it, however busy the machine is.

    Attributes:
        unit_s: seconds that one unit of work takes, with a scatter of up to 10 %.
    """

    def __init__(self, patch, contender, unit_s):
        self.unit_s, self._now_s = unit_s, 0.0
        measure, execute = running.measure, contender.execute
        repeat, chance = contenders.ReferenceWorkload.__call__, random.Random(0)

        def measure_by_this(contenders, limits, clocks, *others):
            return measure(contenders, limits, Clocks(0.0, self.read, self.read), *others)

        def execute_by_this(work, num_units):
            execute(work, num_units)
            self.advance(num_units * self.unit_s * chance.uniform(0.9, 1.1))

        def reference_by_this(workload):
            repeat(workload)
            return 0.01, 0.01

        patch.setattr(running, "measure", measure_by_this)
        patch.setattr(contender, "execute", execute_by_this)
        patch.setattr(contenders.ReferenceWorkload, "__call__", reference_by_this)
        patch.setattr(peak.Occupation, "others_share", lambda occupation: 0.0)

    def read(self):
        return self._now_s

    def advance(self, seconds):
        self._now_s += seconds


@pytest.mark.slow
def test_a_regression_against_a_baseline_fails(run, monkeypatch):
    clock = Clock(monkeypatch, contenders.SessionInference, unit_s=0.001)
    small = f"{SMALL} {QUICK} --executions 20 --max-time 60"
    benchmark(run, f"{small} --run-dir base")
    path = Path("base/report.json")
    before = json.loads(path.read_text())
    held = f"{small} --baseline {path} --max-regression 20%"
    out, err = benchmark(run, f"{held} --run-dir same")
    assert "not slower than allowed" in out
    now = valid(json.loads(Path("same/report.json").read_text()))
    assert now["execution"] == before["execution"]  # as long as in the baseline, also the reference
    assert now["regression"]["verdict"] == "not slower"
    clock.unit_s *= 1.5
    out, err = benchmark(run, f"{held} --run-dir slow", code=5)
    assert "slower than" in err and "slower than allowed" in out
    slow = valid(json.loads(Path("slow/report.json").read_text()))
    assert slow["regression"]["regressed"]
    assert slow["regression"]["ratio"]["value"] == pytest.approx(1 / 1.5, rel=0.1)
    refused = Refusal(f"benchmark {small} --training --baseline {path}", "mode inference, this run training")
    check_refused(run, refused)
    before["executions"] = before["executions"][:5]
    path.write_text(json.dumps(before))
    out, err = benchmark(run, f"{SMALL} {QUICK} --baseline {path}")
    assert "has 5 executions, and 20 are needed" in err and "inconclusive" in err
    assert "needs 6" in out
    assert valid(json.loads(Path("runs/lenet-benchmark/report.json").read_text()))["regression"]


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("0.2", 0.2), (" 10 % ", 0.1), ("0", 0.0)]
    + [(text, None) for text in ("5", "100%", "-1%", "x", "%", "nan")],
)
def test_shares(text, share):
    read = partial(read_options, Benchmark, "benchmark", {"max_regression": text})
    if share is not None:
        assert read().max_regression == pytest.approx(share)
        return
    check_raises(ConfigurationError, f"--max-regression {text}: must be a share", "--max-regression 5%", read)


@pytest.mark.slow
def test_a_benchmark_of_inference_names_options_of_weight_updates(run):
    adam = (
        "--optimizer adam --optimizer-params {} --weight-decay 0 --global-batch-size 8 --label-smoothing 0.1"
    )
    _, err = benchmark(run, f"{SMALL} {QUICK} {adam} --run-dir i")
    idle = "optimizer, optimizer-params, label-smoothing, global-batch-size"
    assert {*err.split("note: without effect in inference: ")[1].split("; --training")[0].split(", ")} == {
        *idle.split(", ")
    }
    _, err = benchmark(run, f"{SMALL} {QUICK} --weight-decay 0.1 --training --run-dir t")
    assert "without effect" not in err


def test_folders_are_not_overwritten(tmp_path):
    from ipucnn.benchmarking.report import check_folder

    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.yml").write_text("")
    check_raises(ConfigurationError, "already exists", "--overwrite", check_folder, resolved(run_dir="r"))
    assert check_folder(resolved(run_dir="r", overwrite=True)) == Path("r")
    (folder / "mine.txt").write_text("x")
    check_raises(ConfigurationError, "mine", "", check_folder, resolved(run_dir="r", overwrite=True))


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(run, monkeypatch):
    real, calls = HostPredictor.predict, []

    def predict(self, dataset):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return real(self, dataset)

    monkeypatch.setattr(HostPredictor, "predict", predict)
    out, err = benchmark(run, f"{SMALL} --min-time 300 --max-time 400 --seed 1", code=130)
    assert "interrupted after" in err
    report = valid(json.loads(Path("runs/lenet-benchmark/report.json").read_text()))
    assert report["interrupted"] and report["measured"]
    assert 1 <= len(report["executions"]) <= 7
    assert "interrupted" in out and "images/s" in out


@pytest.mark.slow
def test_the_input_pipeline_by_stage(run):
    report = json.loads(benchmark(run, f"lenet --mode data --dataset digits --augment --json {QUICK}")[0])
    pipeline, costs = report["data_pipeline"], []
    for stage in pipeline["stages"]:
        costs.append(1 / per_second(stage["executions"]))
        assert stage["images_per_s"]["value"] == pytest.approx(1 / costs[-1])
    stage_costs = [stage["own_s_per_image"]["value"] for stage in pipeline["stages"]]
    assert stage_costs == pytest.approx([b - a for a, b in zip([0.0, *costs], costs)])
    assert report["measured"]["images_per_s"] == pipeline["stages"][-1]["images_per_s"]
    for feed, column in zip(pipeline["feeds"], report["predicted"]):
        of_one_ipu = column["images_per_s"] / column["num_ipus"]
        assert feed["num_ipus"]["value"] == pytest.approx(1 / costs[-1] / of_one_ipu)
        assert feed["images_per_s_per_ipu"] == pytest.approx(of_one_ipu)


@pytest.mark.slow
def test_a_slow_input_pipeline_is_reported(monkeypatch):
    """Most of the time is spent waiting for images, and the reported share says so."""
    from ipucnn.datasets import pipeline

    real, clock = pipeline.train_batches, Clock(monkeypatch, contenders.SessionTraining, unit_s=0.02)

    def slow(*args, **values):
        import tensorflow as tf

        def wait(*element):
            def pass_time(x):
                clock.advance(0.1)
                return x

            images = tf.numpy_function(pass_time, [element[0]], tf.float32)
            images.set_shape(element[0].shape)
            return (images, *element[1:])

        # This stage is not prefetched: it runs when an image is requested, in the thread that requests it.
        return real(*args, **values).map(tf.autograph.experimental.do_not_convert(wait))

    monkeypatch.setattr(pipeline, "train_batches", slow)
    monkeypatch.setattr(pipeline, "buffered_elements", lambda *args: 4)
    settings = measured(mode="training", scope="end-to-end")
    report = show(running.run(make_job(resolved(micro_batch_size="2"), settings)))[0]
    assert report.void is None, report.traceback
    # An update computes two images in 0.02 s, and waits 0.1 s for them unless it repeats a constant batch.
    assert report.end_to_end.data_share.value == pytest.approx(0.1 / 0.12, rel=0.1)
    assert report.end_to_end.constant_batch.images_per_s.value == pytest.approx(2 / 0.02, rel=0.1)
    assert report.end_to_end.pipeline.images_per_s.value == pytest.approx(2 / 0.1)


def test_modes():
    scopes = {mode: make_settings(mode=mode) for mode in ("training", "inference", "data", "end-to-end")}
    assert {m: (s.mode, s.scope) for m, s in scopes.items()} == {
        "training": ("training", "session"),
        "inference": ("inference", "session"),
        "data": ("training", "data"),
        "end-to-end": ("training", "end-to-end"),
    }
    assert make_settings(mode="data", training=False).mode == "inference"
    assert make_settings().mode == "inference" and make_settings(training=True).mode == "training"
