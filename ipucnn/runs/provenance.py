"""Records where a result comes from: versions, machine, command line, digest of the sources."""

import functools
import hashlib
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import List

from ipucnn.aliases import PlainDict
from ipucnn.machine import BYTE_PACKAGES, BYTE_VARIABLES, cpu_name, operation_threads
from ipucnn.text import shown_value

# Environment variables that change what TensorFlow computes or where.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "POPLAR_ENGINE_OPTIONS",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_POPLAR_FLAGS",
    *BYTE_VARIABLES,
)
# Facts that can change the bytes of a run that is continued in another environment.
DECIDES_BYTES = ("ipucnn", *BYTE_PACKAGES, "cpu", "threads", "compiled_layers")


@functools.lru_cache(maxsize=None)
def sources_sha256() -> str:
    """Returns the SHA-256 of the names and contents of ipucnn's ``.py`` files, which also identifies a modified copy.

    It is computed once per process, because folds are runs of one process with the same sources.
    """
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def environment() -> PlainDict:
    """Returns versions and machine, for ``environment.json`` and ``report.json`` (imports TensorFlow)."""
    import numpy as np
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn import __version__
    from ipucnn.sessions.host import operations

    return {
        "ipucnn": __version__,
        "sources_sha256": sources_sha256(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "threads": operation_threads(),
        "compiled_layers": operations.compiled_layers(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name in VARIABLES},
        "command": shlex.join([_program(sys.argv[0]), *sys.argv[1:]]),
    }


def _program(path: str) -> str:
    """Returns the name of the program without its folder, because exports carry the command to other people.

    It is not always `ipucnn`: a user's own script may import the package.
    """
    program = Path(path)
    return program.parent.name if program.name == "__main__.py" else program.name


def changes(before: PlainDict, now: PlainDict) -> List[str]:
    """Lists the differences between two environments that can change the bytes of a continued run, as texts."""

    def facts(process: PlainDict) -> PlainDict:
        variables = process.get("variables")
        variables = variables if isinstance(variables, dict) else {}
        return {
            **{name: process.get(name) for name in DECIDES_BYTES},
            **{name: variables.get(name) for name in BYTE_VARIABLES},
        }

    former, present = facts(before), facts(now)
    return [
        f"{name} {shown_value(former[name])} before, {shown_value(present[name])} now"
        for name in present
        if former[name] != present[name]
    ]
