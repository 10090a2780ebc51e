"""Classes are their names: another data set for a trained network is matched by name, or refused."""

import csv
import json
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from light_training import train_lightly
from PIL import Image
from support.refusals import Refusal, check_raises, check_refused

import ipucnn
from ipucnn.datasets import classes
from ipucnn.datasets.base import (
    ArrayExamples,
    DatasetInfo,
    DataSource,
    EncodedExamples,
    FileExamples,
    data_source,
)
from ipucnn.errors import DataError

NAMES = ("Bee", "ant", "café")
AS_TEXT = ("0", "1", "10", "11", "2", "3", "4", "5", "6", "7", "8", "9")
LETTERS = tuple("abcdefghijkl")
RNG = np.random.RandomState(5)


def matched(names, trained):
    return classes.match(names, trained, "other", "run", "take its own")


@pytest.mark.parametrize(
    "names, trained, labels, note",
    [
        (NAMES, NAMES, (0, 1, 2), ""),
        (("ant", "café", "Bee"), NAMES, (1, 2, 0), "another order"),
        (("10", "2"), ("2", "10"), (1, 0), "another order"),  # folders are sorted as text, arrays as numbers
        (("ant", unicodedata.normalize("NFD", "café")), NAMES, (1, 2), "without images: Bee"),
        (("café",), NAMES, (2,), "1 of the network's 3 classes, matched by name; without images: Bee, ant"),
        (("0", "1"), NAMES, (0, 1), "classes of other have numbers for names: those of other are compared by number"),
        (("0", "1", "2"), NAMES, (0, 1, 2), "compared by number with the network's, Bee, ant, café"),
        (NAMES, ("0", "1", "2"), (0, 1, 2), "the classes of run have numbers for names"),
        (NAMES, ("", "", ""), (0, 1, 2), "those of other, Bee, ant, café, are compared by position"),
        (("0", "1", "10", "2"), ("",) * 4, (0, 1, 2, 3), "those of other, 0, 1, 10, 2, are compared by position"),
        # Folders are sorted as text, and their numbers count.
        (AS_TEXT, ("",) * 12, (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9), "those of other are compared by number"),
        (AS_TEXT, LETTERS, (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9), "compared by number with the network's, a, b"),
        (LETTERS, AS_TEXT, (0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3), "the classes of run have numbers for names"),
        (("00", "01", "02"), AS_TEXT, (0, 1, 4), "those of other are compared by number"),
        (("01", "02"), ("1", "2"), (0, 1), "compared by number"),
        (("background", "foreground"), ("membrane", "cell"), (0, 1), "compared by position"),
        (("membrane", "cell"), ("background", "foreground"), (0, 1), "compared by position"),
        (("background", "class 1", "class 2"), NAMES, (0, 1, 2), "compared by position"),
        (("3", "1"), ("0", "1", "2", "3"), (3, 1), "without images: 0, 2"),
        (("0",), ("", ""), (0,), "compared by number with the network's"),
    ],
)  # fmt: skip
def test_classes_are_matched_by_name_or_by_number_if_they_have_no_names(names, trained, labels, note):
    found = matched(names, trained)
    assert found.labels == labels and note in found.note and bool(found.note) == bool(note)
    assert found.by_number == ("are compared by" in found.note)


@pytest.mark.parametrize(
    "names, trained, words, hint",
    [
        (("ant", "bee", "café"), NAMES, "does not know: bee; its classes are ant, bee, café, and the network's are "
         "Bee, ant, café", "if they are the same classes, rename bee to Bee"),
        (("b", "c", "d"), ("a", "b", "c"), "does not know: d;", "images of the network's classes"),
        (("0", "1", "2", "3"), NAMES, "run has 3 classes, data set other has 4: its classes are 0, 1, 2, 3, and the "
         "network's are Bee, ant, café", "take its own"),
        (("ant", "Bee"), ("0", "1", "2"), "run has 3 classes, data set other has 2", "take its own"),
        (("cell", "background"), ("background", "foreground"), "background is class 1 of data set other, and class 0 "
         "of run", "the network's names, in any order"),
        (("2", "3", "4"), ("1", "2", "3"), "2 is class 0 of data set other, and class 1 of run", "any order"),
        (("0", "1", "2"), ("1", "2", "3"), "1 is class 1 of data set other, and class 0 of run", "any order"),
        (("1", "2", "3"), ("", "", ""), "the classes of data set other are numbered from 1 to 3, and those of run are "
         "not: which class is which is not known", "the number of its output of the network; the first is 0"),
        (("1", "2", "3"), NAMES, "data set other are numbered from 1 to 3", "the network's names"),
        (NAMES, ("1", "2", "3"), "the classes of run are numbered from 1 to 3, and those of data set other are not",
         "the network's names"),
        (("ant", "Bee", "ant"), NAMES, "other has 2 classes of the name ant", "a name of its own"),
        (("cat", "dog"), ("membrane", "cell"), "does not know: cat, dog", ""),
        (tuple(f"x{n}" for n in range(40)), NAMES, "x9 and 30 more", ""),
    ],
)  # fmt: skip
def test_other_classes_are_refused_with_both_lists(names, trained, words, hint):
    check_raises(DataError, words, hint, matched, names, trained)


