"""The Poplar session on the test double of the SDK, against the host session: same Program, same weights."""

import dataclasses

import numpy as np
import poplar_double
import pytest
import tensorflow as tf
from poplar_double import installed
from poplar_double.exchange import Alone
from support.poprun import poprun
from support.sessions import (
    CLASSES,
    CPU,
    SGD,
    SIZE,
    chain,
    data,
    frozen,
    make_model,
    make_program,
    make_trainer,
    run,
    with_fused,
)
from tensorflow import keras

from ipucnn.compat import KERAS_3, tf_variable
from ipucnn.config.options import RunConfig
from ipucnn.models.names import named_weights
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.poplar import prediction
from ipucnn.sessions.poplar.optimizer import DeviceOptimizer, WeightUpdate
from ipucnn.sessions.poplar.prediction import PoplarPredictor
from ipucnn.sessions.session import ExecutionFinished, Stopped
from ipucnn.training.losses import Loss
from ipucnn.training.optimizer_settings import make_settings
from ipucnn.training.optimizers import Optimizer

SPLIT = "relu0"


def both(norm, program, optimizer=SGD, dropout=0.0, sdk="3.4", **options):
    """Runs a program on the host and on the test double, micro-batch by micro-batch; returns results and machine."""
    weights, still = options.get("weights"), options.get("frozen", ())
    images, labels = data(program.num_weight_updates * program.global_batch_size, 5)
    unfused = with_fused(program, program.dbn_replica_group_size)
    host_session = HostSession(CPU, config=config_of(program, options))
    model = frozen(make_model(norm, dropout=dropout), still)
    host = run(host_session, model, unfused, optimizer, images, labels, weights=weights)
    return (host, *on_double(norm, program, optimizer, dropout, sdk, **options))


def config_of(program, options):
    """Returns the configuration of a session; the options weights and frozen belong to the network instead."""
    config_options = {name: value for name, value in options.items() if name not in ("weights", "frozen")}
    values = {"num_replicas": program.num_replicas, "dropout_layer": "stateless", **config_options}
    return RunConfig(**values)


def on_double(norm, program, optimizer=SGD, dropout=0.0, sdk="3.4", **options):
    """Runs a program on the test double alone; returns its result and the machine."""
    images, labels = data(program.num_weight_updates * program.global_batch_size, 5)
    with installed(sdk=sdk) as machine:
        session = create_session("auto", config=config_of(program, options))
        model = frozen(make_model(norm, dropout=dropout), options.get("frozen", ()))
        return run(
            session, model, program, optimizer, images, labels, weights=options.get("weights")
        ), machine


def assert_same(host, poplar, tolerance=1e-6):
    for on_host, on_ipus in zip(host[:2], poplar[:2]):
        assert list(on_host) == list(on_ipus)
        for name in on_host:
            np.testing.assert_allclose(on_ipus[name], on_host[name], rtol=0, atol=tolerance, err_msg=name)
    assert host[3] == poplar[3]


PIPELINE = dict(num_stages=2, pipeline_splits=(SPLIT,), device_mapping=(0, 1), ipus_per_replica=2)
GROUPED = {**PIPELINE, "num_ipus": 4}


def test_ipus_compute_micro_batches_one_by_one():
    """Replicas that share batch norm's statistics do, too: each has an element of the data set of its own."""
    program = make_program(4, 2, 4, dbn_replica_group_size=2)
    with installed():
        session = create_session("auto", config=config_of(program, {}))
        division = session.divide(make_model("batch"), program)
    assert (division.fused_micro_batches, division.samples_per_group, division.num_groups) == (1, 4, 8)


