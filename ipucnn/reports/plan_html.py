"""A pipeline plan as one HTML page that needs nothing else: figures are inline SVG, there is no script.

The page is well-formed XML as well, and the same plan always gives the same bytes.
"""

from typing import Any, List, Sequence, Tuple

from ipucnn.planning.cost.memory import CATEGORIES
from ipucnn.planning.pipeline_plan import NoFit, PipelinePlan
from ipucnn.reports import units
from ipucnn.reports.figures.memory import memory_figure
from ipucnn.reports.figures.pareto import pareto_figures
from ipucnn.reports.figures.profile import profile_figure
from ipucnn.reports.figures.timeline import TICK_NAMES, timeline_figure
from ipucnn.reports.markup import Markup, element
from ipucnn.reports.plan_style import STYLE
from ipucnn.reports.plan_tables import (
    comparison_table,
    pareto_table,
    stage_table,
    verdict_class,
    verdict_mark,
)
from ipucnn.reports.plan_units import command_line, proportion

__all__ = ["render"]


def render(plan: PipelinePlan) -> str:
    """The page of a plan."""
    title = f"{plan.model} in {_stages(plan.num_stages)} on {plan.system.title}"
    body = [
        element("h1", title),
        element("p", _subtitle(plan), class_="muted"),
        *_assumed(plan),
        *_notices(plan),
        _cards(plan),
        element("h2", "Use it"),
        element("pre", command_line(plan), tabindex=0),
        element(
            "p",
            "Or save the plan, ",
            element("code", "ipucnn plan-splits ... --save plan.yml"),
            ", and run it: ",
            element("code", f"ipucnn train {plan.model} --plan plan.yml"),
            class_="muted",
        ),
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
        stage_table(plan),
    ]
    if plan.comparison:
        body += [element("h2", "Other splits"), comparison_table(plan.comparison)]
    if plan.pareto:
        body += [element("h2", "Configurations"), *_pareto(plan)]
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
        f"availableMemoryProportion {proportion(settings.available_memory_proportion)}",
        f"{settings.num_ipus} of {plan.system.num_ipus} IPUs ({plan.system.ipu})",
    ]
    return (
        "; ".join(parts) + ". Everything on this page is predicted by a model, nothing was measured on IPUs."
    )


def _proof(plan: PipelinePlan) -> Tuple[str, str]:
    """(value, explanation) of the gap."""
    bound = units.milliseconds(plan.predicted_lower_bound_s)
    if plan.optimal:
        return "optimal: true", f"gap 0, proved: no split in this layer order has a tick below {bound}"
    kind = "the best splits take" if not plan.planned else "proved lower bound"
    return f"gap {units.percent(plan.gap)}", f"{kind} {bound} per tick"


def _cards(plan: PipelinePlan) -> Markup:
    tick = (
        f"tick {units.milliseconds(plan.predicted_tick_s)}, of which transfers "
        f"{units.milliseconds(plan.predicted_transfer_s)}"
    )
    update = f"fill and drain {units.milliseconds(plan.predicted_fill_drain_s)}"
    if plan.settings.training:
        update += f", optimizer and all-reduce {units.milliseconds(plan.predicted_update_s)}"
    limit = units.images(plan.predicted_host_limit_images_per_s)
    host = f"input at this throughput; the host can feed {limit} images/s"
    proof, explanation = _proof(plan)
    cards: List[Tuple[str, Any, str]] = [
        ("predicted throughput", f"{units.images(plan.predicted_images_per_s)} images/s", tick),
        (
            "predicted memory",
            verdict_mark(plan.verdict, f"{plan.verdict}: {units.percent(plan.predicted_fill)}"),
            "of the fullest IPU"
            + (f"; the planner allowed {units.percent(plan.memory_limit)}" if plan.planned else ""),
        ),
        ("splits", proof, explanation),
        (
            "predicted bottleneck",
            plan.bottleneck,
            f"latency of a micro-batch, forward: {units.milliseconds(plan.predicted_latency_s)}",
        ),
        (
            "predicted weight update" if plan.settings.training else "predicted execution",
            units.milliseconds(plan.predicted_weight_update_s),
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


def _assumed(plan: PipelinePlan) -> List[Markup]:
    if not plan.assumed:
        return []
    return [
        element("p", f"Assumed, as nothing else was asked for: {'; '.join(plan.assumed)}.", class_="muted")
    ]


def _notices(plan: PipelinePlan) -> List[Markup]:
    found = []
    if plan.no_fit is not None:
        found.append(_no_fit(plan.no_fit, plan.verdict))
    elif plan.verdict != "fits":
        fill = units.percent(plan.predicted_fill)
        text = f"The fullest IPU is predicted to take {fill} of its memory: {plan.verdict}."
        found.append(element("p", text, class_=f"notice {verdict_class(plan.verdict)}"))
    return found


def _no_fit(why: NoFit, verdict: str) -> Markup:
    lines = [
        f"No split into {_stages(why.num_stages)} stays below {units.percent(why.memory_limit)} of an IPU's memory; "
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
        "div",
        *(element("p", text, class_="name") for text in lines),
        class_=f"notice {verdict_class(verdict)}",
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
    settings, after = plan.settings, ""
    if settings.training:
        after = f" The optimizer and the all-reduce follow, {units.milliseconds(plan.predicted_update_s)}."
    return (
        f"One {'weight update' if settings.training else 'execution'} of {settings.gradient_accumulation_count} "
        f"micro-batch(es), counted in {TICK_NAMES[settings.schedule]}, with predicted durations. All IPUs advance "
        f"together and wait for the slowest.{after}"
    )


def _pareto(plan: PipelinePlan) -> List[Markup]:
    note = (
        "Configurations to which no other is better in throughput, memory and IPUs at once, all predicted. Filled: "
        "fits; hollow: uncertain. The dashed lines are the bound of what surely fits, and all of the memory."
    )
    panels = [element("div", svg, class_="scroll", tabindex=0) for svg in pareto_figures(plan)]
    figure = element("figure", element("figcaption", note), element("div", *panels, class_="pair"))
    return [figure, pareto_table(plan)]


def _about(plan: PipelinePlan) -> List[Markup]:
    texts = [
        "Times are counted from tile splits, exchange and synchronisation of each operation, with six constants "
        "fitted on public IPU results; memory is counted by category. Optimal means: no other splits of the layers "
        "in this order have a shorter tick under this model and within the memory allowed. docs/planner.md has the "
        "formulas, the errors found against public results, and what such a model can't know.",
        f"Made by ipucnn {plan.ipucnn_version}.",
    ]
    return [element("p", text, class_="muted") for text in texts]
