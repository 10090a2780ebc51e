"""What ``ipucnn plan-splits`` shows in a terminal or pipe: a plan, or with ``--optimisations`` what each brings."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Set, Tuple, Union

from ipucnn.config.options import BY_NAME
from ipucnn.datasets.registry import DATASETS
from ipucnn.models.registry import is_layer_graph
from ipucnn.planning.calibration import SystemProfile, describe
from ipucnn.planning.cost.memory import FITS_BELOW
from ipucnn.planning.cost.products import band_factor
from ipucnn.planning.cost.schedule import Timeline, timeline
from ipucnn.planning.pipeline_plan import Change, ParetoRow, PipelinePlan
from ipucnn.planning.search.configurations import TABLE_ROWS
from ipucnn.planning.search.planner import Candidate
from ipucnn.planning.search.variations import Optimisation, Outcome
from ipucnn.planning.settings import Proportions, percentages
from ipucnn.reports import units
from ipucnn.reports.console import console, plain_table, print_table, wrapped
from ipucnn.text import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
    _summary(plan, out)
    _stages(plan, out)
    _memory(plan, out)
    if plan.num_stages > 1:
        _timeline(plan, out)
    if plan.comparison:
        _comparison(plan, out)
    if plan.pareto:
        _pareto(plan, out)
    _changes(plan, out)
    if plan.assumed:
        out.print(Text("assumed: " + "; ".join(plan.assumed)))
        out.print()
    if plan.verdict != "does not fit":
        _paste(plan, out)


def _table(title: str = "", header: bool = True) -> Table:
    return plain_table(show_header=header, padding=(0, 1, 0, 0), title=title or None)


def _summary(plan: PipelinePlan, out: Console) -> None:
    from rich.text import Text

    settings = plan.settings
    replicas = f" in {counted(settings.num_replicas, 'replica')}" if settings.num_replicas > 1 else ""
    stages = f"{counted(plan.num_stages, 'stage')}" if plan.num_stages > 1 else "one stage"
    where = segments(plan) or f"{stages} on {counted(plan.occupied_ipus, 'IPU')}{replicas}"
    table = _table(f"{plan.model}: {where}, {plan.system.title}", header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(plan):
        table.add_row(Text(name, style="bold"), value if isinstance(value, Text) else Text(value))
    out.print(table)


def segments(plan: PipelinePlan) -> str:
    """What stages are that lie on one IPU and are there to be recomputed, with the replicas; "" for other plans."""
    settings = plan.settings
    if plan.num_stages == 1 or settings.num_ipus_per_replica > 1 or not settings.recomputation:
        return ""
    replicas = f", {counted(settings.num_replicas, 'replica')}" if settings.num_replicas > 1 else ""
    return f"1 IPU, {counted(plan.num_stages, 'recomputation segment')}{replicas}"


def _facts(plan: PipelinePlan) -> List[Tuple[str, Union[str, Text]]]:
    from rich.text import Text

    settings = plan.settings
    shape = "x".join(map(str, plan.input_shape))
    memory = Text.assemble(
        (plan.verdict, _VERDICTS[plan.verdict]),
        f": the fullest IPU at {units.percent(plan.predicted_fill)} of its memory",
    )
    memory.append(published(plan))
    if plan.planned and plan.memory_limit > FITS_BELOW:
        memory.append(f"; no splits stay below {units.percent(FITS_BELOW)}, these may take ")
        memory.append(units.percent(plan.memory_limit))
    proof = f"optimal: {str(plan.optimal).lower()}"
    if plan.verdict == "does not fit":
        proof = "they do not fit"
    elif plan.optimal and plan.num_stages > 1:
        proof += " (no splits of these layers in this order are faster within the memory allowed)"
    if (
        plan.bottleneck == "host"
        and "eight_bit_transfer" in plan.not_searched
        and not settings.eight_bit_transfer
    ):
        proof = "the host limits any splits, and --eight-bit-transfer was not tried"
    elif plan.not_searched and plan.num_stages > 1:
        names = (BY_NAME[name].key.replace("-", " ") for name in plan.not_searched)
        proof += f"; not searched: {', '.join(names)}"
    tick = f"tick {_ms(plan.predicted_tick_s)}, lower bound {_ms(plan.predicted_lower_bound_s)}, gap {plan.gap:.2%}"
    how = "" if settings.training else "inference, "
    if plan.num_stages > 1 and settings.training:
        how = f"{settings.schedule}, recomputation {'on' if settings.recomputation else 'off'}, "
    update = f"{_ms(plan.predicted_weight_update_s)}: {counted(settings.gradient_accumulation_count, 'tick')}"
    # A pipeline of one stage has neither; what is left of it then is rounding.
    if plan.predicted_fill_drain_s > 1e-9 * plan.predicted_weight_update_s:
        update += f", {_ms(plan.predicted_fill_drain_s)} to fill and drain"
    if settings.training:
        update += f", {_ms(plan.predicted_update_s)} update"
    if settings.num_replicas > 1 and settings.training:
        update += f" ({_ms(plan.predicted_all_reduce_s)} of it all-reduce)"
    half = " with half partials" if settings.half_partials and settings.precision != "32.32" else ""
    return [
        ("predicted", f"{plan.predicted_images_per_s:,.0f} images/s{_band(plan)}; nothing here was measured"),
        *_epoch(plan),
        ("memory", memory),
        ("splits", proof if plan.planned else f"given; {proof}"),
        ("", tick),
        ("bottleneck", plan.bottleneck),
        ("latency", f"{_ms(plan.predicted_latency_s)} of a micro-batch from the first stage to the last")
        if not settings.training
        else ("weight update", update),
        *([] if settings.training else [("execution", update)]),
        (
            "host",
            f"{plan.predicted_host_bytes_per_s / 1e9:.2f} GB/s of images; it could feed "
            f"{plan.predicted_host_limit_images_per_s:,.0f} images/s",
        ),
        (
            "batch",
            batch(plan),
        ),
        (
            "settings",
            f"{how}precision {settings.precision}{half}, input {shape}, {counted(plan.num_classes, 'class')}, "
            f"available memory proportion {proportion(settings.available_memory_proportion)}",
        ),
    ]


def _epoch(plan: PipelinePlan) -> List[Tuple[str, Union[str, Text]]]:
    """How long the training images of the data set take, where their number is known."""
    known = DATASETS.get(str(plan.options.get("dataset")))
    if known is None or known.num_examples is None or not plan.settings.training:
        return []
    number = known.num_examples[0]
    time = units.duration(number / plan.predicted_images_per_s)
    return [("epoch", f"{time} for the {number:,} training images of {plan.options['dataset']}")]


def _band(plan: PipelinePlan) -> str:
    low_high = plan.predicted_images_per_s_band
    return f" ({low_high[0]:,.0f} to {low_high[1]:,.0f} in 80% of cases)" if low_high else ""


def published(plan: PipelinePlan) -> str:
    """What is known of configurations that are about as full, as the rest of a sentence."""
    if plan.published_fits is None or not plan.published_fits[1]:
        return ""
    fits, number = plan.published_fits
    return f"; of {number} public ones about as full {fits} fit"


def band_of_rows(plan: PipelinePlan) -> str:
    """The band of throughputs in a table, a sentence; empty where the plan says nothing of it."""
    return "" if plan.predicted_band_factor is None else _within(plan.predicted_band_factor)


def _within(factor: float) -> str:
    return (
        f"80% of measurements are expected within -{1 - 1 / factor:.0%} and +{factor - 1:.0%} of the images/s"
    )


def batch(plan: PipelinePlan) -> str:
    """What a weight update, or an execution of inference, takes."""
    settings = plan.settings
    if not settings.training:
        return (
            f"micro-batch {settings.micro_batch_size:,} x {counted(settings.num_replicas, 'replica')}, and "
            f"{counted(settings.gradient_accumulation_count, 'micro-batch')} of each in an execution"
        )
    return (
        f"global batch {settings.global_batch_size:,} = micro-batch {settings.micro_batch_size:,} x "
        f"{settings.gradient_accumulation_count:,} accumulated x {counted(settings.num_replicas, 'replica')}"
    )


def _ms(seconds: float) -> str:
    return f"{units.column_milliseconds(seconds)} ms"


def _stages(plan: PipelinePlan, out: Console) -> None:
    from rich.text import Text

    recomputes = any(stage.predicted_recompute_s for stage in plan.stages)
    table = _table("stages, predicted; times of one micro-batch in ms")
    table.add_column("", justify="right")
    if plan.settings.mapping != tuple(range(plan.num_stages)):
        table.add_column("IPU", justify="right")
    table.add_column("opens at", overflow="fold")
    table.add_column("ends with", overflow="fold")
    for name in ("layers", "MACs", "params", "forward"):
        table.add_column(name, justify="right", no_wrap=True)
    if recomputes:
        table.add_column("recompute", justify="right", no_wrap=True)
    if plan.settings.training:
        table.add_column("backward", justify="right", no_wrap=True)
    if plan.num_stages > 1:
        table.add_column("receives", justify="right", no_wrap=True)
        table.add_column("skips", justify="right")
    for stage in plan.stages:
        cells: List[Union[str, Text]] = [str(stage.stage)]
        if plan.settings.mapping != tuple(range(plan.num_stages)):
            cells.append(str(stage.ipu))
        cells.append(Text(stage.first_layer))
        cells.append(Text(stage.last_layer))
        cells += [str(stage.num_layers), units.count(stage.macs), units.count(stage.num_parameters)]
        cells.append(units.column_milliseconds(stage.predicted_forward_s))
        if recomputes:
            cells.append(
                units.column_milliseconds(stage.predicted_recompute_s) if stage.predicted_recompute_s else ""
            )
        if plan.settings.training:
            cells.append(units.column_milliseconds(stage.predicted_backward_s))
        if plan.num_stages > 1:
            cells.append(
                units.column_milliseconds(stage.predicted_receive_s) if stage.predicted_receive_s else ""
            )
            cells.append(str(len(stage.skips)) if stage.skips else "")
        table.add_row(*cells)
    print_table(out, table)


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
    out.print(Text(f"timeline, predicted: the first {_ms(end)} of {whole}", style="bold"))
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


def _comparison(plan: PipelinePlan, out: Console) -> None:
    from rich.text import Text

    table = _table("other splits under the same settings, predicted")
    table.add_column("", no_wrap=False, overflow="fold")
    for name in ("stages", "tick", "best", "x best", "images/s", "memory", ""):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)

    def row(
        name: str,
        stages: int,
        tick: float,
        best: float,
        ratio: float,
        speed: float,
        fill: float,
        verdict: str,
    ) -> None:
        table.add_row(
            Text(name),
            str(stages),
            _ms(tick),
            _ms(best),
            f"{ratio:.2f}",
            f"{speed:,.0f}",
            units.percent(fill),
            Text(verdict, style=_VERDICTS[verdict]),
        )

    own = plan.predicted_tick_s / plan.predicted_lower_bound_s
    row(
        "this plan" if plan.planned else "these splits",
        plan.num_stages,
        plan.predicted_tick_s,
        plan.predicted_lower_bound_s,
        own,
        plan.predicted_images_per_s,
        plan.predicted_fill,
        plan.verdict,
    )
    for other in plan.comparison:
        row(
            other.name,
            len(other.splits) + 1,
            other.predicted_tick_s,
            other.predicted_best_tick_s,
            other.ratio,
            other.predicted_images_per_s,
            other.predicted_fill,
            other.verdict,
        )
    print_table(out, table)
    out.print(
        Text("best: the tick of the best splits that need no more memory; x best: the tick, divided by that")
    )
    if any(other.ratio < 0.995 for other in plan.comparison):
        out.print(
            Text(
                "A row below 1 has another schedule. Its ticks are shorter, and more of them fill and drain "
                "the pipeline."
            )
        )
    if band_of_rows(plan):
        out.print(Text(band_of_rows(plan)))
    out.print()


def _changes(plan: PipelinePlan, out: Console) -> None:
    """What else would be faster, and what to do if the plan does not fit."""
    from rich.text import Text

    def line(change: Change, what: str) -> Text:
        flags = " ".join(change.flags)
        memory = f"the fullest IPU at {units.percent(change.predicted_fill)}"
        doubt = "" if change.verdict == "fits" else f", {change.verdict} whether it fits"
        return Text(f"  {what}x{change.ratio:.2f}, {memory}{doubt}: {flags}")

    if plan.next_changes:
        out.print(Text("next best changes, predicted with the same splits", style="bold"))
        for change in plan.next_changes:
            out.print(line(change, f"{change.name}: "))
        out.print()
    if plan.remedy is not None:
        out.print(Text("if it does not fit on the machine", style="bold"))
        out.print(line(plan.remedy, ""))
        out.print()


_RECOMPUTATION = "r"
_MARKS = {
    _RECOMPUTATION: "recomputation of activations in the backward pass; --recomputation off leaves it out",
    "h": "half partials: sums of products in 16 bits, which change numerics; --no-half-partials leaves them out",
    "o": "optimizer state outside the chip; --no-optimizer-state-offloading keeps it on the chip",
    "t": "8-bit transfer: images travel to the device as bytes; --no-eight-bit-transfer sends them as they are",
}


def _pareto(plan: PipelinePlan, out: Console) -> None:
    from rich.text import Text

    what = "throughput, memory and IPUs" if plan.settings.training else "throughput, latency, memory and IPUs"
    table = _table(f"best uses of the IPUs, predicted: no row is better than another in {what} at once")
    of_training = plan.settings.training
    pipelined = any(entry.num_stages > 1 for entry in plan.pareto)
    heads = ("row", "IPUs", "stages", *(("schedule",) if pipelined else ()), "micro")
    heads += ("GA" if of_training else "steps", "repl.")
    for name in (*heads, *(() if of_training else ("latency",)), "with", "prop.", "images/s", "memory"):
        table.add_column(name, justify="left" if name in ("schedule", "with") else "right", no_wrap=True)
    own = next(number for number, entry in enumerate(plan.pareto, start=1) if entry.best)
    shown = _shown(plan.pareto, own)
    used: Set[str] = set()
    for number in shown:
        entry = plan.pareto[number - 1]
        marks = _RECOMPUTATION * (of_training and entry.recomputation) + entry.marks
        used |= set(marks)
        table.add_row(
            str(number),
            str(entry.num_ipus),
            str(entry.num_stages),
            *((entry.schedule if entry.num_stages > 1 else "",) if pipelined else ()),
            str(entry.micro_batch_size),
            str(entry.gradient_accumulation_count),
            str(entry.num_replicas),
            *(() if of_training else (_ms(entry.predicted_latency_s),)),
            marks,
            _span(entry.available_memory_proportion),
            f"{entry.predicted_images_per_s:,.0f}",
            Text(units.percent(entry.predicted_fill), style=_VERDICTS[entry.verdict]),
        )
    print_table(out, table)
    sentences = [f"Row {own} is the plan above."]
    if len(plan.pareto) > 1:
        other = own % len(plan.pareto) + 1
        sentences.append(
            f"Add --row {other} to the command that you typed to see row {other} in its place, with the command that "
            f"{'trains' if of_training else 'measures'} it."
        )
    if len(shown) < len(plan.pareto):
        left = f"{len(plan.pareto) - len(shown)} of {len(plan.pareto)} rows"
        sentences.append(
            f"The table leaves out {left}: --json has all of them, and --row takes their numbers, too."
        )
    out.print(Text(" ".join(sentences)))
    counts = (
        "GA: micro-batches accumulated per weight update"
        if of_training
        else "steps: micro-batches per execution"
    )
    out.print(Text(f"micro: samples in a micro-batch; {counts}; repl.: replicas"))
    if of_training and any(entry.schedule == "Sequential" for entry in plan.pareto):
        out.print(Text("Sequential stages are recomputation segments: parts of a network on one IPU."))
    out.print(
        Text("prop.: available memory proportion in percent, or the smallest and largest of the stages")
    )
    for mark, told in _MARKS.items():
        if mark in used:
            out.print(Text(f"{mark}: {told}"))
    if len(plan.pareto) > 1:
        out.print(
            Text(
                "Row 1 is the fastest of all configurations; the other rows were searched for among fewer micro-batch "
                "sizes and segments. Memory that differs by no more than 5% of an IPU's counts as equal."
            )
        )
    if band_of_rows(plan) and not plan.comparison:
        out.print(Text(band_of_rows(plan)))
    out.print()


def _shown(rows: Sequence[ParetoRow], own: int) -> List[int]:
    """Numbers, from 1 on, of the rows to show: the first ones, and the plan's."""
    first = [*range(1, min(len(rows), TABLE_ROWS - (own > TABLE_ROWS)) + 1)]
    return first if own in first else [*first, own]


