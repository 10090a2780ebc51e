"""Layer substitution on blueprints: normalisation, dropout, stride, grouped convolutions, logits, initial weights.

Initial weights are a pure function of (seed, layer name, weight name), whatever was built before.  Keras draws them
from one generator after the other, so a model's weights depend on what the process built earlier, and Keras 2.6 and 3
draw differently.  Here each weight has its own generator.
"""

import hashlib
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasInitializer, Tensor, TensorShape
from ipucnn.errors import ConfigurationError
from ipucnn.models.blueprint import Blueprint, Step
from ipucnn.models.layers import (
    BatchNormalization,
    Dropout,
    GroupedConv2D,
    GroupNormalization,
)

CONVOLUTIONS = ("Conv2D", "DepthwiseConv2D", "SeparableConv2D", "Conv2DTranspose", "GroupedConv2D")
_PREPROCESSING = ("Rescaling", "Normalization")
# Where GroupNormalization does not get a number of groups: the paper's 32 where the channels allow it.
_USUAL_GROUPS = 32


def replace_layer(step: Step, layer_class: type, config: Dict[str, Any]) -> None:
    """Makes ``step`` a layer of another class, under the same name."""
    step.layer_class = layer_class
    step.kind = layer_class.__name__
    step.config = {"name": step.name, **config}


def strip_preprocessing(blueprint: Blueprint) -> None:
    """Removes the rescaling some Keras Applications start with: the input pipeline does it."""
    blueprint.bypass([s.name for s in blueprint.steps if s.kind in _PREPROCESSING])


def end_in_logits(blueprint: Blueprint) -> None:
    """Removes the softmax at the end, as a layer of its own or as the last layer's activation."""
    last = blueprint[blueprint.output]
    if last.kind in ("Activation", "Softmax"):
        blueprint.bypass([last.name])
    elif "activation" in last.config:
        last.config["activation"] = "linear"


def _num_groups(step: Step, groups: Optional[int], channels_per_group: Optional[int]) -> int:
    channels = int(step.channels or 0)
    if channels_per_group is not None:
        groups = channels // channels_per_group if channels % channels_per_group == 0 else 0
    elif groups is None:
        return math.gcd(channels, _USUAL_GROUPS)
    return groups if groups and channels % groups == 0 else 0


def set_group_norm(
    blueprint: Blueprint,
    groups: Optional[int] = None,
    channels_per_group: Optional[int] = None,
    epsilon: Optional[float] = None,
) -> None:
    """Replaces every batch norm by group norm.

    Args:
        groups: groups of every layer; None with ``channels_per_group`` None: the largest common divisor of 32
            and the layer's channels.
        channels_per_group: the alternative; excludes ``groups``.
        epsilon: None for 1e-5.

    Raises:
        ConfigurationError: if a layer's channels can't be divided so.
    """
    if groups is not None and channels_per_group is not None:
        raise ConfigurationError(
            f"group norm got {groups} groups and {channels_per_group} channels per group",
            "give only one of them",
        )
    steps = [s for s in blueprint.steps if s.kind == "BatchNormalization"]
    for step in steps:
        found = _num_groups(step, groups, channels_per_group)
        if not found:
            common = _gcd([int(s.channels or 0) for s in steps])
            legal = [str(d) for d in range(1, common + 1) if common % d == 0]
            wanted = f"{groups} groups" if groups is not None else f"groups of {channels_per_group} channels"
            raise ConfigurationError(
                f"the {step.channels} channels of layer {step.name} can't be normalised in {wanted}",
                f"all layers of this network can take {' or '.join(legal)}",
            )
        replace_layer(
            step, GroupNormalization, {"groups": found, "epsilon": 1e-5 if epsilon is None else epsilon}
        )


def _gcd(numbers: List[int]) -> int:
    result = 0
    for number in numbers:
        result = math.gcd(result, number)
    return result


def set_batch_norm(
    blueprint: Blueprint, momentum: float, epsilon: Optional[float] = None, moves_once: bool = False
) -> None:
    """Replaces Keras' batch norm by this package's, which knows micro-batches.

    Args:
        momentum: of the moving statistics.
        epsilon: None to keep each layer's own.
        moves_once: the moving statistics move once per weight update.
    """
    for step in blueprint.steps:
        if step.kind == "BatchNormalization":
            own = step.config
            replace_layer(
                step,
                BatchNormalization,
                {
                    "momentum": momentum,
                    "epsilon": own["epsilon"] if epsilon is None else epsilon,
                    "center": own["center"],
                    "scale": own["scale"],
                    "moves_once": moves_once,
                },
            )


