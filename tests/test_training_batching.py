"""Batch and program arithmetic: the public application's examples, and properties over random numbers."""

import dataclasses
import json
import re
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.refusals import check_raises

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.group import Alone
from ipucnn.sessions.host.division import check_fused, fixed_fused
from ipucnn.sessions.poplar.checks import local_evaluation_replicas
from ipucnn.sessions.session import is_checkpoint_due
from ipucnn.training import batching
from ipucnn.training.batching import updates_per_event
from ipucnn.training.program import (
    BuiltProgram,
    EpochPlan,
    Layers,
    Program,
    evaluation_replicas,
    make_layout,
    make_program,
    stage_proportions,
    validation_replicas,
)

CIFAR = 50_000


def program_of(num_samples=1000, **values) -> Program:
    return make_program(RunConfig(**values), num_samples, seed=0)


def cifar_program(epochs, logs, **values) -> Program:
    sizes = dict(micro_batch_size=8, gradient_accumulation_count=8, num_epochs=epochs, logs_per_epoch=logs)
    return program_of(CIFAR, **{**sizes, **values})


# --- 50,000 images, micro-batch 8, gradient accumulation 8 -> 781 weight updates an epoch


@pytest.mark.parametrize(
    "logs, more, per_execution, executions_per_log, warning",
    [
        (1.0, {}, 781, 1, None),  # one epoch per execution, one log per epoch
        (2.5, {}, 781, 1, "2.5 logs per epoch are not possible"),
        (1.5, {}, 781, 1, "1.5 logs per epoch are not possible"),
        (2.0, {}, 781, 1, "logging 1 time"),  # half an epoch would end within a weight update
        (10.0, {}, 71, 1, "logging 11 time"),  # the closest to 1/10 is 1/11
        (0.5, {}, 2 * 781, 1, None),  # two epochs per execution, repeated three times
        (1 / 3, {}, 3 * 781, 1, None),  # three epochs per execution, repeated twice
        (0.0, {}, 6 * 781, 1, "the entire training run"),
        # Frequent checkpoints shorten executions, but not those of a given length.
        (0.5, {"ckpts_per_epoch": 1.0}, 781, 2, None),
        (1.0, {"ckpts_per_epoch": 11.0}, 71, 11, None),
        (11.0, {"ckpts_per_epoch": 71.0}, 1, 71, None),
        (0.0, {"ckpts_per_epoch": 0.5}, 1562, 3, None),
        (1.0, {"ckpts_per_epoch": 11.0, "steps_per_execution": 781 * 8}, 781, 1, "11 checkpoints per epoch"),
    ],
)
def test_executions_of_the_public_example_on_cifar10(logs, more, per_execution, executions_per_log, warning):
    program = cifar_program(6, logs, **more)
    assert program.weight_updates_per_epoch == 781
    assert program.samples_discarded_per_epoch == CIFAR - 781 * 64 == 16
    assert (program.weight_updates_per_execution, program.executions_per_log) == (
        per_execution,
        executions_per_log,
    )
    assert program.num_executions * per_execution == 6 * 781
    assert program.steps_per_execution == per_execution * 8
    assert [warning in w for w in program.warnings] == ([] if warning is None else [True])


@pytest.mark.parametrize(
    "text, value",
    [
        ("1/4", Fraction(1, 4)),
        ("2", 2),
        (0.5, Fraction(1, 2)),
        ("0", 0),
        (1 / 3, Fraction(1, 3)),
        # A number within 1e-9 of a fraction with a denominator up to 10,000 means that fraction.
        ("0.3333333342", Fraction(1, 3)),
        ("0.3333333345", Fraction("0.3333333345")),
        ("0.123456", Fraction("0.123456")),
        (f"{7 / 10_000:.17g}", Fraction(7, 10_000)),
        (f"{1 / 9999:.17g}", Fraction(1, 9999)),
        (f"{1 / 10_001:.17g}", Fraction(f"{1 / 10_001:.17g}")),
        *((text, None) for text in ("1/0", "many", "-1", "1/2/3", "")),
    ],
)
def test_frequencies_are_exact_or_refused(text, value):
    if value is not None:
        assert batching.parse_frequency(text) == value
        return
    check_raises(ConfigurationError, "", "", batching.parse_frequency, text)


