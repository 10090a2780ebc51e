"""Batch and program arithmetic: the public application's examples, and properties over random numbers."""

import dataclasses
import re
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.poplar.checks import evaluation_replicas
from ipucnn.sessions.session import is_checkpoint_due
from ipucnn.training import batching
from ipucnn.training.program import (
    Program,
    make_layout,
    make_program,
    stage_proportions,
    validation_replicas,
)

CIFAR = 50_000


def configure(**values) -> RunConfig:
    return dataclasses.replace(RunConfig(), **values)


def cifar_program(epochs, logs, **values) -> Program:
    config = configure(
        micro_batch_size=8, gradient_accumulation_count=8, num_epochs=epochs, logs_per_epoch=logs, **values
    )
    return make_program(config, CIFAR, seed=0)


# --- the seven examples: 50,000 images, micro-batch 8, gradient accumulation 8 -> 781 weight updates an epoch


@pytest.mark.parametrize(
    "epochs, logs, per_execution, executions, warning",
    [
        (6, 1.0, 781, 6, None),  # one epoch per execution, one log per epoch
        (6, 2.0, 781, 6, "logging 1 time"),  # half an epoch would end inside a weight update
        (6, 10.0, 71, 66, "logging 11 time"),  # the closest to 1/10 is 1/11
        (6, 0.5, 2 * 781, 3, None),  # two epochs per execution, repeated three times
        (6, 1 / 3, 3 * 781, 2, None),  # three epochs per execution, repeated twice
        (6, 0.0, 6 * 781, 1, "the entire training run"),
    ],
)
def test_logs_per_epoch_on_cifar10(epochs, logs, per_execution, executions, warning):
    program = cifar_program(epochs, logs)
    assert program.weight_updates_per_epoch == 781
    assert program.samples_discarded_per_epoch == CIFAR - 781 * 64 == 16
    assert (program.weight_updates_per_execution, program.num_executions) == (per_execution, executions)
    assert program.steps_per_execution == per_execution * 8
    assert [w for w in program.warnings if "logging" in w or "execution" in w] == (
        [] if warning is None else [w for w in program.warnings if warning in w]
    )
    assert (warning is None) == (not program.warnings)


def test_logging_two_epochs_at_a_time_for_five_epochs_is_refused():
    with pytest.raises(
        ConfigurationError, match="not possible to log 2 epochs at a time for 5 epochs"
    ) as error:
        cifar_program(5, 0.5)
    assert "1/5" in error.value.hint


@pytest.mark.parametrize("text, value", [("1/4", Fraction(1, 4)), ("2", 2), (0.5, Fraction(1, 2)), ("0", 0)])
def test_frequencies_are_exact(text, value):
    assert batching.parse_frequency(text) == value
    assert batching.parse_frequency(1 / 3) == Fraction(1, 3)


@pytest.mark.parametrize(
    "text, value",
    [
        # What is within 1e-9 of a fraction with a denominator up to 10,000 means that fraction.
        ("0.3333333342", Fraction(1, 3)),
        ("0.3333333345", Fraction("0.3333333345")),
        ("0.123456", Fraction("0.123456")),
        (f"{7 / 10_000:.17g}", Fraction(7, 10_000)),
        (f"{1 / 9999:.17g}", Fraction(1, 9999)),
        (f"{1 / 10_001:.17g}", Fraction(f"{1 / 10_001:.17g}")),
    ],
)
def test_a_rounded_fraction_is_that_fraction(text, value):
    assert batching.parse_frequency(text) == value


@pytest.mark.parametrize("text", ["1/0", "many", "-1", "1/2/3", ""])
def test_frequencies_that_are_none_are_refused(text):
    with pytest.raises(ConfigurationError):
        batching.parse_frequency(text)


# --- batching ---------------------------------------------------------------------------------------------

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES)
def test_global_batch_and_accumulation_are_each_others_inverse(size, count, replicas):
    forward = batching.make_batching(size, replicas, gradient_accumulation_count=count)
    backward = batching.make_batching(size, replicas, global_batch_size=forward.global_batch_size)
    assert forward == backward
    assert forward.global_batch_size == size * count * replicas


