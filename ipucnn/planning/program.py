"""A program to be planned: everything besides the network and the machine that cost and memory depend on.

:func:`planned_program` is the only way from a run's configuration to such a program.  So plan-splits, training,
benchmarks and the hints of a run that ran out of memory describe the same program to the planner in the same way.
"""

# ruff: noqa: RUF009 - _setting() returns a dataclasses.field
from dataclasses import astuple, dataclass, field, fields, replace
from enum import Enum
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.planning.schedules import GROUPED, SCHEDULES, SEQUENTIAL, Schedule, is_recomputed
from ipucnn.training.batching import nearest_multiples, next_power_of_two
from ipucnn.training.optimizer_settings import settings_of_run
from ipucnn.training.program import Layout, stage_proportions

PRECISIONS = ("16.16", "16.32", "32.32")

OF_UPDATES = {
    "gradient_accumulation_count": None,
    "global_batch_size": None,
    "dbn_replica_group_size": 1,
    "freeze": None,
}
"""Options that affect only the weight updates and their batches, and their values in inference."""


class Placement(Enum):
    """Where the stages of a replica are.

    Segments are Sequential stages on one IPU: they pass tensors on in place.  With recomputation, each but the last
    computes its part of the network again from a checkpoint.  Otherwise each stage has an IPU, or some share one.
    """

    ONE_EACH = "stages with an IPU each"
    SEGMENTS = "segments on one IPU"
    SHARED = "stages that share IPUs"


# The numbers of a program, and the smallest legal value of each.
_LEAST = {
    **dict.fromkeys(("micro_batch_size", "gradient_accumulation_count", "num_replicas", "num_stages"), 1),
    **{"dbn_replica_group_size": 1, "optimizer_slots": 0},
}

# availableMemoryProportion if none is given: in a run Poplar's default.  In a plan each stage has the largest of these
# with which it fits if that is faster than one value for all (``Choice.by_stage``); the others are values of public
# training configurations.
DEFAULT_PROPORTION = 0.6
PROPORTIONS = (DEFAULT_PROPORTION, 0.3, 0.15)
POPLAR_OPTION = "availableMemoryProportion"


@dataclass(frozen=True)
class StageProportions:
    """The availableMemoryProportion of one pipeline stage.

    It is the share of a tile's memory that the temporary data of one operation may take, in (0, 1].

    Attributes:
        convolution, matmul: the shares of the forward pass.
        backward_convolution, backward_matmul: the shares of the backward pass.
    """

    convolution: float
    matmul: float
    backward_convolution: float
    backward_matmul: float

    def __post_init__(self) -> None:
        for share in astuple(self):
            if not 0 < share <= 1:
                raise ConfigurationError(f"available_memory_proportion is {share}", "it is in (0, 1]")

    def limited(self, share: float) -> "StageProportions":
        """Returns the same proportions, but at most ``share``."""
        return StageProportions(*(min(mine, share) for mine in astuple(self)))


Proportions = Tuple[StageProportions, ...]


def uniform(share: float) -> Proportions:
    """Returns one availableMemoryProportion for all operations of all stages."""
    return (StageProportions(share, share, share, share),)


def smallest(proportions: Sequence[StageProportions]) -> Proportions:
    """Returns, for all stages, the smallest proportion of any stage, operation by operation."""
    return (StageProportions(*(min(column) for column in zip(*map(astuple, proportions)))),)


def largest(proportions: Sequence[StageProportions]) -> Proportions:
    """Returns, for all stages, the largest proportion of any stage, operation by operation."""
    return (StageProportions(*(max(column) for column in zip(*map(astuple, proportions)))),)


_DEFAULT = uniform(DEFAULT_PROPORTION)


def _setting(default: object, name: str, *options: str, of_training: bool = False) -> Any:
    """Returns a field of :class:`PlannedProgram`.

    Args:
        name: the name in messages.
        options: the options of a run, by the names of ``RunConfig``, that determine it; :func:`run_values` writes them.
        of_training: whether it has no meaning in inference.
    """
    return field(default=default, metadata={"name": name, "options": options, "of_training": of_training})


