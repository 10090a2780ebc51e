"""Building models: substitutions, seeds, equality with Keras Applications."""

import copy
import functools

import numpy as np
import pytest
import tensorflow as tf
from support.refusals import check_raises
from tensorflow import keras

from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.events import View, during, show
from ipucnn.models import build as build_module
from ipucnn.models import editing, imagenet
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.editing import SeededInitializer, generator, seeded
from ipucnn.models.imagenet import copy_weights, load_imagenet_weights
from ipucnn.models.layers.micro_batches import BatchNormalization, Dropout, GroupNormalization
from ipucnn.models.names import named_weights
from ipucnn.models.registry import get_model


def build(name, size=32, channels=3, classes=10, **options):
    shape = size if isinstance(size, tuple) else (size, size)
    return build_model(get_model(name), BuildOptions((*shape, channels), classes, **options))


@functools.lru_cache(maxsize=None)
def unedited(name):
    """Returns a network's blueprint, cached for tests that only read its layers: building a large one takes seconds."""
    return get_model(name).builder(keras.Input((32, 32, 3)), 10, **get_model(name).builder_args)


def edited(name, edit, *arguments, **options):
    """Returns the steps of a network after one edit, by kind."""
    blueprint = copy.deepcopy(unedited(name))
    edit(blueprint, *arguments, **options)
    by_kind = {}
    for step in blueprint.nodes:
        by_kind.setdefault(step.kind, {})[step.name] = step.config
    return by_kind


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def images(model, batch=2, seed=0):
    return np.random.RandomState(seed).uniform(-1, 1, (batch, *model.input_shape[1:])).astype("float32")


@pytest.mark.slow_cases("3-toy_model", "1-mnist_cnn", "3-lenet", "1-cifar_resnet8", "1-mobilenet")
@pytest.mark.parametrize("name", ["toy_model", "mnist_cnn", "lenet", "cifar_resnet8", "mobilenet"])
@pytest.mark.parametrize("channels", [1, 3])
def test_logits_of_small_inputs(name, channels):
    model = build(name, size=(32, 48), channels=channels, classes=7)
    logits = model(images(model), training=False).numpy()
    assert logits.shape == (2, 7)
    assert np.isfinite(logits).all()
    # Logits, not probabilities.
    assert not np.allclose(logits.sum(axis=1), 1)


