"""Networks in files: what Keras saved gives the graph of the built model, and what is no network is refused."""

import copy
import json
import random
import zipfile

import numpy as np
import pytest
from altered import altered, places
from hypothesis import given, settings
from hypothesis import strategies as st

from ipucnn import cli
from ipucnn.compat import KERAS_VERSION
from ipucnn.errors import DataError, UserError
from ipucnn.hardware import get_ipu
from ipucnn.planning.cost.layer_times import layer_times
from ipucnn.planning.graphs.layer_graph import MAX_LAYERS, Layer, LayerGraph, unknown_layers
from ipucnn.planning.graphs.network_files import read_network
from ipucnn.planning.graphs.stock_layers import arithmetic
from ipucnn.planning.settings import PlanSettings

needs_keras_3 = pytest.mark.skipif(KERAS_VERSION < (3,), reason="only Keras 3 writes .keras files")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *args):
    code = cli.run(list(map(str, args)))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- what Keras saves


def residual(keras):
    layers = keras.layers
    images = keras.Input((20, 18, 3), name="images")
    x = layers.Rescaling(1 / 255)(images)
    x = layers.ZeroPadding2D(((1, 2), (0, 1)))(x)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu", use_bias=False)(x)
    left = layers.DepthwiseConv2D((3, 5), padding="same", depth_multiplier=2)(x)
    left = layers.BatchNormalization(scale=False)(left)
    left = layers.LeakyReLU()(left)
    left = layers.Conv2D(8, 1, groups=4)(left)
    right = layers.SeparableConv2D(8, 3, padding="same", activation="swish")(x)
    right = layers.GroupNormalization(4)(right)
    x = layers.Add()([left, right])
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    y = layers.Conv2DTranspose(6, 3, strides=2, padding="valid")(x)
    y = layers.Cropping2D(((1, 0), (0, 1)))(y)
    y = layers.AveragePooling2D(2)(y)
    y = layers.PReLU(shared_axes=[1, 2])(y)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(y)
    gate = layers.Dense(6, activation="sigmoid")(gate)
    y = layers.Multiply()([y, gate])
    y = layers.UpSampling2D(2)(y)
    shared = layers.Conv2D(6, 3, padding="same")
    y = shared(shared(y))
    y = layers.Dropout(0.3)(layers.LayerNormalization()(y))
    z = layers.Concatenate()([y, layers.ReLU(6.0)(y)])
    frozen = layers.Dense(5)
    frozen.trainable = False
    return keras.Model(images, frozen(layers.Flatten()(z)))


def sequential(keras):
    layers = keras.layers
    model = keras.Sequential(
        [layers.Conv2D(4, 5), layers.Activation("tanh"), layers.AveragePooling2D(2), layers.Flatten()]
    )
    model.add(layers.Reshape((12, -1)))
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    model.build((None, 28, 28, 1))
    return model


def application(name):
    def build(keras):
        return getattr(keras.applications, name)(weights=None, input_shape=(96, 96, 3), classes=7)

    return pytest.param(build, id=name, marks=pytest.mark.slow)


APPLICATIONS = ("ResNet50V2", "MobileNetV2", "Xception", "InceptionV3", "DenseNet121", "EfficientNetB0")


@needs_keras_3
@pytest.mark.parametrize("build", [residual, sequential, *map(application, APPLICATIONS)])
def test_a_file_gives_the_graph_of_the_built_network(build, tmp_path):
    from tensorflow import keras

    from ipucnn.planning.graphs.keras_graph import graph_of

    path = tmp_path / "net.keras"
    model = build(keras)
    model.save(path)
    graph = read_network(path)
    functional = keras.Model(
        model.inputs, model.outputs[0]
    )  # a sequential model has no calls in its configuration
    assert graph == graph_of(functional, str(path))
    assert graph.num_parameters == model.count_params()
    assert not unknown_layers(graph)


