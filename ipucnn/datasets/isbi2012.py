"""ISBI 2012: 30 slices of 512x512 pixels of fly brain under an electron microscope, with membrane masks.

Segmentation of neuronal structures in EM stacks challenge, Arganda-Carreras et al. 2015
(doi:10.3389/fnana.2015.00142).  White in the labels is cell (class 1), black membrane (class 0).
"""

from pathlib import Path
from typing import Optional

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, array_source
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS
from ipucnn.datasets.masks import to_classes
from ipucnn.datasets.tiff import read_volume
from ipucnn.errors import DataError
from ipucnn.filesystem import is_file

IMAGES, LABELS, TEST = "train-volume", "train-labels", "test-volume"
CLASS_NAMES = ("membrane", "cell")
SHARE_HELD_OUT = 5
"""One in so many slices, the last ones, is kept for evaluation: 6 of 30, the fifth of five folds."""
_ENDINGS = (".tif", ".tiff")


def find_volume(folder: Path, stem: str) -> Optional[Path]:
    """The file of that volume in a folder, or None."""
    return next((folder / (stem + e) for e in _ENDINGS if is_file(folder / (stem + e))), None)


def has_files(folder: Path) -> bool:
    """Whether a folder holds a volume of this set (the other one may be missing)."""
    return any(find_volume(folder, stem) is not None for stem in (IMAGES, LABELS))


def open_isbi2012(folder: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> DataSource:
    """Reads the two training volumes; the last fifth of the slices is for evaluation.

    Raises:
        DataError: a volume is absent, damaged or too large, they do not belong together, or the labels are no masks.
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
    held_out = max(1, len(images) // SHARE_HELD_OUT)
    images = np.ascontiguousarray(images)[..., np.newaxis]
    return array_source(
        ArrayExamples(images[:-held_out], masks[:-held_out]),
        ArrayExamples(images[-held_out:], masks[-held_out:]),
        name="isbi2012",
        task="segmentation",
        class_names=CLASS_NAMES,
        location=str(folder),
        augmentation="elastic",
        tiled=True,
        own_split=True,
    )
