"""Small networks: two toys, one of them with batch norm, the MNIST network of the Keras tutorial, LeNet-5."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint, read_blueprint
from ipucnn.models.registry import ModelRecord


def build_toy_model(inputs: Tensor, num_classes: int) -> Blueprint:
    """Two convolutions and a dense layer: for trying the machinery out."""
    from tensorflow import keras

    x = keras.layers.Conv2D(16, 3, activation="relu", kernel_initializer="he_normal", name="conv2d_0")(inputs)
    x = keras.layers.MaxPooling2D(2, name="max_pooling2d_0")(x)
    x = keras.layers.Conv2D(32, 3, activation="relu", kernel_initializer="he_normal", name="conv2d_1")(x)
    x = keras.layers.MaxPooling2D(2, name="max_pooling2d_1")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(num_classes, name="dense")(x)
    return read_blueprint(keras.Model(inputs, x))


def build_toy_model_bn(inputs: Tensor, num_classes: int) -> Blueprint:
    """The toy with batch norm of Graphcore's public application (model/toy_model.py), with logits for its softmax."""
    from tensorflow import keras

    x = inputs
    for index, (filters, kernel_size) in enumerate(((4, 3), (8, 1))):
        x = keras.layers.Conv2D(filters, kernel_size, activation="relu", name=f"conv2d_{index}")(x)
        x = keras.layers.MaxPooling2D(5, name=f"max_pooling2d_{index}")(x)
        x = keras.layers.BatchNormalization(epsilon=1.001e-5, name=f"bn_{index}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(num_classes, name="dense")(x)
    return read_blueprint(keras.Model(inputs, x))


def build_mnist_cnn(inputs: Tensor, num_classes: int) -> Blueprint:
    """The convolutional network of the Keras MNIST tutorial, 32 and 64 filters and dropout of a half."""
    from tensorflow import keras

    x = keras.layers.Conv2D(32, 3, activation="relu", name="conv2d")(inputs)
    x = keras.layers.MaxPooling2D(2, name="max_pooling2d")(x)
    x = keras.layers.Conv2D(64, 3, activation="relu", name="conv2d_1")(x)
    x = keras.layers.MaxPooling2D(2, name="max_pooling2d_1")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dropout(0.5, name="dropout")(x)
    x = keras.layers.Dense(num_classes, name="dense")(x)
    return read_blueprint(keras.Model(inputs, x))


def build_lenet(inputs: Tensor, num_classes: int) -> Blueprint:
    """LeNet-5, LeCun et al. 1998, with every map of the third layer connected and a linear output layer.

    The first convolution is padded where the paper pads the 28x28 digit to 32x32.
    """
    from tensorflow import keras

    x = keras.layers.Conv2D(6, 5, padding="same", activation="tanh", name="conv1")(inputs)
    x = keras.layers.AveragePooling2D(2, name="pool2")(x)
    x = keras.layers.Conv2D(16, 5, activation="tanh", name="conv3")(x)
    x = keras.layers.AveragePooling2D(2, name="pool4")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(120, activation="tanh", name="dense5")(x)
    x = keras.layers.Dense(84, activation="tanh", name="dense6")(x)
    x = keras.layers.Dense(num_classes, name="dense7")(x)
    return read_blueprint(keras.Model(inputs, x))


def _record(
    name: str,
    paper: str,
    builder: Callable[..., Blueprint],
    home_dataset: str,
    input_shape: Tuple[int, int, int],
    **fields: Any,
) -> ModelRecord:
    return ModelRecord(
        name,
        "small",
        paper,
        builder,
        home_dataset=home_dataset,
        input_shape=input_shape,
        num_classes=10,
        **fields,
    )


_CIFAR: Tuple[str, Tuple[int, int, int]] = ("cifar10", (32, 32, 3))
_MNIST: Tuple[str, Tuple[int, int, int]] = ("mnist", (28, 28, 1))
_WITHOUT_NORM: Dict[str, Any] = {"default_norm": "none", "norms": ("none",)}
_TOY = "none: two convolutions and a dense layer"
_TOY_BN = "none: two convolutions with batch norm and a dense layer"
_TUTORIAL = "Keras documentation, Simple MNIST convnet, 2015"
_LENET = "LeCun et al. 1998, Gradient-based learning, doi:10.1109/5.726791"
_STANDARD: Dict[str, Any] = {"input_range": "standard"}

MODELS = (
    _record("toy_model", _TOY, build_toy_model, *_CIFAR, min_size=10, **_STANDARD, **_WITHOUT_NORM),
    _record("toy_model_bn", _TOY_BN, build_toy_model_bn, *_CIFAR, min_size=27, **_STANDARD),
    _record(
        "mnist_cnn", _TUTORIAL, build_mnist_cnn, *_MNIST, min_size=10, input_range="unit", **_WITHOUT_NORM
    ),
    _record("lenet", _LENET, build_lenet, *_MNIST, min_size=12, **_STANDARD, **_WITHOUT_NORM),
)
