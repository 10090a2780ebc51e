"""``build-records`` makes the same files from the same images, in any process and after any number of kills."""

import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.data_sets import encode, noise, verified
from support.events import Recorded
from support.refusals import check_raises

from ipucnn.datasets.base import fingerprint
from ipucnn.datasets.registry import choose_dataset, open_dataset
from ipucnn.datasets.sources import record_builder
from ipucnn.datasets.sources.record_builder import build as make_records
from ipucnn.datasets.sources.records import open_records
from ipucnn.datasets.sources.tfrecord import read_example, scan_records
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.events import Progress, show

ROOT = Path(__file__).resolve().parents[1]


def build(*numbers):
    return show(make_records(*numbers))


def encoded(number, kind):
    coarse = noise(number, 5, 6, {"cmyk": 4}.get(kind, 3))
    image = Image.frombytes("CMYK", (6, 5), coarse.tobytes()) if kind == "cmyk" else Image.fromarray(coarse)
    image = image.convert("L") if kind == "grey" else image
    return encode(image.resize((48, 36), Image.BICUBIC), "PNG" if kind == "png" else "JPEG")


KINDS = ("jpeg", "png", "cmyk", "grey", "jpeg")


@pytest.fixture
def folder(tmp_path):
    """Makes 20 training and 5 validation images in two classes, some of them PNG, CMYK and grey."""
    number = 0
    for part, counts in (("train", (12, 8)), ("val", (2, 3))):
        for name, count in zip(("n02", "n01"), counts):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for _ in range(count):
                kind = KINDS[number % len(KINDS)]
                path = tmp_path / "images" / part / name / f"{number}_{kind}.JPEG"
                path.write_bytes(encoded(number, kind))
                number += 1
    return tmp_path / "images"


def files_of(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def records_of(path):
    names = {"image/encoded": bytes, "image/class/label": int, "image/filename": bytes, "image/width": int}
    return [read_example(str(path), number, at, names) for number, at, _, _ in scan_records(path)]


def test_records_contain_the_documented_features(folder, tmp_path):
    built = build(folder, tmp_path / "out", 3, 2, 1)
    assert built.num_images == {"train": 20, "validation": 5} and built.num_classes == 2
    assert (built.num_kept, built.num_converted) == (0, 10)
    out = tmp_path / "out"
    assert sorted(files_of(out)) == sorted(
        [*(f"train-{k:05d}-of-00003" for k in range(3)), *(f"validation-{k:05d}-of-00002" for k in range(2))]
        + ["SHA256SUMS", "build.json", "classes.txt"]
    )
    assert (out / "classes.txt").read_text() == "n01\nn02\n"
    records = {}
    for path in out.glob("*-of-*"):
        for record in records_of(path):
            records[record["image/filename"].decode()] = (path.name.split("-")[0], record)
    originals = {path.name: path for path in folder.glob("*/*/*")}
    assert set(records) == set(originals)
    for name, (subset, record) in records.items():
        path = originals[name]
        assert subset == {"train": "train", "val": "validation"}[path.parts[-3]]
        assert record["image/class/label"] == {"n01": 1, "n02": 2}[path.parts[-2]]
        assert record["image/width"] == 48
        if "_png" not in name and "_cmyk" not in name:
            assert record["image/encoded"] == path.read_bytes()
            continue
        stored = Image.open(io.BytesIO(record["image/encoded"]))
        assert (stored.format, stored.mode, stored.size) == ("JPEG", "RGB", (48, 36))
        seen = np.asarray(Image.open(path).convert("RGB"), np.int32)
        # Compressed again, at the highest quality: colours are stored at half the size.
        assert np.abs(np.asarray(stored, np.int32) - seen).mean() < 3
    # Each file has images of both classes, not in the order of names.
    assert all(
        {record["image/class/label"] for record in records_of(path)} == {1, 2} for path in out.glob("train-*")
    )


def test_checksums_are_those_of_the_files(folder, tmp_path):
    build(folder, tmp_path / "out", 2, 1, 2)
    lines = (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()
    stored = files_of(tmp_path / "out")
    assert [line.split("  ")[1] for line in lines] == sorted(set(stored) - {"SHA256SUMS", "build.json"})
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256(stored[name]).hexdigest() == digest


@pytest.mark.parametrize("workers", [2, 5])
def test_any_number_of_workers_makes_the_same_files(folder, tmp_path, workers):
    build(folder, tmp_path / "one", 4, 2, 1)
    build(folder, tmp_path / "many", 4, 2, workers)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_a_finished_build_is_left_as_it_is(folder, tmp_path):
    out, view = tmp_path / "out", Recorded()
    build(folder, out, 3, 1, 2)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if "-of-" in path.name}
    second = show(make_records(folder, out, 3, 1, 2), view)
    assert second.num_kept == 4 and second.num_converted == 0
    assert view.events[-1] == Progress("building records", 25, 25)
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir() if "-of-" in path.name}


