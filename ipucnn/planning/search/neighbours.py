"""Neighbours of a program: what would fit, and what would be faster.

:func:`neighbours` is the one ordered list of changes of a program with splits.  It gives the hint of a run that ran out
of memory and the "if too large" of a plan (``first_that_fits``), the "next changes" of a plan (``next_changes``), and
the table of single optimisations (``optimisations``).  If no splits fit, the steps of one option each, more stages or
IPUs and smaller micro-batches, say what would (``why_no_fit`` for given stages, ``nothing_fits`` for a search).  The
options to type follow from the settings before and after a change (``flags_between``).
"""

import functools
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from ipucnn.aliases import KerasModel, MemoryAdvice
from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.errors import ConfigurationError, InfeasibleError, UserError
from ipucnn.hardware import smallest_system
from ipucnn.models.registry import is_network_file
from ipucnn.planning.cost.memory import FITS_BELOW
from ipucnn.planning.forecast import Forecast, forecast
from ipucnn.planning.graphs.layer_graph import unknown_layers
from ipucnn.planning.pipeline_plan import Change, NoFit
from ipucnn.planning.program import (
    PROPORTIONS,
    Placement,
    PlannedProgram,
    largest,
    one_stage_program,
    percentages,
    planned_program,
    uniform,
)
from ipucnn.planning.schedules import GROUPED, INTERLEAVED
from ipucnn.planning.search.exact import blocking_ranges
from ipucnn.planning.search.open_settings import FREE, Space
from ipucnn.planning.search.planner import LIMITS, Candidate, Planner
from ipucnn.text import counted, percent
from ipucnn.training.batching import next_power_of_two
from ipucnn.training.program import Layout, evaluation_replicas

# Dynamic programs for the splits of a change: a hint needs splits that fit, not a proof.
_EVALUATIONS = 4
_MOST_STAGES = 16
# Segments of one IPU to try at least.
_MOST_SEGMENTS = 16
# A program that ran out of memory by an unknown amount is assumed to have exceeded it by a tenth.
_UNKNOWN_OVERUSE = 1.1
# The least gain worth a line, and the number of lines.
_LEAST_GAIN, _MOST_GAINS = 1.01, 3

# Settings that may change.
_CHANGING = (
    *("micro_batch_size", "gradient_accumulation_count", "recomputation", "available_memory_proportion"),
    *("optimizer_state_offloading", "half_partials", "eight_bit_transfer", "schedule", "precision"),
)

# Settings on which the multiple depends to which a global batch is rounded.
_ROUNDING = ("micro_batch_size", "gradient_accumulation_count", "num_replicas", "num_stages", "schedule")


def flags_between(
    before: PlannedProgram,
    after: PlannedProgram,
    splits_before: Sequence[str],
    splits: Sequence[str],
    global_batch_size: Optional[int] = None,
) -> Tuple[str, ...]:
    """Returns the options to add to the command of a program to get another one.

    Args:
        global_batch_size: that of the command, which then says nothing about gradient accumulation: the two exclude
            each other.  It is rounded anew for a changed batch or pipeline.
    """
    words: List[str] = []
    is_rounded_anew = any(getattr(before, name) != getattr(after, name) for name in _ROUNDING)
    for name in _CHANGING:
        value, spec = getattr(after, name), BY_NAME["pipeline_schedule" if name == "schedule" else name]
        if value == getattr(before, name) or (name == "gradient_accumulation_count" and not after.training):
            continue
        if name == "gradient_accumulation_count" and global_batch_size is not None:
            continue
        if spec.is_bool:
            words.append(spec.flag if value else f"--no-{spec.key}")
        elif name == "available_memory_proportion":
            words += [spec.flag, *(f"{share:g}" for share in percentages(value))]
        else:
            words += [spec.flag, str(value)]
    if is_rounded_anew and global_batch_size not in (None, after.global_batch_size):
        words += [BY_NAME["global_batch_size"].flag, str(after.global_batch_size)]
    return (*words, *(("--pipeline-splits", *splits) if tuple(splits) != tuple(splits_before) else ()))


# --- the list

FASTER, SMALLER, OTHER = "faster", "smaller", "other"

