"""What the Poplar SDK's TensorFlow needs around it: Python, NumPy, Keras, an enabled SDK, flags it knows.

Rules over what was found; what is fatal stands apart from what may work.  Sources: the setup.py of graphcore/tensorflow
r2.6 (versions), its driver/tools/flags.cc (flags) and keras/ipu (modules).
"""

from typing import List, Optional, Tuple

from ipucnn.errors import ConfigurationError, MissingError, UserError
from ipucnn.sessions.poplar.surroundings import (
    SDK_MODULES,
    Surroundings,
    flag_words,
    look_around,
    parse_flags,
    sdk_version,
    version_number,
    wheel_cpu,
)

__all__ = [
    "FLAGS",
    "SDK_MODULES",
    "SDK_PYTHON",
    "Surroundings",
    "check_requirements",
    "doubts",
    "look_around",
    "parse_flags",
    "problems",
    "sdk_version",
    "wheel_cpu",
]

SDK_PYTHON = (3, 8)
SDK_TENSORFLOW = (2, 6)
SDK_KERAS = (2, 6)
SDK_NUMPY = (1, 19)
_PACKAGES = (("tensorflow", SDK_TENSORFLOW), ("keras", SDK_KERAS), ("numpy", SDK_NUMPY))
OLDEST_SDK, NEWEST_SDK = (3, 0), (3, 4)

# What TF_POPLAR_FLAGS may name.  Any other flag aborts the process, and so does save_vertex_graph, which the help text
# still lists.
FLAGS = (
    "help",
    "use_synthetic_data",
    "synthetic_data_initializer",
    "use_ipu_model",
    "log_cycle_count",
    "while_loop_brute_force_max_trip_count",
    "max_compilation_threads",
    "max_infeed_threads",
    "executable_cache_path",
    "dump_schedule_as_dot",
    "tensor_map_file_path",
    "fallback_scheduler",
    "allow_nans",
    "null_data_feed",
    "show_progress_bar",
    "use_on_demand",
    "on_demand_device_poll_time",
    "on_demand_device_timeout",
    "ipu_model_tiles",
    "sync_replica_start",
    "enable_hlo_verifier",
    "disable_poplar_version_check",
    "synthetic_data_categories",
)
_FLAG_SINCE = {"use_on_demand": (3, 2)}


def problems(found: Surroundings) -> List[UserError]:
    """Everything that keeps the Poplar session from starting, the most fundamental first."""
    if not found.has_ipu_package:
        return [_no_package(found)]
    return [
        *_wrong_python(found),
        *_wrong_packages(found),
        *_not_enabled(found),
        *_wrong_flags(found),
        *_wrong_wheel(found),
    ]


def doubts(found: Surroundings) -> List[UserError]:
    """What the Poplar session was not made for, and may work with all the same."""
    return [*_other_versions(found), *_other_sdk(found)] if found.has_ipu_package else []


def check_requirements(found: Optional[Surroundings] = None) -> None:
    """Refuses surroundings in which the SDK's TensorFlow cannot be imported, or would end the process.

    Raises:
        MissingError, ConfigurationError: the first of :func:`problems`.
    """
    for problem in problems(look_around() if found is None else found):
        raise problem


def _no_package(found: Surroundings) -> UserError:
    version = found.versions.get("tensorflow")
    if version is None:
        return MissingError(
            "TensorFlow is not installed here",
            "install the tensorflow and keras wheels of the Poplar SDK (docs/ipu.md)",
        )
    if "+gc" in version:
        return MissingError(
            f"TensorFlow {version} says it is the Poplar SDK's, but has no tensorflow.python.ipu: another TensorFlow "
            "was installed over it",
            "install the SDK's tensorflow and keras wheels again, with --force-reinstall --no-deps",
        )
    return MissingError(
        f"TensorFlow {version} is not the Poplar SDK's: it knows no IPUs",
        "on an IPU system, install the tensorflow and keras wheels of the Poplar SDK (docs/ipu.md)",
    )


def _wrong_python(found: Surroundings) -> List[UserError]:
    if found.python == SDK_PYTHON:
        return []
    return [
        MissingError(
            f"Python {_dotted(found.python)}, but the Poplar SDK's TensorFlow is built for Python "
            f"{_dotted(SDK_PYTHON)}",
            f"make the environment with it: python{_dotted(SDK_PYTHON)} -m venv ENV (docs/ipu.md)",
        )
    ]


