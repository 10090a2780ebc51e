"""Training tiles of segmentation images: placed at random, turned, zoomed, bent, image and mask alike.

All changes of shape make one map from the tile's pixels to places in the image, so an image is sampled once
(bilinear) and its mask once (nearest).  Each tile's numbers come from its own hashes, and every step is
elementwise or a gather: a tile is the same in a batch of any size.
"""

from statistics import NormalDist
from typing import Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor, TensorShape
from ipucnn.datasets.augmentation import below, shift_right

ELASTIC_SIGMA = 10.0 / 512
"""Standard deviation of the displacements, in sides of the tile: the paper's 10 pixels of 512."""
ELASTIC_GRID = 3
MAX_ZOOM = 0.2
"""Tiles show from 1 / 1.2 to 1.2 times their own extent of the image."""
MAX_CONTRAST = 0.2
MAX_BRIGHTNESS = 0.1
"""Largest change of brightness, as a part of the range 0..255."""
TILE_DRAWS = 2
ELASTIC_DRAWS = TILE_DRAWS + 5 + 2 * ELASTIC_GRID**2

_NUM_ANGLES = 4096
_ANGLES = np.arange(_NUM_ANGLES) * (2 * np.pi / _NUM_ANGLES)
# Tables: TensorFlow's own sine and quantiles may round differently in and out of a vector loop.
_COSINES, _SINES = np.cos(_ANGLES).astype(np.float32), np.sin(_ANGLES).astype(np.float32)
_NUM_QUANTILES = 4096
_QUANTILES = np.float32([NormalDist().inv_cdf((i + 0.5) / _NUM_QUANTILES) for i in range(_NUM_QUANTILES)])
_ZOOMS = np.float32([(1 + MAX_ZOOM) ** (i / 512 - 1) for i in range(1025)])


def _signed(random: Tensor) -> Tensor:
    """Hashes to float32 in [-1, 1), exact."""
    return tf.cast(shift_right(random, 8), tf.float32) * (2.0**-23) - 1.0


def bicubic_weights(size: int, grid: int) -> np.ndarray:
    """float32 [size, grid]: what each node of a coarse grid counts for at each pixel.

    Cubic convolution (Keys 1981, a = -1/2) with the outer nodes repeated beyond the edge; the first node lies
    on the first pixel, the last on the last.
    """
    weights: np.ndarray = np.zeros((size, grid))
    places = np.linspace(0, grid - 1, size)
    for node in range(-2, grid + 2):
        distance = np.abs(places - node)
        near = 1.5 * distance**3 - 2.5 * distance**2 + 1
        far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
        weight = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
        weights[:, min(max(node, 0), grid - 1)] += weight
    return np.float32(weights)


def _displacements(random: Tensor, size: Tuple[int, int]) -> Tensor:
    """float32 [b, *size]: Gaussian values on a coarse grid, bicubic in between, in pixels."""
    nodes = tf.gather(_QUANTILES, below(random, _NUM_QUANTILES)) * np.float32(ELASTIC_SIGMA * max(size))
    down, along = (bicubic_weights(n, ELASTIC_GRID) for n in size)
    total = tf.zeros([tf.shape(random)[0], *size])
    for i in range(ELASTIC_GRID):
        row = tf.zeros([tf.shape(random)[0], size[1]])
        for j in range(ELASTIC_GRID):
            row = row + nodes[:, i * ELASTIC_GRID + j, tf.newaxis] * along[:, j]
        total = total + row[:, tf.newaxis, :] * down[:, i, tf.newaxis]
    return total


def _mirror(indices: Tensor, size: int) -> Tensor:
    """int32 indices of any size to those in 0 .. size - 1 that a mirror at the border pixels shows."""
    if size == 1:
        return tf.zeros_like(indices)
    inside = tf.math.floormod(indices, 2 * (size - 1))
    return tf.minimum(inside, 2 * (size - 1) - inside)


def _flat(rows: Tensor, columns: Tensor, which: Tensor, shape: TensorShape) -> Tensor:
    """int64 indices of pixels in images [n, h, w] laid end to end, mirrored at the borders; rows int32 [b, y, x]."""
    height, width = shape[1], shape[2]
    pixel = tf.cast(_mirror(rows, height) * width + _mirror(columns, width), tf.int64)
    return pixel + which[:, tf.newaxis, tf.newaxis] * (height * width)


