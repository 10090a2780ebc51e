"""The idx and CIFAR readers, with valid and damaged files; reading a pickle runs no code."""

import gzip
import io
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import cifar_arrays, idx_bytes, noise, open_set, planes, write_cifar10, write_mnist
from support.refusals import check_raises

from ipucnn.datasets.sources import cifar, idx
from ipucnn.errors import DataError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


# ---------------------------------------------------------------- idx


@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 2**31),
    compress=st.booleans(),
)
@settings(max_examples=30)
def test_idx_round_trip(tmp_path_factory, shape, seed, compress):
    array = noise(seed, *shape)
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if compress else "a")
    path.write_bytes(gzip.compress(idx_bytes(array)) if compress else idx_bytes(array))
    np.testing.assert_array_equal(idx.read_idx(path, 3), array)


@pytest.mark.parametrize("compress", [True, False])
def test_open_mnist(tmp_path, compress):
    written = write_mnist(tmp_path, compress=compress)
    source = open_set("fashion_mnist", tmp_path)
    for part, examples in (("train", source.train), ("eval", source.eval)):
        np.testing.assert_array_equal(examples.images[..., 0], written[part][0])
        np.testing.assert_array_equal(examples.labels, written[part][1])
    assert source.info.image_shape == (28, 28, 1) and source.info.class_names[9] == "Ankle boot"
    assert source.info.mean[0] == pytest.approx(written["train"][0].mean(), abs=1e-4)
    assert source.info.std[0] == pytest.approx(written["train"][0].std(), abs=1e-4)
    assert len(source.info.warnings) == 2 and "20 of 60,000" in source.info.warnings[0]


# ---------------------------------------------------------------- CIFAR


@given(
    num=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
    as_bytes=st.booleans(),
    fortran=st.booleans(),
)
@settings(max_examples=40)
def test_cifar_pickle_round_trip(tmp_path_factory, num, seed, protocol, as_bytes, fortran):
    images, labels = cifar_arrays(num, seed=seed)
    data = np.asfortranarray(planes(images)) if fortran else planes(images)
    content = {"data": data, "labels": labels.tolist(), "batch_label": "x", "filenames": ["a.png"] * num}
    if as_bytes:
        content = {key.encode(): value for key, value in content.items()}
    path = tmp_path_factory.mktemp("cifar") / "batch"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    read_images, read_labels = cifar.read_pickle(path, "labels")
    np.testing.assert_array_equal(read_images, images)
    np.testing.assert_array_equal(read_labels, labels)


@given(num=st.integers(1, 4), seed=st.integers(0, 2**31), hundred=st.booleans())
@settings(max_examples=20)
def test_cifar_binary_round_trip(tmp_path_factory, num, seed, hundred):
    images, labels = cifar_arrays(num, 100 if hundred else 10, seed)
    columns = [labels[:, None].astype(np.uint8), planes(images)]
    if hundred:
        columns.insert(0, np.full((num, 1), 19, np.uint8))
    path = tmp_path_factory.mktemp("cifar") / "batch.bin"
    path.write_bytes(np.hstack(columns).tobytes())
    read_images, read_labels = cifar.read_binary(path, 2 if hundred else 1)
    np.testing.assert_array_equal(read_images, images)
    np.testing.assert_array_equal(read_labels, labels)


def test_a_partial_cifar10_loads_with_warnings(tmp_path):
    write_cifar10(tmp_path, batches=(1, 3))
    source = open_set("cifar10", tmp_path)
    assert (source.info.num_train, source.info.num_eval) == (12, 5)
    assert "12 of 50,000 train images (data_batch_1, data_batch_3)" in source.info.warnings[0]
    assert "5 of 10,000 test images" in source.info.warnings[1]
    np.testing.assert_array_equal(source.train.images[6:], cifar_arrays(6, seed=3)[0])
    assert source.info.class_names == cifar.CIFAR10_CLASSES


