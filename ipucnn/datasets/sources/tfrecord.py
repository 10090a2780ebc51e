"""Reads TFRecord files and the ``tf.train.Example`` messages in them at any position, without TensorFlow.

A file is a sequence of: length (8 bytes), checksum of the length (4), content, checksum of the content (4), all
little-endian.  A checksum is the CRC32C (Castagnoli), rotated by 15 bits, plus a constant
(https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details").  The content is a message of
protobuf (https://protobuf.dev/programming-guides/encoding; tensorflow/core/example/example.proto and feature.proto):
Example{1: Features{1: map entries{1: name, 2: Feature{1: BytesList, 2: FloatList or 3: Int64List}}}}; each list is
{1: values}.
"""

import os
import struct
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import google_crc32c

from ipucnn.datasets.limits import LARGEST_FILE_BYTES, TOO_LARGE
from ipucnn.errors import DataError
from ipucnn.filesystem import open_regular, shown

HEAD_BYTES = 12
FRAME_BYTES = 16
"""The bytes of a record in its file, without its content."""
AGAIN = "copy, download or build the file again"
_FEW_BYTES = 512

Feature = Union[bytes, int]
Read = Callable[[int, int], bytes]
"""A function of a position and a size that returns at most that many bytes of a message, in memory or in a file."""


# -- checksums ------------------------------------------------------------------------------------------------


def masked_crc32c(data: bytes) -> int:
    """Returns the checksum of some bytes as TFRecord files store it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# -- records --------------------------------------------------------------------------------------------------


_Place = Tuple[Union[str, Path], int, int]


def _damaged(place: _Place, problem: str, code: str) -> DataError:
    return DataError(f"{place_of(*place)}: {problem}", AGAIN, code)


def _length(head: bytes, place: _Place, num_bytes: int) -> int:
    """Returns the length of a record that begins with ``head``, in a file of ``num_bytes``.

    Raises DataError if the record is truncated or the checksum of its length is wrong.
    """
    if len(head) < HEAD_BYTES:
        text = f"truncated: {len(head)} bytes where a record's length should be"
        raise _damaged(place, text, "truncated")
    length, checksum = struct.unpack("<QI", head)
    if masked_crc32c(head[:8]) != checksum:
        text = "the checksum of its length is wrong, so the rest of the file cannot be read"
        raise _damaged(place, text, "checksum")
    missing = place[2] + length + FRAME_BYTES - num_bytes
    if missing > 0:
        text = f"truncated: {missing} bytes are missing at the end of the file"
        raise _damaged(place, text, "truncated")
    return int(length)


def place_of(path: Union[str, Path], number: int, at: int) -> str:
    """Returns the name of a record in messages: its file, its number from 0, and the byte at which it begins."""
    return f"{shown(path)}, record {number} at byte {at}"


def read_record(path: str, number: int, at: int) -> bytes:
    """Reads the content of the record that begins at byte ``at`` of a file.

    Raises:
        DataError: the record is truncated, has a wrong checksum, or is too large; the message names file and record.
    """
    place = (path, number, at)
    with open_regular(Path(path)) as file:
        handle = file.fileno()
        length = _length(os.pread(handle, HEAD_BYTES, at), place, os.fstat(handle).st_size)
        if length > LARGEST_FILE_BYTES:
            raise _damaged(place, f"{length:,} bytes, more than an image can have", TOO_LARGE)
        record = os.pread(handle, length + FRAME_BYTES, at)
    if len(record) < length + FRAME_BYTES:
        text = "truncated: the file became shorter while it was read"
        raise _damaged(place, text, "truncated")
    content = record[HEAD_BYTES:-4]
    if masked_crc32c(content) != int.from_bytes(record[-4:], "little"):
        raise _damaged(place, "the checksum of its content is wrong", "checksum")
    return content


def read_example(path: str, number: int, at: int, names: Mapping[str, type]) -> Dict[str, Feature]:
    """Reads the value of each named feature from the Example in a record; see :func:`read_record`.

    Args:
        path, number, at: the record's file, its number from 0, and the byte at which it begins.
        names: names of the features, with their type, ``bytes`` or ``int``.

    Raises:
        DataError: the record is damaged, or is no Example with these features.
    """
    content = read_record(path, number, at)
    try:
        return features_of(content, names)
    except BadExample as error:
        raise DataError(f"{place_of(path, number, at)} is no image: {error}", AGAIN, "unreadable") from None


ScannedRecord = Tuple[int, int, int, Read]
"""A record's number, the byte at which it begins, the length of its content, and what reads the content."""


