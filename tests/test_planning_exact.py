"""The planner against brute force, an integer program, a simulated pipeline, and properties of any planner."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from few_examples import tries
from hypothesis import assume, given
from hypothesis import strategies as st
from pipeline_simulator import simulate
from support.oracle import (
    all_starts,
    brute_force,
    check_fastest,
    free_tables,
    integer_program,
    masked,
    naive_fits,
    naive_tick,
)
from support.plans import SCHEDULES

from ipucnn.planning.schedules import Schedule, Ticks
from ipucnn.planning.search.exact import blocking_ranges, solve, some_split_fits, with_updates
from ipucnn.planning.search.tables import StageTables, chosen_options, item_starts, tick_s

# --- instances


def make_tables(
    seed,
    n,
    whole=True,
    tight=0.5,
    recompute=False,
    training=True,
    one_ipu=False,
    monotone=False,
    stages=0,
    transfer=1,
):
    """Makes random tables.  ``tight``: about this share of all runs is too large.  ``whole``: many ties.

    With ``stages``, each stage of a pipeline of that many stages has seconds of its own.

    Memory is arbitrary, different at each stage position and for each number of stages, and need not grow
    with the run; with ``monotone`` it does, and is the same everywhere.
    """
    rng = np.random.default_rng(seed)

    def draw(size):
        return rng.integers(0, 6, size).astype(float) if whole else rng.lognormal(0, 1.5, size)

    cut = transfer * draw(n + 1)
    cut[[0, n]] = 0
    memory_seed = int(rng.integers(1 << 30))
    seconds = rng.random(n)

    def memory(num_stages, stage):
        if monotone:
            total = np.cumsum([0, *seconds])
            return masked(total[None, :] - total[:-1, None])
        return masked(np.random.default_rng([memory_seed, num_stages, stage]).random((n, n + 1)))

    capacity = 1.0 - tight
    checkpoints = None
    if one_ipu:
        cut[:] = 0
        checkpoints = rng.random(n + 1) * 0.5
        capacity = 0.5 + (1 - tight) * 1.5
    if monotone:
        capacity *= n / 2

    def passes():
        return draw(n), draw(n) if training else np.zeros(n)

    forward, backward = passes()
    return StageTables(
        forward_s=forward,
        backward_s=backward,
        stage_s=tuple(passes() for _ in range(stages)),
        cut_s=cut,
        capacity_bytes=capacity,
        memory_bytes=memory,
        recompute=recompute,
        training=training,
        checkpoint_bytes=checkpoints,
    )


INSTANCES = dict(
    seed=st.integers(0, 2**32),
    n=st.sampled_from([1, 3, 5, 6, 7, 8, 9]),
    k=st.sampled_from([1, 2, 3, 3, 4, 4]),  # most faults show in several stages
    whole=st.booleans(),
    tight=st.sampled_from([0.0, 0.1, 0.4, 0.7]),
    recompute=st.booleans(),
    training=st.booleans(),
    transfer=st.sampled_from([1, 1, 20]),  # 20: transfers dominate
)


@pytest.mark.slow_cases("False-False", "False-True")
@pytest.mark.parametrize(("one_ipu", "stages_differ"), [(False, False), (False, True), (True, False)])
@tries(80, slow=600)
@given(**INSTANCES, schedule=st.sampled_from(SCHEDULES))
def test_brute_force_finds_nothing_better(
    one_ipu, stages_differ, seed, n, k, whole, tight, recompute, training, transfer, schedule
):
    """Covers stages on an IPU each, with the same seconds in all stages and with their own, and segments on one."""
    assume(k <= n)
    schedule, stages = "Sequential" if one_ipu else schedule, k if stages_differ else 0
    tables = make_tables(
        seed, n, whole, tight, recompute, training, one_ipu=one_ipu, stages=stages, transfer=transfer
    )
    check_fastest(tables, k, schedule)


def with_options(tables, seed, number):
    """Returns the tables with further settings to choose from for each stage, each slower than the one before."""
    rng = np.random.default_rng(seed)
    options = [tables]
    for _ in range(number):
        before = options[-1]
        slower = [
            option + rng.integers(0, 3, len(option)) * on
            for option, on in ((before.forward_s, 1), (before.backward_s, tables.training))
        ]
        other = int(rng.integers(1 << 30))

        def memory(num_stages, stage, other=other):
            n = tables.num_items
            return masked(np.random.default_rng([other, num_stages, stage]).random((n, n + 1)) * 0.9)

        option = replace(before, forward_s=slower[0], backward_s=slower[1], memory_bytes=memory)
        options.append(option)
    return replace(tables, options=tuple(options))


@tries(30, slow=100)
@given(
    **{**INSTANCES, "n": st.integers(1, 5), "k": st.integers(1, 3)},
    schedule=st.sampled_from(SCHEDULES),
    number=st.integers(1, 2),
)
def test_brute_force_finds_nothing_better_where_each_stage_chooses_its_settings(
    seed, n, k, whole, tight, recompute, training, transfer, schedule, number
):
    assume(k <= n)
    tables = make_tables(seed, n, whole, tight, recompute, training, transfer=transfer)
    tables = with_options(tables, seed, number)
    solution, best = check_fastest(tables, k, schedule)
    if best is None:
        return
    # A bound below the best finds nothing, one slightly above it finds the best.
    assert not solve(tables, k, schedule, below_s=best * (1 - 1e-9)).feasible
    assert solve(tables, k, schedule, below_s=best + 1e-9).objective_s == solution.objective_s
    # Each stage has one of the compared choices, and fits.
    numbers = chosen_options(tables, solution.starts)
    ends = [*solution.starts[1:], n]
    memory_bytes = [
        tables.options[number].memory_bytes(k, s)[i, j]
        for s, (i, j, number) in enumerate(zip(solution.starts, ends, numbers))
    ]
    assert max(memory_bytes) <= tables.capacity_bytes


@tries(60, slow=400)
@given(
    **INSTANCES,
    schedule=st.sampled_from(SCHEDULES),
    per_parameter_s=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    count=st.integers(1, 4),
    below=st.sampled_from([np.inf, 1.001, 0.999]),
)
def test_brute_force_finds_nothing_better_with_the_weight_update(
    seed, n, k, whole, tight, recompute, training, transfer, schedule, per_parameter_s, count, below
):
    """With ``below``, only splits are searched for that are faster than so many times the best one."""
    assume(k <= n)
    tables = make_tables(seed, n, whole, tight, recompute, training, transfer=transfer)
    parameters = np.random.default_rng([seed, 1]).integers(0, 9, n)

    def update_s(largest):
        return 0.5 + per_parameter_s * (largest // 3)  # stages of somewhat different size take the same time

    def value(starts):
        sizes = [int(parameters[i:j].sum()) for i, j in zip(starts, [*starts[1:], n])]
        return naive_tick(tables, starts, schedule) + update_s(max(sizes)) / count

    best = min((value(one) for one in all_starts(n, k) if naive_fits(tables, one)), default=None)
    if best is None:
        return
    below_s = below * best - update_s(parameters.sum() / k) / count
    tick = solve(tables, k, schedule, below_s=below_s)
    if below < 1 and not tick.feasible:
        return
    found = with_updates(tables, tick, schedule, count, parameters, update_s, below_s)
    assert naive_fits(tables, found.starts)
    assert found.objective_s == pytest.approx(value(found.starts), rel=1e-12)
    assert found.lower_bound_s <= best * (1 + 1e-12)
    if below > 1:
        assert found.objective_s == pytest.approx(best, rel=1e-12)
        assert found.optimal


@tries(25, slow=150)
@given(
    seed=st.integers(0, 2**32), limit=st.integers(1, 6), schedule=st.sampled_from(["Grouped", "Interleaved"])
)
def test_stopped_search_reports_its_bound(seed, limit, schedule):
    tables = make_tables(seed, 9, whole=False, tight=0.1)
    best = brute_force(tables, 3, schedule)
    stopped = solve(tables, 3, schedule, max_evaluations=limit)
    assert stopped.feasible == (best is not None)
    if best is not None:
        assert stopped.lower_bound_s <= best * (1 + 1e-12) and best <= stopped.objective_s * (1 + 1e-12)
        assert stopped.optimal == (stopped.objective_s == stopped.lower_bound_s)


def test_a_stopped_search_can_have_a_gap():
    rng = np.random.default_rng(0)
    n = 40
    tables = free_tables(rng.random(n), rng.random(n), np.zeros(n + 1))
    stopped = solve(tables, 5, "Interleaved", max_evaluations=2)
    proved = solve(tables, 5, "Interleaved")
    assert not stopped.optimal and proved.optimal
    assert stopped.lower_bound_s <= proved.objective_s <= stopped.objective_s > stopped.lower_bound_s


# --- an integer program on larger instances


def network_like(seed, n, fill=0.6, recompute=True):
    """Makes tables like those of a network: early items slow with large activations, late ones with many weights."""
    rng = np.random.default_rng(seed)
    forward = rng.lognormal(0, 0.8, n) * np.linspace(2, 0.5, n)
    backward = forward * rng.uniform(1.5, 3, n)
    cut = np.round(rng.lognormal(-1, 0.7, n + 1) * np.linspace(2, 0.2, n + 1), 1)
    cut[[0, n]] = 0
    weights = np.cumsum([0, *(rng.random(n) * np.linspace(0.1, 2, n))])
    stash = np.cumsum([0, *(rng.random(n) * np.linspace(0.6, 0.1, n))])

    def memory(k, s):
        depth = 2 * (k - 1 - s) + 1
        kept = stash[None, :] - stash[:-1, None]
        return masked(weights[None, :] - weights[:-1, None] + kept + (depth - 1) * 0.2 * cut[:-1, None])

    capacity = fill * float(memory(1, 0)[0][n])
    return StageTables(forward, backward, cut, capacity, memory, recompute=recompute)


@pytest.mark.parametrize("schedule", ["Grouped", "Interleaved"])
@pytest.mark.parametrize(
    "n, k, fill, seed", [(20, 3, 0.4, 1), (20, 5, 0.27, 2), (28, 4, 0.33, 3), (24, 2, 0.1, 4)]
)
def test_an_integer_program_finds_nothing_better(n, k, fill, seed, schedule):
    tables = network_like(seed, n, fill, recompute=seed % 2 == 0)
    solution, value = check_fastest(tables, k, schedule, integer_program, rel=1e-6)
    if value is not None:
        # The memory limit matters in these instances.
        free = solve(network_like(seed, n, 10, recompute=seed % 2 == 0), k, schedule)
        assert free.objective_s < solution.objective_s


# --- the simulated pipeline


@tries(25, slow=200)
@given(
    seed=st.integers(0, 2**32),
    cuts=st.sets(st.integers(1, 8), max_size=5),
    schedule=st.sampled_from(SCHEDULES),
    recompute=st.booleans(),
    training=st.booleans(),
    extra=st.integers(0, 5),
)
def test_simulated_pipeline_takes_the_time_of_the_formulas(seed, cuts, schedule, recompute, training, extra):
    starts = (0, *sorted(cuts))
    k = len(starts)
    num_own_times = k if seed % 2 else 0
    tables = make_tables(seed, 9, whole=False, recompute=recompute, training=training, stages=num_own_times)
    count = 2 * k + extra  # the minimum for Grouped
    simulation = simulate(tables, starts, schedule, count)
    tick = tick_s(tables, starts, schedule)
    formula = Ticks(Schedule(schedule, training), k, count)
    ticks = formula.num_ticks // formula.period
    assert simulation.longest_tick_s == pytest.approx(tick, rel=1e-12)
    assert simulation.num_ticks == ticks
    assert simulation.total_s <= ticks * tick * (1 + 1e-12)
    full = count - (ticks - count)  # the others fill and drain
    assert simulation.total_s >= full * tick * (1 - 1e-12)
    ran = [operation for phase in simulation.phases for operation in phase]
    assert len(ran) == len(set(ran)) == count * k * (2 if training else 1)
    if training:
        depth = Schedule(schedule).fifo_factor
        assert simulation.max_in_flight == tuple(depth * (k - 1 - s) + 1 for s in range(k))


def test_simulated_tick_equals_one_computed_by_hand():
    tables = free_tables([1, 2, 4], [3, 2, 1], [0, 0.5, 0.25, 0], recompute=True)
    # Stages: F 1, 2, 4; B 3 + 1, 2 + 2, 1.
    assert tick_s(tables, (0, 1, 2), "Grouped") == 4 + 4 + 2 * 0.5
    assert tick_s(tables, (0, 1, 2), "Interleaved") == max(1, 4, 4) + max(4, 2, 1) + 2 * 0.5 + 2 * 0.25
    assert tick_s(tables, (0, 1, 2), "Sequential") == 7 + 9 + 2 * 0.75
    assert (
        simulate(tables, (0, 1, 2), "Grouped", 1).total_s == 1 + 0.5 + 2 + 0.25 + 4 + 1 + 0.25 + 4 + 0.5 + 4
    )
    with pytest.raises(ValueError):
        simulate(tables, (0, 1), "GPipe", 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("training", [True, False])
def test_no_split_has_a_shorter_tick_than_the_lower_bound(schedule, training):
    order = Schedule(schedule, training)
    for seed, (n, k), recompute in itertools.product(
        range(4), [(1, 1), (5, 2), (6, 3), (6, 4)], [True, False]
    ):
        tables = make_tables(seed, n, whole=False, recompute=recompute, training=training)
        bound = order.least_tick_s(tables.forward_s, tables.backward_s, k, recompute and training)
        splits = ((0, *cuts) for cuts in itertools.combinations(range(1, n), k - 1))
        assert bound <= min(tick_s(tables, starts, schedule) for starts in splits) * (1 + 1e-12)
    # Four stages of 1 s forward and 1 s backward leave nothing to gain.
    ones = np.ones(4)
    assert order.least_tick_s(ones, ones * training, 4, False) == (8 if training else 4) / (
        1 if schedule == "Sequential" else 4
    )


@pytest.mark.parametrize("schedule", ["Grouped", "Interleaved"])
def test_every_stage_works_in_each_tick_that_neither_fills_nor_drains(schedule):
    for k, count in itertools.product(range(1, 6), range(1, 12)):
        ticks, last = Ticks(Schedule(schedule), k, count), k - 1
        full = set(range(ticks.num_ticks)) - set(ticks.edges)
        for t in range(ticks.num_ticks):
            if schedule == "Grouped":
                ahead = {s: m for s in range(k) for m in range(count) if m + s == t}
                back = {s: m for s in range(k) for m in range(count) if m + 2 * last - s == t}
            else:
                ahead = {s: m for s in range(k) for m in range(count) if 2 * m + s == t}
                back = {s: m for s in range(k) for m in range(count) if 2 * m + 2 * last + 1 - s == t}
            assert ticks.at(t) == (ahead, back)
            passes = len(ahead) + len(back)
            assert passes > 0 and (passes == (2 * k if schedule == "Grouped" else k) or t not in full)
        # There are some, unless the micro-batches are too few to fill the pipeline.
        assert full or count <= (2 * last if schedule == "Grouped" else k)


# --- properties of any planner


@tries(20, slow=60)
@given(
    seed=st.integers(0, 2**32),
    schedule=st.sampled_from(SCHEDULES),
    time=st.integers(-60, 60),
    size=st.integers(-60, 60),
)
def test_units_do_not_matter(seed, schedule, time, size):
    tables = network_like(seed, 12, 0.45)
    scaled = replace(
        tables,
        **{name: getattr(tables, name) * 2.0**time for name in ("forward_s", "backward_s", "cut_s")},
        capacity_bytes=tables.capacity_bytes * 2.0**size,
        memory_bytes=lambda k, s: tables.memory_bytes(k, s) * 2.0**size,
    )
    one, other = solve(tables, 4, schedule), solve(scaled, 4, schedule)
    assert other.starts == one.starts and other.objective_s == one.objective_s * 2.0**time


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ties_prefer_little_transfer_and_early_cuts(schedule):
    even = free_tables([1] * 4, [2] * 4, [0] * 5)
    if schedule != "Sequential":
        assert solve(even, 2, schedule).starts == (0, 2)
    idle = free_tables([0] * 4, [0] * 4, [0, 1, 1, 1, 0])
    assert solve(idle, 3, schedule).starts == (0, 1, 2)
    narrow = free_tables([1, 0, 0, 1], [1, 0, 0, 1], [0, 0.1, 0.3, 0.2, 0])
    assert solve(narrow, 2, schedule).starts == (0, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_large_network_takes_few_evaluations(schedule):
    # The number of dynamic programs determines the time, which is measured by hand.
    assert solve(network_like(5, 300, 0.12), 16, schedule, max_evaluations=2000).optimal


# --- certificates


@tries(25, slow=200)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 8),
    k=st.integers(1, 4),
    tight=st.sampled_from([0.6, 0.9, 0.98]),
    monotone=st.booleans(),
    one_ipu=st.booleans(),
)
def test_certificates_are_true(seed, n, k, tight, monotone, one_ipu):
    assume(k <= n)
    tables = make_tables(seed, n, tight=tight, monotone=monotone, one_ipu=one_ipu)
    schedule = "Sequential" if one_ipu else "Grouped"
    solution = solve(tables, k, schedule)
    fitting = [m for m in range(1, n + 1) if any(naive_fits(tables, s) for s in all_starts(n, m))]
    assert solution.feasible == (k in fitting)
    if solution.feasible:
        return
    assert [m for m in range(1, n + 2) if some_split_fits(tables, m)] == fitting
    ranges = blocking_ranges(tables, k)
    for first, last in ranges:
        assert all(
            tables.memory_bytes(k, s)[i][j] > tables.capacity_bytes
            for s in range(k)
            for i in range(first + 1)
            for j in range(last, n + 1)
        )
    inside = [cut for first, last in ranges for cut in range(first + 1, last)]
    assert len(inside) == len(set(inside))
    if monotone and not one_ipu and all(last > first + 1 for first, last in ranges):
        # If memory grows with the run and is the same everywhere, the ranges alone are the proof.
        assert len(ranges) >= k


@pytest.mark.parametrize(
    "sizes, capacity, k, ranges, fewest",
    [
        ([1, 4, 1, 9, 1], 8, 2, [(3, 4)], None),
        ([1, 4, 1, 5, 1], 6, 1, [(1, 4)], 2),
        # Any two items are too large: three cuts, in ranges that share items.
        ([1, 1, 1, 1], 1.5, 3, [(0, 2), (1, 3), (2, 4)], 4),
    ],
)
def test_certificates_equal_ones_made_by_hand(sizes, capacity, k, ranges, fewest):
    n, total = len(sizes), np.cumsum([0, *sizes])
    memory = total[None, :] - total[:-1, None]
    tables = free_tables(np.ones(n), np.ones(n), np.zeros(n + 1), capacity, memory)
    assert not solve(tables, k).feasible
    assert blocking_ranges(tables, k) == ranges
    assert next((m for m in range(1, n + 1) if some_split_fits(tables, m)), None) == fewest


def test_items_are_the_runs_between_legal_cuts():
    from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph

    layers = (
        Layer("input", "input", (), (4, 4, 1)),
        Layer("a", "depthwise_conv", ("input",), (4, 4, 1), input_channels=1),
        Layer("a/pointwise", "conv", ("a",), (4, 4, 2), input_channels=1),
        Layer("b", "activation", ("a/pointwise",), (4, 4, 2)),
        Layer("c", "matmul", ("b",), (2,), input_channels=2),
    )
    graph = LayerGraph("small", (4, 4, 1), 2, layers, tied=(("a", "a/pointwise"),))
    assert item_starts(graph) == (0, 3, 4)
