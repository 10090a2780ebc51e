"""The figure of a suite: speed-up against arithmetic intensity, forward and training side by side.

Labels stand beside their points and overlap neither each other nor points: each in turn takes the cheapest of many
places around its point, and chooses again while another place has become cheaper.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, List, Sequence, Tuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure

    from ipucnn.benchmarking.suites.result import Point, Speedups

Box = Tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""

# Marker and colour (Okabe and Ito's, for all kinds of sight) by micro-batch size, the smallest first.
_MARKS = (("o", "#0072b2"), ("s", "#d55e00"), ("^", "#009e73"), ("D", "#cc79a7"), ("v", "#56b4e9"))
_AREA = 26.0
# Where a label may stand: directions around its point, and distances from it in pixels.
_DIRECTIONS = 24
_RINGS = (0.0, 5.0, 11.0, 18.0, 27.0, 38.0, 52.0, 70.0, 95.0)
# All labels choose at most so many times.
_PASSES = 4
# What a place costs, in pixels of distance from the point: each square pixel that the label shares with another label,
# each that it shares with a point's mark, and each pixel by which it leaves the frame.
_LABEL, _POINT, _OUTSIDE = 20.0, 8.0, 50.0
# A label that is nearer to another point than to its own could be taken for the other's.  Each pixel by which it is
# nearer costs the first number, and no more than the second number of pixels count.
_FOREIGN, _FOREIGN_PIXELS = 12.0, 12.0


def draw_speedups(speedups: Speedups, path: Path, suffix: str) -> None:
    """Draws the figure.

    Args:
        speedups: with at least one point.
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
        axes = [*figure.subplots(1, len(panels), squeeze=False)[0]]
        batches = sorted({p.batch for p in speedups.points})
        _share_limits(axes, speedups.points)
        for axis, (name, points) in zip(axes, panels):
            _panel(axis, name, points, batches)
        _legend(figure, speedups.points, batches)
        title = f"How many times as fast: {speedups.second}, compared with {speedups.first}"
        figure.suptitle(textwrap.fill(title, 75 * len(panels)).replace("$", r"\$"), fontsize=12)
        figure.tight_layout(rect=(0, 0.035, 1, 0.98))
        canvas.draw()
        for axis, (_, points) in zip(axes, panels):
            _label(axis, points, canvas.get_renderer())
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(str(path), format=suffix.lstrip("."), metadata=metadata, dpi=110)


def _share_limits(axes: Sequence[Axes], points: Sequence[Point]) -> None:
    """The same logarithmic axes in both panels, with room for labels at their edges."""
    x = [p.intensity for p in points]
    y = [p.speedup for p in points]
    y = [*y, 1.0]
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(min(x) * (max(x) / min(x)) ** -0.06 / 1.2, max(x) * (max(x) / min(x)) ** 0.1 * 1.2)
        axis.set_ylim(min(y) * (max(y) / min(y)) ** -0.07 / 1.1, max(y) * (max(y) / min(y)) ** 0.07 * 1.1)


def _panel(axis: Axes, name: str, points: List[Point], batches: List[int]) -> None:
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
    axis.set_ylabel("times as fast (speed-up)")
    for side in (axis.xaxis, axis.yaxis):
        _ticks(side)


def _legend(figure: Figure, points: Sequence[Point], batches: List[int]) -> None:
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


def _ticks(side: Axis) -> None:
    """Plain numbers, at 1, 2 and 5 where there are few decades."""
    from math import log10

    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = side.get_view_interval()
    subs = (1.0, 2.0, 5.0) if log10(high / low) < 3.2 else (1.0,)
    side.set_major_locator(LogLocator(base=10.0, subs=subs, numticks=30))
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(NullFormatter())


def _label(axis: Axes, points: List[Point], renderer: RendererAgg) -> None:
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
        x, y = to_data.transform((left, bottom))
        text.set_position((x, y))
        nearest = (min(max(centre[0], left), right), min(max(centre[1], bottom), top))
        if (nearest[0] - centre[0]) ** 2 + (nearest[1] - centre[1]) ** 2 > 9.0**2:
            ends = to_data.transform([centre, nearest])
            axis.plot(ends[:, 0], ends[:, 1], color="grey", linewidth=0.5, zorder=2)


