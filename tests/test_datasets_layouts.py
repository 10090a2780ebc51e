"""Which data set is in a folder: folders as people, systems and tools make them."""

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms
from support.data_sets import noise, verified
from support.refusals import check_raises

from ipucnn.datasets import damaged, sorting
from ipucnn.datasets.damaged import refuse_damaged
from ipucnn.datasets.formats import MASK, SYSTEM, is_image_name, part_named
from ipucnn.datasets.registry import ReaderOptions, choose_dataset, open_dataset
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.runs.images.inputs import file_pages

_seeds = itertools.count()


def draw(folder, *names):
    """Draws images of noise below a folder; "NAME*3" draws three in the folder NAME."""
    for name in names:
        place, _, count = name.partition("*")
        for path in [f"{place}/{k}.png" for k in range(int(count))] if count else [place]:
            put(folder / path, noise(next(_seeds), 16, 16))
    return folder


def draw_pairs(folder, *names, image="images", mask="masks", ending=".png", number=range(3)):
    for place, k in itertools.product(names or ("",), number):
        draw(folder / place / image, f"{k}.png")
        put(folder / place / mask / f"{k}{ending}", np.uint8(255 * np.eye(16)))
    return folder


def put(path, *pages):
    """Writes an image file of one page or more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, np.stack(pages)) if len(pages) > 1 else Image.fromarray(pages[0]).save(path)


def choose(folder, task="classification"):
    return choose_dataset(str(folder), Path("."), home="", task=task)


def opened(folder, task="classification", **options):
    return open_dataset(choose(folder, task), ReaderOptions(**options))


def images_of(folder):
    return [
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if is_image_name(name)
    ]


FOLDERS = {
    "parts": ("train/ant*3", "train/bee*3", "val/ant*2", "val/bee*2"),
    "loose files": (
        "train/ant*3",
        "train/bee*3",
        "val/ant*2",
        "val/bee*2",
        "train/9.png",
        "9.png",
        "val/8.png",
    ),
    "subfolders": ("train/ant*3", "train/ant/more*2", "train/bee/a/b*3", "val/ant*2", "val/bee*2"),
    "other folders": ("train/ant*3", "train/bee*3", "val/ant*2", "val/bee*2", "test/ant*2", "wasp*4"),
    "two for evaluation": (
        "Train/ant*3",
        "Train/bee*3",
        "Testing/ant*2",
        "validation_set/ant*1",
        "validation_set/bee*1",
    ),
    "undivided": ("ant*4", "bee/2023*4", "bee*2", "9.png"),
    "masks": (
        *("ant*4", "bee*4", "bee/more/2*1"),
        *("ant/0_mask.png", "ant/1_mask_1.png", "ant/1-Masks.png", "bee/3_seg.png"),
    ),
    "systems": (
        "ant*4",
        "bee*4",
        "__MACOSX/ant/._0.png",
        "bee/@eaDir/0.png/thumb.jpg.png",
        "ant/.ipynb_checkpoints/0.png",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_image_is_read_or_counted(tmp_path, kind, succeeds):
    folder = draw(tmp_path / "set", *FOLDERS[kind])
    (folder / "notes").mkdir()
    source = opened(folder)
    read = [*source.train.paths, *source.eval.paths]
    unused = {one.reason: one.count for one in source.info.unused}
    others = sum(count for reason, count in unused.items() if reason != "a folder without images")
    assert len(set(read)) == len(read) and len(read) + others == len(images_of(folder))
    (line,) = [line for line in source.info.warnings if "left out" in line] or [""]
    assert all(f"{one.count:,} file" in line and one.examples[0] in line for one in source.info.unused)
    _, _, report = verified(folder, ".")
    passed = sum(finding.count for finding in report.findings if finding.code == "passed-over")
    assert passed == sum(unused.values())


def test_images_in_folders_of_a_class_belong_to_it(tmp_path, succeeds):
    folder = draw(tmp_path, *FOLDERS["subfolders"])
    source = opened(folder)
    assert source.info.class_names == ("ant", "bee") and not source.info.unused
    assert np.bincount(source.train.labels).tolist() == [5, 3]


@pytest.mark.parametrize(
    "name, part",
    [
        *(
            (name, "train")
            for name in ("train", "Train", "training", "TrainingSet", "train_set", "train_images", "trainval")
        ),
        *(
            (name, "validation")
            for name in ("val", "valid", "Validation", "validation_set", "val-data", "dev")
        ),
        *((name, "test") for name in ("test", "Testing", "test_set")),
        *((name, None) for name in ("trains", "class-test", "tested", "evalyn", "contest", "set")),
    ],
)
def test_names_of_parts(name, part):
    assert part_named(name) == part


@pytest.mark.parametrize(
    "train, evaluation, unused",
    [
        ("train", "val", None),
        ("Train", "Val", None),
        ("training", "testing", None),
        ("train", "valid", "test"),
    ],
)
def test_the_first_line_says_what_serves_for_what(tmp_path, train, evaluation, unused):
    parts = filter(None, (train, evaluation, unused))
    draw(tmp_path, *(f"{part}/{name}*2" for part in parts for name in ("ant", "bee")))
    message = choose(tmp_path).message
    assert f": training on {train}/, evaluation on {evaluation}/" in message
    assert message.endswith(f", nothing on {unused}/") == (unused is not None)
    source = opened(tmp_path)
    assert {Path(path).parts[-3] for path in source.eval.paths} == {evaluation}
    assert message == f"data set imagefolder from {tmp_path}: {source.info.choice}"
    assert verified(tmp_path, ".")[2].to_dict()["choice"] == source.info.choice
    message = choose(draw_pairs(tmp_path / "pairs", train, evaluation), "segmentation").message
    assert f": training on {train}/, evaluation on {evaluation}/" in message


# -- refusals, with hints that work when they are typed -------------------------------------------------------

REFUSED = {
    "images in test/ beside classes": (("ok*4", "nok*4", "test*3"), "without class folders", (2, 8)),
    "images in val/ beside classes": (("ok*4", "nok*4", "Val*3"), "without class folders", (2, 8)),
    "new images beside classes": (("ok*4", "nok*4", "predict*3"), "without class folders", (2, 8)),
    "evaluation beside classes": (
        ("cat*4", "dog*4", "validation_set/cat*2", "validation_set/dog*2"),
        "lies beside class folders",
        (2, 12),
    ),
    "two for training": (("train/a*2", "train/b*2", "Training/a*1", "val/a*2"), "Training and train", (1, 3)),
    "two for evaluation": (("train/a*2", "train/b*2", "val/a*1", "valid/a*2"), "val and valid", (2, 5)),
    "no part for evaluation": (("train/a*3", "train/b*3"), "lacks train/ or val/", (2, 6)),
    "a flat part for evaluation": (("train/a*3", "train/b*3", "test*4"), "lacks train/ or val/", (2, 6)),
    "class folders in images/": (
        ("images/ant*3", "images/bee*3"),
        "images has class folders in it, and there are no masks beside it",
        (2, 6),
    ),
    "parts with classes in images/": (
        (*(f"images/{part}/{name}*3" for part in ("train", "val") for name in ("ant", "bee")),),
        "images has class folders in it",
        (2, 12),
    ),
    "parts by a word of their names": (
        (
            *(f"seg_train/seg_train/{name}*3" for name in "ab"),
            *(f"seg_test/seg_test/{name}*2" for name in "ab"),
            "seg_pred*2",
        ),
        "are named like parts of a data set",
        (2, 10),
    ),
    "pieces of a folder of images": (
        ("images_001/images*3", "images_002/images*3"),
        "are named like pieces of one folder of images",
        (2, 6),
    ),
    "the set again in a class": (
        ("cells/a*3", "cells/b*3", "a*3", "b*3"),
        "cells has the classes a and b in it again",
        (2, 6),
    ),
    "the set again in a folder of a class": (
        (*(f"{part}/{name}*2" for part in ("train", "train/cells/set", "val") for name in "ab"),),
        "cells has the classes a and b in it again",
        (2, 8),
    ),
    "classes a folder too deep": (
        (*(f"{part}/{part}/{name}*2" for part in ("training", "testing") for name in "ab"),),
        "which the training part lacks",
        (2, 8),
    ),
    "the set again in the training part": (
        (*(f"{part}/{name}*2" for part in ("train", "train/set", "val") for name in "ab"),),
        "set has the classes a and b in it again",
        (2, 8),
    ),
    "parts in a class": (
        ("cat/train/a*2", "cat/train/b*2", "cat/test/a*2", "dog/train/a*2", "dog/test/a*2"),
        "has parts of a data set in it",
        (2, 6),
    ),
}


def typed(hint, folder):
    """Runs the first commands of a hint, and returns the data set that it says to pass."""
    command = re.search(r"(mkdir|mv) [^;]*", hint)
    if command is not None:
        subprocess.run(command[0], shell=True, check=True)
    dataset = re.search(r"--dataset ([^;]*)", hint)
    return folder if dataset is None else shlex.split(dataset[1])[0]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hint_about_folders_works_when_it_is_typed(tmp_path, kind, run):
    names, words, (num_classes, num_images) = REFUSED[kind]
    folder = draw(tmp_path / "my set", *names)
    error = check_raises(DataError, words, "", opened, folder)
    assert run("verify-dataset", folder)[0] == 3
    source = opened(typed(error.hint, folder))
    assert source.info.num_classes == num_classes
    assert source.info.num_train + source.info.num_eval == num_images


@pytest.mark.parametrize(
    "names",
    [
        ("cars_train*3", "cars_test*3"),
        ("train2017*3", "val2017*3", "test2017*3"),
        ("asl_train/asl_train*3", "asl_test/asl_test*3"),
        ("stage1_train/a*1", "stage1_train/b*1", "stage1_test*2"),
        ("train_cat*2", "train_dog*2", "test_cat*2", "test_dog*2"),
        ("HAM_images_part_1*2", "HAM_images_part_2*2", "ham_images_part_1*2"),
        ("fold1*2", "fold2*2", "fold10*2"),
    ],
)
def test_folders_that_are_named_like_parts_are_no_classes(tmp_path, names, run):
    error = check_raises(DataError, " named like", "/CLASS/*.jpg", opened, draw(tmp_path, *names))
    assert "not like classes" in error.message or "without class folders" in error.message
    assert (
        run("verify-dataset", tmp_path)[0]
        == run("train", "lenet", "--dataset", tmp_path, "--dry-run")[0]
        == 3
    )


@pytest.mark.parametrize(
    "names",
    [
        ("class1", "class2", "class3"),
        ("0", "1", "10"),
        ("test_tube", "beaker"),
        ("part_1", "part_2", "whole"),
        ("steam train", "tram"),
    ],
)
def test_names_with_numbers_and_words_of_parts_may_be_classes(tmp_path, names):
    assert set(opened(draw(tmp_path, *(f"{name}*2" for name in names))).info.class_names) == set(names)


def test_masks_beside_images_are_no_images_of_a_class(tmp_path):
    paths = [*(source := opened(draw(tmp_path, *FOLDERS["masks"]))).train.paths, *source.eval.paths]
    assert {os.path.relpath(path, tmp_path) for path in paths} == {
        *(f"{name}/{k}.png" for name in ("ant", "bee") for k in range(4)),
        "bee/more/2/0.png",
    }


def test_folders_inside_class_folders_are_named(tmp_path):
    draw(tmp_path / "a", "ant*4", "bee*4")
    assert not any("inside class folders" in line for line in opened(tmp_path / "a").info.warnings)
    draw(
        tmp_path / "b",
        "train/ant/1*2",
        "train/ant/2*2",
        "train/bee/3*2",
        "train/bee/4*2",
        "val/ant*1",
        "val/bee*1",
    )
    (line,) = [line for line in opened(tmp_path / "b").info.warnings if "inside class folders" in line]
    assert "4 folders" in line and "(train/ant/1, train/ant/2, train/bee/3, ...)" in line
    assert "inner-folder" not in verified(tmp_path / "a", ".")[1]
    (found,) = [one for one in verified(tmp_path / "b", ".")[2].findings if one.code == "inner-folder"]
    assert found.examples == ("train/ant/1", "train/ant/2", "train/bee/3", "train/bee/4")


def test_a_data_set_of_one_class_is_not_trained_on(tmp_path, run):
    folder = draw(tmp_path / "set", *(f"{part}/all/{name}*3" for part in ("train", "val") for name in "ab"))
    code, _, err = run("train", "lenet", "--dataset", folder, "--dry-run")
    assert code == 3 and "has one class, all: there is nothing to learn" in err
    (hint,) = [line for line in err.splitlines() if line.startswith("hint:")]
    subprocess.run(hint[hint.index("mv ") :], shell=True, check=True)
    assert opened(folder).info.class_names == ("a", "b")


@pytest.mark.parametrize(
    "first, second",
    [
        ("fold1", "fold2"),
        ("part1", "part2"),
        ("split_0", "split_1"),
        ("batch1", "batch2"),
        ("2024-05-01", "2024-05-02"),
    ],
)
def test_folders_with_the_same_folders_in_them_may_be_parts_or_classes(tmp_path, first, second, run):
    names, folder = (
        (*(f"{part}/{name}*3" for part in (first, second) for name in ("a", "b", "c")),),
        tmp_path / "s",
    )
    hint = check_raises(
        DataError, f"{first} may be a part", "if it is a class", opened, draw(folder, *names)
    ).hint
    assert run("verify-dataset", folder)[0] == run("train", "lenet", "--dataset", folder, "--dry-run")[0] == 3
    part, both, a_class = hint.split("; ")
    source = opened(shlex.split(part)[-1])
    assert source.info.class_names == ("a", "b", "c") and source.info.num_train == 6
    shutil.copytree(folder, tmp_path / "copy")
    subprocess.run(both.split(": ", 1)[1].split(", then pass")[0], shell=True, check=True)
    source = opened(shlex.split(both)[-1])
    assert source.info.class_names == ("a", "b", "c") and (len(source.train), len(source.eval)) == (9, 9)
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    subprocess.run(a_class.split(": ", 1)[1], shell=True, check=True)
    source = opened(folder)
    assert source.info.class_names == (first, second) and source.info.num_train + source.info.num_eval == 18


@pytest.mark.parametrize(
    "names",
    [
        ("ant/day*3", "ant/night*3", "bee/day*3"),
        ("ant/2023/x*2", "ant/2024/x*2", "bee/2023/x*2", "bee/2024/x*2"),
        ("train/fold1/a*2", "train/fold1/b*2", "val/fold1/a*2"),
    ],
)
def test_folders_in_classes_that_cannot_be_classes_are_read(tmp_path, names):
    assert not any("same folders" in line for line in opened(draw(tmp_path, *names)).info.warnings)


def test_folds_in_the_training_part_are_refused(tmp_path):
    draw(tmp_path, *(f"train/{fold}/{name}*2" for fold in "12" for name in "ab"), "val/a*1", "val/b*1")
    check_raises(DataError, "have the same folders in them, such as a and b", "--dataset", opened, tmp_path)


@pytest.mark.parametrize(
    "places", [("{side}",), ("{side}/train", "{side}/val"), ("train/{side}", "val/{side}")]
)
@pytest.mark.parametrize("model, task", [("lenet", "classification"), ("unet", "segmentation")])
def test_boxes_are_neither_classes_nor_masks(tmp_path, places, model, task, run):
    for place in places:
        labels = tmp_path / place.format(side="labels")
        labels.mkdir(parents=True)
        draw(tmp_path, f"{place.format(side='images')}*3")
        (labels / "0.txt").write_text("0 0.5 0.5 0.2 0.2")
    check_raises(DataError, "boxes are not trained on", "DIR/CLASS", opened, tmp_path, task)
    assert run("train", model, "--dataset", tmp_path, "--dry-run")[0] == 3


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_files_of_several_pages_or_frames_are_counted(tmp_path, skip_damaged, monkeypatch):
    draw(tmp_path, "ant*4", "bee*4")
    frames = [noise(k, 16, 16) for k in range(5)]
    put(tmp_path / "ant/stack.tif", *frames)
    put(tmp_path / "ant/page.tif", frames[0])
    first, *others = map(Image.fromarray, frames)
    for ending in ("gif", "webp"):
        first.save(tmp_path / f"bee/moving.{ending}", save_all=True, append_images=others)
        first.save(tmp_path / f"bee/still.{ending}")
    line = "3 files have several pages or frames: the first of each is used"
    source = opened(tmp_path, skip_damaged=skip_damaged)
    assert line in (source if skip_damaged else refuse_damaged(source)).info.warnings
    monkeypatch.setattr(damaged, "CHECKED_BYTES", 0)
    monkeypatch.setattr(damaged, "SAMPLED", 2)
    last = sorted(source.train.paths)[-1]
    put(Path(last).with_suffix(".tif"), *frames)
    os.replace(Path(last).with_suffix(".tif"), last)
    (line,) = [line for line in refuse_damaged(opened(tmp_path)).info.warnings if "the first of" in line]
    assert re.match(r"\d of 4 files that were opened, of 14, ha(s|ve) several pages", line)


def test_inks_and_profiles_that_are_not_applied_are_counted(tmp_path):
    draw(tmp_path, "ant*4", "bee*4")
    picture = Image.fromarray(noise(1, 16, 16, 3))
    picture.convert("CMYK").save(tmp_path / "ant/5.jpg")
    standard = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    other = standard.replace(b"sRGB", b"P3  ").replace("sRGB".encode("utf-16-be"), "P3  ".encode("utf-16-be"))
    for number, (profile, ending) in enumerate(
        [
            (standard, "jpg"),
            (standard, "png"),
            (other, "jpg"),
            (other, "png"),
            (other, "tif"),
            (other, "webp"),
        ]
    ):
        picture.save(tmp_path / f"bee/{number + 5}.{ending}", icc_profile=profile)
    warnings = refuse_damaged(opened(tmp_path)).info.warnings
    assert "1 file has four inks (CMYK): they become RGB without a profile of colours" in warnings
    assert "4 files have a colour profile (ICC) of other colours than sRGB's: it is not applied" in warnings
    _, found, survey = verified("imagefolder", tmp_path)
    assert {"colour-profile", "odd-mode"} <= found
    assert sum(finding.count for finding in survey.findings if finding.code == "colour-profile") == 4


def test_endings_that_are_no_images_are_the_reason(tmp_path, run):
    """Windows' browsers save JPEG as .jfif; other files are counted where no image is."""
    for number, name in enumerate(("ant", "bee")):
        for k in range(4):
            path = tmp_path / "saved" / name / f"{k}.jfif"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise(4 * number + k, 16, 16, 3)).save(path, format="JPEG")
            scan = tmp_path / "scans" / name / f"{k}.dcm"
            scan.parent.mkdir(parents=True, exist_ok=True)
            scan.write_bytes(b"DICM")
    (tmp_path / "scans" / "ant" / "list").write_text("")
    assert len(opened(tmp_path / "saved").train) + len(opened(tmp_path / "saved").eval) == 8
    assert verified("imagefolder", tmp_path / "saved")[:2] == (set(), set())
    assert "their endings are .dcm (8), none (1)" in run("verify-dataset", tmp_path / "scans")[2]
    code, _, err = run("train", "lenet", "--dataset", tmp_path / "scans", "--dry-run")
    assert code == 3
    assert "no file in it is named like an image; their endings are .dcm (8), none (1)" in err
    assert "FILE.py:FUNCTION" in err
    for k in range(4):
        scan = tmp_path / "saved" / "bee" / f"{k}.jfif"
        scan.rename(scan.with_suffix(".HEIC"))
    code, _, err = run("train", "lenet", "--dataset", tmp_path / "saved", "--dry-run")
    assert code == 3
    assert "no file in bee/ is named like an image; their endings are .heic (4)" in err


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_images_of_more_than_8_bits_are_counted(tmp_path, skip_damaged):
    """Each is stretched from its own darkest to its own brightest pixel, so brightness is lost."""
    draw(tmp_path, "ant*4", "bee*4")
    for name in ("ant/5.png", "bee/6.png", "bee/7.tif"):
        put(tmp_path / name, noise(1, 16, 16).astype(np.uint16) * 9)
    source = opened(tmp_path, skip_damaged=skip_damaged)
    line = "3 files have more than 8 bits: each one's own dark and bright become 0 and 255"
    assert line in (source if skip_damaged else refuse_damaged(source)).info.warnings


