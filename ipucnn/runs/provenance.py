"""Where a result comes from: versions, machine, command line, revision of the sources."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipucnn.hardware import num_cores

# Environment variables that change what TensorFlow computes or where.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "POPLAR_ENGINE_OPTIONS",
    "TF_DETERMINISTIC_OPS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_POPLAR_FLAGS",
    "XLA_FLAGS",
)
# What can change the bytes of a run that is continued elsewhere.
DECIDES_BYTES = ("ipucnn", "tensorflow", "keras", "numpy", "cpu", "threads")


def git_state(folder: Path) -> Optional[Dict[str, Any]]:
    """Revision of the git working tree a folder lies in and whether files differ from it; None if there is none."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {
            "revision": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def package_git_state() -> Optional[Dict[str, Any]]:
    """:func:`git_state` of ipucnn's own sources; None where it is installed without them."""
    root = Path(__file__).resolve().parents[2]
    return git_state(root) if (root / ".git").exists() else None


def environment() -> Dict[str, Any]:
    """Versions and machine, for ``environment.json`` and ``report.json`` (imports TensorFlow)."""
    import numpy as np
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn import __version__
    from ipucnn.sessions.session import cpu_name

    return {
        "ipucnn": __version__,
        "git": {"ipucnn": package_git_state(), "working_directory": git_state(Path.cwd())},
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "threads": num_cores(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name in VARIABLES},
        "command": " ".join(map(shlex.quote, sys.argv)),
    }


def changes(before: Dict[str, Any], now: Dict[str, Any]) -> List[str]:
    """What of the environment differs that can change the bytes of a continued run, readable."""
    return [
        f"{name} {before.get(name)} before, {now.get(name)} now"
        for name in DECIDES_BYTES
        if before.get(name) != now.get(name)
    ]
