"""What a plan is made for: everything besides the network and the machine that cost and memory depend on."""

from dataclasses import dataclass
from typing import Optional, Tuple

from ipucnn.errors import ConfigurationError

__all__ = ["PRECISIONS", "SCHEDULES", "PlanSettings"]

SCHEDULES = ("Grouped", "Interleaved", "Sequential")
PRECISIONS = ("16.16", "16.32", "32.32")


@dataclass(frozen=True)
class PlanSettings:
    """Settings of one pipelined (or single-stage) program.

    Attributes:
        micro_batch_size: samples one replica takes in one forward pass.
        gradient_accumulation_count: micro-batches per replica and weight update; in inference, per execution.
        num_replicas: data-parallel copies.
        num_stages: pipeline stages of a replica.
        schedule: "Grouped", "Interleaved" or "Sequential".
        precision: compute and weights: "16.16", "16.32" (fp32 master weights) or "32.32".
        recomputation: every stage but the last redoes its forward pass in the backward pass.
        available_memory_proportion: of a tile's memory that a convolution's temporary data may take.
        training: forward and backward with updates, or forward alone.
        optimizer_slots: state tensors per weight: 0 SGD, 1 momentum, LARS, RMSprop, 2 Adam.
        optimizer_state_offloading: that state is to live in streaming memory outside the chip; see
            :attr:`offloads_optimizer_state`.
        dbn_replica_group_size: replicas that share batch norm statistics; 1: none.
        half_partials: fp16 partial sums where the inputs are fp16.
        eight_bit_transfer: images travel to the device as bytes.
        device_mapping: IPU of each stage; None: stage i on IPU i, and all on one IPU under "Sequential", whose
            stages are then recomputation segments.
    """

    micro_batch_size: int = 1
    gradient_accumulation_count: int = 1
    num_replicas: int = 1
    num_stages: int = 1
    schedule: str = "Grouped"
    precision: str = "16.16"
    recomputation: bool = False
    available_memory_proportion: float = 0.6
    training: bool = True
    optimizer_slots: int = 1
    optimizer_state_offloading: bool = False
    dbn_replica_group_size: int = 1
    half_partials: bool = True
    eight_bit_transfer: bool = False
    device_mapping: Optional[Tuple[int, ...]] = None

    def __post_init__(self) -> None:
        for name in (
            "micro_batch_size",
            "gradient_accumulation_count",
            "num_replicas",
            "num_stages",
            "dbn_replica_group_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}", "it is at least 1")
        if self.optimizer_slots < 0:
            raise ConfigurationError(f"optimizer_slots is {self.optimizer_slots}", "it is at least 0")
        for name, choices in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"{name} is '{getattr(self, name)}'", f"it is one of {', '.join(choices)}"
                )
        if not 0 < self.available_memory_proportion <= 1:
            raise ConfigurationError(
                f"available_memory_proportion is {self.available_memory_proportion}", "it is in (0, 1]"
            )
        if self.device_mapping is not None:
            used = set(self.device_mapping)
            if len(self.device_mapping) != self.num_stages or used != set(range(len(used))):
                raise ConfigurationError(
                    f"device_mapping is {list(self.device_mapping)} for {self.num_stages} stages",
                    "give one IPU per stage, counted from 0 without gaps",
                )

    @property
    def mapping(self) -> Tuple[int, ...]:
        """IPU of each stage."""
        if self.device_mapping is not None:
            return self.device_mapping
        if self.schedule == "Sequential":
            return (0,) * self.num_stages
        return tuple(range(self.num_stages))

    @property
    def num_ipus_per_replica(self) -> int:
        return max(self.mapping) + 1

    @property
    def num_ipus(self) -> int:
        """IPUs of all replicas."""
        return self.num_replicas * self.num_ipus_per_replica

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_count * self.num_replicas

    @property
    def offloads_optimizer_state(self) -> bool:
        """Whether the optimizer state is outside the chip: an option of pipelines and of gradient accumulation.

        The SDK has no such option for a program with neither (``offload_weight_update_variables`` of
        ``set_pipelining_options`` and ``set_gradient_accumulation_options``).
        """
        accumulates = self.num_stages > 1 or self.gradient_accumulation_count > 1
        return self.training and self.optimizer_state_offloading and accumulates

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "32.32" else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the optimizer keeps it; 16.32 casts a master copy for each use."""
        return 2 if self.precision == "16.16" else 4

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial sum of a convolution."""
        return 2 if self.half_partials and self.precision != "32.32" else 4

    @property
    def arithmetic(self) -> str:
        """Key of the matrix unit in ``IPU.amp``."""
        if self.precision == "32.32":
            return "float_float"
        return "half_half" if self.half_partials else "half_float"

    @property
    def stash_multiplier(self) -> int:
        """FIFO depth between a stage's forward and backward pass per later stage (Poplar's pipeline_fifo_inserter)."""
        return {"Grouped": 2, "Interleaved": 1, "Sequential": 0}[self.schedule]