@needs_keras_3
def test_models_within_models_are_taken_apart(tmp_path):
    """Against the network written out flat, with the names that the parts get."""
    from tensorflow import keras

    layers = keras.layers

    def block(prefix):
        return [layers.Conv2D(4, 3, padding="same", name=f"{prefix}a"), layers.ReLU(name=f"{prefix}b")]

    inner = keras.Sequential([keras.Input((8, 8, 4)), *block("")], name="inner")
    middle_in = keras.Input((8, 8, 4), name="in")
    middle = keras.Model(middle_in, layers.Add(name="add")([inner(middle_in), middle_in]), name="middle")
    images = keras.Input((8, 8, 4), name="images")
    x = middle(middle(images))
    nested = keras.Model(images, layers.Flatten(name="flat")(x))
    nested.save(tmp_path / "nested.keras")

    conv, relu = block("middle--inner--")
    add = layers.Add(name="middle--add")
    x = add([relu(conv(images)), images])
    x = add([relu(conv(x)), x])
    flat = keras.Model(images, layers.Flatten(name="flat")(x))
    from ipucnn.planning.graphs.keras_graph import graph_of

    text = graph_of(flat, str(tmp_path / "nested.keras")).to_json()
    assert read_network(tmp_path / "nested.keras").to_json() == text.replace("--", "_")


