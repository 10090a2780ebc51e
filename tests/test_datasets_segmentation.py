"""Volumes and pairs of images and masks: valid files are read, and invalid ones are refused."""

import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from support.data_sets import noise, open_pairs, save_pages, verified, write_pairs
from support.refusals import Refusal, check_raises, check_refused

from ipucnn.datasets import sorting
from ipucnn.datasets.base import ArrayExamples, fold_of_each, select_fold
from ipucnn.datasets.classes import in_order_of
from ipucnn.datasets.registry import ReaderOptions, choose_dataset, open_dataset
from ipucnn.datasets.segmentation import masks as masks_module
from ipucnn.datasets.segmentation.masks import check_no_objects
from ipucnn.datasets.segmentation.membranes import draw_tissue
from ipucnn.datasets.verification.verify import choose, verify
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.events import show
from ipucnn.runs.images.inputs import file_pages
from ipucnn.runs.images.outputs import MaskForm

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "isbi2012"


def make_slices(num=5, side=40, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, side, side)).astype(np.uint8)
    return images, np.where(images > 60, 255, 0).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    images, masks = make_slices()
    save_pages(tmp_path / "train-volume.tif", images)
    save_pages(tmp_path / "train-labels.tif", masks)
    return tmp_path


def test_the_last_fifth_is_held_out(folder):
    source = open_pairs("isbi2012", folder)
    images, masks = make_slices()
    assert (len(source.train), len(source.eval)) == (4, 1) and source.info.patchwise
    np.testing.assert_array_equal(np.stack(source.train.images)[..., 0], images[:4])
    np.testing.assert_array_equal(source.eval.masks, masks[4:] // 255)
    assert source.info.mean[0] == pytest.approx(images[:4].mean(), abs=1e-5)


def test_the_set_is_found_by_name_and_by_folder(folder):
    (folder / "isbi2012").mkdir()
    for name in ("train-volume.tif", "train-labels.tif"):
        (folder / name).rename(folder / "isbi2012" / name)
    for name, path in (("isbi2012", folder), ("ISBI-2012", folder / "isbi2012"), (None, folder)):
        choice = choose_dataset(name, path, home="isbi2012", task="segmentation")
        assert (choice.name, choice.location) == ("isbi2012", folder / "isbi2012")
    choice = choose_dataset(str(folder / "isbi2012"), Path("."), home="isbi2012", task="segmentation")
    assert choice.name == "isbi2012"


TRAIN = "train unet --dataset isbi2012 --dataset-path . --base-filters 1 --run-dir run"


def volume_of(make, stem="volume"):
    """Returns a function that replaces the images, or the labels, by ``make`` of the slices."""
    return lambda folder: save_pages(
        folder / f"train-{stem}.tif", make(make_slices()[0 if stem == "volume" else 1])
    )


def a_cut_page(folder):
    path = folder / "train-volume.tif"
    save_pages(path, make_slices()[0], compression="tiff_lzw")
    with Image.open(path) as volume:
        volume.seek(2)
        first = volume.tag_v2[273][0]
    data = bytearray(path.read_bytes())
    data[first : first + 60] = b"\xff" * 60
    path.write_bytes(bytes(data))


def one_slice(folder):
    for name, pages in zip(("train-volume.tif", "train-labels.tif"), make_slices(1)):
        save_pages(folder / name, pages)


BAD = {
    "4 pages, and its mask": volume_of(lambda images: images[:4]),
    "41x41": volume_of(lambda masks: make_slices(5, 41)[1], "labels"),
    "one value": volume_of(lambda masks: np.full_like(masks, 255), "labels"),
    "page 3 of 5": a_cut_page,
    "not an image": lambda f: (f / "train-volume.tif").write_bytes(b"II but no TIFF"),
    "no train-labels.tif": lambda f: (f / "train-labels.tif").unlink(),
    "one pair": one_slice,
}


@pytest.mark.parametrize("words", BAD)
def test_invalid_volumes_are_refused_and_nothing_is_written(folder, run, words):
    BAD[words](folder)
    check_refused(run, Refusal(f"{TRAIN} --image-size 204", words, code=3))


def test_unsuitable_sizes_are_refused(folder, run):
    check_refused(
        run,
        # The network predicts 68 pixels, a slice has 40.
        Refusal(f"{TRAIN} --image-size 252", "", "--image-size 220 or less", 3),
        Refusal(f"{TRAIN} --image-size 250", "", "236 or 252"),
    )


def make_pairs(folder, num=5, side=40, ending="png"):
    """Writes images and masks as images/K.* and masks/K.png; returns the arrays."""
    images, masks = make_slices(num, side)
    write_pairs(folder, zip(images, masks), ending)
    return images, masks


def test_pairs_are_matched_by_name(tmp_path):
    images, masks = make_pairs(tmp_path / "set", ending="tif")
    (tmp_path / "set" / "masks" / "3.png").rename(tmp_path / "set" / "masks" / "3_mask.png")
    (tmp_path / "set" / "masks" / "1.png").unlink()
    choice = choose_dataset(str(tmp_path / "set"), Path("."), home="isbi2012", task="segmentation")
    assert choice.name == "imagemasks"
    source = open_dataset(choice, ReaderOptions(allow_partial=True))
    np.testing.assert_array_equal(np.stack(source.train.images)[..., 0], images[[0, 2, 3]])
    np.testing.assert_array_equal(source.eval.masks, masks[[4]] // 255)
    assert source.train.names == ("images/0.tif", "images/2.tif", "images/3.tif")
    assert source.eval.names == ("images/4.tif",)
    assert select_fold(source, 4, 1).eval.names == source.train.names[:1]
    assert "1.tif" in source.info.warnings[0]


def test_damaged_files_of_pairs_are_left_out_on_request(tmp_path, run):
    folder = tmp_path / "set"
    make_pairs(folder, num=8)
    found = choose_dataset(str(folder), Path("."), home="", task="segmentation")
    whole = open_dataset(found)
    for side, name in (("images", "1"), ("masks", "4"), ("images", "2")):
        path = folder / side / f"{name}.png"
        path.write_bytes(path.read_bytes()[:60])
    check_raises(DataError, "4.png cannot be decoded", "", open_dataset, found)
    source = open_dataset(found, ReaderOptions(skip_damaged=True))
    kept = [0, 3, 5, 6]
    for images, expected in (
        (source.train.images, [whole.train.images[k] for k in kept]),
        (source.eval.images, whole.eval.images),
    ):
        assert [image.tolist() for image in images] == [image.tolist() for image in expected]
    assert source.train.names == tuple(f"images/{k}.png" for k in kept) and source.info.num_eval == 1
    (line,) = source.info.warnings
    assert line.startswith("3 damaged pairs left out") and all(f"/{k}.png" in line for k in (1, 2, 4))
    assert [Path(path).name for path in source.info.left_out] == ["4.png", "1.png", "2.png"]
    (folder / "images" / "7.png").write_bytes(b"")
    check_refused(
        run,
        Refusal(
            ["train", "unet", "--dataset", folder, "--skip-damaged"],
            "no image for evaluation can be read",
            "give other",
            3,
        ),
    )


OTHERS = ("0.png", "1.png", "b.png", "c.png")


def test_each_damaged_page_of_a_stack_is_counted_and_named(tmp_path):
    images, masks = make_pairs(tmp_path / "files", num=10)
    folder = tmp_path / "set"
    stacks = {side: folder / side / "a.tif" for side in ("images", "masks")}
    for side, pages in (("images", images), ("masks", masks)):
        stacks[side].parent.mkdir(parents=True)
        first, *others = [Image.fromarray(page) for page in pages]
        first.save(str(stacks[side]), save_all=True, append_images=others, compression="tiff_deflate")
    whole = stacks["images"].read_bytes()
    with Image.open(str(stacks["images"])) as file:
        for page in (1, 3, 5):
            file.seek(page)
            at = file.tag_v2[273][0]
            damaged = stacks["images"].read_bytes()
            stacks["images"].write_bytes(damaged[:at] + b"\xff" * 8 + damaged[at + 8 :])
    found = choose_dataset(str(folder), Path("."), home="", task="segmentation")
    source = open_dataset(found, ReaderOptions(skip_damaged=True))
    assert len(source.train) + len(source.eval) == 7
    (line,) = source.info.warnings
    assert line.startswith("3 damaged pairs left out") and "page 4 of 10" in line
    assert source.info.left_out == tuple(f"images/a.tif, page {page}" for page in (2, 4, 6))
    stacks["images"].write_bytes(b"no image")
    for side, pages in (("images", images), ("masks", masks)):
        for name in OTHERS:
            Image.fromarray(pages[0]).save(str(folder / side / name))
    (line,) = open_pairs("imagemasks", folder, skip_damaged=True).info.warnings
    assert line.startswith("10 damaged pairs left out")
    stacks["images"].write_bytes(whole)
    stacks["masks"].write_bytes(b"no image")
    (line,) = open_pairs("imagemasks", folder, skip_damaged=True).info.warnings
    assert line.startswith("the unread part of 1 file left out")
    for name in OTHERS:
        (folder / "masks" / name).unlink()
        (folder / "images" / name).unlink()
    check_raises(
        DataError,
        "no image for training can be read",
        "",
        open_pairs,
        "imagemasks",
        folder,
        skip_damaged=True,
    )


def test_what_is_not_damaged_is_never_left_out_of_pairs(tmp_path):
    folder = tmp_path / "set"
    make_pairs(folder, num=6)
    call = (open_pairs, "imagemasks", folder)
    check_raises(DataError, "--max-image-pixels 100", "", *call, max_pixels=100, skip_damaged=True)
    shutil.copy(str(folder / "images" / "1.png"), str(folder / "images" / "0.jpg"))
    check_raises(DataError, "are both called 0", "keep one of them", *call, skip_damaged=True)


def test_an_unpaired_file_is_refused_without_allow_partial(tmp_path, run):
    folder = tmp_path / "set"
    make_pairs(folder)
    (folder / "masks" / "1.png").unlink()
    choice = choose_dataset("imagemasks", folder, home="isbi2012", task="segmentation")
    check_raises(DataError, "1.png", "--allow-partial", open_dataset, choice)
    assert "1.png" in open_dataset(choice, ReaderOptions(allow_partial=True)).info.warnings[0]
    verify_it = ("verify-dataset", "imagemasks", "--dataset-path", folder)
    for more, expected in (((), 3), (("--allow-partial",), 0)):
        code, out, err = run(*verify_it, *more)
        assert code == expected and "1.png" in out, err


@pytest.mark.parametrize(
    "image, masks, ending",
    [
        ("{} (1).png", ["{} (1)_mask.png", "{} (1)_mask_1.png"], "{} (1)_mask.png"),
        (
            "images/{}.png",
            ["masks/{}_mask_1.png", "masks/{}_mask_2.png", "masks/{}_mask-3.png"],
            "masks/{}_mask.png",
        ),
        ("images/{}_img.png", ["masks/{}.png", "masks/{}_label.png"], "masks/{}.png"),
        # Names that are the ending of a mask and a number themselves.
        ("seg_{}.png", ["seg_{}_mask.png", "seg_{}_mask_1.png"], "seg_{}_mask.png"),
        ("images/label_{}.png", ["masks/label_{}.png", "masks/label_{}_mask.png"], "masks/label_{}.png"),
    ],
)
def test_an_image_with_several_masks_is_refused_and_the_hint_joins_them(tmp_path, run, image, masks, ending):
    folder, names = tmp_path / "my set", "0123"

    def write(name, pixels):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)

    for k, name in enumerate(names):
        write(image.format(name), noise(k, 12, 12))
        write(ending.format(name), np.eye(12) * 255)
    (folder / ending.format("1")).unlink()
    for k, mask in enumerate(masks):
        write(mask.format("1"), (np.arange(144).reshape(12, 12) % 5 == k) * 255)
    call = (open_pairs, "imagemasks", folder)
    error = check_raises(DataError, f"has {len(masks)} masks: ", "--allow-partial", *call)
    assert str(folder / image.format("1")) in error.message
    source = open_pairs("imagemasks", folder, allow_partial=True)
    assert len(source.train) + len(source.eval) == 3
    (line,) = source.info.warnings
    assert f"left out {1 + len(masks)} files (an image and its several masks: " in line
    for more, expected in (((), 3), (("--allow-partial",), 0)):
        code, out, err = run("verify-dataset", "imagemasks", "--dataset-path", folder, *more)
        assert code == expected and "several-masks" in out, err
    words = shlex.split(re.search(r"python -m ipucnn\.datasets\.sorting .*?(?=; then)", error.hint)[0])
    before = sorted(folder.rglob("*"))
    assert sorting.main(words[3:]) == 0 and sorted(folder.rglob("*")) == before
    folder = tmp_path / "my set-pairs"
    source = open_pairs("imagemasks", folder)
    assert len(source.train) + len(source.eval) == 4 and not source.info.unused
    joined = (np.arange(144).reshape(12, 12) % 5 < len(masks)).astype(np.uint8)
    np.testing.assert_array_equal(source.train.masks[1], joined)


@pytest.mark.parametrize(
    "image, mask, renamed",
    [
        ("img_00.tif", "IMG_00.png", "img_00.png"),
        ("Slice 7.png", "slice-7-MASKS.png", "Slice 7.png"),
        ("cell_img_3.png", "cell_mask_3.png", "cell_img_3.png"),
        ("a1.png", "b1.png", None),
    ],
)
@pytest.mark.parametrize("has_pairs", [False, True])
def test_masks_with_similar_names_are_suggested(tmp_path, image, mask, renamed, has_pairs):
    write_pairs(tmp_path, [(np.eye(8, dtype=np.uint8),) * 2] * (2 if has_pairs else 1))
    for part, name in (("images", image), ("masks", mask)):
        (tmp_path / part / "0.png").rename(tmp_path / part / name)
    hint = check_raises(DataError, "", "", open_pairs, "imagemasks", tmp_path).hint
    assert (f"rename masks/{mask} to masks/{renamed}" in hint) == (renamed is not None)
    verification = show(verify(choose("imagemasks", tmp_path)))
    named = [example for finding in verification.findings for example in finding.examples]
    assert any(f"rename masks/{mask} to" in example for example in named) == (renamed is not None)


def test_training_and_inference_accept_the_same_images(tmp_path):
    bits = Image.fromarray(np.eye(8, dtype=np.uint8) * 255).convert("1")
    greys = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) % 2).convert("P")
    greys.putpalette([0, 0, 0, 90, 90, 90])
    colours = greys.copy()
    colours.putpalette([0, 0, 0, 90, 91, 90])
    plain = Image.fromarray(np.full((8, 8), 7, np.uint8))
    pictures = {"bits": bits, "greys": greys, "colours": colours, "plain": plain, "rgb": plain.convert("RGB"),
                "alpha": plain.convert("LA"), "float": plain.convert("F"), "wide": plain.convert("I")}  # fmt: skip
    pictures["hidden"] = Image.fromarray(np.full((8, 8, 4), 9, np.uint8))
    pictures["deep"] = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 60)
    pictures["print"] = plain.convert("CMYK")
    taken = {}
    for name, picture in pictures.items():
        folder = write_pairs(tmp_path / name, [(picture, np.eye(8, dtype=np.uint8))] * 2, "tif")
        try:
            (image, *_) = open_pairs("imagemasks", folder).train.images
        except DataError as error:
            for channels in (1, 3):
                with pytest.raises(DataError, match=r"CMYK|transparency") as refused:
                    file_pages(str(folder / "images" / "0.tif"), channels)
                assert refused.value.message == error.message
            continue
        taken[name] = image.shape[-1]
        (page,) = file_pages(str(folder / "images" / "0.tif"), image.shape[-1]).pages()
        np.testing.assert_array_equal(image, page)
        path = str(folder / "images" / "0.tif")
        check_raises(DataError, "the network takes", "", file_pages, path, 4 - image.shape[-1])
    greys = ("bits", "greys", "plain", "alpha", "float", "wide", "deep")
    assert taken == {**dict.fromkeys(greys, 1), "colours": 3, "rgb": 3}


