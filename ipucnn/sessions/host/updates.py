"""The loop of weight updates inside one TensorFlow function: fused batches, their gradients, and moving statistics.

A fused batch is a group of fused micro-batches, which are computed as one batch; ``division.py`` chooses their number.
Workers share the fused batches of a weight update: their results are gathered, and each worker adds them up in the
order of fused batches.  Several GPUs of one process share its fused batches in the same way: each computes one at a
time, and the first one adds them up.  A CPU computes several in parallel, as if it were several devices.
"""

import contextlib
from typing import Any, Callable, ContextManager, List, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor, TfGraph, TfIterator, TfVariable
from ipucnn.models.layers.micro_batches import ExecutionContext
from ipucnn.sessions.host.arithmetic import Rounding, streams
from ipucnn.sessions.host.collectives import Collectives
from ipucnn.sessions.host.division import Division
from ipucnn.sessions.host.network import Network, Weights
from ipucnn.sessions.host.statistics import Contribution, MovingStatistics
from ipucnn.training.losses import Loss, correct, padding_scale
from ipucnn.training.optimizers import LossScaler, Optimizer
from ipucnn.training.program import SEED_MASK, Program

_Result = TypeVar("_Result")
AddParts = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class UpdateLoop:
    """``run(iterator, rates, first)``: one weight update per entry of ``rates``.

    Args:
        network: the network, with its arithmetic.
        program: the Program.
        division: the division of a weight update.
        optimizer: the optimizer of the kept trainable weights.
        loss: (logits, labels, micro-batches) -> one value per micro-batch.
        weights: the model's weights.
        collectives: the collective operations of the processes; None: this process is alone.
        reduction: how processes add their gradients: ordered (in the order of fused batches) or allreduce.

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
        weights: Weights,
        collectives: Optional[Collectives] = None,
        reduction: str = "ordered",
    ) -> None:
        self._network, self._arithmetic = network, network.arithmetic
        self._division = division
        self._collectives = collectives
        # The collectives that add gradients in any order; None: they are added in the order of fused batches.
        self._all_reduce = None if reduction == "ordered" else collectives
        self._program = program
        self._optimizer = optimizer
        self._loss = loss
        self._weights = weights
        self._trainable = [weights.read[name] for name in weights.trainable]
        self._fused = division.fused_micro_batches
        self.scaler = LossScaler(optimizer.num_weights) if program.auto_loss_scaling else None
        self._scale: Union[float, TfVariable] = program.loss_scaling or 1.0
        if self.scaler is not None:
            self._scale = self.scaler.factor
        self._statistics = MovingStatistics(network.model, division, weights)
        self._function = tf.function(self._run, autograph=False)
        self._concrete: Any = None
        # The bytes received from the loop's collectives: the one of each step, and those after the last step.
        self._received_bytes: List[int] = []
        self._collecting = tf.function(self._collect, autograph=False)

    def trace(self, iterator: TfIterator) -> TfGraph:
        """Traces the loop for any number of weight updates, once; returns its graph."""
        if self._concrete is None:
            received = [] if self._collectives is None else self._collectives.received_bytes
            num_before = len(received)
            self._concrete = self._function.get_concrete_function(
                iterator, tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64)
            )
            self._received_bytes = received[num_before:]
        return self._concrete.graph

    def run(self, iterator: TfIterator, rates: Tensor, first: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns losses and accuracies, float32 (n,), of n weight updates from number ``first`` (int64) on.

        It uses one concrete function, because TensorFlow 2.6 would trace again for each new n.
        """
        self.trace(iterator)
        with self._exceptions():
            return self._concrete(iterator, rates, first)

    def collect(self, iterator: TfIterator, num_updates: Tensor) -> None:
        """Sets the moving statistics to the means of the batch statistics over ``num_updates`` weight updates."""
        with self._exceptions():
            self._collecting(iterator, num_updates)

    def _exceptions(self) -> ContextManager[None]:
        return contextlib.nullcontext() if self._collectives is None else self._collectives.exceptions()

    @property
    def received_bytes(self) -> int:
        """Returns the bytes that a worker receives from collectives in a weight update, its own part included."""
        every_step, *last = self._received_bytes
        return every_step * self._division.num_steps + sum(last)

    @property
    def collected(self) -> List[str]:
        """Returns the names of the moving statistics that :meth:`collect` sets."""
        return self._statistics.names

    def _collect(self, iterator: TfIterator, num_updates: Tensor) -> None:
        """Computes :meth:`collect` inside a TensorFlow function.

        The forward pass is that of training; no weight changes.
        """
        steps = tf.cast(num_updates, tf.int64) * self._division.num_steps

        def means(fused_batch: Tensor) -> List[Tensor]:
            images, context = iterator.get_next()[0], self._context(fused_batch)
            self._network(images, training=True, context=context)
            return self._statistics.means(context)

        def body(step: Tensor, *sums: Tensor) -> Tuple[Tensor, ...]:
            parts = self._on_devices(step, means)
            added = self._in_order(
                step, parts, sums, lambda _, parts, sums: [s + p for s, p in zip(sums, parts)]
            )
            return (step + 1, *added)

        variables = [self._weights.kept[name] for name in self.collected]
        start = [tf.zeros(variable.shape) for variable in variables]
        _, *sums = tf.while_loop(
            lambda step, *_: step < steps, body, (tf.constant(0, tf.int64), *start), parallel_iterations=1
        )
        count = tf.cast(num_updates, tf.int64) * self._division.num_groups
        for variable, total in zip(variables, sums):
            variable.assign(total / tf.cast(count, tf.float32))

    def _on_devices(self, step: Tensor, compute: Callable[[Tensor], _Result]) -> List[_Result]:
        """Computes one fused batch on each of this worker's devices, at the same time, and returns the results.

        A step has one fused batch for each device of each worker.  Those of the first device of all workers come first,
        in the order of workers, then those of the second device, and so on.

        Args:
            step: scalar int64.
            compute: the function from a fused batch's number to its result.
        """
        results = []
        for lane, device in enumerate(self._division.lanes):
            with tf.device(device):
                results.append(compute(self._division.group(step, lane)))
        return results

    def _in_order(
        self, step: Tensor, results: Sequence[Sequence[Tensor]], sums: Sequence[Tensor], add: AddParts
    ) -> Sequence[Tensor]:
        """Adds the results of a step's fused batches to sums, one after the other, as one device of one worker would.

        Args:
            step: scalar int64.
            results: the float32 parts of the fused batch of each of this worker's devices.
            sums: the sums to add to.
            add: (fused batch's number, its parts, sums) -> sums.
        """
        division = self._division
        workers, devices, batches_per_step = (
            division.num_workers,
            len(division.lanes),
            division.groups_per_step,
        )
        if workers == 1 and len(division.devices) == 1:
            for number, parts in enumerate(results):
                sums = self._added(step * batches_per_step + number, number, parts, sums, add)
            return sums
        shapes = [[int(n) for n in part.shape] for part in results[0]]
        sizes = [int(np.prod(shape)) for shape in shapes]
        flat = []
        for device, parts in zip(division.lanes, results):
            with tf.device(device):
                flat.append(tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0))
        gathered = tf.concat(flat, axis=0)
        if self._collectives is not None:
            gathered = self._collectives.gather(gathered)
        gathered = tf.reshape(gathered, [workers, devices, sum(sizes)])

        # A loop keeps the order: TensorFlow would merge a sequence of additions, and choose its own order.
        def body(row: Tensor, *sums: Tensor) -> Tuple[Tensor, ...]:
            fused_batch = gathered[row % workers, row // workers]
            pieces = [tf.reshape(p, shape) for p, shape in zip(tf.split(fused_batch, sizes), shapes)]
            return (row + 1, *add(step * batches_per_step + row, pieces, sums))

        _, *sums = tf.while_loop(
            lambda row, *_: row < batches_per_step,
            body,
            (tf.constant(0, tf.int64), *sums),
            parallel_iterations=1,
        )
        return sums

    def _added(
        self, fused_batch: Tensor, number: int, parts: Sequence[Tensor], sums: Sequence[Tensor], add: AddParts
    ) -> Sequence[Tensor]:
        """Adds the parts of a fused batch, the ``number``-th of its step, to sums."""
        if number == 0:
            return add(fused_batch, parts, sums)
        # The branch is always taken.  Without it, TensorFlow would merge additions and choose its own order; and it
        # would add large tensors in temporary variables, two of which get the same name (tensorflow/tensorflow#23780).
        return tf.cond(fused_batch > 0, lambda: tuple(add(fused_batch, parts, sums)), lambda: tuple(sums))

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
            fused_batch = tf.constant(0, tf.int64)
            gradients, loss, num_right, contributions = self._forward_and_backward(
                iterator, update, fused_batch
            )
            for contribution in contributions:
                contribution.apply(contribution.statistic, fused_batch)
        else:
            gradients, loss, num_right = self._accumulate(iterator, update)
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
        self._optimizer.apply(gradients, rate, update, rounded)
        return loss / total, num_right / (total * self._program.micro_batch_size)

    def _accumulate(self, iterator: TfIterator, update: Tensor) -> Tuple[List[Tensor], Tensor, Tensor]:
        """Returns the gradients, the sum of losses and the number of right answers of a weight update.

        The loop's sums are in this order: one sum for each gradient, then loss, then right answers.  Losses, right
        answers and contributions to moving statistics are gathered from all devices and workers.  Gradients are
        gathered with them if they are added in the order of fused batches.
        """
        workers, num_gradients = self._division.num_workers, len(self._trainable)
        num_gathered = num_gradients if self._all_reduce is None else 0

        def body(step: Tensor, *sums: Tensor) -> Tuple[Tensor, ...]:
            results = self._on_devices(
                step, lambda fused_batch: self._forward_and_backward(iterator, update, fused_batch)
            )
            contributions = results[0][-1]
            loss_right_statistics = [
                [loss, num_right, *(part.statistic for part in parts)]
                for _, loss, num_right, parts in results
            ]

            def add(fused_batch: Tensor, parts: Sequence[Tensor], sums: Sequence[Tensor]) -> List[Tensor]:
                loss, num_right, *statistics = parts[num_gathered:]
                sum_of_losses, sum_right = sums[num_gathered:]
                for contribution, statistic in zip(contributions, statistics):
                    contribution.apply(statistic, fused_batch)
                gradients = self._add_gradients(fused_batch, parts[:num_gathered], sums[:num_gathered])
                return [*gradients, sum_of_losses + loss, sum_right + num_right]

            if self._all_reduce is None:
                parts = [[*gradients, *more] for (gradients, *_), more in zip(results, loss_right_statistics)]
                return (step + 1, *self._in_order(step, parts, sums, add))
            added: Sequence[Tensor] = sums[:num_gradients]
            for number, (gradients, *_) in enumerate(results):
                batch_of_worker = step * len(results) + number
                added = self._added(batch_of_worker, number, gradients, added, self._add_gradients)
            return (step + 1, *added, *self._in_order(step, loss_right_statistics, sums[num_gradients:], add))

        start = [tf.zeros(v.shape, v.dtype) for v in self._trainable]
        zero = tf.constant(0.0)
        _, *sums = tf.while_loop(
            lambda step, *_: step < self._division.num_steps,
            body,
            (tf.constant(0, tf.int64), *start, zero, zero),
            parallel_iterations=1,
        )
        *gradients, loss, num_right = sums
        if self._all_reduce is not None:
            sizes = [int(v.shape.num_elements()) for v in self._trainable]
            total = self._all_reduce.add(tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0))
            if self._program.gradient_accumulation_reduction_method == "running_mean":
                total = total / float(workers)
            gradients = [
                tf.reshape(part, v.shape) for part, v in zip(tf.split(total, sizes), self._trainable)
            ]
        return gradients, loss, num_right

    def _add_gradients(
        self, number: Tensor, gradients: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> List[Tensor]:
        """Adds the gradients of one more fused batch, the ``number``-th, to sums."""
        if self._program.gradient_accumulation_reduction_method != "running_mean":
            return [s + g for s, g in zip(sums, gradients)]
        # acc * n/(n+1) + g/(n+1), as the SDK accumulates: it never exceeds the largest gradient.
        n = tf.cast(number, tf.float32)
        return [s * (n / (n + 1.0)) + g / (n + 1.0) for s, g in zip(sums, gradients)]

    def _gradient_weight(self) -> float:
        """Returns the weight of a micro-batch's loss in the gradient of its fused batch."""
        method = self._program.gradient_accumulation_reduction_method
        if method == "sum":  # the sum over accumulation steps of the mean over replicas
            return 1.0 / self._program.num_replicas
        if method == "running_mean":
            return 1.0 / self._fused
        return 1.0 / self._program.num_micro_batches

    def _forward_and_backward(
        self, iterator: TfIterator, update: Tensor, fused_batch: Tensor
    ) -> Tuple[List[Tensor], Tensor, Tensor, List[Contribution]]:
        """Runs the forward and backward pass of a fused batch.

        Returns:
            Gradients, sum of losses, number of right answers, and contributions to moving statistics.
        """
        images, labels, *weights = iterator.get_next()
        if weights:
            weights = [weights[0] * padding_scale(self._program, update)]
        context = self._context(update * self._division.num_groups + fused_batch)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._trainable)
            logits = self._network(images, True, self._rounding_of_layers(update, fused_batch), context)
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
        return (
            gradients,
            tf.reduce_sum(losses),
            tf.reduce_sum(right) / pixels,
            self._statistics.contributions(context, fused_batch),
        )

    def _rounding_of_layers(self, update: Tensor, fused_batch: Tensor) -> Rounding:
        """Returns the rounding of activations and their gradients; each micro-batch has its own stream."""
        micro_batches = fused_batch * self._fused + tf.range(self._fused, dtype=tf.int64)
        return self._rounding(update, micro_batches, ("ON",))

    def _rounding_of_update(self, update: Tensor, modes: Sequence[str]) -> Rounding:
        """Returns the rounding of values that belong to no micro-batch."""
        return self._rounding(update, tf.constant([self._program.num_micro_batches], tf.int64), modes)

    def _rounding(self, update: Tensor, micro_batches: Tensor, modes: Sequence[str]) -> Rounding:
        """Returns a rounding that is stochastic if ``--stochastic-rounding`` is one of ``modes``, else to nearest."""
        if self._arithmetic.stochastic_rounding not in modes:
            return Rounding(self._arithmetic)
        return Rounding(self._arithmetic, streams(self._program.seed, update, micro_batches))

    def _context(self, fused_batch: Tensor) -> ExecutionContext:
        """Returns the context of the fused micro-batches of the ``fused_batch``-th fused batch of the run (int64)."""
        number = (fused_batch * self._fused + tf.range(self._fused, dtype=tf.int64)) % SEED_MASK
        seed = tf.fill([self._fused], tf.constant(self._program.seed & SEED_MASK, tf.int32))
        return ExecutionContext(
            num_groups=self._fused // self._program.dbn_replica_group_size,
            seeds=tf.stack([seed, tf.cast(number, tf.int32)], axis=1),
            num_micro_batches=self._fused,
        )