def _span(proportions: Proportions) -> str:
    shares = sorted({100 * share for own in proportions for share in (own.convolution, own.matmul)})
    return f"{shares[0]:g}" if len(shares) == 1 else f"{shares[0]:g}-{shares[-1]:g}"


def _paste(plan: PipelinePlan, out: Console) -> None:
    """The options to paste, on one line however narrow the terminal, and as YAML."""
    from rich.text import Text

    options = plan.run_options()
    why = ""
    if is_layer_graph(plan.model):
        why = "the layers that open the next stage, for a program of your own:"
    if why:
        out.print(Text(why, style="bold"))
        out.print(Text(" ".join(plan.splits) or "none: it is one stage"), soft_wrap=True)
        return
    what = "train with it" if plan.settings.training else "measure it"
    told = f"to {what} (or --save plan.yml, and ipucnn {plan.command} --plan plan.yml):"
    out.print(Text(told, style="bold"))
    out.print(Text(command_line(plan)), soft_wrap=True)
    if needs_weights(plan):
        out.print(Text(needs_weights(plan)), soft_wrap=True)
    out.print()
    out.print(Text("as YAML:", style="bold"))
    out.print(Text(f"{plan.model}_plan:"), soft_wrap=True)
    for line in [f"model-name: {plan.model}", *(f"{k}: {_yaml(v)}" for k, v in options.items())]:
        out.print(Text(f"  {line}"), soft_wrap=True)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _yaml(value: object) -> str:
    return "[" + ", ".join(map(_plain, value)) + "]" if isinstance(value, list) else str(value)


