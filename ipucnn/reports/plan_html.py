"""A pipeline plan as one HTML page that needs nothing else: figures are inline SVG.

``plan.html.j2`` beside this file is the page; this module says what it is about, in words and figures.  The page is
well-formed XML as well, and the same plan always gives the same bytes.  The page of a search has a script,
``plan_explorer.js``, for its reader to choose among configurations; without scripts everything about the plan is there.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.documents import MAX_BYTES
from ipucnn.filesystem import read_text
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

    from ipucnn.planning.what_if import Choice

TEMPLATE = "plan.html.j2"
SCRIPT = "plan_explorer.js"
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
    policy: str
    script: Markup
    choices: Markup
    chosen: List[Tuple[str, str]]


def render(plan: PipelinePlan, choices: Sequence[Choice] = ()) -> str:
    """The page of a plan.

    Args:
        choices: what its reader can choose from; without them the page has no script.
    """
    environment = page_environment()
    environment.globals.update(band_of_rows=band_of_rows)
    environment.filters["proportion"] = proportion
    environment.filters["verdict_class"] = verdict_class
    # Macros of the template see what is global, not what is given to it.
    environment.globals.update(plan=plan, page=_page(plan, choices))
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


def _page(plan: PipelinePlan, choices: Sequence[Choice]) -> Page:
    from markupsafe import Markup

    from ipucnn.reports import plan_figures

    recomputes = any(stage.predicted_recompute_s for stage in plan.stages)
    columns = ["stage", "IPU", "layers", "MACs", "parameters", "forward"]
    columns += ["recompute"] if recomputes else []
    columns += ["backward"] if plan.settings.training else []
    stages, segmented = counted(plan.num_stages, "stage"), segments(plan)
    script = read_text(Path(__file__).parent / SCRIPT, MAX_BYTES) if choices else ""
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
        policy=_policy(script),
        script=Markup(script),
        choices=_choices_json(plan, choices),
        chosen=_chosen(plan),
    )


# -- the configurations to choose from


def _policy(script: str) -> str:
    """The content security policy: nothing is fetched from anywhere, and no other script than this one runs."""
    allowed = "'none'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed = f"'sha256-{digest}'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def _chosen(plan: PipelinePlan) -> List[Tuple[str, str]]:
    """What can be chosen: key, and its name for readers."""
    batch_ = "global batch" if plan.settings.training else "micro-batches per execution"
    return [("ipus", "IPUs"), ("precision", "precision"), ("micro", "micro-batch"), ("batch", batch_)]


def _choices_json(plan: PipelinePlan, choices: Sequence[Choice]) -> Markup:
    """The data of the script, as JSON in which nothing can end the element that it stands in."""
    from markupsafe import Markup

    data = {
        "names": dict(_chosen(plan)),
        "whole": "predicted weight update" if plan.settings.training else "predicted execution",
        "categories": list(CATEGORIES),
        "placeholder": _COUNT,
        "choices": [_choice(plan, one) for one in choices],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


# Stands in a command for the number of micro-batches, which the reader chooses.
_COUNT = "{count}"


def _choice(plan: PipelinePlan, one: Choice) -> Dict[str, Any]:
    settings, prediction = one.settings, one.prediction
    how = (
        f"{counted(settings.num_stages, 'stage')}, {settings.schedule}"
        if settings.num_stages > 1
        else "one stage"
    )
    if settings.training:
        how += f", recomputation {'on' if settings.recomputation else 'off'}"
    if settings.half_partials and settings.precision != "32.32":
        how += ", half partials (which change numerics)"
    if settings.offloads_optimizer_state and settings.optimizer_slots:
        how += ", optimizer state outside the chip"
    fullest = max(one.ipus, key=lambda memory: memory.fill)
    command = ""
    if not is_layer_graph(plan.model):
        flag = "--gradient-accumulation-count" if settings.training else "--steps-per-execution"
        command = command_line(replace(plan, settings=settings, splits=one.splits)).replace(
            f"{flag} {settings.gradient_accumulation_count} ", f"{flag} {_COUNT} "
        )
    per_batch = settings.micro_batch_size * settings.num_replicas if settings.training else 1
    return {
        "best": one.best,
        "about": f"{how}, {counted(settings.num_replicas, 'replica')} of "
        f"{counted(settings.num_ipus_per_replica, 'IPU')}, "
        f"availableMemoryProportion {proportion(settings.available_memory_proportion)}",
        "ipus": settings.occupied_ipus,
        "precision": settings.precision,
        "micro": settings.micro_batch_size,
        "count": settings.gradient_accumulation_count,
        "schedule": settings.schedule,
        "training": settings.training,
        "command": command,
        "fixed": one.fixed_s,
        "tick": prediction.tick_s,
        "latency": prediction.latency_s,
        "fill": fullest.fill,
        "verdict": fullest.verdict,
        "fullest": units.percent(fullest.fill),
        "fills": [units.percent(memory.fill) for memory in one.ipus],
        "memory": [
            [size / memory.capacity_bytes for size in memory.categories().values()] for memory in one.ipus
        ],
        "stages": [
            {
                "ipu": stage.ipu,
                "first": first,
                "last": last,
                "forward": stage.forward_s,
                "recompute": stage.recompute_s,
                "backward": stage.backward_s - stage.recompute_s,
                "receive": stage.receive_s,
            }
            for stage, (first, last) in zip(prediction.stages, one.layers)
        ],
        "batches": [
            {
                "count": batch_.count,
                "size": batch_.count * per_batch,
                "images": batch_.images_per_s,
                "seconds": batch_.seconds,
                "bottleneck": batch_.bottleneck,
            }
            for batch_ in one.batches
        ],
    }


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
