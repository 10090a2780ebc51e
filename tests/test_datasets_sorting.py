"""Folders that are refused, as people download them: the hint's command makes a set of them, with the right classes."""

import json
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from support.refusals import check_raises

from ipucnn.datasets import sorting
from ipucnn.datasets.masks_beside import masks_by_content
from ipucnn.datasets.registry import ANY_TASK, choose_dataset, open_dataset
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.runs.images.inputs import find_images

pytestmark = pytest.mark.usefixtures("here")


def save(path, value, size=16):
    """Writes an image of one value, by which a test knows it again."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(path)


def save_mask(path, number):
    """Writes a mask whose first ``number`` rows are 255."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = np.zeros((16, 16), np.uint8)
    mask[: number + 1] = 255
    Image.fromarray(mask).save(path)


def write(path, *rows):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(rows) + "\n")


def refused(folder, task):
    return check_raises(UserError, "", "", choose_dataset, str(folder), Path("."), home="", task=task).hint


def followed(folder, task):
    """Types the hint's commands, and opens the set that it names."""
    hint = refused(folder, task)
    commands, _, name = hint.partition("; then pass --dataset ")
    for command in re.findall(r"python -m ipucnn\.datasets\.sorting .*?(?= && |\Z)", commands):
        assert sorting.main(shlex.split(command)[3:]) == 0
    (name,) = shlex.split(name)
    return open_dataset(choose_dataset(name, Path("."), home="", task=task))


def labels_by_value(examples, names):
    """Returns the value of each image -> the name of its class."""
    values = [int(np.asarray(Image.open(path)).flat[0]) for path in examples.paths]
    return dict(zip(values, (names[label] for label in examples.labels)))


def two_parts_of_images():
    for k in range(8):
        save(f"set/images_part_{k % 2 + 1}/ISIC_{k:04}.png", k)
    write(
        "set/meta.csv",
        "lesion_id,image_id,dx,age",
        *(f"L{k},ISIC_{k:04},{'nv' if k % 3 else 'mel'},60" for k in range(8)),
    )
    return {k: "nv" if k % 3 else "mel" for k in range(8)}


def grades():
    for k in range(6):
        save(f"set/train_images/{k:x}a.png", k)
    write("set/train.csv", "id_code,diagnosis", *(f"{k:x}a,{k % 4}" for k in range(6)))
    return {k: str(k % 4) for k in range(6)}


def semicolons_and_paths():
    for k in range(6):
        save(f"set/photos/{k}.png", k)
    write("set/list.csv", "Path;Class", *(f"/home/me/photos/{k}.png;{'ab'[k % 2]} c" for k in range(6)))
    return {k: f"{'ab'[k % 2]} c" for k in range(6)}


@pytest.mark.parametrize("make", [two_parts_of_images, grades, semicolons_and_paths])
def test_images_are_sorted_by_a_table(make):
    expected = make()
    before = sorted(os.listdir("set"))
    source = followed("set", "classification")
    found = {}
    for part in (source.train, source.eval):
        found.update(labels_by_value(part, source.info.class_names))
    assert found == expected and sorted(os.listdir("set")) == before


def test_tables_of_parts_with_a_column_for_each_class():
    expected = {}
    for part, first in (("train", 0), ("valid", 10), ("test", 20)):
        for k in range(first, first + 4):
            save(f"my set/{part}/{k}_jpg.rf.png", k)
        rows = (f"{k}_jpg.rf.png, {k % 2}, {1 - k % 2}" for k in range(first, first + 4))
        write(f"my set/{part}/_classes.csv", "filename, cat, dog", *rows)
        expected[part] = {k: "cat" if k % 2 else "dog" for k in range(first, first + 4)}
    source = followed("my set", "classification")
    assert labels_by_value(source.train, source.info.class_names) == expected["train"]
    assert labels_by_value(source.eval, source.info.class_names) == expected["valid"]


def other_numbers():
    for k in range(8):
        save(f"set/photos/{k}.png", k)
    write("set/t.csv", "index,age,file,label", *(f"{k},{k // 2},{7 - k}.png,{'ab'[k < 4]}" for k in range(8)))
    return {7 - k: "ab"[k < 4] for k in range(8)}


def images_and_a_table():
    for k in range(6):
        save(f"set/images/{k}.png", k)
    write("set/t.csv", "file,kind", *(f"{k}.png,{'ab'[k % 2]}" for k in range(6)))
    return {k: "ab"[k % 2] for k in range(6)}


def paths_of_two_folders():
    for k in range(6):
        save(f"set/part_1/{k}.png", k), save(f"set/part_2/{k}.png", k + 10)
    rows = (f"part_{n}/{k}.png,{'ab'[n - 1]}" for k in range(6) for n in (1, 2))
    write("set/t.csv", "file,label", *rows)
    return {**dict.fromkeys(range(6), "a"), **dict.fromkeys(range(10, 16), "b")}


@pytest.mark.parametrize("make", [other_numbers, images_and_a_table, paths_of_two_folders])
def test_rows_belong_to_the_images_that_they_name(make):
    expected, found = make(), {}
    source = followed("set", "classification")
    for part in (source.train, source.eval):
        found.update(labels_by_value(part, source.info.class_names))
    assert found == expected


def one_folder():
    for k in range(8):
        save(f"set/{'great_dane' if k % 3 else 'cat'}.{k}.png", k)
    return {k: "great_dane" if k % 3 else "cat" for k in range(8)}


def test_names_that_begin_with_their_class_are_sorted():
    expected, found = one_folder(), {}
    source = followed("set", "classification")
    for part in (source.train, source.eval):
        found.update(labels_by_value(part, source.info.class_names))
    assert found == expected


def test_verification_knows_the_command_of_names_and_says_what_it_leaves_out(run, capsys):
    one_folder()
    save("set/more/9.png", 9)
    _, _, err = run("verify-dataset", "set", columns=4000)
    assert "without 1 other image: python -m ipucnn.datasets.sorting names set-classes set" in err
    assert sorting.main(["names", "new", "absent"]) == 3
    assert "there is no folder absent" in capsys.readouterr().err
    assert sorting.main(["names", "new", "set/more"]) == 3
    assert "nothing to copy by names" in capsys.readouterr().err


def test_names_with_classes_count_more_than_a_folder_beside_theirs():
    """Data sets that lie side by side may be classes, too."""
    one_folder()
    for k in range(4):
        save(f"other/{k}.png", k)
    hint = refused("set", "classification")
    command, _, around = hint.partition("; or the set that it is a part of: ")
    assert "names set-classes set; then pass --dataset set-classes" in command
    assert around == "--dataset ."


def test_outlines_beside_images_are_no_masks():
    for k in range(4):
        save(f"set/{k}.png", k)
        Path(f"set/{k}.json").write_text('{"shapes": [], "imagePath": "0.png"}')
    error = check_raises(UserError, "", "", choose_dataset, "set", Path("."), home="", task="segmentation")
    assert error.message.endswith(
        "; set/0.json and 3 more files beside images are not read: masks are images"
    )
    Path("set/about.json").write_text("{}")  # called like no image
    for k in range(4):
        os.remove(f"set/{k}.json")
    assert (
        "not read"
        not in check_raises(
            UserError, "", "", choose_dataset, "set", Path("."), home="", task="segmentation"
        ).message
    )


def test_images_in_a_part_are_left_out_if_others_lie_in_the_folder_itself(run):
    one_folder()
    for k in range(6):
        save(f"set/val/{'cat' if k % 2 else 'pug'}.{k}.png", k)
    hint = run("verify-dataset", "set", columns=4000)[2].splitlines()[-1]
    assert "without 6 other images: " in hint
    assert sorting.main(shlex.split(hint.partition("python -m ")[2].partition(";")[0])[1:]) == 0
    assert len(list(Path("set-classes").rglob("*.png"))) == 8


def test_names_that_begin_with_parts_or_sides_tell_no_classes():
    for word, other in (("train", "test"), ("image", "mask"), ("cat", "12")):
        for k in range(4):
            save(f"{word}/{word}_{k}.png", k)
            save(f"{word}/{other}_{k}.png", k)
        assert "sorting names" not in refused(word, "classification")


def test_numbers_of_classes_come_before_those_of_instances_and_colours():
    for k in range(4):
        save(f"set/leftImg8bit/train/aachen/aachen_{k}_leftImg8bit.png", k)
        for kind in ("color", "instanceIds", "labelIds"):
            save_mask(f"set/gtFine/train/aachen/aachen_{k}_gtFine_{kind}.png", k)
    assert "sorting masks labelid " in refused("set", "segmentation")


def nuclei():
    """DSB2018: a folder for each image, with a mask of each cell."""
    for k in range(5):
        save(f"set/stage1_train/{k}a9f/images/{k}a9f.png", k)
        for row in range(k + 1):
            save_mask(f"set/stage1_train/{k}a9f/masks/{row:x}e7.png", row)
        save(f"set/stage1_test/{k}b9f/images/{k}b9f.png", 99)


def lesions():
    """BUSI: a second mask of some images."""
    for k in range(4):
        for n, name in enumerate(("benign", "malignant")):
            save(f"set/{name}/{name} ({k}).png", 2 * k + n)
            save_mask(f"set/{name}/{name} ({k})_mask.png", 0)
            save_mask(f"set/{name}/{name} ({k})_mask_1.png", 2 * k + n)


