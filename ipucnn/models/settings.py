"""Settings of Keras' layers as plain values, the same from Keras 2.6 and Keras 3, and back for the installed Keras.

Some settings have other names in the two versions, and one activation has two formulas under one name.  Networks are
stored with the spellings of this module, so that a network that is moved from one version to the other computes the
same, or is refused.  Activations and layers that are not in these tables were compared between both versions: they
compute the same (``tests/test_own_networks_keras.py`` has the values).
"""

from __future__ import annotations

import inspect
import json
import warnings
from typing import Any, Dict, Mapping, NoReturn, Optional, Tuple

import numpy as np

from ipucnn.aliases import KerasLayer, PlainValue
from ipucnn.errors import ConfigurationError
from ipucnn.models.blueprint import Node
from ipucnn.models.keras_config import is_of_keras
from ipucnn.text import shown_value

ACTIVATIONS = (
    "elu", "exponential", "gelu", "hard_sigmoid", "leaky_relu", "linear", "relu", "relu6", "selu", "sigmoid", "silu",
    "softmax", "softplus", "softsign", "swish", "tanh",
)  # fmt: skip
"""Names of activations that both versions know."""
# Name of an activation -> major version of Keras -> its formula in that version.
_FORMULAS: Dict[str, Dict[int, str]] = {
    "hard_sigmoid": {2: "hard_sigmoid(min(max(0.2x + 0.5, 0), 1))", 3: "hard_sigmoid(relu6(x + 3) / 6)"},
}
# Formula -> name of the activation.
_NAMES = {formula: name for name, versions in _FORMULAS.items() for formula in versions.values()}
_STORED_ACTIVATIONS = {*ACTIVATIONS, *_NAMES} - {*_FORMULAS}
# Class of a layer -> setting in Keras 3 -> the same setting in Keras 2.6.
_SETTINGS = {"LeakyReLU": {"negative_slope": "alpha"}}
# Settings that only newer versions of Keras write, and which have no effect on their own.
_NEWER = {"BatchNormalization": ("renorm_clipping", "renorm_momentum")}
_INITIALIZERS = (
    "Constant", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "Identity", "LecunNormal", "LecunUniform",
    "Ones", "RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling", "Zeros",
)  # fmt: skip
_ACTIVATION_SETTINGS = ("activation", "recurrent_activation", "final_activation")
# Entries of a layer's configuration that are not settings: its name, its type, and the shapes that it was built for.
_NOT_SETTINGS = ("name", "dtype", "batch_input_shape", "batch_shape", "build_config", "quantization_config")
_NOT_OF_INITIALIZERS = ("seed", "dtype", "input_axes", "output_axes")
# Settings of Conv2D that Keras 2.6 or 3 also writes for depthwise and separable convolutions: 1, or overridden.
_WITHOUT_EFFECT = ("groups", "kernel_initializer", "bias_initializer", "filters")


