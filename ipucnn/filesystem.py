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
import itertools
import os
import re
import shutil
import stat
import sys
import time
from enum import Enum
from pathlib import Path
from typing import (
    IO,
    BinaryIO,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
    Type,
    Union,
)

from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.text import SHOWN_CHARACTERS, printable

_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_ABSENT = (errno.ENOENT, errno.ENOTDIR)

NAME_BYTES = 255
"""The longest file name of Linux' file systems (``NAME_MAX`` of limits.h), in bytes."""
PATH_BYTES = 4095
"""The longest path the kernel takes (``PATH_MAX`` of limits.h, less the NUL at its end), in bytes."""
FIFO_WAIT_S = 10.0
"""How long a FIFO may wait for the program that reads it: one typed after this in the same line of a shell."""

MOST_LINKS = 40
"""How many links the kernel follows in one path."""

_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
_STREAM = re.compile(r"/dev/(stdin|stdout|stderr|fd/(\d+))|/proc/(self|thread-self|\d+)/fd/(\d+)")
_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}
_READ_AT_ONCE_BYTES = 2**20
# Without O_NONBLOCK, opening would wait for the writer of a FIFO that took the place of a file meanwhile.
_READING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY"))


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


def named(path: Union[str, "os.PathLike[str]"], what: str) -> str:
    """A path as messages begin with it, behind the option or role that it is for, if there is one."""
    return f"{what} {shown(path)}" if what else shown(path)


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
        name = named(path, what)
        raise error(f"{name}: {reason_of(problem)}", read_hint(problem)) from problem


# -- looking --------------------------------------------------------------------------------------------------


def expand(text: str, what: str = "", error: Type[UserError] = ConfigurationError) -> Path:
    """The path that a user typed, ``~`` and ``~user`` expanded.

    Raises:
        ConfigurationError (or ``error``): it is empty, no path can be it, or there is no such user.
    """
    name = named(text, what)
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
        literally = f"write ./{shown(text)} if the name is meant"
        if user == "~":
            raise error(
                f"{name}: nobody knows where your home folder is", "set HOME, or give the whole path"
            ) from None
        raise error(f"{name}: there is no user {printable(user[1:])!r} here", literally) from None


def cache_folder(name: str) -> Path:
    """Where what can be made again is kept: in IPUCNN_CACHE_DIR, or the user's cache folder (XDG_CACHE_HOME, ~/.cache).

    Args:
        name: of what is kept there.
    """
    own = os.environ.get("IPUCNN_CACHE_DIR")
    if own:
        return Path(own) / name
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else expand("~/.cache")) / "ipucnn" / name


def private_cache_folder(name: str) -> Optional[Path]:
    """The folder of :func:`cache_folder`, made where it is absent, for what is executed when it is read back.

    Returns:
        None where nobody else can be kept out: its path is relative, and so the current folder's, or it belongs to
        another user, or others may write to it, or it cannot be made.
    """
    try:
        path = cache_folder(name)
        if not path.is_absolute():
            return None
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
    except (OSError, UserError):
        return None
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if is_private and os.access(path, os.W_OK) else None


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


def is_file(path: Path, what: str = "") -> bool:
    """Whether a path leads to a regular file; raises as :func:`kind_of` does."""
    return kind_of(path, what) is Kind.FILE


def is_folder(path: Path, what: str = "") -> bool:
    """Whether a path leads to a folder; raises as :func:`kind_of` does."""
    return kind_of(path, what) is Kind.FOLDER


def file_size(path: Path, what: str = "", error: Type[UserError] = DataError) -> int:
    """The bytes of what a path leads to; raises as :func:`kind_of` does, and where there is nothing."""
    with asking(path, what, error):
        return os.stat(path).st_size


def free_bytes(folder: Path) -> int:
    """Room on the disk that a folder is on, or would be made on; 0 where that is not known."""
    # os.path's question, which takes every error for no: what is looked for is a folder that can be used.
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def used_bytes(folder: Path, others: Iterable[Path] = ()) -> int:
    """What the files in a folder and below it take, and other files; one that has several names counts once."""
    found: Dict[Tuple[int, int], int] = {}
    inside = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    for path in [*inside, *others]:
        with contextlib.suppress(OSError):
            about = os.lstat(path)
            found[about.st_dev, about.st_ino] = about.st_size
    return sum(found.values())


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
        return Path(os.path.realpath(absolute(path, what, error)))


