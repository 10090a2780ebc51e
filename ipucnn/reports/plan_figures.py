"""Draws the figures of a plan's page, as inline SVG: memory, timeline, layers and the Pareto front of configurations.

Colours are classes that the page's style sheet defines.  Marks carry their exact number in a ``data-`` attribute, and a
``title`` that browsers show as a tooltip.
"""

import math
import re
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from markupsafe import Markup, escape

from ipucnn.planning.cost.memory import CATEGORIES, FITS_BELOW, FITS_NOT_ABOVE
from ipucnn.planning.pipeline_plan import IpuPlan, ParetoRow, PipelinePlan, ProfileLayer
from ipucnn.reports import units
from ipucnn.reports.timeline import Phase, Span, Timeline, timeline
from ipucnn.text import counted

WIDTH = 1080.0
# Stages take the style sheet's colours in turn.
STAGE_COLOURS = 8
# Ratio of a character's width to its font size, rounded up.
_CHARACTER = 0.62
# Characters that neither XML nor HTML may contain, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# -- elements ---------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Returns text without the characters that no page may contain; markup is unchanged."""
    return text if isinstance(text, Markup) else _FORBIDDEN.sub("\ufffd", text)


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """Returns an element; it is well-formed as XML too, so an element without children closes itself.

    Args:
        children: ``Markup``, or text, which is escaped.
        attributes: attribute values; ``class_`` and ``stroke_width`` stand for ``class`` and ``stroke-width``; None is
            left out, and floats are rounded to screen precision.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else str(value)
            parts.append(f' {name.rstrip("_").replace("_", "-")}="{escape(clean(text))}"')
    if not children:
        return Markup("".join(parts) + "/>")
    return Markup("".join(parts) + ">") + join(children) + Markup(f"</{tag}>")


def join(children: Sequence[str]) -> Markup:
    """Joins the children of an element, one after the other."""
    return Markup("").join(clean(child) for child in children)


def number(value: float) -> str:
    """Formats a number with two decimals, without trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def nice_ticks(end: float, most: int) -> List[float]:
    """Returns at most ``most`` + 1 multiples of 1, 2 or 5 times a power of ten, from 0 to ``end``."""
    if not end > 0 or not math.isfinite(end):
        return [0.0]
    step = 10.0 ** math.floor(math.log10(end / most))
    while end / step > most:
        # 1 -> 2 -> 5 -> 10
        step *= 2.5 if f"{step:e}".startswith("2") else 2.0
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def text_width(label: str, size: float = 12) -> float:
    """Estimates the width of a label."""
    return _CHARACTER * size * len(label)


def svg(
    name: str, title: str, description: str, height: float, children: Sequence[Markup], width: float = WIDTH
) -> Markup:
    """Returns a figure; ``name`` is unique on the page."""
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_="figure" if width == WIDTH else "figure half",
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Returns a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text(x: float, y: float, label: str, class_: str = "label") -> Markup:
    """Returns a label."""
    return element("text", label, x=x, y=y, class_=class_)


def rect(
    box: Tuple[float, float, float, float],
    title: Optional[str] = None,
    class_: Optional[str] = None,
    **data: object,
) -> Markup:
    """Returns a rectangle.

    Args:
        box: its left and upper edge, width and height.
        title: its tooltip.
        data: values of its ``data-`` attributes; floats are written in full.
    """
    x, y, width, height = box
    values: Dict[str, object] = {
        f"data_{name}": repr(value) if isinstance(value, float) else value for name, value in data.items()
    }
    children = [] if title is None else [element("title", title)]
    return element("rect", *children, x=x, y=y, width=width, height=height, class_=class_, **values)


def group(class_: str, children: Sequence[Markup]) -> Markup:
    """Returns marks of one class."""
    return element("g", join(children), class_=class_)


# -- memory of each IPU by category, against its capacity ------------------------------------------------------

