"""Users' own networks and Keras' files compute what Keras computes, with both versions of Keras, or are refused."""

import json
import math
import random
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from light_training import train_lightly
from PIL import Image
from support.own_networks import HEAD, RESIDUAL, TRAIN, built, last, network, saved, weights_of, write
from support.refusals import Refusal, check_raises, check_refused
from support.sessions import restart_names
from tensorflow import keras

import ipucnn
from ipucnn.compat import KERAS_3
from ipucnn.datasets.registry import choose_dataset, open_dataset
from ipucnn.datasets.sources.embedded import open_digits
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.models.blueprint import Node
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.keras_files import load_keras_weights, read_keras_weights
from ipucnn.models.names import named_weights
from ipucnn.models.own import seeded_generators
from ipucnn.models.registry import find_network, saved_network
from ipucnn.models.settings import ACTIVATIONS, keras_settings
from ipucnn.python_files import find_function
from ipucnn.runs.weight_files import scaling_of_file

layers = keras.layers
pytestmark = pytest.mark.usefixtures("here")
needs_keras_3 = pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 writes no .keras files")


@pytest.mark.parametrize("first", ["images, ", "layers.InputLayer(input_shape), ", ""])
def test_a_function_returns_a_sequential_model(first):
    """Keras does not list the input among the layers of a Sequential."""
    text = f"    model = keras.Sequential([{first}layers.Flatten(), layers.Dense(num_classes)])\n"
    text += "" if first else "    model.build((None, *input_shape))\n"
    record, model = built(HEAD + text + "    return model\n")
    assert [node.kind for node in record.own.architecture.nodes] == ["InputLayer", "Flatten", "Dense"]
    assert tuple(model.output_shape) == (None, 3)


def test_generators_are_seeded_inside_a_block_alone():
    def drawn():
        return random.random(), np.random.random(), float(tf.random.uniform(()))

    def seeded():
        random.seed(1), np.random.seed(1), tf.random.set_seed(1)

    seeded()
    expected = drawn()
    seeded()
    with seeded_generators(1, "a"):
        first = drawn()
    assert drawn() == expected
    with seeded_generators(1, "a"):
        assert drawn() == first != expected


class Keeping(layers.Dense):
    def __init__(self, units, **more):
        self.power = more.pop("power", 1)
        super().__init__(units, **more)

    def get_config(self):
        return {**super().get_config(), "power": self.power}


class Swallowing(layers.Dense):
    def __init__(self, units, **more):
        more.pop("power", None)
        super().__init__(units, **more)


def test_settings_among_the_keywords_of_a_layer_are_known_if_it_returns_them():
    node = Node("dense", "Dense", {"units": 2, "power": 3}, ["input"])
    assert keras_settings("x", node, Keeping) == node.config
    for layer_class in (Swallowing, layers.Dense):
        check_raises(ConfigurationError, "has power = 3", "", keras_settings, "x", node, layer_class)
        unused = Node("dense", "Dense", {"units": 2, "power": None}, ["input"])
        assert keras_settings("x", unused, layer_class) == {"units": 2}


@pytest.mark.filterwarnings("ignore:You passed .rms_scaling")
@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 has no rms_scaling")
def test_a_setting_that_keras_takes_among_its_keywords_is_computed():
    """Keras 3.9 and later take rms_scaling so."""
    _, model = built(network("x = layers.LayerNormalization(rms_scaling=True)(images)"))
    images = np.random.default_rng(0).normal(3, 1, (2, 6, 6, 2)).astype(np.float32)
    norm = keras.Model(model.inputs, model.get_layer("layer_normalization").output)
    # This setting divides by the deviation, and leaves the mean.
    expected = images / np.sqrt(images.var(axis=-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(np.asarray(norm(images)), expected, rtol=1e-5)


@needs_keras_3
def test_a_network_of_channels_that_no_image_has_is_refused_before_it_is_built(run):
    images = keras.Input((8, 8, 4))
    keras.Model(images, layers.Dense(3)(layers.Flatten()(images))).save("four.keras")
    Path("data.py").write_text(
        "import numpy as np\n\n\ndef load():\n    part = np.zeros((12, 8, 8, 3), np.uint8), np.arange(12) % 3\n"
        "    return part, part\n"
    )
    words = (
        "train",
        "four.keras",
        "--dataset",
        "data.py:load",
        "--learning-rate",
        "0.1",
        "--num-epochs",
        "1",
    )
    text, hint = (
        "images with 3 channels cannot feed a network with 4",
        "make the network for images of 1 or 3",
    )
    for more in (["--dry-run"], []):
        check_refused(run, Refusal([*words, *more], text, hint))
    assert not Path("runs").exists()


@pytest.mark.parametrize("file", [pytest.param("my net.keras", marks=needs_keras_3), "my net.h5"])
def test_a_file_that_holds_its_network_is_named_twice(file, run):
    """The hint is typed, and its predictions are those of Keras."""
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Rescaling(1 / 255), layers.Conv2D(3, 3), layers.Flatten()]
    )
    model.add(layers.Dense(10, activation="softmax"))
    model.save(file)
    model.save_weights("alone.weights.h5")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8)).astype(np.uint8)
    Image.fromarray(pixels).save("a.png")
    expected = np.asarray(model(pixels[None, :, :, None] / np.float32(1)))[0]
    no_network = "only the weights are read"
    for words, hint in (
        (
            ["infer", file, "a.png", "--dataset", "digits"],
            f"it holds a network: add --model-name '{file}'",
        ),
        (
            ["evaluate", file],
            f"add --model-name '{file}' and its data set, for example --dataset mnist",
        ),
        (
            ["evaluate", "alone.weights.h5"],
            "add --model-name and --dataset, for example --model-name lenet --dataset mnist",
        ),
        (
            ["evaluate", "alone.weights.h5", "--dataset", "digits"],
            "add --model-name, for example --model-name lenet",
        ),
    ):
        check_refused(run, Refusal(words, no_network, hint))
    lacks = f"error: {file} does not know the names of its classes"  # it scales its images
    named = ["infer", file, "a.png", "--model-name", file, "--top", 10, "--json"]
    check_refused(
        run, Refusal(named, lacks, "name the data set it was trained on, for example --dataset mnist")
    )
    code, out, err = run(*named, "--dataset", "digits")
    assert code == 0, err
    found = {one["class"]: one["probability"] for one in json.loads(out)["results"][0]["predictions"]}
    np.testing.assert_allclose([found[number] for number in range(10)], expected, rtol=1e-5)
    images, labels = np.repeat(pixels[None], 10, axis=0), np.arange(10)
    for data in ("digits", (images, labels, [f"class {number}" for number in range(10)])):
        loaded = ipucnn.load(file, model=file, dataset=data)
        np.testing.assert_allclose(loaded.predict(pixels)[0], expected, rtol=1e-5)
        assert loaded.labels[3] == ("3" if data == "digits" else "class 3")
    check_raises(ConfigurationError, no_network, f"model='{file}'", ipucnn.load, file)


