"""Prints the result of ``ipucnn plan-splits``: a plan, or with ``--optimisations`` the effect of each optimisation."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console
from rich.text import Text

from ipucnn.planning.forecast import Forecast
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.search.front import TABLE_ROWS
from ipucnn.planning.search.neighbours import Optimisation
from ipucnn.planning.search.planner import Candidate
from ipucnn.reports import plan_text, units
from ipucnn.reports.console import console, fact_table, plain_table, print_table, wrapped
from ipucnn.reports.plan_text import TextTable
from ipucnn.reports.timeline import Timeline, timeline
from ipucnn.text import counted

if TYPE_CHECKING:
    from ipucnn.planning.calibration import MeasuredRow, SystemProfile
    from ipucnn.planning.question import Question

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
    """Prints the report on stdout."""
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
        out.print(Text(plan_text.assumed(plan.assumed)))
        out.print()
    if plan.verdict != "does not fit":
        _paste(plan, out)


def _coloured(text: str) -> Text:
    """Colours the verdict at the start of a cell or sentence."""
    coloured, verdict = Text(text), plan_text.verdict_of(text)
    if verdict is not None:
        coloured.stylize(_VERDICTS[verdict], 0, len(verdict))
    return coloured


def _print_sheet(out: Console, sheet: TextTable, keys: int = 1) -> None:
    """Prints a table with its notes.

    Args:
        keys: the number of leading columns that each part of a split table repeats.
    """
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
    print_table(out, table, keys)
    for note in sheet.notes:
        out.print(Text(note))
    if sheet.notes:
        out.print()


def _memory(plan: PipelinePlan, out: Console) -> None:
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
    """Draws sizes as letters, ``width`` for ``whole``; a bar marks the capacity, at the share ``end`` of the width.

    Each size has at least one letter, so that narrow and wide terminals show the same ones.
    """
    bounds = [round(width * total / whole) for total in itertools.accumulate(sizes.values(), initial=0.0)]
    counts = {name: max(b - a, int(sizes[name] > 0)) for name, a, b in zip(sizes, bounds, bounds[1:])}
    # The largest size gives the letters that the smallest ones have too many, as far as it can.
    largest = max(counts, key=lambda name: counts[name])
    counts[largest] = max(1, counts[largest] - sum(counts.values()) + bounds[-1])
    letters = [_CATEGORIES[name] for name, count in counts.items() for _ in range(count)]
    letters += [(".", "dim")] * (width - len(letters))
    letters.insert(min(round(width * end), len(letters)), ("|", "bold"))
    return Text.assemble(*letters)


def _timeline(plan: PipelinePlan, out: Console) -> None:
    drawn = timeline(plan)
    end = drawn.omitted_from_s if drawn.omitted_ticks else drawn.end_s
    label = max(len(f"stage {stage.stage}") for stage in plan.stages)
    width = min(140, out.width - label - 1)
    whole = "a weight update" if plan.settings.training else "an execution"
    out.print(Text(f"timeline, predicted: the first {units.milliseconds(end)} of {whole}", style="bold"))
    for stage in plan.stages:
        row = Text(f"{f'stage {stage.stage}':<{label}} ")
        row.append_text(_lane(drawn, stage.stage, end, width))
        out.print(row, no_wrap=True)
    keys = ["- forward"]
    if any(stage.predicted_recompute_s for stage in plan.stages):
        keys.append("~ recompute")
    keys += ["= backward"] if plan.settings.training else []
    words = ", ".join([*keys, ". idle", "numbers: micro-batches"])
    if drawn.omitted_ticks:
        order = plan.settings.order
        drain = "" if order.is_sequential else ", and the drain,"
        words += f"; {drawn.omitted_ticks} more {order.unit} alike{drain} follow"
    out.print(wrapped([Text(word) for word in words.split()], " ", out.width, label + 1))
    out.print()


def _lane(drawn: Timeline, stage: int, end: float, width: int) -> Text:
    """Draws a stage's work, a character for each ``width``-th of the time, with the micro-batch's number if it fits."""
    cells: List[Tuple[str, str]] = [(".", "dim")] * width
    for span in drawn.spans:
        first, last = round(width * span.start_s / end), round(width * span.end_s / end)
        if span.stage != stage or first >= width:
            continue
        last = min(last, width)
        mark, colour = _PASSES[span.kind]
        number = str(span.micro_batch)
        for i in range(first, last):
            # A pass that is split in two shows its number only once.
            shown = number[i - first] if last - first >= len(number) > i - first else mark
            cells[i] = (shown if span.kind != "recompute" else mark, colour)
    return Text.assemble(*cells)


def _paste(plan: PipelinePlan, out: Console) -> None:
    """Prints the options to paste, on one line however narrow the terminal is, and as YAML."""
    command = plan_text.command_line(plan)
    if not command:
        out.print(Text("the layers that open the next stage, for a program of your own:", style="bold"))
        out.print(Text(" ".join(plan.splits) or "none: it is one stage"), soft_wrap=True)
        return
    out.print(Text(plan_text.how_to_run(plan), style="bold"))
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


# -- the effect of each optimisation -------------------------------------------------------------------------------


def optimisations_json(
    question: Question, candidate: Candidate, base: Forecast, optimisations: Sequence[Optimisation]
) -> str:
    """Returns the optimisations as indented JSON."""
    answer = {
        "model": question.record.name,
        "system": question.system.name,
        "splits": list(candidate.splits),
        "settings": asdict(candidate.settings),
        "predicted": _outcome_json(base),
        "predicted_band_factor": base.band_factor,
        "optimisations": [
            {**asdict(replace(one, outcome=None)), "outcome": _outcome_json(one.outcome)}
            for one in optimisations
        ],
        "assumed": question.assumed,
    }
    return json.dumps(answer, indent=2)


def _outcome_json(outcome: Optional[Forecast]) -> Optional[Dict[str, Any]]:
    """Returns an outcome as in the table: a program that does not fit has no speed."""
    if outcome is None:
        return None
    speed = None if outcome.verdict == "does not fit" else outcome.predicted_images_per_s
    return {
        "predicted_fill": outcome.predicted_fill,
        "predicted_images_per_s": speed,
        "verdict": outcome.verdict,
    }


def print_optimisations(
    question: Question, candidate: Candidate, base: Forecast, optimisations: Sequence[Optimisation]
) -> None:
    """Prints the table on stdout."""
    settings, out = candidate.settings, console(sys.stdout)
    size = "x".join(map(str, question.options.input_shape[:2]))
    rows = [(str(o.number), o.name, o.here, o.instead, *_outcome(o.outcome, base)) for o in optimisations]
    sheet = TextTable(
        f"{question.record.name} at {size}, {counted(settings.num_stages, 'stage')} on "
        f"{counted(settings.num_ipus, 'IPU')}, {question.system.title}: what one optimisation alone brings, predicted",
        ("", "optimisation", "here", "instead", "fullest IPU", "images/s"),
        ("optimisation", "here", "instead"),
        [("", "as it is", "", "", *_outcome(base, None)), *rows],
    )
    _print_sheet(out, sheet, keys=2)
    out.print(
        Text(
            "differences from the first row: points of an IPU's memory, percent; ?: uncertain whether it fits"
        )
    )
    options = plain_table(show_header=False, padding=(0, 1, 0, 0))
    options.add_column(justify="right", no_wrap=True)
    options.add_column(overflow="fold")
    for one in optimisations:
        options.add_row(str(one.number), Text(one.option + (f": {one.note}" if one.note else "")))
    out.print(options)
    out.print(Text(plan_text.within(base.band_factor)))
    out.print(Text(f"splits: {' '.join(candidate.splits)}"))
    out.print(Text(plan_text.assumed(question.assumed)))


def _outcome(outcome: Optional[Forecast], base: Optional[Forecast]) -> Tuple[str, str]:
    """Returns memory and throughput, and their differences from the program's; no speed for one that does not fit."""
    if outcome is None:
        return "not modelled", "not modelled"
    memory = units.percent(outcome.predicted_fill) + "?" * (outcome.verdict == "uncertain")
    speed = units.images(outcome.predicted_images_per_s)
    if base is not None:
        memory += f" {100 * (outcome.predicted_fill - base.predicted_fill):+6.1f}"
        speed += f" {outcome.predicted_images_per_s / base.predicted_images_per_s - 1:+5.0%}"
    return memory, outcome.verdict if outcome.verdict == "does not fit" else speed


# -- a measured system ----------------------------------------------------------------------------------------------


def print_calibration(profile: SystemProfile) -> None:
    """Prints the results of measurements of a system, with the errors before and after, on stdout."""
    from ipucnn.planning.calibration import describe

    def cells(row: MeasuredRow) -> Tuple[str, ...]:
        predicted = (row.shipped_images_per_s, row.calibrated_images_per_s)
        errors = (f"{images:,.0f} {images / row.images_per_s - 1:+5.0%}" for images in predicted)
        return (row.source, row.model, f"{row.images_per_s:,.0f}", *errors)

    out = console(sys.stdout)
    sheet = TextTable(
        "images/s, measured and predicted; predicted ones with their error",
        ("measured in", "network", "measured", "predicted", "with profile"),
        ("measured in", "network"),
        [cells(row) for row in profile.measurements],
    )
    _print_sheet(out, sheet, keys=2)
    out.print(Text("; ".join(describe(profile))))
    out.print(
        Text(
            f"geometric mean error: {profile.error_before:.3f} as shipped, {profile.error_after:.3f} with the profile, "
            f"of the {counted(len(profile.measurements), 'measurement')} that it was fitted to"
        )
    )
