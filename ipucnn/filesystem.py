"""File access for paths from users: checks, reading, and writing.

Errors of the file system become a :class:`DataError` that names the path: here, or where they end a command
(``ipucnn.cli`` and ``ipucnn.api`` call :func:`user_error_of`).  So questions about a path are ``pathlib``'s, which
raises an error where permission is denied (in all supported versions; that of Python 3.14 answers False).

What is more than ``pathlib`` has one of these reasons:

- :func:`kind_of` names the kind of a path, for messages, and reports circular links.
- Reading (:func:`open_regular`) refuses FIFOs and devices, which would hang, and files beyond a limit of memory.
- :func:`write_atomically` and :func:`write_folder` leave an old or a new file after a kill or on a full disk.  They
  replace a link in a run folder that came from somebody else; :func:`append_text` refuses it.
- Locks (:func:`locked`) keep two processes out of one folder.
- Outputs of options (:func:`write_output`) follow links, keep permissions, and may be ``/dev/stdout`` or a pipe.
- :func:`check_output` and :func:`check_not_replaced` refuse before hours of work what could not be written after it.
- :func:`private_cache_folder` holds code, which others could replace in a shared folder.
"""

import codecs
import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
import sys
import time
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, Union

from ipucnn.errors import (
    ConfigurationError,
    DataError,
    InfeasibleError,
    NoSpaceError,
    UserError,
    is_out_of_memory,
    system_error_in,
)
from ipucnn.text import printable, quoted, shown_value

NAME_BYTES = 255
"""The longest file name on Linux file systems (``NAME_MAX`` of limits.h), in bytes."""

_PERMISSION = "change its permissions or those of the folders above it, or give another path"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The machine's disks, memory and limits are exhausted, or a disk fails: no program can avoid that.
_OF_MACHINE = (
    *(*_FULL, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM),
)
_NO_TEMPORARY = "No usable temporary directory"
"""Beginning of the reason of Python's ``tempfile``."""
_HINTS = {
    **dict.fromkeys(_FULL, "free some space, or give a path on another disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _PERMISSION),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check the path; a folder is made with: mkdir -p"),
    errno.ELOOP: "give a path without links: these lead round in a circle, or are not followed here",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENXIO: "start the program that reads from it first, or give the name of a file",
    errno.EMFILE: "raise the number of open files: ulimit -n 4096",
    **dict.fromkeys((errno.EAGAIN, errno.ENOMEM), "end other programs, and run it again"),
}

_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
_STREAM = re.compile(r"/dev/(stdin|stdout|stderr)|(?:/dev|/proc/(?:self|thread-self))/fd/(\d{1,9})")
_STANDARD = ("stdin", "stdout", "stderr")
# Without O_NONBLOCK, opening would wait for the other end of a FIFO that meanwhile replaced a file.
_SAFELY = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Kind(Enum):
    """The kind of a path's target, with links followed."""

    ABSENT = "nothing"
    FILE = "a file"
    FOLDER = "a folder"
    OTHER = "a device, a FIFO or a socket"


_KINDS = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.FOLDER}


# -- errors ---------------------------------------------------------------------------------------------------


