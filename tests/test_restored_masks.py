"""Masks of ``infer`` in the form of the training masks, and results with the pixel size and axes of their input."""

import json

import numpy as np
import pytest
import tifffile
from PIL import Image
from support.data_sets import open_pairs, write_pairs

from ipucnn.errors import ConfigurationError
from ipucnn.reports.sheets import PanelSheet
from ipucnn.runs import predict, runtimes
from ipucnn.runs.images.inputs import file_pages
from ipucnn.runs.images.outputs import (
    Classes,
    MaskFiles,
    MaskForm,
    PageSpool,
    class_colours,
    write_pages,
)
from ipucnn.runs.overwriting import check_only_results_replaced

COLOURS = ((0, 0, 0), (200, 30, 9), (9, 9, 200))


def write(folder, form, num_classes, source=None, is_volume=False, overlay=False):
    """Writes two or more pages of random classes as `infer` does; returns the classes."""
    shape = (len(source.sizes) if source is not None else 1, 12, 10)
    classes = np.random.RandomState(0).randint(0, num_classes, shape)
    spools = [PageSpool() for _ in range(1 if num_classes == 2 else num_classes)]
    for page in classes:
        for k, spool in enumerate(spools):
            spool.append(np.float32(page == (1 if num_classes == 2 else k)))
    names = tuple("abcdef"[:num_classes])
    files = MaskFiles(folder, "x", is_volume, overlay, num_classes)
    images = lambda: iter(np.zeros((*shape, 1), np.uint8))  # noqa: E731
    more = {} if source is None else {"stack": source.stack}
    files.write(spools, images, Classes(names, class_colours(num_classes), form), **more)
    return classes


@pytest.mark.parametrize(
    ("form", "num_classes", "dtype", "values"),
    [
        (MaskForm(), 2, np.uint8, (0, 255)),
        (MaskForm(), 3, np.uint8, (0, 1, 2)),
        (MaskForm((0, 1)), 2, np.uint8, (0, 1)),
        (MaskForm((9, 0, 3000)), 3, np.uint16, (9, 0, 3000)),
    ],
)
def test_values_are_those_of_the_training_masks(tmp_path, form, num_classes, dtype, values):
    classes = write(tmp_path, form, num_classes)
    mask = np.array(Image.open(tmp_path / "x-mask.png"))
    np.testing.assert_array_equal(mask, np.array(values)[classes[0]])
    classes = write(tmp_path, form, num_classes, is_volume=True)
    mask = tifffile.imread(tmp_path / "x-mask.tif")
    assert mask.dtype == dtype
    np.testing.assert_array_equal(mask, np.array(values)[classes[0]])


def test_only_results_are_replaced(tmp_path):
    """All kinds of results may be replaced, and their bytes are the same each time; other files may not."""
    out = tmp_path / "out"
    bytes_of = []
    for _ in range(2):
        for form in (MaskForm((0, 7, 200), COLOURS), MaskForm((), COLOURS)):
            for is_volume in (False, True):
                write(out, form, 3, is_volume=is_volume, overlay=True)
        sheet = PanelSheet(["image"])
        sheet.add("x", [np.zeros((8, 8, 3), np.uint8)])
        sheet.save(out / "contact-sheet.png")
        paths = sorted(out.iterdir())
        assert len(paths) == 11
        check_only_results_replaced(out, [*paths, out / "new-mask.png"])
        assert all(predict.was_written(path) for path in paths)
        bytes_of.append([path.read_bytes() for path in paths])
    assert bytes_of[0] == bytes_of[1]
    for path in paths:
        with Image.open(path) as image:
            image.load()
            image.info.clear()
            Image.fromarray(np.asarray(image)).save(path)
        for drawn in (path.read_bytes(), b"", b"text"):
            path.write_bytes(drawn)
            with pytest.raises(
                ConfigurationError, match=f"{path.name} does not say that ipucnn wrote it"
            ) as refused:
                check_only_results_replaced(out, paths)
            assert refused.value.hint == f"--output {out}-predicted, or move the file away"
            assert not predict.was_written(path)
        path.unlink()
        paths = [path, *paths[paths.index(path) + 1 :]]
    (tmp_path / "out-predicted").mkdir()
    path.mkdir()
    with pytest.raises(ConfigurationError) as refused:
        check_only_results_replaced(out, paths)
    assert refused.value.hint.startswith(f"--output {out}-predicted-2,")


