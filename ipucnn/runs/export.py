"""``ipucnn export``: writes a trained network in another format and keeps the file only after verification.

The network is written with Keras's layers only (``editing.stock_model``) and with the weights that evaluation uses. The
file then runs in its own runtime on samples of the data set (``verification.py``).  The labels, a description of the
input (``network_input.py``), a page and ``export.json``, which has all facts, are written beside it.
"""

import contextlib
import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, Iterator, Optional, Sequence, Tuple

import msgspec
import numpy as np

from ipucnn.aliases import KerasModel, OnnxGraph, OnnxNode, PlainDict, PlainValue, Tensor, TfFunction
from ipucnn.config.bounds import DEFAULT_OPSET
from ipucnn.config.rules import check_rules
from ipucnn.documents import read_struct
from ipucnn.errors import ConfigurationError, DataError, MissingError, ThresholdError, UserError, did_you_mean
from ipucnn.events import LOADING, Began, Events, Note, emit
from ipucnn.filesystem import (
    check_makeable,
    entries,
    expand,
    real,
    user_error_of,
    write_folder,
    write_text,
)
from ipucnn.models.own import own_layers
from ipucnn.runs import predict, runtimes
from ipucnn.runs import setup as run_setup
from ipucnn.runs.compare import read_run
from ipucnn.runs.exported import LABELS, RECORD, describe_setup, file_digest, is_exported
from ipucnn.runs.network_input import INPUT, SCRIPT, describe_input, describe_mask, page
from ipucnn.runs.overwriting import check_replaceable
from ipucnn.runs.requests import FORMATS, INPUT_NAME, IPU, ExportRequest
from ipucnn.runs.rules import EXPORT_RULES
from ipucnn.runs.runtimes import KERAS, ONNX, SAVED_MODEL, TFLITE
from ipucnn.runs.sources import IMAGENET, WeightsArgument
from ipucnn.runs.trained import TrainedSetup, open_trained
from ipucnn.runs.verification import (
    RunBatch,
    Samples,
    calibration_images,
    exact_network,
    remedy,
    rounding_of,
    take_samples,
    verify,
)
from ipucnn.sessions.factory import check_device, create_session, runs_on_ipus
from ipucnn.sessions.poplar.sdk_environment import has_poplar_sdk
from ipucnn.text import printable, shown_value
from ipucnn.training.checkpoints import read_meta

CARD = "README.md"
# Elements.  --half leaves smaller tensors of an ONNX file in 32 bits: shapes, axes and the like.
_LEAST_HALVED = 64


class _Written(msgspec.Struct):
    """The entry of ``export.json`` that names the files of an export."""

    files: Dict[str, PlainValue]


def export_run(request: ExportRequest) -> Events[PlainDict]:
    """Exports a network and verifies the exported file.

    Returns:
        The contents of ``export.json``, and ``folder``.

    Raises:
        ConfigurationError: options that exclude each other; an output folder that holds other files.
        MissingError: packages or IPUs that the format needs are missing.
        ThresholdError: the file does not compute what the run computes.  It is removed.
    """
    yield Began(LOADING)
    _check_request(request)
    target = expand(request.named.target)
    if is_exported(target) and target.exists():
        raise ConfigurationError(
            f"{request.named.target} was exported already", "export the run that it is of: ipucnn export RUN"
        )
    trained = open_trained(request.named)
    output = _output(request, trained)
    yield from map(Note, trained.introduction())
    if request.form != IPU and trained.config.precision != "32.32":
        yield Note(f"note: trained in {trained.config.precision}; the exported network computes in 32 bits")
    trained = _for_comparison(trained, request)
    session = create_session(trained.config.device, verbose=request.verbose, config=trained.config)
    trained = run_setup.with_network_range(trained)
    model, notes = trained.build()
    yield from (Note(f"note: {note}") for note in notes)
    custom = own_layers(model) if request.form == KERAS else ()
    if custom:
        raise ConfigurationError(
            f"--format keras: layer '{custom[0]}' of the network is of a class of its own, which no other program has",
            "--format saved-model or onnx, which hold what it computes",
        )
    predictor = session.predictor(model)
    double = yield from exact_network(model)
    samples = take_samples(trained, predictor, double, request.raw_uint8, request.probabilities)
    calibration = calibration_images(trained, request.raw_uint8) if request.int8 else None
    record: PlainDict = {"folder": str(output), "notes": [*trained.notes, *notes]}

    def write(folder: Path) -> None:
        emit(Began("writing the network"))
        with _converting(request):
            file, run, rounding = _write_network(request, trained, model, folder, calibration, samples)
        record.update(_describe(request, trained, folder, file))
        record["calibration_images"] = None if calibration is None else len(calibration)
        emit(Began("verifying what was written, in a process of its own"))
        record["verification"] = verify(record, file, replace(samples, rounding=rounding), run)
        _write_json(folder / LABELS, record["setup"]["class_names"])
        _write_json(folder / INPUT, record["input"])
        _write_json(folder / RECORD, record)
        write_text(folder / SCRIPT, Path(predict.__file__).read_bytes())
        write_text(folder / CARD, page(record))

    write_folder(output, write)
    return record


