"""Samples while a data set is verified: how they are decoded, and what is kept of them."""

import hashlib
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import Numbers

DIGEST_BYTES = 16


class Measured(NamedTuple):
    """What is kept of the pixels of some images.

    Attributes:
        digests: 16 bytes per image.
        histogram: int64 [channels, 256] of all of them.
        means: float64 [n, channels].
        constant: bool [n]: all pixels of an image are one colour.
    """

    digests: bytes
    histogram: np.ndarray
    means: np.ndarray
    constant: np.ndarray


def measure(images: np.ndarray) -> Measured:
    """Measures images of one size: uint8 [n, h, w, c]."""
    from PIL import Image

    images = np.ascontiguousarray(images)
    num, height, width, channels = images.shape
    shape = f"{height}x{width}x{channels}".encode()
    digests = b"".join(
        hashlib.blake2b(image.data, digest_size=DIGEST_BYTES, person=shape[:16]).digest() for image in images
    )
    if channels in (1, 3):
        # Pillow counts many times faster than NumPy.
        stacked = images.reshape(num * height, width, channels)
        picture = Image.fromarray(stacked[..., 0] if channels == 1 else stacked)
        histogram: np.ndarray = np.array(picture.histogram(), np.int64).reshape(channels, 256)
    else:
        histogram = np.stack(
            [np.bincount(images[..., c].reshape(-1), minlength=256) for c in range(channels)]
        )
    if num == 1:
        means = (histogram @ np.arange(256)[:, np.newaxis] / max(height * width, 1)).reshape(1, channels)
        return Measured(digests, histogram, means, ((histogram > 0).sum(axis=1) == 1).all(keepdims=True))
    pixels = images.reshape(num, height * width, channels)
    constant = (pixels.max(axis=1) == pixels.min(axis=1)).all(axis=1)
    return Measured(digests, histogram, pixels.mean(axis=1), constant)


class Decoded(NamedTuple):
    """Some samples of one size, as they were read.

    Attributes:
        measured: of their pixels as training sees them.
        size: (height, width).
        labels: of their classes; of masks none.
        images: uint8 [n, h, w, c]; None where they are not drawn.
        masks: uint8 [n, h, w] of classes.
        alike: properties that all samples should have in common; see ``survey.ALIKE``.
        format: of an image file, Pillow's name of it.
        frames: of an animation.
    """

    measured: Measured
    size: Tuple[int, int]
    labels: Sequence[int] = ()
    images: Optional[np.ndarray] = None
    masks: Optional[np.ndarray] = None
    alike: Mapping[str, str] = {}
    format: str = ""
    frames: int = 1


class Lot(NamedTuple):
    """The samples of a subset, as far as they could be found.

    Attributes:
        size: how many can be decoded, or tried.
        name: the file, or file and number, of a sample by its number.
        decode: decodes and measures the samples of some numbers, and keeps their pixels if they are drawn; raises
            DataError, or returns None where a reader has refused a part of it before.
        path: the file that is one sample, by its number; None for other samples.
        place: what readers' messages call a sample, where that is not its path.
        num_stored: samples that there are, if some cannot even be tried.
        at_once: samples of one size that are decoded together.
    """

    size: int
    name: Callable[[int], str]
    decode: Callable[[Sequence[int], bool], Optional[Decoded]]
    path: Callable[[int], Optional[Path]] = lambda number: None
    place: Callable[[int], str] = lambda number: ""
    num_stored: Optional[int] = None
    at_once: int = 1


class Sample(NamedTuple):
    """A sample for the contact sheet.

    Attributes:
        name: file, or file and number.
        label: of the class, or the masked share.
        problems: codes of findings about this sample.  What only the whole set tells is added when it was read: that
            there is another with the same pixels, or that most samples are of another size.
        image: uint8 [h, w, 1 or 3].
        mask: uint8 [h, w] of classes, of segmentation sets.
        class_names: that masks may have.
        class_colours: of the masks themselves; see ``DatasetInfo``.
    """

    name: str
    label: str
    problems: List[str]
    image: np.ndarray
    mask: Optional[np.ndarray] = None
    class_names: Tuple[str, ...] = ()
    class_colours: Tuple[Tuple[int, int, int], ...] = ()


@dataclass
class Watcher:
    """What is told of the work while it goes on: a progress bar and a contact sheet.

    Attributes:
        on_total: called once with the number of samples that will be decoded.
        on_progress: called with how many of how many are done.
        wants: whether the sample at a position is to be drawn.
        on_sample: called with the position and the sample that is.
    """

    on_total: Callable[[int], None] = lambda total: None
    on_progress: Callable[[int, int], None] = lambda done, total: None
    wants: Callable[[int], bool] = lambda position: False
    on_sample: Callable[[int, Sample], None] = lambda position, sample: None


class SubsetSurvey:
    """What is gathered about one subset.

    Args:
        name: "train" or "eval".

    Attributes:
        num_stored: samples there are, whether or not a limit leaves some out.
        chosen: bool [lot.size] of those a limit keeps; None for all.
        lot: its samples.
        class_counts: samples (or pixels of masks) per class.
        class_unit: "samples" or "pixels".
        checked: samples that were decoded, or could not be.
        numbers, labels, digests: of those that could be, in their order; of a mask a checksum is the label.
        sizes: (height, width) of them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_stored = 0
        self.chosen: Optional[np.ndarray] = None
        self.lot = Lot(0, str, lambda numbers, is_drawn: None)
        self.class_counts: Numbers = np.zeros(0, np.int64)
        self.class_unit = "samples"
        self.checked = 0
        self.numbers, self.labels, self.digests = array("q"), array("q"), bytearray()
        self.histogram: Optional[np.ndarray] = None
        self.sizes: Dict[Tuple[int, int], int] = {}
        self._sums: Numbers = 0.0
        self._squares: Numbers = 0.0

    def record(self, numbers: Sequence[int], labels: Sequence[int], decoded: Decoded) -> None:
        """Takes what is kept of some samples of one size."""
        measured = decoded.measured
        self.numbers.extend(numbers)
        self.labels.extend(labels)
        self.digests += measured.digests
        if self.histogram is None:
            self.histogram = np.zeros_like(measured.histogram)
        if len(measured.histogram) == len(self.histogram):
            self.histogram += measured.histogram
            self._sums = self._sums + measured.means.sum(axis=0)
            self._squares = self._squares + (measured.means**2).sum(axis=0)
        self.sizes.setdefault(decoded.size, decoded.size[0] * decoded.size[1])

    def standard_error(self) -> float:
        """Standard error of the mean of the images' means: the largest of all channels."""
        num = len(self.numbers)
        if num < 2:
            return math.inf
        variance = np.maximum(np.asarray(self._squares) / num - (np.asarray(self._sums) / num) ** 2, 0.0)
        return float(np.sqrt(variance.max() / (num - 1)))
