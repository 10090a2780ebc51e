"""``ipucnn export``: a trained network as a file of another format, written only after it was proved.

The network leaves as layers of Keras alone (``editing.stock_model``) with the weights that are evaluated.  What was
written is then loaded in its own runtime by a process that cannot import this package (``runtimes.py``), which runs
samples of the data set through it.  How far rounding takes 32 bits from the exact logits depends on the network: both
the file's logits and those of the session that ``ipucnn evaluate`` uses are measured against a computation of the same
weights in 64 bits, and the file may be a few times as far from it as the session is.
"""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

from ipucnn.aliases import KerasModel, OnnxGraph, PlainDict, PlainValue, Tensor, TfFunction
from ipucnn.datasets.base import ArrayExamples, Examples
from ipucnn.documents import read_record_if_whole
from ipucnn.errors import ConfigurationError, DataError, MissingError, ThresholdError, UserError, did_you_mean
from ipucnn.filesystem import (
    Kind,
    absolute,
    check_makeable,
    entries,
    exists,
    expand,
    is_file,
    is_folder,
    is_link,
    kind_of,
    write_folder,
    write_text,
)
from ipucnn.models.architecture import own_layers
from ipucnn.models.names import INPUT_NAME as NETWORK_INPUT
from ipucnn.runs import runtimes
from ipucnn.runs import setup as run_setup
from ipucnn.runs.compare import read_run
from ipucnn.runs.exported import LABELS, RECORD, describe_setup, file_digest, is_exported
from ipucnn.runs.folder import CHECKPOINTS, CONFIG, RunFolder
from ipucnn.runs.network_input import LARGEST_DIFFERENCE, describe_input, python_lines, sentences
from ipucnn.runs.rules import refuse_instances
from ipucnn.runs.runtimes import KERAS, ONNX, SAVED_MODEL, TFLITE
from ipucnn.runs.setup import Setup
from ipucnn.runs.trained import IMAGENET, Named, TrainedSetup, open_trained
from ipucnn.sessions.factory import check_device, create_session, runs_on_ipus
from ipucnn.sessions.poplar.surroundings import has_poplar_sdk
from ipucnn.sessions.session import Session
from ipucnn.text import printable, shown_value, told_apart
from ipucnn.training.checkpoints import read_meta

INPUT, CARD = "input.json", "README.md"
IPU = "ipu"
"""The format that the Poplar SDK writes: a SavedModel with a compiled program.  Nothing but the SDK runs it."""
FORMATS = (*runtimes.FORMATS, IPU)
DEFAULT_OPSET = 15
LEAST_SAMPLES = 100
# Largest difference relative to the deviation of the outputs, and share of samples with the same largest output: of
# a network that cannot be computed in 64 bits, and of weights in 16.
LIMITS = {False: (1e-4, 0.999), True: (1e-2, 0.995)}
FACTOR = 10
"""How many times as far from the 64-bit outputs as the session's a file's outputs may be: runtimes add in other orders.

In 28 short trainings of five networks it was 2.4 times at most (ONNX, TFLite and SavedModels).
"""
LEAST_LIMIT, LARGEST_LIMIT = 2e-6, 0.1
"""What a file may always differ by, a few last digits of 32 bits, and what no rounding excuses."""
INPUT_NAME = "images"
# Smaller tensors of an ONNX file stay as they are with --half: shapes, axes, and the like.
_LEAST_HALVED = 64
_BATCH = 8


@dataclass(frozen=True)
class ExportRequest:
    """What the command line asks for.

    Attributes:
        named: the network and its weights.
        form: one of ``runtimes.FORMATS``.
        batch: images of each call; None for any number.
        opset: of ONNX; None for the default.
        half: weights are stored in 16 bits.
        raw_uint8: the network takes pixels of 0..255.
        probabilities: it gives probabilities, not logits.
        output: folder; None for ``exports/NAME-FORMAT``.
        overwrite: an earlier export may be replaced.
    """

    named: Named
    form: str
    batch: Optional[int] = None
    opset: Optional[int] = None
    half: bool = False
    raw_uint8: bool = False
    probabilities: bool = False
    output: Optional[Path] = None
    overwrite: bool = False

    @property
    def input_name(self) -> str:
        """Of what the network takes."""
        return NETWORK_INPUT if self.form == IPU else INPUT_NAME

    @property
    def output_name(self) -> str:
        """Of what the network gives."""
        return "probabilities" if self.probabilities else "logits"


