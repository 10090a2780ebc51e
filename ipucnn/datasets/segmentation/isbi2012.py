"""ISBI 2012: 30 slices of 512x512 pixels of fly brain under an electron microscope, with membrane masks.

Segmentation of neuronal structures in EM stacks challenge, Arganda-Carreras et al. 2015
(doi:10.3389/fnana.2015.00142).  White in the labels is cell (class 1), black membrane (class 0).
"""

from pathlib import Path
from typing import Iterator, Union

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, data_source, read_file
from ipucnn.datasets.formats import VOLUME, VOLUME_LABELS, find_volume
from ipucnn.datasets.forms import GREY, WHITE_IS_ZERO, Page, mask_numbers, opened, page_of, plain_pixels
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory
from ipucnn.datasets.problems import Passed, Problem, problem_of, readable
from ipucnn.datasets.segmentation.masks import to_classes
from ipucnn.errors import DataError
from ipucnn.text import printable

CLASS_NAMES = ("membrane", "cell")
SHARE_HELD_OUT = 5
"""One in five slices is held out for evaluation, the last ones: 6 of 30, the fifth of five folds."""


def num_held_out(count: int) -> int:
    """Returns how many of ``count`` slices or pairs, the last ones, are for evaluation."""
    return max(1, count // SHARE_HELD_OUT)


def open_isbi2012(folder: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> DataSource:
    """Reads the two training volumes; the last fifth of the slices is for evaluation.

    Raises:
        DataError: a volume is absent, damaged or too large, the two volumes do not match, or the labels are no masks.
    """
    paths = [find_volume(folder, stem) for stem in (VOLUME, VOLUME_LABELS)]
    for path, stem in zip(paths, (VOLUME, VOLUME_LABELS)):
        if path is None:
            raise DataError(
                f"{folder} has no {stem}.tif", f"{VOLUME}.tif and {VOLUME_LABELS}.tif belong side by side"
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
    pages = list(readable(read_pages(path, max_pixels), Passed()))
    for number, page in enumerate(pages):
        if page.shape != pages[0].shape:
            sizes = " and ".join("x".join(map(str, one.shape)) for one in (pages[0], page))
            origin = page_name(path, number, len(pages))
            raise DataError(f"{origin}: there are pages of different sizes: {sizes}", HINT, "wrong-shape")
    return np.stack(pages)


def read_pages(path: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[Union[np.ndarray, Problem]]:
    """Yields each page of a multi-page TIFF: uint8 [h, w], with 0 and 255 for a page of one bit, or a problem.

    Args:
        path: the file.
        max_pixels: the most pixels of a page.

    Raises:
        DataError: the file is absent or no TIFF, or the pages take more than half of the memory.
    """
    origin = printable(str(path))
    with opened(read_file(str(path)), origin, max_pixels, HINT) as volume:
        if volume.form.format != "TIFF":
            raise DataError(f"{origin} is a {volume.form.format} file, not a TIFF", HINT)
        count, (height, width) = volume.num_pages, volume.form.size
        # The pages, and the array that they are stacked into.
        check_memory(2 * count * height * width, f"{origin} of {count} pages of {width}x{height} pixels")
        for number in range(count):
            name = page_name(path, number, count)
            try:
                yield _grey_page(page_of(volume, number, name), name, is_mask=path.stem == VOLUME_LABELS)
            except DataError as error:
                subset = "train" if number < count - num_held_out(count) else "eval"
                yield problem_of(error, subset, f"{path.name}, page {number + 1}", path, name)


def _grey_page(page: Page, name: str, is_mask: bool) -> np.ndarray:
    """Returns the pixels of a page; raises DataError if it is not 8-bit grey, or is turned."""
    form = page.form
    if form.colour not in (GREY, WHITE_IS_ZERO) or form.depth not in ("8 bits", "1 bit") or form.alpha:
        raise DataError(f"{name} has {form.pixels}; slices must be 8-bit grey", HINT, "wrong-mode")
    if form.orientation != 1:
        text = f"{name} has the orientation tag {form.orientation}"
        raise DataError(text, "save both volumes upright, without the tag", "orientation")
    return mask_numbers(page, name).numbers if is_mask else plain_pixels(page, name)


def page_name(path: Path, page: int, count: int) -> str:
    """Returns the name of a page in messages, which count from 1."""
    return f"{printable(str(path))}, page {page + 1} of {count}"
