"""Images become network inputs in one way for arrays, files and exports; the script of an export does the same."""

import json
import struct
import subprocess
import sys
from types import SimpleNamespace

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps
from support.data_sets import save_pages, write_class_folders
from support.image_files import gif, png, turned
from support.refusals import Refusal, check_refused
from support.trained_runs import train

import ipucnn
from ipucnn import cli
from ipucnn.datasets.base import DatasetInfo, MaskedExamples
from ipucnn.datasets.images import pixels_for_evaluation
from ipucnn.datasets.pipeline import eval_batches
from ipucnn.datasets.pixels import InputRange, in_8_bits
from ipucnn.models.registry import get_model
from ipucnn.runs import export, predict, runtimes, verification
from ipucnn.runs.exported import RuntimeFailed
from ipucnn.runs.infer import finisher
from ipucnn.runs.network_input import describe_input, sentences
from ipucnn.runs.predict import NotRead, network_input
from ipucnn.runs.sources import WeightsArgument
from ipucnn.runs.trained import open_trained


def scene(height, width, channels, seed):
    """Makes uint8 [h, w, c] with edges, slopes and noise."""
    rng = np.random.RandomState(seed)
    y, x = np.mgrid[:height, :width]
    planes = [
        127 + 100 * np.sin(x / (3 + k) + y / (5 + 2 * k)) + rng.randint(-20, 20, (height, width))
        for k in range(channels)
    ]
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def odd_images(folder):
    """Writes ten typical image files: path -> whether Pillow's own conversion or stretching is part of reading them."""
    colour, grey = scene(150, 200, 3, 1), scene(120, 90, 1, 2)[..., 0]
    deep = np.uint16(scene(100, 130, 1, 3)[..., 0]) * 16 + 7
    saved = {
        "photo.jpg": (Image.fromarray(colour), {"quality": 90}),
        "turned.jpg": (Image.fromarray(colour), turned(6)),
        "cmyk.jpg": (Image.fromarray(colour).convert("CMYK"), {}),
        "grey.png": (Image.fromarray(grey), {}),
        "deep.png": (Image.fromarray(deep), {}),
        "tall.png": (Image.fromarray(scene(400, 20, 3, 4)), {}),
        "tiny.png": (Image.fromarray(scene(2, 3, 3, 5)), {}),
        "palette.gif": (Image.fromarray(colour).convert("P", palette=Image.ADAPTIVE), {}),
        "transparent.png": (Image.fromarray(scene(40, 60, 4, 6), "RGBA"), {}),
        "bits.tif": (Image.fromarray(grey).convert("1"), {}),
    }
    for name, (image, options) in saved.items():
        image.save(folder / name, **options)
    return [folder / name for name in saved]


def setup_of(image_shape, input_shape, input_range, crops="", eight_bits=False, **facts):
    count = image_shape[2]
    info = DatasetInfo(
        "x", "classification", 2, image_shape, 1, 1, ("a", "b"), "", (99.0, 120.0, 80.0)[:count],
        (50.0, 60.0, 70.0)[:count], crops=crops, **facts,
    )  # fmt: skip
    source = SimpleNamespace(info=info)
    chosen = InputRange.of(input_range, source.info, input_shape[2])
    config = SimpleNamespace(eight_bit_transfer=eight_bits)
    setup = SimpleNamespace(
        source=source, input_shape=input_shape, input_range=chosen, output_shape=None, config=config
    )
    setup.in_range = lambda name: SimpleNamespace(
        input_range=InputRange.of(name, source.info, input_shape[2])
    )
    return setup


