"""Patches of images: every pixel once, mirrored borders, and augmentation that keeps image and mask aligned."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates
from scipy.stats import norm
from support.streams import RAW, check_pure, take

from ipucnn.datasets.augmentation import draws
from ipucnn.datasets.base import MaskedExamples, data_source
from ipucnn.datasets.pipeline import eval_batches
from ipucnn.datasets.segmentation import warp
from ipucnn.datasets.segmentation.patches import (
    IGNORED,
    mirror,
    patch_starts,
    patch_table,
    stitch,
)


def make_source(num=3, height=60, width=52, seed=0, sizes=()):
    """Returns smooth images of one size, or of the sizes, and masks that are a threshold of them."""
    rng = np.random.default_rng(seed)
    images = []
    for rows, columns in sizes or [(height, width)] * num:
        grid = np.mgrid[0 : 11 : rows * 1j, 0 : 10 : columns * 1j]
        images.append(128 + 60 * map_coordinates(rng.normal(size=(12, 11)), grid, order=3))
    images = [np.clip(image, 0, 255).astype(np.uint8)[..., None] for image in images]
    examples = MaskedExamples.of(images, [(image[..., 0] > 128).astype(np.uint8) for image in images])
    return data_source(
        examples, examples, name="test", task="segmentation", class_names=("a", "b"), location="test",
        augmentation="elastic", patchwise=True,
    )  # fmt: skip


OPTIONS = {"input_shape": (48, 48, 1), "input_range": RAW, "output_shape": (32, 32)}


@given(st.integers(1, 40), st.integers(-200, 200))
def test_mirror(size, index):
    image = np.arange(size)
    if size == 1:
        assert mirror(np.array([index]), 1).tolist() == [0]
        return
    reach = abs(index) + size
    padded = np.pad(image, reach, mode="reflect")
    assert mirror(np.array([index]), size)[0] == padded[index + reach]


@given(st.integers(1, 90), st.integers(1, 60), st.integers(1, 60), st.integers(1, 16))
def test_every_pixel_counts_in_one_patch(height, width, side, step):
    output = (max(side, step), max(side, step))
    table = patch_table([(height, width), (width, height)], output, step).tolist()
    totals = [np.zeros(size, int) for size in ((height, width), (width, height))]
    for image, row, column, first_row, first_column in table:
        assert row % step == column % step == 0 and first_row >= row and first_column >= column
        totals[image][first_row : row + output[0], first_column : column + output[1]] += 1
    assert all((total == 1).all() for total in totals)


def test_places_of_patches_equal_the_paper():
    assert patch_starts(512, 388, 16) == [0, 384] and patch_starts(512, 516, 16) == [0]
    # Patches smaller than the grid are side by side: 2209 patches of 4x4 pixels, not 34225.
    assert patch_starts(188, 4, 16) == list(range(0, 188, 4))


@settings(max_examples=20)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 30))
def test_stitched_patches_equal_the_image(height, width, side):
    image = np.arange(height * width).reshape(height, width)
    padded = np.pad(image, [(0, side), (0, side)], constant_values=-1)
    places = patch_table([image.shape], (side, side))[:, 1:3]
    patches = [padded[row : row + side, column : column + side] for row, column in places]
    np.testing.assert_array_equal(stitch(patches, image.shape), image)


SIZES = [(60, 52), (33, 90), (60, 52), (20, 71), (1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size, sizes", [(1, SIZES[:1] * 3), (4, SIZES[:1] * 3), (3, SIZES)])
def test_evaluation_covers_every_image_once(batch_size, sizes):
    source = make_source(sizes=sizes)
    counts = [np.zeros(size, int) for size in sizes]
    padded = [np.pad(image[..., 0], 80, mode="reflect") for image in source.eval.images]
    places = [
        (k, row, column)
        for k, (height, width) in enumerate(sizes)
        for row in range(0, max(height, 1), 32)
        for column in range(0, max(width, 1), 32)
    ]
    number, weight = 0, 0.0
    batches = eval_batches(source.eval, source.info, batch_size=batch_size, patch_step=16, **OPTIONS)
    for images, labels, weights in batches:
        assert images.shape == (batch_size, 48, 48, 1) and labels.shape == (batch_size, 32, 32)
        weight += float(tf.reduce_sum(weights))
        for image, label, share in zip(images.numpy(), labels.numpy(), weights.numpy()):
            if number >= len(places):
                assert share == 0 and (label == IGNORED).all()
                continue
            which, row, column = places[number]
            expected = padded[which][row + 72 : row + 120, column + 72 : column + 120]
            np.testing.assert_array_equal(image[..., 0], expected)
            known = np.argwhere(label != IGNORED)
            assert share == len(known)
            for y, x in known[::7]:
                assert label[y, x] == source.eval.masks[which][row + y, column + x]
            for y, x in known:
                counts[which][row + y, column + x] += 1
            number += 1
    assert all((pixels == 1).all() for pixels in counts)
    assert weight == sum(height * width for height, width in sizes)


@pytest.mark.slow
def test_parts_of_batches_of_patches_form_the_whole():
    """Two parts of three patches: the patch that the second part lacks has no weight."""
    source = make_source()
    columns = []
    for part in ((1, 0), (2, 0), (2, 1)):
        batches = eval_batches(source.eval, source.info, batch_size=3, part=part, patch_step=16, **OPTIONS)
        columns.append([np.stack(column) for column in zip(*batches.as_numpy_iterator())])
    for whole, first, second in zip(*columns):
        joined = np.concatenate([first, second], axis=1)
        assert first.shape == second.shape and joined.shape[1] == 4
        np.testing.assert_array_equal(joined[:, :3], whole)
    assert not joined[:, 3:].any()


def test_patches_without_augmentation_are_cut_from_the_mirrored_image():
    source = make_source(sizes=[(60, 52), (33, 90), (70, 40)])
    padded = [np.pad(image[..., 0], 30, mode="reflect") for image in source.train.images]
    places = set()
    for image, label in zip(*take(source, 12, augment=False, **OPTIONS)):
        inner = image[8:40, 8:40, 0]
        fits = [
            (which, row, column)
            for which, stored in enumerate(source.train.images)
            for row in range(stored.shape[0] - 31)
            for column in range(stored.shape[1] - 31)
            if (stored[row : row + 32, column : column + 32, 0] == inner).all()
        ]
        which, row, column = fits[0]
        places.add((which, row, column))
        np.testing.assert_array_equal(
            image[..., 0], padded[which][row + 22 : row + 70, column + 22 : column + 70]
        )
        np.testing.assert_array_equal(label, source.train.masks[which][row : row + 32, column : column + 32])
    assert len(places) > 6


def naive_patch(image, mask, random, size, output):
    """Returns one patch by the formulas, in float64, with SciPy's interpolation."""
    height, width = mask.shape
    unit = ((random >> 8) * 2.0**-23 - 1.0).astype(float)
    below = lambda k, bound: (int(random[k]) * bound) >> 32  # noqa: E731
    margin = (size - output) // 2
    start = [below(0, height - output + 1) - margin, below(1, width - output + 1) - margin]
    angle = below(2, 4096) * 2 * np.pi / 4096
    zoom = 1.2 ** (below(3, 1025) / 512 - 1)
    flip = -1 if below(4, 2) else 1
    weights = warp.bicubic_weights(size, 3).astype(float)
    bends = []
    for first in (7, 16):
        nodes = norm.ppf([(below(first + k, 4096) + 0.5) / 4096 for k in range(9)]).reshape(3, 3)
        bends.append(weights @ (nodes * size * 10 / 512) @ weights.T)
    y, x = np.mgrid[0:size, 0:size] - (size - 1) / 2
    rows = zoom * (np.cos(angle) * y - np.sin(angle) * x) + start[0] + (size - 1) / 2 + bends[0]
    columns = flip * zoom * (np.sin(angle) * y + np.cos(angle) * x) + start[1] + (size - 1) / 2 + bends[1]
    patch = map_coordinates(image.astype(float), [rows, columns], order=1, mode="mirror")
    patch = (patch - 127.5) * (1 + 0.2 * unit[5]) + 127.5 + 25.5 * unit[6]
    inner = slice(margin, margin + output)
    labels = map_coordinates(mask, [rows[inner, inner], columns[inner, inner]], order=0, mode="mirror")
    return patch, labels


