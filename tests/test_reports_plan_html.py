"""The HTML page of a plan, and its timeline."""

import html.parser
import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest
from pipeline_simulator import simulate
from support.plans import SCHEDULES, conv

from ipucnn.hardware import get_system
from ipucnn.planning.cost.memory import CATEGORIES
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.pipeline_plan import NoFit, ParetoRow, PipelinePlan
from ipucnn.planning.plan import assemble, compare
from ipucnn.planning.program import PlannedProgram, uniform
from ipucnn.planning.search.planner import Planner
from ipucnn.planning.splits import equal_layers
from ipucnn.reports.plan_figures import Markup, element, nice_ticks
from ipucnn.reports.plan_html import render
from ipucnn.reports.plan_text import command_line
from ipucnn.reports.timeline import timeline
from ipucnn.reports.units import milliseconds, percent

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "\"><script>alert(1)</script>&amp;'\x00\ud800]]>"


def network(num: int = 24, size: int = 56, prefix: str = "conv", model: str = "chain") -> LayerGraph:
    """Makes convolutions of different sizes in sequence, and a skip from the first to the last but one."""
    layers, last, depth = [Layer("input", "input", (), (size, size, 3))], "input", 3
    for i in range(num):
        channels = 32 + 32 * (i % 3)
        layers.append(conv(f"{prefix}_{i}", last, size, depth, channels))
        last, depth = layers[-1].name, channels
    shape = (size, size, 32)
    layers.append(Layer(f"{prefix}_sum", "elementwise", (f"{prefix}_0", last), shape, input_channels=32))
    return LayerGraph(model, (size, size, 3), 10, tuple(layers))


def make_plan(
    num_stages: int,
    schedule: str = "Grouped",
    num_micro_batches: int = 40,
    graph: LayerGraph = network(),
    **more,
) -> PipelinePlan:
    planner = Planner(graph, get_system("pod16"))
    program_settings = PlannedProgram(4, num_micro_batches, num_stages=num_stages, schedule=schedule, **more)
    candidate = planner.fastest_splits(program_settings, 1.15)
    others = {"equal-layers": equal_layers(graph, num_stages)} if num_stages > 1 else {}
    rows = compare(planner, candidate, others)
    return assemble(planner, candidate, planned=True, build={}, comparison=rows)


def pareto_rows() -> tuple:
    program = PlannedProgram(
        8, 64, num_replicas=2, recomputation=True, available_memory_proportion=uniform(0.3)
    )
    return tuple(
        ParetoRow(
            settings=program.restaged(ipus),
            splits=tuple(f"conv_{i}" for i in range(1, ipus)),
            occupied_ipus=2 * ipus,
            predicted_images_per_s=1000.5 * ipus,
            predicted_latency_s=0.01,
            predicted_fill=0.3 + 0.1 * ipus,
            verdict="fits" if ipus < 5 else "uncertain",
            best=ipus == 8,
        )
        for ipus in (8, 4, 2, 1)
    )


def judged_plan() -> PipelinePlan:
    """Returns a plan of bad splits that don't fit, with every field set."""
    graph = network(size=224)
    planner = Planner(graph, get_system("pod16"))
    settings = PlannedProgram(
        micro_batch_size=32, gradient_accumulation_count=8, num_stages=3, recomputation=True
    )
    splits = ("conv_22", "conv_23")
    candidate = planner.judge(splits, settings, 0.8)
    ranges = (("conv_0", "conv_3"), ("conv_3", "conv_9"))
    why = NoFit(0.8, 3, "conv_2", ranges, False, 16, 5, None)
    plan = assemble(planner, candidate, planned=False, build={}, no_fit=why, pareto=pareto_rows())
    return replace(plan, assumed=("precision 16.16", "micro-batch 32"))


PLANS = {
    "single stage": lambda: make_plan(1),
    "2 Grouped": lambda: make_plan(2, recomputation=True),
    "5 Interleaved": lambda: make_plan(5, "Interleaved"),
    "16 Grouped": lambda: make_plan(16, recomputation=True),
    "16 Interleaved": lambda: make_plan(16, "Interleaved", 1000),
    "segments on one IPU": lambda: make_plan(7, "Sequential", recomputation=True),
    "Sequential IPUs": lambda: make_plan(3, "Sequential", device_mapping=(0, 1, 2)),
    "inference": lambda: make_plan(4, training=False),
    "never full": lambda: make_plan(8, num_micro_batches=3),
    "does not fit": judged_plan,
}