def python_line(error):
    """The words of the line of Python that the hint of an error gives."""
    words = shlex.split(error.value.hint.partition(": ")[2])
    assert words[:2] == ["python", "-c"]
    return [sys.executable, *words[1:]]


@pytest.mark.slow
def test_other_forms_of_a_model_become_files_of_it():
    """The line of Python in the hint is typed.  Keras 3 has no SavedModels with layers."""
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(3, 3), layers.Flatten(), layers.Dense(5)])
    Path("it's.json").write_text(model.to_json())
    forms = ["it's.json"]
    if not KERAS_3:
        model.save("it's saved")
        forms.append("it's saved")
    for form in forms:
        with pytest.raises(DataError) as error:
            find_network(form)
        subprocess.run(python_line(error), check=True)
        made = find_network(str(Path(form).with_suffix(".h5"))).own
        assert [node.kind for node in made.architecture.nodes[1:]] == ["Conv2D", "Flatten", "Dense"]
        assert (made.input_shape, made.num_classes) == ((8, 8, 1), 5)


def test_weights_alone_are_no_network():
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(5)])
    model.save_weights("alone.weights.h5")
    with pytest.raises(DataError, match=r"alone\.weights\.h5 holds weights alone, and no network"):
        find_network("alone.weights.h5")


def test_seeds_of_layers_are_said_to_be_unused():
    """Weights are drawn as without them, and so is dropout: ``--seed`` draws all."""
    plain = "x = layers.Dropout(0.5)(layers.Conv2D(3, 3, kernel_initializer={})(images))"
    texts = [
        network(plain.replace("0.5", "0.5, seed=3").format("keras.initializers.HeNormal(seed=7)")),
        network(plain.format("'he_normal'")),
    ]
    (seeded, model), (unseeded, other) = (built(text) for text in texts)
    (note,) = (note for note in seeded.notes if "seed" in note)
    assert note.endswith("the seeds of 2 layers are not used: weights and dropout are drawn from --seed")
    assert not any("seed" in note for note in unseeded.notes)
    np.testing.assert_equal(weights_of(model), weights_of(other))


@needs_keras_3
@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("kerasnets.layers", "Rescaling"),
        ("my_net", "Normalization"),
        ("my_net.ops", "Add"),
        ("keras_mine", "RandomX"),
    ],
)
def test_classes_of_a_file_are_those_of_keras_only_if_their_module_is(module, kind):
    """Another package may begin with Keras' name, have a folder of operations, or classes called as those of Keras."""
    mine = type(kind, (layers.Layer,), {"__module__": module, "call": lambda self, x: x * 2.0 + 7})
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(2, 3, name="conv")(mine(name="mine")(images))
    keras.Model(images, layers.Dense(10)(layers.Flatten()(x))).save("mine.keras")
    assert scaling_of_file(Path("mine.keras")) is None
    error = f"layer 'mine' is of the class {kind}, which is not Keras' own"
    check_raises(ConfigurationError, error, "name the function", find_network, "mine.keras")


