"""Users' own networks wherever registered ones work: on IPUs, among workers, in folds, from Python, after a kill."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from poplar_double import installed
from support.data_sets import write_class_folders
from support.own_networks import (
    CLASSES,
    MIXING,
    NESTED,
    OWN_DATA,
    RESIDUAL,
    TRAIN,
    assert_equal,
    last,
    network,
    write,
)
from support.refusals import Refusal, check_raises, check_refused
from support.workers import assert_same, launch, needs_mpi
from tensorflow import keras

import ipucnn
from ipucnn.benchmarking.keras_fit import fit
from ipucnn.compat import KERAS_3
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.interrupts import Interrupted
from ipucnn.machine import num_cores
from ipucnn.python_files import find_function
from ipucnn.runs.train import TrainingRun

SHORT = ("--dataset", "digits", *TRAIN)
SMALL_NETWORK = network(
    "x = layers.ReLU()(layers.Conv2D(4, 3, strides=16, use_bias=False)(images))",
    "x = layers.GlobalAveragePooling2D()(x)",
)
pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, split",
    [
        (MIXING, "centre"),
        pytest.param(NESTED, "concatenate", marks=pytest.mark.slow),
        pytest.param(RESIDUAL, "depthwise_conv2d", marks=pytest.mark.slow),
    ],
    ids=["mixing", "nested", "residual"],
)
def test_ipu_pipeline_trains_the_weights_of_the_host(text, split, succeeds):
    short = [word for word in SHORT if word not in ("--global-batch-size", 16)]
    more = ["--num-epochs", 1, "--no-validation", "--gradient-accumulation-count", 4]
    train = ("train", write(text), *short, *more)
    with installed(num_ipus=4) as machine:
        succeeds(*train, "--pipeline-splits", split, "--run-dir", "ipu")
        assert machine.config["ipus"] == 2
    _, err = succeeds(*train, "--pipeline-splits", split, "--run-dir", "host", "--device", "cpu")
    ipu, host = last("ipu").weights, last("host").weights
    assert list(ipu) == list(host)
    for name in host:
        np.testing.assert_allclose(ipu[name], host[name], rtol=2e-3, atol=2e-5, err_msg=name)
    assert text != MIXING or "one by one" in err


@pytest.mark.slow
def test_dry_run_refuses_exactly_what_the_run_refuses(run, succeeds):
    train = ("train", write(MIXING), *SHORT, "--dry-run")
    auto = ("--pipeline-splits", "auto", "--ipus-per-replica", 2)
    for more in ((), ("--pipeline-splits", "centre"), auto):
        _, err = succeeds(*train, *more)
        assert "nothing was trained" in err
    check_refused(run, Refusal([*train, "--pipeline-splits", "middle"], "middle"))


@pytest.mark.slow
def test_keras_file_works_wherever_a_function_does(lightly, succeeds, report):
    if int(keras.__version__.split(".")[0]) < 3:
        pytest.skip("Keras 2.6 writes no .keras files")
    find_function(write(NESTED), "build")((8, 8, 1), 10).save("net.keras")
    succeeds("train", "net.keras", *SHORT, "--weights", "net.keras", "--kfold", 2, "--run-dir", "folds")
    assert last("folds/fold-2").meta["network"]["name"] == "net.keras"
    assert ipucnn.load("folds/fold-1").predict(np.zeros((8, 8), np.uint8)).shape == (1, 10)
    fine = ("--weights", "folds/fold-1", "--freeze", "base*", "--num-epochs", 1)
    _, err = succeeds("train", "net.keras", *SHORT, *fine, "--run-dir", "fine")
    assert "layers frozen: base_" in " ".join(err.split())
    Path("net.keras").unlink()
    succeeds("train", "--resume", "--run-dir", "fine", "--num-epochs", 2)
    assert not any(slot.startswith("base_") for slot in last("fine").slots)
    with installed(num_ipus=1) as machine:
        assert report("evaluate", "fine")["device"] == "ipu" and machine.calls("predict")


def printed(out, what):
    """Returns the words of a command printed after ``what``, without the program's name."""
    return shlex.split(next(line for line in out.splitlines() if what in line).split(what, 1)[1])[1:]


