"""Decides what each stored form of an image or mask file becomes: the rules of docs/pixels.md.

A form is how a file stores its numbers: bit depth, sign, bands, transparency, palette, photometric interpretation,
orientation and pages.  tifffile reads TIFF, imagecodecs the compressed data in it and PNG of 16-bit colour, and Pillow
everything else.  The libraries only read stored numbers.  What the numbers mean is decided here, so that it does not
depend on the version of a library.
"""

import contextlib
import io
import logging
import re
import warnings
import zlib
from types import ModuleType
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from ipucnn.aliases import PillowImage, TiffPage
from ipucnn.datasets.image_headers import (
    APP1,
    HOLE,
    bmp_grey_table,
    chunks,
    content_of,
    has_hole,
    is_jpeg,
    is_png,
    is_run_length_bmp,
    is_tiff,
    is_webp,
    jpeg_coding,
    jpeg_segments,
    png_rows_are_whole,
    tiff_tables_are_whole,
    webp_first_frame,
)
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, TOO_LARGE, check_pixels, decoding
from ipucnn.datasets.problems import INKS, IS_STRETCHED, OTHER_COLOURS, SEVERAL, SHOWS_WHITE
from ipucnn.errors import DataError
from ipucnn.text import counted, printable

CUT_THOUSANDTHS = 1
"""Share of an image's darkest numbers, in thousandths, that become black; as many of the brightest become white."""
FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "WEBP", "PPM")
"""Pillow's names of the formats that it reads here, whatever a file's extension; "JPEG" also reads MPO files."""
_WITH_FRAMES = ("GIF", "WEBP", "TIFF", "PNG")
HINT = "convert it to JPEG or PNG, or remove it"
AGAIN = "get the file again, or remove it"
IMAGE_HINT = "save it as grey or colour (RGB): TIFF, PNG or JPEG"
MASK_HINT = "save masks as grey PNG or TIFF, one value per class"
LARGEST_VALUE = 2**16 - 1
"""The largest value of a mask."""
GREY, WHITE_IS_ZERO, PALETTE = "grey", "grey (white is zero)", "a colour palette"
RGB, CMYK = "colour (RGB)", "colour (CMYK)"
ALPHA, PREMULTIPLIED, KEY = "transparency", "premultiplied transparency", "a transparent colour"
UNSIGNED, SIGNED, FLOATING = "", "signed ", "floating-point "


class Form(NamedTuple):
    """How a page is stored.

    Attributes:
        format: Pillow's name of the file's format, such as "PNG".
        size: (height, width) as stored, before the orientation is applied.
        bits: bits of a sample.
        numbers: UNSIGNED, SIGNED or FLOATING.
        colour: what a sample means: GREY, WHITE_IS_ZERO, PALETTE, RGB or CMYK.
        alpha: how transparency is stored: ALPHA, PREMULTIPLIED, KEY, or "".
        orientation: the tag's value, 1 to 8; 1 is upright.
        palette: uint8 [entries, 3] of a decoded page with a PALETTE.
        has_other_colours: whether a profile of other colours than sRGB's belongs to it, which is not applied.
    """

    format: str
    size: Tuple[int, int]
    bits: int = 8
    numbers: str = UNSIGNED
    colour: str = GREY
    alpha: str = ""
    orientation: int = 1
    palette: Optional[np.ndarray] = None
    has_other_colours: bool = False

    @property
    def is_deep(self) -> bool:
        """Whether the numbers are stretched to 8 bits."""
        return self.bits > 8 or self.numbers == FLOATING

    @property
    def depth(self) -> str:
        """The type of a sample in words: "16 bits", "signed 16 bits"."""
        return f"{self.numbers}{self.bits} bit" + "s" * (self.bits > 1)

    @property
    def pixels(self) -> str:
        """The pixels in words: "grey of 16 bits with transparency"."""
        usual = self.depth == "8 bits" or self.colour == PALETTE
        return self.colour + ("" if usual else f" of {self.depth}") + (self.alpha and f" with {self.alpha}")


class Page(NamedTuple):
    """A decoded page; at least one of ``image`` and ``numbers`` is given.

    Attributes:
        form: how it is stored.
        image: 8-bit samples as a Pillow image, as they are displayed.
        numbers: the stored samples, [h, w] or [h, w, colours]; None if they are those of ``image``.
        opacity: transparency that ``image`` does not have, uint8 [h, w]; 255 is opaque.
        has_data: bool [h, w], without the pixels of GDAL's no-data value; None if all have data.
    """

    form: Form
    image: Optional[PillowImage] = None
    numbers: Optional[np.ndarray] = None
    opacity: Optional[np.ndarray] = None
    has_data: Optional[np.ndarray] = None


Axes = Tuple[Tuple[str, int], ...]
"""Names and lengths of the axes of a file's pages; the last one changes fastest."""


class ImageFile:
    """An open image file.

    Attributes:
        form: the form of its first page.
        num_pages: number of its pages; thumbnails and the levels of a pyramid are none.
        axes: the axes of its pages if the file names two or more, as hyperstacks do.
    """

    form: Form
    num_pages: int
    axes: Axes = ()

    @property
    def num_frames(self) -> int:
        """Number of pages or frames, of which one is used as an image; those of a JPEG are previews and the like."""
        return self.num_pages if self.form.format in _WITH_FRAMES else 1

    def page(self, number: int = 0) -> Page:
        """Decodes a page."""
        raise NotImplementedError


