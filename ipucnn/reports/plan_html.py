"""Renders a pipeline plan as one self-contained HTML page, with figures as inline SVG.

``plan.html.j2`` beside this file is the page; this module provides its contents, in words and figures.  The page is
well-formed XML as well, and the same plan always gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, NamedTuple, Tuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ipucnn.planning.cost.memory import CATEGORIES, FITS_BELOW, FITS_NOT_ABOVE
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.reports import plan_figures, plan_text, units
from ipucnn.text import counted

TEMPLATE = "plan.html.j2"
Legend = List[Tuple[str, str]]
"""The style sheet's class of each mark, and the mark's meaning."""


class Figure(NamedTuple):
    """A heading, the content of the figure below it, and the meaning of its marks."""

    heading: str
    caption: str
    legend: Legend
    svg: Markup


def render(plan: PipelinePlan) -> str:
    """Returns the page of a plan."""
    environment = page_environment()
    environment.filters.update(verdict_of=plan_text.verdict_of)
    template = environment.get_template(TEMPLATE)
    sheets = [plan_text.stage_sheet(plan)]
    sheets += [plan_text.comparison_sheet(plan)] if plan.comparison else []
    return str(
        template.render(
            plan=plan,
            title=plan_text.title(plan),
            facts=_facts(plan),
            assumed=plan_text.assumed(plan.assumed),
            why_no_fit=plan_text.why_no_fit(plan) if plan.no_fit or plan.verdict != "fits" else [],
            how_to_run=plan_text.how_to_run(plan),
            command_line=plan_text.command_line(plan),
            needs_weights=plan_text.needs_weights(plan),
            figures=_figures(plan),
            sheets=sheets,
            front=(plan_figures.pareto_figures(plan), plan_text.pareto_sheet(plan)) if plan.pareto else None,
        )
    )


def page_environment() -> Environment:
    """Returns the template environment of this folder; it escapes text and replaces characters not allowed in pages."""

    def finalize(value: object) -> Any:
        return plan_figures.clean(value) if isinstance(value, str) else value

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


def _facts(plan: PipelinePlan) -> List[Tuple[str, List[str]]]:
    """Returns names and their lines."""
    facts: List[Tuple[str, List[str]]] = []
    for name, text in plan_text.facts(plan):
        if name:
            facts.append((name, []))
        facts[-1][1].append(text)
    return facts


def _figures(plan: PipelinePlan) -> List[Figure]:
    training = plan.settings.training
    passes = [("forward", "forward")]
    passes += [("recompute", "recomputation")] * any(stage.predicted_recompute_s for stage in plan.stages)
    passes += [("backward", "backward")] * training
    passes += [("transfer", "transfer between IPUs, all wait")] * (plan.predicted_transfer_s > 0)
    update = units.milliseconds(plan.predicted_update_s)
    after = f" The optimizer and the all-reduce follow, {update}." * training
    count = counted(plan.settings.gradient_accumulation_count, "micro-batch")
    return [
        Figure(
            "Memory",
            "Memory of each IPU of a replica at its fullest moment, predicted. Programs fit below the first dashed "
            f"line ({units.percent(FITS_BELOW)}) and do not fit above the second ({units.percent(FITS_NOT_ABOVE)}); "
            "between them it is uncertain. The solid line is all of the memory.",
            [(f"cat-{name}", name.replace("_", " ")) for name in CATEGORIES],
            plan_figures.memory_figure(plan),
        ),
        Figure(
            "Pipeline",
            f"One {'weight update' if training else 'execution'} of {count}, counted in "
            f"{plan.settings.order.unit}, with predicted durations. All IPUs advance together "
            f"and wait for the slowest.{after}",
            [*((f"pass-{name}", text) for name, text in passes), ("outline", "outlined: micro-batch 0")],
            plan_figures.timeline_figure(plan),
        ),
        Figure(
            "Layers",
            "Each layer's predicted time for one micro-batch, in the order in which the layers run. Dashed lines are "
            "the cuts between the stages, and lead down to the share of each stage.",
            [],
            plan_figures.profile_figure(plan),
        ),
    ]
