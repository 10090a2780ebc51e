"""``custom_batch_norm`` against a NumPy loop: moving statistics move once per weight update, on both sessions."""

import dataclasses
from typing import Any, Dict

import numpy as np
import pytest
from poplar_double import installed
from support.sessions import CPU, SGD, batches, compile_session, constant, make_program
from tensorflow import keras

from ipucnn.config.options import RunConfig
from ipucnn.models.layers.micro_batches import BatchNormalization
from ipucnn.models.names import named_weights
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession

SIDE, CHANNELS, CLASSES, MOMENTUM, EPSILON, UPDATES = 3, 2, 3, 0.7, 1.001e-5, 3
MIX = np.float32([[0.5, -1.0, 0.25], [1.5, 0.75, -0.5]])


def make_model() -> Any:
    """Returns a norm of the images, a linear mix of channels, and a norm of that."""
    keras.backend.clear_session()
    inputs = keras.Input((SIDE, SIDE, CHANNELS), name="input")
    options = {"momentum": MOMENTUM, "epsilon": EPSILON, "moves_once": True}
    x = BatchNormalization(name="norm0", **options)(inputs)
    x = keras.layers.Conv2D(3, 1, use_bias=False, name="mix")(x)
    x = BatchNormalization(name="norm1", **options)(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(x))
    model.get_layer("mix").set_weights([MIX[None, None]])
    rng = np.random.default_rng(3)
    model.get_layer("logits").set_weights([rng.normal(size=(3, CLASSES)), rng.normal(size=CLASSES)])
    return model


def make_data(samples: int) -> Any:
    """Returns images whose mean and spread differ between replicas and micro-batches, and labels."""
    rng = np.random.default_rng(7)
    images = rng.normal(size=(samples, SIDE, SIDE, CHANNELS)) * rng.uniform(0.5, 2, (samples, 1, 1, 1))
    images += rng.normal(0, 1, (samples, 1, 1, CHANNELS))
    return images.astype(np.float32), rng.integers(0, CLASSES, samples).astype(np.int32)


def numpy_loop(program, images, updates: int) -> Dict[str, np.ndarray]:
    """Returns moving statistics in float64, for constant weights, gamma 1 and beta 0."""
    p, size = program, program.micro_batch_size
    moving = {}
    for name, channels in (("norm0", CHANNELS), ("norm1", 3)):
        moving[f"{name}/moving_mean"] = np.zeros(channels)
        moving[f"{name}/moving_variance"] = np.ones(channels)
    position = 0
    for _ in range(updates):
        means: Dict[str, Any] = {name: [[] for _ in range(p.num_replicas)] for name in ("norm0", "norm1")}
        variances: Dict[str, Any] = {name: [[] for _ in range(p.num_replicas)] for name in means}
        n = size * SIDE * SIDE
        for _ in range(p.gradient_accumulation_count):
            for first in range(0, p.num_replicas, p.dbn_replica_group_size):
                group_samples = size * p.dbn_replica_group_size
                x = images[position : position + group_samples].astype(np.float64)
                position += group_samples
                for name in ("norm0", "norm1"):
                    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
                    for r in range(first, first + p.dbn_replica_group_size):
                        means[name][r].append(mean)
                        # The kernel's variance, unbiased by the number of values in one micro-batch.
                        variances[name][r].append(variance * n / (n - 1))
                    if name == "norm0":
                        x = ((x - mean) / np.sqrt(variance + EPSILON)) @ MIX
        for name in means:
            m = [np.mean(per_micro_batch, axis=0) for per_micro_batch in means[name]]
            v = [np.mean(per_micro_batch, axis=0) for per_micro_batch in variances[name]]
            mean = np.mean(m, axis=0)
            replicas = p.num_replicas
            variance = np.mean([(n - 1) / n * v_r + (m_r - mean) ** 2 for m_r, v_r in zip(m, v)], axis=0) * (
                replicas * n / (replicas * n - 1)
            )
            for kind, new in (("moving_mean", mean), ("moving_variance", variance)):
                key = f"{name}/{kind}"
                moving[key] = MOMENTUM * moving[key] + (1 - MOMENTUM) * new
    return moving


def run(session, program, images, labels, rate=0.0, optimizer=SGD, state=None):
    """Returns the weights after training; checks that no pass over batches measured statistics."""
    session = compile_session(session, make_model(), program, optimizer, constant(rate))
    for name, value in (state or {}).items():
        session.state.weights[name].assign(value)
    make_dataset = batches(program, images, labels)
    list(session.train(make_dataset))
    assert session.recompute_statistics(make_dataset) == 0
    return {name: value.numpy() for name, value in session.state.weights.items()}


def on_host(program, images, labels, fused=0, precision="32.32", **more):
    config = dataclasses.replace(RunConfig(), precision=precision)
    return run(HostSession(CPU, config=config), program.with_fused(fused), images, labels, **more)


def on_ipus(program, images, labels, precision="32.32", **more):
    config = dataclasses.replace(RunConfig(), num_replicas=program.num_replicas, precision=precision)
    with installed():
        return run(create_session("auto", config=config), program, images, labels, **more)


def assert_statistics(weights, expected, tolerance=1e-6):
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=tolerance, err_msg=name)


def compare(session, accumulate, replicas, names=None, batch=2, **options):
    changes = options.pop("changes", {})
    program = make_program(batch, accumulate, replicas, updates_per_epoch=UPDATES, **changes)
    images, labels = make_data(UPDATES * program.global_batch_size)
    expected = numpy_loop(program, images, UPDATES)
    weights = session(program, images, labels, **options)
    assert_statistics(weights, {k: v for k, v in expected.items() if names is None or k.startswith(names)})


