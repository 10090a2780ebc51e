"""Runs the timed work in turns and keeps every time: first execution, warm-up until steady, measured rounds.

A ``Contender`` executes work: the session, plain Keras, or the input pipeline.  Several of them take turns, round by
round in alternating order, so that a temporary slowdown of the machine affects all of them.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

from ipucnn.benchmarking.intervals import is_steady
from ipucnn.benchmarking.records import Execution, Limits, Warmup
from ipucnn.config.bounds import MIN_EXECUTIONS
from ipucnn.events import Event, Events, Note, Progress
from ipucnn.text import counted, number

# The most by which an execution is lengthened at a time: the first ones are slower than those that follow.
_GROWTH = 8


class Contender:
    """Work that can be timed.

    Attributes:
        name: "session", "keras" or another name that distinguishes it from the others.
        description: a description of a contender that the session is compared with.
        samples_per_unit: the samples of one unit of work.
        granule: the number of units of which an execution is a multiple.
        fixed_units: the units of an execution if they are prescribed, else None.
    """

    name = ""
    description = ""
    samples_per_unit = 1
    granule = 1
    fixed_units: Optional[int] = None

    def prepare(self, num_units: int) -> None:
        """Restores the steady state before an execution of ``num_units`` units, outside the timed part."""

    def execute(self, num_units: int) -> None:
        """Runs ``num_units`` units; the result is on the host when it returns.  This is timed."""
        raise NotImplementedError

    def check(self) -> None:
        """Checks the last execution's result, outside the timed part.

        Raises:
            VoidError: the result holds NaN or infinite values.
        """


class Reference:
    """A constant workload, run before, between and after rounds to measure the machine's speed.

    Attributes:
        repetitions: the repetitions per call.
    """

    repetitions = 1

    def suit(self, execution_s: float) -> None:
        """Adapts the workload to the length of an execution; called once."""

    def __call__(self) -> Tuple[float, float]:
        """Does the work and returns the seconds and the processor seconds of one repetition."""
        raise NotImplementedError


@dataclass(frozen=True)
class Clocks:
    """The functions that return seconds and processor seconds, and the time at which the benchmark began."""

    began: float
    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time

    @property
    def spent_s(self) -> float:
        """The seconds since the benchmark began."""
        return self.wall() - self.began


@dataclass(frozen=True)
class Side:
    """A contender that is warm.

    Attributes:
        units: the units of an execution.
        first_s: the time of its first execution, of one granule of units, which may compile.
        warm_s: the time of the last warm-up execution.
        warmup: the executions before measuring.
    """

    contender: Contender
    units: int
    first_s: float
    warm_s: float
    warmup: Warmup


@dataclass(frozen=True)
class Rounds:
    """The measured rounds.

    Attributes:
        sides: the contenders that take turns; some are missing if an interrupt ended the warm-up.
        turns: the executions of each round, one for each side.
        interrupted: whether the user stopped the measurement.
        shortfall: a sentence about the requested measurements that the time limit cut off; None if there are none.
    """

    sides: Tuple[Side, ...]
    turns: Tuple[Tuple[Execution, ...], ...] = ()
    interrupted: bool = False
    shortfall: Optional[str] = None

    def executions(self, side: int = 0) -> List[Execution]:
        """Returns the executions of a side; the session, or the whole input pipeline, is side 0."""
        return [turn[side] for turn in self.turns]


def measure(
    contenders: Sequence[Contender],
    limits: Limits,
    clocks: Clocks,
    reference: Optional[Reference] = None,
    is_decided: Callable[[Rounds], bool] = lambda rounds: True,
) -> Events[Rounds]:
    """Warms the contenders up one by one, then measures them in turns.

    Args:
        contenders: the work to measure, at least one.
        limits: the limits of time and executions.
        clocks: the clocks of the measurement.
        reference: the workload to run before, between and after rounds.
        is_decided: the function called after each round from the least number on; while it returns False, measuring
            continues until ``max_time_s``.

    Returns:
        The rounds; an interrupt (KeyboardInterrupt) ends them with the finished ones.

    Raises:
        ValueError: a contender's prescribed execution is no multiple of its granule.
        Exception: any exception of a contender.
    """
    rounds = Rounds(())
    try:
        for contender in contenders:
            side = yield from _warm_up(contender, limits, clocks, len(contenders))
            rounds = replace(rounds, sides=(*rounds.sides, side))
        if reference is not None:
            reference.suit(sum(side.warm_s for side in rounds.sides))
        ends_s = max(limits.max_time_s, clocks.spent_s + limits.max_time_s / 3)
        before = reference() if reference is not None else None
        is_last = False
        while not is_last:
            start_s = clocks.spent_s
            turn = _turn(rounds, clocks)
            after = reference() if reference is not None else None
            if before is not None and after is not None:
                around = [(a + b) / 2 for a, b in zip(before, after)]
                turn = tuple(Execution(e.samples, e.wall_s, e.cpu_s, *around) for e in turn)
            before = after
            # Only whole rounds count, so that contenders stay paired.
            rounds = replace(rounds, turns=(*rounds.turns, turn))
            is_over = 2 * clocks.spent_s - start_s > ends_s and len(rounds.turns) >= MIN_EXECUTIONS
            left = _left(rounds, limits)
            is_last = is_over or (not left and is_decided(rounds))
            if is_last and left:
                rounds = replace(rounds, shortfall=_shortfall(rounds, limits))
            done = len(rounds.turns)
            if is_last:
                yield from _ended("measured", done, _speeds(rounds))
            else:
                yield Progress("measured", done, done + max(left, 1), _speeds(rounds))
    except KeyboardInterrupt:
        return replace(rounds, interrupted=True)
    return rounds


def _ended(phase: str, num_executions: int, figures: str) -> Iterator[Event]:
    """Yields that a phase ended, with its executions."""
    count = f": {counted(num_executions, 'execution')}" if num_executions > 1 else ""
    yield Note(f"{phase}{count}, {figures}")
    yield Progress(phase, num_executions, num_executions, figures)


def _time(contender: Contender, units: int, clocks: Clocks) -> Execution:
    """Runs and times an execution."""
    contender.prepare(units)
    wall, cpu = clocks.wall(), clocks.cpu()
    contender.execute(units)
    wall_s, cpu_s = clocks.wall() - wall, clocks.cpu() - cpu
    contender.check()
    return Execution(units * contender.samples_per_unit, wall_s, cpu_s)


def _turn(rounds: Rounds, clocks: Clocks) -> Tuple[Execution, ...]:
    """Runs a round: every other one in the opposite order."""
    step = 1 if len(rounds.turns) % 2 == 0 else -1
    executions = [_time(side.contender, side.units, clocks) for side in rounds.sides[::step]]
    return tuple(executions[::step])


def _left(rounds: Rounds, limits: Limits) -> int:
    """Returns how many rounds the limits still ask for: 0 if there are enough."""
    first = rounds.executions()
    left_s = limits.min_time_s - sum(execution.wall_s for execution in first)
    return max(limits.min_executions - len(first), math.ceil(left_s / max(first[-1].wall_s, 1e-9)), 0)


def _warm_up(contender: Contender, limits: Limits, clocks: Clocks, num_contenders: int) -> Events[Side]:
    """Warms up until ``max_warmup_s``, or until the executions of ``num_contenders`` need the rest of the time."""
    units = contender.fixed_units or contender.granule
    if units % contender.granule:
        raise ValueError(f"{contender.name}: {units} units are no multiple of {contender.granule}")
    phase = f"{contender.name}: first execution"
    yield Progress(phase, 0, 1)
    first_s = _time(contender, units, clocks).wall_s
    yield from _ended(phase, 1, f"{first_s:.2f} s, compiling included")
    started, phase = clocks.wall(), f"{contender.name}: warm-up"
    costs: List[float] = []
    warm_s = seconds = 0.0
    steady = False

    def has_time() -> bool:
        needed_s = (1 + limits.min_executions * num_contenders) * warm_s
        return seconds + warm_s <= limits.max_warmup_s and clocks.spent_s + needed_s <= limits.max_time_s

    while not steady and (not costs or has_time()):
        warm_s = _time(contender, units, clocks).wall_s
        costs.append(warm_s / units)
        if contender.fixed_units is None and warm_s < limits.execution_s / 2:
            grown = math.ceil(units * min(_GROWTH, limits.execution_s / max(warm_s, 1e-9)))
            units = max(contender.granule, grown // contender.granule * contender.granule)
        else:
            steady = is_steady(costs)
        seconds = clocks.wall() - started
        yield Progress(phase, len(costs), None)
    yield from _ended(phase, len(costs), f"{seconds:.1f} s, {'steady' if steady else 'not steady yet'}")
    return Side(
        contender, units, first_s, warm_s, Warmup(executions=len(costs), seconds=seconds, steady=steady)
    )


def _shortfall(rounds: Rounds, limits: Limits) -> str:
    first = rounds.executions()
    if len(first) < limits.min_executions:
        what = f"{len(first):,} executions were measured instead of {limits.min_executions:,}"
    else:
        measured_s = sum(execution.wall_s for execution in first)
        shown_s = math.floor(1000 * measured_s) / 1000  # not rounded up to what was asked for
        what = f"{shown_s:g} s were measured instead of the {limits.min_time_s:g} s of --min-time"
    return f"{what}, because --max-time {limits.max_time_s:g} s was over"


def _speeds(rounds: Rounds) -> str:
    parts = []
    for index, side in enumerate(rounds.sides):
        executions = rounds.executions(index)
        rate = sum(e.samples for e in executions) / sum(e.wall_s for e in executions)
        parts.append(f"{side.contender.name} {number(rate)} images/s")
    return ", ".join(parts)
