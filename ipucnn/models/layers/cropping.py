"""Crops that copy on IPUs: the skips of U-Net.

On an IPU TensorFlow's crop is a view of the whole tensor, which stays in memory and is what travels between pipeline
stages.  ``custom_ops/crop.cpp`` copies the part; where it was not built, and on other devices, the plain crop is used.
The numbers are the same.
"""

from pathlib import Path
from typing import Any, Optional, Tuple

import tensorflow as tf
from tensorflow import keras

from ipucnn.models.custom_ops import crop_library

__all__ = ["Cropping2D", "copying_crop", "on_ipu"]

# Of the attributes that ``custom_ops/crop.cpp`` reads; raised with what it computes.
_VERSION = 1

_Borders = Tuple[Tuple[int, int], Tuple[int, int]]


def on_ipu() -> bool:
    """Whether what is traced now runs on IPUs: in the scope of the SDK's strategies, alone or under poprun."""
    names = {base.__name__ for base in type(tf.distribute.get_strategy()).__mro__}
    return not names.isdisjoint(("IPUStrategyV1", "PopDistStrategy"))


def _custom_op(inputs: Any, operation: str, shape: Tuple[int, ...], attributes: str, library: Path) -> Any:
    """One of the library's operations, (batch, height, width, channels) -> ``shape``."""
    from tensorflow.python import ipu

    outputs = ipu.custom_ops.precompiled_user_op(
        [inputs],
        str(library),
        outs={"output_types": [inputs.dtype], "output_shapes": [tf.TensorShape(shape)]},
        name=operation,
        op_name=operation,
        attributes=attributes,
    )
    return outputs[0]


def copying_crop(inputs: Any, borders: _Borders, library: Path) -> Any:
    """The part of an image as a tensor of its own, with its gradient, through the Poplar operation.

    The gradient takes nothing but the part's gradient, so the whole image need not be kept for the backward pass.

    Args:
        inputs: (batch, height, width, channels), all known.
        borders: ((top, bottom), (left, right)) pixels to cut off.
        library: with the operations.
    """
    (top, bottom), (left, right) = borders
    batch, height, width, channels = (int(size) for size in inputs.shape)
    whole = (batch, height, width, channels)
    part = (batch, height - top - bottom, width - left - right, channels)
    attributes = " ".join(map(str, (_VERSION, top, left, bottom, right, height, width)))

    @tf.custom_gradient
    def crop(image: Any) -> Any:
        def gradient(of_part: Any) -> Any:
            return _custom_op(of_part, "PadNHWC", whole, attributes, library)

        return _custom_op(image, "CropNHWC", part, attributes, library), gradient

    return crop(inputs)


@keras.utils.register_keras_serializable(package="ipucnn")
class Cropping2D(keras.layers.Cropping2D):
    """``keras.layers.Cropping2D`` that copies on IPUs if the custom operation was built."""

    def call(self, inputs: Any) -> Any:
        library: Optional[Path] = crop_library() if on_ipu() else None
        # With sizes that are not known Keras infers shapes; the SDK runs nothing of the kind.
        if library is None or not tf.TensorShape(inputs.shape).is_fully_defined():
            return super().call(inputs)
        return copying_crop(inputs, self.cropping, library)
