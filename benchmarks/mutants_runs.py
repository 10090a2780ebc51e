"""Runs chosen tests of copies of a tree in forked processes, for ``mutants.py``.

This process imports TensorFlow and the other libraries once, and nothing of the package.  It forks a process for each
run of tests, which imports the package and the tests from its copy of the tree.
"""

import contextlib
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Generator, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

import mutants_recorder
import psutil
import pytest

# A test counts as endless after this many seconds plus this many times its unchanged duration.
LEAST_S, PATIENCE = 60.0, 10.0
# The time limit before the first test, for the import of the package and of the tests.
IMPORT_S = 300.0
_MARK = "IPUCNN_MUTANTS"
# Folders of the repository that are not copied.
_IGNORED = (".git", "build", "dist", ".venv", "venv", "runs", ".hypothesis")


class Run(NamedTuple):
    """Tests to run in a slot's tree.

    Attributes:
        tests: names as pytest writes them, in the order to run them in, with the seconds each took unchanged; None: all
            of ``files``, while the lines that they execute are recorded.
        files: the test files.
        modules: the modules to record: file by name.
    """

    files: List[str]
    tests: Optional[Dict[str, float]] = None
    modules: Dict[str, str] = {}


class Outcome(NamedTuple):
    """How a run ended: "passed", "failed" or "endless", and the test responsible; the output is in the slot's log."""

    kind: str
    test: str


class Slot:
    """A copy of a tree with a folder of its own, in which one process at a time runs tests."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = source
        self.folder = folder
        self.tree = folder / "tree"
        self.log = folder / "log"
        self.progress = folder / "progress"
        self.mark = f"{_MARK}-{uuid.uuid4().hex}"
        self.run: Optional[Run] = None
        self._pid = 0
        self._since = 0.0
        self._times = 0
        shutil.copytree(str(source), str(self.tree), ignore=self._ignored, symlinks=True)
        beside = source.parent / "shared"
        if beside.is_dir():
            (folder / "shared").symlink_to(beside.resolve())

    def _ignored(self, folder: str, names: List[str]) -> List[str]:
        ignored = _IGNORED if folder == str(self.source) else ()
        return [name for name in names if name in ignored or name == "__pycache__" or name.endswith("_cache")]

    def write(self, name: str, text: str) -> None:
        """Replaces a module's text in a way that never reuses the byte code of another text."""
        path = self.tree / name
        path.write_text(text, encoding="utf-8")
        self._times += 1
        os.utime(path, (self._times, self._times))

    def begin(self, run: Run) -> None:
        """Forks the process of a run."""
        for name in ("tmp", "hits", "context"):
            with contextlib.suppress(FileNotFoundError):
                path = self.folder / name
                shutil.rmtree(str(path), ignore_errors=True) if path.is_dir() else path.unlink()
        (self.folder / "tmp").mkdir(exist_ok=True)
        self.progress.write_text("", encoding="utf-8")
        self.run, self._since = run, time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            _in_child(self, run)

    def ended(self) -> Optional[Outcome]:
        """Returns how the run ended, None while it goes on."""
        assert self.run is not None
        # The progress is read after the process was checked: if it ended meanwhile, that is harmless.
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        lines = self.progress.read_text(encoding="utf-8").splitlines()
        failed = [line[len("failed ") :] for line in lines if line.startswith("failed ")]
        if pid == 0:
            begun = [line.split(" ", 2) for line in lines if line.startswith("begin ")]
            since = float(begun[-1][1]) if begun else self._since
            test = begun[-1][2] if begun else ""
            took = None if self.run.tests is None else self.run.tests.get(test, 0.0)
            limit_s = 7200.0 if took is None else max(LEAST_S + PATIENCE * took, 0.0 if begun else IMPORT_S)
            if time.monotonic() - since < limit_s:
                return None
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._sweep()
            return Outcome("endless", test)
        self._sweep()
        if failed:
            return Outcome("failed", failed[0])
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        return Outcome(
            "passed" if code in (0, 5) else "failed", "" if code in (0, 5) else f"exit code {code}"
        )

    def stop(self) -> None:
        """Ends the run."""
        if self.run is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._sweep()

    def _sweep(self) -> None:
        """Ends processes left behind by the tests: forked ones, and those started with this slot's mark."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self.mark:
                    process.kill()


def _in_child(slot: Slot, run: Run) -> None:
    """Runs the tests; does not return."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(str(slot.log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for handle, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(handle, target)
        os.environ.update(
            PYTHONPATH=str(slot.tree), TMPDIR=str(slot.folder / "tmp"), TF_CPP_MIN_LOG_LEVEL="3",
            CUDA_VISIBLE_DEVICES="-1",
        )  # fmt: skip
        os.environ[_MARK] = slot.mark
        tempfile.tempdir = None
        os.chdir(slot.tree)
        sys.path[:] = [str(slot.tree)] + [
            path for path in sys.path if path and path != str(Path(__file__).parent)
        ]
        sys.argv = ["pytest"]
        plugin: Any
        if run.tests is None:
            recorder = mutants_recorder.install(str(slot.folder), run.modules)
            recorder.lead()
            mutants_recorder.note_caches(recorder)
            plugin, more = _Noting(slot, recorder), []
        else:
            plugin, more = _Chosen(slot, list(run.tests)), ["-x"]
        code = int(pytest.main([*more, "-n", "0", "-p", "no:cacheprovider", *run.files], plugins=[plugin]))
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


