"""Imports TensorFlow: makes the settings that must precede the import, and hides its messages."""

import contextlib
import gc
import importlib.util
import json
import logging
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Callable, Iterator, List, Optional, Tuple

from ipucnn import interrupts
from ipucnn.compiled import HAS_KERNELS, unseen
from ipucnn.errors import ConfigurationError, MissingError, UserError
from ipucnn.filesystem import private_cache_folder
from ipucnn.machine import (
    address_space_bytes,
    are_threads_required,
    available_bytes,
    fix_threads,
    fixed_threads,
    num_cores,
    schedulable_cores,
)
from ipucnn.text import quoted, size_text

# Importing TensorFlow and training the smallest network on one core took 1.5 GiB of address space, now and then more,
# without the stacks and heaps of threads (2.21; 2.6: 1.2 GiB), and 141 MiB (2.6) to 259 MiB (2.21) besides the pages of
# files.
LEAST_ADDRESS_SPACE_BYTES = 1700 * 2**20
LEAST_MEMORY_BYTES = 128 * 2**20


def set_variables(deterministic: bool = True) -> None:
    """Sets the environment variables that TensorFlow reads once, on import.

    Args:
        deterministic: whether operations give the same bytes each time.
    """
    if deterministic:
        os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")
    else:
        os.environ["TF_DETERMINISTIC_OPS"] = "0"
    # Other backends and the legacy Keras have other layers; a relative KERAS_HOME would be in the current folder.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_USE_LEGACY_KERAS"] = "0"
    home = os.environ.get("KERAS_HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):
        os.environ["KERAS_HOME"] = str(private_cache_folder("keras") or os.path.join(os.devnull, "keras"))
    # oneDNN in TensorFlow 2.6 divides by zero in training steps (SIGFPE); from 2.9 on it is TensorFlow's default.
    if _tensorflow_version() >= (2, 9):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def _tensorflow_version() -> Tuple[int, ...]:
    """Returns (major, minor) of the installed TensorFlow, without importing it; (0, 0) if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("tensorflow", "tensorflow-cpu"):
        try:
            return tuple(int(part) for part in version(package).split(".")[:2])
        except (PackageNotFoundError, ValueError):
            continue
    return (0, 0)


def check_memory() -> None:
    """Refuses too little memory for TensorFlow, which would end the process with a signal or an unrelated error.

    Just above the minimum, the network decides whether the memory suffices.

    Raises:
        MissingError: the limit of the address space or the free memory is too small.
    """
    if "tensorflow" in sys.modules:
        return
    for what, size, least, hint in (
        (
            "of address space (ulimit -v)",
            address_space_bytes(),
            LEAST_ADDRESS_SPACE_BYTES,
            "lift the limit (ulimit -v unlimited), or allow several GiB: every core takes more",
        ),
        (
            "of memory",
            available_bytes(),
            LEAST_MEMORY_BYTES,
            "end other programs, or ask for more memory: 2 GiB are good for small networks",
        ),
    ):
        if size is not None and size < least:
            raise MissingError(
                f"this process may use {size_text(size)} {what}, and TensorFlow alone takes {size_text(least)}",
                hint,
            )


def import_tensorflow(
    verbose: bool = False,
    start: Optional[Callable[[], None]] = None,
    deterministic: bool = True,
    may_use_gpus: bool = False,
) -> Any:
    """Imports TensorFlow and configures it, for both sessions and for commands that build networks without one.

    Later calls return the same module.

    - It enables oneDNN's convolutions: they are two to four times faster than the others in training on x86 CPUs,
      if depthwise weight gradients are computed by ``fast_layers.py``.
    - It makes operations deterministic, unless ``deterministic`` is false.
    - It drops the messages of TensorFlow's C++ side on import (missing GPU drivers and the like), unless ``verbose``
      is set or the import fails.
    - It sets the number of threads per operation to that of :func:`ipucnn.machine.fix_threads`.

    Args:
        verbose: whether to show TensorFlow's messages.
        start: a function to call before TensorFlow is used for anything else.
        deterministic: whether operations give the same bytes each time.
        may_use_gpus: whether GPUs may be used; if there are any, all cores share an operation, unless another number
            is required.

    Raises:
        ConfigurationError: TensorFlow already works with another number of threads.
        MissingError: TensorFlow or Numba is not installed, or this process may not use enough memory for TensorFlow.
        Interruption: a signal arrived, however the libraries handled it.
    """
    is_first = "tensorflow" not in sys.modules
    is_keras_new, variable = "keras" not in sys.modules, os.environ.get("TF_DETERMINISTIC_OPS", "")
    if is_first:
        check_memory()
        if HAS_KERNELS and importlib.util.find_spec("numba") is None:
            raise MissingError("Numba is not installed", "install it with: python -m pip install numba")
        set_variables(deterministic)
        _check_keras_settings()
        if not verbose:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with contextlib.ExitStack() as stack:
            if is_first and interrupts.is_command():
                stack.enter_context(_without_optional_modules())
            elif is_first and _tensorflow_version() >= (2, 16):
                # Keras 3 imports it.
                with contextlib.suppress(ImportError):
                    import_matplotlib()
            if is_first and not verbose:
                stack.enter_context(_without_collections())
                stack.enter_context(stderr_aside(shown_if_failed=True))
            import tensorflow as tf
            from tensorflow import keras  # noqa: F401  (lazily loaded on some versions)

            _begin(tf, start, may_use_gpus)
            if is_first:
                # Searching for GPUs prints the most on a machine without one; the first search happens here.
                tf.config.list_logical_devices()
    except Exception as error:
        if interrupts.noted() is not None or not isinstance(error, (ImportError, AssertionError)):
            interrupts.check()
            raise
        if isinstance(error, AssertionError):
            raise ConfigurationError(
                f"Keras refuses its own settings, {_keras_settings()}",
                f"correct or remove the file: rm {quoted(_keras_settings())}",
            ) from None
        raise MissingError(
            f"TensorFlow cannot be imported: {error}", "install it with: python -m pip install ipucnn"
        ) from None
    interrupts.check()
    if is_keras_new:
        # What a program that uses ipucnn would have without it.
        former = _current_settings()
        was_on = variable.lower() in ("1", "true") if is_first else former.is_deterministic
        _OF_IMPORT.append(replace(former, is_deterministic=was_on))
    _set_keras()
    if deterministic:
        from ipucnn.compat import enable_determinism

        enable_determinism()
    tf.get_logger().setLevel("ERROR")
    return tf


def _keras_settings() -> str:
    """Returns the path of the file with Keras' defaults."""
    return os.path.join(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras"), "keras.json")


def _check_keras_settings() -> None:
    """Refuses settings that are JSON but not an object, because they make the import of Keras fail.

    Raises:
        ConfigurationError: the settings are no JSON object.
    """
    with contextlib.suppress(OSError, ValueError), open(_keras_settings(), encoding="utf-8") as file:
        if not isinstance(json.load(file), dict):
            raise ConfigurationError(
                f"{_keras_settings()} is no JSON object of Keras's settings",
                f"correct or remove the file: rm {quoted(_keras_settings())}",
            )


def _set_keras() -> None:
    """Gives Keras the defaults that the networks are written for, regardless of its ``keras.json``.

    Raises:
        ConfigurationError: Keras already works with another backend in this process.
    """
    from tensorflow import keras

    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ConfigurationError(
            f"Keras works with the backend {backend} in this process already, and ipucnn needs tensorflow",
            "set KERAS_BACKEND=tensorflow, or import ipucnn before Keras",
        )
    _NEEDED.set()


@dataclass(frozen=True)
class _Settings:
    """What layers and operations take from the process that computes them.

    Attributes:
        floatx, epsilon, data_format: those of Keras.
        policy: Keras' policy of types; layers of a network that is trained in 16 bits name their own.
        is_deterministic: whether operations are deterministic, and random ones need a seed; None for what is set.
    """

    floatx: str
    epsilon: float
    data_format: str
    policy: Any
    is_deterministic: Optional[bool] = None

    def set(self) -> None:
        """Gives these settings to Keras and TensorFlow."""
        from tensorflow import keras

        from ipucnn.compat import disable_determinism, enable_determinism

        keras.backend.set_floatx(self.floatx)
        keras.backend.set_epsilon(self.epsilon)
        keras.backend.set_image_data_format(self.data_format)
        keras.mixed_precision.set_global_policy(self.policy)
        if self.is_deterministic is not None:
            (enable_determinism if self.is_deterministic else disable_determinism)()


_NEEDED = _Settings("float32", 1e-7, "channels_last", "float32")
_OF_IMPORT: List[_Settings] = []
"""The settings that Keras had when it was imported here; none if the program imported it."""


def _current_settings() -> _Settings:
    from tensorflow import keras

    from ipucnn.compat import KERAS_3, is_determinism_enabled

    backend = keras.backend
    floatx, policy = backend.floatx(), keras.mixed_precision.global_policy()
    if not KERAS_3 and policy.name == floatx:
        policy = None  # in Keras 2 the policy follows floatx until one is set
    return _Settings(floatx, backend.epsilon(), backend.image_data_format(), policy, is_determinism_enabled())


def set_needed(deterministic: bool) -> None:
    """Gives Keras and TensorFlow, if they are imported, the settings that ipucnn needs.

    Args:
        deterministic: whether operations give the same bytes each time; otherwise they are left as they are.
    """
    if _is_imported():
        replace(_NEEDED, is_deterministic=deterministic or None).set()


def _is_imported() -> bool:
    return {"tensorflow", "keras"} <= set(sys.modules)


@contextlib.contextmanager
def settings_of_program_kept() -> Iterator[None]:
    """Gives a program that uses ipucnn its settings of Keras and TensorFlow back after the block.

    Inside Keras has the settings that ipucnn needs; determinism is switched on by :func:`import_tensorflow` or
    :func:`set_needed`.
    """
    former = _current_settings() if _is_imported() else None
    try:
        if former is not None:
            _NEEDED.set()
        yield
    finally:
        former = former or (_OF_IMPORT[0] if _OF_IMPORT else None)
        if former is not None:
            former.set()


@contextlib.contextmanager
def _without_optional_modules() -> Iterator[None]:
    """Makes scikit-learn and matplotlib seem not installed, unless they are imported already.

    Keras 3 imports both for wrappers and galleries that no command uses, which is a quarter of the time of its import.
    A program that imports ipucnn may use them, so they are left out only in a process of a command.
    """
    absent = [name for name in ("sklearn", "matplotlib") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disables garbage collection during the import.

    The modules create half a million permanent objects; collecting garbage among them took a sixth of the import time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_matplotlib() -> Any:
    """Imports matplotlib, ignoring a ``matplotlibrc`` in the current folder.

    Anybody may have written such a file.  Its settings can name programs to run and modules to import (``text.usetex``,
    ``backend``), and a file that is not text makes the import fail.  The user's own settings apply.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # It says that it found no folder for its cache, and that it builds the cache of fonts.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with unseen("matplotlib", "matplotlibrc"):
        import matplotlib
    return matplotlib


def _begin(tf: ModuleType, start: Optional[Callable[[], None]], may_use_gpus: bool) -> None:
    """Sets the number of threads and calls ``start``, before TensorFlow looks for devices."""
    configured, are_required = tf.config.threading.get_intra_op_parallelism_threads(), are_threads_required()
    # TensorFlow's own number ignores the quota of a control group.
    current, without_run = configured or schedulable_cores(), configured or num_cores()
    threads = fixed_threads() or without_run
    if not are_required and may_use_gpus and tf.config.get_visible_devices("GPU"):
        # Half of the cores is the choice for CPUs, which compute two groups of fused micro-batches in parallel.
        threads = without_run
        fix_threads(threads, required=False)
    if threads != current:
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


@contextlib.contextmanager
def stderr_aside(shown_if_failed: bool) -> Iterator[None]:
    """Redirects file descriptor 2 to a temporary file, to hide the output of C++ code.

    Args:
        shown_if_failed: whether to show the output if an error ends the block.
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
        except UserError:
            # Its message says everything.
            raise
        except Exception:
            # A signal is not a failure: the output does not explain it.
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
