"""ImageNet as TFRecord files: the network sees the records' pixels, and errors name the place in a file."""

import contextlib
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
from few_examples import tries
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.data_sets import encode, noise, smooth, write_class_folders
from support.events import Recorded
from support.image_files import turned
from support.refusals import check_raises
from support.streams import RAW, assert_same, check_pure, take
from support.trained_runs import report_of

from ipucnn.datasets import images, pipeline
from ipucnn.datasets.base import RecordExamples, fingerprint, limit_source
from ipucnn.datasets.forms import jpeg_orientation
from ipucnn.datasets.hashing import AUGMENT, draw, uniform
from ipucnn.datasets.image_headers import plain_jpeg_size
from ipucnn.datasets.images import decode_for_training, distorted_box
from ipucnn.datasets.pipeline import Stream, data_errors, eval_batches, train_batches
from ipucnn.datasets.registry import ReaderOptions, choose_dataset, open_dataset
from ipucnn.datasets.segmentation.masks import read_table
from ipucnn.datasets.sources import records, tfrecord
from ipucnn.datasets.sources.tfrecord import features_of, frame, make_example
from ipucnn.errors import DataError
from ipucnn.events import Progress, during, show
from ipucnn.filesystem import cache_folder


def jpeg(number, size=(40, 30)):
    return encode(smooth(number, *size), "JPEG")


def example(number, label):
    return make_example(
        {
            "image/encoded": jpeg(number),
            "image/class/label": label,
            "image/filename": f"{number}.JPEG".encode(),
            "image/height": 30,
        }
    )


def write_shards(folder, subset, labels, num_shards, first=0):
    """Distributes images over record files in turn; returns (file, number in it) of each."""
    parts, places = [[] for _ in range(num_shards)], []
    for k, label in enumerate(labels):
        places.append((k % num_shards, len(parts[k % num_shards])))
        parts[k % num_shards].append(frame(example(first + k, label)))
    for k, part in enumerate(parts):
        (folder / f"{subset}-{k:05d}-of-{num_shards:05d}").write_bytes(b"".join(part))
    return places


TRAIN_LABELS = (3, 1, 2, 2, 3, 1, 1)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "imagenet"
    path.mkdir()
    write_shards(path, "train", TRAIN_LABELS, 3)
    write_shards(path, "validation", (1, 2, 3), 2, first=100)
    (path / "classes.txt").write_text("ant\nbee\ncat\n")
    return path


def open_folder(path):
    return open_dataset(choose_dataset("imagenet", path, home="", task="classification"))


def error_of(path, action=None):
    """Returns the error message of opening a folder, or of another action."""
    error = check_raises(DataError, "", "", action or (lambda: open_folder(path)))
    assert error.exit_code == 3
    return error.message


# ---------------------------------------------------------------- messages


def naive_varint(value):
    out = b""
    while True:
        out += bytes([value % 128 + (128 if value >= 128 else 0)])
        value //= 128
        if not value:
            return out


VALUES = st.one_of(st.binary(max_size=140), st.integers(-(2**63), 2**63 - 1))


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
@tries(12, slow=40)
def test_feature_round_trip(features):
    data = make_example(features)
    assert features_of(data, {name: type(value) for name, value in features.items()}) == features
    assert data == make_example(dict(reversed(list(features.items()))))


def test_examples_are_compatible_with_tensorflow():
    tf = pytest.importorskip("tensorflow")
    ours = {"image/encoded": bytes(range(256)) * 20, "image/class/label": 1000, "a": -5, "": b""}
    theirs = tf.train.Example.FromString(make_example(ours)).features.feature
    assert {
        name: (value.bytes_list.value or value.int64_list.value)[0] for name, value in theirs.items()
    } == ours
    feature = tf.train.Feature
    serialized = tf.train.Example(
        features=tf.train.Features(
            feature={
                "image/class/label": feature(int64_list=tf.train.Int64List(value=[7])),
                "image/object/bbox/xmin": feature(float_list=tf.train.FloatList(value=[0.25, 0.5])),
                "image/encoded": feature(bytes_list=tf.train.BytesList(value=[b"x" * 999])),
                "image/class/text": feature(bytes_list=tf.train.BytesList(value=[])),
                "two/labels": feature(int64_list=tf.train.Int64List(value=[7, 8])),
                "two/images": feature(bytes_list=tf.train.BytesList(value=[b"x", b"y"])),
            }
        )
    ).SerializeToString()
    types = {"image/class/label": int, "image/encoded": bytes}
    assert features_of(serialized, types) == {"image/class/label": 7, "image/encoded": b"x" * 999}
    for absent in ("image/class/text", "image/object/bbox/xmin", "nothing"):
        with pytest.raises(tfrecord.BadExample, match=f"lacks {absent}"):
            features_of(serialized, {absent: bytes})
    for several, kind in (("two/labels", int), ("two/images", bytes)):
        with pytest.raises(tfrecord.BadExample, match=f"several values of {several}"):
            features_of(serialized, {several: kind})