@pytest.mark.slow
def test_printed_commands_continue_with_own_files(lightly, run, succeeds, monkeypatch):
    """After a signal, after the run, and if the network's file was moved meanwhile."""
    name, data = write(MIXING, "mine.py"), write(OWN_DATA, "data.py").replace("build", "load")
    with pytest.raises(Interrupted) as ended:
        for event in ipucnn.train(name, dataset=data, num_epochs=50, micro_batch_size=4, run_dir="a run"):
            if type(event).__name__ == "ExecutionFinished":
                os.kill(os.getpid(), signal.SIGTERM)
    words = shlex.split(ended.value.hint.split(": ", 1)[1])
    succeeds(*words[1:], "--num-epochs", 51)
    assert words[:2] == ["ipucnn", "train"]
    Path("moved").mkdir()
    monkeypatch.chdir("moved")
    evaluate = ("evaluate", "../a run", "--dataset", f"../{data}")
    code, out, err = run(*evaluate)
    assert code == 2 and printed(err, "if you trust it, ") == ["--model-name", "../mine.py:build"]
    succeeds(*evaluate, *printed(err, "if you trust it, "))
    monkeypatch.chdir("..")
    Path("mine.py").rename("moved/mine.py")
    resume = ("train", "--resume", "--run-dir", "a run", "--num-epochs", 52)
    out, _ = succeeds(*resume, "--dataset", data, "--model-name", "moved/mine.py:build")
    out, _ = succeeds(*printed(out, "evaluate it: "))
    assert "accuracy" in out


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("text", [MIXING, RESIDUAL], ids=["mixing", "residual"])
def test_two_workers_have_the_bytes_of_one(text, succeeds, tmp_path):
    name = write(text)
    # The workers would divide the cores, and sums have another order on another number of threads.
    short = (*SHORT, "--threads", num_cores())
    ended = launch(tmp_path, name, *short, "--run-dir", "two")
    assert ended.returncode == 0, ended.stderr
    succeeds("train", name, *short, "--max-workers", 2, "--run-dir", "one")
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("text, words", [(MIXING, ("--model-name", "moved/folds.py:build")), (RESIDUAL, ())])
def test_folds_train_and_continue_the_own_network(lightly, run, succeeds, text, words):
    train = ("train", write(text, "folds.py"), *SHORT, "--kfold", 2, "--run-dir")
    out, _ = succeeds(*train, "whole")
    out, _ = succeeds(*printed(out, "evaluate one: "))
    assert "accuracy" in out
    succeeds(*train, "a cut", "--fold", 1)
    Path("moved").mkdir()
    Path("folds.py").rename("moved/folds.py")
    if words:
        code, out, err = run("train", "--resume", "--run-dir", "a cut")
        assert code == 2 and printed(err, "if you trust it, ") == ["--model-name", "folds.py:build"]
    succeeds("train", "--resume", "--run-dir", "a cut", *words)
    for fold in ("fold-1", "fold-2"):
        assert (
            last(f"a cut/{fold}").meta["network"]["layers"] == last(f"whole/{fold}").meta["network"]["layers"]
        )
        assert_equal(f"whole/{fold}", f"a cut/{fold}")


@pytest.mark.slow
@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_frozen_layers_stay_frozen_after_a_kill(really, succeeds, request):
    if not really:
        request.getfixturevalue("lightly")
    name = write(NESTED, "frozen.py")
    succeeds("train", name, *SHORT, "--run-dir", "first")
    fine = (*SHORT, "--weights", "first", "--freeze", "base*", "--optimizer-params", '{"momentum": 0.9}')
    _, err = succeeds("train", name, *fine, "--run-dir", "whole")
    # A layer frozen by the network itself counts as frozen, too.
    assert "layers frozen: base_" in " ".join(err.split())
    flags = dict(zip([word[2:].replace("-", "_") for word in fine[::2]], map(str, fine[1::2])))
    events = TrainingRun(resolve("train", {**flags, "run_dir": "cut"}, model=name)).events()
    for event in events:
        if type(event).__name__ == "CheckpointSaved":
            break
    next(events)
    events.close()  # nothing more runs, as after SIGKILL
    Path("frozen.py").unlink()
    succeeds("train", "--resume", "--run-dir", "cut")
    assert_equal("whole", "cut")
    before, after = last("first").weights, last("cut").weights
    assert not any(slot.startswith(("base_", "frozen/")) for slot in last("cut").slots)
    if really:
        kept = [weight for weight in after if np.array_equal(after[weight], before[weight])]
        assert kept == [weight for weight in after if weight.startswith(("base_", "frozen/"))]


