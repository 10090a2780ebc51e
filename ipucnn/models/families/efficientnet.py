"""EfficientNet, its second version, and the variant with group convolutions, Masters et al. 2021, arXiv:2106.03640.

The originals, Tan and Le 2019, arXiv:1905.11946, and 2021, arXiv:2104.00298, are taken from Keras Applications as they
are.
"""

from __future__ import annotations

import inspect

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint, read_blueprint


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
