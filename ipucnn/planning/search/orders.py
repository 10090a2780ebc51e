"""Splits of a network in any order of its layers: a stage is then any convex set of them, not a run of one order.

Every pipeline, of whatever order, is a chain of down-sets (``down_sets``).  Memory is no part of the search over these
chains: it gives a bound of the tick, and an order of the layers.  In that order the exact search finds the fastest
splits that fit; where they meet the bound, no splits in any order are faster.
"""

from dataclasses import replace
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import IPU
from ipucnn.planning.cost.layer_times import output_bytes
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.search import minmax
from ipucnn.planning.search.down_sets import Chains, Items, down_sets, items_of, promising
from ipucnn.planning.search.planner import PROPORTIONS, SAME_SPEED, Candidate, Planner
from ipucnn.planning.search.relaxation import WORTH_A_SEARCH, Memory, Relaxation, is_solved
from ipucnn.planning.search.tables import StageTables, item_starts
from ipucnn.planning.settings import PlanSettings, uniform
from ipucnn.text import counted

# Down-sets over which the least crosses: the search over them finds short ticks quickly.
_PROMISING = 8_000

# More than any stage takes.
_ANY_BYTES = 1e15

# Dynamic programs of a search over down-sets before it is given up with a gap.
_MOST_EVALUATIONS = 400


class AnyOrder(NamedTuple):
    """The best splits in any order of the layers.

    Attributes:
        planner: of the network in that order.
        candidate: the splits, with a bound of the tick in any order that fits or not.
        one_order: whether the network has no other order.
    """

    planner: Planner
    candidate: Candidate
    one_order: bool


def check_any_order(settings: PlanSettings) -> None:
    """Refuses pipelines whose stages are not searched in other orders than the network's.

    Raises:
        ConfigurationError: naming what is in the way.
    """
    if settings.schedule == "Sequential" or settings.num_stages == 1:
        raise ConfigurationError(
            f"--orders: a {settings.schedule} pipeline of {counted(settings.num_stages, 'stage')} is planned in the "
            "network's own order",
            "add --schedule Grouped or Interleaved, and --stages 2 or more; or drop --orders",
        )
    if settings.has_own_proportions:
        raise ConfigurationError(
            "--orders: stages with proportions of memory of their own are searched in the network's own order only",
            "give one --available-memory-proportion for all stages",
        )


def check_all_orders(graph: LayerGraph) -> None:
    """Refuses graphs of which not all orders would be searched: some layers stay together whatever the order.

    Raises:
        ConfigurationError: naming what is in the way.
    """
    # The parts of a separable convolution share one layer's place, and nothing lies between them.
    shared = [pair for pair in graph.tied if abs(graph.index(pair[1]) - graph.index(pair[0])) > 1]
    opened = [layer.name for layer in graph.layers if graph.layers[0].name in layer.inputs]
    why = f"{' and '.join(shared[0])} share weights" if shared else ""
    if len(opened) > 1:
        why = f"the input feeds {' and '.join(opened[:2])}"
    if why:
        raise ConfigurationError(
            f"--orders: in {graph.model} {why}, so that some layers keep their places and not every order is searched",
            "drop --orders",
        )


def in_any_order(planner: Planner, candidate: Candidate) -> AnyOrder:
    """The fastest splits in any order, of a candidate's settings and memory.

    Every order is searched where there are at most ``MOST_DOWN_SETS`` down-sets.  Where there are more, ``relaxation``
    looks for fast ones and bounds all; where that takes too long, those over which little crosses are searched.

    Raises:
        ConfigurationError: the graph has layers that stay together whatever the order, so that not all orders would be
            searched.
    """
    check_all_orders(planner.graph)
    settings, ipu = candidate.settings, planner.system.ipu
    count, schedule = settings.num_stages, settings.schedule
    items = items_of(planner.graph, _seconds(planner.graph, settings, ipu))
    idle_s = _idle_s(ipu)
    tables = planner.tables(settings, candidate.memory_limit)
    masks = down_sets(items)
    if masks is not None and len(masks) == len(items.before) + 1:
        return AnyOrder(planner, candidate, True)
    best = AnyOrder(planner, candidate, False)
    own_s = candidate.solution.objective_s

    def searched(chosen: Sequence[int]) -> Tuple[Optional[List[int]], float]:
        """The cuts of the fastest chain of these down-sets if it is faster than the best so far, and their bound."""
        chains = Chains(items, chosen, tables, count, schedule, idle_s)
        # What is as fast as the best so far, but for rounding, is not looked for.
        search = minmax.Search(chains, _MOST_EVALUATIONS, best.candidate.solution.objective_s * (1 - 1e-9))
        bound_s = search.run()
        return ([chosen[i] for i in search.starts] if search.starts else None), bound_s

    def kept(cuts: Optional[Sequence[int]]) -> AnyOrder:
        if cuts is None:
            return best
        graph = reordered(planner.graph, [*cuts[1:]], len(items.before))
        other = Planner(graph, planner.system)
        found = other.best(settings, candidate.memory_limit)
        if found is None or found.solution.objective_s >= best.candidate.solution.objective_s:
            return best
        return AnyOrder(other, found, False)

    if masks is not None or not is_solved(items, count):
        best = kept(searched(promising(items, _PROMISING))[0])
    if masks is not None:
        cuts, bound_s = searched(masks)
        best = kept(cuts)
    else:
        # Where memory decides in the network's own order, the linear program is told of it, and looks for what fits.
        memory = None
        if is_solved(items, count) and _is_faster_with_more_memory(tables, count, schedule, own_s):
            memory = _memory(planner, settings, candidate.memory_limit, items)
        shortest = best.candidate.solution.objective_s
        relaxation = Relaxation(items, tables, count, schedule, idle_s, shortest, memory)
        bound_s = relaxation.run()
        best = kept(relaxation.cuts or None)
    found = best.candidate.solution
    bound_s = min(bound_s, own_s, found.objective_s)
    if bound_s >= found.objective_s * (1 - 1e-8):
        bound_s = found.objective_s  # sums of the same numbers in another order
    proved = replace(best.candidate, solution=replace(found, lower_bound_s=bound_s))
    return best._replace(candidate=proved)


