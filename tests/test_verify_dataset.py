"""``verify-dataset``: undamaged sets of every kind give no findings, and each kind of damage gives its code."""

import gzip
import json
import os
import pickle
import re
import shlex
import shutil
import struct
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile
from few_examples import tries
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms
from support.data_sets import (
    encode,
    idx_bytes,
    noise,
    open_imagefolder,
    open_pairs,
    open_set,
    save_pages,
    verified,
    write_cifar10,
    write_class_folders,
    write_mnist,
    write_pairs,
)
from support.events import Recorded
from support.image_files import SHORT, exif, tiff, tiff_page
from support.refusals import check_raises

from ipucnn.datasets import base, sorting
from ipucnn.datasets.damaged import refuse_damaged
from ipucnn.datasets.formats import CIFAR_FILES
from ipucnn.datasets.registry import choose_dataset, open_dataset
from ipucnn.datasets.segmentation import imagemasks
from ipucnn.datasets.sources import cifar
from ipucnn.datasets.verification import readers, samples, verify
from ipucnn.datasets.verification.findings import CODES, ERROR, EVAL, TRAIN, WARNING
from ipucnn.datasets.verification.survey import Known, Survey
from ipucnn.errors import ConfigurationError, DataError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
NUM = {TRAIN: 40, EVAL: 20}


def examples(report, code):
    return [text for finding in report.findings if finding.code == code for text in finding.examples]


# ---------------------------------------------------------------- sets of every kind, without damage


FOLDERS_SIZES = {("train", "ant"): 6, ("train", "bee"): 6, ("val", "ant"): 3, ("val", "bee"): 3}


def write_idx(folder):
    write_mnist(folder, (NUM[TRAIN], NUM[EVAL]), compress=False)