def spelt(tmp_path, monkeypatch):
    """Yields the folder "photos" as a user may type it, from the folder in which each spelling is right."""
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    photos, work = tmp_path / "photos", tmp_path / "work"
    for place, name in (
        (tmp_path, photos),
        (photos, "."),
        (tmp_path, "photos"),
        (tmp_path, "./photos/"),
        (work, "../photos"),
        (work, "../link"),
    ):
        monkeypatch.chdir(place)
        yield str(name)


def naively_held_out(label, names):
    """Returns the fifth of a class whose names have the least SHA-256."""
    keys = {hashlib.sha256(f"{label}/{name}".encode()).digest(): f"{label}/{name}" for name in names}
    return {keys[key] for key in sorted(keys)[: round(len(keys) / 5)]}


def test_files_of_class_folders_have_names_below_the_set_however_it_is_spelt(tmp_path, monkeypatch):
    photos = draw(tmp_path / "photos", "cat*20", "dog*20", "dog/deep*5", "__MACOSX/cat/0.png")
    (photos / "dog/0_mask.png").write_bytes((photos / "dog/0.png").read_bytes())
    (photos / "dog/notes.txt").write_text("x")
    (photos / "cat/0.png").write_bytes((photos / "dog/1.png").read_bytes())
    (photos / "cat/x.png").write_bytes(b"x")
    numbers = [f"{k}.png" for k in range(20)]
    dogs = [*numbers, *(f"deep/{k}.png" for k in range(5))]
    held_out = naively_held_out("cat", [*numbers, "x.png"]) | naively_held_out("dog", dogs)
    for folder in spelt(tmp_path, monkeypatch):
        info = opened(folder).info
        evaluation = opened(folder).eval
        assert {evaluation.name(k) for k in range(len(evaluation))} == held_out, folder
        unused = {name for one in info.unused for name in one.examples}
        assert unused == {"__MACOSX", "dog/0_mask.png", "dog/notes.txt"}, folder
        assert any("(dog/deep)" in warning for warning in info.warnings)
        found = {one.code: one.examples for one in verified("imagefolder", folder)[2].findings}
        assert found["unreadable"][0].startswith("cat/x.png: "), (folder, found)
        (conflict,) = found["conflict"]
        assert {*re.findall(r"\S+png", conflict)} == {"cat/0.png", "dog/1.png"}, (folder, conflict)
        assert {*found["passed-over"]} >= {f"dog/0_mask.png: {MASK}", f"__MACOSX: {SYSTEM}"}, (folder, found)
        left_out = opened(folder, skip_damaged=True).info.left_out
        assert left_out == ("cat/x.png",)


