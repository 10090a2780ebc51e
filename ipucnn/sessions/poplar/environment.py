"""TF_POPLAR_FLAGS, and the driver's progress bar.

The driver reads the variable once, on its first access in the process, and ends the process for a flag it does not
know.  It prints its progress bar on stdout, file descriptor 1, where this program's results belong.
"""

import contextlib
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Iterator, List

from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import absolute, expand, make_folder, reason_of, write_hint
from ipucnn.sessions.poplar.surroundings import flag_words

VARIABLE = "TF_POPLAR_FLAGS"
_CACHE = "--executable_cache_path"


def _name(word: str) -> str:
    return word.partition("=")[0]


def _quoted(value: str) -> str:
    """A flag's value as the driver and ``shlex`` both read it.

    The driver (compiler/xla/parse_flags_from_env.cc) knows quotes only around a whole value, right after the ``=``, and
    takes ``\\`` for an escape only between double quotes: ``shlex.quote`` writes others.
    """
    if re.search(r"[\s'\"\\]", value) is None:
        return value
    if "'" not in value:
        return f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def poplar_flags(config: Any, synthetic: bool, present: str) -> str:
    """The value of TF_POPLAR_FLAGS for a run: what the user set, and what is missing from it.

    Args:
        config: ``RunConfig``.
        synthetic: no data is sent to the IPUs, which make up their own.
        present: the variable's value.

    Raises:
        ConfigurationError: ``compile_only`` without a folder for what is compiled.
    """
    names = {_name(word) for word in flag_words(present)}
    wanted = ["--show_progress_bar=true"]
    if config is not None and config.executable_cache:
        folder = os.path.normpath(
            absolute(expand(config.executable_cache, "--executable-cache"), "--executable-cache")
        )
        wanted.append(f"{_CACHE}={_quoted(folder)}")
    if synthetic:
        wanted += ["--use_synthetic_data", "--synthetic_data_initializer=random"]
    added = [word for word in wanted if _name(word) not in names]
    has_cache = _CACHE in names.union(map(_name, added))
    if config is not None and config.compile_only and not has_cache:
        raise ConfigurationError(
            "--compile-only needs a folder for what is compiled", "add --executable-cache DIR"
        )
    # What the user wrote stays as it is, with its quotes.
    return " ".join([present.strip(), *added]).strip()


def executable_cache() -> str:
    """The folder of compiled programs, from the driver's flags; "" without one."""
    return _cache_in(os.environ.get(VARIABLE, ""))


def _cache_in(flags: str) -> str:
    for word in flag_words(flags):
        name, _, value = word.partition("=")
        if name == _CACHE:
            return value
    return ""


def set_flags(config: Any) -> None:
    """Sets TF_POPLAR_FLAGS, and makes the folder of compiled programs; call it before TensorFlow is imported.

    Raises:
        ConfigurationError: see :func:`poplar_flags`.
        DataError: nothing can be written to that folder.
    """
    synthetic = bool(getattr(config, "device_generated_data", False))
    present = os.environ.get(VARIABLE, "")
    flags = poplar_flags(config, synthetic, present)
    folder = _cache_in(flags)
    if folder:
        elsewhere = (
            f"name another folder in {VARIABLE}"
            if _cache_in(present)
            else "choose another --executable-cache"
        )
        _check_cache(folder, elsewhere)
    os.environ[VARIABLE] = flags


def _check_cache(folder: str, elsewhere: str) -> None:
    """Makes the cache and writes to it: the driver would end in an error after minutes of compiling."""
    make_folder(Path(folder), "executable cache", elsewhere)
    try:
        # In a folder of others' files a probe must have a name of its own: instances look at the same time.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"executable cache {folder} cannot be written: {reason_of(error)}",
            write_hint(error, elsewhere),
        ) from None


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
