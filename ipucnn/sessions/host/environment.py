"""Imports TensorFlow for the host session: settings that must precede the import, and a quiet import."""

import contextlib
import gc
import importlib.util
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from ipucnn import interrupts
from ipucnn.compiled import HAS_KERNELS, unseen
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.filesystem import private_cache_folder
from ipucnn.machine import (
    are_threads_required,
    control_groups,
    fix_threads,
    fixed_threads,
    free_bytes,
    num_cores,
    swap_bytes,
)

MEBI = 2**20
# Patterns of the libraries of TensorFlow 2.6 and of today's, in its folder.
LIBRARIES = ("libtensorflow_cc.so*", "libtensorflow_framework.so*", "python/_pywrap_tensorflow_internal.so")
# Of the files, four fifths (2.21) and seven eighths (2.6) are mapped; the rest is for debuggers.
MAPPED_PART = 0.75
# Beside the libraries, importing TensorFlow and training the smallest network on one core took 1,206 MiB of address
# space (2.21) and 1,218 MiB (2.6).  Some of it are stacks and heaps of threads, which may be set smaller.
LEAST_ADDRESS_SPACE_BYTES = 600 * MEBI
# Beside what can be read from its files again, importing TensorFlow took 141 MiB (2.6) and 259 MiB (2.21).
LEAST_MEMORY_BYTES = 128 * MEBI


def set_variables(deterministic: bool = True) -> None:
    """Sets the environment variables that TensorFlow reads once, on import.

    Args:
        deterministic: whether operations are to give the same bytes each time.
    """
    if deterministic:
        os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")
    else:
        os.environ["TF_DETERMINISTIC_OPS"] = "0"
    # Keras of any other kind has other layers, and a folder that is not absolute is the current one's.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_USE_LEGACY_KERAS"] = "0"
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):
        os.environ["KERAS_HOME"] = str(private_cache_folder("keras") or os.path.join(os.devnull, "keras"))
    # oneDNN of TensorFlow 2.6 divides by zero in training steps (SIGFPE); from 2.9 on it is TensorFlow's default.
    if _tensorflow_version() >= (2, 9):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def _tensorflow_version() -> Tuple[int, ...]:
    """(major, minor) of the installed TensorFlow, without importing it; (0, 0) if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("tensorflow", "tensorflow-cpu"):
        try:
            return tuple(int(part) for part in version(package).split(".")[:2])
        except (PackageNotFoundError, ValueError):
            continue
    return (0, 0)


def check_memory() -> None:
    """Refuses where this process may not have the memory that TensorFlow takes at the very least.

    TensorFlow would end it with SIGSEGV, SIGABRT or an import error about something else.  What is refused here
    cannot work; where a little more than the least is there, what happens still depends on the network.

    Raises:
        MissingError: a limit, or the memory that is free, is too small.
    """
    if "tensorflow" in sys.modules:
        return
    address_space = _address_space_bytes()
    if address_space is not None:
        libraries = _library_bytes()
        needed = libraries + LEAST_ADDRESS_SPACE_BYTES
        if libraries and address_space < needed:
            raise MissingError(
                f"this process may use {address_space / MEBI:,.0f} MiB of address space (ulimit -v), and TensorFlow "
                f"alone takes {needed / MEBI:,.0f} MiB",
                "lift the limit (ulimit -v unlimited), or allow several GiB: every core takes more",
            )
    for what, size in _memory_there_is():
        if size < LEAST_MEMORY_BYTES:
            raise MissingError(
                f"{what} {size / MEBI:,.0f} MiB of memory, and TensorFlow alone takes {LEAST_MEMORY_BYTES / MEBI:,.0f} "
                "MiB",
                "end other programs, or ask for more memory: 2 GiB are good for small networks",
            )


def _address_space_bytes() -> Optional[int]:
    """The limit of this process' address space; None where there is none."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError, ValueError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit


def _library_bytes() -> int:
    """The least address space that TensorFlow's own libraries take; 0 where they are not found."""
    package = importlib.util.find_spec("tensorflow")
    files: Dict[Tuple[int, int], int] = {}  # a library may have several names
    for place in (package.submodule_search_locations if package is not None else None) or ():
        for path in (path for pattern in LIBRARIES for path in Path(place).glob(pattern)):
            with contextlib.suppress(OSError):
                status = path.stat()
                files[status.st_dev, status.st_ino] = status.st_size
    return int(sum(files.values()) * MAPPED_PART)


def _memory_there_is() -> Iterator[Tuple[str, int]]:
    """Limits and free memory in bytes, swap included, each with the words that come before them."""
    swap, free_swap = swap_bytes()
    free = free_bytes()
    if free is not None:
        yield "this machine has free", free + free_swap
    for group in control_groups():
        yield "the control group of this process has", group.limit_bytes + swap


