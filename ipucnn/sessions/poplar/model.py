"""The network as it runs on IPUs: the same layers by name and weights, in the classes that are best there.

A model gets the SDK's methods only if it is constructed inside the strategy's scope, and IPUs need static shapes;
so the network is read as a blueprint and built again, with a fixed micro-batch:

- batch norm becomes Keras' own, which Poplar's library computes in one piece (on Keras 2; see ``_batch_norm``);
- group norm and dropout become those of ``ipu_tensorflow_addons``;
- depthwise convolutions become Keras' own: what makes them fast on a CPU has no place on an IPU.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from tensorflow import keras

from ipucnn.compat import KERAS_3, tf_variable
from ipucnn.models import layers as ours
from ipucnn.models.blueprint import Blueprint, Step, read_blueprint
from ipucnn.models.names import INPUT_NAME, named_weights
from ipucnn.sessions.poplar.layers import SEEDS_NAME, BatchStatistics, Preprocess, SeededDropout

TRAINING, PREDICTION, STATISTICS = "training", "prediction", "statistics"


@dataclass(frozen=True)
class Shape:
    """How a network is to be built.

    Attributes:
        micro_batch_size: static batch.
        purpose: TRAINING, PREDICTION, or STATISTICS (a training forward pass that returns batch norm's
            statistics).
        precision: "16.16", "16.32" or "32.32".
        stateless_dropout: masks as on the host; else the IPU's own generator.
        preprocess: (affine, fused, transfer type) of a :class:`Preprocess` layer, or None.
    """

    micro_batch_size: int
    purpose: str
    precision: str = "32.32"
    stateless_dropout: bool = False
    preprocess: Optional[Tuple[Any, Any, str]] = None


@dataclass
class DeviceModel:
    """A network built for IPUs.

    Attributes:
        model: Keras model; its inputs are the images, and the micro-batch's seeds if ``takes_seeds``.
        weights: variables by canonical name, in the order of the network it was made of.
        norms: names of the batch norms, in the order of a STATISTICS model's outputs (mean, variance of each).
    """

    model: Any
    weights: Dict[str, Any]
    takes_seeds: bool
    norms: List[str] = field(default_factory=list)


def compute_type(precision: str) -> str:
    """Type of activations."""
    return "float16" if precision.startswith("16") else "float32"


def weight_type(precision: str) -> str:
    """Type of weights and optimizer state."""
    return "float16" if precision.endswith("16") else "float32"


def _policy(precision: str) -> Any:
    """Keras' name or policy for a layer's types."""
    if precision == "16.32":
        return keras.mixed_precision.Policy("mixed_float16")
    return compute_type(precision)


def _batch_norm(config: Mapping[str, Any], common: Dict[str, Any]) -> Any:
    own = {key: config[key] for key in ("momentum", "epsilon", "center", "scale")}
    if KERAS_3 and common["dtype"] == "float32":
        # Keras 3 moves its variance by the biased estimate; the SDK, which never has Keras 3, by the unbiased one.
        return ours.BatchNormalization(**own, **common)
    return keras.layers.BatchNormalization(**own, **common)


def _plain(layer_class: Any, step: Step, common: Dict[str, Any]) -> Any:
    """Any other layer.  Its initial weights do not count: the network's are copied."""
    config = {key: "zeros" if key.endswith("_initializer") else value for key, value in step.config.items()}
    config.pop("dtype", None)
    return layer_class.from_config({**config, **common})


