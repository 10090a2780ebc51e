"""Divides a weight update over devices, into groups of fused micro-batches, and into groups computed in parallel.

A chunk is a group of fused micro-batches: they are computed as one batch.  A lane computes one chunk at a time, in
parallel with the other lanes.  The choices change a result only by the order of floating-point sums.  They are the same
on every machine, except for the number of lanes.
"""

from typing import List, NamedTuple

from ipucnn.training.batching import divisors

# Sizes of a group of fused micro-batches.  More samples per operation cost less overhead per sample, until the
# activations no longer fit into the cache or the memory.  The size changes only the order of floating-point sums.
# Measured on two cores: EfficientNet-B0 at 32x32 gained up to 128 samples and lost again at 256.
# Groups that are computed in parallel have this size each: two of 128 samples were a fifth faster than two of 64.
TARGET_SAMPLES = 128
TARGET_BYTES = 96 * 2**20
MEMORY_FRACTION = 0.25
# Memory for layer outputs, their gradients and the temporaries of one layer, divided by that for layer outputs alone.
TRAINING_FACTOR = 4


class Capacity(NamedTuple):
    """The capacity that every worker has: the minimum over all workers.

    Attributes:
        devices: the number of devices that may take part in training.
        operations: the number of parallel operations that keep all cores of a CPU busy; 1 on GPUs.
        memory_bytes: the machine's memory; 0 if unknown, or on GPUs.
        bytes_per_sample: the size of all layer outputs of the network for one sample.
    """

    devices: int = 1
    operations: int = 1
    memory_bytes: int = 0
    bytes_per_sample: int = 0

    def trained(self, samples: int) -> int:
        """Returns the maximum number of groups of ``samples`` samples each that are trained in parallel."""
        return self.evaluated(TRAINING_FACTOR * samples)

    def evaluated(self, samples: int) -> int:
        """Returns the number of batches of ``samples`` samples evaluated in parallel, without a backward pass."""
        needed = self.bytes_per_sample * samples
        if not self.memory_bytes or not needed:
            return self.operations
        return max(1, min(self.operations, int(self.memory_bytes * MEMORY_FRACTION) // needed))


def choose_devices(units: int, devices: int, workers: int, max_workers: int, is_fused: bool) -> int:
    """Returns the largest number of devices per worker that can share a weight update evenly.

    Args:
        units: the number of groups of fused micro-batches, or of the smallest groups that cannot be split.
        devices: the number of devices of each worker.
        workers: the number of workers.
        max_workers: the number of workers that may share a weight update later.
        is_fused: whether units are groups of fused micro-batches.
    """
    totals = [n for n in divisors(units) if n % workers == 0]
    if not is_fused and max_workers > 1:
        totals = [n for n in totals if max_workers % n == 0]
    return max([n // workers for n in totals if n // workers <= devices], default=1)


def choose_lanes(chunks: int, most: int, workers: int) -> int:
    """Returns the number of groups of fused micro-batches that a worker computes in parallel.

    It is the largest number up to ``most`` with which all workers share the groups of a weight update evenly.
    """
    return max(n for n in divisors(chunks) if n <= most and (n == 1 or chunks % (n * workers) == 0))


def choose_fused(
    num_micro_batches: int,
    micro_batch_size: int,
    group_size: int,
    bytes_per_sample: int,
    memory_bytes: int,
    num_sharing: int = 1,
    pairs: bool = False,
) -> int:
    """Returns the number of micro-batches to fuse: a divisor of those in a weight update.

    Args:
        num_micro_batches: micro-batches per weight update over all replicas.
        micro_batch_size: samples per micro-batch.
        group_size: replicas of a distributed batch norm group; the result is a multiple of it.
        bytes_per_sample: see :func:`activation_bytes_per_sample`.
        memory_bytes: the host's memory, 0 if unknown.
        num_sharing: the number of workers that share the groups evenly.
        pairs: whether to allow for two groups in parallel, if the micro-batches can be halved.  This does not depend
            on the cores of a machine, so the groups are the same on all machines.
    """
    micro_batch_bytes = max(1, bytes_per_sample * micro_batch_size)
    by_speed = max(TARGET_SAMPLES // micro_batch_size, TARGET_BYTES // micro_batch_bytes)
    limit = by_speed
    halves = fusible(num_micro_batches, group_size, 2 * num_sharing) if pairs else []
    if memory_bytes:
        limit = min(limit, fused_in_memory(micro_batch_bytes, memory_bytes) // (2 if halves else 1))
    usable = halves or fusible(num_micro_batches, group_size, num_sharing)
    return max([d for d in usable if d <= limit] or usable[:1])


def similar_to(
    fused: int,
    num_micro_batches: int,
    micro_batch_size: int,
    group_size: int,
    bytes_per_sample: int,
    memory_bytes: int,
    num_sharing: int,
) -> List[int]:
    """Returns the numbers of fused micro-batches to try: from a quarter of ``fused`` to four times as many.

    The arguments are those of :func:`choose_fused`.  Larger numbers are limited by memory, because Linux ends a process
    that runs out of it.
    """
    largest = num_micro_batches
    if memory_bytes:
        largest = fused_in_memory(bytes_per_sample * micro_batch_size, memory_bytes)
    usable = fusible(num_micro_batches, group_size, num_sharing)
    return [d for d in usable if fused / 4 <= d <= max(fused, min(fused * 4, largest))]


def fusible(num_micro_batches: int, group_size: int, num_sharing: int) -> List[int]:
    """Returns the numbers of micro-batches whose groups ``num_sharing`` workers can share evenly."""
    groups = num_micro_batches // group_size
    return [d * group_size for d in divisors(groups) if groups // d % num_sharing == 0]


def fused_in_memory(micro_batch_bytes: int, memory_bytes: int) -> int:
    """Returns the maximum number of fused micro-batches that fits into memory.

    Args:
        micro_batch_bytes: the size of all layer outputs for one micro-batch.
        memory_bytes: the host's memory.
    """
    return int(memory_bytes * MEMORY_FRACTION) // (TRAINING_FACTOR * max(1, micro_batch_bytes))