def several_classes(folder, values, num=5, side=12):
    """Writes pairs whose masks have the values, which may be colours; returns the classes."""
    random = np.random.RandomState(1)
    classes = random.randint(0, len(values), (num, side, side))
    write_pairs(folder, [(noise(k, side, side), np.array(values)[mask]) for k, mask in enumerate(classes)])
    return classes


def test_masks_of_several_classes(tmp_path):
    grey = np.array([0, 1, 2, 3], np.uint8)
    classes = several_classes(tmp_path / "numbers", grey)
    source = open_pairs("imagemasks", tmp_path / "numbers")
    assert source.info.class_names == ("background", "class 1", "class 2", "class 3")
    np.testing.assert_array_equal(source.train.masks, classes[:4])
    np.testing.assert_array_equal(source.eval.masks, classes[4:])
    tables = {
        "gaps": (np.array([0, 90, 255], np.uint8), "0 sky\n\n90 old tree\n# nothing\n255 soil\n"),
        "deep": (np.array([700, 0, 60000], np.uint16), "700 sky\n0 old tree\n60000 soil\n"),
        "colours": (
            np.array([[0, 0, 0], [255, 0, 0], [1, 2, 3]], np.uint8), "0 0 0 sky\n255 0 0 old tree\n1 2 3 soil",
        ),
    }  # fmt: skip
    for name, (values, table) in tables.items():
        classes = several_classes(tmp_path / name, values)
        check_raises(DataError, "", "classes.txt", open_pairs, "imagemasks", tmp_path / name)
        (tmp_path / name / "classes.txt").write_text(table)
        source = open_pairs("imagemasks", tmp_path / name)
        assert source.info.class_names == ("sky", "old tree", "soil") and source.info.num_classes == 3
        np.testing.assert_array_equal(source.train.masks, classes[:4])
    (tmp_path / "gaps" / "classes.txt").write_text("0 sky\n255 soil\n")
    with pytest.raises(DataError, match=r"0.png has \d+ pixels of no class; the first one has the value 90"):
        open_pairs("imagemasks", tmp_path / "gaps")


