"""ResNet v1.5 and ResNeXt on ImageNet-sized inputs.

He et al. 2016, arXiv:1512.03385; Xie et al. 2017, arXiv:1611.05431.  In v1.5 the 3x3 convolution of a block has the
stride, instead of the 1x1 convolution before it, and convolutions have no bias, because the batch norms after them do.
"""

from __future__ import annotations

import inspect
import re
from typing import Sequence

from ipucnn.aliases import KerasInitializer, Tensor
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.families.keras_applications import application
from ipucnn.models.keras_config import read_blueprint
from ipucnn.models.names import number_from_zero

_EPSILON = 1.001e-5
_STAGE_FILTERS = (64, 128, 256, 512)


def he_fan_out() -> KerasInitializer:
    """The initialiser of He et al. 2015, arXiv:1502.01852, with the fan-out, for convolutions."""
    from tensorflow import keras

    return keras.initializers.VarianceScaling(2.0, mode="fan_out", distribution="untruncated_normal")


def build_keras_resnet_v1_5(inputs: Tensor, num_classes: int, application_name: str) -> Blueprint:
    """Builds Keras' ResNet (v1) and changes it to v1.5."""
    from ipucnn.models.editing import set_kernel_initializer

    blueprint = read_blueprint(application(application_name, inputs, num_classes))
    for node in blueprint.nodes:
        if node.kind == "Conv2D":
            node.config["use_bias"] = False  # a norm follows each convolution
            first = re.fullmatch(r"(conv\d_block1)_1_conv", node.name)
            if first is not None and tuple(node.config["strides"]) != (1, 1):
                blueprint[f"{first.group(1)}_2_conv"].config["strides"] = node.config["strides"]
                node.config["strides"] = (1, 1)
    set_kernel_initializer(blueprint, he_fan_out())
    return blueprint


def _conv_norm(x: Tensor, name: str, filters: int, kernel: int, stride: int = 1, groups: int = 1) -> Tensor:
    from tensorflow import keras

    x = keras.layers.Conv2D(
        filters, kernel, strides=stride, padding="same", groups=groups, use_bias=False, name=f"{name}_conv"
    )(x)
    return keras.layers.BatchNormalization(epsilon=_EPSILON, name=f"{name}_bn")(x)


def _block(
    x: Tensor, name: str, filters: int, stride: int, groups: int, group_width: int, bottleneck: bool
) -> Tensor:
    """A residual block: two 3x3 convolutions, or 1x1, 3x3 (grouped) and 1x1 with four times the filters."""
    from tensorflow import keras

    outputs = 4 * filters if bottleneck else filters
    shortcut = x
    if stride > 1 or x.shape[-1] != outputs:
        shortcut = _conv_norm(x, f"{name}_0", outputs, 1, stride)
    if bottleneck:
        width = filters * group_width // 64 * groups
        x = _conv_norm(x, f"{name}_1", width, 1)
        x = keras.layers.Activation("relu", name=f"{name}_1_relu")(x)
        x = _conv_norm(x, f"{name}_2", width, 3, stride, groups)
        x = keras.layers.Activation("relu", name=f"{name}_2_relu")(x)
        x = _conv_norm(x, f"{name}_3", outputs, 1)
    else:
        x = _conv_norm(x, f"{name}_1", filters, 3, stride)
        x = keras.layers.Activation("relu", name=f"{name}_1_relu")(x)
        x = _conv_norm(x, f"{name}_2", filters, 3)
    x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return keras.layers.Activation("relu", name=f"{name}_out")(x)


def build_resnet(
    inputs: Tensor,
    num_classes: int,
    blocks: Sequence[int],
    bottleneck: bool = False,
    groups: int = 1,
    group_width: int = 64,
) -> Blueprint:
    """Builds a ResNet that Keras Applications lack, with Keras' stem and head around its blocks.

    Args:
        blocks: number of blocks in each of the four stages.
        bottleneck: whether to use bottleneck blocks (50 layers and more) instead of basic ones.
        groups: groups of the bottleneck's 3x3 convolution ("32" in 32x4d).
        group_width: channels per group in the first stage ("4d" in 32x4d).
    """

    from tensorflow import keras

    from ipucnn.models.editing import set_kernel_initializer, use_grouped_convolutions

    def stages(x: Tensor) -> Tensor:
        for stage, (filters, count) in enumerate(zip(_STAGE_FILTERS, blocks)):
            for block in range(1, count + 1):
                stride = 2 if block == 1 and stage > 0 else 1
                name = f"conv{stage + 2}_block{block}"
                x = _block(x, name, filters, stride, groups, group_width, bottleneck)
        return x

    # The general builder is not exported, but every version of Keras has it in the module of ResNet50.
    builder = inspect.getmodule(keras.applications.ResNet50).ResNet  # type: ignore[union-attr]
    model = builder(
        stack_fn=stages,
        preact=False,
        use_bias=False,
        include_top=True,
        weights=None,
        input_tensor=inputs,
        classes=num_classes,
    )
    blueprint = read_blueprint(model)
    number_from_zero(blueprint)
    set_kernel_initializer(blueprint, he_fan_out())
    use_grouped_convolutions(blueprint)
    return blueprint
