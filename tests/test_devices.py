"""Several devices of one process share the micro-batches of a weight update; parts of the CPU replace GPUs.

TensorFlow makes its devices once in a process, so tests that need several devices run in a process of their own.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import check_raises
from support.sessions import CPU, data, make_model, make_program
from support.workers import Given

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.machine import operations_at_once
from ipucnn.runs.rules import check_workers
from ipucnn.sessions import factory
from ipucnn.sessions.group import Alone
from ipucnn.sessions.host import environment
from ipucnn.sessions.host.division import Capacity, Division, check_sharing, choose_devices
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import DeviceInfo
from ipucnn.training.losses import Loss

ROOT = Path(__file__).resolve().parents[1]

# Trains a small network with several numbers of devices and prints digests of all results.
SCRIPT = """
import hashlib, json, sys
from dataclasses import replace

from ipucnn.config.options import RunConfig
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.session import train

given = json.loads(sys.argv[1])
config = RunConfig(**given["config"])
# The first session makes the devices.
sessions = {}
for devices in sorted(given["devices"], reverse=True):
    sessions[devices] = create_session("cpu", config=replace(config, devices=devices), trains=True)

import tensorflow as tf
from support.sessions import batches, constant, data, evaluated_now, make_model, make_program, make_trainer
from support.sessions import values as arrays

program = make_program(2, 4, 2, updates_per_epoch=3, **given["program"], fused_micro_batches=given["fused"])
images, labels = data(6 * program.global_batch_size, 1)
dataset = batches(program, images, labels)
for devices, session in sorted(sessions.items()):
    model, optimizer = make_model("batch"), ("adam", {}, {})
    trainer = make_trainer(session, model, program, optimizer, constant(0.05), make_dataset=dataset)
    events = [repr(replace(e, wall_s=0, images_per_s=0)) for e in train(trainer, dataset) if hasattr(e, "wall_s")]
    values = {**arrays(trainer.state.weights), **evaluated_now(trainer, dataset).values, **arrays(trainer.state.slots)}
    predictor = trainer.predictor
    validating, run = set(), predictor._forward

    def spy(images):
        logits = run(images)
        validating.add(logits.device[-1])
        return logits

    predictor._forward = spy
    counted = tf.data.Dataset.from_tensor_slices((images[:27], labels[:27], tf.ones(27))).batch(4)
    metrics = predictor.evaluate(counted, trainer.loss)
    assert metrics["samples"] == 27, metrics
    events.append(repr(sorted(metrics.items())))
    digest = hashlib.sha256("".join(events).encode())
    for name in sorted(values):
        digest.update(values[name].tobytes())
    library = trainer._loop._concrete.graph.as_graph_def().library
    used = {node.device[-1:] for f in library.function for node in f.node_def if "Conv2D" in node.op}
    used_devices = len(trainer.division.devices), sorted(used), sorted(validating)
    print(json.dumps([devices, *used_devices, len(events), digest.hexdigest()]))
"""


def trained(devices, config=None, program=None, fused=1):
    """Trains with each number of devices in a process.

    Returns:
        For each number: the number, the devices that took part, those that trained, those that validated, the number of
        events, and a digest.
    """
    settings = {"devices": devices, "config": config or {}, "program": program or {}, "fused": fused}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(settings)],
        env=env,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def assert_all_the_same(numbers, *given):
    rows = trained(numbers, *given)
    assert len(rows) == len(numbers)
    for (devices, places, used, validating, *_), expected in zip(rows, numbers):
        assert devices == places == expected and used == validating == [str(n) for n in range(expected)]
    assert rows[0][4] > 0 and len({tuple(row[4:]) for row in rows}) == 1


@pytest.mark.slow
def test_two_devices_give_the_bytes_of_one():
    assert_all_the_same((1, 2))


@pytest.mark.slow
def test_four_devices_give_the_bytes_of_one():
    assert_all_the_same((1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "program", "fused"),
    [
        ({}, {"gradient_accumulation_reduction_method": "running_mean"}, 2),
        # Batch norm statistics are measured after training.
        ({"precision": "16.16", "stochastic_rounding": "ON"}, {"precision": "16.16"}, 1),
        ({}, {"num_stages": 2, "pipeline_splits": ("conv1",), "recomputation": True}, 1),
    ],
)
def test_two_devices_give_the_bytes_of_one_in_every_precision(config, program, fused):
    assert_all_the_same((1, 2), config, program, fused)


# -- numbers of devices ------------------------------------------------------------------------------------------------


def shared(micro_batches, accumulation=None, group=1):
    """Returns a Program whose weight updates have ``micro_batches`` micro-batches."""
    accumulation = accumulation or micro_batches
    replicas = micro_batches // accumulation
    return make_program(2, accumulation, replicas, dbn_replica_group_size=group)


def chosen(available, devices=None, micro_batches=8, fused=None, group=1, workers=1, **options):
    """Returns the number of each worker's devices, of those available, that share a weight update."""
    program, config = shared(micro_batches, group=group), RunConfig(devices=devices, **options)
    number = choose_devices(program, config, workers, Capacity(devices=available), fused)
    check_sharing(program, config, workers, number, fused)
    return number


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (4, dict(available=4)),
        (2, dict(available=3)),
        (1, dict(available=4, micro_batches=1)),
        (3, dict(available=4, micro_batches=9)),
        (2, dict(available=4, group=4)),
        (2, dict(available=8, fused=4)),
        (2, dict(available=4, max_workers=2)),
        # --max-workers no longer matters if a checkpoint fixes the groups of fused micro-batches.
        (4, dict(available=4, max_workers=2, fused=1)),
        (1, dict(available=1, devices=1)),
        (2, dict(available=3, workers=2)),
        (4, dict(available=4, workers=2)),
        (1, dict(available=4, workers=8)),
    ],
)
def test_gpus_that_share_a_weight_update_evenly_are_used(expected, given):
    assert chosen(**given) == expected


