"""``custom_batch_norm`` against the naive loop: moving statistics move once per weight update, on both sessions."""

import dataclasses

import numpy as np
import pytest
from poplar_double import installed
from support.reference import run_naive
from support.sessions import CPU, PLAIN, SIZE, data, make_model, make_program, run, with_fused

from ipucnn.config.options import RunConfig
from ipucnn.models.layers.micro_batches import BatchNormalization
from ipucnn.models.names import named_weights
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession

UPDATES = 3


def train(session, program, images, labels, optimizer=PLAIN):
    """Returns the weights after training; checks that no pass over batches measured statistics."""
    trained = run(session, make_model("custom"), program, optimizer, images, labels)
    assert trained.statistics == "running"
    return trained.weights


def on_host(program, images, labels, fused=0, **more):
    config = dataclasses.replace(RunConfig(), precision=program.precision)
    return train(HostSession(CPU, config=config), with_fused(program, fused), images, labels, **more)


def on_ipus(program, images, labels, **more):
    config = dataclasses.replace(RunConfig(), num_replicas=program.num_replicas, precision=program.precision)
    with installed():
        return train(create_session("auto", config=config), program, images, labels, **more)


def data_of(program):
    """Returns images whose mean and spread differ between replicas and micro-batches, and labels."""
    images, labels = data(program.num_weight_updates * program.global_batch_size, 7)
    spread = np.random.default_rng(8).uniform(0.5, 2, (len(images), 1, 1, 1))
    return (images * spread).astype(np.float32), labels


def compare(session, accumulate, replicas, batch=2, optimizer=PLAIN, tolerance=1e-5, **options):
    """Compares all weights and statistics with those of the naive loop."""
    changes = options.pop("changes", {})
    program = make_program(batch, accumulate, replicas, updates_per_epoch=UPDATES, **changes)
    images, labels = data_of(program)
    naive, _, _ = run_naive("custom", program, optimizer, images, labels)
    weights = session(program, images, labels, optimizer=optimizer, **options)
    assert set(weights) == set(naive.weights)
    for name, value in naive.weights.items():
        np.testing.assert_allclose(weights[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
    return weights


# Devices have 1, 2 or 4 IPUs, but not 3.
HOST_GRID = [(accumulate, replicas) for accumulate in range(1, 10) for replicas in range(1, 5)]
IPU_GRID = [(accumulate, replicas) for accumulate, replicas in HOST_GRID if replicas != 3]


def _some(grid, quick):
    """Returns the whole grid, with all but the quick pairs marked as slow."""
    return [pair if pair in quick else pytest.param(*pair, marks=pytest.mark.slow) for pair in grid]


@pytest.mark.slow_cases("1-1", "2-4", "9-3")
@pytest.mark.parametrize("accumulate, replicas", _some(HOST_GRID, [(1, 1), (2, 4), (5, 2), (9, 3)]))
def test_the_host_equals_the_naive_loop(accumulate, replicas):
    """Holds for any number of fused micro-batches: one, all, or a divisor of their number."""
    count = accumulate * replicas
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    compare(on_host, accumulate, replicas, fused=divisors[(accumulate + replicas) % len(divisors)])


@pytest.mark.slow
@pytest.mark.slow_cases("1-4", "9-2")
@pytest.mark.parametrize("accumulate, replicas", _some(IPU_GRID, [(1, 4), (3, 1), (9, 2)]))
def test_ipus_equal_the_naive_loop(accumulate, replicas):
    compare(on_ipus, accumulate, replicas)


PIPELINE = dict(num_stages=2, pipeline_splits=("relu0",), device_mapping=(0, 1), ipus_per_replica=2)


@pytest.mark.slow
@pytest.mark.slow_cases("distributed-on_host", "pipeline-on_ipus")
@pytest.mark.parametrize("session", [on_host, on_ipus])
@pytest.mark.parametrize(
    "accumulate, replicas, changes",
    [(2, 4, {"dbn_replica_group_size": 2}), (4, 2, {**PIPELINE, "num_ipus": 4})],
    ids=["distributed", "pipeline"],
)
def test_distributed_batch_norm_and_pipelines_equal_the_naive_loop(session, accumulate, replicas, changes):
    """Replicas of a group share their statistics; pipelines need no pass that measures them."""
    compare(session, accumulate, replicas, changes=changes)


@pytest.mark.slow
@pytest.mark.parametrize("session, method", [(on_host, "running_mean"), (on_ipus, "sum")])
def test_reductions_loss_scale_and_optimizers_equal_the_naive_loop(session, method):
    changes = {"gradient_accumulation_reduction_method": method, "loss_scaling": 128.0}
    optimizer = ("sgd", {"momentum": 0.9}, {"weight_decay": 0.1, "l2_regularization": 0.1})
    compare(session, 3, 2, changes=changes, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.slow_cases("on_ipus-16.16", "on_ipus-16.32")
@pytest.mark.parametrize("session, precision", [(on_ipus, "16.16"), (on_ipus, "16.32"), (on_host, "16.16")])
def test_statistics_of_16_bit_networks_are_kept_in_32_bits(session, precision):
    weights = compare(session, 2, 2, batch=4, tolerance=2e-2, changes={"precision": precision})
    name = "norm0/moving_variance"
    assert np.any(weights[name] != weights[name].astype(np.float16))


@pytest.mark.slow
def test_prediction_leaves_the_statistics_unchanged():
    """Evaluation rounds the inputs of layers; nothing measures these statistics anew, so they must not be rounded."""
    config = dataclasses.replace(RunConfig(), precision="16.16", nanoo=True)
    model = make_model("custom")
    predictor = create_session("cpu", config=config).predictor(model)
    variance = named_weights(model)["norm0/moving_variance"]
    value = np.full(variance.shape, 100_000.123, np.float32)
    variance.assign(value)
    predictor.predict([np.zeros((2, SIZE, SIZE, 2), np.float32)])
    assert variance.numpy().tobytes() == value.tobytes()


@pytest.mark.slow
def test_outside_a_session_each_batch_is_a_weight_update():
    model = make_model("custom")
    program = make_program(4, 1, 1, updates_per_epoch=1)
    images, labels = data_of(program)
    naive, _, _ = run_naive("custom", program, PLAIN, images, labels)
    model(images, training=True)
    for name, variable in named_weights(model).items():
        if "moving" in name:
            np.testing.assert_allclose(variable.numpy(), naive.weights[name], rtol=1e-5, atol=1e-5)
    config = model.get_layer("norm0").get_config()
    assert config["moves_once"] and BatchNormalization.from_config(config).moves_once