def test_the_class_called_background_is_class_0_and_another_first_class_is_named(tmp_path):
    classes = several_classes(tmp_path, np.array([40, 7, 200], np.uint8))
    table = tmp_path / "classes.txt"
    table.write_text("40 stroma\n7 tumour\n200 Background\n")
    source = open_pairs("imagemasks", tmp_path)
    assert source.info.class_names == ("Background", "stroma", "tumour")
    assert source.info.mask_values == (200, 40, 7)
    np.testing.assert_array_equal(source.train.masks, np.array([1, 2, 0])[classes[:4]])
    assert not [line for line in source.info.warnings if "class 0" in line]
    table.write_text("40 stroma\n7 tumour\n200 fat\n")
    line = "stroma is class 0: mean scores and pictures leave it out, as the background"
    assert line in open_pairs("imagemasks", tmp_path).info.warnings
    table.write_text("40 nucleus\n* rest\n")
    line = "nucleus is class 0: scores and pictures of rest leave it out, as the background"
    assert line in open_pairs("imagemasks", tmp_path).info.warnings


@pytest.mark.parametrize(
    "values, names, counted",
    [
        ([1, 2], ("class 1", "class 2"), (0, 1)),  # ilastik
        ([0, 7, 255], ("background", "class 7"), (0, 1, -1)),  # Cityscapes
        ([0, 128, 255], ("background", "class 128", "class 255"), (0, 1, 2)),
        ([[250, 50, 83], [0, 0, 0], [51, 221, 255]], ("background", "class 1", "class 2"), (2, 0, 1)),  # CVAT
    ],
)
def test_the_table_that_a_hint_writes_is_read(tmp_path, values, names, counted):
    drawn = several_classes(tmp_path / "my set", np.array(values, np.uint8))
    with pytest.raises(DataError) as raised:
        open_pairs("imagemasks", tmp_path / "my set")
    subprocess.run("printf" + raised.value.hint.partition("printf")[2], shell=True, check=True)
    source = open_pairs("imagemasks", tmp_path / "my set")
    assert source.info.class_names == names
    np.testing.assert_array_equal(source.train.masks, np.array(counted)[drawn[:4]])