@dataclass(frozen=True)
class PlannedProgram:
    """The settings of one pipelined (or single-stage) program.

    Each field names the run options that determine it.  Saving, printing and comparing plans all use these names, so no
    setting that a prediction depends on can be lost.

    Attributes:
        micro_batch_size: the samples that one replica takes in one forward pass.
        gradient_accumulation_count: the micro-batches per replica and weight update; in inference, per execution.
        num_replicas: the number of data-parallel copies.
        num_stages: the pipeline stages of a replica.
        schedule: one of ``SCHEDULES``; ``order`` is derived from it.
        precision: compute and weights: "16.16", "16.32" (fp32 master weights) or "32.32".
        recomputation: whether every stage but the last repeats its forward pass in the backward pass.
        available_memory_proportion: an entry for each stage, or one that holds for all stages.  If all entries are the
            same, they become one.
        training: whether to run forward and backward passes with updates, or forward passes only.
        optimizer_slots: state tensors per weight, see ``OptimizerSettings.slot_names``.
        optimizer_state_offloading: whether that state should be in streaming memory outside the chip; see
            :attr:`offloads_optimizer_state`.
        dbn_replica_group_size: the number of replicas that share batch norm statistics; 1 if each has its own.
        half_partials: whether partial sums are fp16 if the inputs are fp16.
        eight_bit_transfer: whether images are sent to the device as bytes.
        device_mapping: the IPU of each stage.  If None, stage i is on IPU i, except that all Sequential stages are on
            one IPU, as segments.
    """

    micro_batch_size: int = _setting(1, "micro-batch", "micro_batch_size")
    gradient_accumulation_count: int = _setting(1, "accumulation", "gradient_accumulation_count")
    num_replicas: int = _setting(1, "replicas", "num_replicas")
    num_stages: int = _setting(1, "stages", "pipeline_splits", "ipus_per_replica")
    schedule: str = _setting(GROUPED, "schedule", "pipeline_schedule")
    precision: str = _setting("16.16", "precision", "precision")
    recomputation: bool = _setting(False, "recomputation", "recomputation")
    available_memory_proportion: Proportions = _setting(
        _DEFAULT,
        "available memory proportion",
        "available_memory_proportion",
        "convolution_options",
        "matmul_options",
    )
    training: bool = _setting(True, "training")
    optimizer_slots: int = _setting(
        1, "tensors of optimizer state per weight", "optimizer", "optimizer_params", of_training=True
    )
    optimizer_state_offloading: bool = _setting(
        False, "optimizer state offloading", "optimizer_state_offloading", of_training=True
    )
    dbn_replica_group_size: int = _setting(
        1, "replicas that share batch norm statistics", "dbn_replica_group_size"
    )
    half_partials: bool = _setting(True, "half partials", "half_partials")
    eight_bit_transfer: bool = _setting(False, "8-bit transfer", "eight_bit_transfer")
    device_mapping: Optional[Tuple[int, ...]] = _setting(None, "IPUs of the stages", "device_mapping")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)}", f"it is at least {least}")
        for name, choices in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                legal = ", ".join(choices)
                raise ConfigurationError(f"{name} is '{getattr(self, name)}'", f"it is one of {legal}")
        proportions, mapping = self.available_memory_proportion, self.device_mapping
        if len(set(proportions)) == 1:
            object.__setattr__(self, "available_memory_proportion", proportions[:1])
        elif len(proportions) != self.num_stages:
            raise ConfigurationError(
                f"available_memory_proportion has {len(proportions)} entries for {self.num_stages} stages",
                "give one, or one per stage",
            )
        if mapping is not None and (
            len(mapping) != self.num_stages or {*mapping} != {*range(len({*mapping}))}
        ):
            raise ConfigurationError(
                f"device_mapping is {list(mapping)} for {self.num_stages} stages",
                "give one IPU per stage, counted from 0 without gaps",
            )

    def proportions_of(self, stage: int) -> StageProportions:
        """Returns the availableMemoryProportion of a stage."""
        shares = self.available_memory_proportion
        return shares[stage] if len(shares) > 1 else shares[0]

    @property
    def proportions_differ(self) -> bool:
        """Tells whether stages differ in their availableMemoryProportion."""
        return len(self.available_memory_proportion) > 1

    def restaged(self, num_stages: int, **changes: Any) -> "PlannedProgram":
        """Returns the same settings for another number of stages.

        Proportions of single stages do not apply to other numbers of stages: their smallest then holds for all.

        Args:
            changes: values of other fields; without a device mapping among them each stage is on its default IPU.
        """
        if num_stages != self.num_stages and self.proportions_differ:
            changes.setdefault("available_memory_proportion", smallest(self.available_memory_proportion))
        changes.setdefault("device_mapping", None)
        return replace(self, num_stages=num_stages, **changes)

    def with_stages(
        self,
        num_stages: int,
        schedule: Optional[str] = None,
        recomputation: Optional[bool] = None,
        placement: Optional[Placement] = None,
    ) -> "PlannedProgram":
        """Returns the same program in another number of stages, with a legal number of accumulated micro-batches.

        Args:
            schedule, recomputation: the new values; None for no change.  A program of one stage recomputes nothing.
            placement: that of Sequential stages; None for no change.
        """
        order = Schedule(schedule or self.schedule, self.training)
        is_segmented = (placement or self.placement) is Placement.SEGMENTS
        counts = nearest_multiples(self.gradient_accumulation_count, order.multiple(num_stages))
        return self.restaged(
            num_stages,
            schedule=order.name,
            gradient_accumulation_count=counts[-1],
            device_mapping=tuple(range(num_stages)) if order.is_sequential and not is_segmented else None,
            recomputation=num_stages > 1 and (self.recomputation if recomputation is None else recomputation),
        )

    @property
    def mapping(self) -> Tuple[int, ...]:
        """Returns the IPU of each stage."""
        if self.device_mapping is not None:
            return self.device_mapping
        return self.order.default_mapping(self.num_stages)

    @property
    def order(self) -> Schedule:
        """Returns the schedule, which determines what runs when."""
        return Schedule(self.schedule, self.training)

    def recomputes(self, stage: int, num_stages: Optional[int] = None) -> bool:
        """Tells whether a stage repeats its forward pass in its backward pass; by default among these stages."""
        count = self.num_stages if num_stages is None else num_stages
        return self.recomputation and self.training and is_recomputed(stage, count)

    @property
    def num_ipus_per_replica(self) -> int:
        return max(self.mapping) + 1

    @property
    def num_ipus(self) -> int:
        """Returns the IPUs of all replicas."""
        return self.num_replicas * self.num_ipus_per_replica

    @property
    def occupied_ipus(self) -> int:
        """Returns the IPUs that the program occupies in a system: a replica occupies a power of two."""
        return self.num_replicas * next_power_of_two(self.num_ipus_per_replica)

    @property
    def placement(self) -> Placement:
        """Returns how the stages are placed on the IPUs of a replica."""
        if self.order.is_sequential and self.num_ipus_per_replica == 1:
            return Placement.SEGMENTS
        return Placement.ONE_EACH if self.num_ipus_per_replica == self.num_stages else Placement.SHARED

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_count * self.num_replicas

    @property
    def offloads_optimizer_state(self) -> bool:
        """Tells whether the optimizer state is outside the chip: an option of pipelines and of gradient accumulation.

        The SDK has no such option for a program with neither (``offload_weight_update_variables`` of
        ``set_pipelining_options`` and ``set_gradient_accumulation_options``).
        """
        accumulates = self.num_stages > 1 or self.gradient_accumulation_count > 1
        return self.training and self.optimizer_state_offloading and accumulates

    @property
    def has_half_partials(self) -> bool:
        """Tells whether partial sums are fp16."""
        return self.half_partials and self.precision != "32.32"

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of an activation."""
        return 4 if self.precision == "32.32" else 2

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of a weight as the optimizer keeps it; 16.32 casts a master copy for each use."""
        return 2 if self.precision == "16.16" else 4

    @property
    def arithmetic(self) -> str:
        """Returns the key of the matrix unit in ``IPU.amp``."""
        if self.precision == "32.32":
            return "float_float"
        return "half_half" if self.half_partials else "half_float"


