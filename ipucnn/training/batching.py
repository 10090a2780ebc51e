"""Batch arithmetic: micro-batch x gradient accumulation x replicas, and how often the host is visited.

Pure integer arithmetic, no TensorFlow.  The rules are those of the public Graphcore CNN application and
of the Poplar SDK's pipelining API; every refusal names the nearest legal values.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Callable, List, Optional

from ipucnn.config.bounds import MAX_COUNT
from ipucnn.errors import ConfigurationError
from ipucnn.text import counted

Warn = Callable[[str], None]


def overlap_length(schedule: str, num_stages: int) -> int:
    """What the gradient accumulation count must be a multiple of when training a pipeline.

    Grouped fills and drains forward and backward apart: 2 x stages; Interleaved: stages; Sequential and
    no pipeline: any count (``GetPipelineOverlapLength`` of the Poplar plugin).
    """
    if num_stages <= 1 or schedule == "Sequential":
        return 1
    return 2 * num_stages if schedule == "Grouped" else num_stages


def nearest_multiples(value: int, base: int) -> List[int]:
    """The positive multiples of ``base`` around ``value``: one if it is a multiple itself, else one or two."""
    below = value // base * base
    if below == value and value > 0:
        return [value]
    return [m for m in (below, below + base) if m > 0]


def divisors(number: int) -> List[int]:
    """All divisors of a positive integer in rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted(set(small + [number // d for d in small]))


def closest_divisor(number: int, wanted: Fraction) -> int:
    """The divisor of ``number`` closest to ``wanted``; of two equally close ones the smaller."""
    return min(divisors(number), key=lambda d: (abs(d - wanted), d))


def _join(values: List[int]) -> str:
    return " or ".join(str(v) for v in values)


@dataclass(frozen=True)
class Batching:
    """Samples per weight update.

    Attributes:
        micro_batch_size: samples one replica processes in one forward pass.
        gradient_accumulation_count: micro-batches per replica per weight update.
        num_replicas: data-parallel copies of the model.
    """

    micro_batch_size: int
    gradient_accumulation_count: int
    num_replicas: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per weight update over all replicas."""
        return self.gradient_accumulation_count * self.num_replicas

    @property
    def global_batch_size(self) -> int:
        """Samples per weight update."""
        return self.micro_batch_size * self.num_micro_batches


def make_batching(
    micro_batch_size: int,
    num_replicas: int,
    gradient_accumulation_count: Optional[int] = None,
    global_batch_size: Optional[int] = None,
    *,
    schedule: str = "Grouped",
    num_stages: int = 1,
    warn: Warn = lambda message: None,
) -> Batching:
    """Gradient accumulation from the global batch, or the other way round.

    Args:
        micro_batch_size: samples, at least 1.
        num_replicas: at least 1.
        gradient_accumulation_count: if given, must suit the pipeline schedule.
        global_batch_size: if given instead, the nearest reachable one is taken, with a warning.
        schedule: Grouped, Interleaved or Sequential; only matters with several stages.
        num_stages: pipeline stages.
        warn: called with one line where a number was changed.

    Raises:
        ConfigurationError: both counts given, a number below 1, or an accumulation count the schedule
            does not allow.
    """
    for name, value in (
        ("micro-batch-size", micro_batch_size),
        ("num-replicas", num_replicas),
        ("gradient-accumulation-count", gradient_accumulation_count),
        ("global-batch-size", global_batch_size),
    ):
        if value is not None and value < 1:
            raise ConfigurationError(
                f"--{name} is {value}, but must be at least 1", f"use --{name} 1 or more"
            )
    base = overlap_length(schedule, num_stages)
    per_step = micro_batch_size * num_replicas
    rule = f"the {schedule} schedule with {num_stages} stages needs a multiple of {base}"
    if gradient_accumulation_count is not None and global_batch_size is not None:
        implied = per_step * gradient_accumulation_count
        raise ConfigurationError(
            f"--gradient-accumulation-count {gradient_accumulation_count} and --global-batch-size "
            f"{global_batch_size} are both given, but one follows from the other",
            f"drop one: {gradient_accumulation_count} accumulated micro-batches of {micro_batch_size} on "
            f"{counted(num_replicas, 'replica')} are a global batch of {implied}",
        )
    if gradient_accumulation_count is not None:
        if gradient_accumulation_count % base:
            legal = nearest_multiples(gradient_accumulation_count, base)
            raise ConfigurationError(
                f"--gradient-accumulation-count {gradient_accumulation_count} is not possible: {rule}",
                f"use --gradient-accumulation-count {_join(legal)}",
            )
        return _bounded(Batching(micro_batch_size, gradient_accumulation_count, num_replicas))
    if global_batch_size is None:
        return _bounded(Batching(micro_batch_size, base, num_replicas))
    wanted = Fraction(global_batch_size, per_step)
    count = max(base, _round_half_up(wanted / base) * base)
    batching = Batching(micro_batch_size, count, num_replicas)
    if batching.global_batch_size != global_batch_size:
        because = f"; {rule}" if base > 1 else ""
        warn(
            f"global batch size {global_batch_size:,} is not a multiple of micro-batch {micro_batch_size:,} x "
            f"{counted(num_replicas, 'replica')}{because}: using {batching.global_batch_size:,} "
            f"(gradient accumulation count {count:,})"
        )
    return _bounded(batching)


def _bounded(batching: Batching) -> Batching:
    """The same, if its global batch is one that 32 bits hold: each factor may be legal, and the product not.

    Raises:
        ConfigurationError: it is larger.
    """
    size = batching.global_batch_size
    if size > MAX_COUNT:
        raise ConfigurationError(
            f"the global batch of {size:,} samples (micro-batch {batching.micro_batch_size:,} x accumulation "
            f"{batching.gradient_accumulation_count:,} x "
            f"{counted(batching.num_replicas, 'replica')}) is above {MAX_COUNT:,}",
            "lower --gradient-accumulation-count to "
            f"{max(1, MAX_COUNT // (batching.micro_batch_size * batching.num_replicas))} or less, "
            "or one of the others",
        )
    return batching


def check_length(weight_updates_per_epoch: int, num_epochs: int) -> None:
    """Refuses a run of more weight updates than 32 bits count.

    Raises:
        ConfigurationError: naming the most epochs.
    """
    total = weight_updates_per_epoch * num_epochs
    if total > MAX_COUNT:
        raise ConfigurationError(
            f"{num_epochs} epochs of {weight_updates_per_epoch} weight updates are {total}, and a run has at most "
            f"{MAX_COUNT}",
            f"use --num-epochs {MAX_COUNT // weight_updates_per_epoch} or less",
        )


def _round_half_up(value: Fraction) -> int:
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


@dataclass(frozen=True)
class Epoch:
    """How the training set is used up: weight updates and samples per epoch.

    Attributes:
        samples: that count; of the last weight update, ``samples_padded`` more do not.
    """

    weight_updates: int
    samples: int
    samples_discarded: int
    samples_padded: int = 0


def make_epoch(
    num_samples: int,
    batching: Batching,
    weight_updates_per_epoch: Optional[int] = None,
    pad: bool = False,
    base: int = 1,
    is_global: bool = False,
) -> Epoch:
    """Whole weight updates only; what is left of the data set after the last one is discarded, or padded.

    Args:
        num_samples: training samples.
        batching: samples per weight update.
        weight_updates_per_epoch: None or -1 for as many as the data set holds; more than that starts
            another permutation of the data within the epoch.
        pad: one more weight update takes what is left, filled up with samples that do not count.
        base: what the schedule needs multiples of, for the hint of an error (:func:`overlap_length`).
        is_global: the accumulation follows from ``--global-batch-size``, for the hint of an error.

    Raises:
        ConfigurationError: the data set holds less than one global batch and is not padded, a count below 1,
            or a prescribed number of weight updates with padding.
    """
    size = batching.global_batch_size
    if pad:
        if weight_updates_per_epoch not in (None, -1):
            raise ConfigurationError(
                f"--pad-dataset and --weight-updates-per-epoch {weight_updates_per_epoch} are both given, and each "
                "says where an epoch ends",
                "drop one of them",
            )
        updates = max(1, -(-num_samples // size))
        return Epoch(updates, num_samples, 0, updates * size - num_samples)
    if weight_updates_per_epoch in (None, -1):
        updates = num_samples // size
        if updates < 1:
            raise ConfigurationError(
                f"the global batch of {size:,} samples ({batching.micro_batch_size:,} x "
                f"{batching.gradient_accumulation_count:,} x {batching.num_replicas:,}) is larger than the "
                f"training set of {num_samples:,}",
                _that_fits(batching, num_samples, base, is_global),
            )
        return Epoch(updates, updates * size, num_samples - updates * size)
    assert weight_updates_per_epoch is not None
    if weight_updates_per_epoch < 1:
        raise ConfigurationError(
            f"--weight-updates-per-epoch is {weight_updates_per_epoch}, but must be at least 1",
            "use -1 for as many as the data set holds",
        )
    samples = weight_updates_per_epoch * size
    return Epoch(weight_updates_per_epoch, samples, max(0, num_samples - samples))


def _that_fits(batching: Batching, num_samples: int, base: int, is_global: bool) -> str:
    """What to type where the global batch is more than the data set holds.

    The accumulation is made smaller if that is enough, then the micro-batch, then the number of replicas.
    """
    micro_batch_size, replicas = batching.micro_batch_size, batching.num_replicas
    typed = []
    count = num_samples // (micro_batch_size * replicas * base) * base
    if count < base:
        count = base
        micro_batch_size = num_samples // (replicas * base)
        if micro_batch_size < 1:
            micro_batch_size, replicas = 1, num_samples // base
            if replicas < 1:
                return f"take a larger data set: a weight update of this schedule takes at least {base:,} samples"
            typed.append(f"--num-replicas {replicas}")
        typed.append(f"--micro-batch-size {micro_batch_size}")
    if is_global:
        typed.append(f"--global-batch-size {micro_batch_size * count * replicas}")
    elif count != batching.gradient_accumulation_count:
        typed.append(f"--gradient-accumulation-count {count}")
    return f"use {' '.join(typed)}, or less"


def parse_frequency(value: object) -> Fraction:
    """``2``, ``0.5``, ``1/3`` or ``0.3333333333333333`` as an exact fraction.

    Raises:
        ConfigurationError: not a number or fraction, or negative.
    """
    try:
        fraction = Fraction(str(value).replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        raise ConfigurationError(
            f"'{value}' is not a frequency", "give a number or a fraction, for example 2, 0.5 or 1/4"
        ) from None
    if fraction < 0:
        raise ConfigurationError(f"the frequency {value} is negative", "give 0 or more")
    simple = fraction.limit_denominator(10_000)
    return simple if abs(simple - fraction) < Fraction(1, 10**9) else fraction


def updates_per_event(updates_per_epoch: int, num_epochs: int, per_epoch: Fraction) -> int:
    """Weight updates between two events of a frequency above 0, or of the nearest one that is possible.

    The host can only be visited between weight updates, and all executions are equally long.  So the number of
    events is a divisor of the updates per epoch from one event per epoch on, of those of the whole run below.
    """
    if per_epoch >= 1:
        return updates_per_epoch // closest_divisor(updates_per_epoch, per_epoch)
    total = updates_per_epoch * num_epochs
    return total // closest_divisor(total, per_epoch * num_epochs)


def weight_updates_per_log(
    updates_per_epoch: int, num_epochs: int, logs_per_epoch: Fraction, warn: Warn = lambda message: None
) -> int:
    """How many weight updates the device makes before it returns to the host to log; see :func:`updates_per_event`.

    Args:
        updates_per_epoch: weight updates per epoch.
        num_epochs: epochs of the run.
        logs_per_epoch: 0: the whole run is one execution.
        warn: called with one line where the frequency was changed.

    Raises:
        ConfigurationError: less than one log per epoch where the epochs do not divide.
    """
    total = updates_per_epoch * num_epochs
    if logs_per_epoch == 0:
        whole = counted(total, "weight update")
        warn(f"--logs-per-epoch 0: the entire training run of {whole} is one execution")
        return total
    updates = updates_per_event(updates_per_epoch, num_epochs, logs_per_epoch)
    if logs_per_epoch >= 1:
        logs = updates_per_epoch // updates
        if logs != logs_per_epoch:
            warn(
                f"{_number(logs_per_epoch)} logs per epoch are not possible with "
                f"{counted(updates_per_epoch, 'weight update')} per epoch: logging {counted(logs, 'time')} per epoch"
            )
        return updates
    logs_in_run = logs_per_epoch * num_epochs
    if logs_in_run.denominator != 1:
        possible = [f"1/{d}" for d in divisors(num_epochs)[1:]]
        raise ConfigurationError(
            f"it is not possible to log {_number(1 / logs_per_epoch)} epochs at a time for {num_epochs} epochs",
            f"use --logs-per-epoch 1{''.join(' or ' + p for p in possible)}, or another --num-epochs",
        )
    logs = total // updates
    if logs != logs_in_run:
        warn(
            f"{_number(logs_per_epoch)} logs per epoch are not possible with "
            f"{counted(total, 'weight update')} in {counted(num_epochs, 'epoch')}: "
            f"logging {counted(logs, 'time')} in the run"
        )
    return updates


def updates_from_steps_per_execution(
    steps_per_execution: int, batching: Batching, updates_per_epoch: int, num_epochs: int
) -> int:
    """Weight updates per execution from ``steps_per_execution``, micro-batches per replica as in Keras.

    Raises:
        ConfigurationError: not whole weight updates, or not a whole number of executions per epoch (or of
            epochs per execution).
    """
    count = batching.gradient_accumulation_count
    if steps_per_execution < 1 or steps_per_execution % count:
        legal = nearest_multiples(max(steps_per_execution, 1), count)
        raise ConfigurationError(
            f"--steps-per-execution {steps_per_execution} is not a multiple of the gradient accumulation "
            f"count {count}: an execution ends after a weight update",
            f"use --steps-per-execution {_join(legal)}",
        )
    updates = steps_per_execution // count
    total = updates_per_epoch * num_epochs
    whole = updates_per_epoch % updates == 0 or updates % updates_per_epoch == 0
    if total % updates or not whole:
        options = set(divisors(updates_per_epoch)) | {updates_per_epoch * d for d in divisors(num_epochs)}
        best = sorted(sorted(options, key=lambda d: (abs(d - updates), d))[:2])
        raise ConfigurationError(
            f"--steps-per-execution {steps_per_execution} is {counted(updates, 'weight update')}, which "
            f"do not divide the {counted(updates_per_epoch, 'weight update')} of an epoch "
            f"({counted(num_epochs, 'epoch')})",
            f"use --steps-per-execution {_join([d * count for d in best])}",
        )
    return updates


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def replicas_for_ipus(ipus: int, ipus_per_replica: int) -> int:
    """Replicas that fill ``ipus`` IPUs.

    Raises:
        ConfigurationError: not a multiple of the IPUs one replica takes.
    """
    if ipus < 1 or ipus % ipus_per_replica:
        legal = nearest_multiples(max(ipus, 1), ipus_per_replica)
        raise ConfigurationError(
            f"--ipus {ipus} is not a multiple of the {counted(ipus_per_replica, 'IPU')} that one replica takes",
            f"use --ipus {_join(legal)}",
        )
    return ipus // ipus_per_replica


def next_power_of_two(value: int) -> int:
    """The SDK hands out IPUs in powers of two: three stages occupy four IPUs."""
    return 1 << (value - 1).bit_length()


def check_distributed_batch_norm(group_size: int, num_replicas: int, ipus_per_replica: int) -> None:
    """Distributed batch norm: whole groups of replicas, one IPU per replica (the SDK's condition).

    Raises:
        ConfigurationError: otherwise.
    """
    if group_size == 1:
        return
    legal = [d for d in divisors(num_replicas) if d > 1]
    if num_replicas % group_size:
        hint = f"use --dbn-replica-group-size {_join([1] + legal)}"
        raise ConfigurationError(
            f"--dbn-replica-group-size {group_size} does not divide the {counted(num_replicas, 'replica')}",
            hint,
        )
    if ipus_per_replica > 1:
        raise ConfigurationError(
            f"--dbn-replica-group-size {group_size} needs a model on one IPU, but it is pipelined over "
            f"{ipus_per_replica}",
            "use --dbn-replica-group-size 1, or drop the pipeline splits",
        )