@needs_keras_3
@pytest.mark.slow_cases("layers.AveragePooling2D(2)(images)", "layers.ZeroPadding2D(1)(images)")
@pytest.mark.parametrize(
    "lines",
    [
        ("layers.Flatten()(images)",),
        ("layers.ZeroPadding2D(1)(images)",),
        ("layers.AveragePooling2D(2)(images)",),
        ("layers.Concatenate()([images, images, images])",),
        ("layers.Concatenate()([images, images, images])", "x / 255.0"),
    ],
    ids="; ".join,
)
def test_a_file_that_scales_its_images_later_is_evaluated_and_trained_on(lines, report, succeeds, lightly):
    """The Rescaling layer follows layers without weights; evaluation gives the logits of Keras."""
    lines = [f"x = {line}" for line in (*lines, "layers.Rescaling(1 / 255)(x)")[:2]]
    name = write(network(*lines))
    model = find_function(name, "build")((8, 8, 1), 10)
    model.save("mine.keras")
    pixels = np.random.RandomState(2).randint(0, 256, (3, 8, 8)).astype(np.uint8)
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(f"{k}.png")
    logits = np.asarray(model(np.float32(pixels[..., None])), np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    words = ("mine.keras", "--model-name", "mine.keras", "--dataset", "digits")
    for row, probabilities in zip(
        report("infer", *words, "0.png", "1.png", "2.png", "--top", 10)["results"], expected
    ):
        for one in row["predictions"]:
            assert one["probability"] == pytest.approx(probabilities[one["class"]], abs=1e-5)
    for network_name in ("mine.keras", name):
        words = ("train", network_name, "--dataset", "digits", "--weights", "mine.keras", "--num-epochs", 1)
        succeeds(
            *words, "--limit-train", 64, "--micro-batch-size", 8, "--run-dir", Path(network_name).suffix[1:3]
        )


@needs_keras_3
@pytest.mark.parametrize(
    "first",
    ["layers.RandomFlip()(images)", "layers.Resizing(8, 8)(images)", "layers.GaussianNoise(0.1)(images)"],
)
def test_a_file_that_scales_its_images_behind_other_layers_is_not_taken_for_one_that_does_not(
    first, run, succeeds
):
    name = write(network(f"x = layers.Rescaling(1 / 255)({first})"))
    find_function(name, "build")((8, 8, 1), 10).save("mine.keras")
    words = ["evaluate", "mine.keras", "--model-name", "lenet", "--dataset", "digits"]
    check_refused(
        run, Refusal(words, "does not follow the images", "say the range of the pixels with --normalise", 3)
    )


@needs_keras_3
def test_a_file_whose_range_was_asked_for_is_evaluated_in_it(run, report):
    """Images get to layers scaled and unscaled; the hint that asks for the range works, and gives Keras's loss."""
    name = write(network("x = layers.Concatenate()([layers.Rescaling(1 / 255)(images), images])"))
    model = find_function(name, "build")((8, 8, 1), 10)
    model.save("mine.keras")
    held_out = open_digits().eval
    logits = np.asarray(model(np.float32(held_out.images)), np.float64)
    logits -= logits.max(-1, keepdims=True)
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -logarithms[np.arange(len(logits)), held_out.labels].mean()
    words = ["evaluate", "mine.keras", "--dataset", "digits", "--model-name"]
    check_refused(run, Refusal([*words, "mine.keras"], "may scale the images", "use --normalise raw"))
    for network_name in ("mine.keras", name):
        found = report(*words, network_name, "--normalise", "raw")
        assert found["measured"]["loss"] == pytest.approx(loss, rel=1e-5)


# --- weights that the function sets

KERNEL = "KERNEL = np.arange(36, dtype=np.float32).reshape(3, 3, 2, 2) / 36"
MINE = """
from tensorflow import keras
class Table(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(shape[-1],), initializer="glorot_uniform")
    def call(self, x):
        return x * self.table
"""
SET = {
    "frozen": ["c = layers.Conv2D(2, 3, use_bias=False, trainable=False, name='a')", "x = c(images)", KERNEL,
               "c.set_weights([KERNEL])"],
    "beside a zero bias": ["c = layers.Conv2D(2, 3, name='a')", "x = c(images)", KERNEL,
                           "c.set_weights([KERNEL, np.zeros(2)])"],
    "one filter of two": ["c = layers.Conv2D(2, 3, use_bias=False, name='a')", "x = c(images)", KERNEL,
                          "w = c.get_weights()[0]", "w[..., 0] = KERNEL[..., 0]", "c.set_weights([w])"],
    "from a generator of its own": ["c = layers.Conv2D(2, 3, name='a')", "x = c(images)",
                                    "c.set_weights([np.random.RandomState(0).normal(size=(3, 3, 2, 2)), np.zeros(2)])"],
    "from NumPy's generator": ["c = layers.Conv2D(2, 3, name='a')", "x = c(images)",
                               "c.set_weights([np.random.normal(size=(3, 3, 2, 2)), np.zeros(2)])"],
    "from a generator without a seed": ["c = layers.Conv2D(2, 3, name='a')", "x = c(images)",
                                        "c.kernel.assign(np.random.default_rng().normal(size=(3, 3, 2, 2)))"],
    "from TensorFlow's generator": ["c = layers.Conv2D(2, 3, name='a')", "x = c(images)",
                                    "c.kernel.assign(tf.random.normal((3, 3, 2, 2)))"],
    "depthwise": ["c = layers.DepthwiseConv2D(3, use_bias=False, name='a')", "x = c(images)",
                  "c.set_weights([np.full((3, 3, 2, 1), 1 / 9)])"],
    "norm": ["c = layers.BatchNormalization(name='a')", "x = c(images)",
             "c.set_weights([np.ones(2), np.zeros(2), np.full(2, 0.5), np.ones(2)])"],
    "slopes": ["c = layers.PReLU(name='a', shared_axes=[1, 2])", "x = c(images)",
               "c.set_weights([np.full((1, 1, 2), 0.25)])"],
    "a class of its own": ["c = Table(name='a')", "x = c(images)", "c.set_weights([np.ones(2)])"],
    "inner": ["c = layers.Conv2D(2, 3, use_bias=False, name='a')",
              "b = keras.Sequential([keras.Input((6, 6, 2)), c], name='base')", KERNEL, "c.set_weights([KERNEL])",
              "b.trainable = False", "x = b(images)"],
}  # fmt: skip


@pytest.mark.parametrize("case", SET)
def test_weights_that_the_function_sets_are_refused_by_name(case):
    text = network(*SET[case], imports=MINE)
    error = check_raises(ConfigurationError, "sets weights itself", "", built, text)
    assert f"'{'base_' if case == 'inner' else ''}a'" in error.message and error.hint


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_function_that_returns_a_trained_network_is_told_to_name_its_file(number):
    """With one layer of three set the hint is how to keep its values."""
    end = f"""
    model = keras.Model(images, layers.Dense(num_classes)(layers.Flatten()(x)))
    for layer in [layer for layer in model.layers if layer.weights][-{number}:]:
        layer.set_weights([0.5 + weight for weight in layer.get_weights()])
    return model
"""
    text = network("x = layers.Conv2D(2, 1)(layers.Conv2D(2, 1)(images))", end=end)
    error = check_raises(ConfigurationError, "sets weights itself", "return it untrained", built, text)
    assert ("--weights my_net.keras" in error.hint) == (number > 1)
    assert ("Constant(values)" in error.hint) == (number == 1)


def test_constants_and_drawn_weights_are_no_set_weights():
    constant = "kernel_initializer=keras.initializers.Constant(KERNEL), use_bias=False, trainable=False, name='edges'"
    _, model = built(
        network(
            KERNEL,
            f"x = layers.Conv2D(2, 3, {constant})(images)",
            "x = layers.Conv2D(2, 3, kernel_initializer=keras.initializers.HeNormal(seed=1), name='seeded')(x)",
            "x = layers.Conv2D(2, 1, trainable=False, name='frozen', bias_initializer='ones')(x)",
            "x = layers.BatchNormalization()(layers.PReLU(alpha_initializer='ones')(x))",
        )
    )
    kernel = np.arange(36, dtype=np.float32).reshape(3, 3, 2, 2) / 36
    np.testing.assert_array_equal(named_weights(model)["edges/kernel"].numpy(), kernel)


# --- formulas

NUMPY = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "exponential": np.exp,
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.2 * x),
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "selu": lambda x: (
        1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
    ),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "hard_sigmoid": (lambda x: np.clip(x + 3, 0, 6) / 6)
    if KERAS_3
    else (lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_one_formula_in_both_versions_or_two_names(name):
    x = np.linspace(-7, 7, 57)
    values = np.asarray(keras.activations.get(name)(tf.constant(x[np.newaxis], tf.float32)))[0]
    np.testing.assert_allclose(values, NUMPY[name](x), rtol=2e-6, atol=2e-6)


def dense(**settings):
    layers = (
        ["f", "Flatten", {}, ["input"]],
        ["d", "Dense", settings, ["f"]],
        ["h", "Dense", {"units": 3}, ["d"]],
    )
    return saved((6, 6, 2), *layers)


def test_a_checkpoint_s_activation_of_the_other_keras_is_refused():
    record, _ = built(network("x = layers.Dense(4, activation='hard_sigmoid', name='d')(images)"))
    data = json.loads(json.dumps(record.own.to_data()))
    mine = next(settings["activation"] for name, _, settings, _ in data["layers"] if name == "d")
    assert mine == (
        "hard_sigmoid(relu6(x + 3) / 6)" if KERAS_3 else "hard_sigmoid(min(max(0.2x + 0.5, 0), 1))"
    )
    other = "hard_sigmoid(min(max(0.2x + 0.5, 0), 1))" if KERAS_3 else "hard_sigmoid(relu6(x + 3) / 6)"
    build_model(saved_network("net.py:build", data, "x", ""), BuildOptions((6, 6, 2), 3))
    text = json.dumps(data).replace(mine, other)
    moved = saved_network("net.py:build", json.loads(text), "x", "")
    check_raises(
        ConfigurationError,
        "computes hard_sigmoid",
        "TensorFlow",
        build_model,
        moved,
        BuildOptions((6, 6, 2), 3),
    )
    # The same through the function's file, whose digest is that of the run.
    again = find_network("net.py:build")
    again.own.trained_as = moved.own.architecture
    check_raises(
        ConfigurationError, "was trained with", "TensorFlow", build_model, again, BuildOptions((6, 6, 2), 3)
    )
    check_raises(
        DataError, "", "", saved_network, "net.py:build", dense(units=4, activation="hard_sigmoid"), "x", ""
    )


@pytest.mark.parametrize("key", ["alpha", "negative_slope"])
def test_slopes_of_either_keras_are_built(key):
    data = dense(units=4)
    data["layers"].insert(2, ["s", "LeakyReLU", {key: 0.25}, ["d"]])
    data["layers"][3][3] = ["s"]
    model = build_model(saved_network("a.keras", data, "x", ""), BuildOptions((6, 6, 2), 3))
    assert model.get_layer("s")(np.float32([[-4]])).numpy().tolist() == [[-1]]


def test_settings_that_only_a_newer_keras_writes_are_read():
    data = dense(units=4)
    newer = {"renorm": False, "renorm_clipping": None, "renorm_momentum": 0.99, "synchronized": False}
    usual = {"epsilon": 0.1, "center": True, "scale": True}
    data["layers"].insert(2, ["s", "BatchNormalization", {**newer, **usual}, ["d"]])
    data["layers"][3][3] = ["s"]
    build_model(saved_network("a.keras", data, "x", ""), BuildOptions((6, 6, 2), 3))


def test_a_function_with_the_name_of_an_activation_is_refused():
    text = network("x = layers.Dense(4, activation=relu)(images)", imports="def relu(x):\n    return 2 * x\n")
    check_raises(ConfigurationError, "activation of your own", "", built, text)


# --- the same values as Keras

ZOO = {
    "rescaling": ["x = layers.Rescaling(1 / 255)(images)", "x = layers.Conv2D(4, 3, activation='gelu')(x)"],
    "per channel": ["x = layers.Rescaling([0.01, 0.02], offset=[1.0, -3.0])(images)", "x = layers.Conv2D(4, 3)(x)"],
    "both": ["x = layers.Rescaling(1 / 255)(images)",
             "x = layers.Normalization(mean=[0.4, 0.5], variance=[0.04, 0.09])(x)", "x = layers.Conv2D(4, 3)(x)"],
    "one number": ["x = layers.Normalization(axis=None, mean=20.0, variance=400.0)(images)",
                   "x = layers.Conv2D(4, 3)(x)"],
    "adapted": ["n = layers.Normalization()", "n.adapt(np.arange(144, dtype=np.float32).reshape(2, 6, 6, 2))",
                "x = layers.Conv2D(4, 3)(n(images))"],
    "after flatten": ["x = layers.Rescaling(1 / 255)(layers.Flatten()(images))"],
    "divided": ["x = layers.Conv2D(4, 3)(images / 255.0)"],
    "preprocess_input": ["x = layers.Conv2D(4, 3)(keras.applications.mobilenet_v2.preprocess_input(images))"],
    "a number first": ["x = layers.Conv2D(4, 3, use_bias=False)((1.0 - images) * 0.01)"],
    "a number per channel": ["x = layers.Conv2D(4, 3)((images - np.float32([3, 5])) * 0.01 + 2)"],
    "classes of Keras 2.6 and 3": ["x = layers.Conv2D(4, 3)((images / 127.5 - 1.0) * np.float32([2, 3]))"],
    "slopes": ["x = layers.LeakyReLU()(layers.Conv2D(4, 3)(images))", "x = layers.ELU(0.5)(x)",
               "x = layers.PReLU(alpha_initializer='ones')(x)", "x = layers.ReLU(6.0, 0.1, 0.2)(x)"],
    "norms": ["x = layers.LayerNormalization()(layers.Conv2D(4, 3)(images))", "x = layers.BatchNormalization()(x)",
              "x = layers.LayerNormalization(axis=[1, 2, 3], epsilon=1e-5)(x)"],
    "shapes": ["x = layers.ZeroPadding2D(((1, 2), (0, 3)))(images)",
               "x = layers.Conv2DTranspose(3, 4, strides=2, padding='same')(x)",
               "x = layers.UpSampling2D((2, 1), interpolation='bilinear')(x)",
               "x = layers.AveragePooling2D(3, 2, padding='same')(x)",
               "x = layers.SeparableConv2D(4, 3, dilation_rate=2, padding='same')(x)",
               "x = layers.DepthwiseConv2D(3, dilation_rate=2)(x)"],
    "activations": [f"x = layers.Dense(5, activation='{name}')({'x' if n else 'images'})" for n, name in
                    enumerate(ACTIVATIONS) if name not in ("exponential", "softmax")],
}  # fmt: skip


def pixels(shape=(5, 6, 6, 2)):
    return np.random.default_rng(3).integers(0, 256, shape).astype(np.float32)


@pytest.mark.slow_cases("activations", "norms", "shapes", "slopes")
@pytest.mark.parametrize("case", ZOO)
def test_own_networks_have_keras_values(case):
    """The function's own model in Keras against the network that is trained, evaluated and exported."""
    record, model = built(network(*ZOO[case]))
    theirs = record.own.make((6, 6, 2), 3)
    weights = [
        w for layer in theirs.layers if layer.name[:13] != "normalization" for w in layer.get_weights()
    ]
    rng = np.random.default_rng(5)
    weights = [np.float32(rng.uniform(0.1, 0.9, w.shape)) for w in weights]
    position = 0
    for layer in theirs.layers:
        if layer.name[:13] != "normalization" and layer.weights:
            layer.set_weights(weights[position : position + len(layer.weights)])
            position += len(layer.weights)
    model.set_weights(weights)
    expected = np.asarray(theirs(pixels()))
    np.testing.assert_allclose(
        np.asarray(model(pixels())), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )
    assert (record.own.first_rescaling is not None) == (list(ZOO).index(case) < list(ZOO).index("slopes"))


@pytest.mark.parametrize("line", ["255.0 / (images + 1.0)", "images ** 2.0"])
def test_other_operations_with_numbers_are_refused(line):
    text = network(f"x = layers.Conv2D(4, 3)({line})")
    check_raises(ConfigurationError, "which is no layer", "use a layer of Keras", built, text)


def test_numbers_for_other_channels_than_the_images_are_refused():
    """Keras makes three channels of the one of grey images."""
    text = network("x = layers.Conv2D(4, 3)(images - np.float32([1, 2, 3]))")
    hint = "use a layer in its place, such as keras.layers.Rescaling"
    check_raises(ConfigurationError, "reads 1 tensor and numbers besides", hint, built, text, (6, 6, 1))


def test_probabilities_times_a_number_are_no_logits():
    text = network(
        "x = layers.Flatten()(images)",
        end="    return keras.Model(images, layers.Dense(num_classes, activation='softmax')(x) * 1.0)\n",
    )
    check_raises(ConfigurationError, "gives probabilities", "", built, text)


def test_operations_have_the_same_names_in_both_kerases():
    record, _ = built(network("x = layers.Conv2D(4, 3)(images / 127.5 - 1.0)"))
    assert [node.name for node in record.own.architecture.nodes[1:4]] == ["true_divide", "subtract", "conv2d"]


@needs_keras_3
def test_numbers_in_the_middle_of_a_file_s_network_do_not_scale_its_images(run):
    """So is a part of MobileNetV3's activations computed."""
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(2, 3, name="first")(images / 255.0)
    x = layers.ReLU(6.0)(x + 3.0) * 0.5
    keras.Model(images, layers.Dense(10, name="head")(layers.Flatten()(x))).save("mid.keras")
    words = ["--dataset", "digits", "--dry-run", *TRAIN]
    code, _, err = run("train", "mid.keras", *words, "--weights", "mid.keras")
    assert code == 0 and "its layer true_divide scales" in err, err


# --- files of Keras

DATA = """
import numpy as np
from sklearn.datasets import load_digits


def load():
    found = load_digits()
    small = np.uint8(np.minimum(found.images * 16, 255))
    images = np.pad(np.kron(small, np.ones((1, 3, 3), np.uint8)), ((0, 0), (2, 2), (2, 2)))
    return (images[360:], found.target[360:]), (images[:360], found.target[:360])
"""
FIRST = {
    "rescaling": [lambda: layers.Rescaling(1 / 255)],
    "signed": [lambda: layers.Rescaling(1 / 127.5, offset=-1.0)],
    "normalization": [lambda: layers.Normalization(axis=None, mean=20.0, variance=400.0)],
    "both": [lambda: layers.Rescaling(1 / 255), lambda: layers.Normalization(axis=None, mean=0.2, variance=0.1)],
    "none": [],
}  # fmt: skip


def trained_lightly(succeeds, *words):
    """Runs a training that compiles nothing, and returns stderr; at a rate of 0, weights stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        return succeeds("train", *TRAIN, "--num-epochs", 1, *words, columns=400)[1]


def mnist_cnn(first, filters=(32, 64)):
    """Returns the layers of the registered mnist_cnn behind others, and Keras' loss and accuracy."""
    restart_names()
    tf.random.set_seed(0)
    _, (images, labels) = find_function(write(DATA, "data.py").replace("build", "load"), "load")()
    model = keras.Sequential([
        keras.Input((28, 28, 1)), *(make() for make in FIRST[first]),
        layers.Conv2D(filters[0], 3, activation="relu", name="conv2d"), layers.MaxPooling2D(2),
        layers.Conv2D(filters[1], 3, activation="relu", name="conv2d_1"), layers.MaxPooling2D(2),
        layers.Flatten(), layers.Dropout(0.5), layers.Dense(10, name="dense"),
    ])  # fmt: skip
    logits = np.float64(model(np.float32(images)[..., None]))
    logarithms = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return model, (-logarithms[range(len(labels)), labels].mean(), (logits.argmax(axis=1) == labels).mean())


@pytest.mark.slow_cases("normalization", "rescaling")
@pytest.mark.parametrize("first", ["rescaling", "signed", "normalization", "both"])
def test_a_registered_network_takes_over_the_scaling_of_a_file(first, run, succeeds):
    model, (loss, accuracy) = mnist_cnn(first)
    model.save("m.h5")
    words = ("evaluate", "m.h5", "--model-name", "mnist_cnn", "--dataset", "data.py:load")
    out, err = succeeds(*words, "--json", columns=400)
    measured, notes = json.loads(out)["measured"], json.loads(out)["notes"]
    assert measured["loss"] == pytest.approx(loss, abs=1e-5)
    assert measured["accuracy"] == pytest.approx(accuracy, abs=1e-5)
    assert len(notes) == (first != "rescaling")  # which is the network's own range
    assert all("as the model in m.h5 scales them: pixels x" in n and f"note: {n}" in err for n in notes)
    if first == "signed":
        training = "train mnist_cnn --weights m.h5 --dataset data.py:load --limit-train 32"
        check_refused(run, Refusal(training, "scales its images to", "--model-name m.h5"))


@pytest.mark.slow
@needs_keras_3
@pytest.mark.slow_cases("rescaling", "normalization")
@pytest.mark.parametrize("first", ["rescaling", "normalization", "both"])
def test_a_file_s_own_network_scales_its_pixels(first, run, succeeds, report):
    model, (loss, accuracy) = mnist_cnn(first, (4, 4))
    model.save("m.keras")
    own = ("--model-name", "m.keras", "--dataset", "data.py:load")
    measured = report("evaluate", "m.keras", *own)["measured"]
    assert measured["loss"] == pytest.approx(loss, abs=1e-5)
    assert measured["accuracy"] == pytest.approx(accuracy, abs=1e-5)
    training = ["train", "m.keras", *own[2:], "--normalise", "image"]
    check_refused(run, Refusal(training, "scales pixels of 0..255 itself", "use --normalise network"))
    words = ("m.keras", *own[2:], "--learning-rate", 1e-30)
    err = trained_lightly(succeeds, *words, "--run-dir", "drawn")
    assert "the weights in m.keras are not used" in err and "--weights m.keras begins with them" in err
    err = trained_lightly(succeeds, *words, "--weights", "m.keras", "--run-dir", "kept")
    assert "are not used" not in err and "takes pixels of 0..255" in err
    measured = report("evaluate", "kept", "--dataset", "data.py:load", "--limit-eval", "100%")["measured"]
    assert measured["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
def test_a_function_s_network_scales_its_pixels(run, succeeds, report):
    name = write(network("x = layers.Rescaling(1 / 255)(images)", "x = layers.Conv2D(2, 3, name='c')(x)"))
    model = find_function(name, "build")((8, 8, 1), 10)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save("net.h5")
    source = open_dataset(choose_dataset("digits", Path("."), home="none", task="classification"))
    loss = model.evaluate(np.float32(source.eval.images), source.eval.labels, verbose=0)
    measured = report("evaluate", "net.h5", "--model-name", name, "--dataset", "digits")["measured"]
    assert measured["loss"] == pytest.approx(loss, abs=1e-5)
    words = (name, "--dataset", "digits")
    refused = ["train", *words, "--normalise", "image"]
    check_refused(run, Refusal(refused, "scales pixels of 0..255 itself", "use --normalise network"))
    err = trained_lightly(succeeds, *words, "--weights", "net.h5", "--learning-rate", 1e-30, "--run-dir", "a")
    assert "takes pixels of 0..255, which its layer rescaling scales" in err
    for more in ((), ("--model-name", name)):
        measured = report("evaluate", "a", *more, "--limit-eval", "100%")["measured"]
        assert measured["loss"] == pytest.approx(loss, abs=1e-5)
    # A network without the layer gets other images.
    plain = write(network("x = layers.Conv2D(2, 3, name='c')(images)"), "plain.py")
    words = ["evaluate", "net.h5", "--model-name", plain, "--dataset", "digits"]
    check_refused(
        run,
        Refusal(words, "scales its images to pixels x 0.00392157", "begin the network with the same layer"),
    )


@pytest.mark.slow
def test_an_exported_network_with_gelu_gets_pixels(succeeds, report, in_this_process):
    pytest.importorskip("tf2onnx")
    pytest.importorskip("onnxruntime")
    name = write(
        network("x = layers.Rescaling(1 / 255)(images)", "x = layers.Conv2D(2, 3, activation='gelu')(x)")
    )
    trained_lightly(succeeds, name, "--dataset", "digits", "--run-dir", "a")
    losses = {report("evaluate", "a", "--limit-eval", "100%")["measured"]["loss"]}
    for opset, more in ((13, ()), (15, ("--raw-uint8",))):
        folder = f"e{opset}"
        succeeds("export", "a", "--format", "onnx", "--opset", opset, *more, "--output", folder)
        # The file is kept only if it computes what the run computes.
        assert json.loads(Path(folder, "export.json").read_text())["verification"]
        losses.add(report("evaluate", f"{folder}/model.onnx", "--limit-eval", "100%")["measured"]["loss"])
    assert max(losses) - min(losses) < 1e-4


def test_statistics_without_a_model_are_refused(run):
    model = keras.Sequential([keras.Input((28, 28, 1)), layers.Normalization(), *mnist_cnn("none")[0].layers])
    model.layers[0].adapt(np.float32([[[[3.0]]], [[[5.0]]]]))
    model.save_weights("w.weights.h5")
    words = ["evaluate", "w.weights.h5", "--model-name", "mnist_cnn", "--dataset", "data.py:load"]
    check_refused(run, Refusal(words, "weights of a Normalization layer", "save the whole model", 3))


@pytest.mark.slow
@needs_keras_3
def test_a_function_and_its_file_have_the_same_weights_and_checkpoints(succeeds, lightly):
    name = write(RESIDUAL)
    function = find_function(name, "build")
    function((8, 8, 1), 10), function((8, 8, 1), 10).save("net.keras")  # Keras counts on from the first one
    of_file, of_function = (
        weights_of(build_model(find_network(n), BuildOptions((8, 8, 1), 10))) for n in ("net.keras", name)
    )
    assert list(of_file) == list(of_function)
    assert all(np.array_equal(of_file[key], of_function[key]) for key in of_file)
    train = ("--dataset", "digits", *TRAIN, "--num-epochs", 1)
    for one, other in ((name, "net.keras"), ("net.keras", name)):
        folder = f"of-{one[-5:]}"
        succeeds("train", one, *train, "--run-dir", folder)
        rate = ("--weights", folder, "--learning-rate", 1e-30)
        succeeds("train", other, *train, *rate, "--run-dir", f"then-{folder}")
        first, second = last(folder), last(f"then-{folder}")
        for key in first.weights:
            if "moving" not in key:
                np.testing.assert_array_equal(first.weights[key], second.weights[key])


@pytest.mark.slow
@needs_keras_3
def test_frozen_layers_of_a_file_need_its_weights(run, succeeds):
    text = network("x = layers.Conv2D(2, 3, name='edges', trainable=False)(images)")
    find_function(write(text), "build")((8, 8, 1), 10).save("my net.keras")
    train = ("train", "my net.keras", "--dataset", "digits", *TRAIN, "--num-epochs", 1)
    check_refused(run, Refusal(train, "'edges' is frozen", "--weights 'my net.keras'"))
    succeeds(*train, "--weights", "my net.keras", "--run-dir", "a")
    kernel = keras.models.load_model("my net.keras").get_layer("edges").get_weights()[0]
    np.testing.assert_array_equal(last("a").weights["edges/kernel"], kernel)
    text = network("x = layers.BatchNormalization(name='norm')(images, training=False)")
    model = find_function(write(text), "build")((8, 8, 1), 10)
    gamma, beta, mean, variance = (np.float32([value]) for value in (0.5, 0.25, 0.1, 2.0))
    model.get_layer("norm").set_weights([gamma, beta, mean, variance])
    model.save("kept.keras")
    train = ("train", "kept.keras", *train[2:])
    check_refused(run, Refusal(train, "'norm' keeps its statistics", "--weights kept.keras"))
    succeeds(*train, "--weights", "kept.keras", "--run-dir", "b")
    assert (
        last("b").weights["norm/moving_mean"] == mean
        and last("b").weights["norm/moving_variance"] == variance
    )
    assert last("b").weights["norm/gamma"] != gamma


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("is_named", [True, False])
def test_h5_files_of_models_in_a_model_are_read(is_named, succeeds, report):
    """Keras 3 writes the name of the outer model before that of an inner one without an input of its own."""
    inner = "keras.Sequential([layers.Conv2D(3, 3, padding='same'), layers.BatchNormalization()]"
    two = [f"{inner}{f', name={name!r}' if is_named else ''})" for name in ("s1", "s2")]
    text = f"""
from tensorflow import keras
layers = keras.layers
def build(shape, classes):
    head = [layers.GlobalAveragePooling2D(), layers.Dense(classes)]
    return keras.Sequential([keras.Input(shape), layers.Rescaling(1 / 255), {two[0]}, {two[1]}, *head])
"""
    name = write(text)
    model = find_function(name, "build")((8, 8, 1), 10)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save("net.h5")
    source = open_dataset(choose_dataset("digits", Path("."), home="none", task="classification"))
    loss = model.evaluate(np.float32(source.eval.images), source.eval.labels, verbose=0)
    for words in (["--model-name", name], ["--model-name", "net.h5"]):
        measured = report("evaluate", "net.h5", *words, "--dataset", "digits")["measured"]
        assert measured["loss"] == pytest.approx(loss, abs=1e-5)


def test_an_h5_file_of_models_in_models_in_a_model_is_read(report):
    """As Teachable Machine saves them.  Keras 2 writes the names c and bn_c without those of the models between."""
    images = keras.Input((8, 8, 1))
    x = layers.BatchNormalization(name="bn_c")(layers.Conv2D(4, 3, use_bias=False, name="c")(images))
    shared = layers.ReLU(name="twice")
    x = shared(layers.Conv2D(4, 3, use_bias=False, name="bn_c_c")(shared(x)))
    base = keras.Model(images, x, name="base")
    features = keras.Sequential([base, layers.GlobalAveragePooling2D()], name="features")
    head = keras.Sequential([keras.Input((4,)), layers.Dense(5, "relu"), layers.Dense(10, "softmax")])
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Rescaling(1 / 255), features, head])
    rng = np.random.default_rng(0)
    model.set_weights([rng.uniform(0.1, 0.4, np.shape(weight)) for weight in model.get_weights()])
    model.save("net.h5")
    data = open_digits().eval
    expected = np.asarray(model(np.float32(data.images)), np.float64)[np.arange(len(data)), data.labels]
    measured = report("evaluate", "net.h5", "--model-name", "net.h5", "--dataset", "digits")["measured"]
    assert measured["loss"] == pytest.approx(-np.log(expected).mean(), rel=1e-5)


