"""Finds the best splits under given settings, and judges other splits by the same model.

Three functions choose splits, and each calls the one before: ``Planner.fastest_splits`` those of a program,
``Planner.fastest_program`` those of the fastest of several programs, and ``best_uses`` in ``front.py`` those of the
best programs on a number of IPUs, if no number of stages is given.  ``Planner.judge`` predicts given splits, and
``Planner.best_judged`` chooses among programs for them.

The memory limits are tried in this order: first the share of an IPU's memory in which splits surely fit
(``FITS_BELOW``), whatever their speed; if no splits fit, the whole memory; then the share up to which the model cannot
exclude them (``FITS_NOT_ABOVE``).  Splits at the latter two limits are called "uncertain".
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import System
from ipucnn.planning.cost.layer_times import layer_times
from ipucnn.planning.cost.memory import FITS_BELOW, FITS_NOT_ABOVE, MemoryModel, RangeCounts, limit_bytes
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS
from ipucnn.planning.cost.schedule import Prediction, host_limit, update_s
from ipucnn.planning.forecast import Forecast, forecast
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.program import (
    Placement,
    PlannedProgram,
    ProgramVariants,
    Proportions,
    StageProportions,
    percentages,
    smallest,
    uniform,
)
from ipucnn.planning.schedules import GROUPED, Ticks
from ipucnn.planning.search.exact import Solution, solve, some_split_fits, with_updates
from ipucnn.planning.search.tables import StageTables, chosen_options, item_starts, stage_tables, tick_s

LIMITS = (FITS_BELOW, 1.0, FITS_NOT_ABOVE)

# Throughputs that differ by a smaller fraction count as equal.  Then the simpler configuration is taken: fewer stages,
# or one availableMemoryProportion for all of them.
SAME_SPEED = 1e-3

# The least factor by which settings count as faster; smaller differences come from the order of a sum.
_FASTER = 1 + 1e-8

# In networks of more items, comparisons with given splits stop after this number of dynamic programs, often without a
# proof.
_LARGE_ITEMS, _LARGE_EVALUATIONS = 300, 60

# Approximate size of the tables kept for a network's settings; those unused for longest are dropped and computed again.
_TABLE_BYTES, _LEAST_TABLES = 4e8, 8


@dataclass(frozen=True)
class Candidate:
    """Splits under settings, with their forecast.

    Attributes:
        memory_limit: the share of an IPU's memory allowed for ``solution``.
        solution: the fastest splits within that limit; they equal ``splits``, unless ``splits`` were given.
    """

    settings: PlannedProgram
    splits: Tuple[str, ...]
    memory_limit: float
    solution: Solution
    forecast: Forecast

    @property
    def prediction(self) -> Prediction:
        """Returns the predicted times."""
        return self.forecast.times

    @cached_property
    def predicted_fill(self) -> float:
        """The fill of the fullest IPU."""
        return self.forecast.predicted_fill

    @property
    def verdict(self) -> str:
        return self.forecast.verdict


class Planner:
    """Plans and judges splits of one network on one system, and keeps tables that several searches share.

    Two tables depend on no system and are kept for the whole process: ``layer_times._partitioned``, how products are
    divided among tiles, and ``memory._uses``, when a network's tensors are used.
    """

    def __init__(self, graph: LayerGraph, system: System) -> None:
        self.graph, self.system = graph, system
        self.starts = item_starts(graph)
        # A few matrices of bytes between any two cuts each; those unused for longest are computed again.
        most = max(_LEAST_TABLES, int(_TABLE_BYTES / (40 * len(self.starts) ** 2)))
        self._tables = lru_cache(maxsize=most)(self._make_tables)
        self._counts = lru_cache(maxsize=None)(partial(RangeCounts, graph, self.starts))
        self._seconds = lru_cache(maxsize=None)(self._item_seconds)
        self._solutions: Dict[Tuple[PlannedProgram, float, Optional[int]], Solution] = {}
        self._item_parameters: np.ndarray = np.add.reduceat(
            [layer.num_trainable for layer in graph.layers], self.starts
        )
        self._ticks: Dict[Tuple[PlannedProgram, float, Optional[int]], Solution] = {}

    def names(self, starts: Sequence[int]) -> Tuple[str, ...]:
        """Returns the splits for the items that open stages 0, 1, ..."""
        return tuple(self.graph.layers[self.starts[item]].name for item in starts[1:])

    def items(self, splits: Sequence[str]) -> Tuple[int, ...]:
        """Returns the items that open the stages of legal splits."""
        place = {start: item for item, start in enumerate(self.starts)}
        return (0, *(place[self.graph.index(name)] for name in splits))

    def tables(self, settings: PlannedProgram, memory_limit: float) -> StageTables:
        """Returns ``stage_tables`` of settings; settings that differ only in the limit share everything else.

        If some, but not all, stages share an IPU, the tables treat each as if it had its own IPU, without transfers.
        Their optimum is then a bound for the shared stages.

        Raises:
            ConfigurationError: segments on one IPU with several availableMemoryProportions.
        """
        is_segmented = settings.placement is Placement.SEGMENTS
        if is_segmented and settings.proportions_differ:
            (least,) = percentages(smallest(settings.available_memory_proportion))
            raise ConfigurationError(
                "--available-memory-proportion: the planner takes one value for segments on one IPU, and several are "
                "given",
                f"give one: --available-memory-proportion {least:g}",
            )
        # Where the optimizer state may be depends on whether there is a pipeline.
        stages = settings.num_stages if settings.proportions_differ else min(2, settings.num_stages)
        mapping = tuple(range(stages)) if settings.order.is_sequential and not is_segmented else None
        base = _of_a_micro_batch(settings.restaged(stages, device_mapping=mapping))
        tables = self._tables(base, settings.placement is Placement.SHARED)
        return replace(tables, capacity_bytes=limit_bytes(memory_limit, self.system.ipu) - tables.fixed_bytes)

    def _make_tables(self, settings: PlannedProgram, shared: bool) -> StageTables:
        counts = self._counts(settings.training)
        model = MemoryModel(self.graph, settings, self.system.ipu, self.starts, counts)
        tables = stage_tables(self.graph, settings, self.system, max(LIMITS), model)
        return replace(tables, cut_s=np.zeros(tables.num_items + 1)) if shared else tables

    def _may_fit(self, settings: PlannedProgram, memory_limit: float) -> bool:
        """Tells whether the memory of all stages holds at least what all layers keep for their backward passes.

        Each segment on one IPU takes what it keeps while it is at work, beside the checkpoints of all.
        """
        sample_bytes = settings.micro_batch_size * settings.element_bytes
        needed = sample_bytes * self._counts(settings.training).least_kept
        room = settings.num_stages * limit_bytes(memory_limit, self.system.ipu)
        return settings.num_stages <= len(self.starts) and needed <= room

    def fits(self, settings: PlannedProgram, memory_limit: float) -> bool:
        """Tells whether any splits into the settings' number of stages fit."""
        if not self._may_fit(settings, memory_limit):
            return False
        if settings.placement is Placement.SEGMENTS:
            return self._solution(settings, memory_limit).feasible
        return some_split_fits(self.tables(settings, memory_limit), settings.num_stages)

    def fastest_splits(
        self,
        program: PlannedProgram,
        memory_limit: float,
        *,
        by_stage: Sequence[Proportions] = (),
        below_s: float = np.inf,
        max_evaluations: Optional[int] = None,
    ) -> Optional[Candidate]:
        """Returns the fastest splits of a program within the limit; None if nothing fits.

        With a larger availableMemoryProportion, an operation takes less time and more temporary bytes, and only the
        largest temporary bytes of a stage count.  So a stage is fastest with the largest proportions with which it
        fits, independently of the other stages.

        Args:
            by_stage: as in a ``ProgramVariants``; each stage may have any for its convolutions, and any for its matrix
                products.
            below_s: the upper limit of the tick without its fixed part; the result is None if no tick is below it.
            max_evaluations: the limit of dynamic programs, as for ``solve``; not with ``by_stage``.
        """
        if below_s <= 0 or not self._may_fit(program, memory_limit):
            return None
        options = self._options(program, by_stage)
        if len(options) == 1:
            solution = self._solution(options[0], memory_limit, max_evaluations, below_s)
            return self._solved(options[0], memory_limit, solution)
        tables = self._open_tables(options, memory_limit)
        tick = solve(tables, program.num_stages, program.schedule, below_s=below_s)
        if not tick.feasible:
            return None
        solution = self._with_updates(program, tables, tick, below_s)
        varied = self._with_chosen_proportions(options, tables, solution.starts)
        # No splits with these proportions are faster than the fastest with any.
        self._solutions[(varied, memory_limit, None)] = solution
        return self._solved(varied, memory_limit, solution)

    def fastest_program(
        self, choices: Sequence[ProgramVariants], limits: Sequence[float] = LIMITS, images_per_s: float = 0.0
    ) -> Optional[Candidate]:
        """Returns the fastest of several programs at the first limit at which any fits, else None.

        All have an upper bound of their throughput.  They are searched in the order of that bound, each for splits that
        are faster than the fastest so far (by ``SAME_SPEED`` if it has more stages), until no bound is above the
        fastest.  If stages have a choice, all get the same proportion if that is as fast (``SAME_SPEED``).

        Args:
            images_per_s: the throughput that a program has to exceed.
        """
        bounds = [self.fastest_images_per_s(choice.program) for choice in choices]
        in_order = sorted(zip(bounds, choices), key=lambda pair: -pair[0])
        return next(
            filter(None, (self._fastest_within(limit, in_order, images_per_s) for limit in limits)), None
        )

    def _fastest_within(
        self, limit: float, in_order: Sequence[Tuple[float, ProgramVariants]], images_per_s: float
    ) -> Optional[Candidate]:
        best: Optional[Candidate] = None
        for bound, (program, by_stage) in in_order:
            if bound <= images_per_s * _FASTER:
                break
            has_more = best is not None and program.num_stages > best.settings.num_stages
            least = images_per_s * (1 + SAME_SPEED if has_more else _FASTER)
            below_s = self.tick_below_s(program, least)
            candidate = self.fastest_splits(program, limit, by_stage=by_stage, below_s=below_s)
            if candidate is not None and candidate.prediction.images_per_s > least:
                best, images_per_s = candidate, candidate.prediction.images_per_s
                alike = [ProgramVariants(each) for each in ProgramVariants(program, by_stage).programs]
        if best is None or ProgramVariants(best.settings) in alike:
            return best
        return self.fastest_program(alike, (limit,), images_per_s / (1 + SAME_SPEED)) or best

    def best_judged(self, splits: Sequence[str], choices: Sequence[ProgramVariants]) -> Candidate:
        """Returns given splits with the best of several programs: those that fit come first, then the fastest."""

        def rank(candidate: Candidate) -> Tuple[int, float, float]:
            fill = candidate.predicted_fill
            tier = sum(fill > limit for limit in LIMITS)
            # Among splits that do not fit, the one with the least memory is shown.
            speed = candidate.prediction.images_per_s if tier < len(LIMITS) else 0.0
            return -tier, speed, -fill

        every = [program for choice in choices for program in choice.programs]
        best = max((self.judge(splits, program, LIMITS[0]) for program in every), key=rank)
        # The largest proportions with which each stage surely fits, if that is faster.
        least = best.prediction.images_per_s * (1 + SAME_SPEED)
        judged = [best]
        for program, by_stage in choices:
            if program.placement is not Placement.ONE_EACH or not by_stage:
                continue
            varied = self.with_largest_proportions(program, splits, by_stage)
            predicted = forecast(self.graph, splits, varied, self.system)
            if varied.proportions_differ and predicted.predicted_images_per_s > least:
                judged.append(self.judge(splits, varied, LIMITS[0]))
        return max(judged, key=rank)

    def with_largest_proportions(
        self, program: PlannedProgram, splits: Sequence[str], by_stage: Sequence[Proportions]
    ) -> PlannedProgram:
        """Returns the program with the largest proportions of ``by_stage`` with which each stage surely fits."""
        options = self._options(program, by_stage)
        return self._with_chosen_proportions(
            options, self._open_tables(options, LIMITS[0]), self.items(splits)
        )

    def _open_tables(self, options: Sequence[PlannedProgram], limit: float) -> StageTables:
        tables = tuple(self.tables(option, limit) for option in options)
        return replace(tables[0], options=tables)

    def _options(self, program: PlannedProgram, by_stage: Sequence[Proportions]) -> List[PlannedProgram]:
        """Returns the program with each availableMemoryProportion that matters, as ``StageTables.options`` are ordered.

        They are ordered by convolutions first, so the first with which a stage fits has the largest of either kind.
        """
        if not by_stage:
            return [program]
        shares = [share.convolution for (share,) in by_stage]
        least = replace(program, available_memory_proportion=by_stage[-1])
        has_matmuls = not self._is_alike(program, least, of_class="matmul")
        options: List[PlannedProgram] = []
        for convolution in shares:
            for matmul in shares if has_matmuls else (convolution,):
                share = StageProportions(convolution, matmul, convolution, matmul)
                option = replace(program, available_memory_proportion=(share,))
                if not any(self._is_alike(option, other) for other in options):
                    options.append(option)
        return options

    def _is_alike(self, one: PlannedProgram, other: PlannedProgram, of_class: str = "") -> bool:
        """Tells whether the layers (of a class) take the same time and temporary bytes under both settings."""
        first, second = (layer_times(self.graph, each, self.system.ipu) for each in (one, other))
        layers = [not of_class or layer.op_class == of_class for layer in self.graph.layers]
        return all(
            bool(np.array_equal(getattr(first, name)[layers], getattr(second, name)[layers]))
            for name in ("forward_s", "backward_s", "temporary_bytes")
        )

    def _with_chosen_proportions(
        self, options: Sequence[PlannedProgram], tables: StageTables, starts: Sequence[int]
    ) -> PlannedProgram:
        """Returns the settings of splits whose stages each have the first option that fits."""
        bounds = [self.starts[item] for item in starts] + [len(self.graph.layers)]
        shares = []
        for stage, option in enumerate(chosen_options(tables, starts)):
            (share,) = options[option].available_memory_proportion
            layers = self.graph.layers[bounds[stage] : bounds[stage + 1]]
            if all(layer.op_class != "matmul" for layer in layers):
                (share,) = uniform(share.convolution)
            shares.append(share)
        return replace(options[0], available_memory_proportion=tuple(shares))

    def least_fill(self, settings: PlannedProgram) -> float:
        """Returns the share of an IPU's memory below which no splits fit; 0 (no bound) for segments on one IPU."""
        tables = self.tables(settings, max(LIMITS))
        n = tables.num_items
        if settings.placement is Placement.SEGMENTS or settings.num_stages > n:
            return 0.0
        least = np.full(n, np.inf)
        least[0] = 0.0
        for stage in range(settings.num_stages):
            reached = np.maximum(least[:, None], tables.memory_bytes(settings.num_stages, stage)).min(axis=0)
            least = reached[:n]
        return float(reached[n]) / self.system.ipu.sram_bytes

    def least_seconds(self, settings: PlannedProgram) -> Tuple[np.ndarray, np.ndarray]:
        """Returns (items,) seconds of each item's forward and backward pass in the stage in which it is fastest."""
        if settings.proportions_differ:
            return self.tables(settings, max(LIMITS)).least_seconds()
        alone = settings.restaged(1, schedule=GROUPED, recomputation=False, num_replicas=1)
        return self._seconds(replace(alone, gradient_accumulation_count=1, optimizer_state_offloading=False))

    def _item_seconds(self, settings: PlannedProgram) -> Tuple[np.ndarray, np.ndarray]:
        times = layer_times(self.graph, settings, self.system.ipu)
        forward, backward = (
            np.add.reduceat(each, self.starts) for each in (times.forward_s, times.backward_s)
        )
        return forward, backward

    def fastest_images_per_s(self, settings: PlannedProgram) -> float:
        """Returns an upper bound of any splits' throughput: the lower of the pipeline's bound and the host's limit.

        The bound assumes work shared evenly and no transfers between IPUs.
        """
        tick_s = settings.order.least_tick_s(
            *self.least_seconds(settings), settings.num_stages, settings.recomputes(0)
        )
        seconds = max(count * tick_s + rest_s for count, rest_s in self._least_update_s(settings))
        return min(settings.global_batch_size / seconds, host_limit(self.graph, settings, self.system)[1])

    def tick_below_s(self, settings: PlannedProgram, images_per_s: float) -> float:
        """Returns the tick, without its fixed part, above which no splits reach ``images_per_s``; may be negative."""
        if images_per_s <= 0:
            return float("inf")
        seconds = settings.global_batch_size / images_per_s
        ticks = [(seconds - rest_s) / count for count, rest_s in self._least_update_s(settings)]
        return min(ticks) * (1 + 1e-9)  # a little more, for rounding

    def _least_update_s(self, settings: PlannedProgram) -> List[Tuple[int, float]]:
        """Returns lower bounds of a weight update: (number of ticks without their fixed part, further seconds).

        A full tick lasts as long as its longest passes.  Each of these passes occurs once for every micro-batch, also
        while the pipeline fills and drains, which gives one tick per micro-batch.  Before the first and after the last
        of them, the other stages work one after the other.  So all but one of these ticks plus the work of all stages
        are a bound, too.
        """
        count, stages = settings.gradient_accumulation_count, settings.num_stages
        fixed_s = DEFAULT_CONSTANTS.fixed_s(self.system)
        rest_s = self._least_of_an_update_s(settings)
        if settings.order.is_sequential:
            return [(count, count * fixed_s + rest_s)]
        ticks = Ticks(settings.order, stages, count)
        rest_s += ticks.num_ticks // ticks.period * fixed_s
        is_recomputed = settings.recomputes(0)
        forward_s, backward_s = self.least_seconds(settings)
        work_s = float(forward_s.sum()) * (1 + is_recomputed) + float(backward_s.sum())
        # The last stage is not recomputed; its forward pass is no longer than a tick.
        others = count - 1 - is_recomputed
        bounds = [(count, rest_s)]
        if others > 0 and settings.placement is Placement.ONE_EACH:
            # Stages that share an IPU do not work one after the other.
            bounds.append((others, rest_s + work_s))
        return bounds

    def _least_of_an_update_s(self, settings: PlannedProgram) -> float:
        """Returns the seconds of an update if the weights are shared evenly over the IPUs."""
        ipus = settings.num_ipus_per_replica
        shares = [self.graph.num_trainable / ipus] * ipus
        return update_s(shares, settings.restaged(ipus, schedule=GROUPED), self.system)

    def least_latency_s(self, settings: PlannedProgram) -> float:
        """Returns a lower bound of the latency of any splits: all forward passes, no transfers."""
        return float(self.least_seconds(settings)[0].sum()) + DEFAULT_CONSTANTS.fixed_s(self.system)

    def judge(
        self, splits: Sequence[str], settings: PlannedProgram, memory_limit: float, quickly: bool = False
    ) -> Candidate:
        """Returns the given legal splits, beside the fastest ones that take no more memory.

        The fastest ones may take what the limit allows, or what the given ones need if that is more.  If some of the
        stages share an IPU, their time is a bound, see ``tables``.

        Args:
            quickly: whether the solution may lack its proof in a large network; it is still no slower than the splits.
        """
        judged = forecast(self.graph, splits, settings, self.system)
        limit = max(memory_limit, judged.predicted_fill)
        if quickly and limit > memory_limit and len(self.starts) > _LARGE_ITEMS:
            given = Solution(self.items(splits), self.micro_batch_s(splits, settings), 0.0)
            solution = self._solution(settings, limit, _LARGE_EVALUATIONS, given.objective_s)
            if not solution.objective_s < given.objective_s:
                solution = given
        else:
            solution = self._solution(settings, limit)
        return Candidate(settings, tuple(splits), limit, solution, judged)

    def micro_batch_s(self, splits: Sequence[str], settings: PlannedProgram) -> float:
        """Returns the planner's objective for splits: a tick without its fixed time, and its share of the update."""
        items = self.items(splits)
        return tick_s(self.tables(settings, max(LIMITS)), items, settings.schedule) + self.share_s(
            items, settings
        )

    def share_s(self, starts: Sequence[int], settings: PlannedProgram) -> float:
        """Returns a micro-batch's share of the weights' update, for the items that open the stages."""
        parameters = np.add.reduceat(self._item_parameters, starts)
        return update_s(parameters, settings, self.system) / settings.gradient_accumulation_count

    def _solution(
        self,
        settings: PlannedProgram,
        limit: float,
        max_evaluations: Optional[int] = None,
        below_s: float = np.inf,
    ) -> Solution:
        """Returns ``with_updates`` of ``solve``; results without ``below_s`` are cached."""
        key = (settings, limit, max_evaluations)
        if key in self._solutions and below_s == np.inf:
            return self._solutions[key]
        tables, of_tick = self.tables(settings, limit), (_of_a_micro_batch(settings), limit, max_evaluations)
        tick = self._ticks.get(of_tick) if below_s == np.inf else None
        if tick is None:
            tick = solve(tables, settings.num_stages, settings.schedule, max_evaluations, below_s)
        solution = self._with_updates(settings, tables, tick, below_s)
        if below_s == np.inf:
            self._ticks[of_tick], self._solutions[key] = tick, solution
        return solution

    def _with_updates(
        self, settings: PlannedProgram, tables: StageTables, tick: Solution, below_s: float
    ) -> Solution:
        """Returns the splits with the shortest weight update, fill and drain aside, from those with the shortest tick.

        Where the cuts are does not matter to the update of segments on one IPU.  Of stages that share some IPUs, both
        the tick and the share are bounds.
        """
        if not tick.feasible:
            return tick
        count = settings.gradient_accumulation_count
        if settings.placement is not Placement.ONE_EACH:
            share_s = self.share_s(tick.starts, settings)
            if settings.placement is Placement.SHARED:
                share_s = min(share_s, self._least_of_an_update_s(settings) / count)
            return Solution(tick.starts, tick.objective_s + share_s, tick.lower_bound_s + share_s)

        def of_most(parameters: float) -> float:
            return update_s([parameters] * settings.num_stages, settings, self.system)

        return with_updates(tables, tick, settings.schedule, count, self._item_parameters, of_most, below_s)

    def _solved(self, settings: PlannedProgram, limit: float, solution: Solution) -> Optional[Candidate]:
        """Returns the splits of a solution; None if it has none."""
        if not solution.feasible:
            return None
        splits = self.names(solution.starts)
        predicted = forecast(self.graph, splits, settings, self.system)
        return Candidate(settings, splits, limit, solution, predicted)


def _of_a_micro_batch(settings: PlannedProgram) -> PlannedProgram:
    """Returns settings without the fields that affect neither the seconds nor the bytes of a stage.

    These fields are the replicas and the number of accumulated micro-batches; only whether any are accumulated matters.
    """
    count = min(2, settings.gradient_accumulation_count)
    return replace(settings, num_replicas=1, gradient_accumulation_count=count)
