"""Fetches the original files of the small sets from where they are published, when asked to.

By https alone, through pooch: every file is checked against a known SHA-256 before it takes its place, none is longer
than it should be, and nothing half-fetched stays behind.
"""

import os
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Tuple

from ipucnn import filesystem
from ipucnn.errors import DataError, MissingError, UserError

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60
MAX_FILE_BYTES = 2**28
"""What one file may have: CIFAR-10's archive has 170 MB, the longest."""
MAX_UNPACKED_BYTES = 2**30


@dataclass(frozen=True)
class Remote:
    """Where a set is published.

    Attributes:
        base: the https address the file names are appended to.
        files: (file name, SHA-256) each.
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
            (
                "train-images-idx3-ubyte.gz",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            ("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            ("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        "mnist",
    ),
    "fashion_mnist": Remote(
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        (
            (
                "train-images-idx3-ubyte.gz",
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            ("t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            ("t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        "fashion_mnist",
    ),
    "cifar10": Remote(
        "https://www.cs.toronto.edu/~kriz/",
        (("cifar-10-python.tar.gz", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),),
        "cifar-10-batches-py",
    ),
    "cifar100": Remote(
        "https://www.cs.toronto.edu/~kriz/",
        (("cifar-100-python.tar.gz", "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),),
        "cifar-100-python",
    ),
}


def download(name: str, path: Path) -> Path:
    """Fetches ``name`` below ``path`` and returns the folder it lies in.  Progress goes to stderr.

    Raises:
        MissingError: the network or the server fails, or pooch is not installed.
        DataError: a file differs from its SHA-256 or is too long, or it cannot be stored.
    """
    remote = REMOTES[name]
    target = path / remote.folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{remote.folder}-", dir=path) as scratch:
            fetched = Path(scratch) / remote.folder
            fetched.mkdir()
            for file_name, sha256 in remote.files:
                print(f"downloading {remote.base}{file_name}", file=sys.stderr)
                _fetch(remote.base + file_name, Path(scratch) / file_name, sha256)
                if remote.archive:
                    _unpack(Path(scratch) / file_name, fetched)
                else:
                    os.replace(Path(scratch) / file_name, fetched / file_name)
            target.mkdir(exist_ok=True)
            for file in filesystem.entries(fetched):
                os.replace(file, target / file.name)
    except OSError as error:
        raise DataError(
            f"cannot store {name} in {path}: {error.strerror or error}", "choose another --dataset-path"
        ) from error
    return target


def _fetch(url: str, path: Path, sha256: str) -> None:
    """Writes what lies at an address to ``path``, in a folder that is deleted at the end.

    Raises:
        MissingError: it could not be fetched.
        DataError: it is something else than was published.
    """
    if not url.startswith("https://"):
        raise DataError(f"{url} is not fetched: only https addresses are", "fetch the file elsewhere")
    try:
        import pooch
    except ImportError as error:
        raise MissingError(
            f"--download needs the package pooch: {error}", "install it with: python -m pip install pooch"
        ) from None
    # Its own lines would be a second report of the same.
    pooch.get_logger().setLevel("CRITICAL")
    try:
        pooch.retrieve(
            url,
            known_hash=f"sha256:{sha256}",
            fname=path.name,
            path=path.parent,
            downloader=_download_bounded,
        )
    except UserError:
        raise
    except ValueError as error:
        if "hash" not in str(error).lower():
            raise _not_fetched(url, error) from error
        raise DataError(
            f"{url} does not have the SHA-256 {sha256}; it was not kept", "try again, or fetch it elsewhere"
        ) from None
    except Exception as error:  # requests and urllib3 have errors of their own
        raise _not_fetched(url, error) from error


def _not_fetched(url: str, error: Exception) -> MissingError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return MissingError(
        f"cannot download {url}: {reason}",
        "check the network, or fetch the file elsewhere and pass --dataset-path",
    )


def _download_bounded(url: str, output_file: str, _: object) -> None:
    """Pooch's downloader: streams an address into a file, which ends where it is longer than any should be.

    Redirections are followed to https addresses only.
    """
    written = 0
    with open(output_file, "wb") as file, _opened(
        url
    ) as response:  # pooch chose the name, beside the final one
        response.raise_for_status()
        places = [getattr(step, "url", url) for step in (*getattr(response, "history", ()), response)]
        if not all(place.startswith("https://") for place in places):
            raise DataError(f"{url} leads to {places[-1]}, which is not https", "fetch the file elsewhere")
        for chunk in response.iter_content(CHUNK_BYTES):
            written += len(chunk)
            if written > MAX_FILE_BYTES:
                raise DataError(f"{url} is longer than {MAX_FILE_BYTES} bytes", "fetch the file elsewhere")
            file.write(chunk)
            if sys.stderr.isatty():
                print(f"\r{written / 2**20:.0f} MiB", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr, flush=True)


def _opened(url: str) -> Any:
    """The answer of a server, whose content is not fetched yet."""
    import requests

    return requests.get(url, stream=True, timeout=TIMEOUT_S)


def _unpack(archive: Path, folder: Path) -> None:
    """Plain files of the archive, by their last name: nothing in it can choose where it goes."""
    left = MAX_UNPACKED_BYTES
    with tarfile.open(archive, "r:gz") as tar:  # its SHA-256 was right
        for member in tar:
            left -= member.size
            if left < 0:
                raise DataError(
                    f"{archive.name} unpacks to more than {MAX_UNPACKED_BYTES} bytes", "fetch it elsewhere"
                )
            content = tar.extractfile(member) if member.isfile() else None
            base_name = os.path.basename(member.name)
            if content is not None and base_name not in ("", ".", ".."):
                with open(folder / base_name, "wb") as file:
                    shutil.copyfileobj(content, file)
