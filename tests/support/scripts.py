"""Scripts of the repository, which are not part of the package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: str) -> ModuleType:
    """Imports a script by its path in the repository; it finds the scripts beside it."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(file.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module
