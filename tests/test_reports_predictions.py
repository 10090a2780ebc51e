"""The picture of a segmentation run: its content, and that a run writes it."""

from types import SimpleNamespace

import numpy as np
import pytest
from light_training import train_lightly
from PIL import Image, ImageDraw

from ipucnn import cli
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import ArrayExamples, DatasetInfo, DataSource
from ipucnn.datasets.pixels import InputRange
from ipucnn.reports.sheets import (
    FALSE_BACKGROUND,
    FALSE_FOREGROUND,
    GREY,
    PanelSheet,
    dice_of_classes,
    drawable,
    font_file,
    load_font,
    save_predictions,
)
from ipucnn.runs.images.outputs import Classes, class_colours
from ipucnn.runs.images.segmentation import SegmentedImage, predicted_images
from ipucnn.runs.setup import Setup, move_preprocessing
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import DeviceInfo


def segmented(image, truth, predicted=None, names=("membrane", "cell"), name="evaluation image 0"):
    classes = Classes(names, class_colours(len(names)))
    return SegmentedImage(name, image, truth if predicted is None else predicted, classes, truth)


def test_colours_mark_right_and_wrong_pixels(tmp_path):
    truth = np.ones((40, 40), np.uint8)
    truth[:20, :5] = 0
    predicted = np.ones((40, 40), np.uint8)
    predicted[10:30, :5] = 0
    image = segmented(np.full((40, 40, 1), 100, np.uint8), truth, predicted)
    assert dice_of_classes(image) == pytest.approx([0.5, 1450 / 1500])
    save_predictions([image], tmp_path / "p.png")
    pixels = np.asarray(Image.open(tmp_path / "p.png")).astype(int)
    scale = 7  # 40 pixels are shown 280 wide
    left, top = 10 + 3 * (40 * scale + 4), 5 + 15 + 4 + 15 + 5  # below the legend and the heads
    for row, colour in (
        (5, FALSE_FOREGROUND),
        (15, (0, 0, 0)),
        (25, FALSE_BACKGROUND),
        (35, (255, 255, 255)),
    ):
        assert pixels[top + row * scale + 2, left + 2 * scale].tolist() == list(colour)


@pytest.mark.parametrize("side", [30, 700])
def test_images_of_any_size_fit(tmp_path, side):
    mask = np.zeros((side, side), np.uint8)
    mask[: side // 2] = 1
    save_predictions([segmented(np.zeros((side, side, 3), np.uint8), mask)] * 3, tmp_path / "p.png")
    width, height = Image.open(tmp_path / "p.png").size
    assert 1100 < width < 1400 and height < 1200


def test_white_panels_have_an_outline_and_the_image_is_named(tmp_path, monkeypatch):
    mask = np.ones((40, 40), np.uint8)
    drawn = []
    real = ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "text",
        lambda self, *args, **more: (drawn.append(args[1]), real(self, *args, **more)),
    )
    white = segmented(np.full((40, 40, 1), 255, np.uint8), mask)
    save_predictions([white], tmp_path / "p.png")
    pixels = np.asarray(Image.open(tmp_path / "p.png"))
    top = 5 + 15 + 4 + 15 + 5  # below the legend and the heads
    for column in range(4):
        left = 10 + column * (280 + 4)
        frame = pixels[top - 1 : top + 281, left - 1 : left + 281]
        for outline in (frame[:, 0], frame[:, -1], frame[0], frame[-1]):
            assert (outline == GREY).all()
    assert any(text.startswith("evaluation image 0: Dice of membrane 1.000") for text in drawn)
    plain = Image.open(tmp_path / "p.png").size
    save_predictions([white], tmp_path / "p.png", "runs/unet")
    assert "runs/unet" in drawn
    width, height = Image.open(tmp_path / "p.png").size
    assert width == plain[0] and height == plain[1] + 15


@pytest.mark.slow
def test_continued_run_writes_missing_pictures_report_and_page(membranes_once, tmp_path, monkeypatch, capsys):
    train_lightly(monkeypatch, evaluates=True)
    from ipucnn.reports import runs, sheets
    from ipucnn.runs.writer import RunWriter

    class Killed(BaseException):
        pass

    drawn, kept = [], []

    def killed(first, *_):
        drawn.append(first)
        kept.append((last.read_bytes(), last.stat().st_mtime_ns))
        raise Killed

    folder = tmp_path / "run"
    last = folder / "checkpoints" / "last.npz"
    options = ["train", "unet", "--dataset", "membranes", "--image-size", "204", "--base-filters", "1", "--limit-train",
               "4", "--limit-eval", "2", "--num-epochs", "1", "--run-dir", str(folder), "--resume"]  # fmt: skip
    needed = ["predictions.png", "report.json", "report.html"]
    steps = ((sheets, "save_predictions"), (RunWriter, "write_report"), (runs, "write_page"))
    for number, (place, name) in enumerate(steps):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, killed)
            with pytest.raises(Killed):
                cli.run(options)
        assert [file for file in needed if (folder / file).exists()] == needed[:number]
    names = [image.name for image in drawn[0]]
    assert names == [f"evaluation image {n}, the inner 20x20 of 204x204 pixels" for n in (0, 1)]
    assert cli.run(options) == 0
    # What was trained is not trained again.
    assert kept == [(last.read_bytes(), last.stat().st_mtime_ns)] * 3
    assert all((folder / file).exists() for file in needed)
    assert Image.open(folder / "predictions.png").size[0] > 500
    out, err = capsys.readouterr()
    assert "picture of the predictions" in err
    assert "Dice of membrane" in out and "calling every pixel cell" in out
    assert "their inner 20x20 of 204x204 pixels" in " ".join(out.split())