@pytest.mark.slow
@pytest.mark.slow_cases("cross_entropy-1")
@pytest.mark.parametrize(("loss", "stages"), [("cross_entropy", 1), ("bce_dice", 2)])
def test_masks_of_three_classes_as_on_the_host(loss, stages):
    """Each pixel has a label: weights equal the host's, and so do the predicted logits."""

    def network():
        first = keras.layers.Conv2D(4, 3, padding="same", name="conv0")
        layers = keras.layers.ReLU(name=SPLIT), keras.layers.Conv2D(3, 1, name="logits")
        return chain((SIZE, SIZE, 2), first, *layers, seed=3)

    program = make_program(2, 4, 2, **(GROUPED if stages > 1 else {}))
    images, _ = data(program.num_weight_updates * program.global_batch_size, 5)
    labels = np.random.default_rng(6).integers(0, 3, images.shape[:3]).astype(np.int32)
    config = RunConfig(num_replicas=2)
    optimizer = ("sgd", {"momentum": 0.9}, {})
    host = HostSession(CPU, config=config)
    expected = run(host, network(), with_fused(program, 1), optimizer, images, labels, loss)
    with installed():
        session = create_session("auto", config=config)
        result = run(session, network(), program, optimizer, images, labels, loss)
        logits = result.trainer.predictor.predict([images[:2], images[2:4]])
    assert_same(expected, result)
    for on_ipus, on_host in zip(logits, expected.trainer.predictor.predict([images[:2], images[2:4]])):
        np.testing.assert_allclose(on_ipus, on_host, rtol=0, atol=1e-5)
        assert on_ipus.shape == (2, SIZE, SIZE, 3)


CLIPPED = ("sgd", {"momentum": 0.9}, {"clip_gradient_norm": 0.3, "ema_decay": 0.1})


@pytest.mark.slow_cases("statistics not clipped", "sum")
@pytest.mark.slow_cases("plain", "distributed", "running mean", "pipeline", "clipped")
@pytest.mark.parametrize(
    ("norm", "batch", "accumulate", "replicas", "changes", "optimizer"),
    [
        pytest.param("batch", 4, 1, 1, {}, SGD, id="plain"),
        pytest.param(
            *("batch", 4, 3, 2, {"gradient_accumulation_reduction_method": "running_mean"}, SGD),
            id="running mean",
        ),
        pytest.param("batch", 4, 2, 4, {"dbn_replica_group_size": 2}, SGD, id="distributed"),
        pytest.param("batch", 4, 4, 2, GROUPED, SGD, id="pipeline"),
        pytest.param(
            *("group", 2, 4, 2),
            {**GROUPED, "gradient_accumulation_reduction_method": "sum", "loss_scaling": 64.0},
            SGD,
            id="sum",
        ),
        # The norm is that of all stages' gradients together; moving statistics are averaged, too.
        pytest.param("batch", 4, 4, 2, {}, CLIPPED, id="clipped"),
        pytest.param("group", 4, 4, 2, GROUPED, CLIPPED, id="clipped in a pipeline"),
        # On IPUs, custom batch norm passes its statistics as gradients, which are not clipped.
        pytest.param("custom", 4, 4, 2, {}, CLIPPED, id="statistics not clipped"),
    ],
)
def test_three_weight_updates_as_on_the_host(norm, batch, accumulate, replicas, changes, optimizer):
    program = make_program(batch, accumulate, replicas, updates_per_epoch=3, **changes)
    host, poplar, _ = both(norm, program, optimizer)
    assert_same(host, poplar)
    averages = sum(name.endswith("/average") for name in host[1])
    assert averages == (len(host[0]) if optimizer is CLIPPED else 0)
    ends = [[e for e in side[2] if isinstance(e, ExecutionFinished)] for side in (host, poplar)]
    assert [e.weight_updates for e in ends[0]] == [e.weight_updates for e in ends[1]]
    if program.num_replicas == 1 or program.num_stages == 1:
        for on_host, on_ipus in zip(*ends):
            assert on_ipus.metrics["loss"] == pytest.approx(on_host.metrics["loss"], abs=1e-4)
            assert on_ipus.metrics["accuracy"] == pytest.approx(on_host.metrics["accuracy"], abs=1e-6)


@pytest.mark.slow_cases("pipeline", "batch", "group")
@pytest.mark.parametrize(
    ("norm", "still", "changes"),
    [
        ("batch", ("conv0", "norm0", "conv1"), {}),
        # The first of two stages is frozen as a whole; the other's statistics are measured.
        ("batch", ("conv0", "norm0"), GROUPED),
        ("group", ("norm0", "conv1"), {}),
    ],
    ids=["batch", "pipeline", "group"],
)
def test_frozen_layers_as_on_the_host(norm, still, changes):
    program = make_program(4, 4, 2, updates_per_epoch=2, **changes)
    # In a pipeline the SDK moves no statistics, so there are no averages to compare.
    optimizer = ("sgd", {"momentum": 0.9}, {"weight_decay": 0.1, "ema_decay": 0.0 if changes else 0.5})
    host, poplar, _ = both(norm, program, optimizer, frozen=still)
    assert_same(host, poplar, 1e-5)
    start = {name: variable.numpy() for name, variable in named_weights(make_model(norm)).items()}
    for name, value in start.items():
        if name.split("/")[0] in still:
            np.testing.assert_array_equal(poplar[0][name], value, err_msg=name)
            assert not any(slot.startswith(f"{name}/") for slot in poplar[1]), name