def absolute(path: Path, what: str = "", error: Type[UserError] = DataError) -> Path:
    """The absolute path, links as they are.

    Raises:
        DataError (or ``error``): the working directory was deleted.
    """
    if path.is_absolute():
        return path
    try:
        return Path(os.getcwd()) / path
    except OSError as problem:
        name = named(path, what)
        raise error(
            f"{name}: the folder this was started in is not there any more: {reason_of(problem)}",
            "change to a folder that is there, or give an absolute path",
        ) from None


def is_link(path: Path, what: str = "", error: Type[UserError] = DataError) -> bool:
    """Whether a path is itself a symbolic link, wherever that leads."""
    with asking(path, what, error):
        try:
            return stat.S_ISLNK(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def is_writable(path: Path) -> bool:
    """Whether this user may write to a file, or make files in a folder."""
    wanted = os.W_OK | os.X_OK if os.path.isdir(path) else os.W_OK
    return os.access(path, wanted)


# -- reading --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_regular(
    path: Path,
    what: str = "",
    error: Type[UserError] = DataError,
    hint: Optional[str] = None,
) -> Iterator[BinaryIO]:
    """A regular file, opened for reading in binary; an OSError of the block is an error about the file.

    A FIFO or a device is refused rather than waited for: it may never end.

    Args:
        path: as expanded.
        what: an option or a role to stand before the path.
        error: what is raised.
        hint: what to do about an error, where there is more to say than "check the path".

    Raises:
        DataError (or ``error``): absent, not a regular file, or not readable.
    """
    handle, _ = open_handle(path, what, error, hint)
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as problem:
            # Some files of /proc are regular, and can be neither measured nor read.
            name = named(path, what)
            raise error(f"{name}: {reason_of(problem)}", hint or read_hint(problem)) from problem


def open_handle(
    path: Union[str, Path],
    what: str = "",
    error: Type[UserError] = DataError,
    hint: Optional[str] = None,
) -> Tuple[int, int]:
    """The descriptor of a regular file, opened for reading, which the caller closes, and the file's bytes; as
    :func:`open_regular` otherwise.

    Nothing is prepared for messages that are not written: every photograph of every epoch comes by here.
    """
    try:
        # Asked before it is opened: to open a device does something to some of them.
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            handle = os.open(path, _READING)
            status = os.fstat(handle)
            mode = status.st_mode
            if stat.S_ISREG(mode):
                return handle, status.st_size
            os.close(handle)
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except (OSError, ValueError):
        with asking(path, what, error):
            raise
    name = named(path, what)
    if not mode:
        raise error(f"{name}: there is no such file", hint or "check the path")
    raise error(f"{name} is {_kind_of_mode(mode).value}, not a file", hint or "give the path of a file")


