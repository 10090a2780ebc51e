"""ipucnn infer and evaluate of a segmentation network: files, volumes, refusals, the challenge's scores, pictures."""

import contextlib
import copy
import functools
import io
import json
import os
import re
import shutil
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from support.data_sets import write_pairs
from support.refusals import Refusal, check_refused
from support.trained_runs import run_of

from ipucnn import cli
from ipucnn.datasets.problems import IS_STRETCHED
from ipucnn.datasets.segmentation.membranes import draw_tissue, open_membranes
from ipucnn.errors import DataError
from ipucnn.reports.evaluate import print_evaluation
from ipucnn.reports.infer import print_masks
from ipucnn.reports.sheets import PanelSheet
from ipucnn.runs.folder import KeptThreshold, RunFolder
from ipucnn.runs.images.inputs import file_pages
from ipucnn.runs.images.outputs import Classes, MaskFiles, PageSpool, class_colours, overlay, plan_files
from ipucnn.runs.images.segmentation import PatchwiseNetwork, class_probabilities, foreground_probability
from ipucnn.runs.infer import Masks
from ipucnn.runs.records import Evaluation
from ipucnn.runs.sources import WeightsArgument
from ipucnn.runs.trained import open_trained
from ipucnn.sessions.role import Role
from ipucnn.training.evaluation import EvaluationTotals
from ipucnn.training.segment_scores import SCORES, SegmentScores

pytestmark = pytest.mark.usefixtures("membranes_once")


@pytest.fixture(scope="module")
def trained():
    return run_of("unet")


@pytest.fixture(scope="module")
def network(trained):
    return PatchwiseNetwork(open_trained(WeightsArgument("infer", str(trained), {}), reads_data=False))


@pytest.fixture(scope="module")
def evaluated(trained, tmp_path_factory):
    """Evaluates the run once; returns the document on stdout and the sheet of images."""
    (trained / "thresholds.json").unlink(missing_ok=True)
    sheet, out = tmp_path_factory.mktemp("evaluated") / "worst.png", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.run(["evaluate", str(trained), "--json", "--contact-sheet", str(sheet)]) == 0
    return json.loads(out.getvalue()), sheet


def tissue(i, height=40, width=30):
    return draw_tissue(height, width, np.random.RandomState(i))[0]


def save_volume(path, pages):
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.fromarray(page) for page in pages]
    images[0].save(str(path), save_all=True, append_images=images[1:])


def read_pages(path):
    with Image.open(str(path)) as image:
        pages = []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            pages.append(np.array(image))
    return pages


def left_over(folder):
    return [name for _, _, names in os.walk(str(folder)) for name in names if name.endswith(".tmp")]


@pytest.mark.slow
def test_masks_of_a_volume_and_a_picture(trained, network, run, tmp_path):
    pages = [tissue(i) for i in range(3)]
    save_volume(tmp_path / "in" / "vol.tif", pages)
    Image.fromarray(tissue(3, 7, 90)).save(str(tmp_path / "in" / "wide.png"))
    code, out, err = run("infer", trained, "in", "--output", "out", "--overlay", "--json")
    assert code == 0 and "images/s, measured on CPU" in err
    printed = json.loads(out)
    assert [row["pages"] for row in printed["results"]] == [3, 1]
    assert printed["measured"]["pages"] == 4 and printed["measured"]["images_per_s"] > 0
    assert printed["share_of"] == "membrane"
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["contact-sheet.png"]
        + [f"vol-{kind}.tif" for kind in ("probability", "mask", "overlay")]
        + [f"wide-{kind}.png" for kind in ("probability", "mask", "overlay")]
    )
    expected = [foreground_probability(network.logits(page[..., None])) for page in pages]
    stored = read_pages(out / "vol-probability.tif")
    assert len(stored) == 3 and stored[0].dtype == np.float32
    np.testing.assert_allclose(stored, expected, atol=1e-6)
    np.testing.assert_array_equal(read_pages(out / "vol-mask.tif"), np.where(np.array(stored) > 0.5, 255, 0))
    shares = np.mean(np.array(stored) <= 0.5)
    assert printed["results"][0]["share"] == pytest.approx(shares, abs=1e-6)
    (small,) = read_pages(out / "wide-probability.png")
    (mask,) = read_pages(out / "wide-mask.png")
    foreground = foreground_probability(network.logits(tissue(3, 7, 90)[..., None]))
    np.testing.assert_allclose(small / 65535, foreground, atol=1e-5)
    np.testing.assert_array_equal(mask, np.where(foreground > 0.5, 255, 0))
    for drawn, page, probability in zip(read_pages(out / "vol-overlay.tif"), pages, stored):
        expected = overlay(page[..., None], (probability > 0.5).astype(int), class_colours(2), shown=0)
        np.testing.assert_array_equal(drawn, expected)
    with Image.open(str(out / "contact-sheet.png")) as sheet:
        assert sheet.size[0] > 3 * 150


