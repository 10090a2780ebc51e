"""Layers that the host computes in another way than Keras, against Keras and against NumPy loops."""

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from few_examples import tries
from hypothesis import example, given
from hypothesis import strategies as st
from support.sessions import restart_names
from tensorflow import keras

from ipucnn import compiled as compiled_code
from ipucnn.compiled import jit
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.keras_config import read_blueprint
from ipucnn.models.layers.micro_batches import (
    BatchNormalization,
    ExecutionContext,
    GroupNormalization,
    execution_context,
)
from ipucnn.models.layers.per_sample import SubsamplePad
from ipucnn.models.registry import get_model
from ipucnn.sessions.host import fast_layers, operations
from ipucnn.sessions.host.arithmetic import Arithmetic, Rounding
from ipucnn.sessions.host.network import Network, _scope

HAS_KERNELS = not operations.why_not()
if HAS_KERNELS:
    from ipucnn.sessions.host import kernels

compiled = pytest.mark.skipif(not HAS_KERNELS, reason=operations.why_not())
PLAIN = Rounding(Arithmetic("32.32"))


@pytest.fixture(autouse=True)
def small_norms_are_compiled(monkeypatch):
    """Uses one thread and no least size: otherwise TensorFlow would compute the norms of small networks."""
    if HAS_KERNELS:
        monkeypatch.setattr(kernels, "operation_threads", lambda: 1)
        monkeypatch.setattr(kernels, "LEAST_NUMBERS", 1)


ACTIVATIONS = {
    "linear": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "relu6": lambda z: np.clip(z, 0, 6),
    "swish": lambda z: z / (1 + np.exp(-z)),
}


def forward(x, gamma, beta, epsilon, parts, activation):
    """Returns y, mean and variance as arrays."""
    outputs = operations.normalise(*map(tf.constant, (x, gamma, beta)), epsilon, parts, activation)
    return [output.numpy() for output in outputs]


def backward(dy, x, gamma, beta, epsilon, parts, activation):
    """Returns the gradients of x, gamma and beta as arrays."""
    inputs = [tf.constant(array) for array in (x, gamma, beta)]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = operations.normalise(*inputs, epsilon, parts, activation)[0]
    return [gradient.numpy() for gradient in tape.gradient(y, inputs, tf.constant(dy))]


def naive_forward(x, gamma, beta, epsilon, parts):
    """Returns (y before the activation, mean, variance) in float64, part by part and channel by channel."""
    channels = x.shape[-1]
    rows = x.astype(np.float64).reshape(parts, -1, channels)
    y, mean, variance = np.empty(rows.shape), np.empty((parts, channels)), np.empty((parts, channels))
    for part in range(parts):
        for channel in range(channels):
            numbers = rows[part, :, channel]
            mean[part, channel], variance[part, channel] = numbers.mean(), numbers.var()
            y[part, :, channel] = (numbers - numbers.mean()) / np.sqrt(numbers.var() + epsilon)
    return (y * gamma + beta).reshape(x.shape), mean, variance


@st.composite
def normalisations(draw):
    return (
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 3, 63, 64, 65, 200])),
        draw(st.sampled_from([1, 2, 3, 5, 7, 20, 60, 100])),
        draw(st.sampled_from(sorted(ACTIVATIONS))),
        draw(st.integers(0, 2**16)),
    )