def reason_of(error: Exception) -> str:
    """The system's text of an error, without the path."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def error_of(
    problem: Exception, path: Union[str, bytes, "os.PathLike[str]", None] = None, failed: str = ""
) -> DataError:
    """Converts an error of the file system into a :class:`DataError` with a hint.

    Args:
        problem: the system's error.
        path: the path of the error; None for the one in ``problem``.
        failed: the action that failed, such as "cannot be written".
    """
    named = path if path is not None else getattr(problem, "filename", None)
    number = getattr(problem, "errno", None) or 0
    reason, hint = reason_of(problem), _HINTS.get(number, "give another path")
    if not isinstance(named, (str, bytes, os.PathLike)):
        # Only temporary files are written without a name.
        is_temporary = number in _FULL or _NO_TEMPORARY in reason
        return DataError(reason, "set TMPDIR to a folder on a disk with free space" if is_temporary else hint)
    kind = NoSpaceError if number in _FULL else DataError
    return kind(f"{shown(os.fsdecode(named))}{failed and ' ' + failed}: {reason}", hint)


def user_error_of(error: BaseException, smaller: str = "") -> Optional[UserError]:
    """Converts an error that the user or the machine caused, and that ends a command, into a :class:`UserError`.

    These are errors about a path, exhausted memory, disks and limits, and a working directory that was deleted.  Any
    other error is a bug.

    Args:
        error: the error.
        smaller: options of the command that reduce the memory it needs, for the hint.

    Returns:
        None for a bug.
    """
    if is_out_of_memory(error):
        hint = f"use a smaller {smaller}, or raise the limit (ulimit -v)" if smaller else "end other programs"
        return InfeasibleError("out of memory", hint)
    error = system_error_in(error) or error
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if isinstance(error.filename, (str, bytes, os.PathLike)) or error.errno in _OF_MACHINE:
        return error_of(error)
    if _NO_TEMPORARY in reason_of(error):
        return error_of(error)
    try:
        os.getcwd()
    except FileNotFoundError:
        hint = "change to another folder, or give an absolute path"
        return DataError("the folder this was started in was deleted", hint)
    return None


def shown(path: Union[str, "os.PathLike[str]"]) -> str:
    """The text of a path for messages: on one line, and shortened in the middle if it is very long."""
    return shown_value(os.fspath(path))


@contextlib.contextmanager
def errors_about(path: Union[str, "os.PathLike[str]"], failed: str = "") -> Iterator[None]:
    """Converts errors of the file system inside the block into errors about ``path``; see :func:`error_of`."""
    try:
        yield
    except (BrokenPipeError, UnicodeDecodeError):
        raise
    except (OSError, ValueError) as problem:  # ValueError: not a possible path
        raise error_of(problem, path, failed) from problem


# -- paths ----------------------------------------------------------------------------------------------------


def expand(text: str) -> Path:
    """The path that a user typed, with ``~`` and ``~user`` expanded.

    Raises:
        ConfigurationError: it is empty, or there is no such user.
        DataError: it is not a possible path, or the file system refuses access to it.
    """
    path = expand_user(text)
    check_possible(path)
    return path


def check_possible(path: Path) -> None:
    """Checks that a path can be looked up; it need not exist.

    Raises:
        DataError: it is not a possible path, or the file system refuses access to it.
    """
    absent = (FileNotFoundError, NotADirectoryError)
    with errors_about(path), contextlib.suppress(*absent):
        os.lstat(path)
        # A circular link, which pathlib calls absent.  What a link leads to is checked where it is used.
        with contextlib.suppress(PermissionError):
            os.stat(path)


def expand_user(text: str) -> Path:
    """The path that a text means, with ``~`` and ``~user`` expanded; the file system is not asked.

    Raises:
        ConfigurationError: it is empty, or there is no such user.
    """
    if not text:
        raise ConfigurationError("a path is empty", "give a path, or leave the option out")
    if not text.startswith("~"):
        return Path(text)  # whose expanduser() would expand ./~name, too
    try:
        return Path(text).expanduser()
    except (RuntimeError, KeyError, ValueError):  # ValueError: not a possible user name
        user = printable(text.split("/", 1)[0])
        raise ConfigurationError(
            f"{shown(text)}: the home folder of {user} is not known",
            f"set HOME, give the whole path, or write ./{shown(text)} if the name is meant",
        ) from None


def cache_folder(name: str) -> Optional[Path]:
    """The folder of a cache: in IPUCNN_CACHE_DIR, or in the user's cache folder (XDG_CACHE_HOME, ~/.cache).

    Args:
        name: name of the cache.

    Returns:
        None if the user has no home folder, as in a container with a user id of its own: there is then no cache.
    """
    folder = os.environ.get("IPUCNN_CACHE_DIR")
    if folder:
        return Path(folder, name)
    with contextlib.suppress(ConfigurationError):
        return Path(os.environ.get("XDG_CACHE_HOME") or expand_user("~/.cache"), "ipucnn", name)
    return None


def write_cached(path: Optional[Path], data: Union[str, bytes]) -> None:
    """Writes an entry of a cache whole or not at all; does nothing if there is no cache or it cannot be written."""
    if path is not None:
        with contextlib.suppress(UserError):
            make_folder(path.parent)
            write_text(path, data)


def private_cache_folder(name: str) -> Optional[Path]:
    """The folder of :func:`cache_folder`, created if absent, for files that are executed when they are read back.

    Returns:
        None if others may be able to write to it: its path is relative (to the current folder), it belongs to another
        user, or others have write permission.  Also None if it cannot be created.
    """
    try:
        path = cache_folder(name)
        if path is None or not path.is_absolute():
            return None
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
    except OSError:
        return None
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if is_private and os.access(path, os.W_OK) else None


def kind_of(path: Path) -> Kind:
    """The kind of a path's target.

    Raises:
        DataError: the file system refuses: no permission, circular links, or a name that is too long.
    """
    with errors_about(path):
        try:
            return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), Kind.OTHER)
        except (FileNotFoundError, NotADirectoryError):
            return Kind.ABSENT


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that a folder is on, or would be created on; 0 if unknown."""
    # os.path.isdir returns False for every error; the loop looks for a folder that can be used.
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def used_bytes(folder: Path, others: Iterable[Path] = ()) -> int:
    """The bytes of all files in a folder and below it, and of others; a file with several names counts once."""
    sizes: Dict[Tuple[int, int], int] = {}
    inside = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    for path in [*inside, *others]:
        with contextlib.suppress(OSError):
            about = os.lstat(path)
            sizes[about.st_dev, about.st_ino] = about.st_size
    return sum(sizes.values())


