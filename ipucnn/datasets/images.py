"""Decoding image files with Pillow, and the crops that bring photographs to one size.  No TensorFlow.

Pillow reads what people have (palettes, CMYK, 16 bit, EXIF orientation), gives one decoder to training,
evaluation and inference, and releases Python's lock while it decodes and resizes.
"""

import contextlib
import io
import math
from typing import Any, Tuple

import numpy as np

from ipucnn.datasets.hashing import AUGMENT, uniform
from ipucnn.errors import DataError

EVAL_MARGIN = 1.14
"""Evaluation resizes the short side to this times the crop: 256 for 224, the usual ImageNet protocol."""
MIN_AREA = 0.08
MAX_ASPECT = 4 / 3
TRIES = 10
SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I")
MAYBE_TRANSPARENT = ("LA", "PA", "P", "RGBA", "La", "RGBa")
HINT = "convert it to JPEG or PNG, or remove it"

Box = Tuple[float, float, float, float]


def open_image(data: bytes, origin: str, channels: int) -> Any:
    """A decoded Pillow image with 1 ("L") or 3 ("RGB") channels, upright.

    Args:
        data: the encoded file.
        origin: what it is, for messages: "image PATH".
        channels: 1 or 3.

    Raises:
        DataError: no image, damaged, or absurdly large.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data))
        if Image.MAX_IMAGE_PIXELS and image.width * image.height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels are too many")  # Pillow only warns
        image.load()
    except Image.UnidentifiedImageError as error:
        raise DataError(f"{origin} is not an image in a known format", HINT) from error
    except Exception as error:  # Pillow's plugins raise a wide variety for damaged files
        raise DataError(f"{origin} cannot be decoded: {error}", HINT) from error
    with contextlib.suppress(Exception):  # a damaged EXIF block says nothing; the pixels are fine
        image = ImageOps.exif_transpose(image) or image
    if image.mode in SIXTEEN_BIT:  # Pillow's own conversion clips 16 bits instead of scaling them
        image = Image.fromarray((np.asarray(image, np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode in MAYBE_TRANSPARENT:  # what is transparent shows white, as viewers do
        layered = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layered.size, (255, 255, 255, 255)), layered)
    return image.convert("L" if channels == 1 else "RGB")


def _resample(image: Any, size: Tuple[int, int], box: Box) -> Any:
    """uint8 [h, w, c]: ``box`` (left, top, right, bottom) at ``size`` (height, width).

    Pillow's bilinear filter widens when it shrinks: it is antialiased.
    """
    from PIL import Image

    resized = image.resize((size[1], size[0]), Image.BILINEAR, box=box)
    array = np.asarray(resized, np.uint8)
    return array[..., np.newaxis] if array.ndim == 2 else array


def centre_box(width: int, height: int, size: Tuple[int, int], margin: float = 1.0) -> Box:
    """The largest centred box of the aspect of ``size`` (height, width), with its sides over ``margin``."""
    scale = min(width / size[1], height / size[0]) / margin
    half_width, half_height = size[1] * scale / 2, size[0] * scale / 2
    return (
        width / 2 - half_width,
        height / 2 - half_height,
        width / 2 + half_width,
        height / 2 + half_height,
    )


def decode_for_eval(data: bytes, origin: str, size: Tuple[int, int], channels: int) -> Any:
    """uint8 [h, w, channels]: the centre after the short side was resized to 1.14 times the crop.

    Both steps are one resampling of the centre box.  Raises DataError.
    """
    image = open_image(data, origin, channels)
    return _resample(image, size, centre_box(image.width, image.height, size, EVAL_MARGIN))


def decode_to_size(data: bytes, origin: str, size: Tuple[int, int], channels: int) -> Any:
    """uint8 [h, w, channels]: unchanged pixels where the image has that size, else its centre resized.

    Raises DataError.
    """
    image = open_image(data, origin, channels)
    return _resample(image, size, centre_box(image.width, image.height, size))


def random_box(width: int, height: int, size: Tuple[int, int], seed: int, words: Tuple[int, int, int]) -> Box:
    """A box of 8 to 100 % of the area and 3/4 to 4/3 of the target's aspect, at a random place.

    Inception-style crops (Szegedy et al. 2014, arXiv:1409.4842): ten tries, then the centre.
    """
    target = size[1] / size[0]
    for attempt in range(TRIES):
        area, aspect, x, y = (uniform(seed, AUGMENT, *words, 4 * attempt + k) for k in range(4))
        ratio = target * math.exp((2 * aspect - 1) * math.log(MAX_ASPECT))
        pixels = width * height * (MIN_AREA + (1 - MIN_AREA) * area)
        box_width, box_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = math.floor(x * (width - box_width + 1))
            top = math.floor(y * (height - box_height + 1))
            return (left, top, left + box_width, top + box_height)
    return centre_box(width, height, size)


def decode_for_training(
    data: bytes, origin: str, size: Tuple[int, int], channels: int, seed: int, words: Tuple[int, int, int]
) -> Any:
    """uint8 [h, w, channels]: a random resized crop, mirrored half of the time.

    A pure function of the image, ``seed`` and ``words`` (epoch, round, index).  Raises DataError.
    """
    image = open_image(data, origin, channels)
    array = _resample(image, size, random_box(image.width, image.height, size, seed, words))
    if uniform(seed, AUGMENT, *words, 4 * TRIES) < 0.5:
        array = np.ascontiguousarray(array[:, ::-1])
    return array
