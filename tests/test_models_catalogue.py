"""The shipped layer graph and counts of each network, against built models and published figures.

``python -m ipucnn.planning.graphs.shipped`` rewrites stale files.
"""

import json
import re
from pathlib import Path

import pytest

from ipucnn.config.presets import built_in_files, read_file
from ipucnn.errors import MissingError
from ipucnn.models import counts
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.registry import get_model, list_models
from ipucnn.planning.graphs import extract, keras_graph, shipped
from ipucnn.planning.graphs.layer_graph import LayerGraph

QUICK = ("toy_model", "mnist_cnn", "lenet")

# Trainable parameters, and multiply-accumulates in units of 1e9, from papers, torchvision and Keras' documentation.
PUBLISHED = [
    ("lenet", 61_706, None),
    ("mnist_cnn", 34_826, None),
    ("resnet18", 11_689_512, 1.81),
    ("resnet34", 21_797_672, 3.66),
    ("resnet50", 25_557_032, 4.09),
    ("resnet101", 44_549_160, 7.8),
    ("resnet152", 60_192_808, 11.51),
    ("resnet50-keras", 25_583_592, 3.86),
    ("resnext101_32x4d", 44_177_704, 7.99),
    ("efficientnet-b0", 5_288_548, 0.39),
    ("efficientnet-b1", 7_794_184, 0.69),
    ("efficientnet-b4", 19_341_616, None),
    ("efficientnet-b7", 66_347_960, 37.75),
    ("efficientnetv2-s", 21_458_488, None),
    ("densenet121", 7_978_856, 2.83),
    ("densenet169", 14_149_480, None),
    ("densenet201", 20_013_928, None),
    ("mobilenetv2", 3_504_872, 0.3),
    ("mobilenet", 4_231_976, 0.569),
    ("inceptionv3", 23_817_352, 5.71),
    ("xception", 22_855_952, None),
    ("vgg16", 138_357_544, 15.47),
    ("vgg19", 143_667_240, None),
]


def shipped_graph(name) -> LayerGraph:
    record = get_model(name)
    graph = extract.read_shipped(record)
    assert graph is not None, f"{name}: run python -m ipucnn.planning.graphs.shipped"
    return graph


@pytest.mark.parametrize(
    "name", [pytest.param(r.name, marks=() if r.name in QUICK else pytest.mark.slow) for r in list_models()]
)
def test_shipped_graphs_equal_built_models(name):
    """They were written under Keras 3, and are those of Keras 2.6, too."""
    record = get_model(name)
    try:
        model = build_model(record, extract.home_options(record))
    except MissingError as error:
        assert record.requires is not None
        pytest.skip(error.message)
    graph = shipped_graph(name)
    assert keras_graph.graph_of(model, name) == graph
    assert counts.registered_counts()[name] == (counts.count_parameters(model), counts.count_macs(model))
    names = [layer.name for layer in model.layers]
    assert names[0] == "input"
    # The graph has separable convolutions as two layers, and a crop directly after the layer that it crops.
    crops = {layer.name for layer in model.layers if type(layer).__name__ == "Cropping2D"}
    of_graph = [layer.name for layer in graph.layers if not layer.name.endswith("/pointwise")]
    assert [n for n in names if n not in crops] == [n for n in of_graph if n not in crops]
    assert crops <= set(of_graph)


def test_shipped_files_are_current():
    """If this fails, run: python -m ipucnn.planning.graphs.shipped"""
    names = {record.name for record in list_models()}
    graphs = {name: shipped_graph(name) for name in names}
    assert counts.registered_counts() == {
        name: (graph.num_trainable, graph.total_macs) for name, graph in graphs.items()
    }
    keys = json.loads((extract.FOLDER / extract.KEYS).read_text())
    assert keys["code"] == extract.code_key() and set(keys["graphs"]) == names
    assert {path.name for path in extract.FOLDER.glob("*.gz")} == {f"{name}.json.gz" for name in names}
    document = shipped.DOCUMENT.read_text(encoding="utf-8")
    assert shipped.insert_table(document) == document


@pytest.fixture
def few_networks(tmp_path, monkeypatch):
    """Prepares the command for two networks and with temporary files."""
    records = [get_model("lenet"), get_model("toy_model")]
    for path, name in (
        (extract.FOLDER, "graphs"),
        (counts.FILE, "counts.json"),
        (shipped.DOCUMENT, "models.md"),
    ):
        (tmp_path / name).mkdir() if path.is_dir() else (tmp_path / name).write_bytes(path.read_bytes())
    monkeypatch.setattr(extract, "FOLDER", tmp_path / "graphs")
    monkeypatch.setattr(counts, "FILE", tmp_path / "counts.json")
    monkeypatch.setattr(shipped, "DOCUMENT", tmp_path / "models.md")
    monkeypatch.setattr(shipped, "list_models", lambda: records)
    yield tmp_path, records
    counts.registered_counts.cache_clear()


