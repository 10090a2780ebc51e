"""Users' own networks and data: trained like in Keras, saved as data, executed only if the command line names them."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from support.own_networks import (
    MIXING,
    NESTED,
    OWN,
    RESIDUAL,
    TRAIN,
    assert_equal,
    built,
    network,
    saved,
    weights_of,
    write,
)
from support.refusals import Refusal, check_raises, check_refused
from tensorflow import keras
from tensorflow.keras import layers

from ipucnn.benchmarking.suite import parse_suite
from ipucnn.command_group import parse_line
from ipucnn.datasets.base import pool
from ipucnn.datasets.registry import choose_dataset, open_dataset
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.counts import count_macs
from ipucnn.models.keras_config import read_blueprint
from ipucnn.models.layers.micro_batches import BatchNormalization
from ipucnn.models.own import PER_SAMPLE, of_checkpoint
from ipucnn.models.preprocessing import WITH_WEIGHTS
from ipucnn.models.registry import check_same_network, find_network, folder_name, get_model, saved_network
from ipucnn.python_files import find_function, is_python_name
from ipucnn.runs.setup import range_name

PAGE = (Path(__file__).parents[1] / "docs" / "own-networks.md").read_text(encoding="utf-8")
NETWORK, DATA = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMANDS,) = (block.replace("$ ", "") for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))


pytestmark = pytest.mark.usefixtures("here")


# --- names


@pytest.mark.parametrize(
    "name, is_one",
    [("a.py:f", True), ("dir/a.py", True), ("a.py:", True), ("lenet", False), ("a.keras", False)],
)
def test_names_of_python_files(name, is_one):
    assert is_python_name(name) == is_one


def test_run_folder_name_is_short():
    assert folder_name("../some where/my_net.py:build") == "my_net-build"
    assert folder_name("../some where/my_net.keras") == "my_net"
    assert folder_name("lenet") == "lenet"


def test_print_config_executes_nothing(succeeds):
    out, _ = succeeds("train", write("raise SystemExit('was run')\ndef build(a, b): pass"), "--print-config")
    assert "net.py:build" in out


# --- names that are trusted


def test_saved_network_is_not_executed_and_a_bad_one_is_reported(run):
    record = get_model("net.py:build")
    check_raises(ConfigurationError, "only if the command line names it", "", record.own.check_buildable)

    def stored(*inputs, kind="Dense", **settings):
        return saved((6, 6, 1), ["dense", kind, settings, list(inputs)])

    good = stored("input", units=3)
    assert saved_network("net.py:build", good, "x", "y").num_classes == 3
    for damaged in (
        None,
        {},
        {**good, "input_shape": [6, -1, 1]},
        {**good, "layers": []},
        stored("input", kind="Lambda", function="x"),
        stored("input", units=3, activation={"class_name": "os.system"}),
        stored("input", kernel_initializer={"class_name": "Evil"}),
        stored("nothing", units=3),
        stored(units=3),
    ):
        check_raises(DataError, "", "", saved_network, "net.py:build", damaged, "checkpoint x", "y")


# --- what users write


@pytest.mark.slow
def test_own_network_gets_the_layers_of_registered_ones():
    record, model = built(RESIDUAL)
    names = [layer.name for layer in model.layers]
    assert names == [
        "input", "conv2d", "batch_normalization", "re_lu", "depthwise_conv2d", "add", "global_average_pooling2d",
        "dense",
    ]  # fmt: skip
    assert type(model.get_layer("batch_normalization")) is BatchNormalization
    assert model.get_layer("dense").activation.__name__ == "linear" and "softmax" in record.own.notes[0]
    # A second build and a checkpoint's record give the same network.
    saved = saved_network(record.name, json.loads(json.dumps(record.own.to_data())), "x", "y")
    first = weights_of(model)
    for other in (find_network("net.py:build"), saved):
        second = weights_of(build_model(other, BuildOptions((6, 6, 2), 3)))
        assert list(second) == list(first)
        assert all(np.array_equal(second[name], value) for name, value in first.items())
    other_seed = weights_of(build_model(saved, BuildOptions((6, 6, 2), 3, seed=1)))
    assert not np.array_equal(other_seed["conv2d/kernel"], first["conv2d/kernel"])


def test_nodes_that_name_no_layer_of_a_model_find_none():
    """A node of an architecture has no place in the function's model, which would count as the layer."""
    record, model = built(MIXING)
    for node in record.own.architecture.nodes:
        with pytest.raises(ValueError, match="names no layer"):
            node.layer_in(model)


