"""The parts of JPEG, PNG and WebP files, without decoding them."""

import re
import struct
from typing import Iterator, Optional, Tuple


def is_tiff(data: bytes) -> bool:
    """Returns whether a file begins with the signature of TIFF."""
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def is_png(data: bytes) -> bool:
    """Returns whether a file begins with the signature of PNG."""
    return data[:8] == b"\x89PNG\r\n\x1a\n"


def is_jpeg(data: bytes) -> bool:
    """Returns whether a file begins with the signature of JPEG."""
    return data[:3] == b"\xff\xd8\xff"


def is_webp(data: bytes) -> bool:
    """Returns whether a file begins with the signature of WebP."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


_FRAMES = (0xC0, 0xC1, 0xC2)
"""The markers of a JPEG's frame header: sequential or progressive, with Huffman codes."""
PROGRESSIVE = 0xC2
SCAN = 0xDA
APP1 = 0xE1


def plain_jpeg_size(data: bytes) -> Optional[Tuple[int, int]]:
    """Returns (width, height), as stored, of a JPEG with three 8-bit colours.

    Returns None for every other file, such as one that holds several images.
    """
    size = None
    for marker, part in jpeg_segments(data) if data[:2] == b"\xff\xd8" else ():
        if part[:4] == b"MPF\0":
            return None
        if marker in _FRAMES:
            if size is not None or len(part) < 6 or (part[0], part[5]) != (8, 3):
                return None
            size = int.from_bytes(part[3:5], "big"), int.from_bytes(part[1:3], "big")
    return size if size is not None and all(size) else None


_MARKER = re.compile(rb"\xff[^\xff\x00\x01\xd0-\xd8]", re.DOTALL)
"""The marker of a JPEG segment or the end; in a damaged file, megabytes of other bytes may precede one."""


def jpeg_segments(data: bytes) -> Iterator[Tuple[int, bytes]]:
    """Yields marker and content of each segment before the pixels."""
    for marker, begin, end in _jpeg_places(data):
        if marker in (SCAN, _END):
            return
        yield marker, data[begin:end]


_END = 0xD9


def _jpeg_places(data: bytes) -> Iterator[Tuple[int, int, int]]:
    """Yields marker, begin and end of the content of each segment, up to the first marker of the end."""
    match = _MARKER.search(data, 2)
    while match is not None:
        marker, at = data[match.end() - 1], match.end()
        length = 0 if marker == _END else max(2, int.from_bytes(data[at : at + 2], "big"))
        yield marker, at + 2 if length else at, at + length
        if marker == _END:
            return
        match = _MARKER.search(data, at + length)


def jpeg_coding(data: bytes) -> Tuple[bool, Optional[int]]:
    """Returns whether a JPEG is progressive, and the place of the marker that ends it; None if there is none."""
    is_progressive = False
    for marker, begin, _ in _jpeg_places(data):
        is_progressive |= marker == PROGRESSIVE
        if marker == _END:
            return is_progressive, begin - 2
    return is_progressive, None


def webp_first_frame(data: bytes) -> Optional[Tuple[int, int, int, int]]:
    """Returns the box (left, top, right, bottom) of the first frame of an animated WebP; None for a still image."""
    content = next((content for kind, content, _ in chunks(data) if kind == b"ANMF"), b"")
    if len(content) < 12:
        return None
    x, y, width, height = (int.from_bytes(content[at : at + 3], "little") for at in (0, 3, 6, 9))
    return 2 * x, 2 * y, 2 * x + width + 1, 2 * y + height + 1


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
