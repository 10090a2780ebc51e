"""How many micro-batches the host computes as one.

More samples per operation cost less overhead each, until the activations leave the cache or the memory.
The choice changes nothing but the order of floating-point sums.
"""

from typing import Any

from ipucnn.training.batching import divisors

# A choice by trial on two cores: EfficientNet-B0 at 32x32 gained up to 128 samples and lost again at 256.
TARGET_SAMPLES = 128
TARGET_BYTES = 96 * 2**20
MEMORY_FRACTION = 0.25
# Layer outputs, their gradients and the temporaries of one layer, over the layer outputs alone.
TRAINING_FACTOR = 4


def activation_bytes_per_sample(model: Any) -> int:
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
    num_micro_batches: int, micro_batch_size: int, group_size: int, bytes_per_sample: int, memory_bytes: int
) -> int:
    """The number of micro-batches to fuse: a divisor of those in a weight update.

    Args:
        num_micro_batches: micro-batches per weight update over all replicas.
        micro_batch_size: samples.
        group_size: replicas of a distributed batch norm group; the result is a multiple of it.
        bytes_per_sample: see :func:`activation_bytes_per_sample`.
        memory_bytes: of the host, 0 if unknown.
    """
    micro_batch_bytes = max(1, bytes_per_sample * micro_batch_size)
    by_speed = max(TARGET_SAMPLES // micro_batch_size, TARGET_BYTES // micro_batch_bytes)
    limit = by_speed
    if memory_bytes:
        limit = min(limit, int(memory_bytes * MEMORY_FRACTION) // (TRAINING_FACTOR * micro_batch_bytes))
    usable = [d for d in divisors(num_micro_batches) if d % group_size == 0]
    return max([d for d in usable if d <= limit] or usable[:1])
