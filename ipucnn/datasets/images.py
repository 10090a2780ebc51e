"""Crops photographs to one size.

``forms`` decodes image files for training, evaluation and inference.  Pillow resizes, and releases Python's lock
meanwhile.
"""

import functools
import math
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, Type, Union

import numpy as np

from ipucnn.aliases import PillowImage, Tensor
from ipucnn.compiled import HAS_KERNELS
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.forms import (
    FEW,
    FILLER,
    displayed,
    jpeg_orientation,
    of_pillow,
    open_image,
    opened,
    pillow,
    remarks_on,
)
from ipucnn.datasets.hashing import uniform
from ipucnn.datasets.image_headers import has_hole, plain_jpeg_size
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_pixels, decoding

EVAL_MARGIN = 1.14
"""Evaluation resizes the short side to this multiple of the crop: about 256 for 224, the usual ImageNet protocol."""
MIN_AREA = 0.08
MAX_ASPECT = 4 / 3
TRIES = 10

Box = Tuple[float, float, float, float]


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


def conversions(info: DatasetInfo, input_shape: Tuple[int, int, int], augments: bool = False) -> List[str]:
    """Returns what the images of a set lose on their way to a network's input, a line each.

    Args:
        info: the facts of the set.
        input_shape: (height, width, channels) of the input.
        augments: whether the network is also trained, on random parts.
    """
    height, width, channels = input_shape
    lines = []
    if info.image_shape[0] is None and info.task == "classification":
        share = 100 / crop_of_evaluation(info, input_shape)[1]
        lines.append(
            ("evaluation" if augments else "the network")
            + f" sees the centre of each image, {share:.0f}% of the width and height of its largest part shaped "
            f"{height}x{width}" + ("; training sees random parts" if augments else "")
        )
    if info.image_shape[2] == 3 and channels == 1:
        lines.append("colours, if there are any, become grey: the network takes one channel")
    return lines


_MIRRORED = "mirrored left to right half of the time"
_CHANGES = {
    "digits": "turned by up to 12 degrees, zoomed and shifted",
    "shift": "shifted",
    "shift_flip": f"shifted, and {_MIRRORED}",
    "crop": "shifted",
    "crop_flip": f"shifted, and {_MIRRORED}",
    "dihedral": "mirrored, and turned by quarter turns",
    "elastic": "mirrored, turned by any angle, zoomed and bent",
}


def changes_of_training(info: DatasetInfo) -> str:
    """Returns what ``--augment`` does to the training images of a set, in words; "" if it does nothing."""
    if info.augmentation == "none":  # files are augmented while they are decoded
        return f"cut at random, and {_MIRRORED}" if info.decoded else ""
    return _CHANGES[info.augmentation]


def pixels_for_evaluation(
    image: Union[bytes, np.ndarray, PillowImage],
    origin: str,
    info: DatasetInfo,
    input_shape: Tuple[int, int, int],
    remarks: Optional[List[str]] = None,
) -> np.ndarray:
    """Returns the pixels of an image for validation, evaluation, inference and ``predict``, before ``preprocessing``.

    Args:
        image: an encoded file, uint8 pixels [h, w, 1 or 3], or a Pillow image.
        origin: the image's name in messages: "image PATH".
        info: facts of the data set that the network was trained on.
        input_shape: (height, width, channels) of the network's input.
        remarks: gets what is to be said about a file; see :func:`ipucnn.datasets.forms.remarks_on`.

    Returns:
        uint8 [h, w, stored channels], with h and w from :func:`crop_of_evaluation`.

    Raises:
        DataError: as :func:`ipucnn.datasets.forms.opened`.
    """
    channels, (size, margin) = info.image_shape[2], crop_of_evaluation(info, input_shape)
    if isinstance(image, bytes):
        with opened(image, origin, info.max_image_pixels, strict=True) as file:
            page = file.page()
            shown = displayed(page, origin, channels)
            if remarks is not None:
                remarks += remarks_on(file, page)
    elif not isinstance(image, np.ndarray):
        shown = of_pillow(image, origin, channels, info.max_image_pixels)
    else:
        check_pixels(image.shape[1], image.shape[0], info.max_image_pixels, origin)
        shown = pillow().fromarray(image[..., 0] if image.shape[2] == 1 else image)
        shown = shown.convert("L" if channels == 1 else "RGB")
    return _resample(shown, size, centre_box(shown.width, shown.height, size, margin))


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
    (seed, AUGMENT, epoch, round, index).  Raises DataError as :func:`ipucnn.datasets.forms.opened`, and for a crop that
    shows the grey with which libjpeg replaces missing data.
    """
    boxes = crops_of(crops)
    mirrored = uniform(state, boxes.flips) < 0.5
    size, channels = out.shape[:2], out.shape[2]
    plain = plain_jpeg_size(data) if channels == 3 else None
    if plain is not None and jpeg_orientation(data) == 1:
        check_pixels(*plain, max_pixels, origin)
        with decoding(*plain, origin):
            if _jpeg_crop(data, plain, boxes.box(*plain, size, state), mirrored, out):
                return
    image = open_image(data, origin, channels, max_pixels, strict=True)
    array = _resample(image, size, boxes.box(image.width, image.height, size, state))
    out[:] = array[:, ::-1] if mirrored else array


_JPEG_END, _JPEG_SCAN, _JPEG_PROGRESSIVE = b"\xff\xd9", b"\xff\xda", b"\xff\xc2"
_UPSAMPLED = 2
"""Extra columns: libjpeg computes colours stored at half the width from two neighbours; a part's edge lacks one."""


