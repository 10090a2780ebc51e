"""Batches for training on IPUs: static micro-batches, which all executions take from one iterator.

Batches are micro-batches of int32 labels, accumulation step by accumulation step, replica by replica, as on the host.
Batches that are prefetched at the end of one execution begin the next, and events happen at the same weight updates as
on the host.
"""

from typing import Any, Tuple

import tensorflow as tf

from ipucnn.aliases import Tensor, TfDataset
from ipucnn.datasets.pixels import Transfer
from ipucnn.sessions.group import ProcessGroup
from ipucnn.training.losses import padding_scale
from ipucnn.training.program import SEED_MASK, Program


def _micro_batches(dataset: TfDataset, size: int) -> TfDataset:
    """Returns the data set in elements of ``size`` samples."""
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape[0] == size:
        return dataset
    return dataset.unbatch().batch(size, drop_remainder=True)


def training_batches(
    dataset: TfDataset,
    program: Program,
    first_update: int,
    takes_seeds: bool,
    preprocess: Transfer,
    instances: ProcessGroup,
) -> TfDataset:
    """Returns the data set for ``fit``.

    Args:
        dataset: (images, labels[, weights 0 or 1]) of this instance, from ``first_update`` on.
        program: the Program with the batch sizes.
        first_update: the number of the first weight update.
        takes_seeds: whether the model's second input is the seeds of the micro-batch.
        preprocess: how images get to the IPUs.
        instances: the instance of this process, which has every ``count``-th micro-batch, from ``index`` on.

    Returns:
        (images or (images, seeds), labels[, weights]); unless gradients are summed, weights are multiplied by
        :func:`padding_scale`.
    """
    p, size = program, program.micro_batch_size
    run_seed = tf.constant(p.seed & SEED_MASK, tf.int32)

    def prepare(index: Tensor, element: Tuple[Tensor, ...]) -> Tuple[Any, ...]:
        images, labels, *weights = element
        number = first_update * p.num_micro_batches + index * instances.size + instances.rank
        images = tf.ensure_shape(preprocess.pack(images), [size, *images.shape[1:]])
        labels = labels if labels.dtype.is_floating else tf.cast(labels, tf.int32)
        labels = tf.ensure_shape(labels, [size, *labels.shape[1:]])
        inputs = images
        if takes_seeds:
            seed = tf.stack([run_seed, tf.cast(number % SEED_MASK, tf.int32)])
            inputs = (images, tf.tile(seed[None], [size, 1]))
        if not weights:
            return inputs, labels
        counts = tf.ensure_shape(tf.cast(weights[0], tf.float32), [size])
        if p.gradient_accumulation_reduction_method != "sum":
            counts = counts * padding_scale(p, number // p.num_micro_batches)
        return inputs, labels, counts

    prepared = (
        _micro_batches(dataset, size)
        .enumerate()
        .map(tf.autograph.experimental.do_not_convert(prepare), num_parallel_calls=2, deterministic=True)
    )
    return prepared.prefetch(max(4, 2 * p.num_replicas // instances.size))


class BatchStream:
    """Batches for ``fit`` from one iterator: each execution takes as many as it needs.

    ``fit`` iterates over its data set from the beginning (keras/ipu/extensions/data_adapter.py and extensions_base.py
    of graphcore/keras make an infeed for each call), and the SDK's Keras refuses iterators.  Therefore each call
    receives a new data set that takes its elements from one lasting iterator.  The infeed sees resources that functions
    of a data set hold: driver/tools/infeed_iterator.cc of graphcore/tensorflow r2.6 wraps the device for this.

    Args:
        batches: all batches of the run, from the first execution on.
    """

    def __init__(self, batches: TfDataset) -> None:
        with tf.device("/CPU:0"):
            # Kept, because the function below may hold only its resource, which the iterator deletes.
            self._iterator = iterator = iter(batches)

            def following(_: Tensor) -> Tuple[Tensor, ...]:
                element: Tuple[Tensor, ...] = next(iterator)
                return element

            # Made once, because making it traces a function.
            everything = tf.data.Dataset.range(2**62)
            self._rest = everything.map(tf.autograph.experimental.do_not_convert(following))

    def take(self, count: int) -> TfDataset:
        """Returns the next ``count`` elements; reading them consumes them."""
        with tf.device("/CPU:0"):
            return self._rest.take(count)