def entries(folder: Path) -> List[Path]:
    """The paths in a folder, sorted by name; empty if the folder is absent.  Raises as :func:`kind_of` does."""
    with errors_about(folder):
        try:
            return sorted(folder / name for name in os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def real(path: Path) -> Path:
    """The absolute path, with links resolved as far as they lead; ``Path.resolve`` fails at circular links."""
    return Path(os.path.realpath(path))


def check_writable(path: Path) -> None:
    """Refuses a file that this user may not write to, or a folder in which they may not create files.

    Raises:
        DataError: the path is not writable.
    """
    if not os.access(path, os.W_OK | os.X_OK if os.path.isdir(path) else os.W_OK):
        raise DataError(f"{shown(path)} is not writable", _PERMISSION)


# -- reading --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_regular(path: Path, hint: Optional[str] = None) -> Iterator[BinaryIO]:
    """Opens a regular file for reading in binary; an OSError of the block becomes an error about the file.

    FIFOs and devices are refused, because reading them may never end.

    Args:
        path: the expanded path.
        hint: what to do if the path is absent or not a file; None for "check the path".

    Raises:
        DataError: the path is absent, not a regular file, or not readable.
    """
    kind = kind_of(path)
    if kind is Kind.ABSENT:
        raise DataError(f"{shown(path)}: there is no such file", hint or "check the path")
    if kind is not Kind.FILE:
        raise DataError(f"{shown(path)} is {kind.value}, not a file", hint or "give the path of a file")
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | _SAFELY), "rb") as file:
            yield file
    # Of the block, too: some regular files of /proc can be neither measured nor read.
    except OSError as problem:
        raise error_of(problem, path) from problem


def read_bytes(path: Path, at_most: int, hint: Optional[str] = None) -> bytes:
    """Reads a regular file of at most ``at_most`` bytes.

    Raises:
        DataError: the path is absent, not a regular file, too large, or not readable.
    """
    with open_regular(path, hint) as file:
        data = file.read(at_most + 1)  # not by its size: files of /proc say 0
    if len(data) > at_most:
        raise DataError(f"{shown(path)} is larger than {at_most:,} bytes", hint or "give another file")
    return data