def remove_norm(blueprint: Blueprint) -> None:
    """Removes every batch norm; convolutions that left their bias to one get it."""
    norms = [s.name for s in blueprint.steps if s.kind == "BatchNormalization"]
    for step in blueprint.steps:
        if step.kind in CONVOLUTIONS and norms:
            step.config["use_bias"] = True
    blueprint.bypass(norms)


def set_dropout(blueprint: Blueprint, rate: Optional[float] = None) -> None:
    """Replaces Keras' dropout by this package's, whose masks are a function of the seed and the step.

    Args:
        rate: None for each layer's own; 0 switches drop connect (stochastic depth) off as well, any other
            value sets the element-wise dropout only.

    Raises:
        ConfigurationError: if ``rate`` is above 0 and the network has no element-wise dropout.
    """
    found = False
    for step in blueprint.steps:
        if step.kind != "Dropout":
            continue
        own = step.config
        elementwise = own.get("noise_shape") is None
        found = found or elementwise
        new_rate = rate if rate is not None and (elementwise or rate == 0) else own["rate"]
        replace_layer(step, Dropout, {"rate": new_rate, "noise_shape": own.get("noise_shape")})
    if rate and not found:
        raise ConfigurationError(
            f"dropout {rate} was asked for, but this network has no dropout layer", "leave --dropout out"
        )


def drop_bias_before_norm(blueprint: Blueprint) -> None:
    """Convolutions whose output goes only into a batch norm lose their bias, which the norm cancels."""
    for step in blueprint.steps:
        if step.kind in CONVOLUTIONS:
            readers = blueprint.consumers(step.name)
            if readers and all(r.kind == "BatchNormalization" for r in readers):
                step.config["use_bias"] = False


def move_stride(blueprint: Blueprint, moves: Callable[[str], Optional[str]]) -> None:
    """Moves the stride of some convolutions to others.

    Args:
        moves: name of the convolution that takes the stride over from the named one, or None.
    """
    for step in blueprint.steps:
        target = moves(step.name) if step.kind == "Conv2D" else None
        if target is not None and tuple(step.config["strides"]) != (1, 1):
            blueprint[target].config["strides"] = step.config["strides"]
            step.config["strides"] = (1, 1)


def set_kernel_initializer(blueprint: Blueprint, initializer: KerasInitializer) -> None:
    """Gives every ``Conv2D`` a kernel initialiser."""
    for step in blueprint.steps:
        if step.kind in ("Conv2D", "GroupedConv2D"):
            step.config["kernel_initializer"] = initializer


def use_grouped_convolutions(blueprint: Blueprint) -> None:
    """Makes every ``Conv2D`` with groups the one that trains on CPUs, too."""
    for step in blueprint.steps:
        if step.kind == "Conv2D" and step.config.get("groups", 1) > 1:
            replace_layer(step, GroupedConv2D, step.config)


def group_depthwise(blueprint: Blueprint, group_size: int) -> None:
    """Turns depthwise convolutions into convolutions over groups of ``group_size`` channels.

    Masters et al. 2021, arXiv:2106.03640, section 3.1.

    Raises:
        ValueError: if a layer's channels are not a multiple of ``group_size``.
    """
    for step in blueprint.steps:
        if step.kind != "DepthwiseConv2D":
            continue
        own, channels = step.config, int(step.channels or 0)
        if channels % group_size:
            raise ValueError(f"{step.name}: {channels} channels are not a multiple of {group_size}")
        config = {key: own[key] for key in ("kernel_size", "strides", "padding", "use_bias", "activation")}
        config.update(
            filters=channels,
            groups=channels // group_size,
            kernel_initializer=own["depthwise_initializer"],
            bias_initializer=own["bias_initializer"],
        )
        replace_layer(step, GroupedConv2D, config)


def seed_weights(blueprint: Blueprint, seed: int) -> None:
    """Gives each weight that starts from random numbers a generator of its own."""
    for step in blueprint.steps:
        for key in [k for k in step.config if k.endswith("_initializer")]:
            weight = key[: -len("_initializer")]
            step.config[key] = seeded(step.config[key], seed, f"{step.name}/{weight}")


# --- initial weights

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

    def __call__(self, shape: TensorShape, dtype: Any = None, **kwargs: Any) -> Tensor:
        values = draw(self.kind, self.config, [int(n) for n in shape], generator(self.seed, self.key))
        return tf.convert_to_tensor(values, dtype=dtype or "float32")

    def get_config(self) -> Dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "seed": self.seed, "key": self.key}


def seeded(initializer: KerasInitializer, seed: int, key: str) -> Optional[KerasInitializer]:
    """The seeded version of an initialiser (an object or its configuration), itself if it draws nothing."""
    found = keras.initializers.get(initializer)
    if found is None or isinstance(found, SeededInitializer):
        return found
    kind = type(found).__name__
    if kind in _DETERMINISTIC:
        return found
    return SeededInitializer(kind, found.get_config(), seed, key)
