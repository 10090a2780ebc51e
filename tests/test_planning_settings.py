"""A run's configuration becomes the planner's arguments, the same for every command."""

import itertools
import json
from dataclasses import replace

import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from poplar_double import installed
from support.plans import (
    SCHEDULES,
    SYSTEM,
    all_that_fit,
    check_search_agrees,
    fill,
    home_graph,
    micro_batch_s,
    network,
    plan,
    plan_splits,
    refused,
    system,
)
from support.refusals import check_raises
from test_planning_round_trip import numeric
from test_planning_search import BASE

from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.planning.cost.layer_times import layer_times, program_times, stage_starts
from ipucnn.planning.graphs.layer_graph import Layer
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.program import (
    PlannedProgram,
    ProgramVariants,
    StageProportions,
    given_proportions,
    percentages,
    planned_program,
    uniform,
)
from ipucnn.planning.question import make_question
from ipucnn.planning.search.neighbours import flags_between, neighbours
from ipucnn.planning.search.open_settings import OPEN, choices
from ipucnn.planning.search.planner import LIMITS, SAME_SPEED, Planner
from ipucnn.training.batching import overlap_length
from ipucnn.training.optimizer_settings import OPTIMIZERS, settings_of_run
from ipucnn.training.program import make_program

MODEL = "cifar_resnet8"


@pytest.fixture(scope="module")
def graph():
    return home_graph(MODEL)


# --- one function for all commands


@st.composite
def flags(draw):
    """Draws options of a legal program that plan-splits, train and benchmark all take."""
    stages = draw(st.sampled_from([1, 2, 4]))
    replicas = draw(st.sampled_from([1, 2, 4]))
    options = numeric(draw)
    schedule = options["pipeline_schedule"]
    options["optimizer_params"] = json.dumps(options["optimizer_params"])
    options["gradient_accumulation_count"] = overlap_length(schedule, stages) * draw(st.integers(1, 3))
    options["num_replicas"] = replicas
    if stages > 1:
        options.update(ipus_per_replica=stages, recomputation=draw(st.booleans()))
    elif draw(st.booleans()):
        options["dbn_replica_group_size"] = replicas
    counts = [0, 1] if stages == 1 else [0, 1, stages, 2 * stages]
    count = draw(st.sampled_from(counts))
    shares = draw(st.lists(st.integers(5, 100), min_size=count, max_size=count))
    if shares:
        options["available_memory_proportion"] = tuple(float(share) for share in shares)
    for option in ("convolution_options", "matmul_options"):
        if draw(st.integers(0, 3)) == 0:
            options[option] = json.dumps({"availableMemoryProportion": str(draw(st.integers(1, 9)) / 10)})
    return options


@tries(20, slow=60)
@given(typed=flags())
def test_plans_and_runs_have_the_same_program(typed):
    config = resolve("train", typed, model=MODEL, reads_data=False).config
    program = make_program(config, 4096, seed=1)
    without_recomputation = {key: value for key, value in typed.items() if key != "recomputation"}
    request = make_question(
        resolve("plan-splits", without_recomputation, model=MODEL, reads_data=False),
        stages=None if program.num_stages > 1 else 1,
        recomputation="on" if typed.get("recomputation") else "off",
    )
    expected = planned_program(config, program)
    assert request.choices()[0].program == expected
    assert expected.global_batch_size == program.global_batch_size
    assert expected.mapping == (program.device_mapping if program.num_stages > 1 else (0,))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_planner_counts_the_tensors_that_the_optimizer_makes(name, momentum):
    import tensorflow as tf

    from ipucnn.training.optimizers import Optimizer

    params = {"momentum": momentum} if name in ("sgd", "lars", "rmsprop") else {}
    config = RunConfig(optimizer=name, optimizer_params=params)
    program = make_program(config, 64, seed=0)
    weight = tf.Variable(tf.zeros([3, 2]))
    optimizer = Optimizer(settings_of_run(config, program.global_batch_size), {"weight": weight})
    assert planned_program(config, program).optimizer_slots == len(optimizer.slots)


