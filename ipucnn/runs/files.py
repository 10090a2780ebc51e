"""Writing files so that a crash leaves the old one or the new one, never half of one."""

import os
import re
from pathlib import Path
from typing import Callable, Optional, Union

from ipucnn.errors import DataError
from ipucnn.system_errors import reason_of, write_hint

_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")


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
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {reason_of(error)}", write_hint(error)) from None
    finally:
        if temporary.exists():
            temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut; where folders cannot be synced there is nothing to do."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def temporary_of(name: str) -> Optional[str]:
    """The file that a temporary of :func:`write_atomically` was to become; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return match.group(1) if match is not None else None


def remove_temporaries(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Removes what a killed process left of :func:`write_atomically`, for the file names ``is_ours`` accepts."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        name = temporary_of(path.name)
        if name is not None and is_ours(name):
            path.unlink()


def write_text(path: Path, text: Union[str, bytes]) -> None:
    """Writes a small file atomically, UTF-8."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_atomically(path, lambda temporary: _write_bytes(temporary, data))


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
