"""Changes for a program that ran out of memory: each one's flags are applied naively, and judged again."""

import re
from dataclasses import replace

import pytest
from support.plans import fill, network, system

from ipucnn.config.options import RunConfig, specs_for
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.memory import FITS_BELOW, program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.program import PROPORTIONS, PlannedProgram, planned_program, uniform
from ipucnn.planning.search.neighbours import (
    first_that_fits,
    flags_between,
    memory_without,
    neighbours,
    next_changes,
    prediction_advice,
    training_advice,
)
from ipucnn.planning.search.planner import Planner
from ipucnn.training.batching import overlap_length
from ipucnn.training.program import make_layout, make_program

GRAPH = network([16, 16, 16, 32, 32, 32], size=48)
# The command of a plan, to which its changes are added
TRAINING_FLAGS = {flag for spec in specs_for("train") for flag in (spec.flag, f"--no-{spec.key}")}


def program(kib_per_tile, **changes):
    """Returns settings, their fastest splits whatever memory they need, and the machine."""
    program_settings = PlannedProgram(
        **{"micro_batch_size": 16, "gradient_accumulation_count": 16, "half_partials": False, **changes}
    )
    machine = system(kib_per_tile)
    return program_settings, Planner(GRAPH, machine).fastest_splits(program_settings, 1e9).splits, machine


def proposal(program_settings, splits, machine, **options):
    return first_that_fits(Planner(GRAPH, machine), program_settings, splits, **options)


def applied(changed, splits, flags):
    """Returns the settings of a user who adds the flags to the command."""
    words = list(flags)
    while words:
        flag, values = words.pop(0), []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        name, is_off = flag[2:].replace("-", "_"), flag.startswith("--no-")
        if flag == "--available-memory-proportion":
            changed = replace(
                changed, available_memory_proportion=tuple(uniform(float(v) / 100)[0] for v in values)
            )
        elif flag in ("--micro-batch-size", "--gradient-accumulation-count"):
            changed = replace(changed, **{name: int(values[0])})
        elif flag == "--pipeline-schedule":
            changed = replace(changed, schedule=values[0])
        elif flag == "--precision":
            changed = replace(changed, precision=values[0])
        elif flag == "--pipeline-splits":
            splits = tuple(values)
            changed = replace(changed, num_stages=len(splits) + 1)
        else:
            changed = replace(changed, **{name[3:] if is_off else name: not is_off})
    return changed, splits


@pytest.mark.parametrize("kib", [300, 80, 60, 30, 15])
@pytest.mark.parametrize(
    ("stages", "schedule", "again"),
    [
        (1, "Grouped", False),
        (2, "Grouped", False),
        (2, "Grouped", True),
        (3, "Interleaved", False),
        (4, "Grouped", False),
    ],
)
def test_proposed_change_fits(kib, stages, schedule, again):
    count = 16 * overlap_length(schedule, stages)
    program_settings, splits, machine = program(
        kib, num_stages=stages, schedule=schedule, recomputation=again, gradient_accumulation_count=count
    )
    change = proposal(program_settings, splits, machine)
    if change is None:
        small = replace(
            program_settings, micro_batch_size=1, available_memory_proportion=uniform(min(PROPORTIONS))
        )
        several = [replace(small, num_stages=k) for k in (stages, 8)]
        assert not any(Planner(GRAPH, machine).fits(one, 0.5 * FITS_BELOW) for one in several)
        return
    changed, changed_splits = applied(program_settings, splits, change.flags)
    now, before = (
        fill(GRAPH, changed_splits, changed, machine),
        fill(GRAPH, splits, program_settings, machine),
    )
    assert (changed, changed_splits) == (change.program, change.splits)
    assert now == pytest.approx(change.after.predicted_fill)
    assert before == pytest.approx(change.before.predicted_fill)
    assert now < FITS_BELOW
    assert now < before / 1.09
    assert changed.gradient_accumulation_count % overlap_length(changed.schedule, changed.num_stages) == 0
    assert changed.global_batch_size >= program_settings.global_batch_size
    if changed.num_stages == program_settings.num_stages:
        assert changed.global_batch_size == program_settings.global_batch_size