@pytest.mark.parametrize("make, count", [(nuclei, 5), (lesions, 8)])
def test_several_masks_of_an_image_are_joined(make, count):
    make()
    assert "joined as one, the maximum" in refused("set", "segmentation")
    source = followed("set", "segmentation")
    found = 0
    for examples in (source.train, source.eval):
        for image, mask in zip(examples.images, examples.masks):
            assert mask.reshape(mask.shape[:2]).any(axis=1).sum() == int(image.flat[0]) + 1
            found += 1
    assert found == count


def one_object(number):
    pixels = np.zeros((16, 16), np.uint8)
    pixels[4 * number : 4 * number + 3] = 1
    return pixels


def as_white_is_zero(path, pixels):
    tifffile.imwrite(path, 255 * pixels, photometric="miniswhite")


def as_bmp(path, pixels):
    head = struct.pack("<IiiHHIIiiII", 40, 16, 16, 1, 8, 0, 256, 0, 0, 2, 0)
    start = struct.pack("<IHHI", 318, 0, 0, 62)
    path.write_bytes(b"BM" + start + head + bytes(4) + b"\xff\xff\xff\0" + pixels[::-1].tobytes())


def as_16_bits(path, pixels):
    tifffile.imwrite(path, 300 * pixels.astype(np.uint16))


@pytest.mark.parametrize(
    "write_mask, ending", [(as_white_is_zero, "tif"), (as_bmp, "bmp"), (as_16_bits, "tif")]
)
def test_masks_are_joined_by_their_stored_numbers(write_mask, ending):
    for k in range(4):
        photo(f"set/{k}a9f/images/{k}a9f.png")
        Path(f"set/{k}a9f/masks").mkdir()
        for number in range(2):
            write_mask(Path(f"set/{k}a9f/masks/{number}{'xy'[k % 2]}.{ending}"), one_object(number + k % 2))
        Image.fromarray(RNG.randint(0, 256, (16, 16, 3)).astype(np.uint8)).save(
            f"set/{k}a9f/images/{k}a9f.png"
        )
    write(
        "set/classes.txt",
        "0 sky",
        f"{ {as_white_is_zero: 255, as_bmp: 1, as_16_bits: 300}[write_mask] } cell",
    )
    source = followed("set", "segmentation")
    assert source.info.class_names == ("sky", "cell")
    for part in (source.train, source.eval):
        for mask in part.masks:
            rows = mask.reshape(16, 16).any(axis=1)
            expected = [(one_object(k) | one_object(k + 1)).any(axis=1).tolist() for k in (0, 1)]
            assert rows.tolist() in expected


def other_size(path):
    Image.fromarray(np.ones((9, 16), np.uint8)).save(path)


def colours(path):
    Image.fromarray(RNG.randint(0, 256, (16, 16, 3)).astype(np.uint8)).save(path)


def transparent(path):
    Image.fromarray(RNG.randint(0, 256, (16, 16, 4)).astype(np.uint8)).save(path)


def damaged(path):
    os.truncate(path, 60)


@pytest.mark.parametrize("change", [other_size, colours, transparent, damaged])
def test_masks_that_are_read_otherwise_are_not_joined(change, capsys):
    nuclei()
    change("set/stage1_train/3a9f/masks/1e7.png")
    assert sorting.main(["masks", "mask", "new", "set"]) == 3 and not Path("new").exists()
    assert "1e7.png" in capsys.readouterr().err


def test_masks_of_two_meanings_are_not_joined():
    for k in range(4):
        save(f"set/{k}a9f/images/{k}a9f.png", k)
        save_mask(f"set/{k}a9f/masks/nucleus.png", 1), save_mask(f"set/{k}a9f/masks/cytoplasm.png", 3)
    assert "sorting" not in refused("set", "segmentation")


def test_a_table_of_the_training_part_may_divide_it_once_more():
    for part in ("train", "test"):
        for k in range(6):
            photo(f"set/{part}/{part}{k}.png")
    splits = ["train"] * 4 + ["val"] * 2
    write("set/train.csv", "file,label,split", *(f"train{k}.png,{'ab'[k % 2]},{splits[k]}" for k in range(6)))
    write("set/test.csv", "file,label", *(f"test{k}.png,{'ab'[k % 2]}" for k in range(6)))
    source = followed("set", "classification")
    assert (len(source.train), len(source.eval)) == (6, 6)


@pytest.mark.parametrize(
    "column, cells",
    [
        ("split", ("train", "val")),
        ("is_valid", ("False", "True")),
        ("is_train", ("1", "0")),
        ("is_test", ("no", "yes")),
    ],
)
def test_a_column_divides_the_images_of_the_training_folder_if_they_are_all(column, cells):
    for k in range(9):
        photo(f"set/train/i{k}.png")
    write(
        "set/train.csv",
        f"file,label,{column}",
        *(f"i{k}.png,{'ab'[k % 2]},{cells[k >= 6]}" for k in range(9)),
    )
    assert f"in the parts of its column {column}" in refused("set", "classification")
    source = followed("set", "classification")
    assert [Path(path).name for path in source.eval.paths] == ["train_i6.png", "train_i8.png", "train_i7.png"]
    assert len(source.train) == 6


def test_one_table_of_two_folders_keeps_the_parts():
    for part in ("train", "test"):
        for k in range(6):
            photo(f"set/{part}/{part}{k}.png")
    rows = (f"{part}{k}.png,{'ab'[k % 2]}" for part in ("train", "test") for k in range(6))
    write("set/all.csv", "file,label", *rows)
    source = followed("set", "classification")
    assert (len(source.train), len(source.eval)) == (6, 6)


def test_images_outside_of_the_parts_are_left_out_or_sort_nothing():
    for k in range(4):
        photo(f"set/train/t{k}.png", f"set/test/e{k}.png", f"set/more/m{k}.png")
    names = [f"{name}{k}.png,{'ab'[k % 2]}" for name in "tem" for k in range(4)]
    write("set/t.csv", "file,label", *names)
    assert "without 4 images of which no class or no part is known" in refused("set", "classification")
    source = followed("set", "classification")
    assert (len(source.train), len(source.eval)) == (4, 4)
    write("set/t.csv", "file,label", *names[4:])
    assert "sorting" not in refused("set", "classification")


@pytest.mark.parametrize(
    "header, cells",
    [
        ("image,../../evil,bus", ["1,0", "0,1"]),
        ("image,a/b,bus", ["1,0", "0,1"]),
        ("image,label,part,subset", ["a,train,test", "b,test,train"]),
    ],
)
def test_names_that_are_no_classes_and_parts_that_contradict_sort_nothing(header, cells):
    for k in range(6):
        photo(f"set/photos/{k}.png")
    write("set/t.csv", header, *(f"{k}.png,{cells[k % 2]}" for k in range(6)))
    hint = refused("set", "classification")
    assert "sorting" not in hint or "../" not in hint.partition("sorting")[2]
    assert "one-hot" not in hint and "label" not in hint


def test_parts_of_numbers_and_empty_parts():
    for k in range(9):
        photo(f"set/photos/{k}.png")
    write("set/t.csv", "file,is_train,label", *(f"{k}.png,{int(k < 6)},{'ab'[k % 2]}" for k in range(9)))
    assert "(or" not in refused("set", "classification")
    source = followed("set", "classification")
    assert (len(source.train), len(source.eval)) == (6, 3)
    splits = ["train"] * 5 + ["test"] * 2 + [""] * 2
    write("set/t.csv", "file,split,label", *(f"{k}.png,{splits[k]},{'ab'[k % 2]}" for k in range(9)))
    assert "without 2 images of which no class or no part is known" in refused("set", "classification")


def test_files_that_words_do_not_tell_apart_are_no_pairs():
    for k in range(4):
        photo(f"set/scan/A1_{k}.png", f"set/scan/A/1-{k}.png"), shape(f"set/seg/A1_{k}_mask.png")
    assert "sorting masks" not in refused("set", "segmentation")


def test_a_column_of_a_table_says_the_parts():
    for k in range(10):
        photo(f"set/photos/{k}.png")
    parts = ["train"] * 6 + ["valid", "valid", "test", "test"]
    write(
        "set/t.csv",
        "file,fold,label,split",
        *(f"{k}.png,{k % 5},{'ab'[k % 2]},{parts[k]}" for k in range(10)),
    )
    assert "in the parts of its column split:" in refused("set", "classification")
    source = followed("set", "classification")
    assert (len(source.train), len(source.eval)) == (6, 2)
    write("set/t.csv", "file,fold", *(f"{k}.png,{k % 5}" for k in range(10)))
    assert "sorting" not in refused("set", "classification")


def test_what_a_table_leaves_out_is_said():
    """Images without a row or a class, quoted cells, and a mark of UTF-8; files of one name in two folders go apart."""
    for k in range(12):
        photo(f"set/a/{k}.png")
    write(
        "set/t.csv",
        "\ufeffname,class",
        *(f'"{k}.png","{"" if k == 3 else "x, y" if k % 2 else "z"}"' for k in range(10)),
    )
    hint = refused("set", "classification")
    assert "without 3 images of which no class is known" in hint
    source = followed("set", "classification")
    assert source.info.class_names == ("x, y", "z") and len(source.train) + len(source.eval) == 9
    save("set/a_b/0.png", 1), save("set/a/b_0.png", 1)
    write("set/t.csv", "name,class", "a_b/0.png,x", "a/b_0.png,x", "a/1.png,z")
    error = check_raises(
        DataError,
        "would both be",
        "rename",
        sorting.copies_of_classes,
        Path("set/t.csv"),
        "class",
        Path("set"),
    )
    assert (
        "set/a/b_0.png and set/a_b/0.png" in error.message
        or "set/a_b/0.png and set/a/b_0.png" in error.message
    )


