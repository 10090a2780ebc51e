"""Which existing files and folders a command may replace, and which outputs could not be written.

All is checked before any work begins.  A folder is replaced if ``--overwrite`` is given and it is of the same kind, as
are those of checkpoints and of folds, which ``writer.py`` looks at; a PNG or TIFF if ipucnn wrote it, because others
may be images of a data set; another file always, except one that is read.
"""

import contextlib
import itertools
import os
from pathlib import Path
from typing import Iterable, Optional, Sequence, Tuple

from ipucnn import filesystem
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import (
    Kind,
    check_makeable,
    check_not_replaced,
    entries,
    is_written_to,
    kind_of,
    open_regular,
    real,
    shown,
)
from ipucnn.text import printable, quoted

SOFTWARE = "ipucnn"
"""The text or tag "Software" of each PNG and TIFF that ipucnn writes: only such files are replaced."""
SOFTWARE_TAG = 305
_PNG_HEAD = 4096
"""Bytes at the beginning of a PNG that have its text; before it are at most a header and a palette."""


def check_replaceable(
    path: Path,
    foreign: Iterable[str],
    mark: str,
    what: str,
    overwrite: bool,
    flag: str = "--run-dir",
    continues: str = "",
) -> None:
    """Refuses a folder to write that has files of something else, or that ``--overwrite`` would have to replace.

    Args:
        path: the folder; it is free if it is absent or empty.
        foreign: the files in it that such a folder never has.
        mark: the file that every such folder has.
        what: the folder in words, for messages.
        overwrite: whether such a folder may be replaced.
        flag: the option that names the folder.
        continues: the other way to go on with such a folder, for the hint.

    Raises:
        ConfigurationError: it is not free, and not such a folder, or not to be replaced.
    """
    if not path.exists() or not entries(path):
        return
    stray = next((printable(name) for name in foreign), None)
    if not (path / mark).is_file() or (stray is not None and overwrite):
        holds = "" if stray is None else f": it holds {stray}"
        raise ConfigurationError(
            f"{path} is not (only) {what}{holds}; not overwritten", f"choose another {flag}"
        )
    if not overwrite:
        ways = [continues, "" if stray is not None else f"--overwrite replaces {path}"]
        hint = "; or ".join([*filter(None, [", ".join(filter(None, ways))]), f"use another {flag}"])
        raise ConfigurationError(f"{path} already exists and is {what}", hint)


def check_outputs(
    outputs: Iterable[Tuple[str, Optional[Path], Sequence[str]]], inputs: Iterable[Tuple[str, Path]]
) -> None:
    """Refuses output files that could not be written, before any work begins.

    Args:
        outputs: (flag, output file or None, legal extensions, compared without regard to case); devices, FIFOs and
            streams need no extension.
        inputs: (description, path) of files that are read and must not be replaced.

    Raises:
        ConfigurationError: another extension, a file that is also read, a PNG of others, or the same file twice.
        DataError: no folder, no permission, or a folder of that name.
    """
    outputs, inputs = list(outputs), list(inputs)
    for option, path, extensions in outputs:
        if path is None:
            continue
        has_ending = path.suffix.lower() in extensions or is_written_to(path)
        if path.name in ("", ".", "..") or not has_ending:
            raise ConfigurationError(
                f"{option} {shown(path)}: the name must end in {', '.join(extensions)}",
                f"for example {option} {shown(path.stem or 'result')}{extensions[0]}",
            )
        filesystem.check_output(path)
        is_foreign = path.suffix.lower() == ".png" and kind_of(path) is Kind.FILE and not _is_result(path)
        if is_foreign and not any(real(path) == real(read) for _, read in inputs):
            raise ConfigurationError(
                f"{option} {shown(path)}: it does not say that ipucnn wrote it, and would be replaced",
                f"choose another name, or move it away: mv {quoted(path)} {quoted(path.with_suffix('.old.png'))}",
            )
    check_not_replaced([(option, path) for option, path, _ in outputs], inputs)


def _is_result(path: Path) -> bool:
    """Returns whether ipucnn wrote a PNG or TIFF; false for other and for damaged files."""
    import tifffile

    with contextlib.suppress(Exception), open_regular(path) as file:
        if path.suffix.lower() == ".png":
            return f"tEXtSoftware\0{SOFTWARE}".encode() in file.read(_PNG_HEAD)
        return bool(tifffile.TiffFile(file, name=path.name).pages[0].tags[SOFTWARE_TAG].value == SOFTWARE)
    return False


def check_only_results_replaced(folder: Path, paths: Iterable[Path]) -> None:
    """Refuses results in place of files that ipucnn did not write, such as masks that the user drew.

    Args:
        folder: the output folder.
        paths: all files that will be written.

    Raises:
        ConfigurationError: a file of that name exists, and is no result.
    """
    for path in paths:
        if kind_of(path) is not Kind.ABSENT and not _is_result(path):
            beside = "predicted" if folder.name in ("", "..") else f"{folder}-predicted"
            names = (beside + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
            unused = next(Path(name) for name in names if kind_of(Path(name)) is Kind.ABSENT)
            raise ConfigurationError(
                f"--output {shown(folder)}: {shown(path)} does not say that ipucnn wrote it, and would be replaced",
                f"--output {quoted(unused)}, or move the file away",
            )


def check_images_kept(folder: Path, results: Iterable[Path], images: Iterable[str]) -> None:
    """Refuses results in place of the images that they are of.

    Raises:
        ConfigurationError: a result has the path of an image.
    """
    read = {os.path.realpath(image) for image in images}
    for path in results:
        if str(real(path)) in read:
            raise ConfigurationError(
                f"--output {folder}: {path} is one of the images, and would be replaced",
                "choose another folder",
            )


def check_output_folder(folder: Path) -> None:
    """Refuses an output folder that could not be written to, before any work begins.

    Raises:
        DataError: a file of that name, a missing parent folder, or no permission.
    """
    check_makeable(folder)
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise DataError(
            f"--output {folder}: folder {parent} does not exist", "make the folder, or choose another"
        )