def read_bytes(
    path: Path, at_most: int, what: str = "", error: Type[UserError] = DataError, hint: Optional[str] = None
) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        DataError (or ``error``): absent, not a regular file, too large, or not readable.
    """
    name = named(path, what)
    chunks: List[bytes] = []
    with open_regular(path, what, error, hint) as file, asking(path, what, error):
        # A file may be larger than it says (those of /proc say 0), so what is read counts, too.
        left = at_most + 1 if os.fstat(file.fileno()).st_size <= at_most else 0
        while left:
            chunk = file.read(min(left, _READ_AT_ONCE_BYTES))
            if not chunk:
                break
            chunks.append(chunk)
            left -= len(chunk)
    if not left:
        raise error(f"{name} is larger than {at_most:,} bytes", hint or "give another file")
    return b"".join(chunks)


def _flag(name: str) -> int:
    """A flag of ``os.open``; none on systems that lack it."""
    return int(getattr(os, name, 0))


def read_text(
    path: Path, at_most: int, what: str = "", error: Type[UserError] = DataError, hint: Optional[str] = None
) -> str:
    """The text of a regular file in UTF-8; raises as :func:`read_bytes` does, and for bytes that are no UTF-8."""
    data = read_bytes(path, at_most, what, error, hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        name = named(path, what)
        line = data.count(b"\n", 0, problem.start) + 1
        raise error(
            f"{name}, line {line}: byte 0x{data[problem.start]:02x} is not UTF-8 text",
            hint or "save the file as UTF-8",
        ) from None


# -- writing --------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path``, syncs what it wrote, and renames it.

    A crash leaves the old file or the new one, never half of one.  A link of that name is replaced, and no link
    can be planted under the temporary name, which nobody knows beforehand.

    Raises:
        DataError: the file system refuses (disk full, no permission); ``path`` is then what it was.
    """
    temporary = path.with_name(_temporary_name(path.name))
    try:
        write(temporary)
        # For writing alone: the file that is replaced may have been one that its owner may not read.
        handle = os.open(temporary, os.O_WRONLY | _flag("O_CLOEXEC"))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be written: {reason_of(error)}", write_hint(error)) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a new, empty folder beside ``path``, and renames it: all of it is there, or nothing.

    What ``path`` was before changes places with it, in one step where the system can, and is removed then.

    Raises:
        DataError: the file system refuses; ``path`` is then what it was.
    """
    path = absolute(path)
    temporary, before = (path.with_name(_temporary_name(path.name)) for _ in range(2))
    make_folder(temporary)
    try:
        write(temporary)
        if not os.path.lexists(str(path)):
            os.rename(temporary, path)
        elif not _exchange(temporary, path):
            os.rename(path, before)
            try:
                os.rename(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.rename(before, path)
                raise
        _sync_folder(path.parent)
        remove_folder(before)
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be written: {reason_of(error)}", write_hint(error)) from None
    finally:
        with contextlib.suppress(DataError):
            remove_folder(temporary)


def _exchange(one: Path, other: Path) -> bool:
    """Lets two paths change places in one step; False where the system or the file system has no such step."""
    import ctypes  # which takes a while, and few commands write folders

    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    # AT_FDCWD, and RENAME_EXCHANGE of renameat2(2).
    return bool(rename(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0)


def write_text(path: Path, text: Union[str, bytes]) -> None:
    """Writes a small file of a run atomically, UTF-8."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_atomically(path, lambda temporary: _write_bytes(temporary, data))


