"""Figure: what the stages do during a weight update, or an execution of inference."""

from typing import Dict, List

from ipucnn.planning.cost.schedule import Phase, Span, Timeline, timeline
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.reports import units
from ipucnn.reports.figures.svg import WIDTH, group, line, svg, text, text_width
from ipucnn.reports.markup import Markup, element, join, nice_ticks

__all__ = ["TICK_NAMES", "timeline_figure"]

# What a schedule's timeline counts.
TICK_NAMES = {"Grouped": "ticks", "Interleaved": "half-ticks", "Sequential": "micro-batches"}

_LEFT, _RIGHT, _TOP = 76.0, 16.0, 46.0
_GAP = 64.0


class _Axis:
    """From seconds to x, with a gap for the ticks that are left out."""

    def __init__(self, told: Timeline) -> None:
        self.told = told
        self.omitted_s = told.omitted_to_s - told.omitted_from_s
        self.gap = _GAP if told.omitted_ticks else 0.0
        self.scale = (WIDTH - _LEFT - _RIGHT - self.gap) / max(told.end_s - self.omitted_s, 1e-12)

    def __call__(self, seconds: float) -> float:
        if self.gap and seconds >= self.told.omitted_to_s:
            return _LEFT + self.gap + self.scale * (seconds - self.omitted_s)
        return _LEFT + self.scale * seconds


def timeline_figure(plan: PipelinePlan) -> Markup:
    """A row for each stage; all but a few of the full ticks are left out."""
    told = timeline(plan)
    axis = _Axis(told)
    num = plan.num_stages
    row = 30.0 if num <= 8 else 21.0
    bottom = _TOP + row * num
    parts: List[Markup] = []
    for i in range(num):
        y = _TOP + row * (i + 1)
        parts.append(line(_LEFT, y, WIDTH - _RIGHT, y, "grid"))
        parts.append(text(_LEFT - 8, y - row / 2 + 4, f"stage {i}", "label end"))
    marks: Dict[str, List[Markup]] = {}
    for span in told.spans:
        if span.stage < 0:
            marks.setdefault("transfer", []).append(_transfer(span, axis, bottom))
            continue
        y = _TOP + row * span.stage + 2
        marks.setdefault(span.kind, []).append(_pass(span, axis, y, row - 4))
        begin, width = axis(span.start_s), axis.scale * (span.end_s - span.start_s)
        label = str(span.micro_batch)
        if span.kind != "recompute" and width > text_width(label, 11) + 2:
            number = text(begin + width / 2, y + row / 2 + 2, label, "on-bar")
            marks.setdefault("micro-batch", []).append(number)
    for kind in ("transfer", "forward", "recompute", "backward", "micro-batch"):
        if kind in marks:
            parts.append(group(f"pass-{kind}", marks[kind]))
    if told.omitted_ticks:
        at = axis(told.omitted_from_s)
        rect = element("rect", x=at + 4, y=_TOP, width=_GAP - 8, height=bottom - _TOP, class_="omitted")
        parts += [rect, text(at + _GAP / 2, _TOP - 6, f"{told.omitted_ticks} more", "label middle")]
    parts += [_bracket(phase, axis) for phase in told.phases]
    parts += _ticks(told, axis, bottom)
    unit = TICK_NAMES[plan.settings.schedule]
    count = plan.settings.gradient_accumulation_count
    phases = "; ".join(f"{phase.name} {phase.num_ticks} {unit}" for phase in told.phases)
    return svg(
        "timeline",
        "Predicted pipeline timeline",
        f"{plan.settings.schedule} schedule, {num} stage(s), {count} micro-batch(es): {phases}; "
        f"{told.omitted_ticks} full ones are left out. Numbers in the bars are micro-batches.",
        bottom + 40,
        parts,
    )


def _transfer(span: Span, axis: _Axis, bottom: float) -> Markup:
    seconds = span.end_s - span.start_s
    title = element("title", f"transfer: {units.milliseconds(seconds)}, predicted")
    x, width = axis(span.start_s), axis.scale * seconds
    return element("rect", title, x=x, y=_TOP, width=width, height=bottom - _TOP, data_s=repr(seconds))


def _pass(span: Span, axis: _Axis, y: float, height: float) -> Markup:
    seconds = span.end_s - span.start_s
    title = f"stage {span.stage}, {span.kind}, micro-batch {span.micro_batch}: {units.milliseconds(seconds)}, predicted"
    return element(
        "rect",
        element("title", title),
        x=axis(span.start_s),
        y=y,
        width=max(0.3, axis.scale * seconds),
        height=height,
        data_s=repr(seconds),
        data_stage=span.stage,
        class_="first" if span.micro_batch == 0 else None,
    )


def _bracket(phase: Phase, axis: _Axis) -> Markup:
    begin, end = axis(phase.start_s) + 1, axis(phase.end_s) - 1
    parts = [element("path", d=f"M{begin:.1f} 28 v-6 H{end:.1f} v6", class_="bracket")]
    for label in (f"{phase.name}: {phase.num_ticks}", phase.name):
        if end - begin > text_width(label):
            parts.append(text((begin + end) / 2, 16, label, "label middle"))
            break
    return join(parts)


def _ticks(told: Timeline, axis: _Axis, bottom: float) -> List[Markup]:
    """Marks at round times on both sides of the gap, none that would run into the one before."""
    shown = told.end_s - axis.omitted_s
    steps = nice_ticks(1e3 * shown, 9)
    step = steps[1] / 1e3 if len(steps) > 1 else shown
    title = "ms from the start, predicted"
    parts: List[Markup] = [text(WIDTH - _RIGHT, bottom + 34, title, "label end")]
    behind = int(told.omitted_to_s / step) if axis.gap else 0
    numbers = [*range(int(told.omitted_from_s / step) + 1)] if axis.gap else []
    numbers += range(behind, int(told.end_s / step + 1e-9) + 1)
    free = 0.0
    for k in numbers:
        seconds = k * step
        if axis.gap and told.omitted_from_s < seconds < told.omitted_to_s:
            continue
        label = f"{1e3 * seconds:.6g}"
        at, half = axis(seconds), text_width(label) / 2
        if at - half >= free and at + half <= WIDTH:
            parts.append(line(at, bottom, at, bottom + 5, "axis"))
            parts.append(text(at, bottom + 18, label, "label middle"))
            free = at + half + 6
    return parts
