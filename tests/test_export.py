"""Exports: stock Keras layers, files of other formats, the verification of each, and exported files used as runs."""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from poplar_double import installed
from support.data_sets import write_class_folders
from support.refusals import Refusal, check_raises, check_refused
from support.trained_runs import run_of
from tensorflow import keras

import ipucnn
from ipucnn import cli
from ipucnn.compat import KERAS_3
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.pixels import InputRange
from ipucnn.errors import ConfigurationError, DataError, ThresholdError
from ipucnn.events import show
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.editing import in_64_bits, stock_model
from ipucnn.models.keras_files import load_keras_weights
from ipucnn.models.layers import micro_batches, per_sample
from ipucnn.models.registry import get_model
from ipucnn.reports.evaluate import print_export
from ipucnn.runs import export, predict, runtimes, verification
from ipucnn.runs import exported as exported_files
from ipucnn.runs.network_input import describe_input
from ipucnn.runs.sources import Weights, WeightsArgument
from ipucnn.runs.trained import open_trained

RNG = np.random.RandomState(3)


def with_other_statistics(model):
    """Returns the model with weights as after training: none is exactly 0 or 1."""
    for layer in model.layers:
        layer.set_weights([w + 0.1 * np.abs(RNG.standard_normal(w.shape)) for w in layer.get_weights()])
    return model


def is_stock(layer):
    return type(layer).__module__.partition(".")[0] in ("keras", "tensorflow")


def group_and_hard_layers():
    """Returns a small network of layers that Keras lacks; one has the name of the output."""
    inputs = keras.Input((9, 8, 3), name="input")
    x = keras.layers.Conv2D(8, 3, name="logits")(inputs)
    x = per_sample.HardSwish(name="swish")(x)
    x = per_sample.GroupedConv2D(8, 3, groups=4, name="grouped")(x)
    x = per_sample.HardSigmoid(name="sigmoid")(x)
    x = per_sample.Cropping2D(((0, 1), (1, 0)), name="crop")(x)
    x = micro_batches.Dropout(0.5, name="dropout")(x)
    x = per_sample.SubsamplePad(12, name="pad")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(5, name="top")(x))


@pytest.mark.slow_cases("group")
@pytest.mark.parametrize("case", ["batch", "group", "unet", "others"])
def test_stock_layers_compute_the_same(case):
    if case == "others":
        model = group_and_hard_layers()
    else:
        name, size = ("unet", 188) if case == "unet" else ("cifar_resnet8", 16)
        record = get_model(name)
        filters = 2 if case == "unet" else None
        norm = "none" if case == "unet" else case
        model = build_model(
            record, BuildOptions((size, size, record.input_shape[2]), 5, norm=norm, base_filters=filters)
        )
    with_other_statistics(model)
    images = RNG.standard_normal((2, *model.inputs[0].shape[1:])).astype(np.float32)
    inputs = keras.Input(images.shape[1:], name="images")
    has_all = KERAS_3 or case in ("batch", "unet")
    if not has_all:
        with pytest.raises(ConfigurationError, match=r"layer \w+: Keras 2\.6 has no"):
            stock_model(model, inputs, all_of_them=True)
    stock = stock_model(model, inputs, all_of_them=has_all)
    assert not has_all or all(map(is_stock, stock.layers))
    expected, computed = model(images).numpy(), stock(images).numpy()
    assert np.abs(computed - expected).max() <= 1e-4 * expected.std() > 0
    assert [layer.name for layer in stock.layers if layer.output is stock.outputs[0]] == ["logits"]


@pytest.mark.parametrize("file", ["m.keras", "m.h5"])
def test_the_exported_network_gives_its_weights_back(tmp_path, file):
    """Convolutions that stand for layers without weights are no weights, unless they are learnt."""
    if file == "m.keras" and not KERAS_3:
        pytest.skip("Keras 2.6 writes no such file")
    model = build_model(get_model("cifar_resnet8"), BuildOptions((16, 16, 3), 5))
    with_other_statistics(model)
    stock = stock_model(model, keras.Input((16, 16, 3), name="images"), all_of_them=True)
    stock.save(str(tmp_path / file))
    other = build_model(get_model("cifar_resnet8"), BuildOptions((16, 16, 3), 5))
    kept, _ = load_keras_weights(other, tmp_path / file)
    assert not kept
    for before, after in zip(model.get_weights(), other.get_weights()):
        np.testing.assert_array_equal(before, after)
    learnt = next(layer for layer in stock.layers if layer.weights and layer.weights[0].shape[:2] == (1, 1))
    learnt.set_weights([learnt.get_weights()[0] * 2])
    stock.save(str(tmp_path / file))
    with pytest.raises(DataError, match="it has 16 layers with weights"):
        load_keras_weights(other, tmp_path / file)


