"""``plan-splits`` from request to plan: graph, best or judged splits, comparison."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Sequence, Tuple, Union

from ipucnn.config.options import RunConfig
from ipucnn.documents import MAX_BYTES
from ipucnn.errors import ConfigurationError, InfeasibleError, UserError, did_you_mean
from ipucnn.filesystem import exists, expand, read_text, shown
from ipucnn.planning.assemble import assemble, compare
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.no_fit import infeasible, ways_to_fit, why_no_fit
from ipucnn.planning.pipeline_plan import NoFit, PipelinePlan
from ipucnn.planning.request import PlanRequest, check_system
from ipucnn.planning.search.configurations import search
from ipucnn.planning.search.optimisations import Optimisation, Outcome, optimisations
from ipucnn.planning.search.planner import LIMITS, Candidate, Planner, candidates
from ipucnn.planning.splits import RULES, check_cuts, check_stages

if TYPE_CHECKING:
    from ipucnn.config.presets import PresetFile

__all__ = ["NothingFits", "check_not_fitting", "load_graph", "make_optimisations", "make_plan"]

Note = Callable[[str], None]
_COMPARISON_HINT = "give a plan.yml, or a file of presets with pipeline-splits"


class NothingFits(InfeasibleError):
    """No splits fit; with what is in the way as a value.

    Args:
        error: what the user is told.
        model: name of the network.
        no_fit: the certificate.
    """

    def __init__(self, error: InfeasibleError, model: str, no_fit: NoFit) -> None:
        super().__init__(error.message, error.hint)
        self.model, self.no_fit = model, no_fit

    def to_json(self) -> str:
        """For ``--json``: ``no_fit`` as in a plan, without the plan."""
        answer = {"model": self.model, "feasible": False, "no_fit": asdict(self.no_fit)}
        return json.dumps(answer, indent=2) + "\n"


def load_graph(request: PlanRequest, note: Note) -> LayerGraph:
    """The network's layer graph: shipped, from the cache, or by building the network."""
    from ipucnn.planning.graphs.extract import known_graph, layer_graph

    graph = known_graph(request.record, request.options)
    if graph is None:
        note(f"reading the layers of {request.record.name}, once (TensorFlow is imported)")
        from ipucnn.sessions.host.environment import import_tensorflow

        import_tensorflow()
        graph = layer_graph(request.record, request.options)
    return graph


def make_plan(request: PlanRequest, comparisons: Sequence[str], note: Note) -> PipelinePlan:
    """Plans, or judges the splits that the request names.

    Args:
        comparisons: names of rules, or files with splits, to compare with; none: the rule "params".
        note: called with a line for the user.

    Raises:
        ConfigurationError: splits or stages that the network doesn't have; a comparison that can't be made.
        DataError: a file to compare with is not readable.
        InfeasibleError: nothing fits.
    """
    _check_comparisons(comparisons)
    graph = load_graph(request, note)
    if request.splits is not None:
        check_cuts(request.splits, graph)
    check_stages(request.settings.num_stages, graph)
    check_system(request)
    planner = Planner(graph, request.system)
    details: Dict[str, Any] = {}
    if request.splits is not None:
        candidate = _judged(planner, request)
    elif request.space is not None:
        candidate, details["pareto"] = search(planner, request.space)
    else:
        candidate = _best(planner, request)
    others = _comparisons(graph, candidate, request, comparisons, note)
    if request.splits is not None and len(request.splits) > 0 and candidate.solution.feasible:
        others = {"planned": planner.names(candidate.solution.starts), **others}
    limit = LIMITS[0]
    if request.splits is None and candidate.memory_limit > limit:
        choices = candidates(candidate.settings, request.recomputation, request.proportions)
        most = request.system.num_ipus // candidate.settings.num_replicas
        details["no_fit"] = why_no_fit(planner, choices, limit, max(most, candidate.settings.num_stages))
    exceeds = request.splits is not None and candidate.predicted_fill > max(LIMITS)
    choices = candidates(request.settings, request.recomputation, request.proportions)
    if exceeds and not any(planner.fits(s, max(LIMITS)) for group in choices for s in group):
        most = request.system.num_ipus // candidate.settings.num_replicas
        details["no_fit"] = why_no_fit(
            planner, choices, max(LIMITS), max(most, candidate.settings.num_stages)
        )
    plan = assemble(
        planner,
        candidate,
        planned=request.splits is None,
        build=request.build,
        comparison=compare(planner, candidate, others),
        assumed=tuple(request.assumed),
        **details,
    )
    # Splits beyond an IPU's memory are as fast as others beyond it at best, which is no optimum of anything.
    return replace(plan, optimal=False) if exceeds else plan


