"""Order and augmentation are pure functions of (seed, epoch, index); evaluation reads every sample once."""

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import encode, noise
from support.refusals import check_raises
from support.streams import RAW, assert_same, check_pure, take

from ipucnn.datasets.augmentation import AUGMENTATIONS, draws, shift_right
from ipucnn.datasets.base import (
    AUGMENTATION_NAMES,
    ArrayExamples,
    DataSource,
    EncodedExamples,
    FileExamples,
    data_source,
)
from ipucnn.datasets.hashing import AUGMENT, ORDER, chain, draw, permutation, stream_state, uniform
from ipucnn.datasets.pipeline import Stream, data_errors, eval_batches, parallel_calls, train_batches
from ipucnn.datasets.pixels import InputRange
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.machine import num_cores

KINDS = ["none", "digits", "shift", "shift_flip", "crop", "crop_flip", "dihedral"]


def make_source(num=23, height=8, width=8, channels=3, augmentation="crop_flip", masks=False, num_eval=11):
    images = noise(1, num + num_eval, height, width, channels)
    labels = np.arange(num + num_eval).astype(np.int32)  # a label identifies its image
    if masks:
        labels = noise(2, num + num_eval, height, width) % 2
    return data_source(
        ArrayExamples(images[:num], labels[:num]),
        ArrayExamples(images[num:], labels[num:]),
        name="test",
        class_names=[str(n) for n in range(num + num_eval)],
        location="test",
        augmentation=augmentation,
        task="segmentation" if masks else "classification",
    )


# ---------------------------------------------------------------- hashes


PINNED_DRAWS = [1815609431, 266728102, 294713924]
PINNED_ORDER = [0, 9, 2, 6, 1, 4, 7, 3, 8, 5]


def test_the_hash_is_pinned():
    """Saved runs depend on these numbers, which must never change."""
    assert [draw(0, ORDER), draw(1, AUGMENT, 2, 3), draw(-5, ORDER, 2**32 - 1)] == PINNED_DRAWS
    assert permutation(10, 3, ORDER, 4, 0).tolist() == PINNED_ORDER


@given(
    seed=st.integers(-(2**70), 2**70),
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
)
@tries(40, slow=100)
def test_python_numpy_and_tensorflow_hashes_are_equal(seed, words):
    expected = draw(seed, AUGMENT, *words)
    state = stream_state(seed, AUGMENT)
    with_numpy, with_tf = np.array([state], np.uint64), tf.constant([state], tf.int64)
    for word in words:
        with_numpy = chain(with_numpy, np.array([word], np.uint64))
        with_tf = chain(with_tf, tf.constant([word], tf.int64), shift_right)
    assert with_numpy.dtype == np.uint64 and int(with_numpy[0]) == expected == int(with_tf[0])
    assert uniform(draw(seed, AUGMENT, *words[:-1]), words[-1]) == expected / 2**32
    several = draw(seed, AUGMENT, *(np.array([word, 5], np.uint64) for word in words))
    assert several.dtype == np.uint64 and several[0] == expected


def test_draws_are_uniform_and_uncorrelated():
    indices = tf.range(4096, dtype=tf.int64)
    values = draws(3, tf.zeros_like(indices), tf.zeros_like(indices), indices, 4).numpy() / 2.0**32
    assert abs(values.mean() - 0.5) < 0.02 and abs(values.std() - 12**-0.5) < 0.02
    off_diagonal = np.corrcoef(values.T) - np.eye(4)
    assert abs(off_diagonal).max() < 0.06
    next_epoch = draws(3, tf.ones_like(indices), tf.zeros_like(indices), indices, 4).numpy() / 2.0**32
    assert abs(np.corrcoef(values[:, 0], next_epoch[:, 0])[0, 1]) < 0.06


# ---------------------------------------------------------------- order


def expected_order(size, samples_per_epoch, seed, epochs):
    order = []
    for epoch in range(epochs):
        rounds = itertools.count()
        one = []
        while len(one) < samples_per_epoch:
            one += permutation(size, seed, ORDER, epoch, next(rounds)).tolist()
        order += one[:samples_per_epoch]
    return order


