"""What the registry records, and the canonical names, against the built models.

``python tests/test_models_catalogue.py`` writes the name file again.
"""

import hashlib
import json
from pathlib import Path

import pytest

from ipucnn.errors import MissingError
from ipucnn.models.registry import get_model, list_models

NAMES_FILE = Path(__file__).parent / "data" / "models_names.json"
FAST = [
    "toy_model",
    "mnist_cnn",
    "lenet",
    "cifar_resnet8",
    "resnet18",
    "resnet50",
    "efficientnet-b0",
    "efficientnet-b0-g16",
    "mobilenet",
    "mobilenetv3-small",
    "densenet121",
    "unet",
]
# Written out in full in the name file, for people; the others are there as a digest.
IN_FULL = [
    "cifar_resnet8",
    "cifar_resnet56",
    "resnet50",
    "efficientnet-b0",
    "mobilenetv3-small",
    "unet",
    "lenet",
    "mnist_cnn",
    "toy_model",
]

# Trainable parameters in millions as published (papers, torchvision, Keras documentation).
PUBLISHED = {
    "lenet": 61_706,
    "mnist_cnn": 34_826,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet50-keras": 25_583_592,
    "resnext101_32x4d": 44_177_704,
    "efficientnet-b0": 5_288_548,
    "efficientnet-b1": 7_794_184,
    "efficientnet-b4": 19_341_616,
    "efficientnet-b7": 66_347_960,
    "efficientnetv2-s": 21_458_488,
    "densenet121": 7_978_856,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "mobilenetv2": 3_504_872,
    "mobilenet": 4_231_976,
    "inceptionv3": 23_817_352,
    "xception": 22_855_952,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
# Multiply-accumulates in units of 1e9 as published, and how closely: papers count a little differently.
PUBLISHED_MACS = {
    "resnet18": 1.81,
    "resnet34": 3.66,
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "resnet50-keras": 3.86,
    "resnext101_32x4d": 7.99,
    "efficientnet-b0": 0.39,
    "efficientnet-b1": 0.69,
    "efficientnet-b7": 37.75,
    "densenet121": 2.83,
    "mobilenetv2": 0.30,
    "mobilenet": 0.569,
    "vgg16": 15.47,
    "inceptionv3": 5.71,
}


def build_at_home(name):
    from ipucnn.models.build import BuildOptions, build_model

    record = get_model(name)
    return build_model(record, BuildOptions(record.input_shape, record.num_classes))


def describe(names):
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return {"num_layers": len(names), "sha256": digest}


def check(name):
    from ipucnn.models.arithmetic import count_macs, count_parameters
    from ipucnn.models.names import canonical_names

    record = get_model(name)
    try:
        model = build_at_home(name)
    except MissingError as error:
        assert record.requires is not None
        pytest.skip(error.message)
    assert count_parameters(model) == record.parameters
    assert count_macs(model) == record.macs
    names = canonical_names(model)
    assert names[0] == "input"
    expected = json.loads(NAMES_FILE.read_text())[name]
    assert names == expected.get("names", names)
    assert describe(names) == {key: expected[key] for key in ("num_layers", "sha256")}


@pytest.mark.parametrize("name", FAST)
def test_recorded_counts_and_names_are_the_built_models(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [r.name for r in list_models() if r.name not in FAST])
def test_recorded_counts_and_names_are_the_built_models_rest(name):
    check(name)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_recorded_parameters_are_the_published_ones(name):
    assert get_model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(PUBLISHED_MACS))
def test_recorded_macs_are_the_published_ones(name):
    assert get_model(name).macs / 1e9 == pytest.approx(PUBLISHED_MACS[name], rel=0.015)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [r.name for r in list_models(exclude=["*net1*", "*net2*", "*net3*", "*b[1-7]*", "*-[ml]", "vgg19"])],
)
def test_the_smallest_input_builds(name):
    from ipucnn.models.build import BuildOptions, build_model

    record = get_model(name)
    try:
        model = build_model(record, BuildOptions((record.min_size, record.min_size, 3), 2))
    except MissingError as error:
        pytest.skip(error.message)
    assert model.output_shape[-1] == 2 and all(n is None or n > 0 for n in model.output_shape)


# Split points of public IPU configurations for these networks.
PUBLIC_SPLITS = {
    "cifar_resnet8": [f"conv{i}_block1_post_addition_relu" for i in (2, 3, 4)],
    "resnet50": [
        "conv2_block2_out",
        "conv3_block1_out",
        "conv4_block2_out",
        "conv2_block1_out",
        "conv4_block4_out",
    ],
    "unet": ["encoder_block_1_maxpooling", "decoder_block_0_transpose"],
    "efficientnet-b0": [
        "block3a_expand_conv",
        "block2b_expand_conv",
        "block4a_expand_conv",
        "block6a_expand_conv",
    ],
}


@pytest.mark.parametrize("name", sorted(PUBLIC_SPLITS))
def test_public_split_points_are_layer_names(name):
    assert set(PUBLIC_SPLITS[name]) <= set(json.loads(NAMES_FILE.read_text())[name]["names"])


def test_public_split_points_of_the_deepest_cifar_resnet():
    names = json.loads(NAMES_FILE.read_text())["cifar_resnet56"]["names"]
    assert {"conv2_block4_post_addition_relu", "conv3_block4_post_addition_relu"} <= set(names)


if __name__ == "__main__":
    from ipucnn.models.names import canonical_names

    table = {}
    for one in list_models():
        layer_names = canonical_names(build_at_home(one.name))
        table[one.name] = describe(layer_names)
        if one.name in IN_FULL:
            table[one.name]["names"] = layer_names
    NAMES_FILE.write_text(json.dumps(table, indent=1) + "\n")