@contextlib.contextmanager
def opened(
    data: bytes, origin: str, max_pixels: int = MAX_IMAGE_PIXELS, hint: str = HINT, strict: bool = False
) -> Iterator[ImageFile]:
    """Opens an image file whose header is within limits; its pages are decoded inside the block.

    Every exception that is raised inside the block becomes a DataError about the image, because readers raise nearly
    any type for damaged files.  Large images wait here until others are decoded (see ``limits``).

    Args:
        data: the encoded file.
        origin: the image's name in messages: "image PATH".
        max_pixels: the value of ``--max-image-pixels``.
        hint: the error's hint for an image that cannot be decoded.
        strict: whether to reject a JPEG whose coded data end early; libjpeg fills the rest with grey.

    Raises:
        DataError: the file is no image, is damaged, has too many pixels, or has a form that is not read.
    """
    Image = pillow()
    # Pillow rejects twice as many, before it allocates the canvas of a WebP or the first frame of a GIF.  Its limit
    # holds for texts that are drawn later, too, so it is never small.
    Image.MAX_IMAGE_PIXELS = max(max_pixels, 2**20)  # type: ignore[attr-defined]
    try:
        file = _TiffFile(data, origin, max_pixels) if is_tiff(data) else _open_other(data, origin, strict)
        height, width = file.form.size
        check_pixels(width, height, max_pixels, origin)
        if not width or not height:
            raise DataError(f"{origin} has no pixels", "remove it", "unreadable")
        is_large = file.form.is_deep and file.form.colour == RGB
        with decoding(3 * width if is_large else width, height, origin):
            yield file
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        text = f"{origin} has far more than --max-image-pixels {max_pixels}"
        raise DataError(text, "shrink it, or raise --max-image-pixels", TOO_LARGE) from error
    except Image.UnidentifiedImageError as error:
        content = content_of(data)
        text = f"{origin} is not an image in a known format{f': it is {content.name}' if content else ''}"
        raise DataError(text, hint if content is None or content.is_image else AGAIN, "unreadable") from error
    except Exception as error:
        raise _undecodable(error, origin, hint) from error


def page_of(file: ImageFile, number: int, where: str) -> Page:
    """Decodes a page of an open file, and names the page in errors: "image PATH, page 2 of 5"."""
    try:
        return file.page(number)
    except DataError:
        raise
    except Exception as error:
        raise _undecodable(error, where, AGAIN) from error


def _undecodable(error: Exception, origin: str, hint: str) -> DataError:
    reason = " ".join(str(error).split()) or type(error).__name__
    is_cut = _ENDS_EARLY.search(reason) is not None
    code = "truncated" if is_cut else "unreadable"
    return DataError(f"{origin} cannot be decoded: {reason[:200]}", AGAIN if is_cut else hint, code)


_ENDS_EARLY = re.compile(
    "truncated|ends early|failed to read|corrupted (strip|tile)|read error", re.IGNORECASE
)
"""Words of errors of Pillow, tifffile and libpng about files that end early."""
_pillow: List[ModuleType] = []


def pillow() -> ModuleType:
    """Returns Pillow's ``Image`` module, with its warnings about damaged files turned off."""
    if not _pillow:
        from PIL import Image

        warnings.filterwarnings("ignore", module=r"PIL\.")
        _pillow.append(Image)
    return _pillow[0]


# -- formats other than TIFF --------------------------------------------------------------------------------------

_MODES: Dict[str, Tuple[int, str, str]] = {
    "1": (1, GREY, ""),
    "L": (8, GREY, ""),
    "LA": (8, GREY, ALPHA),
    "P": (8, PALETTE, ""),
    "PA": (8, PALETTE, ALPHA),
    "RGB": (8, RGB, ""),
    "RGBA": (8, RGB, ALPHA),
    "CMYK": (8, CMYK, ""),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N"), (16, GREY, "")),
    "I": (16, GREY, ""),
    "F": (32, GREY, ""),
}
"""Bits, colour and transparency of Pillow's modes in the formats that it reads here."""
FILLER = bytes((37 * k + 11) % 250 for k in range(64))
"""Bytes without a marker, put in place of the end of a JPEG to see whether its decoder needs them."""
FEW = 8
"""The bytes of ``FILLER`` that libjpeg reads ahead of a complete scan, at most."""


def _check_png(data: bytes, origin: str) -> None:
    """Compares the checksums of a PNG file's chunks, which decoding ignores if it can still compute the pixels.

    Raises:
        DataError: a checksum is wrong, or the file has no end.
    """
    for kind, content, checksum in chunks(data):
        if len(checksum) < 4:
            break
        if zlib.crc32(content, zlib.crc32(kind)) != int.from_bytes(checksum, "big"):
            text = f"{origin}: the checksum of its chunk {printable(kind.decode('latin1'))} is wrong"
            raise DataError(text, AGAIN, "checksum")
        if kind == b"IEND":
            return
    raise DataError(f"{origin} cannot be decoded: it is truncated, without its end", AGAIN, "truncated")


def _open_other(data: bytes, origin: str, strict: bool) -> ImageFile:
    """Opens a file that is no TIFF."""
    header = _PNM.match(data)
    if header is not None and (header[1] in b"23" or header[4] != b"255"):
        return _PnmFile(data, header)
    same = b""
    if is_png(data):
        _check_png(data, origin)
    if is_jpeg(data):
        for marker, part in jpeg_segments(data):
            if marker & 0xF0 == 0xC0 and marker not in (0xC4, 0xC8, 0xCC) and part[:1] not in (b"", b"\x08"):
                text = f"{origin} is a JPEG of {part[0]} bits per sample"
                raise DataError(text, "save it as PNG or TIFF of 16 bits", "wrong-mode")
        is_progressive, end = jpeg_coding(data) if strict else (False, None)
        lacks_end = strict and end is None
        # A progressive file that does not end, but in zeros, may lack a scan.
        if strict and (has_hole(data) or (lacks_end and is_progressive and data.endswith(HOLE))):
            text = f"{origin} is damaged: zeros stand in place of a part of its scans"
            raise DataError(text, AGAIN, "truncated")
        # Zeros at the end are padding, or were not written; the scan itself may end in a few.
        if lacks_end and not is_progressive and data.endswith(HOLE):
            end = len(data.rstrip(b"\0")) + len(HOLE)
        if end is not None and is_progressive:
            same = data[:end] + FILLER + data[end : end + 2]
        elif end is not None:
            data = data[:end] + FILLER[:FEW]
    if is_run_length_bmp(data):  # versions of Pillow differ
        text = f"{origin} is a BMP that is compressed by run lengths"
        raise DataError(text, "save it as PNG", "wrong-mode")
    place = bmp_grey_table(data)
    if place is not None:
        data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    image = pillow().open(io.BytesIO(data), formats=FORMATS)
    return _PillowFile(image, origin, data, same, int(place is not None))