@pytest.mark.parametrize("parts", [(), ("train", "val")])
def test_images_and_masks_have_names_below_the_set_however_it_is_spelt(tmp_path, monkeypatch, parts):
    draw_pairs(tmp_path / "photos", *parts)
    place = "val/" if parts else ""
    draw(tmp_path / "photos", f"{place}images/7.png")
    draw(tmp_path / "photos", "loose.png")
    for folder in spelt(tmp_path, monkeypatch):
        source = opened(folder, "segmentation", allow_partial=True)
        assert source.eval.names[-1] == f"{place}images/2.png"
        unused = {name for one in source.info.unused for name in one.examples}
        assert unused == {f"{place}images/7.png", "loose.png"}, folder
        found = {one.code: one.examples for one in verified("imagemasks", folder)[2].findings}
        assert found["unpaired"] == (f"{place}images/7.png: without a partner",), folder
        (duplicate,) = [name for name in found["passed-over"] if "loose" in name]
        assert duplicate.startswith("loose.png: "), folder


def test_pairs_in_one_folder_have_names_below_it_however_it_is_spelt(tmp_path, monkeypatch):
    for k in range(3):
        draw(tmp_path / "photos", f"{k}.png")
        put(tmp_path / "photos" / f"{k}_mask.png", np.uint8(255 * np.eye(16)))
    for folder in spelt(tmp_path, monkeypatch):
        assert opened(folder, "segmentation").eval.names == ("2.png",), folder


def test_a_finding_about_a_set_names_the_whole_path_of_a_file_in_it(tmp_path, monkeypatch):
    draw_pairs(tmp_path / "photos")
    for k in range(3):
        put(tmp_path / f"photos/masks/{k}.png", noise(k, 16, 16, 3))
    for folder in spelt(tmp_path, monkeypatch):
        found = {(one.code, one.subset): one.examples for one in verified("imagemasks", folder)[2].findings}
        assert found["wrong-mode", "eval"][0].startswith("images/2.png: mask masks/2.png has colours")
        (text,) = found["wrong-mode", None]
        begin, path = text.split(" has colours")[0].rsplit(" ", 1)
        assert begin == "masks: mask" and Path(path) == Path(folder, "masks/0.png"), (folder, text)


