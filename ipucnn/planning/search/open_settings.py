"""The open settings of a question: one mapping from each setting to the values to try.  A kept one has one value.

:func:`choices` varies the settings of a program whose stages are given; a :class:`Space` also varies the stages, the
schedule, the micro-batch and the replicas, within a number of IPUs.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.planning.program import (
    PROPORTIONS,
    Placement,
    PlannedProgram,
    ProgramVariants,
    given_proportions,
    uniform,
)
from ipucnn.planning.schedules import GROUPED, SCHEDULES, SEQUENTIAL
from ipucnn.text import counted
from ipucnn.training.batching import divisors, next_power_of_two, overlap_length

OpenSettings = Mapping[str, Tuple[Any, ...]]
"""Setting (a field of ``PlannedProgram``, or "segments" for Sequential stages on one IPU) -> the values to try."""

# The values to try if none is given.
OPEN: OpenSettings = {
    "schedule": SCHEDULES,
    "recomputation": (False, True),
    "available_memory_proportion": tuple(map(uniform, PROPORTIONS)),
    "half_partials": (True, False),
    "optimizer_state_offloading": (True, False),
    "eight_bit_transfer": (True, False),
    "micro_batch_size": tuple(range(1, 65)),
    "segments": tuple(range(2, 17)),
}
# Fewer values, with which programs are compared.  The fastest program of all is searched among those above.
COMPARED: OpenSettings = {"micro_batch_size": (1, 2, 4, 8, 16, 32, 64), "segments": (2, 4, 8)}

# Settings that a program with given stages keeps.
FREE = ("half_partials", "optimizer_state_offloading", "eight_bit_transfer")

# The largest difference of global batch sizes that a hint names.
_FARTHEST = 1000


def proportions_to_try(config: RunConfig, num_stages: int) -> Tuple[Any, ...]:
    """Returns the values of availableMemoryProportion to try: the configuration's, else the open ones."""
    given = given_proportions(config, num_stages)
    return OPEN["available_memory_proportion"] if given is None else (given,)


def trial_settings(settings: PlannedProgram) -> Tuple[str, ...]:
    """Returns the settings of ``FREE`` that make a difference to a program with these settings."""
    matters = (
        settings.precision != "32.32",
        settings.training and settings.optimizer_slots > 0,
        True,
    )
    return tuple(name for name, does in zip(FREE, matters) if does)


def choices(settings: PlannedProgram, values: OpenSettings, by_stage: bool = False) -> List[ProgramVariants]:
    """Returns a program with every combination of the open settings that make a difference to it.

    Args:
        values: the values of recomputation, availableMemoryProportion and settings of ``FREE``; those of others are
            not read, and a setting without values keeps its own.
        by_stage: whether each stage may have another availableMemoryProportion.
    """
    names = [*(name for name in trial_settings(settings) if name in values), "recomputation"]
    tried = [values[name] for name in names[:-1]]
    if settings.training and settings.num_stages > 1:
        tried.append(values.get("recomputation", (settings.recomputation,)))
    else:
        tried.append((False,))
    shares = values.get("available_memory_proportion", (settings.available_memory_proportion,))
    alternatives: List[ProgramVariants] = []
    for combination in itertools.product(*tried):
        changed: Dict[str, Any] = {**dict(zip(names, combination)), "available_memory_proportion": shares[0]}
        choice = ProgramVariants(replace(settings, **changed), shares)
        if by_stage and len(shares) > 1 and settings.placement is not Placement.SEGMENTS:
            alternatives.append(choice)
        else:
            alternatives += map(ProgramVariants, choice.programs)
    return alternatives