@compiled
@given(normalisations())
@tries(25, slow=60)
def test_normalisation_equals_the_naive_one(case):
    parts, rows, channels, activation, seed = case
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(parts * rows, 1, 1, channels)) * 3 + rng.normal(size=channels) * 5).astype(
        np.float32
    )
    gamma, beta = (rng.normal(size=channels).astype(np.float32) for _ in range(2))
    y, mean, variance = forward(x, gamma, beta, 1e-3, parts, activation)
    z, naive_mean, naive_variance = naive_forward(x, gamma, beta, 1e-3, parts)
    np.testing.assert_allclose(mean, naive_mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(variance, naive_variance, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, ACTIVATIONS[activation](z), rtol=1e-4, atol=1e-4)


@compiled
@given(normalisations())
@tries(10, slow=25)
def test_normalisation_gradients_equal_automatic_differentiation(case):
    """Compares with automatic differentiation in float64."""
    parts, rows, channels, activation, seed = case
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(parts * rows, 1, 1, channels)).astype(np.float32)
    dy = rng.normal(size=x.shape).astype(np.float32)
    gamma, beta = (rng.normal(size=channels).astype(np.float32) for _ in range(2))
    wide = [tf.constant(v.astype(np.float64)) for v in (x, gamma, beta)]
    functions = {"linear": tf.identity, "relu": tf.nn.relu, "relu6": tf.nn.relu6, "swish": tf.nn.swish}
    with tf.GradientTape() as tape:
        tape.watch(wide)
        by_part = tf.reshape(wide[0], [parts, rows, channels])
        mean, variance = tf.nn.moments(by_part, axes=[1], keepdims=True)
        normal = tf.reshape((by_part - mean) / tf.sqrt(variance + 1e-3), x.shape)
        z = normal * wide[1] + wide[2]
        loss = tf.reduce_sum(functions[activation](z) * dy)
    expected = tape.gradient(loss, wide)
    gradients = backward(dy, x, gamma, beta, 1e-3, parts, activation)
    # Near the kink of an activation, rounding decides; the rare cases with such numbers are left out.
    bends = np.minimum(np.abs(z), np.abs(z - 6)) < 1e-5
    if activation in ("linear", "swish") or not bends.any():
        for ours, theirs in zip(gradients, expected):
            scale = max(1.0, np.abs(theirs).max())
            np.testing.assert_allclose(ours / scale, theirs / scale, atol=2e-5)


@compiled
def test_swish_is_exact_far_from_zero():
    z = np.array([-1e4, -200, -88, -87, -20, -1e-3, 0, 1e-3, 20, 87, 88, 200, 1e4], np.float32)
    # The normalisation has no effect: each channel has mean 0 and variance 1.
    x = np.stack([np.ones_like(z), -np.ones_like(z)])[:, None, None, :]
    y, _, _ = forward(x, z, np.zeros_like(z), 0.0, 1, "swish")
    wide = z.astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(y[0, 0, 0], wide / (1 + np.exp(-wide)), rtol=1e-6, atol=1e-30)


@compiled
def test_nan_is_preserved():
    x = np.ones((4, 1, 1, 3), np.float32)
    x[2, 0, 0, 1] = np.nan
    for activation in ACTIVATIONS:
        y = forward(x, np.ones(3, np.float32), np.zeros(3, np.float32), 1e-3, 2, activation)[0]
        assert np.isnan(y[2:, ..., 1]).all()
        assert np.isfinite(y[:2]).all() and np.isfinite(y[..., [0, 2]]).all()


@compiled
def test_the_number_of_threads_changes_no_byte(monkeypatch):
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(12, 8, 8, 64)).astype(np.float32) for _ in range(2))
    gamma, beta = (rng.normal(size=64).astype(np.float32) for _ in range(2))
    results = []
    for cores in (1, 2, 3, 16):
        monkeypatch.setattr(kernels, "operation_threads", lambda cores=cores: cores)
        monkeypatch.setattr(kernels, "THREAD_NUMBERS", 1)
        arrays = []
        for parts in (3, 12, 1):
            arrays += forward(x, gamma, beta, 1e-3, parts, "swish")
            arrays += backward(dy, x, gamma, beta, 1e-3, parts, "swish")
        inputs = map(tf.constant, (np.zeros((3, 3, 64, 1), np.float32), x, dy))
        arrays.append(operations.depthwise_filter_gradient(*inputs, 1, (1, 1)).numpy())
        inputs = map(tf.constant, (np.zeros((3, 3, 64, 64), np.float32), x, dy))
        arrays.append(operations.filter_gradient(*inputs, (1, 1), (1, 1)).numpy())
        results.append(b"".join(array.tobytes() for array in arrays))
    assert len(set(results)) == 1


def depthwise_results(samples, height, width, kernel, stride, padding, channels=3):
    """Returns (output, gradient of the input, of the weights) of TensorFlow's convolution and of the host's."""
    rng = np.random.default_rng(height * 10 + width)
    x = tf.constant(rng.normal(size=(samples, height, width, channels)).astype(np.float32))
    w = tf.constant(rng.normal(size=(kernel, kernel, channels, 1)).astype(np.float32))
    results = []
    for convolve in (
        lambda: tf.nn.depthwise_conv2d(x, w, [1, stride, stride, 1], padding),
        lambda: operations.depthwise_conv2d(x, w, stride, padding),
    ):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = convolve()
            loss = tf.reduce_sum(tf.sin(y))
        results.append([y, *tape.gradient(loss, [x, w])])
    return results


