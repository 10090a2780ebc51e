"""Evaluation tiles as batches: the arithmetic of :mod:`ipucnn.datasets.tiles` with TensorFlow's gathers."""

from typing import Any, Callable, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.datasets.tiles import IGNORED, counted, seen


def evaluation_tiles(
    examples: Any, batch_size: int, size: Tuple[int, int], output: Tuple[int, int], step: int
) -> Tuple[Any, Callable[[Any], Tuple[Any, Any, Any]]]:
    """The tiles that cover all images, each pixel once.

    Args:
        examples: ``ArrayExamples`` with masks.
        batch_size: the last batch is filled up with zeros of weight 0.
        size: of the network's input.
        output: of what it predicts, the centre of that.
        step: tiles begin at multiples of it.

    Returns:
        The numbers of each batch's tiles, int64 [batches, batch_size]; and a function of one such row, for
        ``tf.data``: float32 images [batch_size, *size, c] in 0..255, int32 labels [batch_size, *output], and
        float32 weights [batch_size], how many pixels count in a tile: whole numbers, whose sum is exact.
    """
    num, height, width, channels = examples.images.shape
    places = counted((height, width), output, step)
    rows, columns = seen((height, width), output, size, step)
    top, left = (size[0] - output[0]) // 2, (size[1] - output[1]) // 2
    sizes = np.float32(places.sum(axis=(1, 2)))
    num_batches = -(-num * len(places) // batch_size)
    numbers = np.arange(num_batches * batch_size, dtype=np.int64).reshape(num_batches, batch_size)
    stored = tf.constant(examples.images.reshape(-1, channels))
    classes = tf.constant(np.ascontiguousarray(examples.labels).reshape(-1))
    rows, columns = tf.constant(rows), tf.constant(columns)
    counts, sizes = tf.constant(places), tf.constant(sizes)

    def cut(numbers: Any) -> Tuple[Any, Any, Any]:
        is_real = numbers < num * len(places)
        tile = numbers % len(places)
        first = tf.where(is_real, numbers // len(places), 0) * (height * width)
        pixels = (
            first[:, tf.newaxis, tf.newaxis]
            + tf.gather(rows, tile)[:, :, tf.newaxis] * width
            + tf.gather(columns, tile)[:, tf.newaxis, :]
        )
        inner = pixels[:, top : top + output[0], left : left + output[1]]
        real = is_real[:, tf.newaxis, tf.newaxis]
        images = tf.cast(tf.gather(stored, pixels), tf.float32) * tf.cast(real[..., tf.newaxis], tf.float32)
        labels = tf.cast(tf.gather(classes, inner), tf.int32)
        labels = tf.where(tf.gather(counts, tile) & real, labels, IGNORED)
        weights = tf.gather(sizes, tile) * tf.cast(is_real, tf.float32)
        images.set_shape((batch_size, *size, channels))
        labels.set_shape((batch_size, *output))
        return images, labels, weights

    return numbers, cut
