"""Runs ``plan-splits`` from question to plan: the layer graph, the best or the judged splits, and all predictions.

It also assembles the resulting ``PipelinePlan``: stages, memory, profile, comparison with other splits.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

import ipucnn
from ipucnn.aliases import PlainValue
from ipucnn.config.options import RunConfig
from ipucnn.documents import MAX_BYTES
from ipucnn.errors import ConfigurationError, InfeasibleError, UserError, did_you_mean
from ipucnn.events import Began, Events, Note, emit
from ipucnn.filesystem import expand, read_text, shown
from ipucnn.planning.cost.layer_times import cut_bytes, program_times, stage_starts
from ipucnn.planning.cost.memory import MemoryModel
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS
from ipucnn.planning.forecast import Forecast
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.network import network_graph
from ipucnn.planning.pipeline_plan import (
    ComparisonRow,
    IpuPlan,
    NoFit,
    ParetoRow,
    PipelinePlan,
    ProfileLayer,
    StagePlan,
    SystemFacts,
)
from ipucnn.planning.program import Placement, ProgramVariants
from ipucnn.planning.question import Question, check_system
from ipucnn.planning.search.front import best_uses
from ipucnn.planning.search.neighbours import (
    Optimisation,
    infeasible,
    less_memory,
    next_changes,
    optimisations,
    ways_to_fit,
    why_no_fit,
)
from ipucnn.planning.search.open_settings import FREE, choices, trial_settings
from ipucnn.planning.search.planner import LIMITS, Candidate, Planner
from ipucnn.planning.splits import HEURISTICS, check_cuts, check_stages
from ipucnn.text import counted, percent

if TYPE_CHECKING:
    from ipucnn.config.presets import PresetFile

Comparison = Callable[[LayerGraph, int], Mapping[str, Sequence[str]]]
"""Returns splits by name for a network and a number of stages."""
_COMPARISON_HINT = "give a plan.yml, or a file of presets with pipeline-splits"


def read_graph(question: Question, import_tensorflow: Callable[[], object]) -> LayerGraph:
    """Returns the network's layer graph: shipped, cached, or made by building the network, once for a question.

    Args:
        import_tensorflow: the function that imports TensorFlow as in a run, called before the network is built, if
            it has to be.
    """

    def before_build() -> None:
        emit(Note(f"reading the layers of {question.record.name}, once (TensorFlow is imported)"))
        import_tensorflow()

    return question.graph or network_graph(question.record, question.options, before_build)


def _with_planner(question: Question, import_tensorflow: Callable[[], object]) -> Tuple[Question, Planner]:
    """Returns the question with its network, and the network's planner, after checking one against the other."""
    graph = read_graph(question, import_tensorflow)
    question = question.with_network(graph)
    graph = question.graph or graph
    if question.splits is not None:
        check_cuts(question.splits, graph)
    check_stages(question.settings.num_stages, graph)
    check_system(question)
    return question, Planner(graph, question.system)