_MIB = 2**20
# As narrow as a phone: the sums have to be in view beside their bars.
_MEMORY_WIDTH, _MEMORY_LEFT, _MEMORY_RIGHT, _MEMORY_TOP = 464.0, 112.0, 4.0, 26.0
_MEMORY_ROW, _MEMORY_BAR = 40.0, 24.0
# The sums are in a column of their own, behind all bars.
_MEMORY_COLUMN = 136.0

_MARKS = {"fits": "\u2713", "uncertain": "?", "does not fit": "\u2717"}


def memory_figure(plan: PipelinePlan) -> Markup:
    """Draws a stacked bar for each IPU of a replica, its capacity, and the bounds of the verdicts."""
    capacity = plan.ipus[0].capacity_bytes
    totals = [sum(ipu.predicted_memory_bytes.values()) for ipu in plan.ipus]
    end = max(capacity * FITS_NOT_ABOVE * 1.08, max(totals) * 1.02)
    bottom = _MEMORY_TOP + _MEMORY_ROW * len(plan.ipus)
    scale = (_MEMORY_WIDTH - _MEMORY_LEFT - _MEMORY_RIGHT - _MEMORY_COLUMN) / end

    def x(bytes_: float) -> float:
        return _MEMORY_LEFT + scale * bytes_

    parts: List[Markup] = []
    for tick in nice_ticks(end / _MIB, 4):
        parts.append(line(x(tick * _MIB), _MEMORY_TOP, x(tick * _MIB), bottom, "grid"))
        parts.append(text(x(tick * _MIB), bottom + 18, f"{tick:,.0f}", "label middle"))
    parts.append(text(_MEMORY_WIDTH - _MEMORY_RIGHT, bottom + 18, "MiB, predicted", "label end"))
    for row, (ipu, total) in enumerate(zip(plan.ipus, totals)):
        parts.append(
            _memory_bar(ipu, total, x, _MEMORY_TOP + _MEMORY_ROW * row + (_MEMORY_ROW - _MEMORY_BAR) / 2)
        )
    for share in (FITS_BELOW, 1.0, FITS_NOT_ABOVE):
        at = x(share * capacity)
        parts.append(line(at, _MEMORY_TOP - 6, at, bottom, "bound whole" if share == 1 else "bound"))
        if share != 1:
            nudge, anchor = (4.0, "end") if share < 1 else (-4.0, "start")
            parts.append(text(at + nudge, _MEMORY_TOP - 12, units.percent(share), f"label {anchor}"))
    worst = max(plan.ipus, key=lambda ipu: ipu.predicted_fill)
    return svg(
        "memory",
        "Predicted memory of each IPU",
        f"Stacked by category; an IPU has {units.mebibytes(capacity)}. The fullest is IPU {worst.ipu} at "
        f"{units.percent(worst.predicted_fill)}: {worst.verdict}.",
        bottom + 30,
        parts,
        _MEMORY_WIDTH,
    )


def _memory_bar(ipu: IpuPlan, total: float, x: Callable[[float], float], y: float) -> Markup:
    stages = ", ".join(str(stage) for stage in ipu.stages)
    if len(ipu.stages) > 2:
        stages = f"{ipu.stages[0]} ... {ipu.stages[-1]}"
    parts = [
        text(_MEMORY_LEFT - 10, y + 11, f"IPU {ipu.ipu}", "label end strong"),
        text(
            _MEMORY_LEFT - 10,
            y + 24,
            f"stage{'s' if len(ipu.stages) > 1 else ''} {stages}",
            "label end small",
        ),
    ]
    begin = 0.0
    for name in CATEGORIES:
        bytes_ = ipu.predicted_memory_bytes[name]
        if bytes_ > 0:
            title = f"IPU {ipu.ipu}: {name.replace('_', ' ')} {units.mebibytes(bytes_)}, predicted"
            box = x(begin), y, x(begin + bytes_) - x(begin), _MEMORY_BAR
            data = {"ipu": ipu.ipu, "category": name, "bytes": float(bytes_)}
            parts.append(rect(box, title, f"cat-{name}", **data))
        begin += bytes_
    label = f"{units.mebibytes(total)}, {units.percent(ipu.predicted_fill)} {_MARKS[ipu.verdict]}"
    parts.append(text(_MEMORY_WIDTH - _MEMORY_RIGHT, y + _MEMORY_BAR / 2 + 4, label, "label end strong"))
    return group("ipu", parts)


