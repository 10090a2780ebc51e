"""The loop of weight updates inside one TensorFlow function, and what happens in an accumulation step.

In an accumulation step, every replica computes the gradient of one micro-batch.  Here the micro-batches of a weight
update are computed in groups of fused micro-batches; a group has several accumulation steps, or a part of one:

1. In 16 bits the trained weights are rounded, once per weight update.
2. Each lane takes the samples of its next group from the data set.  The groups that all lanes, devices and processes
   compute at the same time are a turn (``division.py`` says which lane computes which group).
3. :meth:`UpdateLoop._forward_and_backward` computes a group as one batch: the logits, with batch norm by the statistics
   of each micro-batch; the loss of each micro-batch; and one backward pass of their sum, times the loss scale.  It
   weights the groups as ``--gradient-accumulation-reduction-method`` says: their losses before the backward pass in 32
   bits; in 16 bits their gradients after it, so that these do not underflow.  It is traced once for all lanes.
4. :class:`OrderedSums` adds the groups' gradients, losses and right answers in the order of groups, whoever computed
   them, and moves batch norm's moving statistics in the same order.  :class:`AllReducedSums` adds the gradients of
   several processes in MPI's order.  The results of a single group are used as they are.
5. After the last turn, :meth:`UpdateLoop._update` rounds the gradients in 16 bits, divides them by the loss scale, and
   applies them.
"""

import contextlib
import itertools
import math
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor, TfGraph, TfIterator, TfVariable
from ipucnn.models.layers.micro_batches import ExecutionContext
from ipucnn.sessions.host.arithmetic import Rounding, streams
from ipucnn.sessions.host.collectives import Collectives
from ipucnn.sessions.host.division import Division
from ipucnn.sessions.host.network import HostWeights, Network
from ipucnn.sessions.host.statistics import MovingStatistics
from ipucnn.training.losses import Loss, correct, padding_scale
from ipucnn.training.optimizers import LossScaler, Optimizer
from ipucnn.training.program import SEED_MASK, Program

_Result = TypeVar("_Result")
_Parts = TypeVar("_Parts")
# Gradients with fewer numbers are packed into one vector.
LARGE = 1 << 16


class GroupResult(NamedTuple):
    """The result of a group of fused micro-batches, or the sum of such results.

    Attributes:
        gradients: the float32 gradients of the trained weights; packed, if there are several groups.
        loss: the sum of the micro-batches' losses.
        num_right: the number of right answers.
        statistics: the contributions to moving statistics, by name; empty in a sum.
    """

    gradients: List[Tensor]
    loss: Tensor
    num_right: Tensor
    statistics: Dict[str, Tensor]


class Packing:
    """Packs the small ones of a network's gradients into one vector.

    TensorFlow needs many operations for each tensor that it adds in the order of lanes and carries through its loop.
    Large gradients stay alone, because copying them would take longer than these operations.

    Args:
        weights: the trained weights.
    """

    def __init__(self, weights: Sequence[TfVariable]) -> None:
        self._shapes = [[int(n) for n in weight.shape] for weight in weights]
        self._is_small = [math.prod(shape) < LARGE for shape in self._shapes]
        self._large = [shape for shape, is_small in zip(self._shapes, self._is_small) if not is_small]
        self._small_sizes = [math.prod(shape) for shape in itertools.compress(self._shapes, self._is_small)]

    def zeros(self) -> List[Tensor]:
        """Returns packed zeros."""
        shapes = [*self._large, [sum(self._small_sizes)]] if self._small_sizes else self._large
        return [tf.zeros(shape) for shape in shapes]

    def pack(self, gradients: Sequence[Tensor]) -> List[Tensor]:
        """Returns the large gradients, and then the vector of the small ones, if there are any."""
        large = [gradient for gradient, is_small in zip(gradients, self._is_small) if not is_small]
        small = [tf.reshape(gradient, [-1]) for gradient in itertools.compress(gradients, self._is_small)]
        return [*large, tf.concat(small, axis=0)] if small else large

    def unpack(self, packed: Sequence[Tensor]) -> List[Tensor]:
        """Returns the gradients in the order of the weights."""
        large = iter(packed)
        small = iter(tf.split(packed[-1], self._small_sizes) if self._small_sizes else ())
        return [
            tf.reshape(next(small), shape) if is_small else next(large)
            for shape, is_small in zip(self._shapes, self._is_small)
        ]


