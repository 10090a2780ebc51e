"""Hostile paths and numbers for every option that takes one, and hostile YAML and JSON.

Every command line that is refused ends with one error and one hint; none imports TensorFlow or takes long.  The
campaign runs in a process of its own: its paths are tried by the user who runs the tests and then, if that is root,
by another user, who may not search every folder.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import List, NamedTuple, Tuple

import pytest
import yaml
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refusal, check_raises, check_refused

from ipucnn import documents
from ipucnn.command_group import options_class
from ipucnn.command_table import COMMANDS
from ipucnn.config import bounds, presets, values
from ipucnn.config.bounds import Range
from ipucnn.config.command import own_options, run_options
from ipucnn.config.options import BY_KEY, SPECS, RunConfig
from ipucnn.config.spec import FRACTION, KINDS, OptionSpec
from ipucnn.documents import MAX_DEPTH, BadDocument
from ipucnn.errors import ConfigurationError, UserError
from ipucnn.text import shown_value
from ipucnn.training.program import make_layout, make_program

# -- the campaign -----------------------------------------------------------------------------------------------

NOBODY = 65534
TIMERS = ((signal.SIGPROF, signal.ITIMER_PROF, 10), (signal.SIGALRM, signal.ITIMER_REAL, 60))
"""The most processor seconds of a command line, and for paths the most seconds: a naive reader waits for a FIFO."""
DIGITS = "9" * 5000


class Line(NamedTuple):
    """A command line, and how it may end.

    Attributes:
        name: what is tried.
        args: the arguments.
        codes: the exit codes with which it may end.
        error: the beginning of its error.
        is_in_deleted_folder: whether the folder in which it runs was deleted.
    """

    name: str
    args: List[str]
    codes: Tuple[int, ...] = (2, 3, 4, 6)
    error: str = "error: "
    is_in_deleted_folder: bool = False


STOP = "--ipus 4 --num-replicas 2"
"""Ends ``train`` after its options were checked, and before its data are."""
LATE = "--micro-batch-size 1 --global-batch-size 1000000"
"""Ends ``train`` after the data were opened, and before TensorFlow is imported."""
OF_PATHS = f"""
    train lenet {LATE} --dataset-path @
    train lenet {LATE} --dataset imagefolder --dataset-path @
    train lenet {LATE} --dataset tfds:mnist --dataset-path @
    train lenet {LATE} --dataset @
    train unet {LATE} --dataset @
    train lenet {STOP} --run-dir @
    train lenet {STOP} --resume --run-dir @
    train lenet {STOP} --overwrite --run-dir @
    train lenet {STOP} --kfold 2 --resume --run-dir @
    train lenet {STOP} --checkpoint-output-dir @
    train lenet {STOP} --checkpoint-input-dir @
    train lenet {STOP} --no-training --checkpoint-input-dir @
    train lenet {STOP} --weights @
    train lenet {STOP} --executable-cache @
    train lenet {STOP} --config-path @
    train lenet {STOP} --plan @
    train lenet --print-config --resume --run-dir @
    plan-splits lenet --stages 200 --config-path @
    plan-splits lenet --stages 2 --compare @
    plan-splits lenet --optimisations --save @
    plan-splits lenet --optimisations --html @
    evaluate @
    evaluate run --checkpoint @
    evaluate lenet --weights @
    evaluate @.h5 --model-name lenet
    evaluate none --plot @
    evaluate none --predictions @.csv
    evaluate none --contact-sheet @.png
    infer @ image.png
    infer none @
    infer none @/*.png
    infer none @/**/*.png
    infer lenet image.png --checkpoint @
    infer none image.png --output @
    infer unet image.png --output @ --weights none.h5
    infer lenet --split eval --weights a.h5 --dataset-path @
    benchmark lenet --baseline none --run-dir @
    benchmark lenet --baseline @
    benchmark --print-config --suite @
    benchmark toy* --versus none --resume --run-dir @
    benchmark toy* --versus @
    doctor --dataset-path @