def _wrong_packages(found: Surroundings) -> List[UserError]:
    """Packages that are absent, and a Keras that is not the SDK's."""
    wrong: List[UserError] = [
        MissingError(
            f"{name} is not installed; the Poplar SDK needs {name} {_dotted(wanted)}", _how_to_install(name)
        )
        for name, wanted in _PACKAGES
        if found.versions.get(name) is None
    ]
    keras = found.versions.get("keras")
    if keras is not None and not found.has_keras_ipu:
        wrong.append(
            MissingError(
                f"keras {keras} is not the Poplar SDK's: it has no keras.ipu",
                "install the SDK's keras wheel, with --force-reinstall --no-deps",
            )
        )
    return wrong


def _other_versions(found: Surroundings) -> List[UserError]:
    return [
        MissingError(
            f"{name} {found.versions[name]} is installed; the Poplar SDK was made for {name} {_dotted(wanted)}",
            _how_to_install(name),
        )
        for name, wanted in _PACKAGES
        if found.versions.get(name) is not None and version_number(found.versions[name]) != wanted
    ]


def _how_to_install(name: str) -> str:
    if name == "numpy":
        return "python -m pip install 'numpy==1.19.5'"
    return f"install the SDK's {name} wheel again, with --force-reinstall --no-deps"


def _other_sdk(found: Surroundings) -> List[UserError]:
    version = sdk_version(found)
    if version is None or OLDEST_SDK <= version_number(version) <= NEWEST_SDK:
        return []
    return [
        MissingError(
            f"Poplar SDK {version}: this ipucnn knows {_dotted(OLDEST_SDK)} to {_dotted(NEWEST_SDK)}",
            f"enable a Poplar SDK from {_dotted(OLDEST_SDK)} to {_dotted(NEWEST_SDK)}",
        )
    ]


def _dotted(version: Tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _not_enabled(found: Surroundings) -> List[UserError]:
    path = found.variables.get("POPLAR_SDK_ENABLED")
    absent = [name for name in SDK_MODULES if name not in found.modules]
    if path and not absent:
        return []
    if not path:
        message = "the Poplar SDK is not enabled in this shell: POPLAR_SDK_ENABLED is not set"
    else:
        message = f"the Poplar SDK at {path} is enabled only in part: Python finds no {', '.join(absent)}"
    return [MissingError(message, "type: source PATH/TO/poplar_sdk-*/enable")]


def _wrong_flags(found: Surroundings) -> List[UserError]:
    text = found.variables.get("TF_POPLAR_FLAGS", "").strip()
    words = [word for word in flag_words(text) if not word.startswith("--")]
    if text and not text.startswith("-"):
        # compiler/xla/parse_flags_from_env.cc
        return [
            ConfigurationError(
                f"TF_POPLAR_FLAGS: the SDK takes {words[0]} for a file of flags, to which ipucnn cannot add its own",
                "write the flags themselves: --name=value",
            )
        ]
    if words:
        return [
            ConfigurationError(
                f"TF_POPLAR_FLAGS: {words[0]} is no flag, and the SDK would abort the process",
                "a flag is --name or --name=value, without a blank in it",
            )
        ]
    flags = parse_flags(text)
    wrong: List[UserError] = []
    unknown = [name for name in flags if name not in FLAGS]
    if unknown:
        from ipucnn.errors import did_you_mean

        wrong.append(
            ConfigurationError(
                f"TF_POPLAR_FLAGS: the SDK knows no --{unknown[0]} and would abort the process",
                did_you_mean(unknown[0], FLAGS) or f"take --{unknown[0]} out of TF_POPLAR_FLAGS",
            )
        )
    version = version_number(sdk_version(found))
    for name, since in _FLAG_SINCE.items():
        if name in flags and version and version < since:
            wrong.append(
                ConfigurationError(
                    f"TF_POPLAR_FLAGS: --{name} came with SDK {_dotted(since)}, and this is {_dotted(version)}",
                    f"take --{name} out of TF_POPLAR_FLAGS",
                )
            )
    bar = flags.get("show_progress_bar", "auto")
    if bar not in ("true", "false", "auto"):
        wrong.append(
            ConfigurationError(
                f"TF_POPLAR_FLAGS: --show_progress_bar={bar} would abort the process",
                "it is true, false or auto",
            )
        )
    return wrong


def _wrong_wheel(found: Surroundings) -> List[UserError]:
    """A wheel for a processor with AVX-512 dies on one without, with SIGILL at its import."""
    built_for = wheel_cpu(found)
    if built_for is None or "512" not in built_for or not found.cpu_flags or "avx512f" in found.cpu_flags:
        return []
    return [
        MissingError(
            f"the SDK's TensorFlow is built for {built_for}, and this processor has no AVX-512: it would die with "
            "an illegal instruction",
            "install the SDK's tensorflow wheel whose name has amd_znver1",
        )
    ]