class UpdateLoop:
    """``run(iterator, rates, first)``: one weight update per entry of ``rates``.

    Args:
        network: the network, with its arithmetic.
        program: the Program.
        division: the division of a weight update.
        optimizer: the optimizer of the kept trainable weights.
        loss: (logits, labels, micro-batches) -> one value per micro-batch.
        weights: the model's weights.
        sums: the order in which results are added.

    Attributes:
        scaler: the automatic loss scaler; None if the Program does not use it.
    """

    def __init__(
        self,
        network: Network,
        program: Program,
        division: Division,
        optimizer: Optimizer,
        loss: Loss,
        weights: HostWeights,
        sums: "OrderedSums",
    ) -> None:
        self._network, self._arithmetic = network, network.arithmetic
        self._division = division
        self._sums = sums
        self._program = program
        self._optimizer = optimizer
        self._loss = loss
        self._weights = weights
        self._trainable = [weights.read[name] for name in weights.trainable]
        self._packing = Packing(self._trainable)
        self._fused = division.fused_micro_batches
        self.scaler = LossScaler(optimizer.num_weights) if program.auto_loss_scaling else None
        self._scale: Union[float, TfVariable] = program.loss_scaling or 1.0
        if self.scaler is not None:
            self._scale = self.scaler.factor
        self._statistics = MovingStatistics(network.model, division, weights)
        self._function = tf.function(self._run, autograph=False)
        self._concrete: Any = None
        # The bytes received from the loop's collectives: the one of each turn, and those after the last turn.
        self._received_bytes: List[int] = []
        self._collecting = tf.function(self._collect, autograph=False)
        self._lane, self._lane_means = _traced(self._group_of_several), _traced(self._means)

    def trace(self, iterator: TfIterator) -> TfGraph:
        """Traces the loop for any number of weight updates, once; returns its graph."""
        if self._concrete is None:
            num_before = len(self._sums.received_bytes)
            self._concrete = self._function.get_concrete_function(
                iterator, tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64)
            )
            self._received_bytes = self._sums.received_bytes[num_before:]
        return self._concrete.graph

    def run(self, iterator: TfIterator, rates: Tensor, first: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns losses and accuracies, float32 (n,), of n weight updates from number ``first`` (int64) on.

        It uses one concrete function, because TensorFlow 2.6 would trace again for each new n.
        """
        self.trace(iterator)
        with self._sums.exceptions():
            return self._concrete(iterator, rates, first)

    def collect(self, iterator: TfIterator, num_updates: Tensor) -> None:
        """Sets the moving statistics to the means of the batch statistics over ``num_updates`` weight updates."""
        with self._sums.exceptions():
            self._collecting(iterator, num_updates)

    @property
    def received_bytes(self) -> int:
        """Returns the bytes that a worker receives from collectives in a weight update, its own part included."""
        every_turn, *last = self._received_bytes
        return every_turn * self._division.num_turns + sum(last)

    @property
    def collected(self) -> List[str]:
        """Returns the names of the moving statistics that :meth:`collect` sets."""
        return self._statistics.names

    def _collect(self, iterator: TfIterator, num_updates: Tensor) -> None:
        """Computes :meth:`collect` inside a TensorFlow function.

        The forward pass is that of training; no weight changes.
        """
        turns = tf.cast(num_updates, tf.int64) * self._division.num_turns

        def add(group: Tensor, parts: List[Tensor], sums: List[Tensor]) -> List[Tensor]:
            return [s + p for s, p in zip(sums, parts)]

        def body(turn: Tensor, sums: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
            return turn + 1, self._sums.in_order(
                turn, self._on_lanes(self._lane_means, turn, iterator), sums, add
            )

        variables = [self._weights.kept[name] for name in self.collected]
        start = [tf.zeros(variable.shape) for variable in variables]
        _, sums = tf.while_loop(
            lambda turn, _: turn < turns, body, (tf.constant(0, tf.int64), start), parallel_iterations=1
        )
        count = tf.cast(num_updates, tf.int64) * self._division.num_groups
        for variable, total in zip(variables, sums):
            variable.assign(total / tf.cast(count, tf.float32))

    def _means(self, batch: Sequence[Tensor], group: Tensor) -> List[Tensor]:
        """Returns the means of the batch statistics of a group."""
        context = self._context(group)
        self._network(batch[0], training=True, context=context)
        return self._statistics.means(context)

    def _on_lanes(
        self, compute: Callable[..., _Result], turn: Tensor, iterator: TfIterator, *more: Tensor
    ) -> List[_Result]:
        """Computes one group on each lane of this process, at the same time, and returns the results.

        Args:
            compute: the function of (the lane's device, batch, number of the group, ``more``).
            turn: scalar int64.
            iterator: the data set, from which the lanes take their batches in order.
            more: further arguments.
        """
        results = []
        for lane, device in enumerate(self._division.lanes):
            with tf.device(device):
                group = self._division.group(turn, lane)
                results.append(compute(device, iterator.get_next(), group, *more))
        return results

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
        """Computes one weight update; returns its mean loss and accuracy."""
        total = float(self._program.num_micro_batches)
        # All replicas share the weights and the optimizer's state, but each replica has its own gradients.
        rounding = self._rounding_of_update(update, ("ON", "RI"))
        self._weights.round_trainable(rounding)
        if self._division.num_groups == 1:
            group = tf.constant(0, tf.int64)
            result = self._forward_and_backward(iterator.get_next(), group, update)
            self._statistics.move(result.statistics, group)
        else:
            result = self._accumulate(iterator, update)
        gradients = result.gradients
        if not self._arithmetic.is_plain:
            gradients = self._weights.round_gradients(gradients, self._rounding_of_update(update, ("ON",)))
        if self.scaler is not None:
            gradients, beyond = self.scaler.unscaled(gradients)
            self.scaler.rescale(beyond, update)
        elif self._scale != 1.0:
            gradients = [g / self._scale for g in gradients]
        rounded = None
        if self._arithmetic.precision == "16.16":
            rounded = lambda values: rounding.all(values, "the weights and the optimizer's state")  # noqa: E731
        mean_loss = result.loss / total
        if self._optimizer.penalties:
            mean_loss += self._optimizer.penalty()
        self._optimizer.apply(gradients, rate, update, rounded)
        return mean_loss, result.num_right / (total * self._program.micro_batch_size)

    def _accumulate(self, iterator: TfIterator, update: Tensor) -> GroupResult:
        """Returns the sum of the results of a weight update's groups."""

        def body(turn: Tensor, sums: GroupResult) -> Tuple[Tensor, GroupResult]:
            results = self._on_lanes(self._lane, turn, iterator, update)
            return turn + 1, self._sums.add_turn(turn, results, sums, self._statistics.move)

        zero = tf.constant(0.0)
        start = GroupResult(self._packing.zeros(), zero, zero, {})
        _, sums = tf.while_loop(
            lambda turn, _: turn < self._division.num_turns,
            body,
            (tf.constant(0, tf.int64), start),
            parallel_iterations=1,
        )
        return sums._replace(gradients=self._packing.unpack(self._sums.total(sums.gradients)))

    def _group_of_several(self, batch: Sequence[Tensor], group: Tensor, update: Tensor) -> GroupResult:
        """Returns the result of one of several groups, with packed gradients."""
        result = self._forward_and_backward(batch, group, update)
        return result._replace(gradients=self._packing.pack(result.gradients))

    def _gradient_weight(self) -> float:
        """Returns the weight of a micro-batch's loss in the gradient of its group."""
        method = self._program.gradient_accumulation_reduction_method
        if method == "sum":  # the sum over accumulation steps of the mean over replicas
            return 1.0 / self._program.num_replicas
        if method == "running_mean":
            return 1.0 / self._fused
        return 1.0 / self._program.num_micro_batches

    def _forward_and_backward(self, batch: Sequence[Tensor], group: Tensor, update: Tensor) -> GroupResult:
        """Runs the forward and backward pass of a group.

        Args:
            batch: its images, labels and, if any, weights.
            group: scalar int64, its number within the weight update.
            update: scalar int64, the number of the weight update.
        """
        images, labels, *weights = batch
        if weights:
            weights = [weights[0] * padding_scale(self._program, update)]
        context = self._context(update * self._division.num_groups + group)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._trainable)
            logits = self._network(images, True, self._rounding_of_layers(update, group), context)
            losses = self._loss(logits, labels, self._fused, *weights)
            gradient_weight = self._gradient_weight()
            # In 16 bits a layer's gradients must have the size of a micro-batch's: if weighted, they would underflow.
            objective = tf.reduce_sum(losses) * (
                self._scale if self._arithmetic.is_half else gradient_weight * self._scale
            )
            if weights and self._program.gradient_accumulation_reduction_method == "sum":
                objective = objective / padding_scale(self._program, update)
        gradients = tape.gradient(
            objective, self._trainable, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        if self._arithmetic.is_half:
            gradients = [g * gradient_weight for g in gradients]
        right = correct(logits, labels)
        pixels = tf.cast(tf.size(right) // tf.shape(right)[0], tf.float32)
        if weights:
            right = right * tf.reshape(weights[0], [-1] + [1] * (len(right.shape) - 1))
        statistics = self._statistics.contributions(context, group)
        return GroupResult(gradients, tf.reduce_sum(losses), tf.reduce_sum(right) / pixels, statistics)

    def _rounding_of_layers(self, update: Tensor, group: Tensor) -> Rounding:
        """Returns the rounding of activations and their gradients; each micro-batch has its own stream."""
        micro_batches = group * self._fused + tf.range(self._fused, dtype=tf.int64)
        return self._rounding(update, micro_batches, ("ON",))

    def _rounding_of_update(self, update: Tensor, modes: Sequence[str]) -> Rounding:
        """Returns the rounding of values that belong to no micro-batch."""
        return self._rounding(update, tf.constant([self._program.num_micro_batches], tf.int64), modes)

    def _rounding(self, update: Tensor, micro_batches: Tensor, modes: Sequence[str]) -> Rounding:
        """Returns a rounding that is stochastic if ``--stochastic-rounding`` is one of ``modes``, else to nearest."""
        if self._arithmetic.stochastic_rounding not in modes:
            return Rounding(self._arithmetic)
        return Rounding(self._arithmetic, streams(self._program.seed, update, micro_batches))

    def _context(self, group: Tensor) -> ExecutionContext:
        """Returns the context of the fused micro-batches of the ``group``-th group of the run (int64)."""
        number = (group * self._fused + tf.range(self._fused, dtype=tf.int64)) % SEED_MASK
        seed = tf.fill([self._fused], tf.constant(self._program.seed & SEED_MASK, tf.int32))
        return ExecutionContext(
            num_groups=self._fused // self._program.dbn_replica_group_size,
            seeds=tf.stack([seed, tf.cast(number, tf.int32)], axis=1),
            num_micro_batches=self._fused,
        )


class OrderedSums:
    """Adds the results of groups in the order of groups.

    So the bytes do not depend on who computes which group.

    Args:
        division: the division of a weight update.
        collectives: the collective operations of the processes; None: this process is alone.
        is_running_mean: whether gradients are averaged rather than added.
    """

    def __init__(self, division: Division, collectives: Optional[Collectives], is_running_mean: bool) -> None:
        self._division, self._collectives = division, collectives
        self._is_running_mean = is_running_mean

    def with_gradients(
        self, number: Tensor, gradients: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> List[Tensor]:
        """Returns the sums with the gradients of one more group, the ``number``-th."""
        if not self._is_running_mean:
            return [s + g for s, g in zip(sums, gradients)]
        # acc * n/(n+1) + g/(n+1), as the SDK accumulates: it never exceeds the largest gradient.
        n = tf.cast(number, tf.float32)
        return [s * (n / (n + 1.0)) + g / (n + 1.0) for s, g in zip(sums, gradients)]

    def exceptions(self) -> ContextManager[None]:
        """Returns a block that raises the exceptions of collective operations."""
        return contextlib.nullcontext() if self._collectives is None else self._collectives.exceptions()

    @property
    def received_bytes(self) -> List[int]:
        """The bytes that a process receives from each collective operation, in the order of tracing."""
        return [] if self._collectives is None else self._collectives.received_bytes

    def in_order(
        self,
        turn: Tensor,
        results: Sequence[_Parts],
        sums: _Parts,
        add: Callable[[Tensor, _Parts, _Parts], _Parts],
    ) -> _Parts:
        """Adds the results of a turn's groups one after the other, as one lane of one process would.

        Args:
            turn: scalar int64.
            results: the result of each lane of this process: a nested structure of float32 tensors.
            sums: the sums to add to.
            add: (number of the group, its result, sums) -> sums.
        """
        division = self._division
        first = turn * division.groups_per_turn
        if division.num_workers == 1 and len(division.devices) == 1:
            for lane, result in enumerate(results):
                sums = _added(first + lane, lane, result, sums, add)
            return sums
        shapes = [[int(n) for n in part.shape] for part in tf.nest.flatten(results[0])]
        sizes = [int(np.prod(shape)) for shape in shapes]
        flat = []
        for device, result in zip(division.lanes, results):
            with tf.device(device):
                flat.append(tf.concat([tf.reshape(part, [-1]) for part in tf.nest.flatten(result)], axis=0))
        gathered = tf.concat(flat, axis=0)
        if self._collectives is not None:
            gathered = self._collectives.gather(gathered)
        gathered = tf.reshape(gathered, [division.num_workers, len(division.lanes), sum(sizes)])

        # A loop keeps the order: TensorFlow would merge a sequence of additions, and choose its own order.
        def body(row: Tensor, sums: _Parts) -> Sequence[object]:
            group = gathered[row % division.num_workers, row // division.num_workers]
            pieces = [tf.reshape(p, shape) for p, shape in zip(tf.split(group, sizes), shapes)]
            return row + 1, add(first + row, tf.nest.pack_sequence_as(results[0], pieces), sums)

        _, total = tf.while_loop(
            lambda row, _: row < division.groups_per_turn,
            body,
            (tf.constant(0, tf.int64), sums),
            parallel_iterations=1,
        )
        added: _Parts = total
        return added

    def add_turn(
        self,
        turn: Tensor,
        results: Sequence[GroupResult],
        sums: GroupResult,
        move: Callable[[Dict[str, Tensor], Tensor], None],
    ) -> GroupResult:
        """Returns the sums after a turn.

        Args:
            turn: scalar int64.
            results: the result of each lane of this process.
            sums: the sums before the turn.
            move: the function that moves statistics by the contributions of a group, given its number.
        """

        def add(group: Tensor, result: GroupResult, sums: GroupResult) -> GroupResult:
            move(result.statistics, group)
            gradients = self.with_gradients(group, result.gradients, sums.gradients)
            return GroupResult(gradients, sums.loss + result.loss, sums.num_right + result.num_right, {})

        return self.in_order(turn, results, sums, add)

    def total(self, gradients: List[Tensor]) -> List[Tensor]:
        """Returns the gradients of the weight update after its last turn."""
        return gradients


class AllReducedSums(OrderedSums):
    """Adds the gradients of this process's groups, and after the last turn, those of all processes in MPI's order.

    Everything else is added in the order of groups.
    """

    def add_turn(
        self,
        turn: Tensor,
        results: Sequence[GroupResult],
        sums: GroupResult,
        move: Callable[[Dict[str, Tensor], Tensor], None],
    ) -> GroupResult:
        """Returns the sums after a turn; those of gradients are this process's."""
        gradients = sums.gradients
        for lane, result in enumerate(results):
            number = turn * len(results) + lane
            gradients = _added(number, lane, result.gradients, gradients, self.with_gradients)
        others = [result._replace(gradients=[]) for result in results]
        added = super().add_turn(turn, others, sums._replace(gradients=[]), move)
        return added._replace(gradients=gradients)

    def total(self, gradients: List[Tensor]) -> List[Tensor]:
        """Returns the sum over processes, or the mean of their running means."""
        assert self._collectives is not None
        sizes = [int(g.shape.num_elements()) for g in gradients]
        total = self._collectives.add(tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0))
        if self._is_running_mean:
            total = total / float(self._division.num_workers)
        return [tf.reshape(part, g.shape) for part, g in zip(tf.split(total, sizes), gradients)]


def sums_of(
    division: Division, collectives: Optional[Collectives], reduction: str, program: Program
) -> OrderedSums:
    """Returns the sums of a Program in the order of ``--reduction``; a process that is alone has only one."""
    kind = OrderedSums if reduction == "ordered" or collectives is None else AllReducedSums
    return kind(division, collectives, program.gradient_accumulation_reduction_method == "running_mean")


def _traced(compute: Callable[..., _Result]) -> Callable[..., _Result]:
    """Returns a function of (device, ...) that computes on that device, and is traced once for each device."""

    def on_device(device: str, *args: object) -> _Result:
        with tf.device(device):
            return compute(*args)

    traced: Callable[..., _Result] = tf.function(on_device, autograph=False)
    return traced


def _added(
    number: Tensor, lane: int, result: _Parts, sums: _Parts, add: Callable[[Tensor, _Parts, _Parts], _Parts]
) -> _Parts:
    """Adds the result of a lane to sums, after those of the lanes before it."""
    if lane == 0:
        return add(number, result, sums)
    # The branch is always taken.  Without it, TensorFlow would merge additions and choose its own order; and it would
    # add large tensors in temporary variables, two of which get the same name (tensorflow/tensorflow#23780).
    added: _Parts = tf.cond(number > 0, lambda: add(number, result, sums), lambda: sums)
    return added
