"""A pipeline plan as one HTML page that needs nothing else: figures are inline SVG, there is no script.

The page is well-formed XML as well, and the same plan always gives the same bytes.
"""

import math
import shlex
from typing import Any, List, Optional, Sequence, Tuple

from ipucnn.planning.pipeline_plan import ComparisonRow, NoFit, ParetoRow, PipelinePlan, StagePlan
from ipucnn.planning.verdict import CATEGORIES
from ipucnn.reports.console import human_count
from ipucnn.reports.figures.memory import memory_figure
from ipucnn.reports.figures.pareto import pareto_figures
from ipucnn.reports.figures.profile import profile_figure
from ipucnn.reports.figures.timeline import TICK_NAMES, timeline_figure
from ipucnn.reports.markup import Markup, element, join
from ipucnn.reports.plan_style import STYLE
from ipucnn.reports.plan_units import images, mebibytes, milliseconds, percent

__all__ = ["command_line", "render"]

_NOTHING = Markup("\u2013")


def render(plan: PipelinePlan) -> str:
    """The page of a plan."""
    title = f"{plan.model} in {_stages(plan.num_stages)} on {plan.system.title}"
    body = [
        element("h1", title),
        element("p", _subtitle(plan), class_="muted"),
        *_notices(plan),
        _cards(plan),
        element("h2", "Use it"),
        element("pre", command_line(plan), tabindex=0),
        element("h2", "Memory"),
        _figure(
            memory_figure(plan),
            "Memory of each IPU of a replica at its fullest moment, predicted.",
            _legend([(f"cat-{name}", name.replace("_", " ")) for name in CATEGORIES]),
        ),
        element("h2", "Pipeline"),
        _figure(timeline_figure(plan), _timeline_caption(plan), _legend(_pass_legend(plan))),
        element("h2", "Layers"),
        _figure(
            profile_figure(plan),
            "Each layer's predicted time for one micro-batch, in the order in which the layers run; the cuts go "
            "straight down in layers and aslant to where they lie in time.",
        ),
        element("h2", "Stages"),
        _stage_table(plan),
    ]
    if plan.comparison:
        body += [element("h2", "Other splits"), _comparison(plan.comparison)]
    if plan.pareto:
        body += [element("h2", "Configurations"), _pareto(plan)]
    body += [element("h2", "About these figures"), *_about(plan)]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} (predicted)"),
        element("style", STYLE),
    )
    return (
        "<!DOCTYPE html>\n"
        + element("html", head, "\n", element("body", element("main", *_lines(body))), lang="en")
        + "\n"
    )


def command_line(plan: PipelinePlan) -> str:
    """The command that runs a plan, ready to paste."""
    words = ["ipucnn", "train", shlex.quote(plan.model)]
    for name, value in plan.run_options().items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(shlex.quote(f"{v:g}" if isinstance(v, float) else str(v)) for v in values)]
    return " ".join(words)


def _lines(parts: Sequence[Markup]) -> List[Any]:
    return [item for part in parts for item in ("\n", part)] + ["\n"]


def _stages(count: int) -> str:
    return f"{count} stage{'s' if count > 1 else ''}"


def _subtitle(plan: PipelinePlan) -> str:
    settings = plan.settings
    shape = "x".join(str(size) for size in plan.input_shape)
    passes = "training" if settings.training else "inference"
    parts = [
        f"{passes}, input {shape}, {plan.num_classes} classes, {settings.precision}",
        f"global batch {settings.global_batch_size:,} = micro-batch {settings.micro_batch_size} x "
        f"{settings.gradient_accumulation_count} accumulated x {settings.num_replicas} replica(s)",
        f"{settings.schedule}, recomputation {'on' if settings.recomputation else 'off'}",
        f"availableMemoryProportion {settings.available_memory_proportion:g}",
        f"{settings.num_ipus} of {plan.system.num_ipus} IPUs ({plan.system.ipu})",
    ]
    return (
        "; ".join(parts) + ". Everything on this page is predicted by a model, nothing was measured on IPUs."
    )