@given(st.binary(max_size=60))
@settings(max_examples=200)
def test_any_bytes_are_an_example_or_refused(data):
    with contextlib.suppress(tfrecord.BadExample):
        features_of(data, {"image/class/label": int})


def test_unpacked_numbers_are_read():
    # Written by hand: an Int64List whose value is an unpacked number, as old writers store it.
    number = bytes([1 << 3 | 0]) + naive_varint(300)
    feature = bytes([3 << 3 | 2]) + naive_varint(len(number)) + number
    entry = b"\x0a\x01n" + b"\x12" + naive_varint(len(feature)) + feature
    features = b"\x0a" + naive_varint(len(entry)) + entry
    assert features_of(b"\x0a" + naive_varint(len(features)) + features, {"n": int}) == {"n": 300}


# ---------------------------------------------------------------- opening


def test_a_folder_of_records(folder):
    source = open_folder(folder.parent)
    assert source.info.name == "imagenet" and source.info.class_names == ("ant", "bee", "cat")
    assert (source.info.num_train, source.info.num_eval, source.info.num_classes) == (7, 3, 3)
    # Images come in the order of files, and of records in each file.
    order = [0, 3, 6, 1, 4, 2, 5]
    assert source.train.labels.tolist() == [TRAIN_LABELS[k] - 1 for k in order]
    assert [source.train.encoded(k) for k in range(7)] == [jpeg(k) for k in order]
    assert [source.eval.encoded(k) for k in range(3)] == [jpeg(100), jpeg(102), jpeg(101)]
    assert "train-00001-of-00003, record 1 at byte" in source.train.describe(4)
    limited = limit_source(source, "3", None, 1).train
    assert isinstance(limited, RecordExamples) and len(limited) == 3
    whole = {(source.train.encoded(k), source.train.labels[k]) for k in range(7)}
    assert {(limited.encoded(k), limited.labels[k]) for k in range(3)} <= whole


def test_without_class_names_there_are_1000_classes(folder):
    (folder / "classes.txt").unlink()
    info = open_folder(folder).info
    assert info.num_classes == 1000 and info.class_names[:2] == ("1", "2")


def test_records_are_found_by_folder_and_by_name(folder):
    for name, path in (("imagenet", folder), ("ImageNet", folder.parent), (str(folder), ".")):
        choice = choose_dataset(name, Path(path), home="cifar10", task="classification")
        assert (choice.name, choice.location) == ("imagenet", folder)
    # Without a name it is the default data set of some networks.
    choice = choose_dataset(None, folder.parent, home="imagenet", task="classification")
    assert choice.location == folder


def test_records_have_priority_over_class_folders(folder):
    write_class_folders(folder, {("train", "dog"): 1, ("val", "dog"): 1})
    assert isinstance(open_folder(folder).train, RecordExamples)
    for path in folder.glob("*-of-*"):
        path.unlink()
    assert open_folder(folder).info.class_names == ("dog",)


def test_a_fingerprint_depends_on_labels_and_places(folder):
    before = fingerprint(open_folder(folder))
    assert fingerprint(open_folder(folder)) == before
    write_shards(folder, "train", (*TRAIN_LABELS[:-1], 2), 3)
    assert fingerprint(open_folder(folder)) != before


# ---------------------------------------------------------------- the index


