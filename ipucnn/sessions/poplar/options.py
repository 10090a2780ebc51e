"""Turns a configuration and a Program into the SDK's options: one table for ``IPUConfig``, then the arguments of each
model's pipelining or accumulation options.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ipucnn.aliases import PlainValue, SdkModule
from ipucnn.config.options import RunConfig
from ipucnn.training.program import Program, stage_proportions

# Target of programs that are compiled without a device: Mk2 and Bow.
_COMPILED_VERSION = "ipu2"


@dataclass(frozen=True)
class SystemLayout:
    """The part of the system's configuration that follows from the Program.

    Attributes:
        num_ipus: the IPUs of this process.
        available_memory_proportion: the one of all convolutions and matrix products, in [0, 1]; None: one per stage, or
            Poplar's default.
        recomputation: whether activations are recomputed.
        dbn_replica_group_size: the replicas that share batch norm statistics.
        selects: whether this configuration selects the IPUs; under ``poprun``, poprun does.
        trains: whether the process trains; only then may the system round stochastically.
    """

    num_ipus: int
    available_memory_proportion: Optional[float] = None
    recomputation: bool = False
    dbn_replica_group_size: int = 1
    selects: bool = True
    trains: bool = True


def option_text(value: object) -> str:
    """Returns the text of a Poplar option's value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def connection_type(config: RunConfig) -> str:
    """Returns when the process attaches to its device, as the SDK's ``DeviceConnectionType``."""
    if config.compile_only:
        return "PRE_COMPILE"
    return "ON_DEMAND" if config.on_demand else "ALWAYS"


def _products(config: RunConfig, layout: SystemLayout, gather: str) -> Dict[str, Any]:
    """Returns options that convolutions and matrix products share; ``gather`` is their name of --gather-conv-output."""
    options: Dict[str, Any] = {}
    if layout.available_memory_proportion is not None:
        options["availableMemoryProportion"] = layout.available_memory_proportion
    if config.half_partials:
        options["partialsType"] = "half"
    if config.gather_conv_output:
        options[gather] = True
    return options


def _convolution(config: RunConfig, layout: SystemLayout) -> Dict[str, str]:
    options = _products(config, layout, "gatherConvOutput")
    if config.conv_dithering:
        options["enableConvDithering"] = True
    options.update(config.convolution_options)
    return {key: option_text(value) for key, value in options.items()}


def _matmul(config: RunConfig, layout: SystemLayout) -> Dict[str, str]:
    options = {**_products(config, layout, "gatherOutput"), **config.matmul_options}
    return {key: option_text(value) for key, value in options.items()}


def _engine(config: RunConfig, layout: SystemLayout) -> Dict[str, str]:
    options: Dict[str, str] = {}
    if config.internal_exchange_optimization_target is not None:
        options["opt.internalExchangeOptimisationTarget"] = config.internal_exchange_optimization_target
    options["target.deterministicWorkers"] = config.deterministic_workers
    return options


def _rounding(config: RunConfig, layout: SystemLayout) -> str:
    return config.stochastic_rounding if layout.trains else "OFF"


_ROUNDING = {"OFF": "OFF", "ON": "ON", "RI": "REPLICA_IDENTICAL_ONLY"}

