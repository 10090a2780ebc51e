"""Patches of images that are too large, or have the wrong size, for a network: the overlap-tile strategy.

A network without padding predicts the centre of its input.  Patches are placed so that these centres cover an image;
pixels beyond the image's border are mirrored (Ronneberger et al. 2015, section 2).  This module does not import
TensorFlow.
"""

from typing import Dict, Iterable, List, Sequence, Tuple

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


def patch_table(sizes: Iterable[Sequence[int]], output: Size, step: int = 1) -> np.ndarray:
    """Returns the patches that cover images of these sizes, in their order: int64 [patches, 5].

    The columns are the image; row and column of the upper left predicted pixel; and the first row and column that count
    in the patch.  Every pixel of an image counts in exactly one patch, the first that contains it.  Pixels beyond the
    image never count.
    """
    sides: Dict[Tuple[int, int], List[Tuple[int, int]]] = {}
    rows = []
    for image, (height, width) in enumerate(sizes):
        for axis, side in ((0, height), (1, width)):
            if (axis, side) not in sides:
                starts = patch_starts(side, output[axis], step)
                sides[axis, side] = list(zip(starts, [0, *(start + output[axis] for start in starts)]))
        rows += [
            (image, row, column, first_row, first_column)
            for row, first_row in sides[0, height]
            for column, first_column in sides[1, width]
        ]
    return np.array(rows, np.int64).reshape(-1, 5)


def stitch(patches: Sequence[np.ndarray], image_size: Size, step: int = 1) -> np.ndarray:
    """Joins a network's predictions for the patches, [output height, output width, ...] in order, to [h, w, ...]."""
    whole = np.zeros((*image_size, *patches[0].shape[2:]), patches[0].dtype)
    table = patch_table([image_size], patches[0].shape[:2], step)
    for patch, (_, row, column, first_row, first_column) in zip(patches, table.tolist()):
        part = whole[first_row : row + patch.shape[0], first_column : column + patch.shape[1]]
        inner = patch[first_row - row :, first_column - column :]
        part[...] = inner[: part.shape[0], : part.shape[1]]
    return whole