@given(st.integers(0, 60), st.integers(1, 12))
def test_nearest_multiples_are_legal_and_closest(value, base):
    multiples = [number for number in range(1, value + base + 1) if number % base == 0]
    below, above = [m for m in multiples if m <= value], [m for m in multiples if m >= value]
    assert batching.nearest_multiples(value, base) == sorted({*below[-1:], *above[:1]})


@given(st.integers(1, 5000))
def test_divisors_are_complete(number):
    assert batching.divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


# --- the global batch

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES)
def test_global_batch_and_accumulation_are_inverse(size, count, replicas):
    sizes = dict(micro_batch_size=size, num_replicas=replicas)
    forward = make_layout(RunConfig(gradient_accumulation_count=count, **sizes))
    assert forward.global_batch_size == size * count * replicas
    assert make_layout(RunConfig(global_batch_size=forward.global_batch_size, **sizes)) == forward


@given(
    SIZES, st.integers(1, 16), st.integers(1, 5000),
    st.sampled_from([("Grouped", 1, 1), ("Sequential", 4, 1), ("Interleaved", 2, 2), ("Grouped", 2, 4)]),
)  # fmt: skip
def test_nearest_global_batch_is_used_and_both_numbers_are_shown(size, replicas, requested, pipeline):
    schedule, stages, base = pipeline
    layout = make_layout(
        RunConfig(
            micro_batch_size=size,
            num_replicas=replicas,
            global_batch_size=requested,
            pipeline_schedule=schedule,
            ipus_per_replica=stages,
        )
    )
    step = size * replicas * base
    assert layout.global_batch_size % step == 0
    assert abs(layout.global_batch_size - requested) == min(
        abs(n * step - requested) for n in range(1, requested // step + 2)
    )
    assert len(layout.warnings) == (requested % step > 0)
    for warning in layout.warnings:
        assert f"{requested:,}" in warning and f"{layout.global_batch_size:,}" in warning
        assert (f"{stages} stages needs a multiple of {base}" in warning) == (base > 1)


@given(
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from(["Grouped", "Interleaved", "Sequential"]),
    st.integers(1, 200),
)
def test_pipelines_take_only_multiples_of_their_overlap(stages, schedule, count):
    base = {"Grouped": 2 * stages, "Interleaved": stages, "Sequential": 1}[schedule]

    def made(accumulation):
        return make_layout(
            RunConfig(
                ipus_per_replica=stages,
                pipeline_schedule=schedule,
                gradient_accumulation_count=accumulation,
            )
        ).gradient_accumulation_count

    assert made(None) == base
    if count % base == 0:
        assert made(count) == count
        return
    with pytest.raises(ConfigurationError) as error:
        made(count)
    legal = [int(word) for word in error.value.hint.split() if word.isdigit()]
    assert legal and all(made(n) == n for n in legal)
    assert min(abs(n - count) for n in legal) == min(
        abs(n - count) for n in range(base, count + 2 * base, base)
    )


# --- epochs


@pytest.mark.slow
@given(
    st.integers(1, 300), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3),
    st.one_of(st.none(), st.just(-1), st.integers(1, 12)), st.booleans(),
)  # fmt: skip
def test_epoch_counts_each_sample_once(samples, size, count, replicas, updates, pads):
    """Compares with a walk over the data set; at its end another permutation begins, or padding."""
    values = dict(micro_batch_size=size, gradient_accumulation_count=count, num_replicas=replicas)
    values.update(weight_updates_per_epoch=updates, pad_dataset=pads)
    batch = size * count * replicas
    assume(not pads or updates in (None, -1))
    if samples < batch and not pads and updates in (None, -1):
        with pytest.raises(ConfigurationError, match="larger than the training set"):
            program_of(samples, **values)
        return
    program = program_of(samples, **values)
    number = (
        len(range(0, samples if pads else samples - batch + 1, batch)) if updates in (None, -1) else updates
    )
    used = number * batch
    assert program.weight_updates_per_epoch == number
    assert program.samples_per_epoch == (samples if pads else used)
    assert program.samples_discarded_per_epoch == (0 if pads else len(range(used, samples)))
    assert program.samples_padded_per_epoch == (used - samples if pads else 0)


