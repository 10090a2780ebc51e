"""Option values: what each option takes, the same from a flag's text and from YAML."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipucnn.config import bounds, values
from ipucnn.config.options import BY_KEY, BY_NAME, SPECS, RunConfig, find_spec
from ipucnn.config.parameters import names_of
from ipucnn.config.spec import FILE, FILES
from ipucnn.config.values import BadValue
from ipucnn.errors import ConfigurationError
from ipucnn.models.registry import NORMS


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("precision", 16.16, "16.16"),
        ("precision", "16.32", "16.32"),
        ("stochastic-rounding", True, "ON"),
        ("stochastic-rounding", "off", "OFF"),
        ("stochastic-rounding", "RI", "RI"),
        ("l2-regularization", "1e-5", 1e-5),
        ("logs-per-epoch", "1/4", 0.25),
        ("logs-per-epoch", "0.3333333333333333333", 1 / 3),
        ("weight-updates-per-epoch", "-1", -1),
        ("available-memory-proportion", [13.5], (13.5,)),
        ("available-memory-proportion", "15, 20", (15.0, 20.0)),
        ("device-mapping", "0 1 1 0", (0, 1, 1, 0)),
        ("device-mapping", ["0", "1 2"], (0, 1, 2)),
        ("pipeline-splits", ["a,b", "c"], ("a", "b", "c")),
        ("pipeline-splits", [""], ()),
        ("image-size", 224, (224, 224)),
        ("image-size", "388x512", (388, 512)),
        ("limit-train", 500, "500"),
        ("limit-eval", "12.5%", "12.5%"),
        ("norm-layer", "group_norm", {"name": "group_norm"}),
        ("norm-layer", "none", {"name": "none"}),
        ("norm-layer", '{"name": "batch_norm", "momentum": 0.9}', {"name": "batch_norm", "momentum": 0.9}),
        (
            "matmul-options",
            '{"partialsType": "half", "availableMemoryProportion": 0.5, "enableFastReduce": true, "n": 3}',
            {"partialsType": "half", "availableMemoryProportion": 0.5, "enableFastReduce": True, "n": 3},
        ),
        ("optimizer-params", {"weight_decay": "2.5e-6"}, {"weight_decay": 2.5e-6}),
        ("optimizer-params", "{momentum: 0.9}", {"momentum": 0.9}),
        ("lr-schedule-params", {"boundaries": ["1e1", 20]}, {"boundaries": [10.0, 20]}),
        ("pipeline-schedule", "interleaved", "Interleaved"),
        ("scheduling-algorithm", "post-order", "POST_ORDER"),
        ("gradient-accumulation-count", "none", None),
        ("validation", "ON", True),
        ("micro-batch-size", 8.0, 8),
        ("synthetic-data", "cpu", "host"),
        ("freeze", "3", "3"),
        ("freeze", "conv1, block*", "conv1,block*"),
        ("weight-updates-per-epoch", "1", 1),
        ("kfold", 1, None),
    ],
)  # fmt: skip
def test_value_is_read(key, written, value):
    assert BY_KEY[key].convert(written) == value


@pytest.mark.parametrize("digits", [398, 399, 400, 401, 5000])
@pytest.mark.parametrize(("key", "ending"), [("logs-per-epoch", "/3"), ("logs-per-epoch", ""), ("seed", "")])
def test_a_number_beyond_every_bound_keeps_its_sign(key, ending, digits):
    for sign, reason in (("", "at most"), ("+", "at most"), ("-", "at least")):
        with pytest.raises(BadValue, match=reason):
            BY_KEY[key].convert(sign + "9" * digits + ending)


@given(st.integers(-(10**30), 10**30))
def test_whole_numbers_are_exact(number):
    assert values.parse_int(str(number)) == number


@given(st.floats(-bounds.MAX_FLOAT32, bounds.MAX_FLOAT32))
def test_numbers_in_text_become_numbers(number):
    assert values.numbers_in({"a": [repr(number), "b"]}) == {"a": [number, "b"]}


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_text_inside_a_value_must_be_utf_8(text):
    with pytest.raises(BadValue, match=r"a\[1\].*UTF-8"):
        values.numbers_in({"a": ["b", text]})
    assert values.numbers_in({"a": ["", " "]}) == {"a": ["", " "]}


@given(st.integers(-1000, 1000), st.integers(1, 1000))
def test_fractions_are_exact(numerator, denominator):
    assert values.parse_fraction(f"{numerator}/{denominator}") == numerator / denominator


@pytest.mark.parametrize("written", ["1/2.5", "1/-2", "1/2/3", "a/2", "/2", "1/"])
def test_a_fraction_is_of_two_whole_numbers(written):
    with pytest.raises(BadValue, match="fraction such as 1/4"):
        values.parse_fraction(written)


def test_every_default_is_legal():
    for spec in SPECS:
        if spec.default is not None:
            assert spec.convert(spec.yaml_value(spec.default)) == spec.default, spec.key


def test_each_option_is_declared_once_and_described():
    keys = [key for spec in SPECS for key in spec.keys]
    assert len(set(keys)) == len(keys)
    assert set(BY_NAME) == {field.name for field in dataclasses.fields(RunConfig)}
    for spec in SPECS:
        assert spec.help.endswith("."), spec.key
        assert spec.commands, spec.key


def test_all_spellings_of_a_key_find_its_option():
    for key in ("num-replicas", "num_replicas", "replicas", "NUM-REPLICAS"):
        assert find_spec(key) is BY_NAME["num_replicas"]
    assert find_spec("nb-ipus-per-replica") is find_spec("ipus_per_replica")
    assert find_spec("model") is find_spec("model-name")
    assert find_spec("num-replica") is None


def test_norm_layers_map_to_kinds_of_norms_and_back():
    """Names of --norm-layer map to kinds of norms, and each kind back to its first name."""
    names = {"batch_norm": "batch", "custom_batch_norm": "batch", "none": "none"}
    assert {name: values.norm_of({"name": name}) for name in names} == names
    assert set(values.NORM_LAYERS.values()) == set(NORMS)
    assert tuple(values.NORM_LAYERS) == names_of("norm_layer")
    for norm in NORMS:
        assert values.norm_of(values.norm_layer_of(norm)) == norm
    assert values.norm_layer_of("batch") == {"name": "batch_norm"}


@pytest.mark.parametrize(
    ("key", "word", "number"),
    [
        ("devices", "ALL", values.ALL),
        ("keep-checkpoints", "all", None),
        ("weight-updates-per-epoch", "-1", -1),
    ],
)
def test_a_number_or_a_word(key, word, number):
    spec = BY_KEY[key]
    for written, value in ((word, number), (word.lower(), number), ("4", 4), (1, 1)):
        assert spec.convert(written) == value
        assert spec.convert(spec.yaml_value(value)) == value
    for bad in ("0", 0, "-2", "often", "1.5"):
        with pytest.raises(BadValue):
            spec.convert(bad)


@pytest.mark.parametrize("kind", [FILE, FILES])
def test_an_empty_path_of_a_command_is_refused_and_not_the_working_directory(kind):
    with pytest.raises(ConfigurationError, match="a path is empty"):
        kind.parse("")


def test_a_text_has_a_longest_length():
    longest = "x" * values.MAX_TEXT
    assert BY_NAME["run_dir"].convert(longest) == Path(longest)
    with pytest.raises(BadValue, match="more than"):
        BY_NAME["run_dir"].convert(longest + "x")


def test_a_remedy_is_the_nearest_value_or_else_the_hint():
    assert BadValue("wrong", nearest=3).advice("--x") == "the nearest legal value is 3: --x 3"
    assert BadValue("wrong", hint="do").advice("--x") == "do" and BadValue("wrong").advice("--x") is None


def test_whole_numbers_are_typed_without_a_point():
    numbers = (5.0, -3.0, 0.5, 1e18, 1 / 3)
    assert [values.plain_number(n) for n in numbers] == ["5", "-3", "0.5", "1e+18", "0.3333333333333333"]
