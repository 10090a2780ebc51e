"""The one place that asks the file system about paths a user gave, reads what lies there, and writes.

What the file system answers becomes a :class:`DataError` that names the path; :func:`error_of` says what to do about
it, for these functions and for whatever else ends a command with an OSError (``ipucnn.cli``, ``ipucnn.api``).

Files that a run keeps in its own folder are written with :func:`write_atomically`, which replaces whatever has
the name: a link that somebody planted there is not followed.  What a user asks for by an option goes through
:func:`write_output`, which writes to what the name leads to, a device or a pipe included.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import time
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

from ipucnn.errors import ConfigurationError, DataError, InfeasibleError, UserError
from ipucnn.text import printable, shown_value

NAME_BYTES = 255
"""The longest file name of Linux' file systems (``NAME_MAX`` of limits.h), in bytes."""

_SPACE = "free some space, or give a path on another disk"
_PERMISSION = "change its permissions or those of the folders above it, or give another path"
_ABSENT = "check the path; a folder is made with: mkdir -p"
_HINTS = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: _SPACE,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: _PERMISSION,
    errno.ENOENT: _ABSENT,
    errno.ENOTDIR: _ABSENT,
    errno.ELOOP: "its links lead round in a circle: give a path that ends somewhere",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENXIO: "start the program that reads from it first, or give the name of a file",
    errno.EMFILE: "raise the number of open files: ulimit -n 4096",
    errno.EAGAIN: "end other programs, and run it again",
    errno.ENOMEM: "end other programs, and run it again",
}
_ELSEWHERE = "give another path"

_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
_STREAM = re.compile(r"/dev/(stdin|stdout|stderr)|(?:/dev|/proc/(?:self|thread-self|(\d+)))/fd/(\d{1,9})")
_MOST_LINKS = 40  # as Linux follows
_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}
_UNMEASURED_BYTES = 2**20  # of files of /proc, which say that they have none
# Without O_NONBLOCK, opening would wait for the other end of a FIFO that took the place of a file meanwhile.
_SAFELY = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Kind(Enum):
    """What a path leads to, links followed."""

    ABSENT = "nothing"
    FILE = "a file"
    FOLDER = "a folder"
    FIFO = "a FIFO"
    DEVICE = "a device"
    SOCKET = "a socket"


_KINDS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.FOLDER,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
}


# -- what went wrong ------------------------------------------------------------------------------------------


