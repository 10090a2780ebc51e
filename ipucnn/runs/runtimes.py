"""Exported networks in the runtimes they are meant for: onnxruntime, TensorFlow Lite, stock TensorFlow and Keras.

This file is also a script, which proves an exported network: in a process in which ipucnn cannot be imported it loads
the file, looks at what it takes and gives, runs samples through it, and compares their logits with those that the run's
own session gave.  It imports nothing of this package.

    python runtimes.py FOLDER
    python runtimes.py --serve FORMAT PATH THREADS BYTES

FOLDER holds ``job.json``, ``images.npy``, ``expected.npy`` and where there is one ``exact.npy``; the findings are
printed as one line of JSON.
"""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

SAVED_MODEL, KERAS, ONNX, TFLITE = "saved-model", "keras", "onnx", "tflite"
FORMATS = (SAVED_MODEL, KERAS, ONNX, TFLITE)
SIGNATURE = "serving_default"
ENDINGS = {".onnx": ONNX, ".tflite": TFLITE}
"""Of files that are numbers and operations alone, and execute nothing else."""
_MOST_ROUNDED = 0.05
"""Pixels of whole grey levels that may be rounded to the other side: where resizing leaves halves."""


@dataclass(frozen=True)
class Port:
    """What a network takes or gives.

    Attributes:
        name: of the input or output.
        dtype: of NumPy, "float32" or "uint8".
        shape: the batch first; None where any size goes.
    """

    name: str
    dtype: str
    shape: Tuple[Optional[int], ...]


@dataclass(frozen=True)
class Loaded:
    """A network in its runtime.

    Attributes:
        runtime: its name and version.
        inputs, outputs: what the file says of them.
        run: images of a batch -> the first output.
        opset: of an ONNX file, else None.
    """

    runtime: str
    inputs: List[Port]
    outputs: List[Port]
    run: Callable[[np.ndarray], np.ndarray]
    opset: Optional[int] = None


def missing_packages(form: str) -> List[str]:
    """The packages that a format needs beyond TensorFlow and that are not installed."""
    wanted: Sequence[str] = ()
    if form == ONNX:
        wanted = ("onnx", "tf2onnx", "onnxruntime")
    elif form == TFLITE and not _tensorflow_has_lite():
        wanted = ("ai_edge_litert",)
    return [name.replace("_", "-") for name in wanted if find_spec(name) is None]


def _tensorflow_has_lite() -> bool:
    """Whether TensorFlow still has the interpreter, judged without importing it."""
    found = find_spec("tensorflow")
    places = (found.submodule_search_locations or ()) if found is not None else ()
    return any((Path(place) / "lite" / "python" / "interpreter.py").exists() for place in places)


def load(form: str, path: Path, threads: int = 0) -> Loaded:
    """Loads an exported network into its runtime.

    Args:
        form: one of FORMATS.
        path: the file, of a SavedModel the folder.
        threads: of the runtime; 0 for its own choice.
    """
    return {SAVED_MODEL: _saved_model, KERAS: _keras, ONNX: _onnx, TFLITE: _tflite}[form](path, threads)


def _import_onnx() -> Any:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    return onnxruntime


def _onnx(path: Path, threads: int) -> Loaded:
    onnxruntime = _import_onnx()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    types = {"tensor(float)": "float32", "tensor(uint8)": "uint8"}

    def ports(found: Any) -> List[Port]:
        shapes = [tuple(n if isinstance(n, int) else None for n in port.shape) for port in found]
        return [Port(port.name, types.get(port.type, port.type), shape) for port, shape in zip(found, shapes)]

    inputs, outputs = ports(session.get_inputs()), ports(session.get_outputs())

    def run(images: np.ndarray) -> np.ndarray:
        return np.asarray(session.run([outputs[0].name], {inputs[0].name: images})[0])

    opset: Optional[int] = None
    if find_spec("onnx") is not None:
        import onnx

        model = onnx.load(str(path), load_external_data=False)
        opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    return Loaded(f"onnxruntime {onnxruntime.__version__}", inputs, outputs, run, opset)


def _tflite_interpreter() -> Tuple[Any, str]:
    """The interpreter's class, and the name and version of what it is of."""
    if find_spec("ai_edge_litert") is not None:
        from importlib.metadata import version

        from ai_edge_litert.interpreter import Interpreter

        return Interpreter, f"ai-edge-litert {version('ai-edge-litert')}"
    import tensorflow as tf

    return tf.lite.Interpreter, f"TensorFlow Lite of TensorFlow {tf.__version__}"


def _tflite(path: Path, threads: int) -> Loaded:
    interpreter, runtime = _tflite_interpreter()
    network = interpreter(str(path), num_threads=threads or None)

    def ports(details: Any, names: Sequence[str]) -> List[Port]:
        found = []
        for name, detail in zip(names, details):
            shape = detail["shape_signature"] if len(detail["shape_signature"]) else detail["shape"]
            sizes = tuple(None if n < 0 else int(n) for n in shape)
            found.append(Port(name, np.dtype(detail["dtype"]).name, sizes))
        return found

    signature = network.get_signature_list().get(SIGNATURE, {"inputs": [], "outputs": []})
    inputs = ports(network.get_input_details(), signature["inputs"])
    outputs = ports(network.get_output_details(), signature["outputs"])
    runner = network.get_signature_runner(SIGNATURE)

    def run(images: np.ndarray) -> np.ndarray:
        return np.asarray(runner(**{inputs[0].name: images})[outputs[0].name])

    return Loaded(runtime, inputs, outputs, run)


