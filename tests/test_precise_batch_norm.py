"""``--precise-batch-norm``: statistics measured over large batches, against a NumPy loop, on both sessions."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from poplar_double import installed
from support.sessions import CPU, make_program
from tensorflow import keras

from ipucnn import cli
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.errors import InfeasibleError
from ipucnn.models.layers.micro_batches import BatchNormalization, Dropout
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession
from ipucnn.training.checkpoints import load_checkpoint
from ipucnn.training.losses import make_loss
from ipucnn.training.optimizers import make_settings

SIDE, CHANNELS, CLASSES, EPSILON = 3, 2, 3, 1e-3
MIX = np.float32([[0.5, -1.0, 0.25], [1.5, 0.75, -0.5]])


def make_model(moves_once: bool) -> Any:
    """Makes a norm of the images, dropout that would zero nearly all, a mix of channels, and a norm of the result."""
    keras.backend.clear_session()
    inputs = keras.Input((SIDE, SIDE, CHANNELS), name="input")
    norm_options = {"momentum": 0.9, "epsilon": EPSILON, "moves_once": moves_once}
    x = BatchNormalization(name="norm0", **norm_options)(inputs)
    x = Dropout(0.9, name="dropout")(x)
    x = keras.layers.Conv2D(3, 1, use_bias=False, name="mix")(x)
    x = BatchNormalization(name="norm1", **norm_options)(keras.layers.ReLU(name="relu")(x))
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(x))
    model.get_layer("mix").set_weights([MIX[None, None]])
    model.get_layer("norm0").gamma.assign([1.5, 0.75])
    model.get_layer("norm0").beta.assign([0.25, -0.5])
    return model


def make_images(samples: int, seed: int) -> np.ndarray:
    """Makes samples that differ in mean and spread."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(samples, SIDE, SIDE, CHANNELS)) * rng.uniform(0.5, 2, (samples, 1, 1, 1))
    return (images + rng.normal(0, 1, (samples, 1, 1, CHANNELS))).astype(np.float32)


def numpy_loop(images: np.ndarray, size: int) -> dict:
    """Returns the moments of all inputs of each norm, which normalises batches of ``size`` by their own moments."""
    met: dict = {"norm0": [], "norm1": []}
    for first in range(0, len(images), size):
        x = images[first : first + size].astype(np.float64)
        met["norm0"].append(x.reshape(-1, CHANNELS))
        x = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + EPSILON) * [1.5, 0.75] + [0.25, -0.5]
        met["norm1"].append(np.maximum(x @ MIX, 0).reshape(-1, 3))
    moments = {}
    for name, parts in met.items():
        numbers = np.concatenate(parts)
        moments[f"{name}/moving_mean"] = numbers.mean(axis=0)
        moments[f"{name}/moving_variance"] = numbers.var(axis=0, ddof=1)
    return moments


def compiled(kind: str, moves_once: bool, precision: str = "32.32", **changes: Any) -> Any:
    """Returns a session that trained two weight updates with a learning rate of 0, so that its statistics moved."""
    program = make_program(2, 2, 2, updates_per_epoch=2, precision=precision, **changes)
    config = dataclasses.replace(RunConfig(), num_replicas=2, precision=precision, dropout_layer="stateless")
    session = HostSession(CPU, config=config) if kind == "host" else create_session("auto", config=config)
    settings = make_settings("sgd", {"momentum": 0.0}, global_batch_size=8)
    session.compile(
        make_model(moves_once),
        program,
        settings,
        make_loss("cross_entropy"),
        lambda updates: np.zeros(np.shape(updates), np.float32),
    )
    images = make_images(16, 1)
    both = tf.data.Dataset.from_tensor_slices((images, np.arange(16, dtype=np.int32) % CLASSES)).repeat()
    list(session.train(lambda first, size: both.batch(size, drop_remainder=True)))
    return session


CASES = [
    ("host", False, "32.32", {}),
    ("host", True, "32.32", {"dbn_replica_group_size": 2}),
    ("host", False, "16.16", {}),
    ("host", True, "16.32", {}),
    ("ipu", False, "32.32", {}),
    ("ipu", True, "16.32", {}),
]


@pytest.mark.slow_cases(
    "host-False-16.16-changes2",
    "host-True-16.32-changes3",
    "host-True-32.32-changes1",
    "ipu-False-32.32-changes4",
)
@pytest.mark.parametrize(("kind", "moves_once", "precision", "changes"), CASES)
def test_measured_statistics_are_those_of_a_numpy_loop(kind, moves_once, precision, changes):
    images, size = make_images(24, 2), 8
    with installed():
        session = compiled(kind, moves_once, precision, **changes)
        before = {name: value.numpy() for name, value in session.state.weights.items()}
        session.measure_statistics(tf.data.Dataset.from_tensor_slices((images,)).batch(size))
        after = {name: value.numpy() for name, value in session.state.weights.items()}
        with session.as_evaluated():
            inside = {name: value.numpy() for name, value in session.state.weights.items()}
        remeasured = {name: value.numpy() for name, value in session.state.weights.items()}
    expected = numpy_loop(images, size)
    assert sorted(session.evaluated) == sorted(expected)
    tolerance = 1e-5 if precision == "32.32" else 0.01
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
        np.testing.assert_array_equal(remeasured[name], value)
        if name in expected:
            np.testing.assert_allclose(
                session.evaluated[name], expected[name], rtol=tolerance, atol=tolerance
            )
            np.testing.assert_allclose(inside[name], expected[name], rtol=tolerance, atol=tolerance)
            assert np.abs(value - expected[name]).max() > 0.05
        else:
            np.testing.assert_array_equal(inside[name], value)