def test_labels_of_every_kind_of_examples_are_renumbered():
    labels, table = np.array([0, 1, 2, 1], np.int32), (2, 0, 3)
    images = np.zeros((4, 5, 5, 1), np.uint8)
    masks = np.int16([[[0, 1, 2, -1]] * 4])
    for examples in (
        ArrayExamples(images, labels, ("a", "b", "c", "d")),
        FileExamples(("w", "x", "y", "z"), labels),
        EncodedExamples((b"",) * 4, labels, "here"),
    ):
        source = data_source(examples, examples, name="x", class_names="abc", location="")
        changed = classes.relabelled(source, table, tuple("zyxw"))
        assert isinstance(changed, DataSource) and changed.info.class_names == tuple("zyxw")
        assert changed.info.num_classes == 4
        for part in (changed.train, changed.eval):
            assert part.labels.tolist() == [2, 0, 3, 0] and part.labels.dtype == np.int32
            assert type(part) is type(examples)
    pages = ArrayExamples(images[:1, :4, :4], masks)
    source = data_source(pages, pages, name="x", class_names="abc", location="", task="segmentation")
    changed = classes.relabelled(source, (1, 2, 0), tuple("cab")).eval.labels
    # -1 is no class: pixels that are left out stay left out.
    assert changed.dtype == np.int16 and changed[0, 0].tolist() == [1, 2, 0, -1]


# --- a run of three named classes


IMAGES = np.uint8(RNG.randint(0, 256, (12, 9, 9)))
LABELS = np.arange(12) % 3


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        pairs = ((IMAGES, LABELS), (IMAGES, LABELS), list(NAMES))
        for name, arrays in (("run", pairs), ("nameless", pairs[:2])):
            training = ipucnn.train(
                "toy_model", dataset=arrays, num_epochs=1, seed=1, micro_batch_size=4, validation=False,
                image_size=11, run_dir=folder / name
            )  # fmt: skip
            list(training)
    return folder


def test_arrays_with_names_in_another_order_have_the_same_figures(run_folder):
    expected = ipucnn.evaluate(run_folder / "run", dataset=(IMAGES, LABELS, list(NAMES)))
    order = [2, 0, 1]
    other = ipucnn.evaluate(
        run_folder / "run",
        dataset=(IMAGES, np.argsort(order)[LABELS], [NAMES[k] for k in order]),
    )
    assert expected["notes"] == [] and "another order" in other["notes"][0]
    assert [row["class"] for row in other["classes"]] == [row["class"] for row in expected["classes"]]
    assert other["confusion_matrix"] == expected["confusion_matrix"]
    assert other["measured"]["loss"] == expected["measured"]["loss"]


def test_some_classes_are_evaluated_as_what_they_are(run_folder):
    whole = ipucnn.evaluate(run_folder / "run", dataset=(IMAGES, LABELS, list(NAMES)))
    ants = ipucnn.evaluate(run_folder / "run", dataset=(IMAGES[LABELS == 1], np.zeros(4, int), ["ant"]))
    assert ants["confusion_matrix"] == [[0] * 3, whole["confusion_matrix"][1], [0] * 3]
    assert "1 of the network's 3 classes" in ants["notes"][0]


def test_classes_without_names_are_compared_by_number_in_one_line(run_folder):
    for run, dataset in (("run", (IMAGES, LABELS)), ("nameless", (IMAGES, LABELS, list(NAMES)))):
        result = ipucnn.evaluate(run_folder / run, dataset=dataset)
        assert len(result["notes"]) == 1 and "compared by number" in result["notes"][0]
        assert result["measured"]["samples"] == 12


