"""Batch norm's statistics: updates the moving ones in training, and measures those for evaluation and checkpoints.

Running statistics are averages over many micro-batches, and the weights change between them.  They can also be
imprecise: with 16 samples of small images, the deepest layers have 16 numbers per channel.  Then evaluation normalises
differently from training.  So the statistics are measured with the final weights on larger batches of training images
(precise batch norm: Wu and Johnson 2021, arXiv:2105.07576, section 3).  Each batch norm normalises by the statistics of
the whole batch, and the moments of the batches are pooled.  In all other respects the pass is that of evaluation:
images are not augmented, and there is no dropout, which would make variances larger than they are in evaluation (Li et
al. 2018, arXiv:1801.05134).
"""

import functools
import itertools
import math
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, TypeVar

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, Tensor, TfVariable
from ipucnn.errors import MemoryErrors
from ipucnn.machine import parallel_map
from ipucnn.models.keras_config import output_shape
from ipucnn.models.layers.micro_batches import (
    BatchNormalization,
    ExecutionContext,
    moving_average,
    unbiased_variance,
)
from ipucnn.models.names import statistics_of
from ipucnn.sessions.host.arithmetic import Arithmetic
from ipucnn.sessions.host.division import Division
from ipucnn.sessions.host.network import HostWeights, Network
from ipucnn.sessions.session import Batch


