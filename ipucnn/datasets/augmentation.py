"""Training augmentations of in-memory images, vectorised over the batch.

Each sample's random numbers are a hash of (seed, epoch, round, index), so they do not depend on the batch that
contains the sample.  Everything else is integer arithmetic, gathers and one projective transform; none of these
mixes samples.  Images from files are augmented while they are decoded (:mod:`ipucnn.datasets.images`).
"""

from typing import Callable, Dict, NamedTuple, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.datasets.hashing import AUGMENT, chain, stream_state

MAX_DEGREES = 12.0
MAX_ZOOM = 0.1
MAX_SHIFT = 0.0625
_ANGLES = np.radians(np.linspace(-MAX_DEGREES, MAX_DEGREES, 257))
# Tables, because TensorFlow's sine may round differently in its vector loop and in its scalar loop.
_COSINES, _SINES = np.cos(_ANGLES).astype(np.float32), np.sin(_ANGLES).astype(np.float32)


def shift_right(word: Tensor, bits: int) -> Tensor:
    """Shifts non-negative int64 tensors right, as :func:`ipucnn.datasets.hashing.mix` needs."""
    return tf.bitwise.right_shift(word, tf.constant(bits, tf.int64))


def draws(
    seed: int, epochs: Tensor, rounds: Tensor, indices: Tensor, count: int, stream: int = AUGMENT
) -> Tensor:
    """Returns ``count`` hashes in [0, 2**32) for each sample: int64 [b, count], from int64 [b] inputs."""
    state = tf.fill(tf.shape(indices), tf.constant(stream_state(seed, stream), tf.int64))
    for word in (epochs, rounds, indices):
        state = chain(state, word, shift_right)
    return chain(state[:, tf.newaxis], tf.range(count, dtype=tf.int64)[tf.newaxis, :], shift_right)


def below(draw: Tensor, bound: int) -> Tensor:
    """Maps int64 hashes to int64 in [0, bound), uniformly to within bound / 2**32."""
    return shift_right(draw * bound, 32)


def _move(images: Tensor, random: Tensor, reach_y: int, reach_x: int, flip: bool) -> Tensor:
    """Shifts images by whole pixels within the reach, fills with zeros, and mirrors half of them if ``flip``.

    A single gather of pixels takes half the time of TensorFlow's projective transform.
    """
    height, width, channels = images.shape[1:]
    rows = tf.range(height, dtype=tf.int64) + below(random[:, :1], 2 * reach_y + 1) - reach_y
    columns = tf.range(width, dtype=tf.int64)
    if flip:
        columns = tf.where(below(random[:, 2:3], 2) > 0, width - 1 - columns, columns)
    columns = columns + below(random[:, 1:2], 2 * reach_x + 1) - reach_x
    inside_rows, inside_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    batch = tf.shape(images, out_type=tf.int64)[0]
    first = tf.range(batch)[:, tf.newaxis] * (height * width)
    pixels = (first + rows * width)[:, :, tf.newaxis] + columns[:, tf.newaxis, :]
    inside = inside_rows[:, :, tf.newaxis] & inside_columns[:, tf.newaxis, :]
    zero = batch * (height * width)  # the row of zeros after the last pixel
    flat = tf.pad(tf.reshape(images, [-1, channels]), [[0, 1], [0, 0]])
    moved = tf.gather(flat, tf.where(inside, pixels, zero))
    moved.set_shape(images.shape)
    return moved