@pytest.mark.slow
def test_json_has_the_names_of_files_as_they_are(trained, run, tmp_path):
    name = "a\nb\x1b.png"
    Image.fromarray(tissue(0)).save(str(tmp_path / name))
    code, out, err = run("infer", trained, name, "--output", "out", "--json")
    assert code == 0 and "\x1b" not in out + err, err
    (row,) = json.loads(out)["results"]
    assert row["image"] == name and (tmp_path / row["files"]["mask"]).is_file()
    _, out, _ = run("infer", trained, name, "--output", "out", columns=200)
    assert "a\\nb\\x1b.png" in out and "a\\nb\\x1b-mask.png" in out and "\x1b" not in out


@pytest.mark.parametrize("shown", [0, 1])
def test_overlays_tint_only_the_shown_class(shown):
    page = tissue(0, 6, 5)
    mask = np.random.RandomState(0).randint(0, 2, page.shape)
    tints = ((213, 94, 0), (9, 90, 200))
    drawn = overlay(page[..., None], mask, tints, shown)
    for row, column in np.ndindex(*page.shape):
        grey = int(page[row, column])
        if mask[row, column] == shown:
            expected = [round(0.4 * grey + 0.6 * tint) for tint in tints[shown]]
            assert np.abs(drawn[row, column].astype(int) - expected).max() <= 1
        else:
            assert drawn[row, column].tolist() == [grey] * 3


