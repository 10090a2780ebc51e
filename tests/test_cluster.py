"""Several processes of MPI: who started them, their exchange, their ends, and training that equals one process's."""

import dataclasses
import filecmp
import gc
import hashlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tensorflow as tf
from support.own_networks import OWN_DATA, RESIDUAL, write
from support.refusals import Refusal, check_refused
from support.sessions import make_program
from support.workers import (
    FLAGS,
    MPIEXEC,
    PROGRAM,
    Given,
    assert_same,
    completed,
    environment,
    launch,
    left_out,
    mpiexec,
    needs_mpi,
    with_values,
)

from ipucnn import cli, machine
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError, DataError, WorkersError
from ipucnn.machine import num_cores
from ipucnn.runs import provenance, recorder
from ipucnn.runs import train as runs_train
from ipucnn.runs import writer as writer_module
from ipucnn.runs.mlperf import MlperfLog
from ipucnn.runs.resume import resume_command
from ipucnn.runs.train import TrainingRun
from ipucnn.runs.writer import RunWriter, SilentWriter
from ipucnn.sessions import mpi
from ipucnn.sessions.group import (
    Alone,
    Launched,
    Mpi,
    Popdist,
    find_instances,
    find_launched,
)
from ipucnn.sessions.host import agreement, division, gpus
from ipucnn.sessions.host.agreement import agree, require_same_weights
from ipucnn.sessions.host.division import Division, threads_of_training
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import ExecutionFinished
from ipucnn.training.checkpoints import load_checkpoint

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
STEP = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "4",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "2",
}