def scan_records(path: Path) -> Iterator[ScannedRecord]:
    """Finds the records of a file, and reads only their lengths and the parts that the caller reads.

    Yields:
        The record's number, the byte at which it begins, the length of its content, and a function that reads the
        content: at a position in it, at most a number of bytes.

    Raises:
        DataError: a record is truncated, or the checksum of its length is wrong; the message names file and record.
    """
    with open_regular(path) as file:
        handle = file.fileno()
        num_bytes = os.fstat(handle).st_size
        block, begin = b"", 0

        def read(place: int, size: int) -> bytes:
            nonlocal block, begin
            if not begin <= place <= place + size <= begin + len(block):
                block, begin = os.pread(handle, max(size, _FEW_BYTES), place), place
            return block[place - begin : place - begin + size]

        at = number = 0
        while at < num_bytes:
            length = _length(read(at, HEAD_BYTES), (path, number, at), num_bytes)
            content = at + HEAD_BYTES
            yield number, at, length, lambda place, size, content=content: read(content + place, size)  # type: ignore[misc]
            at += length + FRAME_BYTES
            number += 1


def frame(data: bytes) -> bytes:
    """Returns a record in the format of the file: length, content and both checksums."""
    head = struct.pack("<Q", len(data))
    return b"".join(
        [head, struct.pack("<I", masked_crc32c(head)), data, struct.pack("<I", masked_crc32c(data))]
    )


# -- examples -------------------------------------------------------------------------------------------------


class BadExample(ValueError):
    """Reports a message that is no ``tf.train.Example``, or lacks a feature."""


_VARINT, _DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT_BYTES = 10


def _varint(read: Read, at: int) -> Tuple[int, int]:
    """Reads a number with 7 bits per byte, lowest first; returns it and its end."""
    value = 0
    for k, byte in enumerate(read(at, _VARINT_BYTES)):
        value |= (byte & 127) << 7 * k
        if byte < 128:
            return value & (2**64 - 1), at + k + 1
    raise BadExample("a number in it has no end")


def _fields(read: Read, at: int, end: int) -> Iterator[Tuple[int, int, int]]:
    """Yields number, begin and end of the content of each field of a message.

    The content is a message, a text, packed numbers, or a plain number, which has no length before it.
    """
    while at < end:
        key, at = _varint(read, at)
        number, kind = key >> 3, key & 7
        if kind == _DELIMITED:
            length, at = _varint(read, at)
        elif kind == _VARINT:
            length = _varint(read, at)[1] - at
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise BadExample(f"a field in it is of the unknown kind {kind}")
        if at + length > end:
            raise BadExample("a field in it is longer than the message")
        yield number, at, at + length
        at += length


def read_features(read: Read, length: int, names: Mapping[str, type]) -> Dict[str, Feature]:
    """Reads the value of each named feature of an Example, and skips the rest of the message.

    Args:
        read: function that reads bytes of the message.
        length: length of the message.
        names: names of the features, with their type, ``bytes`` or ``int``.

    Raises:
        BadExample: the message is no Example, or a feature is absent, empty, of several values or of another type.
    """
    values: Dict[str, Feature] = {}
    for number, begin, end in _fields(read, 0, length):
        for entry, entry_begin, entry_end in _fields(read, begin, end) if number == 1 else ():
            if entry != 1:
                continue
            name, feature = "", None
            for part, part_begin, part_end in _fields(read, entry_begin, entry_end):
                if part == 1 and part_end - part_begin <= _FEW_BYTES:
                    name = read(part_begin, part_end - part_begin).decode("utf-8", "replace")
                elif part == 2:
                    feature = part_begin, part_end
            if name in names and feature is not None:
                value = _only_value(read, name, *feature)
                if value is not None and isinstance(value, names[name]):
                    values[name] = value
                if len(values) == len(names):
                    return values
    for name in names:
        if name not in values:
            raise BadExample(f"it lacks {name}")
    return values


def _only_value(read: Read, name: str, begin: int, end: int) -> Optional[Feature]:
    values: List[Feature] = []
    for kind, list_begin, list_end in _fields(read, begin, end):
        for number, at, value_end in _fields(read, list_begin, list_end):
            if number == 1 and kind == 1:
                values.append(read(at, value_end - at))
            while (
                number == 1 and kind == 3 and at < value_end and len(values) < 2
            ):  # packed numbers, or a plain one
                value, at = _varint(read, at)
                values.append(value - 2**64 if value >= 2**63 else value)
            if len(values) > 1:
                raise BadExample(f"it has several values of {name}")
    return values[0] if values else None


def features_of(data: bytes, names: Mapping[str, type]) -> Dict[str, Feature]:
    """Calls :func:`read_features` for a message in memory."""
    return read_features(lambda at, size: data[at : at + size], len(data), names)


def make_example(features: Mapping[str, Feature]) -> bytes:
    """Returns an Example of features with one value each, sorted by name, so that equal values give equal bytes."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | _DELIMITED]) + _as_varint(len(content)) + content

    entries = []
    for name, value in sorted(features.items()):
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        else:
            feature = field(3, field(1, _as_varint(value % 2**64)))
        entries.append(field(1, field(1, name.encode()) + field(2, feature)))
    return field(1, b"".join(entries))


def _as_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
