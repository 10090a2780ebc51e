"""Divides a weight update over devices, into groups of fused micro-batches, and into groups computed in parallel.

Memory, devices and ``--max-workers`` decide the size of the groups, so it may differ between machines.  It changes the
result only by the order of floating-point sums.  A checkpoint keeps it.  The numbers of devices, and of groups computed
in parallel, change only the speed.
"""

import math
from typing import List, NamedTuple, Tuple

from ipucnn.aliases import KerasModel
from ipucnn.config.bounds import MAX_ACCUMULATION
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.machine import num_cores, operation_threads
from ipucnn.text import counted
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


def activation_bytes_per_sample(model: KerasModel) -> int:
    """Returns the bytes of all layer outputs for one sample, float32, from the static shapes of a functional model."""
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


def choose_devices(program: Program, config: RunConfig, workers: int, capacity: Capacity) -> int:
    """Returns the number of each worker's devices that take part in training.

    It is the requested number, or else the largest one that shares a weight update evenly.
    """
    if config.devices is not None:
        return capacity.devices
    totals = [n for n in divisors(program.num_fused_batches) if n % workers == 0]
    if not program.fused_micro_batches and config.max_workers > 1:
        totals = [n for n in totals if config.max_workers % n == 0]
    return max([n // workers for n in totals if n // workers <= capacity.devices], default=1)


def choose_parallel(program: Program, workers: int, devices: int, capacity: Capacity) -> int:
    """Returns the number of groups of fused micro-batches that a device computes in parallel.

    Each of several devices computes one group at a time.  Otherwise it is the largest number within the capacity with
    which all workers share the groups of a weight update evenly.
    """
    fused_batches = program.num_fused_batches
    most = 1 if devices > 1 else capacity.trained(program.samples_per_fused_batch)
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
            on the number of cores, which therefore never changes the groups.
    """
    size = program.micro_batch_size
    limit = max(TARGET_SAMPLES // size, TARGET_BYTES // max(1, capacity.bytes_per_sample * size))
    halves = program.fusible(2 * num_sharing) if pairs else []
    if capacity.memory_bytes:
        limit = min(limit, capacity.fused(size) // (2 if halves else 1))
    usable = halves or program.fusible(num_sharing)
    return max([d for d in usable if d <= limit] or usable[:1])


def similar_to(fused: int, program: Program, capacity: Capacity, num_sharing: int) -> List[int]:
    """Returns the numbers of fused micro-batches to try: from a quarter of ``fused`` to four times as many.

    The other arguments are those of :func:`choose_fused`.  Larger numbers are limited by memory, because Linux ends a
    process that runs out of it.
    """
    largest = fused * 4
    if capacity.memory_bytes:
        largest = min(largest, capacity.fused(program.micro_batch_size))
    return [d for d in program.fusible(num_sharing) if fused / 4 <= d <= max(fused, largest)]


def sharers(workers: int, devices: int) -> str:
    """Returns a phrase for the workers and devices that share a weight update."""
    if devices == 1:
        return counted(workers, "worker")
    return f"{devices} devices" if workers == 1 else f"{workers} workers with {devices} devices each"


def check_sharing(program: Program, config: RunConfig, workers: int, devices: int = 1) -> None:
    """Refuses numbers of workers and devices that cannot share a weight update evenly.

    They share its groups of fused micro-batches.  If the size of these groups is not chosen yet, they share the
    smallest indivisible units: micro-batches, or groups of them whose replicas share batch norm's statistics.

    Args:
        program: the Program of the run.
        config: the options of the run, with ``max_workers``.
        workers: the number of workers.
        devices: the number of devices of each worker.

    Raises:
        ConfigurationError: the division is uneven; the message has the numbers that work.
    """
    all_devices, most = workers * devices, config.max_workers
    who, num_groups = sharers(workers, devices), program.num_fused_batches
    legal = _listed(_legal_numbers(program, most, devices if workers > 1 else 1))
    if program.fused_micro_batches:
        for sharing, name in ((all_devices, who), (most, sharers(most, 1))):
            if num_groups % sharing:
                groups = f"{counted(num_groups, 'group')} of fused micro-batches"
                raise ConfigurationError(
                    f"{name} cannot share the {groups} of a weight update evenly",
                    (f"use {legal} of them, or " if legal else "")
                    + f"begin a new run with --max-workers {sharing}",
                )
        return
    if most > 1 and most % all_devices:
        raise ConfigurationError(
            f"--max-workers {most} with {who}: it has to be a multiple of {all_devices}",
            (f"use {legal} of them; " if legal else "")
            + f"a new run can have another --max-workers, for example {most * all_devices}",
        )
    sharing, group_size = max(most, all_devices), program.dbn_replica_group_size
    if num_groups % sharing:
        times = sharing // math.gcd(num_groups, sharing)
        count, size, ways = program.gradient_accumulation_count * times, program.micro_batch_size, []
        if count <= MAX_ACCUMULATION:
            smaller = (
                f", and divide --micro-batch-size by {times} to keep the global batch"
                if size % times == 0
                else ""
            )
            ways.append(f"add --gradient-accumulation-count {count}{smaller}")
        if legal and (num_groups > 1 or not ways):
            ways.append(f"share the weight update among {legal} of them")
        others = [n for n in divisors(num_groups) if n % all_devices == 0]
        if others and not legal:
            ways.append(f"use --max-workers {_listed(others)}")
        what = counted(num_groups, "micro-batch")
        if group_size > 1:
            what = (
                f"{counted(num_groups, 'group')} of {group_size} replicas that share batch norm's statistics"
            )
        raise ConfigurationError(
            f"a weight update has {what}, which {who if sharing == all_devices else sharers(sharing, 1)} cannot share "
            "evenly",
            "; or ".join(ways or ["use fewer workers or --devices"]),
        )


def notes_of_sharing(
    workers: int,
    config: RunConfig,
    program: Program,
    is_new: bool,
    num_devices: Tuple[int, int] = (1, 1),
) -> List[str]:
    """Returns notes to print at the start: who trains, and how a weight update is shared.

    Args:
        workers: the number of workers.
        config: the options of the run.
        program: the Program, with its number of fused micro-batches.
        is_new: whether the run begins, rather than continues from a checkpoint.
        num_devices: the number of each worker's devices that take part, and the number of all its devices.
    """
    fused, (devices, present) = program.fused_micro_batches, num_devices
    lines, num_groups, sharing = [], program.num_fused_batches, workers * devices
    if sharing > 1:
        threads = "" if workers == 1 else f", {counted(operation_threads(), 'thread')} each"
        lines.append(
            f"{sharers(workers, devices)}{threads}: a weight update is {counted(num_groups, 'group')} of "
            f"{counted(fused, 'fused micro-batch')}, {num_groups // sharing} for each "
            f"{'worker' if devices == 1 else 'device'}"
        )
    if devices < present:
        lines.append(
            f"{devices} of {present} devices {'takes' if devices == 1 else 'take'} part: more cannot share the "
            f"{counted(program.num_micro_batches, 'micro-batch')} of a weight update evenly"
            + (", or other workers have no more" if workers > 1 else "")
        )
    if is_new and config.fused_micro_batches is None and config.max_workers < sharing:
        lines.append(
            f"the groups of fused micro-batches are those of --max-workers {sharing}: a run with another number of "
            f"workers{' or devices' if devices > 1 else ''} gives the same bytes if it begins with that option"
        )
    return lines


def _legal_numbers(program: Program, most: int, devices: int) -> List[int]:
    """Returns the numbers of workers with ``devices`` devices each that can share a weight update.

    Args:
        program: the Program of the run.
        most: ``--max-workers``.
        devices: the number of devices of each worker.
    """
    num_groups, is_chosen = program.num_fused_batches, program.fused_micro_batches > 0
    if num_groups % most:
        return []
    shares = num_groups if is_chosen or most == 1 else most
    return [count for count in divisors(num_groups) if shares % (count * devices) == 0]


def _listed(numbers: List[int]) -> str:
    """Returns the first numbers as text."""
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) < 10 else [*shown[:8], "..."])


def threads_of_training(program: Program, sharing: int) -> int:
    """Returns the default number of threads per operation of a new run: half of the cores, or all of them.

    It is half of them if every worker can compute two groups of fused micro-batches in parallel.  Operations on small
    images are too short to keep all cores busy, and two operations wait less for each other than the halves of one.
    Runs that begin with the same ``--max-workers`` on equal machines have the same number, for any number of workers
    and devices.

    Args:
        program: the Program, with the number of fused micro-batches if it is known.
        sharing: the number of workers that share the run, or ``--max-workers`` if that is larger.
    """
    cores = num_cores()
    is_shared = cores % 2 == 0 and program.num_fused_batches % (2 * sharing) == 0
    return cores // 2 if is_shared else cores