def test_probabilities_equal_the_softmax():
    logits = np.random.RandomState(0).normal(0, 30, (5, 6, 2)).astype(np.float32)
    logits[0, 0] = (0, 2000)
    logits[0, 1] = (2000, 0)
    shifted = np.exp(logits.astype(float) - logits.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(foreground_probability(logits), shifted[..., 1] / shifted.sum(-1), atol=1e-7)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_disk_is_reported_when_a_page_is_added(monkeypatch):
    monkeypatch.setattr(
        "ipucnn.runs.images.outputs.tempfile.TemporaryFile", functools.partial(open, "/dev/full", "wb")
    )
    with pytest.raises(OSError, match="No space left"):
        PageSpool().append(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("of_masks", [(), ((0, 0, 0), (200, 0, 200), (9, 90, 9), (1, 2, 250))])
def test_each_class_has_a_probability_and_a_colour(tmp_path, of_masks):
    logits = np.random.RandomState(0).normal(0, 3, (2, 6, 7, 4)).astype(np.float32)
    images = np.random.RandomState(1).randint(0, 256, (2, 6, 7, 3)).astype(np.uint8)
    files = MaskFiles(tmp_path, "x", True, True, num_classes=4)
    spools = [PageSpool() for _ in range(4)]
    for page in logits:
        for spool, probability in zip(spools, class_probabilities(page)):
            spool.append(probability)
    files.write(spools, lambda: iter(images), Classes(tuple("abcd"), class_colours(4, of_masks)))
    shifted = np.exp(logits.astype(float))
    for k in range(4):
        stored = read_pages(tmp_path / f"x-probability-{k}.tif")
        np.testing.assert_allclose(stored, (shifted[..., k] / shifted.sum(-1)), atol=1e-6)
    masks, overlays = read_pages(tmp_path / "x-mask.tif"), read_pages(tmp_path / "x-overlay.tif")
    np.testing.assert_array_equal(masks, logits.argmax(-1))
    tints = of_masks or ((0, 0, 0), (213, 94, 0), (0, 114, 178), (0, 158, 115))
    for page, row, column in np.ndindex(2, 6, 7):
        original, drawn = images[page, row, column], overlays[page][row, column].astype(int)
        predicted = masks[page][row, column]
        expected = (
            [0.4 * int(p) + 0.6 * t for p, t in zip(original, tints[predicted])]
            if predicted
            else original.astype(int)
        )
        assert np.abs(drawn - expected).max() <= 0.5


@pytest.mark.parametrize("names", [("membrane", "cell"), ("blue", "red", "green")])
def test_evaluation_lists_classes_in_order(evaluated, capsys, names):
    """Of two classes the second comes first: it is the one to segment."""
    result = copy.deepcopy(evaluated[0])
    figures = {"dice": [0.5] * len(names), "iou": [0.5] * len(names)}
    scores = (
        dict.fromkeys(("count", "predicted"), 1),
        dict.fromkeys(("accuracy", "precision", "f1", "iou"), 0.5),
    )
    result["classes"] = [{"class": k, "name": n, **scores[0], **scores[1]} for k, n in enumerate(names)]
    for part in (result["segmentation"], result["segmentation"]["baseline"]):
        part.update(figures)
    result["segmentation"].update(images=[{"image": "0.png", "dice": figures["dice"]}])
    print_evaluation(msgspec.convert(result, Evaluation))
    out = capsys.readouterr().out
    expected = ["cell", "membrane"] if len(names) == 2 else list(names)
    assert re.findall(r"^ *Dice, (\w+)", out, re.MULTILINE) == expected
    (heading,) = [line for line in out.splitlines() if re.match(" *image .*Dice", line)]
    assert re.findall(r"Dice, (\w+)", heading) == expected


@pytest.mark.slow
def test_colour_images_of_three_classes_from_training_to_masks(run, tmp_path):
    random, pairs = np.random.RandomState(0), []
    for _ in range(4):
        mask = np.kron(random.randint(0, 3, (5, 5)), np.ones((8, 8), int))
        image = np.array([[30, 40, 200], [200, 40, 30], [90, 200, 90]])[mask] + random.normal(
            0, 9, (40, 40, 3)
        )
        pairs.append((image.clip(0, 255).astype(np.uint8), np.array([9, 0, 70], np.uint8)[mask]))
    write_pairs(tmp_path / "set", pairs)
    (tmp_path / "set" / "classes.txt").write_text("9 blue cells\n0 red cells\n70 green cells\n")
    line = "--dataset set --image-size 204 --base-filters 2 --num-epochs 2 --seed 1 --run-dir r"
    code, out, _ = run("train", "unet", *line.split())
    assert code == 0 and "Dice of green cells" in out and "mean Dice, IoU" in out
    assert "mean Dice 0." in run("runs", ".", columns=200)[1]
    code, out, _ = run("evaluate", "r", "--contact-sheet", "worst.png", "--json")
    printed = json.loads(out)
    confusion = np.array(printed["confusion_matrix"])
    assert confusion.shape == (3, 3) and confusion.sum() == 1600
    for k in range(3):
        both = confusion[k].sum() + confusion[:, k].sum()
        assert printed["segmentation"]["dice"][k] == pytest.approx(2 * confusion[k, k] / both if both else 0)
    code, out, _ = run("infer", "r", "set/images/3.png", "--output", "o", "--overlay", "--json")
    (mask,) = read_pages(tmp_path / "o" / "3-mask.png")
    (row,) = json.loads(out)["results"]
    counts = np.bincount(mask.ravel(), minlength=256)[[9, 0, 70]]  # the values of the table
    assert counts.sum() == 1600
    names = ("blue cells", "red cells", "green cells")
    assert row["shares"] == pytest.approx(dict(zip(names, counts / 1600)), abs=1e-6)
    # The last fifth was the evaluation part: its pixels get the same classes.
    assert counts.tolist() == confusion.sum(axis=0).tolist()
    Image.fromarray(tissue(0)).save(str(tmp_path / "grey.png"))
    check_refused(
        run,
        Refusal("set/images/3.png --output p --threshold 0.3", "--threshold 0.3: unet predicts 3 classes"),
        command=["infer", "r"],
    )
    code, _, err = run("infer", "r", "grey.png", "--output", "p")
    assert (
        code == 3 and "image grey.png is grey; the network takes colour (RGB)\nerror: the input could" in err
    )


@pytest.mark.slow
def test_unreadable_images_are_named_and_the_rest_is_segmented(trained, run, tmp_path):
    folder = tmp_path / "in"
    save_volume(folder / "good.tif", [tissue(0)])
    save_volume(folder / "cut.tif", [tissue(i) for i in range(4)])
    whole = (folder / "cut.tif").read_bytes()
    # Pillow puts a page's table before its pixels: the cut removes pixels of the last page.
    (folder / "cut.tif").write_bytes(whole[:-500])
    (folder / "empty.tif").write_bytes(b"")
    (folder / "text.png").write_bytes(b"no picture")
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(str(folder / "colour.tif"))
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(str(folder / "colour.png"))
    Image.fromarray(tissue(1, 9, 9).astype(np.uint16) * 256).save(str(folder / "deep.tif"))
    Image.fromarray(np.full((9, 9), np.inf, np.float32)).save(str(folder / "floats.tif"))
    frames = [Image.fromarray(tissue(i, 9, 9)) for i in range(2)]
    frames[0].save(str(folder / "moving.gif"), save_all=True, append_images=frames[1:])
    code, out, err = run("infer", trained, "in", "absent.tif", "--output", "out")
    assert code == 3 and "8 of 10 inputs could not be read" in err
    assert "1 image has more than 8 bits: each one's own dark and bright become 0 and 255" in err
    for name, reason in (
        ("cut.tif", "page 4 of 4"),
        ("empty.tif", "not an image"),
        ("text.png", "not an image"),
        ("colour.tif", "is colour (RGB); the network takes grey"),
        ("colour.png", "colour (RGB)"),
        ("floats.tif", "not finite"),
        ("moving.gif", "2 pages"),
        ("absent.tif", "does not exist"),
    ):
        assert any(name in line and reason in line for line in err.splitlines()), (name, err)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "contact-sheet.png",
        "deep-mask.tif",
        "deep-probability.tif",
        "good-mask.tif",
        "good-probability.tif",
    ]
    assert "good-mask.tif" in out


def test_images_with_palettes_bits_and_odd_sizes(tmp_path):
    grey = tissue(0, 12, 10)
    image = Image.fromarray(grey).convert("L")
    indexed = Image.fromarray(255 - grey).convert("P")
    indexed.putpalette([v for i in range(256) for v in (255 - i,) * 3])
    indexed.save(str(tmp_path / "p.tif"))
    image.convert("1").save(str(tmp_path / "b.tif"))
    Image.fromarray(grey.astype(np.uint16) * 256).save(str(tmp_path / "deep.tif"))
    assert file_pages(str(tmp_path / "deep.tif"), 1).remarks == (IS_STRETCHED,)
    source = file_pages(str(tmp_path / "p.tif"), 1)
    (page,) = source.pages()
    assert source.remarks == ()
    np.testing.assert_array_equal(page[..., 0], grey)
    (page,) = file_pages(str(tmp_path / "b.tif"), 1).pages()
    assert set(np.unique(page)) <= {0, 255} and page.shape == (12, 10, 1)
    coloured = image.convert("P")
    coloured.putpalette([v for i in range(256) for v in (i, 0, 255 - i)])
    coloured.save(str(tmp_path / "c.png"))
    with pytest.raises(DataError, match="palette"):
        file_pages(str(tmp_path / "c.png"), 1)


def test_volume_that_changes_meanwhile_is_an_error(tmp_path):
    save_volume(tmp_path / "v.tif", [tissue(0), tissue(1)])
    source = file_pages(str(tmp_path / "v.tif"), 1)
    pages = source.pages()
    next(pages)
    save_volume(tmp_path / "v.tif", [tissue(0)])
    assert len(list(pages)) == 1  # the opened file stays readable
    with pytest.raises(DataError, match="changed"):
        list(source.pages())


def test_results_have_unique_names(tmp_path):
    inputs = ["in/a/x.png", "in/b/x.png", "in/b/x.jpg", "in/b/v.TIF"]
    files = plan_files([str(tmp_path / name) for name in inputs], tmp_path / "out", False)
    masks = [str(one.paths["mask"].relative_to(tmp_path)) for one in files]
    assert masks == ["out/a/x-mask.png", "out/b/x.png-mask.png", "out/b/x.jpg-mask.png", "out/b/v-mask.tif"]


@pytest.mark.slow
def test_masks_may_be_written_beside_training_data(trained, run, tmp_path):
    for name in ("run", "set/images", "set/masks"):
        (tmp_path / name).mkdir(parents=True)
    Image.fromarray(tissue(0)).save(str(tmp_path / "x.png"))
    shutil.copytree(trained / "checkpoints", tmp_path / "run" / "checkpoints")
    config = (trained / "config.yml").read_text()
    assert "\ndataset: membranes\n" in config
    (tmp_path / "run" / "config.yml").write_text(config.replace("\ndataset: membranes\n", "\ndataset: set\n"))
    code, _, err = run(*["infer", "run", "x.png", "--output", "set/new"])
    assert code == 0, err


@pytest.mark.slow
def test_network_name_with_its_checkpoint(trained, run, tmp_path):
    Image.fromarray(tissue(0)).save(str(tmp_path / "x.png"))
    assert run("infer", "unet", "--checkpoint", trained, "x.png", "--output", "o")[0] == 0


def test_pages_of_several_sizes_and_images_of_a_set_are_told_apart(capsys):
    row = dict(
        image="x.tif", pages=4, height=9, width=8, share=0.5, shares={"a": 0.5, "b": 0.5}, files={"mask": "m"}
    )
    sizes, names = [[9, 8], [7, 7]], [f"[{k}].png" for k in range(5)]
    print_masks(
        Masks("b", 0.5, 0, [row, {**row, "sizes": sizes}, {**row, "image": "set/eval", "page_names": names}])
    )
    out = capsys.readouterr().out
    assert out.count(" 9x8 ") == 2 and out.count(" several ") == 1
    assert "set/eval has, in this order: [0].png, [1].png, ... [4].png (--json has all)" in out


@pytest.mark.slow
def test_a_split_has_a_page_for_each_image_and_says_which(trained, run, tmp_path):
    pairs = write_pairs(tmp_path / "pairs", squares())
    code, out, _ = run("infer", trained, "--split", "train", "--dataset", pairs, "--output", "p", "--json")
    (row,) = json.loads(out)["results"]
    assert code == 0 and row["pages"] == len(row["page_names"]) > 1
    for name, page in zip(row["page_names"], read_pages(tmp_path / "p" / "imagemasks-train-mask.tif")):
        with Image.open(str(tmp_path / "pairs" / name)) as image:
            assert (image.height, image.width) == page.shape


@pytest.mark.slow
def test_ctrl_c_keeps_finished_files(trained, run, tmp_path, monkeypatch):
    for i in range(2):
        save_volume(tmp_path / "in" / f"{i}.tif", [tissue(i), tissue(i + 1)])
    calls = []

    def interrupted(logits):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    monkeypatch.setattr("ipucnn.runs.images.segmentation.check_finite", interrupted)
    assert run("infer", trained, "in", "--output", "out")[0] == 130
    assert not left_over(tmp_path)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["0-mask.tif", "0-probability.tif"]
    assert len(read_pages(tmp_path / "out" / "0-mask.tif")) == 2


@pytest.mark.slow
def test_full_disk_leaves_no_partial_files(trained, run, tmp_path, monkeypatch):
    import ipucnn.runs.images.outputs as outputs

    save_volume(tmp_path / "v.tif", [tissue(0), tissue(1)])

    def full(path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "write_pages", full)
    code, _, err = run("infer", trained, "v.tif", "--output", "out")
    assert code == 3 and "No space left" in err and not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_evaluation_covers_whole_images(trained, network, evaluated):
    printed, worst = evaluated
    source = open_membranes(204, 204, 7)
    opened = open_trained(WeightsArgument("evaluate", str(trained), {}))
    kept = opened.source.eval
    assert len(kept) == 2 and printed["dataset"]["stored"] == len(source.eval)
    totals, scores = EvaluationTotals(2, "bce_dice"), SegmentScores()
    counts = np.zeros((2, 2))
    for image, truth in zip(kept.images, kept.labels):
        logits = network.logits(image)
        totals.add(logits[None], truth[None])
        scores.add(foreground_probability(logits), truth)
        for true in (0, 1):
            for guess in (0, 1):
                counts[true, guess] += ((truth == true) & (logits.argmax(-1) == guess)).sum()
    assert printed["confusion_matrix"] == counts.astype(int).tolist()
    for name, value in totals.result().items():
        assert printed["measured"][name] == pytest.approx(value, abs=1e-6), name
    segmentation, expected = printed["segmentation"], scores.result()
    assert set(expected) == set(SCORES) == set(segmentation["scores"])
    for part in SCORES:
        assert segmentation["scores"][part]["score"] == pytest.approx(expected[part]["score"])
        assert segmentation["scores"][part]["best"] == pytest.approx(expected[part]["best"])
    right = np.diag(counts)
    both = counts.sum(0) + counts.sum(1)
    np.testing.assert_allclose(segmentation["dice"], 2 * right / both)
    np.testing.assert_allclose(segmentation["iou"], right / (both - right))
    expected_soft = []
    for image, truth in zip(kept.images, kept.labels):
        p = foreground_probability(network.logits(image)).astype(float)
        for share, mask in ((1 - p, truth == 0), (p, truth == 1)):
            expected_soft.append(2 * share[mask].sum() / ((share**2).sum() + mask.sum()))
    assert segmentation["soft_dice"] == pytest.approx(np.mean(expected_soft), abs=1e-6)
    cell = counts[1].sum() / counts.sum()
    baseline = segmentation["baseline"]
    assert baseline["class"] == "cell" and baseline["accuracy"] == pytest.approx(cell)
    assert baseline["dice"] == pytest.approx([0.0, 2 * cell / (1 + cell)])
    assert 0 < baseline["scores"]["rand"] < 1 and baseline["scores"]["info"] == pytest.approx(0, abs=1e-9)
    assert [row["image"] for row in segmentation["images"]] == ["membranes/eval/0", "membranes/eval/1"]
    with Image.open(str(worst)) as sheet:
        assert sheet.mode == "RGB" and sheet.size[0] > 4 * 190
    best = segmentation["threshold"]
    assert (best["of"], best["value"]) == ("V^Rand", segmentation["scores"]["rand"]["best"]["threshold"])
    (kept,) = json.loads((trained / "thresholds.json").read_text()).values()
    assert kept == {"value": best["value"], "chosen_on": "2 images of membranes (generated)"}


def squares():
    """Yields two images of bright squares with their masks."""
    for i in range(2):
        mask = np.kron(np.random.RandomState(i).randint(0, 2, (5, 5)), np.ones((8, 8), int)).astype(np.uint8)
        yield mask * 100 + 50, mask * 255


@pytest.mark.slow
def test_evaluate_writes_nothing_beside_a_copied_checkpoint(trained, succeeds, tmp_path):
    data = write_pairs(tmp_path / "pairs", squares())
    for folder in ("elsewhere", "project/checkpoints"):
        copy = tmp_path / folder / "mine.npz"
        copy.parent.mkdir(parents=True)
        shutil.copy(str(trained / "checkpoints" / "last.npz"), str(copy))
    (tmp_path / "elsewhere" / "config.yml").write_text("of: something else")
    before = sorted(tmp_path.rglob("*"))
    for folder in ("elsewhere", "project/checkpoints"):
        out, _ = succeeds("evaluate", tmp_path / folder / "mine.npz", "--dataset", data, "--json")
        threshold = json.loads(out)["segmentation"]["threshold"]
        assert threshold["value"] and "kept" not in threshold
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow_cases("--patch-size", "blank")
@pytest.mark.parametrize("why", ["--test-time-augmentation", "--patch-size", "blank"])
def test_a_threshold_that_says_nothing_is_not_kept(trained, report, tmp_path, why):
    """No pixel of the masks is of class 1, or the probabilities are not those of ``infer`` without options."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "thresholds.json").unlink(missing_ok=True)  # of another test
    words = [why, {"--patch-size": 220}.get(why, 2)]
    if why == "blank":
        write_pairs(tmp_path / "set/train", squares())
        write_pairs(tmp_path / "set/val", [(image, np.zeros_like(mask)) for image, mask in squares()])
        words = ["--dataset", "set"]
    found = report("evaluate", "run", "--limit-eval", 1, *words)["segmentation"]["threshold"]
    assert found is None if why == "blank" else "kept" not in found
    assert not Path("run/thresholds.json").exists()


@pytest.mark.slow
def test_infer_uses_the_threshold_that_evaluate_recommends(trained, network, run, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "thresholds.json").unlink(missing_ok=True)  # of another test
    options = ["--dataset", write_pairs(tmp_path / "pairs", squares())]
    best = json.loads(run("evaluate", "run", *options, "--json")[1])["segmentation"]["threshold"]
    with Image.open(str(tmp_path / "pairs/images/1.png")) as image, Image.open(
        str(tmp_path / "pairs/masks/1.png")
    ) as mask:
        truth = np.array(mask) > 0
        p = foreground_probability(network.logits(np.array(image)[..., None]))
    dice = {
        k / 20: 2 * (truth & (p > k / 20)).sum() / (truth.sum() + (p > k / 20).sum()) for k in range(1, 20)
    }
    assert best["score"] == pytest.approx(max(dice.values())) == pytest.approx(dice[best["value"]])
    assert best["at_half"] == pytest.approx(dice[0.5])
    (folder,) = tmp_path.glob("run/thresholds.json")
    ((updates, kept),) = json.loads(folder.read_text()).items()
    assert kept["value"] == best["value"]
    Image.fromarray(tissue(0)).save(str(tmp_path / "x.png"))
    folder.write_text(json.dumps({updates: 0.3}))  # as earlier versions wrote it
    assert RunFolder(tmp_path / "run").thresholds() == {updates: KeptThreshold(0.3)}
    folder.write_text(json.dumps({updates: {**kept, "value": 0.3}}))
    probability = foreground_probability(network.logits(tissue(0)[..., None]))
    for typed, threshold in (([], 0.3), (["--threshold", "0.7"], 0.7)):
        code, out, err = run("infer", "run", "x.png", "--output", "o", "--json", *typed)
        assert code == 0 and ("above a probability of 0.3" in err) == (not typed)
        assert ("checkpoint on 2 images of imagemasks (" in err) == (not typed)
        assert json.loads(out)["threshold"] == threshold
        (mask,) = read_pages(tmp_path / "o" / "x-mask.png")
        np.testing.assert_array_equal(mask, np.where(probability > threshold, 255, 0))


@pytest.mark.slow
def test_a_threshold_is_kept_by_the_first_instance_and_for_its_checkpoint(
    trained, run, tmp_path, monkeypatch
):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "thresholds.json").unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr("ipucnn.runs.evaluate.find_role", lambda: Role(1))
        options = ["--dataset", write_pairs(tmp_path / "pairs", squares())]
        assert run("evaluate", "run", *options)[0] == 0 and not list(tmp_path.glob("run/thresholds.json"))
    Image.fromarray(tissue(0)).save(str(tmp_path / "x.png"))
    # Another checkpoint has no recommended threshold.
    (tmp_path / "run" / "thresholds.json").write_text(json.dumps({"99999": 0.3}))
    assert json.loads(run("infer", "run", "x.png", "--output", "o", "--json")[1])["threshold"] == 0.5


def test_differences_are_coloured_by_kind():
    from ipucnn.reports.sheets import FALSE_BACKGROUND, FALSE_FOREGROUND, WRONG, errors
    from ipucnn.runs.images.outputs import IGNORED_COLOUR

    drawn = errors(np.array([[0, 0, 1, 1, -1]]), np.array([[0, 1, 0, 1, 1]]), is_binary=True)
    mistakes = [FALSE_FOREGROUND, FALSE_BACKGROUND]
    assert drawn.tolist() == [[[0, 0, 0], *map(list, mistakes), [255, 255, 255], list(IGNORED_COLOUR)]]
    drawn = errors(np.array([[0, 0, 1, 2, 2, -1]]), np.array([[0, 1, 0, 1, 2, 0]]), is_binary=False)
    assert drawn.tolist() == [[[0, 0, 0], *[list(WRONG)] * 3, [255, 255, 255], list(IGNORED_COLOUR)]]


def test_sheet_rows_are_as_high_as_their_pictures(tmp_path):
    def height(*sides):
        sheet = PanelSheet(("a", "b"))
        for side in sides:
            sheet.add("caption", [np.zeros((side, 192), np.uint8)] * 2)
        sheet.save(tmp_path / "sheet.png")
        return Image.open(tmp_path / "sheet.png").size[1]

    rest = height(192) - 192
    between = height(192, 192) - height(192) - 192
    assert height(192, 10, 50) == rest + 2 * between + 192 + 10 + 50


def test_sheet_columns_are_as_wide_as_their_pictures(tmp_path):
    def width(side, *heads):
        sheet = PanelSheet(heads, side=384)
        sheet.add("caption", [np.zeros((side, side), np.uint8)] * 2)
        sheet.save(tmp_path / "sheet.png")
        return Image.open(tmp_path / "sheet.png").size[0]

    # Pictures of 220 pixels are not enlarged to 384, and have no empty space beside them.
    assert width(384, "a", "b") - width(220, "a", "b") == 2 * (384 - 220)
    assert width(220, "probability " * 9, "b") - width(220, "a", "b") == 2 * (384 - 220) > 0


@pytest.mark.parametrize(
    "names, of_masks",
    [
        pytest.param(("rest", "cell"), (), marks=pytest.mark.slow),
        pytest.param(("rest", "cell"), ((0, 0, 0), (9, 9, 200)), marks=pytest.mark.slow),
        (("a", "b", "c"), ((0, 0, 0), (0, 200, 9), (9, 9, 200))),
    ],
)
def test_sheets_explain_their_colours_and_are_not_much_taller_than_wide(tmp_path, names, of_masks):
    from ipucnn.datasets.verification.samples import Drawn, Sample
    from ipucnn.reports.evaluate import WorstSheet
    from ipucnn.reports.infer import MaskSheet
    from ipucnn.reports.sheets import RIGHT_FOREGROUND, WRONG, save_predictions
    from ipucnn.reports.verify import LabelSheet
    from ipucnn.runs.images.segmentation import Segmented, SegmentedImage

    count, colours = len(names), class_colours(len(names), of_masks)
    image = np.full((220, 220, 1), 100, np.uint8)
    mask = np.random.RandomState(0).randint(0, count, (220, 220)).astype(np.uint8)
    sheets = {"worst": WorstSheet(), "masks": MaskSheet(), "labels": LabelSheet("segmentation")}
    assert sheets["labels"].is_drawn(0, 12)
    probability = np.zeros(mask.shape, np.float32)
    segmented = SegmentedImage("x.tif", image, mask, Classes(names, colours), mask, probability, 0.5)
    for number in range(12):
        for name in ("worst", "masks"):
            sheets[name].take(Segmented(number, 12, segmented))
        sheets["labels"].take(Drawn(number, 12, Sample("x.tif", "", [], image, mask, names, of_masks)))
    for name, sheet in sheets.items():
        sheet.save(tmp_path / f"{name}.png")
    worst = dict(sheets["worst"].legend)
    assert worst[RIGHT_FOREGROUND] == ("cell" if count == 2 else "right (a: black)")
    assert sheets["masks"].legend == tuple(zip(colours, names))[1:]
    assert count == 2 or (
        worst[WRONG] and all(worst[colour] == name for colour, name in zip(colours[1:], names[1:]))
    )
    for name in sheets:
        pixels = np.asarray(Image.open(tmp_path / f"{name}.png"))
        height, width = pixels.shape[:2]
        assert height <= 1.3 * width, name
        for colour in (*dict(worst if name == "worst" else sheets["masks"].legend),):
            assert (pixels[: 3 * height // 100 + 60] == colour).all(-1).sum() > 60, (name, colour)
    save_predictions([segmented], tmp_path / "p.png", "runs/x")
    pixels = np.asarray(Image.open(tmp_path / "p.png"))
    for colour in () if count == 2 else colours[1:]:
        assert (pixels[18:33] == colour).all(-1).sum() > 60 and (pixels == colour).all(-1).sum() > 10_000


@pytest.mark.slow
def test_exported_network_gives_the_masks_of_its_run(trained, run, monkeypatch):
    """Evaluates and infers with an ONNX or TFLite file: patches of its single size, joined like the run's."""
    from ipucnn.runs import runtimes

    form = next((f for f in ("onnx", "tflite") if not runtimes.missing_packages(f)), None)
    if form is None:
        pytest.skip("neither ONNX nor TFLite can be written: pip install 'ipucnn[export]'")
    code, _, err = run("export", trained, "--format", form, "--raw-uint8", "--output", "out")
    assert code == 0, err
    file = f"out/model.{form}"
    code, out, err = run("evaluate", file, "--json")
    assert code == 0, err
    mine, runs = json.loads(out), json.loads(run("evaluate", trained, "--patch-size", "204", "--json")[1])
    for name in ("accuracy", "dice", "iou"):
        assert mine["measured"][name] == pytest.approx(runs["measured"][name], abs=2e-4), name
    Image.fromarray(tissue(3, 90, 230)).save("one.png")
    for target, folder in ((file, "by-file"), (trained, "by-run")):
        code, _, err = run("infer", target, "one.png", "--patch-size", "204", "--output", f"{folder}/")
        assert code == 0, err
    masks = [np.asarray(Image.open(next(Path(d).glob("*.png")))) for d in ("by-file", "by-run")]
    assert masks[0].shape == (90, 230) and np.mean(masks[0] == masks[1]) > 0.999
    other_size = f"infer {file} one.png --patch-size 220 --output other/"
    check_refused(run, Refusal(other_size, "takes images of 204x204", "drop --patch-size"))
