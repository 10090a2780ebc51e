"""Errors of the Poplar SDK: each recorded text is recognised, and no other."""

import json
import re
from pathlib import Path

import pytest

from ipucnn.errors import (
    EXIT_DATA,
    EXIT_INFEASIBLE,
    EXIT_MISSING,
    EXIT_USAGE,
    ConfigurationError,
    MissingError,
)
from ipucnn.sessions.poplar import surroundings
from ipucnn.sessions.poplar.errors import (
    CASES,
    ErrorContext,
    poplar_errors,
    translate,
    translate_output,
)
from ipucnn.sessions.poplar.surroundings import Surroundings, check_requirements, doubts, problems

FACTS = Path(__file__).resolve().parents[2] / "shared" / "poplar" / "api.json"


def raised(class_name, text, base=Exception):
    """Makes an exception with the name of a TensorFlow class, so that tests do not need TensorFlow."""
    operation_error = type("OpError", (base,), {})
    return type(class_name, (operation_error,), {})(text)


# Class and text recorded from the sources of graphcore/tensorflow r2.6 (SDK 3.4): poplar_executor.cc,
# poplar_compiler.cc, tools/poplar_util.cc, visitors/pipeline_visitor.cc, kernels/datastream/feeds.cc.  Then the exit
# code, and the words that message and hint contain.
RECORDED = [
    (
        "InternalError",
        "[Poplar][Compile engine] graph_memory_allocation_error: Out of memory on tile 1340: 701188 bytes used but "
        "tiles only have 638976 bytes of memory",
        EXIT_INFEASIBLE,
        "tile 1340 needs 701,188 bytes and has 638,976",
        "plan-splits",
    ),
    (
        "InternalError",
        "in user code:\n\n  file.py:3 step\n  [Poplar][Build graph] graph_memory_allocation_error: something else",
        EXIT_INFEASIBLE,
        "does not fit",
        "--micro-batch-size",
    ),
    (
        "InternalError",
        "Out of memory: Cannot fit all variable data onto one or more tiles",
        EXIT_INFEASIBLE,
        "does not fit",
        "--recomputation",
    ),
    (
        "InternalError",
        "[Poplar][Build graph] invalid_option: availableMemoryProportion must be in (0, 1]",
        EXIT_USAGE,
        "availableMemoryProportion must be in (0, 1]",
        "POPLAR_ENGINE_OPTIONS",
    ),
    (
        "UnknownError",
        "[Poplar][Compile engine] invalid_option: target.nonsense",
        EXIT_USAGE,
        "target.nonsense",
        "POPLAR_ENGINE_OPTIONS",
    ),
    (
        "InternalError",
        "[Poplar][Execute engine] application_runtime_error: [Recovery action: IPU_RESET] Tiles in excepted state. "
        "IPU will be reset before the next execution.",
        EXIT_USAGE,
        "Tiles in excepted state",
        "label",
    ),
    (
        "InternalError",
        "[Poplar][Execute engine] application_runtime_error: Pipeline depth is invalid",
        EXIT_USAGE,
        "does not fill the pipeline",
        "--gradient-accumulation-count",
    ),
    *(
        (
            "InternalError",
            f"[Poplar][Execute engine] recoverable_runtime_error: [Recovery action: {action}] parity",
            EXIT_MISSING,
            action,
            hint,
        )
        for action, hint in (
            ("IPU_RESET", "gc-reset"),
            ("LINK_RESET", "links"),
            ("PARTITION_RESET", "vipu reset partition"),
            ("FULL_RESET", "administrator"),
        )
    ),
    (
        "InvalidArgumentError",
        "Target configuration failed: model disabled and no hardware IPU found. (Are you sure you enabled Poplar?)",
        EXIT_MISSING,
        "no IPU is visible",
        "ipucnn doctor",
    ),
    (
        "FailedPreconditionError",
        "Unsupported number of IPUs requested - could not find an IPU device with 16 IPUs for the device ordinal 0",
        EXIT_MISSING,
        "device of 16 IPUs",
        "fewer replicas",
    ),
    (
        "InternalError",
        "Could not find an available device for TensorFlow virtual device /device:IPU:0",
        EXIT_MISSING,
        "others use them",
        "--on-demand",
    ),
    (
        "InternalError",
        "Timed out trying to find an available device",
        EXIT_MISSING,
        "became free",
        "gc-monitor",
    ),
    (
        "InvalidArgumentError",
        "No device matches the requested configuration",
        EXIT_MISSING,
        "matches what was asked for",
        "ipucnn doctor",
    ),
    ("InternalError", "Unable to open Poplar device", EXIT_MISSING, "driver", "service"),
    (
        "FailedPreconditionError",
        "'executable_cache_path' in 'TF_POPLAR_FLAGS' has not been set",
        EXIT_USAGE,
        "compiling without IPUs",
        "--executable_cache_path",
    ),
    (
        "FailedPreconditionError",
        "The number of iterations of the pipeline must be a multiple of 8, but it is 12.",
        EXIT_USAGE,
        "12 accumulated micro-batches",
        "--gradient-accumulation-count 8 or 16",
    ),
    (
        "FailedPreconditionError",
        "The number of iterations of the pipeline must be a multiple of 8, but it is 3.",
        EXIT_USAGE,
        "the 8 that the pipeline needs",
        "use --gradient-accumulation-count 8",
    ),
    (
        "FailedPreconditionError",
        "The number of iterations of the pipeline must be at least 10, but it is 8",
        EXIT_USAGE,
        "too few",
        "--gradient-accumulation-count 10",
    ),
    (
        "InternalError",
        "Trying to compile a graph for an IPU device with 2 IPUs and 4 shards.",
        EXIT_USAGE,
        "2 IPUs",
        "multiple of 4",
    ),
    (
        "InternalError",
        "The replication factor 4 must be divisible by distributed_batch_norm_replica_group_size 3",
        EXIT_USAGE,
        "--dbn-replica-group-size",
        "divisor",
    ),
    (
        "FailedPreconditionError",
        "Unsupported datatype int64 on index 1 of feed operation infeed",
        EXIT_DATA,
        "int64",
        "int32",
    ),
    (
        "FailedPreconditionError",
        "Detected a NaN constant instruction constant.3",
        EXIT_USAGE,
        "not a number",
        "allow_nans",
    ),
    # XLA's text, as TensorFlow 2.6 and 2.21 print it for the CPU, with the Poplar plugin's device name
    (
        "InvalidArgumentError",
        "Detected unsupported operations when trying to compile graph __inference_f_1[_XlaMustCompile=true] on "
        "XLA_IPU_JIT: AsString (No registered 'AsString' OpKernel for XLA_IPU_JIT devices compatible with node "
        "{{node AsString}}){{node AsString}}",
        EXIT_USAGE,
        "AsString",
        "--device cpu",
    ),
]


