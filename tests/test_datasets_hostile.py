"""Hostile data set files: each is refused with exit code 3, in little memory, and no code in it runs."""

import gzip
import json
import os
import pickle
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import encode, noise, open_set, write_cifar10, write_class_folders, write_mnist
from support.image_files import LONG, tiff, tiff_page
from support.refusals import check_raises

from ipucnn.datasets import forms
from ipucnn.datasets.base import read_file
from ipucnn.datasets.images import open_image
from ipucnn.datasets.sources import cifar, idx, records
from ipucnn.datasets.sources.cifar import safe_unpickle
from ipucnn.datasets.sources.record_builder import build
from ipucnn.datasets.sources.tfrecord import frame, masked_crc32c
from ipucnn.errors import DataError
from ipucnn.events import show

MARKER = Path("/tmp") / f"ipucnn-hostile-{os.getpid()}"


def encoded(form):
    return encode(noise(1, 12, 12, 3), form)


# ---------------------------------------------------------------- images


def png_of_gigapixels():
    data = bytearray(encoded("PNG"))
    data[16:24] = struct.pack(">II", 60000, 60000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def jpeg_of_gigapixels():
    data = encoded("JPEG")
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + b"\xff\xff\xff\xff" + data[at + 9 :]


def gif_of_gigapixels(before=b""):
    """Returns a GIF of 10x10 pixels with a larger first frame, which the background replaces afterwards."""
    return (
        b"GIF89a" + struct.pack("<2H3B", 10, 10, 0x80, 0, 0) + bytes(6) + b"!\xf9\x04\x08\0\0\0\0" + before
        + b"," + struct.pack("<4HB", 0, 0, 30_000, 30_000, 0) + b"\x02\x02L\x01\0;"
    )  # fmt: skip


def webp_of_gigapixels():
    canvas = b"VP8X" + struct.pack("<I", 10) + bytes(4) + struct.pack("<I", 16382)[:3] * 2
    data = encoded("WEBP")[12:]
    return b"RIFF" + struct.pack("<I", 4 + len(canvas + data)) + b"WEBP" + canvas + data


def tiff_of_large_tiles():
    return tiff(tiff_page(noise(1, 8, 8), {322: (LONG, [60_000]), 323: (LONG, [60_000])}))


POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    b"(%pipe%touch " + str(MARKER).encode() + b")(w) file\n"
)
LIMIT = r"(more|far more) than --max-image-pixels"
LIMIT_OR_DAMAGE = f"{LIMIT}|cannot be decoded"
IMAGES = {
    "png": (png_of_gigapixels, LIMIT),
    "jpeg": (jpeg_of_gigapixels, LIMIT),
    "gif": (gif_of_gigapixels, LIMIT_OR_DAMAGE),
    "gif after a comment": (lambda: gif_of_gigapixels(b"!\xfe\0"), LIMIT_OR_DAMAGE),
    "gif after text": (lambda: gif_of_gigapixels(b"!\x01\0\x02xx\0"), LIMIT_OR_DAMAGE),
    "gif after a loop": (lambda: gif_of_gigapixels(b"!\xff\x0bNETSCAPE2.0\0\x02xx\0"), LIMIT_OR_DAMAGE),
    "gif after rubbish": (lambda: gif_of_gigapixels(b"xyz"), LIMIT_OR_DAMAGE),
    "webp": (webp_of_gigapixels, LIMIT_OR_DAMAGE),
    "tiff of large tiles": (tiff_of_large_tiles, "has 60000x60000 pixels"),
    "postscript": (lambda: POSTSCRIPT, "not an image in a known format"),
}


def box(brand, *compatible):
    """The first box of an ISO file (ISO 14496-12, 4.3): size, "ftyp", brand, version, compatible brands."""
    content = b"ftyp" + brand + bytes(4) + b"".join(compatible)
    return struct.pack(">I", len(content) + 4) + content


