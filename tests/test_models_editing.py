"""Blueprints: reading, rewiring, renaming, and building from them."""

import numpy as np
import pytest
from support.sessions import chain
from tensorflow import keras

from ipucnn.models.blueprint import assemble, remove_softmax
from ipucnn.models.keras_config import read_blueprint
from ipucnn.models.names import number_from_zero


def small_model():
    inputs = keras.Input((6, 6, 2), name="images")
    x = keras.layers.Conv2D(3, 3, padding="same", name="a_conv")(inputs)
    y = keras.layers.ReLU(name="a_relu")(x)
    z = keras.layers.Concatenate(name="join")([y, x, y])
    z = keras.layers.Flatten(name="flat")(z)
    return keras.Model(inputs, keras.layers.Dense(4, activation="softmax", name="top")(z))


def test_a_rebuilt_model_computes_the_same_function():
    model = small_model()
    blueprint = read_blueprint(model)
    assert [s.name for s in blueprint.nodes] == [layer.name for layer in model.layers]
    assert blueprint["join"].inputs == ["a_relu", "a_conv", "a_relu"]
    assert blueprint["a_conv"].channels == 3
    rebuilt = assemble(blueprint, keras.Input((6, 6, 2), name="images"), "again")
    rebuilt.set_weights(model.get_weights())
    x = np.random.RandomState(0).randn(3, 6, 6, 2).astype("float32")
    np.testing.assert_allclose(rebuilt(x), model(x), rtol=1e-5)


def test_bypass_rename_and_logits():
    blueprint = read_blueprint(small_model())
    blueprint.bypass(["a_relu"])
    assert blueprint["join"].inputs == ["a_conv"] * 3
    with pytest.raises(ValueError, match="3 inputs"):
        blueprint.bypass(["join"])
    blueprint.rename(lambda step: step.name.replace("_", "/"))
    blueprint.rename(lambda step: step.name.replace("/", "_"))
    assert blueprint["join"].inputs == ["a_conv"] * 3
    remove_softmax(blueprint)
    model = assemble(blueprint, keras.Input((6, 6, 2)), "edited")
    assert model.get_layer("top").activation is keras.activations.linear
    with pytest.raises(ValueError, match="same name"):
        blueprint.rename(lambda step: "x")


def test_a_softmax_layer_at_the_end_is_removed():
    layers = keras.layers.Dense(2, name="d"), keras.layers.Activation("softmax", name="p")
    blueprint = read_blueprint(chain((3,), *layers))
    remove_softmax(blueprint)
    assert blueprint.output == "d" and len(blueprint.nodes) == 2


def test_counted_names_start_from_zero():
    def names():
        layers = keras.layers.Conv2D(1, 1), keras.layers.MaxPooling2D(), keras.layers.Conv2D(1, 1)
        blueprint = read_blueprint(chain((8, 8, 1), *layers, keras.layers.ReLU(name="re_lu_7")))
        number_from_zero(blueprint, keep=("re_lu_7",))
        return [s.name for s in blueprint.nodes[1:]]

    assert names() == names() == ["conv2d", "max_pooling2d", "conv2d_1", "re_lu_7"]


def test_a_shared_layer_is_one_layer_of_the_rebuilt_model():
    inputs = keras.Input((3,))
    dense = keras.layers.Dense(3, name="d")
    model = keras.Model(inputs, keras.layers.Add(name="sum")([dense(dense(inputs)), inputs]))
    blueprint = read_blueprint(model)
    assert [(node.name, node.layer) for node in blueprint.nodes[1:]] == [
        ("d", "d"), ("d/call1", "d"), ("sum", "sum"),
    ]  # fmt: skip
    rebuilt = assemble(blueprint, keras.Input((3,)), "rebuilt")
    rebuilt.set_weights(model.get_weights())
    x = np.random.RandomState(0).randn(3, 3).astype("float32")
    np.testing.assert_allclose(rebuilt(x), model(x), rtol=1e-6)
