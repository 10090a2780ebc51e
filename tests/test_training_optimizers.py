"""LARS against the published rule at all sizes of gradients, and automatic loss scaling against a NumPy loop."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
import test_runs_resume as end_to_end
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from poplar_double import installed
from support.reference import Naive, run_naive
from support.sessions import CPU, constant, data, make_model, make_program, run

from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.models.names import named_weights
from ipucnn.runs.recorder import CheckpointSaved
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import ExecutionFinished
from ipucnn.training.losses import Loss
from ipucnn.training.optimizer_settings import LOSS_SCALE, make_settings
from ipucnn.training.optimizers import LossScaler, Optimizer
from ipucnn.training.program import make_layout
from ipucnn.training.program import make_program as program_of


@pytest.mark.parametrize("exponent", range(0, 9))
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_lars_follows_the_published_rule_for_all_gradient_sizes(exponent, epsilon):
    """The rule is algorithm 1 of You et al. 2017, arXiv:1708.03888, in float64."""
    rng = np.random.default_rng(exponent)
    start = rng.normal(size=(5, 4)).astype(np.float32)
    params = {"momentum": 0.9, "weight_decay": 1e-4 if epsilon else 0.0, "eeta": 0.02, "epsilon": epsilon}
    variable = tf.Variable(start)
    optimizer = Optimizer(make_settings("lars", params, global_batch_size=8), {"w": variable})
    naive = Naive("none", {"w": start.astype(np.float64)}, {}, [])
    for step in range(3):
        gradient = (rng.normal(size=start.shape) * 10.0**-exponent).astype(np.float32)
        optimizer.apply([tf.constant(gradient)], tf.constant(0.5), tf.constant(step, tf.int64))
        wide = gradient.astype(np.float64)
        naive.weights["w"] = naive.step(("lars", params, {}), "w", wide, 0.5, step)
    velocity = naive.slots["w/momentum"]
    np.testing.assert_allclose(optimizer.slots["w/momentum"].numpy(), velocity, rtol=1e-4, atol=0)
    # The change of the weights in three steps, not the weights, which would hide it
    moved, expected = variable.numpy() - start, naive.weights["w"] - start
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


# Beside the others: formulas for 16 bits are compared below, and IPUs take the host's arithmetic.
@pytest.mark.slow
@pytest.mark.slow_cases("sgd-ipu", "adamw-host")
@pytest.mark.parametrize("session", ["host", "ipu"])
@pytest.mark.parametrize(
    "optimizer",
    [("sgd", {"momentum": 0.9}, {"l2_regularization": 0.3}), ("adamw", {}, {"weight_decay": 0.5})],
    ids=["sgd", "adamw"],
)
def test_biases_and_norms_without_decay_equal_a_numpy_loop(optimizer, session):
    """Four weight updates; with decay of biases and norms the loop differs from them by far more."""
    name, params, decay = optimizer
    program = make_program(3, 2, 2)
    images, labels = data(program.num_weight_updates * program.global_batch_size, 3)
    part = (name, params, {**decay, "decay_biases_and_norms": False})
    expected = run_naive("batch", program, part, images, labels)[0].weights
    decayed = run_naive("batch", program, optimizer, images, labels)[0].weights
    with installed():
        weights = run(session_on(session, program), make_model("batch"), program, part, images, labels)[0]
    for key, value in weights.items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-5, err_msg=key)
        is_left_out = key.split("/")[1] in ("gamma", "beta", "bias")
        assert not is_left_out or np.abs(decayed[key] - expected[key]).max() > 1e-3, key


@pytest.mark.slow_cases("ipu")
@pytest.mark.parametrize("session", ["host", "ipu"])
def test_weights_of_classes_equal_a_numpy_loop(session):
    """Four weight updates of two replicas and two steps, with losses; without weights the loop differs by far more."""
    program, of_classes = make_program(3, 2, 2), (0.4, 2.5, 1.0)
    optimizer = ("sgd", {"momentum": 0.9}, {})
    images, labels = data(program.num_weight_updates * program.global_batch_size, 3)
    naive, losses, _ = run_naive("batch", program, optimizer, images, labels, class_weights=of_classes)
    plain = run_naive("batch", program, optimizer, images, labels)[0].weights
    loss = Loss("cross_entropy", class_weights=of_classes)
    with installed():
        result = run(
            session_on(session, program), make_model("batch"), program, optimizer, images, labels, loss=loss
        )
    for key, value in result.weights.items():
        np.testing.assert_allclose(value, naive.weights[key], rtol=2e-5, atol=2e-5, err_msg=key)
    assert np.abs(plain["logits/kernel"] - naive.weights["logits/kernel"]).max() > 1e-2
    (finished,) = (event for event in result.events if isinstance(event, ExecutionFinished))
    assert finished.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.slow
def test_leaving_biases_out_of_no_decay_is_refused():
    flags = {"decay_biases_and_norms": "False"}
    with pytest.raises(ConfigurationError, match="nothing to leave out"):
        resolve("train", flags, model="toy_model")
    config = resolve("train", {**flags, "weight_decay": "0.1"}, model="toy_model").config
    assert (config.weight_decay, config.decay_biases_and_norms) == (0.1, False)


# --- automatic loss scaling


def naive_scale(beyond, num_gradients, start=1.0):
    """Returns the scale before each weight update and after the last; ``beyond``: gradients beyond 2**13 in each."""
    scale, num_beyond, seen, scales = start, 0, 0, [start]
    for update, count in enumerate(beyond):
        num_beyond, seen = num_beyond + count, seen + num_gradients
        if (update + 1) % 8 == 0:
            moved = scale / 2 if num_beyond / seen > 1e-5 else scale * 2
            if 1 <= moved < 32768:
                scale = moved
            num_beyond = seen = 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    "name, params",
    [
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("lars", {}),
        ("adam", {}),
        ("adam", {"epsilon": 1, "beta_2": 0}),
        ("adamw", {}),
        ("rmsprop", {"momentum": 0.9}),
    ],
)
def test_formulas_for_16_bits_are_those_of_the_kernels_for_32_bits(name, params, is_part):
    """Three weight updates of a matrix and a vector, once by TensorFlow's kernels and once by the written formulas."""
    decay = {} if name == "lars" else {"weight_decay": 0.01}
    decay.update(l2_regularization=0.02, decay_biases_and_norms=not is_part)
    settings = make_settings(name, params, global_batch_size=8, **decay)
    rng, results = np.random.default_rng(4), []
    start = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}
    gradients = [[rng.normal(size=value.shape) for value in start.values()] for _ in range(3)]
    for rounded in (None, list):
        weights = {key: tf.Variable(value, dtype=tf.float32) for key, value in start.items()}
        optimizer = Optimizer(settings, weights)
        for update, each in enumerate(gradients):
            values = [tf.constant(value, tf.float32) for value in each]
            optimizer.apply(values, tf.constant(0.1), tf.constant(update), rounded)
        results.append({**weights, **optimizer.slots})
    for key, kernel in results[0].items():
        np.testing.assert_allclose(results[1][key].numpy(), kernel.numpy(), rtol=2e-5, atol=1e-6, err_msg=key)


