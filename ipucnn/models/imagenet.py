"""Keras' public files for ImageNet: the weights of Keras Applications, and the names of the 1000 classes in order."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from pathlib import Path
from typing import Callable, Iterator, List, Tuple

from ipucnn.aliases import KerasLayer, KerasModel, KerasProgbar
from ipucnn.documents import load_record
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.events import Progress, emit
from ipucnn.filesystem import read_text, user_error_of
from ipucnn.models.build import check_requirements
from ipucnn.models.preprocessing import PREPROCESSING
from ipucnn.models.registry import ModelRecord

NUM_CLASSES = 1000
CLASS_INDEX = "imagenet_class_index.json"
# URL and MD5 are those of keras.applications.imagenet_utils.
_URL = f"https://storage.googleapis.com/download.tensorflow.org/data/{CLASS_INDEX}"
_MD5 = "c2c37ea517e94d9795004a39431a14cb"
_INDEX_BYTES = 2**20
TIMEOUT_S = 20.0
"""Seconds that a server may be silent.  Keras itself waits as long as the system does, which can be minutes."""


def check_has_weights(record: ModelRecord) -> str:
    """The name of the Keras application whose ImageNet weights fit the network.

    Raises:
        ConfigurationError: there are no ImageNet weights for it.
    """
    if record.keras_application is None:
        raise ConfigurationError(
            f"there are no ImageNet weights for {record.name}",
            "`ipucnn models --json` lists keras_application for the networks that have them",
        )
    return record.keras_application


def class_names() -> Tuple[str, ...]:
    """The names of the 1000 classes, such as "tench"; downloaded once into ``~/.keras/models`` (imports TensorFlow).

    Raises:
        MissingError: the names are not there and could not be downloaded.
    """
    try:
        with _reported_download("the names of ImageNet's classes"):
            path = Path(_fetch())
    except Exception as error:
        folder = Path(os.environ.get("KERAS_HOME") or "~/.keras") / "models"
        raise user_error_of(error) or MissingError(
            f"the names of ImageNet's classes ({CLASS_INDEX}) could not be downloaded: {' '.join(str(error).split())}",
            f"check the network, or put the file into {folder}",
        ) from error
    index = load_record(read_text(path, _INDEX_BYTES))
    return tuple(index[str(number)][1] for number in range(NUM_CLASSES))


def _fetch() -> str:
    """The path of the class index; Keras caches the download and checks its MD5."""
    from tensorflow import keras

    path: str = keras.utils.get_file(CLASS_INDEX, _URL, cache_subdir="models", file_hash=_MD5)
    return path


@contextlib.contextmanager
def _reported_download(what: str) -> Iterator[None]:
    """Reports Keras' downloads inside the block as events, and limits the wait for a silent server.

    Args:
        what: the content of the file, for the events.
    """
    from tensorflow import keras

    def update(bar: KerasProgbar, current: int, *_: object, **__: object) -> None:
        total = None if bar.target is None else round(bar.target / 2**20)
        done = round(current / 2**20)  # Keras counts the last block whole
        emit(Progress(f"downloading {what}, MiB", done if total is None else min(done, total), total))

    old_timeout, old_update = socket.getdefaulttimeout(), keras.utils.Progbar.update
    socket.setdefaulttimeout(TIMEOUT_S)
    keras.utils.Progbar.update = update
    try:
        # Keras also prints the address of the file.
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        keras.utils.Progbar.update = old_update
        socket.setdefaulttimeout(old_timeout)


# --- weights


def weight_layers(model: KerasModel) -> List[KerasLayer]:
    """The layers with weights, without input preprocessing, in the model's order."""
    return [layer for layer in model.layers if layer.weights and type(layer).__name__ not in PREPROCESSING]


def copy_weights(source: KerasModel, target: KerasModel) -> int:
    """Copies weights by position.

    Args:
        source: a model with the same layers under any names.
        target: the model to fill; its last layer keeps its own weights if the shapes differ.

    Returns:
        The number of weights (tensors) that were not copied.

    Raises:
        ConfigurationError: the layers do not match; the target is unchanged.
    """
    sources, targets = weight_layers(source), weight_layers(target)
    plan, skipped = [], 0
    problem = None
    if len(sources) != len(targets):
        problem = f"{len(sources)} layers with weights against {len(targets)}"
    else:
        for i, (old, new) in enumerate(zip(sources, targets)):
            shapes = [[tuple(w.shape) for w in layer.weights] for layer in (old, new)]
            if shapes[0] == shapes[1]:
                plan.append((old, new))
            elif i == len(targets) - 1:
                skipped = len(new.weights)
            else:
                problem = f"layer {new.name} has weights of shapes {shapes[1]}, the source {shapes[0]}"
                break
    if problem:
        raise ConfigurationError(
            f"the weights do not fit {target.name}: {problem}",
            "pretrained weights need the network's own norm, input channels and filters",
        )
    for old, new in plan:
        new.set_weights(old.get_weights())
    return skipped


def application(name: str) -> Callable[..., KerasModel]:
    """The function of Keras Applications that builds a network (imports TensorFlow)."""
    from tensorflow import keras

    return getattr(keras.applications, name)


def load_imagenet_weights(model: KerasModel, record: ModelRecord) -> int:
    """Loads Keras Applications' ImageNet weights into a model from ``build_model``.

    Args:
        model: a model with batch norm; input size and classes may differ from ImageNet's.  If the classes differ,
            the last layer keeps its initial weights.
        record: the model's record.

    Returns:
        The number of weights (tensors) that were not loaded: 0, or those of the last layer.

    Raises:
        ConfigurationError: there are no weights for this network, or the model's layers differ from theirs.
        MissingError: the weights could not be downloaded.
    """
    application_name = check_has_weights(record)
    check_requirements(record)
    try:
        with _reported_download(f"the ImageNet weights of {record.name}"):
            source = application(application_name)(weights="imagenet")
    except Exception as error:
        # Keras reports a failed download as a bare Exception with the address in its text.
        if isinstance(error, OSError) or "URL fetch failure" in str(error):
            raise user_error_of(error) or MissingError(
                f"the ImageNet weights of {record.name} could not be downloaded: {error}",
                "check the network, or put the weights file into ~/.keras/models",
            ) from error
        raise
    return copy_weights(source, model)