def _has_other_colours(profile: bytes) -> bool:
    """Returns whether an ICC profile is one of RGB that its description does not call sRGB, or "c2", a short form."""
    described = ""
    for place in range(132, min(len(profile), 132 + 12 * 100), 12):  # the table of tags (ICC.1:2010, 7.3)
        if profile[place : place + 4] == b"desc":
            begin, size = (_number(profile, at) for at in (place + 4, place + 8))
            described = _described_as(profile[begin : begin + size])
            break
    return profile[16:20] == b"RGB " and "sRGB" not in described and described != "c2"


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _described_as(tag: bytes) -> str:
    """Returns the text of a description, of version 2 (ICC.1:2001-04, 6.5.17) or its first one of version 4 (10.15)."""
    if tag[:4] == b"mluc":
        begin = _number(tag, 24)
        return tag[begin : begin + _number(tag, 20)].decode("utf-16-be", "replace")
    return tag[12 : 12 + _number(tag, 8)].decode("latin-1").rstrip("\0")


def _has_black_row(image: PillowImage) -> bool:
    """Returns whether the last row is 0 everywhere."""
    return not np.asarray(image.crop((0, image.height - 1, *image.size))).any()


class _PillowFile(ImageFile):
    """A file that Pillow reads, or a Pillow image of a caller.

    Args:
        image: the opened image.
        origin: the image's name in messages.
        data: the file; empty for an image of a caller.
        same: a file that must decode to the same pixels; may be empty.
        changed: the bits of the blue of the palette's second colour that are others in ``data`` than in the file.
    """

    def __init__(
        self, image: PillowImage, origin: str, data: bytes = b"", same: bytes = b"", changed: int = 0
    ) -> None:
        self._image, self._data, self._same, self._origin, self._changed = image, data, same, origin, changed
        if image.mode not in _MODES:
            raise DataError(f"{origin} has pixels of mode {image.mode}", IMAGE_HINT, "wrong-mode")
        bits, colour, alpha = _MODES[image.mode]
        key = image.info.get("transparency") if image.mode in ("1", "L", "RGB") else None
        if is_png(data):  # Pillow keeps the upper bytes of 16 bits, and spreads 2 and 4 bits over 0 to 255
            bits, kind = data[24], data[25]
            colour = GREY if kind in (0, 4) else colour
            tables = [content for name, content, _ in chunks(data) if name == b"tRNS"]
            key = np.frombuffer(tables[0], ">u2").tolist() if tables and kind in (0, 2) else None
        self._key: Optional[np.ndarray] = None if key is None else np.reshape(key, -1)
        if key is not None or (image.mode == "P" and "transparency" in image.info):
            alpha = KEY
        # The box of the first frame: viewers show nothing around it, and versions of Pillow any colour.
        self._frame: Optional[Tuple[int, int, int, int]] = None
        if image.format == "GIF" and getattr(image, "tile", None):
            self._frame = image.tile[0][1]
        elif is_webp(data):
            self._frame = webp_first_frame(data)
        if self._frame in (None, (0, 0, *image.size)):
            self._frame = None
        else:
            alpha = alpha or ALPHA
        numbers = FLOATING if image.mode == "F" else UNSIGNED
        size, orientation = (image.height, image.width), _orientation(image, data)
        is_other = _has_other_colours(image.info.get("icc_profile") or b"")
        form = Form(str(image.format), size, bits, numbers, colour, alpha, orientation)
        self.form = form._replace(has_other_colours=is_other)

    @property
    def num_pages(self) -> int:  # type: ignore[override]
        with contextlib.suppress(Exception):  # a damaged list of frames does not concern the first one
            return int(getattr(self._image, "n_frames", 1))
        return 1

    def page(self, number: int = 0) -> Page:
        image, form = self._image, self.form
        if is_png(self._data) and form.bits == 16 and (form.colour == RGB or form.alpha == ALPHA):
            import imagecodecs

            samples = imagecodecs.png_decode(self._data)
            alpha = _opacity(samples[..., -1], form.bits, self._origin) if form.alpha else None
            bands = {GREY: 0, RGB: slice(3)}[form.colour]
            return Page(form, None, samples[..., bands], alpha)
        if number:
            image.seek(number)
        image.load()
        if self._same and not np.array_equal(
            np.asarray(image), np.asarray(pillow().open(io.BytesIO(self._same)))
        ):
            raise DataError(f"{self._origin} is damaged: its scan ends early", AGAIN, "truncated")
        # Rows that a PNG lacks are black.
        is_suspect = is_png(self._data) and (self._data[28] != 0 or _has_black_row(image))
        if is_suspect and not png_rows_are_whole(self._data):
            text = f"{self._origin} cannot be decoded: it is truncated, before its last row"
            raise DataError(text, AGAIN, "truncated")
        if self._changed:
            palette = image.getpalette() or []
            palette[5] ^= self._changed
            image.putpalette(palette)
        if form.colour == PALETTE:
            form = form._replace(palette=np.reshape(image.getpalette() or [], (-1, 3)).astype(np.uint8))
        if self._frame is not None and not number:
            framed = pillow().new("RGBA", image.size)
            framed.paste(image.convert("RGBA").crop(self._frame), self._frame)
            return Page(form, framed)
        numbers = np.asarray(image) if form.is_deep or form.bits == 1 else None
        if image.mode == "L" and form.bits in (2, 4):
            numbers = np.asarray(image) // (255 // (2**form.bits - 1))
        page = Page(form, None if form.is_deep else image, numbers)
        if self._key is None:
            return page
        samples = np.asarray(image) if numbers is None else numbers
        is_key = samples == (self._key if samples.ndim == 3 else self._key[0])
        is_key = is_key.all(axis=2) if samples.ndim == 3 else is_key
        return page._replace(opacity=np.where(is_key, 0, 255).astype(np.uint8))