# -- who started this process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (OPEN_MPI, Launched("mpiexec", 2, 4, 1)),
        (HYDRA, Launched("mpiexec", 2, 4, 1)),
        (STEP, Launched("srun", 2, 4, 1)),
        # srun --mpi=pmi2 and --mpi=pmix set both.
        ({**STEP, **HYDRA}, Launched("srun", 2, 4, 1)),
        ({**STEP, "PMIX_RANK": "2"}, Launched("srun", 2, 4, 1)),
        ({"PMIX_RANK": "2"}, Launched("mpiexec", 2, None, 2)),
        # Hydra and mpirun start a process on each node of a job with srun, whose variables its processes inherit.
        ({**STEP, **HYDRA, "PMI_RANK": "5", "PMI_SIZE": "8"}, Launched("mpiexec", 5, 8, 1)),
        ({**STEP, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"}, Launched("mpiexec", 2, 8, 1)),
        # One process, and the batch script of a job with several tasks.
        ({**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # Another launcher's processes inside a step of one process, whose size they inherit.
        ({"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "1"}, Launched("mpiexec", 2, None, 2)),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        # poprun uses Open MPI itself.
        ({**POPRUN, **OPEN_MPI}, None),
    ],
)
def test_variables_name_the_processes(variables, expected):
    assert find_launched(variables) == expected
    instances = find_instances(variables)
    assert instances == (Popdist(2, 1, 1, 4) if "POPDIST_NUM_TOTAL_REPLICAS" in variables else Alone())


def test_variables_that_are_no_numbers_are_refused():
    with pytest.raises(ConfigurationError, match="PMI_SIZE='x' is no number"):
        find_launched({**HYDRA, "PMI_SIZE": "x"})


@pytest.mark.parametrize(
    ("variables", "command"),
    [({}, "ipucnn train"), (HYDRA, "mpiexec -n 4 ipucnn train"), (STEP, "srun -n 4 ipucnn train")],
)
def test_the_command_that_continues_a_run_starts_as_many_processes(monkeypatch, tmp_path, variables, command):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resume_command(tmp_path, []) == f"{command} --resume --run-dir {tmp_path}"


CONNECTED = """
import sys
from types import SimpleNamespace
from ipucnn.sessions import group, mpi
mpi.Connection = lambda started: SimpleNamespace(size=int(sys.argv[1]), rank=0)
group.find_group()
print(*group.resume_words())
"""


@pytest.mark.parametrize(("size", "words"), [(3, "mpiexec -n 3"), (1, "")])
def test_the_process_of_a_launcher_that_gives_no_size_continues_as_it_was_connected(tmp_path, size, words):
    """PMIX_RANK alone says that there is a launcher; MPI says how many processes there are."""
    ended = completed(tmp_path, ["-c", CONNECTED, size], PMIX_RANK="0")
    assert ended.stdout.strip() == words, ended.stderr


@pytest.mark.parametrize("variables", [HYDRA, STEP])
def test_other_commands_are_refused_in_several_processes(run, monkeypatch, variables):
    """The first process says so, the others end with the same exit code; the help and the version are printed once."""
    for name, value in variables.items():
        monkeypatch.setenv(name, "0" if name in ("PMI_RANK", "SLURM_PROCID") else value)
    launcher = "mpiexec" if variables is HYDRA else "srun"
    for command in ("evaluate runs/a", "infer a b", "benchmark lenet", "doctor", "verify-dataset", "models"):
        name = command.split()[0]
        error = f"{launcher} started 4 processes, and `ipucnn {name}` runs in one"
        check_refused(run, Refusal(command, error, f"type it without {launcher}: ipucnn {name}"))
    assert "COMMAND [OPTIONS]" in run("--help")[1]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    assert run("doctor") == (2, "", "") and run("--help") == (0, "", "")


def test_processes_that_mpi_does_not_connect_are_refused(tmp_path):
    """Each of them would train alone, in the same folder."""
    for variables in (OPEN_MPI, STEP):
        several = {
            name: "0" if name.endswith(("RANK", "PROCID", "LOCALID")) else v for name, v in variables.items()
        }
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "train", *FLAGS, "--run-dir", "run"],
            cwd=str(tmp_path), env=environment(**several), capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 6 and ended.stdout == "", ended.stderr
        error, hint = ended.stderr.splitlines()
        if MPIEXEC.exists():
            assert "started 4 processes, and MPI connects 1 process" in error
        else:
            assert "started 4 processes, and mpi4py cannot be imported" in error and "ipucnn[mpi]" in hint
        assert not list(tmp_path.iterdir())


# -- exchange ---------------------------------------------------------------------------------------------------------

EXCHANGE = """
import numpy as np, time
from ipucnn.sessions.group import find_group, leave
group = find_group()
rank, size = group.rank, group.size
numbers = np.random.default_rng(1).standard_normal(20).tolist()
for number in numbers:
    assert group.gather("numbers", [rank, number]) == [[other, number] for other in range(size)]
assert group.gather("texts", "x" * (100_000 * rank)) == ["x" * (100_000 * other) for other in range(size)]
assert group.from_rank_0("first", rank) == 0
def values(other, seed):
    drawn = np.random.default_rng([other, seed]).standard_normal(200_003).astype(np.float32)
    drawn[other] = np.nan, np.inf, -0.0
    return drawn
drawn = []
for seed in range(3):
    drawn.append(group.gather_array(values(rank, seed)))
for seed, gathered in enumerate(drawn):
    assert gathered.shape == (size, 200_003) and gathered.dtype == np.float32
    assert gathered.tobytes() == b"".join(values(other, seed).tobytes() for other in range(size))
total = group.sum_array(values(rank, 0)[10:])
np.testing.assert_allclose(total, sum(values(other, 0)[10:] for other in range(size)), rtol=1e-5, atol=1e-5)
# A wait leaves the processor to others.
began = time.process_time()
if rank == 2:
    time.sleep(3.0)
group.gather("late", None)
assert time.process_time() - began < 1.0
assert leave(0) == 0
print(f"rank {rank} is done")
""".replace("drawn[other] = np.nan, np.inf, -0.0", "drawn[:3] = np.nan, np.inf, -0.0")


@needs_mpi
def test_processes_exchange_values_and_arrays_in_order(tmp_path):
    ended = mpiexec(tmp_path, "-c", EXCHANGE, count=3)
    assert ended.returncode == 0, ended.stderr
    # mpiexec may join the lines of different ranks.
    assert sorted(re.findall(r"rank \d is done", ended.stdout)) == [
        f"rank {rank} is done" for rank in range(3)
    ]


def given(*values):
    return Given(len(values), 0, lambda place, own: [own, *values[1:]])


def test_processes_with_different_options_are_refused():
    def others(place, own):
        return [own, own, {**own, "run": {**own["run"], "--seed": 2}}]

    with pytest.raises(ConfigurationError) as refused:
        agree(Given(3, 0, others), RunConfig(), {"--seed": 1}, 4)
    assert refused.value.message == "rank 2 has --seed 2, and rank 0 has 1"


def test_all_processes_take_the_threads_of_rank_0():
    group = Given(2, 1, lambda place, own: [{**own, "threads": 5}, own])
    assert agree(group, RunConfig(), {}, 4) == (5, [])


class Stopped(Exception):
    """Ends a run where a test has seen enough."""


def stop(*_, **__):
    raise Stopped


def test_processes_compare_all_that_decides_a_run(lightly, monkeypatch, here):
    """Options that end a run and the checkpoint must agree: else one process alone could end, or skip the loop."""
    files = {name: write(text, f"{name}.py") for name, text in (("net", RESIDUAL), ("data", OWN_DATA))}
    flags = {"dataset": files["data"].replace("build", "load"), "run_dir": "run", "micro_batch_size": "4"}
    list(TrainingRun(resolve("train", {**flags, "num_epochs": "1"}, model=files["net"])).events())
    compared, connection = {}, SimpleNamespace(timeout_s=0.0)

    def note(group, config, run, threads):
        compared.update(run, threads=threads)
        return threads, []

    monkeypatch.setattr(runs_train, "agree", note)
    monkeypatch.setattr(runs_train, "share_gpus", stop)
    more = {"num_epochs": "2", "resume": True, "target_accuracy": "0.5"}
    run = TrainingRun(resolve("train", {**flags, **more}, model=files["net"]))
    run.context = dataclasses.replace(run.context, group=Mpi(2, 0, connection=connection))
    with pytest.raises(Stopped):
        next(run.events())
    checkpoint = load_checkpoint("run/checkpoints/last.npz")
    assert {"--num-epochs", "--early-stopping", "--max-workers", "--seed", "data"} <= set(compared)
    assert compared["--target-accuracy"] == 0.5 and "--run-dir" not in compared
    for name in ("net", "data"):
        digest = hashlib.sha256(Path(f"{name}.py").read_bytes()).hexdigest()
        assert compared[f"the {'network' if name == 'net' else 'data set'}'s file"] == digest
    assert compared["weight updates done"] == checkpoint.meta["weight_updates"] > 0
    assert compared["the checkpoint"] == checkpoint.digest
    assert (
        compared["threads"] == checkpoint.meta["threads"] and connection.timeout_s == RunConfig().rank_timeout
    )


def test_the_next_fold_keeps_the_threads_of_tensorflow(monkeypatch, here):
    machine.fix_threads(num_cores() + 2, required=False)  # as after a resumed fold
    monkeypatch.setattr("ipucnn.sessions.factory.create_session", stop)
    with pytest.raises(Stopped):
        list(TrainingRun(resolve("train", {"dataset": "digits", "run_dir": "r"}, model="lenet")).events())
    assert machine.operation_threads() == num_cores() + 2


def test_processes_with_different_initial_weights_are_refused():
    """Files of the same name may have different contents on different machines."""
    weights, digests = {"a/kernel": tf.constant([1.0, 2.0])}, []
    require_same_weights(Given(2, 0, lambda place, own: (digests.append(own), [own, own])[1]), weights)
    require_same_weights(
        Given(1, 0, lambda place, own: pytest.fail("a process that is alone compared weights")), weights
    )
    other = {"a/kernel": tf.constant([1.0, 3.0])}
    with pytest.raises(ConfigurationError, match="rank 2 begins with other weights than rank 0"):
        require_same_weights(Given(3, 2, lambda place, own: [*digests * 2, own]), other)


def test_processes_compare_the_facts_that_a_resumed_run_compares(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    named = set(agreement.facts_of_machine()) - {"processor", "python"}
    before = dict.fromkeys(provenance.DECIDES_BYTES, "x")
    changed = provenance.changes(before, {"variables": dict.fromkeys(provenance.VARIABLES, "x")})
    # Compiled layers follow from the versions of Python and TensorFlow.
    assert named == {line.split()[0] for line in changed} - {"ipucnn", "cpu", "threads", "compiled_layers"}
    assert provenance.changes({**before, "variables": ["damaged"]}, before) == []


def test_processes_on_different_processors_are_noted_or_refused(monkeypatch):
    monkeypatch.setattr(agreement, "facts_of_machine", lambda: {"processor": "P0"})
    group = Given(2, 0, lambda place, own: [own, {**own, "machine": {"processor": "P1"}}])
    assert agree(group, RunConfig(), {}, 1) == (1, ["rank 1 has processor P1, and rank 0 has P0"])
    with pytest.raises(ConfigurationError, match="--require-same-bytes: rank 1 has processor P1"):
        agree(group, RunConfig(require_same_bytes=True), {}, 1)


def test_processes_of_one_machine_share_its_gpus(monkeypatch):
    seen = {}

    def share(rank, everyone, visible=None):
        """Returns CUDA_VISIBLE_DEVICES of a process, if each process sees the GPUs in ``everyone``."""
        monkeypatch.setattr(
            gpus, "find_gpus", lambda: ([gpus.Gpu("H", 1, "5", uuid) for uuid in everyone[rank]], None)
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        def gather(place, own):
            seen[rank] = own
            return list(map(list, everyone))

        gpus.share_gpus(Given(len(everyone), rank, gather))
        assert seen[rank] == list(everyone[rank])
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    two = ["abcd", "abcd"]
    assert [share(rank, two) for rank in (0, 1)] == ["a,b", "c,d"]
    assert [share(rank, two, "7,1,9,4") for rank in (0, 1)] == ["7,1", "9,4"]
    # Two machines with two processes each; and processes to which the launcher gave a GPU each.
    machines = ["ab", "ab", "cd", "cd"]
    assert [share(rank, machines) for rank in range(4)] == ["a", "b", "c", "d"]
    assert share(1, ["a", "b"], "0") == "0"
    assert share(1, ["", ""]) is None
    # All processes raise the same error.
    for rank in range(3):
        with pytest.raises(
            ConfigurationError, match="2 processes on one machine cannot share 3 GPUs evenly"
        ) as refused:
            share(rank, ["abc", "abc", "d"])
        assert refused.value.hint == "start 1 or 3 there, or add --device cpu"


def test_one_process_shares_no_gpus(monkeypatch):
    monkeypatch.setattr(gpus, "find_gpus", lambda: pytest.fail("GPUs were listed"))
    gpus.share_gpus(Alone())


# -- ends -------------------------------------------------------------------------------------------------------------

SMALL = [*with_values(FLAGS, threads=None), "--run-dir", "run"]


@pytest.mark.slow
@needs_mpi
@pytest.mark.slow_cases("others3-2---optimizer absent: must be one of")
@pytest.mark.parametrize(
    ("others", "code", "error"),
    [
        # All processes have the same error; one process has other options than the rest.
        ([with_values(SMALL, seed=None)] * 3, 2, "3 processes need the same seed, and none is given"),
        ([SMALL, with_values(SMALL, seed=2)], 2, "rank 1 has --seed 2, and rank 0 has 1"),
        # One process alone fails, while the others wait for it.
        ([SMALL, with_values(SMALL, optimizer="absent")], 2, "rank 1: --optimizer absent: must be one of"),
        ([with_values(SMALL, optimizer="absent"), SMALL], 2, "--optimizer absent: must be one of"),
    ],
)
def test_an_error_before_training_is_printed_once(tmp_path, others, code, error):
    ended = mpiexec(tmp_path, *(["-c", PROGRAM, "train", *words] for words in others))
    assert ended.returncode == code and ended.stdout == "", ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {error}"), ended.stderr
    assert "Traceback" not in ended.stderr and not list(tmp_path.iterdir())


def test_an_error_keeps_the_arrays_that_mpi_still_fills(monkeypatch):
    filled = []

    def begin(mine, gathered):
        filled.append(weakref.ref(gathered))
        return SimpleNamespace(Test=lambda: False, arrays=(mine, gathered))

    world = SimpleNamespace(Get_size=lambda: 1, Get_rank=lambda: 0, Iallgather=begin, Dup=lambda: world)
    fake = SimpleNamespace(
        COMM_WORLD=world, Is_initialized=lambda: True, Query_thread=lambda: 3, Exception=OSError
    )
    fake.THREAD_SERIALIZED = 2
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace(), MPI=fake))

    connection = mpi.Connection("a test")
    monkeypatch.setattr("ipucnn.interrupts.check", stop)  # as after a signal, or another process's error
    with pytest.raises(Stopped):
        connection.gather_array(np.ones(3, np.float32))
    gc.collect()
    assert filled[0]() is not None


END = """
import os, signal, sys, time
from ipucnn.sessions.group import find_group, leave
group, case = find_group(), sys.argv[1]
group.connection.timeout_s = 1.0
last = group.rank == group.size - 1
if last and case == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
if last and case == "is slow":
    time.sleep(4.0)  # as in a compilation, or while it writes a checkpoint
if last and case == "has ended":
    leave(0)
if last and case == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if last and case == "third signal":
    from ipucnn import interrupts
    interrupts.listen()
    interrupts.begin()
    for _ in range(3):
        try:
            signal.raise_signal(signal.SIGTERM)
        except interrupts.Interruption:
            pass
if last and case == "fails":
    raise ValueError("a reason")
if group.rank == 0 and case == "ends late":
    group.gather("x", 0)
    time.sleep(4.0)  # as while it writes the report
else:
    group.gather("x", 0)
if case == "python":
    sys.exit(0)  # the exit function of the connection ends it
sys.exit(leave(3 if case == "all fail" else 0, "a message", "a hint"))
"""


BUG = """
import sys
from ipucnn import cli
from ipucnn.sessions.group import find_group
def fail(line):
    rank, case = find_group().rank, sys.argv[1]
    if case == "of all" or rank == 2:
        raise ZeroDivisionError("a reason")
    if case == "each its own":
        raise KeyError(rank)
    find_group().gather("x", 0)
cli._dispatch = fail
cli.main(["train"])
"""


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("case", "reasons", "ranks"),
    [
        ("of all", ["ZeroDivisionError: a reason"], [""]),
        ("of one", ["ZeroDivisionError: a reason"], ["rank 2: "]),
        (
            "each its own",
            ["KeyError: 0", "KeyError: 1", "ZeroDivisionError: a reason"],
            ["", "rank 1: ", "rank 2: "],
        ),
    ],
)
def test_the_traceback_of_a_bug_is_printed_once(tmp_path, case, reasons, ranks):
    ended = mpiexec(tmp_path, "-c", BUG, case, count=3)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and ended.stderr.count("Traceback") == len(reasons), ended.stderr
    assert [line for line in lines if line.startswith(("ZeroDivisionError", "KeyError"))] == reasons
    shown = [line for line in lines if line.startswith("error: ")]
    assert shown == [f"error: {rank}this is a bug in ipucnn; the lines above say where" for rank in ranks]


@pytest.mark.slow_cases(
    "ends late-0-",
    "has ended-7-error: rank 2 of 3 did not answer for 2 s",
    "is slow-0-",
    "stops-7-error: rank 2 of 3 did not answer for 2 s",
)
@needs_mpi
@pytest.mark.parametrize(
    ("case", "code", "expected"),
    [
        ("stops", 7, "error: rank 2 of 3 did not answer for 2 s"),
        ("has ended", 7, "error: rank 2 of 3 did not answer for 2 s"),
        ("is slow", 0, ""),
        ("ends late", 0, ""),
        ("python", 0, ""),
        ("all fail", 3, ""),
        ("fails", 1, "rank 2: a reason"),
        ("is killed", 9, ""),
        ("third signal", 143, "interrupted"),
    ],
)
def test_processes_end_together(tmp_path, case, code, expected):
    ended = mpiexec(tmp_path, "-c", END, case, count=3)
    assert ended.returncode == code, ended.stderr
    assert expected in ended.stderr and ended.stderr.count("did not answer") <= 1
    if code in (0, 3):
        assert ended.stderr == ""


LATE = """
import sys, time
import mpi4py
from ipucnn.sessions.group import find_group, leave
time.sleep(float(sys.argv[1]))
group = find_group()
assert group.gather("x", group.rank) == [0, 1]
leave(0)
"""


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("seconds", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_process_may_start_late(tmp_path, seconds):
    ended = mpiexec(tmp_path, ["-c", LATE, "0"], ["-c", LATE, str(seconds)])
    assert ended.returncode == 0, ended.stderr


# -- dividing a weight update -----------------------------------------------------------------------------------------


def test_notes_name_the_processes():
    program = make_program(accumulate=4)
    notes = Division(program, 1, num_workers=2).notes(RunConfig(max_workers=2), is_new=True)
    # The user chose the groups of fused micro-batches, so nothing is said about them.
    assert len(notes) == 1 and notes[0].startswith("2 workers")


def test_the_most_workers_that_there_may_be_decide_the_threads(run, monkeypatch):
    def refuse(program, fused, sharing):
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
    program = {"accumulate": 12, **program}
    fused = program.pop("fused_micro_batches", None)
    assert threads_of_training(make_program(**program), fused, sharing) == threads


@pytest.mark.slow
def test_all_workers_measure_statistics_when_a_signal_ends_them(lightly, monkeypatch, here):
    """Workers gather statistics together: rank 0 would wait for ever for a process that ended before."""
    flags = {
        "dataset": "digits",
        "limit_train": "64",
        "micro_batch_size": "8",
        "gradient_accumulation_count": "2",
    }
    run = TrainingRun(resolve("train", {**flags, "validation": "False"}, model="lenet"))
    group = Given(1, 1, lambda place, own: [own])  # a process that writes nothing
    run.context = dataclasses.replace(run.context, group=group, folder=SilentWriter(here / "r", None, 1))
    executions = []
    with pytest.raises(Stopped):
        for event in run.events():
            if isinstance(event, ExecutionFinished):
                executions.append(event)
                monkeypatch.setattr(recorder, "evaluated_weights", stop)
                os.kill(os.getpid(), signal.SIGTERM)
    assert len(executions) == 1 < run.context.program.num_executions


@pytest.mark.slow
def test_all_processes_measure_for_the_last_checkpoint_if_one_of_them_lacks_it(lightly, monkeypatch, here):
    """A process on another machine may not see the folder in which rank 0 finds the numbered checkpoint."""
    flags = {
        "dataset": "digits",
        "limit_train": "64",
        "micro_batch_size": "8",
        "run_dir": "r",
        "resume": True,
    }
    options = resolve("train", {**flags, "validation": "False", "num_epochs": "1"}, model="lenet")
    list(TrainingRun(options).events())
    for name in ("report.json", "checkpoints/last.npz"):
        Path("r", name).unlink()
    saving, save_last = [], recorder.Recorder.save_last

    def saved(self):
        saving.append(self)
        yield from save_last(self)
        saving.clear()

    monkeypatch.setattr(recorder.Recorder, "save_last", saved)
    monkeypatch.setattr(HostSession, "any_instance", lambda self, flag: flag or bool(saving))
    monkeypatch.setattr(recorder, "evaluated_weights", stop)
    with pytest.raises(Stopped):
        list(TrainingRun(options).events())


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
        folder.link_checkpoint("last.npz", "best.npz")

    first, second = (RunWriter(tmp_path / "run") for _ in range(2))
    first.create(resolved.config, run.context.program)
    first.add_environment({"started": "1"})
    write(first, 1)
    first.unlock()
    log = MlperfLog(dataclasses.replace(run.context, folder=first), started=0.0)
    first.check_writer()
    rewrite = writer_module.write_text

    def write_text(path, text):
        # The first process cannot write any more once the second one begins to write.
        rewrite(path, text)
        with pytest.raises(WorkersError, match="another process goes on"):
            first.append("metrics.jsonl", "{}\n")

    monkeypatch.setattr(writer_module, "write_text", write_text)
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
        first.check_writer,
    )
    for writer in writers:
        with pytest.raises(WorkersError, match="another process goes on"):
            writer()
    first.discard()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    write(second, 3)


@needs_mpi
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


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("method", ["mean", "running_mean"])
def test_all_reduce_equals_one_process_up_to_rounding(tmp_path, capfd, method):
    flags = [*FLAGS, "--no-validation", "--gradient-accumulation-reduction-method", method]
    ended = launch(tmp_path, *flags, "--run-dir", "summed", "--reduction", "allreduce", "--json")
    assert ended.returncode == 0, ended.stderr
    sharing = json.loads(ended.stdout)["measured"]["sharing"]
    assert (sharing["workers"], sharing["reduction"]) == (2, "allreduce")
    assert sharing["received_bytes"] > 8 * 75_000
    assert cli.run(["train", *flags, "--run-dir", str(tmp_path / "one")]) == 0
    summed, one = (
        load_checkpoint(tmp_path / name / "checkpoints" / "last.npz") for name in ("summed", "one")
    )
    assert list(summed.weights) == list(one.weights)
    for expected, actual in ((one.weights, summed.weights), (one.slots, summed.slots)):
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=0, atol=1e-5, err_msg=name)


@needs_mpi
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
    # Three workers cannot share four groups of micro-batches; the error comes before TensorFlow is imported.
    ended = launch(tmp_path, "--resume", "--run-dir", "changing", "--num-epochs", 4, workers=3)
    assert ended.returncode == 2
    assert "3 workers cannot share the 4 groups of fused micro-batches" in " ".join(ended.stderr.split())


@needs_mpi
@pytest.mark.slow
def test_all_workers_train_the_folds_of_a_cross_validation(tmp_path, capfd):
    """A different number of processes can continue the cross-validation."""
    flags = [*FLAGS, "--kfold", "2"]
    ended = launch(tmp_path, *flags, "--run-dir", "two", "--json")
    assert ended.returncode == 0, ended.stderr
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


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "cifar_resnet8 --dataset digits --image-size 8 --augment --limit-train 32 --limit-eval 9 --num-replicas 2 "
        "--micro-batch-size 2 --gradient-accumulation-count 4",
        "efficientnet-b0 --dataset digits --augment --limit-train 16 --limit-eval 9 --num-replicas 2 "
        "--micro-batch-size 2 --gradient-accumulation-count 2",
        "unet --dataset membranes --base-filters 2 --image-size 188 --augment --limit-train 4 --limit-eval 2 "
        "--micro-batch-size 1 --gradient-accumulation-count 4",
    ],
)
def test_one_two_and_four_processes_give_the_same_bytes(tmp_path, words):
    more = f"--seed 1 --num-epochs 1 --max-workers 4 --threads {num_cores()} --precise-batch-norm 0"
    for workers in (1, 2, 4):
        ended = launch(tmp_path, *words.split(), *more.split(), "--run-dir", str(workers), workers=workers)
        assert ended.returncode == 0, ended.stderr
    assert_same(tmp_path / "1", tmp_path / "2")
    assert_same(tmp_path / "1", tmp_path / "4")


