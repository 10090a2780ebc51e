"""The crop that copies on IPUs, against a naive crop, and its calls of the SDK on the test double."""

import contextlib
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from poplar_double import installed
from support.sessions import CLASSES, SIZE, data, drawn, make_program, restart_names, run
from tensorflow import keras
from test_custom_ops import crop_program, needs_compiler  # noqa: F401
from test_custom_ops import run as run_compiled

from ipucnn.config.options import RunConfig
from ipucnn.models import custom_ops
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.layers import per_sample
from ipucnn.models.layers.per_sample import Cropping2D
from ipucnn.models.registry import get_model
from ipucnn.sessions.factory import create_session

BORDERS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


def naive_crop(images, borders):
    (top, bottom), (left, right) = borders
    height, width = images.shape[1] - top - bottom, images.shape[2] - left - right
    part = np.zeros((len(images), height, width, images.shape[3]), images.dtype)
    for y in range(height):
        for x in range(width):
            part[:, y, x] = images[:, y + top, x + left]
    return part


def naive_pad(part, borders):
    (top, bottom), (left, right) = borders
    batch, height, width, channels = part.shape
    whole = np.zeros((batch, height + top + bottom, width + left + right, channels), part.dtype)
    for y in range(height):
        for x in range(width):
            whole[:, y + top, x + left] = part[:, y, x]
    return whole


def numbers(attributes):
    """Returns the borders and the size; test_custom_ops.py's program checks the version before them."""
    return list(map(int, attributes.split()))[1:]


def crop_operation(inputs, attributes):
    """Computes the same as CropNHWC of the library."""
    (image,), (top, left, bottom, right, height, width) = inputs, numbers(attributes)
    assert tuple(image.shape[1:3]) == (height, width)
    return [image[:, top : height - bottom, left : width - right]]


def pad_operation(inputs, attributes):
    """Computes the same as PadNHWC of the library, which is the gradient."""
    (part,), (top, left, bottom, right, height, width) = inputs, numbers(attributes)
    whole = tf.pad(part, [[0, 0], [top, bottom], [left, right], [0, 0]])
    assert tuple(whole.shape[1:3]) == (height, width)
    return [whole]


def operations(machine):
    """Returns the names of the built operations, in order."""
    return [call["name"] for call in machine.calls("precompiled_user_op")]


@pytest.fixture
def library(tmp_path, monkeypatch):
    path = tmp_path / custom_ops.CROP_LIBRARY
    path.write_bytes(b"")
    monkeypatch.setenv(custom_ops.FOLDER_VARIABLE, str(tmp_path))
    return path.resolve()


@contextlib.contextmanager
def with_operations(**facts):
    """Installs the test double of the SDK on a machine where the library was built.

    As in the library, the operations have no gradient of their own: the driver's would take the whole image.
    """
    with installed(**facts) as machine:
        machine.user_ops.update(CropNHWC=crop_operation, PadNHWC=pad_operation)
        yield machine


@pytest.fixture
def sdk(library):
    """Provides the SDK's operation in the scope of the SDK's strategy."""
    with with_operations() as machine:
        from tensorflow.python import ipu

        with ipu.ipu_strategy.IPUStrategy().scope():
            yield machine


def crop_and_gradient(layer, images, weights):
    images = tf.constant(images)
    with tf.GradientTape() as tape:
        tape.watch(images)
        part = layer(images)
        loss = tf.reduce_sum(part * weights)
    return part.numpy(), tape.gradient(loss, images).numpy()


def check(borders, batch, channels):
    top, bottom, left, right = borders
    borders = ((top, bottom), (left, right))
    random = np.random.RandomState(sum(borders[0]) + 7 * channels)
    images = random.rand(batch, top + bottom + 2, left + right + 3, channels).astype("float32")
    weights = random.rand(batch, 2, 3, channels).astype("float32")
    part, gradient = crop_and_gradient(Cropping2D(borders), images, weights)
    np.testing.assert_array_equal(part, naive_crop(images, borders))
    np.testing.assert_array_equal(gradient, naive_pad(weights, borders))


@given(borders=BORDERS, batch=st.integers(1, 2), channels=st.integers(1, 3))
@settings(max_examples=15)
def test_the_plain_crop_equals_a_naive_one(borders, batch, channels):
    assert not per_sample.on_ipu()
    check(borders, batch, channels)


@pytest.mark.parametrize("borders", [(0, 0, 0, 0), (1, 2, 3, 0), (2, 2, 2, 2), (0, 3, 1, 0)])
def test_the_custom_operation_equals_a_naive_crop(sdk, borders):
    check(borders, 2, 3)
    assert operations(sdk) == ["CropNHWC", "PadNHWC"]
    forward, backward = sdk.calls("precompiled_user_op")
    assert forward["attributes"] == backward["attributes"]


@needs_compiler
def test_the_compiled_operations_take_the_attributes_of_the_layer(sdk, crop_program):  # noqa: F811
    images, weights = (np.arange(4 * n * n + 4 * n, dtype="f4").reshape(2, n, n + 1, 2) for n in (5, 2))
    part, gradient = crop_and_gradient(Cropping2D(((1, 2), (2, 1))), images, weights)
    forward, backward = sdk.calls("precompiled_user_op")
    for call, values, expected in ((forward, images, part), (backward, weights, gradient)):
        output, *_ = run_compiled(crop_program, call["name"], call["attributes"], values)
        np.testing.assert_array_equal(output, expected)


