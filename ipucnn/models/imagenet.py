"""The names of ImageNet's 1000 classes in the order of Keras Applications' weights, from the file Keras publishes."""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any, Iterator, Tuple

from ipucnn.documents import load_record
from ipucnn.errors import ConfigurationError, DataError, MissingError
from ipucnn.filesystem import read_text
from ipucnn.models.registry import ModelRecord

NUM_CLASSES = 1000
CLASS_INDEX = "imagenet_class_index.json"
# As in keras.applications.imagenet_utils.
_URL = f"https://storage.googleapis.com/download.tensorflow.org/data/{CLASS_INDEX}"
_MD5 = "c2c37ea517e94d9795004a39431a14cb"
_INDEX_BYTES = 2**20
TIMEOUT_S = 20.0
"""How long a server may be silent.  Keras itself waits for as long as the system does, which can be minutes."""


def check_has_weights(record: ModelRecord) -> None:
    """Raises:
    ConfigurationError: Keras Applications have no ImageNet weights for this network.
    """
    if record.keras_application is None:
        raise ConfigurationError(
            f"there are no ImageNet weights for {record.name}",
            "ipucnn models --json lists keras_application for those that have them",
        )


def class_names() -> Tuple[str, ...]:
    """The 1000 names, e.g. "tench"; downloaded once into ``~/.keras/models`` (imports TensorFlow).

    Raises:
        MissingError: they are not there, and there is no network.
        DataError: the file is damaged.
    """
    try:
        with quiet_download():
            path = Path(_fetch())
    except Exception as error:
        raise _not_downloaded(f"the names of ImageNet's classes ({CLASS_INDEX})", error) from error
    try:
        index = load_record(read_text(path, _INDEX_BYTES))
        names = [index[str(i)][1] for i in range(NUM_CLASSES)]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a name is no text")
        return tuple(names)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}", "delete it; it is then downloaded again") from error


def _fetch() -> str:
    """The path of the class index; Keras keeps what it downloaded, and checks its MD5."""
    from tensorflow import keras

    path: str = keras.utils.get_file(CLASS_INDEX, _URL, cache_subdir="models", file_hash=_MD5)
    return path


@contextlib.contextmanager
def quiet_download() -> Iterator[None]:
    """Keras downloads inside: its progress leaves stdout alone, and a silent server is given up soon."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            progress: Any = sys.stderr if sys.stderr.isatty() else nowhere
            with contextlib.redirect_stdout(progress):
                yield
    finally:
        socket.setdefaulttimeout(before)


def _not_downloaded(what: str, error: Exception) -> MissingError:
    reason = " ".join(str(error).split())
    return MissingError(
        f"{what} could not be downloaded: {reason}",
        f"check the network, or put the file into {_cache()}",
    )


def _cache() -> str:
    return str(Path(os.environ.get("KERAS_HOME") or "~/.keras") / "models")