@compiled
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3),
       st.sampled_from(["SAME", "VALID"]), st.integers(1, 20), st.sampled_from([3, 6]))  # fmt: skip
@example(4, 4, 5, 2, "SAME", 3, 6)
@example(5, 5, 5, 2, "VALID", 3, 6)
@example(7, 7, 5, 2, "VALID", 3, 6)
@example(3, 3, 3, 1, "SAME", 3, 6)
@example(1, 1, 5, 1, "SAME", 3, 6)
@example(2, 2, 5, 1, "SAME", 3, 6)
@example(4, 4, 3, 2, "SAME", 3, 6)
@example(5, 5, 3, 2, "SAME", 3, 6)
@example(9, 9, 3, 2, "VALID", 3, 6)
@example(6, 6, 3, 3, "SAME", 3, 6)
@tries(20, slow=60)
def test_depthwise_convolutions_equal_tensorflow(height, width, kernel, stride, padding, samples, channels):
    if padding == "VALID" and kernel > min(height, width):
        return
    tolerance = 1e-5 if samples <= 3 else 1e-4
    for native, ours in zip(*depthwise_results(samples, height, width, kernel, stride, padding, channels)):
        np.testing.assert_allclose(ours.numpy(), native.numpy(), rtol=tolerance, atol=tolerance)


def naive_filter_gradient(x, dy, kernel_shape, strides, before):
    """Returns the weight gradient of a convolution in float64, output pixel by output pixel."""
    gradient = np.zeros(kernel_shape)
    for n, i, j, a, b in np.ndindex(*dy.shape[:3], *kernel_shape[:2]):
        h, w = i * strides[0] + a - before[0], j * strides[1] + b - before[1]
        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
            gradient[a, b] += np.outer(x[n, h, w].astype(np.float64), dy[n, i, j])
    return gradient


@compiled
@given(
    st.integers(1, 3), st.tuples(st.integers(1, 9), st.integers(1, 40)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)), st.sampled_from(["SAME", "VALID"]),
    st.sampled_from([8, 24, 40, 56, 200]), st.sampled_from([16, 48, 272]),
)  # fmt: skip
@example(2, (9, 40), (3, 3), (1, 1), "SAME", 200, 272)  # two blocks of each kind, wide images
@example(3, (5, 4), (3, 3), (2, 2), "SAME", 56, 48)
@example(3, (9, 13), (3, 3), (1, 1), "VALID", 8, 16)  # just wide enough to share a block of x
@example(3, (9, 14), (3, 3), (1, 1), "VALID", 8, 16)
@example(3, (40, 9), (1, 1), (2, 2), "VALID", 24, 16)
@tries(15, slow=100)
def test_filter_gradients_equal_the_naive_ones(samples, size, kernel, strides, padding, inputs, outputs):
    if padding == "VALID" and any(k > n for k, n in zip(kernel, size)):
        return
    sides = [operations.padding_of(n, k, s, padding) for n, k, s in zip(size, kernel, strides)]
    (height, top, _), (width, left, _) = sides
    rng = np.random.default_rng(height * 10 + width)
    x = rng.normal(size=(samples, *size, inputs)).astype(np.float32)
    dy = rng.normal(size=(samples, height, width, outputs)).astype(np.float32)
    w = np.zeros((*kernel, inputs, outputs), np.float32)
    gradient = operations.filter_gradient(*map(tf.constant, (w, x, dy)), strides, (top, left)).numpy()
    naive = naive_filter_gradient(x, dy, w.shape, strides, (top, left))
    np.testing.assert_allclose(gradient, naive, rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize("strides, padding", [((1, 1), "SAME"), ((2, 1), "VALID")])
def test_a_convolution_with_a_compiled_gradient_equals_tensorflow(monkeypatch, strides, padding):
    monkeypatch.setattr(operations, "multiplies_faster", lambda: True)
    monkeypatch.setattr(operations, "LEAST_PAIRS", 1)
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(2, 7, 6, 8)).astype(np.float32))
    w = tf.constant(rng.normal(size=(3, 3, 8, 16)).astype(np.float32))
    assert operations.has_compiled_filter_gradient(w.shape, (1, 1))
    results = []
    for convolve in (
        lambda: tf.nn.conv2d(x, w, strides, padding),
        lambda: operations.conv2d(x, w, strides, padding, (1, 1)),
    ):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = convolve()
            loss = tf.reduce_sum(tf.sin(y))
        results.append([y, *tape.gradient(loss, [x, w])])
    for native, ours in zip(*results):
        np.testing.assert_allclose(ours, native, rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize("features, expected", [
    ({"avx2": True, "fma": True, "avx512f": False}, True),
    ({"avx2": True, "fma": True, "avx512f": True}, False),
    ({"neon": True}, False),
])  # fmt: skip
def test_filter_gradients_are_compiled_for_the_processors_on_which_they_were_faster(
    monkeypatch, features, expected
):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    large, small, odd = (3, 3, 64, 64), (3, 3, 16, 16), (3, 3, 60, 64)
    assert operations.has_compiled_filter_gradient(large, (1, 1)) == expected
    assert (
        operations.compiled_layers().startswith("yes") and (operations.compiled_layers() == "yes") == expected
    )
    for shape, dilations in ((large, (2, 2)), (small, (1, 1)), (odd, (1, 1))):
        assert not operations.has_compiled_filter_gradient(shape, dilations)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.sampled_from(["SAME", "VALID"]))