@pytest.mark.slow
@needs_keras_3
def test_a_file_is_fine_tuned_to_other_classes(run, succeeds, report):
    text = network("x = layers.Conv2D(3, 3, name='edges', kernel_regularizer='l2')(images)")
    model = find_function(write(text), "build")((8, 8, 1), 10)
    model.save("net.keras")
    notes = report("evaluate", "net.keras", "--model-name", "net.keras", "--dataset", "digits")["notes"]
    (added,) = [float(note.split()[-1]) for note in notes if "of the data alone" in note]
    assert added == pytest.approx(float(sum(model.losses)), rel=1e-4)
    rows = "np.uint8(np.random.default_rng(0).integers(0, 256, (40, 8, 8))), np.arange(40) % 3"
    Path("three.py").write_text(
        f"import numpy as np\ndef load():\n    return ({rows}), ({rows}), ['a', 'b', 'c']\n"
    )
    words = ("net.keras", "--dataset", "three.py:load", *TRAIN, "--num-epochs", 1)
    frozen = ("--weights", "net.keras", "--freeze", "backbone")
    _, err = succeeds("train", *words, *frozen, "--run-dir", "fine", columns=400)
    assert "starting from net.keras, with a new head for 3 classes" in err
    notes = json.loads(Path("fine/report.json").read_text())["notes"]
    assert "starting from net.keras, with a new head for 3 classes" in notes
    assert "is new: it gives 3 logits, one for each class of the data, in place of 10" in err
    np.testing.assert_array_equal(
        last("fine").weights["edges/kernel"], model.get_layer("edges").get_weights()[0]
    )
    assert {
        row["name"] for row in report("evaluate", "fine", "--dataset", "three.py:load")["classes"]
    } == set("abc")
    evaluation = ("evaluate", "net.keras", "--model-name", "net.keras", "--dataset", "three.py:load")
    check_refused(run, Refusal(evaluation, "net.keras does not fit", "as many classes", 3))


