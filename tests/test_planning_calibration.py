"""Calibration of the cost model for a system: against simulated measurements, in plan-splits and in its files."""

import json
import math
import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from altered import altered, places
from support.benchmark_reports import filled
from support.plans import home_graph, plan_splits, refused
from support.refusals import check_raises

from ipucnn.benchmarking import records
from ipucnn.benchmarking.prediction import PredictionRequest, predict_ipu
from ipucnn.config.options import RunConfig
from ipucnn.config.values import norm_layer_of
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.hardware import Calibration, get_system
from ipucnn.models.registry import get_model
from ipucnn.planning.calibration import (
    FACTORS,
    Observation,
    calibrate,
    calibrated_system,
    describe,
    read_profile,
    suspicious,
)
from ipucnn.planning.cost.layer_times import layer_times
from ipucnn.planning.cost.products import BAND_FACTOR
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.forecast import forecast
from ipucnn.planning.program import PlannedProgram
from ipucnn.training.program import BuiltProgram, Layers, make_program

POD16 = get_system("pod16")
TRUTHS = [Calibration(1.25, 1.6, 1.7), Calibration(0.8, 0.6, 0.7), Calibration(1.1, 0.5, 2.0)]
SETTINGS = {
    "micro-batch-size": (8, 32, 64, 32, 16, 32),
    "gradient-accumulation-count": (4, 2, 1, 4, 1, 2),
    "num-replicas": (1, 4, 16, 1, 16, 4),
}
NETWORKS = ("cifar_resnet8", "cifar_resnet8", "cifar_resnet8", "lenet", "lenet", "mnist_cnn")
UNUSED = [
    ("cifar_resnet8", (16, 8, 8)),
    ("cifar_resnet8", (4, 1, 16)),
    ("lenet", (64, 2, 4)),
    ("mnist_cnn", (8, 1, 16)),
    ("mnist_cnn", (64, 4, 1)),
]


def true_images_per_s(name, batch, truth):
    """Returns the throughput of a system on which all times of a kind are longer by a factor."""
    settings = PlannedProgram(*batch)
    return predict(home_graph(name), (), settings, POD16.calibrated(truth)).images_per_s


