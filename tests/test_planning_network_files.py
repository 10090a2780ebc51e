"""Network files: one saved by Keras is planned as it is trained, a layer graph as it is; others are refused."""

import json
import random
import zipfile

import numpy as np
import pytest
from altered import altered, places
from support.refusals import Refusal, check_raises, check_refused

from ipucnn.compat import KERAS_VERSION
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.hardware import get_ipu
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.registry import find_network, get_model
from ipucnn.planning.cost.layer_times import layer_times
from ipucnn.planning.graphs.extract import build_graph, read_layer_graph, read_shipped
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.program import PlannedProgram

needs_keras_3 = pytest.mark.skipif(KERAS_VERSION < (3,), reason="only Keras 3 writes .keras files")


def options_of(record):
    return BuildOptions(record.input_shape, record.num_classes)


def graph_in(path):
    """Returns the graph that ``plan-splits`` plans."""
    record = find_network(str(path), plans=True)
    return build_graph(record, options_of(record))


# --- files that Keras saves


def residual(keras):
    layers = keras.layers
    images = keras.Input((20, 18, 3), name="images")
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu", use_bias=False)(images)
    left = layers.DepthwiseConv2D((3, 5), padding="same", depth_multiplier=2)(x)
    left = layers.LeakyReLU()(layers.BatchNormalization(scale=False)(left))
    left = layers.Conv2D(8, 1, groups=4)(left)
    right = layers.SeparableConv2D(8, 3, padding="same", activation="swish")(x)
    x = layers.Add()([left, layers.GroupNormalization(4)(right)])
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    y = layers.Conv2DTranspose(6, 3, strides=2, padding="valid")(x)
    y = layers.AveragePooling2D(2)(layers.Cropping2D(((1, 0), (0, 1)))(y))
    gate = layers.Dense(6, activation="sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(y))
    y = layers.UpSampling2D(2)(layers.Multiply()([y, gate]))
    z = layers.Concatenate()([y, layers.ReLU(6.0)(layers.Dropout(0.3)(y))])
    return keras.Model(images, layers.Dense(5)(layers.Flatten()(z)))


def sequential(keras):
    layers = keras.layers
    model = keras.Sequential(
        [layers.Conv2D(4, 5), layers.Activation("tanh"), layers.AveragePooling2D(2), layers.Flatten()]
    )
    model.add(layers.Dense(10))
    model.build((None, 28, 28, 1))
    return model


@pytest.mark.slow
@needs_keras_3
@pytest.mark.parametrize("build", [residual, sequential])
def test_keras_file_is_planned_as_the_trained_network(build, tmp_path, run, report):
    from tensorflow import keras

    from ipucnn.planning.graphs.keras_graph import graph_of

    model = build(keras)
    model.save(tmp_path / "net.keras")
    graph = graph_in("net.keras")
    record = find_network("net.keras")
    assert graph == graph_of(build_model(record, options_of(record)), "net.keras")
    assert graph.num_parameters == model.count_params()
    # Keras' own layers: other classes, and other names of input and copies.
    functional = keras.Model(model.inputs, model.outputs[0])
    of_keras = graph_of(functional, "net.keras")
    assert sorted(layer.output_shape for layer in graph.layers) == sorted(
        layer.output_shape for layer in of_keras.layers
    )
    assert graph.total_macs == of_keras.total_macs
    plan = report("plan-splits", "net.keras", "--stages", 2)
    assert plan["input_shape"] == list(graph.input_shape) and plan["num_classes"] == graph.num_classes
    assert not any("input" in text for text in plan["assumed"])
    check_refused(run, Refusal("plan-splits net.keras --stages 2 --image-size 64", "takes images of"))


def test_layer_of_unknown_class_costs_its_bytes_and_macs():
    """A matrix product of the same MACs takes the same time; pure data movement takes time for its bytes."""

    def times(op_class, macs, channels):
        layers = (
            Layer("in", "input", (), (16, 16, 32)),
            Layer("x", op_class, ("in",), (16, 16, channels), (1, 1), (1, 1), 1, 32, macs, 0, 0, ("in",)),
        )
        graph = LayerGraph("net", (16, 16, 32), channels, layers)
        return layer_times(graph, PlannedProgram(training=False), get_ipu("mk2"))

    product = times("matmul", 16 * 16 * 32 * 64, 64)
    other = times("other", 16 * 16 * 32 * 64, 64)
    features = [0, 1, 2]  # the unit's cycles, its blocks, bytes received
    np.testing.assert_allclose(other.work[1, 0, features], product.work[1, 0, features])
    assert other.forward_s[1] > product.forward_s[1]  # and its bytes
    assert times("other", 0, 640).forward_s[1] > times("other", 0, 64).forward_s[1] > 0


# --- files made by hand: anything but a network is refused, on every Python


def node(*reads, shape=None):
    config = {"dtype": "float32", **({"shape": shape} if shape else {})}
    tensors = [
        {"class_name": "__keras_tensor__", "config": {**config, "keras_history": [name, 0, 0]}}
        for name in reads
    ]
    return {"args": tensors if len(tensors) == 1 else [tensors], "kwargs": {}}


def entry(kind, name, *reads, **config):
    return {
        "module": "keras.layers",
        "class_name": kind,
        "name": name,
        "config": {"name": name, **config},
        "inbound_nodes": [node(*reads)] if reads else [],
    }


def network():
    layers = [
        entry("InputLayer", "images", batch_shape=[None, 8, 8, 3]),
        entry("Conv2D", "conv", "images", filters=4, kernel_size=[3, 3], strides=[1, 1], padding="same"),
        entry("ReLU", "relu", "conv"),
        entry("Flatten", "flat", "relu"),
        entry("Dense", "logits", "flat", units=10),
    ]
    ends = {"input_layers": [["images", 0, 0]], "output_layers": [["logits", 0, 0]]}
    return {"class_name": "Functional", "config": {"name": "net", "layers": layers, **ends}}


def save(path, config):
    text = config if isinstance(config, (str, bytes)) else json.dumps(config)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", text)
    return path


def test_hand_made_file_gives_the_hand_made_graph(tmp_path):
    graph = graph_in(save(tmp_path / "net.keras", network()))
    assert [layer.name for layer in graph.layers] == ["input", "conv", "relu", "flat", "logits"]
    assert [layer.output_shape for layer in graph.layers] == [
        (8, 8, 3), (8, 8, 4), (8, 8, 4), (256,), (10,)
    ]  # fmt: skip
    assert [layer.macs for layer in graph.layers] == [0, 64 * 4 * 27, 0, 0, 2560]
    assert [layer.num_trainable for layer in graph.layers] == [0, 4 * 27 + 4, 0, 0, 2570]


def changed(**by_layer):
    """Returns the network with other values in its layers: ``conv=dict(filters=0)``, or another class (``kind=``)."""
    config = network()
    for layer in config["config"]["layers"]:
        change = by_layer.pop(layer["name"], {})
        layer["class_name"] = change.pop("kind", layer["class_name"])
        layer["config"].update(change)
    config["config"].update(by_layer)
    return config


REFUSED = {
    "a Lambda": (2, changed(relu=dict(kind="Lambda", function="boom")), "is a Lambda layer"),
    "no class": (3, changed(relu=dict(kind=7)), "class_name = 7"),
    "huge filters": (2, changed(conv=dict(filters=10**40)), "cannot be built"),
    "text": (2, changed(conv=dict(kernel_size="abc")), "cannot be made again"),
    "groups": (2, changed(conv=dict(groups=2)), "cannot be built"),
    "channels first": (2, changed(conv=dict(data_format="channels_first")), "channels first"),
    "no images": (2, changed(images=dict(batch_shape=[None, 5])), "instead of images"),
    "two inputs": (2, changed(input_layers=[["images", 0, 0], ["conv", 0, 0]]), "2 inputs (images, conv)"),
    "two outputs": (2, changed(output_layers=[["relu", 0, 0], ["logits", 0, 0]]), "has 2 outputs"),
    "no output": (2, changed(output_layers=[["nothing", 0, 0]]), "'nothing' is no layer"),
    "no layers": (2, changed(layers=[]), "does not list"),
    "a class of its own": (2, {"class_name": "Net", "config": {}}, "is a Net"),
    "a list": (3, [], "holds no model"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_files_without_a_network_are_refused(case, tmp_path, run):
    code, config, words = REFUSED[case]
    save(tmp_path / "net.keras", config)
    error, _, hint = words.partition(" // hint: ")
    check_refused(run, Refusal("plan-splits net.keras --stages 1", error, hint, code))


def test_terminal_control_sequences_in_names_are_not_printed(tmp_path, run):
    save(tmp_path / "net.keras", changed(relu=dict(name="x\x1b[2J")))
    code, out, err = run("plan-splits", "net.keras", "--stages", 1)
    assert code == 0 and "\x1b" not in out + err


def test_deeply_nested_empty_models_are_refused_quickly(tmp_path):
    """Each model calls the inner one four times, and the innermost has only an input: 4**12 calls of no layer."""
    images = entry("InputLayer", "images", batch_shape=[None, 8, 8, 3])
    ends = {"input_layers": [["images", 0, 0]], "output_layers": [["images", 0, 0]]}
    inside = {"class_name": "Functional", "config": {"layers": [images], **ends}}
    for _ in range(12):
        inner = {**inside, "name": "inner", "inbound_nodes": [node("images")] * 4}
        outer = {"layers": [images, inner], **ends, "output_layers": [["inner", 3, 0]]}
        inside = {"class_name": "Functional", "config": outer}
    with pytest.raises(ConfigurationError, match="more than 3,000 layers"):
        find_network(str(save(tmp_path / "net.keras", inside)))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"{}"])
def test_a_damaged_file_is_refused(content, tmp_path, run):
    (tmp_path / "net.keras").write_bytes(content)
    check_refused(run, Refusal("plan-splits net.keras --stages 1", "net.keras", code=3))
    whole = save(tmp_path / "whole.keras", network()).read_bytes()
    (tmp_path / "net.keras").write_bytes(whole[: len(whole) // 2])
    check_raises(DataError, "", "", graph_in, tmp_path / "net.keras")


def test_other_members_and_texts_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")
    with pytest.raises(DataError, match=r"holds no config\.json"):
        graph_in(tmp_path / "other.keras")
    for text in ("{", "[" * 100_000, b"\xff\xfe", '{"a": 1, "a": 2}'):
        check_raises(DataError, "", "", graph_in, save(tmp_path / "net.keras", text))


@pytest.mark.slow
def test_changed_files_give_a_graph_or_a_refusal(tmp_path):
    draw = random.Random(7)
    values = [None, 0, -1, 7, 1.5, "x", "", [], {}, [[]], {"a": 1}, True, 10**30, ["images", 0, 0]]
    for base, number in ((network(), 40), (json.loads(graph_text()), 150)):
        spots = list(places(base))
        for _ in range(number):
            config = altered(base, draw.choice(spots), draw, values)
            is_keras = "class_name" in base
            path = tmp_path / ("net.keras" if is_keras else "net.json")
            if is_keras:
                save(path, config)
            else:
                path.write_text(json.dumps(config))
            try:
                graph = graph_in(path) if is_keras else read_layer_graph(path)
            except UserError as error:
                assert error.hint and path.name in error.message, error.message
                continue
            times = layer_times(graph, PlannedProgram(), get_ipu("mk2"))
            assert np.isfinite(times.forward_s).all()


# --- layer graphs as JSON


def test_terminal_control_sequences_in_names_are_refused(tmp_path, run):
    (tmp_path / "net.json").write_text(graph_text().replace('"conv"', '"a\\u001b[2J"'))
    code, out, err = run("plan-splits", "net.json", "--stages", 1)
    assert code == 3 and "\x1b" not in out + err and "hint:" in err


def graph_text():
    layers = (
        Layer("in", "input", (), (8, 8, 3)),
        Layer("conv", "conv", ("in",), (8, 8, 4), (3, 3), (1, 1), 1, 3, 6912, 112, 112, ("in",)),
        Layer("flat", "reshape", ("conv",), (256,), input_channels=4),
        Layer("out", "matmul", ("flat",), (10,), (1, 1), (1, 1), 1, 256, 2560, 2570, 2570, ("flat",)),
    )
    return LayerGraph("net", (8, 8, 3), 10, layers).to_json()


SETTINGS = [
    *("--stages", 3, "--micro-batch-size", 4, "--gradient-accumulation-count", 12, "--replicas", 2),
    *("--schedule", "Interleaved", "--precision", "16.32", "--optimizer", "rmsprop"),
    "--no-optimizer-state-offloading",
]


@pytest.mark.slow
def test_saved_graph_has_the_plan_of_its_network(run, report, tmp_path):
    code, out, err = run("plan-splits", "cifar_resnet8", *SETTINGS, "--json", "--save-graph", "g.json")
    assert code == 0 and "written: g.json" in err, err
    plan, of_file = json.loads(out), report("plan-splits", "g.json", *SETTINGS)
    for one in (plan, of_file):
        del one["assumed"], one["model"], one["build"]
    # A run of the network takes its input from options; a file contains it.
    inputs = {key: plan["options"].pop(key) for key in set(plan["options"]) - set(of_file["options"])}
    assert set(inputs) <= {"dataset", "image_size"} and plan == of_file
    code, out, err = run("plan-splits", "g.json", *SETTINGS, "--html", "p.html", "--save", "p.yml")
    assert code == 0 and "ipucnn train" not in out and "for a program of your own" in out
    assert "ipucnn train g.json" not in (tmp_path / "p.html").read_text()
    check_refused(run, Refusal("train --plan p.yml", "g.json is a file"))


def test_convolutions_whose_weights_a_file_leaves_out_are_named(report, tmp_path):
    graph = json.loads(read_shipped(get_model("cifar_resnet8")).to_json())
    (tmp_path / "whole.json").write_text(json.dumps(graph))
    convolutions = [layer for layer in graph["layers"] if layer["op_class"] == "conv"]
    for layer in convolutions[:2]:
        layer.update(num_parameters=0, num_trainable=0)
    (tmp_path / "without.json").write_text(json.dumps(graph))
    names = ", ".join(layer["name"] for layer in convolutions[:2])
    line = f"layers without weights (num_parameters): {names}"
    assert line in report("plan-splits", "without.json", *SETTINGS)["assumed"]
    assert not any(
        "without weights" in text for text in report("plan-splits", "whole.json", *SETTINGS)["assumed"]
    )


def test_operations_that_a_file_does_not_allow_are_refused(tmp_path, run):
    (tmp_path / "net.json").write_text(graph_text())
    (tmp_path / "net.h5").write_bytes(b"")
    check_refused(
        run,
        Refusal("plan-splits lenet --stages 1 --save-graph g.yml", "g.yml"),
        Refusal("plan-splits net.json --stages 1 --save-graph net.json", "net.json"),
        Refusal("plan-splits net.json --stages 1 --image-size 16", "--image-size"),
        Refusal("plan-splits net.json --stages 1 --classes 16", "--classes"),
        Refusal("plan-splits net.json --stages 1 --norm-layer group_norm", "--norm-layer"),
        Refusal("plan-splits net.h5 --stages 1", "net.h5", "", 3),
        Refusal("plan-splits net.json --stages 2 --splits nothing", "nothing"),
        Refusal("train net.json", "net.json"),
        Refusal("benchmark net.json", "net.json"),
        Refusal("models net.json", "net.json"),
    )


def test_registered_name_takes_precedence_over_a_folder(tmp_path, report):
    (tmp_path / "lenet").mkdir()
    assert report("plan-splits", "lenet", "--stages", 1)["model"] == "lenet"