"""
"""A command line for each way in which a path is used, with @ in its place."""

YAML_KEYS = ("dataset-path", "run-dir", "checkpoint-input-dir", "checkpoint-output-dir", "weights")
FOR_OTHERS = ("closed", "in closed", "new in closed", "unreadable", "new in sealed")
"""The paths whose result depends on the user."""


def make_paths(folder):
    """Makes every kind of path in ``folder``, the working directory; returns them by name."""
    (folder / "file").write_text("not what is expected\n")
    for name in ("folder", "run", "closed/inside", "sealed", "tree/train/class"):
        (folder / name).mkdir(parents=True)
    (folder / "image.png").write_bytes(b"no image")
    (folder / "unreadable").write_text("x")
    os.mkfifo(folder / "fifo")
    for name, target in (
        ("loop", "loop"),
        ("dangling", "nowhere/at/all"),
        ("to-folder", "folder"),
        ("tree/train/class/loop.png", "loop.png"),
        ("tree/val", "../tree"),
    ):
        (folder / name).symlink_to(target)
    for name, mode in (("closed", 0), ("unreadable", 0), ("sealed", 0o555)):
        (folder / name).chmod(mode)
    return {
        "empty": "",
        "absent": "nowhere/at/all",
        "below a file": "file/below",
        "file": "file",
        "link to a folder": "to-folder",
        "parent": "..",
        "closed": "closed",
        "in closed": "closed/inside",
        "new in closed": "closed/inside/new/one",
        "unreadable": "unreadable",
        "new in sealed": "sealed/new",
        "fifo": "fifo",
        "loop": "loop",
        "dangling": "dangling",
        "loops inside": "tree",
        "long name": "x" * 300,
        "long path": "/" + "/".join(["y" * 200] * 25),
        "no user": "~nouser/below",
        "NUL": "a\0b",
        "no text": "a\udc80b\n\x1b[31m\ud800",
    }


def lines_of_paths(folder):
    paths = make_paths(folder)
    for template in OF_PATHS.split("\n")[1:-1]:
        command, *words = template.split()
        free = (0,) if command == "doctor" or "--print-config" in words else ()
        for kind, path in {**paths, "deleted": "nowhere"}.items():
            if kind == "empty" and "@/**/*.png" in words:
                continue  # this would search all of the machine's files
            # Only the file system refuses a long name, as data that cannot be read.
            codes = (3, 4, 6) if kind == "long name" and command != "doctor" else (2, 3, 4, 6)
            args = [command, *(word.replace("@", path) for word in words)]
            yield Line(f"{template}: {kind}", args, free + codes, is_in_deleted_folder=kind == "deleted")
    for key in YAML_KEYS:
        for kind, path in paths.items():
            name = f"yaml-{key}-{kind}.yml".replace(" ", "-")
            Path(name).write_text(f"model-name: lenet\n{key}: {json.dumps(path)}\n")
            yield Line(f"YAML {key}: {kind}", ["train", *STOP.split(), "--config-path", name])


NUMBERS = [
    DIGITS,
    "-" + DIGITS,
    DIGITS + "/1",
    "1/" + DIGITS,
    "1" + "0" * 39,
    "1e300",
    "1e400",
    "nan",
    "2" * 400 + "%",
]
COMMAND_LINES = {
    "train": "train lenet --print-config",
    "benchmark": "benchmark lenet --print-config",
    "plan-splits": "plan-splits lenet --print-config",
    "diff": "diff absent absent",
    "export": "export absent --format onnx",
    "verify-dataset": "verify-dataset --dataset absent",
    "models": "models lenet --summary",
    "build-records": "build-records absent out",
}


def is_number(spec):
    return spec.kind.is_number or spec.name in ("limit_train", "limit_eval", "image_size")


def params():
    """Yields (command, declaration) of every option of every command."""
    for name, command in COMMANDS.items():
        of = options_class(command)
        for spec in (*own_options(of), *run_options(of, name)):
            if not spec.argument:
                yield name, spec


def numeric():
    """Yields every numeric option once with a command that takes it, and the numeric options of each command."""
    seen = set()
    for command, spec in params():
        if is_number(spec) and (spec.flag, spec.within) not in seen:
            seen.add((spec.flag, spec.within))
            yield command, spec.flag


NUMERIC = list(numeric())


def lines_of_numbers(folder):
    for command, flag in NUMERIC:
        for text in NUMBERS:
            args = [*COMMAND_LINES.get(command, f"{command} absent").split(), f"{flag}={text}"]
            yield Line(f"{command} {flag}: {text[:20]}", args, (2,), f"error: {flag} ")


class Hangs(BaseException):
    pass


def hang(number, frame):
    raise Hangs


def fault(line, folder):
    """Returns what is wrong with the ending of a command line; None if it ends as it may."""
    from ipucnn import cli

    out, err = io.StringIO(), io.StringIO()
    is_number = line.codes == (2,)
    for number, timer, seconds in TIMERS[:1] if is_number else TIMERS:
        signal.signal(number, hang)
        signal.setitimer(timer, seconds)
    try:
        if line.is_in_deleted_folder:
            gone = tempfile.mkdtemp(prefix="ipucnn-gone-")
            os.chdir(gone)
            os.rmdir(gone)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(list(line.args))
    except BaseException:
        return traceback.format_exc()
    finally:
        for _, timer, _ in TIMERS:
            signal.setitimer(timer, 0)
        os.chdir(folder)
    text = err.getvalue()
    if "tensorflow" in sys.modules:
        # Every later line would be slow, and could no longer show this fault.
        raise RuntimeError(f"TensorFlow was imported: {line}\n{text}")
    lines = text.splitlines()
    ends = re.findall(r"^(error|hint): \S", text, re.MULTILINE)
    is_right = code == 0 or (ends == ["error", "hint"] and any(row.startswith(line.error) for row in lines))
    is_right = is_right and (not is_number or (len(lines) == 2 and not out.getvalue()))
    if code in line.codes and is_right and "Traceback" not in text and max(map(len, lines), default=0) < 2000:
        return None
    return f"exit code {code}\n{text[:2000]}"


def all_below(folder):
    return {os.path.join(place, name) for place, inner, files in os.walk(folder) for name in (*inner, *files)}


def attack(folder, group):
    """Runs a group of command lines; returns their number, and (name, fault) of each that ends wrongly."""
    os.chdir(folder)
    lines = list({"paths": lines_of_paths, "numbers": lines_of_numbers}[group](folder))
    before = all_below(folder)
    faults = [(line.name, fault(line, folder)) for line in lines]
    faults += [(path, "left behind") for path in sorted(all_below(folder) - before)]
    if group == "paths" and os.geteuid() == 0:
        os.chmod(folder, 0o755)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        for line in lines:
            if line.name.rsplit(": ", 1)[-1] in FOR_OTHERS:
                faults.append((f"as another user: {line.name}", fault(line, folder)))
    return len(lines), [one for one in faults if one[1] is not None]


@pytest.mark.parametrize(
    ("group", "at_least"), [("numbers", 300), pytest.param("paths", 900, marks=pytest.mark.slow)]
)
def test_every_hostile_value_ends_with_one_error_and_one_hint(group, at_least):
    parent = Path(tempfile.mkdtemp(prefix="ipucnn-attack-"))
    parent.chmod(0o755)
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        done = subprocess.run(
            [sys.executable, __file__, str(folder), group],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"},
        )
    finally:
        for name in ("closed", "sealed"):
            with contextlib.suppress(OSError):
                (folder / name).chmod(0o755)
        shutil.rmtree(str(parent), ignore_errors=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    count, faults = json.loads(done.stdout)
    assert faults == [], json.dumps(faults[:10], indent=1)
    assert count > at_least


# -- numbers ----------------------------------------------------------------------------------------------------


def test_every_numeric_option_is_in_the_campaign():
    flags = {flag for _, flag in NUMERIC}
    assert {spec.flag for spec in SPECS if is_number(spec)} <= flags
    of_commands = (
        "--stages --classes --executions --min-time --max-time --top --patch-size --test-time-augmentation"
    )
    assert set(of_commands.split()) <= flags


def test_a_number_cannot_be_declared_without_bounds():
    for details in ({}, {"minimum": 0}, {"maximum": 1}, {"above": 0}):
        with pytest.raises(TypeError, match="declare its bounds"):
            OptionSpec("n", 1, "help", "panel", KINDS[int], within=Range(**details))
    OptionSpec("n", 1, "help", "panel", KINDS[float], within=Range(above=0, below=1))


ABSURD = [
    *NUMBERS, DIGITS + "." + DIGITS, DIGITS + "x1", "9223372036854775808", "-1e400", "1e-400", "inf",
    "0x" + "f" * 400, "1/10**400", "1e999%", "x" * 10_000_000, "\udcff", "", " ", "1,2,3,4", "--1", 10**399,
    -(10**30), math.inf, math.nan, [1] * 100_000, {"a": 1}, True,
]  # fmt: skip


@pytest.mark.parametrize("spec", [spec for spec in SPECS if is_number(spec)], ids=lambda spec: spec.key)
def test_absurd_values_are_refused_or_within_the_bounds(spec):
    for value in ABSURD:
        try:
            converted = spec.convert(value)
        except values.BadValue as bad:
            assert len(bad.reason) < 300
            continue
        for number in converted if isinstance(converted, tuple) else (converted,):
            if isinstance(number, (int, float)):
                assert abs(number) <= max(bounds.MAX_BYTES, spec.within.maximum or 0)


@pytest.mark.parametrize(
    "key", ["micro-batch-size", "seed", "image-size", "limit-train", "num-epochs", "weight-decay"]
)
def test_errors_name_the_bound_and_the_nearest_legal_value(run, key):
    most = BY_KEY[key].within.maximum or {"image-size": 65536, "limit-train": bounds.MAX_COUNT}[key]
    flag, bound = f"--{key}", values.plain_number(most)
    code, _, err = run("train", "lenet", flag, DIGITS, "--print-config")
    assert code == 2 and f"must be at most {bound}" in err and f"{flag} {bound}\n" in err
    code, out, err = run("train", "lenet", flag, bound, "--print-config")
    assert (code, err) == (0, "") and bound in out


TEXTS = [
    ("--optimizer-params", '{"momentum": 1e400}', "momentum must be at most"),
    ("--optimizer-params", "{momentum: " + DIGITS[:300] + "}", "momentum must be at most"),
    ("--lr-schedule-params", '{"boundaries": [1, 1e400]}', "boundaries[1] must be at most"),
    ("--lr-schedule-params", '{"a": {"b": "-1e39"}}', "a.b must be at least"),
    ("--norm-layer", '{"name": "group_norm", "num_groups": 99999999999}', "num_groups"),
    ("--norm-layer", '{"name": "batch_norm", "epsilon": 1e30}', "epsilon"),
    ("--norm-layer", '{"name": "batch_norm", "momentum": NaN}', "momentum must be a number, not NaN"),
    ("--matmul-options", '{"a": Infinity}', "a must be at most"),
    ("--pipeline-splits", ",".join(f"l{n}" for n in range(100_000)), "has 100,000 values"),
    ("--device-mapping", ",".join(map(str, range(100_000))), "has 100,000 values"),
    ("--available-memory-proportion", " ".join(["10"] * 100_000), "has 100,000 values"),
    ("--run-dir", "x" * 10_000_000, "more than 4,096 characters"),
    ("--optimizer", "x" * 1000, "must be one of"),
    ("--validation", "x" * 10_000, "validation"),
    *((flag, "[" * 100_000, "") for flag in ("--lr-schedule-params", "--lr-warmup-params", "--norm-layer")),
    ("--convolution-options", "[" * 100_000, ""),
    *(
        ("--optimizer-params", text, "")
        for text in (
            "[" * 100_000,
            '{"a": ' * 100_000,
            "{a: " + "[" * 100_000,
            '{"a": ' + "9" * 5000 + "}",
            "{momentum: 1e400}",
            '{"momentum": NaN}',
            '{"a": 1, "a": 2}',
            '{"a": "\\ud800"}',
            "{a: !!int foo}",
            "{a: &a [*a]}",
            "{[1]: 2}",
            "{" + ",".join(f"k{n}: 1" for n in range(2000)) + "}",
            "{boundaries: [" + ",".join(map(str, range(2000))) + "]}",
            "x" * 10_000_000,
            "{a: \udcff}",
            json.dumps({"a": "y" * 900_000}),
        )
    ),
]


@pytest.mark.parametrize(("flag", "text", "reason"), TEXTS)
def test_hostile_lists_and_dictionaries_are_refused(run, flag, text, reason):
    before = time.process_time()
    code, out, err = run("train", "lenet", "--print-config", f"{flag}={text}")
    assert time.process_time() - before < 20
    error, hint = err.splitlines()
    assert (code, out) == (2, "") and error.startswith(f"error: {flag}") and reason in error
    assert hint.startswith("hint: ") and len(err) < 2000


def test_a_fraction_of_huge_parts_is_divided():
    assert values.parse_fraction("1" + "0" * 300 + "/4" + "0" * 300) == 0.25
    with pytest.raises(values.BadValue, match="at least 1e-06"):
        values.parse_fraction("1/" + "9" * 300)
    assert values.parse_fraction("9" * 5000 + "/1") > bounds.MAX_FLOAT32


def test_products_of_legal_numbers_are_bounded():
    large = RunConfig(micro_batch_size=1, num_replicas=2**16, gradient_accumulation_count=2**20)
    hint = "lower --gradient-accumulation-count to 32767 or less, or one of the others"
    check_raises(ConfigurationError, "the global batch of 68,719,476,736 samples", hint, make_layout, large)
    most = make_layout(dataclasses.replace(large, gradient_accumulation_count=32767)).global_batch_size
    assert most <= bounds.MAX_COUNT
    long = RunConfig(weight_updates_per_epoch=10**6, num_epochs=10**6)
    error, hint = "and a run has at most 2147483647", "--num-epochs 2147 "
    check_raises(ConfigurationError, error, hint, make_program, long, 1, seed=0)
    make_program(dataclasses.replace(long, num_epochs=2147), 1, seed=0)


@pytest.mark.parametrize(
    ("args", "codes"),
    [
        ("--stages 2147483648", (2,)),
        ("--stages 65536", (2,)),
        ("--stages 2 --micro-batch-size 1048576", (4,)),
        ("--stages 2 --global-batch-size 2147483644 --micro-batch-size 1", (0,)),
        ("--stages 2 --schedule Interleaved --global-batch-size 2147483644 --micro-batch-size 1", (0,)),
        ("--ipus 65536", (2,)),
        ("--ipus 64 --global-batch-size 2147483647", (0, 2)),
        ("--stages 2 --num-replicas 65536", (2,)),
        ("--stages 2 --device-mapping 0 65535", (2,)),
        ("--stages 2 --gradient-accumulation-count 1048576 --micro-batch-size 1048576", (2,)),
        ("--stages 2 --classes 131073", (2,)),
    ],
)
def test_plans_of_large_numbers_finish_in_time(run, args, codes):
    before = time.process_time()
    code, _, err = run("plan-splits", "cifar_resnet8", *args.split())
    assert time.process_time() - before < 20
    assert code in codes, err
    assert code == 0 or ("error: " in err and "hint: " in err)


@given(st.sampled_from([spec for spec in SPECS if spec.kind.is_number and not spec.kind.is_list]), st.data())
def test_every_number_within_the_bounds_survives_yaml(spec, data):
    least = spec.within.minimum if spec.within.minimum is not None else spec.within.above
    most = spec.within.maximum if spec.within.maximum is not None else spec.within.below
    if spec.kind in (KINDS[float], FRACTION):
        number = data.draw(st.floats(least, most))
    else:
        number = data.draw(st.integers(int(least), int(most)))
    try:
        value = spec.convert(str(number))
    except values.BadValue:
        assert (
            number in (spec.within.above, spec.within.below)
            or (number == 0 and spec.kind not in KINDS.values())
            or 0 < number < bounds.LEAST_FRACTION
        )
        return
    assert value == number
    if spec.in_yaml:
        assert getattr(RunConfig.from_yaml(f"{spec.key}: {value}\n"), spec.name) == value


@pytest.mark.parametrize(
    "line",
    [
        "plan-splits lenet --stages 2 --image-size 65536",
        "plan-splits unet --stages 2 --base-filters 1024",
        "plan-splits vgg16 --stages 2 --classes 131072 --image-size 4096",
        "train lenet --dataset digits --image-size 65536",
    ],
)
def test_weights_beyond_memory_are_refused_before_the_network_is_built(run, monkeypatch, line):
    # Not `build_model`: it is part of the code whose digest identifies the shipped layer graphs.
    monkeypatch.setattr("ipucnn.planning.graphs.extract.host_memory_bytes", lambda: 2**33)
    monkeypatch.setattr("ipucnn.planning.graphs.extract.build_graph", None)
    monkeypatch.setattr("ipucnn.runs.setup.build", None)
    check_refused(run, Refusal(line, "iB while it is made", "lower the classes", 4))


# -- YAML and JSON ----------------------------------------------------------------------------------------------


# Text -> a part of the error.
REFUSED = {
    "brackets": ("[" * 100_000, "line 1: more than 50"),
    "dashes": ("- " * 100_000, "inside of each other"),
    "closed brackets": ("a: " + "[" * 60 + "]" * 60, "line 1: more than 50"),
    "indentation": ("".join(" " * n + "a:\n" for n in range(60)), "line 51: more than 50"),
    "recursion": ("a: &a [*a]", "inside of each other"),
    "recursion of a key": ("a: &a {b: &b {c: *a}}", "inside of each other"),
    "an absent anchor": ("a: *b", "line 1: not readable as YAML: found undefined alias"),
    "an anchor twice": ("a: &a 1\nb: &a 2", "line 2: not readable as YAML: found duplicate anchor"),
    "a merge of text": ("a:\n  <<: 3", "line 2: '<<' must merge"),
    "a merge of a list of text": ("a:\n  <<: [3, 4]", "'<<' must merge"),
    "a key twice": ("a:\n  b:\n    c: 1\n    c: 2", "line 4: 'c' is given twice, first on line 3"),
    "a list as key": ("? [1, 2]\n: 3", "a key is a list"),
    "a mapping as key": ("{{a: 1}: 2}", "a key is a mapping"),
    "no key": ("?\n: 1", "a key is empty"),
    "a null key": ("~: 1", "a key is empty"),
    "two documents": ("a: 1\n---\nb: 2", "line 2: not readable as YAML: expected a single document"),
    "a tag": ("a: !!int foo", "line 1: the tag tag:yaml.org,2002:int"),
    "Python": ("a: !!python/object/apply:os.system ['x']", "the tag"),
    "a tag of one's own": ("a: !mine 3", "the tag !mine"),
    "digits": ("a: " + "9" * 5000, "line 1: a number of 5,000 characters"),
    "binary digits": ("a: 0b" + "1" * 500_000, "a number of"),
    "decimals": ("a: 0." + "3" * 500_000, "a number of"),
    "NUL": ("a: b\0c", "not readable as YAML"),
    "an escape character": ("a: 1\nb: \x1b[31m", "not readable as YAML"),
    "a surrogate": ("a: \udcff", "not readable as YAML"),
    "an escaped surrogate": ('a: "\\ud800"', "not readable as YAML"),
    "a tab": ("a:\n\tb: 1", "line 2"),
    "UTF-16 read as Latin-1": ("\xff\xfea\0", "not readable as YAML"),
    "a quote": ("a: 'b", "not readable as YAML"),
    "a long text": ("a: " + "x" * 1_000_000, "longer than 1,000,000"),
    "a long anchor": ("a: *" + "b" * 900_000, "undefined alias"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_yaml_is_refused_with_place_and_hint(name):
    text, part = REFUSED[name]
    before = time.process_time()
    with pytest.raises(ConfigurationError) as caught, documents.naming("mine.yml"):
        documents.load(text)
    # Processor time: far below the minutes, or more, of a naive reader, and far above the usual time.
    assert time.process_time() - before < 10
    assert caught.value.message.startswith("mine.yml") and part in caught.value.message
    assert len(caught.value.message) < 600 and caught.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("a: 2001-01-01\n", {"a": "2001-01-01"}),
        ("a: 2001-12-14t21:59:43.10-05:00\n", {"a": "2001-12-14t21:59:43.10-05:00"}),
        ("a: 0x_\n", {"a": "0x_"}),
        ("1: a\ntrue: b\n", {"1": "a", "true": "b"}),
        ("'~': 1\n", {"~": 1}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}\n", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("%YAML 1.1\n---\na: 1\n", {"a": 1}),
    ],
)  # fmt: skip
def test_plain_scalars_have_their_yaml_1_1_values(text, value):
    assert documents.load(text) == value


_WORD_FORMS = [
    form
    for word in ("yes", "no", "true", "false", "on", "off", "null", "y", "n", "nan", "inf", ".nan", ".inf", "-.inf")
    for form in (word, word.capitalize(), word.upper(), word + "x")
]  # fmt: skip
_NUMBER_FORMS = """~ 1:30 1:30.5 -1:30 190:20:30.15 1:60 +.5 .5 5. -5 +12 0 -0 00 017 08 0o17 0x1F -0x1f 0b101 0b2 0x
    1_000 1__0. _1 1e5 1.0e5 1.0e+5 1.5E-3 .5e+1 +1:30 0:0 -0.0 1.2.3 1- --1 0b_1 1:30:59 = 1.0e+400 1_000"""


def test_plain_scalars_equal_those_of_pyyaml():
    text = "".join(f"- {form}\n" for form in _WORD_FORMS + _NUMBER_FORMS.split())
    for form, ours, theirs in zip(text.splitlines(), documents.load(text), yaml.load(text, Loader=_Oracle)):
        assert _same(ours, theirs), (form, ours, theirs)


@pytest.mark.parametrize("number", ["{}", "-{}", "0.{}", "{}."])
def test_numbers_have_at_most_308_characters(number):
    digits = "7" * (308 - len(number.format("")))
    value = documents.load(f"- {number.format(digits)}\n")[0]
    assert value == (float if "." in number else int)(number.format(digits))
    with pytest.raises(BadDocument, match="a number of 309 characters") as caught:
        documents.load(f"- 1\n- {number.format(digits + '7')}\n")
    assert caught.value.line == 2 and "at most 308" in caught.value.hint
    if "." not in number:
        assert documents.load_record(f"[{number.format(digits)}]") == [value]
        with pytest.raises(BadDocument, match="309"):
            documents.load_record(f"[{number.format(digits + '7')}]")


@pytest.mark.parametrize(
    "text, line, column",
    [
        ("a: ]", 1, 4),
        ("a: 1\nb: [1, }\n", 2, 8),
        ("a: 1\n b: 2\n", 2, 3),
    ],
)
def test_lines_and_columns_of_errors_count_from_one(text, line, column):
    with pytest.raises(BadDocument) as caught:
        documents.load(text)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_a_date_for_a_text_option_stays_text():
    assert RunConfig.from_yaml("run-dir: 2001-01-01\n").run_dir == "2001-01-01"


# Contents of files that are not YAML files, and a part of the error.
HOSTILE = {
    "utf16.yml": ("a: 1\n".encode("utf-16"), "UTF-8"),
    "latin.yml": (b"a: 1\nb: \xe9\n", "line 2"),
    "large.yml": (b"a: " + b"x" * 10_000_000, "larger than"),
    "brackets.yml": (b"[" * 100_000, "inside of each other"),
    "nul.yml": (b"a: \0\n", "not readable"),
}
# What else may have such a name.
OTHERS = {"fifo.yml": "FIFO", "folder.yml": "folder.yml", "/dev/zero": "a device", "absent.yml": "absent.yml"}
NOT_JSON = dict.fromkeys(("nul.yml", "large.yml"), "is not JSON")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("train", "lenet", "--print-config", "--config-path"), {}),
        (("train", "lenet", "--print-config", "--plan"), {}),
        (("plan-splits", "lenet", "--stages", "2", "--compare"), {}),
        (("benchmark", "--print-config", "--suite"), {}),
        (("benchmark", "lenet", "--host-generated-data", "--baseline"), {**NOT_JSON, "folder.yml": "error"}),
        (("benchmark", "*", "--suite", "keras-tutorial", "--versus"), {**NOT_JSON, "folder.yml": "error"}),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_hostile_files(run, args, parts):
    for name, (data, _) in HOSTILE.items():
        Path(name).write_bytes(data)
    os.mkfifo("fifo.yml")
    Path("folder.yml").mkdir()
    for name, part in {**{name: part for name, (_, part) in HOSTILE.items()}, **OTHERS, **parts}.items():
        code, out, err = run(*args, name)
        lines = [line for line in err.splitlines() if not line.startswith("reading the layers")]
        assert code in (2, 3) and out == "" and len(err) < 2000, (name, err)
        assert [line.split(":")[0] for line in lines] == ["error", "hint"], (name, err)
        assert part.lower() in lines[0].lower(), (name, err)


def test_a_suite_cannot_expand_to_a_billion_rows(run, tmp_path):
    numbers = ",".join(map(str, range(1, 101)))
    options = " ".join(f"--seed {{{numbers}}}" for _ in range(5))
    (tmp_path / "many.yml").write_text(f"rows:\n- benchmark lenet {options}\n")
    line = "benchmark --suite many.yml --print-config"
    check_refused(run, Refusal(line, "stands for 10000000000 command lines"))


def test_hostile_json_is_refused():
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" + "9" * 5000 + "]"):
        with pytest.raises(BadDocument) as caught:
            documents.load_record(text)
        assert caught.value.hint and len(str(caught.value)) < 300
    # Brackets inside text do not count as depth, also after escaped quotes.
    assert documents.load_record('["' + "[" * 1000 + '", "\\"[[["]') == ["[" * 1000, '"[[[']


def test_a_value_in_a_message_is_short_and_printable():
    assert shown_value("a\x1b\nb") == "a\\x1b\\nb"
    assert max(len(shown_value(value)) for value in ("x" * 10_000_000, list(range(50_000)))) < 300
    assert "digits" in shown_value(10**5000)


# -- property tests --------------------------------------------------------------------------------------------

_WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8)
_WRITTEN = """a b_1 16.16 1e-5 1/4 10% 0x1f 0b2 017 08 1:30 1:90 .5 5. -.inf .nan 1_0 ~ null yes No ON 2001-01-01 = <<
    2001-12-14t21:59:43.10-05:00 +1 -0 0.0 1.5e+3 1.5e3 ._ 0x 12e03 - ? : conv2_block1_out"""
_PLAIN = st.sampled_from(_WRITTEN.split())


@st.composite
def _lines(draw, depth=0):
    """Draws a block of near-YAML: indentation, anchors, aliases, merges, tags, quotes, flow and documents."""
    indent = "  " * depth if draw(st.integers(0, 12)) else draw(st.sampled_from(["\t", " ", "", "      "]))
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        key = draw(
            st.one_of(_PLAIN, st.sampled_from(["a", "b", "c", "<<", "? x", "[1]", "'a'", "*a0", "seed"]))
        )
        head = draw(st.sampled_from([f"{key}: ", f"{key}: ", "- ", "? ", "", "---\n", "%TAG ! x\n"]))
        mark = draw(st.sampled_from(["", "", "", "&a0 ", "&a1 ", "!!int ", "!x ", "! "]))
        if depth < 4 and draw(st.booleans()):
            lines.append(indent + head + mark)
            lines += draw(_lines(depth + 1))
            continue
        scalar = st.one_of(
            _PLAIN,
            _WORDS,
            st.sampled_from(
                ["*a0", "*a1", "[*a0, *a0]", "{<<: *a0}", "[1, 2", "{a: 1}", "|\n   x", "'q", '"\\x']
            ),
        )
        lines.append(indent + head + mark + draw(scalar))
    return lines


@tries(40, slow=2000)
@given(_lines())
def test_any_text_is_a_value_or_an_error_with_a_hint(lines):
    text = "\n".join(lines)
    try:
        with documents.naming("f.yml"):
            value = documents.load(text)
    except UserError as error:
        assert error.message.startswith("f.yml") and error.hint and len(error.message) < 600
        return
    # Values that are read are the same in PyYAML, except for keys and dates.
    try:
        assert _same(value, yaml.load(text, Loader=_Oracle)), text
    except yaml.YAMLError:
        assert "\t" in text  # LibYAML takes a tab for a blank where PyYAML's own reader does not
    try:
        presets.PresetFile(text, "f.yml").get("a")
    except UserError as error:
        assert error.hint


class _Oracle(yaml.SafeLoader):
    """PyYAML's pure Python reader, with dates as text and several ``<<`` in one mapping."""


