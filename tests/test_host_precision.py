"""16-bit arithmetic of the host: rounding against NumPy's float16, training against a NumPy loop, recomputation."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.sessions import (
    CPU,
    batches,
    constant,
    drawn,
    make_program,
    make_trainer,
    restart_names,
    with_fused,
)
from tensorflow import keras

from ipucnn import cli
from ipucnn.config.options import RunConfig
from ipucnn.models.layers.micro_batches import BatchNormalization, Dropout
from ipucnn.sessions.host import arithmetic
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import ExecutionFinished, NotFiniteError
from ipucnn.sessions.session import train as run_program

ROOT = Path(__file__).resolve().parent.parent
ALL = np.arange(2**16, dtype=np.uint16).view(np.float16)


def on_grid(values):
    return np.array_equal(values, values.astype(np.float16).astype(np.float32))


def half(values):
    """Returns values rounded to nearest by NumPy; too large values become the largest number."""
    with np.errstate(over="ignore"):
        rounded = np.asarray(values, np.float32).astype(np.float16).astype(np.float32)
    return np.clip(rounded, -65504, 65504)


# --- rounding


@pytest.mark.parametrize("overflow_to_nan", [False, True])
def test_rounding_to_nearest_equals_float16_of_numpy(overflow_to_nan):
    values = ALL.astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    middle = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    large = np.float32([65519.996, 65520, 65536, 1e30, np.inf, -65520, -np.inf, np.nan, 0.0, -0.0, 1e-30])
    x = np.concatenate([values, middle, *beside, large])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    expected = np.where(np.isinf(expected), np.nan if overflow_to_nan else half(x), expected).astype(
        np.float32
    )
    rounded = arithmetic.compiled(arithmetic.nearest, overflow_to_nan)(tf.constant(x)).numpy()
    same = (rounded.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(rounded) & np.isnan(expected))
    assert same.all(), (x[~same][:3], rounded[~same][:3], expected[~same][:3])


def stochastic(x, update=0, seed=1):
    x = np.atleast_2d(np.float32(x))
    keys = arithmetic.streams(seed, tf.constant(update, tf.int64), tf.range(len(x)))
    return arithmetic.compiled(arithmetic.stochastic)(tf.constant(x), keys).numpy()


@pytest.mark.parametrize(
    "value", [1.0003, -3.3, 1000.123, 65490.0, -(2.0**-14) * 1.0001, 6.0e-5, 1e-6, -2e-7, 3e-8, 1e-9]
)
def test_the_mean_of_stochastic_rounding_is_the_value(value):
    value = float(np.float32(value))
    rounded = stochastic(np.full((8, 25_000), value)).astype(np.float64)
    neighbours = np.unique(rounded)
    assert len(neighbours) == 2 and on_grid(neighbours) and neighbours[0] < value < neighbours[1]
    chance = (value - neighbours[0]) / (neighbours[1] - neighbours[0])
    step = neighbours[1] - neighbours[0]
    error = step * np.sqrt(chance * (1 - chance) / rounded.size)
    assert abs(rounded.mean() - value) < 4 * error
    # Rows and neighbouring positions are uncorrelated, as independent numbers are.
    up = rounded == neighbours[1]
    assert np.all(np.abs(up.mean(axis=1) - chance) < 5 * np.sqrt(chance * (1 - chance) / up.shape[1]))
    if 0.1 < chance < 0.9:
        assert abs(np.corrcoef(up[:, 1:].ravel(), up[:, :-1].ravel())[0, 1]) < 5 / np.sqrt(up.size)
        assert abs(np.corrcoef(up[0], up[1])[0, 1]) < 5 / np.sqrt(up.shape[1])


@tries(60, slow=200)
@given(st.lists(st.floats(-65504, 65504, width=32), min_size=16, max_size=16), st.integers(0, 2**40))
def test_stochastic_rounding_gives_a_neighbour(values, update):
    x = np.float32(values)
    x[np.abs(x) < 2.0**-100] = 0.0  # TensorFlow's threads treat subnormal float32 as 0
    rounded = stochastic(x, update)[0]
    assert on_grid(rounded) and np.array_equal(np.signbit(rounded), np.signbit(x))
    nearest = half(x)
    step = np.spacing(np.minimum(np.abs(nearest), 65472).astype(np.float16)).astype(np.float64)
    assert np.all(np.abs(rounded.astype(np.float64) - x) < step)
    assert np.array_equal(rounded[nearest == x], x[nearest == x])


def test_random_bits_differ_by_seed_update_micro_batch_and_place():
    x = np.full((3, 4096), 1.0003)
    rounded = [stochastic(x, 0), stochastic(x, 1), stochastic(x, 2**32), stochastic(x, 0, seed=2)]
    places = [
        arithmetic.Rounding(
            arithmetic.Arithmetic("16.16"), arithmetic.streams(1, tf.constant(0, tf.int64), tf.range(3))
        ).values(tf.constant(x, tf.float32), place)
        for place in ("a", "b")
    ]
    rows = np.concatenate([*rounded, *(p.numpy() for p in places)])
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 0.1


# --- training


def session_of(precision, rounding="OFF", **changes):
    config = RunConfig(precision=precision, stochastic_rounding=rounding, **changes)
    return HostSession(CPU, config=config)


def compile_(session, model, program, rate, optimizer=("sgd", {"momentum": 0.5}, {})):
    return make_trainer(session, model, program, optimizer, constant(rate))


def train(trainer, images, labels, stop=None):
    """Runs the program or its first executions; returns weights and state by name, and each execution's mean loss."""
    events = run_program(trainer, batches(trainer.program, images, labels))
    finished = list(itertools.islice((e for e in events if isinstance(e, ExecutionFinished)), stop))
    values = {**trainer.state.weights, **trainer.state.slots}
    return {name: v.numpy() for name, v in values.items()}, [e.metrics["loss"] for e in finished]


