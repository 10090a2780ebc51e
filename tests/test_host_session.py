"""The host session against a naive loop: micro-batches and replicas one at a time, NumPy optimizers."""

import threading
from typing import Dict

import numpy as np
import pytest
import tensorflow as tf
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support import sessions
from support.reference import run_naive
from support.refusals import check_raises
from support.sessions import (
    CLASSES,
    CPU,
    PLAIN,
    SGD,
    SIZE,
    chain,
    constant,
    data,
    make_model,
    make_program,
    run,
    with_fused,
)
from support.workers import Given
from tensorflow import keras

from ipucnn.config.options import RunConfig
from ipucnn.errors import InfeasibleError, MissingError
from ipucnn.filesystem import user_error_of
from ipucnn.models.names import named_weights
from ipucnn.sessions import factory
from ipucnn.sessions.host import division, updates
from ipucnn.sessions.host import session as host_session
from ipucnn.sessions.host.division import (
    MEMORY_FRACTION,
    TRAINING_FACTOR,
    Capacity,
    choose_fused,
    divide,
    fusible,
)
from ipucnn.sessions.host.session import HostSession, UpdateLoop
from ipucnn.sessions.session import ExecutionFinished
from ipucnn.training.losses import Loss

CROSS_ENTROPY = Loss("cross_entropy")


def assert_close(ours: Dict[str, np.ndarray], theirs: Dict[str, np.ndarray], tolerance=2e-4) -> None:
    assert set(ours) == set(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)


OPTIMIZERS = [
    ("sgd", {"momentum": 0.0}, {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "nesterov": True}, {"l2_regularization": 0.01, "clip_gradient_norm": 0.3}),
    ("lars", {"momentum": 0.9, "weight_decay": 1e-2, "eeta": 0.1, "epsilon": 0}, {}),
    ("adam", {}, {}),
    ("adamw", {}, {"weight_decay": 0.05, "ema_decay": 0.05}),
    ("rmsprop", {"rho": 0.9, "momentum": 0.5, "epsilon": 1e-2}, {}),
]


def run_session(norm, program, optimizer, images, labels, fused, seed=3, frozen=(), session=None):
    """Returns final weights and slots by name, and the events, of the host session."""
    model = sessions.frozen(make_model(norm, seed), frozen)
    return run(session or HostSession(CPU), model, with_fused(program, fused), optimizer, images, labels)[:3]


def compare(norm, program, optimizer, *fused, seed=3, frozen=()):
    images, labels = data(program.num_weight_updates * program.global_batch_size, seed)
    naive, losses, hits = run_naive(norm, program, optimizer, images, labels, seed=seed, frozen=frozen)
    per = program.weight_updates_per_execution
    for count in fused:
        weights, slots, events = run_session(
            norm, program, optimizer, images, labels, count, seed=seed, frozen=frozen
        )
        assert_close(weights, naive.weights)
        assert_close(slots, naive.slots)
        executions = [e for e in events if isinstance(e, ExecutionFinished)]
        for name, values in (("loss", losses), ("accuracy", hits)):
            np.testing.assert_allclose(
                [e.metrics[name] for e in executions],
                [np.mean(values[i : i + per]) for i in range(0, len(values), per)],
                rtol=1e-3,
                atol=1e-4,
            )


NORMS, METHODS = ("batch", "group", "none"), ("mean", "sum", "running_mean")


def norms_and_reductions():
    """Yields pairs with all or two of six micro-batches fused; fast ones have each norm and reduction with both."""
    for i, norm in enumerate(NORMS):
        for j, method in enumerate(METHODS):
            for fused in (6, 2):
                is_fast = fused == (2 if (i + j) % 3 == 1 else 6) or (norm, method) == ("batch", "mean")
                yield pytest.param(norm, method, fused, marks=[] if is_fast else pytest.mark.slow)