RunBatch = Callable[[np.ndarray], np.ndarray]
"""Images of one batch -> float32 outputs, by what was written."""


@dataclass(frozen=True)
class Samples:
    """What the proof runs.

    Attributes:
        images: as the exported network takes them.
        expected: float32 [n, ...]: what the session gives for them.
        exact: float64: the same computed in 64 bits; None of a network that cannot be.
        origin: of which samples, in words.
        files: the image files that they were made of; of patches none.
    """

    images: np.ndarray
    expected: np.ndarray
    exact: Optional[np.ndarray]
    origin: str
    files: Tuple[bytes, ...] = ()


def export_run(
    request: ExportRequest,
    verbose: bool = False,
    say: Callable[[str], None] = lambda line: None,
    now: Callable[[str], None] = lambda what: None,
) -> PlainDict:
    """Exports a network, and proves what was written.

    Args:
        request: what to write, and where.
        verbose: let TensorFlow and the converters speak.
        say: takes lines worth knowing.
        now: takes what begins after the network is built, and takes its time.

    Returns:
        What stands in ``export.json``, and ``folder``.

    Raises:
        ConfigurationError: options that do not go together; a folder that holds something.
        MissingError: the format needs packages, or IPUs, that are not here.
        ThresholdError: what was written does not compute what the run does.  Nothing of it is left.
    """
    refuse_instances("export")
    _check_request(request)
    target = expand(request.named.target)
    if is_exported(target) and exists(target):
        raise ConfigurationError(
            f"{request.named.target} was exported already", "export the run that it is of: ipucnn export RUN"
        )
    trained = open_trained(request.named)
    output = _output(request, trained)
    for warning in trained.warnings:
        say(f"warning: {warning}")
    trained = _for_comparison(trained, request, say)
    session = create_session(trained.config.device, verbose=verbose, config=trained.config)
    model = trained.build()
    own = own_layers(model) if request.form == KERAS else ()
    if own:
        raise ConfigurationError(
            f"--format keras: layer '{own[0]}' of the network is of a class of its own, which no other program has",
            "--format saved-model or onnx, which hold what it computes",
        )
    labels = list(map(printable, trained.names()))
    session.prepare_evaluation(model, None)
    samples = _samples(request, trained, session, _exact_network(model, say))
    record: PlainDict = {"folder": str(output)}

    def write(folder: Path) -> None:
        run: Optional[RunBatch] = None
        now("writing the network")
        with _converting(request, verbose):
            if request.form == IPU:
                where, run = _write_for_ipus(request, trained, model, folder, verbose)
            else:
                where = _write(request, trained, model, folder)
        record.update(_describe(request, trained, labels, folder, where))
        now("proving what was written, in a process of its own")
        record["proof"] = _prove(request, record, samples, folder, labels, run)
        _write_json(folder / RECORD, record)
        write_text(folder / CARD, _card(record))

    write_folder(output, write)
    return record


def _check_request(request: ExportRequest) -> None:
    form = request.form
    if form not in FORMATS:
        raise ConfigurationError(
            f"--format {shown_value(form)}: must be one of {', '.join(FORMATS)}",
            did_you_mean(form, FORMATS) or "--format onnx",
        )
    if form == IPU:
        _check_for_ipus(request)
    if request.opset is not None and form != ONNX:
        raise ConfigurationError(
            f"--opset {request.opset}: only ONNX files have one", "drop it, or --format onnx"
        )
    if request.half and form not in (ONNX, TFLITE):
        raise ConfigurationError(
            f"--half: weights of 16 bits can be written as onnx and tflite, not as {form}",
            "drop it, or --format onnx",
        )
    missing = runtimes.missing_packages(form)
    if missing:
        what = f"{', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise MissingError(
            f"--format {form} needs {what}",
            "install what exports need with: python -m pip install 'ipucnn[export]'",
        )