def make_model(dropout=0.0):
    """Returns a convolution, batch norm and a dense layer, with a skip."""
    restart_names()
    inputs = keras.Input((5, 5, 2), name="input")
    x = skip = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="first")(inputs)
    x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False, name="second")(x)
    x = BatchNormalization(momentum=0.8, epsilon=1e-3, name="norm")(x)
    x = keras.layers.ReLU(name="relu")(x)
    x = keras.layers.Add(name="add")([x, skip])
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = Dropout(dropout, name="dropout")(x)
    return drawn(keras.Model(inputs, keras.layers.Dense(3, name="logits")(x)), 0)


def make_data(samples):
    rng = np.random.default_rng(1)
    return rng.normal(0.5, 1, (samples, 5, 5, 2)).astype(np.float32), rng.integers(0, 3, samples).astype(
        np.int32
    )


PIPELINE = dict(num_stages=3, pipeline_splits=("norm", "pool"), device_mapping=(0, 1, 2), recomputation=True)


def program_of(precision, fused, updates=3, **changes):
    changes = {"loss_scaling": 8.0 if precision != "32.32" else 0.0, **changes}
    return make_program(
        2, 2, 2, updates_per_epoch=updates, precision=precision, **changes, fused_micro_batches=fused
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["16.16", pytest.param("16.32", marks=pytest.mark.slow)])
def test_fusing_stages_and_resuming_do_not_change_the_rounding(precision):
    images, labels = make_data(24)
    sessions, values = [], []
    for fused, pipeline in ((1, {}), (4, PIPELINE)):
        program = program_of(precision, fused, weight_updates_per_execution=1, num_executions=3, **pipeline)
        sessions.append(compile_(session_of(precision, "ON"), make_model(0.25), program, 0.05))
        values.append(train(sessions[-1], images, labels)[0])
    for name, value in values[0].items():
        # The order of sums may differ, which sometimes changes a rounding.
        np.testing.assert_allclose(values[1][name], value, rtol=2e-3, atol=1e-4, err_msg=name)
        assert np.mean(values[1][name] != value) < 0.1 or "moving" in name or precision == "16.32", name
    grid = [name for name in values[0] if "moving" not in name]
    assert all(on_grid(values[0][name]) for name in grid) == (precision == "16.16")
    # A finished session resumes at the third weight update, with the state of another session before it.
    stopped = compile_(session_of(precision, "ON"), make_model(0.25), program, 0.05)
    before = train(stopped, images, labels, stop=2)[0]
    for variables in (sessions[1].state.weights, sessions[1].state.slots):
        for name, variable in variables.items():
            variable.assign(before[name])
    sessions[1].state.weight_updates = 2
    resumed = train(sessions[1], images, labels)[0]
    assert all(resumed[name].tobytes() == value.tobytes() for name, value in values[1].items())


@pytest.mark.slow
def test_on_rounds_activations_stochastically_and_ri_only_weights():
    images, labels = make_data(8)
    losses, weights = {}, {}
    for rounding in ("OFF", "RI", "ON"):
        session = compile_(session_of("16.16", rounding), make_model(), program_of("16.16", 4, 1), 0.05)
        weights[rounding], (losses[rounding],) = train(session, images, labels)
    assert losses["OFF"] == losses["RI"] != losses["ON"]
    assert any((weights["OFF"][name] != value).any() for name, value in weights["RI"].items())