@pytest.mark.parametrize("input_range", ["standard", "unit", "tf", "raw", "caffe", "torch", "image"])
def test_raw_pixels_are_normalised_inside_the_network(input_range):
    info = DatasetInfo(
        "x", "classification", 3, (8, 8, 3), 1, 1, ("a", "b", "c"), "", (9.0, 99.0, 200.0), (5.0, 50.0, 77.0)
    )
    inputs = keras.Input((8, 8, 3), name="input", dtype="float32")
    flat = keras.layers.Flatten(name="flat")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4, name="top")(flat))
    pixels = RNG.randint(0, 256, (3, 8, 8, 3)).astype(np.uint8)
    pixels[0] = 7  # constant, with a deviation of 0
    expected = model(InputRange.of(input_range, info, 3).apply(pixels.astype(np.float32))).numpy()
    images = keras.Input((8, 8, 3), name="images", dtype="uint8")
    stock = stock_model(
        model, images, all_of_them=True, pixels=InputRange.of(input_range, info, 3), probabilities=True
    )
    probabilities = stock(pixels).numpy()
    exponentials = np.exp(expected - expected.max(-1, keepdims=True))
    np.testing.assert_allclose(
        probabilities, exponentials / exponentials.sum(-1, keepdims=True), rtol=2e-4, atol=1e-6
    )


# -- the command ----------------------------------------------------------------------------------------------


def needs(form):
    missing = runtimes.missing_packages(form)
    return pytest.mark.skipif(
        bool(missing), reason=f"{form} needs {', '.join(missing)}: pip install 'ipucnn[export]'"
    )


@pytest.fixture(scope="module")
def trained():
    return run_of("resnet")


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Returns the folder of an ONNX file that the whole command wrote and verified."""
    if runtimes.missing_packages("onnx"):
        pytest.skip("onnx, tf2onnx or onnxruntime is not installed: pip install 'ipucnn[export]'")
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    assert cli.run(["export", str(trained), "--format", "onnx", "--output", str(folder)]) == 0
    return folder


def record_of(folder):
    return json.loads((folder / "export.json").read_text())


def test_an_export_records_its_contents_and_verification(exported):
    record, labels = record_of(exported), [str(i) for i in range(10)]
    files = ["README.md", "export.json", "input.json", "labels.json", "model.onnx", "predict.py"]
    assert sorted(p.name for p in exported.iterdir()) == files
    assert json.loads((exported / "labels.json").read_text()) == labels == record["setup"]["class_names"]
    assert json.loads((exported / "input.json").read_text()) == record["input"]
    verified = record["verification"]
    assert verified["samples"] == 104 - 4 and verified["of"] == "40 of evaluation and 60 of training"
    assert verified["relative"] <= 1e-4 and verified["agreement"] == 1
    assert verified["runtime"].startswith("onnxruntime ")
    assert re.fullmatch("[0-9a-f]{64}", record["setup"]["data_sha256"])
    assert record["input"]["shape"] == [None, 8, 8, 3] and record["opset"] == 15
    page = (exported / "README.md").read_text()
    assert "Trained on digits;" in page and "(40 of evaluation" in page and "float32, any x 8 x 8 x 3" in page


def test_a_verification_on_few_samples_is_noted(exported, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    record = {**record_of(exported), "folder": "x"}
    for samples in (100, 99):
        record["verification"]["samples"] = samples
        print_export(record)
        assert ("(fewer than 100: the data set has no more)" in capsys.readouterr().out) == (samples < 100)


def test_the_described_input_gives_the_classes_of_infer(exported, trained, report):
    """Pixels prepared only by the script give the classes of `ipucnn infer`."""
    rng = np.random.RandomState(2)
    paths = [f"{number}.png" for number in range(3)]
    form = record_of(exported)["input"]
    for path in paths:
        Image.fromarray(rng.randint(0, 256, (8, 8, 3), np.uint8)).save(path)
    images = np.stack([predict.network_input(path, form=form) for path in paths])
    logits = runtimes.load({**record_of(exported), "file": str(exported / "model.onnx")}).run(images)
    predicted = [
        row["predictions"][0]["label"] for row in report("infer", trained, *paths, "--top", 1)["results"]
    ]
    assert predicted == [str(i) for i in logits.argmax(-1)]


def test_recorded_figures_and_data_set_belong_to_the_weights(trained, tmp_path):
    shutil.copytree(str(trained), str(tmp_path / "r"))
    named = WeightsArgument("export", str(tmp_path / "r"), {})
    opened = open_trained(named)
    rows, updates = tmp_path / "r" / "metrics.jsonl", opened.weights.weight_updates
    row = {"event": "validation", "weight_updates": updates - 1, "accuracy": 0.5}
    rows.write_text(json.dumps(row) + "\n")
    assert export.figures(opened) is None
    rows.write_text(json.dumps(row) + "\n" + json.dumps({**row, "weight_updates": updates}) + "\n")
    assert export.figures(opened) == {"weight_updates": updates, "accuracy": 0.5}
    other = replace(opened.resolved, config=replace(opened.config, dataset="mnist"))
    assert export.trained_on(replace(opened, resolved=other), named) == "digits"
    keras_weights = replace(opened, weights=Weights(opened.resolved, "w.keras"))
    assert export.trained_on(keras_weights, named) is None
    assert export.trained_on(keras_weights, replace(named, weights="imagenet")) == "ImageNet"


@pytest.mark.slow_cases("tflite-options2", "keras-options5")
@pytest.mark.slow_cases("onnx-options0", "saved-model-options4")
@pytest.mark.parametrize(
    ("form", "options"),
    [
        pytest.param(
            "onnx", ["--raw-uint8", "--probabilities", "--batch", "7", "--opset", "13"], marks=needs("onnx")
        ),
        pytest.param("onnx", ["--half"], marks=[needs("onnx"), pytest.mark.slow]),
        pytest.param("tflite", [], marks=needs("tflite")),
        pytest.param("tflite", ["--half", "--raw-uint8"], marks=[needs("tflite"), pytest.mark.slow]),
        ("saved-model", ["--batch", "3"]),
        ("keras", ["--raw-uint8", "--probabilities"]),
    ],
)
def test_each_format(trained, report, in_this_process, form, options):
    record = report("export", trained, "--format", form, *options)
    folder = Path("exports") / f"resnet-{form}"
    assert record["folder"] == str(folder) and record_of(folder)["verification"] == record["verification"]
    assert record["input"]["dtype"] == ("uint8" if "--raw-uint8" in options else "float32")
    assert record["output"]["name"] == ("probabilities" if "--probabilities" in options else "logits")
    opsets = {"onnx": 13 if "--opset" in options else 15}
    assert record["opset"] == opsets.get(form)
    assert record["half"] == ("--half" in options) and record["verification"]["agreement"] == 1
    assert sorted(p.name for p in Path("exports").iterdir()) == [folder.name]


def interpreter_of(path):
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        from tensorflow.lite.python.interpreter import Interpreter
    return Interpreter(str(path))


@pytest.mark.slow
@needs("tflite")
@pytest.mark.slow_cases("options0")
@pytest.mark.parametrize("options", [[], ["--raw-uint8", "--batch", "3"]])
def test_a_file_of_8_bit_integers_predicts_as_its_interpreter_does(report, capsys, options):
    """Only input and output are no integers; the script gives the interpreter's class of an image file."""
    record = report("export", run_of("lenet"), "--format", "tflite", "--int8", *options)
    folder, verified = Path(record["folder"]), record["verification"]
    assert record["int8"] and record["calibration_images"] == 100
    assert verified["agreement"] >= verified["least_agreement"] == 0.95
    assert 0.001 < verified["relative"] <= verified["allowed_relative"]
    print_export(record)
    assert "with 100 training inputs" in capsys.readouterr().out
    network = interpreter_of(folder / record["file"])
    types = [np.dtype(tensor["dtype"]).name for tensor in network.get_tensor_details()]
    assert (
        types.count("int8") > 10 and types.count("float32") <= 2
    )  # the input, or its pixels, and the output
    Image.fromarray(RNG.randint(0, 256, tuple(record["input"]["shape"][1:3]), np.uint8)).save("image.png")
    image = predict.network_input("image.png", form=record["input"])
    details = network.get_input_details()[0]
    assert np.dtype(details["dtype"]).name == record["input"]["dtype"]
    network.resize_tensor_input(details["index"], [record["input"]["shape"][0] or 1, *image.shape])
    network.allocate_tensors()
    network.set_tensor(details["index"], np.stack([image] * (record["input"]["shape"][0] or 1)))
    network.invoke()
    logits = network.get_tensor(network.get_output_details()[0]["index"])[0]
    done = subprocess.run([sys.executable, str(folder / "predict.py"), "image.png"], stdout=subprocess.PIPE)
    assert done.returncode == 0 and str(logits.argmax()) in done.stdout.decode().split()


