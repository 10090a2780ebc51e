"""Errors of the Poplar SDK: each recorded text is recognised, and no other.  Then the environment that it needs."""

import builtins
import csv
import json
import re
from pathlib import Path

import pytest

from ipucnn.errors import EXIT_DATA, EXIT_MISSING, ConfigurationError
from ipucnn.sessions.poplar import sdk_environment
from ipucnn.sessions.poplar.errors import CASES, ErrorContext, poplar_errors, translate, translate_output
from ipucnn.sessions.poplar.sdk_environment import (
    SdkEnvironment,
    check_requirements,
    problems,
    version_warnings,
)

FACTS = Path(__file__).resolve().parents[2] / "shared" / "poplar" / "api.json"

# Class and text of errors, recorded from the sources of graphcore/tensorflow r2.6 (SDK 3.4): poplar_executor.cc,
# poplar_compiler.cc, tools/poplar_util.cc, visitors/pipeline_visitor.cc, kernels/datastream/feeds.cc; and of those that
# Python raises while it imports the SDK.  Then the exit code, and words of message and hint.  A row without exit code
# is no error of the SDK, or has a class with which the SDK does not raise it.
with (Path(__file__).parent / "data" / "poplar_errors.csv").open(encoding="utf-8", newline="") as lines:
    ROWS = list(csv.DictReader(lines))
KNOWN, OTHERS = [r for r in ROWS if r["exit_code"]], [r for r in ROWS if not r["exit_code"]]


def raised(class_name, text):
    """Makes an exception of Python, or one with the name of a TensorFlow class: no test here needs TensorFlow."""
    kind = getattr(builtins, class_name, None) or type(class_name, (type("OpError", (Exception,), {}),), {})
    return kind(text.replace("\\n", "\n"))


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: f"{row['class']} {row['text'][:40]}")
def test_recorded_texts_are_recognised(row):
    cause = raised(row["class"], row["text"])
    with pytest.raises(Exception) as caught, poplar_errors():
        raise cause
    error = caught.value
    assert error.__cause__ is cause and error.exit_code == int(row["exit_code"])
    assert row["message"] in error.message and row["hint"] in error.hint
    assert "\n" not in error.message + error.hint


@pytest.mark.parametrize(
    "exception",
    [
        *(raised(row["class"], row["text"]) for row in OTHERS),
        # Errors for users and interrupts pass, whatever their text.
        ConfigurationError("[Poplar][Load engine]"),
        KeyboardInterrupt("Unable to open Poplar device"),
    ],
    ids=lambda exception: f"{type(exception).__name__} {str(exception)[:40]}",
)
def test_other_errors_pass_unchanged(exception):
    with pytest.raises(type(exception)) as caught, poplar_errors():
        raise exception
    assert caught.value is exception


def test_classes_derived_from_the_recorded_ones_count():
    error = type("Wrapped", (type(raised("InternalError", "")),), {})("Unable to open Poplar device")
    assert translate(error).exit_code == EXIT_MISSING


MEMORY = "[Poplar][Compile engine] graph_memory_allocation_error"
TILE = ": Out of memory on tile 7: 700 bytes used but tiles only have 350 bytes of memory"
DEPTH = "The number of iterations of the pipeline must be a multiple of 4, but it is 6"
ENGINE = "[Poplar][Execute engine] application_runtime_error: "
RESET, LOADING = "[Recovery action: IPU_RESET] x", "[Poplar][Load engine]"
DEVICE = "Could not find an available device for TensorFlow virtual device"


@pytest.mark.parametrize(
    ("class_name", "text", "context", "words"),
    [
        (
            "InternalError",
            MEMORY + TILE,
            {"memory_advice": lambda overuse: f"overuse {overuse}"},
            "overuse 2.0",
        ),
        ("InternalError", MEMORY, {"memory_advice": lambda overuse: None}, "--micro-batch-size"),
        ("FailedPreconditionError", DEPTH, {"training": False}, "use --steps-per-execution 4 or 8"),
        ("InternalError", ENGINE + "Pipeline depth is invalid", {"training": False}, "--steps-per-execution"),
        ("InternalError", DEVICE, {}, "of 16 IPUs"),
        ("InvalidArgumentError", "No device matches the requested configuration", {}, "of 16 IPUs"),
        ("InternalError", ENGINE + RESET, {"fp_exceptions": True}, "--loss-scaling"),
        ("InternalError", LOADING, {"kept_remotely": ["offload_activations"]}, "buffers supported"),
    ],
)
def test_facts_of_the_run_improve_errors(class_name, text, context, words):
    assert words in str(translate(raised(class_name, text), ErrorContext(**{"num_ipus": 16, **context})))


def test_output_of_an_aborted_process_is_recognised():
    text = "F poplar_executor.cc:992] An infeed dataset iterator has failed with status OUT_OF_RANGE\nAborted"
    assert translate_output(text).exit_code == EXIT_DATA
    text = "ImportError: libpoplar.so: cannot open shared object file"
    assert translate_output(text).exit_code == EXIT_MISSING
    assert translate_output("Illegal instruction (core dumped)") is None


def test_each_pattern_is_unique():
    patterns = [case.pattern for case in CASES]
    assert len(set(patterns)) == len(patterns)


# Recorded cases that stay tracebacks: only a fault in ipucnn's own calls can cause them.
OWN_FAULTS = {
    "system never configured",
    "get_ipu_config without configuration",
    "wrong IPUConfig value or name",
    "duplicate infeed name or unknown TF_POPLAR_FLAGS",
}