def write_cifar(folder, binary=True):
    write_cifar10(folder, range(1, 6), NUM[TRAIN] // 5, NUM[EVAL], binary)


def write_folders(folder):
    write_class_folders(folder, FOLDERS_SIZES, lambda number: (30, 20 + number % 3))


def write_masks(folder):
    rows = np.repeat(np.arange(24)[:, np.newaxis], 32, axis=1)
    write_pairs(
        folder, [(noise(n, 24, 32), np.where(rows < n + 3, 255, 0).astype(np.uint8)) for n in range(10)]
    )


def write_volumes(folder, count=30, size=512):
    masks = [np.where(np.arange(size)[:, None] < 40 + n, 0, 255) * np.ones((1, size)) for n in range(count)]
    save_pages(folder / "train-volume.tif", [noise(n, size, size) for n in range(count)])
    save_pages(folder / "train-labels.tif", [mask.astype(np.uint8) for mask in masks])


WRITERS = {
    "idx": write_idx,
    "cifar": write_cifar,
    "cifar-python": lambda folder: write_cifar(folder, binary=False),
    "folders": write_folders,
    "masks": write_masks,
    "volumes": write_volumes,
    "small volumes": lambda folder: write_volumes(folder, 3, 16),
}


def measured(folder, name):
    """Measures a set's published values, as if this set had been published."""
    _, _, report = verified(name, folder, allow_partial=True)
    return report.subsets[0].mean, report.subsets[0].std


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes an undamaged set of a kind, which then counts as the published one: (name, folder)."""

    def make(kind):
        folder = tmp_path / kind
        folder.mkdir()
        WRITERS[kind](folder)
        if kind in ("idx", "cifar", "cifar-python"):
            name = "mnist" if kind == "idx" else "cifar10"
            monkeypatch.setitem(verify.KNOWN, name, Known())
            for layout in CIFAR_FILES["cifar10"]:
                monkeypatch.setattr(layout, "per_train_file", NUM[TRAIN] // 5)
            monkeypatch.setattr(cifar, "TEST_SIZE", NUM[EVAL])
            known = Known(NUM, *measured(folder, name))
            monkeypatch.setitem(verify.KNOWN, name, known)
            return name, folder
        if kind == "volumes":
            monkeypatch.setitem(verify.KNOWN, "isbi2012", Known({TRAIN: 24, EVAL: 6}))
        return folder, folder

    return make


@pytest.mark.parametrize("kind", ["idx", "cifar", "folders", "masks", "volumes"])
def test_an_undamaged_set_gives_no_findings(made, kind):
    name, folder = made(kind)
    errors, warnings, report = verified(name, folder)
    assert (errors, warnings) == (set(), set())
    assert [subset.readable for subset in report.subsets] == [subset.samples for subset in report.subsets]
    assert report.to_dict()["verdict"] == "ok"


@pytest.mark.slow_cases("membranes")
@pytest.mark.parametrize("name", ["digits", "membranes", "random"])
def test_generated_sets_give_no_findings(name, tmp_path):
    errors, warnings, report = verified(name, tmp_path)
    assert not errors and not warnings
    assert [subset.samples for subset in report.subsets] == list(verify.KNOWN[name].counts.values())


# ---------------------------------------------------------------- damage


def edit_idx(path, change, kind=8):
    """Changes the array of an idx file."""
    data = path.read_bytes()
    dimensions = data[3]
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    array = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
    path.write_bytes(idx_bytes(change(array), kind))


# The functions below return damages: functions of the folder of a set.


def rewritten(name, change):
    """Changes the bytes of a file."""
    return lambda f: (f / name).write_bytes(change((f / name).read_bytes()))


def written(name, data):
    def write(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data() if callable(data) else data)

    return write


def copied(*names):
    """Copies each named file to the next name: source, target, source, target, ..."""
    return lambda f: [(f / b).write_bytes((f / a).read_bytes()) for a, b in zip(names[::2], names[1::2])]


def removed(*names):
    return lambda f: [(f / name).unlink() for name in names]


def edited(*names, change, kind=8):
    """Changes the arrays of idx files."""
    return lambda f: [edit_idx(f / name, change, kind) for name in names]


def put(at, value):
    def change(array):
        array[at] = value
        return array

    return change


def leak_idx(folder):
    data = (folder / IMAGES).read_bytes()
    first = np.frombuffer(data, np.uint8, 784, 16).reshape(28, 28)
    edit_idx(folder / EVAL_IMAGES, put(0, first))


def packed(change):
    """Replaces the evaluation images by a file called .gz, whose bytes are changed after packing."""

    def damage(folder):
        path = folder / EVAL_IMAGES
        (folder / f"{EVAL_IMAGES}.gz").write_bytes(change(gzip.compress(path.read_bytes())))
        path.unlink()

    return damage


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
EVAL_IMAGES = "t10k-images-idx3-ubyte"
IDX = {
    "truncated": ("truncated", rewritten(IMAGES, lambda d: d[:-100])),
    "a cut header": ("truncated", rewritten(IMAGES, lambda d: d[:10])),
    "a size that no memory holds": ("truncated", rewritten(IMAGES, lambda d: d[:4] + b"\x80" + d[5:])),
    "empty file": ("empty-file", written(LABELS, b"")),
    "no labels": ("missing-file", removed(LABELS)),
    "no evaluation": ("missing-file", removed(EVAL_IMAGES, "t10k-labels-idx1-ubyte")),
    "a label too many": ("count-mismatch", edited(LABELS, change=lambda a: np.append(a, a[:1]))),
    "a wrong label": ("label-range", edited(LABELS, change=put(3, 10))),
    "another size": ("wrong-shape", edited(IMAGES, change=lambda a: a[:, 1:].copy())),
    "floats": ("wrong-dtype", edited(IMAGES, change=lambda a: a.astype(">f4"), kind=0x0D)),
    "swapped": ("unreadable", copied(LABELS, IMAGES)),
    "bytes at the end": ("unreadable", rewritten(LABELS, lambda d: d + b"x")),
    "a wrong gzip checksum": ("checksum", packed(lambda d: d[:-6] + bytes([d[-6] ^ 1]) + d[-5:])),
    "a damaged gzip file": ("unreadable", packed(lambda d: d[:10] + b"\xff" + d[11:])),
    "a cut gzip file": ("truncated", packed(lambda d: d[:-9])),
    "an unpacked file called .gz": ("unreadable", packed(gzip.decompress)),
    "another file": ("not-published", packed(bytes)),
    "a duplicate": ("duplicate", edited(IMAGES, change=lambda a: put(10, a[0])(a))),
    "a conflict": ("conflict", edited(IMAGES, change=lambda a: put(11, a[0])(a))),
    "a leak": ("leakage", leak_idx),
    "inverted": ("statistics", edited(IMAGES, change=lambda a: 255 - a // 2)),
    "brighter": ("shift", edited(IMAGES, change=lambda a: 128 + a // 2)),
    "fewer": ("fewer-samples", edited(IMAGES, LABELS, change=lambda a: a[:30].copy())),
    "more": ("more-samples", edited(IMAGES, LABELS, change=lambda a: np.concatenate([a, a[:3] // 2]))),
    "blank": ("constant-image", edited(IMAGES, change=put(5, 0))),
    "no fives": ("empty-class", edited(LABELS, change=lambda a: np.where(a == 5, 6, a).astype(np.uint8))),
    "nearly all ones": ("imbalance", edited(LABELS, change=put(slice(10, None), 1))),
    "all ones": ("nothing-to-learn", edited(LABELS, change=put(slice(None), 1))),
}


def channels_swapped(folder):
    for path in folder.glob("*.bin"):
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073).copy()
        rows[:, 1:1025] //= 2  # red is darker, then blue
        path.write_bytes(rows.tobytes())


BATCHES = [f"data_batch_{n}.bin" for n in range(6)]
CIFAR = {
    "truncated": ("truncated", rewritten(BATCHES[2], lambda d: d[:-1])),
    "a file missing": ("missing-file", removed(BATCHES[4])),
    "no test file": ("missing-subset", removed("test_batch.bin")),
    "no training file": ("missing-subset", removed(*BATCHES[1:])),
    "a wrong label": ("label-range", rewritten(BATCHES[1], lambda d: b"\xff" + d[1:])),
    "a dark channel": ("statistics", channels_swapped),
    "no class names": ("class-names", removed("batches.meta.txt")),
    "too few class names": ("unusable", written("batches.meta.txt", b"cat\n")),
    "a file twice": ("duplicate", copied(BATCHES[1], BATCHES[2])),
    "train as test": ("leakage", copied(BATCHES[1], "test_batch.bin")),
    "a short file": ("fewer-samples", rewritten(BATCHES[3], lambda d: d[:3073])),
    "a FIFO": ("missing-file", lambda f: [removed(BATCHES[3])(f), os.mkfifo(f / BATCHES[3])]),
}


def pickled(content):
    return written("data_batch_2", pickle.dumps(content, 2))


ROWS = np.zeros((8, 3072), np.uint8)
CIFAR_PYTHON = {
    "floats": ("wrong-dtype", pickled({"data": ROWS.astype(np.float32), "labels": [0] * 8})),
    "a label missing": ("count-mismatch", pickled({"data": ROWS, "labels": [0] * 7})),
    "a wrong label": ("label-range", pickled({"data": ROWS, "labels": [-1] * 8})),
    "a list": ("unreadable", pickled([])),
    "an empty file": ("empty-file", written("data_batch_2", b"")),
    "truncated": ("unreadable", rewritten("data_batch_2", lambda d: d[:-1])),
}


def test_files_that_are_not_the_published_ones_are_reported(made):
    errors, warnings, report = verified(*made("cifar-python"))
    assert (errors, warnings) == (set(), {"not-published"})
    assert report.checksums["MD5 of files"] == (0, 6)


def photo(mode="RGB"):
    return Image.fromarray(noise(77, 24, 24, 3)).convert(mode)


def saved_with_profile(name):
    """Saves an image with a profile of RGB that is called P3."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    profile = profile.replace(b"sRGB", b"P3  ").replace(
        "sRGB".encode("utf-16-be"), "P3  ".encode("utf-16-be")
    )
    return lambda folder: Image.fromarray(noise(5, 9, 9, 3)).save(folder / name, icc_profile=profile)


