"""Results on their way to files: kept on disk, so that memory does not grow with the number of images."""

import csv
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Sequence

from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import reason_of, write_atomically, write_hint


class Spool:
    """A list of dictionaries in an anonymous temporary file, gone when the process ends, however it ends.

    Append first, then iterate, any number of times.  All of it raises DataError where the temporary folder is
    full, or cannot be used.
    """

    def __init__(self) -> None:
        with in_temporary_folder():
            self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed with this object
        self._length = 0

    def append(self, row: Dict[str, Any]) -> None:
        """Adds a JSON-able row."""
        with in_temporary_folder():
            self._file.write(json.dumps(row) + "\n")
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        with in_temporary_folder():
            self._file.flush()
            self._file.seek(0)
        for line in self._file:
            yield json.loads(line)


@contextmanager
def in_temporary_folder() -> Iterator[None]:
    """Names the temporary folder in what goes wrong inside, and not the file that results are written to."""
    try:
        yield
    except OSError as error:
        try:
            where = tempfile.gettempdir()
        except OSError:
            where = "a temporary folder"  # there is none; the reason lists where Python looked
        raise DataError(
            f"results cannot be kept in {where}: {reason_of(error)}",
            write_hint(error, "set TMPDIR to another folder"),
        ) from error


def check_output(path: Path, option: str, extensions: Sequence[str], inputs: Iterable[str] = ()) -> None:
    """Refuses a file that could not be written in the end, before any work.

    Args:
        path: the file to be.
        option: the flag, for messages.
        extensions: what its name may end in, without regard to case.
        inputs: files that are read, and must not be replaced.

    Raises:
        ConfigurationError: another extension, or a file that is read.
        DataError: no folder, no permission, or a folder of that name.
    """
    if path.suffix.lower() not in extensions:
        raise ConfigurationError(
            f"{option} {path}: the name must end in {', '.join(extensions)}",
            f"for example {option} {path.with_suffix(extensions[0]).name}",
        )
    if any(os.path.abspath(name) == os.path.abspath(path) for name in inputs):
        raise ConfigurationError(f"{option} {path} is one of the images", "choose another name")
    folder = path.parent
    if path.is_dir():
        raise DataError(f"{option} {path} is a folder", "give the name of a file")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{option} {path}: folder {folder} {what}", "make the folder, or choose another")
    if not os.access(str(folder), os.W_OK):
        raise DataError(f"{option} {path}: folder {folder} is not writable", "choose another folder")


def write_csv(path: Path, columns: List[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a table atomically, UTF-8.  Raises DataError where the file system refuses."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as handle:
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)

    write_atomically(path, write)
