"""Losses and metrics against NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ipucnn.training.evaluation import EvaluationTotals
from ipucnn.training.losses import cross_entropy_per_sample, make_loss
from ipucnn.training.metrics import MetricTotals, batch_sums


def softmax(logits):
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def numpy_cross_entropy(logits, labels, smoothing):
    classes = logits.shape[-1]
    target = np.eye(classes)[labels] * (1 - smoothing) + smoothing / classes
    return -(target * np.log(softmax(logits))).sum(-1).reshape(len(logits), -1).mean(1)


@settings(max_examples=20)
@given(
    st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 7), st.sampled_from([0.0, 0.1]), st.booleans()
)
def test_cross_entropy_equals_numpy(seed, n, classes, smoothing, pixels):
    rng = np.random.default_rng(seed)
    shape = (n, 3, 2) if pixels else (n,)
    logits = rng.normal(0, 4, (*shape, classes)).astype(np.float32)
    labels = rng.integers(0, classes, shape).astype(np.int32)
    ours = cross_entropy_per_sample(logits, labels, smoothing).numpy()
    np.testing.assert_allclose(ours, numpy_cross_entropy(logits, labels, smoothing), rtol=1e-5, atol=1e-6)


def test_dice_is_computed_within_a_micro_batch():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 5, 5, 2)).astype(np.float32)
    labels = rng.integers(0, 2, (4, 5, 5)).astype(np.int32)
    fused = make_loss("bce_dice")(logits, labels, 2).numpy()
    for i in range(2):
        part, truth = softmax(logits[2 * i : 2 * i + 2])[..., 1], labels[2 * i : 2 * i + 2]
        dice = 1 - (2 * (part * truth).sum() + 1) / (part.sum() + truth.sum() + 1)
        entropy = numpy_cross_entropy(logits[2 * i : 2 * i + 2], truth, 0.0).mean()
        assert fused[i] == pytest.approx(entropy + dice, rel=1e-5)


def test_dice_loss_is_the_mean_of_classes_and_figures_are_per_class():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 5, 6, 3)).astype(np.float32)
    labels = rng.integers(-1, 3, (4, 5, 6)).astype(np.int32)
    fused = (
        make_loss("bce_dice")(logits, labels, 2).numpy()
        - make_loss("cross_entropy")(logits, labels, 2).numpy()
    )
    totals = MetricTotals()
    for i in range(2):
        part, truth = softmax(logits[2 * i : 2 * i + 2]), labels[2 * i : 2 * i + 2]
        class_scores = []
        for k in (1, 2):
            shares = part[..., k] * (truth >= 0)
            class_scores.append(
                1 - (2 * (shares * (truth == k)).sum() + 1) / (shares.sum() + (truth == k).sum() + 1)
            )
        assert fused[i] == pytest.approx(np.mean(class_scores), rel=1e-5)
        half = slice(2 * i, 2 * i + 2)
        totals.add(batch_sums(tf.constant(logits[half]), tf.constant(truth), tf.ones(2), tf.zeros(2)))
    result, predicted = totals.result(), logits.argmax(-1)
    for k in range(3):
        right = ((labels == k) & (predicted == k)).sum()
        both = (labels == k).sum() + ((predicted == k) & (labels >= 0)).sum()
        assert result[f"dice_class_{k}"] == pytest.approx(2 * right / both)
    assert result["dice"] == pytest.approx((result["dice_class_1"] + result["dice_class_2"]) / 2)
    # Evaluation's own sums, each sample alone
    known = np.maximum(labels, 0)
    expected = [make_loss("bce_dice")(logits[i : i + 1], known[i : i + 1], 1).numpy()[0] for i in range(4)]
    sums = EvaluationTotals(3, "bce_dice")
    sums.add(logits, known)
    assert sums.result()["loss"] == pytest.approx(np.mean(expected), rel=1e-5)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 8), st.integers(2, 12))
def test_every_sample_counts_once_whatever_the_batch(seed, n, batch, classes):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes)).astype(np.float32)
    labels = rng.integers(0, classes, n).astype(np.int32)
    totals = MetricTotals()
    for start in range(0, n, batch):
        part = slice(start, start + batch)
        missing = batch - len(labels[part])
        x = np.concatenate([logits[part], np.zeros((missing, classes), np.float32)])
        y = np.concatenate([labels[part], np.zeros(missing, np.int32)])
        weights = np.concatenate([np.ones(batch - missing), np.zeros(missing)]).astype(np.float32)
        losses = cross_entropy_per_sample(x, y)
        totals.add(batch_sums(tf.constant(x), tf.constant(y), tf.constant(weights), losses))
    result = totals.result()
    order = np.argsort(-logits, axis=1, kind="stable")
    assert result["samples"] == n
    assert result["accuracy"] == pytest.approx(np.mean(order[:, 0] == labels), abs=1e-6)
    k = min(5, classes)
    assert result["top5"] == pytest.approx(np.mean((order[:, :k] == labels[:, None]).any(1)), abs=1e-6)
    assert result["loss"] == pytest.approx(numpy_cross_entropy(logits, labels, 0.0).mean(), rel=1e-5)


def test_uniform_or_non_finite_logits_do_not_count_as_right():
    labels = tf.constant([0, 7, 9], tf.int32)
    for logits, expected in ((np.zeros((3, 10)), 1), (np.full((3, 10), np.nan), 0)):
        sums = batch_sums(tf.constant(logits, tf.float32), labels, tf.ones(3), tf.zeros(3))
        assert float(sums["top5"]) == expected  # among equal logits the first five classes are the top five


def numpy_segmentation(logits, labels):
    """Computes Dice, IoU and pixel accuracy of both classes by their definitions, over the pixels that count."""
    known = labels >= 0
    predicted, truth = logits.argmax(-1)[known], labels[known]
    result = {"accuracy": (predicted == truth).mean()}
    for key, k in (("dice", 1), ("dice_background", 0)):
        a, b = predicted == k, truth == k
        result[key] = 2 * (a & b).sum() / (a.sum() + b.sum()) if a.any() or b.any() else 1.0
    a, b = predicted == 1, truth == 1
    result["iou"] = (a & b).sum() / (a | b).sum() if (a | b).any() else 1.0
    result["dice_all_foreground"] = 2 * b.sum() / (len(b) + b.sum())
    return result


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0, 0.6), st.sampled_from([0.0, 0.3, 1.0]))
def test_segmentation_metrics_over_patches(seed, n, ignored, foreground):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, 6, 5, 2)).astype(np.float32)
    labels = (rng.random((n, 6, 5)) < foreground).astype(np.int32)
    labels[rng.random(labels.shape) < ignored] = -1
    labels[0, 0, 0] = 1
    shares = ((labels >= 0).sum((1, 2)) / (labels >= 0).sum()).astype(np.float32)
    totals = MetricTotals()
    for i in range(0, n, 2):
        # Padding of weight 0 beside one or two samples
        batch = [np.stack([values[i], values[(i + 1) % n], values[0]]) for values in (logits, labels)]
        losses = cross_entropy_per_sample(*batch)
        second = shares[i + 1] if i + 1 < n else 0.0
        totals.add(batch_sums(*map(tf.constant, batch), tf.constant([shares[i], second, 0.0]), losses))
    result = totals.result()
    for key, expected in numpy_segmentation(logits, labels).items():
        assert result[key] == pytest.approx(expected, abs=1e-5), key
    known = labels >= 0
    entropy = -np.log(np.take_along_axis(softmax(logits), np.maximum(labels, 0)[..., None], -1)[..., 0])
    assert result["loss"] == pytest.approx(entropy[known].mean(), rel=1e-4)
    assert result["samples"] == pytest.approx(1)


def test_ignored_pixels_do_not_count_in_the_dice_loss():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(2, 6, 6, 2)).astype(np.float32)
    labels = rng.integers(0, 2, (2, 6, 6)).astype(np.int32)
    labels[:, 4:] = -1
    whole = make_loss("bce_dice")(tf.constant(logits), tf.constant(labels), 2).numpy()
    cropped = make_loss("bce_dice")(tf.constant(logits[:, :4]), tf.constant(labels[:, :4]), 2).numpy()
    np.testing.assert_allclose(whole, cropped, rtol=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", "bce_dice"])
def test_losses_of_float16_logits_are_reduced_in_float32(name):
    """388x388 pixels of loss 2 sum to 301,088, and float16 ends at 65,504."""
    logits = np.zeros((1, 388, 388, 2), np.float16)
    logits[..., 0] = 2
    labels = np.ones((1, 388, 388), np.int32)
    with np.errstate(over="ignore"):
        assert not np.isfinite((np.full(388 * 388, 2, np.float16)).sum(dtype=np.float16))
    value = make_loss(name)(tf.constant(logits), tf.constant(labels), 1)
    assert value.dtype == tf.float32
    entropy, probability = np.log(1 + np.exp(2.0)), 1 / (1 + np.exp(2.0))
    count = 388 * 388
    dice = 1 - (2 * count * probability + 1) / (count * probability + count + 1)
    assert float(value[0]) == pytest.approx(entropy + (dice if name == "bce_dice" else 0), rel=1e-5)


def test_gradients_of_float16_logits_need_the_scale():
    """A pixel's share of the gradient is below float16's smallest number; 128 times the share is not."""
    labels = tf.ones((1, 388, 388), tf.int32)
    gradients = []
    for scale in (1.0, 128.0):
        logits = tf.Variable(np.broadcast_to(np.float16([0, 6]), (1, 388, 388, 2)))
        with tf.GradientTape() as tape:
            loss = make_loss("cross_entropy")(logits, labels, 1)[0] * scale
        gradients.append(tape.gradient(loss, logits).numpy().astype(np.float64) / scale)
    exact = -(1 - 1 / (1 + np.exp(-6.0))) / 388**2  # 1.6e-8, and float16 counts in steps of 6e-8
    assert (gradients[0] == 0).all()
    np.testing.assert_allclose(gradients[1][..., 1], exact, rtol=0.05)