@pytest.mark.parametrize("damage", ["cut", "flipped", "swapped", "empty", "gone", "longer"])
def test_a_damaged_file_is_made_again(folder, tmp_path, damage):
    out = tmp_path / "out"
    build(folder, out, 3, 1, 1)
    whole = files_of(out)
    path = out / "train-00001-of-00003"
    data = whole[path.name]
    if damage == "gone":
        path.unlink()
    else:
        other = whole["train-00002-of-00003"]
        flipped = data[:300] + bytes([data[300] ^ 4]) + data[301:]
        changed = {"cut": data[:-9], "flipped": flipped, "swapped": other, "empty": b"", "longer": data * 2}
        path.write_bytes(changed[damage])
    assert build(folder, out, 3, 1, 1).num_kept == 3
    assert files_of(out) == whole


# ---------------------------------------------------------------- killed

_KILLED = """
import os, signal, sys, threading
from pathlib import Path
from ipucnn.datasets.sources import record_builder as builder
from ipucnn.events import show
left, lock = int(sys.argv[3]), threading.Lock()
def counted(function):
    def call(*args):
        global left
        with lock:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call
builder.make_record = counted(builder.make_record)
os.fsync, os.replace = counted(os.fsync), counted(os.replace)
show(builder.build(Path(sys.argv[1]), Path(sys.argv[2]), 4, 2, int(sys.argv[4])))
"""


def start(code, *args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=environment)


@pytest.mark.slow
def test_repeatedly_killed_build_ends_with_the_same_files(folder, tmp_path):
    """The build is killed at any image, before a file is synced, and before it is renamed."""
    build(folder, tmp_path / "whole", 4, 2, 1)
    moments = random.Random(18)
    for workers in (1, 2, 3):
        # A whole build has some 50 such moments; three killed ones reach 39 at most.
        process = start(_KILLED, folder, tmp_path / "out", moments.randrange(1, 14), workers)
        assert process.wait(timeout=120) == -signal.SIGKILL
        assert not (tmp_path / "out" / "SHA256SUMS").exists()
    build(folder, tmp_path / "out", 4, 2, 2)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_failed_build_leaves_no_partial_files(folder, tmp_path):
    bad = folder / "train" / "n01" / "bad.JPEG"
    bad.write_bytes(encoded(1, "jpeg")[:300])
    check_raises(DataError, "bad.JPEG", "", build, folder, tmp_path / "out", 4, 2, 2)
    left = set(files_of(tmp_path / "out"))
    assert not any(name.endswith(".tmp") for name in left) and "SHA256SUMS" not in left
    for path in (tmp_path / "out").glob("*-of-*"):
        assert records_of(path)  # complete, or absent


# ---------------------------------------------------------------- refused


def refused(kind, error, hint, folder, *numbers):
    """Checks that a build is refused, and changes no file."""
    out = folder.parent / "out"
    before = files_of(out) if out.exists() else None
    check_raises(kind, error, hint, build, folder, out, *numbers, 1)
    assert (files_of(out) if out.exists() else None) == before


def test_more_files_than_images_are_refused(folder):
    refused(ConfigurationError, "has 5 validation images", "--validation-shards 1", folder, 2, 6)


def test_changed_images_are_refused(folder, tmp_path):
    build(folder, tmp_path / "out", 2, 1, 1)
    refused(DataError, "records of other images, or another number of files", "", folder, 3, 1)
    (folder / "train" / "n01" / "new.JPEG").write_bytes(encoded(99, "jpeg"))
    refused(DataError, "records of other images", "", folder, 2, 1)


