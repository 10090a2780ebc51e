"""Search over configurations: how to spend a number of IPUs on one network.

Stages x schedule x micro-batch x recomputation x replicas; each configuration at its fastest splits that fit.  What
comes out is the Pareto front: no other configuration is better in throughput, memory and IPUs at once, where less
than ``SAME_FILL`` of an IPU's memory makes no difference.
"""

from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ipucnn.errors import ConfigurationError, InfeasibleError
from ipucnn.planning.cost.memory import program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.pipeline_plan import ParetoRow
from ipucnn.planning.schedules import GROUPED, SCHEDULES, SEQUENTIAL
from ipucnn.planning.search.no_fit import infeasible_search, largest_that_fits, would_fit
from ipucnn.planning.search.planner import (
    LIMITS,
    PROPORTIONS,
    SAME_SPEED,
    Candidate,
    Planner,
    candidates,
)
from ipucnn.planning.settings import PlanSettings, Proportions, uniform
from ipucnn.text import counted
from ipucnn.training.batching import divisors, next_power_of_two, overlap_length

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)

# Shares of an IPU's memory that differ by less are the same: a fraction of what the memory model can tell.
SAME_FILL = 0.05

# Dynamic programs per configuration.  After so many the split is close to the best, and most often it is the best;
# only the configurations of the front are searched again to their proof.
_EVALUATIONS = 8

# Recomputation segments of one IPU: to compare configurations by, and all that are tried for the fastest one.
SEGMENTS = (2, 4, 8)
ALL_SEGMENTS = tuple(range(2, 17))

# What may be tried both ways.
FREE = ("half_partials", "optimizer_state_offloading", "eight_bit_transfer")

# Rows of a table of the front; --row takes the numbers of those beyond, too.
TABLE_ROWS = 12