def test_nested_models_are_flattened_and_frozen_layers_stay_frozen():
    model = built(NESTED)[1]
    names = [layer.name for layer in model.layers]
    assert "base_separable_conv2d" in names and "base_activation" in names
    assert not model.get_layer("frozen").trainable and model.get_layer("dense").trainable


@pytest.mark.slow
def test_own_layers_are_seeded_and_reported():
    record, model = built(MIXING)
    assert "centre (Centre)" in record.own.notes[-1] and "one by one" in record.own.notes[-1]
    assert np.array_equal(*(weights_of(one)["centre/scale"] for one in (model, built(MIXING)[1])))
    data = record.own.to_data()
    assert [layer[2] for layer in data["layers"] if layer[0] == "centre"] == [None]
    saved = saved_network(record.name, data, "x", "add --model-name net.py:build")
    check_raises(ConfigurationError, "centre", "", saved.own.check_buildable)


MINE = """
from tensorflow import keras
from tensorflow.keras import layers
class Mine(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inside = keras.layers.Dropout(0.5)

    def build(self, shape):
        self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)

    def call(self, {arguments}):
        {line}
"""


def mine(line, arguments="x"):
    """Returns the code of a network with a layer of the user's own."""
    imports = "import tensorflow as tf\n" + MINE.format(line=line, arguments=arguments)
    return network("x = Mine(name='mine')(images)", imports=imports)


DRAWS = "layer 'mine' .Mine. draws random numbers, or remembers something"
# The errors name what Keras calls these, and versions of Keras differ.
REFUSED = {
    "in two models": (
        "a = keras.Sequential([images, layers.Conv2D(2, 1)], name='a'); b = keras.Sequential([images, a], name='b'); "
        "x = a(b(images))",
        "'b_a_conv2d' and 'a_conv2d' are one layer",
    ),
    "regularizer": (
        "x = layers.Conv2D(2, 3, kernel_regularizer=getattr(keras.regularizers, 'OrthogonalRegularizer', "
        "lambda: abs)())(x)",
        "kernel_regularizer .*, and training knows L1 and L2",
    ),
    "axis": ("x = layers.BatchNormalization(axis=1)(x)", "normalises axis"),
    "too small": ("x = layers.Conv2D(2, 9)(x)", "raised|cannot be built"),
    "type of all": (
        "keras.mixed_precision.set_global_policy('mixed_float16')",
        "sets the type of all of Keras' layers to mixed_float16",
    ),
}
REFUSED_FILES = {
    "assigns": (mine("self.seen.assign_add(1.0); return x"), DRAWS),
    # The inner layer gets the training argument even if the outer layer does not.
    "inside": (mine("return self.inside(x)"), DRAWS),
    "inside of training": (mine("return self.inside(x)", "x, training=None"), DRAWS),
    **{case: (network("x = images", line), said) for case, (line, said) in REFUSED.items()},
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_layers_that_training_cannot_compute_are_refused(case):
    text, message = REFUSED_FILES[case]
    try:
        with pytest.raises(ConfigurationError) as caught:
            built(text)
        # A notebook continues in the same process.
        assert keras.mixed_precision.global_policy().name == "float32"
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert re.search(message, caught.value.message), caught.value.message
    assert caught.value.hint and "\n" not in caught.value.message + caught.value.hint


def test_a_file_that_is_no_text_is_refused(run):
    Path("net.py").write_bytes(b"\xff\xfe")
    check_refused(run, Refusal("train net.py:build --print-config", "is not Python"))


# --- runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "mixing",
        pytest.param("residual", marks=pytest.mark.slow),
        pytest.param("nested", marks=pytest.mark.slow),
    ],
)
def test_continued_run_has_the_same_bytes(kind, run, succeeds, report):
    name = write(OWN[kind])
    train = ("train", name, "--dataset", "digits", *TRAIN)
    succeeds(*train, "--run-dir", "whole")
    succeeds(*train, "--num-epochs", 1, "--run-dir", "parts")
    more = ("train", "--resume", "--run-dir", "parts", "--num-epochs", 2)
    has_own = kind == "mixing"
    text = Path("net.py").read_text()
    Path("net.py").write_text(text + "\n# changed\n")
    check_refused(run, Refusal(["train", name, *more[1:]], "has changed since"))
    Path("net.py").write_text(text)
    if has_own:
        check_refused(run, Refusal(more, "only if the command line names it"))
        succeeds("train", name, *more[1:])
    else:
        Path("net.py").unlink()  # the checkpoint holds the whole network
        succeeds(*more)
    assert_equal("whole", "parts")
    assert Path("whole/metrics.jsonl").read_bytes() == Path("parts/metrics.jsonl").read_bytes()
    if has_own:
        check_refused(run, Refusal("evaluate parts", "", "--model-name net.py:build"))
    named = ("--model-name", name) if has_own else ()
    assert "accuracy" in report("evaluate", "parts", *named)["measured"]