def append_text(path: Path, text: str) -> None:
    """Adds to a file of a run, UTF-8; makes it if it is absent.

    Raises:
        DataError: it cannot be written; it is a link or no regular file, which no run puts there.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        handle = os.open(path, flags | _flag("O_NOFOLLOW") | _flag("O_NONBLOCK") | _flag("O_CLOEXEC"), 0o666)
        with os.fdopen(handle, "ab") as file:
            kind = _kind_of_mode(os.fstat(file.fileno()).st_mode)
            if kind is Kind.FILE:
                file.write(text.encode("utf-8"))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(
                f"{shown(path)} is a link, and a run writes into its own folder alone",
                f"remove it: rm {shown(path)}",
            ) from None
        if error.errno == errno.ENXIO:
            raise DataError(f"{shown(path)} is not a file", f"remove it: rm {shown(path)}") from None
        raise DataError(f"{shown(path)} cannot be written: {reason_of(error)}", write_hint(error)) from None
    if kind is not Kind.FILE:
        raise DataError(f"{shown(path)} is {kind.value}, not a file", f"remove it: rm {shown(path)}")


def make_folder(path: Path, what: str = "", elsewhere: str = "choose another folder") -> None:
    """Makes a folder and those above it, where they are not there.

    Args:
        what: an option or a role, to stand before the path.
        elsewhere: how another place is chosen, for the hint.

    Raises:
        DataError: the file system refuses, or a file has the name.
    """
    name = named(path, what)
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:
        hint = write_hint(error, elsewhere) if isinstance(error, OSError) else elsewhere
        raise DataError(f"{name} cannot be made: {reason_of(error)}", hint) from None


def check_makeable(
    path: Path, what: str = "", elsewhere: str = "choose another folder", error: Type[UserError] = DataError
) -> None:
    """Refuses, before anything is computed, what is no folder, or a folder that :func:`make_folder` could not make.

    Args:
        path: as expanded.
        what: an option or a role, to stand before the path.
        elsewhere: how another place is chosen, for the hint.

    Raises:
        DataError (or ``error``): something else has its name or that of a folder above it, or nothing can be
            written there.
    """
    name = named(path, what)
    path = absolute(path, what, error)
    for place in (path, *path.parents):
        kind = kind_of(place, what, error)
        subject = name if place == path else f"{name}: {shown(place)}"
        if kind is Kind.ABSENT and is_link(place, what, error):
            raise error(f"{subject} is a link that leads nowhere", elsewhere)
        if kind not in (Kind.ABSENT, Kind.FOLDER):
            raise error(f"{subject} is {kind.value}", elsewhere)
        if kind is Kind.FOLDER:
            if not is_writable(place):
                raise error(f"{subject} is not writable", f"make it writable, or {elsewhere}")
            return


_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.02
"""How long a lock is tried for: :func:`is_locked` of another process holds a shared one for a moment."""


def locked(path: Path) -> Optional[int]:
    """A file descriptor that locks a folder until it is closed; None where the system or file system has no locks.

    Raises:
        BlockingIOError: another process has the lock.
        FileNotFoundError: there is no such folder.
    """
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return _lock(path, shared=False)
        time.sleep(_LOCK_PAUSE_S)
    return _lock(path, shared=False)


def is_locked(path: Path) -> Optional[bool]:
    """Whether a process has a folder locked, or it is gone; None where there are no locks.

    The question takes a shared lock for a moment: others may ask too, and :func:`locked` waits that long.
    """
    try:
        handle = _lock(path, shared=True)
    except (BlockingIOError, FileNotFoundError):
        return True
    if handle is None:
        return None
    os.close(handle)
    return False


def _lock(path: Path, shared: bool) -> Optional[int]:
    """One try of :func:`locked`.

    Raises:
        BlockingIOError: another process has the lock.
        FileNotFoundError: there is no such folder.
    """
    try:
        import fcntl

        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    return handle


def make_new_file(folder: Path, name: str) -> Path:
    """An empty file that was not there before, not even as a link: of that name, or with ``.2``, ``.3``, ... after it.

    Raises:
        DataError: the file system refuses.
    """
    for number in itertools.count(1):
        path = folder / (name if number == 1 else f"{name}.{number}")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _flag("O_CLOEXEC"), 0o666))
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(
                f"{shown(path)} cannot be written: {reason_of(error)}", write_hint(error)
            ) from None
        return path
    raise AssertionError("itertools.count ended")


def remove_file(path: Path) -> None:
    """Removes a file, or a link and not what it leads to; nothing if there is none.

    Raises:
        DataError: the file system refuses, or it is a folder.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(
            f"{shown(path)} cannot be removed: {reason_of(error)}", write_hint(error, "remove it yourself")
        ) from None


def remove_folder(path: Path) -> None:
    """Removes a folder and all that is in it, or a link and not what it leads to; nothing if there is none.

    Raises:
        DataError: the file system refuses.
    """
    if kind_of(path) is not Kind.FOLDER or is_link(path):
        remove_file(path)
        return
    try:
        shutil.rmtree(str(path))
    except OSError as error:
        raise DataError(
            f"{shown(path)} cannot be removed: {reason_of(error)}", write_hint(error, "remove it yourself")
        ) from None


def is_written_to(path: Path) -> bool:
    """Whether an output is written to as it is: a device, a FIFO, or a stream of this process.

    Such a name has no ending that tells a format.
    """
    return _stream_of(path) is not None or kind_of(path) in (Kind.FIFO, Kind.DEVICE)


