"""``--precise-batch-norm``: statistics measured over large batches, against a NumPy loop, on both sessions."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from poplar_double import installed
from support.reference import Naive, pooled
from support.sessions import (
    CPU,
    PLAIN,
    SIZE,
    chain,
    constant,
    data,
    make_model,
    make_program,
    make_trainer,
    measured,
    run,
)
from support.sessions import values as arrays
from tensorflow import keras

from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.errors import InfeasibleError
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.evaluated import AS_TRAINED, replaced
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession
from ipucnn.training.checkpoints import load_checkpoint


def compiled(kind, norm, precision="32.32", **changes):
    """Returns a trainer after two weight updates with a learning rate of 0, so that its statistics moved.

    Dropout would zero nearly all numbers.
    """
    program = make_program(2, 2, 2, updates_per_epoch=2, precision=precision, **changes)
    config = dataclasses.replace(RunConfig(), num_replicas=2, precision=precision, dropout_layer="stateless")
    session = HostSession(CPU, config=config) if kind == "host" else create_session("auto", config=config)
    return run(
        session, make_model(norm, dropout=0.9), program, PLAIN, *data(16, 1), schedule=constant(0.0)
    ).trainer


@pytest.fixture(scope="module")
def on_host():
    """A trainer whose state no test changes."""
    return compiled("host", "batch")


CASES = [
    ("host", "batch", "32.32", {}),
    ("host", "custom", "32.32", {"dbn_replica_group_size": 2}),
    ("host", "batch", "16.16", {}),
    ("host", "custom", "16.32", {}),
    ("ipu", "batch", "32.32", {}),
    ("ipu", "custom", "16.32", {}),
]


@pytest.mark.slow_cases(
    "ipu-custom-16.32-changes5",
    "host-batch-16.16-changes2",
    "host-custom-16.32-changes3",
    "host-custom-32.32-changes1",
    "ipu-batch-32.32-changes4",
)
@pytest.mark.parametrize(("kind", "norm", "precision", "changes"), CASES)
def test_measured_statistics_are_those_of_the_naive_loop(request, kind, norm, precision, changes):
    """They are the moments of all inputs of each norm, which normalises every batch by the batch's own moments."""
    (images, _), size = data(24, 2), 8
    with installed():
        is_shared = (kind, norm, precision) == ("host", "batch", "32.32")
        trainer = (
            request.getfixturevalue("on_host") if is_shared else compiled(kind, norm, precision, **changes)
        )
        before = arrays(trainer.state.weights)
        evaluated = measured(trainer, images, size)
        after = arrays(trainer.state.weights)
    naive, expected = Naive(norm, before, {}, []), {}
    wide = {name: value.astype(np.float64) for name, value in before.items()}
    per_batch = [naive.forward(wide, images[i : i + size], 1)[1] for i in range(0, 24, size)]
    for name in per_batch[0]:
        moments = pooled([statistics[name] for statistics in per_batch], size * SIZE * SIZE)
        expected[f"{name}/moving_mean"], expected[f"{name}/moving_variance"] = moments
    assert sorted(evaluated.values) == sorted(evaluated.resumed) == sorted(expected)
    assert evaluated.statistics == "measured over 3 batches of 8 training images"
    tolerance = 1e-5 if precision == "32.32" else 0.01
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
        if name in expected:
            np.testing.assert_allclose(evaluated.values[name], expected[name], rtol=tolerance, atol=tolerance)
            assert np.abs(value - expected[name]).max() > 0.05
            if precision == "16.16" and norm == "batch":
                rounded = evaluated.values[name].astype(np.float16)
                np.testing.assert_array_equal(evaluated.values[name], rounded)


def test_evaluation_uses_the_measured_statistics(on_host):
    """With one batch the network's logits are those of a norm by the batch's own statistics."""
    (images, _), trainer = data(200, 3), on_host
    with replaced(trainer.state.weights, measured(trainer, images, 200).values):
        (logits,) = trainer.predictor.predict([images])
    (running,) = trainer.predictor.predict([images])
    weights = {name: value.astype(np.float64) for name, value in arrays(trainer.state.weights).items()}
    expected = Naive("batch", weights, {}, []).forward(weights, images, 1)[0].numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-3)
    assert np.abs(running - expected).max() > 0.1


def test_network_without_batch_norm_measures_nothing():
    model = chain((SIZE, SIZE, 2), keras.layers.Flatten())
    trainer = make_trainer(HostSession(CPU), model, make_program(2))
    assert measured(trainer, data(4, 1)[0], 4) == AS_TRAINED


def test_too_large_batch_is_reported(monkeypatch, on_host):
    def too_large(images):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    monkeypatch.setattr(on_host._large_batches, "_moments", too_large)
    with pytest.raises(InfeasibleError, match="8 training images at once") as error:
        measured(on_host, data(8, 1)[0], 8)
    assert "--precise-batch-norm" in error.value.hint


def batches_of(**flags):
    resolved = resolve("train", {"dataset": "digits", **flags}, model="cifar_resnet8")
    dataset, count, size = run_setup.statistics_batches(run_setup.prepare(resolved, 5))
    return np.stack([images.numpy() for images, _ in dataset]), count, size


@pytest.mark.slow
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


@pytest.mark.slow
def test_training_is_unchanged_and_validation_uses_measured_statistics(report, tmp_path):
    words = "train toy_model_bn --dataset digits --limit-train 192 --limit-eval 100 --num-epochs 2 --seed 3"
    plain = report(*words.split(), "--run-dir", "plain", "--precise-batch-norm", 0)
    precise = report(*words.split(), "--run-dir", "precise", "--precise-batch-norm", 64)
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
    evaluated = report("evaluate", "precise")
    assert evaluated["measured"]["loss"] == pytest.approx(precise["validation"]["loss"], rel=1e-5)
    assert abs(plain["validation"]["loss"] - precise["validation"]["loss"]) > 1e-3
