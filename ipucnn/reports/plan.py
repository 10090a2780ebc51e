"""What ``ipucnn plan-splits`` shows in a terminal or pipe: a plan, or with ``--optimisations`` what each brings."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from ipucnn.planning.cost.products import band_factor
from ipucnn.planning.cost.schedule import Timeline, timeline
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.search.configurations import TABLE_ROWS
from ipucnn.planning.search.planner import Candidate
from ipucnn.planning.search.variations import Optimisation, Outcome
from ipucnn.reports import plan_text, units
from ipucnn.reports.console import console, fact_table, plain_table, print_table, wrapped
from ipucnn.reports.plan_text import Sheet
from ipucnn.text import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ipucnn.planning.calibration import SystemProfile
    from ipucnn.planning.request import PlanRequest

# Letter and colour of a category of memory.
_CATEGORIES: Dict[str, Tuple[str, str]] = {
    "weights": ("w", "blue"),
    "accumulators": ("a", "cyan"),
    "optimizer_state": ("o", "green"),
    "stash": ("s", "yellow"),
    "live_activations": ("l", "magenta"),
    "temporaries": ("t", "red"),
    "code": ("c", "white"),
}
_PASSES = {"forward": ("-", "blue"), "recompute": ("~", "cyan"), "backward": ("=", "red")}
_VERDICTS = {"fits": "green", "uncertain": "yellow", "does not fit": "red"}


def print_plan(plan: PipelinePlan) -> None:
    """The report on stdout."""
    from rich.text import Text

    out = console(sys.stdout)
    table = fact_table(
        ((name, _coloured(text)) for name, text in plan_text.facts(plan)), padding=(0, 1, 0, 0)
    )
    table.title = plan_text.title(plan)
    out.print(table)
    _print_sheet(out, plan_text.stage_sheet(plan))
    _memory(plan, out)
    if plan.num_stages > 1:
        _timeline(plan, out)
    if plan.comparison:
        _print_sheet(out, plan_text.comparison_sheet(plan))
    if plan.pareto:
        _print_sheet(out, plan_text.pareto_sheet(plan, TABLE_ROWS))
    if plan.assumed:
        out.print(Text("assumed: " + "; ".join(plan.assumed)))
        out.print()
    if plan.verdict != "does not fit":
        _paste(plan, out)


def _coloured(text: str) -> Text:
    """A cell or sentence with the verdict that it begins with in its colour."""
    from rich.text import Text

    coloured, verdict = Text(text), plan_text.verdict_of(text)
    if verdict is not None:
        coloured.stylize(_VERDICTS[verdict], 0, len(verdict))
    return coloured


def _print_sheet(out: Console, sheet: Sheet) -> None:
    from rich.text import Text

    table = plain_table(padding=(0, 1, 0, 0), title=sheet.title)
    for name in sheet.columns:
        is_text = name in sheet.texts
        table.add_column(
            "" if name == "verdict" else name,
            justify="left" if is_text else "right",
            no_wrap=not is_text or name == "verdict",
            overflow="fold",
        )
    for row in sheet.rows:
        table.add_row(*map(_coloured, row))
    print_table(out, table)
    for note in sheet.notes:
        out.print(Text(note))
    if sheet.notes:
        out.print()


def _memory(plan: PipelinePlan, out: Console) -> None:
    from rich.text import Text

    capacity = f"{units.mebibytes(plan.system.ipu_memory_bytes)} of an {plan.system.ipu}"
    out.print(Text(f"memory, predicted, of the {capacity}", style="bold"))
    label = max(len(f"IPU {ipu.ipu}") for ipu in plan.ipus)
    width = min(100, out.width - label - 23)
    scale = max(1.0, plan.predicted_fill)
    for ipu in plan.ipus:
        bar = Text(f"{f'IPU {ipu.ipu}':<{label}} ")
        bar.append_text(_bar(ipu.predicted_memory_bytes, ipu.capacity_bytes * scale, width, 1 / scale))
        bar.append(f" {units.percent(ipu.predicted_fill):>5} ")
        bar.append(ipu.verdict, style=_VERDICTS[ipu.verdict])
        out.print(bar, no_wrap=True)
    legend = [
        Text.assemble((letter, colour), f" {name.replace('_', ' ')}")
        for name, (letter, colour) in _CATEGORIES.items()
        if any(ipu.predicted_memory_bytes.get(name, 0) > 0 for ipu in plan.ipus)
    ]
    out.print(wrapped(legend, "  ", out.width, label + 1))
    out.print()


def _bar(sizes: Dict[str, float], whole: float, width: int, end: float) -> Text:
    """Sizes as letters, ``width`` for ``whole``; a bar marks the capacity, at the share ``end`` of the width."""
    from rich.text import Text

    letters, total = [], 0.0
    for name, size in sizes.items():
        letter, colour = _CATEGORIES[name]
        first = round(width * total / whole)
        total += size
        letters += [(letter, colour)] * (round(width * total / whole) - first)
    letters += [(".", "dim")] * (width - len(letters))
    text = Text()
    limit = round(width * end)
    for i, (letter, colour) in enumerate(letters):
        if i == limit:
            text.append("|", style="bold")
        text.append(letter, style=colour)
    if limit >= width:
        text.append("|", style="bold")
    return text


def _timeline(plan: PipelinePlan, out: Console) -> None:
    from rich.text import Text

    told = timeline(plan, told_ticks=2)
    end = told.omitted_from_s if told.omitted_ticks else told.end_s
    label = max(len(f"stage {stage.stage}") for stage in plan.stages)
    width = min(140, out.width - label - 1)
    whole = "a weight update" if plan.settings.training else "an execution"
    out.print(Text(f"timeline, predicted: the first {units.milliseconds(end)} of {whole}", style="bold"))
    for stage in plan.stages:
        row = Text(f"{f'stage {stage.stage}':<{label}} ")
        row.append_text(_lane(told, stage.stage, end, width))
        out.print(row, no_wrap=True)
    keys = ["- forward"]
    if any(stage.predicted_recompute_s for stage in plan.stages):
        keys.append("~ recompute")
    keys += ["= backward"] if plan.settings.training else []
    words = ", ".join([*keys, ". idle", "numbers: micro-batches"])
    if told.omitted_ticks:
        half = "half-" if plan.settings.schedule == "Interleaved" else ""
        drain = "" if plan.settings.schedule == "Sequential" else ", and the drain,"
        words += f"; {told.omitted_ticks} more {half}ticks alike{drain} follow"
    out.print(wrapped([Text(word) for word in words.split()], " ", out.width, label + 1))
    out.print()


def _lane(told: Timeline, stage: int, end: float, width: int) -> Text:
    """What a stage does, a character for each ``width``-th of the time; with the micro-batch's number where it fits."""
    from rich.text import Text

    cells: List[Tuple[str, str]] = [(".", "dim")] * width
    for span in told.spans:
        first, last = round(width * span.start_s / end), round(width * span.end_s / end)
        if span.stage != stage or first >= width:
            continue
        last = min(last, width)
        mark, colour = _PASSES[span.kind]
        number = str(span.micro_batch)
        for i in range(first, last):
            # A pass that is split in two has its number once.
            shown = number[i - first] if last - first >= len(number) > i - first else mark
            cells[i] = (shown if span.kind != "recompute" else mark, colour)
    text = Text()
    for letter, colour in cells:
        text.append(letter, style=colour)
    return text


