"""Writing files so that a crash leaves the old one or the new one, never half of one."""

import os
from pathlib import Path
from typing import Callable, Union

from ipucnn.errors import DataError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path``, syncs what it wrote, and renames it.

    Raises:
        DataError: the file system refuses (disk full, no permission); ``path`` is then what it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}", "free some space or choose another folder"
        ) from None
    finally:
        if temporary.exists():
            temporary.unlink()


def write_text(path: Path, text: Union[str, bytes]) -> None:
    """Writes a small file atomically, UTF-8."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_atomically(path, lambda temporary: _write_bytes(temporary, data))


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
