"""Phases, rounds and limits of a measurement, with test doubles of the contenders and of the clock."""

import pytest
from msgspec.structs import replace
from support.events import Recorded

from ipucnn.benchmarking.rounds import Clocks, Contender, Reference
from ipucnn.benchmarking.rounds import measure as measure_rounds
from ipucnn.benchmarking.settings import DEFAULTS
from ipucnn.events import Note, Progress, View, show


def limited(**limits):
    return replace(DEFAULTS, **limits)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Fake(Contender):
    """A contender that takes ``cost(call, units)`` seconds; ``log`` lists every execution."""

    def __init__(self, clock, cost, name="session", samples=4, granule=1, fixed=None, log=None, raises=None):
        self.name, self.samples_per_unit, self.granule, self.fixed_units = name, samples, granule, fixed
        self.clock, self.cost, self.calls, self.raises = clock, cost, 0, raises or {}
        self.log = log if log is not None else []
        self.checked = 0

    def execute(self, num_units):
        self.calls += 1
        self.log.append((self.name, num_units))
        if self.calls in self.raises:
            raise self.raises[self.calls]
        self.clock.now += self.cost(self.calls, num_units)

    def check(self):
        self.checked += 1
        self.clock.now += 100.0  # not part of any measured time


def measure(contenders, limits, clock, cpu_clock=None, view=None, **values):
    rounds = measure_rounds(contenders, limits, Clocks(0.0, clock, cpu_clock or clock), **values)
    return show(rounds, view or View())


def alone(cost, limits, **values):
    """Measures one contender of ``cost(call, units)`` seconds without checks; returns the result and the time."""
    clock = Clock()
    contender = Fake(clock, cost)
    contender.check = lambda: None
    return measure([contender], limits, clock=clock, **values), clock.now


def compiling(call, units):
    return 0.01 * units + (5.0 if call == 1 else 0.0)


def test_compiling_and_warm_up_are_not_measured():
    clock = Clock()
    contender = Fake(clock, compiling)
    rounds = measure([contender], limited(min_time_s=0.0, max_warmup_s=1e9, max_time_s=1e9), clock)
    (side,), executions = rounds.sides, rounds.executions()
    assert side.first_s == pytest.approx(5.01)
    assert side.warmup.steady and side.warmup.executions >= 6
    assert len(executions) == 10
    # Executions are long enough to be timed, and count the samples that were computed.
    assert all(e.wall_s == pytest.approx(0.01 * side.units) for e in executions)
    assert executions[0].wall_s >= 0.05
    assert all(e.samples == 4 * side.units for e in executions)
    assert contender.checked == contender.calls


def test_warm_up_continues_until_steady():
    limits = limited(min_time_s=0, max_warmup_s=1e9, max_time_s=1e9)
    rounds = alone(lambda call, units: 1.0 * (1 + 8 * 0.7**call), limits)[0]
    warmup = rounds.sides[0].warmup
    assert warmup.steady and warmup.executions > 8
    times = [e.wall_s for e in rounds.executions()]
    assert max(times) / min(times) < 1.1


@pytest.mark.parametrize("seconds, warm", [(30.0, 1), (4.0, None)])
def test_warm_up_has_a_cap(seconds, warm):
    limits = limited(min_time_s=0, max_time_s=1e9, max_warmup_s=10.0, execution_s=0)
    warmup = alone(lambda call, units: seconds * 0.8**call, limits)[0].sides[0].warmup
    assert not warmup.steady and (warm is None or warmup.executions == warm)
    assert warmup.seconds <= 10.0 or warmup.executions == 1


def test_prescribed_executions_and_granules():
    clock = Clock()
    fixed = Fake(clock, compiling, fixed=7)
    grained = Fake(clock, compiling, granule=16)
    for contender in (fixed, grained):
        measure([contender], limited(min_time_s=0, max_time_s=1e9), clock)
    assert {units for _, units in fixed.log} == {7}
    assert all(units % 16 == 0 for _, units in grained.log)


def test_an_execution_must_hold_whole_granules():
    contender = Fake(Clock(), compiling, granule=64, fixed=100)
    with pytest.raises(ValueError, match="100 units are no multiple of 64"):
        measure([contender], limited(min_time_s=0), contender.clock)
    assert contender.calls == 0


def test_min_time_counts_the_first_contender_only():
    """The other contender and the reference workload, which take far longer, do not count."""
    clock = Clock()

    class Slow(Reference):
        def __call__(self):
            clock.now += 50.0
            return 50.0, 50.0

    contenders = [Fake(clock, lambda c, u: 1.0, "a"), Fake(clock, lambda c, u: 9.0, "b")]
    limits = limited(min_executions=3, min_time_s=7.0, max_time_s=1e9)
    result = measure(contenders, limits, reference=Slow(), clock=clock)
    assert [len(turn) for turn in result.turns] == [2] * 7


