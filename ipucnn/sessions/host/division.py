"""Divides a weight update over devices, into groups of fused micro-batches, and into groups computed in parallel.

A fused batch is a group of fused micro-batches: they are computed as one batch.  A lane computes one fused batch at a
time, in parallel with the other lanes.  The choices change a result only by the order of floating-point sums.  They are
the same on every machine, except for the number of lanes.
"""

from typing import List, NamedTuple

from ipucnn.config.options import RunConfig
from ipucnn.training.batching import divisors
from ipucnn.training.program import Program

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

    def fused(self, micro_batch_size: int) -> int:
        """Returns the maximum number of fused micro-batches that fits into memory, which is known."""
        needed = TRAINING_FACTOR * max(1, self.bytes_per_sample * micro_batch_size)
        return int(self.memory_bytes * MEMORY_FRACTION) // needed


def num_fused_batches(program: Program) -> int:
    """Returns the number of groups of fused micro-batches of a weight update.

    If their size is not chosen yet, it is the number of the smallest groups that cannot be split: micro-batches, or
    those of the replicas that share batch norm's statistics.
    """
    return program.num_micro_batches // (program.fused_micro_batches or program.dbn_replica_group_size)


def choose_devices(program: Program, config: RunConfig, workers: int, capacity: Capacity) -> int:
    """Returns the number of each worker's devices that take part in training.

    It is the requested number, or else the largest one that shares a weight update evenly.
    """
    if config.devices is not None:
        return capacity.devices
    totals = [n for n in divisors(num_fused_batches(program)) if n % workers == 0]
    if not program.fused_micro_batches and config.max_workers > 1:
        totals = [n for n in totals if config.max_workers % n == 0]
    return max([n // workers for n in totals if n // workers <= capacity.devices], default=1)


def choose_lanes(program: Program, workers: int, devices: int, capacity: Capacity) -> int:
    """Returns the number of groups of fused micro-batches that a device computes in parallel.

    Each of several devices computes one group at a time.  Otherwise it is the largest number within the capacity with
    which all workers share the groups of a weight update evenly.
    """
    fused_batches = num_fused_batches(program)
    most = 1 if devices > 1 else capacity.trained(program.fused_micro_batches * program.micro_batch_size)
    return max(
        n for n in divisors(fused_batches) if n <= most and (n == 1 or fused_batches % (n * workers) == 0)
    )


def choose_fused(program: Program, capacity: Capacity, num_sharing: int = 1, pairs: bool = False) -> int:
    """Returns the number of micro-batches to fuse: a divisor of those in a weight update.

    Args:
        program: the Program.
        capacity: the capacity of every worker.
        num_sharing: the number of workers that share the groups evenly.
        pairs: whether to allow for two groups in parallel, if the micro-batches can be halved.  This does not depend
            on the cores of a machine, so the groups are the same on all machines.
    """
    size = program.micro_batch_size
    limit = max(TARGET_SAMPLES // size, TARGET_BYTES // max(1, capacity.bytes_per_sample * size))
    halves = fusible(program, 2 * num_sharing) if pairs else []
    if capacity.memory_bytes:
        limit = min(limit, capacity.fused(size) // (2 if halves else 1))
    usable = halves or fusible(program, num_sharing)
    return max([d for d in usable if d <= limit] or usable[:1])


def similar_to(fused: int, program: Program, capacity: Capacity, num_sharing: int) -> List[int]:
    """Returns the numbers of fused micro-batches to try: from a quarter of ``fused`` to four times as many.

    The other arguments are those of :func:`choose_fused`.  Larger numbers are limited by memory, because Linux ends a
    process that runs out of it.
    """
    largest = fused * 4
    if capacity.memory_bytes:
        largest = min(largest, capacity.fused(program.micro_batch_size))
    return [d for d in fusible(program, num_sharing) if fused / 4 <= d <= max(fused, largest)]


def fusible(program: Program, num_sharing: int) -> List[int]:
    """Returns the numbers of micro-batches whose groups ``num_sharing`` workers can share evenly."""
    group_size = program.dbn_replica_group_size
    groups = program.num_micro_batches // group_size
    return [d * group_size for d in divisors(groups) if groups // d % num_sharing == 0]