CVAT = """# label:color_rgb:parts:actions
tumour:250,50,83::
background:0,0,0::
not there:1,2,3::
stroma, loose:51,221,255::
"""


@pytest.mark.parametrize("has_palette", [False, True])
def test_the_table_of_cvat_names_colours(tmp_path, has_palette):
    """A palette's entries are in no order of the table's."""
    folder = tmp_path / "set"
    colours = np.array([[51, 221, 255], [0, 0, 0], [250, 50, 83]], np.uint8)
    drawn = several_classes(folder, colours)
    if has_palette:
        for path in (folder / "masks").iterdir():
            indexed = Image.open(path).quantize(8)
            assert (np.asarray(indexed.convert("RGB")) == np.asarray(Image.open(path))).all()
            indexed.save(path)
    (folder / "labelmap.txt").write_text(CVAT)
    source = open_pairs("imagemasks", folder)
    assert source.info.class_names == ("background", "tumour", "not there", "stroma, loose")
    np.testing.assert_array_equal(source.train.masks, np.array([3, 0, 1])[drawn[:4]])
    line = f"the classes are those of {folder}/labelmap.txt: background, tumour, not there, stroma, loose"
    assert line in source.info.warnings
    assert not [line for line in source.info.warnings if "left out" in line or "not read" in line]
    (folder / "classes.txt").write_text("51 221 255 mine\n0 0 0 background\n250 50 83 other\n")
    assert open_pairs("imagemasks", folder).info.class_names == ("background", "mine", "other")


def roboflow(folder, table="Pixel Value, Class\n0, background\n2, cell\n1, nucleus\n"):
    """Writes parts with image, mask and table in one folder; returns the classes of the masks for training."""
    values = np.random.default_rng(0).integers(0, 3, (2, 4, 40, 40)).astype(np.uint8)
    for part, masks in zip(("train", "valid"), values):
        (folder / part).mkdir(parents=True)
        (folder / part / "_classes.csv").write_text(table)
        for k, mask in enumerate(masks):
            Image.fromarray(noise(k, 40, 40, 3)).save(folder / part / f"{k}_png.rf.{k}af.jpg")
            Image.fromarray(mask).save(folder / part / f"{k}_png.rf.{k}af_mask.png")
    return np.array([0, 2, 1])[values[0]]


def test_the_table_of_roboflow_names_values(tmp_path):
    classes = roboflow(tmp_path / "set")
    source = open_pairs("imagemasks", tmp_path / "set")
    assert source.info.class_names == ("background", "cell", "nucleus")
    np.testing.assert_array_equal(source.train.masks, classes)
    tables = " and ".join(f"{tmp_path}/set/{part}/_classes.csv" for part in ("train", "valid"))
    assert f"the classes of all parts are those of {tables}" in source.info.warnings


@pytest.mark.parametrize(
    "text", [b"filename, cat, dog\n0_png.rf.0af.jpg, 1, 0\n", b"\xff\x00" * 9, b'"' + b"a" * 200000, b""]
)
def test_files_of_those_names_that_are_no_tables_of_masks_say_nothing(tmp_path, text):
    """Roboflow's sets of images with several labels have a ``_classes.csv``, and TensorFlow's a ``labelmap.txt``."""
    roboflow(tmp_path / "set")
    for path in [*(tmp_path / "set").rglob("_classes.csv")]:
        path.write_bytes(text)
    (tmp_path / "set" / "labelmap.txt").write_bytes(text)
    assert open_pairs("imagemasks", tmp_path / "set").info.class_names == ("background", "class 1", "class 2")