@dataclass(frozen=True)
class SearchSpace:
    """What is tried.

    Attributes:
        base: settings that hold for all configurations.
        num_ipus: at most, all replicas together.
        micro_batch_sizes, schedules: to try.
        more_micro_batch_sizes: to be tried for the fastest configuration alone.
        free: those of ``FREE`` that are tried on and off.
        recomputation: on or off; None to try both.
        proportions: availableMemoryProportion of all stages; None for the best of ``planner.PROPORTIONS``.
        own_proportions: whether the stages of the fastest configuration may differ in it, where it is not given.
        num_replicas: None to try as many as the IPUs hold, and fewer.
        global_batch_size: what every configuration has to reach exactly.  Without it,
            ``gradient_accumulation_count`` holds.
        global_batch_from: who set it, for messages.
        gradient_accumulation_count: of every configuration.  Where there is no global batch size either, each has what
            ``default_count`` gives.
    """

    base: PlanSettings
    num_ipus: int
    micro_batch_sizes: Tuple[int, ...] = MICRO_BATCHES
    schedules: Tuple[str, ...] = SCHEDULES
    more_micro_batch_sizes: Tuple[int, ...] = ()
    free: Tuple[str, ...] = ()
    recomputation: Optional[bool] = None
    proportions: Optional[Proportions] = None
    own_proportions: bool = True
    num_replicas: Optional[int] = None
    global_batch_size: Optional[int] = None
    global_batch_from: str = "--global-batch-size"
    gradient_accumulation_count: Optional[int] = None

    def count(self, settings: PlanSettings, num_replicas: int) -> Optional[int]:
        """Gradient accumulation of a configuration, None if there is no legal one."""
        base = settings.order.multiple(settings.num_stages)
        count = self.gradient_accumulation_count
        if self.global_batch_size is not None:
            count, rest = divmod(self.global_batch_size, settings.micro_batch_size * num_replicas)
            if rest:
                return None
        if count is None:
            count = default_count(settings.schedule, settings.num_stages)
        return count if count and count % base == 0 else None

    def shapes(self, all_of_them: bool = False) -> Iterator[PlanSettings]:
        """One replica of every pipeline to try, largest micro-batches first.

        Args:
            all_of_them: also those with which no others but the fastest are compared.
        """
        most = 1 << (self.num_ipus.bit_length() - 1)
        sizes = {*self.micro_batch_sizes, *(self.more_micro_batch_sizes if all_of_them else ())}
        for size in sorted(sizes, reverse=True):
            own = replace(self.base, micro_batch_size=size, num_replicas=1, device_mapping=None)
            single = replace(own, num_stages=1, schedule=GROUPED)
            if self.recomputation is not True:
                yield single
            stages = [1 << power for power in range(1, most.bit_length())]
            for schedule in self.schedules:
                if schedule != SEQUENTIAL:
                    yield from (replace(own, num_stages=k, schedule=schedule) for k in stages)
                elif self.recomputation is not False and own.training:
                    segments = ALL_SEGMENTS if all_of_them else SEGMENTS
                    yield from (replace(own, num_stages=k, schedule=schedule) for k in segments)

    def variants(self, settings: PlanSettings, names: Sequence[str] = FREE[:2]) -> List[PlanSettings]:
        """The settings with those of the named ones that are free on and off, where that makes a difference."""
        found = [settings]
        matters = trial_settings(settings)
        for name in names:
            if name in self.free and name in matters:
                changes: List[Dict[str, Any]] = [{name: True}, {name: False}]
                found = [replace(own, **change) for own in found for change in changes]
        return found

    def counts(self, settings: PlanSettings) -> List[Tuple[int, int]]:
        """(replicas, gradient accumulation) to try of a pipeline."""
        counts = [(replicas, self.count(settings, replicas)) for replicas in self.replicas(settings)]
        return [(replicas, count) for replicas, count in counts if count is not None]

    def replicas(self, settings: PlanSettings) -> List[int]:
        """Numbers of replicas to try of a pipeline."""
        most = self.num_ipus // next_power_of_two(settings.num_ipus_per_replica)
        found = {most} | {1 << power for power in range(most.bit_length()) if 1 << power <= most}
        if self.num_replicas is not None:
            found = {self.num_replicas} if self.num_replicas <= most else set()
        group = settings.dbn_replica_group_size
        if group > 1:
            # Replicas share batch norm statistics in whole groups, each replica on one IPU.
            is_whole = settings.num_ipus_per_replica == 1
            found = {count for count in found if is_whole and count % group == 0}
        return sorted(found, reverse=True)


def micro_batches(global_batch_size: Optional[int]) -> Tuple[int, ...]:
    """Micro-batches to try where none is given: powers of two, and what divides the global batch, up to the largest."""
    sizes = set(MICRO_BATCHES)
    if global_batch_size is not None:
        sizes |= {size for size in divisors(global_batch_size) if size <= max(MICRO_BATCHES)}
    return tuple(sorted(sizes))


def all_micro_batches(global_batch_size: Optional[int]) -> Tuple[int, ...]:
    """Micro-batches among which the fastest configuration is looked for.

    All that divide the global batch, whatever their size; where there is none, all up to the largest of the others.
    """
    if global_batch_size is not None:
        return tuple(divisors(global_batch_size))
    return tuple(range(1, max(MICRO_BATCHES) + 1))


def trial_settings(settings: PlanSettings) -> Tuple[str, ...]:
    """Those of ``FREE`` that make a difference to a program of these settings."""
    matters = (
        settings.precision != "32.32",
        settings.training and settings.optimizer_slots > 0,
        True,
    )
    return tuple(name for name, does in zip(FREE, matters) if does)