@pytest.fixture(scope="module", params=list(PLANS))
def plan(request) -> PipelinePlan:
    return PLANS[request.param]()


def parsed(page: str) -> ET.Element:
    """Parses the page as XML, with elements of the figures under their own names."""
    return ET.fromstring(page.replace("<!DOCTYPE html>", ""))


def figure(page: ET.Element, name: str) -> ET.Element:
    (matching,) = [
        svg for svg in page.iter(f"{SVG}svg") if svg.get("aria-labelledby", "").startswith(f"{name}-")
    ]
    return matching


def drawn(svg: ET.Element, attribute: str) -> list:
    return [mark for mark in svg.iter() if mark.get(attribute) is not None]


# --- the timeline


def whole_timeline(plan: PipelinePlan):
    return timeline(plan, shown_ticks=10**6)


def test_timeline_ends_at_the_predicted_end_of_the_weight_update(plan):
    for drawn in (timeline(plan), whole_timeline(plan)):
        assert drawn.end_s + plan.predicted_update_s == pytest.approx(plan.predicted_weight_update_s)
        assert drawn.phases[0].start_s == 0 and drawn.phases[-1].end_s == drawn.end_s
        assert all(a.end_s == b.start_s for a, b in zip(drawn.phases, drawn.phases[1:]))
        assert sum(phase.num_ticks for phase in drawn.phases) == drawn.num_ticks


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages, num_micro_batches", [(1, 2), (2, 1), (3, 9), (4, 4), (6, 20)])
@pytest.mark.parametrize("training", [True, False])
def test_timeline_equals_the_simulated_pipeline(schedule, num_stages, num_micro_batches, training):
    mapping = tuple(range(num_stages))
    settings = dict(training=training, recomputation=training and num_stages % 2 == 0, device_mapping=mapping)
    plan = make_plan(num_stages, schedule, num_micro_batches, **settings)
    planner = Planner(network(), get_system("pod16"))
    starts = planner.items(plan.splits)
    run = simulate(planner.tables(plan.settings, 1.15), starts, schedule, num_micro_batches)
    drawn = whole_timeline(plan)
    assert drawn.omitted_ticks == 0
    # Work by stage, in order
    for stage in range(num_stages):
        simulated = [(kind, batch) for phase in run.phases for kind, s, batch in phase if s == stage]
        spans = [span for span in drawn.spans if span.stage == stage and span.kind != "recompute"]
        assert [("F" if span.kind == "forward" else "B", span.micro_batch) for span in spans] == simulated
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in zip(spans, spans[1:]))
    num_fixed = math.ceil(len(run.phases) / run.num_phases_per_tick)
    assert drawn.end_s == pytest.approx(run.total_s + num_fixed * plan.predicted_fixed_s)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_timeline_leaves_out_only_full_ticks(schedule):
    plan = make_plan(4, schedule, 50)
    short, whole = timeline(plan), whole_timeline(plan)
    assert short.omitted_ticks > 0
    assert short.omitted_to_s - short.omitted_from_s == pytest.approx(
        short.omitted_ticks * plan.predicted_tick_s / (2 if schedule == "Interleaved" else 1)
    )

    def key(span):
        return span.kind, span.stage, span.micro_batch, round(1e9 * span.start_s), round(1e9 * span.end_s)

    every, drawn = Counter(map(key, whole.spans)), Counter(map(key, short.spans))
    assert not drawn - every
    left_out = [
        span
        for span in whole.spans
        if short.omitted_from_s - 1e-12 <= span.start_s < short.omitted_to_s - 1e-12
    ]
    assert every - drawn == Counter(map(key, left_out))


def test_stages_that_share_an_ipu_work_one_after_the_other():
    graph = network(8)
    planner = Planner(graph, get_system("pod16"))
    settings = PlannedProgram(4, 12, num_stages=4, device_mapping=(0, 1, 1, 0))
    candidate = planner.judge(("conv_2", "conv_4", "conv_6"), settings, 1.15)
    plan = assemble(planner, candidate, planned=False, build={})
    drawn = whole_timeline(plan)
    assert drawn.end_s + plan.predicted_update_s == pytest.approx(plan.predicted_weight_update_s)
    for stages in ((0, 3), (1, 2)):
        spans = sorted((s for s in drawn.spans if s.stage in stages), key=lambda span: span.start_s)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in zip(spans, spans[1:]))