@tries(8, slow=20)
@given(
    st.lists(st.sampled_from([0, 0, 0, 0, 1, 3, 50]), min_size=8, max_size=140),
    st.sampled_from([60, 13_000, 30_000]),
)
def test_loss_scale_equals_a_numpy_loop(beyond, size):
    scaler = LossScaler(size)
    expected = naive_scale(beyond, size)
    sign = np.where(np.arange(size) % 2, 1.0, -1.0).astype(np.float32)
    for update, count in enumerate(beyond):
        scale = float(scaler.factor.numpy())
        assert scale == expected[update]
        gradient = np.full(size, 8192.0, np.float32)  # just within the bound
        gradient[:count] = np.nextafter(np.float32(8192), np.float32(9000))
        unscaled, far = scaler.unscaled([tf.constant(gradient * sign)])
        np.testing.assert_array_equal(unscaled[0].numpy(), gradient * sign / np.float32(scale))
        scaler.rescale(far, tf.constant(update, tf.int64))
    assert float(scaler.factor.numpy()) == expected[-1]
    assert float(scaler.factor.numpy()) <= 16384


def session_on(name, program):
    if name == "host":
        return HostSession(CPU, config=dataclasses.replace(RunConfig(), precision=program.precision))
    config = dataclasses.replace(RunConfig(), num_replicas=program.num_replicas, precision=program.precision)
    return create_session("auto", config=config)


