"""Small networks: two toys, one of them with batch norm, the MNIST network of the Keras tutorial, LeNet-5."""

from __future__ import annotations

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.keras_config import read_blueprint


def build_toy_model(inputs: Tensor, num_classes: int) -> Blueprint:
    """Builds two convolutions and a dense layer, for trying the program out."""
    from tensorflow import keras

    x = keras.layers.Conv2D(16, 3, activation="relu", kernel_initializer="he_normal", name="conv2d_0")(inputs)
    x = keras.layers.MaxPooling2D(2, name="max_pooling2d_0")(x)
    x = keras.layers.Conv2D(32, 3, activation="relu", kernel_initializer="he_normal", name="conv2d_1")(x)
    x = keras.layers.MaxPooling2D(2, name="max_pooling2d_1")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(num_classes, name="dense")(x)
    return read_blueprint(keras.Model(inputs, x))


def build_toy_model_bn(inputs: Tensor, num_classes: int) -> Blueprint:
    """Builds the toy model with batch norm of Graphcore's public application (model/toy_model.py), without softmax."""
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
    """Builds the convolutional network of the Keras MNIST tutorial, with 32 and 64 filters and a dropout of 0.5."""
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
    """Builds LeNet-5, LeCun et al. 1998, with every map of the third layer connected and a linear output layer.

    The first convolution has padding, whereas the paper pads the 28x28 digit to 32x32.
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
