"""Signals end the program cleanly at every moment; closed pipes and full disks never end its work."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.refusals import check_raises
from support.trained_runs import rows

from ipucnn import errors, interrupts
from ipucnn.config.resolve import resolve
from ipucnn.interrupts import Interrupted
from ipucnn.runs import setup
from ipucnn.runs.train import TrainingRun
from ipucnn.runs.writer import RunWriter
from ipucnn.sessions.host import environment
from ipucnn.sessions.host.session import UpdateLoop
from ipucnn.training.checkpoints import load_checkpoint
from ipucnn.training.losses import Loss

ROOT = Path(__file__).resolve().parents[1]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SMALL = ("train", "toy_model", "--dataset", "digits", "--limit-train", "64", "--limit-eval", "8",
         "--num-epochs", "1")  # fmt: skip
PROGRAM = "from ipucnn.__main__ import main; main()"


@pytest.fixture(autouse=True)
def plain_environment(here, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(os.path.isabs, sys.path)]))


def python(code, *args, **options):
    """Starts a Python process; stdout and stderr are captured unless ``options`` say otherwise."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-c", code, *args], timeout=300, **streams)


def assert_clean(err):
    for word in ("Traceback", "Exception ignored", "bug", "Fatal"):
        assert word not in err, err


# -- streams --------------------------------------------------------------------------------------------------

# Prints a lot in every possible way, then does its work.
TALKS = """
import os, sys, warnings, logging
from ipucnn import cli
from ipucnn.errors import DataError
from ipucnn.reports.console import console, note
def work(args):
    for i in range(300):
        note("x" * 200)
        console(sys.stderr).print("y" * 200)
        console(sys.stdout).print("y" * 200)
        warnings.warn("z%d" % i)
        logging.warning("w")
        try: os.write(2, b"native")
        except OSError: pass
        print("result" * 50, flush=True)
    open("done", "w").close()
    if args.name == "fails": raise DataError("no", "none")
    return 0
cli._dispatch = work
cli.main(sys.argv[1:])
"""


def pipe_without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def terminal_that_is_gone():
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    os.close(master)
    return slave


@pytest.mark.parametrize(
    "make, streams, args, code",
    [
        (pipe_without_reader, ("stderr",), (), 0),
        (pipe_without_reader, ("stdout",), ("fails",), 3),
        (pipe_without_reader, ("stdout", "stderr"), ("fails",), 3),
        (terminal_that_is_gone, ("stdout",), (), 0),
        (terminal_that_is_gone, ("stdout", "stderr"), ("fails",), 3),
    ],
)
def test_closed_reader_does_not_change_the_result(tmp_path, make, streams, args, code):
    handle = make()
    try:
        done = python(TALKS, *args, **dict.fromkeys(streams, handle))
    finally:
        os.close(handle)
    assert (tmp_path / "done").exists()
    assert done.returncode == code
    assert_clean((done.stderr or b"").decode())


FULL = """
import errno, io, os, sys
class Full(io.RawIOBase):
    def writable(self): return True
    def write(self, data): raise OSError(errno.ENOSPC, "No space left on device")
    def fileno(self): return os.dup(2)
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Full()), line_buffering=True)
"""


def test_a_full_stderr_does_not_change_the_exit_code(tmp_path):
    done = python(FULL + TALKS, "fails")
    assert (done.returncode, (tmp_path / "done").exists()) == (3, True), done.stderr


def test_a_closed_standard_stream_is_never_taken_by_a_file(tmp_path):
    code = (
        "import os, sys\nfrom ipucnn import cli\n"
        "def work(args):\n"
        "    with open('data', 'w') as file: assert file.fileno() > 2\n"
        "    os.write(2, b'what a library prints')\n"
        "    return 0\n"
        "cli._dispatch = work\ncli.main([])"
    )
    line = 'exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", line, sys.executable, code], timeout=60)
    assert done.returncode == 0 and (tmp_path / "data").read_text() == ""


@pytest.mark.slow
def test_training_finishes_without_a_reader(tmp_path):
    handle = pipe_without_reader()
    try:
        done = python(PROGRAM, *SMALL, "--run-dir", "r", stdout=handle, stderr=handle)
    finally:
        os.close(handle)
    assert done.returncode == 0
    assert (tmp_path / "r" / "report.json").exists() and (
        tmp_path / "r" / "checkpoints" / "last.npz"
    ).exists()


# -- signals in this process ----------------------------------------------------------------------------------


def training(folder, **more):
    options = {"dataset": "digits", "micro_batch_size": "8", "limit_train": "64", "limit_eval": "8"}
    options = {**options, "num_epochs": "2", "seed": "3", "run_dir": str(folder), **more}
    return TrainingRun(resolve("train", options, model="toy_model"))


