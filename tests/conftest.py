"""Set-up for all tests: a quiet TensorFlow, few threads, and a deterministic Hypothesis profile."""

import collections
import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import few_examples
import pytest
from hypothesis import HealthCheck, settings

from ipucnn import interrupts, machine
from ipucnn.datasets.segmentation import membranes
from ipucnn.filesystem import private_cache_folder
from ipucnn.sessions.host.environment import set_variables

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# A shell script starts background jobs with SIGINT ignored; the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP, which ipucnn respects.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def _keep_byte_code() -> None:
    """Writes the byte code of TensorFlow to a folder of the tests if the installation has none.

    Some installers (uv) write none, and some users disable it: each process that imports TensorFlow then compiles it,
    which takes ten seconds of processor time, and tests start dozens of processes.
    """
    spec = importlib.util.find_spec("tensorflow")
    if sys.pycache_prefix is not None or spec is None or spec.origin is None:
        return
    if not os.path.exists(importlib.util.cache_from_source(spec.origin)):
        folder = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "bytecode")
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


_keep_byte_code()
set_variables()  # the same kernels as in a run, whichever test imports TensorFlow first

# Files of tests need not survive a power cut, and each fsync takes 6 ms.
os.fsync = lambda handle: None

settings.register_profile(
    "ipucnn", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ipucnn")


def pytest_configure(config):
    """Sets whether slow tests are left out before tests that declare two numbers of examples are imported."""
    few_examples.slow_are_left_out = config.getoption("markexpr") in ("not slow", "quick")


def pytest_collection(session):
    """Imports a share of the tests in each of xdist's processes first: the other processes read their byte code.

    In a new clone each process would otherwise compile all tests, in the same order at the same time.
    """
    gc.disable()  # modules make hundreds of thousands of objects, and no garbage
    worker = getattr(session.config, "workerinput", None)
    if worker is not None and list(session.config.args) == ["tests"]:
        number, count = int(worker["workerid"][2:]), worker["workercount"]
        for path in sorted(Path(__file__).parent.glob("test_*.py"))[number::count]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it shows them
                importlib.import_module(path.stem)


def pytest_collection_finish():
    """Excludes the objects of imported modules from garbage collection.

    TensorFlow and the tests are half a million objects, and Keras collects garbage whenever its session is cleared.
    With Python's own threshold of 700 objects, collections take an eighth of the processor time.
    """
    gc.set_threshold(20_000, 20, 20)
    gc.collect()
    gc.freeze()
    gc.enable()


_DURATIONS = Path(__file__).parent / "durations.json"
_QUICK_S = 3
"""The most seconds of a file of the tier ``quick``: all of them together take less than a minute on two cores."""


def pytest_addoption(parser):
    parser.addoption(
        "--store-durations", action="store_true", help="Write the seconds of each file to durations.json."
    )


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--store-durations"):
        seconds = collections.Counter()
        for reports in terminalreporter.stats.values():
            for one in reports:
                if hasattr(one, "duration"):
                    seconds[one.nodeid.partition("::")[0].rsplit("/", 1)[-1]] += one.duration
        whole = {name: round(taken) for name, taken in sorted(seconds.items())}
        _DURATIONS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Schedules files as ``--dist loadfile`` does, except that the longest files come first.

    Started last, one of them would keep one process busy while the others are idle.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    seconds = json.loads(_DURATIONS.read_text(encoding="utf-8"))

    class LongestFirst(LoadFileScheduling):
        def _assign_work_unit(self, node):
            longest = max(
                self.workqueue, key=lambda scope: seconds.get(scope.rsplit("/", 1)[-1], float("inf"))
            )
            self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


_collected_s = [0.0]


@pytest.fixture(autouse=True, scope="module")
def leftovers_out_of_the_way():
    """Excludes objects that earlier files left in caches from later garbage collections.

    Files that took less than two seconds of processor time are skipped: they cannot have left much.
    """
    if time.process_time() - _collected_s[0] > 2:
        gc.collect()
        gc.freeze()
        _collected_s[0] = time.process_time()


@pytest.fixture(autouse=True, scope="session")
def graph_cache(tmp_path_factory):
    """Keeps a cache of layer graphs for the tests alone, so that each graph is built once for all of them."""
    before = os.environ.get("IPUCNN_CACHE_DIR")
    # Numba keeps its usual cache: otherwise each test process would compile everything anew.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(private_cache_folder("numba") or ""))
    os.environ["IPUCNN_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["IPUCNN_CACHE_DIR"]
    else:
        os.environ["IPUCNN_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def signals_as_at_first():
    """Restores the signal handlers: a command that ended in this process may have left signals ignored or recorded."""
    interrupts._state.__dict__.clear()
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


# A command fixes the threads of its process; here many commands share one, and TensorFlow keeps those of the first.
# Module fixtures, which also train, run before the fixtures of single tests.
_NUM_CORES = machine.num_cores()
machine.fix_threads(_NUM_CORES)


@pytest.fixture(autouse=True)
def threads_as_at_first():
    yield
    machine.fix_threads(_NUM_CORES)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Makes an empty folder the current one, and returns it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder and returns (exit code, stdout, stderr); a traceback fails the test.

    Without ``columns`` it has the width of output that goes to no terminal.
    """
    from ipucnn import cli

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)

    def call(*args, columns=100):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        code = cli.run([str(a) for a in args])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err, captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture
def succeeds(run):
    """Runs a command that succeeds, and returns (stdout, stderr)."""

    def call(*args, **options):
        code, out, err = run(*args, **options)
        assert code == 0, err
        return out, err

    return call


@pytest.fixture
def report(succeeds):
    """Runs a command that succeeds, with ``--json``, and returns the document that it prints."""

    def call(*args):
        return json.loads(succeeds(*args, "--json")[0])

    return call


@pytest.fixture(scope="module")
def membranes_once():
    """Draws the data set ``membranes`` once for each size, whatever the seed, instead of once for each command.

    Thirty images of 204x204 pixels take half a second.  Tests of the drawing itself do not use this fixture.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            membranes, "open_membranes", lambda height, width, seed: _opened_membranes(height, width)
        )
        yield


_opened_membranes = functools.lru_cache(maxsize=8)(membranes.open_membranes)


@pytest.fixture
def lightly(monkeypatch):
    """Makes runs of this process train without compiling anything, see ``light_training``.

    Uses the test's monkeypatch: if there were two, the one undone last would restore the patches of the other.
    """
    from light_training import train_lightly

    train_lightly(monkeypatch)


@pytest.fixture
def in_this_process(monkeypatch):
    """Opens exported files in this process: starting a process for them takes most of the time."""
    from ipucnn.runs import runtimes, verification

    monkeypatch.setattr(verification, "RuntimeProcess", runtimes.load)


@pytest.fixture
def short_benchmarks(monkeypatch):
    """Makes benchmarks of this process measure as briefly as possible, see ``light_training``."""
    from light_training import benchmark_briefly

    benchmark_briefly(monkeypatch)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Starts as many processes as there are cores: each imports TensorFlow and all tests, which takes 15 seconds."""
    return os.cpu_count() or 1


def pytest_make_parametrize_id(val):
    """Names signals by number on every Python, so that cases can be named, and cuts long texts."""
    if isinstance(val, str) and len(val) > 200:
        return f"{ascii(val[:40])[1:-1]}...({len(val)} characters)"
    return str(int(val)) if isinstance(val, signal.Signals) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks as slow the cases that ``@pytest.mark.slow_cases("ID", ...)`` names: they have cheaper ones beside them.

    Tests that are not slow, in files that take at most ``_QUICK_S`` seconds, are marked as quick.
    """
    cases = collections.defaultdict(dict)
    for item in items:
        for mark in item.iter_markers("slow_cases"):
            cases[item.nodeid.partition("[")[0], mark.args][item.callspec.id] = item
    for (name, slow_ids), items_by_id in cases.items():
        absent = set(slow_ids) - set(items_by_id)
        if absent and not (any("::" in word for word in config.args) or config.getoption("lf", False)):
            raise pytest.UsageError(f"slow_cases of {name}: there are no {sorted(absent)}")
        for identity in set(slow_ids) & set(items_by_id):
            items_by_id[identity].add_marker(pytest.mark.slow)
    seconds = json.loads(_DURATIONS.read_text(encoding="utf-8"))
    for item in items:
        if seconds.get(item.path.name, float("inf")) <= _QUICK_S and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.quick)