# -- options, ready to paste ---------------------------------------------------------------------------------------


def proportion(proportions: Proportions) -> str:
    """availableMemoryProportion: of all stages, or of each."""
    values = percentages(proportions)
    if len(values) == len(proportions):
        text = " ".join(f"{value:g}" for value in values) + "%"
        if len(proportions) == 1 and proportions[0].matmul != proportions[0].convolution:
            text += f" (matrix products {100 * proportions[0].matmul:g}%)"
        return text
    pairs = zip(values[::2], values[1::2])
    stages = " ".join(f"{a:g}/{b:g}" if a != b else f"{a:g}" for a, b in pairs)
    return f"{stages}% (convolutions/matrix products)"


def command_line(plan: PipelinePlan) -> str:
    """The command that runs a plan, ready to paste."""
    command, *flags = plan.command.split()
    words = ["ipucnn", command, shlex.quote(plan.model), *flags]
    for name, value in plan.run_options().items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = (
            value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        )
        words += [f"--{name}", *(shlex.quote(f"{v:g}" if isinstance(v, float) else str(v)) for v in values)]
    return " ".join(words)


def needs_weights(plan: PipelinePlan) -> str:
    """What to add to the command, as a sentence; "" where it is whole.  A plan knows no weights."""
    if "freeze" not in plan.options:
        return ""
    return "add --weights RUN, the run in which the frozen layers were trained, or --weights imagenet"


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
    out.print(Text(_within(band_factor(request.system))))
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
