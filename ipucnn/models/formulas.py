"""What Keras 2.6 and Keras 3 name differently, or compute differently under one name, among the layers of networks.

An architecture has the spellings of this module, so that a network that is moved from one version of Keras to the other
computes the same, or is refused.  Activations and layers that are not in these tables were compared between both
versions: they compute the same (``tests/test_own_networks_keras.py`` has the values).
"""

from __future__ import annotations

from typing import Any, Dict, Mapping

from ipucnn.aliases import PlainValue
from ipucnn.errors import ConfigurationError

ACTIVATIONS = (
    "elu", "exponential", "gelu", "hard_sigmoid", "leaky_relu", "linear", "relu", "relu6", "selu", "sigmoid", "silu",
    "softmax", "softplus", "softsign", "swish", "tanh",
)  # fmt: skip
"""Names of activations that both versions know."""
# Name of an activation -> major version of Keras -> its formula in that version.
_FORMULAS: Dict[str, Dict[int, str]] = {
    "hard_sigmoid": {2: "hard_sigmoid(min(max(0.2x + 0.5, 0), 1))", 3: "hard_sigmoid(relu6(x + 3) / 6)"},
}
# Class of a layer -> setting in Keras 3 -> the same setting in Keras 2.6.
_SETTINGS = {"LeakyReLU": {"negative_slope": "alpha"}}
# Settings that only newer versions of Keras write, and which have no effect on their own.
_WITHOUT_EFFECT = {"BatchNormalization": ("renorm_clipping", "renorm_momentum")}


STORED_ACTIVATIONS = (
    *(name for name in ACTIVATIONS if name not in _FORMULAS),
    *(formula for versions in _FORMULAS.values() for formula in versions.values()),
)
"""Activations as an architecture stores them."""


def formulas() -> Dict[str, str]:
    """The formulas of an architecture -> the name of each in the version of Keras that has it."""
    return {formula: name for name, versions in _FORMULAS.items() for formula in versions.values()}


def stored_activation(name: str, keras: int) -> str:
    """How an architecture stores an activation: by its formula if versions of Keras differ.

    Args:
        name: the name in Keras.
        keras: the major version of the Keras whose name it is.
    """
    return _FORMULAS.get(name, {}).get(keras, name)


def stored_settings(kind: str, settings: Mapping[str, PlainValue]) -> Dict[str, Any]:
    """A layer's settings with the names of Keras 3, from those of either version."""
    old_names = {old: new for new, old in _SETTINGS.get(kind, {}).items()}
    dropped = _WITHOUT_EFFECT.get(kind, ())
    return {old_names.get(key, key): value for key, value in settings.items() if key not in dropped}


def spelt_settings(where: str, kind: str, settings: Mapping[str, PlainValue]) -> Dict[str, Any]:
    """A layer's settings as the installed Keras spells them.

    Args:
        where: the layer, for messages.

    Raises:
        ConfigurationError: an activation has a formula that the installed Keras does not have.
    """
    from ipucnn.compat import KERAS_VERSION

    major = min(KERAS_VERSION[0], 3)
    names = _SETTINGS.get(kind, {}) if major == 2 else {}
    spelt = {names.get(key, key): value for key, value in settings.items()}
    for key, value in formulas_of(spelt).items():
        name = formulas()[value]
        if _FORMULAS[name][major] != value:
            other = next(version for version, formula in _FORMULAS[name].items() if formula == value)
            raise ConfigurationError(
                f"{where} computes {value} with Keras {other}, and {name} of this Keras {major} is "
                f"{_FORMULAS[name][major]}",
                f"use a TensorFlow with Keras {other}, or write the activation with layers.ReLU and layers.Rescaling",
            )
        spelt[key] = name
    return spelt


def formulas_of(settings: Mapping[str, PlainValue]) -> Dict[str, str]:
    """The settings of a layer that are formulas."""
    known = formulas()
    return {key: value for key, value in settings.items() if isinstance(value, str) and value in known}