@pytest.mark.slow
def test_the_four_commands_of_the_docs_page(run, succeeds):
    Path("my_net.py").write_text(NETWORK)
    Path("my_data.py").write_text(DATA)
    lines = COMMANDS.splitlines()
    assert len(lines) == 4
    for line in lines:
        out, _ = succeeds(*shlex.split(line)[1:])
        assert " train " not in line or "ipucnn evaluate runs/mine --dataset my_data.py:load\n" in out
    assert "accuracy" in out
    Path("my_net.py").unlink()
    check_refused(run, Refusal("evaluate runs/mine", "", "--dataset my_data.py:load"))


FACTOR = """
class Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, x{}):
        return x * self.scale * float(open("factor.txt").read())
"""


@pytest.mark.parametrize("arguments", ["", ", training=None"])
def test_a_layer_of_its_own_that_computes_something_else_than_in_training_is_refused(arguments):
    text = network("x = Scaled(name='scaled')(images)", imports="from tensorflow.keras import layers\n")
    Path("factor.txt").write_text("2")
    record, _ = built(text.replace("\n\ndef build", f"\n\n{FACTOR.format(arguments)}\n\ndef build", 1))
    data = json.loads(json.dumps(record.own.to_data()))

    def evaluated():
        again = find_network("net.py:build")
        check_same_network(again, {"network": data}, "it")
        return build_model(again, BuildOptions((6, 6, 2), 3))

    evaluated()
    Path("factor.txt").write_text("2.1")
    error = "has layer 'scaled', which computes something else than it did in training"
    check_raises(ConfigurationError, error, "bring back what its function read", evaluated)
    started = find_network("net.py:build")
    build_model(started, BuildOptions((6, 6, 2), 3))
    assert started.own.changes_since(data, "it") == [f"net.py:build {error}"]


def test_settings_that_name_objects_for_keras_to_import_are_refused():
    def read(**settings):
        layers = [["dense", "Dense", {"units": 3, **settings}, ["input"]]]
        data = saved((8, 8, 1), *layers)
        return of_checkpoint("a", data, "checkpoint a", "").architecture["dense"].config

    def constant(value):
        return {"class_name": "Constant", "config": {"value": value}}

    evil = {"module": "evil", "class_name": "X"}
    for settings in (
        {"bias_initializer": constant(evil)},
        {"bias_initializer": constant([{"class_name": "__lambda__"}])},
        {"scale": {**evil, "config": {}}},
    ):
        check_raises(DataError, "which is no number, word or list of them", "", read, **settings)
    plain = {"bias_initializer": constant(0.5), "scale": [1.0, 2.0]}
    assert read(**plain) == {"units": 3, **plain}