@pytest.mark.slow
def test_large_change_is_proposed_only_if_no_small_one_fits():
    seen = set()
    for kib in (100, 80, 70, 60, 50, 40, 30, 20):
        program_settings, splits, machine = program(kib, num_stages=4, gradient_accumulation_count=64)
        change = proposal(program_settings, splits, machine)
        if change is None or change.program.micro_batch_size == program_settings.micro_batch_size:
            seen.add("small")
            continue
        seen.add("large")
        allowed = min(FITS_BELOW, fill(GRAPH, splits, program_settings, machine) / 1.1)
        for recompute in (False, True):
            for share in PROPORTIONS:
                small = replace(
                    program_settings, recomputation=recompute, available_memory_proportion=uniform(share)
                )
                assert fill(GRAPH, splits, small, machine) >= allowed
    assert seen == {"small", "large"}


def test_memory_that_the_compiler_reported_counts():
    program_settings, splits, machine = program(300, num_stages=2)
    slightly = proposal(program_settings, splits, machine, overuse=1.05)
    greatly = proposal(program_settings, splits, machine, overuse=4.0)
    assert slightly.after.predicted_fill <= slightly.before.predicted_fill / 1.05
    assert greatly.after.predicted_fill <= greatly.before.predicted_fill / 4.0
    assert greatly.program.micro_batch_size < slightly.program.micro_batch_size


def test_proposals_use_no_more_ipus_than_allowed():
    program_settings, splits, machine = program(24, num_stages=1, micro_batch_size=1)
    assert proposal(program_settings, splits, replace(machine, num_ipus=1)) is None
    more = proposal(program_settings, splits, replace(machine, num_ipus=4))
    assert 1 < more.program.num_stages <= 4


def test_inference_proposals_do_not_change_accumulation():
    program_settings, splits, machine = program(
        30, num_stages=1, training=False, gradient_accumulation_count=1, micro_batch_size=64
    )
    change = proposal(program_settings, splits, machine)
    assert "--micro-batch-size" in change.flags
    assert "--gradient-accumulation-count" not in change.flags
    assert "--recomputation" not in change.flags


def test_hint_lists_the_proposed_changes():
    program_settings, splits, machine = program(60, num_stages=2)
    change = proposal(program_settings, splits, machine)
    assert change.hint.startswith("predicted to fit: --micro-batch-size 8 --gradient-accumulation-count 32 (")
    assert "instead of 90%" in change.hint