# --- numbers on the page


def test_memory_bars_are_the_plans_bytes(plan):
    svg = figure(parsed(render(plan)), "memory")
    for ipu in plan.ipus:
        bars = [bar for bar in drawn(svg, "data-bytes") if int(bar.get("data-ipu")) == ipu.ipu]
        bytes_by_category = {bar.get("data-category"): float(bar.get("data-bytes")) for bar in bars}
        assert bytes_by_category == {name: size for name, size in ipu.predicted_memory_bytes.items() if size}
        total = sum(bytes_by_category.values())
        assert total == pytest.approx(ipu.predicted_fill * ipu.capacity_bytes)
        # Widths are in proportion, and each bar begins where the one before ends.
        pixels = sum(float(bar.get("width")) for bar in bars)
        for bar in bars:
            share = float(bar.get("data-bytes")) / total
            assert float(bar.get("width")) == pytest.approx(share * pixels, abs=0.03)
        ends = [float(bar.get("x")) + float(bar.get("width")) for bar in bars]
        assert [float(bar.get("x")) for bar in bars[1:]] == pytest.approx(ends[:-1], abs=0.03)
        assert [bar.get("data-category") for bar in bars] == [c for c in CATEGORIES if c in bytes_by_category]
        # The line of the whole memory is where this bar would end if it were full.
        (whole,) = [mark for mark in svg.iter() if mark.get("class") == "bound whole"]
        left = float(bars[0].get("x"))
        assert float(whole.get("x1")) - left == pytest.approx(pixels / ipu.predicted_fill, abs=0.5)


def test_timeline_spans_are_the_plans_times(plan):
    svg = figure(parsed(render(plan)), "timeline")
    seconds_of_kind = {
        "forward": [stage.predicted_forward_s for stage in plan.stages],
        "recompute": [stage.predicted_recompute_s for stage in plan.stages],
        "backward": [stage.predicted_backward_s for stage in plan.stages],
    }
    scales = []
    for kind in seconds_of_kind:
        groups = [group for group in svg.iter(f"{SVG}g") if group.get("class") == f"pass-{kind}"]
        assert len(groups) == any(seconds_of_kind[kind])
        for bar in itertools.chain.from_iterable(drawn(group, "data-s") for group in groups):
            seconds = float(bar.get("data-s"))
            assert seconds == pytest.approx(seconds_of_kind[kind][int(bar.get("data-stage"))])
            if float(bar.get("width")) > 3:
                scales.append(float(bar.get("width")) / seconds)
    assert max(scales) == pytest.approx(min(scales), rel=0.01)


def test_profile_bars_are_the_layers_times(plan):
    svg = figure(parsed(render(plan)), "profile")
    bars = drawn(svg, "data-pass")
    for pass_, name in (("f", "predicted_forward_s"), ("b", "predicted_backward_s")):
        bar_seconds = [float(bar.get("data-s")) for bar in bars if bar.get("data-pass") == pass_]
        assert bar_seconds == [getattr(layer, name) for layer in plan.profile if getattr(layer, name)]
    strips = drawn(svg, "data-stage")
    assert [int(strip.get("data-stage")) for strip in strips] == list(range(plan.num_stages))
    seconds = [float(strip.get("data-s")) for strip in strips]
    assert sum(seconds) == pytest.approx(plan.profile[-1].predicted_cumulative_s)
    for stage, stage_seconds in zip(plan.stages, seconds):
        assert stage_seconds == pytest.approx(stage.predicted_forward_s + stage.predicted_backward_s)
    pixels = [float(strip.get("width")) for strip in strips]
    assert pixels == pytest.approx([s / sum(seconds) * sum(pixels) for s in seconds], abs=0.03)
    cuts = [mark for mark in svg.iter(f"{SVG}line") if mark.get("class") == "cut"]
    assert len(cuts) == len(plan.splits)


