"""Functions that Numba compiles for this CPU, and how Numba is imported."""

import contextlib
import os
import sys
from typing import Any, Callable, Iterator

from ipucnn.errors import MissingError
from ipucnn.filesystem import private_cache_folder

HAS_KERNELS = sys.version_info >= (3, 9)
"""Whether Numba compiles anything.  The last one for Python 3.8 makes no use of the vectors of a CPU."""


def import_numba() -> Any:
    """Numba, without the settings it would take from a ``.numba_config.yaml`` in the current folder.

    Such a file is anybody's, and could name a folder from which compiled code is loaded.  Compiled code is kept in a
    folder that belongs to the user alone, or not at all: Numba unpickles it.

    Raises:
        MissingError: it cannot be imported.
    """
    folder = os.environ.get("NUMBA_CACHE_DIR", "")
    if not os.path.isabs(folder):
        os.environ["NUMBA_CACHE_DIR"] = str(private_cache_folder("numba") or "")
    try:
        with unseen("numba", ".numba_config.yaml"):
            import numba
            from numba.core import config
    except ImportError as error:
        raise MissingError(
            f"Numba cannot be imported: {error}", "install it with: python -m pip install numba"
        ) from None
    config._HAVE_YAML = False  # Its compiler would look for the file again before each function.
    return numba


@contextlib.contextmanager
def unseen(module: str, name: str) -> Iterator[None]:
    """While a module is imported for the first time, a file of this name in the current folder is not there."""
    exists = os.path.exists
    if module not in sys.modules:
        os.path.exists = lambda path: path != name and exists(path)  # type: ignore[assignment]
    try:
        yield
    finally:
        os.path.exists = exists


def jit(*signature: object, **more: object) -> Callable[..., Any]:
    """Compiles for these arguments, without the interpreter's lock.

    A product and a sum may become one operation (FMA); sums keep their order, not-a-number and infinities stay.
    """
    numba = import_numba()
    options = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract"},
        **more,
    }
    signatures = [numba.void(*signature)] if signature else []

    def decorate(function: Callable[..., object]) -> Any:
        try:
            has_folder = bool(os.environ.get("NUMBA_CACHE_DIR"))
            return numba.njit(*signatures, cache=has_folder, **options)(function)
        except Exception:
            # No folder can be written, the disk is full, or a file of the cache is damaged.
            return numba.njit(*signatures, **options)(function)

    return decorate
