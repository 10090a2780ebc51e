"""Overlapping patches give the result of one pass over the whole mirrored image, whatever their size."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import check_raises

from ipucnn.config.resolve import resolve
from ipucnn.datasets.base import DatasetInfo, MaskedExamples
from ipucnn.datasets.pixels import InputRange
from ipucnn.datasets.segmentation.membranes import draw_tissue
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.models.registry import get_model
from ipucnn.runs import setup as run_setup
from ipucnn.runs.images.segmentation import OUTPUTS, PatchwiseNetwork, check_patch_size, choose_patch
from ipucnn.runs.sources import Weights
from ipucnn.runs.trained import TrainedSetup, facts_only
from ipucnn.sessions.factory import create_session

MARGIN, STEP = 184, 16


class Drawn(Weights):
    """Draws all weights but the kernels, which stay as they are initialised."""

    def fill(self, setup, model):
        random = np.random.RandomState(1)
        for weight in model.weights:
            values = random.normal(0, 0.1, weight.shape)
            if "variance" in weight.name:
                weight.assign(np.abs(values) + 0.5)
            elif "kernel" not in weight.name:
                weight.assign(values)
        return []


class NotFinite(Weights):
    def fill(self, setup, model):
        for weight in model.weights:
            weight.assign(np.full(weight.shape, np.nan))
        return []


def make_trained(norm="none", weights=Drawn):
    """Makes a U-Net of two filters with its initial kernels, but with other biases and moving statistics."""
    flags = {"base_filters": "2", "image_size": "204", "norm_layer": norm, "dataset": "membranes"}
    resolved = resolve("evaluate", flags, model="unet")
    info = DatasetInfo("membranes", "segmentation", 2, (204, 204, 1), 0, 0, ("a", "b"), "", (128.0,), (60.0,))
    return TrainedSetup(
        resolved,
        facts_only(info),
        (204, 204, 1),
        (20, 20),
        0,
        InputRange.of(resolved.record.input_range, info, 1),
        weights(resolved, "drawn"),
    )


def one_pass(trained, image):
    """Returns the logits of one forward pass over the image, mirrored by 92 pixels and up to the next legal size."""
    height, width = image.shape[:2]
    sides = [length + (4 - length) % 16 + MARGIN for length in (height, width)]
    row, column = (
        np.pad(np.arange(n), (92, side - 92 - n), mode="reflect") for n, side in zip((height, width), sides)
    )
    padded = image[row][:, column].astype(np.float32)
    setup = replace(trained, input_shape=(*sides, 1))
    model = run_setup.build(setup)
    trained.weights.fill(setup, model)
    predictor = create_session("cpu").predictor(model)
    return predictor.predict([(padded[None] - 128.0) / 60.0])[0][0, :height, :width]


def draw(height, width):
    return draw_tissue(height, width, np.random.RandomState(height))[0][..., None]


@pytest.fixture(scope="module")
def trained():
    return make_trained()


@pytest.fixture(scope="module")
def networks(trained):
    return {patch: PatchwiseNetwork(trained, patch) for patch in (204, 236, None)}


@pytest.mark.slow
@pytest.mark.slow_cases("size0", "size2")
@pytest.mark.parametrize("size", [(1, 1), (33, 20), (101, 150)])
def test_patches_equal_one_pass_over_the_whole_image(trained, networks, size):
    image = draw(*size)
    whole = one_pass(trained, image)
    assert whole.std() > 0.01 or size == (1, 1)
    for network in networks.values():
        np.testing.assert_allclose(network.logits(image), whole, rtol=1e-5, atol=1e-5)
    assert network.device == "cpu" and all(
        side - MARGIN in OUTPUTS for size in network.patch_sizes for side in size
    )


@pytest.mark.slow
def test_batch_norm_uses_its_moving_statistics(networks):
    normed, image = make_trained("batch_norm"), draw(45, 50)
    whole = one_pass(normed, image)
    assert np.abs(whole - networks[204].logits(image)).max() > 0.1
    np.testing.assert_allclose(PatchwiseNetwork(normed, 220).logits(image), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "size", "patch", "told"),
    [
        ("group_norm", (20, 20), 204, None),
        ("group_norm", (21, 9), 252, None),
        ("group_norm", (9, 400), 636, None),
        ("group_norm", (2048, 2048), 2236, None),
        ("group_norm", (9, 2117), 204, 2316),
        ("batch_norm", (2117, 400), 700, None),
    ],
)
def test_group_norm_takes_an_image_as_one_patch_or_suggests_a_size(norm, size, patch, told):
    trained = make_trained(norm)
    network = PatchwiseNetwork(trained)
    assert network._output(size) == (patch - MARGIN,) * 2
    warnings = [note.line for note in network.warn_of_seams([(1, 1), size])]
    assert [f"warning: {note}" for note in network.notes] == warnings
    assert len(warnings) == (told is not None)
    if told is not None:
        assert (
            f"--patch-size {told} takes the largest image, {size[0]}x{size[1]}, as one patch" in warnings[0]
        )
        assert not list(PatchwiseNetwork(trained, told).warn_of_seams([size]))


@pytest.mark.slow
def test_group_norm_images_have_no_seams():
    trained, image = make_trained("group_norm"), draw(60, 50)
    whole = PatchwiseNetwork(trained)
    np.testing.assert_array_equal(whole.logits(image), PatchwiseNetwork(trained, 252).logits(image))
    assert np.abs(PatchwiseNetwork(trained, 204).logits(image) - whole.logits(image)).max() > 0.01


@pytest.mark.slow
def test_pixel_depends_on_place_modulo_16_and_107_pixels_around(networks):
    network, image = networks[236], draw(250, 250)
    whole = network.logits(image)
    inner = slice(128, 142)  # at least 107 pixels from all borders in both images
    for shift, same in ((16, True), (1, False), (8, False)):
        moved = network.logits(image[shift:, shift:])
        shifted = slice(inner.start - shift, inner.stop - shift)
        gap = np.abs(moved[shifted, shifted] - whole[inner, inner]).max()
        assert (gap < 1e-5) == same, (shift, gap)
    changed = image.copy()
    changed[200:] = 0
    np.testing.assert_allclose(network.logits(changed)[:93], whole[:93], atol=1e-5)
    assert np.abs(network.logits(changed)[110:120] - whole[110:120]).max() > 1e-4


@pytest.mark.slow
def test_non_finite_outputs_are_refused():
    broken = make_trained(weights=NotFinite)
    check_raises(DataError, "not finite", "", PatchwiseNetwork(broken, 204).logits, draw(5, 5))


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_chosen_patch_size_computes_the_fewest_pixels(height, width):
    def pixels(output):
        stride = output - output % STEP
        counts = [1 if output >= n else 1 + -(-(n - output) // stride) for n in (height, width)]
        return counts[0] * counts[1] * (output + MARGIN) ** 2

    chosen = choose_patch(height, width, OUTPUTS, MARGIN, STEP)
    assert pixels(chosen) == min(map(pixels, OUTPUTS))


@pytest.mark.parametrize(
    "size, hint", [(100, "204"), (188, "204"), (205, "204 or 220"), (571, "556 or 572"), (0, "204")]
)
def test_impossible_patch_sizes_are_refused(size, hint):
    error = check_raises(ConfigurationError, "", "", check_patch_size, get_model("unet"), size)
    assert error.hint == f"--patch-size {hint}"
    check_patch_size(get_model("unet"), 572)
    check_patch_size(get_model("unet"), None)


@pytest.mark.slow
@pytest.mark.parametrize("versions", [2, 4, 8])
def test_probabilities_of_test_time_augmentation_are_averaged(trained, versions):
    image = draw(37, 24)
    every = [(flip, turns) for turns in (0, 2, 1, 3) for flip in (False, True)]
    chosen = every[:versions]
    expected = []
    for flip, turns in chosen:
        seen = np.rot90(np.fliplr(image) if flip else image, turns)
        logits = PatchwiseNetwork(trained, 204).logits(np.ascontiguousarray(seen)).astype(np.float64)
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        back = np.rot90(exponentials / exponentials.sum(axis=-1, keepdims=True), -turns)
        expected.append(np.fliplr(back) if flip else back)
    assert len({turns for _, turns in chosen}) == {2: 1, 4: 2, 8: 4}[versions]
    network = PatchwiseNetwork(trained, 204, test_time_augmentation=versions)
    probabilities = np.exp(network.logits(image))
    np.testing.assert_allclose(probabilities, np.mean(expected, axis=0), atol=1e-6)
    assert np.abs(probabilities - expected[0]).max() > 1e-4


def test_other_numbers_of_test_time_augmentation_are_refused(trained):
    for versions, near in ((0, 1), (3, 2), (7, 8), (9, 8)):
        words = (f"--test-time-augmentation {number}" for number in (versions, near))
        check_raises(ConfigurationError, *words, PatchwiseNetwork, trained, test_time_augmentation=versions)


@pytest.mark.slow
def test_evaluation_batches_count_patches_and_not_images(tmp_path):
    """One image of 192x192 is 144 patches for a network that sees 204 and predicts 20: one by one is far too slow."""
    flags = {"base_filters": "2", "image_size": "204", "dataset": "membranes", "micro_batch_size": "1"}
    setup = run_setup.prepare(resolve("train", flags, model="unet"), 1)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (1, 192, 192, 1)).astype(np.uint8)
    examples = MaskedExamples.of(list(images), list((images[..., 0] > 128).astype(np.uint8)))
    info = replace(setup.source.info, patchwise=True)
    setup = replace(setup, source=replace(setup.source, eval=examples, info=info))
    batches = list(run_setup.evaluation_batches(setup, 1))
    assert [len(images) for images, _, _ in batches] == [12] * 12
    assert sum(float(np.sum(weights)) for _, _, weights in batches) == 192 * 192