def _port(spec: Any, name: str) -> Port:
    return Port(name, spec.dtype.name, tuple(spec.shape.as_list()))


def _saved_model(path: Path, threads: int) -> Loaded:
    import tensorflow as tf

    network = tf.saved_model.load(str(path))
    function = network.signatures[SIGNATURE]
    inputs = [_port(spec, name) for name, spec in function.structured_input_signature[1].items()]
    outputs = [_port(spec, name) for name, spec in function.structured_outputs.items()]

    def run(images: np.ndarray) -> np.ndarray:
        # The network must live as long as its function.
        assert network is not None
        return function(**{inputs[0].name: tf.constant(images)})[outputs[0].name].numpy()

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
        return Port(name, str(dtype), tuple(None if n is None else int(n) for n in tensor.shape))

    inputs, outputs = list(map(port, model.inputs)), list(map(port, model.outputs))

    def run(images: np.ndarray) -> np.ndarray:
        return np.asarray(model(images, training=False))

    return Loaded(f"Keras {keras.__version__}", inputs, outputs, run)


def batches(images: np.ndarray, batch: Optional[int]) -> List[np.ndarray]:
    """The images in batches of a fixed size, the last filled up with zeros; or of several sizes where any goes."""
    if batch is None:
        # One alone, then as many as are left, 32 at a time: a size that was fixed by mistake would not take them.
        return [images[:1]] + [images[i : i + 32] for i in range(1, len(images), 32)]
    missing = -len(images) % batch
    filled = np.concatenate([images, np.zeros((missing, *images.shape[1:]), images.dtype)])
    return [filled[i : i + batch] for i in range(0, len(filled), batch)]


def compare(found: np.ndarray, expected: np.ndarray, exact: Optional[np.ndarray] = None) -> Dict[str, Any]:
    """How far outputs lie from those of a 64-bit computation, and how far the session's own do.

    Args:
        found, expected: [n, ..., classes]: of the file, and of the session.
        exact: the same, computed in float64; None where there is no such computation: then the session's are taken.

    Returns:
        ``largest_difference`` and ``deviation`` (of the exact ones over everything, float64), ``relative`` (one
        over the other), ``session_relative``: the same of the session (None without ``exact``), ``agreement``: the
        share of samples, of masks pixels, whose largest output is that of the session, and ``first_disagreement``, the
        number of the first sample where it is not.
    """
    if not np.isfinite(found).all():
        raise ValueError("outputs are not finite")
    reference = expected if exact is None else exact
    difference = float(np.abs(found.astype(np.float64) - reference).max())
    deviation = float(reference.std(dtype=np.float64))

    def relative(largest: float) -> float:
        return largest / deviation if deviation else (0.0 if largest == 0 else float("inf"))

    same = found.argmax(axis=-1) == expected.argmax(axis=-1)
    wrong = np.flatnonzero(~same.reshape(len(same), -1).all(axis=1))
    return {
        "largest_difference": difference,
        "deviation": deviation,
        "relative": relative(difference),
        "session_relative": None if exact is None else relative(float(np.abs(expected - exact).max())),
        "agreement": float(same.mean()),
        "first_disagreement": int(wrong[0]) if len(wrong) else None,
    }


def prepared(lines: str, files: Sequence[str]) -> np.ndarray:
    """What the lines of an export's README.md make of image files: [n, height, width, channels]."""
    names: Dict[str, Any] = {}
    exec(compile(lines, "README.md", "exec"), names)
    return np.stack([names["network_input"](path) for path in files])


def _other_inputs(found: np.ndarray, images: np.ndarray, largest: float) -> str:
    """In what prepared inputs differ from the session's by more than rounding, in words; "" if in nothing."""
    if (found.shape, found.dtype) != (images.shape, images.dtype):
        return f"they are {found.dtype} {list(found.shape)}, not {images.dtype} {list(images.shape)}"
    differences = np.abs(found.astype(np.float64) - images)
    if images.dtype == np.uint8 and differences.max() <= 1:
        # A grey level between two whole ones is rounded to either of them, as the last digits of 32 bits fall.
        share = float(np.mean(differences > 0))
        return "" if share <= _MOST_ROUNDED else f"{share:.1%} of the pixels differ by one grey level"
    relative = float(differences.max() / (np.ptp(images.astype(float)) or 1))
    return "" if relative <= largest else f"they differ by {relative:.2g}"


