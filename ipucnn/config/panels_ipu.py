"""Options of a run that concern devices: pipelines, and options that only one kind of session uses."""

# ruff: noqa: RUF009 - option() returns a dataclasses.field with a default_factory for mutable defaults
import dataclasses
from typing import Any, ClassVar, Dict, Optional, Tuple

from ipucnn.config import bounds, values
from ipucnn.config.bounds import Range
from ipucnn.config.spec import (
    DEVICE,
    DIRECTORY,
    FILE,
    PLAN,
    POPLAR_OPTIONS,
    RUN,
    TRAIN,
    Effect,
    ValueKind,
    int_or,
    option,
)


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Splitting the model over the IPUs of a replica."""

    PANEL: ClassVar[str] = "Pipeline"

    plan: Optional[str] = option(
        None,
        "Take the options of pipeline, batch, precision, optimizer and devices from a plan that `ipucnn plan-splits "
        "--save` wrote. Other options override them.",
        kind=FILE,
        in_yaml=False,
        effect=Effect.START,
    )
    pipeline_splits: Tuple[str, ...] = option(
        (),
        "Layers that begin the next pipeline stages, e.g. conv2_block1_out conv3_block1_out; or auto, which lets the "
        "planner choose. To plan with a --system-profile of your own, use plan-splits --save, and --plan here.",
        aliases=("splits",),
        metavar="LAYER...",
        commands=PLAN,
        wishes="split",
    )
    device_mapping: Optional[Tuple[int, ...]] = option(
        None,
        "IPU of each stage within the replica, e.g. 0 1 1 0.",
        within=Range(0, bounds.MAX_IPUS - 1),
        commands=PLAN,
        default_text="stage N on IPU N",
    )
    pipeline_schedule: str = option(
        "Grouped",
        "Pipeline schedule.",
        aliases=("schedule",),
        choices=("Grouped", "Interleaved", "Sequential"),
        commands=PLAN,
        plan_default="the faster of Grouped and Interleaved",
        wishes="gpipe 1f1b",
    )
    ipus_per_replica: Optional[int] = option(
        None,
        "IPUs of one replica; the network becomes a pipeline of as many stages.",
        aliases=("nb-ipus-per-replica",),
        within=Range(1, bounds.MAX_IPUS),
        commands=PLAN,
        default_text="as many as the stages need",
        wishes="stages pipeline-stages num-ipus",
    )
    ipus: Optional[int] = option(
        None,
        "IPUs in all; they are filled with replicas.",
        within=Range(1, bounds.MAX_IPUS),
        commands=PLAN,
        default_text="replicas x IPUs per replica",
        wishes="num-ipus world-size",
    )
    recomputation: bool = option(
        False,
        "Recompute activations in the backward pass instead of keeping them. It needs a pipeline.",
        wishes="grad-checkpointing activation-checkpointing remat",
    )
    available_memory_proportion: Tuple[float, ...] = option(
        (),
        "Percent of an IPU's memory that convolutions and matrix products may use: one value; or one for each stage; "
        "or two for each stage, for convolutions and for matrix products.",
        kind=ValueKind(values.parse_percent, "PERCENT...", is_list=True, is_number=True),
        within=Range(1, 100),
        commands=PLAN,
        host_effect=False,
        wishes="memory-proportion",
    )


@dataclasses.dataclass(frozen=True)
class IpuOptions:
    """Options that only the Poplar session uses. The host records them without effect."""

    PANEL: ClassVar[str] = "IPU only"
    EACH: ClassVar[Dict[str, Any]] = {"host_effect": False}

    on_demand: bool = option(
        True,
        "Attach to IPUs only when they are needed.",
        effect=Effect.DELIVERY,
    )
    select_ipu: Optional[int] = option(
        None,
        "Number of the device to use, as gc-info -l lists it.",
        within=Range(0, bounds.MAX_COUNT),
        commands=DEVICE,
        default_text="any free device with enough IPUs",
        effect=Effect.DELIVERY,
    )
    optimizer_state_offloading: bool = option(
        True,
        "Keep the optimizer state in remote memory.",
        commands=PLAN,
        wishes="offload offloading zero",
    )
    half_partials: bool = option(
        False,
        "Accumulate partial results of convolutions and matrix products in 16 bits.",
        commands=PLAN,
        wishes="partials partials-type",
    )
    internal_exchange_optimization_target: Optional[str] = option(
        None,
        "What Poplar optimises the exchange between tiles for.",
        choices=("cycles", "memory", "balanced"),
        default_text="Poplar's",
    )
    max_cross_replica_buffer_size: int = option(
        0,
        "Bytes that may wait before a sum over replicas is scheduled; with 0 it is scheduled at once.",
        within=Range(0, bounds.MAX_BYTES),
    )
    max_reduce_many_buffer_size: int = option(
        0,
        "Bytes that a cluster of reductions may reach before it is scheduled.",
        within=Range(0, bounds.MAX_BYTES),
    )
    gather_conv_output: bool = option(
        False,
        "Gather the outputs of convolutions, which saves small all-reduces.",
    )
    stable_norm: bool = option(
        False,
        "Use a normalisation that is numerically more stable and less parallel.",
    )
    conv_dithering: bool = option(
        False,
        "Let convolutions begin at different tiles.",
    )
    min_remote_tensor_size: int = option(
        128,
        "Smallest tensor, in bytes, that may be kept in remote memory.",
        within=Range(0, bounds.MAX_BYTES),
    )
    scheduling_algorithm: str = option(
        "CHOOSE_BEST",
        "Poplar's scheduling algorithm.",
        metavar="NAME",
        choices=("CHOOSE_BEST", "CLUSTERING", "POST_ORDER", "LOOK_AHEAD", "SHORTEST_PATH"),
    )
    fused_preprocessing: bool = option(
        False,
        "Preprocess on the IPU in one fused operation.",
    )
    accelerator_side_reduction: bool = option(
        False,
        "Reduce metrics over replicas on the IPU.",
    )
    compile_only: bool = option(
        False,
        "Compile for IPUs into --executable-cache, without attaching to any.",
        in_yaml=False,
        effect=Effect.DELIVERY,
    )
    executable_cache: Optional[str] = option(
        None,
        "Folder that keeps compiled programs for later runs.",
        kind=DIRECTORY,
        commands=DEVICE,
        default_text="the one that TF_POPLAR_FLAGS names, if any",
        wishes="cache compile-cache",
        effect=Effect.FILES,
    )
    convolution_options: Dict[str, Any] = option(
        {},
        "Further Poplar options of convolutions, e.g. '{\"use128BitConvUnitLoad\": true}'.",
        kind=POPLAR_OPTIONS,
    )
    matmul_options: Dict[str, Any] = option(
        {},
        "Further Poplar options of matrix products, e.g. '{\"enableFastReduce\": true}'.",
        kind=POPLAR_OPTIONS,
    )
    recomputation_mode: str = option(
        "Auto",
        "How --recomputation recomputes; Auto chooses by the pipeline schedule.",
        choices=("Auto", "RecomputeThenBackpropagate", "RecomputeAndBackpropagateInterleaved"),
    )
    offload_activations: bool = option(
        False,
        "Keep the stashed activations of a pipeline in remote memory.",
    )
    offload_gradient_accumulation_buffers: bool = option(
        False,
        "Keep a pipeline's accumulated gradients in remote memory.",
    )
    replicated_optimizer_state_sharding: bool = option(
        False,
        "Divide the offloaded optimizer state among the replicas.",
        wishes="zero sharding rts",
    )
    prefetch_depth: int = option(
        3,
        "Micro-batches that the host prepares in advance for each replica.",
        within=Range(1, 255),
        effect=Effect.DELIVERY,
    )
    deterministic_workers: str = option(
        "portable",
        "portable: random numbers on IPUs do not depend on how the work is spread over workers, so that the same seed "
        "gives the same numbers; false: they may.",
        choices=("portable", "false"),
    )
    dropout_layer: str = option(
        "poprand",
        "Dropout on IPUs: poprand uses the IPU's generator and keeps no mask for the backward pass; stateless makes "
        "the mask a function of seed and micro-batch alone, however many replicas there are. Neither gives the masks "
        "that the host draws, because IPUs have a generator of their own.",
        choices=("poprand", "stateless"),
    )


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Options that only the host session uses."""

    PANEL: ClassVar[str] = "Host session"
    EACH: ClassVar[Dict[str, Any]] = {"ipu_effect": False}

    fused_micro_batches: Optional[int] = option(
        None,
        "Micro-batches that the host session computes as one batch.",
        within=Range(1, bounds.MAX_ACCUMULATION),
        default_text="chosen by memory and cache",
    )
    threads: Optional[int] = option(
        None,
        "Threads that share an operation. A CPU computes as many groups of fused micro-batches in parallel as it has "
        "cores for. The number of threads decides the order of sums: the same bytes come only from the same number. "
        "A run that is continued keeps its number.",
        within=Range(1, bounds.MAX_THREADS),
        commands=TRAIN,
        default_text="half of the cores where a weight update can be halved, otherwise all",
    )
    devices: Optional[int] = option(
        None,
        "How many GPUs of this machine share the work of each weight update, or all. With --device cpu the processor "
        "stands in for so many devices, so that you can try it: it gives the same bytes, and is no faster.",
        within=Range(values.ALL, bounds.MAX_DEVICES),
        kind=int_or("all", values.ALL),
        in_yaml=False,
        commands=TRAIN,
        default_text="as many GPUs as can share it evenly; 1 on a CPU",
        wishes="gpus num-gpus multi-gpu",
        effect=Effect.DELIVERY,
    )
    deterministic_operations: bool = option(
        True,
        "Use only operations that give the same bytes each time. With --no-deterministic-operations GPUs are faster, "
        "but a run that is continued no longer equals one that never stopped.",
        commands=(*RUN, "evaluate", "infer"),
        wishes="reproducible cudnn-deterministic",
    )


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Processes of MPI (workers) that train one network together; see docs/cluster.md."""

    PANEL: ClassVar[str] = "Workers"
    EACH: ClassVar[Dict[str, Any]] = {"commands": TRAIN, "ipu_effect": False}

    max_workers: int = option(
        1,
        "Compute so few micro-batches as one that this many workers, or any divisor of it, can share a weight update. "
        "A run that is continued keeps what it began with.",
        within=Range(1, bounds.MAX_RANKS),
        effect=Effect.START,
    )
    reduction: str = option(
        "ordered",
        "How workers add up gradients: ordered adds them group by group of fused micro-batches, and gives the same "
        "bytes as one worker; allreduce is MPI's, which sends less and is equal within rounding.",
        choices=("ordered", "allreduce"),
    )
    rank_timeout: float = option(
        600.0,
        "Seconds after which a worker that waits asks the others whether they are alive. A worker that does not answer "
        "ends the run, with exit code 7.",
        within=Range(1, bounds.MAX_SECONDS),
        in_yaml=False,
        effect=Effect.DELIVERY,
    )
    require_same_bytes: bool = option(
        False,
        "Refuse workers whose processor, versions or settings differ in a way that can change the last digits. "
        "Without this option they only cause a warning.",
        in_yaml=False,
        effect=Effect.DELIVERY,
    )
