"""Volumes: multi-page TIFF files of 8-bit grey slices, all of one size.  No TensorFlow."""

import contextlib
from pathlib import Path
from typing import Any, Iterator, Optional, Tuple

import numpy as np

from ipucnn.datasets.base import read_file
from ipucnn.datasets.grey import pixels_of
from ipucnn.datasets.images import opened
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory, check_pixels
from ipucnn.errors import DataError
from ipucnn.text import printable

HINT = "save it as an 8-bit grey multi-page TIFF"


def read_volume(path: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """uint8 [slices, h, w] of a multi-page TIFF; a page of one bit becomes 0 and 255.

    Args:
        path: the file.
        max_pixels: what a page may have at most.

    Raises:
        DataError: absent, no TIFF, a damaged page, other than 8-bit grey, pages of different sizes, or more of them
            than half of the memory holds.
    """
    with open_volume(path, max_pixels) as (volume, count):
        height, width = volume.height, volume.width
        origin = printable(str(path))
        # What is stored here, and as much again for the parts that training and evaluation get.
        check_memory(2 * count * height * width, f"{origin} of {count} pages of {width}x{height} pixels")
        slices: Any = np.empty((count, height, width), np.uint8)
        for page in range(count):
            slices[page] = read_page(volume, page, page_name(path, page, count), (height, width), max_pixels)
    return slices


@contextlib.contextmanager
def open_volume(path: Path, max_pixels: int) -> Iterator[Tuple[Any, int]]:
    """A multi-page TIFF, for :func:`read_page`, and the number of its pages.

    Raises:
        DataError: absent, no TIFF, or its list of pages is damaged.
    """
    origin = printable(str(path))
    with opened(read_file(str(path)), origin, max_pixels, HINT) as volume:
        if volume.format != "TIFF":
            raise DataError(f"{origin} is a {volume.format} file, not a TIFF", HINT)
        try:
            count = int(volume.n_frames)
        except Exception as error:  # Pillow's plugins raise a wide variety for damaged files
            raise DataError(
                f"{origin}: its list of pages is damaged: {error}", "get the file again"
            ) from error
        yield volume, count


def page_name(path: Path, page: int, count: int) -> str:
    """What messages call a page, which they count from 1."""
    return f"{printable(str(path))}, page {page + 1} of {count}"


def read_page(volume: Any, page: int, origin: str, size: Optional[Tuple[int, int]], max_pixels: int) -> Any:
    """uint8 [h, w] of one page, 0 and 255 where it has one bit.

    Args:
        volume: of :func:`open_volume`.
        page: from 0.
        origin: what it is, for messages.
        size: (height, width) it should have; None takes any.
        max_pixels: what it may have at most.

    Raises:
        DataError: damaged, of another size, or no 8-bit grey.
    """
    try:
        volume.seek(page)
        check_pixels(volume.width, volume.height, max_pixels, origin)
        if volume.mode not in ("L", "1"):
            raise DataError(f"{origin} has {pixels_of(volume.mode)}; slices must be 8-bit grey", HINT)
        if size is not None and (volume.height, volume.width) != size:
            sizes = f"{size[0]}x{size[1]} and {volume.height}x{volume.width}"
            raise DataError(f"{origin}: there are pages of different sizes: {sizes}", HINT)
        volume.load()
        pixels = np.array(volume)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{origin} is damaged: {error}", "get the file again") from error
    return pixels.astype(np.uint8) * 255 if pixels.dtype == bool else pixels
