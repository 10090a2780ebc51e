"""Predicts the effect of changes to a program: which make it fit, and which make it faster.

The options to type for a change follow from the settings before and after it (``flags_between``).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipucnn.aliases import KerasModel, MemoryAdvice
from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.errors import ConfigurationError, UserError
from ipucnn.hardware import smallest_system
from ipucnn.planning.cost.memory import FITS_BELOW
from ipucnn.planning.forecast import Forecast, forecast
from ipucnn.planning.graphs.layer_graph import unknown_layers
from ipucnn.planning.pipeline_plan import Change
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
from ipucnn.planning.search.open_settings import PROPORTIONS
from ipucnn.planning.search.planner import Candidate, Planner
from ipucnn.text import percent
from ipucnn.training.program import Program

# Dynamic programs for the splits of a change: a hint needs splits that fit, not a proof.
_EVALUATIONS = 4
_MOST_STAGES = 16
# A program that ran out of memory by an unknown amount is assumed to have exceeded it by a tenth.
_UNKNOWN_OVERUSE = 1.1
# Shares of temporary memory to try beside ``PROPORTIONS``, and the least gain worth a line.
_MORE_PROPORTIONS, _LEAST_GAIN, _MOST_GAINS = (0.4, 0.2), 1.01, 3

_Trial = Tuple[PlannedProgram, Optional[Tuple[str, ...]]]
"""A changed program: its settings, and the splits that it keeps; None for splits that the planner is to choose."""


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


# --- smaller programs


@dataclass(frozen=True)
class SmallerProgram:
    """A change that is predicted to make a program fit.

    Attributes:
        flags: the options to add to the command.
        settings, splits: the changed program.
        predicted_fill: the fill of its fullest IPU.
        predicted_fill_before: the same for the original program.
    """

    flags: Tuple[str, ...]
    settings: PlannedProgram
    splits: Tuple[str, ...]
    predicted_fill: float
    predicted_fill_before: float

    @property
    def hint(self) -> str:
        """Returns the advice for a message."""
        return (
            f"predicted to fit: {' '.join(self.flags)} (the fullest IPU at {percent(self.predicted_fill)} of its "
            f"memory instead of {percent(self.predicted_fill_before)})"
        )


def smallest_change(
    planner: Planner,
    settings: PlannedProgram,
    splits: Sequence[str],
    *,
    overuse: Optional[float] = None,
    only: Optional[Collection[str]] = None,
) -> Optional[SmallerProgram]:
    """Returns the first change, from small to large, after which the program is predicted to fit.

    The order is: changes that affect no result (recomputation, a smaller availableMemoryProportion, both, optimizer
    state outside the chip, other splits, the Interleaved schedule); a smaller micro-batch with proportionally more
    accumulation; more stages; 16-bit numbers; more stages and smaller micro-batches.

    Args:
        settings, splits: the program that did not fit.
        overuse: needed over available memory, as reported by the compiler; None if it did not report it.
        only: the options that the command accepts and uses, if not all.
    """
    before = forecast(planner.graph, splits, settings, planner.system).predicted_fill
    # The compiler's report shows the model's error for this network, so a program counts as fitting only with that
    # margin.
    allowed = min(FITS_BELOW, before / max(1.0, _UNKNOWN_OVERUSE if overuse is None else overuse))

    def is_allowed(flags: Sequence[str]) -> bool:
        return only is None or all(word in only for word in flags if word.startswith("--"))

    for changed, kept in _smaller_programs(settings, tuple(splits), planner.system.num_ipus):
        if not is_allowed(flags_between(settings, changed, (), ())):
            continue
        chosen = kept if kept is not None else _splits_within(planner, changed, allowed)
        if chosen is None:
            continue
        flags, fill = (
            flags_between(settings, changed, splits, chosen),
            forecast(planner.graph, chosen, changed, planner.system).predicted_fill,
        )
        if fill < allowed and is_allowed(flags):
            return SmallerProgram(flags, changed, chosen, fill, before)
    return None


def _splits_within(planner: Planner, settings: PlannedProgram, limit: float) -> Optional[Tuple[str, ...]]:
    if settings.num_stages > len(planner.starts):
        return None
    candidate = planner.fastest_splits(settings, limit, max_evaluations=_EVALUATIONS)
    return None if candidate is None else candidate.splits


def _smaller_programs(settings: PlannedProgram, splits: Tuple[str, ...], max_ipus: int) -> Iterator[_Trial]:
    """Yields the changes to try, the smallest first."""
    for smaller in (settings, *_smaller_micro_batches(settings)):
        if smaller != settings:
            yield smaller, splits
        yield from _without_effect_on_results(smaller, splits)
    powers = (1 << power for power in range(1, _MOST_STAGES.bit_length()))
    counts = [k for k in powers if k > settings.num_stages and k * settings.num_replicas <= max_ipus]
    for stages in counts:
        yield from _more_stages(settings, stages)
    if settings.precision == "32.32":
        yield replace(settings, precision="16.16"), splits
    for stages in counts:
        for smaller in _smaller_micro_batches(settings):
            yield from _more_stages(smaller, stages)


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


def _more_stages(settings: PlannedProgram, stages: int) -> Iterator[_Trial]:
    """Yields the same program in more stages, one per IPU, with a legal number of accumulated micro-batches."""
    schedule = GROUPED if settings.order.is_sequential else settings.schedule
    more = settings.with_stages(stages, schedule)
    yield more, None
    for changed, _ in _without_effect_on_results(more, ()):
        yield changed, None


def _without_effect_on_results(settings: PlannedProgram, splits: Tuple[str, ...]) -> Iterator[_Trial]:
    piped = settings.training and settings.num_stages > 1
    least = replace(settings, recomputation=piped or settings.recomputation)
    if least != settings:
        yield least, splits
    for limited in filter(None, (_limited(settings, share) for share in PROPORTIONS)):
        yield replace(settings, available_memory_proportion=limited), splits
        if least.recomputation != settings.recomputation:
            yield replace(least, available_memory_proportion=limited), splits
    least = replace(
        least,
        available_memory_proportion=_limited(settings, PROPORTIONS[-1])
        or settings.available_memory_proportion,
    )
    offloading = replace(settings, optimizer_state_offloading=True)
    if offloading.offloads_optimizer_state and not settings.offloads_optimizer_state:
        yield offloading, splits
    if settings.num_stages == 1:
        return
    yield settings, None
    if least != settings:
        yield least, None
    if piped and settings.schedule == GROUPED and settings.placement is Placement.ONE_EACH:
        # Interleaved accepts every count that Grouped accepts, but not two stages on one IPU.
        yield replace(settings, schedule=INTERLEAVED), splits
        yield replace(least, schedule=INTERLEAVED), None


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


# --- the effect of changes to a plan


def next_changes(planner: Planner, candidate: Candidate) -> Tuple[Tuple[Change, ...], Optional[Change]]:
    """Returns the one-setting changes that make a program fastest, and the change in case it does not fit.

    All keep the splits and everything that they do not name; ``plan-splits`` would choose these again for the changed
    setting.
    """
    settings, splits = candidate.settings, candidate.splits
    if candidate.verdict == "does not fit":
        return (), None
    before = candidate.prediction.images_per_s

    def change(name: str, changed: PlannedProgram) -> Change:
        outcome = forecast(planner.graph, splits, changed, planner.system)
        ratio, flags = outcome.predicted_images_per_s / before, flags_between(settings, changed, (), ())
        return Change(name, flags, ratio, outcome.predicted_fill, outcome.verdict)

    tried = [change(name, changed) for name, changed in _single_changes(settings).items()]
    gains = [one for one in tried if one.ratio >= _LEAST_GAIN and one.verdict != "does not fit"]
    best: Dict[str, Change] = {}  # the best value of each option
    for one in sorted(gains, key=lambda one: (-round(one.ratio, 2), one.predicted_fill)):
        best.setdefault(one.flags[0], one)
    smaller = smallest_change(planner, settings, splits, only=_KEEPING_SPLITS)
    remedy = None if smaller is None else change("", smaller.settings)
    return tuple(best.values())[:_MOST_GAINS], remedy


_KEEPING_SPLITS = (
    *("--recomputation", "--available-memory-proportion", "--optimizer-state-offloading"),
    *("--micro-batch-size", "--gradient-accumulation-count"),
)


def _single_changes(settings: PlannedProgram) -> Dict[str, PlannedProgram]:
    """Returns programs with one thing changed, by the name of the change."""
    count, size, order = settings.gradient_accumulation_count, 2 * settings.micro_batch_size, settings.order
    changes: Dict[str, Dict[str, Any]] = {
        "8-bit transfer": {"eight_bit_transfer": True},
        "precision 16.16": {"precision": "16.16"},
        "half partials": {"half_partials": settings.half_partials or settings.precision != "32.32"},
        "no recomputation": {"recomputation": settings.recomputation and settings.num_stages == 1},
    }
    if settings.offloads_optimizer_state and settings.optimizer_slots > 0:
        changes["optimizer state on the chip"] = {"optimizer_state_offloading": False}
    if not settings.training:
        changes[f"micro-batch {size}"] = {"micro_batch_size": size}
    elif count % 2 == 0 and count // 2 % order.multiple(settings.num_stages) == 0:  # the global batch stays
        larger = {"micro_batch_size": size, "gradient_accumulation_count": count // 2}
        changes[f"micro-batch {size}"] = larger
    for share in _MORE_PROPORTIONS:
        changes[f"proportion {100 * share:g} %"] = {"available_memory_proportion": uniform(share)}
    changed = {name: replace(settings, **change) for name, change in changes.items()}
    return {name: other for name, other in changed.items() if other != settings}


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


def optimisations(
    planner: Planner,
    splits: Sequence[str],
    settings: PlannedProgram,
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
    count = settings.num_stages
    if count < 2 or settings.placement is not Placement.ONE_EACH or not settings.training:
        raise ConfigurationError(
            "--optimisations compares settings of a training pipeline with a stage on each IPU",
            "--stages 4 --schedule Interleaved --training",
        )
    rows: List[Optimisation] = []

    def outcome(changed: PlannedProgram) -> Forecast:
        return forecast(planner.graph, splits if changed.num_stages > 1 else (), changed, planner.system)

    def add(
        number: int,
        name: str,
        option: str,
        present: object,
        instead: object,
        changed: Optional[PlannedProgram] = None,
        note: str = "",
    ) -> None:
        """Adds a row; ``changed`` is the program with the other value, None if that is not modelled."""
        judged = None if changed is None else outcome(changed)
        rows.append(Optimisation(number, name, option, _word(present), _word(instead), judged, note))

    def switch(number: int, name: str, option: str, setting: str, first: object, second: object) -> None:
        """Switches a setting between two values; a program with neither is compared with the first."""
        present = getattr(settings, setting)
        instead = second if present == first else first
        changes: Dict[str, Any] = {setting: instead}
        add(number, name, option, present, instead, replace(settings, **changes))

    def share(number: int, name: str, option: str, proportions: Proportions, note: str = "") -> None:
        """Switches to another availableMemoryProportion."""
        changed = replace(settings, available_memory_proportion=proportions)
        add(number, name, option, _percent(settings), _percent(changed), changed, note)

    alone = _without_pipelining(settings)
    note = (
        "without it recomputation is off, too, and micro-batches are accumulated "
        f"{settings.gradient_accumulation_count} to {alone.gradient_accumulation_count}"
    )
    here, instead = f"{count} stages", f"1 stage, {count} replicas"
    add(1, "pipelining", "--pipeline-splits", here, instead, alone, note)
    switch(2, "reduced precision", "--precision", "precision", "32.32", "16.16")
    switch(2, "16-bit partials", "--half-partials", "half_partials", True, False)
    note = "a factor on the loss and its inverse on the gradients: numbers change, not what is computed"
    here, instead = (f"{loss_scaling:g}", "none") if loss_scaling else ("none", "128")
    add(3, "loss scaling", "--loss-scaling", here, instead, settings, note)
    switch(4, "recomputation", "--recomputation on|off", "recomputation", True, False)
    flag = "--available-memory-proportion"
    share(5, "convolution options", flag, _another_for_all(settings))
    switch(6, "schedule", "--pipeline-schedule", "schedule", INTERLEAVED, GROUPED)
    note = "the model has one figure for exchange code and time"
    here = exchange_target or "cycles"
    instead = "memory" if here == "cycles" else "cycles"
    add(7, "internal exchange", "--internal-exchange-optimization-target", here, instead, note=note)
    note = "drawing a mask again takes time that the model does not have"
    add(8, "IPU dropout", "always on IPUs", "seed kept", "mask kept", note=note)
    most = _largest_that_fit(planner, splits, settings)
    tried = ", ".join(f"{100 * each:g}" for each in PROPORTIONS)
    is_same = replace(settings, available_memory_proportion=most) == settings
    note = f"of {tried}% no stage has room for more" if is_same else ""
    share(9, "options of each stage", f"{flag}, one per stage", most, note)
    offloading = "optimizer_state_offloading"
    switch(10, "offloaded optimizer state", "--optimizer-state-offloading", offloading, True, False)
    note = "what is cropped off is neither sent nor kept"
    add(11, "crops before they are sent", "always", "where they begin", "where they end", note=note)
    return outcome(settings), rows


def _another_for_all(settings: PlannedProgram) -> Proportions:
    """Returns Poplar's default for all stages; for a program that has it, the smallest proportion that is tried."""
    (least,), default = smallest(settings.available_memory_proportion), uniform(PROPORTIONS[0])
    return uniform(PROPORTIONS[-1]) if least.limited(PROPORTIONS[0]) == default[0] else default


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


