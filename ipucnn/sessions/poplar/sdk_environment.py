"""Checks the SDK's environment before TensorFlow is imported, and sets the driver's flags.

:func:`read_sdk_environment` reads files, package metadata and environment variables, and imports nothing of the SDK.
Rules then judge these values: :func:`problems` are fatal, :func:`version_warnings` are not.  Sources: the setup.py of
graphcore/tensorflow r2.6 (versions), its driver/tools/flags.cc (flags) and keras/ipu (modules).  The driver reads
TF_POPLAR_FLAGS once, on its first access in the process, and aborts the process if it does not know a flag.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List, Mapping, Optional, Tuple

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, MissingError, UserError, did_you_mean
from ipucnn.filesystem import errors_about, make_folder
from ipucnn.machine import cpu_flags
from ipucnn.text import is_interactive

# Modules that enabling the SDK puts on PYTHONPATH, and that its TensorFlow and Keras import.
SDK_MODULES = ("popdist", "libpvti", "popef")
_GC_INFO_S = 10.0

FLAGS_VARIABLE, _CACHE = "TF_POPLAR_FLAGS", "executable_cache_path"
SDK_PYTHON = (3, 8)
_PACKAGES = (("tensorflow", (2, 6)), ("keras", (2, 6)), ("numpy", (1, 19)))
OLDEST_SDK, NEWEST_SDK = (3, 0), (3, 4)

# The flags of TF_POPLAR_FLAGS.  Any other flag aborts the process, even save_vertex_graph, which the help text lists.
FLAGS = (
    "help", "use_synthetic_data", "synthetic_data_initializer", "use_ipu_model", "log_cycle_count",
    "while_loop_brute_force_max_trip_count", "max_compilation_threads", "max_infeed_threads",
    "executable_cache_path", "dump_schedule_as_dot", "tensor_map_file_path", "fallback_scheduler", "allow_nans",
    "null_data_feed", "show_progress_bar", "use_on_demand", "on_demand_device_poll_time",
    "on_demand_device_timeout", "ipu_model_tiles", "sync_replica_start", "enable_hlo_verifier",
    "disable_poplar_version_check", "synthetic_data_categories",
)  # fmt: skip
_FLAG_SINCE = {"use_on_demand": (3, 2)}


@dataclass(frozen=True)
class SdkEnvironment:
    """An environment as plain values, so that rules can judge other machines, too.

    Attributes:
        python: (major, minor).
        versions: the installed version by package ("tensorflow", "keras", "numpy", "ipu-tensorflow-addons"), None where
            it is absent.
        has_ipu_package: whether TensorFlow has ``tensorflow.python.ipu``: it is the SDK's.
        has_keras_ipu: whether Keras has ``keras.ipu``: it is the SDK's.
        modules: those of ``SDK_MODULES`` that can be imported.
        variables: the environment variables.
        cpu_flags: the instruction sets of the processor as Linux lists them; empty where unknown.
    """

    python: Tuple[int, int]
    versions: Mapping[str, Optional[str]]
    has_ipu_package: bool
    has_keras_ipu: bool
    modules: Tuple[str, ...]
    variables: Mapping[str, str]
    cpu_flags: Tuple[str, ...] = ()


def read_sdk_environment() -> SdkEnvironment:
    """Returns the environment of this process; imports neither TensorFlow nor NumPy."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(*names: str) -> Optional[str]:
        for name in names:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    return SdkEnvironment(
        python=(sys.version_info[0], sys.version_info[1]),
        versions={
            "tensorflow": installed("tensorflow", "tensorflow-cpu"),
            "keras": installed("keras"),
            "numpy": installed("numpy"),
            "ipu-tensorflow-addons": installed("ipu-tensorflow-addons"),
        },
        has_ipu_package=has_poplar_sdk(),
        has_keras_ipu=_has_folder("keras", "ipu"),
        modules=tuple(name for name in SDK_MODULES if _spec(name) is not None),
        variables=dict(os.environ),
        cpu_flags=cpu_flags(),
    )


def has_poplar_sdk() -> bool:
    """Returns whether this TensorFlow is the Poplar SDK's, judged by its files; imports nothing."""
    return "tensorflow.python.ipu" in sys.modules or _has_folder("tensorflow", os.path.join("python", "ipu"))


def remote_memory() -> Optional[bool]:
    """Returns whether gc-info reports remote memory, where programs can keep tensors; None if it reports nothing."""
    # Relative folders of PATH depend on the working folder, where anybody may have put a program.
    folders = [folder for folder in os.get_exec_path() if os.path.isabs(folder)]
    program = shutil.which("gc-info", path=os.pathsep.join(folders)) if folders else None
    if program is None:
        return None
    try:
        ran = subprocess.run(
            [program, "--device-id", "0", "--device-info"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GC_INFO_S,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"remote buffers supported\W+([01])\b", ran.stdout, re.IGNORECASE)
    return None if match is None else match.group(1) == "1"


def _spec(module: str) -> Optional[ModuleSpec]:
    """Returns where Python finds a module; None if it does not, or if its parent cannot be imported."""
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(module)
    return None


def _has_folder(package: str, name: str) -> bool:
    """Returns whether an installed package has a package of that name; imports neither."""
    spec = _spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / name).is_dir() for place in places or ())


