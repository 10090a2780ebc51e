"""Data sets in the format of TensorFlow Datasets, written here by TFDS."""

import io
import json
import os
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from support.data_sets import encode
from support.refusals import check_raises
from support.streams import RAW

from ipucnn.datasets import limits
from ipucnn.datasets.classes import undivided
from ipucnn.datasets.pipeline import Stream, eval_batches, train_batches
from ipucnn.datasets.registry import choose_dataset, open_dataset
from ipucnn.datasets.sources import tfds as tfds_reader
from ipucnn.datasets.verification import verify
from ipucnn.errors import DataError, MissingError
from ipucnn.events import show

tfds = pytest.importorskip("tensorflow_datasets")


def image_of(number, shape):
    height, width, channels = shape
    height, width = height or 9 + number % 5, width or 12 - number % 3
    return np.random.RandomState(number).randint(0, 256, (height, width, channels)).astype(np.uint8)


def write(
    path,
    name,
    *,
    shape=(28, 28, 1),
    splits=(("train", 21), ("test", 6)),
    encoding="png",
    labels=True,
    more=(),
    is_supervised=True,
):
    """Prepares a data set ``name`` below ``path`` whose images are functions of their number.

    ``more`` has the names of features that are like "image" or "label", before a dot and after it.
    """
    features = {"image": tfds.features.Image(shape=shape, encoding_format=encoding), "id": tf.int64}
    if labels:
        features["label"] = tfds.features.ClassLabel(names=["ant", "bee", "cat"])
    features.update({f"{kind} {k}": features[kind] for k, kind in enumerate(more)})

    def info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description="made for a test",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label") if labels and is_supervised else None,
        )

    def generate(self, start, count):
        for number in range(start, start + count):
            example = {"image": image_of(number, shape), "id": number}
            if labels:
                example["label"] = number % 3
            example.update({f"{kind} {k}": example[kind] for k, kind in enumerate(more)})
            yield number, example

    def split_generators(self, manager):
        starts = np.cumsum([0] + [count for _, count in splits])
        return {split: generate(self, int(start), count) for start, (split, count) in zip(starts, splits)}

    builder = type(
        "".join(part.capitalize() for part in name.split("_")),
        (tfds.core.GeneratorBasedBuilder,),
        {
            "VERSION": tfds.core.Version("3.0.1"),
            "name": name,
            "_info": info,
            "_split_generators": split_generators,
            "_generate_examples": generate,
            "__module__": __name__,
            # Otherwise it would look for the files that describe a set beside this file.
            "pkg_dir_path": Path(__file__).parent,
        },
        skip_registration=True,
    )
    builder(data_dir=str(path)).download_and_prepare()


def choose(name, path, home="mnist", **options):
    return choose_dataset(name, Path(path), home=home, task="classification", **options)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = tmp_path_factory.mktemp("tfds")
    write(path, "mnist")
    write(path, "photos", shape=(None, None, 3), splits=(("train", 20),), encoding="png")
    write(path, "nolabel", labels=False)
    write(path, "small", shape=(40, 40, 3))
    return path


@pytest.mark.parametrize("inside", ["", "mnist", "mnist/3.0.1"])
def test_a_default_set_in_a_tfds_directory(prepared, inside):
    choice = choose(None, prepared / inside)
    assert (choice.name, choice.location) == ("mnist", prepared / "mnist" / "3.0.1")
    source = open_dataset(choice)
    assert (source.info.num_train, source.info.num_eval) == (21, 6)
    assert source.info.name == "mnist" and source.info.augmentation == "shift"
    assert source.info.class_names == ("ant", "bee", "cat")
    stored = {image.tobytes(): label for image, label in zip(source.train.images, source.train.labels)}
    expected = {image_of(n, (28, 28, 1)).tobytes(): n % 3 for n in range(21)}
    assert stored == expected


@pytest.mark.slow_cases("tfds:mnist:3.0.1-efficientnet-b0-efficientnet-b0@small-32x32x3")
@pytest.mark.parametrize(
    ("name", "model", "preset", "size"),
    [
        ("tfds:mnist:3.0.1", "efficientnet-b0", "efficientnet-b0@small", "32x32x3"),
        ("tfds:photos", "efficientnet-b0", "efficientnet-b0@folder", "224x224x3"),
        ("tfds:small", "efficientnet-b0", "efficientnet-b0@folder", "40x40x3"),
    ],
)
def test_presets_are_those_of_the_set_or_of_files(prepared, succeeds, name, model, preset, size):
    """Those of files come without their image size: photographs are seen in the size for which a network is made."""
    few = ("--micro-batch-size", 16, "--gradient-accumulation-count", 1)  # the sets are small
    _, err = succeeds("train", model, "--dataset", name, "--dataset-path", prepared, "--dry-run", *few)
    assert f"{model} (preset {preset}), input {size}," in " ".join(err.split())


