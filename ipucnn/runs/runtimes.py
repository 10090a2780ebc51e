"""Runs exported networks in their target runtimes: onnxruntime, TensorFlow Lite, stock TensorFlow and Keras.

This file is also a script, run as a process that cannot import ipucnn and ends with its stdin.  It loads one file,
writes its inputs and outputs as a line of JSON, and then answers each batch of images on stdin with the outputs
(:func:`send`, :func:`receive`).  It imports nothing from this package.

    python runtimes.py FORMAT PATH THREADS
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

SAVED_MODEL, KERAS, ONNX, TFLITE = "saved-model", "keras", "onnx", "tflite"
FORMATS = (SAVED_MODEL, KERAS, ONNX, TFLITE)
SIGNATURE = "serving_default"
ENDINGS = {".onnx": ONNX, ".tflite": TFLITE}
"""Endings of files that contain only numbers and operations, and cannot execute other code."""
Port = List[Any]
"""Name, NumPy type and shape of an input or output, as JSON stores them.

The shape begins with the batch; None stands for any size.
"""


class Loaded(NamedTuple):
    """A network in its runtime.

    Attributes:
        runtime: name and version of the runtime.
        inputs, outputs: the file's own description of its inputs and outputs.
        run: function from the images of a batch to the first output.
    """

    runtime: str
    inputs: List[Port]
    outputs: List[Port]
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


def load(form: str, path: Path, threads: int = 0) -> Loaded:
    """Loads an exported network into its runtime.

    Args:
        form: one of FORMATS.
        path: the file, or a SavedModel's folder.
        threads: threads of the runtime; 0 for its own choice.
    """
    loaders = {SAVED_MODEL: _saved_model, KERAS: _keras, ONNX: _onnx, TFLITE: _tflite}
    return loaders[form](path, threads)


def _onnx(path: Path, threads: int) -> Loaded:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    types = {"tensor(float)": "float32", "tensor(uint8)": "uint8"}

    def ports(arguments: Any) -> List[Port]:
        return [
            [
                port.name,
                types.get(port.type, port.type),
                [n if isinstance(n, int) else None for n in port.shape],
            ]
            for port in arguments
        ]

    inputs, outputs = ports(session.get_inputs()), ports(session.get_outputs())

    def run(images: np.ndarray) -> np.ndarray:
        return np.asarray(session.run([outputs[0][0]], {inputs[0][0]: images})[0])

    return Loaded(f"onnxruntime {onnxruntime.__version__}", inputs, outputs, run)


def _tflite_interpreter() -> Tuple[Any, str]:
    """Returns the interpreter's class, and the name and version of its package."""
    if find_spec("ai_edge_litert") is not None:
        from importlib.metadata import version

        from ai_edge_litert.interpreter import Interpreter

        return Interpreter, f"ai-edge-litert {version('ai-edge-litert')}"
    import tensorflow as tf

    return tf.lite.Interpreter, f"TensorFlow Lite of TensorFlow {tf.__version__}"


def _tflite(path: Path, threads: int) -> Loaded:
    interpreter, runtime = _tflite_interpreter()
    network = interpreter(str(path), num_threads=threads or None)
    signature = network.get_signature_list().get(SIGNATURE, {"inputs": [], "outputs": []})

    def port(name: str, detail: Any) -> Port:
        shape = detail["shape_signature"] if len(detail["shape_signature"]) else detail["shape"]
        return [name, np.dtype(detail["dtype"]).name, [None if n < 0 else int(n) for n in shape]]

    inputs = list(map(port, signature["inputs"], network.get_input_details()))
    outputs = list(map(port, signature["outputs"], network.get_output_details()))
    runner = network.get_signature_runner(SIGNATURE)

    def run(images: np.ndarray) -> np.ndarray:
        return np.asarray(runner(**{inputs[0][0]: images})[outputs[0][0]])

    return Loaded(runtime, inputs, outputs, run)


def _saved_model(path: Path, threads: int) -> Loaded:
    import tensorflow as tf

    network = tf.saved_model.load(str(path))
    function = network.signatures[SIGNATURE]

    def port(named: Tuple[str, Any]) -> Port:
        name, spec = named
        return [name, spec.dtype.name, spec.shape.as_list()]

    inputs = list(map(port, function.structured_input_signature[1].items()))
    outputs = list(map(port, function.structured_outputs.items()))

    def run(images: np.ndarray) -> np.ndarray:
        # Keeps the network alive as long as its function.
        assert network is not None
        return function(**{inputs[0][0]: tf.constant(images)})[outputs[0][0]].numpy()

    return Loaded(f"TensorFlow {tf.__version__}", inputs, outputs, run)


def _keras(path: Path, threads: int) -> Loaded:
    from tensorflow import keras

    model = keras.models.load_model(str(path), compile=False)
    for layer in model.layers:
        if type(layer).__module__.partition(".")[0] not in ("keras", "tensorflow"):
            raise ValueError(f"layer {layer.name} is no layer of Keras: {type(layer).__module__}")

    def port(tensor: Any) -> Port:
        name = next(layer.name for layer in model.layers if layer.output is tensor)
        dtype = getattr(tensor.dtype, "name", tensor.dtype)
        return [name, str(dtype), [None if n is None else int(n) for n in tensor.shape]]

    inputs, outputs = list(map(port, model.inputs)), list(map(port, model.outputs))
    return Loaded(
        f"Keras {keras.__version__}",
        inputs,
        outputs,
        lambda images: np.asarray(model(images, training=False)),
    )


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


def main(form: str, path: str, threads: str) -> int:
    """Runs the batches from stdin through a file and writes their outputs to stdout, until stdin ends."""
    sys.meta_path.insert(0, _Without("ipucnn"))  # type: ignore[arg-type]
    # Libraries print to stdout, which is redirected to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    try:
        network = load(form, Path(path), int(threads))
        say({"runtime": network.runtime, "inputs": network.inputs, "outputs": network.outputs})
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