@pytest.mark.slow
@given(
    size=st.integers(1, 30),
    samples_per_epoch=st.integers(1, 70),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    start=st.integers(0, 200),
)
@tries(3, slow=12)
def test_the_order_is_the_permutation_of_each_epoch(size, samples_per_epoch, batch_size, seed, start):
    source = make_source(num=size)
    expected = expected_order(size, samples_per_epoch, seed, (start + 60) // samples_per_epoch + 1)
    _, labels = take(
        source,
        50,
        batch_size=batch_size,
        samples_per_epoch=samples_per_epoch,
        seed=seed,
        augment=False,
        start_epoch=start // samples_per_epoch,
        start_sample=start % samples_per_epoch,
    )
    assert labels.tolist() == expected[start : start + 50]


def test_unshuffled_data_keep_the_stored_order():
    _, labels = take(make_source(num=5), 14, shuffle=False, samples_per_epoch=7)
    assert labels.tolist() == [0, 1, 2, 3, 4, 0, 1] * 2


@pytest.mark.slow
def test_another_seed_gives_another_order_and_other_pixels():
    source = make_source()
    one, two = take(source, 23), take(source, 23, seed=8)
    assert one[1].tolist() != two[1].tolist()
    by_label = [images[np.argsort(labels)] for images, labels in (one, two)]
    assert (by_label[0] != by_label[1]).any(axis=(1, 2, 3)).sum() > 15


# ---------------------------------------------------------------- purity


# Arguments of make_source, and options of the stream.
PURE = {
    **{kind: ({"augmentation": kind}, {}) for kind in KINDS},
    "enlarged": ({}, {"input_shape": (17, 19, 3), "input_range": "torch"}),
    "reduced to grey": ({"augmentation": "digits"}, {"input_shape": (5, 5, 1)}),
    "digits enlarged": ({"augmentation": "digits"}, {"input_shape": (21, 21, 3), "input_range": "caffe"}),
    "range of tf": ({"augmentation": "shift"}, {"input_range": "tf"}),
    "masks": ({"augmentation": "dihedral", "masks": True}, {"output_shape": (4, 6), "samples_per_epoch": 20}),
}


@pytest.mark.slow_cases(*KINDS, "reduced to grey", "enlarged", "digits enlarged", "range of tf")
@pytest.mark.parametrize("case", PURE)
def test_batch_size_start_and_threads_do_not_change_a_byte(case):
    made, options = PURE[case]
    source = make_source(**made)
    images, labels = check_pure(source, 60, **options)
    assert images.shape == (60, *options.get("input_shape", (8, 8, 3)))
    assert labels.shape == (60, *options.get("output_shape", ())) and labels.dtype == np.int32
    # A start may also be counted in samples from an earlier epoch.
    assert_same(take(source, 9, start_sample=30, **options), (images[30:39], labels[30:39]))


@pytest.mark.slow
@pytest.mark.slow_cases("3-1-5", "4-64-17")
@pytest.mark.parametrize(("count", "batch_size", "start"), [(2, 4, 0), (3, 1, 5), (4, 64, 17)])
def test_shards_are_every_nth_batch(count, batch_size, start):
    """A shard has the bytes of the unsharded stream, also across the ends of epochs."""
    source = make_source()
    options = {"batch_size": batch_size, "start_sample": start}
    whole = take(source, 8 * count * batch_size, **options)
    for index in range(count):
        part = take(source, 8 * batch_size, shard=(count, index), **options)
        rows = np.arange(8 * count * batch_size).reshape(8, count, batch_size)[:, index].ravel()
        assert_same(part, tuple(column[rows] for column in whole))


def test_epochs_and_rounds_are_augmented_differently():
    images, _ = take(make_source(num=1, augmentation="crop_flip"), 40, samples_per_epoch=8)
    assert len({image.tobytes() for image in images}) > 10


# ---------------------------------------------------------------- augmentation


def numpy_move(image, label, seed, epoch, index, reach, flip):
    height, width, _ = image.shape
    down, right = ((draw(seed, AUGMENT, epoch, 0, index, k) * (2 * reach + 1) >> 32) - reach for k in (0, 1))
    if flip and draw(seed, AUGMENT, epoch, 0, index, 2) >> 31:
        image = image[:, ::-1]
        right = -right
    padded = np.pad(image, [(reach, reach), (reach, reach), (0, 0)])
    return padded[reach + down : reach + down + height, reach + right : reach + right + width]


@pytest.mark.parametrize("kind, flip", [("crop", False), ("crop_flip", True)])
def test_crop_and_flip_equal_a_numpy_loop(kind, flip):
    source = make_source(num=40, height=16, width=16, augmentation=kind)
    images, labels = take(source, 40, input_shape=(16, 16, 3), input_range="raw")
    for image, label in zip(images, labels):
        expected = numpy_move(source.train.images[label], label, 7, 0, int(label), 2, flip)
        np.testing.assert_array_equal(image, expected)


def test_dihedral_augmentation_moves_image_and_mask_equally():
    source = make_source(num=64, channels=1, augmentation="dihedral", masks=True)
    images = source.train.images
    source = DataSource(
        source.info, ArrayExamples(images, (images[..., 0] > 127).astype(np.uint8)), source.eval
    )
    moved, masks = take(source, 64, input_shape=(8, 8, 1), input_range="raw")
    np.testing.assert_array_equal(masks, moved[..., 0] > 127)
    variants = {}
    for image in images[..., 0]:
        for turns in range(4):
            for mirrored in (False, True):
                turned = np.rot90(image[:, ::-1] if mirrored else image, turns)
                variants[turned.astype(np.float32).tobytes()] = (turns, mirrored)
    seen = {variants[image[..., 0].tobytes()] for image in moved}
    assert len(seen) == 8


def test_dihedral_augmentation_keeps_the_shape_of_a_rectangle():
    source = make_source(num=16, height=6, width=9, channels=1, augmentation="dihedral", masks=True)
    images, masks = take(source, 16, input_shape=(6, 9, 1), input_range="raw")
    assert images.shape == (16, 6, 9, 1) and masks.shape == (16, 6, 9)
    assert len({image.tobytes() for image in images}) == 16


def test_digits_are_rotated_slightly():
    source = make_source(num=30, height=16, width=16, channels=1, augmentation="digits")
    smooth = np.zeros_like(source.train.images)
    smooth[:, 5:11, 5:11] = 200
    source = DataSource(source.info, ArrayExamples(smooth, source.train.labels), source.eval)
    images, _ = take(source, 30, input_shape=(32, 32, 1), input_range="raw")
    assert len({image.tobytes() for image in images}) == 30
    assert images.min() >= 0 and images.max() <= 200
    total = images.sum(axis=(1, 2, 3)) / (200 * 12 * 12)
    assert total.min() > 0.7 and total.max() < 1.3  # zoom of up to 10 % in each direction
    rows = (images.sum(axis=(2, 3)) * np.arange(32)).sum(1) / images.sum(axis=(1, 2, 3))
    assert abs(rows - 15.5).max() < 2.6 and rows.std() > 0.3  # shifts of up to 2 pixels


def test_augmentation_is_off_by_default():
    source = make_source(augmentation="crop_flip")
    images, labels = take(source, 23, augment=False, input_range="raw")
    np.testing.assert_array_equal(images, source.train.images[labels].astype(np.float32))


def test_every_augmentation_is_tested():
    assert sorted(KINDS) == sorted(AUGMENTATIONS)
    # Patches use elastic augmentation, in segmentation/warp.py.
    assert sorted([*KINDS, "elastic"]) == sorted(AUGMENTATION_NAMES)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("masks", [False, True])
def test_shapes_are_static(masks):
    source = make_source(masks=masks, augmentation="dihedral" if masks else "shift")
    output = (4, 4) if masks else None
    common = {"batch_size": 5, "input_shape": (12, 10, 1), "input_range": RAW, "output_shape": output}
    train = train_batches(source, Stream(samples_per_epoch=20, augment=True, seed=0, **common))
    evaluation = eval_batches(source.eval, source.info, **common)
    label_shape = [5, 4, 4] if masks else [5]
    for spec in (train.element_spec, evaluation.element_spec):
        assert spec[0].shape.as_list() == [5, 12, 10, 1] and spec[0].dtype == tf.float32
        assert spec[1].shape.as_list() == label_shape and spec[1].dtype == tf.int32
    assert evaluation.element_spec[2].shape.as_list() == [5]
    next(iter(train)), next(iter(evaluation))


def test_invalid_sizes_are_refused():
    source = make_source()
    masks = make_source(masks=True, augmentation="dihedral")
    check_raises(ConfigurationError, "batch size 0", "", take, source, 1, batch_size=0)
    check_raises(ConfigurationError, "predicts 9x8", "", take, masks, 1, output_shape=(9, 8))
    check_raises(ConfigurationError, "input range 'tfx'", "", take, source, 1, input_range="tfx")
    words = "3 channels cannot feed a network with 2"
    check_raises(ConfigurationError, words, "", take, source, 1, input_shape=(8, 8, 2))


# ---------------------------------------------------------------- evaluation


@given(num=st.integers(1, 30), batch_size=st.integers(1, 12))
@tries(6, slow=20)
def test_evaluation_sees_every_sample_once_and_pads_with_zeros(num, batch_size):
    source = make_source(num_eval=num)
    batches = eval_batches(
        source.eval, source.info, batch_size=batch_size, input_shape=(8, 8, 3), input_range=RAW
    )
    assert int(batches.cardinality()) == -(-num // batch_size)
    images, labels, weights = (np.concatenate(c) for c in zip(*batches.as_numpy_iterator()))
    np.testing.assert_array_equal(images[:num], source.eval.images)
    np.testing.assert_array_equal(labels[:num], source.eval.labels)
    assert weights.tolist() == [1.0] * num + [0.0] * (len(weights) - num)
    assert not images[num:].any() and not labels[num:].any()


@pytest.mark.parametrize(
    ("kind", "count", "batch_size"), [("arrays", 3, 7), ("files", 2, 8), ("files", 4, 5)]
)
def test_parts_of_evaluation_batches_form_the_whole(kind, count, batch_size):
    """Side by side, parts form the whole batch; each has as many batches, and none reads another's images."""
    source, num = make_source(num_eval=17), 17
    examples, info, read = source.eval, source.info, []
    if kind == "files":
        examples = EncodedExamples(tuple(map(encode, examples.images)), examples.labels, "test")

        class Noted(EncodedExamples):
            def encoded(self, index):
                read.append(index)
                return super().encoded(index)

        examples = Noted(examples.data, examples.labels, examples.origin)

    def columns(part):
        options = {"batch_size": batch_size, "input_shape": (8, 8, 3), "input_range": RAW, "part": part}
        evaluated = list(eval_batches(examples, info, **options).as_numpy_iterator())
        assert len(evaluated) == -(-num // batch_size)
        return [np.stack(column) for column in zip(*evaluated)]

    whole = columns((1, 0))
    read.clear()
    parts = []
    for index in range(count):
        before = len(read)
        parts.append(columns((count, index)))
        real = int(parts[-1][2].sum())
        assert kind == "arrays" or len(set(read[before:])) == len(read) - before == real < num
    assert kind == "arrays" or sorted(read) == list(range(num))
    for one, several in zip(whole, zip(*parts)):
        joined = np.concatenate(several, axis=1)
        np.testing.assert_array_equal(joined[:, :batch_size], one)
        assert not joined[:, batch_size:].any()


@pytest.mark.slow
def test_evaluation_equals_training_without_augmentation():
    source = make_source(augmentation="digits", num_eval=23)
    same = DataSource(source.info, source.eval, source.eval)
    options = {"input_shape": (20, 20, 3), "input_range": InputRange.of("standard", source.info, 3)}
    trained, _ = take(same, 23, augment=False, shuffle=False, **options)
    for batch_size in (1, 5, 23):
        batches = eval_batches(source.eval, source.info, batch_size=batch_size, **options)
        images = np.concatenate([batch[0] for batch in batches.as_numpy_iterator()])[:23]
        assert images.tobytes() == trained.tobytes()


# ---------------------------------------------------------------- errors


def test_an_invalid_file_in_a_pipeline_is_a_data_error(tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    source = make_source()
    info = replace(source.info, image_shape=(None, None, 3))
    examples = FileExamples((str(bad),), np.zeros(1, np.int32))
    options = {"batch_size": 1, "input_shape": (8, 8, 3), "input_range": RAW}
    stream = Stream(samples_per_epoch=1, augment=True, seed=0, **options)
    for batches in (
        eval_batches(examples, info, **options),
        train_batches(DataSource(info, examples, examples), stream),
    ):
        with pytest.raises(DataError, match=r"bad.jpg is not an image") as caught, data_errors():
            next(iter(batches))
        assert caught.value.hint


def test_other_tensorflow_errors_pass_through():
    with pytest.raises(tf.errors.InvalidArgumentError), data_errors():
        tf.debugging.assert_equal(tf.constant(1), tf.constant(2))


def test_an_empty_set_is_refused():
    source = make_source()
    empty = source.eval.subset(np.zeros(0, np.int64))
    with pytest.raises(DataError, match="no images"):
        eval_batches(empty, source.info, batch_size=1, input_shape=(8, 8, 3), input_range=RAW)


def test_cores_outside_the_affinity_mask_do_not_count(monkeypatch):
    """In a container with one core of many, many threads would only slow each other down."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system cannot tell")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert num_cores() == 1
    assert parallel_calls(48) == 2
