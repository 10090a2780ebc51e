"""Searches over configurations: how to use a number of IPUs for one network.

The dimensions are stages x schedule x micro-batch x recomputation x replicas.  Each configuration has its fastest
splits that fit.  The result is the Pareto front: no other configuration is better in throughput, memory and IPUs at
once.  Memory that differs by less than ``SAME_FILL`` of an IPU counts as equal.
"""

from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ipucnn.errors import ConfigurationError, InfeasibleError
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.forecast import forecast
from ipucnn.planning.pipeline_plan import ParetoRow
from ipucnn.planning.program import PlannedProgram, Proportions, uniform
from ipucnn.planning.schedules import GROUPED, SCHEDULES, SEQUENTIAL
from ipucnn.planning.search.no_fit import hint_of_ways, infeasible_search, largest_that_fits
from ipucnn.planning.search.planner import (
    LIMITS,
    PROPORTIONS,
    SAME_SPEED,
    Candidate,
    Planner,
    candidates,
    tried_of,
)
from ipucnn.text import counted
from ipucnn.training.batching import divisors, next_power_of_two, overlap_length

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)

# Shares of an IPU's memory that differ by less count as equal: a fraction of the memory model's accuracy.
SAME_FILL = 0.05

# Dynamic programs per configuration.  After this number the split is close to the best, and is usually the best.  Only
# the configurations of the front are searched again until their proof.
_EVALUATIONS = 8

# Recomputation segments of one IPU: the numbers with which configurations are compared, and all numbers tried for the
# fastest one.
SEGMENTS = (2, 4, 8)
ALL_SEGMENTS = tuple(range(2, 17))

# Settings that may be tried on and off.
FREE = ("half_partials", "optimizer_state_offloading", "eight_bit_transfer")

# The largest difference of global batch sizes that a hint names.
_FARTHEST = 1000

# Rows in the table of the front; --row accepts the numbers of further rows, too.
TABLE_ROWS = 12