@pytest.mark.slow
@pytest.mark.slow_cases("16.16-batch-2-changes0", "16.16-group-2-changes1")
@pytest.mark.parametrize(
    ("precision", "norm", "replicas", "changes"),
    [
        ("16.16", "batch", 2, {}),
        ("16.16", "group", 2, GROUPED),
        ("16.32", "batch", 2, {}),
    ],
)
def test_16_bits_as_on_the_host(precision, norm, replicas, changes):
    """The 16-bit numbers are equal up to a neighbour or two; the 32-bit weights of 16.32 are as close."""
    accumulate = 4 if changes else 2
    program = make_program(
        4, accumulate, replicas, updates_per_epoch=3, precision=precision, loss_scaling=8.0
    )
    program = dataclasses.replace(program, **changes)
    start = {name: v.numpy() for name, v in named_weights(make_model(norm)).items()}
    host, poplar, _ = both(norm, program, precision=precision, dropout_layer="poprand")
    assert list(host[0]) == list(poplar[0])
    if precision == "16.16":
        # Stock Keras 2.6 holds the remeasured statistics in 32 bits, the SDK's in 16.
        for name in [name for name in poplar[0] if "moving" in name]:
            poplar[0][name] = poplar[0][name].astype(np.float16).astype(np.float32)
    for name, on_host in host[0].items():
        on_ipus, moved = poplar[0][name], np.abs(on_host - start[name]).max()
        step = np.spacing(np.maximum(np.abs(on_host), moved).astype(np.float16)).astype(np.float32)
        assert (np.abs(on_ipus - on_host) <= 2 * step).all(), name
        if precision == "16.16":
            for side in (on_ipus, on_host):
                np.testing.assert_array_equal(side, side.astype(np.float16), err_msg=name)
        assert moved > 3 * np.abs(on_ipus - on_host).max(), name
    if precision == "16.16":
        other = sum((poplar[0][name] != value).sum() for name, value in host[0].items())
        assert other < 0.05 * sum(value.size for value in host[0].values())


