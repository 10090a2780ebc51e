"""The SDK's refusals when a model is compiled for IPUs, by the recorded facts."""

from typing import Any, Dict, List

import tensorflow as tf

from .config import ENUMS, check_option_words
from .errors import failed, internal, invalid, unimplemented
from .facts import FACTS
from .instances import num_instances


def stages_of(extension: Any) -> List[int]:
    """Returns the stage of every layer call; [] for a model that is no pipeline.

    Raises:
        RuntimeError: stage numbers have a gap, which SDK 3.0 refuses when they are set.
    """
    if extension.assignment is None:
        return []
    stages = [entry.pipeline_stage for entry in extension.assignment]
    if sorted(set(stages)) != list(range(max(stages) + 1)):
        raise RuntimeError(f"pipeline stages must have no hole: {sorted(set(stages))}")
    return stages


def num_replicas(machine: Any, extension: Any) -> int:
    """Returns the replication factor of a model on the configured device.

    Raises:
        ValueError: there are more shards than IPUs.
        InternalError: the shards do not divide the IPUs.
    """
    stages = stages_of(extension)
    shards = 1
    if stages:
        shards = max(extension.device_mapping or [max(stages)]) + 1
    # Keras divides the driver's count of all instances by the instances of poprun, whatever was configured.
    ipus = machine.total_ipus // num_instances()
    if shards > ipus:
        raise ValueError(f"the model needs {shards} IPUs, but the device has {ipus}")
    shards = 1 << (shards - 1).bit_length()
    if ipus % shards:
        raise internal(f"Trying to compile a graph for an IPU device with {ipus} IPUs and {shards} shards")
    return ipus // shards


def check_io_tiles(machine: Any) -> None:
    """Refuses too many I/O tiles before any pass checks the program."""
    tiles = machine.config["leaves"]["io_tiles.num_io_tiles"]
    if tiles > 192:
        raise invalid(
            f"{tiles} is an invalid number of IO tiles. The number of IO tiles must be in the range [0, 192]."
        )


def accumulation(extension: Any, pipelined: bool) -> int:
    """Returns the micro-batches of a weight update.

    Raises:
        ValueError: a pipeline has no accumulation.
    """
    if pipelined and extension.pipelining is None:
        raise ValueError("a pipelined model needs gradient_accumulation_steps_per_replica to be trained")
    return int((extension.pipelining if pipelined else extension.accumulation) or 1)


def check_accumulation(extension: Any) -> None:
    """Checks the arguments of ``GradientAccumulationOptimizerV2``, which is only used with more than one step."""
    keywords = extension.accumulation_keywords
    for name in keywords:
        if name not in FACTS["accumulation_keywords"]:
            raise TypeError(f"GradientAccumulationOptimizerV2 got an unexpected keyword argument {name}")
    _check_sharding(keywords)
    if keywords.get("dtype") is not None:
        raise NotImplementedError("the double accumulates in the weights' type")


_NO_REMOTE_MEMORY = {
    "offload_weight_update_variables": (
        "Current configuration of the IPU devices does not support remote memory and therefore weight update only "
        "variables cannot be offloaded to remote memory."
    ),
    "offload_activations": (
        "Activation offloading has been enabled, however the current configuration of the IPU devices does not "
        "support remote memory."
    ),
    "offload_gradient_accumulation_buffers": (
        "Gradient accumulation buffer offloading has been enabled, however the current configuration of the IPU "
        "devices does not support remote memory."
    ),
}


def check_remote_memory(machine: Any, keywords: Dict[str, Any]) -> None:
    """Refuses to compile a program with data in remote memory if the executor knows of none.

    An attached device decides, which there is with ALWAYS; otherwise the configuration says whether there is any.
    """
    leaves = machine.config["leaves"]
    is_there = machine.remote_memory
    if leaves["device_connection.type"].name != "ALWAYS":
        is_there = leaves["device_connection.enable_remote_buffers"]
    for name, text in _NO_REMOTE_MEMORY.items():
        if keywords.get(name) and not is_there:
            raise failed(text)


def check_loaded(machine: Any, keywords: Dict[str, Any]) -> None:
    """Checks that a device that is attached on demand can hold the compiled program's data."""
    is_attached_late = machine.config["leaves"]["device_connection.type"].name == "ON_DEMAND"
    if is_attached_late and not machine.remote_memory and any(map(keywords.get, _NO_REMOTE_MEMORY)):
        raise internal("[Poplar][Load engine] runtime_error: the double knows no text of this")


def _check_sharding(keywords: Dict[str, Any]) -> None:
    if (
        keywords.get("replicated_optimizer_state_sharding")
        and keywords.get("offload_weight_update_variables") is False
    ):
        raise ValueError("replicated_optimizer_state_sharding needs offload_weight_update_variables")


