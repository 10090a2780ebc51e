"""What a plan is made for: everything besides the network and the machine that cost and memory depend on.

:func:`plan_settings` is the one way from a run's configuration to it: plan-splits, training, benchmarks and the hints
of a run that ran out of memory ask the planner the same question about the same program.
"""

# ruff: noqa: RUF009 - _setting() returns a dataclasses.field
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, List, Optional, Sequence, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.planning.schedules import GROUPED, SCHEDULES, Schedule, is_recomputed
from ipucnn.training.batching import nearest_multiples, next_power_of_two
from ipucnn.training.optimizers import settings_of_run
from ipucnn.training.program import Program, stage_proportions

PRECISIONS = ("16.16", "16.32", "32.32")

# Numbers of a program, and the least that each may be.
_LEAST = {
    **dict.fromkeys(("micro_batch_size", "gradient_accumulation_count", "num_replicas", "num_stages"), 1),
    **{"dbn_replica_group_size": 1, "optimizer_slots": 0},
}

# Poplar's availableMemoryProportion where none is given.
_DEFAULT_PROPORTION = 0.6
POPLAR_OPTION = "availableMemoryProportion"


@dataclass(frozen=True)
class StageProportions:
    """availableMemoryProportion of one pipeline stage.

    It is the share of a tile's memory that the temporary data of one operation may take, in (0, 1].

    Attributes:
        convolution, matmul: of the forward pass.
        backward_convolution, backward_matmul: of the backward pass.
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
        """The same, but at most ``share``."""
        return StageProportions(*(min(mine, share) for mine in astuple(self)))

    @property
    def largest(self) -> float:
        """Of all operations."""
        return float(max(astuple(self)))


Proportions = Tuple[StageProportions, ...]


def uniform(share: float) -> Proportions:
    """One availableMemoryProportion for all operations of all stages."""
    return (StageProportions(share, share, share, share),)


def smallest(proportions: Sequence[StageProportions]) -> Proportions:
    """For all stages what the stage with the least has, operation by operation."""
    return (StageProportions(*(min(column) for column in zip(*map(astuple, proportions)))),)


def largest(proportions: Sequence[StageProportions]) -> Proportions:
    """For all stages what the stage with the most has, operation by operation."""
    return (StageProportions(*(max(column) for column in zip(*map(astuple, proportions)))),)


_DEFAULT = uniform(_DEFAULT_PROPORTION)


def _setting(default: object, name: str, *options: str, of_training: bool = False) -> Any:
    """A field of :class:`PlanSettings`.

    Args:
        name: what messages call it.
        options: of a run, by the names of ``RunConfig``, that decide it.  :func:`run_values` writes them.
        of_training: it says nothing of inference.
    """
    return field(default=default, metadata={"name": name, "options": options, "of_training": of_training})


@dataclass(frozen=True)
class PlanSettings:
    """Settings of one pipelined (or single-stage) program.

    Each field says which options of a run decide it: what a plan saves, prints and compares a run with is derived from
    that, so that no setting that a prediction depends on can be lost on the way.

    Attributes:
        micro_batch_size: samples one replica takes in one forward pass.
        gradient_accumulation_count: micro-batches per replica and weight update; in inference, per execution.
        num_replicas: data-parallel copies.
        num_stages: pipeline stages of a replica.
        schedule: one of ``SCHEDULES``; ``order`` is what follows from it.
        precision: compute and weights: "16.16", "16.32" (fp32 master weights) or "32.32".
        recomputation: every stage but the last redoes its forward pass in the backward pass.
        available_memory_proportion: an entry for each stage, or one that holds for all stages.  Entries that are all
            the same become one.
        training: forward and backward with updates, or forward alone.
        optimizer_slots: state tensors per weight, see ``OptimizerSettings.slots``.
        optimizer_state_offloading: that state is to live in streaming memory outside the chip; see
            :attr:`offloads_optimizer_state`.
        dbn_replica_group_size: how many replicas share batch norm statistics; 1 where each has its own.
        half_partials: fp16 partial sums where the inputs are fp16.
        eight_bit_transfer: images travel to the device as bytes.
        device_mapping: IPU of each stage.  Without, stage i is on IPU i; but all Sequential stages are on one IPU, as
            recomputation segments.
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

    def proportions_of(self, stage: int, num_stages: Optional[int] = None) -> StageProportions:
        """availableMemoryProportion of a stage.

        Args:
            num_stages: of the pipeline that the stage is in; without, it is the one of these settings.  Proportions
                that were given stage by stage say nothing about pipelines of other numbers of stages: the smallest of
                them then holds for all stages.
        """
        shares = self.available_memory_proportion
        if len(shares) == 1:
            return shares[0]
        return shares[stage] if num_stages in (None, self.num_stages) else smallest(shares)[0]

    @property
    def has_own_proportions(self) -> bool:
        """Whether stages differ in their availableMemoryProportion."""
        return len(self.available_memory_proportion) > 1

    def restaged(self, num_stages: int, **changes: Any) -> "PlanSettings":
        """The same for another number of stages; see :meth:`proportions_of`.

        Args:
            changes: of other fields; without a device mapping among them each stage is where it is by default.
        """
        if num_stages != self.num_stages and self.has_own_proportions:
            changes.setdefault("available_memory_proportion", smallest(self.available_memory_proportion))
        changes.setdefault("device_mapping", None)
        return replace(self, num_stages=num_stages, **changes)

    def with_stages(
        self,
        num_stages: int,
        schedule: Optional[str] = None,
        recomputation: Optional[bool] = None,
        apart: Optional[bool] = None,
    ) -> "PlanSettings":
        """The same program in another number of stages, with a legal number of accumulated micro-batches.

        Args:
            schedule, recomputation: without, as they are; a program of one stage recomputes nothing.
            apart: Sequential stages have an IPU each; without, if they have now.
        """
        order = Schedule(schedule or self.schedule, self.training)
        if apart is None:
            apart = not self.segments_on_one_ipu
        counts = nearest_multiples(self.gradient_accumulation_count, order.multiple(num_stages))
        return self.restaged(
            num_stages,
            schedule=order.name,
            gradient_accumulation_count=counts[-1],
            device_mapping=tuple(range(num_stages)) if order.is_sequential and apart else None,
            recomputation=num_stages > 1 and (self.recomputation if recomputation is None else recomputation),
        )

    @property
    def mapping(self) -> Tuple[int, ...]:
        """IPU of each stage."""
        if self.device_mapping is not None:
            return self.device_mapping
        return self.order.default_mapping(self.num_stages)

    @property
    def order(self) -> Schedule:
        """What runs when."""
        return Schedule(self.schedule, self.training)

    def recomputes(self, stage: int, num_stages: Optional[int] = None) -> bool:
        """Whether a stage repeats its forward pass in its backward pass; by default of as many stages as these."""
        count = self.num_stages if num_stages is None else num_stages
        return self.recomputation and self.training and is_recomputed(stage, count)

    @property
    def num_ipus_per_replica(self) -> int:
        return max(self.mapping) + 1

    @property
    def num_ipus(self) -> int:
        """IPUs of all replicas."""
        return self.num_replicas * self.num_ipus_per_replica

    @property
    def occupied_ipus(self) -> int:
        """IPUs that the program takes of a system: those of a replica come in powers of two."""
        return self.num_replicas * next_power_of_two(self.num_ipus_per_replica)

    @property
    def segments_on_one_ipu(self) -> bool:
        """Whether stages are recomputation segments of a program on one IPU."""
        return self.order.is_sequential and self.num_ipus_per_replica == 1

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
    def arithmetic(self) -> str:
        """Key of the matrix unit in ``IPU.amp``."""
        if self.precision == "32.32":
            return "float_float"
        return "half_half" if self.half_partials else "half_float"


