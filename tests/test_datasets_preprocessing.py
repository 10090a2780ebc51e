"""Sizes, channels and ranges of the network's input."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datasets_pipeline import make_source

from ipucnn.config.options import SPECS
from ipucnn.datasets import pixels, preprocessing
from ipucnn.datasets.base import ArrayExamples
from ipucnn.datasets.pipeline import eval_batches


def one_image(value, input_shape, input_range, channels=3):
    images = np.full((2, 6, 6, channels), 0, np.uint8)
    images[:] = value
    examples = ArrayExamples(images, np.zeros(2, np.int32))
    source = make_source(channels=channels)
    chosen = pixels.InputRange.of(input_range, source.info, input_shape[2])
    batches = eval_batches(examples, source.info, batch_size=2, input_shape=input_shape, input_range=chosen)
    return next(batches.as_numpy_iterator())[0][0, 0, 0], source.info


@pytest.mark.parametrize("mode", ["caffe", "torch", "tf"])
def test_ranges_equal_those_of_keras_applications(mode):
    from tensorflow.keras.applications import imagenet_utils

    pixel = np.array([10, 100, 250], np.uint8)
    expected = imagenet_utils.preprocess_input(pixel.astype(np.float32).reshape(1, 1, 1, 3), mode=mode)
    np.testing.assert_allclose(one_image(pixel, (6, 6, 3), mode)[0], np.ravel(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_grey_and_colour():
    np.testing.assert_array_equal(one_image(77, (6, 6, 3), "raw", channels=1)[0], [77, 77, 77])
    grey, _ = one_image(np.array([10, 100, 250], np.uint8), (6, 6, 1), "raw")
    np.testing.assert_allclose(grey, [0.299 * 10 + 0.587 * 100 + 0.114 * 250], rtol=1e-5)
    for input_range in pixels.INPUT_RANGES:
        assert np.isfinite(one_image(77, (6, 6, 3), input_range, channels=1)[0]).all()
        assert np.isfinite(one_image(77, (6, 6, 1), input_range)[0]).all()


@given(
    height=st.integers(2, 20),
    width=st.integers(2, 20),
    new_height=st.integers(1, 30),
    new_width=st.integers(1, 30),
)
@settings(max_examples=15)
def test_resizing_keeps_constant_images_and_averages_when_shrinking(height, width, new_height, new_width):
    plain = tf.fill([1, height, width, 2], 93.0)
    resized = preprocessing.resize(plain, new_height, new_width).numpy()
    assert resized.shape == (1, new_height, new_width, 2)
    np.testing.assert_allclose(resized, 93.0, rtol=1e-4)
    checks = tf.cast((tf.range(16)[:, None] + tf.range(16)) % 2 * 200, tf.float32)[None, :, :, None]
    np.testing.assert_allclose(preprocessing.resize(checks, 4, 4).numpy()[0, 1:3, 1:3], 100, atol=8)


def test_masks_are_resized_without_new_classes_and_cropped_to_the_centre():
    masks = tf.constant(np.random.RandomState(0).randint(0, 3, (2, 9, 7)).astype(np.uint8))
    resized = preprocessing.resize_masks(masks, 18, 14).numpy()
    np.testing.assert_array_equal(resized, np.repeat(np.repeat(masks.numpy(), 2, 1), 2, 2))
    np.testing.assert_array_equal(preprocessing.crop_centre(masks, 5, 3).numpy(), masks.numpy()[:, 2:7, 2:5])


# Each range as its definition says, written out: not the functions under test.
RANGES = {
    "standard": lambda x, mean, std: (x - mean) / std,
    "unit": lambda x, mean, std: x / 255,
    "tf": lambda x, mean, std: x / 127.5 - 1,
    "raw": lambda x, mean, std: x,
    "caffe": lambda x, mean, std: x[..., ::-1] - np.array([103.939, 116.779, 123.68]),
    "torch": lambda x, mean, std: (x / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225],
    "image": lambda x, mean, std: np.stack([(image - image.mean()) / image.std() for image in x]),
}


def test_the_option_has_every_range():
    (option,) = (spec for spec in SPECS if spec.name == "normalise")
    assert {*option.choices} == {"network", *pixels.INPUT_RANGES}


@pytest.mark.parametrize("name", pixels.INPUT_RANGES)
def test_a_range_is_the_same_in_the_pipeline_in_a_network_in_layers_and_in_an_export(name):
    """Five ways of one range, each compared with its definition in 64 bits."""
    images = np.random.default_rng(3).integers(0, 256, (3, 6, 5, 3)).astype(np.float64)
    info = make_source(channels=3).info
    expected = RANGES[name](images, np.array(info.mean), np.array(info.std))
    range_ = pixels.InputRange.of(name, info, 3)
    bound = {"rtol": 1e-5, "atol": 2e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(range_.apply(tf.constant(images, tf.float32)), expected, **bound)
    np.testing.assert_allclose(range_.apply_in_network(tf.constant(images, tf.float32)), expected, **bound)
    outputs = tf.constant(images, tf.float32)
    for _, kind, settings_ in range_.layers():
        outputs = getattr(tf.keras.layers, kind)(**settings_)(outputs)
    np.testing.assert_allclose(outputs, expected, **bound)
    if range_.scaling is not None:
        turned = images[..., ::-1] if range_.reverse else images
        np.testing.assert_allclose(turned * range_.scaling.factor + range_.scaling.offset, expected, **bound)
    described, exported = range_.describe(), images
    if described["reverse_channels"]:
        exported = exported[..., ::-1]
    if described["formula"] is not None:
        formula = described["formula"]
        exported = (exported * formula["scale"] - formula["offsets"]) * formula["factors"]
    if not described["per_image"]:
        np.testing.assert_allclose(exported, expected, **bound)
    assert described["range"] == name and described["per_image"] == (name == "image")


@pytest.mark.parametrize("is_tensor", [True, False])
def test_8_bits_hold_whole_numbers_exactly_and_limit_what_augmentation_leaves(is_tensor):
    """Elastic patches with contrast reach from -51 to 306."""
    whole = np.arange(256, dtype=np.float32)
    beyond = np.float32([-51, -0.6, -0.4, 255.4, 255.6, 256, 306, 1e9, -1e9])
    values = np.concatenate([whole, beyond, np.float32([0.4, 0.6, 99.7])])
    expected = [*range(256), 0, 0, 0, 255, 255, 255, 255, 255, 0, 0, 1, 100]
    images = tf.constant(values) if is_tensor else values
    packed = np.asarray(pixels.Transfer("uint8").pack(images))
    assert packed.dtype == np.uint8 and packed.tolist() == expected
    assert pixels.in_8_bits(images).tolist() == expected
    assert np.asarray(pixels.Transfer("float32").pack(images)).tolist() == values.tolist()