class MovingStatistics:
    """Updates the moving statistics of a model's batch norms, fused batch by fused batch, in closed form.

    Args:
        model: functional Keras model.
        division: the division of a weight update.
        weights: the model's weights.

    Attributes:
        names: the names of the moving statistics that move with every micro-batch: mean and variance of each layer.
    """

    def __init__(self, model: KerasModel, division: Division, weights: HostWeights) -> None:
        self._batch, self._division = division.batch, division
        norms = [x for x in model.layers if isinstance(x, BatchNormalization) and x.moves]
        self._moving: Dict[str, Tuple[TfVariable, float]] = {
            name: (weights.kept[name], layer.momentum)
            for layer in norms
            for name in statistics_of([layer.name])
        }
        self._order = [layer.name for layer in norms if not layer.moves_once]
        self.names = statistics_of(self._order)
        # For statistics that move once per weight update: sums over its fused batches for each group of replicas.
        groups = self._batch.num_replicas // self._batch.dbn_replica_group_size
        self._sums = {
            layer.name: tf.Variable(tf.zeros([groups, 2, output_shape(layer)[-1]]), trainable=False)
            for layer in norms
            if layer.moves_once
        }
        self._numbers = {
            layer.name: float(self._batch.micro_batch_size * _numbers_of_sample(layer))
            for layer in norms
            if layer.moves_once
        }

    def means(self, context: ExecutionContext) -> List[Tensor]:
        """Returns the means of the statistics of a fused batch's micro-batches, in the order of ``names``."""
        pairs = {layer.name: (mean, variance) for layer, mean, variance in context.batch_statistics}
        return [tf.reduce_mean(statistic, axis=0) for name in self._order for statistic in pairs[name]]

    def contributions(self, context: ExecutionContext, batch_index: Tensor) -> Dict[str, Tensor]:
        """Returns the contributions of a fused batch after its forward pass, float32, by name.

        Args:
            context: the context of the forward pass.
            batch_index: scalar int64, the fused batch's number within the weight update.
        """
        return {
            **self._of_micro_batches(context, batch_index),
            **self._of_weight_update(context, batch_index),
        }

    def move(self, contributions: Mapping[str, Tensor], batch_index: Tensor) -> None:
        """Moves the statistics by the contributions of a fused batch, in its turn.

        Args:
            contributions: the result of :meth:`contributions`.
            batch_index: scalar int64, the fused batch's number within the weight update.
        """
        is_first = tf.equal(batch_index, 0)
        count = float(self._batch.gradient_accumulation_count)

        @functools.lru_cache(maxsize=None)
        def decay(momentum: float) -> Tensor:
            return tf.where(is_first, tf.constant(momentum**count, tf.float32), 1.0)

        for name in self.names:
            moving, momentum = self._moving[name]
            moving.assign(moving * decay(momentum) + contributions[name])
        for layer, total in self._sums.items():
            self._move_once(layer, total, contributions[layer], batch_index)

    def _of_micro_batches(self, context: ExecutionContext, batch_index: Tensor) -> Dict[str, Tensor]:
        """Returns the contributions to statistics that move with every micro-batch, in closed form.

        One accumulation step moves m to momentum * m + (1 - momentum) * mean over replicas of the batch
        statistic (each replica has its own moving statistics; their mean follows the same recursion, as it
        is linear).  After all G steps the statistic of step g has the weight (1 - momentum) * momentum**(G - 1 - g).
        """
        p = self._batch
        group = p.dbn_replica_group_size
        groups = self._division.fused_micro_batches // group
        position = tf.cast(batch_index * self._division.fused_micro_batches, tf.float32) + tf.range(
            groups, dtype=tf.float32
        ) * float(group)
        step = tf.floor(position / float(p.num_replicas))
        count = float(p.gradient_accumulation_count)

        @functools.lru_cache(maxsize=None)
        def weight_of(momentum: float) -> Tensor:
            return tf.pow(momentum, count - 1.0 - step) * ((1.0 - momentum) * group / p.num_replicas)

        contributions = {}
        for layer, *statistics in context.batch_statistics:
            for name, statistic in zip(statistics_of([layer.name]), statistics):
                moving, momentum = self._moving[name]
                added = tf.linalg.matvec(statistic, weight_of(momentum), transpose_a=True)
                added.set_shape(moving.shape)
                contributions[name] = added
        return contributions

    def _of_weight_update(self, context: ExecutionContext, batch_index: Tensor) -> Dict[str, Tensor]:
        """Returns the contributions to statistics that move once per weight update, as sums over groups of replicas."""
        p = self._batch
        groups_in_batch = self._division.fused_micro_batches // p.dbn_replica_group_size
        groups = p.num_replicas // p.dbn_replica_group_size
        replica = (tf.cast(batch_index, tf.int32) * groups_in_batch + tf.range(groups_in_batch)) % groups
        contributions = {}
        for layer, mean, variance in context.update_statistics:
            sums = tf.math.unsorted_segment_sum(tf.stack([mean, variance], axis=1), replica, groups)
            sums.set_shape(self._sums[layer.name].shape)
            contributions[layer.name] = sums
        return contributions

    def _move_once(self, layer: str, total: TfVariable, sums: Tensor, batch_index: Tensor) -> None:
        """Adds the sums of a fused batch; its last one in a weight update moves the statistics of a layer.

        The statistics of each replica are averaged over accumulation.  The new mean is the average of the replicas'
        means, and the new variance that of all replicas' numbers around it.  The differences between the means of one
        replica's micro-batches are left out of it, as in the public application (``batch_norm.py``).
        """
        p = self._batch
        if self._division.num_groups > 1:
            sums = tf.where(tf.equal(batch_index, 0), sums, total + sums)
            total.assign(sums)
        means, variances = tf.unstack(sums / float(p.gradient_accumulation_count), axis=1)
        new_mean = tf.reduce_mean(means, axis=0)
        new_variance = tf.reduce_mean(variances + tf.math.squared_difference(means, new_mean), axis=0)
        new_variance = unbiased_variance(new_variance, self._numbers[layer] * float(p.num_replicas))
        is_last = tf.equal(batch_index, self._division.num_groups - 1)
        for name, new in zip(statistics_of([layer]), (new_mean, new_variance)):
            moving, momentum = self._moving[name]
            moving.assign(tf.where(is_last, moving_average(moving, new, momentum), moving))


_Element = TypeVar("_Element")