# Settings that are an option of a run of the same name, which needs no layout to be understood.
_AS_CONFIGURED = (
    *("precision", "recomputation", "optimizer_state_offloading", "dbn_replica_group_size"),
    *("half_partials", "eight_bit_transfer"),
)


def percentages(proportions: Proportions) -> Tuple[float, ...]:
    """The values of ``--available-memory-proportion`` that give them.

    Returns:
        Percent: one value, that of convolutions; one per stage; or those of each stage's convolutions and matrix
        products in turn.
    """
    pairs = [(_percent(share.convolution), _percent(share.matmul)) for share in proportions]
    if len(pairs) == 1 or all(convolution == matmul for convolution, matmul in pairs):
        return tuple(convolution for convolution, _ in pairs)
    return tuple(value for pair in pairs for value in pair)


def _percent(share: float) -> float:
    """A share in percent, without what a division by 100 left in the last digits."""
    return float(f"{100 * share:.12g}")


def run_values(settings: PlanSettings, splits: Sequence[str], kept: PlainDict) -> PlainDict:
    """The options of a run that make its program the one of these settings, whatever a preset says.

    Args:
        splits: layers that open the stages from the second on.
        kept: options, by name, that settings hold no more than a consequence of, such as the optimizer's name.

    Returns:
        Name -> value, for every option that decides a setting; those that neither the settings nor ``kept`` tell, and
        those that are as they are by default, are left out if a lower layer of the configuration cannot bring others.
    """
    values: PlainDict = {}
    for setting in fields(PlanSettings):
        name, options = setting.name, setting.metadata["options"]  # type: str, Tuple[str, ...]
        if setting.metadata["of_training"] and not settings.training:
            kept = {option: value for option, value in kept.items() if option not in options}
        elif name == "gradient_accumulation_count" and not settings.training:
            values["steps_per_execution"] = settings.gradient_accumulation_count
        elif name == "num_stages":
            # One stage takes the place of a preset's splits.
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
        return values  # what is said of single stages goes before all else
    # One value is for both; the options of all convolutions and of all matrix products go before it.
    shared = proportions[0].convolution
    for name, share in (("convolution_options", shared), ("matmul_options", proportions[0].matmul)):
        if share != shared or POPLAR_OPTION in kept.get(name, {}):
            values[name] = {**kept.get(name, {}), POPLAR_OPTION: f"{share:.12g}"}
    return values


