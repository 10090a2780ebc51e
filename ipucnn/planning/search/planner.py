"""The best splits under given settings, and other splits under the same model.

What a plan may take of an IPU's memory: plans that surely fit (``FITS_BELOW``) go before all others, whatever their
speed; if there are none, those below the whole memory, and then those that the model is not sure to exclude
(``FITS_NOT_ABOVE``).  The latter two are called "uncertain".
"""

from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.hardware import System
from ipucnn.planning.certificate import some_split_fits
from ipucnn.planning.constants import DEFAULT_CONSTANTS
from ipucnn.planning.cost.memory import segments_on_one_ipu
from ipucnn.planning.cost.schedule import Prediction, predict
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.memory import program_memory
from ipucnn.planning.planner import plan
from ipucnn.planning.search.tables import Solution, StageTables, item_starts, tick_s
from ipucnn.planning.settings import PlanSettings, Proportions, uniform
from ipucnn.planning.tables import stage_tables
from ipucnn.planning.verdict import FITS_BELOW, FITS_NOT_ABOVE, StageMemory

__all__ = ["LIMITS", "PROPORTIONS", "Candidate", "Planner", "candidates"]

LIMITS = (FITS_BELOW, 1.0, FITS_NOT_ABOVE)

# availableMemoryProportion to try where none is given: Poplar's default, and what public training configurations use.
PROPORTIONS = (0.6, 0.3, 0.15)


# In networks of more items than this, settings are compared by searches that stop after so many dynamic programs, most
# often at the best splits without their proof; only the most promising ones are searched to the end.
_LARGE_ITEMS = 300
_LARGE_EVALUATIONS = 60
_LARGE_PROOFS = 2


@dataclass(frozen=True)
class Candidate:
    """Splits under settings, with what is predicted for them.

    Attributes:
        memory_limit: share of an IPU's memory that ``solution`` was allowed.
        solution: of the planner; for splits that were given, of the best ones.
    """

    settings: PlanSettings
    splits: Tuple[str, ...]
    memory_limit: float
    solution: Solution
    prediction: Prediction
    ipus: Tuple[StageMemory, ...]

    @property
    def predicted_fill(self) -> float:
        """Of the fullest IPU."""
        return max(memory.fill for memory in self.ipus)

    @property
    def verdict(self) -> str:
        return max(self.ipus, key=lambda memory: memory.fill).verdict


def candidates(
    settings: PlanSettings, recomputation: Optional[bool] = None, proportions: Optional[Proportions] = None
) -> List[List[PlanSettings]]:
    """The settings to choose from where recomputation or availableMemoryProportion (None) is left open.

    Returns:
        Groups of settings that differ in the proportion alone, the largest first.
    """
    again = [recomputation] if recomputation is not None else [False, True]
    if not settings.training or settings.num_stages == 1:
        again = [False]
    tried = [uniform(share) for share in PROPORTIONS] if proportions is None else [proportions]
    return [
        [replace(settings, recomputation=on, available_memory_proportion=own) for own in tried]
        for on in again
    ]


