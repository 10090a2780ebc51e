"""Hostile paths and numbers: every command that is refused ends soon, with one error and one hint.

What a page can show is in ``tests/refusals``.
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

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refusal, check_raises, check_refused

from ipucnn.command_group import options_class
from ipucnn.command_table import COMMANDS
from ipucnn.config import bounds, values
from ipucnn.config.bounds import Range
from ipucnn.config.command import own_options, run_options
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.spec import FRACTION, KINDS, OptionSpec
from ipucnn.errors import ConfigurationError
from ipucnn.training.program import make_layout, make_program

# -- the campaign -----------------------------------------------------------------------------------------------

NOBODY = 65534
DIGITS = "9" * 5000
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
    """Yields (kind of path, arguments, exit codes) of each command line."""
    paths = make_paths(folder)
    for template in OF_PATHS.split("\n")[1:-1]:
        command, *words = template.split()
        free = (0,) if command == "doctor" or "--print-config" in words else ()
        for kind, path in {**paths, "deleted": "nowhere"}.items():
            if kind == "empty" and "@/**/*.png" in words:
                continue  # this would search all of the machine's files
            # Only the file system refuses a long name, as data that cannot be read.
            codes = (3, 4, 6) if kind == "long name" and command != "doctor" else (2, 3, 4, 6)
            yield kind, [command, *(word.replace("@", path) for word in words)], free + codes
    for key in YAML_KEYS:
        for kind, path in paths.items():
            name = f"yaml-{key}-{kind}.yml".replace(" ", "-")
            Path(name).write_text(f"model-name: lenet\n{key}: {json.dumps(path)}\n")
            yield kind, ["train", *STOP.split(), "--config-path", name], (2, 3, 4, 6)


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


def fault(kind, args, codes, folder):
    """Returns what is wrong with the ending of a command line; None if it ends as it may."""
    from ipucnn import cli

    out, err = io.StringIO(), io.StringIO()
    # A naive reader waits for a FIFO.
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        if kind == "deleted":
            os.chdir(tempfile.mkdtemp(dir=folder))
            os.rmdir(os.getcwd())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(args)
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.chdir(folder)
    text = err.getvalue()
    assert "tensorflow" not in sys.modules, f"TensorFlow was imported: {args}\n{text}"
    is_right = code == 0 or re.findall(r"^(error|hint): \S", text, re.MULTILINE) == ["error", "hint"]
    is_short = max(map(len, text.splitlines()), default=0) < 2000
    is_right = is_right and is_short and code in codes and "Traceback" not in text
    return None if is_right else f"exit code {code}\n{text[:2000]}"


def attack(folder):
    """Types all command lines; returns their number, and (arguments, fault) of each that ends wrongly."""
    os.chdir(folder)
    signal.signal(signal.SIGALRM, hang)
    lines = list(lines_of_paths(folder))
    before = set(folder.rglob("*"))
    faults = [(args, fault(kind, args, codes, folder)) for kind, args, codes in lines]
    faults += [(str(path), "left behind") for path in set(folder.rglob("*")) - before]
    if os.geteuid() == 0:
        os.chmod(folder, 0o755)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        faults += [
            (args, fault(kind, args, codes, folder)) for kind, args, codes in lines if kind in FOR_OTHERS
        ]
    return len(lines), [one for one in faults if one[1] is not None]


def hang(number, frame):
    raise TimeoutError


@pytest.mark.slow
def test_every_hostile_path_ends_with_one_error_and_one_hint():
    """By the user who runs the tests, and then, if that is root, by one who may not search every folder."""
    parent = Path(tempfile.mkdtemp(prefix="ipucnn-attack-"))
    parent.chmod(0o755)
    folder = Path(tempfile.mkdtemp(dir=parent))
    environment = {**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, __file__, str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment)
    finally:
        for name in ("closed", "sealed"):
            with contextlib.suppress(OSError):
                (folder / name).chmod(0o755)
        shutil.rmtree(str(parent), ignore_errors=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    count, faults = json.loads(done.stdout)
    assert faults == [] and count > 900, json.dumps(faults[:10], indent=1)


# -- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "flag"), NUMERIC)
def test_hostile_numbers_are_refused_by_every_option_that_takes_one(run, command, flag):
    for text in NUMBERS:
        code, out, err = run(*COMMAND_LINES.get(command, f"{command} absent").split(), f"{flag}={text}")
        error, hint = err.splitlines()
        assert (code, out) == (2, "") and error.startswith(f"error: {flag} ") and hint.startswith("hint: "), (
            err
        )


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


TEXTS = [
    ("--optimizer-params", "{momentum: " + DIGITS[:300] + "}", "momentum must be at most"),
    ("--lr-schedule-params", '{"a": {"b": "-1e39"}}', "a.b must be at least"),
    ("--norm-layer", '{"name": "group_norm", "num_groups": 99999999999}', "num_groups"),
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


if __name__ == "__main__":
    json.dump(attack(Path(sys.argv[1])), sys.stdout)
