"""What to change of a program that ran out of memory: the smallest change that is predicted to fit.

Runs get a question (:func:`would_fit`) to ask when it happens, and not before.
"""

from dataclasses import dataclass, replace
from typing import Callable, Collection, Dict, Iterator, List, Optional, Sequence, Tuple

from ipucnn.aliases import KerasModel, MemoryAdvice
from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.errors import UserError
from ipucnn.hardware import System, smallest_system
from ipucnn.planning.cost.memory import FITS_BELOW, program_memory
from ipucnn.planning.graphs import keras_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph, unknown_layers
from ipucnn.planning.search.planner import PROPORTIONS, Planner
from ipucnn.planning.settings import PlanSettings, Proportions, percentages, plan_settings
from ipucnn.text import percent
from ipucnn.training.batching import overlap_length
from ipucnn.training.program import Program, make_program

# Dynamic programs spent on the splits of a change; the hint needs splits that fit, not a proof.
_EVALUATIONS = 4
_MOST_STAGES = 16

_PROPORTION = "--available-memory-proportion"

# What ran out of memory by an unknown amount is taken to have missed it by a tenth.
_UNKNOWN_OVERUSE = 1.1


@dataclass(frozen=True)
class Change:
    """A change that makes a program fit, by prediction.

    Attributes:
        flags: to add to the command.
        settings, splits: of the changed program.
        predicted_fill: share of the fullest IPU's memory that it takes.
        predicted_fill_before: the same of the program as it was.
    """

    flags: Tuple[str, ...]
    settings: PlanSettings
    splits: Tuple[str, ...]
    predicted_fill: float
    predicted_fill_before: float


def smallest_change(
    graph: LayerGraph,
    settings: PlanSettings,
    splits: Sequence[str],
    system: System,
    *,
    overuse: Optional[float] = None,
    only: Optional[Collection[str]] = None,
) -> Optional[Change]:
    """The first change, from small to large, after which the program is predicted to fit.

    In order: what changes no result (recomputation, a smaller availableMemoryProportion, both, optimizer state
    outside the chip, other splits, the Interleaved schedule); a smaller micro-batch with as many more accumulated; more
    stages; 16-bit numbers; more stages and smaller micro-batches.

    Args:
        settings, splits: of the program that did not fit.
        overuse: memory needed over memory there is, as the compiler said; None where it did not say.
        only: the flags that the command takes and acts on, if they are not all.
    """
    planner = Planner(graph, system)
    before = max(memory.fill for memory in program_memory(graph, splits, settings, system.ipu))
    # The compiler has just shown how far off the model is for this network: what fits must be as much smaller.
    allowed = min(FITS_BELOW, before / max(1.0, _UNKNOWN_OVERUSE if overuse is None else overuse))
    for flags, changed, own_splits in _changes(settings, tuple(splits), system.num_ipus):
        if only is not None and any(word.startswith("--") and word not in only for word in flags):
            continue
        found = _try(planner, changed, own_splits, allowed)
        if found is not None:
            own, fill = found
            if own != tuple(splits):
                if only is not None and "--pipeline-splits" not in only:
                    continue
                flags = [*flags, *_split_flags(own)]
            return Change(tuple(flags), changed, own, fill, before)
    return None


def hint_for(change: Optional[Change]) -> Optional[str]:
    """The change as a hint; None where there is none."""
    if change is None:
        return None
    return (
        f"predicted to fit: {' '.join(change.flags)} (the fullest IPU at {percent(change.predicted_fill)} of its "
        f"memory instead of {percent(change.predicted_fill_before)})"
    )


def _split_flags(splits: Tuple[str, ...]) -> List[str]:
    return ["--pipeline-splits", *splits] if splits else []


# Flags, settings, and the splits to keep; None for splits that the planner is to choose.
_Trial = Tuple[List[str], PlanSettings, Optional[Tuple[str, ...]]]


def _changes(settings: PlanSettings, splits: Tuple[str, ...], max_ipus: int) -> Iterator[_Trial]:
    """What to try, the smallest change first."""
    yield from _without_effect_on_results(settings, splits)
    for size in _smaller(settings.micro_batch_size):
        smaller = _with_micro_batch(settings, size)
        if smaller is None:
            continue
        own = ["--micro-batch-size", str(size)]
        if settings.training:
            own += ["--gradient-accumulation-count", str(smaller.gradient_accumulation_count)]
        yield own, smaller, splits
        for flags, changed, kept in _without_effect_on_results(smaller, splits):
            yield [*own, *flags], changed, kept
    powers = (1 << power for power in range(1, _MOST_STAGES.bit_length()))
    counts = [k for k in powers if k > settings.num_stages and k * settings.num_replicas <= max_ipus]
    for stages in counts:
        yield from _more_stages(settings, stages, [])
    if settings.precision == "32.32":
        yield ["--precision", "16.16"], replace(settings, precision="16.16"), splits
    for stages in counts:
        for size in _smaller(settings.micro_batch_size):
            smaller = _with_micro_batch(settings, size)
            if smaller is not None:
                yield from _more_stages(smaller, stages, ["--micro-batch-size", str(size)])


