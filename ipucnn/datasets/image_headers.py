"""Checks of the tables in image files, before Pillow reads them.

Pillow limits the pixels of an image, which ``images.opened`` sets, but not the sizes that tables claim.  Every entry
of the tables in TIFF and EXIF may point at the same megabyte (65,535 entries of a 1 MB file are 64 GB), and the tiles
of a TIFF are decoded whole, however small its pages are.  This module checks only these cases.
"""

import re
import struct
from typing import Iterator, List, Optional, Set, Tuple

from ipucnn.errors import DataError

_KINDS_BY_BYTES = {1: (1, 2, 6, 7), 2: (3, 8), 4: (4, 9, 11, 13), 8: (5, 10, 12, 16, 17, 18)}
_ENTRY_BYTES = {kind: size for size, kinds in _KINDS_BY_BYTES.items() for kind in kinds}
_SLACK_BYTES = 2**20
MAX_PAGES = 100_000
"""The most pages of a TIFF: a file of 64 MB can hold four million pages that are only headers."""
MAX_EXIF_SEGMENTS = 1000
"""The most EXIF segments of a JPEG: Pillow joins them one by one, in time quadratic in their number."""
_MOST_SHARED = 16
"""The most bytes that all pages of a TIFF may claim, in lengths of the file; pages may share a colour profile."""
_TILE_SIDES = (322, 323)
_SIDE_LAYOUTS = {1: "B", 6: "B", 3: "H", 8: "H", 4: "I", 9: "I", 13: "I", 16: "Q", 17: "Q", 18: "Q"}


def is_tiff(data: bytes) -> bool:
    """Returns whether a file begins with the signature of TIFF."""
    return data[:2] in (b"II", b"MM")


def is_png(data: bytes) -> bool:
    """Returns whether a file begins with the signature of PNG."""
    return data[:8] == b"\x89PNG\r\n\x1a\n"


def check_header(data: bytes, origin: str) -> Tuple[int, int]:
    """Rejects files whose tables would expand in memory.

    Args:
        data: the file.
        origin: the file's name in messages.

    Returns:
        (width, height) of the largest tile of a TIFF; (0, 0) if there are no tiles.

    Raises:
        DataError: the tables claim more bytes than the file has, or overlap, or there are too many of them.
    """
    if is_tiff(data):
        return _check_tables(data, origin, 0)
    tables: List[bytes] = []
    if data[:2] == b"\xff\xd8":
        segments = list(_jpeg_segments(data))
        exif = [part[6:] for marker, part in segments if marker == 0xE1 and part[:6] == b"Exif\0\0"]
        if len(exif) > MAX_EXIF_SEGMENTS:
            raise DataError(
                f"{origin} is damaged: it has more than {MAX_EXIF_SEGMENTS} EXIF segments",
                "get the file again",
            )
        tables = [part[4:] for marker, part in segments if marker == 0xE2 and part[:4] == b"MPF\0"]
        tables.append(b"".join(exif))
    elif is_png(data) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        tables = [part for kind, part, _ in chunks(data) if kind in (b"eXIf", b"EXIF")]
    for table in tables:
        _check_tables(table[6:] if table[:4] == b"Exif" else table, origin, _SLACK_BYTES)
    return 0, 0


_FRAMES = (0xC0, 0xC1, 0xC2)
"""The markers of a JPEG's frame header: sequential or progressive, with Huffman codes."""


def plain_jpeg_size(data: bytes) -> Optional[Tuple[int, int]]:
    """Returns (width, height) of a JPEG with three 8-bit colours that is displayed as it is stored.

    Returns None for every other file, such as one that may have to be turned (EXIF, XMP) or that holds several images.
    """
    size = None
    for marker, part in _jpeg_segments(data) if data[:2] == b"\xff\xd8" else ():
        if marker == 0xE1 or part[:4] == b"MPF\0":
            return None
        if marker in _FRAMES:
            if size is not None or len(part) < 6 or (part[0], part[5]) != (8, 3):
                return None
            size = int.from_bytes(part[3:5], "big"), int.from_bytes(part[1:3], "big")
    return size if size is not None and all(size) else None


