"""ISBI 2012: 30 slices of 512x512 pixels of fly brain under an electron microscope, with membrane masks.

Segmentation of neuronal structures in EM stacks challenge, Arganda-Carreras et al. 2015
(doi:10.3389/fnana.2015.00142).  White in the labels is cell (class 1), black membrane (class 0).
"""

from pathlib import Path
from typing import List, Optional

import numpy as np

from ipucnn.aliases import PillowImage
from ipucnn.datasets.base import ArrayExamples, DataSource, data_source, read_file
from ipucnn.datasets.images import opened
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory, check_pixels
from ipucnn.datasets.problems import STRICT, Problems
from ipucnn.datasets.segmentation.masks import pixels_of, to_classes
from ipucnn.errors import DataError
from ipucnn.filesystem import is_file
from ipucnn.text import printable

IMAGES, LABELS = "train-volume", "train-labels"
CLASS_NAMES = ("membrane", "cell")
SHARE_HELD_OUT = 5
"""One in five slices is held out for evaluation, the last ones: 6 of 30, the fifth of five folds."""
_ENDINGS = (".tif", ".tiff")


def find_volume(folder: Path, stem: str) -> Optional[Path]:
    """Returns the file of a volume in a folder, or None."""
    return next((folder / (stem + e) for e in _ENDINGS if is_file(folder / (stem + e))), None)


def num_held_out(count: int) -> int:
    """Returns how many of ``count`` slices or pairs, the last ones, are for evaluation."""
    return max(1, count // SHARE_HELD_OUT)


def has_files(folder: Path) -> bool:
    """Returns whether a folder holds a volume of this set (the other one may be missing)."""
    return any(find_volume(folder, stem) is not None for stem in (IMAGES, LABELS))


def open_isbi2012(folder: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> DataSource:
    """Reads the two training volumes; the last fifth of the slices is for evaluation.

    Raises:
        DataError: a volume is absent, damaged or too large, the two volumes do not match, or the labels are no masks.
    """
    paths = [find_volume(folder, stem) for stem in (IMAGES, LABELS)]
    for path, stem in zip(paths, (IMAGES, LABELS)):
        if path is None:
            raise DataError(
                f"{folder} has no {stem}.tif", f"{IMAGES}.tif and {LABELS}.tif belong side by side"
            )
    images, labels = (read_volume(path, max_pixels) for path in paths if path is not None)
    if len(images) != len(labels):
        raise DataError(
            f"{paths[0]} has {len(images)} slices, but {paths[1]} has {len(labels)}", "get both files again"
        )
    if images.shape != labels.shape:
        sizes = ["x".join(map(str, volume.shape[1:])) for volume in (images, labels)]
        raise DataError(
            f"slices of {sizes[0]} pixels in {paths[0]}, but of {sizes[1]} in {paths[1]}",
            "get both files again",
        )
    if len(images) < 2:
        raise DataError(
            f"{paths[0]} has {len(images)} slice; training and evaluation need two", "get the file again"
        )
    masks = to_classes(labels, str(paths[1]))
    if not 0 < masks.mean() < 1:
        raise DataError(f"{paths[1]} has one value in all pixels: nothing to learn", "get the file again")
    held_out = num_held_out(len(images))
    images = np.ascontiguousarray(images)[..., np.newaxis]
    return data_source(
        ArrayExamples(images[:-held_out], masks[:-held_out]),
        ArrayExamples(images[-held_out:], masks[-held_out:]),
        name="isbi2012",
        task="segmentation",
        class_names=CLASS_NAMES,
        location=str(folder),
        augmentation="elastic",
        patchwise=True,
        own_split=True,
    )


# Volumes: multi-page TIFF files of 8-bit grey slices, all of one size.


HINT = "save it as an 8-bit grey multi-page TIFF"


def read_volume(path: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> np.ndarray:
    """Reads a multi-page TIFF: uint8 [slices, h, w].

    Raises:
        DataError: as :func:`read_pages`, or pages of different sizes.
    """
    pages = [page for page in read_pages(path, max_pixels) if page is not None]
    for number, page in enumerate(pages):
        if page.shape != pages[0].shape:
            sizes = " and ".join("x".join(map(str, one.shape)) for one in (pages[0], page))
            origin = page_name(path, number, len(pages))
            raise DataError(f"{origin}: there are pages of different sizes: {sizes}", HINT, "wrong-shape")
    return np.stack(pages)


def read_pages(
    path: Path, max_pixels: int = MAX_IMAGE_PIXELS, problems: Problems = STRICT
) -> List[Optional[np.ndarray]]:
    """Reads each page of a multi-page TIFF: uint8 [h, w], with 0 and 255 for a page of one bit.

    Args:
        path: the file.
        max_pixels: the most pixels of a page.
        problems: receiver of problems; if it does not raise, pages that cannot be read are None.

    Raises:
        DataError: the file is absent or no TIFF, a page is damaged or not 8-bit grey, or the pages take more than half
            of the memory.
    """
    pages: List[Optional[np.ndarray]] = []
    origin = printable(str(path))
    with problems.noting(None, path.name, path), opened(
        read_file(str(path)), origin, max_pixels, HINT
    ) as volume:
        if volume.format != "TIFF":
            raise DataError(f"{origin} is a {volume.format} file, not a TIFF", HINT)
        try:
            count = int(volume.n_frames)
        except Exception as error:  # Pillow's plugins raise many types for damaged files
            text = f"{origin}: its list of pages is damaged: {error}"
            raise DataError(text, "get the file again") from error
        height, width = volume.height, volume.width
        # The pages, and the array that they are stacked into.
        check_memory(2 * count * height * width, f"{origin} of {count} pages of {width}x{height} pixels")
        first_held_out = count - num_held_out(count)
        for page in range(count):
            pages.append(None)
            subset = "train" if page < first_held_out else "eval"
            origin_of_page = page_name(path, page, count)
            with problems.noting(subset, f"{path.name}, page {page + 1}", path, origin_of_page):
                pages[-1] = _read_page(volume, page, origin_of_page, max_pixels)
    return pages


def page_name(path: Path, page: int, count: int) -> str:
    """Returns the name of a page in messages, which count from 1."""
    return f"{printable(str(path))}, page {page + 1} of {count}"


def _read_page(volume: PillowImage, page: int, origin: str, max_pixels: int) -> np.ndarray:
    """Reads one page: uint8 [h, w], with 0 and 255 for a page of one bit.

    Args:
        volume: the open file.
        page: number of the page, from 0.
        origin: the page's name in messages.
        max_pixels: the most pixels it may have.

    Raises:
        DataError: the page is damaged, or is not 8-bit grey.
    """
    try:
        volume.seek(page)
        check_pixels(volume.width, volume.height, max_pixels, origin)
        if volume.mode not in ("L", "1"):
            raise DataError(
                f"{origin} has {pixels_of(volume.mode)}; slices must be 8-bit grey", HINT, "wrong-mode"
            )
        volume.load()
        pixels = np.array(volume)
    except DataError:
        raise
    except Exception as error:
        code = "truncated" if "truncated" in str(error) else "unreadable"  # the word of Pillow's readers
        raise DataError(f"{origin} is damaged: {error}", "get the file again", code) from error
    return pixels.astype(np.uint8) * 255 if pixels.dtype == bool else pixels
