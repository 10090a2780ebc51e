"""How pixels get to a network's range: in the input pipeline, inside a network, in 8 bits, and in an export's files.

:class:`InputRange` is the only place with the numbers of a range, and :class:`Transfer` the only place that puts images
into the type in which a device gets them.  TensorFlow is imported inside the functions that compute.
"""

from dataclasses import dataclass, replace
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import PlainDict, Tensor, TensorShape, TfDataset
from ipucnn.datasets.base import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo
from ipucnn.errors import ConfigurationError

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601)."""

CAFFE_MEAN = (103.939, 116.779, 123.68)
"""ImageNet's mean in blue, green, red order, from Keras Applications' "caffe" mode."""

INPUT_RANGES = ("standard", "unit", "tf", "raw", "caffe", "torch", "image")


def check_channels(images: int, network: int) -> None:
    """Refuses a network whose channels images can't have: grey is repeated, and colour can become grey.

    Raises:
        ConfigurationError: it takes several channels, and the images have other ones.
    """
    if images != network and 1 not in (images, network):
        raise ConfigurationError(
            f"images with {images} channels cannot feed a network with {network}",
            "make the network for images of 1 or 3 channels: no data set has others",
        )


class Scaling(NamedTuple):
    """A range as pixels x factor + offset, with one number for all channels or one per channel."""

    factor: np.ndarray
    offset: np.ndarray

    def equals(self, other: "Scaling") -> bool:
        """Whether two scalings of pixels of 0..255 differ by rounding only."""
        ends = [np.float64(end) * one.factor + one.offset for end in (0, 255) for one in (self, other)]
        return all(
            np.allclose(mine, theirs, rtol=1e-5, atol=1e-5) for mine, theirs in zip(ends[::2], ends[1::2])
        )


@dataclass(frozen=True)
class InputRange:
    """The range of a network's input: ``(pixels / divisor - offsets) / deviations``, from pixels of 0..255.

    Attributes:
        name: one of ``INPUT_RANGES``; see :meth:`of`.
        offsets, deviations: one number per channel.
        divisor: one number for all channels.
        reverse: whether the channels are reversed to blue, green, red order first.
        per_image: whether :func:`standardise` takes the place of the formula.
    """

    name: str
    offsets: Tuple[float, ...]
    deviations: Tuple[float, ...]
    divisor: float = 1.0
    reverse: bool = False
    per_image: bool = False

    @classmethod
    def of(cls, name: str, info: DatasetInfo, channels: int) -> "InputRange":
        """Returns a range by its name.

        - "standard": minus the data set's mean, over its standard deviation, per channel;
        - "unit": to [0, 1];  "tf": to [-1, 1];  "raw": left in [0, 255];
        - "torch": minus ImageNet's mean, over its standard deviation;
        - "caffe": blue, green, red order, minus ImageNet's mean;
        - "image": see :func:`standardise`.

        Args:
            name: one of ``INPUT_RANGES``.
            info: the facts of the data set that the network was trained on.
            channels: channels of the network's input.

        Raises:
            ConfigurationError: the name is unknown.
        """
        zeros, ones = (0.0,) * channels, (1.0,) * channels
        if name in ("raw", "image"):
            return cls(name, zeros, ones, per_image=name == "image")
        if name == "unit":
            return cls(name, zeros, ones, 255.0)
        if name == "tf":
            return cls(name, ones, ones, 127.5)
        if name == "caffe":
            mean = CAFFE_MEAN if channels == 3 else _to_channels(CAFFE_MEAN[::-1], channels)
            return cls(name, mean, ones, reverse=channels == 3)
        statistics = {"torch": (IMAGENET_MEAN, IMAGENET_STD), "standard": (info.mean, info.std)}
        if name not in statistics:
            raise ConfigurationError(
                f"input range '{name}' is unknown", f"choose one of {', '.join(INPUT_RANGES)}"
            )
        mean, std = statistics[name]
        return cls(name, _to_channels(mean, channels), _to_channels(std, channels))

    @property
    def factors(self) -> Tuple[float, ...]:
        """The reciprocals of the deviations, for operations that multiply."""
        return tuple(1.0 / value for value in self.deviations)

    @property
    def scaling(self) -> Optional[Scaling]:
        """The range as one factor and one offset per channel, from channels in its order; None for one per image."""
        if self.per_image:
            return None
        factors = [1 / self.divisor * factor for factor in self.factors]
        offsets = [-offset * factor for offset, factor in zip(self.offsets, self.factors)]
        return Scaling(np.asarray(factors), np.asarray(offsets))

    def apply(self, images: Tensor) -> Tensor:
        """Brings float32 [b, h, w, c] of 0..255 into the range, in the input pipeline."""
        import tensorflow as tf

        if self.per_image:
            # The batch size changes the order of summation.  The resulting differences in 64 bits are rounded away.
            return tf.cast(standardise(tf.cast(images, tf.float64)), tf.float32)
        return self._computed(images, lambda values: _whole_image(values, images.shape))

    def exact(self, pixels: np.ndarray) -> np.ndarray:
        """Brings pixels [b, h, w, c] of 0..255 into the range in 64 bits, as the reference of a verification."""
        import tensorflow as tf

        pixels = np.float64(pixels[..., ::-1] if self.reverse else pixels)
        if self.per_image:
            return np.asarray(standardise(tf.constant(pixels)))
        return (pixels / self.divisor - np.asarray(self.offsets)) / np.asarray(self.deviations)

    def apply_in_network(self, images: Tensor) -> Tensor:
        """Brings float32 [b, h, w, c] of 0..255 into the range on a device, where a constant of a whole image would
        take too much memory."""
        import tensorflow as tf

        return standardise(images) if self.per_image else self._computed(images, tf.constant)

    def _computed(self, images: Tensor, constant: Callable[[Sequence[float]], Tensor]) -> Tensor:
        """Computes the formula; steps that change nothing are left out."""
        import tensorflow as tf

        if self.reverse:
            images = tf.reverse(images, axis=[-1])
        if self.divisor != 1:
            images = images / self.divisor
        if any(self.offsets):
            images = images - constant(self.offsets)
        if any(value != 1 for value in self.deviations):
            images = images / constant(self.deviations)
        return images

    def layers(self) -> List[Tuple[str, str, PlainDict]]:
        """Returns the same as layers of Keras alone, for an exported network: (name, class, settings) of each."""
        keep = ("pixels", "Rescaling", {"scale": 1.0, "offset": 0.0})
        scaling = self.scaling
        if scaling is None:
            # This is far below 1/(pixels squared), the smallest variance of 8-bit images that are not constant.
            settings = {"axis": [1, 2, 3], "epsilon": 1e-12, "center": False, "scale": False}
            # Keras subtracts the mean after scaling, which rounds by the distance of the pixels from 0.
            keep[2]["offset"] = -128.0
            return [keep, ("per_image", "LayerNormalization", settings)]
        settings = {"scale": scaling.factor.tolist(), "offset": scaling.offset.tolist()}
        last = ("normalise", "Rescaling", settings)
        if not self.reverse:
            return [last]
        channels = len(self.offsets)
        kernel = np.eye(channels)[None, None, :, ::-1].tolist()
        turn = {
            "filters": channels,
            "kernel_size": 1,
            "use_bias": False,
            "trainable": False,
            "kernel_initializer": {"class_name": "Constant", "config": {"value": kernel}},
        }
        return [keep, ("blue_green_red", "Conv2D", turn), last]

    def describe(self) -> PlainDict:
        """Returns the entries about the range in an export's ``input.json``."""
        formula = {
            "scale": 1 / self.divisor,
            "offsets": list(self.offsets),
            "factors": list(self.factors),
        }
        return {
            "range": self.name,
            "reverse_channels": self.reverse,
            "per_image": self.per_image,
            "formula": None if self.per_image or self.name == "raw" else formula,
        }


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


