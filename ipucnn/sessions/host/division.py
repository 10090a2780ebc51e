"""Divides a weight update: how many micro-batches are fused, and who computes which of them, in which order.

Micro-batches are fused into groups, each of which is computed as one batch.  The session adds the groups' results in
the order of the groups.  Processes and devices share the groups evenly, and a device computes as many at the same time
as it has lanes.

IPUs fuse no micro-batches (:func:`one_by_one`).  On a host, a group has so many, by the first rule that applies:

1. ``--fused-micro-batches``, else the number of the checkpoint from which a run continues, or of the benchmark that it
   is compared with (:func:`fixed_fused`; in inference :func:`fixed_in_inference`);
2. one, for a network that may mix the samples of a batch (:func:`divide`);
3. as many as make fast operations, fit into memory, and let all workers share the groups (:func:`choose_fused`);
   in inference, where nobody shares them, :func:`fused_in_inference`.

Memory, devices and ``--max-workers`` decide the third, so it may differ between machines.  It changes the result only
by the order of floating-point sums.  The numbers of devices and lanes change only the speed.
"""

import math
from dataclasses import dataclass, replace
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import KerasModel, Tensor
from ipucnn.config.bounds import MAX_ACCUMULATION
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.machine import num_cores, operation_threads, operations_at_once
from ipucnn.models.keras_config import num_calls, output_shape
from ipucnn.sessions.group import Alone, ProcessGroup
from ipucnn.text import counted
from ipucnn.training.batching import alternatives, divisors
from ipucnn.training.program import BatchLayout

# Sizes of a group of fused micro-batches.  More samples per operation cost less overhead per sample, until the
# activations no longer fit into the cache or the memory.  The size changes only the order of floating-point sums.
# Measured on two cores: EfficientNet-B0 at 32x32 gained up to 128 samples and lost again at 256.
# Groups that are computed in parallel have this size each: two of 128 samples were a fifth faster than two of 64.
TARGET_SAMPLES = 128
TARGET_BYTES = 96 * 2**20
MEMORY_FRACTION = 0.25
# Memory for layer outputs, their gradients and the temporaries of one layer, divided by that for layer outputs alone.
TRAINING_FACTOR = 4


@dataclass(frozen=True)
class Division:
    """The division of a weight update; :func:`divide` makes it.

    The groups of a turn are computed at the same time.  Those of the first lane of all processes come first, in the
    order of processes, then those of the second, and so on.

    Attributes:
        batch: the micro-batches of a weight update.
        fused_micro_batches: the number of micro-batches in a group.
        num_workers, rank: the number of processes that share the groups, and the number of this one.
        devices: TensorFlow's names of this process's devices that take part; the first has the weights.
        num_present: the number of all devices of this process.
        num_lanes: the number of groups that a device computes at the same time.
    """

    batch: BatchLayout
    fused_micro_batches: int
    num_workers: int = 1
    rank: int = 0
    devices: Tuple[str, ...] = ("/CPU:0",)
    num_present: int = 1
    num_lanes: int = 1

    @property
    def num_groups(self) -> int:
        """The groups of fused micro-batches in a weight update."""
        return _num_groups(self.batch, self.fused_micro_batches)

    @property
    def samples_per_group(self) -> int:
        """The samples of a group: of one element of the training data set."""
        return self.fused_micro_batches * self.batch.micro_batch_size

    @property
    def lanes(self) -> Tuple[str, ...]:
        """The device of each lane of this process."""
        return self.devices * self.num_lanes

    @property
    def groups_per_turn(self) -> int:
        """The groups that all processes compute at the same time."""
        return self.num_workers * len(self.lanes)

    @property
    def num_turns(self) -> int:
        """The turns of a weight update."""
        return self.num_groups // self.groups_per_turn

    @property
    def shard(self) -> Tuple[int, int]:
        """(count, index): this process computes every ``count``-th group from number ``index`` on."""
        return self.num_workers, self.rank

    def group(self, turn: Tensor, lane: int) -> Tensor:
        """Returns the number, within the weight update, of the group that a lane of this process computes in a turn."""
        return (turn * len(self.lanes) + lane) * self.num_workers + self.rank

    def notes(self, config: RunConfig, is_new: bool) -> List[str]:
        """Returns notes to print at the start: who trains, and how a weight update is shared.

        Args:
            config: the options of the run.
            is_new: whether the run begins, rather than continues from a checkpoint.
        """
        devices, workers, fused = len(self.devices), self.num_workers, self.fused_micro_batches
        lines, sharing = [], workers * devices
        if sharing > 1:
            threads = "" if workers == 1 else f", {counted(operation_threads(), 'thread')} each"
            lines.append(
                f"{sharers(workers, devices)}{threads}: a weight update is {counted(self.num_groups, 'group')} of "
                f"{counted(fused, 'fused micro-batch')}, {self.num_groups // sharing} for each "
                f"{'worker' if devices == 1 else 'device'}"
            )
        if devices < self.num_present:
            lines.append(
                f"{devices} of {self.num_present} devices {'takes' if devices == 1 else 'take'} part: more cannot "
                f"share the {counted(self.batch.num_micro_batches, 'micro-batch')} of a weight update evenly"
                + (", or other workers have no more" if workers > 1 else "")
            )
        if is_new and config.fused_micro_batches is None and config.max_workers < sharing:
            lines.append(
                f"the groups of fused micro-batches are those of --max-workers {sharing}: a run with another number of "
                f"workers{' or devices' if devices > 1 else ''} gives the same bytes if it begins with that option"
            )
        return lines


