"""``ipucnn models``: table, JSON, summary, errors."""

import re

import pytest
from support.refusals import Refusal, check_refused

from ipucnn.models.registry import list_models


def test_a_pipe_gets_a_whole_line_for_each_model(succeeds):
    head, *lines = succeeds("models")[0].splitlines()
    assert [line.split()[0] for line in lines] == [record.name for record in list_models()]
    assert "\x1b" not in "".join(lines) and "…" not in "".join(lines)
    # Numbers end where their heading ends, and texts begin where it begins.
    for title in ("input", "classes", "parameters", "MACs"):
        end = head.index(title) + len(title)
        assert all(line[end - 1] != " " and line[end] == " " for line in lines), title
    assert all(line[head.index("paper") - 2 :].startswith("  ") for line in lines)


@pytest.mark.parametrize(
    ("width", "shown"), [(160, {"norm", "smallest", "paper"}), (80, {"norm"}), (70, set())]
)
def test_a_narrow_terminal_leaves_columns_out(run, monkeypatch, width, shown):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", run("models", "efficientnet*", columns=width)[1]).splitlines()
    assert max(map(len, lines)) <= width
    assert {title for title in ("norm", "smallest", "paper") if title in " ".join(lines)} == shown
    assert "MACs" in " ".join(lines) and sum("efficientnet-b" in line for line in lines) >= 8


def test_pattern_and_json(report):
    records = report("models", "ResNet*")
    names = [record["name"] for record in records]
    assert "resnet50" in names and "cifar_resnet8" not in names
    assert "builder" not in records[0]


def test_summary(run, report):
    out = run("models", "lenet", "--summary")[1].splitlines()
    assert out[0].split() == ["layer", "type", "output", "parameters", "MACs"]
    assert out[1].startswith("input")
    assert "61,706 trainable parameters" in out[-1]
    summary = report("models", "lenet", "--summary", "--image-size", "32x40")
    assert summary["input_shape"] == [32, 40, 1]
    assert summary["layers"][0]["name"] == "input"
    assert summary["macs"] == sum(layer["macs"] for layer in summary["layers"])


def test_a_summary_for_the_images_and_classes_of_a_data_set(run, succeeds, report, tmp_path):
    """A network from a file takes its input shape and classes from the data set."""
    (tmp_path / "net.py").write_text(
        "def build(input_shape, num_classes):\n"
        "    from tensorflow import keras\n"
        "    images = keras.Input(input_shape)\n"
        "    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(images)))\n"
    )
    (tmp_path / "data.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    images, labels = np.zeros((14, 6, 5, 3), 'uint8'), np.arange(14) % 7\n"
        "    return (images, labels), (images, labels)\n"
    )
    summary = report("models", "net.py:build", "--summary", "--dataset", "data.py:load")
    assert (summary["input_shape"], summary["num_classes"]) == ([6, 5, 3], 7)
    assert summary["parameters"] == (6 * 5 * 3 + 1) * 7
    out, err = succeeds("models", "net.py:build", "--summary", "--image-size", 4, columns=200)
    assert "1,000 classes" in out and "--dataset NAME takes those of a data set" in err
    hint = "ipucnn models net.py:build --summary --dataset data.py:load"
    check_refused(run, Refusal("models net.py:build --dataset data.py:load", "", hint))
