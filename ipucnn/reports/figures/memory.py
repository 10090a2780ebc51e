"""Figure: memory of each IPU by category, against what it has."""

from typing import Callable, List

from ipucnn.planning.cost.memory import CATEGORIES, FITS_BELOW, FITS_NOT_ABOVE
from ipucnn.planning.pipeline_plan import IpuPlan, PipelinePlan
from ipucnn.reports import units
from ipucnn.reports.figures.svg import WIDTH, group, line, svg, text
from ipucnn.reports.markup import Markup, element, nice_ticks

__all__ = ["memory_figure"]

_MIB = 2**20
_LEFT, _RIGHT, _TOP = 150.0, 20.0, 34.0
_ROW, _BAR = 40.0, 24.0
# The sums stand in a column of their own, behind all bars.
_COLUMN = 150.0

_MARKS = {"fits": "\u2713", "uncertain": "?", "does not fit": "\u2717"}


def memory_figure(plan: PipelinePlan) -> Markup:
    """A stacked bar for each IPU of a replica, its capacity, and the bounds of the verdicts."""
    capacity = plan.ipus[0].capacity_bytes
    totals = [sum(ipu.predicted_memory_bytes.values()) for ipu in plan.ipus]
    end = max(capacity * FITS_NOT_ABOVE * 1.08, max(totals) * 1.02)
    bottom = _TOP + _ROW * len(plan.ipus)
    scale = (WIDTH - _LEFT - _RIGHT - _COLUMN) / end

    def x(bytes_: float) -> float:
        return _LEFT + scale * bytes_

    parts: List[Markup] = []
    for tick in nice_ticks(end / _MIB, 6):
        parts.append(line(x(tick * _MIB), _TOP, x(tick * _MIB), bottom, "grid"))
        parts.append(text(x(tick * _MIB), bottom + 18, f"{tick:,.0f}", "label middle"))
    parts.append(text(WIDTH - _RIGHT, bottom + 18, "MiB, predicted", "label end"))
    for row, (ipu, total) in enumerate(zip(plan.ipus, totals)):
        parts.append(_bar(ipu, total, x, _TOP + _ROW * row + (_ROW - _BAR) / 2))
    bounds = (
        (FITS_BELOW, "end", 4.0, f"fits below {units.percent(FITS_BELOW)}"),
        (1.0, "middle", 0.0, "all"),
        (FITS_NOT_ABOVE, "start", -4.0, f"does not fit above {units.percent(FITS_NOT_ABOVE)}"),
    )
    for share, anchor, nudge, label in bounds:
        at = x(share * capacity)
        parts.append(line(at, _TOP - 6, at, bottom, "bound whole" if share == 1 else "bound"))
        parts.append(text(at + nudge, _TOP - 12, label, f"label {anchor}"))
    worst = max(plan.ipus, key=lambda ipu: ipu.predicted_fill)
    return svg(
        "memory",
        "Predicted memory of each IPU",
        f"Stacked by category; an IPU has {units.mebibytes(capacity)}. The fullest is IPU {worst.ipu} at "
        f"{units.percent(worst.predicted_fill)}: {worst.verdict}.",
        bottom + 30,
        parts,
    )


def _bar(ipu: IpuPlan, total: float, x: Callable[[float], float], y: float) -> Markup:
    stages = ", ".join(str(stage) for stage in ipu.stages)
    if len(ipu.stages) > 4:
        stages = f"{ipu.stages[0]} ... {ipu.stages[-1]}"
    parts = [
        text(_LEFT - 10, y + 11, f"IPU {ipu.ipu}", "label end strong"),
        text(_LEFT - 10, y + 24, f"stage{'s' if len(ipu.stages) > 1 else ''} {stages}", "label end small"),
    ]
    begin = 0.0
    for name in CATEGORIES:
        bytes_ = ipu.predicted_memory_bytes[name]
        if bytes_ > 0:
            title = f"IPU {ipu.ipu}: {name.replace('_', ' ')} {units.mebibytes(bytes_)}, predicted"
            rect = element(
                "rect",
                element("title", title),
                x=x(begin),
                y=y,
                width=x(begin + bytes_) - x(begin),
                height=_BAR,
                class_=f"cat-{name}",
                data_ipu=ipu.ipu,
                data_category=name,
                data_bytes=repr(float(bytes_)),
            )
            parts.append(rect)
        begin += bytes_
    label = f"{units.mebibytes(total)}, {units.percent(ipu.predicted_fill)} {_MARKS[ipu.verdict]}"
    parts.append(text(WIDTH - _RIGHT, y + _BAR / 2 + 4, label, "label end strong"))
    return group("ipu", parts)