def train(session, program, images, labels, state=None):
    """Returns weights, slots and finished executions."""
    plain = ("sgd", {"momentum": 0}, {})
    rate = constant(1e-3)
    result = run(session, make_model("none"), program, plain, images, labels, state=state, schedule=rate)
    return *result[:2], [event for event in result.events if isinstance(event, ExecutionFinished)]


def scaled_program(updates, replicas=2, **changes):
    values = dict(auto_loss_scaling=True, weight_updates_per_execution=4, num_executions=updates // 4)
    return make_program(2, 2, replicas, updates_per_epoch=updates, **{**values, **changes})


@pytest.mark.slow
@pytest.mark.slow_cases("ipu")
@pytest.mark.parametrize("name", ["host", "ipu"])
def test_both_sessions_scale_and_skip_no_update(name):
    """In 32 bits a scale that is a power of two does not change a byte."""
    program = scaled_program(24)
    images, labels = data(24 * program.global_batch_size, 4)
    with installed():
        weights, slots, events = train(session_on(name, program), program, images, labels)
        plain = dataclasses.replace(program, auto_loss_scaling=False)
        expected = train(session_on(name, plain), plain, images, labels)[0]
    assert [event.loss_scaling for event in events] == [1, 2, 2, 4, 4, 8]
    assert slots[LOSS_SCALE] == 8
    for key in expected:
        np.testing.assert_array_equal(weights[key], expected[key], err_msg=key)


# Beside the next: the same on the host, and test_both_sessions_scale_and_skip_no_update[ipu].
@pytest.mark.slow_cases("host-16.32", "ipu-16.16")
@pytest.mark.parametrize("name, precision", [("ipu", "16.16"), ("host", "16.16"), ("host", "16.32")])
def test_the_scale_rises_in_16_bits(name, precision):
    program = scaled_program(8, precision=precision)
    images, labels = data(8 * program.global_batch_size, 4)
    with installed():
        weights, _, events = train(session_on(name, program), program, images, labels)
    assert [event.loss_scaling for event in events] == [1, 2]
    assert all(np.isfinite(value).all() for value in weights.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, precision",
    [
        ("host", "16.32"),
        pytest.param("host", "16.16", marks=pytest.mark.slow),
        pytest.param("host", "32.32", marks=pytest.mark.slow),
        pytest.param("ipu", "32.32", marks=pytest.mark.slow),
    ],
)
def test_large_gradients_halve_the_scale_and_continued_runs_keep_it(name, precision):
    """The images are so bright that gradients times 64 are beyond 2**13, but times 16 are not."""
    whole = scaled_program(24, replicas=1, precision=precision)
    images, labels = data(24 * whole.global_batch_size, 4)
    images = images * np.float32(40.0)
    start = make_model("none", 3)
    weights = {key: value.numpy() for key, value in named_weights(start).items()}
    slots = {LOSS_SCALE: np.float32(4096), "loss_scale/beyond": np.float32(0)}
    with installed():
        first = train(session_on(name, whole), whole, images, labels, (weights, slots, 0))
        scales = [event.loss_scaling for event in first[2]]
        assert scales[-1] < 4096 and scales[0] == 4096 and scales[1] == 2048
        # Starts in the middle between two adjustments.
        part = scaled_program(12, replicas=1, precision=precision)
        middle = train(session_on(name, part), part, images, labels, (weights, slots, 0))
        assert middle[1]["loss_scale/beyond"] > 0
        rest = train(session_on(name, whole), whole, images, labels, (*middle[:2], 12))
    assert [event.loss_scaling for event in rest[2]] == scales[3:]
    for actual, expected in zip(rest[:2], first[:2]):
        for key in expected:
            np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"optimizer": "lars"}, "--optimizer lars"),
        ({"optimizer_params": "{momentum: 0.9}"}, "momentum 0.9"),
        ({"weight_decay": "0.1"}, "--weight-decay 0.1"),
        ({"lr_schedule": "cosine"}, "--lr-schedule cosine"),
        ({"lr_warmup_params": "{warmup_mode: shift, warmup_epochs: 1}"}, "--lr-warmup-params"),
    ],
)
def test_automatic_loss_scaling_is_for_plain_sgd(options, named):
    flags = {"auto_loss_scaling": True, "precision": "16.16", "dataset": "digits"}
    plain = {"optimizer": "sgd", "optimizer_params": "{momentum: 0}", "weight_decay": "0"}
    plain.update(
        lr_schedule="const", lr_schedule_params="{initial_learning_rate: 0.1}", lr_warmup_params="none"
    )
    config = resolve("train", {**flags, **plain}, model="lenet").config
    assert program_of(config, 1000, seed=0).auto_loss_scaling
    if "lr_schedule" in options:
        plain.pop("lr_schedule_params")
    config = resolve("train", {**flags, **plain, **options}, model="lenet").config
    with pytest.raises(ConfigurationError, match="--auto-loss-scaling does not go with " + named) as error:
        make_layout(config)
    assert error.value.hint.startswith("use --")


