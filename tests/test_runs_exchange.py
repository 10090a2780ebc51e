"""A checkpoint of one Keras evaluates to the same metrics under the other: Keras 3 here, Keras 2.6 on Python 3.8."""

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


def ipucnn(python, *args, cwd):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [python, "-m", "ipucnn", *args], cwd=str(cwd), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_two_interpreters_have_different_keras(tmp_path):
    code = "from tensorflow import keras; print(keras.__version__.split('.')[0])"
    majors = {
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for python in (sys.executable, OTHER)
    }
    assert majors == {"2", "3"}


@pytest.mark.parametrize(
    "model, direction",
    [
        ("cifar_resnet8", "here to there"),
        ("efficientnet-b0", "there to here"),
        pytest.param("cifar_resnet8", "there to here", marks=pytest.mark.slow),
        pytest.param("efficientnet-b0", "here to there", marks=pytest.mark.slow),
    ],
)
def test_metrics_are_the_same_on_both_sides(tmp_path, model, direction):
    trainer, other = (sys.executable, OTHER) if direction == "here to there" else (OTHER, sys.executable)
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
    trained = ipucnn(trainer, "train", model, *words, cwd=tmp_path)
    evaluated = ipucnn(other, "evaluate", "r", "--json", cwd=tmp_path)["measured"]
    assert evaluated["samples"] == 100
    for name in ("loss", "accuracy", "top5"):
        assert evaluated[name] == pytest.approx(trained["validation"][name], abs=1e-5), name
    # And training goes on there from the same place.
    continued = ipucnn(
        other, "train", "--resume", "--run-dir", "r", "--num-epochs", "2", "--json", cwd=tmp_path
    )
    assert continued["measured"]["first_weight_update"] > 0
