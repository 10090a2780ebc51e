"""Functions that Numba compiles for this CPU, and how Numba is imported."""

import contextlib
import ctypes
import functools
import os
import sys
from typing import Any, Callable, Dict, Iterator, Optional

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


_ARITHMETIC: Dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}


def jit(*signature: object, returns: Optional[NumbaType] = None, **more: object) -> Callable[..., Any]:
    """Compiles a function for these argument types; the compiled function releases the interpreter's lock (GIL).

    A product and a sum may become one operation (FMA).  The order of sums, not-a-number and infinities are kept.

    Args:
        signature: Numba types of the arguments; none: compile at each first call with new types.
        returns: Numba type of the result; None for no result.
        more: further options of ``numba.njit``.
    """
    numba = import_numba()
    signatures = [(numba.void if returns is None else returns)(*signature)] if signature else []
    options = {"nogil": True, **_ARITHMETIC, **more}
    return lambda function: _cached(numba.njit, function, *signatures, **options)


def c_function(function: Callable[..., object], *signature: object) -> Any:
    """Compiles a function without a result to one that C code can call; it has to live as long as its address is used.

    Args:
        function: the function.
        signature: Numba types of the arguments.
    """
    numba = import_numba()
    return _cached(numba.cfunc, function, numba.void(*signature), **_ARITHMETIC)


def _cached(
    compiler: Callable[..., Callable[..., object]],
    function: Callable[..., object],
    *types: object,
    **options: object,
) -> Any:
    """Returns the compiled function, from the cache if there is one."""
    try:
        return compiler(*types, cache=bool(os.environ.get("NUMBA_CACHE_DIR")), **options)(function)
    except Exception:
        # No cache folder is writable, the disk is full, or a file of the cache is damaged.
        return compiler(*types, **options)(function)


VECTOR = 8
"""The float32 numbers of a register of AVX2.  Numba's cache does not notice a change of this module."""
TILE_OUTPUTS = 2 * VECTOR
"""The output channels that compiled products of matrices compute at once."""


def multiplies_faster() -> bool:
    """Returns whether compiled products of matrices were faster on such a CPU than oneDNN's.

    They were with AVX2.  With AVX-512, whose vectors of sixteen numbers they do not use, training was up to 7 % slower
    with them (docs/host-session.md, "What was tried").  Settings of Numba may name another CPU than this one.
    """
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    has_vectors = bool(features.get("avx2") and features.get("fma") and not features.get("avx512f"))
    return has_vectors and not {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & set(os.environ)


TENSORFLOW_FUNCTIONS = (
    *("TF_NewStatus", "TF_DeleteStatus", "TF_GetCode", "TF_SetStatus", "TF_Message"),
    *("TF_NewOpDefinitionBuilder", "TF_OpDefinitionBuilderAddInput", "TF_OpDefinitionBuilderAddOutput"),
    *("TF_OpDefinitionBuilderSetShapeInferenceFunction", "TF_RegisterOpDefinition"),
    *("TF_NewKernelBuilder", "TF_RegisterKernelBuilder"),
    *("TF_GetInput", "TF_AllocateOutput", "TF_ForwardInputOrAllocateOutput", "TF_OpKernelContext_Failure"),
    *("TF_TensorData", "TF_TensorElementCount", "TF_NumDims", "TF_Dim", "TF_DeleteTensor"),
    *("TF_NewShapeHandle", "TF_DeleteShapeHandle", "TF_ShapeInferenceContextSetUnknownShape"),
    *("TF_ShapeInferenceContextGetInput", "TF_ShapeInferenceContextSetOutput"),
)
"""The functions of TensorFlow's C interface that compiled operations use (``tensorflow/c/ops.h``, ``kernels.h``)."""


@functools.lru_cache(maxsize=None)
def tensorflow_library() -> ctypes.CDLL:
    """Returns TensorFlow's library with its C interface, whose functions compiled code can then call by name.

    Raises:
        MissingError: there is no such library, or it lacks a function.
    """
    import tensorflow as tf
    from llvmlite import binding

    # ["-L<folder>", "-l:libtensorflow_framework.so.2"]; on macOS "-ltensorflow_framework.2".
    flags = {flag[:2]: flag[2:].lstrip(":") for flag in tf.sysconfig.get_link_flags()}
    name = f"lib{flags['-l']}.dylib" if sys.platform == "darwin" else flags["-l"]
    path = os.path.join(flags["-L"], name)
    try:
        library = ctypes.CDLL(path)
        binding.load_library_permanently(path)
    except (OSError, RuntimeError):
        raise MissingError(f"{name} cannot be loaded", "install TensorFlow from its own packages") from None
    for function in TENSORFLOW_FUNCTIONS:
        if not hasattr(library, function):
            raise MissingError(f"{name} has no {function}", "install TensorFlow from its own packages")
    return library