def test_tap_ranges_equal_the_pixels_of_each_tap(size, kernel, stride, padding):
    if padding == "VALID" and kernel > size:
        return
    output = -(-size // stride) if padding == "SAME" else (size - kernel) // stride + 1
    before = max((output - 1) * stride + kernel - size, 0) // 2 if padding == "SAME" else 0
    met = {}
    for o in range(output):
        for tap in range(kernel):
            pixel = o * stride + tap - before
            if 0 <= pixel < size:
                met.setdefault(tap, []).append((o, pixel))
    assert {
        t: list(zip(range(a, b), range(x, size, stride)))
        for t, a, b, x in fast_layers.tap_ranges(size, kernel, stride, padding)
    } == met


def small_network(size, layer, norm, activation, channels=4):
    restart_names()
    inputs = keras.Input((*size, channels))
    x = layer(inputs)
    x = {"batch": BatchNormalization, "group": lambda **k: GroupNormalization(2, **k)}[norm](name="norm")(x)
    x = keras.layers.Activation(activation, name="activation")(x)
    model = keras.Model(inputs, keras.layers.Flatten(name="flat")(x))
    rng = np.random.default_rng(1)
    for weight in model.weights:
        low = 0.5 if "moving_variance" in weight.name else -1.0
        weight.assign(rng.uniform(low, 1.0, weight.shape))
    return model


def network_of(model, splits=()):
    return Network(model, Arithmetic(), lambda images: images, splits, on_cpu=True)


def both(model, images, training):
    """Returns pairs of outputs, gradients of trainable weights, and statistics: of Keras and of the host's network."""
    weights = [
        getattr(w, "value", w) if not isinstance(w, tf.Variable) else w for w in model.trainable_weights
    ]
    network = network_of(model)
    results = []
    for forward in (lambda: model(images, training=training), None):
        context = ExecutionContext(2, tf.zeros([2, 2], tf.int32), 2)
        with tf.GradientTape() as tape:
            if forward is None:
                y = network(images, training, PLAIN, context)
            else:
                with execution_context(context):
                    y = forward()
            loss = tf.reduce_sum(tf.sin(y))
        # TensorFlow 2.6 has no gradient of a dilated kernel on a CPU.
        spread = any(getattr(layer, "dilation_rate", (1, 1)) != (1, 1) for layer in model.layers)
        unconnected = tf.UnconnectedGradients.ZERO
        gradients = [] if spread else tape.gradient(loss, weights, unconnected_gradients=unconnected)
        statistics = [s for _, *pair in context.batch_statistics for s in pair]
        results.append([y, *gradients, *statistics])
    return zip(*results)


def assert_equals_keras(model, size):
    images = tf.constant(np.random.default_rng(2).normal(size=(6, *size, 4)).astype(np.float32))
    for training in (True, False):
        pairs = list(both(model, images, training))
        # Gradients that cancel (of a bias before batch norm) have the absolute error of the largest ones.
        largest = max(1.0, *(np.abs(keras_s).max() for keras_s, _ in pairs))
        for keras_s, ours in pairs:
            np.testing.assert_allclose(ours, keras_s, rtol=1e-5, atol=1e-5 * largest)


def replaced(model, needed=None):
    """Returns the layers of a network of one stage that are computed in another way."""
    blueprint = read_blueprint(model)
    layers = {layer.name: layer for layer in model.layers}
    return fast_layers.find_fast_layers(blueprint.nodes[1:], layers, needed or [blueprint.output])


def computed_by_others(functions):
    """Returns the layers that a neighbour computes."""
    return [name for name, function in functions.items() if function is fast_layers.unchanged]


CONVOLUTIONS = [
    lambda: keras.layers.Conv2D(6, 1, use_bias=False),
    lambda: keras.layers.Conv2D(6, 1, strides=2, activation="relu"),
    lambda: keras.layers.Conv2D(6, 3, padding="same"),
    lambda: keras.layers.Conv2D(6, 3, padding="same", strides=2, use_bias=False),
    lambda: keras.layers.Conv2D(6, 3, padding="same", dilation_rate=2),
    lambda: keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False),
    lambda: keras.layers.DepthwiseConv2D(5, padding="same", strides=2),
    lambda: keras.layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2),
]
SIZES = [(1, 1), (2, 2), (5, 4), (1, 6)]
NORMS = [("batch", "relu"), ("group", "swish")]


