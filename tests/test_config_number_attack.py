"""Absurd numbers for every numeric option: an error with a hint before TensorFlow is imported, or a legal value."""

import dataclasses
import importlib
import inspect
import math
import sys
import time
from typing import List, Optional

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from ipucnn.command_table import COMMANDS
from ipucnn.config import bounds, values
from ipucnn.config.bounds import Range
from ipucnn.config.options import BY_KEY, BY_NAME, SPECS, RunConfig
from ipucnn.config.spec import FRACTION, KINDS, OptionSpec
from ipucnn.errors import ConfigurationError
from ipucnn.training.program import make_layout, make_program

DIGITS = "9" * 5000
ABSURD = [
    DIGITS, "-" + DIGITS, DIGITS + "." + DIGITS, DIGITS + "/1", "1/" + DIGITS, DIGITS + "%", DIGITS + "x1",
    "1" + "0" * 30, "9223372036854775808", "1e300", "1e400", "-1e400", "1e-400", "inf", "nan", "0x" + "f" * 400,
    "99999999x99999999", "1/10**400", "1e999%", "x" * 10_000_000, "\udcff", "", " ", "1,2,3,4", "--1",
]  # fmt: skip
# These are given to the whole command, all others to the conversion alone.
TYPED = [
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
OTHER_NUMBERS = {"limit_train", "limit_eval", "image_size"}
LINES = {
    "train": ["train", "lenet", "--print-config"],
    "benchmark": ["benchmark", "lenet", "--print-config"],
    "plan-splits": ["plan-splits", "lenet", "--print-config"],
    "evaluate": ["evaluate", "absent"],
    "infer": ["infer", "absent"],
    "runs": ["runs", "absent"],
    "diff": ["diff", "absent", "absent"],
    "plot": ["plot", "absent"],
    "export": ["export", "absent", "--format", "onnx"],
    "verify-dataset": ["verify-dataset", "--dataset", "absent"],
    "models": ["models", "lenet", "--summary"],
    "build-records": ["build-records", "absent", "out"],
    "profile": ["profile", "absent"],
    "launch": ["launch", "absent"],
}


def is_number(spec):
    return spec.kind.is_number or spec.name in OTHER_NUMBERS


def params():
    """Yields (command, option string, name, annotation, parser) of every option of every command."""
    for name, command in COMMANDS.items():
        module = importlib.import_module(f"ipucnn.commands.{command.module or command.function}")
        for parameter in inspect.signature(getattr(module, command.function)).parameters.values():
            info = parameter.default
            if isinstance(info, typer.models.OptionInfo):
                flag = info.param_decls[0].split("/")[0]
                yield name, flag, parameter.name, parameter.annotation, info.parser


def numeric():
    """Yields every numeric option once with a command that takes it, and the numeric options of each command."""
    seen = set()
    for command, flag, name, _, parser in params():
        spec = BY_NAME.get(name)
        number = getattr(parser, "number", None)
        is_numeric = number is not None or (spec is not None and spec.flag == flag and is_number(spec))
        if is_numeric and (flag, number) not in seen:
            seen.add((flag, number))
            yield command, flag


NUMERIC = list(numeric())


def test_all_numeric_options_are_tested():
    flags = {flag for _, flag in NUMERIC}
    assert {spec.flag for spec in SPECS if is_number(spec)} <= flags
    of_commands = {
        "--stages",
        "--classes",
        "--executions",
        "--min-time",
        "--max-time",
        "--top",
        "--tile-size",
        "--views",
    }
    assert of_commands <= flags


def test_no_option_uses_the_numbers_of_typer():
    """Typer's numbers have no bounds, repeat long input in full, and take quadratic time for digits on Python 3.8."""
    for command, flag, _, annotation, parser in params():
        numbers = (int, float, Optional[int], Optional[float], List[int], List[float])
        assert annotation not in numbers or hasattr(parser, "number"), (command, flag)


def test_a_number_cannot_be_declared_without_bounds():
    for details in ({}, {"minimum": 0}, {"maximum": 1}, {"above": 0}):
        with pytest.raises(TypeError, match="declare its bounds"):
            OptionSpec("n", 1, "help", "panel", KINDS[int], within=Range(**details))
    OptionSpec("n", 1, "help", "panel", KINDS[float], within=Range(above=0, below=1))


@pytest.mark.parametrize(("command", "flag"), NUMERIC, ids=lambda value: value)
def test_absurd_numbers_are_refused_by_the_command(run, command, flag):
    for text in TYPED:
        before = time.process_time()
        code, out, err = run(*LINES[command], f"{flag}={text}")
        took = time.process_time() - before
        lines = err.splitlines()
        assert (code, out) == (2, ""), (text[:20], err[:300])
        assert len(lines) == 2 and lines[0].startswith(f"error: {flag} "), (text[:20], err[:300])
        assert lines[1].startswith("hint: ") and len(err) < 1500
        # Processor time; without bounds it was minutes.
        assert took < 10, text[:20]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if is_number(spec)], ids=lambda spec: spec.key)
