"""``membranes``: generated grey images that look like brain tissue in an electron microscope, with masks.

They allow segmentation without a download.  Cells are a jittered Voronoi tessellation with wavy borders; the dark
border is the membrane (class 0, 20 to 25 % of the pixels), and the inside is the cell (class 1), as in the ISBI
2012 challenge.  Dark organelles, uneven light, blur and noise keep plain thresholding from solving it.
"""

import functools
from typing import Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, data_source
from ipucnn.errors import ConfigurationError

NUM_TRAIN, NUM_EVAL = 24, 6
DEFAULT_SIZE = 252
SMALLEST_SIZE = 16
CELL_PIXELS = 34.0
MEMBRANE_PIXELS = 4.0


def _smooth_noise(random: np.random.RandomState, shape: Tuple[int, int], sigma: float) -> np.ndarray:
    """Returns float32 noise of correlation length ``sigma``, mean 0 and standard deviation 1.

    The noise is drawn on a coarse grid and enlarged, which is many times faster than filtering at full size.
    """
    from scipy.ndimage import gaussian_filter, zoom

    step = max(1.0, sigma / 2)
    coarse = tuple(int(np.ceil(n / step)) + 3 for n in shape)
    noise = gaussian_filter(random.standard_normal(coarse).astype(np.float32), sigma / step, mode="wrap")
    noise = zoom(noise, step if step > 1 else 1.0, order=1)[: shape[0], : shape[1]]
    return (noise - noise.mean()) / (noise.std() + 1e-6)