def _check_for_ipus(request: ExportRequest) -> None:
    """Refuses what a program of the Poplar SDK cannot be, and machines that have no SDK."""
    if not has_poplar_sdk():
        raise MissingError(
            "--format ipu is written by the Poplar SDK's TensorFlow, which is not installed here",
            "run it inside the Poplar SDK's Python environment (docs/ipu.md), or write --format saved-model",
        )
    check_device("ipu")
    for is_given, flag in ((request.raw_uint8, "--raw-uint8"), (request.probabilities, "--probabilities")):
        if is_given:
            raise ConfigurationError(
                f"{flag}: the program for an IPU is the network itself, from images in its range to logits",
                f"drop {flag}; input.json says how images are brought to the range",
            )
    if request.batch is None:
        raise ConfigurationError(
            "--format ipu: the program for an IPU is compiled for one number of images, and --batch gives none",
            "add for example --batch 8",
        )


def _output(request: ExportRequest, trained: TrainedSetup) -> Path:
    """The folder to write, found to be free."""
    output = request.output
    if output is None:
        output = Path("exports") / f"{_name(trained, request)}-{request.form}"
    check_makeable(output)
    place, here = Path(os.path.realpath(str(absolute(output)))), Path(os.path.realpath(str(absolute(Path()))))
    if place in (here, *here.parents):
        raise ConfigurationError(
            f"--output {output}: an export is a folder of its own, and this one holds the folder that you are in",
            "name a new folder: --output exports/mine",
        )
    if exists(output) and entries(output):
        if not is_file(output / RECORD):
            raise ConfigurationError(
                f"--output {output} holds files that no export wrote", "choose another folder: --output DIR"
            )
        if not request.overwrite:
            raise ConfigurationError(
                f"{output} has an export already", "replace it with --overwrite, or choose another --output"
            )
        record = read_record_if_whole(output / RECORD)
        files = record.get("files") if isinstance(record, dict) else None
        written = {LABELS, INPUT, CARD, RECORD, *(files if isinstance(files, dict) else ())}
        others = [name for name in map(str, _files_below(output)) if name not in written]
        if others:
            raise ConfigurationError(
                f"--overwrite: {output} holds files that no export wrote, for example {printable(others[0])}",
                "move them elsewhere, or choose another folder: --output DIR",
            )
    return output


def _files_below(folder: Path, start: Optional[Path] = None) -> Iterator[Path]:
    """All that is in a folder and no folder itself, relative to it; links are not followed."""
    for path in entries(start or folder):
        if is_folder(path) and not is_link(path):
            yield from _files_below(folder, path)
        else:
            yield path.relative_to(folder)


def _name(trained: TrainedSetup, request: ExportRequest) -> str:
    run = _run_folder(trained, request)
    return trained.record.name if run is None else absolute(run.path).name


def _run_folder(trained: TrainedSetup, request: ExportRequest) -> Optional[RunFolder]:
    """The run that the weights are of; None for weights of Keras."""
    target, checkpoint = expand(request.named.target), Path(trained.summary["checkpoint"])
    if trained.summary["weight_updates"] is None:
        return None
    if is_folder(target):
        return RunFolder(target)
    return RunFolder(checkpoint.parent.parent) if checkpoint.parent.name == CHECKPOINTS else None


def _for_comparison(
    trained: TrainedSetup, request: ExportRequest, say: Callable[[str], None]
) -> TrainedSetup:
    """The setup in the arithmetic that exported networks have, on the device that they are compared on."""
    config = trained.config
    if request.form == IPU:
        # An IPU's program computes in what the run was trained in, and the host does the same.
        return replace(trained, resolved=replace(trained.resolved, config=replace(config, device="cpu")))
    if config.precision != "32.32":
        say(f"note: trained in {config.precision}; the exported network computes in 32 bits")
    device = "cpu" if runs_on_ipus(config.device) else config.device
    config = replace(config, precision="32.32", device=device)
    return replace(trained, resolved=replace(trained.resolved, config=config))


