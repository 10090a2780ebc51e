"""Explains why nothing fits: the obstacle and the nearest settings that would fit, as a certificate and as a hint."""

import json
from dataclasses import asdict, replace
from typing import Callable, List, Optional, Sequence, Tuple

from ipucnn.errors import InfeasibleError
from ipucnn.models.registry import is_network_file
from ipucnn.planning.pipeline_plan import NoFit
from ipucnn.planning.program import Placement, PlannedProgram
from ipucnn.planning.search.exact import blocking_ranges
from ipucnn.planning.search.planner import LIMITS, Planner
from ipucnn.text import counted
from ipucnn.training.batching import next_power_of_two

# Segments of one IPU to try at least.
_MOST_SEGMENTS = 16


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
    layer, ranges = _certificate(planner, settings, limit)

    def fewest_stages(limit: float, first: int) -> Optional[int]:
        return next(
            (k for k in range(first, most + 1) if _fits(planner, choices, k, limit, recomputations)), None
        )

    def largest_micro_batch(limit: float) -> Optional[int]:
        sizes = range(settings.micro_batch_size - 1, 0, -1)
        return largest_that_fits(
            sizes,
            lambda size: any(planner.fits(replace(each, micro_batch_size=size), limit) for each in choices),
        )

    fewest, size = fewest_stages(limit, settings.num_stages + 1), largest_micro_batch(limit)
    surely, surely_size = fewest, size
    if limit > LIMITS[0]:
        surely = None if fewest is None else fewest_stages(LIMITS[0], fewest)
        surely_size = None if size is None else largest_micro_batch(LIMITS[0])
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


def _fits(
    planner: Planner,
    choices: Sequence[PlannedProgram],
    num_stages: int,
    limit: float,
    recomputations: Sequence[bool],
) -> bool:
    """Tells whether a choice fits with more stages: segments on one IPU, or stages with an IPU each."""
    for settings in choices:
        tried = {settings.recomputation}
        if settings.num_stages == 1 and settings.training:
            # From one stage to several, recomputation begins to make a difference.
            tried = {*recomputations}
        for recomputes in sorted(tried):
            if planner.fits(settings.with_stages(num_stages, recomputation=recomputes), limit):
                return True
    return False


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
    hint = tried + smaller(model, settings)
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


def infeasible_search(
    planner: Planner,
    least: PlannedProgram,
    *,
    num_ipus: int,
    ways: Optional[str],
) -> InfeasibleError:
    """Returns the error for a search in which nothing fits.

    Args:
        least: the tried settings with the least memory.
        ways: the hint with which the same search succeeds; None if there is no such hint.
    """
    message = (
        f"{planner.graph.model} fits on {counted(num_ipus, 'IPU')} of {planner.system.title} in no configuration with "
        f"micro-batches of {least.micro_batch_size} or more"
    )
    where = f"; in {least.num_stages} {least.schedule} stages" if least.num_stages > 1 else "; in one stage"
    obstacle = _in_the_way(*_certificate(planner, least, max(LIMITS)))
    hint = ways or smaller(planner.graph.model, least)
    return InfeasibleError(message + (where + obstacle if obstacle else ""), hint)


def _in_the_way(layer: Optional[str], ranges: Sequence[Tuple[str, str]]) -> str:
    if layer is not None:
        return f": layer '{layer}' alone exceeds an IPU's memory in every stage"
    if not ranges:
        return ""
    first, last = ranges[0]
    more = f", and {counted(len(ranges) - 1, 'more such range')}" if len(ranges) > 1 else ""
    return f": layers '{first}' to '{last}' fit in no stage together{more}"


def smaller(model: str, settings: PlannedProgram) -> str:
    """Returns the advice for less memory when neither more IPUs nor smaller micro-batches help."""
    precision = "" if settings.precision == "16.16" else ", or --precision 16.16"
    if is_network_file(model):
        return "save the network with a smaller input" + precision
    return "use a smaller --image-size" + precision
