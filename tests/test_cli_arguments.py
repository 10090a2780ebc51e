"""What users type: `_` and `-`, booleans with and without a value, lists with spaces, commas or repeats."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipucnn.command_group import rewrite
from ipucnn.errors import ConfigurationError


def _param(*opts, off=(), multiple=False, is_flag=False):
    return types.SimpleNamespace(
        opts=list(opts), secondary_opts=list(off), multiple=multiple, is_flag=is_flag
    )


PARAMS = [
    _param("--validation", off=["--no-validation"]),
    _param("--pipeline-splits", multiple=True),
    _param("--device-mapping", multiple=True),
    _param("--num-replicas", "--replicas"),
    _param("--json", is_flag=True),
]
TABLE = {option: param for param in PARAMS for option in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("--validation", "--validation"),
        ("--validation True", "--validation"),
        ("--validation false", "--no-validation"),
        ("--validation=OFF", "--no-validation"),
        ("--no-validation", "--no-validation"),
        ("--no_validation False", "--validation"),
        ("--validation lenet", "--validation lenet"),
        ("--num_replicas 4", "--num-replicas 4"),
        ("--num_replicas=a_b", "--num-replicas=a_b"),
        ("--replicas --json", "--replicas --json"),
        ("--pipeline_splits a_1 b --json", "--pipeline-splits a_1 --pipeline-splits b --json"),
        ("--pipeline-splits=a,b x", "--pipeline-splits a,b x"),
        ("--pipeline-splits a --pipeline-splits b", "--pipeline-splits a --pipeline-splits b"),
        ("--device-mapping 0 -1 -v", "--device-mapping 0 --device-mapping -1 -v"),
        ("--un_known x", "--un-known x"),
        ("-- --validation False", "-- --validation False"),
        ("model --json", "model --json"),
    ],
)  # fmt: skip
def test_arguments_are_rewritten(typed, plain):
    assert rewrite(typed.split(), TABLE) == plain.split()


def test_a_list_option_without_values_is_an_empty_list():
    assert rewrite(["--pipeline-splits", "--json"], TABLE) == ["--pipeline-splits", "", "--json"]


def test_a_boolean_with_another_value_is_refused():
    with pytest.raises(ConfigurationError, match="--validation maybe: must be True or False"):
        rewrite(["--validation=maybe"], TABLE)


@given(st.lists(st.text("abc_12", min_size=1, max_size=5), min_size=1, max_size=6))
def test_every_way_to_type_a_list_gives_the_same(items):
    from ipucnn.config.options import BY_NAME

    def read(args):
        plain = rewrite(args, TABLE)
        return BY_NAME["pipeline_splits"].convert(plain[1::2])

    spaced = read(["--pipeline-splits", *items])
    assert spaced == tuple(items)
    assert read(["--pipeline_splits=" + ",".join(items)]) == spaced
    assert read([token for item in items for token in ("--pipeline-splits", item)]) == spaced
