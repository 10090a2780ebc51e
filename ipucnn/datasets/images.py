"""Decodes image files with Pillow, and crops photographs to one size.

Pillow reads the common variants (palettes, CMYK, 16 bit, EXIF orientation), is one decoder for training,
evaluation and inference, and releases Python's lock while it decodes and resizes.
"""

import contextlib
import ctypes
import functools
import io
import math
import warnings
from types import ModuleType
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple, Type, Union

import numpy as np

from ipucnn.aliases import PillowImage, Tensor
from ipucnn.compiled import HAS_KERNELS
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.hashing import uniform
from ipucnn.datasets.image_headers import check_header, plain_jpeg_size
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_pixels, decoding
from ipucnn.errors import DataError

EVAL_MARGIN = 1.14
"""Evaluation resizes the short side to this multiple of the crop: about 256 for 224, the usual ImageNet protocol."""
MIN_AREA = 0.08
MAX_ASPECT = 4 / 3
TRIES = 10
CUT_THOUSANDTHS = 1
"""Share of an image's darkest pixels, in thousandths, that become black; as many of the brightest become white."""
MAYBE_TRANSPARENT = ("LA", "PA", "P", "RGBA", "La", "RGBa")
FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "WEBP", "TIFF", "PPM")
"""Pillow's names of the formats read, whatever a file's extension; "JPEG" also reads the MPO files of telephones."""
MAX_EXIF_TEXT = 2**16
_ORIENTATION, _TURNED = 0x0112, range(2, 9)
"""The EXIF tag of an image's orientation, and its values for images that must be turned or mirrored."""
HINT = "convert it to JPEG or PNG, or remove it"

Box = Tuple[float, float, float, float]


@contextlib.contextmanager
def opened(data: bytes, origin: str, max_pixels: int, hint: str = HINT) -> Iterator[PillowImage]:
    """Opens a Pillow image whose header is within limits; ``load()`` decodes its first page.

    Every exception that is raised inside the block becomes a DataError about the image, because Pillow raises nearly
    any type for damaged files.  Large images wait here until others are decoded (see ``limits``).

    Args:
        data: the encoded file.
        origin: the image's name in messages: "image PATH".
        max_pixels: the value of ``--max-image-pixels``.
        hint: the error's hint for an image that cannot be decoded.

    Raises:
        DataError: the file is no image or is damaged, or has too many pixels or pixels that cannot be converted.
    """
    tile = check_header(data, origin)
    check_pixels(*tile, max_pixels, f"a tile of {origin}")
    Image = pillow()
    # Pillow rejects twice as many, before it allocates the canvas of a WebP or the first frame of a GIF.
    Image.MAX_IMAGE_PIXELS = max_pixels  # type: ignore[attr-defined]
    try:
        # Only the formats that docs/datasets.md lists: others are rare in data sets, and some of Pillow's
        # readers start programs (PostScript) or trust their input.
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_pixels(image.width, image.height, max_pixels, origin)
        with decoding(max(image.width, tile[0]), max(image.height, tile[1]), origin):
            yield image
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        text = f"{origin} has far more than --max-image-pixels {max_pixels}"
        raise DataError(text, "shrink it, or allow more of them") from error
    except Image.UnidentifiedImageError as error:
        raise DataError(f"{origin} is not an image in a known format", hint) from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        code = "truncated" if "truncated" in reason else "unreadable"  # the word of Pillow's readers
        raise DataError(f"{origin} cannot be decoded: {reason[:200]}", hint, code) from error


_pillow: List[ModuleType] = []


def pillow() -> ModuleType:
    """Returns Pillow's ``Image`` module, with its warnings about damaged files turned off."""
    if not _pillow:
        from PIL import Image

        warnings.filterwarnings("ignore", module=r"PIL\.")
        _silence_libtiff()
        _pillow.append(Image)
    return _pillow[0]


def _silence_libtiff() -> None:
    """Stops libtiff from writing errors to stderr, because ipucnn reports the exception that Pillow raises.

    If Pillow was built without a libtiff of its own that can be called, libtiff still writes them.
    """
    with contextlib.suppress(Exception):
        from PIL import _imaging  # noqa: F401 - loads the library

        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            paths = {line.split(maxsplit=5)[-1].strip() for line in lines if "libtiff" in line}
        for path in paths:
            library = ctypes.CDLL(path)
            library.TIFFSetErrorHandler(None)
            library.TIFFSetWarningHandler(None)


def open_image(data: bytes, origin: str, channels: int, max_pixels: int = MAX_IMAGE_PIXELS) -> PillowImage:
    """Returns a decoded, upright Pillow image with 1 ("L") or 3 ("RGB") channels.

    Args:
        data: the encoded file.
        origin: the image's name in messages: "image PATH".
        channels: 1 or 3.
        max_pixels: the most pixels it may have.

    Raises:
        DataError: as :func:`opened`.
    """
    with opened(data, origin, max_pixels) as image:
        return upright(image, origin, channels)


