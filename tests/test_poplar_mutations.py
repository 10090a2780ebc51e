"""Mutations of every call of the session to the SDK: the test double refuses each that the SDK refuses.

They are generated from the quoted public sources, not from the double's facts: for every leaf of the configuration a
wrong name, wrong types and an illegal value; for every call of the session, each keyword misspelt, a surplus and a
missing one, and values of a wrong type or out of range.  Left out are calls that the SDK accepts, and those that Python
or Keras refuse themselves (an attribute that a module lacks, a member that an enumeration lacks).  The unchanged calls
pass.
"""

from dataclasses import replace

import pytest
from poplar_double import installed
from poplar_double.facts import FACTS
from poplar_mutations import calls, leaves, operations, several, training, versions
from poplar_mutations.cases import try_group

from ipucnn.config.options import RunConfig, specs_for
from ipucnn.sessions.poplar import sdk_environment
from ipucnn.sessions.poplar.checks import why_of_last_replica
from ipucnn.sessions.poplar.options import LEAVES, SystemLayout, make_ipu_config
from ipucnn.training.program import make_program

# Group, SDK, environment variables
GROUPS = [
    *((make, "3.4", {}) for make in (leaves.leaves, calls.calls, training.training, training.strategies)),
    *((make, "3.4", {}) for make in (operations.names, operations.functions, operations.images)),
    *((make, "3.4", {}) for make in (operations.user_operations, operations.layers)),
    *((make, "3.4", several.POPRUN) for make in (several.instances, several.collectives)),
    *((versions.flags, sdk, {}) for sdk in ("3.4", "3.1", "3.0")),
    (versions.version_3_0, "3.0", {}),
]


@pytest.mark.slow_cases("calls-3.4", "images-3.4", "instances-3.4", "training-3.4", "version_3_0-3.0")
@pytest.mark.parametrize(
    ("make", "sdk", "variables"), GROUPS, ids=[f"{make.__name__}-{sdk}" for make, sdk, _ in GROUPS]
)
def test_every_mutation_is_refused(make, sdk, variables):
    names, wrong = try_group(make, sdk, variables)
    assert not wrong, "\n".join(wrong)
    assert names and len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)


CHANGES = [
    ("select_ipu", 3, "select_ipus auto_select_ipus"),
    ("on_demand", False, "device_connection.type device_connection.enable_remote_buffers"),
    ("compile_only", True, "device_connection.type device_connection.version"),
    ("fp_exceptions", True, " ".join(f"floating_point_behaviour.{name}" for name in ("inv", "div0", "oflo"))),
    ("nanoo", True, "floating_point_behaviour.nanoo"),
    ("stochastic_rounding", "ON", "floating_point_behaviour.esr experimental.enable_prng_stability"),
    ("half_partials", True, "convolutions.poplar_options matmuls.poplar_options"),
    ("gather_conv_output", True, "convolutions.poplar_options matmuls.poplar_options"),
    ("conv_dithering", True, "convolutions.poplar_options"),
    ("convolution_options", {"use128BitConvUnitLoad": True}, "convolutions.poplar_options"),
    ("matmul_options", {"enableFastReduce": True}, "matmuls.poplar_options"),
    ("internal_exchange_optimization_target", "memory", "compilation_poplar_options"),
    ("deterministic_workers", "false", "compilation_poplar_options"),
    ("stable_norm", True, "norms.use_stable_statistics"),
    ("max_cross_replica_buffer_size", 5, "optimizations.maximum_cross_replica_sum_buffer_size"),
    ("max_reduce_many_buffer_size", 6, "optimizations.maximum_reduce_many_buffer_size"),
    ("min_remote_tensor_size", 7, "optimizations.minimum_remote_tensor_size"),
    ("scheduling_algorithm", "LOOK_AHEAD", "scheduling.algorithm"),
]


def test_every_option_that_only_an_ipu_acts_on_changes_its_leaves():
    specs = {spec.name: spec for spec in specs_for("train")}
    with installed():
        from tensorflow.python import ipu

        def leaves(layout=SystemLayout(4), **options):
            return make_ipu_config(ipu, RunConfig(**options), layout).to_dict()

        default, bounded = leaves(), set()
        for name, value, changed in CHANGES:
            configured = leaves(**{name: value})
            assert {leaf for leaf in default if configured[leaf] != default[leaf]} == set(changed.split()), (
                name
            )
            bits = FACTS["leaves"][changed.split()[0]].get("bits")
            # int64 for bytes, int32 for devices; larger values are refused before TensorFlow is imported.
            if bits is not None:
                bounded.add(name)
                assert specs[name].within.maximum == 2 ** (bits - 1) - 1, name
            layout = leaves(SystemLayout(8, 0.25, True, 2))
    sizes = {"max_cross_replica_buffer_size", "max_reduce_many_buffer_size", "min_remote_tensor_size"}
    assert bounded == {"select_ipu", *sizes}
    changed = {leaf for *_, names in CHANGES for leaf in names.split()}
    assert changed | {leaf for leaf in default if layout[leaf] != default[leaf]} == set(LEAVES)
    assert layout["auto_select_ipus"] == 8 and layout["allow_recompute"]
    assert layout["convolutions.poplar_options"] == {"availableMemoryProportion": "0.25"}
    assert layout["norms.experimental.distributed_batch_norm_replica_group_size"] == 2


@pytest.mark.parametrize("rounding", ["ON", "RI"])
def test_a_process_that_does_not_train_rounds_to_nearest(rounding):
    with installed():
        from tensorflow.python import ipu

        def leaves(rounding, trains):
            config = RunConfig(precision="16.16", stochastic_rounding=rounding)
            return make_ipu_config(ipu, config, SystemLayout(1, trains=trains)).to_dict()

        assert leaves(rounding, trains=False) == leaves("OFF", trains=True) != leaves(rounding, trains=True)


@pytest.mark.parametrize(
    ("sdk", "stages", "reduces", "why"),
    [
        ("3.0.0", 1, False, "--accelerator-side-reduction averages"),
        ("3.0.0", 1, True, ""),
        ("3.4.0", 1, False, ""),
        ("3.4.0", 2, False, "pipelines give no others"),
    ],
)
def test_the_run_says_when_training_figures_are_those_of_the_last_replica(
    monkeypatch, sdk, stages, reduces, why
):
    monkeypatch.setattr(sdk_environment, "sdk_version", lambda system: sdk)
    config = RunConfig(
        num_replicas=2,
        ipus_per_replica=stages,
        pipeline_splits=["a"] * (stages - 1),
        accelerator_side_reduction=reduces,
        gradient_accumulation_count=8,
    )
    for replicas in (1, 2):
        program = make_program(replace(config, num_replicas=replicas), 1000, seed=1)
        told = why_of_last_replica(program, config)
        assert (why in told and bool(why) == bool(told)) if replicas == 2 else told == ""