class Capacity(NamedTuple):
    """The capacity that every worker has: the minimum over all workers.

    Attributes:
        devices: the number of devices that may take part in training.
        operations: the number of parallel operations that keep all cores of a CPU busy; 1 on GPUs.
        memory_bytes: the machine's memory; 0 if unknown, or on GPUs.
        bytes_per_sample: the size of all layer outputs of the network for one sample.
        on_cpu: whether the devices are a CPU.
    """

    devices: int = 1
    operations: int = 1
    memory_bytes: int = 0
    bytes_per_sample: int = 0
    on_cpu: bool = False

    @classmethod
    def of_all(
        cls, group: Alone, kind: str, memory_bytes: int, num_devices: int, model: KerasModel
    ) -> "Capacity":
        """Agrees with the other processes on the capacity to assume.

        Args:
            group: the processes that train together.
            kind, memory_bytes: the kind of this one's devices (cpu or gpu), and the machine's memory.
            num_devices: the number of its devices.
            model: the network.

        Raises:
            ConfigurationError: processes compute on different kinds of devices.
        """
        on_cpu = kind == "cpu"
        operations, memory = (operations_at_once(), memory_bytes) if on_cpu else (1, 0)
        kinds, *numbers = zip(*group.gather("capacity", [kind, num_devices, operations, memory]))
        if len(set(kinds)) > 1:
            other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
            raise ConfigurationError(
                f"rank {other} computes on a {kinds[other]}, and rank 0 on a {kinds[0]}",
                "give all processes the same kind of device: --device cpu, or --device gpu",
            )
        devices, operations, memory = (int(min(values)) for values in numbers)
        return cls(devices, operations, memory, activation_bytes_per_sample(model), on_cpu)

    def trained(self, samples: int) -> int:
        """Returns the maximum number of groups of ``samples`` samples each that are trained in parallel."""
        return self.evaluated(TRAINING_FACTOR * samples)

    def evaluated(self, samples: int) -> int:
        """Returns the number of batches of ``samples`` samples evaluated in parallel, without a backward pass."""
        needed = self.bytes_per_sample * samples
        if not self.memory_bytes or not needed:
            return self.operations
        return max(1, min(self.operations, int(self.memory_bytes * MEMORY_FRACTION) // needed))


def activation_bytes_per_sample(model: KerasModel) -> int:
    """Returns the bytes of all layer outputs for one sample, float32, from the static shapes of a functional model."""
    total = 0
    for layer in model.layers:
        for call in range(num_calls(layer)):
            total += 4 * math.prod(int(dimension or 1) for dimension in output_shape(layer, call)[1:])
    return total


def fixed_fused(config: RunConfig, batch: BatchLayout, saved: Optional[int]) -> Optional[int]:
    """Returns the number of fused micro-batches that an option, a checkpoint or a benchmark fixes; None: it is free.

    Args:
        config: the options of the run.
        batch: the micro-batches of a weight update.
        saved: the number of the checkpoint from which the run continues, or of the benchmark to compare with; None
            without one.

    Raises:
        ConfigurationError: the number does not divide a weight update into whole groups of micro-batches.
    """
    fused = config.fused_micro_batches
    if fused is None and saved is not None:
        # The number changes the rounding, so a continued run keeps it.  Replicas that share batch norm's statistics are
        # computed one by one on IPUs, and together on a host.
        fused = max(saved, batch.dbn_replica_group_size)
    if fused is not None:
        check_fused(batch, fused)
    return fused


def fixed_in_inference(
    config: RunConfig, num_micro_batches: Optional[int], saved: Optional[int]
) -> Optional[int]:
    """Returns the number that an option fixes in inference, or ``saved`` of an earlier benchmark; None if it is free.

    Args:
        config: the options of the run.
        num_micro_batches: those of an execution, on this process; None if they are not prescribed.
        saved: the number of the benchmark to compare with; None without one.

    Raises:
        ConfigurationError: the option's number does not divide the execution.
    """
    given = config.fused_micro_batches
    if given is not None and num_micro_batches is not None and num_micro_batches % given:
        near = min(divisors(num_micro_batches), key=lambda d: abs(d - given))
        raise ConfigurationError(
            f"--fused-micro-batches {given} does not divide the {num_micro_batches} micro-batches of an execution",
            f"use --fused-micro-batches {near}",
        )
    return saved if given is None else given


def one_by_one(batch: BatchLayout, instances: ProcessGroup) -> Division:
    """Returns the division of IPUs, which fuse no micro-batches; the SDK adds their gradients."""
    return Division(batch, 1, instances.size, instances.rank)


def divide(
    batch: BatchLayout,
    config: RunConfig,
    capacity: Capacity,
    group: ProcessGroup,
    devices: Sequence[str],
    fused: Optional[int] = None,
    mixing: Sequence[str] = (),
) -> Division:
    """Returns the division of a weight update among processes, devices and lanes.

    Args:
        batch: the micro-batches of a weight update.
        config: the options of the run.
        capacity: the capacity of every process.
        group: the processes that train together.
        devices: TensorFlow's names of this process's devices.
        fused: the number of fused micro-batches that an option or a checkpoint fixes; None: as many as suit capacity
            and sharing.
        mixing: layers that may mix the samples of a batch, so that micro-batches are computed one by one.

    Raises:
        ConfigurationError: processes and devices cannot share the weight update evenly, or several micro-batches would
            be computed together although a layer may mix them.
    """
    workers = group.size
    num_devices = choose_devices(batch, config, workers, capacity, fused)
    check_sharing(batch, config, workers, num_devices, fused)
    combined = max(fused or 1, batch.dbn_replica_group_size)
    if mixing and combined > 1:
        option = "--fused-micro-batches" if (fused or 1) > 1 else "--dbn-replica-group-size"
        raise ConfigurationError(
            f"{option} {combined}: layer '{mixing[0]}' of the network is of a class of its own and may mix samples, so "
            "that micro-batches are computed one by one",
            f"use {option} 1",
        )
    if fused is None:
        sharing = max(config.max_workers, workers * num_devices)
        fused = 1 if mixing else choose_fused(batch, capacity, sharing)
    alone = Division(batch, fused, workers, group.rank, tuple(devices[:num_devices]), len(devices))
    # Each of several devices computes one group at a time.
    most = 1 if num_devices > 1 else capacity.trained(alone.samples_per_group)
    groups = alone.num_groups
    lanes = max(n for n in divisors(groups) if n <= most and (n == 1 or groups % (n * workers) == 0))
    return replace(alone, num_lanes=lanes)


def _num_groups(batch: BatchLayout, fused: Optional[int]) -> int:
    """Returns the groups of ``fused`` micro-batches in a weight update.

    None stands for the smallest indivisible groups: micro-batches, or groups of those whose replicas share batch norm's
    statistics.
    """
    return batch.num_micro_batches // (fused or batch.dbn_replica_group_size)


def fusible(batch: BatchLayout, num_sharing: int = 1) -> List[int]:
    """Returns the numbers of micro-batches to fuse with which ``num_sharing`` workers share all groups evenly."""
    groups = _num_groups(batch, None)
    return [d * batch.dbn_replica_group_size for d in divisors(groups) if groups // d % num_sharing == 0]


def check_fused(batch: BatchLayout, fused: int) -> None:
    """Refuses a number of fused micro-batches that a user gave.

    Raises:
        ConfigurationError: the number does not divide a weight update into whole groups of micro-batches.
    """
    legal = fusible(batch)
    if fused not in legal:
        near = sorted(sorted(legal, key=lambda d: (abs(d - fused), d))[:2])
        raise ConfigurationError(
            f"--fused-micro-batches {fused} does not divide the {batch.num_micro_batches} micro-batches of "
            "a weight update into whole groups",
            "use --fused-micro-batches " + alternatives(near),
        )


def choose_devices(
    batch: BatchLayout, config: RunConfig, workers: int, capacity: Capacity, fused: Optional[int] = None
) -> int:
    """Returns the number of each worker's devices that take part in training.

    It is the requested number, or else the largest one that shares a weight update evenly.
    """
    if config.devices is not None:
        return capacity.devices
    totals = [n for n in divisors(_num_groups(batch, fused)) if n % workers == 0]
    if fused is None and config.max_workers > 1:
        totals = [n for n in totals if config.max_workers % n == 0]
    return max([n // workers for n in totals if n // workers <= capacity.devices], default=1)


def choose_fused(batch: BatchLayout, capacity: Capacity, num_sharing: int = 1) -> int:
    """Returns the number of micro-batches to fuse: a divisor of those in a weight update.

    Args:
        batch: the micro-batches of a weight update.
        capacity: the capacity of every worker.  A CPU may compute two groups in parallel, if the micro-batches can be
            halved.  This does not depend on the number of cores, which therefore never changes the groups.
        num_sharing: the number of workers that share the groups evenly.
    """
    size = batch.micro_batch_size
    needed = max(1, capacity.bytes_per_sample * size)
    limit = max(TARGET_SAMPLES // size, TARGET_BYTES // needed)
    halves = fusible(batch, 2 * num_sharing) if capacity.on_cpu else []
    if capacity.memory_bytes:
        fitting = int(capacity.memory_bytes * MEMORY_FRACTION) // (TRAINING_FACTOR * needed)
        limit = min(limit, fitting // (2 if halves else 1))
    usable = halves or fusible(batch, num_sharing)
    return max([d for d in usable if d <= limit] or usable[:1])


def fused_in_inference(batch: BatchLayout, num_micro_batches: int, capacity: Capacity) -> int:
    """Returns the number of micro-batches to fuse in inference, of an execution of ``num_micro_batches``.

    Args:
        batch: the size of micro-batches.
        num_micro_batches: the micro-batches of an execution.
        capacity: the capacity of this process, which computes one group at a time.
    """
    alike = replace(
        batch, num_replicas=1, gradient_accumulation_count=num_micro_batches, dbn_replica_group_size=1
    )
    return choose_fused(alike, capacity._replace(on_cpu=False))


def sharers(workers: int, devices: int) -> str:
    """Returns a phrase for the workers and devices that share a weight update."""
    if devices == 1:
        return counted(workers, "worker")
    return f"{devices} devices" if workers == 1 else f"{workers} workers with {devices} devices each"


def check_sharing(
    batch: BatchLayout, config: RunConfig, workers: int, devices: int = 1, fused: Optional[int] = None
) -> None:
    """Refuses numbers of workers and devices that cannot share a weight update evenly.

    Args:
        batch: the micro-batches of a weight update.
        config: the options of the run, with ``max_workers``.
        workers: the number of workers.
        devices: the number of devices of each worker.
        fused: the number of fused micro-batches, whose groups are shared; None: it is not fixed, and they share the
            smallest indivisible groups.

    Raises:
        ConfigurationError: the division is uneven; the message has the numbers that work.
    """
    all_devices, most = workers * devices, config.max_workers
    who, num_groups = sharers(workers, devices), _num_groups(batch, fused)
    legal = _listed(_legal_numbers(num_groups, fused is not None, most, devices if workers > 1 else 1))
    if fused is not None:
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
    sharing, group_size = max(most, all_devices), batch.dbn_replica_group_size
    if num_groups % sharing:
        times = sharing // math.gcd(num_groups, sharing)
        count, size, ways = batch.gradient_accumulation_count * times, batch.micro_batch_size, []
        if config.global_batch_size is not None:  # the accumulation count follows from it
            is_smaller = size % times == 0
            ways.append(
                f"use --micro-batch-size {size // times}"
                if is_smaller
                else f"use --global-batch-size {config.global_batch_size * times}"
            )
        elif count <= MAX_ACCUMULATION:
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


def _legal_numbers(num_groups: int, is_fixed: bool, most: int, devices: int) -> List[int]:
    """Returns the numbers of workers with ``devices`` devices each that can share a weight update.

    Args:
        num_groups: the groups that they share.
        is_fixed: whether the size of the groups is fixed.
        most: ``--max-workers``.
        devices: the number of devices of each worker.
    """
    if num_groups % most:
        return []
    shares = num_groups if is_fixed or most == 1 else most
    return [count for count in divisors(num_groups) if shares % (count * devices) == 0]


def _listed(numbers: List[int]) -> str:
    """Returns the first numbers as text."""
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) < 10 else [*shown[:8], "..."])


def threads_of_training(batch: BatchLayout, fused: Optional[int], sharing: int) -> int:
    """Returns the default number of threads per operation of a new run: half of the cores, or all of them.

    It is half of them if every worker can compute two groups of fused micro-batches in parallel.  Operations on small
    images are too short to keep all cores busy, and two operations wait less for each other than the halves of one.
    Runs that begin with the same ``--max-workers`` on equal machines have the same number, for any number of workers
    and devices.

    Args:
        batch: the micro-batches of a weight update.
        fused: the number of fused micro-batches; None: it is not fixed.
        sharing: the number of workers that share the run, or ``--max-workers`` if that is larger.
    """
    cores = num_cores()
    is_shared = cores % 2 == 0 and _num_groups(batch, fused) % (2 * sharing) == 0
    return cores // 2 if is_shared else cores