def test_only_the_classes_of_a_head_may_differ(run):
    def head(size, num_classes):
        model = keras.Sequential([keras.Input((size, size, 1)), layers.Flatten(), layers.Dense(num_classes)])
        model.save_weights("head.weights.h5")

    name = write(network("x = layers.Flatten()(images)"), "own.py")
    model = build_model(find_network(name), BuildOptions((24, 24, 1), 3))
    read = read_keras_weights, model, Path("head.weights.h5"), True
    head(24, 5)
    assert read[0](*read[1:])[0] == {}
    for num_classes in (3, 5):
        head(32, num_classes)
        check_raises(DataError, f"has weights of 1024x{num_classes}", "--image-size", *read)


# --- which weights are whose

BRANCHES = ("{0} = layers.Conv2D(2, 3{2})", "{1} = layers.Conv2D(2, 3{3})", "y = p(images)",
            "x = layers.Concatenate()([y, layers.ReLU()(q(images))])")  # fmt: skip


def branches(first, second, names=("", "")):
    return network(*(line.format(first, second, *names) for line in BRANCHES))


def test_branches_are_matched_by_name_or_refused(run):
    """Two layers of equal shapes, of which either may come first in a file."""

    def saved(text, file):
        model = find_function(write(text, f"{file[0]}.py"), "build")((6, 6, 2), 3)
        (model.save if "weights" not in file else model.save_weights)(file)
        return model

    mine = branches("p", "q", (", name='p'", ", name='q'"))
    _, model = built(mine)
    # By name, in either order of creation.
    theirs = saved(branches("q", "p", (", name='q'", ", name='p'")), "a.weights.h5")
    found, notes = read_keras_weights(model, Path("a.weights.h5"))
    np.testing.assert_array_equal(found["p/kernel"], theirs.get_layer("p").get_weights()[0])
    assert not notes
    # By the names that Keras would count from zero.
    _, counted = built(branches("p", "q"), name="c.py")
    for file in ("b.weights.h5", "b.h5"):
        saved(branches("p", "q"), file)
        theirs = saved(branches("p", "q"), file)
        found, notes = read_keras_weights(counted, Path(file))
        convolutions = [layer for layer in theirs.layers if "conv" in layer.name]
        for layer in convolutions:
            number = sorted(convolutions, key=lambda one: int(one.name.rpartition("_")[2])).index(layer)
            np.testing.assert_array_equal(found[f"conv2d{'_1' * number}/kernel"], layer.get_weights()[0])
        assert not notes
    # Other names tell nothing.
    saved(branches("p", "q", (", name='one'", ", name='two'")), "d.weights.h5")
    error = check_raises(DataError, "no order", "", read_keras_weights, model, Path("d.weights.h5"))
    assert "q and p" in error.message or "p and q" in error.message