def _percent(settings: PlannedProgram) -> str:
    return " ".join(f"{value:g}" for value in percentages(settings.available_memory_proportion)) + "%"


def _word(value: object) -> str:
    """Returns a setting's value as a user types it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


# --- advice for a run that ran out of memory


_UNKNOWN = "the planner cannot compute this network, so nothing is predicted"


def training_advice(model: KerasModel, name: str, program: Program, config: RunConfig) -> MemoryAdvice:
    """Returns the function that makes the advice when training runs out of memory.

    Args:
        model: the model from ``build_model``.
        name: the name of the network.
        program: the running program, with its splits filled in.
        config: the configuration of the run.
    """
    advice = "try a smaller --micro-batch-size, --recomputation or more stages"
    return _advice(
        model, name, lambda: planned_program(config, program), program.pipeline_splits, None, advice
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
                return _held(planner, splits, settings, without)
            change = smallest_change(planner, settings, splits, overuse=overuse, only=renamed)
        except UserError:
            # The planner does not know the network: the error that is being explained matters more.
            return unknown
        if change is None:
            return nothing
        return replace(change, flags=tuple((renamed or {}).get(word, word) for word in change.flags)).hint

    return advise


def _held(planner: Planner, splits: Sequence[str], settings: PlannedProgram, option: str) -> str:
    """Returns what the fullest IPU holds with an option off; the planner assumes that all else is on the IPU."""
    if option == "optimizer_state_offloading":
        settings = replace(settings, optimizer_state_offloading=False)
    fullest = forecast(planner.graph, splits, settings, planner.system).fullest
    held, memory = (f"{value / 2**20:.0f} MiB" for value in (fullest.total_bytes, fullest.capacity_bytes))
    verdict = "" if fullest.fill < FITS_BELOW else ", which does not fit"
    return f"the fullest IPU is then predicted to hold {held} of its {memory}{verdict}"