def count_scans(monkeypatch):
    scanned = []

    def scan(path):
        scanned.append(path.name)
        return tfrecord.scan_records(path)

    monkeypatch.setattr(records, "scan_records", scan)
    return scanned


def test_the_index_is_rebuilt_only_if_a_file_changed(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path / "cache"))
    scanned = count_scans(monkeypatch)
    before = sorted(path.name for path in folder.iterdir())
    heard = Recorded()
    first = show(during("opening", lambda: open_folder(folder)), heard)
    assert len(scanned) == 5
    assert heard.events[1:] == [Progress("indexing records", k, 5) for k in range(1, 6)]
    assert sorted(path.name for path in folder.iterdir()) == before  # no new file beside the data
    second = open_folder(folder)
    assert len(scanned) == 5
    for name in ("shards", "numbers", "places", "labels"):
        assert np.array_equal(getattr(first.train, name), getattr(second.train, name))
        assert getattr(first.eval, name).dtype == getattr(second.eval, name).dtype
    path = folder / "train-00001-of-00003"
    os.utime(path, ns=(1, 1))
    open_folder(folder)
    assert len(scanned) == 10
    path.write_bytes(path.read_bytes() + frame(example(50, 3)))
    assert len(open_folder(folder).train) == 8


@pytest.mark.parametrize("damage", ["cut", "flipped", "pickle", "empty", "folder"])
def test_a_damaged_index_is_rebuilt(folder, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path / "cache"))
    whole = fingerprint(open_folder(folder))
    (path,) = cache_folder("records").iterdir()
    data = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = data[:200] + bytes([data[200] ^ 1]) + data[201:]
        pickled = b"x" * 64 + b"\ncos\nsystem\n"
        damaged = {"cut": data[:-7], "flipped": flipped, "pickle": pickled, "empty": b""}
        path.write_bytes(damaged[damage])
    scanned = count_scans(monkeypatch)
    assert fingerprint(open_folder(folder)) == whole and len(scanned) == 5


def test_the_index_is_not_kept_without_a_home_folder(folder, monkeypatch):
    """As in a container whose user has no entry in its table of users."""
    expected = open_dataset(choose_dataset("imagenet", folder, home="", task="classification"))
    for name in ("HOME", "IPUCNN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    source = open_dataset(choose_dataset("imagenet", folder, home="", task="classification"))
    assert source.train.places.tolist() == expected.train.places.tolist()
    (line,) = source.info.warnings
    assert "is not kept" in line and not expected.info.warnings


@pytest.mark.parametrize(
    "text", ["ant\r\nbee\r\n", "\ufeffant\nbee\n", "ant\n\n\nbee", " ant \n# a note\nbee\n\n"]
)
def test_names_of_classes_have_one_grammar_for_records_and_masks(tmp_path, text):
    path = tmp_path / "classes.txt"
    path.write_bytes(text.encode())
    assert records.class_names(tmp_path) == ("ant", "bee")
    path.write_bytes(text.replace("ant", "0 ant").replace("bee", "7 bee").encode())
    assert read_table(tmp_path / "classes.txt")[:2] == (("ant", "bee"), (0, 7))


def test_an_unwritable_cache_is_not_an_error(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path / "file"))
    assert len(open_folder(folder).train) == 7


def test_indexing_reads_only_labels(folder, monkeypatch):
    """Of large records, only the bytes up to the label are read."""
    path = folder / "train-00000-of-00003"
    big = make_example({"image/encoded": bytes(10**6), "image/class/label": 2, "zzz": bytes(10**6)})
    path.write_bytes(frame(big) * 3)
    taken, pread = [], os.pread

    def counting(handle, size, place):
        taken.append(size)
        return pread(handle, size, place)

    monkeypatch.setattr(os, "pread", counting)
    train = open_folder(folder).train
    assert train.places[:3].tolist() == [0, len(big) + 16, 2 * (len(big) + 16)]
    assert train.labels[:3].tolist() == [1, 1, 1] and sum(taken) < 10**5


# ---------------------------------------------------------------- refused records


def first_record(**features):
    """Returns a function that replaces the records of a file with one of the given features."""
    names = {"label": "image/class/label", "image": "image/encoded"}
    data = frame(make_example({names[key]: value for key, value in features.items()}))
    return lambda f: (f / "train-00001-of-00003").write_bytes(data)


