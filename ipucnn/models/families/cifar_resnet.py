"""ResNet for 32x32 images: He et al. 2016, arXiv:1512.03385, section 4.2, 6n + 2 layers.

Shortcuts across a change of size have no parameters (option A of the paper): they take every second pixel and fill the
new channels with zeros.
"""

from __future__ import annotations

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.keras_config import read_blueprint

_EPSILON = 1.001e-5


def _conv_norm(x: Tensor, filters: int, name: str, stride: int = 1) -> Tensor:
    from tensorflow import keras

    conv_name = f"{name}_conv" if stride == 1 else f"{name}_conv_ds"
    x = keras.layers.Conv2D(
        filters,
        3,
        strides=stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=conv_name,
    )(x)
    return keras.layers.BatchNormalization(epsilon=_EPSILON, name=f"{name}_bn")(x)


def build_cifar_resnet(inputs: Tensor, num_classes: int, blocks: int) -> Blueprint:
    """Builds three stages with 16, 32 and 64 filters.

    Args:
        blocks: residual blocks per stage (n); the network has 6n + 2 layers.
    """
    from tensorflow import keras

    from ipucnn.models.layers.per_sample import SubsamplePad

    x = _conv_norm(inputs, 16, "conv1")
    x = keras.layers.ReLU(name="conv1_relu")(x)
    for stage, filters in enumerate((16, 32, 64), start=2):
        for block in range(1, blocks + 1):
            name = f"conv{stage}_block{block}"
            stride = 2 if stage > 2 and block == 1 else 1
            shortcut = x if stride == 1 else SubsamplePad(filters, name=f"{name}_shortcut")(x)
            x = _conv_norm(x, filters, f"{name}_layer1", stride)
            x = keras.layers.ReLU(name=f"{name}_layer1_relu")(x)
            x = _conv_norm(x, filters, f"{name}_layer2")
            x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
            x = keras.layers.ReLU(name=f"{name}_post_addition_relu")(x)
    x = keras.layers.GlobalAveragePooling2D(name="avg_pool")(x)
    x = keras.layers.Dense(num_classes, kernel_initializer="he_normal", name="fc_layer")(x)
    return read_blueprint(keras.Model(inputs, x))
