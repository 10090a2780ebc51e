"""Image folders, decoding and ``load_images``: the network sees exactly the pixels in the file."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from few_examples import tries
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.data_sets import encode, open_imagefolder, smooth, write_class_folders
from support.image_files import turned
from support.refusals import Refusal, check_raises, check_refused
from support.streams import RAW, check_pure, take

from ipucnn.config.resolve import resolve
from ipucnn.datasets import limits
from ipucnn.datasets.base import ArrayExamples, DatasetInfo, EncodedExamples, data_source
from ipucnn.datasets.hashing import AUGMENT, draw
from ipucnn.datasets.images import centre_box, open_image, pixels_for_evaluation, random_box
from ipucnn.datasets.pipeline import eval_batches
from ipucnn.datasets.pixels import InputRange
from ipucnn.datasets.preprocessing import prepare_range, prepare_size
from ipucnn.datasets.problems import Unused, problem_of
from ipucnn.datasets.registry import ReaderOptions, choose_dataset, open_dataset
from ipucnn.datasets.sources.embedded import open_digits
from ipucnn.errors import DataError
from ipucnn.models.registry import list_models
from ipucnn.runs.images.inputs import images_of_files

SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet-samples"


@pytest.fixture
def folder(tmp_path):
    """Writes 12 training and 5 evaluation images of two classes, in several sizes and formats."""
    counts = {("train", "ant"): 7, ("train", "bee"): 5, ("val", "ant"): 2, ("val", "bee"): 3}
    write_class_folders(tmp_path, counts, lambda number: (50 - 6 * (number % 3), 30 + 7 * (number % 4)))
    for number, path in enumerate(sorted(tmp_path.rglob("*.png"))):
        if number % 3:
            path.with_suffix((".jpg", ".JPEG")[number % 2]).write_bytes(encode(Image.open(path), "JPEG"))
            path.unlink()
    return tmp_path


# ---------------------------------------------------------------- folders


def test_a_folder_is_listed_in_order(folder):
    source = open_imagefolder(folder)
    assert source.info.class_names == ("ant", "bee") and source.info.image_shape == (None, None, 3)
    assert (source.info.num_train, source.info.num_eval) == (12, 5)
    assert source.train.labels.tolist() == [0] * 7 + [1] * 5
    assert [Path(p).parent.name for p in source.train.paths] == ["ant"] * 7 + ["bee"] * 5
    (warning,) = source.info.training_warnings
    assert "few training images: the smallest class, bee, has 5" in warning and not source.info.warnings


def test_other_files_hidden_files_and_empty_classes(folder):
    (folder / "train" / "ant" / "notes.txt").write_text("x")
    (folder / "train" / ".cache").mkdir()
    (folder / "train" / "ant" / ".hidden.jpg").write_text("x")
    (folder / "train" / "cat").mkdir()
    source = open_imagefolder(folder)
    assert source.info.class_names == ("ant", "bee", "cat") and len(source.train) == 12
    assert source.info.unused == (
        Unused("made by the system or a tool", 1, ("train/ant/.hidden.jpg",)),
        Unused("no image by its name", 1, ("train/ant/notes.txt",)),
    )
    opened = open_dataset(choose_dataset(str(folder), folder, home="mnist", task="classification"))
    assert any("no images for training in cat" in line for line in opened.info.warnings)


def test_a_folder_can_be_the_data_set(folder):
    for name, path in (("imagefolder", folder), (str(folder), Path("."))):
        choice = choose_dataset(name, path, home="cifar10", task="classification")
        assert choice.name == "imagefolder" and choice.location == folder
        assert open_dataset(choice, limit_train="50%", limit_eval="2").info.num_train == 6


# ---------------------------------------------------------------- decoding


@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
@settings(max_examples=60)
def test_boxes_lie_inside_the_image_and_have_the_aspect_ratio(height, width, size):
    for margin in (1.0, 1.14):
        left, top, right, bottom = centre_box(width, height, size, margin)
        assert -1e-9 <= left < right <= width + 1e-9 and -1e-9 <= top < bottom <= height + 1e-9
        assert (right - left) * size[0] == pytest.approx((bottom - top) * size[1])
    left, top, right, bottom = random_box(width, height, size, draw(1, AUGMENT, 0, 0, height))
    assert -1e-9 <= left < right <= width + 1e-9 and -1e-9 <= top < bottom <= height + 1e-9


def info_of(image_shape, **facts):
    return DatasetInfo("x", "classification", 2, image_shape, 1, 1, ("a", "b"), "", (0.0,), (1.0,), **facts)


@given(height=st.integers(1, 20), width=st.integers(1, 20), channels=st.sampled_from([1, 3]))
@settings(max_examples=30)
def test_an_image_of_the_size_keeps_its_pixels(height, width, channels):
    image = smooth(0, width, height).convert("RGB" if channels == 3 else "L")
    decoded = pixels_for_evaluation(encode(image), "image", info_of((height, width, channels)), (5, 6, 3))
    assert decoded.dtype == np.uint8 and decoded.shape == (height, width, channels)
    np.testing.assert_array_equal(decoded.reshape(np.asarray(image).shape), np.asarray(image))


@pytest.mark.parametrize("size", [(10, 10), (20, 12), (70, 90)])
@pytest.mark.parametrize("channels", [1, 3])
def test_decoding_for_evaluation_handles_any_size(size, channels):
    for height, width in [(1, 1), (3, 80), (50, 50)]:
        decoded = pixels_for_evaluation(
            encode(smooth(0, width, height)), "image", info_of((None, None, channels)), (*size, 3)
        )
        assert decoded.shape == (*size, channels)


@pytest.mark.parametrize(
    "data", [b"", b"no image", b"\xff\xd8\xff\xe0garbage", encode(smooth(0, 40, 40))[:-60]]
)
def test_bytes_that_are_not_an_image_are_refused(data):
    with pytest.raises(DataError, match=r"^image x.jpg (is not an image|cannot be decoded)"):
        open_image(data, "image x.jpg", 3)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG", "PPM"])
def test_an_absurdly_large_image_is_refused_by_its_header(form):
    data = encode(smooth(0, 12, 12), form)
    assert open_image(data, "image", 3, 144).size == (12, 12)
    error, hint = "image x has 12x12 pixels, more than --max-image-pixels 143", "--max-image-pixels 144"
    check_raises(DataError, error, hint, open_image, data, "image x", 3, 143)


def test_a_damaged_tiff_writes_nothing_on_stderr(capfd):
    data = bytearray(encode(smooth(0, 40, 40), "TIFF", compression="tiff_lzw"))
    data[8:200] = b"\xff" * 192
    check_raises(DataError, "image", "", open_image, bytes(data), "image", 3)
    assert capfd.readouterr().err == ""


@given(
    form=st.sampled_from(["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG", "PPM"]),
    changes=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), min_size=1, max_size=4),
    channels=st.sampled_from([1, 3]),
)
@tries(80, slow=300)
def test_images_with_changed_headers_are_images_or_data_errors(form, changes, channels):
    data = bytearray(encode(smooth(0, 10, 14), form))
    for position, value in changes:
        data[position % len(data)] = value
    try:
        image = open_image(bytes(data), "image x", channels, 10**6)
    except DataError as error:
        assert "image x" in error.message and error.hint
    else:
        assert image.mode == ("L" if channels == 1 else "RGB") and image.width * image.height <= 10**6


def test_large_images_are_decoded_one_at_a_time(monkeypatch):
    monkeypatch.setattr(limits, "available_bytes", lambda: 4 * 16 * 150)
    monkeypatch.setattr(limits, "FREELY_PIXELS", 10)
    inside, most, lock = [0], [0], threading.Lock()

    def work():
        with limits.decoding(10, 10, "image"):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.01)
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    with pytest.raises(DataError, match="half of what is free"), limits.decoding(1000, 1000, "image"):
        pass


# ---------------------------------------------------------------- pipelines


@pytest.mark.slow
@pytest.mark.slow_cases("False-True", "True-True")
@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("in_memory", [True, False])
def test_batch_size_start_and_threads_do_not_change_a_byte(folder, augment, in_memory):
    source = open_imagefolder(folder)
    if in_memory:
        data = tuple(map(source.train.encoded, range(12)))
        source = replace(source, train=EncodedExamples(data, source.train.labels, "memory"))
    images, _ = check_pure(source, 30, input_shape=(16, 12, 3), input_range="torch", augment=augment)
    assert images.shape == (30, 16, 12, 3)
    assert len({image.tobytes() for image in images[:24]}) == (24 if augment else 12)


def load_images(paths, info, *, input_shape, input_range):
    """Returns float32 [n, *input_shape]: image files as ``infer`` reads them, in the network's range."""
    images = [
        image.read()[np.newaxis] for image in images_of_files(list(map(str, paths)), info, input_shape, [])
    ]
    sized = [prepare_size(image, input_shape) for image in images]
    return np.concatenate([prepare_range(image, input_shape, input_range) for image in sized])


