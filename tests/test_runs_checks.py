"""Options without effect in a run are refused if they are typed, and only then."""

import contextlib
from dataclasses import replace

import pytest
from support.refusals import check_raises

from ipucnn.config.origin import RUN, TYPED, of_plan, of_preset
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.runs.rules import RULES, Facts, check_rules
from ipucnn.training.program import make_layout

PIPELINE = {"ipus_per_replica": "2", "pipeline_splits": ["auto"], "gradient_accumulation_count": "4"}
RECOMPUTING = {**PIPELINE, "recomputation": "true"}
MODE = "RecomputeAndBackpropagateInterleaved"
GROUP_NORM = {"norm_layer": "group_norm"}

# option, value, a run in which it has no effect, what that run lacks, a run in which it has one
PLAIN = {
    "optimizer_params": "{momentum: 0}",
    "lr_schedule": "const",
    "lr_warmup_params": "none",
    "weight_decay": "0",
}
OF_TRAINING = {
    "clip_gradient_norm": "1",
    "ema_decay": "0.9",
    "mixup": "0.2",
    "cutmix": "1",
    "random_erasing": "0.2",
    "learning_rate": "0.1",
    "augment": "true",
    "class_weights": "balanced",
    "target_accuracy": "0.9",
    "early_stopping": "3",
    "mlperf_logging": "true",
}
OF_CHECKPOINTS = (
    ("clean_dir", "true"),
    ("checkpoint_dir", "d"),
    ("ckpts_per_epoch", "2"),
    ("first_ckpt_epoch", "1"),
    ("keep_checkpoints", "3"),
)
OF_VALIDATION = {name: OF_TRAINING[name] for name in ("target_accuracy", "early_stopping", "mlperf_logging")}
CASES = [
    ("bn_momentum", "0.9", GROUP_NORM, "with norm-layer group_norm", {}),
    ("dbn_replica_group_size", "2", {**GROUP_NORM, "num_replicas": "2"}, "group_norm", {"num_replicas": "2"}),
    ("precise_batch_norm", "64", GROUP_NORM, "with norm-layer group_norm", {}),
    ("precise_batch_norm", "64", {"training": "false"}, "with --no-training", {}),
    (
        "precise_batch_norm",
        "64",
        {"validation": "false", "checkpoints": "false"},
        "without validation and checkpoints",
        {"validation": "false"},
    ),
    ("stochastic_rounding", "ON", {}, "in 32 bits", {"precision": "16.32"}),
    ("nanoo", "true", {}, "in 32 bits", {"precision": "16.16"}),
    ("auto_loss_scaling", "true", {}, "in 32 bits", {**PLAIN, "precision": "16.16"}),
    ("fused_preprocessing", "true", {}, "where the host preprocesses", {"eight_bit_transfer": "true"}),
    ("fused_preprocessing", "true", PIPELINE, "preprocesses", {"accelerator_side_preprocess": "true"}),
    ("offload_activations", "true", {}, "without a pipeline", PIPELINE),
    ("offload_gradient_accumulation_buffers", "true", {}, "without a pipeline", PIPELINE),
    ("recomputation_mode", MODE, {}, "without recomputation", RECOMPUTING),
    ("recomputation_mode", MODE, PIPELINE, "without recomputation", RECOMPUTING),
    ("pipeline_validation_model", "true", {}, "without a pipeline", PIPELINE),
    ("pipeline_validation_model", "true", {**PIPELINE, "validation": "false"}, "validation", PIPELINE),
    ("pipeline_schedule", "Interleaved", {}, "without a pipeline", PIPELINE),
    ("optimizer_state_offloading", "true", {}, "accumulation", {"gradient_accumulation_count": "2"}),
    ("optimizer_state_offloading", "true", {}, "accumulation", PIPELINE),
    ("replicated_optimizer_state_sharding", "true", {}, "with one replica", {"num_replicas": "2"}),
    ("accelerator_side_reduction", "true", {}, "with one replica", {"num_replicas": "2"}),
    ("accelerator_side_reduction", "true", {**PIPELINE, "num_replicas": "2"}, "in a pipeline", None),
    ("fused_micro_batches", "1", {}, "on IPUs", None),
    *((name, value, {"training": "false"}, "with --no-training", {}) for name, value in OF_TRAINING.items()),
    *(
        (name, value, {"validation": "false"}, "without validation", {})
        for name, value in OF_VALIDATION.items()
    ),
    ("plot_schedule", "x.png", {}, "in a run that trains", {"dry_run": "true"}),
    ("draw_samples", "x.png", {}, "in a run that trains", {"dry_run": "true"}),
    *((name, value, {"checkpoints": "false"}, "without checkpoints", {}) for name, value in OF_CHECKPOINTS),
    ("validation_freq", "2", {"validation": "false"}, "without validation", {}),
    ("mixup", "0.2", {"micro_batch_size": "1"}, "where --micro-batch-size is 1", {}),
    ("cutmix", "1", {"micro_batch_size": "1"}, "where --micro-batch-size is 1", {}),
    ("wandb_run_name", "name", {}, "without Weights & Biases", {"wandb": "true"}),
    ("wandb_tags", "one two", {}, "without Weights & Biases", {"wandb": "true"}),
    ("ckpt_all_instances", "true", {}, "without several instances", None),
    ("threads", "2", {}, "on IPUs", None),
    ("devices", "2", {}, "on IPUs", None),
    ("deterministic_operations", "true", {}, "on IPUs", None),
    ("max_workers", "2", {}, "on IPUs", None),
    ("reduction", "allreduce", {}, "in one process", None),
    ("rank_timeout", "5", {}, "in one process", None),
    ("require_same_bytes", "true", {}, "in one process", None),
]


