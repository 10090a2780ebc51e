"""Options typed for a training run that would reach nothing in it: refused, so that nobody waits for their effect.

Only what is typed: presets, plans and saved configurations carry options for other runs, too.
"""

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Tuple

from ipucnn.config.options import BY_NAME
from ipucnn.config.resolve import FLAG
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.factory import runs_on_ipus
from ipucnn.training.program import Layout

BATCH_NORMS = ("batch_norm", "custom_batch_norm")
_STAGES = "make a pipeline: --ipus-per-replica 2 --pipeline-splits auto"


@dataclass(frozen=True)
class Rule:
    """One option that needs another.

    Attributes:
        name: the option.
        lacks: (config, layout) -> what the run lacks, to follow "has no effect"; None where the option has one.
        hint: how the run gets it.
        ipu_only: the rule is about IPUs.  Elsewhere the option is recorded for them, which the run says.
    """

    name: str
    lacks: Callable[[Any, Layout], Optional[str]]
    hint: str
    ipu_only: bool = True


def _pipeline(config: Any, layout: Layout) -> Optional[str]:
    return "without a pipeline" if layout.num_stages == 1 else None


def _accumulation(config: Any, layout: Layout) -> Optional[str]:
    # The SDK keeps the state of the optimizer in remote memory only under gradient accumulation.
    accumulates = layout.num_stages > 1 or layout.batching.gradient_accumulation_count > 1
    return None if accumulates else "without a pipeline or gradient accumulation"


def _replicas(config: Any, layout: Layout) -> Optional[str]:
    return "with one replica" if layout.batching.num_replicas == 1 else None


def _reduction(config: Any, layout: Layout) -> Optional[str]:
    return "in a pipeline" if layout.num_stages > 1 else _replicas(config, layout)


def _preprocessing(config: Any, layout: Layout) -> Optional[str]:
    on_ipus = config.eight_bit_transfer or config.accelerator_side_preprocess
    return None if on_ipus else "where the host preprocesses"


def _recomputation(config: Any, layout: Layout) -> Optional[str]:
    return _pipeline(config, layout) or (None if config.recomputation else "without --recomputation")


def _validation(config: Any, layout: Layout) -> Optional[str]:
    return _pipeline(config, layout) or (None if config.validation else "without validation")


def _batch_norm(config: Any, layout: Layout) -> Optional[str]:
    norm = config.norm_layer["name"]
    return None if norm in BATCH_NORMS else f"with norm-layer {norm}"


RULES: Tuple[Rule, ...] = (
    Rule("bn_momentum", _batch_norm, "", ipu_only=False),
    Rule("dbn_replica_group_size", _batch_norm, "", ipu_only=False),
    Rule("fused_preprocessing", _preprocessing, "add --eight-bit-transfer or --accelerator-side-preprocess"),
    Rule("offload_activations", _pipeline, _STAGES),
    Rule("offload_gradient_accumulation_buffers", _pipeline, _STAGES),
    Rule("recomputation_mode", _recomputation, f"{_STAGES} --recomputation"),
    Rule("pipeline_validation_model", _validation, ""),
    Rule("pipeline_schedule", _pipeline, _STAGES),
    Rule("optimizer_state_offloading", _accumulation, "use --gradient-accumulation-count 2 or more"),
    Rule("replicated_optimizer_state_sharding", _replicas, "use --num-replicas 2 or more"),
    Rule("accelerator_side_reduction", _reduction, ""),
    # How many micro-batches are computed as one is a choice of the host session.
    Rule("fused_micro_batches", lambda config, layout: "on IPUs", ""),
)


def check_effects(config: Any, origins: Mapping[str, str], layout: Layout) -> None:
    """Refuses the first typed option that would have no effect.

    Args:
        config: ``RunConfig``.
        origins: where each of its values is from.
        layout: from ``make_layout``.

    Raises:
        ConfigurationError: naming what the run lacks.
    """
    on_ipus = runs_on_ipus(config.device)
    for rule in RULES:
        spec, value = BY_NAME[rule.name], getattr(config, rule.name)
        # What is off does nothing on purpose; of an option that is on by default, True was asked for.
        is_off = value is False if spec.is_bool else value == spec.default
        if origins[rule.name] != FLAG or is_off or (rule.ipu_only and not on_ipus):
            continue
        lacking = rule.lacks(config, layout)
        if lacking is not None:
            shown = spec.flag if spec.is_bool else f"{spec.flag} {value}"
            raise ConfigurationError(
                f"{shown} has no effect {lacking}", f"drop it, or {rule.hint}" if rule.hint else "drop it"
            )
