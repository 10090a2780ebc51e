"""Networks as users write them, and short runs of them."""

from pathlib import Path

import numpy as np

from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.names import named_weights
from ipucnn.models.registry import find_network
from ipucnn.training.checkpoints import load_checkpoint

HEAD = """
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers


def build(input_shape, num_classes):
    images = keras.Input(input_shape)
"""
END = "    return keras.Model(images, layers.Dense(num_classes, name='head')(layers.Flatten()(x)))\n"


def network(*lines, imports="", end=END):
    """Returns the code of a network with these lines between ``images`` and the last layer, which takes ``x``."""
    return "import numpy as np\n" + imports + HEAD + "".join(f"    {line}\n" for line in lines) + end


RESIDUAL = network(
    "x = layers.Conv2D(4, 3, padding='same', use_bias=False)(images)",
    "x = layers.BatchNormalization(momentum=0.97)(x)",
    "x = layers.ReLU()(x)",
    "x = layers.DepthwiseConv2D(3, padding='same')(x) + x",
    "x = layers.GlobalAveragePooling2D()(x)",
    end="    return keras.Model(images, layers.Dense(num_classes, activation='softmax')(x))\n",
)
NESTED = network(
    "base = keras.Sequential([keras.Input(input_shape), layers.SeparableConv2D(4, 3), layers.LayerNormalization(),",
    "    layers.Activation('tanh')], name='base')",
    "frozen = layers.Conv2D(4, 1, name='frozen')",
    "frozen.trainable = False",
    "x = layers.Concatenate()([base(images), frozen(layers.Cropping2D(1)(images))])",
    end="    return keras.Model(images, layers.Dense(num_classes)(layers.Flatten()(x)))\n",
)
MIXING = """
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers


class Centre(layers.Layer):
    def __init__(self, strength, **kwargs):
        super().__init__(**kwargs)
        self.strength = strength

    def build(self, input_shape):
        self.scale = self.add_weight(name="scale", shape=(input_shape[-1],), initializer="glorot_uniform")
        super().build(input_shape)

    def call(self, x, training=None):
        mean = tf.reduce_mean(x, axis=0, keepdims=True) if training else 0.0
        return (x - self.strength * mean) * self.scale

    def get_config(self):
        return {**super().get_config(), "strength": self.strength}


def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    x = layers.Flatten()(images)
    x = Centre(0.5, name="centre")(layers.Dense(8, activation="relu")(x))
    return keras.Model(images, layers.Dense(num_classes)(x))
"""
CLASSES = """
from tensorflow import keras
from tensorflow.keras import layers


class DepthwiseConv2D(layers.DepthwiseConv2D):
    def call(self, x):
        return 2.0 * super().call(x)


class Halve(layers.Layer):
    def call(self, x, training=None):
        return 0.5 * x if training else x


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.halve = Halve()

    def call(self, x):
        return self.halve(x)


class Dropout(layers.Layer):
    def call(self, x):
        return 0.3 * x


class Activation(layers.Layer):
    def call(self, x):
        return x - 0.1


def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    x = layers.BatchNormalization()(DepthwiseConv2D(3, padding="same")(images))
    x = DepthwiseConv2D(3)(Activation()(Dropout()(Block()(x))))
    return keras.Model(images, layers.Dense(num_classes)(layers.Flatten()(x)))
"""
OWN_DATA = """
import numpy as np

def load():
    labels = np.arange(64) % 10
    images = np.random.RandomState(0).randint(0, 256, (64, 8, 8)).astype(np.uint8)
    return (images, labels), (images, labels)
"""
OWN = {"residual": RESIDUAL, "nested": NESTED, "mixing": MIXING, "classes": CLASSES}
TRAIN = (
    "--limit-train", 64, "--limit-eval", 40, "--num-epochs", 2, "--micro-batch-size", 4, "--global-batch-size", 16,
    "--learning-rate", 0.05, "--seed", 1, "--optimizer", "sgd", "--lr-schedule", "const",
)  # fmt: skip


def write(text, name="net.py"):
    Path(name).write_text(text)
    return f"{name}:build"


def built(text, shape=(6, 6, 2), classes=3, name="net.py", **options):
    """Returns the record and the model of a network in a file."""
    record = find_network(write(text, name))
    return record, build_model(record, BuildOptions(shape, classes, **options))


def saved(shape, *layers):
    """Returns a network as a checkpoint has it."""
    return {"input_shape": list(shape), "layers": list(layers), "samples": {}, "scaled_by": None}


def weights_of(model):
    """Returns the values of a model's weights, by name."""
    return {name: weight.numpy() for name, weight in named_weights(model).items()}


def last(run_dir):
    return load_checkpoint(Path(run_dir) / "checkpoints" / "last.npz")


def assert_equal(one, two):
    """Checks that the last checkpoints of two runs have the same weights and slots."""
    one, two = last(one), last(two)
    for first, second in ((one.weights, two.weights), (one.slots, two.slots)):
        assert list(first) == list(second)
        assert all(np.array_equal(first[name], second[name]) for name in first)
