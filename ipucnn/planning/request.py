"""From a resolved configuration to what the planner is asked; what neither a flag nor a preset gave is spelled out."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from ipucnn.config.options import AUTO, BY_NAME, RunConfig
from ipucnn.config.resolve import FLAG, Resolved
from ipucnn.datasets.registry import DATASETS, known_as
from ipucnn.errors import ConfigurationError
from ipucnn.hardware import SYSTEMS, System, get_system, smallest_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import ModelRecord
from ipucnn.planning.graphs.extract import read_layer_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.network import input_shape_for, network_options
from ipucnn.planning.pipeline_plan import OF_INPUT, kept_options
from ipucnn.planning.schedules import GROUPED, INTERLEAVED, SCHEDULES, SEQUENTIAL, Schedule
from ipucnn.planning.search.configurations import (
    FREE,
    SearchSpace,
    all_micro_batches,
    default_count,
    micro_batches,
)
from ipucnn.planning.search.planner import candidates
from ipucnn.planning.settings import (
    PlanSettings,
    Proportions,
    given_proportions,
    one_stage_settings,
    percentages,
    plan_settings,
    smallest,
    uniform,
)
from ipucnn.text import counted, shown_value
from ipucnn.training.batching import (
    check_distributed_batch_norm,
    nearest_multiples,
    next_power_of_two,
    overlap_length,
)
from ipucnn.training.program import Program, make_layout

if TYPE_CHECKING:
    from ipucnn.planning.calibration import SystemProfile


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Attributes:
        record, options: the network.
        build: the options that decide the network's layers, to be saved in the plan.
        kept: further options that the plan repeats for the run, see ``pipeline_plan.KEPT``.
        settings: of one program; of a search, those that hold for all configurations.
        recomputation: on or off; None for whichever is faster.
        proportions: availableMemoryProportion of the stages; None for whichever is fastest.
        own_proportions: where it is left open, whether stages may differ in it.
        splits: to judge; None to choose them.
        preset_splits: name and splits of a preset, to compare with.
        space: of the search over configurations; None where the number of stages is given.
        row: of the answer of that search, from 1 on, which becomes the plan.
        assumed: what was taken for granted because neither a flag nor a preset gave it, a sentence each.
        assumed_input: that one of them which says the input; None where it was asked for.
        warnings: what was asked for and cannot be, a sentence each.
        other_schedules: ``settings`` under schedules that nobody typed, to be tried beside theirs.
        schedule_from: who set the schedule of ``settings``.
        graph: the network, whatever is trained of it; at first only that of a layer graph in a file, see
            ``plan.with_graph``.
        freeze: the layers that are not trained, as ``--freeze`` has them; None where all are.
        planned: the network as it is planned, likewise.
        typed: values of the user's own options, by name.
        flags: names of those that were typed as flags.
    """

    record: ModelRecord
    options: BuildOptions
    build: Dict[str, Any]
    kept: Dict[str, Any]
    settings: PlanSettings
    system: System
    recomputation: Optional[bool]
    proportions: Optional[Proportions]
    splits: Optional[Tuple[str, ...]] = None
    preset_splits: Dict[str, Tuple[str, ...]] = field(default_factory=dict)
    space: Optional[SearchSpace] = None
    row: int = 1
    assumed: Tuple[str, ...] = ()
    assumed_input: Optional[str] = None
    warnings: Tuple[str, ...] = ()
    other_schedules: Tuple[PlanSettings, ...] = ()
    schedule_from: str = ""
    own_proportions: bool = True
    graph: Optional[LayerGraph] = None
    freeze: Optional[str] = None
    planned: Optional[LayerGraph] = None
    typed: Mapping[str, Any] = field(default_factory=dict)
    flags: FrozenSet[str] = frozenset()

    def with_stages(self, num_stages: int) -> str:
        """What to type for another number of stages, with all that would contradict it as it was typed."""
        settings, ipus = self.settings, next_power_of_two(num_stages)
        apart = settings.order.is_sequential and not settings.segments_on_one_ipu
        mapped = apart or "ipus_per_replica" in self.flags
        words = [f"{'--ipus-per-replica' if mapped else '--stages'} {num_stages}"]
        base = overlap_length(settings.schedule, num_stages)
        count = self.typed.get("gradient_accumulation_count")
        if count is not None and count % base:
            words.append(f"--gradient-accumulation-count {nearest_multiples(count, base)[-1]}")
        total, replicas = self.typed.get("global_batch_size"), settings.num_replicas
        if self.typed.get("ipus"):
            replicas = max(1, self.typed["ipus"] // ipus)
            if self.typed["ipus"] < ipus:
                words.append(f"--ipus {ipus}")
        if total is not None:
            smallest_batch = settings.micro_batch_size * replicas * base
            words += [f"--global-batch-size {smallest_batch}"] if total < smallest_batch else []
        if "available_memory_proportion" in self.flags and self.proportions and len(self.proportions) > 1:
            (own,) = smallest(self.proportions)
            words.append(
                f"--available-memory-proportion {percentages(uniform(min(own.convolution, own.matmul)))[0]:g}"
            )
        return " ".join(words) + (" without --device-mapping" if "device_mapping" in self.flags else "")

    def choices(self, settings: PlanSettings) -> List[List[PlanSettings]]:
        """The settings to choose from: ``settings`` with what the request leaves open, see ``candidates``."""
        return candidates(settings, self.recomputation, self.proportions)

    def all_choices(self) -> List[List[PlanSettings]]:
        """The settings to choose from, under all schedules that are to be tried."""
        schedules = [self.settings, *self.other_schedules]
        schedules.sort(key=lambda settings: SCHEDULES.index(settings.schedule))
        return [group for settings in schedules for group in self.choices(settings)]


def make_request(
    resolved: Resolved,
    *,
    stages: Optional[int] = None,
    row: Optional[int] = None,
    system: Optional[str] = None,
    profile: Optional["SystemProfile"] = None,
    classes: Optional[int] = None,
    recomputation: Optional[str] = None,
    inference: bool = False,
    own_proportions: bool = True,
) -> PlanRequest:
    """What ``plan-splits`` is asked.

    Args:
        row: of the answer of a search, from 1 on, to plan; None for the first, which is the fastest.
        profile: what was measured of the system; its own system where none is named.
        recomputation: "auto", "on" or "off"; None for what a preset says, else auto.
        inference: forward passes alone.
        own_proportions: stages may differ in availableMemoryProportion where none is given.

    Raises:
        ConfigurationError: options that contradict each other, or the schedule.
    """
    config, assumed = resolved.config, []  # type: RunConfig, List[str]
    if not resolved.given("model_name"):
        assumed.append(f"network {resolved.record.name}, as none is named")
    if inference:
        config = _for_inference(resolved, config, recomputation)
    elif resolved.origins["steps_per_execution"] == FLAG:
        raise ConfigurationError(
            f"--steps-per-execution {config.steps_per_execution}: an execution of training is its weight updates",
            "add --inference, or give --gradient-accumulation-count",
        )
    wanted_system = _given_system(system, profile, assumed)
    if not resolved.given("precision"):
        config = replace(config, precision="16.16")
        assumed.append("precision 16.16")
    graph, assumed_input = _graph_in_file(resolved, classes), None
    if graph is not None:
        options = BuildOptions(graph.input_shape, graph.num_classes)
    else:
        shape, num_classes, assumed_input = _input(resolved, classes)
        assumed += [assumed_input] if assumed_input is not None else []
        options = network_options(resolved.record, config, shape, num_classes)
    splits = _given_splits(resolved)
    count = _num_stages(resolved, stages, splits)
    if resolved.preset is not None:
        assumed.append(f"preset {resolved.preset} (optimizer {config.optimizer}) for what isn't given")
    config = _with_legal_proportions(resolved, config, count, assumed)
    request = PlanRequest(
        record=resolved.record,
        options=options,
        build=_build(options, resolved.record),
        kept=kept_options(_with_network(resolved, config, options, classes)),
        settings=one_stage_settings(config, config.micro_batch_size, training=config.training),
        system=wanted_system or smallest_system(1),
        recomputation=False if inference else _recomputation(resolved, recomputation),
        proportions=given_proportions(config, count or 1),
        splits=splits,
        preset_splits={}
        if splits is not None or config.pipeline_splits in ((), (AUTO,))
        else {resolved.origins["pipeline_splits"]: config.pipeline_splits},
        assumed=tuple(assumed),
        assumed_input=assumed_input,
        own_proportions=own_proportions,
        graph=graph,
        freeze=config.freeze,
        typed=resolved.typed,
        flags=frozenset(name for name, origin in resolved.origins.items() if origin == FLAG),
    )
    if count is None:
        return replace(_of_search(request, resolved, config, wanted_system), row=row or 1)
    if row is not None:
        raise ConfigurationError(
            f"--row {row}: there is no table of best uses, because the number of stages is given",
            "leave out --row, or give --ipus and neither a number of stages nor splits",
        )
    return _of_stages(request, resolved, config, count, wanted_system)


def _given_system(
    name: Optional[str], profile: Optional["SystemProfile"], assumed: List[str]
) -> Optional[System]:
    """The system that was named, or measured, with its profile; None where nothing says."""
    system = get_system(name) if name is not None else None
    if profile is None:
        return system
    from ipucnn.planning.calibration import calibrated_system, describe

    if system is None:
        system = SYSTEMS[profile.system]
        assumed.append(f"system {system.title}, which was measured")
    assumed += describe(profile)
    return calibrated_system(profile, system)


# What decides nothing but the weight updates and their batches.
_OF_UPDATES = (
    "gradient_accumulation_count",
    "global_batch_size",
    "dbn_replica_group_size",
    "optimizer",
    "optimizer_params",
    "optimizer_state_offloading",
    "freeze",
)


def _for_inference(resolved: Resolved, config: RunConfig, recomputation: Optional[str]) -> RunConfig:
    """The configuration of forward passes alone, without what only training has.

    Raises:
        ConfigurationError: that was typed.
    """
    for name in _OF_UPDATES:
        if resolved.origins[name] == FLAG:
            spec, value = BY_NAME[name], getattr(config, name)
            typed = (
                (spec.flag if value else f"--no-{spec.key}")
                if spec.is_bool
                else f"{spec.flag} {shown_value(value)}"
            )
            raise ConfigurationError(
                f"{typed}: inference has no weight updates",
                "drop it; --micro-batch-size, --num-replicas and --steps-per-execution say what an execution of "
                "inference takes",
            )
    if resolved.origins["pipeline_schedule"] == FLAG and config.pipeline_schedule == INTERLEAVED:
        raise ConfigurationError(
            "--pipeline-schedule Interleaved: inference has no backward passes that could alternate with forward ones",
            "--pipeline-schedule Grouped, or Sequential",
        )
    if recomputation is not None:
        raise ConfigurationError(
            f"--recomputation {recomputation}: inference keeps nothing that could be computed again",
            "drop it",
        )
    return replace(
        config,
        training=False,
        freeze=None,
        recomputation=False,
        gradient_accumulation_count=None,
        global_batch_size=None,
        dbn_replica_group_size=1,
        pipeline_schedule=SEQUENTIAL if config.pipeline_schedule == SEQUENTIAL else GROUPED,
    )


def _with_network(
    resolved: Resolved, config: RunConfig, options: BuildOptions, classes: Optional[int]
) -> RunConfig:
    """The configuration with all that makes a run build the planned network: data set, image size, base filters.

    A network in a file has its layers already, and one of a user's own takes its input from the data: for them only
    what was typed is kept.
    """
    record = resolved.record
    if record.file is not None or record.own is not None:
        own: Dict[str, Any] = {name: None for name in OF_INPUT if resolved.origins[name] != FLAG}
        return replace(config, **own)
    known = DATASETS.get(known_as(config.dataset or "") or "")
    of_others = classes is not None and known is not None and known.num_classes not in (None, classes)
    return replace(
        config,
        dataset=None if of_others else config.dataset,
        image_size=options.input_shape[:2],
        base_filters=options.base_filters or record.builder_args.get("base_filters"),
    )


def _build(options: BuildOptions, record: ModelRecord) -> Dict[str, Any]:
    """What the layers are made with, the network's own number of base filters included."""
    options = replace(options, base_filters=options.base_filters or record.builder_args.get("base_filters"))
    names = ("norm", "norm_groups", "norm_channels_per_group", "dropout", "base_filters")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


# What a network in a file is already: options that would make another one of it.
_OF_THE_NETWORK = ("image_size", "dataset", "norm_layer", "dropout", "base_filters")


def _graph_in_file(resolved: Resolved, classes: Optional[int]) -> Optional[LayerGraph]:
    """The network that MODEL names, where that is the file of a layer graph.

    Raises:
        ConfigurationError: options that would make another network of it.
        DataError: it is damaged.
    """
    record = resolved.record
    if record.file is None or record.own is not None:
        return None
    typed = [BY_NAME[name].flag for name in _OF_THE_NETWORK if name in resolved.typed]
    if typed or classes is not None:
        raise ConfigurationError(
            f"{' '.join(typed) or '--classes'}: {record.name} holds a network that has its input and layers already",
            "drop it, and save the network as it is to be",
        )
    return read_layer_graph(record.file)


def _input(resolved: Resolved, classes: Optional[int]) -> Tuple[Tuple[int, int, int], int, Optional[str]]:
    """Shape of the network's input, number of classes, and a sentence about the input where nobody asked for one.

    No data is looked at.
    """
    record, config = resolved.record, resolved.config
    name = config.dataset or record.home_dataset
    known = DATASETS.get(known_as(name) or "")
    own = name == record.home_dataset or config.host_generated_data
    if own:
        shape, number = record.input_shape, record.num_classes
    elif known is not None and known.num_classes is not None:
        # Images of many sizes are brought to the network's own, as training does.
        shape = input_shape_for(record, known.image_shape or (None, None, 3))
        number = known.num_classes
    else:
        shape, number = None, None  # only --image-size and --classes can say
    assumed: Optional[str] = None
    channels = record.input_shape[2] if shape is None else shape[2]
    if config.image_size is not None:
        shape = (*config.image_size, channels)
    elif shape is None:
        raise ConfigurationError(
            f"--dataset {name}: planning looks at no files, and the size of its images isn't known without",
            "add --image-size N and --classes N",
        )
    elif not own or record.own is None or None in record.own.input_shape:
        whose = f"as for {name}" if record.own is None or not own else "as no data set is named"
        assumed = f"input {'x'.join(map(str, shape))}, {whose}"
    if classes is not None:
        number = classes
    elif number is None:
        raise ConfigurationError(
            f"--dataset {name}: planning looks at no files, and its classes aren't known without",
            "add --classes N",
        )
    return shape, number, assumed


def _given_splits(resolved: Resolved) -> Optional[Tuple[str, ...]]:
    """Splits typed on the command line; those of a preset are compared with."""
    splits = resolved.config.pipeline_splits
    if resolved.origins["pipeline_splits"] != "flag" or not splits or splits == (AUTO,):
        return None
    return tuple(splits)


def _num_stages(resolved: Resolved, stages: Optional[int], splits: Optional[Sequence[str]]) -> Optional[int]:
    """The number of stages asked for; None where it is to be searched."""
    config = resolved.config
    if splits is not None:
        if stages not in (None, len(splits) + 1):
            raise ConfigurationError(
                f"--stages {stages}, but the pipeline has {len(splits) + 1} stages with "
                f"{counted(len(splits), 'split')}",
                f"use --stages {len(splits) + 1}, or drop it",
            )
        return len(splits) + 1
    mapped = len(config.device_mapping) if config.device_mapping else None
    if stages is not None:
        if mapped not in (None, stages) and resolved.origins["device_mapping"] == "flag":
            raise ConfigurationError(
                f"--stages {stages}, but --device-mapping names {counted(mapped, 'stage')}",
                f"use --stages {mapped}, or drop one of them",
            )
        if config.ipus_per_replica not in (None, stages) and resolved.origins["ipus_per_replica"] == "flag":
            raise ConfigurationError(
                f"--stages {stages} and --ipus-per-replica {config.ipus_per_replica} are both given",
                "drop one of them",
            )
        return stages
    if config.ipus_per_replica is not None:
        return config.ipus_per_replica
    if mapped is not None:
        return mapped
    if config.pipeline_splits and config.pipeline_splits != (AUTO,):
        return len(config.pipeline_splits) + 1
    return None


def _recomputation(resolved: Resolved, text: Optional[str]) -> Optional[bool]:
    if text is None:
        return resolved.config.recomputation if resolved.given("recomputation") else None
    word = text.strip().lower()
    values = {"auto": None, "on": True, "true": True, "off": False, "false": False}
    if word not in values:
        raise ConfigurationError(f"--recomputation {text}: must be auto, on or off", "--recomputation auto")
    return values[word]


def _with_legal_proportions(
    resolved: Resolved, config: RunConfig, count: Optional[int], assumed: List[str]
) -> RunConfig:
    """The configuration, without a preset's availableMemoryProportion if that is for other stages than those asked for.

    Raises:
        ConfigurationError: values that were typed, for another number of stages or for none.
    """
    values = config.available_memory_proportion
    if len(values) < 2:
        return config
    if count is None and resolved.origins["available_memory_proportion"] == FLAG:
        raise ConfigurationError(
            f"--available-memory-proportion has {len(values)} values, and nothing says how many stages there are",
            "give one value, or --stages",
        )
    # A preset's values are for the stages that its own splits make.  Their number alone does not tell: four values may
    # be one for each of four stages, or two (convolutions and matrix products) for each of two.
    own = count
    if FLAG not in (resolved.origins["available_memory_proportion"], resolved.origins["pipeline_splits"]):
        named = config.pipeline_splits
        own = len(named) + 1 if named and named != (AUTO,) else count
    if count is not None and own == count:
        given_proportions(config, count)
        return config
    stages = "one stage" if count == 1 else f"{count} stages" if count else "a search"
    assumed.append(f"no available memory proportion: the preset's {len(values)} values are not for {stages}")
    return replace(config, available_memory_proportion=())


def _of_stages(
    request: PlanRequest, resolved: Resolved, config: RunConfig, count: int, system: Optional[System]
) -> PlanRequest:
    """The request with settings for a number of stages: batch, mapping and system."""
    assumed, warnings = list(request.assumed), []  # type: List[str], List[str]
    mapping = _mapping(resolved, config, count)
    schedule = config.pipeline_schedule
    base = overlap_length(schedule, count)
    accumulation, total = config.gradient_accumulation_count, config.global_batch_size
    if not config.training:
        accumulation = config.steps_per_execution or default_count(schedule, count)
        if config.steps_per_execution is None:
            assumed.append(f"{accumulation} micro-batches per execution")
    elif accumulation is None and total is None:
        accumulation = default_count(schedule, count)
        assumed.append(f"gradient accumulation count {accumulation}")
    elif accumulation is not None and "gradient_accumulation_count" not in resolved.typed:
        legal = nearest_multiples(accumulation, base)[-1]
        if legal != accumulation:
            assumed.append(
                f"gradient accumulation count {legal}: the preset's {accumulation} is not legal for {count} "
                f"{schedule} stages"
            )
        accumulation = legal
    ipus = max(mapping) + 1
    config = replace(
        config,
        pipeline_splits=(),
        device_mapping=mapping,
        ipus_per_replica=None,
        gradient_accumulation_count=accumulation,
        recomputation=config.recomputation and count > 1,
    )
    # Pipelines that go forward alone take any number of micro-batches, as a Sequential one does.
    layout = make_layout(config if config.training else replace(config, pipeline_schedule=SEQUENTIAL))
    changed = [warning for warning in layout.warnings if "powers of two" not in warning]
    assumed += changed
    if total is not None and "global_batch_size" in resolved.typed:
        _check_batch(total, layout, base)
        warnings += changed
    settings = plan_settings(config, layout, config.training)
    others: Tuple[PlanSettings, ...] = ()
    if FLAG not in (resolved.origins["pipeline_schedule"], resolved.origins["device_mapping"]):
        others = _other_schedules(resolved, settings, total)
    if request.splits is None and 1 < ipus < count:
        raise ConfigurationError(
            f"--device-mapping {' '.join(map(str, mapping))}: the planner puts stage N on IPU N, or all "
            "Sequential stages on one IPU",
            "drop it, or give --splits to judge",
        )
    system = _system_of(settings.occupied_ipus, system, assumed)
    return replace(
        request,
        settings=settings,
        system=system,
        other_schedules=others,
        schedule_from=resolved.origins["pipeline_schedule"],
        assumed=tuple(assumed),
        warnings=tuple(warnings),
    )


def _check_batch(total: int, layout: Program, base: int) -> None:
    """Refuses a global batch below the smallest that the program can have; another one becomes the nearest.

    Args:
        layout: what became of it.
        base: what the accumulation count is a multiple of.

    Raises:
        ConfigurationError: naming the nearest legal ones.
    """
    smallest = layout.micro_batch_size * layout.num_replicas * base
    if total < smallest:
        raise ConfigurationError(
            f"--global-batch-size {total} is not possible: micro-batch {layout.micro_batch_size} x "
            f"{counted(layout.num_replicas, 'replica')} x {base} micro-batches to accumulate is {smallest} at least",
            f"use --global-batch-size {smallest} or {2 * smallest}"
            + (", or a smaller --micro-batch-size or fewer IPUs" if smallest > base else ""),
        )


def _other_schedules(
    resolved: Resolved, settings: PlanSettings, total: Optional[int]
) -> Tuple[PlanSettings, ...]:
    """The program under the other schedules that use as many IPUs at once, with the nearest legal accumulation.

    A batch that was typed is not changed: schedules that it is not legal for are left out.
    """
    if not settings.training or settings.num_stages == 1:
        return ()
    is_fixed = total is not None or "gradient_accumulation_count" in resolved.typed
    found = []
    for schedule in (GROUPED, INTERLEAVED):
        base = overlap_length(schedule, settings.num_stages)
        count = nearest_multiples(settings.gradient_accumulation_count, base)[-1]
        other = replace(
            settings,
            schedule=schedule,
            gradient_accumulation_count=count,
            device_mapping=settings.device_mapping,
        )
        is_legal = count == settings.gradient_accumulation_count or not is_fixed
        if schedule != settings.schedule and is_legal and other.mapping == settings.mapping:
            found.append(other)
    return tuple(found)


def _mapping(resolved: Resolved, config: RunConfig, count: int) -> Tuple[int, ...]:
    """IPU of each stage.  Sequential stages are segments of one IPU unless an IPU each is asked for."""
    if config.device_mapping and len(config.device_mapping) == count:
        return tuple(config.device_mapping)
    if config.pipeline_schedule == SEQUENTIAL and config.ipus_per_replica == count:
        return tuple(range(count))
    return Schedule(config.pipeline_schedule).default_mapping(count)


def _system_of(num_ipus: int, system: Optional[System], assumed: List[str]) -> System:
    """The system asked for, or the smallest Mk2 POD from 16 IPUs on that has the IPUs (else the largest)."""
    if system is not None:
        return system
    found = smallest_system(num_ipus)
    assumed.append(f"system {found.title}")
    return found


def check_system(request: PlanRequest) -> None:
    """Refuses more IPUs than the system has.

    Raises:
        ConfigurationError: naming a system that has them.
    """
    settings, system = request.settings, request.system
    needed = settings.occupied_ipus if request.space is None else request.space.num_ipus
    if needed > system.num_ipus:
        larger = smallest_system(needed)
        raise ConfigurationError(
            f"{needed} IPUs are needed, and {system.title} has {system.num_ipus}",
            f"use --system {larger.name}, or fewer replicas or stages"
            if larger.num_ipus >= needed
            else "use fewer replicas or stages",
        )


def _of_search(
    request: PlanRequest, resolved: Resolved, config: RunConfig, system: Optional[System]
) -> PlanRequest:
    """The request with a search over configurations."""
    assumed, ipus = list(request.assumed), config.ipus
    if ipus is None:
        ipus = config.num_replicas if "num_replicas" in resolved.typed else 0
        known = system or smallest_system(1)
        ipus = max(known.num_ipus, ipus)
        assumed.append(f"at most {ipus} IPUs")
    check_distributed_batch_norm(
        config.dbn_replica_group_size, config.num_replicas if "num_replicas" in resolved.typed else ipus, 1
    )
    system = _system_of(ipus, system, assumed)
    sizes = {config.micro_batch_size}
    more: Tuple[int, ...] = ()
    if "micro_batch_size" not in resolved.typed:
        sizes = sizes | set(micro_batches(config.global_batch_size))
        more = all_micro_batches(config.global_batch_size)
    space = SearchSpace(
        base=request.settings,
        num_ipus=ipus,
        micro_batch_sizes=tuple(sorted(sizes)),
        more_micro_batch_sizes=more,
        # What is typed holds, whatever is faster.
        free=tuple(name for name in FREE if name not in resolved.typed),
        # A preset's schedule was chosen for its own stages and batch; only one that is typed is kept.
        # Without a backward pass there is one way through a pipeline.
        schedules=(config.pipeline_schedule,)
        if "pipeline_schedule" in resolved.typed or not config.training
        else SCHEDULES,
        recomputation=request.recomputation,
        proportions=request.proportions,
        own_proportions=request.own_proportions,
        num_replicas=config.num_replicas if "num_replicas" in resolved.typed else None,
        global_batch_size=config.global_batch_size,
        global_batch_from="--global-batch-size"
        if "global_batch_size" in resolved.typed
        else "the preset's global batch size",
        gradient_accumulation_count=config.gradient_accumulation_count
        if config.training
        else config.steps_per_execution,
    )
    if config.global_batch_size is not None and "global_batch_size" not in resolved.typed:
        assumed.append(f"global batch {config.global_batch_size}, the preset's")
    return replace(request, space=space, system=system, assumed=tuple(assumed))
