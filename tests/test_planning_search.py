"""Best and judged splits, comparisons, rules, search and plan files, against naive versions."""

import functools
import itertools
import json
from dataclasses import MISSING, fields, replace

import pytest
from few_examples import tries
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import (
    SCHEDULES,
    all_splits,
    check_search_agrees,
    fill,
    micro_batch_s,
    naive_best,
    network,
    space,
    system,
    tried,
)
from support.refusals import check_raises

from ipucnn.errors import ConfigurationError, DataError, InfeasibleError
from ipucnn.hardware import Calibration
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.pipeline_plan import PipelinePlan, SystemFacts
from ipucnn.planning.plan import assemble, compare
from ipucnn.planning.program import Placement, PlannedProgram, uniform
from ipucnn.planning.search.front import SAME_FILL, best_uses
from ipucnn.planning.search.neighbours import infeasible, untried_stages, why_no_fit
from ipucnn.planning.search.open_settings import FREE, default_count, micro_batches
from ipucnn.planning.search.planner import LIMITS, SAME_SPEED, Planner
from ipucnn.planning.splits import check_cuts, check_stages, equal_blocks, equal_layers, equal_parameters
from ipucnn.training.batching import overlap_length

GRAPH = network([16, 16, 16, 32, 32, 32])
SMALL = network([16, 16, 16, 32], size=48)
BASE = PlannedProgram(micro_batch_size=64, gradient_accumulation_count=48, half_partials=False)
# Fields of a plan that may be absent: those that have a default.
OPTIONAL = {
    field.name
    for kind in (PipelinePlan, SystemFacts, Calibration)
    for field in fields(kind)
    if field.name not in ("options", "schema_version")
    and (field.default is not MISSING or field.default_factory is not MISSING)
}


stages = st.integers(1, 4)
schedules = st.sampled_from(SCHEDULES)
# KiB per tile.  The splits of SMALL take 75 to 105: within 80 % and 115 % of these none, some or all fit.
memories = st.sampled_from([60, 68, 74, 84, 96, 102, 110, 122, 140])


# The availableMemoryProportion of each stage; with the largest, temporary data take most of the memory.
shares_of_stages = st.lists(st.sampled_from([0.02, 0.1, 0.6]), min_size=4, max_size=4)


@given(stages, schedules, memories, st.booleans(), st.booleans(), shares_of_stages, st.sampled_from([2, 48]))
@tries(24, slow=80)
def test_best_splits_equal_exhaustive_search(num_stages, schedule, kib, recompute, own_ipus, shares, count):
    """With two accumulated micro-batches and a state outside the chip, the update takes longer than the ticks."""
    machine = replace(system(kib), remote_bytes_per_s=1e6)
    mapping = tuple(range(num_stages)) if schedule == "Sequential" and own_ipus else None
    if schedule == "Sequential" and not own_ipus:
        shares = shares[:1] * 4  # segments on one IPU have one
    program_settings = replace(
        BASE,
        num_stages=num_stages,
        schedule=schedule,
        recomputation=recompute,
        device_mapping=mapping,
        available_memory_proportion=tuple(uniform(share)[0] for share in shares[:num_stages]),
        gradient_accumulation_count=count,
        optimizer_state_offloading=count == 2,
        optimizer_slots=1,
    )
    graph = SMALL
    for limit in (0.8, 1.15):
        best = Planner(graph, machine).fastest_splits(program_settings, limit)
        naive = naive_best(graph, program_settings, machine, limit)
        assert (best is None) == (naive is None)
        if best is not None:
            fixed_s = DEFAULT_CONSTANTS.fixed_s(machine)
            assert best.solution.lower_bound_s + fixed_s == pytest.approx(naive[0], rel=1e-12)
            assert micro_batch_s(best.prediction, program_settings) == pytest.approx(naive[0], rel=1e-12)
            assert best.solution.optimal
            assert best.predicted_fill <= limit