# -- the stages' work during a weight update, or an execution of inference -------------------------------------

_TIME_LEFT, _TIME_RIGHT, _TIME_TOP = 76.0, 16.0, 46.0
_TIME_GAP = 64.0


class _Axis:
    """Maps seconds to x, with a gap for the ticks that are left out."""

    def __init__(self, drawn: Timeline) -> None:
        self.drawn = drawn
        self.omitted_s = drawn.omitted_to_s - drawn.omitted_from_s
        self.gap = _TIME_GAP if drawn.omitted_ticks else 0.0
        self.scale = (WIDTH - _TIME_LEFT - _TIME_RIGHT - self.gap) / max(drawn.end_s - self.omitted_s, 1e-12)

    def __call__(self, seconds: float) -> float:
        if self.gap and seconds >= self.drawn.omitted_to_s:
            return _TIME_LEFT + self.gap + self.scale * (seconds - self.omitted_s)
        return _TIME_LEFT + self.scale * seconds


def timeline_figure(plan: PipelinePlan) -> Markup:
    """Draws a row for each stage; all but a few of the full ticks are left out."""
    drawn = timeline(plan)
    axis = _Axis(drawn)
    num = plan.num_stages
    row = 30.0 if num <= 8 else 21.0
    bottom = _TIME_TOP + row * num
    parts: List[Markup] = []
    for i in range(num):
        y = _TIME_TOP + row * (i + 1)
        parts.append(line(_TIME_LEFT, y, WIDTH - _TIME_RIGHT, y, "grid"))
        parts.append(text(_TIME_LEFT - 8, y - row / 2 + 4, f"stage {i}", "label end"))
    marks: Dict[str, List[Markup]] = {}
    for span in drawn.spans:
        if span.stage < 0:
            marks.setdefault("transfer", []).append(_transfer(span, axis, bottom))
            continue
        y = _TIME_TOP + row * span.stage + 2
        marks.setdefault(span.kind, []).append(_pass(span, axis, y, row - 4))
        begin, width = axis(span.start_s), axis.scale * (span.end_s - span.start_s)
        label = str(span.micro_batch)
        if span.kind != "recompute" and width > text_width(label, 11) + 2:
            number = text(begin + width / 2, y + row / 2 + 2, label, "on-bar")
            marks.setdefault("micro-batch", []).append(number)
    for kind in ("transfer", "forward", "recompute", "backward", "micro-batch"):
        if kind in marks:
            parts.append(group(f"pass-{kind}", marks[kind]))
    if drawn.omitted_ticks:
        at = axis(drawn.omitted_from_s)
        gap = rect((at + 4, _TIME_TOP, _TIME_GAP - 8, bottom - _TIME_TOP), class_="omitted")
        parts += [gap, text(at + _TIME_GAP / 2, _TIME_TOP - 6, f"{drawn.omitted_ticks} more", "label middle")]
    parts += [_bracket(phase, axis) for phase in drawn.phases]
    parts += _ticks(drawn, axis, bottom)
    count = plan.settings.gradient_accumulation_count
    phases = "; ".join(f"{phase.name} {phase.num_ticks} {plan.settings.order.unit}" for phase in drawn.phases)
    return svg(
        "timeline",
        "Predicted pipeline timeline",
        f"{plan.settings.schedule} schedule, {counted(num, 'stage')}, {counted(count, 'micro-batch')}: {phases}; "
        f"{drawn.omitted_ticks} full ones are left out. Numbers in the bars are micro-batches.",
        bottom + 40,
        parts,
    )