def every_fifth_always():
    """Yields all combinations; those that are not slow include each convolution, size and norm."""
    for n, (layer, size, norm) in enumerate(itertools.product(CONVOLUTIONS, SIZES, NORMS)):
        yield pytest.param(size, layer, *norm, marks=[] if n % 5 == 0 else pytest.mark.slow)


@pytest.mark.parametrize(("size", "layer", "norm", "activation"), list(every_fifth_always()))
def test_convolution_norm_and_activation_equal_keras(size, layer, norm, activation):
    assert_equals_keras(small_network(size, layer(), norm, activation), size)


@pytest.mark.slow_cases(
    "False-3-zeros1-<lambda>",
    "False-5-zeros3-<lambda>",
    "True-3-zeros4-<lambda>",
    "True-5-zeros2-<lambda>",
    "False-3-zeros0-<lambda>",
    "False-5-zeros2-<lambda>",
    "True-3-zeros0-<lambda>",
    "True-3-zeros1-<lambda>",
)
@pytest.mark.parametrize("kernel, zeros, is_left", [
    (3, ((0, 1), (0, 1)), lambda size: size % 2 == 0),  # EfficientNets and MobileNets, for even sizes
    (3, ((1, 1), (1, 1)), lambda size: size % 2 == 1),  # and for odd sizes
    (5, ((1, 2), (1, 2)), lambda size: size % 2 == 0),
    (5, ((2, 2), (2, 2)), lambda size: size % 2 == 1),
    (3, ((1, 0), (1, 0)), lambda size: False),  # in no network
    (3, ((1, 2), (1, 2)), lambda size: False),
])  # fmt: skip
@pytest.mark.parametrize("is_depthwise", [True, False])
def test_zero_padding_is_merged_into_the_same_padding_of_a_convolution(kernel, zeros, is_left, is_depthwise):
    options = {"strides": 2, "use_bias": False, "name": "convolve"}
    for size in ((4, 4), (8, 6), (5, 4), (7, 7), (2, 2), (1, 2)):
        convolve = (
            keras.layers.DepthwiseConv2D(kernel, **options)
            if is_depthwise
            else keras.layers.Conv2D(6, kernel, **options)
        )
        padded = keras.layers.ZeroPadding2D(zeros, name="zeros")
        if any(n + sum(pair) < kernel for n, pair in zip(size, zeros)):
            continue
        model = small_network(size, lambda x: convolve(padded(x)), "batch", "relu")  # noqa: B023
        fast = replaced(model)
        expected = all(is_left(n) for n in size)
        assert ("zeros" in computed_by_others(fast.training)) == expected, size
        assert ("zeros" in computed_by_others(fast.inference)) == expected, size
        # What is not merged is computed alike with all kernels.
        if size in ((8, 6), (7, 7), (2, 2)) if expected else (kernel, size) == (3, (5, 4)):
            assert_equals_keras(model, size)


