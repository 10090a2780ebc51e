"""Exports of networks for masks: inputs that are not square, and the lines of their pages on images of any size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from support.data_sets import write_pairs

from ipucnn import cli
from ipucnn.datasets.segmentation.membranes import draw_tissue
from ipucnn.runs import runtimes

LINE = "--dataset imagemasks --base-filters 2 --num-epochs 1 --seed 1 --limit-train 2"


def needs(form):
    missing = runtimes.missing_packages(form)
    return pytest.mark.skipif(bool(missing), reason=f"{form} needs {', '.join(missing)}")


def tissue(seed, height, width):
    return draw_tissue(height, width, np.random.RandomState(seed))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with runs on a set of images of 100x116: their inputs are 284x300; ``group`` has group norm."""
    folder = tmp_path_factory.mktemp("runs")
    write_pairs(
        folder / "set",
        [(image, 255 * np.uint8(mask)) for image, mask in (tissue(k, 100, 116) for k in range(4))],
    )
    Image.fromarray(tissue(9, 250, 330)[0]).save(folder / "image.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, words in (("plain", ["--norm-layer", "none"]), ("group", [])):
            assert (
                cli.run(
                    [
                        "train",
                        "unet",
                        *LINE.split(),
                        "--dataset-path",
                        str(folder / "set"),
                        "--run-dir",
                        name,
                        *words,
                    ]
                )
                == 0
            )
        assert cli.run(["evaluate", "plain"]) == 0
    return folder


@pytest.fixture(scope="module")
def colour_run(tmp_path_factory):
    """A folder with a run on Fiji's stacks of three channels, and images of other sizes and forms beside it."""
    folder = tmp_path_factory.mktemp("colour")
    pairs = [tissue(k, 96, 100) for k in range(4)]
    (folder / "set/images").mkdir(parents=True)
    (folder / "set/masks").mkdir()
    channels = np.stack([np.stack([image, 255 - image, image // 2]) for image, _ in pairs])
    masks = np.stack([mask for _, mask in pairs]) * np.uint8(255)
    for name, planes, about in (
        ("set/images/s.tif", channels, {"imagej": True, "metadata": {"axes": "ZCYX"}}),
        ("set/masks/s.tif", masks, {}),
        ("imagej.tif", channels[:3], {"imagej": True, "metadata": {"axes": "TCYX"}}),
        ("zc.ome.tif", channels[:2], {"metadata": {"axes": "ZCYX"}}),
        ("cz.ome.tif", channels[:2].swapaxes(0, 1), {"metadata": {"axes": "CZYX"}}),
    ):
        tifffile.imwrite(folder / name, planes, photometric="minisblack", **about)
    tifffile.imwrite(folder / "rgb.tif", np.moveaxis(channels[:3], 1, -1), photometric="rgb")
    for height, width in ((70, 330), (120, 90)):
        image = tissue(height, height, width)[0]
        colours = np.stack([image, 255 - image, image // 2], axis=-1)
        Image.fromarray(colours).save(folder / f"{height}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = "--dataset set --base-filters 2 --num-epochs 2 --seed 1 --norm-layer none --run-dir r"
        assert cli.run(["train", "unet", *words.split()]) == 0
        assert cli.run(["export", "r", "--format", "saved-model", "--output", "e"]) == 0
    return folder


@pytest.mark.slow
def test_the_script_of_an_export_reads_stacks_of_channels_and_images_of_any_size_as_infer_does(
    colour_run, run
):
    files = {
        "imagej.tif": (3, 96, 100),
        "zc.ome.tif": (2, 96, 100),
        "cz.ome.tif": (2, 96, 100),
        "rgb.tif": (3, 96, 100),
        "70.png": (70, 330),
        "120.png": (120, 90),
    }
    code, _, err = run("infer", colour_run / "r", *(colour_run / name for name in files), "--output", "o")
    assert code == 0, err
    by_script = {}
    for name, shape in files.items():
        subprocess.run(
            [sys.executable, colour_run / "e/predict.py", colour_run / name], check=True, timeout=300
        )
        stem, end = name.rsplit(".", 1)
        by_script[name] = tifffile.imread if end == "tif" else lambda path: np.asarray(Image.open(path))
        by_script[name] = by_script[name](colour_run / f"{stem}-mask.{end}")
        (by_run,) = Path("o").rglob(f"{stem}-mask.*")
        by_run = tifffile.imread(by_run) if end == "tif" else np.asarray(Image.open(by_run))
        assert by_script[name].shape == by_run.shape == shape and set(np.unique(by_run)) == {0, 255}
        assert np.mean(by_script[name] == by_run) > 0.9999, name
    np.testing.assert_array_equal(by_script["zc.ome.tif"], by_script["cz.ome.tif"])
    np.testing.assert_array_equal(by_script["imagej.tif"][:2], by_script["zc.ome.tif"])
    np.testing.assert_array_equal(by_script["imagej.tif"], by_script["rgb.tif"])


@pytest.mark.slow
def test_the_script_of_an_export_refuses_other_numbers_of_channels(colour_run, tmp_path):
    tifffile.imwrite(
        tmp_path / "two.tif", np.zeros((2, 2, 96, 100), np.uint8), imagej=True, metadata={"axes": "ZCYX"}
    )
    script = [sys.executable, colour_run / "e/predict.py", tmp_path / "two.tif"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode and "4 pages for 4 images, 2 of them channels, are not read" in done.stderr


def run_script(folder, image):
    """Runs the script of an export in a process without ipucnn; returns the mask."""
    Image.open(image).save(folder / "image.png")
    alone = (
        "import runpy, sys; sys.modules['ipucnn'] = None; del sys.argv[0]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script = [sys.executable, "-c", alone, folder / "predict.py", folder / "image.png"]
    subprocess.run(script, check=True, timeout=300)
    return np.asarray(Image.open(folder / "image-mask.png"))


def mask_of(run, folder, *words):
    code, _, err = run("infer", *words, folder / "image.png", "--output", "o")
    assert code == 0, err
    return np.asarray(Image.open("o/image-mask.png"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "more"),
    [
        pytest.param("onnx", [], marks=needs("onnx")),
        pytest.param("tflite", ["--raw-uint8", "--batch", "2"], marks=needs("tflite")),
        ("saved-model", ["--probabilities"]),
        ("keras", ["--raw-uint8"]),
    ],
)
def test_the_script_of_an_export_gives_the_mask_of_infer(runs, run, tmp_path, form, more):
    code, _, err = run("export", runs / "plain", "--format", form, "--output", "e", *more)
    assert code == 0, err
    record = json.loads((tmp_path / "e" / "export.json").read_text())
    assert record["input"]["shape"][1:3] == [284, 300]
    by_script, by_run = run_script(tmp_path / "e", runs / "image.png"), mask_of(run, runs, runs / "plain")
    assert by_script.shape == (250, 330) and set(np.unique(by_run)) == {0, 255}
    assert np.mean(by_script == by_run) > 0.9999
    thresholds = json.loads((runs / "plain" / "thresholds.json").read_text())
    assert record["threshold"] in [kept["value"] for kept in thresholds.values()]


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param(form, marks=needs(form)) for form in ("onnx", "tflite")])
def test_an_input_that_is_not_square_works_in_infer_and_evaluate(runs, run, tmp_path, form):
    """396x412 was asked for, and 396x396 was cut."""
    for name in ("plain", "group"):
        code, _, err = run("export", runs / name, "--format", form, "--output", name)
        assert code == 0, err
        by_script = run_script(tmp_path / name, runs / "image.png")
        by_file = mask_of(run, runs, tmp_path / name / f"model.{form}")
        assert np.mean(by_script == by_file) > 0.9999
        page = (tmp_path / name / "README.md").read_text()
        assert ("group norm, which takes its statistics of each patch: scores may fall" in page) == (
            name == "group"
        )
    words = ["--dataset-path", runs / "set", "--json"]
    code, out, err = run("evaluate", f"plain/model.{form}", *words)
    assert code == 0 and not err.count("group norm"), err
    of_file, of_run = json.loads(out), json.loads(run("evaluate", runs / "plain", *words)[1])
    assert of_file["segmentation"]["patch_sizes"] == [[284, 300]]
    for name in ("accuracy", "dice", "loss"):
        assert of_file["measured"][name] == pytest.approx(of_run["measured"][name], abs=2e-4), name
    code, _, err = run("infer", f"group/model.{form}", runs / "image.png", "--output", "p")
    assert code == 0
    assert "of each patch of 284x300 pixels instead of the whole image: scores may fall far; compare" in err