def test_pareto_points_are_the_plans_rows():
    plan = judged_plan()
    page = parsed(render(plan))
    for name in ("ipus", "fill"):
        svg = figure(page, name)
        points = drawn(svg, "data-images-per-s")
        assert [
            (float(p.get("data-images-per-s")), float(p.get("data-fill")), int(p.get("data-ipus")))
            for p in points
        ] == [(row.predicted_images_per_s, row.predicted_fill, row.occupied_ipus) for row in plan.pareto]
        # Faster points are higher, and the ring is around the best.
        heights = [-float(point.get("cy")) for point in points]
        assert heights == sorted(heights, reverse=True)
        (ring,) = [mark for mark in svg.iter() if mark.get("class") == "best"]
        (best,) = [point for point, row in zip(points, plan.pareto) if row.best]
        assert (ring.get("cx"), ring.get("cy")) == (best.get("cx"), best.get("cy"))
    table = page_text(page)
    for row in plan.pareto:
        assert f"{row.predicted_images_per_s:,.0f}" in table


def page_text(page: ET.Element) -> str:
    return " ".join("".join(page.itertext()).split())


def test_key_figures_and_the_command_are_there(plan):
    text = page_text(parsed(render(plan)))
    for figure_ in (
        f"{plan.predicted_images_per_s:,.0f} images/s",
        f"{plan.verdict}: the fullest IPU at {percent(plan.predicted_fill)}",
        milliseconds(plan.predicted_tick_s),
        milliseconds(plan.predicted_lower_bound_s),
        plan.bottleneck,
        f"{plan.predicted_host_bytes_per_s / 1e9:.2f} GB/s",
        command_line(plan),
        *(row.name for row in plan.comparison),
        *(stage.first_layer for stage in plan.stages),
    ):
        assert figure_ in text
    assert ("optimal: true" in text) == plan.optimal


def test_reason_that_nothing_fits_is_shown():
    text = page_text(parsed(render(judged_plan())))
    for part in (
        "does not fit",
        "Layer conv_2 exceeds that",
        "conv_0 to conv_3; conv_3 to conv_9",
        "5 stages with an IPU each",
        "No smaller micro-batch",
        "precision 16.16",
        "gap",
    ):
        assert part in text


# --- the page as a page


class _Balanced(html.parser.HTMLParser):
    """Reads the page as HTML: collects its elements, and checks that they are closed in order."""

    VOID = ("meta", "br", "wbr")

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes = [], Counter(), []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(page: str) -> _Balanced:
    reader = _Balanced()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_the_page_is_well_formed_and_needs_nothing_else(plan):
    page = render(plan)
    parsed(page)
    reader = read(page)
    assert page.startswith("<!DOCTYPE html>\n<html")
    assert not {"script", "link", "img", "iframe", "object", "use", "image"} & set(reader.tags)
    for name, value in reader.attributes:
        assert name not in ("src", "href", "xlink:href", "action", "style") and not name.startswith("on")
        assert "url(" not in (value or "")
    outside = re.findall(r"\b\w+:?//\S+", page.replace("http://www.w3.org/2000/svg", ""))
    assert outside == []
    assert "url(" not in page and "@import" not in page


def test_every_figure_says_that_it_is_predicted_and_what_it_shows(plan):
    page = parsed(render(plan))
    figures = list(page.iter(f"{SVG}svg"))
    assert len(figures) == (5 if plan.pareto else 3)
    identities = [mark.get("id") for mark in page.iter() if mark.get("id")]
    assert len(set(identities)) == len(identities)
    for svg in figures:
        assert "predicted" in svg.find(f"{SVG}title").text.lower()
        assert svg.find(f"{SVG}desc").text and svg.get("role") == "img"
        assert all(name in identities for name in svg.get("aria-labelledby").split())
    # Tooltips say it, too, as they are read alone.
    for mark in page.iter(f"{SVG}rect"):
        title = mark.find(f"{SVG}title")
        assert title is None or "predicted" in title.text


@pytest.mark.slow_cases("16 Grouped", "16 Interleaved")
def test_the_same_plan_gives_the_same_bytes(plan):
    restored = PipelinePlan.from_dict(plan.to_dict())
    assert render(plan) == render(plan) == render(restored)


def test_hostile_names_stay_text():
    # Layers have visible names; everything else may have any text.
    visible = "".join(c for c in HOSTILE if c.isprintable())
    graph = network(8, prefix=visible, model=HOSTILE)
    plan = make_plan(3, graph=graph)
    why = NoFit(0.8, 3, graph.layers[1].name, ((HOSTILE, HOSTILE),), None, None, 16, None)
    plan = replace(
        plan,
        bottleneck=HOSTILE,
        assumed=(HOSTILE,),
        no_fit=why,
        comparison=tuple(replace(row, name=HOSTILE) for row in plan.comparison),
        system=replace(plan.system, title=HOSTILE, ipu=HOSTILE),
        ipucnn_version=HOSTILE,
    )
    page = render(plan)
    reader = read(page)
    assert not reader.tags["script"]
    assert {name for name, _ in reader.attributes} == {
        name for name, _ in read(render(make_plan(3, graph=network(8)))).attributes
    }
    page.encode("utf-8")
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    text = page_text(parsed(page))
    assert text.count(shown) > 3 and text.count(visible) > 20