def test_absurd_values_of_options(spec):
    for text in [
        *ABSURD,
        10**30,
        -(10**30),
        10**399,
        math.inf,
        -math.inf,
        math.nan,
        [1] * 100_000,
        {"a": 1},
        True,
    ]:
        try:
            value = spec.convert(text)
        except values.BadValue as bad:
            assert len(bad.reason) < 300
            continue
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)):
                assert abs(number) <= bounds.MAX_BYTES or abs(number) <= (spec.within.maximum or 0)


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


@pytest.mark.parametrize(
    ("flag", "text", "reason"),
    [
        ("--optimizer-params", '{"momentum": 1e400}', "momentum must be at most"),
        ("--optimizer-params", "{momentum: " + DIGITS[:300] + "}", "momentum must be at most"),
        ("--lr-schedule-params", '{"boundaries": [1, 1e400]}', "boundaries[1] must be at most"),
        ("--lr-schedule-params", '{"a": {"b": "-1e39"}}', "a.b must be at least"),
        ("--norm-layer", '{"name": "group_norm", "num_groups": 99999999999}', "num_groups"),
        ("--norm-layer", '{"name": "batch_norm", "epsilon": 1e30}', "epsilon"),
        (
            "--norm-layer",
            '{"name": "batch_norm", "momentum": NaN}',
            "momentum must be a number that is finite",
        ),
        ("--matmul-options", '{"a": Infinity}', "a must be at most"),
        ("--pipeline-splits", ",".join(f"l{n}" for n in range(100_000)), "has 100,000 values"),
        ("--device-mapping", ",".join(map(str, range(100_000))), "has 100,000 values"),
        ("--available-memory-proportion", " ".join(["10"] * 100_000), "has 100,000 values"),
        ("--run-dir", "x" * 10_000_000, "more than 4,096 characters"),
        ("--optimizer", "x" * 1000, "must be one of"),
        ("--validation", "x" * 10_000, "validation"),
    ],
)
def test_bounds_hold_inside_lists_and_dictionaries(run, flag, text, reason):
    argument = f"{flag}={text}"
    code, out, err = run("train", "lenet", "--print-config", argument)
    assert (code, out) == (2, "") and reason in err.splitlines()[0]
    assert err.splitlines()[1].startswith("hint: ") and len(err) < 1500


def test_a_fraction_of_huge_parts_is_divided():
    assert values.parse_fraction("1" + "0" * 300 + "/4" + "0" * 300) == 0.25
    with pytest.raises(values.BadValue, match="at least 1e-06"):
        values.parse_fraction("1/" + "9" * 300)
    assert values.parse_fraction("9" * 5000 + "/1") > bounds.MAX_FLOAT32


def test_products_of_legal_numbers_are_bounded():
    large = RunConfig(micro_batch_size=1, num_replicas=2**16, gradient_accumulation_count=2**20)
    with pytest.raises(ConfigurationError, match="the global batch of 68,719,476,736 samples") as caught:
        make_layout(large)
    assert caught.value.hint == "lower --gradient-accumulation-count to 32767 or less, or one of the others"
    most = make_layout(dataclasses.replace(large, gradient_accumulation_count=32767)).global_batch_size
    assert most <= bounds.MAX_COUNT
    long = RunConfig(weight_updates_per_epoch=10**6, num_epochs=10**6)
    with pytest.raises(ConfigurationError, match="and a run has at most 2147483647") as caught:
        make_program(long, 1, seed=0)
    assert "--num-epochs 2147 " in caught.value.hint
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


def test_absurd_numbers_are_refused_without_tensorflow():
    """Runs in a new process: other tests of this one may have imported TensorFlow."""
    import subprocess

    program = """
import sys
from ipucnn import cli
lines = (
    ["train", "lenet", "--micro-batch-size", "9" * 5000],
    ["plan-splits", "lenet", "--stages", "1e300"],
    ["train", "lenet", "--optimizer-params", "[" * 100000],
    ["infer", "x", "--top", "9" * 5000],
)
for line in lines:
    assert cli.run(line) == 2, line[:3]
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    code, out, err = run(*line.split())
    assert (code, out) == (4, "") and "iB while it is made" in err and "hint: lower the classes" in err