def test_the_order_is_the_same_each_time(prepared):
    one, two = (open_dataset(choose("tfds:mnist", prepared)) for _ in range(2))
    assert one.train.images.tobytes() == two.train.images.tobytes()
    assert one.info.name == "tfds:mnist"


def test_images_of_many_sizes_stay_encoded(prepared):
    source = open_dataset(choose("tfds:photos", prepared))
    assert source.info.image_shape == (None, None, 3) and len(source.train) + len(source.eval) == 20
    assert len(source.eval) == 2 and "last 10 %" in source.info.warnings[0]
    whole = undivided(source)
    assert source.info.own_split and not any("last 10 %" in line for line in whole.info.warnings)
    assert whole.eval.data == (*source.train.data, *source.eval.data) and len(whole.eval.labels) == 20
    options = {"batch_size": 2, "input_shape": (16, 16, 3), "input_range": RAW}
    images, labels, _ = next(eval_batches(source.eval, source.info, **options).as_numpy_iterator())
    assert images.shape == (2, 16, 16, 3) and set(labels) <= {0, 1, 2} and images.std() > 10
    batches = train_batches(source, Stream(samples_per_epoch=18, augment=True, seed=0, **options))
    assert next(batches.as_numpy_iterator())[0].std() > 10
    limited = open_dataset(choose("tfds:photos", prepared), limit_train="5")
    assert len(limited.train) == 5


def test_a_set_without_classes_is_refused(prepared):
    check_raises(DataError, "no image with a class", "", open_dataset, choose("tfds:nolabel", prepared))


@pytest.mark.parametrize("kind, words", [("label", "several classes"), ("image", "several images")])
def test_several_features_are_refused_with_their_names(tmp_path, kind, words):
    write(tmp_path, "two", more=(kind,), is_supervised=False)
    words = f"{words}, and no supervised keys: {kind}, {kind} 0"
    for reading in (lambda: open_dataset(choose("tfds:two", tmp_path)), lambda: verify_tfds("two", tmp_path)):
        check_raises(DataError, words, "prepare it again with supervised_keys=", reading)
    write(tmp_path, "named", more=(kind,))
    assert len(open_dataset(choose("tfds:named", tmp_path)).train) == 21
    write(tmp_path, "single", is_supervised=False)
    assert len(open_dataset(choose("tfds:single", tmp_path)).train) == 21


def verify_tfds(name, path):
    return show(verify.verify(verify.choose(f"tfds:{name}", Path(path))))


def test_a_set_and_its_version_are_the_same_set(prepared):
    one, two = (open_dataset(choose(name, prepared)) for name in ("tfds:mnist", "tfds:mnist:3.0.1"))
    assert one.info.augmentation == two.info.augmentation == "shift"
    one, two = (verify_tfds(name, prepared) for name in ("mnist", "mnist:3.0.1"))
    assert one.known == two.known == verify.KNOWN["mnist"]
    assert [finding.code for finding in one.findings] == [finding.code for finding in two.findings]


def test_configurations_are_not_chosen_from(prepared, tmp_path):
    for config in ("big", "small"):
        copytree(prepared / "mnist", tmp_path / "sets" / config)
    hint = "--dataset tfds:sets/big"
    check_raises(
        DataError, "several configurations of sets: sets/big, sets/small", hint, choose, "tfds:sets", tmp_path
    )
    assert choose("tfds:sets/small", tmp_path).location == tmp_path / "sets" / "small" / "3.0.1"


def test_the_split_that_serves_for_evaluation_is_said(tmp_path):
    write(tmp_path, "three", splits=(("train", 12), ("validation", 4), ("test", 5)))
    source = open_dataset(choose("tfds:three", tmp_path))
    assert source.info.num_eval == 4
    assert source.info.choice == "evaluation on validation, nothing on test"
    assert source.info.warnings == (f"tfds:three: {source.info.choice}",)
    (finding,) = [one for one in verify_tfds("three", tmp_path).findings if one.code == "unread-part"]
    assert finding.examples == ("test",)
    write(tmp_path, "two", splits=(("train", 20), ("small", 4)), more=("image", "label"))
    info = open_dataset(choose("tfds:two", tmp_path)).info
    assert info.choice == (
        "images from image, classes from label, nothing from image 0, label 1; "
        "evaluation on a part of train, nothing on small"
    )
    assert info.warnings[0] == f"tfds:two: {info.choice}" and "the last 10 % of train" in info.warnings[1]
    found = {one.code: one.examples for one in verify_tfds("two", tmp_path).findings}
    assert found["unread-part"] == ("image 0", "label 1", "small")