def simulated(truth, seed):
    """Simulates six runs, each off by 3 % (one standard deviation)."""
    noise = np.random.default_rng(seed)
    runs = zip(NETWORKS, zip(*SETTINGS.values()))
    return [
        Observation(
            f"run{i}",
            home_graph(name),
            (),
            PlannedProgram(*batch),
            true_images_per_s(name, batch, truth) * math.exp(noise.normal(0, 0.03)),
        )
        for i, (name, batch) in enumerate(runs)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("truth", TRUTHS)
def test_six_noisy_runs_predict_other_configurations_within_ten_percent(truth):
    for seed in range(2):
        profile = calibrate(simulated(truth, seed), POD16)
        assert profile.told == FACTORS
        assert profile.error_after < 1.05 < profile.error_before
        system = calibrated_system(profile, POD16)
        for name, batch in UNUSED:
            predicted = predict(home_graph(name), (), PlannedProgram(*batch), system).images_per_s
            assert predicted == pytest.approx(true_images_per_s(name, batch, truth), rel=0.1)


@pytest.mark.slow
def test_fit_minimises_its_stated_objective():
    """Writes the objective out a second time, with every prediction made anew."""
    measurements = simulated(TRUTHS[0], 1)
    profile = calibrate(measurements, POD16)

    def loss(logs):
        total = sum((log / math.log(prior)) ** 2 for log, prior in zip(logs, (1.25, 2.0, 2.0)))
        system = POD16.calibrated(Calibration(*map(math.exp, logs)))
        for measurement in measurements:
            predicted = predict(
                measurement.graph, measurement.splits, measurement.settings, system
            ).images_per_s
            total += (math.log(predicted / measurement.images_per_s) / 0.05) ** 2
        return total

    logs = [math.log(factor) for factor in astuple(profile.calibration)[:3]]
    best = loss(logs)
    for i in range(3):
        for step in (-0.02, 0.02):
            assert loss([log + step * (i == j) for j, log in enumerate(logs)]) > best


def test_constants_without_measurements_stay_as_shipped():
    alone = [measurement for measurement in simulated(TRUTHS[0], 2) if measurement.settings.num_replicas == 1]
    profile = calibrate(alone, POD16)
    assert "collective" not in profile.told and profile.calibration.collective == 1
    exact = [
        replace(
            measurement, images_per_s=predict(measurement.graph, (), measurement.settings, POD16).images_per_s
        )
        for measurement in simulated(TRUTHS[0], 2)
    ]
    assert astuple(calibrate(exact, POD16).calibration)[:3] == pytest.approx((1, 1, 1), abs=1e-4)


def test_factors_scale_the_times_of_their_kind():
    graph, settings = home_graph("lenet"), PlannedProgram(4, 2, 8)
    base = predict(graph, (), settings, POD16)
    same = predict(graph, (), settings, POD16.calibrated(Calibration()))
    assert same == base
    slow = POD16.calibrated(Calibration(compute=2.0))
    np.testing.assert_allclose(
        layer_times(graph, settings, slow.ipu).forward_s,
        2 * layer_times(graph, settings, POD16.ipu).forward_s,
    )
    fixed = predict(graph, (), settings, POD16.calibrated(Calibration(fixed=3.0)))
    assert fixed.tick_s - base.tick_s == pytest.approx(2 * 60e-6)
    summed = predict(graph, (), settings, POD16.calibrated(Calibration(collective=3.0)))
    assert summed.all_reduce_s == pytest.approx(3 * base.all_reduce_s)
    assert summed.update_s - base.update_s == pytest.approx(2 * base.all_reduce_s)


@pytest.mark.slow
def test_implausible_factor_warns_and_widens_the_band():
    honest = calibrate(simulated(TRUTHS[0], 0), POD16)
    assert suspicious(honest) == [] and honest.calibration.band_factor == BAND_FACTOR
    # A single run, far slower than predicted: the fit is good, and says little.
    (slow, *_) = simulated(Calibration(1, 10, 1), 0)
    profile = calibrate([slow], POD16)
    (warning,) = suspicious(profile)
    assert warning.startswith("feeds and loop x ") and "is beyond a factor of 3" in warning
    system = calibrated_system(profile, POD16)
    assert profile.calibration.band_factor > 3
    predicted = forecast(slow.graph, slow.splits, slow.settings, system)
    assert predicted.images_per_s_band == (
        predicted.predicted_images_per_s / profile.calibration.band_factor,
        predicted.predicted_images_per_s * profile.calibration.band_factor,
    )
    assert f"warning: {warning}" in describe(profile)


def test_measured_stages_distinguish_computing_from_feeds():
    """A single throughput cannot say whether computing or feeds are slower than predicted."""
    truth, graph = Calibration(1.5, 1.5), home_graph("cifar_resnet8")
    splits, settings = ("conv2_block1_add",), PlannedProgram(8, 8, num_stages=2)
    real = predict(graph, splits, settings, POD16.calibrated(truth))
    stage_s = tuple(stage.forward_s + stage.backward_s for stage in real.stages)
    alone = Observation("p.yml", graph, splits, settings, real.images_per_s)
    errors = [
        abs(calibrate([measured], POD16).calibration.compute / 1.5 - 1)
        for measured in (alone, replace(alone, stage_s=stage_s))
    ]
    assert errors[1] < 0.02 < errors[0]


def test_impossible_measurements_are_refused():
    honest, small = simulated(TRUTHS[0], 0), get_system("m2000")
    check_raises(ConfigurationError, "nothing was measured", "", calibrate, [], POD16)
    check_raises(ConfigurationError, "ran on 16 IPUs, and IPU-M2000 has 4", "", calibrate, honest, small)
    wild = [replace(measurement, images_per_s=measurement.images_per_s / 1e6) for measurement in honest]
    check_raises(DataError, "no factor between", "", calibrate, wild, POD16)


# --- profiles and the command line


def save_report(path, name, batch, images_per_s, kind="ipu"):
    """Writes the report of a training benchmark."""
    record = get_model(name)
    options = {
        **dict(zip(SETTINGS, batch)),
        "precision": "16.16",
        "norm-layer": norm_layer_of(record.default_norm),
        "half-partials": True,
        "optimizer": "sgd",
        "optimizer-params": {"momentum": 0.9},
        "optimizer-state-offloading": False,
        "allow-partial": False,
    }
    config = RunConfig(
        model_name=name,
        micro_batch_size=batch[0],
        gradient_accumulation_count=batch[1],
        num_replicas=batch[2],
        precision="16.16",
        optimizer="sgd",
        optimizer_params={"momentum": 0.9},
    )
    report = filled(
        records.BenchmarkReport,
        model=name,
        mode="training",
        scope="session",
        input_shape=list(record.input_shape),
        data=filled(records.DataFacts, kind="host-generated", name="random", num_images=64),
        options=options,
        program=BuiltProgram.of(make_program(config, 100_000, seed=1), Layers((), "", ()), 1).to_dict(),
        device=filled(records.DeviceFacts, kind=kind),
        measured=filled(records.MeasuredFigures, images_per_s=records.Interval(images_per_s, None, None)),
    )
    path.write_text(report.to_json())
    return path.name


def test_reports_give_a_profile_for_plans_and_benchmarks(tmp_path, run):
    truth = TRUTHS[0]
    names = [
        save_report(tmp_path / f"r{i}.json", name, batch, true_images_per_s(name, batch, truth))
        for i, (name, batch) in enumerate(zip(NETWORKS, zip(*SETTINGS.values())))
    ]
    out, err = plan_splits(run, "--calibrate", *names, "--system", "pod16", "--system-profile", "p.json")
    assert "written: p.json" in err
    assert "geometric mean error" in out and "with the profile" in out
    profile = read_profile(tmp_path / "p.json")
    assert astuple(profile.calibration)[:3] == pytest.approx(astuple(truth)[:3], rel=0.1)
    assert json.loads((tmp_path / "p.json").read_text())["measurements"][0]["model"] == "cifar_resnet8"
    name, batch = UNUSED[0]
    flags = ["--micro-batch-size", batch[0], "--gradient-accumulation-count", batch[1], "--replicas", batch[2],
             "--stages", 1, "--precision", "16.16", "--half-partials", "--no-optimizer-state-offloading",
             "--optimizer", "sgd", "--optimizer-params", '{"momentum":0.9}', "--json"]  # fmt: skip
    out, err = plan_splits(run, name, *flags, "--system-profile", "p.json")
    plan = json.loads(out)
    assert plan["predicted_images_per_s"] == pytest.approx(true_images_per_s(name, batch, truth), rel=0.05)
    assert plan["system"]["name"] == "pod16" and plan["system"]["calibration"]["compute"] > 1.1
    assert any("as measured on IPU-POD16" in text for text in plan["assumed"])
    out, _ = plan_splits(run, name, *flags)
    assert json.loads(out)["predicted_images_per_s"] > 1.1 * plan["predicted_images_per_s"]
    # The prediction of a benchmark uses it, too.
    config = RunConfig(model_name="lenet", micro_batch_size=8)
    request = PredictionRequest(
        config, make_program(config, 1000, seed=1), (), training=True, profile=profile
    )
    calibrated = predict_ipu(home_graph("lenet"), request, "16.16").images_per_s
    shipped = predict_ipu(home_graph("lenet"), replace(request, profile=None), "16.16").images_per_s
    assert calibrated is not None and shipped is not None and calibrated < 0.9 * shipped


def test_plan_with_measured_figures_is_accepted(tmp_path, run):
    flags = "cifar_resnet8 --stages 2 --norm-layer group_norm --micro-batch-size 8 --gradient-accumulation-count 8"
    out, _ = plan_splits(run, flags, "--json --save p.yml")
    plan, text = json.loads(out), (tmp_path / "p.yml").read_text()
    refused(run, 3, "the plan has no measured throughput", "measured_images_per_s: 1234", "--calibrate p.yml")
    measured = text.replace("measured_images_per_s: null", "measured_images_per_s: 12345.0")
    (tmp_path / "p.yml").write_text(measured)
    out, _ = plan_splits(run, "--calibrate", "p.yml", "--json")
    (row,) = json.loads(out)["measurements"]
    assert row["images_per_s"] == 12345
    assert row["shipped_images_per_s"] == pytest.approx(plan["predicted_images_per_s"])
    (tmp_path / "p.yml").write_text(measured.replace("measured_stage_s: []", "measured_stage_s: [0.1]"))
    refused(run, 3, "measured_stage_s has 1 value, for 2 stages", "give the seconds", "--calibrate p.yml")


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_measurements_of_other_devices_are_refused(kind, tmp_path, run):
    name = save_report(tmp_path / "r.json", "lenet", (8, 1, 1), 1000.0, kind)
    error = f"was measured on a {kind.upper()}"
    refused(run, 2, error, "give run", f"--calibrate {name} --system-profile p.json")
    assert not (tmp_path / "p.json").exists()


def test_wrong_profiles_and_options_are_refused(tmp_path, run):
    report = save_report(tmp_path / "r.json", "lenet", (8, 1, 1), 9000.0)
    _, err = plan_splits(run, "--calibrate", report, "--system-profile", "p.json")
    assert "--system is not given: measured on IPU-POD16" in err
    good = json.loads((tmp_path / "p.json").read_text())
    changes = [
        {"schema_version": 2}, {"schema_version": True}, {"kind": "x"}, {"system": "pod17"}, {"system": 3},
        {"factors": {"compute": 1.0}}, {"factors": {**good["factors"], "fixed": 1e9}},
        {"factors": {**good["factors"], "fixed": "1"}}, {"told": ["x"]}, {"told": 1}, {"error_after": None},
    ]  # fmt: skip
    bad = "lenet --stages 1 --system-profile bad.json"
    for change in changes:
        (tmp_path / "bad.json").write_text(json.dumps({**good, **change}))
        refused(run, 3, "", "make it again", bad)
    for text in ("", "[]", "{", '"x"'):
        (tmp_path / "bad.json").write_text(text)
        refused(run, 3, "bad.json", "", bad)
        refused(run, 3, "bad.json", "", "--calibrate bad.json")
    for words in (
        "lenet --stages 1 --system-profile p.json --system bow-pod16",
        "lenet --stages 1 --system-profile p.json --save p.json",
        f"--calibrate {report} --system-profile {report}",
        f"--calibrate {report} --stages 2",
        f"--calibrate {report} --html x.html",
    ):
        refused(run, 2, "", "", words)
    assert json.loads((tmp_path / "p.json").read_text()) == good
    refused(run, 3, "absent.json", "", "--calibrate absent.json")


@pytest.mark.slow
def test_changed_reports_never_cause_a_traceback(tmp_path, run):
    draw = random.Random(5)
    save_report(tmp_path / "r.json", "lenet", (8, 1, 1), 9000.0)
    whole = (tmp_path / "r.json").read_text()
    spots = [at for at in places(json.loads(whole)) if at[0] in ("program", "measured")]
    values = [None, 0, -1, 7, 1.5, "x", [], {}, [3], {"a": 1}, True, 10**30]
    for _ in range(100):
        at = draw.choice(spots)
        report = altered(json.loads(whole), at, draw, values)
        (tmp_path / "r.json").write_text(json.dumps(report))
        code, _, err = run("plan-splits", "--calibrate", "r.json")
        assert code in (0, 2, 3) and (code == 0 or "hint:" in err), (at, err)
    for shape in ([10**30, 32, 1], [32, 32, 10**30], [32, 0, 1], [32, 32]):
        (tmp_path / "r.json").write_text(json.dumps({**json.loads(whole), "input_shape": shape}))
        _, err = plan_splits(run, "--calibrate", "r.json", code=3)
        assert "hint:" in err, shape


@pytest.mark.slow
def test_training_run_can_be_used_for_calibration(tmp_path, run):
    """A run of this machine, whose report is edited to be of IPUs."""
    words = "train lenet --dataset digits --num-epochs 1 --image-size 32 --run-dir run"
    assert run(*words.split())[0] == 0
    refused(run, 2, "was measured on a CPU", "", "--calibrate run")
    report = json.loads((tmp_path / "run/report.json").read_text())
    report["compilation"]["device"]["kind"] = "ipu"
    report["measured"]["images_per_s"] = 200_000.0
    (tmp_path / "run/report.json").write_text(json.dumps(report))
    out, _ = plan_splits(run, "--calibrate", "run", "--json")
    row = json.loads(out)["measurements"][0]
    assert row["model"] == "lenet" and row["images_per_s"] == 200_000
    for name in ("last.npz", "best.npz", "checkpoint-00000044.npz"):
        (tmp_path / "run/checkpoints" / name).unlink()
    refused(run, 3, "kept no checkpoint", "", "--calibrate run")