def _more_stages(settings: PlanSettings, stages: int, flags: List[str]) -> Iterator[_Trial]:
    more = _with_stages(settings, stages)
    own = list(flags)
    if more.available_memory_proportion != settings.available_memory_proportion:
        own += _proportion_flags(more)  # a value per stage is for the stages as they are
    if flags or more.gradient_accumulation_count != settings.gradient_accumulation_count:
        own += ["--gradient-accumulation-count", str(more.gradient_accumulation_count)]
    if more.schedule != settings.schedule:
        own += ["--pipeline-schedule", more.schedule]
    yield own, more, None
    for others, changed, _ in _without_effect_on_results(more, ()):
        if _PROPORTION in own and _PROPORTION in others:
            start = own.index(_PROPORTION)
            yield [*own[:start], *own[start + 2 :], *others], changed, None
        else:
            yield [*own, *others], changed, None


def _without_effect_on_results(settings: PlanSettings, splits: Tuple[str, ...]) -> Iterator[_Trial]:
    piped = settings.training and settings.num_stages > 1
    least, least_flags = settings, []  # type: PlanSettings, List[str]
    if piped and not settings.recomputation:
        least, least_flags = replace(settings, recomputation=True), ["--recomputation"]
        yield least_flags, least, splits
    limited = [_limited(settings, share) for share in PROPORTIONS]
    for own in (proportions for proportions in limited if proportions is not None):
        changed = replace(settings, available_memory_proportion=own)
        flags = _proportion_flags(changed)
        yield flags, changed, splits
        if least_flags:
            yield ["--recomputation", *flags], replace(least, available_memory_proportion=own), splits
    if limited[-1] is not None:
        least = replace(least, available_memory_proportion=limited[-1])
        least_flags = [*least_flags, *_proportion_flags(least)]
    offloading = replace(settings, optimizer_state_offloading=True)
    if offloading.offloads_optimizer_state and not settings.offloads_optimizer_state:
        yield ["--optimizer-state-offloading"], offloading, splits
    if settings.num_stages == 1:
        return
    yield [], settings, None
    if least_flags:
        yield least_flags, least, None
    mapping = settings.device_mapping
    if piped and settings.schedule == "Grouped" and (mapping is None or len(set(mapping)) == len(mapping)):
        # Whatever count Grouped accepts, Interleaved does, too; but it refuses two stages on one IPU.
        flags = ["--pipeline-schedule", "Interleaved"]
        yield flags, replace(settings, schedule="Interleaved"), splits
        yield [*least_flags, *flags], replace(least, schedule="Interleaved"), None


def _limited(settings: PlanSettings, share: float) -> Optional[Proportions]:
    """availableMemoryProportion of at most ``share`` in each stage; None where that changes nothing.

    Where the convolutions and the matrix products of all stages have proportions of their own, it changes nothing
    either: they come from options that go before the one proposed here.
    """
    own = settings.available_memory_proportion
    if len(own) == 1 and own[0].convolution != own[0].matmul:
        return None
    limited = tuple(stage.limited(share) for stage in own)
    return None if limited == own else limited


def _proportion_flags(settings: PlanSettings) -> List[str]:
    return [_PROPORTION, *(f"{value:g}" for value in percentages(settings.available_memory_proportion))]


def _smaller(size: int) -> List[int]:
    """Micro-batches to try below one: halves."""
    sizes = []
    while size > 1:
        size //= 2
        sizes.append(size)
    return sizes