@pytest.mark.slow
@given(st.integers(2, 4), schedules, memories, st.booleans(), st.data())
@tries(12, slow=40)
def test_no_splits_are_faster_than_the_best_of_their_memory(num_stages, schedule, kib, recompute, data):
    machine = system(kib)
    chosen = replace(BASE, num_stages=num_stages, schedule=schedule, recomputation=recompute)
    names = [SMALL.layers[cut].name for cut in SMALL.cuts]
    picked = data.draw(st.sets(st.sampled_from(names), min_size=num_stages - 1, max_size=num_stages - 1))
    splits = tuple(sorted(picked, key=SMALL.index))
    planner = Planner(SMALL, machine)
    judged = planner.judge(splits, chosen, 0.8)
    assert judged.memory_limit >= 0.8
    check_search_agrees(planner, splits, chosen)
    assert judged.solution.feasible
    (row,) = compare(planner, judged, {"x": splits})
    assert row.ratio >= 1.0
    assert row.predicted_tick_s == pytest.approx(judged.prediction.tick_s, rel=1e-12)
    assert row.predicted_best_tick_s <= naive_best(SMALL, chosen, machine, judged.memory_limit)[0] * (
        1 + 1e-9
    )


@given(st.integers(1, 4), schedules, st.booleans())
@settings(max_examples=30)
def test_bounds_are_never_exceeded(num_stages, schedule, recompute):
    machine = system(140)
    graph = SMALL
    program_settings = replace(
        BASE, num_stages=num_stages, schedule=schedule, recomputation=recompute, num_replicas=2
    )
    planner = Planner(graph, machine)
    splits = list(all_splits(graph, num_stages))
    fastest = max(predict(graph, s, program_settings, machine).images_per_s for s in splits)
    assert planner.fastest_images_per_s(program_settings) >= fastest
    least = min(fill(graph, s, program_settings, machine) for s in splits)
    if schedule == "Sequential":
        assert planner.least_fill(program_settings) <= least
    else:
        assert planner.least_fill(program_settings) == pytest.approx(least, rel=1e-9)


@pytest.mark.slow
@given(st.integers(1, 4), schedules, st.booleans(), st.sampled_from([8, 24, 48]), st.booleans())
@settings(max_examples=30)
def test_splits_with_a_longer_tick_are_slower(num_stages, schedule, recompute, count, training):
    program_settings = replace(
        BASE, num_stages=num_stages, schedule=schedule, recomputation=recompute and training
    )
    program_settings = replace(program_settings, gradient_accumulation_count=count, training=training)
    planner = Planner(SMALL, system(140))
    for splits in all_splits(SMALL, num_stages):
        prediction = predict(SMALL, splits, program_settings, planner.system)
        items = planner.items(splits)
        tick_s = planner.micro_batch_s(splits, program_settings) - planner.share_s(items, program_settings)
        assert tick_s <= planner.tick_below_s(program_settings, prediction.images_per_s)


@pytest.mark.parametrize(
    ("schedule", "mapping"),
    [("Grouped", (0, 1, 1, 0)), ("Sequential", (0, 1, 1, 0)), ("Sequential", (0, 0, 0, 0))],
)
def test_the_state_of_one_accumulated_micro_batch_outside_the_chip_keeps_the_proof(schedule, mapping):
    """Its update takes longer than the ticks."""
    machine = replace(system(), remote_bytes_per_s=1e6)
    program_settings = replace(
        BASE, num_stages=4, device_mapping=mapping, schedule=schedule, gradient_accumulation_count=1
    )
    program_settings = replace(program_settings, optimizer_state_offloading=True, optimizer_slots=2)
    planner = Planner(GRAPH, machine)
    for splits in [("conv1", "conv2", "conv4"), ("conv2", "conv3", "conv5"), ("relu0", "conv1", "relu1")]:
        (row,) = compare(planner, planner.judge(splits, program_settings, 0.8), {"x": splits})
        assert row.ratio >= 1 - 1e-12
    if (
        program_settings.placement is Placement.SEGMENTS
    ):  # for stages that share some IPUs there is only a bound
        best = planner.fastest_splits(program_settings, 0.8)
        assert assemble(planner, best, planned=True, build={}).optimal