def test_planner_refuses_wrong_optimizer_parameters():
    options = {"optimizer": "rmsprop", "optimizer_params": '{"centered": 1}'}
    resolved = resolve("plan-splits", options, model=MODEL, reads_data=False)
    check_raises(ConfigurationError, "no parameter 'centered'", "", make_question, resolved, stages=2)


# --- a proportion for each stage


def config_of(values, **more):
    return RunConfig(available_memory_proportion=tuple(values), **more)


def test_planned_proportions_are_those_that_the_session_sets():
    assert given_proportions(config_of([]), 2) is None
    assert given_proportions(config_of([20.0]), 2) == uniform(0.2)
    stages = given_proportions(config_of([20.0, 40.0]), 2)
    assert stages == (uniform(0.2)[0], uniform(0.4)[0])
    assert percentages(stages) == (20, 40)
    both = given_proportions(config_of([20.0, 25.0, 40.0, 45.0]), 2)
    assert both == (StageProportions(0.2, 0.25, 0.2, 0.25), StageProportions(0.4, 0.45, 0.4, 0.45))
    assert percentages(both) == (20, 25, 40, 45)
    options = {"convolution_options": {"availableMemoryProportion": "0.1"}}
    assert given_proportions(config_of([20.0], **options), 2) == (StageProportions(0.1, 0.2, 0.1, 0.2),)
    assert given_proportions(config_of([], **options), 2) == (StageProportions(0.1, 0.6, 0.1, 0.6),)
    # Values of single stages override those of all convolutions.
    assert given_proportions(config_of([20.0, 40.0], **options), 2) == stages
    for count in (3, 5):  # also for 2n + 1
        error, config = f"{count} values for 2 stage", config_of([10.0] * count)
        hint = "give 1, 2 (per stage) or 4 (convolutions and matrix products of each stage)"
        check_raises(ConfigurationError, error, hint, given_proportions, config, 2)


def test_two_values_per_stage_are_for_convolutions_and_matrix_products():
    """The public application's order: convolution and matrix product of stage 1, then of stage 2, ..."""
    from ipucnn.sessions.poplar.options import pipelining_options

    config = config_of([10, 20, 30, 40, 50, 60], pipeline_splits=("dense5", "dense6"))
    program = make_program(replace(config, gradient_accumulation_count=6), 120, seed=0)
    with installed():
        from tensorflow.python import ipu

        options = pipelining_options(ipu, program, config, training=True)
    for side in ("forward", "backward"):
        stages = options[f"{side}_propagation_stages_poplar_options"]
        option_pairs = [
            (stage.options["convolution_options"], stage.options["matmul_options"]) for stage in stages
        ]
        name = "availableMemoryProportion"
        assert option_pairs == [
            ({name: c}, {name: m}) for c, m in (("0.1", "0.2"), ("0.3", "0.4"), ("0.5", "0.6"))
        ]


def test_proportions_of_another_number_of_stages():
    program_settings = PlannedProgram(
        num_stages=2, available_memory_proportion=(uniform(0.2)[0], uniform(0.4)[0])
    )
    assert program_settings.proportions_differ
    assert program_settings.restaged(4).available_memory_proportion == uniform(0.2)
    assert program_settings.proportions_of(1) == uniform(0.4)[0]
    alike = PlannedProgram(num_stages=2, available_memory_proportion=2 * uniform(0.2))
    assert alike == PlannedProgram(num_stages=2, available_memory_proportion=uniform(0.2))
    two = program_settings.available_memory_proportion
    details = {"num_stages": 3, "available_memory_proportion": two}
    check_raises(ConfigurationError, "2 entries for 3 stages", "", PlannedProgram, **details)
    check_raises(ConfigurationError, "available_memory_proportion is 2", "", uniform, 2)


