"""Every command on the test double of the SDK, with the default --device auto."""

import json
import re
import shlex

import numpy as np
import pytest
from poplar_double import installed

from ipucnn import cli
from ipucnn.planning.settings import PlanSettings
from ipucnn.sessions.session import NotFiniteError
from ipucnn.training.checkpoints import load_checkpoint

SMALL = ["--limit-train", "64", "--limit-eval", "32", "--micro-batch-size", "4", "--seed", "3"]
FEW = ["--limit-train", "8", "--limit-eval", "4", "--num-epochs", "1", "--micro-batch-size", "4"]


def run(capfd, *args):
    """Returns (exit code, stdout, stderr) of a command."""
    code = cli.run([str(a) for a in args])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def train(capfd, run_dir, *more):
    rate = ["--lr-schedule", "const", "--learning-rate", 0.01]  # independent of the number of epochs
    args = ["train", "toy_model", "--run-dir", run_dir, *SMALL, *rate, "--num-epochs", 2, "--json", *more]
    code, out, err = run(capfd, *args)
    assert code == 0, err
    return json.loads(out), err


def test_train_evaluate_infer_resume_and_exchange_with_the_host(capfd, folder, monkeypatch):
    cache = folder / "cache"
    same = ("--executable-cache", cache, "--num-replicas", 2, "--eight-bit-transfer")
    with installed() as machine:
        report, err = train(capfd, folder / "ipu", *same)
        assert machine.calls("fit") and machine.calls("predict")
        assert machine.config["ipus"] == 2
    assert report["compilation"]["device"]["kind"] == "ipu"
    assert not report["compilation"]["cached"]
    assert "Compiling module" not in err and "[" not in err.split("run folder")[0]
    with installed(num_ipus=1):  # one IPU is enough to infer with a run of two
        code, out, err = run(capfd, "infer", folder / "ipu", "--split", "eval", "--limit-eval", 2, "--json")
        assert code == 0, err
        code, out, err = run(capfd, "evaluate", folder / "ipu", "--validation-num-replicas", 3)
        assert code == 2 and "hint: use 2 or 4 IPUs: --validation-num-replicas" in err
        code, out, err = run(capfd, "evaluate", folder / "ipu")
        assert code == 6 and "--validation-num-replicas" in err
    # Half of the run, then the rest on IPUs again: the same bytes.  The same program comes from the cache.
    for more in (("--num-epochs", 1), ("--resume",)):
        with installed():
            report_of_half, _ = train(capfd, folder / "half", *same, *more)
        assert report_of_half["compilation"]["cached"]
    first, second = (load_checkpoint(folder / n / "checkpoints" / "last.npz") for n in ("ipu", "half"))
    for name, value in first.weights.items():
        assert np.array_equal(value, second.weights[name]), name
    # Trained on IPUs, evaluated on IPUs and on the host
    with installed():
        code, out, err = run(capfd, "evaluate", folder / "ipu", "--json")
        assert code == 0, err
        on_ipus = json.loads(out)
        code, out, _ = run(capfd, "infer", folder / "ipu", "--split", "eval", "--limit-eval", 4, "--json")
        assert code == 0
    assert on_ipus["device"] == "ipu"
    code, out, _ = run(capfd, "evaluate", folder / "ipu", "--json", "--device", "cpu")
    on_host = json.loads(out)
    assert on_host["device"] == "cpu"
    assert on_host["measured"]["samples"] == on_ipus["measured"]["samples"] == 32
    # The images were resized on the host; on their way to the IPUs they were rounded to 8 bits.
    assert on_host["measured"]["loss"] == pytest.approx(on_ipus["measured"]["loss"], abs=1e-3)
    # The reverse: trained on the host, continued on IPUs.
    train(capfd, folder / "host", "--num-epochs", 1, "--device", "cpu")
    with installed():
        continued, _ = train(capfd, folder / "host", "--resume", "--device", "auto")
    assert continued["compilation"]["device"]["kind"] == "ipu"
    assert load_checkpoint(folder / "host" / "checkpoints" / "last.npz").meta["weight_updates"] == 32


