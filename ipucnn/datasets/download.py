"""Fetches the original files of the small sets from where their authors publish them, when asked to.

Every file is checked against a known MD5 before it takes its place; nothing half-fetched stays behind.
"""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Tuple

from ipucnn.errors import DataError, MissingError

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60


@dataclass(frozen=True)
class Remote:
    """Where a set is published.

    Attributes:
        base: the address the file names are appended to.
        files: (file name, MD5) each.
        folder: what the files are put into, below the data folder; for archives, what they unpack to.
    """

    base: str
    files: Tuple[Tuple[str, str], ...]
    folder: str

    @property
    def archive(self) -> bool:
        return self.files[0][0].endswith(".tar.gz")


REMOTES: Dict[str, Remote] = {
    "mnist": Remote(
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        (
            ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        "mnist",
    ),
    "fashion_mnist": Remote(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        "fashion_mnist",
    ),
    "cifar10": Remote(
        "https://www.cs.toronto.edu/~kriz/",
        (("cifar-10-python.tar.gz", "c58f30108f718f92721af3d95e74349a"),),
        "cifar-10-batches-py",
    ),
    "cifar100": Remote(
        "https://www.cs.toronto.edu/~kriz/",
        (("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
        "cifar-100-python",
    ),
}


def download(name: str, path: Path) -> Path:
    """Fetches ``name`` below ``path`` and returns the folder it lies in.  Progress goes to stderr.

    Raises:
        MissingError: the network or the server fails.
        DataError: a file differs from its MD5, or it cannot be stored.
    """
    remote = REMOTES[name]
    target = path / remote.folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{remote.folder}-", dir=path) as scratch:
            fetched = Path(scratch) / remote.folder
            fetched.mkdir()
            for file_name, md5 in remote.files:
                print(f"downloading {remote.base}{file_name}", file=sys.stderr)
                _fetch(remote.base + file_name, Path(scratch) / file_name, md5)
                if remote.archive:
                    _unpack(Path(scratch) / file_name, fetched)
                else:
                    os.replace(Path(scratch) / file_name, fetched / file_name)
            target.mkdir(exist_ok=True)
            for file in fetched.iterdir():
                os.replace(file, target / file.name)
    except OSError as error:
        raise DataError(
            f"cannot store {name} in {path}: {error.strerror or error}", "choose another --dataset-path"
        ) from error
    return target


def _fetch(url: str, path: Path, md5: str) -> None:
    digest = hashlib.md5()
    with open(path, "wb") as file:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                while True:
                    chunk = response.read(CHUNK_BYTES)
                    if not chunk:
                        break
                    digest.update(chunk)
                    file.write(chunk)
        except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
            raise MissingError(
                f"cannot download {url}: {getattr(error, 'reason', None) or error}",
                "check the network, or fetch the file elsewhere and pass --dataset-path",
            ) from error
    if digest.hexdigest() != md5:
        raise DataError(
            f"{url} has MD5 {digest.hexdigest()}, not {md5}; it was not kept",
            "try again, or fetch it elsewhere",
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Plain files of the archive, by their last name: nothing in it can choose where it goes."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            base_name = os.path.basename(member.name)
            if content is not None and base_name not in ("", ".", ".."):
                with open(folder / base_name, "wb") as file:
                    shutil.copyfileobj(content, file)
