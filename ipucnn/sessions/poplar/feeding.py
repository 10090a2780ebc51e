"""Training batches as IPUs take them: static micro-batches of int32 labels, in the order of the replicas.

Micro-batches come accumulation step by accumulation step, replica by replica, as on the host.
"""

from typing import Any, Optional, Tuple

import tensorflow as tf

from ipucnn.sessions.poplar.model import compute_type
from ipucnn.sessions.poplar.popdist import Instances
from ipucnn.training.program import Program

SEED_MASK = 0x7FFFFFFF


def transfer_type(config: Any, preprocess: Optional[Tuple[Any, Any, str]]) -> str:
    """Type of images on the way to the IPU; ``preprocess`` as ``Device`` has it."""
    return compute_type(config.precision) if preprocess is None else preprocess[2]


def micro_batches(dataset: Any, size: int) -> Any:
    """A data set in elements of ``size`` samples."""
    first = tf.nest.flatten(dataset.element_spec)[0]
    if first.shape[0] == size:
        return dataset
    return dataset.unbatch().batch(size, drop_remainder=True)


def training_batches(
    dataset: Any, program: Program, first_update: int, takes_seeds: bool, transfer: str, instances: Instances
) -> Any:
    """What ``fit`` is given.

    Args:
        dataset: (images, labels[, weights 0 or 1]) of this instance, from a weight update on.
        program: whose micro-batches they are.
        first_update: that weight update.
        takes_seeds: the model's second input is the seeds of the micro-batch.
        transfer: type of the images on the way to the IPU.
        instances: whose micro-batches these are: every ``count``-th of all, from ``index`` on.

    Returns:
        (images or (images, seeds), labels[, weights]): the weights of the last weight update of an epoch are raised
        so that a mean over all its samples is one over those that count.
    """
    p, size = program, program.micro_batch_size
    run_seed = tf.constant(p.seed & SEED_MASK, tf.int32)
    real = p.global_batch_size - p.samples_padded_per_epoch
    raised = p.global_batch_size / max(real, 1)

    def prepare(index: Any, element: Any) -> Any:
        images, labels, *weights = element
        number = first_update * p.num_micro_batches + index * instances.count + instances.index
        images = tf.cast(tf.round(images), tf.uint8) if transfer == "uint8" else tf.cast(images, transfer)
        images = tf.ensure_shape(images, [size, *images.shape[1:]])
        labels = tf.ensure_shape(tf.cast(labels, tf.int32), [size, *labels.shape[1:]])
        inputs = images
        if takes_seeds:
            seed = tf.stack([run_seed, tf.cast(number % SEED_MASK, tf.int32)])
            inputs = (images, tf.tile(seed[None], [size, 1]))
        if not weights:
            return inputs, labels
        counts = tf.ensure_shape(tf.cast(weights[0], tf.float32), [size])
        if p.gradient_accumulation_reduction_method != "sum":
            update = number // p.num_micro_batches
            is_last = tf.equal((update + 1) % p.weight_updates_per_epoch, 0)
            counts = counts * tf.where(is_last, tf.constant(raised, tf.float32), 1.0)
        return inputs, labels, counts

    def call(index: Any, *element: Any) -> Any:
        return prepare(index, element[0] if len(element) == 1 else element)

    prepared = (
        micro_batches(dataset, size)
        .enumerate()
        .map(tf.autograph.experimental.do_not_convert(call), num_parallel_calls=2, deterministic=True)
    )
    return prepared.prefetch(4)
