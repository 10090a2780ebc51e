"""Stages and pipelining options of a model on IPUs, from the Program."""

from typing import Any, Dict, List, Sequence, Tuple

from ipucnn.sessions.poplar.config import option_text
from ipucnn.training.program import Program, stage_proportions


def stages_by_layer(order: Sequence[str], splits: Sequence[str]) -> Dict[str, int]:
    """The stage of each layer of the network: a split opens the next one.

    Args:
        order: names of the layers in the order in which they run.
        splits: layers that open stages 1, 2, ...

    Raises:
        ValueError: a split that is no layer of the network, or out of order.
    """
    stages, stage = {}, 0
    remaining = list(splits)
    for name in order:
        if remaining and name == remaining[0]:
            stage += 1
            remaining.pop(0)
        stages[name] = stage
    if remaining:
        raise ValueError(f"split {remaining[0]} is no layer of the network, or out of order")
    return stages


def assign_stages(model: Any, order: Sequence[str], splits: Sequence[str]) -> None:
    """Tells the SDK which layer runs in which stage.

    Layers that only the model on IPUs has stay with the layer before them: preprocessing opens the first stage.
    """
    stages = stages_by_layer(order, splits)
    assignment = model.get_pipeline_stage_assignment()
    stage = 0
    for entry in assignment:
        stage = stages.get(entry.layer.name, stage)
        entry.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignment)


def proportions(program: Program) -> Tuple[Sequence[float], Sequence[float]]:
    """availableMemoryProportion of each stage's forward and backward pass; empty where it is not per stage."""
    own = stage_proportions(program.available_memory_proportion, program.num_stages)
    return [forward for forward, _ in own], [backward for _, backward in own]


def _stage_options(ipu: Any, values: Sequence[float]) -> List[Any]:
    made = []
    for value in values:
        options = {"availableMemoryProportion": option_text(value)}
        made.append(
            ipu.pipelining_ops.PipelineStageOptions(
                convolution_options=dict(options), matmul_options=dict(options)
            )
        )
    return made


def pipelining_options(ipu: Any, program: Program, config: Any, training: bool) -> Dict[str, Any]:
    """Arguments of ``set_pipelining_options``.

    Keywords that are not given are not remembered by the SDK: each call gives all of them, and they have to be
    given again to a model that was loaded, because it does not save them.
    """
    schedule = ipu.pipelining_ops.PipelineSchedule[program.pipeline_schedule]
    options: Dict[str, Any] = {
        "device_mapping": [int(ipu_number) for ipu_number in program.device_mapping],
        "pipeline_schedule": schedule,
    }
    forward, backward = proportions(program)
    if forward:
        options["forward_propagation_stages_poplar_options"] = _stage_options(ipu, forward)
    if not training:
        return options
    if backward:
        options["backward_propagation_stages_poplar_options"] = _stage_options(ipu, backward)
    options.update(
        gradient_accumulation_steps_per_replica=int(program.gradient_accumulation_count),
        gradient_accumulation_reduction_method=program.gradient_accumulation_reduction_method,
        offload_weight_update_variables=config.optimizer_state_offloading,
    )
    if program.recomputation:
        options["recomputation_mode"] = ipu.pipelining_ops.RecomputationMode[config.recomputation_mode]
    if config.offload_activations:
        options["offload_activations"] = True
    if config.offload_gradient_accumulation_buffers:
        options["offload_gradient_accumulation_buffers"] = True
    if config.replicated_optimizer_state_sharding:
        options["replicated_optimizer_state_sharding"] = True
    return options


def accumulation_options(program: Program, config: Any) -> Dict[str, Any]:
    """Arguments of ``set_gradient_accumulation_options`` for a model without a pipeline."""
    options: Dict[str, Any] = {
        "gradient_accumulation_steps_per_replica": int(program.gradient_accumulation_count),
        "gradient_accumulation_reduction_method": program.gradient_accumulation_reduction_method,
        "offload_weight_update_variables": config.optimizer_state_offloading,
    }
    if config.replicated_optimizer_state_sharding:
        options["replicated_optimizer_state_sharding"] = True
    return options