def _class(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _verdict(verdict: str, text: Optional[str] = None) -> Markup:
    return element("span", text or verdict, class_=_class(verdict))


def _proof(plan: PipelinePlan) -> Tuple[str, str]:
    """(value, explanation) of the gap."""
    bound = milliseconds(plan.predicted_lower_bound_s)
    if plan.optimal:
        return "optimal: true", f"gap 0, proved: no split in this layer order has a tick below {bound}"
    if not math.isfinite(plan.gap):
        return "no bound", "no split within this memory was found to compare with"
    kind = "the best splits take" if not plan.planned else "proved lower bound"
    return f"gap {percent(plan.gap)}", f"{kind} {bound} per tick"


def _cards(plan: PipelinePlan) -> Markup:
    tick = f"tick {milliseconds(plan.predicted_tick_s)}, of which transfers {milliseconds(plan.predicted_transfer_s)}"
    update = (
        f"fill and drain {milliseconds(plan.predicted_fill_drain_s)}, optimizer and all-reduce "
        f"{milliseconds(plan.predicted_update_s)}"
    )
    host = f"input at this throughput; the host can feed {images(plan.predicted_host_limit_images_per_s)} images/s"
    proof, explanation = _proof(plan)
    cards: List[Tuple[str, Any, str]] = [
        ("predicted throughput", f"{images(plan.predicted_images_per_s)} images/s", tick),
        (
            "predicted memory",
            _verdict(plan.verdict, f"{plan.verdict}: {percent(plan.predicted_fill)}"),
            f"of the fullest IPU; the planner allowed {percent(plan.memory_limit)}",
        ),
        ("splits", proof, explanation),
        (
            "predicted bottleneck",
            plan.bottleneck,
            f"latency of a micro-batch, forward: {milliseconds(plan.predicted_latency_s)}",
        ),
        (
            "predicted weight update" if plan.settings.training else "predicted execution",
            milliseconds(plan.predicted_weight_update_s),
            update,
        ),
        ("predicted host bandwidth", f"{plan.predicted_host_bytes_per_s / 1e9:.3g} GB/s", host),
    ]
    return element(
        "dl",
        *(
            element(
                "div",
                element("dt", name),
                element("dd", value, class_="value"),
                element("dd", more, class_="muted"),
            )
            for name, value, more in cards
        ),
        class_="cards",
    )


def _notices(plan: PipelinePlan) -> List[Markup]:
    found = []
    if plan.no_fit is not None:
        found.append(_no_fit(plan.no_fit, plan.verdict))
    elif plan.verdict != "fits":
        text = f"The fullest IPU is predicted to take {percent(plan.predicted_fill)} of its memory: {plan.verdict}."
        found.append(element("p", text, class_=f"notice {_class(plan.verdict)}"))
    if plan.assumed:
        items = [element("li", text) for text in plan.assumed]
        found.append(
            element(
                "div",
                element("p", "Assumed, because nobody asked otherwise:"),
                element("ul", *items),
                class_="notice",
            )
        )
    return found


def _no_fit(why: NoFit, verdict: str) -> Markup:
    lines = [
        f"No split into {_stages(why.num_stages)} stays below {percent(why.memory_limit)} of an IPU's memory; "
        f"the verdict on this one is: {verdict}."
    ]
    if why.layer is not None:
        lines.append(f"Layer {why.layer} exceeds that in whatever stage.")
    if why.ranges:
        ranges = "; ".join(f"{first} to {last}" for first, last in why.ranges)
        lines.append(f"Each of these runs of layers is too large for one stage: {ranges}.")
    if why.fewest_stages is not None:
        lines.append(f"It would fit in {_stages(why.fewest_stages)}, on {why.fewest_ipus} IPUs.")
    else:
        lines.append(f"No split into up to {why.max_ipus} stages fits.")
    if why.largest_micro_batch_size is not None:
        lines.append(f"The largest micro-batch with which some split fits: {why.largest_micro_batch_size}.")
    else:
        lines.append("No smaller micro-batch fits.")
    return element(
        "div", *(element("p", text, class_="name") for text in lines), class_=f"notice {_class(verdict)}"
    )


def _figure(svg: Markup, caption: str, legend: Markup = Markup("")) -> Markup:
    scroll = element("div", svg, class_="scroll", tabindex=0)
    return element("figure", element("figcaption", caption), legend, scroll)


def _legend(entries: Sequence[Tuple[str, str]]) -> Markup:
    items = []
    for class_, text in entries:
        swatch = element("rect", x=1, y=1, width=14, height=14, class_=class_)
        items.append(element("li", element("svg", swatch, viewBox="0 0 16 16", aria_hidden="true"), text))
    return element("ul", *items, class_="legend")


def _pass_legend(plan: PipelinePlan) -> List[Tuple[str, str]]:
    entries = [("pass-forward", "forward")]
    if any(stage.predicted_recompute_s for stage in plan.stages):
        entries.append(("pass-recompute", "recomputation"))
    if plan.settings.training:
        entries.append(("pass-backward", "backward"))
    if plan.predicted_transfer_s:
        entries.append(("pass-transfer", "transfer between IPUs, all wait"))
    return [*entries, ("outline", "outlined: micro-batch 0")]


def _timeline_caption(plan: PipelinePlan) -> str:
    unit = TICK_NAMES[plan.settings.schedule]
    after = (
        f" The optimizer and the all-reduce follow, {milliseconds(plan.predicted_update_s)}."
        if plan.settings.training
        else ""
    )
    return (
        f"One weight update of {plan.settings.gradient_accumulation_count} micro-batch(es), counted in {unit}, with "
        f"predicted durations. All IPUs advance together and wait for the slowest.{after}"
    )


def _table(
    head: Sequence[str], rows: Sequence[Tuple[Optional[str], Sequence[object]]], texts: Sequence[int]
) -> Markup:
    """A table; columns other than ``texts`` are numbers, set to the right."""
    classes = [None if i in texts else "n" for i in range(len(head))]
    return element(
        "div",
        element(
            "table",
            element(
                "thead",
                element(
                    "tr", *(element("th", name, scope="col", class_=c) for name, c in zip(head, classes))
                ),
            ),
            element(
                "tbody",
                *(
                    element(
                        "tr", *(element("td", cell, class_=c) for cell, c in zip(cells, classes)), class_=row
                    )
                    for row, cells in rows
                ),
            ),
        ),
        class_="scroll",
        tabindex=0,
    )


def _stage_table(plan: PipelinePlan) -> Markup:
    recomputes = any(stage.predicted_recompute_s for stage in plan.stages)
    head = ["stage", "IPU", "layers", "MACs", "parameters", "forward"]
    head += ["recompute"] if recomputes else []
    head += ["backward"] if plan.settings.training else []
    head += ["receives", "memory"]
    rows = []
    for stage in plan.stages:
        cells: List[object] = [
            stage.stage,
            stage.ipu,
            _layers(stage),
            human_count(stage.macs),
            human_count(stage.num_parameters),
        ]
        cells.append(milliseconds(stage.predicted_forward_s))
        cells += (
            [milliseconds(stage.predicted_recompute_s) if stage.predicted_recompute_s else _NOTHING]
            if recomputes
            else []
        )
        cells += [milliseconds(stage.predicted_backward_s)] if plan.settings.training else []
        cells.append(_received(stage))
        cells.append(mebibytes(sum(stage.predicted_memory_bytes.values())))
        rows.append((None, cells))
    note = "Times, transfers and memory are predicted, for one micro-batch. MACs are of one sample, forward."
    return join([element("p", note, class_="muted"), _table(head, rows, (2,))])


def _layers(stage: StagePlan) -> Markup:
    names = [_name(stage.first_layer)]
    if stage.num_layers > 1:
        names += [Markup(" to "), _name(stage.last_layer)]
    return join([*names, f" ({stage.num_layers})"])


def _name(layer: str) -> Markup:
    """A layer's name, which may be broken behind an underscore."""
    pieces: List[object] = []
    for piece in layer.split("_"):
        pieces += [piece + "_", element("wbr")]
    pieces[-2:] = [layer.rpartition("_")[2]]
    return element("code", *pieces)


def _received(stage: StagePlan) -> Markup:
    if not stage.received_bytes:
        return _NOTHING
    text = f"{mebibytes(stage.received_bytes)}, {milliseconds(stage.predicted_receive_s)}"
    if not stage.skips:
        return join([text])
    count = len(stage.skips)
    skips = f"with {count} skip{'s' if count > 1 else ''} carried through"
    return join([text, element("br"), element("span", skips, title=", ".join(stage.skips), class_="muted")])


def _comparison(rows: Sequence[ComparisonRow]) -> Markup:
    head = ["splits", "tick", "images/s", "fullest IPU", "verdict", "best tick", "times as long"]
    cells = []
    for row in rows:
        name = element(
            "details", element("summary", row.name), element("code", " ".join(row.splits) or "none")
        )
        cells.append(
            (
                None,
                [
                    name,
                    milliseconds(row.predicted_tick_s),
                    images(row.predicted_images_per_s),
                    percent(row.predicted_fill),
                    _verdict(row.verdict),
                    milliseconds(row.predicted_best_tick_s),
                    f"{row.ratio:.2f}",
                ],
            )
        )
    note = (
        "Judged by the same model under the same settings, all predicted. The best tick is that of the fastest splits "
        "that take no more memory than the plan may, or than the other splits do, whichever is more."
    )
    return join([element("p", note, class_="muted"), _table(head, cells, (0, 4))])


def _pareto(plan: PipelinePlan) -> Markup:
    head = [
        "",
        "stages",
        "IPUs",
        "schedule",
        "micro-batch",
        "accumulated",
        "replicas",
        "recompute",
        "proportion",
        "images/s",
        "fullest IPU",
        "verdict",
    ]
    rows = [
        ("chosen" if row.best else None, _pareto_cells(i, row)) for i, row in enumerate(plan.pareto, start=1)
    ]
    note = (
        "Configurations to which no other is better in throughput, memory and IPUs at once, all predicted. Filled: "
        "fits; hollow: uncertain. The dashed lines are the bound of what surely fits, and all of the memory."
    )
    figures = element(
        "div",
        *(element("div", svg, class_="scroll", tabindex=0) for svg in pareto_figures(plan)),
        class_="pair",
    )
    summary = element("summary", f"all {len(rows)} as a table")
    table = element(
        "details", summary, _table(head, rows, (3, 7, 11)), open="open" if len(rows) <= 12 else None
    )
    return join([element("figure", element("figcaption", note), figures), table])


def _pareto_cells(number: int, row: ParetoRow) -> List[object]:
    return [
        f"{number} best" if row.best else number,
        row.num_stages,
        row.num_ipus,
        row.schedule,
        row.micro_batch_size,
        row.gradient_accumulation_count,
        row.num_replicas,
        "on" if row.recomputation else "off",
        f"{row.available_memory_proportion:g}",
        images(row.predicted_images_per_s),
        percent(row.predicted_fill),
        _verdict(row.verdict),
    ]


def _about(plan: PipelinePlan) -> List[Markup]:
    texts = [
        "Times are counted from tile splits, exchange and synchronisation of each operation, with six constants "
        "fitted on public IPU results; memory is counted by category. Optimal means: no other splits of the layers "
        "in this order have a shorter tick under this model and within the memory allowed. docs/planner.md has the "
        "formulas, the errors found against public results, and what such a model can't know.",
        f"Made by ipucnn {plan.ipucnn_version}.",
    ]
    return [element("p", text, class_="muted") for text in texts]