# Setting -> values that may make a program faster, and further values.
_VALUES: Dict[str, Tuple[Tuple[Any, ...], Tuple[Any, ...]]] = {
    "eight_bit_transfer": ((True,), (False,)),
    "precision": (("16.16",), ("32.32",)),
    "half_partials": ((True,), (False,)),
    "recomputation": ((False,), (True,)),
    "optimizer_state_offloading": ((False,), (True,)),
    "available_memory_proportion": (
        (uniform(0.4), uniform(0.2)),
        (uniform(PROPORTIONS[-1]), uniform(PROPORTIONS[0])),
    ),
    "schedule": ((), (GROUPED, INTERLEAVED)),
}


@dataclass(frozen=True)
class Neighbour:
    """A program with a change.

    Attributes:
        aim: FASTER for one that may be faster, SMALLER for one that takes less memory, OTHER for the rest.
        setting: the one setting that differs, "pipelining" for a program without a pipeline; "" if several may.
        splits: the splits that it has; None for splits that the planner is to choose.
    """

    aim: str
    setting: str
    program: PlannedProgram
    splits: Optional[Tuple[str, ...]]


def neighbours(program: PlannedProgram, splits: Tuple[str, ...], max_ipus: int = 1) -> Iterator[Neighbour]:
    """Yields the changes to try, the smallest first.

    First come changes of one setting that may make the program faster, then those that make it smaller: changes that
    affect no result (recomputation, a smaller availableMemoryProportion, both, optimizer state outside the chip, other
    splits, the Interleaved schedule); a smaller micro-batch with proportionally more accumulation; more stages; 16-bit
    numbers; more stages and smaller micro-batches.  Last come the other values of single settings.
    """
    yield from _of_one_setting(program, splits, FASTER)
    for smaller in (program, *_smaller_micro_batches(program)):
        if smaller != program:
            yield Neighbour(SMALLER, "", smaller, splits)
        yield from _without_effect_on_results(smaller, splits)
    powers = (1 << power for power in range(1, _MOST_STAGES.bit_length()))
    counts = [k for k in powers if k > program.num_stages and k * program.num_replicas <= max_ipus]
    for stages in counts:
        yield from _more_stages(program, stages)
    if program.precision == "32.32":
        yield Neighbour(SMALLER, "precision", replace(program, precision="16.16"), splits)
    for stages in counts:
        for smaller in _smaller_micro_batches(program):
            yield from _more_stages(smaller, stages)
    yield from _of_one_setting(program, splits, OTHER)
    yield Neighbour(OTHER, "pipelining", _without_pipelining(program), ())


