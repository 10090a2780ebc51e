"""Training patches of segmentation images and masks, placed at random, rotated, zoomed and bent.

All changes of shape form one map from the patch's pixels to positions in the image, so that an image is sampled only
once (bilinear), and so is its mask (nearest).  Each patch's random numbers come from its own hashes, and every step is
elementwise or a gather, so a patch does not depend on the size of its batch.
"""

from statistics import NormalDist
from typing import Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.datasets.augmentation import below, shift_right
from ipucnn.datasets.base import MaskedExamples

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


class StoredImages:
    """The pixels of a set as tensors, and the part of each image among them.

    Args:
        examples: the images and masks.
    """

    def __init__(self, examples: MaskedExamples) -> None:
        self.pixels, self.labels = tf.constant(examples.pixels), tf.constant(examples.labels)
        # 32 bits if they suffice, because gathers and additions take half the time.
        self._type = tf.int32 if len(examples.pixels) < 2**31 else tf.int64
        self._starts = tf.constant(examples.starts[:-1], self._type)
        self._sizes = tf.constant(examples.sizes)

    def sizes(self, which: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns heights and widths, int64 [b] each, of the images ``which``, int64 [b]."""
        sizes = tf.gather(self._sizes, which)
        return sizes[:, 0], sizes[:, 1]

    def rows(self, which: Tensor, rows: Tensor) -> Tensor:
        """Returns the number of the first pixel of rows of the images ``which``; rows and result are integers
        [b, y, x], and rows beyond an image's border are mirrored."""
        heights, widths = (tf.cast(wide(side), self._type) for side in self.sizes(which))
        return _mirror(tf.cast(rows, self._type), heights) * widths + wide(tf.gather(self._starts, which))

    def columns(self, which: Tensor, columns: Tensor) -> Tensor:
        """Returns the columns, integers [b, y, x], mirrored where they are beyond the border of the images ``which``.

        A pixel's number is the sum of :meth:`rows` and this.
        """
        return _mirror(tf.cast(columns, self._type), tf.cast(wide(self.sizes(which)[1]), self._type))


def wide(values: Tensor) -> Tensor:
    """Returns [b, 1, 1] of [b]."""
    return values[:, tf.newaxis, tf.newaxis]


def _mirror(indices: Tensor, sizes: Tensor) -> Tensor:
    """Maps integers of any size to 0 .. size - 1 by mirroring at the border pixels."""
    period = tf.maximum(2 * (sizes - 1), 1)
    inside = tf.math.floormod(indices, period)
    return tf.minimum(inside, period - inside)  # 0 for a size of 1, whose period is 1


def _sample(stored: StoredImages, which: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Interpolates bilinearly between the four pixels around each position: float32 [b, y, x, c]; ``rows`` and
    ``columns`` are float32 [b, y, x]."""
    top, left = tf.floor(rows), tf.floor(columns)
    down, right = (rows - top)[..., tf.newaxis], (columns - left)[..., tf.newaxis]
    top, left = tf.cast(top, tf.int32), tf.cast(left, tf.int32)
    lines = [stored.rows(which, top + i) for i in (0, 1)]
    sides = [stored.columns(which, left + j) for j in (0, 1)]
    pixels = [[tf.cast(tf.gather(stored.pixels, y + x), tf.float32) for x in sides] for y in lines]
    upper, lower = (one * (1 - right) + other * right for one, other in pixels)
    return upper * (1 - down) + lower * down


def _starts(random: Tensor, sizes: Tensor, patch: int) -> Tensor:
    """Returns random starts, int64 [b], of patches of ``patch`` pixels in ``sizes``; larger patches are centred."""
    return tf.where(sizes > patch, below(random, sizes - patch + 1), -((patch - sizes) // 2))


def training_patches(
    stored: StoredImages,
    which: Tensor,
    random: Tensor,
    size: Tuple[int, int],
    output: Tuple[int, int],
    elastic: bool,
) -> Tuple[Tensor, Tensor]:
    """Returns patches at random positions: float32 images [b, *size, c] in 0..255, and masks [b, *output].

    Args:
        stored: the whole set.
        which: int64 [b], the image of each patch.
        random: int64 hashes [b, ELASTIC_DRAWS]; without ``elastic``, only the first TILE_DRAWS are used.
        size: (height, width) of the network's input.
        output: (height, width) of its prediction, the centre of the input.  It lies within the image unless it is
            larger.
        elastic: whether to mirror the patches, rotate them by any angle, zoom and bend them, and change contrast and
            brightness.
    """
    margins = [(full - inner) // 2 for full, inner in zip(size, output)]
    sides = stored.sizes(which)
    starts = [_starts(random[:, axis], sides[axis], output[axis]) - margins[axis] for axis in (0, 1)]
    window = (
        slice(None),
        slice(margins[0], margins[0] + output[0]),
        slice(margins[1], margins[1] + output[1]),
    )
    if not elastic:
        rows = tf.cast(starts[0], tf.int32)[:, tf.newaxis, tf.newaxis] + tf.range(size[0])[:, tf.newaxis]
        columns = tf.cast(starts[1], tf.int32)[:, tf.newaxis, tf.newaxis] + tf.range(size[1])
        places = stored.rows(which, rows) + stored.columns(which, columns)
        patches = tf.cast(tf.gather(stored.pixels, places), tf.float32)
        classes = tf.gather(stored.labels, places[window])
        return _shaped(patches, classes, size, output)
    rows, columns = _bent_places(random[:, TILE_DRAWS:], starts, size)
    patches = _sample(stored, which, rows, columns)
    near_rows, near_columns = (tf.cast(tf.floor(p[window] + 0.5), tf.int32) for p in (rows, columns))
    near = stored.rows(which, near_rows) + stored.columns(which, near_columns)
    classes = tf.gather(stored.labels, near)
    light = _signed(random[:, TILE_DRAWS + 3 : TILE_DRAWS + 5])[:, :, tf.newaxis, tf.newaxis, tf.newaxis]
    contrast, brightness = 1.0 + MAX_CONTRAST * light[:, 0], (255.0 * MAX_BRIGHTNESS) * light[:, 1]
    patches = (patches - 127.5) * contrast + (127.5 + brightness)
    return _shaped(patches, classes, size, output)


def _bent_places(random: Tensor, starts: Tensor, size: Tuple[int, int]) -> Tuple[Tensor, Tensor]:
    """Returns the position in the image of each pixel of a patch: float32 (rows, columns), [b, *size] each."""
    angle = below(random[:, 0], _NUM_ANGLES)
    zoom = tf.gather(_ZOOMS, below(random[:, 1], len(_ZOOMS)))
    flip = tf.where(below(random[:, 2], 2) > 0, -1.0, 1.0)
    cosine, sine = (tf.gather(table, angle) * zoom for table in (_COSINES, _SINES))
    centres = [(n - 1) / 2 for n in size]
    y = (tf.range(size[0], dtype=tf.float32) - centres[0])[:, tf.newaxis]
    x = (tf.range(size[1], dtype=tf.float32) - centres[1])[tf.newaxis, :]

    bend_y, bend_x = (
        _displacements(random[:, first : first + ELASTIC_GRID**2], size) for first in (5, 5 + ELASTIC_GRID**2)
    )
    centre_y, centre_x = (tf.cast(start, tf.float32) + c for start, c in zip(starts, centres))
    rows = wide(cosine) * y - wide(sine) * x + wide(centre_y) + bend_y
    columns = (wide(sine) * y + wide(cosine) * x) * wide(flip) + wide(centre_x) + bend_x
    return rows, columns


def _shaped(
    patches: Tensor, masks: Tensor, size: Tuple[int, int], output: Tuple[int, int]
) -> Tuple[Tensor, Tensor]:
    patches.set_shape([None, *size, patches.shape[-1]])
    masks.set_shape([None, *output])
    return patches, masks