def test_the_script_beside_an_export_says_what_infer_says(here, monkeypatch, capsys):
    """That a picture would be white, and that later pages are not used."""
    form = {"size": [8, 8], "margin": 1.0}
    Image.fromarray(RNG.randint(0, 256, (8, 8, 4), np.uint8) * np.uint8([1, 1, 1, 0])).save("unseen.png")
    with pytest.raises(predict.NotRead, match="is transparent everywhere"):
        predict.cropped_pixels("unseen.png", "RGB", form)
    Image.fromarray(RNG.randint(0, 256, (8, 8, 4), np.uint8) | np.uint8([0, 0, 0, 1])).save("seen.png")
    assert predict.cropped_pixels("seen.png", "RGB", form).shape == (8, 8, 3)
    pages = [Image.fromarray(RNG.randint(0, 256, (8, 8), np.uint8)) for _ in range(2)]
    pages[0].save("one.tif")
    pages[0].save("two.tif", save_all=True, append_images=pages[1:])
    described = {"export.json": {"input": {"patch": None}}, "labels.json": ["ant", "bee"]}
    monkeypatch.setattr(predict, "described", described.get)
    monkeypatch.setattr(predict, "network", lambda record: lambda images: np.float32([[0, 1]]))
    monkeypatch.setattr(predict, "network_input", lambda path, form: np.zeros((8, 8, 1)))
    pages.append(pages[0])
    about = "ImageJ=1.53\nimages=3\nchannels=3\n"
    pages[0].save("channels.tif", save_all=True, append_images=pages[1:], description=about)
    for name, said in (
        ("channels.tif", ""),
        ("one.tif", ""),
        ("two.tif", "two.tif has several pages or frames: the first is used\n"),
    ):
        predict.main(name)
        assert capsys.readouterr() == ("bee\n", said)


@pytest.mark.slow
@needs("tflite")
def test_8_bit_integers_that_give_other_classes_are_refused(run, in_this_process, monkeypatch):
    """Calibration with images of a thousandth of the brightness gives ranges that others exceed."""
    images = export.calibration_images
    monkeypatch.setattr(
        export, "calibration_images", lambda *arguments: np.float32(1e-3) * images(*arguments)
    )
    Path("exports").mkdir()
    line = ["export", run_of("lenet"), "--format", "tflite", "--int8"]
    error, hint = "the tflite file does not do what the run does, and was removed: its logits", "with --half"
    check_refused(run, Refusal(line, error, hint, code=5))
    assert not list(Path("exports").iterdir())


