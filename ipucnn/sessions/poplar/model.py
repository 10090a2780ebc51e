"""Builds the network for IPUs: layers with the same names and weights, of the classes that suit IPUs.

A model gets the SDK's methods only if it is constructed inside the strategy's scope, and IPUs need static shapes.
Therefore the network is read as a blueprint and built again, with a fixed micro-batch:

- batch norm becomes Keras's, which Poplar's library computes as one operation (on Keras 2; see ``_batch_norm``), or in
  training one whose moving statistics have gradients (``MovedByGradient``);
- group norm and dropout become those of ``ipu_tensorflow_addons``;
- depthwise convolutions become Keras's: the host's faster version is for CPUs.

Frozen layers stay frozen.  A frozen batch norm, and one that keeps its statistics, is Keras's, called with
``training=False``; Keras 3 overrides that, so there it is this package's.

Only models for IPUs have seeded dropout, preprocessing, and batch statistics as outputs.  Last, each layer is assigned
to its stage of the pipeline.
"""

import functools
import math
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, PlainValue, Tensor, TfVariable
from ipucnn.compat import KERAS_3, tf_variable
from ipucnn.datasets.pixels import InputRange
from ipucnn.models.blueprint import INPUT_NAME, Node, stages_by_layer
from ipucnn.models.keras_config import read_blueprint
from ipucnn.models.layers import micro_batches
from ipucnn.models.names import named_weights, penalties
from ipucnn.sessions.poplar.device import Api, Ipus, compute_type
from ipucnn.sessions.poplar.options import accumulation_options, pipelining_options
from ipucnn.training.program import BuiltProgram

SEEDS_NAME = "micro_batch_seeds"
TRAINING, PREDICTION, STATISTICS = "training", "prediction", "statistics"


