"""Samples while a data set is verified: what is looked at together, and what is kept of it."""

import hashlib
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

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


class Look(NamedTuple):
    """What was seen of some samples of one size.

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


class Block(NamedTuple):
    """Samples of one size that are looked at together: an image file, or some of an array.

    Attributes:
        subset: "train" or "eval".
        numbers: of the samples among the subset's.
        name: of the file or sample.
        load: decodes and measures them, and keeps the pixels if it is told to; raises DataError, or returns None where
            something of them was refused before.
        path: of the file that is one sample.
        said: what messages call it.
    """

    subset: str
    numbers: Sequence[int]
    name: str
    load: Callable[[bool], Optional[Look]]
    path: Optional[Path] = None
    said: str = ""


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
    """What wants to hear of the work while it goes on: a progress bar and a contact sheet.

    Attributes:
        on_total: called once with the number of samples that will be looked at.
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

    Attributes:
        name: "train" or "eval".
        num_stored: samples there are, whether or not a limit leaves some out.
        chosen: bool [num_stored] of those a limit keeps; None for all.
        name_of: the file, or file and number, of a sample by its number.
        class_counts: samples (or pixels of masks) per class.
        class_unit: "samples" or "pixels".
        checked: samples that were looked at, unreadable ones included.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_stored = 0
        self.chosen: Optional[np.ndarray] = None
        self.name_of: Callable[[int], str] = lambda index: f"sample {index}"
        self.class_counts: Numbers = np.zeros(0, np.int64)
        self.class_unit = "samples"
        self.checked = 0
        self.numbers = array("q")
        self.labels = array("q")
        self.digests = bytearray()
        self.histogram: Optional[np.ndarray] = None
        self.smallest: Optional[Tuple[int, int]] = None
        self.largest: Optional[Tuple[int, int]] = None
        self._sums: Numbers = 0.0
        self._squares: Numbers = 0.0

    def is_chosen(self, number: int) -> bool:
        """Whether a sample is to be looked at."""
        return self.chosen is None or (number < len(self.chosen) and bool(self.chosen[number]))

    def record(
        self, numbers: Sequence[int], labels: Sequence[int], measured: Measured, size: Tuple[int, int]
    ) -> None:
        """Takes what is kept of some samples of one size (height, width)."""
        self.numbers.extend(int(number) for number in numbers)
        self.labels.extend(int(label) for label in labels)
        self.digests += measured.digests
        if self.histogram is None:
            self.histogram = np.zeros_like(measured.histogram)
        if len(measured.histogram) == len(self.histogram):
            self.histogram += measured.histogram
            self._sums = self._sums + measured.means.sum(axis=0)
            self._squares = self._squares + (measured.means**2).sum(axis=0)
        if len(numbers):
            size = (int(size[0]), int(size[1]))
            area = size[0] * size[1]
            if self.smallest is None or area < self.smallest[0] * self.smallest[1]:
                self.smallest = size
            if self.largest is None or area > self.largest[0] * self.largest[1]:
                self.largest = size

    def count_classes(self, counts: np.ndarray) -> None:
        """Adds samples or pixels per class: int [at most as many as classes]."""
        if len(counts) > len(self.class_counts):
            self.class_counts = np.pad(self.class_counts, (0, len(counts) - len(self.class_counts)))
        self.class_counts[: len(counts)] += counts

    def standard_error(self) -> float:
        """Of the mean of an image's mean: the largest of all channels."""
        num = len(self.numbers)
        if num < 2:
            return math.inf
        variance = np.maximum(np.asarray(self._squares) / num - (np.asarray(self._sums) / num) ** 2, 0.0)
        return float(np.sqrt(variance.max() / (num - 1)))