LACKS_LABEL = "record 0 at byte 0 is no labelled image: it lacks image/class/label"
REFUSED = [
    ("train-00001-of-00003 is missing", lambda f: (f / "train-00001-of-00003").unlink()),
    ("has no validation records", lambda f: [path.unlink() for path in f.glob("validation*")]),
    ("files of several sets of 'train' records", lambda f: write_shards(f, "train", (1, 2), 2)),
    ("classes.txt has the names of 0 classes", lambda f: (f / "classes.txt").write_text("# none\n\n")),
    (LACKS_LABEL, first_record(label=b"3")),
    (LACKS_LABEL, first_record(image=b"x")),
    *[
        (f"train-00001-of-00003, record 0 at byte 0 has the label {label}, and labels are 1 to 3",
         first_record(label=label))
        for label in (0, 4, -1, 1001, 2**40)
    ],
    *[
        (f"record 0 at byte 0 has the label {label}, and labels are 1 to 1000",
         lambda f, label=label: [(f / "classes.txt").unlink(), first_record(label=label)(f)])
        for label in (0, 1001)
    ],
]  # fmt: skip


@pytest.mark.parametrize("words, damage", REFUSED)
def test_damaged_records_are_refused(folder, words, damage):
    damage(folder)
    assert words in error_of(folder)


def test_a_record_without_an_image_is_refused_when_it_is_read(folder):
    first_record(label=1)(folder)
    source = open_folder(folder)
    assert "is no image: it lacks image/encoded" in error_of(folder, lambda: source.train.encoded(3))


def test_a_truncated_file_of_records(folder):
    path = folder / "validation-00000-of-00002"
    data = path.read_bytes()
    second = open_folder(folder).eval.places[1]
    path.write_bytes(data[:-5])
    message = error_of(folder)
    assert f"validation-00000-of-00002, record 1 at byte {second}: truncated: 5 bytes" in message
    path.write_bytes(data[: second + 3])
    assert f"record 1 at byte {second}: truncated: 3 bytes where" in error_of(folder)


def test_a_wrong_checksum_is_reported_when_it_is_read(folder):
    path = folder / "train-00000-of-00003"
    data = bytearray(path.read_bytes())
    source = open_folder(folder)
    at = int(source.train.places[1])
    data[at + 200] ^= 1
    path.write_bytes(bytes(data))
    assert source.train.encoded(0) == jpeg(0) and source.train.encoded(2) == jpeg(6)
    message = error_of(folder, lambda: source.train.encoded(1))
    assert f"train-00000-of-00003, record 1 at byte {at}: the checksum of its content is wrong" in message
    data[at + 1] ^= 1
    path.write_bytes(bytes(data))
    place = re.escape(f"record 1 at byte {at}: the checksum of its length is wrong")
    assert re.search(place, error_of(folder))
    assert re.search(place, error_of(folder, lambda: source.train.encoded(1)))


def test_a_file_that_was_shortened_is_reported(folder):
    source = open_folder(folder)
    path = folder / "train-00000-of-00003"
    path.write_bytes(path.read_bytes()[: int(source.train.places[1]) + 50])
    assert "record 1 at byte" in error_of(folder, lambda: source.train.encoded(1))
    path.write_bytes(b"")
    assert "truncated" in error_of(folder, lambda: source.train.encoded(0))


# ---------------------------------------------------------------- network inputs


@given(
    st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**40), st.sampled_from([(224, 224), (96, 128)])
)
@tries(50, slow=150)
def test_a_distorted_box_has_a_legal_area_and_aspect_ratio(width, height, seed, size):
    left, top, right, bottom = distorted_box(width, height, size, draw(seed, AUGMENT, 3, 0, 7))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    if (left, top, right, bottom) != (0, 0, width, height):
        assert (right - left) * (bottom - top) >= 0.05 * width * height
        aspect = size[1] / size[0]
        # The width is rounded to whole pixels.
        assert 0.75 * aspect * (bottom - top) - 0.5 <= right - left <= 1.33 * aspect * (bottom - top) + 0.5
    assert (left, top, right, bottom) == distorted_box(width, height, size, draw(seed, AUGMENT, 3, 0, 7))


