"""Patches of images that are too large, or have the wrong size, for a network: the overlap-tile strategy.

A network without padding predicts the centre of its input.  Patches are placed so that these centres cover an image;
pixels beyond the image's border are mirrored (Ronneberger et al. 2015, section 2).  This module does not import
TensorFlow.
"""

from typing import List, Sequence, Tuple

import numpy as np

Size = Tuple[int, int]
IGNORED = -1
"""The label of pixels that do not count in a patch: they lie beyond the image's border, count in another patch, or the
set's table of classes has the line "ignore" for them."""


def mirror(indices: np.ndarray, size: int) -> np.ndarray:
    """Maps indices of any size, also negative ones, to 0 .. size - 1 by mirroring at the border pixels."""
    if size == 1:
        return indices * 0
    period = 2 * (size - 1)
    inside: np.ndarray = indices % period
    return np.minimum(inside, period - inside)


def patch_starts(size: int, patch: int, step: int = 1) -> List[int]:
    """Returns the starts of patches that cover ``size`` pixels without gaps, at multiples of ``step``.

    A network that halves its images works on a grid that begins at the patch's corner.  If the corners are multiples of
    that grid, its prediction for a pixel does not depend on the patch.  Patches smaller than ``step`` cannot lie on the
    grid without gaps, and are placed side by side.
    """
    if patch >= size:
        return [0]
    stride = patch // step * step or patch
    return list(range(0, size - patch + stride, stride))


def patch_places(image_size: Size, output: Size, step: int = 1) -> List[Tuple[int, int]]:
    """Returns (row, column) of the upper left predicted pixel of each patch, row by row."""
    return [
        (row, column)
        for row in patch_starts(image_size[0], output[0], step)
        for column in patch_starts(image_size[1], output[1], step)
    ]


def counted(image_size: Size, output: Size, step: int = 1) -> np.ndarray:
    """Returns the pixels that count in each patch: bool [patches, output height, output width].

    Every pixel of the image counts in exactly one patch, the first that contains it.  Pixels beyond the image never
    count.
    """
    sides = []
    for size, patch in zip(image_size, output):
        masks = []
        end = 0
        for start in patch_starts(size, patch, step):
            pixels = np.arange(start, start + patch)
            masks.append((pixels >= end) & (pixels < size))
            end = start + patch
        sides.append(masks)
    return np.stack([row[:, np.newaxis] & column for row in sides[0] for column in sides[1]])


def seen(image_size: Size, output: Size, size: Size, step: int = 1) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the image's rows, int64 [patches, input height], and columns, [patches, input width], in each patch.

    Args:
        image_size: (height, width) of the image.
        output: (height, width) of the network's prediction, the centre of its input.
        size: (height, width) of the network's input.
        step: grid spacing in pixels; patches begin at its multiples.
    """
    sides = []
    for axis in (0, 1):
        first = np.array([place[axis] for place in patch_places(image_size, output, step)], np.int64)
        first = first - (size[axis] - output[axis]) // 2
        sides.append(mirror(first[:, np.newaxis] + np.arange(size[axis]), image_size[axis]))
    return sides[0], sides[1]


def stitch(patches: Sequence[np.ndarray], image_size: Size, step: int = 1) -> np.ndarray:
    """Joins a network's predictions for the patches, [output height, output width, ...] in order, to [h, w, ...]."""
    output = patches[0].shape[:2]
    whole = np.zeros((*image_size, *patches[0].shape[2:]), patches[0].dtype)
    places = patch_places(image_size, output, step)
    for patch, place, counts in zip(patches, places, counted(image_size, output, step)):
        rows, columns = np.nonzero(counts)
        whole[rows + place[0], columns + place[1]] = patch[rows, columns]
    return whole