def make_plan(
    question: Question, comparisons: Sequence[str], import_tensorflow: Callable[[], object]
) -> Events[PipelinePlan]:
    """Plans, or judges the splits that the question names.

    Args:
        comparisons: names of rules, or files with splits, to compare with; if empty, the rule "params".
        import_tensorflow: as for ``read_graph``.

    Raises:
        ConfigurationError: splits or stages that the network does not have; a comparison that cannot be made.
        DataError: a file to compare with is not readable.
        InfeasibleError: nothing fits.
    """
    yield Began("searching" if question.splits is None else "predicting")
    compared = [_comparison(name) for name in comparisons or ["params"]]
    question, planner = _with_planner(question, import_tensorflow)
    pareto: Tuple[ParetoRow, ...] = ()
    if question.splits is None and question.space is not None:
        candidate, pareto = best_uses(planner, question.space, question.row)
    else:
        candidate = _best(planner, question)
    others: Dict[str, Sequence[str]] = dict(question.preset_splits)
    for splits_of in compared:
        others.update(splits_of(planner.graph, candidate.settings.num_stages))
    for splits in others.values():
        check_cuts(splits, planner.graph)
    if question.splits and candidate.solution.feasible:
        others = {"planned": planner.names(candidate.solution.starts), **others}
    no_fit = None
    exceeds = question.splits is not None and candidate.predicted_fill > max(LIMITS)
    if question.splits is None and candidate.memory_limit > LIMITS[0]:
        # The program keeps the settings that only a search over configurations varies.
        values = {name: tried for name, tried in question.values.items() if name not in FREE}
        no_fit = _why_no_fit(planner, question, choices(candidate.settings, values), LIMITS[0])
    elif exceeds:
        tried = question.choices()
        if not any(planner.fits(each, max(LIMITS)) for choice in tried for each in choice.programs):
            no_fit = _why_no_fit(planner, question, tried, max(LIMITS))
    changes, remedy = next_changes(planner, candidate)
    origins = question.resolved.origins
    fixed = [name for name in trial_settings(candidate.settings) if not origins[name].by_user]
    plan = assemble(
        planner,
        candidate,
        planned=question.splits is None,
        build=question.build,
        options=question.kept,
        # Without a search, the program has one schedule with a known origin, and others that were tried beside it.
        comparison=(*_under_own_schedule(planner, candidate, question), *compare(planner, candidate, others)),
        pareto=pareto,
        no_fit=no_fit,
        assumed=question.assumed,
        not_searched=tuple(fixed) if question.space is None else (),
        next_changes=changes,
        remedy=remedy,
    )
    # Splits beyond an IPU's memory are at best as fast as others beyond it, so they are no optimum.
    return replace(plan, optimal=plan.optimal and not exceeds)


def make_optimisations(
    question: Question, config: RunConfig, import_tensorflow: Callable[[], object]
) -> Events[Tuple[Question, Candidate, Forecast, List[Optimisation]]]:
    """Returns each optimisation's effect on a question's program, with given splits, else a preset's, else the best.

    Returns:
        The question with its network, the program, its prediction, and the optimisations.

    Raises:
        ConfigurationError: the number of stages is not given, or it is not a training pipeline.
        InfeasibleError: nothing fits.
    """
    yield Began("predicting")
    if question.space is not None:
        raise ConfigurationError(
            "--optimisations takes one program, and nothing says how many stages it has", "add --stages 4"
        )
    splits = question.splits
    if splits is None and question.preset_splits:
        splits = next(iter(question.preset_splits.values()))
    # The optimisations compare with the program as it is, under no other schedule.
    values = {**question.values, "schedule": (question.settings.schedule,)}
    question = replace(question, splits=splits, values=values)
    question, planner = _with_planner(question, import_tensorflow)
    candidate = _best(planner, question)
    base, rows = optimisations(
        planner,
        candidate.splits,
        candidate.settings,
        loss_scaling=config.loss_scaling,
        exchange_target=config.internal_exchange_optimization_target,
    )
    return question, candidate, base, rows


def check_not_fitting(plan: PipelinePlan, question: Question) -> None:
    """Refuses a plan of given splits that do not fit.

    Raises:
        InfeasibleError: the splits do not fit; the message names the fullest IPU, and what would fit.
    """
    if plan.verdict != "does not fit":
        return
    fullest = max(plan.ipus, key=lambda ipu: ipu.predicted_fill)
    largest = max(fullest.predicted_memory_bytes.items(), key=lambda item: item[1])[0]
    raise InfeasibleError(
        f"these splits do not fit: IPU {fullest.ipu} takes {percent(fullest.predicted_fill)} of its memory "
        f"(predicted), most of it {largest.replace('_', ' ')}",
        _what_would_fit(plan, question),
    )


