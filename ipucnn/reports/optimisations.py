"""What ``ipucnn plan-splits --optimisations`` shows."""

import json
import sys
from dataclasses import asdict
from typing import Any, List, Optional, Sequence

from ipucnn.planning.request import PlanRequest
from ipucnn.planning.search.optimisations import NOT_MODELLED, Optimisation, Outcome
from ipucnn.planning.search.planner import Candidate
from ipucnn.reports import units
from ipucnn.reports.console import console
from ipucnn.reports.evaluate import plain_table, titled


def optimisations_json(
    request: PlanRequest, candidate: Candidate, base: Outcome, found: Sequence[Optimisation]
) -> str:
    """Everything as indented JSON."""
    answer = {
        "model": request.record.name,
        "system": request.system.name,
        "splits": list(candidate.splits),
        "settings": asdict(candidate.settings),
        "predicted": _outcome_json(base),
        "optimisations": [{**asdict(one), "outcome": _outcome_json(one.outcome)} for one in found],
        "assumed": request.assumed,
    }
    return json.dumps(answer, indent=2)


def _outcome_json(outcome: Optional[Outcome]) -> Any:
    """As the table has it: what does not fit has no speed."""
    if outcome is None:
        return None
    speed = None if outcome.verdict == "does not fit" else outcome.predicted_images_per_s
    return {**asdict(outcome), "predicted_images_per_s": speed}


def print_optimisations(
    request: PlanRequest, candidate: Candidate, base: Outcome, found: Sequence[Optimisation]
) -> None:
    """The table on stdout."""
    from rich.text import Text

    settings, out = candidate.settings, console(sys.stdout)
    size = "x".join(map(str, request.options.input_shape[:2]))
    table = plain_table(padding=(0, 1, 0, 0))
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("optimisation", overflow="fold", min_width=17)
    table.add_column("here", overflow="fold", max_width=12)
    table.add_column("instead", overflow="fold", max_width=14)
    table.add_column("fullest IPU", justify="right", no_wrap=True)
    table.add_column("images/s", justify="right", no_wrap=True)
    row = (_fill(base), _images(base))
    table.add_row("", Text("as it is", style="bold"), "", "", *map(Text, row))
    for one in found:
        cells = [Text(one.name, style="bold"), Text(one.here), Text(one.instead), *_outcome(one, base)]
        table.add_row(str(one.number), *cells)
    title = (
        f"{request.record.name} at {size}, {settings.num_stages} stages on {settings.num_ipus} IPU(s), "
        f"{request.system.title}: what one optimisation alone brings, predicted"
    )
    out.print(titled(title, table))
    out.print(
        Text(
            "differences from the first row: points of an IPU's memory, percent; ?: uncertain whether it fits"
        )
    )
    options = plain_table(show_header=False, padding=(0, 1, 0, 0))
    options.add_column("", justify="right", no_wrap=True)
    options.add_column("", overflow="fold")
    for one in found:
        note = f": {one.note}" if one.note else ""
        options.add_row(str(one.number), Text.assemble((one.option, "bold"), note))
    out.print(options)
    out.print(Text(f"splits: {' '.join(candidate.splits)}"))
    out.print(Text("assumed: " + "; ".join(request.assumed)))


def _outcome(one: Optimisation, base: Outcome) -> List[Any]:
    """Memory and throughput with ``instead``, and their difference; what does not fit has no speed."""
    from rich.text import Text

    outcome = one.outcome
    if outcome is None:
        return [Text(NOT_MODELLED), Text(NOT_MODELLED)]
    points = 100 * (outcome.predicted_fill - base.predicted_fill)
    memory = f"{_fill(outcome)} {points:+6.1f}"
    if outcome.verdict == "does not fit":
        return [Text(memory), Text(outcome.verdict)]
    if outcome.predicted_images_per_s is None or base.predicted_images_per_s is None:
        return [Text(memory), Text(NOT_MODELLED)]
    change = outcome.predicted_images_per_s / base.predicted_images_per_s - 1
    return [Text(memory), Text(f"{_images(outcome)} {change:+5.0%}")]


def _fill(outcome: Outcome) -> str:
    return units.percent(outcome.predicted_fill) + ("?" if outcome.verdict == "uncertain" else "")


def _images(outcome: Outcome) -> str:
    if outcome.verdict == "does not fit":
        return outcome.verdict
    return "" if outcome.predicted_images_per_s is None else units.images(outcome.predicted_images_per_s)