def test_the_script_of_an_export_replaces_only_results_and_names_those_of_similar_images_apart(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        predict, "described", lambda name: {"input": {"patch": {}}, "mask": {"palette": None}}
    )
    monkeypatch.setattr(predict, "network", lambda record: None)
    predicted = np.zeros((4, 4), np.uint8)
    monkeypatch.setattr(predict, "predicted_mask", lambda *_: predicted)
    page = Image.new("L", (4, 4))
    for name in ("a.png", "a.jpg", "b.png", "c.png", "b.txt"):
        page.save(tmp_path / name, "PNG")
    page.save(tmp_path / "s.tif", save_all=True, append_images=[page])
    for value in (1, 2):  # the second time, results are replaced
        predicted[:] = value
        for name, result in (
            ("a.png", "a.png-mask.png"),
            ("a.jpg", "a.jpg-mask.png"),
            ("b.png", "b-mask.png"),
            ("s.tif", "s-mask.tif"),
        ):
            predict.main(str(tmp_path / name))
            path = tmp_path / result
            assert capsys.readouterr().out == f"{path}\n"
            assert (np.asarray(Image.open(path)) == value).all()
            check_only_results_replaced(tmp_path, [path])
    write_pages(tmp_path / "c-mask.png", [predicted], False)
    predict.main(str(tmp_path / "c.png"))
    for name, result in (("b.png", "b-mask.png"), ("s.tif", "s-mask.tif")):
        page.save(tmp_path / result)
        drawn = (tmp_path / result).read_bytes()
        with pytest.raises(OSError, match=f"{result} does not say that ipucnn wrote it"):
            predict.main(str(tmp_path / name))
        assert (tmp_path / result).read_bytes() == drawn


def test_colours_and_palettes_are_those_of_the_training_masks(tmp_path):
    for form, mode in ((MaskForm((0, 7, 200), COLOURS), "P"), (MaskForm((), COLOURS), "RGB")):
        classes = write(tmp_path, form, 3)[0]
        write(tmp_path, form, 3, is_volume=True)
        for ending in ("png", "tif"):
            with Image.open(tmp_path / f"x-mask.{ending}") as image:
                assert image.mode == mode
                np.testing.assert_array_equal(np.array(image.convert("RGB")), np.array(COLOURS)[classes])
                if mode == "P":
                    np.testing.assert_array_equal(np.array(image), np.array([0, 7, 200])[classes])


def test_a_set_knows_the_form_of_its_masks(tmp_path):
    classes = np.random.RandomState(1).randint(0, 3, (4, 20, 20))
    images = [np.full((20, 20), k, np.uint8) for k in range(4)]
    for name, table, values, expected in (
        ("binary", "", [0, 7, 7], (0, 7)),
        ("numbers", "", [0, 1, 2], (0, 1, 2)),
        ("table", "9 a\n0 b\n255 ignore\n70 c\n", [9, 0, 70], (9, 0, 70)),
    ):
        masks = [np.uint8(values)[mask] for mask in classes]
        folder = write_pairs(tmp_path / name, zip(images, masks))
        if table:
            (folder / "classes.txt").write_text(table)
        assert open_pairs("imagemasks", folder).info.mask_values == expected, name
    folder = write_pairs(tmp_path / "colours", zip(images, np.uint8(COLOURS)[classes]))
    (folder / "classes.txt").write_text("0 0 0 a\n200 30 9 b\n9 9 200 c\n")
    info = open_pairs("imagemasks", folder).info
    assert info.mask_values == () and info.class_colours == COLOURS


IMAGEJ = {"axes": "TZYX", "spacing": 0.25, "unit": "um", "finterval": 3.5}


@pytest.mark.parametrize("kind", ["imagej", "ome", "plain"])
def test_results_keep_pixel_size_and_axes(tmp_path, kind):
    """tifffile wrote the input and reads the results."""
    stack, path = np.zeros((2, 3, 12, 10), np.uint8), tmp_path / "in.tif"
    stack[:, :, 0] = 9
    if kind == "imagej":
        tifffile.imwrite(path, stack, imagej=True, resolution=(1 / 0.1, 1 / 0.2), metadata=IMAGEJ)
    elif kind == "ome":
        sizes = {"PhysicalSizeX": 0.1, "PhysicalSizeY": 0.2, "PhysicalSizeZ": 0.25}
        path = tmp_path / "in.ome.tif"
        tifffile.imwrite(path, stack, ome=True, metadata={"axes": "TZYX", **sizes})
    else:
        pages = stack.reshape(6, 12, 10)
        tifffile.imwrite(
            path, pages, photometric="minisblack", resolution=(10, 5), resolutionunit=3, metadata=None
        )
    write(tmp_path, MaskForm(), 2, file_pages(str(path), 1), is_volume=True, overlay=True)
    for name in ("mask", "probability", "overlay"):
        with tifffile.TiffFile(tmp_path / f"x-{name}.tif") as file:
            tags = file.pages[0].tags
            sizes = [tags[code].value[0] / tags[code].value[1] for code in (282, 283)]
            assert sizes == pytest.approx([10, 5]) and len(file.pages) == 6
            assert int(tags[296].value) == (3 if kind == "plain" else 1)
            if kind == "plain":
                assert not file.is_imagej
                continue
            found = file.imagej_metadata
            assert (found["frames"], found["slices"], found["spacing"]) == (2, 3, 0.25)
            assert found["unit"] in ("um", "\u00b5m", "\\u00B5m")
            if kind == "imagej":
                assert found["finterval"] == 3.5
            if name != "overlay":
                assert file.series[0].axes == "TZYX" and file.series[0].shape == (2, 3, 12, 10)


