"""Classes of which a part of a data set has nothing, and masks of two values, wherever the data come from."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.data_sets import encode, noise, write_class_folders
from support.refusals import Refusal, check_raises, check_refused

from ipucnn.datasets.classes import match
from ipucnn.datasets.registry import choose_dataset, open_dataset
from ipucnn.datasets.sources import in_memory
from ipucnn.errors import DataError
from ipucnn.runs import setup

RNG = np.random.RandomState(2)
IMAGES = np.uint8(RNG.randint(0, 256, (8, 6, 6)))
MASKS = np.uint8(RNG.randint(0, 2, (8, 6, 6)))


def opened(made, task="classification"):
    """Opens arrays as ``dataset=`` of the Python functions does."""
    name = in_memory.keep(made, is_evaluated=False)
    return open_dataset(choose_dataset(name, ".", home="mnist", task=task))


def test_arrays_name_the_classes_that_a_part_lacks():
    train = IMAGES, np.array([0, 1, 2, 0, 1, 2, 0, 0])
    evaluation = IMAGES, np.array([0, 0, 0, 0, 2, 2, 2, 2])
    source = opened((train, evaluation, ["ant", "bee", "cat", "dog"]))
    assert source.info.warnings == (
        "the arrays of dataset=: no images for training in dog",
        "the arrays of dataset=: no images for evaluation in bee, dog",
    )
    assert opened((train, train, ["ant", "bee", "cat"])).info.warnings == ()


def test_masks_name_the_classes_that_a_split_by_position_lacks():
    masks = np.where(np.arange(8)[:, None, None] < 6, MASKS, 2 * MASKS)
    source = opened(((IMAGES[:6], masks[:6]), (IMAGES[6:], masks[6:])), "segmentation")
    assert source.info.class_names == ("background", "class 1", "class 2")
    taken, *absent = source.info.warnings
    assert taken.startswith(
        "the values 0 to 2 of the masks are taken for classes; if they number objects, give masks > 0"
    )
    assert [line.split(": ")[1] for line in absent] == [
        "no pixels for training in class 2",
        "no pixels for evaluation in class 1",
    ]


def test_functions_and_records_name_them_too(tmp_path, succeeds):
    (tmp_path / "data.py").write_text(
        "import numpy as np\n\n\ndef load():\n    x, y = np.zeros((4, 5, 5), np.uint8), np.array([0, 1, 3, 3])\n"
        "    return (x, y), (x[:2], y[:2])\n"
    )
    choice = choose_dataset(f"{tmp_path / 'data.py'}:load", tmp_path, home="mnist", task="classification")
    lines = open_dataset(choice).info.warnings
    assert [line.split(": ")[-1] for line in lines] == [
        "no images for training in 2",
        "no images for evaluation in 2, 3",
    ]
    write_class_folders(tmp_path / "folders", {(p, c): 2 for p in ("train", "val") for c in ("a", "b")})
    succeeds(
        "build-records", tmp_path / "folders", tmp_path / "records", "--shards", 1, "--validation-shards", 1
    )
    (tmp_path / "records" / "classes.txt").write_text("a\nb\nc\n")
    choice = choose_dataset("imagenet", tmp_path / "records", home="mnist", task="classification")
    lines = open_dataset(choice).info.warnings
    assert [line.split(": ")[-1] for line in lines] == [
        "no images for training in c",
        "no images for evaluation in c",
    ]


@pytest.mark.parametrize(
    "images, hint",
    [
        (IMAGES / 255, "np.uint8(np.rint(255 * images))"),
        (np.uint16(IMAGES) * 257, "of 16 bits, alike in both parts: np.uint8(images // 256)"),
        (np.uint16(IMAGES) * 16, "of 12 bits, alike in both parts: np.uint8(images // 16)"),
        (np.int64(IMAGES), "convert them: np.uint8(images)"),
        (IMAGES > 99, "255 * np.uint8(images)"),
        (IMAGES.astype(int) - 9, "bring their numbers to 0..255"),
        (np.zeros((8, 6, 6, 4), np.uint8), "red, green and blue as the last axis"),
        (
            np.where(np.arange(8)[:, None, None] == 3, np.nan, IMAGES),
            "np.isfinite(images.reshape(len(images), -1)).all(axis=1); images, labels = images[known]",
        ),
        (np.where(MASKS, np.nan, 0.5), "give images of numbers"),
    ],
    ids=[
        "float",
        "16 bits",
        "12 bits",
        "integers",
        "bool",
        "negative",
        "4 channels",
        "an image without numbers",
        "no numbers",
    ],
)
def test_images_of_another_type_get_the_conversion_that_fits(images, hint):
    part = images, np.arange(8) % 2
    check_raises(DataError, "wanted uint8 of 0 to 255", hint, opened, (part, part))


def test_images_in_an_array_of_objects_are_read_as_the_hint_converts_them():
    part = IMAGES.astype(object), np.arange(8) % 2
    check_raises(DataError, "are object", "np.array(images.tolist())", opened, (part, part))
    images = np.array(part[0].tolist())
    check_raises(DataError, "are int64", "convert them: np.uint8(images)", opened, ((images, part[1]),) * 2)
    assert (opened(((np.uint8(images), part[1]),) * 2).train.images[..., 0] == IMAGES).all()


def test_labels_of_one_class_invent_no_second_one():
    part = IMAGES, np.zeros(8, int)
    info = opened((part, part)).info
    assert info.class_names == ("0",) and info.warnings == ()
    # To evaluate a network whose classes have names, images of its first class suffice.
    assert match(info.class_names, ("cat", "dog"), "arrays", "r", "").labels == (0,)
    part = IMAGES, np.arange(8) % 3 + 1
    (line, _) = opened((part, part)).info.warnings
    assert line.endswith("no images for training in 0")


def test_images_of_0_and_1_are_said_to_be_dark():
    part = MASKS, np.arange(8) % 2
    (line,) = opened((part, part)).info.warnings
    assert "the largest value of all images is 1" in line
    part = np.zeros_like(MASKS), np.arange(8) % 2
    assert opened((part, part)).info.warnings == ()


def test_names_of_arrays_are_told_apart_as_those_of_folders():
    part = IMAGES, np.arange(8) % 2
    check_raises(DataError, "names of the classes", "", opened, (part, part, ["\u00e9", "e\u0301"]))
    (line,) = opened((part, part, [" a", "A "])).info.warnings
    assert "classes whose names differ only in case or blanks: ' a' and 'A '" in line


def test_a_fold_names_the_classes_that_its_parts_lack():
    """A class of one image is in one fold's evaluation, and in the training of the others."""
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 2])
    source = opened(((IMAGES, labels), (IMAGES, labels), ["ant", "bee", "cat"]))
    lines = []
    for fold in (1, 2):
        config = SimpleNamespace(kfold=2, fold=fold, limit_train=None, limit_eval=None)
        lines.append(setup.fold_of(source, config, 0).info.warnings)
    assert lines == [
        ("fold 1: no images for evaluation in cat",),
        ("fold 2: no images for training in cat",),
    ]