def check_shared_out_state(machine: Any, keywords: Dict[str, Any], replicas: int) -> None:
    """Refuses to share state out over less than a whole IPU-Link domain per instance, if there are several domains.

    The IPUs of the largest device are such a domain.
    """
    domain = machine.num_ipus * replicas // machine.device_ipus
    if not keywords.get("replicated_optimizer_state_sharding") or replicas < 2:
        return
    if replicas < domain < replicas * machine.num_processes:
        raise unimplemented(
            "Replicated partitioning is not supported when there are multiple instances per IPU-link domain: "
            f"{replicas} local replicas of {domain} in the domain."
        )


def check_queues(extension: Any) -> None:
    """Checks the depth of the infeed, which ignores unknown keywords."""
    depth = extension.infeed.get("prefetch_depth") or 3
    if not 1 <= depth <= 255:
        raise ValueError("prefetch_depth must be from 1 to 255")


def statistics_group(machine: Any, replicas: int) -> int:
    """Returns the replicas of this instance that share batch norm statistics."""
    group = int(machine.config["leaves"]["norms.experimental.distributed_batch_norm_replica_group_size"])
    if replicas % group:
        raise NotImplementedError("the double has batch norm within an instance only")
    return group


def overlap_length(schedule: str, mapping: List[int], training: bool) -> int:
    """Returns the number whose multiple the pipeline's depth must be, for any device mapping."""
    ring = mapping + mapping[::-1] if training else list(mapping)
    if schedule == "Grouped":
        return len(ring)
    if schedule == "Sequential":
        return 1
    accepted: List[List[int]] = []
    for turn in range(len(ring)):
        rotated = ring[turn:] + ring[:turn]
        if all(a != b for other in accepted for a, b in zip(rotated, other)):
            accepted.append(rotated)
    return len(accepted)


def check_pipeline(machine: Any, extension: Any, training: bool, steps_per_execution: int) -> None:
    """Runs the checks of ``pipeline()`` and of the driver that compiles it."""
    keywords: Dict[str, Any] = extension.pipelining_keywords
    absent = FACTS["absent_in"].get(machine.sdk, {}).get("parameters", {})
    known = set(FACTS["pipelining_keywords"]) - set(absent.get("ipu.ops.pipelining_ops.pipeline", ()))
    for name in keywords:
        if name not in known:
            raise TypeError(f"in user code: pipeline() got an unexpected keyword argument '{name}'")
    schedule = keywords.get("pipeline_schedule")
    schedule = ENUMS["PipelineSchedule"].Grouped if schedule is None else schedule
    if not isinstance(schedule, ENUMS["PipelineSchedule"]):
        raise TypeError("pipeline_schedule must be a PipelineSchedule")
    mode = keywords.get("recomputation_mode")
    if mode is not None and not isinstance(mode, ENUMS["RecomputationMode"]):
        raise TypeError("recomputation_mode must be a RecomputationMode")
    stages = max(stages_of(extension)) + 1
    if stages < 2:
        raise ValueError("a pipeline needs at least two stages")
    mapping = extension.device_mapping or list(range(stages))
    if len(mapping) != stages:
        raise ValueError(f"device_mapping has {len(mapping)} entries for {stages} stages")
    if schedule.name == "Interleaved" and training and len(set(mapping)) < len(mapping):
        raise NotImplementedError("Interleaved with several stages on one IPU cannot be trained")
    if keywords.get("continuous_weight_updates"):
        raise NotImplementedError("continuous_weight_updates")
    _check_sharding(keywords)
    if keywords.get("gradient_accumulation_dtype") is not None:
        raise NotImplementedError("the double accumulates in the weights' type")
    _check_stage_options(keywords, stages)
    if mode is not None:
        # Checked for every pipeline, also without recomputation.
        pair = (schedule.name, mode.name)
        if pair in (
            ("Sequential", "RecomputeThenBackpropagate"),
            ("Interleaved", "RecomputeAndBackpropagateInterleaved"),
        ):
            raise unimplemented(f"{pair[1]} with the {pair[0]} schedule")
    _check_shared_layers(extension, mapping)
    group = machine.config["leaves"]["norms.experimental.distributed_batch_norm_replica_group_size"]
    if group > 1 and max(mapping) > 0:
        # No pass refuses it, and PipeliningSeqRecomputationTest.testDistributedBatchNorm of the driver runs it on one
        # IPU; IPUConfig's documentation advises against it across several, and does not say what the result is.
        raise NotImplementedError("the double lacks distributed batch norm in a pipeline across several IPUs")
    depth = extension.pipelining if training else steps_per_execution
    overlap = overlap_length(schedule.name, mapping, training)
    if schedule.name == "Grouped" and machine.config["leaves"]["io_tiles.num_io_tiles"]:
        if depth < overlap + 2:
            raise failed(
                f"The number of iterations of the pipeline must be at least {overlap + 2}, but it is {depth}."
            )
    elif depth % overlap or depth < overlap:
        raise failed(
            f"The number of iterations of the pipeline must be a multiple of {overlap}, but it is {depth}."
        )


