"""Finds the best splits under given settings, and judges other splits by the same model.

The memory limits are tried in this order: first the share of an IPU's memory in which splits surely fit
(``FITS_BELOW``), whatever their speed; if no splits fit, the whole memory; then the share up to which the model cannot
exclude them (``FITS_NOT_ABOVE``).  Splits at the latter two limits are called "uncertain".
"""

from dataclasses import dataclass, replace
from functools import cached_property
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
    DEFAULT_PROPORTION,
    PlannedProgram,
    Proportions,
    StageProportions,
    percentages,
    smallest,
    uniform,
)
from ipucnn.planning.schedules import GROUPED, Ticks
from ipucnn.planning.search.exact import Solution, fastest_split, some_split_fits
from ipucnn.planning.search.tables import StageTables, chosen_options, item_starts, stage_tables, tick_s

LIMITS = (FITS_BELOW, 1.0, FITS_NOT_ABOVE)

# availableMemoryProportion to try if none is given: Poplar's default, and values of public training configurations.
PROPORTIONS = (DEFAULT_PROPORTION, 0.3, 0.15)

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


def candidates(
    settings: PlannedProgram, recomputation: Optional[bool] = None, proportions: Optional[Proportions] = None
) -> List[List[PlannedProgram]]:
    """Returns the settings to choose from; None leaves recomputation or availableMemoryProportion open.

    Returns:
        Groups of settings that differ only in the proportion, the largest first.
    """
    recomputations = [recomputation] if recomputation is not None else [False, True]
    if not settings.training or settings.num_stages == 1:
        recomputations = [False]
    tried = [uniform(share) for share in PROPORTIONS] if proportions is None else [proportions]
    return [
        [replace(settings, recomputation=on, available_memory_proportion=shares) for shares in tried]
        for on in recomputations
    ]


def tried_of(group: Sequence[PlannedProgram], stage_proportions: bool) -> Sequence[PlannedProgram]:
    """Returns the settings of a group of ``candidates`` that ``Planner.fastest`` has to try.

    Args:
        stage_proportions: whether stages may have their own proportions: then the first stands for all of its group,
            except that segments on one IPU have one proportion.
    """
    return group[:1] if stage_proportions and not group[0].segments_on_one_ipu else group


