"""Types of samples during verification: their decoding, and the measurements that are kept."""

import hashlib
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.aliases import Numbers
from ipucnn.datasets.problems import Problem
from ipucnn.events import Item

DIGEST_BYTES = 16


class PixelMeasurements(NamedTuple):
    """Measurements of the pixels of n images.

    Attributes:
        digests: 16 bytes per image.
        histogram: int64 [channels, 256] of all images.
        means: float64 [n, channels].
        constant: bool [n], whether all pixels of an image have one colour.
        size: (height, width).
    """

    digests: bytes
    histogram: np.ndarray
    means: np.ndarray
    constant: np.ndarray
    size: Tuple[int, int]


def measure(images: np.ndarray) -> PixelMeasurements:
    """Measures images of one size: uint8 [n, h, w, 1 or 3]."""
    from PIL import Image

    images = np.ascontiguousarray(images)
    num, height, width, channels = images.shape
    shape = f"{height}x{width}x{channels}".encode()
    digests = b"".join(
        hashlib.blake2b(image.data, digest_size=DIGEST_BYTES, person=shape[:16]).digest() for image in images
    )
    # Pillow counts many times faster than NumPy.
    stacked = images.reshape(num * height, width, channels)
    picture = Image.fromarray(stacked[..., 0] if channels == 1 else stacked)
    histogram: np.ndarray = np.array(picture.histogram(), np.int64).reshape(channels, 256)
    if num == 1:
        means = (histogram @ np.arange(256)[:, np.newaxis] / max(height * width, 1)).reshape(1, channels)
        constant = ((histogram > 0).sum(axis=1) == 1).all(keepdims=True)
        return PixelMeasurements(digests, histogram, means, constant, (height, width))
    pixels = images.reshape(num, height * width, channels)
    constant = (pixels.max(axis=1) == pixels.min(axis=1)).all(axis=1)
    return PixelMeasurements(digests, histogram, pixels.mean(axis=1), constant, (height, width))


class Decoded(NamedTuple):
    """Decoded samples of one size.

    Attributes:
        measured: measurements of the pixels that training sees.
        labels: classes, integers [n], or masks of classes and IGNORED, integers [n, h, w].
        images: uint8 [n, h, w, c]; None if no sample is drawn on the contact sheet and the pixels are not in memory.
        alike: properties that all samples should have in common; see ``survey.ALIKE``.
        format: Pillow's name of an image file's format.
        frames: number of frames of an image file.
        deep: the type of its samples in words, if they are stretched to 8 bits.
        has_other_colours: whether it has a profile of colours that is not applied.
    """

    measured: PixelMeasurements
    labels: np.ndarray
    images: Optional[np.ndarray] = None
    alike: Mapping[str, str] = {}
    format: str = ""
    frames: int = 1
    deep: str = ""
    has_other_colours: bool = False


Result = Tuple[List[int], Union[Decoded, Problem, None]]
"""The numbers of samples, and the decoded samples, or what a reader found wrong with them."""


class SubsetSamples(NamedTuple):
    """The samples of a subset that the readers found.

    Attributes:
        size: number of samples to decode.
        name: function that returns the file, or file and number, of a sample by its number.
        decode: function that decodes and measures the samples of a group; it gets their numbers, and those whose pixels
            are kept to be drawn.
        path: function that returns the file that is one sample, by its number; None for other samples.
        num_stored: number of stored samples, if some cannot be decoded at all.
        groups: function that returns runs of samples, in order, each of which is decoded in one call.
        is_in_memory: whether the pixels are in memory.
    """

    size: int
    name: Callable[[int], str]
    decode: Callable[[List[int], Sequence[int]], Iterable[Result]]
    path: Callable[[int], Optional[Path]] = lambda number: None
    num_stored: Optional[int] = None
    groups: Optional[Callable[[], Iterable[range]]] = None
    is_in_memory: bool = False


_NO_SAMPLES = SubsetSamples(0, str, lambda numbers, drawn: ())


class Sample(NamedTuple):
    """A sample for the contact sheet.

    Attributes:
        name: file, or file and number.
        label: name of the class, or share and name of a mask's rarest class.
        problems: codes of findings about this sample.  Some follow only from the whole set and are added at its end:
            another sample has the same pixels, or most samples have another size.
        image: uint8 [h, w, 1 or 3].
        mask: uint8 [h, w] of classes, for segmentation sets.
        class_names: names of all classes.
        class_colours: colours of the classes in masks; see ``DatasetInfo``.
    """

    name: str
    label: str
    problems: List[str]
    image: np.ndarray
    mask: Optional[np.ndarray] = None
    class_names: Tuple[str, ...] = ()
    class_colours: Tuple[Tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Drawn(Item):
    """A sample to draw was decoded."""

    sample: Sample


IsDrawn = Callable[[int, int], bool]
"""Returns whether to draw the sample at a position (from 0) among a number of samples."""


@dataclass
class SubsetSurvey:
    """The measurements of one subset.

    Attributes:
        name: "train" or "eval".
        num_stored: number of stored samples, including those that a limit leaves out.
        chosen: bool [samples.size], the samples that a limit keeps.
        stored: the samples.
        class_counts: number of samples (or pixels of masks) per class.
        class_unit: "samples" or "pixels".
        checked: number of samples that were tried, whether or not they could be decoded.
        numbers, labels, digests: one item per decoded sample, in order; the label of a mask is a checksum of it.
        alike: the value of each decoded sample, by property; empty for samples without the property.
        histogram: int64 [channels, 256] of all decoded samples with the first one's channels; None before the first.
        sizes: number of pixels by (height, width) of the decoded samples.
    """

    name: str
    num_stored: int = 0
    chosen: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    stored: SubsetSamples = _NO_SAMPLES
    class_counts: Numbers = 0
    class_unit: str = "samples"
    checked: int = 0
    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    labels: "array[int]" = field(default_factory=lambda: array("q"))
    digests: bytearray = field(default_factory=bytearray)
    alike: Dict[str, List[str]] = field(default_factory=dict)
    histogram: Optional[np.ndarray] = None
    sizes: Dict[Tuple[int, int], int] = field(default_factory=dict)
    _sums: Numbers = 0.0
    _squares: Numbers = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether no limit leaves out a sample."""
        return bool(self.chosen.all())

    def record(self, numbers: Sequence[int], labels: Sequence[int], decoded: Decoded) -> None:
        """Adds the measurements of decoded samples of one size."""
        measured = decoded.measured
        self.numbers.extend(numbers)
        self.labels.extend(labels)
        self.digests += measured.digests
        for key, value in decoded.alike.items():
            self.alike.setdefault(key, []).append(value)
        if self.histogram is None:
            self.histogram = np.zeros_like(measured.histogram)
        if len(measured.histogram) == len(self.histogram):
            self.histogram += measured.histogram
            self._sums = self._sums + measured.means.sum(axis=0)
            self._squares = self._squares + (measured.means**2).sum(axis=0)
        self.sizes.setdefault(measured.size, measured.size[0] * measured.size[1])

    def standard_error(self) -> float:
        """Returns the standard error of the mean of the images' means, the largest of all channels."""
        num = len(self.numbers)
        if num < 2:
            return math.inf
        variance = np.maximum(np.asarray(self._squares) / num - (np.asarray(self._sums) / num) ** 2, 0.0)
        return float(np.sqrt(variance.max() / (num - 1)))
