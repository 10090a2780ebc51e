"""Twelve images in each form of docs/microscopy.md, through every command; scores are compared with scikit-learn's."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from sklearn import metrics
from support.data_sets import verified
from support.refusals import check_raises

from ipucnn.datasets.base import MaskedExamples, channel_statistics, select_fold
from ipucnn.datasets.registry import ReaderOptions, choose_dataset, open_dataset
from ipucnn.datasets.segmentation import imagemasks
from ipucnn.datasets.segmentation.membranes import draw_tissue
from ipucnn.errors import DataError

SIZES = [(90, 110), (100, 100), (120, 84)]
"""Height and width of the images of sets of different sizes, in turns."""


def tissue(number, size=(96, 100)):
    """Returns an image and its mask: 0 is membrane, 1 is cell."""
    return draw_tissue(*size, np.random.RandomState(number))


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".tif":
        tifffile.imwrite(path, array, **options)
    else:
        Image.fromarray(array).save(path)


def of_sizes(folder):
    pairs = [tissue(k, SIZES[k % 3]) for k in range(12)]
    for k, (image, mask) in enumerate(pairs):
        save(folder / f"images/a{k:02}.tif", image)
        save(folder / f"masks/a{k:02}.png", mask * 255)
    return pairs


def cellpose(folder):
    """The cells have numbers, in one folder with the images."""
    pairs = [tissue(k) for k in range(12)]
    for k, (image, mask) in enumerate(pairs):
        save(folder / f"a{k:02}.tif", image.astype(np.uint16) * 200)
        save(
            folder / f"a{k:02}_cp_masks.png",
            mask * np.uint16(1 + np.arange(mask.size).reshape(mask.shape) // 900 % (20 + k)),
        )
    (folder / "classes.txt").write_text("0 background\n* cell\n")
    return pairs


def nnunet(folder):
    pairs = [tissue(k, SIZES[k % 3]) for k in range(12)]
    for k, (image, mask) in enumerate(pairs):
        ignored = np.random.RandomState(k).uniform(size=mask.shape) < 0.1
        pairs[k] = image, np.where(ignored, -1, mask.astype(int))
        end = "Tr" if k < 9 else "Ts"
        save(folder / f"images{end}/case_{k:02}_0000.tif", image)
        save(folder / f"labels{end}/case_{k:02}.tif", np.where(ignored, 2, mask).astype(np.uint8))
    labels = {"labels": {"membrane": 0, "neuron": 1, "ignore": 2}, "channel_names": {"0": "EM"}}
    (folder / "dataset.json").write_text(json.dumps({**labels, "numTraining": 9, "file_ending": ".tif"}))
    return pairs


def fiji(folder):
    """Two hyperstacks with three channels, and stacks of masks."""
    pairs = [tissue(k) for k in range(12)]
    for number in (0, 1):
        part = pairs[6 * number : 6 * number + 6]
        channels = np.stack([np.stack([image, 255 - image, image // 2]) for image, _ in part])
        save(folder / f"images/s{number}.tif", channels, imagej=True, metadata={"axes": "ZCYX"})
        save(folder / f"masks/s{number}.tif", np.stack([mask for _, mask in part]) * np.uint8(255))
    return pairs


def ome(folder):
    """Images with pixel sizes in OME-XML, whose names end in .ome.tif, and masks without."""
    pairs = [tissue(k, SIZES[k % 3]) for k in range(12)]
    for k, (image, mask) in enumerate(pairs):
        about = {"axes": "YX", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": "um"}
        save(folder / f"images/a{k:02}.ome.tif", image.astype(np.uint16) * 200, ome=True, metadata=about)
        save(folder / f"masks/a{k:02}.png", mask * 255)
    return pairs


FORMS = {"different sizes": of_sizes, "Cellpose": cellpose, "nnU-Net": nnunet, "Fiji": fiji, "OME": ome}
WARNINGS = {"Cellpose": {"other-values", "stretched"}, "OME": {"stretched"}}  # objects by number, and 16 bits
LINE = "--dataset set --base-filters 2 --num-epochs 1 --seed 1 --run-dir r"


def file_of(folder, name, number):
    """Returns an image to give to ``infer``, with its position among the file's pages."""
    if name == "Fiji":
        return folder / "images/s1.tif", number - 6
    every = sorted(path for path in folder.rglob("*") if path.suffix in (".png", ".tif"))
    return [path for path in every if not any(word in str(path) for word in ("mask", "labels"))][number], 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_scores_of_twelve_images_are_those_of_scikit_learn(run, succeeds, tmp_path, name):
    pairs = FORMS[name](tmp_path / "set")
    assert verified("set", ".")[:2] == (set(), WARNINGS.get(name, set()))
    code, _, err = run("train", "unet", *LINE.split())
    assert code == 0, err
    printed = json.loads(succeeds("evaluate", "r", "--contact-sheet", "worst.png", "--json")[0])
    first = 9 if name == "nnU-Net" else 10
    truths, predicted, losses = [], [], []
    files = {number: file_of(tmp_path / "set", name, number) for number in range(first, 12)}
    paths = sorted({path for path, _ in files.values()})
    succeeds("infer", "r", *paths, "--output", "o", "--threshold", "0.5")
    for number, (path, page) in files.items():
        (probability,) = (tmp_path / "o").rglob(f"{path.stem}-probability.tif")
        truth = pairs[number][1]
        share = tifffile.imread(probability).reshape(-1, *truth.shape)[page].astype(np.float64)
        known = truth >= 0
        truths.append(truth[known])
        predicted.append((share > 0.5)[known])
        losses.append(-np.log(np.where(truth == 1, share, 1 - share)[known]))
    truth, guess = np.concatenate(truths), np.concatenate(predicted)
    measured, segmentation = printed["measured"], printed["segmentation"]
    np.testing.assert_array_equal(printed["confusion_matrix"], metrics.confusion_matrix(truth, guess))
    assert measured["accuracy"] == pytest.approx(metrics.accuracy_score(truth, guess), abs=1e-9)
    assert measured["loss"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)
    for label in (0, 1):
        assert segmentation["dice"][label] == pytest.approx(
            metrics.f1_score(truth, guess, pos_label=label), abs=1e-4
        )
        score = metrics.jaccard_score(truth, guess, pos_label=label)
        assert segmentation["iou"][label] == pytest.approx(score, abs=1e-9)
    assert len(segmentation["images"]) == 12 - first