@pytest.mark.slow
def test_class_folders_get_the_preprocessing_and_the_names_of_the_run(run_folder, run, tmp_path):
    """PNG files of the arrays: the figures of the arrays, and the probabilities of infer and predict, to all digits."""
    for k, (image, label) in enumerate(zip(IMAGES, LABELS)):
        for part in ("train", "val"):
            (tmp_path / part / NAMES[label]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / part / NAMES[label] / f"{k:02d}.png")
    folder = run_folder / "run"
    code, out, err = run(
        "evaluate", folder, "--dataset", "imagefolder", "--dataset-path", tmp_path, "--predictions", tmp_path / "p.csv",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    expected = ipucnn.evaluate(folder, dataset=(IMAGES, LABELS, list(NAMES)))
    result = json.loads(out)
    assert result["confusion_matrix"] == expected["confusion_matrix"]
    # Arrays have no names of files.
    assert err.count("note:") == 1
    assert "not all images that it was trained on could be compared" in err
    assert result["measured"]["loss"] == pytest.approx(expected["measured"]["loss"], rel=1e-6)
    rows = list(csv.DictReader((tmp_path / "p.csv").open(encoding="utf-8")))
    paths = [row["image"] for row in rows]
    assert len(paths) == 12 and all(f"/{row['label']}/" in row["image"] for row in rows)
    predicted = ipucnn.load(folder).predict(paths)
    assert [row["prediction"] for row in rows] == [NAMES[k] for k in predicted.argmax(axis=1)]
    np.testing.assert_allclose([float(row["probability"]) for row in rows], predicted.max(axis=1), atol=6e-7)
    code, out, _ = run(
        "infer", folder, "--split", "eval", "--dataset", "imagefolder", "--dataset-path", tmp_path, "--json"
    )
    inferred = json.loads(out)["results"]
    assert [row["truth"] for row in inferred] == [row["label"] for row in rows]
    np.testing.assert_allclose(
        [row["predictions"][0]["probability"] for row in inferred], predicted.max(axis=1), atol=1e-6
    )


def test_arrays_of_another_size_are_prepared_as_predict_prepares_them(run_folder):
    """Colour images of 20x14 for a run of grey 9x9 ones: cropped to their centre and resized, as files are."""
    images = np.uint8(RNG.randint(0, 256, (12, 20, 14, 3)))
    result = ipucnn.evaluate(run_folder / "run", dataset=(images, LABELS, list(NAMES)))
    guesses = ipucnn.load(run_folder / "run").predict(images)
    np.testing.assert_allclose(
        result["measured"]["loss"], -np.log(guesses[np.arange(12), LABELS]).mean(), rtol=1e-5
    )
    assert result["measured"]["accuracy"] == np.mean(guesses.argmax(axis=1) == LABELS)


def test_other_classes_end_evaluate_infer_and_export(run_folder, run, tmp_path):
    for part in ("train", "val"):
        for name in ("Ant", "Bee", "café"):
            (tmp_path / "other" / part / name).mkdir(parents=True)
            Image.fromarray(IMAGES[0]).save(tmp_path / "other" / part / name / "0.png")
    data = ["--dataset", "imagefolder", "--dataset-path", tmp_path / "other"]
    rows = (
        ["evaluate"],
        ["infer", "--split", "eval"],
        ["export", "--format", "keras", "--output", tmp_path / "x"],
    )
    for command, *options in rows:
        row = Refusal(
            [command, run_folder / "run", *options, *data], "does not know: Ant", "rename Ant to ant", 3
        )
        check_refused(run, row)


def test_numbers_of_folders_are_the_outputs_of_a_network_to_start_from():
    labels = np.arange(12, dtype=np.int32)
    examples = FileExamples(tuple(AS_TEXT), labels)
    source = data_source(examples, examples, name="x", class_names=AS_TEXT, location="")
    for trained in (LETTERS, ("",) * 12):
        started = classes.in_order_of(source, trained)
        assert started.train.labels.tolist() == [int(name) for name in AS_TEXT]
        assert started.info.class_names == tuple(map(str, range(12)))
        assert "keeps its weights by number" in started.info.warnings[0]
        assert classes.are_same(started.info.class_names, trained)
    # Another number of classes gets a new last layer, and which class is which does not matter.
    assert classes.in_order_of(source, LETTERS[:5]) is source


def test_outputs_of_unnamed_weights_are_said_to_be_folders_in_the_order_of_text():
    assert classes.order_note(tuple(map(str, range(12))), "x", "w.h5") == []
    assert "in the order 0, 1, 10, 11, 2" in classes.order_note(AS_TEXT, "x", "w.h5")[0]


def test_folders_of_numbers_are_evaluated_as_the_outputs_that_they_name(tmp_path):
    """The facts of ImageNet name no classes; after matching, label, name and output of a folder are one number."""
    from types import SimpleNamespace

    from ipucnn.datasets.base import DatasetInfo
    from ipucnn.runs.trained import _as_trained

    examples = FileExamples(AS_TEXT, np.arange(12, dtype=np.int32))
    source = data_source(examples, examples, name="x", class_names=AS_TEXT, location="")
    facts = DatasetInfo("imagenet", "classification", 12, (None, None, 3), 0, 0, (), "", (0.0,), (1.0,))
    trained, matched = _as_trained(source, facts, SimpleNamespace(name="imagenet", hint=""))
    assert trained.eval.labels.tolist() == [int(name) for name in AS_TEXT] and matched.by_number
    assert trained.info.class_names == tuple(map(str, range(12)))


def context_of(run, dataset):
    """Returns the context of a run of toy_model that starts from the weights of another one."""
    from ipucnn.config.resolve import resolve
    from ipucnn.datasets.sources.in_memory import keep
    from ipucnn.runs.context import make_context

    flags = {"dataset": keep(dataset, is_evaluated=False), "weights": str(run), "run_dir": str(run) + "-tuned",
             "micro_batch_size": 4, "num_epochs": 1, "seed": 1, "image_size": "11"}  # fmt: skip
    return make_context(resolve("train", flags, model="toy_model"))


def test_a_run_that_starts_from_weights_numbers_the_same_classes_as_they_do(run_folder):
    order = [2, 0, 1]
    dark = IMAGES // 2
    pair = (dark, np.argsort(order)[LABELS])
    context = context_of(run_folder / "run", (pair, pair, [NAMES[k] for k in order]))
    info = context.source.info
    assert info.class_names == NAMES and context.source.train.labels.tolist() == LABELS.tolist()
    assert info.mean == pytest.approx((IMAGES.mean(),)) and info.std == pytest.approx((IMAGES.std(),))
    assert any("numbered as those of the weights" in line for line in context.warnings)
    assert any("mean and deviation of arrays-" in line for line in context.warnings)


@pytest.mark.parametrize(
    "run, names, is_new",
    [
        ("run", NAMES, False),
        ("run", ("Bee", "ant", "wasp"), True),
        ("run", ("bee", "ant", "café"), True),
        ("run", (), False),
        ("nameless", ("x", "y", "z"), False),
    ],
)  # fmt: skip
def test_other_classes_get_a_new_last_layer_even_if_they_are_equally_many(run_folder, run, names, is_new):
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.registry import get_model

    pair = (IMAGES, LABELS)
    context = context_of(run_folder / run, (pair, pair, list(names)) if names else (pair, pair))
    model = build_model(get_model("toy_model"), BuildOptions(context.input_shape, 3, seed=3))
    num_fresh, _ = context.weights.start(context, model)
    assert num_fresh == (2 if is_new else 0)
    assert any("keeps its weights by number" in line for line in context.warnings) == (
        (run, names) in (("run", ()), ("nameless", ("x", "y", "z")))
    )


@pytest.mark.parametrize(
    "ours, trained, labels",
    [
        ((0, 2), (0, 1, 2), (0, 2)),
        ((0, 255), (0, 128, 255), (0, 2)),
        ((0, 7), (0, 1, 2), None),
        ((0, 9), (0, 1), (0, 1)),
    ],
)
def test_masks_without_names_have_the_classes_of_their_stored_values(ours, trained, labels):
    """Of a network of two classes any other value than 0 is the object."""
    info = DatasetInfo(
        "x", "segmentation", 2, (None, None, 3), 0, 0, ("background", "foreground"), "", (0.0,), (1.0,)
    )
    names = ("background", "nucleus", "cytoplasm")[: len(trained)]
    facts = replace(info, num_classes=len(trained), class_names=names, mask_values=trained)
    info = replace(info, mask_values=ours)
    by_number = classes.Matched((0, 1), "", True)
    if labels is None:
        check_raises(DataError, "values 0, 7, and those of training 0, 1, 2", "classes.txt", classes.by_stored_values,
                     by_number, info, facts)  # fmt: skip
    else:
        assert classes.by_stored_values(by_number, info, facts).labels == labels
