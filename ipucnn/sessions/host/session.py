"""The host session: any CPU or GPU, with the IPU's semantics.

A weight update over R replicas x G micro-batches of B samples is one gradient over R*G*B samples, except where a layer
mixes samples.  So several micro-batches are computed as one batch, as many as are fastest, and batch norm's statistics
are computed per micro-batch (or group of replicas) inside it.  Micro-batches are ordered as an IPU's replicas take them
from the infeed: accumulation step by accumulation step, replica by replica.  Weight updates run in a loop inside one
TensorFlow function.
"""

import contextlib
import math
import re
import time
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, Tensor, TfDataset, TfGraph, TfIterator, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.config.values import MEASURE
from ipucnn.datasets.preprocessing import ChannelAffine
from ipucnn.errors import InfeasibleError
from ipucnn.models.layers.micro_batches import BatchNormalization, ExecutionContext
from ipucnn.models.names import is_moving_statistic
from ipucnn.sessions.host.arithmetic import EXCEPTION, Arithmetic, Rounding, streams
from ipucnn.sessions.host.cluster import Cluster
from ipucnn.sessions.host.large_batches import LargeBatches
from ipucnn.sessions.host.network import Network, Weights
from ipucnn.sessions.host.workers import check_share
from ipucnn.sessions.session import (
    Batch,
    CompilationReport,
    DeviceInfo,
    MakeDataset,
    NotFiniteError,
    Session,
    Sharing,
    Stopped,
    TrainedPart,
    TrainState,
)
from ipucnn.text import counted
from ipucnn.training.batching import divisors
from ipucnn.training.losses import LossFunction, class_numbers
from ipucnn.training.metrics import MetricTotals, batch_sums
from ipucnn.training.optimizers import LossScaler, Optimizer, OptimizerSettings
from ipucnn.training.program import Program
from ipucnn.training.schedules import Schedule

# An execution runs in slices of about this long, so that interrupts and progress don't wait for its end.
SLICE_S = 1.0
SEED_MASK = 0x7FFFFFFF

# How many micro-batches are computed as one: more samples per operation cost less overhead each, until the activations
# leave the cache or the memory.  It changes nothing but the order of floating-point sums.
# A choice by trial on two cores: EfficientNet-B0 at 32x32 gained up to 128 samples and lost again at 256.
TARGET_SAMPLES = 128
TARGET_BYTES = 96 * 2**20
MEMORY_FRACTION = 0.25
# --fused-micro-batches measure: weight updates that are timed of each number; the fastest counts.
MEASURED_UPDATES = 3
# Layer outputs, their gradients and the temporaries of one layer, over the layer outputs alone.
TRAINING_FACTOR = 4


def activation_bytes_per_sample(model: KerasModel) -> int:
    """Bytes of all layer outputs of one sample, float32, from the static shapes of a functional model."""
    total = 0
    for layer in model.layers:
        shapes = layer.output.shape if not isinstance(layer.output, (list, tuple)) else None
        if shapes is None:
            continue
        size = 4
        for dimension in shapes[1:]:
            size *= int(dimension or 1)
        total += size
    return total


