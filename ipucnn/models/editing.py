"""Layer substitution on blueprints: normalisation, dropout, stride, grouped convolutions, logits, initial weights.

Initial weights are a pure function of (seed, layer name, weight name).  Keras draws the weights of all models from one
sequence of generators, so a model's weights depend on the models that the process built before, and Keras 2.6 and 3
draw differently.  Here each weight has its own generator.
"""

import functools
import hashlib
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasConfig, KerasInitializer, KerasModel, Tensor, TensorShape
from ipucnn.compat import KERAS_3
from ipucnn.datasets.pixels import InputRange
from ipucnn.errors import ConfigurationError
from ipucnn.models.blueprint import Blueprint, Node, assemble, named
from ipucnn.models.keras_config import read_blueprint
from ipucnn.models.layers.micro_batches import BatchNormalization, Dropout, GroupNormalization
from ipucnn.models.layers.per_sample import Cropping2D, GroupedConv2D, HardSigmoid, HardSwish, SubsamplePad

CONVOLUTIONS = ("Conv2D", "DepthwiseConv2D", "SeparableConv2D", "Conv2DTranspose", "GroupedConv2D")
# Default number of groups of GroupNormalization, as in the paper, if the channels are divisible by it.
_USUAL_GROUPS = 32


def _norm_regularizers(config: KerasConfig) -> KerasConfig:
    keys = ("gamma_regularizer", "beta_regularizer")
    return {key: config[key] for key in keys if config.get(key) is not None}


def set_group_norm(
    blueprint: Blueprint,
    groups: Optional[int] = None,
    channels_per_group: Optional[int] = None,
    epsilon: Optional[float] = None,
) -> None:
    """Replaces every batch norm by group norm.

    Args:
        groups: number of groups of every layer; if this and ``channels_per_group`` are None, the greatest common
            divisor of 32 and the layer's channels.
        channels_per_group: channels of a group, instead of ``groups``.
        epsilon: epsilon of the norm; None for 1e-5.

    Raises:
        ConfigurationError: a layer's channels are not divisible by this number, or both numbers were given.
    """
    if groups is not None and channels_per_group is not None:
        raise ConfigurationError(
            f"group norm got {groups} groups and {channels_per_group} channels per group",
            "give only one of them",
        )
    steps = [s for s in blueprint.nodes if s.stock == "BatchNormalization"]
    divisor = groups if channels_per_group is None else channels_per_group
    for node in steps:
        channels = int(node.channels or 0)
        if divisor is not None and (divisor < 1 or channels % divisor):
            common = functools.reduce(math.gcd, (int(s.channels or 0) for s in steps))
            legal = [str(d) for d in range(1, common + 1) if common % d == 0]
            division = (
                f"{groups} groups" if groups is not None else f"groups of {channels_per_group} channels"
            )
            raise ConfigurationError(
                f"the {node.channels} channels of layer {node.name} can't be normalised in {division}",
                f"all layers of this network can take {' or '.join(legal)}",
            )
        number = math.gcd(channels, _USUAL_GROUPS) if groups is None else groups
        if channels_per_group is not None:
            number = channels // channels_per_group
        node.replace(
            GroupNormalization,
            {
                **_norm_regularizers(node.config),
                "groups": number,
                "epsilon": 1e-5 if epsilon is None else epsilon,
            },
        )


def set_batch_norm(
    blueprint: Blueprint, momentum: float, epsilon: Optional[float] = None, moves_once: bool = False
) -> None:
    """Replaces Keras' batch norm by this package's, which uses the statistics of each micro-batch.

    Args:
        momentum: momentum of the moving statistics.
        epsilon: epsilon of the norm; None for each layer's own.
        moves_once: whether the moving statistics move once per weight update.
    """
    for node in blueprint.nodes:
        if node.stock == "BatchNormalization":
            old_config = node.config
            frozen = {} if old_config.get("trainable", True) else {"trainable": False}
            node.replace(
                BatchNormalization,
                {
                    **frozen,
                    **_norm_regularizers(old_config),
                    "momentum": momentum,
                    "epsilon": old_config["epsilon"] if epsilon is None else epsilon,
                    "center": old_config["center"],
                    "scale": old_config["scale"],
                    "moves_once": moves_once,
                    "keeps_statistics": node.infers,
                },
            )


