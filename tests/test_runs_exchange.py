"""A checkpoint of one Keras evaluates to the same metrics under the other, on the host and on the SDK's double."""

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


def ipucnn(python, *args, cwd, on_double=False):
    """The JSON of a command; on the double of the Poplar SDK, or on the host."""
    places = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    env = {**os.environ, "PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Set here for this TensorFlow; the other chooses for itself (oneDNN makes TensorFlow 2.6 fail).
    env.pop("TF_ENABLE_ONEDNN_OPTS", None)
    module = "poplar_double.run" if on_double else "ipucnn"
    done = subprocess.run(
        [python, "-m", module, *args], cwd=str(cwd), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TWO = """
import sys
from ipucnn import cli
from ipucnn.sessions.host.environment import set_variables
set_variables()
words = sys.argv[1:]
place = words.index("+")
sys.exit(cli.run(words[:place]) or cli.run(words[place + 1 :]))
"""


def two_commands(python, first, second, cwd):
    """The JSON of two commands that one process runs, one after the other."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    env.pop("TF_ENABLE_ONEDNN_OPTS", None)
    done = subprocess.run(
        [python, "-c", TWO, *first, "+", *second],
        cwd=str(cwd),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer, end = json.JSONDecoder().raw_decode(done.stdout)
    return answer, json.loads(done.stdout[end:])


def in_this_process(capfd, *args, on_double):
    """The same without the time that another process takes to start."""
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


@pytest.mark.parametrize(
    "model, direction",
    [
        ("toy_model_bn", "here to there"),
        pytest.param("cifar_resnet8", "here to there", marks=pytest.mark.slow),
        pytest.param("efficientnet-b0", "there to here", marks=pytest.mark.slow),
        pytest.param("cifar_resnet8", "there to here", marks=pytest.mark.slow),
        pytest.param("efficientnet-b0", "here to there", marks=pytest.mark.slow),
    ],
)
def test_metrics_are_the_same_on_both_sides(tmp_path, capfd, monkeypatch, model, direction):
    monkeypatch.chdir(tmp_path)

    def here(*commands):
        return [in_this_process(capfd, *command, on_double=False) for command in commands]

    def there(first, *more):
        if more:
            return two_commands(OTHER, first, *more, cwd=tmp_path)
        return [ipucnn(OTHER, *first, cwd=tmp_path)]

    trainer, other = (here, there) if direction == "here to there" else (there, here)
    words = [
        "--num-epochs",
        "1",
        "--seed",
        "3",
        "--micro-batch-size",
        "16",
        "--run-dir",
        "r",
        "--json",
        *DATA,
    ]
    (trained,) = trainer(("train", model, *words))
    # And training goes on there from the same place.
    again = ("train", "--resume", "--run-dir", "r", "--num-epochs", "2", "--json")
    found, continued = other(("evaluate", "r", "--json"), again)
    evaluated = found["measured"]
    assert evaluated["samples"] == 100
    for name in ("loss", "accuracy", "top5"):
        assert evaluated[name] == pytest.approx(trained["validation"][name], abs=1e-5), name
    assert continued["measured"]["first_weight_update"] > 0


@pytest.mark.parametrize(
    ("trained_there", "trained_on_ipus"),
    [
        (False, True),
        (True, False),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_ipus_of_one_keras_and_the_host_of_the_other(
    tmp_path, capfd, monkeypatch, trained_there, trained_on_ipus
):
    """The IPUs are the double's; with replicas and accumulation, of which the weights must show nothing."""
    monkeypatch.chdir(tmp_path)
    batch = ["--micro-batch-size", "4", "--num-replicas", "2", "--gradient-accumulation-count", "2"]
    limits = ["--limit-train", "64", "--limit-eval", "64", "--num-epochs", "1", "--seed", "3"]
    train = ["train", "toy_model", "--run-dir", "r", "--json", "--dataset", "digits", *limits, *batch]

    def here(*args, on_double):
        return in_this_process(capfd, *args, on_double=on_double)

    def there(*args, on_double):
        return ipucnn(OTHER, *args, cwd=tmp_path, on_double=on_double)

    trainer, other = (there, here) if trained_there else (here, there)
    trained = trainer(*train, on_double=trained_on_ipus)
    assert trained["compilation"]["device"]["kind"] == ("ipu" if trained_on_ipus else "cpu")
    evaluated = other("evaluate", "r", "--json", on_double=not trained_on_ipus)
    assert evaluated["device"] == ("cpu" if trained_on_ipus else "ipu")
    assert evaluated["measured"]["samples"] == 64
    for name in ("loss", "accuracy", "top5"):
        assert evaluated["measured"][name] == pytest.approx(trained["validation"][name], abs=1e-5), name