_Oracle.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
_Oracle.add_constructor("tag:yaml.org,2002:value", lambda loader, node: node.value)


def _same(ours, theirs):
    if isinstance(ours, dict) and isinstance(theirs, dict):
        by_text = {key: value for key, value in theirs.items() if isinstance(key, str)}
        return len(ours) >= len(theirs) and all(_same(ours[key], value) for key, value in by_text.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(ours) is type(theirs) and (ours == theirs or ours != ours)


_VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False),
        st.text(st.characters(blacklist_categories=("Cs",)), max_size=20), _PLAIN,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_WORDS, inner, max_size=4)),
    max_leaves=20,
)  # fmt: skip


@given(_VALUES, st.sampled_from([None, True, False]))
def test_plain_values_survive_yaml_and_json(value, flow):
    # PyYAML writes these characters as line breaks, which are blanks when they are read again.
    has_breaks = not {"\x85", "\u2028", "\u2029"}.isdisjoint(json.dumps(value, ensure_ascii=False))
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=not has_breaks)
    assert documents.load(text) == value
    assert documents.load_record(json.dumps(value)) == value


@given(st.integers(0, 80), st.sampled_from(["[", "{a: ", "- "]))
def test_depth_is_counted_exactly(depth, opening):
    text = opening * depth + "1" + {"[": "]", "{a: ": "}", "- ": ""}[opening] * depth
    if depth <= MAX_DEPTH:
        documents.load(text)
    else:
        with pytest.raises(BadDocument, match="inside of each other"):
            documents.load(text)


if __name__ == "__main__":
    json.dump(attack(Path(sys.argv[1]), sys.argv[2]), sys.stdout)
