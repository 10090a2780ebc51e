"""``ipucnn export``: write a trained network as a file for another program."""

import json
from typing import Optional

import typer

from ipucnn.aliases import PlainDict
from ipucnn.commands.run_arguments import RUN, WEIGHTS, WHICH, value_option
from ipucnn.config import spec
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError
from ipucnn.text import shown_value

FORMAT = value_option(
    "--format",
    "FORMAT",
    "What to write: saved-model, onnx, tflite, keras (only layers of Keras itself; HDF5 under Keras 2.6), or ipu (a "
    "program that the Poplar SDK compiles for one IPU).",
    shown="none, it must be given",
)
BATCH = value_option(
    "--batch",
    "N|dynamic",
    "Images in each call: always N, or dynamic for any number. --format ipu needs a number.",
    shown="dynamic",
)
OPSET = value_option("--opset", "N", "ONNX: version of the operations.", number=spec.OPSET, shown="15")
HALF = typer.Option(
    False, "--half", help="ONNX and TFLite: store the weights in 16 bits. Computing stays in 32 bits."
)
RAW = typer.Option(
    False,
    "--raw-uint8",
    help="Let the network take pixels from 0 to 255 (uint8), and bring them to its range itself.",
)
PROBABILITIES = typer.Option(
    False, "--probabilities", help="Let the network give probabilities instead of logits."
)
OUTPUT = value_option("--output", "DIR", "Folder to write.", shown="exports/NAME-FORMAT")
OVERWRITE = typer.Option(False, "--overwrite", help="Replace an earlier export in the folder.")


@with_run_options("export", from_run=True)
def export(
    flags: PlainDict,
    verbose: bool,
    json_output: bool,
    run: str = RUN,
    form: Optional[str] = FORMAT,
    checkpoint: Optional[str] = WHICH,
    weights: Optional[str] = WEIGHTS,
    batch: Optional[str] = BATCH,
    opset: Optional[int] = OPSET,
    half: bool = HALF,
    raw_uint8: bool = RAW,
    probabilities: bool = PROBABILITIES,
    output: Optional[str] = OUTPUT,
    overwrite: bool = OVERWRITE,
) -> None:
    """Write a trained network as a file for another program: SavedModel, ONNX, TFLite or Keras.

    The file is verified before it is kept: a process that cannot import ipucnn loads it in its own runtime and runs
    evaluation samples through it. Its outputs must be those of the run; otherwise the exit code is 5, and no file is
    left. The folder also gets the labels, a description of the input, and a page about the network.
    """
    from ipucnn.filesystem import expand
    from ipucnn.reports.console import LOADING
    from ipucnn.reports.evaluate import print_export
    from ipucnn.reports.infer import SheetProgress
    from ipucnn.runs.export import ExportRequest, export_run
    from ipucnn.runs.trained import Named

    if form is None:
        raise ConfigurationError("--format is missing", "choose one, for example --format onnx")
    request = ExportRequest(
        Named("export", run, flags, which=checkpoint, weights=weights),
        form,
        batch=_batch(batch),
        opset=opset,
        half=half,
        raw_uint8=raw_uint8,
        probabilities=probabilities,
        output=None if output is None else expand(output),
        overwrite=overwrite,
        verbose=verbose,
    )
    with SheetProgress("", LOADING) as progress:
        record = export_run(request, progress)
    if json_output:
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        print_export(record)


def _batch(text: Optional[str]) -> Optional[int]:
    """Converts ``--batch`` to the number of images in each call; None for any number."""
    if text is None or text.lower() == "dynamic":
        return None
    if not text.lstrip("+-").isdigit():
        raise ConfigurationError(
            f"--batch {shown_value(text)}: must be a whole number, or dynamic", "--batch 1"
        )
    return int(spec.EXPORT_BATCH.flag("--batch")(text))