def test_zero_padding_of_another_pipeline_stage_is_not_merged():
    model = small_network(
        (8, 8),
        lambda x: keras.layers.Conv2D(6, 3, strides=2, name="convolve")(
            keras.layers.ZeroPadding2D(((0, 1), (0, 1)), name="zeros")(x)
        ),
        "batch",
        "relu",
    )
    images = tf.constant(np.random.default_rng(2).normal(size=(6, 8, 8, 4)).astype(np.float32))
    context = ExecutionContext(2, tf.zeros([2, 2], tf.int32), 2)
    with execution_context(context):
        expected = model(images, training=True)
    for splits in ((), ("zeros",), ("convolve",), ("norm",)):
        computed = network_of(model, splits)(images, True, PLAIN, context)
        np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("is_full", [False, True])
def test_missing_threads_are_not_waited_for(monkeypatch, is_full):
    """Threads take tasks from a shared list, so the threads that run do all of them."""
    monkeypatch.setattr(kernels, "operation_threads", lambda: 3)
    monkeypatch.setattr(kernels, "THREAD_NUMBERS", 1)
    reads, writes = os.pipe()  # nobody reads from it
    os.set_blocking(writes, False)
    while is_full:
        try:
            os.write(writes, bytes(8))
        except BlockingIOError:
            break
    monkeypatch.setattr(kernels, "_pipe_to_helpers", lambda threads: writes)
    x = np.random.default_rng(0).normal(size=(8, 4, 4, 16)).astype(np.float32)
    y, mean, _ = forward(x, np.ones(16, np.float32), np.zeros(16, np.float32), 1e-3, 4, "linear")
    os.close(reads)
    os.close(writes)
    expected, theirs, _ = naive_forward(x, np.ones(16), np.zeros(16), 1e-3, 4)
    np.testing.assert_allclose(y, expected.reshape(x.shape), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, theirs, rtol=1e-5, atol=1e-6)


@compiled
def test_operations_in_parallel_give_the_same_bytes(monkeypatch):
    """Several operations, each with helpers, run at once: as groups of micro-batches in parallel do."""
    monkeypatch.setattr(kernels, "operation_threads", lambda: 2)
    monkeypatch.setattr(kernels, "THREAD_NUMBERS", 1)
    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.normal(size=(8, 8, 8, 32)).astype(np.float32)) for _ in range(6)]
    ones, zeros = tf.ones(32), tf.zeros(32)

    @tf.function
    def outputs():
        return [operations.normalise(x, ones, zeros, 1e-3, 4, "swish")[0] for x in inputs]

    expected = [forward(x.numpy(), ones, zeros, 1e-3, 4, "swish")[0].tobytes() for x in inputs]
    for _ in range(10):
        assert [y.numpy().tobytes() for y in outputs()] == expected