def test_8_bit_integers_need_training_images(trained):
    opened = open_trained(WeightsArgument("export", str(trained), {}))
    source = replace(opened.source, train=opened.source.train.subset(slice(0, 0)))
    with pytest.raises(DataError, match="no training images"):
        verification.calibration_images(replace(opened, source=source), as_pixels=False)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["saved-model", "keras", pytest.param("tflite", marks=needs("tflite"))])
def test_each_format_in_a_separate_process(trained, report, form):
    assert report("export", trained, "--format", form)["verification"]["relative"] <= 1e-4


def test_a_runtime_process_cannot_import_this_package(tmp_path):
    (tmp_path / "onnxruntime.py").write_text("import ipucnn")
    record = {"format": "onnx", "file": "x.onnx", "input": {"name": "x"}, "output": {"name": "y"}}
    done = subprocess.run(
        [sys.executable, runtimes.__file__, json.dumps(record), "1"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
    )
    assert b"ImportError: ipucnn is kept from being imported here" in done.stdout


# -- programs for IPUs ------------------------------------------------------------------------------------------


IPU = ("--format", "ipu", "--batch", "8", "--output", "served")


@pytest.mark.slow
def test_a_program_for_an_ipu_is_written_and_verified(trained, succeeds):
    with installed(num_ipus=1) as machine:
        succeeds("export", trained, *IPU)
    record = record_of(Path("served"))
    call = machine.calls("export_keras")[0]
    assert call["batch_size"] == 8 and call["output_names"] == "logits"
    assert (record["format"], record["file"], record["input"]["name"]) == ("ipu", "1", "input")
    assert record["input"]["shape"][0] == record["output"]["shape"][0] == 8
    assert record["verification"]["relative"] <= 1e-4 and record["verification"]["samples"] >= 8
    assert {"1/saved_model.pb", "1/assets/application.popef"} <= set(record["files"])
    assert Path("served/labels.json").exists()
    assert "the Poplar SDK's runtime" in Path("served/README.md").read_text()


@pytest.mark.slow
def test_an_ipu_program_with_other_results_is_removed(trained, run, monkeypatch):
    compare = verification.compare
    monkeypatch.setattr(verification, "compare", lambda outputs, *others: compare(outputs * 1.01, *others))
    with installed(num_ipus=1):
        check_refused(run, Refusal(["export", trained, *IPU], "differ by up to", code=5))


def test_unsupported_options_of_ipu_programs_are_refused(trained, run):
    no_batch = "and --batch gives none"
    with installed(num_ipus=1):
        check_refused(
            run,
            Refusal("", no_batch, "--batch 8"),
            Refusal("--batch dynamic", no_batch, "--batch 8"),
            Refusal("--batch 8 --raw-uint8", "--raw-uint8: the program for an IPU", "drop --raw-uint8"),
            Refusal("--batch 8 --half", "not as ipu", "--format onnx"),
            command=["export", trained, "--format", "ipu"],
        )


# -- exports that differ from the run -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(trained):
    """Returns the samples that an export of the run is verified with."""
    opened = open_trained(WeightsArgument("export", str(trained), {}))
    session, (model, _) = opened.session(False), opened.build()
    double = show(verification.exact_network(model))
    return verification.take_samples(
        opened, session.predictor(model), double, as_pixels=False, probabilities=False
    )


def change_a_weight(graph):
    from onnx import numpy_helper

    weight = max(graph.initializer, key=lambda w: np.prod(w.dims))
    values = numpy_helper.to_array(weight).copy()
    values.flat[7] += 0.5
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))


def add_an_input(graph):
    from onnx import TensorProto, helper

    # Keras 3 once exported the constants of a Normalization layer this way.
    weight = next(w for w in graph.initializer if w.data_type == TensorProto.FLOAT)
    graph.input.append(helper.make_tensor_value_info(weight.name, TensorProto.FLOAT, list(weight.dims)))
    graph.initializer.remove(weight)


def rename_the_output(graph):
    graph.output[0].name = graph.node[-1].output[0] = "scores"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_a_weight, "differ"),
        (add_an_input, "Required inputs|requires 2 inputs"),
        (rename_the_output, "logits"),
        ("cut", "Protobuf"),
    ],
)
def test_a_corrupted_file_is_refused(exported, samples, tmp_path, change, reason):
    import onnx

    path, content = tmp_path / "model.onnx", (exported / "model.onnx").read_bytes()
    path.write_bytes(content[:-100] if change == "cut" else content)
    if change != "cut":
        model = onnx.load(str(path))
        change(model.graph)
        onnx.save(model, str(path))
    with pytest.raises(ThresholdError) as caught:
        verification.verify(record_of(exported), path, samples)
    assert re.search(reason, caught.value.message) and caught.value.hint