def check_searchable(program: PlannedProgram) -> None:
    """Refuses a program whose splits the planner cannot choose.

    Raises:
        ConfigurationError: stages share IPUs, and are not segments.
    """
    if program.placement is Placement.SHARED:
        also = f", or add --pipeline-schedule {SEQUENTIAL}" if program.num_ipus_per_replica == 1 else ""
        raise ConfigurationError(
            f"--device-mapping {' '.join(map(str, program.mapping))}: the planner puts stage N on IPU N, or all "
            "Sequential stages on one IPU",
            f"drop it, or name the layers in --pipeline-splits{also}",
        )


class ProgramVariants(NamedTuple):
    """A program to choose from.

    Attributes:
        by_stage: the availableMemoryProportions of which each stage gets the largest with which it fits, the largest
            first, which is also that of ``program``; () if the program has its own.
    """

    program: PlannedProgram
    by_stage: Tuple[Proportions, ...] = ()

    @property
    def programs(self) -> List[PlannedProgram]:
        """Returns the program with each proportion for all stages."""
        shares = self.by_stage or (self.program.available_memory_proportion,)
        return [replace(self.program, available_memory_proportion=share) for share in shares]


# Settings with a run option of the same name that needs no layout.
_AS_CONFIGURED = (
    *("precision", "recomputation", "optimizer_state_offloading", "dbn_replica_group_size"),
    *("half_partials", "eight_bit_transfer"),
)