@pytest.mark.parametrize(
    ("program", "options", "sharing", "message"),
    [
        (shared(8), {}, (1, 3), "8 micro-batches, which 3 devices cannot share evenly"),
        (
            shared(8),
            {"max_workers": 2},
            (1, 4),
            "--max-workers 2 with 4 devices: it has to be a multiple of 4",
        ),
        (shared(4), {}, (2, 3, 1), "2 workers with 3 devices each cannot share the 4 groups"),
        (shared(4), {"max_workers": 3}, (1, 1, 1), "3 workers cannot share the 4 groups"),
        (shared(12), {}, (4, 1, 2), "4 workers cannot share the 6 groups of fused micro-batches"),
        (shared(4), {}, (2, 4), "4 micro-batches, which 2 workers with 4 devices each cannot"),
        (shared(1), {}, (2, 1), "1 micro-batch, which 2 workers cannot"),
        (make_program(1, 2**31 - 1), {}, (2, 1), "2,147,483,647 micro-batches"),
    ],
)
def test_numbers_that_cannot_share_a_weight_update_are_refused(program, options, sharing, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        check_sharing(program, RunConfig(**options), *sharing)
    micro_batches, hint = program.num_micro_batches, refused.value.hint
    if micro_batches == 1:
        assert hint == (
            "add --gradient-accumulation-count 2, and divide --micro-batch-size by 2 to keep the global batch"
        )
    elif micro_batches == 12:
        assert hint == "use 1, 2, 3, 6 of them, or begin a new run with --max-workers 4"
    elif micro_batches > 12:  # found without trying all divisors
        assert hint == "share the weight update among 1, 2147483647 of them"


def test_a_run_refuses_devices_that_cannot_share_before_it_begins():
    error = "6 micro-batches, which 4 devices cannot share evenly"
    check_raises(ConfigurationError, error, "", check_workers, Alone(), RunConfig(devices=4), shared(6))
    check_workers(Alone(), RunConfig(devices=3), shared(6))


@pytest.mark.parametrize(
    ("micro_batches", "most", "sharing", "legal"),
    [(12, 4, (3, 1), "1, 2, 4"), (16, 4, (3, 2), "1, 2"), (8, 2, (1, 4), "1, 2")],
)
def test_the_hint_keeps_max_workers_and_names_numbers_that_divide_it(micro_batches, most, sharing, legal):
    """A later fold, or a run that starts over, keeps --max-workers."""
    hint = f"use {legal} of them; a new run can have another --max-workers"
    arguments = (shared(micro_batches), RunConfig(max_workers=most), *sharing)
    check_raises(ConfigurationError, "it has to be a multiple of", hint, check_sharing, *arguments)


def test_several_devices_split_the_cpu_only_on_request(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda *kind: [])
    error, hint = "--devices 4: TensorFlow sees no GPU here", "--device cpu --devices 4"
    config = RunConfig(devices=4)
    check_raises(MissingError, error, hint, factory.create_session, "auto", config=config, trains=True)


@pytest.mark.parametrize("num_groups", range(1, 13))
@pytest.mark.parametrize("sharing", range(2, 9))
def test_suggested_numbers_of_workers_are_accepted(num_groups, sharing):
    """The hint names the smallest shareable multiple of the accumulation count, and numbers that are legal."""
    for accumulation in (n for n in range(1, num_groups + 1) if num_groups % n == 0):
        per_step = num_groups // accumulation
        try:
            check_sharing(shared(num_groups, accumulation), RunConfig(), sharing)
            assert num_groups % sharing == 0
            check_sharing(shared(num_groups, accumulation), RunConfig(), sharing, fused=1)
            continue
        except ConfigurationError as refused:
            hint = refused.hint
        match = re.match(
            r"add --gradient-accumulation-count (\d+)(, and divide --micro-batch-size by (\d+) )?", hint
        )
        count = int(match.group(1))
        times = count // accumulation
        check_sharing(shared(count * per_step, count), RunConfig(), sharing)
        assert count == accumulation * times
        # Programs of `shared` have micro-batches of two samples.
        assert match.group(3) == (None if times > 2 else str(times))
        assert all((num_groups * smaller) % sharing for smaller in range(1, times))
        for workers in map(int, re.findall(r"\d+", hint.partition("share the weight update among")[2])):
            check_sharing(shared(num_groups, accumulation), RunConfig(), workers)


@given(
    st.integers(1, 48), st.integers(1, 8), st.integers(1, 3), st.integers(1, 8), st.sampled_from([None, 1, 2])
)
def test_suggestions_are_accepted_with_several_devices_and_max_workers(groups, workers, devices, most, fused):
    config, program = RunConfig(max_workers=most), shared(groups * (fused or 1))
    try:
        check_sharing(program, config, workers, devices, fused)
        return
    except ConfigurationError as refused:
        hint = refused.hint
    among = re.search(r"(?:use|among) ([\d,. ]+) of them", hint)
    for number in map(int, re.findall(r"\d+", among.group(1)) if among else ()):
        check_sharing(program, config, *((number, devices) if workers > 1 else (1, number)), fused)
    other = re.search(r"use --max-workers ([\d,. ]+)", hint)
    for number in map(int, re.findall(r"\d+", other.group(1)) if other else ()):
        check_sharing(program, RunConfig(max_workers=number), workers, devices, fused)
    count = re.search(r"accumulation-count (\d+)", hint)
    if count:
        check_sharing(shared(int(count.group(1))), config, workers, devices)
    assert among or other or count or "another --max-workers" in hint or "a new run" in hint


def test_workers_use_their_common_capacity():
    """Workers use the smallest number of devices and of bytes, so that all divide a weight update equally."""
    least = min(operations_at_once(), 3)
    for kind, others, expected in (
        ("gpu", "gpu", Capacity(1, 1, 0, 0)),
        ("cpu", "cpu", Capacity(1, least, 2**20, 0, on_cpu=True)),
        ("gpu", "cpu", None),
    ):
        other = [others, 1, 3, 2**20]
        group = Given(2, 0, lambda place, value, other=other: [value, other])
        session = HostSession(DeviceInfo(kind, "x", 1, 2**30), group=group, places=["/GPU:0", "/GPU:1"])
        if expected is None:
            with pytest.raises(ConfigurationError, match="rank 1 computes on a cpu, and rank 0 on a gpu"):
                session.capacity(SimpleNamespace(layers=[]))
            continue
        assert session.capacity(SimpleNamespace(layers=[])) == expected


def test_notes_describe_the_devices():
    division, both = Division(shared(8), 2, num_present=2), ("/GPU:0", "/GPU:1")
    two, groups = replace(division, devices=both).notes(RunConfig(), is_new=True)
    assert two == "2 devices: a weight update is 4 groups of 2 fused micro-batches, 2 for each device"
    assert (
        groups.startswith("the groups of fused micro-batches are those of --max-workers 2")
        and "or devices" in groups
    )
    (idle,) = replace(division, num_present=3).notes(RunConfig(), is_new=True)
    assert idle.startswith("1 of 3 devices takes part: more cannot share the 8 micro-batches")
    first = replace(division, devices=both, num_workers=2).notes(RunConfig(), is_new=False)[0]
    assert first.startswith("2 workers with 2 devices each, ") and first.endswith("1 for each device")


def test_more_devices_than_the_process_has_are_refused():
    """The process has one device, and TensorFlow makes devices once."""
    assert len(tf.config.list_logical_devices("CPU")) == 1
    error = "--devices 2: TensorFlow works with 1 device in this process"
    config = RunConfig(devices=2)
    check_raises(ConfigurationError, error, "", factory.create_session, "cpu", config=config, trains=True)
    assert factory.create_session("cpu", config=config).places == ("/device:CPU:0",)


# -- deterministic operations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_deterministic", "value"), [(True, "1"), (False, "0")])
def test_users_choose_deterministic_operations(monkeypatch, is_deterministic, value):
    calls = []
    monkeypatch.setattr("ipucnn.compat.enable_determinism", lambda: calls.append(True))
    factory.create_session("cpu", config=RunConfig(deterministic_operations=is_deterministic))
    assert calls == [True] * is_deterministic
    # TensorFlow 2.6 has no such function; it reads the variable when it is imported.
    monkeypatch.delenv("TF_DETERMINISTIC_OPS", raising=False)
    environment.set_variables(is_deterministic)
    assert os.environ["TF_DETERMINISTIC_OPS"] == value


def test_an_operation_without_deterministic_form_has_a_hint():
    def evaluate(text):
        def forward(images):
            raise tf.errors.UnimplementedError(None, None, text)

        predictor = HostSession(CPU).predictor(make_model("none"))
        predictor._forward = forward
        predictor.evaluate([(*data(4, 0), tf.ones(4))], Loss("cross_entropy"))

    text = "A deterministic GPU implementation of DepthwiseConvBackpropFilter is not available."
    error, hint = "with deterministic operations: A deterministic GPU", "--no-deterministic-operations"
    check_raises(ConfigurationError, error, hint, evaluate, text)
    with pytest.raises(tf.errors.UnimplementedError):
        evaluate("something else")