_UNKNOWN = "set/list.csv names the images, and its columns do not tell which has their classes"
_SLASH = _UNKNOWN + ": label '{}' cannot be a folder's name (column label)"


@pytest.mark.parametrize(
    "rows, reason",
    [
        # Another column is not meant.
        (["image,label,size", *(f"{k}.png,a/{k % 2},{'sm'[k % 2]}" for k in range(6))], _SLASH.format("a/0")),
        (
            ["image,box", *(f"{k // 2}.png,{k}" for k in range(12))],
            "set/list.csv has several rows for an image, as for boxes or several classes",
        ),
        (["image,text", *(f"{k}.png,words {k}" for k in range(6))], _UNKNOWN),
        # Two labels for some; a column alone is none.
        (
            ["image,cat,dog", *(f"{k}.png,1,{k % 2}" for k in range(6))],
            f"{_UNKNOWN}: row 3 has more than one 1 in its columns cat, dog",
        ),
        (["image,label", *(f"other{k}.png,{k % 2}" for k in range(6))], ""),
        (["image,label", *(f"{k}.png,../{k % 2}" for k in range(6))], _SLASH.format("../0")),
        (
            ["image,label,label", *(f"{k}.png,{k % 2},{k % 3}" for k in range(6))],
            f"{_UNKNOWN}: two columns are called 'label'",
        ),
        (
            ["image,label", *(f"{k}.png,{k % 2}" + ",more" * (k == 3) for k in range(6))],
            "set/list.csv: the row of 3.png has 3 cells, and the first row 2",
        ),
        (
            ["image,copy,label", *(f"{k}.png,{5 - k}.png,{k % 2}" for k in range(6))],
            "set/list.csv has several columns with names of images",
        ),
    ],
)
def test_tables_without_classes_give_no_command_and_are_named_with_the_reason(rows, reason):
    for k in range(6):
        save(f"set/photos/{k}.png", k)
    write("set/list.csv", *rows)
    error = check_raises(UserError, "", "", choose_dataset, "set", Path("."), home="", task="classification")
    assert "sorting" not in error.hint and error.message.partition("; ")[2] == reason


@pytest.mark.parametrize(
    "name, data, reason",
    [
        (
            "labels.csv",
            "n,label\n0.png,löwe".encode("latin-1"),
            "set/labels.csv, line 2: byte 0xf6 is not UTF-8",
        ),
        ("prices.csv", "n,price\nlöwe,1".encode("latin-1"), ""),
        ("read me.txt", "löwe".encode("latin-1"), ""),
        ("metadata.jsonl", b'{"file_name": "0.png"}\nx\n', "set/metadata.jsonl, line 2, is no object"),
        ("metadata.jsonl", b"1\n2\n", "set/metadata.jsonl, line 1, is no object"),
        ("labels.xlsx", b"PK", "set/labels.xlsx is not read"),
        ("photos/0.xml", b"<a/>", "set/photos/0.xml is not read"),
        ("package.json", b"{}", ""),
        ("t.txt", b"x" * 200_000 + b",y\n", ""),
    ],
)
def test_files_that_may_have_the_classes_and_are_not_read_are_named(name, data, reason):
    for k in range(6):
        save(f"set/photos/{k}.png", k)
    Path("set", name).write_bytes(data)
    Path("set/photos/more.json" if name.endswith("xml") else "set/photos/a.log").write_text("{}")
    error = check_raises(UserError, "", "", choose_dataset, "set", Path("."), home="", task="classification")
    assert "sorting" not in error.hint and error.message.partition("; ")[2].startswith(reason)
    assert bool(reason) == ("; " in error.message)


@pytest.mark.parametrize(
    "word, is_said", [("nan", True), ("NaN", True), ("None", True), ("NA", True), ("naan", False)]
)
def test_words_for_missing_values_are_said_to_be_classes(word, is_said):
    for k in range(9):
        save(f"set/{k}.png", k)
    rows = [f"{k}.png,{word if k > 6 else 'ab'[k % 2]}" for k in range(9)]
    Path("set/t.csv").write_text("\n".join(["name,label", *rows]))
    assert (f"; {word} is a class, of 2 images: python" in refused("set", "classification")) == is_said


def test_wide_characters_lines_of_objects_and_several_columns_are_read():
    for k in range(8):
        save(f"set/photos/{k}.png", k)
    names = ["löwe", "bär"]
    expected = {k: names[k % 2] for k in range(8)}
    rows = [f"{k}.png\t{names[k % 2]}" for k in range(8)]
    Path("set/t.csv").write_bytes("\n".join(["name\tlabel", *rows]).encode("utf-16"))
    source = followed("set", "classification")
    found = {}
    for part in (source.train, source.eval):
        found.update(labels_by_value(part, source.info.class_names))
    assert found == expected
    os.remove("set/t.csv")
    lines = [{"file_name": f"photos/{k}.png", "label": k % 2, "objects": {"bbox": [k]}} for k in range(8)]
    write("set/metadata.jsonl", *map(json.dumps, lines))
    assert followed("set", "classification").info.class_names == ("0", "1")
    os.remove("set/metadata.jsonl")
    write("set/t.csv", "name,shape,colour", *(f"{k}.png,{'ab'[k % 2]},{'xyz'[k % 3]}" for k in range(8)))
    assert "by its column shape (2 classes: a, b; or colour in its place)" in refused("set", "classification")


def patients():
    for k in range(6):
        save(f"set/P_{k // 3}/P_{k // 3}_{k}.png", k), save_mask(f"set/P_{k // 3}/P_{k // 3}_{k}_mask.png", k)
    save("set/readme/overview.png", 77)


def satellite():
    for k in range(5):
        save(f"set/train/{k}00_sat.png", k), save_mask(f"set/train/{k}00_mask.png", k)


def observers():
    for k in range(4):
        save(f"set/Image_0{k}L.png", k), save_mask(f"set/Image_0{k}L_1stHO.png", k)
        save_mask(f"set/Image_0{k}L_2ndHO.png", 9)


def retina():
    for part, first in (("training", 0), ("test", 4)):
        for k in range(first, first + 3):
            save(f"set/{part}/images/{k:02}_{part}.tif", k)
            save_mask(f"set/{part}/1st_manual/{k:02}_manual1.gif", k)
            save_mask(f"set/{part}/mask/{k:02}_{part}_mask.gif", 9)


def streets():
    for part, first in (("train", 0), ("val", 4)):
        for k in range(first, first + 4):
            town = f"town{k % 2}"
            save(f"set/leftImg8bit/{part}/{town}/{town}_0{k}_019_leftImg8bit.png", k)
            save_mask(f"set/gtFine/{part}/{town}/{town}_0{k}_019_gtFine_labelIds.png", k)
            save(f"set/gtFine/{part}/{town}/{town}_0{k}_019_gtFine_color.png", 9)


@pytest.mark.parametrize("make", [patients, satellite, observers, retina, streets])
def test_scattered_pairs_are_copied_together(make):
    make()
    source = followed("set", "segmentation")
    count = 0
    for examples in (source.train, source.eval):
        for image, mask in zip(examples.images, examples.masks):
            value = int(image.flat[0])
            assert (mask.reshape(mask.shape[:2]).any(axis=1).sum(), mask.size) == (value + 1, 256)
            count += 1
    assert count == {patients: 6, satellite: 5, observers: 4, retina: 6, streets: 8}[make]
    if make in (retina, streets):
        assert len(source.eval) == {retina: 3, streets: 4}[make]


RNG = np.random.RandomState(5)


def photo(*paths):
    """Writes images of many values."""
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.randint(0, 256, (24, 24, 3)).astype(np.uint8)).save(path)


def shape(*paths):
    """Writes masks in colour: a white rectangle on black."""
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((24, 24, 3), np.uint8)
        pixels[4:20, : RNG.randint(8, 20)] = 255
        Image.fromarray(pixels).save(path, **({"quality": 95} if path.suffix == ".jpg" else {}))


# Where masks and their images lie -> whether a class is left without masks.
MASKS = {
    ("{c}/Imgs/a_{k}.jpg", "{c}/Imgs/a_{k}.png"): True,
    ("{c}/a_{k}.png", "{c}/a_{k}-labelled.png"): True,
    ("{c}/{k}.jpg", "{c}/{k}_Simple Segmentation.tif"): True,
    ("{c}/Train/{k}.png", "{c}/Train/Label/{k}_lab.png"): True,
    ("{c}-image/{k:04}.jpg", "{c}-mask/{k:04}.jpg"): False,
    ("horse/horse{n:03}.png", "mask/horse{n:03}.png"): False,
    ("pictures/im{n:04}.ppm", "labels-ah/im{n:04}.ah.ppm"): False,
}