@pytest.mark.parametrize(
    "optimizer",
    [
        ("sgd", {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1, "l2_regularization": 0.01}),
        ("lars", {"momentum": 0.9}, {"ema_decay": 0.9}),
        ("adam", {}, {"clip_gradient_norm": 3.0}),
        ("adamw", {}, {"weight_decay": 0.1}),
        ("rmsprop", {"momentum": 0.5}, {}),
    ],
)
def test_optimizers_as_on_the_host(optimizer):
    """Compares the Keras optimizer that IPUs run with the host's own, with the loss scale removed."""
    settings = make_settings(optimizer[0], optimizer[1], global_batch_size=8, **optimizer[2])
    rng = np.random.default_rng(1)
    start = [rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=4).astype(np.float32)]
    gradients = [[rng.normal(size=s.shape).astype(np.float32) for s in start] for _ in range(4)]
    rates = [0.1, 0.05, 0.2, 0.01]
    host = [tf.Variable(s) for s in start]
    expected = Optimizer(settings, dict(zip("ab", host)))
    for i, step in enumerate(gradients):
        expected.apply([tf.constant(g) for g in step], tf.constant(rates[i]), tf.constant(i, tf.int64))
    device = [keras.Variable(s) if hasattr(keras, "Variable") else tf.Variable(s) for s in start]
    update_rule = Optimizer(settings, dict(zip("ab", map(tf_variable, device))))
    update = WeightUpdate(update_rule, 2, 8.0, [], None)
    keras_optimizer = DeviceOptimizer(update)
    for first in (0, 2):
        update.set_rates(first, rates[first : first + 2])
        keras_optimizer.iterations.assign(first)
        for step in gradients[first : first + 2]:
            keras_optimizer.apply_gradients([(tf.constant(8 * g), v) for g, v in zip(step, device)])
    for on_host, on_ipus in zip(host, device):
        np.testing.assert_allclose(tf_variable(on_ipus).numpy(), on_host.numpy(), rtol=0, atol=1e-6)
    for name in expected.slots:
        np.testing.assert_allclose(
            update_rule.slots[name].numpy(), expected.slots[name].numpy(), rtol=0, atol=1e-5
        )


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has its own way with strategies; the SDK has Keras 2.6")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_an_optimizer_finds_the_weights_of_a_mirroring_strategy(policy):
    """PopDist does the same: Keras passes an update one component of a mirrored variable, perhaps under a cast."""
    settings = make_settings("sgd", {"momentum": 0.9}, global_batch_size=8)
    start, gradients = np.float32([1, 2, 3]), np.float32([[1, 0, 2], [0.5, 4, -1]])
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        layer = keras.layers.Layer(dtype=policy)
        mirrored = layer.add_weight("a", shape=(3,), initializer="zeros")
        mirrored.assign(start)
        moving = tf.Variable([5.0], trainable=False)
        update_rule = Optimizer(settings, {"a": mirrored})
        update = WeightUpdate(update_rule, 2, 4.0, [moving], lambda value: value * 2)
        keras_optimizer = DeviceOptimizer(update)
        keras_optimizer.iterations.assign(0)
    update.set_rates(0, [0.1, 0.2])

    @tf.function
    def step(gradient):
        strategy.run(lambda g: keras_optimizer.apply_gradients([(g, mirrored)]), args=(gradient,))

    weight, momentum = start.copy(), np.zeros(3, np.float32)
    for gradient, rate in zip(gradients, (0.1, 0.2)):
        step(tf.constant(4 * gradient))
        momentum = 0.9 * momentum - rate * gradient
        weight = weight + momentum
    np.testing.assert_allclose(mirrored.numpy(), weight, rtol=1e-6)
    assert moving.numpy() == 20


