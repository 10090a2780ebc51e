"""Exports of networks for masks: inputs that are not square, and the lines of their pages on images of any size."""

import json
import subprocess
import sys

import numpy as np
import pytest
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


def run_script(folder, image):
    """Runs the script of an export in another process; returns the mask."""
    Image.open(image).save(folder / "image.png")
    subprocess.run([sys.executable, folder / "predict.py", folder / "image.png"], check=True, timeout=300)
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
    threshold = json.loads((runs / "plain" / "thresholds.json").read_text())
    assert record["threshold"] in threshold.values()


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