class SeededDropout(keras.layers.Layer):
    """Dropout whose masks are a function of the run's seed, the layer's name and the micro-batch's number.

    The layer cannot know the micro-batch's number in ``fit``, so the seeds are a second input.  They are the seeds of
    ``ipucnn.models.layers.micro_batches.Dropout``, but the masks differ from the host's, because poprand uses the
    seed as the key of its own generator (kernels/poprand/random.cc of graphcore/tensorflow r2.6/sdk-release-3.4).

    Args:
        rate: the probability of zeroing.
        noise_shape: as for the host's layer.
        micro_batch_size: the samples of a micro-batch; the input may hold several, as in distributed batch norm.
        always: whether to drop in inference, too (for the statistics of a training forward pass).
    """

    def __init__(
        self,
        rate: float,
        noise_shape: Optional[Sequence[Optional[int]]],
        micro_batch_size: int,
        always: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.rate = float(rate)
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)
        self.micro_batch_size = int(micro_batch_size)
        self.always = bool(always)

    def call(self, inputs: Sequence[Tensor], training: Optional[bool] = None) -> Tensor:
        x, seeds = inputs
        if not (training or self.always) or self.rate == 0:
            return x
        size = self.micro_batch_size
        parts = (x.shape[0] or size) // size
        noise_shape = self.noise_shape or (None,) * len(x.shape)
        shape = [size if noise_shape[0] is None else noise_shape[0]]
        shape += [int(x.shape[i]) if n is None else n for i, n in enumerate(noise_shape) if i]
        # The first draw of this layer in a micro-batch; see ipucnn.models.layers.micro_batches.Dropout.
        layer_seed = zlib.crc32(f"{self.name}/0".encode()) & 0x7FFFFFFF
        drawn = []
        for part in range(parts):
            seed = seeds[part * size] + tf.constant([layer_seed, 0], tf.int32)
            noise = tf.random.stateless_uniform(shape, seed=seed)
            drawn.append(tf.repeat(noise, size // shape[0], axis=0) if shape[0] != size else noise)
        noise = tf.concat(drawn, axis=0) if parts > 1 else drawn[0]
        keep = tf.cast(noise >= self.rate, x.dtype)
        return x * (keep * tf.cast(1.0 / (1.0 - self.rate), x.dtype))


class Preprocess(keras.layers.Layer):
    """Converts pixels from 0 to 255 to the network's input range, on the IPU.

    Args:
        input_range: the network's range.
        fused: ``ipu.image_ops.normalise_image``, which applies it in one operation; or None.
        compute: the type of the result.
    """

    def __init__(
        self, input_range: InputRange, fused: Optional[Callable[..., Tensor]], compute: str, **kwargs: object
    ) -> None:
        super().__init__(**kwargs)
        self._range, self._fused, self._compute = input_range, fused, compute

    def call(self, inputs: Tensor) -> Tensor:
        if self._fused is not None:
            offsets = tf.constant(self._range.offsets, self._compute)
            factors = tf.constant(self._range.factors, self._compute)
            # The operation pads three channels to four, and turns 8 bits into 16.
            fused = self._fused(inputs, offsets, factors, 1 / self._range.divisor)
            return tf.cast(fused[..., :3], self._compute)
        return tf.cast(self._range.apply_in_network(tf.cast(inputs, tf.float32)), self._compute)


class _FusedBatchNorm(keras.layers.Layer):
    """Batch norm with the SDK's operation, whose moments are over the replicas that share statistics.

    Attributes:
        numbers: the values of each channel in one replica's micro-batch; known after building.
    """

    def __init__(self, epsilon: float, center: bool, scale: bool, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.epsilon, self.center, self.scale = float(epsilon), bool(center), bool(scale)
        self.numbers = 0

    def build(self, input_shape: Sequence[int]) -> None:
        channels = (int(input_shape[-1]),)
        self.numbers = math.prod(int(n) for n in input_shape[:-1])
        self.gamma = self.add_weight(name="gamma", shape=channels, initializer="ones") if self.scale else None
        self.beta = self.add_weight(name="beta", shape=channels, initializer="zeros") if self.center else None
        super().build(input_shape)

    def normalised(self, inputs: Tensor, moving: Sequence[Tensor] = ()) -> Tuple[Tensor, Tensor, Tensor]:
        """Returns the normalised input, and the mean and biased variance used, float32 (channels,).

        Args:
            moving: the mean and variance to use; empty: those of the micro-batch.
        """
        channels = int(inputs.shape[-1])
        rows = int(inputs.shape.num_elements()) // channels
        x = inputs if len(inputs.shape) == 4 else tf.reshape(inputs, [-1, 1, 1, channels])
        gamma, beta = (
            tf.fill([channels], default)
            if weight is None
            else tf.cast(tf.convert_to_tensor(weight), tf.float32)
            for weight, default in ((self.gamma, 1.0), (self.beta, 0.0))
        )
        mean, variance = moving or [tf.constant([], tf.float32)] * 2
        # The operation of tf.nn.fused_batch_norm, which would raise a smaller epsilon.
        y, mean, variance = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=gamma,
            offset=beta,
            mean=mean,
            variance=variance,
            epsilon=self.epsilon,
            is_training=not moving,
        )[:3]
        return tf.reshape(y, inputs.shape), mean, variance * ((rows - 1.0) / rows)


class BatchStatistics(_FusedBatchNorm):
    """Batch norm that also returns its batch statistics: (normalised, mean, variance).

    Mean and variance are float32 (1, channels), so that ``predict`` stacks those of all micro-batches.  The variance is
    made unbiased with the count of one replica, even if several share it, as IPUs do.
    """

    def call(self, inputs: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        y, mean, variance = self.normalised(tf.cast(inputs, tf.float32))
        unbiased = micro_batches.unbiased_variance(variance, self.numbers)
        return tf.cast(y, inputs.dtype), mean[None], unbiased[None]


class MovedByGradient(_FusedBatchNorm):
    """Batch norm whose moving statistics have gradients: the statistics of the micro-batch.

    The SDK treats these as gradients: it accumulates them, in pipelines too, and passes them to the optimizer once per
    weight update, as in ``batch_norm.py`` of the public application.  The gradient of the moving variance is the
    variance without Bessel's correction.  Both are float32 in every precision.
    """

    def __init__(self, momentum: float, epsilon: float, center: bool, scale: bool, **kwargs: object) -> None:
        super().__init__(epsilon, center, scale, **kwargs)
        self.momentum = float(momentum)

    def build(self, input_shape: Sequence[int]) -> None:
        super().build(input_shape)
        channels = (int(input_shape[-1]),)
        # Otherwise Keras would cast them to 16 bits in layers that compute in 16 bits.
        kind: Dict[str, Any] = {"autocast" if KERAS_3 else "experimental_autocast": False, "dtype": "float32"}
        self.moving_mean = self.add_weight(name="moving_mean", shape=channels, initializer="zeros", **kind)
        self.moving_variance = self.add_weight(
            name="moving_variance", shape=channels, initializer="ones", **kind
        )

    def call(self, inputs: Tensor, training: Optional[bool] = None) -> Tensor:
        moving = [tf.convert_to_tensor(v) for v in (self.moving_mean, self.moving_variance)]
        y, mean, variance = self.normalised(inputs, () if training else moving)
        if not training:
            return y

        @tf.custom_gradient
        def with_statistics(y: Tensor, moving_mean: Tensor, moving_variance: Tensor) -> Any:
            return tf.identity(y), lambda dy: (dy, mean, variance)

        return with_statistics(y, *moving)


@dataclass
class DeviceModel:
    """A network built for IPUs.

    Attributes:
        model: the Keras model; its inputs are the images, and the micro-batch's seeds if ``takes_seeds``.
        weights: the variables by canonical name, in the order of the original network.
        norms: the names of the batch norms that move with every micro-batch, in the order of a STATISTICS model's
            outputs (mean, variance of each).
        moved_once: the batch norms that move once per weight update, of a TRAINING model.
        penalties: the factors (l1, l2) of the regularizers by the weight's name, which the optimizer adds.
    """

    model: KerasModel
    weights: Dict[str, TfVariable]
    takes_seeds: bool
    norms: List[str] = field(default_factory=list)
    moved_once: List[MovedByGradient] = field(default_factory=list)
    penalties: Mapping[str, Tuple[float, float]] = field(default_factory=dict)


def _policy(precision: str) -> Any:
    """Returns the dtype or policy of a layer."""
    if precision == "16.32":
        return keras.mixed_precision.Policy("mixed_float16")
    return compute_type(precision)


def _batch_norm(config: Mapping[str, PlainValue], common: KerasConfig) -> KerasLayer:
    settings = {key: config[key] for key in ("momentum", "epsilon", "center", "scale")}
    if KERAS_3 and (common["dtype"] == "float32" or config["keeps_statistics"]):
        # Keras 3 updates the moving variance with the biased variance; the SDK's Keras 2.6 uses the unbiased one.  And
        # a model of Keras 3 overrides the ``training=False`` of a layer's call.
        settings["keeps_statistics"] = config["keeps_statistics"]
        return micro_batches.BatchNormalization(**settings, **common)
    return keras.layers.BatchNormalization(**settings, **common)


class _Builder:
    """Builds one model; each kind of replaced layer has a method."""

    def __init__(self, ipus: Ipus, purpose: str, micro_batch_size: int) -> None:
        self.addons, self.config = ipus.api.addons_layers, ipus.config
        self.purpose, self.size = purpose, micro_batch_size
        self.seeds: Optional[Tensor] = None
        self.statistics: List[Tensor] = []
        self.norms: List[str] = []
        self.moved_once: List[MovedByGradient] = []
        self._layers: Dict[str, KerasLayer] = {}

    def output(self, node: Node, inputs: Union[Tensor, List[Tensor]]) -> Tensor:
        """Returns the output of a node."""
        common = {"name": node.layer, "dtype": _policy(self.config.precision)}
        if not node.config["trainable"]:
            common["trainable"] = False
        if node.layer_class is micro_batches.BatchNormalization:
            return self._normalised(node, inputs, common)
        if node.layer_class is micro_batches.Dropout:
            return self._dropped(node, inputs, common)
        if node.layer not in self._layers:
            self._layers[node.layer] = self._layer(node, common)
        return self._layers[node.layer](inputs)

    def _layer(self, node: Node, common: KerasConfig) -> KerasLayer:
        kind: Any = node.layer_class
        if kind is micro_batches.GroupNormalization:
            return self.addons.GroupNormalization(
                groups=node.config["groups"],
                channels_axis=-1,
                epsilon=node.config["epsilon"],
                beta_initializer="zeros",
                gamma_initializer="ones",
                # Groups of neighbouring channels, as everywhere else; the default would permute the weights.
                strided_channel_grouping=False,
                **common,
            )
        assert kind is not None  # bare operations were edited away
        # Initial weights do not matter, because the network's are copied.  The optimizer adds the penalties.
        config = {
            key: "zeros" if key.endswith("_initializer") else value
            for key, value in node.config.items()
            if not key.endswith("_regularizer")
        }
        return kind.from_config({**config, **common})

    def _normalised(self, node: Node, inputs: Tensor, common: KerasConfig) -> Tensor:
        if not node.config["trainable"] or node.config["keeps_statistics"]:
            return _batch_norm(node.config, common)(inputs, training=False)
        settings = {key: node.config[key] for key in ("epsilon", "center", "scale")}
        if node.config["moves_once"]:
            if self.purpose != TRAINING:
                return _batch_norm(node.config, common)(inputs)
            self.moved_once.append(MovedByGradient(node.config["momentum"], **settings, **common))
            return self.moved_once[-1](inputs)
        self.norms.append(node.name)
        if self.purpose != STATISTICS:
            return _batch_norm(node.config, common)(inputs)
        output, mean, variance = BatchStatistics(**settings, **common)(inputs)
        self.statistics += [mean, variance]
        return output

    def _dropped(self, node: Node, inputs: Tensor, common: KerasConfig) -> Tensor:
        rate, noise = node.config["rate"], node.config["noise_shape"]
        if self.purpose == PREDICTION or rate == 0:
            return keras.layers.Activation("linear", **common)(inputs)
        always = self.purpose == STATISTICS
        if self.config.dropout_layer == "stateless":
            if self.seeds is None:
                self.seeds = keras.Input(batch_shape=(self.size, 2), name=SEEDS_NAME, dtype="int32")
            dropout = SeededDropout(rate, noise, self.size, always, **common)
            return dropout([inputs, self.seeds])
        if noise is not None:
            noise = [int(size) if n is None else n for n, size in zip(noise, inputs.shape)]
        return self.addons.Dropout(rate, noise_shape=noise, **common)(
            inputs, training=True if always else None
        )


def build_network(
    ipus: Ipus,
    network: KerasModel,
    purpose: str,
    micro_batch_size: int,
    name: str,
    program: Optional[BuiltProgram] = None,
) -> DeviceModel:
    """Returns a network built for a purpose, with its weights.

    It is in its stages and has the SDK's options for it, which models do not save.

    Args:
        ipus: the IPUs.
        network: the network with its weights.
        purpose: TRAINING, PREDICTION, or STATISTICS (a training forward pass that returns batch norm's statistics).
        micro_batch_size: the samples of a micro-batch.
        name: the name of the model.
        program: the Program whose stages and options it has; None: it has no pipeline.
    """
    with ipus.scope():
        built = _build(ipus, network, _Builder(ipus, purpose, micro_batch_size), name, program)
        if program is not None:
            _set_options(ipus, built.model, program, training=purpose == TRAINING)
    return built


def _set_options(ipus: Ipus, model: KerasModel, program: BuiltProgram, training: bool) -> None:
    p, config, api = program, ipus.config, ipus.api
    if p.num_stages > 1:
        model.set_pipelining_options(**pipelining_options(api.ipu, p, config, training))
    elif training and p.gradient_accumulation_count > 1:
        model.set_gradient_accumulation_options(**accumulation_options(p, config))
    model.set_infeed_queue_options(prefetch_depth=config.prefetch_depth)
    if training and p.num_replicas > 1 and p.num_stages == 1 and api.reduces_metrics:
        model.set_replication_options(replicated_metric_reduction_method="MEAN")


def _build(
    ipus: Ipus, network: KerasModel, builder: _Builder, name: str, program: Optional[BuiltProgram]
) -> DeviceModel:
    blueprint = read_blueprint(network)
    first = blueprint.nodes[0]
    sizes = tuple(int(n) for n in network.inputs[0].shape[1:])
    compute = compute_type(ipus.config.precision)
    transfer, on_device = ipus.preprocess.dtype, ipus.preprocess.on_device
    images = keras.Input(batch_shape=(builder.size, *sizes), name=INPUT_NAME, dtype=transfer)
    x = images
    if on_device is not None:
        fused = ipus.api.ipu.image_ops.normalise_image if ipus.config.fused_preprocessing else None
        x = Preprocess(on_device, fused, compute, name="preprocess", dtype=compute)(images)
    tensors = {first.name: x}
    for node in blueprint.nodes[1:]:
        sources = [tensors[source] for source in node.inputs]
        tensors[node.name] = builder.output(node, sources[0] if len(sources) == 1 else sources)
    outputs = tensors[blueprint.output]
    if compute != "float32":
        # Loss and metrics are float32, and Keras casts sample weights to the type of the logits.
        outputs = keras.layers.Activation("linear", dtype="float32", name="float32_logits")(outputs)
    if builder.purpose == STATISTICS:
        # The network's end is kept, reduced to one value: without it, a pipeline could lack its last stages.
        if len(outputs.shape) == 4:
            outputs = keras.layers.GlobalAveragePooling2D(name="end")(outputs)
        outputs = [*builder.statistics, outputs]
    inputs = images if builder.seeds is None else [images, builder.seeds]
    model = keras.Model(inputs, outputs, name=name)
    if ipus.rounds_stochastically and builder.purpose != TRAINING:
        for layer in model.layers:
            _round_to_nearest(layer, ipus.api)
    if program is not None and program.num_stages > 1:
        _assign_stages(model, blueprint.nodes, program.pipeline_splits)
    weights = _weights(model, network)
    assign_weights(named_weights(network), weights)
    return DeviceModel(
        model, weights, builder.seeds is not None, builder.norms, builder.moved_once, penalties(network)
    )


def _round_to_nearest(layer: KerasLayer, api: Api) -> None:
    """Turns stochastic rounding off for the operations of a layer.

    The scope marks the operations of the graph that is being made, and the compiler takes the system's rounding only
    for those without a mark (tensorflow/python/ipu/scopes.py and driver/passes/add_stochastic_rounding_options.cc of
    graphcore/tensorflow).  Each pipeline stage is a graph of its own, so the scope has to be within the layer's call.
    """
    call = layer.call

    @functools.wraps(call)
    def rounded_to_nearest(*args: object, **kwargs: object) -> Tensor:
        with api.ipu.scopes.stochastic_rounding(False):
            return call(*args, **kwargs)

    layer.call = rounded_to_nearest


def _weights(model: KerasModel, network: KerasModel) -> Dict[str, TfVariable]:
    """Returns the model's variables by the network's names; those of the addons' group norm are read by attribute."""
    norms = {layer.name for layer in network.layers if isinstance(layer, micro_batches.GroupNormalization)}
    by_name = named_weights(SimpleNamespace(layers=[x for x in model.layers if x.name not in norms]))
    for layer in model.layers:
        if layer.name in norms:
            by_name[f"{layer.name}/gamma"] = tf_variable(layer.gamma)
            by_name[f"{layer.name}/beta"] = tf_variable(layer.beta)
    return {name: by_name[name] for name in named_weights(network) if name in by_name}


def assign_weights(source: Mapping[str, TfVariable], target: Mapping[str, TfVariable]) -> None:
    """Gives variables the values of those with the same names; a model for statistics has no moving statistics."""
    for name, variable in target.items():
        variable.assign(source[name].numpy().astype(variable.dtype.as_numpy_dtype))


def _assign_stages(model: KerasModel, nodes: Sequence[Node], splits: Sequence[str]) -> None:
    """Assigns each call of a layer to its stage.

    Layers that only the model for IPUs has belong to the stage of the layer before; preprocessing to the first stage.
    """
    stages, calls = stages_by_layer([node.name for node in nodes], splits), defaultdict(list)
    for node in nodes:
        calls[node.layer].append(stages[node.name])
    assignment = model.get_pipeline_stage_assignment()
    stage = 0
    for entry in assignment:
        stages_of_calls = calls.get(entry.layer.name)
        stage = stage if stages_of_calls is None else stages_of_calls[entry.node_index]
        entry.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignment)