@pytest.mark.slow
def test_a_run_of_16_bits_is_evaluated_and_continued_on_the_host(capfd, folder):
    run_dir = folder / "half"
    with installed():
        report, _ = train(capfd, run_dir, "--precision", "16.16", "--num-epochs", 1, "--overwrite")
    code, out, err = run(capfd, "evaluate", run_dir, "--json", "--device", "cpu")
    assert code == 0, err
    half = json.loads(out)["measured"]["loss"]
    assert half == pytest.approx(report["validation"]["loss"], rel=0.01)
    # It uses 32 bits only on request.
    code, out, err = run(capfd, "evaluate", run_dir, "--json", "--device", "cpu", "--precision", "32.32")
    assert code == 0 and json.loads(out)["measured"]["loss"] != half, err
    code, _, err = run(capfd, "train", "--resume", "--run-dir", run_dir, "--num-epochs", 2, "--device", "cpu")
    assert code == 0, err
    weights = load_checkpoint(run_dir / "checkpoints" / "last.npz").weights
    assert all(np.array_equal(w, w.astype(np.float16)) for w in weights.values())


@pytest.mark.slow_cases("network1")
@pytest.mark.parametrize("network", [[], ["--ipus-per-replica", 2, "--pipeline-splits", "auto"]])
def test_training_uses_the_cache_that_compile_only_filled(capfd, tmp_path, network):
    flags = ["train", "toy_model_bn", *SMALL, "--num-epochs", 1, *network]
    flags += [
        "--precise-batch-norm",
        0,
        "--executable-cache",
        tmp_path / "cache",
        "--run-dir",
        tmp_path / "run",
    ]
    with installed(num_ipus=0) as machine:  # without IPUs
        code, out, err = run(capfd, *flags, "--compile-only", "--json")
        assert code == 0, err
        kinds = [key[1] for key in machine.programs]
        assert kinds == (["fit", "predict", "predict"] if network else ["fit", "predict"])
        machine.programs.clear()
    report = json.loads(out)
    assert report["compiled_only"] and report["executable_cache"] == str(tmp_path / "cache")
    assert report["compilation"]["compile_s"] > 0 and not report["compilation"]["cached"]
    assert not (tmp_path / "run").exists()
    compiled = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert len(compiled) == len(kinds)
    with installed(num_ipus=0):
        code, out, err = run(capfd, *flags, "--compile-only")
    assert code == 0 and "all programs were there already" in out and str(tmp_path / "cache") in out
    code, out, err = run(capfd, *flags, "--compile-only", "--device", "cpu")
    assert (
        (code, out) == (2, "")
        and "has no effect with --device cpu" in err
        and not (tmp_path / "run").exists()
    )


def test_cache_name_may_contain_a_blank(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*FEW, "--executable-cache", "my cache"]
    with installed():
        train(capfd, tmp_path / "run", *flags)
    programs = list((tmp_path / "my cache").iterdir())
    assert len(programs) == 2 and all(path.suffix == ".poplar_exec" for path in programs)
    assert not (tmp_path / "my").exists()
    with installed():
        code, out, err = run(
            capfd, "train", "toy_model", *SMALL, *flags, "--run-dir", "b", "--compile-only", "--json"
        )
    assert code == 0 and json.loads(out)["executable_cache"] == str(tmp_path / "my cache"), err


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_imported(capfd, folder, tmp_path):
    with installed():
        train(capfd, folder / "cached", *FEW)
    file = tmp_path / "file"
    file.write_text("")
    new = ["train", "toy_model", "--run-dir", tmp_path / "run", *SMALL]
    for cache in ("/proc/nope/x", file, file / "below"):
        for command in (new, [*new, "--compile-only"], ["evaluate", folder / "cached"]):
            with installed() as machine:
                code, out, err = run(capfd, *command, "--executable-cache", cache)
                assert machine.log == []
            assert (code, out) == (3, ""), err
            assert err.count("error: ") == err.count("hint: ") == 1 and "Traceback" not in err, err
            assert f"{cache} cannot be made: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_unwritable_cache_from_the_environment_is_refused(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--executable_cache_path='/proc/a b'")
    with installed():
        code, _, err = run(capfd, "train", "toy_model", "--run-dir", tmp_path / "run", *SMALL)
    assert code == 3 and "/proc/a b cannot be made" in err
    assert list(tmp_path.iterdir()) == []