@pytest.mark.slow
def test_a_chain_is_matched_by_position_and_says_so(succeeds, lightly):
    def chain(*names):
        lines = [
            f"x = layers.Dense(4, name='{name}')({'x' if n else 'layers.Flatten()(images)'})"
            for n, name in enumerate(names)
        ]
        return network(*lines).replace("'head'", f"'{names[0]}_head'")

    theirs = find_function(write(chain("p", "q", "r"), "theirs.py"), "build")((8, 8, 1), 10)
    theirs.save_weights("w.weights.h5")
    name = write(chain("a", "b", "c"))
    model = build_model(find_network(name), BuildOptions((8, 8, 1), 10))
    found, (note,) = read_keras_weights(model, Path("w.weights.h5"))
    np.testing.assert_array_equal(found["b/kernel"], theirs.get_layer("q").get_weights()[0])
    assert "4 layers in w.weights.h5 are matched by position" in note
    words = ("evaluate", "w.weights.h5", "--model-name", name, "--dataset", "digits")
    out, err = succeeds(*words, "--json", columns=400)
    assert "note: " + note in err
    notes = [line for line in json.loads(out)["notes"] if "are held out in training" not in line]
    assert note in notes and any("does not say how its images were scaled" in line for line in notes)
    # Training that begins with the weights, and validation of all files of a folder, say and store the same.
    words = ("train", name, "--dataset", "digits", "--run-dir")
    _, err = succeeds(*words, "a", *TRAIN, "--num-epochs", 1, "--weights", "w.weights.h5", columns=400)
    assert all(f"note: {line}" in err for line in notes)
    of_run = ["starting from w.weights.h5, with all of its layers", *notes]
    assert json.loads(Path("a/report.json").read_text())["notes"] == of_run
    _, err = succeeds(*words, "a", "--resume", "--num-epochs", 2, columns=400)
    assert "continuing" in err and json.loads(Path("a/report.json").read_text())["notes"] == of_run
    Path("files").mkdir()
    Path("w.weights.h5").rename("files/w-1.weights.h5")
    _, err = succeeds(*words, "b", "--no-training", "--checkpoint-input-dir", "files", columns=400)
    stored = json.loads(Path("b/report.json").read_text())["notes"]
    assert {line.replace("w.weights.h5", "files/w-1.weights.h5") for line in notes} <= {*stored}
    assert all(f"note: {line}" in err for line in stored)


