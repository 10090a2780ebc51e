"""Regularizers, shared layers and models within models train as Keras trains them, on the host and on IPUs."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from poplar_double import installed
from support.own_networks import OWN, TRAIN, last, network, write
from support.refusals import Refusal, check_refused
from support.sessions import CPU, PLAIN, SGD, constant, make_program, run, with_fused
from tensorflow import keras

from ipucnn.compat import KERAS_3
from ipucnn.config.options import RunConfig
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.names import named_weights
from ipucnn.models.registry import find_network, saved_network
from ipucnn.planning.graphs.keras_graph import graph_of
from ipucnn.python_files import find_function
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession

pytestmark = pytest.mark.usefixtures("here")
NETWORKS = {
    "regularizers": [
        "x = layers.Conv2D(4, 3, kernel_regularizer=r.l2(0.02), bias_regularizer='l1')(images)",
        "x = layers.DepthwiseConv2D(3, padding='same', depthwise_regularizer=r.l1_l2(0.01, 0.02))(x)",
        "x = layers.Conv2D(4, 1, kernel_regularizer=r.l1(0.003), activation='relu')(x)",
        "x = layers.BatchNormalization(gamma_regularizer=r.l2(0.03), beta_regularizer=r.l1(0.01))(x)",
        "x = layers.LayerNormalization(gamma_regularizer=r.l1(0.02))(layers.ReLU()(x))",
        "x = layers.SeparableConv2D(5, 3, depthwise_regularizer='l2', pointwise_regularizer='l1')(x)",
        "x = layers.Dense(4, kernel_regularizer=r.l1_l2(0.004, 0.01), activation='tanh')(layers.ELU()(x))",
        # Keras 2.6 has no group norm.
        "x = layers.GroupNormalization(2, gamma_regularizer='l2')(x)" if KERAS_3 else "",
        "x = layers.Conv2D(4, 1, activation='gelu', kernel_regularizer='l2')(x)",
    ],
    "shared layers and models": [
        "c = layers.Conv2D(2, 3, padding='same', kernel_regularizer=r.l2(0.02))",
        "x = layers.Add()([c(c(images)), images])", "x = c(layers.ReLU()(x))",
        "b = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(2, 5, padding='same', use_bias=False),",
        "    layers.LayerNormalization(), layers.Activation('gelu')], name='block')",
        "x = b(b(x))",
        "i = keras.Input((6, 6, 2))",
        "inner = keras.Model(i, layers.Dense(3, kernel_regularizer='l2')(i), name='inner')",
        "o = layers.Conv2D(2, 1, use_bias=False)(inner(i))", "outer = keras.Model(i, o, name='outer')",
        "x = layers.Concatenate()([outer(images), outer(layers.ReLU()(x))])",
        "a, d = layers.ReLU(), layers.Flatten()",  # shared layers without weights
        "y = a(layers.Conv2D(3, 3)(a(layers.Conv2D(4, 3)(images))))",
        "x = layers.Concatenate()([d(x), d(y)])",
    ],
    "batch norms called with training=False": [
        "i = keras.Input((6, 6, 2))",
        "h = layers.Conv2D(3, 3, use_bias=False)(layers.BatchNormalization(scale=False, name='first')(i))",
        "h = layers.BatchNormalization(gamma_regularizer='l2', name='second')(h)",
        "still = layers.BatchNormalization(name='still')",
        "still.trainable = False",
        "base = keras.Model(i, layers.ReLU()(still(h)), name='base')",
        "x = layers.BatchNormalization(name='direct')(base(images, training=False), training=False)",
        "x = layers.BatchNormalization(name='usual')(layers.Conv2D(2, 1)(x))",
    ],
}  # fmt: skip
# Its batch norms whose statistics stay, by their names in the network that is trained.
KEPT = ("base_first", "base_second", "base_still", "direct")
SHARED_LAYER = ["c = layers.Conv2D(2, 3, padding='same')", "x = c(layers.ReLU()(c(images)))"]
SHARED_BLOCK = ["b = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(2, 3, padding='same'),",
                "    layers.LayerNormalization(), layers.Activation('gelu')], name='block')",
                "x = b(b(images))"]  # fmt: skip
UPDATES, SIZE, STEPS, RATE = 10, 3, 4, 0.02
FUSED = {
    "residual": 4,
    "nested": 2,
    "mixing": 0,
    "classes": 0,
}  # 0: the session's choice, which is one after the other


def file_of(lines):
    return write(network("r = keras.regularizers", *lines))


def examples():
    rng = np.random.default_rng(11)
    count = UPDATES * SIZE * STEPS
    return rng.normal(0.2, 1, (count, 6, 6, 2)).astype(np.float32), rng.integers(0, 3, count).astype(np.int32)


def trained_by_keras(model, momentum, from_logits):
    """Trains a Keras model with its own losses and optimizer; returns the loss of each weight update."""
    images, labels = examples()
    optimizer = keras.optimizers.SGD(RATE, momentum=momentum)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits)
    weights, losses = model.trainable_weights, []
    variables = [w if isinstance(w, tf.Variable) else w.value for w in weights]

    @tf.function(autograph=False)
    def micro_batch(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) + tf.add_n([0.0, *model.losses])
        return value, tape.gradient(value, variables)

    for update in range(UPDATES):
        parts = [slice((update * STEPS + k) * SIZE, (update * STEPS + k + 1) * SIZE) for k in range(STEPS)]
        results = [micro_batch(images[part], labels[part]) for part in parts]
        gradients = [sum(g) / STEPS for g in zip(*(g for _, g in results))]
        optimizer.apply_gradients(zip(gradients, weights))
        losses.append(float(sum(value for value, _ in results)) / STEPS)
    return losses


def by_layer(model):
    """Returns the weights of all layers without the moving statistics, sorted by shape and sum."""
    values = [w.numpy() for w in model.weights if "moving" not in w.name]
    return sorted(values, key=lambda v: (v.shape, float(np.sum(v))))


def start(record):
    """Returns the network and the user's own model with the same weights, none of which is 0, where L1 has a kink."""
    model, theirs = build_model(record, BuildOptions((6, 6, 2), 3)), record.own.make((6, 6, 2), 3)
    shapes = [[tuple(w.shape) for w in one.weights] for one in (model, theirs)]
    assert sorted(shapes[0]) == sorted(shapes[1])
    rng, used = np.random.default_rng(3), set()
    for name, weight in named_weights(model).items():
        sign = 1 if "variance" in name else rng.choice([-1, 1], weight.shape)
        weight.assign(sign * rng.uniform(0.1, 0.5, weight.shape))
    if shapes[0] == shapes[1]:
        theirs.set_weights(model.get_weights())
        return model, theirs
    for weight in theirs.weights:  # nested models list their weights in another order
        name = next(
            n for n, v in named_weights(model).items()
            if n not in used and v.shape == weight.shape and base(n) == base(weight.name)
        )  # fmt: skip
        used.add(name)
        weight.assign(named_weights(model)[name].numpy())
    return model, theirs


