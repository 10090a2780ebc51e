"""Unpickling reads plain data and runs nothing, whatever the file holds."""

import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datasets_formats import cifar_arrays, planes

from ipucnn.datasets.sources import cifar
from ipucnn.datasets.sources.cifar import safe_unpickle
from ipucnn.errors import DataError


def test_a_python_2_pickle():
    """Protocol 2 of Python 2: strings, not bytes, hold the pixels."""
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


class Exploit:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", ["system", "open", "eval", "exec", "nested", "makedirs"])
def test_a_malicious_pickle_runs_nothing(tmp_path, monkeypatch, kind, protocol):
    marker = tmp_path / "written"
    code = f"open({str(marker)!r}, 'w').close()"
    exploit = {
        "system": Exploit(os.system, f"touch {marker}"),
        "open": Exploit(open, str(marker), "w"),
        "eval": Exploit(eval, code),
        "exec": Exploit(exec, code),
        "nested": {"data": np.array([Exploit(eval, code)], dtype=object), "labels": [1]},
        "makedirs": Exploit(os.makedirs, str(marker)),
    }[kind]
    payload = pickle.dumps({"data": exploit, "labels": [0]}, protocol=protocol)
    # The payload is live: the ordinary unpickler does write the file.
    pickle.loads(payload)
    assert marker.exists()
    marker.rmdir() if marker.is_dir() else marker.unlink()

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(payload)
    (folder / "test_batch").write_bytes(payload)
    with pytest.raises(DataError, match=r"could run code|holds") as caught:
        cifar.open_cifar("cifar10", folder)
    assert not marker.exists()
    assert "data_batch_1" in caught.value.message and "nothing in it was run" in caught.value.hint
    (folder / "data_batch_1").unlink()
    (folder / "batches.meta").write_bytes(payload)
    images, labels = cifar_arrays(2)
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(
            pickle.dumps({"data": planes(images), "labels": labels.tolist()}, protocol=2)
        )
    with pytest.raises(DataError, match=r"batches.meta"):
        cifar.open_cifar("cifar10", folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"cnumpy\ndtype\nq\x00.",  # a bare name
        b"cnumpy\nndarray\n.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cos\nsystem\n(I0\ntS'b'\ntR.",
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"Px\n.",  # PERSID
        b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b"ab.",  # a bytearray of 2**60 bytes
        b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"ab.",  # bytes of 2**60
        b"\x80\x02r" + struct.pack("<I", 2**31) + b".",
        b"\x80\x02N" + b"r" + struct.pack("<I", 2**31 - 1) + b"\x85" * 60 + b".",  # a deep structure
        b"",
        b".",
        b"\x80\x02]q\x00h\x00a.",  # a list that holds itself
        b"\x80\x02}U\x04datacnumpy\ndtype\nU\x02O8\x85Rs.",  # objects, whose memory addresses a file could choose
        b"\x80\x02}U\x04datacnumpy\ndtype\nU\x01O\x85Rs.",
    ],
)
def test_a_hostile_pickle_is_refused(stream):
    with pytest.raises(DataError):
        safe_unpickle(stream, "hostile")


@given(data=st.binary(max_size=60))
@settings(max_examples=200)
def test_any_bytes_as_a_pickle_give_plain_data_or_an_error(data):
    try:
        safe_unpickle(data, "file")
    except DataError as error:
        assert error.message.startswith("file ")


@given(position=st.integers(0, 4000), value=st.integers(0, 255))
@settings(max_examples=60)
def test_a_flipped_byte_never_escapes_as_another_error(tmp_path_factory, position, value):
    images, labels = cifar_arrays(1)
    raw = bytearray(pickle.dumps({"data": planes(images), "labels": labels.tolist()}, protocol=2))
    raw[position % len(raw)] = value
    path = tmp_path_factory.mktemp("cifar") / "batch"
    path.write_bytes(bytes(raw))
    try:
        assert cifar.read_pickle(path, "labels", 10)[0].shape[1:] == (32, 32, 3)
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


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}U\x01xK\x01sb.",
        b"\x80\x02cnumpy\ndtype\nN}U\x04codeU\x01Os\x86b.",  # setattr(dtype, "code", "O")
    ],
)
def test_what_a_pickle_sets_is_gone_with_it(stream):
    with pytest.raises(DataError):
        safe_unpickle(stream, "hostile")
    test_a_python_2_pickle()