@given(st.data())
@settings(max_examples=5)
def test_loading_equals_evaluation(tmp_path_factory, data):
    """For every kind of data set, ``infer`` reads the same bytes from a file that ``evaluate`` reads."""
    height, width = data.draw(st.tuples(st.integers(4, 14), st.integers(4, 14)))
    channels, target = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([1, 3]))
    input_range = data.draw(st.sampled_from(["standard", "tf", "caffe"]))
    folder = tmp_path_factory.mktemp("load")
    images = np.random.RandomState(0).randint(0, 256, (5, height, width, channels)).astype(np.uint8)
    paths = []
    for k, image in enumerate(images):
        paths.append(str(folder / f"{k}.png"))
        Image.fromarray(image[..., 0] if channels == 1 else image).save(paths[-1])
    examples = ArrayExamples(images, np.arange(5).astype(np.int32))
    source = data_source(examples, examples, name="t", class_names="01234", location="t", augmentation="none")
    options = {
        "input_shape": (16, 16, target),
        "input_range": InputRange.of(input_range, source.info, target),
    }
    evaluated = next(eval_batches(examples, source.info, batch_size=5, **options).as_numpy_iterator())[0]
    loaded = load_images(paths, source.info, **options)
    assert loaded.dtype == np.float32 and loaded.tobytes() == evaluated.tobytes()


