"""Turns stored uint8 images into the network's input.  Training, evaluation and inference share this path.

Order: size, channels, range (``pixels.py``).  Every step works on each image by itself and uses no function whose
vector and scalar forms could round differently, so the size of the batch does not change an image's bytes.
"""

from typing import Optional, Tuple

import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.datasets.pixels import LUMA, InputRange, check_channels
from ipucnn.errors import ConfigurationError


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Converts float32 [b, h, w, c] to ``channels`` channels: repeats grey, or weights colour by LUMA."""
    present = images.shape[-1]
    check_channels(present, channels)
    if present == channels:
        return images
    if present == 1:
        return tf.repeat(images, channels, axis=-1)
    red, green, blue = tf.split(images, 3, axis=-1)
    return red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Resizes float32 [b, h, w, c] to [b, height, width, c]: bilinear, with antialiasing if a side shrinks."""
    if images.shape[1] == height and images.shape[2] == width:
        return images
    shrinks = images.shape[1] > height or images.shape[2] > width
    return tf.image.resize(images, (height, width), method="bilinear", antialias=shrinks)


def resize_masks(masks: Tensor, height: int, width: int) -> Tensor:
    """Resizes integer masks [b, h, w] to [b, height, width] by nearest neighbour."""
    if masks.shape[1] == height and masks.shape[2] == width:
        return masks
    return tf.image.resize(masks[..., tf.newaxis], (height, width), method="nearest")[..., 0]


def crop_centre(masks: Tensor, height: int, width: int) -> Tensor:
    """Crops masks [b, h, w] to their centre [b, height, width], the part that unpadded convolutions predict.

    Raises ConfigurationError if the crop is larger than the mask.
    """
    top, left = masks.shape[1] - height, masks.shape[2] - width
    if top < 0 or left < 0:
        raise ConfigurationError(
            f"the network predicts {height}x{width} pixels but is given {masks.shape[1]}x{masks.shape[2]}",
            "use a larger --image-size",
        )
    return masks[:, top // 2 : top // 2 + height, left // 2 : left // 2 + width]


def prepare_size(images: Tensor, input_shape: Tuple[int, int, int]) -> Tensor:
    """Resizes uint8 [b, h, w, c] to float32 [b, input height, input width, c], still in 0..255."""
    return resize(tf.cast(images, tf.float32), input_shape[0], input_shape[1])


def prepare_range(images: Tensor, input_shape: Tuple[int, int, int], input_range: InputRange) -> Tensor:
    """Converts the result of :func:`prepare_size` to float32 [b, *input_shape] in the network's range."""
    return input_range.apply(convert_channels(images, input_shape[2]))


def prepare_labels(
    labels: Tensor, input_shape: Tuple[int, int, int], output_shape: Optional[Tuple[int, int]]
) -> Tensor:
    """Returns int32 labels: classes [b] unchanged; masks [b, h, w] resized with the image and cropped to
    ``output_shape``."""
    if labels.shape.rank == 3:
        labels = resize_masks(labels, input_shape[0], input_shape[1])
        if output_shape is not None:
            labels = crop_centre(labels, output_shape[0], output_shape[1])
    return tf.cast(labels, tf.int32)
