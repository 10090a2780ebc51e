"""--pad-dataset: no sample is lost, none counts twice, and the loss is that of the samples without padding."""

import json

import numpy as np
import pytest
import tensorflow as tf
from support import sessions
from support.reference import run_naive
from support.sessions import CPU, SGD, data, make_model, make_program, with_fused

from ipucnn.config.resolve import resolve
from ipucnn.runs.train import TrainingRun
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import ExecutionFinished
from ipucnn.training.checkpoints import load_checkpoint
from ipucnn.training.losses import Loss

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


@pytest.mark.slow_cases("False-1", "False-48", "True-16")
@pytest.mark.slow_cases("True-1", "True-4", "False-16", "True-48")
@pytest.mark.parametrize("size", [1, 4, 16, 48])
@pytest.mark.parametrize("augment", [False, True])
def test_every_sample_has_weight_one_once_an_epoch(size, augment, tmp_path):
    options = {**OPTIONS, "augment": augment, "run_dir": str(tmp_path / "r")}
    run = TrainingRun(resolve("train", options, model="lenet"))
    source, epoch = run.context.source, 48
    number = source.info.num_train
    batches = run.dataset(0, size).take(2 * epoch // size).as_numpy_iterator()
    images, labels, weights = (np.concatenate(parts) for parts in zip(*batches))
    for turn in range(2):
        epoch_part = slice(turn * epoch, (turn + 1) * epoch)
        np.testing.assert_array_equal(weights[epoch_part], [1.0] * number + [0.0] * (epoch - number))
        counted = labels[epoch_part][weights[epoch_part] > 0]
        np.testing.assert_array_equal(np.bincount(counted), np.bincount(source.train.labels))
        if not augment:
            seen = sorted(image.tobytes() for image in images[epoch_part][:number])
            first = sorted(image.tobytes() for image in images[:number])
            assert seen == first


@pytest.mark.slow_cases("running_mean-4")
@pytest.mark.slow_cases("mean-2", "mean-8")
@pytest.mark.parametrize("method, fused", [("mean", 8), ("mean", 2), ("running_mean", 4), ("sum", 2)])
def test_loss_and_weights_are_those_without_padding(method, fused):
    """In two epochs of three weight updates, the third update has 5 samples of 16."""
    sizes = dict(updates_per_epoch=3, num_epochs=2, num_executions=2)
    padding = dict(samples_per_epoch=37, samples_padded_per_epoch=11)
    program = make_program(2, 4, 2, gradient_accumulation_reduction_method=method, **sizes, **padding)
    images, labels = data(96, 3)
    real = np.tile(np.arange(48) < 37, 2).astype(np.float32)
    result = sessions.run(
        HostSession(CPU), make_model("none"), with_fused(program, fused), SGD, images, labels, weights=real
    )
    naive, losses, _ = run_naive("none", program, SGD, images, labels, real=real)
    executions = [event for event in result.events if isinstance(event, ExecutionFinished)]
    expected = np.average(np.reshape(losses, (2, 3)), axis=1, weights=[16, 16, 5])
    np.testing.assert_allclose([event.metrics["loss"] for event in executions], expected, rtol=2e-5)
    assert [event.samples for event in executions] == [37, 74]
    for name, value in naive.weights.items():
        np.testing.assert_allclose(result.weights[name], value, rtol=2e-4, atol=2e-6, err_msg=name)


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
        values = Loss("cross_entropy")(logits, labels, fused, tf.constant(real * 6 / 4))
        loss = tf.reduce_mean(values)
    raw = logits.numpy().astype(np.float64)
    shares = np.exp(raw) / np.exp(raw).sum(-1, keepdims=True)
    picked = np.take_along_axis(shares, labels[..., np.newaxis], -1)[..., 0]
    np.testing.assert_allclose(float(loss), -np.log(picked[:4]).mean(), rtol=1e-5)
    expected = (shares - np.eye(2)[labels]) / (4 * 5 * 4)
    expected[4:] = 0.0
    np.testing.assert_allclose(tape.gradient(loss, logits).numpy(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
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


def test_run_reports_its_padding(lightly, run):
    words = (
        "train mnist_cnn --pad-dataset --num-epochs 1 --limit-train 20 --limit-eval 10 --micro-batch-size 8"
    )
    code, _, err = run(*words.split())
    assert code == 0, err
    assert "4 samples of weight 0" in err and "discarded" not in err
