"""Neighbours of a program: what would fit, and what would be faster.

One ordered list of changes of a program with splits (``neighbours``) answers both, in a plan and in the hint of a run
that ran out of memory.  If no splits fit, a certificate says why, and how many stages or how small a micro-batch would
(``why_no_fit``).  ``optimisations`` are those of a public list.  The options to type follow from the settings before
and after a change (``flags_between``).
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

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
    Placement,
    PlannedProgram,
    Proportions,
    largest,
    one_stage_program,
    percentages,
    planned_program,
    smallest,
    uniform,
)
from ipucnn.planning.schedules import GROUPED, INTERLEAVED
from ipucnn.planning.search.exact import blocking_ranges
from ipucnn.planning.search.open_settings import PROPORTIONS
from ipucnn.planning.search.planner import LIMITS, Candidate, Planner
from ipucnn.text import counted, percent
from ipucnn.training.batching import next_power_of_two
from ipucnn.training.program import Layout

# Dynamic programs for the splits of a change: a hint needs splits that fit, not a proof.
_EVALUATIONS = 4
_MOST_STAGES = 16
# Segments of one IPU to try at least.
_MOST_SEGMENTS = 16
# A program that ran out of memory by an unknown amount is assumed to have exceeded it by a tenth.
_UNKNOWN_OVERUSE = 1.1
# Shares of temporary memory to try beside ``PROPORTIONS``, and the least gain worth a line.
_MORE_PROPORTIONS, _LEAST_GAIN, _MOST_GAINS = (0.4, 0.2), 1.01, 3

# Settings that may change.
_CHANGING = (
    *("micro_batch_size", "gradient_accumulation_count", "recomputation", "available_memory_proportion"),
    *("optimizer_state_offloading", "half_partials", "eight_bit_transfer", "schedule", "precision"),
)


def flags_between(
    before: PlannedProgram, after: PlannedProgram, splits_before: Sequence[str], splits: Sequence[str]
) -> Tuple[str, ...]:
    """Returns the options to add to the command of a program to get another one."""
    words: List[str] = []
    for name in _CHANGING:
        value, spec = getattr(after, name), BY_NAME["pipeline_schedule" if name == "schedule" else name]
        if value == getattr(before, name) or (name == "gradient_accumulation_count" and not after.training):
            continue
        if spec.is_bool:
            words.append(spec.flag if value else f"--no-{spec.key}")
        elif name == "available_memory_proportion":
            words += [spec.flag, *(f"{share:g}" for share in percentages(value))]
        else:
            words += [spec.flag, str(value)]
    return (*words, *(("--pipeline-splits", *splits) if tuple(splits) != tuple(splits_before) else ()))


# --- the list


@dataclass(frozen=True)
class Neighbour:
    """A program with a change.

    Attributes:
        name: a few words for a change that may make a program faster; "" for one that makes it smaller.
        splits: the splits that it keeps; None for splits that the planner is to choose.
    """

    name: str
    program: PlannedProgram
    splits: Optional[Tuple[str, ...]]


def neighbours(program: PlannedProgram, splits: Tuple[str, ...], max_ipus: int = 1) -> Iterator[Neighbour]:
    """Yields the changes to try, the smallest first.

    First come changes of one setting that may make the program faster, then those that make it smaller: changes that
    affect no result (recomputation, a smaller availableMemoryProportion, both, optimizer state outside the chip, other
    splits, the Interleaved schedule); a smaller micro-batch with proportionally more accumulation; more stages; 16-bit
    numbers; more stages and smaller micro-batches.
    """
    for name, changes in _faster(program).items():
        faster = replace(program, **changes)
        if faster != program:
            yield Neighbour(name, faster, splits)
    for smaller in (program, *_smaller_micro_batches(program)):
        if smaller != program:
            yield Neighbour("", smaller, splits)
        yield from _without_effect_on_results(smaller, splits)
    powers = (1 << power for power in range(1, _MOST_STAGES.bit_length()))
    counts = [k for k in powers if k > program.num_stages and k * program.num_replicas <= max_ipus]
    for stages in counts:
        yield from _more_stages(program, stages)
    if program.precision == "32.32":
        yield Neighbour("", replace(program, precision="16.16"), splits)
    for stages in counts:
        for smaller in _smaller_micro_batches(program):
            yield from _more_stages(smaller, stages)


def _faster(program: PlannedProgram) -> Dict[str, Dict[str, Any]]:
    count, size, stages = (
        program.gradient_accumulation_count,
        2 * program.micro_batch_size,
        program.num_stages,
    )
    changes: Dict[str, Dict[str, Any]] = {
        "8-bit transfer": {"eight_bit_transfer": True},
        "precision 16.16": {"precision": "16.16"},
        "half partials": {"half_partials": program.half_partials or program.precision != "32.32"},
        "no recomputation": {"recomputation": program.recomputation and stages == 1},
    }
    if program.offloads_optimizer_state and program.optimizer_slots > 0:
        changes["optimizer state on the chip"] = {"optimizer_state_offloading": False}
    if not program.training:
        changes[f"micro-batch {size}"] = {"micro_batch_size": size}
    elif count % 2 == 0 and count // 2 % program.order.multiple(stages) == 0:  # the global batch stays
        larger = {"micro_batch_size": size, "gradient_accumulation_count": count // 2}
        changes[f"micro-batch {size}"] = larger
    for share in _MORE_PROPORTIONS:
        changes[f"proportion {100 * share:g} %"] = {"available_memory_proportion": uniform(share)}
    return changes


def _smaller_micro_batches(settings: PlannedProgram) -> List[PlannedProgram]:
    """Returns the same global batch in micro-batches of half the size, a quarter, ..."""
    smaller, size = [], settings.micro_batch_size // 2
    samples = settings.micro_batch_size * settings.gradient_accumulation_count
    while size:
        if not settings.training:
            smaller.append(replace(settings, micro_batch_size=size))
        elif samples % size == 0:
            smaller.append(
                replace(settings, micro_batch_size=size, gradient_accumulation_count=samples // size)
            )
        size //= 2
    return smaller


def _more_stages(settings: PlannedProgram, stages: int) -> Iterator[Neighbour]:
    """Yields the same program in more stages, one per IPU, with a legal number of accumulated micro-batches."""
    schedule = GROUPED if settings.order.is_sequential else settings.schedule
    more = settings.with_stages(stages, schedule)
    yield Neighbour("", more, None)
    for smaller in _without_effect_on_results(more, ()):
        yield replace(smaller, splits=None)


def _without_effect_on_results(settings: PlannedProgram, splits: Tuple[str, ...]) -> Iterator[Neighbour]:
    piped = settings.training and settings.num_stages > 1
    least = replace(settings, recomputation=piped or settings.recomputation)
    if least != settings:
        yield Neighbour("", least, splits)
    for limited in filter(None, (_limited(settings, share) for share in PROPORTIONS)):
        yield Neighbour("", replace(settings, available_memory_proportion=limited), splits)
        if least.recomputation != settings.recomputation:
            yield Neighbour("", replace(least, available_memory_proportion=limited), splits)
    least = replace(
        least,
        available_memory_proportion=_limited(settings, PROPORTIONS[-1])
        or settings.available_memory_proportion,
    )
    offloading = replace(settings, optimizer_state_offloading=True)
    if offloading.offloads_optimizer_state and not settings.offloads_optimizer_state:
        yield Neighbour("", offloading, splits)
    if settings.num_stages == 1:
        return
    yield Neighbour("", settings, None)
    if least != settings:
        yield Neighbour("", least, None)
    if piped and settings.schedule == GROUPED and settings.placement is Placement.ONE_EACH:
        # Interleaved accepts every count that Grouped accepts, but not two stages on one IPU.
        yield Neighbour("", replace(settings, schedule=INTERLEAVED), splits)
        yield Neighbour("", replace(least, schedule=INTERLEAVED), None)


def _limited(settings: PlannedProgram, share: float) -> Optional[Proportions]:
    """Returns availableMemoryProportion of at most ``share`` in each stage; None if that changes nothing.

    If the convolutions and the matrix products of all stages have their own proportions, the result is None, too: these
    come from options that take precedence over the proposed one.
    """
    shares = settings.available_memory_proportion
    if len(shares) == 1 and shares[0].convolution != shares[0].matmul:
        return None
    limited = tuple(stage.limited(share) for stage in shares)
    return None if limited == shares else limited


# --- what a program's neighbours answer


@dataclass(frozen=True)
class Effect:
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

    def as_change(self, name: str) -> Change:
        """Returns the change as a plan states it; it keeps the splits."""
        ratio = self.after.predicted_images_per_s / self.before.predicted_images_per_s
        return Change(name, self.flags, ratio, self.after.predicted_fill, self.after.verdict)


def first_that_fits(
    planner: Planner,
    program: PlannedProgram,
    splits: Sequence[str],
    *,
    overuse: Optional[float] = None,
    only: Optional[Collection[str]] = None,
) -> Optional[Effect]:
    """Returns the first of the program's neighbours that is predicted to fit.

    Args:
        program, splits: the program that did not fit.
        overuse: needed over available memory, as reported by the compiler; None if it did not report it.
        only: the options that the command accepts and uses, if not all.
    """
    before = forecast(planner.graph, splits, program, planner.system)
    # The compiler's report shows the model's error for this network, so a program counts as fitting only with that
    # margin.
    excess = max(1.0, _UNKNOWN_OVERUSE if overuse is None else overuse)
    allowed = min(FITS_BELOW, before.predicted_fill / excess)

    def is_allowed(flags: Sequence[str]) -> bool:
        return only is None or all(word in only for word in flags if word.startswith("--"))

    for neighbour in neighbours(program, tuple(splits), planner.system.num_ipus):
        changed, kept = neighbour.program, neighbour.splits
        if neighbour.name or not is_allowed(flags_between(program, changed, (), ())):
            continue
        chosen = kept if kept is not None else _splits_within(planner, changed, allowed)
        if chosen is None:
            continue
        after = forecast(planner.graph, chosen, changed, planner.system)
        flags = flags_between(program, changed, splits, chosen)
        if after.predicted_fill < allowed and is_allowed(flags):
            return Effect(flags, changed, chosen, before, after)
    return None


def _splits_within(planner: Planner, program: PlannedProgram, limit: float) -> Optional[Tuple[str, ...]]:
    candidate = planner.fastest_splits(program, limit, max_evaluations=_EVALUATIONS)
    return None if candidate is None else candidate.splits


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
        if neighbour.name:
            after = forecast(planner.graph, splits, neighbour.program, planner.system)
            flags = flags_between(program, neighbour.program, (), ())
            effect = Effect(flags, neighbour.program, splits, candidate.forecast, after)
            gains.append(effect.as_change(neighbour.name))
    for one in sorted(gains, key=lambda one: (-round(one.ratio, 2), one.predicted_fill)):
        if one.ratio >= _LEAST_GAIN and one.verdict != "does not fit":
            best.setdefault(one.flags[0], one)
    smaller = first_that_fits(planner, program, splits, only=_KEEPING_SPLITS)
    return tuple(best.values())[:_MOST_GAINS], None if smaller is None else smaller.as_change("")


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


_Row = Tuple[Optional[PlannedProgram], str, str]
"""The changed program (None if it is not modelled), this one's value, and the other."""


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
    count = program.num_stages
    if count < 2 or program.placement is not Placement.ONE_EACH or not program.training:
        raise ConfigurationError(
            "--optimisations compares settings of a training pipeline with a stage on each IPU",
            "--stages 4 --schedule Interleaved --training",
        )

    def switched(setting: str, first: object, second: object) -> _Row:
        here = getattr(program, setting)
        instead = second if here == first else first  # a program with neither is compared with the first
        changes: Dict[str, Any] = {setting: instead}
        return replace(program, **changes), _word(here), _word(instead)

    def shared(shares: Proportions) -> _Row:
        changed = replace(program, available_memory_proportion=shares)
        here, instead = (percentages(each.available_memory_proportion) for each in (program, changed))
        words = [" ".join(f"{value:g}" for value in values) + "%" for values in (here, instead)]
        return changed, words[0], words[1]

    alone, own = _without_pipelining(program), program.available_memory_proportion
    # Poplar's default for all stages; for a program that has it, the smallest proportion that is tried.
    has_default = smallest(own)[0].limited(PROPORTIONS[0]) == uniform(PROPORTIONS[0])[0]
    most, flag = _largest_that_fit(planner, splits, program), "--available-memory-proportion"
    exchange = (
        ("memory", "cycles") if exchange_target == "memory" else (exchange_target or "cycles", "memory")
    )
    tried = ", ".join(f"{100 * each:g}" for each in PROPORTIONS)
    no_room = f"of {tried}% no stage has room for more"
    alone_note = "without it recomputation is off, too, and micro-batches are accumulated "
    alone_note += f"{program.gradient_accumulation_count} to {alone.gradient_accumulation_count}"
    loss_note = "a factor on the loss and its inverse on the gradients: numbers change, not what is computed"
    scales = (f"{loss_scaling:g}", "none") if loss_scaling else ("none", "128")
    offloading = ("optimizer_state_offloading", True, False)
    one_figure = "the model has one figure for exchange code and time"
    drawn_again = "drawing a mask again takes time that the model does not have"
    rows: List[Tuple[int, str, str, _Row, str]] = [
        (
            1,
            "pipelining",
            "--pipeline-splits",
            (alone, f"{count} stages", f"1 stage, {count} replicas"),
            alone_note,
        ),
        (2, "reduced precision", "--precision", switched("precision", "32.32", "16.16"), ""),
        (2, "16-bit partials", "--half-partials", switched("half_partials", True, False), ""),
        (3, "loss scaling", "--loss-scaling", (program, *scales), loss_note),
        (4, "recomputation", "--recomputation on|off", switched("recomputation", True, False), ""),
        (5, "convolution options", flag, shared(uniform(PROPORTIONS[-has_default])), ""),
        (6, "schedule", "--pipeline-schedule", switched("schedule", INTERLEAVED, GROUPED), ""),
        (7, "internal exchange", "--internal-exchange-optimization-target", (None, *exchange), one_figure),
        (8, "IPU dropout", "always on IPUs", (None, "seed kept", "mask kept"), drawn_again),
        (9, "options of each stage", f"{flag}, one per stage", shared(most), no_room if most == own else ""),
        (10, "offloaded optimizer state", "--optimizer-state-offloading", switched(*offloading), ""),
        (
            11,
            "crops before they are sent",
            "always",
            (None, "where they begin", "where they end"),
            "what is cropped off is neither sent nor kept",
        ),
    ]

    def outcome(changed: PlannedProgram) -> Forecast:
        return forecast(planner.graph, splits if changed.num_stages > 1 else (), changed, planner.system)

    table = [
        Optimisation(number, name, option, here, instead, None if changed is None else outcome(changed), note)
        for number, name, option, (changed, here, instead), note in rows
    ]
    return outcome(program), table


