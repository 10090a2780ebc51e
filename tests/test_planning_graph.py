"""The layer graph: its facts about networks, its JSON, its cache, and equality between both versions of Keras."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.plans import home_graph
from support.refusals import check_raises
from tensorflow import keras

from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import cache_folder
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.counts import layer_macs
from ipucnn.models.registry import get_model
from ipucnn.planning.graphs.extract import layer_graph, read_shipped, shipped_path
from ipucnn.planning.graphs.keras_graph import graph_of
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph, estimates, unknown_layers

# Multiply-accumulates in 1e9 and all weights, moving statistics included, as Keras' documentation and the
# papers give them (the layer graph counts moving statistics, the registry does not).
PUBLISHED_WEIGHTS = {"resnet50": 25_610_152, "xception": 22_910_480, "unet": 31_030_658, "lenet": 61_706}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def unusual_graph(name):
    """Returns a layer graph that is not shipped."""
    record = get_model(name)
    return layer_graph(record, BuildOptions(record.input_shape, 7))


def test_damaged_or_foreign_shipped_graphs_are_ignored(tmp_path, monkeypatch):
    record = get_model("lenet")
    packed = shipped_path(record).read_bytes()
    keys = (shipped_path(record).parent / "keys.json").read_text()
    monkeypatch.setattr("ipucnn.planning.graphs.extract.FOLDER", tmp_path)
    assert read_shipped(record) is None
    (tmp_path / "keys.json").write_text(keys)
    assert read_shipped(record) is None
    flipped = packed[:20] + bytes(255 - byte for byte in packed[20:40]) + packed[40:]
    for bad in (packed[: len(packed) // 2], b"", b"not packed", gzip.compress(b"\xff\n{}"), flipped):
        shipped_path(record).write_bytes(bad)
        assert read_shipped(record) is None
    shipped_path(record).write_bytes(packed)
    assert read_shipped(record) is not None
    # The graph of another network, and invalid keys
    shipped_path(record).write_bytes(gzip.compress(unusual_graph("toy_model").to_json().encode()))
    assert read_shipped(record) is None
    shipped_path(record).write_bytes(packed)
    for damaged in ("", "[]", "{}", '{"code": 1}', keys.replace('"code": "', '"code": "0'), "{"):
        (tmp_path / "keys.json").write_text(damaged)
        assert read_shipped(record) is None


@pytest.mark.parametrize("name", sorted(PUBLISHED_WEIGHTS))
def test_all_weights_are_counted(name):
    assert home_graph(name).num_parameters == PUBLISHED_WEIGHTS[name]


def test_layers_of_resnet50():
    graph = home_graph("resnet50")
    conv = graph.layers[graph.index("conv3_block1_2_conv")]
    assert (conv.op_class, conv.kernel, conv.strides, conv.groups) == ("conv", (3, 3), (2, 2), 1)
    assert conv.output_shape == (28, 28, 128) and conv.input_channels == 128
    assert conv.macs == 28 * 28 * 128 * 128 * 9
    assert conv.kept == conv.inputs == ("conv3_block1_1_relu",)
    by_name = {layer.name: layer for layer in graph.layers}
    assert by_name["conv3_block1_1_relu"].kept == ("conv3_block1_1_relu",)
    assert by_name["conv3_block1_1_bn"].kept == ("conv3_block1_1_conv",)
    assert by_name["conv3_block1_add"].kept == ()
    assert by_name["pool1_pool"].kept == ("pool1_pad", "pool1_pool")
    assert (by_name["pool1_pool"].kernel, by_name["pool1_pool"].strides) == ((3, 3), (2, 2))
    assert by_name["avg_pool"].kernel == (7, 7)
    assert graph.layers[-1].op_class == "matmul" and graph.layers[-1].macs == 2048 * 1000
    # The shortcut spans the whole block.
    inside = graph.index("conv3_block2_2_relu")
    assert graph.crossing(inside) == ("conv3_block1_out", "conv3_block2_2_bn")


def test_layers_of_unusual_networks():
    grouped = home_graph("efficientnet-b0-g16")
    classes = {layer.op_class for layer in grouped.layers}
    assert {"grouped_conv", "elementwise", "reshape", "activation"} <= classes
    squeeze = next(layer for layer in grouped.layers if layer.name == "block2a_se_reduce")
    assert squeeze.kept == (*squeeze.inputs, squeeze.name)  # its own output for the fused swish
    excite = next(layer for layer in grouped.layers if layer.name == "block2a_se_excite")
    assert excite.kept == excite.inputs and len(excite.inputs) == 2
    drop = next(layer for layer in grouped.layers if layer.name == "block2b_drop")
    assert drop.kept == (drop.name,)
    swish = next(layer for layer in grouped.layers if layer.name == "stem_activation")
    assert swish.kept == swish.inputs
    small = home_graph("mobilenetv3-small")
    depthwise = next(layer for layer in small.layers if layer.op_class == "depthwise_conv")
    assert depthwise.groups == depthwise.input_channels > 1


def test_skips_of_unet_cross_every_cut_between_their_ends():
    graph = home_graph("unet")
    # Four skips and the running tensor, at the bottom.
    assert len(graph.crossing(graph.index("decoder_block_0_transpose"))) == 5
    for cut in range(1, len(graph.layers)):
        naive = {n for layer in graph.layers[cut:] for n in layer.inputs if graph.index(n) < cut}
        assert set(graph.crossing(cut)) == naive
    assert graph.crossing(len(graph.layers)) == ()


def test_separable_convolutions_are_two_layers_in_one_stage():
    graph = home_graph("xception")
    first = graph.index("block2_sepconv1")
    depthwise, pointwise = graph.layers[first : first + 2]
    assert (depthwise.op_class, pointwise.op_class) == ("depthwise_conv", "conv")
    assert depthwise.macs == 9 * 64 * depthwise.output_shape[0] * depthwise.output_shape[1]
    assert pointwise.num_parameters == 64 * 128
    assert first in graph.cuts and first + 1 not in graph.cuts
    assert graph.layers[first + 2].inputs == ("block2_sepconv1/pointwise",)


def test_cuts_leave_no_stage_without_work():
    graph = home_graph("resnet50")
    assert graph.cuts == tuple(range(2, len(graph.layers)))


@pytest.mark.slow
def test_macs_are_those_of_the_arithmetic_module():
    record = get_model("unet")
    model = build_model(record, BuildOptions((188, 188, 1), 2, base_filters=4))
    graph = graph_of(model, "small")
    assert {layer.name: layer.macs for layer in graph.layers} == {
        layer.name: layer_macs(layer) for layer in model.layers
    }


def test_shared_layers_stay_in_one_stage():
    images = keras.Input((8, 8, 3), name="input")
    shared = keras.layers.Conv2D(3, 3, padding="same", name="shared")
    x = keras.layers.ReLU(name="relu")(shared(images))
    x = keras.layers.ReLU(name="relu_2")(shared(x))
    graph = graph_of(keras.Model(images, keras.layers.Flatten(name="flat")(x)), "tied")
    names = [layer.name for layer in graph.layers]
    assert names == ["input", "shared", "relu", "shared/call1", "relu_2", "flat"]
    assert [layer.macs for layer in graph.layers if layer.op_class == "conv"] == [8 * 8 * 81] * 2
    assert graph.num_parameters == 84
    assert graph.tied == (("shared", "shared/call1"),)
    assert [graph.layers[c].name for c in graph.cuts] == ["relu_2", "flat"]
    assert LayerGraph.from_json(graph.to_json()) == graph


def test_own_layer_is_counted_by_its_weights_and_outputs():
    """Matrices count at each position of the output, vectors once; layers inside it count as its own weights."""

    class Mixer(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")
            self.scale = self.add_weight(shape=(6,), name="scale")
            self.steady = self.add_weight(shape=(6,), name="steady", trainable=False)
            self.inner = keras.layers.Conv2D(6, 3, padding="same", use_bias=False)
            self.inner.build((*shape[:-1], 6))
            super().build(shape)

        def call(self, x):
            return self.inner((x @ self.kernel) * self.scale + self.steady)

        def compute_output_shape(self, shape):
            return (*shape[:-1], 6)

    images = keras.Input((8, 8, 3), name="input")
    x = Mixer(name="mixer")(images)
    graph = graph_of(keras.Model(images, keras.layers.Flatten(name="flat")(x)), "own")
    mixer = graph.layers[1]
    assert (mixer.op_class, mixer.output_shape) == ("other", (8, 8, 6))
    assert mixer.macs == 8 * 8 * (3 * 6 + 3 * 3 * 6 * 6)
    assert (mixer.num_parameters, mixer.num_trainable) == (18 + 6 + 6 + 324, 18 + 6 + 324)
    assert unknown_layers(graph) == ("mixer",) and "an estimate: mixer" in estimates(graph)[0]


def test_open_sizes_and_several_outputs_are_refused():
    images = keras.Input((None, None, 3), name="input")
    model = keras.Model(images, keras.layers.ReLU()(images))
    check_raises(ConfigurationError, "fixed image size", "", graph_of, model, "open")
    images = keras.Input((8, 8, 3), name="input")
    twice = keras.Model(images, [keras.layers.ReLU()(images), keras.layers.ReLU()(images)])
    check_raises(ConfigurationError, "2 outputs", "", graph_of, twice, "twice")


# --- JSON

SMALL = LayerGraph(
    model="small",
    input_shape=(4, 4, 1),
    num_classes=2,
    layers=(
        Layer("input", "input", (), (4, 4, 1)),
        Layer("a", "conv", ("input",), (4, 4, 2), (3, 3), input_channels=1, macs=288, num_parameters=18),
        Layer("b", "activation", ("a",), (4, 4, 2), input_channels=2, kept=("b",)),
        Layer("c", "concat", ("a", "b"), (4, 4, 4), input_channels=2),
        Layer("d", "matmul", ("c",), (2,), input_channels=4, macs=128, kept=("c",)),
    ),
)


def test_json_round_trip():
    assert LayerGraph.from_json(SMALL.to_json()) == SMALL
    unet = home_graph("unet")
    assert LayerGraph.from_json(unet.to_json()) == unet


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.update(schema_version=99), "schema_version 99"),
        (lambda d: d.pop("schema_version"), "schema_version None"),
        (lambda d: d.pop("model"), "missing required field `model`"),
        (lambda d: d.update(input_shape=[4, 4]), "input_shape"),
        (lambda d: d.update(num_classes="2"), "at `$.num_classes`"),
        (lambda d: d.update(layers=[]), "not an input"),
        (lambda d: d["layers"][1].update(name="b"), "'b' is there twice"),
        (lambda d: d["layers"][1].update(inputs=["d"]), "reads 'd'"),
        (lambda d: d["layers"][1].update(inputs=["nowhere"]), "reads 'nowhere'"),
        (lambda d: d["layers"][1].update(inputs=[]), "no other, is the input"),
        (lambda d: d["layers"][1].update(op_class="convolution"), "unknown op_class 'convolution'"),
        (lambda d: d["layers"][1].update(kept=["d"]), "keeps 'd'"),
        (lambda d: d["layers"][1].update(macs=-1), "at least 0"),
        (lambda d: d["layers"][1].update(macs=1.5), "at `$.layers[1].macs`"),
        (lambda d: d["layers"][1].update(groups=0), "at least 1"),
        (lambda d: d["layers"][1].update(kernel=[3]), "kernel"),
        (lambda d: d["layers"][1].update(output_shape=[]), "at least 1"),
        (lambda d: d["layers"][1].update(num_trainable=19), "19 of 18"),
        (lambda d: d["layers"][1].update(mac=3), "unknown field `mac` - at `$.layers[1]`"),
        (lambda d: d["layers"].insert(1, 7), "at `$.layers[1]`"),
        (lambda d: d.update(tied=[["b", "a"]]), "can't be tied"),
        (lambda d: d.update(tied=[["b"]]), "tied"),
    ],
)
def test_contradictory_json_is_refused(change, message):
    data = json.loads(SMALL.to_json())
    change(data)
    check_raises(DataError, message, "", LayerGraph.from_json, json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_other_json_is_refused(text):
    check_raises(DataError, "", "", LayerGraph.from_json, text)


def test_an_unknown_layer_name_gets_a_suggestion():
    index = home_graph("resnet50").index
    check_raises(ConfigurationError, "", "conv3_block1_out", index, "conv3_blok1_out")


# --- cache


def test_a_cached_graph_needs_no_tensorflow():
    first = unusual_graph("lenet")
    code = (
        "import sys\n"
        "from ipucnn.models.build import BuildOptions\n"
        "from ipucnn.models.registry import get_model\n"
        "from ipucnn.planning.graphs.extract import layer_graph\n"
        "r = get_model('lenet')\n"
        "g = layer_graph(r, BuildOptions(r.input_shape, 7, seed=7))\n"
        "assert not any(m.split('.')[0] in ('tensorflow', 'keras') for m in sys.modules)\n"
        "print(g.to_json(), end='')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, env=os.environ)
    assert done.stdout.decode() == first.to_json()


def entries(folder):
    return sorted((folder / "graphs").iterdir())


@pytest.mark.slow
def test_damaged_cache_entries_are_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path))
    graph = unusual_graph("lenet")
    (entry,) = entries(tmp_path)
    good = entry.read_bytes()
    # A valid graph with one digit changed, half an entry, not text, nothing, a valid entry of another schema
    other = graph.to_json().replace('"schema_version": 1', '"schema_version": 0')
    resealed = f"{hashlib.sha256(other.encode()).hexdigest()}\n{other}".encode()
    for bad in (good.replace(b"416", b"417", 1), good[: len(good) // 2], b"\xff\xfe\x00", b"", resealed):
        if bad == good:
            bad = good.replace(b'"macs": 4', b'"macs": 5', 1)
        assert bad != good
        entry.write_bytes(bad)
        assert unusual_graph("lenet") == graph
        assert entry.read_bytes() == good and entries(tmp_path) == [entry]


def test_each_relevant_option_has_its_own_cache_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path))
    record = get_model("toy_model")
    for options in (
        BuildOptions((32, 32, 3), 12),
        BuildOptions((32, 32, 3), 12, seed=3, batch_size=4, norm="none"),
        BuildOptions((32, 32, 3), 11),
        BuildOptions((32, 34, 3), 10),
    ):
        graph = layer_graph(record, options)
        assert (graph.input_shape, graph.num_classes) == (options.input_shape, options.num_classes)
    assert len(entries(tmp_path)) == 3


def test_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IPUCNN_CACHE_DIR", str(tmp_path / "file"))
    assert unusual_graph("lenet").model == "lenet"


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("IPUCNN_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder("graphs") == Path("/one/graphs")
    monkeypatch.delenv("IPUCNN_CACHE_DIR")
    assert cache_folder("graphs") == Path("/two/ipucnn/graphs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("graphs") == Path.home() / ".cache" / "ipucnn" / "graphs"