def _sample(images: Tensor, which: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """float32 [b, y, x, c]: bilinear between the four pixels around each place; rows float32 [b, y, x]."""
    flat = tf.reshape(images, [-1, images.shape[-1]])
    top, left = tf.floor(rows), tf.floor(columns)
    down, right = (rows - top)[..., tf.newaxis], (columns - left)[..., tf.newaxis]
    top, left = tf.cast(top, tf.int32), tf.cast(left, tf.int32)

    def pixels(i: int, j: int) -> Tensor:
        return tf.cast(tf.gather(flat, _flat(top + i, left + j, which, images.shape)), tf.float32)

    upper = pixels(0, 0) * (1 - right) + pixels(0, 1) * right
    lower = pixels(1, 0) * (1 - right) + pixels(1, 1) * right
    return upper * (1 - down) + lower * down


def _starts(random: Tensor, size: int, tile: int) -> Tensor:
    """int64 [b]: where a tile of ``tile`` pixels begins, anywhere in ``size``; in the middle if it is larger."""
    if tile >= size:
        return tf.fill(tf.shape(random), tf.constant(-((tile - size) // 2), tf.int64))
    return below(random, size - tile + 1)


def training_tiles(
    images: Tensor,
    masks: Tensor,
    which: Tensor,
    random: Tensor,
    size: Tuple[int, int],
    output: Tuple[int, int],
    elastic: bool,
) -> Tuple[Tensor, Tensor]:
    """Tiles at random places: float32 images [b, *size, c] in 0..255, and uint8 masks [b, *output].

    Args:
        images, masks: uint8 [n, h, w, c] and [n, h, w], the whole set.
        which: int64 [b], the image of each tile.
        random: int64 hashes [b, ELASTIC_DRAWS], of which without ``elastic`` TILE_DRAWS are used.
        size: of the network's input.
        output: of what it predicts, the centre of that.  It lies within the image unless it is larger.
        elastic: mirror, turn by any angle, zoom and bend the tiles, and change their light.
    """
    margins = [(full - inner) // 2 for full, inner in zip(size, output)]
    starts = [
        _starts(random[:, axis], images.shape[1 + axis], output[axis]) - margins[axis] for axis in (0, 1)
    ]
    window = (
        slice(None),
        slice(margins[0], margins[0] + output[0]),
        slice(margins[1], margins[1] + output[1]),
    )
    if not elastic:
        rows = tf.cast(starts[0], tf.int32)[:, tf.newaxis, tf.newaxis] + tf.range(size[0])[:, tf.newaxis]
        columns = tf.cast(starts[1], tf.int32)[:, tf.newaxis, tf.newaxis] + tf.range(size[1])
        flat = tf.reshape(images, [-1, images.shape[-1]])
        tiles = tf.cast(tf.gather(flat, _flat(rows, columns, which, images.shape)), tf.float32)
        classes = tf.gather(tf.reshape(masks, [-1]), _flat(rows, columns, which, images.shape)[window])
        return _shaped(tiles, classes, images, size, output)
    rows, columns = _bent_places(random[:, TILE_DRAWS:], starts, size)
    tiles = _sample(images, which, rows, columns)
    near_rows, near_columns = (tf.cast(tf.floor(p[window] + 0.5), tf.int32) for p in (rows, columns))
    classes = tf.gather(tf.reshape(masks, [-1]), _flat(near_rows, near_columns, which, images.shape))
    light = _signed(random[:, TILE_DRAWS + 3 : TILE_DRAWS + 5])[:, :, tf.newaxis, tf.newaxis, tf.newaxis]
    contrast, brightness = 1.0 + MAX_CONTRAST * light[:, 0], (255.0 * MAX_BRIGHTNESS) * light[:, 1]
    tiles = (tiles - 127.5) * contrast + (127.5 + brightness)
    return _shaped(tiles, classes, images, size, output)


def _bent_places(random: Tensor, starts: Tensor, size: Tuple[int, int]) -> Tuple[Tensor, Tensor]:
    """float32 (rows, columns) [b, *size]: where in the image each pixel of a tile is taken from."""
    angle = below(random[:, 0], _NUM_ANGLES)
    zoom = tf.gather(_ZOOMS, below(random[:, 1], len(_ZOOMS)))
    flip = tf.where(below(random[:, 2], 2) > 0, -1.0, 1.0)
    cosine, sine = (tf.gather(table, angle) * zoom for table in (_COSINES, _SINES))
    centres = [(n - 1) / 2 for n in size]
    y = (tf.range(size[0], dtype=tf.float32) - centres[0])[:, tf.newaxis]
    x = (tf.range(size[1], dtype=tf.float32) - centres[1])[tf.newaxis, :]

    def wide(values: Tensor) -> Tensor:
        return values[:, tf.newaxis, tf.newaxis]

    bend_y, bend_x = (
        _displacements(random[:, first : first + ELASTIC_GRID**2], size) for first in (5, 5 + ELASTIC_GRID**2)
    )
    centre_y, centre_x = (tf.cast(start, tf.float32) + c for start, c in zip(starts, centres))
    rows = wide(cosine) * y - wide(sine) * x + wide(centre_y) + bend_y
    columns = (wide(sine) * y + wide(cosine) * x) * wide(flip) + wide(centre_x) + bend_x
    return rows, columns


def _shaped(
    tiles: Tensor, masks: Tensor, images: Tensor, size: Tuple[int, int], output: Tuple[int, int]
) -> Tuple[Tensor, Tensor]:
    tiles.set_shape([None, *size, images.shape[-1]])
    masks.set_shape([None, *output])
    return tiles, masks
