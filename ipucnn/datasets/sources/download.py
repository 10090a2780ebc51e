"""Downloads the original files of the small sets from their publishers, for ``--download``.

pooch checks every file against a known SHA-256 before it is unpacked or stored; no incomplete file remains.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Tuple

from ipucnn.errors import DataError, MissingError
from ipucnn.events import Note, Progress, emit
from ipucnn.filesystem import reason_of, user_error_of

TIMEOUT_S = 60


@dataclass(frozen=True)
class Remote:
    """The published files of a set.

    Attributes:
        base: the https address that file names are appended to.
        files: (file name, SHA-256) of each file.
        folder: the folder of the files, below the data folder; for archives, the folder that they unpack to.
    """

    base: str
    files: Tuple[Tuple[str, str], ...]
    folder: str


_IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_MNIST_SHA256 = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
_FASHION_MNIST_SHA256 = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"
_FASHION_MNIST = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
REMOTES: Dict[str, Remote] = {
    "mnist": Remote(_MNIST, tuple(zip(_IDX_FILES, _MNIST_SHA256)), "mnist"),
    "fashion_mnist": Remote(_FASHION_MNIST, tuple(zip(_IDX_FILES, _FASHION_MNIST_SHA256)), "fashion_mnist"),
    "cifar10": Remote(
        _CIFAR,
        (("cifar-10-python.tar.gz", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),),
        "cifar-10-batches-py",
    ),
    "cifar100": Remote(
        _CIFAR,
        (("cifar-100-python.tar.gz", "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),),
        "cifar-100-python",
    ),
}


def download(name: str, path: Path) -> Path:
    """Downloads ``name`` to a folder below ``path`` and returns that folder.

    Raises:
        MissingError: the network or the server fails, or pooch is not installed.
        DataError: a file differs from its SHA-256, or it cannot be stored.
    """
    remote = REMOTES[name]
    target = path / remote.folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{remote.folder}-", dir=path) as scratch:
            files: List[str] = []
            for file_name, sha256 in remote.files:
                emit(Note(f"downloading {remote.base}{file_name}"))
                files += _fetch(remote, file_name, sha256, Path(scratch))
            target.mkdir(exist_ok=True)
            for file in files:
                os.replace(file, target / os.path.basename(file))
    except OSError as error:
        raise DataError(
            f"cannot store {name} in {path}: {reason_of(error)}", "choose another --dataset-path"
        ) from error
    return target


def _fetch(remote: Remote, file_name: str, sha256: str, folder: Path) -> List[str]:
    """Downloads ``file_name`` to ``folder``, a temporary folder, and unpacks archives; returns the resulting files."""
    try:
        import pooch
    except ImportError as error:
        raise MissingError(
            f"--download needs the package pooch: {error}", "install it with: python -m pip install pooch"
        ) from None
    # pooch's log would report the same a second time.
    pooch.get_logger().setLevel("CRITICAL")
    url = remote.base + file_name
    try:
        files = pooch.retrieve(
            url,
            known_hash=f"sha256:{sha256}",
            fname=file_name,
            path=folder,
            downloader=pooch.HTTPDownloader(progressbar=_Download(), timeout=TIMEOUT_S),
            processor=pooch.Untar(members=[remote.folder]) if file_name.endswith(".tar.gz") else None,
        )
    except Exception as error:  # requests and urllib3 raise their own types, and pooch a ValueError
        if isinstance(error, ValueError) and "hash" in str(error).lower():
            text = f"{url} does not have the SHA-256 {sha256}; it was not kept"
            raise DataError(text, "try again, or fetch it elsewhere") from None
        if user_error_of(error) is not None:
            raise  # of the folder
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise MissingError(
            f"cannot download {url}: {reason}",
            "check the network, or fetch the file elsewhere and pass --dataset-path",
        ) from error
    return [files] if isinstance(files, str) else list(files)


class _Download:
    """Emits the progress of a download, in MiB; it has the methods that pooch calls."""

    total = num_bytes = 0

    def update(self, num_bytes: int) -> None:
        self.num_bytes = min(self.num_bytes + num_bytes, self.total)
        emit(Progress("downloading, MiB", round(self.num_bytes / 2**20), round(self.total / 2**20)))

    def reset(self) -> None:
        self.num_bytes = 0

    def close(self) -> None:
        pass