def test_evaluation_always_rounds_to_nearest():
    images, _ = make_data(8)
    model = make_model()
    rounded = make_model()
    for variable, other in zip(rounded.weights, model.weights):
        variable.assign(half(np.asarray(other)))
    (expected,) = session_of("32.32").predictor(rounded).predict([tf.constant(half(images))])
    for precision in ("16.16", "16.32"):
        network = keras.models.clone_model(model)
        network.set_weights(model.get_weights())
        predictor = session_of(precision, "ON").predictor(network)
        (first,), (second,) = (predictor.predict([tf.constant(images)]) for _ in range(2))
        assert np.array_equal(first, second) and on_grid(first)
        np.testing.assert_allclose(first, expected, rtol=4e-3, atol=4e-3)


# --- a network written out in NumPy


def naive_update(weights, slots, micro_batches, precision, scale, rate):
    """Computes a weight update of dense(4, relu), dense(3), momentum 0.5, one replica; rounds every value."""
    read = {name: half(w) for name, w in weights.items()}
    gradients = {name: np.zeros_like(w) for name, w in weights.items()}
    for images, labels in micro_batches:
        x = half(images)
        hidden = half(np.maximum(x @ read["hidden/kernel"] + read["hidden/bias"], 0))
        logits = half(hidden @ read["logits/kernel"] + read["logits/bias"])
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        of_logits = half((shares - np.eye(3, dtype=np.float32)[labels]) * np.float32(scale / len(images)))
        of_hidden = half(of_logits @ read["logits/kernel"].T) * (hidden > 0)
        gradients["logits/kernel"] += hidden.T @ of_logits
        gradients["logits/bias"] += of_logits.sum(axis=0)
        gradients["hidden/kernel"] += x.T @ of_hidden
        gradients["hidden/bias"] += of_hidden.sum(axis=0)
    keep = half if precision == "16.16" else np.float32
    for name, gradient in gradients.items():
        gradient = half(gradient / np.float32(len(micro_batches))) / np.float32(scale)
        moved = np.float32(0.5) * slots[f"{name}/momentum"] - np.float32(rate) * gradient
        # As on IPUs, the weight moves by the state before its rounding.
        slots[f"{name}/momentum"], weights[name] = keep(moved), keep(weights[name] + moved)


@pytest.mark.parametrize("precision", ["16.16", "16.32"])
def test_a_16_bit_weight_update_equals_a_numpy_loop(precision):
    restart_names()
    inputs = keras.Input((6,), name="input")
    x = keras.layers.Dense(4, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))
    rng = np.random.default_rng(7)
    for variable in model.weights:
        variable.assign(rng.normal(0, 0.5, variable.shape))
    images = rng.normal(0, 1, (24, 6)).astype(np.float32)
    labels = rng.integers(0, 3, 24).astype(np.int32)
    program = make_program(
        4, 2, updates_per_epoch=3, precision=precision, loss_scaling=16.0, fused_micro_batches=2
    )
    trainer = compile_(session_of(precision), model, program, 0.25)
    weights = {name: v.numpy() for name, v in trainer.state.weights.items()}
    slots = {name: v.numpy() for name, v in trainer.state.slots.items()}
    values, _ = train(trainer, images, labels)
    for update in range(3):
        parts = [slice(update * 8 + i * 4, update * 8 + i * 4 + 4) for i in range(2)]
        naive_update(weights, slots, [(images[p], labels[p]) for p in parts], precision, 16.0, 0.25)
    for name, value in {**weights, **slots}.items():
        step = 2.0**-10 * np.abs(value) + 2.0**-14
        assert np.all(np.abs(values[name] - value) <= step), name
        assert np.mean(np.abs(values[name] - value) <= 2e-7) > 0.8, name
    assert all(on_grid(value) for value in values.values()) == (precision == "16.16")


# --- effects of 16 bits on training


def chain(factors):
    """Returns a dense layer that learns, followed by dense layers that only multiply."""
    restart_names()
    inputs = keras.Input((2,), name="input")
    x = keras.layers.Dense(2, use_bias=False, name="learns")(inputs)
    for i, factor in enumerate(factors):
        layer = keras.layers.Dense(2, use_bias=False, trainable=False, name=f"times{i}")
        x = layer(x)
        layer.set_weights([np.eye(2, dtype=np.float32) * factor])
    model = keras.Model(inputs, x)
    model.get_layer("learns").set_weights([np.zeros((2, 2), np.float32)])
    return model


