"""Pixels of the value that ``classes.txt`` calls "ignore": left out of the loss and of all scores."""

import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from poplar_double import installed
from sklearn import metrics
from support.data_sets import open_pairs, verified, write_pairs
from support.refusals import check_raises
from support.scores import naive_scores
from support.sessions import CPU, SGD, SIZE, chain, data, make_program, run, with_fused
from support.streams import RAW
from support.trained_runs import rows
from tensorflow import keras

from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import fingerprint
from ipucnn.datasets.pipeline import eval_batches
from ipucnn.datasets.segmentation.masks import read_table
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.errors import DataError
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession
from ipucnn.training.evaluation import EvaluationTotals, soft_dice
from ipucnn.training.losses import correct
from ipucnn.training.segment_scores import SegmentScores

TABLE = "0 background\n255 ignore\n7 cell\n"


def write_set(folder, num=5, height=44, width=36, table=TABLE):
    """Writes bright cells on a dark ground; a third of each mask is ignored."""
    random, pairs = np.random.RandomState(3), []
    for _ in range(num):
        cell = np.kron(random.randint(0, 2, (height // 4, width // 4)), np.ones((4, 4), int))
        image = (60 + 120 * cell + random.normal(0, 15, cell.shape)).clip(0, 255).astype(np.uint8)
        mask = np.where(random.random_sample(cell.shape) < 1 / 3, 255, 7 * cell).astype(np.uint8)
        pairs.append((image, mask))
    write_pairs(folder, pairs)
    (folder / "classes.txt").write_text(table)
    return [mask for _, mask in pairs]


def test_the_line_is_no_class_and_its_pixels_have_the_ignored_label(tmp_path):
    masks = write_set(tmp_path / "set")
    source = open_pairs("imagemasks", tmp_path / "set")
    assert source.info.class_names == ("background", "cell")
    labels = [*source.train.masks, *source.eval.masks]
    expected = np.select([np.stack(masks) == 255, np.stack(masks) == 7], [IGNORED, 1], 0)
    np.testing.assert_array_equal(labels, expected)
    share = f"{np.mean(np.stack(masks) == 255):.2%}"
    (line,) = source.info.warnings
    assert (
        line
        == f"classes.txt: {share} of the masks' pixels are ignore, and count neither in the loss nor in any score"
    )
    (tmp_path / "set" / "classes.txt").write_text(TABLE.replace("ignore", "dirt"))
    other = open_pairs("imagemasks", tmp_path / "set")
    assert other.info.class_names == ("background", "dirt", "cell") and other.train.labels.dtype == np.uint8
    assert fingerprint(other) != fingerprint(source)


def test_the_name_may_be_written_in_any_case_and_other_words_for_it_are_classes(tmp_path):
    """Cityscapes and VOC call such pixels void; a class of that name counts, and the run says so."""
    write_set(tmp_path, table=TABLE.replace("ignore", "Ignore"))
    source = open_pairs("imagemasks", tmp_path)
    assert source.info.class_names == ("background", "cell") and IGNORED in source.train.labels
    (tmp_path / "classes.txt").write_text(TABLE.replace("ignore", "Void"))
    source = open_pairs("imagemasks", tmp_path)
    assert source.info.class_names == ("background", "Void", "cell")
    (line,) = source.info.warnings
    assert line.startswith("Void is a class like the others; the name ignore leaves its pixels out")
    assert verified(tmp_path, ".")[1] == {"void-class"}


def test_values_without_a_table_are_said_to_be_taken_for_classes(tmp_path):
    """Masks that number as many objects in each image look the same."""
    mask = np.arange(400, dtype=np.uint8).reshape(20, 20) % 3
    write_pairs(tmp_path, [(np.full((20, 20), k, np.uint8), mask) for k in range(4)])
    (line,) = open_pairs("imagemasks", tmp_path).info.warnings
    assert line.startswith(
        "the values 0 to 2 of the masks are taken for classes; if they number objects, write"
    )
    errors, warnings, report = verified(tmp_path, ".")
    assert not errors and "unnamed-classes" in warnings
    assert [one.examples for one in report.findings if one.code == "unnamed-classes"] == [("0 to 2",)]
    (tmp_path / "classes.txt").write_text("0 background\n1 cell\n2 wall\n")
    assert open_pairs("imagemasks", tmp_path).info.warnings == ()
    assert "unnamed-classes" not in verified(tmp_path, ".")[1]


def test_colours_may_be_ignored(tmp_path):
    colours = np.array([[0, 0, 0], [9, 9, 200], [255, 255, 255]], np.uint8)
    classes = np.random.RandomState(0).randint(0, 3, (4, 20, 20))
    write_pairs(tmp_path, [(np.full((20, 20), k, np.uint8), colours[mask]) for k, mask in enumerate(classes)])
    (tmp_path / "classes.txt").write_text("255 255 255 ignore\n0 0 0 rest\n9 9 200 cell\n")
    source = open_pairs("imagemasks", tmp_path)
    np.testing.assert_array_equal(
        [*source.train.masks, *source.eval.masks], np.array([0, 1, IGNORED])[classes]
    )
    assert source.info.class_colours == ((0, 0, 0), (9, 9, 200))


def test_sets_in_which_nothing_counts_are_refused(tmp_path):
    write_set(tmp_path, num=3)
    Image.fromarray(np.full((44, 36), 255, np.uint8)).save(tmp_path / "masks" / "1.png")
    check_raises(
        DataError, "1.png has no pixel that counts", "remove the mask", open_pairs, "imagemasks", tmp_path
    )
    errors, _, _ = verified("imagemasks", tmp_path)
    assert errors == {"mask-values"}
    (tmp_path / "classes.txt").write_text("0 background\n255 ignore\n")
    check_raises(DataError, "has 1 class; a mask has from 2", "", read_table, tmp_path / "classes.txt")


def test_verification_counts_the_other_pixels(tmp_path):
    masks = np.stack(write_set(tmp_path, num=10))
    errors, warnings, report = verified("imagemasks", tmp_path)
    counts = sum(np.array([count for _, count in subset.classes]) for subset in report.subsets)
    assert not errors and "label-range" not in warnings
    assert counts.tolist() == [np.sum(masks == 0), np.sum(masks == 7)]


def test_scores_are_those_of_scikit_learn_over_the_other_pixels():
    random = np.random.RandomState(1)
    logits, labels = random.normal(0, 2, (3, 9, 8, 3)), random.randint(-1, 3, (3, 9, 8))
    totals = EvaluationTotals(3)
    for image, truth in zip(logits, labels):
        predicted, confidence = totals.add(image[None], truth[None])
        assert predicted.shape == confidence.shape == (1, 9, 8)
    known = labels >= 0
    truth, guess = labels[known], logits.argmax(-1)[known]
    np.testing.assert_array_equal(totals.confusion, metrics.confusion_matrix(truth, guess))
    result = totals.result()
    assert result["accuracy"] == pytest.approx(metrics.accuracy_score(truth, guess))
    assert result["dice"] == pytest.approx(metrics.f1_score(truth, guess, average=None)[1:].mean())
    assert result["iou"] == pytest.approx(metrics.jaccard_score(truth, guess, average=None)[1:].mean())
    powers = np.exp(logits[known])
    loss = metrics.log_loss(truth, powers / powers.sum(-1, keepdims=True), labels=range(3))
    assert result["loss"] == pytest.approx(loss)
    naive = naive_scores(logits, labels, np.ones(3))
    assert result["calibration_error"] == pytest.approx(naive.calibration_error)
    # Only the values of ignored pixels differ, so nothing may change.
    changed = np.where(known[..., None], logits, -logits)
    for k in range(3):
        assert soft_dice(changed[k], labels[k]) == pytest.approx(soft_dice(logits[k], labels[k]))


def test_the_challenge_leaves_ignored_pixels_out():
    random = np.random.RandomState(2)
    truth, probability = random.randint(0, 2, (12, 12)), random.random_sample((12, 12))
    truth[4:8, 4:8] = IGNORED
    scores = SegmentScores((0.5,)).add(probability, truth)
    assert scores == SegmentScores((0.5,)).add(probability, np.where(truth == IGNORED, 0, truth))


def test_training_accuracy_is_over_the_other_pixels():
    random = np.random.RandomState(4)
    logits = random.normal(0, 1, (5, 6, 7, 3)).astype(np.float32)
    labels = random.randint(-1, 3, (5, 6, 7)).astype(np.int32)
    labels[4] = IGNORED
    right = correct(tf.constant(logits), tf.constant(labels)).numpy()
    for k in range(4):
        known = labels[k] >= 0
        share = np.mean(logits[k].argmax(-1)[known] == labels[k][known])
        assert right[k].mean() == pytest.approx(share, rel=1e-6)
    assert not right[4].any()


@pytest.mark.slow
def test_patches_weigh_as_much_as_their_other_pixels(tmp_path):
    write_set(tmp_path)
    source = open_pairs("imagemasks", tmp_path)
    batches = eval_batches(
        source.eval,
        source.info,
        batch_size=3,
        input_shape=(28, 28, 1),
        input_range=RAW,
        output_shape=(12, 12),
    )
    total = 0
    for _, labels, weights in batches:
        np.testing.assert_array_equal(weights, (labels.numpy() >= 0).sum(axis=(1, 2)))
        total += weights.numpy().sum()
    assert total == (source.eval.labels >= 0).sum()


@pytest.mark.slow_cases("bce_dice")
@pytest.mark.parametrize("loss", ["cross_entropy", "bce_dice"])
def test_both_sessions_train_as_a_naive_loop(loss):
    """Weights after three updates equal those of a loop over samples and pixels; so do loss and accuracy."""

    def network():
        return chain((SIZE, SIZE, 2), keras.layers.Conv2D(3, 1, name="logits"), seed=3)

    program = make_program(2, 2, 2, updates_per_epoch=3)
    images, _ = data(program.num_weight_updates * program.global_batch_size, 5)
    labels = np.random.default_rng(6).integers(-1, 3, images.shape[:3]).astype(np.int32)
    labels[3] = IGNORED
    kernel, bias = (weight.numpy().reshape(-1, 3).astype(np.float64) for weight in network().weights)
    start = kernel, bias[0]
    naive, losses, shares = naive_training(start, images, labels, program, loss)
    config = RunConfig(num_replicas=2)
    host = run(HostSession(CPU, config=config), network(), with_fused(program, 2), SGD, images, labels, loss)
    with installed():
        poplar = run(create_session("auto", config=config), network(), program, SGD, images, labels, loss)
    for trained in (host, poplar):
        weights = [trained.weights[name] for name in sorted(trained.weights)]
        for weight, expected in zip(weights, sorted(naive, key=np.ndim)):
            np.testing.assert_allclose(np.squeeze(weight), expected, rtol=0, atol=2e-6)
        (end,) = [e for e in trained.events if type(e).__name__ == "ExecutionFinished"]
        assert end.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert end.metrics["accuracy"] == pytest.approx(np.mean(shares), abs=1e-6)


def naive_training(start, images, labels, program, loss):
    """Trains softmax(x @ kernel + bias) by SGD with momentum 0.9.

    It returns the weights, and the loss and the share of right pixels of each update.  Gradients are difference
    quotients of the loss, computed pixel by pixel in float64.
    """
    kernel, bias = (np.array(value, np.float64) for value in start)
    moved = [np.zeros_like(kernel), np.zeros_like(bias)]
    losses, shares = [], []

    def loss_of(kernel, bias, number):
        micro = slice(number * program.micro_batch_size, (number + 1) * program.micro_batch_size)
        entropies, right, overlap, total = [], [], np.zeros(3), np.zeros(3)
        for image, truth in zip(images[micro].astype(np.float64), labels[micro]):
            logits = (image @ kernel + bias)[truth >= 0]
            powers = np.exp(logits - logits.max(-1, keepdims=True)) if len(logits) else logits
            p, t = powers / powers.sum(-1, keepdims=True), np.eye(3)[truth[truth >= 0]]
            entropies.append(-np.log((p * t).sum(-1)).mean() if len(logits) else 0.0)
            right.append((logits.argmax(-1) == truth[truth >= 0]).mean() if len(logits) else 0.0)
            overlap, total = overlap + (p * t).sum(0), total + p.sum(0) + t.sum(0)
        dice = np.mean(1 - (2 * overlap[1:] + 1) / (total[1:] + 1)) if loss == "bce_dice" else 0.0
        return np.mean(entropies) + dice, np.mean(right)

    for update in range(program.num_weight_updates):
        numbers = range(update * 4, update * 4 + 4)
        results = [loss_of(kernel, bias, number) for number in numbers]
        losses.append(np.mean([value for value, _ in results]))
        shares.append(np.mean([share for _, share in results]))
        gradients = []
        for which, values in enumerate((kernel, bias)):
            gradient = np.zeros_like(values)
            for index in np.ndindex(*values.shape):
                ends = []
                for step in (1e-6, -1e-6):
                    changed = [kernel.copy(), bias.copy()]
                    changed[which][index] += step
                    ends.append(np.mean([loss_of(*changed, number)[0] for number in numbers]))
                gradient[index] = (ends[0] - ends[1]) / 2e-6
            gradients.append(gradient)
        rate = 0.05 / (1 + update)
        moved = [0.9 * m - rate * g for m, g in zip(moved, gradients)]
        kernel, bias = kernel + moved[0], bias + moved[1]
    return (kernel, bias), losses, shares


@pytest.mark.slow
def test_commands_from_training_to_masks(run, tmp_path):
    masks = write_set(tmp_path / "set")
    line = "--dataset set --image-size 204 --base-filters 2 --num-epochs 1 --seed 1 --run-dir r"
    code, _, err = run("train", "unet", *line.split())
    assert code == 0 and "% of the masks' pixels are ignore, and count neither in the loss" in err
    (validation,) = rows(tmp_path / "r", "validation")
    assert validation["samples"] == 1
    assert (tmp_path / "r" / "predictions.png").exists()
    printed = json.loads(run("evaluate", "r", "--contact-sheet", "worst.png", "--json")[1])
    assert run("infer", "r", "set/images/4.png", "--output", "o", "--threshold", "0.5")[0] == 0
    predicted = np.asarray(Image.open(tmp_path / "o" / "4-mask.png")) // 255
    known = masks[4] != 255
    truth, guess = masks[4][known] // 7, predicted[known]
    np.testing.assert_array_equal(
        printed["confusion_matrix"], metrics.confusion_matrix(truth, guess, labels=[0, 1])
    )
    assert printed["measured"]["accuracy"] == pytest.approx(metrics.accuracy_score(truth, guess))
    assert printed["measured"]["dice"] == pytest.approx(metrics.f1_score(truth, guess))
    assert validation["accuracy"] == pytest.approx(printed["measured"]["accuracy"])
    assert validation["dice"] == pytest.approx(printed["measured"]["dice"])