@needs_keras_3
def test_layers_of_other_classes_are_counted_and_named(tmp_path, capsys):
    from tensorflow import keras

    class Mixer(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")
            self.bias = self.add_weight(shape=(6,), name="bias")

        def call(self, x):
            return x @ self.kernel + self.bias

    images = keras.Input((8, 8, 3))
    x = Mixer(name="mixer")(keras.layers.Conv2D(4, 3, padding="same")(images))
    x = x * 2.0 + keras.ops.roll(x, 1, axis=1)
    keras.Model(images, keras.layers.Flatten()(x)).save(tmp_path / "net.keras")
    graph = read_network(tmp_path / "net.keras")
    assert unknown_layers(graph) == ("mixer", "roll")
    mixer = graph.layers[graph.index("mixer")]
    assert (mixer.macs, mixer.num_parameters, mixer.output_shape) == (8 * 8 * 4 * 6, 30, (8, 8, 6))
    code, out, err = run(capsys, "plan-splits", "net.keras", "--stages", 2, "--json")
    assert code == 0, err
    assumed = json.loads(out)["assumed"]
    assert any("mixer, roll" in text and "no model of" in text for text in assumed)
    keras.Model(images, Mixer(name="last")(images)).save(tmp_path / "end.keras")
    code, out, err = run(capsys, "plan-splits", "end.keras", "--stages", 1)
    assert code == 3 and "'last' is a Mixer" in err and "hint:" in err


def test_a_layer_of_another_class_costs_its_bytes_and_macs():
    """A matrix product of the same MACs takes as long, and what is only bytes grows with them."""

    def times(op_class, macs, channels):
        layers = (
            Layer("in", "input", (), (16, 16, 32)),
            Layer("x", op_class, ("in",), (16, 16, channels), (1, 1), (1, 1), 1, 32, macs, 0, 0, ("in",)),
        )
        graph = LayerGraph("net", (16, 16, 32), channels, layers)
        return layer_times(graph, PlanSettings(training=False), get_ipu("mk2"))

    product = times("matmul", 16 * 16 * 32 * 64, 64)
    other = times("other", 16 * 16 * 32 * 64, 64)
    features = [0, 1, 2]  # the unit's cycles, its blocks, bytes received
    np.testing.assert_allclose(other.work[1, 0, features], product.work[1, 0, features])
    assert other.forward_s[1] > product.forward_s[1]  # its bytes besides
    assert times("other", 0, 640).forward_s[1] > times("other", 0, 64).forward_s[1] > 0


KINDS = {
    "Conv2D": lambda draw: dict(
        filters=draw(st.sampled_from([4, 6])),
        kernel_size=[draw(st.integers(1, 4)), draw(st.integers(1, 4))],
        groups=draw(st.sampled_from([1, 2])),
        dilation_rate=draw(st.integers(1, 2)),
        use_bias=draw(st.booleans()),
    ),
    "DepthwiseConv2D": lambda draw: dict(
        kernel_size=draw(st.integers(1, 4)), depth_multiplier=draw(st.integers(1, 3))
    ),
    "SeparableConv2D": lambda draw: dict(filters=5, kernel_size=draw(st.integers(1, 4))),
    "Conv2DTranspose": lambda draw: dict(
        filters=5, kernel_size=draw(st.integers(1, 4)), strides=draw(st.integers(1, 3))
    ),
    "MaxPooling2D": lambda draw: dict(pool_size=draw(st.integers(1, 4))),
    "AveragePooling2D": lambda draw: dict(pool_size=draw(st.integers(1, 4)), strides=draw(st.integers(1, 3))),
    "UpSampling2D": lambda draw: dict(size=draw(st.integers(1, 3))),
    "Dense": lambda draw: dict(units=3, use_bias=draw(st.booleans())),
    "BatchNormalization": lambda draw: dict(scale=draw(st.booleans()), center=draw(st.booleans())),
    "LayerNormalization": lambda draw: dict(axis=draw(st.sampled_from([-1, 3, [1, 3]]))),
    "Normalization": lambda draw: dict(axis=draw(st.sampled_from([-1, None]))),
    "ZeroPadding2D": lambda draw: dict(padding=((draw(st.integers(0, 3)), 1), (0, draw(st.integers(0, 3))))),
    "Cropping2D": lambda draw: dict(cropping=draw(st.integers(0, 2))),
    "PReLU": lambda draw: dict(shared_axes=draw(st.sampled_from([None, [1, 2]]))),
}


@needs_keras_3
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shapes_are_those_that_keras_computes(data):
    from tensorflow import keras

    kind = data.draw(st.sampled_from(sorted(KINDS)))
    options = KINDS[kind](data.draw)
    if kind.endswith(("Conv2D", "Transpose")) or "Pooling" in kind:
        options["padding"] = data.draw(st.sampled_from(["same", "valid"]))
        if options.get("dilation_rate", 1) == 1 and kind != "DepthwiseConv2D":
            options.setdefault("strides", data.draw(st.integers(1, 3)))
    shape = (data.draw(st.integers(8, 12)), data.draw(st.integers(8, 12)), 4)
    layer = getattr(keras.layers, kind)(**options)
    layer.build((None, *shape))
    config = json.loads(json.dumps(layer.get_config()))
    found = arithmetic(kind, config, [shape])
    assert found.output == tuple(layer.compute_output_shape((None, *shape)))[1:]
    assert found.trainable == [tuple(w.shape) for w in layer.trainable_weights]
    assert found.fixed == [tuple(w.shape) for w in layer.non_trainable_weights]


# --- files made by hand: what is no network is refused, on every Python


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


def test_a_file_made_by_hand_is_the_graph_worked_out_by_hand(tmp_path):
    graph = read_network(save(tmp_path / "net.keras", network()))
    assert [layer.name for layer in graph.layers] == ["images", "conv", "relu", "flat", "logits"]
    assert [layer.output_shape for layer in graph.layers] == [
        (8, 8, 3), (8, 8, 4), (8, 8, 4), (256,), (10,)
    ]  # fmt: skip
    assert [layer.macs for layer in graph.layers] == [0, 64 * 4 * 27, 0, 0, 2560]
    assert [layer.num_trainable for layer in graph.layers] == [0, 4 * 27 + 4, 0, 0, 2570]


def changed(**by_layer):
    """The network with other values in its layers: ``conv=dict(filters=0)``, or another class (``kind=``)."""
    config = network()
    for layer in config["config"]["layers"]:
        change = by_layer.pop(layer["name"], {})
        layer["class_name"] = change.pop("kind", layer["class_name"])
        layer["config"].update(change)
    config["config"].update(by_layer)
    return config


REFUSED = {
    "a Lambda": (changed(relu=dict(kind="Lambda", function="boom")), "is a Lambda layer"),
    "no class": (changed(relu=dict(kind=7)), "class_name = 7"),
    "filters": (changed(conv=dict(filters=0)), "has filters = 0"),
    "huge filters": (changed(conv=dict(filters=10**40)), "has filters = 10"),
    "text": (changed(conv=dict(kernel_size="abc")), "has kernel_size = 'abc'"),
    "strides": (changed(conv=dict(strides=[0, 1])), "has strides = [0, 1]"),
    "groups": (changed(conv=dict(groups=2)), "2 groups of 3 channels"),
    "channels first": (changed(conv=dict(data_format="channels_first")), "channels first"),
    "any size": (changed(images=dict(batch_shape=[None, None, None, 3])), "images of any size"),
    "no images": (changed(images=dict(batch_shape=[None, 5])), "wanted images"),
    "two inputs": (changed(input_layers=[["images", 0, 0], ["conv", 0, 0]]), "has 2 inputs (images, conv)"),
    "two outputs": (changed(output_layers=[["relu", 0, 0], ["logits", 0, 0]]), "has 2 outputs"),
    "no output": (changed(output_layers=[["nothing", 0, 0]]), "'nothing' is no layer"),
    "no layers": (changed(layers=[]), "does not list"),
    "a class of its own": ({"class_name": "Net", "config": {}}, "is a Net"),
    "a list": ([], "holds no model"),
    "unbuilt": (
        {"class_name": "Sequential", "config": {"layers": [entry("Flatten", "f")]}},
        "model.build((None",
    ),
    "shapes": (changed(logits=dict(kind="Conv2D", filters=1, kernel_size=[1, 1])), "wanted height, width"),
    "a name for a terminal": (changed(relu=dict(name="x\x1b[2J")), ""),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_no_network_is_refused(case, tmp_path, capsys):
    config, words = REFUSED[case]
    save(tmp_path / "net.keras", config)
    code, out, err = run(capsys, "plan-splits", "net.keras", "--stages", 1)
    if case == "a name for a terminal":  # Keras' own name of the layer is the one that counts
        assert code == 0 and "\x1b" not in out + err
        return
    assert code == 3 and not out, err
    assert words in err and err.count("error:") == 1 and err.count("hint:") == 1 and "Traceback" not in err


def test_a_circle_twice_a_name_and_contradicting_shapes(tmp_path):
    circle = network()
    circle["config"]["layers"][1]["inbound_nodes"] = [node("relu")]
    twice = network()
    twice["config"]["layers"].append(entry("ReLU", "relu", "conv"))
    lying = network()
    lying["config"]["layers"][2]["inbound_nodes"] = [node("conv", shape=[None, 9, 9, 4])]
    for config, words in (
        (circle, "reads a layer that is not there"),
        (twice, "two layers 'relu'"),
        (lying, r"returns \(8, 8, 4\), and the file says \(9, 9, 4\)"),
    ):
        with pytest.raises(DataError, match=words):
            read_network(save(tmp_path / "net.keras", config))


def test_models_in_models_do_not_grow_without_end(tmp_path):
    """Each model calls the one inside four times: 65,536 layers."""
    inside = network()
    inside["config"]["layers"] = [
        entry("InputLayer", "images", batch_shape=[None, 8, 8, 3]),
        entry("ReLU", "logits", "images"),
    ]
    for _ in range(8):
        outer = copy.deepcopy(network())
        inner = {**inside, "name": "logits", "module": "keras"}
        inner["config"] = {**inside["config"], "name": "logits"}
        inner["inbound_nodes"] = [node("images")] * 4
        outer["config"]["layers"] = [entry("InputLayer", "images", batch_shape=[None, 8, 8, 3]), inner]
        outer["config"]["output_layers"] = [["logits", 1, 0]]
        inside = outer
    with pytest.raises(DataError, match=f"more than {MAX_LAYERS:,} layers"):
        read_network(save(tmp_path / "net.keras", inside))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"{}"])