def test_elastic_patches_follow_the_formulas():
    source = make_source(sizes=[(60, 52), (33, 90), (60, 52), (64, 32), (100, 70), (41, 47)])
    for seed in (1, 2):
        random = draws(
            seed, *(tf.constant([0] * 6, tf.int64),) * 2, tf.range(6, dtype=tf.int64), warp.ELASTIC_DRAWS
        )
        patches, masks = warp.training_patches(
            warp.StoredImages(source.train), tf.range(6, dtype=tf.int64), random, (48, 48), (32, 32), True,
        )  # fmt: skip
        for i in range(6):
            patch, mask = naive_patch(
                source.train.images[i][..., 0], source.train.masks[i], random.numpy()[i], 48, 32
            )
            np.testing.assert_allclose(patches[i, ..., 0], patch, atol=0.05)
            assert (masks[i].numpy() != mask).mean() < 0.002  # in float32, halves round to other pixels


def test_bicubic_weights_pass_through_the_nodes_and_are_smooth():
    weights = warp.bicubic_weights(101, 3).astype(float)
    np.testing.assert_allclose(weights[[0, 50, 100]], np.eye(3), atol=1e-6)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    assert np.abs(np.diff(weights, n=2, axis=0)).max() < 0.01


@pytest.mark.slow
def test_elastic_augmentation_keeps_image_and_mask_aligned():
    """A mask that is a threshold of its image stays one after augmentation, apart from interpolation."""
    source = make_source(num=4, height=90, width=90)
    for image, label in zip(*take(source, 16, seed=2, **OPTIONS)):
        inner = image[8:40, 8:40, 0]
        if label.min() == label.max():
            continue
        # Changes of brightness move the threshold, so the best one is used.
        wrong = min(((inner > level) != label).mean() for level in np.arange(60, 200, 2))
        assert wrong < 0.03


@pytest.mark.slow
@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("augment", [True, False])
def test_a_patch_is_a_function_of_seed_epoch_and_index(augment):
    source = make_source(num=5)
    images, _ = check_pure(source, 10, augment=augment, **OPTIONS)
    assert (take(source, 1, augment=augment, seed=6, **OPTIONS)[0] != images[:1]).any()


@pytest.mark.slow
def test_an_output_larger_than_the_image_is_mirrored():
    source = make_source(num=2, height=20, width=20)
    for augment in (True, False):
        images, labels = take(source, 1, augment=augment, **OPTIONS)
        assert images.shape == (1, 48, 48, 1) and set(np.unique(labels)) <= {0, 1}