@pytest.mark.slow
def test_python_api_trains_plans_and_loads_the_own_network(lightly):
    name = write(MIXING, "mine.py")
    training = ipucnn.train(
        name, dataset="digits", limit_train=64, num_epochs=1, micro_batch_size=4, global_batch_size=16, seed=1,
        learning_rate=0.05, run_dir="run",
    )  # fmt: skip
    assert "Validated" in [type(event).__name__ for event in training]
    error = check_raises(ConfigurationError, "centre", "", ipucnn.load, "run")
    assert error.hint == "if you trust it, add model='mine.py:build'"
    loaded = ipucnn.load("run", model=name)
    assert loaded.predict(np.zeros((2, 8, 8, 1), np.uint8)).shape == (2, 10)
    assert any(layer.name == "centre" for layer in loaded.keras_model.layers)
    plan = ipucnn.plan(name, stages=2, dataset="digits", micro_batch_size=4)
    assert plan.verdict == "fits" and any(
        "no model of" in text and "an estimate: centre" in text for text in plan.assumed
    )
    plan = ipucnn.plan(write(RESIDUAL, "known.py"), stages=2, dataset="digits", micro_batch_size=4)
    assert len(plan.splits) == 1 and plan.verdict == "fits" and "no model of" not in str(plan.assumed)


def test_a_plan_of_a_network_that_has_changed_is_said_to_be_of_another(run, succeeds):
    name = write(SMALL_NETWORK)
    size = ("--dataset", "digits", "--micro-batch-size", 4, "--gradient-accumulation-count", 4)
    succeeds("plan-splits", name, "--stages", 2, *size, "--save", "plan.yml")
    plan = ("train", name, "--plan", "plan.yml", *size, "--dry-run", "--json")
    given = json.loads(succeeds(*plan)[0])["program"]["splits_from"]
    assert given == "plan plan.yml"
    write(SMALL_NETWORK.replace("layers.Conv2D(4,", "layers.Conv2D(6,"))
    given = json.loads(succeeds(*plan)[0])["program"]["splits_from"]
    weights = yaml.safe_load(Path("plan.yml").read_text())["stages"]
    count = sum(stage["num_parameters"] for stage in weights)
    assert f"which was made for a network of {count:,} weights" in given and "isn't this run" in given
    typed = json.loads(succeeds(*plan, "--pipeline-splits", "re_lu")[0])["program"]["splits_from"]
    assert typed == "given"


def test_splits_of_a_network_with_own_layers_are_marked_as_estimated(lightly, succeeds):
    auto = ("--pipeline-splits", "auto", "--ipus-per-replica", 2, "--gradient-accumulation-count", 4)
    train = tuple(word for word in SHORT if word not in ("--global-batch-size", 16))
    out, err = succeeds("train", write(MIXING), *train, *auto, "--run-dir", "planned")
    assert "ipucnn evaluate planned --model-name net.py:build\n" in out
    assert "weights, an estimate: centre" in " ".join(err.split())
    program = json.loads(Path("planned/program.json").read_text())
    assert len(program["pipeline_splits"]) == 1


ESTIMATE = "net.py:build: its number of MACs is an estimate: "


@pytest.mark.slow
def test_commands_that_show_estimated_macs_say_so(lightly, succeeds):
    name = write(MIXING)
    _, err = succeeds("train", name, *SHORT, "--run-dir", "run", columns=4000)
    assert f"note: {ESTIMATE}" in err and "of the output (centre)" in err
    notes = json.loads(Path("run/report.json").read_text())["notes"]
    assert [note for note in notes if ESTIMATE in note]
    summary = ("models", name, "--summary", "--dataset", "digits")
    out, err = succeeds(*summary, columns=4000)
    assert f"note: {ESTIMATE}" in err and "MACs per image" in out
    # The weights of these are counted as those of the classes that they extend, or there are none.
    write(CLASSES)
    assert ESTIMATE not in succeeds(*summary, columns=4000)[1]


@pytest.mark.slow
def test_benchmarks_and_fit_say_that_macs_are_estimated(short_benchmarks, report):
    size = {"dataset": "digits", "micro_batch_size": 8, "num_epochs": 2, "limit_train": 64}
    flags = ("--dataset", "digits", "--micro-batch-size", 8, "--inference", "--max-time", 1)
    measured = report("benchmark", write(MIXING), *flags)
    assert measured["measured"]["flop_per_s"] and [note for note in measured["notes"] if ESTIMATE in note]
    fitted = fit(resolve("train", size, model="net.py:build"))
    assert fitted.macs_per_image and [note for note in fitted.notes if ESTIMATE in note]