def test_a_table_of_the_set_comes_before_those_of_its_parts(tmp_path):
    roboflow(tmp_path / "set")
    (tmp_path / "set" / "classes.txt").write_text("0 background\n* cell\n")
    assert open_pairs("imagemasks", tmp_path / "set").info.class_names == ("background", "cell")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("labelmap.txt", "a:0,0,0::\nb:300,0,0::\n", "line 2: 'b:300,0,0::' is no class and its value"),
        ("labelmap.txt", "a:0,0,0::\nb\n", "line 2: 'b' is no class and its value"),
        ("labelmap.txt", "a:0,0,0::\nb:0,0,0::\n", "has the value 0 0 0 twice"),
        ("_classes.csv", "Pixel Value,Class\n0,a\nred,b\n", "line 3: 'red,b' is no class and its value"),
        ("_classes.csv", "Pixel Value,Class\n0,a\n1,b,c\n", "line 3: '1,b,c' is no class and its value"),
        ("_classes.csv", "Pixel Value,Class\n0,a\n", "has 1 class; a mask has from 2 to 255"),
        ("_classes.csv", "Pixel Value,Class\n0,a\n1,a\n", "has the name a twice"),
    ],
)
def test_tables_of_other_programs_are_checked(tmp_path, name, text, error):
    """The table of ours comes before a wrong one."""
    folder = tmp_path / "set"
    several_classes(folder, np.array([0, 255], np.uint8))
    (folder / name).write_text(text)
    check_raises(DataError, error, f"{folder}/classes.txt", open_pairs, "imagemasks", folder)
    (folder / "classes.txt").write_text("0 a\n255 b\n")
    assert open_pairs("imagemasks", folder).info.class_names == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text"),
    [("labelmap.txt", "a:0,0,0::\nb:1,1,1::\n"), ("_classes.csv", 'Pixel Value,Class\n0,a\n1,"b\n')],
)
def test_values_that_a_table_of_another_program_lacks_are_named_in_ours(tmp_path, name, text):
    """One line in a table of ours would replace the whole of theirs."""
    folder = tmp_path / "set"
    several_classes(folder, np.array([0, 255], np.uint8))
    (folder / name).write_text(text)
    error = check_raises(DataError, "of no class; the first one", "", open_pairs, "imagemasks", folder)
    assert (
        error.hint
        == f"correct {name}, or the mask, or name all values in DIR/classes.txt: '0 background', ..."
    )