def _transfer(span: Span, axis: _Axis, bottom: float) -> Markup:
    seconds = span.end_s - span.start_s
    box = axis(span.start_s), _TIME_TOP, axis.scale * seconds, bottom - _TIME_TOP
    return rect(box, f"transfer: {units.milliseconds(seconds)}, predicted", s=seconds)


def _pass(span: Span, axis: _Axis, y: float, height: float) -> Markup:
    seconds = span.end_s - span.start_s
    title = f"stage {span.stage}, {span.kind}, micro-batch {span.micro_batch}: {units.milliseconds(seconds)}, predicted"
    box = axis(span.start_s), y, max(0.3, axis.scale * seconds), height
    return rect(box, title, "first" if span.micro_batch == 0 else None, s=seconds, stage=span.stage)


def _bracket(phase: Phase, axis: _Axis) -> Markup:
    begin, end = axis(phase.start_s) + 1, axis(phase.end_s) - 1
    parts = [element("path", d=f"M{begin:.1f} 28 v-6 H{end:.1f} v6", class_="bracket")]
    for label in (f"{phase.name}: {phase.num_ticks}", phase.name):
        if end - begin > text_width(label):
            parts.append(text((begin + end) / 2, 16, label, "label middle"))
            break
    return join(parts)


def _ticks(drawn: Timeline, axis: _Axis, bottom: float) -> List[Markup]:
    """Draws marks at round times on both sides of the gap, without overlap."""
    shown = drawn.end_s - axis.omitted_s
    steps = nice_ticks(1e3 * shown, 9)
    step = steps[1] / 1e3 if len(steps) > 1 else shown
    title = "ms from the start, predicted"
    parts: List[Markup] = [text(WIDTH - _TIME_RIGHT, bottom + 34, title, "label end")]
    behind = int(drawn.omitted_to_s / step) if axis.gap else 0
    numbers = [*range(int(drawn.omitted_from_s / step) + 1)] if axis.gap else []
    numbers += range(behind, int(drawn.end_s / step + 1e-9) + 1)
    free = 0.0
    for k in numbers:
        seconds = k * step
        if axis.gap and drawn.omitted_from_s < seconds < drawn.omitted_to_s:
            continue
        label = f"{1e3 * seconds:.6g}"
        at, half = axis(seconds), text_width(label) / 2
        if at - half >= free and at + half <= WIDTH:
            parts.append(line(at, bottom, at, bottom + 5, "axis"))
            parts.append(text(at, bottom + 18, label, "label middle"))
            free = at + half + 6
    return parts


# -- predicted time of each layer, with the cuts ---------------------------------------------------------------

_LAYERS_LEFT, _LAYERS_RIGHT, _LAYERS_TOP, _LAYERS_HALF = 64.0, 12.0, 48.0, 120.0
_LAYERS_STRIP = 26.0


class _Plot(NamedTuple):
    """The geometry: the zero line, the bottom of the bars, pixels per layer and per second, all layers' seconds."""

    zero: float
    bottom: float
    pitch: float
    scale: float
    total_s: float

    @property
    def strip(self) -> float:
        return self.bottom + 44