def _paste(plan: PipelinePlan, out: Console) -> None:
    """The options to paste, on one line however narrow the terminal, and as YAML."""
    from rich.text import Text

    command = plan_text.command_line(plan)
    if not command:
        out.print(Text("the layers that open the next stage, for a program of your own:", style="bold"))
        out.print(Text(" ".join(plan.splits) or "none: it is one stage"), soft_wrap=True)
        return
    what = "train with it" if plan.settings.training else "measure it"
    how = f"to {what} (or --save plan.yml, and ipucnn {plan.command} --plan plan.yml):"
    out.print(Text(how, style="bold"))
    for line in (command, plan_text.needs_weights(plan)):
        if line:
            out.print(Text(line), soft_wrap=True)
    out.print()
    out.print(Text("as YAML:", style="bold"))
    out.print(Text(f"{plan.model}_plan:"), soft_wrap=True)
    for name, value in {"model-name": plan.model, **plan.run_options()}.items():
        out.print(Text(f"  {name}: {_yaml(value)}"), soft_wrap=True)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _yaml(value: object) -> str:
    return "[" + ", ".join(map(_plain, value)) + "]" if isinstance(value, list) else str(value)


# -- what one optimisation alone brings ----------------------------------------------------------------------------


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
        "predicted_band_factor": band_factor(request.system),
        "optimisations": [{**asdict(one), "outcome": _outcome_json(one.outcome)} for one in found],
        "assumed": request.assumed,
    }
    return json.dumps(answer, indent=2)


