"""How a weight update is divided: over devices, into fused micro-batches, and into lanes that run side by side.

A chunk is some micro-batches that are computed as one batch.  Nothing here changes a result but by the order of
floating-point sums, and the same numbers come out on every machine, but for lanes.
"""

from typing import List, NamedTuple

from ipucnn.training.batching import divisors

# How many micro-batches are computed as one: more samples per operation cost less overhead each, until the activations
# leave the cache or the memory.  It changes nothing but the order of floating-point sums.
# A choice by trial on two cores: EfficientNet-B0 at 32x32 gained up to 128 samples and lost again at 256.
# Chunks that are computed side by side are as large each: two of 128 samples were a fifth faster than two of 64.
TARGET_SAMPLES = 128
TARGET_BYTES = 96 * 2**20
MEMORY_FRACTION = 0.25
# Layer outputs, their gradients and the temporaries of one layer, over the layer outputs alone.
TRAINING_FACTOR = 4


class Capacity(NamedTuple):
    """What each worker can do: the least that one of them can.

    Attributes:
        devices: that may take part in training.
        operations: that keep all cores of a CPU busy; 1 on GPUs.
        memory_bytes: of the machine; 0 if unknown, or on GPUs.
        bytes_per_sample: of all layer outputs of the network.
    """

    devices: int = 1
    operations: int = 1
    memory_bytes: int = 0
    bytes_per_sample: int = 0

    def trained(self, samples: int) -> int:
        """How many chunks of so many samples are trained side by side at most."""
        return self.evaluated(TRAINING_FACTOR * samples)

    def evaluated(self, samples: int) -> int:
        """How many batches of so many samples are evaluated side by side; there is no backward pass."""
        needed = self.bytes_per_sample * samples
        if not self.memory_bytes or not needed:
            return self.operations
        return max(1, min(self.operations, int(self.memory_bytes * MEMORY_FRACTION) // needed))


def choose_devices(units: int, devices: int, workers: int, max_workers: int, is_fused: bool) -> int:
    """The most devices of a worker that can share a weight update evenly.

    Args:
        units: chunks of the weight update, or groups of micro-batches that are computed together in any case.
        devices: of the worker.
        workers: that there are.
        max_workers: that are to share a weight update later.
        is_fused: whether units are chunks.
    """
    together = [n for n in divisors(units) if n % workers == 0]
    if not is_fused and max_workers > 1:
        together = [n for n in together if max_workers % n == 0]
    return max([n // workers for n in together if n // workers <= devices], default=1)


def choose_lanes(chunks: int, most: int, workers: int) -> int:
    """How many chunks of a weight update run side by side: at most so many, which all workers can share evenly."""
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
    """The number of micro-batches to fuse: a divisor of those in a weight update.

    Args:
        num_micro_batches: micro-batches per weight update over all replicas.
        micro_batch_size: samples.
        group_size: replicas of a distributed batch norm group; the result is a multiple of it.
        bytes_per_sample: see :func:`activation_bytes_per_sample`.
        memory_bytes: of the host, 0 if unknown.
        num_sharing: workers that are to share the chunks evenly.
        pairs: two chunks are to be computed side by side, where the micro-batches can be halved.  It does not depend
            on the cores of a machine: the chunks are the same on all.
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
    """The numbers of micro-batches to try beside ``fused``: from a quarter of it to four times as many.

    Arguments are those of :func:`choose_fused`; where memory does not suffice, Linux ends the process.
    """
    largest = num_micro_batches
    if memory_bytes:
        largest = fused_in_memory(bytes_per_sample * micro_batch_size, memory_bytes)
    usable = fusible(num_micro_batches, group_size, num_sharing)
    return [d for d in usable if fused / 4 <= d <= max(fused, min(fused * 4, largest))]


def fusible(num_micro_batches: int, group_size: int, num_sharing: int) -> List[int]:
    """The numbers of micro-batches that can be fused, so that ``num_sharing`` workers share the chunks evenly."""
    groups = num_micro_batches // group_size
    return [d * group_size for d in divisors(groups) if groups // d % num_sharing == 0]


def fused_in_memory(micro_batch_bytes: int, memory_bytes: int) -> int:
    """How many micro-batches of so many bytes of layer outputs are computed as one at most, for they need memory."""
    return int(memory_bytes * MEMORY_FRACTION) // (TRAINING_FACTOR * max(1, micro_batch_bytes))