def read_text(path: Path, at_most: int, hint: Optional[str] = None) -> str:
    """Reads a regular file as UTF-8 text, or as UTF-16 if its first bytes are that one's mark.

    Raises as :func:`read_bytes` does, and for other bytes.
    """
    data = read_bytes(path, at_most, hint)
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise DataError(
            f"{shown(path)}, line {line}: byte 0x{data[problem.start]:02x} is not UTF-8 text",
            hint or "save the file as UTF-8",
        ) from None


# -- writing --------------------------------------------------------------------------------------------------

_WRITTEN = "cannot be written"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` with a temporary path beside ``path``, syncs the file, and renames it to ``path``.

    A crash leaves either the old file or the new one, never a partial file.  A link at ``path`` is replaced.  No link
    can be planted under the temporary name, which cannot be predicted.

    Raises:
        DataError: the file system refuses (disk full, no permission); ``path`` is then unchanged.
    """
    temporary = path.with_name(_temporary_name(path.name))
    try:
        write(temporary)
        # Opened only for writing, because the new file may have the permissions of one that its owner may not read.
        handle = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise error_of(error, path, _WRITTEN) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def new_folder(folder: Path, ending: str) -> Path:
    """Returns the place of a new folder beside a folder, below the current one if that is a path from here."""
    place = folder if folder.name not in ("", "..") else real(folder)
    names = (f"{place.name}-{ending}{number}" for number in ("", *map(str, range(2, 100))))
    return next(place.with_name(name) for name in names if not os.path.lexists(place.with_name(name)))


def new_file(path: Path) -> Path:
    """Returns a path at which there is nothing: the given one, or with a number behind its stem."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.stem}-{k}{path.suffix}") for k in itertools.count(2))
    )
    return next(name for name in names if not os.path.lexists(name))


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` with a new, empty folder beside ``path`` and renames it, so that ``path`` is complete or absent.

    An existing ``path`` is exchanged with the new folder, in one step if the system supports that, and then removed.

    Raises:
        DataError: the file system refuses; ``path`` is then unchanged.
    """
    path = path.absolute()
    temporary, old_folder = (path.with_name(_temporary_name(path.name)) for _ in range(2))
    make_folder(temporary)
    try:
        write(temporary)
        if not os.path.lexists(str(path)):
            os.rename(temporary, path)
        elif not _exchange(temporary, path):
            os.rename(path, old_folder)
            try:
                os.rename(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.rename(old_folder, path)
                raise
        _sync_folder(path.parent)
        remove_folder(old_folder)
    except OSError as error:
        raise error_of(error, path, _WRITTEN) from None
    finally:
        with contextlib.suppress(DataError):
            remove_folder(temporary)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two paths in one step; returns False if the system or the file system cannot do that."""
    import ctypes  # imported here because it is slow, and few commands write folders

    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    # The arguments -100 and 2 are AT_FDCWD and RENAME_EXCHANGE of renameat2(2).
    return bool(rename(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0)


def write_text(path: Path, text: Union[str, bytes]) -> None:
    """Writes a small file of a run atomically, UTF-8."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def append_text(path: Path, text: str) -> None:
    """Appends UTF-8 text to a file of a run; creates the file if it is absent.

    Raises:
        DataError: the file cannot be written, or is a link, which no run creates.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | _SAFELY, 0o666)

    with errors_about(path, _WRITTEN), open(path, "ab", opener=opener) as file:
        file.write(text.encode("utf-8"))


def make_folder(path: Path) -> None:
    """Creates a folder and its parents, if absent.

    Raises:
        DataError: the file system refuses, or a file has the name.
    """
    with errors_about(path, "cannot be made"):
        os.makedirs(path, exist_ok=True)