_PNM = re.compile(rb"P([2356])" + rb"(?:(?:\s|#.*\n)+(\d{1,10}))" * 3 + rb"\s")
"""Kind, width, height and largest value of a PGM or PPM file."""


class _PnmFile(ImageFile):
    """A PGM or PPM file in decimal digits, or with another largest value than 255, which versions of Pillow scale."""

    def __init__(self, data: bytes, header: "re.Match[bytes]") -> None:
        width, height, most = map(int, header.groups()[1:])
        colour = RGB if header[1] in b"36" else GREY
        bits = 8 if most < 256 else 16
        self._data, self._header, self._most = data[header.end() :], header, most
        self.num_pages, self.form = 1, Form("PPM", (height, width), bits, UNSIGNED, colour)

    def page(self, number: int = 0) -> Page:
        form, most = self.form, self._most
        shape = form.size if form.colour == GREY else (*form.size, 3)
        count = int(np.prod(shape))
        dtype = np.dtype("u1" if most < 256 else ">u2")
        if self._header[1] in b"23":
            words = re.sub(rb"#.*", b"", self._data).split()[:count]
            samples: np.ndarray = np.array(words).astype(np.int64)
        else:
            samples = np.frombuffer(self._data[: count * dtype.itemsize], dtype)
        if len(samples) < count or not 0 < most <= LARGEST_VALUE or int(samples.max()) > most:
            raise ValueError("the file ends early, or has larger values than its header says")
        numbers = samples.reshape(shape).astype(dtype.newbyteorder("="))
        if form.is_deep:
            return Page(form, None, numbers)
        return Page(form, pillow().fromarray(_scaled(numbers, most)), numbers)


def _scaled(numbers: np.ndarray, most: int) -> np.ndarray:
    """Returns integers of 0 to ``most`` as uint8 of 0 to 255, rounded."""
    return ((510 * numbers.astype(np.int64) + most) // (2 * most)).astype(np.uint8)


_ORIENTATION = 0x0112
"""The tag of an image's orientation, in EXIF and TIFF."""
_PROFILE = 0x8773
"""The tag of a TIFF page's profile of colours."""
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=\"|>)([1-8])")


def _orientation(image: PillowImage, data: bytes) -> int:
    """Returns the orientation, 1 to 8, that EXIF or else XMP gives an image; 1 if neither does or they are damaged."""
    if is_jpeg(data):
        return jpeg_orientation(data)
    exif, xmp = bytes(image.info.get("exif") or b""), b""
    if is_png(data) or is_webp(data):
        parts = [(name, content) for name, content, _ in chunks(data)]
        exif = dict(parts).get(b"eXIf", exif)
        xmp = b"".join(content for name, content in parts if name in (b"iTXt", b"XMP "))
    with contextlib.suppress(Exception):  # a damaged block is ignored; the pixels are fine
        if not exif and "Raw profile type exif" in image.info:  # hexadecimal text of PNG, below three lines
            exif = bytes.fromhex("".join(image.info["Raw profile type exif"].split("\n")[3:]))
    return _orientation_in(exif, xmp)


def jpeg_orientation(data: bytes) -> int:
    """Returns the orientation, 1 to 8, that EXIF or else XMP gives a JPEG."""
    parts = [part for marker, part in jpeg_segments(data) if marker == APP1]
    exif = b"".join(part[6:] for part in parts if part[:6] == b"Exif\0\0")
    return _orientation_in(exif, b"".join(part for part in parts if part[:20] == b"http://ns.adobe.com/"))


def _orientation_in(exif: bytes, xmp: bytes) -> int:
    with contextlib.suppress(Exception):
        if exif:
            table = pillow().Exif()
            table.load(exif)
            if table.get(_ORIENTATION) in range(1, 9):
                return int(table[_ORIENTATION])
    match = _XMP_ORIENTATION.search(xmp)
    return 1 if match is None else int(match[1])


# -- TIFF ---------------------------------------------------------------------------------------------------------

_PHOTOMETRIC = {
    0: (WHITE_IS_ZERO, 1),
    1: (GREY, 1),
    2: (RGB, 3),
    3: (PALETTE, 1),
    5: (CMYK, 4),
    6: (RGB, 3),  # YCbCr, which the decoders convert
}
"""Colour and number of bands by the tag PhotometricInterpretation."""
_ALPHAS = {1: PREMULTIPLIED, 2: ALPHA}
"""Kinds of transparency by the tag ExtraSamples."""
_YCBCR, _JPEG = 6, 7
_BY_PILLOW = (2, 3, 4, 6)
"""Compressions that tifffile does not read on every version of Python: those of fax, and JPEG of TIFF's version 6."""
_NEVER_ZEROS = (7, 33003, 33004, 33005, 34712, 50001)
"""Compressions whose data never end in many zeros: those of JPEG, JPEG 2000 and WebP."""
_NO_PAGE = 1 | 4
"""Bits of the tag NewSubfileType: reduced resolution, and transparency mask."""
_NO_ORDER = "CQI"
"""Letters of channels, and of axes that a file does not name."""
_NO_DATA = 42113
"""The tag of GDAL for the number of pixels without data, as text."""