class Planner:
    """Plans and judges splits of one network on one system, and keeps tables that several searches share."""

    def __init__(self, graph: LayerGraph, system: System) -> None:
        self.graph, self.system = graph, system
        self.starts = item_starts(graph)
        self._counts: Dict[bool, RangeCounts] = {}
        self._tables: Dict[Tuple[PlannedProgram, bool], StageTables] = {}
        self._solutions: Dict[Tuple[PlannedProgram, float, Optional[int]], Solution] = {}
        self._seconds: Dict[PlannedProgram, Tuple[np.ndarray, np.ndarray]] = {}

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
        one_ipu = settings.segments_on_one_ipu
        if one_ipu and settings.proportions_differ:
            (least,) = percentages(smallest(settings.available_memory_proportion))
            raise ConfigurationError(
                "--available-memory-proportion: the planner takes one value for segments on one IPU, and several are "
                "given",
                f"give one: --available-memory-proportion {least:g}",
            )
        shared = not one_ipu and settings.num_ipus_per_replica < settings.num_stages
        # Where the optimizer state may be depends on whether there is a pipeline.
        stages = settings.num_stages if settings.proportions_differ else min(2, settings.num_stages)
        mapping = tuple(range(stages)) if settings.order.is_sequential and not one_ipu else None
        base = _of_a_micro_batch(settings.restaged(stages, device_mapping=mapping))
        tables = self._tables.pop((base, shared), None) or self._make_tables(base, shared)
        self._tables[base, shared] = tables  # the latest is last
        # A few matrices of bytes between any two cuts each.
        most = max(_LEAST_TABLES, int(_TABLE_BYTES / (40 * len(self.starts) ** 2)))
        while len(self._tables) > most:
            del self._tables[next(iter(self._tables))]
        return replace(tables, capacity_bytes=limit_bytes(memory_limit, self.system.ipu) - tables.fixed_bytes)

    def _make_tables(self, settings: PlannedProgram, shared: bool) -> StageTables:
        counts = self._range_counts(settings.training)
        model = MemoryModel(self.graph, settings, self.system.ipu, self.starts, counts)
        tables = stage_tables(self.graph, settings, self.system, max(LIMITS), model)
        return replace(tables, cut_s=np.zeros(tables.num_items + 1)) if shared else tables

    def _range_counts(self, training: bool) -> RangeCounts:
        if training not in self._counts:
            self._counts[training] = RangeCounts(self.graph, self.starts, training)
        return self._counts[training]

    def _may_fit(self, settings: PlannedProgram, memory_limit: float) -> bool:
        """Tells whether the memory of all stages holds at least what all layers keep for their backward passes.

        Each segment on one IPU takes what it keeps while it is at work, beside the checkpoints of all.
        """
        sample_bytes = settings.micro_batch_size * settings.element_bytes
        needed = sample_bytes * self._range_counts(settings.training).least_kept
        room = settings.num_stages * limit_bytes(memory_limit, self.system.ipu)
        return settings.num_stages <= len(self.starts) and needed <= room

    def fits(self, settings: PlannedProgram, memory_limit: float) -> bool:
        """Tells whether any splits into the settings' number of stages fit."""
        if not self._may_fit(settings, memory_limit):
            return False
        if settings.segments_on_one_ipu:
            return self._solution(settings, memory_limit).feasible
        return some_split_fits(self.tables(settings, memory_limit), settings.num_stages)

    def best(
        self,
        settings: PlannedProgram,
        memory_limit: float,
        max_evaluations: Optional[int] = None,
        below_s: float = np.inf,
    ) -> Optional[Candidate]:
        """Returns the fastest splits within the limit; None if nothing fits.

        Args:
            max_evaluations: the limit of dynamic programs, as for ``fastest_split``.
            below_s: the upper limit of the tick without its fixed part; the result is None if no tick is below it.
        """
        if below_s <= 0 or not self._may_fit(settings, memory_limit):
            return None
        solution = self._solution(settings, memory_limit, max_evaluations, below_s)
        return self._solved(settings, memory_limit, solution)

    def best_of(
        self,
        choices: Sequence[Sequence[PlannedProgram]],
        limits: Sequence[float] = LIMITS,
        stage_proportions: bool = False,
    ) -> Optional[Candidate]:
        """Returns the fastest of several settings at the first limit at which any fits; None if none does.

        Args:
            choices: groups of settings that differ only in availableMemoryProportion, the largest first.
            stage_proportions: whether stages may have their own proportions, if a group has several.
        """
        is_open = stage_proportions and any(len(group) > 1 for group in choices)
        tried = [settings for group in choices for settings in tried_of(group, is_open)]
        return next(filter(None, (self.fastest(tried, limit, is_open) for limit in limits)), None)

    def fastest(
        self,
        choices: Sequence[PlannedProgram],
        limit: float,
        stage_proportions: bool = False,
        images_per_s: float = 0.0,
    ) -> Optional[Candidate]:
        """Returns the fastest of several settings within the limit if it is faster than ``images_per_s``, else None.

        All settings have an upper bound of their throughput.  They are searched in the order of that bound, each for
        splits that are faster than the fastest so far (by ``SAME_SPEED`` if it has more stages), until no bound is
        above the fastest.

        Args:
            stage_proportions: whether each stage may have any of ``PROPORTIONS``; all have the same one if that is as
                fast (``SAME_SPEED``).
            images_per_s: the throughput that a candidate has to exceed.
        """
        best: Optional[Candidate] = None
        bounds = [self.fastest_images_per_s(settings) for settings in choices]
        for bound, settings in sorted(zip(bounds, choices), key=lambda pair: -pair[0]):
            if bound <= images_per_s * _FASTER:
                break
            has_more = best is not None and settings.num_stages > best.settings.num_stages
            least = images_per_s * (1 + SAME_SPEED if has_more else _FASTER)
            is_open = stage_proportions and not settings.segments_on_one_ipu
            search = self.best_with_stage_proportions if is_open else self.best
            candidate = search(settings, limit, below_s=self.tick_below_s(settings, least))
            if candidate is not None and candidate.prediction.images_per_s > least:
                best, images_per_s = candidate, candidate.prediction.images_per_s
        if best is None or not stage_proportions:
            return best
        alike = [replace(best.settings, available_memory_proportion=uniform(share)) for share in PROPORTIONS]
        if best.settings in alike:
            return best
        return self.fastest(alike, limit, images_per_s=images_per_s / (1 + SAME_SPEED)) or best

    def best_with_stage_proportions(
        self, settings: PlannedProgram, memory_limit: float, below_s: float
    ) -> Optional[Candidate]:
        """Returns ``best`` if each stage may have any of ``PROPORTIONS`` for its convolutions and matrix products.

        With a larger proportion, an operation takes less time and more temporary bytes, and only the largest temporary
        bytes of a stage count.  So a stage is fastest with the largest proportion of either kind with which it fits,
        independently of the other kind and of the other stages.

        Args:
            settings: settings with stages on an IPU each, and any one proportion.
        """
        if below_s <= 0 or not self._may_fit(settings, memory_limit):
            return None
        options = self._shares(settings)
        if len(options) == 1:
            return self.best(options[0], memory_limit, below_s=below_s)
        tables, stages = self._open_tables(options, memory_limit), settings.num_stages
        solution = fastest_split(tables, stages, settings.schedule, below_s=below_s)
        if not solution.feasible:
            return None
        varied = self._with_chosen_proportions(options, tables, solution.starts)
        # No splits with these proportions are faster than the fastest with any.
        self._solutions[(_of_a_micro_batch(varied), memory_limit, None)] = solution
        return self._solved(varied, memory_limit, solution)

    def judge_with_stage_proportions(
        self, splits: Sequence[str], settings: PlannedProgram, best: Candidate
    ) -> Candidate:
        """Returns ``best``, or the splits with the largest proportions with which each stage surely fits, if faster.

        Args:
            settings: settings with any proportion.
        """
        one_each = settings.num_ipus_per_replica == settings.num_stages
        options = self._shares(settings) if one_each else []
        if len(options) < 2:
            return best
        varied = self._with_chosen_proportions(
            options, self._open_tables(options, LIMITS[0]), self.items(splits)
        )
        least = best.prediction.images_per_s * (1 + SAME_SPEED)
        images_per_s = forecast(self.graph, splits, varied, self.system).predicted_images_per_s
        if varied.proportions_differ and images_per_s > least:
            return self.judge(splits, varied, LIMITS[0])
        return best

    def _open_tables(self, options: Sequence[PlannedProgram], limit: float) -> StageTables:
        tables = tuple(self.tables(option, limit) for option in options)
        return replace(tables[0], options=tables)

    def _shares(self, settings: PlannedProgram) -> List[PlannedProgram]:
        """Returns settings for each availableMemoryProportion that matters, ordered as ``StageTables.options`` are.

        They are ordered by convolutions first, so the first with which a stage fits has the largest of either kind.
        """
        options: List[PlannedProgram] = []
        for convolution in PROPORTIONS:
            for matmul in PROPORTIONS if self._matmuls_differ(settings) else (convolution,):
                share = StageProportions(convolution, matmul, convolution, matmul)
                option = replace(settings, available_memory_proportion=(share,))
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

    def _matmuls_differ(self, settings: PlannedProgram) -> bool:
        most, least = (
            replace(settings, available_memory_proportion=uniform(share))
            for share in (PROPORTIONS[0], PROPORTIONS[-1])
        )
        return not self._is_alike(most, least, of_class="matmul")

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
        if tables.one_ipu or settings.num_stages > n:
            return 0.0
        least = np.full(n, np.inf)
        least[0] = 0.0
        for stage in range(settings.num_stages):
            reached = np.maximum(least[:, None], tables.memory(settings.num_stages, stage)).min(axis=0)
            least = reached[:n]
        return float(reached[n]) / self.system.ipu.sram_bytes

    def least_seconds(self, settings: PlannedProgram) -> Tuple[np.ndarray, np.ndarray]:
        """Returns (items,) seconds of each item's forward and backward pass in the stage in which it is fastest."""
        if settings.proportions_differ:
            return self.tables(settings, max(LIMITS)).least_seconds(settings.num_stages)
        alone = settings.restaged(1, schedule=GROUPED, recomputation=False, num_replicas=1)
        alone = replace(alone, gradient_accumulation_count=1, optimizer_state_offloading=False)
        if alone not in self._seconds:
            times = layer_times(self.graph, alone, self.system.ipu)
            self._seconds[alone] = (
                np.add.reduceat(times.forward_s, self.starts),
                np.add.reduceat(times.backward_s, self.starts),
            )
        return self._seconds[alone]

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
        fixed_s, ipus = DEFAULT_CONSTANTS.fixed_s(self.system), settings.num_ipus_per_replica
        # Weights shared evenly over the IPUs.
        shares = [self.graph.num_trainable / ipus] * ipus
        rest_s = update_s(shares, settings.restaged(ipus, schedule=GROUPED), self.system)
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
        if others > 0 and ipus == stages:
            # Stages that share an IPU do not work one after the other.
            bounds.append((others, rest_s + work_s))
        return bounds

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
            tick_s = self.tick_s(splits, settings)
            solution = self._solution(settings, limit, _LARGE_EVALUATIONS, tick_s)
            if not solution.feasible:
                solution = Solution(self.items(splits), tick_s, 0.0)
        else:
            solution = self._solution(settings, limit)
        return Candidate(settings, tuple(splits), limit, solution, judged)

    def tick_s(self, splits: Sequence[str], settings: PlannedProgram) -> float:
        """Returns the planner's objective for splits, without the fixed time of a micro-batch."""
        return tick_s(self.tables(settings, max(LIMITS)), self.items(splits), settings.schedule)

    def _solution(
        self,
        settings: PlannedProgram,
        limit: float,
        max_evaluations: Optional[int] = None,
        below_s: float = np.inf,
    ) -> Solution:
        """Returns ``fastest_split``; results without ``below_s`` are cached."""
        key = (_of_a_micro_batch(settings), limit, max_evaluations)
        if key in self._solutions and below_s == np.inf:
            return self._solutions[key]
        tables = self.tables(settings, limit)
        solution = fastest_split(tables, settings.num_stages, settings.schedule, max_evaluations, below_s)
        if below_s == np.inf:
            self._solutions[key] = solution
        return solution

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