def test_contenders_take_turns_in_alternating_order():
    clock, log = Clock(), []
    contenders = [Fake(clock, lambda c, u: 1.0, "a", log=log), Fake(clock, lambda c, u: 2.0, "b", log=log)]
    result = measure(contenders, limited(min_executions=4, min_time_s=0, max_time_s=1e9), clock=clock)
    assert [name for name, _ in log][-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [[e.wall_s for e in turn] for turn in result.turns] == [[1.0, 2.0]] * 4


@pytest.mark.parametrize(
    ("cost", "limits", "counts", "note"),
    [
        (lambda c, u: 1.0, limited(min_executions=3, min_time_s=30.0), (30, 30), None),
        (
            lambda c, u: 20.0,
            limited(max_time_s=100.0),
            (3, 9),
            " instead of 10, because --max-time 100 s was over",
        ),
        (
            lambda c, u: 2.0,
            limited(min_executions=3, min_time_s=60.0, max_time_s=30.0),
            (3, 15),
            " s were measured instead of the 60 s of --min-time, because --max-time 30 s was over",
        ),
        # Compiling leaves the executions a third of the time; three are made however long they take.
        (lambda c, u: 500.0 if c == 1 else 5.0, limited(max_time_s=90.0), (6, 6), ""),
        (lambda c, u: 200.0, limited(max_time_s=100.0), (3, 3), ""),
    ],
)
def test_min_time_and_max_time(cost, limits, counts, note):
    result, now = alone(cost, limits)
    assert counts[0] <= len(result.turns) <= counts[1]
    assert result.shortfall is None if note is None else result.shortfall.endswith(note)
    assert not note or now <= limits.max_time_s


def test_the_reference_is_timed_around_each_round():
    clock = Clock()
    speeds = iter([float(i) for i in range(1, 20)])

    class Counting(Reference):
        suited = None

        def suit(self, execution_s):
            self.suited = execution_s

        def __call__(self):
            spent = next(speeds)
            clock.now += spent
            return spent, 10 * spent

    contender, reference = Fake(clock, lambda c, u: 1.0), Counting()
    limits = limited(min_executions=3, min_time_s=0, max_time_s=1e9)
    result = measure(
        [contender], limits, reference=reference, clock=clock, cpu_clock=lambda: 2 * clock.now
    )  # fmt: skip
    rows = result.executions()
    assert [e.reference_s for e in rows] == [1.5, 2.5, 3.5]
    assert [e.reference_cpu_s for e in rows] == [15.0, 25.0, 35.0]
    assert [(e.wall_s, e.cpu_s) for e in rows] == [(1.0, 2.0)] * 3
    assert reference.suited == 1.0


def test_preparation_of_a_contender_is_not_timed():
    clock = Clock()
    contender = Fake(clock, lambda c, u: 1.0)
    prepared = []

    def prepare(units):
        clock.now += 50.0
        prepared.append(units)

    contender.prepare = prepare
    result = measure([contender], limited(min_time_s=0, max_time_s=1e9, max_warmup_s=1e9), clock=clock)
    assert {e.wall_s for e in result.executions()} == {1.0}
    assert len(prepared) == contender.calls and prepared == [units for _, units in contender.log]


def test_warm_up_leaves_time_for_the_executions():
    """Executions of 12 s within 150 s: one warms up and ten are measured, without six to test for steady times."""
    result, now = alone(lambda c, u: 16.0 if c == 1 else 12.0, limited(max_warmup_s=1e9))
    warmup = result.sides[0].warmup
    assert warmup.executions == 1 and len(result.turns) == 10 and now <= 150.0
    assert not warmup.steady


@pytest.mark.parametrize("decides_at, count", [(0, 10), (25, 25), (10**9, 80)])
def test_measuring_continues_until_decided_or_out_of_time(decides_at, count):
    checked = []

    def is_decided(rounds):
        checked.append(len(rounds.turns))
        return checked[-1] >= decides_at

    limits = limited(min_time_s=0, max_time_s=90.0, max_warmup_s=8.0)
    result, now = alone(lambda c, u: 1.0, limits, is_decided=is_decided)
    assert abs(len(result.turns) - count) <= 5 * (count == 80)
    assert checked[0] == 10 and now <= 90.0 and result.shortfall is None


@pytest.mark.parametrize("call, finished", [(1, 0), (3, 0), (12, 5)])
def test_an_interrupt_keeps_whole_rounds(call, finished):
    clock = Clock()
    first = Fake(clock, lambda c, u: 1.0, "a")
    second = Fake(clock, lambda c, u: 1.0, "b", raises={call: KeyboardInterrupt()})
    second.check = first.check = lambda: None
    result = measure([first, second], limited(min_time_s=0), clock=clock)
    assert result.interrupted
    assert all(len(turn) == 2 for turn in result.turns)
    if finished == 0:
        assert not result.turns and len(result.sides) == 1
    else:
        assert len(result.turns) == second.calls - 1 - 1 - result.sides[1].warmup.executions


def test_exceptions_of_a_contender_are_raised():
    clock = Clock()
    contender = Fake(clock, lambda c, u: 1.0, raises={3: ValueError("broken")})
    with pytest.raises(ValueError, match="broken"):
        measure([contender], limited(), clock=clock)


def test_progress_is_reported():
    clock, view = Clock(), Recorded()
    contender = Fake(clock, lambda c, u: 1.0)
    limits = limited(min_time_s=0, max_time_s=1e9)
    measure([contender], limits, clock, view=view)
    lines = [event.line.split(":")[0] for event in view.events if isinstance(event, Note)]
    assert lines == ["session", "session", "measured"]
    done = [event for event in view.events if isinstance(event, Progress) and event.work == "measured"]
    assert [event.done for event in done] == list(range(1, 11)) and done[-1].total == 10
    assert "4 images/s" in done[-1].figures