def standardise(images: Tensor) -> Tensor:
    """Subtracts from each image of [b, h, w, c] the mean of its values, and divides by their standard deviation.

    This is the public application's preprocessing of CIFAR (datasets/cifar10_dataset.py), except that images of one
    value become zeros here and NaN there.
    """
    import tensorflow as tf

    axes = list(range(1, images.shape.rank))
    images = images - tf.reduce_mean(images, axes, keepdims=True)
    deviation = tf.sqrt(tf.reduce_mean(images * images, axes, keepdims=True))
    return images / tf.where(deviation > 0, deviation, tf.ones_like(deviation))


def _whole_image(values: Sequence[float], shape: TensorShape) -> np.ndarray:
    """Returns float32 [h, w, c] of one value per channel; broadcasting over 3 channels would take 4 times as long."""
    return np.broadcast_to(np.float32(values), (shape[1], shape[2], shape[3])).copy()


def in_8_bits(images: Tensor) -> np.ndarray:
    """Returns uint8 pixels: floats rounded and limited to 0..255, which resizing and augmentation may leave."""
    return np.uint8(np.clip(np.rint(np.asarray(images)), 0, 255))


@dataclass(frozen=True)
class Transfer:
    """The images on the way to a device.

    Attributes:
        dtype: their type; "uint8" for pixels of 0..255 in 8 bits.
        on_device: the range into which the device brings them; None: they are in the network's range.
    """

    dtype: str
    on_device: Optional[InputRange] = None

    def moved(self, input_range: InputRange, eight_bits: bool, on_device: bool) -> "Transfer":
        """Returns the transfer with which the device brings images into a range, if one of the two options asks so."""
        if eight_bits:
            return Transfer("uint8", input_range)
        return replace(self, on_device=input_range) if on_device else self

    def pack(self, images: Tensor) -> Tensor:
        """Returns images in the type of the transfer; 8 bits as :func:`in_8_bits` makes them."""
        import tensorflow as tf

        if self.dtype == "uint8":
            images = tf.clip_by_value(tf.round(tf.cast(images, tf.float32)), 0.0, 255.0)
        return tf.cast(images, self.dtype)

    def pack_8_bits(self, batches: TfDataset) -> TfDataset:
        """Returns a data set of (images, ...) with packed images if the transfer has 8 bits, else the same one."""
        if self.dtype != "uint8":
            return batches
        import tensorflow as tf

        packed = lambda images, *rest: (self.pack(images), *rest)  # noqa: E731
        return batches.map(tf.autograph.experimental.do_not_convert(packed))

    def unpack(self, images: Tensor) -> Tensor:
        """Returns transferred images in the network's range."""
        import tensorflow as tf

        return (
            images if self.on_device is None else self.on_device.apply_in_network(tf.cast(images, tf.float32))
        )