def import_tensorflow(
    verbose: bool = False,
    start: Optional[Callable[[], None]] = None,
    deterministic: bool = True,
    may_use_gpus: bool = False,
) -> Any:
    """TensorFlow, configured for the host session; later calls return the same module.

    - oneDNN convolutions are switched on: two to four times faster than the others in training on x86 CPUs,
      once depthwise weight gradients are computed otherwise (``fast_layers.py``).
    - Operations are asked to be deterministic, unless that is not wanted.
    - What TensorFlow's C++ side prints on import (missing GPU drivers and the like) is dropped unless
      ``verbose`` or the import fails.
    - As many threads share an operation as :func:`ipucnn.machine.fix_threads` says.

    Args:
        verbose: let it speak.
        start: what has to be done with TensorFlow before anything else is.
        deterministic: whether operations are to give the same bytes each time.
        may_use_gpus: where there are some, all cores share an operation, unless another number is required.

    Raises:
        ConfigurationError: TensorFlow works with another number of threads already.
        MissingError: TensorFlow or Numba is not installed, or this process may not have the memory that it takes.
        Interruption: a signal came, whatever the libraries made of it.
    """
    if "tensorflow" not in sys.modules:
        check_memory()
        if HAS_KERNELS and importlib.util.find_spec("numba") is None:
            raise MissingError("Numba is not installed", "install it with: python -m pip install numba")
        set_variables(deterministic)
        _check_keras_settings()
        if not verbose:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        if "tensorflow" not in sys.modules and _tensorflow_version() >= (2, 16):
            # Keras 3 imports it.
            with contextlib.suppress(ImportError):
                import_matplotlib()
        if verbose or "tensorflow" in sys.modules:
            import tensorflow as tf

            _begin(tf, start, may_use_gpus)
        else:
            with _without_collections():
                tf = _quiet_import(start, may_use_gpus)
    except Exception as error:
        if interrupts.noted() is not None or not isinstance(error, (ImportError, AssertionError)):
            interrupts.check()
            raise
        if isinstance(error, AssertionError):
            raise ConfigurationError(
                f"Keras refuses its own settings, {_keras_settings()}",
                f"correct or remove the file: rm {_keras_settings()}",
            ) from None
        raise MissingError(
            f"TensorFlow cannot be imported: {error}", "install it with: python -m pip install ipucnn"
        ) from None
    interrupts.check()
    _set_keras()
    if deterministic:
        from ipucnn.compat import enable_determinism

        enable_determinism()
    tf.get_logger().setLevel("ERROR")
    return tf


def _keras_settings() -> str:
    """The file that Keras takes its defaults from."""
    return os.path.join(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras"), "keras.json")


def _check_keras_settings() -> None:
    """Refuses settings that are JSON and no mapping, which end the import of Keras.

    Raises:
        ConfigurationError: they are.
    """
    with contextlib.suppress(OSError, ValueError), open(_keras_settings(), encoding="utf-8") as file:
        if not isinstance(json.load(file), dict):
            raise ConfigurationError(
                f"{_keras_settings()} is no JSON object of Keras's settings",
                f"correct or remove the file: rm {shlex.quote(_keras_settings())}",
            )


def _set_keras() -> None:
    """Gives Keras the defaults that the networks are written for, whatever its ``keras.json`` says.

    Raises:
        ConfigurationError: it works with another backend in this process already.
    """
    from tensorflow import keras

    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ConfigurationError(
            f"Keras works with the backend {backend} in this process already, and ipucnn needs tensorflow",
            "set KERAS_BACKEND=tensorflow, or import ipucnn before Keras",
        )
    keras.backend.set_floatx("float32")
    keras.backend.set_epsilon(1e-7)
    keras.backend.set_image_data_format("channels_last")


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Modules make half a million objects that stay: looking for garbage among them took a sixth of the import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_matplotlib() -> Any:
    """matplotlib, without the settings it would take from a ``matplotlibrc`` in the current folder.

    Such a file is anybody's, settings can name programs to run and modules to import (``text.usetex``, ``backend``),
    and one that is no text ends the import.  The user's own settings hold.

    Raises:
        ImportError: it is not installed.
    """
    with unseen("matplotlib", "matplotlibrc"):
        import matplotlib
    return matplotlib


def _begin(tf: ModuleType, start: Optional[Callable[[], None]], may_use_gpus: bool) -> None:
    """What must come before TensorFlow looks for devices."""
    threads, are_required = fixed_threads(), are_threads_required()
    current = tf.config.threading.get_intra_op_parallelism_threads() or num_cores()
    if not are_required and may_use_gpus and tf.config.get_visible_devices("GPU"):
        # Half of the cores are for CPUs, which compute two chunks side by side.
        threads = None
        fix_threads(current, required=False)
    if threads is not None and threads != current:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        except RuntimeError:
            fix_threads(current, required=False)
            if are_required:
                raise ConfigurationError(
                    f"--threads {threads}: TensorFlow works with {current} in this process already",
                    "start a process of its own",
                ) from None
    if start is not None:
        start()


def _quiet_import(start: Optional[Callable[[], None]] = None, may_use_gpus: bool = False) -> Any:
    """Imports without the messages that come from C++, before any log level counts."""
    with stderr_aside(shown_if_failed=True):
        import tensorflow as tf
        from tensorflow import keras  # noqa: F401  (lazily loaded on some versions)

        _begin(tf, start, may_use_gpus)
        # Looking for GPUs is what prints most on a machine without one; the first look is here.
        tf.config.list_logical_devices()
    return tf


@contextlib.contextmanager
def stderr_aside(shown_if_failed: bool) -> Iterator[None]:
    """Turns file descriptor 2 aside, for what prints from C++.

    Args:
        shown_if_failed: what was printed is shown where an error ends the block.
    """
    try:
        kept, saved = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115 - closed below
    except OSError:
        # No stderr, or no temporary folder that can be written.
        yield
        return
    with kept as aside:
        sys.stderr.flush()
        os.dup2(aside.fileno(), 2)
        failed = False
        try:
            with interrupts.stderr_kept_at(saved):
                yield
        except Exception:
            # A signal is none: what was printed is not its reason.
            failed = True
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            if failed and shown_if_failed and interrupts.noted() is None:
                aside.seek(0)
                with contextlib.suppress(OSError):
                    os.write(2, aside.read())
