"""Turns a resolved configuration into a planning question: which settings are kept, assumed or open.

``_KEPT`` says whose value of an option is kept.  ``Question.values`` maps each setting that is searched to the values
to try.  A kept one has one value, an open one those of ``OPEN`` in ``search/open_settings.py``.  If the stages are
given (``_of_stages``), these are schedule, recomputation and availableMemoryProportion; else (``_of_search``) all
settings in ``OPEN``, and the number of replicas if it is kept: the search's ``Space`` has the same mapping.  Every
other setting has one value.  What neither a flag nor a preset gave is named in ``Question.assumed``.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.config.origin import Giver
from ipucnn.config.resolve import Resolved
from ipucnn.config.rules import check_rules
from ipucnn.datasets.registry import DATASETS, known_as
from ipucnn.errors import ConfigurationError
from ipucnn.hardware import SYSTEMS, System, get_system, smallest_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import ModelRecord
from ipucnn.planning.graphs.extract import read_layer_graph
from ipucnn.planning.graphs.layer_graph import PRODUCT_CLASSES, LayerGraph, estimates, frozen_graph
from ipucnn.planning.network import input_shape_for, network_options
from ipucnn.planning.pipeline_plan import OF_INPUT, kept_options
from ipucnn.planning.program import (
    OF_UPDATES,
    Placement,
    PlannedProgram,
    ProgramVariants,
    check_searchable,
    given_proportions,
    one_stage_program,
    percentages,
    planned_program,
    smallest,
    uniform,
)
from ipucnn.planning.rules import PLAN_RULES, Asked
from ipucnn.planning.schedules import GROUPED, INTERLEAVED, SCHEDULES, SEQUENTIAL, Schedule
from ipucnn.planning.search.open_settings import (
    COMPARED,
    FREE,
    OPEN,
    OpenSettings,
    Space,
    choices,
    default_count,
    micro_batches,
    proportions_to_try,
    trial_settings,
)
from ipucnn.planning.splits import frozen_layers
from ipucnn.text import counted, shown_value
from ipucnn.training.batching import (
    check_distributed_batch_norm,
    nearest_multiples,
    next_power_of_two,
    overlap_length,
)
from ipucnn.training.program import Layout, ipus_of_stages, make_layout

if TYPE_CHECKING:
    from ipucnn.planning.calibration import SystemProfile


def _weightless(graph: LayerGraph) -> List[str]:
    """Returns what a plan says of convolutions and products whose weights a graph leaves out: they take no memory."""
    later = {last for _, last in graph.tied}  # these use the weights of the first call
    names = [
        layer.name
        for layer in graph.layers
        if layer.op_class in PRODUCT_CLASSES and not layer.num_parameters and layer.name not in later
    ]
    more = f" and {len(names) - 5} more" if names[5:] else ""
    return (
        [f"layers without weights (num_parameters): {', '.join(map(shown_value, names[:5]))}{more}"]
        if names
        else []
    )


@dataclass(frozen=True)
class Question:
    """The input of the planner.

    Attributes:
        resolved: the typed options and those of a preset.
        config: the configuration to plan; for inference it has no training options.
        options: the options to build the network.
        kept: the options that the plan repeats for the run, see ``pipeline_plan.KEPT``.
        settings: the settings of one program; for a search, those that hold for all configurations.
        values: the values to try of each setting that is searched; a kept one has one.  A search has the same in
            ``space``.
        by_stage: whether stages may differ in availableMemoryProportion, if that is open.
        splits: the splits to judge; None for the planner to choose them.
        space: the space of the search over configurations; None if the number of stages is given.
        row: the row of the search result, from 1 on, that becomes the plan.
        assumed: what was assumed because neither a flag nor a preset gave it, a sentence each.
        assumed_input: the sentence of ``assumed`` about the input; None if the user gave the input.
        warnings: requested things that are impossible, a sentence each.
        graph: the network, if it is known: that of a file, or one that was read before; ``with_network`` freezes it.
    """

    resolved: Resolved
    config: RunConfig
    options: BuildOptions
    kept: Dict[str, Any]
    settings: PlannedProgram
    system: System
    values: OpenSettings
    by_stage: bool = True
    splits: Optional[Tuple[str, ...]] = None
    space: Optional[Space] = None
    row: int = 1
    assumed: Tuple[str, ...] = ()
    assumed_input: Optional[str] = None
    warnings: Tuple[str, ...] = ()
    graph: Optional[LayerGraph] = None

    @property
    def record(self) -> ModelRecord:
        """Returns the network's record."""
        return self.resolved.record

    @property
    def build(self) -> Dict[str, Any]:
        """Returns the options that determine the network's layers, base filters included, to be saved in the plan."""
        filters = self.options.base_filters or self.record.builder_args.get("base_filters")
        options = replace(self.options, base_filters=filters)
        names = ("norm", "norm_groups", "norm_channels_per_group", "dropout", "base_filters")
        return {name: getattr(options, name) for name in names if getattr(options, name) is not None}

    @property
    def preset_splits(self) -> Dict[str, Tuple[str, ...]]:
        """Returns name and splits of a preset, to compare with."""
        splits = self.config.named_splits
        return (
            {str(self.resolved.origins["pipeline_splits"]): splits} if splits and self.splits is None else {}
        )

    def with_network(self, graph: LayerGraph) -> "Question":
        """Returns the question with a network, its untrained layers frozen; what that assumes is added."""
        assumed, freeze = [*self.assumed, *estimates(graph), *_weightless(graph)], self.config.freeze
        if freeze is not None:
            frozen = frozen_layers(graph, freeze)
            graph = frozen_graph(graph, frozen)
            names = ", ".join(map(shown_value, frozen[:5]))
            names += f" and {len(frozen) - 5} more" if frozen[5:] else ""
            assumed.append(
                f"freeze {shown_value(freeze)}: {counted(len(frozen), 'layer')} not trained: {names}"
            )
        return replace(self, graph=graph, assumed=tuple(assumed))

    def with_stages(self, num_stages: int) -> str:
        """Returns the options to type for another number of stages, and new values for conflicting typed options."""
        settings, origins, ipus = self.settings, self.resolved.origins, next_power_of_two(num_stages)
        given = {name: getattr(self.resolved.config, name) for name in origins if origins[name].by_user}
        one_each = settings.order.is_sequential and settings.placement is not Placement.SEGMENTS
        mapped = one_each or origins["ipus_per_replica"].is_typed
        words = [f"{'--ipus-per-replica' if mapped else '--stages'} {num_stages}"]
        base = overlap_length(settings.schedule, num_stages)
        count = given.get("gradient_accumulation_count")
        if count is not None and count % base:
            words.append(f"--gradient-accumulation-count {nearest_multiples(count, base)[-1]}")
        replicas = settings.num_replicas
        if given.get("ipus"):
            replicas = max(1, given["ipus"] // ipus)
            words += [f"--ipus {ipus}"] if given["ipus"] < ipus else []
        least = settings.micro_batch_size * replicas * base
        if (given.get("global_batch_size") or least) < least:
            words.append(f"--global-batch-size {least}")
        proportions = self.values["available_memory_proportion"][0]
        if origins["available_memory_proportion"].is_typed and len(proportions) > 1:
            (share,) = smallest(proportions)
            (value,) = percentages(uniform(min(share.convolution, share.matmul)))
            words.append(f"--available-memory-proportion {value:g}")
        return " ".join(words) + (" without --device-mapping" if origins["device_mapping"].is_typed else "")

    def choices(self, schedules: Sequence[str] = ()) -> List[ProgramVariants]:
        """Returns the programs to choose from, with given stages.

        Args:
            schedules: the schedules to try; by default all that are open.
        """
        programs = [_under(self.settings, name) for name in schedules or self.values["schedule"]]
        return [choice for program in programs for choice in choices(program, self.values, self.by_stage)]


_KEPT: Mapping[str, Giver] = {
    # A preset's was chosen for its own stages and batch.
    **dict.fromkeys(
        ("pipeline_schedule", "pipeline_splits", "device_mapping", "ipus_per_replica"), Giver.TYPED
    ),
    # The network's own preset is for training on a host, or on other IPUs.
    **dict.fromkeys(("micro_batch_size", "num_replicas", *FREE), Giver.NAMED),
    **dict.fromkeys(("gradient_accumulation_count", "global_batch_size"), Giver.NAMED),
    "recomputation": Giver.PUBLIC,
}
"""Option -> the least giver whose value is kept, even if others are faster.  Another giver's is one of those to try, or
a start to round from."""


def _is_fixed(resolved: Resolved, option: str) -> bool:
    """Tells whether the value of an option is kept, and not searched."""
    return resolved.origins[option].giver >= _KEPT[option]


def make_question(
    resolved: Resolved,
    *,
    stages: Optional[int] = None,
    row: Optional[int] = None,
    system: Optional[str] = None,
    profile: Optional["SystemProfile"] = None,
    classes: Optional[int] = None,
    recomputation: Optional[str] = None,
    inference: bool = False,
    stage_proportions: bool = True,
) -> Question:
    """Returns the question of ``plan-splits``.

    Args:
        row: the row of a search result, from 1 on, to plan; None for the first, which is the fastest.
        profile: the measurements of the system; its own system if none is named.
        recomputation: "auto", "on" or "off"; None for the preset's value, else auto.
        inference: whether to plan forward passes only.
        stage_proportions: whether stages may differ in availableMemoryProportion if none is given.

    Raises:
        ConfigurationError: options that contradict each other or the schedule.
    """
    config, assumed = resolved.config, []  # type: RunConfig, List[str]
    typed = _typed_stages(resolved)
    count = typed[1] if typed else _num_stages(config, stages)
    asked = Asked(stages, row, recomputation, inference, typed, count)
    check_rules(PLAN_RULES, config, asked, resolved.origins, resolved.command)
    if not resolved.origins["model_name"].is_given:
        assumed.append(f"network {resolved.record.name}, as none is named")
    if inference:
        config = _for_inference(config)
    named_system = _named_system(system, profile, assumed)
    if not resolved.origins["precision"].is_given:
        config = replace(config, precision="16.16")
        assumed.append("precision 16.16")
    graph, options, assumed_input = _network(resolved, config, classes)
    assumed += [assumed_input] if assumed_input is not None else []
    own, without_data = resolved.record.own, (None, resolved.record.home_dataset, "random")
    if own is not None and own.architecture is None and classes is None and config.dataset in without_data:
        assumed.append(f"{counted(options.num_classes, 'class')}, as no data set is named")
    splits = (config.named_splits or None) if _is_fixed(resolved, "pipeline_splits") else None
    if resolved.preset is not None:
        assumed.append(f"preset {resolved.preset} (optimizer {config.optimizer}) for what isn't given")
    elif config.training and not resolved.origins["optimizer"].is_given:
        assumed.append(f"optimizer {config.optimizer}")
    config = _with_legal_proportions(resolved, config, count, assumed)
    question = Question(
        resolved=resolved,
        config=config,
        options=options,
        kept=kept_options(_with_network(resolved, config, options, classes)),
        settings=one_stage_program(config, config.micro_batch_size, training=config.training),
        system=named_system or smallest_system(1),
        values={
            "schedule": (config.pipeline_schedule,),
            "recomputation": (False,) if inference else _recomputation(resolved, recomputation),
            "available_memory_proportion": proportions_to_try(config, count or 1),
        },
        by_stage=stage_proportions,
        splits=splits,
        row=row or 1,
        assumed=tuple(assumed),
        assumed_input=assumed_input,
        graph=graph,
    )
    if count is None:
        return _of_search(question, named_system)
    return _of_stages(question, count, named_system)


def _named_system(
    name: Optional[str], profile: Optional["SystemProfile"], assumed: List[str]
) -> Optional[System]:
    """Returns the named or measured system, with its profile; None if there is neither."""
    system = get_system(name) if name is not None else None
    if profile is None:
        return system
    from ipucnn.planning.calibration import calibrated_system, describe

    if system is None:
        system = SYSTEMS[profile.system]
        assumed.append(f"system {system.title}, which was measured")
    assumed += describe(profile)
    return calibrated_system(profile, system)


def _for_inference(config: RunConfig) -> RunConfig:
    """Returns the configuration of forward passes only, without training options."""
    schedule = SEQUENTIAL if config.pipeline_schedule == SEQUENTIAL else GROUPED
    without: Dict[str, Any] = OF_UPDATES
    return replace(config, training=False, recomputation=False, pipeline_schedule=schedule, **without)


def _with_network(
    resolved: Resolved, config: RunConfig, options: BuildOptions, classes: Optional[int]
) -> RunConfig:
    """Returns the configuration for a run of the planned network, with data set, image size and base filters.

    A network in a file has its layers already, and a user's own network takes its input from the data.  For them only
    typed options are kept.
    """
    record = resolved.record
    if record.file is not None or record.own is not None:
        untyped: Dict[str, Any] = {name: None for name in OF_INPUT if not resolved.origins[name].is_typed}
        return replace(config, **untyped)
    known = DATASETS.get(known_as(config.dataset or "") or "")
    has_others = classes is not None and known is not None and known.num_classes not in (None, classes)
    return replace(
        config,
        dataset=None if has_others else config.dataset,
        image_size=options.input_shape[:2],
        base_filters=options.base_filters or record.builder_args.get("base_filters"),
    )


def _network(
    resolved: Resolved, config: RunConfig, classes: Optional[int]
) -> Tuple[Optional[LayerGraph], BuildOptions, Optional[str]]:
    """Returns the layer graph if MODEL is the file of one, the options of the network, and a note on an assumed input.

    Raises:
        ConfigurationError: options that would change the network.
        DataError: the file is damaged.
    """
    record = resolved.record
    if record.file is None or record.own is not None:
        shape, num_classes, assumed_input = _input(resolved, classes)
        return None, network_options(record, config, shape, num_classes), assumed_input
    names = ("image_size", "dataset", "norm_layer", "dropout", "base_filters")
    given = [name for name in names if resolved.origins[name].by_user]
    if given or classes is not None:
        texts = [resolved.origins[name].option(BY_NAME[name].flag) for name in given]
        # One flag that names a preset has all of its options.
        sources = dict.fromkeys(resolved.origins[name].named_with or "it" for name in given)
        raise ConfigurationError(
            f"{' '.join(texts) or '--classes'}: {record.name} holds a network that has its input and layers already",
            f"drop {' and '.join(sources) or 'it'}, and save the network as it is to be",
        )
    graph = read_layer_graph(record.file)
    return graph, BuildOptions(graph.input_shape, graph.num_classes), None


def _input(resolved: Resolved, classes: Optional[int]) -> Tuple[Tuple[int, int, int], int, Optional[str]]:
    """Returns the shape of the network's input, the number of classes, and a sentence about an assumed input.

    It reads no data.
    """
    record, config = resolved.record, resolved.config
    name = config.dataset or record.home_dataset
    known = DATASETS.get(known_as(name) or "")
    is_home = name == record.home_dataset or config.host_generated_data
    shape, num_classes, assumed = record.input_shape, record.num_classes, None
    is_known = is_home or (known is not None and known.num_classes is not None)
    if known is not None and known.num_classes is not None and not is_home:
        # Images of many sizes are resized to the network's own, as in training.
        shape, num_classes = (
            input_shape_for(record, known.image_shape or (None, None, 3)),
            known.num_classes,
        )
    if config.image_size is not None:
        shape = (*config.image_size, shape[2])
        if record.own is not None and record.own.input_shape[2] is None and not (is_known and known):
            assumed = f"{shape[2]} channels, as planning looks at no files (grey images: --dataset digits)"
    elif not is_known:
        raise ConfigurationError(
            f"--dataset {name}: planning looks at no files, and the size of its images isn't known without",
            "add --image-size N and --classes N",
        )
    elif not is_home or record.own is None or None in record.own.input_shape:
        whose = f"as for {name}" if record.own is None or not is_home else "as no data set is named"
        assumed = f"input {'x'.join(map(str, shape))}, {whose}"
    if classes is None and not is_known:
        raise ConfigurationError(
            f"--dataset {name}: planning looks at no files, and its classes aren't known without",
            "add --classes N",
        )
    return shape, num_classes if classes is None else classes, assumed


def _typed_stages(resolved: Resolved) -> Optional[Tuple[str, int]]:
    """Returns the first typed option that says how many stages there are, and their number; None without one."""
    config = resolved.config
    splits = config.named_splits if _is_fixed(resolved, "pipeline_splits") else ()
    mapping = config.device_mapping if _is_fixed(resolved, "device_mapping") else None
    ipus = config.ipus_per_replica if _is_fixed(resolved, "ipus_per_replica") else None
    named = {"--splits": splits, "--device-mapping": mapping, "--ipus-per-replica": ipus}
    typed = [option for option, value in named.items() if value]
    return (typed[0], len(ipus_of_stages(splits, mapping or (), ipus))) if typed else None


def _num_stages(config: RunConfig, stages: Optional[int]) -> Optional[int]:
    """Returns the number of stages of ``--stages``, else a preset's; None if it is to be searched."""
    of_mapping = len(config.device_mapping or ()) or None
    of_splits = len(config.named_splits) + 1 if config.named_splits else None
    return stages or config.ipus_per_replica or of_mapping or of_splits


def _recomputation(resolved: Resolved, text: Optional[str]) -> Tuple[bool, ...]:
    """Returns the values to try."""
    if text is None:
        return (
            (resolved.config.recomputation,)
            if _is_fixed(resolved, "recomputation")
            else OPEN["recomputation"]
        )
    word = text.strip().lower()
    values = {
        "auto": OPEN["recomputation"],
        "on": (True,),
        "true": (True,),
        "off": (False,),
        "false": (False,),
    }
    if word not in values:
        raise ConfigurationError(f"--recomputation {text}: must be auto, on or off", "--recomputation auto")
    return values[word]


def _with_legal_proportions(
    resolved: Resolved, config: RunConfig, count: Optional[int], assumed: List[str]
) -> RunConfig:
    """Returns the configuration without a preset's availableMemoryProportion if that is for another number of stages.

    Raises:
        ConfigurationError: typed values for another number of stages.
    """
    values = config.available_memory_proportion
    is_typed = resolved.origins["available_memory_proportion"].is_typed
    if len(values) < 2:
        return config
    # A preset's values are for the stages of its own splits.  Their count alone is ambiguous: four values may be one
    # for each of four stages, or two (convolutions and matrix products) for each of two.
    splits = () if is_typed or resolved.origins["pipeline_splits"].is_typed else config.named_splits
    if count is not None and (not splits or len(splits) + 1 == count):
        given_proportions(config, count)
        return config
    stages = "one stage" if count == 1 else f"{count} stages" if count else "a search"
    assumed.append(f"no available memory proportion: the preset's {len(values)} values are not for {stages}")
    return replace(config, available_memory_proportion=())


def _of_stages(question: Question, count: int, system: Optional[System]) -> Question:
    """Returns the question with settings for a number of stages: batch, mapping and system."""
    config = question.config
    assumed, warnings = list(question.assumed), []  # type: List[str], List[str]
    mapping, schedule = _mapping(config, count), config.pipeline_schedule
    base = overlap_length(schedule, count)
    accumulation, total = config.gradient_accumulation_count, config.global_batch_size
    is_fixed = _is_fixed(question.resolved, "gradient_accumulation_count")
    if not config.training:
        accumulation = config.steps_per_execution or default_count(schedule, count)
        if config.steps_per_execution is None:
            assumed.append(f"{accumulation} micro-batches per execution")
    elif accumulation is None and total is None:
        accumulation = default_count(schedule, count)
        assumed.append(f"gradient accumulation count {accumulation}")
    elif accumulation is not None and not is_fixed and accumulation % base:
        legal = nearest_multiples(accumulation, base)[-1]
        assumed.append(
            f"gradient accumulation count {legal}: the preset's {accumulation} is not legal for {count} "
            f"{schedule} stages"
        )
        accumulation = legal
    config = replace(
        config,
        pipeline_splits=(),
        device_mapping=mapping,
        ipus_per_replica=None,
        gradient_accumulation_count=accumulation,
        recomputation=config.recomputation and count > 1,
    )
    # Pipelines of forward passes only accept any number of micro-batches, like a Sequential one.
    layout = make_layout(config if config.training else replace(config, pipeline_schedule=SEQUENTIAL))
    changed = [warning for warning in layout.warnings if "powers of two" not in warning]
    assumed += changed
    if total is not None and _is_fixed(question.resolved, "global_batch_size"):
        _check_batch(total, layout, base)
        warnings += changed
    settings = planned_program(config, layout, config.training)
    schedules: Tuple[str, ...] = (schedule,)
    if not any(_is_fixed(question.resolved, name) for name in ("pipeline_schedule", "device_mapping")):
        schedules = _schedules(settings, total is not None or is_fixed)
    if question.splits is None:
        for name in schedules:
            check_searchable(_under(settings, name))
    assumed += _not_given(question.resolved, settings, schedules)
    return replace(
        question,
        settings=settings,
        system=system or _assumed_system(settings.occupied_ipus, assumed),
        values={**question.values, "schedule": schedules},
        assumed=tuple(assumed),
        warnings=tuple(warnings),
    )


def _not_given(resolved: Resolved, settings: PlannedProgram, schedules: Sequence[str]) -> List[str]:
    """Returns the settings of a program in given stages that are not searched and that nobody gave."""
    values = {
        "micro_batch_size": f"micro-batch {settings.micro_batch_size}",
        "num_replicas": counted(settings.num_replicas, "replica"),
    }
    if len(schedules) == 1 and settings.num_stages > 1:
        values["pipeline_schedule"] = f"schedule {settings.schedule}"
    titles = {each.name: each.metadata["name"] for each in fields(settings)}
    for name in trial_settings(settings):
        values[name] = f"{titles[name]} {'on' if getattr(settings, name) else 'off'}"
    given = {name for name in values if resolved.origins[name].is_given}
    given |= {"num_replicas"} if resolved.origins["ipus"].is_given else set()
    return [text for name, text in values.items() if name not in given]


def _check_batch(total: int, layout: Layout, base: int) -> None:
    """Refuses a global batch below the program's smallest; another batch is rounded to the nearest.

    Args:
        layout: the program with the rounded batch.
        base: the number whose multiples are legal accumulation counts.

    Raises:
        ConfigurationError: the batch is too small; the message names the nearest legal ones.
    """
    least = layout.micro_batch_size * layout.num_replicas * base
    if total < least:
        raise ConfigurationError(
            f"--global-batch-size {total} is not possible: micro-batch {layout.micro_batch_size} x "
            f"{counted(layout.num_replicas, 'replica')} x {base} micro-batches to accumulate is {least} at least",
            f"use --global-batch-size {least} or {2 * least}"
            + (", or a smaller --micro-batch-size or fewer IPUs" if least > base else ""),
        )


def _schedules(settings: PlannedProgram, is_fixed: bool) -> Tuple[str, ...]:
    """Returns the program's schedule, and the others that use as many IPUs at once.

    Args:
        is_fixed: whether the batch was typed; schedules for which it is not legal are left out.
    """

    def is_possible(schedule: str) -> bool:
        other = _under(settings, schedule)
        is_legal = other.gradient_accumulation_count == settings.gradient_accumulation_count or not is_fixed
        return is_legal and other.mapping == settings.mapping

    if not settings.training or settings.num_stages == 1:
        return (settings.schedule,)
    others = (GROUPED, INTERLEAVED)
    return tuple(
        name for name in SCHEDULES if name == settings.schedule or (name in others and is_possible(name))
    )


def _under(settings: PlannedProgram, schedule: str) -> PlannedProgram:
    """Returns the program under a schedule, with the nearest legal accumulation."""
    if schedule == settings.schedule:
        return settings
    base = overlap_length(schedule, settings.num_stages)
    count = nearest_multiples(settings.gradient_accumulation_count, base)[-1]
    return replace(settings, schedule=schedule, gradient_accumulation_count=count)


def _mapping(config: RunConfig, count: int) -> Tuple[int, ...]:
    """Returns the IPU of each stage.  Sequential stages are segments of one IPU unless an IPU each is requested."""
    if config.device_mapping is not None and len(config.device_mapping) == count:
        return tuple(config.device_mapping)
    if config.pipeline_schedule == SEQUENTIAL and config.ipus_per_replica == count:
        return tuple(range(count))
    return Schedule(config.pipeline_schedule).default_mapping(count)


def _assumed_system(num_ipus: int, assumed: List[str]) -> System:
    """Returns the smallest Mk2 POD of at least 16 IPUs that has enough IPUs, else the largest."""
    system = smallest_system(num_ipus)
    assumed.append(f"system {system.title}")
    return system


def check_system(question: Question) -> None:
    """Refuses more IPUs than the system has.

    Raises:
        ConfigurationError: the system is too small; the message names one that has enough.
    """
    settings, system = question.settings, question.system
    needed = settings.occupied_ipus if question.space is None else question.space.num_ipus
    if needed > system.num_ipus:
        larger = smallest_system(needed)
        fewer = "use fewer replicas or stages"
        raise ConfigurationError(
            f"{needed} IPUs are needed, and {system.title} has {system.num_ipus}",
            f"use --system {larger.name}, or {fewer[4:]}" if larger.num_ipus >= needed else fewer,
        )


def _of_search(question: Question, system: Optional[System]) -> Question:
    """Returns the question with a search over configurations."""
    config, resolved, assumed = question.config, question.resolved, list(question.assumed)
    origins = resolved.origins
    replicas = config.num_replicas if _is_fixed(resolved, "num_replicas") else None
    ipus = config.ipus
    if ipus is None:
        ipus = max((system or smallest_system(1)).num_ipus, replicas or 0)
        assumed.append(f"at most {ipus} IPUs")
    check_distributed_batch_norm(config.dbn_replica_group_size, replicas or ipus, 1)
    system = system or _assumed_system(ipus, assumed)
    total = config.global_batch_size
    # Without a backward pass only the configured schedule is tried.
    has_one = _is_fixed(resolved, "pipeline_schedule") or not config.training
    if not (config.training or origins["pipeline_schedule"].is_given):
        assumed.append(f"schedule {config.pipeline_schedule}")
    values = {
        **OPEN,
        **question.values,
        "schedule": (config.pipeline_schedule,) if has_one else OPEN["schedule"],
        "micro_batch_size": (config.micro_batch_size,),
        **{name: (getattr(question.settings, name),) for name in FREE if _is_fixed(resolved, name)},
    }
    if replicas is not None:
        values["num_replicas"] = (replicas,)
    compared = {
        **COMPARED,
        "micro_batch_size": values["micro_batch_size"],
        "optimizer_state_offloading": (question.settings.optimizer_state_offloading,),
    }
    if not _is_fixed(resolved, "micro_batch_size"):
        compared["micro_batch_size"] = (*{config.micro_batch_size, *micro_batches(total, compared=True)},)
        values["micro_batch_size"] = (*{*compared["micro_batch_size"], *micro_batches(total)},)
    space = Space(
        program=question.settings,
        values=values,
        compared=compared,
        num_ipus=ipus,
        by_stage=question.by_stage,
        global_batch_size=total,
        global_batch_text=origins["global_batch_size"].option("--global-batch-size", str(total)),
        gradient_accumulation_count=config.gradient_accumulation_count
        if config.training
        else config.steps_per_execution,
    )
    if total is not None and not _is_fixed(resolved, "global_batch_size"):
        assumed.append(f"global batch {total}, the preset's")
    return replace(question, values=values, space=space, system=system, assumed=tuple(assumed))