@dataclass(frozen=True)
class SearchSpace:
    """The configurations to try.

    Attributes:
        base: settings that hold for all configurations.
        num_ipus: the largest number of IPUs, over all replicas.
        micro_batch_sizes, schedules: the values to try.
        more_micro_batch_sizes: further values, tried for the fastest configuration only.
        free: the settings of ``FREE`` that are tried on and off.
        recomputation: on or off; None to try both.
        proportions: the availableMemoryProportion of all stages; None for the best of ``planner.PROPORTIONS``.
        stage_proportions: whether the stages of the fastest configuration may differ in availableMemoryProportion, if
            ``proportions`` is None.
        num_replicas: the number of replicas; None to try as many as the IPUs hold, and fewer.
        global_batch_size: the exact global batch of every configuration.  If None, ``gradient_accumulation_count``
            applies.
        global_batch_from: the source of the global batch size, for messages.
        gradient_accumulation_count: the count of every configuration.  If this and the global batch size are None, each
            configuration uses ``default_count``.
    """

    base: PlannedProgram
    num_ipus: int
    micro_batch_sizes: Tuple[int, ...] = MICRO_BATCHES
    schedules: Tuple[str, ...] = SCHEDULES
    more_micro_batch_sizes: Tuple[int, ...] = ()
    free: Tuple[str, ...] = ()
    recomputation: Optional[bool] = None
    proportions: Optional[Proportions] = None
    stage_proportions: bool = True
    num_replicas: Optional[int] = None
    global_batch_size: Optional[int] = None
    global_batch_from: str = "--global-batch-size"
    gradient_accumulation_count: Optional[int] = None

    def shapes(self, all_of_them: bool = False) -> Iterator[PlannedProgram]:
        """Yields one replica of every pipeline to try, largest micro-batches first.

        Args:
            all_of_them: whether to include those that are only compared with the fastest configuration.
        """
        most = 1 << (self.num_ipus.bit_length() - 1)
        sizes = {*self.micro_batch_sizes, *(self.more_micro_batch_sizes if all_of_them else ())}
        for size in sorted(sizes, reverse=True):
            each = replace(self.base, micro_batch_size=size, num_replicas=1, device_mapping=None)
            single = replace(each, num_stages=1, schedule=GROUPED)
            if self.recomputation is not True:
                yield single
            stages = [1 << power for power in range(1, most.bit_length())]
            for schedule in self.schedules:
                if schedule != SEQUENTIAL:
                    yield from (replace(each, num_stages=k, schedule=schedule) for k in stages)
                elif self.recomputation is not False and each.training:
                    segments = ALL_SEGMENTS if all_of_them else SEGMENTS
                    yield from (replace(each, num_stages=k, schedule=schedule) for k in segments)

    def variants(self, settings: PlannedProgram, names: Sequence[str]) -> List[PlannedProgram]:
        """Returns the settings with each free setting among ``names`` on and off, where it makes a difference."""
        variants = [settings]
        for name in trial_settings(settings):
            if name not in self.free or name not in names:
                continue
            changes: List[Dict[str, Any]] = [{name: True}, {name: False}]
            variants = [replace(each, **change) for each in variants for change in changes]
        return variants

    def counts(self, settings: PlannedProgram) -> List[Tuple[int, int]]:
        """Returns the legal (replicas, gradient accumulation) pairs to try for a pipeline."""
        counts, base = [], settings.order.multiple(settings.num_stages)
        for replicas in self.replicas(settings):
            count, rest = self.gradient_accumulation_count, 0
            if self.global_batch_size is not None:
                count, rest = divmod(self.global_batch_size, settings.micro_batch_size * replicas)
            elif count is None:
                count = default_count(settings.schedule, settings.num_stages)
            if count and not rest and count % base == 0:
                counts.append((replicas, count))
        return counts

    def programs(
        self, most_stages: int, names: Sequence[str], all_of_them: bool = False
    ) -> Iterator[Tuple[List[PlannedProgram], List[Tuple[int, int]]]]:
        """Yields every pipeline to try, as settings that differ only in availableMemoryProportion, and its ``counts``.

        Args:
            names, all_of_them: see ``variants`` and ``shapes``.
        """
        for shape in self.shapes(all_of_them):
            for settings in self.variants(shape, names):
                counts = self.counts(settings)
                if counts and settings.num_stages <= most_stages:
                    recomputations = True if settings.order.is_sequential else self.recomputation
                    for group in candidates(settings, recomputations, self.proportions):
                        yield group, counts

    @property
    def has_programs(self) -> bool:
        """Tells whether the batch is legal for any pipeline."""
        return any(map(self.counts, self.shapes(all_of_them=True)))

    def with_global_batch_size(self, size: int) -> "SearchSpace":
        """Returns the same space for another global batch; micro-batches that were open stay open."""
        sizes = micro_batches(size), all_micro_batches(size)
        is_open = bool(self.more_micro_batch_sizes)
        return replace(
            self,
            global_batch_size=size,
            micro_batch_sizes=sizes[0] if is_open else self.micro_batch_sizes,
            more_micro_batch_sizes=sizes[1] if is_open else (),
        )

    def replicas(self, settings: PlannedProgram) -> List[int]:
        """Returns the numbers of replicas to try for a pipeline."""
        most = self.num_ipus // next_power_of_two(settings.num_ipus_per_replica)
        numbers = {most} | {1 << power for power in range(most.bit_length()) if 1 << power <= most}
        if self.num_replicas is not None:
            numbers = {self.num_replicas} if self.num_replicas <= most else set()
        group = settings.dbn_replica_group_size
        if group > 1:
            # Replicas share batch norm statistics in whole groups, with each replica on one IPU.
            is_whole = settings.num_ipus_per_replica == 1
            numbers = {count for count in numbers if is_whole and count % group == 0}
        return sorted(numbers, reverse=True)


def micro_batches(global_batch_size: Optional[int]) -> Tuple[int, ...]:
    """Returns the micro-batch sizes to try if none is given: powers of two and divisors of the global batch."""
    sizes = set(MICRO_BATCHES)
    if global_batch_size is not None:
        sizes |= {size for size in divisors(global_batch_size) if size <= max(MICRO_BATCHES)}
    return tuple(sorted(sizes))


def all_micro_batches(global_batch_size: Optional[int]) -> Tuple[int, ...]:
    """Returns the micro-batch sizes to search for the fastest configuration.

    These are all divisors of the global batch, whatever their size; without a global batch, all sizes up to the largest
    of the others.
    """
    if global_batch_size is not None:
        return tuple(divisors(global_batch_size))
    return tuple(range(1, max(MICRO_BATCHES) + 1))


