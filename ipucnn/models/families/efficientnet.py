"""The variant of EfficientNet with group convolutions, Masters et al. 2021, arXiv:2106.03640.

The original EfficientNet, Tan and Le 2019, arXiv:1905.11946, and its second version, Tan and Le 2021, arXiv:2104.00298,
are those of Keras Applications (``keras_applications.py``).
"""

from __future__ import annotations

import inspect

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.keras_config import read_blueprint


def build_grouped_efficientnet(
    inputs: Tensor,
    num_classes: int,
    width: float,
    depth: float,
    dropout: float,
    group_size: int,
    expand_ratio: int,
) -> Blueprint:
    """Builds EfficientNet with group convolutions instead of depthwise ones.

    A convolution over groups of 16 channels is a denser product than a depthwise one and suits the IPU's matrix units;
    a smaller expansion compensates for its cost.  Channels are rounded to multiples of the group size instead of 8 as
    in the original, because the few layers whose channels are not a multiple of 16 (24 in the first stage of B4) could
    not be grouped otherwise.

    Args:
        width, depth: compound scaling coefficients.
        dropout: dropout rate before the classifier.
        group_size: channels per group.
        expand_ratio: expansion of the blocks that expand (6 in the original).
    """
    from tensorflow import keras

    from ipucnn.models.layers.per_sample import GroupedConv2D

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
    for node in blueprint.nodes:
        if node.kind == "DepthwiseConv2D":
            channels = int(node.channels or 0)
            settings = {
                key: node.config[key]
                for key in ("kernel_size", "strides", "padding", "use_bias", "activation", "bias_initializer")
            }
            settings.update(
                filters=channels,
                groups=channels // group_size,
                kernel_initializer=node.config["depthwise_initializer"],
            )
            node.replace(GroupedConv2D, settings)
    return blueprint