@pytest.mark.parametrize("answer", ["another size in each batch", "no batch", "float64"])
def test_outputs_of_another_shape_or_type_are_refused(exported, samples, answer):
    """The file's process answers with arrays of another shape or type."""

    def run(images):
        size = len(images) + (answer == "another size in each batch")
        outputs = np.zeros((size, 10), np.float64 if answer == "float64" else np.float32)
        return outputs[0] if answer == "no batch" else outputs

    with pytest.raises(ThresholdError, match=r"its outputs are float.*, not float32"):
        verification.verify(record_of(exported), Path("model.onnx"), samples, run)


@pytest.mark.parametrize(
    ("form", "stored", "opset", "is_rounding", "hint"),
    [
        ("onnx", None, 15, True, "train it for longer"),
        ("saved-model", None, None, True, "train it for longer"),
        ("onnx", None, None, False, "--format saved-model"),
        ("saved-model", None, None, False, "--format onnx"),
        ("onnx", "half", 15, False, "without --half"),
        ("tflite", "int8", None, False, "with --half instead of --int8"),
        ("onnx", None, 13, False, "drop --opset: the default is 15"),
    ],
)
def test_the_hint_for_a_file_that_differs(form, stored, opset, is_rounding, hint):
    record = {"format": form, "half": stored == "half", "int8": stored == "int8", "opset": opset}
    assert hint in verification.remedy(record, is_rounding)


def test_the_limit_follows_from_the_network():
    """The limit is a few times the error of the session's 32 bits, but no larger than rounding can explain."""
    exact = RNG.standard_normal((50, 10))
    expected = np.float32(exact + 1e-4 * RNG.standard_normal(exact.shape))
    outputs = np.float32(exact + 2e-4 * RNG.standard_normal(exact.shape))
    mine = verification.compare(outputs, expected, exact)
    largest, _ = verification.limits(32, mine["session_relative"])
    assert 1e-4 < mine["session_relative"] < mine["relative"] <= largest < 1e-2
    assert verification.limits(32, 0.5)[0] == verification.LARGEST_LIMIT
    assert verification.limits(32, 0.0)[0] == verification.LEAST_LIMIT
    # Networks that cannot be computed in 64 bits, and weights in 16 and 8 bits, have fixed limits.
    assert verification.limits(32, None) == verification.LIMITS[32]
    for bits in (16, 8):
        assert verification.limits(bits, 0.5) == verification.LIMITS[bits]


@pytest.mark.parametrize(
    ("relative", "agreement", "reason"),
    [
        (1.0004e-4, 1.0, "its logits differ by up to 0.00010004 of their deviation, and 0.0001 is allowed"),
        (1e-5, 0.98, "it gives another class for 2% of the samples, and 0.5% is allowed"),
    ],
)
def test_a_refusal_prints_enough_digits(relative, agreement, reason):
    with pytest.raises(exported_files.RuntimeFailed, match=re.escape(reason)):
        verification.check_limits({"relative": relative, "agreement": agreement}, 1e-4, 0.995, "logits")
    verification.check_limits({"relative": 1e-4, "agreement": 0.995}, 1e-4, 0.995, "logits")


def test_differently_rounded_pixels_are_accepted():
    pixels = RNG.randint(0, 200, (4, 8, 8, 3)).astype(np.uint8)
    few, all_of_them = pixels.copy(), pixels + np.uint8(1)
    few[0, 0, :4] += 1
    other = verification.input_difference
    assert other(few, pixels) == ""
    assert "of the pixels differ by one grey level" in other(all_of_them, pixels)
    few[0, 0, 0] += 1
    assert "they differ by 0.0" in other(few, pixels)
    assert "they differ by" in other(few.astype(float), pixels.astype(float))
    assert "not uint8 [4, 8, 8, 3]" in other(few[:2], pixels)


def test_the_64_bit_network_equals_the_network():
    model = with_other_statistics(group_and_hard_layers())
    double = in_64_bits(model)
    images = RNG.standard_normal((2, *model.inputs[0].shape[1:])).astype(np.float32)
    exact, single = double(images.astype(np.float64)).numpy(), model(images).numpy()
    assert exact.dtype == np.float64 and 0 < np.abs(exact - single).max() <= 1e-5 * exact.std()


@pytest.mark.slow
@pytest.mark.skipif(not KERAS_3, reason="Keras 2.6 has no group norm")
def test_the_rounding_of_other_layers_counts_only_if_they_compute_the_same():
    """Keras's group norm subtracts two large numbers for images that are almost constant."""
    images = (100 + RNG.standard_normal((4, 16, 16, 3))).astype(np.float32)
    record = get_model("cifar_resnet8")
    model = build_model(record, BuildOptions((16, 16, 3), 5, norm="group"))
    exact = in_64_bits(model)(images.astype(np.float64)).numpy()
    samples = verification.Samples(images, np.asarray(model(images)), exact, "here")
    stock = stock_model(model, keras.Input((16, 16, 3), name="images"), all_of_them=True)
    rounding = verification.rounding_of(stock, samples)
    expected = np.abs(np.asarray(stock(images), np.float64) - exact).max() / exact.std()
    assert rounding == pytest.approx(expected, rel=1e-6) and rounding > 0
    assert verification.limits(32, 1e-6, 1e-4) == (1e-3, 0.0)
    layer = next(one for one in stock.layers if type(one).__name__ == "GroupNormalization")
    layer.set_weights([weights * (1 + 1e-6) for weights in layer.get_weights()])
    assert verification.rounding_of(stock, samples) == 0
    assert verification.rounding_of(stock, replace(samples, exact=None)) == 0
    assert verification.rounding_of(stock, replace(samples, exact=np.zeros_like(exact))) == 0