SHARES = (0.6, 0.05, 0.2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_is_predicted_with_its_own_proportion(graph, schedule):
    mapping = (0, 1, 2) if schedule == "Sequential" else None
    base = PlannedProgram(16, 12, num_stages=3, schedule=schedule, device_mapping=mapping)
    program_settings = replace(base, available_memory_proportion=tuple(uniform(share)[0] for share in SHARES))
    alike = [replace(base, available_memory_proportion=uniform(share)) for share in SHARES]
    splits = Planner(graph, SYSTEM).names((0, 5, 9))
    planner = Planner(graph, SYSTEM)
    whole, *each = (check_search_agrees(planner, splits, one) for one in (program_settings, *alike))
    for stage, predicted in enumerate(each):
        assert whole.times.stages[stage] == predicted.times.stages[stage]
        if len(whole.ipus) > 1:
            assert whole.ipus[stage] == predicted.ipus[stage]


def test_matrix_products_and_backward_passes_have_their_own_proportions(graph):
    def times(proportions):
        return layer_times(graph, PlannedProgram(64), SYSTEM.ipu, proportions=proportions)

    base, small = times(uniform(0.6)[0]), times(StageProportions(0.6, 0.01, 0.6, 0.01))
    dense = [i for i, layer in enumerate(graph.layers) if layer.op_class == "matmul"]
    others = [i for i in range(len(graph.layers)) if i not in dense]
    assert dense and (small.temporary_bytes[others] == base.temporary_bytes[others]).all()
    back = times(StageProportions(0.6, 0.6, 0.01, 0.01))
    assert (back.forward_s == base.forward_s).all() and (back.backward_s > base.backward_s).any()
    settings_ = PlannedProgram(num_stages=2, available_memory_proportion=(uniform(0.6)[0], uniform(0.01)[0]))
    splits = Planner(graph, SYSTEM).names((0, 6))
    joined = program_times(graph, stage_starts(graph, splits), settings_, SYSTEM.ipu)
    first = graph.index(splits[0])
    half = layer_times(graph, settings_, SYSTEM.ipu, proportions=uniform(0.01)[0])
    assert (joined.backward_s[first:] == half.backward_s[first:]).all()


def with_matmul(graph, place):
    """Returns the network with a matrix product at every position behind one of its layers."""
    layers = []
    for layer in graph.layers:
        inputs = tuple("dense" if name == place else name for name in layer.inputs)
        kept = tuple("dense" if name == place else name for name in layer.kept)
        layers.append(replace(layer, inputs=inputs, kept=kept) if layer.name != place else layer)
        if layer.name == place:
            channels = layer.output_shape[-1]
            weights = channels**2
            positions = layer.output_shape[0] * layer.output_shape[1]
            more = {"input_channels": channels, "macs": weights * positions}
            more.update(num_parameters=weights, num_trainable=weights, kept=(place,))
            layers.append(Layer("dense", "matmul", (place,), layer.output_shape, **more))
    return replace(graph, layers=tuple(layers))


def test_segments_on_one_ipu_have_one_proportion(graph):
    planner = Planner(graph, SYSTEM)
    segments = PlannedProgram(16, 12, num_stages=3, schedule="Sequential", recomputation=True)
    separate = replace(segments, available_memory_proportion=tuple(uniform(share)[0] for share in SHARES))
    error, hint = "one value for segments on one IPU", "--available-memory-proportion 5"
    check_raises(ConfigurationError, error, hint, planner.fastest_program, [ProgramVariants(separate)])
    # Several stages with an IPU each may differ.
    assert planner.fastest_program([ProgramVariants(replace(separate, device_mapping=(0, 1, 2)))]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_gets_its_fastest_proportions(schedule):
    """Tries every split with every proportion of either kind of product in every stage."""
    machine, graph = system(90), with_matmul(network([64, 16, 64, 16], size=24, block=99), "relu2")
    planner = Planner(graph, machine)
    program_settings = replace(
        BASE, num_stages=2, schedule=schedule, recomputation=True, device_mapping=(0, 1)
    )
    limit, shares = LIMITS[0], OPEN["available_memory_proportion"]
    pairs = [StageProportions(c, m, c, m) for c, m in itertools.product((0.6, 0.3, 0.15), repeat=2)]
    programs = [
        replace(program_settings, available_memory_proportion=vector)
        for vector in itertools.product(pairs, repeat=2)
    ]
    fitting = all_that_fit(graph, programs, machine, limit)
    (choice,) = choices(program_settings, {"available_memory_proportion": shares}, by_stage=True)
    best = planner.fastest_splits(choice.program, limit, by_stage=shares)
    found_s = micro_batch_s(best.prediction, best.settings)
    assert found_s == pytest.approx(min(time_s for time_s, *_ in fitting), rel=1e-9)
    assert best.solution.optimal and best.predicted_fill <= limit
    assert fill(graph, best.splits, best.settings, machine) == best.predicted_fill
    # Within one program images/s decide, and one proportion for all stages is kept if it is as fast.
    group = [ProgramVariants(program) for program in choice.programs]
    alike, separate = planner.fastest_program(group), planner.fastest_program([choice])
    assert not alike.settings.proportions_differ
    assert separate.settings.proportions_differ
    assert separate.prediction.images_per_s > alike.prediction.images_per_s * (1 + SAME_SPEED)
    # Given splits get the proportions that suit them best.
    for splits in {splits for _, _, splits, _ in fitting}:
        separate = planner.best_judged(splits, [choice])
        fastest = max(speed for _, speed, other, _ in fitting if other == splits)
        assert fastest * (1 - SAME_SPEED) <= separate.prediction.images_per_s <= fastest * (1 + 1e-9)


def test_plan_splits_takes_a_proportion_for_each_stage(run):
    words, shares = f"{MODEL} --stages 2 --recomputation off", "--available-memory-proportion 60 10"
    planned = plan(run, words, shares)
    assert percentages(planned.settings.available_memory_proportion) == (60, 10)
    assert planned.run_options()["available-memory-proportion"] == [60, 10]
    assert not any("proportion" in line for line in planned.assumed)
    assert PipelinePlan.from_yaml(planned.to_yaml(), "plan.yml") == planned
    out, _ = plan_splits(run, words, shares)
    assert "proportion 60 10%" in " ".join(out.split()) and shares in out
    refused(run, 2, "3 values for 2 stages", "give 1, 2 (per stage) or 4", words, shares, 30)
    refused(run, 2, "nothing says how many stages", "--stages", MODEL, "--ipus 2", shares)


@pytest.mark.slow
def test_proportions_of_a_preset_for_other_stages_are_ignored(run):
    """A preset's four values do not apply to two stages."""
    out, _ = plan_splits(run, "unet --config unet@isbi2012-pod4 --stages 2 --precision 16.16")
    assert "4 values are not for 2 stages" in " ".join(out.split())
    assert "--available-memory-proportion 70 30" not in out


def test_hint_keeps_the_proportions_of_stages(graph):
    """Hints lower values stage by stage; for another number of stages the smallest applies, and the hint says so."""
    program_settings = PlannedProgram(
        64,
        8,
        num_stages=2,
        available_memory_proportion=(uniform(0.6)[0], uniform(0.1)[0]),
        recomputation=True,
    )
    splits = Planner(graph, SYSTEM).names((0, 6))
    option, seen = "--available-memory-proportion", []
    for neighbour in neighbours(program_settings, splits, 4):
        changed = neighbour.program
        flags_ = list(flags_between(program_settings, changed, (), ()))
        if option in flags_:
            values = flags_[flags_.index(option) + 1 :]
            expected = [f"{value:g}" for value in percentages(changed.available_memory_proportion)]
            assert values[: len(expected)] == expected and flags_.count(option) == 1
            seen += [flags_] if changed.num_stages == 2 else []
        else:
            assert changed.available_memory_proportion == program_settings.available_memory_proportion
    assert [option, "30", "10"] in seen
