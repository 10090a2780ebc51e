"""What users type: `_` and `-`, booleans with and without a value, lists with spaces, commas or repeats."""

import subprocess
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipucnn.command_group import _spare_converters, build_root, rewrite
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


def test_what_typer_makes_of_values_is_what_is_made_without_its_converters():
    values = (None, "abc", "12", "-3", "1.5", "", ("a", "b"), ["x"], ())
    root, compared = build_root(), 0
    for name in ("plan-splits", "evaluate"):
        for param in root.get_command(None, name).params:
            own_kind = [v for v in values if isinstance(v, (tuple, list)) == param.multiple or v is None]
            if getattr(param, "is_flag", False):
                continue
            before = [_outcome(param, value) for value in own_kind]
            _spare_converters(param)
            after = [_outcome(param, value) for value in own_kind]
            assert before == after, (name, param.name)
            compared += len(before)
    assert compared > 300


def _outcome(param, value):
    try:
        result = param.process_value(None, value)
    except Exception as error:
        return type(error), str(error)
    return type(result), result


def test_a_command_whose_values_are_text_loads_no_converters():
    code = (
        "import sys\n"
        "from ipucnn import cli\n"
        "cli.run(['plan-splits', 'lenet', '--stages', '2', '--system', 'pod16', '--compare', 'params', '--json'])\n"
        "sys.exit(any(name.split('.')[0] == 'pydantic' for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and '"lenet"' in done.stdout
