"""Layers that must know micro-batches: batch norm, which mixes the samples of one, and dropout, which is random.

The host session computes several micro-batches as one large batch.  Both layers read the context that the session sets
while it traces the model; outside of a session (plain Keras) there is no context.  Group norm is here because Keras 2.6
lacks it and it shares batch norm's arithmetic.

- Batch norm is ghost batch norm, Hoffer et al. 2017, arXiv:1705.08741, section 4: its statistics are those of one
  micro-batch, as on an IPU, even if the session computes several micro-batches at once.
- Dropout has no state.  Keras' Dropout advances a generator whose state is not saved with the model, so a resumed run
  would draw different masks.  Here the mask is a pure function of the run's seed, the micro-batch and the layer;
  ``noise_shape=(None, 1, 1, 1)`` gives drop connect (stochastic depth).
"""

import contextlib
import threading
import zlib
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import tensorflow as tf
from tensorflow import keras

from ipucnn.aliases import KerasConfig, KerasLayer, Numbers, Tensor, TensorShape, TfVariable

# Least size of a part of the batch for TensorFlow's own kernel, which is called once per part: its loops are faster,
# but each call has a fixed cost.
NATIVE_PART_SIZE = 2**19
# Least width to which rows are folded.
FOLDED_WIDTH = 64


@dataclass
class ExecutionContext:
    """The context of one traced forward pass over a batch of ``num_groups`` consecutive groups with own statistics.

    Attributes:
        num_groups: batch-norm groups in the batch: fused micro-batches, or groups of replicas of one
            micro-batch step with distributed batch norm.  It divides the batch.
        seeds: int32 tensor (num_micro_batches, 2), different for every micro-batch of the run.
        num_micro_batches: fused micro-batches in the batch.
        batch_statistics: (layer, mean, variance), added by each batch norm; the statistics have shape
            (num_groups, channels), and the variance has Bessel's correction.
        update_statistics: the same of each batch norm that moves once per weight update; the variance does not have
            the correction.
        seed_slots: number of draws of random numbers by each layer in this context.
        measures: whether batch norms normalise by the batch's statistics although nothing is trained, and all of them
            add to ``update_statistics``.
    """

    num_groups: int
    seeds: Tensor
    num_micro_batches: int
    batch_statistics: List[Tuple[KerasLayer, Tensor, Tensor]] = field(default_factory=list)
    update_statistics: List[Tuple[KerasLayer, Tensor, Tensor]] = field(default_factory=list)
    seed_slots: Dict[str, int] = field(default_factory=dict)
    measures: bool = False

    def replayed(self) -> "ExecutionContext":
        """A context that repeats the rest of this pass with the same random numbers and discards its statistics."""
        return replace(self, batch_statistics=[], update_statistics=[], seed_slots=dict(self.seed_slots))


_state = threading.local()


def current_context() -> Optional[ExecutionContext]:
    """The innermost context of this thread; None outside of a session."""
    stack = getattr(_state, "stack", None)
    return stack[-1] if stack else None


@contextlib.contextmanager
def execution_context(context: ExecutionContext) -> Iterator[ExecutionContext]:
    """Makes ``context`` the current one while a model is traced."""
    if not hasattr(_state, "stack"):
        _state.stack = []
    _state.stack.append(context)
    try:
        yield context
    finally:
        _state.stack.pop()


def static_or(static: Optional[int], dynamic: Tensor) -> Union[int, Tensor]:
    """A dimension's static size if known, else its dynamic size as a tensor."""
    return dynamic if static is None else int(static)


