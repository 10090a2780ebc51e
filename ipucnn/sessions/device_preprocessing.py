"""The last step of preprocessing, which the device does if the options ask for it."""

from dataclasses import dataclass, replace
from typing import Optional

import tensorflow as tf

from ipucnn.aliases import Tensor, TfDataset
from ipucnn.config.options import RunConfig
from ipucnn.datasets.preprocessing import ChannelAffine


@dataclass(frozen=True)
class Preprocessing:
    """The last step of preprocessing, and the type of images on the way to the device.

    Attributes:
        transfer: the type of the images on the way to the device.
        affine: the function that the device applies to each channel; None: the input pipeline has applied it.
    """

    transfer: str
    affine: Optional[ChannelAffine] = None

    def on_device(self, affine: ChannelAffine, config: RunConfig) -> "Preprocessing":
        """Returns the preprocessing whose last step the device does, if the options ask for it."""
        if config.eight_bit_transfer:
            return Preprocessing("uint8", affine)
        return replace(self, affine=affine) if config.accelerator_side_preprocess else self

    def pack(self, images: Tensor) -> Tensor:
        """Returns images in the type of the transfer."""
        return tf.cast(tf.round(images) if self.transfer == "uint8" else images, self.transfer)

    def pack_8_bits(self, batches: TfDataset) -> TfDataset:
        """Returns a data set of (images, ...) with packed images if the transfer has 8 bits, else the same one."""
        if self.transfer != "uint8":
            return batches
        packed = lambda images, *rest: (self.pack(images), *rest)  # noqa: E731
        return batches.map(tf.autograph.experimental.do_not_convert(packed))

    def unpack(self, images: Tensor) -> Tensor:
        """Returns transferred images in the network's range."""
        return images if self.affine is None else self.affine.apply(tf.cast(images, tf.float32))
