"""Writers of TIFF and PNG files of any form, by hand, so that readers are tested without their own library's writer."""

import struct
import zlib

import numpy as np

SHORT, LONG = 3, 4


def packed(samples, depth, order="<"):
    """Returns rows of samples [h, w, bands]; depths below 8 fill bytes from the highest bit, each row on its own."""
    if depth >= 8 and depth % 8 == 0:
        return np.ascontiguousarray(samples).astype(samples.dtype.newbyteorder(order)).tobytes()
    rows = samples.reshape(len(samples), -1).astype(np.int64)
    bits = (rows[..., np.newaxis] >> np.arange(depth - 1, -1, -1)) & 1
    return np.packbits(bits.reshape(len(rows), -1).astype(np.uint8), axis=1).tobytes()


def tiff_page(samples, tags=(), depth=None):
    """Returns a page for ``tiff``: samples [h, w] or [h, w, bands] and more tags, {number: (type, values or bytes)}.

    A tag that is None is left out.
    """
    samples = np.asarray(samples)
    return (samples[..., np.newaxis] if samples.ndim == 2 else samples), dict(tags), depth


def tiff(*pages, order="<", compress=None, compression=1, planar=False, rows_per_strip=None):
    """Returns a TIFF of pages from ``tiff_page``.

    Args:
        order: "<" for II, ">" for MM.
        compress, compression: function of a strip's bytes, and its number in the tag.
        planar: whether each band has a plane of its own.
        rows_per_strip: rows of a strip; None: all.
    """
    out = bytearray((b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 0))
    link = 4
    for samples, extra, given_depth in pages:
        height, width, bands = samples.shape
        depth = given_depth or samples.dtype.itemsize * 8
        rows = rows_per_strip or height
        planes = [samples[..., k : k + 1] for k in range(bands)] if planar else [samples]
        strips = [
            packed(plane[top : top + rows], depth, order)
            for plane in planes
            for top in range(0, height, rows)
        ]
        offsets = []
        for k, strip in enumerate(strips):
            strips[k] = strip if compress is None else compress(strip)
            offsets.append(len(out))
            out += strips[k] + b"\0" * (len(strips[k]) % 2)
        tags = {
            256: (LONG, [width]), 257: (LONG, [height]), 258: (SHORT, [depth] * bands), 259: (SHORT, [compression]),
            262: (SHORT, [2 if bands >= 3 else 1]), 273: (LONG, offsets), 277: (SHORT, [bands]), 278: (LONG, [rows]),
            279: (LONG, [len(strip) for strip in strips]), 284: (SHORT, [2 if planar else 1]),
            339: (SHORT, [{"u": 1, "b": 1, "i": 2, "f": 3}[samples.dtype.kind]] * bands), **extra,
        }  # fmt: skip
        entries = []
        for number, (kind, values) in sorted(entry for entry in tags.items() if entry[1] is not None):
            layout = {SHORT: "H", LONG: "I"}.get(kind)
            raw = values if layout is None else struct.pack(order + layout * len(values), *values)
            entry = struct.pack(order + "HHI", number, kind, len(values))
            if len(raw) > 4:
                entry, raw = entry + struct.pack(order + "I", len(out)), raw + b"\0" * (len(raw) % 2)
                out += raw
            else:
                entry += raw.ljust(4, b"\0")
            entries.append(entry)
        struct.pack_into(order + "I", out, link, len(out))
        out += struct.pack(order + "H", len(entries)) + b"".join(entries)
        link = len(out)
        out += b"\0\0\0\0"
    return bytes(out)


def png(samples, depth, colour_type, *chunks):
    """Returns a PNG without filters, from samples [h, w] or [h, w, bands] and (name, content) of more chunks."""

    def chunk(name, content):
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    samples = np.asarray(samples)
    samples = samples[..., np.newaxis] if samples.ndim == 2 else samples
    kind = np.uint16 if depth == 16 else np.uint8
    rows = b"".join(b"\0" + packed(row[np.newaxis].astype(kind), depth, ">") for row in samples)
    header = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, content) for name, content in parts)


def gif(canvas, corner, indices, palette, transparent=None):
    """Returns a GIF whose only frame may be smaller than its canvas.

    Args:
        canvas: (height, width).
        corner: (top, left) of the frame.
        indices: entries of the palette, 0 to 3: [h, w].
        palette: four colours.
        transparent: the entry that is transparent, or None.
    """
    height, width = np.shape(indices)
    codes = [4]  # codes of three bits, which a code to start anew (4) before each second pixel keeps as short
    for number, entry in enumerate(np.ravel(indices).tolist()):
        codes += [4, entry] if number and number % 2 == 0 else [entry]
    bits = [code >> place & 1 for code in [*codes, 5] for place in range(3)]
    data = np.packbits(bits, bitorder="little").tobytes()
    blocks = b"".join(
        bytes([len(data[at : at + 255])]) + data[at : at + 255] for at in range(0, len(data), 255)
    )
    control = b"" if transparent is None else b"\x21\xf9\4\1\0\0" + bytes([transparent, 0])
    return (
        b"GIF89a" + struct.pack("<HHBBB", canvas[1], canvas[0], 0xF1, 0, 0) + bytes(np.ravel(palette).tolist())
        + control + b"," + struct.pack("<HHHHB", corner[1], corner[0], width, height, 0) + b"\2" + blocks + b"\0;"
    )  # fmt: skip


def exif(orientation):
    """Returns EXIF data with one tag: the orientation."""
    return b"MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHIHH", 0x0112, SHORT, 1, orientation, 0) + bytes(4)


def turned(orientation):
    """Returns the options of Pillow that write such data."""
    return {"exif": b"Exif\0\0" + exif(orientation)}


def packbits(data):
    """Returns data in the compression PackBits, without repetitions."""
    pieces = [data[at : at + 128] for at in range(0, len(data), 128)]
    return b"".join(bytes([len(piece) - 1]) + piece for piece in pieces)