class _Chosen:
    """Runs the chosen tests of those that pytest collected, in the given order."""

    def __init__(self, slot: Slot, tests: List[str]) -> None:
        self._progress = open(slot.progress, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until the end
        self._order = {test: at for at, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: List[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._progress.write(f"begin {time.monotonic()} {nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._progress.write(f"failed {report.nodeid}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._progress.write(f"failed collecting {report.nodeid}\n")


class _Noting:
    """Reports the running test and shared fixtures to the recorder, and measures how long each takes."""

    def __init__(self, slot: Slot, recorder: mutants_recorder.Recorder) -> None:
        from _pytest.fixtures import FixtureDef

        self._slot, self._recorder = slot, recorder
        self._seconds: Dict[str, float] = {}
        self._shared_s = 0.0  # seconds of the shared fixtures within the present test
        self._failed: Set[str] = set()
        self._complete = True
        original = FixtureDef.execute

        def execute(definition: Any, request: Any) -> Any:
            if definition.scope != "function":
                recorder.counts(_fixture(definition))
            return original(definition, request)

        FixtureDef.execute = execute  # type: ignore

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        name, begin = _fixture(fixturedef), time.monotonic()
        try:
            with self._recorder.context(name):
                return (yield)
        finally:
            took = time.monotonic() - begin
            self._seconds[name] = max(took, self._seconds.get(name, 0.0))
            self._shared_s += took

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin, self._shared_s = time.monotonic(), 0.0
        with self._recorder.context(item.nodeid):
            result = yield
        self._seconds[item.nodeid] = max(0.0, time.monotonic() - begin - self._shared_s)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._complete = self._complete and not report.failed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._recorder.flush()
        noted = {
            "complete": self._complete,
            "seconds": self._seconds,
            "failed": sorted(self._failed),
            "tests": [i.nodeid for i in session.items],
        }
        (self._slot.folder / "noted.json").write_text(json.dumps(noted), encoding="utf-8")


def _fixture(definition: Any) -> str:
    return f"fixture {definition.baseid}::{definition.argname}"


Task = Generator[Run, Outcome, None]


def run_all(slots: List[Slot], tasks: Iterable[Callable[[Slot], Task]], until: float) -> None:
    """Runs tasks, each in one slot; begins none after ``until`` of the monotonic clock.

    A task yields its runs, one after another, and receives the outcome of each.
    """
    waiting = iter(tasks)
    busy: Dict[int, Task] = {}
    exhausted = False
    try:
        while busy or not exhausted:
            for at, slot in enumerate(slots):
                while at not in busy and not exhausted:
                    chosen = next(waiting, None) if time.monotonic() < until else None
                    if chosen is None:
                        exhausted = True
                        break
                    busy[at] = chosen(slot)
                    _go_on(busy, at, slot, None)
                outcome = slot.ended() if at in busy else None
                if outcome is not None:
                    _go_on(busy, at, slot, outcome)
            time.sleep(0.05)
    finally:
        for at, task in busy.items():
            slots[at].stop()
            task.close()


def _go_on(busy: Dict[int, Task], at: int, slot: Slot, outcome: Optional[Outcome]) -> None:
    try:
        slot.begin(next(busy[at]) if outcome is None else busy[at].send(outcome))
    except StopIteration:
        del busy[at]


def prepare(tree: Path) -> None:
    """Imports the libraries as the tests would, with the same variables, so that every run has them."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    sys.path.insert(0, str(tree))
    try:
        from ipucnn.sessions.host.environment import set_variables

        set_variables()
    finally:
        sys.path.remove(str(tree))
    for name in [name for name in sys.modules if name.split(".")[0] == "ipucnn"]:
        del sys.modules[name]
    import hypothesis
    import jinja2
    import keras
    import matplotlib
    import msgspec
    import PIL.Image
    import rich.console
    import scipy.stats
    import sklearn
    import tensorflow
    import typer
    import yaml

    assert all(
        (hypothesis, jinja2, keras, matplotlib, msgspec, PIL, rich, scipy, sklearn, tensorflow, typer, yaml)
    )
    gc.collect()
    gc.freeze()


class Reached(NamedTuple):
    """The lines that the tests of one file execute.

    Attributes:
        seconds: each test's duration with the fixtures it needs.
        lines: each test's lines by module; ``import`` has those that run when modules are imported.
        failed: the tests that fail unchanged when they run in this way; they kill nothing.
    """

    seconds: Dict[str, float]
    lines: Dict[str, Dict[str, List[int]]]
    failed: List[str]


def digest_of(tree: Path, file: str) -> str:
    """Returns the digest of everything that a record of a test file depends on."""
    digest = hashlib.sha256()
    helpers = [path for path in (tree / "tests").glob("*.py") if not path.name.startswith("test_")]
    for path in sorted((tree / "ipucnn").rglob("*.py")) + sorted(helpers) + [tree / file]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def record(tree: Path, file: str, modules: Dict[str, str], kept: Path) -> Callable[[Slot], Task]:
    """Makes a task that runs a test file once and saves the lines that its tests execute, see ``Reached``."""
    digest = digest_of(tree, file)

    def task(slot: Slot) -> Task:
        name = "ipucnn/__init__.py"
        text = (tree / name).read_text(encoding="utf-8")
        source = str(Path(mutants_recorder.__file__).resolve())
        line = f"import runpy; runpy.run_path({source!r})['install']({str(slot.folder)!r}, {modules!r}); del runpy\n"
        slot.write(name, f"{text}\n{line}")
        (slot.folder / "noted.json").unlink(missing_ok=True)
        try:
            outcome = yield Run([file], modules=modules)
        finally:
            slot.write(name, text)
        path = slot.folder / "noted.json"
        noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"complete": False}
        if not noted["complete"]:
            print(slot.log.read_text(encoding="utf-8", errors="replace")[-3000:])
            sys.exit(f"{file} cannot be run: {outcome.kind} {outcome.test}")
        reached = _read_notes(slot.folder / "hits", noted)
        if reached.failed:
            shutil.copy(str(slot.log), str(kept.with_suffix(".log")))
        kept.write_text(json.dumps({"digest": digest, **reached._asdict()}), encoding="utf-8")

    return task


def _read_notes(hits: Path, noted: Dict[str, Any]) -> Reached:
    lines_of: Dict[str, Set[Tuple[str, int]]] = {}
    more: Dict[str, Set[str]] = {}
    text = hits.read_text(encoding="utf-8", errors="replace") if hits.is_file() else ""
    for row in text.splitlines():
        context, module, rest = row.split("\t")
        if module == ">":
            more.setdefault(context, set()).add(rest)
        else:
            lines_of.setdefault(context, set()).add((module, int(rest)))
    reached = Reached({}, {}, noted["failed"])
    for test in [mutants_recorder.IMPORT, *noted["tests"]]:
        needed, waiting = {test}, [test]
        while waiting:
            for other in more.get(waiting.pop(), set()) - needed:
                needed.add(other)
                waiting.append(other)
        reached.seconds[test] = round(sum(noted["seconds"].get(name, 0.0) for name in needed), 3)
        lines: Dict[str, List[int]] = {}
        for module, line in sorted(set().union(*(lines_of.get(name, set()) for name in needed))):
            lines.setdefault(module, []).append(line)
        reached.lines[test] = lines
    return reached