def test_an_absent_set_is_an_error(prepared):
    name = "tfds:svhn_cropped"
    check_raises(DataError, f"{name} is not in", "--download", choose, name, prepared)
    assert choose(name, prepared, download=True).download_to == prepared


def test_a_version_can_be_chosen(prepared):
    assert choose("tfds:mnist:3.0.1", prepared).location == prepared / "mnist" / "3.0.1"
    check_raises(DataError, "is not in", "", choose, "tfds:mnist:1.0.0", prepared)
    folder = prepared / "mnist" / "3.0.1"  # the folder of the version
    assert choose("tfds:mnist:3.0.1", folder).location == folder
    for other in ("tfds:mnist:9.9.9", "tfds:photos"):
        check_raises(DataError, "is not in", "", choose, other, folder)


def test_a_set_is_identified_by_its_description(prepared, tmp_path):
    """The names of the folders above it, one of which may be a configuration, do not count."""
    folder = tmp_path / "mnist" / "small" / "3.0.1"
    copytree(prepared / "photos" / "3.0.1", folder)
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps({**info, "configName": "small"}))
    check_raises(DataError, "is not in", "", choose, "tfds:mnist", folder)
    for name in ("tfds:photos", "tfds:photos/small", "tfds:photos/small:3.0.1"):
        assert choose(name, folder).location == folder
    check_raises(DataError, "is not in", "", choose, "tfds:photos/large", folder)
    for name, path in ((str(folder), Path(".")), (None, folder)):
        assert verify.choose(name, path).name == "tfds:photos/small"
    choice = choose(str(folder), ".")
    assert (choice.name, choice.location) == ("tfds:photos/small", folder)


def test_a_damaged_set_is_an_error(tmp_path):
    write(tmp_path, "mnist", splits=(("train", 4), ("test", 2)))
    folder = tmp_path / "mnist" / "3.0.1"
    shard = next(file for file in folder.iterdir() if "train" in file.name)
    shard.write_bytes(shard.read_bytes()[:-20])
    check_raises(DataError, "record 3 at byte", "again", open_dataset, choose(None, tmp_path))
    (folder / "dataset_info.json").write_text("{")
    check_raises(DataError, "cannot read mnist", "", open_dataset, choose(None, tmp_path))


