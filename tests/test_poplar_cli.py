"""Every command on the test double of the SDK, with the default --device auto."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from poplar_double import installed
from support import trained_runs
from support.refusals import Refusal, check_refused

from ipucnn import cli
from ipucnn.planning.program import PlannedProgram
from ipucnn.sessions.session import NotFiniteError
from ipucnn.training.checkpoints import load_checkpoint

SMALL = ["--limit-train", "64", "--limit-eval", "32", "--micro-batch-size", "4", "--seed", "3"]
FEW = ["--limit-train", "8", "--limit-eval", "4", "--num-epochs", "1", "--micro-batch-size", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def of_the_host(folder):
    """Returns a run of the host, which trained without compiling anything."""
    line = "toy_model --micro-batch-size 4 --limit-train 8 --limit-eval 32 --num-epochs 1 --seed 3"
    return trained_runs.train(folder / "of-the-host", line, lightly=True)


def train(report, run_dir, *more):
    """Trains at a rate that does not depend on the number of epochs."""
    rate = ["--lr-schedule", "const", "--learning-rate", 0.01]
    return report("train", "toy_model", "--run-dir", run_dir, *SMALL, *rate, "--num-epochs", 2, *more)


@pytest.fixture(scope="module")
def same(folder):
    """Options of runs that share their compiled programs."""
    return ("--executable-cache", folder / "cache", "--num-replicas", 2, "--eight-bit-transfer")


def test_train_evaluate_and_infer_on_ipus_and_on_the_host(run, report, folder, same):
    with installed() as machine:
        trained = train(report, folder / "ipu", *same)
        assert machine.calls("fit") and machine.calls("predict")
        assert machine.config["ipus"] == 2
    assert trained["compilation"]["device"]["kind"] == "ipu"
    assert not trained["compilation"]["cached"]
    with installed(num_ipus=1):  # one IPU is enough to infer with a run of two
        report("infer", folder / "ipu", "--split", "eval", "--limit-eval", 2)
        evaluate, hint = ["evaluate", folder / "ipu"], "use 2 or 4 IPUs: --validation-num-replicas"
        check_refused(
            run,
            Refusal([*evaluate, "--validation-num-replicas", 3], "3", hint),
            Refusal(evaluate, "", "--validation-num-replicas", 6),
        )
    # Trained on IPUs, evaluated on IPUs and on the host
    with installed():
        on_ipus = report("evaluate", folder / "ipu")
        report("infer", folder / "ipu", "--split", "eval", "--limit-eval", 4)
    on_host = report("evaluate", folder / "ipu", "--device", "cpu")
    assert (on_ipus["device"], on_host["device"]) == ("ipu", "cpu")
    assert on_host["measured"]["samples"] == on_ipus["measured"]["samples"] == 32
    # The images were resized on the host; on their way to the IPUs they were rounded to 8 bits.
    assert on_host["measured"]["loss"] == pytest.approx(on_ipus["measured"]["loss"], abs=1e-3)


@pytest.mark.slow
def test_a_run_on_ipus_continues_with_the_same_bytes_and_one_of_the_host_on_ipus(report, folder, same):
    """The program of the second half comes from the cache."""
    for name, *parts in (("whole", ()), ("half", ("--num-epochs", 1), ("--resume",))):
        for number, more in enumerate(parts):
            with installed():
                cached = train(report, folder / name, *same, *more)["compilation"]["cached"]
            assert cached or (name, number) == ("whole", 0)
    first, second = (load_checkpoint(folder / n / "checkpoints" / "last.npz") for n in ("whole", "half"))
    for name, value in first.weights.items():
        assert np.array_equal(value, second.weights[name]), name
    train(report, folder / "host", "--num-epochs", 1, "--device", "cpu")
    with installed():
        continued = train(report, folder / "host", "--resume", "--device", "auto")
    assert continued["compilation"]["device"]["kind"] == "ipu"
    assert load_checkpoint(folder / "host" / "checkpoints" / "last.npz").meta["weight_updates"] == 32


@pytest.mark.slow
def test_a_run_of_16_bits_is_evaluated_and_continued_on_the_host(report, folder):
    run_dir = folder / "half"
    with installed():
        trained = train(report, run_dir, "--precision", "16.16", "--num-epochs", 1, "--overwrite")
    evaluate = ["evaluate", run_dir, "--device", "cpu"]
    half = report(*evaluate)["measured"]["loss"]
    assert half == pytest.approx(trained["validation"]["loss"], rel=0.01)
    # It uses 32 bits only on request.
    assert report(*evaluate, "--precision", "32.32")["measured"]["loss"] != half
    report("train", "--resume", "--run-dir", run_dir, "--num-epochs", 2, "--device", "cpu")
    weights = load_checkpoint(run_dir / "checkpoints" / "last.npz").weights
    assert all(np.array_equal(w, w.astype(np.float16)) for w in weights.values())


@pytest.mark.slow
@pytest.mark.slow_cases("network1")
@pytest.mark.parametrize("network", [[], ["--ipus-per-replica", 2, "--pipeline-splits", "auto"]])
def test_training_uses_the_cache_that_compile_only_filled(run, report, tmp_path, network):
    flags = ["train", "toy_model_bn", *SMALL, "--num-epochs", 1, *network]
    cache = tmp_path / "my cache"  # the driver reads its name from a variable of words
    flags += ["--precise-batch-norm", 0, "--executable-cache", cache.name, "--run-dir", "run"]
    with installed(num_ipus=0) as machine:  # without IPUs
        compiled_only = report(*flags, "--compile-only")
        kinds = [key[1] for key in machine.programs]
        assert kinds == (["fit", "predict", "predict"] if network else ["fit", "predict"])
        machine.programs.clear()
    assert compiled_only["compiled_only"] and compiled_only["executable_cache"] == str(cache)
    assert compiled_only["compilation"]["compile_s"] > 0 and not compiled_only["compilation"]["cached"]
    assert not (tmp_path / "run").exists()
    compiled = sorted(path.name for path in cache.iterdir())
    assert len(compiled) == len(kinds)
    with installed(num_ipus=0):
        code, out, _ = run(*flags, "--compile-only")
    assert code == 0 and "all programs were there already" in out and str(cache) in out
    words = [*flags, "--compile-only", "--device", "cpu"]
    check_refused(run, Refusal(words, "has no effect with --device cpu"))
    with installed():
        assert report(*flags)["compilation"]["cached"]
    assert sorted(path.name for path in cache.iterdir()) == compiled


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_imported(run, of_the_host, monkeypatch):
    Path("file").write_text("")
    new = ["train", "toy_model", "--run-dir", "run", *SMALL]
    with installed() as machine:
        for cache in ("/proc/nope/x", "file", "file/below"):
            for command in (new, [*new, "--compile-only"], ["evaluate", of_the_host]):
                words = [*command, "--executable-cache", cache]
                check_refused(run, Refusal(words, f"{cache} cannot be made: ", code=3))
        monkeypatch.setenv("TF_POPLAR_FLAGS", "--executable_cache_path='/proc/a b'")
        check_refused(run, Refusal(new, "/proc/a b cannot be made", code=3))
    assert machine.log == []


@pytest.mark.slow
def test_run_without_results_leaves_the_folder_as_it_was(run, tmp_path):
    command = ["train", "toy_model", *SMALL, *FEW, "--run-dir", tmp_path / "run"]
    # An existing folder stays, with the files of others.
    (tmp_path / "run").mkdir()
    with installed(busy=True):
        assert run(*command)[0] == 6
    assert list(tmp_path.iterdir()) == [tmp_path / "run"] and list((tmp_path / "run").iterdir()) == []
    with installed():
        code, _, err = run(*command, "--micro-batch-size", 2)
    assert code == 0, err
    # A run with results keeps them.
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with installed(busy=True):
        assert run(*command, "--micro-batch-size", 2, "--resume", "--num-epochs", 2)[0] == 6
    after = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    assert set(before) - set(after) <= {"report.json", "report.html"} and "last.npz" in after


@pytest.mark.slow
def test_immediate_non_finite_loss_leaves_no_folder(run):
    few = [*FEW, "--learning-rate", 1e30, "--lr-schedule", "const", "--run-dir", "run"]
    code = NotFiniteError("", "").exit_code
    for device in ("cpu", "ipu"):
        with installed():
            words = ["train", "toy_model", *SMALL, *few, "--device", device]
            check_refused(run, Refusal(words, "loss became", code=code))


@pytest.mark.slow
def test_sdk_errors_become_command_errors_and_leave_no_folder(run):
    for facts, flags, code, error, hint in (
        (dict(num_ipus=0), "", 6, "no IPU is visible", ""),
        (dict(num_ipus=1), "--num-replicas 2", 6, "no device of 2 IPUs", ""),
        (dict(busy=True), "--no-on-demand", 6, "no free device", ""),
        (dict(tile_bytes=100), "", 4, "does not fit in the memory of an IPU", ""),
        (dict(tile_bytes=100), "--checkpoint-dir checkpoints", 4, "does not fit", ""),
        (dict(busy=True), "", 6, "no IPUs became free", ""),
        (dict(), "--num-replicas 3", 2, "3 replicas need 3 IPUs", "2 or 4 IPUs"),
        (dict(), "--compile-only", 2, "", "--executable-cache"),
        (dict(), '--matmul-options {"partialsType":"double"}', 2, "Poplar refuses an option", ""),
    ):
        words = ["train", "toy_model", "--run-dir", "run", *SMALL, *flags.split()]
        with installed(**facts):
            check_refused(run, Refusal(words, error, hint, code))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_optimizer_state_is_offloaded_if_the_planner_says_so(report, folder, count):
    args = [
        "--run-dir",
        folder / f"offload{count}",
        *FEW,
        "--no-validation",
        "--gradient-accumulation-count",
        count,
    ]
    with installed() as machine:
        report("train", "toy_model", *args)
    calls = machine.calls("set_gradient_accumulation_options")
    offloaded = [call["keywords"]["offload_weight_update_variables"] for call in calls]
    planned = PlannedProgram(gradient_accumulation_count=count, optimizer_state_offloading=True)
    assert any(offloaded) == planned.offloads_optimizer_state == (count > 1)


@pytest.mark.parametrize(
    ("around", "flags", "code", "text", "hint"),
    [
        ({"python": (3, 10)}, "", 6, "Python 3.10, but", "python3.8 -m venv"),
        ({"variables": {"POPLAR_SDK_ENABLED": None}}, "", 6, "not enabled in this shell", "source"),
        ({}, "--use_modle", 2, "knows no --use_modle", "use_ipu_model"),
        ({"has_keras_ipu": False}, "", 6, "it has no keras.ipu", "--force-reinstall"),
    ],
)
def test_unusable_environments_are_refused(run, monkeypatch, around, flags, code, text, hint):
    monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
    new = ["train", "toy_model", "--run-dir", "run", *SMALL]
    with installed(environment=around) as machine:
        for words in (new, ["benchmark", "toy_model", "--host-generated-data"], [*new, "--device", "ipu"]):
            check_refused(run, Refusal(words, text, hint, code))
        assert machine.log == []
        # The host needs none of these.
        assert run("train", "toy_model", "--device", "cpu", "--print-config")[0] == 0


@pytest.mark.slow
def test_doubtful_environments_are_reported(run, folder):
    around = {"versions": {"numpy": "1.21.6"}}
    warning = "warning: numpy 1.21.6 is installed; the Poplar SDK was made for numpy 1.19: "
    with installed(environment=around):
        code, _, err = run("train", "toy_model", "--run-dir", folder / "doubtful", *FEW)
        assert code == 0, err
        assert sum(line.startswith(warning) for line in err.splitlines()) == 1
        for command in (["evaluate", folder / "doubtful"], ["infer", folder / "doubtful", "--split", "eval"]):
            code, _, err = run(*command)
            assert code == 0 and err.count(warning) == 1, err
    assert "numpy 1.21" not in run("evaluate", folder / "doubtful", "--device", "cpu")[2]


@pytest.mark.slow
@pytest.mark.parametrize("users", ["", "--show_progress_bar=true"])
def test_stdout_has_only_the_result_also_of_the_driver(capfd, monkeypatch, tmp_path, users):
    """The driver's progress bar, which C++ prints on stdout, is shown on request only, on stderr."""
    monkeypatch.setenv("TF_POPLAR_FLAGS", users)
    with installed() as machine:
        words = ["train", "toy_model", *FEW, "--no-validation", "--run-dir", str(tmp_path / "run"), "--json"]
        assert cli.run(words) == 0
        assert machine.flags["show_progress_bar"] == ("true" if users else "false")
    out, err = capfd.readouterr()
    assert json.loads(out) and ("Compiling module" in err) == bool(users)