class Planner:
    """Plans and judges splits of one network on one system; keeps tables that several questions share."""

    def __init__(self, graph: LayerGraph, system: System) -> None:
        self.graph, self.system = graph, system
        self.starts = item_starts(graph)
        self._tables: Dict[Any, StageTables] = {}
        self._solutions: Dict[Any, Solution] = {}

    def names(self, starts: Sequence[int]) -> Tuple[str, ...]:
        """Splits of the items that open stages 0, 1, ..."""
        return tuple(self.graph.layers[self.starts[item]].name for item in starts[1:])

    def items(self, splits: Sequence[str]) -> Tuple[int, ...]:
        """The items that open the stages of legal splits."""
        place = {start: item for item, start in enumerate(self.starts)}
        return (0, *(place[self.graph.index(name)] for name in splits))

    def tables(self, settings: PlanSettings, memory_limit: float) -> StageTables:
        """``stage_tables`` of settings; those that differ in the limit share everything else.

        Stages of which some, but not all, share an IPU have tables as if each had its own, without transfers: their
        optimum is then a bound for those that share.
        """
        one_ipu = segments_on_one_ipu(settings)
        shared = not one_ipu and settings.num_ipus_per_replica < settings.num_stages
        own = settings.restaged(
            settings.num_stages if settings.has_own_proportions else 1,
            num_replicas=1,
            # Neither memory nor the time of a micro-batch depends on how many are accumulated, only on whether.
            gradient_accumulation_count=min(2, settings.gradient_accumulation_count),
        )
        key = (own, one_ipu, shared)
        if key not in self._tables:
            asked = own
            if settings.schedule == "Sequential":
                count = own.num_stages if one_ipu else max(2, own.num_stages)
                asked = own.restaged(count, device_mapping=(0,) * count if one_ipu else tuple(range(count)))
            tables = stage_tables(self.graph, asked, self.system, max_fill=max(LIMITS))
            if shared:
                tables = replace(tables, cut_s=np.zeros(tables.num_items + 1))
            self._tables[key] = tables
        tables = self._tables[key]
        # Of one IPU's capacity the tables have taken off what is there whatever the cuts.
        spare = tables.capacity_bytes - (max(LIMITS) - memory_limit) * self.system.ipu.sram_bytes
        return replace(tables, capacity_bytes=max(0.0, spare))

    def fits(self, settings: PlanSettings, memory_limit: float) -> bool:
        """Whether any splits into the settings' stages do."""
        if settings.num_stages > len(self.starts):
            return False
        return some_split_fits(self.tables(settings, memory_limit), settings.num_stages)

    def best(
        self, settings: PlanSettings, memory_limit: float, max_evaluations: Optional[int] = None
    ) -> Optional[Candidate]:
        """The fastest splits within the limit, None if nothing fits.

        Args:
            max_evaluations: see ``planner.plan``.

        Raises:
            ConfigurationError: more stages than the model can be cut into.
        """
        if not self.fits(settings, memory_limit):
            return None
        solution = self._plan(settings, memory_limit, max_evaluations)
        return self._candidate(settings, self.names(solution.starts), memory_limit, solution)

    def best_of(
        self, choices: Sequence[Sequence[PlanSettings]], limits: Sequence[float] = LIMITS
    ) -> Optional[Candidate]:
        """The fastest of several settings at the first limit at which any fits, None if nothing does.

        Args:
            choices: groups of settings that differ in availableMemoryProportion alone, the largest first.  A smaller
                one takes less memory and is never faster: the rest of a group is skipped once nothing better can come.
        """
        for limit in limits:
            found: List[Candidate] = []
            for group in choices:
                if found and self.fastest_images_per_s(group[0]) <= found[0].prediction.images_per_s:
                    continue
                # The sort is stable: of equally good ones the first stays first.
                found = sorted([*found, *self._of_group(group, limit)], key=_rank, reverse=True)
            if found:
                return self._proved(found, limit)
        return None

    def _proved(self, ranked: Sequence[Candidate], limit: float) -> Candidate:
        """The best of candidates, best first, with its proof."""
        if ranked[0].solution.optimal:
            return ranked[0]
        best: Optional[Candidate] = None
        for candidate in ranked[:_LARGE_PROOFS]:
            proved = self.best(candidate.settings, limit)
            if best is None or (proved is not None and _rank(proved) > _rank(best)):
                best = proved
        assert best is not None  # these settings fit
        return best

    def _of_group(self, group: Sequence[PlanSettings], limit: float) -> Iterator[Candidate]:
        bound_s, evaluations = 0.0, None
        if len(self.starts) > _LARGE_ITEMS:
            evaluations = _LARGE_EVALUATIONS
        elif len(group) > 1:
            if not self.fits(group[-1], limit):
                return
            # The times of the largest proportion with the memory of the smallest: as fast as any of them.
            least = self.tables(group[-1], limit)
            ahead = self.tables(group[0], limit)
            mixed = replace(least, forward_s=ahead.forward_s, backward_s=ahead.backward_s)
            bound_s = plan(mixed, group[0].num_stages, group[0].schedule).objective_s
        for settings in group:
            candidate = self.best(settings, limit, evaluations)
            if candidate is not None:
                yield candidate
                if candidate.solution.objective_s <= bound_s:
                    return

    def least_fill(self, settings: PlanSettings) -> float:
        """The share of an IPU's memory below which no splits fit; 0 for segments on one IPU, which is no bound."""
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

    def fastest_images_per_s(self, settings: PlanSettings) -> float:
        """A bound on the throughput of any splits: work shared out evenly, no transfers, full ticks alone."""
        tables = self.tables(settings, max(LIMITS))
        count = settings.num_stages
        forward_s, backward_s = tables.least_seconds(count)
        forward, backward = float(forward_s.sum()), float(backward_s.sum())
        if settings.schedule == "Sequential":
            tick = forward + backward
        else:
            tick = max((forward + backward) / count, float((forward_s + backward_s).max()))
        if settings.training:
            again = forward if settings.recomputation and count > 1 else 0.0
            # The last stage isn't recomputed, but its forward pass takes a tick at most: hence the ones added.
            if settings.schedule == "Grouped":
                tick = max(tick, (forward + again + backward) / (count + bool(again)))
            elif settings.schedule == "Interleaved" and count > 1:
                # Even and odd stages go backward in different halves, and one half has at most (S + 1) / 2 of them.
                tick = max(tick, (again + backward) / ((count + 1) // 2 + bool(again)))
        tick += DEFAULT_CONSTANTS.micro_batch_s
        return settings.micro_batch_size * settings.num_replicas / tick

    def judge(
        self, splits: Sequence[str], settings: PlanSettings, memory_limit: float, quickly: bool = False
    ) -> Candidate:
        """Given legal splits; its solution is the best one within the limit, or within what they need if that is more.

        Splits that share an IPU in part are compared with a bound, see ``tables``.

        Args:
            quickly: in a large network the solution may lack its proof, but is no slower than the splits.
        """
        limit = max(memory_limit, self.needed_fill(splits, settings))
        # The sum of the same bytes in another order may be off by its last bits.
        allowed = limit if limit == memory_limit else limit * (1 + 1e-12)
        few = quickly and limit > memory_limit and len(self.starts) > _LARGE_ITEMS
        solution = self._plan(settings, allowed, _LARGE_EVALUATIONS if few else None)
        if few and solution.objective_s > self.tick_s(splits, settings):
            solution = self._plan(settings, allowed)
        return self._candidate(settings, tuple(splits), limit, solution)

    def needed_fill(self, splits: Sequence[str], settings: PlanSettings) -> float:
        """Share of an IPU's memory that the planner has to allow to find these splits."""
        tables = self.tables(settings, max(LIMITS))
        bounds = [*self.items(splits), len(self.starts)]
        count = settings.num_stages
        stages = [float(tables.memory(count, s)[bounds[s], bounds[s + 1]]) for s in range(count)]
        needed = max(stages)
        if tables.checkpoint_bytes is not None:
            needed += float(tables.checkpoint_bytes[bounds[:-1]].sum())
        elif settings.num_ipus_per_replica < count:
            return max(m.fill for m in program_memory(self.graph, splits, settings, self.system.ipu))
        return max(LIMITS) + (needed - tables.capacity_bytes) / self.system.ipu.sram_bytes

    def tick_s(self, splits: Sequence[str], settings: PlanSettings) -> float:
        """The planner's objective for splits, without the fixed time of a micro-batch."""
        return tick_s(self.tables(settings, max(LIMITS)), self.items(splits), settings.schedule)

    def _plan(self, settings: PlanSettings, limit: float, max_evaluations: Optional[int] = None) -> Solution:
        """``planner.plan``, once for each question; neither replicas nor the number accumulated change the answer."""
        count = min(2, settings.gradient_accumulation_count)
        key = (replace(settings, num_replicas=1, gradient_accumulation_count=count), limit, max_evaluations)
        if key not in self._solutions:
            tables = self.tables(settings, limit)
            self._solutions[key] = plan(tables, settings.num_stages, settings.schedule, max_evaluations)
        return self._solutions[key]

    def _candidate(
        self, settings: PlanSettings, splits: Tuple[str, ...], limit: float, solution: Solution
    ) -> Candidate:
        prediction = predict(self.graph, splits, settings, self.system)
        memory = program_memory(self.graph, splits, settings, self.system.ipu)
        return Candidate(settings, splits, limit, solution, prediction, tuple(memory))


def _rank(candidate: Candidate) -> Tuple[float, float]:
    """More throughput first, then less memory."""
    return candidate.prediction.images_per_s, -candidate.predicted_fill
