"""Checkpoints are loaded as they were saved, and damage is reported."""

import json
import pickle
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.refusals import check_raises

from ipucnn.errors import DataError
from ipucnn.filesystem import write_atomically, write_text
from ipucnn.runs.resume import newest_checkpoint
from ipucnn.training import checkpoints
from ipucnn.training.checkpoints import (
    Checkpoint,
    CheckpointFacts,
    assign_weights,
    digest_of,
    load_checkpoint,
    read_meta,
    save_checkpoint,
)

NAMES = st.text("abc/_0", min_size=1, max_size=8).filter(lambda n: "//" not in n and n.strip("/") == n)
FACTS = {"model": "m", "num_classes": 2, "input_shape": [4, 4, 1], "weight_updates": 3, "seed": 0}
ARRAYS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    elements=st.floats(-(2.0**99), 2.0**99, width=32),
)


@given(weights=st.dictionaries(NAMES, ARRAYS, max_size=4), slots=st.dictionaries(NAMES, ARRAYS, max_size=2))
def test_round_trip(tmp_path_factory, weights, slots):
    path = tmp_path_factory.mktemp("ckpt") / "a.npz"
    save_checkpoint(path, weights, slots, FACTS)
    read = load_checkpoint(path)
    assert read.meta == FACTS
    for ours, theirs in ((weights, read.weights), (slots, read.slots)):
        assert set(ours) == set(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
            assert theirs[name].shape == ours[name].shape


def test_checksum_depends_on_content_and_not_on_order():
    one, two = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    first, second = np.zeros(2, np.float32), np.ones(2, np.float32)
    digest = digest_of({"x": first, "y": second}, one)
    assert (
        digest
        == digest_of({"y": second, "x": first}, two)
        == digest_of({"y": second, "x": first}, {**one, "sha256": "z"})
    )
    others = (
        ({"x": second, "y": first}, one), ({"x": first, "z": second}, one), ({"x": first}, one),
        ({"x": first.reshape(2, 1), "y": second}, one), ({"x": first.astype("<i4"), "y": second}, one),
        ({"x": first, "y": second}, {**one, "a": 2}),
    )  # fmt: skip
    assert len({digest, *(digest_of(arrays, facts) for arrays, facts in others)}) == 1 + len(others)


def test_the_same_state_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, {"w": np.arange(5.0)}, {}, FACTS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with zipfile.ZipFile(tmp_path / "a") as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


@given(position=st.floats(0, 1, exclude_max=True), cut=st.booleans())
def test_damage_is_recognised(tmp_path_factory, position, cut):
    path = tmp_path_factory.mktemp("ckpt") / "a.npz"
    save_checkpoint(path, {"w": np.arange(64, dtype=np.float32)}, {}, FACTS)
    data = bytearray(path.read_bytes())
    where = int(position * len(data))
    if cut:
        data = data[:where]
    else:
        data[where] ^= 0xFF
    path.write_bytes(bytes(data))
    try:
        read = load_checkpoint(path)
    except DataError:
        return
    # A byte without content (an archive's attributes) may change; the contents may not.
    np.testing.assert_array_equal(read.weights["w"], np.arange(64, dtype=np.float32))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04", b"\x80\x04K\x01.", "pickle"])
def test_other_files_are_refused_and_not_executed(tmp_path, content):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    path = tmp_path / "x.npz"
    if content == "pickle":
        np.savez(path, meta=np.array([Bomb()], dtype=object))
    else:
        path.write_bytes(content)
    # The error drops NumPy's advice to load unsafely.
    assert "allow_pickle" not in str(check_raises(DataError, "", "", load_checkpoint, path))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", sorted(FACTS))
def test_checkpoint_without_facts_is_refused(tmp_path, name):
    save_checkpoint(tmp_path / "x", {}, {}, {key: value for key, value in FACTS.items() if key != name})
    check_raises(DataError, f"required field `{name}`", "", load_checkpoint, tmp_path / "x")


def out_of_memory(*args, **kwargs):
    raise MemoryError


def test_insufficient_memory_is_not_damage(tmp_path, monkeypatch):
    """``--resume`` does not use the checkpoint before it, whose run would repeat finished training."""
    whole = {**FACTS, "position": {"losses": [], "hits": [], "events_done": 0}}
    whole["run"] = {"history": "", "best": None, "last_validation": None}
    for number, size in ((1, 1), (2, 4000)):
        path = tmp_path / f"checkpoint-{number:08d}.npz"
        save_checkpoint(path, {"w": np.zeros(size, np.float32)}, {}, {**whole, "weight_updates": number})
    monkeypatch.setattr(f"{checkpoints.__name__}.np.frombuffer", out_of_memory)
    for read in (lambda: load_checkpoint(path), lambda: newest_checkpoint(tmp_path)):
        with pytest.raises(MemoryError):
            read()


def test_compressed_numbers_are_refused_even_if_they_are_no_smaller(tmp_path):
    noise = np.random.default_rng(1).integers(0, 2**16, 4000).astype(np.uint16).view(np.float16)
    save_checkpoint(tmp_path / "x", {"w": noise[np.isfinite(noise)]}, {}, FACTS)
    with zipfile.ZipFile(tmp_path / "x") as stored, zipfile.ZipFile(tmp_path / "y", "w") as other:
        for name in stored.namelist():
            other.writestr(name, stored.read(name), zipfile.ZIP_DEFLATED, compresslevel=0)
        num_bytes = sum(member.file_size for member in stored.infolist())
    assert len(load_checkpoint(tmp_path / "x").weights["w"]) > 3000
    assert (tmp_path / "y").stat().st_size > num_bytes
    check_raises(DataError, "damaged or no checkpoint", "", load_checkpoint, tmp_path / "y")


@pytest.mark.parametrize(
    "name, content, what",
    [
        ("r.pth", {"archive/data.pkl": b"x", "archive/data/0": b"1234"}, "a file of PyTorch"),
        ("old.pt", pickle.dumps({"w": [1.0]}, protocol=2), "a pickle, as PyTorch"),
        ("m.safetensors", (30).to_bytes(8, "little") + b'{"w":{}}' + bytes(30), "a file of safetensors"),
        ("model.ckpt-1.index", b"\0\0\1\2", "a part of a checkpoint of TensorFlow"),
        ("model.ckpt.data-00000-of-00001", b"\0\0\1\2", "a part of a checkpoint of TensorFlow"),
        ("net.onnx", b"\x08\x07\x12\x04", "a network in ONNX"),
    ],
)
def test_weights_of_other_programs_are_called_what_they_are(tmp_path, name, content, what):
    path = tmp_path / name
    if isinstance(content, dict):
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in content.items():
                archive.writestr(member, data)
    else:
        path.write_bytes(content)
    check_raises(DataError, f"is {what}", "weights that Keras saved", read_meta, path)


def with_member(path, name, descr, shape, num_bytes=8, fortran=False):
    """Adds a member to an empty checkpoint."""
    save_checkpoint(path, {}, {}, FACTS)
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, start + header + bytes(num_bytes))