@pytest.mark.parametrize(("class_name", "text", "code", "message", "hint"), RECORDED)
def test_recorded_texts_are_recognised(class_name, text, code, message, hint):
    error = translate(raised(class_name, text))
    assert error.exit_code == code
    assert message in error.message
    assert hint in error.hint
    assert "\n" not in error.message + error.hint


BUILT_IN = [
    (
        ImportError("libpoplar.so: cannot open shared object file: No such file or directory"),
        EXIT_MISSING,
        "libpoplar.so",
        "source",
    ),
    (OSError("libpopops.so.1: cannot open shared object file"), EXIT_MISSING, "libpopops.so.1", "source"),
    (ModuleNotFoundError("No module named 'popdist'"), EXIT_MISSING, "popdist", "source"),
    (ModuleNotFoundError("No module named 'libpvti'"), EXIT_MISSING, "libpvti", "source"),
    (
        ModuleNotFoundError("No module named 'tensorflow.python.ipu'"),
        EXIT_MISSING,
        "tensorflow.python.ipu",
        "wheels",
    ),
    (
        ImportError("cannot import name 'ipu' from 'tensorflow.python' (/x/__init__.py)"),
        EXIT_MISSING,
        "ipu is missing",
        "wheels",
    ),
    (
        RuntimeError("module compiled against API version 0xe but this version of numpy is 0xd"),
        EXIT_MISSING,
        "NumPy",
        "numpy==1.19.5",
    ),
    (
        ValueError("numpy.ndarray size changed, may indicate binary incompatibility. Expected 96, got 88"),
        EXIT_MISSING,
        "NumPy",
        "numpy==1.19.5",
    ),
    (AttributeError("module 'numpy' has no attribute 'bool'."), EXIT_MISSING, "NumPy", "numpy==1.19.5"),
    (
        ImportError(
            "Python version mismatch: module was compiled for Python 3.8, but the interpreter version is "
            "incompatible: 3.10.12 (main)."
        ),
        EXIT_MISSING,
        "Python 3.8",
        "python3.8",
    ),
]