@compiled
def test_an_operation_that_is_given_other_sizes_than_its_tensors_have_fails(monkeypatch):
    x, dy, weights, channels = (
        tf.ones([4, 2, 2, 3]),
        tf.ones([4, 2, 2, 3]),
        tf.zeros([3, 3, 3, 1]),
        tf.ones(3),
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        operations.depthwise_filter_gradient(weights, x, dy[..., :2], 1, (1, 1))
    for inputs, outputs in ((8, 32), (16, 16), (3, 16)):  # the kernel has 8 (or 3) and 16
        with pytest.raises(tf.errors.InvalidArgumentError):
            operations.filter_gradient(
                tf.zeros([3, 3, min(inputs, 8), 16]),
                tf.ones([4, 2, 2, inputs]),
                tf.ones([4, 2, 2, outputs]),
                (1, 1),
                (1, 1),
            )
    monkeypatch.setattr(kernels, "settings_of_norm", lambda *given: [2, 9, 3, 1, 3, 0, 2, 1, -1])
    with pytest.raises(tf.errors.InvalidArgumentError):
        operations.normalise(x, channels, channels, 1e-3, 2, "linear")


@compiled
def test_an_input_that_others_read_is_not_overwritten():
    """The gradient may take the memory of dy, unless dy is read again."""
    rng = np.random.default_rng(0)
    x, dy = (tf.constant(rng.normal(size=(4, 4, 4, 8)).astype(np.float32)) for _ in range(2))
    ones, zeros = tf.ones(8), tf.zeros(8)

    @tf.function
    def gradients(x, dy):
        twice = dy * 2
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operations.normalise(x, ones, zeros, 1e-3, 2, "relu")[0]
        return tape.gradient(y, x, twice), twice - dy

    dx, read_later = gradients(x, dy)
    np.testing.assert_array_equal(dx, backward((dy * 2).numpy(), x, ones, zeros, 1e-3, 2, "relu")[0])
    np.testing.assert_array_equal(read_later, dy)


def test_tensorflow_computes_all_layers_if_its_library_lacks_a_function(monkeypatch):
    missing = "TensorFlow has no TF_GetInput"
    monkeypatch.setattr(operations, "why_not", lambda: missing)
    monkeypatch.setattr(operations, "_apply", None)
    assert_equals_keras(small_network((5, 1), CONVOLUTIONS[0](), "batch", "relu"), (5, 1))


@compiled
def test_the_library_without_a_function_of_the_c_interface_is_named(monkeypatch):
    functions = (*compiled_code.TENSORFLOW_FUNCTIONS, "TF_Absent")
    monkeypatch.setattr(compiled_code, "TENSORFLOW_FUNCTIONS", functions)
    # As in a new process, which has not asked before.
    monkeypatch.setattr(operations, "tensorflow_library", compiled_code.tensorflow_library.__wrapped__)
    reason = operations.why_not.__wrapped__()
    assert re.fullmatch(r"libtensorflow_framework\S* has no TF_Absent", reason), reason


@compiled
@pytest.mark.parametrize(
    ("numbers", "cores", "expected"), [(6 * 30, 1, True), (6 * 30 + 1, 1, False), (6 * 30, 3, False)]
)
def test_norms_with_few_numbers_or_work_for_few_cores_are_computed_by_tensorflow(
    monkeypatch, numbers, cores, expected
):
    """The two micro-batches of six images have a norm of 6 x 5 x 6 numbers."""
    monkeypatch.setattr(kernels, "LEAST_NUMBERS", numbers)
    monkeypatch.setattr(kernels, "operation_threads", lambda: cores)
    calls, normalise = [], operations.normalise
    monkeypatch.setattr(operations, "normalise", lambda *given: calls.append(given) or normalise(*given))
    assert_equals_keras(small_network((5, 1), CONVOLUTIONS[0](), "batch", "relu"), (5, 1))
    assert bool(calls) == expected


def test_outputs_with_other_readers_are_not_fused_with_the_next_layer(monkeypatch):
    """A skip from before the activation, --precision 16.16 and --fp-exceptions need the output of each layer."""
    restart_names()
    inputs = keras.Input((4, 4, 3))
    x = keras.layers.Conv2D(4, 1, name="conv")(inputs)
    normal = BatchNormalization(name="norm")(x)
    y = keras.layers.Activation("relu", name="relu")(normal)
    model = keras.Model(inputs, keras.layers.Add(name="add")([normal, y]))
    fast = replaced(model)
    assert computed_by_others(fast.training) == [] and computed_by_others(fast.inference) == ["norm"]
    images = tf.random.stateless_normal([6, 4, 4, 3], [0, 1])
    for training in (True, False):
        for keras_s, ours in both(model, images, training):
            np.testing.assert_allclose(ours, keras_s, rtol=1e-4, atol=1e-4)
    model = keras.Model(inputs, y)
    assert computed_by_others(replaced(model).training) == ["relu"]
    fast = replaced(model, [layer.name for layer in model.layers])
    assert computed_by_others(fast.training) == computed_by_others(fast.inference) == []
    needed = []
    found = "ipucnn.sessions.host.network.find_fast_layers"
    monkeypatch.setattr(found, lambda steps, layers, names: needed.append(set(names)))
    plain, half, checked = Arithmetic(), Arithmetic("16.16"), Arithmetic(fp_exceptions=True)
    for arithmetic, on_cpu in ((plain, True), (half, True), (checked, True), (plain, False)):
        Network(model, arithmetic, lambda images: images, on_cpu=on_cpu)
    # Nothing is looked for elsewhere than on a CPU.
    assert needed == [{"relu"}, *[{"conv", "norm", "relu"}] * 2]


@pytest.mark.parametrize("layer", [
    lambda: keras.layers.ReLU(),
    lambda: keras.layers.ReLU(6.0),
    lambda: keras.layers.ReLU(5.0),
    lambda: keras.layers.ReLU(negative_slope=0.1),
    lambda: keras.layers.Activation(tf.math.sin),
])  # fmt: skip
def test_activations_after_a_norm_equal_keras(layer):
    """Keras 2.6 stores the bound of ReLU(6), which MobileNet has, as an array."""
    restart_names()
    inputs = keras.Input((4, 4, 3))
    x = BatchNormalization(name="norm")(inputs)
    model = keras.Model(inputs, layer()(x))
    model.get_layer("norm").gamma.assign([1.0, 5.0, 20.0])
    images = tf.random.stateless_normal([6, 4, 4, 3], [0, 1])
    for keras_s, ours in both(model, images, True):
        np.testing.assert_allclose(ours, keras_s, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(4, 4), (5, 4), (2, 6)])