def test_a_damaged_file_is_refused(content, tmp_path, capsys):
    (tmp_path / "net.keras").write_bytes(content)
    code, _, err = run(capsys, "plan-splits", "net.keras", "--stages", 1)
    assert code == 3 and "error: " in err and "hint: " in err
    whole = save(tmp_path / "whole.keras", network()).read_bytes()
    (tmp_path / "net.keras").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError):
        read_network(tmp_path / "net.keras")


def test_other_members_and_texts_are_refused(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "other.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")
    with pytest.raises(DataError, match=r"holds no config\.json"):
        read_network(tmp_path / "other.keras")
    monkeypatch.setattr("ipucnn.models.keras_files.MAX_RECORD_BYTES", 200_000)
    for text in ("{", "[" * 100_000, b"\xff\xfe", '{"a": 1, "a": 2}', json.dumps(network()) + " " * 200_000):
        with pytest.raises(DataError):
            read_network(save(tmp_path / "net.keras", text))


def test_no_change_of_a_file_ends_in_anything_but_a_graph_or_a_refusal(tmp_path):
    draw = random.Random(7)
    values = [None, 0, -1, 7, 1.5, "x", "", [], {}, [[]], {"a": 1}, True, 10**30, ["images", 0, 0]]
    for base in (network(), json.loads(graph_text())):
        spots = list(places(base))
        for _ in range(150):
            config = altered(base, draw.choice(spots), draw, values)
            if base.get("class_name"):
                path = save(tmp_path / "net.keras", config)
            else:
                path = tmp_path / "net.json"
                path.write_text(json.dumps(config))
            try:
                graph = read_network(path)
            except UserError as error:
                assert error.hint and path.name in error.message
                continue
            times = layer_times(graph, PlanSettings(), get_ipu("mk2"))
            assert np.isfinite(times.forward_s).all()