def _what_would_fit(plan: PipelinePlan, question: Question) -> str:
    same_stages = question.with_stages(plan.num_stages)
    if plan.no_fit is None:
        return f"use {same_stages} in place of the splits: it finds the best that fit"
    why = f"no splits into {counted(plan.num_stages, 'stage')} fit; "
    ways = ways_to_fit(plan.no_fit, question.with_stages, f" {same_stages}")
    return why + (f"in place of the splits {ways}" if ways else less_memory(plan.model, plan.settings))


def _best(planner: Planner, question: Question) -> Candidate:
    """Returns the given splits with the best settings for them, else the best splits.

    Raises:
        InfeasibleError: no splits fit.
    """
    tried = question.choices()
    candidate = _best_of(planner, question, tried)
    if candidate is None:
        why = _why_no_fit(planner, question, tried, max(LIMITS))
        raise infeasible(
            planner.graph.model,
            why,
            question.settings,
            question.system.title,
            question.with_stages,
            question.assumed_input,
        )
    return candidate


def _best_of(planner: Planner, question: Question, tried: Sequence[ProgramVariants]) -> Optional[Candidate]:
    """Returns the best of several programs for the given splits, else with the best splits; None if none fit."""
    if question.splits is not None:
        return planner.best_judged(question.splits, tried)
    return planner.fastest_program(tried)


