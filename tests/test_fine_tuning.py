"""``--freeze`` and ``--weights``: chosen layers, refused values, unchanged weights, and names of new classes."""

import json
import math

import numpy as np
import pytest
from support.data_sets import write_class_folders
from support.refusals import Refusal, check_raises, check_refused
from support.trained_runs import train

from ipucnn.config.values import BadValue, parse_freeze
from ipucnn.errors import ConfigurationError
from ipucnn.models.build import layers_to_freeze

NAMES = ("conv1", "bn1", "block1_conv", "block1_bn", "block2_conv", "head")


@pytest.mark.parametrize(
    "typed, chosen",
    [
        ("1", NAMES[:1]),
        ("5", NAMES[:5]),
        ("backbone", NAMES[:5]),
        ("block1*", NAMES[2:4]),
        ("head,conv?", ("conv1", "head")),
        ("*bn*,bn1", ("bn1", "block1_bn")),
        ("block[12]_conv", ("block1_conv", "block2_conv")),
    ],
)
def test_frozen_layers_are_in_the_order_of_the_network(typed, chosen):
    assert layers_to_freeze(parse_freeze(typed), NAMES, "net") == chosen


@pytest.mark.parametrize(
    "typed, error, hint",
    [
        ("block3*", "no layer of net that has weights is called so", "block1_bn"),
        ("conv1,Head", "--freeze Head: no layer", "'head'"),
        ("zzz", "no layer", "`ipucnn models net --summary`"),
        ("*", "freezes all 6 layers of net that have weights: nothing is left to train", "from 1 to 5"),
        ("6", "nothing is left to train", "--freeze backbone"),
        ("1000000", "nothing is left to train", "--freeze backbone"),
    ],
)
def test_freezing_no_layer_or_all_layers_is_refused(typed, error, hint):
    check_raises(ConfigurationError, error, hint, layers_to_freeze, parse_freeze(typed), NAMES, "net")


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "a,,b", ",", ""])
def test_values_that_name_no_layers_are_refused(value):
    with pytest.raises(BadValue):
        parse_freeze(value)


def test_a_yaml_number_is_a_number_of_layers():
    assert parse_freeze(7) == "7" and parse_freeze(" a*, b ") == "a*,b"


@pytest.mark.slow_cases("mobilenet", "unet")
@pytest.mark.parametrize("name", ["cifar_resnet8", "mobilenet", "unet"])
def test_shipped_layers_equal_those_of_the_built_network(name):
    """The check before TensorFlow is imported and the check of the built network name the same layers."""
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.registry import get_model
    from ipucnn.planning.graphs.extract import layer_graph

    record = get_model(name)
    options = (
        BuildOptions((188, 188, 1), 4, base_filters=4) if name == "unet" else BuildOptions((32, 32, 3), 4)
    )
    graph = layer_graph(record, options)
    built = [layer.name for layer in build_model(record, options).layers if layer.weights]
    assert [x.name for x in graph.layers if x.num_parameters and "/" not in x.name] == built


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """Writes pictures of three classes into folders, as users have them."""
    folder = tmp_path_factory.mktemp("colours")
    write_class_folders(folder, {("", name): 12 for name in ("blue", "green", "red")}, lambda k: (12, 12))
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Trains a run of another data set with ten classes."""
    line = "toy_model_bn --dataset random --limit-train 32 --limit-eval 8 --num-epochs 1 --seed 1"
    return train(tmp_path_factory.mktemp("pretrained") / "run", line)


FINE = ("train", "toy_model_bn", "--num-epochs", "2", "--seed", "3", "--lr-schedule", "const")


@pytest.mark.slow
def test_a_fine_tuned_run_keeps_frozen_weights_and_has_new_class_names(
    run, report, colours, pretrained, tmp_path
):
    from ipucnn.training.checkpoints import load_checkpoint

    data = ("--dataset", "imagefolder", "--dataset-path", str(colours))
    words = (*FINE, *data, "--weights", str(pretrained), "--freeze", "backbone")
    code, _, err = run(*words, "--run-dir", "fine")
    assert code == 0, err
    notes = " ".join(err.split())
    assert (
        "with a new head for 3 classes" in notes
        and "4 layers frozen: conv2d_0, bn_0, conv2d_1, bn_1" in notes
    )
    program = json.loads((tmp_path / "fine" / "program.json").read_text())
    per_epoch = program["weight_updates_per_epoch"]
    few = f"{2 * per_epoch} weight updates, and it may need about 200: --num-epochs {math.ceil(200 / per_epoch)}"
    assert few in notes
    assert any(few in note for note in json.loads((tmp_path / "fine" / "report.json").read_text())["notes"])
    before = load_checkpoint(pretrained / "checkpoints" / "last.npz")
    after = load_checkpoint(tmp_path / "fine" / "checkpoints" / "last.npz")
    head = list(after.weights)[-1].split("/")[0]
    assert program["frozen_layers"] == list(dict.fromkeys(n.split("/")[0] for n in before.weights))[:-1]
    for name, value in after.weights.items():
        if name.split("/")[0] != head:
            np.testing.assert_array_equal(value, before.weights[name], err_msg=name)
    assert {name.split("/")[0] for name in after.slots} <= {head, "loss_scale"}
    # All outputs have the class names of the new data.
    assert list(after.meta["class_names"]) == ["blue", "green", "red"]
    assert {"blue", "green", "red"} == {row["name"] for row in report("evaluate", "fine")["classes"]}
    (result,) = report("infer", "fine", colours / "red" / "0.png")["results"]
    assert {each["label"] for each in result["predictions"]} == {"blue", "green", "red"}
    code, _, err = run("evaluate", "fine", "--report")
    page = (tmp_path / "fine" / "report.html").read_text(encoding="utf-8")
    assert code == 0 and all(name in page for name in ("blue", "green", "red")), err

    # A run that ended after its first epoch and is resumed has the same bytes.
    code, _, err = run(*words, "--num-epochs", "1", "--run-dir", "cut")
    assert code == 0, err
    code, _, err = run("train", "--resume", "--run-dir", "cut", "--num-epochs", "2")
    assert code == 0, err
    cut = load_checkpoint(tmp_path / "cut" / "checkpoints" / "last.npz")
    for expected, actual in ((after.weights, cut.weights), (after.slots, cut.slots)):
        assert list(expected) == list(actual)
        assert all(np.array_equal(expected[name], actual[name]) for name in expected)
    # A resumed run cannot freeze other layers.
    command = "train --resume --run-dir cut --freeze 1 --num-epochs 3"
    check_refused(run, Refusal(command, "--freeze 1: the run in cut has backbone"))


@pytest.mark.slow
def test_unsuitable_weights_and_layers_are_refused(run, colours, pretrained):
    data = ["--dataset", "imagefolder", "--dataset-path", colours, "--run-dir", "x"]
    start = ["--weights", pretrained]
    new = "which is new: the weights are of other classes"
    other = "the weights are of toy_model_bn, not of "
    again = f"ipucnn train toy_model_bn --dataset imagefolder --dataset-path {colours} --weights {pretrained}"
    check_refused(
        run,
        Refusal(
            [*FINE, *data, "--freeze", 1],
            "--freeze 1 without --weights: these layers would keep random numbers",
        ),
        Refusal([*FINE, *data, *start, "--freeze", "dense*"], new, "backbone"),
        Refusal(
            ["train", "cifar_resnet8", "--num-epochs", 1, *data, *start, "--freeze", 1],
            f"{other}cifar_resnet8",
            again,
            3,
        ),
        Refusal(["train", "lenet", *data, *start], f"{other}lenet", again, 3),
    )
