"""Several workers of the host session: configuration, communication, and training that equals one worker's."""

import dataclasses
import filecmp
import importlib.util
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tensorflow as tf
from support.refusals import Refusal, check_refused
from support.sessions import make_program
from support.workers import (
    FLAGS,
    addresses,
    assert_same,
    environment,
    launch,
    left_out,
    tf_config,
    with_values,
)

from ipucnn import cli, machine
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError, DataError, WorkersError
from ipucnn.interrupts import Interrupted
from ipucnn.machine import num_cores
from ipucnn.runs import folder as folder_module
from ipucnn.runs import provenance
from ipucnn.runs import train as runs_train
from ipucnn.runs.folder import RunFolder, SilentFolder
from ipucnn.runs.mlperf import MlperfLog
from ipucnn.runs.recorder import Recorder
from ipucnn.runs.train import TrainingRun
from ipucnn.sessions.host import cluster, division
from ipucnn.sessions.host.cluster import join
from ipucnn.sessions.host.division import notes_of_sharing, threads_of_training
from ipucnn.sessions.host.workers import (
    Workers,
    expand_nodes,
    find_workers,
)
from ipucnn.training.checkpoints import Checkpoint, load_checkpoint


def slurm(**values):
    usual = dict(
        SLURM_STEP_NUM_TASKS=4,
        SLURM_PROCID=2,
        SLURM_STEP_NODELIST="127.0.0.[1-2]",
        SLURM_STEP_TASKS_PER_NODE="2(x2)",
        SLURM_JOB_ID=17,
        SLURM_STEP_ID=0,
    )
    return {name: str(value) for name, value in {**usual, **values}.items()}


# -- identity of a worker ---------------------------------------------------------------------------------------------


def test_ports_follow_from_the_numbers_of_the_job_and_its_step():
    """Numbers of jobs exceed those of ports, and srun says how it distributes tasks."""
    workers = find_workers(slurm(SLURM_JOB_ID=1234567, SLURM_STEP_ID=2, SLURM_DISTRIBUTION="block"))
    assert workers.addresses[:2] == ("127.0.0.1:24767", "127.0.0.1:24768")


def test_one_worker_by_default():
    assert find_workers({}) is None
    assert find_workers(tf_config(["10.0.0.1:5000"])) is None
    assert find_workers({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    # The process of the batch script is not a task of a step.
    assert find_workers({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None


def test_tf_config_and_slurm_name_the_same_workers():
    addresses = ("127.0.0.1:20017", "127.0.0.1:20018", "127.0.0.2:20017", "127.0.0.2:20018")
    by_tf_config = find_workers(tf_config(list(addresses), 2))
    by_slurm = find_workers(slurm())
    for workers in (by_tf_config, by_slurm):
        assert (workers.addresses, workers.index, workers.count) == (addresses, 2, 4)
        assert not workers.is_writer and not workers.under_poprun and workers.num_shares == 1
    chief = find_workers(tf_config(["127.0.0.1:2"], 0, chief=["127.0.0.1:1"]))
    assert (chief.addresses, chief.index) == (("127.0.0.1:1", "127.0.0.1:2"), 1)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be used"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG cannot be used"),
        ({"TF_CONFIG": '{"task": {"index": 1e999}}'}, "TF_CONFIG cannot be used"),
        (tf_config(["10.0.0.1:1", "10.0.0.2:1"], 2), "no task 2"),
        (tf_config(["10.0.0.1:1", "10.0.0.2:1"], 0, "ps"), "no task 0 of the type ps"),
        (tf_config(["10.0.0.1:1", "10.0.0.2:1"], ps=["10.0.0.3:1"]), "tasks of the type ps"),
        (tf_config(["10.0.0.1:1", "10.0.0.1:1"]), "twice"),
        (tf_config(["10.0.0.1", "10.0.0.2:1"]), "no address"),
        (tf_config(["10.0.0.1:1", "8.8.8.8:1"]), "public address"),
        (tf_config(["10.0.0.1:1", "10.0.0.2:99999"]), "no address"),
        ({**tf_config(["10.0.0.1:1", "10.0.0.2:1"]), **slurm()}, "both name"),
        (slurm(SLURM_STEP_NODELIST="a[1-2"), "Slurm's variables"),
        (slurm(SLURM_STEP_TASKS_PER_NODE="2(x3)"), "Slurm's variables"),
        (slurm(SLURM_PROCID="x"), "Slurm's variables"),
        (slurm(SLURM_STEP_NODELIST="a[1-65536][1-65536]"), "is too long"),
        (slurm(SLURM_STEP_NODELIST="a[3-1],b,c"), "3-1 is no range of nodes"),
        (slurm(SLURM_STEP_NODELIST=f"a[{'0' * 99}1-65536]"), "is no range of nodes"),
        (slurm(SLURM_STEP_NODELIST="b" * 254), "is no node list"),
        (slurm(SLURM_STEP_TASKS_PER_NODE="1(x999999)"), "has more than 65,536 nodes"),
        (slurm(SLURM_STEP_NUM_TASKS=999_999_999), "1,024 workers are the most"),
        (tf_config([f"10.0.{n // 250}.{n % 250}:1" for n in range(1025)]), "1,024 are the most"),
        (slurm(SLURM_DISTRIBUTION="cyclic"), "order 'cyclic'"),
    ],
)
def test_invalid_worker_settings_are_refused(environment, named):
    with pytest.raises(ConfigurationError) as refused:
        find_workers(environment)
    assert named in refused.value.message and refused.value.hint


def test_a_trusted_network_allows_public_addresses():
    workers = find_workers(tf_config(["8.8.8.8:1", "10.0.0.1:1"]), trusted_network=True)
    assert workers.count == 2


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", "a"),
        ("a1,b2", "a1 b2"),
        ("a[1-3]", "a1 a2 a3"),
        ("a[01-03,07],b", "a01 a02 a03 a07 b"),
        ("n[1,3]x", "n1x n3x"),
        ("rack[1-2]-n[09-11],z", "rack1-n09 rack1-n10 rack1-n11 rack2-n09 rack2-n10 rack2-n11 z"),
    ],
)
def test_slurm_node_lists_are_expanded(text, names):
    assert expand_nodes(text) == names.split()


