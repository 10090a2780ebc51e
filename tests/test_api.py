"""The Python API: the examples of its documentation, and its agreement with the commands."""

import doctest
import gc
import json
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from support.data_sets import write_class_folders
from support.refusals import check_raises
from support.refused import all_refusals
from support.trained_runs import train
from support.workers import completed

import ipucnn
from ipucnn import api
from ipucnn.datasets.sources import in_memory
from ipucnn.errors import ConfigurationError, DataError, InfeasibleError, UserError
from ipucnn.runs import predict
from ipucnn.runs.exported import RuntimeFailed, RuntimeProcess
from ipucnn.runs.images import outputs
from ipucnn.runs.provenance import environment
from ipucnn.sessions.host.session import HostPredictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    line = "toy_model --dataset digits --limit-train 64 --limit-eval 40 --num-epochs 2 --seed 1"
    train(folder / "runs" / "mine", f"{line} --micro-batch-size 8 --gradient-accumulation-count 4")
    return folder


def test_the_examples_of_the_documentation(folder, monkeypatch):
    monkeypatch.chdir(folder)
    results = doctest.testmod(api, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0 and results.attempted >= 12


@contextmanager
def no_open_files():
    """Checks that nothing leaves a file open, as Python says where such a file is deleted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert [str(one.message) for one in caught if "unclosed" in str(one.message)] == []


def test_images_of_scripts_results_and_runtimes_are_closed(here):
    for ending in ("png", "tif", "jpg"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(f"a.{ending}")
        with no_open_files():
            assert predict.opened(f"a.{ending}").size == (8, 8)
    with no_open_files():
        outputs.Spool().append({"a": 1})
        outputs.PageSpool().append(np.zeros((2, 3), np.float32))
        with pytest.raises(RuntimeFailed):
            RuntimeProcess({})


def test_predictions_equal_those_of_the_command(folder, report):
    rng = np.random.RandomState(0)
    arrays = [rng.randint(0, 256, shape).astype(np.uint8) for shape in ((8, 8), (8, 8), (8, 8))]
    for number, pixels in enumerate(arrays):
        Image.fromarray(pixels).save(f"{number}.png")
    names = [f"{number}.png" for number in range(3)]
    expected = np.zeros((3, 10))
    for row, result in enumerate(report("infer", folder / "runs" / "mine", *names, "--top", 10)["results"]):
        for guess in result["predictions"]:
            expected[row, guess["class"]] = guess["probability"]
    loaded = ipucnn.load(folder / "runs" / "mine")
    stack = np.stack(arrays)
    for images in (names, [Path(name) for name in names], arrays, stack[..., np.newaxis], stack):
        predicted = loaded.predict(images)
        assert predicted.dtype == np.float32
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(loaded.predict(names[1]), expected[1:2], rtol=1e-5, atol=1e-7)
    assert loaded.predict([]).shape == (0, 10)
    assert loaded.config.model_name == "toy_model" and loaded.history == ipucnn.read_history(
        folder / "runs" / "mine"
    )
    assert loaded.keras_model.output_shape[-1] == 10
    checkpoint = next((folder / "runs" / "mine" / "checkpoints").glob("*.npz"))
    assert ipucnn.load(checkpoint).history == loaded.history


def test_types_that_the_calling_program_chose_are_its_own(folder):
    policy, images = tf.keras.mixed_precision, np.zeros((2, 8, 8), np.uint8)
    expected = ipucnn.load(folder / "runs" / "mine").predict(images)
    policy.set_global_policy("mixed_float16")
    try:
        run = ipucnn.load(folder / "runs" / "mine")
        np.testing.assert_array_equal(run.predict(images), expected)
        assert {layer.compute_dtype for layer in run.keras_model.layers} == {"float32"}
        assert policy.global_policy().name == "mixed_float16"
    finally:
        policy.set_global_policy("float32")


def test_the_history_of_a_checkpoint_is_that_of_its_run(folder, tmp_path, monkeypatch):
    """A checkpoint may be copied into the run folder, or lie elsewhere, where nothing names its run."""
    mine = Path(shutil.copytree(folder / "runs" / "mine", tmp_path / "mine"))
    history = ipucnn.read_history(mine)
    shutil.copy(mine / "checkpoints" / "best.npz", mine / "copy.npz")
    assert ipucnn.load(mine / "copy.npz").history == history
    monkeypatch.chdir(mine)
    assert ipucnn.load("copy.npz").history == ipucnn.load("checkpoints/best.npz").history == history
    monkeypatch.chdir(mine / "checkpoints")
    assert ipucnn.load("last.npz").history == history
    line = "toy_model --dataset digits --limit-train 64 --num-epochs 1 --seed 2 --no-validation"
    train(tmp_path / "other", f"{line} --checkpoint-dir {tmp_path / 'kept'}", lightly=True)
    elsewhere = tmp_path / "kept" / "last.npz"
    loaded = ipucnn.load(elsewhere)
    check_raises(DataError, "lies in no run folder", "read_history", lambda: loaded.history)


def test_predictions_of_several_image_sizes_keep_their_order(folder):
    loaded = ipucnn.load(folder / "runs" / "mine")
    rng = np.random.RandomState(1)
    images = [rng.randint(0, 256, (8, 8 + 4 * (i % 2), 1)).astype(np.uint8) for i in range(5)]
    alone = [loaded.predict(image)[0] for image in images]
    np.testing.assert_allclose(loaded.predict(images), alone, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def runs(folder):
    """Runs by the channels of the data: digits are grey, and photographs coloured."""
    write_class_folders(folder / "photos", {("", label): 4 for label in "ab"}, lambda number: (8, 8))
    lines = {1: "lenet --dataset digits", 3: f"cifar_resnet8 --dataset '{folder / 'photos'}' --image-size 8"}
    for channels, line in lines.items():
        train(
            folder / f"{channels}",
            f"{line} --limit-train 4 --micro-batch-size 2 --num-epochs 1 --seed 1",
            lightly=True,
        )
    return {channels: ipucnn.load(folder / f"{channels}") for channels in lines}


@pytest.mark.parametrize(
    ("channels", "shape", "number"),
    [
        (1, (5, 8, 8), 5),
        (3, (3, 8, 8), 0),
        (1, (8, 8, 4), 1),
        (1, (8, 8, 3), 1),
        (1, (8, 8), 1),
        (3, (5, 8, 8, 3), 5),
    ],
)
def test_three_axes_are_a_stack_of_grey_images_only_if_unambiguous(runs, channels, shape, number):
    images = np.full(shape, 255, np.uint8)
    if number:
        assert len(runs[channels].predict(images)) == number
    else:
        check_raises(DataError, "is no image", "", runs[channels].predict, images)


REFUSED = [
    (3, lambda run: ipucnn.load("absent"), "run folder absent does not exist", ""),
    (3, lambda run: ipucnn.load(run, checkpoint="better"), "has no better", ""),
    (2, lambda run: ipucnn.load(5), "run is of type int", ""),
    (2, lambda run: ipucnn.load(None), "run is of type NoneType", ""),
    (2, lambda run: ipucnn.load(run, checkpoint=5), "checkpoint is of type int", ""),
    (2, lambda run: ipucnn.read_history(b"x"), "run is of type bytes", ""),
    (2, lambda run: ipucnn.evaluate(run, checkpoint=[]), "checkpoint is of type list", ""),
    (2, lambda run: ipucnn.export(run, 5), "format is of type int", ""),
    (2, lambda run: ipucnn.export(run, "exe"), "--format exe", ""),
    (2, lambda run: ipucnn.export(run, "onnx", output=[]), "output is of type list", ""),
    (2, lambda run: ipucnn.export(run, "onnx", batch=0), "batch 0", ""),
    (2, lambda run: ipucnn.export(run, "onnx", opset="x"), "opset x", ""),
    (2, lambda run: ipucnn.plan("lennet"), "unknown model", "lenet"),
    (2, lambda run: ipucnn.plan("resnet18", stages=-1), "stages -1", ""),
    (2, lambda run: ipucnn.plan("resnet18", stages="x"), "stages x", ""),
    (2, lambda run: ipucnn.plan("resnet18", stages=2.5), "stages 2.5", ""),
    (2, lambda run: ipucnn.plan("resnet18", system=5), "system is of type int", ""),
    (2, lambda run: ipucnn.plan("resnet18", micro_batch_size=[4]), "must be a whole number", ""),
    (2, lambda run: ipucnn.plan("resnet18", row=0), "--row 0", ""),
    (2, lambda run: ipucnn.plan("resnet18", stages=2, row=2), "--row", ""),
    (2, lambda run: ipucnn.plan("resnet50", stage=4), "`ipucnn plan-splits` has no option stage",
     "did you mean 'stages'"),
    (2, lambda run: ipucnn.plan("resnet50", sistem=4), "has no option sistem", "did you mean 'system'"),
    (2, lambda run: ipucnn.plan("lenet", micro_batchsize=4), "option micro_batchsize",
     "did you mean 'micro_batch_size'"),
    (2, lambda run: ipucnn.train(np.zeros(3)), "model is of type ndarray", ""),
    (3, lambda run: ipucnn.train("lenet", dataset=(5, 6)), "no two pairs of arrays", ""),
    (3, lambda run: ipucnn.train("lenet", dataset=([np.zeros((8, 8), np.uint8)] * 4, [0, 1, 0, 1])),
     "no two pairs", "np.stack(images)"),
    (3, lambda run: ipucnn.train("lenet", dataset=(np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2, ["ant"])),
     "a label is 1", "give 2 names, for the labels 0 to 1"),
    (2, lambda run: ipucnn.train("lenet", num_epoch=3), "`ipucnn train` has no option num_epoch", "'num_epochs'"),
    (2, lambda run: ipucnn.train("lenet", batch_size=3), "option batch_size",
     "'micro_batch_size' or 'global_batch_size'"),
    (2, lambda run: ipucnn.train("toy_model", dataset="digits", kfold=3), "a cross-validation is several", ""),
    (2, lambda run: ipucnn.train("toy_model", dataset="digits", dry_run=True), "dry_run: ", ""),
]  # fmt: skip


@pytest.mark.parametrize(("code", "call", "message", "hint"), REFUSED, ids=[row[2] for row in REFUSED])
def test_wrong_arguments_are_errors_with_a_hint(folder, code, call, message, hint):
    error = check_raises(UserError, message, hint, call, str(folder / "runs" / "mine"))
    # Python prints only the text of an exception, so the text contains the hint as well.
    assert error.exit_code == code and str(error) == f"{error.message}\nhint: {error.hint}"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("train one with: ipucnn train toy_model", "train one with: ipucnn.train('toy_model')"),
        ("add --model-name a.py:b, or --no-validation", "add model='a.py:b', or validation=False"),
        ("add --model-name and --dataset, for example --dataset mnist",
         "add model and dataset, for example dataset='mnist'"),
        ("--resume continues it; use another --run-dir than folds",
         "resume=True continues it; use another run_dir than folds"),
        ("use --micro-batch-size 4 --learning-rate 1e-3, or --precision 16.16",
         "use micro_batch_size=4 learning_rate=1e-3, or precision='16.16'"),
        ("`ipucnn plan-splits lenet --stages 2 --no-augment` says it",
         "ipucnn.plan('lenet', stages=2, augment=False) says it"),
        ("--format onnx, or --half: ipucnn infer 'a b' --split eval",
         "format='onnx', or half=True: ipucnn infer 'a b' --split eval"),
        ("`ipucnn train lenet --kfold N in a terminal`", "`ipucnn train lenet --kfold N in a terminal`"),
    ],
)  # fmt: skip
def test_hints_name_options_as_keywords(hint, expected):
    with pytest.raises(DataError) as caught, api._as_the_command_line(), api._as_the_command_line():
        raise DataError("x", hint)
    assert caught.value.hint == expected


def test_no_hint_of_the_api_has_a_flag_outside_a_command_line():
    for refusal in all_refusals():
        hint = refusal.ending[1][6:]
        with pytest.raises(DataError) as caught, api._as_the_command_line():
            raise DataError("x", hint)
        alone = re.sub("`ipucnn [^`]+`|ipucnn [^`,;()]+", "", caught.value.hint)
        assert "--" not in alone.replace("`---`", ""), hint


def test_two_names_of_one_option_are_refused():
    options = {"dataset": "digits", "num_epochs": 1, "epochs": 2}
    message = "num_epochs and epochs are two names of one option"
    check_raises(ConfigurationError, message, "give num_epochs alone", ipucnn.train, "toy_model", **options)
    message, options = "replicas and num_replicas", {"replicas": 1, "num_replicas": 2}
    check_raises(ConfigurationError, message, "give num_replicas alone", ipucnn.plan, "lenet", **options)


def test_weights_in_a_file_of_keras_are_loaded_as_the_command_loads_them(folder, here, report):
    ipucnn.load(folder / "runs" / "mine").keras_model.save_weights("w.weights.h5")
    pixels = np.random.RandomState(0).randint(0, 256, (8, 8)).astype(np.uint8)
    Image.fromarray(pixels).save("a.png")
    given = {"model": "toy_model", "dataset": "digits"}
    (result,) = report("infer", "w.weights.h5", "a.png", "--model-name", "toy_model", "--dataset", "digits",
                       "--top", 10)["results"]  # fmt: skip
    expected = {one["label"]: one["probability"] for one in result["predictions"]}
    for loaded in (
        ipucnn.load("w.weights.h5", **given),
        ipucnn.load("toy_model", weights="w.weights.h5", dataset="digits"),
    ):
        (found,) = loaded.predict("a.png")
        assert dict(zip(loaded.labels, found)) == pytest.approx(expected, rel=1e-5)
    check_raises(ConfigurationError, "only the weights", "model='lenet'", ipucnn.load, "w.weights.h5")
    check_raises(
        ConfigurationError, "names of its classes", "example dataset='mnist'", ipucnn.load, "w.weights.h5",
        model="toy_model",
    )  # fmt: skip


def test_options_of_other_commands_are_not_suggested():
    error = check_raises(ConfigurationError, "", "", ipucnn.train, "toy_model", stage=4)
    assert "'stages'" not in error.hint
    with pytest.raises(AttributeError, match="no attribute 'loed'"):
        ipucnn.loed  # noqa: B018


def test_what_is_no_image_is_refused(folder):
    loaded = ipucnn.load(folder / "runs" / "mine")
    arrays = (np.zeros((8, 8), np.float32), np.zeros((8, 8, 2), np.uint8), np.zeros((0, 8), np.uint8))
    for wrong in (*arrays, 5, None, [5], type("Odd", (), {"convert": 5})()):
        check_raises(DataError, "is no image", "[images, height, width, 1, 3 or 4]", loaded.predict, wrong)
    check_raises(DataError, "", "", loaded.predict, "absent.png")
    closed = Image.new("RGB", (8, 8))
    closed.close()
    check_raises(DataError, "an image of Pillow cannot be read", "", loaded.predict, closed)


@pytest.mark.slow
def test_images_of_plugins_and_numbers_of_numpy_are_accepted(folder):
    class OfPlugin(Image.Image):
        """An image class as plugins of Pillow define it."""

    loaded = ipucnn.load(folder / "runs" / "mine")
    plain = Image.new("RGBA", (8, 8), (9, 99, 200, 255))
    plain.__class__, same = OfPlugin, plain.convert("RGB")
    np.testing.assert_array_equal(loaded.predict(plain), loaded.predict(same))
    transparent = np.dstack([np.full((8, 8, 3), 40, np.uint8), np.uint8(255 * np.eye(8))])
    on_white = np.where(np.eye(8, dtype=bool)[..., np.newaxis], np.uint8(40), np.uint8(255)) * np.ones(
        3, np.uint8
    )
    expected = loaded.predict(Image.fromarray(on_white))
    np.testing.assert_array_equal(loaded.predict(tf.constant(on_white)), expected)
    np.testing.assert_array_equal(loaded.predict(transparent), expected)
    Image.fromarray(transparent).save(folder / "transparent.png")
    with pytest.warns(UserWarning, match="1 file has transparent parts"):
        np.testing.assert_array_equal(loaded.predict(folder / "transparent.png"), expected)
    # Two images are computed in another order than one on some versions of TensorFlow.
    both = loaded.predict(np.stack([transparent] * 2))
    np.testing.assert_allclose(both, np.repeat(expected, 2, axis=0), rtol=1e-5)
    small = {"stages": 2, "classes": 7, "inference": True, "compare": ["equal-layers"]}
    planned = ipucnn.plan("lenet", **small)
    assert planned.num_classes == 7 and [one.name for one in planned.comparison]
    planned = ipucnn.plan("resnet18", stages=np.int64(2), dataset="cifar10", micro_batch_size=np.int64(4))
    assert planned.num_stages == 2 and planned.settings.micro_batch_size == 4


def test_recipes_and_aliases_of_options(lightly, folder, tmp_path):
    mine = str(folder / "runs" / "mine")
    training = ipucnn.train(
        "toy_model", dataset="digits", config="fine-tuning", weights=mine, epochs=1, lr=0.01, seed=1,
        limit_train=16, limit_eval=8, micro_batch_size=8, run_dir=str(tmp_path / "fine"),
    )  # fmt: skip
    list(training)
    config = ipucnn.load(tmp_path / "fine").config
    assert (config.num_epochs, config.learning_rate) == (1, 0.01)
    assert config.lr_warmup_params == {"warmup_mode": "shift", "warmup_epochs": 1}  # the recipe's
    unused = ipucnn.train("toy_model", dataset="digits", run_dir=str(tmp_path / "unused"))
    with pytest.warns(UserWarning, match="never iterated over"):
        del unused


@pytest.mark.slow
def test_evaluations_and_exports_equal_those_of_the_commands(folder, in_this_process, report, tmp_path):
    mine = folder / "runs" / "mine"
    with no_open_files():
        ours = ipucnn.evaluate(mine)
    theirs = report("evaluate", mine)
    assert ours["confusion_matrix"] == theirs["confusion_matrix"]
    assert ours["measured"]["loss"] == pytest.approx(theirs["measured"]["loss"])
    with no_open_files():
        record = ipucnn.export(mine, "saved-model", tmp_path / "saved")
    assert record["format"] == "saved-model" and (tmp_path / "saved" / "export.json").exists()


@pytest.mark.slow
def test_a_run_equals_that_of_the_command(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = dict(
        dataset="digits", limit_train=64, limit_eval=40, num_epochs=2, seed=1, run_dir="runs/again"
    )
    training = ipucnn.train("toy_model", micro_batch_size=8, gradient_accumulation_count=4, **options)
    assert not training.report
    events = list(training)
    assert len(events) > 2 and training.report["trained_samples"] == 128
    assert ipucnn.read_history("runs/again") == ipucnn.read_history("runs/mine")
    of_command, of_api = (
        {path.name for path in Path("runs", name).iterdir()} - {"tensorboard"} for name in ("mine", "again")
    )
    assert of_command == of_api and "report.html" in of_api
    assert "toy_model" in Path("runs/again/report.html").read_text(encoding="utf-8")


def test_the_share_of_arrays_that_is_held_out_is_an_option(here):
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 2
    for share, held_out in (({}, 8), ({"validation_fraction": 0.3}, 12)):
        training = ipucnn.train("lenet", dataset=(images, labels), micro_batch_size=4, **share)
        assert training._run.context.source.info.num_eval == held_out
    both = ((images, labels), (images, labels))
    with pytest.raises(ConfigurationError, match=r"evaluation part of its own"):
        ipucnn.train("lenet", dataset=both, micro_batch_size=4, validation_fraction=0.3)


def test_arrays_that_are_repeated_are_named_by_no_command(here):
    """A command line cannot name them."""
    images, labels = np.random.RandomState(0).randint(0, 256, (12, 8, 8)).astype(np.uint8), np.arange(12) % 2
    training = ipucnn.train("lenet", dataset=((images, labels), (images[:3], labels[:3])), micro_batch_size=4)
    (line,) = [line for line in training._run.context.warnings if "scores come out too high" in line]
    assert (
        line.startswith("3 of 3 evaluation images are among the training images")
        and "verify-dataset" not in line
    )


def test_a_single_number_is_no_list_of_labels(here):
    with pytest.raises(DataError, match=r"5 images and no list of labels"):
        ipucnn.train("lenet", dataset=(np.zeros((5, 8, 8), np.uint8), 3))


def test_arrays_are_a_data_set(lightly, here):
    """One pair is split, always the same way; runs resume and are evaluated with arrays, but not by commands."""
    labels = np.arange(60) % 3
    images = np.random.RandomState(0).randint(0, 256, (60, 28, 28)).astype(np.uint8)
    options = dict(micro_batch_size=4, seed=1)
    training = ipucnn.train("lenet", dataset=(images, labels), num_epochs=1, run_dir="run", **options)
    note, started, *_ = training
    assert "shifted, and mirrored" in note.line  # by the preset lenet@folder
    assert (started.dataset.num_eval, started.dataset.own_split) == (12, True)
    assert training.report["trained_samples"] == 48
    with pytest.raises(ConfigurationError, match=r"--dataset arrays-.*the run in run has arrays-"):
        ipucnn.train("lenet", dataset=(images[:30], labels[:30]), resume=True, run_dir="run", num_epochs=2)
    resumed = ipucnn.train("lenet", dataset=(images, labels), resume=True, run_dir="run", num_epochs=2)
    assert len(list(resumed)) and resumed.report["trained_samples"] == 96
    assert ipucnn.evaluate("run", dataset=(images, labels))["measured"]["samples"] == 60
    two = ipucnn.train(
        "lenet",
        dataset=((images, labels), (images[:9], labels[:9]), ["a", "b", "c"]),
        **options,
        num_epochs=1,
    )
    check_raises(DataError, "in the memory of that Python alone", "", in_memory.find, "arrays-0123456789ab")
    for wrong, message in (
        (3, "int is no pair"),
        ((images, labels[:5]), "60 images and 5 labels"),
        ((images / 255, labels), "float64"),
        ((images[:3], labels[:3]), "no class of two images"),
    ):
        check_raises(DataError, message, "", ipucnn.train, "lenet", dataset=wrong, **options)
    del two


def test_a_training_can_be_iterated_over_only_once(lightly, here):
    """A second pass, even after an early stop, would write a second run that contains the rows of the first."""
    options = dict(dataset="digits", limit_train=32, limit_eval=10, num_epochs=1, seed=1)

    def written():
        return {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}

    for num_events in (None, 1):
        training = ipucnn.train("toy_model", **options)
        events = iter(training)
        taken = [event for event, _ in zip(events, range(num_events or 1000))]
        assert len(taken) == num_events or len(taken) > 3
        before = written()
        for iterate in (iter, list):
            words = f"it trains only once; its run is {training.folder}"
            check_raises(ConfigurationError, words, "ipucnn.train()", iterate, training)
        assert written() == before
        if num_events:
            # The first pass continues where it stopped.
            assert len(list(events)) > 2
        assert training.report["trained_samples"] == 32
        assert len(ipucnn.read_history(training.folder)) == len(
            {(row["event"], row["weight_updates"]) for row in ipucnn.read_history(training.folder)}
        )
    assert len(list(Path("runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("/opt/venv/bin/ipucnn", "ipucnn"),
        ("/opt/venv/lib/ipucnn/__main__.py", "ipucnn"),
        ("studies/sweep.py", "sweep.py"),
    ],
)
def test_a_run_records_the_program_that_made_it(monkeypatch, program, told):
    """A script that calls the API is recorded under its own name, and without its folder."""
    monkeypatch.setattr(sys, "argv", [program, "my words", "3"])
    assert environment()["command"] == f"{told} 'my words' 3"


def test_heavy_modules_are_imported_on_first_use():
    code = (
        "import sys, ipucnn; assert set(sys.modules).isdisjoint({'numpy', 'tensorflow', 'typer', 'ipucnn.api'});"
        "ipucnn.load; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_declares_its_types():
    package = Path(ipucnn.__file__).parent
    assert (package / "py.typed").is_file()
    stub = (package / "__init__.pyi").read_text()
    assert all(f"import {name} as {name}\n" in stub for name in ipucnn.__all__ if name != "__version__")


@pytest.mark.slow
def test_the_page_can_be_pasted_into_an_empty_folder(tmp_path, monkeypatch, capsys):
    """Runs the block of docs/api.md unchanged, without any preparation."""
    text = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "docs/api.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("Started\n") and "ExecutionFinished" in printed and "Validated" in printed
    assert names["run"].predict(names["images"]).shape == (2, 10) and len(names["plan"].splits) == 3
    assert names["training"].report["trained_samples"] > 0 and names["run"].history[-1]["accuracy"] > 0.5


@pytest.mark.slow
def test_the_notebook_of_the_documentation(tmp_path, monkeypatch, capsys):
    """Runs the cells in order, as a notebook does: no cell may fail, and the results must be right."""
    notebook = json.loads((Path(__file__).parents[1] / "docs" / "api.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, cell in enumerate(notebook["cells"]):
        assert set(cell) - {"execution_count", "outputs"} == {"cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert (
                cell["outputs"] == [] and cell["execution_count"] is None
            )  # no stored output that could be out of date
            exec(compile(cell["source"], f"cell {number}", "exec"), names)
    assert names["right"] > 0.9 and names["report"]["trained_samples"] > 0
    assert len(names["losses"]) == 5 and names["losses"][-1][1] < names["losses"][0][1]
    assert len(names["frozen"]) >= 2
    assert len(names["plan"].splits) == 3
    assert "epoch 5" in capsys.readouterr().out


def test_system_errors_are_reported_as_on_the_command_line(folder, monkeypatch):
    """System errors are converted wherever they occur, also in calls that are not expected to fail."""
    refused = OSError(28, "No space left on device", "/full")

    def refuse(*_, **__):
        raise refused

    loaded, images = ipucnn.load(folder / "runs" / "mine"), np.zeros((1, 8, 8), np.uint8)
    monkeypatch.setattr(HostPredictor, "predict", refuse)
    monkeypatch.setattr(api, "read_run", refuse)
    for ask in (lambda: loaded.predict(images), lambda: ipucnn.read_history("runs")):
        error = check_raises(DataError, "", "free some space", ask)
        assert error.message.startswith("/full: No space left on device") and error.__cause__ is refused
    monkeypatch.setattr(HostPredictor, "predict", lambda *_: np.zeros(2**50))
    with pytest.raises(InfeasibleError, match="out of memory"):
        loaded.predict(images)


def test_arrays_that_change_before_training_are_refused(here):
    """train() checks at once and trains later: the checkpoint would have the SHA-256 of other pixels."""
    images = np.random.RandomState(1).randint(0, 256, (20, 8, 8)).astype(np.uint8)
    labels = np.arange(20) % 2
    sets = (images, labels), (images[:4].copy(), labels[:4])
    training = ipucnn.train("toy_model", dataset=sets, micro_batch_size=2, num_epochs=1)
    images[:] = 0
    with pytest.raises(DataError, match="have changed since the run was checked"):
        list(training)


# The tests' own process has set the variable.
AS_A_USER = "import os; os.environ.pop('TF_DETERMINISTIC_OPS', None)"
KEPT = """
import numpy as np
import tensorflow as tf
from tensorflow import keras
import ipucnn

def check():
    backend = keras.backend
    assert keras.mixed_precision.global_policy().name == "mixed_float16"
    assert (backend.epsilon(), backend.image_data_format()) == (1e-3, "channels_first")
    tf.random.normal((2,))
    list(tf.data.Dataset.range(4).shuffle(4))

keras.mixed_precision.set_global_policy("mixed_float16")
keras.backend.set_epsilon(1e-3)
keras.backend.set_image_data_format("channels_first")
training = ipucnn.train("toy_model_bn", dataset="digits", limit_train=64, num_epochs=1, seed=1, run_dir="run")
check()
for event in training:
    check()
run = ipucnn.load("run")
for count in (2, 3):
    run.predict(np.zeros((count, 8, 8), np.uint8))
    check()
try:
    ipucnn.load("absent")
except ipucnn.errors.UserError:
    check()
print({layer.dtype for layer in run.keras_model.layers if layer.weights})
"""


@pytest.mark.slow
def test_settings_of_a_program_change_no_network_and_are_kept(tmp_path):
    done = completed(tmp_path, ["-c", f"{AS_A_USER}\n{KEPT}"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["{'float32'}"]


@pytest.mark.slow
def test_a_program_that_imports_tensorflow_after_ipucnn_may_draw_without_a_seed(tmp_path):
    code = """
import ipucnn
list(ipucnn.train("toy_model", dataset="digits", limit_train=64, num_epochs=1, seed=1, run_dir="run"))
import tensorflow as tf
tf.random.normal((2,))
"""
    done = completed(tmp_path, ["-c", f"{AS_A_USER}\n{code}"])
    assert done.returncode == 0, done.stderr
