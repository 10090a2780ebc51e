"""Tiles of images too large, or at the wrong size, for a network: the paper's overlap-tile strategy.

A network without padding predicts the centre of what it sees.  Tiles are laid so that these centres cover an
image; what a network sees beyond the image's border is mirrored (Ronneberger et al. 2015, section 2).  No
TensorFlow.
"""

from typing import List, Sequence, Tuple

import numpy as np

Size = Tuple[int, int]
IGNORED = -1
"""The label of pixels that count nowhere: beyond an image's border, or counted in another tile."""


def mirror(indices: np.ndarray, size: int) -> np.ndarray:
    """Indices of any size, below 0 too, to those in 0 .. size - 1 that a mirror at the border pixels shows."""
    if size == 1:
        return indices * 0
    period = 2 * (size - 1)
    inside: np.ndarray = indices % period
    return np.minimum(inside, period - inside)


def tile_starts(size: int, tile: int, step: int = 1) -> List[int]:
    """Where tiles begin that cover ``size`` pixels: at multiples of ``step``, without gaps.

    A network that halves its images sees them on a grid that begins at the tile's corner: with corners at
    multiples of that grid it says the same of a pixel, whichever tile the pixel is in.  Tiles smaller than ``step``
    cannot be on it without gaps; they are side by side.
    """
    if tile >= size:
        return [0]
    stride = tile // step * step or tile
    return list(range(0, size - tile + stride, stride))


def tile_places(image_size: Size, output: Size, step: int = 1) -> List[Tuple[int, int]]:
    """(row, column) of the upper left pixel that each tile predicts, row by row."""
    return [
        (row, column)
        for row in tile_starts(image_size[0], output[0], step)
        for column in tile_starts(image_size[1], output[1], step)
    ]


def counted(image_size: Size, output: Size, step: int = 1) -> np.ndarray:
    """bool [tiles, output height, output width]: every pixel of the image is true in exactly one tile.

    Where tiles overlap the first one counts; pixels beyond the image never do.
    """
    sides = []
    for size, tile in zip(image_size, output):
        masks = []
        end = 0
        for start in tile_starts(size, tile, step):
            pixels = np.arange(start, start + tile)
            masks.append((pixels >= end) & (pixels < size))
            end = start + tile
        sides.append(masks)
    return np.stack([row[:, np.newaxis] & column for row in sides[0] for column in sides[1]])


def seen(image_size: Size, output: Size, size: Size, step: int = 1) -> Tuple[np.ndarray, np.ndarray]:
    """int64 rows [tiles, input height] and columns [tiles, input width] of the image that each tile shows.

    Args:
        output: what the network predicts, the centre of ``size``, its input.
    """
    sides = []
    for axis in (0, 1):
        first = np.array([place[axis] for place in tile_places(image_size, output, step)], np.int64)
        first = first - (size[axis] - output[axis]) // 2
        sides.append(mirror(first[:, np.newaxis] + np.arange(size[axis]), image_size[axis]))
    return sides[0], sides[1]


def stitch(tiles: Sequence[np.ndarray], image_size: Size, step: int = 1) -> np.ndarray:
    """[h, w, ...] from what a network predicted for each tile [output height, output width, ...], in order."""
    output = tiles[0].shape[:2]
    whole = np.zeros((*image_size, *tiles[0].shape[2:]), tiles[0].dtype)
    places = tile_places(image_size, output, step)
    for tile, place, counts in zip(tiles, places, counted(image_size, output, step)):
        rows, columns = np.nonzero(counts)
        whole[rows + place[0], columns + place[1]] = tile[rows, columns]
    return whole