def test_loading_from_a_folder_equals_evaluation(folder):
    source = open_imagefolder(folder)
    options = {"input_shape": (24, 20, 3), "input_range": InputRange.of("torch", source.info, 3)}
    batches = eval_batches(source.eval, source.info, batch_size=2, **options)
    assert int(batches.cardinality()) == 3
    images, labels, weights = (np.concatenate(c) for c in zip(*batches.as_numpy_iterator()))
    assert labels.tolist() == [0, 0, 1, 1, 1, 0] and weights.tolist() == [1, 1, 1, 1, 1, 0]
    loaded = load_images(source.eval.paths, source.info, **options)
    assert loaded.tobytes() == images[:5].tobytes() and not images[5].any()


def test_loading_another_size_and_unreadable_files(tmp_path):
    info = open_digits().info
    big = tmp_path / "big.png"
    Image.fromarray(np.full((40, 60), 255, np.uint8)).save(big)
    options = {"input_shape": (32, 32, 3), "input_range": RAW}
    assert load_images([str(big)], info, **options).min() == 255
    for path, message in (
        (tmp_path / "none.png", "there is no such file"),
        (tmp_path, "is a folder, not a file"),
    ):
        check_raises(DataError, message, "", load_images, [str(path)], info, **options)
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(DataError, match=r"text.png is not an image"):
        load_images([str(tmp_path / "text.png")], info, **options)


# ---------------------------------------------------------------- photographs