@pytest.mark.parametrize("text", ["for name in ['build']: globals()[name] = f", "build: 'type' = f"])
def test_a_function_may_be_named_by_text_in_its_file(text):
    assert find_function(write(f"def f(*a): return 7\n{text}"), "build")() == 7


# --- .keras files


def test_keras_file_is_trained_like_its_function(run, succeeds):
    if int(keras.__version__.split(".")[0]) < 3:
        pytest.skip("Keras 2.6 writes no .keras files")
    function = find_function(write(NESTED), "build")
    function((8, 8, 1), 10).save("net.keras")
    record = find_network("net.keras")
    assert record.own.input_shape == (8, 8, 1) and record.num_classes == 10
    of_file = weights_of(build_model(record, BuildOptions((8, 8, 1), 10)))
    of_function = weights_of(build_model(find_network("net.py:build"), BuildOptions((8, 8, 1), 10)))
    assert sorted(map(np.shape, of_file.values())) == sorted(map(np.shape, of_function.values()))
    function((8, 8, 1), 10).save("net.h5")
    check_refused(
        run,
        Refusal(
            "train net.keras --weights net.keras --dataset digits --image-size 9", "takes images of 8x8x1"
        ),
        Refusal("train net.h5", "net.h5"),
    )
    out, _ = succeeds("models", "net.keras", "--summary")
    assert "base_separable_conv2d" in out
    succeeds("plan-splits", "net.keras", "--stages", 2, "--json")


# --- data


def opened(name):
    return open_dataset(choose_dataset(name, Path("."), home="none", task="classification"))


GOOD = """import numpy as np
r = np.random.default_rng(1)
i = np.uint8(r.integers(0, 256, (12, 8, 8)))
l = np.arange(12) % 3
"""


def load(text):
    Path("data.py").write_text(f"{GOOD}def load():\n    {text}\n")
    return opened("data.py:load")


def test_own_data_have_names_and_statistics():
    source = load("return (i, l), (i[:6], l[:6, None]), ['a', 'b', 'c']")
    assert source.info.image_shape == (8, 8, 1) and source.info.class_names == ("a", "b", "c")
    assert source.info.name == "data-load" and len(source.train) == 12 and len(source.eval) == 6
    assert source.info.mean[0] == pytest.approx(source.train.images.mean())
    assert load("return (i, l), (i, l)").info.class_names == ("0", "1", "2")


SOURCE = """
    from dataclasses import replace
    from ipucnn.datasets.base import ArrayExamples, DatasetInfo, DataSource, EncodedExamples, FileExamples
    whole = ArrayExamples(i[..., None], l)
    info = DatasetInfo("mine", "classification", 3, (8, 8, 1), 12, 12, ("a", "b", "c"), "here", (127.0,), (70.0,))
    files = FileExamples(("a.png",) * 12, l)
    return """


def test_own_data_source_is_accepted_and_its_labels_become_int32():
    source = load(SOURCE + "DataSource(info, whole, whole)")
    assert source.train.labels.dtype == np.int32 and source.info.class_names == ("a", "b", "c")
    named = "replace(whole, names=tuple(f'{n}.png' for n in range(12)))"
    source = load(SOURCE + f"DataSource(replace(info, own_split=True), {named}, whole)")
    assert source.train.names[3] == "3.png" and pool(source).names == () and len(pool(source)) == 24
    colour = "replace(info, image_shape=(None, None, 3), mean=(1.0,) * 3, std=(1.0,) * 3)"
    source = load(SOURCE + f"DataSource({colour}, files, files)")
    assert len(source.eval) == 12 and source.eval.labels.dtype == np.int32


def test_late_imports_of_a_function_are_resolved(tmp_path):
    Path("neighbour_of_net.py").write_text("FILTERS = 5\n")
    head = "def build(input_shape, num_classes):\n"
    text = RESIDUAL.replace(head, f"{head}    import neighbour_of_net\n")
    _, model = built(text.replace("layers.Conv2D(4,", "layers.Conv2D(neighbour_of_net.FILTERS,"))
    assert model.layers[1].filters == 5 and str(tmp_path) not in sys.path


