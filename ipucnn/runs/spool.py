"""Results on their way to files: kept on disk, so that memory does not grow with the number of images."""

import csv
import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from ipucnn import filesystem
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import (
    check_different,
    check_not_read,
    is_written_to,
    reason_of,
    shown,
    write_hint,
    write_output,
)


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


def check_output(
    path: Path, option: str, extensions: Sequence[str], inputs: Iterable[Tuple[str, Path]] = ()
) -> None:
    """Refuses a file that could not be written in the end, before any work.

    Args:
        path: the file to be.
        option: the flag, for messages.
        extensions: what its name may end in, without regard to case; a device, FIFO or stream needs no ending.
        inputs: (what it is, path) of what is read, and must not be replaced.

    Raises:
        ConfigurationError: another extension, or a file that is read.
        DataError: no folder, no permission, or a folder of that name.
    """
    if path.name in ("", ".", "..") or (path.suffix.lower() not in extensions and not is_written_to(path)):
        raise ConfigurationError(
            f"{option} {shown(path)}: the name must end in {', '.join(extensions)}",
            f"for example {option} {shown(path.stem or 'result')}{extensions[0]}",
        )
    filesystem.check_output(path, option)
    check_not_read(path, option, inputs, ConfigurationError)


def check_outputs(
    outputs: Iterable[Tuple[str, Optional[Path], Sequence[str]]], inputs: Iterable[Tuple[str, Path]]
) -> None:
    """:func:`check_output` of each (option, file, extensions) whose file is not None; no two may be one file.

    Raises:
        ConfigurationError, DataError: as that does; two are one file.
    """
    outputs, inputs = list(outputs), list(inputs)
    for option, path, extensions in outputs:
        if path is not None:
            check_output(path, option, extensions, inputs)
    check_different([(option, path) for option, path, _ in outputs], ConfigurationError)


def format_of(path: Path, extensions: Sequence[str]) -> str:
    """The ending, with its dot, whose format is written: the name's, or the first for ``/dev/stdout`` and the like."""
    suffix = path.suffix.lower()
    return suffix if suffix in extensions else extensions[0]


def write_csv(path: Path, columns: List[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a table, UTF-8, to what a path leads to.  Raises DataError where the file system refuses."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as handle:
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)

    write_output(path, write)