def separable(samples):
    labels = np.arange(samples, dtype=np.int32) % 2
    return np.eye(2, dtype=np.float32)[labels], labels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "scale", "learns"), [("16.32", 0.0, False), ("16.32", 1024.0, True), ("32.32", 0.0, True)]
)
def test_a_network_that_learns_in_16_bits_only_with_loss_scaling(precision, scale, learns):
    """Gradients of about 2**-2 are multiplied by 2**-24, where float16 rounds them to 0, and then by 2**24."""
    images, labels = separable(64)
    program = make_program(
        8, updates_per_epoch=8, precision=precision, loss_scaling=scale, fused_micro_batches=1
    )
    model = chain([2.0**12, 2.0**12, 2.0**-12, 2.0**-12])
    values, (loss,) = train(compile_(session_of(precision), model, program, 2.0**-11), images, labels)
    assert (loss < np.log(2) - 1e-4) == learns
    assert values["learns/kernel"].any() == learns


@pytest.mark.slow
def test_weights_stall_under_nearest_rounding_and_not_under_stochastic():
    """Weights near 1 have steps of 2**-10; each weight update moves them by less than half a step."""
    images, labels = separable(8 * 200)
    losses = {}
    for precision, rounding in (("32.32", "OFF"), ("16.16", "OFF"), ("16.16", "RI")):
        program = make_program(
            8, updates_per_epoch=200, precision=precision, weight_updates_per_execution=100
        )
        model = chain([])
        start = np.float32([[1, 1.5], [1.5, 1]])
        model.get_layer("learns").set_weights([start])
        session = compile_(
            session_of(precision, rounding), model, with_fused(program, 1), 1e-3, ("sgd", {}, {})
        )
        values, losses[precision, rounding] = train(session, images, labels)
        assert np.array_equal(values["learns/kernel"], start) == ((precision, rounding) == ("16.16", "OFF"))
    fallen = {key: first - last for key, (first, last) in losses.items()}
    whole = fallen["32.32", "OFF"]
    assert whole > 0.01 and fallen["16.16", "OFF"] == 0
    assert abs(fallen["16.16", "RI"] - whole) < 0.5 * whole


# --- overflow and exceptions


@pytest.mark.slow
def test_overflow_saturates_or_becomes_nan():
    images, labels = make_data(8)
    program = program_of("16.16", 4, 1, loss_scaling=2.0**30)
    train(compile_(session_of("16.16"), make_model(), program, 1e-9), images, labels)
    session = compile_(
        session_of("16.16", nanoo=True), make_model(), program_of("16.16", 4, 2, loss_scaling=2.0**30), 1e-9
    )
    with pytest.raises(NotFiniteError, match="nan at weight update 2"):
        train(session, *make_data(16))


@pytest.mark.slow
def test_floating_point_exceptions_name_their_place(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    command = "train toy_model --dataset digits --limit-train 32 --limit-eval 8 --epochs 1 --fp-exceptions"
    scaled = [*command.split(), "--precision", "16.16", "--loss-scaling", "1e9"]
    assert cli.run(scaled) == 2
    lines = capfd.readouterr().err.splitlines()
    assert any(
        line.startswith("error: --fp-exceptions: floating-point exception in the gradient of")
        for line in lines
    )
    assert any(line.startswith("hint: lower --loss-scaling") for line in lines)
    # Exceptions are also raised in 32 bits; finite values pass.
    session = compile_(session_of("32.32", fp_exceptions=True), make_model(), program_of("32.32", 4, 2), 1e30)
    with pytest.raises(NotFiniteError, match="in weight updates 2 to 2"):
        train(session, *make_data(16))


def test_too_large_weights_are_reported_before_any_computation():
    model = make_model()
    model.layers[-1].set_weights([weight * 0 + 1e6 for weight in model.layers[-1].get_weights()])
    with pytest.raises(NotFiniteError, match="the weights as layers read them"):
        session_of("16.16", fp_exceptions=True).predictor(model)


# --- recomputation


@pytest.mark.slow
def test_recomputation_gives_the_same_gradients():
    images, labels = make_data(16)
    values = []
    for recomputation in (False, True):
        program = program_of("32.32", 4, 2, **{**PIPELINE, "recomputation": recomputation})
        session = compile_(session_of("32.32"), make_model(0.25), program, 1.0)
        values.append(train(session, images, labels)[0])
    for name, value in values[0].items():
        np.testing.assert_allclose(values[1][name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_recomputation_takes_less_memory():
    """Measures cifar_resnet56 in four stages, in separate processes."""
    peaks = []
    for recomputation in ("off", "on"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "recomputation_memory.py"), recomputation],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(float(done.stdout.splitlines()[-1]))
    assert peaks[1] < 0.85 * peaks[0], peaks