def peeked(elements: Iterable[_Element]) -> Tuple[Optional[_Element], Iterator[_Element]]:
    """Returns the first element (None if there is none), and an iterator over all."""
    iterator = iter(elements)
    first = next(iterator, None)
    return first, iterator if first is None else itertools.chain([first], iterator)


def _numbers_of_sample(layer: BatchNormalization) -> int:
    """Returns how many numbers of a channel the layer's input has in each sample."""
    return math.prod(output_shape(layer)[1:-1])


_Moments = Tuple[Tensor, Tensor]
"""Mean and biased variance, (channels,)."""


class LargeBatches:
    """Measures the statistics that :class:`ipucnn.models.layers.BatchNormalization` layers keep as moving statistics.

    Args:
        model: the model, whose weights are read whenever :meth:`measure` is called.
        arithmetic: the session's arithmetic; rounding is to nearest.
        unpack: the function that brings the images of a batch to the network's range.
        on_cpu: whether the session runs on a CPU.
        at_once: the number of batches to compute in parallel, as a function of their number of samples.

    Attributes:
        names: the names of the moving statistics that training moves.
    """

    def __init__(
        self,
        model: KerasModel,
        arithmetic: Arithmetic,
        unpack: Callable[[Tensor], Tensor],
        on_cpu: bool,
        at_once: Callable[[int], int] = lambda samples: 1,
    ) -> None:
        norms = [x for x in model.layers if isinstance(x, BatchNormalization) and x.moves]
        self.names = statistics_of(layer.name for layer in norms)
        self._numbers_of_sample = {layer.name: _numbers_of_sample(layer) for layer in norms}
        self._at_once = at_once
        if not self.names:
            return
        network = Network(model, arithmetic, unpack, on_cpu=on_cpu, measures=True)

        def moments(images: Tensor) -> Dict[str, _Moments]:
            context = ExecutionContext(
                num_groups=1, seeds=tf.zeros([1, 2], tf.int32), num_micro_batches=1, measures=True
            )
            network(images, training=False, context=context)
            return {layer.name: (mean[0], variance[0]) for layer, mean, variance in context.update_statistics}

        self._moments = tf.function(moments, autograph=False)

    def measure(self, batches: Iterable[Batch]) -> Dict[str, np.ndarray]:
        """Returns float32 (channels,) for each ``<layer>/moving_mean`` and ``/moving_variance``.

        The result is empty without batch norm.

        Args:
            batches: (images, ...), all of one shape; at least one.

        Raises:
            InfeasibleError: a batch does not fit into the host's memory.
        """
        moments_of: Dict[str, List[List[np.ndarray]]] = {}

        def of_batch(images: Tensor, *_: Tensor) -> Dict[str, _Moments]:
            interrupts.check()
            too_large = MemoryErrors(
                f"out of memory with {len(images)} training images at once, to measure batch norm's statistics",
                "use a smaller --precise-batch-norm; 0 leaves it out",
            )
            with too_large:
                moments: Dict[str, _Moments] = self._moments(images)
            return moments

        first, batches = peeked(batches if self.names else ())
        num_samples = 0 if first is None else len(first[0])
        at_once = 1 if first is None else self._at_once(num_samples)
        for moments in parallel_map(of_batch, batches, at_once):
            for name, values in moments.items():
                moments_of.setdefault(name, []).append([np.asarray(v, np.float64) for v in values])
        measured = {}
        for name, parts in moments_of.items():
            means, variances = (np.stack(values) for values in zip(*parts))
            # All batches have the same size.  The estimate is unbiased, like that of the running variance.
            numbers = float(len(parts) * num_samples * self._numbers_of_sample[name])
            variance = unbiased_variance(variances.mean(axis=0) + means.var(axis=0), numbers)
            measured[f"{name}/moving_mean"] = means.mean(axis=0).astype(np.float32)
            measured[f"{name}/moving_variance"] = variance.astype(np.float32)
        return measured