def _with_micro_batch(settings: PlanSettings, size: int) -> Optional[PlanSettings]:
    """The same global batch in smaller micro-batches, None if there is none."""
    if not settings.training:
        return replace(settings, micro_batch_size=size)
    samples = settings.micro_batch_size * settings.gradient_accumulation_count
    if samples % size:
        return None
    return replace(settings, micro_batch_size=size, gradient_accumulation_count=samples // size)


def _with_stages(settings: PlanSettings, stages: int) -> PlanSettings:
    """The same program in another number of stages, one per IPU, with a legal number of accumulated micro-batches."""
    count = settings.gradient_accumulation_count
    schedule = "Grouped" if settings.schedule == "Sequential" else settings.schedule
    if settings.training:
        base = overlap_length(schedule, stages)
        count = -(-count // base) * base
    return settings.restaged(stages, schedule=schedule, gradient_accumulation_count=count)


def _try(
    planner: Planner, changed: PlanSettings, splits: Optional[Tuple[str, ...]], allowed: float
) -> Optional[Tuple[Tuple[str, ...], float]]:
    """Splits and fill of changed settings if they fit.

    Args:
        splits: to keep; None for splits that the planner is to choose.
    """
    if splits is not None:
        fill = max(ipu.fill for ipu in program_memory(planner.graph, splits, changed, planner.system.ipu))
        return (splits, fill) if fill < allowed else None
    if changed.num_stages > len(planner.starts) or not planner.fits(changed, allowed):
        return None
    found = planner.best(changed, allowed, _EVALUATIONS)
    if found is None or found.predicted_fill >= allowed:
        return None
    return found.splits, found.predicted_fill


def _held(
    graph: LayerGraph, splits: Sequence[str], settings: PlanSettings, system: System, option: str
) -> str:
    """What the fullest IPU holds with an option off; the planner knows no other offloading, all else is on the IPU."""
    if option == "optimizer_state_offloading":
        settings = replace(settings, optimizer_state_offloading=False)
    fullest = max(program_memory(graph, splits, settings, system.ipu), key=lambda memory: memory.fill)
    held, there = (f"{value / 2**20:.0f} MiB" for value in (fullest.total_bytes, fullest.capacity_bytes))
    verdict = "" if fullest.fill < FITS_BELOW else ", which does not fit"
    return f"the fullest IPU is then predicted to hold {held} of its {there}{verdict}"


# --- the question of a run: no answer where nothing tried is predicted to fit in training, and advice without a promise
# where the planner does not know the network

_UNKNOWN = "the planner cannot compute this network, so nothing is predicted"


def would_fit(model: "KerasModel", name: str, program: Program, config: RunConfig) -> MemoryAdvice:
    """The question to ask when memory runs out in training.

    Args:
        model: from ``build_model``.
        name: of the network.
        program: that runs; its splits are filled in.
        config: of the run.
    """
    advice = "try a smaller --micro-batch-size, --recomputation or more stages"
    return _asking(model, name, lambda: program, config, training=True, renamed=None, advice=advice)


def prediction_would_fit(model: "KerasModel", name: str, config: RunConfig, command: str) -> MemoryAdvice:
    """The question to ask when memory runs out in evaluation or inference, which have no pipeline.

    Args:
        model: from ``build_model``.
        name: of the network.
        config: of the run.
        command: "evaluate", "infer" or "benchmark"; the hint has only options that it takes.
    """
    proportions = config.available_memory_proportion
    micro_batch = config.validation_micro_batch_size or config.micro_batch_size
    one_stage = replace(
        config,
        micro_batch_size=micro_batch,
        num_replicas=config.validation_num_replicas or config.num_replicas,
        gradient_accumulation_count=1,
        global_batch_size=None,
        ipus=None,
        ipus_per_replica=None,
        pipeline_splits=(),
        device_mapping=None,
        recomputation=False,
        dbn_replica_group_size=1,
        pad_dataset=False,
        available_memory_proportion=proportions if len(proportions) == 1 else (),
        weight_updates_per_epoch=1,
        steps_per_execution=None,
        num_epochs=1,
        logs_per_epoch=1.0,
        checkpoints=False,
        validation=False,
    )

    def program() -> Program:
        return make_program(one_stage, micro_batch * one_stage.num_replicas, seed=0)

    size = "validation_micro_batch_size" if command == "evaluate" else "micro_batch_size"
    options = {"micro_batch_size": size, "available_memory_proportion": None, "precision": None}
    renamed = {}
    for option, other in options.items():
        spec = BY_NAME[other or option]
        if command in spec.commands:
            renamed[BY_NAME[option].flag] = spec.flag
    smaller = BY_NAME[size].flag if command in BY_NAME[size].commands else ""
    advice = f"try a smaller {smaller}, or use --device cpu" if smaller else "use --device cpu"
    ask = _asking(model, name, program, one_stage, training=False, renamed=renamed, advice=advice)

    def asked(overuse: Optional[float], without: Optional[str] = None) -> Optional[str]:
        found = ask(overuse, without)
        if found is None and without is None:
            return "nothing that was tried is predicted to fit: use --device cpu"
        return found

    return asked


def _asking(
    model: "KerasModel",
    name: str,
    make: Callable[[], Program],
    config: RunConfig,
    *,
    training: bool,
    renamed: Optional[Dict[str, str]],
    advice: str,
) -> MemoryAdvice:
    """The question to ask about a program.

    Args:
        make: the program that ran out of memory, asked for only then: no run fails for the sake of a hint.
        renamed: flags of training that may be proposed, and what they are called; None: all, as they are.
        advice: where nothing can be predicted.
    """

    def ask(overuse: Optional[float], without: Optional[str] = None) -> Optional[str]:
        only: Optional[Collection[str]] = renamed
        unknown = _UNKNOWN if without is not None else f"{_UNKNOWN}; {advice}"
        try:
            program = make()
            system = smallest_system(program.num_ipus)
            graph = keras_graph.graph_of(model, name)
            if unknown_layers(graph):  # what is estimated of them is no promise
                return unknown
            settings = plan_settings(config, program.layout, training)
            if without is not None:
                return _held(graph, program.pipeline_splits, settings, system, without)
            change = smallest_change(
                graph, settings, program.pipeline_splits, system, overuse=overuse, only=only
            )
        except UserError:
            # A network that the planner does not know: the error that is being explained matters more.
            return unknown
        if change is not None and renamed is not None:
            change = replace(change, flags=tuple(renamed.get(word, word) for word in change.flags))
        return hint_for(change)

    return ask