_MARKER = re.compile(rb"\xff[^\xff\x00\x01\xd0-\xd9]", re.DOTALL)
"""The marker of a JPEG segment; in a damaged file, megabytes of other bytes may precede one."""


def _jpeg_segments(data: bytes) -> Iterator[Tuple[int, bytes]]:
    """Yields marker and content of each segment before the pixels."""
    match = _MARKER.search(data, 2)
    while match is not None and match.end() + 2 <= len(data):
        marker, at = data[match.end() - 1], match.end()
        if marker == 0xDA:
            return
        length = max(2, int.from_bytes(data[at : at + 2], "big"))
        yield marker, data[at + 2 : at + length]
        match = _MARKER.search(data, at + length)


def chunks(data: bytes) -> Iterator[Tuple[bytes, bytes, bytes]]:
    """Yields type, content and checksum of each chunk of a PNG or RIFF file; the latter has no checksums."""
    has_checksums = is_png(data)
    at = 8 if has_checksums else 12
    while at + 8 <= len(data):
        first, second = struct.unpack_from(">I4s" if has_checksums else "<4sI", data, at)
        kind, length = (second, first) if has_checksums else (first, second)
        end = at + 8 + length
        yield kind, data[at + 8 : end], data[end : end + 4] if has_checksums else b""
        at = end + (4 if has_checksums else length % 2)


def _check_tables(data: bytes, origin: str, slack: int) -> Tuple[int, int]:
    """Follows the tables of a TIFF structure to their end, or to the first damaged one.

    Pillow handles the damage: it rejects the file or reads the entries that are present.

    Returns:
        (width, height) of the largest tile of all pages.

    Raises:
        DataError: the tables claim more bytes than the file has, or overlap, or there are too many of them.
    """
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"\x2b\0", b"\0\x2b")
    count_layout, entry_layout, next_layout = ("Q", "HHQ8s", "Q") if is_big else ("H", "HHI4s", "I")
    entry = struct.Struct(order + entry_layout)
    seen: Set[int] = set()
    num_left, claimed_by_all = len(data) // entry.size, 0
    largest = (0, 0)
    try:
        (at,) = struct.unpack_from(order + next_layout, data, 8 if is_big else 4)
        while at and at not in seen:
            seen.add(at)
            if len(seen) > MAX_PAGES:
                raise DataError(f"{origin} has more than {MAX_PAGES} pages", "cut the volume into several")
            (count,) = struct.unpack_from(order + count_layout, data, at)
            at += struct.calcsize(order + count_layout)
            num_present = min(count, (len(data) - at) // entry.size)
            num_left -= num_present
            if num_left < 0:
                raise DataError(f"{origin} is damaged: its tables lie over one another", "get the file again")
            claimed = 0
            tile = [0, 0]
            for number in range(num_present):
                tag, kind, length, value = entry.unpack_from(data, at + number * entry.size)
                claimed += _ENTRY_BYTES.get(kind, 1) * length
                if tag in _TILE_SIDES:
                    side = _side(data, order, kind, value)
                    tile[_TILE_SIDES.index(tag)] = max(tile[_TILE_SIDES.index(tag)], side)
            claimed_by_all += claimed
            if (
                claimed > len(data) + slack + _SLACK_BYTES
                or claimed_by_all > _MOST_SHARED * len(data) + slack + _SLACK_BYTES
            ):
                raise DataError(
                    f"{origin} is damaged: its table claims {claimed_by_all} bytes, and there are {len(data)}",
                    "get the file again",
                )
            if tile[0] * tile[1] > largest[0] * largest[1]:
                largest = tile[0], tile[1]
            if num_present < count:
                break
            (at,) = struct.unpack_from(order + next_layout, data, at + count * entry.size)
    except struct.error:
        pass
    return largest


def _side(data: bytes, order: str, kind: int, value: bytes) -> int:
    """Returns the integer of an entry, which its last field holds or points to; 0 for a type that libtiff rejects."""
    if kind not in _SIDE_LAYOUTS:
        return 0
    layout = order + _SIDE_LAYOUTS[kind]
    if struct.calcsize(layout) <= len(value):
        return int(struct.unpack_from(layout, value)[0])
    (place,) = struct.unpack(order + "I", value)
    return int(struct.unpack_from(layout, data, place)[0])