def test_run_without_results_leaves_the_folder_as_it_was(capfd, tmp_path):
    command = ["train", "toy_model", *SMALL, *FEW, "--run-dir", tmp_path / "run"]
    # An existing folder stays, with the files of others.
    (tmp_path / "run").mkdir()
    with installed(busy=True):
        assert run(capfd, *command)[0] == 6
    assert list(tmp_path.iterdir()) == [tmp_path / "run"] and list((tmp_path / "run").iterdir()) == []
    with installed():
        code, _, err = run(capfd, *command, "--micro-batch-size", 2)
    assert code == 0, err
    # A run with results keeps them.
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with installed(busy=True):
        assert run(capfd, *command, "--micro-batch-size", 2, "--resume", "--num-epochs", 2)[0] == 6
    after = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    assert set(before) - set(after) <= {"report.json", "report.html"} and "last.npz" in after


def test_immediate_non_finite_loss_leaves_no_folder(capfd, tmp_path):
    few = [*FEW, "--learning-rate", 1e30, "--lr-schedule", "const", "--run-dir", tmp_path / "run"]
    for device in ("cpu", "ipu"):
        with installed():
            code, _, err = run(capfd, "train", "toy_model", *SMALL, *few, "--device", device)
        assert code == NotFiniteError("", "").exit_code and "loss became" in err, err
        assert list(tmp_path.iterdir()) == [], err


def test_sdk_errors_become_command_errors_and_leave_no_folder(capfd, tmp_path):
    cases = [
        (dict(num_ipus=0), [], 6, "no IPU is visible"),
        (dict(num_ipus=1), ["--num-replicas", 2], 6, "no device of 2 IPUs"),
        (dict(busy=True), ["--no-on-demand"], 6, "no free device"),
        (dict(tile_bytes=100), [], 4, "does not fit in the memory of an IPU"),
        (dict(tile_bytes=100), ["--checkpoint-dir", tmp_path / "checkpoints"], 4, "does not fit"),
        (dict(busy=True), [], 6, "no IPUs became free"),
        (dict(), ["--num-replicas", 3], 2, "2 or 4 IPUs"),
        (dict(), ["--compile-only"], 2, "--executable-cache"),
        (dict(), ["--matmul-options", '{"partialsType": "double"}'], 2, "Poplar refuses an option"),
    ]
    for facts, flags, code, text in cases:
        with installed(**facts):
            exit_code, out, err = run(
                capfd, "train", "toy_model", "--run-dir", tmp_path / "run", *SMALL, *flags
            )
        assert (exit_code, out, list(tmp_path.iterdir())) == (code, "", []), (flags, err)
        assert text in err and "hint:" in err and "Traceback" not in err, err


@pytest.mark.parametrize("count", [1, 2])
def test_optimizer_state_is_offloaded_if_the_planner_says_so(capfd, folder, count):
    args = ["--run-dir", folder / f"offload{count}", *FEW, "--gradient-accumulation-count", count]
    with installed() as machine:
        code, _, err = run(capfd, "train", "toy_model", *args)
    assert code == 0, err
    calls = machine.calls("set_gradient_accumulation_options")
    offloaded = [call["keywords"]["offload_weight_update_variables"] for call in calls]
    planned = PlanSettings(gradient_accumulation_count=count, optimizer_state_offloading=True)
    assert any(offloaded) == planned.offloads_optimizer_state == (count > 1)


def test_test_double_is_removed_completely():
    import sys

    from tensorflow import keras

    with installed():
        assert keras.ipu
    assert not hasattr(keras, "ipu") and "tensorflow.python.ipu" not in sys.modules
    model = keras.Sequential([keras.layers.Dense(1)])
    assert not hasattr(model, "set_pipelining_options")