def test_cifar100_both_versions(tmp_path):
    images, labels = cifar_arrays(5, 100)
    names = [f"class {n}" for n in range(100)]
    python = tmp_path / "cifar-100-python"
    python.mkdir()
    for name in ("train", "test"):
        content = {"data": planes(images), "fine_labels": labels.tolist(), "coarse_labels": [0] * 5}
        (python / name).write_bytes(pickle.dumps(content, protocol=2))
    (python / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, protocol=2))
    binary = tmp_path / "cifar-100-binary"
    binary.mkdir()
    records = np.hstack([np.zeros((5, 1), np.uint8), labels[:, None].astype(np.uint8), planes(images)])
    for name in ("train.bin", "test.bin"):
        (binary / name).write_bytes(records.tobytes())
    one, two = (open_set("cifar100", folder) for folder in (python, binary))
    np.testing.assert_array_equal(one.train.images, two.train.images)
    np.testing.assert_array_equal(one.eval.labels, two.eval.labels)
    assert one.info.class_names[7] == "class 7" and two.info.class_names[7] == "7"


@pytest.mark.parametrize(
    "content, message",
    [
        ({"labels": [0]}, "lacks"),
        ([1, 2], "lacks"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "2 images but 1 labels"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [0]}, "3072 columns"),
        ({"data": np.zeros((1, 3072), np.float32), "labels": [0]}, "3072 columns"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "label 10"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}, "label -1"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]}, "whole number"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "no images"),
        *[
            ({"data": np.zeros((2, 3072), np.uint8), "labels": labels}, "whole number")
            for labels in (
                *([True, False], [1.0, 2], ["1", 2], [None, 1], [[1], [2]], [[1], [2, 3]], [2**70, 1]),
                *({}, "12", 3, np.array([1, 0], np.float32), np.array([1, 0], bool)),
            )
        ],
    ],
)
def test_an_invalid_cifar_batch_is_reported_with_the_reason(tmp_path, content, message):
    write_cifar10(tmp_path, batches=())
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    check_raises(DataError, message, "", open_set, "cifar10", tmp_path)


# ---------------------------------------------------------------- real files, if available


@pytest.mark.skipif(not (SHARED / "mnist").is_dir(), reason="no ../shared/data/mnist beside the repository")
def test_real_mnist():
    source = open_set("mnist", SHARED / "mnist")
    assert (source.info.num_train, source.info.num_eval, source.info.warnings) == (60000, 10000, ())
    assert source.info.mean[0] / 255 == pytest.approx(0.1307, abs=1e-4)
    assert source.info.std[0] / 255 == pytest.approx(0.3081, abs=1e-4)
    assert source.train.labels[:5].tolist() == [5, 0, 4, 1, 9]


@pytest.mark.skipif(
    not (SHARED / "cifar-10-batches-py").is_dir(),
    reason="no ../shared/data/cifar-10-batches-py beside the repository",
)
def test_real_partial_cifar10():
    folder = SHARED / "cifar-10-batches-py"
    source = open_set("cifar10", folder)
    assert (source.info.num_train, source.info.num_eval) == (20000, 5000)
    assert len(source.info.warnings) == 2
    with open(folder / "test_batch", "rb") as file:
        content = pickle.load(io.BytesIO(file.read()), encoding="latin1")
    expected = content["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(source.eval.images, expected)
    np.testing.assert_array_equal(source.eval.labels, content["labels"])


@given(data=st.binary(max_size=64), dimensions=st.sampled_from([1, 3]), packed=st.booleans())
def test_any_bytes_as_idx_are_an_array_or_a_data_error(tmp_path_factory, data, dimensions, packed):
    data = struct.pack(">I", 0x0800 + dimensions) + data if len(data) % 2 else data
    path = tmp_path_factory.mktemp("idx") / "x"
    path.write_bytes(gzip.compress(data) if packed else data)
    try:
        assert idx.read_idx(path, dimensions).ndim == dimensions
    except DataError as error:
        assert error.hint