def _of_one_setting(program: PlannedProgram, splits: Tuple[str, ...], aim: str) -> Iterator[Neighbour]:
    for name, (faster, others) in _VALUES.items():
        for value in faster if aim == FASTER else others:
            changed = replace(program, **{name: value})
            if name == "schedule":
                changed = program.with_stages(program.num_stages, value)
            if changed != program:
                yield Neighbour(aim, name, changed, splits)
    count, size = program.gradient_accumulation_count, 2 * program.micro_batch_size
    larger = replace(program, micro_batch_size=size)
    if program.training:
        larger = replace(larger, gradient_accumulation_count=max(1, count // 2))
    is_legal = count % 2 == 0 and count // 2 % program.order.multiple(program.num_stages) == 0
    if aim == FASTER and (is_legal or not program.training):  # the global batch stays
        yield Neighbour(aim, "micro_batch_size", larger, splits)


def _without_pipelining(program: PlannedProgram) -> PlannedProgram:
    """Returns the same IPUs with a whole network on each, with the largest proportions of any stage."""
    return program.restaged(
        1,
        available_memory_proportion=largest(program.available_memory_proportion),
        num_replicas=program.num_replicas * program.num_stages,
        gradient_accumulation_count=math.ceil(program.gradient_accumulation_count / program.num_stages),
        recomputation=False,
    )


_smaller = functools.partial(Neighbour, SMALLER, "")


def _smaller_micro_batches(program: PlannedProgram) -> Iterator[PlannedProgram]:
    """Yields the same global batch in micro-batches of half the size, a quarter, ..., where the schedule allows it."""
    size = program.micro_batch_size // 2
    samples = program.micro_batch_size * program.gradient_accumulation_count
    base = program.order.multiple(program.num_stages)
    while size:
        count = samples // size if program.training else program.gradient_accumulation_count
        if not program.training or samples % (size * base) == 0:
            yield replace(program, micro_batch_size=size, gradient_accumulation_count=count)
        size //= 2


def _more_stages(program: PlannedProgram, stages: int) -> Iterator[Neighbour]:
    """Yields the same program in more stages, one per IPU, with a legal number of accumulated micro-batches."""
    more = program.with_stages(stages, GROUPED if program.order.is_sequential else program.schedule)
    yield _smaller(more, None)
    for smaller in _without_effect_on_results(more, ()):
        yield replace(smaller, splits=None)


def _without_effect_on_results(program: PlannedProgram, splits: Tuple[str, ...]) -> Iterator[Neighbour]:
    piped = program.training and program.num_stages > 1
    recomputed = replace(program, recomputation=piped or program.recomputation)
    if recomputed != program:
        yield _smaller(recomputed, splits)
    for share in PROPORTIONS:
        if _limited(program, share) != program:
            yield _smaller(_limited(program, share), splits)
            if recomputed != program:
                yield _smaller(_limited(recomputed, share), splits)
    offloading = replace(program, optimizer_state_offloading=True)
    if offloading.offloads_optimizer_state and not program.offloads_optimizer_state:
        yield _smaller(offloading, splits)
    if program.num_stages == 1:
        return
    yield _smaller(program, None)
    least = _limited(recomputed, PROPORTIONS[-1])
    if least != program:
        yield _smaller(least, None)
    if piped and program.schedule == GROUPED and program.placement is Placement.ONE_EACH:
        # Interleaved accepts every count that Grouped accepts, but not two stages on one IPU.
        yield _smaller(replace(program, schedule=INTERLEAVED), splits)
        yield _smaller(replace(least, schedule=INTERLEAVED), None)


def _limited(program: PlannedProgram, share: float) -> PlannedProgram:
    """Returns the program with an availableMemoryProportion of at most ``share`` in each stage.

    Nothing changes if the convolutions and the matrix products of all stages have their own proportions: these come
    from options that take precedence over the proposed one.
    """
    shares = program.available_memory_proportion
    if len(shares) == 1 and shares[0].convolution != shares[0].matmul:
        return program
    return replace(program, available_memory_proportion=tuple(stage.limited(share) for stage in shares))


_STAGES, _IPUS, _MICRO_BATCH = "--stages", "--ipus", "--micro-batch-size"


class _Steps(NamedTuple):
    """Changes of one option of a program without splits.

    Attributes:
        values: the values to try, the smallest change first.
        programs: the function from a value to the programs with it, one of which has to fit.
    """

    option: str
    values: Sequence[int]
    programs: Callable[[int], Iterable[PlannedProgram]]

    def nearest(self, planner: Planner, limit: float) -> Optional[int]:
        """Returns the first value with which a program fits; None if there is none.

        Memory grows with the micro-batch, so its largest size is found by bisection.  A size that is not legal counts
        as not fitting.  If bisection meets such a size among those that fit, the result may be a smaller one.
        """

        def fits(value: int) -> bool:
            return any(planner.fits(program, limit) for program in self.programs(value))

        low, high = 0, len(self.values) if self.option == _MICRO_BATCH else 0
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(self.values[middle]) else (middle + 1, high)
        return next((value for value in self.values[low:] if fits(value)), None)


# --- what a program's neighbours answer


@dataclass(frozen=True)
class PredictedChange:
    """A neighbour with the splits that it keeps or gets.

    Attributes:
        flags: the options to add to the command.
        before, after: what is predicted without and with the change.
    """

    flags: Tuple[str, ...]
    program: PlannedProgram
    splits: Tuple[str, ...]
    before: Forecast
    after: Forecast

    @property
    def hint(self) -> str:
        """Returns the advice for a message."""
        fills = percent(self.after.predicted_fill), percent(self.before.predicted_fill)
        return (
            f"predicted to fit: {' '.join(self.flags)} (the fullest IPU at {fills[0]} of its memory instead of "
            f"{fills[1]})"
        )

    @property
    def as_change(self) -> Change:
        """Returns the change as a plan states it; it keeps the splits."""
        ratio = self.after.predicted_images_per_s / self.before.predicted_images_per_s
        return Change(self.flags, ratio, self.after.predicted_fill, self.after.verdict)


def first_that_fits(
    planner: Planner,
    program: PlannedProgram,
    splits: Sequence[str],
    *,
    overuse: Optional[float] = None,
    only: Optional[Collection[str]] = None,
    global_batch_size: Optional[int] = None,
) -> Optional[PredictedChange]:
    """Returns the first of the program's neighbours that is predicted to fit.

    Args:
        program, splits: the program that did not fit.
        overuse: needed over available memory, as reported by the compiler; None if it did not report it.
        only: the options that the command accepts and uses, if not all.
        global_batch_size: that of the command, see ``flags_between``.
    """
    before = forecast(planner.graph, splits, program, planner.system)
    # The compiler's report shows the model's error for this network, so a program counts as fitting only with that
    # margin.
    excess = max(1.0, _UNKNOWN_OVERUSE if overuse is None else overuse)
    allowed = min(FITS_BELOW, before.predicted_fill / excess)

    def is_allowed(flags: Sequence[str]) -> bool:
        return only is None or all(word in only for word in flags if word.startswith("--"))

    for neighbour in neighbours(program, tuple(splits), planner.system.num_ipus):
        changed, chosen = neighbour.program, neighbour.splits
        if neighbour.aim != SMALLER or not is_allowed(flags_between(program, changed, (), ())):
            continue
        if chosen is None:
            candidate = planner.fastest_splits(changed, allowed, max_evaluations=_EVALUATIONS)
            if candidate is None:
                continue
            chosen = candidate.splits
        after = forecast(planner.graph, chosen, changed, planner.system)
        flags = flags_between(program, changed, splits, chosen, global_batch_size)
        if after.predicted_fill < allowed and is_allowed(flags):
            return PredictedChange(flags, changed, chosen, before, after)
    return None


_KEEPING_SPLITS = (
    *("--recomputation", "--available-memory-proportion", "--optimizer-state-offloading"),
    *("--micro-batch-size", "--gradient-accumulation-count"),
)


def next_changes(planner: Planner, candidate: Candidate) -> Tuple[Tuple[Change, ...], Optional[Change]]:
    """Returns the one-setting changes that make a program fastest, and the change in case it does not fit.

    All keep the splits and everything that they do not name; ``plan-splits`` would choose these again for the changed
    setting.
    """
    program, splits = candidate.settings, candidate.splits
    if candidate.verdict == "does not fit":
        return (), None
    best: Dict[str, Change] = {}  # the best value of each option
    gains = []
    for neighbour in neighbours(program, splits):
        if neighbour.aim == FASTER:
            after = forecast(planner.graph, splits, neighbour.program, planner.system)
            flags = flags_between(program, neighbour.program, (), ())
            gains.append(
                PredictedChange(flags, neighbour.program, splits, candidate.forecast, after).as_change
            )
    for one in sorted(gains, key=lambda one: (-round(one.ratio, 2), one.predicted_fill)):
        if one.ratio >= _LEAST_GAIN and one.verdict != "does not fit":
            best.setdefault(one.flags[0], one)
    smaller = first_that_fits(planner, program, splits, only=_KEEPING_SPLITS)
    return tuple(best.values())[:_MOST_GAINS], None if smaller is None else smaller.as_change


# --- the optimisations of Graphcore's public U-Net


@dataclass(frozen=True)
class Optimisation:
    """One optimisation: the program's current setting, the alternative, and the alternative's effect.

    Attributes:
        number: the number in the public README.
        option: the flag of ``plan-splits``, or the fact that determines the setting.
        here, instead: the setting of the program, and the other one.
        outcome: the prediction with ``instead``; None if it is not modelled.
        note: why it is not modelled, or what the prediction leaves out.
    """

    number: int
    name: str
    option: str
    here: str
    instead: str
    outcome: Optional[Forecast]
    note: str = ""


_SHARES = "available_memory_proportion"
_EXCHANGE = "--internal-exchange-optimization-target"
# Number, name, option, and the setting that changes; "" if no setting of a program does.
_OPTIMISATIONS = (
    (1, "pipelining", "--pipeline-splits", "pipelining"),
    (2, "reduced precision", "--precision", "precision"),
    (2, "16-bit partials", "--half-partials", "half_partials"),
    (3, "loss scaling", "--loss-scaling", ""),
    (4, "recomputation", "--recomputation on|off", "recomputation"),
    (5, "convolution options", "--available-memory-proportion", _SHARES),
    (6, "schedule", "--pipeline-schedule", "schedule"),
    (7, "internal exchange", _EXCHANGE, ""),
    (8, "IPU dropout", "always on IPUs", ""),
    (9, "options of each stage", "--available-memory-proportion, one per stage", "stages"),
    (10, "offloaded optimizer state", "--optimizer-state-offloading", "optimizer_state_offloading"),
    (11, "crops before they are sent", "always", ""),
)


def optimisations(
    planner: Planner,
    splits: Sequence[str],
    program: PlannedProgram,
    *,
    loss_scaling: float = 0.0,
    exchange_target: Optional[str] = None,
) -> Tuple[Forecast, List[Optimisation]]:
    """Returns the program's own prediction, and all eleven optimisations that the README of that application names.

    Args:
        splits: legal splits, with each of their stages on an IPU of its own.
        loss_scaling: the loss scale; 0 for none.
        exchange_target: the optimisation target of Poplar's internal exchange; None for Poplar's default, which is
            cycles.

    Raises:
        ConfigurationError: no pipeline, stages that share an IPU, or no training.
    """
    if program.num_stages < 2 or program.placement is not Placement.ONE_EACH or not program.training:
        raise ConfigurationError(
            "--optimisations compares settings of a training pipeline with a stage on each IPU",
            "--stages 4 --schedule Interleaved --training",
        )

    def outcome(changed: PlannedProgram) -> Forecast:
        return forecast(planner.graph, splits if changed.num_stages > 1 else (), changed, planner.system)

    # Of several values of a setting the last, and one that may be faster only if there is no other.
    of_settings = [each for aim in (FASTER, OTHER) for each in _of_one_setting(program, tuple(splits), aim)]
    changes = {each.setting: each.program for each in of_settings}
    changes["pipelining"] = _without_pipelining(program)
    if program.proportions_differ:
        changes["stages"] = replace(
            program, available_memory_proportion=largest(program.available_memory_proportion)
        )
    else:
        shares = tuple(map(uniform, PROPORTIONS))
        changes["stages"] = planner.with_largest_proportions(program, splits, shares)
    tried = ", ".join(f"{100 * each:g}" for each in PROPORTIONS)
    count, alone = program.gradient_accumulation_count, changes["pipelining"].gradient_accumulation_count
    notes = {
        1: f"without it recomputation is off, too, and micro-batches are accumulated {count} to {alone}",
        3: "a factor on the loss and its inverse on the gradients: numbers change, not what is computed",
        7: "the model has one figure for exchange code and time",
        8: "drawing a mask again takes time that the model does not have",
        9: f"of {tried}% no stage has room for more" * (changes["stages"] == program),
        11: "what is cropped off is neither sent nor kept",
    }
    target = exchange_target or "cycles"
    words = {
        3: (f"{loss_scaling:g}", "none") if loss_scaling else ("none", "128"),
        7: (target, "cycles" if target == "memory" else "memory"),
        8: ("seed kept", "mask kept"),
        11: ("where they begin", "where they end"),
    }
    base, table = outcome(program), []
    for number, name, option, setting in _OPTIMISATIONS:
        after = outcome(changes[setting]) if setting else base if number == 3 else None
        here, instead = (
            (_word(each, setting) for each in (program, changes[setting])) if setting else words[number]
        )
        table.append(Optimisation(number, name, option, here, instead, after, notes.get(number, "")))
    return base, table


def _word(program: PlannedProgram, setting: str) -> str:
    """Returns a setting's value as a user types it."""
    if setting == "pipelining":
        alone = f"1 stage, {program.num_replicas} replicas"
        return f"{program.num_stages} stages" if program.num_stages > 1 else alone
    value = getattr(program, _SHARES if setting == "stages" else setting)
    if setting in (_SHARES, "stages"):
        return " ".join(f"{share:g}" for share in percentages(value)) + "%"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


# --- why nothing fits, and the nearest programs that do


class NothingFits(InfeasibleError):
    """The error that no splits fit, with the reason as a value.

    Args:
        model: the name of the network.
        no_fit: the certificate.
    """

    def __init__(self, message: str, hint: str, model: str, no_fit: NoFit) -> None:
        super().__init__(message, hint)
        self.model, self.no_fit = model, no_fit

    def to_json(self) -> str:
        """Returns the text for ``--json``: ``no_fit`` as in a plan, without the plan."""
        answer = {"model": self.model, "feasible": False, "no_fit": asdict(self.no_fit)}
        return json.dumps(answer, indent=2) + "\n"


def why_no_fit(
    planner: Planner,
    choices: Sequence[PlannedProgram],
    limit: float,
    max_ipus: int,
    recomputations: Sequence[bool] = (False, True),
) -> NoFit:
    """Returns the certificate of the program with the least memory, and the nearest ones that fit.

    Args:
        choices: the programs, none of which fits within ``limit``; the last takes the least memory.
        max_ipus: the largest number of IPUs per replica to try.
        recomputations: the values to try of programs with more stages than one.
    """
    settings = choices[-1]
    most = max(settings.num_stages, max_ipus)
    is_segmented = settings.placement is Placement.SEGMENTS
    if is_segmented:
        most = max(_MOST_SEGMENTS, 2 * settings.num_stages)
    elif settings.dbn_replica_group_size > 1:
        most = settings.num_stages  # replicas that share statistics have an IPU each
    # From one stage to several, recomputation begins to make a difference.
    is_open = settings.num_stages == 1 and settings.training

    def in_stages(count: int) -> Iterable[PlannedProgram]:
        for each in choices:
            for on in recomputations if is_open else (each.recomputation,):
                yield each.with_stages(count, recomputation=on)

    def with_micro_batch(size: int) -> Iterable[PlannedProgram]:
        return (replace(each, micro_batch_size=size) for each in choices)

    def nearest(limit: float, first: int) -> Tuple[Optional[int], Optional[int]]:
        stages = _Steps(_STAGES, range(first, most + 1), in_stages)
        sizes = _Steps(_MICRO_BATCH, range(settings.micro_batch_size - 1, 0, -1), with_micro_batch)
        return stages.nearest(planner, limit), sizes.nearest(planner, limit)

    fewest, size = nearest(limit, settings.num_stages + 1)
    surely, surely_size = fewest, size
    if limit > LIMITS[0]:
        surely, surely_size = nearest(LIMITS[0], most + 1 if fewest is None else fewest)
    layer, ranges = _certificate(planner, settings, limit)
    return NoFit(
        memory_limit=limit,
        num_stages=settings.num_stages,
        layer=layer,
        ranges=ranges,
        fewest_stages=fewest,
        on_one_ipu=is_segmented,
        most_stages=most,
        largest_micro_batch_size=size,
        fits_from_stages=surely,
        fits_from_micro_batch_size=surely_size,
    )


def nothing_fits(planner: Planner, space: Space) -> InfeasibleError:
    """Returns the error for a search without a fit: the obstacle in the smallest program, and what would fit."""
    shares = space.values["available_memory_proportion"]
    kept = {name: (getattr(space.program, name),) for name in FREE}
    space = space.with_values(available_memory_proportion=shares[-1:], **kept)

    def programs(searched: Space, compared: bool = True) -> Iterator[PlannedProgram]:
        for choices, counts in searched.programs(len(planner.starts), compared):
            (_, count), *_ = counts
            yield from (replace(choice.program, gradient_accumulation_count=count) for choice in choices)

    def size_of(program: PlannedProgram) -> Tuple[bool, int]:
        # Segments on one IPU have no bound of their least memory, so they come last.
        return program.placement is Placement.SEGMENTS, program.micro_batch_size

    tried = list(programs(space, compared=False))
    if not tried:
        return InfeasibleError(
            f"{planner.graph.model} can be cut into {counted(len(planner.starts), 'stage')}, too few for the pipelines "
            "that the options allow",
            "use --recomputation off, with which one stage is tried, too",
        )
    first = min(map(size_of, tried))
    least = min((s for s in tried if size_of(s) == first), key=planner.least_fill)
    smaller: Sequence[int] = range(min(space.values["micro_batch_size"]) - 1, 0, -1)
    if space.global_batch_size is not None:
        smaller = [size for size in smaller if space.global_batch_size % size == 0]
    powers = [1 << power for power in range(planner.system.num_ipus.bit_length())]
    steps = (
        _Steps(
            _IPUS, [n for n in powers if n > space.num_ipus], lambda n: programs(replace(space, num_ipus=n))
        ),
        _Steps(_MICRO_BATCH, smaller, lambda n: programs(space.with_values(micro_batch_size=(n,)))),
    )
    ways = [
        [f"{each.option} {value}" for each in steps for value in [each.nearest(planner, limit)] if value]
        for limit in (LIMITS[0], max(LIMITS))
    ]
    message = (
        f"{planner.graph.model} fits on {counted(space.num_ipus, 'IPU')} of {planner.system.title} in no configuration "
        f"with micro-batches of {least.micro_batch_size} or more"
    )
    where = f"; in {least.num_stages} {least.schedule} stages" if least.num_stages > 1 else "; in one stage"
    obstacle = _in_the_way(*_certificate(planner, least, max(LIMITS)))
    return InfeasibleError(
        message + (where + obstacle if obstacle else ""),
        _hint_of_ways(*ways) or less_memory(planner.graph.model, least),
    )


def _certificate(
    planner: Planner, settings: PlannedProgram, limit: float
) -> Tuple[Optional[str], Tuple[Tuple[str, str], ...]]:
    """Returns the layer that exceeds the memory in any stage, and the runs of layers that do not fit into one stage."""
    blocked = blocking_ranges(planner.tables(settings, limit), settings.num_stages)
    layers = planner.graph.layers
    ends = [*planner.starts[1:], len(layers)]

    def name(item: int) -> str:
        # An item is a layer with those that cannot be cut from it.  The input's name says less than that of the layer
        # that reads it.
        return layers[max(1, planner.starts[item])].name

    layer = next((name(i) for i, j in blocked if j == i + 1), None)
    return layer, tuple((name(i), layers[ends[j - 1] - 1].name) for i, j in blocked)


def infeasible(
    model: str,
    why: NoFit,
    settings: PlannedProgram,
    system_title: str,
    with_stages: Callable[[int], str] = "--stages {}".format,
    assumed_input: Optional[str] = None,
) -> NothingFits:
    """Returns the error for a plan that cannot be made.

    Args:
        with_stages: the function from a number of stages to the options to type.
        assumed_input: a sentence about the assumed input; None if the user gave one.
    """
    place = f"{counted(why.num_stages, 'stage')} on {counted(settings.num_ipus_per_replica, 'IPU')}"
    message = (
        f"{model} does not fit in {place} of {system_title} with micro-batch {settings.micro_batch_size}"
    )
    message += _in_the_way(why.layer, why.ranges)
    ways = ways_to_fit(why, with_stages)
    if ways is not None:
        return NothingFits(message, ways, model, why)
    untried = untried_stages(why, settings)
    tried = f"micro-batch 1 does not fit; {untried[:1].lower()}{untried[1:-1]}; "
    if why.most_stages > why.num_stages:
        where = "segments on one IPU" if why.on_one_ipu else "stages"
        tried = f"neither micro-batch 1 nor up to {why.most_stages} {where} fit: "
    hint = tried + less_memory(model, settings)
    if assumed_input is not None:
        hint += f"; --dataset or --image-size gives another input than is assumed ({assumed_input})"
    return NothingFits(message, hint, model, why)


def untried_stages(why: NoFit, settings: PlannedProgram) -> str:
    """Returns a sentence about the numbers of stages that a certificate says nothing about; "" for a complete one."""
    if why.on_one_ipu:
        return "Pipelines over several IPUs were not tried."
    if why.most_stages > why.num_stages:
        return ""
    if settings.dbn_replica_group_size > 1:
        return "More stages were not tried: replicas that share batch norm statistics have one IPU each."
    return "More stages were not tried: the system has no IPUs for them."


def ways_to_fit(why: NoFit, with_stages: Callable[[int], str], same_stages: str = "") -> Optional[str]:
    """Returns the hint with settings that fit and settings that are uncertain; None if there are none.

    Args:
        with_stages: the function from a number of stages to the options to type.
        same_stages: the options to type beside a smaller micro-batch.
    """

    def ways(stages: Optional[int], size: Optional[int]) -> List[str]:
        ipus = 1 if why.on_one_ipu else next_power_of_two(stages or 1)
        more = [f"{with_stages(stages)} ({counted(ipus, 'IPU')})"] if stages is not None else []
        return more + ([f"{_MICRO_BATCH} {size}{same_stages}"] if size is not None else [])

    return _hint_of_ways(
        ways(why.fits_from_stages, why.fits_from_micro_batch_size),
        ways(why.fewest_stages, why.largest_micro_batch_size),
    )


def _hint_of_ways(surely: Sequence[str], perhaps: Sequence[str]) -> Optional[str]:
    """Returns the hint for options to type: plans that fit, and "uncertain" ones; None if there are none."""
    uncertain = [way for way in perhaps if way not in surely]
    parts = ["this would fit: " + ", or ".join(surely)] if surely else []
    parts += ["uncertain whether this would fit: " + ", or ".join(uncertain)] if uncertain else []
    return "; ".join(parts) or None


def _in_the_way(layer: Optional[str], ranges: Sequence[Tuple[str, str]]) -> str:
    """Returns the end of a message for a certificate; "" if it names nothing."""
    if layer is not None:
        return f": layer '{layer}' alone exceeds an IPU's memory in every stage"
    if not ranges:
        return ""
    first, last = ranges[0]
    more = f", and {counted(len(ranges) - 1, 'more such range')}" if len(ranges) > 1 else ""
    return f": layers '{first}' to '{last}' fit in no stage together{more}"


def less_memory(model: str, settings: PlannedProgram) -> str:
    """Returns the advice for less memory when neither more IPUs nor smaller micro-batches help."""
    precision = "" if settings.precision == "16.16" else ", or --precision 16.16"
    if is_network_file(model):
        return "save the network with a smaller input" + precision
    return "use a smaller --image-size" + precision


# --- advice for a run that ran out of memory


_UNKNOWN = "the planner cannot compute this network, so nothing is predicted"


def training_advice(
    model: KerasModel, name: str, layout: Layout, config: RunConfig, splits: Sequence[str]
) -> MemoryAdvice:
    """Returns the function that makes the advice when training runs out of memory.

    Args:
        model: the model from ``build_model``.
        name: the name of the network.
        layout: batch and stages of the run.
        config: the configuration of the run.
        splits: the layers that open its stages.
    """
    advice = "try a smaller --micro-batch-size, --recomputation or more stages"
    total = config.global_batch_size
    return _advice(
        model, name, lambda: planned_program(config, layout), splits, advice, global_batch_size=total
    )


def prediction_advice(model: KerasModel, name: str, config: RunConfig, command: str) -> MemoryAdvice:
    """Returns the function for advice when evaluation or inference, which have no pipeline, runs out of memory.

    Args:
        model: the model from ``build_model``.
        name: the name of the network.
        config: the configuration of the run.
        command: "evaluate", "infer" or "benchmark"; the hint names only options that it accepts.
    """
    size = BY_NAME["validation_micro_batch_size" if command == "evaluate" else "micro_batch_size"]
    specs = {"--micro-batch-size": size}
    specs.update({BY_NAME[name].flag: BY_NAME[name] for name in ("available_memory_proportion", "precision")})
    renamed = {flag: spec.flag for flag, spec in specs.items() if command in spec.commands}
    advice = (
        f"try a smaller {size.flag}, or use --device cpu" if command in size.commands else "use --device cpu"
    )

    def settings() -> PlannedProgram:
        return one_stage_program(
            config,
            config.validation_micro_batch_size or config.micro_batch_size,
            evaluation_replicas(config),
            training=False,
        )

    nothing = "nothing that was tried is predicted to fit: use --device cpu"
    return _advice(model, name, settings, (), advice, renamed, nothing)


def _advice(
    model: KerasModel,
    name: str,
    make: Callable[[], PlannedProgram],
    splits: Sequence[str],
    advice: str,
    renamed: Optional[Mapping[str, str]] = None,
    nothing: Optional[str] = None,
    global_batch_size: Optional[int] = None,
) -> MemoryAdvice:
    """Returns the function that makes the advice for a program.

    Args:
        make: the function that returns its settings, called only when it ran out of memory: no run fails because of a
            hint.
        advice: the advice if nothing can be predicted.
        renamed: the training options that may be proposed, with their names here; None: all, unchanged.
        nothing: the advice if no change fits.
        global_batch_size: that of the command; None if it has none.
    """

    def advise(overuse: Optional[float], without: Optional[str] = None) -> Optional[str]:
        from ipucnn.planning.graphs import keras_graph

        unknown = _UNKNOWN if without is not None else f"{_UNKNOWN}; {advice}"
        try:
            settings = make()
            graph = keras_graph.graph_of(model, name)
            if unknown_layers(graph):  # The network's layers are estimated, so nothing is promised.
                return unknown
            planner = Planner(graph, smallest_system(settings.occupied_ipus))
            if without is not None:
                return memory_without(planner, splits, settings, without)
            change = first_that_fits(
                planner,
                settings,
                splits,
                overuse=overuse,
                only=renamed,
                global_batch_size=global_batch_size,
            )
        except UserError:
            # The planner does not know the network: the error that is being explained matters more.
            return unknown
        if change is None:
            return nothing
        return replace(change, flags=tuple((renamed or {}).get(word, word) for word in change.flags)).hint

    return advise


def memory_without(planner: Planner, splits: Sequence[str], settings: PlannedProgram, option: str) -> str:
    """Returns what the fullest IPU holds with an option off; the planner assumes that all else is on the IPU."""
    if option == "optimizer_state_offloading":
        settings = replace(settings, optimizer_state_offloading=False)
    fullest = forecast(planner.graph, splits, settings, planner.system).fullest
    held, memory = (f"{value / 2**20:.0f} MiB" for value in (fullest.total_bytes, fullest.capacity_bytes))
    verdict = "" if fullest.fill < FITS_BELOW else ", which does not fit"
    return f"the fullest IPU is then predicted to hold {held} of its {memory}{verdict}"