CASES = {
    "photographs": setup_of((None, None, 3), (32, 32, 3), "standard"),
    "imagenet, caffe": setup_of((None, None, 3), (64, 48, 3), "caffe", crops="imagenet"),
    "photographs, per image": setup_of((None, None, 3), (40, 40, 3), "image"),
    "colour for a grey network": setup_of((None, None, 3), (28, 28, 1), "unit"),
    "one size": setup_of((32, 32, 3), (32, 32, 3), "tf"),
    "one size, enlarged": setup_of((32, 32, 3), (75, 60, 3), "torch"),
    "one size, shrunk": setup_of((32, 40, 3), (20, 64, 3), "raw"),
    "grey for a colour network": setup_of((28, 28, 1), (32, 32, 3), "standard"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_script_of_an_export_makes_the_session_input(case, tmp_path):
    setup = CASES[case]
    described = json.loads(json.dumps(describe_input(setup, "images", "float32", None, False)))
    for path in odd_images(tmp_path):
        pixels = pixels_for_evaluation(path.read_bytes(), str(path), setup.source.info, setup.input_shape)
        expected = finisher(setup)(pixels[np.newaxis]).numpy()[0]
        inputs = network_input(path, form=described)
        assert inputs.shape == setup.input_shape and inputs.dtype == np.float32, path
        bound = 1e-3 if path.name in ("cmyk.jpg", "deep.png") else 1e-6
        assert np.abs(inputs - expected).max() <= bound * np.ptp(expected), path
    assert list(sentences(described))[-1]


def test_the_script_refuses_a_bmp_that_pillow_misreads(tmp_path):
    """Eight bits a pixel, and black and white in the palette: Pillow takes them for single bits."""
    pixels = np.random.RandomState(1).randint(0, 2, (8, 8)).astype(np.uint8)
    head = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 0, 64, 0, 0, 2, 0)
    data = b"BM" + struct.pack("<IHHI", 126, 0, 0, 62) + head + bytes(4) + b"\xff\xff\xff\0"
    (tmp_path / "x.bmp").write_bytes(data + pixels[::-1].tobytes())
    form = describe_input(CASES["one size"], "images", "float32", None, False)
    with pytest.raises(NotRead, match=r"BMP of this form is not read"):
        network_input(tmp_path / "x.bmp", form=form)


def test_networks_of_raw_pixels_get_whole_numbers(tmp_path):
    setup = CASES["photographs"]
    described = describe_input(setup, "images", "uint8", 1, True)
    for path in odd_images(tmp_path):
        pixels = pixels_for_evaluation(path.read_bytes(), str(path), setup.source.info, setup.input_shape)
        inputs = network_input(path, form=described)
        assert inputs.dtype == np.uint8 and np.array_equal(inputs, pixels)


@pytest.mark.parametrize("input_range", ["unit", "image", "caffe", "raw"])
def test_the_script_rounds_pixels_as_a_transfer_of_8_bits_does(input_range, tmp_path):
    """Enlarging leaves fractions; in the input of a run without such a transfer they stay."""
    for input_shape in ((40, 40, 3), (40, 40, 1)):
        setup = setup_of((32, 32, 3), input_shape, input_range, eight_bits=True)
        form = json.loads(json.dumps(describe_input(setup, "images", "float32", None, False)))
        assert "rounded to whole numbers of 0..255" in sentences(form)
        Image.fromarray(scene(32, 32, 3, 1)).save(tmp_path / "x.png")
        data = (tmp_path / "x.png").read_bytes()
        pixels = pixels_for_evaluation(data, "x", setup.source.info, input_shape)
        raw = setup_of((32, 32, 3), input_shape, "raw")
        whole = in_8_bits(finisher(raw)(pixels[np.newaxis]))
        made = predict.network_pixels(tmp_path / "x.png", 0, 0, 0, form)
        assert verification.input_difference(np.uint8(made[np.newaxis]), whole) == ""
        expected = np.asarray(setup.input_range.apply(np.float32(whole)))[0]
        scaled = predict.in_range(np.float32(whole[0]), form)
        assert np.abs(scaled - expected).max() <= 1e-6 * np.ptp(expected)
        assert np.array_equal(predict.in_range(made, form), network_input(tmp_path / "x.png", form=form))
        assert not describe_input(raw, "images", "float32", None, False)["rounded"]


def test_the_script_cuts_the_patches_of_evaluation(tmp_path):
    """Each patch of a grey volume has its mirrored border, at the places that evaluation uses."""
    pages = np.stack([scene(50, 61, 1, k) for k in range(2)])
    labels = np.zeros(pages.shape[:3], np.uint8)
    setup = setup_of((50, 61, 1), (44, 36, 1), "standard", patchwise=True)
    setup.output_shape, setup.record = (20, 12), get_model("unet")
    described = describe_input(setup, "images", "float32", None, False)
    assert described["patch"]["margin"] == [12, 12] and described["patch"]["overlap"] == [24, 24]
    save_pages(tmp_path / "volume.tif", pages[..., 0])
    batches = eval_batches(
        MaskedExamples.of(list(pages), list(labels)),
        setup.source.info,
        batch_size=1, input_shape=(44, 36, 1), input_range=setup.input_range, output_shape=(20, 12), patch_step=4,
    )  # fmt: skip
    expected = [np.asarray(images)[0] for images, _, _ in batches]
    places = [(row, column) for row in (0, 20, 40) for column in (0, 12, 24, 36, 48, 60)]
    assert len(expected) == 2 * len(places)
    for number, patch in enumerate(expected):
        page, (row, column) = number // len(places), places[number % len(places)]
        cut = network_input(tmp_path / "volume.tif", row, column, page, described)
        assert np.abs(cut - patch).max() <= 1e-6 * np.ptp(patch)


def forms(folder):
    """Writes files of many forms: name -> whether the lines of a page read it, or refuse it."""
    grey, colour, deep = (
        scene(40, 30, 1, 1)[..., 0],
        scene(40, 30, 3, 2),
        np.uint16(scene(40, 30, 1, 3)[..., 0]) * 99,
    )
    few = np.uint8(np.arange(40 * 30).reshape(40, 30) % 4)
    with_alpha = np.dstack([colour, grey])
    pillow = {
        "grey.png": (True, Image.fromarray(grey), {}),
        "bits.png": (True, Image.fromarray(grey > 99), {}),
        "deep.png": (True, Image.fromarray(deep), {}),
        "keyed-grey.png": (True, Image.fromarray(grey), {"transparency": int(grey[3, 3])}),
        "keyed-colour.png": (True, Image.fromarray(colour), {"transparency": tuple(colour[5, 5].tolist())}),
        "palette.png": (True, Image.fromarray(colour).quantize(9), {"transparency": 2}),
        "alpha.png": (True, Image.fromarray(with_alpha, "RGBA"), {}),
        "turned.png": (True, Image.fromarray(colour), turned(6)),
        "lossless.webp": (True, Image.fromarray(with_alpha, "RGBA"), {"lossless": True}),
        "grey.pgm": (False, Image.fromarray(grey), {}),
    }
    for name, (_, image, options) in pillow.items():
        image.save(folder / name, **options)
    tiff = {
        "grey.tif": (True, grey, {"photometric": "minisblack"}),
        "colour.tif": (True, colour, {"photometric": "rgb"}),
        "deep.tif": (True, deep, {"photometric": "minisblack"}),
        "big-endian.tif": (True, deep, {"photometric": "minisblack", "byteorder": ">"}),
        "white.tif": (False, grey, {"photometric": "miniswhite"}),
        "signed.tif": (False, np.int16(deep) // 3, {"photometric": "minisblack"}),
        "signed-8.tif": (False, np.int8(grey // 2), {"photometric": "minisblack"}),
        "float.tif": (False, np.float32(deep), {"photometric": "minisblack"}),
        "long.tif": (False, np.uint32(deep) * 70000, {"photometric": "minisblack"}),
        "deep-colour.tif": (False, np.uint16(colour) * 99, {"photometric": "rgb"}),
        "alpha.tif": (False, with_alpha, {"photometric": "rgb", "extrasamples": ["unassalpha"]}),
        "planes.tif": (
            False,
            np.moveaxis(colour, -1, 0).copy(),
            {"photometric": "rgb", "planarconfig": "separate"},
        ),
        "turned.tif": (False, colour, {"photometric": "rgb", "extratags": [(274, 3, 1, 6, True)]}),
    }
    for name, (_, array, options) in tiff.items():
        tifffile.imwrite(folder / name, array, **options)
    imagecodecs.imwrite(str(folder / "deep-colour.png"), np.uint16(colour) * 99, codec="png")
    (folder / "few.png").write_bytes(png(few, 2, 0))
    (folder / "keyed-few.png").write_bytes(png(few, 2, 0, (b"tRNS", b"\0\3")))
    (folder / "keyed-deep.png").write_bytes(png(deep, 16, 0, (b"tRNS", b"\0\7")))
    reads = {name: row[0] for name, row in {**pillow, **tiff}.items()}
    (folder / "frame.gif").write_bytes(gif((16, 20), (3, 4), few[:8, :9] % 4, colour[0, :4]))
    frames = [Image.fromarray(colour), Image.fromarray(colour[::-1])]
    frames[0].save(folder / "frame.webp", save_all=True, append_images=frames[1:])
    return {
        **reads,
        "deep-colour.png": False,
        "keyed-few.png": False,
        "keyed-deep.png": False,
        "few.png": True,
        "frame.gif": False,
        "frame.webp": False,
    }


@pytest.mark.parametrize("case", ["photographs", "grey photographs"])
def test_the_script_reads_the_forms_that_a_page_names_and_refuses_all_others(case, tmp_path):
    """Compares with the session, which reads all of these files."""
    setup = CASES[case] if case in CASES else setup_of((None, None, 1), (28, 28, 1), "standard")
    described = describe_input(setup, "images", "float32", None, False)
    for name, is_read in forms(tmp_path).items():
        path = tmp_path / name
        if not is_read:
            with pytest.raises(NotRead, match="save it as PNG of 8 bits"):
                network_input(path, form=described)
            continue
        pixels = pixels_for_evaluation(path.read_bytes(), name, setup.source.info, setup.input_shape)
        expected = finisher(setup)(pixels[np.newaxis]).numpy()[0]
        assert np.abs(network_input(path, form=described) - expected).max() <= 1e-6 * np.ptp(expected), name
    assert "refuses all others" in next(sentences(described))


def test_files_that_the_script_refuses_are_counted_and_misread_ones_end_an_export(tmp_path, monkeypatch):
    setup = setup_of((None, None, 3), (32, 32, 3), "unit")
    reads = forms(tmp_path)
    files = tuple((tmp_path / name).read_bytes() for name in reads)
    pixels = [pixels_for_evaluation(data, "x", setup.source.info, setup.input_shape) for data in files]
    inputs = finisher(setup)(np.stack(pixels)).numpy()
    samples = verification.Samples(inputs, inputs, None, "", files)
    described = describe_input(setup, "images", "float32", None, False)
    expected = {"read": sum(reads.values()), "not_read": len(reads) - sum(reads.values())}
    assert verification.check_script(described, samples) == expected
    # A script that takes every form misreads some of these files.
    monkeypatch.setattr(predict, "opened", lambda path, page=0: ImageOps.exif_transpose(Image.open(path)))
    with pytest.raises(RuntimeFailed, match="makes other inputs of image files"):
        verification.check_script(described, samples)


def test_files_that_pillow_cannot_open_or_decode_are_refused_with_what_to_do(tmp_path):
    setup = setup_of((None, None, 3), (32, 32, 3), "unit")
    colour = scene(40, 30, 3, 2)
    tifffile.imwrite(tmp_path / "float.tif", np.float32(colour), photometric="rgb")
    tifffile.imwrite(tmp_path / "packed.tif", colour, photometric="rgb", compression="lerc")
    Image.fromarray(colour).save(tmp_path / "whole.png")
    pixels = pixels_for_evaluation(colour, "x", setup.source.info, setup.input_shape)
    inputs = np.repeat(finisher(setup)(pixels[np.newaxis]).numpy(), 3, 0)
    described = describe_input(setup, "images", "float32", None, False)
    names = ("whole.png", "float.tif", "packed.tif")
    files = tuple((tmp_path / name).read_bytes() for name in names)
    for data in files:  # the run reads them all
        pixels_for_evaluation(data, "x", setup.source.info, setup.input_shape)
    samples = verification.Samples(inputs, inputs, None, "", files)
    assert verification.check_script(described, samples) == {"read": 1, "not_read": 2}
    (tmp_path / "cut.png").write_bytes(files[0][:-200])
    for name in (*names[1:], "cut.png"):
        with pytest.raises(NotRead, match=rf"{name} cannot be decoded: .*; save it as PNG of 8 bits"):
            network_input(tmp_path / name, form=described)
    with pytest.raises(FileNotFoundError):
        network_input(tmp_path / "absent.png", form=described)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Trains on a folder of photographs of 200x150; returns the run and the files."""
    folder = tmp_path_factory.mktemp("photographs")
    write_class_folders(folder / "data", {("", label): 12 for label in ("a", "b")}, lambda number: (200, 150))
    line = f"cifar_resnet8 --dataset '{folder / 'data'}' --num-epochs 1 --micro-batch-size 4 --seed 1"
    train(folder / "run", line, lightly=True)
    return folder


@pytest.mark.slow
def test_arrays_files_and_evaluation_give_the_same_input(photographs):
    run = ipucnn.load(photographs / "run")
    paths = sorted((photographs / "data").rglob("*.png"))
    arrays = [np.asarray(Image.open(path)) for path in paths]
    of_files = run.predict(paths)
    assert np.array_equal(of_files, run.predict([Image.open(path) for path in paths]))
    assert np.array_equal(of_files, run.predict(arrays)) and np.array_equal(
        of_files, run.predict(np.stack(arrays))
    )
    np.testing.assert_allclose(of_files[:1], run.predict(arrays[0]), rtol=1e-5)  # a batch of another size


# The script of a TFLite file is run where one of 8-bit integers is exported.
@pytest.mark.slow
@pytest.mark.slow_cases("tflite")
@pytest.mark.parametrize("form", ["onnx", "tflite", "saved-model"])
def test_the_script_of_an_export_feeds_its_network(photographs, in_this_process, form, tmp_path):
    if runtimes.missing_packages(form):
        pytest.skip(f"{form} needs packages: pip install 'ipucnn[export]'")
    folder = tmp_path / form
    assert cli.run(["export", str(photographs / "run"), "--format", form, "--output", str(folder)]) == 0
    record = json.loads((folder / "export.json").read_text())
    network = runtimes.load({**record, "file": str(folder / record["file"])})
    paths, loaded = odd_images(tmp_path), ipucnn.load(photographs / "run")
    opened = open_trained(WeightsArgument("infer", str(photographs / "run"), {}))
    inputs = np.stack([network_input(path, form=record["input"]) for path in paths])
    expected = loaded.predict(paths)  # the session exists from here on
    for path, made in zip(paths, inputs):
        pixels = pixels_for_evaluation(path.read_bytes(), str(path), opened.source.info, made.shape)
        session_input = finisher(opened)(pixels[np.newaxis]).numpy()[0]
        bound = 1e-3 if path.name in ("cmyk.jpg", "deep.png") else 1e-6
        assert np.abs(made - session_input).max() <= bound * np.ptp(session_input), path
    logits = network.run(inputs.astype(np.float32))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(powers / powers.sum(-1, keepdims=True), expected, atol=1e-3)
    script = [sys.executable, folder / "predict.py", paths[0]]
    printed = subprocess.run(script, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert printed.strip() == opened.source.info.class_names[expected[0].argmax()]


@pytest.mark.slow
def test_wrong_description_is_refused(photographs, in_this_process, monkeypatch, run):
    right = export.describe_input

    def squashed(*arguments):
        described = right(*arguments)
        return {**described, "crop": {**described["crop"], "margin": 1.0}}

    monkeypatch.setattr(export, "describe_input", squashed)
    command = ["export", photographs / "run", "--format", "saved-model", "--output", "wrong"]
    check_refused(run, Refusal(command, "predict.py makes other inputs", code=5))