def test_a_class_without_images_after_skipping_damaged_ones_is_an_error(tmp_path, run):
    write_class_folders(tmp_path, {(part, name): 3 for part in ("train", "val") for name in ("ant", "bee")})
    for path in (tmp_path / "train" / "bee").iterdir():
        path.write_bytes(encode(noise(1, 20, 20, 3))[:300])
    options = ["train", "cifar_resnet8", "--dataset", tmp_path, "--dry-run", "--micro-batch-size", 4]
    error = "--skip-damaged leaves no training image of bee"
    check_refused(run, Refusal([*options, "--skip-damaged"], error, "remove the folders of these classes", 3))
    Image.fromarray(noise(1, 20, 20, 3)).save(tmp_path / "train" / "bee" / "0.png")
    code, _, err = run(*options, "--skip-damaged")
    assert code == 0 and "left out (--skip-damaged)" in err, err


@pytest.mark.parametrize("high", [1, 2, 100, 255])
@pytest.mark.parametrize("names", [(), (["background", "tree"],)])
@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.uint16])
def test_masks_of_0_and_one_other_value_are_two_classes(high, names, kind):
    masks = MASKS.astype(kind) * high
    source = opened(((IMAGES[:6], masks[:6]), (IMAGES[6:], masks[6:]), *names), "segmentation")
    assert source.info.class_names == (tuple(names[0]) if names else ("background", "foreground"))
    assert source.info.num_classes == 2 and not source.info.warnings
    for part, expected in ((source.train, MASKS[:6]), (source.eval, MASKS[6:])):
        assert part.labels.dtype == np.uint8 and np.array_equal(np.stack(part.masks), expected)


