"""The registry: look-up, patterns, legal sizes; without TensorFlow."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import check_raises

from ipucnn.datasets.pixels import INPUT_RANGES
from ipucnn.errors import ConfigurationError
from ipucnn.models.registry import (
    MODELS,
    get_model,
    list_models,
    natural_key,
    nearest_legal_sizes,
    output_shape,
    validate_input_shape,
)

NAMES = [record.name for record in list_models()]


@pytest.mark.parametrize("spelling", ["Cifar-ResNet8", "cifar_resnet8", "CIFAR_RESNET8", " cifar-resnet8 "])
def test_case_and_dashes_do_not_matter(spelling):
    assert get_model(spelling).name == "cifar_resnet8"


def test_unknown_model_suggests_the_closest():
    check_raises(ConfigurationError, "resnet-5O", "resnet50", get_model, "resnet-5O")
    check_raises(ConfigurationError, "", "ipucnn models", get_model, "zzzz")


def test_patterns_and_natural_order():
    names = [r.name for r in list_models("resnet*[0-9]") if not r.name.endswith("v2")]
    assert names == ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    assert [r.name for r in list_models("cifar-resnet?")] == ["cifar_resnet8"]
    assert list_models("nothing*") == []


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=6))
def test_natural_order_is_numeric(numbers):
    names = [f"net{n}_x" for n in numbers]
    assert sorted(names, key=natural_key) == [f"net{n}_x" for n in sorted(numbers)]


def test_records_are_complete_and_their_names_differ():
    assert len(list_models()) == len(MODELS)
    for record in MODELS:
        assert record.task in ("classification", "segmentation")
        assert record.input_range in INPUT_RANGES and record.default_norm in record.norms
        assert "19" in record.paper or "20" in record.paper or record.name.startswith("toy_model")
        validate_input_shape(record, record.input_shape)
        validate_input_shape(record, (record.min_size, record.min_size, 3))


def test_the_registry_imports_no_tensorflow():
    code = (
        "import sys; from ipucnn.models.registry import list_models; import ipucnn.models.build, "
        "ipucnn.models.counts, ipucnn.models.imagenet, ipucnn.commands.models; list_models();"
        "sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.sampled_from(NAMES), st.integers(1, 800), st.integers(1, 800))
def test_nearest_legal_sizes_are_legal_and_near(name, height, width):
    record = get_model(name)
    try:
        validate_input_shape(record, (height, width, 3))
        refused = False
    except ConfigurationError as error:
        refused = True
        assert "nearest legal" in error.hint
    nearest = [nearest_legal_sizes(record, size) for size in (height, width)]
    assert refused == (nearest != [[height], [width]])
    for size, legal_sizes in zip((height, width), nearest):
        for legal in legal_sizes:
            validate_input_shape(record, (legal, legal, 3))
            assert legal >= record.min_size
            assert abs(legal - size) <= max(record.size_step, record.min_size - size + record.size_step)


@pytest.mark.parametrize(
    ("name", "shape", "error", "hint"),
    [
        ("unet", (256, 252, 1), "height 256", "252 or 268"),
        ("xception", (32, 32, 3), "71", ""),
        ("unet", (252, 252), "", ""),
        ("vgg16", (32, 32, 5), "", ""),
    ],
)
def test_errors_of_illegal_shapes_name_legal_ones(name, shape, error, hint):
    check_raises(ConfigurationError, error, hint, validate_input_shape, get_model(name), shape)


def test_output_shape():
    unet = get_model("unet")
    assert output_shape(unet, (572, 572, 1)) == (388, 388)
    assert output_shape(unet, (252, 268, 1)) == (68, 84)
    assert output_shape(get_model("resnet50"), (224, 224, 3)) is None