def _is_faster_with_more_memory(tables: StageTables, count: int, schedule: str, own_s: float) -> bool:
    """Whether splits in the network's own order would be faster if all of them fitted."""
    free = replace(tables, capacity_bytes=_ANY_BYTES)
    below_s = own_s / (1 + WORTH_A_SEARCH)
    return bool(minmax.search(free, count, schedule, below_s=below_s, any_will_do=True).starts)


def _memory(planner: Planner, settings: PlanSettings, limit: float, items: Items) -> Memory:
    """What the linear programs are told of the memory of stages, and how pipelines that fit are found."""

    def fitting(order: Sequence[int], below_s: float) -> Optional[Tuple[List[int], float]]:
        place = {item: i for i, item in enumerate(order)}
        if any(place[other] > place[item] for item, before in enumerate(items.before) for other in before):
            return None  # shares that differ by less than the solver's rounding
        own = Planner(_in_order(planner.graph, order), planner.system)
        found = own.faster(settings, limit, below_s)
        if found is None:
            return None
        masks = [sum(1 << item for item in order[:start]) for start in found.solution.starts]
        return masks, found.solution.objective_s

    return Memory(
        planner.least_bytes(settings),
        limit * planner.system.ipu.sram_bytes,
        planner.system.ipu.link_bytes_per_s / 2,
        fitting,
    )


def with_own_proportions(planner: Planner, own: Candidate, found: AnyOrder) -> AnyOrder:
    """``found``, or what is faster than it and has a proportion of memory for each stage.

    That is in the order that was found, or in the network's own.  The bound is then of all orders and all proportions:
    of times that no proportion makes shorter.

    Args:
        own: the fastest in the network's own order, of any proportions.
        found: of ``in_any_order``, with one proportion for all stages.
    """
    if found.one_order:
        return AnyOrder(planner, own, True)
    settings, limit = found.candidate.settings, found.candidate.memory_limit
    best, images_per_s = found, found.candidate.prediction.images_per_s * (1 + SAME_SPEED)
    below_s = found.planner.tick_below_s(settings, images_per_s)
    apart = found.planner.faster_apart(settings, limit, below_s, quickly=True)
    if apart is not None and apart.prediction.images_per_s > images_per_s:
        best, images_per_s = found._replace(candidate=apart), apart.prediction.images_per_s
    if own.memory_limit < limit or own.prediction.images_per_s > images_per_s:
        best = AnyOrder(planner, own, False)
    if best is found:
        return found
    settings, solution = best.candidate.settings, best.candidate.solution
    fastest = replace(settings, available_memory_proportion=uniform(max(PROPORTIONS)))
    tables = planner.tables(fastest, best.candidate.memory_limit)
    program = Relaxation(
        items_of(planner.graph, _seconds(planner.graph, settings, planner.system.ipu)),
        tables,
        settings.num_stages,
        settings.schedule,
        _idle_s(planner.system.ipu),
        solution.objective_s,
    )
    bound_s = min(solution.lower_bound_s, program.run())
    if bound_s >= solution.objective_s * (1 - 1e-8):
        bound_s = solution.objective_s
    bounded = replace(best.candidate, solution=replace(solution, lower_bound_s=bound_s))
    return best._replace(candidate=bounded)


def _idle_s(ipu: IPU) -> float:
    """Of each cut, beside the seconds of its bytes."""
    return 2 * ipu.link_idle_cycles / ipu.clock_hz


def _seconds(graph: LayerGraph, settings: PlanSettings, ipu: IPU) -> Sequence[float]:
    """Of each layer's output the seconds in which it crosses a cut."""
    seconds: List[float] = (2 * output_bytes(graph, settings) / ipu.link_bytes_per_s).tolist()
    return seconds


def reordered(graph: LayerGraph, cuts: Sequence[int], num_items: int) -> LayerGraph:
    """The graph with its layers stage by stage; within a stage they keep their order.

    Args:
        cuts: the down-sets before the stages but the first, as masks of items.
    """
    order: List[int] = []
    done = 0
    for mask in [*cuts, (1 << num_items) - 1]:
        order += [item for item in range(num_items) if (mask & ~done) >> item & 1]
        done = mask
    return _in_order(graph, order)


def _in_order(graph: LayerGraph, order: Sequence[int]) -> LayerGraph:
    """The graph with its items in that order."""
    bounds = [*item_starts(graph), len(graph.layers)]
    layers = tuple(layer for item in order for layer in graph.layers[bounds[item] : bounds[item + 1]])
    return replace(graph, layers=layers)