@given(
    st.integers(1, 200), SIZES, st.integers(1, 20), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.booleans()
)  # fmt: skip
def test_hint_for_a_too_large_global_batch_works(samples, size, times, replicas, base, is_global):
    values = dict(micro_batch_size=size, num_replicas=replicas, ipus_per_replica=base)
    values.update(pipeline_schedule="Interleaved")
    key = "global_batch_size" if is_global else "gradient_accumulation_count"
    values[key] = times * base * (size * replicas if is_global else 1)
    if samples >= size * times * base * replicas:
        return
    with pytest.raises(ConfigurationError, match="larger than the training set") as error:
        program_of(samples, **values)
    if samples < base:
        assert "larger data set" in error.value.hint
        return
    options = {
        name.replace("-", "_"): int(value)
        for name, value in re.findall(r"--([a-z-]+) (\d+)", error.value.hint)
    }
    # Accumulation and global batch cannot both be given.
    assert set(options) <= {"micro_batch_size", "num_replicas", key}
    assert program_of(samples, **{**values, **options}).weight_updates_per_epoch >= 1


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 6), st.integers(0, 60))
def test_samples_before_equals_a_count_by_update(samples, size, epochs, requested):
    program = program_of(
        samples, micro_batch_size=size, gradient_accumulation_count=1, num_epochs=epochs, pad_dataset=True
    )
    left, seen = samples, 0
    for _ in range(requested):
        taken = min(size, left)
        left, seen = left - taken, seen + taken
        if not left:
            left = samples  # the next epoch
    assert program.samples_before(requested) == seen


# --- executions


@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 4), st.integers(1, 800))
def test_steps_per_execution_are_whole_weight_updates_or_refused_with_legal_ones(
    count, updates, epochs, steps
):
    def made(number):
        return batching.updates_from_steps_per_execution(number, count, updates, epochs)

    try:
        per_execution = made(steps)
    except ConfigurationError as error:
        legal = [int(word) for word in error.hint.replace(",", " ").split() if word.isdigit()]
        assert legal
        if steps % count == 0:  # the other refusal only promises whole weight updates
            assert all(made(number) for number in legal)
        return
    assert per_execution * count == steps
    assert updates * epochs % per_execution == 0