# Sizes of the text classes in the style sheet, and the ratio of a character's width to its height
WIDE = 0.6


def test_labels_do_not_overlap_and_stay_inside(plan):
    for svg in parsed(render(plan)).iter(f"{SVG}svg"):
        width, height = (float(size) for size in svg.get("viewBox").split()[2:])
        boxes = []
        for label in svg.iter(f"{SVG}text"):
            kind, content = label.get("class").split(), "".join(label.itertext())
            size = 11 if {"small", "on-bar"} & set(kind) else 12
            across = WIDE * size * len(content)
            x, y = float(label.get("x")), float(label.get("y"))
            middle = {"middle", "on-bar"} & set(kind)
            left = x - across if "end" in kind else x - across / 2 if middle else x
            boxes.append((left, y - 0.75 * size, left + across, y + 0.2 * size, content))
        assert boxes
        for box in boxes:
            assert box[0] >= -0.5 and box[2] <= width + 0.5 and box[1] >= 0 and box[3] <= height, box
        for a, b in itertools.combinations(boxes, 2):
            are_disjoint = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert are_disjoint, (a, b)


def luminance(colour: str) -> float:
    """Returns the relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def style_sheet() -> str:
    return re.search("<style>(.*)</style>", render(make_plan(1)), re.DOTALL).group(1)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_distinguishable_in_both_modes(dark):
    sheet = style_sheet()
    light_rules, dark_rules = sheet.split("@media (prefers-color-scheme: dark)")
    dark_rules = dark_rules[: dark_rules.index("} }")]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light_rules[: light_rules.index("}")]))
    inside = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark_rules))
    assert set(inside) == set(colours)
    colours = inside if dark else colours
    used = set(re.findall(r"var\(--([\w-]+)\)", sheet))
    assert used == set(colours)
    for background in ("page", "panel"):
        for name in ("text", "muted", "good", "doubt", "bad"):
            assert contrast(colours[name], colours[background]) >= 4.5, (name, background)
    for name in ("forward", "backward", *(f"s{i}" for i in range(8))):
        assert contrast(colours[name], colours["on-bar"]) >= 4.5, name
    marks = [name for name in colours if re.fullmatch(r"s\d", name)]
    marks += ["forward", "recompute", "backward", "weights", "accumulators", "optimizer", "stash", "live"]
    for name in [*marks, "temporaries", "code"]:
        assert contrast(colours[name], colours["page"]) >= 3, name


@pytest.mark.slow
def test_every_mark_class_has_a_style():
    known = set(re.findall(r"\.([a-z][\w-]*)", style_sheet()))
    used = set()
    for name in PLANS:
        for mark in parsed(render(PLANS[name]())).iter():
            used |= set((mark.get("class") or "").split())
    assert used <= known


# --- parts of the page


def test_markup_escapes_everything_but_markup():
    assert element("b", "<i>", Markup("<br/>"), title='"&') == '<b title="&#34;&amp;">&lt;i&gt;<br/></b>'
    assert element("path", stroke_width=1.005, class_="x", id=None) == '<path stroke-width="1" class="x"/>'
    assert element("p", "\x00\x1b\ud800\uffff ok\n") == "<p>\ufffd\ufffd\ufffd\ufffd ok\n</p>"


@pytest.mark.parametrize("end", [1e-9, 0.013, 0.8, 1.0, 1.04, 7, 19.99, 100, 4321, 5e12])
@pytest.mark.parametrize("most", [3, 5, 9])
def test_nice_ticks_are_few_round_and_inside(end, most):
    ticks = nice_ticks(end, most)
    assert 2 <= len(ticks) <= most + 1 and ticks[0] == 0 and ticks[-1] <= end * (1 + 1e-9)
    step = ticks[1]
    assert ticks[-1] + step > end
    assert f"{step:.0e}"[0] in "125" and float(f"{step:.0e}") == pytest.approx(step)
    assert nice_ticks(0, most) == nice_ticks(float("nan"), most) == [0.0]
