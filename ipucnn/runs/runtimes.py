"""Runs exported networks in their target runtimes: onnxruntime, TensorFlow Lite, stock TensorFlow and Keras.

This file is also a script, run as a process that cannot import ipucnn and ends with its stdin.  It loads a file as
``predict.py`` does, writes the name of its runtime as a line of JSON, and then answers each batch of images on stdin
with the outputs (:func:`send`, :func:`receive`).  It imports nothing else from this package.

    python runtimes.py RECORD THREADS
"""

import json
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

SAVED_MODEL, KERAS, ONNX, TFLITE = "saved-model", "keras", "onnx", "tflite"
FORMATS = (SAVED_MODEL, KERAS, ONNX, TFLITE)
SIGNATURE = "serving_default"
ENDINGS = {".onnx": ONNX, ".tflite": TFLITE}
"""Endings of files that contain only numbers and operations, and cannot execute other code."""


class Loaded(NamedTuple):
    """A network in its runtime.

    Attributes:
        runtime: name and version of the runtime.
        run: function from the images of a batch to the outputs.
    """

    runtime: str
    run: Callable[[np.ndarray], np.ndarray]


def missing_packages(form: str) -> List[str]:
    """Returns the packages besides TensorFlow that a format needs and that are not installed."""
    needed: Sequence[str] = ()
    if form == ONNX:
        needed = ("onnx", "tf2onnx", "onnxruntime")
    elif form == TFLITE and not _tensorflow_has_lite():
        needed = ("ai_edge_litert",)
    return [name.replace("_", "-") for name in needed if find_spec(name) is None]


def _tensorflow_has_lite() -> bool:
    """Whether the installed TensorFlow includes the interpreter, found without importing it."""
    package = find_spec("tensorflow")
    places = (package.submodule_search_locations or ()) if package is not None else ()
    return any((Path(place) / "lite" / "python" / "interpreter.py").exists() for place in places)


def load(record: Dict[str, Any], threads: int = 0) -> Loaded:
    """Loads an exported network into its runtime, as the script of an export does.

    Args:
        record: ``export.json``, with the absolute path of the file or the SavedModel's folder.
        threads: threads of the runtime; 0 for its own choice.
    """
    spec = spec_from_file_location("predict", Path(__file__).with_name("predict.py"))
    assert spec is not None and spec.loader is not None
    predict = module_from_spec(spec)
    spec.loader.exec_module(predict)
    run = predict.network(record, threads)
    return Loaded(_runtime(record["format"]), run)


def _runtime(form: str) -> str:
    """Returns the name and version of the runtime that was loaded for a format."""
    if form == ONNX:
        return f"onnxruntime {sys.modules['onnxruntime'].__version__}"
    if form == TFLITE and "ai_edge_litert" in sys.modules:
        return f"ai-edge-litert {version('ai-edge-litert')}"
    import tensorflow as tf

    names = {TFLITE: "TensorFlow Lite of TensorFlow", KERAS: "Keras"}
    return f"{names.get(form, 'TensorFlow')} {(tf.keras if form == KERAS else tf).__version__}"


def batches(images: np.ndarray, batch: Optional[int]) -> List[np.ndarray]:
    """Returns the images in batches of a fixed size, the last padded with zeros; for None, of several sizes."""
    if batch is None:
        # One image alone, then the others, 32 at a time: a file whose batch size is fixed by mistake fails.
        return [images[:1]] + [images[i : i + 32] for i in range(1, len(images), 32)]
    missing = -len(images) % batch
    filled = np.concatenate([images, np.zeros((missing, *images.shape[1:]), images.dtype)])
    return [filled[i : i + batch] for i in range(0, len(filled), batch)]


class _Without:
    """Import hook that prevents a package from being imported, wherever it is installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ImportError(f"{name} is kept from being imported here")


def send(stream: Any, values: np.ndarray) -> None:
    """Writes an array to a pipe, in the format that :func:`receive` reads."""
    head = json.dumps({"dtype": values.dtype.name, "shape": list(values.shape)})
    stream.write(head.encode() + b"\n" + np.ascontiguousarray(values).tobytes())
    stream.flush()


def receive(stream: Any) -> Any:
    """Reads an array from a pipe, or the mapping sent instead of one; returns None at the end of the pipe."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    if "dtype" not in head:
        return head
    dtype, shape = np.dtype(head["dtype"]), tuple(head["shape"])
    size = dtype.itemsize * int(np.prod(shape))
    data = stream.read(size)
    return np.frombuffer(data, dtype).reshape(shape) if len(data) == size else None


def main(record: str, threads: str) -> int:
    """Runs the batches from stdin through a file and writes their outputs to stdout, until stdin ends."""
    sys.meta_path.insert(0, _Without("ipucnn"))  # type: ignore[arg-type]
    # Libraries print to stdout, which is redirected to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    try:
        network = load(json.loads(record), int(threads))
        say({"runtime": network.runtime})
        while True:
            images = receive(sys.stdin.buffer)
            if images is None:
                return 0
            send(answers, network.run(images))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
        return 1


if __name__ == "__main__":
    # The first entry is this file's folder, whose modules have the names of other packages.
    sys.path.pop(0)
    sys.exit(main(*sys.argv[1:]))
