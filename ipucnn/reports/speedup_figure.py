"""The figure of a suite: speed-up against arithmetic intensity, forward and training side by side."""

import textwrap
from pathlib import Path
from typing import Any, List

from ipucnn.reports.figures.labels import place_labels

# Marker and colour (Okabe and Ito's, for all kinds of sight) by micro-batch size, the smallest first.
_MARKS = (("o", "#0072b2"), ("s", "#d55e00"), ("^", "#009e73"), ("D", "#cc79a7"), ("v", "#56b4e9"))
_AREA = 26.0


def draw_speedups(speedups: Any, path: Path, suffix: str) -> None:
    """Draws the figure.

    Args:
        speedups: ``Speedups`` with at least one point.
        path: the file to write, whatever its name.
        suffix: ".png" or ".svg".
    """
    from ipucnn.sessions.host.environment import import_matplotlib

    matplotlib = import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (name, [p for p in speedups.points if p.training == training])
        for name, training in (("forward", False), ("training", True))
    ]
    panels = [panel for panel in panels if panel[1]]
    # Ids in SVG are random without a salt; the same figure is the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "ipucnn", "svg.fonttype": "path"}):
        figure = Figure(figsize=(7.6 * len(panels), 7.2), dpi=110)
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        batches = sorted({p.batch for p in speedups.points})
        _share_limits(axes, speedups.points)
        for axis, (name, points) in zip(axes, panels):
            _panel(axis, name, points, batches)
        _legend(figure, speedups.points, batches)
        title = f"Speed-up of {speedups.second} over {speedups.first}"
        figure.suptitle(textwrap.fill(title, 75 * len(panels)).replace("$", r"\$"), fontsize=12)
        figure.tight_layout(rect=(0, 0.035, 1, 0.98))
        canvas.draw()
        for axis, (_, points) in zip(axes, panels):
            _label(axis, points, canvas.get_renderer())
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(str(path), format=suffix.lstrip("."), metadata=metadata, dpi=110)


def _share_limits(axes: Any, points: Any) -> None:
    """The same logarithmic axes in both panels, with room for labels at their edges."""
    x = [p.intensity for p in points]
    y = [p.speedup for p in points]
    y = [*y, 1.0]
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(min(x) * (max(x) / min(x)) ** -0.06 / 1.2, max(x) * (max(x) / min(x)) ** 0.1 * 1.2)
        axis.set_ylim(min(y) * (max(y) / min(y)) ** -0.07 / 1.1, max(y) * (max(y) / min(y)) ** 0.07 * 1.1)


def _panel(axis: Any, name: str, points: List[Any], batches: List[int]) -> None:
    axis.grid(which="major", alpha=0.3)
    axis.axhline(1.0, color="black", linewidth=1.2, linestyle="--", zorder=1)
    for index, batch in enumerate(batches):
        marker, colour = _MARKS[index % len(_MARKS)]
        mine = [p for p in points if p.batch == batch]
        faces = ["white" if (p.num_ipus or 1) > 1 else colour for p in mine]
        axis.scatter(
            [p.intensity for p in mine], [p.speedup for p in mine], s=_AREA, marker=marker, c=faces,
            edgecolors=colour, linewidths=1.2, zorder=3,
        )  # fmt: skip
    axis.set_title(name)
    axis.set_xlabel("arithmetic intensity: FLOP per parameter, forward pass of one micro-batch")
    axis.set_ylabel("speed-up")
    for side in (axis.xaxis, axis.yaxis):
        _ticks(side)


def _legend(figure: Any, points: Any, batches: List[int]) -> None:
    """Below both panels, where it covers nothing."""
    from matplotlib.lines import Line2D

    handles = []
    for index, batch in enumerate(batches):
        marker, colour = _MARKS[index % len(_MARKS)]
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=f"batch {batch}"))
    if any((p.num_ipus or 1) > 1 for p in points):
        handles.append(
            Line2D([], [], color="grey", marker="o", mfc="white", linestyle="", label="hollow: several IPUs")
        )
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1.2, label="equally fast"))
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), fontsize=9, frameon=False)


def _ticks(side: Any) -> None:
    """Plain numbers, at 1, 2 and 5 where there are few decades."""
    from math import log10

    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = side.get_view_interval()
    subs = (1.0, 2.0, 5.0) if log10(high / low) < 3.2 else (1.0,)
    side.set_major_locator(LogLocator(base=10.0, subs=subs, numticks=30))
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(NullFormatter())


def _label(axis: Any, points: List[Any], renderer: Any) -> None:
    """Names beside the points, with a thin line to those that had to move away."""
    texts = [
        axis.text(p.intensity, p.speedup, p.label, fontsize=7.5, zorder=4, va="bottom", ha="left")
        for p in points
    ]
    extents = [text.get_window_extent(renderer) for text in texts]
    centres = [tuple(axis.transData.transform((p.intensity, p.speedup))) for p in points]
    frame = axis.get_window_extent(renderer)
    one = float(axis.transData.transform((points[0].intensity, 1.0))[1])
    boxes = place_labels(
        centres,
        [(e.width + 3, e.height) for e in extents],
        (frame.x0 + 3, frame.y0 + 3, frame.x1 - 3, frame.y1 - 3),
        radius=5.0,
        obstacles=[(frame.x0, one - 2, frame.x1, one + 2)],
    )
    to_data = axis.transData.inverted()
    for text, box, centre in zip(texts, boxes, centres):
        left, bottom, right, top = box
        text.set_position(to_data.transform((left, bottom)))
        nearest = (min(max(centre[0], left), right), min(max(centre[1], bottom), top))
        if (nearest[0] - centre[0]) ** 2 + (nearest[1] - centre[1]) ** 2 > 9.0**2:
            ends = to_data.transform([centre, nearest])
            axis.plot(ends[:, 0], ends[:, 1], color="grey", linewidth=0.5, zorder=2)