@pytest.mark.parametrize(
    ("around", "flags", "code", "text", "hint"),
    [
        ({"python": (3, 10)}, "", 6, "Python 3.10, but", "python3.8 -m venv"),
        ({"variables": {"POPLAR_SDK_ENABLED": None}}, "", 6, "not enabled in this shell", "source"),
        ({}, "--use_modle", 2, "knows no --use_modle", "use_ipu_model"),
        ({"has_keras_ipu": False}, "", 6, "it has no keras.ipu", "--force-reinstall"),
    ],
)
def test_unusable_environments_are_refused(capfd, tmp_path, monkeypatch, around, flags, code, text, hint):
    monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
    monkeypatch.chdir(tmp_path)
    commands = (
        ["train", "toy_model", "--run-dir", tmp_path / "run", *SMALL],
        ["benchmark", "toy_model", "--host-generated-data"],
        ["train", "toy_model", "--run-dir", tmp_path / "run", *SMALL, "--device", "ipu"],
    )
    with installed(surroundings=around) as machine:
        for command in commands:
            exit_code, out, err = run(capfd, *command)
            assert (exit_code, out) == (code, ""), err
            error, advice = err.strip().splitlines()
            assert error.startswith("error: ") and text in error
            assert advice.startswith("hint: ") and hint in advice
        assert machine.log == []
        # The host needs none of these.
        assert run(capfd, "train", "toy_model", "--device", "cpu", "--print-config")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_doubtful_environments_are_reported(capfd, folder):
    around = {"versions": {"numpy": "1.21.6"}}
    warning = "warning: numpy 1.21.6 is installed; the Poplar SDK was made for numpy 1.19: "
    with installed(surroundings=around):
        code, _, err = run(capfd, "train", "toy_model", "--run-dir", folder / "doubtful", *FEW)
        assert code == 0, err
        assert sum(line.startswith(warning) for line in err.splitlines()) == 1
        for command in (["evaluate", folder / "doubtful"], ["infer", folder / "doubtful", "--split", "eval"]):
            code, _, err = run(capfd, *command)
            assert code == 0 and err.count(warning) == 1, err
    assert "numpy 1.21" not in run(capfd, "evaluate", folder / "doubtful", "--device", "cpu")[2]


def test_prediction_out_of_memory_hints_at_a_fit(short_benchmarks, capfd, folder, monkeypatch):
    run_dir = folder / "memory"
    train(capfd, run_dir, "--num-epochs", 1, "--pad-dataset")
    weights = load_checkpoint(run_dir / "checkpoints" / "last.npz").weights
    run_bytes = 4 * sum(value.size for value in weights.values()) - 1
    network_bytes = 66_472 - 1  # of the published toy_model
    monkeypatch.chdir(folder)
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
            code, _, err = run(capfd, *command)
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
def test_a_selected_device_of_another_size_is_refused(capfd, tmp_path, flags, device, has, needs):
    """gc-info -l numbers the devices of 16 IPUs: 0 to 15 are single ones, 16 to 23 pairs, then fours."""
    args = ["train", "toy_model", "--run-dir", tmp_path / "run", *SMALL, *flags, "--select-ipu", device]
    with installed(num_ipus=16) as machine:
        code, out, err = run(capfd, *args, "--gradient-accumulation-count", 4)
        assert not machine.calls("fit")
    assert (code, out) == (2, "")
    assert (
        f"--select-ipu {device}: that device has {has} IPU{'s' if has > 1 else ''}, and {needs} are needed"
        in err
    )
    assert f"a device of {needs} from gc-info -l" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_selected_device_of_the_right_size_is_taken(capfd, folder):
    args = ["--run-dir", folder / "selected", *FEW, "--num-replicas", 2, "--select-ipu", 17]
    with installed(num_ipus=16) as machine:
        code, _, err = run(capfd, "train", "toy_model", *args)
        assert code == 0, err
        assert machine.config["ipus"] == 2
    # Evaluation needs one IPU, not the pair.
    with installed(num_ipus=16) as machine:
        code, _, err = run(capfd, "evaluate", folder / "selected", "--validation-num-replicas", 1)
        assert code == 0, err
        assert machine.config["ipus"] == 1