def _check_shared_layers(extension: Any, mapping: List[int]) -> None:
    """Checks that stages that use one variable are on one IPU."""
    places: Dict[int, int] = {}
    for entry in extension.assignment:
        ipu = mapping[entry.pipeline_stage]
        if entry.layer.weights and places.setdefault(id(entry.layer), ipu) != ipu:
            raise unimplemented(
                f"The PipelineStage with ID {entry.pipeline_stage} is trying to use an input ({entry.layer.name}) "
                "which is already used by another PipelineStage. This violates the dataflow constraints because an "
                "input can only be used by pipeline stages on the same IPU."
            )


def _check_stage_options(keywords: Dict[str, Any], stages: int) -> None:
    from .extension import PipelineStageOptions

    for name in ("forward", "backward"):
        options = keywords.get(f"{name}_propagation_stages_poplar_options")
        if options is None:
            continue
        if not isinstance(options, (list, tuple)):
            raise TypeError(f"{name} options must be a list")
        if any(not isinstance(o, PipelineStageOptions) for o in options):
            raise TypeError(f"{name} options must be PipelineStageOptions")
        if len(options) != stages:
            raise ValueError(f"{len(options)} {name} options for {stages} stages")
    update = keywords.get("weight_update_poplar_options")
    if update is not None and not isinstance(update, PipelineStageOptions):
        raise TypeError("weight_update_poplar_options must be a PipelineStageOptions")


def check_poplar(machine: Any, extension: Any, replicas: int) -> None:
    """Runs the checks of Poplar and its libraries at compile time."""
    leaves = machine.config["leaves"]
    for kind, leaf in (
        ("convolution", "convolutions.poplar_options"),
        ("matmul", "matmuls.poplar_options"),
        ("pooling", "pooling.poplar_options"),
        ("slice", "slices.poplar_options"),
    ):
        check_option_words(kind, leaves[leaf])
    for key, value in leaves["compilation_poplar_options"].items():
        fact = FACTS["engine_options"].get(key)
        if fact is None or ("values" in fact and value not in fact["values"]):
            raise internal(f"[Poplar][Compile engine] invalid_option: {key}={value}")
    for side in ("forward", "backward"):
        for stage in extension.pipelining_keywords.get(f"{side}_propagation_stages_poplar_options") or ():
            check_option_words("convolution", stage.options["convolution_options"])
            check_option_words("matmul", stage.options["matmul_options"])
            check_option_words("slice", stage.options["slice_options"])
    group = leaves["norms.experimental.distributed_batch_norm_replica_group_size"]
    if replicas * machine.num_processes % group:
        raise internal(
            f"The replication factor {replicas} must be divisible by distributed_batch_norm_replica_group_size"
        )
    if machine.is_precompiling and not machine.flags.get("executable_cache_path"):
        raise failed("'executable_cache_path' in 'TF_POPLAR_FLAGS' has not been set")
    if machine.busy and leaves["device_connection.type"].name == "ON_DEMAND":
        raise internal("Timed out trying to find an available device")
    size = 4 * sum(int(tf.size(w)) for w in extension.model.weights)
    shards = machine.device_ipus // replicas
    if machine.tile_bytes is not None and size > machine.tile_bytes * shards:
        raise internal(
            "[Poplar][Compile engine] graph_memory_allocation_error: Out of memory on tile 12: "
            f"{size} bytes used but tiles only have {machine.tile_bytes} bytes of memory"
        )


def check_feed(spec: Any) -> None:
    """Checks the types and shapes of an infeed.

    Raises:
        ValueError: a shape is not static.
        FailedPreconditionError: IPUs do not take a type.
        InvalidArgumentError: an input has no elements.
    """
    for index, part in enumerate(tf.nest.flatten(spec)):
        if not part.shape.is_fully_defined():
            raise ValueError(
                f"infeed shapes must be fully defined, got {part.shape}: use drop_remainder=True"
            )
        if not part.shape.num_elements():
            raise invalid(
                "Detected an input tensor to an infeed queue with a dimension of size 0. Please remove it from the "
                "inputs."
            )
        name = "float32" if part.dtype == tf.float64 else part.dtype.name
        if name not in FACTS["feed_types"]:
            raise failed(f"Unsupported datatype {name} on index {index} of feed operation")