def test_pictures_whose_highest_class_differs_share_a_sheet(tmp_path):
    masks = [np.zeros((8, 8), np.uint8) for _ in range(2)]
    masks[0][0, 0], masks[1][:4] = 1, 2
    names = ("background", "a", "b")
    images = [segmented(np.zeros((8, 8, 1), np.uint8), mask, names=names) for mask in masks]
    save_predictions(images, tmp_path / "p.png")
    assert (tmp_path / "p.png").exists()


@pytest.mark.slow_cases("None-False")
@pytest.mark.parametrize("patchwise", [True, False])
@pytest.mark.parametrize("option", [None, "accelerator_side_preprocess", "eight_bit_transfer"])
def test_pictures_are_predicted_from_images_that_are_normalised_once(option, patchwise):
    """The network calls pixels above the set's mean class 1: without a norm layer, a second normalisation shows."""
    from tensorflow import keras

    image = np.where(np.arange(12) < 5, 200, 90).astype(np.uint8)[np.newaxis, np.newaxis, :, np.newaxis]
    image = np.repeat(image, 12, axis=1)
    examples = ArrayExamples(image, (image[..., 0] > 128).astype(np.uint8))
    info = DatasetInfo(
        "x", "segmentation", 2, (12, 12, 1), 1, 1, ("a", "b"), "", (128.0,), (60.0,), patchwise=patchwise
    )
    inputs = keras.Input((12, 12, 1))
    network = keras.Model(inputs, keras.layers.Conv2D(2, 1, use_bias=False)(inputs))
    network.set_weights([np.float32([-1, 1]).reshape(1, 1, 1, 2)])
    config = RunConfig(**({} if option is None else {option: True}))
    session = HostSession(DeviceInfo("cpu", "CPU", 1, 0), config)
    record = SimpleNamespace(input_range="standard", size_step=4, own=None)
    resolved = SimpleNamespace(record=record, config=config)
    given = InputRange.of("standard", info, 1)
    setup = Setup(resolved, DataSource(info, examples, examples), (12, 12, 1), (12, 12), 0, given)
    setup, session = move_preprocessing(setup, session)
    assert setup.input_range.name == ("standard" if option is None else "raw")
    (picture,) = predicted_images(setup, session.predictor(network))
    assert np.array_equal(picture.predicted, examples.labels[0]) and dice_of_classes(picture)[1] == 1
    assert np.array_equal(picture.image, image[0])


def test_letters_of_an_installed_font_are_drawn_and_others_escaped():
    """A cell of a language whose letters no font here has is escaped; those of Matplotlib's font are drawn."""
    font = load_font(12, font_file("große µm-Зелёный"))
    assert drawable("große µm-Зелёный", font) == "große µm-Зелёный"
    assert font_file("plain.png") is None and drawable("ß", load_font()) == "\\xdf"
    assert drawable("a\U0010fffe\x1b", font) == "a\\U0010fffe\\x1b"
    boxes = {letter: bytes(font.getmask(letter)) for letter in "ßµЗ\U0010fffe"}
    assert len(set(boxes.values())) == 4


def test_captions_of_many_classes_are_broken_into_lines(tmp_path, monkeypatch):
    drawn = []
    real = ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "text",
        lambda self, *args, **more: (drawn.append(args[1]), real(self, *args, **more)),
    )
    names = tuple(f"class number {k}" for k in range(24))
    image = segmented(
        np.zeros((150, 150, 1), np.uint8), np.ones((150, 150), np.uint8), names=names, name="ß.png"
    )
    save_predictions([image], tmp_path / "p.png")
    assert all(any(f"Dice of {name} " in text for text in drawn) for name in names)
    assert not any(text.endswith("...") for text in drawn) and any(
        text.startswith("ß.png: Dice") for text in drawn
    )
    assert all(name in drawn for name in names)  # the legend


def test_small_images_are_enlarged_like_their_neighbours(tmp_path):
    def width(*sides):
        sheet = PanelSheet(("a",), side=300)
        for side in sides:
            sheet.add("x", [np.zeros((side, side), np.uint8)])
        sheet.save(tmp_path / "sheet.png")
        return Image.open(tmp_path / "sheet.png").size[0]

    assert width(50) == width(300) == width(50, 100) > width(50, 220) == width(220)
