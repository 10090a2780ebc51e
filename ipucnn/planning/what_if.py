"""What the page of a search lets its reader try: the configurations of the Pareto front, at several batches.

Times and memory of each are predicted once more, stage by stage, by the model that the search asked.
"""

from dataclasses import dataclass, fields, replace
from typing import Callable, Iterable, List, Tuple

from ipucnn.errors import UserError
from ipucnn.hardware import System
from ipucnn.planning.cost.layer_times import program_times, stage_starts
from ipucnn.planning.cost.memory import StageMemory, program_memory
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS
from ipucnn.planning.cost.schedule import Prediction, predict
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.pipeline_plan import ParetoRow, PipelinePlan
from ipucnn.planning.plan import load_graph
from ipucnn.planning.request import PlanRequest
from ipucnn.planning.search.configurations import search
from ipucnn.planning.search.planner import Planner
from ipucnn.planning.settings import PlanSettings
from ipucnn.training.batching import overlap_length

# Accumulation counts to offer beside a row's own: multiples of the smallest legal one.
_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128)
_MOST_COUNT = 2048


@dataclass(frozen=True)
class Batch:
    """A configuration with some number of micro-batches per weight update, or per execution of inference.

    Attributes:
        seconds: of the weight update or execution.
    """

    count: int
    images_per_s: float
    seconds: float
    bottleneck: str


@dataclass(frozen=True)
class Choice:
    """One configuration, as far as it does not depend on the number of micro-batches.

    Attributes:
        layers: first and last layer of each stage.
        fixed_s: part of a tick that is feeds and loop.
        batches: by rising count.
        best: the one that the plan takes.
    """

    settings: PlanSettings
    splits: Tuple[str, ...]
    layers: Tuple[Tuple[str, str], ...]
    prediction: Prediction
    ipus: Tuple[StageMemory, ...]
    fixed_s: float
    batches: Tuple[Batch, ...]
    best: bool


def choices(
    request: PlanRequest,
    plan: PipelinePlan,
    note: Callable[[str], None],
    import_tensorflow: Callable[[], object],
) -> Tuple[Choice, ...]:
    """The configurations of a search's front, and of the same search in the precisions that nobody excluded.

    Args:
        plan: the answer to ``request``; without a front there is nothing to choose from.
        note, import_tensorflow: as for ``plan.load_graph``.
    """
    if request.space is None or not plan.pareto:
        return ()
    planner = Planner(load_graph(request, note, import_tensorflow), request.system)
    found = [choice(planner, plan.settings, row) for row in plan.pareto]
    for precision in request.precisions:
        if precision == plan.settings.precision:
            continue
        base = replace(request.space.base, precision=precision)
        try:
            rows = search(planner, replace(request.space, base=base))[1]
        except UserError:
            continue  # nothing fits, or no batch is legal: there is nothing to choose
        own = replace(plan.settings, precision=precision)
        found += [replace(choice(planner, own, row), best=False) for row in rows]
    return tuple(found)


def settings_of(base: PlanSettings, row: ParetoRow) -> PlanSettings:
    """The settings of a row of a front: ``base`` with all that the row says."""
    own = {f.name: getattr(row, f.name) for f in fields(PlanSettings) if hasattr(row, f.name)}
    is_apart = row.schedule == "Sequential" and row.ipus_per_replica > 1
    return replace(base, **own, device_mapping=tuple(range(row.num_stages)) if is_apart else None)


def choice(planner: Planner, base: PlanSettings, row: ParetoRow) -> Choice:
    """A row of a front with all that is predicted for it."""
    graph, system = planner.graph, planner.system
    settings = settings_of(base, row)
    starts = stage_starts(graph, row.splits)
    ends = [*starts[1:], len(graph.layers)]
    counts = {settings.gradient_accumulation_count, *_counts(settings)}
    return Choice(
        settings=settings,
        splits=row.splits,
        layers=tuple((graph.layers[a].name, graph.layers[b - 1].name) for a, b in zip(starts, ends)),
        prediction=predict(graph, row.splits, settings, system),
        ipus=tuple(program_memory(graph, row.splits, settings, system.ipu)),
        fixed_s=DEFAULT_CONSTANTS.fixed_s(system),
        batches=_batches(graph, row.splits, settings, system, sorted(counts)),
        best=row.best,
    )


def _counts(settings: PlanSettings) -> List[int]:
    """Legal accumulation counts to offer; one of 1 is another program, without accumulators."""
    base = overlap_length(settings.schedule, settings.num_stages) if settings.training else 1
    accumulates = settings.gradient_accumulation_count > 1
    found = [base * k for k in _MULTIPLES if base * k <= _MOST_COUNT]
    return [count for count in found if (count > 1) == accumulates]


def _batches(
    graph: LayerGraph,
    splits: Tuple[str, ...],
    settings: PlanSettings,
    system: System,
    counts: Iterable[int],
) -> Tuple[Batch, ...]:
    times = program_times(graph, stage_starts(graph, splits), settings, system.ipu)
    found = []
    for count in counts:
        own = replace(settings, gradient_accumulation_count=count)
        prediction = predict(graph, splits, own, system, times=times)
        found.append(Batch(count, prediction.images_per_s, prediction.weight_update_s, prediction.bottleneck))
    return tuple(found)
