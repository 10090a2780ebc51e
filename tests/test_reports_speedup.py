"""The speed-up figure: labels that overlap nothing, both formats, the same bytes each time."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipucnn.benchmarking.suites.result import Point, Speedups
from ipucnn.models.counts import registered_counts
from ipucnn.reports.speedup_figure import _overlap, draw_speedups, place_labels

DATA = Path(__file__).resolve().parents[2] / "shared" / "ipu" / "published_throughput.json"
FRAME = (0.0, 0.0, 800.0, 600.0)


def overlap_area(a, b):
    """Area that two boxes share, as the placing of labels computes it."""
    return float(_overlap(np.asarray([a]), np.asarray([b]))[0, 0])


def naive_overlap(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


boxes = st.tuples(*[st.floats(-50, 50)] * 4).map(
    lambda t: (min(t[0], t[2]), min(t[1], t[3]), max(t[0], t[2]), max(t[1], t[3]))
)


@given(boxes, boxes)
def test_overlap(a, b):
    assert overlap_area(a, b) == pytest.approx(naive_overlap(a, b), abs=1e-9)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 19)), unique=True, max_size=40), st.integers(20, 90)
)
def test_labels_with_room_overlap_nothing(cells, width):
    """Points at least a label apart, up to 40 of them: no label covers another, a point, or the frame's edge."""
    points = [(x * 100.0 + 1, y * 30.0 + 15) for x, y in cells]
    placed = place_labels(points, [(float(width), 10.0)] * len(points), FRAME)
    assert len(placed) == len(points)
    for (left, bottom, right, top), (x, y) in zip(placed, points):
        assert right - left == pytest.approx(width) and top - bottom == pytest.approx(10)
        assert left >= -1e-6 and bottom >= -1e-6 and right <= 800 + 1e-6 and top <= 600 + 1e-6
        assert abs((left + right) / 2 - x) < width + 100 and abs((bottom + top) / 2 - y) < 110
    assert all(overlap_area(a, b) == 0 for a, b in itertools.combinations(placed, 2))
    marks = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    assert all(overlap_area(a, b) == 0 for a in placed for b in marks)


def test_a_crowd_moves_apart():
    points = [(400.0 + dx, 300.0 + dy) for dx, dy in itertools.product((0, 6, 12), (0, 5, 10, 15))]
    sizes = [(70.0, 10.0)] * len(points)
    placed = place_labels(points, sizes, FRAME, obstacles=[(0, 290, 800, 294)])
    assert all(overlap_area(a, b) == 0 for a, b in itertools.combinations(placed, 2))
    assert placed == place_labels(points, sizes, FRAME, obstacles=[(0, 290, 800, 294)])
    assert place_labels([], [], FRAME) == []


def made_up(count=20):
    random = np.random.RandomState(1)
    points = [
        Point(
            str(i),
            f"network{i}",
            i % 2 == 0,
            1 if i % 3 else 32,
            *np.exp(3 * random.randn(2)),
            num_ipus=1 + i % 2,
        )
        for i in range(count)
    ]
    return Speedups(tuple(points), "measured, a CPU", "predicted, 1 to 2 IPUs of m2000, 32.32", 0, {})


def test_both_formats_and_the_same_bytes(tmp_path):
    from PIL import Image

    for suffix in (".png", ".svg"):
        draw_speedups(made_up(), tmp_path / ("a" + suffix), suffix)
    draw_speedups(made_up(), tmp_path / "b.svg", ".svg")
    width, height = Image.open(tmp_path / "a.png").size
    assert width > 1200 and height > 600
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text() and "network3" in text and "forward" in text


@pytest.mark.parametrize("points", [made_up().points[:1], made_up().points[1:2]])
def test_few_points_are_drawn_too(points, tmp_path):
    draw_speedups(Speedups(points, "a", "b", 0, {}), tmp_path / "a.png", ".png")
    assert (tmp_path / "a.png").stat().st_size > 5000


PUBLISHED = {
    "DenseNet121": "densenet121",
    "EfficientNetB0": "efficientnet-b0",
    "EfficientNetB1": "efficientnet-b1",
    "EfficientNetB2": "efficientnet-b2",
    "InceptionV3": "inceptionv3",
    "LeNet5(32px)": "lenet",
    "MobileNet": "mobilenet",
    "MobileNetV2": "mobilenetv2",
    "MobileNetV3Large": "mobilenetv3-large",
    "MobileNetV3Small": "mobilenetv3-small",
    "ResNet50": "resnet50-keras",
    "ResNet50V2": "resnet50v2",
    "VGG16": "vgg16",
    "VGG19": "vgg19",
    "Xception": "xception",
    "NASNetMobile": "nasnetmobile",
}


@pytest.mark.skipif(
    not DATA.is_file(), reason="no ../shared/ipu/published_throughput.json beside the repository"
)
def test_the_published_figure(tmp_path, monkeypatch):
    """The tutorial's own points: every label is there and covers neither another label nor a point."""
    from ipucnn.reports import speedup_figure as figure

    rows = [row for row in json.loads(DATA.read_text())["rows"] if "figure_label" in row]
    points = []
    for row in rows:
        name, batch = PUBLISHED[row["model"]], row["global_batch"]
        counts = registered_counts()[name]
        flop = 2.0 * counts.macs * batch / counts.parameters
        points.append(Point(row["figure_label"], name, row["task"] == "train", batch, flop, row["value"]))
    assert len(points) == 62 and sum(p.training for p in points) == 31
    seen = []

    def spy(centres, sizes, frame, **options):
        placed = place_labels(centres, sizes, frame, **options)
        seen.append((centres, placed))
        return placed

    monkeypatch.setattr(figure, "place_labels", spy)
    draw_speedups(Speedups(tuple(points), "V100", "IPU-M2000", 0, {}), tmp_path / "a.png", ".png")
    assert [len(placed) for _, placed in seen] == [31, 31]
    for centres, placed in seen:
        assert all(overlap_area(a, b) < 1 for a, b in itertools.combinations(placed, 2))
        marks = [(x - 3, y - 3, x + 3, y + 3) for x, y in centres]
        assert all(overlap_area(a, b) < 4 for a in placed for b in marks)
