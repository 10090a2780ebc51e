"""Where a result comes from: versions, machine, command line, revision of the sources."""

import functools
import hashlib
import os
import platform
import re
import shlex
import stat
import sys
from pathlib import Path
from typing import List, Optional

from ipucnn.aliases import PlainDict
from ipucnn.errors import DataError
from ipucnn.filesystem import read_bytes, shown
from ipucnn.machine import BYTE_PACKAGES, BYTE_VARIABLES, cpu_name, operation_threads
from ipucnn.text import shown_value

# Environment variables that change what TensorFlow computes or where.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "POPLAR_ENGINE_OPTIONS",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_POPLAR_FLAGS",
    *BYTE_VARIABLES,
)
# What can change the bytes of a run that is continued elsewhere.
DECIDES_BYTES = ("ipucnn", *BYTE_PACKAGES, "cpu", "threads")


# What is read of a folder that may be anybody's: so many bytes, and nothing that does not look like this.
_HEAD_BYTES = 4096
_PACKED_REFS_BYTES = 8 * 2**20
_REVISION = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REFERENCE = re.compile(r"ref: (refs(?:/[A-Za-z0-9_+=@,#%-][A-Za-z0-9._+=@,#%-]*)+)")


def git_revision(folder: Path) -> Optional[str]:
    """The revision that is checked out in the git working tree a folder lies in; None if there is none.

    Git's files are read, and git is not run: it obeys the configuration in the folder, which may name programs.
    Whether files differ from the revision is therefore not told.
    """
    try:
        place = _git_folder(folder)
        return None if place is None else _head(place)
    except (DataError, OSError, ValueError):
        return None


def _git_folder(folder: Path) -> Optional[Path]:
    """The ``.git`` of the nearest folder that has one, followed where it is a file (worktrees, submodules)."""
    here = Path(os.path.realpath(folder))
    for place in (here, *here.parents):
        git = place / ".git"
        try:
            mode = os.lstat(git).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode):
            return git
        text = _line(git)
        return place / text[len("gitdir: ") :] if text.startswith("gitdir: ") else None
    return None


def _head(git: Path) -> Optional[str]:
    head = _line(git / "HEAD")
    if _REVISION.fullmatch(head):
        return head
    found = _REFERENCE.fullmatch(head)
    if found is None or ".." in head:
        return None
    name = found.group(1)
    # A worktree has a HEAD of its own, and its branches where its repository has them.
    common = git / _line(git / "commondir") if _is_plain(git / "commondir") else git
    for place in (git, common):
        if _is_plain(place / name):
            revision = _line(place / name)
            return revision if _REVISION.fullmatch(revision) else None
    if not _is_plain(common / "packed-refs"):
        return None
    packed = read_bytes(common / "packed-refs", _PACKED_REFS_BYTES).decode("utf-8", "replace")
    for line in packed.splitlines():
        revision, _, reference = line.partition(" ")
        if reference == name and _REVISION.fullmatch(revision):
            return revision
    return None


def _is_plain(path: Path) -> bool:
    """Whether a path is a regular file itself: a link could lead to a device that acts when it is opened."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _line(path: Path) -> str:
    """The one line of a small regular file."""
    if not _is_plain(path):
        raise DataError(f"{shown(path)} is not a file", "check the repository")
    return read_bytes(path, _HEAD_BYTES).decode("utf-8", "surrogateescape").rstrip("\r\n")


def sources() -> PlainDict:
    """What tells ipucnn's own sources: their revision (None where they are installed) and a SHA-256 over them.

    The hash is over the names and contents of all ``.py`` files of the package, so that two runs of a modified
    working tree can be told apart.
    """
    package = Path(__file__).resolve().parents[1]
    has_git = os.path.lexists(package.parent / ".git")
    return {
        "revision": git_revision(package.parent) if has_git else None,
        "sources_sha256": _sha256_of(package),
    }


@functools.lru_cache(maxsize=None)
def _sha256_of(package: Path) -> str:
    """Once per process: folds and the rows of a suite are runs of one process, with the same sources."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def environment() -> PlainDict:
    """Versions and machine, for ``environment.json`` and ``report.json`` (imports TensorFlow)."""
    import numpy as np
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn import __version__

    return {
        "ipucnn": __version__,
        "git": {"ipucnn": sources(), "working_directory": {"revision": git_revision(Path())}},
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "threads": operation_threads(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name in VARIABLES},
        "command": shlex.join([_program(sys.argv[0]), *sys.argv[1:]]),
    }


def _program(path: str) -> str:
    """The program as it is typed, wherever this machine has it: exports carry the command to other people.

    It is another one than `ipucnn` where a script of the user's own imports the package.
    """
    own = Path(path)
    return own.parent.name if own.name == "__main__.py" else own.name


def changes(before: PlainDict, now: PlainDict) -> List[str]:
    """What of the environment differs that can change the bytes of a continued run, readable."""

    def facts(process: PlainDict) -> PlainDict:
        noted = process.get("variables")
        variables = noted if isinstance(noted, dict) else {}
        found = {name: process.get(name) for name in DECIDES_BYTES}
        found.update({name: variables.get(name) for name in BYTE_VARIABLES})
        return found

    former, present = facts(before), facts(now)
    return [
        f"{name} {shown_value(former[name])} before, {shown_value(present[name])} now"
        for name in present
        if former[name] != present[name]
    ]