# --- checks


def _check_request(request: ExportRequest) -> None:
    """Refuses options that exclude each other, and formats whose packages are not installed."""
    form = request.form
    if form not in FORMATS:
        raise ConfigurationError(
            f"--format {shown_value(form)}: must be one of {', '.join(FORMATS)}",
            did_you_mean(form, FORMATS) or "--format onnx",
        )
    if form == IPU and not has_poplar_sdk():
        raise MissingError(
            "--format ipu is written by the Poplar SDK's TensorFlow, which is not installed here",
            "run it inside the Poplar SDK's Python environment (docs/ipu.md), or write --format saved-model",
        )
    check_rules(EXPORT_RULES, request, None)
    if form == IPU:
        check_device(IPU)
    missing = runtimes.missing_packages(form)
    if missing:
        raise MissingError(
            f"--format {form} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            "install what exports need with: python -m pip install 'ipucnn[export]'",
        )


def _output(request: ExportRequest, trained: TrainedSetup) -> Path:
    """Returns the folder to write: absent, empty, or an earlier export that may be replaced."""
    output = request.output
    if output is None:
        folder = trained.weights.folder
        name = trained.record.name if folder is None else folder.path.absolute().name
        output = Path("exports") / f"{name}-{request.form}"
    check_makeable(output)
    target, working_folder = real(output), real(Path())
    if target in (working_folder, *working_folder.parents):
        raise ConfigurationError(
            f"--output {output}: an export is a folder of its own, and this one holds the folder that you are in",
            "name a new folder: --output exports/mine",
        )
    written = {LABELS, INPUT, SCRIPT, CARD, RECORD}
    if (output / RECORD).is_file():
        written |= read_struct(output / RECORD, _Written, "choose another folder: --output DIR").files.keys()
    names = (str(path.relative_to(output)) for path in _files_below(output)) if output.exists() else ()
    foreign = [name for name in names if name not in written]
    check_replaceable(output, foreign, RECORD, "the folder of an export", request.overwrite, "--output")
    return output


def _files_below(path: Path) -> Iterator[Path]:
    """Yields a file, or all files below a folder; links are yielded and not followed."""
    if path.is_dir() and not path.is_symlink():
        for entry in entries(path):
            yield from _files_below(entry)
    else:
        yield path


def _for_comparison(trained: TrainedSetup, request: ExportRequest) -> TrainedSetup:
    """Returns the setup with the arithmetic of exported networks, on the device that computes the reference outputs."""
    config = trained.config
    if request.form == IPU:
        # A program for an IPU keeps the run's precision, and so does the host.
        config = replace(config, device="cpu")
    else:
        device = "cpu" if runs_on_ipus(config.device) else config.device
        config = replace(config, precision="32.32", device=device)
    return replace(trained, resolved=replace(trained.resolved, config=config))


# --- files