def with_other_weights(*arguments, **options):
    """Changes one weight in each layer by a thousandth."""
    stock = stock_model(*arguments, **options)
    for layer in stock.layers:
        weights = layer.get_weights()
        if weights:
            weights[0].flat[0] += 1e-3 * max(np.abs(weights[0]).max(), 1e-3)
            layer.set_weights(weights)
    return stock


def with_other_variances(*arguments, **options):
    stock = stock_model(*arguments, **options)
    for layer in stock.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            gamma, beta, mean, variance = layer.get_weights()
            layer.set_weights([gamma, beta, mean, variance * 1.01])
    return stock


def with_other_preprocessing(*arguments, pixels, **options):
    """Normalises pixels with an offset that is wrong by an eighth of a grey level."""
    offsets = (pixels.offsets[0] + 1 / pixels.divisor / 8, *pixels.offsets[1:])
    return stock_model(*arguments, pixels=replace(pixels, offsets=offsets), **options)


@pytest.mark.slow
@pytest.mark.slow_cases("with_other_weights-options0")
@pytest.mark.parametrize(
    ("altered", "options"),
    [(with_other_weights, []), (with_other_variances, []), (with_other_preprocessing, ["--raw-uint8"])],
)
def test_an_altered_file_is_refused_and_removed(trained, run, in_this_process, monkeypatch, altered, options):
    monkeypatch.setattr("ipucnn.models.editing.stock_model", altered)
    Path("exports").mkdir()
    error = "the saved-model file does not do what the run does, and was removed: its logits differ by up to"
    check_refused(run, Refusal(["export", trained, "--format", "saved-model", *options], error, code=5))


@pytest.mark.parametrize("shape", [(5, 3), (4, 6, 3)])
def test_the_comparison_equals_a_loop(shape):
    rng = np.random.RandomState(3)
    expected = rng.standard_normal(shape).astype(np.float32)
    outputs = expected + rng.standard_normal(shape).astype(np.float32) * 0.5
    rows = list(zip(expected.reshape(-1, 3).tolist(), outputs.reshape(-1, 3).tolist()))
    largest = max(abs(a - b) for row, other in rows for a, b in zip(row, other))
    deviation = statistics.pstdev(number for row, _ in rows for number in row)
    agree = [row.index(max(row)) == other.index(max(other)) for row, other in rows]
    mine = verification.compare(outputs, expected)
    values = (mine["largest_difference"], mine["relative"], mine["agreement"])
    np.testing.assert_allclose(values, (largest, largest / deviation, statistics.mean(agree)), rtol=1e-6)
    assert mine["first_disagreement"] == agree.index(False) // (len(rows) // len(expected))
    same = verification.compare(expected, expected)
    assert (same["relative"], same["agreement"], same["first_disagreement"]) == (0, 1, None)


def test_what_an_exported_network_rounds_in_scaling_pixels_is_allowed():
    """The distance of bright images of low contrast from 0 is large beside their deviation."""
    info = DatasetInfo("x", "classification", 2, (16, 16, 3), 1, 1, ("a", "b"), "", (9.0,) * 3, (5.0,) * 3)
    image_range = InputRange.of("image", info, 3)
    pixels = np.random.RandomState(1).randint(250, 252, (9, 16, 16, 3)).astype(np.uint8)
    inputs = keras.Input((16, 16, 3), name="input", dtype="float32")
    flat = keras.layers.Flatten(name="flat")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="top")(flat))
    model.layers[-1].set_weights([np.random.RandomState(2).normal(0, 0.05, (768, 2)), np.zeros(2)])
    expected = np.asarray(model(image_range.apply(np.float32(pixels))))
    exact = np.asarray(in_64_bits(model)(image_range.exact(pixels)))
    images = keras.Input((16, 16, 3), name="images", dtype="uint8")
    stock = stock_model(model, images, all_of_them=False, pixels=image_range)
    found = verification.compare(np.asarray(stock(pixels)), expected, exact)
    assert found["relative"] > verification.limits(32, found["session_relative"])[0]
    rounding = verification.rounding_of(stock, verification.Samples(pixels, expected, exact, "here"))
    assert found["relative"] <= verification.limits(32, found["session_relative"], rounding)[0]
    record = {"format": "onnx", "half": False, "int8": False, "opset": 15, "input": {"dtype": "uint8"}}
    assert "drop --raw-uint8" in verification.remedy(record, True)


# -- exported files used as runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pixels_in(trained, tmp_path_factory):
    """Returns a TFLite or ONNX file that takes seven images of pixels and returns probabilities."""
    form = next((f for f in ("onnx", "tflite") if not runtimes.missing_packages(f)), None)
    if form is None:
        pytest.skip("neither ONNX nor TFLite can be written: pip install 'ipucnn[export]'")
    folder = tmp_path_factory.mktemp("pixels") / form
    options = f"--format {form} --raw-uint8 --probabilities --batch 7 --output {folder}".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "RuntimeProcess", runtimes.load)
        assert cli.run(["export", str(trained), *options]) == 0
    return folder / f"model.{form}"


PREDICTING = ("evaluate", "infer")


