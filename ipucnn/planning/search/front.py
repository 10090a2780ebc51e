"""Searches for the best uses of a number of IPUs: the fastest program, and the others that are the best in some way.

Each program has its fastest splits that fit.  The result is the Pareto front: no other program is better in throughput,
memory and IPUs at once.  Memory that differs by less than ``SAME_FILL`` of an IPU counts as equal.
"""

from dataclasses import replace
from typing import List, Sequence, Tuple

from ipucnn.errors import ConfigurationError
from ipucnn.planning.forecast import forecast
from ipucnn.planning.pipeline_plan import ParetoRow
from ipucnn.planning.program import PlannedProgram, ProgramVariants
from ipucnn.planning.search.neighbours import nothing_fits
from ipucnn.planning.search.open_settings import Space
from ipucnn.planning.search.planner import LIMITS, SAME_SPEED, Candidate, Planner
from ipucnn.text import counted

# Shares of an IPU's memory that differ by less count as equal: a fraction of the memory model's accuracy.
SAME_FILL = 0.05

# Dynamic programs per configuration.  After this number the split is close to the best, and is usually the best.  Only
# the configurations of the front are searched again until their proof.
_EVALUATIONS = 8

# Rows in the table of the front; --row accepts the numbers of further rows, too.
TABLE_ROWS = 12


def best_uses(planner: Planner, space: Space, row: int = 1) -> Tuple[Candidate, Tuple[ParetoRow, ...]]:
    """Returns a program of the Pareto front, and the front: the table's rows, fastest first, then the others.

    Args:
        row: the row of the front to return, counted from 1; the first has the highest predicted throughput.

    Raises:
        ConfigurationError: no program reaches the global batch size, or the front has no such row.
        InfeasibleError: nothing fits.
    """
    if not space.has_programs:
        raise space.no_batch()
    transfers = space.values["eight_bit_transfer"]
    space = replace(space, program=replace(space.program, eight_bit_transfer=transfers[0]))
    for limit in LIMITS:
        tried = _compared(planner, space, limit)
        best = max((candidate.prediction.images_per_s for candidate in tried), default=0.0)
        tried += _fastest(planner, space, limit, best)
        if not tried:
            continue
        front = _proved(planner, _front(tried), limit)
        if len(transfers) > 1:
            front = [_with_least_transfer(planner, candidate) for candidate in front]
        front = _table_first(front)
        if row > len(front):
            raise ConfigurationError(
                f"--row {row}: the table of best uses has {counted(len(front), 'row')}",
                f"use --row 1 to --row {len(front)}" if len(front) > 1 else "leave out --row",
            )
        return front[row - 1], tuple(_row(c, i == row) for i, c in enumerate(front, start=1))
    raise nothing_fits(planner, space)


def _compared(planner: Planner, space: Space, limit: float) -> List[Candidate]:
    """Returns the programs that fit, without those known to be worse than another."""
    compared: List[Candidate] = []
    for choices, counts in space.programs(len(planner.starts), compared=True):
        for choice in choices:
            one = replace(choice.program, gradient_accumulation_count=counts[0][1])
            if not planner.fits(one, limit) or _is_dominated(planner, one, counts, compared):
                continue
            candidate = planner.fastest_splits(one, limit, max_evaluations=_EVALUATIONS)
            if candidate is not None:
                compared += [_with_replicas(planner, candidate, r, count) for r, count in counts]
    return compared


def _fastest(planner: Planner, space: Space, limit: float, images_per_s: float) -> List[Candidate]:
    """Returns the fastest program in the space that fits; an empty list if none exceeds ``images_per_s``."""
    choices = [
        ProgramVariants(replace(program, num_replicas=replicas, gradient_accumulation_count=count), by_stage)
        for choices, counts in space.programs(len(planner.starts))
        for program, by_stage in choices
        for replicas, count in counts
    ]
    fastest = planner.fastest_program(choices, (limit,), images_per_s)
    return [] if fastest is None else [fastest]