@pytest.mark.parametrize(("count", "schedule"), [(4, "Grouped"), (8, "Grouped"), (6, "Interleaved")])
def test_smaller_micro_batches_have_legal_counts(count, schedule):
    """The global batch stays, in a number of micro-batches that training accepts."""
    base = overlap_length(schedule, 2)
    for size in (5, 6, 7):
        before = PlannedProgram(size, count, num_stages=2, schedule=schedule)
        seen = [each.program for each in neighbours(before, ("conv3",)) if each.program.num_stages == 2]
        sizes = {each.micro_batch_size for each in seen if each.global_batch_size == before.global_batch_size}
        naive = {
            n for n in (size // 2, size // 4) if n and size * count % n == 0 and size * count // n % base == 0
        }
        assert {n for n in sizes if n < size} == naive
        assert all(each.gradient_accumulation_count % base == 0 for each in seen)


@pytest.mark.parametrize("total", [64, 60, 20])
@pytest.mark.parametrize("stages", [1, 2])
def test_hints_beside_a_global_batch_can_be_typed(total, stages):
    """Training takes a global batch or an accumulation count, and rounds a global batch to what its pipeline allows."""
    config = RunConfig(
        model_name="lenet", micro_batch_size=8, global_batch_size=total, ipus_per_replica=stages
    )
    before = planned_program(config, make_layout(config))
    for neighbour in neighbours(before, ("conv3",) * (stages - 1), 4):
        if neighbour.setting == "pipelining":
            continue
        words = flags_between(before, neighbour.program, (), (), total)
        given = dict(zip(words, words[1:]))
        typed = {
            **{"micro_batch_size": int(given.get("--micro-batch-size", 8))},
            **{"global_batch_size": int(given.get("--global-batch-size", total))},
            **{"pipeline_schedule": given.get("--pipeline-schedule", "Grouped")},
            **{"ipus_per_replica": neighbour.program.num_stages},
        }
        assert "--gradient-accumulation-count" not in words
        layout = make_layout(replace(config, **typed))
        assert layout.gradient_accumulation_count == neighbour.program.gradient_accumulation_count


def test_hint_of_a_run_with_a_global_batch_can_be_typed():
    config = RunConfig(model_name="cifar_resnet8", micro_batch_size=4096, global_batch_size=8192)
    model = build_model(get_model("cifar_resnet8"), BuildOptions((32, 32, 3), 10))
    hint = training_advice(model, "cifar_resnet8", make_program(config, 50_000, seed=1), config, ())(None)
    assert hint.startswith("predicted to fit: --micro-batch-size ")
    assert "--gradient-accumulation-count" not in hint


def test_run_uses_its_own_network_for_proposals():
    config = RunConfig(model_name="cifar_resnet8", micro_batch_size=4096, gradient_accumulation_count=1)
    model = build_model(get_model("cifar_resnet8"), BuildOptions((32, 32, 3), 10))
    ask = training_advice(model, "cifar_resnet8", make_program(config, 50_000, seed=1), config, ())
    hint = ask(None)
    assert hint.startswith("predicted to fit: --micro-batch-size ")
    size, count = int(hint.split()[4]), int(hint.split()[6])
    assert size * count == 4096
    assert int(ask(8.0).split()[4]) < size


def test_optimizer_state_is_offloaded_only_where_the_sdk_allows_it():
    """Without a pipeline it does if micro-batches are accumulated; state that is already outside frees nothing."""
    graph, machine = network([256, 256, 256, 256], size=4), system(40)
    only = ("--optimizer-state-offloading",)
    kept = PlannedProgram(micro_batch_size=1, gradient_accumulation_count=8, optimizer_slots=2)
    assert first_that_fits(Planner(graph, machine), kept, (), only=only).flags == only
    without_accumulation = replace(kept, gradient_accumulation_count=1)
    assert first_that_fits(Planner(graph, machine), without_accumulation, (), only=only) is None
    outside = replace(kept, optimizer_state_offloading=True)
    assert first_that_fits(Planner(graph, machine), outside, (), only=only) is None
    assert fill(graph, (), outside, machine) < fill(graph, (), kept, machine) / 1.1


def test_proposals_have_only_flags_of_the_command():
    program_settings, splits, machine = program(60, num_stages=2)
    assert "--micro-batch-size" in proposal(program_settings, splits, machine).flags
    others = {"--available-memory-proportion", "--recomputation", "--pipeline-schedule", "--pipeline-splits"}
    flags = set()
    for kib in (60, 80, 100, 120, 150):
        program_settings, splits, machine = program(kib, num_stages=2)
        change = proposal(program_settings, splits, machine, only=others)
        flags |= {word for word in (change.flags if change else ()) if word.startswith("--")}
    assert flags and flags <= others
    assert proposal(program_settings, splits, machine, only=()) is None


def test_unknown_networks_get_no_promise_of_a_fit():
    from tensorflow import keras

    class Odd(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 2

    inputs = keras.Input((4, 4, 1), batch_size=1)
    model = keras.Model(inputs, Odd()(inputs))
    config = RunConfig(model_name="lenet")
    train = training_advice(model, "odd", make_program(config, 100, seed=1), config, ())
    advices = {
        "evaluate": "--validation-micro-batch-size",
        "infer": "--device cpu",
        "benchmark": "--micro-batch-size",
    }
    predictions = [
        (prediction_advice(model, "odd", config, name), option) for name, option in advices.items()
    ]
    for ask, option in ((train, "--micro-batch-size"), *predictions):
        for hint in (ask(None), ask(1.5)):
            assert hint.startswith("the planner cannot compute this network") and option in hint
            assert "predicted to fit" not in hint and "plan-splits" not in hint
        assert ask(None, without="optimizer_state_offloading").endswith("so nothing is predicted")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("evaluate", {"--validation-micro-batch-size", "--precision"}),
        ("infer", {"--precision"}),
        ("benchmark", {"--micro-batch-size", "--precision", "--available-memory-proportion"}),
    ],
)
def test_prediction_commands_get_only_their_own_options(command, named):
    """However much memory is missing, and although the run was a pipeline."""
    model = build_model(get_model("cifar_resnet8"), BuildOptions((32, 32, 3), 10))
    seen, sizes = set(), {"--micro-batch-size", "--validation-micro-batch-size"}
    for size in (512, 2048, 6000):
        config = RunConfig(
            model_name="cifar_resnet8",
            micro_batch_size=size,
            ipus_per_replica=4,
            recomputation=True,
            gradient_accumulation_count=8,
        )
        ask = prediction_advice(model, "cifar_resnet8", config, command)
        for overuse in (None, 1.2, 1.8, 3.0):
            hint = ask(overuse)
            if hint.startswith("predicted to fit: "):
                seen |= {word for word in hint.split() if word.startswith("--")}
            else:
                assert hint == "nothing that was tried is predicted to fit: use --device cpu"
                assert command == "infer"
    assert seen and seen <= named
    assert seen & sizes == named & sizes


