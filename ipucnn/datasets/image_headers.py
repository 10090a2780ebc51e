"""The parts of JPEG, PNG, WebP, TIFF and BMP files, without decoding them."""

import re
import struct
import zlib
from typing import Iterator, NamedTuple, Optional, Set, Tuple


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


_UNREAD = (
    ("AVIF", rb"....ftyp(.{4}){0,6}avi[fs]"),
    ("HEIF, in which phones save photographs (.heic)", rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)"),
    ("JPEG 2000", rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"),
    ("JPEG XL", rb"\xff\x0a|\0\0\0\x0cJXL "),
    ("a drawing (SVG)", rb"\s*(<[?!][^>]*>\s*)*<svg[\s>]"),
    ("a document (PDF)", rb"%PDF-"),
    ("a document (PostScript)", rb"%!PS|\xc5\xd0\xd3\xc6"),
    ("an image of layers (PSD)", rb"8BPS"),
    ("DICOM", rb".{128}DICM"),
)
_NO_IMAGE = (
    ("a web page (HTML)", rb"\s*(<!--[^>]*>\s*)*<(!doctype html|html|head|body)\b"),
    ("a pointer of Git LFS", rb"version https://git-lfs"),
    ("an archive (zip)", rb"PK\x03\x04"),
    ("an archive (gzip)", rb"\x1f\x8b"),
    ("an array (NumPy)", rb"\x93NUMPY"),
)


class Content(NamedTuple):
    """What a file that is not read has in it, by its first bytes; ``is_image`` says whether it can be converted."""

    name: str
    is_image: bool


def content_of(data: bytes) -> Optional[Content]:
    """Returns what a file has in it that is no image in a known format; None if that is not known either."""
    for kinds, is_image in ((_UNREAD, True), (_NO_IMAGE, False)):
        for name, pattern in kinds:
            if re.match(pattern, data[:1024], re.DOTALL | re.IGNORECASE):
                return Content(name, is_image)
    return None


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


_TABLES, HOLE = 0xC4, bytes(64)


def has_hole(data: bytes) -> bool:
    """Returns whether bytes are missing in the coded data of a sequential JPEG: zeros in their place, which decode.

    The first code of a table of a block's coefficients is all zeros.  Where it does not end a block, hundreds of zero
    bits would be blocks in which each coefficient has this value, as no image has.
    """
    if HOLE not in data:
        return False
    begin, is_sequential, has_other = 0, False, False
    for marker, start, end in _jpeg_places(data):
        if marker == _TABLES:
            while start + 17 < min(end, len(data)):
                count = sum(data[start + 1 : start + 17])
                has_other |= bool(data[start] >> 4 and data[start + 17 : start + 18] != b"\0")
                start += 17 + count
        is_sequential |= marker in (0xC0, 0xC1)
        if marker in (SCAN, _END) and begin and HOLE in data[begin:start]:
            return is_sequential and has_other
        if marker == _END:
            return False
        begin = end if marker == SCAN else begin
    # Without an end, zeros behind the scan may be padding; decoding tells.
    return begin > 0 and is_sequential and has_other and HOLE in data[begin:].rstrip(b"\0")


def tiff_tables_are_whole(data: bytes) -> bool:
    """Returns whether each table of a TIFF, and so each page, lies in the file: readers skip those beyond its end."""
    order = "<" if data[:2] == b"II" else ">"
    is_big = b"+" in data[2:4]
    number, count, entry = ("Q", "Q", 20) if is_big else ("I", "H", 12)
    place = 8 if is_big else 4
    seen: Set[int] = set()
    try:
        (at,) = struct.unpack_from(order + number, data, place)
        while at and at not in seen:
            seen.add(at)
            (entries,) = struct.unpack_from(order + count, data, at)
            (at,) = struct.unpack_from(
                order + number, data, at + struct.calcsize(order + count) + entries * entry
            )
    except struct.error:
        return False
    return True


def png_rows_are_whole(data: bytes) -> bool:
    """Returns whether a PNG has the data of all its rows; decoders leave the others black."""
    width, height, depth, colour, _, _, is_interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    passes = [(0, 0, 1, 1)]
    if is_interlaced:
        passes = [
            (0, 0, 8, 8),
            (4, 0, 8, 8),
            (0, 4, 4, 8),
            (2, 0, 4, 4),
            (0, 2, 2, 4),
            (1, 0, 2, 2),
            (0, 1, 1, 2),
        ]
    expected = 0
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        expected += rows * (1 + (columns * bits + 7) // 8) if columns > 0 and rows > 0 else 0
    reader, found = zlib.decompressobj(), 0
    for kind, content, _ in chunks(data):
        while kind == b"IDAT" and content and not reader.eof:
            found += len(reader.decompress(content, _PIECE))
            content = reader.unconsumed_tail
    return found >= expected


_PIECE = 2**20


def bmp_grey_table(data: bytes) -> Optional[int]:
    """Returns the place of the second colour of a BMP whose numbers versions of Pillow misread; None for others.

    Pillow takes a table of black and white alone for single bits, and one of the first greys for 8, whatever the number
    of bits of a pixel.
    """
    if data[:2] != b"BM" or len(data) < 54:
        return None
    (header,) = struct.unpack_from("<I", data, 14)
    (bits,) = struct.unpack_from("<H", data, 24 if header == 12 else 28)
    size = 3 if header == 12 else 4
    count = struct.unpack_from("<I", data, 46)[0] if header >= 40 else 0
    table = data[14 + header :][: size * (count or 2**bits)] if bits in (4, 8) else b""
    colours = {table[at : at + 3] for at in range(0, len(table), size)}
    is_grey = len(table) >= 2 * size and all(len(set(colour)) == 1 for colour in colours)
    return 14 + header + size if is_grey and (bits == 4 or len(table) == 2 * size) else None


def is_run_length_bmp(data: bytes) -> bool:
    """Returns whether a BMP is compressed by run lengths."""
    return (
        data[:2] == b"BM"
        and len(data) >= 34
        and struct.unpack_from("<I", data, 14)[0] >= 40
        and data[30] in (1, 2)
    )


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