@pytest.mark.slow_cases("batch-mean-2", "group-sum-6")
@pytest.mark.slow_cases(
    "batch-mean-6",
    "batch-running_mean-6",
    "batch-sum-2",
    "group-mean-2",
    "group-running_mean-6",
    "none-mean-6",
    "none-running_mean-2",
    "none-sum-6",
)
@pytest.mark.parametrize("norm, method, fused", norms_and_reductions())
def test_fused_equals_naive_for_every_norm_and_reduction(norm, method, fused):
    program = make_program(2, 3, 2, updates_per_epoch=3, gradient_accumulation_reduction_method=method)
    compare(norm, program, SGD, fused)


@pytest.mark.slow_cases("sgd0", "adamw", "lars", "rmsprop", "sgd1")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o[0])
def test_fused_equals_naive_for_every_optimizer(optimizer):
    compare("batch", make_program(3, 2, 2), optimizer, 4)


@pytest.mark.slow
@pytest.mark.slow_cases("some")
@pytest.mark.parametrize(
    "frozen, optimizer",
    [(("conv0", "norm0", "conv1", "norm1"), OPTIMIZERS[4]), (("norm0", "conv1"), SGD)],
    ids=["backbone", "some"],
)
def test_fused_equals_naive_with_frozen_layers(frozen, optimizer):
    """Frozen weights keep every bit and have no gradient and state; frozen batch norms keep their statistics."""
    program = make_program(2, 3, 2, updates_per_epoch=3)
    images, labels = data(program.num_weight_updates * program.global_batch_size, 3)
    start = {name: variable.numpy() for name, variable in named_weights(make_model("batch", 3)).items()}
    weights, slots, _ = run_session("batch", program, optimizer, images, labels, 2, frozen=frozen)
    for name, value in start.items():
        is_frozen = name.split("/")[0] in frozen
        assert np.array_equal(weights[name], value) == is_frozen, name
        assert any(slot.startswith(f"{name}/") for slot in slots) != is_frozen or "moving" in name, name
    compare("batch", program, optimizer, 6, frozen=frozen)


@pytest.mark.parametrize("large, packed", [(0, 4), (6, 3), (1000, 1)])
def test_packed_gradients_come_back_in_the_order_of_the_weights(monkeypatch, large, packed):
    monkeypatch.setattr(updates, "LARGE", large)
    shapes = [(5,), (3, 3, 2, 4), (), (2, 5)]
    gradients = [
        np.random.RandomState(k).normal(size=shape).astype(np.float32) for k, shape in enumerate(shapes)
    ]
    packing = updates.Packing([tf.Variable(gradient) for gradient in gradients])
    assert len(packing.zeros()) == len(packing.pack(gradients)) == packed
    for gradient, unpacked in zip(gradients, packing.unpack(packing.pack(gradients))):
        np.testing.assert_array_equal(gradient, unpacked)


@pytest.mark.slow
def test_packed_and_unpacked_gradients_have_the_same_bytes(monkeypatch):
    program = make_program(2, 3, 2, updates_per_epoch=2)
    images, labels = data(4 * program.global_batch_size, 5)
    results = []
    for large in (0, 40, updates.LARGE):
        monkeypatch.setattr(updates, "LARGE", large)
        weights, _, _ = run_session("batch", program, SGD, images, labels, 2)
        results.append({name: value.tobytes() for name, value in weights.items()})
    assert results[0] == results[1] == results[2]


@pytest.mark.slow
def test_fused_is_as_close_to_float64_as_unfused():
    """In three weight updates, no ReLU input is so small that rounding could change its sign."""
    program = make_program(2, 4, 2, updates_per_epoch=3)
    images, labels = data(3 * program.global_batch_size, 2)
    naive, _, _ = run_naive("batch", program, SGD, images, labels, seed=2)
    assert naive.nearest > 4e-5
    unfused, fused = (
        run_session("batch", program, SGD, images, labels, count, seed=2)[0] for count in (1, 8)
    )
    far = [max(np.abs(w[name] - naive.weights[name]).max() for name in w) for w in (unfused, fused)]
    assert far[1] < 2 * far[0] and far[0] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("threshold", ["NATIVE_PART_SIZE", "FOLDED_WIDTH"])