def _largest_that_fit(planner: Planner, splits: Sequence[str], settings: PlannedProgram) -> Proportions:
    """Returns each stage's largest proportion with which its IPU surely fits; the largest if stages differ already."""
    if settings.proportions_differ:
        return largest(settings.available_memory_proportion)
    shares = [PROPORTIONS[-1]] * settings.num_stages
    # From the smallest to the largest, so that the largest that fits remains.
    for share in reversed(PROPORTIONS):
        changed = replace(settings, available_memory_proportion=uniform(share))
        ipus = forecast(planner.graph, splits, changed, planner.system).ipus
        shares = [share if one.fill < FITS_BELOW else kept for one, kept in zip(ipus, shares)]
    return tuple(uniform(share)[0] for share in shares)


def _without_pipelining(settings: PlannedProgram) -> PlannedProgram:
    """Returns the same IPUs with a whole network on each, with the largest proportions of any stage."""
    return settings.restaged(
        1,
        available_memory_proportion=largest(settings.available_memory_proportion),
        num_replicas=settings.num_replicas * settings.num_stages,
        gradient_accumulation_count=math.ceil(settings.gradient_accumulation_count / settings.num_stages),
        recomputation=False,
    )


def _word(value: object) -> str:
    """Returns a setting's value as a user types it."""
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
    layer, ranges = certificate(planner, settings, limit)

    def fits_in(stages: int, limit: float) -> bool:
        # From one stage to several, recomputation begins to make a difference.
        is_open = settings.num_stages == 1 and settings.training
        return any(
            planner.fits(each.with_stages(stages, recomputation=on), limit)
            for each in choices
            for on in (recomputations if is_open else (each.recomputation,))
        )

    def nearest(limit: float, first: int) -> Tuple[Optional[int], Optional[int]]:
        stages = next((k for k in range(first, most + 1) if fits_in(k, limit)), None)
        sizes = range(settings.micro_batch_size - 1, 0, -1)
        size = largest_that_fits(
            sizes, lambda n: any(planner.fits(replace(each, micro_batch_size=n), limit) for each in choices)
        )
        return stages, size

    fewest, size = nearest(limit, settings.num_stages + 1)
    surely, surely_size = fewest, size
    if limit > LIMITS[0]:
        surely, surely_size = nearest(LIMITS[0], most + 1 if fewest is None else fewest)
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


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> Optional[int]:
    """Returns the first of descending sizes that fits, by bisection, because memory grows with the size.

    A size that is not legal counts as not fitting.  If bisection meets such a size among those that fit, it may return
    a smaller one than the largest.
    """
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            high = middle
        else:
            low = middle + 1
    return next((size for size in sizes[low:] if fits(size)), None)


