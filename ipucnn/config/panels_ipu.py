"""Options of a run that concern devices: pipelines, and what only one kind of session acts on."""

# ruff: noqa: RUF009 - option() returns a dataclasses.field with a default_factory for mutable defaults
import dataclasses
from typing import Any, ClassVar, Dict, Optional, Tuple

from ipucnn.config import bounds, values
from ipucnn.config.spec import DEVICE, PLAN, RUN, TRAIN, option


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Splitting the model over the IPUs of a replica."""

    PANEL: ClassVar[str] = "Pipeline"

    plan: Optional[str] = option(
        None,
        "Take the options of pipeline, batch, precision, optimizer and devices from a plan that `ipucnn plan-splits "
        "--save` wrote. Other options override them.",
        metavar="FILE",
        in_yaml=False,
        default_text="none",
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
        minimum=0,
        maximum=bounds.MAX_IPUS - 1,
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
        minimum=1,
        maximum=bounds.MAX_IPUS,
        commands=PLAN,
        default_text="as many as the stages need",
        wishes="stages pipeline-stages num-ipus",
    )
    ipus: Optional[int] = option(
        None,
        "IPUs in all; they are filled with replicas.",
        minimum=1,
        maximum=bounds.MAX_IPUS,
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
        parse=values.parse_percent,
        minimum=1,
        maximum=100,
        metavar="PERCENT...",
        commands=PLAN,
        host_effect=False,
        wishes="memory-proportion",
    )


@dataclasses.dataclass(frozen=True)
class IpuOnly:
    """What only the Poplar session acts on: recorded, without effect on the host."""

    PANEL: ClassVar[str] = "IPU only"

    on_demand: bool = option(True, "Attach to IPUs only when they are needed.", host_effect=False)
    select_ipu: Optional[int] = option(
        None,
        "Number of the device to use, as gc-info -l lists it.",
        minimum=0,
        maximum=bounds.MAX_COUNT,
        host_effect=False,
        commands=DEVICE,
        default_text="any free device with enough IPUs",
    )
    optimizer_state_offloading: bool = option(
        True,
        "Keep the optimizer state in remote memory.",
        host_effect=False,
        commands=PLAN,
        wishes="offload offloading zero",
    )
    half_partials: bool = option(
        False,
        "Accumulate partial results of convolutions and matrix products in 16 bits.",
        host_effect=False,
        commands=PLAN,
        wishes="partials partials-type",
    )
    internal_exchange_optimization_target: Optional[str] = option(
        None,
        "What Poplar optimises the exchange between tiles for.",
        choices=("cycles", "memory", "balanced"),
        host_effect=False,
        default_text="Poplar's",
    )
    max_cross_replica_buffer_size: int = option(
        0,
        "Bytes that may wait before a sum over replicas is scheduled; with 0 it is scheduled at once.",
        minimum=0,
        maximum=bounds.MAX_BYTES,
        host_effect=False,
    )
    max_reduce_many_buffer_size: int = option(
        0,
        "Bytes that a cluster of reductions may reach before it is scheduled.",
        minimum=0,
        maximum=bounds.MAX_BYTES,
        host_effect=False,
    )
    gather_conv_output: bool = option(
        False, "Gather the outputs of convolutions, which saves small all-reduces.", host_effect=False
    )
    stable_norm: bool = option(
        False, "Use a normalisation that is numerically more stable and less parallel.", host_effect=False
    )
    conv_dithering: bool = option(False, "Let convolutions begin at different tiles.", host_effect=False)
    min_remote_tensor_size: int = option(
        128,
        "Smallest tensor, in bytes, that may be kept in remote memory.",
        minimum=0,
        maximum=bounds.MAX_BYTES,
        host_effect=False,
    )
    scheduling_algorithm: str = option(
        "CHOOSE_BEST",
        "Poplar's scheduling algorithm.",
        metavar="NAME",
        host_effect=False,
        choices=("CHOOSE_BEST", "CLUSTERING", "POST_ORDER", "LOOK_AHEAD", "SHORTEST_PATH"),
    )
    fused_preprocessing: bool = option(
        False, "Preprocess on the IPU in one fused operation.", host_effect=False
    )
    accelerator_side_reduction: bool = option(
        False, "Reduce metrics over replicas on the IPU.", host_effect=False
    )
    compile_only: bool = option(
        False,
        "Compile for IPUs into --executable-cache, without attaching to any.",
        host_effect=False,
        in_yaml=False,
    )
    executable_cache: Optional[str] = option(
        None,
        "Folder that keeps compiled programs for later runs.",
        metavar="DIR",
        host_effect=False,
        commands=DEVICE,
        default_text="the one that TF_POPLAR_FLAGS names, if any",
        wishes="cache compile-cache",
    )
    convolution_options: Dict[str, Any] = option(
        {},
        "Further Poplar options of convolutions, e.g. '{\"use128BitConvUnitLoad\": true}'.",
        parse=values.parse_poplar_options,
        host_effect=False,
    )
    matmul_options: Dict[str, Any] = option(
        {},
        "Further Poplar options of matrix products, e.g. '{\"enableFastReduce\": true}'.",
        parse=values.parse_poplar_options,
        host_effect=False,
    )
    recomputation_mode: str = option(
        "Auto",
        "How --recomputation recomputes; Auto chooses by the pipeline schedule.",
        choices=("Auto", "RecomputeThenBackpropagate", "RecomputeAndBackpropagateInterleaved"),
        host_effect=False,
    )
    offload_activations: bool = option(
        False, "Keep the stashed activations of a pipeline in remote memory.", host_effect=False
    )
    offload_gradient_accumulation_buffers: bool = option(
        False, "Keep a pipeline's accumulated gradients in remote memory.", host_effect=False
    )
    replicated_optimizer_state_sharding: bool = option(
        False,
        "Divide the offloaded optimizer state among the replicas.",
        host_effect=False,
        wishes="zero sharding rts",
    )
    prefetch_depth: int = option(
        3,
        "Micro-batches that the host prepares in advance for each replica.",
        minimum=1,
        maximum=255,
        host_effect=False,
    )
    deterministic_workers: str = option(
        "portable",
        "portable: random numbers on IPUs do not depend on how the work is spread over workers, so that the same seed "
        "gives the same numbers; false: they may.",
        choices=("portable", "false"),
        host_effect=False,
    )
    dropout_layer: str = option(
        "poprand",
        "Dropout on IPUs: poprand uses the IPU's generator and keeps no mask for the backward pass; stateless makes "
        "the mask a function of seed and micro-batch alone, however many replicas there are. Neither gives the masks "
        "that the host draws, because IPUs have a generator of their own.",
        choices=("poprand", "stateless"),
        host_effect=False,
    )


@dataclasses.dataclass(frozen=True)
class HostSession:
    """What only the host session acts on."""

    PANEL: ClassVar[str] = "Host session"

    fused_micro_batches: Optional[int] = option(
        None,
        "Micro-batches that the host session computes as one batch. measure: try at the start of the run how many are "
        "fastest here, which takes as long as compiling several times.",
        minimum=values.MEASURE,
        maximum=bounds.MAX_ACCUMULATION,
        parse=values.parse_fused,
        to_yaml=values.fused_to_yaml,
        metavar="INT|measure",
        ipu_effect=False,
        default_text="chosen by memory and cache",
    )
    threads: Optional[int] = option(
        None,
        "Threads that share an operation. A CPU computes as many chunks of a weight update side by side as it has "
        "cores for. The number of threads decides the order of sums: the same bytes come only from the same number. "
        "A run that is continued keeps its number.",
        minimum=1,
        maximum=bounds.MAX_THREADS,
        commands=TRAIN,
        ipu_effect=False,
        default_text="half of the cores where a weight update can be halved, otherwise all",
    )
    devices: Optional[int] = option(
        None,
        "How many GPUs of this machine share the work of each weight update, or all. With --device cpu the processor "
        "stands in for so many devices, so that you can try it: it gives the same bytes, and is no faster.",
        minimum=values.ALL,
        maximum=bounds.MAX_DEVICES,
        parse=values.parse_devices,
        to_yaml=values.devices_to_yaml,
        metavar="INT|all",
        in_yaml=False,
        commands=TRAIN,
        ipu_effect=False,
        default_text="as many GPUs as can share it evenly; 1 on a CPU",
        wishes="gpus num-gpus multi-gpu",
    )
    deterministic_operations: bool = option(
        True,
        "Use only operations that give the same bytes each time. With --no-deterministic-operations GPUs are faster, "
        "but a run that is continued no longer equals one that never stopped.",
        commands=(*RUN, "evaluate", "infer"),
        ipu_effect=False,
        wishes="reproducible cudnn-deterministic",
    )


@dataclasses.dataclass(frozen=True)
class Workers:
    """Several workers, each of them a process, that train one network together; see docs/cluster.md."""

    PANEL: ClassVar[str] = "Workers"

    max_workers: int = option(
        1,
        "Compute so few micro-batches as one that this many workers, or any divisor of it, can share a weight update. "
        "A run that is continued keeps what it began with.",
        minimum=1,
        maximum=bounds.MAX_CLUSTER,
        commands=TRAIN,
        ipu_effect=False,
    )
    reduction: str = option(
        "ordered",
        "How workers add up gradients: ordered adds them chunk by chunk and gives the same bytes as one worker; ring "
        "is TensorFlow's all-reduce, which sends less and is equal within rounding.",
        choices=("ordered", "ring"),
        commands=TRAIN,
        ipu_effect=False,
    )
    start_timeout: float = option(
        60.0,
        "Seconds for which the workers wait for each other at the start.",
        minimum=1,
        maximum=bounds.MAX_SECONDS,
        in_yaml=False,
        commands=TRAIN,
        ipu_effect=False,
    )
    require_same_bytes: bool = option(
        False,
        "Refuse workers whose processor, versions or settings differ in a way that can change the last digits. "
        "Without this option they only cause a warning.",
        in_yaml=False,
        commands=TRAIN,
        ipu_effect=False,
    )
    trusted_network: bool = option(
        False,
        "Allow workers at public addresses. Beware: TensorFlow's servers execute what anyone sends who can reach them.",
        in_yaml=False,
        commands=TRAIN,
        ipu_effect=False,
    )