def plain_settings(where: str, node: Node, keras: Optional[int] = None) -> Dict[str, Any]:
    """The settings of a stock layer as plain values, checked, with the spellings of this module.

    Args:
        where: the layer, for messages.
        node: the layer.
        keras: the major version of the Keras that spelt its settings; None if they have the spellings of this module.

    Raises:
        ConfigurationError: a setting is not a plain value, or training does not support it.
    """
    old_names = {old: new for new, old in _SETTINGS.get(node.kind, {}).items()}
    settings: Dict[str, Any] = {}
    for key, value in node.config.items():
        key = old_names.get(key, key)
        if key == "dtype" and _type_name(value) != "float32":
            raise ConfigurationError(
                f"{where} computes in {shown_value(_type_name(value))}",
                "leave types out of the network: --precision 16.16 trains in 16 bits",
            )
        if key in (*_NOT_SETTINGS, *_NEWER.get(node.kind, ())):
            continue
        if key == "activity_regularizer" or key.endswith("_constraint"):
            if value is not None:
                raise ConfigurationError(
                    f"{where} has {key}, which training does not know",
                    "drop it; kernel_regularizer='l2' keeps weights small, and so does --weight-decay",
                )
        elif key.endswith("_regularizer"):
            if value is not None:
                settings[key] = _regularizer(where, key, value)
        elif key.endswith("_initializer"):
            settings[key] = None if value is None else _initializer(where, key, value)
        elif key in _ACTIVATION_SETTINGS:
            name = "linear" if value is None else value
            if keras is not None and isinstance(name, str):
                name = _FORMULAS.get(name, {}).get(keras, name)
            if not isinstance(name, str) or name not in _STORED_ACTIVATIONS:
                layer = name.get("class_name") if isinstance(name, dict) else None
                raise ConfigurationError(
                    f"{where} has the activation {shown_value(str(name))[:60]}, which training does not know",
                    f"leave it out, and call {shown_value(layer)} as a layer after this one"
                    if layer in ("LeakyReLU", "ReLU", "PReLU", "ELU", "Softmax")
                    else f"use one of {', '.join(ACTIVATIONS)}, or a class of layers",
                )
            settings[key] = name
        else:
            settings[key] = plain(value, where, key)
    axis = settings.get("axis")
    if isinstance(axis, list) and len(axis) == 1:
        settings["axis"] = axis[0]  # Keras 2 writes a list, which batch norm of Keras 3 does not take
    if settings.get("data_format") not in (None, "channels_last"):
        raise ConfigurationError(
            f"{where} has its channels first", "put them last: data_format='channels_last'"
        )
    return settings


def _kind_in_keras(value: PlainValue) -> Optional[str]:
    """The name of the class of an initializer or regularizer; None for a class of the user's, whatever its name."""
    if not isinstance(value, dict):
        return None
    module = value.get("module")  # Keras 2.6 writes none
    return value.get("class_name") if module is None or is_of_keras(module) else None


def _initializer(where: str, key: str, value: PlainValue) -> Dict[str, Any]:
    kind = _kind_in_keras(value)
    if kind not in _INITIALIZERS:
        raise ConfigurationError(
            f"{where} has {key} {shown_value(kind or value)}, which has no seeded version",
            f"use one of {', '.join(_INITIALIZERS)}",
        )
    options = dict(value.get("config") or {})
    options = {k: plain(v, where, key) for k, v in options.items() if k not in _NOT_OF_INITIALIZERS}
    return {"class_name": kind, "config": options}


def _regularizer(where: str, key: str, value: PlainValue) -> Dict[str, Any]:
    kind = _kind_in_keras(value)
    if kind not in ("L1", "L2", "L1L2"):
        raise ConfigurationError(
            f"{where} has {key} {shown_value(str(kind or value))[:60]}, and training knows L1 and L2",
            "use keras.regularizers.L1, L2 or L1L2",
        )
    try:
        factors = dict(zip(("l1", "l2"), penalty_of(value)))
    except (TypeError, ValueError, AttributeError):
        raise ConfigurationError(
            f"{where} has a {key} whose factors are no numbers", "use plain numbers"
        ) from None
    return {"class_name": "L1L2", "config": factors}


def penalty_of(regularizer: PlainValue) -> Tuple[float, float]:
    """The factors of a regularizer's L1 and L2 norms, from its configuration."""
    factors = regularizer.get("config") or {}
    return float(factors.get("l1") or 0.0), float(factors.get("l2") or 0.0)