def check_makeable(path: Path) -> None:
    """Refuses, before anything is computed, a path that is not a folder and that :func:`make_folder` cannot create.

    Raises:
        DataError: the path or one of its parents exists and is not a folder, or is not writable; or the path is
            relative, and the working directory was deleted.
    """
    place = path.absolute()
    while kind_of(place) is Kind.ABSENT and not place.is_symlink():
        place = place.parent
    kind = kind_of(place)
    if kind is not Kind.FOLDER:
        what = "a link that leads nowhere" if kind is Kind.ABSENT else kind.value
        raise DataError(f"{shown(place)} is {what}, not a folder", "choose another folder")
    check_writable(place)


_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.02
"""How often and at which pauses a lock is tried: :func:`is_locked` of another process briefly holds a shared lock."""


def locked(path: Path) -> Optional[int]:
    """Locks a folder until the returned file descriptor is closed; returns None if the system has no locks for it.

    Raises:
        BlockingIOError: another process has the lock.
        FileNotFoundError: there is no such folder.
    """
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return _lock(path, shared=False)
        time.sleep(_LOCK_PAUSE_S)
    return _lock(path, shared=False)


def is_locked(path: Path) -> bool:
    """Whether a process has locked a folder.

    The check briefly takes a shared lock, so that others can check too; :func:`locked` waits long enough for that.
    """
    try:
        handle = _lock(path, shared=True)
    except (BlockingIOError, FileNotFoundError):  # locked, or deleted meanwhile
        return True
    if handle is not None:
        os.close(handle)
    return False


def _lock(path: Path, shared: bool) -> Optional[int]:
    """Tries once to lock a folder; returns and raises as :func:`locked` does."""
    import fcntl

    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return handle
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise
        return None


def make_new_file(folder: Path, name: str) -> Path:
    """Creates an empty file under an unused name (``name``, ``name.2``, ...; links count as used); returns its path."""
    number, path = 1, folder / name
    while True:
        with errors_about(path, _WRITTEN), contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            return path
        number += 1
        path = folder / f"{name}.{number}"