@pytest.mark.parametrize(
    "values, odd",
    [
        ((1, 2), []),
        ((1, 2, 3), []),
        ((0, 1, 3), []),
        ((0, 255), ["images/3.png: mask of 128, 255, not mask of 255"]),
    ],
)
def test_masks_whose_values_are_refused_have_no_findings_of_what_they_would_show(tmp_path, values, odd):
    for k in range(10):
        draw(tmp_path, f"images/{k}.png")
        put(tmp_path / f"masks/{k}.png", np.random.RandomState(k).choice(values, (16, 16)).astype(np.uint8))
    if odd:
        put(tmp_path / "masks/3.png", np.uint8([[128, 255]] * 8).repeat(8, axis=1).repeat(2, axis=0))
    errors, warnings, report = verified("imagemasks", tmp_path, is_drawn=lambda position, total: True)
    assert (errors, warnings) == ({"mask-values"}, set())
    found = {one.subset: one.examples for one in report.findings}
    assert found.pop(None)[0].startswith("masks: have together ")
    assert [text for examples in found.values() for text in examples] == odd
    counts = dict(report.subsets[0].classes)
    assert bool(counts) == bool(odd) and ("foreground" in counts) == bool(odd)


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_transparent_images_are_counted_and_those_that_are_not_seen_are_damaged(tmp_path, skip_damaged):
    draw(tmp_path, "ant*4", "bee*4")
    colours, opacity = noise(1, 16, 16, 3), noise(2, 16, 16)
    for name, alpha in (("ant/5", opacity), ("bee/6", opacity), ("bee/7", opacity | 255)):
        put(tmp_path / f"{name}.png", np.dstack([colours, alpha]))
    source = opened(tmp_path, skip_damaged=skip_damaged)
    line = "2 files have transparent parts: white is laid under them"
    assert line in (source if skip_damaged else refuse_damaged(source)).info.warnings
    put(tmp_path / "bee/8.png", np.dstack([colours, opacity * 0]))
    assert "unreadable" in verified(tmp_path, ".")[0]
    if skip_damaged:
        assert opened(tmp_path, skip_damaged=True).info.left_out == ("bee/8.png",)
    else:
        words = "bee/8.png is transparent everywhere: it would be white"
        check_raises(DataError, words, "--skip-damaged", refuse_damaged, opened(tmp_path))


@pytest.mark.parametrize("others", [("Cat", "dog"), ("cat ", "dog"), ("dog", "CAT", " Cat")])
def test_classes_that_differ_in_case_or_blanks_are_named(tmp_path, others):
    draw(tmp_path, *(f"{name}*3" for name in ("cat", *others)))
    (line,) = [line for line in opened(tmp_path).info.warnings if "differ only in case or blanks" in line]
    alike = {name for name in ("cat", *others) if name != "dog"}
    assert alike == set(re.findall("'([^']*)'", line))
    assert "alike-classes" in verified(tmp_path, ".")[1]


def test_masks_beside_several_folders_of_images_are_a_class(tmp_path):
    names = ("cats", "gloves", "masks")
    draw(tmp_path / "parts", *(f"{part}/{name}*4" for part in ("train", "val") for name in names))
    assert opened(tmp_path / "parts").info.class_names == names
    hint = "class-masks"
    check_raises(
        DataError, "is named like a part", hint, opened, draw(tmp_path / "a", *(f"{n}*4" for n in names))
    )
    # Beside one folder they are the masks of its images, which have to be in images/.
    check_raises(
        ConfigurationError, "is for segmentation", "", opened, draw(tmp_path / "b", "raw*4", "masks*4")
    )


def test_a_class_that_is_called_like_a_part_is_renamed(tmp_path):
    folder = draw(tmp_path / "set", "bus*3", "car*3", "train*3")
    hint = check_raises(DataError, "train is named like a part", "rename the class", opened, folder).hint
    subprocess.run(hint.split("rename the class: ")[1], shell=True, check=True)
    assert opened(folder).info.class_names == ("bus", "car", "class-train")


@pytest.mark.parametrize(
    "names, part, classes, count",
    [
        (("train/cat.{}.png", "train/dog.{}.png", "test1/{}.png"), "train", ("cat", "dog"), 6),
        (("Train_2/a b c_1{}.png", "Train_2/a b_2{}.png", "test1/{}.png"), "Train_2", ("a b", "a b c"), 6),
        (
            ("train/cat ({}).png", "train/o'dog ({}).png", "test1/cat ({}).png", "test1/o'dog ({}).png"),
            "",
            ("cat", "o'dog"),
            12,
        ),
    ],
)
def test_images_whose_names_begin_with_their_class_are_sorted_if_the_hint_is_typed(
    tmp_path, names, part, classes, count
):
    folder = tmp_path / "my set"
    draw(folder, *(name.format(k) for name in names for k in range(6)))
    error = check_raises(DataError, "is named like a part", "into class folders", opened, folder)
    assert f"(2 classes: {', '.join(classes)})" in error.hint
    command, _, dataset = error.hint.partition(": python ")[2].partition("; then pass --dataset ")
    others = sum("test1/{}" in name for name in names) * 6 if part == "" else 0
    assert (f", without {others} other images: " in error.hint) == bool(others)
    before = sorted(folder.rglob("*"))
    assert sorting.main(shlex.split(command)[2:]) == 0
    target = (folder / part).with_name((part or folder.name) + "-classes")
    assert shlex.split(dataset) == [str(target)]
    assert before == [path for path in sorted(folder.rglob("*")) if target not in (path, *path.parents)]
    source = opened(target)
    assert source.info.class_names == classes
    assert np.bincount([*source.train.labels, *source.eval.labels]).tolist() == [count, count]


def test_a_part_with_a_number_is_no_class(tmp_path):
    folder = draw(tmp_path, "cat*3", "dog*3", "test1*3")
    check_raises(DataError, "test1 is named like a part", "rename the class", opened, folder)
    folder = draw(tmp_path / "set", "train2/cat*3", "train2/dog*3", "test1/cat*3", "test1/dog*3")
    assert "training on train2/, evaluation on test1/" in choose(folder).message


@pytest.mark.parametrize("parts", [("train", "test"), ("train", "val"), ("images", "annotations")])
def test_parts_without_class_folders_are_no_classes(tmp_path, parts, run):
    folder = draw(tmp_path, *(f"{part}*4" for part in parts))
    (folder / "labels.csv").write_text("file,label\n")
    if parts[0] == "train":
        check_raises(DataError, "without class folders", "/CLASS/", opened, folder)
    assert run("verify-dataset", folder)[0] == 3
    assert run("train", "cifar_resnet8", "--dataset", folder, "--dry-run")[0] in (2, 3)


# -- names that look equal ------------------------------------------------------------------------------------

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "K\u00e4se") for form in ("NFC", "NFD"))


def test_class_names_in_two_unicode_forms_are_one_class(tmp_path):
    folder = draw(tmp_path, f"train/{COMPOSED}*3", "train/Brot*3", f"val/{DECOMPOSED}*2", "val/Brot*1")
    source = opened(folder)
    assert source.info.class_names == ("Brot", COMPOSED)
    assert np.bincount(source.eval.labels).tolist() == [1, 2]
    assert verified(folder, ".")[0] == set()
    draw(folder, f"train/{DECOMPOSED}*1")
    check_raises(DataError, "equal names in two Unicode forms", "join them", opened, folder)


def test_a_class_in_other_case_is_suggested_and_not_assumed(tmp_path):
    folder = draw(tmp_path, "train/Cat*3", "train/Dog*3", "val/cat*2")
    error = check_raises(DataError, "which differs in case", "mv ", opened, folder)
    subprocess.run(re.search("mv .*", error.hint)[0], shell=True, check=True)
    assert opened(folder).info.num_eval == 2


def test_a_class_with_a_blank_more_is_suggested(tmp_path):
    folder = draw(tmp_path, "train/Cat*3", "train/Dog*3", "val/Dog *2")
    error = check_raises(
        DataError, "'Dog ', which the training part lacks; it has 'Dog'", "mv ", opened, folder
    )
    subprocess.run(re.search("mv .*", error.hint)[0], shell=True, check=True)
    assert opened(folder).info.num_eval == 2


def test_lists_of_classes_beside_the_parts_are_named(tmp_path):
    folder = draw(tmp_path, "train/a*3", "train/b*3", "val/a*2", "val/b*2")
    for name in ("classes.txt", "class_indices.json", "data.yaml"):
        (folder / name).write_text("b\na\n")
    (unused,) = opened(folder).info.unused
    assert unused.examples == ("class_indices.json", "classes.txt")


def test_file_names_in_two_unicode_forms_are_a_pair(tmp_path):
    folder = draw_pairs(tmp_path)
    for below, name in (("images", COMPOSED), ("masks", DECOMPOSED)):
        shutil.copy(folder / below / "0.png", folder / below / f"{name}.png")
    source = opened(folder, "segmentation")
    assert len(source.train) + len(source.eval) == 4 and not source.info.unused


