"""Mutations of every call of the session to the SDK: the test double refuses each that the SDK refuses.

They are generated from the recorded facts: for every leaf of the configuration a wrong name, wrong types and an illegal
value; for every call of the session, each keyword misspelt, a surplus and a missing one, and values of a wrong type or
out of range.  Left out are calls that the SDK accepts, and those that Python or Keras refuse themselves (an attribute
that a module lacks, a member that an enumeration lacks).  The unchanged calls pass.
"""

import dataclasses
import subprocess
import sys

import pytest
from poplar_double import installed
from poplar_double.facts import FACTS
from poplar_mutations import calls, leaves, operations, several, training, versions
from poplar_mutations.cases import try_group

from ipucnn.config.options import RunConfig, specs_for
from ipucnn.sessions.poplar.config import ROWS, Layout, make_ipu_config

# Group, SDK, environment variables, number of mutations
GROUPS = [
    (leaves.leaves, "3.4", {}, 415),
    (calls.calls, "3.4", {}, 145),
    (training.training, "3.4", {}, 43),
    (training.strategies, "3.4", {}, 10),
    (operations.names, "3.4", {}, 7),
    (operations.functions, "3.4", {}, 65),
    (operations.images, "3.4", {}, 25),
    (operations.user_operations, "3.4", {}, 44),
    (operations.layers, "3.4", {}, 19),
    (several.instances, "3.4", several.POPRUN, 30),
    (several.collectives, "3.4", several.POPRUN, 31),
    (versions.flags, "3.4", {}, 6),
    (versions.version_3_1, "3.1", {}, 1),
    (versions.version_3_0, "3.0", {}, 17),
]


@pytest.mark.parametrize(("make", "sdk", "variables", "count"), GROUPS, ids=[g[0].__name__ for g in GROUPS])
def test_every_mutation_is_refused(make, sdk, variables, count):
    group, wrong = try_group(make, sdk, **variables)
    assert not wrong, "\n".join(wrong)
    names = [case.name for case in group.cases]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    assert len(names) == count, f"{len(names)} mutations of {group.name}"


def test_total_number_of_mutations():
    assert sum(count for *_, count in GROUPS) == 858


def test_every_row_of_the_table_names_a_leaf_and_options_that_exist():
    leaves, options = set(FACTS["leaves"]), {f.name for f in dataclasses.fields(RunConfig)}
    for row in ROWS:
        assert row.leaf in leaves and set(row.options) <= options, row.leaf
    assert len({row.leaf for row in ROWS}) == len(ROWS)


def test_options_are_bounded_by_the_fields_that_they_fill():
    """int64 for bytes, int32 for devices; values out of bounds are refused before TensorFlow is imported."""
    specs = {spec.name: spec for spec in specs_for("train")}
    bounded = {}
    for row in ROWS:
        bits = FACTS["leaves"][row.leaf].get("bits")
        if bits and len(row.options) == 1 and row.leaf.startswith(("optimizations.", "select_ipus")):
            (name,) = row.options
            bounded[name] = bits
            assert specs[name].within.maximum == 2 ** (bits - 1) - 1, name
    assert bounded == {
        "select_ipu": 32,
        "max_cross_replica_buffer_size": 64,
        "max_reduce_many_buffer_size": 64,
        "min_remote_tensor_size": 64,
    }
    code = "import sys; from ipucnn import cli; found = cli.run(sys.argv[1:]); assert 'tensorflow' not in sys.modules"
    command = ["train", "toy_model", "--max-cross-replica-buffer-size", str(2**63)]
    ended = subprocess.run(
        [sys.executable, "-c", code + "; sys.exit(found)", *command],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    assert "--max-cross-replica-buffer-size" in ended.stderr and str(2**63) in ended.stderr
    assert ended.stderr.count("error:") == ended.stderr.count("hint:") == 1


def test_every_option_that_only_an_ipu_acts_on_reaches_the_configuration():
    """Each option of the table changes its leaf."""
    changed = {
        "select_ipu": 3,
        "on_demand": False,
        "compile_only": True,
        "fp_exceptions": True,
        "nanoo": True,
        "stochastic_rounding": "ON",
        "half_partials": True,
        "gather_conv_output": True,
        "conv_dithering": True,
        "convolution_options": {"use128BitConvUnitLoad": True},
        "matmul_options": {"enableFastReduce": True},
        "internal_exchange_optimization_target": "memory",
        "deterministic_workers": "false",
        "stable_norm": True,
        "max_cross_replica_buffer_size": 5,
        "max_reduce_many_buffer_size": 6,
        "min_remote_tensor_size": 7,
        "scheduling_algorithm": "LOOK_AHEAD",
    }
    with installed():
        from tensorflow.python import ipu

        default = make_ipu_config(ipu, RunConfig(), Layout(4)).to_dict()
        for name, value in changed.items():
            config = dataclasses.replace(RunConfig(), **{name: value})
            configured = make_ipu_config(ipu, config, Layout(4)).to_dict()
            leaves = {row.leaf for row in ROWS if name in row.options}
            different = {leaf for leaf in configured if configured[leaf] != default[leaf]}
            assert different and different <= leaves, name
        layout = make_ipu_config(ipu, RunConfig(), Layout(8, 0.25, True, 2)).to_dict()
        assert layout["auto_select_ipus"] == 8 and layout["allow_recompute"]
        assert layout["convolutions.poplar_options"] == {"availableMemoryProportion": "0.25"}
