"""Options without effect in a run are refused if they are typed, and only then."""

import contextlib
from dataclasses import replace

import pytest
from support.refusals import check_raises
from support.refused import all_refusals

from ipucnn.config.origin import RUN, of_plan, of_preset
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.runs.rules import RUN_RULES, RunFacts, check_run_rules
from ipucnn.sessions.group import Alone
from ipucnn.training.program import make_layout

PIPELINE = {"ipus_per_replica": "2", "pipeline_splits": ["auto"], "gradient_accumulation_count": "4"}
RECOMPUTING = {**PIPELINE, "recomputation": "true"}
MODE = "RecomputeAndBackpropagateInterleaved"
GROUP_NORM = {"norm_layer": "group_norm"}

REPLICAS = {"num_replicas": "2", "gradient_accumulation_count": "2"}

# option, value, a run on IPUs in which it has no effect, what that run lacks, a run in which it has one.  For runs
# on the host they are in tests/refusals/options-together.txt.
CASES = [
    ("fused_preprocessing", "true", {}, "where the host preprocesses", {"eight_bit_transfer": "true"}),
    ("fused_preprocessing", "true", PIPELINE, "preprocesses", {"accelerator_side_preprocess": "true"}),
    ("offload_activations", "true", {}, "without a pipeline", PIPELINE),
    ("offload_gradient_accumulation_buffers", "true", {}, "without a pipeline", PIPELINE),
    ("recomputation_mode", MODE, {}, "without recomputation", RECOMPUTING),
    ("recomputation_mode", MODE, PIPELINE, "without recomputation", RECOMPUTING),
    ("pipeline_validation_model", "true", {}, "without a pipeline", PIPELINE),
    ("pipeline_validation_model", "true", {**PIPELINE, "validation": "false"}, "validation", PIPELINE),
    ("optimizer_state_offloading", "true", {}, "accumulation", {"gradient_accumulation_count": "2"}),
    ("optimizer_state_offloading", "true", {}, "accumulation", PIPELINE),
    ("replicated_optimizer_state_sharding", "true", {}, "with one replica", REPLICAS),
    (
        "replicated_optimizer_state_sharding",
        "true",
        {"num_replicas": "2"},
        "or gradient accumulation",
        REPLICAS,
    ),
    ("accelerator_side_reduction", "true", {}, "with one replica", {"num_replicas": "2"}),
    ("accelerator_side_reduction", "true", {**PIPELINE, "num_replicas": "2"}, "in a pipeline", None),
    ("fused_micro_batches", "1", {}, "on IPUs", None),
    ("mixup", "0.2", {"micro_batch_size": "1"}, "where --micro-batch-size is 1", {}),
    ("ckpt_all_instances", "true", {}, "without several instances", None),
    ("threads", "2", {}, "on IPUs", None),
    ("devices", "2", {}, "on IPUs", None),
    ("deterministic_operations", "true", {}, "on IPUs", None),
    ("max_workers", "2", {}, "on IPUs", None),
    ("ema_decay", "0.9", {"training": "false"}, "with --no-training", {}),
]


def check(flags, **changes):
    flags = {"gradient_accumulation_count": "1", **flags}  # whatever the preset's accumulation
    resolved = resolve("train", flags, model="cifar_resnet8", reads_data=False)
    resolved = replace(resolved, origins={**resolved.origins, **changes})
    check_run_rules(RunFacts(resolved, make_layout(resolved.config), Alone()))


IPU_ONLY = {
    *(
        "fused_preprocessing",
        "offload_activations",
        "offload_gradient_accumulation_buffers",
        "pipeline_schedule",
    ),
    *("recomputation_mode", "pipeline_validation_model", "optimizer_state_offloading"),
    *("replicated_optimizer_state_sharding", "accelerator_side_reduction"),
    *("fused_micro_batches", "threads", "devices", "deterministic_operations", "max_workers"),
}
"""Options that a host records without effect, or that only a host has."""