def test_native_kernels_and_unfolded_narrow_layers_equal_naive(monkeypatch, threshold):
    monkeypatch.setattr(f"ipucnn.models.layers.micro_batches.{threshold}", 1)
    compare("batch", make_program(3, 2, 2), SGD, 4)


@pytest.mark.slow
def test_dropout_does_not_depend_on_the_fused_micro_batches():
    from ipucnn.models.layers.micro_batches import Dropout

    program = make_program(2, 4, 1, updates_per_epoch=2)
    images, labels = data(16, 0)
    results = []
    for fused in (1, 4):
        model = chain(
            (SIZE, SIZE, 2),
            Dropout(0.3, (None, 1, 1, 1), name="connect"),
            keras.layers.Flatten(name="flat"),
            Dropout(0.5, name="drop"),
            keras.layers.Dense(CLASSES, name="logits"),
            seed=1,
        )
        rate = constant(0.1)
        trained = run(
            HostSession(CPU), model, with_fused(program, fused), PLAIN, images, labels, schedule=rate
        )
        results.append(trained.weights)
    assert_close(*results, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.slow_cases("4-fused1")
@pytest.mark.parametrize("group, fused", [(2, (4, 2)), (4, (8, 4))])
def test_distributed_batch_norm_equals_naive(group, fused):
    compare("batch", make_program(2, 2, 4, dbn_replica_group_size=group), SGD, *fused)


@tries(1, slow=30)
@given(
    batch=st.integers(1, 4),
    accumulate=st.integers(1, 4),
    replicas=st.integers(1, 3),
    executions=st.sampled_from([1, 2]),
    norm=st.sampled_from(NORMS),
    method=st.sampled_from(METHODS),
    data_=st.data(),
)
def test_fused_equals_naive_at_random(batch, accumulate, replicas, executions, norm, method, data_):
    count = accumulate * replicas
    fused = data_.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    program = make_program(
        batch,
        accumulate,
        replicas,
        updates_per_epoch=2,
        weight_updates_per_execution=2 // executions,
        num_executions=executions,
        gradient_accumulation_reduction_method=method,
    )
    compare(norm, program, SGD, fused, seed=data_.draw(st.integers(0, 99)))


@pytest.mark.slow
def test_loss_scaling_leaves_the_result_unchanged():
    program = make_program(2, 2, 1)
    images, labels = data(16, 0)
    plain = run_session("batch", program, SGD, images, labels, 2)[0]
    scaled = run_session("batch", make_program(2, 2, 1, loss_scaling=128.0), SGD, images, labels, 2)[0]
    for name in plain:  # a power of two: not even the rounding changes
        np.testing.assert_array_equal(plain[name], scaled[name], err_msg=name)


@pytest.mark.slow_cases("batch-mean-1", "group-sum-2")
@pytest.mark.parametrize(
    "norm, method, fused", [("batch", "mean", 1), ("group", "sum", 2), ("none", "running_mean", 1)]
)
def test_groups_computed_in_parallel_change_no_byte(monkeypatch, norm, method, fused):
    """One, two or four groups at a time, summed in the order of the groups, in one step and in several."""
    program = make_program(
        2, 2, 2 * fused, updates_per_epoch=2, gradient_accumulation_reduction_method=method
    )
    images, labels = data(4 * program.global_batch_size, 5)
    results, parallel_groups = [], []
    for at_once in (1, 2, 4):
        monkeypatch.setattr(division, "operations_at_once", lambda at_once=at_once: at_once)
        session = HostSession(CPU)
        weights, slots, events = run_session(
            norm, program, ("adam", {}, {}), images, labels, fused, session=session
        )
        parallel_groups.append(session.divide(make_model(norm), program, fused).num_lanes)
        metrics = [(e.loss, e.accuracy) for e in events if hasattr(e, "loss")]
        results.append((metrics, [value.tobytes() for value in (*weights.values(), *slots.values())]))
    assert parallel_groups == [1, 2, 4] and len(metrics) > 0 and all(one == results[0] for one in results)


@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 9), st.integers(0, 40), st.integers(1, 4))
@tries(60, slow=2000)
def test_parallel_groups_are_limited_by_cores_and_memory(groups, samples, at_once, in_memory, workers):
    """The largest number that divides the groups of fused micro-batches of a weight update evenly."""
    needed = TRAINING_FACTOR * 1000 * samples / MEMORY_FRACTION
    capacity = Capacity(1, at_once, int(needed * (in_memory + 0.5)) if in_memory else 0, 1000)
    most = min(at_once, in_memory) if in_memory else at_once
    program, group = make_program(samples, groups), Given(workers, 0)
    if groups % workers == 0:
        lanes = divide(program, RunConfig(), capacity, group, ["/CPU:0"], 1).num_lanes
        assert lanes == max([n for n in range(1, most + 1) if groups % (n * workers) == 0], default=1)
    if groups % (2 * workers) == 0:
        on_two = capacity._replace(devices=2)
        assert divide(program, RunConfig(devices=2), on_two, group, ["/GPU:0", "/GPU:1"], 1).num_lanes == 1


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(20, 27), st.booleans())
@tries(200, slow=2000)
def test_fused_micro_batches_are_as_many_as_suit_workers_pairs_and_memory(
    groups, group, sharing, exponent, is_limited
):
    program = make_program(4, groups, group, dbn_replica_group_size=group)
    total, capacity = groups * group, Capacity(1, 1, 2**33 if is_limited else 0, 2**exponent)
    fitting = 2**31 // (TRAINING_FACTOR * 4 * 2**exponent)

    def legal(sharing):
        return [d for d in range(group, total + 1, group) if total % d == 0 and total // d % sharing == 0]

    assert fusible(program, sharing) == legal(sharing)
    if groups % sharing:
        return
    alone, fused = choose_fused(program, capacity), choose_fused(program, capacity, sharing)
    assert fused == max([d for d in legal(sharing) if d <= alone], default=legal(sharing)[0])
    pairs = choose_fused(program, capacity._replace(on_cpu=True), sharing)
    halves = legal(2 * sharing)
    if not halves:
        assert pairs == fused
    elif is_limited:  # two groups fit into the memory
        assert pairs in halves and (2 * pairs <= fitting or pairs == halves[0])
    else:  # as large as without pairs, if there are enough micro-batches
        assert pairs == max([d for d in halves if d <= fused], default=halves[0])


@pytest.mark.slow
def test_parallel_evaluations_are_summed_in_order(monkeypatch):
    images, labels = data(33, 6)
    model = make_model("batch", 2)
    batches = tf.data.Dataset.from_tensor_slices((images, labels, np.ones(33, np.float32))).batch(4)
    results = []
    for at_once in (1, 2, 5, 20):
        monkeypatch.setattr(division, "operations_at_once", lambda at_once=at_once: at_once)
        predictor = HostSession(CPU).predictor(model)
        logits = predictor.predict([images[i : i + 4] for i in range(0, 33, 4)])
        results.append((predictor.evaluate(batches, CROSS_ENTROPY), [array.tobytes() for array in logits]))
    assert results[0][0]["samples"] == 33 and all(one == results[0] for one in results)


def test_scores_of_several_devices_are_computed_in_parallel(monkeypatch):
    predictor = HostSession(CPU, places=("/CPU:0",) * 3).predictor(make_model("none"))
    all_devices, sums = threading.Barrier(3), host_session.sums_of_batch

    def together(*batch):
        all_devices.wait(timeout=30)
        return sums(*batch)

    monkeypatch.setattr(host_session, "sums_of_batch", together)
    images, labels = data(12, 0)
    batches = [(images[i : i + 2], labels[i : i + 2], np.ones(2, np.float32)) for i in range(0, 12, 2)]
    assert predictor.evaluate(batches, CROSS_ENTROPY)["samples"] == 12


@pytest.mark.slow
def test_slices_of_any_length_share_one_graph_and_change_no_byte(monkeypatch):
    traced, traces = [], UpdateLoop._run
    monkeypatch.setattr(UpdateLoop, "_run", lambda self, *a: traced.append(1) or traces(self, *a))
    program = make_program(2, 2, 2, updates_per_epoch=12)
    images, labels = data(12 * 8, 5)
    whole = run_session("batch", program, SGD, images, labels, 4)
    monkeypatch.setattr(host_session, "SLICE_S", 1e-9)
    sliced = run_session("batch", program, SGD, images, labels, 4)
    assert len(sliced[2]) > len(whole[2]) and len(traced) == 2
    for name in whole[0]:
        np.testing.assert_array_equal(whole[0][name], sliced[0][name], err_msg=name)
    assert [e.metrics for e in whole[2] if isinstance(e, ExecutionFinished)] == [
        e.metrics for e in sliced[2] if isinstance(e, ExecutionFinished)
    ]


def exhaust(*_):
    raise MemoryError


@pytest.mark.parametrize("part", ["network", "scores"])
def test_memory_exhausted_in_a_validation_names_the_option(part, monkeypatch):
    """TensorFlow turns the MemoryError into a ResourceExhaustedError; it retries a too large allocation for 40 s."""
    predictor = HostSession(CPU).predictor(make_model("none"))
    if part == "network":
        predictor._forward = tf.function(lambda images: tf.numpy_function(exhaust, [], tf.float32))
    else:
        monkeypatch.setattr(host_session, "sums_of_batch", exhaust)
    error = "out of memory in a validation, with batches of 8 images"
    weighted = [(*data(8, 0), np.ones(8, np.float32))]
    check_raises(
        InfeasibleError, error, "--validation-micro-batch-size", predictor.evaluate, weighted, CROSS_ENTROPY
    )


def test_memory_exhausted_in_a_prediction_is_no_bug():
    predictor = HostSession(CPU).predictor(make_model("none"))
    predictor._forward = tf.function(lambda images: tf.numpy_function(exhaust, [], tf.float32))
    images = [data(8, 0)[0]]
    check_raises(InfeasibleError, "out of memory in a prediction", "end other", predictor.predict, images)


def test_memory_that_tensorflow_exhausts_anywhere_in_a_command_is_no_bug():
    error = user_error_of(tf.errors.ResourceExhaustedError(None, None, "OOM"), "--micro-batch-size")
    assert error.exit_code == 4 and error.message == "out of memory" and "--micro-batch-size" in error.hint


def test_a_full_disk_that_tensorflow_finds_is_not_called_exhausted_memory():
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught, tf.io.TFRecordWriter(
        "/dev/full"
    ) as writer:
        writer.write(b"x" * 2**20)
        writer.flush()
    error = user_error_of(caught.value)
    assert error.exit_code == 3 and error.message == "/dev/full: No space left on device"
    assert "free some space" in error.hint


def test_training_uses_all_gpus_or_the_requested_number(monkeypatch):
    check_raises(MissingError, "no GPU", "", factory.create_session, "gpu")
    gpus = [(f"/device:GPU:{n}", "NVIDIA H200") for n in range(2)]
    monkeypatch.setattr(factory, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: gpus if kind == "GPU" else [])

    def made(devices, trains=True, device="auto"):
        return factory.create_session(device, config=RunConfig(devices=devices), trains=trains)

    both = ("/device:GPU:0", "/device:GPU:1")
    for devices, places in ((None, both), (0, both), (2, both), (1, both[:1])):
        session = made(devices)
        assert (session.device.kind, session.device.name) == ("gpu", "NVIDIA H200")
        assert session.places == places and session.place == places[0]
    error = check_raises(MissingError, "--devices 3: TensorFlow sees 2 GPUs", "", made, 3)
    assert error.hint == "use --devices 2"
    # A session that does not train computes on one GPU.
    assert made(None, trains=False).places == both[:1]
    on_cpu = made(None, device="cpu")
    assert on_cpu.device.kind == "cpu" and on_cpu.places == ("/device:CPU:0",)
