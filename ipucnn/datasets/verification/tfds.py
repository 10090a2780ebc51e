"""Verifying a set in the format of TensorFlow Datasets (TFDS), record by record.

TensorFlow's own reader ends at the first damaged record, so the records are taken from the files here.  A TFRecord file
is a sequence of: length (8 bytes), checksum of the length (4), content, checksum of the content (4), all little-endian.
A checksum is the CRC32C (Castagnoli), rotated by 15 bits, plus a constant
(https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details").
"""

import functools
import struct
from pathlib import Path
from typing import Any, BinaryIO, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from ipucnn.datasets.limits import available_bytes
from ipucnn.datasets.sources import tfds as reader
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.folders import Look, in_order, look_at, take_look
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file, open_regular
from ipucnn.text import printable

_POLYNOMIAL = 0x82F63B78
_ROW_BYTES = 256
_RECORDS = "CRC32C of records"


@functools.lru_cache(maxsize=None)
def _tables() -> Tuple[List[int], Any, List[List[int]]]:
    """The effect of a byte on the checksum, as a list and as an array, and of a row of zeros on each byte of it."""
    table: Any = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    states: Any = np.arange(256, dtype=np.uint32)[np.newaxis] << np.array([[0], [8], [16], [24]], np.uint32)
    for _ in range(_ROW_BYTES):
        states = table[states & 255] ^ (states >> 8)
    return table.tolist(), table, states.tolist()


def crc32c(data: bytes) -> int:
    """The CRC32C of some bytes.

    Rows of 256 bytes are computed beside one another, a column at a time, and joined: the checksum is linear.
    """
    steps, table, (first, second, third, fourth) = _tables()
    state, num_rows = 0xFFFFFFFF, len(data) // _ROW_BYTES
    if num_rows > 1:
        rows: Any = np.frombuffer(data, np.uint8, num_rows * _ROW_BYTES).reshape(num_rows, _ROW_BYTES)
        sums: Any = np.zeros(num_rows, np.uint32)
        for column in np.ascontiguousarray(rows.T):
            sums = table[(sums ^ column) & 255] ^ (sums >> 8)
        for row in sums.tolist():
            state = (
                first[state & 255]
                ^ second[state >> 8 & 255]
                ^ third[state >> 16 & 255]
                ^ fourth[state >> 24]
                ^ row
            )
        data = data[num_rows * _ROW_BYTES :]
    for byte in data:
        state = steps[(state ^ byte) & 255] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The checksum as TFRecord files store it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class Record(NamedTuple):
    """A record of a shard: its content, or what is wrong with it."""

    data: bytes
    code: str = ""
    problem: str = ""
    is_end: bool = False


def read_records(file: BinaryIO, num_bytes: int) -> Iterator[Record]:
    """All records of a TFRecord file of so many bytes; ends with one that says why, where the rest cannot be found."""
    at = 0
    while at < num_bytes:
        head = file.read(12)
        if len(head) < 12:
            yield Record(b"", "truncated", f"{len(head)} bytes where a record's length should be", True)
            return
        length, checksum = struct.unpack("<QI", head)
        if masked_crc32c(head[:8]) != checksum:
            yield Record(b"", "checksum", "its length is damaged: the rest of the file was not read", True)
            return
        at += 12 + length + 4
        if at > num_bytes:
            yield Record(b"", "truncated", f"{at - num_bytes} bytes are missing at the end of the file", True)
            return
        if length > available_bytes() // 2:
            raise DataError(
                f"a record of {length:,} bytes, more than half of the memory", "prepare the set again"
            )
        data = file.read(length)
        (checksum,) = struct.unpack("<I", file.read(4))
        if masked_crc32c(data) != checksum:
            yield Record(b"", "checksum", "the content of the record is damaged")
        else:
            yield Record(data)


class _Shard(NamedTuple):
    """A file of records.

    Attributes:
        path: of the file.
        first: number of its first record among the subset's.
        num_records: that the set's description says it has.
        first_extra: number of the first record beyond those; they come after all that the description knows of.
    """

    path: Path
    first: int
    num_records: int
    first_extra: int

    def number_of(self, record: int) -> int:
        """The number among the subset's of a record of this file."""
        extra = record - self.num_records
        return self.first + record if extra < 0 else self.first_extra + extra


def walk_tfds(survey: Survey, name: str, folder: Path) -> None:
    """Goes over a prepared version of a TFDS set.

    Raises:
        MissingError: tensorflow-datasets is not installed.
        DataError: its description is damaged, or it is no set of 8-bit images with a class each.
    """
    builder, image_key, label_key = reader.open_builder(name, folder)
    survey.class_names = tuple(printable(n) for n in builder.info.features[label_key].names)
    shape = tuple(builder.info.features[image_key].shape)
    splits = builder.info.splits
    chosen = {TRAIN: "train" if "train" in splits else None}
    chosen[EVAL] = next((s for s in reader.EVAL_SPLITS if s in splits and splits[s].num_examples > 0), None)
    if chosen[EVAL] is None:
        survey.find("no-eval-subset", EVAL, f"its parts: {', '.join(splits)}")
    sizes = {subset: splits[split].num_examples for subset, split in chosen.items() if split is not None}
    survey.expect(sizes)
    for subset, split in chosen.items():
        if split is not None:
            _walk_split(survey, subset, splits[split], (image_key, label_key), shape)
    if shape[-1] == 3:
        survey.odd_ones("mode", "odd-mode", usual=("grey", "colour").__contains__)