def interrupted(run):
    """Returns the interruption that ends a run."""
    with pytest.raises(Interrupted) as caught:
        list(run.events())
    return caught.value


def lets_pass(kill):
    kill()


def wraps(kill):
    try:
        kill()
    except BaseException as error:
        raise RuntimeError("Exception encountered when calling layer") from error


def swallows(kill):
    with contextlib.suppress(BaseException):
        kill()


@pytest.mark.parametrize(
    "number, library",
    [
        (signal.SIGINT, lets_pass),
        (signal.SIGTERM, wraps),
        (signal.SIGINT, swallows),
    ],
)
def test_signal_while_the_network_is_traced(tmp_path, monkeypatch, number, library):
    def loss(*values):
        library(lambda: os.kill(os.getpid(), number))
        return real(*values)

    real = Loss.__call__
    monkeypatch.setattr(Loss, "__call__", loss)
    monkeypatch.setattr(UpdateLoop, "run", lambda *_: pytest.fail("a weight update was computed"))
    error = interrupted(training(tmp_path / "r"))
    assert error.exit_code == CODES[number] and "trained nothing" in error.message
    assert not (tmp_path / "r").exists()
    assert interrupts.noted() is None


@pytest.mark.parametrize(
    "owner, name, ends_at_once, number",
    [
        (setup, "build", True, signal.SIGTERM),
        (RunWriter, "add_environment", False, signal.SIGHUP),
    ],
)
def test_signal_before_training_leaves_nothing(tmp_path, monkeypatch, owner, name, ends_at_once, number):
    """The network is built, or the folder is made."""
    real = getattr(owner, name)

    def signalled(*args):
        os.kill(os.getpid(), number)
        assert not ends_at_once
        return real(*args)

    monkeypatch.setattr(owner, name, signalled)
    monkeypatch.setattr(UpdateLoop, "run", lambda *_: pytest.fail("a weight update was computed"))
    assert interrupted(training(tmp_path / "r")).exit_code == CODES[number]
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_signal_before_a_continued_run_leaves_it_unchanged(tmp_path, monkeypatch):
    events = training(tmp_path / "r").events()
    for _ in range(3):
        next(events)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted):
        list(events)
    before = (tmp_path / "r" / "checkpoints" / "last.npz").read_bytes()

    def trace(*_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(UpdateLoop, "trace", trace)
    assert "--resume" in interrupted(training(tmp_path / "r", resume=True)).hint
    assert (tmp_path / "r" / "checkpoints" / "last.npz").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    list(training(tmp_path / "r", resume=True).events())


def test_signal_outside_the_command_ends_with_its_code():
    code = "import os, signal; from ipucnn import cli; cli.run = lambda args: os.kill(os.getpid(), signal.SIGTERM)"
    assert python(f"{code}; cli.main([])").returncode == 143


def test_signal_at_the_last_moment_is_not_lost(lightly, tmp_path, monkeypatch):
    real = RunWriter.write_report

    def write(folder, report):
        os.kill(os.getpid(), signal.SIGTERM)
        real(folder, report)

    monkeypatch.setattr(RunWriter, "write_report", write)
    error = interrupted(training(tmp_path / "r"))
    assert error.exit_code == 143 and "everything was done" in error.message
    assert (tmp_path / "r" / "report.json").exists()


def test_ignored_signal_stays_ignored(tmp_path):
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.InterruptGuard() as guard:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not guard.is_set
    finally:
        signal.signal(signal.SIGHUP, former)


def test_errors_while_saving_are_reported():
    with pytest.raises(errors.DataError), interrupts.InterruptGuard() as guard:
        guard.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        raise errors.DataError("disk full")


def test_second_signal_ends_immediately():
    with pytest.raises(Interrupted) as caught, interrupts.InterruptGuard() as guard:
        guard.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.exit_code == 143
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")
    assert "at once" in caught.value.message


# -- signals in a process of its own --------------------------------------------------------------------------

# Sends a signal to itself when something happens for the first time.
AT_IMPORT = """
import os, sys
number, name = int(sys.argv.pop(1)), sys.argv.pop(1)
class Finder:
    @staticmethod
    def find_spec(module, path=None, target=None):
        if module == name:
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder)
"""
FINALIZER = """
import gc, os, signal, sys, time
from ipucnn import cli
class Cell:
    def __del__(self): os.kill(os.getpid(), signal.SIGTERM); time.sleep(0)
def work(args):
    Cell(); gc.collect()
    print("working", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(3000): time.sleep(0.01)
    return 0
cli._dispatch = work
cli.main([])
"""
AT_EXIT = """
import atexit, os, signal, sys
from ipucnn import cli
cli._dispatch = lambda args: 0
atexit.register(lambda: [os.kill(os.getpid(), n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
cli.main([])
"""


@pytest.mark.slow_cases("2-tensorflow.python.framework.ops")
@pytest.mark.parametrize(
    "number, module",
    [
        (signal.SIGTERM, "ipucnn.cli"),
        (signal.SIGINT, "typer"),
        (signal.SIGHUP, "numpy"),
        (signal.SIGINT, "tensorflow.python.framework.ops"),
    ],
)
def test_signal_while_a_library_is_imported(tmp_path, number, module):
    done = python(AT_IMPORT + PROGRAM, str(int(number)), module, *SMALL, "--run-dir", "r")
    assert done.returncode == CODES[number], done.stderr
    assert_clean(done.stderr.decode())
    assert done.stderr.decode().splitlines()[-1].startswith(("interrupted", "error: interrupted"))
    assert not (tmp_path / "r").exists()


def test_a_second_signal_ends_work_whose_first_one_a_finalizer_dropped():
    done = python(FINALIZER)
    assert (done.returncode, done.stderr.decode()) == (143, "interrupted\n")


def test_signal_after_the_end_changes_nothing():
    done = python(AT_EXIT)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_signal_ends_a_real_run_with_a_usable_checkpoint(report, tmp_path):
    """A process, started as users start it, gets a signal from outside while it computes weight updates."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ipucnn", *SMALL[:-1], "100000", "--run-dir", "r"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 240
    # One epoch is recorded, and thousands are to come.
    while not (tmp_path / "r" / "metrics.jsonl").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == CODES[signal.SIGTERM], err
    assert_clean(err.decode())
    assert "interrupted" in err.decode()
    saved = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz").meta["weight_updates"]
    per_epoch = json.loads((tmp_path / "r" / "program.json").read_text())["weight_updates_per_epoch"]
    # Nothing that was computed and reported is lost.
    trained = max(row["samples"] for row in rows("r", "execution"))
    assert saved > 0 and saved * 64 == trained * per_epoch
    epochs = saved // per_epoch + 1
    continued = report("train", "--resume", "--run-dir", "r", "--num-epochs", epochs)
    assert continued["measured"]["first_weight_update"] == saved
    assert (
        load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz").meta["weight_updates"]
        == epochs * per_epoch
    )


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_too_little_address_space_is_reported_before_tensorflow_is_imported(tmp_path):
    resource = pytest.importorskip("resource")
    limit = 1_600_000 * 1024  # with a little less, the import fails now and then
    done = python(
        PROGRAM,
        *SMALL,
        "--run-dir",
        "r",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    lines = done.stderr.decode().splitlines()
    assert done.returncode == errors.EXIT_MISSING, lines
    assert lines[0].startswith("error: this process may use 1.53 GiB of address space")
    assert lines[1].startswith("hint: ") and len(lines) == 2
    assert not (tmp_path / "r").exists()


@pytest.fixture
def not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)


def test_less_memory_than_tensorflow_takes_is_refused(not_imported, monkeypatch):
    for name, least in (
        ("address_space_bytes", environment.LEAST_ADDRESS_SPACE_BYTES),
        ("available_bytes", environment.LEAST_MEMORY_BYTES),
    ):
        monkeypatch.setattr(environment, name, lambda least=least: least)
        environment.check_memory()
        monkeypatch.setattr(environment, name, lambda least=least: least - 1)
        check_raises(errors.MissingError, "TensorFlow alone takes", "", environment.check_memory)
        monkeypatch.setattr(environment, name, lambda least=least: least)


# -- libraries that block Python -------------------------------------------------------------------------------

HELD_UP = """
import ctypes, sys
from ipucnn import interrupts
interrupts.listen()
interrupts.begin()
with interrupts.left_to_the_system(int(sys.argv[1])):
    print("held up", flush=True)
    ctypes.PyDLL(None).sleep(120)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may lack the alarm")
@pytest.mark.parametrize(("seconds", "sent"), [(100, signal.SIGTERM), (1, None)])
def test_a_process_blocked_in_c_code_can_be_ended(seconds, sent):
    """MPI waits without releasing Python's interpreter lock while it connects processes."""
    process = subprocess.Popen([sys.executable, "-c", HELD_UP, str(seconds)], stdout=subprocess.PIPE)
    if sent is not None:
        assert process.stdout.readline() == b"held up\n"
        process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == -(sent or signal.SIGALRM)


def test_a_lost_process_is_reported_while_tensorflow_is_imported(capfd):
    """Output of C++ is diverted during the import; the line that says why the process ends is not."""
    with environment.stderr_aside(shown_if_failed=False):
        os.write(2, b"noise\n")
        interrupts.write_to_stderr("error: rank 1 did not answer\n")
    interrupts.write_to_stderr("hint: x\n")
    assert capfd.readouterr().err == "error: rank 1 did not answer\nhint: x\n"