def certificate(
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
    message += in_the_way(why.layer, why.ranges)
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
        return more + ([f"--micro-batch-size {size}{same_stages}"] if size is not None else [])

    return hint_of_ways(
        ways(why.fits_from_stages, why.fits_from_micro_batch_size),
        ways(why.fewest_stages, why.largest_micro_batch_size),
    )


def hint_of_ways(surely: Sequence[str], perhaps: Sequence[str]) -> Optional[str]:
    """Returns the hint for options to type: plans that fit, and "uncertain" ones; None if there are none."""
    uncertain = [way for way in perhaps if way not in surely]
    parts = ["this would fit: " + ", or ".join(surely)] if surely else []
    parts += ["uncertain whether this would fit: " + ", or ".join(uncertain)] if uncertain else []
    return "; ".join(parts) or None


def in_the_way(layer: Optional[str], ranges: Sequence[Tuple[str, str]]) -> str:
    """Returns the end of a message for a ``certificate``; "" if it names nothing."""
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
    return _advice(model, name, lambda: planned_program(config, layout), splits, None, advice)


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
            config.validation_num_replicas or config.num_replicas,
            training=False,
        )

    nothing = "nothing that was tried is predicted to fit: use --device cpu"
    return _advice(model, name, settings, (), renamed, advice, nothing)


def _advice(
    model: KerasModel,
    name: str,
    make: Callable[[], PlannedProgram],
    splits: Sequence[str],
    renamed: Optional[Mapping[str, str]],
    advice: str,
    nothing: Optional[str] = None,
) -> MemoryAdvice:
    """Returns the function that makes the advice for a program.

    Args:
        make: the function that returns its settings, called only when it ran out of memory: no run fails because of a
            hint.
        renamed: the training options that may be proposed, with their names here; None: all, unchanged.
        advice: the advice if nothing can be predicted.
        nothing: the advice if no change fits.
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
            change = first_that_fits(planner, settings, splits, overuse=overuse, only=renamed)
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