@pytest.fixture(params=["made", "real"])
def photographs(request, tmp_path):
    """Photographs in class folders, with odd files in edge-cases/; real ones, if they are here."""
    if request.param == "real":
        if not SAMPLES.is_dir():
            pytest.skip("no ../shared/data/imagenet-samples beside the repository")
        return SAMPLES
    counts = {(part, name): count for part, count in (("train", 14), ("val", 4)) for name in "abcdefghij"}
    write_class_folders(tmp_path, counts, lambda number: (40 + number % 30, 50), "JPEG", "jpg")
    (tmp_path / "edge-cases").mkdir()
    odd = {"grey": {}, "turned": turned(6), "no-turn": turned(0), "small": {}}
    for number, (name, options) in enumerate(odd.items()):
        image = smooth(number, *((3, 2) if name == "small" else (90, 60)))
        data = encode(image.convert("L") if name == "grey" else image, "JPEG", **options)
        (tmp_path / "edge-cases" / f"{name}.jpg").write_bytes(data)
    return tmp_path


def test_photographs(photographs):
    source = open_imagefolder(photographs)
    assert (source.info.num_train, source.info.num_eval, source.info.num_classes) == (140, 40, 10)
    options = {"input_shape": (64, 64, 3), "input_range": InputRange.of("unit", source.info, 3)}
    batches = eval_batches(source.eval, source.info, batch_size=6, **options)
    images, _, weights = next(batches.as_numpy_iterator())
    assert images.std() > 0.1 and images.min() >= 0 and images.max() <= 1 and weights.sum() == 6
    trained, _ = take(source, 8, **options)
    assert trained.std() > 0.1


def test_photographs_with_odd_files(photographs):
    """Reads greyscale JPEGs, EXIF orientation 6 and the invalid 0, and a very small image."""
    paths = sorted((photographs / "edge-cases").iterdir())
    info = open_imagefolder(photographs).info
    images = load_images(paths, info, input_shape=(32, 32, 3), input_range=RAW)
    assert images.shape == (len(paths), 32, 32, 3) and images.std(axis=(1, 2, 3)).min() > 5
    on_their_side = [path for path in paths if Image.open(path).getexif().get(0x0112) == 6]
    assert on_their_side
    for path in on_their_side:
        upright = open_image(path.read_bytes(), "image", 3)
        assert upright.size == Image.open(path).size[::-1]


def test_images_that_are_whole_are_never_left_out_as_damaged(tmp_path, run):
    write_class_folders(tmp_path / "photos", {(".", "a"): 10, (".", "b"): 10})
    train = ["train", "lenet", "--dataset", tmp_path / "photos", "--dry-run"]
    damaged = tmp_path / "photos" / "a" / "3.png"
    (tmp_path / "photos" / "b" / "large.png").write_bytes(encode(smooth(0, 50, 40)))
    damaged.write_text("junk")
    options = ["--max-image-pixels", 1500]
    error, hint = "large.png has 50x40 pixels, more than --max-image-pixels 1500", "--max-image-pixels 2000"
    check_refused(
        run,
        Refusal([*train, *options], "2 of 21 images cannot be read", hint, 3),
        Refusal([*train, *options, "--skip-damaged"], error, hint, 3),
    )
    (tmp_path / "photos" / "b" / "large.png").unlink()
    Image.fromarray(np.full((20, 30), np.nan, np.float32)).save(str(tmp_path / "photos" / "b" / "odd.tif"))
    error, hint = "odd.tif has pixels that are not finite numbers", "replace them by numbers"
    check_refused(
        run,
        Refusal(train, "2 of 21 images cannot be read", hint, 3),
        Refusal([*train, "--skip-damaged"], error, hint, 3),
    )