def check_replaceable_norms(blueprint: Blueprint, norm: str) -> None:
    """Refuses batch norms of a user's network with settings that another norm, or none, would not keep.

    Raises:
        ConfigurationError: there is one; the message names it.
    """
    for node in blueprint.nodes:
        if node.stock != "BatchNormalization":
            continue
        config = node.config
        kept = {
            "frozen": not config.get("trainable", True),
            "called with training=False": node.infers,
            "without centre or scale": norm == "group" and not (config["center"] and config["scale"]),
            "regularized": norm == "none" and bool(_norm_regularizers(config)),
        }
        words = [word for word, is_so in kept.items() if is_so]
        if words:
            raise ConfigurationError(
                f"batch norm '{node.layer}' is {' and '.join(words)}, which --norm-layer {norm} would not keep",
                "drop --norm-layer, or change the network",
            )


def remove_norm(blueprint: Blueprint) -> None:
    """Removes every batch norm; all convolutions, and dense layers before a norm, get the bias that norms provided."""
    norms = [s.name for s in blueprint.nodes if s.stock == "BatchNormalization"]
    before = {name for norm in norms for name in blueprint[norm].inputs}
    for node in blueprint.nodes:
        if (node.stock in CONVOLUTIONS and norms) or (node.stock == "Dense" and node.name in before):
            node.config["use_bias"] = True
    blueprint.bypass(norms)


def set_dropout(blueprint: Blueprint, rate: Optional[float] = None) -> None:
    """Replaces Keras' dropout by this package's, whose masks depend only on seed, layer and micro-batch.

    Args:
        rate: rate of the element-wise dropout; None for each layer's own.  0 also switches drop connect (stochastic
            depth) off; any other rate leaves drop connect as it is.

    Raises:
        ConfigurationError: ``rate`` is above 0, and the network has no element-wise dropout.
    """
    has_elementwise = False
    for node in blueprint.nodes:
        if node.stock != "Dropout":
            continue
        old_config = node.config
        elementwise = old_config.get("noise_shape") is None
        has_elementwise = has_elementwise or elementwise
        new_rate = rate if rate is not None and (elementwise or rate == 0) else old_config["rate"]
        node.replace(Dropout, {"rate": new_rate, "noise_shape": old_config.get("noise_shape")})
    if rate and not has_elementwise:
        raise ConfigurationError(
            f"dropout {rate} was asked for, but this network has no dropout layer", "leave --dropout out"
        )


def set_kernel_initializer(blueprint: Blueprint, initializer: KerasInitializer) -> None:
    """Gives every ``Conv2D`` a kernel initialiser."""
    for node in blueprint.nodes:
        if node.stock in ("Conv2D", "GroupedConv2D"):
            node.config["kernel_initializer"] = initializer


def use_grouped_convolutions(blueprint: Blueprint) -> None:
    """Replaces every ``Conv2D`` with groups by ``GroupedConv2D``, which can also be trained on CPUs."""
    for node in blueprint.nodes:
        if node.stock == "Conv2D" and node.config.get("groups", 1) > 1:
            node.replace(GroupedConv2D, node.config)


def seed_weights(blueprint: Blueprint, seed: int) -> None:
    """Gives each weight of stock layers with random initial values its own generator.

    A user's own layer may give one setting to several weights, or mean something else by it.
    """
    for node in blueprint.nodes:
        for key in [k for k in node.config if k.endswith("_initializer") and not node.is_own]:
            weight = key[: -len("_initializer")]
            node.config[key] = seeded(node.config[key], seed, f"{node.layer}/{weight}")


# --- initial weights

# Standard deviation of a normal distribution truncated at two of its standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978

_DRAWN = ("RandomNormal", "TruncatedNormal", "RandomUniform")


def generator(seed: int, key: str) -> np.random.Generator:
    """The random generator of (seed, key); different keys have independent generators."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _fans(shape: Sequence[int]) -> Tuple[float, float]:
    """Fan-in and fan-out as Keras computes them for a shape (..., in, out): the channels times the receptive field."""
    if len(shape) < 2:
        return float(shape[0]), float(shape[0])
    field = float(np.prod(shape[:-2])) if len(shape) > 2 else 1.0
    return shape[-2] * field, shape[-1] * field


def _truncated(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Draws normal numbers, and draws those beyond two standard deviations again."""
    values = rng.standard_normal(int(np.prod(shape)), dtype=np.float32)
    bad = np.flatnonzero(np.abs(values) > 2)
    while bad.size:
        values[bad] = rng.standard_normal(bad.size, dtype=np.float32)
        bad = bad[np.abs(values[bad]) > 2]
    return values.reshape(shape)


