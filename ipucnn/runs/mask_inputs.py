"""What ``infer`` segments: grey image files, volumes of many pages, or the images of a data set; a page at a time."""

import io
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence, Tuple

import numpy as np

from ipucnn.datasets.grey import as_grey, pixels_of
from ipucnn.errors import DataError
from ipucnn.runs.image_inputs import read_regular
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


def file_pages(path: str, channels: int) -> PageSource:
    """A file of one or, for TIFF, many pages.

    Args:
        path: any format that Pillow reads.
        channels: of the network's input: 1 takes grey pages, 3 colour ones.  Nothing is converted: other
            pixels than those that a network was trained with mean nothing to it.

    Raises:
        DataError: no image, a page that is damaged or of another kind, or many pages in a file that is no TIFF.
    """
    data = read_regular(path)
    sizes = [page.shape[:2] for page in _pages(data, path, channels)]
    volume = is_volume_name(path)
    # Read again when it is segmented: a folder of volumes need not fit into memory.
    return PageSource(
        printable(path), volume, tuple(sizes), partial(_read_again, path, channels, tuple(sizes))
    )


def _read_again(path: str, channels: int, sizes: Sequence[Tuple[int, int]]) -> Iterator[Any]:
    found = 0
    for page, size in zip(_pages(read_regular(path), path, channels), sizes):
        if page.shape[:2] != size:
            break
        found += 1
        yield page
    if found < len(sizes):
        raise DataError(
            f"image {printable(path)} was changed while it was segmented", "run the command again"
        )


def _pages(data: bytes, path: str, channels: int) -> Iterator[Any]:
    from PIL import Image

    origin = f"image {printable(path)}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tables that are cut off; what matters is raised
            image = Image.open(io.BytesIO(data))
            count = int(getattr(image, "n_frames", 1))
    except Image.UnidentifiedImageError:
        raise DataError(f"{origin} is not an image in a known format", HINT) from None
    except Exception as error:  # Pillow's plugins raise a wide variety for damaged files
        raise DataError(f"{origin} cannot be decoded: {error}", "get the file again") from error
    if count > 1 and not (image.format == "TIFF" and is_volume_name(path)):
        ending = Path(path).suffix or "no ending"
        raise DataError(
            f"{origin} has {count} pages, and its name says it is one picture ({ending})",
            "give volumes as TIFF, named .tif or .tiff",
        )
    for number in range(count):
        where = origin if count == 1 else f"{origin}, page {number + 1} of {count},"
        yield _decode(image, number, where, channels)


def _decode(image: Any, number: int, where: str, channels: int) -> Any:
    """uint8 [h, w, channels] of a page."""
    try:
        image.seek(number)
        image.load()
        page = as_grey(image)
        pixels = np.array(page)
    except Exception as error:
        raise DataError(f"{where} is damaged: {error}", "get the file again") from error
    if page.mode != ("L" if channels == 1 else "RGB"):
        wanted = "8-bit grey" if channels == 1 else "8-bit colour"
        raise DataError(f"{where} has {pixels_of(page.mode)}; the network takes {wanted}", HINT)
    if not pixels.size:
        raise DataError(f"{where} has no pixels", "remove it")
    return pixels[..., np.newaxis] if pixels.ndim == 2 else pixels