@pytest.mark.slow
def test_infer_names_and_counts_damaged_images_of_a_folder(tmp_path, run, succeeds, lightly):
    write_class_folders(tmp_path / "photos", {(part, name): 6 for part in ("train", "val") for name in "ab"})
    data = ("--dataset", tmp_path / "photos", "--micro-batch-size", 4)
    out, err = succeeds(
        "train", "toy_model", *data, "--num-epochs", 1, "--run-dir", tmp_path / "run", "--json"
    )
    choice = json.loads(out)["dataset"]["choice"]
    assert choice == "training on train/, evaluation on val/" and choice in err
    (tmp_path / "photos" / "val" / "b" / "2.png").write_text("junk")
    code, out, err = run("infer", tmp_path / "run", "--split", "eval", "--json")
    assert code == 3 and "b/2.png is not an image" in err, err
    assert len(json.loads(out)["results"]) == 11
    check_refused(
        run, Refusal(["evaluate", tmp_path / "run"], "1 of 24 images cannot be read", "--skip-damaged", 3)
    )


@pytest.mark.slow
def test_damaged_images_are_refused_or_left_out(tmp_path, run, succeeds, lightly):
    folder = tmp_path / "photos"
    write_class_folders(folder, {(".", "a"): 20, (".", "b"): 20})
    whole = (folder / "b" / "4.png").read_bytes()
    (folder / "a" / "3.png").write_text("junk")
    (folder / "b" / "4.png").write_bytes(whole[:40])
    (folder / "b" / "5.png").write_bytes(b"")
    train = ("train", "toy_model", "--dataset", folder, "--num-epochs", 1, "--run-dir", tmp_path / "run")
    code, _, err = run(*train)
    assert code == 3 and "3 of 40 images cannot be read" in err and "compiling" not in err
    assert all(name in err for name in ("a/3.png", "b/4.png", "b/5.png")) and "--skip-damaged" in err
    assert not (tmp_path / "run").exists()
    code, out, err = run(*train, "--skip-damaged", "--json")
    data = json.loads(out)["dataset"]
    assert code == 0 and data["train"] + data["evaluation"] == 37 and "3 damaged images left out" in err
    assert [Path(path).name for path in data["left_out"]] == ["3.png", "4.png", "5.png"]
    assert any(line.startswith("3 damaged images left out") for line in data["warnings"])
    (folder / "b" / "4.png").write_bytes(whole)
    out, err = succeeds("evaluate", tmp_path / "run", "--limit-eval", 2, "--json")
    assert "2 damaged images left out" in json.loads(out)["notes"][-1] and "2 damaged images left out" in err
    for path in (folder / "a").iterdir():
        path.write_bytes(b"")


@pytest.mark.slow
def test_warnings_about_a_set_are_shown_where_it_is_chosen(tmp_path, succeeds, lightly):
    folder, trained = tmp_path / "photos", tmp_path / "run"
    sizes = {"a": 30, "b": 5}
    write_class_folders(folder, {(part, name): sizes[name] for part in ("train", "val") for name in sizes})
    (folder / "val" / "notes.txt").write_text("x")
    warnings = ("left out 1 file", "few training images", "unbalanced classes", "are discarded")

    def shown(*args):
        out, err = succeeds(*args)
        return [text for text in warnings if text in err], out

    verified = shown("verify-dataset", folder)[1]
    assert "passed-over" in verified and "imbalance" in verified
    train = ("train", "toy_model", "--dataset", folder, "--micro-batch-size", 8, "--run-dir", trained)
    assert shown(*train, "--dry-run")[0] == shown(*train, "--num-epochs", 1)[0] == list(warnings)
    _, err = succeeds(*train, "--num-epochs", 1, "--overwrite", "--class-weights", "balanced")
    assert "class weights in the training loss: from 0.583 (a) to 3.5 (b)" in err
    assert shown("train", "--run-dir", trained, "--resume", "--num-epochs", 2)[0] == ["are discarded"]
    for command in (("evaluate", trained), ("infer", trained, "--split", "eval")):
        assert shown(*command)[0] == shown(*command, "--dataset", folder)[0] == ["left out 1 file"]
    result = json.loads(shown("evaluate", trained, "--json")[1])
    assert any("left out 1 file" in note for note in result["notes"]) and "top5" not in result["measured"]