def test_units_times_and_axes_of_ome_are_kept_or_said_to_be_lost(tmp_path):
    stack = np.zeros((2, 3, 12, 10), np.uint8)

    def read(axes="TZYX", **about):
        path = tmp_path / "in.ome.tif"
        tifffile.imwrite(path, stack, ome=True, metadata={"axes": axes, **about})
        source = file_pages(str(path), 1)
        return source.stack, dict(source.stack.imagej), source.remarks

    nm = {"PhysicalSizeX": 100, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.2, "PhysicalSizeZ": 2}
    found, kept, remarks = read(**nm, TimeIncrement=1500, TimeIncrementUnit="ms")
    assert [float(side) for side in found.resolution] == pytest.approx([1 / 100, 1 / 200])
    assert (kept["unit"], kept["spacing"], kept["finterval"]) == ("nm", "2000", "1.5") and not remarks
    for about in (
        {"PhysicalSizeX": 0.5},
        {"PhysicalSizeX": 1e9, "PhysicalSizeY": 1},
        {**nm, "PhysicalSizeY": -1},
    ):
        found, kept, (remark,) = read(**about)
        assert found.resolution is None and "unit" not in kept and "in one direction alone, in" in remark
    assert dict(read(TimeIncrement=0.5, TimeIncrementUnit="d")[0].imagej)["finterval"] == "43200"
    assert "finterval" not in dict(read(TimeIncrement=float("nan"))[0].imagej)
    _, kept, (remark,) = read("ZTYX")
    assert "slices" not in kept and "axes ZT, and the results have plain pages" in remark


@pytest.mark.slow
def test_masks_come_back_from_infer_as_they_were(run, tmp_path):
    random, pairs = np.random.RandomState(0), []
    for _ in range(4):
        classes = np.kron(random.randint(0, 3, (5, 5)), np.ones((8, 8), int))
        pairs.append((np.uint8([20, 120, 220])[classes], np.uint8([0, 7, 200])[classes]))
    write_pairs(tmp_path / "set", pairs)
    (tmp_path / "set" / "classes.txt").write_text("0 rest\n7 cell\n200 nucleus\n")
    palette = np.zeros((256, 3), np.uint8)
    palette[[0, 7, 200]] = COLOURS
    for path in (tmp_path / "set" / "masks").iterdir():
        image = Image.open(path)
        image.putpalette(palette.reshape(-1).tolist())
        image.save(path)
    line = "--dataset set --image-size 204 --base-filters 2 --num-epochs 1 --seed 1 --run-dir r"
    assert run("train", "unet", *line.split())[0] == 0
    metadata = {**IMAGEJ, "axes": "ZYX"}
    volume = np.stack([pairs[0][0], pairs[1][0]])
    tifffile.imwrite("in.tif", volume, imagej=True, resolution=(4, 4), metadata=metadata)
    targets = ["r"]
    if not runtimes.missing_packages("onnx"):
        code, _, err = run("export", "r", "--format", "onnx", "--output", "e")
        assert code == 0, err
        assert json.loads((tmp_path / "e" / "export.json").read_text())["mask"]["palette"][:3] == [0, 0, 0]
        targets.append("e/model.onnx")
    for number, target in enumerate(targets):
        code, out, err = run(
            "infer", target, "set/images/3.png", "in.tif", "--output", f"o-{number}", "--json"
        )
        assert code == 0 and "sees the centre" not in err, err
        shares = json.loads(out)["results"]
        with Image.open(tmp_path / f"o-{number}" / "set" / "images" / "3-mask.png") as image:
            assert image.mode == "P" and set(np.unique(np.array(image))) <= {0, 7, 200}
            drawn = np.array(image.convert("RGB")).reshape(-1, 3)
            assert {tuple(colour) for colour in drawn.tolist()} <= set(COLOURS)
            assert np.mean(np.array(image) == 7) == pytest.approx(shares[0]["shares"]["cell"])
        with tifffile.TiffFile(tmp_path / f"o-{number}" / "in-mask.tif") as file:
            assert file.imagej_metadata["slices"] == 2 and file.imagej_metadata["spacing"] == 0.25
