"""Networks and weights that would compute something else here than where they come from are refused, or said."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from light_training import train_lightly
from support.data_sets import write_class_folders
from support.own_networks import TRAIN, built, network, weights_of, write
from support.refusals import Refusal, check_raises, check_refused
from tensorflow import keras

from ipucnn.compat import KERAS_3
from ipucnn.config.options import BY_NAME
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.models.names import penalties
from ipucnn.models.own import model_in_file
from ipucnn.python_files import find_function

layers = keras.layers
pytestmark = pytest.mark.usefixtures("here")

# --- what a function returns

BASE = [
    "i = keras.Input((6, 6, 2))",
    "h = layers.Dropout(0.5)(layers.BatchNormalization(name='norm')(layers.Conv2D(2, 3, name='c')(i)))",
    "base = keras.Model(i, h, name='base')",
]


def test_a_frozen_model_called_without_training_has_no_dropout():
    """As in Keras' guide to transfer learning."""
    text = network(*BASE, "base.trainable = False", "x = base(images, training=False)")
    record, model = built(text)
    values = np.float32(np.random.default_rng(0).normal(size=(4, 6, 6, 2)))
    np.testing.assert_array_equal(np.asarray(model(values, training=True)), np.asarray(model(values)))
    assert "dropout called with training=False is off" in record.own.notes[0]
    _, model = built(network(*BASE, "base.trainable = False", "x = base(images)"))
    assert not np.array_equal(np.asarray(model(values, training=True)), np.asarray(model(values)))
    record, model = built(network("x = layers.Dropout(0.5)(images, training=False)"))
    is_off = np.array_equal(np.asarray(model(values, training=True)), np.asarray(model(values)))
    # Keras 3 records it for each dropout layer, and its models override it.
    assert (
        is_off == ("dropout called with training=False is off" in " ".join(record.own.notes)) == (not KERAS_3)
    )


PENALISED = """
from tensorflow import keras
class Mine(keras.layers.Layer):
    def __init__(self, units, w_regularizer=None, name_of_weight="w", **options):
        super().__init__(**options)
        self.units, self.name_of_weight = units, name_of_weight
        self.w_regularizer = keras.regularizers.get(w_regularizer)
    def build(self, shape):
        self.w = self.add_weight(
            name=self.name_of_weight, shape=(shape[-1], self.units), regularizer=self.w_regularizer
        )
        super().build(shape)
    def call(self, x): return x @ self.w
    def get_config(self):
        return {**super().get_config(), "units": self.units, "name_of_weight": self.name_of_weight,
                "w_regularizer": keras.regularizers.serialize(self.w_regularizer)}
"""


def test_regularizers_of_own_layers_are_those_of_the_weights_that_they_name():
    line = "x = Mine(3, keras.regularizers.L2(0.5){})(images)"
    _, model = built(network(line.format(""), imports=PENALISED))
    assert list(penalties(model)) == ["mine/w"]
    with pytest.raises(ConfigurationError, match=r"adds to the loss something else"):
        built(network(line.format(", 'other'"), imports=PENALISED))


def test_regularizers_of_frozen_own_layers_add_nothing():
    mine = "class Mine(layers.Dense):\n    pass\n\n\ndef build(input_shape"
    text = network("x = Mine(4, kernel_regularizer='l2', trainable=False)(layers.Dense(3)(images))")
    built(text.replace("def build(input_shape", mine, 1))


DRAWN_TWICE = """
from tensorflow import keras
class Two(keras.layers.Layer):
    def __init__(self, kernel_initializer="he_normal", w_initializer="large", **options):
        super().__init__(**options)
        self.kernel_initializer, self.w_initializer = kernel_initializer, w_initializer
        self.one, self.other = (keras.layers.Dense(4, kernel_initializer=kernel_initializer) for _ in range(2))
    def build(self, shape):
        self.one.build(shape), self.other.build(shape)
        super().build(shape)
    def call(self, x): return self.one(x) * self.other(x)
    def get_config(self):
        return {**super().get_config(), "kernel_initializer": self.kernel_initializer,
                "w_initializer": self.w_initializer}
"""