def test_the_shortcut_takes_every_second_pixel(size):
    restart_names()
    inputs = keras.Input((*size, 3))
    model = keras.Model(inputs, SubsamplePad(5, name="skip")(inputs))
    images = tf.constant(np.random.default_rng(0).normal(size=(3, *size, 3)).astype(np.float32))
    with tf.GradientTape() as tape:
        tape.watch(images)
        pixels = network_of(model)(images, True, PLAIN)
    np.testing.assert_array_equal(pixels[..., :3], images[:, ::2, ::2])
    gradient = np.zeros(images.shape, np.float32)
    gradient[:, ::2, ::2] = 1
    np.testing.assert_array_equal(tape.gradient(pixels, images), gradient)
    assert pixels.shape == (3, -(-size[0] // 2), -(-size[1] // 2), 5) and not np.any(pixels[..., 3:])


@pytest.mark.slow_cases("efficientnet-b0-64", "mobilenet-32")
@pytest.mark.parametrize("name, side", [("efficientnet-b0", 64), ("cifar_resnet8", 64), ("mobilenet", 32)])
def test_whole_networks_equal_keras(name, side):
    model = build_model(get_model(name), BuildOptions((side, side, 3), 5, seed=1, dropout=0.0))
    images = tf.random.stateless_normal([16, side, side, 3], [1, 1])
    # At 1x1 pixel a channel has 8 numbers, whose statistics amplify differences in the last digits.
    for training in (True, False) if side == 64 else (False,):
        keras_s, ours = next(iter(both(model, images, training)))
        np.testing.assert_allclose(
            ours, keras_s, rtol=1e-3, atol=1e-3 * float(tf.reduce_max(tf.abs(keras_s)))
        )


@compiled
def test_settings_of_numba_in_the_current_folder_are_not_read(tmp_path):
    """Such a file could name a folder of compiled code, which Numba would load."""
    (tmp_path / ".numba_config.yaml").write_text(f"cache_dir: {tmp_path}/trap\ndisable_jit: 1\n")
    program = (
        "from ipucnn import compiled; compiled.import_numba(); import numba; numba.config.reload_config();"
        "numba.njit(lambda x: x + 1)(1);"
        "print('trap' not in numba.config.CACHE_DIR, numba.config.DISABLE_JIT)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if os.path.isabs(p))}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["True", "0"], done.stderr
    assert not (tmp_path / "trap").exists()


@compiled
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no locator available"), EOFError("Ran out of input"), OSError(28, "No space left")],
)
def test_numba_compiles_without_a_working_cache(monkeypatch, error):
    def njit(*signatures, **options):
        if options.pop("cache", False):
            raise error
        return lambda function: (function, signatures, options["nogil"])

    monkeypatch.setattr(kernels.numba, "njit", njit)
    function, signatures, nogil = jit(kernels.numba.int64)(len)
    assert function is len and len(signatures) == 1 and nogil is True


@pytest.mark.parametrize("name", ["conv 1", "_x", "größe", "a:b", "block/conv/", "", "block1a_se_reduce"])
def test_any_name_of_a_layer_makes_a_scope_of_a_graph(name):
    def compute(x):
        with tf.name_scope(_scope(name)):
            return x + 1.0

    names = [
        op.name
        for op in tf.function(compute).get_concrete_function(tf.TensorSpec([2])).graph.get_operations()
    ]
    assert any("/add" in given for given in names)
    assert name != "block1a_se_reduce" or f"{name}/add" in names