@pytest.mark.parametrize("kib", [300, 15])
def test_memory_without_offloading_is_reported(kib):
    """Checks the fullest IPU's bytes with the optimizer's state on it; activations stay on it in every prediction."""
    program_settings, splits, machine = program(kib, optimizer_state_offloading=True, optimizer_slots=2)
    kept = replace(program_settings, optimizer_state_offloading=False)
    for option, settings in (("optimizer_state_offloading", kept), ("offload_activations", program_settings)):
        memory = max(program_memory(GRAPH, splits, settings, machine.ipu), key=lambda one: one.fill)
        text = memory_without(Planner(GRAPH, machine), splits, program_settings, option)
        held, capacity = (int(word) for word in re.findall(r"(\d+) MiB", text))
        assert (held, capacity) == (round(memory.total_bytes / 2**20), round(memory.capacity_bytes / 2**20))
        assert text.endswith("does not fit") == (memory.fill >= FITS_BELOW) == (kib == 15)
    assert fill(GRAPH, splits, kept, machine) > fill(GRAPH, splits, program_settings, machine)


@pytest.mark.parametrize("kib", [300, 80])
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "32.32"}, {"recomputation": True, "optimizer_slots": 2}]
)
def test_next_changes_are_the_best_of_one_setting_each(kib, changes):
    program_settings, splits, machine = program(kib, num_stages=2, optimizer_state_offloading=True, **changes)
    planner = Planner(GRAPH, machine)
    candidate = planner.judge(splits, program_settings, 1e9)
    proposed, remedy = next_changes(planner, candidate)
    assert len({change.flags[0] for change in proposed}) == len(proposed) <= 3
    assert [change.ratio for change in proposed] == sorted(
        (change.ratio for change in proposed), reverse=True
    )
    before = predict(GRAPH, splits, program_settings, machine).images_per_s
    for change in [*proposed, *([remedy] if remedy else [])]:
        changed, kept = applied(program_settings, splits, change.flags)
        assert kept == splits and changed.global_batch_size == program_settings.global_batch_size
        assert all(flag in TRAINING_FLAGS for flag in change.flags if flag.startswith("--"))
        assert change.predicted_fill == pytest.approx(fill(GRAPH, splits, changed, machine))
        assert change.ratio == pytest.approx(predict(GRAPH, splits, changed, machine).images_per_s / before)
    assert all(change.ratio >= 1.01 and change.verdict != "does not fit" for change in proposed)
    assert remedy.predicted_fill < fill(GRAPH, splits, program_settings, machine) / 1.09
    # Every setting that is not among them gains less than those that are, or does not fit.
    for other in ({"half_partials": True}, {"recomputation": False}, {"eight_bit_transfer": True}):
        changed = replace(program_settings, **other)
        gain = predict(GRAPH, splits, changed, machine).images_per_s / before
        if gain >= 1.01 and fill(GRAPH, splits, changed, machine) <= 1.15 and changed.precision != "32.32":
            assert round(gain, 2) <= round(proposed[-1].ratio, 2) or any(
                applied(program_settings, splits, change.flags)[0] == changed for change in proposed
            )


def test_a_plan_that_does_not_fit_has_no_next_changes():
    program_settings, splits, machine = program(15, num_stages=2)
    planner = Planner(GRAPH, machine)
    candidate = planner.judge(splits, program_settings, 1e9)
    assert candidate.verdict == "does not fit" and next_changes(planner, candidate) == ((), None)