def test_weights_of_an_own_layer_are_drawn_apart_and_its_settings_are_its_own():
    _, model = built(network("x = Two()(images)", imports=DRAWN_TWICE))
    weights = weights_of(model)
    assert not np.allclose(weights["two/kernel"], weights["two/kernel_1"])
    _, again = built(network("x = Two()(images)", imports=DRAWN_TWICE))
    for name, value in weights_of(again).items():
        np.testing.assert_array_equal(value, weights[name])


@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize("options", ["trainable=False", "scale=False", "gamma_regularizer='l2'", ""])
def test_batch_norms_that_another_norm_would_not_keep_are_refused(norm, options):
    text = network(f"x = layers.BatchNormalization({options})(layers.Conv2D(4, 3)(images))")
    if (norm, options) in (("group", "gamma_regularizer='l2'"), ("none", "scale=False")) or not options:
        built(text, norm=norm)
        return
    with pytest.raises(ConfigurationError, match=r"which --norm-layer \w+ would not keep"):
        built(text, norm=norm)


def test_a_dense_layer_gets_the_bias_of_the_norm_that_is_removed():
    text = network("x = layers.BatchNormalization()(layers.Dense(4, use_bias=False, name='d')(images))")
    assert "d/bias" in weights_of(built(text, norm="none")[1])


@pytest.mark.parametrize(
    "layer", ["UpSampling2D(2, interpolation='area')", "Conv2DTranspose(3, 3, dilation_rate=2)"]
)
def test_layers_that_tensorflow_cannot_train_are_refused(layer):
    if "area" in layer and not KERAS_3:
        return  # Keras 2.6 refuses it itself
    with pytest.raises(ConfigurationError, match=r"TensorFlow (lacks|computes on no CPU)|whose gradient"):
        built(network(f"x = layers.{layer}(images)"))


@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 records a layer")
def test_relu_as_a_function_is_a_layer():
    lines = ["x = keras.activations.relu(layers.Conv2D(3, 3)(images)){}"]
    record, model = built(network(lines[0].format("")))
    theirs = record.own.make((6, 6, 2), 3)
    theirs.set_weights(model.get_weights())
    values = np.float32(np.random.default_rng(0).normal(size=(4, 6, 6, 2)))
    np.testing.assert_allclose(np.asarray(model(values)), np.asarray(theirs(values)), atol=1e-6)
    assert [layer.__class__.__name__ for layer in model.layers][2] == "ReLU"


def test_a_dropout_of_everything_gives_zeros_in_training():
    _, model = built(network("x = layers.Dropout(1.0)(images)"))
    values = np.ones((2, 6, 6, 2), np.float32)
    head = model.get_layer("head")
    np.testing.assert_allclose(np.asarray(model(values, training=True)), np.tile(head.bias.numpy(), (2, 1)))


OWN = """
import tensorflow as tf
from tensorflow import keras
class Scale(keras.layers.Layer):
    def __init__(self, factor=2.0, **options):
        super().__init__(**options)
        self.factor = factor
    def call(self, x): return x * self.factor
    def get_config(self): return {**super().get_config(), **self.more()}
    def more(self): return {}
class Described(Scale):
    def more(self): return {"factor": self.factor}
class Convolution(keras.layers.Conv2D): pass
class Probabilities(keras.layers.Layer):
    def call(self, x): return tf.nn.softmax(x)
class Gates(keras.layers.Layer):
    def call(self, x): return tf.sigmoid(x)
class Merge(keras.layers.Layer):
    def call(self, x, skip=None):
        values = [*x.values()] if isinstance(x, dict) else [x, skip]
        return tf.concat([value for value in values if value is not None], -1)
class L2(keras.regularizers.Regularizer):
    def __call__(self, x): return tf.reduce_sum(x ** 2) / 2
    def get_config(self): return {"l2": 1.0}
class HeNormal(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None, **options): return tf.ones(shape, dtype or "float32")
    def get_config(self): return {}
def changed(layer, x, key, value):
    y = layer(x)
    setattr(layer.kernel if key == "trainable" else layer, key, value)
    return y
class Unit(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1],), initializer="ones",
                                 constraint=keras.constraints.UnitNorm(axis=0))
    def call(self, x): return x * self.w
class Doubled(keras.Model):
    def call(self, x, training=None, mask=None): return 2 * super().call(x, training=training)
class Stepping(keras.Model):
    def train_step(self, data): return {}
"""
# Registered once in a process.
THIRD = """
@keras.utils.register_keras_serializable("mine")
class Third(keras.regularizers.Regularizer):
    def __call__(self, x): return tf.reduce_sum(abs(x) ** 3)
    def get_config(self): return {}
"""
TWO = "    a, b = (layers.Dense(num_classes, activation='{}')(layers.Flatten()(images)) for _ in range(2))\n"