@pytest.mark.slow
def test_the_notes_of_a_segmentation_network_are_said_and_stored(succeeds, membranes_once):
    model = build_model(find_network("unet"), BuildOptions((204, 204, 1), 2, base_filters=1))
    model.save_weights("w.weights.h5")
    data = ("--model-name", "unet", "--base-filters", 1, "--dataset", "membranes", "--limit-eval", 1)
    words = ("evaluate", "w.weights.h5", *data, "--patch-size", 204, "--json")
    out, err = succeeds(*words, columns=400)
    stored = json.loads(out)["notes"]
    (note,) = [line for line in stored if "does not say how its images were scaled" in line]
    assert err.count(f"note: {note}") == 1


@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 records no shapes, and other names of layers")
@pytest.mark.parametrize(
    ("lines", "words", "hint"),
    [
        (
            [
                "x = layers.Conv2D(4, 1)(images)",
                "x = x * layers.Dense(4)(layers.GlobalAveragePooling2D()(x))",
            ],
            "operation 'multiply' combines tensors of 2 and 4 dimensions",
            "keras.layers.Reshape((1, 1, channels))",
        ),
        (
            ["x = layers.Conv2D(4, 1, activation=layers.LeakyReLU())(images)"],
            "which training does not know",
            "leave it out, and call LeakyReLU as a layer after this one",
        ),
    ],
)
def test_what_the_layers_of_training_would_compute_otherwise_is_refused(lines, words, hint):
    check_raises(ConfigurationError, words, hint, built, network(*lines))
    if "multiply" in words:
        built(network(lines[0], lines[1].replace("D()(x)", "D(keepdims=True)(x)")))