def choose_fused(
    num_micro_batches: int,
    micro_batch_size: int,
    group_size: int,
    bytes_per_sample: int,
    memory_bytes: int,
    num_sharing: int = 1,
) -> int:
    """The number of micro-batches to fuse: a divisor of those in a weight update.

    Args:
        num_micro_batches: micro-batches per weight update over all replicas.
        micro_batch_size: samples.
        group_size: replicas of a distributed batch norm group; the result is a multiple of it.
        bytes_per_sample: see :func:`activation_bytes_per_sample`.
        memory_bytes: of the host, 0 if unknown.
        num_sharing: workers that are to share the chunks evenly.
    """
    micro_batch_bytes = max(1, bytes_per_sample * micro_batch_size)
    by_speed = max(TARGET_SAMPLES // micro_batch_size, TARGET_BYTES // micro_batch_bytes)
    limit = by_speed
    if memory_bytes:
        limit = min(limit, fused_in_memory(micro_batch_bytes, memory_bytes))
    usable = fusible(num_micro_batches, group_size, num_sharing)
    return max([d for d in usable if d <= limit] or usable[:1])


def fusible(num_micro_batches: int, group_size: int, num_sharing: int) -> List[int]:
    """The numbers of micro-batches that can be fused, so that ``num_sharing`` workers share the chunks evenly."""
    groups = num_micro_batches // group_size
    return [d * group_size for d in divisors(groups) if groups // d % num_sharing == 0]


def fused_in_memory(micro_batch_bytes: int, memory_bytes: int) -> int:
    """How many micro-batches of so many bytes of layer outputs are computed as one at most, for they need memory."""
    return int(memory_bytes * MEMORY_FRACTION) // (TRAINING_FACTOR * max(1, micro_batch_bytes))


class Preprocessing:
    """The last step of preprocessing, left to the device.

    Args:
        affine: what is done to each channel; None: the input pipeline did it.
        transfer: type of the images on the way to the device.
    """

    def __init__(self, affine: Optional[ChannelAffine] = None, transfer: str = "float32") -> None:
        self._affine, self.transfer = affine, transfer

    def pack(self, images: Tensor) -> Tensor:
        """Images as they travel: a byte for each value, if so."""
        return tf.cast(tf.round(images), tf.uint8) if self.transfer == "uint8" else images

    def unpack(self, images: Tensor) -> Tensor:
        """What travelled, in the network's range."""
        return images if self._affine is None else self._affine.apply(tf.cast(images, tf.float32))


AddParts = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class Move(NamedTuple):
    """What a chunk has to say of moving statistics, and what is done with that when the chunk's turn comes.

    Attributes:
        statistic: float32, of the chunk alone.
        settle: (statistic, chunk's number within the weight update); in the order of chunks.
    """

    statistic: Tensor
    settle: Callable[[Tensor, Tensor], None]


class UpdateLoop:
    """``run(iterator, rates, first)``: one weight update per entry of ``rates``.

    Args:
        model: functional Keras model with logits as output.
        program: batch arithmetic, with ``fused_micro_batches`` chosen.
        optimizer: over the weights that are kept and trainable.
        loss: (logits, labels, micro-batches) -> one value per micro-batch.
        weights: the model's.
        arithmetic: what is computed in.
        preprocessing: of the images that the iterator has.
        on_cpu: whether it runs on a CPU.
        cluster: the workers that share the chunks of a weight update.
        is_ordered: whether their gradients are added chunk by chunk.

    Attributes:
        scaler: finds the loss scale, if the program leaves it to it.
    """

    def __init__(
        self,
        model: KerasModel,
        program: Program,
        optimizer: Optimizer,
        loss: LossFunction,
        weights: Weights,
        arithmetic: Arithmetic,
        preprocessing: Preprocessing,
        on_cpu: bool,
        cluster: Cluster,
        is_ordered: bool,
    ) -> None:
        self._unpack = preprocessing.unpack
        self._cluster = cluster
        self._is_ordered = is_ordered or cluster.count == 1
        self._program = program
        self._optimizer = optimizer
        self._loss = loss
        self._weights = weights
        self._arithmetic = arithmetic
        self._trainable = [weights.read[name] for name in weights.trainable]
        recomputes = program.recomputation and program.num_stages > 1
        splits = program.pipeline_splits if recomputes else ()
        self._network = Network(model, splits, on_cpu=on_cpu, alone=not arithmetic.is_plain)
        self._fused = program.fused_micro_batches
        self._chunks = program.num_micro_batches // self._fused
        self.scaler = LossScaler(optimizer.num_weights) if program.auto_loss_scaling else None
        self._scale: Union[float, TfVariable] = program.loss_scaling or 1.0
        if self.scaler is not None:
            self._scale = self.scaler.factor
        norms = [layer for layer in model.layers if isinstance(layer, BatchNormalization)]
        moving: Dict[str, Tuple[TfVariable, TfVariable, float]] = {
            layer.name: (
                weights.kept[f"{layer.name}/moving_mean"],
                weights.kept[f"{layer.name}/moving_variance"],
                layer.momentum,
            )
            for layer in norms
        }
        once = {layer.name for layer in norms if layer.moves_once}
        self._norms = {name: variables for name, variables in moving.items() if name not in once}
        # Those that move once per weight update, and the sums over its chunks for each group of replicas.
        self._once = {name: variables for name, variables in moving.items() if name in once}
        groups = program.num_replicas // program.dbn_replica_group_size
        self._sums = {
            name: tf.Variable(tf.zeros([groups, 2, mean.shape[0]]), trainable=False)
            for name, (mean, _, _) in self._once.items()
        }
        self._function = tf.function(self._run, autograph=False)
        self._concrete: Any = None
        # The numbers of its collectives: the one of each step, and what comes after the last step.
        self._collectives: List[int] = []
        self.collect = tf.function(self._collect, autograph=False)

    def trace(self, iterator: TfIterator) -> TfGraph:
        """Traces the loop for any number of weight updates, once; returns its graph."""
        if self._concrete is None:
            before = set(self._cluster.received_bytes)
            self._concrete = self._function.get_concrete_function(
                iterator, tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64)
            )
            self._collectives = sorted(set(self._cluster.received_bytes) - before)
        return self._concrete.graph

    def run(self, iterator: TfIterator, rates: Tensor, first: Tensor) -> Tuple[Tensor, Tensor]:
        """Losses and accuracies, float32 (n,), of n weight updates from number ``first`` (int64) on.

        One concrete function: TensorFlow 2.6 would trace again for each new n.
        """
        self.trace(iterator)
        return self._concrete(iterator, rates, first)

    @property
    def received_bytes(self) -> int:
        """What a worker gets from collectives in a weight update, its own part included."""
        collectives, steps = self._cluster.received_bytes, self._chunks // self._cluster.count
        every_step, *once = (collectives[number] for number in self._collectives)
        return every_step * steps + sum(once)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the model has moving statistics that move with every micro-batch."""
        return bool(self._norms)

    def _collect(self, iterator: TfIterator, num_updates: Tensor) -> None:
        """Sets the moving statistics to the means of the batch statistics over ``num_updates`` weight updates.

        The forward pass is that of training; no weight changes.
        """
        steps = tf.cast(num_updates, tf.int64) * (self._chunks // self._cluster.count)
        order = list(self._norms.items())
        moving = [variable for _, variables in order for variable in variables[:2]]

        def body(step: Tensor, *sums: Tensor) -> Tuple[Tensor, ...]:
            images = iterator.get_next()[0]
            context = self._context(step * self._cluster.count + self._cluster.rank)
            self._network(self._unpack(images), True, Rounding(self._arithmetic), context)
            found = {layer.name: (mean, variance) for layer, mean, variance in context.batch_statistics}
            means = [tf.reduce_mean(statistic, axis=0) for name, _ in order for statistic in found[name]]
            added = self._in_order(
                step, means, sums, lambda _, parts, sums: [s + p for s, p in zip(sums, parts)]
            )
            return (step + 1, *added)

        start = [tf.zeros(variable.shape) for variable in moving]
        _, *sums = tf.while_loop(
            lambda step, *_: step < steps, body, (tf.constant(0, tf.int64), *start), parallel_iterations=1
        )
        count = tf.cast(num_updates, tf.int64) * self._chunks
        for variable, total in zip(moving, sums):
            variable.assign(total / tf.cast(count, tf.float32))

    def _in_order(
        self, step: Tensor, parts: List[Tensor], sums: Sequence[Tensor], add: AddParts
    ) -> Sequence[Tensor]:
        """Adds what chunks of all workers gave to sums, chunk by chunk, as one worker would.

        Args:
            step: scalar int64; the workers' chunks are number ``step * workers`` and those after it.
            parts: float32, of this worker's chunk.
            sums: to be added to.
            add: (chunk's number, its parts, sums) -> sums.
        """
        workers = self._cluster.count
        if workers == 1:
            return add(step, parts, sums)
        shapes = [[int(n) for n in part.shape] for part in parts]
        sizes = [int(np.prod(shape)) for shape in shapes]
        gathered = self._cluster.gather(tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0))

        def body(worker: Tensor, *sums: Tensor) -> Tuple[Tensor, ...]:
            pieces = [tf.reshape(p, shape) for p, shape in zip(tf.split(gathered[worker], sizes), shapes)]
            return (worker + 1, *add(step * workers + worker, pieces, sums))

        _, *sums = tf.while_loop(
            lambda worker, *_: worker < workers,
            body,
            (tf.constant(0, tf.int64), *sums),
            parallel_iterations=1,
        )
        return sums

    def _run(self, iterator: TfIterator, rates: Tensor, first: Tensor) -> Tuple[Tensor, Tensor]:
        count = tf.shape(rates)[0]
        losses = tf.TensorArray(tf.float32, size=count, element_shape=[])
        hits = tf.TensorArray(tf.float32, size=count, element_shape=[])

        def body(i: Tensor, losses: Tensor, hits: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
            loss, hit = self._update(iterator, rates[i], first + tf.cast(i, tf.int64))
            return i + 1, losses.write(i, loss), hits.write(i, hit)

        _, losses, hits = tf.while_loop(
            lambda i, *_: i < count, body, (tf.constant(0), losses, hits), parallel_iterations=1
        )
        return losses.stack(), hits.stack()

    def _update(self, iterator: TfIterator, rate: Tensor, update: Tensor) -> Tuple[Tensor, Tensor]:
        """One weight update; returns its mean loss and accuracy."""
        total = float(self._program.num_micro_batches)
        own = self._rounding_of_weights(update)
        self._weights.copy(own)
        if self._chunks == 1:
            chunk = tf.constant(0, tf.int64)
            gradients, loss, hits, moves = self._chunk(iterator, update, chunk)
            for move in moves:
                move.settle(move.statistic, chunk)
        else:
            gradients, loss, hits = self._accumulate(iterator, update)
        if not self._arithmetic.is_plain:
            gradients = self._weights.round_gradients(gradients, self._rounding_of_gradients(update))
        if self.scaler is not None:
            gradients, beyond = self.scaler.unscaled(gradients)
            self.scaler.look(beyond, update)
        elif self._scale != 1.0:
            gradients = [g / self._scale for g in gradients]
        rounded = None
        if self._arithmetic.precision == "16.16":
            rounded = lambda values: own.all(values, "the weights and the optimizer's state")  # noqa: E731
        self._optimizer.apply(gradients, rate, update, rounded)
        return loss / total, hits / (total * self._program.micro_batch_size)

    def _accumulate(self, iterator: TfIterator, update: Tensor) -> Tuple[List[Tensor], Tensor, Tensor]:
        workers, count = self._cluster.count, len(self._trainable)

        def body(step: Tensor, *sums: Tensor) -> Tuple[Tensor, ...]:
            gradients, loss, hits, moves = self._chunk(iterator, update, step * workers + self._cluster.rank)
            others = [loss, hits, *(move.statistic for move in moves)]

            def add(chunk: Tensor, parts: Sequence[Tensor], sums: Sequence[Tensor]) -> List[Tensor]:
                first = count if self._is_ordered else 0
                loss, hits, *statistics = parts[first:]
                for move, statistic in zip(moves, statistics):
                    move.settle(statistic, chunk)
                own = self._add_gradients(chunk, parts[:first], sums[:first])
                return [*own, sums[first] + loss, sums[first + 1] + hits]

            if self._is_ordered:
                return (step + 1, *self._in_order(step, [*gradients, *others], sums, add))
            added = self._add_gradients(step, gradients, sums[:count])
            return (step + 1, *added, *self._in_order(step, others, sums[count:], add))

        start = [tf.zeros(v.shape, v.dtype) for v in self._trainable]
        zero = tf.constant(0.0)
        _, *sums = tf.while_loop(
            lambda step, *_: step < self._chunks // workers,
            body,
            (tf.constant(0, tf.int64), *start, zero, zero),
            parallel_iterations=1,
        )
        gradients, loss, hits = sums[:count], sums[count], sums[count + 1]
        if not self._is_ordered:
            sizes = [int(v.shape.num_elements()) for v in self._trainable]
            total = self._cluster.add(tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0))
            if self._program.gradient_accumulation_reduction_method == "running_mean":
                total = total / float(workers)
            gradients = [
                tf.reshape(part, v.shape) for part, v in zip(tf.split(total, sizes), self._trainable)
            ]
        return gradients, loss, hits

    def _add_gradients(
        self, number: Tensor, gradients: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> List[Tensor]:
        """The gradients of one more chunk, the ``number``-th that is added."""
        if self._program.gradient_accumulation_reduction_method != "running_mean":
            return [s + g for s, g in zip(sums, gradients)]
        # acc * n/(n+1) + g/(n+1), as the SDK accumulates: never larger than the largest gradient.
        n = tf.cast(number, tf.float32)
        return [s * (n / (n + 1.0)) + g / (n + 1.0) for s, g in zip(sums, gradients)]

    def _gradient_weight(self) -> float:
        """What a micro-batch's loss counts for in the gradient of its chunk."""
        method = self._program.gradient_accumulation_reduction_method
        if method == "sum":  # the sum over accumulation steps of the mean over replicas
            return 1.0 / self._program.num_replicas
        if method == "running_mean":
            return 1.0 / self._fused
        return 1.0 / self._program.num_micro_batches

    def _chunk(
        self, iterator: TfIterator, update: Tensor, chunk: Tensor
    ) -> Tuple[List[Tensor], Tensor, Tensor, List["Move"]]:
        """Forward and backward of the fused micro-batches: gradients, sum of losses, number of hits, statistics."""
        images, labels, *weights = iterator.get_next()
        images = self._unpack(images)
        if weights:
            # Means over all samples of the weight update become means over those that count.
            weights = [weights[0] * self._padding_scale(update)]
        context = self._context(update * self._chunks + chunk)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._trainable)
            logits = self._network(images, True, self._rounding_of_layers(update, chunk), context)
            losses = self._loss(logits, labels, self._fused, *weights)
            share = self._gradient_weight()
            # In 16 bits the gradients of layers must be those of a micro-batch, and a share of them would underflow.
            objective = tf.reduce_sum(losses) * (
                self._scale if self._arithmetic.is_half else share * self._scale
            )
            if weights and self._program.gradient_accumulation_reduction_method == "sum":
                objective = objective / self._padding_scale(update)
        gradients = tape.gradient(
            objective, self._trainable, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        if self._arithmetic.is_half:
            gradients = [g * share for g in gradients]
        moves = [*self._moves(context, chunk), *self._moves_once(context, chunk)]
        truth = class_numbers(labels)
        right = tf.cast(tf.equal(tf.argmax(logits, -1, output_type=truth.dtype), truth), tf.float32)
        pixels = tf.cast(tf.size(right) // tf.shape(right)[0], tf.float32)
        if weights:
            right = right * tf.reshape(weights[0], [-1] + [1] * (len(right.shape) - 1))
        return gradients, tf.reduce_sum(losses), tf.reduce_sum(right) / pixels, moves

    def _rounding_of_layers(self, update: Tensor, chunk: Tensor) -> Rounding:
        """That of a chunk's activations and their gradients; each micro-batch draws by itself."""
        if self._arithmetic.stochastic_rounding != "ON":
            return Rounding(self._arithmetic)
        micro_batches = chunk * self._fused + tf.range(self._fused, dtype=tf.int64)
        return Rounding(self._arithmetic, streams(self._program.seed, update, micro_batches))

    def _rounding_of_gradients(self, update: Tensor) -> Rounding:
        """That of the weights' gradients, which differ from replica to replica."""
        if self._arithmetic.stochastic_rounding != "ON":
            return Rounding(self._arithmetic)
        return self._rounding_of_weights(update)

    def _rounding_of_weights(self, update: Tensor) -> Rounding:
        """That of what all replicas have in common: weights and the optimizer's state."""
        if self._arithmetic.stochastic_rounding == "OFF":
            return Rounding(self._arithmetic)
        none_of_them = tf.constant([self._program.num_micro_batches], tf.int64)
        return Rounding(self._arithmetic, streams(self._program.seed, update, none_of_them))

    def _padding_scale(self, update: Tensor) -> Tensor:
        """Samples of a weight update over those of them that are no padding, for the run's ``update``-th."""
        p = self._program
        is_last = tf.equal((update + 1) % p.weight_updates_per_epoch, 0)
        real = p.global_batch_size - p.samples_padded_per_epoch
        return tf.where(is_last, p.global_batch_size / real, 1.0)

    def _context(self, chunk: Tensor) -> ExecutionContext:
        """The context of the fused micro-batches of the ``chunk``-th chunk of the run (int64)."""
        number = (chunk * self._fused + tf.range(self._fused, dtype=tf.int64)) % SEED_MASK
        seed = tf.fill([self._fused], tf.constant(self._program.seed & SEED_MASK, tf.int32))
        return ExecutionContext(
            num_groups=self._fused // self._program.dbn_replica_group_size,
            seeds=tf.stack([seed, tf.cast(number, tf.int32)], axis=1),
            num_micro_batches=self._fused,
        )

    def _moves_once(self, context: ExecutionContext, chunk: Tensor) -> List["Move"]:
        """Moving statistics that move once per weight update, in its last chunk.

        Of each replica the statistics are averaged over accumulation; over replicas the mean is the average of
        theirs, and the variance that of all their numbers around it.  What the means of one replica's micro-batches
        differ by stays out of it, as in the public application (``batch_norm.py``).
        """
        p = self._program
        in_chunk = self._fused // p.dbn_replica_group_size
        groups = p.num_replicas // p.dbn_replica_group_size
        replica = (tf.cast(chunk, tf.int32) * in_chunk + tf.range(in_chunk)) % groups

        def of_layer(name: str, mean: Tensor, variance: Tensor, numbers: Tensor) -> Move:
            def settle(sums: Tensor, chunk: Tensor) -> None:
                total = self._sums[name]
                if self._chunks > 1:
                    sums = tf.where(tf.equal(chunk, 0), sums, total + sums)
                    total.assign(sums)
                means, variances = tf.unstack(sums / float(p.gradient_accumulation_count), axis=1)
                new_mean = tf.reduce_mean(means, axis=0)
                new_variance = tf.reduce_mean(variances + tf.math.squared_difference(means, new_mean), axis=0)
                everywhere = numbers * float(p.num_replicas)
                new_variance = new_variance * (everywhere / tf.maximum(everywhere - 1.0, 1.0))
                moving_mean, moving_variance, momentum = self._once[name]
                is_last = tf.equal(chunk, self._chunks - 1)
                for moving, new in ((moving_mean, new_mean), (moving_variance, new_variance)):
                    moved = moving * momentum + new * (1.0 - momentum)
                    moving.assign(tf.where(is_last, moved, moving))

            sums = tf.math.unsorted_segment_sum(tf.stack([mean, variance], axis=1), replica, groups)
            sums.set_shape(self._sums[name].shape)
            return Move(sums, settle)

        return [
            of_layer(layer.name, mean, variance, numbers)
            for layer, mean, variance, numbers in context.update_statistics
        ]

    def _moves(self, context: ExecutionContext, chunk: Tensor) -> List["Move"]:
        """Moving statistics after this chunk, in closed form.

        One accumulation step moves m to momentum * m + (1 - momentum) * mean over replicas of the batch
        statistic (each replica has its own moving statistics; their mean follows the same recursion, as it
        is linear).  After all G steps the statistic of step g counts (1 - momentum) * momentum**(G - 1 - g).
        """
        p = self._program
        group = p.dbn_replica_group_size
        groups = self._fused // group
        position = tf.cast(chunk * self._fused, tf.float32) + tf.range(groups, dtype=tf.float32) * float(
            group
        )
        step = tf.floor(position / float(p.num_replicas))
        count = float(p.gradient_accumulation_count)

        def of_variable(moving: TfVariable, momentum: float, statistic: Tensor) -> Move:
            def settle(share: Tensor, chunk: Tensor) -> None:
                decay = tf.where(tf.equal(chunk, 0), tf.constant(momentum**count, tf.float32), 1.0)
                moving.assign(moving * decay + share)

            weight = tf.pow(momentum, count - 1.0 - step) * ((1.0 - momentum) * group / p.num_replicas)
            share = tf.linalg.matvec(statistic, weight, transpose_a=True)
            share.set_shape(moving.shape)
            return Move(share, settle)

        moves = []
        for layer, mean, variance in context.batch_statistics:
            moving_mean, moving_variance, momentum = self._norms[layer.name]
            moves.append(of_variable(moving_mean, momentum, mean))
            moves.append(of_variable(moving_variance, momentum, variance))
        return moves


class Evaluation:
    """``run(images, labels, weights)``: what one batch adds to the metrics; ``predict(images)``: logits."""

    def __init__(
        self,
        model: KerasModel,
        loss: Optional[LossFunction],
        arithmetic: Arithmetic,
        preprocessing: Preprocessing,
        on_cpu: bool,
    ) -> None:
        network = Network(model, on_cpu=on_cpu, alone=not arithmetic.is_plain)

        def forward(images: Tensor) -> Tensor:
            return network(preprocessing.unpack(images), False, Rounding(arithmetic))

        def sums(images: Tensor, labels: Tensor, weights: Tensor) -> Dict[str, Tensor]:
            assert loss is not None
            logits = forward(images)
            return batch_sums(logits, labels, weights, loss(logits, labels, tf.shape(labels)[0]))

        self.run = tf.function(sums, autograph=False)
        self.predict = tf.function(forward, autograph=False)


class HostSession(Session):
    """Runs Programs through stock TensorFlow; see :class:`ipucnn.sessions.session.Session`.

    Args:
        device: what is reported.
        place: TensorFlow's name of the device, for example ``/CPU:0``.
        config: the options of the run; None: all defaults.
        cluster: the workers that train together; None: this one is alone.
    """

    def __init__(
        self,
        device: DeviceInfo,
        place: str = "/CPU:0",
        config: Optional[RunConfig] = None,
        cluster: Optional[Cluster] = None,
    ) -> None:
        self._config = RunConfig() if config is None else config
        self._cluster = Cluster() if cluster is None else cluster
        self._preprocessing = Preprocessing()
        self.device = device
        self.place = place
        self._on_cpu = device.kind == "cpu"
        self._clock = time.perf_counter
        self._arithmetic = Arithmetic.of(self._config)
        self._precision = self._arithmetic.precision
        self._weights: Optional[Weights] = None
        self.state = TrainState()
        self.program: Optional[Program] = None
        self._loop: Optional[UpdateLoop] = None
        self._evaluation: Optional[Evaluation] = None
        self._large_batches: Optional[LargeBatches] = None
        # Seconds in collectives before weight updates were timed: waiting for who compiled last.
        self._waited_s = 0.0

    def take_preprocessing(self, affine: ChannelAffine) -> bool:
        """Takes it with ``eight_bit_transfer`` or ``accelerator_side_preprocess``."""
        config = self._config
        if not (config.eight_bit_transfer or config.accelerator_side_preprocess):
            return False
        self._preprocessing = Preprocessing(affine, "uint8" if config.eight_bit_transfer else "float32")
        return True

    def compile(
        self,
        model: KerasModel,
        program: Program,
        optimizer: OptimizerSettings,
        loss: LossFunction,
        schedule: Schedule,
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Chooses how many micro-batches to fuse, and makes the loop; with a data set it is traced as well."""
        if program.precision != self._precision:
            raise ValueError(f"a program in {program.precision} for a session in {self._precision}")
        self._schedule = schedule
        with tf.device(self.place), _exceptions():
            weights = self._weights = Weights(model, self._arithmetic)
            names = weights.trainable
            statistics = {name: v for name, v in weights.kept.items() if is_moving_statistic(name)}
            opt = Optimizer(optimizer, [weights.kept[name] for name in names], names, statistics)
            self.state = TrainState(weights.kept, opt.slots, 0)

            def loop_of(program: Program) -> UpdateLoop:
                return UpdateLoop(
                    model,
                    program,
                    opt,
                    loss,
                    weights,
                    self._arithmetic,
                    self._preprocessing,
                    self._on_cpu,
                    self._cluster,
                    self._config.reduction == "ordered",
                )

            if program.fused_micro_batches == 0:
                program = program.with_fused(self._choose_fused(model, program, loop_of, make_dataset))
            check_share(program.num_micro_batches // program.fused_micro_batches, self._cluster.count)
            self.program = program
            self._loop = loop_of(program)
            if self._loop.scaler is not None:
                self.state.slots = {**opt.slots, **self._loop.scaler.slots}
        self._evaluation = Evaluation(model, loss, self._arithmetic, self._preprocessing, self._on_cpu)
        self._large_batches = LargeBatches(model, self._arithmetic, self._preprocessing.unpack, self._on_cpu)
        trace_s, operations = self._trace(make_dataset) if make_dataset is not None else (0.0, 0)
        return self._report(model, trace_s, program.fused_micro_batches, operations)

    def _choose_fused(
        self,
        model: KerasModel,
        program: Program,
        loop_of: Callable[[Program], UpdateLoop],
        make_dataset: Optional[MakeDataset],
    ) -> int:
        """How many micro-batches are computed as one, as worker 0 finds best."""
        per_sample = activation_bytes_per_sample(model)
        memory = self.device.memory_bytes if self._on_cpu else 0
        sharing = max(self._config.max_workers, self._cluster.count)
        fused = self._cluster.first(
            "fused",
            choose_fused(
                program.num_micro_batches,
                program.micro_batch_size,
                program.dbn_replica_group_size,
                per_sample,
                memory,
                sharing,
            ),
        )
        if self._config.fused_micro_batches == MEASURE and make_dataset is not None:
            largest = program.num_micro_batches
            if memory:
                largest = fused_in_memory(per_sample * program.micro_batch_size, memory)
            usable = fusible(program.num_micro_batches, program.dbn_replica_group_size, sharing)
            # Up to four times more, and down to a quarter, are tried; where memory is not there Linux ends the process.
            tried = [d for d in usable if fused / 4 <= d <= max(fused, min(fused * 4, largest))]
            tried = self._cluster.first("tried", tried)
            fused = self._measure_fused(program, fused, tried, loop_of, make_dataset)
        return int(fused)

    def _measure_fused(
        self,
        program: Program,
        usual: int,
        tried: Sequence[int],
        loop_of: Callable[[Program], UpdateLoop],
        make_dataset: MakeDataset,
    ) -> int:
        """Of some numbers that with which a weight update is fastest, on worker 0; the state stays as it is.

        Args:
            usual: what is taken where none of them works.
            tried: the numbers.
            loop_of: makes the loop of a program.
        """
        variables = [*self.state.weights.values(), *self.state.slots.values()]
        before = [variable.numpy() for variable in variables]
        seconds: Dict[int, float] = {}
        for fused in tried:
            loop = loop_of(program.with_fused(fused))
            iterator = self.feed(make_dataset(0, fused * program.micro_batch_size))
            for number in range(1 + MEASURED_UPDATES):
                interrupts.check()
                started = self._clock()
                try:
                    loop.run(iterator, tf.constant([0.0]), tf.constant(0, tf.int64))[0].numpy()
                except (tf.errors.ResourceExhaustedError, tf.errors.OutOfRangeError):
                    if self._cluster.count > 1:
                        raise  # the others wait for what this worker cannot compute
                    break  # too much memory, or too few images
                if number > 0:  # the first one compiles
                    seconds[fused] = min(seconds.get(fused, math.inf), self._clock() - started)
        for variable, value in zip(variables, before):
            variable.assign(value)
        fastest = min(seconds, key=lambda fused: seconds[fused], default=usual)
        return int(self._cluster.first("fastest", fastest))

    @property
    def samples_per_element(self) -> int:
        """Samples of one element of the training data set."""
        assert self.program is not None
        return self.program.fused_micro_batches * self.program.micro_batch_size

    def _trace(self, make_dataset: MakeDataset) -> Tuple[float, int]:
        assert self._loop is not None
        started = time.perf_counter()
        iterator = self.feed(make_dataset(0, self.samples_per_element))
        with tf.device(self.place):
            graph = self._loop.trace(iterator)
        interrupts.check()
        return time.perf_counter() - started, _count_operations(graph)

    def _start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Runs slices of about a second; the first weight update is one of its own, as it compiles."""
        iterator = self.feed(make_dataset(self.state.weight_updates, self.samples_per_element))
        update_s: Optional[float] = None

        def run(end: int) -> TrainedPart:
            nonlocal update_s
            count = 1 if update_s is None else max(1, int(SLICE_S / max(update_s, 1e-9)))
            # A slice ends by the clock, and all workers have to end it alike.
            count = self._cluster.first("slice", count)
            count = min(count, end - self.state.weight_updates)
            part = self._run(iterator, count)
            if update_s is None:
                # The first update tells nothing, it compiles; the second runs alone and is timed.
                update_s, self.first_update_s = SLICE_S, part.timed_s
                self._waited_s = self._collective_s
                return replace(part, timed_s=0.0)
            update_s = part.timed_s / count
            return part

        return run

    @property
    def _collective_s(self) -> float:
        return float(self._cluster.collective_s.numpy()) if self._cluster.count > 1 else 0.0

    @property
    def sharing(self) -> Optional[Sharing]:
        """How the workers shared the weight updates that were timed; None for one worker."""
        if self._cluster.count == 1 or self._loop is None:
            return None
        return Sharing(
            self._cluster.count,
            self._config.reduction,
            self._loop.received_bytes,
            self._collective_s - self._waited_s,
        )

    def any_instance(self, flag: bool) -> bool:
        """Whether it is set on any worker: all of them have to ask."""
        return self._cluster.any_signal(flag)

    @property
    def evaluation_shard(self) -> Tuple[int, int]:
        """(workers, which one this is): each evaluates every so-manieth batch."""
        return self._cluster.count, self._cluster.rank

    def feed(self, dataset: TfDataset) -> Iterator[Batch]:
        """An iterator, which goes on where it stopped."""
        pack = self._preprocessing.pack
        if self._preprocessing.transfer == "uint8":
            packed = tf.autograph.experimental.do_not_convert(lambda images, *rest: (pack(images), *rest))
            dataset = dataset.map(packed)
        return iter(dataset)

    def _run(self, batches: Iterable[Batch], num_weight_updates: int) -> TrainedPart:
        """One call of the compiled loop."""
        assert self._loop is not None and self.program is not None
        first = self.state.weight_updates
        rates = self._schedule(np.arange(first, first + num_weight_updates))
        started = time.perf_counter()
        try:
            with tf.device(self.place), _exceptions(first, first + num_weight_updates):
                found = self._loop.run(batches, tf.constant(rates, tf.float32), tf.constant(first, tf.int64))
                losses, hits = (values.numpy().tolist() for values in found)
        except tf.errors.ResourceExhaustedError:
            fused = self.program.fused_micro_batches
            raise InfeasibleError(
                f"out of memory with {counted(fused, 'fused micro-batch')} of {self.program.micro_batch_size}",
                "use --fused-micro-batches 1"
                if fused > 1
                else "use a smaller --micro-batch-size or --image-size",
            ) from None
        return TrainedPart(losses, hits, time.perf_counter() - started)

    def _has_batch_norm(self) -> bool:
        """Whether the loop found layers with moving statistics."""
        return self._loop is not None and self._loop.has_batch_norm

    def _measure_statistics(self, make_dataset: MakeDataset, num_updates: int) -> None:
        """A forward pass over the batches, in the loop that trains."""
        assert self._loop is not None and self._weights is not None
        iterator = self.feed(make_dataset(self.state.weight_updates, self.samples_per_element))
        with tf.device(self.place), _exceptions():
            self._weights.settle()
            self._loop.collect(iterator, tf.constant(num_updates))
            self._weights.settle()

    def measure_statistics(self, batches: TfDataset) -> None:
        """A pass in the numbers that the session computes in."""
        assert self._large_batches is not None
        weights = self.state.weights
        running = {name: weights[name].numpy() for name in self._large_batches.names}
        with tf.device(self.place), _exceptions():
            self._settle()  # which rounds the running statistics, too
            self.evaluated = {**self.evaluated, **self._large_batches.measure(self.feed(batches))}
        for name, value in running.items():
            weights[name].assign(value)

    def compile_prediction(self, model: KerasModel, batch_shape: Sequence[int]) -> CompilationReport:
        """Traces the forward pass for batches of that shape."""
        self.prepare_evaluation(model, None)
        assert self._evaluation is not None
        started = time.perf_counter()
        images = tf.TensorSpec(batch_shape, self._preprocessing.transfer)
        with tf.device(self.place):
            graph = self._evaluation.predict.get_concrete_function(images).graph
        return self._report(model, time.perf_counter() - started, 1, _count_operations(graph))

    def prepare_evaluation(self, model: KerasModel, loss: Optional[LossFunction]) -> None:
        """Makes the functions that are traced in the first call, and rounds the weights."""
        with tf.device(self.place), _exceptions():
            self._weights = Weights(model, self._arithmetic)
        self._evaluation = Evaluation(model, loss, self._arithmetic, self._preprocessing, self._on_cpu)

    def evaluate(
        self, dataset: Iterable[Batch], stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Sums over batches, in their order; every sample of weight 1 counts exactly once, whoever computes it."""
        if self._evaluation is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before evaluate()")
        totals = MetricTotals()
        with tf.device(self.place), _exceptions():
            self._settle()
            batches = iter(dataset)
            while True:
                interrupts.check()
                batch = next(batches, None)
                if stop is not None and self.any_instance(batch is not None and stop()):
                    raise Stopped
                sums = None
                if batch is not None:
                    found = self._evaluation.run(self._preprocessing.pack(batch[0]), *batch[1:])
                    sums = {name: float(value) for name, value in found.items()}
                everyones = self._cluster.exchange("evaluate", sums)
                for one in everyones:
                    if one is not None:
                        totals.add(one)
                if None in everyones:
                    return totals.result()

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Logits of each element, computed as it is."""
        if self._evaluation is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before predict()")
        with tf.device(self.place), _exceptions():
            self._settle()
            pack = self._preprocessing.pack
            return [self._evaluation.predict(pack(images)).numpy() for images in dataset]

    def _settle(self) -> None:
        """Rounds the weights for whatever is no training; those of a checkpoint may have come in between."""
        assert self._weights is not None
        self._weights.settle()


@contextlib.contextmanager
def _exceptions(first: Optional[int] = None, last: Optional[int] = None) -> Iterator[None]:
    """Says where --fp-exceptions found one.

    Args:
        first, last: weight updates done before and after what runs; None: it is no training.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(rf"{EXCEPTION}(.*?) : Tensor had (\w+)", str(error))
        if found is None:
            raise
        when = "" if last is None else f", in weight updates {(first or 0) + 1} to {last}"
        raise NotFiniteError(
            f"--fp-exceptions: {EXCEPTION}{found.group(1)}{when}: its result is too large, or no number",
            "lower --loss-scaling or the learning rate, or drop --fp-exceptions; checkpoints written before are kept",
        ) from None


def _count_operations(graph: TfGraph) -> int:
    """Operations of a function graph and of the functions it calls."""
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(f.node_def) for f in definition.library.function)