def _outcome_json(outcome: Optional[Outcome]) -> Optional[Dict[str, Any]]:
    """An outcome as the table shows it: what does not fit has no speed."""
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
    table.add_column("optimisation", overflow="fold")
    table.add_column("here", overflow="fold")
    table.add_column("instead", overflow="fold")
    table.add_column("fullest IPU", justify="right", no_wrap=True)
    table.add_column("images/s", justify="right", no_wrap=True)
    row = (_fill(base), _images(base))
    table.add_row("", Text("as it is", style="bold"), "", "", *map(Text, row))
    for one in found:
        cells = [Text(one.name, style="bold"), Text(one.here), Text(one.instead), *_outcome(one, base)]
        table.add_row(str(one.number), *cells)
    title = (
        f"{request.record.name} at {size}, {counted(settings.num_stages, 'stage')} on "
        f"{counted(settings.num_ipus, 'IPU')}, {request.system.title}: what one optimisation alone brings, predicted"
    )
    table.title = title
    print_table(out, table, keys=2)
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
    out.print(Text(plan_text.within(band_factor(request.system))))
    out.print(Text(f"splits: {' '.join(candidate.splits)}"))
    out.print(Text("assumed: " + "; ".join(request.assumed)))


def _outcome(one: Optimisation, base: Outcome) -> List[Text]:
    """Memory and throughput with ``instead``, and their difference; what does not fit has no speed."""
    from rich.text import Text

    outcome = one.outcome
    if outcome is None:
        return [Text("not modelled"), Text("not modelled")]
    points = 100 * (outcome.predicted_fill - base.predicted_fill)
    memory = f"{_fill(outcome)} {points:+6.1f}"
    if outcome.verdict == "does not fit":
        return [Text(memory), Text(outcome.verdict)]
    change = outcome.predicted_images_per_s / base.predicted_images_per_s - 1
    return [Text(memory), Text(f"{_images(outcome)} {change:+5.0%}")]


def _fill(outcome: Outcome) -> str:
    return units.percent(outcome.predicted_fill) + ("?" if outcome.verdict == "uncertain" else "")


def _images(outcome: Outcome) -> str:
    if outcome.verdict == "does not fit":
        return outcome.verdict
    return "" if outcome.predicted_images_per_s is None else units.images(outcome.predicted_images_per_s)


# -- a system that was measured -------------------------------------------------------------------------------------


def print_calibration(profile: SystemProfile) -> None:
    """What measurements say of a system, with the errors before and after, on stdout."""
    from rich.text import Text

    from ipucnn.planning.calibration import describe

    out = console(sys.stdout)
    table = plain_table(padding=(0, 1, 0, 0))
    table.add_column("measured in", overflow="fold")
    table.add_column("network", overflow="fold")
    for name in ("measured", "predicted", "with profile"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in profile.measurements:
        cells = [
            f"{images:,.0f} {images / row.images_per_s - 1:+5.0%}"
            for images in (row.shipped_images_per_s, row.calibrated_images_per_s)
        ]
        table.add_row(Text(row.source), Text(row.model), f"{row.images_per_s:,.0f}", *cells)
    table.title = "images/s, measured and predicted; predicted ones with their error"
    print_table(out, table, keys=2)
    out.print(Text("; ".join(describe(profile))))
    out.print(
        Text(
            f"geometric mean error: {profile.error_before:.3f} as shipped, {profile.error_after:.3f} with the profile, "
            f"of the {counted(len(profile.measurements), 'measurement')} that it was fitted to"
        )
    )