# --- layer graphs as JSON


def test_names_that_a_terminal_would_obey_are_refused(tmp_path, capsys):
    (tmp_path / "net.json").write_text(graph_text().replace('"conv"', '"a\\u001b[2J"'))
    code, out, err = run(capsys, "plan-splits", "net.json", "--stages", 1)
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


def test_a_saved_graph_gives_the_plan_of_the_network(capsys, tmp_path):
    code, out, err = run(
        capsys, "plan-splits", "cifar_resnet8", *SETTINGS, "--json", "--save-graph", "g.json"
    )
    assert code == 0 and "written: g.json" in err, err
    code, again, err = run(capsys, "plan-splits", "g.json", *SETTINGS, "--json")
    assert code == 0, err
    plan, of_file = json.loads(out), json.loads(again)
    for one in (plan, of_file):
        del one["assumed"], one["model"], one["build"]
    # A run of the network is told its input; a file has it.
    inputs = {key: plan["options"].pop(key) for key in set(plan["options"]) - set(of_file["options"])}
    assert set(inputs) <= {"dataset", "image_size"} and plan == of_file
    code, out, err = run(capsys, "plan-splits", "g.json", *SETTINGS, "--html", "p.html", "--save", "p.yml")
    assert code == 0 and "ipucnn train" not in out and "for a program of your own" in out
    assert "ipucnn train g.json" not in (tmp_path / "p.html").read_text()
    code, _, err = run(capsys, "train", "--plan", "p.yml")
    assert code == 2 and "g.json is a file" in err and "hint:" in err


@pytest.mark.parametrize(
    "args",
    [
        ["plan-splits", "lenet", "--stages", 1, "--save-graph", "g.yml"],
        ["plan-splits", "net.json", "--stages", 1, "--save-graph", "net.json"],
        ["plan-splits", "net.json", "--stages", 1, "--image-size", 16],
        ["plan-splits", "net.json", "--stages", 1, "--classes", 16],
        ["plan-splits", "net.json", "--stages", 1, "--norm-layer", "group_norm"],
        ["plan-splits", "net.h5", "--stages", 1],
        ["plan-splits", "net.json", "--stages", 2, "--splits", "nothing"],
        ["train", "net.json"],
        ["benchmark", "net.json"],
        ["models", "net.json"],
    ],
)
def test_what_cannot_be_done_with_a_file_is_said(args, tmp_path, capsys):
    (tmp_path / "net.json").write_text(graph_text())
    (tmp_path / "net.h5").write_bytes(b"")
    code, out, err = run(capsys, *args)
    assert code == 2 and not out, err
    assert err.count("error:") == 1 and err.count("hint:") == 1
    assert (tmp_path / "net.json").read_text() == graph_text()


def test_a_name_of_the_registry_goes_before_a_folder_of_that_name(tmp_path, capsys):
    (tmp_path / "lenet").mkdir()
    code, out, _ = run(capsys, "plan-splits", "lenet", "--stages", 1, "--json")
    assert code == 0 and json.loads(out)["model"] == "lenet"
