"""The tables of a plan's page."""

from typing import List, Optional, Sequence, Tuple

from ipucnn.planning.pipeline_plan import ComparisonRow, ParetoRow, PipelinePlan, StagePlan
from ipucnn.reports import units
from ipucnn.reports.markup import Markup, element, join
from ipucnn.reports.plan_units import proportion

__all__ = ["comparison_table", "pareto_table", "stage_table", "verdict_class", "verdict_mark"]

_NOTHING = Markup("\u2013")


def verdict_class(verdict: str) -> str:
    """The style sheet's class for a verdict."""
    return verdict.replace(" ", "-")


def verdict_mark(verdict: str, label: Optional[str] = None) -> Markup:
    """A verdict, or another label, in its colour."""
    return element("span", label or verdict, class_=verdict_class(verdict))


def _table(
    head: Sequence[str], rows: Sequence[Tuple[Optional[str], Sequence[object]]], texts: Sequence[int]
) -> Markup:
    """A table; columns other than ``texts`` are numbers, set to the right."""
    classes = [None if i in texts else "n" for i in range(len(head))]
    header = element("tr", *(element("th", name, scope="col", class_=c) for name, c in zip(head, classes)))
    lines = []
    for row_class, cells in rows:
        columns = [element("td", cell, class_=c) for cell, c in zip(cells, classes)]
        lines.append(element("tr", *columns, class_=row_class))
    table = element("table", element("thead", header), element("tbody", *lines))
    return element("div", table, class_="scroll", tabindex=0)


def stage_table(plan: PipelinePlan) -> Markup:
    recomputes = any(stage.predicted_recompute_s for stage in plan.stages)
    head = ["stage", "IPU", "layers", "MACs", "parameters", "forward"]
    head += ["recompute"] if recomputes else []
    head += ["backward"] if plan.settings.training else []
    head += ["receives", "memory"]
    rows = [(None, _stage_cells(plan, stage, recomputes)) for stage in plan.stages]
    note = "Times, transfers and memory are predicted, for one micro-batch. MACs are of one sample, forward."
    return join([element("p", note, class_="muted"), _table(head, rows, (2,))])


def _stage_cells(plan: PipelinePlan, stage: StagePlan, recomputes: bool) -> List[object]:
    cells: List[object] = [stage.stage, stage.ipu, _layers(stage)]
    cells += [units.count(stage.macs), units.count(stage.num_parameters)]
    cells.append(units.milliseconds(stage.predicted_forward_s))
    if recomputes:
        again = stage.predicted_recompute_s
        cells.append(units.milliseconds(again) if again else _NOTHING)
    if plan.settings.training:
        cells.append(units.milliseconds(stage.predicted_backward_s))
    return [*cells, _received(stage), units.mebibytes(sum(stage.predicted_memory_bytes.values()))]


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
    moved_s = stage.predicted_receive_s
    text = (
        f"{units.mebibytes(stage.received_bytes)}, {units.milliseconds(moved_s) if moved_s else 'same IPU'}"
    )
    if not stage.skips:
        return join([text])
    count = len(stage.skips)
    skips = f"with {count} skip{'s' if count > 1 else ''} carried through"
    return join([text, element("br"), element("span", skips, title=", ".join(stage.skips), class_="muted")])


def comparison_table(rows: Sequence[ComparisonRow]) -> Markup:
    head = ["splits", "tick", "images/s", "fullest IPU", "verdict", "best tick", "times as long"]
    table = [(None, _comparison_cells(row)) for row in rows]
    note = (
        "Judged by the same model under the same settings, all predicted. The best tick is that of the fastest splits "
        "that take no more memory than the plan may, or than the other splits do, whichever is more."
    )
    return join([element("p", note, class_="muted"), _table(head, table, (0, 4))])


def _comparison_cells(row: ComparisonRow) -> List[object]:
    splits = element("code", " ".join(row.splits) or "none")
    return [
        element("details", element("summary", row.name), splits),
        units.milliseconds(row.predicted_tick_s),
        units.images(row.predicted_images_per_s),
        units.percent(row.predicted_fill),
        verdict_mark(row.verdict),
        units.milliseconds(row.predicted_best_tick_s),
        f"{row.ratio:.2f}",
    ]


def pareto_table(plan: PipelinePlan) -> Markup:
    head = ["", "stages", "IPUs", "schedule", "micro-batch", "accumulated", "replicas"]
    head += ["recompute", "proportion", "images/s", "fullest IPU", "verdict"]
    rows = [
        ("chosen" if row.best else None, _pareto_cells(number, row))
        for number, row in enumerate(plan.pareto, start=1)
    ]
    summary = element("summary", f"all {len(rows)} as a table")
    return element(
        "details", summary, _table(head, rows, (3, 7, 11)), open="open" if len(rows) <= 12 else None
    )


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
        proportion(row.available_memory_proportion),
        units.images(row.predicted_images_per_s),
        units.percent(row.predicted_fill),
        verdict_mark(row.verdict),
    ]
