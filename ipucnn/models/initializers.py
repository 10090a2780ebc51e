"""Seeded initial weights: a pure function of (seed, layer name, weight name), whatever was built before.

Keras draws initial weights from one generator after the other, so a model's weights depend on what the
process built earlier, and Keras 2.6 and 3 draw differently.  Here each weight has its own generator.
"""

import hashlib
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

# Standard deviation of a normal distribution truncated at two of its standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978

_SCALING: Dict[str, Tuple[float, str, str]] = {
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
}
_DETERMINISTIC = ("Zeros", "Ones", "Constant", "Identity")


def generator(seed: int, key: str) -> np.random.Generator:
    """A generator of its own for each (seed, key)."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _fans(shape: Sequence[int]) -> Tuple[float, float]:
    """Fan in and fan out as Keras counts them: (..., in, out), times the receptive field."""
    if len(shape) < 2:
        return float(shape[0]), float(shape[0])
    field = float(np.prod(shape[:-2])) if len(shape) > 2 else 1.0
    return shape[-2] * field, shape[-1] * field


def _truncated(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Normal numbers, those beyond two standard deviations drawn again."""
    values = rng.standard_normal(int(np.prod(shape)), dtype=np.float32)
    bad = np.flatnonzero(np.abs(values) > 2)
    while bad.size:
        values[bad] = rng.standard_normal(bad.size, dtype=np.float32)
        bad = bad[np.abs(values[bad]) > 2]
    return values.reshape(shape)


def draw(kind: str, config: Dict[str, Any], shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """float32 numbers as the Keras initialiser ``kind`` with ``config`` distributes them.

    Raises:
        ValueError: for an initialiser this module does not know.
    """
    if kind in _SCALING or kind == "VarianceScaling":
        if kind in _SCALING:
            scale, mode, distribution = _SCALING[kind]
        else:
            scale, mode, distribution = config["scale"], config["mode"], config["distribution"]
        fan_in, fan_out = _fans(shape)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
        variance = scale / max(1.0, fan)
        if distribution == "uniform":
            limit = np.float32(np.sqrt(3 * variance))
            return (rng.random(shape, dtype=np.float32) * 2 - 1) * limit
        if distribution == "untruncated_normal":
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(np.sqrt(variance))
        return _truncated(rng, shape) * np.float32(np.sqrt(variance) / _TRUNCATED_STDDEV)
    if kind == "RandomNormal":
        normal = rng.standard_normal(shape, dtype=np.float32)
        return normal * np.float32(config["stddev"]) + np.float32(config["mean"])
    if kind == "TruncatedNormal":
        return _truncated(rng, shape) * np.float32(config["stddev"]) + np.float32(config["mean"])
    if kind == "RandomUniform":
        low, high = np.float32(config["minval"]), np.float32(config["maxval"])
        return rng.random(shape, dtype=np.float32) * (high - low) + low
    raise ValueError(f"no seeded version of the initialiser {kind}")


@keras.utils.register_keras_serializable(package="ipucnn")
class SeededInitializer(keras.initializers.Initializer):
    """A Keras initialiser with its own generator.

    Args:
        kind: class name of the Keras initialiser.
        config: its configuration.
        seed: the run's seed.
        key: canonical name of the weight, such as "stem_conv/kernel".
    """

    def __init__(self, kind: str, config: Dict[str, Any], seed: int, key: str) -> None:
        self.kind, self.config, self.seed, self.key = kind, dict(config), int(seed), key

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
        values = draw(self.kind, self.config, [int(n) for n in shape], generator(self.seed, self.key))
        return tf.convert_to_tensor(values, dtype=dtype or "float32")

    def get_config(self) -> Dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "seed": self.seed, "key": self.key}


def seeded(initializer: Any, seed: int, key: str) -> Optional[Any]:
    """The seeded version of an initialiser (an object or its configuration), itself if it draws nothing."""
    found = keras.initializers.get(initializer)
    if found is None or isinstance(found, SeededInitializer):
        return found
    kind = type(found).__name__
    if kind in _DETERMINISTIC:
        return found
    return SeededInitializer(kind, found.get_config(), seed, key)