def draw(kind: str, config: KerasConfig, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Draws float32 numbers from the distribution of the Keras initialiser ``kind`` with ``config``.

    Raises:
        ValueError: this module does not have the initialiser.
    """
    if kind == "VarianceScaling":
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
        config: configuration of the Keras initialiser.
        seed: the run's seed.
        key: canonical name of the weight, such as "stem_conv/kernel".
    """

    def __init__(self, kind: str, config: KerasConfig, seed: int, key: str) -> None:
        self.kind, self.config, self.seed, self.key = kind, dict(config), int(seed), key

    def __call__(self, shape: TensorShape, dtype: object = None, **kwargs: object) -> Tensor:
        values = draw(self.kind, self.config, [int(n) for n in shape], generator(self.seed, self.key))
        return tf.convert_to_tensor(values, dtype=dtype or "float32")

    def get_config(self) -> Dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "seed": self.seed, "key": self.key}


def seeded(initializer: KerasInitializer, seed: int, key: str) -> Optional[KerasInitializer]:
    """The seeded version of an initialiser (an object or its configuration); unchanged if it draws nothing."""
    unseeded = keras.initializers.get(initializer)
    if unseeded is None or isinstance(unseeded, SeededInitializer):
        return unseeded
    kind, config = type(unseeded).__name__, unseeded.get_config()
    is_stock = type(unseeded) is getattr(keras.initializers, kind, None)
    if is_stock and isinstance(unseeded, keras.initializers.VarianceScaling):  # HeNormal, GlorotUniform, ...
        kind = "VarianceScaling"
        config = {name: getattr(unseeded, name) for name in ("scale", "mode", "distribution")}
    elif not is_stock or kind not in _DRAWN:  # it draws nothing, or is of the user's own
        return unseeded
    return SeededInitializer(kind, config, seed, key)


# --- conversion to Keras' own layers


def use_stock_layers(blueprint: Blueprint, all_of_them: bool) -> None:
    """Replaces this package's layers by Keras' own layers, which compute the same in evaluation and keep the names.

    Weights keep their order, so that each new layer can take the weights of the old one; the convolution that replaces
    ``SubsamplePad`` needs an identity kernel (:func:`stock_model`).

    Args:
        all_of_them: whether to replace grouped convolutions, which TensorFlow 2.6 cannot run on a CPU and Keras 3
            compiles with XLA, and group norm, which Keras 2.6 lacks.  If False, these stay; they consist of
            TensorFlow operations only.

    Raises:
        ConfigurationError: Keras 2.6 has no layer that computes the same.
    """
    layers = keras.layers
    same = {
        BatchNormalization: layers.BatchNormalization,
        Dropout: layers.Dropout,
        Cropping2D: layers.Cropping2D,
    }
    for node in list(blueprint.nodes):
        layer_class, config = node.layer_class, dict(node.config)
        for key in [k for k in config if k.endswith("_initializer")]:
            del config[key]  # the default will do, because weights are copied
        if layer_class in same:
            for key in ("moves_once", "keeps_statistics"):
                config.pop(key, None)
            node.replace(same[layer_class], config)
        elif layer_class is SubsamplePad:
            identity = {"filters": config["channels"], "kernel_size": 1, "strides": 2, "use_bias": False}
            node.replace(layers.Conv2D, {**identity, "trainable": False})
        elif layer_class in (HardSigmoid, HardSwish):
            _spell_out(blueprint, node, times_itself=layer_class is HardSwish)
        elif layer_class in (GroupedConv2D, GroupNormalization):
            if not all_of_them:
                continue
            if not KERAS_3:
                missing = "group norm" if layer_class is GroupNormalization else "convolutions in groups"
                raise ConfigurationError(
                    f"layer {node.name}: Keras 2.6 has no {missing} that runs on a CPU",
                    "--format saved-model, or a newer TensorFlow",
                )
            kind = layers.Conv2D if layer_class is GroupedConv2D else layers.GroupNormalization
            node.replace(kind, config)
        else:
            node.config = config