def test_masks_that_number_objects_need_names_or_are_one_class():
    """Each mask numbers its cells from 1, and there is a cell more in each."""
    columns = np.arange(6) * np.ones((8, 6, 1))
    masks = np.where(columns <= np.arange(8)[:, None, None] % 4, columns, 0).astype(np.int32)

    def pairs(masks, *names):
        return (IMAGES[:4], masks[:4]), (IMAGES[4:], masks[4:]), *names

    error = "the arrays of dataset=: the masks have from 1 to 4 different values, as masks that number single objects"
    hint = "if the values number objects, give masks > 0"
    check_raises(DataError, error, hint, opened, pairs(masks), "segmentation")
    assert opened(pairs(masks, list("abcd")), "segmentation").info.num_classes == 4
    source = opened(pairs(masks > 0), "segmentation")
    assert source.info.class_names == ("background", "foreground") and not source.info.warnings
    np.testing.assert_array_equal(np.stack(source.train.masks), masks[:4] > 0)


@pytest.mark.parametrize(
    "values, names, error, hint",
    [
        (
            (0, 100, 200),
            (),
            "3 different values (0, 100, 200); a mask has 0 and one other value, or",
            "return",
        ),
        ((0, 1, 3), (), "3 different values (0, 1, 3)", "return"),
        (
            (0, 1, 2),
            (["a", "b"],),
            "a label is 2, and there are 2 names",
            "give 3 names, for the labels 0 to 2",
        ),
        ((3, 5, 9), (["a", "b"],), "a label is 9, and there are 2 names", "or number the labels from 0"),
    ],
)
def test_other_masks_need_names_for_their_numbers(values, names, error, hint):
    masks = np.array(values, np.uint8)[np.arange(8 * 36).reshape(8, 6, 6) % len(values)]
    made = ((IMAGES, masks), (IMAGES, masks), *names)
    check_raises(DataError, error, hint, opened, made, "segmentation")


@pytest.mark.parametrize(
    "names",
    [
        *({"ant", "bee"}, frozenset(("ant", "bee")), {0: "ant", 1: "bee"}, {"bee": 1, "ant": 0}, "ab", 2),
        # Weights or labels of samples in place of names.
        *(
            np.ones(8),
            np.arange(8) % 2,
            ["ant", "ant"],
            [b"ant", b"bee"],
            [float("nan")] * 2,
            [IMAGES],
        ),
    ],
)
def test_names_of_classes_have_the_order_of_labels(names):
    """A set has another order in each process, and a dictionary may have any."""
    part = IMAGES, np.arange(8) % 2
    check_raises(
        DataError,
        "wanted a list of different texts in the order of labels",
        "give a name for each label",
        opened,
        (part, part, names),
    )
    for ordered in (["ant", "bee"], np.array(["ant", "bee"]), {"ant": 0, "bee": 1}.keys()):
        assert opened((part, part, ordered)).info.class_names == ("ant", "bee")