def test_a_missing_package_is_an_error(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    choice = choose("tfds:mnist", prepared)
    error = check_raises(MissingError, "tensorflow-datasets", "ipucnn[tfds]", open_dataset, choice)
    assert error.exit_code == 6


@pytest.mark.slow
def test_an_unknown_set_cannot_be_prepared(tmp_path):
    choice = choose("tfds:no_such_set_at_all", tmp_path, download=True)
    error = "cannot prepare tfds:no_such_set_at_all"
    check_raises(MissingError, error, "", open_dataset, choice, download=True)


def test_a_set_too_large_for_memory_is_refused(prepared, monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda: 40_000)
    choice, words = choose("tfds:mnist", prepared), "iB of memory, and half of what is free is"
    error = check_raises(DataError, words, "image folder", open_dataset, choice)
    assert "tfds:mnist needs " in error.message


def test_images_are_held_in_memory_once():
    """The encoded form of an image is released once it is decoded."""
    images = [image_of(k, (5, 7, 3)) for k in range(4)]
    data = [encode(image) for image in images]
    np.testing.assert_array_equal(tfds_reader._decoded(data, (5, 7, 3), "set"), images)
    assert data == [b""] * 4
    check_raises(
        DataError,
        "9x9 pixels, not 5x7",
        "",
        tfds_reader._decoded,
        [encode(image_of(1, (9, 9, 3)))],
        (5, 7, 3),
        "s",
    )


@pytest.mark.parametrize("shape", [(28, 28, 1), (None, None, 3)])
def test_images_and_classes_are_those_that_tfds_reads(tmp_path, shape):
    write(tmp_path, "some", shape=shape, splits=(("train", 21), ("test", 6)))
    source = open_dataset(choose("tfds:some", tmp_path))
    builder = tfds.builder_from_directory(str(tmp_path / "some" / "3.0.1"))
    for split, examples in (("train", source.train), ("test", source.eval)):
        rows = list(builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator())
        assert [row["label"] for row in rows] == examples.labels.tolist() and len(rows) == len(examples)
        for number, row in enumerate(rows):
            if shape[0] is None:
                with Image.open(io.BytesIO(examples.data[number])) as image:
                    np.testing.assert_array_equal(np.asarray(image), row["image"])
            else:
                np.testing.assert_array_equal(examples.images[number], row["image"])


def test_reading_a_set_imports_no_tensorflow(tmp_path):
    """A run sets the threads, devices and flags of TensorFlow before its import, and knows them after the data."""
    write(tmp_path, "some", splits=(("train", 12), ("test", 4)))
    code = (
        "import sys\nfrom pathlib import Path\nfrom ipucnn.datasets.registry import choose_dataset, open_dataset\n"
        "choice = choose_dataset('tfds:some', Path('.'), home='mnist', task='classification')\n"
        "print(len(open_dataset(choice).train), 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=str(tmp_path), stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [b"12", b"False"]


def test_a_set_is_prepared_by_another_process(tmp_path, monkeypatch):
    """The run's own process has not imported TensorFlow then; a full disk is an error of the data."""
    (tmp_path / "tensorflow_datasets.py").write_text(
        "class features:\n"
        "    class FeatureConnector:\n"
        "        cls_from_name = classmethod(lambda cls, name: None)\n"
        "class builder:\n"
        "    def __init__(self, name, data_dir):\n"
        "        self.name, self.data_path = name, data_dir + '/' + name\n"
        "    def download_and_prepare(self):\n"
        "        if self.name == 'full':\n"
        "            raise OSError(28, 'No space left on device', 'x/y')\n"
        "def disable_progress_bar():\n"
        "    print('words')\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert tfds_reader.prepare("some", tmp_path / "data") == tmp_path / "data" / "some"
    check_raises(DataError, "x/y: No space left on device", "", tfds_reader.prepare, "full", tmp_path)
    (tmp_path / "tensorflow_datasets.py").write_text("import os\nos._exit(7)\n")
    check_raises(MissingError, "ended with exit code 7", "", tfds_reader.prepare, "some", tmp_path)


def test_preparing_imports_no_module_that_a_set_names(tmp_path, monkeypatch):
    """A version with wildcards is one that ipucnn does not find, and TFDS does."""
    write(tmp_path, "evil")
    path = tmp_path / "evil" / "3.0.1" / "features.json"
    text = path.read_text().replace(
        "tensorflow_datasets.core.features.class_label_feature.ClassLabel", "other.Evil"
    )
    path.write_text(text)
    (tmp_path / "other.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    words = "names other.Evil, which is no feature of TFDS"
    check_raises(MissingError, words, "", tfds_reader.prepare, "evil:3.*.*", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("count, parts", [(2, (1, 1)), (4, (3, 1)), (15, (14, 1)), (25, (22, 3))])
def test_few_images_are_divided(tmp_path, count, parts):
    write(tmp_path, "few", splits=(("train", count),))
    source = open_dataset(choose("tfds:few", tmp_path))
    assert (len(source.train), len(source.eval)) == parts


def test_images_of_one_size_are_those_of_tfds_without_their_tags(tmp_path, monkeypatch):
    """TFDS turns no image by its tag of orientation, and drops transparency."""
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = [
        encode(image_of(1, (8, 6, 3)), exif=exif),
        encode(Image.fromarray(np.dstack([image_of(2, (8, 6, 3)), np.full((8, 6), 9, np.uint8)]))),
        encode(Image.fromarray(image_of(3, (8, 6, 3))).quantize(5)),
        encode(Image.fromarray(image_of(4, (8, 6, 3))).quantize(5), transparency=bytes([0, 9, 255])),
        encode(Image.fromarray(np.linspace(0, 65535, 48).astype(np.uint16).reshape(8, 6))),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = tfds_reader._decoded([*encoded], (8, 6, 3), "set")
    expected = [tf.io.decode_image(one, channels=3, expand_animations=False).numpy() for one in encoded]
    np.testing.assert_array_equal(read, expected)
    grey = tf.io.decode_image(encoded[-1], channels=1, expand_animations=False).numpy()
    np.testing.assert_array_equal(tfds_reader.stored_pixels(encoded[-1], 1, "x"), grey)
    check_raises(
        DataError,
        "image 0 of set cannot be decoded",
        "prepare",
        tfds_reader._decoded,
        [b"x"],
        (8, 6, 3),
        "set",
    )
    png = encode(np.zeros((2, 2), np.uint8))
    header = b"IHDR" + 2 * (12_000).to_bytes(4, "big") + png[24:29]
    large = png[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png[33:]
    words = "12000x12000 pixels, more than"
    check_raises(DataError, words, "", tfds_reader.stored_pixels, large, 1, "set")
