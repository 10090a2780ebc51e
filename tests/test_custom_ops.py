"""The C++ of the custom operations, compiled against a few lines of the Poplar interface and run on the host."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
SOURCES, HEADERS = ROOT / "custom_ops", ROOT / "tests" / "poplar_headers"
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not here")
needs_sdk = pytest.mark.skipif(
    not os.environ.get("POPLAR_SDK_ENABLED"), reason="the Poplar SDK, with its headers, is not here"
)


@pytest.fixture(scope="module")
def crop_program(tmp_path_factory):
    """Compiles the program that runs an operation on the host."""
    path = tmp_path_factory.mktemp("custom_ops") / "run_crop"
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", f"-I{SOURCES}"]
    subprocess.run([*command, str(HEADERS / "run_crop.cpp"), "-o", str(path)], check=True)
    return path


def run(crop_program, operation, attributes, values):
    """Returns (output, input afterwards, metadata), or the error's text."""
    words = [
        operation,
        attributes.replace(" ", ","),
        *map(str, values.shape),
        *map(repr, values.ravel().tolist()),
    ]
    done = subprocess.run([str(crop_program)], input=" ".join(words), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.stdout.strip()
    sizes, elements, before, metadata = done.stdout.strip().split("\n")
    output = np.array(elements.split(), "float32").reshape([int(n) for n in sizes.split()])
    return (
        output,
        np.array(before.split(), "float32").reshape(values.shape),
        [int(n) for n in metadata.split()],
    )


@needs_compiler
@tries(8, slow=25)
@given(data=st.data())
def test_crop_and_pad(crop_program, data):
    top, left, bottom, right = (data.draw(st.integers(0, 2)) for _ in range(4))
    batch, height, width, channels = (data.draw(st.integers(1, 3)) for _ in range(4))
    whole_height, whole_width = height + top + bottom, width + left + right
    attributes = f"1 {top} {left} {bottom} {right} {whole_height} {whole_width}"
    whole = np.arange(1, 1 + batch * whole_height * whole_width * channels, dtype="float32")
    whole = whole.reshape(batch, whole_height, whole_width, channels)
    part, before, metadata = run(crop_program, "CropNHWC", attributes, whole)
    expected = np.array(
        [[[whole[n, y + top, x + left] for x in range(width)] for y in range(height)] for n in range(batch)]
    )
    np.testing.assert_array_equal(part, expected)
    np.testing.assert_array_equal(before, whole)
    # API level 5; nothing allocated, replica-identical or aliased; not elementwise; stateless and hashable.
    assert metadata == [5, 0, 0, 0, 0, 1, 1]
    padded, before, metadata = run(crop_program, "PadNHWC", attributes, part)
    frame = np.zeros_like(whole)
    frame[:, top : top + height, left : left + width] = part
    np.testing.assert_array_equal(padded, frame)
    np.testing.assert_array_equal(before, part)
    assert metadata == [5, 0, 0, 0, 0, 1, 1]


@needs_compiler
@pytest.mark.parametrize(
    ("operation", "attributes", "message"),
    [
        ("CropNHWC", "2 0 0 0 0 3 3", "build it again"),
        ("CropNHWC", "1 0 0 0 0 3", "build it again"),
        ("CropNHWC", "1 -1 0 0 0 3 3", "build it again"),
        ("CropNHWC", "none", "build it again"),
        ("CropNHWC", "1 0 0 0 0 4 3", "another size"),
        ("CropNHWC", "1 2 0 1 0 3 3", "nothing is left"),
        ("PadNHWC", "1 1 1 1 1 3 3", "another size"),
    ],
)
def test_inconsistent_sizes_and_versions_are_refused(crop_program, operation, attributes, message):
    assert message in run(crop_program, operation, attributes, np.ones((1, 3, 3, 1)))


@pytest.mark.slow
@needs_compiler
def test_the_makefile_builds_a_library(tmp_path):
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not here")
    environment = {k: v for k, v in os.environ.items() if k not in ("POPLAR_SDK_ENABLED", "MAKEFLAGS")}
    refused = subprocess.run([make, "-C", str(SOURCES)], env=environment, stderr=subprocess.PIPE)
    assert refused.returncode != 0
    assert b"not enabled in this shell" in refused.stderr
    settings = [f"POPLAR_HEADERS={HEADERS}", f"BUILD={tmp_path / 'out'}", "CXXFLAGS=-O0"]
    subprocess.run(
        [make, "-C", str(SOURCES), *settings], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    import ctypes

    from ipucnn.models.custom_ops import CROP_LIBRARY

    library = ctypes.CDLL(str(tmp_path / "out" / CROP_LIBRARY))
    assert ctypes.c_int32.in_dll(library, "custom_op_api_level").value == 5
    for name in ("CropNHWC", "CropNHWC_metadata", "PadNHWC", "PadNHWC_metadata"):
        assert hasattr(library, name)


@needs_sdk
def test_the_library_builds_with_the_sdk(tmp_path):
    subprocess.run(["make", "-C", str(SOURCES), f"BUILD={tmp_path / 'out'}"], check=True)
    import ctypes

    library = ctypes.CDLL(str(tmp_path / "out" / "libipucnn_crop.so"))
    assert ctypes.c_int32.in_dll(library, "custom_op_api_level").value == 5