@pytest.mark.skipif(not FACTS.exists(), reason="the recorded facts are not here")
def test_every_recorded_case_is_handled_or_exempt():
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    texts = [row["text"] for row in KNOWN]
    for case in facts["exceptions"]["cases"]:
        if case["case"] in OWN_FAULTS or case["regex"] is None or case["class"] == "process abort":
            continue
        examples = [text for text in texts if re.search(case["regex"], text)]
        assert examples, case["case"]
        for text in examples:
            class_name = case["class"].split()[0]
            assert translate(raised(class_name, text)) is not None, case["case"]
        for pattern in case.get("text_regex", ()):
            assert any(re.search(pattern, text) for text in texts), pattern
    assert set(sdk_environment.FLAGS) == set(facts["environment"]["TF_POPLAR_FLAGS"]["flags"])


SDK = SdkEnvironment(
    python=(3, 8),
    versions={
        "tensorflow": "2.6.3+gc3.3.0+251580+08d96978c7f+intel_skylake512",
        "keras": "2.6.0+gc3.3.0+251582+a3785372",
        "numpy": "1.19.5",
        "ipu-tensorflow-addons": "2.6.3+gc3.3.0",
    },
    has_ipu_package=True,
    has_keras_ipu=True,
    modules=("popdist", "libpvti", "popef"),
    variables={
        "POPLAR_SDK_ENABLED": "/opt/poplar_sdk-ubuntu_20_04-3.3.0+1403-208/poplar-ubuntu_20_04-3.3.0+7857-b6"
    },
    cpu_flags=("sse4_2", "avx2", "avx512f"),
)


def changed(**changes):
    """Returns the sound environment with other fields, versions (in lower case) and variables (in upper case)."""
    versions, variables = dict(SDK.versions), dict(SDK.variables)
    for name in [name for name in changes if name in versions or name.isupper()]:
        (variables if name.isupper() else versions)[name] = changes.pop(name)
    return SdkEnvironment(**{**vars(SDK), "versions": versions, "variables": variables, **changes})


def test_sound_sdk_has_no_problems():
    flags = "--use_on_demand --executable_cache_path='/a b' "
    for system in (SDK, changed(TF_POPLAR_FLAGS=flags), changed(POPLAR_SDK_ENABLED="/opt/poplar")):
        assert not [*problems(system), *version_warnings(system)]
        check_requirements(system)
        assert sdk_environment.sdk_version(system) == "3.3.0"


SDK_AT = "/x/poplar-ubuntu_20_04-{}+1-a"


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"python": (3, 10)}, "Python 3.10", "python3.8"),
        ({"numpy": None}, "numpy is not installed", "numpy==1.19.5"),
        ({"has_keras_ipu": False}, "no keras.ipu", "keras wheel"),
        ({"has_keras_ipu": False, "keras": "3.1.0"}, "keras 3.1.0 is not", "keras wheel"),
        ({"POPLAR_SDK_ENABLED": ""}, "not enabled", "source"),
        ({"modules": ("popdist",)}, "libpvti, popef", "source"),
        ({"TF_POPLAR_FLAGS": "--use_ipu_model --executable_cache=/x"}, "--executable_cache", "did you"),
        ({"TF_POPLAR_FLAGS": "--save_vertex_graph"}, "--save_vertex_graph", "TF_POPLAR_FLAGS"),
        ({"TF_POPLAR_FLAGS": "--use_on_demand true"}, "true is no flag", "--name=value"),
        ({"TF_POPLAR_FLAGS": "-use_ipu_model"}, "-use_ipu_model is no flag", "--name"),
        ({"TF_POPLAR_FLAGS": "flags.txt"}, "a file of flags", "--name=value"),
        ({"TF_POPLAR_FLAGS": "--show_progress_bar=no"}, "abort", "true, false or auto"),
        ({"TF_POPLAR_FLAGS": "--use_on_demand", "POPLAR_SDK_ENABLED": SDK_AT.format("3.1.0")}, "3.2", "take"),
        ({"cpu_flags": ("avx2",)}, "AVX-512", "amd_znver1"),
        ({"has_ipu_package": False}, "installed over it", "--force-reinstall"),
        ({"has_ipu_package": False, "tensorflow": "2.21.0"}, "2.21.0 is not", "wheels"),
        ({"has_ipu_package": False, "tensorflow": None}, "not installed", "wheels"),
    ],
)
def test_broken_requirements_are_reported(changes, message, hint):
    (error,) = problems(changed(**changes))
    assert message in error.message and hint in error.hint
    with pytest.raises(type(error), match=re.escape(error.message)):
        check_requirements(changed(**changes))


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"numpy": "1.24.4"}, "numpy 1.24.4", "numpy==1.19.5"),
        ({"keras": "2.9.0+gc3.5"}, "keras 2.9.0+gc3.5", "keras wheel"),
        ({"POPLAR_SDK_ENABLED": SDK_AT.format("2.6.0")}, "SDK 2.6.0", "3.0 to 3.4"),
        ({"POPLAR_SDK_ENABLED": SDK_AT.format("3.5.0")}, "SDK 3.5.0", "3.0 to 3.4"),
    ],
)
def test_doubtful_environments_are_only_warnings(changes, message, hint):
    system = changed(**changes)
    check_requirements(system)
    (doubt,) = version_warnings(system)
    assert message in doubt.message and hint in doubt.hint
