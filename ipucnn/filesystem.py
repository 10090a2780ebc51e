"""The one place that asks the file system about paths a user gave, reads what lies there, and writes.

Every question can be answered with an OSError (no permission, a loop of links, a name that is too long), and
pathlib adds RuntimeError (``~nouser``) and ValueError (a NUL).  Here each becomes a :class:`UserError` that
names the path, and the folders and files on the way are looked at, never executed.

Files that a run keeps in its own folder are written with :func:`write_atomically`, which replaces whatever has
the name: a link that somebody planted there is not followed.  What a user asks for by an option goes through
:func:`write_output`, which writes to what the name leads to, a device or a pipe included.
"""

import contextlib
import errno
import os
import re
import stat
import sys
import time
from enum import Enum
from pathlib import Path
from typing import IO, BinaryIO, Callable, Iterator, List, Optional, Type, Union

from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.text import printable

_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_ABSENT = (errno.ENOENT, errno.ENOTDIR)

NAME_BYTES = 255
"""The longest file name of Linux' file systems (``NAME_MAX`` of limits.h), in bytes."""
PATH_BYTES = 4095
"""The longest path the kernel takes (``PATH_MAX`` of limits.h, less the NUL at its end), in bytes."""
SHOWN_CHARACTERS = 200
"""How much of a path or value a message repeats."""
_PIECE_BYTES = 2**20
FIFO_WAIT_S = 10.0
"""How long a FIFO may wait for the program that reads it: one typed after this in the same line of a shell."""

_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
_STREAM = re.compile(r"/dev/(stdout|stderr|fd/(\d+))|/proc/self/fd/(\d+)")


class Kind(Enum):
    """What a path leads to, links followed."""

    ABSENT = "nothing"
    FILE = "a file"
    FOLDER = "a folder"
    FIFO = "a FIFO"
    DEVICE = "a device"
    SOCKET = "a socket"


# -- what went wrong ------------------------------------------------------------------------------------------


def reason_of(error: Exception) -> str:
    """Why, in the system's words and without the path."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def write_hint(error: OSError, elsewhere: str = "choose another folder") -> str:
    """What to do where something could not be written.

    Args:
        error: what the system said.
        elsewhere: how another place is chosen.
    """
    if error.errno in _SPACE:
        return f"free some space, or {elsewhere}"
    if error.errno in _PERMISSION:
        return f"make it writable, or {elsewhere}"
    if error.errno in _ABSENT:
        return f"make the folder it is in, or {elsewhere}"
    if error.errno == errno.ENAMETOOLONG:
        return "choose a shorter name"
    return elsewhere


def read_hint(error: Exception) -> str:
    """What to do where something could not be looked at or read."""
    number = getattr(error, "errno", None)
    if number in _PERMISSION:
        return "make it and the folders above it readable, or give another path"
    if number == errno.ELOOP:
        return "its links lead round in a circle: give a path that ends somewhere"
    if number == errno.ENAMETOOLONG:
        return "give a shorter path"
    if number in _ABSENT:
        return "check the path"
    return "give another path"


def shown(path: Union[str, "os.PathLike[str]"]) -> str:
    """A path as a message repeats it: on one line, and shortened in the middle where it is very long."""
    text = printable(os.fspath(path))
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


@contextlib.contextmanager
def asking(
    path: Union[str, "os.PathLike[str]"], what: str = "", error: Type[UserError] = DataError
) -> Iterator[None]:
    """Turns what the file system answers inside the block into an error about ``path``.

    Args:
        path: what the questions are about.
        what: an option or a role, for example ``--save`` or ``run folder``, to stand before the path.
        error: what is raised; its class decides about the exit code.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as problem:
        if isinstance(problem, (BrokenPipeError, RecursionError, UnicodeDecodeError)):
            raise
        name = f"{what} {shown(path)}" if what else shown(path)
        raise error(f"{name}: {reason_of(problem)}", read_hint(problem)) from problem


# -- looking --------------------------------------------------------------------------------------------------


def expand(text: str, what: str = "", error: Type[UserError] = ConfigurationError) -> Path:
    """The path that a user typed, ``~`` and ``~user`` expanded.

    Raises:
        ConfigurationError (or ``error``): it is empty, no path can be it, or there is no such user.
    """
    name = f"{what} {shown(text)}" if what else shown(text)
    if "\0" in text:
        raise error(f"{name}: a path cannot contain a NUL character", "remove it")
    if not text:
        raise error(f"{what or 'a path'} is empty", "give a path")
    encoded = os.fsencode(text) if _is_encodable(text) else None
    if encoded is None:
        raise error(f"{name}: it has characters that no file name here can have", "give another path")
    if len(encoded) > PATH_BYTES or any(len(part) > NAME_BYTES for part in encoded.split(b"/")):
        raise error(
            f"{name}: the name is too long (a name has at most {NAME_BYTES} bytes, a path {PATH_BYTES})",
            "give a shorter path",
        )
    try:
        return Path(text).expanduser()
    except (RuntimeError, KeyError):
        user = text.split("/", 1)[0]
        raise error(f"{name}: there is no user {user[1:]!r} here", f"write ./{text} if the name is meant") from None


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def kind_of(path: Path, what: str = "", error: Type[UserError] = DataError) -> Kind:
    """What a path leads to.

    Raises:
        DataError (or ``error``): the file system does not say: no permission, links in a circle, too long a name.
    """
    with asking(path, what, error):
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return Kind.ABSENT
    return _kind_of_mode(mode)


