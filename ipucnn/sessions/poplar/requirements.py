"""What the Poplar SDK's TensorFlow needs around it: Python, NumPy, Keras, an enabled SDK, flags it knows.

Imports nothing of it: the answers come from the file system, package metadata and the environment.  Sources: the
setup.py of graphcore/tensorflow r2.6 (versions), its driver/tools/flags.cc (flags) and keras/ipu (modules).
"""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

from ipucnn.errors import ConfigurationError, MissingError, UserError

__all__ = [
    "FLAGS",
    "SDK_MODULES",
    "SDK_PYTHON",
    "Surroundings",
    "check_requirements",
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
OLDEST_SDK, NEWEST_SDK = (3, 0), (3, 4)

# Modules that enabling the SDK puts on PYTHONPATH, and that its TensorFlow and Keras import.
SDK_MODULES = ("popdist", "libpvti", "popef")

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


@dataclass(frozen=True)
class Surroundings:
    """What was found, as values, so that the rules can be asked about machines that are not here.

    Attributes:
        python: (major, minor).
        versions: installed version by package ("tensorflow", "keras", "numpy", "ipu-tensorflow-addons"), None where
            it is absent.
        has_ipu_package: TensorFlow has ``tensorflow.python.ipu``: it is the SDK's.
        has_keras_ipu: Keras has ``keras.ipu``: it is the SDK's.
        modules: of ``SDK_MODULES``, those that can be found.
        variables: environment variables.
        cpu_flags: instruction sets of the processor as Linux lists them; empty where unknown.
    """

    python: Tuple[int, int]
    versions: Mapping[str, Optional[str]]
    has_ipu_package: bool
    has_keras_ipu: bool
    modules: Tuple[str, ...]
    variables: Mapping[str, str]
    cpu_flags: Tuple[str, ...] = ()


def look_around() -> Surroundings:
    """What is here; imports neither TensorFlow nor NumPy."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(*names: str) -> Optional[str]:
        for name in names:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    return Surroundings(
        python=(sys.version_info[0], sys.version_info[1]),
        versions={
            "tensorflow": installed("tensorflow", "tensorflow-cpu"),
            "keras": installed("keras"),
            "numpy": installed("numpy"),
            "ipu-tensorflow-addons": installed("ipu-tensorflow-addons"),
        },
        has_ipu_package=_has_ipu_package(),
        has_keras_ipu=_has_folder("keras", "ipu"),
        modules=tuple(name for name in SDK_MODULES if _is_found(name)),
        variables=dict(os.environ),
        cpu_flags=_cpu_flags(),
    )


def _has_ipu_package() -> bool:
    from ipucnn.sessions.factory import has_poplar_sdk

    return has_poplar_sdk()


def _has_folder(package: str, name: str) -> bool:
    """Whether an installed package has a package of that name; imports neither."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = found.submodule_search_locations if found is not None else None
    return any((Path(place) / name).is_dir() for place in places or ())


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _cpu_flags() -> Tuple[str, ...]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return tuple(line.partition(":")[2].split())
    except OSError:
        pass
    return ()


def _number(version: Optional[str]) -> Tuple[int, ...]:
    """(major, minor) of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:2])


def sdk_version(found: Surroundings) -> Optional[str]:
    """The SDK's version from the folder that enabled it or from TensorFlow's wheel (``2.6.3+gc3.3.0+...``)."""
    path = found.variables.get("POPLAR_SDK_ENABLED", "")
    # PATH/poplar_sdk-ubuntu_20_04-3.3.0+1403-208993bbb7/poplar-ubuntu_20_04-3.3.0+7857-b67b751185
    for text in reversed(Path(path).parts):
        match = re.search(r"-(\d+\.\d+\.\d+)\+", text)
        if match is not None:
            return match.group(1)
    match = re.search(r"\+gc(\d+\.\d+\.\d+)", found.versions.get("tensorflow") or "")
    return None if match is None else match.group(1)


def wheel_cpu(found: Surroundings) -> Optional[str]:
    """The processor that the SDK's TensorFlow was built for, e.g. ``amd_znver1``; None where its version says none."""
    match = re.search(r"\+((?:amd|intel)_\w+)$", found.versions.get("tensorflow") or "")
    return None if match is None else match.group(1)


def parse_flags(text: str) -> Dict[str, str]:
    """Flags of ``TF_POPLAR_FLAGS`` by name; one without a value is "true"."""
    flags = {}
    for word in text.split():
        name, equals, value = word.lstrip("-").partition("=")
        flags[name] = value if equals else "true"
    return flags


def problems(found: Surroundings) -> List[UserError]:
    """Everything that keeps the Poplar session from starting, the most fundamental first."""
    if not found.has_ipu_package:
        return [_no_package(found)]
    return [*_wrong_versions(found), *_not_enabled(found), *_wrong_flags(found), *_wrong_wheel(found)]


def check_requirements(found: Optional[Surroundings] = None) -> None:
    """Raises:
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


def _wrong_versions(found: Surroundings) -> List[UserError]:
    wrong: List[UserError] = []
    if found.python != SDK_PYTHON:
        wrong.append(
            MissingError(
                f"Python {found.python[0]}.{found.python[1]}, but the Poplar SDK's TensorFlow is built for Python "
                f"{SDK_PYTHON[0]}.{SDK_PYTHON[1]}",
                "make the environment with it: python3.8 -m venv ENV (docs/ipu.md)",
            )
        )
    for name, wanted in (("tensorflow", SDK_TENSORFLOW), ("keras", SDK_KERAS), ("numpy", SDK_NUMPY)):
        version = found.versions.get(name)
        if version is not None and _number(version) == wanted:
            continue
        expected = ".".join(map(str, wanted))
        hint = "python -m pip install 'numpy==1.19.5'"
        if name != "numpy":
            hint = f"install the SDK's {name} wheel again, with --force-reinstall --no-deps"
        what = "is not installed" if version is None else f"{version} is installed"
        wrong.append(MissingError(f"{name} {what}; the Poplar SDK needs {name} {expected}", hint))
    keras = found.versions.get("keras")
    if keras is not None and _number(keras) == SDK_KERAS and not found.has_keras_ipu:
        wrong.append(
            MissingError(
                f"keras {keras} is not the Poplar SDK's: it has no keras.ipu",
                "install the SDK's keras wheel, with --force-reinstall --no-deps",
            )
        )
    version = sdk_version(found)
    if version is not None and not OLDEST_SDK <= _number(version) <= NEWEST_SDK:
        wrong.append(
            MissingError(
                f"Poplar SDK {version}: this ipucnn knows {_dotted(OLDEST_SDK)} to {_dotted(NEWEST_SDK)}",
                f"enable a Poplar SDK from {_dotted(OLDEST_SDK)} to {_dotted(NEWEST_SDK)}",
            )
        )
    return wrong


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
    flags = parse_flags(found.variables.get("TF_POPLAR_FLAGS", ""))
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
    version = _number(sdk_version(found))
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
