"""Figure: predicted time of each layer, with the cuts."""

from typing import List, NamedTuple

from ipucnn.planning.pipeline_plan import PipelinePlan, ProfileLayer
from ipucnn.reports import units
from ipucnn.reports.figures.svg import STAGE_COLOURS, WIDTH, group, line, svg, text, text_width
from ipucnn.reports.markup import Markup, element, join, nice_ticks

__all__ = ["profile_figure"]

_LEFT, _RIGHT, _TOP, _HALF = 64.0, 12.0, 48.0, 120.0
_STRIP = 26.0


class _Plot(NamedTuple):
    """Where things are: the zero line, the bottom of the bars, pixels per layer and per second, all layers' seconds."""

    zero: float
    bottom: float
    pitch: float
    scale: float
    total_s: float

    @property
    def strip(self) -> float:
        return self.bottom + 44


def profile_figure(plan: PipelinePlan) -> Markup:
    """Forward time upwards and backward time downwards, layer by layer; below, the stages' shares of the whole."""
    layers = plan.profile
    training = any(layer.predicted_backward_s > 0 for layer in layers)
    most = max(max(layer.predicted_forward_s, layer.predicted_backward_s) for layer in layers) or 1.0
    zero = _TOP + _HALF
    plot = _Plot(
        zero=zero,
        bottom=zero + (_HALF if training else 4),
        pitch=(WIDTH - _LEFT - _RIGHT) / len(layers),
        scale=_HALF / most,
        total_s=layers[-1].predicted_cumulative_s or 1.0,
    )
    parts: List[Markup] = []
    for tick in nice_ticks(1e3 * most, 4):
        for sign in (1, -1) if training and tick else (1,):
            y = zero - sign * plot.scale * tick / 1e3
            parts.append(line(_LEFT, y, WIDTH - _RIGHT, y, "axis" if tick == 0 else "grid"))
            parts.append(text(_LEFT - 6, y + 4, f"{tick:.4g}", "label end"))
    parts.append(text(4, 14, "ms, predicted" + (": forward up, backward down" if training else ", forward")))
    starts = [0] + [i for i in range(1, len(layers)) if layers[i].stage != layers[i - 1].stage]
    for begin, end in zip(starts, [*starts[1:], len(layers)]):
        parts += _stage(plan, plot, begin, end)
    below = plot.strip + _STRIP
    parts.append(text(_LEFT, below + 18, "share of the predicted time of all layers, without recomputation"))
    return svg(
        "profile",
        "Predicted time of each layer, with the cuts",
        f"{len(layers)} layers in canonical order; cuts before: {', '.join(plan.splits) or 'none'}.",
        below + 28,
        parts,
    )


def _stage(plan: PipelinePlan, plot: _Plot, begin: int, end: int) -> List[Markup]:
    """A stage's bars, its part of the strip, and the cut before it."""
    layers = plan.profile
    stage = layers[begin].stage
    colour = f"stage-{stage % STAGE_COLOURS}"
    before_s = layers[begin - 1].predicted_cumulative_s if begin else 0.0
    own_s = layers[end - 1].predicted_cumulative_s - before_s
    share = units.percent(own_s / plot.total_s)
    cut, width = _LEFT + plot.pitch * begin, plot.pitch * (end - begin)
    per_second = (WIDTH - _LEFT - _RIGHT) / plot.total_s
    left, across = _LEFT + per_second * before_s, per_second * own_s
    names = f"{layers[begin].name} to {layers[end - 1].name}"
    title = f"stage {stage}: {names}, {units.milliseconds(own_s)}, {share}, predicted"
    strip = element(
        "rect",
        element("title", title),
        x=left,
        y=plot.strip,
        width=across,
        height=_STRIP,
        class_=colour,
        data_stage=stage,
        data_s=repr(own_s),
    )
    bars = [_bars(layers[i], _LEFT + plot.pitch * i, plot) for i in range(begin, end)]
    parts = [group(colour, [bar for bar in bars if bar]), strip]
    if begin:
        parts.append(line(cut, _TOP - 6, cut, plot.bottom, "cut"))
        parts.append(
            element("path", d=f"M{cut:.1f} {plot.bottom:.1f} L{left:.1f} {plot.strip:.1f}", class_="cut")
        )
    for label in (f"stage {stage}", str(stage)):
        if text_width(label) < width:
            parts.append(text(cut + width / 2, _TOP - 14, label, "label middle"))
            break
    for label in (f"stage {stage}: {share}", f"{stage}: {share}", str(stage)):
        if text_width(label) < across:
            parts.append(text(left + across / 2, plot.strip + 17, label, "on-bar"))
            break
    return parts


def _bars(layer: ProfileLayer, x: float, plot: _Plot) -> Markup:
    """A layer's two bars; nothing where it takes no time."""
    forward, backward = layer.predicted_forward_s, layer.predicted_backward_s
    if not forward and not backward:
        return Markup("")
    times = f"forward {units.milliseconds(forward)}, backward {units.milliseconds(backward)}, predicted"
    width = max(0.6, plot.pitch - min(1.0, 0.15 * plot.pitch))
    parts = [element("title", f"{layer.name} ({layer.op_class}): {times}")]
    for seconds, y, pass_ in ((forward, plot.zero - plot.scale * forward, "f"), (backward, plot.zero, "b")):
        if seconds > 0:
            height = max(0.4, plot.scale * seconds)
            bar = element("rect", x=x, y=y, width=width, height=height, data_s=repr(seconds), data_pass=pass_)
            parts.append(bar)
    return element("g", join(parts))