def test_the_command_writes_only_changed_files(few_networks, monkeypatch, capsys):
    folder, records = few_networks
    assert shipped.main() == 0
    names = ["lenet.json.gz", "toy_model.json.gz", "keys.json", "counts.json", "models.md"]
    assert capsys.readouterr().out.splitlines() == [f"{name}: written" for name in names]
    assert json.loads((folder / "counts.json").read_text())["lenet"] == {
        "parameters": 61_706,
        "macs": 416_520,
    }
    assert "| `lenet` | mnist | 28x28x1 | 10 | 61,706 | 416,520 |" in (folder / "models.md").read_text()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(extract, "build_graph", None)
        assert shipped.main() == 0
    assert capsys.readouterr().out == ""
    # If other code builds the same networks, only the key changes.
    with monkeypatch.context() as patch:
        patch.setattr(extract, "code_key", lambda: "of other code")
        assert extract.read_shipped(records[0]) is None
        assert shipped.main() == 0
    assert capsys.readouterr().out.splitlines() == ["keys.json: written"]
    assert extract.read_shipped(records[0]) is None
    # A damaged graph is rewritten; the graph of a removed network is deleted.
    (folder / "graphs" / "lenet.json.gz").write_bytes(b"")
    assert shipped.main() == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    del records[1]
    assert shipped.main() == 0
    assert not (folder / "graphs" / "toy_model.json.gz").exists()
    assert "toy_model" not in (folder / "graphs" / "keys.json").read_text()


def test_the_command_writes_all_or_nothing(few_networks, monkeypatch, capsys):
    folder, _ = few_networks
    built = extract.build_graph
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refuse(record, options):
        if record.name == "toy_model":
            raise MissingError("toy_model needs Keras 99", "get it")
        return built(record, options)

    monkeypatch.setattr(extract, "build_graph", refuse)
    assert shipped.main() == 1
    assert "toy_model needs Keras 99" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_key_depends_on_all_files_of_the_networks(tmp_path, monkeypatch):
    for name in ("models/registry.py", "models/families/small.py", "planning/graphs/extract.py", "cli.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")

    def key():
        extract.code_key.cache_clear()
        return extract.code_key()

    with monkeypatch.context() as patch:
        patch.setattr("ipucnn.__file__", str(tmp_path / "__init__.py"))
        first = key()
        (tmp_path / "cli.py").write_text("2\n")
        assert key() == first
        (tmp_path / "models" / "families" / "small.py").write_text("2\n")
        assert key() != first
    extract.code_key.cache_clear()


@pytest.mark.parametrize(("name", "parameters", "macs"), PUBLISHED)
def test_recorded_counts_equal_published_ones(name, parameters, macs):
    recorded = counts.registered_counts()[name]
    assert recorded.parameters == parameters
    # Papers count multiply-accumulates a little differently.
    assert macs is None or recorded.macs / 1e9 == pytest.approx(macs, rel=0.015)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [r.name for r in list_models() if not re.search(r"net[123]|b[1-7]|-[ml]$|^vgg19$", r.name)],
)
def test_the_smallest_input_builds(name):
    record = get_model(name)
    try:
        model = build_model(record, BuildOptions((record.min_size, record.min_size, 3), 2))
    except MissingError as error:
        pytest.skip(error.message)
    assert model.output_shape[-1] == 2 and all(n is None or n > 0 for n in model.output_shape)


def test_public_split_points_are_layer_names():
    """Checks those of published configurations, and further ones of its EfficientNet."""
    splits = {"efficientnet-b0": {"block2b_expand_conv", "block4a_expand_conv", "block6a_expand_conv"}}
    for file in (*built_in_files(), read_file(Path(__file__).parent / "data" / "public_style.yml")):
        for values in (file.get(preset).values for preset in file.names):
            if "model_name" in values:
                splits.setdefault(values["model_name"], set()).update(values.get("pipeline_splits", ()))
    assert sum(map(len, splits.values())) > 15
    for name, names in splits.items():
        assert names <= {layer.name for layer in shipped_graph(name).layers}, name