def profile_figure(plan: PipelinePlan) -> Markup:
    """Draws forward time upwards and backward time downwards by layer; below, the stages' shares of the whole."""
    layers = plan.profile
    training = any(layer.predicted_backward_s > 0 for layer in layers)
    most = max(max(layer.predicted_forward_s, layer.predicted_backward_s) for layer in layers) or 1.0
    zero = _LAYERS_TOP + _LAYERS_HALF
    plot = _Plot(
        zero=zero,
        bottom=zero + (_LAYERS_HALF if training else 4),
        pitch=(WIDTH - _LAYERS_LEFT - _LAYERS_RIGHT) / len(layers),
        scale=_LAYERS_HALF / most,
        total_s=layers[-1].predicted_cumulative_s or 1.0,
    )
    parts: List[Markup] = []
    for tick in nice_ticks(1e3 * most, 4):
        for sign in (1, -1) if training and tick else (1,):
            y = zero - sign * plot.scale * tick / 1e3
            parts.append(line(_LAYERS_LEFT, y, WIDTH - _LAYERS_RIGHT, y, "axis" if tick == 0 else "grid"))
            parts.append(text(_LAYERS_LEFT - 6, y + 4, f"{tick:.4g}", "label end"))
    parts.append(text(4, 14, "ms, predicted" + (": forward up, backward down" if training else ", forward")))
    starts = [0] + [i for i in range(1, len(layers)) if layers[i].stage != layers[i - 1].stage]
    for begin, end in zip(starts, [*starts[1:], len(layers)]):
        parts += _stage(plan, plot, begin, end)
    below = plot.strip + _LAYERS_STRIP
    parts.append(
        text(_LAYERS_LEFT, below + 18, "share of the predicted time of all layers, without recomputation")
    )
    return svg(
        "profile",
        "Predicted time of each layer, with the cuts",
        f"{counted(len(layers), 'layer')} in canonical order; cuts before: {', '.join(plan.splits) or 'none'}.",
        below + 28,
        parts,
    )


def _stage(plan: PipelinePlan, plot: _Plot, begin: int, end: int) -> List[Markup]:
    """Draws a stage's bars, its part of the strip, and the cut before it."""
    layers = plan.profile
    stage = layers[begin].stage
    colour = f"stage-{stage % STAGE_COLOURS}"
    before_s = layers[begin - 1].predicted_cumulative_s if begin else 0.0
    own_s = layers[end - 1].predicted_cumulative_s - before_s
    share = units.percent(own_s / plot.total_s)
    cut, width = _LAYERS_LEFT + plot.pitch * begin, plot.pitch * (end - begin)
    per_second = (WIDTH - _LAYERS_LEFT - _LAYERS_RIGHT) / plot.total_s
    left, across = _LAYERS_LEFT + per_second * before_s, per_second * own_s
    names = f"{layers[begin].name} to {layers[end - 1].name}"
    title = f"stage {stage}: {names}, {units.milliseconds(own_s)}, {share}, predicted"
    strip = rect((left, plot.strip, across, _LAYERS_STRIP), title, colour, stage=stage, s=own_s)
    bars = [_bars(layers[i], _LAYERS_LEFT + plot.pitch * i, plot) for i in range(begin, end)]
    parts = [group(colour, [bar for bar in bars if bar]), strip]
    if begin:
        parts.append(line(cut, _LAYERS_TOP - 6, cut, plot.bottom, "cut"))
        parts.append(
            element("path", d=f"M{cut:.1f} {plot.bottom:.1f} L{left:.1f} {plot.strip:.1f}", class_="cut")
        )
    for label in (f"stage {stage}", str(stage)):
        if text_width(label) < width:
            parts.append(text(cut + width / 2, _LAYERS_TOP - 14, label, "label middle"))
            break
    for label in (f"stage {stage}: {share}", f"{stage}: {share}", str(stage)):
        if text_width(label) < across:
            parts.append(text(left + across / 2, plot.strip + 17, label, "on-bar"))
            break
    return parts


def _bars(layer: ProfileLayer, x: float, plot: _Plot) -> Markup:
    """Draws a layer's two bars; nothing if it takes no time."""
    forward, backward = layer.predicted_forward_s, layer.predicted_backward_s
    if not forward and not backward:
        return Markup("")
    times = f"forward {units.milliseconds(forward)}, backward {units.milliseconds(backward)}, predicted"
    width = max(0.6, plot.pitch - min(1.0, 0.15 * plot.pitch))
    parts = [element("title", f"{layer.name} ({layer.op_class}): {times}")]
    for seconds, y, pass_ in ((forward, plot.zero - plot.scale * forward, "f"), (backward, plot.zero, "b")):
        if seconds > 0:
            height = max(0.4, plot.scale * seconds)
            parts.append(rect((x, y, width, height), s=seconds, **{"pass": pass_}))
    return element("g", join(parts))


