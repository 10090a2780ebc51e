"""``verify-dataset`` of sets in the format of TensorFlow Datasets, and its own TFRecord checksums."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import encode, noise, verified

from ipucnn.datasets.sources.tfrecord import frame, masked_crc32c, read_record, scan_records
from ipucnn.errors import DataError


def naive_crc32c(data):
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@given(st.integers(0, 2000), st.integers(0, 10**6))
@settings(max_examples=40)
def test_checksums_are_right_for_any_length(size, seed):
    data = np.random.RandomState(seed).bytes(size)
    crc = naive_crc32c(data)
    # Rotated by 15 bits, plus a constant: "TFRecords format details" of TensorFlow's tutorial.
    assert masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def record_file(contents):
    return b"".join(map(frame, contents))


def records(path):
    """Returns the contents of a file's records; a damaged record, or a damaged end of the file, gives a code."""
    contents = []
    try:
        for number, at, _, _ in scan_records(path):
            try:
                contents.append(read_record(str(path), number, at))
            except DataError as error:
                contents.append(error.code)
    except DataError as error:
        contents += [error.code, "end"]
    return contents


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("records") / "file"


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_written_records_are_read(path, contents):
    path.write_bytes(record_file(contents))
    assert records(path) == contents


@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4),
    st.floats(0, 0.999),
    st.integers(1, 255),
)
def test_any_changed_byte_is_found(path, contents, place, change):
    data = bytearray(record_file(contents))
    data[int(place * len(data))] ^= change
    path.write_bytes(bytes(data))
    read = records(path)
    assert {"checksum", "truncated"} & set(read)
    # Records before the damage are read, and so are those after a record whose length is right.
    assert sum(isinstance(one, bytes) for one in read) == len(contents) - 1 or read[-1] == "end"


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.floats(0.01, 0.999))
def test_any_cut_is_found(path, contents, place):
    data = record_file(contents)
    cut = int(place * len(data))
    path.write_bytes(data[:cut])
    edges = {len(record_file(contents[:n])) for n in range(len(contents) + 1)}
    assert cut in edges or records(path)[-2:] == ["truncated", "end"]


def test_tensorflow_writes_the_same_checksums(tmp_path):
    tf = pytest.importorskip("tensorflow")
    contents = [b"", b"a", bytes(range(256)) * 5]
    with tf.io.TFRecordWriter(str(tmp_path / "x")) as writer:
        for data in contents:
            writer.write(data)
    assert (tmp_path / "x").read_bytes() == record_file(contents)


# ---------------------------------------------------------------- prepared sets


def prepare(folder, name, **options):
    """Prepares a data set; returns the folder of its version."""
    pytest.importorskip("tensorflow_datasets")
    from test_datasets_tfds import write

    write(folder, name, **options)
    return folder / name / "3.0.1"


@pytest.fixture
def prepared(tmp_path):
    return prepare(tmp_path, "letters", shape=(9, 12, 1))


def with_feature(record, name, **values):
    """Returns an example with another first value of a feature, by the kind of its list."""
    tf = pytest.importorskip("tensorflow")
    example = tf.train.Example.FromString(record)
    ((kind, value),) = values.items()
    getattr(example.features.feature[name], kind).value[0] = value
    return example.SerializeToString()


def shard(folder, split):
    (path,) = folder.glob(f"*-{split}.tfrecord-*")
    return path


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage, codes, train, checksums",
    [
        (lambda path: None, set(), (21, 21, 21), (27, 0)),
        # A damaged record does not end the walk; a damaged length ends the file.
        (lambda path: flip(path, 40), {"checksum"}, (21, 21, 20), (26, 1)),
        (lambda path: flip(path, 1), {"checksum", "fewer-samples", "missing-subset"}, (0, 0, 0), (6, 1)),
        (lambda path: os.truncate(path, path.stat().st_size - 30), {"truncated", "fewer-samples"},
         (20, 20, 20), (26, 0)),
        (lambda path: path.unlink(), {"missing-file"}, (0, 0, 0), (6, 0)),
    ],
)  # fmt: skip
def test_damaged_files_of_a_prepared_set(prepared, damage, codes, train, checksums):
    damage(shard(prepared, "train"))
    errors, warnings, report = verified(prepared, ".")
    assert errors <= codes and not codes - errors - {"missing-subset"} and not warnings
    assert (report.subsets[0].samples, report.subsets[0].checked, report.subsets[0].readable) == train
    assert report.subsets[1].readable == 6 and report.checksums == {"CRC32C of records": checksums}
    assert report.class_names == ("ant", "bee", "cat")
    if codes == {"missing-file"}:
        assert verified(prepared, ".", allow_partial=True)[:2] == (set(), {"missing-file"})