@pytest.mark.slow
@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.fractions(min_value=0, max_value=12, max_denominator=6),
    st.fractions(min_value=0, max_value=12, max_denominator=6),
)
def test_executions_end_where_a_naive_loop_stops(updates, epochs, logs, checkpoints):
    """Finds the longest equal executions that end at every log and at every checkpoint more frequent than logs."""
    values = dict(num_epochs=epochs, logs_per_epoch=logs, ckpts_per_epoch=checkpoints)
    values.update(micro_batch_size=2, gradient_accumulation_count=1)
    if 0 < logs < 1 and (logs * epochs).denominator != 1:
        with pytest.raises(ConfigurationError, match=f"epochs at a time for {epochs} epochs"):
            program_of(2 * updates, **values)
        return
    program = program_of(2 * updates, **values)
    total = updates * epochs

    def stops(frequency):
        """Returns the weight updates after which something is due, counted one by one."""
        whole, due = (updates, frequency) if frequency >= 1 else (total, frequency * epochs)
        possible = [n for n in range(1, whole + 1) if whole % n == 0]
        number = min(possible, key=lambda n: (abs(n - due), n))
        return [done for done in range(1, total + 1) if done % (whole // number) == 0]

    logged = stops(logs) if logs else [total]
    saved = stops(checkpoints) if checkpoints else []
    more_frequent = len(saved) > len(logged)
    due = sorted(set(logged) | (set(saved) if more_frequent else set()))
    length = next(n for n in range(total, 0, -1) if total % n == 0 and all(done % n == 0 for done in due))
    assert program.weight_updates_per_execution == length
    assert program.num_executions * length == total
    ends = range(1, program.num_executions + 1)
    assert [n * length for n in ends if n % program.executions_per_log == 0] == logged
    if more_frequent:
        assert [n * length for n in ends if is_checkpoint_due(program, n)] == sorted({*saved, total})


def test_only_samples_count_in_the_scale_of_a_padded_weight_update():
    scales = [program_of(n, micro_batch_size=8, pad_dataset=True).padding_scale for n in (9, 10, 15, 16)]
    assert scales == [8 / 1, 8 / 2, 8 / 7, 1]


def test_checkpoints_and_validations_fall_on_executions():
    assert program_of(checkpoints=False).executions_per_checkpoint == 0
    program = cifar_program(6, 11.0, ckpts_per_epoch=2.0, first_ckpt_epoch=3, validation_freq=2)
    assert program.executions_per_checkpoint == 6  # an epoch cannot have 5.5 executions
    assert any("checkpoints per epoch" in w for w in program.warnings)
    assert program.first_checkpoint_execution == 33
    assert program.executions_per_validation == 22
    assert cifar_program(6, 1.0, checkpoints=False).executions_per_checkpoint == 0


@pytest.mark.parametrize(
    "logs, validation_freq", [(1, 0), (1, 1), (1, 2), (1, 3), (4, 1), (4, 0.5), (4, 0.25), (4, 0.1)]
)
def test_validations_fall_on_executions(logs, validation_freq):
    values = dict(micro_batch_size=1, gradient_accumulation_count=1, num_epochs=6, logs_per_epoch=logs)
    values.update(validation_freq=validation_freq)
    # This number of executions is nearest to the requested one, and at least one.
    per_epoch = logs * validation_freq
    nearest = min(range(1, 100), key=lambda n: abs(n - per_epoch)) if per_epoch else 0
    assert program_of(8, **values).executions_per_validation == nearest
    assert program_of(8, validation=False, **values).executions_per_validation == 0


# --- pipelines, IPUs and replicas


@pytest.mark.parametrize(
    "values, stages, ipus",
    [
        ({}, 1, 1),
        ({"pipeline_splits": ("a",)}, 2, 2),
        ({"pipeline_splits": ("a", "b")}, 3, 4),
        ({"pipeline_splits": ("a", "b", "c")}, 4, 4),
        ({"ipus_per_replica": 5}, 5, 8),
        # Stages may share an IPU.
        ({"pipeline_splits": ("a", "b", "c"), "device_mapping": (0, 1, 1, 0)}, 4, 2),
        ({"device_mapping": (0, 1, 1, 0)}, 4, 2),
    ],
)
def test_ipus_are_replicas_times_ipus_per_replica(values, stages, ipus):
    layout = make_layout(RunConfig(num_replicas=2, **values))
    assert (layout.num_stages, layout.ipus_per_replica, layout.num_ipus) == (stages, ipus, 2 * ipus)
    used = max(layout.device_mapping) + 1
    warning = f"a replica of {used} IPUs occupies {ipus}: IPUs come in powers of two"
    assert layout.warnings == (() if used == ipus else (warning,))
    # The number of IPUs can also be given, but no other number.
    named = {**values, "ipus_per_replica": used}
    assert make_layout(RunConfig(num_replicas=2, **named)).num_ipus == 2 * ipus
    for other in set(range(1, 9)) - {used} if values.keys() - {"ipus_per_replica"} else ():
        with pytest.raises(ConfigurationError, match=f"--ipus-per-replica {other} does not suit") as error:
            make_layout(RunConfig(**{**values, "ipus_per_replica": other}))
        instead = "" if "device_mapping" in values else ", or --pipeline-splits auto"
        assert error.value.hint.startswith(f"use --ipus-per-replica {used}{instead}")


@given(st.integers(1, 64), st.sampled_from([1, 2, 4]))
def test_ipus_are_filled_with_replicas(ipus, stages):
    config = RunConfig(pipeline_splits=tuple(f"layer{i}" for i in range(stages - 1)), ipus=ipus)
    if ipus % stages:
        legal = " or ".join(str(n) for n in (ipus // stages * stages, (ipus // stages + 1) * stages) if n)
        with pytest.raises(ConfigurationError, match="not a multiple") as error:
            make_layout(config)
        assert error.value.hint == f"use --ipus {legal}"
    else:
        assert make_layout(config).num_replicas == ipus // stages


@pytest.mark.parametrize(
    "values, message, hint",
    [
        ({"ipus": 4, "num_replicas": 3}, "makes 4 replica", "use --ipus 3, or --num-replicas 4"),
        ({"pipeline_splits": ("a",), "gradient_accumulation_count": 3}, "multiple of 4", "-count 4"),
        ({"pipeline_splits": ("a", "b"), "device_mapping": (0, 1)}, "names 2 stages", "give 3 numbers"),
        ({"pipeline_splits": ("a",), "device_mapping": (0, 1, 1, 0)}, "names 4 stages", "give 2 numbers"),
        ({"pipeline_splits": ("a", "b"), "device_mapping": (0, 2, 0)}, "leaves IPUs out", "without gaps"),
        ({"recomputation": True}, "needs a pipeline", "--no-recomputation"),
        ({"dbn_replica_group_size": 2}, "does not divide", "-size 1"),
        ({"dbn_replica_group_size": 3, "num_replicas": 4}, "does not divide", "-size 1 or 2 or 4"),
        ({"dbn_replica_group_size": 2, "num_replicas": 2, "pipeline_splits": ("a",)}, "one IPU", "drop the"),
        ({"available_memory_proportion": (10.0, 20.0, 30.0), "ipus_per_replica": 2}, "3 values", "give 1, 2"),
        # Without a pipeline there are no options of single stages: two values would have no effect.
        ({"available_memory_proportion": (10.0, 20.0)}, "2 values for 1 stage", "give one value"),
        ({"steps_per_execution": 5, "gradient_accumulation_count": 2}, "not a multiple", "4 or 6"),
        ({"global_batch_size": 2048}, "larger than the training set", "use --"),
        ({"num_epochs": 5, "logs_per_epoch": 0.5}, "log 2 epochs at a time for 5 epochs", "1/5"),
    ],
)
def test_illegal_combinations_are_refused(values, message, hint):
    check_raises(ConfigurationError, message, hint, program_of, **values)


@pytest.mark.slow
@given(st.integers(1, 5), st.lists(st.integers(1, 100), max_size=10))
def test_proportions_of_stages(stages, values):
    if len(values) < 2:
        assert stage_proportions(values, stages) == ()
    elif stages > 1 and len(values) in (stages, 2 * stages):
        each = len(values) // stages
        parts = [values[stage * each : (stage + 1) * each] for stage in range(stages)]
        assert stage_proportions(values, stages) == tuple((p[0] / 100, p[-1] / 100) for p in parts)
    else:
        error = f"{len(values)} values for {stages} stage"
        check_raises(ConfigurationError, error, "give", stage_proportions, values, stages)


@pytest.mark.parametrize(
    ("values", "instances", "replicas"),
    [
        ({}, 1, 2),
        ({"ipus_per_replica": 2}, 1, 4),
        ({"ipus_per_replica": 2, "pipeline_validation_model": True}, 1, 2),
        ({"ipus_per_replica": 2, "pipeline_validation_model": True}, 2, 1),
        ({"ipus_per_replica": 2}, 2, 2),
        ({"validation_num_replicas": 3}, 1, 3),
    ],
)
def test_validation_has_the_ipus_of_training(values, instances, replicas):
    """It uses each IPU of a process, and with a pipeline each group of them."""
    config = RunConfig(micro_batch_size=2, gradient_accumulation_count=4, num_replicas=2, **values)
    program = make_program(config, 64, seed=0, num_instances=instances)
    assert program.validation_num_replicas == replicas
    if "validation_num_replicas" not in values:
        assert (
            validation_replicas(config.pipeline_validation_model, 2, program.ipus_per_replica, instances)
            == replicas
        )


@pytest.mark.parametrize(
    ("values", "replicas"),
    [
        ({}, 1),
        ({"ipus": 4}, 4),
        ({"num_replicas": 4}, 4),
        ({"ipus": 4, "ipus_per_replica": 2}, 4),
        ({"num_replicas": 2, "pipeline_splits": ("a", "b")}, 8),  # three stages occupy four IPUs
        ({"num_replicas": 2, "ipus_per_replica": 2, "pipeline_validation_model": True}, 4),
        ({"ipus": 4, "validation_num_replicas": 2}, 2),
    ],
)
def test_a_network_that_is_only_evaluated_has_all_ipus_of_training(values, replicas):
    config = RunConfig(micro_batch_size=2, **values)
    assert evaluation_replicas(config) == local_evaluation_replicas(Alone(), config) == replicas


# --- the Program as a value


@pytest.mark.slow
@given(st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 30))
def test_fused_micro_batches_are_whole_groups_of_a_weight_update(count, group, fused):
    program = program_of(gradient_accumulation_count=count, num_replicas=4, dbn_replica_group_size=group)
    number = count * 4
    assert program.num_micro_batches == number
    legal = [n for n in range(1, number + 1) if number % n == 0 and n % group == 0]
    if fused in legal:
        check_fused(program, fused)
        return
    with pytest.raises(ConfigurationError, match="into whole groups") as error:
        check_fused(program, fused)
    named = [int(word) for word in error.value.hint.split() if word.isdigit()]
    assert set(named) <= set(legal) and len(named) == min(2, len(legal))
    assert min(abs(n - fused) for n in named) == min(abs(n - fused) for n in legal)


def test_an_option_or_else_a_checkpoint_fixes_the_fused_micro_batches():
    program = program_of(gradient_accumulation_count=6, num_replicas=4, dbn_replica_group_size=2)
    for option, saved, expected in (
        (None, None, None),
        (None, 12, 12),
        (8, 12, 8),
        (None, 1, 2),  # of IPUs, which fuse none
    ):
        assert fixed_fused(RunConfig(fused_micro_batches=option), program, saved) == expected
    check_raises(
        ConfigurationError,
        "5 does not divide",
        "4 or 6",
        fixed_fused,
        RunConfig(fused_micro_batches=5),
        program,
        None,
    )


def test_parts_of_a_program_survive_json_and_are_immutable():
    program = cifar_program(2, 1.0, ipus_per_replica=2, num_replicas=2)
    layers = Layers(("a",), "given", ("b", "c"))
    built = BuiltProgram.of(program, layers, 3)
    read = json.loads(built.to_json())
    assert read["fused_micro_batches"] == 3 and read["frozen_layers"] == ["b", "c"]
    assert BuiltProgram.from_dict(read) == built
    # A larger part has all values of its parts.
    assert Program.from_dict(read) == program and Layers.from_dict(read) == layers
    assert EpochPlan.from_dict(read).num_weight_updates == program.num_weight_updates
    del read["frozen_layers"]
    with pytest.raises(TypeError, match="frozen_layers"):
        BuiltProgram.from_dict(read)
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.seed = 3


def test_program_has_the_recipe_of_the_configuration():
    recipe = {"clip_gradient_norm": 2.0, "ema_decay": 0.9, "mixup": 0.2, "cutmix": 0.3, "random_erasing": 0.4}
    assert recipe.items() <= program_of(**recipe).to_dict().items()


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 5), st.fractions(min_value="1/8", max_value=70, max_denominator=8))
def test_an_event_is_as_frequent_as_equal_executions_allow(updates, epochs, per_epoch):
    """Divides one epoch, or for rarer events the whole run, into each number of equal parts."""
    length = updates if per_epoch >= 1 else updates * epochs
    requested = per_epoch if per_epoch >= 1 else per_epoch * epochs
    distances = {length // n: abs(n - requested) for n in range(1, length + 1) if length % n == 0}
    nearest = [between for between, distance in distances.items() if distance == min(distances.values())]
    assert updates_per_event(updates, epochs, per_epoch) == max(nearest)