def _jpeg_crop(data: bytes, image_size: Tuple[int, int], box: Box, mirrored: bool, out: np.ndarray) -> bool:
    """Writes the box of a JPEG to ``out``, uint8 [h, w, 3], and decodes only the part it needs.

    Returns False if that fails; Pillow then reports the cause.  Decoding uses libjpeg's accurate transform, as Pillow
    does, so that both give the same pixels.
    """
    # Truncated or damaged, perhaps outside the box, where decoding would not notice.
    if not data.endswith(_JPEG_END) or has_hole(data):
        return False
    left, right = _with_margin(box[0], box[2], image_size[0], out.shape[1], _UPSAMPLED)
    top, bottom = _with_margin(box[1], box[3], image_size[1], out.shape[0], 0)
    resize = _tools()[2]
    is_progressive = (
        _JPEG_PROGRESSIVE in data[: data.find(_JPEG_SCAN)]
    )  # the scans themselves are long to search
    if is_progressive and data.count(_JPEG_SCAN) < 2:  # its first scan, of the whole image, may be incomplete
        return False
    # Without the end marker, the decoder fails at missing data; so it does at the last line, and if it joins scans.
    needs_end = is_progressive or bottom == image_size[1]
    window = (top, left, bottom - top, right - left)
    pixels = _window(data if needs_end else _without_end(data), window)
    if pixels is None:
        return False
    # Missing data and a plain background look alike.
    is_suspect = needs_end and not is_progressive and image_size[1] > 1 and _is_constant(pixels[-4:, -4:])
    if is_suspect and _window(_without_end(data), (image_size[1] - 2, left, 1, right - left)) is None:
        return False
    resize(pixels, (left, top, *image_size), box, mirrored, out)
    return True


def _without_end(data: bytes) -> bytes:
    """Returns a JPEG with bytes that libjpeg reads ahead in place of its end marker."""
    return data[: -len(_JPEG_END)] + FILLER[:FEW]


def _is_constant(pixels: np.ndarray) -> bool:
    return bool((pixels == pixels[-1, -1]).all())


def _window(data: bytes, window: Tuple[int, int, int, int]) -> Optional[np.ndarray]:
    """Decodes a window (top, left, height, width) of a JPEG: uint8 [h, w, 3]; None if that fails."""
    decode, refusal, _ = _tools()
    # NumPy arrays and a float: TensorFlow converts anything else to tensors and attributes in Python code, which
    # takes a tenth of the decoding time.
    contents: np.ndarray = np.empty((), object)
    contents[()] = data
    try:
        return np.asarray(
            decode(
                contents=contents,
                crop_window=np.array(window, np.int32),
                channels=3,
                acceptable_fraction=1.0,
                dct_method="INTEGER_ACCURATE",
            )
        )
    except refusal:
        return None


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