def _photometric(page: TiffPage) -> int:
    """Returns the tag PhotometricInterpretation; without it what libtiff assumes, while tifffile assumes 0."""
    number = int(page.photometric)
    if number or 262 in page.tags or int(page.compression) in _BY_PILLOW:
        return number
    return 1


class _TiffFile(ImageFile):
    """A TIFF file."""

    def __init__(self, data: bytes, origin: str, max_pixels: int) -> None:
        import tifffile

        logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # damage becomes an error
        self._data, self._origin, self._max_pixels = data, origin, max_pixels
        if not tiff_tables_are_whole(data):
            text = f"{origin} cannot be decoded: it is truncated, without the last of its pages"
            raise DataError(text, "get the file again, or save its pages anew", "truncated")
        file = tifffile.TiffFile(io.BytesIO(data), _multifile=False)  # OME may name other files
        every = list(file.pages)
        self._pages = [page for page in every if not page.subfiletype & _NO_PAGE] or every
        self._series = file.series[0]
        self._volume: Optional[np.ndarray] = None
        lengths = [(a, n) for a, n in zip(self._series.axes, self._series.shape) if a not in "YXS"]
        # ImageJ, and others, store the planes of a volume behind one table.
        planes = int(np.prod([length for _, length in lengths]))
        self._num_planes = max(len(self._pages), planes if len(every) == 1 else 1)
        self.form = self._form(self._pages[0], origin)
        # The planes of each page: three if grey channels lie one behind another.
        self._planes: np.ndarray = np.arange(self._num_planes).reshape(-1, 1)
        channels = dict(lengths).get("C", 1)
        if channels > 1:
            if channels != 3 or self.form.colour != GREY or self.form.alpha or planes != self._num_planes:
                raise DataError(
                    f"{origin} has {channels} channels of {self.form.pixels} one behind another",
                    "save one channel as grey, or three as colour (RGB); in Fiji: Image > Color",
                    "wrong-mode",
                )
            axis = [axis for axis, _ in lengths].index("C")
            planes_by_axis = self._planes.reshape([length for _, length in lengths])
            self._planes = np.moveaxis(planes_by_axis, axis, -1).reshape(-1, 3)
            self.form = self.form._replace(colour=RGB)
        self.num_pages = len(self._planes)
        named = tuple((axis, length) for axis, length in lengths if axis not in _NO_ORDER and length > 1)
        if len(named) > 1 and int(np.prod([length for _, length in named])) == self.num_pages:
            self.axes = named

    def _form(self, page: TiffPage, origin: str) -> Form:
        colour, bands = _PHOTOMETRIC.get(_photometric(page), ("", 0))
        kinds = {"u": UNSIGNED, "b": UNSIGNED, "i": SIGNED, "f": FLOATING}
        numbers = kinds.get("" if page.dtype is None else page.dtype.kind, "not read")
        is_read = (
            bands
            and numbers in kinds.values()
            and page.samplesperpixel >= bands
            and set(page.axes) <= set("YXS")
        )
        is_ycbcr = int(page.photometric) == _YCBCR
        if (numbers != UNSIGNED and colour in (PALETTE, CMYK)) or (is_ycbcr and page.dtype != np.uint8):
            is_read = False
        if is_ycbcr and page.is_subsampled and int(page.compression) == 1:  # versions of Pillow differ
            is_read = False
        if not is_read or isinstance(page.bitspersample, tuple):
            kind = getattr(page.photometric, "name", str(page.photometric)).lower()
            text = f"{page.samplesperpixel} x {page.bitspersample} bits, photometric interpretation {kind}"
            raise DataError(f"{origin} has pixels that are not read: {text}", IMAGE_HINT, "wrong-mode")
        alphas = [_ALPHAS[int(extra)] for extra in page.extrasamples if int(extra) in _ALPHAS]
        tag, profile = page.tags.get(_ORIENTATION), page.tags.get(_PROFILE)
        palette = None
        if colour == PALETTE:
            colormap = np.asarray(page.colormap)  # some programs store 8 bits, as libtiff notices
            palette = (colormap if colormap.max() < 256 else colormap >> 8).T.astype(np.uint8)
        return Form(
            "TIFF",
            (page.imagelength, page.imagewidth),
            int(page.bitspersample),
            numbers,
            colour,
            alphas[0] if alphas else "",
            int(tag.value) if tag is not None and tag.value in range(1, 9) else 1,
            palette,
            profile is not None and _has_other_colours(bytes(profile.value)),
        )

    def page(self, number: int = 0) -> Page:
        many = self.num_pages > 1
        origin = f"{self._origin}, page {number + 1} of {self.num_pages}," if many else self._origin
        channels = [self._plane(plane, origin) for plane in self._planes[number].tolist()]
        if len(channels) == 1:
            return channels[0]
        numbers = [np.asarray(page.image) if page.numbers is None else page.numbers for page in channels]
        return Page(channels[0].form._replace(colour=RGB), None, np.stack(numbers, axis=-1))

    def _plane(self, number: int, origin: str) -> Page:
        """Decodes a page of the file, or a plane of a volume behind one table."""
        page = self._pages[min(number, len(self._pages) - 1)]
        form = self._form(page, origin)
        for width, height in ((page.imagewidth, page.imagelength), (page.tilewidth, page.tilelength)):
            check_pixels(width, height, self._max_pixels, origin)
        is_ycbcr = int(page.photometric) == _YCBCR and int(page.compression) != _JPEG
        if int(page.compression) in _BY_PILLOW or (is_ycbcr and page.is_subsampled):
            return self._by_pillow(page, number, form)
        self._check_coded(page, origin)
        samples = self._samples(page, number)
        if page.axes == "SYX":
            samples = np.moveaxis(samples, 0, -1)
        samples = samples.reshape(*form.size, page.samplesperpixel)
        samples = samples.astype(np.uint8) if samples.dtype == bool else samples
        bands = _PHOTOMETRIC[_photometric(page)][1]
        opacity = None
        for place in range(bands, samples.shape[2]):
            extra = page.extrasamples[place - bands : place - bands + 1]
            band = samples[..., place]
            if extra and opacity is None and int(extra[0]) in _ALPHAS:
                opacity = _opacity(band, form.bits, origin)
            elif (band != band[0, 0]).any() or band[0, 0] not in (0, 2**form.bits - 1):  # more than padding
                raise DataError(
                    f"{origin} has {samples.shape[2]} bands, and the meaning of band {place + 1} is not stored",
                    "save grey or RGB without more bands, or say in the tag ExtraSamples that it is transparency",
                    "wrong-mode",
                )
        if is_ycbcr:
            colours = np.ascontiguousarray(samples[..., :bands])
            image = pillow().frombytes("YCbCr", form.size[::-1], colours.tobytes()).convert("RGB")
            return Page(form, image, None, opacity)
        numbers = samples[..., 0] if bands == 1 else samples[..., :bands]
        return Page(
            form, None, numbers, opacity, _has_data(page, samples[..., :bands]) if form.is_deep else None
        )

    def _check_coded(self, page: TiffPage, origin: str) -> None:
        """Refuses coded data that end early, which some decoders fill up.  Raises DataError."""
        compression = int(page.compression)
        if compression == 1:
            return  # tifffile notices it
        for begin, count in zip(page.dataoffsets, page.databytecounts):
            end = begin + count
            is_zeros = compression in _NEVER_ZEROS and self._data[begin:end].endswith(HOLE)
            if end > len(self._data) or is_zeros:
                text = f"{origin} cannot be decoded: it is truncated, its coded data end early"
                raise DataError(text, AGAIN, "truncated")

    def _samples(self, page: TiffPage, number: int) -> np.ndarray:
        """Returns the stored samples of a page, or of a plane of a volume behind one table."""
        if not number or len(self._pages) > 1:
            return np.asarray(page.asarray(maxworkers=1))
        if self._volume is None:
            self._volume = self._series.asarray().reshape(self._num_planes, *page.shape)
        return self._volume[number]

    def _by_pillow(self, page: TiffPage, number: int, form: Form) -> Page:
        """Decodes a page with Pillow, which sees no orientation: some versions apply it, and others do not."""
        data = bytearray(self._data)
        tag = page.tags.get(_ORIENTATION)
        if tag is not None:
            data[tag.valueoffset : tag.valueoffset + 2] = (1).to_bytes(
                2, "little" if data[:2] == b"II" else "big"
            )
        image = pillow().open(io.BytesIO(bytes(data)), formats=["TIFF"])
        image.seek(page.index)
        image.load()
        if form.bits > 1:
            return Page(form, image.convert("L" if form.colour == GREY else "RGB"))
        is_one = np.asarray(image) != (form.colour == WHITE_IS_ZERO)  # Pillow inverts them
        return Page(form, None, is_one.astype(np.uint8))