def test_each_file_imports_the_modules_of_its_own_folder():
    """Also a file whose folder another one shares a name with, and also after an edit."""
    for folder, number in (("a", 1), ("b", 2)):
        os.mkdir(folder)
        Path(folder, "neighbour.py").write_text(f"NUMBER = {number}\n")
        Path(folder, "file.py").write_text("from neighbour import NUMBER\ndef number():\n    return NUMBER\n")
    assert [find_function(f"{folder}/file.py:number", "")() for folder in ("a", "b", "a")] == [1, 2, 1]
    Path("a", "neighbour.py").write_text("NUMBER = 10 + 1\n")
    assert [find_function(f"{folder}/file.py:number", "")() for folder in ("a", "b")] == [11, 2]
    assert "neighbour" not in sys.modules or sys.modules["neighbour"].NUMBER == 2


def test_an_installed_module_in_place_of_one_beside_the_file_is_refused():
    Path("types.py").write_text("NUMBER = 1\n")
    Path("net.py").write_text(
        "import types\ndef f():\n    return 2\ndef g():\n    import numpy as np, pytest\n"
    )
    assert find_function("net.py:f", "")() == 2  # Python's own modules come first for everybody
    Path("pytest.py").write_text("")
    check_raises(ConfigurationError, "imports pytest, which is ", "rename", find_function("net.py:f", ""))


def test_a_file_that_changes_the_current_folder_or_signals_moves_no_run():
    before = signal.getsignal(signal.SIGINT)
    os.mkdir("nets")
    Path("nets", "net.py").write_text(
        "import os\nos.chdir(os.path.dirname(__file__))\ndef f():\n    return os.getcwd()\n"
    )
    folder = os.getcwd()
    assert find_function("nets/net.py:f", "")() == os.path.join(folder, "nets")
    assert os.getcwd() == folder and signal.getsignal(signal.SIGINT) is before


def test_file_of_network_and_data_is_executed_once(capfd):
    """Keras 2.6 refuses classes that are registered twice, so the file must run once."""
    Path("both.py").write_text(
        f"{RESIDUAL}\n{GOOD}def load():\n    return (i, l), (i, l)\nprint('it is run')\n"
    )
    assert len(opened("both.py:load").train) == 12
    build_model(find_network("both.py:build"), BuildOptions((8, 8, 1), 3))
    assert capfd.readouterr().err.count("it is run") == 1


def test_own_data_are_verified(run):
    Path("data.py").write_text(f"{GOOD}def load():\n    return (i, l), (i[:6], l[:6]), ['a', 'b', 'c']\n")
    code, out, err = run("verify-dataset", "data.py:load", "--json")
    assert code == 3 and "leakage" in out, err  # evaluation images were trained on


# --- entry points


def test_packages_provide_networks_and_data(tmp_path, monkeypatch):
    (tmp_path / "offered.py").write_text(
        RESIDUAL + "\n" + GOOD + "def load():\n    return (i, l), (i, l)\n"
        "def quits():\n    raise SystemExit(0)\n"
    )
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ipucnn.models]\nmine-net = offered:build\nmine-gone = not_offered:build\ntwice = offered:build\n"
        "[ipucnn.datasets]\nmine-data = offered:load\nmine-quits = offered:quits\n"
    )
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[ipucnn.models]\ntwice = other.nets:build\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    os.mkdir("mine-net"), os.mkdir("mine-data")  # as in a package's source folder
    record = find_network("mine-net")
    assert build_model(record, BuildOptions((6, 6, 2), 3)).output.shape[-1] == 3
    two = "twice is offered by several installed packages: offered:build, other.nets:build"
    check_raises(
        ConfigurationError, two, "uninstall", build_model, find_network("twice"), BuildOptions((6, 6, 2), 3)
    )
    check_raises(ConfigurationError, "is a folder here, and", "--dataset ./mine-data", opened, "mine-data")
    os.rmdir("mine-data")
    assert opened("mine-data").info.name == "mine-data"
    hint = check_raises(ConfigurationError, "unknown model", "", find_network, "mine-nett").hint
    assert hint.startswith("did you mean 'mine-net'")
    check_raises(ConfigurationError, "mine-quits raised SystemExit: 0", "", opened, "mine-quits")
    gone, options = find_network("mine-gone"), BuildOptions((6, 6, 2), 3)
    error = check_raises(ConfigurationError, "", "", build_model, gone, options)
    assert error.message.endswith("No module named 'not_offered'")
    assert error.hint == "fix the package that offers it"
    with pytest.raises(ConfigurationError, match="row 1: mine-net is your own network"):
        parse_suite("rows:\n- benchmark mine-net\n", "suite.yml", "mine", parse_line)
    sys.modules.pop("offered", None)
    assert os.getcwd() == str(tmp_path)


