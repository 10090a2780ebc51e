"""What a run refuses of a configuration before data is read: options without effect, and what no device here can do.

An option that is typed and would reach nothing is refused, so that nobody waits for its effect.  That holds only for
what is typed: presets, plans and saved configurations carry options for other runs, too.
"""

from dataclasses import dataclass
from typing import Callable, Mapping, Optional, Tuple

from ipucnn.config.options import BY_NAME, SPECS, RunConfig
from ipucnn.config.resolve import FLAG
from ipucnn.config.values import norm_of
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.factory import runs_on_ipus
from ipucnn.sessions.poplar.popdist import Instances, find_instances
from ipucnn.training.program import Layout

# What a run lacks, to follow "has no effect", and how it gets that ("": it cannot); None where nothing is lacking.
Lack = Optional[Tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    """One option that needs another.

    Attributes:
        name: the option.
        lacks: (config, layout) -> what the run lacks for it.
        ipu_only: the rule is about IPUs.  Elsewhere the option is recorded for them, which the run says.
        has_off: its default, or False, asks for nothing, and may be typed anywhere.
    """

    name: str
    lacks: Callable[[RunConfig, Layout], Lack]
    ipu_only: bool = True
    has_off: bool = True


def _pipeline(config: RunConfig, layout: Layout) -> Lack:
    if layout.num_stages > 1:
        return None
    return "without a pipeline", "make one: --ipus-per-replica 2 --pipeline-splits auto"


def _accumulation(config: RunConfig, layout: Layout) -> Lack:
    # The SDK keeps the state of the optimizer in remote memory only under gradient accumulation.
    if layout.num_stages > 1 or layout.batching.gradient_accumulation_count > 1:
        return None
    return "without a pipeline or gradient accumulation", "use --gradient-accumulation-count 2 or more"


def _replicas(config: RunConfig, layout: Layout) -> Lack:
    return None if layout.batching.num_replicas > 1 else ("with one replica", "use --num-replicas 2 or more")


def _reduction(config: RunConfig, layout: Layout) -> Lack:
    return ("in a pipeline", "") if layout.num_stages > 1 else _replicas(config, layout)


def _preprocessing(config: RunConfig, layout: Layout) -> Lack:
    if config.eight_bit_transfer or config.accelerator_side_preprocess:
        return None
    return "where the host preprocesses", "add --eight-bit-transfer or --accelerator-side-preprocess"


def _recomputation(config: RunConfig, layout: Layout) -> Lack:
    return None if config.recomputation else ("without recomputation", "add --recomputation, in a pipeline")


def _validation(config: RunConfig, layout: Layout) -> Lack:
    return _pipeline(config, layout) or (None if config.validation else ("without validation", ""))


def _batch_norm(config: RunConfig, layout: Layout) -> Lack:
    norm = config.norm_layer
    return None if norm_of(norm) == "batch" else (f"with norm-layer {norm['name']}", "")


def _half(config: RunConfig, layout: Layout) -> Lack:
    return None if config.precision != "32.32" else ("in 32 bits", "use --precision 16.16 or 16.32")


def _host_session(config: RunConfig, layout: Layout) -> Lack:
    return "on IPUs: it is a choice of the host session", ""


RULES: Tuple[Rule, ...] = (
    Rule("bn_momentum", _batch_norm, ipu_only=False, has_off=False),
    Rule("dbn_replica_group_size", _batch_norm, ipu_only=False),
    Rule("stochastic_rounding", _half, ipu_only=False),
    Rule("nanoo", _half, ipu_only=False),
    Rule("fused_preprocessing", _preprocessing),
    Rule("offload_activations", _pipeline),
    Rule("offload_gradient_accumulation_buffers", _pipeline),
    Rule("recomputation_mode", _recomputation),
    Rule("pipeline_validation_model", _validation),
    Rule("pipeline_schedule", _pipeline),
    Rule("optimizer_state_offloading", _accumulation),
    Rule("replicated_optimizer_state_sharding", _replicas),
    Rule("accelerator_side_reduction", _reduction),
    *(Rule(spec.name, _host_session) for spec in SPECS if not spec.ipu_effect),
)


def check_effects(config: RunConfig, origins: Mapping[str, str], layout: Layout) -> None:
    """Refuses the first typed option that would have no effect.

    Args:
        config: of the run.
        origins: where each of its values is from.
        layout: from ``make_layout``.

    Raises:
        ConfigurationError: naming what the run lacks.
    """
    on_ipus = runs_on_ipus(config.device)
    for rule in RULES:
        spec, value = BY_NAME[rule.name], getattr(config, rule.name)
        # Of an option that is on by default, True is asked for, too.
        is_off = rule.has_off and (value is False if spec.is_bool else value == spec.default)
        if origins[rule.name] != FLAG or is_off or (rule.ipu_only and not on_ipus):
            continue
        lack = rule.lacks(config, layout)
        if lack is not None:
            shown = spec.flag if spec.is_bool else f"{spec.flag} {value}"
            what, hint = lack
            raise ConfigurationError(
                f"{shown} has no effect {what}", f"drop it, or {hint}" if hint else "drop it"
            )


def check_compile_only(config: RunConfig) -> None:
    """Refuses ``--compile-only`` where there is nothing to compile for.

    Raises:
        ConfigurationError: the device is no IPU, or one that must be there is named.
    """
    if config.compile_only and not runs_on_ipus(config.device):
        raise ConfigurationError(
            f"--compile-only compiles for IPUs, and --device {config.device} is none here",
            "drop it, or type it in the Poplar SDK's environment",
        )
    if config.compile_only and config.select_ipu is not None:
        # The driver ends the process where it has no device to take that number of (poplar_executor.cc).
        raise ConfigurationError(
            f"--select-ipu {config.select_ipu}: --compile-only takes no device", "drop one of them"
        )


def refuse_instances(command: str) -> None:
    """Refuses ``poprun`` for a command that runs in one process.

    Raises:
        ConfigurationError: ``poprun`` started this process.
    """
    if find_instances().is_distributed:
        raise ConfigurationError(
            f"poprun started this, and `ipucnn {command}` is one process: only `ipucnn train` runs under it",
            f"type it without poprun: ipucnn {command} ...",
        )


def check_instances(instances: Instances, config: RunConfig) -> None:
    """Refuses instances that would train different networks: with seeds of their own, or away from each other.

    Raises:
        ConfigurationError: no seed is given, or the device is no IPU.
    """
    if instances.count > 1 and not runs_on_ipus(config.device):
        raise ConfigurationError(
            f"poprun started {instances.count} instances, and only IPUs are trained together",
            "start it without poprun: one process has all replicas on a CPU or GPU",
        )
    if instances.count > 1 and config.seed is None:
        raise ConfigurationError(
            f"{instances.count} instances of poprun need the same seed, and none is given", "add --seed 1"
        )
