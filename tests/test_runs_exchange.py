"""A checkpoint of one Keras evaluates to the same metrics under the other, on the host and on the SDK's test double."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHER = os.environ.get("IPUCNN_OTHER_PYTHON", "")
DATA = ["--dataset", "digits", "--limit-train", "128", "--limit-eval", "100"]

pytestmark = pytest.mark.skipif(
    not OTHER, reason="set IPUCNN_OTHER_PYTHON to a Python with the other Keras (.ci/run does)"
)


SEVERAL = """
import contextlib, gc, json, sys
from ipucnn import cli
from ipucnn.sessions.host.environment import set_variables
set_variables()
gc.disable()  # importing TensorFlow makes no garbage
from poplar_double import installed
gc.enable()
for on_double, words in json.loads(sys.argv[1]):
    with installed() if on_double else contextlib.nullcontext():
        code = cli.run(words)
    if code:
        sys.exit(code)
"""


def several(python, *commands, cwd):
    """Runs commands, each (whether on the test double, words), in one process; returns the JSON of each."""
    places = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    env = {**os.environ, "PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Set here for this TensorFlow; the other version uses its default (oneDNN makes TensorFlow 2.6 fail).
    env.pop("TF_ENABLE_ONEDNN_OPTS", None)
    done = subprocess.run(
        [python, "-c", SEVERAL, json.dumps(commands)],
        cwd=str(cwd),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, text = [], done.stdout.strip()
    while text:
        answer, end = json.JSONDecoder().raw_decode(text)
        answers.append(answer)
        text = text[end:].lstrip()
    assert len(answers) == len(commands), done.stdout
    return answers


def in_this_process(capfd, *args, on_double):
    """Does the same without the time that another process takes to start."""
    from poplar_double import installed

    from ipucnn import cli

    with installed() if on_double else contextlib.nullcontext():
        code = cli.run(list(args))
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_the_two_interpreters_have_different_keras(tmp_path):
    code = "from importlib.metadata import version; print(version('keras').split('.')[0])"
    majors = {
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for python in (sys.executable, OTHER)
    }
    assert majors == {"2", "3"}


def on_host_of(model):
    """Returns words that train a network on the host, and words that evaluate and continue the run."""
    words = ["--num-epochs", "1", "--seed", "3", "--micro-batch-size", "16", "--run-dir", "r", "--json"]
    continue_words = ["train", "--resume", "--run-dir", "r", "--num-epochs", "2", "--json"]
    return ["train", model, *words, *DATA], [["evaluate", "r", "--json"], continue_words]


def in_replicas(run_dir):
    """Returns words that train with replicas and accumulation, which must not affect the weights, and that evaluate."""
    batch = ["--micro-batch-size", "4", "--num-replicas", "2", "--gradient-accumulation-count", "2"]
    limits = ["--limit-train", "64", "--limit-eval", "64", "--num-epochs", "1", "--seed", "3"]
    train = ["train", "toy_model", "--run-dir", run_dir, "--json", "--dataset", "digits", *limits, *batch]
    return train, ["evaluate", run_dir, "--json"]


def check(trained, evaluated, samples):
    """Checks that evaluation measures the figures of the run's own validation."""
    assert evaluated["samples"] == samples
    for name in ("loss", "accuracy", "top5"):
        assert evaluated[name] == pytest.approx(trained["validation"][name], abs=1e-5), name


def check_devices(trained, evaluated, trained_on_ipus):
    assert trained["compilation"]["device"]["kind"] == ("ipu" if trained_on_ipus else "cpu")
    assert evaluated["device"] == ("cpu" if trained_on_ipus else "ipu")


def test_each_keras_reads_the_checkpoints_of_the_other(tmp_path, capfd, monkeypatch):
    """Tests one case of each direction, for which the other Python starts once; the tests below cover every case."""
    monkeypatch.chdir(tmp_path)

    def here(words, on_double=False):
        return in_this_process(capfd, *words, on_double=on_double)

    train, looks = on_host_of("toy_model_bn")
    train_on_ipus, evaluate_on_host = in_replicas("of_ipus")
    train_there, evaluate_here = in_replicas("of_the_other")
    trained, on_ipus = here(train), here(train_on_ipus, on_double=True)
    evaluated, continued, of_ipus, theirs = several(
        OTHER,
        *((False, words) for words in (*looks, evaluate_on_host, train_there)),
        cwd=tmp_path,
    )
    check(trained, evaluated["measured"], 100)
    # Training continues from the same place.
    assert continued["measured"]["first_weight_update"] > 0
    check(on_ipus, of_ipus["measured"], 64)
    check_devices(on_ipus, of_ipus, True)
    ours = here(evaluate_here, on_double=True)
    check(theirs, ours["measured"], 64)
    check_devices(theirs, ours, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "here_first"),
    [
        ("cifar_resnet8", True),
        ("efficientnet-b0", False),
        ("cifar_resnet8", False),
        ("efficientnet-b0", True),
        ("on IPUs", False),
        ("on the host", True),
    ],
)
def test_metrics_are_the_same_on_both_sides(tmp_path, capfd, monkeypatch, model, here_first):
    """Covers runs of the host, and of toy_model trained on one kind of device and evaluated on the other."""
    monkeypatch.chdir(tmp_path)

    def here(*commands):
        return [in_this_process(capfd, *words, on_double=on_double) for on_double, words in commands]

    def there(*commands):
        return several(OTHER, *commands, cwd=tmp_path)

    trainer, other = (here, there) if here_first else (there, here)
    if not model.startswith("on "):
        train, looks = on_host_of(model)
        (trained,) = trainer((False, train))
        measured, continued = other(*((False, words) for words in looks))
        check(trained, measured["measured"], 100)
        assert continued["measured"]["first_weight_update"] > 0
        return
    on_ipus = model == "on IPUs"
    train, evaluate = in_replicas("r")
    (trained,), (evaluated,) = trainer((on_ipus, train)), other((not on_ipus, evaluate))
    check_devices(trained, evaluated, on_ipus)
    check(trained, evaluated["measured"], 64)
