"""TF_POPLAR_FLAGS, and the driver's progress bar.

The driver reads the variable once, on its first access in the process, and ends the process for a flag it does not
know.  It prints its progress bar on stdout, file descriptor 1, where this program's results belong.
"""

import contextlib
import os
import sys
import threading
from typing import Any, Iterator, List

from ipucnn.errors import ConfigurationError

VARIABLE = "TF_POPLAR_FLAGS"
_CACHE = "--executable_cache_path"


def _name(word: str) -> str:
    return word.partition("=")[0]


def poplar_flags(config: Any, synthetic: bool, present: str) -> str:
    """The value of TF_POPLAR_FLAGS for a run: what the user set, and what is missing from it.

    Args:
        config: ``RunConfig``.
        synthetic: no data is sent to the IPUs, which make up their own.
        present: the variable's value.

    Raises:
        ConfigurationError: ``compile_only`` without a folder for what is compiled.
    """
    words = present.split()
    names = {_name(word) for word in words}
    wanted = ["--show_progress_bar=true"]
    if config is not None and config.executable_cache:
        wanted.append(f"{_CACHE}={os.path.abspath(os.path.expanduser(config.executable_cache))}")
    if synthetic:
        wanted += ["--use_synthetic_data", "--synthetic_data_initializer=random"]
    words += [word for word in wanted if _name(word) not in names]
    has_cache = _CACHE in {_name(word) for word in words}
    if config is not None and config.compile_only and not has_cache:
        raise ConfigurationError(
            "--compile-only needs a folder for what is compiled", "add --executable-cache DIR"
        )
    return " ".join(words)


def executable_cache() -> str:
    """The folder of compiled programs, from the driver's flags; "" without one."""
    for word in os.environ.get(VARIABLE, "").split():
        name, _, value = word.partition("=")
        if name == _CACHE:
            return value
    return ""


def set_flags(config: Any) -> None:
    """Sets TF_POPLAR_FLAGS; call it before TensorFlow is imported.

    Raises:
        ConfigurationError: see :func:`poplar_flags`.
    """
    synthetic = bool(getattr(config, "device_generated_data", False))
    os.environ[VARIABLE] = poplar_flags(config, synthetic, os.environ.get(VARIABLE, ""))


@contextlib.contextmanager
def captured_stdout() -> Iterator[List[bytes]]:
    """Takes what C++ prints on stdout; a terminal's stderr sees it, as compiling takes minutes.

    Yields:
        A list that holds the bytes once the context has ended.
    """
    found: List[bytes] = []
    try:
        sys.stdout.flush()
        reading, writing = os.pipe()
        saved = os.dup(1)
    except (OSError, ValueError):
        yield found
        return
    show = sys.stderr is not None and sys.stderr.isatty()

    def drain() -> None:
        while True:
            part = os.read(reading, 65536)
            if not part:
                return
            found.append(part)
            if show:
                os.write(2, part)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    os.dup2(writing, 1)
    os.close(writing)
    try:
        yield found
    finally:
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        thread.join(timeout=10)
        os.close(reading)