@given(SIZES, st.integers(1, 16), st.integers(1, 5000))
def test_the_nearest_global_batch_is_taken_and_both_numbers_are_named(size, replicas, wanted):
    warnings = []
    got = batching.make_batching(size, replicas, global_batch_size=wanted, warn=warnings.append)
    step = size * replicas
    best = min(abs(n * step - wanted) for n in range(1, wanted // step + 2))
    assert abs(got.global_batch_size - wanted) == best
    if wanted % step:
        assert f"{wanted:,}" in warnings[0] and f"{got.global_batch_size:,}" in warnings[0]
    else:
        assert not warnings


@given(st.integers(2, 16), st.sampled_from(["Grouped", "Interleaved", "Sequential"]), st.integers(1, 200))
def test_pipelines_take_only_multiples_of_their_overlap(stages, schedule, count):
    base = {"Grouped": 2 * stages, "Interleaved": stages, "Sequential": 1}[schedule]
    make = lambda c: batching.make_batching(  # noqa: E731
        1, 1, gradient_accumulation_count=c, schedule=schedule, num_stages=stages
    )
    if count % base == 0:
        assert make(count).gradient_accumulation_count == count
        return
    with pytest.raises(ConfigurationError) as error:
        make(count)
    legal = [int(word) for word in error.value.hint.split() if word.isdigit()]
    assert legal and all(make(n).gradient_accumulation_count == n for n in legal)
    assert min(abs(n - count) for n in legal) == min(
        abs(n - count) for n in range(base, count + 2 * base, base)
    )


def test_a_pipeline_without_counts_takes_the_smallest_legal_one():
    assert batching.make_batching(1, 1, schedule="Grouped", num_stages=4).gradient_accumulation_count == 8


def test_both_counts_are_refused():
    with pytest.raises(ConfigurationError, match="both given"):
        batching.make_batching(2, 2, gradient_accumulation_count=4, global_batch_size=16)


@given(st.integers(1, 10**6), SIZES, SIZES, st.integers(1, 8))
def test_an_epoch_uses_whole_weight_updates(samples, size, count, replicas):
    batch = batching.Batching(size, count, replicas)
    if samples < batch.global_batch_size:
        with pytest.raises(ConfigurationError, match="larger than the training set"):
            batching.make_epoch(samples, batch)
        return
    epoch = batching.make_epoch(samples, batch)
    assert epoch.samples + epoch.samples_discarded == samples
    assert 0 <= epoch.samples_discarded < batch.global_batch_size
    assert epoch.samples == epoch.weight_updates * batch.global_batch_size


@given(st.integers(1, 200), SIZES, st.integers(1, 20), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_what_the_hint_says_to_a_global_batch_that_is_too_large_is_enough(
    samples, size, times, replicas, base, is_global
):
    batch = batching.Batching(size, times * base, replicas)
    if samples >= batch.global_batch_size:
        return
    with pytest.raises(ConfigurationError, match="larger than the training set") as error:
        batching.make_epoch(samples, batch, base=base, is_global=is_global)
    if samples < base:
        assert "larger data set" in error.value.hint
        return
    typed = {name: int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", error.value.hint)}
    new_size, new_replicas = typed.get("micro-batch-size", size), typed.get("num-replicas", replicas)
    # Both of them cannot be given.
    assert ("gradient-accumulation-count" in typed) <= (not is_global) and (
        "global-batch-size" in typed
    ) == is_global
    if is_global:
        new_count, rest = divmod(typed["global-batch-size"], new_size * new_replicas)
        assert rest == 0
    else:
        new_count = typed.get("gradient-accumulation-count", times * base)
    mended = batching.Batching(new_size, new_count, new_replicas)
    assert new_count % base == 0
    assert batching.make_epoch(samples, mended, base=base).weight_updates >= 1


@given(st.integers(1, 400), st.integers(1, 12), st.fractions(min_value=0, max_value=50, max_denominator=12))
def test_executions_are_equal_and_the_frequency_is_the_closest(updates, epochs, logs):
    total = updates * epochs
    try:
        per_execution = batching.weight_updates_per_log(updates, epochs, logs)
    except ConfigurationError:
        assert 0 < logs < 1 and (logs * epochs).denominator != 1
        return
    assert total % per_execution == 0
    if logs >= 1:
        assert updates % per_execution == 0
        reached = updates // per_execution
        assert all(abs(reached - logs) <= abs(d - logs) for d in range(1, updates + 1) if updates % d == 0)
    elif logs:
        reached = total // per_execution
        assert all(abs(reached - logs * epochs) <= abs(d - logs * epochs) for d in batching.divisors(total))


@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 4), st.integers(1, 800))
def test_steps_per_execution_are_whole_weight_updates_or_refused_with_legal_ones(
    count, updates, epochs, steps
):
    batch = batching.Batching(1, count, 1)
    make = lambda s: batching.updates_from_steps_per_execution(s, batch, updates, epochs)  # noqa: E731
    try:
        per_execution = make(steps)
    except ConfigurationError as error:
        legal = [int(word) for word in error.hint.replace(",", " ").split() if word.isdigit()]
        assert legal
        if steps % count == 0:  # the other refusal only promises whole weight updates
            assert all(make(s) for s in legal)
        return
    assert per_execution * count == steps
    assert updates * epochs % per_execution == 0


@given(st.integers(0, 60), st.integers(1, 12))
def test_nearest_multiples(value, base):
    multiples = [number for number in range(1, value + base + 1) if number % base == 0]
    below, above = [m for m in multiples if m <= value], [m for m in multiples if m >= value]
    assert batching.nearest_multiples(value, base) == sorted({*below[-1:], *above[:1]})


@given(st.integers(1, 300), st.integers(1, 9), st.one_of(st.none(), st.just(-1), st.integers(1, 12)))
def test_an_epoch_counts_each_sample_once(samples, size, updates):
    """Against a walk over the data set; where it ends, another permutation begins."""
    batch = batching.Batching(size, 1, 1)
    assume(size <= samples)
    number = samples // size if updates in (None, -1) else updates
    used = 0
    for _ in range(number):
        used += size
    epoch = batching.make_epoch(samples, batch, updates)
    assert epoch == batching.Epoch(number, used, len(range(used, samples)), 0)


@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from([None, -1]))
def test_a_padded_epoch_takes_every_sample(samples, size, updates):
    filled = [range(first, min(first + size, samples)) for first in range(0, samples, size)]
    epoch = batching.make_epoch(samples, batching.Batching(size, 1, 1), updates, pad=True)
    assert epoch == batching.Epoch(len(filled), sum(map(len, filled)), 0, size - len(filled[-1]))


def test_a_padded_epoch_has_no_other_length():
    with pytest.raises(ConfigurationError, match="both given"):
        batching.make_epoch(10, batching.Batching(2, 1, 1), 3, pad=True)


@pytest.mark.parametrize(
    "schedule, stages, base",
    [("Grouped", 1, 1), ("Sequential", 4, 1), ("Interleaved", 2, 2), ("Grouped", 2, 4)],
)
def test_the_rule_of_a_pipeline_is_named_where_it_changes_the_global_batch(schedule, stages, base):
    warnings = []
    batching.make_batching(
        2, 1, global_batch_size=4 * base + 1, schedule=schedule, num_stages=stages, warn=warnings.append
    )
    assert len(warnings) == 1
    assert (f"{stages} stages needs a multiple of {base}" in warnings[0]) == (base > 1)


@pytest.mark.parametrize(
    "ipus, per_replica, legal", [(0, 1, "1"), (-3, 1, "1"), (0, 4, "4"), (1, 4, "4"), (6, 4, "4 or 8")]
)
def test_ipus_that_are_no_whole_replicas_are_refused_with_what_is(ipus, per_replica, legal):
    with pytest.raises(ConfigurationError) as error:
        batching.replicas_for_ipus(ipus, per_replica)
    assert error.value.hint == f"use --ipus {legal}"


def test_what_is_counted_cannot_be_changed():
    batch = batching.Batching(2, 3, 4)
    epoch = batching.make_epoch(48, batch)
    for counted, name in ((batch, "num_replicas"), (epoch, "samples")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(counted, name, 1)


@given(st.integers(1, 10**5))
def test_divisors(number):
    assume(number < 5000)
    assert batching.divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


# --- pipelines, IPUs and replicas in the Program ------------------------------------------------------------


def test_ipus_are_replicas_times_ipus_per_replica():
    program = make_program(configure(pipeline_splits=("a", "b", "c"), num_replicas=2), 1000, seed=0)
    assert (program.num_stages, program.ipus_per_replica, program.num_ipus) == (4, 4, 8)
    assert program.gradient_accumulation_count == 8  # Grouped: 2 x stages


def test_three_stages_occupy_four_ipus():
    program = make_program(configure(pipeline_splits=("a", "b")), 1000, seed=0)
    assert program.ipus_per_replica == 4
    assert any("powers of two" in w for w in program.warnings)


def test_stages_may_share_an_ipu():
    program = make_program(
        configure(pipeline_splits=("a", "b", "c"), device_mapping=(0, 1, 1, 0)), 100, seed=0
    )
    assert (program.num_stages, program.ipus_per_replica) == (4, 2)


@given(st.integers(1, 64), st.sampled_from([1, 2, 4]))
def test_ipus_are_filled_with_replicas(ipus, stages):
    splits = tuple(f"layer{i}" for i in range(stages - 1))
    config = configure(pipeline_splits=splits, ipus=ipus)
    if ipus % stages:
        with pytest.raises(ConfigurationError, match="not a multiple"):
            make_layout(config)
    else:
        assert make_layout(config).batching.num_replicas == ipus // stages


@pytest.mark.parametrize(
    "values, message",
    [
        ({"gradient_accumulation_count": 2, "global_batch_size": 8}, "both given"),
        ({"ipus": 4, "num_replicas": 3}, "makes 4 replica"),
        ({"pipeline_splits": ("a",), "gradient_accumulation_count": 3}, "multiple of 4"),
        ({"pipeline_splits": ("a",), "ipus_per_replica": 4}, "2 stages"),
        ({"pipeline_splits": ("a",), "device_mapping": (0, 1, 2)}, "there are 2 with"),
        ({"pipeline_splits": ("a", "b"), "device_mapping": (0, 2, 0)}, "leaves IPUs out"),
        ({"recomputation": True}, "needs a pipeline"),
        ({"dbn_replica_group_size": 2}, "does not divide"),
        ({"dbn_replica_group_size": 3, "num_replicas": 4}, "does not divide"),
        ({"dbn_replica_group_size": 2, "num_replicas": 2, "pipeline_splits": ("a",)}, "one IPU"),
        ({"available_memory_proportion": (10.0, 20.0, 30.0), "pipeline_splits": ("a",)}, "3 values"),
        # Without a pipeline there are no options of single stages: two values would have no effect.
        ({"available_memory_proportion": (10.0, 20.0)}, "2 values for 1 stage"),
    ],
)
def test_illegal_combinations_are_refused_before_data(values, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        make_layout(configure(**values))
    assert error.value.hint


@pytest.mark.parametrize("values, message", [
    ({"steps_per_execution": 5, "gradient_accumulation_count": 2}, "not a multiple"),
    ({"global_batch_size": 2048}, "larger than the training set"),
    ({"weight_updates_per_epoch": 0}, "at least 1"),
])  # fmt: skip
def test_illegal_combinations_with_the_data_are_refused(values, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        make_program(configure(**values), 1000, seed=0)
    assert error.value.hint


def test_checkpoints_and_validations_fall_on_executions():
    program = cifar_program(6, 11.0, ckpts_per_epoch=2.0, first_ckpt_epoch=3, validation_freq=2)
    assert program.executions_per_checkpoint == 6  # 5.5 executions are not possible
    assert any("checkpoints per epoch" in w for w in program.warnings)
    assert program.first_checkpoint_execution == 33
    assert program.executions_per_validation == 22
    assert cifar_program(6, 1.0, checkpoints=False).executions_per_checkpoint == 0


@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.fractions(min_value=0, max_value=12, max_denominator=6),
    st.fractions(min_value=0, max_value=12, max_denominator=6),
)
def test_executions_end_where_a_naive_loop_has_to_stop(updates, epochs, logs, checkpoints):
    """The longest equal executions that end at every log and at every checkpoint that is more frequent than logs."""
    assume(logs == 0 or logs >= 1 or (logs * epochs).denominator == 1)
    config = configure(
        num_epochs=epochs,
        logs_per_epoch=logs,
        ckpts_per_epoch=checkpoints,
        micro_batch_size=2,
        gradient_accumulation_count=1,
    )
    program = make_program(config, 2 * updates, seed=0)
    total = updates * epochs

    def stops(frequency):
        """Weight updates after which something is due, counted one by one."""
        whole, wanted = (updates, frequency) if frequency >= 1 else (total, frequency * epochs)
        possible = [n for n in range(1, whole + 1) if whole % n == 0]
        number = min(possible, key=lambda n: (abs(n - wanted), n))
        return [done for done in range(1, total + 1) if done % (whole // number) == 0]

    logged = stops(logs) if logs else [total]
    saved = stops(checkpoints) if checkpoints else []
    more_frequent = len(saved) > len(logged)
    wanted = sorted(set(logged) | (set(saved) if more_frequent else set()))
    length = next(n for n in range(total, 0, -1) if total % n == 0 and all(done % n == 0 for done in wanted))
    assert program.weight_updates_per_execution == length
    assert program.num_executions * length == total
    ends = range(1, program.num_executions + 1)
    assert [n * length for n in ends if n % program.executions_per_log == 0] == logged
    if more_frequent:
        assert [n * length for n in ends if is_checkpoint_due(program, n)] == sorted({*saved, total})


@pytest.mark.parametrize(
    "logs, checkpoints, length", [(0.5, 1, 781), (1, 11, 71), (11, 71, 1), (0, 0.5, 1562)]
)
def test_frequent_checkpoints_shorten_executions_on_cifar10(logs, checkpoints, length):
    program = cifar_program(6, float(logs), ckpts_per_epoch=float(checkpoints))
    assert program.weight_updates_per_execution == length
    assert program.executions_per_log * length == {0.5: 1562, 1: 781, 11: 71, 0: 6 * 781}[logs]
    assert program.warnings == ()


def test_executions_of_a_given_length_stay():
    program = cifar_program(6, 1.0, ckpts_per_epoch=11.0, steps_per_execution=781 * 8)
    assert (program.weight_updates_per_execution, program.executions_per_log) == (781, 1)


def test_the_program_survives_json():
    import json

    program = cifar_program(2, 1.0, pipeline_splits=("a",), num_replicas=2)
    assert Program.from_dict(json.loads(program.to_json())) == program


# --- validation


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
def test_the_program_names_the_validation_replicas_that_the_session_takes(values, instances, replicas):
    config = configure(micro_batch_size=2, gradient_accumulation_count=4, num_replicas=2, **values)
    program = make_program(config, 64, seed=0, num_instances=instances)
    assert program.validation_num_replicas == replicas
    if "validation_num_replicas" not in values:
        assert evaluation_replicas(program, config, instances) == replicas


# --- the Program's own arithmetic


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 6), st.integers(0, 60))
def test_samples_before_are_counted_one_update_after_the_other(samples, size, epochs, wanted):
    program = make_program(
        configure(micro_batch_size=size, gradient_accumulation_count=1, num_epochs=epochs, pad_dataset=True),
        samples,
        seed=0,
    )
    left, seen = samples, 0
    for _ in range(wanted):
        taken = min(size, left)
        left, seen = left - taken, seen + taken
        if not left:
            left = samples  # the next epoch
    assert program.samples_before(wanted) == seen


@given(st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 30))
def test_micro_batches_computed_as_one_are_whole_groups_of_a_weight_update(count, group, fused):
    config = configure(gradient_accumulation_count=count, num_replicas=4, dbn_replica_group_size=group)
    program = make_program(config, 1000, seed=0)
    number = count * 4
    assert program.num_micro_batches == number
    legal = [n for n in range(1, number + 1) if number % n == 0 and n % group == 0]
    if fused in legal:
        assert program.with_checked_fused(fused) == dataclasses.replace(program, fused_micro_batches=fused)
        return
    with pytest.raises(ConfigurationError, match="into whole groups") as error:
        program.with_checked_fused(fused)
    named = [int(word) for word in error.value.hint.split() if word.isdigit()]
    assert set(named) <= set(legal) and len(named) == min(2, len(legal))
    assert min(abs(n - fused) for n in named) == min(abs(n - fused) for n in legal)


@given(st.integers(1, 5), st.lists(st.integers(1, 100), max_size=10))
def test_proportions_of_stages(stages, values):
    if len(values) < 2:
        assert stage_proportions(values, stages) == ()
    elif stages > 1 and len(values) in (stages, 2 * stages):
        each = len(values) // stages
        naive = []
        for stage in range(stages):
            own = values[stage * each : (stage + 1) * each]
            naive.append((own[0] / 100, own[-1] / 100))
        assert stage_proportions(values, stages) == tuple(naive)
    else:
        with pytest.raises(ConfigurationError, match=f"{len(values)} values for {stages} stage") as error:
            stage_proportions(values, stages)
        one = f"give 1, {stages} (per stage) or {2 * stages} (convolutions and matrix products of each stage)"
        assert error.value.hint == ("give one value" if stages == 1 else one)


@pytest.mark.parametrize(
    "values, ipus, hint",
    [
        ({"device_mapping": (0, 1, 1, 0)}, 2, "use --ipus-per-replica 2, or drop it"),
        (
            {"device_mapping": (0, 1, 2, 3), "pipeline_splits": ("a", "b", "c")},
            4,
            "use --ipus-per-replica 4, or",
        ),
        ({"pipeline_splits": ("a",)}, 2, "use --ipus-per-replica 2, or drop --pipeline-splits"),
        ({"pipeline_splits": ("a", "b", "c")}, 4, "use --ipus-per-replica 4, or drop --pipeline-splits"),
    ],
)
def test_ipus_per_replica_suit_the_stages(values, ipus, hint):
    assert make_layout(configure(**values)).ipus_per_replica == ipus
    assert make_layout(configure(ipus_per_replica=ipus, **values)).ipus_per_replica == ipus
    for other in range(1, 9):
        if other != ipus:
            with pytest.raises(
                ConfigurationError, match=f"--ipus-per-replica {other} does not suit"
            ) as error:
                make_layout(configure(ipus_per_replica=other, **values))
            assert error.value.hint.startswith(hint)


def test_a_mapping_of_another_number_of_stages_names_the_right_one():
    for splits, mapping in ((("a", "b"), (0, 1)), (("a",), (0, 1, 1, 0))):
        with pytest.raises(ConfigurationError, match=f"names {len(mapping)} stages") as error:
            make_layout(configure(pipeline_splits=splits, device_mapping=mapping))
        assert error.value.hint == f"give {len(splits) + 1} numbers in --device-mapping"


@pytest.mark.parametrize("stages, ipus", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_unused_ipus_of_a_replica_are_told(stages, ipus):
    layout = make_layout(configure(pipeline_splits=tuple("abcd"[: stages - 1])))
    assert layout.ipus_per_replica == ipus
    told = f"a replica of {stages} IPUs occupies {ipus}: IPUs come in powers of two"
    assert layout.warnings == (() if stages == ipus else (told,))


@pytest.mark.parametrize(
    "logs, validation_freq", [(1, 0), (1, 1), (1, 2), (1, 3), (4, 1), (4, 0.5), (4, 0.25), (4, 0.1)]
)
def test_validations_fall_on_executions(logs, validation_freq):
    values = dict(micro_batch_size=1, gradient_accumulation_count=1, num_epochs=6, logs_per_epoch=logs)
    program = make_program(configure(validation_freq=validation_freq, **values), 8, seed=0)
    # So many executions are nearest to what was asked for, and one at least.
    wanted = logs * validation_freq
    nearest = min(range(1, 100), key=lambda n: abs(n - wanted)) if wanted else 0
    assert program.executions_per_validation == nearest
    off = make_program(configure(validation=False, validation_freq=validation_freq, **values), 8, seed=0)
    assert off.executions_per_validation == 0


def test_a_program_of_before_an_option_does_nothing_of_it():
    program = cifar_program(2, 1.0)
    required = {f.name for f in dataclasses.fields(Program) if f.default is dataclasses.MISSING}
    later = {name: value for name, value in program.to_dict().items() if name not in required}
    assert not any(
        later[name] for name in ("clip_gradient_norm", "ema_decay", "mixup", "cutmix", "random_erasing")
    )
    old = Program.from_dict({name: value for name, value in program.to_dict().items() if name in required})
    assert old == program


def test_a_program_cannot_be_changed():
    program = cifar_program(1, 1.0)
    for made, name in ((program, "seed"), (program.layout, "num_stages")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, 3)


@pytest.mark.parametrize("whole, instances", [(True, 1), (False, 1), (True, 2), (False, 2), (False, 4)])
def test_validation_has_the_ipus_of_training(whole, instances):
    """Each IPU of a process is counted, and with a pipeline each group of them."""
    replicas, ipus = 8, 2
    config = configure(pipeline_validation_model=not whole)
    own = [ipu for ipu in range(replicas * ipus) if ipu % instances == 0]
    groups = [own[first : first + ipus] for first in range(0, len(own), ipus)]
    assert validation_replicas(config, replicas, ipus, instances) == (len(own) if whole else len(groups))
    if instances == 1:
        assert validation_replicas(config, replicas, ipus) == validation_replicas(config, replicas, ipus, 1)
