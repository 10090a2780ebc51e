"""Computes the whole numbers of a Program: multiples, divisors and frequencies, by the SDK's rules.

It does not import TensorFlow.  The rules are those of the public Graphcore CNN application and of the Poplar SDK's
pipelining API; every error names the nearest legal values.
"""

from fractions import Fraction
from typing import Iterable, List

from ipucnn.errors import ConfigurationError
from ipucnn.text import counted


def overlap_length(schedule: str, num_stages: int) -> int:
    """Returns the number that the gradient accumulation count must be a multiple of when training a pipeline.

    It is 2 x stages for Grouped, which fills and drains forward and backward separately; stages for Interleaved; and 1
    for Sequential and without a pipeline (``GetPipelineOverlapLength`` of the Poplar plugin).
    """
    if num_stages <= 1 or schedule == "Sequential":
        return 1
    return 2 * num_stages if schedule == "Grouped" else num_stages


def nearest_multiples(value: int, base: int) -> List[int]:
    """Returns the positive multiples of ``base`` nearest to ``value``: one if it is a multiple, else one or two."""
    below = value // base * base
    return [m for m in sorted({below, -(-value // base) * base}) if m > 0] or [base]


def divisors(number: int) -> List[int]:
    """Returns all divisors of a positive integer in rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def next_power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least ``value``.

    The SDK allocates IPUs in powers of two: three stages occupy four IPUs.
    """
    return 1 << (value - 1).bit_length()


def alternatives(values: Iterable[int]) -> str:
    """Returns legal values as the text of a hint."""
    return " or ".join(map(str, values))


def parse_frequency(value: object) -> Fraction:
    """Returns ``2``, ``0.5``, ``1/3`` or ``0.3333333333333333`` as an exact fraction.

    Raises:
        ConfigurationError: the value is not a number or fraction, or is negative.
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
    """Returns the weight updates between two events of a frequency above 0, or of the nearest possible frequency.

    Events can only happen between weight updates, and all executions are equally long.  So from one event per epoch on,
    the number of events per epoch divides the updates per epoch; below that, the number of events in the run divides
    the updates of the run.
    """
    epochs = 1 if per_epoch >= 1 else num_epochs
    updates, events = updates_per_epoch * epochs, per_epoch * epochs
    return updates // min(divisors(updates), key=lambda d: (abs(d - events), d))


def updates_from_steps_per_execution(
    steps_per_execution: int, count: int, updates_per_epoch: int, num_epochs: int
) -> int:
    """Returns the weight updates per execution from ``steps_per_execution``, micro-batches per replica as in Keras.

    Args:
        steps_per_execution: micro-batches per replica in an execution.
        count: the gradient accumulation count.
        updates_per_epoch: weight updates per epoch.
        num_epochs: epochs of the run.

    Raises:
        ConfigurationError: an execution is not a whole number of weight updates; or neither is an epoch a whole number
            of executions, nor an execution a whole number of epochs; or the executions do not fill the run.
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
    """Checks that distributed batch norm has whole groups of replicas, and one IPU per replica (the SDK's condition).

    Raises:
        ConfigurationError: a condition is not met.
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