@dataclass(frozen=True)
class Space:
    """The programs of a search over configurations.

    Attributes:
        program: the settings that are not in ``values``.
        values: the open and the kept settings.  Replicas without values: as many as the IPUs hold, and powers of two.
        compared: fewer values of some settings, for the programs that are compared with each other.
        num_ipus: the largest number of IPUs, over all replicas.
        by_stage: whether the stages of the fastest program may differ in availableMemoryProportion.
        global_batch_size: the exact global batch of every program.  If None, ``gradient_accumulation_count`` applies.
        global_batch_text: the global batch size as messages name it.
        gradient_accumulation_count: the count of every program.  If this and the global batch size are None, each has
            ``default_count``.
    """

    program: PlannedProgram
    values: OpenSettings
    compared: OpenSettings
    num_ipus: int
    by_stage: bool = True
    global_batch_size: Optional[int] = None
    global_batch_text: str = ""
    gradient_accumulation_count: Optional[int] = None

    @property
    def micro_batch_is_open(self) -> bool:
        return len(self.values["micro_batch_size"]) > 1

    def with_values(self, **values: Tuple[object, ...]) -> "Space":
        """Returns the same search with other values of some settings."""
        return replace(self, values={**self.values, **values}, compared={**self.compared, **values})

    def _pipelines(self, values: OpenSettings) -> Iterator[PlannedProgram]:
        """Yields one replica of every pipeline to try, the largest micro-batches first."""
        recomputations = values["recomputation"]
        most = self.num_ipus.bit_length()
        for size in sorted(values["micro_batch_size"], reverse=True):
            each = replace(self.program, micro_batch_size=size, num_replicas=1, device_mapping=None)
            if False in recomputations:
                yield replace(each, num_stages=1, schedule=GROUPED)
            for schedule in values["schedule"]:
                counts = [1 << power for power in range(1, most)]
                if schedule == SEQUENTIAL:
                    counts = list(values["segments"]) if True in recomputations and each.training else []
                yield from (replace(each, num_stages=count, schedule=schedule) for count in counts)

    def programs(
        self, most_stages: int, compared: bool = False
    ) -> Iterator[Tuple[List[ProgramVariants], List[Tuple[int, int]]]]:
        """Yields every pipeline to try, with the values of its other settings, and its ``counts``.

        Programs that accumulate gradients take more memory than those that do not, so the two kinds come separately.

        Args:
            compared: whether to yield only those that are compared.
        """
        values = {**self.values, **(self.compared if compared else {})}
        # Whether images travel as bytes makes no difference to splits.
        values["eight_bit_transfer"] = values["eight_bit_transfer"][:1]
        for program in self._pipelines(values):
            counts = self.counts(program) if program.num_stages <= most_stages else []
            is_segmented = program.placement is Placement.SEGMENTS
            tried = {**values, "recomputation": (True,)} if is_segmented else values
            for accumulates in (False, True):
                alike = [pair for pair in counts if (pair[1] > 1) == accumulates]
                if alike:
                    yield choices(program, tried, self.by_stage and not compared), alike

    def counts(self, program: PlannedProgram) -> List[Tuple[int, int]]:
        """Returns the legal (replicas, gradient accumulation) pairs to try for a pipeline."""
        counts, base = [], program.order.multiple(program.num_stages)
        for replicas in self._replicas(program):
            count, rest = self.gradient_accumulation_count, 0
            if self.global_batch_size is not None:
                count, rest = divmod(self.global_batch_size, program.micro_batch_size * replicas)
            elif count is None:
                count = default_count(program.schedule, program.num_stages)
            if count and not rest and count % base == 0:
                counts.append((replicas, count))
        return counts

    def _replicas(self, program: PlannedProgram) -> List[int]:
        """Returns the numbers of replicas to try for a pipeline."""
        most = self.num_ipus // next_power_of_two(program.num_ipus_per_replica)
        numbers = {most, *(1 << power for power in range(most.bit_length()))}
        if "num_replicas" in self.values:
            numbers = {count for count in self.values["num_replicas"] if count <= most}
        group = program.dbn_replica_group_size
        if group > 1:
            # Replicas share batch norm statistics in whole groups, with each replica on one IPU.
            is_whole = program.num_ipus_per_replica == 1
            numbers = {count for count in numbers if is_whole and count % group == 0}
        return sorted(numbers, reverse=True)

    @property
    def has_programs(self) -> bool:
        """Tells whether the batch is legal for any pipeline."""
        return any(map(self.counts, self._pipelines(self.values)))

    def no_batch(self) -> ConfigurationError:
        """Returns the error that no pipeline has the batch, with the nearest global batch sizes that one has."""
        total, ipus = self.global_batch_size, counted(self.num_ipus, "IPU")
        if total is None:
            return ConfigurationError(
                f"--gradient-accumulation-count {self.gradient_accumulation_count}: no schedule allows it with {ipus}",
                "leave it out",
            )

        def with_batch(size: int) -> "Space":
            sizes = tuple(divisors(size)) if self.micro_batch_is_open else self.values["micro_batch_size"]
            return replace(self, global_batch_size=size).with_values(micro_batch_size=sizes)

        distances = (sign * distance for distance in range(1, _FARTHEST) for sign in (-1, 1))
        others = (total + distance for distance in distances if total + distance > 0)
        near = itertools.islice((size for size in others if with_batch(size).has_programs), 2)
        smaller: List[int] = []
        if not self.micro_batch_is_open:
            sizes = [size for size in reversed(divisors(total)) if size <= max(COMPARED["micro_batch_size"])]
            smaller = [size for size in sizes if self.with_values(micro_batch_size=(size,)).has_programs][:2]
        named = {"--micro-batch-size": smaller, "--global-batch-size": list(near)}
        hints = [f"{flag} {' or '.join(map(str, sorted(sizes)))}" for flag, sizes in named.items() if sizes]
        (size, *_) = self.values["micro_batch_size"]
        micro = "any micro-batch" if self.micro_batch_is_open else f"micro-batch ({size})"
        return ConfigurationError(
            f"{self.global_batch_text} is not a multiple of {micro} x replicas x a legal number of accumulated "
            f"micro-batches in any configuration of {ipus}",
            "use " + (", or ".join(hints) or "other options"),
        )


def micro_batches(global_batch_size: Optional[int], compared: bool = False) -> Tuple[int, ...]:
    """Returns the micro-batch sizes to try if none is given.

    These are all divisors of the global batch, whatever their size; without a global batch, all up to the largest of
    ``COMPARED``.

    Args:
        compared: whether to return those to compare: powers of two, and divisors up to the largest.
    """
    some = COMPARED["micro_batch_size"]
    if global_batch_size is None:
        return some if compared else OPEN["micro_batch_size"]
    sizes = divisors(global_batch_size)
    return tuple(sorted({*some, *(size for size in sizes if size <= max(some))} if compared else sizes))


def default_count(schedule: str, num_stages: int) -> int:
    """Returns the number of micro-batches to accumulate if none is given.

    The smallest legal count with at least 16 micro-batches per stage: filling and draining a Grouped pipeline then
    takes less than an eighth of the ticks.
    """
    if num_stages == 1:
        return 16
    base = overlap_length(schedule, num_stages)
    return -(-16 * num_stages // base) * base