LONG = with_values(
    [*FLAGS, "--no-validation"], ckpts_per_epoch=0.1, lr_schedule="const", num_epochs=4000, run_dir="two"
)


def started(tmp_path, *flags):
    """Starts two processes at a pseudo-terminal; returns mpiexec, its terminal, and the processes by rank."""
    terminal, its_end = pty.openpty()
    with (tmp_path / "said").open("wb") as said:
        words = ["setsid", "--ctty", MPIEXEC, "-n", "2", sys.executable, "-c", PROGRAM, "train", *flags]
        parent = subprocess.Popen(
            list(map(str, words)),
            cwd=str(tmp_path),
            env=environment(),
            stdin=its_end,
            stdout=said,
            stderr=said,
        )
    os.close(its_end)
    while not (tmp_path / "two" / "checkpoints" / "last.npz").exists():
        assert parent.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.05)
    children = psutil.Process(parent.pid).children(recursive=True)
    return parent, terminal, sorted((c for c in children if "train" in c.cmdline()), key=_rank_of)


def _rank_of(process):
    return int(process.environ().get("PMI_RANK", -1))


def act(parent, terminal, ranks, case):
    """Sends the signals of a case: to a rank, to mpiexec, or by the terminal."""
    target, number = case
    if target == "terminal":
        for _ in range(number):
            os.write(terminal, b"\x03")
            time.sleep(0.3)
    else:
        (psutil.Process(parent.pid) if target == "mpiexec" else ranks[target]).send_signal(number)


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code", "expected"),
    [
        ((1, signal.SIGTERM), 143, "interrupted after"),
        (("mpiexec", signal.SIGTERM), 143, "interrupted after"),
        (("terminal", 1), 130, "interrupted after"),
        # Hydra ends them at once, and says so; its exit code is 0, 1 or 255.
        (("terminal", 2), None, "Ctrl-C caught"),
        ((1, signal.SIGKILL), 9, "Killed (signal 9)"),
        ((0, signal.SIGKILL), 9, "Killed (signal 9)"),
        ((1, signal.SIGSTOP), 7, "error: rank 1 of 2 did not answer for 8 s"),
    ],
)
def test_a_signal_ends_all_processes_and_the_run_continues_with_the_same_bytes(
    tmp_path, case, code, expected
):
    # A pipeline, whose statistics all processes measure together before a checkpoint.
    stages = dict(ipus_per_replica=2, gradient_accumulation_count=4, num_replicas=1)
    flags = with_values(LONG, **stages) if case == ("terminal", 1) else LONG
    parent, terminal, ranks = started(tmp_path, *flags, "--rank-timeout", "4")
    act(parent, terminal, ranks, case)
    ended = parent.wait(timeout=120)
    os.close(terminal)
    _, left = psutil.wait_procs(ranks, timeout=30)
    said = (tmp_path / "said").read_text()
    assert (
        ended == (ended if code is None else code)
        and not left
        and expected in said
        and "Traceback" not in said
    ), said
    if expected == "interrupted after":
        assert "hint: continue it with: mpiexec -n 2 ipucnn train --resume --run-dir two" in said
    done = int(load_checkpoint(tmp_path / "two" / "checkpoints" / "last.npz").meta["weight_updates"])
    # Training to the end of the interrupted execution is enough for a comparison.
    epochs = str(done // 2 + 1)
    resumed = ["--resume", "--run-dir", str(tmp_path / "two"), "--num-epochs", epochs]
    whole = with_values(flags, num_epochs=epochs, run_dir=tmp_path / "one")
    assert [cli.run(["train", *words]) for words in (resumed, whole)] == [0, 0]
    one, two = (load_checkpoint(tmp_path / name / "checkpoints" / "last.npz") for name in ("one", "two"))
    assert all(np.array_equal(one.weights[name], two.weights[name]) for name in one.weights)
    assert all(np.array_equal(one.slots[name], two.slots[name]) for name in one.slots)