def place_labels(
    points: Sequence[Tuple[float, float]],
    sizes: Sequence[Tuple[float, float]],
    frame: Box,
    radius: float = 4.0,
    obstacles: Sequence[Box] = (),
) -> List[Box]:
    """Where each label goes.

    Args:
        points: centres, in pixels.
        sizes: width and height of each point's label.
        frame: left, bottom, right, top that labels should stay in.
        radius: of the points' marks.
        obstacles: further boxes that labels must not cover.

    Returns:
        Left, bottom, right, top of each label, in the order of the points; the same for the same input.
    """
    if not points:
        return []
    centres: np.ndarray = np.asarray(points, float)
    marks = np.concatenate([centres - radius, centres + radius], axis=1)
    if obstacles:
        marks = np.concatenate([marks, np.asarray(obstacles, float)])
    candidates = [_candidates(centre, size, radius) for centre, size in zip(centres, sizes)]
    fixed = [
        distance
        + _POINT * _overlap(boxes, marks).sum(axis=1)
        + _OUTSIDE * _outside(boxes, frame)
        + _FOREIGN * _foreign(boxes, centres, i)
        for i, (boxes, distance) in enumerate(candidates)
    ]
    # Those with many neighbours choose first.
    near = (np.abs(centres[:, None] - centres[None]) < [[[90.0, 30.0]]]).all(axis=2).sum(axis=1)
    order = np.argsort(-near, kind="stable")
    placed = np.full((len(centres), 4), np.nan)
    for _ in range(_PASSES):
        before = placed.copy()
        for i in order:
            boxes, _distance = candidates[i]
            others = np.delete(placed, i, axis=0)
            others = others[~np.isnan(others[:, 0])]
            costs = fixed[i] + _LABEL * _overlap(boxes, others).sum(axis=1)
            placed[i] = boxes[int(np.argmin(costs))]
        if np.array_equal(before, placed):
            break
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in placed]


def _candidates(
    centre: np.ndarray, size: Tuple[float, float], radius: float
) -> Tuple[np.ndarray, np.ndarray]:
    """Boxes around a point, and what their distance costs."""
    width, height = size
    boxes, costs = [], []
    for ring in _RINGS:
        for k in range(_DIRECTIONS):
            angle = 2 * np.pi * k / _DIRECTIONS
            x, y = np.cos(angle), np.sin(angle)
            reach = radius + 2.0 + ring
            # The nearest corner or edge of the label lies on the ring.
            left = centre[0] + reach * x + (-width if x < -0.3 else 0.0 if x > 0.3 else -width / 2)
            bottom = centre[1] + reach * y + (-height if y < -0.3 else 0.0 if y > 0.3 else -height / 2)
            boxes.append((left, bottom, left + width, bottom + height))
            # Right of the point reads best.
            costs.append(3.0 * ring + 4.0 * (1.0 - x))
    return np.asarray(boxes), np.asarray(costs)


def _foreign(boxes: np.ndarray, centres: np.ndarray, own: int) -> np.ndarray:
    """Pixels by which each box is nearer to another point than to its own, and four more to keep a distance."""
    if len(centres) == 1:
        return np.zeros(len(boxes))
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    distances = np.linalg.norm(centres[None] - np.clip(centres[None], low, high), axis=2)
    others = np.delete(distances, own, axis=1).min(axis=1)
    return np.clip(distances[:, own] + 4.0 - others, 0.0, _FOREIGN_PIXELS)


def _overlap(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Shared area of each box with each other one."""
    if not len(others):
        return np.zeros((len(boxes), 1))
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return np.clip(high - low, 0, None).prod(axis=2)


def _outside(boxes: np.ndarray, frame: Box) -> np.ndarray:
    """How far each box sticks out."""
    left, bottom, right, top = frame
    out = np.clip([left - boxes[:, 0], bottom - boxes[:, 1], boxes[:, 2] - right, boxes[:, 3] - top], 0, None)
    return out.sum(axis=0)