def percentages(proportions: Proportions) -> Tuple[float, ...]:
    """Returns the values of ``--available-memory-proportion`` for these proportions.

    Returns:
        Percent: one value, that of convolutions; one per stage; or those of each stage's convolutions and matrix
        products in turn.
    """
    pairs = [(_percent(share.convolution), _percent(share.matmul)) for share in proportions]
    if len(pairs) == 1 or all(convolution == matmul for convolution, matmul in pairs):
        return tuple(convolution for convolution, _ in pairs)
    return tuple(value for pair in pairs for value in pair)


def _percent(share: float) -> float:
    """Returns a share in percent, without rounding errors of a division by 100 in the last digits."""
    return float(f"{100 * share:.12g}")


def run_values(settings: PlannedProgram, splits: Sequence[str], kept: PlainDict) -> PlainDict:
    """Returns the run options that produce a program with these settings, whatever a preset says.

    Args:
        splits: the layers that open the stages from the second on.
        kept: options, by name, of which the settings store only a consequence, such as the optimizer's name.

    Returns:
        Name -> value, for every option that determines a setting.  Options that neither the settings nor ``kept``
        determine, and options with their default, are left out if no lower layer of the configuration can set others.
    """
    values: PlainDict = {}
    for setting in fields(PlannedProgram):
        name, options = setting.name, setting.metadata["options"]  # type: str, Tuple[str, ...]
        if setting.metadata["of_training"] and not settings.training:
            kept = {option: value for option, value in kept.items() if option not in options}
        elif name == "gradient_accumulation_count" and not settings.training:
            values["steps_per_execution"] = settings.gradient_accumulation_count
        elif name == "num_stages":
            # One stage replaces a preset's splits.
            is_pipeline = settings.num_stages > 1
            values.update({"pipeline_splits": list(splits)} if is_pipeline else {"ipus_per_replica": 1})
        elif name == "device_mapping":
            if settings.mapping != tuple(range(settings.num_stages)):
                values["device_mapping"] = list(settings.mapping)
        elif name == "available_memory_proportion":
            values.update(_proportion_values(settings.available_memory_proportion, kept))
        elif len(options) == 1:
            values[options[0]] = getattr(settings, name)
        else:
            values.update({option: kept[option] for option in options if option in kept})
    return {**values, **{name: value for name, value in kept.items() if name not in values}}


