"""--pad-dataset: no sample is lost, none counts twice, and the loss is that of the samples without padding."""

import json

import numpy as np
import pytest
import tensorflow as tf

from ipucnn import cli
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.names import named_weights
from ipucnn.models.registry import get_model
from ipucnn.runs.train import TrainingRun
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.session import ExecutionFinished
from ipucnn.training.checkpoints import load_checkpoint
from ipucnn.training.losses import make_loss

OPTIONS = {
    "dataset": "digits",
    "limit_train": "37",
    "num_epochs": "2",
    "seed": "3",
    "num_replicas": "2",
    "micro_batch_size": "2",
    "gradient_accumulation_count": "4",
    "learning_rate": "0.1",
    "optimizer": "sgd",
    "optimizer_params": "{momentum: 0.9}",
    "augment": False,
    "pad_dataset": True,
    "lr_schedule": "const",
    "logs_per_epoch": "1",
}


@pytest.mark.parametrize("size", [1, 4, 16, 48])
@pytest.mark.parametrize("augment", [False, True])
def test_every_sample_has_weight_one_once_an_epoch(size, augment, tmp_path):
    from ipucnn.datasets.pipeline import Stream, train_batches

    source = TrainingRun(
        resolve("train", {**OPTIONS, "run_dir": str(tmp_path / "r")}, model="lenet")
    ).context.source
    number = source.info.num_train
    epoch = -(-number // 48) * 48
    batches = train_batches(
        source, Stream(batch_size=size, samples_per_epoch=epoch, input_shape=(8, 8, 1), input_range="raw",
        augment=augment, seed=1, weigh_padding=True,))  # fmt: skip
    images, labels, weights = (
        np.concatenate(parts) for parts in zip(*batches.take(2 * epoch // size).as_numpy_iterator())
    )
    for turn in range(2):
        epoch_part = slice(turn * epoch, (turn + 1) * epoch)
        np.testing.assert_array_equal(weights[epoch_part], [1.0] * number + [0.0] * (epoch - number))
        counted = labels[epoch_part][weights[epoch_part] > 0]
        np.testing.assert_array_equal(np.bincount(counted), np.bincount(source.train.labels))
        if not augment:
            seen = sorted(image.tobytes() for image in images[epoch_part][:number])
            first = sorted(image.tobytes() for image in images[:number])
            assert seen == first


def trained(method, fused, folder, model="lenet"):
    """Returns a session's losses and weights after the run, and those of a loop over real samples alone."""
    resolved = resolve(
        "train",
        {**OPTIONS, "gradient_accumulation_reduction_method": method, "run_dir": str(folder / "r")},
        model=model,
    )
    run = TrainingRun(resolved)
    create = create_session("cpu")
    network = build_model(get_model(model), BuildOptions(run.context.input_shape, 10, norm="none", seed=3))
    start = {name: v.numpy() for name, v in named_weights(network).items()}
    program = run.context.program.with_fused(fused)
    create.compile(
        network, program, run.context.optimizer, make_loss("cross_entropy"), run.context.schedule, run.dataset
    )
    executions = [e for e in create.train(run.dataset) if isinstance(e, ExecutionFinished)]
    after = {name: v.numpy() for name, v in named_weights(network).items()}
    for name, variable in named_weights(network).items():
        variable.assign(start[name])
    return run, network, executions, after


def without_padding(run, network, method):
    """Returns losses per epoch and final weights of plain SGD with momentum, on the real samples of each update."""
    program = run.context.program
    weights = list(network.trainable_weights)
    velocity = [tf.zeros(w.shape) for w in weights]
    batches = run.dataset(0, program.global_batch_size).as_numpy_iterator()
    epochs = []
    for _ in range(program.num_epochs):
        total, number = 0.0, 0
        for _ in range(program.weight_updates_per_epoch):
            images, labels, real = next(batches)
            images, labels = images[real > 0], labels[real > 0]
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels, network(images, training=True)
                )
                # Reduction method "sum" sums over accumulation steps; over replicas it is a mean.
                share = program.micro_batch_size * program.num_replicas if method == "sum" else len(labels)
                objective = tf.reduce_sum(losses) / share
            gradients = tape.gradient(objective, weights)
            velocity = [0.9 * v - 0.1 * g for v, g in zip(velocity, gradients)]
            for weight, v in zip(weights, velocity):
                weight.assign_add(v)
            total += float(tf.reduce_sum(losses))
            number += len(labels)
        epochs.append(total / number)
    return epochs, {name: v.numpy() for name, v in named_weights(network).items()}


@pytest.mark.slow_cases("mean-2", "mean-8")
@pytest.mark.parametrize("method, fused", [("mean", 8), ("mean", 2), ("running_mean", 4), ("sum", 2)])
def test_loss_and_weights_are_those_without_padding(method, fused, tmp_path):
    run, network, executions, after = trained(method, fused, tmp_path)
    expected, weights = without_padding(run, network, method)
    np.testing.assert_allclose([e.metrics["loss"] for e in executions], expected, rtol=2e-5)
    assert [e.samples for e in executions] == [37, 74]
    for name, value in weights.items():
        np.testing.assert_allclose(after[name], value, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("fused", [1, 3])
def test_masks_are_padded_as_classes_are(fused):
    """In segmentation with cross-entropy, the weighted loss, scaled as in a weight update, is that of the real images
    alone, computed here pixel by pixel; so are its gradients by the logits, and padding has none.
    """
    random = np.random.RandomState(3)
    logits = tf.constant(random.normal(size=(6, 5, 4, 2)), tf.float32)
    labels = random.randint(0, 2, (6, 5, 4)).astype(np.int32)
    real = np.array([1, 1, 1, 1, 0, 0], np.float32)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        values = make_loss("cross_entropy")(logits, labels, fused, tf.constant(real * 6 / 4))
        loss = tf.reduce_mean(values)
    raw = logits.numpy().astype(np.float64)
    shares = np.exp(raw) / np.exp(raw).sum(-1, keepdims=True)
    picked = np.take_along_axis(shares, labels[..., np.newaxis], -1)[..., 0]
    np.testing.assert_allclose(float(loss), -np.log(picked[:4]).mean(), rtol=1e-5)
    expected = (shares - np.eye(2)[labels]) / (4 * 5 * 4)
    expected[4:] = 0.0
    np.testing.assert_allclose(tape.gradient(loss, logits).numpy(), expected, rtol=1e-4, atol=1e-7)


def test_a_padded_run_continues_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = {**OPTIONS, "limit_eval": "20", "dropout": "0.3", "augment": True}
    last = {}
    for name, epochs in (("whole", ["2"]), ("cut", ["1", "2"])):
        for number in epochs:
            options = {**common, "num_epochs": number, "run_dir": name, "resume": True}
            list(TrainingRun(resolve("train", options, model="mnist_cnn")).events())
        last[name] = load_checkpoint(tmp_path / name / "checkpoints" / "last.npz")
    whole, cut = last["whole"], last["cut"]
    assert json.loads((tmp_path / "cut" / "report.json").read_text())["trained_samples"] == 74
    assert whole.meta["weight_updates"] == cut.meta["weight_updates"] == 6
    for name, value in whole.weights.items():
        assert value.tobytes() == cut.weights[name].tobytes(), name


def test_runs_that_cannot_be_padded_are_refused(tmp_path):
    options = {**OPTIONS, "run_dir": str(tmp_path / "r")}
    with pytest.raises(ConfigurationError, match="weight-updates-per-epoch"):
        TrainingRun(resolve("train", {**options, "weight_updates_per_epoch": "2"}, model="lenet"))
    segmentation = {**options, "dataset": "membranes", "limit_train": "5"}
    with pytest.raises(ConfigurationError, match="Dice"):
        TrainingRun(resolve("train", segmentation, model="unet"))


def test_run_reports_its_padding(lightly, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--limit-train", "20", "--limit-eval", "10", "--micro-batch-size", "8"]
    code = cli.run(["train", "mnist_cnn", "--pad-dataset", "--num-epochs", "1", *sizes])
    err = capsys.readouterr().err
    assert code == 0, err
    assert "4 samples of weight 0" in err and "discarded" not in err
