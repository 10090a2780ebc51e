"""Grouped convolutions, hard activations, the shortcut of CIFAR ResNet, and counting."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sessions import chain
from tensorflow import keras

from ipucnn.models.counts import count_macs, count_parameters, layer_macs, layer_parameters
from ipucnn.models.layers import per_sample
from ipucnn.models.layers.per_sample import GroupedConv2D, HardSigmoid, HardSwish, SubsamplePad


def block_diagonal(kernel, groups):
    """Returns the kernel of the dense convolution that equals a grouped one."""
    height, width, ins, outs = kernel.shape
    dense = np.zeros((height, width, ins * groups, outs), np.float32)
    for g in range(groups):
        mine = slice(g * outs // groups, (g + 1) * outs // groups)
        dense[:, :, g * ins : (g + 1) * ins, mine] = kernel[..., mine]
    return dense


@pytest.mark.parametrize("groups, strides, padding", [(1, 1, "same"), (2, 2, "same"), (4, 1, "valid")])
def test_grouped_convolution_equals_a_block_diagonal_dense_one(groups, strides, padding):
    rng = np.random.RandomState(0)
    x = tf.constant(rng.randn(2, 7, 6, 8).astype("float32"))
    layer = GroupedConv2D(12, 3, strides=strides, padding=padding, groups=groups, activation="relu")
    layer.build(x.shape)
    layer.set_weights([rng.randn(*w.shape) for w in layer.weights])
    kernel, bias = layer.get_weights()
    dense = tf.constant(block_diagonal(kernel, groups))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, dense])
        grouped = layer(x)
        expected = tf.nn.relu(tf.nn.conv2d(x, dense, strides, padding.upper()) + bias)
        losses = [tf.reduce_sum(y * y * tf.cos(y)) for y in (grouped, expected)]
    np.testing.assert_allclose(grouped, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(tape.gradient(losses[0], x), tape.gradient(losses[1], x), rtol=1e-3, atol=1e-2)
    gradient = tape.gradient(losses[1], dense).numpy()
    mine = tape.gradient(losses[0], layer.trainable_variables[0])
    for g in range(groups):
        ins, outs = (
            slice(g * 8 // groups, (g + 1) * 8 // groups),
            slice(g * 12 // groups, (g + 1) * 12 // groups),
        )
        np.testing.assert_allclose(mine.numpy()[..., outs], gradient[:, :, ins, outs], rtol=1e-3, atol=1e-2)


def test_grouped_convolution_native_and_split_agree(monkeypatch):
    x = tf.random.stateless_normal([2, 6, 6, 8], [1, 2])
    layer = GroupedConv2D(8, 3, groups=4, padding="same")
    split = layer(x)
    monkeypatch.setattr(per_sample, "native_groups", lambda: True)
    np.testing.assert_allclose(layer(x), split, rtol=1e-4, atol=1e-5)


def test_hard_activations():
    x = tf.constant([[-4.0, -3.0, -1.0, 0.0, 2.0, 3.0, 5.0]])
    np.testing.assert_allclose(HardSigmoid()(x), np.clip(x / 6 + 0.5, 0, 1), atol=1e-6)
    np.testing.assert_allclose(HardSwish()(x), x * np.clip(x / 6 + 0.5, 0, 1), atol=1e-6)


def test_shortcut_takes_every_second_pixel_and_appends_zeros():
    x = np.arange(2 * 5 * 4 * 3, dtype="float32").reshape(2, 5, 4, 3)
    layer = SubsamplePad(5)
    shortcut = layer(tf.constant(x)).numpy()
    np.testing.assert_array_equal(shortcut[..., :3], x[:, ::2, ::2])
    assert not shortcut[..., 3:].any()
    assert tuple(layer.compute_output_shape(x.shape)) == shortcut.shape
    assert SubsamplePad.from_config(layer.get_config()).channels == 5


def layer_in_model(layer, shape):
    chain(shape, layer)
    return layer


sizes = st.integers(1, 4)


@settings(max_examples=15)
@given(sizes, sizes, st.integers(5, 9), st.integers(5, 9), sizes, st.integers(1, 2), st.booleans())
def test_convolution_macs_are_positions_times_taps_times_channels(ins, outs, h, w, kernel, stride, padded):
    layer = keras.layers.Conv2D(outs, kernel, strides=stride, padding="same" if padded else "valid")
    layer_in_model(layer, (h, w, ins))
    positions = [len(range(0, n if padded else n - kernel + 1, stride)) for n in (h, w)]
    assert layer_macs(layer) == positions[0] * positions[1] * kernel * kernel * ins * outs
    assert layer_parameters(layer) == kernel * kernel * ins * outs + outs


def test_macs_of_the_other_layers():
    for layer, macs in (
        (GroupedConv2D(8, 3, groups=4, padding="same"), 5 * 6 * 9 * 2 * 8),
        (keras.layers.DepthwiseConv2D(3, padding="same"), 5 * 6 * 9 * 8),
        (keras.layers.SeparableConv2D(7, 3, padding="same"), 5 * 6 * (9 * 8 + 8 * 7)),
        (keras.layers.Conv2DTranspose(7, 2, strides=2), 5 * 6 * 4 * 8 * 7),
        (keras.layers.ReLU(), 0),
    ):
        assert layer_macs(layer_in_model(layer, (5, 6, 8))) == macs, layer.name
    assert layer_macs(layer_in_model(keras.layers.Dense(7), (11,))) == 77
    with pytest.raises(ValueError, match="static"):
        layer_macs(layer_in_model(keras.layers.Conv2D(2, 1), (None, 6, 8)))


def test_counts_of_a_model_leave_out_moving_statistics():
    first = keras.layers.Conv2D(3, 1, use_bias=False), keras.layers.BatchNormalization()
    model = chain((4, 4, 2), *first, keras.layers.Flatten(), keras.layers.Dense(5))
    assert count_parameters(model) == 6 + 6 + 48 * 5 + 5
    assert count_macs(model) == 16 * 6 + 48 * 5