@pytest.mark.slow
def test_prediction_out_of_memory_hints_at_a_fit(short_benchmarks, run, of_the_host):
    run_dir = of_the_host
    weights = load_checkpoint(run_dir / "checkpoints" / "last.npz").weights
    run_bytes = 4 * sum(value.size for value in weights.values()) - 1
    network_bytes = 66_472 - 1  # of the published toy_model
    benchmark = shlex.split(
        "benchmark toy_model --host-generated-data --steps-per-execution 2 --micro-batch-size 4"
    )
    cases = [
        (run_bytes, ["evaluate", run_dir], "--validation-micro-batch-size 2"),
        (run_bytes, ["infer", run_dir, "--split", "eval", "--limit-eval", 4], "--precision 16.16"),
        (network_bytes, benchmark, "--micro-batch-size 2"),
        (network_bytes, [*benchmark, "--training"], "--micro-batch-size 2"),
    ]
    for tile_bytes, command, hint in cases:
        with installed(tile_bytes=tile_bytes):
            code, _, err = run(*command, columns=2000)
        assert code == 4 and "does not fit in the memory of an IPU" in err, err
        assert f"hint: predicted to fit: {hint} " in err, (command, err)


@pytest.mark.parametrize(
    ("flags", "device", "has", "needs"),
    [
        (["--num-replicas", 2], 0, 1, 2),
        (["--num-replicas", 2], 24, 4, 2),
        ([], 16, 2, 1),
        (["--ipus-per-replica", 2, "--pipeline-splits", "auto"], 0, 1, 2),
    ],
)
def test_a_selected_device_of_another_size_is_refused(run, flags, device, has, needs):
    """gc-info -l numbers the devices of 16 IPUs: 0 to 15 are single ones, 16 to 23 pairs, then fours."""
    args = ["train", "toy_model", "--run-dir", "run", *SMALL, *flags, "--select-ipu", device]
    error = (
        f"--select-ipu {device}: that device has {has} IPU{'s' if has > 1 else ''}, and {needs} are needed"
    )
    with installed(num_ipus=16) as machine:
        words = [*args, "--gradient-accumulation-count", 4]
        check_refused(run, Refusal(words, error, f"a device of {needs} from gc-info -l"))
    assert not machine.calls("fit")