@pytest.mark.parametrize(("name", "value", "lacking", "text", "having"), CASES)
def test_options_without_effect_are_refused(name, value, lacking, text, having):
    flags = {**lacking, name: value, "device": "ipu"}
    error = check_raises(ConfigurationError, text, "", check, flags)
    typed = "" if value in ("true", "false") else f" {value}"
    assert error.message.startswith("--" + name.replace("_", "-") + typed) and error.hint.startswith(
        "drop it"
    )
    # A preset, a plan or a saved configuration may have it, unless its effect would be lost silently.
    for origin in (of_preset("toy"), of_plan("p.yml"), RUN):
        is_refused = lacking == {"micro_batch_size": "1"}
        with pytest.raises(ConfigurationError) if is_refused else contextlib.nullcontext():
            check(flags, **{name: origin})
    if having is not None:
        check({**having, name: value, "device": "ipu"})
    on_the_host = {**flags, "device": "cpu"}
    if name in IPU_ONLY:
        check(on_the_host)
    else:
        check_raises(ConfigurationError, "no effect", "", check, on_the_host)


def test_every_rule_has_a_case():
    typed = " ".join(refusal.command for refusal in all_refusals() if refusal.page == "options-together")
    on_the_host = {rule.option for rule in RUN_RULES if f"--{rule.option.replace('_', '-')}" in typed}
    assert {rule.option for rule in RUN_RULES} == on_the_host | {case[0] for case in CASES} | {
        "compile_only",
        "select_ipu",
    }


def test_options_may_be_typed_as_off():
    off = {
        "fused_preprocessing": "false",
        "offload_activations": "false",
        "recomputation_mode": "Auto",
        "optimizer_state_offloading": "false",
        "dbn_replica_group_size": "1",
        **GROUP_NORM,
    }
    check({**off, "device": "ipu"})


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ({"optimizer": "lars", "weight_decay": "0.1"}, "is not LARS's"),
        ({"optimizer": "lars"}, None),
        ({"optimizer": "adam", "weight_decay": "0.1"}, None),
        ({"decay_biases_and_norms": False}, "nothing to leave out"),
        ({"decay_biases_and_norms": False, "weight_decay": "0.1"}, None),
        ({"decay_biases_and_norms": False, "l2_regularization": "0.1"}, None),
        ({"fold": "1"}, "without --kfold"),
        ({"fold": "3", "kfold": "2"}, "--fold 3 of --kfold 2"),
        ({"fold": "2", "kfold": "2"}, None),
        ({"kfold": "2"}, None),
        ({"synthetic_data": "host", "host_generated_data": True}, "two sources of the same data"),
        ({"synthetic_data": "host"}, None),
        ({"host_generated_data": True, "device_generated_data": True}, "host-generated-data and device-gen"),
        ({"learning_rate": "0.1", "lr_schedule": "stepped"}, "stepped has its own values"),
        ({"learning_rate": "0.1", "lr_schedule": "cosine"}, None),
        ({"gradient_accumulation_count": "2", "global_batch_size": "8"}, "one follows from the other"),
        ({"pad_dataset": True, "weight_updates_per_epoch": "3"}, "where an epoch ends"),
        ({"pad_dataset": True, "weight_updates_per_epoch": "-1"}, None),
        ({"eight_bit_transfer": True, "accelerator_side_preprocess": False}, "eight-bit-transfer"),
        ({"eight_bit_transfer": True}, None),
        ({"pipeline_splits": ["auto", "conv3"]}, "stands for all of them"),
        ({"training": False, "resume": True}, "nothing to continue"),
        ({"training": False, "validation": False}, "nothing to do"),
        ({"training": False}, None),
    ],
)
def test_only_contradicting_options_are_refused(typed, error):
    if error is None:
        resolve("train", typed, model="lenet")
    else:
        check_raises(ConfigurationError, error, "", resolve, "train", typed, model="lenet")