@pytest.mark.parametrize(("exception", "code", "message", "hint"), BUILT_IN)
def test_python_errors_are_translated(exception, code, message, hint):
    error = translate(exception)
    assert error.exit_code == code
    assert message in error.message
    assert hint in error.hint


OTHERS = [
    # An out-of-memory error of a GPU does not come from an IPU.
    raised(
        "ResourceExhaustedError",
        "OOM when allocating tensor with shape[64,112,112,64] and type float on GPU:0",
    ),
    # Classes with which the driver does not raise these texts
    ValueError("Out of memory on tile 3: 5 bytes used but tiles only have 4 bytes of memory"),
    raised("CancelledError", "Unable to open Poplar device"),
    raised("InternalError", "The number of iterations of the pipeline must be a multiple of 8, but it is 3"),
    raised("InternalError", "cuDNN launch failure: input shape ([8,64,56,56])"),
    raised("InternalError", "[Poplar][Execute engine] poplar_error: something unheard of"),
    raised("InvalidArgumentError", "Incompatible shapes: [8,10] vs. [8,11]"),
    # The CPU's XLA
    raised(
        "InvalidArgumentError",
        "Detected unsupported operations when trying to compile graph f[] on XLA_CPU_JIT: AsString (No registered",
    ),
    ImportError("No module named 'pandas'"),
    ImportError("No module named 'popular'"),
    ImportError("libcudart.so.11.0: cannot open shared object file: No such file or directory"),
    OSError("[Errno 28] No space left on device"),
    AttributeError("module 'numpy' has no attribute 'boolean'"),
    KeyError("popdist"),
    RuntimeError("out of memory"),
    raised("FailedPreconditionError", "Error while reading resource variable w from Container: localhost"),
    ConfigurationError("[Poplar][Compile engine] graph_memory_allocation_error"),
]


@pytest.mark.parametrize("exception", OTHERS, ids=lambda e: type(e).__name__)
def test_other_texts_pass_unchanged(exception):
    assert translate(exception) is None
    with pytest.raises(type(exception)) as caught, poplar_errors():
        raise exception
    assert caught.value is exception


def test_classes_derived_from_the_recorded_ones_count():
    recorded = type(raised("FailedPreconditionError", ""))
    error = type("Wrapped", (recorded,), {})("Detected a NaN constant instruction")
    assert translate(error).exit_code == EXIT_USAGE


def test_context_improves_hints():
    memory = raised(
        "InternalError",
        "[Poplar][Compile engine] graph_memory_allocation_error: Out of memory on tile 7: 700 bytes used but tiles "
        "only have 350 bytes of memory",
    )
    overuses = []

    def would_fit(overuse):
        overuses.append(overuse)
        return "predicted to fit: --recomputation"

    assert translate(memory, ErrorContext(would_fit=would_fit)).hint == "predicted to fit: --recomputation"
    assert overuses == [2.0]
    silent = raised("InternalError", "[Poplar][Compile engine] graph_memory_allocation_error")
    assert "--micro-batch-size" in translate(silent, ErrorContext(would_fit=lambda overuse: None)).hint
    depth = raised(
        "FailedPreconditionError",
        "The number of iterations of the pipeline must be a multiple of 4, but it is 6",
    )
    assert translate(depth, ErrorContext(training=False)).hint == "use --steps-per-execution 4 or 8"
    busy = raised(
        "InternalError", "Could not find an available device for TensorFlow virtual device /device:IPU:0"
    )
    assert "16 IPUs" in translate(busy, ErrorContext(num_ipus=16)).message
    stopped = raised(
        "InternalError", "[Poplar][Execute engine] application_runtime_error: [Recovery action: IPU_RESET] x"
    )
    assert "--loss-scaling" in translate(stopped, ErrorContext(fp_exceptions=True)).hint


def test_cause_is_kept():
    cause = raised("InternalError", "Unable to open Poplar device")
    with pytest.raises(MissingError) as caught, poplar_errors():
        raise cause
    assert caught.value.__cause__ is cause


def test_interrupts_pass_unchanged():
    with pytest.raises(KeyboardInterrupt), poplar_errors():
        raise KeyboardInterrupt


def test_output_of_an_aborted_process_is_recognised():
    text = "F poplar_executor.cc:992] An infeed dataset iterator has failed with status OUT_OF_RANGE\nAborted"
    assert translate_output(text).exit_code == EXIT_DATA
    assert (
        translate_output("ImportError: libpoplar.so: cannot open shared object file").exit_code
        == EXIT_MISSING
    )
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
    texts = [text for _, text, *_ in RECORDED]
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
    assert set(surroundings.FLAGS) == set(facts["environment"]["TF_POPLAR_FLAGS"]["flags"])


