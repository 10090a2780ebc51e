"""Volumes and pairs of images and masks: reading them, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ipucnn import cli
from ipucnn.datasets.base import fold_of_each, select_fold
from ipucnn.datasets.registry import choose_dataset
from ipucnn.datasets.segmentation.imagemasks import open_imagemasks
from ipucnn.datasets.segmentation.isbi2012 import open_isbi2012, read_volume
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.runs.images.inputs import file_pages

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "isbi2012"


def write_volume(path, pages, **options):
    images = [Image.fromarray(page) for page in pages]
    images[0].save(path, format="TIFF", save_all=True, append_images=images[1:], **options)


def make_slices(num=5, side=40, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, side, side)).astype(np.uint8)
    return images, np.where(images > 60, 255, 0).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    images, masks = make_slices()
    write_volume(tmp_path / "train-volume.tif", images)
    write_volume(tmp_path / "train-labels.tif", masks)
    return tmp_path


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_deflate"])
def test_a_volume_comes_back(tmp_path, compression):
    images, _ = make_slices(seed=3)
    options = {} if compression is None else {"compression": compression}
    write_volume(tmp_path / "v.tif", images, **options)
    np.testing.assert_array_equal(read_volume(tmp_path / "v.tif"), images)


def test_one_bit_is_black_and_white(tmp_path):
    pages = [np.eye(9, dtype=bool), ~np.eye(9, dtype=bool)]
    write_volume(tmp_path / "v.tif", pages)
    np.testing.assert_array_equal(read_volume(tmp_path / "v.tif"), np.stack(pages) * 255)


def test_the_last_fifth_is_held_out(folder):
    source = open_isbi2012(folder)
    images, masks = make_slices()
    assert (len(source.train), len(source.eval)) == (4, 1) and source.info.tiled
    np.testing.assert_array_equal(source.train.images[..., 0], images[:4])
    np.testing.assert_array_equal(source.eval.labels, masks[4:] // 255)
    assert source.info.mean[0] == pytest.approx(images[:4].mean(), abs=1e-5)


def test_it_is_found_by_name_in_a_folder_and_as_one(folder):
    (folder / "isbi2012").mkdir()
    for name in ("train-volume.tif", "train-labels.tif"):
        (folder / name).rename(folder / "isbi2012" / name)
    for name, path in (("isbi2012", folder), ("ISBI-2012", folder / "isbi2012"), (None, folder)):
        choice = choose_dataset(name, path, home="isbi2012", task="segmentation")
        assert (choice.name, choice.location) == ("isbi2012", folder / "isbi2012")
    choice = choose_dataset(str(folder / "isbi2012"), Path("."), home="isbi2012", task="segmentation")
    assert choice.name == "isbi2012"


def run_on(folder, *options):
    return cli.run(
        ["train", "unet", "--dataset", "isbi2012", "--dataset-path", str(folder), "--image-size", "204",
         "--base-filters", "1", "--run-dir", str(folder / "run"), *options]
    )  # fmt: skip


def rgb(folder):
    write_volume(folder / "train-volume.tif", np.zeros((5, 40, 40, 3), np.uint8))


def sixteen_bits(folder):
    write_volume(folder / "train-volume.tif", np.arange(5 * 1600, dtype=np.uint16).reshape(5, 40, 40) * 8)


def shorter(folder):
    write_volume(folder / "train-labels.tif", make_slices(4)[1])


def of_another_size(folder):
    write_volume(folder / "train-labels.tif", make_slices(5, 41)[1])


def mixed_sizes(folder):
    images, _ = make_slices()
    write_volume(folder / "train-volume.tif", [*images[:4], images[4][:30]])


def three_values(folder):
    masks = make_slices()[1]
    masks[2, 3, 4] = 7
    write_volume(folder / "train-labels.tif", masks)


def one_value(folder):
    write_volume(folder / "train-labels.tif", np.full((5, 40, 40), 255, np.uint8))


def a_cut_page(folder):
    path = folder / "train-volume.tif"
    write_volume(path, make_slices()[0], compression="tiff_lzw")
    with Image.open(path) as volume:
        volume.seek(2)
        first = volume.tag_v2[273][0]
    data = bytearray(path.read_bytes())
    data[first : first + 60] = b"\xff" * 60
    path.write_bytes(bytes(data))


def truncated(folder):
    path = folder / "train-volume.tif"
    path.write_bytes(path.read_bytes()[:5000])


def no_tiff(folder):
    (folder / "train-volume.tif").write_bytes(b"II but no TIFF")


def a_png(folder):
    Image.fromarray(make_slices()[0][0]).save(folder / "train-volume.tif", format="PNG")


def labels_missing(folder):
    (folder / "train-labels.tif").unlink()


def one_slice(folder):
    for name, pages in zip(("train-volume.tif", "train-labels.tif"), make_slices(1)):
        write_volume(folder / name, pages)


BAD = [
    (rgb, "RGB"), (sixteen_bits, "16 bits"), (shorter, "5 slices"), (of_another_size, "41x41"),
    (mixed_sizes, "different sizes"), (three_values, "3 different values"), (one_value, "one value"),
    (a_cut_page, "page 3 of 5"), (truncated, "train-volume.tif"), (no_tiff, "not an image"),
    (a_png, "PNG"), (labels_missing, "no train-labels.tif"), (one_slice, "1 slice"),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", BAD, ids=[damage.__name__ for damage, _ in BAD])
def test_bad_volumes_are_refused_and_nothing_is_written(folder, capsys, damage, words):
    damage(folder)
    assert run_on(folder) == 3
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert not (folder / "run").exists()


def test_sizes_that_do_not_suit(folder, capsys):
    assert run_on(folder, "--image-size", "252") == 3  # it predicts 68 pixels, a slice has 40
    assert "--image-size 220 or less" in capsys.readouterr().err
    assert run_on(folder, "--image-size", "250") == 2
    assert "236 or 252" in capsys.readouterr().err
    assert not (folder / "run").exists()


def make_pairs(folder, num=5, side=40, ending=".png"):
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    images, masks = make_slices(num, side)
    for i, (image, mask) in enumerate(zip(images, masks)):
        Image.fromarray(image).save(folder / "images" / f"cell{i}{ending}")
        Image.fromarray(mask).save(folder / "masks" / f"cell{i}.png")
    return images, masks


def test_pairs_are_matched_by_name(tmp_path):
    images, masks = make_pairs(tmp_path / "set", ending=".tif")
    (tmp_path / "set" / "masks" / "cell3.png").rename(tmp_path / "set" / "masks" / "cell3_mask.png")
    (tmp_path / "set" / "masks" / "cell1.png").unlink()
    choice = choose_dataset(str(tmp_path / "set"), Path("."), home="isbi2012", task="segmentation")
    assert choice.name == "imagemasks"
    source = open_imagemasks(choice.location)
    np.testing.assert_array_equal(source.train.images[..., 0], images[[0, 2, 3]])
    np.testing.assert_array_equal(source.eval.labels, masks[[4]] // 255)
    assert "cell1" in source.info.warnings[0]


def test_training_and_inference_take_the_same_images(tmp_path):
    bits = Image.fromarray(np.eye(8, dtype=np.uint8) * 255).convert("1")
    greys = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) % 2).convert("P")
    greys.putpalette([0, 0, 0, 90, 90, 90])
    colours = greys.copy()
    colours.putpalette([0, 0, 0, 90, 91, 90])
    plain = Image.fromarray(np.full((8, 8), 7, np.uint8))
    pictures = {"bits": bits, "greys": greys, "colours": colours, "plain": plain, "rgb": plain.convert("RGB"),
                "alpha": plain.convert("LA"), "float": plain.convert("F"), "wide": plain.convert("I")}  # fmt: skip
    taken = []
    for name, picture in pictures.items():
        folder = tmp_path / name
        (folder / "images").mkdir(parents=True)
        (folder / "masks").mkdir()
        for i in (0, 1):
            picture.save(folder / "images" / f"{i}.tif")
            Image.fromarray(np.eye(8, dtype=np.uint8)).save(folder / "masks" / f"{i}.png")
        try:
            pages = list(file_pages(str(folder / "images" / "0.tif"), 1).pages())
        except DataError:
            with pytest.raises(DataError, match="8-bit grey"):
                open_imagemasks(folder)
            continue
        taken.append(name)
        np.testing.assert_array_equal(open_imagemasks(folder).train.images[0], pages[0])
    assert taken == ["bits", "greys", "plain"]


def test_pairs_in_parts(tmp_path):
    train, _ = make_pairs(tmp_path / "train", 3)
    make_pairs(tmp_path / "val", 2)
    source = open_imagemasks(tmp_path)
    assert (len(source.train), len(source.eval), source.info.own_split) == (3, 2, False)
    np.testing.assert_array_equal(source.train.images[..., 0], train)


def test_bad_pairs(tmp_path):
    def check(name, change, words):
        folder = tmp_path / name
        make_pairs(folder)
        change(folder)
        with pytest.raises(DataError, match=words):
            open_imagemasks(folder)

    noisy = Image.fromarray(np.arange(1600, dtype=np.uint8).reshape(40, 40))
    small = Image.fromarray(np.zeros((20, 20), np.uint8))
    grey = Image.fromarray(np.where(np.eye(40), 128, 0).astype(np.uint8))
    check("values", lambda f: noisy.save(f / "masks" / "cell1.png"), "different values")
    check("two", lambda f: grey.save(f / "masks" / "cell1.png"), "taken together")
    check("size", lambda f: small.save(f / "masks" / "cell1.png"), "20x20")
    check("rgb", lambda f: noisy.convert("RGB").save(f / "masks" / "cell1.png"), "mode RGB")
    check("damaged", lambda f: (f / "images" / "cell1.png").write_bytes(b"\x89PNG no"), "cell1")
    image = noisy.convert("RGB")
    check("colour", lambda f: image.save(f / "images" / "cell1.png"), r"cell1.png has colour \(RGB\)")
    deep = Image.fromarray(np.full((40, 40), 700, np.uint16))
    check("deep", lambda f: deep.save(f / "images" / "cell1.png"), "cell1.png has (16|32) bits per pixel")
    labels = Image.fromarray(np.where(np.eye(40), 2, 1).astype(np.uint8))
    check(
        "labels",
        lambda f: labels.save(f / "masks" / "cell1.png"),
        "has the values 1 and 2; a mask has 0 and one",
    )

    def two_pages(folder):
        (folder / "images" / "cell1.png").unlink()
        noisy.save(folder / "images" / "cell1.tif", save_all=True, append_images=[noisy])

    check("pages", two_pages, "cell1.tif has 2 pages")
    check("twice", lambda f: noisy.save(f / "images" / "cell1.bmp"), "both called cell1")

    def other_size(folder):
        for part in ("images", "masks"):
            small.save(folder / part / "cell1.png")

    check("sizes", other_size, "is 20x20 pixels, but .*cell0.png is 40x40")


def test_pairs_and_volumes_are_for_segmentation(folder):
    make_pairs(folder / "set")
    for name in (str(folder), str(folder / "set"), "isbi2012", "imagemasks"):
        with pytest.raises(ConfigurationError, match="for segmentation"):
            choose_dataset(name, folder, home="mnist", task="classification")


def test_folds_of_slices_follow_each_other():
    images, masks = make_slices(30, 8)
    from ipucnn.datasets.base import ArrayExamples

    folds = fold_of_each(ArrayExamples(images[..., None], masks // 255), 5)
    assert folds.tolist() == [i // 6 + 1 for i in range(30)]


def test_a_fold_is_a_data_set_with_another_split(folder):
    source = open_isbi2012(folder)
    images, _ = make_slices()
    chosen = select_fold(source, 5, 2)
    np.testing.assert_array_equal(chosen.eval.images[..., 0], images[[1]])
    np.testing.assert_array_equal(chosen.train.images[..., 0], images[[0, 2, 3, 4]])
    assert chosen.held_out == (1,) and (chosen.info.num_train, chosen.info.num_eval) == (4, 1)
    assert chosen.info.mean[0] == pytest.approx(images[[0, 2, 3, 4]].mean(), abs=1e-5)
    with pytest.raises(ConfigurationError, match="has 5 examples"):
        select_fold(source, 6, 1)


@pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data/isbi2012 beside the repository")
def test_the_real_volume():
    source = open_isbi2012(REAL)
    assert source.train.images.shape == (24, 512, 512, 1) and source.eval.labels.shape == (6, 512, 512)
    assert 0.72 < source.train.labels.mean() < 0.82  # white is cell
    # Membranes are dark.
    membrane = source.train.labels == 0
    assert source.train.images[..., 0][membrane].mean() + 25 < source.train.images[..., 0][~membrane].mean()
    fifth = select_fold(source, 5, 5)
    assert fifth.held_out == tuple(range(24, 30))
    np.testing.assert_array_equal(fifth.eval.images, source.eval.images)