def reason_of(error: Exception) -> str:
    """Why, in the system's words and without the path."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def error_of(
    problem: Exception, path: Union[str, bytes, "os.PathLike[str]", None] = None, failed: str = ""
) -> DataError:
    """What to tell of an error of the file system.

    Args:
        problem: what the system said.
        path: that it is about; None: what ``problem`` names.
        failed: what could not be done to the path, such as "cannot be written".
    """
    named = path if path is not None else getattr(problem, "filename", None)
    reason, hint = reason_of(problem), _HINTS.get(getattr(problem, "errno", None) or 0, _ELSEWHERE)
    if not isinstance(named, (str, bytes, os.PathLike)):
        return DataError(reason, f"{hint}; temporary files go to the folder that TMPDIR names")
    return DataError(f"{shown(os.fsdecode(named))}{failed and ' ' + failed}: {reason}", hint)


def user_error_of(error: BaseException) -> Optional[UserError]:
    """What to tell of an error with which a command ends because the system refused something or memory ran out.

    Returns:
        None for any other error.
    """
    if isinstance(error, MemoryError):
        return InfeasibleError(
            "out of memory",
            "use a smaller --micro-batch-size or --image-size, or raise the limit (ulimit -v)",
        )
    return error_of(error) if isinstance(error, OSError) and error.errno is not None else None


def shown(path: Union[str, "os.PathLike[str]"]) -> str:
    """A path as a message repeats it: on one line, and shortened in the middle where it is very long."""
    return shown_value(os.fspath(path))


@contextlib.contextmanager
def asking(path: Union[str, "os.PathLike[str]"], failed: str = "") -> Iterator[None]:
    """Turns what the file system answers inside the block into an error about ``path``; see :func:`error_of`."""
    try:
        yield
    except (BrokenPipeError, UnicodeDecodeError):
        raise
    except (OSError, ValueError) as problem:  # ValueError: no path can have such a name
        raise error_of(problem, path, failed) from problem


# -- looking --------------------------------------------------------------------------------------------------


def expand(text: str) -> Path:
    """The path that a user typed, ``~`` and ``~user`` expanded.

    Raises:
        ConfigurationError: it is empty, or there is no such user.
        DataError: no path can be it, or nobody may say what is there.
    """
    if not text:
        raise ConfigurationError("a path is empty", "give a path, or leave the option out")
    path = _expand_user(text)
    is_link(path)
    return path


def _expand_user(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except (RuntimeError, KeyError, ValueError):  # ValueError: nobody can be called so
        user = printable(text.split("/", 1)[0])
        raise ConfigurationError(
            f"{shown(text)}: the home folder of {user} is not known",
            f"set HOME, give the whole path, or write ./{shown(text)} if the name is meant",
        ) from None


def cache_folder(name: str) -> Path:
    """Where what can be made again is kept: in IPUCNN_CACHE_DIR, or the user's cache folder (XDG_CACHE_HOME, ~/.cache).

    Args:
        name: of what is kept there.
    """
    folder = os.environ.get("IPUCNN_CACHE_DIR")
    if folder:
        return Path(folder, name)
    return Path(os.environ.get("XDG_CACHE_HOME") or _expand_user("~/.cache"), "ipucnn", name)


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


def kind_of(path: Path) -> Kind:
    """What a path leads to.

    Raises:
        DataError: the file system does not say: no permission, links in a circle, too long a name.
    """
    with asking(path):
        try:
            return _kind_of_mode(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return Kind.ABSENT


def _kind_of_mode(mode: int) -> Kind:
    return _KINDS.get(stat.S_IFMT(mode), Kind.DEVICE)


def exists(path: Path) -> bool:
    """Whether a path leads to anything; raises as :func:`kind_of` does."""
    return kind_of(path) is not Kind.ABSENT


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file; raises as :func:`kind_of` does."""
    return kind_of(path) is Kind.FILE


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder; raises as :func:`kind_of` does."""
    return kind_of(path) is Kind.FOLDER


def file_size(path: Path) -> int:
    """The bytes of what a path leads to; raises as :func:`kind_of` does, and where there is nothing."""
    with asking(path):
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
    sizes: Dict[Tuple[int, int], int] = {}
    inside = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    for path in [*inside, *others]:
        with contextlib.suppress(OSError):
            about = os.lstat(path)
            sizes[about.st_dev, about.st_ino] = about.st_size
    return sum(sizes.values())


def entries(folder: Path) -> List[Path]:
    """What lies in a folder, sorted by name; nothing if the folder is absent.  Raises as :func:`kind_of` does."""
    with asking(folder):
        try:
            return sorted(folder / name for name in os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def real(path: Path) -> Path:
    """The absolute path with every link followed as far as it leads."""
    with asking(path):
        return Path(os.path.realpath(absolute(path)))


def absolute(path: Path) -> Path:
    """The absolute path, links as they are.

    Raises:
        DataError: the working directory was deleted.
    """
    if path.is_absolute():
        return path
    try:
        return Path(os.getcwd()) / path
    except OSError:
        raise DataError(
            f"{shown(path)}: the folder this was started in was deleted",
            "change to another folder, or give an absolute path",
        ) from None


def is_link(path: Path) -> bool:
    """Whether a path is itself a symbolic link, wherever that leads."""
    with asking(path):
        try:
            return stat.S_ISLNK(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def check_writable(path: Path) -> None:
    """Refuses a file that this user may not write to, or a folder in which they may make no files.

    Raises:
        DataError: it is one.
    """
    if not os.access(path, os.W_OK | os.X_OK if os.path.isdir(path) else os.W_OK):
        raise DataError(f"{shown(path)} is not writable", _PERMISSION)


# -- reading --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_regular(path: Path, hint: Optional[str] = None) -> Iterator[BinaryIO]:
    """A regular file, opened for reading in binary; an OSError of the block is an error about the file.

    A FIFO or a device is refused rather than waited for: it may never end.

    Args:
        path: as expanded.
        hint: what to do about a file that is absent or none, where there is more to say than "check the path".

    Raises:
        DataError: absent, not a regular file, or not readable.
    """
    handle, _ = open_handle(path, hint)
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as problem:  # some files of /proc are regular, and can be neither measured nor read
            raise error_of(problem, path) from problem


def open_handle(path: Union[str, Path], hint: Optional[str] = None) -> Tuple[int, int]:
    """The descriptor of a regular file, opened for reading, which the caller closes, and the file's bytes; as
    :func:`open_regular` otherwise."""
    with asking(path):
        try:
            # Before it is opened: to open a device does something to some of them.
            kind = _kind_of_mode(os.stat(path).st_mode)
            if kind is Kind.FILE:
                handle = os.open(path, os.O_RDONLY | _SAFELY)
                status = os.fstat(handle)
                kind = _kind_of_mode(status.st_mode)
                if kind is Kind.FILE:
                    return handle, status.st_size
                os.close(handle)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{shown(path)}: there is no such file", hint or "check the path") from None
    raise DataError(f"{shown(path)} is {kind.value}, not a file", hint or "give the path of a file")


def read_bytes(path: Path, at_most: int, hint: Optional[str] = None) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        DataError: absent, not a regular file, too large, or not readable.
    """
    with open_regular(path, hint) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= at_most:
            data = file.read(min(at_most, max(size, _UNMEASURED_BYTES)) + 1)
            size = len(data)
    if size > at_most:
        raise DataError(f"{shown(path)} is larger than {at_most:,} bytes", hint or "give another file")
    return data