def _walk_split(
    survey: Survey, subset: str, split: Any, keys: Tuple[str, str], shape: Tuple[Any, ...]
) -> None:
    paths = [Path(str(path)) for path in split.filepaths]
    lengths = [int(length) for length in split.shard_lengths]
    # Where numbers begin: (number, file, record).  Of files without records the next one's begin is the right one.
    begins = [(sum(lengths[:k]), path, 0) for k, path in enumerate(paths)]
    into = survey.subsets[subset]

    def name_of(number: int) -> str:
        begin, path, record = next(entry for entry in reversed(begins) if entry[0] <= number)
        return f"{printable(path.name)}, record {number - begin + record}"

    into.name_of = name_of
    num_there, first_extra = 0, sum(lengths)
    differences: List[Tuple[str, int]] = []
    for (first, path, _), length in zip(list(begins), lengths):
        shard_name = printable(path.name)
        if not is_file(path):
            survey.find("missing-file", subset, shard_name)
            continue
        if ".tfrecord" not in path.name:
            survey.find("not-checked", subset, f"{shard_name}: no TFRecord file")
            num_there += length
            continue
        begins.append((first_extra, path, length))
        try:
            num_records = _walk_shard(survey, subset, _Shard(path, first, length, first_extra), keys, shape)
        except DataError as error:
            survey.note_error(subset, shard_name, error)
            continue
        num_there += num_records
        first_extra += max(num_records - length, 0)
        if num_records != length:
            differences.append((f"{shard_name}: {num_records:,} of {length:,}", num_records - length))
    into.num_stored = num_there
    expected = survey.known.counts.get(subset, num_there)
    for text, difference in differences:
        # What differs from the published number is counted where all subsets are compared with it.
        is_counted = (num_there - expected) * difference > 0
        code = "fewer-samples" if difference < 0 else "more-samples"
        survey.find(code, subset, text, 0 if is_counted else abs(difference))


class _Item(NamedTuple):
    """A record on its way: with an image, or with the code and text of what is wrong with it.

    Where the rest of a file cannot be read, its end is on the way, too, and is no sample.
    """

    record: int
    label: int
    image: bytes
    is_wanted: bool
    code: str = ""
    problem: str = ""
    is_end: bool = False


def _walk_shard(
    survey: Survey, subset: str, shard: _Shard, keys: Tuple[str, str], shape: Tuple[Any, ...]
) -> int:
    """Hands the records of a shard to the survey; how many there are."""
    num_records = 0

    def items(file: BinaryIO, num_bytes: int) -> Iterator[_Item]:
        nonlocal num_records
        position = survey.num_done
        for record in read_records(file, num_bytes):
            at = num_records
            if record.code != "truncated":  # of which there is no checksum to compare
                survey.check(_RECORDS, record.code != "checksum")
            if record.is_end:
                yield _Item(at, -1, b"", False, record.code, record.problem, True)
                return
            num_records += 1
            if not survey.subsets[subset].is_chosen(shard.number_of(at)):
                continue
            if record.code:
                yield _Item(at, -1, b"", False, record.code, record.problem)
            else:
                image, label = _parse(record.data, *keys)
                lacks = "" if image is not None else f"it lacks {keys[0]} or {keys[1]}"
                code = "unreadable" if lacks else ""
                yield _Item(at, label, image or b"", survey.wants(position), code, lacks)
            position += 1

    def look(item: _Item) -> Optional[Look]:
        return (
            None if item.code else look_at(item.image, "image", item.is_wanted, survey.max_pixels, channels)
        )

    channels = int(shape[-1])
    with open_regular(shard.path) as file:
        for item, result in in_order(look, items(file, file_size(shard.path))):
            name = f"{printable(shard.path.name)}, record {item.record}"
            try:
                looked = result()
            except DataError as error:
                survey.note_error(subset, name, error, said="image")
                looked = None
            if item.code:
                survey.find(item.code, subset, f"{name}: {item.problem}")
            if looked is None:
                if not item.is_end:
                    survey.passed(subset)
                continue
            if None not in shape and looked.size != shape[:2]:
                survey.find(
                    "wrong-shape",
                    subset,
                    f"{name}: {looked.size[0]}x{looked.size[1]}, not {shape[0]}x{shape[1]}",
                )
            take_look(survey, subset, shard.number_of(item.record), item.label, looked, name)
    return num_records


def _parse(data: bytes, image_key: str, label_key: str) -> Tuple[Optional[bytes], int]:
    """The encoded image and the class of a record; None where it lacks one of them."""
    import tensorflow as tf

    try:
        features = tf.train.Example.FromString(data).features.feature
        return features[image_key].bytes_list.value[0], int(features[label_key].int64_list.value[0])
    except Exception:  # protobuf has an error of its own, and an empty list is an IndexError
        return None, -1