@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 lists the layers of such a class")
def test_a_class_that_extends_a_functional_model_gets_a_hint():
    mine = "class Mine(keras.Model):\n    def __init__(self, first, last):\n        super().__init__(first, last)\n"
    text = network("x = layers.Flatten()(images)").replace("keras.Model(", "Mine(")
    text = text.replace("\n\ndef build", f"\n\n{mine}\n\ndef build")
    check_raises(
        ConfigurationError, "does not list its layers", "return keras.Model(images, outputs)", built, text
    )


def test_the_preprocessing_of_resnet_is_an_option():
    text = network("x = keras.applications.resnet50.preprocess_input(images)")
    check_raises(ConfigurationError, "which is no layer", "--normalise caffe", built, text, (6, 6, 3))


ONE_IN_ANOTHER = (
    "kept = layers.Conv2D(3, 3, name='kept')",
    "kept.trainable = False",
    "inner = [keras.Input(input_shape), kept, layers.BatchNormalization(), layers.Conv2D(3, 3, name='trained')]",
    "x = keras.Sequential(inner, name='base')(images)",
)
ONE_IN_TWO_OTHERS = (
    "def block(name, x):",
    "    i = keras.Input(x.shape[1:])",
    "    y = layers.BatchNormalization(name=name + '_norm')(layers.Conv2D(2, 3, name=name + '_conv')(i))",
    "    return keras.Model(i, y, name=name)(x)",
    "i = keras.Input(input_shape)",
    "x = keras.Model(i, block('second', block('first', i)), name='middle')(images)",
)


@pytest.mark.parametrize("lines", [ONE_IN_ANOTHER, ONE_IN_TWO_OTHERS], ids=["one", "two"])
def test_the_weights_of_a_model_in_a_model_are_read_from_hdf5(lines):
    """Keras 2 lists it as one layer, whose frozen weights come after the others."""
    text = network(*lines)
    _, model = built(text)
    scope = {}
    exec(text, scope)
    theirs = scope["build"]((6, 6, 2), 3)
    random = np.random.RandomState(3)
    theirs.set_weights([random.uniform(size=w.shape).astype(np.float32) for w in theirs.get_weights()])
    theirs.save("nested.h5")
    found, notes = read_keras_weights(model, Path("nested.h5"))
    load_keras_weights(model, Path("nested.h5"))
    assert not notes and len(found) == len(theirs.weights)
    images = random.uniform(size=(2, 6, 6, 2)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(model(images)), np.asarray(theirs(images)), rtol=1e-5)


def save_frozen(name, num_classes, freezes):
    """Saves a network of digits whose layers are frozen, those of the slice ``freezes``."""
    model = keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(2, 3, name="conv"),
        layers.Flatten(), layers.Dense(num_classes, name="head"),
    ])  # fmt: skip
    for layer in model.layers[freezes]:
        layer.trainable = False
    model.save(name)


def test_a_network_whose_layers_are_all_frozen_is_not_trained(run):
    save_frozen("frozen.h5", 10, slice(None))
    Path("net.py").write_text(
        "from tensorflow import keras\ndef build(shape, classes):\n    model = keras.Sequential([keras.Input(shape), "
        "keras.layers.Flatten(), keras.layers.Dense(classes)])\n    model.trainable = False\n    return model\n"
    )
    reason = "with weights are frozen: nothing is left to train"
    file = "frozen.h5 --weights frozen.h5"
    check_refused(
        run,
        Refusal("net.py:build", f"all 1 layer {reason}", "in the function"),
        Refusal(file, f"all 2 layers {reason}", 'm.trainable = True; m.save("frozen-2.h5")'),
        command=("train", "--dataset", "digits", "--run-dir", "run"),
    )


def test_what_a_file_freezes_is_said_beside_its_weights(succeeds):
    save_frozen("ten.h5", 10, slice(1)), save_frozen("five.h5", 5, slice(None))
    words = ("--dataset", "digits", "--run-dir")
    err = trained_lightly(succeeds, "ten.h5", "--weights", "ten.h5", *words, "ten")
    assert (
        "note: ten.h5: 1 of 2 layers with weights is frozen (trainable=False), and not trained (conv)" in err
    )
    err = trained_lightly(succeeds, "five.h5", "--weights", "five.h5", *words, "five")
    assert (
        "gives 10 logits, one for each class of the data, in place of 5; it is trained, and was frozen" in err
    )
    assert "five.h5: 1 of 2 layers with weights is frozen" in err


def test_a_network_of_images_without_channels_computes_what_keras_does(report):
    """As in TensorFlow's tutorial for beginners."""
    restart_names()
    keras.Sequential(
        [keras.Input((8, 8)), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(10, name="head")]
    ).save("flat.h5")
    images = open_digits().eval.images[:5]
    expected = keras.models.load_model("flat.h5")(np.float32(images)[..., 0]).numpy()
    record = find_network("flat.h5")
    assert record.input_shape == (8, 8, 1)
    assert any("images of one channel are given to it without theirs" in note for note in record.own.notes)
    model = build_model(record, BuildOptions((8, 8, 1), 10))
    load_keras_weights(model, Path("flat.h5"))
    np.testing.assert_allclose(model(np.float32(images)).numpy(), expected, rtol=1e-5, atol=1e-6)
    logits = keras.models.load_model("flat.h5").predict(
        np.float32(open_digits().eval.images)[..., 0], verbose=0
    )
    accuracy = (logits.argmax(axis=1) == open_digits().eval.labels).mean()
    measured = report("evaluate", "flat.h5", "--model-name", "flat.h5", "--dataset", "digits")["measured"]
    assert measured["accuracy"] == pytest.approx(accuracy)