# --- classes of the user's own


LIKE_KERAS = """
class {kind}(layers.Layer):
    def __init__(self, rate=0.5, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, x, training=None):
        return x * self.rate * (3 if training else 2)

    def get_config(self):
        return {{"rate": self.rate}}  # without the name

"""


@pytest.mark.parametrize(
    "kind",
    ["Dropout", "SpatialDropout2D", "BatchNormalization", "GroupNormalization", "Normalization", "Rescaling", "ReLU",
     "Conv2D", "Softmax"],
)  # fmt: skip
def test_a_class_called_like_one_of_keras_computes_what_it_says(kind):
    text = network(
        "x = layers.Conv2D(3, 3, name='conv')(images)",
        f"x = {kind}(0.25, name='mine')(x)",
        "x = layers.Conv2D(2, 1, name='conv2')(x)",
        end=f"    return keras.Model(images, {kind}(0.5, name='end')(layers.Flatten()(x)))\n",
    ).replace("\n\ndef build", LIKE_KERAS.format(kind=kind) + "\n\ndef build")
    record, model = built(text, classes=32)
    assert kind in [node.kind for node in read_blueprint(model).nodes]  # whose get_config leaves out the name
    assert (
        "2 layers" not in " ".join(record.own.notes)
        and f"mine ({kind}), end ({kind})" in record.own.notes[-1]
    )
    weights, images = weights_of(model), np.random.RandomState(1).uniform(size=(4, 6, 6, 2)).astype("float32")
    for training, factor in ((False, 2), (True, 3)):
        windows = [
            (images[:, i : i + 4, j : j + 4], weights["conv/kernel"][i, j])
            for i in range(3)
            for j in range(3)
        ]
        convolved = sum(part @ kernel for part, kernel in windows)
        x = (convolved + weights["conv/bias"]) * 0.25 * factor
        x = (x @ weights["conv2/kernel"][0, 0] + weights["conv2/bias"]).reshape(4, -1) * 0.5 * factor
        np.testing.assert_allclose(np.asarray(model(images, training=training)), x, rtol=1e-4, atol=1e-6)


def test_the_range_of_images_and_frozen_random_weights_are_said(report):
    """If no stock layer scales the images; --normalise chooses the range, and is not repeated."""
    frozen = network(
        "base = keras.Sequential([keras.Input(input_shape), layers.Conv2D(2, 3), layers.Conv2D(2, 3)], name='base')",
        "base.trainable = False",
        "x = base(images, training=False)",
    )
    words = ("--dataset", "digits", "--dry-run")
    notes = report("train", write(frozen), *words)["notes"]
    scaled, kept = (note.partition("net.py:build: ")[2] for note in notes)
    assert scaled == (
        "no layer of Keras scales its images, so they come in the range standard (minus the mean, over the standard "
        "deviation); --normalise raw gives pixels of 0..255, unit 0..1"
    )
    assert kept.startswith(
        "2 of 3 layers with weights are frozen with the random weights that the seed gives (base_conv2d"
    )
    plain = network("x = layers.Conv2D(2, 3)(images)")
    for name in ("unit", "tf", "raw", "torch", "image"):
        assert report("train", write(plain), *words, "--normalise", name)["notes"] == [], name
    rescaled = network("x = layers.Conv2D(2, 3)(layers.Rescaling(1 / 255)(images))")
    (note,) = report("train", write(rescaled), *words)["notes"]
    assert "it takes pixels of 0..255" in note