@pytest.mark.parametrize(
    "data, content, converted",
    [
        (box(b"heic", b"mif1", b"heic"), "HEIF, in which phones save photographs (.heic)", True),
        (box(b"mif1", b"mif1", b"heic"), "HEIF, in which phones save photographs (.heic)", True),
        (box(b"avif", b"mif1"), "AVIF", True),
        (box(b"mif1", b"mif1", b"avif"), "AVIF", True),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + box(b"jp2 "), "JPEG 2000", True),
        (b"\xff\x4f\xff\x51\0", "JPEG 2000", True),
        (b"\xff\x0a\0", "JPEG XL", True),
        (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg width="3">', "a drawing (SVG)", True),
        (b"%PDF-1.4", "a document (PDF)", True),
        (bytes(128) + b"DICM", "DICOM", True),
        (b"\n<!DOCTYPE html>\n<html>", "a web page (HTML)", False),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS", False),
        (b"PK\x03\x04", "an archive (zip)", False),
        (b"text", None, True),
        (b"", None, True),
        (b"<!>" * 400, None, True),  # nothing to go back over
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_image_that_is_something_else_is_named(data, content, converted):
    ending = "is not an image in a known format" + (f": it is {content}" if content else "")
    with pytest.raises(DataError) as raised, forms.opened(data, "image x.jpg"):
        pass
    assert raised.value.message == f"image x.jpg {ending}"
    assert raised.value.hint == (forms.HINT if converted else forms.AGAIN)


# ---------------------------------------------------------------- pickles


class Exploit:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


CODE = f"open({str(MARKER)!r}, 'w').close()"
EXPLOITS = {
    "system": Exploit(os.system, f"touch {MARKER}"),
    "open": Exploit(open, str(MARKER), "w"),
    "eval": Exploit(eval, CODE),
    "exec": Exploit(exec, CODE),
    "makedirs": Exploit(os.makedirs, str(MARKER)),
    "nested": np.array([Exploit(eval, CODE)], dtype=object),
}
STREAMS = {
    "a bare name": b"cnumpy\ndtype\nq\x00.",
    "a class": b"cnumpy\nndarray\n.",
    "load": b"cnumpy\nload\n(S'x'\ntR.",
    "reconstruct": b"cnumpy.core.multiarray\n_reconstruct\n(cos\nsystem\n(I0\ntS'b'\ntR.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Px\n.",
    "a bytearray of 2**60 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b"ab.",
    "bytes of 2**60": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"ab.",
    "a memo": b"\x80\x02r" + struct.pack("<I", 2**31) + b".",
    "a deep structure": b"\x80\x02N" + b"r" + struct.pack("<I", 2**31 - 1) + b"\x85" * 60 + b".",
    "a dot": b".",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    # Objects: a file could choose their memory addresses.
    "objects": b"\x80\x02}U\x04datacnumpy\ndtype\nU\x02O8\x85Rs.",
    "objects of any size": b"\x80\x02}U\x04datacnumpy\ndtype\nU\x01O\x85Rs.",
    # Attributes set on a name do not outlive the file.
    "an attribute": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}U\x01xK\x01sb.",
    "a code": b"\x80\x02cnumpy\ndtype\nN}U\x04codeU\x01Os\x86b.",
}
PICKLES = {name: (lambda data=data: data, "is no CIFAR pickle") for name, data in STREAMS.items()}
for protocol in (0, 2, 5):
    for name, exploit in EXPLOITS.items():
        content = {"data": exploit, "labels": [0]}
        PICKLES[f"{name}, protocol {protocol}"] = (
            lambda content=content, protocol=protocol: pickle.dumps(content, protocol),
            "could run code|holds",
        )


# ---------------------------------------------------------------- idx files and records


def idx_header(*shape):
    return struct.pack(">IIII", 0x0803, *shape)


def record_of_any_length():
    head = struct.pack("<Q", 2**62)
    return head + struct.pack("<I", masked_crc32c(head)) + b"abc"


IDX = {
    "no data": (lambda: idx_header(0, 28, 2**32 - 1), "no data"),
    "nothing": (lambda: idx_header(1, 0, 0), "no data"),
    "more than any memory": (
        lambda: gzip.compress(idx_header(*[2**32 - 1] * 3)),
        "truncated",
        "truncated",
    ),
    "a packed file with less than its header says": (
        lambda: gzip.compress(idx_header(1, 2, 2) + bytes(3)),
        "truncated",
        "truncated",
    ),
    "more than its header says": (lambda: gzip.compress(idx_header(1, 2, 2) + bytes(2**26)), "trailing"),
}
RECORDS = {
    "a length that no memory holds": (record_of_any_length, "truncated", "truncated"),
    "no example": (lambda: frame(b"\x0a\xff\xff\xff"), "is no labelled image", "unreadable"),
    "a number without end": (lambda: frame(b"\xff" * 40), "is no labelled image", "unreadable"),
}

FILES = {
    "images": ("train/bee/0.png", IMAGES),
    "pickles": ("data_batch_2", PICKLES),
    "idx": ("train-images-idx3-ubyte", IDX),
    "records": ("train-00000-of-00001", RECORDS),
}
READ = {
    "images": lambda path: open_image(path.read_bytes(), f"image {path}", 3),
    "pickles": lambda path: open_set("cifar10", path.parent),
    "idx": lambda path: idx.read_idx(path, 3),
    "records": lambda path: records.open_records(path.parent),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    base = tmp_path_factory.mktemp("clean")
    for kind in FILES:
        (base / kind).mkdir()
    write_class_folders(
        base / "images", {(part, name): 3 for part in ("train", "val") for name in ("ant", "bee")}
    )
    write_cifar10(base / "pickles")
    write_mnist(base / "idx", compress=False)
    show(build(base / "images", base / "records", 1, 1, 1))
    # What the first TIFF of a process imports is no memory of a file.
    open_image(tiff(tiff_page(noise(1, 8, 8))), "image", 3)
    return base


@pytest.mark.parametrize("kind, what", [(kind, what) for kind, (_, table) in FILES.items() for what in table])
def test_a_hostile_file_is_refused(clean, run, kind, what):
    name, table = FILES[kind]
    make, words, *code = table[what]
    path = clean / kind / name
    before = path.read_bytes()
    path.write_bytes(make())
    try:
        tracemalloc.start()
        with pytest.raises(DataError, match=words) as caught:
            READ[kind](path)
        assert tracemalloc.get_traced_memory()[1] < 2**25 and caught.value.hint
        tracemalloc.stop()
        exit_code, out, _ = run("verify-dataset", clean / kind, "--json")
        codes = {f["code"] for f in json.loads(out)["findings"] if f["severity"] == "error"}
        refused = "too-large" if re.search(LIMIT, caught.value.message) else "unreadable"
        assert exit_code == caught.value.exit_code == 3 and (*code, refused)[0] in codes
    finally:
        tracemalloc.stop()
        path.write_bytes(before)
    assert not MARKER.exists()


@pytest.mark.parametrize("kind", EXPLOITS)
def test_the_exploits_are_live(kind):
    """The standard unpickler runs the code in the file."""
    pickle.loads(pickle.dumps(EXPLOITS[kind], 2))
    assert MARKER.exists()
    MARKER.rmdir() if MARKER.is_dir() else MARKER.unlink()


def test_class_names_in_a_hostile_pickle_are_refused(clean, tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": EXPLOITS["eval"]}, 2))
    hint = "nothing in it was run"
    error = check_raises(DataError, "could run code", hint, open_set, "cifar10", tmp_path)
    assert not MARKER.exists() and "batches.meta " in error.message


# ---------------------------------------------------------------- other pickles


def test_a_python_2_pickle_is_read():
    """In protocol 2 of Python 2, strings instead of bytes hold the pixels."""
    raw = bytes(range(256))
    stream = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"q\x05U\x01bq\x06\x87q\x07Rq\x08(K\x01K\x02K\x80\x86q\tcnumpy\ndtype\nq\nU\x02u1q\x0bK\x00K\x01\x87q\x0c"
        b"Rq\r(K\x03U\x01|q\x0eNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0fb\x89T"
        + struct.pack("<i", 256)
        + raw
        + b"q\x10tq\x11bu."
    )
    content = safe_unpickle(stream, "batch")
    np.testing.assert_array_equal(content["data"], np.arange(256, dtype=np.uint8).reshape(2, 128))


@given(data=st.binary(max_size=60))
@settings(max_examples=200)
def test_any_pickle_gives_plain_data_or_an_error(data):
    try:
        safe_unpickle(data, "file")
    except DataError as error:
        assert error.message.startswith("file ")


@given(position=st.integers(0, 4000), value=st.integers(0, 255))
@settings(max_examples=60)
def test_a_changed_byte_raises_nothing_but_data_errors(tmp_path_factory, position, value):
    content = {"data": noise(1, 1, 3072), "labels": [3]}
    raw = bytearray(pickle.dumps(content, protocol=2))
    raw[position % len(raw)] = value
    path = tmp_path_factory.mktemp("cifar") / "batch"
    path.write_bytes(bytes(raw))
    try:
        assert cifar.read_pickle(path, "labels")[0].shape[1:] == (32, 32, 3)
    except DataError as error:
        assert str(path) in error.message


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    protocol=st.integers(0, pickle.HIGHEST_PROTOCOL),
)
@settings(max_examples=60)
def test_plain_data_is_read_as_pickle_reads_it(value, protocol):
    assert safe_unpickle(pickle.dumps({"value": value}, protocol=protocol), "file") == {"value": value}


def _with_labels(labels):
    """A protocol 2 batch of two images whose labels are the value that ``labels`` (a stream) leaves on the stack."""
    data = pickle.dumps(np.zeros((2, 3072), np.uint8), 2)[2:-1]
    return b"\x80\x02}(X\x04\x00\x00\x00data" + data + b"X\x06\x00\x00\x00labels" + labels + b"u."


def _value(value):
    return pickle.dumps(value, 2)[2:-1]


NESTED = [0] * 100
for _ in range(4):
    NESTED = [NESTED] * 100
# NumPy would read the address, and 10**10 numbers.
ADDRESS = {"__array_interface__": {"shape": (2,), "typestr": "<i8", "data": (16, True), "version": 3}}
LABELS = {
    "an address": b"c__builtin__\nbytes\n" + _value((None, ADDRESS)) + b"b",
    "an address in a list": b"]c__builtin__\nbytes\n" + _value((None, ADDRESS)) + b"ba",
    "nested lists": _value(NESTED),
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_are_plain_whole_numbers_before_numpy_sees_them(tmp_path, labels):
    path = tmp_path / "data_batch_1"
    path.write_bytes(_with_labels(labels))
    check_raises(DataError, "not a list of whole numbers", "", cifar.read_pickle, path, "labels")


def test_keys_that_are_not_text_are_ignored(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({10**5001: 1, "data": np.zeros((1, 3072), np.uint8), b"labels": [3]}, 2))
    assert cifar.read_pickle(path, "labels")[1].tolist() == [3]


def test_a_file_that_fills_the_memory_is_not_read(tmp_path, monkeypatch):
    path, size = tmp_path / "a.png", 2**28 + 1
    with open(path, "wb") as file:
        file.truncate(size)
    monkeypatch.setattr("ipucnn.datasets.limits.available_bytes", lambda: 2 * size - 2)
    tracemalloc.start()
    try:
        check_raises(DataError, "a.png needs 256 MiB of memory", "take it out", read_file, str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    path.write_bytes(b"small")
    monkeypatch.setattr("ipucnn.datasets.limits.available_bytes", lambda: 0)
    assert read_file(str(path)) == b"small"
