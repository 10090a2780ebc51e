"""The exact planner: the fastest pipeline split that fits, with its proof.

Optimal among all splits of the layers in the given order; stages that take parts of parallel branches are outside
of what it searches.
"""

from typing import Optional

from ipucnn.errors import ConfigurationError
from ipucnn.planning.certificate import explain
from ipucnn.planning.search.exact import search_one_ipu, search_sequential
from ipucnn.planning.search.minmax import search
from ipucnn.planning.search.tables import Solution, StageTables, pipeline_ticks, tick_s
from ipucnn.planning.settings import SCHEDULES

__all__ = ["MAX_STAGES", "plan", "plan_up_to"]

# Up to how many stages an infeasible plan's certificate looks for one that fits, at least.
MAX_STAGES = 16


def plan(
    tables: StageTables,
    num_stages: int,
    schedule: str = "Grouped",
    max_evaluations: Optional[int] = None,
    max_stages: Optional[int] = None,
) -> Solution:
    """The fastest split into exactly ``num_stages`` stages.

    Args:
        tables: times and memory of the items.
        schedule: "Grouped", "Interleaved" or "Sequential".
        max_evaluations: dynamic programs after which the search stops with a gap; None: it proves optimality.
        max_stages: up to how many stages the certificate tries if nothing fits; None: twice ``num_stages``, at
            least ``MAX_STAGES``.

    Returns:
        The solution; without starts, and with a certificate, if nothing fits.

    Raises:
        ConfigurationError: more stages than items, or segments of one IPU under another schedule.
    """
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"schedule '{schedule}'", f"it is one of {', '.join(SCHEDULES)}")
    if not 1 <= num_stages <= tables.num_items:
        raise ConfigurationError(
            f"{num_stages} stages, but the model can be cut in {tables.num_items - 1} places",
            f"use 1 to {tables.num_items} stages",
        )
    if tables.one_ipu and schedule != "Sequential":
        raise ConfigurationError(
            f"stages that share an IPU under schedule '{schedule}'", "only Sequential stages can share one"
        )
    if tables.one_ipu:
        result = search_one_ipu(tables, num_stages)
    elif schedule == "Sequential":
        result = search_sequential(tables, num_stages)
    else:
        result = search(tables, num_stages, schedule, max_evaluations)
    if not result.starts:
        most = max(MAX_STAGES, 2 * num_stages) if max_stages is None else max_stages
        why = explain(tables, num_stages, most)
        return Solution(
            schedule, num_stages, (), float("inf"), float("inf"), result.num_evaluations, infeasibility=why
        )
    value = tick_s(tables, result.starts, schedule)
    return Solution(
        schedule,
        num_stages,
        result.starts,
        value,
        min(value, result.lower_bound_s),
        result.num_evaluations,
    )


def plan_up_to(
    tables: StageTables,
    max_stages: int,
    schedule: str = "Grouped",
    num_micro_batches: int = 1,
    max_evaluations: Optional[int] = None,
) -> Solution:
    """The split into at most ``max_stages`` stages that takes ``num_micro_batches`` micro-batches fastest.

    Counts every tick of filling and draining as a full one.  Of equally fast splits it takes the one with the
    fewest stages.  Without any that fits, the certificate is that of the largest number of stages.
    """
    best, best_s = None, float("inf")
    solution = None
    for num_stages in range(1, min(max_stages, tables.num_items) + 1):
        solution = plan(tables, num_stages, schedule, max_evaluations, max_stages)
        ticks = pipeline_ticks(schedule, num_stages, num_micro_batches, tables.training)
        if solution.feasible and solution.objective_s * ticks < best_s:
            best, best_s = solution, solution.objective_s * ticks
    found = best or solution
    assert found is not None  # max_stages and the number of items are at least 1
    return found