def differences(planned: PlanSettings, run: PlanSettings) -> List[str]:
    """Where a run's settings are not those of its plan: a few words for each, every setting looked at."""
    lines = []
    for setting in fields(PlanSettings):
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
    """The availableMemoryProportion that a configuration gives its stages, as the Poplar session sets it, if it does.

    Values for single stages are options of those stages, and go before those of ``--convolution-options`` and
    ``--matmul-options``; these go before a single value for everything.

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
    pair = [_DEFAULT_PROPORTION if share is None else share for share in (convolution, matmul)]
    return (StageProportions(*pair, *pair),)


def plan_settings(config: RunConfig, program: Program, training: bool = True) -> PlanSettings:
    """The program of a configuration, as the planner sees it.

    Args:
        program: of the run, or from ``make_layout``.
        training: or inference.

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
) -> PlanSettings:
    return PlanSettings(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_count=accumulation,
        num_replicas=num_replicas,
        num_stages=num_stages,
        schedule=config.pipeline_schedule,
        available_memory_proportion=given_proportions(config, num_stages) or _DEFAULT,
        training=training,
        optimizer_slots=len(settings_of_run(config, micro_batch_size * accumulation * num_replicas).slots),
        **{name: getattr(config, name) for name in _AS_CONFIGURED},
    )


def one_stage_settings(
    config: RunConfig, micro_batch_size: int, num_replicas: int = 1, training: bool = True
) -> PlanSettings:
    """The program of a configuration in one stage, one micro-batch at a time, whatever pipeline it names.

    Raises:
        ConfigurationError: as for ``plan_settings``.
    """
    values = config.available_memory_proportion
    alone = replace(
        config, recomputation=False, available_memory_proportion=values if len(values) == 1 else ()
    )
    if not training:
        alone = replace(alone, dbn_replica_group_size=1)
    return _settings_of(alone, micro_batch_size, 1, num_replicas, 1, training)