# Devices have 1, 2 or 4 IPUs, but not 3.
HOST_GRID = [(accumulate, replicas) for accumulate in range(1, 10) for replicas in range(1, 5)]
IPU_GRID = [(accumulate, replicas) for accumulate, replicas in HOST_GRID if replicas != 3]


def _some(grid, quick):
    """Returns the whole grid, with all but the quick pairs marked as slow."""
    return [pair if pair in quick else pytest.param(*pair, marks=pytest.mark.slow) for pair in grid]


@pytest.mark.slow_cases("1-1", "2-4", "9-3")
@pytest.mark.parametrize("accumulate, replicas", _some(HOST_GRID, [(1, 1), (2, 4), (5, 2), (9, 3)]))
def test_the_host_equals_a_numpy_loop(accumulate, replicas):
    """Holds for any number of fused micro-batches: one, all, or a divisor of their number."""
    count = accumulate * replicas
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    compare(on_host, accumulate, replicas, fused=divisors[(accumulate + replicas) % len(divisors)])


@pytest.mark.slow_cases("1-4", "9-2")
@pytest.mark.parametrize("accumulate, replicas", _some(IPU_GRID, [(1, 4), (3, 1), (9, 2)]))
def test_ipus_equal_a_numpy_loop(accumulate, replicas):
    compare(on_ipus, accumulate, replicas)


@pytest.mark.parametrize("session", [on_host, on_ipus])
def test_distributed_batch_norm_shares_statistics(session):
    compare(session, 2, 4, changes={"dbn_replica_group_size": 2})


PIPELINE = dict(num_stages=2, pipeline_splits=("norm1",), device_mapping=(0, 1), ipus_per_replica=2)


@pytest.mark.parametrize("session", [on_host, on_ipus])
def test_pipelines_need_no_statistics_pass(session):
    compare(session, 4, 2, changes={**PIPELINE, "num_ipus": 4})


@pytest.mark.parametrize("session, method", [(on_host, "running_mean"), (on_ipus, "sum")])
def test_reduction_loss_scale_and_optimizer_do_not_affect_the_statistics(session, method):
    """Weights change, but the statistics of the images, before the first weight, stay the same."""
    changes = {"gradient_accumulation_reduction_method": method, "loss_scaling": 128.0}
    optimizer = ("sgd", {"momentum": 0.9}, {"weight_decay": 0.1, "l2_regularization": 0.1})
    compare(session, 3, 2, names="norm0", changes=changes, optimizer=optimizer, rate=0.1)


@pytest.mark.parametrize("session", [on_host, pytest.param(on_ipus, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_statistics(session):
    """Statistics are saved as weights, and nothing else is needed to resume."""
    whole = make_program(2, 3, 2, updates_per_epoch=4)
    half = make_program(2, 3, 2, updates_per_epoch=2)
    images, labels = make_data(4 * whole.global_batch_size)
    expected = session(whole, images, labels)
    first = session(half, images, labels)
    second = session(
        half, images[2 * half.global_batch_size :], labels[2 * half.global_batch_size :], state=first
    )
    for name, value in expected.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_both_sessions_train_the_same_weights():
    program = make_program(2, 3, 2, updates_per_epoch=UPDATES)
    images, labels = make_data(UPDATES * program.global_batch_size)
    host, ipus = (session(program, images, labels, rate=0.1) for session in (on_host, on_ipus))
    assert list(host) == list(ipus)
    for name in host:
        np.testing.assert_allclose(ipus[name], host[name], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.slow_cases("on_ipus-16.16", "on_ipus-16.32")
@pytest.mark.parametrize("session, precision", [(on_ipus, "16.16"), (on_ipus, "16.32"), (on_host, "16.16")])
def test_statistics_of_16_bit_networks_are_kept_in_32_bits(session, precision):
    program = make_program(4, 2, 2, updates_per_epoch=UPDATES, precision=precision)
    images, labels = make_data(UPDATES * program.global_batch_size)
    weights = session(program, images, labels, precision=precision)
    assert_statistics(weights, numpy_loop(program, images, UPDATES), tolerance=2e-2)
    name = "norm0/moving_variance"
    assert np.any(weights[name] != weights[name].astype(np.float16))


def test_prediction_leaves_the_statistics_unchanged():
    """Evaluation rounds the inputs of layers; nothing measures these statistics anew, so they must not be rounded."""
    config = dataclasses.replace(RunConfig(), precision="16.16", nanoo=True)
    session = create_session("cpu", config=config)
    model = make_model()
    session.prepare_evaluation(model, None)
    variance = named_weights(model)["norm0/moving_variance"]
    value = np.full(variance.shape, 100_000.123, np.float32)
    variance.assign(value)
    session.predict([np.zeros((2, SIDE, SIDE, CHANNELS), np.float32)])
    assert variance.numpy().tobytes() == value.tobytes()


def test_outside_a_session_each_batch_is_a_weight_update():
    model = make_model()
    images, _ = make_data(4)
    model(images, training=True)
    moving = {name: v.numpy() for name, v in named_weights(model).items() if "moving" in name}
    assert_statistics(moving, numpy_loop(make_program(4, 1, 1), images, 1))
    config = model.get_layer("norm0").get_config()
    assert config["moves_once"] and BatchNormalization.from_config(config).moves_once