def test_the_public_toy_model_with_batch_norm_equals_numpy():
    """4 filters of 3x3, pooling by 5, norm; 8 filters of 1x1, pooling by 5, norm; dense, without the softmax."""
    model = build("toy_model_bn", size=(57, 32), classes=3)
    weights = {name: variable.numpy() for name, variable in named_weights(model).items()}
    assert (
        sum(v.size for name, v in weights.items() if "moving" not in name)
        == 3 * 3 * 3 * 4 + 4 + 8 + 40 + 16 + 51
    )

    def conv(x, name, size):
        kernel = weights[f"{name}/kernel"].reshape(-1, weights[f"{name}/kernel"].shape[-1])
        height, width = x.shape[1] - size + 1, x.shape[2] - size + 1
        patches = [x[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
        return np.maximum(np.concatenate(patches, axis=-1) @ kernel + weights[f"{name}/bias"], 0)

    def pool_and_norm(x):
        height, width = x.shape[1] // 5, x.shape[2] // 5
        cut = x[:, : 5 * height, : 5 * width].reshape(len(x), height, 5, width, 5, -1)
        return cut.max(axis=(2, 4)) / np.sqrt(1 + 1.001e-5)

    batch = images(model)
    x = pool_and_norm(conv(batch, "conv2d_0", 3))
    x = pool_and_norm(conv(x, "conv2d_1", 1)).reshape(2, -1)
    expected = x @ weights["dense/kernel"] + weights["dense/bias"]
    np.testing.assert_allclose(model(batch, training=False).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_static_batch_and_shapes():
    model = build("cifar_resnet8", batch_size=4)
    assert model.input_shape == (4, 32, 32, 3)
    assert all(None not in tuple(layer.output.shape) for layer in model.layers[1:])


@pytest.mark.slow
def test_unet_shapes_filters_and_norms():
    model = build("unet", size=(188, 204), channels=1, classes=2, base_filters=2)
    assert model.output_shape == (None, 4, 20, 2)
    assert model.get_layer("encoder_block_0_conv1").filters == 2
    assert not layers_of(model, BatchNormalization)
    normed = build("unet", size=188, channels=1, classes=2, base_filters=2, norm="batch")
    assert [n.name for n in normed.layers if "_bn" not in n.name] == [layer.name for layer in model.layers]
    assert len(layers_of(normed, BatchNormalization)) == 18


@pytest.mark.slow
@pytest.mark.slow_cases("mobilenet-28")
@pytest.mark.parametrize(("name", "num_drawn"), [("cifar_resnet8", 8), ("mobilenet", 28)])
def test_the_same_seed_gives_the_same_bytes(name, num_drawn):
    first = build(name, seed=3)
    tf.random.set_seed(5)
    build("lenet", seed=3, channels=1)
    second, other = named_weights(build(name, seed=3)), named_weights(build(name, seed=4))
    changed = 0
    for key, weight in named_weights(first).items():
        assert weight.numpy().tobytes() == second[key].numpy().tobytes(), key
        changed += weight.numpy().tobytes() != other[key].numpy().tobytes()
    assert changed == num_drawn


@pytest.mark.slow
def test_weights_do_not_depend_on_the_norm_or_the_classes_of_the_head():
    batch = named_weights(build("cifar_resnet8", seed=1))
    group = named_weights(build("cifar_resnet8", seed=1, norm="group", classes=3))
    for name in ("conv1_conv/kernel", "conv4_block1_layer2_conv/kernel"):
        assert batch[name].numpy().tobytes() == group[name].numpy().tobytes()


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.RandomNormal(1.0, 2.0, seed=1),
        keras.initializers.TruncatedNormal(0.0, 0.5, seed=1),
        keras.initializers.RandomUniform(-1.0, 3.0, seed=1),
        keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=1),
        keras.initializers.HeUniform(seed=1),
        keras.initializers.LecunNormal(seed=1),
    ],
    ids=lambda initializer: type(initializer).__name__,
)
def test_seeded_initializers_have_keras_distributions_and_survive_serialisation(initializer):
    ours = seeded(initializer, 0, "a/kernel")
    restored = SeededInitializer.from_config(ours.get_config())
    shape = (3, 3, 40, 50)
    values = np.asarray(ours(shape))
    assert values.tobytes() == np.asarray(restored(shape)).tobytes()
    reference = np.asarray(initializer(shape))
    assert values.dtype == np.float32
    assert values.std() == pytest.approx(reference.std(), rel=0.03)
    assert values.mean() == pytest.approx(reference.mean(), abs=0.05 * float(reference.std()))
    assert np.quantile(values, 0.99) == pytest.approx(np.quantile(reference, 0.99), rel=0.05)


def test_generators_of_different_weights_differ():
    draws = {
        generator(seed, key).integers(2**62)
        for seed in range(3)
        for key in ("a/kernel", "b/kernel", "a/bias")
    }
    assert len(draws) == 9


@pytest.mark.slow
def test_batch_norm_options():
    norms = layers_of(build("cifar_resnet8", norm_momentum=0.9, norm_epsilon=0.01), BatchNormalization)
    assert len(norms) == 7 and {(n.momentum, n.epsilon) for n in norms} == {(0.9, 0.01)}
    default = build("cifar_resnet8")
    assert {n.epsilon for n in layers_of(default, BatchNormalization)} == {1.001e-5}
    assert not [layer for layer in default.layers if type(layer) is keras.layers.BatchNormalization]


@pytest.mark.slow
def test_group_norm_options():
    norms = edited("efficientnet-b0", editing.set_group_norm)["GroupNormalization"]
    assert {config["groups"] for config in norms.values()} == {8, 16, 32}
    edit = ("efficientnet-b0", editing.set_group_norm)
    check_raises(ConfigurationError, "block1a_project_bn", "8", edited, *edit, groups=32)
    fours = build("cifar_resnet8", norm="group", norm_channels_per_group=4)
    assert fours.get_layer("conv4_block1_layer1_bn").groups == 16
    assert build("cifar_resnet8", norm="group", norm_groups=8).get_layer("conv1_bn").groups == 8


