"""Training patches of segmentation images and masks, placed at random, rotated, zoomed and bent.

All changes of shape form one map from the patch's pixels to positions in the image, so that an image is sampled only
once (bilinear), and so is its mask (nearest).  Each patch's random numbers come from its own hashes, and every step is
elementwise or a gather, so a patch does not depend on the size of its batch.
"""

from statistics import NormalDist
from typing import Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor, TensorShape
from ipucnn.datasets.augmentation import below, shift_right

ELASTIC_SIGMA = 10.0 / 512
"""Standard deviation of the displacements over the patch's side: 10 pixels of 512 (Ronneberger et al. 2015)."""
ELASTIC_GRID = 3
MAX_ZOOM = 0.2
"""Range of the zoom: a patch covers 1 / 1.2 to 1.2 times its own size in the image."""
MAX_CONTRAST = 0.2
MAX_BRIGHTNESS = 0.1
"""Largest change of brightness, as a share of the range 0..255."""
TILE_DRAWS = 2
ELASTIC_DRAWS = TILE_DRAWS + 5 + 2 * ELASTIC_GRID**2

_NUM_ANGLES = 4096
_ANGLES = np.arange(_NUM_ANGLES) * (2 * np.pi / _NUM_ANGLES)
# Tables, because TensorFlow's own sine and quantiles may round differently in vector loops and in scalar loops.
_COSINES, _SINES = np.cos(_ANGLES).astype(np.float32), np.sin(_ANGLES).astype(np.float32)
_NUM_QUANTILES = 4096
_QUANTILES = np.float32([NormalDist().inv_cdf((i + 0.5) / _NUM_QUANTILES) for i in range(_NUM_QUANTILES)])
_ZOOMS = np.float32([(1 + MAX_ZOOM) ** (i / 512 - 1) for i in range(1025)])


def _signed(random: Tensor) -> Tensor:
    """Converts hashes to float32 in [-1, 1) exactly."""
    return tf.cast(shift_right(random, 8), tf.float32) * (2.0**-23) - 1.0


def bicubic_weights(size: int, grid: int) -> np.ndarray:
    """Returns the weight of each node of a coarse grid at each pixel: float32 [size, grid].

    The weights are those of cubic convolution (Keys 1981, a = -1/2) with the outer nodes repeated beyond the edge.  The
    first node lies on the first pixel, and the last node on the last pixel.
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
    """Returns displacements in pixels, float32 [b, *size]: Gaussian on a coarse grid, bicubic in between."""
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
    """Maps int32 indices of any size to 0 .. size - 1 by mirroring at the border pixels."""
    if size == 1:
        return tf.zeros_like(indices)
    inside = tf.math.floormod(indices, 2 * (size - 1))
    return tf.minimum(inside, 2 * (size - 1) - inside)


def _flat(rows: Tensor, columns: Tensor, which: Tensor, shape: TensorShape) -> Tensor:
    """Returns int64 indices of pixels in flattened images [n, h, w], mirrored at borders; rows are int32 [b, y, x]."""
    height, width = shape[1], shape[2]
    pixel = tf.cast(_mirror(rows, height) * width + _mirror(columns, width), tf.int64)
    return pixel + which[:, tf.newaxis, tf.newaxis] * (height * width)


def _sample(images: Tensor, which: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Interpolates bilinearly between the four pixels around each position: float32 [b, y, x, c]; ``rows`` and
    ``columns`` are float32 [b, y, x]."""
    flat = tf.reshape(images, [-1, images.shape[-1]])
    top, left = tf.floor(rows), tf.floor(columns)
    down, right = (rows - top)[..., tf.newaxis], (columns - left)[..., tf.newaxis]
    top, left = tf.cast(top, tf.int32), tf.cast(left, tf.int32)

    def pixels(i: int, j: int) -> Tensor:
        return tf.cast(tf.gather(flat, _flat(top + i, left + j, which, images.shape)), tf.float32)

    upper = pixels(0, 0) * (1 - right) + pixels(0, 1) * right
    lower = pixels(1, 0) * (1 - right) + pixels(1, 1) * right
    return upper * (1 - down) + lower * down


def _starts(random: Tensor, size: int, patch: int) -> Tensor:
    """Returns random starts, int64 [b], of patches of ``patch`` pixels in ``size``; larger patches are centred."""
    if patch >= size:
        return tf.fill(tf.shape(random), tf.constant(-((patch - size) // 2), tf.int64))
    return below(random, size - patch + 1)


def training_patches(
    images: Tensor,
    masks: Tensor,
    which: Tensor,
    random: Tensor,
    size: Tuple[int, int],
    output: Tuple[int, int],
    elastic: bool,
) -> Tuple[Tensor, Tensor]:
    """Returns patches at random positions: float32 images [b, *size, c] in 0..255, and masks [b, *output].

    Args:
        images, masks: uint8 [n, h, w, c] and integers [n, h, w], the whole set.
        which: int64 [b], the image of each patch.
        random: int64 hashes [b, ELASTIC_DRAWS]; without ``elastic``, only the first TILE_DRAWS are used.
        size: (height, width) of the network's input.
        output: (height, width) of its prediction, the centre of the input.  It lies within the image unless it is
            larger.
        elastic: whether to mirror the patches, rotate them by any angle, zoom and bend them, and change contrast and
            brightness.
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
        patches = tf.cast(tf.gather(flat, _flat(rows, columns, which, images.shape)), tf.float32)
        classes = tf.gather(tf.reshape(masks, [-1]), _flat(rows, columns, which, images.shape)[window])
        return _shaped(patches, classes, images, size, output)
    rows, columns = _bent_places(random[:, TILE_DRAWS:], starts, size)
    patches = _sample(images, which, rows, columns)
    near_rows, near_columns = (tf.cast(tf.floor(p[window] + 0.5), tf.int32) for p in (rows, columns))
    classes = tf.gather(tf.reshape(masks, [-1]), _flat(near_rows, near_columns, which, images.shape))
    light = _signed(random[:, TILE_DRAWS + 3 : TILE_DRAWS + 5])[:, :, tf.newaxis, tf.newaxis, tf.newaxis]
    contrast, brightness = 1.0 + MAX_CONTRAST * light[:, 0], (255.0 * MAX_BRIGHTNESS) * light[:, 1]
    patches = (patches - 127.5) * contrast + (127.5 + brightness)
    return _shaped(patches, classes, images, size, output)


def _bent_places(random: Tensor, starts: Tensor, size: Tuple[int, int]) -> Tuple[Tensor, Tensor]:
    """Returns the position in the image of each pixel of a patch: float32 (rows, columns), [b, *size] each."""
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
    patches: Tensor, masks: Tensor, images: Tensor, size: Tuple[int, int], output: Tuple[int, int]
) -> Tuple[Tensor, Tensor]:
    patches.set_shape([None, *size, images.shape[-1]])
    masks.set_shape([None, *output])
    return patches, masks