def _is_turned(image: PillowImage) -> bool:
    """Returns whether the EXIF orientation of an image turns or mirrors it."""
    # ``check_header`` does not check EXIF data that a PNG stores as hexadecimal text.
    if len(image.info.get("Raw profile type exif", "")) < MAX_EXIF_TEXT:
        with contextlib.suppress(Exception):  # a damaged EXIF block is ignored; the pixels are fine
            return image.getexif().get(_ORIENTATION) in _TURNED
    return False


def upright(image: PillowImage, origin: str, channels: int) -> PillowImage:
    """Returns the result of :func:`open_image` for a Pillow image that :func:`opened` has opened."""
    from PIL import Image, ImageOps

    image.load()
    if _is_turned(image):  # exif_transpose always copies
        with contextlib.suppress(Exception):
            image = ImageOps.exif_transpose(image) or image
    if image.mode == "F" or image.mode.startswith("I"):  # Pillow's own conversion clips the values
        image = Image.fromarray(stretched(np.asarray(image), origin))
    if image.mode in MAYBE_TRANSPARENT:  # transparent pixels become white, as in image viewers
        layered = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layered.size, (255, 255, 255, 255)), layered)
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:  # convert always copies
        image = image.convert(mode)
    if not image.width or not image.height:
        raise DataError(f"{origin} has no pixels", "remove it")
    return image


def stretched(pixels: np.ndarray, origin: str) -> np.ndarray:
    """Returns uint8 pixels: grey pixels of more than 8 bits, stretched from a dark to a bright value of the image.

    The range of the data type is no useful scale: 12-bit cameras fill a sixteenth of 16 bits.  With the n pixels in
    ascending order, ``dark`` is the value at c = floor((n - 1) / 1000) and ``bright`` the one at n - 1 - c.  Values up
    to ``dark`` become 0, values from ``bright`` on become 255, and values in between become
    floor(255 (value - dark) / (bright - dark) + 1/2).  If the two are equal, the smallest and the largest value of the
    image are used instead; an image of one value becomes black.

    Args:
        pixels: integers or floats [h, w].
        origin: the image's name in messages.

    Raises:
        DataError: NaN or infinite pixels.
    """
    if not pixels.size:
        return pixels.astype(np.uint8)
    if not np.isfinite(pixels).all():
        raise DataError(
            f"{origin} has pixels that are not finite numbers (NaN, inf)",
            "replace them by numbers",
            "wrong-mode",
        )
    last = pixels.size - 1
    cut = CUT_THOUSANDTHS * last // 1000
    places = [0, cut, last - cut, last]
    least, dark, bright, most = (float(v) for v in np.partition(pixels.reshape(-1), places)[places])
    if dark == bright:
        dark, bright = least, most
    # In place, because the float64 values take 8 bytes per pixel.
    values = np.clip(pixels.astype(np.float64), dark, bright)
    values -= dark
    values *= 255
    values /= max(bright - dark, np.finfo(np.float64).tiny)
    values += 0.5
    return values.astype(np.uint8)


def _resample(image: PillowImage, size: Tuple[int, int], box: Box) -> np.ndarray:
    """Resizes ``box`` (left, top, right, bottom) to ``size`` (height, width): uint8 [h, w, c].

    The result is antialiased, because Pillow's bilinear filter widens when it shrinks an image.
    """
    from PIL import Image

    resized = image.resize((size[1], size[0]), Image.BILINEAR, box=box)
    array = np.asarray(resized, np.uint8)
    return array[..., np.newaxis] if array.ndim == 2 else array


def centre_box(width: int, height: int, size: Tuple[int, int], margin: float = 1.0) -> Box:
    """Returns the largest centred box with the aspect of ``size`` (height, width), its sides divided by ``margin``."""
    scale = min(width / size[1], height / size[0]) / margin
    half_width, half_height = size[1] * scale / 2, size[0] * scale / 2
    return (
        width / 2 - half_width,
        height / 2 - half_height,
        width / 2 + half_width,
        height / 2 + half_height,
    )


def random_box(width: int, height: int, size: Tuple[int, int], state: int) -> Box:
    """Returns a random box with 8 to 100 % of the area and 3/4 to 4/3 of the target's aspect.

    This is the Inception-style crop (Szegedy et al. 2014, arXiv:1409.4842): ten tries, then the largest centred box.
    The box is a function of the hash ``state``.
    """
    target = size[1] / size[0]
    for attempt in range(0, 4 * TRIES, 4):
        area, aspect, x, y = (uniform(state, attempt + k) for k in (0, 1, 2, 3))
        ratio = target * math.exp((2 * aspect - 1) * math.log(MAX_ASPECT))
        pixels = width * height * (MIN_AREA + (1 - MIN_AREA) * area)
        box_width, box_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = math.floor(x * (width - box_width + 1))
            top = math.floor(y * (height - box_height + 1))
            return (left, top, left + box_width, top + box_height)
    return centre_box(width, height, size)