# -- rendezvous and exchange ------------------------------------------------------------------------------------------


def met(count, run=lambda rank: {}, act=lambda one: None, **options):
    """Connects ``count`` workers in threads; returns each one's (threads, result of ``act``) or its exception."""
    named, results = addresses(count), [None] * count

    def worker(rank):
        one = None
        try:
            config = RunConfig(**{"start_timeout": 20.0, **options})
            one, threads = join(
                Workers(count, rank, addresses=named, source="test"), config, run(rank), rank + 3
            )
            results[rank] = (threads, act(one))
            one.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_workers_exchange_values_in_order():
    numbers = np.random.default_rng(1).standard_normal(20).tolist()

    def act(one):
        values = [one.exchange("numbers", [one.rank, numbers[k]]) for k in range(20)]
        return (
            values,
            one.from_worker_0("first", one.rank),
            one.any_signal(one.rank == 2),
            one.any_signal(False),
        )

    expected = [[[rank, numbers[k]] for rank in range(3)] for k in range(20)]
    # All workers take the number of threads of worker 0.
    assert met(3, act=act) == [(3, (expected, 0, True, False))] * 3


def test_workers_with_different_options_are_refused():
    for result in met(3, run=lambda rank: {"--seed": 1 + rank // 2}):
        assert isinstance(result, ConfigurationError)
        assert result.message == "worker 2 has --seed 2, and worker 0 has 1"


def test_workers_compare_options_and_checkpoints(monkeypatch):
    compared = {}
    monkeypatch.setattr(
        runs_train, "join", lambda workers, config, run, threads, met: (compared.update(run), threads)
    )
    monkeypatch.setattr(runs_train, "fix_threads", lambda number, required: compared.update(threads=number))
    run = TrainingRun.__new__(TrainingRun)
    checkpoint = Checkpoint({}, {}, {"weight_updates": 3, "threads": 5})
    run.cluster = None
    run.context = SimpleNamespace(
        workers=Workers(2, 0, addresses=("a:1", "b:1"), source="test"),
        config=RunConfig(target_accuracy=0.5),
        record=SimpleNamespace(own=SimpleNamespace(sha256="f")),
        resolved=SimpleNamespace(choice=SimpleNamespace(sha256="g")),
        start=SimpleNamespace(checkpoint=checkpoint),
        data_sha256="x",
    )
    run._join()
    # Options that end a run and the checkpoint must agree: else one worker alone could end, or skip the loop.
    assert {"--num-epochs", "--early-stopping", "--max-workers", "--seed", "data"} <= set(compared)
    assert compared["--target-accuracy"] == 0.5 and compared["threads"] == 5
    assert (compared["the network's file"], compared["the data set's file"]) == ("f", "g")
    assert compared["the checkpoint"] == checkpoint.digest and "--run-dir" not in compared


def test_the_next_fold_keeps_the_threads_of_tensorflow():
    machine.fix_threads(num_cores() + 2, required=False)  # as after a resumed fold
    run = TrainingRun.__new__(TrainingRun)
    start = SimpleNamespace(checkpoint=None)
    run.context, run.cluster = SimpleNamespace(workers=None, config=RunConfig(), start=start), None
    assert run._join() is None and machine.operation_threads() == num_cores() + 2


def test_workers_exchange_arrays_of_any_size(monkeypatch):
    """Arrays are sent in pieces, so that the size of a message is bounded."""
    monkeypatch.setattr(cluster, "_PIECE_BYTES", 3 * 40)
    sent, send = [], cluster._Link.send_bytes
    monkeypatch.setattr(
        cluster._Link, "send_bytes", lambda link, data: (sent.append(len(data)), send(link, data))
    )
    whole = np.random.default_rng(2).standard_normal((3, 7, 5, 2)).astype(np.float32)
    whole[0, 0, 0] = np.nan, np.inf

    def act(one):
        first = one.exchange_arrays("a", whole[one.rank, : 7 - 3 * one.rank] if one.rank < 2 else None)
        return [*first, *one.exchange_arrays("b", whole[one.rank]), *one.exchange_arrays("c", None)]

    for threads, arrays in met(3, act=act):
        expected = [whole[0], whole[1, :4], *whole]
        assert threads == 3 and len(arrays) == 5
        assert all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(arrays, expected))
    assert max(sent) < 1000
    alone = cluster.Cluster()
    assert alone.exchange_arrays("a", None) == [] and alone.exchange_arrays("a", whole)[0] is whole


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_workers_share_the_images_of_a_segmentation(pages):
    """Workers compute the images in turn; a logit that is not finite raises an error on all of them."""
    from ipucnn.runs.images.segmentation import PatchwiseNetwork

    def network(one, computed):
        patchwise = PatchwiseNetwork.__new__(PatchwiseNetwork)
        (
            patchwise.test_time_augmentation,
            patchwise.busy_s,
            patchwise._margin,
            patchwise._outputs,
            patchwise._patch_size,
        ) = 1, 0.0, 4, (8, 16), None
        patchwise._cluster = cluster.Cluster()
        patchwise._trained = SimpleNamespace(join=lambda **asked: one)
        patchwise.prepare = lambda shape: computed.append(("prepared", shape))
        patchwise._logits = lambda image: (
            computed.append(int(image[0, 0, 0])),
            image.astype(np.float32) / 7,
        )[1]
        return patchwise

    images = [np.full((number + 1, 2, 2), number, np.uint8) for number in range(pages)]

    def act(one):
        computed = []
        segmenting = network(one, computed)
        with segmenting.together(split=None):
            segmented = list(segmenting.each(enumerate(images)))
        assert segmenting.is_writer == (one.rank == 0)
        assert [entry for entry in computed if isinstance(entry, tuple)] == [
            ("prepared", image.shape) for image in images
        ]
        for (key, image, logits), number in zip(segmented, range(pages)):
            assert key == number and image is images[number]
            assert logits.tobytes() == (images[number].astype(np.float32) / 7).tobytes()
        return len(segmented), [entry for entry in computed if isinstance(entry, int)]

    expected = [(3, (pages, list(range(pages))[rank::3])) for rank in range(3)]
    assert met(3, act=act) == expected

    def broken(one):
        segmenting = network(one, [])
        segmenting._logits = lambda image: np.where(image == pages - 1, np.inf, 0).astype(np.float32)
        with segmenting.together():
            list(segmenting.each(enumerate(images)))

    for result in met(3, act=broken):
        assert isinstance(result, DataError) and "are not finite" in result.message


@pytest.mark.parametrize(
    ("taken", "family", "everywhere"),
    [
        (None, 0, ""),
        (0, socket.AF_INET, "0.0.0.0"),
        (2, socket.AF_INET, "0.0.0.0"),
        (1, socket.AF_INET6, "::"),
    ],
)
def test_a_taken_port_of_a_tensorflow_server_is_reported(taken, family, everywhere):
    """All workers report the taken port: TensorFlow would wait for minutes and respond to nothing meanwhile."""

    def act(one):
        # After the rendezvous, its connections may still use the port of the first worker.
        with socket.socket(family if one.rank == taken else socket.AF_INET) as other:
            if one.rank == taken:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                other.bind((everywhere, int(one._addresses[taken].rpartition(":")[2])))
                other.listen(1)
            one.require_ports()

    for result in met(3, act=act):
        if taken is None:
            assert result == (3, None)
        else:
            assert isinstance(result, ConfigurationError) and result.hint == "use another port"
            assert f"server of worker {taken} cannot start at 127.0.0.1:" in result.message


def test_workers_with_different_initial_weights_are_refused():
    """Files of the same name may have different contents on different machines."""
    weights = [{"a/kernel": tf.constant([1.0, rank // 2])} for rank in range(3)]
    for result in met(3, act=lambda one: one.require_same_weights(weights[one.rank])):
        assert isinstance(result, ConfigurationError)
        assert "worker 2 begins with other weights than worker 0" in result.message
    assert met(2, act=lambda one: one.require_same_weights(weights[0])) == [(3, None)] * 2


def test_workers_compare_the_facts_that_a_resumed_run_compares(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    named = set(cluster.facts_of_machine()) - {"processor", "python"}
    before = dict.fromkeys(provenance.DECIDES_BYTES, "x")
    changed = provenance.changes(before, {"variables": dict.fromkeys(provenance.VARIABLES, "x")})
    assert named == {line.split()[0] for line in changed} - {"ipucnn", "cpu", "threads"}
    assert provenance.changes({**before, "variables": ["damaged"]}, before) == []


def test_workers_with_different_processors_are_noted_or_refused(monkeypatch):
    counter = itertools.count()
    monkeypatch.setattr(cluster, "facts_of_machine", lambda: {"processor": f"P{min(next(counter), 1)}"})
    (warned, other) = met(2, act=lambda one: one.warnings)
    assert warned == other and re.fullmatch(r"worker 1 has processor P\d, and worker 0 has P\d", warned[1][0])
    counter = itertools.count()
    for result in met(2, require_same_bytes=True):
        assert isinstance(result, ConfigurationError) and "--require-same-bytes: worker 1" in result.message


def test_a_worker_with_another_secret_is_rejected(monkeypatch):
    worker, right = threading.local(), cluster._proof
    without = right("nonce", 1, 2)
    monkeypatch.setenv("IPUCNN_SECRET", "x")
    assert right("nonce", 1, 2) != without

    def proof(nonce, rank, count):
        return right(nonce + getattr(worker, "secret", ""), rank, count)

    monkeypatch.setattr(cluster, "_proof", proof)

    def run(rank):
        worker.secret = "x" if rank else ""
        return {}

    first, second = met(2, run=run, start_timeout=3.0)
    assert isinstance(second, ConfigurationError) and "another secret" in second.message
    assert isinstance(first, WorkersError) and first.exit_code == 7
    assert "worker 1 of 2 did not connect" in first.message
    assert "sent away, as it has another secret" in first.message


LEAVING = """
import os, sys
from ipucnn.config.options import RunConfig
from ipucnn.sessions.host.cluster import join
from ipucnn.sessions.host.workers import Workers
rank, named = int(sys.argv[1]), tuple(sys.argv[2:])
one, _ = join(Workers(3, rank, addresses=named, source="test"), RunConfig(start_timeout=60.0), {}, 1)
one.exchange("x", rank)
if rank == 2:
    os._exit(9)
one.exchange("y", rank)
"""


def test_remaining_workers_report_which_one_left():
    """Worker 0 tells the other workers which one left, and ends as well."""
    named, started = addresses(3), []
    for rank in range(3):
        words = [sys.executable, "-c", LEAVING, str(rank), *named]
        started.append(subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [7, 7, 9], errors
    assert all("error: worker 2 left\n" in text for text in errors[:2])


def test_a_missing_worker_ends_the_start():
    named = addresses(2)
    for rank, expected in ((0, "worker 1 of 2 did not connect"), (1, "worker 0 could not be reached")):
        before = time.monotonic()
        with pytest.raises(WorkersError, match=re.escape(expected)):
            join(Workers(2, rank, addresses=named, source="test"), RunConfig(start_timeout=1.0), {}, 1)
        assert time.monotonic() - before < 30


def starting(seconds=30.0):
    """Starts worker 0 of two in a thread.

    Returns:
        The addresses, the thread, and a list that receives the exchanged values or the exception.
    """
    named, results = addresses(2), []

    def first():
        try:
            one, _ = join(
                Workers(2, 0, addresses=named, source="test"), RunConfig(start_timeout=seconds), {}, 1
            )
            results.append(one.exchange("x", 0))
            one.close()
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    return named, thread, results


def stranger_at(named, thread):
    while thread.is_alive():
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", int(named[0].split(":")[1])), timeout=10)
        time.sleep(0.05)


def frame(data):
    return len(data).to_bytes(4, "big") + data


def test_foreign_connections_do_not_disturb_the_start():
    """Port scanners, other programs, numbers that are not finite and silent connections: the worker still joins."""
    named, thread, results = starting()
    numbers = (b'{"rank": Infinity, "count": 2, "nonce": "", "proof": ""}', b'{"nonce": NaN, "rank": 1e999}')
    for words in (
        b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, frame(b"[]"), frame(b"[" * 1000), *map(frame, numbers), b""
    ):  # fmt: skip
        with stranger_at(named, thread) as stranger:
            stranger.sendall(words)
    one, _ = join(Workers(2, 1, addresses=named, source="test"), RunConfig(start_timeout=30.0), {}, 1)
    assert one.exchange("x", 1) == [0, 1]
    one.close()
    thread.join(30)
    assert results == [[0, 1]]


def test_a_stranger_that_sends_byte_after_byte_does_not_extend_the_start_timeout(monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_S", 0.5)
    named, thread, results = starting(2.0)
    sent = 0
    with stranger_at(named, thread) as stranger:
        stranger.sendall((200).to_bytes(4, "big"))
        while sent < 200 and thread.is_alive():
            sent += 1
            with suppress(OSError):
                stranger.sendall(b" ")
            time.sleep(0.1)
        thread.join(30)
    (error,) = results
    assert isinstance(error, WorkersError) and "did not connect" in error.message and sent < 100


def test_nonsense_answers_do_not_extend_the_start_timeout():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(5)
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def answer():
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.sendall(frame(b"[]"))
                connection.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(WorkersError, match="worker 0 could not be reached"):
        join(
            Workers(2, 1, addresses=(address, "127.0.0.1:1"), source="test"),
            RunConfig(start_timeout=0.5),
            {},
            1,
        )
    listener.close()


def test_the_most_workers_that_there_may_be_decide_the_threads(run, monkeypatch):
    def refuse(program, sharing):
        raise DataError(f"{sharing} workers share {program.num_micro_batches} micro-batches", "a hint")

    monkeypatch.setattr(runs_train, "threads_of_training", refuse)
    monkeypatch.setattr(runs_train, "fixed_threads", lambda: None)
    options = "--dataset digits --device cpu --micro-batch-size 8 --global-batch-size 96 --max-workers 4"
    check_refused(run, Refusal(f"train toy_model {options}", "4 workers share 12 micro-batches", code=3))


@pytest.mark.parametrize(
    "cores, program, sharing, threads",
    [
        (8, {}, 1, 4),  # 12 micro-batches: two groups of six
        (7, {}, 1, 7),  # two groups cannot share 7 cores evenly
        (1, {}, 1, 1),
        (8, {"accumulate": 9}, 1, 8),
        (8, {"accumulate": 1}, 1, 8),
        (8, {"dbn_replica_group_size": 4}, 1, 8),  # three groups
        (8, {"dbn_replica_group_size": 2}, 1, 4),
        (8, {"fused_micro_batches": 12}, 1, 8),  # one group
        (8, {"fused_micro_batches": 3}, 1, 4),
        (8, {}, 3, 4),
        (8, {}, 4, 8),  # each worker has 3 groups, an odd number
        (8, {}, 6, 4),
        (8, {"fused_micro_batches": 3}, 2, 4),
        (8, {"fused_micro_batches": 3}, 4, 8),  # one group for each of four workers
    ],
)
def test_threads_of_training(monkeypatch, cores, program, sharing, threads):
    monkeypatch.setattr(division, "num_cores", lambda: cores)
    assert threads_of_training(make_program(**{"accumulate": 12, **program}), sharing) == threads


# -- training ---------------------------------------------------------------------------------------------------------


def test_two_workers_give_the_bytes_of_one(tmp_path, capfd):
    """Covers batch norm, augmentation, accumulation, replicas, statistics and validation, without dropout."""
    flags = with_values(["toy_model_bn", *FLAGS[1:], "--augment"], image_size=None)
    ended = launch(tmp_path, *with_values(flags, max_workers=None), "--run-dir", "two", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["validation"]["samples"] == 9
    assert "2 workers" in ended.stderr and "Traceback" not in ended.stderr
    assert "the groups of fused micro-batches are those of --max-workers 2" in " ".join(ended.stderr.split())
    # A restart forms its groups of fused micro-batches for the same number of workers.
    assert "max-workers: 2\n" in (tmp_path / "two" / "config.yml").read_text()
    assert cli.run(["train", *flags, "--run-dir", str(tmp_path / "one")]) == 0
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("secret", ["", "x"])
def test_a_missing_secret_is_noted(monkeypatch, secret):
    monkeypatch.setenv("IPUCNN_SECRET", secret)
    workers = Workers(2, 0, addresses=("a:1", "b:1"), source="test")
    program = make_program(accumulate=4).with_fused(1)
    notes = notes_of_sharing(workers, RunConfig(max_workers=2), program, True)
    assert any("IPUCNN_SECRET is not set" in note for note in notes) == (not secret)
    # The user chose the groups of fused micro-batches.
    assert not any("groups of fused micro-batches are those" in note for note in notes)


def test_all_workers_measure_statistics_when_a_signal_ends_them(tmp_path):
    """Workers gather statistics together: worker 0 would wait for ever for one that ended before."""
    measured = []
    recorder = Recorder.__new__(Recorder)
    recorder._guard = SimpleNamespace(exit_code=130)
    recorder._program = SimpleNamespace(num_weight_updates=2)
    recorder._session = SimpleNamespace(state=SimpleNamespace(weight_updates=1))
    recorder._config, recorder._folder = RunConfig(), SilentFolder(tmp_path)
    recorder._prepare_evaluated_weights = lambda: measured.append(True)
    with pytest.raises(Interrupted, match="the first worker saves it"):
        recorder._interrupt()
    assert measured


# -- writing the run folder -------------------------------------------------------------------------------------------


def test_a_stopped_process_no_longer_writes(tmp_path, monkeypatch):
    """Without file locks, a second process continues the run, and then the stopped first process continues too."""
    resolved = resolve(
        "train", {"model_name": "lenet", "dataset": "digits", "run_dir": str(tmp_path / "run")}
    )
    run = TrainingRun(resolved)
    weights = {"a/kernel": np.zeros(2, np.float32)}
    meta = {"model": "lenet", "num_classes": 10, "input_shape": [8, 8, 1], "weight_updates": 1, "seed": 1}

    def write(folder, rows):
        folder.append("metrics.jsonl", "{}\n" * rows)
        folder.write_checkpoint("last.npz", weights, {}, {**meta, "weight_updates": rows})
        folder.link_checkpoint(folder.checkpoints / "last.npz", "best.npz")

    first, second = (RunFolder(tmp_path / "run") for _ in range(2))
    first.create(resolved.config, run.context.program)
    first.add_environment({"started": "1"})
    write(first, 1)
    first.unlock()
    log = MlperfLog(dataclasses.replace(run.context, folder=first), started=0.0)
    recorder = Recorder.__new__(Recorder)
    recorder._folder, recorder._trackers = first, []
    recorder._plot(1, {})
    rewrite = folder_module.write_text

    def write_text(path, text):
        # The first process cannot write any more once the second one begins to write.
        rewrite(path, text)
        with pytest.raises(WorkersError, match="another process goes on"):
            first.append("metrics.jsonl", "{}\n")

    monkeypatch.setattr(folder_module, "write_text", write_text)
    second.reopen(resolved.config, run.context.program, ["{}\n"])
    second.add_environment({"started": "2"})
    assert [e["started"] for e in json.loads((tmp_path / "run" / "environment.json").read_text())] == [
        "1",
        "2",
    ]
    monkeypatch.undo()
    write(second, 2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    writers = (
        lambda: first.append("metrics.jsonl", "{}\n"),
        lambda: first.write_checkpoint("last.npz", weights, {}, meta),
        lambda: first.link_checkpoint(first.checkpoints / "last.npz", "checkpoint-00000009.npz"),
        lambda: first.write_report({}),
        lambda: first.clean(["last.npz"]),
        lambda: first.add_environment({"started": "3"}),
        lambda: log.write("x", 1),
        lambda: recorder._plot(2, {}),
    )
    for writer in writers:
        with pytest.raises(WorkersError, match="another process goes on"):
            writer()
    first.discard()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    write(second, 3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mean", "running_mean"])
def test_a_ring_equals_one_worker_up_to_rounding(tmp_path, capfd, method):
    flags = [*FLAGS, "--no-validation", "--gradient-accumulation-reduction-method", method]
    ended = launch(tmp_path, *flags, "--run-dir", "ring", "--reduction", "ring", "--json")
    assert ended.returncode == 0, ended.stderr
    sharing = json.loads(ended.stdout)["measured"]["sharing"]
    assert (sharing["workers"], sharing["reduction"]) == (2, "ring")
    assert sharing["received_bytes"] > 8 * 75_000
    assert cli.run(["train", *flags, "--run-dir", str(tmp_path / "one")]) == 0
    ring, one = (load_checkpoint(tmp_path / name / "checkpoints" / "last.npz") for name in ("ring", "one"))
    assert list(ring.weights) == list(one.weights)
    for expected, actual in ((one.weights, ring.weights), (one.slots, ring.slots)):
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_workers(tmp_path, capfd):
    """One worker, then two, then one; with statistics measured over large batches and averaged weights."""
    values = dict(ema_decay=0.9, optimizer="adam", optimizer_params="{}", lr_schedule="const", num_epochs=3)
    flags = with_values(FLAGS, precise_batch_norm=8, **values)
    assert cli.run(["train", *flags, "--run-dir", str(tmp_path / "one")]) == 0
    assert cli.run(["train", *with_values(flags, num_epochs=1, run_dir=tmp_path / "changing")]) == 0
    for workers, epochs in ((2, 2), (1, 3)):
        ended = launch(tmp_path, "--resume", "--run-dir", "changing", "--num-epochs", epochs, workers=workers)
        assert ended.returncode == 0, ended.stderr
    # Earlier checkpoints record the number of epochs requested at that time.
    for name in ("metrics.jsonl", "checkpoints/last.npz"):
        assert filecmp.cmp(str(tmp_path / "one" / name), str(tmp_path / "changing" / name), shallow=False), (
            name
        )
    processes = json.loads((tmp_path / "changing" / "environment.json").read_text())
    assert [process.get("workers") for process in processes] == [None, 2, None]
    # Three workers cannot share four groups of micro-batches; the error comes before any import.
    ended = launch(tmp_path, "--resume", "--run-dir", "changing", "--num-epochs", 4, workers=3)
    assert ended.returncode == 2
    assert "3 workers cannot share the 4 groups of fused micro-batches" in " ".join(ended.stderr.split())


@pytest.mark.parametrize("batches", [0, 1, 3, 7])
def test_workers_share_predictions(batches):
    """Each batch is computed once, and every worker receives all logits in the order of the batches."""
    from ipucnn.sessions.host.session import HostSession
    from ipucnn.sessions.session import DeviceInfo

    def logits(number):
        return np.random.default_rng(number).standard_normal((2, 3)).astype(np.float32)

    def act(one):
        session, computed = HostSession(DeviceInfo("cpu", "x", 1, 0), cluster=one), []

        def predict(given):
            computed.extend(given)
            return [logits(number) for number in given]

        session.predict = predict
        given = ((number, "labels") for number in range(batches))
        with session.together():
            return computed, list(session.logits(given))

    results = met(3, act=act)
    for rank, (_, (computed, predicted)) in enumerate(results):
        assert computed == list(range(batches))[rank::3]
        assert [batch for batch, _ in predicted] == [(number, "labels") for number in range(batches)]
        for number, (_, values) in enumerate(predicted):
            assert values.dtype == np.float32 and values.tobytes() == logits(number).tobytes()


def test_workers_without_a_program_do_not_count_each_sample_twice():
    """Without a Program each worker has all batches, and metrics are sums over the batches of all workers."""
    from ipucnn.sessions.host.session import HostSession
    from ipucnn.sessions.session import DeviceInfo

    session = HostSession(DeviceInfo("cpu", "x", 1, 0), cluster=SimpleNamespace(count=2))
    session._forward = lambda images: pytest.fail("a batch was computed")
    with pytest.raises(RuntimeError, match="of several workers"):
        session.evaluate([(np.zeros((1, 2)), [0], [1.0])])


@pytest.mark.slow
def test_two_workers_evaluate_and_infer_as_one(tmp_path, capfd):
    run = tmp_path / "run"
    assert cli.run(["train", *FLAGS, "--no-validation", "--run-dir", str(run)]) == 0
    more = ["--limit-eval", "40", "--device", "cpu"]
    evaluate = ["evaluate", str(run), *more, "--validation-micro-batch-size", "8", "--json"]
    infer = ["infer", str(run), *more, "--split", "eval", "--json"]
    for command in (evaluate, infer):
        two = launch(tmp_path, *command[1:], command=command[0])
        assert two.returncode == 0, two.stderr
        capfd.readouterr()
        assert cli.run(command) == 0
        assert left_out(json.loads(capfd.readouterr().out)) == left_out(json.loads(two.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_workers_evaluate_and_segment_as_one(tmp_path, capfd, workers):
    """Five images, which neither 2 nor 4 divides, give the same figures, masks, overlays and contact sheets."""
    run = tmp_path / "run"
    flags = ["--base-filters", "2", "--image-size", "188", "--micro-batch-size", "1", "--num-epochs", "1"]
    train = ["train", "unet", "--dataset", "membranes", *flags, "--limit-train", "4", "--seed", "1"]
    assert cli.run([*train, "--no-validation", "--run-dir", str(run)]) == 0
    more = ["--limit-eval", "5", "--device", "cpu", "--json"]
    for command, *others in (
        ["evaluate", "--contact-sheet", "{}.png"],
        ["infer", "--split", "eval", "--output", "{}", "--overlay"],
    ):
        reports = []
        for count in (1, workers):
            place = tmp_path / f"{command}-{count}"
            words = [word.format(place) for word in (str(run), *others, *more)]
            ran = launch(tmp_path, *words, workers=count, command=command)
            assert ran.returncode == 0 and "[worker" not in ran.stderr, ran.stderr
            reports.append(left_out(json.loads(ran.stdout)))
        assert reports[0] == reports[1]
        assert "images" in str(reports[0]) or reports[0]["results"][0]["pages"] == 5
    one, several = tmp_path / "infer-1", tmp_path / f"infer-{workers}"
    names = sorted(path.name for path in one.iterdir())
    assert len(names) == 4 and names == sorted(path.name for path in several.iterdir())
    pairs = [(one / name, several / name) for name in names]
    pairs.append((tmp_path / "evaluate-1.png", tmp_path / f"evaluate-{workers}.png"))
    for expected, actual in pairs:
        assert filecmp.cmp(str(expected), str(actual), shallow=False), actual


@pytest.mark.slow
def test_all_workers_train_the_folds_of_a_cross_validation(tmp_path, capfd):
    """Workers connect once for all folds; a different number of workers can continue the cross-validation."""
    flags = [*FLAGS, "--kfold", "2"]
    ended = launch(tmp_path, *flags, "--run-dir", "two", "--json")
    assert ended.returncode == 0 and "[worker" not in ended.stderr, ended.stderr
    report = json.loads(ended.stdout)
    assert report["missing"] == [] and len(report["folds"]) == 2
    assert cli.run(["train", *flags, "--run-dir", str(tmp_path / "one")]) == 0
    for fold in ("fold-1", "fold-2"):
        assert_same(tmp_path / "one" / fold, tmp_path / "two" / fold)
    both = [json.loads((tmp_path / name / "folds.json").read_text()) for name in ("one", "two")]
    assert left_out(both[0], ("train_s",)) == left_out(both[1], ("train_s",))
    # After the second fold is lost, one worker continues with the same groups of micro-batches.
    shutil.rmtree(str(tmp_path / "two" / "fold-2"))
    assert cli.run(["train", "--resume", "--run-dir", str(tmp_path / "two")]) == 0
    assert_same(tmp_path / "one" / "fold-2", tmp_path / "two" / "fold-2")


def test_unsuitable_workers_are_refused_and_leave_no_files(run, monkeypatch):
    two, one_process = (
        ["10.0.0.1:1", "10.0.0.2:1"],
        "TF_CONFIG names 2 workers, and `ipucnn benchmark` is one process",
    )
    absent = ["train", *FLAGS, "--run-dir", "run", "--start-timeout", 1]
    for named, refusal in (
        (["10.0.0.1:1", "8.8.8.8:1"], Refusal("train lenet --dataset digits", "public address")),
        (two, Refusal("benchmark lenet --dataset digits", one_process, "start it once")),
        (two, Refusal("benchmark --suite keras-tutorial", one_process, "start it once")),
        (addresses(2), Refusal(absent, "worker 1 of 2 did not connect", code=7)),
        (addresses(2), Refusal([*absent, "--kfold", 2], "worker 1 of 2 did not connect", code=7)),
    ):
        monkeypatch.setenv("TF_CONFIG", tf_config(named)["TF_CONFIG"])
        check_refused(run, refusal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "more"),
    [(signal.SIGTERM, 143, False), (signal.SIGKILL, 7, False), (signal.SIGINT, 130, True)],
)
def test_a_signal_to_one_worker_ends_all(tmp_path, capfd, number, code, more):
    """The run ends after a checkpoint, or at once if the worker is killed; resumed, it gives the same bytes."""
    flags = with_values([*FLAGS, "--no-validation"], ckpts_per_epoch=0.1, lr_schedule="const", num_epochs=400)
    if more:  # a pipeline, whose statistics all workers measure together before a checkpoint
        flags = with_values(flags, ipus_per_replica=2, gradient_accumulation_count=4, num_replicas=1)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(launch(tmp_path, *flags, "--run-dir", "two")))
    thread.start()
    while not (tmp_path / "two" / "checkpoints" / "last.npz").exists():
        assert thread.is_alive(), ended
        time.sleep(0.05)
    (parent,) = (p for p in psutil.Process().children() if "launch" in p.cmdline())
    max(parent.children(), key=lambda worker: worker.pid).send_signal(number)
    thread.join(200)
    assert ended[0].returncode == code, ended[0].stderr
    assert "Traceback" not in ended[0].stderr
    expected = "worker 1 left" if code == 7 else "interrupted after"
    assert expected in ended[0].stderr
    done = int(load_checkpoint(tmp_path / "two" / "checkpoints" / "last.npz").meta["weight_updates"])
    assert 0 < done < 800
    # Training to the end of the interrupted execution is enough for a comparison.
    epochs = done // 2 + 1
    resumed = ["--resume", "--run-dir", str(tmp_path / "two"), "--num-epochs", str(epochs)]
    whole = with_values(flags, num_epochs=epochs, run_dir=tmp_path / "one")
    assert [cli.run(["train", *words]) for words in (resumed, whole)] == [0, 0]
    both = [(tmp_path / name / "checkpoints" / "last.npz") for name in ("one", "two")]
    one, two = (load_checkpoint(path) for path in both)
    assert all(np.array_equal(one.weights[name], two.weights[name]) for name in one.weights)
    assert all(np.array_equal(one.slots[name], two.slots[name]) for name in one.slots)


def test_a_paused_worker_does_not_report_others_as_lost():
    """A process that did not run for a while has not yet read the messages sent meanwhile."""
    # A copy of the module: with this clock, threads of clusters of other tests would end the process.
    spec = importlib.util.find_spec("ipucnn.sessions.host.cluster")
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    copied.SILENCE_S, copied.HEARTBEAT_S = 0.2, 0.0
    one, left = copied.Cluster(), []
    one._leave = left.append
    link = SimpleNamespace(rank=1, ended=None, heard=0.0, send_bytes=lambda data: None)
    one._links = {1: link}
    times = iter([0.0, 5.0])

    def clock():
        value = next(times, None)
        if value is None:
            one._is_closed = True
        return 5.0 if value is None else value

    copied.time = SimpleNamespace(monotonic=clock, sleep=lambda seconds: None)
    one._watch()
    assert not left and link.heard == 5.0
    # A process that ran all the time reports the silent worker.
    one._is_closed, link.heard, times = False, 0.0, iter([5.0, 5.0])
    one._watch()
    assert left
    one._is_closed, link.heard, left[:], times = False, 0.0, [], iter([5.0, 5.0])
    one._may_be_silent = True
    one._watch()
    assert not left


def test_tensorflow_errors_that_mean_a_lost_worker():
    import tensorflow as tf

    node = "[[{{node while/CollectiveGatherV2}}]]"
    of = tf.errors
    lost = (
        (of.UnavailableError, f"Socket closed {node}"),
        (
            of.UnavailableError,
            "cluster check alive failed\nAdditional GRPC error information from remote target",
        ),
        (of.AbortedError, "Collective ops is aborted by: worker 1 is down"),
        (of.InternalError, "Collective ops is aborted by: failed to connect to all addresses"),
        (of.DeadlineExceededError, "RPC: /tensorflow.CoordinationService/Heartbeat"),
    )
    # Errors of the worker itself, near a collective, are reported unchanged and at once.
    others = (
        (of.ResourceExhaustedError, f"OOM when allocating a tensor {node}"),
        (of.InvalidArgumentError, "Collective ops is aborted by: Shape mismatch in the collective instance"),
        (of.InternalError, f"Blas GEMM launch failed {node}"),
        (of.UnavailableError, "the disk is gone"),
    )
    for errors, expected in ((lost, True), (others, False)):
        for kind, message in errors:
            assert cluster._is_of_collectives(kind(None, None, message)) == expected, message
    assert not cluster._is_of_collectives(RuntimeError("Collective"))


def test_tensorflow_may_detect_a_lost_worker_first(monkeypatch):
    """Its collectives then fail; the error names the silent worker instead of reporting a bug of this program."""
    import tensorflow as tf

    aborted = (
        "Collective ops is aborted by: Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat"
    )
    error = tf.errors.DeadlineExceededError(None, None, aborted)
    for name, seconds in (("SILENCE_S", 1.0), ("GRACE_S", 50.0), ("HEARTBEAT_S", 0.1)):
        monkeypatch.setattr(cluster, name, seconds)
    left = []
    # The wait lasts until the silence is noticed, however slow the machine is, and no longer.
    clock = {**vars(time), "monotonic": lambda: time.monotonic() + (100 if left else 0)}
    monkeypatch.setattr(cluster, "time", SimpleNamespace(**clock))

    def act(one):
        one._leave = left.append
        if one.rank:
            # This worker is stopped: it neither sends nor receives.
            monkeypatch.setattr(one, "_is_closed", True)
            return None
        with pytest.raises(WorkersError, match="worker 0 lost the others") as raised:
            one.close(error)
        assert raised.value.exit_code == 7 and "--resume" in raised.value.hint
        return None

    results = met(2, act=act)
    assert results[0] == (3, None), results
    assert set(left) == {1}
    # An error of this worker itself is raised without a wait, whatever it names.
    monkeypatch.setattr(cluster, "SILENCE_S", 1000.0)
    out_of_memory = tf.errors.ResourceExhaustedError(None, None, "OOM [[{{node while/CollectiveGatherV2}}]]")
    assert [result[1] for result in met(2, act=lambda one: one.close(out_of_memory))] == [None, None]