def _moves(part: int, flip: bool) -> Callable[[Tensor, Tensor, Tensor], Tuple[Tensor, Tensor]]:
    """Returns an augmentation that shifts by up to 1/``part`` of each side, see :func:`_move`."""

    def apply(images: Tensor, labels: Tensor, random: Tensor) -> Tuple[Tensor, Tensor]:
        reach_y, reach_x = (max(1, side // part) for side in images.shape[1:3])
        return _move(images, random, reach_y, reach_x, flip), labels

    return apply


def dihedral(images: Tensor, labels: Tensor, random: Tensor) -> Tuple[Tensor, Tensor]:
    """Applies one of the eight flips and quarter turns of a square (four of a rectangle) to image and mask."""
    symmetry = below(random[:, 0], 8)
    square = images.shape[1] == images.shape[2]
    masks = labels.shape.rank == 3

    def apply(tensor: Tensor) -> Tensor:
        steps = [(2, lambda t: tf.reverse(t, axis=[1])), (4, lambda t: tf.reverse(t, axis=[2]))]
        if square:
            order = [0, 2, 1, 3][: tensor.shape.rank]
            steps.insert(0, (1, lambda t: tf.transpose(t, order)))
        for bit, change in steps:
            chosen = tf.reshape(tf.not_equal(symmetry & bit, 0), [-1] + [1] * (tensor.shape.rank - 1))
            tensor = tf.where(chosen, change(tensor), tensor)
        return tensor

    return apply(images), apply(labels) if masks else labels


def digits(images: Tensor, labels: Tensor, random: Tensor) -> Tuple[Tensor, Tensor]:
    """Rotates by up to 12 degrees, zooms by up to 10 % and shifts by up to 1/16 of the side; fills with zeros."""
    height, width = images.shape[1], images.shape[2]
    angle = below(random[:, 0], len(_ANGLES))
    unit = tf.cast(shift_right(random[:, 1:4], 8), tf.float32) * (2.0**-23) - 1.0  # exact, in [-1, 1)
    zoom = 1.0 + MAX_ZOOM * unit[:, 0]
    cosine, sine = tf.gather(_COSINES, angle) * zoom, tf.gather(_SINES, angle) * zoom
    centre_y, centre_x = (height - 1) / 2, (width - 1) / 2
    offset_x = centre_x + MAX_SHIFT * width * unit[:, 1] - (cosine * centre_x - sine * centre_y)
    offset_y = centre_y + MAX_SHIFT * height * unit[:, 2] - (sine * centre_x + cosine * centre_y)
    zero = tf.zeros_like(zoom)
    # The operation samples each image at (a0 x + a1 y + a2, b0 x + b1 y + b2).
    turned = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack([cosine, -sine, offset_x, sine, cosine, offset_y, zero, zero], axis=1),
        output_shape=tf.shape(images)[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )
    turned.set_shape(images.shape)
    return turned, labels


def none(images: Tensor, labels: Tensor, random: Tensor) -> Tuple[Tensor, Tensor]:
    """Returns the images unchanged."""
    return images, labels


class Augmentation(NamedTuple):
    """An augmentation of a batch.

    Attributes:
        apply: (images [b, h, w, c], labels, int64 hashes [b, num_draws]) -> (images, labels).
        num_draws: number of random numbers per sample.
        after_resize: True to work on the network's input size (a small image is rotated with less loss once it is
            enlarged), False to work on the stored pixels, before channels and size are changed.
    """

    apply: Callable[[Tensor, Tensor, Tensor], Tuple[Tensor, Tensor]]
    num_draws: int
    after_resize: bool = False


# ``base.AUGMENTATION_NAMES`` repeats these names for modules that do not import TensorFlow; a test compares them.
AUGMENTATIONS: Dict[str, Augmentation] = {
    "none": Augmentation(none, 0),
    "digits": Augmentation(digits, 4, after_resize=True),
    # 2 pixels of 28: for digits and letters, whose mirror images have another meaning.
    "shift": Augmentation(_moves(14, flip=False), 2),
    "shift_flip": Augmentation(_moves(14, flip=True), 3),
    # 4 pixels of 32: the CIFAR augmentation of He et al. 2015 (arXiv:1512.03385, section 4.2).
    "crop": Augmentation(_moves(8, flip=False), 2),
    "crop_flip": Augmentation(_moves(8, flip=True), 3),
    "dihedral": Augmentation(dihedral, 1),
}
