"""Losses, and the scores of validations and evaluations, against definitions written out in Python."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.scores import naive_scores

from ipucnn.errors import DataError
from ipucnn.training.evaluation import EvaluationTotals, Predictions, Totals
from ipucnn.training.losses import Loss, balanced_weights

TASKS = ["classification", "masks", "patches"]


def predictions_and_truth(rng, task, n, classes):
    """Returns logits, labels and weights; two classes of some predictions rank the same."""
    shape = (n,) if task == "classification" else (n, 3, 4)
    logits = rng.normal(0, 4, (*shape, classes)).astype(np.float32)
    logits[..., 1] = np.where(rng.random(shape) < 0.3, logits[..., 0], logits[..., 1])
    labels = rng.integers(0, classes, shape).astype(np.int32)
    if task != "patches":
        return logits, labels, np.ones(n, np.float32)
    labels[rng.random(shape) < rng.choice([0.1, 0.6])] = -1
    labels[0, 0, 0] = 1
    return logits, labels, (labels >= 0).sum(axis=(1, 2)).astype(np.float32)


@tries(25, slow=100)
@given(
    seed=st.integers(0, 10**6),
    task=st.sampled_from(TASKS),
    n=st.integers(1, 9),
    batch=st.integers(1, 5),
    classes=st.integers(2, 8),
    smoothing=st.sampled_from([None, 0.1]),
    loss=st.sampled_from(["cross_entropy", "bce_dice"]),
)
def test_every_sample_counts_once_whatever_the_batch(seed, task, n, batch, classes, smoothing, loss):
    rng = np.random.default_rng(seed)
    loss = "cross_entropy" if task == "classification" else loss
    logits, labels, weights = predictions_and_truth(rng, task, n, classes)
    expected = naive_scores(logits, labels, weights, loss, smoothing or 0.0)
    # The padding of the last batch never counts, whatever the network makes of it.
    missing = -n % batch
    padded = [
        np.concatenate([values, np.full((missing, *values.shape[1:]), filler, values.dtype)])
        for values, filler in ((logits, np.nan), (labels, 0), (weights, 0))
    ]
    totals = Totals()
    for start in range(0, n, batch):
        predictions = Predictions(*(tf.constant(values[start : start + batch]) for values in padded))
        totals.add(json.loads(json.dumps(predictions.sums(loss, smoothing))))
    assert totals.result() == pytest.approx(expected.result, rel=1e-12)
    assert list(totals.result()) == list(expected.result)
    if task == "patches":
        return
    evaluation = EvaluationTotals(classes, loss, smoothing)
    for start in range(0, n, batch):
        guesses, probabilities = evaluation.add(logits[start : start + batch], labels[start : start + batch])
        np.testing.assert_array_equal(guesses, logits[start : start + batch].argmax(-1))
        assert probabilities.shape == guesses.shape
    result = evaluation.result()
    assert result.pop("calibration_error") == pytest.approx(expected.calibration_error, rel=1e-9, abs=1e-12)
    kept = ["samples", "loss", "accuracy", *(["dice", "iou"] if task != "classification" else [])]
    kept += ["top5"] if task == "classification" and classes > 5 else []
    assert list(result) == kept
    assert result == pytest.approx({name: expected.result[name] for name in kept}, rel=1e-12)
    assert evaluation.confusion.tolist() == expected.confusion
    counts = {i: row["count"] for i, row in enumerate(evaluation.bins()) if row["count"]}
    assert counts == {number: len(hits) for number, hits in expected.bins.items()}


@tries(20, slow=80)
@given(
    seed=st.integers(0, 10**6),
    task=st.sampled_from(TASKS),
    fused=st.integers(1, 4),
    micro_batch=st.integers(1, 3),
    classes=st.integers(2, 7),
    smoothing=st.sampled_from([None, 0.1]),
)
def test_losses_of_training_equal_those_of_evaluation(seed, task, fused, micro_batch, classes, smoothing):
    """The Dice loss of training couples the samples of a micro-batch: they are as one image, one below the other."""
    rng = np.random.default_rng(seed)
    logits, labels, _ = predictions_and_truth(rng, task, fused * micro_batch, classes)
    labels.reshape(len(labels), -1)[:, 0] = 1
    naive = naive_scores(logits, labels, np.ones(len(labels)), smoothing=smoothing or 0.0)
    entropies = Loss("cross_entropy", smoothing)(logits, labels, fused).numpy()
    means = np.mean(np.reshape(naive.losses, (fused, micro_batch)), axis=1)
    np.testing.assert_allclose(entropies, means, rtol=1e-5, atol=1e-6)
    counted = rng.integers(0, 2, len(labels)).astype(np.float32)
    weighted = Loss("cross_entropy", smoothing)(logits, labels, fused, counted).numpy()
    means = np.mean(np.reshape(naive.losses * counted, (fused, micro_batch)), axis=1)
    np.testing.assert_allclose(weighted, means, rtol=1e-5, atol=1e-6)
    if task == "classification":
        return
    images = logits.reshape(fused, micro_batch * 3, 4, classes), labels.reshape(fused, micro_batch * 3, 4)
    both = [naive_scores(*images, np.ones(fused), name).losses for name in ("bce_dice", "cross_entropy")]
    dice = Loss("bce_dice", smoothing)(logits, labels, fused).numpy() - entropies
    np.testing.assert_allclose(dice, np.subtract(*both), rtol=1e-5, atol=1e-5)


def test_balanced_weights_give_each_class_the_same_sum():
    labels = np.repeat([0, 2, 3], [2, 5, 13])
    weights = balanced_weights(labels, 5)
    np.testing.assert_allclose(
        [weights[k] * np.sum(labels == k) for k in range(5)], [20 / 3, 0, 20 / 3, 20 / 3, 0]
    )
    assert np.mean([weights[k] for k in labels]) == pytest.approx(1)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_weights_of_classes_multiply_the_loss_of_each_sample(is_mixed):
    """With label smoothing and padding, sample by sample in float64; the mean is over all samples."""
    rng, of_classes = np.random.default_rng(2), (0.5, 3.0, 2.0)
    logits, real = rng.normal(size=(6, 3)).astype(np.float32), np.array([1, 1, 1, 1, 0, 1], np.float32)
    shares = rng.dirichlet(np.ones(3), 6) if is_mixed else np.eye(3)[[0, 1, 2, 1, 0, 2]]
    labels = shares.astype(np.float32) if is_mixed else np.argmax(shares, 1).astype(np.int32)
    losses = []
    for row, share, count in zip(logits.astype(np.float64), shares, real):
        logs = row - np.log(np.exp(row).sum())
        entropy = -0.9 * sum(share * logs) - 0.1 * logs.mean()
        losses.append(count * sum(share * of_classes) * entropy)
    values = Loss("cross_entropy", 0.1, of_classes)(tf.constant(logits), labels, 2, tf.constant(real))
    np.testing.assert_allclose(values, np.reshape(losses, (2, 3)).mean(1), rtol=1e-5)


def test_sums_over_a_large_set_stay_exact():
    rng = np.random.default_rng(0)
    totals, evaluation, losses = Totals(), EvaluationTotals(3), []
    for _ in range(20):
        logits = rng.normal(0, 8, (10_000, 3)).astype(np.float32)
        labels = rng.integers(0, 3, 10_000)
        totals.add(Predictions(logits, labels, np.ones(10_000)).sums())
        evaluation.add(logits, labels)
        wide = logits.astype(np.longdouble)
        label_logits = np.take_along_axis(wide, labels[:, None], 1)[:, 0]
        losses += (
            np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1) - label_logits
        ).tolist()
    assert evaluation.result()["loss"] == pytest.approx(math.fsum(losses) / 200_000, abs=1e-10)
    assert int(evaluation.confusion.sum()) == 200_000
    assert totals.result().items() <= evaluation.result().items()


def test_uniform_or_non_finite_logits_do_not_count_as_right():
    for logits, expected in ((np.zeros((3, 10)), 1), (np.full((3, 10), np.nan), 0)):
        sums = Predictions(logits.astype(np.float32), [0, 7, 9], np.ones(3)).sums()
        assert sums["top5"] == expected  # among equal logits the first five classes are the top five


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(2,), (2, 1, 3)])
@pytest.mark.filterwarnings("error")
def test_outputs_that_are_not_finite_end_an_evaluation_and_give_a_validation_no_finite_loss(bad, shape):
    logits = np.zeros((*shape, 3), np.float32)
    logits[-1, ..., 2] = bad
    labels = np.full(shape, 2)
    with pytest.raises(DataError, match="not finite"):
        EvaluationTotals(3).add(logits, labels)
    for loss in ("cross_entropy", "bce_dice")[: len(shape)]:
        totals = Totals()
        totals.add(Predictions(logits, labels, np.ones(2)).sums(loss))
        value = totals.result()["loss"]
        assert not np.isfinite(value)
        trained = Loss(loss)(tf.constant(logits), tf.constant(labels, tf.int32), 1)
        assert np.isnan(value) == bool(tf.math.is_nan(trained[0]))


@pytest.mark.parametrize(
    ("labels", "found"), [([0, 3], "0 to 3"), ([-1, 0], "-1 to 0"), ([[[-2]], [[0]]], "-2 to 0")]
)
def test_labels_that_are_no_classes_are_refused(labels, found):
    logits = np.zeros((*np.shape(labels), 3), np.float32)
    with pytest.raises(DataError, match=f"labels from {found} for 3 classes"):
        Predictions(logits, labels, np.ones(2))
    with pytest.raises(DataError, match=f"labels from {found} for 3 classes"):
        EvaluationTotals(3).add(logits, np.array(labels))


def test_no_sample_has_no_scores():
    totals = Totals()
    totals.add(Predictions(np.zeros((2, 3)), [0, 0], np.zeros(2)).sums())
    assert totals.result() == {"samples": 0.0}
    with pytest.raises(ValueError, match="no sample"):
        EvaluationTotals(3).result()


@pytest.mark.parametrize("name", ["cross_entropy", "bce_dice"])
def test_losses_of_float16_logits_are_reduced_in_float32(name):
    """388x388 pixels of loss 2 sum to 301,088, and float16 ends at 65,504."""
    logits = np.zeros((1, 388, 388, 2), np.float16)
    logits[..., 0] = 2
    labels = np.ones((1, 388, 388), np.int32)
    with np.errstate(over="ignore"):
        assert not np.isfinite((np.full(388 * 388, 2, np.float16)).sum(dtype=np.float16))
    value = Loss(name)(tf.constant(logits), tf.constant(labels), 1)
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
            loss = Loss("cross_entropy")(logits, labels, 1)[0] * scale
        gradients.append(tape.gradient(loss, logits).numpy().astype(np.float64) / scale)
    exact = -(1 - 1 / (1 + np.exp(-6.0))) / 388**2  # 1.6e-8, and float16 counts in steps of 6e-8
    assert (gradients[0] == 0).all()
    np.testing.assert_allclose(gradients[1][..., 1], exact, rtol=0.05)