def base(name):
    return name.split("/")[-1].split(":")[0].replace("depthwise_kernel", "kernel")


def check_equal(trained, theirs, losses, expected, tolerance):
    np.testing.assert_allclose(losses, expected, rtol=tolerance, atol=1e-5)
    mine = sorted(
        (v for n, v in trained.items() if "moving" not in n), key=lambda v: (v.shape, float(np.sum(v)))
    )
    for one, other in zip(mine, by_layer(theirs)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=2e-5)


@pytest.mark.slow_cases(
    "batch norms called with training=False",
    "classes",
    "mixing",
    "nested",
    "residual",
    "shared layers and models",
)
@pytest.mark.parametrize("case", [*NETWORKS, *OWN])
def test_loss_and_weights_are_those_of_keras_after_10_weight_updates(case):
    """With any number of fused micro-batches; Keras computes them one after the other."""
    check_trained_as_by_keras(case, HostSession(CPU), SGD)


def test_classes_that_are_called_as_those_of_keras_are_evaluated_as_by_keras():
    model, theirs = start(find_network(write(OWN["classes"])))
    images, _ = examples()
    (logits,) = HostSession(CPU).predictor(model).predict([images[:12]])
    np.testing.assert_allclose(logits, np.asarray(theirs(images[:12], training=False)), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", NETWORKS)
def test_ipus_train_as_keras(case):
    with installed():
        session = create_session("auto", config=RunConfig(dropout_layer="stateless"))
        check_trained_as_by_keras(case, session, PLAIN)


def check_trained_as_by_keras(case, session, optimizer):
    record = find_network(write(OWN[case]) if case in OWN else file_of(NETWORKS[case]))
    images, labels = examples()
    program = make_program(SIZE, STEPS, updates_per_epoch=UPDATES, weight_updates_per_execution=1)
    program = with_fused(program, FUSED.get(case, 1))
    model, theirs = start(record)
    for layer in theirs._flatten_layers():
        if any(name.endswith(layer.name) for name in KEPT):
            # In training, models of Keras 3 override the ``training=False`` of the call (keras-team/keras #20285).
            layer.call = lambda x, layer=layer, **_: type(layer).call(layer, x, training=False)
    before = {name: weight.numpy() for name, weight in named_weights(model).items()}
    expected = trained_by_keras(theirs, optimizer[1]["momentum"], from_logits=case != "residual")
    result = run(session, model, program, optimizer, images, labels, schedule=constant(RATE))
    losses = [event.metrics["loss"] for event in result.events if hasattr(event, "metrics")]
    check_equal(result.weights, theirs, losses, expected, 2e-4 if case in OWN else 1e-5)
    for name, value in before.items():
        if "moving" in name:
            assert np.array_equal(result.weights[name], value) == name.startswith(KEPT), name


@pytest.mark.slow_cases("block", "regularizers")
@pytest.mark.parametrize(
    ("lines", "shared"),
    [(SHARED_LAYER, "conv2d"), (SHARED_BLOCK, "block_conv2d"), (NETWORKS["regularizers"], None)],
    ids=["layer", "block", "regularizers"],
)
def test_checkpoints_and_plans_know_shared_layers_and_regularizers(lines, shared):
    record = find_network(file_of(lines))
    model = build_model(record, BuildOptions((6, 6, 2), 3))
    saved = saved_network("net.py:build", json.loads(json.dumps(record.own.to_data())), "x", "y")
    rebuilt = build_model(saved, BuildOptions((6, 6, 2), 3))
    assert saved.own.to_data()["layers"] == record.own.to_data()["layers"]
    for (name, one), other in zip(named_weights(model).items(), named_weights(rebuilt).values()):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=name)
    if shared is None:
        assert f"regularizers of {9 if KERAS_3 else 8} layers are added to the loss" in record.own.notes[0]
        return
    graph = graph_of(model, "mine")
    position = {layer.name: n for n, layer in enumerate(graph.layers)}
    first, second = position[shared], position[f"{shared}/call1"]
    assert (
        graph.layers[second].num_parameters == 0 and graph.layers[second].macs == graph.layers[first].macs > 0
    )
    # No stage opens between the two calls.
    assert not set(range(first + 1, second + 1)) & set(graph.cuts)