def test_names_that_do_not_fit_are_shown_with_an_example_of_each_side(tmp_path):
    folder = draw_pairs(tmp_path)
    for path in (folder / "masks").iterdir():
        path.rename(path.with_name(f"truth {path.name}"))
    check_raises(DataError, "images/0.png and masks/truth 0.png", "", opened, folder, "segmentation")


# -- pairs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("_masks")
@pytest.mark.parametrize("ending", ["_mask", "_masks", "-label", "_labels", "_seg"])
def test_masks_may_have_an_ending(tmp_path, ending):
    folder = draw_pairs(tmp_path, image="Images", mask="MASKS", ending=f"{ending}.tif")
    draw_pairs(folder, image="Images", mask="MASKS", number=[7])
    source = opened(folder, "segmentation")
    assert len(source.train) + len(source.eval) == 4 and source.train.names[0] == "Images/0.png"


def test_two_masks_of_an_image_are_not_chosen_from(tmp_path):
    folder = draw_pairs(tmp_path, ending="_mask.png")
    draw_pairs(folder, ending="_seg.png", number=[1])
    check_raises(DataError, "has 2 masks: ", "", opened, folder, "segmentation")


def test_pairs_in_subfolders_are_read_and_other_images_counted(tmp_path):
    folder = draw_pairs(tmp_path, number=range(4))
    draw_pairs(folder, image="images/more", mask="masks/more", number=[9])
    draw(folder, "test/images*2", "overlay*3", "7.png", "images/.8.png")
    source = opened(folder, "segmentation")
    assert len(source.train) + len(source.eval) == 5
    assert [(one.reason, one.count) for one in source.info.unused] == [
        ("made by the system or a tool", 1),
        ("beside the folders that are read", 6),
    ]
    assert len(images_of(folder)) == 2 * 5 + 7
    assert "the last fifth of the pairs" in choose(folder, "segmentation").message


# -- what verify-dataset suggests -----------------------------------------------------------------------------


def test_a_mask_one_pixel_larger_has_the_hint_of_training(tmp_path):
    folder = draw_pairs(tmp_path, number=range(5))
    put(folder / "masks" / "2.png", np.uint8(255 * np.eye(17)))
    error = check_raises(DataError, "17x17", "cut or pad one of them", opened, folder, "segmentation")
    errors, _, report = verified(folder, ".")
    assert errors == {"wrong-shape"}
    assert [finding.hint for finding in report.findings if finding.code == "wrong-shape"] == [error.hint]


def test_a_mask_of_half_the_size_is_enlarged_if_the_hint_is_followed(tmp_path):
    folder = draw_pairs(tmp_path, number=range(5))
    mask = np.uint8(255 * (np.arange(64).reshape(8, 8) % 3 == 0))
    put(folder / "masks" / "2.png", mask)
    error = check_raises(DataError, "8x8", "without new values", opened, folder, "segmentation")
    (line,) = re.findall(r"mask\.repeat\(.*\)", error.hint)
    put(folder / "masks" / "2.png", eval(line, {"mask": mask}))
    assert opened(folder, "segmentation").info.num_train == 4


def test_build_records_says_what_it_leaves_out(tmp_path, succeeds):
    folder = draw(tmp_path / "set", *FOLDERS["loose files"])
    _, err = succeeds("build-records", folder, tmp_path / "records", "--shards", 1, "--validation-shards", 1)
    assert "left out 2 files (in no class folder: train/9.png, val/8.png)" in err


def test_build_records_refuses_a_class_that_the_list_of_classes_cannot_hold(tmp_path, run):
    folder = draw(
        tmp_path / "set", *(f"{part}/{name}*2" for part in ("train", "val") for name in ("#1", "ant"))
    )
    code, _, err = run("build-records", folder, tmp_path / "records", "--shards", 1, "--validation-shards", 1)
    assert code == 3 and "rename the folder" in err


@pytest.mark.parametrize("task, home", [("classification", "mnist"), ("segmentation", "isbi2012")])
def test_a_folder_that_nobody_named_is_not_walked(tmp_path, monkeypatch, task, home):
    """It may be the root of a disk, for example when a command is tried in a new shell."""
    for name in ("usr/lib/a", "home/user/b", "train/ant", "train/bee", "val/ant"):
        (tmp_path / name).mkdir(parents=True)
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(Path(folder)) or scandir(folder))
    choice = choose_dataset(None, tmp_path, home=home, task=task)
    assert choice.location is None
    assert {folder.relative_to(tmp_path).as_posix() for folder in listed} <= {".", "train", "val"} | {
        "usr", "home"
    }  # fmt: skip


# -- images and masks as other tools store them ---------------------------------------------------------------

TWELVE = [(noise(k, 20, 24), np.uint8(3 * (noise(100 + k, 20, 24) > 99))) for k in range(12)]


def in_layout(folder, image, mask, numbers=range(12), first=0):
    """Writes pairs under names with the number %s."""
    for k in numbers:
        put(folder / (image % (k - first)), TWELVE[k][0])
        put(folder / (mask % (k - first)), TWELVE[k][1])
    return folder


def nnunet(folder, **about):
    in_layout(folder, "imagesTr/case_%02d_0000.png", "labelsTr/case_%02d.png")
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def stacks(folder, *numbers):
    for k, of_file in enumerate(numbers):
        put(folder / f"images/{k}.tif", *(TWELVE[n][0] for n in of_file))
        put(folder / f"masks/{k}.tif", *(TWELVE[n][1] for n in of_file))
    return folder


