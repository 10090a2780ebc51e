"""A network of Keras' own layers: what ipucnn is compared with."""

from typing import Any


def stock_copy(model: Any) -> Any:
    """The same network and weights as a model of ``build_model``, of Keras' own layers."""
    from tensorflow import keras

    from ipucnn.models import layers
    from ipucnn.models.layers import GroupedConv2D

    def clone(layer: Any) -> Any:
        config = layer.get_config()
        if isinstance(layer, layers.BatchNormalization):
            keep = ("name", "momentum", "epsilon", "center", "scale")
            return keras.layers.BatchNormalization(**{k: config[k] for k in keep})
        if isinstance(layer, layers.GroupNormalization):
            if not hasattr(keras.layers, "GroupNormalization"):  # Keras 2.6
                return layers.GroupNormalization.from_config(config)
            return keras.layers.GroupNormalization(
                config["groups"], epsilon=config["epsilon"], name=layer.name
            )
        if isinstance(layer, layers.Dropout):
            return keras.layers.Dropout(config["rate"], config["noise_shape"], name=layer.name)
        if isinstance(layer, layers.DepthwiseConv2D):
            return keras.layers.DepthwiseConv2D.from_config(config)
        if isinstance(layer, GroupedConv2D):
            return keras.layers.Conv2D.from_config(config)
        return type(layer).from_config(config)

    copy = keras.models.clone_model(model, clone_function=clone)
    copy.set_weights(model.get_weights())
    return copy
