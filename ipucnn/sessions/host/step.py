"""The compiled part of the host session: weight updates in a loop inside one TensorFlow function.

A weight update over R replicas x G micro-batches of B samples is one gradient over R*G*B samples, except
where a layer mixes samples; batch norm's statistics are therefore computed per micro-batch (or group of
replicas) inside the fused batch.  Micro-batches are ordered as an IPU's replicas take them from the
infeed: accumulation step by accumulation step, replica by replica.
"""

from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from ipucnn.models.layers import BatchNormalization, ExecutionContext, execution_context
from ipucnn.models.names import named_weights
from ipucnn.training.program import Program

SEED_MASK = 0x7FFFFFFF


class UpdateLoop:
    """``run(iterator, rates, first)``: one weight update per entry of ``rates``.

    Args:
        model: functional Keras model with logits as output.
        program: batch arithmetic, with ``fused_micro_batches`` chosen.
        optimizer: ``ipucnn.training.optimizers.Optimizer`` over ``trainable``.
        loss: (logits, labels, micro-batches) -> one value per micro-batch.
        trainable: the tf.Variables the optimizer updates, in its order.
    """

    def __init__(
        self, model: Any, program: Program, optimizer: Any, loss: Any, trainable: Sequence[Any]
    ) -> None:
        self._model = model
        self._program = program
        self._optimizer = optimizer
        self._loss = loss
        self._trainable = list(trainable)
        self._fused = program.fused_micro_batches
        self._chunks = program.num_micro_batches // self._fused
        self._scale = program.loss_scaling or 1.0
        weights = named_weights(model)
        self._norms: Dict[str, Tuple[Any, Any, float]] = {
            layer.name: (
                weights[f"{layer.name}/moving_mean"],
                weights[f"{layer.name}/moving_variance"],
                layer.momentum,
            )
            for layer in model.layers
            if isinstance(layer, BatchNormalization)
        }
        self._function = tf.function(self._run, autograph=False)
        self._concrete: Any = None
        self.collect = tf.function(self._collect, autograph=False)

    def trace(self, iterator: Any) -> Any:
        """Traces the loop for any number of weight updates, once; returns its graph."""
        if self._concrete is None:
            self._concrete = self._function.get_concrete_function(
                iterator, tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64)
            )
        return self._concrete.graph

    def run(self, iterator: Any, rates: Any, first: Any) -> Tuple[Any, Any]:
        """Losses and accuracies, float32 (n,), of n weight updates from number ``first`` (int64) on.

        One concrete function: TensorFlow 2.6 would trace again for each new n.
        """
        self.trace(iterator)
        return self._concrete(iterator, rates, first)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the model has moving statistics."""
        return bool(self._norms)

    def _collect(self, iterator: Any, num_updates: Any) -> None:
        """Sets the moving statistics to the means of the batch statistics over ``num_updates`` weight updates.

        The forward pass is that of training; no weight changes.
        """
        count = tf.cast(num_updates, tf.int64) * self._chunks
        order = list(self._norms.items())
        start = [[tf.zeros(v.shape) for v in moving[:2]] for _, moving in order]

        def body(c: Any, sums: Any) -> Any:
            images = iterator.get_next()[0]
            context = self._context(c)
            with execution_context(context):
                self._model(images, training=True)
            found = {layer.name: (mean, variance) for layer, mean, variance in context.batch_statistics}
            added = [
                [s + tf.reduce_mean(statistic, axis=0) for s, statistic in zip(pair, found[name])]
                for (name, _), pair in zip(order, sums)
            ]
            return c + 1, added

        _, sums = tf.while_loop(
            lambda c, _: c < count, body, (tf.constant(0, tf.int64), start), parallel_iterations=1
        )
        for (_, moving), pair in zip(order, sums):
            for variable, total in zip(moving[:2], pair):
                variable.assign(total / tf.cast(count, tf.float32))

    def _run(self, iterator: Any, rates: Any, first: Any) -> Tuple[Any, Any]:
        count = tf.shape(rates)[0]
        losses = tf.TensorArray(tf.float32, size=count, element_shape=[])
        hits = tf.TensorArray(tf.float32, size=count, element_shape=[])

        def body(i: Any, losses: Any, hits: Any) -> Tuple[Any, Any, Any]:
            loss, hit = self._update(iterator, rates[i], first + tf.cast(i, tf.int64))
            return i + 1, losses.write(i, loss), hits.write(i, hit)

        _, losses, hits = tf.while_loop(
            lambda i, *_: i < count, body, (tf.constant(0), losses, hits), parallel_iterations=1
        )
        return losses.stack(), hits.stack()

    def _update(self, iterator: Any, rate: Any, update: Any) -> Tuple[Any, Any]:
        """One weight update; returns its mean loss and accuracy."""
        total = float(self._program.num_micro_batches)
        if self._chunks == 1:
            gradients, loss, hits = self._chunk(iterator, update, tf.constant(0, tf.int64))
        else:
            gradients, loss, hits = self._accumulate(iterator, update)
        if self._scale != 1.0:
            gradients = [g / self._scale for g in gradients]
        self._optimizer.apply(gradients, rate, update)
        return loss / total, hits / (total * self._program.micro_batch_size)

    def _accumulate(self, iterator: Any, update: Any) -> Tuple[List[Any], Any, Any]:
        running = self._program.gradient_accumulation_reduction_method == "running_mean"

        def body(c: Any, sums: Any, loss: Any, hits: Any) -> Any:
            gradients, chunk_loss, chunk_hits = self._chunk(iterator, update, c)
            if running:
                # acc * n/(n+1) + g/(n+1), as the SDK accumulates: never larger than the largest gradient.
                n = tf.cast(c, tf.float32)
                sums = [s * (n / (n + 1.0)) + g / (n + 1.0) for s, g in zip(sums, gradients)]
            else:
                sums = [s + g for s, g in zip(sums, gradients)]
            return c + 1, sums, loss + chunk_loss, hits + chunk_hits

        start = [tf.zeros(v.shape, v.dtype) for v in self._trainable]
        zero = tf.constant(0.0)
        _, sums, loss, hits = tf.while_loop(
            lambda c, *_: c < self._chunks,
            body,
            (tf.constant(0, tf.int64), start, zero, zero),
            parallel_iterations=1,
        )
        return sums, loss, hits

    def _gradient_weight(self) -> float:
        """What a micro-batch's loss counts for in the gradient of its chunk."""
        method = self._program.gradient_accumulation_reduction_method
        if method == "sum":  # the sum over accumulation steps of the mean over replicas
            return 1.0 / self._program.num_replicas
        if method == "running_mean":
            return 1.0 / self._fused
        return 1.0 / self._program.num_micro_batches

    def _chunk(self, iterator: Any, update: Any, chunk: Any) -> Tuple[List[Any], Any, Any]:
        """Forward and backward of the fused micro-batches: gradients, sum of losses, number of hits."""
        images, labels, *weights = iterator.get_next()
        if weights:
            # Means over all samples of the weight update become means over those that count.
            weights = [weights[0] * self._padding_scale(update)]
        context = self._context(update * self._chunks + chunk)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._trainable)
            with execution_context(context):
                logits = self._model(images, training=True)
            losses = self._loss(logits, labels, self._fused, *weights)
            objective = tf.reduce_sum(losses) * (self._gradient_weight() * self._scale)
            if weights and self._program.gradient_accumulation_reduction_method == "sum":
                objective = objective / self._padding_scale(update)
        gradients = tape.gradient(
            objective, self._trainable, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        self._move_statistics(context, chunk)
        right = tf.cast(tf.equal(tf.argmax(logits, -1, output_type=labels.dtype), labels), tf.float32)
        pixels = tf.cast(tf.size(right) // tf.shape(right)[0], tf.float32)
        if weights:
            right = right * tf.reshape(weights[0], [-1] + [1] * (len(right.shape) - 1))
        return gradients, tf.reduce_sum(losses), tf.reduce_sum(right) / pixels

    def _padding_scale(self, update: Any) -> Any:
        """Samples of a weight update over those of them that are no padding, for the run's ``update``-th."""
        p = self._program
        is_last = tf.equal((update + 1) % p.weight_updates_per_epoch, 0)
        real = p.global_batch_size - p.samples_padded_per_epoch
        return tf.where(is_last, p.global_batch_size / real, 1.0)

    def _context(self, chunk: Any) -> ExecutionContext:
        """The context of the fused micro-batches of the ``chunk``-th chunk of the run (int64)."""
        number = (chunk * self._fused + tf.range(self._fused, dtype=tf.int64)) % SEED_MASK
        seed = tf.fill([self._fused], tf.constant(self._program.seed & SEED_MASK, tf.int32))
        return ExecutionContext(
            num_groups=self._fused // self._program.dbn_replica_group_size,
            seeds=tf.stack([seed, tf.cast(number, tf.int32)], axis=1),
            num_micro_batches=self._fused,
        )

    def _move_statistics(self, context: ExecutionContext, chunk: Any) -> None:
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
        for layer, mean, variance in context.batch_statistics:
            moving_mean, moving_variance, momentum = self._norms[layer.name]
            count = float(p.gradient_accumulation_count)
            weight = tf.pow(momentum, count - 1.0 - step) * ((1.0 - momentum) * group / p.num_replicas)
            decay = tf.where(tf.equal(chunk, 0), tf.constant(momentum**count, tf.float32), 1.0)
            for moving, statistic in ((moving_mean, mean), (moving_variance, variance)):
                moving.assign(moving * decay + tf.linalg.matvec(statistic, weight, transpose_a=True))


class Evaluation:
    """``run(images, labels, weights)``: what one batch adds to the metrics; ``predict(images)``: logits."""

    def __init__(self, model: Any, loss: Any) -> None:
        from ipucnn.training.metrics import batch_sums

        def sums(images: Any, labels: Any, weights: Any) -> Dict[str, Any]:
            logits = model(images, training=False)
            return batch_sums(logits, labels, weights, loss(logits, labels, tf.shape(labels)[0]))

        self.run = tf.function(sums, autograph=False)
        self.predict = tf.function(lambda images: model(images, training=False), autograph=False)