def test_stages_that_share_an_ipu_are_judged_with_a_bound():
    program_settings = replace(BASE, num_stages=4, device_mapping=(0, 1, 1, 0))
    machine = system()
    planner = Planner(GRAPH, machine)
    for splits in [("conv1", "conv2", "conv4"), ("conv2", "conv3", "conv5")]:
        judged = planner.judge(splits, program_settings, 0.8)
        assert judged.solution.lower_bound_s <= judged.prediction.tick_s
        assert len(judged.forecast.ipus) == 2
        (row,) = compare(planner, judged, {"x": splits})
        assert row.ratio >= 1
        assert row.predicted_tick_s == judged.prediction.tick_s


# Rules


def naive_params(graph, num_stages):
    """Walks over a list of weight sizes as the public application does."""
    sizes = [(layer.name, layer.num_parameters) for layer in graph.layers if layer.num_parameters]
    total = sum(size for _, size in sizes)
    splits, running = [], 0
    for name, size in sizes:
        running += size
        if len(splits) < num_stages - 1 and running * num_stages > total * (len(splits) + 1):
            splits.append(name)
    return tuple(splits)


@given(st.lists(st.sampled_from([8, 16, 24, 32]), min_size=9, max_size=16), st.integers(2, 3))
def test_equal_parameters_equals_the_naive_walk(widths, num_stages):
    graph = network(widths)
    largest = max(layer.num_parameters for layer in graph.layers) * num_stages
    if largest < graph.num_parameters:  # otherwise one layer passes two marks
        assert equal_parameters(graph, num_stages) == naive_params(graph, num_stages)


@given(
    st.lists(st.sampled_from([8, 64]), min_size=4, max_size=10),
    st.integers(1, 8),
    st.sampled_from([equal_parameters, equal_layers]),
)
def test_rules_give_legal_splits(widths, num_stages, rule):
    graph = network(widths)
    splits = rule(graph, num_stages)
    assert len(splits) == num_stages - 1
    check_cuts(splits, graph)


def test_equal_layers_gives_stages_of_equal_size():
    graph = network([16] * 12, block=99)
    opens = [0, *(graph.index(name) for name in equal_layers(graph, 5)), len(graph.layers)]
    assert [b - a for a, b in zip(opens, opens[1:])] == [5] * 5


def test_blocks_are_found_by_their_branches():
    graph = network([16] * 8)
    # relu1, then three residual blocks of two convolutions: cuts only behind the sums.
    assert equal_blocks(graph, 3) == ("conv4", "conv6")
    check_raises(ConfigurationError, "fewer than 9 stages", "equal-layers", equal_blocks, graph, 9)
    check_raises(ConfigurationError, "", f"{len(GRAPH.cuts) + 1} or less", check_stages, 99, GRAPH)
    chain = network([16] * 8, block=99)
    assert equal_blocks(chain, 4) == ("conv2", "conv4", "conv6")


TIED = replace(GRAPH, tied=(("conv1", "conv2"),))


@pytest.mark.parametrize(
    ("graph", "splits", "error", "hint"),
    [
        (GRAPH, ["conv11"], "is not a layer", "did you mean 'conv1'"),
        (GRAPH, ["conv3", "conv1"], "out of order", "conv1 conv3"),
        (GRAPH, ["conv0"], "first stage would be empty", "'relu0'"),
        (TIED, ["conv2"], "share weights", "'conv1' or 'relu2'"),
        (TIED, ["conv2", "relu2"], "'conv2' can't open a stage", "possible splits: relu2 conv3"),
        (
            replace(GRAPH, tied=(("relu0", "add5"),)),
            ["conv1", "conv2"],
            "share weights",
            "cut before relu0 only",
        ),
    ],
)
def test_split_names_are_checked(graph, splits, error, hint):
    check_raises(ConfigurationError, error, hint, check_cuts, splits, graph)


# Nothing fits