@pytest.mark.slow
@pytest.mark.slow_cases("pixels_in")
@pytest.mark.parametrize("which", ["exported", "pixels_in"])
def test_an_exported_file_or_its_folder_is_used_like_its_run(trained, report, request, which):
    file = request.getfixturevalue(which)
    file = file / "model.onnx" if file.is_dir() else file
    mine, runs = report("evaluate", file), report("evaluate", trained)
    assert mine["confusion_matrix"] == runs["confusion_matrix"] and mine["checkpoint"] == str(file)
    assert mine["measured"]["loss"] == pytest.approx(runs["measured"]["loss"], rel=1e-4)
    assert mine["measured"]["samples"] == runs["measured"]["samples"] == 40
    rows = [
        report("infer", used, "--split", "eval", "--limit-eval", 9)["results"]
        for used in (file.parent, trained)
    ]
    predicted = [[row["predictions"][0]["class"] for row in each] for each in rows]
    assert predicted[0] == predicted[1] and len(predicted[0]) == 9


@pytest.mark.slow
@needs("onnx")
def test_an_exported_file_knows_the_set_of_its_training(lightly, succeeds, report, tmp_path):
    """A copy of that set is not evaluated whole, because most of its images were trained on."""
    write_class_folders(tmp_path / "set", {("", kind): 5 for kind in ("a", "b")})
    words = ["--image-size", "16", "--micro-batch-size", "4", "--num-epochs", "1", "--seed", "1"]
    succeeds("train", "toy_model", "--dataset", "set", *words, "--run-dir", "r")
    succeeds("export", "r", "--format", "onnx", "--output", "out")
    (tmp_path / "set").rename(tmp_path / "moved")
    sizes = [report("evaluate", name, "--dataset", "moved")["dataset"]["size"] for name in ("r", "out")]
    assert sizes == [2, 2]