def opened(folder):
    return open_dataset(choose_dataset(str(folder), Path("."), home="", task="segmentation"), ReaderOptions())


def test_images_of_different_sizes_are_kept_as_they_are(tmp_path):
    pairs = of_sizes(tmp_path)
    source = opened(tmp_path)
    assert source.info.image_shape == (None, None, 1) and isinstance(source.train, MaskedExamples)
    for k, (image, mask) in enumerate(zip(source.train.images, source.train.masks)):
        np.testing.assert_array_equal(image[..., 0], pairs[k][0])
        np.testing.assert_array_equal(mask, pairs[k][1])
    values = np.concatenate([image.ravel() for image, _ in pairs[:10]])
    np.testing.assert_allclose(
        [source.info.mean[0], source.info.std[0]], [values.mean(), values.std()], atol=1e-5
    )
    fold = select_fold(source, 4, 2)
    assert fold.held_out == (3, 4, 5) and fold.eval.names == tuple(f"images/a{k:02}.tif" for k in (3, 4, 5))
    for image, k in zip(fold.train.images, (0, 1, 2, 6, 7)):
        np.testing.assert_array_equal(image[..., 0], pairs[k][0])
    assert fold.info.mean == channel_statistics(fold.train.pixels)[0]


def test_a_set_too_large_for_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    of_sizes(tmp_path)
    decoded, read = [], imagemasks.pages

    def pages(files, *rest):
        decoded.append(files)
        return read(files, *rest)

    monkeypatch.setattr(imagemasks, "pages", pages)
    # All masks take less than that, and images and masks together more.
    for allowed, num_decoded, words in ((90_000, 1, "up to 90x110"), (290_000, 13, "up to 120x84")):
        monkeypatch.setattr("ipucnn.datasets.limits.available_bytes", lambda: 2 * allowed)  # noqa: B023
        decoded.clear()
        check_raises(DataError, f"12 images and masks of {words} pixels needs", "memory", opened, tmp_path)
        assert len(decoded) == num_decoded


def test_files_have_different_numbers_of_pages(tmp_path, monkeypatch):
    first = [tissue(k, SIZES[0]) for k in range(6)]
    save(tmp_path / "images/a.tif", np.stack([image for image, _ in first]))
    save(tmp_path / "masks/a.tif", np.stack([mask for _, mask in first]) * np.uint8(255))
    for k in range(6):
        image, mask = tissue(6 + k, SIZES[0])
        save(tmp_path / f"images/b{k}.tif", image)
        save(tmp_path / f"masks/b{k}.png", mask * 255)
    # Images, masks and classes take 3 bytes a pixel.
    needed = 12 * 90 * 110 * 3
    monkeypatch.setattr("ipucnn.datasets.limits.available_bytes", lambda: 2 * needed)
    source = opened(tmp_path)
    assert len(source.train.images) + len(source.eval.images) == 12
    monkeypatch.setattr("ipucnn.datasets.limits.available_bytes", lambda: 2 * 12 * 90 * 110 - 2)
    check_raises(DataError, "at least 12 images and masks of up to 90x110 pixels", "", opened, tmp_path)


@pytest.mark.slow
def test_the_smallest_image_decides_the_size_of_patches(run, tmp_path):
    of_sizes(tmp_path / "set")
    code, _, err = run("train", "unet", *LINE.split(), "--dry-run")
    assert code == 0 and "the images are of 90x110 to 120x84 pixels" in err, err
    code, _, err = run("train", "unet", *LINE.split(), "--image-size", "284", "--dry-run")
    assert code == 3 and "the smallest images of imagemasks are 90 pixels high" in err, err