def _kind_of_mode(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return Kind.FILE
    if stat.S_ISDIR(mode):
        return Kind.FOLDER
    if stat.S_ISFIFO(mode):
        return Kind.FIFO
    return Kind.SOCKET if stat.S_ISSOCK(mode) else Kind.DEVICE


def exists(path: Path, what: str = "", error: Type[UserError] = DataError) -> bool:
    """Whether a path leads to anything; raises as :func:`kind_of` does."""
    return kind_of(path, what, error) is not Kind.ABSENT


def is_file(path: Path, what: str = "", error: Type[UserError] = DataError) -> bool:
    """Whether a path leads to a regular file; raises as :func:`kind_of` does."""
    return kind_of(path, what, error) is Kind.FILE


def is_folder(path: Path, what: str = "", error: Type[UserError] = DataError) -> bool:
    """Whether a path leads to a folder; raises as :func:`kind_of` does."""
    return kind_of(path, what, error) is Kind.FOLDER


def file_size(path: Path, what: str = "", error: Type[UserError] = DataError) -> int:
    """The bytes of what a path leads to; raises as :func:`kind_of` does, and where there is nothing."""
    with asking(path, what, error):
        return os.stat(path).st_size


def entries(folder: Path, what: str = "", error: Type[UserError] = DataError) -> List[Path]:
    """What lies in a folder, sorted by name; nothing if the folder is absent.

    Raises:
        DataError (or ``error``): it cannot be read.
    """
    with asking(folder, what, error):
        try:
            return sorted(folder / name for name in os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def real(path: Path, what: str = "", error: Type[UserError] = DataError) -> Path:
    """The absolute path with every link followed as far as it leads."""
    with asking(path, what, error):
        return Path(os.path.realpath(path))


# -- reading --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_regular(
    path: Path,
    what: str = "",
    error: Type[UserError] = DataError,
    hint: Optional[str] = None,
    regular: str = "a file",
) -> Iterator[BinaryIO]:
    """A regular file, opened for reading in binary; what the block asks of it is asked as in :func:`asking`.

    A FIFO or a device is refused rather than waited for: it may never end.

    Args:
        path: as expanded.
        what: an option or a role to stand before the path.
        error: what is raised.
        hint: what to do about an error, where there is more to say than "check the path".
        regular: what it should be, for the message about what it is instead.

    Raises:
        DataError (or ``error``): absent, not a regular file, or not readable.
    """
    name = f"{what} {shown(path)}" if what else shown(path)
    with asking(path, what, error):
        try:
            # Without O_NONBLOCK the call would wait for the writer of a FIFO.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        except (FileNotFoundError, NotADirectoryError):
            raise error(f"{name}: there is no such file", hint or "check the path") from None
        kind = _kind_of_mode(os.fstat(handle).st_mode)
        if kind is not Kind.FILE:
            os.close(handle)
            raise error(f"{name} is {kind.value}, not {regular}", hint or "give the path of a file")
    with os.fdopen(handle, "rb") as file:
        yield file


def read_bytes(
    path: Path, at_most: int, what: str = "", error: Type[UserError] = DataError, hint: Optional[str] = None
) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        DataError (or ``error``): absent, not a regular file, too large, or not readable.
    """
    name = f"{what} {shown(path)}" if what else shown(path)
    with open_regular(path, what, error, hint) as file, asking(path, what, error):
        size = os.fstat(file.fileno()).st_size
        # Python would reserve memory for all that is asked for: no more than there is.  Files in /proc say 0.
        data = b"" if size > at_most else file.read(min(size, at_most) + 1)
        while size < len(data) <= at_most:
            more = file.read(min(at_most + 1 - len(data), _PIECE_BYTES))
            if not more:
                break
            data += more
    if size > at_most or len(data) > at_most:
        raise error(f"{name} is larger than {at_most:,} bytes", hint or "give another file")
    return data


def read_text(
    path: Path, at_most: int, what: str = "", error: Type[UserError] = DataError, hint: Optional[str] = None
) -> str:
    """The text of a regular file in UTF-8; raises as :func:`read_bytes` does, and for bytes that are no UTF-8."""
    data = read_bytes(path, at_most, what, error, hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        name = f"{what} {shown(path)}" if what else shown(path)
        line = data.count(b"\n", 0, problem.start) + 1
        raise error(
            f"{name}, line {line}: byte 0x{data[problem.start]:02x} is not UTF-8 text",
            hint or "save the file as UTF-8",
        ) from None


# -- writing --------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path``, syncs what it wrote, and renames it.

    A crash leaves the old file or the new one, never half of one.  A link of that name is replaced.

    Raises:
        DataError: the file system refuses (disk full, no permission); ``path`` is then what it was.
    """
    temporary = path.with_name(_temporary_name(path.name))
    try:
        write(temporary)
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be written: {reason_of(error)}", write_hint(error)) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def write_text(path: Path, text: Union[str, bytes]) -> None:
    """Writes a small file of a run atomically, UTF-8."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_atomically(path, lambda temporary: _write_bytes(temporary, data))


def check_output(path: Path, option: str, error: Type[UserError] = DataError) -> None:
    """Refuses, before anything is computed, a path that :func:`write_output` could not write.

    Args:
        path: as expanded.
        option: that names it.

    Raises:
        DataError (or ``error``): a folder, a socket, a file that is not writable, or a name in a folder that is
            absent or not writable.
    """
    if _stream_of(path) is not None:
        return
    kind = kind_of(path, option, error)
    if kind is Kind.FOLDER:
        raise error(f"{option} {shown(path)} is a folder", "give the name of a file")
    if kind is Kind.SOCKET:
        raise error(f"{option} {shown(path)} is a socket", "give the name of a file")
    if kind in (Kind.FIFO, Kind.DEVICE):
        if not os.access(path, os.W_OK):
            raise error(f"{option} {shown(path)} is not writable", "make it writable, or give another name")
        return
    target = real(path, option, error)
    parent = kind_of(target.parent, option, error)
    if parent is Kind.ABSENT:
        raise error(
            f"{option} {shown(path)}: there is no folder {shown(target.parent)}", f"mkdir -p {shown(target.parent)}"
        )
    if parent is not Kind.FOLDER:
        raise error(f"{option} {shown(path)}: {shown(target.parent)} is {parent.value}", "give another name")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise error(
            f"{option} {shown(path)}: the folder {shown(target.parent)} is not writable",
            "make it writable, or give a name in another folder",
        )


def write_output(path: Path, write: Callable[[Path], None]) -> None:
    """Writes what a user asked for to what a path leads to.

    A regular file, or a new name, is written under a temporary name beside it (beside the end of its links) and
    renamed, and keeps its permissions.  A device, a FIFO, or a stream of this process (``/dev/stdout``) is
    written to as it is.

    Args:
        path: as expanded and checked by :func:`check_output`.
        write: called with the path of a temporary file.

    Raises:
        DataError: it cannot be written.
    """
    stream = _stream_of(path)
    kind = Kind.DEVICE if stream is not None else kind_of(path)
    if kind in (Kind.FILE, Kind.ABSENT):
        target = real(path)
        mode: Optional[int] = None
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(target).st_mode)

        def write_same_mode(temporary: Path) -> None:
            write(temporary)
            if mode is not None:
                os.chmod(temporary, mode)

        write_atomically(target, write_same_mode)
        return
    if kind in (Kind.FOLDER, Kind.SOCKET):
        raise DataError(f"{shown(path)} is {kind.value}", "give the name of a file")
    # Not on top of the file: they are needed here alone, and their import takes longer than all else here.
    import shutil
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="ipucnn-") as folder:
            temporary = Path(folder) / "output"
            write(temporary)
            with open(temporary, "rb") as source, _open_plainly(path, kind, stream) as target_file:
                shutil.copyfileobj(source, target_file)
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be written: {reason_of(error)}", write_hint(error)) from None


def write_output_text(path: Path, text: Union[str, bytes]) -> None:
    """:func:`write_output` of a text in UTF-8, or of bytes."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_output(path, lambda temporary: _write_bytes(temporary, data))


def _stream_of(path: Path) -> Optional[int]:
    """The number of the open file that a path such as ``/dev/stdout`` means, or None.

    Where stdout goes to a file, following the name's links would find that file, and renaming another over it
    would take it away from whatever else this process and its shell write there.
    """
    match = _STREAM.fullmatch(os.path.normpath(path))
    if match is None:
        return None
    number = {"stdout": 1, "stderr": 2}.get(match.group(1))
    return number if number is not None else int(match.group(2) or match.group(3))


def _open_plainly(path: Path, kind: Kind, stream: Optional[int]) -> IO[bytes]:
    """What is there, opened for writing as it is; a FIFO waits a while for its reader."""
    if stream is not None:
        for text in (sys.stdout, sys.stderr):
            text.flush()
        return os.fdopen(os.dup(stream), "wb")
    flags = os.O_WRONLY | getattr(os, "O_NOCTTY", 0)
    until = time.monotonic() + FIFO_WAIT_S
    while kind is Kind.FIFO:
        try:
            # Without O_NONBLOCK this would wait for a reader for ever.
            handle = os.open(path, flags | os.O_NONBLOCK)
            os.set_blocking(handle, True)
            return os.fdopen(handle, "wb")
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > until:
                raise
            time.sleep(0.05)
    return os.fdopen(os.open(path, flags), "wb")


def _temporary_name(name: str) -> str:
    ending = f".{os.getpid()}.tmp"
    kept = os.fsencode(name)[: NAME_BYTES - len(ending) - 1].decode("utf-8", "ignore")
    return f".{kept}{ending}"


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
    for path in entries(folder):
        name = temporary_of(path.name)
        if name is not None and is_ours(name):
            with asking(path):
                path.unlink()


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