def _spell_out(blueprint: Blueprint, node: Node, times_itself: bool) -> None:
    """Replaces a ``HardSigmoid`` or ``HardSwish`` by layers of all versions of Keras; the last one keeps the name."""
    layers = keras.layers
    (source,) = node.inputs
    plus_3, relu6, sixth = (f"{node.name}_{name}" for name in ("plus_3", "relu6", "sixth"))
    chain = [
        named(layers.Rescaling, plus_3, [source], scale=1.0, offset=3.0),
        named(layers.ReLU, relu6, [plus_3], max_value=6.0),
        named(layers.Rescaling, sixth, [relu6], scale=1.0 / 6.0, offset=0.0),
    ]
    if times_itself:
        node.replace(layers.Multiply, {})
        node.inputs = [source, sixth]
    else:
        node.replace(layers.Rescaling, chain.pop().config)
        node.inputs = [relu6]
    blueprint.insert(blueprint.nodes.index(node), chain)


def begin_with_pixels(blueprint: Blueprint, input_range: InputRange) -> None:
    """Inserts the input pipeline's normalisation of pixels of 0..255 before the first layer, as Keras layers."""
    source = last = blueprint.nodes[0].name
    chain: List[Node] = []
    for name, kind, settings in input_range.layers():
        chain.append(named(getattr(keras.layers, kind), name, [last], **settings))
        last = name
    blueprint.reroute(source, last)
    blueprint.insert(1, chain)


_OUTPUTS = ("logits", "probabilities")


def stock_model(
    model: KerasModel,
    inputs: Tensor,
    *,
    all_of_them: bool,
    pixels: Optional[InputRange] = None,
    probabilities: bool = False,
) -> KerasModel:
    """A network with its weights, converted to Keras' own layers for export.

    Args:
        model: the network with its weights.
        inputs: Keras tensor of the images.
        all_of_them: see :func:`use_stock_layers`.
        pixels: the input range whose layers to insert, for inputs that are pixels of 0..255; None for inputs in it.
        probabilities: whether the outputs are probabilities instead of logits.

    Returns:
        A functional model whose output layer is named "logits" or "probabilities".
    """
    blueprint = read_blueprint(model)
    special = {node.name: node.layer_class for node in blueprint.nodes}
    use_stock_layers(blueprint, all_of_them)
    if pixels is not None:
        begin_with_pixels(blueprint, pixels)
    output = blueprint.output
    # MobileNetV3 already has a layer of this name, before its last one.
    new_names = {node.name: f"network_{node.name}" for node in blueprint.nodes if node.name in _OUTPUTS}
    new_names[output] = _OUTPUTS[0]
    blueprint.rename(lambda node: new_names.get(node.name, node.name))
    if probabilities:
        last = named(keras.layers.Softmax, _OUTPUTS[1], [_OUTPUTS[0]])
        blueprint.nodes.append(last)
        blueprint.output = last.name
    stock = assemble(blueprint, inputs, model.name)
    trained = {layer.name: layer for layer in model.layers}
    old_names = {new: old for old, new in new_names.items()}
    for layer in stock.layers:
        name = old_names.get(layer.name, layer.name)
        if special.get(name) is SubsamplePad:
            channels_in, channels = layer.kernel.shape[2:]
            kernel: np.ndarray = np.eye(channels_in, channels, dtype=np.float32)
            layer.set_weights([kernel[np.newaxis, np.newaxis]])
        elif name in trained and trained[name].weights:
            layer.set_weights(trained[name].get_weights())
    return stock


def in_64_bits(model: KerasModel) -> KerasModel:
    """The network with the same weights in float64, as the reference for 32-bit results.

    Raises:
        ValueError, TypeError: a layer of a user's class supports only one number type.
    """
    blueprint = read_blueprint(model)
    for node in blueprint.nodes:
        node.config["dtype"] = "float64"
    shape = tuple(model.inputs[0].shape[1:])
    double = assemble(blueprint, keras.Input(shape, dtype="float64"), model.name)
    for layer in double.layers[1:]:
        layer.set_weights(model.get_layer(layer.name).get_weights())
    return double