@pytest.mark.slow
def test_statistics_of_16_bits_are_those_of_the_replicas_that_share_them():
    program = make_program(
        2, 2, 2, updates_per_epoch=3, precision="16.16", loss_scaling=8.0, dbn_replica_group_size=2
    )
    host, poplar, machine = both("batch", program, precision="16.16")
    assert (
        host.statistics == poplar.statistics == "recomputed over 3 weight updates' batches"
        and machine.calls("predict")
    )
    for name in [name for name in host[0] if "moving_variance" in name]:
        assert np.mean(poplar[0][name] / host[0][name]) == pytest.approx(1, abs=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_evaluation_runs_several_batches_at_once(stages):
    """Executions are compiled once, for batches of any size."""
    network = make_model("group")
    program = make_program(2, 2, 1)
    if stages == 2:
        program = dataclasses.replace(program, **PIPELINE, num_ipus=2)
    images, _ = data(50, 8)
    sizes = [7, 1, 20, 3, 19]
    parts = np.split(images, np.cumsum(sizes)[:-1])
    config = RunConfig(pipeline_validation_model=stages == 2)
    with installed() as machine:
        session = create_session("auto", config=config)
        predictor = make_trainer(session, network, program, ("sgd", {}, {})).predictor
        given = list(predictor.logits((part, number) for number, part in enumerate(parts)))
        assert [len(logits) for _, logits in given] == sizes
        assert len(machine.calls("predict")) == 1
        few = predictor.predict([parts[1], parts[2]])
        assert [len(f) for f in few] == [1, 20]
        # padded to the existing execution
        assert len({call["per_execution"] for call in machine.calls("predict")}) == 1


@pytest.mark.slow_cases("1-16", "160-4")
@pytest.mark.parametrize(("largest_bytes", "joins"), [(2**28, 1), (2 * 4 * 4 * (CLASSES + 2), 4), (1, 16)])
def test_instances_exchange_once_per_execution_and_not_per_batch(largest_bytes, joins, monkeypatch):
    """With one exchange per batch, an evaluation of an image with 2209 patches seemed endless.  Instances exchange more
    often only if the memory for a joint exchange is too small.
    """
    poprun(monkeypatch, 1, total=2, local=1)
    monkeypatch.setattr(prediction, "_LARGEST_BYTES", largest_bytes)
    monkeypatch.setattr(PoplarPredictor, "_largest", 16)
    images, labels = data(16, 8)
    parts = (images, labels, np.ones(16, np.float32))
    batches = [tuple(tf.constant(part[i : i + 1]) for part in parts) for i in range(16)]
    network = make_model("group")
    expected = network(images, training=False).numpy()
    # One process represents both instances: flipping puts its row in the other's place, as if the other had the same.
    monkeypatch.setattr(
        Alone,
        "gather",
        lambda self, name, arrays: [arrays, [np.flip(a, 0) if np.ndim(a) else a for a in arrays]],
    )
    with installed() as machine:
        predictor = create_session("auto", config=RunConfig(num_replicas=2)).predictor(network)
        loss = Loss("cross_entropy")
        metrics = predictor.evaluate(batches, loss, lambda: False)
        # Labels, weights and logits of both, and whether one of them was stopped
        assert len(machine.calls("distributed.allreduce")) == 3 * joins + 1
        for n, ((_, truth, _), logits) in enumerate(predictor.logits(batches)):
            np.testing.assert_allclose(logits, np.stack([expected[n]] * 2), rtol=0, atol=1e-5)
            assert truth.numpy().tolist() == [labels[n]] * 2
        # For images alone, this instance computes the second half.
        before = len(machine.calls("distributed.allreduce"))
        shared = np.concatenate(
            [logits for _, logits in predictor.logits(batch[:1] for batch in 2 * batches)]
        )
        np.testing.assert_allclose(shared, np.concatenate([expected] * 2), rtol=0, atol=1e-5)
        assert len(machine.calls("distributed.allreduce")) == before + 1
        checks_of_stop = []
        with pytest.raises(Stopped):
            predictor.evaluate(
                batches * 3, loss, lambda: checks_of_stop.append(1) or len(checks_of_stop) == 3
            )
    assert metrics["accuracy"] == pytest.approx(np.mean(expected.argmax(-1) == labels))
    assert metrics["samples"] == 32


@pytest.mark.parametrize("name", ["sgd", "lars", "adam", "adamw", "rmsprop"])
def test_updates_of_16_bit_weights_are_rounded_32_bit_updates(name):
    params = {"momentum": 0.9, "nesterov": True} if name in ("sgd", "lars") else {}
    decay = 0.0 if name == "lars" else 0.05
    settings = make_settings(name, params, global_batch_size=8, weight_decay=decay, l2_regularization=0.01)
    rng = np.random.default_rng(2)
    start = rng.normal(size=(6, 5)).astype(np.float16)
    variables = [tf.Variable(start.astype(kind)) for kind in (np.float32, np.float16)]
    optimizers = [Optimizer(settings, {"a": variable}) for variable in variables]
    for i in range(4):
        gradient = tf.constant(rng.normal(size=start.shape).astype(np.float16))
        for optimizer in optimizers:
            optimizer.apply([tf.cast(gradient, tf.float32)], tf.constant(0.01), tf.constant(i, tf.int64))
    assert variables[1].dtype == tf.float16 and all(
        s.dtype == tf.float16 for s in optimizers[1].slots.values()
    )
    np.testing.assert_allclose(variables[1].numpy(), variables[0].numpy(), rtol=0, atol=5e-3)
    # A gradient whose square exceeds 16 bits leaves the weight finite.
    for i in range(3):
        optimizers[1].apply([tf.fill(start.shape, 1000.0)], tf.constant(0.01), tf.constant(4 + i, tf.int64))
    assert np.isfinite(variables[1].numpy()).all()


@pytest.mark.slow
def test_stateless_masks_depend_on_seed_and_micro_batch_and_differ_from_the_host(monkeypatch):
    """Any number of replicas draws the same masks: the host's, if the kernel had the CPU's generator."""
    one = make_program(4, 4, 1, updates_per_epoch=2)
    two = make_program(4, 2, 2, updates_per_epoch=2)
    host, poplar, _ = both("group", one, dropout=0.5)
    other, _ = on_double("group", two, dropout=0.5)
    for name, value in poplar[0].items():
        np.testing.assert_allclose(other[0][name], value, rtol=0, atol=1e-5, err_msg=name)
    assert any(np.abs(value - host[0][name]).max() > 1e-4 for name, value in poplar[0].items())
    monkeypatch.setattr(poplar_double, "_poprand", lambda uniform: uniform)
    assert_same(host, on_double("group", one, dropout=0.5)[0])