def read_text(path: Path, at_most: int, hint: Optional[str] = None) -> str:
    """The text of a regular file in UTF-8; raises as :func:`read_bytes` does, and for bytes that are no UTF-8."""
    data = read_bytes(path, at_most, hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise DataError(
            f"{shown(path)}, line {line}: byte 0x{data[problem.start]:02x} is not UTF-8 text",
            hint or "save the file as UTF-8",
        ) from None


# -- writing --------------------------------------------------------------------------------------------------

_WRITTEN = "cannot be written"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
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


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
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
        raise error_of(error, path, _WRITTEN) from None
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
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def append_text(path: Path, text: str) -> None:
    """Adds to a file of a run, UTF-8; makes it if it is absent.

    Raises:
        DataError: it cannot be written; it is a link or no regular file, which no run puts there.
    """
    hint = f"remove it: rm {shown(path)}"
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | _SAFELY
        with os.fdopen(os.open(path, flags, 0o666), "ab") as file:
            kind = _kind_of_mode(os.fstat(file.fileno()).st_mode)
            if kind is not Kind.FILE:
                raise DataError(f"{shown(path)} is {kind.value}, not a file", hint)
            file.write(text.encode("utf-8"))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DataError(f"{shown(path)} is a link or a FIFO, not a file", hint) from None
        raise error_of(error, path, _WRITTEN) from None


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, where they are not there.

    Raises:
        DataError: the file system refuses, or a file has the name.
    """
    with asking(path, "cannot be made"):
        os.makedirs(path, exist_ok=True)


def check_makeable(path: Path) -> None:
    """Refuses, before anything is computed, what is no folder, or a folder that :func:`make_folder` could not make.

    Raises:
        DataError: something else has its name or that of a folder above it, or nothing can be written there; or the
            path is relative, and the working directory was deleted.
    """
    place = absolute(path)
    while kind_of(place) is Kind.ABSENT and not is_link(place):
        place = place.parent
    kind = kind_of(place)
    if kind is not Kind.FOLDER:
        what = "a link that leads nowhere" if kind is Kind.ABSENT else kind.value
        raise DataError(f"{shown(place)} is {what}, not a folder", "choose another folder")
    check_writable(place)


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


def is_locked(path: Path) -> bool:
    """Whether a process has a folder locked.

    The question takes a shared lock for a moment: others may ask too, and :func:`locked` waits that long.
    """
    try:
        handle = _lock(path, shared=True)
    except BlockingIOError:
        return True
    if handle is not None:
        os.close(handle)
    return False


def _lock(path: Path, shared: bool) -> Optional[int]:
    """One try of :func:`locked`."""
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
    """An empty file that was not there before, not even as a link: of that name, or with ``.2``, ``.3``, ... after."""
    number, path = 1, folder / name
    while True:
        with asking(path, _WRITTEN), contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            return path
        number += 1
        path = folder / f"{name}.{number}"


def remove_file(path: Path) -> None:
    """Removes a file, or a link and not what it leads to; nothing if there is none.

    Raises:
        DataError: the file system refuses, or it is a folder.
    """
    with asking(path, "cannot be removed"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes a folder and all that is in it; a link or a file as :func:`remove_file` does."""
    if kind_of(path) is not Kind.FOLDER or is_link(path):
        remove_file(path)
        return
    with asking(path, "cannot be removed"):
        shutil.rmtree(str(path))


# -- what users ask for ---------------------------------------------------------------------------------------


def is_written_to(path: Path) -> bool:
    """Whether an output is written to as it is: a device, a FIFO, or a stream of this process (``/dev/stdout``).

    Such a name has no ending that tells a format.
    """
    return _stream_of(path) is not None or kind_of(path) in (Kind.FIFO, Kind.DEVICE)


def check_output(path: Path) -> None:
    """Refuses, before anything is computed, a path that :func:`write_output` could not write.

    Raises:
        DataError: a folder, a socket, a disk, a file that is not writable, or a name in a folder that is absent or
            not writable.
    """
    stream = _stream_of(path)
    if stream is not None:
        import fcntl

        with asking(path):
            mode = fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == os.O_RDONLY:
            raise DataError(
                f"{shown(path)} is open for reading only", "give the name of a file, or /dev/stdout"
            )
        return
    kind = kind_of(path)
    if kind in (Kind.FOLDER, Kind.SOCKET) or (kind is Kind.DEVICE and stat.S_ISBLK(os.stat(path).st_mode)):
        raise DataError(f"{shown(path)} is {kind.value}", "give the name of a file")
    if kind is not Kind.ABSENT:
        check_writable(path)
    if kind in (Kind.ABSENT, Kind.FILE):
        folder = (real(path) if is_link(path) else path).parent  # as it was typed
        if kind_of(folder) is Kind.ABSENT:
            raise DataError(f"{shown(path)}: there is no folder {shown(folder)}", f"mkdir -p {shown(folder)}")
        if kind_of(folder) is not Kind.FOLDER:
            raise DataError(f"{shown(path)}: {shown(folder)} is {kind_of(folder).value}", "give another name")
        check_writable(folder)


def check_different(outputs: Sequence[Tuple[str, Optional[Path]]]) -> None:
    """Refuses two outputs that are one file, by whatever names and links.

    Args:
        outputs: (option, path as expanded, or None if it is not given).

    Raises:
        ConfigurationError: the second would replace the first.
    """
    taken: Dict[Path, str] = {}
    for option, path in outputs:
        if path is None or is_written_to(path):
            continue  # to what is written to one after the other nothing is lost
        target = real(path)
        if target in taken:
            raise ConfigurationError(f"{taken[target]} and {option} are both {shown(path)}", "give two names")
        taken[target] = option


def check_not_read(path: Path, option: str, inputs: Iterable[Tuple[str, Path]]) -> None:
    """Refuses an output that would replace what is read, by whatever names and links.

    Args:
        path: of the output.
        option: that names it.
        inputs: (what it is, path) of what is read.

    Raises:
        ConfigurationError: it is one of them.
    """
    target = None if is_written_to(path) else real(path)
    for what, given in inputs:
        if target is not None and target == real(given):
            raise ConfigurationError(
                f"{option} {shown(path)} is {what}, and would be replaced", "choose another name"
            )


def write_output(path: Path, write: Callable[[Path], object]) -> None:
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
    if is_written_to(path):
        import tempfile

        with tempfile.TemporaryDirectory(prefix="ipucnn-") as folder:
            temporary = Path(folder) / "output"
            write(temporary)
            with asking(path, _WRITTEN), contextlib.suppress(BrokenPipeError), open(
                temporary, "rb"
            ) as source, _open_as_it_is(path) as target:
                shutil.copyfileobj(source, target)
        return
    target_path = real(path)
    former = os.stat(target_path).st_mode & 0o777 if is_file(target_path) else None

    def write_same_mode(temporary: Path) -> None:
        write(temporary)
        if former is not None:
            os.chmod(temporary, former)

    write_atomically(target_path, write_same_mode)


def write_output_text(path: Path, text: Union[str, bytes]) -> None:
    """:func:`write_output` of a text in UTF-8, or of bytes."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    write_output(path, lambda temporary: temporary.write_bytes(data))


def _stream_of(path: Path) -> Optional[int]:
    """The number of the open file that a path such as ``/dev/stdout``, or a link to it, means; or None.

    Where stdout goes to a file, following the name's links would find that file, and renaming another over it
    would take it away from whatever else this process and its shell write there.
    """
    place = os.fspath(path)
    for _ in range(_MOST_LINKS):
        match = _STREAM.fullmatch(os.path.normpath(place))
        if match is not None and match.group(2) in (None, str(os.getpid())):
            return _STANDARD[match.group(1)] if match.group(1) else int(match.group(3))
        try:
            place = os.path.join(os.path.dirname(place), os.readlink(place))
        except (OSError, ValueError):
            return None
    return None


def _open_as_it_is(path: Path) -> BinaryIO:
    """A stream of this process, a device or a FIFO, opened for writing; a FIFO that nothing reads from is an error."""
    stream = _stream_of(path)
    if stream is not None:
        for text in (sys.stdout, sys.stderr):
            with contextlib.suppress(
                OSError, ValueError
            ):  # what cannot be written is told where it is written
                text.flush()
        return os.fdopen(os.dup(stream), "wb")
    handle = os.open(path, os.O_WRONLY | _SAFELY)
    os.set_blocking(handle, True)
    return os.fdopen(handle, "wb")


def _temporary_name(name: str) -> str:
    """A name that nobody can foresee, as long as a name may be."""
    ending = f".{int.from_bytes(os.urandom(6), 'big')}.tmp"
    kept = os.fsencode(name)[: NAME_BYTES - len(ending) - 1].decode("utf-8", "ignore")
    return f".{kept}{ending}"


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut; where folders cannot be synced there is nothing to do."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
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