# option, value, a run that it contradicts, and the error: from any origin except where the last is False
CLASHES = [
    ("weights", "imagenet", {}, "there are no ImageNet weights for cifar_resnet8", True),
    ("select_ipu", "1", {"compile_only": "true", "device": "ipu"}, "no effect with --compile-only", True),
    ("compile_only", "true", {"dry_run": "true", "device": "ipu"}, "has no effect with --dry-run", True),
    (
        "compile_only",
        "true",
        {"device": "cpu"},
        "has no effect with --device cpu, which is no IPU here",
        True,
    ),
    ("loss", "bce_dice", {}, "needs a segmentation network", True),
    ("pad_dataset", "true", {"loss": "bce_dice"}, "with the bce_dice loss", True),
    ("mixup", "0.2", {}, "predicts one for each pixel", True),
    ("random_erasing", "0.2", {}, "predicts one for each pixel", True),
    ("freeze", "1", {}, "these layers would keep random numbers", True),
    ("ipus", "4", {"num_replicas": "1"}, "and --num-replicas 1 contradict each other", False),
]


@pytest.mark.parametrize(("name", "value", "others", "text", "from_anywhere"), CLASHES)
def test_options_that_contradict_the_run_are_refused(name, value, others, text, from_anywhere):
    model = "unet" if "pixel" in text or "dice" in text else "cifar_resnet8"
    resolved = resolve("train", {**others, name: value}, model=model, reads_data=False)
    layout = make_layout(resolved.config)
    for origin in (TYPED, of_preset("x")):
        facts = Facts(replace(resolved, origins={**resolved.origins, name: origin}), layout)
        if origin != TYPED and not from_anywhere:
            check_rules(facts)
            continue
        check_raises(ConfigurationError, text, "", check_rules, facts)


def check(flags, **changes):
    flags = {"gradient_accumulation_count": "1", **flags}  # whatever the preset's accumulation
    resolved = resolve("train", flags, model="cifar_resnet8", reads_data=False)
    resolved = replace(resolved, origins={**resolved.origins, **changes})
    check_rules(Facts(resolved, make_layout(resolved.config)))


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
    # A loss for another task is refused where its name is decided.
    assert {rule.option for rule in RULES} | {"loss"} == {case[0] for case in [*CASES, *CLASHES]}


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