def _has_data(page: TiffPage, samples: np.ndarray) -> Optional[np.ndarray]:
    """Returns which pixels of [h, w, bands] have another number than GDAL's for no data; None without such a number."""
    tag = page.tags.get(_NO_DATA)
    try:
        number = None if tag is None else float(tag.value)
    except (TypeError, ValueError):  # viewers ignore it, too
        number = None
    if number is None:
        return None
    if samples.dtype.kind == "f":
        with np.errstate(over="ignore"):
            number = samples.dtype.type(number)  # the text has more digits than the pixels
    lacks = np.isnan(samples) if np.isnan(number) else samples == number
    return np.asarray(~lacks.all(axis=2))


def _opacity(alpha: np.ndarray, bits: int, origin: str) -> np.ndarray:
    """Returns a stored alpha channel as uint8, with 255 for opaque pixels."""
    most = 1.0 if alpha.dtype.kind == "f" else 2.0**bits - 1
    if alpha.dtype.kind == "i" or not 0 <= alpha.min() <= alpha.max() <= most:
        text = f"{origin} has transparency of {alpha.dtype} with values from {alpha.min()} to {alpha.max()}"
        raise DataError(text, "save it without transparency", "wrong-mode")
    return np.rint(alpha * (255 / most)).astype(np.uint8)


# -- images -------------------------------------------------------------------------------------------------------


def open_image(
    data: bytes, origin: str, channels: int, max_pixels: int = MAX_IMAGE_PIXELS, strict: bool = False
) -> PillowImage:
    """Returns the first page of an image file as viewers show it: an upright Pillow image, "L" or "RGB".

    Args:
        data: the encoded file.
        origin: the image's name in messages: "image PATH".
        channels: 1 or 3.
        max_pixels, strict: see :func:`opened`.

    Raises:
        DataError: as :func:`opened`.
    """
    with opened(data, origin, max_pixels, strict=strict) as file:
        return displayed(file.page(), origin, channels)