@pytest.mark.parametrize(
    ("name", "descr", "shape", "more", "problem"),
    [
        *(
            ("weights/a/kernel.npy", repr(kind), "(2,)", {}, "the array 'weights/a/kernel' is not stored")
            for kind in ("<f8", ">f4", "<c8", "|b1", "<U3", "|S4", "|V4", "<M8[s]", "<i4", "|u1", "|O")
        ),
        ("slots/a/m.npy", "'|u1'", "(8,)", {}, "the array 'slots/a/m' is not stored row by row as <f4 or"),
        ("weights/a.npy", "[('x', '<f4')]", "(2,)", {}, "is not stored row by row"),
        ("weights/a.npy", "'<f4'", "(2, 1)", {"fortran": True}, "is not stored row by row"),
        ("weights/a.npy", "'<f4'", "(" * 5000, {}, "is not stored row by row"),
        ("weights/a.npy", "'<f4'", "(-1,)", {}, "is not stored row by row"),
        ("weights/a.npy", "'<f4'", "(3,)", {}, "damaged or no checkpoint"),
        ("weights/a.npy", "'<f4'", "(0, 999999999999, 999999999999)", {"num_bytes": 0}, "damaged or no"),
        ("weights/a.npy", "'<f4'", "(2,)", {}, "its checksum does not match"),
        ("other/a.npy", "'<f4'", "(2,)", {}, "has 'other/a.npy', which no checkpoint has"),
        ("meta", "'<f4'", "(2,)", {}, "has 'meta', which no checkpoint has"),
    ],
)
def test_impossible_arrays_are_refused(tmp_path, name, descr, shape, more, problem):
    with_member(tmp_path / "x.npz", name, descr, shape, **more)
    check_raises(DataError, problem, "", load_checkpoint, tmp_path / "x.npz")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_refused(tmp_path, value):
    save_checkpoint(tmp_path / "x", {"w": np.full(3, value, np.float32)}, {}, FACTS)
    check_raises(DataError, "'weights/w' is not finite", "", load_checkpoint, tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "checksum", "problem", "hint"),
    [
        ({"format": "other"}, True, "has the format 'other', not", "give a checkpoint"),
        ({"seed": -1}, True, "$.seed", "give a checkpoint"),
        ({"weight_updates": 1e999}, True, "$.weight_updates", "give a checkpoint"),
        ({"position": {"losses": [], "hits": [], "events_done": 2}}, False, "checksum", "give a checkpoint"),
    ],
    ids=str,
)
def test_changed_facts_are_refused_with_and_without_a_matching_checksum(
    tmp_path, change, checksum, problem, hint
):
    path, position = tmp_path / "x.npz", {"losses": [], "hits": [], "events_done": 1}
    save_checkpoint(path, {"w": np.ones(3, np.float32)}, {}, {**FACTS, "position": position})
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files if name != "meta"}
        header = {**json.loads(stored["meta"].tobytes()), **change}
    if checksum:
        header["sha256"] = digest_of(arrays, header)
    np.savez(path, meta=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
    error = check_raises(DataError, problem, hint, load_checkpoint, path)
    assert ("checksum" in error.message) != checksum


@pytest.mark.parametrize("change", ["expands", "lies over others"])
def test_members_that_expand_or_claim_too_much_are_refused_before_memory_is_taken(tmp_path, change):
    import tracemalloc

    path = tmp_path / "x.npz"
    np.savez_compressed(path, meta=np.zeros(2**26, np.uint8))
    if change == "lies over others":
        save_checkpoint(path, {f"w{n}": np.zeros(2**10, np.float32) for n in range(9)}, {}, FACTS)
        sizes = struct.pack("<LL", 2**12 + 128, 2**12 + 128)
        data = path.read_bytes()
        assert data.count(sizes) >= 9
        path.write_bytes(data.replace(sizes, struct.pack("<LL", 2**15, 2**15)))
    tracemalloc.start()
    try:
        check_raises(DataError, "damaged or no checkpoint", "", load_checkpoint, path)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def history(text):
    return {"history": text, "best": None, "last_validation": None}


POSITION = {"losses": [1.5], "hits": [0], "events_done": 1}
COUNTS = ([0, 1, 2**40], [-1, 1.5, "1", None, True, 1e999])
TEXTS = (["", "a"], [None, 1, ["a"]])


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("model", *TEXTS),
        ("dataset", *TEXTS),
        ("data_sha256", *TEXTS),
        ("config", *TEXTS),
        ("seed", *COUNTS),
        ("weight_updates", *COUNTS),
        ("num_eval", *COUNTS),
        ("num_classes", [1, 2], [0, -1, 1.5, True, None]),
        ("class_names", [[], ["a"]], [[1], "a", None]),
        ("mask_values", [[], [0, 255]], [[-1], ["a"], [0.5], None]),
        ("class_colours", [[], [[0, 1, 255]]], [[[0, 1]], [[0, 1, 256]], [0], None]),
        ("input_shape", [[4, 4, 1], [1, 1, 3]], [[4, 4], [4, 4, 1, 1], [4, 0, 1], [4, None, 1], [], "abc"]),
        ("image_shape", [[4, 4, 1], [None, None, 3]], [[4, 4], [4, 4, 1, 1], [4, 4, None], [], [4, "4", 1]]),
        ("std", [[1.0], [0.5, 1e-9, 3]], [[0.0], [1.0, 0, 1], [-1.0], ["1"], 1.0, []]),
        ("mean", [[0.0], [-1.0, 2, 3]], [["0"], 0.0, None, [], [1.0, 2.0], [float("nan")]]),
        ("threads", [1, 2], [0, -1, 2**40]),
        ("run", [history("")], [history(text) for text in ("{}", "[]\n", "{\n", "{}\n1\n", None)] + [{}]),
        (
            "run",
            [history('{"a": 1}\n{}\n')],
            [{**history(""), "best": 1}, {**history(""), "last_validation": []}],
        ),
        ("program", [{}, {"weight_updates_per_epoch": 0, "other": None}], [[], {"fused_micro_batches": -1}]),
        (
            "position",
            [POSITION, {**POSITION, "earlier_losses": [2.0]}],
            [
                {**POSITION, "losses": [float("inf")]},
                {**POSITION, "events_done": -1},
                {**POSITION, "earlier_losses": ["x"]},
                {},
                [],
            ],
        ),
    ],
)
def test_facts_are_distinguished_from_similar_types(tmp_path, name, good, bad):
    path = tmp_path / "x.npz"
    for value in good:
        save_checkpoint(path, {}, {}, {**FACTS, name: value})
        assert load_checkpoint(path).meta[name] == value
    for value in bad:
        save_checkpoint(path, {}, {}, {**FACTS, name: value})
        with pytest.raises(DataError, match=rf"is damaged: .*(\$\.{name}|mean and std)"):
            load_checkpoint(path)