def test_masks_whose_objects_have_several_numbers_may_be_of_several_programs(tmp_path):
    """Each mask has 0 and one other value: the first command of the hint makes all of these values one class."""
    folder = tmp_path / "set"
    several_classes(folder, np.array([0, 255], np.uint8))
    for path in [*(folder / "masks").iterdir()][::2]:
        Image.fromarray(np.asarray(Image.open(path)) // 255).save(path)
    error = check_raises(DataError, "no mask has two of them beside 0", "", open_pairs, "imagemasks", folder)
    assert "ignore" not in error.hint
    command = error.hint.partition("programs: ")[2].partition("; or ")[0]
    subprocess.run(["sh", "-c", command], check=True)
    info = open_pairs("imagemasks", folder).info
    assert info.class_names == ("background", "object")


def test_masks_with_black_and_with_white_as_zero_are_said_to_differ(tmp_path):
    """The stored numbers count, whichever of the two a viewer shows as white."""
    for number, inverted in enumerate([(), (0, 2), range(5)]):
        folder = tmp_path / str(number)
        several_classes(folder, np.array([0, 255], np.uint8))
        for k in range(5):
            (mask,) = (folder / "masks").glob(f"{k}.*")
            stored = np.asarray(Image.open(mask))
            mask.unlink()
            tifffile.imwrite(
                mask.with_suffix(".tif"), stored, photometric="miniswhite" if k in inverted else "minisblack"
            )
        lines = [line for line in open_pairs("imagemasks", folder).info.warnings if "white as 0" in line]
        expected = [[], ["2 of 5 masks have white as 0"], ["the masks have white as 0"]]
        assert [line.partition(",")[0] for line in lines] == expected[number]


def test_values_and_colours_of_masks_move_with_their_classes(tmp_path):
    """A network that starts from weights of another order writes the masks of the set."""
    several_classes(tmp_path, np.array([[0, 0, 0], [255, 0, 0], [0, 0, 255]], np.uint8))
    (tmp_path / "classes.txt").write_text("0 0 0 sky\n255 0 0 tumour\n0 0 255 stroma\n")
    source = open_pairs("imagemasks", tmp_path)
    moved = in_order_of(source, ("stroma", "sky", "tumour"))
    assert moved.info.class_colours == ((0, 0, 255), (0, 0, 0), (255, 0, 0))
    form = MaskForm(moved.info.mask_values, moved.info.class_colours)
    stored = [form.stored(mask, 3) for mask in moved.train.masks]
    unmoved = MaskForm(source.info.mask_values, source.info.class_colours)
    np.testing.assert_array_equal(stored, [unmoved.stored(mask, 3) for mask in source.train.masks])
    several_classes(tmp_path / "grey", np.array([0, 9], np.uint8))
    (tmp_path / "grey" / "classes.txt").write_text("0 sky\n9 cell\n")
    assert in_order_of(open_pairs("imagemasks", tmp_path / "grey"), ("cell", "sky")).info.mask_values == (
        9,
        0,
    )


def test_palette_masks_match_tables_of_colours_and_of_numbers(tmp_path):
    classes = several_classes(tmp_path / "set", np.array([0, 1, 2], np.uint8))
    for i, mask in enumerate(classes):
        indexed = Image.fromarray(mask.astype(np.uint8)).convert("P")
        indexed.putpalette([0, 0, 0, 255, 0, 0, 1, 2, 3])
        indexed.save(tmp_path / "set" / "masks" / f"{i}.png")
    table_file = tmp_path / "set" / "classes.txt"
    for table in (None, "0 sky\n1 tree\n2 soil", "0 0 0 sky\n255 0 0 tree\n1 2 3 soil"):
        if table is not None:
            table_file.write_text(table)
        source = open_pairs("imagemasks", tmp_path / "set")
        np.testing.assert_array_equal(source.train.masks, classes[:4])
        # Pictures show the classes in the colours of the masks, whatever form the table has.
        assert source.info.class_colours == ((0, 0, 0), (255, 0, 0), (1, 2, 3))
        assert not verified("imagemasks", tmp_path / "set")[0]
    table_file.write_text("0 0 0 sky\n9 9 9 tree")
    error = "of no class; the first one has the value 255 0 0"
    check_raises(DataError, error, "", open_pairs, "imagemasks", tmp_path / "set")


@pytest.mark.parametrize("first", ["empty", "another colour of class 2", "one class"])
def test_the_colour_of_a_class_is_that_of_a_mask_that_has_it(tmp_path, first):
    classes = several_classes(tmp_path, np.array([0, 1, 2], np.uint8))
    (tmp_path / "classes.txt").write_text("0 sky\n1 tree\n2 soil\n")
    classes[0] = {"empty": 0 * classes[0], "one class": 0 * classes[0] + 1}.get(first, classes[0] % 2)
    for i, mask in enumerate(classes):
        indexed = Image.fromarray(mask.astype(np.uint8)).convert("P")
        indexed.putpalette([9, 9, 9, 255, 0, 0, 1, 2, 3] if i else [9, 9, 9, 255, 0, 0, 9, 9, 9])
        indexed.save(tmp_path / "masks" / f"{i}.png")
    source = open_pairs("imagemasks", tmp_path)
    assert source.info.class_colours == ((9, 9, 9), (255, 0, 0), (1, 2, 3))


def put(name, array, **options):
    """Returns a function that replaces the image of the same stem, whatever its suffix."""

    def change(folder):
        for path in (folder / name).parent.glob(Path(name).stem + ".*"):
            path.unlink()
        Image.fromarray(array).save(folder / name, **options)

    return change


NOISY = np.arange(1600, dtype=np.uint8).reshape(40, 40)
EYE = np.eye(40)
BAD_PAIRS = [
    ("have together", put("masks/1.png", np.where(EYE, 128, 0).astype(np.uint8))),
    ("has grey of floating-point 32 bits", put("masks/1.tif", EYE.astype(np.float32))),
    ("not finite numbers", put("images/1.tif", np.full((40, 40), np.nan, np.float32))),
    ("have together 4 different values (0, 1, 2, 255)", put("masks/1.png", EYE.astype(np.uint8) + 1)),
    (
        "1.png has 2 pages",
        lambda folder: save_pages(folder / "images/1.png", [NOISY, NOISY], format="TIFF"),
    ),
]


@pytest.mark.parametrize("words, change", BAD_PAIRS)
def test_invalid_pairs_are_refused(tmp_path, words, change):
    make_pairs(tmp_path / "set")
    change(tmp_path / "set")
    check_raises(DataError, words, "", open_pairs, "imagemasks", tmp_path / "set")


@pytest.mark.parametrize(
    ("num", "words"), [(30, "number single objects"), (11, "11 different values (0, 1, 2, 3, 4, ...)")]
)
def test_object_numbers_are_not_classes(tmp_path, num, words):
    several_classes(tmp_path / "set", np.arange(num, dtype=np.uint8))
    check_raises(DataError, words, "'* object'", open_pairs, "imagemasks", tmp_path / "set")


@pytest.mark.parametrize(
    ("lines", "classes"),
    [
        (("0 background", "* cell"), {0: 0, 3: 1, 7: 1, 300: 1}),
        (("* cell", "0 sky"), {0: 1, 3: 0, 7: 0, 300: 0}),
        (("0 background", "7 debris", "* cell"), {0: 0, 3: 2, 7: 1, 300: 2}),
        (("0 background", "* cell", "7 ignore"), {0: 0, 3: 1, 7: -1, 300: 1}),
        (("0 background", "3 cell", "* ignore"), {0: 0, 3: 1, 7: -1, 300: -1}),
        (
            ("0 0 0 background", "0 0 9 wall", "* cell"),
            {(0, 0, 0): 0, (0, 0, 9): 1, (9, 0, 0): 2, (9, 9, 9): 2},
        ),
    ],
)
def test_a_star_in_the_table_stands_for_all_other_values(tmp_path, lines, classes):
    values = list(classes)
    drawn = several_classes(tmp_path, np.array(values, np.uint16 if 300 in values else np.uint8))
    (tmp_path / "classes.txt").write_text("\n".join(lines))
    source = open_pairs("imagemasks", tmp_path)
    names = [line.split()[-1] for line in lines if "ignore" not in line]
    assert source.info.class_names == tuple(names)
    expected = np.array(list(classes.values()))[drawn]
    np.testing.assert_array_equal([*source.train.masks, *source.eval.masks], expected)
    assert not verified("imagemasks", tmp_path)[0]


def test_pairs_and_volumes_are_for_segmentation(folder):
    make_pairs(folder / "set")
    home = {"home": "mnist", "task": "classification"}
    for name in (str(folder), str(folder / "set"), "isbi2012", "imagemasks"):
        check_raises(ConfigurationError, "for segmentation", "", choose_dataset, name, folder, **home)


def test_folds_are_consecutive_slices():
    images, masks = make_slices(30, 8)
    folds = fold_of_each(ArrayExamples(images[..., None], masks // 255), 5)
    assert folds.tolist() == [i // 6 + 1 for i in range(30)]


def test_a_fold_is_a_data_set_with_another_split(folder):
    source = open_pairs("isbi2012", folder)
    images, _ = make_slices()
    chosen = select_fold(source, 5, 2)
    np.testing.assert_array_equal(np.stack(chosen.eval.images)[..., 0], images[[1]])
    np.testing.assert_array_equal(np.stack(chosen.train.images)[..., 0], images[[0, 2, 3, 4]])
    assert chosen.held_out == (1,) and (chosen.info.num_train, chosen.info.num_eval) == (4, 1)
    assert chosen.info.mean[0] == pytest.approx(images[[0, 2, 3, 4]].mean(), abs=1e-5)
    check_raises(ConfigurationError, "has 5 examples", "--kfold 5", select_fold, source, 6, 1)


@pytest.fixture(params=["made", "real"])
def membranes(request, tmp_path):
    """Thirty slices of tissue with their membranes; the real ones, if they are here."""
    if request.param == "real":
        if not REAL.is_dir():
            pytest.skip("no ../shared/data/isbi2012 beside the repository")
        return REAL
    images, cells = zip(*(draw_tissue(96, 96, np.random.RandomState(seed)) for seed in range(30)))
    save_pages(tmp_path / "train-volume.tif", images)
    save_pages(tmp_path / "train-labels.tif", [np.uint8(255 * mask) for mask in cells])
    return tmp_path


def test_thirty_slices_of_membranes(membranes):
    source = open_pairs("isbi2012", membranes)
    assert (len(source.train), len(source.eval)) == (24, 6)
    masks, images = np.stack(source.train.masks), np.stack(source.train.images)[..., 0]
    assert 0.72 < masks.mean() < 0.82  # cells are white
    assert images[masks == 0].mean() + 25 < images[masks == 1].mean()  # membranes are dark
    fifth = select_fold(source, 5, 5)
    assert fifth.held_out == tuple(range(24, 30))
    np.testing.assert_array_equal(fifth.eval.images, source.eval.images)


@pytest.mark.parametrize("form", ["JPEG", "smoothed"])
def test_masks_with_grey_edges_are_refused_and_read_once_they_have_two_values(tmp_path, form):
    y, x = np.mgrid[:48, :48]
    whole = [np.hypot(y - 24, x - 20) < radius for radius in (8, 11, 14)]
    pairs = []
    for mask in whole:
        grey = Image.fromarray(np.uint8(255 * mask))
        if form == "JPEG":
            saved = io.BytesIO()
            grey.save(saved, form, quality=75)
            grey = Image.open(saved)
        else:
            grey = grey.resize((96, 96), Image.BICUBIC).resize((48, 48), Image.BILINEAR)
        pairs.append((np.uint8(90 * mask + y), np.asarray(grey)))
    for count in (2, len(pairs)):
        write_pairs(tmp_path / f"grey{count}", pairs[:count])
        error = check_raises(
            DataError, "as masks with grey edges have", "255 where a value is above 127", open_pairs, "imagemasks",
            tmp_path / f"grey{count}",
        )  # fmt: skip
    command, _, name = error.hint.partition("sorting ")[2].partition("; then pass --dataset ")
    assert sorting.main(shlex.split(command)) == 0
    source = open_pairs("imagemasks", Path(name.partition(";")[0]))
    assert sum(int(part.labels.sum()) for part in (source.train, source.eval)) == sum(m.sum() for m in whole)


@pytest.mark.parametrize(
    "masks",
    [
        [[0], [0, 1], [0, 255]],
        [[0], [0, 1], [0, 2]],
        [[0, 1, 255], [0, 5, 255], [0, 1, 2, 255]],
        [[0, 128], [0, 128, 255]],
        [[*range(30), 255], [*range(40), 255]],
        [[*range(250)], [*range(240)]],
    ],
)
def test_objects_and_classes_are_not_taken_for_grey_edges(masks):
    with pytest.raises(DataError, match="as masks that number single objects"):
        check_no_objects(masks, "they")


def test_masks_that_number_objects_are_refused_unless_a_table_makes_them_a_class(tmp_path):
    random = np.random.RandomState(5)
    masks = [np.kron(random.randint(0, k + 2, (4, 4)), np.ones((5, 5), int)) for k in range(1, 5)]
    for k, mask in enumerate(masks):
        mask[0, : k + 3] = np.arange(k + 3)
    write_pairs(tmp_path, [(mask.astype(np.uint8), mask.astype(np.uint16)) for mask in masks])
    check_raises(
        DataError, "masks that number single objects", "'* object'", open_pairs, "imagemasks", tmp_path
    )
    assert verified("imagemasks", tmp_path)[0] == {"mask-values"}
    (tmp_path / "classes.txt").write_text("0 background\n* object\n")
    source = open_pairs("imagemasks", tmp_path)
    assert source.info.class_names == ("background", "object") and source.info.mask_values == ()
    np.testing.assert_array_equal(
        np.concatenate([source.train.masks, source.eval.masks]), np.stack(masks) > 0
    )
    assert not verified("imagemasks", tmp_path)[0]


def test_images_of_more_than_8_bits_are_counted(tmp_path):
    masks = [np.eye(16, dtype=np.uint8) for _ in range(6)]
    images = [noise(k, 16, 16).astype(np.uint16 if k % 2 else np.uint8) for k in range(6)]
    write_pairs(tmp_path, zip(images, masks), ending="tif")
    line = "3 images have more than 8 bits: each one's own dark and bright become 0 and 255"
    assert line in open_pairs("imagemasks", tmp_path).info.warnings


# -- tables of parts, and what a line takes ---------------------------------------------------------------------------


def draw_parts(folder, values=(255, 0)):
    """Writes two pairs for training and two for evaluation; three quarters of each mask have the first value."""
    mask = np.where(np.arange(24)[:, np.newaxis] < 18, *np.uint8(values)) * np.ones((1, 24), np.uint8)
    for number, part in enumerate(("train", "val")):
        write_pairs(folder / part, [(noise(10 * number + k, 24, 24), mask) for k in range(2)])
    return folder


TABLE = "0 nucleus\n255 background\n"


@pytest.mark.parametrize(
    "places", [("",), ("train", "val"), ("train",), ("val",), ("", "train", "val")], ids=str
)
def test_a_table_of_classes_may_lie_in_the_set_or_in_its_parts(tmp_path, places):
    folder = draw_parts(tmp_path / "set")
    assert open_pairs("imagemasks", folder).info.class_names == ("background", "foreground")
    for place in places:
        (folder / place / "classes.txt").write_text(TABLE)
    source = open_pairs("imagemasks", folder)
    assert source.info.class_names == ("background", "nucleus")
    assert np.mean([mask == 0 for mask in source.train.masks]) == 0.75
    said = [line for line in source.info.warnings if "the classes of all parts are those of" in line]
    assert len(said) == ("" not in places) and not source.info.unused
    assert verified(folder, ".")[:2] == (set(), set())
    # A part alone is the same set.
    if places == ("train", "val"):
        assert open_pairs("imagemasks", folder / "val").info.class_names == ("background", "nucleus")


def test_tables_of_parts_that_differ_are_refused(tmp_path):
    folder = draw_parts(tmp_path / "set")
    (folder / "train/classes.txt").write_text(TABLE)
    (folder / "val/classes.txt").write_text("0 background\n255 nucleus\n")
    words, hint = "train/classes.txt and ", "keep one table for all parts"
    check_raises(DataError, words, hint, open_pairs, "imagemasks", folder)
    assert verified(folder, ".")[0] == {"unusable"}


def test_lists_that_are_not_read_are_named(tmp_path):
    folder = write_pairs(tmp_path, [(noise(k, 9, 9), np.uint8(noise(k, 9, 9) > 99)) for k in range(3)])
    for name in ("Classes.TXT", "labels.json", "README.md", "train.py", "._classes.txt"):
        (folder / name).write_text("0 cell\n1 background\n")
    (unused,) = open_pairs("imagemasks", folder).info.unused
    assert (unused.count, unused.examples) == (2, ("Classes.TXT", "labels.json"))
    assert verified(folder, ".")[1] == {"passed-over"}


def smoothed(k):
    """Returns a mask of squares as JPEG stores it."""
    data = io.BytesIO()
    mask = np.zeros((40, 40), np.uint8)
    mask[5 + k : 21, 9:30] = 255
    Image.fromarray(mask).save(data, "JPEG", quality=60)
    return np.array(Image.open(data))


@pytest.mark.parametrize(
    ("make", "table", "said", "is_edge"),
    [
        (smoothed, "0 background\n* cell\n", "(1 to 255) that no other line of classes.txt names are cell", True),
        (lambda k: np.repeat(np.uint8([range(k + 5)] * 9), 3, axis=1), "0 background\n* cell\n",
         "7 values of masks (1 to 7) that no other line", False),
        (lambda k: np.uint8([[[k, 9, x] for x in range(20)], [[0, 0, 0]] * 20]), "0 0 0 background\n* cell\n",
         "80 colours of masks that no other line of classes.txt names are cell", True),
        (lambda k: np.uint8([[0, 7]] * 9), "0 background\n* cell\n", "", False),
        (lambda k: np.uint8([[0, 7, 9]] * 9), "0 background\n7 a\n9 b\n", "", False),
    ],
    ids=["JPEG", "objects", "colours", "one value", "no such line"],
)  # fmt: skip
def test_the_values_that_a_line_takes_are_said(tmp_path, make, table, said, is_edge):
    masks = [make(k) for k in range(4)]
    folder = write_pairs(tmp_path, [(noise(k, *mask.shape[:2]), mask) for k, mask in enumerate(masks)])
    (folder / "classes.txt").write_text(table)
    lines = [line for line in open_pairs("imagemasks", folder).info.warnings if "no other line" in line]
    assert len(lines) == bool(said) and all(said in line for line in lines)
    assert any("smoothed edges" in line for line in lines) == is_edge
    assert ("other-values" in verified(folder, ".")[1]) == bool(said)


@pytest.mark.slow
def test_arrays_with_masks_are_seen_as_files_are(tmp_path, report):
    """Patches as large as fit, elastic augmentation, and the same first samples."""
    folder = draw_parts(tmp_path / "set", (0, 255))
    (tmp_path / "data.py").write_text(
        "import numpy as np\nfrom PIL import Image\n\n\ndef load():\n    def part(name):\n"
        "        return [np.stack([np.array(Image.open(f'set/{name}/{kind}/{k}.png')) for k in range(2)])\n"
        "                for kind in ('images', 'masks')]\n\n    return part('train'), part('val')\n"
    )
    files = open_pairs("imagemasks", folder)
    words = ("--base-filters", 1, "--global-batch-size", 1, "--steps-per-execution", 1, "--dry-run")
    of_files, of_arrays = (
        report("train", "unet", "--dataset", name, *words) for name in ("set", "data.py:load")
    )
    assert of_files["input_shape"] == of_arrays["input_shape"] == [204, 204, 1]
    arrays = open_dataset(choose_dataset("data.py:load", ".", home="isbi2012", task="segmentation"))
    assert arrays.info.patchwise and arrays.info.augmentation == files.info.augmentation == "elastic"
    for one, other in ((files.train, arrays.train), (files.eval, arrays.eval)):
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(one.masks, other.masks)
    assert any("mirrored, turned by any angle" in line for line in of_arrays["notes"])
    found = report("verify-dataset", "data.py:load")
    assert (found["task"], found["findings"]) == ("segmentation", [])


def test_numbers_beyond_a_short_palette_count_and_have_no_colour(tmp_path):
    """As masks of Pascal VOC that Pillow saves with 21 colours, and 255 for pixels that do not count."""
    images, masks = make_slices()
    write_pairs(
        tmp_path, [(image, np.where(mask, 1, 0).astype(np.uint8)) for image, mask in zip(images, masks)]
    )
    for path in (tmp_path / "masks").iterdir():
        numbers = np.array(Image.open(path))
        numbers[:2] = 255
        mask = Image.fromarray(numbers)
        mask.putpalette([0, 0, 0, *np.arange(60).tolist()])
        mask.save(path)
    table = tmp_path / "classes.txt"
    table.write_text("0 background\n1 cell\n255 ignore\n")
    source = open_pairs("imagemasks", tmp_path)
    assert {*np.unique(source.train.labels)} == {-1, 0, 1}
    table.write_text("0 0 0 background\n0 1 2 cell\n")
    check_raises(
        DataError, "has the number 255, and a palette of 21 colours", "", open_pairs, "imagemasks", tmp_path
    )


def test_a_border_of_255_that_is_a_class_is_said():
    border = masks_module.MaskClasses(("background", "cell", "border"), (0, 1, 255))
    assert masks_module.void_classes(border) == ["border"]
    for values in ((0, 1, 2), (0, 128, 255)):
        assert masks_module.void_classes(border._replace(values=values)) == []