def trial_settings(settings: PlannedProgram) -> Tuple[str, ...]:
    """Returns the settings of ``FREE`` that make a difference to a program with these settings."""
    matters = (
        settings.precision != "32.32",
        settings.training and settings.optimizer_slots > 0,
        True,
    )
    return tuple(name for name, does in zip(FREE, matters) if does)


def default_count(schedule: str, num_stages: int) -> int:
    """Returns the number of micro-batches to accumulate if none is given.

    The smallest legal count with at least 16 micro-batches per stage: filling and draining a Grouped pipeline then
    takes less than an eighth of the ticks.
    """
    if num_stages == 1:
        return 16
    base = overlap_length(schedule, num_stages)
    return -(-16 * num_stages // base) * base


def search(planner: Planner, space: SearchSpace, row: int = 1) -> Tuple[Candidate, Tuple[ParetoRow, ...]]:
    """Returns a configuration of the Pareto front, and the front: the table's rows, fastest first, then the others.

    Args:
        row: the row of the front to return, counted from 1; the first has the highest predicted throughput.

    Raises:
        ConfigurationError: no configuration reaches the global batch size, or the front has no such row.
        InfeasibleError: nothing fits.
    """
    if not space.has_programs:
        raise _no_batch(space)
    tries_transfer = "eight_bit_transfer" in space.free
    if tries_transfer:
        space = replace(space, base=replace(space.base, eight_bit_transfer=True))
    for limit in LIMITS:
        tried = _compared(planner, space, limit)
        best = max((candidate.prediction.images_per_s for candidate in tried), default=0.0)
        tried += _fastest(planner, space, limit, best)
        if not tried:
            continue
        front = _proved(planner, _front(tried), limit)
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
    """Returns the error for a search without a fit: the obstacle in the smallest configuration, and what would fit."""

    def options(searched: SearchSpace, all_of_them: bool = False) -> Iterator[PlannedProgram]:
        smallest = replace(searched, proportions=searched.proportions or uniform(min(PROPORTIONS)))
        for (settings,), counts in smallest.programs(len(planner.starts), (), all_of_them):
            yield replace(settings, gradient_accumulation_count=max(count for _, count in counts))

    def ways(limit: float) -> List[str]:
        def fits(**changes: object) -> bool:
            return any(planner.fits(each, limit) for each in options(replace(space, **changes)))  # type: ignore[arg-type]

        powers = (1 << power for power in range(planner.system.num_ipus.bit_length()))
        ipus = next((n for n in powers if n > space.num_ipus and fits(num_ipus=n)), None)
        size = largest_that_fits(smaller, lambda n: fits(micro_batch_sizes=(n,)))
        words = (("--ipus", ipus), ("--micro-batch-size", size))
        return [f"{flag} {value}" for flag, value in words if value is not None]

    def size_of(settings: PlannedProgram) -> Tuple[bool, int]:
        # Segments on one IPU have no bound of their least memory, so they come last.
        return settings.segments_on_one_ipu, settings.micro_batch_size

    tried = list(options(space, all_of_them=True))
    if not tried:
        return InfeasibleError(
            f"{planner.graph.model} can be cut into {counted(len(planner.starts), 'stage')}, too few for the pipelines "
            "that the options allow",
            "use --recomputation off, with which one stage is tried, too",
        )
    first = min(map(size_of, tried))
    least = min((s for s in tried if size_of(s) == first), key=planner.least_fill)
    smaller: Sequence[int] = range(min(space.micro_batch_sizes) - 1, 0, -1)
    if space.global_batch_size is not None:
        smaller = [size for size in smaller if space.global_batch_size % size == 0]
    return infeasible_search(
        planner, least, num_ipus=space.num_ipus, ways=hint_of_ways(ways(LIMITS[0]), ways(max(LIMITS)))
    )


def _compared(planner: Planner, space: SearchSpace, limit: float) -> List[Candidate]:
    """Returns the configurations that fit, without those known to be worse than another."""
    compared: List[Candidate] = []
    for group, counts in space.programs(len(planner.starts), FREE[:1]):
        for settings in group:
            one = replace(settings, gradient_accumulation_count=counts[0][1])
            if not planner.fits(one, limit) or _is_dominated(planner, one, counts, compared):
                continue
            candidate = planner.best(one, limit, _EVALUATIONS)
            if candidate is not None:
                compared += [_with_replicas(planner, candidate, r, count) for r, count in counts]
    return compared


def _fastest(planner: Planner, space: SearchSpace, limit: float, images_per_s: float) -> List[Candidate]:
    """Returns the fastest configuration in the space that fits; an empty list if none exceeds ``images_per_s``."""
    is_open = space.stage_proportions and space.proportions is None
    choices = [
        replace(settings, num_replicas=replicas, gradient_accumulation_count=count)
        for group, counts in space.programs(len(planner.starts), FREE[:2], all_of_them=True)
        for settings in tried_of(group, is_open)
        for replicas, count in counts
    ]
    fastest = planner.fastest(choices, limit, is_open, images_per_s)
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
    """Returns the same pipeline in several replicas; its splits stay the fastest, as a tick does not depend on them."""
    settings = replace(candidate.settings, num_replicas=num_replicas, gradient_accumulation_count=count)
    if settings == candidate.settings:
        return candidate
    if (count > 1) != (candidate.settings.gradient_accumulation_count > 1):
        changed = forecast(planner.graph, candidate.splits, settings, planner.system)
    else:  # the memory of a replica stays
        times = predict(planner.graph, candidate.splits, settings, planner.system)
        changed = replace(candidate.forecast, times=times)
    return replace(candidate, settings=settings, forecast=changed)


def _proved(planner: Planner, front: Sequence[Candidate], limit: float) -> List[Candidate]:
    """Returns the front of these configurations, each searched until its proof."""
    proved = [c if c.solution.optimal else planner.best(c.settings, limit) for c in front]
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
    settings = replace(candidate.settings, eight_bit_transfer=False)
    times = predict(planner.graph, candidate.splits, settings, planner.system)
    if times.images_per_s < candidate.prediction.images_per_s * (1 - SAME_SPEED):
        return candidate
    return replace(candidate, settings=settings, forecast=replace(candidate.forecast, times=times))


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
        **{name: getattr(settings, name) for name in _OF_A_ROW},
        ipus_per_replica=settings.num_ipus_per_replica,
        num_ipus=settings.occupied_ipus,
        half_partials=settings.half_partials and settings.precision != "32.32",
        optimizer_state_offloading=settings.offloads_optimizer_state and settings.optimizer_slots > 0,
        splits=candidate.splits,
        predicted_images_per_s=prediction.images_per_s,
        predicted_latency_s=prediction.latency_s,
        predicted_fill=candidate.predicted_fill,
        verdict=candidate.verdict,
        best=best,
    )