# (config, layout) -> value of a leaf of ``IPUConfig``, by its dotted name.  A member of an enumeration is given by its
# name; None keeps the SDK's default.
LEAVES: Dict[str, Callable[[RunConfig, SystemLayout], Any]] = {
    "auto_select_ipus": lambda c, layout: (
        layout.num_ipus if layout.selects and c.select_ipu is None else None
    ),
    "select_ipus": lambda c, layout: c.select_ipu if layout.selects else None,
    "device_connection.type": lambda c, layout: connection_type(c),
    "device_connection.version": lambda c, layout: _COMPILED_VERSION if c.compile_only else None,
    # Read only if no device is attached during compilation, so that the driver cannot ask one.
    "device_connection.enable_remote_buffers": lambda c, layout: connection_type(c) != "ALWAYS" or None,
    "allow_recompute": lambda c, layout: layout.recomputation,
    "floating_point_behaviour.inv": lambda c, layout: c.fp_exceptions,
    "floating_point_behaviour.div0": lambda c, layout: c.fp_exceptions,
    "floating_point_behaviour.oflo": lambda c, layout: c.fp_exceptions,
    "floating_point_behaviour.nanoo": lambda c, layout: c.nanoo,
    "floating_point_behaviour.esr": lambda c, layout: _ROUNDING[_rounding(c, layout)],
    "convolutions.poplar_options": _convolution,
    "matmuls.poplar_options": _matmul,
    "compilation_poplar_options": _engine,
    # The driver then reseeds around operations that all replicas must round alike.
    "experimental.enable_prng_stability": lambda c, layout: _rounding(c, layout) != "OFF" or None,
    "norms.use_stable_statistics": lambda c, layout: c.stable_norm,
    "norms.experimental.distributed_batch_norm_replica_group_size": lambda c, layout: (
        layout.dbn_replica_group_size
    ),
    "optimizations.maximum_cross_replica_sum_buffer_size": lambda c, layout: c.max_cross_replica_buffer_size,
    "optimizations.maximum_reduce_many_buffer_size": lambda c, layout: c.max_reduce_many_buffer_size,
    "optimizations.minimum_remote_tensor_size": lambda c, layout: c.min_remote_tensor_size,
    "scheduling.algorithm": lambda c, layout: c.scheduling_algorithm,
}


def set_leaf(ipu_config: SdkModule, leaf: str, value: PlainValue) -> None:
    """Sets a leaf of an ``IPUConfig``; enumerations take their member's name."""
    import enum

    *categories, name = leaf.split(".")
    node = ipu_config
    for category in categories:
        node = getattr(node, category)
    present = getattr(node, name)
    if isinstance(present, enum.Enum):
        value = type(present)[value]
    setattr(node, name, value)


def make_ipu_config(ipu: SdkModule, config: RunConfig, layout: SystemLayout) -> Any:
    """Returns an ``IPUConfig`` with every leaf of the table set, not yet applied.

    Args:
        ipu: ``tensorflow.python.ipu``.
        config: the options of the run.
        layout: the values that follow from the Program.
    """
    ipu_config = ipu.config.IPUConfig()
    for leaf, value_of in LEAVES.items():
        value = value_of(config, layout)
        if value is not None:
            set_leaf(ipu_config, leaf, value)
    return ipu_config


def _stage_options(ipu: SdkModule, values: Sequence[Tuple[float, float]]) -> List[Any]:
    return [
        ipu.pipelining_ops.PipelineStageOptions(
            convolution_options={"availableMemoryProportion": option_text(convolution)},
            matmul_options={"availableMemoryProportion": option_text(matmul)},
        )
        for convolution, matmul in values
    ]


def pipelining_options(ipu: SdkModule, program: Program, config: RunConfig, training: bool) -> Dict[str, Any]:
    """Returns the arguments of ``set_pipelining_options``.

    The SDK does not remember keywords from call to call, and models do not save them: each call must pass all.
    """
    schedule = ipu.pipelining_ops.PipelineSchedule[program.pipeline_schedule]
    options: Dict[str, Any] = {
        "device_mapping": [int(ipu_number) for ipu_number in program.device_mapping],
        "pipeline_schedule": schedule,
    }
    # empty if all stages share one
    per_stage = stage_proportions(program.available_memory_proportion, program.num_stages)
    if per_stage:
        options["forward_propagation_stages_poplar_options"] = _stage_options(ipu, per_stage)
    if not training:
        return options
    if per_stage:
        options["backward_propagation_stages_poplar_options"] = _stage_options(ipu, per_stage)
    options.update(accumulation_options(program, config))
    if program.recomputation:
        options["recomputation_mode"] = ipu.pipelining_ops.RecomputationMode[config.recomputation_mode]
    if config.offload_activations:
        options["offload_activations"] = True
    if config.offload_gradient_accumulation_buffers:
        options["offload_gradient_accumulation_buffers"] = True
    return options


def accumulation_options(program: Program, config: RunConfig) -> Dict[str, Any]:
    """Returns the arguments of ``set_gradient_accumulation_options`` for a model without a pipeline."""
    options: Dict[str, Any] = {
        "gradient_accumulation_steps_per_replica": int(program.gradient_accumulation_count),
        "gradient_accumulation_reduction_method": program.gradient_accumulation_reduction_method,
        "offload_weight_update_variables": config.optimizer_state_offloading,
    }
    if config.replicated_optimizer_state_sharding:
        options["replicated_optimizer_state_sharding"] = True
    return options