def test_a_class_that_extends_a_convolution_has_its_multiplications_and_no_regularizer():
    text = network("x = Scaled(4, 3)(images)").replace(
        "\n\ndef build",
        "\n\nclass Scaled(layers.Conv2D):\n    def call(self, x):\n        return super().call(x) * 2\n\n\ndef build",
    )
    record, model = built(text)
    assert count_macs(model) == 4 * 4 * 3 * 3 * 2 * 4 + 4 * 4 * 4 * 3
    mine = "class Conv2D(layers.Layer):\n    def build(self, shape):\n        self.add_weight(name='w', shape=(9, 9))\n"
    mine += "        super().build(shape)\n\n    def call(self, x):\n        return x\n"
    _, other = built(network("x = Conv2D()(images)").replace("\n\ndef build", f"\n\n{mine}\n\ndef build", 1))
    # An estimate: the layer has a matrix, but does not use it.
    assert count_macs(other) == 6 * 6 * 9 * 9 + 6 * 6 * 2 * 3
    assert not any("regularizer" in note for note in record.own.notes)


SCALE = "x = layers.Rescaling(1 / 255)(x)"


@pytest.mark.parametrize(
    ("lines", "scales"),
    [
        (["x = layers.Concatenate()([images, images])", SCALE], True),
        (["x = layers.Activation('linear')(images)", SCALE], True),
        (["x = layers.Add()([images, images])", "x = layers.Multiply()([x, images])", SCALE], True),
        (["x = layers.ReLU()(layers.Subtract()([images, layers.MaxPooling2D(1)(images)]))", SCALE], True),
        (["x = layers.Concatenate()([images, images])", "x = x / 255.0"], True),
        (
            ["x = layers.Rescaling(0.02)(images)", "x = layers.Add()([x, layers.Rescaling(0.03)(images)])"],
            True,
        ),
        (["x = layers.Conv2D(2, 1)(images)", SCALE], False),
        (["x = layers.Add()([images, layers.Conv2D(2, 1)(images)])", SCALE], False),
        (["x = layers.BatchNormalization()(images)", SCALE], False),
        (["x = layers.PReLU()(images)", SCALE], False),
    ],
)
def test_a_rescaling_scales_the_images_if_no_weights_come_before(lines, scales):
    record, _ = built(network(*lines))
    assert (record.own.first_rescaling is not None) == scales
    assert any("takes pixels of 0..255" in note for note in record.own.notes) == scales
    assert range_name("network", record) == ("raw" if scales else "standard")


@pytest.mark.parametrize("kind", PER_SAMPLE)
def test_layers_without_weights_are_those_of_keras(kind):
    arguments = {
        "Activation": ("relu",), "AveragePooling2D": (2,), "Conv2D": (2, 1), "Conv2DTranspose": (2, 1), "Dense": (2,),
        "DepthwiseConv2D": (1,), "Dropout": (0.5,), "GroupNormalization": (2,), "Permute": ((2, 1, 3),),
        "Rescaling": (2.0,), "Reshape": ((8, 4),), "SeparableConv2D": (2, 1), "SpatialDropout2D": (0.5,),
    }  # fmt: skip
    if not hasattr(layers, kind):
        pytest.skip("a layer of Keras 3")
    layer = getattr(layers, kind)(*arguments.get(kind, ()))
    num_inputs = (
        2 if kind in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract") else 1
    )
    images = [keras.Input((4, 4, 2)) for _ in range(num_inputs)]
    layer(images if num_inputs > 1 else images[0])
    assert (kind in WITH_WEIGHTS) == bool(layer.weights)


GREY = "class Grey(layers.Layer):\n    def call(self, x):\n        return x[..., :1]\n"


