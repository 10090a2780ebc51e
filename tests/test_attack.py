"""The attack of ``benchmarks/attack.py`` in small: command lines in this process, and its judge."""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from few_examples import tries
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipucnn import cli, filesystem

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SECURITY = Path(__file__).resolve().parents[1] / "docs" / "security.md"


def _load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


inputs = _load("attack_inputs")
attack = _load("attack")
COMMANDS = inputs.declared_commands()


# -- command lines --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _away_from_home(sandbox, environment):
    """The working directory, variables and streams of a case; no program is started, no network is used."""
    before, folder = dict(os.environ), os.getcwd()
    streams = sys.stdout, sys.stderr
    os.environ.update(HOME=str(sandbox.home), TMPDIR=str(sandbox.tmp), NO_COLOR="1", COLUMNS="100")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ[name] = "http://127.0.0.1:9"
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    os.chdir(sandbox.work)
    sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    try:
        yield sys.stdout, sys.stderr
    finally:
        sys.stdout, sys.stderr = streams
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def _run_line(case, sandbox):
    """How a command line ends in this process; it ends where TensorFlow would be imported."""
    before = attack.snapshot(sandbox.guarded)
    gate = attack._TensorFlowGate(None, sandbox.root / "reached")
    loaded = sys.modules.pop("tensorflow", None)
    sys.meta_path.insert(0, gate)
    try:
        with _away_from_home(sandbox, case.environment) as (out, err):
            try:
                code = cli.run(case.args)
            except SystemExit as ending:
                code = ending.code
            except attack.ReachedTensorFlow:
                code = attack.REACHED_CODE
            out.flush()
            err.flush()
            printed = out.buffer.getvalue(), err.buffer.getvalue()
    finally:
        sys.meta_path.remove(gate)
        sys.modules.pop("tensorflow", None)
        if loaded is not None:
            sys.modules["tensorflow"] = loaded
    executed = tuple(attack._lines(sandbox.mark))
    return attack.Ending(code, *printed, "", before, attack.snapshot(sandbox.guarded), executed)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder for sandboxes; a FIFO is not waited for, and programs are not started."""

    def refuse(*_, **__):
        raise attack.ReachedTensorFlow

    monkeypatch.setattr(filesystem, "FIFO_WAIT_S", 0.05)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    # A terminal has a process of its own that reads what is written to it: not in a process with threads.
    monkeypatch.setattr(inputs, "_PATHS", [p for p in inputs._PATHS if p is not inputs._terminal])
    monkeypatch.setattr(
        inputs, "_READ_ONLY_PATHS", [p for p in inputs._READ_ONLY_PATHS if p is not inputs._good_run]
    )
    yield tmp_path
    attack.remove(tmp_path / "case")


_IN_ONE_PLACE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@tries(40, slow=150, suppress_health_check=_IN_ONE_PLACE)
@given(number=st.integers(0, 2**32))
def test_no_command_line_ends_badly(place, monkeypatch, number):
    """One to eight options of any command with legal, borderline and absurd values, judged as the campaign does."""
    check_that_it_ends_well(place, monkeypatch, number)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=_IN_ONE_PLACE)
@given(number=st.integers(0, 2**32))
def test_no_other_command_line_ends_badly(place, monkeypatch, number):
    check_that_it_ends_well(place, monkeypatch, number)


def check_that_it_ends_well(place, monkeypatch, number):
    sandbox = inputs.Sandbox(place / "case")
    attack.remove(sandbox.root)
    sandbox.make(None)
    case = inputs.Case("line", number)
    draw = inputs.Draw(attack.random.Random(number), sandbox, place)
    monkeypatch.setattr(inputs, "copy_run", lambda draw, task, name=None: "no-run")
    attack.build_line(draw, case, {n: c for n, c in COMMANDS.items() if n not in ("doctor", "launch")})
    case.args = [attack._typeable(word) for word in case.args]
    found = attack.judge(_run_line(case, sandbox), case, sandbox)
    assert not found, (attack.reproduce(case), found)


def test_every_option_is_attacked():
    """What is drawn from are the options that the commands have, with their types."""
    from ipucnn.config.options import specs_for

    assert set(COMMANDS) == set(attack._COMMANDS) | set(COMMANDS)
    for name in ("train", "benchmark", "plan-splits", "evaluate", "infer", "export", "verify-dataset"):
        drawn = {flag for option in COMMANDS[name].options for flag in option.flags}
        assert {spec.flag for spec in specs_for(name)} <= drawn
    kinds = {o.name: o.kind for command in COMMANDS.values() for o in command.options}
    assert kinds["--micro-batch-size"] == kinds["--stages"] == kinds["--top"] == "int"
    assert kinds["--learning-rate"] == kinds["--min-time"] == "float"
    assert kinds["--optimizer-params"] == "dict" and kinds["--image-size"] in ("size", "text")
    assert kinds["--json"] == kinds["--augment"] == "bool" and kinds["--optimizer"] == "choice"


def test_what_options_write_is_known():
    """A new option that writes must say so in its help, or what it writes counts as left behind."""
    writing = {o.name for command in COMMANDS.values() for o in command.options if o.writes}
    assert {
        "--run-dir",
        "--save",
        "--html",
        "--plot",
        "--predictions",
        "--output",
        "--contact-sheet",
    } <= writing
    assert not {"--dataset-path", "--config-path", "--plan", "--weights", "--baseline", "--versus"} & writing


@pytest.mark.parametrize("kind", ["line", "data"])
def test_a_case_is_a_function_of_its_number(tmp_path, kind):
    """``--only`` repeats the same words and the same files."""

    def made(number):
        sandbox = inputs.Sandbox(tmp_path / "case")
        attack.remove(sandbox.root)
        sandbox.root.mkdir()
        case = attack.build(kind, 5, number, sandbox, tmp_path, COMMANDS)
        files = {
            name: (
                Path(name).read_bytes() if entry[0] & 0o170000 == 0o100000 and entry[0] & 0o400 else entry[4]
            )
            for name, entry in attack.snapshot(sandbox.guarded).items()
        }

        def same(text):
            """The system numbers terminals."""
            return re.sub(r"/dev/pts/\d+", "/dev/pts/N", text)

        environment = {name: same(str(value)) for name, value in case.environment.items()}
        return [same(word) for word in case.args], environment, case.streams, files

    for task in ("classification", "segmentation"):
        (tmp_path / "prepared" / task).mkdir(parents=True)
    for number in range(12):
        first, second = made(number), made(number)
        for name in list(first[3]):
            if name.endswith(".gz"):  # it holds the time of day
                first[3].pop(name), second[3].pop(name)
        assert first == second


# -- the judge ------------------------------------------------------------------------------------------------

GOOD = b"error: --seed x: must be a whole number\nhint: --seed INT: Seed of weights.\n"
TRACEBACK = b'Traceback (most recent call last):\n  File "/x/ipucnn/cli.py", line 3, in run\n    f()\nValueError: no\n'


def _judged(code=2, stdout=b"", stderr=GOOD, args=("train",), **details):
    case = inputs.Case("line", 0)
    case.args = list(args)
    case.streams = details.pop("streams", "files")
    return sorted({f.kind for f in attack.judge(attack.Ending(code, stdout, stderr, **details), case)})


def test_good_endings_are_passed():
    assert _judged() == []
    assert _judged(0, b"a table\n", b"warning: odd\n") == []
    assert _judged(130, b"", b"interrupted\n") == [] and _judged(143, b"", b"") == []
    assert _judged(3, b"", b"photo.png: not an image\n" + GOOD + b"caused by: OSError: x\n") == []
    assert _judged(attack.REACHED_CODE, b"", b"note\n") == []


def test_a_suite_whose_row_comes_to_tensorflow_is_passed():
    said = (
        b"error: 1 of 1 rows failed; the first, x: its process ended with exit code %d and without a result\n"
    )
    said += b"hint: look at its log\n"
    assert _judged(1, b"", said % attack.REACHED_CODE) == []
    assert _judged(1, b"", said % 1) == ["code"]


@pytest.mark.parametrize(
    "found, details",
    [
        ("traceback", dict(code=1, stderr=TRACEBACK)),
        ("traceback", dict(code=1, stderr=b"error: this is a bug in ipucnn; the lines above say where\n")),
        ("traceback", dict(code=0, stderr=TRACEBACK)),
        ("hint", dict(stderr=b"error: no\n")),
        ("hint", dict(stderr=b"error: no\nsomething else\nhint: late\n")),
        ("hint", dict(stderr=GOOD + GOOD)),
        ("hint", dict(stderr=b"")),
        ("hint", dict(code=0)),
        ("code", dict(code=1, stderr=GOOD)),
        ("code", dict(code=120, stderr=b"")),
        ("code", dict(code=1, stderr=b"", streams="stderr closed")),
        ("signal", dict(code=-signal.SIGSEGV, stderr=b"")),
        ("silent", dict(code=-signal.SIGKILL, stderr=b"", cut="silent")),
        ("slow", dict(code=-signal.SIGKILL, stderr=b"", cut="slow")),
        ("memory", dict(code=-signal.SIGKILL, stderr=b"", cut="memory")),
        ("deaf", dict(code=-signal.SIGKILL, stderr=b"", cut="deaf")),
        ("executed", dict(executed=("/x/json.py",))),
        ("files", dict(left_running=True)),
        ("output", dict(stderr=b"error: \x1b[31mno\nhint: x\n")),
        ("output", dict(stderr=b"error: \xff\nhint: x\n")),
        ("output", dict(code=0, stdout=b"a\x00b\n", stderr=b"")),
        ("output", dict(code=0, stdout=b"a\rb\n", stderr=b"")),
        ("output", dict(stderr=b"error: " + b"9" * 5000 + b"\nhint: x\n")),
        ("output", dict(stderr=b"/x/PIL/Image.py:99: DecompressionBombWarning: big\n" + GOOD)),
        ("output", dict(stderr=b"TIFFReadDirectory: bad\n" + GOOD)),
    ],
)
def test_bad_endings_are_found(found, details):
    assert _judged(**details) == [found]


def _sandbox_with(tmp_path, change, code=2, args=("train",), may_write=()):
    """The findings about files after ``change`` in a sandbox."""
    sandbox = inputs.Sandbox(tmp_path / "case")
    sandbox.make(None)
    case = inputs.Case("line", 0)
    case.args, case.may_write = list(args), [sandbox.work / name for name in may_write]
    before = attack.snapshot(sandbox.guarded)
    change(sandbox)
    ending = attack.Ending(code, b"", GOOD if code else b"", "", before, attack.snapshot(sandbox.guarded))
    return [finding.detail for finding in attack.judge(ending, case, sandbox)]


def _half_run(sandbox):
    (sandbox.work / "runs" / "x").mkdir(parents=True)
    (sandbox.work / "runs" / "x" / "config.yml").write_text("seed: 1\n")


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda s: (s.work / "runs").mkdir() or (s.work / "runs" / ".x.1.tmp").touch(), "temporary"),
        (lambda s: (s.tmp / "x").touch(), "left in TMPDIR"),
        (lambda s: (s.work / "y").touch(), "is new"),
        (lambda s: (s.home / ".bashrc").write_text("evil"), "home/.bashrc is changed"),
        (lambda s: (s.outside / "decoy.txt").unlink(), "outside/decoy.txt is gone"),
        (lambda s: (s.outside / "decoy.txt").chmod(0o600), "is changed"),
        (lambda s: (s.work / "out.html").touch(), "is empty after a failure"),
        (_half_run, "half-written run folder"),
    ],
)
def test_files_left_behind_are_found(tmp_path, change, part):
    found = _sandbox_with(tmp_path, change, may_write=["out.html"])
    assert len(found) == 1 and part in found[0]


def test_what_a_command_may_write_is_passed(tmp_path):
    def change(sandbox):
        _half_run(sandbox)
        (sandbox.work / "out.html").write_text("page")
        (sandbox.work / "a" / "b").mkdir(parents=True)
        (sandbox.work / "a" / "b" / "x").touch()
        (sandbox.home / ".cache").mkdir()
        (sandbox.home / ".cache" / "graph").touch()

    assert _sandbox_with(tmp_path, change, code=0, may_write=["out.html", "a/b"]) == []


def test_the_report_of_a_void_benchmark_is_no_half_written_run(tmp_path):
    def change(sandbox):
        _half_run(sandbox)
        (sandbox.work / "runs" / "x" / "report.json").write_text("{}")

    assert _sandbox_with(tmp_path, change) == []


DRIVER = """
import json, os, sys, time
sys.path.insert(0, {benchmarks!r})
import attack
from pathlib import Path

