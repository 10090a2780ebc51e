"""Runs sides in turns and keeps every time: first execution, warm-up until steady, measured rounds.

A side is something that can execute work: the session, or plain Keras.  Several sides take turns, round by
round in alternating order, so that what slows the machine down for a while slows down all of them.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional, Sequence

from ipucnn.benchmarking.statistics import is_steady

Report = Callable[[str, int, int, str], None]
"""(phase, done, of how many, figures): called after each execution, and at each phase's end with done = of."""

MIN_ROUNDS = 3
# An execution is made longer by at most this factor at a time: the first ones are slower than those that follow.
_GROWTH = 8


class Side:
    """What is measured.

    Attributes:
        name: "session" or "keras".
        samples_per_unit: samples of one unit of work.
        granule: an execution is a multiple of so many units.
        fixed_units: units of an execution if they are prescribed, else None.
    """

    name = ""
    samples_per_unit = 1
    granule = 1
    fixed_units: Optional[int] = None

    def execute(self, num_units: int) -> None:
        """Runs ``num_units`` units and has the result on the host when it returns; this is timed."""
        raise NotImplementedError

    def check(self) -> None:
        """Looks at the last execution's result, off the clock.

        Raises:
            NotFiniteError: it holds NaN or infinite values.
        """


@dataclass(frozen=True)
class Limits:
    """How long to measure.

    Attributes:
        min_executions, min_time_s: both are reached, if ``max_time_s`` allows.
        max_time_s: of everything, from ``started`` on.  A third of it is kept for the measured executions,
            however long compiling takes, and at least ``MIN_ROUNDS`` of them are made whatever they take.
        max_warmup_s: of each side, after which warm-up ends, steady or not; at least one execution is made.
        execution_s: what an execution is made to last, if one unit takes less.
    """

    min_executions: int = 10
    min_time_s: float = 10.0
    max_time_s: float = 150.0
    max_warmup_s: float = 15.0
    execution_s: float = 0.5


@dataclass(frozen=True)
class Execution:
    """One timed execution; ``reference_s`` is the reference work's time around it, None where there is none."""

    samples: int
    wall_s: float
    reference_s: Optional[float] = None


@dataclass
class Measurement:
    """What one side did.

    Attributes:
        first_s: time of its first execution, of one granule of units, which may compile.
        units: of an execution once warm.
        steady: whether warm-up ended because times no longer changed.
        executions: measured ones.
    """

    side: Side
    first_s: float = 0.0
    warmup_s: float = 0.0
    warmup_executions: int = 0
    units: int = 0
    steady: bool = False
    executions: List[Execution] = field(default_factory=list)


@dataclass
class Session:
    """The measurements of all sides; ``interrupted`` if the user stopped them."""

    measurements: List[Measurement]
    interrupted: bool = False
    out_of_time: bool = False


def measure(
    sides: Sequence[Side],
    limits: Limits,
    report: Report = lambda phase, done, of, figures: None,
    reference: Optional[Callable[[], float]] = None,
    clock: Callable[[], float] = time.perf_counter,
    started: Optional[float] = None,
) -> Session:
    """Warms the sides up one by one, then measures them in turns.

    Args:
        sides: at least one.
        limits: how long.
        report: told of progress.
        reference: does a fixed piece of work and returns its seconds; called before, between and after rounds.
        clock: seconds.
        started: when the benchmark began, by that clock; None: now.

    Returns:
        What was measured; an interrupt (KeyboardInterrupt) ends it with the finished rounds.

    Raises:
        Exception: whatever a side raises.
    """
    session = Session([Measurement(side) for side in sides])
    began = clock() if started is None else started
    try:
        for measurement in session.measurements:
            _warm_up(measurement, limits, report, clock)
        left_s = max(limits.max_time_s - (clock() - began), limits.max_time_s / 3)
        _rounds(session, limits, report, reference, clock, left_s)
    except KeyboardInterrupt:
        session.interrupted = True
    return session


def _time(side: Side, units: int, clock: Callable[[], float]) -> float:
    before = clock()
    side.execute(units)
    spent = clock() - before
    side.check()
    return spent


def _whole(units: int, granule: int) -> int:
    return max(granule, units // granule * granule)


def _warm_up(m: Measurement, limits: Limits, report: Report, clock: Callable[[], float]) -> None:
    side = m.side
    m.units = side.fixed_units or side.granule
    report(f"{side.name}: first execution", 0, 1, "")
    m.first_s = _time(side, m.units, clock)
    report(f"{side.name}: first execution", 1, 1, f"{m.first_s:.2f} s, compiling included")
    started, spent = clock(), 0.0
    costs: List[float] = []
    while not m.steady and (not costs or m.warmup_s + spent <= limits.max_warmup_s):
        spent = _time(side, m.units, clock)
        m.warmup_executions += 1
        costs.append(spent / m.units)
        if side.fixed_units is None and spent < limits.execution_s / 2:
            grown = m.units * min(_GROWTH, limits.execution_s / max(spent, 1e-9))
            m.units = _whole(math.ceil(grown), side.granule)
        else:
            m.steady = is_steady(costs)
        m.warmup_s = clock() - started
        report(f"{side.name}: warm-up", m.warmup_executions, 0, "")
    how = "steady" if m.steady else "not steady yet"
    report(f"{side.name}: warm-up", m.warmup_executions, m.warmup_executions, f"{m.warmup_s:.1f} s, {how}")


def _rounds(
    session: Session,
    limits: Limits,
    report: Report,
    reference: Optional[Callable[[], float]],
    clock: Callable[[], float],
    left_s: float,
) -> None:
    count = len(session.measurements)
    began = clock()
    rounds: int = 0
    before = reference() if reference is not None else None
    while True:
        start = clock()
        turn: List[Any] = [None] * count
        order = range(count) if rounds % 2 == 0 else range(count - 1, -1, -1)
        for i in order:
            m = session.measurements[i]
            turn[i] = (m.units * m.side.samples_per_unit, _time(m.side, m.units, clock))
        after = reference() if reference is not None else None
        around = (before + after) / 2 if before is not None and after is not None else None
        # Only whole rounds count, so that sides stay paired.
        for m, (samples, spent) in zip(session.measurements, turn):
            m.executions.append(Execution(samples, spent, around))
        before = after
        rounds += 1
        spent_s, round_s = clock() - began, clock() - start
        enough = rounds >= limits.min_executions and spent_s >= limits.min_time_s
        session.out_of_time = spent_s + round_s > left_s and rounds >= MIN_ROUNDS
        left_rounds = math.ceil((limits.min_time_s - spent_s) / max(round_s, 1e-9))
        left = max(limits.min_executions - rounds, left_rounds, 0)
        if enough or session.out_of_time:
            session.out_of_time = not enough
            report("measured", rounds, rounds, _speeds(session))
            return
        report("measured", rounds, rounds + left, _speeds(session))


def _speeds(session: Session) -> str:
    parts = []
    for m in session.measurements:
        total = sum(e.wall_s for e in m.executions)
        rate = sum(e.samples for e in m.executions) / total
        parts.append(f"{m.side.name} {rate:.4g} images/s")
    return ", ".join(parts)
