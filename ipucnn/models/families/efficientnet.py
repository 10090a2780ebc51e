"""EfficientNet, its second version, and the variant with group convolutions, Masters et al. 2021, arXiv:2106.03640.

The originals, Tan and Le 2019, arXiv:1905.11946, and 2021, arXiv:2104.00298, are taken from Keras Applications as they
are.
"""

from __future__ import annotations

import inspect

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint, read_blueprint
from ipucnn.models.families.keras_applications import application_record
from ipucnn.models.registry import ModelRecord


def build_grouped_efficientnet(
    inputs: Tensor,
    num_classes: int,
    width: float,
    depth: float,
    dropout: float,
    group_size: int,
    expand_ratio: int,
) -> Blueprint:
    """EfficientNet with group convolutions in place of the depthwise ones.

    A convolution over groups of 16 channels is a denser product than a depthwise one and suits the IPU's
    matrix units; a smaller expansion pays for it.  Channels are rounded to multiples of the group size
    where the original rounds to multiples of 8: the few layers that are no multiple of 16 (24 channels in
    the first stage of B4) could not be grouped otherwise.

    Args:
        width, depth: compound scaling coefficients.
        dropout: rate before the classifier.
        group_size: channels of a group.
        expand_ratio: of the blocks that expand (6 in the original).
    """
    from tensorflow import keras

    from ipucnn.models.editing import group_depthwise, strip_preprocessing

    module = inspect.getmodule(keras.applications.EfficientNetB0)
    blocks = [
        dict(block, expand_ratio=expand_ratio if block["expand_ratio"] > 1 else 1)
        for block in module.DEFAULT_BLOCKS_ARGS  # type: ignore[union-attr]
    ]
    model = module.EfficientNet(  # type: ignore[union-attr]
        width,
        depth,
        224,
        dropout_rate=dropout,
        depth_divisor=group_size,
        blocks_args=blocks,
        include_top=True,
        weights=None,
        input_tensor=inputs,
        classes=num_classes,
    )
    blueprint = read_blueprint(model)
    strip_preprocessing(blueprint)
    group_depthwise(blueprint, group_size)
    return blueprint


_SIZES = (224, 240, 260, 300, 380, 456, 528, 600)
_GROUPED = (("b0", 224, 1.0, 1.0, 0.2), ("b4", 380, 1.4, 1.8, 0.4))
_V2_SIZES = (("b0", 224), ("b1", 240), ("b2", 260), ("b3", 300), ("s", 384), ("m", 480), ("l", 480))

_PAPER = "Tan and Le 2019, EfficientNet, arXiv:1905.11946"
_GROUPED_PAPER = "Masters et al. 2021, Making EfficientNet more efficient, arXiv:2106.03640"
_V2_PAPER = "Tan and Le 2021, EfficientNetV2, arXiv:2104.00298"

MODELS = (
    *(
        application_record(f"efficientnet-b{number}", f"EfficientNetB{number}", "efficientnet", _PAPER, size)
        for number, size in enumerate(_SIZES)
    ),
    *(
        ModelRecord(
            f"efficientnet-{variant}-g16",
            "efficientnet",
            _GROUPED_PAPER,
            build_grouped_efficientnet,
            {"width": width, "depth": depth, "dropout": dropout, "group_size": 16, "expand_ratio": 4},
            input_shape=(size, size, 3),
        )
        for variant, size, width, depth, dropout in _GROUPED
    ),
    *(
        application_record(
            f"efficientnetv2-{variant}",
            f"EfficientNetV2{variant.upper()}",
            "efficientnetv2",
            _V2_PAPER,
            size,
            input_range="torch" if variant.startswith("b") else "tf",
            requires="Keras 2.8",
        )
        for variant, size in _V2_SIZES
    ),
)