def make_optimisations(
    request: PlanRequest, config: RunConfig, note: Note
) -> Tuple[Candidate, Outcome, List[Optimisation]]:
    """What each optimisation does to the program of a request: given splits, else a preset's, else the best.

    Returns:
        The program, its prediction, and the optimisations.

    Raises:
        ConfigurationError: nobody says how many stages, or they are no training pipeline.
        InfeasibleError: nothing fits.
    """
    if request.space is not None:
        raise ConfigurationError(
            "--optimisations takes one program, and nothing says how many stages it has", "add --stages 4"
        )
    if request.splits is None and request.preset_splits:
        request.splits = next(iter(request.preset_splits.values()))
    graph = load_graph(request, note)
    if request.splits is not None:
        check_cuts(request.splits, graph)
    check_stages(request.settings.num_stages, graph)
    check_system(request)
    planner = Planner(graph, request.system)
    candidate = _judged(planner, request) if request.splits is not None else _best(planner, request)
    base, found = optimisations(
        graph,
        candidate.splits,
        candidate.settings,
        request.system,
        loss_scaling=config.loss_scaling,
        exchange_target=config.internal_exchange_optimization_target,
    )
    return candidate, base, found


def check_not_fitting(plan: PipelinePlan) -> None:
    """Raises:
    InfeasibleError: if splits that were given do not fit.
    """
    if plan.verdict != "does not fit":
        return
    fullest = max(plan.ipus, key=lambda ipu: ipu.predicted_fill)
    largest = max(fullest.predicted_memory_bytes.items(), key=lambda item: item[1])[0]
    raise InfeasibleError(
        f"these splits do not fit: IPU {fullest.ipu} takes {fullest.predicted_fill:.0%} of its memory (predicted), "
        f"most of it {largest.replace('_', ' ')}",
        _what_would_fit(plan),
    )


def _what_would_fit(plan: PipelinePlan) -> str:
    if plan.no_fit is None:
        return f"use --stages {plan.num_stages} in place of the splits: it finds the best that fit"
    why = f"no splits into {plan.num_stages} stages fit; "
    return why + (ways_to_fit(plan.no_fit) or "use a smaller --image-size")


def _best(planner: Planner, request: PlanRequest) -> Candidate:
    choices = candidates(request.settings, request.recomputation, request.proportions)
    found = planner.best_of(choices)
    if found is None:
        most = max(request.system.num_ipus // request.settings.num_replicas, request.settings.num_stages)
        why = why_no_fit(planner, choices, max(LIMITS), most)
        error = infeasible(planner.graph.model, why, request.settings, request.system.title)
        raise NothingFits(error, planner.graph.model, why)
    return found


def _judged(planner: Planner, request: PlanRequest) -> Candidate:
    """The given splits with the settings that suit them best: those that fit first, then the fastest."""
    assert request.splits is not None
    judged = [
        planner.judge(request.splits, settings, LIMITS[0])
        for group in candidates(request.settings, request.recomputation, request.proportions)
        for settings in group
    ]

    def rank(candidate: Candidate) -> Tuple[int, float, float]:
        fill = candidate.predicted_fill
        tier = sum(fill > limit for limit in LIMITS)
        # What doesn't fit anyway is shown with the least memory.
        speed = candidate.prediction.images_per_s if tier < len(LIMITS) else 0.0
        return -tier, speed, -fill

    return max(judged, key=rank)


def _check_comparisons(comparisons: Sequence[str]) -> None:
    for name in comparisons:
        if name not in RULES and not exists(expand(name, "--compare"), "--compare", ConfigurationError):
            raise ConfigurationError(
                f"--compare {shown(name)}: neither a rule nor a file",
                did_you_mean(name, RULES) or "the rules are " + ", ".join(RULES),
            )
        elif name not in RULES:
            # What is no plan and no file of presets is refused before the network is built.
            _read_comparison(expand(name, "--compare"))


def _comparisons(
    graph: LayerGraph, candidate: Candidate, request: PlanRequest, names: Sequence[str], note: Note
) -> Dict[str, Sequence[str]]:
    """Splits to compare with, by name."""
    count = candidate.settings.num_stages
    found: Dict[str, Sequence[str]] = {}
    for name, splits in request.preset_splits.items():
        check_cuts(splits, graph)
        found[name] = splits
    for name in names or (["params"] if count > 1 else []):
        if name in RULES:
            if count > 1:
                found[name] = RULES[name](graph, count)
        else:
            found.update(_from_file(expand(name, "--compare"), graph, note))
    return found


def _from_file(path: Path, graph: LayerGraph, note: Note) -> Dict[str, Sequence[str]]:
    """Splits in a plan, or in the presets of a ``configs.yml`` that suit the network."""
    file = _read_comparison(path)
    if isinstance(file, PipelinePlan):
        check_cuts(file.splits, graph)
        return {path.name: file.splits}
    found: Dict[str, Sequence[str]] = {}
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
            found[name or path.name] = splits
    if skipped:
        note(f"{path.name}: not for {graph.model}: {', '.join(skipped)}")
    if not found:
        raise ConfigurationError(
            f"--compare {shown(path)}: no preset in it has pipeline-splits for {graph.model}",
            _COMPARISON_HINT,
        )
    return found


def _read_comparison(path: Path) -> Union[PipelinePlan, "PresetFile"]:
    """The plan, or else the presets, in a file.

    Raises:
        UserError: it is neither.
    """
    from ipucnn.config.presets import PresetFile

    text = read_text(path, MAX_BYTES, "--compare", ConfigurationError, _COMPARISON_HINT)
    if "\nschema_version:" in text:
        return PipelinePlan.from_yaml(text, f"--compare {shown(path)}")
    return PresetFile(text, shown(path))