@pytest.mark.parametrize("image, mask", MASKS)
def test_masks_in_class_folders_are_found_by_their_pixels(image, mask, run):
    """Names alone do not say it; the command's folder has no masks, or pairs with them."""
    names = [{"c": "ant" if n < 6 else "bee", "k": n % 6, "n": n} for n in range(12)]
    places = [(image.format(**name), mask.format(**name)) for name in names]
    for one, other in places:
        photo(f"my set/{one}"), shape(f"my set/{other}")
    found = find_images(["my set"])
    assert sorted(os.path.relpath(path, "my set") for path in found.paths) == sorted(one for one, _ in places)
    assert "left out: 12 masks beside their images" in found.left_out[0]
    error = check_raises(
        DataError, "and few values, as a mask has: 12 files", "", opened, "my set", "classification"
    )
    without, _, of_unet = error.hint.partition("for the network unet: ")
    assert bool(without) == MASKS[image, mask] and ("class-" in of_unet) != MASKS[image, mask]
    if without:
        command, target = re.search(r"(python -m .*?); then pass --dataset (.*?);", without).groups()
        assert sorting.main(shlex.split(command)[3:]) == 0
        source = opened(shlex.split(target)[0], "classification")
        assert len(source.train) + len(source.eval) == 12 and source.info.class_names == ("ant", "bee")
    else:
        (move,) = re.findall(r"if they are classes: (mv .*)", of_unet)
        subprocess.run(move, shell=True, check=True)
    command, target = re.search(r": (python -m .*?); then pass --dataset (.*?)(?:;|\Z)", of_unet).groups()
    if not without:
        command = None  # the folder has another name now
    if command:
        assert sorting.main(shlex.split(command)[3:]) == 0
        source = opened(shlex.split(target)[0], "segmentation")
        assert len(source.train) + len(source.eval) == 12


def opened(folder, task):
    return open_dataset(choose_dataset(folder, Path("."), home="", task=task))


def dark(brightness, *paths):
    """Writes images of a few bright spots on black, as of stars and of scans."""
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((40, 40), np.uint8)
        spots = RNG.rand(40, 40) < brightness
        pixels[spots] = RNG.randint(20, 256, int(spots.sum()))
        Image.fromarray(pixels).save(path)


def blank(*paths):
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (24, 24), "white").save(path)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: (
            dark(0.05, *(f"set/a/{k}.png" for k in range(6))),
            dark(0.4, *(f"set/b/{k}.png" for k in range(6))),
        ),
        lambda: (
            photo(*(f"set/day/{k}.jpg" for k in range(6))),
            shape(*(f"set/logo/{k}.jpg" for k in range(6))),
        ),
        lambda: (blank(*(f"set/a/{k}.png" for k in range(6))), photo(*(f"set/b/{k}.png" for k in range(6)))),
        lambda: photo(*(f"set/{c}/{k:03}.jpg" for c in "abc" for k in range(5))),  # numbered photographs
        lambda: shape(*(f"set/{c}/{k:03}.png" for c in "abc" for k in range(5))),  # drawings of all classes
        lambda: (photo(*(f"set/a/{k}.jpg" for k in range(5))), shape(*(f"set/b/x{k}.png" for k in range(5)))),
        lambda: (
            photo(*(f"set/a/{k}.jpg" for k in range(5))),
            shape(*(f"set/class-b/{k}.png" for k in range(5))),
        ),
        lambda: (
            photo(*(f"set/{c}/{k}.jpg" for c in "ab" for k in range(5))),
            shape("set/a/1.png", "set/a/2.png"),
        ),
    ],
)
def test_images_of_classes_are_no_masks(draw):
    draw()
    source = opened("set", "classification")
    assert len(source.train) + len(source.eval) == sum(len(names) for _, _, names in os.walk("set"))


