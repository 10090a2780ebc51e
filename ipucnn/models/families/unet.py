"""U-Net, Ronneberger et al. 2015, arXiv:1505.04597, with unpadded convolutions as in the paper."""

from __future__ import annotations

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.keras_config import read_blueprint

_DEPTH = 5
_DROPOUT = 0.5


def _double_conv(x: Tensor, filters: int, name: str) -> Tensor:
    """Two 3x3 convolutions, each followed by a norm and a ReLU; each removes a pixel from every side."""
    from tensorflow import keras

    for i in (1, 2):
        x = keras.layers.Conv2D(filters, 3, kernel_initializer="he_normal", name=f"{name}_conv{i}")(x)
        x = keras.layers.BatchNormalization(name=f"{name}_bn{i}")(x)
        x = keras.layers.ReLU(name=f"{name}_relu{i}")(x)
    return x


def build_unet(inputs: Tensor, num_classes: int, base_filters: int, margin: int) -> Blueprint:
    """Builds U-Net: the encoder halves the image four times, the decoder doubles it four times; skips are cropped.

    Args:
        base_filters: filters of the first block (64 in the paper), doubled in each of the next four.
        margin: input size minus output size in pixels, in each direction; it is checked.

    Raises:
        ValueError: the network's margin is not ``margin``.
    """
    from tensorflow import keras

    from ipucnn.models.layers.per_sample import Cropping2D

    skips = []
    x = inputs
    for i in range(_DEPTH):
        x = _double_conv(x, base_filters * 2**i, f"encoder_block_{i}")
        if i < _DEPTH - 1:
            skips.append(x)
            x = keras.layers.MaxPooling2D(2, name=f"encoder_block_{i}_maxpooling")(x)
    x = keras.layers.Dropout(_DROPOUT, name=f"encoder_block_{_DEPTH - 1}_dropout")(x)
    for i in range(_DEPTH - 1):
        name, filters = f"decoder_block_{i}", base_filters * 2 ** (_DEPTH - 2 - i)
        x = keras.layers.Conv2DTranspose(
            filters, 2, strides=2, kernel_initializer="he_normal", name=f"{name}_transpose"
        )(x)
        skip = skips.pop()
        borders = tuple(
            ((big - small) // 2, big - small - (big - small) // 2)
            for big, small in zip(skip.shape[1:3], x.shape[1:3])
        )
        skip = Cropping2D(borders, name=f"{name}_crop")(skip)
        x = keras.layers.Concatenate(name=f"{name}_concat")([x, skip])
        x = _double_conv(x, filters, name)
    x = keras.layers.Conv2D(num_classes, 1, kernel_initializer="he_normal", name="predictions")(x)
    if (inputs.shape[1] - x.shape[1], inputs.shape[2] - x.shape[2]) != (margin, margin):
        raise ValueError(f"U-Net's output {tuple(x.shape)} is not {margin} pixels smaller than its input")
    return read_blueprint(keras.Model(inputs, x))
