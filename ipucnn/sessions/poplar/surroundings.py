"""What is here of the Poplar SDK, looked up without importing any of it: files, package metadata, the environment."""

import importlib.util
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

from ipucnn.machine import cpu_flags

__all__ = [
    "SDK_MODULES",
    "Surroundings",
    "flag_words",
    "look_around",
    "parse_flags",
    "sdk_version",
    "version_number",
    "wheel_cpu",
]

# Modules that enabling the SDK puts on PYTHONPATH, and that its TensorFlow and Keras import.
SDK_MODULES = ("popdist", "libpvti", "popef")


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
        cpu_flags=cpu_flags(),
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


def version_number(version: Optional[str]) -> Tuple[int, ...]:
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


def flag_words(text: str) -> List[str]:
    """The words of ``TF_POPLAR_FLAGS``; quotes keep blanks in a value."""
    try:
        return shlex.split(text)
    except ValueError:  # a quote is not closed
        return text.split()


def parse_flags(text: str) -> Dict[str, str]:
    """Flags of ``TF_POPLAR_FLAGS`` by name; one without a value is "true"."""
    flags = {}
    for word in flag_words(text):
        name, equals, value = word.lstrip("-").partition("=")
        flags[name] = value if equals else "true"
    return flags