_OF_A_ROW = (
    *("num_stages", "schedule", "micro_batch_size", "gradient_accumulation_count", "num_replicas"),
    *("recomputation", "eight_bit_transfer", "available_memory_proportion"),
)


def _no_batch(space: SearchSpace) -> ConfigurationError:
    """Returns the error that no pipeline has the batch, with the nearest global batch sizes that one has."""
    total, ipus = space.global_batch_size, counted(space.num_ipus, "IPU")
    if total is None:
        return ConfigurationError(
            f"--gradient-accumulation-count {space.gradient_accumulation_count}: no schedule allows it with {ipus}",
            "leave it out",
        )

    def others() -> Iterator[int]:
        for distance in range(1, _FARTHEST):
            yield from (size for size in (total - distance, total + distance) if size > 0)

    sizes = ", ".join(map(str, sorted(space.micro_batch_sizes)))
    is_open = bool(space.more_micro_batch_sizes)
    near = [size for size in others() if space.with_global_batch_size(size).has_programs][:2]
    smaller = [
        size
        for size in (() if is_open else reversed(divisors(total)))
        if size <= max(MICRO_BATCHES) and replace(space, micro_batch_sizes=(size,)).has_programs
    ][:2]
    hints = [f"--micro-batch-size {' or '.join(map(str, sorted(smaller)))}"] if smaller else []
    hints += [f"--global-batch-size {' or '.join(map(str, sorted(near)))}"] if near else []
    micro = "any micro-batch" if is_open else f"micro-batch ({sizes})"
    return ConfigurationError(
        f"{space.global_batch_from} {total} is not a multiple of {micro} x replicas x a legal number of accumulated "
        f"micro-batches in any configuration of {ipus}",
        "use " + (", or ".join(hints) or "other options"),
    )