CENTRED = """
from tensorflow import keras
from tensorflow.keras import layers


class Centred(layers.Layer):
    def call(self, x):
        return x - keras.backend.mean(x, axis=0, keepdims=True)


def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    return keras.Model(images, layers.Dense(num_classes)(Centred()(layers.Flatten()(images))))
""".replace("keras.backend.mean", "keras.ops.mean" if KERAS_3 else "keras.backend.mean")


@pytest.mark.slow
def test_layers_that_mix_samples_are_evaluated_by_micro_batches(report):
    data, name = write(OWN_DATA, "data.py").replace("build", "load"), write(CENTRED)
    given = ("--dataset", data)
    size = ("--num-epochs", 1, "--seed", 1, "--micro-batch-size", 4, "--normalise", "unit")
    report("train", name, *given, *size, "--run-dir", "centred")
    kernel, bias = sorted(last("centred").weights.values(), key=np.ndim, reverse=True)
    _, (images, labels) = find_function(data, "load")()
    for size in (1, 2, 8):
        batches = images.reshape(64 // size, size, -1) / 255
        logits = (batches - batches.mean(axis=1, keepdims=True)).reshape(64, -1) @ kernel + bias
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        micro_batches = ("--model-name", name, "--validation-micro-batch-size", size)
        loss = report("evaluate", "centred", *given, *micro_batches)["measured"]["loss"]
        assert loss == pytest.approx(-np.log(shares[np.arange(64), labels]).mean(), rel=1e-4), size
    alone = np.exp(bias) / np.exp(bias).sum()  # an image is its own mean
    predicted = ipucnn.load("centred", model=name).predict(images[:3])
    np.testing.assert_allclose(predicted, np.tile(alone, (3, 1)), rtol=1e-5)
    Image.fromarray(images[0]).save("a.png"), Image.fromarray(images[1]).save("b.png")
    inferred = report("infer", "centred", "a.png", "b.png", "--model-name", name)
    assert any("computed alone" in note for note in inferred["notes"])
    found = [one["predictions"][0]["probability"] for one in inferred["results"]]
    assert found == [pytest.approx(alone.max())] * 2


PRODUCT = """
class {0}(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(64, 256))
        super().build(shape)

    def call(self, x):
        return tf.reshape(x, (-1, 64)) @ self.w


def build(input_shape"""


def test_a_class_that_is_called_flatten_is_planned_as_one_of_its_own(report):
    """A matrix product, whose multiplications are counted by its weights."""
    plans = []
    for name in ("Flatten", "Mix"):
        text = network(f"x = {name}()(images)").replace("def build(input_shape", PRODUCT.format(name), 1)
        size = ("--dataset", "digits", "--stages", 2, "--micro-batch-size", 16)
        plans.append(report("plan-splits", write(text), *size)["predicted_images_per_s"])
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_assumptions_without_a_data_set_are_printed_before_the_build(short_benchmarks, run, succeeds):
    name = write(SMALL_NETWORK)
    both = f"{name}: images of 224x224x3 and 1,000 classes are assumed; --dataset NAME"
    small = ("--inference", "--image-size", 32, "--executions", 3, "--min-time", 0, "--max-time", 30)
    _, err = succeeds("benchmark", name, "--synthetic-data", "host", *small, columns=400)
    assert f"{name}: 1,000 classes are assumed; --dataset NAME" in err, err
    _, err = succeeds("models", name, "--summary", columns=400)
    assert both in err
    # A plan names them once, among all that it assumes; typed values are not assumed.
    images, classes = "input 224x224x3, as no data set is named", "1,000 classes, as no data set is named"
    channels = "3 channels, as planning looks at no files (grey images: --dataset digits)"
    for typed, left in (
        ((), {images, classes}),
        (("--classes", 5), {images}),
        (("--image-size", 32), {classes, channels}),
        (("--dataset", "digits"), set()),
        (("--dataset", "digits", "--image-size", 32), set()),
        (("--image-size", 32, "--classes", 5), {channels}),
    ):
        out, err = succeeds("plan-splits", name, "--stages", 2, *typed, "--json", columns=400)
        assumed = json.loads(out)["assumed"]
        assert "assumed" not in err and {images, classes, channels} & set(assumed) == left, (typed, assumed)
        assert {"micro-batch 1", "optimizer sgd", "1 replica"} <= set(assumed)


def pictures(folder, size):
    write_class_folders(Path(folder), {(".", "a"): 4, (".", "b"): 4}, lambda number: (size, size))


@pytest.mark.slow
def test_much_larger_inputs_than_pictures_or_first_weights_cause_a_warning(lightly, succeeds):
    pictures("small", 32)
    pictures("large", 120)
    name = write(NESTED)
    train = ("train", name, "--num-epochs", 1, "--micro-batch-size", 2, "--dataset")

    def warnings(*words):
        _, err = succeeds(*train, *words, columns=400)
        return [line for line in err.splitlines() if "warning" in line and "--image-size" in line]

    (line,) = warnings("small", "--dry-run")
    assert "of 32x32, are enlarged to 224x224" in line and "with --image-size 32, a crop" in line
    assert warnings("large", "--dry-run") == []
    assert warnings("small", "--image-size", 32, "--run-dir", "first") == []
    (line,) = warnings("small", "--weights", "first", "--dry-run")
    assert "first was trained on images of 32x32, and this run takes 224x224: --image-size 32 keeps" in line
    assert warnings("small", "--weights", "first/checkpoints/last.npz", "--dry-run") == [
        line.replace("first was", "first/checkpoints/last.npz was")
    ]
    assert warnings("small", "--weights", "first", "--image-size", 32, "--dry-run") == []
    assert warnings("small", "--weights", "first", "--image-size", 64, "--dry-run") == []


@pytest.mark.slow
def test_training_on_a_damaged_folder_recommends_verify_dataset(run, monkeypatch):
    monkeypatch.setattr("ipucnn.datasets.damaged.CHECKED_BYTES", 0)
    pictures("of mine", 32)
    for name in ("of mine/a/0.png", "of mine/b/3.png"):
        Path(name).write_bytes(Path(name).read_bytes()[:200])
    train = ("train", write(NESTED), "--num-epochs", 1, "--micro-batch-size", 2, "--image-size", 32)
    code, _, err = run(*train, "--dataset", "of mine", columns=400)
    hint = err.splitlines()[-1]
    assert code == 3 and "cannot be decoded" in err
    assert "ipucnn verify-dataset --dataset-path 'of mine' names every damaged file, --skip-damaged" in hint
    code, out, _ = run("verify-dataset", "--dataset-path", "of mine", columns=400)
    assert code == 3 and "a/0.png" in out and "b/3.png" in out


def test_small_data_set_reduces_the_default_batch(lightly, succeeds):
    _, err = succeeds(
        "train", write(SMALL_NETWORK), "--dataset", "digits", "--limit-train", 20, "--num-epochs", 1
    )
    assert "global batch 20 = micro-batch 20" in err


@pytest.mark.parametrize(("text", "norm"), [(SMALL_NETWORK, "none"), (RESIDUAL, "BatchNormalization")])
def test_a_dry_run_names_the_norms_of_the_network(run, text, norm):
    words = "--dataset digits --device cpu --precision 16.16 --limit-train 32 --dry-run"
    code, out, err = run("train", write(text), *words.split())
    assert code == 0 and re.search(rf"norm layer +{norm}$", out, re.MULTILINE), err + out
    assert ("its moving statistics are recomputed" in err) == (norm != "none")


def test_the_default_batch_is_that_of_all_replicas_and_images(run):
    """Options are checked with the micro-batch that the run has."""
    words = "--dataset digits --device cpu --num-epochs 1 --dry-run --limit-train"
    few = ("train", write(SMALL_NETWORK), *words.split())
    pipeline = "--ipus 4 --ipus-per-replica 2 --pipeline-splits re_lu"
    for options, batch in (("--ipus 4", "28 = micro-batch 7"), (pipeline, "24 = micro-batch 3 x 4")):
        code, _, err = run(*few, 30, *options.split())
        assert code == 0 and f"global batch {batch}" in err, err
    mixed = [*few, 4, "--num-replicas", 4, "--mixup", 0.2]
    check_refused(run, Refusal(mixed, "--mixup 0.2 has no effect where --micro-batch-size is 1"))