@pytest.mark.parametrize(
    ("fraction", "held_out"), [(0.2, {"a": 4, "b": 1, "c": 1}), (0.5, {"a": 10, "b": 2, "c": 1})]
)
def test_a_folder_of_classes_is_split(tmp_path, fraction, held_out):
    write_class_folders(tmp_path, {(".", "a"): 20, (".", "b"): 4, (".", "c"): 2})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.txt").write_text("no class")
    named = (str(tmp_path), tmp_path)
    home = {"home": "imagenet", "task": "classification"}
    choice = choose_dataset(*named, **home)
    sources = [
        open_dataset(choice, ReaderOptions(seed=seed, validation_fraction=fraction)) for seed in (1, 2)
    ]
    source = sources[0]
    assert source.info.class_names == ("a", "b", "c") and source.info.num_train == len(source.train)
    train, evaluation = set(source.train.paths), set(source.eval.paths)
    assert not train & evaluation and len(train) + len(evaluation) == 26
    assert evaluation == set(sources[1].eval.paths), "every run holds out the same"
    for examples in (source.train, source.eval):
        for path, label in zip(examples.paths, examples.labels):
            assert Path(path).parent.name == source.info.class_names[label]
    counts = np.bincount(source.eval.labels).tolist()
    assert counts == list(held_out.values())
    warnings = " ".join((*source.info.warnings, *source.info.training_warnings))
    assert (
        f"{sum(counts)} of its 26 images" in warnings
        and "few training images: the smallest class, c, has 1" in warnings
    )
    assert "unbalanced classes: a has" in warnings and "--class-weights balanced" in warnings


@pytest.mark.parametrize("change", ["first", "last", "gone"])
def test_adding_or_removing_an_image_moves_at_most_one_between_splits(tmp_path, change):
    folder = tmp_path / "photos"
    write_class_folders(folder, {(".", "a"): 20, (".", "b"): 20})
    before = open_imagefolder(folder)
    if change == "gone":
        (folder / "a" / "0.png").unlink()
    else:
        name = "9-a.png" if change == "last" else "!.png"
        (folder / "a" / name).write_bytes((folder / "a" / "0.png").read_bytes())
        write_class_folders(folder, {(".", "0"): 5})  # a class that sorts before all others
    after = open_imagefolder(folder)
    moved = set(before.train.paths) & set(after.eval.paths) | set(before.eval.paths) & set(after.train.paths)
    assert len(moved) <= 1
    # A moved folder is split in the same way.
    copy = tmp_path / "elsewhere"
    folder.rename(copy)
    moved_source = open_imagefolder(copy)
    assert [Path(p).relative_to(copy) for p in moved_source.eval.paths] == [
        Path(p).relative_to(folder) for p in after.eval.paths
    ]


def test_one_image_of_each_class_cannot_be_split(tmp_path):
    write_class_folders(tmp_path, {(".", "a"): 1, (".", "b"): 1})
    check_raises(DataError, "none can be held out", "", open_imagefolder, tmp_path)


@pytest.mark.parametrize(
    ("command", "weights", "size"),
    [
        ("train", {}, (96, 96)),
        ("train", {"weights": "imagenet"}, None),
        ("evaluate", {}, None),
        ("export", {}, None),
    ],
)
def test_other_commands_and_trained_weights_keep_the_default_size(command, weights, size):
    flags = {"dataset": "imagefolder", **weights}
    resolved = resolve(command, flags, model="resnet50-keras", needs_data=False)
    assert resolved.config.image_size == size


@pytest.mark.slow
def test_image_folders_have_presets_with_a_small_batch(tmp_path):
    write_class_folders(tmp_path, {(".", "a"): 20, (".", "b"): 20, (".", "c"): 20, (".", "d"): 20})
    for record in list_models():
        if record.task == "classification":
            resolved = resolve("train", {"dataset": str(tmp_path)}, model=record.name)
            assert resolved.preset == f"{record.name}@folder" and resolved.config.micro_batch_size <= 64
            assert resolved.config.global_batch_size is None


def test_a_problem_without_a_path_keeps_the_words_of_its_error():
    assert problem_of(DataError("None of the files is readable", ""), "train", "set").reason == (
        "None of the files is readable"
    )