def plain(value: object, where: str, key: str) -> Any:
    """Converts a setting to a number, word, truth value, or a list of them.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(value, dict) and value.get("class_name") in ("__numpy__", "__tensor__"):  # of Keras 3
        value = (value.get("config") or {}).get("value")

    def of_numpy(number: object) -> Any:
        return np.asarray(number).tolist() if hasattr(number, "__array__") else refuse(number)

    def refuse(_: object) -> NoReturn:
        # In some settings, such as Constant's value, Keras would take a mapping for an object to import.
        raise TypeError

    try:
        return json.loads(json.dumps(value, default=of_numpy), object_pairs_hook=refuse)
    except (TypeError, ValueError, RecursionError):
        raise ConfigurationError(
            f"{where} has {key} = {shown_value(str(value))[:60]}, which is no number, word or list of them",
            "use plain values",
        ) from None


def _type_name(value: PlainValue) -> str:
    """The number type of a layer, from the forms in which Keras 2.6 and 3 write it."""
    while isinstance(value, dict):
        value = (value.get("config") or {}).get("name", value.get("class_name"))
    return "float32" if value is None else str(value)


def check_activations(where: str, layer: KerasLayer, settings: Mapping[str, PlainValue]) -> None:
    """Refuses a function of the user's own that has the name of one of Keras' activations; Keras 2.6 saves only names.

    Raises:
        ConfigurationError: an activation is such a function.
    """
    import tensorflow as tf
    from tensorflow import keras

    for key in _ACTIVATION_SETTINGS:
        name, function = settings.get(key), getattr(layer, key, None)
        if name is None or function is None:
            continue
        name = _NAMES.get(str(name), str(name))
        if function not in (keras.activations.get(name), getattr(tf.nn, name, None)):
            raise ConfigurationError(
                f"{where} has an activation of your own, {shown_value(name)}, which has the name of one of Keras",
                "write it as a class of layers: class Mine(keras.layers.Layer)",
            )


def formulas_of(settings: Mapping[str, PlainValue]) -> Dict[str, str]:
    """The settings of a layer that are formulas."""
    return {key: value for key, value in settings.items() if isinstance(value, str) and value in _NAMES}


def keras_settings(where: str, node: Node, layer_class: type) -> Dict[str, Any]:
    """The settings of a stock layer as the installed Keras spells them.

    Args:
        where: the layer, for messages.
        node: the layer, with the spellings of this module.
        layer_class: its class in the installed Keras.

    Raises:
        ConfigurationError: the installed Keras lacks an activation's formula, or a setting that has an effect.
    """
    from ipucnn.compat import KERAS_VERSION

    major = min(KERAS_VERSION[0], 3)
    names = _SETTINGS.get(node.kind, {}) if major == 2 else {}
    spelt = {names.get(key, key): value for key, value in node.config.items()}
    for key, formula in formulas_of(spelt).items():
        name = _NAMES[formula]
        if _FORMULAS[name][major] != formula:
            other = next(version for version, value in _FORMULAS[name].items() if value == formula)
            raise ConfigurationError(
                f"{where} computes {formula} with Keras {other}, and {name} of this Keras {major} is "
                f"{_FORMULAS[name][major]}",
                f"use a TensorFlow with Keras {other}, or write the activation with layers.ReLU and layers.Rescaling",
            )
        spelt[key] = name
    known = {"trainable", *inspect.signature(layer_class.__init__).parameters}  # type: ignore[misc]
    named = {key: value for key, value in spelt.items() if key in known}
    for key, value in spelt.items():
        if key in known or key in _WITHOUT_EFFECT:
            continue
        if _is_returned(layer_class, named, key, value):
            known.add(key)
        elif value not in (None, False, "linear"):
            raise ConfigurationError(
                f"{where} has {key} = {shown_value(str(value))}, which this Keras does not know",
                "use a newer TensorFlow",
            )
    return {key: value for key, value in spelt.items() if key in known}


def _is_returned(layer_class: type, named: Mapping[str, PlainValue], key: str, value: PlainValue) -> bool:
    """Whether a layer takes a setting that is no parameter of ``__init__``, among its keywords, and returns it.

    Args:
        named: the settings of the layer that are parameters.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer = layer_class.from_config({**named, key: value, "name": "trial"})  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            return False
    return bool(layer.get_config().get(key, not value) == value)
