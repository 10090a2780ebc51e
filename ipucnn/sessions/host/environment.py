"""Imports TensorFlow for the host session: settings that must precede the import, and a quiet import."""

import os
import sys
import tempfile
from typing import Any, Tuple

from ipucnn.errors import MissingError, UserError


def set_variables() -> None:
    """Sets the environment variables that TensorFlow reads once, on import."""
    os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")
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


def import_tensorflow(verbose: bool = False) -> Any:
    """TensorFlow, configured for the host session; later calls return the same module.

    - oneDNN convolutions are switched on: two to four times faster than the others in training on x86 CPUs,
      once depthwise weight gradients are computed otherwise (``ipucnn.models.layers.depthwise``).
    - Operations are asked to be deterministic.
    - What TensorFlow's C++ side prints on import (missing GPU drivers and the like) is dropped unless
      ``verbose`` or the import fails.

    Raises:
        MissingError: TensorFlow is not installed.
    """
    if "tensorflow" not in sys.modules:
        set_variables()
        if not verbose:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        if verbose or "tensorflow" in sys.modules:
            import tensorflow as tf
        else:
            tf = _quiet_import()
    except ImportError as error:
        raise MissingError(
            f"TensorFlow cannot be imported: {error}", "install it with: python -m pip install ipucnn"
        ) from None
    from ipucnn.compat import enable_determinism

    enable_determinism()
    tf.get_logger().setLevel("ERROR")
    return tf


def _quiet_import() -> Any:
    """Imports with file descriptor 2 turned aside: the messages come from C++, before any log level counts."""
    try:
        kept, saved = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115 - closed below
    except OSError:
        # No stderr, or no temporary folder that can be written.
        import tensorflow as tf

        return tf
    with kept as aside:
        sys.stderr.flush()
        os.dup2(aside.fileno(), 2)
        failed = True
        try:
            import tensorflow as tf
            from tensorflow import keras  # noqa: F401  (lazily loaded on some versions)

            # Looking for GPUs is what prints most on a machine without one; the first look is here.
            tf.config.list_logical_devices()
            failed = False
        except (KeyboardInterrupt, SystemExit, UserError):
            # A signal ended the import (its handler may raise a UserError): what was printed is not the reason.
            failed = False
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            if failed:
                aside.seek(0)
                os.write(2, aside.read())
    return tf
