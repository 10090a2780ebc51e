"""Typed arguments: `_` and `-`, booleans with and without a value, lists with spaces, commas or repeats."""

import subprocess
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipucnn import cli
from ipucnn.command_group import rewrite
from ipucnn.config.options import BY_NAME


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


@given(st.lists(st.text("abc_12", min_size=1, max_size=5), min_size=1, max_size=6))
def test_all_ways_to_type_a_list_are_equal(items):
    def read(args):
        plain = rewrite(args, TABLE)
        return BY_NAME["pipeline_splits"].convert(plain[1::2])

    spaced = read(["--pipeline-splits", *items])
    assert spaced == tuple(items)
    assert read(["--pipeline_splits=" + ",".join(items)]) == spaced
    assert read([token for item in items for token in ("--pipeline-splits", item)]) == spaced


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("evaluate run", {"run": "run", "test_time_augmentation": 1, "checkpoint": None, "report": False}),
        (
            "evaluate run --test-time-augmentation 4 --checkpoint best --json",
            {"test_time_augmentation": 4, "checkpoint": "best", "json": True},
        ),
        ("infer run a.png b.png --top 3", {"images": ("a.png", "b.png"), "top": 3, "threshold": None}),
        ("infer run --threshold=.25 -- -a.png", {"images": ("-a.png",), "threshold": 0.25}),
        ("plan-splits lenet --splits a b", {"model": "lenet", "flags": {"pipeline_splits": ["a", "b"]}}),
        (
            "plan-splits --no-stage-proportions --stages 2",
            {"model": None, "stages": 2, "stage_proportions": False},
        ),
        ("benchmark --train --executions 3", {"training": True, "executions": 3, "flags": {}}),
        ("export run --infer", None),
        ("benchmark --infer", {"training": False}),
        ("models -v", {"pattern": "*", "json": False, "verbose": True}),
    ],
)
def test_a_command_gets_its_own_values_and_the_texts_of_runs(monkeypatch, typed, expected):
    name, *args = typed.split()
    received = []
    monkeypatch.setattr(f"ipucnn.commands.{name.replace('-', '_')}.{name.replace('-', '_')}", received.append)
    if expected is None:
        assert cli.run([name, *args]) == 2 and not received
        return
    assert cli.run([name, *args]) == 0
    (options,) = received
    assert {key: getattr(options, key) for key in expected} == expected


def test_help_and_a_plan_of_a_known_graph_import_neither_converters_nor_tensorflow():
    code = (
        "import sys\n"
        "from ipucnn import cli\n"
        "cli.run(['train', '--help'])\n"
        "cli.run(['plan-splits', 'lenet', '--stages', '2', '--system', 'pod16', '--compare', 'params', '--json'])\n"
        "heavy = {'pydantic', 'tensorflow', 'keras'} & {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and '"lenet"' in done.stdout and "reading the layers" not in done.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        ("--seed 1 --seed 2", "--seed is given 2 times: the last one counts, 2"),
        ("--replicas 2 --num-replicas 1", "is given 2 times: the last one counts, 1"),
        ("--augment --no-augment --augment", "--augment is given 3 times: the last one counts, True"),
        ("--pipeline-splits a --pipeline-splits b --seed 1", ""),
        ("--verbose", ""),
    ],
)
def test_the_last_of_repeated_flags_counts_and_is_said(run, words, said):
    _, _, err = run("train", "lenet", "--dataset", "digits", "--print-config", *words.split())
    assert ("times: the last one counts" in err) == bool(said)
    assert said in err
