"""What the host computes otherwise than Keras' layers, against those layers and against loops in NumPy."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow import keras

from ipucnn.compiled import HAS_KERNELS, import_numba, jit
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.layers import (
    BatchNormalization,
    ExecutionContext,
    SubsamplePad,
    execution_context,
)
from ipucnn.models.registry import get_model
from ipucnn.sessions.host import fast_layers
from ipucnn.sessions.host.arithmetic import Arithmetic, Rounding
from ipucnn.sessions.host.network import Network

PLAIN = Rounding(Arithmetic("32.32"))


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.sampled_from(["SAME", "VALID"]))
def test_tap_ranges_name_the_pixels_a_tap_meets(size, kernel, stride, padding):
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


def small_network(size, layer, channels=4):
    """The layer, batch norm and ReLU, with weights unlike the initial ones."""
    keras.backend.clear_session()
    inputs = keras.Input((*size, channels))
    x = keras.layers.Activation("relu", name="activation")(BatchNormalization(name="norm")(layer(inputs)))
    model = keras.Model(inputs, keras.layers.Flatten(name="flat")(x))
    rng = np.random.default_rng(1)
    for weight in model.weights:
        low = 0.5 if "moving_variance" in weight.name else -1.0
        weight.assign(rng.uniform(low, 1.0, weight.shape))
    return model


def both(model, images, training):
    """Outputs and gradients of the trainable weights: of Keras' forward pass and of the host's network."""
    weights = [
        getattr(w, "value", w) if not isinstance(w, tf.Variable) else w for w in model.trainable_weights
    ]
    network = Network(model, on_cpu=True, alone=False)
    found = []
    for forward in (lambda: model(images, training=training), None):
        context = ExecutionContext(2, tf.zeros([2, 2], tf.int32), 2)
        with tf.GradientTape() as tape:
            if forward is None:
                y = network(images, training, PLAIN, context)
            else:
                with execution_context(context):
                    y = forward()
            loss = tf.reduce_sum(tf.sin(y))
        # TensorFlow 2.6 has no gradient of a spread kernel on a CPU.
        spread = any(getattr(layer, "dilation_rate", (1, 1)) != (1, 1) for layer in model.layers)
        unconnected = tf.UnconnectedGradients.ZERO
        gradients = [] if spread else tape.gradient(loss, weights, unconnected_gradients=unconnected)
        statistics = [s for _, *pair in context.batch_statistics for s in pair]
        found.append([y, *gradients, *statistics])
    return zip(*found)


def assert_computes_as_keras(model, size):
    images = tf.constant(np.random.default_rng(2).normal(size=(6, *size, 4)).astype(np.float32))
    for training in (True, False):
        pairs = list(both(model, images, training))
        # Gradients that cancel (of a bias before batch norm) are as exact as the largest ones.
        largest = max(1.0, *(np.abs(keras_s).max() for keras_s, _ in pairs))
        for keras_s, ours in pairs:
            np.testing.assert_allclose(ours, keras_s, rtol=1e-5, atol=1e-5 * largest)


SIZES = ((1, 1), (2, 2), (5, 4), (1, 6))
LAYERS = (
    lambda: keras.layers.Conv2D(6, 1, use_bias=False),
    lambda: keras.layers.Conv2D(6, 1, strides=2, activation="relu"),
    lambda: keras.layers.Conv2D(6, 3, padding="same"),
    lambda: keras.layers.Conv2D(6, 3, padding="same", strides=2, use_bias=False),
    lambda: keras.layers.Conv2D(6, 3, padding="same", dilation_rate=2),
    lambda: keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False),
    lambda: keras.layers.DepthwiseConv2D(5, padding="same", strides=2),
    lambda: keras.layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2),
)


@pytest.mark.parametrize(
    "layer, size",
    [
        pytest.param(i, size, marks=[] if (i + j) % 4 == 0 else pytest.mark.slow)
        for i in range(len(LAYERS))
        for j, size in enumerate(SIZES)
    ],
)
def test_convolution_norm_and_activation_are_keras(layer, size):
    assert_computes_as_keras(small_network(size, LAYERS[layer]()), size)


@pytest.mark.parametrize("size", [(4, 4), (8, 6), (5, 4), (7, 7), (2, 2), (1, 2)])
@pytest.mark.parametrize("kernel, zeros, is_left", [
    (3, ((0, 1), (0, 1)), lambda size: size % 2 == 0),  # as EfficientNets and MobileNets have them of even sizes
    (3, ((1, 1), (1, 1)), lambda size: size % 2 == 1),  # and of odd ones
    (5, ((1, 2), (1, 2)), lambda size: size % 2 == 0),
    (5, ((2, 2), (2, 2)), lambda size: size % 2 == 1),
    (3, ((1, 0), (1, 0)), lambda size: False),  # as nobody has them
    (3, ((1, 2), (1, 2)), lambda size: False),
])  # fmt: skip
@pytest.mark.parametrize("is_depthwise", [True, False])
def test_zeros_are_left_to_the_convolution_that_would_add_the_same(
    size, kernel, zeros, is_left, is_depthwise
):
    options = {"strides": 2, "use_bias": False, "name": "convolve"}
    convolve = (
        keras.layers.DepthwiseConv2D(kernel, **options)
        if is_depthwise
        else keras.layers.Conv2D(6, kernel, **options)
    )
    padded = keras.layers.ZeroPadding2D(zeros, name="zeros")
    if any(n + sum(pair) < kernel for n, pair in zip(size, zeros)):
        return
    model = small_network(size, lambda x: convolve(padded(x)))
    found = Network(model, on_cpu=True, alone=False)._fast[0]
    expected = all(is_left(n) for n in size)
    assert ("zeros" in found.done_in_training) == ("zeros" in found.done_in_inference) == expected
    assert_computes_as_keras(model, size)


def test_zeros_of_another_pipeline_stage_stay_there():
    zeros = keras.layers.ZeroPadding2D(((0, 1), (0, 1)), name="zeros")
    convolve = keras.layers.Conv2D(6, 3, strides=2, name="convolve")
    model = small_network((8, 8), lambda x: convolve(zeros(x)))
    images = tf.constant(np.random.default_rng(2).normal(size=(6, 8, 8, 4)).astype(np.float32))
    context = ExecutionContext(2, tf.zeros([2, 2], tf.int32), 2)
    with execution_context(context):
        expected = model(images, training=True)
    for splits in ((), ("zeros",), ("convolve",), ("norm",)):
        found = Network(model, splits, on_cpu=True, alone=False)(images, True, PLAIN, context)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_read_twice_or_looked_at_is_not_computed_with_the_next():
    """A skip from before the activation, and --precision 16.16 or --fp-exceptions, which need each layer's output."""
    keras.backend.clear_session()
    inputs = keras.Input((4, 4, 3))
    x = keras.layers.Conv2D(4, 1, name="conv")(inputs)
    normal = BatchNormalization(name="norm")(x)
    y = keras.layers.Activation("relu", name="relu")(normal)
    model = keras.Model(inputs, keras.layers.Add(name="add")([normal, y]))
    network = Network(model, on_cpu=True, alone=False)
    assert network._fast[0].done_in_training == [] and network._fast[0].done_in_inference == ["norm"]
    images = tf.random.stateless_normal([6, 4, 4, 3], [0, 1])
    for training in (True, False):
        for keras_s, ours in both(model, images, training):
            np.testing.assert_allclose(ours, keras_s, rtol=1e-4, atol=1e-4)
    model = keras.Model(inputs, y)
    alone = Network(model, on_cpu=True, alone=True)._fast[0]
    assert alone.done_in_training == alone.done_in_inference == []
    nothing = Network(model, on_cpu=False, alone=False)._fast[0]
    assert not nothing.training and not nothing.inference