@pytest.mark.slow_cases("lines1", "lines2", "lines3")
@pytest.mark.parametrize(
    "lines",
    [
        ["x = Grey()(images)", SCALE],  # it may hand on pixels, or compute with weights
        ["x = layers.Add()([images, layers.Rescaling(0.1)(layers.ReLU()(images))])"],
        ["x = layers.Concatenate()([layers.Conv2D(2, 1)(images), layers.Rescaling(0.02)(images)])"],
        ["x = layers.Concatenate()([layers.Rescaling(0.02)(images), images])"],
        [
            "y = layers.Conv2D(2, 1)(Grey()(images))",
            "x = layers.Add()([layers.Conv2D(2, 1)(layers.Rescaling(0.02)(images)), y])",
        ],
    ],
)
def test_a_rescaling_of_a_part_of_the_way_is_ambiguous(lines, succeeds, lightly):
    text = network(*lines).replace("\n\ndef build", f"\n\n{GREY}\n\ndef build", 1)
    record, _ = built(text)
    check_raises(ConfigurationError, "may scale the images", "--normalise raw", range_name, "network", record)
    assert [range_name(name, record) for name in ("raw", "unit")] == ["raw", "unit"]
    # A run knows what its images were.
    words = ("--dataset", "digits", "--limit-train", 64, "--limit-eval", 9, "--num-epochs", 1)
    succeeds("train", write(text), *words, "--normalise", "unit", "--run-dir", "run")
    succeeds("evaluate", "run", *(("--model-name", write(text)) if "Grey" in lines[0] else ()))


@pytest.mark.parametrize(
    "line",
    [
        "layers.Rescaling(2.0, offset=-1.0)(images)",
        "images * 2.0 - 1.0",
        "layers.Rescaling([3.3, 4.1], offset=[-1.6, -1.9])(images)",
    ],
)
def test_a_scaling_of_images_of_0_to_1_is_none_of_pixels(line):
    record, _ = built(network(f"x = {line}"))
    hint = "--normalise unit if it takes 0..1"
    check_raises(ConfigurationError, "of pixels of 0..255, and", hint, range_name, "network", record)
    assert [range_name(name, record) for name in ("raw", "unit")] == ["raw", "unit"]
    assert not any("it takes pixels of 0..255" in note for note in record.own.notes)


@pytest.mark.parametrize(
    "line",
    ["layers.Rescaling(1 / 255)(images)", "images - 103.9", "layers.Rescaling(0.2, offset=-25.6)(images)"],
)
def test_a_scaling_that_suits_pixels_is_certain(line):
    """The second is Caffe's, and the third that of pixels about 128 with a deviation of 5."""
    assert range_name("network", built(network(f"x = {line}"))[0]) == "raw"


def test_a_layer_of_its_own_behind_a_rescaling_changes_nothing():
    lines = ["x = layers.Rescaling(0.02)(images)", "x = layers.Rescaling(0.03)(Grey()(x))"]
    record, _ = built(network(*lines).replace("\n\ndef build", f"\n\n{GREY}\n\ndef build", 1))
    assert range_name("network", record) == "raw"


def test_checkpoints_say_which_layer_scales_the_images():
    record, _ = built(network("x = layers.Concatenate()([images, images])", SCALE))
    data = record.own.to_data()
    assert data["scaled_by"] == "rescaling"
    read = of_checkpoint("net.py", json.loads(json.dumps(data)), "it", "")
    assert read.first_rescaling == "rescaling"
    check_raises(
        DataError,
        "no network that can be read",
        "",
        of_checkpoint,
        "net.py",
        {**data, "scaled_by": "x"},
        "it",
        "",
    )


def test_a_normalization_behind_a_rescaling_need_not_be_adapted():
    """As in Keras' EfficientNet without weights."""
    text = network(
        "x = layers.Normalization()(layers.Rescaling(1 / 255)(images))",
        "x = layers.Conv2D(2, 3, name='c')(x)",
    )
    record, model = built(text)
    assert record.own.first_rescaling is not None
    inner = keras.Model(model.input, model.get_layer("c").output)
    first = np.asarray(inner(np.full((1, 6, 6, 2), 255, np.float32)))[0, 0, 0]
    np.testing.assert_allclose(first, weights_of(model)["c/kernel"].sum((0, 1, 2)), rtol=1e-5)