def test_a_checkpoint_says_which_batch_norms_keep_their_statistics():
    record = find_network(file_of(NETWORKS["batch norms called with training=False"]))
    build_model(record, BuildOptions((6, 6, 2), 3))
    assert "3 batch norms called with training=False" in record.own.notes[0]
    saved = saved_network("net.py:build", json.loads(json.dumps(record.own.to_data())), "x", "y")
    layers = build_model(saved, BuildOptions((6, 6, 2), 3)).layers
    norms = {layer.name: layer.moves for layer in layers if hasattr(layer, "keeps_statistics")}
    assert norms == {**dict.fromkeys(KEPT, False), "usual": True}


@pytest.mark.slow
def test_a_network_with_shared_layers_is_trained_and_exported(lightly, succeeds, in_this_process):
    pytest.importorskip("onnxruntime")
    name = file_of(SHARED_BLOCK)
    Path("net.py").write_text(
        Path("net.py").read_text().replace("(6, 6, 2)", "input_shape").replace("2D(2,", "2D(1,")
    )
    train = ("train", name, "--dataset", "digits", *TRAIN, "--run-dir", "a")
    succeeds(*train)
    assert "block_conv2d/kernel" in last("a").weights
    Path("net.py").unlink()
    succeeds("evaluate", "a")
    for format_ in ("onnx", "keras") if KERAS_3 else ("saved-model",):
        succeeds("export", "a", "--format", format_, "--output", f"e-{format_}")
        assert json.loads(Path(f"e-{format_}/export.json").read_text())["verification"]


@pytest.mark.slow
@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 writes no .keras files")
def test_a_file_and_a_function_are_trained_and_refused_alike(run):
    for line, error in (
        ("c = layers.Conv2D(2, 3, kernel_constraint='max_norm'); x = c(images)", "has kernel_constraint"),
        ("c = layers.BatchNormalization(); x = c(c(images))", "is called 2 times"),
        (
            "x = layers.Conv2D(2, 3, kernel_regularizer=keras.regularizers.OrthogonalRegularizer())(images)",
            "training knows L1 and L2",
        ),
    ):
        name = write(network(line))
        find_function(name, "build")((8, 8, 1), 10).save("net.keras")
        check_refused(
            run,
            Refusal(["train", name, "--dataset", "digits"], error, code=2),
            Refusal("train net.keras --dataset digits", error, code=2),
        )
    find_function(file_of(SHARED_BLOCK), "build")((6, 6, 2), 3).save("net.keras")
    function, file = (
        build_model(find_network(one), BuildOptions((6, 6, 2), 3)) for one in ("net.py:build", "net.keras")
    )
    for (name, one), other in zip(named_weights(function).items(), named_weights(file).values()):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=name)