@pytest.mark.slow
def test_distorted_boxes_have_the_distribution_of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    width, height, count = 500, 375, 3000
    ours = np.array(
        [distorted_box(width, height, (224, 224), draw(5, AUGMENT, 0, 0, k)) for k in range(count)], float
    )
    sample = tf.function(
        lambda k: tf.concat(
            tf.image.stateless_sample_distorted_bounding_box(
                (height, width, 3),
                tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
                seed=tf.stack([5, k]),
                min_object_covered=0.0,
                aspect_ratio_range=(0.75, 1.33),
                area_range=(0.05, 1.0),
                max_attempts=100,
            )[:2],
            0,
        )
    )
    top, left, _, tall, wide, _ = tf.map_fn(sample, tf.range(count)).numpy().T.astype(float)
    theirs = np.stack([left, top, left + wide, top + tall], axis=1)
    # Left, top, width and height
    ours, theirs = (np.hstack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]]).T for boxes in (ours, theirs))
    for a, b in zip(ours, theirs):
        spread = np.hypot(a.std(), b.std()) / np.sqrt(count)
        assert abs(a.mean() - b.mean()) < 4 * spread + 0.5
        assert abs(a.std() / b.std() - 1) < 0.06
        assert np.abs(np.percentile(a, [10, 50, 90]) - np.percentile(b, [10, 50, 90])).max() < 14


def test_training_and_validation_crops_equal_those_of_pillow(folder):
    """Compares batches from records with Pillow: the same boxes, pixels and labels."""
    source = open_folder(folder)
    options = dict(input_shape=(14, 14, 3), input_range=RAW, batch_size=2)
    (images, labels, weights), *_ = eval_batches(source.eval, source.info, **options).as_numpy_iterator()
    for k in range(2):
        image = Image.open(io.BytesIO(source.eval.encoded(k)))
        # The short side 30 becomes 16 (256 for 224), of which the centre 14 is kept: 26.25 of the 30 pixels.
        box = (20 - 26.25 / 2, 15 - 26.25 / 2, 20 + 26.25 / 2, 15 + 26.25 / 2)
        assert np.array_equal(images[k], np.asarray(image.resize((14, 14), Image.BILINEAR, box=box)))
        assert labels[k] == source.eval.labels[k] and weights[k] == 1
    images, labels = take(source, 2, seed=11, shuffle=False, **options)
    for k in range(2):
        image = Image.open(io.BytesIO(source.train.encoded(k)))
        state = draw(11, AUGMENT, 0, 0, k)
        box = distorted_box(40, 30, (14, 14), state)
        expected = np.asarray(image.resize((14, 14), Image.BILINEAR, box=box))
        if uniform(state, 400) < 0.5:
            expected = expected[:, ::-1]
        # Pillow may resize rows and columns in another order, with rounding in between.
        assert np.abs(images[k] - expected).max() <= 1 and labels[k] == source.train.labels[k]


def crop_of(data, size, state, crops="imagenet"):
    """Returns uint8 [*size, 3]: the crop that training makes of an image."""
    around = np.full((size[0] + 2, size[1], 3), 7, np.uint8)
    decode_for_training(data, "x", around[1:-1], state, crops=crops)
    assert np.array_equal(around[[0, -1]], np.full((2, size[1], 3), 7))
    return around[1:-1]