def remove_file(path: Path) -> None:
    """Removes a file, or a link but not its target; does nothing if the path is absent.

    Raises:
        DataError: the file system refuses, or the path is a folder.
    """
    with errors_about(path, "cannot be removed"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes a folder with its content; removes a link or a file as :func:`remove_file` does."""
    if kind_of(path) is not Kind.FOLDER or path.is_symlink():
        remove_file(path)
        return
    with errors_about(path, "cannot be removed"):
        shutil.rmtree(str(path))


# -- outputs of options ---------------------------------------------------------------------------------------


def is_written_to(path: Path) -> bool:
    """Whether an output is written directly, not replaced: a device, a FIFO, or a stream such as ``/dev/stdout``.

    The name of such an output has no extension from which a format follows.
    """
    return _stream_of(path) is not None or kind_of(path) is Kind.OTHER


def check_output(path: Path) -> None:
    """Refuses, before anything is computed, a path that :func:`write_output` could not write.

    Raises:
        DataError: the path is a folder, a socket, a disk or a file that is not writable, or its folder is absent or not
            writable.
    """
    if _stream_of(path) is not None:
        return
    kind = kind_of(path)
    if kind is Kind.FOLDER:
        raise DataError(f"{shown(path)} is a folder", "give the name of a file")
    if kind is Kind.OTHER and stat.S_IFMT(os.stat(path).st_mode) in (stat.S_IFBLK, stat.S_IFSOCK):
        raise DataError(f"{shown(path)} is a disk or a socket", "give the name of a file")
    if kind is not Kind.ABSENT:
        check_writable(path)
    if kind is not Kind.OTHER:
        folder = (real(path) if path.is_symlink() else path).parent  # without links: as typed, for messages
        if kind_of(folder) is not Kind.FOLDER:
            check_makeable(folder)  # so that the hint works
            raise DataError(
                f"{shown(path)}: there is no folder {shown(folder)}", f"mkdir -p {quoted(folder)}"
            )
        check_writable(folder)


def check_not_replaced(
    outputs: Iterable[Tuple[str, Optional[Path]]], inputs: Iterable[Tuple[str, Path]] = ()
) -> None:
    """Refuses an output that would replace an input or another output, under any names and links.

    Args:
        outputs: pairs of (option, expanded path, or None if it is not given).
        inputs: pairs of (description, path).

    Raises:
        ConfigurationError: an output is an input, or two outputs are one file.
    """
    read = {real(path): description for description, path in inputs}
    written: Dict[Path, str] = {}
    for option, path in outputs:
        if path is None or is_written_to(path):
            continue  # a stream or device takes several outputs one after the other
        target = real(path)
        if target in read:
            raise ConfigurationError(
                f"{option} {shown(path)} is {read[target]}, and would be replaced", "choose another name"
            )
        if target in written:
            raise ConfigurationError(
                f"{written[target]} and {option} are both {shown(path)}", "give two names"
            )
        written[target] = option


def write_output(path: Path, write: Callable[[Path], object]) -> None:
    """Writes the output of an option to the target of a path.

    A new or regular file is written under a temporary name beside it (beside the target of links), then renamed; an
    existing file keeps its permissions.  A device, a FIFO, or a stream of this process (``/dev/stdout``) is written
    directly; a reader that closes it is not an error, as for stdout.

    Args:
        path: expanded path, checked by :func:`check_output`.
        write: function that writes a temporary file, whose path is its argument.

    Raises:
        DataError: the output cannot be written.
    """
    if is_written_to(path):
        import tempfile

        with tempfile.TemporaryDirectory(prefix="ipucnn-") as folder:
            temporary = Path(folder) / "output"
            write(temporary)
            with errors_about(path, _WRITTEN), contextlib.suppress(BrokenPipeError), open(
                temporary, "rb"
            ) as source, _open_as_it_is(path) as target:
                shutil.copyfileobj(source, target)
        return
    target_path = real(path)
    mode = os.stat(target_path).st_mode & 0o777 if target_path.is_file() else None

    def write_same_mode(temporary: Path) -> None:
        write(temporary)
        if mode is not None:
            os.chmod(temporary, mode)

    write_atomically(target_path, write_same_mode)


def write_output_text(path: Path, text: Union[str, bytes]) -> None:
    """Writes UTF-8 text, or bytes, as :func:`write_output` does."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_output(path, lambda temporary: temporary.write_bytes(data))


def _stream_of(path: Path) -> Optional[int]:
    """The file descriptor that a path such as ``/dev/stdout`` names; None for any other path.

    If stdout is redirected to a file, resolving the links would give that file.  Replacing it by renaming would lose
    everything else that this process and its shell write there.
    """
    match = _STREAM.fullmatch(os.path.normpath(path))
    if match is None:
        return None
    return _STANDARD.index(match.group(1)) if match.group(1) else int(match.group(2))


def _open_as_it_is(path: Path) -> BinaryIO:
    """Opens a stream of this process, a device or a FIFO for writing; a FIFO without a reader is an error."""
    stream = _stream_of(path)
    if stream is not None:
        for text in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # writing to the stream reports its errors
                text.flush()
        return os.fdopen(os.dup(stream), "wb")
    handle = os.open(path, os.O_WRONLY | _SAFELY)
    os.set_blocking(handle, True)
    return os.fdopen(handle, "wb")


def _temporary_name(name: str) -> str:
    """An unpredictable temporary name for a file, cut to the longest file name."""
    ending = f".{int.from_bytes(os.urandom(6), 'big')}.tmp"
    kept = os.fsencode(name)[: NAME_BYTES - len(ending) - 1].decode("utf-8", "ignore")
    return f".{kept}{ending}"


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power failure, if the system can sync folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def temporary_of(name: str) -> Optional[str]:
    """The final name of a temporary file of :func:`write_atomically`; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return match.group(1) if match is not None else None


def remove_temporaries(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Removes temporary files that killed processes left, for the final file names that ``is_ours`` accepts."""
    for path in entries(folder):
        name = temporary_of(path.name)
        if name is not None and is_ours(name) and (path.is_symlink() or not path.is_dir()):
            remove_file(path)