SDK = Surroundings(
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
    versions = {**SDK.versions, **changes.pop("versions", {})}
    variables = {**SDK.variables, **changes.pop("variables", {})}
    return Surroundings(**{**vars(SDK), "versions": versions, "variables": variables, **changes})


def test_sound_sdk_has_no_problems():
    assert not [*problems(SDK), *doubts(SDK)]
    check_requirements(SDK)
    assert surroundings.sdk_version(SDK) == "3.3.0"
    assert surroundings.sdk_version(changed(variables={"POPLAR_SDK_ENABLED": "/opt/poplar"})) == "3.3.0"


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"python": (3, 10)}, "Python 3.10", "python3.8"),
        ({"versions": {"numpy": None}}, "numpy is not installed", "numpy==1.19.5"),
        ({"has_keras_ipu": False}, "no keras.ipu", "keras wheel"),
        ({"has_keras_ipu": False, "versions": {"keras": "3.1.0"}}, "keras 3.1.0 is not", "keras wheel"),
        ({"variables": {"POPLAR_SDK_ENABLED": ""}}, "not enabled", "source"),
        ({"modules": ("popdist",)}, "libpvti, popef", "source"),
        (
            {"variables": {"TF_POPLAR_FLAGS": "--use_ipu_model --executable_cache=/x"}},
            "--executable_cache",
            "did you",
        ),
        ({"variables": {"TF_POPLAR_FLAGS": "--save_vertex_graph"}}, "--save_vertex_graph", "TF_POPLAR_FLAGS"),
        ({"variables": {"TF_POPLAR_FLAGS": "--use_on_demand true"}}, "true is no flag", "--name=value"),
        ({"variables": {"TF_POPLAR_FLAGS": "-use_ipu_model"}}, "-use_ipu_model is no flag", "--name"),
        ({"variables": {"TF_POPLAR_FLAGS": "flags.txt"}}, "a file of flags", "--name=value"),
        ({"variables": {"TF_POPLAR_FLAGS": "--show_progress_bar=no"}}, "abort", "true, false or auto"),
        ({"cpu_flags": ("avx2",)}, "AVX-512", "amd_znver1"),
        ({"has_ipu_package": False}, "installed over it", "--force-reinstall"),
        ({"has_ipu_package": False, "versions": {"tensorflow": "2.21.0"}}, "2.21.0 is not", "wheels"),
        ({"has_ipu_package": False, "versions": {"tensorflow": None}}, "not installed", "wheels"),
    ],
)
def test_broken_requirements_are_reported(changes, message, hint):
    errors_found = list(problems(changed(**changes)))
    assert len(errors_found) == 1
    assert message in errors_found[0].message
    assert hint in errors_found[0].hint
    with pytest.raises(type(errors_found[0])):
        check_requirements(changed(**changes))


def test_flags_of_later_sdks_are_reported():
    old = {"POPLAR_SDK_ENABLED": "/x/poplar-ubuntu_20_04-3.1.0+1-a", "TF_POPLAR_FLAGS": "--use_on_demand"}
    (error,) = problems(changed(variables=old))
    assert "3.2" in error.message
    assert not list(problems(changed(variables={"TF_POPLAR_FLAGS": "--use_on_demand"})))
    assert not list(problems(changed(variables={"TF_POPLAR_FLAGS": " --executable_cache_path='/a b' "})))


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"versions": {"numpy": "1.24.4"}}, "numpy 1.24.4", "numpy==1.19.5"),
        ({"versions": {"keras": "2.9.0+gc3.5"}}, "keras 2.9.0+gc3.5", "keras wheel"),
        (
            {"variables": {"POPLAR_SDK_ENABLED": "/x/poplar-ubuntu_20_04-2.6.0+1-a"}},
            "SDK 2.6.0",
            "3.0 to 3.4",
        ),
        (
            {"variables": {"POPLAR_SDK_ENABLED": "/x/poplar-ubuntu_20_04-3.5.0+1-a"}},
            "SDK 3.5.0",
            "3.0 to 3.4",
        ),
    ],
)
def test_doubtful_environments_are_only_warnings(changes, message, hint):
    surroundings_found = changed(**changes)
    assert not list(problems(surroundings_found))
    check_requirements(surroundings_found)
    (doubt,) = doubts(surroundings_found)
    assert message in doubt.message
    assert hint in doubt.hint