def test_convolutions_without_a_norm_have_a_bias():
    model = build("cifar_resnet8", norm="none")
    assert not layers_of(model, (BatchNormalization, GroupNormalization))
    assert all(layer.use_bias for layer in layers_of(model, keras.layers.Conv2D))


@pytest.mark.slow
def test_dropout_options():
    default, more, off = (
        edited("efficientnet-b0", editing.set_dropout, rate)["Dropout"] for rate in (None, 0.5, 0.0)
    )
    assert list(default) == list(more) == list(off)
    assert default["top_dropout"]["rate"] == 0.2 and 0 < default["block6d_drop"]["rate"] < 0.2
    assert more["top_dropout"]["rate"] == 0.5 and more["block6d_drop"] == default["block6d_drop"]
    assert tuple(default["block6d_drop"]["noise_shape"]) == (None, 1, 1, 1)
    assert {config["rate"] for config in off.values()} == {0.0}
    assert build("mnist_cnn", dropout=0.25, channels=1).get_layer("dropout").rate == 0.25
    assert type(build("mnist_cnn", channels=1).get_layer("dropout")) is Dropout
    build("cifar_resnet8", dropout=0.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar_resnet8", {"base_filters": 8}, "no --base-filters"),
        ("cifar_resnet8", {"norm": "layer"}, "can't be built with norm 'layer'"),
        ("cifar_resnet8", {"classes": 0}, "at least one class"),
        ("cifar_resnet8", {"size": 4}, "at least 8"),
        ("cifar_resnet8", {"dropout": 0.1}, "no dropout"),
        ("cifar_resnet8", {"norm": "batch", "norm_groups": 4}, "the norm is 'batch'"),
        (
            "cifar_resnet8",
            {"norm": "group", "norm_groups": 4, "norm_channels_per_group": 4},
            "4 groups and 4 channels",
        ),
        ("cifar_resnet8", {"norm": "group", "norm_groups": 32}, "conv1_bn can't be normalised in 32 groups"),
        ("mnist_cnn", {"norm": "batch"}, "no normalisation"),
        ("vgg16", {"norm": "group"}, "no normalisation"),
    ],
)
def test_illegal_options_are_refused(name, options, message):
    check_raises(ConfigurationError, message, "", build, name, **options)


@pytest.mark.slow
def test_resnet_v1_5_strides_in_the_3x3_without_biases():
    ours, keras_v1 = unedited("resnet50"), unedited("resnet50-keras")
    for name, stride in (
        ("conv3_block1_1_conv", 1),
        ("conv3_block1_2_conv", 2),
        ("conv3_block1_0_conv", 2),
        ("conv2_block1_2_conv", 1),
    ):
        assert tuple(ours[name].config["strides"]) == (stride, stride)
    assert not any(step.config["use_bias"] for step in ours.nodes if step.kind == "Conv2D")
    assert tuple(keras_v1["conv3_block1_1_conv"].config["strides"]) == (2, 2)
    assert keras_v1["conv3_block1_1_conv"].config["use_bias"]
    assert [step.name for step in ours.nodes[1:]] == [step.name for step in keras_v1.nodes[1:]]


# Preprocessing inside the Keras model; here the input pipeline does it.
PREPROCESSING = {
    "efficientnet-b0": lambda x: x / 255.0,
    "mobilenetv3-small": lambda x: x / 127.5 - 1,
}


@pytest.mark.slow_cases("efficientnet-b0-32", "mobilenet-32", "mobilenetv3-small-64")
@pytest.mark.parametrize(
    "name, size",
    [
        ("efficientnet-b0", 32),
        ("mobilenetv3-small", 64),
        ("mobilenet", 32),
        pytest.param("mobilenetv2", 32, marks=pytest.mark.slow),
    ],
)
def test_edited_applications_equal_keras(name, size):
    record = get_model(name)
    theirs = getattr(keras.applications, record.keras_application)(
        weights=None, input_shape=(size, size, 3), classes=5, classifier_activation=None
    )
    rng = np.random.RandomState(0)
    for layer in theirs.layers:
        if type(layer).__name__ == "BatchNormalization":
            layer.set_weights([rng.uniform(0.5, 1.5, w.shape) for w in layer.get_weights()])
    ours = build(name, size=size, classes=5)
    assert copy_weights(theirs, ours) == 0
    x = rng.uniform(0, 255, (2, size, size, 3)).astype("float32")
    expected = np.asarray(theirs(x, training=False))
    computed = np.asarray(ours(PREPROCESSING.get(name, lambda x: x)(x), training=False))
    np.testing.assert_allclose(computed, expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())


