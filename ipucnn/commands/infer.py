"""``ipucnn infer``: predict the classes or the masks of images."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional

import typer

from ipucnn.aliases import PlainDict
from ipucnn.commands.run_arguments import (
    PATCH_SIZE,
    RUN,
    TEST_TIME_AUGMENTATION,
    THRESHOLD,
    WEIGHTS,
    WHICH,
    output_of_process,
    value_option,
)
from ipucnn.config import spec
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.text import counted, shown_value

if TYPE_CHECKING:
    from ipucnn.runs.infer import InferRequest

IMAGES = typer.Argument(
    None,
    metavar="IMAGE...",
    help="Image files, folders (with everything below them), or quoted patterns such as 'photos/**/*.jpg'.",
)
SPLIT = value_option(
    "--split", "eval|train", "Take the images of this part of the data set, instead of files."
)
TOP = value_option("--top", "N", "Classes to show per image.", number=spec.TOP, shown="5")
OUTPUT = value_option(
    "--output",
    "FILE|DIR",
    "Write the results to this .csv, .json or .jsonl file, instead of printing them; for a segmentation network, write "
    "the masks into this folder.",
)
OVERLAY = typer.Option(
    False, "--overlay", help="Segmentation: also write each image with its mask in colour over it."
)
FORMAT = value_option("--format", "csv|json|jsonl", "Print the results in this format.", shown="a table")
SHEET = value_option(
    "--contact-sheet",
    "FILE.png",
    "Draw up to 100 of the images with their predictions (up to 30 with their masks).",
    shown="for masks contact-sheet.png in --output",
)
MISTAKES = typer.Option(
    False,
    "--only-mistakes",
    help="With --split and --contact-sheet: draw only images that were classified wrongly.",
)


@with_run_options("infer", from_run=True)
def infer(
    flags: PlainDict,
    verbose: bool,
    json_output: bool,
    run: str = RUN,
    images: Optional[List[str]] = IMAGES,
    split: Optional[str] = SPLIT,
    top: Optional[int] = TOP,
    checkpoint: Optional[str] = WHICH,
    weights: Optional[str] = WEIGHTS,
    output: Optional[str] = OUTPUT,
    form: Optional[str] = FORMAT,
    contact_sheet: Optional[str] = SHEET,
    patch_size: Optional[int] = PATCH_SIZE,
    test_time_augmentation: int = TEST_TIME_AUGMENTATION,
    threshold: Optional[float] = THRESHOLD,
    overlay: bool = OVERLAY,
    only_mistakes: bool = MISTAKES,
) -> None:
    """Classify or segment images: the most probable labels with their probabilities, or masks.

    A segmentation network takes images of any size and volumes (TIFF files of several pages), and writes a mask and a
    probability map of each into --output. Inputs that cannot be read are reported and skipped; the exit code
    is then 3.
    """
    from ipucnn.runs.infer import InferRequest
    from ipucnn.runs.predicting import check_task
    from ipucnn.runs.trained import Named, open_trained, task_of

    named = Named("infer", run, flags, which=checkpoint, weights=weights)
    task = task_of(named)
    if task is None:
        # The options depend on the task.  If the task is unknown, this reports what is wrong with RUN first.
        open_trained(named)
    segments = task == "segmentation"
    options = (
        ("--only-mistakes", only_mistakes, False),
        (f"--top {top}", top is not None, False),
        (f"--format {form}", form is not None, False),
        ("--overlay", overlay, True),
        (f"--test-time-augmentation {test_time_augmentation}", test_time_augmentation != 1, True),
        (f"--patch-size {patch_size}", patch_size is not None, True),
        (f"--threshold {threshold}", threshold is not None, True),
    )
    check_task(segments, run, options)
    request = InferRequest(
        named,
        images or [],
        subset=split,
        output=output_of_process(output),
        contact_sheet=output_of_process(contact_sheet),
        verbose=verbose,
        top=5 if top is None else top,
        patch_size=patch_size,
        test_time_augmentation=test_time_augmentation,
        threshold=threshold,
        with_overlay=overlay,
    )
    if segments:
        _segment(request, json_output)
    else:
        _classify(request, json_output, form, only_mistakes)


def _classify(request: "InferRequest", json_output: bool, form: Optional[str], only_mistakes: bool) -> None:
    """Predicts classes, and prints or writes them.

    Args:
        request: the network, the images and the outputs.
        json_output: whether to print JSON, as with the format json.
        form: the format to print: csv, json or jsonl; None: a table, unless the predictions go to a file.
        only_mistakes: whether the contact sheet has only images that were classified wrongly.
    """
    from ipucnn.filesystem import write_output
    from ipucnn.reports.console import LOADING, indexing_progress, note
    from ipucnn.reports.infer import FORMATS, SheetProgress, print_predictions, write_results
    from ipucnn.reports.sheets import ContactSheet
    from ipucnn.runs.images.outputs import format_of
    from ipucnn.runs.infer import OUTPUTS, infer_classes

    output_to, sheet_to = request.output, request.contact_sheet
    if only_mistakes and (request.subset is None or sheet_to is None):
        raise ConfigurationError(
            "--only-mistakes draws images whose true class is known, on a contact sheet",
            "add --split eval --contact-sheet sheet.png",
        )
    if form is not None and form not in FORMATS:
        raise ConfigurationError(
            f"--format {shown_value(form)}: must be one of {', '.join(FORMATS)}", "--format csv"
        )
    if json_output and form not in (None, "json"):
        raise ConfigurationError(f"--json and --format {form} are both given", "give one of them")
    form = "json" if json_output else form
    sheet = ContactSheet(f"classified by {request.named.target}", only_mistakes)
    drawn = None if sheet_to is None else sheet
    with indexing_progress(), SheetProgress("classifying", LOADING, drawn) as progress:
        predictions = infer_classes(request, progress)

    def save(into: Path) -> None:
        assert output_to is not None
        with open(into, "w", encoding="utf-8", newline="") as handle:
            write_results(predictions, format_of(output_to, OUTPUTS).lstrip("."), handle)

    count = len(predictions.results)
    if output_to is not None and count:
        write_output(output_to, save)
    if sheet_to is not None and len(sheet):
        write_output(sheet_to, sheet.save)
    if form is not None:
        write_results(predictions, form, sys.stdout)
    elif output_to is None:
        print_predictions(predictions)
    if output_to is not None and count:
        note(f"predictions of {counted(count, 'image')} in {output_to}")
    if sheet_to is not None and len(sheet):
        note(f"contact sheet of {counted(len(sheet), 'image')} in {sheet_to}")
    elif only_mistakes:
        note(f"no mistakes among {counted(count, 'image')}: no contact sheet")
    _check_failed(predictions.num_failed, count)


def _segment(request: "InferRequest", json_output: bool) -> None:
    """Writes the masks of images, and prints a summary of them."""
    from ipucnn.filesystem import write_atomically, write_output
    from ipucnn.reports.console import LOADING, note
    from ipucnn.reports.infer import MaskSheet, SheetProgress, masks_json, print_masks, speed_line
    from ipucnn.runs.infer import CONTACT_SHEET, infer_masks
    from ipucnn.sessions.group import find_instances

    if request.output is None:
        raise ConfigurationError(
            f"{request.named.target} segments images, and there is no folder for the masks",
            "add --output masks",
        )
    sheet = MaskSheet()
    with SheetProgress("segmenting", LOADING, sheet) as progress:
        masks = infer_masks(request, progress)
    path = request.contact_sheet or request.output / CONTACT_SHEET
    if find_instances().is_writer:  # only the first of several processes writes
        write = write_atomically if request.contact_sheet is None else write_output
        write(path, sheet.save)
    if json_output:
        print(masks_json(masks))
    else:
        print_masks(masks)
    note(speed_line(masks))
    note(f"contact sheet in {path}")
    _check_failed(masks.num_failed, len(masks.results))


def _check_failed(failed: int, done: int) -> None:
    """Raises DataError if some inputs could not be read."""
    if failed:
        raise DataError(
            f"{failed} of {failed + done} inputs could not be read",
            "the lines above name them" + (f"; the results of the other {done} are given" if done else ""),
        )