def saved(name, image, form="PNG", **options):
    """Writes an image, which may be the name of a Pillow mode."""
    image = photo(image) if isinstance(image, str) else image
    return written(name, lambda: encode(image, form, **options))


BEE = "train/bee/2.png"
FOLDERS = {
    "truncated JPEG": ("truncated", written("train/bee/9.jpg", lambda: encode(photo(), "JPEG")[:-80])),
    "truncated PNG": ("truncated", rewritten(BEE, lambda d: d[: len(d) // 2])),
    "a wrong checksum": ("checksum", rewritten(BEE, lambda d: d[:30] + b"\0" + d[31:])),
    "no image": ("unreadable", written("val/ant/9.jpg", b"hello")),
    "PostScript": ("unreadable", written("val/ant/9.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n")),
    "an empty file": ("empty-file", written("val/ant/9.jpg", b"")),
    "grey": ("odd-mode", saved("train/bee/9.png", "L")),
    "a palette": ("odd-mode", saved("train/bee/9.png", "P")),
    "alpha": ("odd-mode", saved("train/bee/9.png", "RGBA")),
    "CMYK": ("odd-mode", saved("train/bee/9.jpg", "CMYK", "JPEG")),
    "16 bits": ("odd-mode", saved("train/bee/9.png", noise(5, 9, 9).astype(np.uint16))),
    "16 bits, too": ("stretched", saved("train/bee/9.png", noise(5, 9, 9).astype(np.uint16))),
    "colours of P3": ("colour-profile", saved_with_profile("train/bee/9.png")),
    "a turned image": (
        "odd-form",
        written("train/bee/9.jpg", lambda: encode(photo(), "JPEG", exif=b"Exif\0\0" + exif(6))),
    ),
    "a scan that ends early": (
        "truncated",
        written("train/bee/9.jpg", lambda: encode(photo(), "JPEG")[:-80] + b"\xff\xd9"),
    ),
    "a progressive scan that ends early": (
        "truncated",
        written("train/bee/9.jpg", lambda: encode(photo(), "JPEG", progressive=True)[:-80] + b"\xff\xd9"),
    ),
    "PNG called JPEG": ("wrong-format", saved("train/bee/9.jpg", "RGB")),
    "frames": (
        "several-frames",
        saved("train/bee/9.gif", "P", "GIF", save_all=True, append_images=[photo("L")]),
    ),
    "a class of val": ("unknown-class", lambda f: (f / "val" / "ant").rename(f / "val" / "wasp")),
    "an empty class": ("empty-class", lambda f: (f / "train" / "cat").mkdir()),
    "a class in capitals": (
        "alike-classes",
        lambda f: shutil.copytree(f / "train" / "bee", f / "train" / "BEE"),
    ),
    "images in a folder in a class": ("inner-folder", saved("train/bee/more/9.png", "RGB")),
    "transparent everywhere": ("unreadable", saved("train/bee/9.png", np.zeros((24, 24, 4), np.uint8))),
    "no val": ("missing-subset", lambda f: (f / "val").rename(f / "other")),
    "no images in val": ("missing-subset", lambda f: [p.unlink() for p in (f / "val").glob("*/*")]),
    "a copy in another format": ("duplicate", lambda f: Image.open(f / BEE).save(f / "train/bee/copy.bmp")),
    "a copy in another class": ("conflict", copied(BEE, "train/ant/7.png")),
    "a leak": ("leakage", copied(BEE, "val/bee/7.png")),
    "a text": ("passed-over", written("train/bee/notes.txt", b"x")),
    "an image beside the classes": ("passed-over", saved("train/9.png", "RGB")),
    "a folder in a class": ("passed-over", lambda f: (f / "train" / "bee" / "more").mkdir()),
    "a link to nowhere": ("missing-file", lambda f: (f / "train" / "bee" / "8.png").symlink_to("absent")),
    "a loop of links": ("unusable", lambda f: (f / "train" / "bee" / "8.png").symlink_to("8.png")),
    "a FIFO": ("passed-over", lambda f: os.mkfifo(f / "train" / "bee" / "8.png")),
    "blank": ("constant-image", saved("train/bee/9.png", np.zeros((24, 24, 3), np.uint8))),
}


def test_an_image_of_many_pixels_is_not_decoded(made):
    _, folder = made("folders")
    bomb = encode(Image.new("1", (20000, 20000)))
    (folder / "train" / "ant" / "bomb.png").write_bytes(bomb)
    errors, _, report = verified(folder, ".")
    assert errors == {"too-large"} and "--max-image-pixels" in examples(report, "too-large")[0]
    assert verified(folder, ".", max_pixels=100)[0] == {"too-large"}


def test_large_files_are_read_one_at_a_time(made, monkeypatch):
    """Each may use half of the memory that is free when it is opened."""
    _, folder = made("folders")
    reading, most = [], []

    def read(path):
        reading.append(path)
        time.sleep(0.01)
        most.append(len(reading))
        reading.remove(path)
        return Path(path).read_bytes()

    monkeypatch.setattr(base, "read_file", read)
    monkeypatch.setattr(verify, "num_cores", lambda: 4)
    monkeypatch.setattr(readers, "LARGE_BYTES", 100)
    assert verified(folder, ".")[:2] == (set(), set())
    assert len(most) == 18 and max(most) == 1


def test_examples_name_each_file_only_once(made):
    name, folder = made("idx")
    IDX["a wrong gzip checksum"][1](folder)
    _, _, report = verified(name, folder)
    (text,) = examples(report, "checksum")
    assert text.startswith("t10k-images-idx3-ubyte.gz: CRC")


def test_an_example_does_not_repeat_a_path_that_messages_shorten(made):
    _, folder = made("folders")
    deep = folder.parent.joinpath(*["x" * 100] * 8)
    deep.mkdir(parents=True)
    folder.rename(deep / "folders")
    (deep / "folders" / "train" / "bee" / "8.png").symlink_to("8.png")
    _, _, report = verified(deep / "folders", ".")
    (text,) = examples(report, "unusable")
    assert text.startswith("train/bee/8.png: ") and "xx" not in text


@pytest.mark.parametrize("share", [None, 0.5])
def test_class_folders_are_split_as_for_training(made, share, succeeds):
    _, folder = made("folders")
    (folder / "val").rename(folder.parent / "other")
    whole = folder.parent / "whole"
    (folder / "train").rename(whole)
    (whole / "notes").mkdir()
    options = {} if share is None else {"validation_fraction": share}
    errors, warnings, report = verified(whole, ".", **options)
    assert (errors, warnings) == (set(), {"passed-over"})
    source = open_imagefolder(whole, **options)
    assert [subset.samples for subset in report.subsets] == [len(source.train), len(source.eval)]
    for subset, part in zip(report.subsets, (source.train, source.eval)):
        assert [count for _, count in subset.classes] == np.bincount(part.labels).tolist()
    evaluated = Path(source.eval.paths[0])
    evaluated.write_bytes(b"no image")
    errors, _, report = verified("imagefolder", whole, **options)
    assert errors == {"unreadable"}
    (finding,) = (finding for finding in report.findings if finding.code == "unreadable")
    assert finding.subset == EVAL and evaluated.name in finding.examples[0]
    evaluated.unlink()
    _, err = succeeds("verify-dataset", whole)
    assert "has no train/ and val/" in err


def test_images_smaller_than_the_input_are_reported(made):
    _, folder = made("folders")
    _, warnings, report = verified(folder, ".", image_size=(22, 30))
    assert warnings == {"small-image"}
    assert [f.count for f in report.findings] == [8, 4] and "20x30" in examples(report, "small-image")[0]


def draw_mask(folder, name, values):
    mask = np.zeros((24, 32), np.uint8)
    mask[: len(values)] = np.array(values, np.uint8)[:, np.newaxis]
    Image.fromarray(mask).save(folder / "masks" / name)


def shrunk(*names):
    return lambda f: [Image.open(f / name).resize((20, 20), 0).save(f / name) for name in names]


def paired(n):
    return f"images/{n}.png", f"masks/{n}.png"


IMAGE_3, MASK_3 = paired(3)
MASKS = {
    "a mask of pages": (
        "several-pages",
        written(MASK_3, lambda: tiff(*[tiff_page(noise(k, 24, 32) // 128) for k in (1, 2)])),
    ),
    "a turned image": (
        "orientation",
        written(IMAGE_3, lambda: tiff(tiff_page(noise(9, 24, 32), {274: (SHORT, [3])}))),
    ),
    "an image of 16 bits": ("odd-form", saved(IMAGE_3, noise(9, 24, 32).astype(np.uint16))),
    "16 bits, too": ("stretched", saved(IMAGE_3, noise(9, 24, 32).astype(np.uint16))),
    "colour": ("wrong-mode", saved(IMAGE_3, photo().resize((32, 24)))),
    "transparency": ("wrong-mode", saved(IMAGE_3, np.full((24, 32, 4), 9, np.uint8))),
    "no table": ("unusable", written("classes.txt", b"nothing")),
    "a colour mask": ("wrong-mode", saved(MASK_3, photo().resize((32, 24)))),
    "many values": ("mask-values", lambda f: draw_mask(f, "3.png", [255, 100, 7])),
    "another value": ("mask-values", lambda f: draw_mask(f, "3.png", [1, 1])),
    "void": ("void-class", written("classes.txt", b"0 sky\n9 cell\n255 void\n")),
    "no names": (
        "unnamed-classes",
        lambda f: [draw_mask(f, f"{n}.png", [2, *[1] * (n + 1)]) for n in range(10)],
    ),
    "smoothed masks": (
        "other-values",
        lambda f: [
            written("classes.txt", b"0 background\n* cell\n")(f),
            *(draw_mask(f, f"{n}.png", [*range(5, 245, 10)]) for n in range(10)),
        ],
    ),
    "an empty mask": ("mask-constant", lambda f: draw_mask(f, "3.png", [0])),
    "only empty masks": ("nothing-to-learn", lambda f: [draw_mask(f, f"{n}.png", [0]) for n in range(10)]),
    "no partner": ("unpaired", removed(MASK_3)),
    "two masks of an image": ("several-masks", copied(MASK_3, "masks/3_mask.png")),
    "no masks": ("missing-file", lambda f: (f / "masks").rename(f / "other")),
    "a mask of another size": ("wrong-shape", shrunk(MASK_3)),
    "truncated": ("truncated", rewritten(IMAGE_3, lambda d: d[:-200])),
    "truncated mask": ("truncated", rewritten(MASK_3, lambda d: d[:-20])),
    "an empty file": ("empty-file", written(MASK_3, b"")),
    "two of a name": ("unusable", saved("images/3.bmp", photo("L").resize((32, 24)), "BMP")),
    "a copy": ("duplicate", copied("images/4.png", IMAGE_3, "masks/4.png", MASK_3)),
    "other masks": ("conflict", copied("images/4.png", IMAGE_3)),
    "a leak": ("leakage", copied("images/4.png", "images/9.png")),
}


@pytest.fixture
def mask_parts(made):
    """Makes a folder with pairs in train/ and val/."""
    _, folder = made("masks")
    for part, numbers in (("train", range(7)), ("val", range(7, 10))):
        for below in ("images", "masks"):
            (folder / part / below).mkdir(parents=True)
            for n in numbers:
                (folder / below / f"{n}.png").rename(folder / part / below / f"{n}.png")
    for below in ("images", "masks"):
        (folder / below).rmdir()
    return folder


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_each_mask_is_decoded_once(made, monkeypatch, table, training):
    _, folder = made("masks")
    if table:
        (folder / "classes.txt").write_text("0 sky\n255 ground\n")
    decoded, read = [], imagemasks.pages

    def pages(files, kind, *rest):
        decoded.extend([files.mask.name] * (kind == "mask"))
        return read(files, kind, *rest)

    monkeypatch.setattr(imagemasks, "pages", pages)
    if training:
        assert len(open_pairs("imagemasks", folder).train) == 8
    else:
        assert verified("imagemasks", folder)[:2] == (set(), set())
    assert sorted(decoded) == [f"{n}.png" for n in range(10)]


@pytest.mark.parametrize("stray", [None, "images", "masks"])
def test_pairs_in_train_and_val_count_beside_a_stray_folder(mask_parts, stray):
    if stray:
        (mask_parts / stray).mkdir()
    errors, warnings, report = verified("imagemasks", mask_parts)
    assert (errors, warnings) == (set(), set())
    assert [subset.samples for subset in report.subsets] == [7, 3]


@pytest.mark.parametrize("below", ["images", "masks"])
def test_a_missing_folder_is_one_finding(mask_parts, below):
    (mask_parts / "val" / below).rename(mask_parts.parent / "other")
    assert verified("imagemasks", mask_parts)[0] == {"missing-file"}
    errors, warnings, _ = verified("imagemasks", mask_parts, allow_partial=True)
    assert (errors, warnings) == (set(), {"missing-file"})


def volume(folder, stem, change):
    """Changes the pages of a volume, which change() gets as a list of arrays."""
    path = folder / f"{stem}.tif"
    with Image.open(path) as image:
        pages = []
        for page in range(image.n_frames):
            image.seek(page)
            pages.append(np.array(image))
    save_pages(path, change(pages))


def with_pages(change, *stems):
    return lambda f: [volume(f, stem, change) for stem in stems]


PAGES, TRUTH = "train-volume", "train-labels"


def coloured(page):
    return Image.merge("RGB", [Image.fromarray(page)] * 3)


def with_axes(folder):
    """Gives the two volumes other axes, and the same pages."""
    for stem, axes in ((PAGES, "TZ"), (TRUTH, "ZT")):
        planes = tifffile.imread(folder / f"{stem}.tif")
        planes = planes.reshape(2, -1, *planes.shape[1:])
        tifffile.imwrite(folder / f"{stem}.tif", planes, ome=True, metadata={"axes": f"{axes}YX"})


VOLUMES = {
    "no labels": ("missing-file", removed(f"{TRUTH}.tif")),
    "truncated": ("truncated", rewritten(f"{PAGES}.tif", lambda d: d[:-9000])),
    "fewer pages": ("fewer-samples", with_pages(lambda p: p[:20], PAGES, TRUTH)),
    "fewer labels": ("count-mismatch", with_pages(lambda p: p[:-1], TRUTH)),
    "a page of colour": ("wrong-mode", with_pages(lambda p: [coloured(p[0]), *p[1:]], PAGES)),
    "a small page": ("wrong-shape", with_pages(lambda p: [p[0][:100], *p[1:]], PAGES)),
    "grey labels": ("mask-values", with_pages(lambda p: [p[0] // 2 + 1, *p[1:]], TRUTH)),
    "other axes": ("page-order", with_axes),
    "one page": ("count-mismatch", saved(f"{PAGES}.tif", "L")),
    "an empty file": ("empty-file", written(f"{TRUTH}.tif", b"")),
    "a page twice": ("duplicate", with_pages(lambda p: [p[1], *p[1:]], PAGES)),
}


@pytest.mark.parametrize(
    "code, stem, change",
    [
        ("wrong-mode", "train-volume", lambda p: [*p[:-1], coloured(p[-1])]),
        ("wrong-shape", "train-volume", lambda p: [*p[:-1], p[-1][:9]]),
        ("mask-values", "train-labels", lambda p: [*p[:-1], p[-1] // 2 + 1]),
    ],
)
def test_damaged_last_page_of_a_volume_belongs_to_evaluation(tmp_path, code, stem, change):
    write_volumes(tmp_path, 10, 64)
    volume(tmp_path, stem, change)
    _, _, report = verified("isbi2012", tmp_path)
    found = {finding.subset for finding in report.findings if finding.code == code}
    # That the masks of the set have a third value belongs to no part.
    assert found == ({EVAL, None} if code == "mask-values" else {EVAL})


def test_folder_called_crc_is_no_wrong_checksum(made, tmp_path):
    """The reader classifies a finding; the words of its message, which has the path, do not matter."""
    name, folder = made("idx")
    strange = tmp_path / "NCT-CRC-truncated"
    folder.rename(strange)
    path = strange / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes() + b"more")
    errors, _, _ = verified(name, strange)
    assert errors == {"unreadable"}


OPENING = {
    "idx": lambda f: open_set("mnist", f),
    "cifar": lambda f: open_set("cifar10", f),
    "cifar-python": lambda f: open_set("cifar10", f),
    "folders": lambda f: refuse_damaged(open_imagefolder(f)),
    "masks": partial(open_pairs, "imagemasks"),
    "volumes": partial(open_pairs, "isbi2012"),
}
NOT_READ = {
    *("truncated", "empty-file", "checksum", "unreadable", "count-mismatch", "wrong-dtype", "wrong-shape"),
    *("unusable", "wrong-mode", "mask-values", "label-range", "unpaired", "missing-subset", "unknown-class"),
    *("page-order", "several-masks"),
}
"""Errors that end training, too."""
DAMAGES = {
    "idx": IDX,
    "cifar": CIFAR,
    "cifar-python": CIFAR_PYTHON,
    "folders": FOLDERS,
    "masks": MASKS,
    "volumes": VOLUMES,
}


REASONS = {
    ("idx", "truncated"): "train-images.*truncated",
    ("idx", "bytes at the end"): "labels.*trailing",
    ("idx", "swapped"): "not an idx file",
    ("idx", "a label too many"): "images but",
    ("idx", "a wrong label"): "label 10",
    ("idx", "no labels"): "lacks train-labels",
    ("idx", "an unpacked file called .gz"): "not a gzip file",
    ("cifar", "no test file"): "no test file.*\n.*--download",
    ("cifar", "no training file"): "no training file.*\n.*--download",
    ("folders", "a class of val"): "the class 'wasp'",
    ("folders", "no val"): "lacks train/ or val/",
    ("folders", "no images in val"): "no images in class folders",
    ("masks", "two of a name"): "both called 3",
    ("masks", "colour"): "3.png is colour",
    ("masks", "a mask of another size"): "20x20",
    ("volumes", "fewer labels"): "30 pages, and its mask .* has 29",
}
"""Words of the error that ends training, and of its hint in the next line."""


@pytest.mark.parametrize("kind, what", [(kind, what) for kind, table in DAMAGES.items() for what in table])
def test_damage_is_found_and_ends_training_if_nothing_can_be_trained_on(made, kind, what):
    code, damage = DAMAGES[kind][what]
    name, folder = made(kind)
    damage(folder)
    errors, warnings, report = verified("imagemasks" if kind == "masks" else name, folder)
    assert code in (errors if CODES[code].severity == ERROR else warnings), report.findings
    texts = [text for finding in report.findings for text in finding.examples]
    names_folder = any(str(folder) in text and "no samples" not in text for text in texts)
    assert kind != "folders" or not names_folder, texts
    reason = REASONS.get((kind, what), "")
    if reason or code in NOT_READ:
        with pytest.raises(DataError) as refused:
            OPENING[kind](folder)
        assert refused.value.hint and str(folder) in refused.value.message
        assert re.search(reason, f"{refused.value.message}\n{refused.value.hint}")
    elif not errors:
        OPENING[kind](folder)


def test_every_code_is_found_by_a_test():
    """Except for those of TFDS, whose tests need its package (test_verify_dataset_tfds.py)."""
    codes = {code for table in DAMAGES.values() for code, _ in table.values()}
    assert codes | {"small-image", "no-eval-subset", "unread-part", "not-checked", "too-large"} == set(CODES)
    assert all(CODES[code].severity in (ERROR, WARNING) and CODES[code].hint for code in CODES)


# ---------------------------------------------------------------- partial sets, limits, published sets


@pytest.mark.parametrize(
    "kind, what",
    [("cifar", "a file missing"), ("folders", "no val"), ("masks", "no partner"), ("volumes", "fewer pages")],
)
def test_a_partial_set_may_be_allowed(made, kind, what):
    name, folder = made(kind)
    DAMAGES[kind][what][1](folder)
    errors, _, _ = verified(name, folder)
    assert errors and all(CODES[code].partial for code in errors)
    errors, warnings, report = verified(name, folder, allow_partial=True)
    assert not errors and warnings
    assert all("--allow-partial" not in finding.hint for finding in report.findings)


def test_an_empty_set_is_never_allowed(made):
    _, folder = made("folders")
    for path in folder.glob("*/*/*"):
        path.unlink()
    assert verified(folder, ".", allow_partial=True)[0] == {"missing-subset"}


@pytest.mark.parametrize("kind", ["idx", "cifar", "folders", "masks", "volumes"])
def test_limits_look_at_fewer_samples(made, kind):
    name, folder = made(kind)
    errors, _, report = verified(name, folder, limit_train="50%", limit_eval="2")
    train, evaluation = report.subsets
    assert not errors
    assert (train.checked, evaluation.checked) == (train.samples // 2, 2)
    if kind in ("folders", "idx"):
        assert sum(count for _, count in train.classes) == train.checked


def test_class_left_out_by_a_limit_is_not_missing(made):
    """A few samples can by chance all be of one class, or nearly all."""
    name, folder = made("idx")
    edit_idx(folder / LABELS, lambda a: (np.arange(len(a)) % 21 == 0).astype(np.uint8))
    assert "imbalance" in verified(name, folder)[1]
    for limit in range(2, 40, 4):
        _, _, report = verified(name, folder, limit_train=str(limit))
        of_train = {finding.code for finding in report.findings if finding.subset == TRAIN}
        assert not of_train & {"nothing-to-learn", "imbalance", "empty-class"}


@pytest.mark.parametrize("page", [8, 9])
def test_masks_left_out_by_a_limit_may_have_another_class(made, page):
    _, folder = made("masks")
    for number in set(range(10)) - {page}:
        draw_mask(folder, f"{number}.png", [0])
    assert "nothing-to-learn" not in verified("imagemasks", folder)[0]
    assert "nothing-to-learn" not in verified("imagemasks", folder, limit_eval="1")[0]


def survey_of(arrays, class_names):
    """Makes a survey that has read images and labels of each subset."""
    survey = Survey("x", "classification", "here", Known(), lambda *place: False, {}, None, 0.2, 100)
    survey.class_names = class_names
    pairs = {subset: ("", images, np.array(labels, int)) for subset, (images, labels) in arrays.items()}
    survey.expect({subset: readers.array_samples([pair]) for subset, pair in pairs.items()})
    for subset, numbers, drawn in survey.groups():
        for result in survey.subsets[subset].stored.decode(numbers, drawn):
            list(survey.take(subset, *result))
    return survey


def test_known_faults_of_published_sets_are_warnings(tmp_path):
    images = noise(1, 2, 4, 4, 1)
    survey = survey_of({TRAIN: (images, [0, 1]), EVAL: (images, [1, 0])}, ("a", "b"))
    report = survey.finish(False)
    assert [f.code for f in report.findings if f.severity == ERROR] == ["conflict", "leakage"]
    survey.is_published = True
    assert survey.finish(False).num_errors == 0


# ---------------------------------------------------------------- recognising a set


@pytest.mark.parametrize("kind, name", [("folders", "imagefolder"), ("masks", "imagemasks")])
def test_foreign_dataset_info_is_no_tfds_set(made, kind, name):
    """Hugging Face's library writes a file of this name, too."""
    _, folder = made(kind)
    (folder / "dataset_info.json").write_text("{}")
    assert verify.choose(str(folder), Path(".")).name == verify.choose(None, folder).name == name
    for named, path in ((name, folder), (folder, ".")):
        assert verified(named, path)[:2] == (set(), set())
    task = "classification" if kind == "folders" else "segmentation"
    for named in (name, "imagenet") if kind == "folders" else (name,):
        assert open_dataset(choose_dataset(named, folder, home="", task=task)).info.num_train in (12, 8)


@pytest.mark.parametrize(
    "name, error, words",
    [
        ("empty", DataError, "holds no data set"),
        ("file", DataError, "a file, not a folder"),
        ("fifo", DataError, "a FIFO or a socket, not a folder"),
        ("loop", DataError, "loop"),
        (None, ConfigurationError, "no data set is given"),
        ("", ConfigurationError, "empty"),
        ("a\0b", DataError, "null byte"),
    ],
)
def test_unrecognised_folders_are_refused(here, name, error, words):
    (here / "empty").mkdir()
    (here / "file").write_text("x")
    os.mkfifo(here / "fifo")
    (here / "loop").symlink_to("loop")
    check_raises(error, words, "", verify.choose, name, Path("."))


# ---------------------------------------------------------------- properties


@pytest.mark.slow
@given(
    labels=st.lists(st.integers(0, 2), min_size=2, max_size=12),
    pixels=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    cut=st.integers(0, 12),
)
@settings(max_examples=150)
def test_duplicates_equal_those_of_a_naive_search(labels, pixels, cut):
    """Images are one of four, so that most have duplicates."""
    number = len(labels)
    images = np.stack([noise(k, 2, 2, 1) for k in pixels[:number]])
    cut = min(cut, number)
    parts = {TRAIN: range(cut), EVAL: range(cut, number)}
    arrays = {name: (images[part], [labels[n] for n in part]) for name, part in parts.items()}
    survey = survey_of(arrays, ("a", "b", "c"))
    report = survey.finish(True)
    counts = {(f.code, f.subset): f.count for f in report.findings}
    for name, part in parts.items():
        mine = [pixels[n] for n in part]
        assert counts.get(("duplicate", name), 0) == len(mine) - len(set(mine))
    leaked = sum(pixels[n] in {pixels[m] for m in parts[TRAIN]} for n in parts[EVAL])
    assert counts.get(("leakage", EVAL), 0) == leaked
    disputed = {
        k for k in set(pixels[:number]) if len({labels[n] for n in range(number) if pixels[n] == k}) > 1
    }
    in_conflict = sum(pixels[n] in disputed for n in range(number))
    assert sum(count for (code, _), count in counts.items() if code == "conflict") == in_conflict


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3])),
    seed=st.integers(0, 99),
    flat=st.booleans(),
)
@settings(max_examples=60)
def test_measured_statistics_equal_numpy(shape, seed, flat):
    images = noise(seed, *shape)
    if flat:
        images[0] = images[0, :1, :1]
    statistics = samples.measure(images)
    for c in range(shape[-1]):
        assert (
            statistics.histogram[c].tolist()
            == np.bincount(images[..., c].reshape(-1), minlength=256).tolist()
        )
    assert np.allclose(statistics.means, images.mean(axis=(1, 2)))
    assert statistics.constant.tolist() == [bool((i == i[:1, :1]).all()) for i in images]
    assert len(statistics.digests) == 16 * shape[0]
    assert samples.measure(images).digests == statistics.digests


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Makes small undamaged sets, whose bytes are changed at random."""
    base = tmp_path_factory.mktemp("targets")
    for kind in KINDS_OF_TARGETS:
        (base / kind).mkdir()
        WRITERS[kind](base / kind)
    return base


KINDS_OF_TARGETS = ("idx", "folders", "masks", "cifar-python", "small volumes")


@given(
    kind=st.sampled_from(KINDS_OF_TARGETS),
    which=st.integers(0, 10**6),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8),
    keep=st.one_of(st.just(1.0), st.floats(0, 1)),
)
@tries(25, slow=500)
def test_arbitrary_bytes_give_a_report(targets, kind, which, changes, keep):
    folder = targets / kind
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[which % len(files)]
    before = path.read_bytes()
    data = bytearray(before[: int(len(before) * keep)])
    for place, value in changes:
        if data:
            data[min(int(place * len(data)), len(data) - 1)] = value
    try:
        path.write_bytes(bytes(data))
        _, _, report = verified(folder, ".", allow_partial=True, max_pixels=10**6)
        json.dumps(report.to_dict())
    finally:
        path.write_bytes(before)


# ---------------------------------------------------------------- the command


def test_a_long_example_is_folded_below_its_beginning(run, made):
    _, folder = made("folders")
    (folder / "val" / "bee" / ("x" * 70 + ".png")).write_bytes(b"hello")
    _, out, _ = run("verify-dataset", folder, columns=80)
    lines = [line.rstrip() for line in out.splitlines()]
    first = next(k for k, line in enumerate(lines) if "- val/bee/xxx" in line)
    at = lines[first].index("- ") + 2
    assert lines[first + 1].startswith(" " * at + "xxx")
    assert not any(line.endswith(" -") for line in lines)


def test_subset_without_samples_is_not_checked(run, made):
    _, folder = made("folders")
    FOLDERS["no val"][1](folder)
    code, out, _ = run("verify-dataset", folder, "--allow-partial")
    assert code == 0
    (line,) = [line for line in out.splitlines() if "looked at" in line]
    assert line.split() == ["looked", "at", "all"]


def test_the_json_has_the_documented_keys(run, made):
    name, folder = made("idx")
    IDX["a leak"][1](folder)
    code, out, _ = run("verify-dataset", name, "--dataset-path", folder, "--json")
    report = json.loads(out)
    assert code == 3 and report["schema_version"] == 1 and report["verdict"] == "errors"
    page = (Path(__file__).parents[1] / "docs" / "verify-dataset.md").read_text(encoding="utf-8")

    def keys(value):
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    documented = keys({k: v for k, v in report.items() if k != "checksums"}) - {"mnist"}
    assert {key for key in documented if f"`{key}`" not in page} == set()
    assert {code for code in CODES if f"`{code}`" not in page} == set()


@pytest.mark.parametrize(
    "kind, what, names",
    [
        ("folders", "a copy in another format", ["train/bee/2.png", "train/bee/copy.bmp"]),
        ("folders", "a copy in another class", ["train/bee/2.png", "train/ant/7.png"]),
        ("folders", "a leak", ["train/bee/2.png", "val/bee/7.png"]),
        ("folders", "grey", ["train/bee/9.png"]),
        ("idx", "a leak", [f"{IMAGES}, sample 0", "t10k-images-idx3-ubyte, sample 0"]),
        ("idx", "another size", [f"{IMAGES}, sample {n}" for n in range(NUM[TRAIN])]),
        ("masks", "another value", ["images/3.png"]),
        ("masks", "colour", ["images/3.png"]),
        ("masks", "a mask of another size", []),
        ("masks", "other masks", ["images/3.png", "images/4.png"]),
        ("volumes", "a page twice", ["train-volume.tif, page 1", "train-volume.tif, page 2"]),
        ("volumes", "grey labels", ["train-volume.tif, page 1"]),
    ],
)
def test_only_samples_with_findings_are_framed(made, kind, what, names):
    code, damage = DAMAGES[kind][what]
    name, folder = made(kind)
    damage(folder)
    view = Recorded()
    verified(name, folder, view, is_drawn=lambda position, total: True)
    drawn = [event.sample for event in view.events if isinstance(event, samples.Drawn)]
    assert {sample.name for sample in drawn if code in sample.problems} == set(names)


@pytest.mark.parametrize("kind, side", [("folders", 128), ("masks", 3 * 192)])
def test_frames_are_red_around_findings(run, made, tmp_path, kind, side):
    """A copy makes two red frames, around the three pictures of a pair with a mask; a damaged file is reported."""
    _, folder = made(kind)
    if kind == "folders":
        FOLDERS["a copy in another format"][1](folder)
        (folder / "val" / "ant" / "1.png").write_bytes(b"hello")
    else:
        MASKS["other masks"][1](folder)
        (folder / "images" / "9.png").write_bytes(b"hello")
    code, _, err = run("verify-dataset", folder, "--contact-sheet", "sheet.png")
    assert code == 3 and "1 sample chosen for the sheet could not be drawn" in err
    with Image.open(tmp_path / "sheet.png") as sheet:
        red = (np.asarray(sheet.convert("RGB")) == (200, 30, 30)).all(axis=2)
    # The upper edge of a frame: a run of red as wide as a picture, with no red above it
    edges = 0
    for above, row in zip(np.vstack([np.zeros_like(red[:1]), red]), red):
        starts = np.diff(np.concatenate([[0], row & ~above, [0]]).astype(int))
        widths = np.flatnonzero(starts == -1) - np.flatnonzero(starts == 1)
        edges += (widths >= side).sum()
    assert edges == 2


def test_an_option_of_generated_sets(succeeds):
    out, _ = succeeds("verify-dataset", "membranes", "--image-size", "40x56", "--limit-train", "3")
    assert "40x56 grey" in out


# ---------------------------------------------------------------- real data


def real(name):
    return pytest.mark.skipif(
        not (SHARED / name).is_dir(), reason=f"no ../shared/data/{name} beside the repository"
    )


@pytest.mark.slow_cases("cifar-10-batches-py-errors3-warnings3")
@pytest.mark.parametrize(
    "folder, errors, warnings",
    [
        pytest.param("mnist", set(), set(), marks=real("mnist")),
        pytest.param("isbi2012", set(), set(), marks=real("isbi2012")),
        # The folder edge-cases lies beside train and val.
        pytest.param(
            "imagenet-samples",
            set(),
            {"odd-mode", "passed-over", "colour-profile"},
            marks=real("imagenet-samples"),
        ),
        pytest.param(
            "cifar-10-batches-py",
            {"missing-file", "fewer-samples"},
            {"not-published"},
            marks=real("cifar-10-batches-py"),
        ),
    ],
)
def test_real_data_sets_give_their_known_findings(folder, errors, warnings):
    assert verified(SHARED / folder, ".")[:2] == (errors, warnings)


def test_a_folder_of_another_layout_gets_the_command_of_training(run, tmp_path):
    """As Oxford-IIIT Pets has its masks: the hint of ``train`` and of ``verify-dataset`` makes the same set."""
    for k in range(3):
        for folder, stored in (
            ("images", noise(k, 12, 12, 3)),
            ("annotations/trimaps", noise(k, 12, 12) // 128),
        ):
            path = tmp_path / "pets" / folder / f"cat_{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(stored).save(path)
    code, _, err = run("verify-dataset", "pets")
    assert code == 3
    command = err[err.index("python -m ipucnn.datasets.sorting masks annotation-trimap ") :].partition(";")[0]
    assert command in run("train", "unet", "--dataset", "pets", "--dry-run")[2]
    assert sorting.main(shlex.split(command)[3:]) == 0
    assert run("verify-dataset", shlex.split(command)[-2])[0] == 0