@tries(15, slow=40)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    subsampling=st.sampled_from([0, 1, 2]),
    progressive=st.booleans(),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**20),
)
def test_a_crop_of_a_jpeg_equals_a_crop_of_the_whole_image(
    width, height, subsampling, progressive, size, seed
):
    """For any JPEG encoding, only the needed part is decoded, which includes a pixel beyond its edge."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    options = {"quality": 90, "subsampling": subsampling, "progressive": progressive, "optimize": True}
    data, state = encode(pixels, "JPEG", **options), draw(seed, AUGMENT, 3, 0, seed)
    crop = crop_of(data, size, state)
    box = distorted_box(width, height, size, state)
    whole = Image.open(io.BytesIO(data)).resize(size[::-1], Image.BILINEAR, box=box)
    expected = np.asarray(whole)
    if uniform(state, 400) < 0.5:
        expected = expected[:, ::-1]
    assert np.abs(crop.astype(int) - expected).max() <= 1
    assert np.array_equal(crop, crop_of(data, size, state))
    # Pillow reports a truncated file, wherever the box is.
    if len(data) > 700:
        check_raises(DataError, "truncated", "", crop_of, data[:-20], size, state)


@pytest.mark.parametrize("share", [0.04, 0.4, 0.9])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}], ids=str)
@pytest.mark.parametrize("description", ["", "photograph"])
def test_a_training_crop_never_shows_the_grey_of_missing_data(share, options, description):
    """The file is cut and ends with the marker of the end; a crop above the missing part is as it was."""
    tags = Image.Exif()
    if description:
        tags[0x010E] = description
    data = encode(smooth(3, 200, 160), "JPEG", quality=90, exif=tags, **options)
    begin = data.rindex(b"\xff\xda") if not options.get("progressive") else data.index(b"\xff\xda")
    end = data.find(b"\xff\xc4", begin) if options.get("progressive") else len(data)
    cut = data[: begin + 14 + int(share * (end - begin - 14))] + b"\xff\xd9"
    missing = np.asarray(Image.open(io.BytesIO(cut))) != np.asarray(Image.open(io.BytesIO(data)))
    assert missing.any()
    refused = 0
    for number in range(24):
        state = draw(number, AUGMENT, 0, 0, 0)
        try:
            crop = crop_of(cut, (20, 20), state)
        except DataError as error:
            assert "ends early" in error.message or "truncated" in error.message
            refused += 1
        else:
            assert np.array_equal(crop, crop_of(data, (20, 20), state))
    assert refused


def test_plain_corners_are_not_missing_data():
    image = np.full((160, 200, 3), 255, np.uint8)
    image[40:90, 60:120] = noise(1, 50, 60, 3)
    for options in ({}, {"progressive": True}):
        data = encode(image, "JPEG", **options)
        for number in range(24):
            assert crop_of(data, (20, 20), draw(number, AUGMENT, 0, 0, 0)).max() == 255


@pytest.mark.slow
def test_batches_do_not_depend_on_the_images_per_call(folder, monkeypatch):
    """Images of a large batch are read in one call; with little memory, in calls of a few that are joined."""
    source, options = open_folder(folder), {"input_shape": (9, 8, 3), "input_range": "tf"}
    samples = check_pure(source, 37, **options)
    monkeypatch.setattr(pipeline, "READ_AHEAD_BYTES", 3 * len(jpeg(1)))
    for batch_size, num_parallel in ((37, 4), (20, 2)):
        limited = take(source, 37, batch_size=batch_size, num_parallel=num_parallel, **options)
        assert_same(limited, samples)


@pytest.mark.parametrize("kind", ["cmyk", "grey", "turned", "png"])
def test_other_images_are_decoded_whole(kind):
    image = Image.fromarray(noise(1, 40, 30, 3))
    image = image.convert({"cmyk": "CMYK", "grey": "L"}.get(kind, "RGB"))
    data = encode(image, "PNG" if kind == "png" else "JPEG", **turned(6 if kind == "turned" else 1))
    state = draw(5, AUGMENT, 0, 0, 0)
    crop = crop_of(data, (12, 12), state, crops="")
    upright = images.open_image(data, "x", 3)
    box = images.random_box(upright.width, upright.height, (12, 12), state)
    expected = np.asarray(upright.resize((12, 12), Image.BILINEAR, box=box))
    mirrored = uniform(state, 40) < 0.5
    assert np.array_equal(crop, expected[:, ::-1] if mirrored else expected)


def test_plain_jpegs_are_read_without_pillow():
    """These are JPEGs fully described by their header; a claimed size counts against the limit."""
    image = Image.fromarray(noise(1, 40, 30, 3))

    def packed(kind="JPEG", mode="RGB", **more):
        return encode(image.convert(mode), kind, **more)

    described = Image.Exif()
    described[0x010E] = "a description"
    data = packed()
    xmp = data[:2] + b"\xff\xe1\x00\x23http://ns.adobe.com/xap/1.0/\0<x/>" + data[2:]
    with_metadata = (packed(exif=described), xmp)
    for plain in (
        data,
        packed(progressive=True),
        packed(subsampling=0, comment=b"\xff\xc0 and more"),
        *with_metadata,
    ):
        assert plain_jpeg_size(plain) == (30, 40) and jpeg_orientation(plain) == 1
    described[0x0112] = 8
    assert jpeg_orientation(packed(exif=described)) == 8
    frame_at = data.index(b"\xff\xc0")
    more = [packed("PNG"), packed(mode="L"), packed(mode="CMYK"), b"", data[:100]]
    more.append(data[: frame_at + 5] + bytes(4) + data[frame_at + 9 :])
    more.append(data[:frame_at] + data[frame_at : frame_at + 19] * 2)
    assert [plain_jpeg_size(other) for other in more] == [None] * len(more)
    huge = data[: frame_at + 5] + b"\xff\xff\xff\xff" + data[frame_at + 9 :]
    assert plain_jpeg_size(huge) == (65535, 65535)
    words = "x has 65535x65535 pixels, more than --max-image-pixels"
    check_raises(DataError, words, "", crop_of, huge, (12, 12), 0)


def test_an_unreadable_image_is_reported_with_its_place(folder):
    path = folder / "train-00001-of-00003"
    bad = make_example({"image/encoded": jpeg(5)[:200], "image/class/label": 1})
    at = len(path.read_bytes())
    path.write_bytes(path.read_bytes() + frame(bad))
    source = open_folder(folder)
    options = {"batch_size": 8, "samples_per_epoch": 8, "input_shape": (14, 14, 3), "input_range": RAW}
    batches = train_batches(source, Stream(**options, augment=False, seed=1))
    with pytest.raises(DataError) as caught, data_errors():
        next(iter(batches))
    assert f"train-00001-of-00003, record 2 at byte {at} cannot be decoded" in caught.value.message
    assert caught.value.hint


def test_damaged_records_are_left_out_on_request(folder):
    first, second = (folder / f"train-0000{k}-of-00003" for k in (0, 1))
    count = len(open_folder(folder).train)
    with open(first, "ab") as file:
        file.write(frame(make_example({"image/encoded": jpeg(5)[:200], "image/class/label": 1})))
        file.write(frame(b"no message"))
    second.write_bytes(second.read_bytes()[:-3])
    found = choose_dataset("imagenet", folder, home="", task="classification")
    source = open_dataset(found, ReaderOptions(skip_damaged=True))
    assert len(source.train) == count - 1 and len(source.info.left_out) == 3
    for words in ("truncated", "no labelled image", "cannot be decoded"):
        assert words in " ".join(source.info.warnings)
    assert "1 damaged record and the unread part of 1 file left out" in " ".join(source.info.warnings)
    check_raises(DataError, "no labelled image", "", open_folder, folder)
    for path in folder.glob("train-*"):
        path.write_bytes(frame(b"no message"))
    words = "no image for training can be read"
    check_raises(DataError, words, "", open_dataset, found, ReaderOptions(skip_damaged=True))


@pytest.mark.slow
def test_a_run_trains_and_evaluates_on_records(tmp_path, succeeds, report):
    (tmp_path / "imagenet").mkdir()
    write_shards(tmp_path / "imagenet", "train", [k % 10 + 1 for k in range(24)], 2)
    write_shards(tmp_path / "imagenet", "validation", [k % 10 + 1 for k in range(10)], 1, first=100)
    (tmp_path / "imagenet" / "classes.txt").write_text("".join(f"{k}\n" for k in range(10)))
    options = ["lenet", "--dataset", "imagenet", "--dataset-path", tmp_path, "--augment", "--num-epochs", 1]
    options += ["--micro-batch-size", 4, "--gradient-accumulation-count", 1, "--image-size", 28]
    succeeds("train", *options, "--run-dir", "run")
    of_run, evaluation = report_of("run"), report("evaluate", "run", "--dataset-path", tmp_path)
    assert of_run["trained_samples"] == 24
    assert evaluation["measured"]["accuracy"] == of_run["validation"]["accuracy"]
