"""Figures: the Pareto front of configurations."""

from typing import Callable, List, Sequence, Tuple

from ipucnn.planning.cost.memory import FITS_BELOW
from ipucnn.planning.pipeline_plan import ParetoRow, PipelinePlan
from ipucnn.reports import units
from ipucnn.reports.figures.svg import line, svg, text
from ipucnn.reports.markup import Markup, element, nice_ticks

__all__ = ["pareto_figures"]

_WIDTH, _HEIGHT = 520.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 20.0, 34.0, 280.0


def pareto_figures(plan: PipelinePlan) -> Tuple[Markup, Markup]:
    """Throughput against IPUs, and against the memory of the fullest IPU."""
    counts = sorted({row.num_ipus for row in plan.pareto})
    far = max(1.0, *(row.predicted_fill for row in plan.pareto)) * 1.04
    return (
        _scatter(
            plan.pareto,
            "ipus",
            "Predicted throughput against IPUs",
            "IPUs of all replicas",
            lambda row: (counts.index(row.num_ipus) + 0.5) / len(counts),
            [((i + 0.5) / len(counts), str(count)) for i, count in enumerate(counts)],
            (),
        ),
        _scatter(
            plan.pareto,
            "fill",
            "Predicted throughput against memory",
            "memory of the fullest IPU, predicted",
            lambda row: row.predicted_fill / far,
            [(tick / far, units.percent(tick)) for tick in nice_ticks(far, 6)],
            (FITS_BELOW / far, 1 / far),
        ),
    )


def _scatter(
    rows: Sequence[ParetoRow],
    name: str,
    title: str,
    axis: str,
    place: Callable[[ParetoRow], float],
    ticks: Sequence[Tuple[float, str]],
    bounds: Sequence[float],
) -> Markup:
    """A point for each row; ``place``, ``ticks`` and ``bounds`` are shares of the axis."""
    most = max(row.predicted_images_per_s for row in rows) * 1.12

    def x(share: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share

    def y(images_per_s: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * images_per_s / most

    parts: List[Markup] = []
    for value in nice_ticks(most, 5):
        parts.append(line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), "grid"))
        parts.append(text(_LEFT - 8, y(value) + 4, f"{value:,.6g}", "label end"))
    for share, label in ticks:
        parts.append(line(x(share), _BOTTOM, x(share), _BOTTOM + 5, "axis"))
        parts.append(text(x(share), _BOTTOM + 20, label, "label middle"))
    parts += [line(x(share), _TOP, x(share), _BOTTOM, "bound") for share in bounds]
    parts.append(text(8, 16, "images/s, predicted"))
    parts.append(text(x(0.5), _BOTTOM + 42, axis, "label middle"))
    for number, row in enumerate(rows, start=1):
        at = x(place(row)), y(row.predicted_images_per_s)
        point = element(
            "circle",
            element("title", f"{number}: {_describe(row)}"),
            cx=at[0],
            cy=at[1],
            r=5.0,
            class_="point " + row.verdict.replace(" ", "-"),
            data_images_per_s=repr(row.predicted_images_per_s),
            data_fill=repr(row.predicted_fill),
            data_ipus=row.num_ipus,
        )
        parts.append(point)
        if row.best:
            parts.append(element("circle", cx=at[0], cy=at[1], r=10.0, class_="best"))
            label = f"best: {units.images(row.predicted_images_per_s)}"
            if at[0] > _WIDTH / 2:
                parts.append(text(at[0] - 14, at[1] - 9, label, "label strong halo end"))
            else:
                parts.append(text(at[0] + 14, at[1] - 9, label, "label strong halo"))
    description = (
        f"{len(rows)} configurations to which no other is better in throughput, memory and IPUs at once."
    )
    return svg(name, title, description, _HEIGHT, parts, _WIDTH)


def _describe(row: ParetoRow) -> str:
    return (
        f"{row.num_stages} stage(s), {row.schedule}, micro-batch {row.micro_batch_size} x "
        f"{row.gradient_accumulation_count}, {row.num_replicas} replica(s), {row.num_ipus} IPU(s), "
        f"{units.images(row.predicted_images_per_s)} images/s and {units.percent(row.predicted_fill)} of memory "
        "predicted"
    )