@pytest.mark.parametrize(
    "labels, hint",
    [
        (np.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]], "one-hot labels: labels.argmax(axis=-1)"),
        (
            np.eye(8)[:, :3],
            "several or none: train on the others, one = labels.sum(axis=1) == 1; images, labels = images[one]",
        ),
        (np.full((8, 4), 0.25), "the most probable class: labels.argmax(axis=-1)"),
        (np.full((8, 4), 7), "give one number for each image, its class"),
        (np.ones((8, 3)), "each image has one class, and here some have several or none"),
        (np.full((8, 4), np.nan), "give one number for each image, its class"),
        (np.arange(8) / 2, "labels.astype(int)"),
        (np.array(["ant", "bee"] * 4), "labels = np.searchsorted(names, labels)"),
        (np.ones((8, 6, 6, 2), np.uint8) * (0, 1), "labels.argmax(axis=-1)"),
        (np.zeros((8, 6, 6, 2), np.uint8), "each pixel has one class, and here some have several or none"),
        (np.ones((8, 2, 6, 6), np.uint8) * [[[0]], [[1]]], "labels.argmax(axis=1)"),
        (np.zeros((8, 1, 6, 6), np.uint8), "labels[:, 0]"),
        (np.zeros((8, 5, 5), np.uint8), "dataset=(images, labels), or ((images, labels), (eval_images"),
        (np.zeros((8, 5, 5, 2), np.uint8), "dataset=(images, labels), or ((images, labels), (eval_images"),
    ],
    ids=[
        "one-hot",
        "several classes",
        "probabilities",
        "boxes",
        "all of several classes",
        "no numbers",
        "floats",
        "text",
        "one-hot masks",
        "several classes of pixels",
        "channels first",
        "a channel",
        "smaller",
        "smaller one-hot",
    ],
)
def test_labels_of_another_type_get_the_conversion_that_fits(labels, hint):
    part = IMAGES, labels
    check_raises(DataError, "wanted a whole number for each", hint, opened, (part, part))


@pytest.mark.parametrize(
    "labels, most, hint",
    [
        (np.where(MASKS, 300, 0), 255, "give masks > 0"),
        (np.where(MASKS, 1, -1), 255, "`255 ignore` in DIR/classes.txt"),
        (np.arange(8) - 1, 131071, "known = labels >= 0"),
        (np.arange(8) + 2**17, 131071, "number the classes from 0"),
    ],
    ids=["objects", "unlabelled pixels", "unlabelled images", "many classes"],
)
def test_labels_beyond_the_limits_get_the_limit_and_what_to_do(labels, most, hint):
    words = f"are {labels.min()} to {labels.max()}, wanted numbers from 0 to {most}"
    check_raises(DataError, words, hint, opened, ((IMAGES, labels), (IMAGES, labels)))


@pytest.mark.parametrize("is_one_pair", [False, True])
def test_masked_values_of_arrays_are_refused(is_one_pair):
    """NumPy's masked arrays hide values, which plain arrays show."""

    def given(images, labels):
        return (images, labels) if is_one_pair else ((images, labels), (images, labels))

    classes = np.arange(8) % 2
    hidden = np.ma.masked_array(classes, classes > 0)
    check_raises(DataError, "the labels have masked values", "~labels.mask", opened, given(IMAGES, hidden))
    pixels = np.ma.masked_array(MASKS, MASKS > 0)
    check_raises(DataError, "the labels have masked values", "255 ignore", opened, given(IMAGES, pixels))
    dark = np.ma.masked_array(IMAGES, IMAGES < 9)
    check_raises(DataError, "the images have masked values", "images.filled(0)", opened, given(dark, classes))
    source = opened(given(np.ma.masked_array(IMAGES), np.ma.masked_array(classes)))
    assert source.info.num_classes == 2  # nothing is hidden


def test_masks_may_have_a_last_axis_of_one():
    parts = [((IMAGES[:6], masks[:6]), (IMAGES[6:], masks[6:])) for masks in (MASKS, MASKS[..., np.newaxis])]
    flat, deep = (opened(part, "segmentation") for part in parts)
    np.testing.assert_array_equal(flat.train.labels, deep.train.labels)
    np.testing.assert_array_equal(flat.eval.labels, deep.eval.labels)