@pytest.mark.slow
def test_a_selected_device_of_the_right_size_is_taken(report, folder):
    args = [
        "--run-dir",
        folder / "selected",
        *FEW,
        "--no-validation",
        "--num-replicas",
        2,
        "--select-ipu",
        17,
    ]
    with installed(num_ipus=16) as machine:
        report("train", "toy_model", *args)
        assert machine.config["ipus"] == 2
    # Evaluation needs one IPU, not the pair.
    with installed(num_ipus=16) as machine:
        report("evaluate", folder / "selected", "--validation-num-replicas", 1)
        assert machine.config["ipus"] == 1


@pytest.mark.slow
@pytest.mark.slow_cases("--training")
@pytest.mark.parametrize("mode", ["--inference", "--training"])
def test_benchmarks_count_all_replicas_whoever_generates_the_data(short_benchmarks, report, mode):
    """For data of the device, the SDK's predict returns zeros of one replica only; all replicas computed."""
    flags = "--micro-batch-size 4 --steps-per-execution 2 --seed 1 --min-time 0 --executions 3"
    for replicas, data in ((1, "--host-generated-data"), (2, "--device-generated-data")):
        with installed():
            words = ["benchmark", "lenet", mode, data, *flags.split(), "--num-replicas", replicas]
            benchmark = report(*words)
        device, measured, execution = (benchmark[name] for name in ("device", "measured", "execution"))
        assert device["kind"] == "ipu" and device["num_cores"] == 1472 * replicas
        assert measured["matmul_peak"] is None and measured["images_per_s"]["value"] > 0
        assert execution["samples"] == 4 * execution["micro_batches"]
        assert benchmark["program"]["fused_micro_batches"] == execution["fused_micro_batches"] == 1