def _write_network(
    request: ExportRequest,
    trained: TrainedSetup,
    model: KerasModel,
    folder: Path,
    calibration: Optional[np.ndarray],
    samples: Samples,
) -> Tuple[Path, Optional[RunBatch], float]:
    """Writes the network below ``folder``.

    Args:
        calibration: the inputs, [n, height, width, channels], that give the ranges of 8-bit integers; None for float32.
        samples: the samples of the verification.

    Returns:
        The path of the file, or of the SavedModel's folder; for an IPU the function that runs the program; and for
        Keras's layers, which also bring pixels into the range, ``verification.rounding_of`` the samples, else 0.
    """
    from tensorflow import keras

    from ipucnn.models.editing import stock_model

    if request.form == IPU:
        from ipucnn.sessions.poplar.session import PoplarSession

        assert request.batch is not None
        session = create_session(IPU, verbose=request.verbose, config=replace(trained.config, device=IPU))
        assert isinstance(session, PoplarSession)
        path = folder / "1"
        return path, session.write_program(model, path, request.batch, request.output_name), 0.0
    inputs = keras.Input(
        trained.input_shape, batch_size=request.batch, name=INPUT_NAME, dtype=request.input_type
    )
    stock = stock_model(
        model,
        inputs,
        all_of_them=request.form == KERAS,
        pixels=trained.input_range if request.raw_uint8 else None,
        probabilities=request.probabilities,
    )
    rounding = rounding_of(stock, samples) if request.form == KERAS or request.raw_uint8 else 0.0
    if request.form == TFLITE:
        return _write_tflite(request, stock, folder, calibration), None, rounding
    return WRITERS[request.form](request, stock, folder), None, rounding


def _function(request: ExportRequest, stock: KerasModel) -> TfFunction:
    """Returns the network as a function with one named input and one named output."""
    import tensorflow as tf

    shape = (request.batch, *(int(n) for n in stock.inputs[0].shape[1:]))

    @tf.function(input_signature=[tf.TensorSpec(shape, request.input_type, name=INPUT_NAME)])
    def serve(images: Tensor) -> PlainDict:
        return {request.output_name: stock(images, training=False)}

    return serve


def _write_saved_model(request: ExportRequest, stock: KerasModel, folder: Path) -> Path:
    """Writes version ``1``, a subfolder, as TensorFlow Serving expects."""
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

    serve, opset = _function(request, stock), request.opset or DEFAULT_OPSET
    model, _ = tf2onnx.convert.from_function(
        serve,
        input_signature=serve.input_signature,
        opset=opset,
        custom_op_handlers={"Erfc": (_one_minus_erf, [])},
    )
    written = [port.version for port in model.opset_import if port.domain in ("", "ai.onnx")]
    if set(written) != {opset}:
        raise ValueError(f"tf2onnx wrote operations of opset {written}, not {opset}")
    graph = model.graph
    _rename(graph, graph.input[0].name, INPUT_NAME)
    _rename(graph, graph.output[0].name, request.output_name)
    if request.half:
        _halve(graph)
    onnx.checker.check_model(model)
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def _one_minus_erf(ctx: OnnxGraph, node: OnnxNode, name: str, args: Sequence[object]) -> None:
    """Replaces the operation Erfc of TensorFlow's GELU, which ONNX does not have, by 1 - Erf."""
    (value,), (output,), shape, kind = node.input, node.output, node.output_shapes, node.output_dtypes
    ctx.remove_node(name)
    erf = ctx.make_node("Erf", [value], shapes=shape, dtypes=kind)
    one = ctx.make_const(f"{name}_one", np.ones((), np.float32))
    ctx.make_node(
        "Sub", [one.output[0], erf.output[0]], outputs=[output], name=name, shapes=shape, dtypes=kind
    )


def _rename(graph: OnnxGraph, old: str, new: str) -> None:
    """Renames a tensor of an ONNX graph."""
    for port in (*graph.input, *graph.output):
        port.name = new if port.name == old else port.name
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]


def _halve(graph: OnnxGraph) -> None:
    """Stores the large weights of an ONNX graph in 16 bits; a Cast node converts each back to 32 bits."""
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for weight in list(graph.initializer):
        values = numpy_helper.to_array(weight)
        if weight.data_type != TensorProto.FLOAT or values.size < _LEAST_HALVED:
            continue
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise DataError("--half: some weights are too large for 16 bits (above 65504)", "drop --half")
        name = f"{weight.name}_16"
        weight.CopyFrom(numpy_helper.from_array(values.astype(np.float16), name))
        casts.append(helper.make_node("Cast", [name], [name[:-3]], name=f"{name}_cast", to=TensorProto.FLOAT))
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _write_tflite(
    request: ExportRequest, stock: KerasModel, folder: Path, calibration: Optional[np.ndarray]
) -> Path:
    import tensorflow as tf

    path = folder / "model.tflite"
    with tempfile.TemporaryDirectory() as temporary:
        saved = _write_saved_model(request, stock, Path(temporary))
        converter = tf.lite.TFLiteConverter.from_saved_model(str(saved), signature_keys=[runtimes.SIGNATURE])
        if request.half:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = [tf.float16]
        if calibration is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            # Operations without 8-bit integers are refused, not computed in 32 bits.
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            converter.representative_dataset = lambda: (
                [batch] for batch in runtimes.batches(calibration, request.batch or 1)
            )
        content = converter.convert()
    write_text(path, content)
    return path


