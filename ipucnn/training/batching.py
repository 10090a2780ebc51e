"""Whole numbers that a Program is made of: multiples, divisors, frequencies, and the SDK's rules about them.

No TensorFlow.  The rules are those of the public Graphcore CNN application and of the Poplar SDK's pipelining API;
every refusal names the nearest legal values.
"""

from fractions import Fraction
from typing import Iterable, List

from ipucnn.errors import ConfigurationError
from ipucnn.text import counted


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
    return [m for m in sorted({below, -(-value // base) * base}) if m > 0] or [base]


def divisors(number: int) -> List[int]:
    """All divisors of a positive integer in rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def next_power_of_two(value: int) -> int:
    """The SDK hands out IPUs in powers of two: three stages occupy four IPUs."""
    return 1 << (value - 1).bit_length()


def alternatives(values: Iterable[int]) -> str:
    """Legal values as a hint names them."""
    return " or ".join(map(str, values))


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
    epochs = 1 if per_epoch >= 1 else num_epochs
    updates, events = updates_per_epoch * epochs, per_epoch * epochs
    return updates // min(divisors(updates), key=lambda d: (abs(d - events), d))


def updates_from_steps_per_execution(
    steps_per_execution: int, count: int, updates_per_epoch: int, num_epochs: int
) -> int:
    """Weight updates per execution from ``steps_per_execution``, micro-batches per replica as in Keras.

    Args:
        count: the gradient accumulation count.

    Raises:
        ConfigurationError: not whole weight updates, or not a whole number of executions per epoch (or of
            epochs per execution).
    """
    if steps_per_execution % count:
        raise ConfigurationError(
            f"--steps-per-execution {steps_per_execution} is not a multiple of the gradient accumulation "
            f"count {count}: an execution ends after a weight update",
            f"use --steps-per-execution {alternatives(nearest_multiples(steps_per_execution, count))}",
        )
    updates = steps_per_execution // count
    whole = updates_per_epoch % updates == 0 or updates % updates_per_epoch == 0
    if updates_per_epoch * num_epochs % updates or not whole:
        options = {*divisors(updates_per_epoch), *(updates_per_epoch * d for d in divisors(num_epochs))}
        best = sorted(sorted(options, key=lambda d: (abs(d - updates), d))[:2])
        raise ConfigurationError(
            f"--steps-per-execution {steps_per_execution} is {counted(updates, 'weight update')}, which "
            f"do not divide the {counted(updates_per_epoch, 'weight update')} of an epoch "
            f"({counted(num_epochs, 'epoch')})",
            f"use --steps-per-execution {alternatives(d * count for d in best)}",
        )
    return updates


def check_distributed_batch_norm(group_size: int, num_replicas: int, ipus_per_replica: int) -> None:
    """Distributed batch norm: whole groups of replicas, one IPU per replica (the SDK's condition).

    Raises:
        ConfigurationError: otherwise.
    """
    if num_replicas % group_size:
        raise ConfigurationError(
            f"--dbn-replica-group-size {group_size} does not divide the {counted(num_replicas, 'replica')}",
            f"use --dbn-replica-group-size {alternatives(divisors(num_replicas))}",
        )
    if group_size > 1 and ipus_per_replica > 1:
        raise ConfigurationError(
            f"--dbn-replica-group-size {group_size} needs a model on one IPU, but it is pipelined over "
            f"{ipus_per_replica}",
            "use --dbn-replica-group-size 1, or drop the pipeline splits",
        )
