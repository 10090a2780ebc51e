"""ipucnn infer: inputs, outputs, unreadable images, fixed shapes, the contact sheet, ImageNet weights, Ctrl-C."""

import csv
import errno
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.benchmark_reports import filled
from support.data_sets import noise, write_class_folders
from support.refusals import Refusal, check_refused
from support.trained_runs import run_of

from ipucnn.datasets.sources.embedded import open_digits
from ipucnn.runs.images.inputs import ImageInput, decoded, find_images
from ipucnn.runs.images.outputs import Spool
from ipucnn.runs.records import ClassScores, Evaluation, plain
from ipucnn.text import printable


@pytest.fixture(scope="module")
def trained():
    return run_of("lenet")


def save_digit(path, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(open_digits().eval.images[i, :, :, 0]).save(str(path))


@pytest.fixture
def images(tmp_path):
    """Writes in/{0,1}.png, in/deep/2.PNG and some files that are no images."""
    for i, name in enumerate(("0.png", "1.png", "deep/2.PNG")):
        save_digit(tmp_path / "in" / name, i)
    (tmp_path / "in" / "notes.txt").write_text("x")
    save_digit(tmp_path / "in" / ".hidden" / "9.png", 9)
    return tmp_path / "in"


def test_images_are_found_in_files_folders_and_patterns(images, monkeypatch):
    monkeypatch.chdir(images.parent)
    everything = ["in/0.png", "in/1.png", "in/deep/2.PNG"]
    for pattern, expected in (
        ("in", everything),
        ("in/**", everything),
        ("in/**/*.png", everything[:2]),
        ("in/*.png", everything[:2]),
        ("in/[1-9].png", everything[1:2]),
        ("in/*", everything),
        ("in/notes.txt", ["in/notes.txt"]),
    ):
        found = find_images([pattern])
        assert list(found.paths) == expected and not found.problems, pattern
    assert find_images(["in/1.png", "in/0.png"]).paths == ("in/1.png", "in/0.png")
    found = find_images(["absent.png", "no*.png", "in/0.png"])
    assert found.paths == ("in/0.png",) and len(found.problems) == 2
    (images / "strange[1].png").write_bytes(b"")
    without_duplicates = find_images(["in/1.png", "in", "in/*.png", "./in/0.png"]).paths
    assert without_duplicates[0] == "in/1.png" and sorted(without_duplicates[1:]) == sorted(
        set(find_images(["in"]).paths) - {"in/1.png"}
    )
    assert find_images(["in/strange[1].png"]).paths == ("in/strange[1].png",)


def test_images_of_systems_and_behind_links_are_left_out_and_counted(here):
    """As they are in a folder for training; one that is named is taken."""
    for name in (
        "a.png",
        "__MACOSX/in/._a.png",
        "@eaDir/a.png/THUMB_M.jpg",
        ".cache/b.png",
        "sub/._c.png",
        "sub/c.png",
    ):
        path = Path("in", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    Path("in", "link").symlink_to(here / "in" / "sub")
    found = find_images(["in"])
    assert found.paths == ("in/a.png", "in/sub/c.png") and not found.problems
    # One each of the three folders and of sub; what is behind a link is not searched.
    assert "4 images hidden, or made by a system or tool; 1 link to folders (" in found.left_out[0]
    assert found.left_out[0].endswith(" and 2 more)")
    assert find_images(["in/**/*.png"]).paths == ("in/a.png", "in/sub/c.png")
    assert find_images(["in/@eaDir/*/*.jpg"]).paths == ("in/@eaDir/a.png/THUMB_M.jpg",)
    assert find_images(["in/sub/._c.png", "in/.c*/*"]).paths == ("in/sub/._c.png", "in/.cache/b.png")
    assert find_images(["in/a.png"]).left_out == ()


def test_paths_that_are_named_again_are_counted(here):
    for k in range(2):
        save_digit(Path(f"in/{k}.png"), k)
    found = find_images(["in/0.png", "in/0.png", "in"])
    assert found.paths == ("in/0.png", "in/1.png")
    assert found.left_out == ("left out: 2 paths named again (in/0.png)",)


@pytest.mark.slow
def test_pictures_replace_no_images(trained, run, here):
    """Those of a data set are read only after outputs are checked."""
    save_digit(Path("set/a.png"), 1)
    before = Path("set/a.png").read_bytes()
    for words in (
        ["evaluate", trained, "--plot", "set/a.png"],
        ["infer", trained, "--split", "eval", "--contact-sheet", "set/a.png"],
        ["plot", trained, "--output", "set/a.png"],
        ["train", "lenet", "--dataset", "digits", "--dry-run", "--draw-samples", "set/a.png"],
    ):
        check_refused(run, Refusal(words, "set/a.png: it does not say that ipucnn wrote it", "mv set/a.png"))
    assert Path("set/a.png").read_bytes() == before


@pytest.mark.slow
def test_a_picture_replaces_that_of_another_command(trained, run, here):
    for words in (
        ["plot", trained, "--output", "p.png"],
        ["evaluate", trained, "--plot", "p.png"],
        ["infer", trained, "--split", "eval", "--contact-sheet", "p.png"],
        ["plot", trained, "--output", "p.png"],
    ):
        code, _, err = run(*words)
        assert code == 0, err


def test_files_in_a_folder_that_have_no_name_of_an_image_are_counted(here):
    """They are read if they are named; training counts them too."""
    save_digit(Path("new/1.png"), 1)
    for name in ("2.heic", "3.avif", ".hidden.txt"):
        shutil.copy("new/1.png", f"new/{name}")
    found = find_images(["new"])
    assert found.paths == ("new/1.png",)
    assert found.left_out == ("left out: 2 files with no image's name (new/2.heic, new/3.avif)",)
    assert find_images(["new/2.heic"]).paths == ("new/2.heic",)


@pytest.mark.parametrize("image, mask", [
    ("images/{}.png", "masks/{}.png"), ("train/image/{}.png", "train/label/{}.png"), ("{}.png", "{}_mask.png"),
    ("imagesTr/{}_0000.png", "labelsTr/{}.png"), ("train/{}.png", "train_masks/{}.png"), ("{}_img.png", "{}_masks.png"),
    ("a/b/{}.png", "a/b/{}-seg.png"), ("JPEGImages/{}.jpg", "SegmentationClass/{}.png"),
    ("good/{}.png", "ground_truth/broken/{}_x.png"),
])  # fmt: skip
def test_masks_beside_images_in_a_folder_are_left_out_and_counted(here, image, mask):
    for k, name in itertools.product(range(3), (image, mask)):
        save_digit(Path("set", name.format(k)), k)
    found = find_images(["set"])
    assert found.paths == tuple(f"set/{image.format(k)}" for k in range(3)) and not found.problems
    (line,) = found.left_out
    assert line.startswith("left out: 3 masks beside their images (set/")
    assert find_images(
        ["set/*"] if "/" not in mask else [f"set/{mask.rpartition('/')[0]}"]
    ).paths  # named, and read
    assert find_images([f"set/{mask.format(1)}"]).paths == (f"set/{mask.format(1)}",)


def test_folders_of_masks_without_images_are_read(here):
    save_digit(Path("set", "masks", "0.png"), 0)
    Path("set", "images").mkdir()
    assert find_images(["set"]).paths == ("set/masks/0.png",) and not find_images(["set"]).left_out


def test_names_are_one_line_of_valid_text():
    assert printable("a\nb\x1b[31m.png") == "a\\nb\\x1b[31m.png"
    assert printable("Zürich 東京.png") == "Zürich 東京.png"
    printable(b"\xff.png".decode("utf-8", "surrogateescape")).encode("utf-8")
    assert printable("a\u3000b\xa0c\u202e") == "a\u3000b\xa0c\\u202e"


@pytest.mark.skipif(os.name == "nt", reason="the file system takes no such names")
def test_json_and_csv_have_the_names_of_files_as_they_are(trained, run, tmp_path):
    name = "in/new\nline\x1b.png"
    save_digit(tmp_path / name, 0)
    code, out, err = run("infer", trained, "in", "--output", "o.csv")
    assert code == 0, err
    with open(str(tmp_path / "o.csv"), encoding="utf-8", newline="") as file:
        assert [row["image"] for row in csv.DictReader(file)] == [name]
    _, out, _ = run("infer", trained, "in", "--format", "jsonl")
    assert json.loads(out)["image"] == name and len(out.splitlines()) == 1
    _, out, _ = run("infer", trained, "in", columns=200)
    assert "in/new\\nline\\x1b.png" in out and "\x1b" not in out


@pytest.mark.slow
def test_names_that_no_file_takes_are_escaped_in_every_output(trained, run, tmp_path):
    name = os.fsdecode(b"in/\xff\x1b.png")
    save_digit(tmp_path / "in" / "0.png", 0)
    os.rename(str(tmp_path / "in" / "0.png"), str(tmp_path / name))
    for option in ("", "--format csv", "--format json", "--output o.csv", "--output o.jsonl"):
        code, out, err = run("infer", trained, "in", *option.split())
        assert code == 0, err
        text = out or (tmp_path / option.split()[1]).read_text(encoding="utf-8")
        assert "udcff" in text and "x1b" in text and "\x1b" not in text
        text.encode("utf-8")
    (tmp_path / name).write_bytes(b"no image")
    code, _, err = run("infer", trained, "in")
    assert code == 3 and "\\udcff\\x1b.png" in err and "\x1b" not in err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_pipes_and_devices_are_refused(trained, run, images):
    os.mkfifo(str(images / "pipe.png"))
    ends = os.openpty()
    terminal = os.ttyname(ends[1])
    code, out, err = run("infer", trained, "in", terminal, "in/pipe.png", "--json")
    for end in ends:
        os.close(end)
    assert code == 3 and len(json.loads(out)["results"]) == 3 and "2 of 5 inputs" in err
    refused = "is a device, a FIFO or a socket, not a file"
    assert err.count(f"pipe.png {refused}") == 1 and f"{terminal} {refused}" in err


def test_ctrl_c_does_not_wait_for_an_image_that_is_being_read(tmp_path):
    script = (
        "import os, signal, time\n"
        "import ipucnn.runs.images.inputs as inputs\n"
        "def read():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(120)\n"
        "list(inputs.decoded([inputs.ImageInput(str(i), read) for i in range(9)], 2, 4))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr


def test_loading_threads_end_and_raise_their_errors():
    before = threading.active_count()
    assert len(list(decoded([ImageInput("a", lambda: np.zeros((1, 1, 1)))] * 5, 3, 2))) == 5
    with pytest.raises(ZeroDivisionError):
        list(decoded([ImageInput("a", lambda: 1 // 0)], 2, 2))
    until = time.time() + 10
    while threading.active_count() > before and time.time() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


class FullDisk(io.RawIOBase):
    """A file on a disk without free space."""

    def writable(self):
        return True

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("size", [10, 100_000])
def test_full_temporary_folder_is_named(tmp_path, monkeypatch, size):
    """The error appears when a row is added: later the output file would be blamed."""
    from ipucnn.filesystem import user_error_of

    def full(mode, buffering, encoding):
        return io.TextIOWrapper(
            io.BufferedWriter(FullDisk()), encoding=encoding, line_buffering=buffering == 1
        )

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    spool = Spool()
    with pytest.raises(OSError, match="No space left") as error:
        spool.append({"text": "x" * size})
    assert "TMPDIR" in user_error_of(error.value).hint


def test_no_more_images_are_decoded_than_memory_should_hold():
    alive, most, taken = set(), 0, []

    def read(i):
        alive.add(i)
        return np.full((1, 1, 1), i, np.uint8)

    def inputs():
        for i in range(200):
            yield ImageInput(str(i), lambda i=i: read(i))

    for image, pixels in decoded(inputs(), 3, 8):
        most = max(most, len(alive))
        alive.discard(int(image.name))
        taken.append(int(pixels[0, 0, 0]))
    assert taken == list(range(200)) and most <= 9


def test_infer_of_a_split_has_the_accuracy_of_evaluate(trained, run, tmp_path):
    code, out, err = run("infer", trained, "--split", "eval", "--json")
    assert code == 0, err
    results, counted = json.loads(out)["results"], np.zeros((10, 10), int)
    assert len(results) == 37 and results[0]["image"] == "digits/eval/0"
    code, out, _ = run("evaluate", trained, "--json", "--predictions", "p.csv")
    evaluation = json.loads(out)
    assert sum(r["correct"] for r in results) / 37 == pytest.approx(evaluation["measured"]["accuracy"])
    with open(tmp_path / "p.csv", newline="") as handle:
        for result, row in zip(results, csv.DictReader(handle)):
            counted[int(row["label"]), int(row["prediction"])] += 1
            best = result["predictions"][0]
            assert (result["truth"], best["label"]) == (row["label"], row["prediction"])
            assert best["probability"] == pytest.approx(float(row["probability"]), abs=1e-5)
            assert sum(p["probability"] for p in result["predictions"]) <= 1 + 1e-9
    assert counted.tolist() == evaluation["confusion_matrix"]
    code, out, _ = run("infer", trained, "--split", "train", "--limit-train", "70", "--format", "jsonl")
    assert code == 0 and [json.loads(line)["image"] for line in out.splitlines()][-1] == "digits/train/69"
    code, out, _ = run("infer", trained, "--split", "eval", "--top", "10", "--json")
    assert all(
        abs(sum(p["probability"] for p in r["predictions"]) - 1) < 1e-9 for r in json.loads(out)["results"]
    )


@pytest.mark.slow
def test_files_give_the_same_results_as_the_split(trained, run, images):
    code, out, err = run("infer", trained, "in", "--json")
    assert code == 0, err
    from_files = json.loads(out)["results"]
    code, out, _ = run("infer", trained, "--split", "eval", "--limit-eval", "100%", "--json")
    for one, other in zip(from_files, json.loads(out)["results"]):
        assert [p["class"] for p in one["predictions"]] == [p["class"] for p in other["predictions"]]
        for p, q in zip(one["predictions"], other["predictions"]):
            assert p["probability"] == pytest.approx(q["probability"], abs=1e-6)
        assert "truth" not in one and other["truth"] == str(other["truth"])


def test_every_output_format_has_the_same_content(trained, run, images, tmp_path):
    args = ["infer", trained, "in", "--top", "2"]
    code, text, err = run(*args, "--format", "json")
    assert code == 0, err
    expected = json.loads(text)["results"]
    assert run(*args, "--json")[1] == text
    assert [json.loads(line) for line in run(*args, "--format", "jsonl")[1].splitlines()] == expected
    rows = list(csv.reader(run(*args, "--format", "csv")[1].splitlines()))
    assert rows[0] == ["image", "label_1", "probability_1", "label_2", "probability_2"]
    for row, result in zip(rows[1:], expected):
        first, second = result["predictions"]
        assert row[:2] + row[3:4] == [result["image"], first["label"], second["label"]]
        assert float(row[2]) == pytest.approx(first["probability"], abs=1e-6)
    for form in ("csv", "json", "jsonl"):
        code, out, err = run(*args, "--output", f"o.{form}")
        assert code == 0 and out == "" and "3 images" in err
        assert (tmp_path / f"o.{form}").read_text() == run(*args, "--format", form)[1]
    code, out, _ = run(*args, "--output", "o.csv", "--format", "json")
    assert code == 0 and json.loads(out)["results"] == expected


def test_unreadable_images_are_reported_and_skipped(trained, run, images, tmp_path):
    (images / "cut.png").write_bytes((images / "0.png").read_bytes()[:60])
    (images / "text.jpg").write_text("no image")
    (images / "empty.gif").write_bytes(b"")
    code, out, err = run("infer", trained, "absent.png", "in", "none*.png", "--output", "o.jsonl")
    lines = err.splitlines()
    assert code == 3 and out == "" and "5 of 8 inputs" in err
    for name in ("absent.png", "cut.png", "text.jpg", "empty.gif", "none*.png"):
        assert sum(name in line for line in lines) == 1, err
    results = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [Path(r["image"]).name for r in results] == ["0.png", "1.png", "2.PNG"]
    code, out, _ = run("infer", trained, "in/0.png", "in/1.png", "in/deep/2.PNG", "--json")
    assert [r["predictions"][0]["label"] for r in json.loads(out)["results"]] == [
        r["predictions"][0]["label"] for r in results
    ]


def test_files_of_several_pages_or_frames_are_counted(trained, report, succeeds, tmp_path):
    first, *others = (Image.fromarray(noise(k, 8, 8)) for k in range(3))
    for ending in ("gif", "tif"):
        first.save(tmp_path / f"several.{ending}", save_all=True, append_images=others)
        first.save(tmp_path / f"one.{ending}")
    line = "2 files have several pages or frames: the first of each is used"
    names = [f"{name}.{ending}" for name in ("one", "several") for ending in ("gif", "tif")]
    assert line in report("infer", trained, *names)["notes"]
    assert line in succeeds("infer", trained, *names)[1]
    assert "pages" not in succeeds("infer", trained, *names[:2])[1]


def test_transparent_images_are_counted_and_one_that_is_not_seen_is_no_white_image(trained, run, tmp_path):
    pixels = noise(1, 8, 8, 4)
    Image.fromarray(pixels).save(tmp_path / "part.png")
    pixels[..., 3] = 0
    Image.fromarray(pixels).save(tmp_path / "none.png")
    code, out, err = run("infer", trained, "part.png", "none.png", "--json")
    line = "1 file has transparent parts: white is laid under them"
    assert code == 3 and line in err and line in json.loads(out)["notes"]
    assert "image none.png is transparent everywhere: it would be white" in err.splitlines()
    assert [row["image"] for row in json.loads(out)["results"]] == ["part.png"]


def test_network_is_traced_once_for_any_number_of_images(trained, run, monkeypatch):
    from ipucnn.runs import infer
    from ipucnn.sessions.host.network import Network
    from ipucnn.sessions.host.session import HostPredictor

    monkeypatch.setattr(infer, "LARGEST_BATCH", 8)
    shapes, traced, predict, call = [], [], HostPredictor.predict, Network.__call__

    def watched(self, dataset):
        shapes.extend(tuple(batch.shape) for batch in dataset)
        return predict(self, dataset)

    monkeypatch.setattr(Network, "__call__", lambda *args, **kw: traced.append(1) or call(*args, **kw))
    monkeypatch.setattr(HostPredictor, "predict", watched)
    code, out, _ = run("infer", trained, "--split", "eval", "--json")
    assert code == 0 and len(json.loads(out)["results"]) == 37
    assert len(shapes) == 5 and len(set(shapes)) == 1 and shapes[0][0] == 8
    assert len(traced) == 1


@pytest.mark.slow
def test_the_contact_sheet(trained, run, images, tmp_path):
    code, _, err = run("infer", trained, "in", "--contact-sheet", "s.png", "--output", "o.csv")
    assert code == 0 and "contact sheet of 3 images" in err
    with Image.open(str(tmp_path / "s.png")) as sheet:
        assert sheet.format == "PNG" and sheet.width < 600 and sheet.height < 250
    code, _, err = run("infer", trained, "--split", "train", "--contact-sheet", "t.png", "--json")
    assert code == 0 and "contact sheet of 100 images" in err
    with Image.open(str(tmp_path / "t.png")) as sheet:
        # Frames of the first row, below three lines: the run, the number of right images, and the number of shown ones.
        frames = {sheet.getpixel((8 + 148 * i, 70)) for i in range(10)}
    assert frames == {(34, 139, 34), (200, 30, 30)}


def test_the_contact_sheet_counts_readable_images_and_writes_letters(tmp_path, monkeypatch):
    from PIL import ImageDraw

    from ipucnn.reports.sheets import ContactSheet

    written = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **_: written.append(text))

    def drawn(total, unreadable):
        written.clear()
        sheet = ContactSheet()
        sheet.expect(total)
        for i in range(total):
            if i not in unreadable:
                best = {"label": "Zürich", "class": 1, "probability": 0.5}
                sheet.take(i, {"image": f"東{i}.png", "predictions": [best]}, np.zeros((4, 4, 1), np.uint8))
        sheet.save(tmp_path / "s.png")
        return [text for text in written if text.endswith("images")]

    assert (
        drawn(19, {3, 4, 5, 6}) == []
        and "Zürich: 50%" in written
        and not any("?" in text for text in written)
    )
    assert drawn(200, {0, 1}) == ["99 of 198 images"]


def test_the_contact_sheet_of_mistakes(trained, run, tmp_path, monkeypatch):
    from PIL import ImageDraw

    written = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **_: written.append(text))
    code, out, err = run(
        "infer", trained, "--split", "train", "--only-mistakes", "--contact-sheet", "m.png", "--json"
    )
    results = json.loads(out)["results"]
    wrong = [one for one in results if not one["correct"]]
    shown = min(len(wrong), 100)
    assert code == 0 and 0 < len(wrong) < len(results) and f"contact sheet of {shown} images" in err
    right = len(results) - len(wrong)
    assert written[:3] == [
        f"classified by {trained}"[: len(written[0]) - 3] + "..."
        if written[0].endswith("...")
        else written[0],
        f"{right:,} of {len(results):,} right: {right / len(results):.2%}",
        f"{shown} of {len(wrong):,} mistakes",
    ]
    assert sum(text.startswith("is ") for text in written) == shown


def test_the_contact_sheet_draws_any_image_and_label(tmp_path):
    from ipucnn.reports.sheets import GREEN, ContactSheet

    sheet = ContactSheet()
    sheet.expect(250)
    for i in range(250):
        pixels = np.full((1 + i, 400 - i, 3 if i % 2 else 1), i % 256, np.uint8)
        best = {"label": "東京 " + "long " * 20, "class": 1, "probability": 0.5}
        sheet.take(i, {"image": f"{i}.png", "truth": "a", "correct": True, "predictions": [best]}, pixels)
    assert len(sheet) == 100
    sheet.save(tmp_path / "any-name")
    with Image.open(str(tmp_path / "any-name")) as image:
        assert image.format == "PNG" and GREEN in {c for _, c in image.getcolors(1 << 24)}


def test_the_range_of_images_is_typed_for_keras_weights_only(trained, run, report):
    """A file of weights trained on pixels / 255 gives the probabilities of Keras' predict on pixels / 255."""
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.registry import get_model

    model = build_model(get_model("cifar_resnet8"), BuildOptions((8, 8, 3), 10))
    model.save_weights("w.weights.h5")
    pixels = np.repeat(np.random.RandomState(3).randint(0, 256, (3, 8, 8, 1)), 3, axis=-1).astype(np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(f"{number}.png")
    logits = np.asarray(model(pixels / np.float32(255)), np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    words = ("w.weights.h5", "--model-name", "cifar_resnet8", "--dataset", "digits")
    images = ("0.png", "1.png", "2.png")
    found = report("infer", *words, "--normalise", "unit", *images, "--top", 10, "--precision", "32.32")
    assert not any("were scaled" in note for note in found["notes"])
    for row, probabilities in zip(found["results"], expected):
        for one in row["predictions"]:
            assert one["probability"] == pytest.approx(probabilities[one["class"]], abs=1e-6)
    error = f"--normalise: {trained} is a run, which has its own network"
    check_refused(run, Refusal(["evaluate", str(trained), "--normalise", "unit"], error, "drop it"))


def test_keras_weights_use_the_class_names_of_the_data_set(trained, run, images):
    from ipucnn.runs.sources import WeightsArgument
    from ipucnn.runs.trained import open_trained
    from ipucnn.sessions.host.environment import import_tensorflow

    import_tensorflow()
    model, _ = open_trained(WeightsArgument("evaluate", str(trained), {})).build()
    model.save_weights("w.weights.h5")
    code, out, err = run(
        "infer", "w.weights.h5", "in", "--model-name", "lenet", "--dataset", "digits", "--json"
    )
    assert code == 0, err
    of_file, expected = json.loads(out), json.loads(run("infer", trained, "in", "--json")[1])
    (left_out,) = expected["notes"]
    assert "does not say how its images were scaled" in of_file["notes"][0]
    assert of_file["notes"][1:] == [left_out] and "in/.hidden" in left_out
    for one, other in zip(of_file["results"], expected["results"]):
        assert [p["label"] for p in one["predictions"]] == [p["label"] for p in other["predictions"]]


@pytest.mark.slow
def test_keras_export_is_not_accepted_as_weights(trained, run, images, in_this_process):
    code, _, err = run("export", trained, "--format", "keras", "--output", "out")
    assert code == 0, err
    (exported,) = [path for path in Path("out").rglob("model.*") if path.suffix in (".keras", ".h5")]
    # Without the description that export wrote beside it, the file is any Keras file.
    Path("alone.keras").write_bytes(exported.read_bytes())
    hint = "it holds a network: add --model-name alone.keras and its data set"
    if exported.suffix == ".h5":  # of Keras 2.6: no .keras file, whatever its name
        hint = "add --model-name and --dataset"
    for command, arguments in (("infer", ["in"]), ("evaluate", [])):
        check_refused(
            run,
            Refusal(
                [command, exported, *arguments],
                f"`ipucnn export` wrote for Keras; `ipucnn {command}` cannot run it",
                f"ipucnn {command} RUN; or export the run with --format onnx or tflite",
            ),
            Refusal(
                [command, "alone.keras", *arguments],
                "of alone.keras only the weights are read",
                hint,
            ),
        )


# ImageNet weights, without a network.


def test_without_a_network_imagenet_is_a_clear_error(run, images, monkeypatch):
    from tensorflow import keras

    downloads = []

    def refused(name, origin, **details):
        downloads.append(origin)
        raise Exception(f"URL fetch failure on {origin}: None -- [Errno -2] Name or service not known")

    monkeypatch.setattr(keras.utils, "get_file", refused)
    command = "infer mobilenet in --weights imagenet --output o.csv"
    check_refused(run, Refusal(command, "could not be downloaded", "check the network", 6))
    assert len(downloads) == 1


@pytest.mark.slow
def test_imagenet_weights_give_imagenet_labels(run, images, tmp_path, monkeypatch):
    from tensorflow import keras

    from ipucnn.models import imagenet

    index = tmp_path / "index.json"
    index.write_text(json.dumps({str(i): [f"n{i:08d}", f"thing_{i}"] for i in range(1000)}))

    def fetch():
        print("Downloading data from somewhere")
        return str(index)

    source = keras.applications.MobileNet(weights=None)
    monkeypatch.setattr(imagenet, "_fetch", fetch)
    monkeypatch.setattr(imagenet, "application", lambda name: lambda weights: source)
    # The reference: only Pillow and Keras Applications
    with Image.open(str(images / "0.png")) as image:
        side = 8 / 1.14
        box = (4 - side / 2, 4 - side / 2, 4 + side / 2, 4 + side / 2)
        pixels = np.asarray(image.convert("RGB").resize((224, 224), Image.BILINEAR, box=box), np.float32)
    # Fresh weights give nearly the same score to every class; larger ones are sure of some.
    head = source.get_layer("conv_preds")
    logits = keras.Model(source.input, head.output)(pixels[None] / 127.5 - 1.0)
    kernel, bias = head.get_weights()
    head.set_weights([kernel * 3.0 / np.std(logits), bias])
    probabilities = np.asarray(source(pixels[None] / 127.5 - 1.0))[0]
    code, out, err = run("infer", "mobilenet", "in/0.png", "--weights", "imagenet", "--json", "--top", "3")
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    best = np.argsort(-probabilities)[:3]
    assert [p["label"] for p in result["predictions"]] == [f"thing_{i}" for i in best]
    assert result["predictions"][0]["probability"] == pytest.approx(float(probabilities[best[0]]), rel=1e-3)


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_leaves_nothing(trained, tmp_path):
    save_digit(tmp_path / "many" / "0.png", 0)
    for i in range(1, 8_000):
        os.link(str(tmp_path / "many" / "0.png"), str(tmp_path / "many" / f"{i}.png"))
    script = (
        "import sys, ipucnn.cli as cli\n"
        "from ipucnn.sessions.host.session import HostPredictor\n"
        "real = HostPredictor.predict\n"
        "def slow(self, dataset):\n"
        "    print('started', file=sys.stderr, flush=True)\n"
        "    return real(self, dataset)\n"
        "HostPredictor.predict = slow\n"
        "cli.main(sys.argv[1:])\n"
    )
    root = str(Path(__file__).parent.parent)
    options = ("--output", "o.csv", "--contact-sheet", "s.png")
    process = subprocess.Popen(
        [sys.executable, "-c", script, "infer", str(trained), "many", *options],
        cwd=str(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert any(line == "started\n" for line in iter(process.stderr.readline, ""))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err and "Traceback" not in err and out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["many"]


def test_class_folders_that_are_links_are_searched_as_those_of_a_data_set_are(tmp_path, monkeypatch):
    write_class_folders(tmp_path, {("all", "red"): 2, ("all", "blue"): 3})
    (tmp_path / "mine" / "own").mkdir(parents=True)
    for name, target in (
        ("red", "../all/red"),
        ("blue", "../all/blue"),
        ("self", "."),
        ("up", ".."),
        ("own2", "own"),
    ):
        (tmp_path / "mine" / name).symlink_to(target)
    (tmp_path / "mine" / "own" / "deep").symlink_to("../../all/red")
    monkeypatch.chdir(tmp_path)
    expected = [str(Path("mine", one, f"{i}.png")) for one, n in (("blue", 3), ("red", 2)) for i in range(n)]
    for spelling in ("mine", "mine/", "min*"):
        found = find_images([spelling])
        assert [*found.paths] == expected
        assert found.left_out[0].startswith("left out: 4 links to folders (")


def test_circular_links_do_not_multiply_matches(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"")
    for name in ("one", "two", "three"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert find_images(["**/*.png"]).paths == ("a/x.png",)
    assert find_images([str(tmp_path / "**" / "**" / "x.p?g")]).paths == (str(tmp_path / "a" / "x.png"),)
    assert find_images(["a/*/x.png"]).paths == ("a/one/x.png", "a/three/x.png", "a/two/x.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    found = find_images(["loop.png", "a/" + "n" * 300, "a/x.png", "nul\0"])
    assert found.paths == ("a/x.png",) and len(found.problems) == 3


def test_class_names_may_be_any_text():
    from ipucnn.reports.evaluate import evaluation_json

    names = ["@confusion_matrix@", '"confusion_matrix": [']
    classes = [filled(ClassScores, name=name) for name in names]
    result = filled(
        Evaluation, model="@confusion_matrix@", classes=classes, confusion_matrix=[[1, 2], [3, 4]]
    )
    text = evaluation_json(result)
    assert json.loads(text) == plain(result) and "    [1, 2],\n    [3, 4]\n" in text


def test_titles_of_numbers_wrap_so_that_no_column_is_lost(capsys, monkeypatch):
    from ipucnn.reports.console import NUMBER, TEXT, console, text_table

    monkeypatch.setenv("COLUMNS", "80")
    names = ("the left lung", "the right lung", "the heart muscle", "the rest of it")
    columns = {"image": TEXT, **{f"Dice, {name}": NUMBER for name in names}, "V^Rand": NUMBER}
    row = ["subject-0001.png", *(f"0.123{i}" for i in range(len(names))), "0.9876"]
    console(sys.stdout).print(text_table(columns, [row]))
    lines = capsys.readouterr().out.splitlines()
    # The names of images are wrapped, too.
    assert any(line.split()[1:] == row[1:] for line in lines), lines


def test_rich_markup_in_names_is_shown_as_it_is(capsys):
    from ipucnn.reports.console import NUMBER, TEXT, console, text_table

    table = text_table({"[red]a[/]": TEXT, "n": NUMBER}, [["[link=x]b[/link] :smile:", "1"]], title="[bold]c")
    console(sys.stdout).print(table)
    console(sys.stdout).print("[/] d")
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[red]a[/]", "[link=x]b[/link] :smile:", "[bold]c", "[/] d"))


@pytest.mark.parametrize("pattern", ["cat**.png", "**.png", "**/cat*.png", "***/cat.png"])
def test_stars_within_a_name_are_one_star(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    place = tmp_path / ("folder" if "/" in pattern else "") / "cat.png"
    place.write_bytes(b"")
    assert [Path(path).name for path in find_images([pattern]).paths] == ["cat.png"]


def test_an_image_that_ends_the_process_ends_the_decoding():
    def read():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        list(decoded([ImageInput("a", read)], 2, 4))