def test_copied_weights_keep_a_head_of_other_classes():
    source, target = (
        build("lenet", channels=1, classes=5, seed=1),
        build("lenet", channels=1, classes=3, seed=2),
    )
    before = target.layers[-1].get_weights()
    assert copy_weights(source, target) == 2
    np.testing.assert_array_equal(target.layers[1].get_weights()[0], source.layers[1].get_weights()[0])
    for kept, weight in zip(before, target.layers[-1].get_weights()):
        np.testing.assert_array_equal(kept, weight)
    conv = target.layers[1].get_weights()[0]
    with pytest.raises(ConfigurationError, match="do not fit"):
        copy_weights(build("lenet", channels=3, classes=3, seed=1), target)
    np.testing.assert_array_equal(target.layers[1].get_weights()[0], conv)
    check_raises(ConfigurationError, "layers with weights", "", copy_weights, build("cifar_resnet8"), target)


def test_unavailable_imagenet_weights_are_an_error(monkeypatch, capsys):
    with pytest.raises(ConfigurationError, match="no ImageNet weights"):
        load_imagenet_weights(None, get_model("cifar_resnet8"))

    def unreachable(**_):
        print("Downloading data")
        raise Exception("URL fetch failure on https://example.invalid: no route")

    monkeypatch.setattr(imagenet, "application", lambda name: unreachable)
    record = get_model("mobilenetv2")
    check_raises(MissingError, "could not be downloaded", "", load_imagenet_weights, None, record)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_imagenet_weights_are_matched_by_position_and_their_download_is_reported_in_events(
    monkeypatch, tmp_path, capsys
):
    """Nothing is printed."""
    source = keras.applications.MobileNet(weights=None, classes=7, input_shape=(32, 32, 3))
    (tmp_path / "published").write_bytes(bytes(3 * 2**20))

    def downloaded(weights):
        keras.utils.get_file("mine", (tmp_path / "published").as_uri(), cache_dir=str(tmp_path))
        return source

    monkeypatch.setattr(imagenet, "application", lambda name: downloaded)
    events, view = [], View()
    view.show = events.append
    model, record = build("mobilenet", classes=4), get_model("mobilenet")
    not_loaded = show(during("loading", lambda: load_imagenet_weights(model, record)), view)
    counts = [(event.done, event.total) for event in events[1:]]
    assert {event.work for event in events[1:]} == {"downloading the ImageNet weights of mobilenet, MiB"}
    assert counts[-1] == (3, 3) and {total for _, total in counts} == {3}
    assert capsys.readouterr().out == "" and not_loaded == 2
    np.testing.assert_array_equal(
        model.get_layer("conv_pw_13").get_weights()[0], source.get_layer("conv_pw_13").get_weights()[0]
    )


def test_a_network_that_needs_a_newer_keras_is_an_error(monkeypatch):
    import ipucnn.compat

    monkeypatch.setattr(ipucnn.compat, "KERAS_VERSION", (2, 6))
    check = build_module.check_requirements
    error = check_raises(MissingError, "Keras 2.8", "", check, get_model("efficientnetv2-b0"))
    assert "2.6" in error.message
    check(get_model("efficientnet-b0"))


@pytest.mark.slow_cases("efficientnet-b0-g16")
@pytest.mark.parametrize("name", ["cifar_resnet8", "efficientnet-b0-g16"])
def test_gradients_reach_every_weight(name):
    model = build(name, dropout=0.0)
    x = tf.constant(images(model, batch=4))
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2, 3], logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    assert all(g is not None and np.isfinite(g.numpy()).all() for g in gradients)