def describe_as_two_shards(folder):
    """Splits the training records into two files, of 11 and 10 records; returns their paths."""
    path = shard(folder, "train")
    contents = records(path)
    paths = [path.with_name(path.name.replace("00000-of-00001", f"0000{k}-of-00002")) for k in (0, 1)]
    path.unlink()
    for target, part in zip(paths, (contents[:11], contents[11:])):
        target.write_bytes(record_file(part))
    info = json.loads((folder / "dataset_info.json").read_text())
    next(split for split in info["splits"] if split["name"] == "train")["shardLengths"] = ["11", "10"]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return paths


def test_more_records_than_the_description_says(prepared):
    first, second = describe_as_two_shards(prepared)
    assert verified(prepared, ".")[:2] == (set(), set())
    copied = record_file([records(second)[0]])
    first.write_bytes(first.read_bytes() + 2 * copied)
    second.write_bytes(second.read_bytes() + copied)
    errors, warnings, report = verified(prepared, ".")
    assert (errors, warnings) == (set(), {"more-samples", "duplicate"})
    assert (report.subsets[0].samples, report.subsets[0].checked) == (24, 24)
    by_code = {finding.code: finding for finding in report.findings}
    names = [path.name for path in (first, second)]
    assert by_code["more-samples"].count == 3
    assert by_code["more-samples"].examples == (f"{names[0]}: 13 of 11", f"{names[1]}: 11 of 10")
    # Records beyond the description have numbers of their own, and their files name them.
    assert by_code["duplicate"].examples == (f"{names[0]}, record 11 = {names[0]}, record 12 and 2 more",)
    errors, warnings, report = verified(prepared, ".", limit_train="20")
    assert report.subsets[0].checked == 20


def test_leaks_wrong_labels_and_missing_images_are_found(prepared):
    path = shard(prepared, "test")
    contents = records(path)
    contents[0] = records(shard(prepared, "train"))[0]
    contents[1] = with_feature(contents[1], "label", int64_list=7)
    contents[2] = with_feature(contents[1], "image", bytes_list=b"hello")
    contents[3] = b"\xff"
    path.write_bytes(record_file(contents))
    errors, _, report = verified(prepared, ".")
    assert errors == {"leakage", "label-range", "unreadable"}
    assert [f.count for f in report.findings if f.code == "unreadable"] == [2]
    assert report.subsets[1].readable == 4


def test_a_grey_image_among_colour_ones(tmp_path):
    folder = prepare(tmp_path, "photos", shape=(None, None, 3))
    path = shard(folder, "train")
    contents = records(path)
    contents[4] = with_feature(contents[4], "image", bytes_list=encode(noise(1, 9, 9)))
    path.write_bytes(record_file(contents))
    errors, warnings, report = verified(folder, ".")
    assert (errors, warnings) == (set(), {"odd-mode"}) and report.subsets[0].readable == 21
    assert "record 4: grey, not colour (RGB)" in report.findings[0].examples[0]


def test_a_set_without_evaluation(tmp_path):
    folder = prepare(tmp_path, "photos", shape=(None, None, 3), splits=(("train", 20),))
    errors, warnings, report = verified(folder, ".")
    assert not errors and warnings == {"no-eval-subset"}
    assert report.subsets[0].smallest != report.subsets[0].largest


def test_other_file_formats_are_reported(prepared, monkeypatch):
    for path in prepared.glob("*.tfrecord-*"):
        path.rename(path.with_name(path.name.replace("tfrecord", "array_record")))
    info = json.loads((prepared / "dataset_info.json").read_text())
    info["fileFormat"] = "array_record"
    for split in info["splits"]:
        split["filepathTemplate"] = split["filepathTemplate"].replace("{FILEFORMAT}", "array_record")
    (prepared / "dataset_info.json").write_text(json.dumps(info))
    errors, warnings, _ = verified(prepared, ".")
    assert not errors and warnings == {"not-checked"}
