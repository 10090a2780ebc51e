"""``ipucnn export``: write a trained network as a file for another program."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ipucnn.config import bounds
from ipucnn.config.shared_options import WeightsOptions
from ipucnn.config.spec import int_or, option, word
from ipucnn.errors import ConfigurationError


@dataclass(frozen=True)
class Export(WeightsOptions):
    """The options of ``ipucnn export``."""

    format: Optional[str] = word(
        "FORMAT",
        "What to write: saved-model, onnx, tflite, keras (only layers of Keras itself; HDF5 under Keras 2.6), or ipu "
        "(a program that the Poplar SDK compiles for one IPU).",
        default_text="none, it must be given",
    )
    batch: Optional[int] = option(
        None,
        "Images in each call: always N, or dynamic for any number. --format ipu needs a number.",
        kind=int_or("dynamic", None),
        metavar="N|dynamic",
        within=bounds.EXPORT_BATCH,
        default_text="dynamic",
    )
    opset: Optional[int] = option(
        None,
        "ONNX: version of the operations.",
        metavar="N",
        within=bounds.OPSET,
        default_text=str(bounds.DEFAULT_OPSET),
    )
    half: bool = option(False, "ONNX and TFLite: store the weights in 16 bits. Computing stays in 32 bits.")
    int8: bool = option(
        False,
        "TFLite: compute in 8-bit integers, calibrated with up to 100 training images. Input and output do not change.",
    )
    raw_uint8: bool = option(
        False, "Let the network take pixels from 0 to 255 (uint8), and bring them to its range itself."
    )
    probabilities: bool = option(False, "Let the network give probabilities instead of logits.")
    output: Optional[Path] = option(
        None,
        "Folder to write.",
        default_text="exports/NAME-FORMAT",
        metavar="DIR",
    )
    overwrite: bool = option(False, "Replace an earlier export in the folder.")


def export(options: Export) -> None:
    """Write a trained network as a file for another program: SavedModel, ONNX, TFLite or Keras.

    The file is verified before it is kept: a process that cannot import ipucnn loads it in its own runtime and runs
    evaluation samples through it. Its outputs must be those of the run; otherwise the exit code is 5, and no file is
    left. The folder also gets the labels, a description of the input, and a page about the network.
    """
    from ipucnn.events import show
    from ipucnn.reports.console import Screen
    from ipucnn.reports.evaluate import print_export
    from ipucnn.runs.export import export_run
    from ipucnn.runs.requests import ExportRequest
    from ipucnn.runs.sources import WeightsArgument

    if options.format is None:
        raise ConfigurationError("--format is missing", "choose one, for example --format onnx")
    request = ExportRequest(
        WeightsArgument(
            "export", options.run, options.flags, which=options.checkpoint, weights=options.weights
        ),
        options.format,
        batch=options.batch,
        opset=options.opset,
        half=options.half,
        int8=options.int8,
        raw_uint8=options.raw_uint8,
        probabilities=options.probabilities,
        output=options.output,
        overwrite=options.overwrite,
        verbose=options.verbose,
    )
    record = show(export_run(request), Screen())
    if options.json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        print_export(record)