attack.SILENT_S, attack.MEMORY_BYTES, attack.LIMIT_CPU_S = 0.7, 200 * 2**20, 1.0
PLANTED = {{
    0: lambda: time.sleep(60),
    1: lambda: 1 / 0,
    2: lambda: bytearray(400 * 2**20) and time.sleep(60),
    3: lambda: any(iter(int, 1)),
    4: lambda: os.kill(os.getpid(), 11),
    5: lambda: os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60") and 0,
    6: lambda: open(".x.7.tmp", "w").close() or 0,
    7: lambda: exec(open("json.py").read(), {{"__file__": "json.py"}}) or 0,
    8: lambda: print("fine") or 0,
    9: lambda: len(bytearray(b"1") * 400 * 2**20) and 0,
}}

def planted(case, sandbox, server):
    try:
        code = PLANTED[case.number]()
    except ZeroDivisionError:
        attack.traceback.print_exc(file=open(2, "w", closefd=False))
        code = 1
    return code

def build(kind, seed, number, sandbox, place, commands):
    sandbox.make(None)
    return attack.Case(kind, number)

attack._run_here, attack.build = planted, build
server = object.__new__(attack.Server)
server.place, server.seed, server.jobs, server.pid = Path(sys.argv[1]), 1, 3, os.getpid()
server.tensorflow, server.commands, server.base_bytes = None, {{}}, attack._anonymous_bytes(os.getpid())
server.base_peak_bytes = attack._peak_bytes(os.getpid())
found = {{}}
def done(case_id, ending, case, sandbox, cpu_s, wall_s):
    found[case_id[1]] = sorted({{f.kind for f in attack.judge(ending, case, sandbox)}})
