"""Choice and description of data sets, limits, embedded sets and downloads; all without TensorFlow."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import noise, write_cifar10, write_class_folders, write_mnist
from support.refusals import check_raises

from ipucnn.datasets.base import (
    ArrayExamples,
    EncodedExamples,
    FileExamples,
    channel_statistics,
    data_source,
    fingerprint,
    knn_accuracy,
    limit_source,
    parse_limit,
    pool,
    select_fold,
)
from ipucnn.datasets.formats import Found, find_sets
from ipucnn.datasets.hashing import draw
from ipucnn.datasets.registry import DATASETS, ChosenDataset, ReaderOptions, choose_dataset, open_dataset
from ipucnn.datasets.segmentation.membranes import open_membranes
from ipucnn.datasets.sources import download as downloading
from ipucnn.datasets.sources.embedded import open_digits, open_random
from ipucnn.datasets.verification import verify
from ipucnn.diagnosis.look import find_datasets
from ipucnn.errors import ConfigurationError, DataError, MissingError


def choose(name, path, home="cifar10", task="classification", **options):
    return choose_dataset(name, Path(path), home=home, task=task, **options)


# ---------------------------------------------------------------- choosing


@pytest.mark.slow
def test_choosing_imports_no_library_and_opening_imports_no_tensorflow(tmp_path):
    write_cifar10(tmp_path / "cifar-10-batches-py")
    code = (
        "import sys; from pathlib import Path; from ipucnn.datasets.registry import *\n"
        f"path = Path({str(tmp_path)!r})\n"
        "def choose(name, home='cifar10', task='classification'):\n"
        "    return choose_dataset(name, path, home=home, task=task)\n"
        "choices = [choose(None), choose('digits'), choose(None, 'isbi2012', 'segmentation'), choose('random')]\n"
        "assert not {'sklearn', 'scipy', 'PIL', 'tensorflow'} & set(sys.modules)\n"
        "for choice in choices:\n"
        "    open_dataset(choice, ReaderOptions(image_shape=(32, 32, 1)), limit_train='50%')\n"
        "from ipucnn import cli\n"
        "import ipucnn.datasets.sources.imagefolder, ipucnn.datasets.sources.tfds, ipucnn.datasets.images\n"
        "assert cli.run(['verify-dataset', 'cifar10', '--dataset-path', str(path), '--allow-partial']) in (0, 3)\n"
        "assert not {'tensorflow', 'keras', 'tensorflow_datasets'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[1])


@pytest.mark.parametrize("folder", ["", "cifar10", "cifar-10-batches-py", "cifar10/cifar-10-batches-py"])
def test_the_default_set_is_found(tmp_path, folder):
    write_cifar10(tmp_path / folder)
    choice = choose(None, tmp_path)
    assert (choice.name, choice.location) == ("cifar10", tmp_path / folder)
    assert "--dataset digits" in choice.message and "\n" not in choice.message
    source = open_dataset(choice)
    assert source.info.location == str(tmp_path / folder) and len(source.train) == 12


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
def test_mnist_is_found_plain_and_zipped(tmp_path, folder):
    write_mnist(tmp_path / folder, compress=folder != "mnist")
    assert choose(None, tmp_path, home="mnist").location == tmp_path / folder
    assert open_dataset(choose("MNIST", tmp_path)).info.name == "mnist"


def test_mnist_and_fashion_mnist_share_file_names(tmp_path):
    write_mnist(tmp_path / "fashion_mnist")
    assert choose(None, tmp_path, home="fashion_mnist").name == "fashion_mnist"
    assert choose(None, tmp_path, home="mnist").name == "digits"
    inside = tmp_path / "fashion_mnist"
    assert choose(None, inside, home="fashion_mnist").name == "fashion_mnist"
    assert choose(None, inside, home="mnist").name == "digits"
    assert choose("mnist", inside).location == inside  # the user named it


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("fashion-project/mnist", "mnist"),
        ("fashion-project/MNIST/raw", "mnist"),
        ("mnist/FashionMNIST/raw", "fashion_mnist"),
        ("mnist/fashion", "fashion_mnist"),
        ("fashion-project/data", "mnist"),
        ("kmnist/mnist_data", "mnist"),
        ("my-mnist", "mnist"),
        ("kmnist/MNIST2", "mnist"),
        ("kmnist/my-fashionmnist", "fashion_mnist"),
    ],
)
def test_the_nearest_name_says_which_of_the_two_is_in_a_folder(tmp_path, folder, name):
    write_mnist(tmp_path / folder)
    assert [one.name for one in find_sets(tmp_path / folder)] == [name]


@pytest.mark.parametrize("folder", ["mnist/KMNIST/raw", "emnist-letters", "qmnist", "notMNIST"])
def test_idx_files_of_other_sets_are_not_taken_for_mnist(tmp_path, folder):
    path = tmp_path / folder
    write_mnist(path)
    with pytest.raises(DataError, match="idx files, which do not say of which set they are"):
        find_sets(path)
    assert choose(None, path, home="mnist").name == "digits"
    for name in ("mnist", "fashion_mnist"):
        assert choose(name, path).location == path  # the user named it


def test_records_in_a_folder_of_the_folder_imagenet_are_found(tmp_path):
    inside = tmp_path / "imagenet" / "imagenet"
    inside.mkdir(parents=True)
    (inside / "train-00000-of-00001").write_bytes(b"")
    assert find_sets(tmp_path / "imagenet") == [Found("imagenet", inside)]


def test_class_folders_called_imagenet_are_imagenet_however_they_are_found(tmp_path):
    folder = tmp_path / "imagenet"
    write_class_folders(folder, {(part, name): 2 for part in ("train", "val") for name in "ab"})
    chosen = [
        choose(None, folder, home="imagenet"),
        choose(str(folder), ".", home="mnist"),
        verify.choose(None, folder, False),
        verify.choose(str(folder), ".", False),
    ]
    assert {(one.name, one.location) for one in chosen} == {("imagenet", folder)}
    assert find_datasets(folder)["imagenet"] == str(folder)
    # Its user may know better; and under another name the folder is an image folder for all.
    assert choose("imagefolder", folder).name == "imagefolder"
    other = folder.rename(tmp_path / "pictures")
    assert {choose(str(other), ".").name, verify.choose(None, other, False).name} == {"imagefolder"}
    assert choose(None, other, home="imagenet").name == "digits"
    assert find_datasets(other)["imagenet"] is None


def test_record_files_are_imagenet_under_any_name(tmp_path):
    (tmp_path / "train-00000-of-00001").write_bytes(b"")
    chosen = [choose(None, tmp_path, home="imagenet"), verify.choose(None, tmp_path, False)]
    assert {(one.name, one.location) for one in chosen} == {("imagenet", tmp_path)}


@pytest.mark.parametrize("home", ["mnist", "fashion_mnist", "cifar10", "cifar100", "imagenet"])
def test_an_embedded_set_replaces_an_absent_default_set(tmp_path, home):
    choice = choose(None, tmp_path, home=home)
    assert (choice.name, choice.location) == ("digits", None)
    assert home in choice.message and str(tmp_path) in choice.message and "\n" not in choice.message
    assert ("--download" in choice.message) == (home != "imagenet")


def test_an_embedded_set_replaces_an_absent_segmentation_set():
    choice = choose(None, ".", home="isbi2012", task="segmentation")
    assert choice.name == "membranes" and "put train-volume.tif" in choice.message
    options = {"home": "isbi2012", "task": "segmentation"}
    check_raises(DataError, "isbi2012 is not in", "", choose, "isbi2012", ".", **options)


@pytest.mark.parametrize(
    ("folders", "task", "home", "named"),
    [
        (("images", "masks"), "segmentation", "isbi2012", "imagemasks"),
        (("train/a", "val/a"), "classification", "mnist", "imagefolder"),
        ((), "classification", "mnist", None),
    ],
)
def test_the_message_names_the_option_that_reads_images_of_a_folder(tmp_path, folders, task, home, named):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    message = choose(None, tmp_path, home=home, task=task).message
    assert re.findall("add --dataset (.*) to take them", message) == ([] if named is None else [named])


@pytest.mark.parametrize(
    ("name", "task"), [("imagefolder", "classification"), ("imagemasks", "segmentation")]
)
def test_images_in_a_missing_folder_are_an_error(tmp_path, name, task):
    check_raises(DataError, "none does not exist", "", choose, name, tmp_path / "none", "isbi2012", task)


def test_a_damaged_default_set_is_an_error(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    check_raises(DataError, "train-images", "", open_dataset, choose(None, tmp_path, home="mnist"))


@pytest.mark.parametrize(
    "name", ["cifar-10", "CIFAR10", "cifar_10", "Fashion-MNIST", "mnist", "cifar100", "imagenet"]
)
def test_an_absent_named_set_is_an_error(tmp_path, name):
    assert check_raises(DataError, f"is not in {tmp_path}", "put ", choose, name, tmp_path).exit_code == 3
    check_raises(DataError, "does not exist", "", choose, name, tmp_path / "none")


@pytest.mark.parametrize(
    "name, task, words, hint",
    [
        ("cifar", "classification", "'cifar' is unknown", "did you mean 'cifar10'"),
        ("zzz", "classification", "'zzz' is unknown", "tfds:NAME"),
        ("zzz", "segmentation", "'zzz' is unknown", "a folder with images/ and masks/"),
        ("./zzz", "classification", "./zzz: there is no such folder", "imagefolder"),
        ("tfds:", "classification", "names no data set", "tfds:svhn_cropped"),
        ("tfds:../x", "classification", "names no data set", "tfds:svhn_cropped"),
        ("membranes", "classification", "but the model does", "--dataset digits"),
        ("digits", "segmentation", "but the model does", "--dataset membranes"),
        ("tfds:mnist", "segmentation", "but the model does", "--dataset membranes"),
    ],
)
def test_invalid_names_are_refused(name, task, words, hint):
    error = check_raises(ConfigurationError, words, hint, choose, name, ".", task=task)
    other = "imagefolder" if task == "segmentation" else "isbi2012"
    assert other not in error.hint


def test_a_choice_without_files_is_refused():
    choice = ChosenDataset("cifar10", None, "", "classification")
    check_raises(DataError, "cifar10 is not here", "", open_dataset, choice)


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "limit, size, kept",
    [
        (None, 70, 70),
        ("5", 70, 5),
        ("500", 70, 70),
        ("10%", 70, 7),
        ("100%", 70, 70),
        ("0.1%", 70, 1),
        (" 3 ", 9, 3),
    ],
)
def test_limits(limit, size, kept):
    assert parse_limit(limit, size, "--limit-train") == kept


@pytest.mark.parametrize("limit", ["0", "-1", "0%", "101%", "1.5", "x", "", "%", "nan%", "inf%"])
def test_invalid_limits_are_refused(limit):
    check_raises(ConfigurationError, "--limit-eval", "", parse_limit, limit, 100, "--limit-eval")


def labelled(count, names=(), seed=0):
    """Returns grey images of noise with labels 0 .. count - 1."""
    return ArrayExamples(noise(seed, count, 2, 2, 1), np.arange(count).astype(np.int32), names)


def source_of(train, evaluation, **facts):
    return data_source(train, evaluation, name="t", class_names=["x"] * 40, location="", **facts)


@given(num_train=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_a_limit_keeps_the_first_examples_of_the_order_of_a_seed(num_train, seed):
    """They stay in their stored order, and a smaller limit keeps a subset of what a larger one keeps."""
    source = source_of(labelled(40), labelled(40))
    kept = limit_source(source, str(num_train), "10%", seed)
    for purpose, (part, count) in enumerate(((kept.train, num_train), (kept.eval, 4))):
        order = sorted(range(40), key=lambda k: draw(seed, 3, purpose, k))
        assert part.labels.tolist() == sorted(order[:count])
    assert (kept.info.num_train, kept.info.num_eval) == (num_train, 4)
    assert kept.info.mean == source.info.mean  # of the whole set, whatever the limit


def test_encoded_examples_are_limited_too():
    examples = EncodedExamples((b"a", b"b", b"c"), np.arange(3), "x")
    kept = examples.subset(np.array([2, 0]))
    assert kept.encoded(0) == b"c" and kept.labels.tolist() == [2, 0] and len(kept) == 2


def test_grey_images_in_files_have_the_means_over_the_channels_of_imagenet():
    examples = EncodedExamples((b"a",), np.arange(1), "x")
    info = source_of(examples, examples, channels=1).info
    assert info.image_shape == (None, None, 1)
    assert info.mean == pytest.approx([(123.675 + 116.28 + 103.53) / 3])
    assert info.std == pytest.approx([(58.395 + 57.12 + 57.375) / 3])


@pytest.mark.parametrize("names", [(("a", "b", "c"), ("d", "e")), (("a", "b", "c"), ()), ((), ("d", "e"))])
def test_folds_of_a_set_that_ipucnn_divides_have_all_of_its_examples(names):
    train, evaluation = labelled(3, names[0]), labelled(2, names[1], seed=1)
    source = source_of(train, evaluation, own_split=True)
    examples = pool(source)
    assert examples.images.tolist() == [*train.images.tolist(), *evaluation.images.tolist()]
    assert examples.labels.tolist() == [0, 1, 2, 0, 1]
    assert examples.names == (tuple("abcde") if all(names) else ())
    for count in (2, 5):
        folds = [select_fold(source, count, fold) for fold in range(1, count + 1)]
        assert sorted(place for fold in folds for place in fold.held_out) == list(range(5))
        for fold in folds:
            assert len(fold.held_out) in (5 // count, -(-5 // count))
            assert fold.eval.images.tolist() == examples.images[list(fold.held_out)].tolist()
            assert fold.train.images.tolist() == np.delete(examples.images, fold.held_out, axis=0).tolist()
    published = replace(source, info=replace(source.info, own_split=False))
    assert pool(published) is train


def test_a_fingerprint_has_the_names_and_sizes_of_image_files_but_not_their_folder(tmp_path):
    def digest(path):
        examples = FileExamples((str(tmp_path / path),), np.arange(1))
        return fingerprint(source_of(examples, examples))

    (tmp_path / "a" / "cat").mkdir(parents=True)
    (tmp_path / "a" / "cat" / "1.png").write_bytes(b"image")
    before = digest("a/cat/1.png")
    (tmp_path / "a").rename(tmp_path / "b")
    assert digest("b/cat/1.png") == before
    (tmp_path / "b" / "cat").rename(tmp_path / "b" / "dog")
    assert digest("b/dog/1.png") != before
    (tmp_path / "b" / "dog").rename(tmp_path / "b" / "cat")
    (tmp_path / "b" / "cat" / "1.png").write_bytes(b"larger image")
    assert digest("b/cat/1.png") != before


# ---------------------------------------------------------------- embedded and generated sets


def test_digits_have_fixed_bytes():
    source = open_digits()
    assert (source.info.num_train, source.info.num_eval) == (1437, 360)
    assert source.info.image_shape == (8, 8, 1) and source.info.num_classes == 10
    assert zlib.crc32(source.eval.images.tobytes()) == 890062842
    assert zlib.crc32(source.train.labels.tobytes()) == 1877524231
    assert set(np.bincount(source.eval.labels)) <= {35, 36, 37}
    assert source.train.images.max() == 255


def test_nearest_neighbours_on_digits():
    assert knn_accuracy(open_digits()) == pytest.approx(0.986, abs=0.0005)


def test_nearest_neighbours_need_labels_in_memory():
    check_raises(ConfigurationError, "", "", knn_accuracy, open_membranes(16, 16))


def test_membranes_are_a_function_of_the_seed():
    one, same, other = open_membranes(40, 56, 3), open_membranes(40, 56, 3), open_membranes(40, 56, 4)
    for a, b in ((one.train, same.train), (one.eval, same.eval)):
        assert a.images.tobytes() == b.images.tobytes() and a.labels.tobytes() == b.labels.tobytes()
    assert one.train.images.tobytes() != other.train.images.tobytes()
    assert one.info.image_shape == (40, 56, 1) and (one.info.num_train, one.info.num_eval) == (24, 6)
    assert len({image.tobytes() for image in one.train.images}) == 24


def test_membranes_are_realistic():
    source = open_membranes(128, 128)
    assert set(np.unique(source.train.labels)) == {0, 1}
    for masks in (source.train.labels, source.eval.labels):
        assert 0.19 < 1 - masks.mean() < 0.27
    grey = source.train.images[..., 0].astype(float)
    membrane, cell = grey[source.train.labels == 0], grey[source.train.labels == 1]
    assert membrane.mean() < cell.mean() - 40
    # A threshold alone is good, but leaves something to learn.
    best = max(((grey > t) == source.train.labels).mean() for t in range(80, 170, 5))
    assert 0.85 < best < 0.985
    assert len(np.unique(source.train.images)) > 150


@pytest.mark.parametrize("height, width", [(16, 16), (17, 90), (101, 33)])
def test_membranes_of_any_size(height, width):
    evaluation = open_membranes(height, width).eval
    assert evaluation.images.shape == (6, height, width, 1)
    assert evaluation.labels.shape == (6, height, width)


def test_membranes_that_are_too_small_are_refused():
    check_raises(ConfigurationError, "15x40", "", open_membranes, 15, 40)


def test_random_data():
    one, same, other = (open_random(6, 7, 3, 5, "classification", seed) for seed in (1, 1, 2))
    assert one.train.images.shape == (1024, 6, 7, 3) and set(one.train.labels) == set(range(5))
    assert one.train.images.tobytes() == same.train.images.tobytes() != other.train.images.tobytes()
    assert abs(one.train.images.mean() - 127.5) < 2
    masks = open_random(6, 7, 1, 2, "segmentation").train.labels
    assert masks.shape == (1024, 6, 7) and masks.dtype == np.uint8
    choice = choose("random", ".", task="segmentation")
    source = open_dataset(choice, ReaderOptions(image_shape=(6, 8, 1)))
    assert source.info.task == "segmentation" and source.info.image_shape == (6, 8, 1)
    source = open_dataset(
        choose("random", "."), ReaderOptions(image_shape=(4, 4, 3), num_classes=7), limit_train="16"
    )
    assert source.info.num_classes == 7 and len(source.train) == 16


@given(st.integers(0, 2**31), st.integers(1, 3))
@settings(max_examples=10)
def test_channel_statistics(seed, channels):
    images = noise(seed, 4, 5, 6, channels)
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, images.mean((0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(std, images.std((0, 1, 2)), atol=1e-5)
    assert channel_statistics(np.full((1, 2, 2, 1), 9, np.uint8)) == ((9.0,), (1.0,))


# ---------------------------------------------------------------- downloads, with a folder as the server


@pytest.fixture
def server(tmp_path, monkeypatch):
    folder = tmp_path / "server"
    write_mnist(folder)
    write_cifar10(tmp_path / "batches")
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as tar:
        for file in sorted((tmp_path / "batches").iterdir()):
            tar.add(file, f"cifar-10-batches-py/{file.name}")
        evil = tarfile.TarInfo("../../escaped")
        evil.size = 0
        tar.addfile(evil)
    pooch = pytest.importorskip("pooch")
    for name in ("mnist", "cifar10"):
        remote = downloading.REMOTES[name]
        files = tuple((f, hashlib.sha256((folder / f).read_bytes()).hexdigest()) for f, _ in remote.files)
        monkeypatch.setitem(
            downloading.REMOTES, name, downloading.Remote("https://server.test/", files, remote.folder)
        )

    def fetch(downloader, url, output_file, _):
        sent = folder / url.rsplit("/", 1)[1]
        if not sent.exists():
            raise ConnectionError("404 Not Found")
        Path(output_file).write_bytes(sent.read_bytes())

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", fetch)
    return folder


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_download_on_request(tmp_path, server, name, explicit):
    data = tmp_path / "data"
    choice = choose(name if explicit else None, data, home=name, download=True)
    assert choice.location is None and "to be downloaded" in choice.message and not data.exists()
    check_raises(DataError, "", "", open_dataset, choice)
    source = open_dataset(choice, download=True)
    assert source.info.num_train in (20, 12)
    assert [p.name for p in data.iterdir()] == [downloading.REMOTES[name].folder]
    assert not (tmp_path / "escaped").exists() and not (tmp_path.parent / "escaped").exists()
    assert choose(name, data).location is not None


def failed_download(kind, error, name, data):
    """Checks that a download ends with an error; returns the error."""
    choice = choose(name, data, download=True)
    return check_raises(kind, error, "", open_dataset, choice, download=True)


def test_a_download_with_another_checksum_is_removed(tmp_path, server):
    (server / "t10k-labels-idx1-ubyte.gz").write_bytes(b"changed")
    failed_download(DataError, "SHA-256", "mnist", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_full_disk_is_no_failure_of_the_network(tmp_path, server, monkeypatch):
    pooch = pytest.importorskip("pooch")

    def full(*_):
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", full)
    failed_download(DataError, "cannot store mnist", "mnist", tmp_path / "data")


def test_every_address_is_https_with_a_sha256():
    for remote in downloading.REMOTES.values():
        assert remote.base.startswith("https://")
        assert all(len(digest) == 64 for _, digest in remote.files)


def test_a_failing_server_is_an_error(tmp_path, server):
    (server / "cifar-10-python.tar.gz").unlink()
    error = failed_download(MissingError, "cannot download", "cifar10", tmp_path / "data")
    assert error.exit_code == 6 and list((tmp_path / "data").iterdir()) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root can write anywhere")
def test_a_read_only_folder_is_an_error(tmp_path, server):
    tmp_path.joinpath("locked").mkdir(mode=0o500)
    failed_download(DataError, "cannot store", "mnist", tmp_path / "locked")


def test_a_file_as_data_path_is_an_error(tmp_path, server):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError):
        open_dataset(choose("mnist", tmp_path / "file", download=True), download=True)


# ---------------------------------------------------------------- catalog, without files


def test_the_catalog_has_the_shapes_of_the_files(tmp_path):
    """Planning reads only the catalog, and no file."""
    write_mnist(tmp_path / "mnist")
    write_mnist(tmp_path / "fashion_mnist")
    write_cifar10(tmp_path / "cifar10")
    known = {name for name, record in DATASETS.items() if record.image_shape is not None}
    without_files = {name for name in known if not DATASETS[name].files}
    assert known == {"mnist", "fashion_mnist", "cifar10", "cifar100", *without_files}
    read = {name: open_dataset(choose(name, tmp_path)) for name in known - {"cifar100"}}
    for name, source in read.items():
        of_catalog = DATASETS[name].image_shape, DATASETS[name].num_classes
        assert of_catalog == (source.info.image_shape, source.info.num_classes), name


def test_every_set_is_documented():
    page = (Path(__file__).resolve().parents[1] / "docs" / "datasets.md").read_text(encoding="utf-8")
    table = page[: page.index("\n## ")]
    assert not [name for name in DATASETS if f"`{name}`" not in table]


@pytest.mark.parametrize("kind", ["mnist", "cifar10", "imagefolder", "classes", "imagemasks", "isbi2012"])
@pytest.mark.parametrize("below", [False, True])
def test_training_and_verification_choose_the_same_set(tmp_path, kind, below):
    if below and kind not in ("mnist", "cifar10", "isbi2012"):
        pytest.skip("such a folder has no name of its own")
    folder, task = tmp_path / kind if below else tmp_path, "classification"
    if kind == "mnist":
        write_mnist(folder)
    elif kind == "cifar10":
        write_cifar10(folder)
    elif kind in ("imagefolder", "classes"):
        parts = ("train", "val") if kind == "imagefolder" else (".",)
        write_class_folders(folder, {(part, name): 3 for part in parts for name in ("ant", "bee")})
    else:
        task = "segmentation"
        if kind == "imagemasks":
            write_class_folders(folder, {(".", name): 3 for name in ("images", "masks")})
        if kind == "isbi2012":
            folder.mkdir(exist_ok=True)
            (folder / "train-volume.tif").write_bytes(b"")
    choice = choose(str(tmp_path), ".", task=task)
    for verified in (verify.choose(str(tmp_path), Path(".")), verify.choose(None, tmp_path)):
        assert (choice.name, choice.location) == (verified.name, verified.location)
    assert choice.name == {"classes": "imagefolder"}.get(kind, kind)


def test_two_sets_in_a_folder_need_a_name(tmp_path):
    write_mnist(tmp_path / "mnist")
    write_cifar10(tmp_path / "cifar10")
    for choosing in (lambda: choose(str(tmp_path), "."), lambda: verify.choose(None, tmp_path)):
        hint = "--dataset mnist --dataset-path"
        check_raises(ConfigurationError, "holds mnist and cifar10", hint, choosing)


def test_class_folders_are_a_set_beside_the_folder_of_another_one_but_not_beside_its_files(tmp_path):
    write_class_folders(tmp_path, {(".", name): 3 for name in ("ant", "bee")})
    write_mnist(tmp_path / "mnist")
    assert [one.name for one in find_sets(tmp_path)] == ["mnist", "imagefolder"]
    write_cifar10(tmp_path)
    assert [one.name for one in find_sets(tmp_path)] == ["mnist", "cifar10"]