def test_every_fact_is_in_the_table_of_types():
    (table,) = (mark.args[1] for mark in test_facts_are_distinguished_from_similar_types.pytestmark)
    assert {name for name, *_ in table} == set(CheckpointFacts.__struct_encode_fields__)


def test_facts_that_recurse_or_repeat_are_refused():
    from ipucnn.documents import load_record

    for text in ("[" * 100_000, "9" * 5000, '{"a": 1, "a": 2}', "{"):
        with pytest.raises(ValueError):
            load_record(text)
    assert load_record('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


class Variable:
    """Has the part of a tf.Variable that assign_weights needs."""

    def __init__(self, value):
        self.value = np.asarray(value)
        self.shape = self.value.shape

    def assign(self, value):
        self.value = value


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"a": [1.0]}, "no weight b"),
        ({"a": [1.0], "b": [1.0, 2.0], "c": [0.0]}, "has a weight c"),
        ({"a": [1.0], "b": [1.0]}, "b is \\(1,\\)"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(weights, message):
    variables = {"a": Variable([0.0]), "b": Variable([0.0, 0.0])}
    checkpoint = Checkpoint({k: np.array(v) for k, v in weights.items()}, {})
    with pytest.raises(DataError, match=message):
        assign_weights(variables, checkpoint, what="x")
    assert variables["a"].value == [0.0]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    check_raises(DataError, "No space left", "", write_atomically, path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