@pytest.mark.parametrize("size", [(4, 4), (5, 4), (2, 6)])
def test_every_second_pixel(size):
    keras.backend.clear_session()
    inputs = keras.Input((*size, 3))
    model = keras.Model(inputs, SubsamplePad(5, name="skip")(inputs))
    images = tf.constant(np.random.default_rng(0).normal(size=(3, *size, 3)).astype(np.float32))
    found = Network(model, on_cpu=True, alone=False)(images, True, PLAIN)
    np.testing.assert_array_equal(found[..., :3], images[:, ::2, ::2])
    assert found.shape == (3, -(-size[0] // 2), -(-size[1] // 2), 5) and not np.any(found[..., 3:])


@pytest.mark.parametrize("name, side", [("efficientnet-b0", 64), ("cifar_resnet8", 64), ("mobilenet", 32)])
def test_whole_networks_are_keras(name, side):
    model = build_model(get_model(name), BuildOptions((side, side, 3), 5, seed=1, dropout=0.0))
    images = tf.random.stateless_normal([16, side, side, 3], [1, 1])
    # Of 8 numbers, which a channel has at 1x1 pixel, the statistics make much of the last digits.
    for training in (True, False) if side == 64 else (False,):
        keras_s, ours = next(iter(both(model, images, training)))
        np.testing.assert_allclose(
            ours, keras_s, rtol=1e-3, atol=1e-3 * float(tf.reduce_max(tf.abs(keras_s)))
        )


compiles = pytest.mark.skipif(not HAS_KERNELS, reason="Numba compiles nothing on Python 3.8")


@compiles
def test_settings_of_numba_in_the_current_folder_are_not_read(tmp_path):
    """They could name a folder of compiled code, which would be loaded."""
    (tmp_path / ".numba_config.yaml").write_text(f"cache_dir: {tmp_path}/trap\ndisable_jit: 1\n")
    program = (
        "from ipucnn.compiled import import_numba; numba = import_numba(); numba.config.reload_config();"
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


@compiles
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no locator available"), EOFError("Ran out of input"), OSError(28, "No space left")],
)
def test_without_a_cache_that_works_numba_compiles_all_the_same(monkeypatch, error):
    def njit(*signatures, **options):
        if options.pop("cache", False):
            raise error
        return lambda function: (function, signatures, options["nogil"])

    numba = import_numba()
    monkeypatch.setattr(numba, "njit", njit)
    function, signatures, nogil = jit(numba.int64)(len)
    assert function is len and len(signatures) == 1 and nogil is True
