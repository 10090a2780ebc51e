"""Shared by all tests: a quiet TensorFlow, few threads, and a deterministic Hypothesis profile."""

import functools
import gc
import importlib.util
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

# In the background of a script Ctrl-C is ignored, also by the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup the closing of the terminal is, which ipucnn respects.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def _keep_byte_code() -> None:
    """Byte code of TensorFlow is written here once if its own folder has none.

    Some installers write none (uv), and some users let Python write none: then each process that imports TensorFlow
    compiles it, which takes ten seconds of processor time, and tests start dozens of them.
    """
    found = importlib.util.find_spec("tensorflow")
    if sys.pycache_prefix is not None or found is None or found.origin is None:
        return
    if not os.path.exists(importlib.util.cache_from_source(found.origin)):
        folder = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "bytecode")
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


_keep_byte_code()
set_variables()  # the same kernels as in a run, whichever test imports TensorFlow first

# Nothing that a test writes has to survive a power cut, and waiting for the disk takes 6 ms each time.
os.fsync = lambda handle: None

settings.register_profile(
    "ipucnn", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ipucnn")


def pytest_configure(config):
    """Says how many examples are wanted before tests that declare two numbers of them are imported."""
    few_examples.slow_are_left_out = "not slow" in config.getoption("markexpr")


def pytest_collection():
    gc.disable()  # modules make hundreds of thousands of objects, and no garbage


def pytest_collection_finish():
    """Takes what the imports left out of the garbage collector's way.

    TensorFlow and the tests are half a million objects, and Keras collects garbage whenever its session is cleared.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    _note_one_stack()


def _note_one_stack():
    """Each operation that TensorFlow records is given the same stack of Python calls, in place of its own.

    TensorFlow keeps the stack for its error messages alone.  Here the fifty calls of pytest lie under every stack, and
    walking them takes an eighth of the processor time of recording a network.
    """
    tf_stack = sys.modules.get("tensorflow.python.util.tf_stack")
    if tf_stack is not None:
        stack = tf_stack.extract_stack()
        tf_stack.extract_stack = lambda *_, **__: stack


# What takes more than six seconds of processor time, longest first: begun last, it would keep one process busy while
# the others have nothing to do.  Before them comes what starts hundreds of small processes: on Python 3.8 each one
# copies the tables of this process's memory, which grows.
_LONGEST = (
    "test_doctor.py",
    "test_models_build.py",
    "test_poplar_cli.py",
    "test_runs_resume.py",
    "test_benchmark_command.py",
    "test_runs_masks.py",
    "test_runs_exchange.py",
    "test_training_recipes.py",
    "test_runs_evaluate.py",
    "test_export.py",
    "test_runs_segmentation.py",
    "test_host_precision.py",
    "test_plan_splits_command.py",
    "test_signals_and_streams.py",
    "test_verify_dataset.py",
    "test_cluster.py",
    "test_runs_infer.py",
    "test_poplar_session.py",
    "test_host_session.py",
    "test_poplar_instances.py",
    "test_train_dry_run.py",
    "test_runs_kfold.py",
    "test_training_padding.py",
    "test_public_configuration.py",
    "test_own_networks.py",
    "test_poplar_mutations.py",
    "test_custom_batch_norm.py",
    "test_devices.py",
    "test_benchmark_suites.py",
    "test_datasets_pipeline.py",
    "test_untrusted_folder.py",
    "test_planning_search.py",
    "test_reports_plan_html.py",
    "test_screens.py",
    "test_cli_main.py",
    "test_precise_batch_norm.py",
    "test_config_effects.py",
    "test_poplar_matrix.py",
    "test_runs_folder.py",
    "test_poplar_parts.py",
    "test_fine_tuning.py",
    "test_runs_ending.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files are handed out as ``--dist loadfile`` hands them out, but for the longest ones, which come first."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _assign_work_unit(self, node):
            waiting = {scope.rsplit("/", 1)[-1]: scope for scope in self.workqueue}
            chosen = next((waiting[name] for name in _LONGEST if name in waiting), None)
            if chosen is not None:
                self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


_collected_s = [0.0]


@pytest.fixture(autouse=True, scope="module")
def leftovers_out_of_the_way():
    """What the files before left in caches is not looked through again by every collection of the files after them.

    Not after a file that took less than two seconds of processor time, which can't have left much.
    """
    if time.process_time() - _collected_s[0] > 2:
        gc.collect()
        gc.freeze()
        _collected_s[0] = time.process_time()


@pytest.fixture(autouse=True, scope="session")
def graph_cache(tmp_path_factory):
    """Layer graphs are cached for the tests alone, and built once for all of them."""
    before = os.environ.get("IPUCNN_CACHE_DIR")
    # What Numba compiled stays where it is: the tests' processes would each compile it anew.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(private_cache_folder("numba") or ""))
    os.environ["IPUCNN_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["IPUCNN_CACHE_DIR"]
    else:
        os.environ["IPUCNN_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def signals_as_at_first():
    """A command that ended in this process, or a test of one, may have left signals ignored or noted."""
    interrupts._state.__dict__.clear()
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


# A command fixes the threads of its process; here many commands share one, and TensorFlow keeps those of the first.
# Fixtures of whole modules train, too, before those of single tests.
machine.fix_threads(machine.num_cores())


@pytest.fixture(autouse=True)
def threads_as_at_first():
    yield
    machine.fix_threads(machine.num_cores())


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder: (exit code, stdout, stderr); a traceback fails the test."""
    from ipucnn import cli

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)

    def call(*args, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        code = cli.run([str(a) for a in args])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def membranes_once():
    """The set ``membranes`` is drawn once for each size and seed, not by each command of these tests anew.

    Thirty images of 204x204 pixels take half a second.  Tests of the drawing itself do without.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membranes, "open_membranes", _opened_membranes)
        yield


_opened_membranes = functools.lru_cache(maxsize=8)(membranes.open_membranes)


@pytest.fixture
def lightly(monkeypatch):
    """Runs of this process train without compiling anything, see ``light_training``.

    With the test's own monkeypatch: of two, the one undone last would leave behind what the other had put there.
    """
    from light_training import train_lightly

    train_lightly(monkeypatch)


@pytest.fixture
def short_benchmarks(monkeypatch):
    """Benchmarks of this process measure next to nothing, see ``light_training``."""
    from light_training import benchmark_briefly

    benchmark_briefly(monkeypatch)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One process more than cores: tests wait for disks, signals and other processes."""
    return (os.cpu_count() or 1) + 1


def pytest_make_parametrize_id(val):
    """Signals go by their numbers on every Python; ``slow_cases.txt`` names cases so.  Long texts are cut."""
    if isinstance(val, str) and len(val) > 200:
        return f"{ascii(val[:40])[1:-1]}...({len(val)} characters)"
    return str(int(val)) if isinstance(val, signal.Signals) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the cases of ``slow_cases.txt`` as slow: those that have cheaper ones beside them."""
    lines = (Path(__file__).parent / "slow_cases.txt").read_text(encoding="utf-8").splitlines()
    slow = {line for line in lines if not line.startswith("#")}
    if not (any("::" in word for word in config.args) or config.getoption("lf", False)):
        collected = {item.nodeid for item in items}
        files = {name.split("::")[0] for name in collected}
        stale = sorted(name for name in slow - collected if name.split("::")[0] in files)
        if stale:
            raise pytest.UsageError(
                f"tests/slow_cases.txt names cases that are not there: {', '.join(stale)}"
            )
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