# -- the Pareto front of configurations ------------------------------------------------------------------------

_PARETO_WIDTH, _PARETO_HEIGHT = 520.0, 330.0
_PARETO_LEFT, _PARETO_RIGHT, _PARETO_TOP, _PARETO_BOTTOM = 76.0, 20.0, 34.0, 280.0


def pareto_figures(plan: PipelinePlan) -> Tuple[Markup, Markup]:
    """Draws throughput against IPUs, and against the memory of the fullest IPU."""
    counts = sorted({row.occupied_ipus for row in plan.pareto})
    far = max(1.0, *(row.predicted_fill for row in plan.pareto)) * 1.04
    return (
        _scatter(
            plan.pareto,
            "ipus",
            "Predicted throughput against IPUs",
            "IPUs of all replicas",
            lambda row: (counts.index(row.occupied_ipus) + 0.5) / len(counts),
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
    """Draws a point for each row; ``place``, ``ticks`` and ``bounds`` are shares of the axis."""
    most = max(row.predicted_images_per_s for row in rows) * 1.12

    def x(share: float) -> float:
        return _PARETO_LEFT + (_PARETO_WIDTH - _PARETO_LEFT - _PARETO_RIGHT) * share

    def y(images_per_s: float) -> float:
        return _PARETO_BOTTOM - (_PARETO_BOTTOM - _PARETO_TOP) * images_per_s / most

    parts: List[Markup] = []
    for value in nice_ticks(most, 5):
        parts.append(line(_PARETO_LEFT, y(value), _PARETO_WIDTH - _PARETO_RIGHT, y(value), "grid"))
        parts.append(text(_PARETO_LEFT - 8, y(value) + 4, f"{value:,.6g}", "label end"))
    for share, label in ticks:
        parts.append(line(x(share), _PARETO_BOTTOM, x(share), _PARETO_BOTTOM + 5, "axis"))
        parts.append(text(x(share), _PARETO_BOTTOM + 20, label, "label middle"))
    parts += [line(x(share), _PARETO_TOP, x(share), _PARETO_BOTTOM, "bound") for share in bounds]
    parts.append(text(8, 16, "images/s, predicted"))
    parts.append(text(x(0.5), _PARETO_BOTTOM + 42, axis, "label middle"))
    for number, row in enumerate(rows, start=1):
        at = x(place(row)), y(row.predicted_images_per_s)
        title_of_row = f"row {number}: {units.images(row.predicted_images_per_s)} images/s, predicted"
        point = {"cx": at[0], "cy": at[1]}
        data = {"data_images_per_s": repr(row.predicted_images_per_s), "data_fill": repr(row.predicted_fill)}
        data.update(class_="point " + row.verdict.replace(" ", "-"))
        tooltip = element("title", title_of_row)
        parts.append(element("circle", tooltip, **point, r=5.0, data_ipus=row.occupied_ipus, **data))
        if row.best:
            parts.append(element("circle", **point, r=10.0, class_="best"))
            label = f"this plan: {units.images(row.predicted_images_per_s)}"
            nudge, anchor = (-14, " end") if at[0] > _PARETO_WIDTH / 2 else (14, "")
            parts.append(text(at[0] + nudge, at[1] - 9, label, f"label strong halo{anchor}"))
    description = (
        f"{len(rows)} configurations to which no other is better in throughput, memory and IPUs at once."
    )
    return svg(name, title, description, _PARETO_HEIGHT, parts, _PARETO_WIDTH)