def check_output(path: Path, option: str, error: Type[UserError] = DataError) -> None:
    """Refuses, before anything is computed, a path that :func:`write_output` could not write.

    Args:
        path: as expanded.
        option: that names it.

    Raises:
        DataError (or ``error``): a folder, a socket, a disk, a file that is not writable, or a name in a folder that
            is absent or not writable.
    """
    name = f"{option} {shown(path)}"
    stream = _stream_of(path)
    if stream is not None:
        if not _is_open_for_writing(stream):
            raise error(f"{name}: nothing can be written to it", "give the name of a file, or /dev/stdout")
        return
    kind = kind_of(path, option, error)
    if kind in (Kind.FOLDER, Kind.SOCKET) or _is_disk(path):
        raise error(f"{name} is {'a disk' if kind is Kind.DEVICE else kind.value}", "give the name of a file")
    if kind is not Kind.ABSENT and not is_writable(path):
        raise error(f"{name} is not writable", "make it writable, or give another name")
    if kind in (Kind.FIFO, Kind.DEVICE):
        return
    folder = real(path, option, error).parent if is_link(path, option, error) else path.parent
    parent = kind_of(folder, option, error)
    if parent is Kind.ABSENT:
        raise error(f"{name}: there is no folder {shown(folder)}", f"mkdir -p {shown(folder)}")
    if parent is not Kind.FOLDER:
        raise error(f"{name}: {shown(folder)} is {parent.value}", "give another name")
    if not is_writable(folder):
        raise error(
            f"{name}: the folder {shown(folder)} is not writable",
            "make it writable, or give a name in another folder",
        )


def check_different(
    outputs: Sequence[Tuple[str, Optional[Path]]], error: Type[UserError] = DataError
) -> None:
    """Refuses two outputs that are one file, by whatever names and links.

    Args:
        outputs: (option, path as expanded, or None if it is not given).

    Raises:
        DataError (or ``error``): the second would replace the first.
    """
    taken: Dict[Path, str] = {}
    for option, path in outputs:
        if path is None or is_written_to(path):
            continue  # to what is written to one after the other nothing is lost
        target = real(path, option, error)
        if target in taken:
            raise error(f"{taken[target]} and {option} are both {shown(path)}", "give two names")
        taken[target] = option


def check_not_read(
    path: Path, option: str, inputs: Iterable[Tuple[str, Path]], error: Type[UserError] = DataError
) -> None:
    """Refuses an output that would replace what is read, by whatever names and links.

    Args:
        path: of the output.
        option: that names it.
        inputs: (what it is, path) of what is read.

    Raises:
        DataError (or ``error``): it is one of them.
    """
    if is_written_to(path):
        return
    target = real(path, option, error)
    for what, given in inputs:
        if target == real(given, what, error):
            raise error(f"{option} {shown(path)} is {what}, and would be replaced", "choose another name")


def write_output(path: Path, write: Callable[[Path], None]) -> None:
    """Writes what a user asked for to what a path leads to.

    A regular file, or a new name, is written under a temporary name beside it (beside the end of its links) and
    renamed, and keeps its permissions.  A device, a FIFO, or a stream of this process (``/dev/stdout``) is
    written to as it is; if the reader of it goes away that is no error, as it is none of stdout.

    Args:
        path: as expanded and checked by :func:`check_output`.
        write: called with the path of a temporary file.

    Raises:
        DataError: it cannot be written.
    """
    if not is_written_to(path):
        _replace_output(path, write)
        return
    # Not on top of the file: they are needed here alone, and their import takes longer than all else here.
    import shutil
    import tempfile

    with _plain_output(path) as target, contextlib.ExitStack() as kept:
        with in_temporary_folder():
            temporary = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="ipucnn-"))) / "output"
            write(temporary)
            source = kept.enter_context(open(temporary, "rb"))
        shutil.copyfileobj(source, target)


@contextlib.contextmanager
def in_temporary_folder() -> Iterator[None]:
    """Names the temporary folder in what goes wrong inside, and not the file that results are written to.

    Raises:
        DataError: for any OSError inside.
    """
    import tempfile

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