@pytest.mark.parametrize("mode", ["--inference", "--training"])
def test_benchmarks_on_ipus_fuse_no_micro_batches(run, mode):
    words = f"benchmark lenet {mode} --host-generated-data --device ipu --fused-micro-batches 1"
    with installed():
        check_refused(run, Refusal(words, "--fused-micro-batches 1 has no effect on IPUs", "drop it"))


def test_memory_errors_of_benchmarks_on_ipus_have_a_hint_that_ipus_accept(monkeypatch, run):
    def exhausted(*arguments):
        raise MemoryError("no memory")

    words = shlex.split("benchmark toy_model --host-generated-data --executions 3 --min-time 0")
    with installed():
        from ipucnn.sessions.poplar.prediction import PoplarPredictor

        monkeypatch.setattr(PoplarPredictor, "predict", exhausted)
        code, out, err = run(*words)
    assert code == 4 and "use a smaller --micro-batch-size or --image-size" in out + err
    assert "--fused-micro-batches" not in out + err


IN_STAGES = "--pipeline-splits conv3 --gradient-accumulation-count 4"


@pytest.mark.slow_cases("by gc-info-state")
@pytest.mark.slow_cases(
    *(
        f"{where}-{what}"
        for where in ("by gc-info", "in compiling", "in loading")
        for what in ("activations", "gradients")
    )
)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--gradient-accumulation-count 2", "--no-optimizer-state-offloading"),
        (IN_STAGES + " --offload-activations", "--no-offload-activations"),
        (
            IN_STAGES + " --offload-gradient-accumulation-buffers",
            "--no-offload-gradient-accumulation-buffers",
        ),
    ],
    ids=["state", "activations", "gradients"],
)
@pytest.mark.parametrize("where", ["by gc-info", "in compiling", "in loading"])
def test_system_without_remote_memory_refuses_offloading(run, tmp_path, flags, words, where):
    """By default IPUs are attached when the program is executed; no public source has the driver's text for it."""
    flags = "--global-batch-size none --num-epochs 1 --lr-schedule const --learning-rate 0.01 " + flags
    flags = [*flags.split(), "--optimizer", "sgd", "--optimizer-params", '{"momentum": 0.9}']
    off = [] if words == "--no-optimizer-state-offloading" else ["--no-optimizer-state-offloading"]
    off += ["--no-on-demand"] if where == "in compiling" else []
    command = ["train", "lenet", "--dataset", "digits", *SMALL, *flags, *off, "--run-dir", tmp_path / "run"]
    with installed(remote_memory=False, gc_info=where == "by gc-info"):
        code, _, err = run(*command, columns=2000)
    hint = err.split("hint:")[1]
    if where == "in loading":
        assert code == 6 and "could not load the program" in err and "remote buffers supported: 0" in hint
        assert words in hint and "Traceback" not in err
        return
    assert code == 2 and "no remote memory" in err and words in hint, err
    assert re.search(r": the fullest IPU is then predicted to hold \d+ MiB of its 89\d MiB$", hint.strip()), (
        hint
    )
    assert "Traceback" not in err and not (tmp_path / "run").exists()
    if where == "in compiling":
        return
    with installed(remote_memory=False):
        assert run(*command, words)[0] == 0


@pytest.mark.slow
@pytest.mark.slow_cases("on the ipus-one of eight", "sdk-an empty replica", "sdk-one of eight")
@pytest.mark.parametrize("real", [9, 8], ids=["one of eight", "an empty replica"])
@pytest.mark.parametrize("more", [[], ["--accelerator-side-reduction"]], ids=["sdk", "on the ipus"])
def test_figures_of_replicas_with_unequal_padding(run, tmp_path, real, more):
    """Loss and accuracy of an execution are over its samples, whichever replica had them."""
    flags = ["--dataset", "digits", "--limit-train", 16 + real, "--limit-eval", 8, "--micro-batch-size", 8]
    flags += ["--global-batch-size", 16, "--num-replicas", 2, "--pad-dataset", "--num-epochs", 2, "--seed", 1]
    figures = []
    for device, only in (("cpu", []), ("ipu", more)):
        folder = tmp_path / device
        with installed():
            assert run("train", "lenet", *flags, "--device", device, "--run-dir", folder, *only)[0] == 0
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        figures.append([(row["loss"], row["accuracy"]) for row in rows if row["event"] == "execution"])
    np.testing.assert_allclose(figures[1], figures[0], rtol=0, atol=1e-6)