@pytest.mark.slow
def test_the_largest_micro_batch_and_fewest_stages_that_fit():
    machine = system(60)
    program_settings = replace(BASE, num_stages=2)
    choices = tried(program_settings)
    planner = Planner(SMALL, machine)
    assert planner.fastest_program(choices) is None
    why = why_no_fit(planner, [choice.program for choice in choices], 1.15, 16)

    def fits(**changes):
        return any(naive_best(SMALL, replace(choice.program, **changes), machine, 1.15) for choice in choices)

    sizes = [size for size in range(1, 64) if fits(micro_batch_size=size)]
    assert why.largest_micro_batch_size == max(sizes)
    fewest = next((k for k in range(3, 6) if fits(num_stages=k)), None)
    assert (why.fewest_stages or 99) == fewest if fewest else (why.fewest_stages or 99) > 5
    error = infeasible("net", why, program_settings, "POD")
    assert isinstance(error, InfeasibleError)
    assert f"--micro-batch-size {max(sizes)}" in error.hint
    names = {layer.name for layer in SMALL.layers}
    assert why.layer in names or {name for pair in why.ranges for name in pair} <= names
    assert why.layer or why.ranges


@pytest.mark.parametrize(
    ("changes", "most", "untried"),
    [
        (
            {"schedule": "Sequential", "recomputation": True},
            16,
            "Pipelines over several IPUs were not tried.",
        ),
        ({"schedule": "Grouped"}, 6, ""),
        (
            {"schedule": "Grouped", "num_stages": 6},
            6,
            "More stages were not tried: the system has no IPUs for them.",
        ),
        (
            {"num_stages": 1, "num_replicas": 2, "dbn_replica_group_size": 2},
            1,
            "More stages were not tried: replicas that share batch norm statistics have one IPU each.",
        ),
    ],
)
def test_certificate_says_what_was_tried(changes, most, untried):
    """No number of stages that it speaks of fits, by brute force, and what it leaves out is said."""
    machine = system(60)
    settings = replace(BASE, **{"num_stages": 2, **changes})
    why = why_no_fit(Planner(SMALL, machine), [settings], 1.15, 6)
    assert (why.on_one_ipu, why.most_stages) == (settings.placement is Placement.SEGMENTS, most)
    fitting = [
        count
        for count in range(settings.num_stages + 1, min(most, 5) + 1)
        if naive_best(SMALL, settings.with_stages(count), machine, 1.15)
    ]
    assert why.fewest_stages == (fitting[0] if fitting else why.fewest_stages)
    if why.fewest_stages is None:
        assert untried_stages(why, settings) == untried and not fitting


def test_a_layer_too_large_for_any_ipu_is_named():
    machine = system(40)
    graph = network([16, 16, 512, 16])
    program_settings = replace(BASE, num_stages=4, micro_batch_size=64)
    why = why_no_fit(
        Planner(graph, machine), [choice.program for choice in tried(program_settings)], 1.15, 16
    )
    assert why.layer == "conv2"
    assert "layer 'conv2' alone" in infeasible("net", why, program_settings, "POD").message


# Search


def every_configuration(planner, base, num_ipus, sizes, total, limit, segments, switched):
    """Returns the best splits that fit of every configuration of a small search, by loops over the options."""
    configurations = []
    for size, (schedule, count, recompute), share, changed in itertools.product(
        sizes, programs(num_ipus, segments), (0.6, 0.3, 0.15), switched
    ):
        ipus = 1 if schedule == "Sequential" else count
        step = overlap_length(schedule, count) if count > 1 else 1
        for replicas in (1, 2, 4):
            accumulated, rest = divmod(total, size * replicas)
            if ipus * replicas > num_ipus or rest or accumulated % step or count > len(planner.starts):
                continue
            program_settings = replace(
                base,
                micro_batch_size=size,
                num_stages=count,
                schedule=schedule,
                recomputation=recompute,
                num_replicas=replicas,
                gradient_accumulation_count=accumulated,
                available_memory_proportion=uniform(share),
                **changed,
            )
            candidate = planner.fastest_splits(program_settings, limit)
            if candidate is not None:
                configurations.append(candidate)
    return configurations