def write_output_text(path: Path, text: Union[str, bytes]) -> None:
    """:func:`write_output` of a text in UTF-8, or of bytes."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    if not is_written_to(path):
        _replace_output(path, lambda temporary: _write_bytes(temporary, data))
        return
    with _plain_output(path) as target:
        target.write(data)


def _replace_output(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a regular file at the end of a path's links, with the owner and permissions it had."""
    kind = kind_of(path)
    if kind in (Kind.FOLDER, Kind.SOCKET):
        raise DataError(f"{shown(path)} is {kind.value}", "give the name of a file")
    target = real(path)
    former: Optional[os.stat_result] = None
    with contextlib.suppress(OSError):
        former = os.stat(target)

    def write_same_mode(temporary: Path) -> None:
        write(temporary)
        if former is None:
            return
        with contextlib.suppress(OSError):  # only root may give files away
            os.chown(temporary, former.st_uid, former.st_gid)
        # Not the bits that let a program run as its owner: no program writes its own.
        os.chmod(temporary, former.st_mode & 0o777)

    write_atomically(target, write_same_mode)


@contextlib.contextmanager
def _plain_output(path: Path) -> Iterator[IO[bytes]]:
    """What a path leads to, opened for writing as it is."""
    if _is_disk(path):
        raise DataError(f"{shown(path)} is a disk", "give the name of a file")
    try:
        with _open_plainly(path) as target:
            yield target
    except BrokenPipeError:
        pass  # whoever reads it has read enough
    except OSError as error:
        hint = write_hint(error, "give the name of a file")
        if error.errno == errno.ENXIO:
            hint = f"start the program that reads from it first, within {FIFO_WAIT_S:.0f} s, or give the name of a file"
        raise DataError(f"{shown(path)} cannot be written: {reason_of(error)}", hint) from None


def _is_disk(path: Path) -> bool:
    """Whether a path leads to a block device; what is on a disk would be lost, and nobody can mean that."""
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False


def _stream_of(path: Path) -> Optional[int]:
    """The number of the open file that a path such as ``/dev/stdout``, or a link to it, means; or None.

    Where stdout goes to a file, following the name's links would find that file, and renaming another over it
    would take it away from whatever else this process and its shell write there.
    """
    place = os.fspath(path)
    for _ in range(MOST_LINKS):
        match = _STREAM.fullmatch(os.path.normpath(place))
        if match is not None and match.group(3) in (None, "self", "thread-self", str(os.getpid())):
            return (
                _STANDARD[match.group(1)]
                if match.group(1) in _STANDARD
                else int(match.group(2) or match.group(4))
            )
        try:
            place = os.path.join(os.path.dirname(place), os.readlink(place))
        except (OSError, ValueError):
            return None
    return None


def _is_open_for_writing(number: int) -> bool:
    try:
        import fcntl

        return fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except (ImportError, OSError, OverflowError):
        return False


def _open_plainly(path: Path) -> IO[bytes]:
    """What is there, opened for writing as it is; a FIFO waits a while for its reader."""
    stream = _stream_of(path)
    if stream is not None:
        for text in (sys.stdout, sys.stderr):
            with contextlib.suppress(
                OSError, ValueError
            ):  # what cannot be written is told where it is written
                text.flush()
        return os.fdopen(os.dup(stream), "wb")
    flags = os.O_WRONLY | _flag("O_NOCTTY") | _flag("O_CLOEXEC")
    until = time.monotonic() + FIFO_WAIT_S
    while kind_of(path) is Kind.FIFO:
        try:
            # Without O_NONBLOCK this would wait for a reader for ever.
            handle = os.open(path, flags | os.O_NONBLOCK)
            os.set_blocking(handle, True)
            return os.fdopen(handle, "wb")
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, "nothing reads from this FIFO") from None
            time.sleep(0.05)
    return os.fdopen(os.open(path, flags), "wb")


def _temporary_name(name: str) -> str:
    """A name that nobody can foresee, as long as a name may be."""
    ending = f".{int.from_bytes(os.urandom(6), 'big')}.tmp"
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
        if name is not None and is_ours(name) and not (is_folder(path) and not is_link(path)):
            remove_file(path)


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
