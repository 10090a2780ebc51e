"""A table of forms: each file is written from a known array, and what the decoder makes of it is compared with that.

Files are written by hand, or by a library that the decoder does not use for them.  Where tifffile writes them, OpenCV
or Pillow reads them as well.
"""

import io
import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.data_sets import encode
from support.image_files import LONG, SHORT, exif, gif, packbits, png, tiff, tiff_page

from ipucnn.datasets import forms
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.images import decode_for_training, pixels_for_evaluation
from ipucnn.datasets.problems import Problem
from ipucnn.datasets.segmentation.imagemasks import Pair, image_pixels, pages
from ipucnn.datasets.segmentation.masks import MaskClasses, MaskSet
from ipucnn.datasets.sources.record_builder import make_record
from ipucnn.datasets.verification.readers import decode_image
from ipucnn.errors import DataError
from ipucnn.runs.images.inputs import file_pages

HEIGHT, WIDTH = 9, 14
RAMP = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 2 + 1).astype(np.uint8)
"""Grey of 1, 3, 5, ..., different in every pixel, so that a turned or mirrored image is another one."""
COLOUR = np.stack([RAMP, RAMP[::-1] // 2, 255 - RAMP], -1)
OPACITY = (RAMP // 3 * 3).astype(np.uint8)
CLASSES = (RAMP // 70).astype(np.uint8)


def stretched(numbers, is_counted=True):
    """Stretches numbers one by one in exact arithmetic: what docs/pixels.md says."""
    values = [Fraction(value) for value in np.asarray(numbers).reshape(-1).tolist()]
    counts = np.reshape(is_counted, np.shape(is_counted) + (1,) * (np.ndim(numbers) - np.ndim(is_counted)))
    counts = np.broadcast_to(counts, np.shape(numbers)).reshape(-1)
    order = sorted(value for value, is_counted in zip(values, counts) if is_counted)
    cut = (len(order) - 1) // 1000
    dark, bright = order[cut], order[len(order) - 1 - cut]
    if dark == bright:
        dark, bright = order[0], order[-1]
    width = bright - dark or 1
    pixels = [int(255 * (min(max(value, dark), bright) - dark) / width + Fraction(1, 2)) for value in values]
    return np.array(pixels, np.uint8).reshape(np.shape(numbers))


def on_white(pixels, opacity):
    """Lays 8-bit pixels over white."""
    share = opacity[..., np.newaxis] / 255
    colours = pixels if pixels.ndim == 3 else np.repeat(pixels[..., np.newaxis], 3, -1)
    return colours * share + 255 * (1 - share)


class Row:
    """A form.

    Attributes:
        data: the file.
        shown: pixels of a class-folder image, uint8 [h, w] or [h, w, 3], or the words of its refusal.
        pair: pixels of an image beside a mask, or the words; None: those of ``shown``.
        mask: stored numbers of a mask, or the words.
        within: the largest difference of pixels: 0, or 1 where transparency is rounded.
    """

    def __init__(self, data, shown, mask, pair=None, within=0):
        self.data, self.shown, self.mask, self.within = data, shown, mask, within
        self.pair = shown if pair is None else pair


TABLE = {}
FLOATS, TRANSPARENT, INKS = "floating-point", "transparen", "CMYK"


def page_tags(photometric, *extra):
    tags = {262: (SHORT, [photometric])}
    if extra:
        tags[338] = (SHORT, list(extra))
    return tags


# -- TIFF: depth x sign x photometric interpretation x byte order

for dtype in ("u1", "u2", "u4", "i1", "i2", "i4", "f2", "f4", "f8"):
    for photometric in (0, 1):
        for order in "<>":
            kind, bits = dtype[0], 8 * int(dtype[1])
            if kind == "u":
                stored = RAMP.astype(dtype) if bits == 8 else RAMP.astype(dtype) * 16 + 7
                bright = stored if photometric else 2**bits - 1 - stored.astype(object)
            elif kind == "i":
                stored = (RAMP.astype(int) - 128).astype(dtype) if bits == 8 else RAMP.astype(dtype) * 9 - 500
                bright = stored.astype(int) if photometric else -1 - stored.astype(int)
            else:
                stored = RAMP.astype(dtype) / 4 - 10
                bright = stored.astype(float) if photometric else -stored.astype(float)
            as_bytes = (np.asarray(bright).astype(int) + 128 * (kind == "i")).astype(np.uint8)
            shown = stretched(bright) if bits > 8 else as_bytes
            mask = {"u": stored, "i": "values from -", "f": FLOATS}[kind]
            TABLE[f"tiff {dtype} photometric {photometric} {order}"] = Row(
                tiff(tiff_page(stored, page_tags(photometric)), order=order), shown, mask
            )
SIGNED = RAMP.astype("i2") * 100
TABLE["tiff i2 without negative values"] = Row(tiff(tiff_page(SIGNED)), stretched(RAMP), SIGNED)

# -- TIFF: few bits, and 12

for bits in (1, 2, 4, 6, 12):
    for photometric in (0, 1):
        most = 2**bits - 1
        stored = (RAMP.astype(int) * 13 + 5) % (most + 1)
        bright = stored if photometric else most - stored
        scaled = np.vectorize(
            lambda value, most=most: int(Fraction(255 * int(value), most) + Fraction(1, 2))
        )(bright)
        shown = stretched(bright) if bits > 8 else scaled.astype(np.uint8)
        mask = stored
        if bits == 1:
            mask = np.where(stored, 255, 0) if photometric else "which is the foreground is not known"
        kind = np.uint16 if bits > 8 else np.uint8
        TABLE[f"tiff {bits} bits photometric {photometric}"] = Row(
            tiff(tiff_page(stored.astype(kind), page_tags(photometric), bits)), shown, mask
        )

# -- TIFF: colour of any depth, in one plane or three, with extra bands

for dtype, scale in (("u1", 1), ("u2", 16), ("u4", 1000), ("f4", 0.5)):
    for planar in (False, True):
        colours = (COLOUR.astype(float) * scale).astype(dtype)
        most = 1.0 if dtype == "f4" else np.iinfo(dtype).max
        bits = 8 * int(dtype[1])
        plain = COLOUR if bits == 8 else stretched(colours)
        mask = FLOATS if dtype == "f4" else COLOUR if bits == 8 else "values from 0"
        name = f"tiff {dtype} RGB" + " planes" * planar
        TABLE[name] = Row(tiff(tiff_page(colours, page_tags(2)), planar=planar), plain, mask)
        share = (OPACITY / 255 * most).astype(dtype)
        visible = OPACITY if bits == 8 or dtype == "f4" else np.rint(share / most * 255)
        seen = COLOUR if bits == 8 else stretched(colours, OPACITY > 0)
        opaque = np.full(RAMP.shape, most, dtype)
        for words, band, extra, result, of_mask in (
            ("opaque", opaque, [2], plain, mask),
            ("opaque premultiplied", opaque, [1], plain, mask),
            ("alpha", share, [2], on_white(seen, visible), FLOATS if dtype == "f4" else TRANSPARENT),
            ("padded with 0", opaque * 0, [0], plain, mask),
            ("padded, unnamed", opaque if dtype != "f4" else opaque * 0, [], plain, mask),
            ("fourth band", share, [0], "band 4", "band 4"),
            ("unnamed fourth band", share, [], "band 4", "band 4"),
        ):
            data = tiff(tiff_page(np.dstack([colours, band]), page_tags(2, *extra)), planar=planar)
            pair = TRANSPARENT if words == "alpha" else None
            TABLE[f"{name}, {words}"] = Row(data, result, of_mask, pair, within=1)
alpha = OPACITY[..., np.newaxis].astype(int)
premultiplied = np.dstack([COLOUR * alpha // 255, OPACITY]).astype(np.uint8)
TABLE["tiff RGB premultiplied"] = Row(
    tiff(tiff_page(premultiplied, page_tags(2, 1))),
    premultiplied[..., :3].astype(int) + 255 - alpha,
    TRANSPARENT,
    TRANSPARENT,
)
TABLE["tiff u2 RGB premultiplied"] = Row(
    tiff(tiff_page(premultiplied.astype("u2") * 257, page_tags(2, 1))), *["premultiplied"] * 3
)
TABLE["tiff grey with alpha"] = Row(
    tiff(tiff_page(np.dstack([RAMP, OPACITY]), page_tags(1, 2))),
    on_white(RAMP, OPACITY),
    TRANSPARENT,
    TRANSPARENT,
    1,
)
TABLE["tiff grey, white is zero, opaque alpha"] = Row(
    tiff(tiff_page(np.dstack([255 - RAMP, RAMP * 0 + 255]), page_tags(0, 2))), RAMP, 255 - RAMP
)
TABLE["tiff grey of two bands"] = Row(
    tiff(tiff_page(np.dstack([RAMP, OPACITY]), page_tags(1, 0))), *["band 2"] * 3
)
TABLE["tiff six bands"] = Row(
    tiff(tiff_page(np.dstack([COLOUR, COLOUR]), page_tags(2, 0, 0, 0))), *["band 4"] * 3
)
TABLE["tiff RGB of one band"] = Row(
    tiff(tiff_page(RAMP, page_tags(2))), *["photometric interpretation rgb"] * 3
)
TABLE["tiff CIELab"] = Row(tiff(tiff_page(COLOUR, page_tags(8))), *["photometric interpretation cielab"] * 3)
TABLE["tiff complex"] = Row(
    tiff(tiff_page(RAMP.astype("u4"), {339: (SHORT, [6]), 258: (SHORT, [32])})), *["photometric"] * 3
)

# -- TIFF: without a photometric interpretation, and with GDAL's number of pixels without data

for words, stored in (("grey", RAMP), ("grey u2", RAMP.astype("u2") * 9)):
    shown = stretched(stored) if stored.dtype.itemsize > 1 else stored
    TABLE[f"tiff {words}, no photometric interpretation"] = Row(
        tiff(tiff_page(stored, {262: None})), shown, stored
    )
LACKS = RAMP % 5 == 0
for dtype, number in (("i2", -9999), ("u2", 0), ("f4", -3.40282346638529e38), ("f8", 1e20), ("f4", np.nan)):
    stored = np.where(LACKS, number, RAMP / 4 + 3).astype(dtype)
    values = np.where(LACKS, 0, stored if dtype[0] == "f" else stored.astype(int))
    shown = np.where(LACKS, 0, stretched(values, ~LACKS)).astype(np.uint8)
    mask = {"f": FLOATS, "i": "values from -", "u": stored}[dtype[0]]
    data = tiff(tiff_page(stored, {42113: (2, f"{number} ".encode() + b"\0")}))
    TABLE[f"tiff {dtype}, no data at {number}"] = Row(data, shown, mask)
data = tiff(tiff_page(RAMP.astype("u2") * 9, {42113: (2, b"none\0")}))
TABLE["tiff u2, no number of pixels without data"] = Row(data, stretched(RAMP), RAMP.astype("u2") * 9)

# -- TIFF: palettes, inks, YCbCr

for bits in (1, 2, 4, 8):
    entries = 2**bits
    table = (np.arange(3 * entries).reshape(3, entries) * 7 % 256).astype(np.uint8)
    index = (RAMP.astype(int) * 5 // 2) % entries
    for words, stored in (("16", table.astype("u2") * 257), ("8", table.astype("u2"))):
        tags = {**page_tags(3), 320: (SHORT, stored.reshape(-1).tolist())}
        TABLE[f"tiff palette of {bits} bits, colours of {words}"] = Row(
            tiff(tiff_page(index.astype(np.uint8), tags, bits)), table.T[index], index
        )
INK = np.dstack([COLOUR // 2, RAMP // 4])
RGB_OF_INK = np.asarray(Image.frombytes("CMYK", (WIDTH, HEIGHT), INK.tobytes()).convert("RGB"))
TABLE["tiff CMYK"] = Row(tiff(tiff_page(INK, page_tags(5))), RGB_OF_INK, INKS, INKS)
TABLE["tiff CMYK of 16 bits"] = Row(
    tiff(tiff_page(INK.astype("u2") * 257, page_tags(5))), RGB_OF_INK, INKS, INKS
)
YCBCR = np.asarray(Image.fromarray(COLOUR).convert("YCbCr"))
OF_YCBCR = np.asarray(Image.fromarray(YCBCR, "YCbCr").convert("RGB"))
for words, options in (("", {}), (", deflated", {"compress": zlib.compress, "compression": 8})):
    data = tiff(tiff_page(YCBCR, {**page_tags(6), 530: (SHORT, [1, 1])}), **options)
    TABLE["tiff YCbCr" + words] = Row(data, OF_YCBCR, OF_YCBCR, within=3)

# -- TIFF: compressions, strips, tiles

for words, options in (
    ("deflate", {"compress": zlib.compress, "compression": 8}),
    ("old deflate", {"compress": zlib.compress, "compression": 32946}),
    ("packbits", {"compress": packbits, "compression": 32773}),
    ("strips", {"rows_per_strip": 2}),
):
    for dtype in ("u1", "u2"):
        stored = RAMP.astype(dtype) * (1 if dtype == "u1" else 9)
        shown = RAMP if dtype == "u1" else stretched(RAMP)
        TABLE[f"tiff {dtype}, {words}"] = Row(tiff(tiff_page(stored), **options), shown, stored)
    TABLE[f"tiff RGB, {words}"] = Row(tiff(tiff_page(COLOUR, page_tags(2)), **options), COLOUR, COLOUR)
BITS = RAMP % 3 == 0
for words in ("group3", "group4", "tiff_ccitt"):
    TABLE[f"tiff {words}"] = Row(encode(BITS, "TIFF", compression=words), BITS * np.uint8(255), BITS * 255)
for words in ("tiff_lzw", "jpeg"):  # Pillow writes them
    for mode, pixels in (("L", RAMP), ("RGB", COLOUR)):
        data = encode(pixels, "TIFF", compression=words)
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert(mode))
        TABLE[f"tiff {mode} {words}"] = Row(data, pixels, pixels, within=int(words == "jpeg"))

# -- orientation

TURNS = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: np.fliplr(np.rot90(a, -1)),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.fliplr(np.rot90(a, 1)),
    8: lambda a: np.rot90(a, 1),
}
"""What a viewer does with the stored picture, by the tag: EXIF 2.32, section 4.6.4."""


def xmp(orientation):
    return b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def jpeg(pixels, **options):
    return encode(pixels, "JPEG", quality=100, subsampling=0, **options)


def with_segment(data, marker, content):
    return data[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content + data[2:]


PLAIN_JPEG = jpeg(RAMP)
OF_JPEG = np.asarray(Image.open(io.BytesIO(PLAIN_JPEG)))
for tag, turn in TURNS.items():
    TABLE[f"tiff orientation {tag}"] = Row(
        tiff(tiff_page(RAMP, {274: (SHORT, [tag])})), turn(RAMP), turn(RAMP)
    )
    data = encode(BITS, "TIFF", compression="group4", tiffinfo={274: tag})
    TABLE[f"tiff group4 orientation {tag}"] = Row(data, turn(BITS) * np.uint8(255), turn(BITS) * 255)
    TABLE[f"png orientation {tag}"] = Row(png(RAMP, 8, 0, (b"eXIf", exif(tag))), turn(RAMP), turn(RAMP))
    data = with_segment(PLAIN_JPEG, 0xE1, b"Exif\0\0" + exif(tag))
    TABLE[f"jpeg orientation {tag}"] = Row(data, turn(OF_JPEG), turn(OF_JPEG))
    data = with_segment(PLAIN_JPEG, 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp(tag))
    TABLE[f"jpeg XMP orientation {tag}"] = Row(data, turn(OF_JPEG), turn(OF_JPEG))
TABLE["png XMP before another text"] = Row(
    png(RAMP, 8, 0, (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6)), (b"iTXt", b"Comment\0\0\0\0\0none")),
    TURNS[6](RAMP),
    TURNS[6](RAMP),
)
TABLE["tiff orientation 9"] = Row(tiff(tiff_page(RAMP, {274: (SHORT, [9])})), RAMP, RAMP)
TABLE["tiff u2 RGB orientation 6"] = Row(
    tiff(tiff_page(COLOUR.astype("u2") * 9, {**page_tags(2), 274: (SHORT, [6])})),
    TURNS[6](stretched(COLOUR)),
    "values",
)
TABLE["jpeg damaged EXIF"] = Row(with_segment(PLAIN_JPEG, 0xE1, b"Exif\0\0no table"), OF_JPEG, OF_JPEG)

# -- PNG: colour types, depths, transparent colours

for bits in (1, 2, 4, 8, 16):
    most = 2**bits - 1
    stored = (RAMP.astype(int) // 2 * 13 + 5) % (most + 1)
    shown = stretched(stored) if bits == 16 else (stored * 255 // most).astype(np.uint8)
    mask = stored * 255 if bits == 1 else stored
    TABLE[f"png grey {bits}"] = Row(png(stored, bits, 0), shown, mask)
    key = int(stored[2, 3])
    is_key = stored == key
    counted = stretched(stored, ~is_key) if bits == 16 else shown
    TABLE[f"png grey {bits} with a transparent colour"] = Row(
        png(stored, bits, 0, (b"tRNS", struct.pack(">H", key))),
        np.where(is_key, 255, counted).astype(np.uint8), TRANSPARENT, TRANSPARENT,
    )  # fmt: skip
    absent = 7 if bits == 16 else None
    if absent is not None and not (stored == absent).any():
        TABLE["png grey 16 with an unused transparent colour"] = Row(
            png(stored, 16, 0, (b"tRNS", struct.pack(">H", absent))), shown, mask
        )
for bits in (8, 16):
    scale = 1 if bits == 8 else 16
    most = 2**bits - 1
    colours, grey = COLOUR.astype(int) * scale, RAMP.astype(int) * scale
    shown, shown_grey = (COLOUR, RAMP) if bits == 8 else (stretched(colours), stretched(grey))
    seen, seen_grey = (
        (COLOUR, RAMP) if bits == 8 else (stretched(colours, OPACITY > 0), stretched(grey, OPACITY > 0))
    )
    share = OPACITY.astype(int) * (most // 255)
    of_mask = COLOUR if bits == 8 else "values from 0"
    TABLE[f"png RGB {bits}"] = Row(png(colours, bits, 2), shown, of_mask)
    TABLE[f"png RGBA {bits} opaque"] = Row(
        png(np.dstack([colours, share * 0 + most]), bits, 6), shown, of_mask
    )
    TABLE[f"png LA {bits} opaque"] = Row(png(np.dstack([grey, share * 0 + most]), bits, 4), shown_grey, grey)
    TABLE[f"png RGBA {bits}"] = Row(
        png(np.dstack([colours, share]), bits, 6), on_white(seen, OPACITY), TRANSPARENT, TRANSPARENT, 1
    )
    TABLE[f"png LA {bits}"] = Row(
        png(np.dstack([grey, share]), bits, 4), on_white(seen_grey, OPACITY), TRANSPARENT, TRANSPARENT, 1
    )
    key = colours[4, 5]
    is_key = (colours == key).all(-1)
    TABLE[f"png RGB {bits} with a transparent colour"] = Row(
        png(colours, bits, 2, (b"tRNS", struct.pack(">3H", *key.tolist()))),
        np.where(is_key[..., np.newaxis], 255, shown), TRANSPARENT, TRANSPARENT,
    )  # fmt: skip
for bits in (1, 2, 4, 8):
    entries = 2**bits
    table = (np.arange(3 * entries).reshape(entries, 3) * 7 % 256).astype(np.uint8)
    index = (RAMP.astype(int) * 5 // 2) % entries
    TABLE[f"png palette {bits}"] = Row(png(index, bits, 3, (b"PLTE", table.tobytes())), table[index], index)
    opacity = np.full(entries, 255, np.uint8)
    opacity[0] = 0
    TABLE[f"png palette {bits} with transparent entries"] = Row(
        png(index, bits, 3, (b"PLTE", table.tobytes()), (b"tRNS", opacity.tobytes())),
        on_white(table[index], opacity[index]), TRANSPARENT, TRANSPARENT, 1,
    )  # fmt: skip

# -- PNM, BMP, GIF, WebP, JPEG

for most in (15, 100, 255, 1023, 65535):
    for letter, pixels in ((b"2", RAMP), (b"5", RAMP), (b"3", COLOUR), (b"6", COLOUR)):
        stored = pixels.astype(int) % (most + 1) if most < 256 else pixels.astype(int) * (most // 256)
        head = b"P" + letter + b"\n# written by hand\n%d %d\n%d\n" % (WIDTH, HEIGHT, most)
        if letter in b"23":
            body = b" ".join(b"%d" % value for value in stored.reshape(-1)) + b"\n"
        else:
            body = stored.astype("u1" if most < 256 else ">u2").tobytes()
        scaled = [int(Fraction(255 * v, most) + Fraction(1, 2)) for v in stored.reshape(-1).tolist()]
        shown = np.array(scaled, np.uint8).reshape(stored.shape) if most < 256 else stretched(stored)
        mask = stored if pixels is RAMP or most < 256 else "values from"
        TABLE[f"P{letter.decode()} of {most}"] = Row(head + body, shown, mask)
TABLE["P4"] = Row(
    b"P4 %d %d\n" % (WIDTH, HEIGHT) + np.packbits(BITS, axis=1).tobytes(), np.where(BITS, 0, 255).astype(np.uint8),
    np.where(BITS, 0, 255),
)  # fmt: skip


INDEXED = Image.frombytes("P", (WIDTH, HEIGHT), CLASSES.tobytes())
INDEXED.putpalette([10, 20, 30, 200, 0, 0, 0, 200, 0, 0, 0, 200])
OF_INDEX = np.array([[10, 20, 30], [200, 0, 0], [0, 200, 0], [0, 0, 200]], np.uint8)[CLASSES]
for form in ("BMP", "PPM"):
    TABLE[f"{form} grey"] = Row(encode(RAMP, form), RAMP, RAMP)
    TABLE[f"{form} RGB"] = Row(encode(COLOUR, form), COLOUR, COLOUR)
for form in ("BMP", "GIF", "PNG", "TIFF"):
    TABLE[f"{form} palette"] = Row(encode(INDEXED, form), OF_INDEX, CLASSES)
TABLE["BMP single bits"] = Row(encode(BITS, "BMP"), BITS * np.uint8(255), BITS * 255)
TABLE["GIF grey"] = Row(encode(RAMP, "GIF", optimize=False), RAMP, RAMP)
TABLE["GIF grey with a transparent colour"] = Row(
    encode(RAMP, "GIF", transparency=41),
    np.where(RAMP == 41, 255, RAMP).astype(np.uint8),
    *[TRANSPARENT] * 2,
)
TABLE["GIF palette with a transparent colour"] = Row(
    encode(INDEXED, "GIF", transparency=1),
    np.where(CLASSES[..., np.newaxis] == 1, 255, OF_INDEX),
    *[TRANSPARENT] * 2,
)
FOUR = np.array([[10, 20, 30], [200, 0, 0], [0, 200, 0], [0, 0, 200]], np.uint8)
PART = CLASSES[:5, :8] + 1


def around(part, corner):
    """Returns a picture of a canvas of white with a part of another picture: what a browser shows."""
    canvas = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    canvas[corner[0] : corner[0] + part.shape[0], corner[1] : corner[1] + part.shape[1]] = part
    return canvas


TABLE["GIF by hand"] = Row(gif((HEIGHT, WIDTH), (0, 0), CLASSES, FOUR), FOUR[CLASSES], CLASSES)
for corner in ((0, 0), (2, 0), (4, 6)):
    TABLE[f"GIF of a smaller frame at {corner}"] = Row(
        gif((HEIGHT, WIDTH), corner, PART, FOUR), around(FOUR[PART], corner), *[TRANSPARENT] * 2
    )
    TABLE[f"GIF of a smaller frame at {corner} with a transparent colour"] = Row(
        gif((HEIGHT, WIDTH), corner, PART, FOUR, 2),
        around(np.where(PART[..., np.newaxis] == 2, 255, FOUR[PART]), corner),
        *[TRANSPARENT] * 2,
    )


def smaller_frame(data, corner):
    """Puts the first frame of an animated WebP to another place of a canvas of WIDTH x HEIGHT."""
    data = bytearray(data)
    for name, sizes in ((b"VP8X", (WIDTH - 1, HEIGHT - 1)), (b"ANMF", (corner[1] // 2, corner[0] // 2))):
        at = data.index(name) + 8 + (4 if name == b"VP8X" else 0)
        data[at : at + 6] = b"".join(struct.pack("<I", size)[:3] for size in sizes)
    return bytes(data)


for mode, corner in (("RGB", (4, 6)), ("RGB", (0, 0)), ("RGBA", (2, 4))):
    frames = [Image.fromarray(COLOUR[:5, :8]).convert(mode), Image.fromarray(COLOUR[4:, 6:]).convert(mode)]
    frames[0].putpixel((0, 0), (1, 2, 3) if mode == "RGB" else (0, 0, 0, 0))  # a hole keeps the channel
    part = COLOUR[:5, :8].copy()
    part[0, 0] = (1, 2, 3) if mode == "RGB" else 255
    data = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    TABLE[f"WebP {mode} of a smaller frame at {corner}"] = Row(
        smaller_frame(data, corner), around(part, corner), *[TRANSPARENT] * 2
    )
for words, frame in (("", {}), (" and an image beside the frames", {"default_image": True})):
    frames = [Image.fromarray(COLOUR), Image.fromarray(COLOUR[::-1])]
    data = encode(frames[0], "PNG", save_all=True, append_images=frames[1:], **frame)
    TABLE["PNG of several frames" + words] = Row(data, COLOUR, COLOUR)
TABLE["WebP RGB"] = Row(encode(COLOUR, "WEBP", lossless=True), COLOUR, COLOUR)
LAYERED = np.dstack([COLOUR, OPACITY])
TABLE["WebP RGBA"] = Row(
    encode(LAYERED, "WEBP", lossless=True, exact=True), on_white(COLOUR, OPACITY), TRANSPARENT, TRANSPARENT, 1
)
TABLE["JPEG grey"] = Row(PLAIN_JPEG, OF_JPEG, OF_JPEG)
for words, options in (("JPEG RGB", {}), ("JPEG progressive", {"progressive": True})):
    data = jpeg(COLOUR, **options)
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    TABLE[words] = Row(data, pixels, pixels)
data = encode(Image.frombytes("CMYK", (WIDTH, HEIGHT), INK.tobytes()), "JPEG", quality=100)
TABLE["JPEG CMYK"] = Row(data, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), INKS, INKS)
SIZE_AT = PLAIN_JPEG.index(b"\xff\xc0") + 4
TABLE["JPEG of 12 bits"] = Row(
    PLAIN_JPEG[:SIZE_AT] + b"\x0c" + PLAIN_JPEG[SIZE_AT + 1 :], *["12 bits per sample"] * 3
)


def refusal_of(read, words, origin="form.x"):
    with pytest.raises(DataError) as caught:
        read()
    assert words in caught.value.message and origin in caught.value.message, caught.value.message
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value


def page_of(data):
    with forms.opened(data, "image form.x", strict=True) as file:
        return file.page()


@pytest.mark.parametrize("name", TABLE)
def test_pixels_are_those_that_were_written(name):
    row = TABLE[name]
    readers = [
        (row.shown, lambda: np.asarray(forms.open_image(row.data, "image form.x", 3))),
        (row.pair, lambda: forms.plain_pixels(page_of(row.data), "image form.x")),
    ]
    for expected, read in readers:
        if isinstance(expected, str):
            refusal_of(read, expected)
            continue
        pixels = read()
        if pixels.ndim == 3 and np.ndim(expected) == 2:
            expected = np.repeat(np.asarray(expected)[..., np.newaxis], 3, -1)
        elif pixels.ndim == 2 and np.ndim(expected) == 3:
            pixels = np.repeat(pixels[..., np.newaxis], 3, -1)
        assert pixels.dtype == np.uint8 and pixels.shape == np.shape(expected)
        assert np.abs(pixels.astype(float) - expected).max() <= row.within, name


@pytest.mark.parametrize("name", TABLE)
def test_masks_have_the_stored_numbers(name):
    row = TABLE[name]
    if isinstance(row.mask, str):
        refusal_of(lambda: forms.mask_numbers(page_of(row.data), "mask form.x", colours=True), row.mask)
        return
    numbers = forms.mask_numbers(page_of(row.data), "mask form.x").numbers
    assert numbers.dtype in (np.uint8, np.uint16) and numbers.shape == np.shape(row.mask)
    exact = row.within if "JPEG" in name or "YCbCr" in name or "jpeg" in name else 0
    assert np.abs(numbers.astype(int) - np.asarray(row.mask).astype(int)).max() <= exact


NOT_SEEN = {
    "png RGBA 8": png(np.dstack([COLOUR, 0 * OPACITY]), 8, 6),
    "png LA 16": png(np.dstack([RAMP.astype(int), 0 * OPACITY]), 16, 4),
    "png palette": png(CLASSES, 8, 3, (b"PLTE", FOUR.tobytes()), (b"tRNS", bytes(4))),
    "png grey with a transparent colour": png(0 * RAMP + 7, 8, 0, (b"tRNS", b"\0\7")),
    "GIF with a transparent colour": gif((HEIGHT, WIDTH), (1, 1), 0 * PART + 2, FOUR, 2),
    "tiff u1": tiff(tiff_page(np.dstack([COLOUR, 0 * OPACITY]), page_tags(2, 2))),
    "tiff u2, premultiplied": tiff(tiff_page(np.dstack([COLOUR.astype("u2"), 0 * OPACITY]), page_tags(2, 1))),
    "WebP": encode(np.dstack([COLOUR, 0 * OPACITY]), "WEBP", lossless=True, exact=True),
}


@pytest.mark.parametrize("name", NOT_SEEN)
def test_an_image_without_a_pixel_that_is_seen_is_no_white_image(name):
    data, words = NOT_SEEN[name], "is transparent everywhere"
    refusal = refusal_of(lambda: forms.open_image(data, "image form.x", 3), words)
    assert "save it without transparency" in refusal.hint
    out = np.zeros((8, 8, 3), np.uint8)
    refusal_of(lambda: decode_for_training(data, "image form.x", out, 0), words)


# -- pages


def num_pages(data):
    with forms.opened(data, "image form.x") as file:
        return file.num_pages


def planes_of(data):
    with forms.opened(data, "image form.x") as file:
        return [forms.plain_pixels(file.page(number), "image form.x") for number in range(file.num_pages)]


STACK = np.stack([RAMP, RAMP[::-1], RAMP[:, ::-1]])
SMALL = tiff_page(RAMP[:4, :5], {254: (LONG, [1])})


def behind_one_table(description, planes=STACK):
    """Returns a TIFF with one table, whose planes lie one behind another, as ImageJ stores large volumes."""
    data = tiff(tiff_page(planes.reshape(-1, WIDTH), {270: (2, description + b"\0")}))
    rows, num_bytes = planes.size // WIDTH, planes.nbytes
    for number, old, new in (
        (257, rows, HEIGHT),
        (278, rows, HEIGHT),
        (279, num_bytes, num_bytes // len(planes)),
    ):
        at = data.index(struct.pack("<HHII", number, LONG, 1, old))
        data = data[: at + 8] + struct.pack("<I", new) + data[at + 12 :]
    return data


IMAGEJ = b"ImageJ=1.53t\nimages=3\nslices=3\nloop=false\n"
TURNED = [tiff_page(plane, {274: (SHORT, [8])}) for plane in STACK]
PAGES = {
    "three pages": (tiff(*map(tiff_page, STACK)), STACK),
    "a thumbnail behind": (tiff(tiff_page(RAMP), SMALL), [RAMP]),
    "a thumbnail before": (tiff(SMALL, tiff_page(RAMP)), [RAMP]),
    "a pyramid": (tiff(tiff_page(RAMP), SMALL, SMALL), [RAMP]),
    "a transparency mask": (tiff(tiff_page(RAMP), tiff_page(RAMP, {254: (LONG, [4])})), [RAMP]),
    "only a thumbnail": (tiff(SMALL), [RAMP[:4, :5]]),
    "pages of two sizes": (tiff(tiff_page(RAMP), tiff_page(RAMP[:5])), [RAMP, RAMP[:5]]),
    "ImageJ's planes behind one table": (behind_one_table(IMAGEJ), STACK),
    "ImageJ's planes of 16 bits": (
        behind_one_table(IMAGEJ, STACK.astype("u2") * 9),
        [stretched(plane) for plane in STACK],
    ),
    "tifffile's planes behind one table": (behind_one_table(b'{"shape": [3, 9, 14]}'), STACK),
    "a description of no format": (tiff(tiff_page(RAMP, {270: (2, b"images=3\0")})), [RAMP]),
    "turned pages": (tiff(*TURNED), [TURNS[8](plane) for plane in STACK]),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_counted_as_their_format_says(name):
    data, expected = PAGES[name]
    pages = planes_of(data)
    assert num_pages(data) == len(pages) == len(expected)
    for page, pixels in zip(pages, expected):
        np.testing.assert_array_equal(page, pixels)


TWO_CHANNELS = behind_one_table(b"ImageJ=1.53t\nimages=2\nchannels=2\nmode=composite\n", STACK[:2])


def test_three_channels_are_a_colour_page_and_others_are_refused():
    data = behind_one_table(b"ImageJ=1.53t\nimages=3\nchannels=3\nmode=composite\n")
    np.testing.assert_array_equal(planes_of(data), [np.moveaxis(STACK, 0, -1)])
    refusal_of(lambda: planes_of(TWO_CHANNELS), "2 channels")


def test_frames_are_pages():
    frames = [Image.fromarray(pixels) for pixels in STACK]
    for form in ("GIF", "PNG", "WEBP"):
        data = encode(frames[0].convert("RGB"), form, save_all=True, append_images=frames[1:])
        assert num_pages(data) == 3, form


def test_ome_planes_are_pages_and_its_channels_are_not():
    tifffile = pytest.importorskip("tifffile")
    for axes, expected in (("ZYX", STACK), ("CYX", [np.moveaxis(STACK, 0, -1)]), ("TYX", STACK)):
        buffer = io.BytesIO()
        tifffile.imwrite(buffer, STACK, ome=True, metadata={"axes": axes}, photometric="minisblack")
        np.testing.assert_array_equal(planes_of(buffer.getvalue()), expected)


# -- another reader

WRITTEN = [
    (compression, dtype, is_colour, options)
    for compression in ("lzw", "zlib", "packbits", "zstd", "lzma")
    for dtype in ("u1", "u2")
    for is_colour in (False, True)
    for options in ({}, {"tile": (16, 16)}, {"predictor": True}, {"byteorder": ">"}, {"bigtiff": True})
    if not (options.get("predictor") and compression == "packbits")
]


@pytest.mark.parametrize("compression, dtype, is_colour, options", WRITTEN)
def test_compressed_tiff_is_read_as_by_opencv(compression, dtype, is_colour, options):
    """tifffile writes and reads it; OpenCV, where it knows the compression, reads it with libtiff."""
    tifffile, cv2 = pytest.importorskip("tifffile"), pytest.importorskip("cv2")
    stored = (COLOUR if is_colour else RAMP).astype(dtype) * (1 if dtype == "u1" else 11)
    buffer = io.BytesIO()
    photometric = "rgb" if is_colour else "minisblack"
    tifffile.imwrite(buffer, stored, compression=compression, photometric=photometric, **options)
    np.testing.assert_array_equal(page_of(buffer.getvalue()).numbers, stored)
    other = cv2.imdecode(np.frombuffer(buffer.getvalue(), np.uint8), cv2.IMREAD_UNCHANGED)
    if other is None:
        assert compression in ("zstd", "lzma")
    else:
        np.testing.assert_array_equal(other[..., ::-1] if is_colour else other, stored)


def test_without_a_photometric_interpretation_pixels_are_those_of_libtiff():
    imagecodecs = pytest.importorskip("imagecodecs")
    data = tiff(tiff_page(RAMP, {262: None}))
    other = imagecodecs.tiff_decode(data, asrgb=True)[..., :3]
    np.testing.assert_array_equal(np.asarray(forms.open_image(data, "image form.x", 3)), other)


BY_OPENCV = [name for name in TABLE if name.startswith(("png", "P5", "P6")) and "trans" not in name]


@pytest.mark.parametrize("name", BY_OPENCV)
def test_png_and_pnm_are_read_as_by_opencv(name):
    cv2 = pytest.importorskip("cv2")
    row = TABLE[name]
    other = cv2.imdecode(
        np.frombuffer(row.data, np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION
    )
    page = page_of(row.data)
    is_grey = page.form.colour == forms.GREY
    if other.ndim == 3:  # blue, green, red, and transparency
        other = other[..., 0] if is_grey else other[..., 2::-1]
    numbers = page.numbers
    if page.form.colour == forms.PALETTE or numbers is None:
        assert page.image is not None
        numbers = np.asarray(page.image.convert("L" if is_grey else "RGB"))
    if page.form.bits < 8 and is_grey:
        numbers = numbers.astype(int) * (255 // (2**page.form.bits - 1))  # OpenCV spreads few bits
    np.testing.assert_array_equal(numbers, other)


# -- masks of a set

RED, BLACK, WHITE, GREEN = (255, 0, 0), (0, 0, 0), (255, 255, 255), (0, 255, 0)


def indexed(palette, index=CLASSES):
    return png(index, 8, 3, (b"PLTE", np.array(palette, np.uint8).tobytes()))


def bits(photometric):
    return tiff(tiff_page(BITS.astype(np.uint8), page_tags(photometric), 1))


SETS = {
    "equal palettes": ("", [indexed([BLACK, RED, GREEN, WHITE])] * 2),
    "a palette that is cut": ("", [indexed([BLACK, RED, GREEN, WHITE]), indexed([BLACK, RED], CLASSES % 2)]),
    "other palettes": (
        "another palette",
        [indexed([BLACK, RED, GREEN, WHITE]), indexed([BLACK, GREEN, RED, WHITE])],
    ),
    "greys in falling order": ("darker greys", [indexed([WHITE, BLACK], CLASSES % 2)]),
    "greys in rising order": ("", [indexed([BLACK, (85,) * 3, (170,) * 3, WHITE])]),
    "palettes beside grey": ("", [indexed([BLACK, RED, GREEN, WHITE]), png(CLASSES, 8, 0)]),
    "two greys beside black and white": (
        "",
        [indexed([BLACK, WHITE], CLASSES % 2), png(255 * (CLASSES % 2), 8, 0)],
    ),
    "a palette of white beside grey": (
        "different greys",
        [png(255 * BITS, 8, 0), indexed([WHITE], 0 * CLASSES)],
    ),
    "grey beside a palette of white": (
        "different greys",
        [indexed([WHITE], 0 * CLASSES), png(255 * BITS, 8, 0)],
    ),
    "a palette of fewer greys": (
        "different greys",
        [png(CLASSES, 8, 0), indexed([BLACK, (2,) * 3], CLASSES % 2)],
    ),
    "numbers as greys": ("", [png(CLASSES, 8, 0), indexed([(k,) * 3 for k in range(4)])]),
    "single bits": ("", [png(BITS, 1, 0), bits(1)]),
    "single bits, white is zero": ("single bits of which 0 is white", [bits(0)] * 2),
    "single bits of both kinds": ("single bits of which 0 is white", [bits(1), bits(0)]),
    "grey, white is zero": ("", [tiff(tiff_page(CLASSES, page_tags(kind))) for kind in (0, 1)]),
}


@pytest.mark.parametrize("name", SETS)
def test_masks_of_a_set_agree(name):
    words, files = SETS[name]

    def check(table=None):
        agreeing = MaskSet(table)
        for data in files:
            mask = forms.mask_numbers(page_of(data), "mask form.x", colours=table is not None)
            agreeing.check(mask, "mask form.x")

    if words:
        refusal_of(check, words)
    else:
        check()
    if "bits" not in words:  # colours mean the same in all files
        check(MaskClasses(("a", "b"), (0, 255 << 16), colours=True))


# -- damage

NOISE = np.random.RandomState(3).randint(0, 256, (70, 90, 3)).astype(np.uint8)
JPEGS = {
    "sequential": {},
    "progressive": {"progressive": True},
    "subsampled": {"subsampling": 2},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
}


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("pixels", ["noise", "flat"])
def test_a_jpeg_whose_scan_ends_early_is_damaged(kind, pixels):
    options = {"quality": 90, **JPEGS[kind]}
    image = Image.fromarray(NOISE if pixels == "noise" else NOISE * 0 + 77).convert(
        options.pop("mode", "RGB")
    )
    data = encode(image, "JPEG", **options)
    start = data.index(b"\xff\xda") + 14
    whole = np.asarray(forms.open_image(data, "image form.x", 3))
    for more in (b"", bytes(50), b"\xff\xd9", data):  # bytes behind the end do not matter
        strict = np.asarray(forms.open_image(data + more, "image form.x", 3, strict=True))
        np.testing.assert_array_equal(strict, whole)
    for share in (0.4, 0.9):
        cut = data[: start + int(share * (len(data) - start))].rstrip(b"\xff") + b"\xff\xd9"
        error = refusal_of(lambda cut=cut: forms.open_image(cut, "image form.x", 3, strict=True), "")
        assert error.code == "truncated"


def test_a_jpeg_with_zeros_in_place_of_its_scan_is_damaged():
    """A download that reserves its space: the rest of the file, or a part of it, is zeros, which decode."""
    for kind, options in JPEGS.items():
        mode = options.get("mode", "RGB")
        words = {"quality": 90, **{name: value for name, value in options.items() if name != "mode"}}
        data = encode(Image.fromarray(NOISE).convert(mode), "JPEG", **words)
        middle = (data.index(b"\xff\xda") + len(data)) // 2
        rest = len(data) - middle
        files = [data[:middle] + bytes(rest)]
        if kind != "progressive":
            files.append(data[:middle] + bytes(400) + data[middle + 400 :])
        for cut in files:
            error = refusal_of(lambda cut=cut: forms.open_image(cut, "image form.x", 3, strict=True), "")
            assert error.code == "truncated"


@pytest.mark.parametrize("kind", JPEGS)
def test_bytes_behind_a_jpeg_and_in_its_descriptions_are_no_damage(kind):
    """Videos of telephones, second pictures, thumbnails, and padding, also in place of the end marker."""
    words = {name: value for name, value in JPEGS[kind].items() if name != "mode"}
    image = Image.fromarray(NOISE).convert(JPEGS[kind].get("mode", "RGB"))
    plain = encode(image, "JPEG", quality=90, **words)
    whole = np.asarray(forms.open_image(plain, "image form.x", 3))
    padded = plain[:2] + b"\xff\xe1" + struct.pack(">H", 1002) + b"Exif\0\0" + bytes(994) + plain[2:]
    files = [
        plain + bytes(64),
        plain + bytes(9000) + b"video",
        plain + padded,
        padded,
        padded + bytes(70) + padded,
    ]
    if kind != "progressive":
        files += [plain[:-2] + bytes(80), plain[:-2] + bytes(5000)]
    for data in files:
        read = np.asarray(forms.open_image(data, "image form.x", 3, strict=True))
        np.testing.assert_array_equal(read, whole)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "TIFF"])
def test_a_file_that_is_cut_off_is_to_be_got_again(form):
    """Converting it, which is the hint for other damage, would need the pixels that are missing."""
    data = encode(Image.fromarray(NOISE).convert("RGB"), form)[:-40]
    error = refusal_of(lambda: forms.open_image(data, "image form.x", 3, strict=True), "cannot be")
    assert error.code == "truncated" and error.hint == "get the file again, or remove it"


def test_constant_jpegs_of_zero_bits_are_whole():
    """Tables that are made for a constant image have a code of one zero for its only symbol."""
    for optimize in (False, True):
        for mode in ("L", "RGB"):
            data = encode(Image.new(mode, (3000, 2000)), "JPEG", optimize=optimize)
            assert not np.asarray(forms.open_image(data, "image form.x", 3, strict=True)).any()


@pytest.mark.parametrize("is_interlaced", [False, True])
def test_a_png_that_lacks_rows_is_damaged(is_interlaced):
    """Its chunks, their checksums and the stream of its rows are whole."""

    def png(rows, width, height):
        head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, is_interlaced)
        parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
            for kind, part in parts
        )

    passes = [(1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)] if is_interlaced else [(8, 8)]
    rows = b"".join(b"\0" + b"\x09" * width for width, height in passes for _ in range(height))
    assert (np.asarray(forms.open_image(png(rows, 8, 8), "image form.x", 1)) == 9).all()
    black = np.asarray(forms.open_image(png(bytes(len(rows)), 8, 8), "image form.x", 1))
    assert not black.any()
    for cut in (rows[:-9], rows[: len(rows) // 2]):
        error = refusal_of(lambda cut=cut: forms.open_image(png(cut, 8, 8), "image form.x", 1), "truncated")
        assert error.code == "truncated"


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize(
    "greys", [(0, 255), (255, 0), (0, 1), (0, 1, 2), (7, 9), tuple(range(7)), tuple(range(16)), (0, 255, 128)]
)
def test_numbers_of_a_bmp_with_few_greys(bits, greys):
    if len(greys) > 2**bits:
        return
    numbers = np.random.RandomState(2).randint(0, len(greys), (5, 8))
    rows = [np.packbits(np.unpackbits(row.astype(np.uint8)[:, None], axis=1)[:, -bits:]) for row in numbers]
    pixels = b"".join(row.tobytes() + bytes(-len(row) % 4) for row in rows[::-1])
    table = b"".join(bytes([grey] * 3 + [0]) for grey in greys)
    start = 54 + len(table)
    head = struct.pack("<IiiHHIIiiII", 40, 8, 5, 1, bits, 0, len(pixels), 0, 0, len(greys), 0)
    data = b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + head + table + pixels
    np.testing.assert_array_equal(
        np.asarray(forms.open_image(data, "image form.x", 1)), np.array(greys)[numbers]
    )
    with forms.opened(data, "mask form.x") as file:
        mask = forms.mask_numbers(file.page(), "mask form.x").numbers
    # Single bits of black and white are 0 and 255, whatever the format.
    stored = numbers * (255 if bits == 1 and greys == (0, 255) else 1)
    np.testing.assert_array_equal(mask, stored)
    packed = data[:30] + b"\1" + data[31:]
    refusal_of(lambda: forms.open_image(packed, "image form.x", 1), "run lengths")


@pytest.mark.parametrize("compression", ["jpeg", "webp", "jpeg2000", "lzw", "zlib"])
def test_a_tiff_whose_coded_data_end_early_is_damaged(compression):
    file = io.BytesIO()
    tifffile.imwrite(file, NOISE, compression=compression, photometric="rgb")
    data = file.getvalue()
    with tifffile.TiffFile(io.BytesIO(data)) as read:
        begin, count = read.pages[0].dataoffsets[-1], read.pages[0].databytecounts[-1]
    assert np.asarray(forms.open_image(data, "image form.x", 3)).shape == NOISE.shape
    kept = begin + count // 2
    refusal_of(
        lambda: forms.open_image(
            data[:kept] + bytes(begin + count - kept) + data[begin + count :], "image form.x", 3
        ),
        "cannot be decoded",
    )
    if begin + count == len(data):
        refusal_of(lambda: forms.open_image(data[:kept], "image form.x", 3), "cannot be decoded")


@pytest.mark.parametrize("compression", ["zstd", "lerc", "packbits", "lzw", "zlib"])
def test_a_tiff_whose_rows_end_in_black_is_whole(compression):
    pixels = NOISE[..., 0].copy()
    pixels[-3:] = 0
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, compression=compression)
    np.testing.assert_array_equal(np.asarray(forms.open_image(file.getvalue(), "image form.x", 1)), pixels)


def test_a_stack_without_its_last_pages_is_damaged():
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for k in range(6):
            writer.write(NOISE[..., 0] + k, contiguous=False)
    with tifffile.TiffFile(io.BytesIO(file.getvalue())) as read:
        place = read.pages[4].offset
    with forms.opened(file.getvalue(), "image form.x") as whole:
        assert whole.num_pages == 6
    refusal_of(lambda: forms.open_image(file.getvalue()[:place], "image form.x", 1), "last of its pages")


@pytest.mark.parametrize("compression", ["raw", "tiff_adobe_deflate", "tiff_lzw"])
def test_a_cut_tiff_is_damaged(compression):
    data = encode(NOISE, "TIFF", compression=compression)
    for share in (0.4, 0.9):
        cut = data[: int(share * len(data))]
        refusal_of(lambda cut=cut: forms.open_image(cut, "image form.x", 3), "cannot be decoded")


def test_transparency_of_floats_is_between_0_and_1():
    bands = np.dstack([COLOUR, OPACITY]).astype("f4")
    refusal_of(lambda: page_of(tiff(tiff_page(bands, page_tags(2, 2)))), "transparency of float32")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["<u2", ">u2", "<i4", "<f4"]),
    st.integers(1, 40),
    st.integers(1, 60),
)
def test_16_bit_pixels_are_stretched_between_percentiles(seed, kind, height, width):
    random = np.random.RandomState(seed)
    top = int(random.choice([1, 2, 300, 4096, 65536]))
    shown = random.uniform(size=(height, width)) < random.choice([0.001, 1])
    pixels = random.randint(0, top, (height, width)) * shown
    np.testing.assert_array_equal(forms.stretched(pixels.astype(kind), "it"), stretched(pixels))


def test_an_opened_image_of_pillow_is_read_as_its_file(tmp_path):
    path = tmp_path / "form.x"
    for name in ("tiff u2 RGB", "tiff orientation 6", "png RGB 16", "tiff palette of 4 bits, colours of 8"):
        path.write_bytes(TABLE[name].data)
        with Image.open(path) as image:
            shown = np.asarray(forms.of_pillow(image, "image", 3, 10**6))
        np.testing.assert_array_equal(shown, forms.open_image(path.read_bytes(), "image", 3))
    loaded = forms.of_pillow(Image.fromarray(COLOUR), "image", 3, 10**6)
    np.testing.assert_array_equal(np.asarray(loaded), COLOUR)


@pytest.mark.parametrize("tag", [1, 6])
def test_the_orientation_tag_is_applied_to_a_files_image_only(tag):
    """Pillow keeps the tag's block in images that it makes from a file's, which the user may have turned."""
    image = Image.open(io.BytesIO(jpeg(COLOUR, exif=b"Exif\0\0" + exif(tag))))
    stored = np.asarray(image)  # loads it
    shown = forms.of_pillow(image, "image", 3, 10**6)
    np.testing.assert_array_equal(np.asarray(shown), TURNS[tag](stored))
    for made in (image.rotate(-90, expand=True), image.copy(), image.resize((7, 9)), image.convert("L")):
        assert made.info["exif"]
        channels = len(made.getbands())
        shown = forms.of_pillow(made, "image", channels, 10**6)
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(made))


# -- every way in

SCAN = jpeg(COLOUR)
FAULTS = {
    "bands.tif": TABLE["tiff six bands"].data,
    "channels.tif": TWO_CHANNELS,
    "lab.tif": TABLE["tiff CIELab"].data,
    "nan.tif": tiff(tiff_page(np.where(RAMP == 41, np.nan, RAMP).astype("f4"))),
    "bits.jpg": TABLE["JPEG of 12 bits"].data,
    "scan.jpg": SCAN[: len(SCAN) * 3 // 4] + b"\xff\xd9",
    "cut.png": png(RAMP, 8, 0)[:60],
    "words.jpg": b"no image",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_one_message_whichever_way_a_file_comes_in(tmp_path, name):
    """Training, evaluation and inference, segmentation, verification and records refuse it in the same words."""
    path, data = tmp_path / name, FAULTS[name]
    origin = f"image {path}"
    path.write_bytes(data)
    info = DatasetInfo(
        "x", "classification", 2, (None, None, 3), 1, 1, ("a", "b"), "", (0.0,) * 3, (1.0,) * 3
    )

    def as_pair():
        pair = Pair("train", path, path, 0, 1)
        (read,) = pages(pair.files, "image", tmp_path, 10**6, pair)
        if isinstance(read, Problem):
            raise read.error
        return image_pixels(read.page, read.origin, forms.Mask(RAMP, forms.Form("PNG", (HEIGHT, WIDTH))))

    ways = [
        as_pair,
        lambda: pixels_for_evaluation(data, origin, info, (8, 8, 3)),
        lambda: make_record(str(path), 0, "a", 10**6),
        lambda: file_pages(str(path), 3),
    ]
    if name != "scan.jpg":  # training decodes only the part of a JPEG that a crop needs
        ways.append(lambda: decode_for_training(data, origin, np.zeros((8, 8, 3), np.uint8), 1))
    if name != "cut.png":  # verification compares the checksums of a PNG first
        ways.append(lambda: decode_image(data, origin, 0, False, 10**6))
    errors = [refusal_of(call, "", str(path)) for call in ways]
    assert len({error.message for error in errors}) == 1, errors
    assert {error.exit_code for error in errors} == {3}