def programs(num_ipus, segments):
    """Yields (schedule, stages, recomputation) of every pipeline."""
    yield "Grouped", 1, False
    yield from (("Sequential", count, True) for count in segments)
    for schedule, count, recompute in itertools.product(("Grouped", "Interleaved"), (2, 4), (False, True)):
        if count <= num_ipus:
            yield schedule, count, recompute


def figures_of(candidate):
    """Returns (images/s, IPUs, fill)."""
    settings = candidate.settings
    return candidate.prediction.images_per_s, settings.occupied_ipus, candidate.predicted_fill


def naive_front(candidates):
    """Returns (images/s, IPUs, fill) of the front: in order of IPUs, fill and stages, all are compared with all."""

    front = []
    for speed, ipus, taken in sorted(
        map(figures_of, candidates), key=lambda point: (-point[0], point[1], point[2])
    ):
        if not any(more <= ipus and other <= taken + SAME_FILL for _, more, other in front):
            front.append((speed, ipus, taken))
    fewer = [(*figures_of(candidate), candidate.settings.num_stages) for candidate in candidates]
    stages = {figures_of(candidate): candidate.settings.num_stages for candidate in reversed(candidates)}
    return [
        point
        for point in front
        if not any(
            count < stages[point]
            and speed >= point[0] * (1 - SAME_SPEED)
            and ipus <= point[1]
            and taken <= point[2] + SAME_FILL
            for speed, ipus, taken, count in fewer
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kib", [84, 120])
def test_front_equals_that_of_all_configurations(kib):
    planner, sizes, total = Planner(network([16, 16, 16, 32], size=48), system(kib)), (2, 8, 24), 96
    options = {"free": ("half_partials",), "segments": (2, 4), "by_stage": False}
    best, rows = best_uses(planner, space(BASE, 4, sizes, global_batch_size=total, **options))
    assert best.memory_limit == LIMITS[0]
    halves = [{"half_partials": on} for on in (False, True)]
    configurations = every_configuration(planner, BASE, 4, sizes, total, LIMITS[0], (2, 4), halves)
    front = [(row.predicted_images_per_s, row.occupied_ipus, row.predicted_fill) for row in rows]
    expected = naive_front(configurations)
    assert len(expected) > 3
    if kib == 84:
        assert front == [pytest.approx(figures, rel=1e-9) for figures in expected]
    # Fills that differ by a little count as equal, and a candidate dropped for one that is itself dropped may differ by
    # twice as much: among configurations as close as these the front has one, and either may be it.
    for candidate in configurations:
        figures = figures_of(candidate)
        assert any(
            speed >= figures[0] * (1 - SAME_SPEED)
            and ipus <= figures[1]
            and taken <= figures[2] + 2 * SAME_FILL
            for speed, ipus, taken in front
        )
        assert not any(
            figures[0] >= speed * (1 + SAME_SPEED) and figures[1] <= ipus and figures[2] < taken - SAME_FILL
            for speed, ipus, taken in front
        )


@pytest.mark.slow
@pytest.mark.slow_cases("70-1")
@pytest.mark.parametrize("kib, slots", [(70, 1), (200, 0)])
def test_no_configuration_is_faster_than_the_best(kib, slots):
    machine, total = system(kib), 24
    planner = Planner(SMALL, machine)
    base = replace(BASE, optimizer_slots=slots)
    more = tuple(size for size in range(1, total + 1) if total % size == 0)
    options = {"global_batch_size": total, "free": FREE, "more_sizes": more}
    best, _ = best_uses(planner, space(base, 2, (4, 8), **options))
    names = ("half_partials", "optimizer_state_offloading")
    switched = [dict(zip(names, on)) for on in itertools.product((False, True), repeat=2)]
    for limit in LIMITS[: LIMITS.index(best.memory_limit) + 1]:
        every = every_configuration(planner, base, 2, more, total, limit, range(2, 17), switched)
        assert bool(every) == (limit == best.memory_limit)
    fastest = max(candidate.prediction.images_per_s for candidate in every)
    # One with fewer stages is preferred if it is slower by at most this.
    assert fastest * (1 - SAME_SPEED) <= best.prediction.images_per_s <= fastest * (1 + 1e-9)
    assert best.settings.half_partials


@pytest.mark.slow_cases("28-1", "34-0", "46-1", "52-0")
@pytest.mark.parametrize("kib, slots", [*itertools.product((28, 34, 46, 52), (0, 1))])
def test_every_row_fits_whether_it_accumulates_or_not(kib, slots):
    # Most of the memory holds weights and what is kept for each of them.
    planner, total = Planner(network([512, 512, 512], size=4), system(kib)), 4
    base = replace(BASE, optimizer_slots=slots)
    best, rows = best_uses(planner, space(base, 4, (1, 2), global_batch_size=total, by_stage=False))
    assert all(row.predicted_fill <= best.memory_limit for row in rows)
    every = every_configuration(planner, base, 4, (1, 2), total, best.memory_limit, (2,), [{}])
    fastest = max(candidate.prediction.images_per_s for candidate in every)
    assert fastest * (1 - SAME_SPEED) <= best.prediction.images_per_s <= fastest * (1 + 1e-9)


def test_fixed_settings_are_kept():
    planner = Planner(SMALL, system(200))
    more = tuple(range(1, 33))
    for on in (False, True):
        base = replace(BASE, half_partials=on, optimizer_state_offloading=on)
        best, rows = best_uses(planner, space(base, 4, (4, 16), global_batch_size=96, more_sizes=more))
        assert best.settings.half_partials == best.settings.optimizer_state_offloading == on
        assert {row.settings.half_partials for row in rows} == {on}


def test_search_without_a_fit_is_refused_with_a_hint():
    searched = space(BASE, 2, (16,), global_batch_size=512)
    error = check_raises(InfeasibleError, "", "", best_uses, Planner(GRAPH, system(12)), searched)
    assert "--precision" not in error.hint  # 16.16 is already set


def test_micro_batches_divide_the_global_batch():
    assert micro_batches(None, compared=True) == (1, 2, 4, 8, 16, 32, 64)
    assert micro_batches(7 * 67, compared=True) == (1, 2, 4, 7, 8, 16, 32, 64)
    assert micro_batches(7 * 67) == (1, 7, 67, 469)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.integers(1, 16))
def test_the_default_accumulation_is_legal_and_fills_the_pipeline(schedule, num_stages):
    count = default_count(schedule, num_stages)
    base = {"Grouped": 2 * num_stages, "Interleaved": num_stages, "Sequential": 1}[schedule]
    assert num_stages == 1 or count % base == 0
    assert count >= 16 * num_stages
    assert 2 * (num_stages - 1) / (count + 2 * (num_stages - 1)) < 1 / 8


# The plan as a value


def whole_plan(schedule="Grouped", **details):
    planner = Planner(GRAPH, system())
    best = planner.fastest_program(tried(replace(BASE, num_stages=3, schedule=schedule, num_replicas=2)))
    rows = compare(planner, best, {"params": equal_parameters(GRAPH, 3)})
    return assemble(planner, best, planned=True, build={"norm": "batch"}, comparison=rows, **details)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_parts_of_a_plan_add_up(schedule):
    plan = whole_plan(schedule)
    program_settings = plan.settings
    assert [stage.first_layer for stage in plan.stages][1:] == list(plan.splits)
    assert sum(stage.num_layers for stage in plan.stages) == len(GRAPH.layers)
    assert sum(stage.macs for stage in plan.stages) == GRAPH.total_macs
    assert sum(stage.num_parameters for stage in plan.stages) == GRAPH.num_parameters
    forward = sum(layer.predicted_forward_s for layer in plan.profile)
    assert sum(stage.predicted_forward_s for stage in plan.stages) == pytest.approx(forward)
    backward = sum(layer.predicted_backward_s for layer in plan.profile)
    assert sum(stage.predicted_backward_s for stage in plan.stages) == pytest.approx(backward)
    assert plan.profile[-1].predicted_cumulative_s == pytest.approx(forward + backward)
    for ipu in plan.ipus:
        total = sum(ipu.predicted_memory_bytes.values())
        assert ipu.predicted_fill == pytest.approx(total / ipu.capacity_bytes)
    steady = program_settings.gradient_accumulation_count * plan.predicted_tick_s
    whole = steady + plan.predicted_fill_drain_s + plan.predicted_update_s
    assert plan.predicted_weight_update_s == pytest.approx(whole)
    assert plan.predicted_images_per_s == pytest.approx(program_settings.global_batch_size / whole)
    assert 0 < plan.predicted_all_reduce_s <= plan.predicted_update_s
    assert (plan.optimal, plan.gap, plan.predicted_lower_bound_s) == (True, 0.0, plan.micro_batch_s)
    share_s = plan.predicted_update_s / program_settings.gradient_accumulation_count
    assert plan.micro_batch_s == pytest.approx(plan.predicted_tick_s + share_s)


def test_skips_are_tensors_that_bypass_the_first_layer_of_a_stage():
    planner = Planner(GRAPH, system())
    judged = planner.judge(("conv3",), replace(BASE, num_stages=2), 0.8)
    plan = assemble(planner, judged, planned=False, build={})
    (opened,) = plan.stages[1:]
    assert set(GRAPH.crossing(GRAPH.index("conv3"))) == {"relu2", *opened.skips}
    assert not plan.planned


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_is_the_same_after_json_and_yaml(schedule):
    plan = whole_plan(schedule, assumed=("precision 16.16",))
    assert PipelinePlan.from_dict(json.loads(plan.to_json())) == plan
    assert PipelinePlan.from_yaml(plan.to_yaml(), "plan.yml") == plan


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_damaged_plans_are_refused_with_the_place(data):
    values = json.loads(whole_plan_text())
    node = values
    while True:
        key = data.draw(st.sampled_from(sorted(node)))
        if isinstance(node[key], dict) and node[key] and key not in ("build",) and data.draw(st.booleans()):
            node = node[key]
            continue
        break
    if key == "build":
        return
    damage = data.draw(st.sampled_from(["drop", "type", "rename"]))
    if damage == "drop" and key in OPTIONAL:
        return
    value = node.pop(key)
    if damage == "type":
        node[key] = [value] if not isinstance(value, list) else "text"
    elif damage == "rename":
        node[key + "x"] = value
    with pytest.raises((DataError, ConfigurationError)) as raised:
        PipelinePlan.from_dict(values, "plan.yml")
    assert "plan.yml" in raised.value.message
    if "make it again" in raised.value.hint:
        model = values.get("model")
        assert (
            f"ipucnn plan-splits {model if isinstance(model, str) else 'MODEL'} --stages" in raised.value.hint
        )


@pytest.mark.parametrize(("name", "value"), [("micro_batch_size", 0), ("schedule", "Grouping")])
def test_impossible_settings_are_reported_as_a_damaged_plan(name, value):
    values = json.loads(whole_plan_text())
    values["settings"][name] = value
    hint = f"make it again: ipucnn plan-splits {values['model']} --stages"
    error = check_raises(DataError, "", hint, PipelinePlan.from_dict, values, "plan.yml")
    assert error.message.startswith("plan.yml: ")


@functools.lru_cache(maxsize=None)
def whole_plan_text():
    return whole_plan().to_json()


def test_a_plan_of_another_version_is_refused():
    values = json.loads(whole_plan_text())
    for version in (0, 2, None):
        changed = {**values, "schema_version": version}
        check_raises(DataError, "schema_version", "", PipelinePlan.from_dict, changed)
    check_raises(DataError, "schema_version", "", PipelinePlan.from_yaml, "- 1\n", "plan.yml")
    check_raises(DataError, "not readable as YAML", "", PipelinePlan.from_yaml, "a: [", "plan.yml")