def test_foreign_records_are_refused(folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-00000-of-00002").write_bytes(b"precious")
    refused(DataError, "were not built here", "", folder, 2, 1)


def test_simultaneous_builds_are_refused(folder, tmp_path):
    (tmp_path / "out").mkdir()
    handle = record_builder.locked(tmp_path / "out")
    if handle is None:
        pytest.skip("this file system has no locks")
    refused(DataError, "another process builds", "", folder, 2, 1)
    os.close(handle)


# ---------------------------------------------------------------- commands


def test_build_records_command(folder, tmp_path, run):
    build_it = ("build-records", folder, tmp_path / "out", "--shards", 3, "--validation-shards", 2)
    code, out, err = run(*build_it)
    assert (code, err) == (0, "")
    assert "train: 20 images in 3 files" in out and "10 images converted to JPEG" in out
    code, out, err = run(*build_it, "--json")
    assert (code, err) == (0, "") and json.loads(out)["num_kept"] == 5


def test_a_refused_image_leaves_what_was_built_before_it(folder, run):
    words = "build-records images new --shards 1 --validation-shards 1 --max-image-pixels 9"
    code, out, err = run(*words.split())
    assert (code, out) == (3, "") and "more than --max-image-pixels 9" in err and "hint:" in err
    # What was built before an image is refused is kept for the next build.
    assert Path("new").exists()


def examples(out, code):
    """Returns the examples of an error in records."""
    errors, _, report = verified(out, ".")
    assert code in errors
    return tuple(text for finding in report.findings if finding.code == code for text in finding.examples)


def test_records_are_verified(folder, tmp_path):
    out = tmp_path / "out"
    build(folder, out, 3, 2, 1)
    errors, _, report = verified(out, ".")
    assert not errors and report.dataset == "imagenet" and report.class_names == ("n01", "n02")
    assert [(s.samples, s.readable) for s in report.subsets] == [(20, 20), (5, 5)]
    assert report.checksums == {"CRC32C of records": (25, 0), "SHA-256 of files": (6, 0)}
    path = out / "train-00001-of-00003"
    whole = path.read_bytes()
    path.write_bytes(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:])
    errors, _, report = verified(out, ".")
    assert errors == {"checksum"} and report.checksums["CRC32C of records"] == (24, 1)
    texts = " ".join(examples(out, "checksum"))
    assert "train-00001-of-00003, record 0" in texts and "not that in SHA256SUMS" in texts
    path.write_bytes(whole[:-5])
    assert verified(out, ".")[0] == {"truncated", "checksum"}
    path.write_bytes(b"")
    (out / "SHA256SUMS").unlink()
    assert examples(out, "empty-file") == ("train-00001-of-00003",)
    path.unlink()
    assert examples(out, "missing-file") == ("train-00001-of-00003",)


def test_a_file_that_was_cut_between_two_records_is_damaged(folder, tmp_path, run):
    """The plan of the build has the number of records; a file of other builders is damaged only without any."""
    out = tmp_path / "out"
    build(folder, out, 3, 2, 1)
    path = out / "train-00001-of-00003"
    whole = path.read_bytes()
    places = [at for _, at, _, _ in scan_records(path)]
    for cut, said in ((places[3], f"{path.name} has 3 records of the 7"), (0, f"{path.name} has 0 records")):
        path.write_bytes(whole[:cut])
        check_raises(DataError, said, "", open_records, out)
        code = "empty-file" if cut == 0 else "truncated"
        assert code in verified(out, ".")[0] and "fewer-samples" not in verified(out, ".")[0]
        source = open_records(out, skip_damaged=True)
        assert len(source.train) == 13 + (3 if cut else 0) and len(source.eval) == 5
        assert any("the unread part of 1 file left out" in line for line in source.info.warnings)
    (out / "build.json").unlink()
    check_raises(DataError, "has 0 records", "", open_records, out)
    path.write_bytes(whole[: places[3]])
    assert len(open_records(out).train) == 16


def test_class_folders_beside_record_files_are_said_to_be_unread(folder, tmp_path):
    out = tmp_path / "out"
    build(folder, out, 3, 2, 1)
    assert choose_dataset(str(out), tmp_path, home="", task="classification").message.endswith(f"from {out}")
    for part in ("train", "val"):
        shutil.copytree(folder / part, out / part)
    for name, path in ((str(out), tmp_path), ("imagenet", out)):
        choice = choose_dataset(name, path, home="", task="classification")
        assert choice.message.endswith(": from its files; the class folders beside them are not read")
        assert open_dataset(choice).info.choice.startswith("from its files")


def test_records_may_lie_in_any_folder_and_a_plan_that_comes_later_counts(folder, tmp_path):
    out = tmp_path / "out"
    build(folder, out, 3, 2, 1)
    before = fingerprint(open_records(out))
    moved = out.rename(tmp_path / "moved")
    assert fingerprint(open_records(moved)) == before
    plan = (moved / "build.json").read_text()
    (moved / "build.json").unlink()
    path = moved / "train-00001-of-00003"
    path.write_bytes(path.read_bytes()[: [at for _, at, _, _ in scan_records(path)][3]])
    assert len(open_records(moved).train) == 16
    (moved / "build.json").write_text(plan)
    check_raises(DataError, "has 3 records of the 7", "", open_records, moved)


def test_labels_are_verified(folder, tmp_path, run):
    out = tmp_path / "out"
    build(folder, out, 1, 1, 1)
    (out / "classes.txt").write_text("n01\n")
    assert "label 2, labels are 1 to 1" in examples(out, "label-range")[0]
    code, shown, err = run("verify-dataset", out)
    assert code == 3 and "label-range" in shown and "hint:" in err