server.run([("line", n) for n in PLANTED], done)
print(json.dumps(found))
"""


def test_planted_failures_are_caught(tmp_path):
    """Programs that hang, crash, eat memory, spin or leave things, forked and watched as the campaign does it."""
    driver = DRIVER.format(benchmarks=str(BENCHMARKS))
    ran = subprocess.run(
        [sys.executable, "-c", driver, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found == {
        "0": ["silent"],
        "1": ["traceback"],
        "2": ["memory"],
        "3": ["slow"],
        "4": ["signal"],
        "5": ["files"],
        "6": ["files"],
        "7": ["executed"],
        "8": [],
        "9": ["memory"],
    }


def test_a_campaign_goes_on_after_a_cut_line(tmp_path):
    """The state is read up to what a kill left of its last line."""
    state = tmp_path / "state.jsonl"
    attack._append(state, {"seed": 3})
    attack._append(state, {"kind": "line", "number": 4, "code": 0})
    with open(state, "a") as handle:
        handle.write('{"kind": "line", "num')
    assert attack.read_state(state) == ({"seed": 3}, [{"kind": "line", "number": 4, "code": 0}])
    assert attack.read_state(tmp_path / "absent") == ({}, [])


def test_the_table_goes_into_the_page(tmp_path, monkeypatch):
    page = tmp_path / "security.md"
    shutil.copy(SECURITY, page)
    monkeypatch.setattr(attack, "DOCS", page)
    row = {
        "kind": "line",
        "number": 0,
        "code": 2,
        "reached": False,
        "fresh": False,
        "cpu_s": 1.0,
        "command": "train",
    }
    rows = [dict(row, findings=[["hint", "d", "s"]], line="ipucnn train")]
    text = attack.table(
        {"seed": 9, "ipucnn": "1", "versions": "v", "cores": 2, "load": 1.0, "wall_s": 60}, rows
    )
    attack.write_docs(text)
    attack.write_docs(text)
    assert page.read_text(encoding="utf-8").count("seed 9, ipucnn 1, v") == 1
    assert "command lines" in text and "together" in text


# -- what the page says ---------------------------------------------------------------------------------------


def _limits():
    text = SECURITY.read_text(encoding="utf-8")
    return re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([\w.]+)\.(_?[A-Z][A-Z_]*)` \|$", text, re.MULTILINE)


def test_the_limits_of_the_page_are_those_of_the_code():
    rows = _limits()
    assert len(rows) >= 15
    for what, value, module, name in rows:
        number = getattr(importlib.import_module(module), name)
        assert re.match(r"[\d.,]+", value).group().rstrip(".") == f"{number:,}", (what, module, name)
