"""Runs the timed work in turns and keeps every time: first execution, warm-up until steady, measured rounds.

A ``Contender`` executes work: the session, plain Keras, or the input pipeline.  Several of them take turns, round by
round in alternating order, so that a temporary slowdown of the machine affects all of them.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional, Sequence, Tuple

from ipucnn.benchmarking.records import Execution, Limits
from ipucnn.benchmarking.statistics import is_steady
from ipucnn.text import number

Report = Callable[[str, int, int, str], None]
"""(phase, executions done, of how many, figures): called after each execution, and at the end of each phase, when as
many are done as there are.  0 as the second number means that the total is not known yet."""


def ignore_progress(phase: str, done: int, of: int, figures: str) -> None:
    """A ``Report`` that does nothing."""


MIN_ROUNDS = 3
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
            NotFiniteError: the result holds NaN or infinite values.
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


@dataclass
class Measurement:
    """The measurement of one contender.

    Attributes:
        first_s: the time of its first execution, of one granule of units, which may compile.
        warm_s: the time of the last warm-up execution.
        units: the units of an execution after warm-up.
        steady: whether warm-up ended because times no longer changed.
        executions: the measured executions.
    """

    contender: Contender
    first_s: float = 0.0
    warmup_s: float = 0.0
    warm_s: float = 0.0
    warmup_executions: int = 0
    units: int = 0
    steady: bool = False
    executions: List[Execution] = field(default_factory=list)


@dataclass
class Measured:
    """The measurements of all contenders; ``interrupted`` if the user stopped them."""

    measurements: List[Measurement]
    interrupted: bool = False
    out_of_time: bool = False


def measure(
    contenders: Sequence[Contender],
    limits: Limits,
    report: Report = ignore_progress,
    reference: Optional[Reference] = None,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
    started: Optional[float] = None,
    is_decided: Callable[[Sequence[Measurement]], bool] = lambda measurements: True,
) -> Measured:
    """Warms the contenders up one by one, then measures them in turns.

    Args:
        contenders: the work to measure, at least one.
        limits: the limits of time and executions.
        report: the function called with the progress.
        reference: the workload to run before, between and after rounds.
        clock, cpu_clock: functions that return seconds, and processor seconds of the process.
        started: the time by that clock at which the benchmark began; None: now.
        is_decided: the function called after each round from the least number on; while it returns False, measuring
            continues until ``max_time_s``.

    Returns:
        The measurements; an interrupt (KeyboardInterrupt) ends them with the finished rounds.

    Raises:
        ValueError: a contender's prescribed execution is no multiple of its granule.
        Exception: any exception of a contender.
    """
    measured = Measured([Measurement(contender) for contender in contenders])
    began = clock() if started is None else started
    try:
        for measurement in measured.measurements:
            _warm_up(
                measurement, limits, report, clock, limits.max_time_s - (clock() - began), len(contenders)
            )
        if reference is not None:
            reference.suit(sum(m.warm_s for m in measured.measurements))
        left_s = max(limits.max_time_s - (clock() - began), limits.max_time_s / 3)
        _rounds(measured, limits, report, reference, (clock, cpu_clock), left_s, is_decided)
    except KeyboardInterrupt:
        measured.interrupted = True
    return measured


def _time(contender: Contender, units: int, clocks: Sequence[Callable[[], float]]) -> List[float]:
    """Returns the time of an execution by each of the clocks."""
    contender.prepare(units)
    before = [clock() for clock in clocks]
    contender.execute(units)
    spent = [clock() - start for clock, start in zip(clocks, before)]
    contender.check()
    return spent


def _whole(units: int, granule: int) -> int:
    return max(granule, units // granule * granule)


def _warm_up(
    m: Measurement,
    limits: Limits,
    report: Report,
    clock: Callable[[], float],
    left_s: float,
    num_contenders: int,
) -> None:
    """Warms up until ``max_warmup_s``, or until the executions of ``num_contenders`` need the rest of ``left_s``."""
    contender = m.contender
    began = clock()
    m.units = contender.fixed_units or contender.granule
    if m.units % contender.granule:
        raise ValueError(f"{contender.name}: {m.units} units are no multiple of {contender.granule}")
    report(f"{contender.name}: first execution", 0, 1, "")
    m.first_s = _time(contender, m.units, [clock])[0]
    report(f"{contender.name}: first execution", 1, 1, f"{m.first_s:.2f} s, compiling included")
    started, spent = clock(), 0.0
    costs: List[float] = []

    def has_time() -> bool:
        needed = limits.min_executions * num_contenders * spent
        ends = clock() + spent - began + needed <= left_s
        return m.warmup_s + spent <= limits.max_warmup_s and ends

    while not m.steady and (not costs or has_time()):
        spent = _time(contender, m.units, [clock])[0]
        m.warmup_executions += 1
        m.warm_s = spent
        costs.append(spent / m.units)
        if contender.fixed_units is None and spent < limits.execution_s / 2:
            grown = m.units * min(_GROWTH, limits.execution_s / max(spent, 1e-9))
            m.units = _whole(math.ceil(grown), contender.granule)
        else:
            m.steady = is_steady(costs)
        m.warmup_s = clock() - started
        report(f"{contender.name}: warm-up", m.warmup_executions, 0, "")
    how = "steady" if m.steady else "not steady yet"
    report(
        f"{contender.name}: warm-up", m.warmup_executions, m.warmup_executions, f"{m.warmup_s:.1f} s, {how}"
    )


def _rounds(
    measured: Measured,
    limits: Limits,
    report: Report,
    reference: Optional[Reference],
    clocks: Tuple[Callable[[], float], Callable[[], float]],
    left_s: float,
    is_decided: Callable[[Sequence[Measurement]], bool],
) -> None:
    count, clock = len(measured.measurements), clocks[0]
    began = clock()
    rounds: int = 0
    before = reference() if reference is not None else None
    while True:
        start = clock()
        turn: List[Any] = [None] * count
        order = range(count) if rounds % 2 == 0 else range(count - 1, -1, -1)
        for i in order:
            m = measured.measurements[i]
            turn[i] = (m.units * m.contender.samples_per_unit, *_time(m.contender, m.units, clocks))
        after = reference() if reference is not None else None
        around: List[Optional[float]] = [None, None]
        if before is not None and after is not None:
            around = [(a + b) / 2 for a, b in zip(before, after)]
        # Only whole rounds count, so that contenders stay paired.
        for m, times in zip(measured.measurements, turn):
            m.executions.append(Execution(*times, *around))
        before = after
        rounds += 1
        spent_s, round_s = clock() - began, clock() - start
        first = measured.measurements[0].executions
        measured_s = sum(e.wall_s for e in first)
        enough = rounds >= limits.min_executions and measured_s >= limits.min_time_s
        measured.out_of_time = spent_s + round_s > left_s and rounds >= MIN_ROUNDS
        left_rounds = math.ceil((limits.min_time_s - measured_s) / max(first[-1].wall_s, 1e-9))
        left = max(limits.min_executions - rounds, left_rounds, 1)
        if measured.out_of_time or (enough and is_decided(measured.measurements)):
            measured.out_of_time = not enough
            report("measured", rounds, rounds, _speeds(measured))
            return
        report("measured", rounds, rounds + left, _speeds(measured))


def shortfall(measured: Measured, limits: Limits) -> Optional[str]:
    """Returns a sentence about the requested measurements that ``--max-time`` cut off; None if there are none."""
    if not measured.out_of_time:
        return None
    first = measured.measurements[0].executions
    measured_s = sum(execution.wall_s for execution in first)
    what = (
        f"{len(first):,} executions were measured instead of {limits.min_executions:,}"
        if len(first) < limits.min_executions
        else f"{measured_s:.1f} s were measured instead of the {limits.min_time_s:g} s of --min-time"
    )
    return f"{what}, because --max-time {limits.max_time_s:g} s was over"


def _speeds(measured: Measured) -> str:
    parts = []
    for m in measured.measurements:
        total = sum(e.wall_s for e in m.executions)
        rate = sum(e.samples for e in m.executions) / total
        parts.append(f"{m.contender.name} {number(rate)} images/s")
    return ", ".join(parts)