def areas(values, dtype=np.uint8, size=96):
    """Returns a picture of slanted stripes of the values, the first of which is the widest."""
    widths = [2, *([1] * (len(values) - 1))]
    numbers = np.repeat(np.arange(len(values)), widths)[np.arange(size) * sum(widths) // size]
    place = (np.arange(size)[:, np.newaxis] + np.arange(size)) // 2
    return Image.fromarray(np.array(values, dtype)[numbers[place]])


def indexed(values):
    image = areas(values).convert("L")
    image.putpalette([(7 * k * k) % 256 for k in range(768)])
    return image


def stars():
    """A photograph of the night: one common value, and many others between 20 and 255 on a tenth of the pixels."""
    pixels = np.zeros((96, 96), np.uint8)
    spots = np.arange(96 * 96).reshape(96, 96) % 10 == 3
    pixels[spots] = 20 + np.arange(int(spots.sum())) % 236
    return Image.fromarray(pixels)


def shaded():
    """Shapes of two greys on black, and a slope of many greys that takes more room than they."""
    pixels = np.zeros((96, 96), np.uint8)
    pixels[:40, :60], pixels[:40, 60:] = 120, 220
    pixels[40:] = np.arange(96) * 2
    return Image.fromarray(pixels)


DRAWN = {
    "a photograph of stars": (stars, "png", False),
    "shapes and a slope": (shaded, "png", False),
    "bits": (lambda: areas([0, 255]).convert("1"), "png", True),
    "20 classes in a palette": (lambda: indexed(range(20)), "png", True),
    "16 bits": (lambda: areas([0, 300, 60000], np.uint16), "png", True),
    "numbers of 16 bits": (lambda: areas(range(0, 60000, 700), np.uint16), "png", False),
    "colours of one brightness": (lambda: areas([(30, 60, 90), (90, 30, 60), (60, 90, 30)]), "png", True),
    "JPEG of grey areas": (lambda: areas([0, 120, 250]), "jpg", True),
    "JPEG of areas in colour": (lambda: areas([(200, 30, 30), (30, 200, 30), (0, 0, 0)]), "jpg", True),
    "floats": (lambda: areas([0.5, 1.5], np.float32), "tif", True),
    "large areas": (lambda: areas([0, 255], size=1200), "png", True),
    "40 greys": (lambda: areas([6 * k for k in range(40)]), "png", False),
    "JPEG of a slope": (lambda: areas([*range(0, 256, 2)]), "jpg", False),
}


@pytest.mark.parametrize("begin", ["", "./", "set/"])
def test_a_folder_among_images_has_masks_of_a_few_of_them_however_paths_begin(begin):
    """Among ten images, three of which have masks: in a folder beside them, that would be too few."""
    images = [f"{begin}{k}.png" for k in range(10)]
    masks = [f"{begin}masks/{k}.png" for k in range(3)]
    Path(begin, "masks").mkdir(parents=True, exist_ok=True)
    for path in images:
        Image.fromarray(RNG.randint(0, 256, (64, 64, 3)).astype(np.uint8)).save(path)
    for path in masks:
        Image.fromarray(np.uint8(255 * np.eye(64))).save(path)
    assert masks_by_content([*images, *masks]) == dict(zip(masks, images))


@pytest.mark.parametrize("kind", DRAWN)
def test_masks_are_drawings_of_few_values(kind):
    draw, ending, is_mask = DRAWN[kind]
    size = draw().size
    paths = []
    for k in range(4):
        paths += [f"set/img_{k}.png", f"set/img_{k}_label.{ending}"]
        Path("set").mkdir(exist_ok=True)
        Image.fromarray(RNG.randint(0, 256, (*size, 3)).astype(np.uint8)).save(paths[-2], compress_level=0)
        draw().save(paths[-1], **({"quality": 60} if ending == "jpg" else {}))
    found = {mask: image for image, mask in zip(paths[::2], paths[1::2])} if is_mask else {}
    assert masks_by_content(paths) == found
    # Masks of another size are those of other images.
    draw().crop((0, 0, 50, 50)).save(paths[1])
    assert masks_by_content(paths) == {}


def test_folders_of_a_system_and_tables_with_another_number_of_cells_are_left_aside():
    for k in range(6):
        save(f"set/photos/{k}.png", k), save(f"set/__MACOSX/photos/{k}.png", k)
    write("set/t.csv", "file,label", *(f"{k}.png,{'ab'[k % 2]}" for k in range(6)))
    source = followed("set", "classification")
    assert len(source.train) + len(source.eval) == 6
    write("set/t.csv", "file,label", *(f"{k}.png,{'ab'[k % 2]}" + ",more" * (k == 3) for k in range(6)))
    assert "sorting" not in refused("set", "classification")


def test_masks_without_pairs_and_damaged_files_get_a_hint_that_works():
    """Words of another file do not hide masks; a damaged file and a FIFO say nothing and end nothing."""
    for c in ("ant", "bee"):
        for k in range(12):
            photo(f"set/{c}/{k}.jpg"), shape(f"set/{c}/{k}.png")
        for k in range(12, 18):
            photo(f"set/{c}/{k}.jpg")
    shape("set/ant/label_overview.png")
    hint = refused_when_opened("set")
    command, target = re.search(r"(python -m .*?); then pass --dataset (.*)", hint).groups()
    assert sorting.main(shlex.split(command)[3:]) == 0
    source = opened(shlex.split(target)[0], "classification")
    assert len(source.train) + len(source.eval) == 36
    for k in range(12):
        photo(f"two/horse/{k}.png"), shape(f"two/mask/{k}.png")
    shape("two/mask/alone.png")
    assert refused_when_opened("two").startswith("if they are classes: mv two/mask two/class-mask")
    for path in ("two/mask/0.png", "two/horse/4.png"):
        os.truncate(path, 20)
    assert masks_by_content([f"two/{side}/{k}.png" for side in ("horse", "mask") for k in range(12)]) == {}
    Path("two/mask/0.png").unlink()
    os.mkfifo("two/mask/0.png")
    assert len(find_images(["two"]).paths) >= 12


def refused_when_opened(folder):
    return check_raises(DataError, "and few values", "", opened, folder, "classification").hint


def test_a_part_in_the_names_of_files_is_one():
    for part, count in (("train", 4), ("testA", 2), ("testB", 1)):
        for k in range(count):
            photo(f"set/{part}_{k}.bmp"), shape(f"set/{part}_{k}_anno.bmp")
            photo(f"two/images/{part}_{k}.png"), shape(f"two/masks/{part}_{k}.png")
    for folder in ("set", "two"):
        error = check_raises(
            DataError, "begin with a part of a set", "into parts", opened, folder, "segmentation"
        )
        command, _, name = error.hint.partition("sorting pairs ")[2].partition("; then pass --dataset ")
        assert sorting.main(["pairs", *shlex.split(command)]) == 0
        source = opened(name, "segmentation")
        assert (len(source.train), len(source.eval)) == (4, 3)


def test_the_part_of_evaluation_has_its_masks_beside_it():
    for part, count in (("train", 4), ("val", 2), ("test", 3)):
        for k in range(count):
            photo(f"set/{part}/{k}.png"), shape(f"set/{part}annot/{k}.png")
    source = opened("set/test", "segmentation")
    assert len(source.train) + len(source.eval) == 3


def test_the_larger_part_or_the_one_without_a_word_of_evaluation_is_trained_on():
    for part, count in (("A-VAL-7K", 2), ("B-100K", 4)):
        for name in ("x", "y"):
            photo(*(f"set/{part}/{name}/{name}{k}.png" for k in range(count)))
    hint = refused("set", "classification")
    assert "mv set/B-100K set/train && mv set/A-VAL-7K set/val" in hint
    for part, count in (("rps", 4), ("rps-test-set", 2)):
        for name in ("x", "y"):
            photo(*(f"two/{part}/{part}/{name}/{name}{k}.png" for k in range(count)))
    commands = refused("two", "classification").partition("make two parts: ")[2].partition(";")[0]
    subprocess.run(commands, shell=True, check=True)
    source = opened("two", "classification")
    assert (len(source.train), len(source.eval)) == (8, 4)


def test_masks_are_never_sorted_into_classes():
    for k in range(6):
        photo(f"set/scans/{'ab'[k % 2]}_{k:04}.png"), shape(f"set/masks/{'ab'[k % 2]}_{k:04}_mask.png")
    photo("set/test/a_0091.png", "set/test/a_0092.png")
    for task in ("classification", "segmentation", ANY_TASK):
        with pytest.raises(UserError) as caught:
            choose_dataset("set", Path("."), home="", task=task)
        assert "for c in" not in caught.value.hint


def test_other_files_are_no_pairs():
    for k in range(4):
        save(f"set/a/{k}.png", k), save(f"set/b/x{k}.png", k)
    assert "sorting" not in refused("set", "segmentation")


def test_the_command_says_what_is_wrong_and_leaves_nothing(capsys):
    observers()
    words = [sys.executable, "-m", "ipucnn.datasets.sorting"]
    ran = subprocess.run([*words, "masks", "manual3", "new", "set"], capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.splitlines() == [
        "error: set: no masks are called manual3",
        "hint: the kinds of masks in it are manual1, manual2",
    ]
    assert sorting.main(["masks", "manual2", "set", "set"]) == 3 and "set exists" in capsys.readouterr().err
    assert sorting.main(["masks"]) == 2 and sorting.main(["classes", "new", "set"]) == 2
    os.mkdir("none")
    assert (
        sorting.main(["pairs", "new", "none"]) == 3 and "has no images and masks" in capsys.readouterr().err
    )
    os.rmdir("none")
    assert sorting.main(["classes", "absent.csv", "x", "new", "set"]) == 3
    write("set/t.csv", "name,sort,label", *(f"Image_0{k}L,{'xy'[k // 2]},{'ab'[k % 2]}" for k in range(4)))
    assert sorting.main(["classes", "set/t.csv", "weight", "new", "set"]) == 2
    assert "take one of label, sort" in capsys.readouterr().err and os.listdir(".") == ["set"]
    assert sorting.main(["classes", "set/t.csv", "sort", "new", "set"]) == 0
    assert sorted(os.listdir("new/x")) == ["Image_00L.png", "Image_01L.png"]
    check_raises(
        ConfigurationError, "no column", "", sorting.copies_of_classes, Path("set/t.csv"), "b", Path("set")
    )


# -- lists of parts -------------------------------------------------------------------------------------------


def by_class(folder="images", ending=".png"):
    """Writes images of two classes, whose values are their numbers; returns the names below the folder."""
    names = [f"{'cat' if k % 2 else 'dog'}/animal_{k}{ending}" for k in range(12)]
    for k, name in enumerate(names):
        save(f"set/{folder}/{name}", k)
    return names


def food():
    names = by_class(ending=".jpg")
    for part, chosen in (("train", names[:8]), ("test", names[8:11])):
        write(f"set/meta/{part}.txt", *(name[:-4] for name in chosen))
    write("set/meta/labels.txt", "cat", "dog")
    return range(8), range(8, 11)


def indoor():
    names = by_class()
    write("set/TrainImages.txt", *names[:7]), write("set/ValImages.txt", *names[7:])
    return range(7), range(7, 12)


def birds():
    names = by_class()
    write("set/images.txt", *(f"{k + 1} {name}" for k, name in enumerate(names)))
    write("set/train_test_split.txt", *(f"{k + 1} {int(k % 3 > 0)}" for k in range(12)))
    write("set/image_class_labels.txt", *(f"{k + 1} {k % 2 + 1}" for k in range(12)))
    return [k for k in range(12) if k % 3], range(0, 12, 3)


@pytest.mark.parametrize("make", [food, indoor, birds])
def test_lists_of_parts_are_kept(make):
    parts = make()
    assert "list the images of parts" in refused("set", "classification")
    source = followed("set", "classification")
    for examples, numbers in zip((source.train, source.eval), parts):
        found = labels_by_value(examples, source.info.class_names)
        assert {round(value) for value in found} == {*numbers}
        assert all(name == ("cat" if value % 2 else "dog") for value, name in found.items())


def test_lists_beside_class_folders_are_said_to_be_unread():
    names = by_class(".")
    source = opened("set", "classification")
    assert not any("lists" in line for line in source.info.warnings)
    write("set/train.txt", *names[:9]), write("set/test.txt", *names[9:])
    (line,) = [line for line in opened("set", "classification").info.warnings if "lists" in line]
    assert "of them" not in line
    assert "set/test.txt and set/train.txt list the images of parts" in line
    assert "3 in test/ and 9 in train/: python -m ipucnn.datasets.sorting lists set-parts set" in line


def test_rows_of_lists_without_an_image_are_counted():
    names = by_class()
    write("set/train.txt", *names[:9], "cat/animal_99.png"), write("set/test.txt", *names[9:11])
    hint = refused("set", "classification")
    assert "9 in train/, without 1 image in none of them; 1 row of them names no single image: " in hint


@pytest.mark.parametrize(
    "lists",
    [
        {
            "train1.txt": range(6),
            "test1.txt": range(6, 12),
            "train2.txt": range(3, 9),
            "test2.txt": [*range(3), *range(9, 12)],
        },  # several divisions
        {"train.txt": range(8), "test.txt": range(6, 12)},  # an image in both
        {"train.txt": range(12)},  # one part alone
        {"val.txt": range(6), "test.txt": range(6, 12)},  # nothing to train on
        {"train.txt": range(8), "test.txt": range(30, 40)},  # images that are not there
    ],
)
def test_lists_that_are_no_division_sort_nothing(lists):
    names = by_class()
    for name, numbers in lists.items():
        write(f"set/{name}", *(names[k] if k < 12 else f"cat/animal_{k}.png" for k in numbers))
    assert "sorting" not in refused("set", "classification")
    assert sorting.main(["lists", "new", "set"]) == 3 and not os.path.exists("new")


def test_a_part_without_class_folders_is_sorted_by_the_table_beside_it():
    """As in GTSRB, whose Test.csv has a path and a class in each row."""
    for k in range(12):
        save(f"set/Train/{k % 3}/{k}.png", k)
    for k in range(12, 18):
        save(f"set/Test/{k}.png", k)
    write("set/Test.csv", "Width,ClassId,Path", *(f"16,{k % 3},Test/{k}.png" for k in range(12, 18)))
    hint = refused("set", "classification")
    command = hint.partition("a table has their classes, named in its column Path: ")[2]
    program = f"{shlex.quote(sys.executable)} -m"
    subprocess.run(command.replace("python -m", program), shell=True, check=True, capture_output=True)
    source = opened("set", "classification")
    assert labels_by_value(source.eval, source.info.class_names) == {k: str(k % 3) for k in range(12, 18)}
    assert len(source.train) == 12


def test_pairs_are_copied_into_the_parts_of_lists():
    """As in Pascal VOC: masks of classes beside masks of objects, and lists of which some are of other images, too."""
    for k in range(8):
        save(f"set/JPEGImages/2007_{k:06}.jpg", k)
        if k < 6:
            save_mask(f"set/SegmentationClass/2007_{k:06}.png", k)
            save_mask(f"set/SegmentationObject/2007_{k:06}.png", 9)
    names = [f"2007_{k:06}" for k in range(8)]
    for kind, numbers in (("Main", (range(5), range(5, 8))), ("Segmentation", (range(4), range(4, 6)))):
        for part, of_part in zip(("train", "val", "trainval"), (*numbers, range(8 if kind == "Main" else 6))):
            write(f"set/ImageSets/{kind}/{part}.txt", *(names[k] for k in of_part))
        write(
            f"set/ImageSets/{kind}/cat_train.txt",
            *(f"{names[k]} {'-1' if k % 2 else ' 1'}" for k in numbers[0]),
        )
    hint = refused("set", "segmentation")
    assert "copy 6 such pairs (or instanceid in place of labelid)" in hint and "without 2 images" in hint
    assert (
        "in the parts of set/ImageSets/Segmentation/val.txt and set/ImageSets/Segmentation/train.txt" in hint
    )
    source = followed("set", "segmentation")
    for examples, numbers in ((source.train, range(4)), (source.eval, range(4, 6))):
        rows = [mask.reshape(mask.shape[:2]).any(axis=1).sum() for mask in examples.masks]
        assert rows == [k + 1 for k in numbers]


@pytest.mark.parametrize(
    "name, rows",
    [
        ("trainLabels.csv", [("id", "label"), *((k, "ab"[k % 2]) for k in range(1, 5))]),  # of another part
        ("sample_submission.csv", [("id", "label"), *((k, "ab"[k % 2]) for k in range(1, 9))]),
        ("rain.csv", [("file", "has_rain"), *((f"{k}.png", "ab"[k % 2]) for k in range(1, 9))]),
        ("labels.csv", [("id", "label"), *((f"train/a/{k}.png", "ab"[k % 2]) for k in range(1, 9))]),
        ("labels.csv", [("id", "label"), *((f"{'ab'[k % 2]}/{k}.png", "ab"[k % 2]) for k in range(1, 9))]),
    ],
)
def test_tables_that_are_not_of_a_part_sort_nothing_in_it(name, rows):
    for k in range(1, 9):
        save(f"set/train/{'ab'[k % 2]}/{k}.png", k), save(f"set/test/{k}.png", 100 + k)
    write(f"set/{name}", *(",".join(map(str, row)) for row in rows))
    assert "sorting" not in refused("set", "classification")


def test_images_of_a_part_that_its_table_lacks_are_counted():
    for k in range(8):
        save(f"set/train/{'ab'[k % 2]}/{k}.png", k), save(f"set/test/im{k}.png", 100 + k)
    write("set/test.csv", "file,label", *(f"test/im{k}.png,{'ab'[k % 2]}" for k in range(5)))
    hint = refused("set", "classification")
    words = "a table has their classes, named in its column file"
    assert f"{words}, without 3 images of which no class is known: python -m" in hint
    place = os.getcwd()
    write("set/test.csv", "file,label", *(f"{place}/set/test/im{k}.png,{'ab'[k % 2]}" for k in range(8)))
    assert f"{words}: python -m" in refused("set", "classification")


@pytest.mark.parametrize(
    "labels",
    [
        lambda name: "b" if name == "a" else "a",
        lambda name: "xy"[name in "ab"],
        lambda name: "same"[len(name)],
    ],
    ids=["exchanged", "of several folders", "one for all"],
)
def test_lists_with_classes_that_are_not_the_folders_make_no_class_folders(labels):
    names = [(folder, k) for folder in "abcd" for k in range(6)]
    for folder, k in names:
        save(f"set/images/{folder}/{folder}{k}.png", k)
    for part, numbers in (("train", range(4)), ("test", range(4, 6))):
        rows = (f"{folder}/{folder}{k}.png {labels(folder)}" for folder, k in names if k in numbers)
        write(f"set/{part}.txt", *rows)
    hint = refused("set", "classification")
    assert ("list the images of parts" in hint) == (labels("a") == labels("c"))


def test_lists_have_names_with_blanks_and_every_list_of_a_part_counts():
    for k in range(8):
        for name in (f"set/images/{'ab'[k % 2]}/{k} x.png", f"set/images/{'ab'[k % 2]}/{k}.png"):
            save(name, 100 + k if " " in name else k)
    names = [f"{'ab'[k % 2]}/{k} x.png" for k in range(8)]
    write("set/train.txt", *names[:4]), write("set/test.txt", *names[4:])
    source = followed("set", "classification")
    assert sorted(labels_by_value(source.train, source.info.class_names)) == [100, 101, 102, 103]
    write("set/training.txt", *(f"{'ab'[k % 2]}/{k}.png" for k in range(4)))
    assert "sorting" not in refused("set", "classification")
    write("set/training.txt", *names[:6])  # more than train.txt, as trainval.txt
    assert "4 in train/" in refused("set", "classification")


def test_lists_with_an_image_in_another_class_folder_or_in_the_root_make_no_class_folders(run):
    names = by_class()
    for change in (lambda name: name.replace("cat/", "dog/"), lambda name: name.replace("cat/", "/")):
        for part, of_part in (("train", names[:8]), ("test", names[8:])):
            write(f"set/{part}.txt", *map(change, of_part))
        assert ("sorting" in refused("set", "classification")) == ("dog/animal_1." not in change(names[1]))
    for k in range(4):
        save(f"root/r{k}.png", k), save(f"root/cat/c{k}.png", k)
    for part, numbers in (("train", (0, 1, 2)), ("test", (3,))):
        write(f"root/{part}.txt", *(name for k in numbers for name in (f"r{k}.png", f"cat/c{k}.png")))
    assert sorting.main(["lists", "new", "root"]) == 3
    Path("root/train.jsonl").write_text("{}\n{}\n")
    assert run("verify-dataset", "root")[0] in (2, 3)


@pytest.mark.parametrize("root", ["set", "."])
def test_cells_may_begin_with_the_folder_itself(root, monkeypatch):
    for k in range(6):
        save(f"set/images/i{k}.png", k)
    write("set/labels.csv", "path,label", *(f"set/i{k}.png,{'ab'[k % 2]}" for k in range(6)))
    if root == ".":
        monkeypatch.chdir("set")
    assert "sorting classes" in refused(root, "classification")


def test_tables_of_two_parts_are_sorted_into_both():
    """Their names say the parts, as in Oxford-IIIT Pets."""
    for k in range(20):
        save(f"set/images/subject{k % 5}/{k}.png", k)
    for name, numbers in (("trainval", range(12)), ("test", range(12, 20))):
        rows = (f"subject{k % 5}/{k}.png,{'well' if k % 2 else 'ill'}" for k in numbers)
        write(f"set/{name}.csv", "file,label", *rows)
    assert "without" not in refused("set", "classification").partition("sorting")[0]
    os.rename("set/test.csv", "test.csv")
    write("set/all.csv", "file,label", *(f"{k}.png,{'well' if k % 2 else 'ill'}" for k in range(20)))
    assert "sorting classes set/all.csv label" in refused("set", "classification")  # of all images
    os.rename("test.csv", "set/test.csv"), os.remove("set/all.csv")
    source = followed("set", "classification")
    for examples, numbers in ((source.train, range(12)), (source.eval, range(12, 20))):
        found = labels_by_value(examples, source.info.class_names)
        assert found == {k: "well" if k % 2 else "ill" for k in numbers}


def test_lists_beside_class_folders_with_other_classes_are_said_to_be_unread():
    names = by_class(".")
    for part, of_part in (("train", names[:9]), ("test", names[9:])):
        write(f"set/{part}.csv", *(f"{name},{'dog' if 'cat' in name else 'cat'}" for name in of_part))
    (line,) = [line for line in opened("set", "classification").info.warnings if "lists" in line]
    assert "have other classes than the folders" in line


def test_a_column_that_equals_the_folders_settles_the_classes():
    names = [(folder, k) for folder in "abcd" for k in range(6)]
    for folder, k in names:
        save(f"set/images/{folder}/{folder}{k}.png", k)
    for part, numbers in (("train", range(4)), ("test", range(4, 6))):
        rows = (
            f"{folder}/{folder}{k}.png,{folder},{'xy'[folder in 'ab']}" for folder, k in names if k in numbers
        )
        write(f"set/{part}.csv", "path,label,kind", *rows)
    assert "list the images of parts" in refused("set", "classification")


def test_files_that_tell_no_classes_concern_no_other_error():
    for part in ("train", "training"):
        save(f"set/{part}/a/0.png", 0), save(f"set/{part}/b/0.png", 0)
    Path("set/annotations.json").write_text("{}")
    error = check_raises(
        UserError, "several folders", "", choose_dataset, "set", Path("."), home="", task="classification"
    )
    assert "annotations" not in error.message


# -- names and labels that may mean something else -------------------------------------------------------------


def reason(folder="z"):
    """Returns what the error says of the tables and names in a folder that get no command."""
    error = check_raises(UserError, "", "", choose_dataset, folder, Path("."), home="", task="classification")
    assert "sorting" not in error.hint
    return error.message.partition("; ")[2]


def photos(folder, *names):
    photo(*(f"{folder}/{name}" for name in names))


@pytest.mark.parametrize(
    "files, rows, cell",
    [
        (
            "train/{}.png",
            [",image,label", *(f"{k},img_{k + 1}.png,{'ab'[k % 2]}" for k in range(10))],
            "'img_1.png', and no image is called so",
        ),
        (
            "images/{}.jpg",
            ["file,age,label", *(f"face_{39 - k}.jpg,{k + 1},{'ab'[k % 2]}" for k in range(10))],
            "'face_39.jpg', and no image is called so",
        ),
        (
            "images/{}.jpg",
            [",filename,label", *(f"{k},{k + 1}.png,{'ab'[k % 2]}" for k in range(1, 11))],
            "'2.png', and the file is '2.jpg'",
        ),
        (
            "images/{}.jpg",
            ["age,path,label", *(f"{k},{k}.png,{'ab'[k % 2]}" for k in range(1, 11))],
            "'1.png', and the file is '1.jpg'",
        ),
        (
            "images/{}.jpg",
            ["image_id,photo,label", *(f"{k + 1},P{k},{'ab'[k % 2]}" for k in range(10))],
            "'P0', and no image is called so",
        ),
        (
            "images/{}.jpg",
            [",url,label", *(f"{k + 1},http://x/{k}0.jpg,{'ab'[k % 2]}" for k in range(10))],
            "'http://x/00.jpg', and no image is called so",
        ),
    ],
)
def test_numbers_do_not_name_images_beside_names_that_are_not_there(files, rows, cell):
    photos("z", *(files.format(k) for k in range(1, 11)))
    write("z/train.csv", *rows)
    assert reason() == f"z/train.csv names {cell}"


def test_numbers_of_rows_do_not_name_images_that_have_several_rows():
    photos("z", *(f"im/{k}.jpg" for k in range(10)))
    write("z/t.csv", ",filename,label", *(f"{k},{k // 2}.jpg,{'ab'[k % 2]}" for k in range(10)))
    assert reason() == "z/t.csv has several rows for an image, as for boxes or several classes"


@pytest.mark.parametrize(
    "head, cell",
    [
        ("id", "{k},http://x/{k}0.jpg"),  # found there, and called by a number here
        ("id", "{k},{k}.png"),  # an earlier form of the same image
        ("id", "{k},ab"),
    ],
)
def test_numbers_name_images_if_no_other_column_does(head, cell):
    numbers = [3, 1, 4, 15, 9, 2, 6, 5]
    photos("z", *(f"im/{k}.jpg" for k in numbers))
    write("z/t.csv", f"{head},file,label", *(f"{cell.format(k=k)},{'ab'[k % 2]}" for k in numbers))
    hint = refused("z", "classification")
    assert "z/t.csv has a row for each image, named in its column id; copy them" in hint
    source = followed("z", "classification")
    for path, label in zip(source.train.paths, source.train.labels):
        assert source.info.class_names[label] == "ab"[int(Path(path).stem.rpartition("_")[2]) % 2]


def test_hints_say_which_column_names_the_images():
    photos("z", *(f"{k}.jpg" for k in range(6)))
    write("z/t.csv", ",label", *(f"{k},{'ab'[k % 2]}" for k in range(6)))
    assert ", named in its column 1, which has no name; copy" in refused("z", "classification")
    write("z/t.csv", *(f"{'ab'[k % 2]},{k}.jpg" for k in range(6)))
    assert ", named in its column 2; copy" in refused("z", "classification")


def test_repeated_numbers_of_images_are_no_names_and_neither_are_those_of_rows():
    photos("z", *(f"im/{k}.jpg" for k in range(10)))
    write("z/t.csv", ",image,label", *(f"{k},{k // 2},{'ab'[k % 2]}" for k in range(10)))
    assert reason() == "z/t.csv has several rows for an image, as for boxes or several classes"


def test_columns_of_classes_may_be_called_by_numbers_as_images_are():
    photos("z", *(f"{k}.jpg" for k in range(8)))
    write("z/t.csv", "image,0,1", *(f"{k}.jpg,{k % 2},{1 - k % 2}" for k in range(8)))
    assert "named in its column image" in refused("z", "classification")
    assert followed("z", "classification").info.class_names == ("0", "1")


@pytest.mark.parametrize(
    "file, cell, words",
    [
        ("Img_{}.JPG", "img_{}", "'img_0', and the file is 'Img_0.JPG'"),
        ("im/i{}.jpg", "x/i{}.png", "'x/i0.png', and the file is 'i0.jpg'"),
        ("im/i{}.jpg", "I{}.dcm", "'I0.dcm', and the file is 'i0.jpg'"),
        ("im/i{}.jpg", "i{}.5", ""),
        ("im/i{}.jpg", "more{}", ""),
    ],
)
def test_names_in_another_case_or_with_another_ending_are_the_reason(file, cell, words):
    photos("z", *(file.format(k) for k in range(8)))
    write("z/labels.csv", "name,label", *(f"{cell.format(k)},{'ab'[k % 2]}" for k in range(8)))
    assert reason() == (f"z/labels.csv names {words}" if words else "")


def test_names_in_another_form_of_unicode_are_the_same():
    expected = {}
    for k in range(8):
        save(f"z/bu\u0308cher/lo\u0308we{k}.png", k)
        expected[k] = "ab"[k % 2]
    write("z/t.csv", "file,label", *(f"b\u00fccher/l\u00f6we{k}.png,{expected[k]}" for k in range(8)))
    source, found = followed("z", "classification"), {}
    for part in (source.train, source.eval):
        found.update(labels_by_value(part, source.info.class_names))
    assert found == expected


def two_parts_of_equal_names(ending="png"):
    """Writes images of equal names in two parts; the value is even in training, and odd in the test."""
    for k in range(8):
        save(f"z/train/{k}.{ending}", 2 * k), save(f"z/test/{k}.{ending}", 2 * k + 1)


def tables_in_parts():
    write("z/train/labels.csv", "file,label", *(f"{k}.png,{'ab'[k % 2]}" for k in range(8)))
    write("z/test/labels.csv", "file,label", *(f"{k}.png,{'ba'[k % 2]}" for k in range(8)))


def objects_in_parts():
    for part, names in (("train", "ab"), ("test", "ba")):
        rows = ({"file_name": f"{k}.png", "label": names[k % 2]} for k in range(8))
        write(f"z/{part}/metadata.jsonl", *map(json.dumps, rows))


def tables_called_like_parts():
    write("z/train_labels.csv", "id,label", *(f"{k},{'ab'[k % 2]}" for k in range(8)))
    write("z/more/test.csv", "id,label", *(f"{k},{'ba'[k % 2]}" for k in range(8)))


def tables_without_a_header():
    write("z/train.csv", *(f"{k}.png,{'ab'[k % 2]}" for k in range(8)))
    write("z/test.csv", *(f"{k}.png,{'ba'[k % 2]}" for k in range(8)))


@pytest.mark.parametrize(
    "make", [tables_in_parts, objects_in_parts, tables_called_like_parts, tables_without_a_header]
)
def test_tables_of_parts_name_the_images_of_their_part(make):
    two_parts_of_equal_names()
    make()
    source = followed("z", "classification")
    found = labels_by_value(source.train, source.info.class_names)
    assert found == {2 * k: "ab"[k % 2] for k in range(8)}
    found = labels_by_value(source.eval, source.info.class_names)
    assert found == {2 * k + 1: "ba"[k % 2] for k in range(8)}


def test_a_table_of_one_part_leaves_out_the_other_one_even_if_an_image_is_absent():
    two_parts_of_equal_names()
    for k in range(8, 24):
        save(f"z/train/{k}.png", 2 * k)
    os.remove("z/train/3.png")
    write("z/train_labels.csv", "id,label", *(f"{k},{'ab'[k % 2]}" for k in range(24)))
    hint = refused("z", "classification")
    assert "without 8 images of which no class is known; 1 row names no image" in hint
    source, found = followed("z", "classification"), {}
    for part in (source.train, source.eval):
        found.update(labels_by_value(part, source.info.class_names))
    assert found == {2 * k: "ab"[k % 2] for k in range(24) if k != 3}


def test_a_path_counts_more_than_the_folder_of_its_table():
    two_parts_of_equal_names()
    write("z/train/labels.csv", "file,label", *(f"test/{k}.png,{'ba'[k % 2]}" for k in range(8)))
    source, found = followed("z", "classification"), {}
    for part in (source.train, source.eval):
        found.update(labels_by_value(part, source.info.class_names))
    assert found == {2 * k + 1: "ba"[k % 2] for k in range(8)}


def test_names_of_several_images_are_the_reason():
    two_parts_of_equal_names()
    write("z/labels.csv", "file,label", *(f"{k}.png,{'ab'[k % 2]}" for k in range(8)))
    assert reason() == "z/labels.csv names '0.png', which may be test/0.png or train/0.png"


def test_the_column_of_training_sorts_all_parts():
    two_parts_of_equal_names()
    tables_in_parts()
    write("z/test/labels.csv", "file,sex", *(f"{k}.png,{'mf'[k % 2]}" for k in range(8)))
    hint = refused("z", "classification")
    assert "labels.csv label z-classes z;" in hint and "without 8 images of which no class is known" in hint


def labelled(*rows):
    """Writes ten images and a table of them, a row of which is formatted with the number of its image."""
    photos("z", *(f"{k}.jpg" for k in range(10)))
    head, *cells = rows
    write("z/t.csv", head, *(f"{k}.jpg,{cells[k % len(cells)]}" for k in range(10)))


@pytest.mark.parametrize(
    "head, cells, column",
    [
        ("file,sex,Finding Labels", ("m,Mass", "f,Hernia", "m,None"), "Finding Labels (3 classes"),
        ("file,sex,test_result", ("m,positive", "f,negative"), "sex (2 classes: f, m; or test_result in"),
        ("file,test_result", ("positive", "negative"), "test_result (2 classes"),
        ("file,sex,ClassLabel", ("m,x", "f,y", "m,z"), "ClassLabel (3 classes"),
        ("file,sub_class,label", ("m,x", "f,y", "m,z"), "label (3 classes: x, y, z; or sub_class in"),
        ("file,num_labels,kind", ("2,x", "1,y"), "kind (2 classes: x, y)"),
        ("file,predicted_label,label", ("x,y", "y,x"), "label (2 classes: x, y; or predicted_label in"),
        ("file,sex,choice", ("m,x", "f,y", "m,z"), "choice (3 classes"),
        ("file,image_group,kind", ("1,x", "2,y"), "kind (2 classes: x, y)"),
        ("file,test,kind", ("yes,x", "no,y"), "kind (2 classes: x, y)"),
        ("file,split,kind", ("fold_1,x", "fold_2,y"), "kind (2 classes: x, y)"),
    ],
)
def test_words_of_columns_and_their_values_tell_which_has_the_classes(head, cells, column):
    labelled(head, *cells)
    assert f"by its column {column}" in refused("z", "classification")


def test_hints_and_the_command_name_classes(capsys):
    labelled("file,label", "cat", "dog", "nan", "pug", "rat")
    hint = refused("z", "classification")
    assert "by its column label (5 classes: cat, dog, nan, ...); nan is a class, of 2 images: " in hint
    assert sorting.main(["classes", "z/t.csv", "label", "new", "z"]) == 0
    assert (
        capsys.readouterr().out == "10 files of z copied into new, in 5 class folders: cat, dog, nan, ...\n"
    )
    labelled("file,cat,dog", "0,1", "1,0")
    assert "columns with a 1 for its class (2 classes: cat, dog): " in refused("z", "classification")
    one_folder()
    assert sorting.main(["names", "more", "set"]) == 0
    assert capsys.readouterr().out == "8 files of set copied into more, in 2 class folders: cat, great_dane\n"


@pytest.mark.parametrize(
    "cells, word",
    [
        (("cat", "dog", "cat|dog", "dog"), "cat|dog may"),
        (("Mass", "Hernia|Mass", "Mass", "Mass"), "Hernia|Mass may"),
        (("a", "b", "a; b", "b + a"), "a; b and 1 more class may"),
        (("a", "b", "a b", "b"), "a b may"),
        (("a-b", "a", "b", "great a"), ""),
    ],
)
def test_classes_that_join_others_may_be_several_labels(cells, word):
    labelled("file,label", *cells)
    assert (
        f"; {word} be several labels of an image: " if word else "label (4 classes: a, a-b, b, great a): "
    ) in refused("z", "classification")


@pytest.mark.parametrize(
    "head, cells, why",
    [
        ("file,label,sex", ("N/A,m", "x,f"), "label 'N/A' cannot be a folder's name (column label)"),
        ("file,label", (".net", "x"), "label '.net' cannot be a folder's name (column label)"),
        ("file,finding", ("train", "x"), "label 'train' cannot be a folder's name (column finding)"),
        ("file,label,sex", ("x,m", "x,f"), "all images have the label 'x' (column label)"),
        ("file,label,sex", (",m", ",f"), "no image has a label (column label)"),
        ("file,cat,dog/s", ("0,1", "1,0"), "label 'dog/s' cannot be a folder's name"),
        ("file,cat,cat", ("0,1", "1,0"), "two columns are called 'cat'"),
        ("file,,", ("0,1", "1,0"), "two columns have no name"),
        (
            "file,cat,dog,sex",
            ("0,1,m", "1,0,f", "1,0,m", "1,0,m", "0,0,f", *["0,1,f"] * 5),
            "row 6 has no 1 in its columns cat, dog",
        ),
        (
            "file,cat,dog,sex",
            ("0,1,m", "1,0,f", "1,0,m", "1,1,m", "0,1,f", *["0,1,f"] * 5),
            "row 5 has more than one 1 in its columns cat, dog",
        ),
    ],
)
def test_the_reason_says_why_columns_do_not_tell_the_classes(head, cells, why):
    labelled(head, *cells)
    words = "z/t.csv names the images, and its columns do not tell which has their classes"
    assert reason() == f"{words}: {why}"


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=|"])
def test_a_first_line_may_tell_the_separator(first):
    photos("z", *(f"{k}.jpg" for k in range(8)))
    rows = ["file;label,sort", *(f"{k}.jpg;{'ab'[k % 2]}" for k in range(8))]
    text = "\r\n".join(rows).replace(";", first.strip('"')[-1])
    Path("z/t.csv").write_bytes(f"{first}\r\n{text}".encode())
    assert "by its column label,sort (2 classes: a, b)" in refused("z", "classification")


def test_changed_copies_of_images_are_of_the_class_of_their_image(capsys):
    for k in range(4):
        photos("z", f"cat_{k}.jpg", f"cat_{k}_rot_90.jpg", f"my cat_{k}.jpg", f"cat_{k}-cut-3.jpg")
    hint = refused("z", "classification")
    assert "copy them into class folders (2 classes: cat, my cat): python" in hint
    assert sorting.main(["names", "new", "z"]) == 0
    assert sorted(os.listdir("new")) == ["cat", "my cat"] and len(os.listdir("new/cat")) == 12
    assert capsys.readouterr().out.endswith("in 2 class folders: cat, my cat\n")


def test_classes_of_one_part_are_those_of_the_other():
    for k in range(4):
        photos("z/train", f"cat_{k}.jpg", f"dog_{k}.jpg")
        photos("z/test", f"cat_0_rot_{k}.jpg", f"dog_0_rot_{k}.jpg")
    assert "(2 classes: cat, dog): python" in refused("z", "classification")
    source = followed("z", "classification")
    assert source.info.class_names == ("cat", "dog") and len(source.eval) == 8


def test_images_without_a_class_in_their_names_are_the_reason():
    photos("z", *(f"{name}.{k}.jpg" for name in ("cat", "dog") for k in range(10)), "logo.png")
    assert reason() == "z/logo.png has no class in its name, as cat.0.jpg has"
    photos("z", "a-1.png")
    assert reason() == "z/a-1.png and 1 more image have no class in their names, as cat.0.jpg has"
    photos("z", "more.png")
    assert reason() == ""
    photos("y/train", *(f"{name}.{k}.jpg" for name in ("cat", "dog") for k in range(10)), "logo.png")
    assert reason("y") == "y/train/logo.png has no class in its name, as cat.0.jpg has"


def test_masks_of_several_structures_are_kinds_and_no_images_without_masks():
    for k in range(4):
        photo(f"set/CXR/{k}.png"), shape(f"set/lungs/leftMask/{k}.png", f"set/lungs/rightMask/{k}.png")
    hint = refused("set", "segmentation")
    assert "(or rightMask in place of leftMask)" in hint and "that have none" not in hint
    source = followed("set", "segmentation")
    assert len(source.train) + len(source.eval) == 4
    for k in range(4):
        made = list(Path("set-pairs", "masks").glob(f"*{k}.png"))
        assert [one.read_bytes() for one in made] == [Path(f"set/lungs/leftMask/{k}.png").read_bytes()]


def test_a_label_counts_before_two_columns_of_facts():
    photos("set", *(f"{k}.png" for k in range(9)))
    rows = (f"{k}.png,{['cat', 'dog', 'bird'][k % 3]},{k % 2},{1 - k % 2}" for k in range(9))
    write("set/labels.csv", "file,label,male,female", *rows)
    assert "by its column label (3 classes: bird, cat, dog" in refused("set", "classification")


def test_predictions_are_no_truth():
    photos("set", *(f"{k}.png" for k in range(8)))
    write("set/predictions.csv", "image,label", *(f"{k}.png,cat" if k else "0.png,dog" for k in range(8)))
    write("set/truth.csv", "image,label", *(f"{k}.png,{'ab'[k % 2]}" for k in range(8)))
    assert "truth.csv has a row" in refused("set", "classification")


@pytest.mark.parametrize("header, column", [([], "dog"), (["1,kind,colour"], "kind")])
def test_a_table_that_begins_with_1_is_read(header, column):
    photos("set", *(f"{k}.jpg" for k in range(2, 31)))
    more = ",red" if header else ""
    write("set/labels.csv", *header, *(f"{k},{['cat', 'dog'][k % 2]}{more}" for k in range(1, 31)))
    assert f"by its column {column} (2 classes: cat, dog)" in refused("set", "classification")
    source = followed("set", "classification")
    made = dict(zip([*source.train.paths, *source.eval.paths], [*source.train.labels, *source.eval.labels]))
    assert {int(Path(path).stem): label for path, label in made.items()} == {k: k % 2 for k in range(2, 31)}