def _tessellate(
    random: np.random.RandomState, rows: np.ndarray, columns: np.ndarray, num_rows: int, num_columns: int
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns for each point the id of the nearest cell centre, and the distance to the border with the second nearest.

    Centres form a jittered grid, one per square of CELL_PIXELS, so the nearest two lie among the 25 around a point.
    """
    centres = random.uniform(0.1, 0.9, (num_rows + 6, num_columns + 6, 2)).astype(np.float32)
    centres += np.stack(
        np.meshgrid(np.arange(-3, num_rows + 3), np.arange(-3, num_columns + 3), indexing="ij"), -1
    )
    centres *= CELL_PIXELS
    cell_row = np.clip(np.floor(rows / CELL_PIXELS).astype(np.int64), -1, num_rows)
    cell_column = np.clip(np.floor(columns / CELL_PIXELS).astype(np.int64), -1, num_columns)
    own_id = (cell_row + 3) * (num_columns + 6) + cell_column + 3
    first = np.full(rows.shape, np.inf, np.float32)
    second = first.copy()
    first_id = np.zeros(rows.shape, np.int64)
    second_id = first_id.copy()
    flat = centres.reshape(-1, 2)
    centre_rows, centre_columns = flat.T.copy()
    for d_row in range(-2, 3):
        for d_column in range(-2, 3):
            ids = own_id + (d_row * (num_columns + 6) + d_column)
            square = (rows - centre_rows[ids]) ** 2 + (columns - centre_columns[ids]) ** 2
            is_second, is_first = square < second, square < first
            for values, former, new in ((second, first, square), (second_id, first_id, ids)):
                np.copyto(values, new, where=is_second)
                np.copyto(values, former, where=is_first)
                np.copyto(former, new, where=is_first)
    gap = np.sqrt(((flat[first_id] - flat[second_id]) ** 2).sum(-1))
    # (d2^2 - d1^2) / (2 |c1 - c2|) is the exact distance to the line half way between the two centres.
    return first_id, (second - first) / (2 * gap + 1e-6)


def draw_tissue(height: int, width: int, random: np.random.RandomState) -> Tuple[np.ndarray, np.ndarray]:
    """Draws one uint8 image [height, width] and its uint8 mask: 0 is membrane, 1 is cell."""
    from scipy.ndimage import gaussian_filter

    shape = (height, width)
    rows: np.ndarray
    columns: np.ndarray
    rows, columns = np.meshgrid(
        np.arange(height, dtype=np.float32), np.arange(width, dtype=np.float32), indexing="ij"
    )
    rows = rows + 5.0 * _smooth_noise(random, shape, 12.0)
    columns = columns + 5.0 * _smooth_noise(random, shape, 12.0)
    num_rows, num_columns = (int(np.ceil(n / CELL_PIXELS)) for n in shape)
    ids, distance = _tessellate(random, rows, columns, num_rows, num_columns)
    half_width = MEMBRANE_PIXELS / 2 * (1.0 + 0.25 * _smooth_noise(random, shape, 20.0))
    depth = distance - np.maximum(half_width, 0.6)
    mask = (depth > 0).astype(np.uint8)

    tone = random.uniform(150.0, 195.0, (num_rows + 6) * (num_columns + 6)).astype(np.float32)
    image = tone[ids] + 9.0 * _smooth_noise(random, shape, 2.0)
    for _ in range(round(height * width / 1500)):  # organelles: dark discs with a lighter core
        row, column = random.uniform(0, height), random.uniform(0, width)
        radius, stretch, angle = random.uniform(2.5, 6.0), random.uniform(1.0, 1.8), random.uniform(0, np.pi)
        darkness = random.uniform(25.0, 70.0)
        reach = int(radius * stretch) + 2
        window = (
            slice(max(0, int(row) - reach), int(row) + reach + 1),
            slice(max(0, int(column) - reach), int(column) + reach + 1),
        )
        y, x = rows[window] - row, columns[window] - column
        along, across = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
        inside = np.sqrt((along / stretch) ** 2 + across**2) / radius
        # Organelles do not touch the membrane, which stays the darkest connected structure.
        disc = (inside < 1) & (depth[window] > 1.5)
        image[window] -= darkness * disc * np.where(inside < 0.45, 0.6, 1.0)
    membrane = np.clip(0.5 - depth, 0.0, 1.0)
    image = image * (1 - membrane) + (75.0 + 10.0 * _smooth_noise(random, shape, 6.0)) * membrane
    image = gaussian_filter(image, 0.8) + 10.0 * _smooth_noise(random, shape, 60.0)
    image += random.normal(0.0, 11.0, shape)
    return np.clip(np.round(image), 0, 255).astype(np.uint8), mask


@functools.lru_cache(maxsize=1)
def _drawn(height: int, width: int, seed: int) -> Tuple[np.ndarray, np.ndarray]:
    """Returns all images and masks, which a suite or a cross-validation opens many times."""
    drawn = [
        # A legacy generator per image, because its stream is the same in all NumPy versions.
        draw_tissue(height, width, np.random.RandomState([seed % 2**32, (seed >> 32) % 2**32, index]))
        for index in range(NUM_TRAIN + NUM_EVAL)
    ]
    images = np.stack([image for image, _ in drawn])[..., np.newaxis]
    masks = np.stack([mask for _, mask in drawn])
    images.flags.writeable = masks.flags.writeable = False  # they are shared
    return images, masks


def open_membranes(height: int = DEFAULT_SIZE, width: int = DEFAULT_SIZE, seed: int = 0) -> DataSource:
    """Generates 24 training and 6 evaluation images, a pure function of ``seed`` and the size.

    Raises ConfigurationError below 16x16 pixels.
    """
    if min(height, width) < SMALLEST_SIZE:
        raise ConfigurationError(
            f"membranes of {height}x{width} pixels: the smallest is {SMALLEST_SIZE}x{SMALLEST_SIZE}",
            f"--image-size {SMALLEST_SIZE} or more",
        )
    images, masks = _drawn(height, width, seed)
    return data_source(
        ArrayExamples(images[:NUM_TRAIN], masks[:NUM_TRAIN]),
        ArrayExamples(images[NUM_TRAIN:], masks[NUM_TRAIN:]),
        name="membranes",
        task="segmentation",
        class_names=("membrane", "cell"),
        location="generated",
        augmentation="dihedral",
        own_split=True,
    )
