"""Canonical names of a model's weights, the same under Keras 2.6 and Keras 3: ``<layer>/<weight>``."""

from typing import Any, Dict

# Keras 3 shortened the names of these weights; the longer, older one tells two kernels of a layer apart.
_KERAS_3_NAMES = {"DepthwiseConv2D": {"kernel": "depthwise_kernel"}}


def named_weights(model: Any) -> Dict[str, Any]:
    """All weights of a flat functional model by canonical name, as tf.Variables, in layer order.

    Raises:
        ValueError: two weights would share a name (a model that the registry did not build).
    """
    from ipucnn.compat import tf_variable

    weights: Dict[str, Any] = {}
    for layer in model.layers:
        renamed = {}
        for kind in type(layer).__mro__:
            renamed.update(_KERAS_3_NAMES.get(kind.__name__, {}))
        for weight in layer.weights:
            base = weight.name.split("/")[-1].split(":")[0]
            name = f"{layer.name}/{renamed.get(base, base)}"
            if name in weights:
                raise ValueError(f"two weights are called {name}")
            weights[name] = tf_variable(weight)
    return weights