def _is_dominated(
    planner: Planner,
    settings: PlannedProgram,
    counts: Sequence[Tuple[int, int]],
    compared: Sequence[Candidate],
) -> bool:
    """Tells whether, for each number of replicas, another configuration is at least as good as this one can be."""
    least = planner.least_fill(settings)
    latency_s = 0.0 if settings.training else planner.least_latency_s(settings)
    for replicas, count in counts:
        replicated = replace(settings, num_replicas=replicas, gradient_accumulation_count=count)
        bound = planner.fastest_images_per_s(replicated)
        if not any(
            other.prediction.images_per_s >= bound
            and other.predicted_fill <= least + SAME_FILL
            and (settings.training or other.prediction.latency_s <= latency_s * (1 + 1e-12))
            and other.settings.occupied_ipus <= replicated.occupied_ipus
            for other in compared
        ):
            return False
    return True


def _with_replicas(planner: Planner, candidate: Candidate, num_replicas: int, count: int) -> Candidate:
    """Returns the same pipeline in several replicas: neither a tick nor the memory of an IPU depends on them."""
    settings = replace(candidate.settings, num_replicas=num_replicas, gradient_accumulation_count=count)
    return _under(planner, candidate, settings)


def _under(planner: Planner, candidate: Candidate, settings: PlannedProgram) -> Candidate:
    """Returns the candidate under other settings with which its IPUs hold the same."""
    if settings == candidate.settings:
        return candidate
    ipus = candidate.forecast.ipus
    changed = forecast(planner.graph, candidate.splits, settings, planner.system, ipus=ipus)
    return replace(candidate, settings=settings, forecast=changed)


def _proved(planner: Planner, front: Sequence[Candidate], limit: float) -> List[Candidate]:
    """Returns the front of these configurations, each searched until its proof, with its own number of replicas."""
    proved = [planner.fastest_splits(candidate.settings, limit) for candidate in front]
    return _front([candidate for candidate in proved if candidate is not None])


def _front(compared: Sequence[Candidate]) -> List[Candidate]:
    """Returns the Pareto front, fastest first: the configurations that no other dominates.

    In inference, latency is one of the criteria, too.

    Among equally fast configurations (``SAME_SPEED``), those with more stages are dropped.
    """

    def latency(candidate: Candidate) -> float:
        return 0.0 if candidate.settings.training else candidate.prediction.latency_s

    def is_as_small(one: Candidate, other: Candidate) -> bool:
        return (
            one.settings.occupied_ipus <= other.settings.occupied_ipus
            and one.predicted_fill <= other.predicted_fill + SAME_FILL
            and latency(one) <= latency(other)
        )

    def is_simpler(one: Candidate, other: Candidate) -> bool:
        slowest = other.prediction.images_per_s * (1 - SAME_SPEED)
        has_fewer = one.settings.num_stages < other.settings.num_stages
        return has_fewer and one.prediction.images_per_s >= slowest and is_as_small(one, other)

    front: List[Candidate] = []
    order = sorted(
        compared, key=lambda c: (-c.prediction.images_per_s, c.settings.occupied_ipus, c.predicted_fill)
    )
    for candidate in order:
        # Those before are at least as fast.
        is_beaten = any(is_as_small(faster, candidate) for faster in front)
        if not is_beaten and not any(is_simpler(other, candidate) for other in compared):
            front.append(candidate)
    return front


def _with_least_transfer(planner: Planner, candidate: Candidate) -> Candidate:
    """Returns the candidate without 8-bit transfer unless that is slower: the two differ only in the host's limit."""
    without = _under(planner, candidate, replace(candidate.settings, eight_bit_transfer=False))
    least = candidate.prediction.images_per_s * (1 - SAME_SPEED)
    return candidate if without.prediction.images_per_s < least else without


def _table_first(front: Sequence[Candidate]) -> List[Candidate]:
    """Returns the front with the rows of its table first: the fastest ones, and the fastest for each number of IPUs."""
    ipus = [candidate.settings.occupied_ipus for candidate in front]
    firsts = sorted({ipus.index(count) for count in ipus})[:TABLE_ROWS]
    others = [place for place in range(len(front)) if place not in firsts]
    free = TABLE_ROWS - len(firsts)
    return [front[place] for place in (*sorted([*firsts, *others[:free]]), *others[free:])]


def _row(candidate: Candidate, best: bool) -> ParetoRow:
    settings, prediction = candidate.settings, candidate.prediction
    return ParetoRow(
        settings=settings,
        splits=candidate.splits,
        occupied_ipus=settings.occupied_ipus,
        predicted_images_per_s=prediction.images_per_s,
        predicted_latency_s=prediction.latency_s,
        predicted_fill=candidate.predicted_fill,
        verdict=candidate.verdict,
        best=best,
    )