@pytest.mark.slow
@needs("onnx")
def test_an_export_of_a_run_with_8_bit_transfer_rounds_as_the_run_does(
    lightly, succeeds, report, in_this_process, monkeypatch, run, tmp_path
):
    """Grey values of colour images are fractional, and the run sees whole ones; contrast is low."""
    rng = np.random.RandomState(5)
    for number in range(16):
        path = tmp_path / "set" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.randint(126, 130, (28, 28, 3)).astype(np.uint8)).save(path)
    words = ["--normalise", "image", "--eight-bit-transfer", "--micro-batch-size", 4, "--num-epochs", 1]
    succeeds("train", "lenet", "--dataset", "set", *words, "--seed", 1, "--run-dir", "r")
    succeeds("export", "r", "--format", "onnx", "--output", "out")
    form = record_of(tmp_path / "out")["input"]
    assert form["rounded"] and "rounded to whole numbers" in (tmp_path / "out" / "README.md").read_text()
    losses = [report("evaluate", name)["measured"]["loss"] for name in ("r", "out")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    paths = sorted(map(str, (tmp_path / "set").rglob("*.png")))
    images = np.stack([predict.network_input(path, form=form) for path in paths])
    logits = runtimes.load({**record_of(tmp_path / "out"), "file": str(tmp_path / "out" / "model.onnx")}).run(
        images
    )
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    of_run = ipucnn.load("r").predict(paths)
    np.testing.assert_allclose(ipucnn.load("out").predict(paths), of_run, atol=1e-6)
    np.testing.assert_allclose(powers / powers.sum(-1, keepdims=True), of_run, atol=1e-6)
    for used in ("r", "out"):
        rows = report("infer", used, *paths)["results"]
        shares = [{each["class"]: each["probability"] for each in row["predictions"]}[0] for row in rows]
        np.testing.assert_allclose(shares, of_run[:, 0], atol=1e-6)
    # What the file's own scaling of pixels rounds is measured.
    succeeds("export", "r", "--format", "onnx", "--raw-uint8", "--output", "raw")
    assert record_of(tmp_path / "raw")["verification"]["rounding"] > 0
    # A script that does not round is found.
    monkeypatch.setattr(export, "describe_input", lambda *facts: {**describe_input(*facts), "rounded": False})
    command = "export r --format onnx --output wrong"
    check_refused(run, Refusal(command, "of the pixels differ by one grey level", code=5))


@pytest.mark.slow
def test_a_saved_model_is_refused(trained, run, succeeds, in_this_process):
    succeeds("export", trained, "--format", "saved-model", "--output", "saved")
    check_refused(
        run,
        *(Refusal(f"{c} saved", "is a SavedModel, which is not run", "onnx or tflite") for c in PREDICTING),
        Refusal("export saved --format keras", "was exported already"),
    )


def forged(exported, folder, rounds=1, values=1):
    """Returns an export with a replaced file: a loop of ``rounds``, or ``values`` numbers, before it answers."""
    import onnx
    from onnx import TensorProto, helper

    shutil.copytree(str(exported), str(folder))
    shape = [None, 8, 8, 3]

    def info(name, kind=TensorProto.FLOAT, dims=()):
        return helper.make_tensor_value_info(name, kind, dims)

    def constant(name, kind, dims, value):
        return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, dims, [value]))

    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["more"]), helper.make_node("Identity", ["x"], ["y"])],
        "body",
        [info("i", TensorProto.INT64), info("go", TensorProto.BOOL), info("x", dims=shape)],
        [info("more", TensorProto.BOOL), info("y", dims=shape)],
    )
    nodes = [
        constant("rounds", TensorProto.INT64, [], rounds),
        constant("yes", TensorProto.BOOL, [], True),
        helper.make_node("Loop", ["rounds", "yes", "images"], ["looped"], body=body),
        constant("size", TensorProto.INT64, [1], values),
        helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["nothing"], keepdims=1),
        helper.make_node("Add", ["looped", "nothing"], ["sum"]),
        helper.make_node("Flatten", ["sum"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "forged", [info("images", dims=shape)], [info("logits", dims=[None, 192])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    onnx.save(model, str(folder / "model.onnx"))
    record = record_of(folder)
    record["files"]["model.onnx"]["sha256"] = exported_files.file_digest(folder / "model.onnx")[0]
    (folder / "export.json").write_text(json.dumps(record))
    return folder / "model.onnx"


def test_a_forged_file_that_answers_in_another_shape_is_refused(exported, run, tmp_path):
    file = forged(exported, tmp_path / "forged")
    check_refused(run, Refusal(["evaluate", file], "its outputs are float32", code=3))


# A command that only runs a file: importing TensorFlow would take most of the time.
RUN_FILE = """
import json, sys, numpy as np
from pathlib import Path
from ipucnn import cli
from ipucnn.runs import compare
from ipucnn.runs.exported import RuntimeProcess
def work(*_):
    record = json.loads(Path(sys.argv[1]).with_name("export.json").read_text())
    RuntimeProcess({**record, "file": sys.argv[1]}).run(np.zeros((1, 8, 8, 3), np.float32))
compare.find_runs = work
cli.main(["runs"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_file_that_never_answers_is_ended_by_a_signal(exported, tmp_path):
    file = forged(exported, tmp_path / "forged", rounds=2**60)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_FILE, str(file)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    serving, deadline = [], time.monotonic() + 300
    while not serving and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if b"runtimes.py" in entry.read_bytes() and str(file).encode() in entry.read_bytes():
                    serving.append(int(entry.parent.name))
    assert serving
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    command, deadline = Path(f"/proc/{serving[0]}/cmdline"), time.monotonic() + 60
    while time.monotonic() < deadline and command.exists() and command.read_bytes():
        time.sleep(0.1)
    assert not command.exists() or not command.read_bytes()


def test_a_file_runs_after_the_thread_that_loaded_it_ended(exported):
    session = exported_files.read_exported(exported / "model.onnx").session()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        predictor = thread.submit(session.predictor, None).result()
    time.sleep(0.5)
    assert len(predictor.predict([np.zeros((2, 8, 8, 3), np.float32)])[0]) == 2


@pytest.mark.parametrize("name", ["keras_model", "history"])
def test_an_exported_file_has_no_layers_and_no_history(exported, name):
    loaded = ipucnn.load(exported / "model.onnx")
    check_raises(ConfigurationError, "is an exported file, which has no", "", getattr, loaded, name)


def test_files_other_than_the_verified_one_are_refused(exported, run, tmp_path):
    shutil.copy(str(exported / "model.onnx"), "alone.onnx")
    check_refused(
        run,
        Refusal("evaluate absent.onnx", "exported network absent.onnx does not exist", code=3),
        Refusal("evaluate alone.onnx", "has no export.json beside it", code=3),
        Refusal(["export", exported / "model.onnx", "--format", "saved-model"], "was exported already"),
    )
    shutil.copytree(str(exported), "copy")
    infer = "infer copy/model.onnx --split eval"
    for damage in ('{"format": "onnx"}', "[1]", "{"):
        Path("copy/export.json").write_text(damage)
        check_refused(run, Refusal(infer, "copy/export.json", code=3), alone=True)
    damages = (
        ("output", "name", 3, "$.output.name"),
        ("output", "shape", "10", "$.output.shape"),
        ("input", "shape", ["x", 8, 8, 3], "$.input.shape[0]"),
        ("input", "shape", [None, 8, 8, 4], "$.input.shape[3]"),
        ("setup", "image_shape", ["8", "8", "3"], "$.setup.image_shape"),
        ("setup", "mean", [], "mean and std have one or three"),
        ("setup", "std", [1.0, 2.0, 3.0, 4.0], "mean and std have one or three"),
        ("setup", "class_names", [*"abcdefghij"], "labels.json"),
        ("setup", "config", "{", "export.json"),
        ("", "model", "lenett", "lenett"),
        ("", "file", "../model.onnx", "$.file"),
        ("", "format", "tflite", "is an export of the format tflite"),
    )
    for part, name, value, reason in damages:
        record = record_of(exported)
        (record[part] if part else record)[name] = value
        Path("copy/export.json").write_text(json.dumps(record))
        check_refused(run, Refusal(infer, reason, code=3))
    shutil.copy(str(exported / "export.json"), "copy/export.json")
    Path("copy/labels.json").unlink()
    check_refused(run, Refusal("evaluate copy/model.onnx", "labels.json", code=3))
    shutil.copy(str(exported / "labels.json"), "copy/labels.json")
    data = bytearray(Path("copy/model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    Path("copy/model.onnx").write_bytes(bytes(data))
    error = "copy/model.onnx is not the file that was verified"
    check_refused(run, Refusal("evaluate copy/model.onnx", error, code=3))
