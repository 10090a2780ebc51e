"""A pipeline plan as one HTML page that needs nothing else: figures are inline SVG.

``plan.html.j2`` beside this file is the page; this module says what it is about, in words and figures.  The page is
well-formed XML as well, and the same plan always gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Tuple

from ipucnn.models.registry import is_layer_graph
from ipucnn.planning.cost.memory import CATEGORIES
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.reports import units
from ipucnn.reports.plan import (
    band_of_rows,
    batch,
    command_line,
    needs_weights,
    proportion,
    published,
    segments,
)
from ipucnn.text import counted

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

TEMPLATE = "plan.html.j2"
Legend = List[Tuple[str, str]]
"""The style sheet's class of each mark, and what the mark means."""


class Card(NamedTuple):
    """One of the figures at the top: its name, value, what more there is to say, and a verdict that colours it."""

    name: str
    value: str
    more: str
    verdict: Optional[str] = None


class Page(NamedTuple):
    """What the page says besides the plan's own values."""

    title: str
    subtitle: str
    cards: List[Card]
    command_line: str
    needs_weights: str
    memory: Markup
    memory_legend: Legend
    timeline: Markup
    timeline_caption: str
    timeline_legend: Legend
    profile: Markup
    stage_columns: List[str]
    recomputes: bool
    pareto: Tuple[Markup, ...]


def render(plan: PipelinePlan) -> str:
    """The page of a plan."""
    environment = page_environment()
    environment.globals.update(band_of_rows=band_of_rows)
    environment.filters["proportion"] = proportion
    environment.filters["verdict_class"] = verdict_class
    # Macros of the template see what is global, not what is given to it.
    environment.globals.update(plan=plan, page=_page(plan))
    return str(environment.get_template(TEMPLATE).render())


def page_environment() -> Environment:
    """What renders the templates of this folder: text is escaped, and what no page may contain is replaced."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from ipucnn.reports.plan_figures import clean

    def finalize(value: object) -> Any:
        return clean(value) if isinstance(value, str) else value

    environment = Environment(
        loader=FileSystemLoader(str(Path(__file__).parent)),
        autoescape=True,
        finalize=finalize,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(units=units)
    return environment


def verdict_class(verdict: str) -> str:
    """The style sheet's class for a verdict."""
    return verdict.replace(" ", "-")


def _page(plan: PipelinePlan) -> Page:
    from ipucnn.reports import plan_figures

    recomputes = any(stage.predicted_recompute_s for stage in plan.stages)
    columns = ["stage", "IPU", "layers", "MACs", "parameters", "forward"]
    columns += ["recompute"] if recomputes else []
    columns += ["backward"] if plan.settings.training else []
    stages, segmented = counted(plan.num_stages, "stage"), segments(plan)
    return Page(
        title=f"{plan.model}: {segmented}, {plan.system.title}"
        if segmented
        else f"{plan.model} in {stages} on {plan.system.title}",
        subtitle=_subtitle(plan),
        cards=_cards(plan),
        command_line="" if is_layer_graph(plan.model) else command_line(plan),
        needs_weights=needs_weights(plan),
        memory=plan_figures.memory_figure(plan),
        memory_legend=[(f"cat-{name}", name.replace("_", " ")) for name in CATEGORIES],
        timeline=plan_figures.timeline_figure(plan),
        timeline_caption=_timeline_caption(plan),
        timeline_legend=_timeline_legend(plan, recomputes),
        profile=plan_figures.profile_figure(plan),
        stage_columns=[*columns, "receives", "memory"],
        recomputes=recomputes,
        pareto=plan_figures.pareto_figures(plan) if plan.pareto else (),
    )


def _subtitle(plan: PipelinePlan) -> str:
    settings = plan.settings
    shape = "x".join(str(size) for size in plan.input_shape)
    passes = "training" if settings.training else "inference"
    parts = [
        f"{passes}, input {shape}, {counted(plan.num_classes, 'class')}, {settings.precision}",
        batch(plan),
        f"{settings.schedule}, recomputation {'on' if settings.recomputation else 'off'}",
        f"availableMemoryProportion {proportion(settings.available_memory_proportion)}",
        f"{settings.num_ipus} of {counted(plan.system.num_ipus, 'IPU')} ({plan.system.ipu})",
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


def _cards(plan: PipelinePlan) -> List[Card]:
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
    low_high, band = plan.predicted_images_per_s_band, ""
    if low_high is not None:
        band = f"{units.images(low_high[0])} to {units.images(low_high[1])} in 80% of cases; "
    return [
        Card("predicted throughput", f"{units.images(plan.predicted_images_per_s)} images/s", band + tick),
        Card(
            "predicted memory",
            f"{plan.verdict}: {units.percent(plan.predicted_fill)}",
            "of the fullest IPU"
            + (f"; the planner allowed {units.percent(plan.memory_limit)}" if plan.planned else "")
            + published(plan),
            plan.verdict,
        ),
        Card("splits", proof, explanation),
        Card(
            "predicted bottleneck",
            plan.bottleneck,
            f"latency of a micro-batch, forward: {units.milliseconds(plan.predicted_latency_s)}",
        ),
        Card(
            "predicted weight update" if plan.settings.training else "predicted execution",
            units.milliseconds(plan.predicted_weight_update_s),
            update,
        ),
        Card("predicted host bandwidth", f"{plan.predicted_host_bytes_per_s / 1e9:.3g} GB/s", host),
    ]


def _timeline_legend(plan: PipelinePlan, recomputes: bool) -> Legend:
    entries = [("pass-forward", "forward")]
    if recomputes:
        entries.append(("pass-recompute", "recomputation"))
    if plan.settings.training:
        entries.append(("pass-backward", "backward"))
    if plan.predicted_transfer_s:
        entries.append(("pass-transfer", "transfer between IPUs, all wait"))
    return [*entries, ("outline", "outlined: micro-batch 0")]


def _timeline_caption(plan: PipelinePlan) -> str:
    from ipucnn.reports.plan_figures import TICK_NAMES

    settings, after = plan.settings, ""
    if settings.training:
        after = f" The optimizer and the all-reduce follow, {units.milliseconds(plan.predicted_update_s)}."
    return (
        f"One {'weight update' if settings.training else 'execution'} of "
        f"{counted(settings.gradient_accumulation_count, 'micro-batch')}, counted in "
        f"{TICK_NAMES[settings.schedule]}, with predicted durations. "
        f"All IPUs advance together and wait for the slowest.{after}"
    )