def test_the_backward_operation_takes_only_the_gradient(sdk):
    layer = Cropping2D(((1, 0), (0, 1)))

    @tf.function
    def step(images):
        part = layer(images)
        return tf.gradients(tf.reduce_sum(part * part), images)[0]

    images = np.random.RandomState(0).rand(2, 3, 3, 1).astype("float32")
    expected = 2 * naive_pad(naive_crop(images, ((1, 0), (0, 1))), ((1, 0), (0, 1)))
    np.testing.assert_allclose(step(tf.constant(images)).numpy(), expected, rtol=1e-6)
    assert operations(sdk) == ["CropNHWC", "PadNHWC"]
    assert sdk.calls("precompiled_user_op")[1]["inputs"] == [(2, 2, 2, 1)]


def test_building_a_network_only_infers_shapes(sdk):
    inputs = keras.Input((6, 6, 2))
    assert tuple(Cropping2D(1)(inputs).shape) == (None, 4, 4, 2)
    assert operations(sdk) == []


@pytest.mark.parametrize("name", ["IPUStrategyV1", "PopDistStrategy"])
def test_only_strategies_of_the_sdk_run_on_ipus(name):
    assert not per_sample.on_ipu()
    strategy = type(name, (tf.distribute.OneDeviceStrategy,), {})("/cpu:0")
    with strategy.scope():
        assert per_sample.on_ipu()
        assert strategy.run(lambda: per_sample.on_ipu())
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        assert not per_sample.on_ipu()


def test_without_the_library_the_plain_crop_is_used(sdk, tmp_path, monkeypatch):
    monkeypatch.setenv(custom_ops.FOLDER_VARIABLE, str(tmp_path / "empty"))
    assert custom_ops.crop_library() is None
    check((1, 2, 3, 0), 1, 1)
    assert operations(sdk) == []


def test_the_library_is_searched_for_beside_the_sources(monkeypatch, library):
    assert custom_ops.crop_library() == library
    monkeypatch.delenv(custom_ops.FOLDER_VARIABLE)
    library_path = custom_ops.crop_library()
    assert library_path is None or library_path.parts[-3:] == ("custom_ops", "build", custom_ops.CROP_LIBRARY)


def test_configuration_round_trip_of_the_layer():
    layer = Cropping2D(((1, 2), (3, 4)), name="crop")
    restored = Cropping2D.from_config(layer.get_config())
    assert restored.cropping == ((1, 2), (3, 4))
    serialized = keras.layers.serialize(layer)
    assert type(keras.layers.deserialize(serialized)) is Cropping2D


@pytest.mark.slow
def test_unet_uses_the_crop_for_its_four_skips(sdk, monkeypatch):
    record = get_model("unet")
    size = record.min_size
    options = BuildOptions((size, size, 1), 2, base_filters=1, batch_size=1, dropout=0.0, norm="none", seed=3)
    images = np.random.RandomState(0).rand(1, size, size, 1).astype("float32")
    model = build_model(record, options)
    sdk.log.clear()
    copied = model(images, training=False)
    assert operations(sdk) == ["CropNHWC"] * 4
    monkeypatch.setattr(per_sample, "on_ipu", lambda: False)
    plain = build_model(record, options)(images, training=False)
    np.testing.assert_array_equal(copied.numpy(), plain.numpy())
    assert {type(layer) for layer in model.layers if "crop" in layer.name} == {Cropping2D}


def skipping_model():
    """Returns a network with a cropped skip, as in U-Net."""
    restart_names()
    inputs = keras.Input((SIZE, SIZE, 2), name="input")
    skip = keras.layers.Conv2D(3, 3, padding="same", activation="relu", name="skip")(inputs)
    x = keras.layers.Conv2D(3, 3, name="valid")(skip)
    x = keras.layers.Concatenate(name="join")([Cropping2D(((1, 1), (1, 1)), name="crop")(skip), x])
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return drawn(keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(x)), 0)


@pytest.mark.slow
@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("stages", [1, 2])
def test_the_poplar_session_trains_alike_with_and_without_the_library(library, stages):
    """In a pipeline the first stage crops the skip, and only the crop is sent on."""
    changes = {}
    if stages == 2:
        changes = dict(num_stages=2, pipeline_splits=("valid",), device_mapping=(0, 1), ipus_per_replica=2)
        changes["num_ipus"] = 2
    program = make_program(2, 4, 1, updates_per_epoch=2, **changes)
    images, labels = data(2 * program.global_batch_size, 5)
    trained = []
    for built in (True, False):
        if not built:
            library.unlink()
        with with_operations() as machine:
            session = create_session("auto", config=dataclasses.replace(RunConfig(), num_replicas=1))
            weights, *_ = run(session, skipping_model(), program, ("sgd", {}, {}), images, labels)
            assert set(operations(machine)) == ({"CropNHWC", "PadNHWC"} if built else set())
        trained.append(weights)
    for name, weight in trained[0].items():
        np.testing.assert_allclose(weight, trained[1][name], rtol=0, atol=1e-6, err_msg=name)
