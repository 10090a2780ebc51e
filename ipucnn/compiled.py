"""Functions that Numba compiles for this CPU, and how Numba is imported."""

import contextlib
import os
import sys
from typing import Any, Callable, Iterator, Optional

from ipucnn.aliases import NumbaType
from ipucnn.errors import MissingError
from ipucnn.filesystem import private_cache_folder

HAS_KERNELS = sys.version_info >= (3, 9)
"""Whether Numba compiles kernels.  Its last version for Python 3.8 does not use the vector units of a CPU: its training
step takes twice as long as TensorFlow's."""


def import_numba() -> Any:
    """Imports Numba without the settings of a ``.numba_config.yaml`` in the current folder.

    Anybody may have written such a file, and it could name a folder from which compiled code is loaded.  Compiled code
    is cached only in an absolute ``NUMBA_CACHE_DIR`` or in a folder that nobody else can write to, because Numba
    unpickles it.

    Raises:
        MissingError: Numba cannot be imported.
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
    config._HAVE_YAML = False  # Numba's compiler would look for the file again before each function.
    return numba


@contextlib.contextmanager
def unseen(module: str, name: str) -> Iterator[None]:
    """Hides a file of this name in the current folder while a module is imported for the first time."""
    exists = os.path.exists
    if module not in sys.modules:
        os.path.exists = lambda path: path != name and exists(path)  # type: ignore[assignment]
    try:
        yield
    finally:
        os.path.exists = exists


def jit(*signature: object, returns: Optional[NumbaType] = None, **more: object) -> Callable[..., Any]:
    """Compiles a function for these argument types; the compiled function releases the interpreter's lock (GIL).

    A product and a sum may become one operation (FMA).  The order of sums, not-a-number and infinities are kept.

    Args:
        signature: Numba types of the arguments; none: compile at each first call with new types.
        returns: Numba type of the result; None for no result.
        more: further options of ``numba.njit``.
    """
    numba = import_numba()
    options = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract"},
        **more,
    }
    signatures = [(numba.void if returns is None else returns)(*signature)] if signature else []

    def decorate(function: Callable[..., object]) -> Any:
        try:
            has_folder = bool(os.environ.get("NUMBA_CACHE_DIR"))
            return numba.njit(*signatures, cache=has_folder, **options)(function)
        except Exception:
            # No cache folder is writable, the disk is full, or a file of the cache is damaged.
            return numba.njit(*signatures, **options)(function)

    return decorate