def remarks_on(file: ImageFile, page: Page) -> List[str]:
    """Returns what a run says about an image whose first page it uses: words after "files have"."""
    shows_white = _opacities(page)[0] < 255
    colours = [INKS] * (page.form.colour == CMYK) + [OTHER_COLOURS] * page.form.has_other_colours
    return [SEVERAL] * (file.num_frames > 1) + [SHOWS_WHITE] * shows_white + colours + remarks_on_page(page)


def remarks_on_page(page: Page) -> List[str]:
    """Returns what a run says about a page that it takes as it is: words after "pages have"."""
    return [IS_STRETCHED] * page.form.is_deep


def of_pillow(image: PillowImage, origin: str, channels: int, max_pixels: int) -> PillowImage:
    """Returns the result of :func:`open_image` for a Pillow image; the file of one that is not decoded yet is read.

    The orientation tag is that of the file's pixels: an image that Pillow made from another one is taken as it is.
    """
    from PIL.ImageFile import ImageFile as FileOfPillow

    check_pixels(image.width, image.height, max_pixels, origin)
    if getattr(image, "tile", None) and not image.tell():
        image.fp.seek(0)
        return open_image(image.fp.read(), origin, channels, max_pixels, strict=True)
    known = image if image.mode in _MODES else image.convert("RGB")
    page = _PillowFile(known, origin).page()
    if not isinstance(image, FileOfPillow):
        page = page._replace(form=page.form._replace(orientation=1))
    return displayed(page, origin, channels)


def displayed(page: Page, origin: str, channels: int) -> PillowImage:
    """Returns a page as viewers show it: an upright Pillow image, "L" or "RGB", with white under transparency.

    Raises:
        DataError: no pixel is seen, because all are transparent; or as :func:`stretched`.
    """
    Image = pillow()
    if not _opacities(page)[1]:
        hint = "save it without transparency, or remove it"
        raise DataError(f"{origin} is transparent everywhere: it would be white", hint, "unreadable")
    image, mode = _eight_bits(page, origin), "L" if channels == 1 else "RGB"
    if image.mode in ("LA", "PA", "P", "RGBA"):
        layered = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layered.size, (255, 255, 255, 255)), layered)
    if image.mode != mode:  # convert always copies
        image = image.convert(mode)
    turn = page.form.orientation
    return image if turn == 1 else Image.fromarray(turned(np.asarray(image), turn))


def plain_pixels(page: Page, origin: str) -> np.ndarray:
    """Returns a page of an image for a segmentation network, upright: uint8 [h, w] for grey, [h, w, 3] for colour.

    Single bits and palettes of greys become grey; other palettes become colour.  A channel of transparency that is
    opaque everywhere is dropped.

    Raises:
        DataError: transparent pixels, or CMYK.
    """
    image, form = _eight_bits(page, origin), page.form
    if form.colour == CMYK:
        raise DataError(f"{origin} has {form.pixels}", IMAGE_HINT, "wrong-mode")
    _check_opaque(page, origin)
    palette = form.palette
    is_grey = image.mode in ("1", "L", "LA") or (
        palette is not None and bool((palette == palette[:, :1]).all())
    )
    if "A" in image.mode or form.alpha:
        image = image.convert("RGBA").convert("RGB")
    return turned(np.array(image.convert("L" if is_grey else "RGB")), form.orientation)


def _coloured(palette: np.ndarray, numbers: np.ndarray, origin: str) -> np.ndarray:
    """Returns the colours of numbers.

    Raises:
        DataError: the palette lacks one of them.
    """
    if numbers.max() >= len(palette):
        text = f"{origin} has the number {numbers.max()}, and a palette of {counted(len(palette), 'colour')}"
        raise DataError(text, MASK_HINT, "mask-values")
    return palette[numbers]


def _check_opaque(page: Page, origin: str) -> None:
    """Rejects a page with pixels that are not opaque."""
    if _opacities(page)[0] < 255:
        raise DataError(f"{origin} has {page.form.pixels}", "save it without transparency", "wrong-mode")


def _opacities(page: Page) -> Tuple[int, int]:
    """Returns the least and the largest opacity of a page's pixels, 0 to 255."""
    if page.opacity is not None:
        return int(page.opacity.min()), int(page.opacity.max())
    if page.form.alpha and page.image is not None:
        least, most = page.image.convert("RGBA").getchannel("A").getextrema()
        return int(least), int(most)
    return 255, 255


def _eight_bits(page: Page, origin: str) -> PillowImage:
    """Returns a page as a Pillow image of 8-bit samples with its transparency, not upright yet.

    Premultiplied colours are laid on white: they lack the share of white that their opacity leaves.
    """
    Image = pillow()
    image, form, opacity = page.image, page.form, page.opacity
    if image is None:
        numbers = page.numbers
        assert numbers is not None
        if form.palette is not None:
            image = Image.fromarray(form.palette[numbers])
        elif form.colour == CMYK:
            inks = numbers >> (form.bits - 8) if form.bits > 8 else numbers
            image = Image.frombytes("CMYK", form.size[::-1], inks.astype(np.uint8).tobytes())
        else:
            image = Image.fromarray(_shades(page, numbers, origin))
    if opacity is not None:
        if form.alpha == PREMULTIPLIED and opacity.min() < 255:
            if form.is_deep:
                raise DataError(f"{origin} has {form.pixels}", "save it without transparency", "wrong-mode")
            colours = np.asarray(image.convert("RGB")).astype(np.int16)
            on_white = np.minimum(colours + 255 - opacity[..., np.newaxis].astype(np.int16), 255)
            return Image.fromarray(on_white.astype(np.uint8))
        image = image.convert({"1": "L", "CMYK": "RGB"}.get(image.mode, image.mode))  # copies
        image.putalpha(Image.fromarray(opacity))
    return image