WRITERS: Dict[str, Callable[[ExportRequest, KerasModel, Path], Path]] = {
    SAVED_MODEL: _write_saved_model,
    KERAS: _write_keras,
    ONNX: _write_onnx,
}


@contextlib.contextmanager
def _converting(request: ExportRequest) -> Iterator[None]:
    """Hides the output of converters, which print from C++ and through their own loggers.

    Raises:
        ThresholdError: a converter failed for any reason.
    """
    from ipucnn.sessions.host.environment import stderr_aside

    logging.getLogger("tf2onnx").setLevel(logging.WARNING if request.verbose else logging.CRITICAL)
    try:
        with contextlib.nullcontext() if request.verbose else stderr_aside(shown_if_failed=False):
            yield
    except UserError:
        raise
    except Exception as error:
        if user_error_of(error) is not None:
            raise
        reason = " ".join(str(error).split())[:300]
        raise ThresholdError(
            f"the network could not be written as {request.form}: {type(error).__name__}: {printable(reason)}",
            remedy(
                {"format": request.form, "half": request.half, "int8": request.int8, "opset": request.opset}
            ),
        ) from error


def _write_json(path: Path, value: PlainValue) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


# --- facts beside the network


def _describe(request: ExportRequest, trained: TrainedSetup, folder: Path, file: Path) -> PlainDict:
    """Returns ``export.json`` without the results of the verification."""
    from ipucnn.runs.provenance import environment

    config, labels = trained.config, list(map(printable, trained.labels))
    is_half = request.form == IPU and config.precision != "32.32"
    input_type = "float16" if is_half else request.input_type
    digests = {path.relative_to(folder).as_posix(): file_digest(path) for path in _files_below(file)}
    return {
        "format": request.form,
        "model": trained.record.name,
        "task": trained.record.task,
        "file": file.relative_to(folder).as_posix(),
        "files": {name: {"bytes": size, "sha256": digest} for name, (digest, size) in digests.items()},
        "input": describe_input(trained, request.input_name, input_type, request.batch, request.raw_uint8),
        "output": {
            "name": request.output_name,
            "dtype": "float32",
            "shape": [request.batch, *(trained.output_shape or ()), len(labels)],
        },
        "threshold": trained.weights.threshold.value if trained.output_shape and len(labels) == 2 else None,
        "mask": describe_mask(trained.source.info) if trained.output_shape else None,
        "opset": (request.opset or DEFAULT_OPSET) if request.form == ONNX else None,
        "half": request.half,
        "int8": request.int8,
        "weights": {
            "checkpoint": printable(trained.weights.name),
            "model": trained.record.name,
            "weight_updates": trained.weights.weight_updates,
        },
        "averaged_weights": bool(config.ema_decay) and trained.weights.weight_updates is not None,
        "norm_layer": dict(config.norm_layer),
        "trained_on": {"name": trained_on(trained, request.named)},
        "figures": figures(trained),
        "setup": describe_setup(
            config, trained.seed, trained.source.info, labels, trained.weights.data_sha256
        ),
        "environment": environment(),
    }


def trained_on(trained: TrainedSetup, named: WeightsArgument) -> Optional[str]:
    """Returns the name of the data set that the weights were trained on; None if their file does not say it."""
    if trained.weights.weight_updates is not None:
        return printable(read_meta(Path(trained.weights.name))["dataset"])
    return "ImageNet" if named.weights == IMAGENET else None


def figures(trained: TrainedSetup) -> Optional[PlainDict]:
    """Returns the run's own validation figures of these weights; None if it did not validate them or has no folder."""
    folder = trained.weights.folder
    if folder is None:
        return None
    updates = trained.weights.weight_updates
    rows = [row for row in read_run(folder.path).rows("validation") if row["weight_updates"] == updates]
    return {name: value for name, value in rows[-1].items() if name != "event"} if rows else None