def version_number(version: Optional[str]) -> Tuple[int, ...]:
    """Returns (major, minor) of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:2])


def sdk_version(system: SdkEnvironment) -> Optional[str]:
    """Returns the SDK's version from the folder that enabled it or TensorFlow's wheel (``2.6.3+gc3.3.0+...``)."""
    path = system.variables.get("POPLAR_SDK_ENABLED", "")
    # PATH/poplar_sdk-ubuntu_20_04-3.3.0+1403-208993bbb7/poplar-ubuntu_20_04-3.3.0+7857-b67b751185
    for text in reversed(Path(path).parts):
        match = re.search(r"-(\d+\.\d+\.\d+)\+", text)
        if match is not None:
            return match.group(1)
    match = re.search(r"\+gc(\d+\.\d+\.\d+)", system.versions.get("tensorflow") or "")
    return None if match is None else match.group(1)


def flag_words(text: str) -> List[str]:
    """Returns the words of ``TF_POPLAR_FLAGS``; quotes keep blanks in a value."""
    try:
        return shlex.split(text)
    except ValueError:  # a quote is not closed
        return text.split()


def parse_flags(text: str) -> Dict[str, str]:
    """Returns the flags of ``TF_POPLAR_FLAGS`` by name; one without a value is "true"."""
    flags = {}
    for word in flag_words(text):
        name, equals, value = word.lstrip("-").partition("=")
        flags[name] = value if equals else "true"
    return flags


def problems(system: SdkEnvironment) -> Iterator[UserError]:
    """Yields everything that prevents the Poplar session from starting, the most fundamental first."""
    tensorflow, keras = system.versions.get("tensorflow"), system.versions.get("keras")
    if not system.has_ipu_package:
        yield _no_package(tensorflow)
        return
    if system.python != SDK_PYTHON:
        needed = _dotted(SDK_PYTHON)
        yield MissingError(
            f"Python {_dotted(system.python)}, but the Poplar SDK's TensorFlow is built for Python {needed}",
            f"make the environment with it: python{needed} -m venv ENV (docs/ipu.md)",
        )
    for name, version in _PACKAGES:
        if system.versions.get(name) is None:
            yield MissingError(
                f"{name} is not installed; the Poplar SDK needs {name} {_dotted(version)}",
                _how_to_install(name),
            )
    if keras is not None and not system.has_keras_ipu:
        yield MissingError(
            f"keras {keras} is not the Poplar SDK's: it has no keras.ipu",
            "install the SDK's keras wheel, with --force-reinstall --no-deps",
        )
    path = system.variables.get("POPLAR_SDK_ENABLED")
    absent = [name for name in SDK_MODULES if name not in system.modules]
    if not path or absent:
        yield MissingError(
            f"the Poplar SDK at {path} is enabled only in part: Python finds no {', '.join(absent)}"
            if path
            else "the Poplar SDK is not enabled in this shell: POPLAR_SDK_ENABLED is not set",
            "type: source PATH/TO/poplar_sdk-*/enable",
        )
    yield from _wrong_flags(system)
    # The wheel's version ends with its processor: amd_znver1 or intel_skylake512.
    wheel = re.search(r"\+((?:amd|intel)_\w*512\w*)$", tensorflow or "")
    if wheel is not None and system.cpu_flags and "avx512f" not in system.cpu_flags:
        yield MissingError(
            f"the SDK's TensorFlow is built for {wheel.group(1)}, and this processor has no AVX-512: it would die with "
            "an illegal instruction",
            "install the SDK's tensorflow wheel whose name has amd_znver1",
        )


def version_warnings(system: SdkEnvironment) -> Iterator[UserError]:
    """Yields a warning for each version that the Poplar session was not made for; it may work."""
    if not system.has_ipu_package:
        return
    for name, needed in _PACKAGES:
        installed = system.versions.get(name)
        if installed is not None and version_number(installed) != needed:
            yield MissingError(
                f"{name} {installed} is installed; the Poplar SDK was made for {name} {_dotted(needed)}",
                _how_to_install(name),
            )
    version = sdk_version(system)
    if version is not None and not OLDEST_SDK <= version_number(version) <= NEWEST_SDK:
        known = f"{_dotted(OLDEST_SDK)} to {_dotted(NEWEST_SDK)}"
        yield MissingError(
            f"Poplar SDK {version}: this ipucnn knows {known}", f"enable a Poplar SDK from {known}"
        )


def check_requirements(system: Optional[SdkEnvironment] = None) -> None:
    """Refuses environments in which the SDK's TensorFlow cannot be imported or would abort the process.

    Raises:
        MissingError, ConfigurationError: the first of :func:`problems`.
    """
    for problem in problems(read_sdk_environment() if system is None else system):
        raise problem


def _no_package(version: Optional[str]) -> UserError:
    """Returns the error of a TensorFlow without IPUs."""
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


def _how_to_install(name: str) -> str:
    if name == "numpy":
        return "python -m pip install 'numpy==1.19.5'"
    return f"install the SDK's {name} wheel again, with --force-reinstall --no-deps"


def _dotted(version: Tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _wrong_flags(system: SdkEnvironment) -> Iterator[UserError]:
    """Yields the errors of flags for which the driver would abort the process."""
    text = system.variables.get(FLAGS_VARIABLE, "").strip()
    words = [word for word in flag_words(text) if not word.startswith("--")]
    if text and not text.startswith("-"):
        # compiler/xla/parse_flags_from_env.cc
        yield ConfigurationError(
            f"TF_POPLAR_FLAGS: the SDK takes {words[0]} for a file of flags, to which ipucnn cannot add its own",
            "write the flags themselves: --name=value",
        )
        return
    if words:
        yield ConfigurationError(
            f"TF_POPLAR_FLAGS: {words[0]} is no flag, and the SDK would abort the process",
            "a flag is --name or --name=value, without a blank in it",
        )
        return
    flags = parse_flags(text)
    unknown = [name for name in flags if name not in FLAGS]
    if unknown:
        yield ConfigurationError(
            f"TF_POPLAR_FLAGS: the SDK knows no --{unknown[0]} and would abort the process",
            did_you_mean(unknown[0], FLAGS) or f"take --{unknown[0]} out of TF_POPLAR_FLAGS",
        )
    version = version_number(sdk_version(system))
    for name, since in _FLAG_SINCE.items():
        if name in flags and version and version < since:
            yield ConfigurationError(
                f"TF_POPLAR_FLAGS: --{name} came with SDK {_dotted(since)}, and this is {_dotted(version)}",
                f"take --{name} out of TF_POPLAR_FLAGS",
            )
    bar = flags.get("show_progress_bar", "auto")
    if bar not in ("true", "false", "auto"):
        yield ConfigurationError(
            f"TF_POPLAR_FLAGS: --show_progress_bar={bar} would abort the process", "it is true, false or auto"
        )


def _quoted(value: str) -> str:
    """Returns a flag's value as the driver and ``shlex`` both read it.

    The driver (compiler/xla/parse_flags_from_env.cc) accepts quotes only around a whole value, right after the ``=``,
    and ``\\`` as an escape only between double quotes.  ``shlex.quote`` writes other forms.
    """
    if re.search(r"[\s'\"\\]", value) is None:
        return value
    if "'" not in value:
        return f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def gives_nothing_back() -> bool:
    """Returns whether IPUs send no results because of flags in TF_POPLAR_FLAGS, set by the user or by a run."""
    flags = parse_flags(os.environ.get(FLAGS_VARIABLE, ""))
    return "use_synthetic_data" in flags or "outfeed" in flags.get("synthetic_data_categories", "").split(",")


def poplar_flags(config: RunConfig, present: str) -> str:
    """Returns the value of TF_POPLAR_FLAGS for a run: the user's flags, and those of the run that they lack.

    Args:
        config: with ``device_generated_data`` or ``synthetic_data`` "ipu", the IPUs generate their data.
        present: the variable's value.

    Raises:
        ConfigurationError: ``compile_only`` without a folder for what is compiled.
    """
    flags = {"show_progress_bar": str(is_interactive(sys.stderr)).lower()}
    if config.executable_cache:
        flags[_CACHE] = _quoted(os.path.normpath(config.executable_cache.absolute()))
    if config.device_generated_data or config.synthetic_data == "ipu":
        flags.update(use_synthetic_data="", synthetic_data_initializer="random")
    users = parse_flags(present)
    if config.compile_only and _CACHE not in {**users, **flags}:
        raise ConfigurationError(
            "--compile-only needs a folder for what is compiled", "add --executable-cache DIR"
        )
    added = [
        f"--{name}={value}" if value else f"--{name}" for name, value in flags.items() if name not in users
    ]
    # The user's text stays as it is, with its quotes.
    return " ".join([present.strip(), *added]).strip()


def executable_cache() -> str:
    """Returns the folder of compiled programs, from the driver's flags; "" without one."""
    return parse_flags(os.environ.get(FLAGS_VARIABLE, "")).get(_CACHE, "")


def cached_programs() -> FrozenSet[str]:
    """Returns the names of the compiled programs that the executable cache holds."""
    folder = executable_cache()
    with suppress(OSError):
        names = os.listdir(folder) if folder else ()
        return frozenset(name for name in names if name.endswith(".poplar_exec"))
    return frozenset()


def set_flags(config: RunConfig) -> None:
    """Sets TF_POPLAR_FLAGS, and makes the folder of compiled programs; call it before TensorFlow is imported.

    Raises:
        ConfigurationError: see :func:`poplar_flags`.
        DataError: nothing can be written to that folder.
    """
    flags = poplar_flags(config, os.environ.get(FLAGS_VARIABLE, ""))
    folder = parse_flags(flags).get(_CACHE)
    if folder:
        # The driver would fail only after minutes of compiling.
        make_folder(Path(folder))
        with errors_about(folder):
            # A unique name, because several instances may test the folder at the same time.
            tempfile.TemporaryFile(dir=folder).close()
    os.environ[FLAGS_VARIABLE] = flags