def default_count(schedule: str, num_stages: int) -> int:
    """Micro-batches to accumulate where nothing says how many.

    The smallest legal count with at least 16 micro-batches per stage: filling and draining a Grouped pipeline then
    takes less than an eighth of the ticks.
    """
    if num_stages == 1:
        return 16
    base = overlap_length(schedule, num_stages)
    return -(-16 * num_stages // base) * base


def search(planner: Planner, space: SearchSpace, row: int = 1) -> Tuple[Candidate, Tuple[ParetoRow, ...]]:
    """A configuration of the Pareto front, and the front: the rows of the table, fastest first, and then the others.

    Args:
        row: which of the front, from 1 on: the first has the most predicted throughput.

    Raises:
        ConfigurationError: no configuration reaches the global batch size, or the front has no such row.
        InfeasibleError: nothing fits.
    """
    tries_transfer = "eight_bit_transfer" in space.free
    if tries_transfer:
        space = replace(space, base=replace(space.base, eight_bit_transfer=True))
    for limit in LIMITS:
        found, any_legal = _found(planner, space, limit)
        if not any_legal and not space.more_micro_batch_sizes:
            raise _no_batch(space)
        best = max((candidate.prediction.images_per_s for candidate in found), default=0.0)
        found += _fastest(planner, space, limit, best)
        if found:
            front = _refined(planner, _front(found), limit)
            if tries_transfer:
                front = [_with_least_transfer(planner, candidate) for candidate in front]
            front = _table_first(front)
            if row > len(front):
                raise ConfigurationError(
                    f"--row {row}: the table of best uses has {counted(len(front), 'row')}",
                    f"use --row 1 to --row {len(front)}" if len(front) > 1 else "leave out --row",
                )
            return front[row - 1], tuple(_row(c, i == row) for i, c in enumerate(front, start=1))
    raise _nothing_fits(planner, space)


def _nothing_fits(planner: Planner, space: SearchSpace) -> InfeasibleError:
    """What is in the way in the configuration that takes the least memory, and what would fit."""

    def options(asked: SearchSpace) -> Iterator[PlanSettings]:
        proportions = asked.proportions or uniform(min(PROPORTIONS))
        for shape in asked.shapes():
            counts = [c for c in (asked.count(shape, r) for r in asked.replicas(shape)) if c is not None]
            if counts and shape.num_stages <= len(planner.starts):
                again = True if shape.order.is_sequential else asked.recomputation
                for (settings,) in candidates(shape, again, proportions):
                    yield replace(settings, gradient_accumulation_count=max(counts))

    def ways(limit: float) -> List[str]:
        def fits(**changes: object) -> bool:
            return any(planner.fits(own, limit) for own in options(replace(space, **changes)))  # type: ignore[arg-type]

        powers = (1 << power for power in range(planner.system.num_ipus.bit_length()))
        ipus = next((n for n in powers if n > space.num_ipus and fits(num_ipus=n)), None)
        size = largest_that_fits(smaller, lambda n: fits(micro_batch_sizes=(n,)))
        words = (("--ipus", ipus), ("--micro-batch-size", size))
        return [f"{flag} {value}" for flag, value in words if value is not None]

    # The least memory of segments on one IPU has no bound: they are the last to be looked at.
    least = min(
        options(space), key=lambda s: (s.segments_on_one_ipu, s.micro_batch_size, planner.least_fill(s))
    )
    smaller: Sequence[int] = range(min(space.micro_batch_sizes) - 1, 0, -1)
    if space.global_batch_size is not None:
        smaller = [size for size in smaller if space.global_batch_size % size == 0]
    return infeasible_search(
        planner, least, num_ipus=space.num_ipus, ways=would_fit(ways(LIMITS[0]), ways(max(LIMITS)))
    )


def _found(planner: Planner, space: SearchSpace, limit: float) -> Tuple[List[Candidate], bool]:
    """The configurations that fit, without those seen to be worse than another, and whether any was legal at all."""
    found: List[Candidate] = []
    any_legal = False
    tried = [uniform(share) for share in PROPORTIONS] if space.proportions is None else [space.proportions]
    shapes = (own for shape in space.shapes() for own in space.variants(shape, ("half_partials",)))
    for shape in shapes:
        counts = space.counts(shape)
        any_legal = any_legal or bool(counts)
        if not counts or shape.num_stages > len(planner.starts):
            continue
        segments = shape.order.is_sequential
        groups = [candidates(shape, True if segments else space.recomputation, p) for p in tried]
        for (settings,) in (choice for group in groups for choice in group):
            one = replace(settings, gradient_accumulation_count=counts[0][1])
            if not planner.fits(one, limit) or _is_dominated(planner, one, counts, found):
                continue
            candidate = planner.best(one, limit, _EVALUATIONS)
            if candidate is None:
                continue
            found += [_with_replicas(planner, candidate, r, count) for r, count in counts]
    return found, any_legal


def _fastest(planner: Planner, space: SearchSpace, limit: float, images_per_s: float) -> List[Candidate]:
    """The fastest configuration of all in the space that fits; none if none is faster than that."""
    choices: List[PlanSettings] = []
    apart = space.own_proportions and space.proportions is None
    for shape in (own for each in space.shapes(all_of_them=True) for own in space.variants(each)):
        if shape.num_stages > len(planner.starts):
            continue
        again = True if shape.order.is_sequential else space.recomputation
        groups = candidates(shape, again, space.proportions)
        tried = [own for group in groups for own in (group[:1] if apart else group)]
        choices += [
            replace(own, num_replicas=replicas, gradient_accumulation_count=count)
            for own in tried
            for replicas, count in space.counts(shape)
        ]
    fastest = planner.fastest(choices, limit, apart, images_per_s)
    return [] if fastest is None else [fastest]


def _is_dominated(
    planner: Planner,
    settings: PlanSettings,
    counts: Sequence[Tuple[int, int]],
    found: Sequence[Candidate],
) -> bool:
    """Whether for each number of replicas something was found that is at least as good as this can be."""
    least = planner.least_fill(settings)
    latency_s = 0.0 if settings.training else planner.least_latency_s(settings)
    for replicas, count in counts:
        own = replace(settings, num_replicas=replicas, gradient_accumulation_count=count)
        bound = planner.fastest_images_per_s(own)
        if not any(
            other.prediction.images_per_s >= bound
            and other.predicted_fill <= least + SAME_FILL
            and (settings.training or other.prediction.latency_s <= latency_s * (1 + 1e-12))
            and other.settings.occupied_ipus <= own.occupied_ipus
            for other in found
        ):
            return False
    return True


def _with_replicas(planner: Planner, candidate: Candidate, num_replicas: int, count: int) -> Candidate:
    """The same pipeline in several replicas; its splits stay the fastest, as a tick doesn't depend on them."""
    settings = replace(candidate.settings, num_replicas=num_replicas, gradient_accumulation_count=count)
    if settings == candidate.settings:
        return candidate
    memory = candidate.ipus
    if (count > 1) != (candidate.settings.gradient_accumulation_count > 1):
        memory = tuple(program_memory(planner.graph, candidate.splits, settings, planner.system.ipu))
    prediction = predict(planner.graph, candidate.splits, settings, planner.system)
    return replace(candidate, settings=settings, prediction=prediction, ipus=memory)


def _refined(planner: Planner, front: Sequence[Candidate], limit: float) -> List[Candidate]:
    """The front of its configurations with their proofs."""
    proved = []
    for candidate in front:
        own = candidate
        if not own.solution.optimal:
            better = planner.best(candidate.settings, limit)
            assert better is not None  # ``candidate`` fits
            own = better
        proved.append(own)
    return _front(proved)


def _front(found: Sequence[Candidate]) -> List[Candidate]:
    """The configurations to which no other is as good in everything and better in something; fastest first.

    In inference the latency is one of these things, too.

    Of equally fast ones (``SAME_SPEED``) those with more stages are dropped.
    """

    def key(candidate: Candidate) -> Tuple[float, int, float]:
        speed = candidate.prediction.images_per_s
        return -speed, candidate.settings.occupied_ipus, candidate.predicted_fill

    def latency(candidate: Candidate) -> float:
        return 0.0 if candidate.settings.training else candidate.prediction.latency_s

    def is_simpler(one: Candidate, other: Candidate) -> bool:
        return (
            one.settings.num_stages < other.settings.num_stages
            and one.prediction.images_per_s >= other.prediction.images_per_s * (1 - SAME_SPEED)
            and one.settings.occupied_ipus <= other.settings.occupied_ipus
            and one.predicted_fill <= other.predicted_fill + SAME_FILL
            and latency(one) <= latency(other)
        )

    front: List[Candidate] = []
    for candidate in sorted(found, key=key):
        # Those before are at least as fast.
        own = key(candidate)
        if any(
            other[1] <= own[1] and other[2] <= own[2] + SAME_FILL and latency(better) <= latency(candidate)
            for better, other in ((each, key(each)) for each in front)
        ):
            continue
        if not any(is_simpler(other, candidate) for other in found):
            front.append(candidate)
    return front


def _with_least_transfer(planner: Planner, candidate: Candidate) -> Candidate:
    """The same with images as the network computes with them, unless bytes are faster: the host alone knows the two."""
    settings = replace(candidate.settings, eight_bit_transfer=False)
    prediction = predict(planner.graph, candidate.splits, settings, planner.system)
    if prediction.images_per_s < candidate.prediction.images_per_s * (1 - SAME_SPEED):
        return candidate
    return replace(candidate, settings=settings, prediction=prediction)


def _table_first(front: Sequence[Candidate]) -> List[Candidate]:
    """The front with the rows of its table first: the fastest ones, and the fastest of each number of IPUs."""
    first_of: Dict[int, int] = {}
    for place, candidate in enumerate(front):
        first_of.setdefault(candidate.settings.occupied_ipus, place)
    places = sorted(first_of.values())[:TABLE_ROWS]
    places += [place for place in range(len(front)) if place not in places][: TABLE_ROWS - len(places)]
    places.sort()
    return [front[i] for i in (*places, *(place for place in range(len(front)) if place not in places))]


def _row(candidate: Candidate, best: bool) -> ParetoRow:
    settings = candidate.settings
    return ParetoRow(
        num_stages=settings.num_stages,
        schedule=settings.schedule,
        micro_batch_size=settings.micro_batch_size,
        gradient_accumulation_count=settings.gradient_accumulation_count,
        num_replicas=settings.num_replicas,
        ipus_per_replica=settings.num_ipus_per_replica,
        num_ipus=settings.occupied_ipus,
        recomputation=settings.recomputation,
        half_partials=settings.half_partials and settings.precision != "32.32",
        optimizer_state_offloading=settings.offloads_optimizer_state and settings.optimizer_slots > 0,
        eight_bit_transfer=settings.eight_bit_transfer,
        available_memory_proportion=settings.available_memory_proportion,
        splits=candidate.splits,
        predicted_images_per_s=candidate.prediction.images_per_s,
        predicted_fill=candidate.predicted_fill,
        predicted_latency_s=candidate.prediction.latency_s,
        verdict=candidate.verdict,
        best=best,
    )


def _no_batch(space: SearchSpace) -> ConfigurationError:
    sizes = ", ".join(map(str, sorted(space.micro_batch_sizes)))
    if space.global_batch_size is None:
        return ConfigurationError(
            f"--gradient-accumulation-count {space.gradient_accumulation_count}: no schedule allows it with "
            f"{counted(space.num_ipus, 'IPU')}",
            "leave it out, or give --stages",
        )
    legal = [d for d in divisors(space.global_batch_size) if d <= max(MICRO_BATCHES)]
    return ConfigurationError(
        f"{space.global_batch_from} {space.global_batch_size} is not a multiple of micro-batch ({sizes}) x replicas "
        f"in any configuration of {counted(space.num_ipus, 'IPU')}",
        "use --micro-batch-size " + " or ".join(map(str, legal[-2:])) + ", or another --global-batch-size",
    )