def _shades(page: Page, numbers: np.ndarray, origin: str) -> np.ndarray:
    """Returns the stored grey or RGB numbers of a page as uint8, dark to bright; pixels without data are black."""
    form = page.form
    if form.bits < 8:
        most = 2**form.bits - 1
        numbers = _scaled(numbers, most)
    elif form.bits == 8 and form.numbers == SIGNED:
        numbers = (numbers.astype(np.int16) + 128).astype(np.uint8)
    if form.colour == WHITE_IS_ZERO:
        numbers = -numbers if form.numbers == FLOATING else ~numbers
    if not form.is_deep:
        return numbers
    is_counted = None if page.opacity is None else page.opacity > 0
    if page.has_data is None:
        return stretched(numbers, origin, is_counted)
    numbers = numbers.copy()
    numbers[~page.has_data] = 0  # such a number need not be finite
    shades = stretched(numbers, origin, page.has_data if is_counted is None else page.has_data & is_counted)
    shades[~page.has_data] = 0
    return shades


def stretched(pixels: np.ndarray, origin: str, is_counted: Optional[np.ndarray] = None) -> np.ndarray:
    """Returns uint8 pixels: pixels of more than 8 bits, stretched from a dark to a bright number of the image.

    The range of the data type is no useful scale: 12-bit cameras fill a sixteenth of 16 bits.  With the n numbers of
    all channels in ascending order, ``dark`` is the number at c = floor((n - 1) / 1000) and ``bright`` the one at
    n - 1 - c.  Numbers up to ``dark`` become 0, numbers from ``bright`` on become 255, and numbers in between become
    floor(255 (number - dark) / (bright - dark) + 1/2).  If the two are equal, the smallest and the largest number of
    the image are used instead; an image of one number becomes black.

    Args:
        pixels: integers or floats [h, w] or [h, w, channels].
        origin: the image's name in messages.
        is_counted: bool [h, w], the pixels whose numbers are counted; None, or none of them: all.

    Raises:
        DataError: NaN or infinite pixels.
    """
    counted = pixels if is_counted is None or not is_counted.any() else pixels[is_counted]
    if not np.isfinite(pixels).all():
        raise DataError(
            f"{origin} has pixels that are not finite numbers (NaN, inf)",
            "replace them by numbers",
            "wrong-mode",
        )
    last = counted.size - 1
    cut = CUT_THOUSANDTHS * last // 1000
    places = [0, cut, last - cut, last]
    least, dark, bright, most = (float(v) for v in np.partition(counted.reshape(-1), places)[places])
    if dark == bright:
        dark, bright = least, most
    # In place, because the float64 values take 8 bytes per pixel.
    values = np.clip(pixels.astype(np.float64), dark, bright)
    values -= dark
    values *= 255
    values /= max(bright - dark, np.finfo(np.float64).tiny)
    values += 0.5
    return values.astype(np.uint8)


def turned(array: np.ndarray, orientation: int) -> np.ndarray:
    """Returns pixels [h, w, ...], or classes [h, w], as their orientation tag says that they are displayed."""
    if orientation >= 5:
        array = array.swapaxes(0, 1)
    rows = slice(None, None, -1) if orientation in (3, 4, 7, 8) else slice(None)
    columns = slice(None, None, -1) if orientation in (2, 3, 6, 7) else slice(None)
    return np.ascontiguousarray(array[rows, columns])


# -- masks --------------------------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """The stored numbers of a mask.

    Attributes:
        numbers: integers [h, w] of 0 to 65535, or [h, w, 3] of colours, upright; single bits are 0 and 255.
        form: how they are stored.
    """

    numbers: np.ndarray
    form: Form


def mask_numbers(page: Page, origin: str, colours: bool = False) -> Mask:
    """Returns the stored numbers of a mask, whatever its photometric interpretation.

    Args:
        page: the decoded mask.
        origin: the mask's name in messages.
        colours: whether classes are colours; a palette then counts by its colours, else by its numbers.

    Raises:
        DataError: the pixels are floating-point, transparent, CMYK or single bits with white as zero, or values lie
            outside 0 to 65535.
    """
    form = page.form
    if form.colour == CMYK or form.numbers == FLOATING:
        raise DataError(f"{origin} has {form.pixels}", MASK_HINT, "wrong-mode")
    _check_opaque(page, origin)
    if page.numbers is None:
        assert page.image is not None
        image = page.image.convert(page.image.mode.replace("A", "")) if "A" in page.image.mode else page.image
        numbers = np.asarray(image)
    else:
        numbers = page.numbers
    if form.bits == 1 and form.colour == WHITE_IS_ZERO:
        raise DataError(
            f"{origin} has single bits of which 0 is white: viewers show the ones as black, and arrays of tifffile and "
            "scikit-image have them as True, so which is the foreground is not known",
            "save masks as 8-bit grey; if the ones are the foreground: tifffile.imwrite(FILE, tifffile.imread(FILE) * "
            "numpy.uint8(255))",
            "mask-values",
        )
    if form.bits == 1 and form.colour != PALETTE:
        numbers = np.where(numbers != 0, 255, 0).astype(np.uint8)
    elif form.palette is not None and colours:
        numbers = _coloured(form.palette, numbers, origin)
    least, most = int(numbers.min()), int(numbers.max())
    if least < 0 or most > (255 if numbers.ndim == 3 and colours else LARGEST_VALUE):
        raise DataError(
            f"{origin} has values from {least} to {most}; 0 to 65535 can be classes, and 0 to 255 are colours",
            MASK_HINT,
            "mask-values",
        )
    numbers = numbers if numbers.dtype == np.uint8 else numbers.astype(np.uint16)
    return Mask(turned(numbers, form.orientation), form)