def prove(
    job: Dict[str, Any], images: np.ndarray, expected: np.ndarray, exact: Optional[np.ndarray] = None
) -> Dict[str, Any]:
    """Loads what a job names and runs the images; returns what was found, or ``refused``: why it is not as declared.

    Args:
        job: ``format``, ``path``, ``labels_path``, ``labels``, ``input`` and ``output`` ([name, type, shape]),
            ``batch`` (None for any), ``opset`` (None of what is no ONNX file), ``files`` (image files, or none),
            ``lines`` (of Python, which make inputs of them) and ``largest_input_difference``.
        images: as the input declares them, [n, height, width, channels].
        expected, exact: what the run's own session gives for them, and a 64-bit computation; see :func:`compare`.
    """
    labels = json.loads(Path(job["labels_path"]).read_text(encoding="utf-8"))
    if labels != job["labels"]:
        wrong = next(
            (i for i, (a, b) in enumerate(zip(labels, job["labels"])) if a != b),
            min(len(labels), len(job["labels"])),
        )
        return {"refused": f"label {wrong} of labels.json is not the run's"}
    network = load(job["format"], Path(job["path"]))
    for what, ports, wanted in (
        ("input", network.inputs, job["input"]),
        ("output", network.outputs, job["output"]),
    ):
        found = [[port.name, port.dtype, list(port.shape)] for port in ports]
        if found != [wanted]:
            return {"refused": f"its {what}s are {_described(found)}, and not {_described([wanted])}"}
    if job["opset"] is not None and network.opset not in (None, job["opset"]):
        return {"refused": f"its operations are those of opset {network.opset}, not {job['opset']}"}
    if job.get("files"):
        inputs = prepared(job["lines"], job["files"])
        reason = _other_inputs(inputs, images, job["largest_input_difference"])
        if reason:
            return {"refused": f"the lines of README.md make other inputs of image files: {reason}"}
    # The session's own inputs: what the lines make may differ in its last digits, which is not the file's doing.
    found = np.concatenate([network.run(part) for part in batches(images, job["batch"])])[: len(images)]
    if found.dtype != np.float32 or found.shape != expected.shape:
        return {
            "refused": f"its outputs are {found.dtype} {list(found.shape)}, not float32 {list(expected.shape)}"
        }
    return {"runtime": network.runtime, "samples": len(images), **compare(found, expected, exact)}


def _described(ports: Sequence[Sequence[Any]]) -> str:
    shown = [
        f"{name} ({dtype} {'x'.join('any' if n is None else str(n) for n in shape)})"
        for name, dtype, shape in ports
    ]
    return ", ".join(shown) or "none"


class _Without:
    """Keeps a package from being imported, wherever it is installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ImportError(f"{name} is kept from being imported here")


def _limit_memory(num_bytes: int) -> None:
    """What this process may take beyond what it has; nothing where the system has no such limit."""
    try:
        import resource

        with open("/proc/self/status", encoding="ascii") as file:
            taken = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (taken + num_bytes, taken + num_bytes))
    except (ImportError, OSError, ValueError, StopIteration):
        pass


def _end_with_parent() -> None:
    """Ends this process soon after the one that asks: what its file computes may never end.

    A thread looks for it, as Linux's PR_SET_PDEATHSIG already comes where the thread that started this process ends.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def send(stream: Any, values: np.ndarray) -> None:
    """Writes an array to a pipe, in a form that :func:`receive` reads."""
    head = json.dumps({"dtype": values.dtype.name, "shape": list(values.shape)})
    stream.write(head.encode() + b"\n" + np.ascontiguousarray(values).tobytes())
    stream.flush()


def receive(stream: Any) -> Any:
    """Reads an array from a pipe, or what was said in its place; None at the end of the pipe."""
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


def serve(form: str, path: str, threads: str, num_bytes: str) -> int:
    """Runs the batches that stdin brings through a file, and writes their outputs to stdout, until stdin ends."""
    _end_with_parent()
    sys.meta_path.insert(0, _Without("ipucnn"))  # type: ignore[arg-type]
    # What a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        {ONNX: _import_onnx, TFLITE: _tflite_interpreter}[form]()
        _limit_memory(int(num_bytes))
        network = load(form, Path(path), int(threads))
        answers.write(json.dumps({"runtime": network.runtime}).encode() + b"\n")
        answers.flush()
        while True:
            images = receive(sys.stdin.buffer)
            if images is None:
                return 0
            send(answers, network.run(images))
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        answers.write(json.dumps({"error": reason}).encode() + b"\n")
        answers.flush()
        return 1


def main(folder: Path) -> int:
    """Proves what ``folder`` describes; prints the findings.  Returns 0, or 1 where the runtime failed."""
    sys.meta_path.insert(0, _Without("ipucnn"))  # type: ignore[arg-type]
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    names = [name for name in ("images", "expected", "exact") if (folder / f"{name}.npy").exists()]
    try:
        findings = prove(job, *(np.load(folder / f"{name}.npy") for name in names))
    except Exception as error:
        findings = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    if "ipucnn" in sys.modules:
        findings = {"refused": "ipucnn was imported"}
    print("\n" + json.dumps(findings), flush=True)
    return 0


if __name__ == "__main__":
    # The folder of this file would come first, and its modules have names of others.
    sys.path.pop(0)
    sys.exit(serve(*sys.argv[2:]) if sys.argv[1] == "--serve" else main(Path(sys.argv[1])))