def test_evaluation_uses_the_measured_statistics():
    """With one batch the network's logits are those of a norm by the batch's own statistics."""
    images = make_images(200, 3)
    session = compiled("host", False)
    session.measure_statistics(tf.data.Dataset.from_tensors((images,)))
    with session.as_evaluated():
        (logits,) = session.predict([images])
    running = session.predict([images])[0]
    weights = {name: value.numpy().astype(np.float64) for name, value in session.state.weights.items()}
    x = images.astype(np.float64)
    x = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2), ddof=1) + EPSILON) * [1.5, 0.75] + [0.25, -0.5]
    x = np.maximum(x @ MIX, 0)
    x = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2), ddof=1) + EPSILON)
    expected = x.mean((1, 2)) @ weights["logits/kernel"] + weights["logits/bias"]
    np.testing.assert_allclose(logits, expected, atol=2e-3)
    assert np.abs(running - expected).max() > 0.1


def test_network_without_batch_norm_measures_nothing():
    inputs = keras.Input((SIDE, SIDE, CHANNELS))
    model = keras.Model(inputs, keras.layers.Flatten()(inputs))
    session = HostSession(CPU)
    program, settings = make_program(2), make_settings("sgd", {}, global_batch_size=2)
    session.compile(model, program, settings, make_loss("cross_entropy"), lambda updates: updates * 0.0)
    session.measure_statistics(tf.data.Dataset.from_tensors((make_images(4, 1),)))
    assert session.evaluated == {}


def test_too_large_batch_is_reported(monkeypatch):
    session = compiled("host", False)

    def too_large(images):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    monkeypatch.setattr(session._large_batches, "_moments", too_large)
    with pytest.raises(InfeasibleError, match="8 training images at once") as error:
        session.measure_statistics(tf.data.Dataset.from_tensors((make_images(8, 1),)))
    assert "--precise-batch-norm" in error.value.hint


def batches_of(**flags: str) -> Any:
    resolved = resolve("train", {"dataset": "digits", **flags}, model="cifar_resnet8")
    dataset, count, size = run_setup.statistics_batches(run_setup.prepare(resolved, 5))
    return np.stack([images.numpy() for images, _ in dataset]), count, size


def test_same_images_are_measured_each_time():
    """They are the same each time, whatever is augmented or shuffled: at most 1024, in whole batches."""
    measured_images, count, size = batches_of(precise_batch_norm="100")
    assert (count, size) == (10, 100) and measured_images.shape == (10, 100, 8, 8, 3)
    flat = measured_images.reshape(1000, -1)
    augmented_images, _, _ = batches_of(precise_batch_norm="100", augment="true", shuffle="false")
    np.testing.assert_array_equal(measured_images, augmented_images)
    assert len(np.unique(flat, axis=0)) == 1000
    assert batches_of(precise_batch_norm="2000")[1:] == (1, 1437)
    assert batches_of(precise_batch_norm="1200")[1:] == (1, 1200)
    assert batches_of(precise_batch_norm="64", limit_train="150")[1:] == (2, 64)


def test_training_is_unchanged_and_validation_uses_measured_statistics(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "toy_model_bn", "--dataset", "digits", "--limit-train", "192", "--num-epochs", "2"]
    words += ["--seed", "3", "--json", "--run-dir"]
    assert cli.run([*words, "plain", "--precise-batch-norm", "0"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.run([*words, "precise", "--precise-batch-norm", "64"]) == 0
    precise = json.loads(capsys.readouterr().out)
    assert plain["moving_statistics"] == "running"
    assert precise["moving_statistics"] == "measured over 3 batches of 64 training images"
    plain_run, precise_run = (
        load_checkpoint(tmp_path / name / "checkpoints" / "last.npz") for name in ("plain", "precise")
    )
    moving = [name for name in precise_run.weights if "/moving_" in name]
    assert moving and {f"{name}/running" for name in moving} == set(precise_run.slots) - set(plain_run.slots)
    for name, value in plain_run.weights.items():
        if name in moving:
            np.testing.assert_array_equal(precise_run.slots[f"{name}/running"], value)
            assert np.abs(precise_run.weights[name] - value).max() > 0
        else:
            np.testing.assert_array_equal(precise_run.weights[name], value)
    assert cli.run(["evaluate", "precise", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["measured"]["loss"] == pytest.approx(precise["validation"]["loss"], rel=1e-5)
    assert abs(plain["validation"]["loss"] - precise["validation"]["loss"]) > 1e-3
