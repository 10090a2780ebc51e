"""What ``infer`` segments: grey image files, volumes of many pages, or the images of a data set; a page at a time."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence, Tuple

import numpy as np

from ipucnn.datasets.base import read_file
from ipucnn.datasets.grey import as_grey, pixels_of
from ipucnn.datasets.images import opened
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_pixels
from ipucnn.errors import DataError
from ipucnn.text import printable

__all__ = ["VOLUME_ENDINGS", "PageSource", "array_pages", "file_pages", "is_volume_name"]

VOLUME_ENDINGS = (".tif", ".tiff")
HINT = "save it as 8-bit grey: TIFF (of one or many pages), PNG or JPEG"


@dataclass(frozen=True)
class PageSource:
    """An image of one page, or a volume, of which every page was decoded once and is all right.

    Attributes:
        name: the path, or the place in the data set; printable.
        is_volume: whether the results are volumes, too.
        sizes: (height, width) of each page.
        pages: decodes the pages one by one: uint8 [h, w, channels].
    """

    name: str
    is_volume: bool
    sizes: Tuple[Tuple[int, int], ...]
    pages: Callable[[], Iterator[Any]]


def is_volume_name(path: str) -> bool:
    """Whether a file may have many pages, and its results are TIFF."""
    return path.lower().endswith(VOLUME_ENDINGS)


def array_pages(name: str, images: Any) -> PageSource:
    """The images of a set in memory: uint8 [n, h, w, c]."""
    return PageSource(name, True, tuple([images.shape[1:3]] * len(images)), lambda: iter(images))


def file_pages(path: str, channels: int, max_pixels: int = MAX_IMAGE_PIXELS) -> PageSource:
    """A file of one or, for TIFF, many pages.

    Args:
        path: any format that Pillow reads.
        channels: of the network's input: 1 takes grey pages, 3 colour ones.  Nothing is converted: other
            pixels than those that a network was trained with mean nothing to it.
        max_pixels: what a page may have at most.

    Raises:
        DataError: no image, a page that is damaged or of another kind, or many pages in a file that is no TIFF.
    """
    data = read_file(path)
    sizes = [page.shape[:2] for page in _pages(data, path, channels, max_pixels)]
    volume = is_volume_name(path)
    # Read again when it is segmented: a folder of volumes need not fit into memory.
    return PageSource(
        printable(path), volume, tuple(sizes), partial(_read_again, path, channels, max_pixels, tuple(sizes))
    )


def _read_again(path: str, channels: int, max_pixels: int, sizes: Sequence[Tuple[int, int]]) -> Iterator[Any]:
    found = 0
    for page, size in zip(_pages(read_file(path), path, channels, max_pixels), sizes):
        if page.shape[:2] != size:
            break
        found += 1
        yield page
    if found < len(sizes):
        raise DataError(
            f"image {printable(path)} was changed while it was segmented", "run the command again"
        )


def _pages(data: bytes, path: str, channels: int, max_pixels: int) -> Iterator[Any]:
    origin = f"image {printable(path)}"
    with opened(data, origin, max_pixels, HINT) as image:
        yield from _pages_of(image, path, origin, channels, max_pixels)


def _pages_of(image: Any, path: str, origin: str, channels: int, max_pixels: int) -> Iterator[Any]:
    count = int(getattr(image, "n_frames", 1))
    if count > 1 and not (image.format == "TIFF" and is_volume_name(path)):
        ending = Path(path).suffix or "no ending"
        raise DataError(
            f"{origin} has {count} pages, and its name says it is one picture ({ending})",
            "give volumes as TIFF, named .tif or .tiff",
        )
    for number in range(count):
        where = origin if count == 1 else f"{origin}, page {number + 1} of {count},"
        yield _decode(image, number, where, channels, max_pixels)


def _decode(image: Any, number: int, where: str, channels: int, max_pixels: int) -> Any:
    """uint8 [h, w, channels] of a page."""
    try:
        image.seek(number)
        check_pixels(image.width, image.height, max_pixels, where)
        image.load()
        page = as_grey(image)
        pixels = np.array(page)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where} is damaged: {error}", "get the file again") from error
    if page.mode != ("L" if channels == 1 else "RGB"):
        wanted = "8-bit grey" if channels == 1 else "8-bit colour"
        raise DataError(f"{where} has {pixels_of(page.mode)}; the network takes {wanted}", HINT)
    if not pixels.size:
        raise DataError(f"{where} has no pixels", "remove it")
    return pixels[..., np.newaxis] if pixels.ndim == 2 else pixels