class _Builder:
    """Builds one model; a method per kind of layer that is exchanged."""

    def __init__(self, api: Any, shape: Shape) -> None:
        self.api, self.shape = api, shape
        self.seeds: Any = None
        self.statistics: List[Any] = []
        self.norms: List[str] = []

    def layer(self, step: Step, inputs: Any) -> Any:
        """The output of a step."""
        common = {"name": step.name, "dtype": _policy(self.shape.precision)}
        kind = step.layer_class
        if kind is ours.BatchNormalization:
            return self._normalised(step, inputs, common)
        if kind is ours.GroupNormalization:
            made = self.api.addons_layers.GroupNormalization(
                groups=step.config["groups"],
                channels_axis=-1,
                epsilon=step.config["epsilon"],
                beta_initializer="zeros",
                gamma_initializer="ones",
                # Groups of neighbouring channels, as everywhere else; the default would make other weights of them.
                strided_channel_grouping=False,
                **common,
            )
            return made(inputs)
        if kind is ours.Dropout:
            return self._dropped(step, inputs, common)
        if kind is ours.DepthwiseConv2D:
            return _plain(keras.layers.DepthwiseConv2D, step, common)(inputs)
        return _plain(kind, step, common)(inputs)

    def _normalised(self, step: Step, inputs: Any, common: Dict[str, Any]) -> Any:
        self.norms.append(step.name)
        if self.shape.purpose != STATISTICS:
            return _batch_norm(step.config, common)(inputs)
        own = {key: step.config[key] for key in ("epsilon", "center", "scale")}
        output, mean, variance = BatchStatistics(**own, **common)(inputs)
        self.statistics += [mean, variance]
        return output

    def _dropped(self, step: Step, inputs: Any, common: Dict[str, Any]) -> Any:
        rate, noise = step.config["rate"], step.config["noise_shape"]
        if self.shape.purpose == PREDICTION or rate == 0:
            return keras.layers.Activation("linear", **common)(inputs)
        always = self.shape.purpose == STATISTICS
        if self.shape.stateless_dropout:
            if self.seeds is None:
                self.seeds = keras.Input(
                    batch_shape=(self.shape.micro_batch_size, 2), name=SEEDS_NAME, dtype="int32"
                )
            made = SeededDropout(rate, noise, self.shape.micro_batch_size, always, **common)
            return made([inputs, self.seeds])
        if noise is not None:
            noise = [int(size) if n is None else n for n, size in zip(noise, inputs.shape)]
        return self.api.addons_layers.Dropout(rate, noise_shape=noise, **common)(
            inputs, training=True if always else None
        )


def build_for_ipus(api: Any, network: Any, shape: Shape, name: str) -> DeviceModel:
    """Builds a network for IPUs, with its weights; call it inside the strategy's scope.

    Args:
        api: the SDK's modules.
        network: from ``build_model``.
        shape: how.
        name: of the model.
    """
    blueprint = read_blueprint(network)
    builder = _Builder(api, shape)
    first = blueprint.steps[0]
    sizes = tuple(int(n) for n in network.inputs[0].shape[1:])
    compute = compute_type(shape.precision)
    transfer = compute if shape.preprocess is None else shape.preprocess[2]
    images = keras.Input(batch_shape=(shape.micro_batch_size, *sizes), name=INPUT_NAME, dtype=transfer)
    x = images
    if shape.preprocess is not None:
        affine, fused, _ = shape.preprocess
        x = Preprocess(affine, fused, compute, name="preprocess", dtype=compute)(images)
    tensors = {first.name: x}
    for step in blueprint.steps[1:]:
        sources = [tensors[source] for source in step.inputs]
        tensors[step.name] = builder.layer(step, sources[0] if len(sources) == 1 else sources)
    outputs = tensors[blueprint.output]
    if compute != "float32":
        # Loss and metrics are float32, and Keras casts the samples' weights to the type of the logits.
        outputs = keras.layers.Activation("linear", dtype="float32", name="float32_logits")(outputs)
    if shape.purpose == STATISTICS:
        # The end of the network comes along, small: a pipeline without it could lack its last stages.
        if len(outputs.shape) == 4:
            outputs = keras.layers.GlobalAveragePooling2D(name="end")(outputs)
        outputs = [*builder.statistics, outputs]
    inputs = images if builder.seeds is None else [images, builder.seeds]
    model = keras.Model(inputs, outputs, name=name)
    made = DeviceModel(model, _weights(model, network), builder.seeds is not None, builder.norms)
    copy_weights(named_weights(network), made.weights)
    return made


def _weights(model: Any, network: Any) -> Dict[str, Any]:
    """The model's variables by the network's names; the addons' group norm is read by attribute."""
    found: Dict[str, Any] = {}
    norms = {layer.name for layer in network.layers if isinstance(layer, ours.GroupNormalization)}
    plain = _Flat([layer for layer in model.layers if layer.name not in norms])
    found.update(named_weights(plain))
    for layer in model.layers:
        if layer.name in norms:
            found[f"{layer.name}/gamma"] = tf_variable(layer.gamma)
            found[f"{layer.name}/beta"] = tf_variable(layer.beta)
    return {name: found[name] for name in named_weights(network) if name in found}


@dataclass
class _Flat:
    """Some layers, as :func:`named_weights` wants them."""

    layers: List[Any]


def copy_weights(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Copies weights of the same names; a model for statistics lacks the moving ones."""
    for name, variable in target.items():
        value = source[name]
        value = value.numpy() if hasattr(value, "numpy") else value
        variable.assign(value.astype(variable.dtype.as_numpy_dtype))


def layer_order(network: Any) -> List[str]:
    """Names of the network's steps in order: what splits refer to."""
    blueprint: Blueprint = read_blueprint(network)
    return [step.name for step in blueprint.steps]