@pytest.mark.slow_cases("--training")
@pytest.mark.parametrize("mode", ["--inference", "--training"])
def test_benchmarks_count_all_replicas_whoever_generates_the_data(
    short_benchmarks, capfd, tmp_path, monkeypatch, mode
):
    """For data of the device, the SDK's predict returns zeros of one replica only; all replicas computed."""
    monkeypatch.chdir(tmp_path)
    flags = "--micro-batch-size 4 --steps-per-execution 2 --seed 1 --min-time 0 --executions 3 --json"
    for replicas, data in ((1, "--host-generated-data"), (2, "--device-generated-data")):
        with installed():
            words = ["benchmark", "lenet", mode, data, *flags.split(), "--num-replicas", replicas]
            code, out, err = run(capfd, *words)
        assert code == 0, err
        report = json.loads(out)
        assert report["device"]["kind"] == "ipu" and report["device"]["num_cores"] == 1472 * replicas
        assert report["measured"]["matmul_peak"] is None and report["measured"]["images_per_s"]["value"] > 0
        assert report["execution"]["samples"] == 4 * report["execution"]["micro_batches"]


IN_STAGES = "--pipeline-splits conv3 --gradient-accumulation-count 4"


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
        (IN_STAGES + " --offload-activations", "--offload-activations"),
        (IN_STAGES + " --offload-gradient-accumulation-buffers", "--offload-gradient-accumulation-buffers"),
    ],
    ids=["state", "activations", "gradients"],
)
@pytest.mark.parametrize("where", ["by gc-info", "in compiling", "in loading"])
def test_system_without_remote_memory_refuses_offloading(capfd, tmp_path, flags, words, where):
    """By default IPUs are attached when the program is executed; no public source has the driver's text for it."""
    flags = "--global-batch-size none --num-epochs 1 --lr-schedule const --learning-rate 0.01 " + flags
    flags = [*flags.split(), "--optimizer", "sgd", "--optimizer-params", '{"momentum": 0.9}']
    off = [] if words.startswith("--no") else ["--no-optimizer-state-offloading"]
    off += ["--no-on-demand"] if where == "in compiling" else []
    command = ["train", "lenet", "--dataset", "digits", *SMALL, *flags, *off, "--run-dir", tmp_path / "run"]
    with installed(remote_memory=False, gc_info=where == "by gc-info"):
        code, _, err = run(capfd, *command)
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
    fixed = [*command, words] if words.startswith("--no") else [c for c in command if c != words]
    with installed(remote_memory=False):
        assert run(capfd, *fixed)[0] == 0


@pytest.mark.slow_cases("on the ipus-one of eight", "sdk-an empty replica", "sdk-one of eight")
@pytest.mark.parametrize("real", [9, 8], ids=["one of eight", "an empty replica"])
@pytest.mark.parametrize("more", [[], ["--accelerator-side-reduction"]], ids=["sdk", "on the ipus"])
def test_figures_of_replicas_with_unequal_padding(capfd, tmp_path, real, more):
    """Loss and accuracy of an execution are over its samples, whichever replica had them."""
    flags = ["--dataset", "digits", "--limit-train", 16 + real, "--limit-eval", 8, "--micro-batch-size", 8]
    flags += ["--global-batch-size", 16, "--num-replicas", 2, "--pad-dataset", "--num-epochs", 2, "--seed", 1]
    figures = []
    for device in ("cpu", "ipu"):
        folder = tmp_path / device
        device_flags = ["--device", device, "--run-dir", folder, *(more if device == "ipu" else [])]
        with installed():
            assert run(capfd, "train", "lenet", *flags, *device_flags)[0] == 0
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        figures.append([(row["loss"], row["accuracy"]) for row in rows if row["event"] == "execution"])
    np.testing.assert_allclose(figures[1], figures[0], rtol=0, atol=1e-6)