def _numbers_per_channel(x: Tensor, parts: Union[int, Tensor]) -> Union[float, Tensor]:
    """The numbers of a channel in each of ``parts`` parts of x; a tensor if they are known only when it runs."""
    size = x.shape.num_elements()
    if size is not None and not tf.is_tensor(parts):
        return float(size // (parts * int(x.shape[-1])))
    return tf.cast(tf.size(x) // (parts * x.shape[-1]), x.dtype)


def _reshaped(x: Tensor, like: Tensor) -> Tensor:
    return tf.reshape(x, like.shape if like.shape.is_fully_defined() else tf.shape(like))


class Dropout(keras.layers.Layer):
    """Inverted dropout (Srivastava et al. 2014), ``x * mask / (1 - rate)``.

    Args:
        rate: probability of zeroing a number, in [0, 1].
        noise_shape: shape of the mask, with None for the input's size in a dimension; None for the input's shape.
    """

    def __init__(
        self, rate: float, noise_shape: Optional[Sequence[Optional[int]]] = None, **kwargs: object
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be in [0, 1], got {rate}")
        self.rate = float(rate)
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)
        self.supports_masking = True

    def call(self, inputs: Tensor, training: Optional[bool] = None) -> Tensor:
        if not training or self.rate == 0:
            return inputs
        if self.rate == 1:
            return tf.zeros_like(inputs)
        dynamic = tf.shape(inputs)
        static = inputs.shape
        mask_shape = self.noise_shape or (None,) * len(static)
        shape = [static_or(static[i], dynamic[i]) if n is None else n for i, n in enumerate(mask_shape)]
        context = current_context()
        if context is None:
            noise = tf.random.uniform(shape)
        else:
            slot = context.seed_slots.get(self.name, 0)
            context.seed_slots[self.name] = slot + 1
            # The layer's name separates the streams of two layers, independent of the order of tracing.
            layer_seed = zlib.crc32(f"{self.name}/{slot}".encode()) & 0x7FFFFFFF
            # Each micro-batch draws separately, so that the masks do not depend on the number of fused ones.
            parts = context.num_micro_batches
            part_shape = [shape[0] if mask_shape[0] is not None else shape[0] // parts, *shape[1:]]
            seeds = context.seeds + tf.constant([layer_seed, 0], tf.int32)
            drawn = [tf.random.stateless_uniform(part_shape, seed=seeds[i]) for i in range(parts)]
            if mask_shape[0] is not None:  # one mask for all samples of a micro-batch
                drawn = [tf.repeat(d, static_or(static[0], dynamic[0]) // parts, axis=0) for d in drawn]
            noise = tf.concat(drawn, axis=0) if parts > 1 else drawn[0]
        keep = tf.cast(noise >= self.rate, inputs.dtype)
        return inputs * (keep * (1.0 / (1.0 - self.rate)))

    def compute_output_shape(self, input_shape: TensorShape) -> TensorShape:
        return input_shape

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "rate": self.rate, "noise_shape": self.noise_shape}


def unbiased_variance(biased: Numbers, count: Numbers) -> Numbers:
    """A variance of ``count`` numbers with Bessel's correction.

    As in TensorFlow's fused kernel (``rest_size_adjust`` of fused_batch_norm_op.cc), the variance of one number is 0.

    Args:
        count: a tensor if it is known only when the operation runs.
    """
    maximum = tf.maximum if tf.is_tensor(count) else max
    return biased * (count / maximum(count - 1.0, 1.0))


def moving_average(average: Tensor, new: Tensor, momentum: float) -> Tensor:
    """The average after a new mean or variance (Ioffe and Szegedy 2015, arXiv:1502.03167, section 3.1).

    Momentum is the weight of the average before, as in Keras.
    """
    return average * momentum + new * (1.0 - momentum)


def ghost_batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, num_groups: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Normalises each of ``num_groups`` equal parts of the batch by its own statistics.

    Args:
        x: (num_groups * b, ..., channels).
        gamma, beta: (channels,).
        epsilon: number added to the variance.
        num_groups: number of consecutive parts of the batch.

    Returns:
        The normalised x; mean and unbiased variance, each (num_groups, channels), without gradients.
    """
    size = x.shape.num_elements()
    large = size is not None and size // num_groups >= NATIVE_PART_SIZE
    # TensorFlow's kernel replaces a smaller epsilon by 1.001e-5.
    if len(x.shape) == 4 and (num_groups == 1 or large) and epsilon >= 1.001e-5:
        return _native_batch_norm(x, gamma, beta, epsilon, num_groups)
    return _grouped_batch_norm(x, gamma, beta, epsilon, num_groups)


# (x, gamma, beta, epsilon, number of groups) -> (y, mean, unbiased variance)
GhostNorm = Callable[[Tensor, Tensor, Tensor, float, int], Tuple[Tensor, Tensor, Tensor]]


def _native_batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, num_groups: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Normalises with one call of TensorFlow's fused kernel per group; x is (num_groups * b, h, w, channels)."""
    parts, gammas, betas = [x], [gamma], [beta]
    if num_groups > 1:
        # Each part has a copy of gamma and beta, so that their gradients are one sum over a stack.  TensorFlow's memory
        # optimizer replaces long sums of tensors by a temporary variable, which fails in loops (AlreadyExistsError).
        parts = tf.split(x, num_groups)
        gammas, betas = (tf.unstack(tf.tile(v[tf.newaxis], [num_groups, 1])) for v in (gamma, beta))
    outputs, means, variances = [], [], []
    for part, part_gamma, part_beta in zip(parts, gammas, betas):
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            part, part_gamma, part_beta, epsilon=epsilon, is_training=True
        )[:3]
        outputs.append(y)
        means.append(tf.stop_gradient(mean))
        variances.append(tf.stop_gradient(variance))
    y = tf.concat(outputs, axis=0) if num_groups > 1 else outputs[0]
    return y, tf.stack(means), tf.stack(variances)


def _grouped_batch_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, num_groups: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Normalises all groups at once."""
    channels = int(x.shape[-1])
    size = x.shape.num_elements()
    rows = None if size is None else size // (num_groups * channels)
    y, mean, variance = _normalise(x, gamma, beta, epsilon, num_groups, rows, channels)
    return y, mean, unbiased_variance(variance, _numbers_per_channel(x, num_groups))


def _normalise(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    num_parts: Union[int, Tensor],
    rows: Optional[int],
    channel_groups: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Normalises each (part of the batch, group of channels) by its own mean and variance.

    The gradient is written out (Ioffe and Szegedy 2015, arXiv:1502.03167, section 3; with channel groups, Wu and He
    2018): on a CPU each pass over the activations takes time, and automatic differentiation of the same formula makes
    about twice as many.  Sums are computed per channel first, and then pooled over channels, when they are small.
    Since few channels make short inner loops, rows are folded to a larger width, and then summed by a matrix product.

    Args:
        x: (num_parts * b, ..., channels).
        gamma, beta: (channels,).
        epsilon: number added to the variance.
        num_parts: number of equal parts of the batch, an int or a scalar tensor.
        rows: numbers per part and channel; None if unknown.
        channel_groups: number of groups of neighbouring channels; the number of channels for batch norm.

    Returns:
        The normalised x; mean and biased variance, (num_parts, channels), without gradients.
    """
    channels = int(x.shape[-1])
    per_group = channels // channel_groups
    fold = 1
    while rows is not None and fold * channels < FOLDED_WIDTH and rows % (2 * fold) == 0:
        fold *= 2
    shape = [num_parts, -1, fold * channels]

    def total(values: Tensor) -> Tensor:
        """Sums the rows of each part: (parts, rows, fold * channels) -> (parts, 1, channels)."""
        if fold == 1 or rows is None:
            return tf.reduce_sum(values, axis=1, keepdims=True)
        sums = tf.matmul(tf.ones([num_parts, 1, rows // fold], x.dtype), values)
        return tf.reduce_sum(tf.reshape(sums, [num_parts, fold, channels]), axis=1, keepdims=True)

    def wide(values: Tensor) -> Tensor:
        """Repeats per-channel values for each folded row."""
        return tf.tile(values, [1, 1, fold]) if fold > 1 else values

    @tf.custom_gradient
    def normalise(x: Tensor, gamma: Tensor, beta: Tensor) -> Any:
        grouped = tf.reshape(x, shape)
        count = _numbers_per_channel(x, num_parts) * per_group

        def pool(sums: Tensor) -> Tensor:
            """Per-channel sums (parts, 1, channels) -> means over each channel group, of the same shape."""
            if per_group > 1:
                sums = tf.reduce_sum(tf.reshape(sums, [num_parts, channel_groups, per_group]), axis=2)
                sums = tf.repeat(sums, per_group, axis=1)[:, None, :]
            return sums / count

        mean = pool(total(grouped))
        variance = pool(total(tf.math.squared_difference(grouped, wide(mean))))
        inverse = tf.math.rsqrt(variance + epsilon)
        factor = inverse * gamma
        y = _reshaped(grouped * wide(factor) + wide(beta - mean * factor), x)

        def gradient(dy: Tensor, *_: object) -> Any:
            dy = tf.reshape(dy, shape)
            centred = grouped - wide(mean)
            sum_dy = total(dy)
            sum_dy_x = total(dy * centred)
            slope = inverse * inverse * inverse * pool(gamma * sum_dy_x)
            dx = dy * wide(factor) - (centred * wide(slope) + wide(inverse * pool(gamma * sum_dy)))
            return (
                _reshaped(dx, x),
                tf.reduce_sum(sum_dy_x * inverse, axis=[0, 1]),
                tf.reduce_sum(sum_dy, axis=[0, 1]),
            )

        statistics = (tf.stop_gradient(tf.squeeze(moment, axis=1)) for moment in (mean, variance))
        return (y, *statistics), gradient

    y, mean, variance = normalise(x, gamma, beta)
    y.set_shape(x.shape)
    return y, mean, variance


def _regularizers(norm: KerasLayer) -> Dict[str, Any]:
    """The regularizers of a norm, which sessions add to the loss (``penalties`` of names.py)."""
    pairs = {"gamma_regularizer": norm.gamma_regularizer, "beta_regularizer": norm.beta_regularizer}
    return {  # Keras 2.6 wraps dictionaries, and JSON does not take the wrappers
        key: {"class_name": str(value["class_name"]), "config": dict(value["config"])}
        for key, value in pairs.items()
        if value is not None
    }


class BatchNormalization(keras.layers.Layer):
    """Batch norm over each micro-batch; weights in Keras' order (gamma, beta, moving mean, moving variance).

    In a session, the session updates the moving statistics, because it knows the order of the micro-batches.  Outside
    of a session the layer is Keras' batch norm and updates them itself.  The moving variance is updated by the unbiased
    estimate, as in the fused kernel of the SDK's TensorFlow (``FusedBatchNormV3``).

    A frozen layer (``trainable`` False) normalises by its moving statistics in training too, and does not change them,
    as Keras' own layer since TensorFlow 2.

    Args:
        moves_once: whether the moving statistics move once per weight update, by the statistics of all its
            micro-batches (``custom_batch_norm``), instead of with every micro-batch.
        keeps_statistics: whether training normalises by the moving statistics and does not change them, while gamma and
            beta are trained, as Keras' own layer does that is called with ``training=False``.
    """

    def __init__(
        self,
        momentum: float = 0.97,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        axis: int = -1,
        moves_once: bool = False,
        keeps_statistics: bool = False,
        gamma_regularizer: Optional[KerasConfig] = None,
        beta_regularizer: Optional[KerasConfig] = None,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        # Keras 2.6 changes dictionaries that are attributes.
        self.gamma_regularizer, self.beta_regularizer = deepcopy((gamma_regularizer, beta_regularizer))
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], got {momentum}")
        self.momentum = float(momentum)
        self.epsilon = float(epsilon)
        self.center = bool(center)
        self.scale = bool(scale)
        self.axis = axis
        self.moves_once = bool(moves_once)
        self.keeps_statistics = bool(keeps_statistics)

    @property
    def moves(self) -> bool:
        """Whether training normalises by the statistics of its batches, with which the moving ones move."""
        return bool(self.trainable) and not self.keeps_statistics

    def build(self, input_shape: TensorShape) -> None:
        if self.axis not in (-1, len(input_shape) - 1):
            raise ValueError(f"only the last axis is normalised (channels last), got axis {self.axis}")
        channels = (int(input_shape[-1]),)
        self.gamma = self.add_weight(name="gamma", shape=channels, initializer="ones") if self.scale else None
        self.beta = self.add_weight(name="beta", shape=channels, initializer="zeros") if self.center else None
        self.moving_mean = self.add_weight(
            name="moving_mean", shape=channels, initializer="zeros", trainable=False
        )
        self.moving_variance = self.add_weight(
            name="moving_variance", shape=channels, initializer="ones", trainable=False
        )
        super().build(input_shape)

    def affine(self) -> Tuple[Tensor, Tensor]:
        """Factor and offset of each channel in evaluation, from the moving statistics."""
        factor = tf.math.rsqrt(tf.convert_to_tensor(self.moving_variance) + self.epsilon)
        if self.gamma is not None:
            factor = factor * tf.convert_to_tensor(self.gamma)
        offset = -tf.convert_to_tensor(self.moving_mean) * factor
        if self.beta is not None:
            offset = offset + tf.convert_to_tensor(self.beta)
        return factor, offset

    def call(self, inputs: Tensor, training: Optional[bool] = None, mask: Optional[Tensor] = None) -> Tensor:
        context = current_context()
        uses_batch = training or (context is not None and context.measures)
        if not (uses_batch and self.moves):
            factor, offset = self.affine()
            return inputs * factor + offset
        return self.normalised(inputs, ghost_batch_norm)

    def normalised(self, inputs: Tensor, ghost_norm: GhostNorm) -> Tensor:
        """Normalises by the batch's statistics, for training and for measuring them, and adds them to the context.

        Args:
            ghost_norm: function that computes the same as :func:`ghost_batch_norm`.
        """
        context = current_context()
        groups = context.num_groups if context is not None else 1
        dtype = inputs.dtype
        channels = inputs.shape[-1]
        gamma = tf.ones([channels], dtype) if self.gamma is None else tf.convert_to_tensor(self.gamma)
        beta = tf.zeros([channels], dtype) if self.beta is None else tf.convert_to_tensor(self.beta)
        outputs, mean, unbiased = ghost_norm(inputs, gamma, beta, self.epsilon, groups)
        if context is None:
            self._move(self.moving_mean, mean[0])
            self._move(self.moving_variance, unbiased[0])
            return outputs
        shared = context.num_micro_batches // groups
        numbers = _numbers_per_channel(inputs, context.num_micro_batches)
        # Two products: with one that both operations read, TensorFlow's graph optimizer computes another last bit.
        biased = unbiased * ((numbers * shared - 1.0) / (numbers * shared))
        if self.moves_once or context.measures:
            context.update_statistics.append((self, mean, biased))
        else:
            if shared > 1:
                # Distributed batch norm: IPUs correct the variance of the whole group by the count of one replica's
                # numbers (batch_norm_op.cc of graphcore/tensorflow r2.6/sdk-release-3.4, popnn/norm.cc).
                unbiased = unbiased_variance(biased, numbers)
            context.batch_statistics.append((self, mean, unbiased))
        return outputs

    def _move(self, moving: TfVariable, batch: Tensor) -> None:
        moving.assign(moving_average(tf.convert_to_tensor(moving), batch, self.momentum))

    def compute_output_shape(self, input_shape: TensorShape) -> TensorShape:
        return input_shape

    def get_config(self) -> Dict[str, Any]:
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "center": self.center,
            "scale": self.scale,
            "axis": self.axis,
            "moves_once": self.moves_once,
            "keeps_statistics": self.keeps_statistics,
            **_regularizers(self),
        }


class GroupNormalization(keras.layers.Layer):
    """Group norm, Wu and He 2018, arXiv:1803.08494: statistics over H, W and the channels of a group.

    Keras 2.6 lacks this layer.  Groups are neighbouring channels, as in the paper.  Each sample is computed separately,
    so micro-batches can be fused.

    Raises:
        ValueError: the number of channels is not a multiple of ``groups``.
    """

    def __init__(
        self,
        groups: int = 32,
        epsilon: float = 1e-5,
        gamma_regularizer: Optional[KerasConfig] = None,
        beta_regularizer: Optional[KerasConfig] = None,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        # Keras 2.6 changes dictionaries that are attributes.
        self.gamma_regularizer, self.beta_regularizer = deepcopy((gamma_regularizer, beta_regularizer))
        self.groups = int(groups)
        self.epsilon = float(epsilon)

    def build(self, input_shape: TensorShape) -> None:
        channels = int(input_shape[-1])
        if self.groups < 1 or channels % self.groups:
            raise ValueError(f"{channels} channels of {self.name} are not a multiple of {self.groups} groups")
        self.gamma = self.add_weight(name="gamma", shape=(channels,), initializer="ones")
        self.beta = self.add_weight(name="beta", shape=(channels,), initializer="zeros")
        super().build(input_shape)

    def call(self, inputs: Tensor, training: Optional[bool] = None) -> Tensor:
        rows = inputs.shape[1:-1].num_elements()
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        parts = inputs.shape[0] if inputs.shape[0] is not None else tf.shape(inputs)[0]
        return _normalise(inputs, gamma, beta, self.epsilon, parts, rows, self.groups)[0]

    def compute_output_shape(self, input_shape: TensorShape) -> TensorShape:
        return input_shape

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "groups": self.groups, "epsilon": self.epsilon, **_regularizers(self)}