def _why_no_fit(
    planner: Planner, question: Question, tried: Sequence[ProgramVariants], limit: float
) -> NoFit:
    """Calls ``why_no_fit`` with as many stages as the system has IPUs for; replicas occupy powers of two."""
    programs = [program for choice in tried for program in choice.programs]
    each = max(1, question.system.num_ipus // programs[0].num_replicas)
    most = max(1 << (each.bit_length() - 1), programs[0].num_stages)
    return why_no_fit(planner, programs, limit, most, question.values["recomputation"])


def _under_own_schedule(
    planner: Planner, candidate: Candidate, question: Question
) -> Tuple[ComparisonRow, ...]:
    """Returns the program under its preset's or the default schedule, if another schedule is faster."""
    schedule = question.settings.schedule
    if question.space is not None or candidate.settings.schedule == schedule:
        return ()
    other = _best_of(planner, question, question.choices((schedule,)))
    if other is None:
        return ()
    name = f"{schedule} ({question.resolved.origins['pipeline_schedule']})"
    best = _micro_batch_s(candidate)
    return (_comparison_row(name, other, _micro_batch_s(other) / best, best),)


def _micro_batch_s(candidate: Candidate) -> float:
    """Returns the seconds of a tick and its share of the update."""
    times = candidate.prediction
    return times.tick_s + times.update_s / candidate.settings.gradient_accumulation_count


def _comparison_row(name: str, candidate: Candidate, ratio: float, best_s: float) -> ComparisonRow:
    return ComparisonRow(
        name=name,
        splits=candidate.splits,
        predicted_tick_s=candidate.prediction.tick_s,
        predicted_images_per_s=candidate.prediction.images_per_s,
        predicted_fill=candidate.predicted_fill,
        verdict=candidate.verdict,
        predicted_best_tick_s=best_s,
        ratio=ratio,
    )


def _comparison(name: str) -> Comparison:
    """Returns the splits to compare with that a rule's name, or a file with a plan or presets, stands for.

    The file is read at once, before the network is built.

    Raises:
        ConfigurationError: a name that is neither a rule nor a file.
        UserError: a file that holds neither a plan nor presets.
    """
    from ipucnn.config.presets import PresetFile

    if name in HEURISTICS:
        return lambda graph, count: {name: HEURISTICS[name](graph, count)} if count > 1 else {}
    path = expand(name)
    if not path.exists():
        raise ConfigurationError(
            f"--compare {shown(name)}: neither a rule nor a file",
            did_you_mean(name, HEURISTICS) or "the rules are " + ", ".join(HEURISTICS),
        )
    text = read_text(path, MAX_BYTES, hint=_COMPARISON_HINT)
    if "\nschema_version:" in text:
        plan = PipelinePlan.from_yaml(text, f"--compare {shown(path)}")
        return lambda graph, count: {path.name: plan.splits}
    presets = PresetFile(text, shown(path))
    return lambda graph, count: _of_presets(presets, path, graph)


def _of_presets(file: "PresetFile", path: Path, graph: LayerGraph) -> Dict[str, Sequence[str]]:
    """Returns the splits of the presets in a ``configs.yml`` that suit the network."""
    suiting: Dict[str, Sequence[str]] = {}
    skipped: List[str] = []
    for name in [""] if file.is_flat else file.names:
        try:
            preset = file.as_preset(path.name) if file.is_flat else file.get(name)
            splits = preset.values.get("pipeline_splits", ()) if preset is not None else ()
            check_cuts(splits, graph)
        except UserError:
            skipped.append(name or path.name)
            continue
        if splits:
            suiting[name or path.name] = splits
    if skipped:
        emit(Note(f"{path.name}: not for {graph.model}: {', '.join(skipped)}"))
    if not suiting:
        raise ConfigurationError(
            f"--compare {shown(path)}: no preset in it has pipeline-splits for {graph.model}",
            _COMPARISON_HINT,
        )
    return suiting


# --- from splits and settings to the whole plan


def assemble(
    planner: Planner,
    candidate: Candidate,
    *,
    planned: bool,
    build: Mapping[str, object],
    **details: PlainValue,
) -> PipelinePlan:
    """Returns the whole plan of a candidate.

    Args:
        planned: whether the planner chose its splits.
        build: the options that determine the network's layers.
        details: further fields of the plan.
    """
    graph, system, settings = planner.graph, planner.system, candidate.settings
    prediction, solution = candidate.prediction, candidate.solution
    fixed = DEFAULT_CONSTANTS.fixed_s(system)
    count = settings.gradient_accumulation_count
    bound, mine = solution.lower_bound_s + fixed, _micro_batch_s(candidate)
    if planned and solution.optimal:
        bound = mine  # the two are sums of the same numbers in another order
    # Given splits may be optimal, too.
    optimal = solution.optimal and mine <= bound * (1 + 1e-9)
    steady = count * prediction.tick_s
    return PipelinePlan(
        model=graph.model,
        input_shape=tuple(graph.input_shape),
        num_classes=graph.num_classes,
        build=dict(build),
        options=dict(details.pop("options", {})),
        settings=settings,
        system=SystemFacts(
            system.name,
            system.title,
            system.ipu.title,
            system.num_ipus,
            float(system.ipu.sram_bytes),
            system.calibration,
        ),
        splits=candidate.splits,
        planned=planned,
        occupied_ipus=settings.occupied_ipus,
        memory_limit=candidate.memory_limit,
        stages=_stages(planner, candidate),
        ipus=_ipus(candidate),
        **{f"predicted_{name}": getattr(prediction, name) for name in _PREDICTED},
        predicted_lower_bound_s=min(bound, mine),
        gap=0.0 if optimal else max(0.0, mine / bound - 1),
        optimal=optimal,
        predicted_fixed_s=fixed,
        predicted_fill_drain_s=max(0.0, prediction.weight_update_s - prediction.update_s - steady),
        bottleneck=prediction.bottleneck,
        profile=_profile(planner, candidate),
        predicted_images_per_s_band=candidate.forecast.images_per_s_band,
        predicted_band_factor=candidate.forecast.band_factor,
        published_fits=candidate.forecast.published_fits,
        ipucnn_version=ipucnn.__version__,
        **details,
    )


_PREDICTED = (
    *("tick_s", "images_per_s", "transfer_s", "update_s", "all_reduce_s", "weight_update_s", "latency_s"),
    *("host_bytes_per_s", "host_limit_images_per_s"),
)


def _stages(planner: Planner, candidate: Candidate) -> Tuple[StagePlan, ...]:
    graph, settings = planner.graph, candidate.settings
    layers = graph.layers
    starts = stage_starts(graph, candidate.splits)
    model = MemoryModel(graph, settings, planner.system.ipu, starts)
    received = [0.0, *cut_bytes(graph, starts[1:], settings)]
    stages = []
    for number, stage in enumerate(candidate.prediction.stages):
        members = layers[stage.first : stage.last]
        crossing = graph.crossing(stage.first) if number else ()
        # The input of the layer behind the cut is the stage's input; all else that crosses goes on to later layers.
        skips = tuple(name for name in crossing if name not in members[0].inputs)
        memory = model.entry(number, number + 1, settings.num_stages, number)
        stages.append(
            StagePlan(
                stage=number,
                ipu=stage.ipu,
                first_layer=members[0].name,
                last_layer=members[-1].name,
                num_layers=len(members),
                macs=sum(layer.macs for layer in members),
                num_parameters=sum(layer.num_parameters for layer in members),
                predicted_forward_s=stage.forward_s,
                predicted_backward_s=stage.backward_s - stage.recompute_s,
                predicted_recompute_s=stage.recompute_s,
                predicted_receive_s=stage.receive_s,
                received_bytes=float(received[number]),
                skips=skips,
                predicted_memory_bytes=memory.categories(),
            )
        )
    return tuple(stages)


def _ipus(candidate: Candidate) -> Tuple[IpuPlan, ...]:
    mapping = candidate.settings.mapping
    return tuple(
        IpuPlan(
            ipu=number,
            stages=tuple(stage for stage, ipu in enumerate(mapping) if ipu == number),
            predicted_memory_bytes=memory.categories(),
            capacity_bytes=memory.capacity_bytes,
            predicted_fill=memory.fill,
            verdict=memory.verdict,
        )
        for number, memory in enumerate(candidate.forecast.ipus)
    )


def _profile(planner: Planner, candidate: Candidate) -> Tuple[ProfileLayer, ...]:
    graph = planner.graph
    starts = stage_starts(graph, candidate.splits)
    times = program_times(graph, starts, candidate.settings, planner.system.ipu)
    cumulative: np.ndarray = np.cumsum(times.forward_s + times.backward_s)
    stage_of: Any = np.searchsorted(starts, np.arange(len(graph.layers)), side="right") - 1
    return tuple(
        ProfileLayer(
            name=layer.name,
            op_class=layer.op_class,
            stage=int(stage_of[i]),
            predicted_forward_s=float(times.forward_s[i]),
            predicted_backward_s=float(times.backward_s[i]),
            predicted_cumulative_s=float(cumulative[i]),
        )
        for i, layer in enumerate(graph.layers)
    )


def compare(
    planner: Planner, candidate: Candidate, others: Dict[str, Sequence[str]]
) -> Tuple[ComparisonRow, ...]:
    """Compares other splits under a candidate's settings, each with the best splits that take no more memory.

    The best splits have the planner's limit, unless the others take more: then the best ones may take as much.  So they
    are never slower, whatever the model predicts for memory.

    Args:
        others: name -> legal splits, of any number of stages.
    """
    rows = []
    for name, splits in others.items():
        settings = candidate.settings
        if len(splits) + 1 != settings.num_stages:
            settings = settings.with_stages(len(splits) + 1)
        limit = candidate.memory_limit if candidate.memory_limit in LIMITS else min(LIMITS)
        judged = planner.judge(splits, settings, limit, quickly=True)
        fixed = DEFAULT_CONSTANTS.fixed_s(planner.system)
        best = judged.solution.objective_s + fixed
        # If stages share an IPU, the planner has only a bound of the time: see ``Planner.tables``.
        shared = settings.placement is Placement.SHARED
        mine = _micro_batch_s(judged) if shared else planner.micro_batch_s(splits, settings) + fixed
        rows.append(_comparison_row(name, judged, mine / best, best))
    return tuple(rows)