DISTORTED_AREA = 0.05
DISTORTED_ASPECTS = (0.75, 1.33)
DISTORTED_TRIES = 100


def distorted_box(width: int, height: int, size: Tuple[int, int], state: int) -> Box:
    """Returns a random box with 5 to 100 % of the area and 0.75 to 1.33 of the target's aspect.

    This is the distribution of TensorFlow's ``sample_distorted_bounding_box`` with the public application's ranges for
    ImageNet.  The aspect is uniform; then the height is uniform among those whose box fits into the image and is large
    enough.  After a hundred tries, the box is the whole image.  The public application also rejects boxes that show
    less than a tenth of a marked object, or of the image if no object is marked.
    """
    least, target = DISTORTED_AREA * width * height, size[1] / size[0]
    for attempt in range(0, 4 * DISTORTED_TRIES, 4):
        shape, tall, x, y = (uniform(state, attempt + k) for k in (0, 1, 2, 3))
        aspect = target * (DISTORTED_ASPECTS[0] + shape * (DISTORTED_ASPECTS[1] - DISTORTED_ASPECTS[0]))
        most = min(height, math.floor((width + 0.5) / aspect))
        smallest = min(round(math.sqrt(least / aspect)), most)
        box_height = smallest + math.floor(tall * (most - smallest + 1))
        box_width = round(box_height * aspect)
        if box_width * box_height < least:  # because of rounding
            box_height += 1
            box_width = round(box_height * aspect)
        if least <= box_width * box_height and 0 < box_width <= width and 0 < box_height <= height:
            left, top = math.floor(x * (width - box_width + 1)), math.floor(y * (height - box_height + 1))
            return (left, top, left + box_width, top + box_height)
    return (0, 0, width, height)


class Crops(NamedTuple):
    """The crops of photographs for training and evaluation.

    Attributes:
        box: function that returns the box of a training image, before it is resized.
        flips: hash word of the random number that decides about mirroring; it follows the words of all tries.
        margin: the image's short side over that of the crop, for evaluation.
    """

    box: Callable[[int, int, Tuple[int, int], int], Box]
    flips: int
    margin: float


_PHOTOGRAPHS = Crops(random_box, 4 * TRIES, EVAL_MARGIN)
_CROPS: Dict[str, Crops] = {"imagenet": Crops(distorted_box, 4 * DISTORTED_TRIES, 256 / 224)}


def crops_of(dataset: str) -> Crops:
    """Returns the crops of a data set by its name: the public application's for ImageNet, else Inception-style ones."""
    return _CROPS.get(dataset, _PHOTOGRAPHS)


def crop_of_evaluation(info: DatasetInfo, input_shape: Tuple[int, int, int]) -> Tuple[Tuple[int, int], float]:
    """Returns the size (height, width) of an evaluation crop, and its margin.

    The margin is the width of the largest box with the crop's aspect, over the width of the box that is taken.  If all
    images of a set have one size, they keep it, and are resized to the network's input afterwards.  Otherwise the short
    side is resized to 1.14 times the crop, or as :func:`crops_of` defines, in one resampling with the crop.
    """
    height, width, _ = info.image_shape
    if height is None or width is None:
        return (input_shape[0], input_shape[1]), crops_of(info.crops).margin
    return (height, width), 1.0


def pixels_for_evaluation(
    image: Union[bytes, np.ndarray, PillowImage],
    origin: str,
    info: DatasetInfo,
    input_shape: Tuple[int, int, int],
) -> np.ndarray:
    """Returns the pixels of an image for validation, evaluation, inference and ``predict``, before ``preprocessing``.

    Args:
        image: an encoded file, uint8 pixels [h, w, 1 or 3], or a Pillow image.
        origin: the image's name in messages: "image PATH".
        info: facts of the data set that the network was trained on.
        input_shape: (height, width, channels) of the network's input.

    Returns:
        uint8 [h, w, stored channels], with h and w from :func:`crop_of_evaluation`.

    Raises:
        DataError: as :func:`opened`.
    """
    channels, (size, margin) = info.image_shape[2], crop_of_evaluation(info, input_shape)
    if isinstance(image, bytes):
        picture = open_image(image, origin, channels, info.max_image_pixels)
    elif not isinstance(image, np.ndarray):
        check_pixels(image.width, image.height, info.max_image_pixels, origin)
        picture = upright(image, origin, channels)
    else:
        check_pixels(image.shape[1], image.shape[0], info.max_image_pixels, origin)
        picture = pillow().fromarray(image[..., 0] if image.shape[2] == 1 else image)
        picture = picture.convert("L" if channels == 1 else "RGB")
    return _resample(picture, size, centre_box(picture.width, picture.height, size, margin))