# --- samples


def _exact_network(model: KerasModel, say: Callable[[str], None]) -> Optional[KerasModel]:
    """The network in 64 bits; None of one with layers that compute in another type alone."""
    from ipucnn.models.editing import in_64_bits

    try:
        double = in_64_bits(model)
        double(np.zeros((1, *model.inputs[0].shape[1:])), training=False)
    except Exception as error:  # whatever the layers of a network of one's own raise
        reason = shown_value(" ".join(str(error).split()))
        say(
            f"note: the network cannot be computed in 64 bits ({reason}); the file may differ by {LIMITS[False][0]:g}"
        )
        return None
    return double


def _samples(
    request: ExportRequest, trained: TrainedSetup, session: Session, double: Optional[KerasModel]
) -> Samples:
    """At least ``LEAST_SAMPLES`` samples, if the data set has as many: of evaluation first, then of training."""
    source = trained.source
    subsets = [("evaluation", trained)]
    if len(source.train):
        subsets.append(("training", replace(trained, source=replace(source, eval=source.train))))
    images: List[np.ndarray] = []
    expected: List[np.ndarray] = []
    exact: List[np.ndarray] = []
    origin: List[str] = []
    files: List[bytes] = []
    for what, setup in subsets:
        before = sum(map(len, images))
        for inputs, taken_in, outputs in _batches(request, setup, session):
            left = LEAST_SAMPLES - sum(map(len, images))
            images.append(inputs[:left])
            expected.append(outputs[:left])
            if double is not None:
                exact.append(np.asarray(double(taken_in[:left].astype(np.float64), training=False)))
            if len(inputs) >= left:
                break
        taken = sum(map(len, images)) - before
        if not source.info.tiled:
            files += [_file_of(setup.source.eval, number) for number in range(taken)]
        if taken:
            origin.append(f"{taken:,} of {what}")
        if before + taken >= LEAST_SAMPLES:
            break
    logits = np.concatenate(expected)
    if not np.isfinite(logits).all():
        raise DataError(
            "the network's outputs are not finite: its weights are damaged, or its training diverged",
            "take an earlier checkpoint with --checkpoint",
        )
    both = [logits, np.concatenate(exact) if exact else None]
    if request.probabilities:
        both = [None if values is None else _softmax(values) for values in both]
    return Samples(
        np.concatenate(images), both[0].astype(np.float32), both[1], " and ".join(origin), tuple(files)
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _file_of(examples: Examples, number: int) -> bytes:
    """The image file of a sample; of a sample that is an array in memory, a PNG of it."""
    if not isinstance(examples, ArrayExamples):
        return examples.encoded(number)
    from PIL import Image

    pixels, packed = examples.images[number], io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(packed, "PNG")
    return packed.getvalue()


def _batches(
    request: ExportRequest, setup: Setup, session: Session
) -> Iterator[Tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Images as the exported network takes them, as the session does, and its logits; without padding."""
    from ipucnn.datasets.pipeline import data_errors
    from ipucnn.datasets.preprocessing import normalise

    info, network_range = setup.source.info, setup.input_range
    prepared = replace(setup, input_range="raw") if request.raw_uint8 else setup
    with data_errors():
        for images, _, weights in run_setup.evaluation_batches(prepared, _BATCH):
            real = np.asarray(weights) > 0
            if request.raw_uint8:
                # Whole numbers, whatever resizing and the weights of red, green and blue made of them.
                pixels = np.clip(np.rint(np.asarray(images)), 0, 255).astype(np.uint8)
                images, taken = normalise(np.float32(pixels), network_range, info), pixels
            else:
                taken = np.asarray(images)
            yield taken[real], np.asarray(images)[real], np.asarray(session.predict([images])[0])[real]


# --- files


def _write(request: ExportRequest, trained: TrainedSetup, model: KerasModel, folder: Path) -> Path:
    """Writes the network; returns the path of the file, or of the SavedModel's folder, below ``folder``."""
    from tensorflow import keras

    from ipucnn.datasets.preprocessing import channel_affine
    from ipucnn.models.editing import stock_model

    shape, info = trained.input_shape, trained.source.info
    pixels = channel_affine(trained.input_range, info, shape[2]) if request.raw_uint8 else None
    inputs = keras.Input(shape, batch_size=request.batch, name=INPUT_NAME, dtype=_input_type(request))
    stock = stock_model(
        model,
        inputs,
        all_of_them=request.form == KERAS,
        pixels=pixels,
        probabilities=request.probabilities,
    )
    return WRITERS[request.form](request, stock, folder)


def _input_type(request: ExportRequest) -> str:
    return "uint8" if request.raw_uint8 else "float32"


def _write_for_ipus(
    request: ExportRequest, trained: TrainedSetup, model: KerasModel, folder: Path, verbose: bool
) -> Tuple[Path, RunBatch]:
    """In the folder ``1``, as a SavedModel; also what runs it."""
    from ipucnn.sessions.poplar.session import PoplarSession

    assert request.batch is not None
    session = create_session(IPU, verbose=verbose, config=replace(trained.config, device=IPU))
    assert isinstance(session, PoplarSession)
    return folder / "1", session.write_program(model, folder / "1", request.batch, request.output_name)


def _function(request: ExportRequest, stock: KerasModel) -> TfFunction:
    """The network as a function of one named input, with one named output."""
    import tensorflow as tf

    shape = (request.batch, *(int(n) for n in stock.inputs[0].shape[1:]))
    spec = tf.TensorSpec(shape, _input_type(request), name=INPUT_NAME)

    @tf.function(input_signature=[spec])
    def serve(images: Tensor) -> PlainDict:
        return {request.output_name: stock(images, training=False)}

    return serve


def _write_saved_model(request: ExportRequest, stock: KerasModel, folder: Path) -> Path:
    """In the folder ``1``: a version, as TensorFlow Serving looks for it."""
    import tensorflow as tf

    from ipucnn.compat import tf_variable

    module = tf.Module()
    module.weights = [tf_variable(weight) for weight in stock.weights]
    module.serve = _function(request, stock)
    tf.saved_model.save(module, str(folder / "1"), signatures={runtimes.SIGNATURE: module.serve})
    return folder / "1"


def _write_keras(request: ExportRequest, stock: KerasModel, folder: Path) -> Path:
    from ipucnn.compat import KERAS_3

    path = folder / ("model.keras" if KERAS_3 else "model.h5")
    stock.save(str(path), include_optimizer=False)
    return path


def _write_onnx(request: ExportRequest, stock: KerasModel, folder: Path) -> Path:
    import onnx
    import tf2onnx

    serve = _function(request, stock)
    model, _ = tf2onnx.convert.from_function(
        serve, input_signature=serve.input_signature, opset=request.opset or DEFAULT_OPSET
    )
    graph = model.graph
    _rename(graph, graph.input[0].name, INPUT_NAME)
    _rename(graph, graph.output[0].name, request.output_name)
    if request.half:
        _halve(graph)
    onnx.checker.check_model(model)
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def _rename(graph: OnnxGraph, old: str, new: str) -> None:
    """Gives a tensor of an ONNX graph another name."""
    for port in (*graph.input, *graph.output):
        port.name = new if port.name == old else port.name
    for node in graph.node:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name == old:
                    names[position] = new


def _halve(graph: OnnxGraph) -> None:
    """Stores the large weights of an ONNX graph in 16 bits; an operation brings each back to 32 where it is used."""
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for weight in list(graph.initializer):
        values = numpy_helper.to_array(weight)
        if weight.data_type != TensorProto.FLOAT or values.size < _LEAST_HALVED:
            continue
        name = f"{weight.name}_16"
        weight.CopyFrom(numpy_helper.from_array(_as_half(values), name))
        casts.append(helper.make_node("Cast", [name], [name[:-3]], name=f"{name}_cast", to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _as_half(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        halved: np.ndarray = values.astype(np.float16)
    if not np.isfinite(halved).all():
        raise DataError("--half: some weights are too large for 16 bits (above 65504)", "drop --half")
    return halved


def _write_tflite(request: ExportRequest, stock: KerasModel, folder: Path) -> Path:
    import tensorflow as tf

    path = folder / "model.tflite"
    with tempfile.TemporaryDirectory() as aside:
        saved = _write_saved_model(request, stock, Path(aside))
        converter = tf.lite.TFLiteConverter.from_saved_model(str(saved), signature_keys=[runtimes.SIGNATURE])
        if request.half:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = [tf.float16]
        content = converter.convert()
    write_text(path, content)
    return path


WRITERS: Dict[str, Callable[[ExportRequest, KerasModel, Path], Path]] = {
    SAVED_MODEL: _write_saved_model,
    KERAS: _write_keras,
    ONNX: _write_onnx,
    TFLITE: _write_tflite,
}


@contextlib.contextmanager
def _converting(request: ExportRequest, verbose: bool) -> Iterator[None]:
    """Without the lines of converters, which print from C++ and by loggers of their own.

    Raises:
        ThresholdError: a converter could not write the network, for whatever reason.
    """
    from ipucnn.sessions.host.environment import stderr_aside

    logging.getLogger("tf2onnx").setLevel(logging.WARNING if verbose else logging.CRITICAL)
    try:
        with contextlib.ExitStack() as stack:
            if not verbose:
                stack.enter_context(stderr_aside(shown_if_failed=False))
            yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ThresholdError(
            f"the network could not be written as {request.form}: {type(error).__name__}: {printable(reason)}",
            _hint(request),
        ) from error


def _write_json(path: Path, value: PlainValue) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# --- what stands beside it


def _describe(
    request: ExportRequest, trained: TrainedSetup, labels: List[str], folder: Path, where: Path
) -> PlainDict:
    """What ``export.json`` says but for the proof; writes ``labels.json`` and ``input.json``."""
    from ipucnn.runs.provenance import environment

    info, config = trained.source.info, trained.config
    _write_json(folder / LABELS, labels)
    half = request.form == IPU and config.precision != "32.32"
    dtype = "float16" if half else _input_type(request)
    described = describe_input(trained, request.input_name, dtype, request.batch, request.raw_uint8)
    _write_json(folder / INPUT, described)
    outputs = [request.batch, *(trained.output_shape or ()), len(labels)]
    return {
        "format": request.form,
        "model": trained.record.name,
        "task": trained.record.task,
        "file": where.relative_to(folder).as_posix(),
        "files": _digests(folder, where),
        "input": described,
        "output": {"name": request.output_name, "dtype": "float32", "shape": outputs},
        "opset": (request.opset or DEFAULT_OPSET) if request.form == ONNX else None,
        "half": request.half,
        "weights": {**trained.summary, "checkpoint": printable(str(trained.summary["checkpoint"]))},
        "averaged_weights": bool(config.ema_decay) and trained.summary["weight_updates"] is not None,
        "norm_layer": dict(config.norm_layer),
        "trained_on": {"name": _trained_on(trained, request)},
        "figures": _figures(trained, request),
        "setup": describe_setup(config, trained.seed, info, labels),
        "environment": environment(),
    }


def _trained_on(trained: TrainedSetup, request: ExportRequest) -> Optional[str]:
    """The data set that the weights were trained on; None where their file does not say it."""
    if trained.summary["weight_updates"] is not None:
        return printable(read_meta(Path(trained.summary["checkpoint"]))["dataset"])
    return "ImageNet" if (request.named.weights or "").lower() == IMAGENET else None


def _figures(trained: TrainedSetup, request: ExportRequest) -> Optional[PlainDict]:
    """What the run found of these weights when it validated them; None where it did not, or that is not known."""
    run = _run_folder(trained, request)
    if run is None or not is_file(run.path / CONFIG):
        return None
    updates = trained.summary["weight_updates"]
    rows = [row for row in read_run(run.path).rows("validation") if row["weight_updates"] == updates]
    return {name: value for name, value in rows[-1].items() if name != "event"} if rows else None


def _digests(folder: Path, where: Path) -> Dict[str, PlainDict]:
    """Size and SHA-256 of each file of the network, by its path below the folder."""
    found: Dict[str, PlainDict] = {}
    pending = [where]
    while pending:
        path = pending.pop(0)
        if kind_of(path) is Kind.FOLDER:
            pending += entries(path)
            continue
        digest, size = file_digest(path)
        found[path.relative_to(folder).as_posix()] = {"bytes": size, "sha256": digest}
    return found


def _prove(
    request: ExportRequest,
    record: PlainDict,
    samples: Samples,
    folder: Path,
    labels: List[str],
    run: Optional[RunBatch] = None,
) -> PlainDict:
    """Runs the samples through what was written, in its own runtime and without this package.

    A program for an IPU is run by what the SDK gave for it, in this process: its SavedModel needs the SDK's operations,
    and the IPU that this process has taken.

    Raises:
        ThresholdError: it is not as declared, or computes something else.
    """
    job = {
        "format": request.form,
        "path": str(absolute(folder / record["file"])),
        "labels_path": str(absolute(folder / LABELS)),
        "labels": labels,
        "input": [record["input"][key] for key in ("name", "dtype", "shape")],
        "output": [record["output"][key] for key in ("name", "dtype", "shape")],
        "batch": request.batch,
        "opset": record["opset"],
        "lines": python_lines(record["input"]) if samples.files else "",
        "largest_input_difference": LARGEST_DIFFERENCE,
    }
    if run is None:
        findings = _run_proof(job, samples)
    else:
        parts = runtimes.batches(samples.images, request.batch)
        found = np.concatenate([run(part) for part in parts])[: len(samples.images)]
        compared = runtimes.compare(found, samples.expected, samples.exact)
        findings = {"runtime": "the Poplar SDK's runtime", "samples": len(found), **compared}
    is_half = request.half or record["input"]["dtype"] == "float16"
    largest, least = _limits(is_half, findings.get("session_relative"))
    refused = findings.get("refused")
    if refused is None and findings["relative"] > largest:
        differ, allowed = told_apart(findings["relative"], largest, digits=2)
        name = record["output"]["name"]
        refused = f"its {name} differ by up to {differ} of their deviation, and {allowed} is allowed"
    if refused is None and findings["agreement"] < least:
        share, allowed = told_apart(100 * (1 - findings["agreement"]), 100 * (1 - least), digits=2)
        refused = f"it gives another class for {share}% of the samples, and {allowed}% is allowed"
    if refused is not None:
        raise ThresholdError(
            f"the {request.form} file does not do what the run does, and was removed: {refused}",
            _hint(request, is_rounding=largest < findings.get("relative", 1.0) <= LARGEST_LIMIT),
        )
    return {
        **findings,
        "of": samples.origin,
        "wanted_samples": LEAST_SAMPLES,
        "allowed_relative": largest,
        "least_agreement": least,
    }


def _limits(is_half: bool, session_relative: Optional[float]) -> Tuple[float, float]:
    """The largest difference of a file, over the deviation, and the least share of samples of the same class.

    Args:
        is_half: its weights have 16 bits.
        session_relative: how far the session is from the 64-bit outputs; None where there are none.
    """
    if is_half or session_relative is None:
        return LIMITS[is_half]
    # Classes may change only where two outputs are nearer to one another than rounding, which the difference says.
    return min(LARGEST_LIMIT, max(LEAST_LIMIT, FACTOR * session_relative)), 0.0


def _hint(request: ExportRequest, is_rounding: bool = False) -> str:
    if request.half:
        return "export it without --half"
    if request.opset not in (None, DEFAULT_OPSET):
        return f"drop --opset: the default is {DEFAULT_OPSET}"
    if is_rounding:
        return "train it for longer: a network that has hardly learned multiplies what 32 bits round"
    other = ONNX if request.form == SAVED_MODEL else SAVED_MODEL
    return f"export it in another format, for example --format {other}"


def _run_proof(job: PlainDict, samples: Samples) -> PlainDict:
    """What ``runtimes.py`` finds, run as a script of its own."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with tempfile.TemporaryDirectory() as aside:
        names = [f"{number}.image" for number in range(len(samples.files))]
        for name, data in zip(names, samples.files):
            write_text(Path(aside) / name, data)
        _write_json(Path(aside) / "job.json", {**job, "files": [os.path.join(aside, name) for name in names]})
        np.save(os.path.join(aside, "images.npy"), samples.images)
        np.save(os.path.join(aside, "expected.npy"), samples.expected)
        if samples.exact is not None:
            np.save(os.path.join(aside, "exact.npy"), samples.exact)
        done = subprocess.run(
            [sys.executable, runtimes.__file__, aside],
            cwd=aside,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    try:
        findings: PlainDict = json.loads(lines[-1])
    except (ValueError, IndexError):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = said[-1][:300] if said else f"it ended with code {done.returncode}"
        return {"refused": f"its runtime failed: {printable(reason)}"}
    return findings


def compared_with(proof: PlainDict) -> str:
    """What the outputs of an export were compared with, in words."""
    if proof["session_relative"] is None:
        return "the run's own session"
    return f"a 64-bit computation (the run's own session: {proof['session_relative']:.2g})"


def _card(record: PlainDict) -> str:
    """A page about the network, in Markdown."""
    proof, environment = record["proof"], record["environment"]
    shape = " x ".join("any" if n is None else str(n) for n in record["input"]["shape"])
    figures = record["figures"] or {}
    classes = record["setup"]["class_names"]
    of = f" of {printable(classes[1])}" if len(classes) == 2 else ", mean of all classes but the first"
    shown = [
        f"- {name.replace('_', ' ')}{of if name in ('dice', 'iou') else ''}: {value:.4f}"
        for name, value in figures.items()
        if isinstance(value, float) and name in ("accuracy", "top5", "dice", "iou", "loss")
    ]
    measured = "\n".join(shown) if shown else "Nothing is recorded of these weights."
    steps = "\n".join(f"{number}. {step}" for number, step in enumerate(sentences(record["input"]), 1))
    lines = python_lines(record["input"])
    versions = ", ".join(
        f"{name} {environment[name]}" for name in ("ipucnn", "tensorflow", "keras", "python")
    )
    name = record["trained_on"]["name"]
    source = "Weights of " if name is None else f"Trained on {name}; weights of "
    averaged = ", averaged over training" if record["averaged_weights"] else ""
    return f"""# {record["model"]}, as {record["format"]}

The network is `{record["file"]}`. It takes `{record["input"]["name"]}` ({record["input"]["dtype"]}, {shape}) and gives
`{record["output"]["name"]}` (float32), one for each class of `{LABELS}`, in that order.

## Input

{steps}

`{INPUT}` has the numbers. In Python, with Pillow and NumPy:

```python
{lines}```

The network takes such arrays stacked, `[batch, height, width, channels]`.

## Data and figures

{source}{record["weights"]["checkpoint"]}{averaged}.
In the run's own validation of these weights:

{measured}

## Proof

{proof["samples"]:,} samples ({proof["of"]}) in {proof["runtime"]}, compared with {compared_with(proof)}:

- largest difference: {proof["relative"]:.2g} of the outputs' deviation ({proof["allowed_relative"]:.2g} is allowed)
- the same class as the run's own session: {proof["agreement"]:.2%}

## Where it comes from

- command: `{environment["command"]}`
- versions: {versions}
"""