LAYOUTS = {
    "folders": lambda f: in_layout(f, "IMAGES/a%02d.ome.tif", "Masks/a%02d.png"),
    "nnU-Net": lambda f: nnunet(f, channel_names={"0": "DAPI"}, labels={"background": 0, "cell": 3}),
    "nnU-Net 1": lambda f: nnunet(f, modality={"0": "EM"}, labels={"0": "background", "3": "cell"}),
    "one folder": lambda f: in_layout(f, "a%02d.tif", "a%02d_mask.png"),
    "cellpose": lambda f: in_layout(f, "a%02d.tif", "a%02d_cp_masks.png"),
    "cellpose's training": lambda f: in_layout(f, "a%02d_img.tif", "a%02d_masks.png"),
    "two endings": lambda f: in_layout(f, "a%02d-Image.tif", "a%02d_label.png"),
    "ISIC's masks": lambda f: in_layout(f, "images/a%02d.tif", "masks/a%02d_segmentation.png"),
    "GlaS": lambda f: in_layout(f, "a%02d.bmp", "a%02d_anno.bmp"),
    "endings in two folders": lambda f: in_layout(f, "img/a%02d_img.tif", "gt/a%02d_mask.png"),
    "ome": lambda f: in_layout(f, "a%02d.ome.tif", "a%02d_Label.tif"),
    "a stack": lambda f: stacks(f, range(12)),
    "stacks and images": lambda f: stacks(f, range(5), [5], range(6, 12)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twelve_pairs_are_the_same_in_each_layout(tmp_path, layout):
    source = opened(LAYOUTS[layout](tmp_path), "segmentation")
    assert (len(source.train), len(source.eval)) == (10, 2)
    for examples, pairs in ((source.train, TWELVE[:10]), (source.eval, TWELVE[10:])):
        for image, labels, (pixels, mask) in zip(examples.images, examples.masks, pairs):
            np.testing.assert_array_equal(image[..., 0], pixels)
            np.testing.assert_array_equal(labels, mask // 3)
    if "nnU" in layout:
        assert source.info.class_names == ("background", "cell")
    assert not source.info.unused and len(set(source.train.names + source.eval.names)) == 12
    errors, warnings, report = verified(tmp_path, ".")
    assert not errors and not warnings and [subset.samples for subset in report.subsets] == [10, 2]


SIDES = [
    *(("image", "label"), ("images", "labels"), ("img", "gt"), ("imgs", "masks"), ("Input", "Target")),
    *(("images", "ground_truth"), ("Images", "Segmentation")),
]


@pytest.mark.parametrize("image, mask", SIDES)
@pytest.mark.parametrize("parts", [(), ("train",), ("train", "val"), ("inside",)])
def test_folders_of_images_and_of_masks_have_other_names_and_the_first_line_says_so(
    tmp_path, image, mask, parts, run
):
    folder = tmp_path / "set"
    if parts == ("inside",):
        for part, number in (("train", range(4)), ("val", range(2))):
            draw_pairs(folder, image=f"{image}/{part}", mask=f"{mask}/{part}", number=number)
    else:
        draw_pairs(folder, *parts, image=image, mask=mask, number=range(4))
    if parts == ("train",):
        error = check_raises(DataError, "", "holds out the last fifth", opened, folder, "segmentation")
        folder = Path(shlex.split(error.hint.rpartition("--dataset ")[2])[0])
    source = opened(folder, "segmentation")
    assert (
        source.info.num_train + source.info.num_eval
        == {2: 8, 1: 6 if "inside" in parts else 4, 0: 4}[len(parts)]
    )
    for pixels in (*source.train.masks, *source.eval.masks):
        np.testing.assert_array_equal(pixels, np.eye(16))
    if parts != ("inside",):
        assert f"images in {image}/ and masks in {mask}/" in choose(folder, "segmentation").message
    _, _, report = verified(folder, ".")
    assert report.task == "segmentation" and report.subsets[0].samples == source.info.num_train
    error = check_raises(ConfigurationError, "is for segmentation", "train unet --dataset", opened, folder)
    masks, *classes = error.hint.split("; ")
    assert opened(shlex.split(masks)[-1], "segmentation").info.num_train == source.info.num_train
    if parts == ("train", "val"):
        options = ("--dataset", "imagefolder", "--dataset-path", folder, "--dry-run", "--micro-batch-size", 2)
        code, _, err = run("train", "lenet", *options)
        said = "and few values, as a mask has" if classes else "by the names of both"
        assert code == 3 and said in " ".join(err.split()), err
        assert bool(classes) == (mask not in ("ground_truth", "Segmentation"))  # the files are numbered


@pytest.mark.parametrize("train, masks, val, val_masks", [
    ("train", "train_masks", None, None),
    ("train", "trainannot", "val", "valannot"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("images_train", "gt_train", "images_valid", "gt_valid"),
    ("train", "train_labels", "test", "test_labels"),
])  # fmt: skip
def test_parts_lie_beside_the_folders_of_their_masks(tmp_path, train, masks, val, val_masks, run):
    folder = draw(draw_pairs(tmp_path, image=train, mask=masks, number=range(5)), "testing*2")
    draw_pairs(folder, image="testset", mask="testset_gt", number=range(2 * (val == "val")))
    if val is not None:
        draw_pairs(folder, image=val, mask=val_masks, number=range(2))
    source = opened(folder, "segmentation")
    assert (len(source.train), len(source.eval)) == ((4, 1) if val is None else (5, 2))
    assert source.info.own_split == (val is None)
    message = choose(folder, "segmentation").message
    assert f"masks in {masks}/" in message and "nothing on testing/" in message
    assert (f": training on {train}/, evaluation on {val}/" in message) == (val is not None)
    assert ("nothing on testset/" in message) == (val == "val")
    num_unused = 6 if val == "val" else 2
    assert [(one.reason, one.count) for one in source.info.unused] == [
        ("beside the folders that are read", num_unused)
    ]
    assert run("train", "lenet", "--dataset", folder, "--dry-run")[0] == 2
    errors, _, report = verified(folder, ".")
    assert not errors and report.task == "segmentation"


def test_class_folders_with_a_folder_of_masks_beside_their_parts_are_classes(tmp_path):
    draw(tmp_path, "train/a*3", "train/b*3", "val/a*2", "val/b*2", "train_masks*3")
    assert opened(tmp_path).info.class_names == ("a", "b")


def test_the_first_line_names_a_mask_beside_its_image(tmp_path):
    in_layout(tmp_path, "%03d_img.png", "%03d_masks.png")
    assert "000_masks.png is the mask of 000_img.png" in choose(tmp_path, "segmentation").message


def test_two_images_of_a_mask_are_not_chosen_from(tmp_path):
    in_layout(tmp_path, "%d_img.png", "%d_mask.png", range(5))
    draw(tmp_path, "3_image.png")
    check_raises(DataError, "without a partner", "", opened, tmp_path, "segmentation")


def test_one_folder_of_pairs_may_have_parts(tmp_path):
    in_layout(tmp_path / "train", "%d.tif", "%d_mask.png", range(8))
    in_layout(tmp_path / "test", "%d.tif", "%d_mask.png", range(8, 12), 8)
    source = opened(tmp_path, "segmentation")
    assert (len(source.train), len(source.eval), source.info.own_split) == (8, 4, False)


def test_nnunet_has_an_ignore_label_and_images_for_testing(tmp_path):
    nnunet(tmp_path, labels={"background": 0, "cell": 1, "ignore": 3})
    for k in (10, 11):
        put(tmp_path / "imagesTs" / f"t{k}_0000.png", TWELVE[k][0])
    assert choose(tmp_path, "segmentation").message.endswith("is for evaluation, nothing on imagesTs/")
    for k in (10, 11):
        put(tmp_path / "labelsTs" / f"t{k}.png", TWELVE[k][1] % 2)
    source = opened(tmp_path, "segmentation")
    assert (len(source.train), len(source.eval), source.info.own_split) == (12, 2, False)
    np.testing.assert_array_equal(source.train.masks[0], np.where(TWELVE[0][1] == 3, -1, 0))
    assert "evaluation on imagesTs/" in choose(tmp_path, "segmentation").message


def second_channel(folder):
    in_layout(folder, "imagesTr/case_%02d_0001.png", "labelsTr/case_%02d.png", [3, 4])


NOT_READ = {
    "a channel in each file": (second_channel, "mkdir"),
    "no folder labelsTr": (lambda folder: shutil.rmtree(folder / "labelsTr"), "labelsTr"),
    "has the labels": (
        lambda folder: (folder / "dataset.json").write_text('{"labels": {"background": 0, "cell": [1, 3]}}'),
        "classes.txt",
    ),
    "is not JSON": (lambda folder: (folder / "dataset.json").write_text("{"), "classes.txt"),
}


@pytest.mark.parametrize("words", NOT_READ)
def test_nnunet_sets_that_are_not_read(tmp_path, words):
    change, hint = NOT_READ[words]
    change(nnunet(tmp_path, labels={"background": 0, "cell": 3}))
    error = check_raises(DataError, words, hint, opened, tmp_path, "segmentation")
    if hint == "mkdir":
        assert verified(tmp_path, ".")[0] == {"wrong-mode"}
        subprocess.run(error.hint[error.hint.index("mkdir") :], shell=True, check=True)
    elif hint == "classes.txt":
        (tmp_path / "classes.txt").write_text("0 background\n3 cell\n")
    if hint != "labelsTr":
        assert opened(tmp_path, "segmentation").info.num_train == 10


@pytest.mark.parametrize("ending", ["tif", "png"])
def test_stacks_of_other_lengths_are_refused(tmp_path, ending):
    stacks(tmp_path, range(12))
    put(tmp_path / "masks" / "0.tif", *(mask for _, mask in TWELVE[:11]))
    if ending == "png":
        (tmp_path / "masks" / "0.tif").unlink()
        put(tmp_path / "masks" / "0.png", TWELVE[0][1])
    words = f"has 12 pages, and its mask {tmp_path}/masks/0.{ending} has {11 if ending == 'tif' else 1}"
    check_raises(DataError, words, "as many pages", opened, tmp_path, "segmentation")
    assert "count-mismatch" in verified(tmp_path, ".")[0]


OME, IMAGEJ, SHAPED, PLAIN = {"ome": True}, {"imagej": True}, {}, None


@pytest.mark.parametrize("image, mask, words", [
    (("TZ", 3, OME), ("ZT", 4, OME), ("TZ 3x4", "ZT 4x3")),
    (("TZ", 3, OME), ("TZ", 4, IMAGEJ), ("TZ 3x4", "TZ 4x3")),
    (("ZT", 3, SHAPED), ("TZ", 3, IMAGEJ), ("ZT 3x4", "TZ 3x4")),
    (("TZ", 3, OME), ("TZ", 3, IMAGEJ), ()),
    (("ZT", 3, OME), ("", 3, PLAIN), ()),
    (("ZT", 3, OME), ("QQ", 4, SHAPED), ()),
    (("", 3, PLAIN), ("ZT", 4, OME), ()),
    (("T", 12, OME), ("Z", 12, IMAGEJ), ()),
])  # fmt: skip
def test_stacks_whose_axes_differ_from_those_of_their_masks_are_refused(tmp_path, image, mask, words):
    """Each file has the letters of its axes, the length of the first one, and the form in which it says so."""
    for folder, (axes, length, form), pages in zip(("images", "masks"), (image, mask), zip(*TWELVE)):
        (tmp_path / folder).mkdir()
        planes = np.stack(pages)
        if len(axes) == 2:
            planes = planes.reshape(length, 12 // length, *planes.shape[1:])
        more = {"metadata": None} if form is None else {"metadata": {"axes": f"{axes}YX"}, **form}
        tifffile.imwrite(tmp_path / folder / "0.tif", planes, photometric="minisblack", **more)
    if words:
        message = f"images/0.tif has pages of {words[0]}, and its mask {tmp_path}/masks/0.tif of {words[1]}"
        hint = f"with the axes and the order of the image: {words[0]}"
        check_raises(DataError, message, hint, opened, tmp_path, "segmentation")
    else:
        assert opened(tmp_path, "segmentation").info.num_train == 10
    assert ("page-order" in verified(tmp_path, ".")[0]) == bool(words)


def write_channels(path, pages, axes, kind):
    """Writes pages [n, h, w, c] with their channels one behind another."""
    order = {"TCYX": (0, 3, 1, 2), "CZYX": (3, 0, 1, 2), "ZCYX": (0, 3, 1, 2)}[axes]
    tifffile.imwrite(path, np.transpose(pages, order), metadata={"axes": axes}, **kind)


@pytest.mark.parametrize("axes, kind", [
    ("ZCYX", {"imagej": True}), ("TCYX", {"imagej": True}), ("CZYX", {"ome": True}), ("ZCYX", {"ome": True}),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_three_channels_of_imagej_and_ome_are_a_colour_image(tmp_path, axes, kind, dtype):
    pages = noise(9, 5, 20, 24, 3).astype(dtype)
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    write_channels(tmp_path / "images" / "0.tif", pages, axes, kind)
    tifffile.imwrite(tmp_path / "masks" / "0.tif", np.stack([mask for _, mask in TWELVE[:5]]))
    source = opened(tmp_path, "segmentation")
    (tmp_path / "plain").mkdir()
    images = [*source.train.images, *source.eval.images]
    for k, (page, image) in enumerate(zip(pages, images)):  # the same five images, as one colour file each
        tifffile.imwrite(tmp_path / "plain" / f"{k}.tif", page, photometric="rgb")
        (plain,) = file_pages(str(tmp_path / "plain" / f"{k}.tif"), 3).pages()
        np.testing.assert_array_equal(image, plain)
    read = file_pages(str(tmp_path / "images" / "0.tif"), 3)
    np.testing.assert_array_equal(list(read.pages()), images)
    kept = dict(read.stack.imagej)
    assert "channels" not in kept and kept.get("slices", kept.get("frames")) == "5"
    write_channels(tmp_path / "images" / "0.tif", pages[..., :2], axes, kind)
    words = "2 channels of grey"
    check_raises(DataError, words, "in Fiji: Image > Color", opened, tmp_path, "segmentation")


# -- what lies beside pairs and classes, and folders of other tools ------------------------------------------------


def test_a_folder_of_images_may_lie_beside_class_folders(tmp_path):
    draw(tmp_path, *(f"{part}/{name}*2" for part in ("train", "val") for name in "ab"), "images*3")
    source = opened(tmp_path)
    assert source.info.class_names == ("a", "b")
    assert [(one.reason, one.count) for one in source.info.unused] == [
        ("beside the folders that are read", 3)
    ]


def test_images_of_a_part_without_class_folders_are_no_pairs(tmp_path):
    draw(tmp_path, "train/a/images*3", "train/b/images*3", "val/images*3", "test/images*3")
    check_raises(DataError, "has the class 'images', which the training part lacks", "", opened, tmp_path)


@pytest.mark.parametrize("test", [(), ("test/images*3",)])
def test_pairs_without_a_part_for_evaluation_are_divided_if_the_hint_is_typed(tmp_path, test):
    folder = draw(draw_pairs(tmp_path / "set", "train", number=range(5)), *test)
    error = check_raises(DataError, "", "holds out the last fifth", opened, folder, "segmentation")
    dataset = shlex.split(error.hint.rpartition("--dataset ")[2])[0]
    source = opened(dataset, "segmentation")
    assert (len(source.train), len(source.eval)) == (4, 1)


def test_the_part_with_masks_is_for_evaluation(tmp_path):
    folder = draw(draw_pairs(tmp_path, "train", "test"), "val/images*3")
    message = choose(folder, "segmentation").message
    assert "training on train/, evaluation on test/, nothing on val/" in message
    assert len(opened(folder, "segmentation").eval) == 3


def test_parts_may_lie_inside_the_folders_of_images_and_of_masks(tmp_path):
    for part, number in (("training", range(6)), ("val", [3, 9]), ("test", [7])):
        draw_pairs(tmp_path, image=f"images/{part}", mask=f"masks/{part}", number=number)
    draw(tmp_path, "images/8.png")
    message = choose(tmp_path, "segmentation").message
    assert "training on images/training/, evaluation on images/val/" in message
    source = opened(tmp_path, "segmentation")
    assert (len(source.train), source.eval.names) == (6, ("images/val/3.png", "images/val/9.png"))
    assert not source.info.own_split
    assert [(one.reason, one.count) for one in source.info.unused] == [
        ("beside the folders that are read", 3)
    ]
    assert verified(tmp_path, ".")[1] >= {"passed-over"}
    shutil.rmtree(tmp_path / "masks" / "val")
    assert "evaluation on images/test/" in choose(tmp_path, "segmentation").message


@pytest.mark.parametrize(
    ("names", "places", "hint"),
    [
        (("patient1*3", "patient1/0_mask.png", "patient2*3"), "patient1, patient2", "DIR/masks/NAME.png"),
        (("scans*3", "expert*3"), "expert, scans", "DIR/masks/NAME.png"),
        # DRIVE
        (
            [
                f"{part}/{side}*3"
                for part in ("training", "test")
                for side in ("images", "1st_manual", "mask")
            ],
            "test/1st_manual, test/images, test/mask, training/1st_manual and 2 more folders",
            "ipucnn.datasets.sorting masks manual1 ",
        ),
        # Slices of patients, each with its mask beside it
        (
            [f"{name}/{k}{mask}.png" for name in "ab" for k in range(3) for mask in ("", "_mask")],
            "a, b",
            "ipucnn.datasets.sorting masks mask ",
        ),
    ],
)
def test_folders_of_masks_in_another_layout_get_the_layout_of_pairs(tmp_path, names, places, hint):
    folder = draw(tmp_path, *names)
    error = f"holds no pairs of images and masks: images lie in {places}"
    check_raises(DataError, error, hint, opened, folder, "segmentation")


def test_masks_in_each_class_folder_are_no_folds(tmp_path, run):
    draw(tmp_path, *(f"{name}/{side}*2" for name in ("covid", "normal") for side in ("images", "masks")))
    check_raises(DataError, "masks are no images of a class", "sorting images ", opened, tmp_path)
    assert run("verify-dataset", tmp_path)[0] == 3


def masked(folder, image, mask, number=range(6)):
    """Writes images and masks under names with a number {}."""
    for k in number:
        draw(folder, image.format(k))
        put(folder / mask.format(k), np.uint8(255 * np.eye(16)))
    return folder


NO_CLASSES = {
    "Pascal VOC": ("JPEGImages/2007_{}.jpg", "SegmentationClass/2007_{}.png", "SegmentationObject/2007_{}.png"),
    "ISIC": ("Task1-2_Training_Input/ISIC_{}.jpg", "Task1_Training_GroundTruth/ISIC_{}_segmentation.png"),
    "parts": ("train/photo/{}.png", "train/photo_gt/{}.png", "val/photo/{}.png", "val/photo_gt/{}.png"),
    "LabelMe to VOC": (
        *("JPEGImages/{}.jpg", "SegmentationClassPNG/{}.png"), "SegmentationClassVisualization/{}.jpg",
    ),
    "LabelMe to data set": ("a b {}_json/img.png", "a b {}_json/label.png", "a b {}_json/label_viz.png"),
    "a folder for each image": ("{}/image.tif", "{}/mask.png"),
}  # fmt: skip


def after_typing(error):
    """Runs the commands of a hint, and returns the data set that it says to pass."""
    commands, dataset = re.split("[,;] then pass --dataset ", error.hint)
    if "sorting masks " in commands:
        assert sorting.main(["masks", *shlex.split(commands.partition("sorting masks ")[2])]) == 0
    else:
        subprocess.run(commands, shell=True, check=True)
    return shlex.split(dataset.replace(";", " "))[0]


@pytest.mark.parametrize("kind", NO_CLASSES)
def test_folders_of_masks_are_no_classes_and_the_hint_makes_pairs_of_them(tmp_path, kind, run):
    folder = tmp_path / "my set"
    images, masks, *others = NO_CLASSES[kind]
    masked(folder, images, masks)
    for other in others:
        masked(folder, other, other, range(6 if "val" in other else 4))
    if kind == "parts":
        masked(folder, *others)
    error = check_raises(DataError, "", "the network unet", opened, folder)
    assert check_raises(DataError, "", "", opened, folder, "segmentation").message == error.message
    assert run("verify-dataset", folder)[0] == 3
    source = opened(after_typing(error), "segmentation")
    assert source.info.num_train + source.info.num_eval == (12 if kind == "parts" else 6)
    assert all((mask == np.eye(16)).all() for mask in source.train.masks)


@pytest.mark.parametrize(
    "names",
    [
        ("with_mask*3", "without_mask*3"),
        ("mask*3", "dog*3", "cat*3"),
        ("segmented neutrophil*3", "band neutrophil*3", "lymphocyte*3"),
        ("label a/x.png", "label a/y.png", "other/1.png", "other/2.png"),
        ("face*3", "masked face*3"),
        ("good*3", "faulty label*3"),
        ("figure*3", "table*3", "annotation*3"),
        ("ok*3", "segmentation fault/x.png", "segmentation fault/y.png"),
        ("image*3", "label*3", "text*3"),
        ("mask/image.png", "mask/mask_1.png", "mask/mask_2.png", "no/1.png", "no/2.png"),
    ],
)
def test_words_for_masks_may_be_in_names_of_classes(tmp_path, names):
    source = opened(draw(tmp_path, *names))
    assert len(source.info.class_names) == len({name.split("/")[0].split("*")[0] for name in names})
    assert source.info.num_train + source.info.num_eval == sum(
        int(name.partition("*")[2] or 1) for name in names
    )


@pytest.mark.parametrize(
    "images, masks",
    [
        ("CXR_png/CU_{}_0.png", "ManualMask/leftMask/CU_{}_0.png"),
        ("1. Original Images/train/ID_{}.jpg", "2. All Segmentation Groundtruths/train/1. MA/ID_{}_MA.tif"),
        ("Original/im{}.tif", "GroundTruth/gt{}.tif"),
        ("photos/{}.tif", "photo annotations/{}.tif"),
    ],
)
def test_folders_of_masks_in_folders_of_masks_are_no_classes(tmp_path, images, masks):
    masked(tmp_path, images, masks)
    error = check_raises(DataError, "they are no classes", "if they are classes: ", opened, tmp_path)
    subprocess.run(error.hint.split("if they are classes: ")[1], shell=True, check=True)
    assert "class-2" in opened(tmp_path).info.class_names


def test_class_folders_beside_masks_in_class_folders_are_named(tmp_path):
    names = [f"{side}/{bird}/{{}}.png" for bird in ("tern", "wren") for side in ("images", "segmentations")]
    masked(masked(tmp_path, *names[:2]), *names[2:])
    hint = check_raises(ConfigurationError, "is for segmentation", "class folders", opened, tmp_path).hint
    masks, classes = (shlex.split(part)[-1] for part in hint.split("; "))
    assert opened(classes).info.class_names == ("tern", "wren")
    assert opened(masks, "segmentation").info.num_train == 10


def test_a_folder_that_is_named_like_masks_is_a_class_if_the_hint_is_typed(tmp_path):
    folder = draw(tmp_path / "set", *(f"{name}/{k}.png" for name in ("ski mask", "snorkel") for k in "abcde"))
    hint = check_raises(DataError, "by the names of both", "if they are classes: ", opened, folder).hint
    subprocess.run(hint.split("if they are classes: ")[1], shell=True, check=True)
    assert opened(folder).info.class_names == ("class-2", "snorkel")


@pytest.mark.parametrize("image, mask", [
    ("images/image_{}.png", "masks/mask_{}.png"), ("images/{}_leftImg8bit.png", "masks/{}_gtFine_labelIds.png"),
    ("images/a {}.jpg", "masks/a {}_L.png"), ("images/{}.jpg", "annotations/trimaps/{}.png"),
    ("images/$1 {}.png", "masks/truth '{}.png"),
])  # fmt: skip
def test_masks_with_other_names_are_copied_with_their_images_if_the_hint_is_typed(tmp_path, image, mask):
    folder = masked(tmp_path / "my set", image, mask, range(8, 13))
    hint = check_raises(DataError, "has the name of one in", "sorting", opened, folder, "segmentation").hint
    command, _, name = hint.partition("sorting masks ")[2].partition("; then pass --dataset ")
    assert sorting.main(["masks", *shlex.split(command)]) == 0
    source = opened(shlex.split(name)[0], "segmentation")
    assert len(source.train) + len(source.eval) == 5


def test_masks_with_names_of_no_image_are_not_renamed(tmp_path):
    folder = masked(tmp_path, "images/image_{}.png", "masks/mask_{}.png")
    (tmp_path / "masks" / "mask_3.png").rename(tmp_path / "masks" / "mask_9.png")
    error = check_raises(DataError, "has the name of one in", "", opened, folder, "segmentation")
    assert "sorting" not in error.hint


@pytest.mark.parametrize(
    "head, row",
    [
        *(("", row) for row in ("{}\t{}\t0\t32\t44\t62\n", "{},{}\n", "{} {} 1\n", "{},{}\r\n")),
        ("file,label\n", "{},{}\n"),
    ],
)
def test_images_of_evaluation_are_sorted_by_their_table_if_the_hint_is_typed(tmp_path, head, row):
    """tiny-ImageNet: val/val_annotations.txt has the class of each image in val/images."""
    folder = draw(tmp_path / "my set", *(f"train/{name}/images*4" for name in "ab"), "test/images*2")
    draw(folder, *(f"val/images/val_{k}.png" for k in range(6)))
    (folder / "train" / "a" / "a_boxes.txt").write_text("0.png\t0\t0\t9\t9\n")
    rows = [row.format(f"val_{k}.png", "ab"[k % 3 == 0]) for k in range(6)]
    # The last line has no end.
    (folder / "val" / "val_annotations.txt").write_bytes("".join([head, *rows]).rstrip().encode())
    error = check_raises(DataError, "has the class 'images'", "", opened, folder)
    command, _, moves = error.hint.split(": ", 1)[1].partition(" && ")
    assert sorting.main(shlex.split(command)[3:]) == 0
    subprocess.run(moves, shell=True, check=True)
    source = opened(folder)
    written = {f"images_val_{k}.png": int(k % 3 == 0) for k in range(6)}
    assert {os.path.basename(p): n for p, n in zip(source.eval.paths, source.eval.labels)} == written
    assert sorted(os.listdir(folder / "val")) == ["a", "b"]
    draw(folder, "val/images*2")
    (folder / "val" / "val_annotations.txt").write_text("no table\n")
    hint = check_raises(DataError, "has the class 'images'", "", opened, folder).hint
    assert hint == "both parts need the same class folders"


@pytest.mark.parametrize(
    "task, names", [("classification", ("a*3", "b*3")), ("segmentation", ("images*3", "masks*3"))]
)
def test_the_only_set_in_a_folder_is_named(tmp_path, task, names):
    folder = draw(tmp_path / "archive", *(f"my data/my data/{name}" for name in names))
    (folder / "notes").mkdir()
    (folder / "notes" / "0.txt").write_text("x")
    error = check_raises(DataError, "", "or the set in it", opened, folder, task)
    assert shlex.split(error.hint.rpartition("--dataset ")[2]) == [str(folder / "my data" / "my data")]


@pytest.mark.parametrize(
    "name, hint",
    [
        ("a.zip", "unpack"),
        ("a.tar.gz", "unpack"),
        ("a.npz", "FILE.py:FUNCTION"),
        ("a-idx3-ubyte.gz", "folder it lies in"),
    ],
)
def test_a_file_in_place_of_a_folder_has_the_hint_for_its_kind(tmp_path, name, hint):
    (tmp_path / name).write_bytes(b"x")
    check_raises(DataError, "is a file, not a folder", hint, choose, tmp_path / name)


_KINDS = [("classification", ("train", "val")), ("segmentation", ("imagesTr", "labelsTr"))]


@pytest.mark.parametrize("task, sides", _KINDS)
def test_files_that_are_no_images_are_named_if_there_are_no_others(tmp_path, task, sides):
    for side in sides:
        (tmp_path / side / "ant").mkdir(parents=True)
        (tmp_path / side / "ant" / "a_0000.nii.gz").write_bytes(b"x")
    words = f"left out 2 files (no image by its name: {sides[0]}/ant/a_0000.nii.gz"
    check_raises(DataError, words, "TIFF, PPM and PGM are read", opened, tmp_path, task)
