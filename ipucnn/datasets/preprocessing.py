"""Turns stored uint8 images into the network's input.  Training, evaluation and inference share this path.

Order: size, channels, range.  Every step works on each image by itself and uses no function whose vector and
scalar forms could round differently, so the size of the batch does not change an image's bytes.
"""

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor, TensorShape
from ipucnn.datasets.base import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo
from ipucnn.errors import ConfigurationError

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601)."""

CAFFE_MEAN = (103.939, 116.779, 123.68)
"""ImageNet's mean in blue, green, red order, from Keras Applications' "caffe" mode."""

INPUT_RANGES = ("standard", "unit", "tf", "raw", "caffe", "torch", "image")


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Converts float32 [b, h, w, c] to ``channels`` channels: repeats grey, or weights colour by LUMA."""
    present = images.shape[-1]
    if present == channels:
        return images
    if present == 1:
        return tf.repeat(images, channels, axis=-1)
    if present == 3 and channels == 1:
        red, green, blue = tf.split(images, 3, axis=-1)
        return red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]
    raise ConfigurationError(
        f"images with {present} channels cannot feed a network with {channels}",
        "choose a data set with 1 or 3 channels",
    )


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


def _to_channels(values: Sequence[float], channels: int) -> Tuple[float, ...]:
    """Converts statistics of the stored channels to the network's channels."""
    if len(values) == channels:
        return tuple(values)
    if len(values) == 3:
        return (sum(weight * value for weight, value in zip(LUMA, values)),)
    return (values[0],) * channels


def pixel_mean(info: DatasetInfo, input_shape: Sequence[int]) -> Tuple[float, ...]:
    """Returns the data set's mean colour, in 0..255, with the network's number of channels."""
    return _to_channels(info.mean, int(input_shape[2]))


def normalise(images: Tensor, input_range: str, info: DatasetInfo) -> Tensor:
    """Scales float32 [b, h, w, c] in 0..255 to the range the network was designed for.

    - "standard": minus the data set's mean, over its standard deviation, per channel;
    - "unit": to [0, 1];  "tf": to [-1, 1];  "raw": left in [0, 255];
    - "torch": to [0, 1], minus ImageNet's mean, over its standard deviation;
    - "caffe": blue, green, red order, minus ImageNet's mean;
    - "image": see :func:`standardise`.
    """
    channels = images.shape[-1]
    if input_range == "raw":
        return images
    if input_range == "unit":
        return images / 255.0
    if input_range == "tf":
        return images / 127.5 - 1.0
    if input_range == "image":
        # The batch size changes the order of summation.  The resulting differences in 64 bits are rounded away.
        return tf.cast(standardise(tf.cast(images, tf.float64)), tf.float32)
    if input_range == "caffe":
        mean = CAFFE_MEAN if channels == 3 else _to_channels(CAFFE_MEAN[::-1], channels)
        images = tf.reverse(images, axis=[-1]) if channels == 3 else images
        return images - _whole_image(mean, images.shape)
    if input_range == "torch":
        mean, std = _to_channels(IMAGENET_MEAN, channels), _to_channels(IMAGENET_STD, channels)
    elif input_range == "standard":
        mean, std = _to_channels(info.mean, channels), _to_channels(info.std, channels)
    else:
        raise ConfigurationError(
            f"input range '{input_range}' is unknown", f"choose one of {', '.join(INPUT_RANGES)}"
        )
    return (images - _whole_image(mean, images.shape)) / _whole_image(std, images.shape)


def standardise(images: Tensor) -> Tensor:
    """Subtracts from each image of [b, h, w, c] the mean of its values, and divides by their standard deviation.

    This is the public application's preprocessing of CIFAR (datasets/cifar10_dataset.py), except that images of one
    value become zeros here and NaN there.
    """
    axes = list(range(1, images.shape.rank))
    images = images - tf.reduce_mean(images, axes, keepdims=True)
    deviation = tf.sqrt(tf.reduce_mean(images * images, axes, keepdims=True))
    return images / tf.where(deviation > 0, deviation, tf.ones_like(deviation))


@dataclass(frozen=True)
class ChannelAffine:
    """:func:`normalise` for a device: ``(images x scale - offsets) x factors``, after reversing the channels if set.

    Attributes:
        reverse: whether to reverse the channels to blue, green, red order first.
        scale: factor of all channels.
        offsets, factors: one number per channel.
        per_image: whether to apply :func:`standardise` instead of the formula.
    """

    reverse: bool
    scale: float
    offsets: Tuple[float, ...]
    factors: Tuple[float, ...]
    per_image: bool = False

    def apply(self, images: Tensor) -> Tensor:
        """Scales float32 [b, h, w, c] in 0..255 to the network's range, inside a network."""
        if self.per_image:
            return standardise(images)
        if self.reverse:
            images = tf.reverse(images, axis=[-1])
        return (images * self.scale - tf.constant(self.offsets)) * tf.constant(self.factors)


def channel_affine(input_range: str, info: DatasetInfo, channels: int) -> ChannelAffine:
    """Returns the numbers of an input range, for devices on which a constant of a whole image takes too much memory."""
    zeros, ones = (0.0,) * channels, (1.0,) * channels
    if input_range in ("raw", "image"):
        return ChannelAffine(False, 1.0, zeros, ones, per_image=input_range == "image")
    if input_range == "unit":
        return ChannelAffine(False, 1 / 255.0, zeros, ones)
    if input_range == "tf":
        return ChannelAffine(False, 1 / 127.5, ones, ones)
    if input_range == "caffe":
        mean = CAFFE_MEAN if channels == 3 else _to_channels(CAFFE_MEAN[::-1], channels)
        return ChannelAffine(channels == 3, 1.0, tuple(mean), ones)
    statistics = (IMAGENET_MEAN, IMAGENET_STD) if input_range == "torch" else (info.mean, info.std)
    mean, std = (_to_channels(values, channels) for values in statistics)
    return ChannelAffine(False, 1.0, mean, tuple(1.0 / value for value in std))


def _whole_image(values: Sequence[float], shape: TensorShape) -> np.ndarray:
    """Returns float32 [h, w, c] of one value per channel; broadcasting over 3 channels would take 4 times as long."""
    return np.broadcast_to(np.float32(values), (shape[1], shape[2], shape[3])).copy()


def prepare_size(images: Tensor, input_shape: Tuple[int, int, int]) -> Tensor:
    """Resizes uint8 [b, h, w, c] to float32 [b, input height, input width, c], still in 0..255."""
    return resize(tf.cast(images, tf.float32), input_shape[0], input_shape[1])


def prepare_range(
    images: Tensor, input_shape: Tuple[int, int, int], input_range: str, info: DatasetInfo
) -> Tensor:
    """Converts the result of :func:`prepare_size` to float32 [b, *input_shape] in ``input_range``."""
    return normalise(convert_channels(images, input_shape[2]), input_range, info)


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