def test_own_loss_scale_is_not_used_beside_automatic_loss_scaling():
    config = dataclasses.replace(RunConfig(), auto_loss_scaling=True, loss_scaling=128.0, precision="16.32")
    program = program_of(config, 1000, seed=0)
    assert program.auto_loss_scaling and any("--loss-scaling 128 is not used" in w for w in program.warnings)
    assert not program_of(dataclasses.replace(config, precision="32.32"), 1000, seed=0).auto_loss_scaling
    assert json.loads(program.to_json())["auto_loss_scaling"]


@pytest.mark.slow
def test_cut_run_continues_with_its_scale_and_statistics(tmp_path, monkeypatch):
    """The cut is in the middle between two adjustments; moving statistics move once per weight update."""
    monkeypatch.chdir(tmp_path)
    options = {
        "dataset": "digits",
        "limit_train": "96",
        "limit_eval": "8",
        "seed": "5",
        "num_epochs": "1",
        "micro_batch_size": "4",
        "gradient_accumulation_count": "2",
        "validation": "False",
        "norm_layer": "custom_batch_norm",
        "precision": "16.16",
        "auto_loss_scaling": True,
        "optimizer": "sgd",
        "optimizer_params": "{momentum: 0}",
        "weight_decay": "0",
        "device": "cpu",
        "lr_schedule": "const",
        "learning_rate": "0.01",
        "lr_warmup_params": "none",
        "ckpts_per_epoch": "4",
    }
    run, _ = end_to_end.train(tmp_path / "whole", "toy_model_bn", options)
    program = run.context.program
    assert program.weight_updates_per_execution == 3 and program.auto_loss_scaling
    expected = end_to_end.files(tmp_path / "whole")
    row = json.loads(expected["metrics.jsonl"])
    assert (row["weight_updates"], row["loss_scaling"]) == (12, 2)
    assert cut_after_six(tmp_path / "cut", options)
    end_to_end.train(tmp_path / "cut", "toy_model_bn", options, resume=True)
    end_to_end.assert_same(tmp_path / "cut", expected)


def cut_after_six(folder, options) -> bool:
    """Ends a run right after the checkpoint of the sixth weight update."""
    events = end_to_end.training(folder, "toy_model_bn", options).events()
    for event in events:
        if isinstance(event, CheckpointSaved) and (folder / "checkpoints/checkpoint-00000006.npz").exists():
            events.close()
            return True
    return False