def _proportion_values(proportions: Proportions, kept: PlainDict) -> PlainDict:
    values: PlainDict = {"available_memory_proportion": list(percentages(proportions))}
    if len(proportions) > 1:
        return values  # values of single stages take precedence over all others
    # One value is for both; the options of all convolutions and of all matrix products take precedence over it.
    shared = proportions[0].convolution
    for name, share in (("convolution_options", shared), ("matmul_options", proportions[0].matmul)):
        if share != shared or POPLAR_OPTION in kept.get(name, {}):
            values[name] = {**kept.get(name, {}), POPLAR_OPTION: f"{share:.12g}"}
    return values


def differences(planned: PlannedProgram, run: PlannedProgram) -> List[str]:
    """Returns the differences between a run's settings and its plan's, over all settings: a few words for each."""
    lines = []
    for setting in fields(PlannedProgram):
        name = "mapping" if setting.name == "device_mapping" else setting.name
        values = [getattr(planned, name), getattr(run, name)]
        if values[0] == values[1] or (name == "mapping" and planned.num_stages != run.num_stages):
            continue
        if setting.name == "available_memory_proportion":
            values = [" ".join(f"{v:g}" for v in percentages(value)) + " %" for value in values]
        elif name == "mapping":
            values = [" ".join(map(str, value)) for value in values]
        lines.append(f"{setting.metadata['name']} {values[0]} (here {values[1]})")
    return lines


def given_proportions(config: RunConfig, num_stages: int) -> Optional[Proportions]:
    """Returns the stages' availableMemoryProportion from a configuration, as in the Poplar session; None if not given.

    Values for single stages are options of those stages, and take precedence over ``--convolution-options`` and
    ``--matmul-options``; these take precedence over a single value for everything.

    Raises:
        ConfigurationError: values for another number of stages.
    """
    pairs = stage_proportions(config.available_memory_proportion, num_stages)
    if pairs:
        return tuple(StageProportions(*pair, *pair) for pair in pairs)
    shared = config.available_memory_proportion[0] / 100 if config.available_memory_proportion else None
    convolution, matmul = (
        float(options[POPLAR_OPTION]) if POPLAR_OPTION in options else shared
        for options in (config.convolution_options, config.matmul_options)
    )
    if convolution is None and matmul is None:
        return None
    pair = [DEFAULT_PROPORTION if share is None else share for share in (convolution, matmul)]
    return (StageProportions(*pair, *pair),)


def planned_program(config: RunConfig, program: Layout, training: bool = True) -> PlannedProgram:
    """Returns the program of a configuration, as the planner sees it.

    Args:
        program: the program of the run, or from ``make_layout``.
        training: training (True) or inference.

    Raises:
        ConfigurationError: parameters that the optimizer does not have, or proportions for another number of stages.
    """
    p = program
    sizes = (p.micro_batch_size, p.gradient_accumulation_count, p.num_replicas, p.num_stages)
    settings = _settings_of(config, *sizes, training)
    is_mapped = settings.mapping == program.device_mapping
    return settings if is_mapped else replace(settings, device_mapping=program.device_mapping)


def _settings_of(
    config: RunConfig,
    micro_batch_size: int,
    accumulation: int,
    num_replicas: int,
    num_stages: int,
    training: bool,
) -> PlannedProgram:
    return PlannedProgram(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_count=accumulation,
        num_replicas=num_replicas,
        num_stages=num_stages,
        schedule=config.pipeline_schedule,
        available_memory_proportion=given_proportions(config, num_stages) or _DEFAULT,
        training=training,
        optimizer_slots=len(
            settings_of_run(config, micro_batch_size * accumulation * num_replicas).slot_names
        ),
        **{name: getattr(config, name) for name in _AS_CONFIGURED},
    )


def one_stage_program(
    config: RunConfig, micro_batch_size: int, num_replicas: int = 1, training: bool = True
) -> PlannedProgram:
    """Returns the program of a configuration in one stage, one micro-batch at a time, whatever pipeline it names.

    Raises:
        ConfigurationError: as for ``planned_program``.
    """
    values = config.available_memory_proportion
    alone = replace(
        config, recomputation=False, available_memory_proportion=values if len(values) == 1 else ()
    )
    if not training:
        alone = replace(alone, dbn_replica_group_size=1)
    return _settings_of(alone, micro_batch_size, 1, num_replicas, 1, training)