def decode_for_training(
    data: bytes,
    origin: str,
    out: np.ndarray,
    state: int,
    max_pixels: int = MAX_IMAGE_PIXELS,
    crops: str = "",
) -> None:
    """Writes a random resized crop, mirrored half of the time, to ``out``: uint8 [h, w, channels].

    ``crops`` is the name for :func:`crops_of`.  The result is a pure function of the image and ``state``, the hash of
    (seed, AUGMENT, epoch, round, index).  Raises DataError as :func:`opened`.
    """
    boxes = crops_of(crops)
    mirrored = uniform(state, boxes.flips) < 0.5
    size, channels = out.shape[:2], out.shape[2]
    plain = plain_jpeg_size(data) if channels == 3 else None
    if plain is not None:
        check_pixels(*plain, max_pixels, origin)
        with decoding(*plain, origin):
            if _jpeg_crop(data, plain, boxes.box(*plain, size, state), mirrored, out):
                return
    with opened(data, origin, max_pixels) as image:
        is_plain = channels == 3 and image.format == "JPEG" and image.mode == "RGB" and not _is_turned(image)
        if is_plain and _jpeg_crop(
            data, image.size, boxes.box(image.width, image.height, size, state), mirrored, out
        ):
            return
        image = upright(image, origin, channels)
        array = _resample(image, size, boxes.box(image.width, image.height, size, state))
        out[:] = array[:, ::-1] if mirrored else array


_JPEG_END = b"\xff\xd9"
_UPSAMPLED = 2
"""Extra columns: libjpeg computes colours stored at half the width from two neighbours; a part's edge lacks one."""


def _jpeg_crop(data: bytes, image_size: Tuple[int, int], box: Box, mirrored: bool, out: np.ndarray) -> bool:
    """Writes the box of a JPEG to ``out``, uint8 [h, w, 3], and decodes only the part it needs.

    Returns False if that fails; Pillow then reports the cause.  Decoding uses libjpeg's accurate transform, as Pillow
    does, so that both give the same pixels.
    """
    if not data.endswith(_JPEG_END):  # truncated, perhaps below the box, where decoding would not notice
        return False
    left, right = _with_margin(box[0], box[2], image_size[0], out.shape[1], _UPSAMPLED)
    top, bottom = _with_margin(box[1], box[3], image_size[1], out.shape[0], 0)
    decode, refusal, resize = _tools()
    # NumPy arrays and a float: TensorFlow converts anything else to tensors and attributes in Python code, which
    # takes a tenth of the decoding time.
    contents: np.ndarray = np.empty((), object)
    contents[()] = data
    try:
        pixels = np.asarray(
            decode(
                contents=contents,
                crop_window=np.array((top, left, bottom - top, right - left), np.int32),
                channels=3,
                acceptable_fraction=1.0,
                dct_method="INTEGER_ACCURATE",
            )
        )
    except refusal:
        return False
    resize(pixels, (left, top, *image_size), box, mirrored, out)
    return True


@functools.lru_cache(maxsize=None)
def _tools() -> Tuple[Callable[..., Tensor], Type[Exception], Callable[..., None]]:
    """Returns the functions for each training photograph: they decode, and resize; the exception is that of decoding.

    They are kept, because even a repeated import inside a function takes time.
    """
    import tensorflow as tf

    if HAS_KERNELS:
        from ipucnn.datasets.kernels import resize
    else:
        resize = _resize_with_pillow
    return tf.raw_ops.DecodeAndCropJpeg, tf.errors.InvalidArgumentError, resize


def _resize_with_pillow(
    pixels: np.ndarray, place: Tuple[int, int, int, int], box: Box, mirrored: bool, out: np.ndarray
) -> None:
    """Replaces ``kernels.resize`` if Numba cannot compile."""
    left, top = place[:2]
    inside = (box[0] - left, box[1] - top, box[2] - left, box[3] - top)
    array = _resample(pillow().fromarray(pixels), out.shape[:2], inside)
    out[:] = array[:, ::-1] if mirrored else array


def _with_margin(begin: float, end: float, length: int, num: int, more: int) -> Tuple[int, int]:
    """Returns the range of source pixels for ``num`` output pixels between ``begin`` and ``end``, and ``more`` pixels
    on each side, within a line of ``length`` pixels."""
    margin = math.ceil(max(1.0, (end - begin) / num)) + more
    return max(0, math.floor(begin) - margin), min(length, math.ceil(end) + margin)
