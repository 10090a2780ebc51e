"""``ipucnn models``: table, JSON, summary, errors."""

import json
import re

import pytest

from ipucnn.cli import run
from ipucnn.models.registry import list_models


def test_a_pipe_gets_a_whole_line_for_each_model(capsys):
    assert run(["models"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
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
def test_a_narrow_terminal_leaves_columns_out(capsys, monkeypatch, width, shown):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["models", "efficientnet*"]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert {title for title in ("norm", "smallest", "paper") if title in " ".join(lines)} == shown
    assert "MACs" in " ".join(lines) and sum("efficientnet-b" in line for line in lines) >= 8


def test_pattern_and_json(capsys):
    assert run(["models", "ResNet*", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    names = [record["name"] for record in records]
    assert "resnet50" in names and "cifar_resnet8" not in names
    assert "builder" not in records[0]


def test_summary(capsys):
    assert run(["models", "lenet", "--summary"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["layer", "type", "output", "parameters", "MACs"]
    assert out[1].startswith("input")
    assert "61,706 trainable parameters" in out[-1]
    assert run(["models", "lenet", "--summary", "--json", "--image-size", "32x40"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["input_shape"] == [32, 40, 1]
    assert report["layers"][0]["name"] == "input"
    assert report["macs"] == sum(layer["macs"] for layer in report["layers"])


@pytest.mark.parametrize(
    "args, word",
    [
        (["models", "resnet5"], "did you mean"),
        (["models", "none-such*"], "no model matches"),
        (["models", "resnet*", "--summary"], "unknown model"),
        (["models", "lenet", "--image-size", "32"], "--summary"),
        (["models", "lenet", "--summary", "--image-size", "x"], "--image-size"),
        (["models", "unet", "--summary", "--image-size", "256"], "252 or 268"),
        (["models", "lenet", "--summary", "--dataset", "nosuch"], "nosuch"),
    ],
)
def test_errors(args, word, capsys):
    assert run(args) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert word in streams.err and "Traceback" not in streams.err


def test_a_summary_for_the_images_and_classes_of_a_data_set(capsys, monkeypatch, tmp_path):
    """A network from a file takes its input shape and classes from the data set."""
    monkeypatch.chdir(tmp_path)
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
    assert run(["models", "net.py:build", "--summary", "--dataset", "data.py:load", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["input_shape"], report["num_classes"]) == ([6, 5, 3], 7)
    assert report["parameters"] == (6 * 5 * 3 + 1) * 7
    assert run(["models", "net.py:build", "--summary", "--image-size", "4"]) == 0
    captured = capsys.readouterr()
    assert "1,000 classes" in captured.out and "--dataset NAME takes those of a data set" in captured.err
    assert run(["models", "net.py:build", "--dataset", "data.py:load"]) == 2
    assert "ipucnn models net.py:build --summary --dataset data.py:load" in capsys.readouterr().err