def ended(line, activation="softmax"):
    return network(end=f"{TWO.format(activation)}    return keras.Model(images, {line})\n", imports=OWN)


MEANT_OTHERWISE = {
    "a model in training for ever": (network(*BASE, "x = base(images, training=True)"),
                                     "'base' is called with training=True"),
    "an incomplete configuration": (network("x = Scale(3.0)(images)", imports=OWN), "another layer when it is made"),
    "a constraint": (network("x = Unit()(images)", imports=OWN), "has a constraint"),
    "an inherited constraint": (network("x = Convolution(2, 3, kernel_constraint='max_norm')(images)", imports=OWN),
                                "has kernel_constraint"),
    "an inherited regularizer of outputs": (
        network("x = Convolution(2, 3, activity_regularizer='l2')(images)", imports=OWN),
        "has activity_regularizer, which training does not know"),
    "an inherited regularizer of another kind": (
        network("x = Convolution(2, 1, kernel_regularizer=Third())(images)", imports=OWN + THIRD),
        "training knows L1 and L2"),
    "the mean of probabilities": (ended("layers.Average()([a, b])"), "'average' .* gives probabilities"),
    "a sum of sigmoids": (ended("a + b", "sigmoid"), "'add' .* gives probabilities"),
    "probabilities in another shape": (ended("layers.Reshape((num_classes,))(a)"), "gives probabilities"),
    "probabilities of a class of its own": (ended("Probabilities()(a)", "linear"), "gives probabilities"),
    "probabilities before a layer that keeps them": (
        ended("layers.Activation('linear')(Probabilities()(a))", "linear"), "gives probabilities"),
    "gates of a class of its own": (ended("Gates()(a)", "linear"), "gives probabilities"),
    "probabilities over the batch": (ended("layers.Softmax(axis=0)(a)", "linear"), "ends in Softmax"),
    "two tensors": (network("x = Merge()(images, layers.Conv2D(3, 1)(images))", imports=OWN),
                    "'merge' .* is called with (a second tensor|skip=a tensor)"),
    "a tensor by its name": (network("x = Merge()(images, skip=layers.Conv2D(3, 1)(images))", imports=OWN),
                             "'merge' .* is called with skip=a tensor"),
    "a regularizer called like one of Keras": (
        network("x = layers.Conv2D(2, 3, kernel_regularizer=L2())(images)", imports=OWN),
        "has kernel_regularizer L2, a class that is not Keras' own"),
    "initial values called like some of Keras": (
        network("x = layers.Conv2D(2, 3, kernel_initializer=HeNormal())(images)", imports=OWN),
        "has kernel_initializer HeNormal, a class that is not Keras' own"),
    "a regularizer that comes too late": (
        network("x = changed(layers.Conv2D(2, 3), images, 'kernel_regularizer', keras.regularizers.L2(0.5))",
                imports=OWN), "adds to the loss something else"),
    "types of all layers": (network("keras.backend.set_floatx('float16')\n    x = images", imports=OWN),
                            "sets the type of all"),
    "a softmax at the end and before": (
        network(end="    d = layers.Dense(num_classes, activation='softmax')\n"
                "    return keras.Model(images, d(d(layers.Dense(num_classes)(layers.Flatten()(images)))))\n"),
        "with softmax, is called 2 times"),
    "a call of its own": (ended("a", "linear").replace("keras.Model(", "Doubled("), "whose call is its own"),
    "a training of its own": (ended("a", "linear").replace("keras.Model(", "Stepping("), "whose train_step is its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT_OTHERWISE)
def test_what_would_become_another_network_is_refused(case):
    text, message = MEANT_OTHERWISE[case]
    with pytest.raises(ConfigurationError, match=message) as caught:
        built(text)
    assert caught.value.hint and "\n" not in caught.value.message + caught.value.hint


IN_DICT = network("x = Merge()({'a': images, 'b': layers.Conv2D(3, 1)(images)})", imports=OWN)
FROZEN = network("x = changed(layers.Conv2D(2, 3), images, 'trainable', False)", imports=OWN)
LOSSES = ("c = layers.Conv2D(2, 3); x = c(images)", "c.add_loss(lambda: tf.reduce_sum(c.kernel))")


@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 freezes no single weight, and refuses dictionaries itself")
@pytest.mark.parametrize(
    "text, message", [(IN_DICT, "with tensors in a dict"), (FROZEN, "is trained, and its kernel is not")]
)
def test_what_keras_3_alone_can_express_is_refused(text, message):
    with pytest.raises(ConfigurationError, match=message):
        built(text)


@pytest.mark.skipif(KERAS_3, reason="Keras 3 takes losses in calls of layers alone")
def test_losses_that_are_added_to_a_layer_or_a_model_of_keras_2_are_refused():
    with pytest.raises(ConfigurationError, match=r"'conv2d' .* adds to the loss something else"):
        built(network(*LOSSES, imports=OWN))
    of_model = ended("a", "linear").replace("return keras.Model(images, a)", "m = keras.Model(images, a)")
    with pytest.raises(ConfigurationError, match="add_loss of a model"):
        built(f"{of_model}    m.add_loss(lambda: tf.reduce_sum(m.weights[0]))\n    return m\n")


def test_regularizers_of_frozen_layers_add_nothing():
    line = "x = layers.Conv2D(2, 3, kernel_regularizer='l2', trainable=False)(layers.Conv2D(3, 1)(images))"
    _, model = built(network(line))
    assert penalties(model) == {}


def test_complete_layers_and_gates_of_sigmoid_are_accepted():
    built(network("x = Described(3.0)(Convolution(2, 3, kernel_regularizer='l2')(images))", imports=OWN))
    built(ended("layers.Multiply()([a, layers.Dense(num_classes)(b)])", "sigmoid"))


MADE_AGAIN = """
class Mine(layers.Layer):
    def __init__(self, units{parameter}):
        super().__init__({argument})
        self.units, self.inside = units, layers.Dense(units)
    def call(self, x): return self.inside(x)
{method}

def build"""
CONFIG = "    def get_config(self): return {{**super().get_config(), {}}}"


@pytest.mark.parametrize("parameter", ["", ", **kwargs"])
@pytest.mark.parametrize(
    "method", ["", CONFIG.format(""), CONFIG.format("'units': self.units")], ids=["none", "part", "all"]
)
def test_layers_that_cannot_be_made_again_get_the_hint_to_describe_them(parameter, method):
    text = network("x = Mine(4)(images)").replace(
        "\n\ndef build",
        MADE_AGAIN.format(parameter=parameter, argument=parameter[2:], method=method),
    )
    if parameter and (method.count("units") or (KERAS_3 and not method)):  # Keras 3 writes its own then
        built(text)
        return
    error = check_raises(ConfigurationError, "Mine", "__init__", built, text)
    assert "**kwargs" in error.hint and "get_config" in error.hint and "size" not in str(error)


def test_layers_are_frozen_as_keras_freezes_them():
    _, model = built(
        network(
            "i = keras.Input((6, 6, 2))",
            "base = keras.Model(i, layers.Conv2D(2, 1, name='b')(layers.Conv2D(2, 3, name='a')(i)), name='base')",
            "base.trainable = False",
            "base.layers[-1].trainable = True",
            "x = base(images)",
        )
    )
    theirs = find_function("net.py:build", "build")((6, 6, 2), 3)
    assert sum(len(layer.trainable_weights) for layer in model.layers) == len(theirs.trainable_weights)


def test_settings_of_compile_and_of_batch_norm_are_said(succeeds, lightly):
    text = network("x = layers.BatchNormalization(momentum=0.6)(images)", end="""    model = keras.Model(
        images, layers.Dense(num_classes)(layers.Flatten()(x)))
    model.compile('adam', keras.losses.CategoricalCrossentropy(label_smoothing=0.2))
    return model
""")  # fmt: skip
    words = ("train", write(text), "--dataset", "digits", *TRAIN)
    _, err = succeeds(*words, "--run-dir", "a", columns=400)
    said = [line for line in json.loads(Path("a/report.json").read_text())["notes"] if f"note: {line}" in err]
    assert any("its compile() sets is not used" in line for line in said)
    assert any(
        "momentum 0.97, not the network's own 0.6, which --bn-momentum 0.6 keeps" in line for line in said
    )
    _, err = succeeds(*words, "--bn-momentum", 0.6, "--run-dir", "b", columns=400)
    assert "the network's own" not in err


@pytest.mark.slow
def test_a_function_that_makes_another_network_than_it_did_is_refused(run, succeeds, lightly, monkeypatch):
    line = "import os; x = layers.Conv2D(2, 3, activation=os.environ.get('MINE', 'relu'), name='c')(images)"
    name = write(network(line))
    words = ("evaluate", "a", "--model-name", name)
    succeeds("train", name, "--dataset", "digits", *TRAIN, "--run-dir", "a")
    succeeds(*words)
    monkeypatch.setenv("MINE", "tanh")
    change = "layer 'c' activation = tanh, and was trained with relu"
    check_refused(run, Refusal(words, change, "bring back"))
    _, err = succeeds(
        "train", name, "--dataset", "digits", *TRAIN, "--weights", "a", "--run-dir", "b", columns=400
    )
    assert f"note: {name} has {change}\n" in err


# --- weights of runs

FEW = ("--dataset", "digits", *TRAIN, "--num-epochs", 1, "--learning-rate", 1e-30)


@pytest.mark.parametrize(
    "option, value, other",
    [
        ("normalise", "image", "standard"),
        pytest.param(
            "norm-layer",
            '{"name": "group_norm", "num_groups": 4}',
            '{"name": "group_norm", "num_groups": 2}',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "norm-layer",
            '{"name": "batch_norm", "epsilon": 0.5}',
            '{"name": "batch_norm", "epsilon": 0.1}',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_keeps_what_the_network_of_its_first_weights_computes(
    run, report, succeeds, option, value, other
):
    train = ("train", "toy_model_bn", *FEW)
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        succeeds(*train, f"--{option}", value, "--run-dir", "a")
        _, err = succeeds(*train, "--weights", "a", "--run-dir", "b", columns=400)
        assert f"the weights of a were trained with --{option} " in err and "which this run keeps" in err
        assert any(
            "which this run keeps" in note for note in json.loads(Path("b/report.json").read_text())["notes"]
        )
        _, err = succeeds(*train, "--weights", "a", f"--{option}", other, "--run-dir", "c", columns=400)
        assert "which this run keeps" not in err and "and this run has" in err
        words = (
            "train",
            "toy_model_bn",
            "--dataset",
            "digits",
            "--no-training",
            "--checkpoint-input-dir",
            "a/checkpoints",
        )
        check_refused(run, Refusal(words, f"was trained with --{option} ", f"add --{option} "))
        succeeds(*words, f"--{option}", value, "--run-dir", "d")
    first, kept = (report("evaluate", name, "--limit-eval", 40)["measured"]["loss"] for name in ("a", "b"))
    assert kept == pytest.approx(first, rel=1e-5)


# --- weights of Keras' files


def mnist_cnn(file, activation="relu", pool=layers.MaxPooling2D, end=None, shape=(28, 28, 1)):
    """Writes the layers of the registered mnist_cnn, or others with weights of the same shapes and names."""
    model = keras.Sequential([
        keras.Input(shape), layers.Conv2D(32, 3, activation=activation, name="conv2d"), pool(2),
        layers.Conv2D(64, 3, activation=activation, name="conv2d_1"), pool(2), layers.Flatten(), layers.Dropout(0.5),
        layers.Dense(10, name="dense", activation=end),
    ])  # fmt: skip
    model.save(file)
    return model


OTHER = {
    "activation": {"activation": "tanh"},
    "pooling": {"pool": layers.AveragePooling2D},
    "end": {"end": "sigmoid"},
}


ENDS = {
    "another pooling": "layers.GlobalMaxPooling2D()(layers.Conv2D({n}, 3, name='b')(z))",
    "another padding": "layers.GlobalAveragePooling2D()(layers.Conv2D({n}, 3, padding='same', name='b')(z))",
    "scaled logits": "layers.Softmax()(layers.Rescaling(0.1)(layers.GlobalAveragePooling2D()("
    "layers.Conv2D({n}, 3, name='b')(z))))",
}


@pytest.mark.parametrize("num_classes", [10, 4])
@pytest.mark.parametrize("case", ["the same", *ENDS])
def test_what_follows_the_last_weights_is_compared(case, num_classes, run, lightly):
    """If the classes are others, the last layer is new, and so is what follows it."""
    mine = "layers.GlobalAveragePooling2D()(layers.Conv2D({n}, 3, name='b')(z))"

    def lines(end, count):
        return f"z = layers.Conv2D(4, 3, name='a')(images)\n    return keras.Model(images, {end.format(n=count)})"

    images = keras.Input((28, 28, 1))
    z = layers.Conv2D(4, 3, name="a")(images)
    end = mine if case == "the same" else ENDS[case]
    outputs = eval(end.format(n=num_classes), {"layers": layers, "z": z})
    keras.Model(images, outputs).save("other.h5")
    name = write(network(end=f"    {lines(mine, 'num_classes')}\n"))
    data = ("--dataset", "digits", "--image-size", 28)
    code, _, err = run("train", name, "--weights", "other.h5", *data, *TRAIN, columns=400)
    is_refused = case != "the same" and num_classes == 10
    assert ("computes something else" in err) == is_refused, err
    assert code == (3 if is_refused else 0)


@pytest.mark.slow_cases("activation")
@pytest.mark.slow_cases("pooling")
@pytest.mark.parametrize("case", OTHER)
def test_weights_of_a_model_that_computes_something_else_are_refused(case, run, succeeds):
    words = ("--dataset", "digits", "--image-size", 28)
    mnist_cnn("same.h5", end="softmax")
    succeeds("evaluate", "same.h5", "--model-name", "mnist_cnn", *words, "--limit-eval", 8)
    mnist_cnn("other.h5", **OTHER[case])
    error = "ends in sigmoid" if case == "end" else "computes something else"
    check_refused(
        run,
        Refusal(("evaluate", "other.h5", "--model-name", "mnist_cnn", *words), error, "", 3),
        Refusal(("train", "mnist_cnn", "--weights", "other.h5", *words, *TRAIN), error, "", 3),
    )


def test_a_model_that_training_does_not_support_is_not_compared_and_that_is_said(report):
    # What follows the images is of no effect in evaluation.
    flipped = keras.Sequential([keras.Input((28, 28, 1)), layers.RandomFlip(), *mnist_cnn("same.h5").layers])
    flipped.save("flipped.h5")
    words = ("--model-name", "mnist_cnn", "--dataset", "digits", "--image-size", 28, "--limit-eval", 8)
    notes, same = (report("evaluate", name, *words)["notes"] for name in ("flipped.h5", "same.h5"))
    said = "only the shapes of weights say that the model in flipped.h5 is mnist_cnn: "
    assert any(note.startswith(said) and "RandomFlip" in note for note in notes), notes
    assert not any("only the shapes" in note for note in same)


def keras_2(file, settings):
    """Rewrites a ``.keras`` file as Keras 2.15 writes it, which spells these settings of layers otherwise."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    config = members["config.json"].decode()
    for now, then in settings.items():
        assert now in config
        config = config.replace(now, then)
    members.update({"config.json": config.encode(), "metadata.json": b'{"keras_version": "2.15.0"}'})
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 writes no .keras files")
def test_files_that_keras_2_saved_are_read_as_it_meant_them(run):
    def make(activation):
        return keras.Sequential([
            keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation=activation), layers.LeakyReLU(0.25),
            layers.BatchNormalization(), layers.GlobalAveragePooling2D(), layers.Dense(10),
        ])  # fmt: skip

    model = make("tanh")
    model.save("two.keras")
    keras_2("two.keras", {'"negative_slope": 0.25': '"alpha": 0.25', '"axis": -1': '"axis": [3]'})
    images = np.float32(np.random.default_rng(0).normal(size=(4, 8, 8, 1)))
    read = model_in_file(Path("two.keras"), (8, 8, 1), False)
    np.testing.assert_allclose(read.predict(images, verbose=0), model.predict(images, verbose=0), atol=1e-6)
    make("hard_sigmoid").save("hard.keras")
    keras_2("hard.keras", {})
    check_refused(run, Refusal("train hard.keras --dataset digits --dry-run", "with Keras 2, and", "Keras 2"))


def test_images_get_the_size_of_the_model_in_a_file(report, succeeds):
    model = mnist_cnn("m.h5", shape=(40, 40, 1))
    rows = "np.uint8(np.random.default_rng(0).integers(0, 256, (20, 40, 40))), np.arange(20) % 10"
    names = "['k' + str(n) for n in range(10)]"
    Path("data.py").write_text(
        f"import numpy as np\ndef load():\n    return ({rows}), ({rows}), {names}\n"
        f"def small():\n    (a, b), c, d = load()\n    return (a[:, :20, :20], b), (c[0][:, :20, :20], c[1]), d\n"
    )
    words = ("evaluate", "m.h5", "--model-name", "mnist_cnn", "--dataset", "data.py:load")
    out, err = succeeds(*words, "--json", columns=400)
    images = np.random.default_rng(0).integers(0, 256, (20, 40, 40, 1)) / np.float32(255)
    logits = np.float64(model(np.float32(images)))
    logarithms = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -logarithms[range(20), np.arange(20) % 10].mean()
    assert json.loads(out)["measured"]["loss"] == pytest.approx(loss, abs=1e-5)
    notes = json.loads(out)["notes"]
    order = "m.h5 does not name its classes: its outputs are those of data-load, in the order k0, k1, k2"
    assert any(order in note for note in notes), notes
    assert not any("40x40" in note for note in notes), notes
    assert f"note: {order}" in err
    notes = report(*words[:-1], "data.py:small")["notes"]
    assert "images are brought to 40x40, the input of the model in m.h5" in notes


def test_recipes_of_training_do_not_change_how_weights_of_keras_are_evaluated():
    """The preset lenet@digits smooths labels, and those of class folders have smaller images."""
    write_class_folders(Path("photos"), {("", name): 5 for name in "ab"}, lambda k: (12, 12))
    for model, dataset, option, of_training in (
        ("lenet", "digits", "label_smoothing", 0.05),
        ("mobilenet", "photos", "image_size", (96, 96)),
    ):
        for command, value in (("train", of_training), ("evaluate", BY_NAME[option].default)):
            resolved = resolve(command, {"dataset": dataset}, model=model)
            assert getattr(resolved.config, option) == value, (model, command)
