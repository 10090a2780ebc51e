"""``ipucnn infer``: the most probable classes of images."""

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import typer

from ipucnn.commands.run_arguments import RUN, WEIGHTS, WHICH
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError, DataError

IMAGES = typer.Argument(
    None,
    metavar="IMAGE...",
    help="Image files, folders (with all below them), or quoted patterns such as 'photos/**/*.jpg'.",
)
SPLIT = typer.Option(
    None, "--split", metavar="eval|train", help="Classify the images of the data set instead of files."
)
TOP = typer.Option(5, "--top", min=1, help="Classes to show per image.")
OUTPUT = typer.Option(
    None, "--output", metavar="FILE", help="Write the results to a .csv, .json or .jsonl file instead."
)
FORMAT = typer.Option(
    None,
    "--format",
    metavar="csv|json|jsonl",
    help="Print the results in this format.",
    show_default="a table",
)
SHEET = typer.Option(
    None,
    "--contact-sheet",
    metavar="FILE.png",
    help="Draw up to 100 of the images with their predictions.",
)


@with_run_options("infer", from_run=True)
def infer(
    flags: Dict[str, Any],
    verbose: bool,
    json_output: bool,
    run: str = RUN,
    images: Optional[List[str]] = IMAGES,
    split: Optional[str] = SPLIT,
    top: int = TOP,
    checkpoint: Optional[str] = WHICH,
    weights: Optional[str] = WEIGHTS,
    output: Optional[Path] = OUTPUT,
    form: Optional[str] = FORMAT,
    contact_sheet: Optional[Path] = SHEET,
) -> None:
    """Classify images: the most probable labels with their probabilities.

    Images that cannot be read are reported and passed over; the exit code is then 3.
    """
    from ipucnn.reports.console import note
    from ipucnn.reports.contact_sheet import ContactSheet
    from ipucnn.reports.infer import print_predictions, save_results, write_results
    from ipucnn.reports.progress import ItemProgress
    from ipucnn.runs.files import write_atomically
    from ipucnn.runs.infer import OUTPUTS, infer_run

    form = _format(form, json_output)
    sheet = ContactSheet()
    with ItemProgress("classifying") as progress:
        done = infer_run(
            run,
            images or [],
            flags,
            split=split,
            top=top,
            which=checkpoint,
            weights=weights,
            outputs=(("--output", output, OUTPUTS), ("--contact-sheet", contact_sheet, (".png",))),
            verbose=verbose,
            say=progress.line,
            on_images=progress.update,
            on_total=sheet.expect,
            on_image=None if contact_sheet is None else sheet.add,
        )
    results, truth = done.results, done.with_truth
    if output is not None and len(results):
        write_atomically(output, lambda into: save_results(results, output, done.top, truth, into))
    if contact_sheet is not None and len(sheet):
        write_atomically(contact_sheet, sheet.save)
    if form is not None:
        write_results(results, form, sys.stdout, done.top, truth)
    elif output is None:
        print_predictions(results, truth)
    if output is not None and len(results):
        note(f"predictions of {len(results)} images in {output}")
    if contact_sheet is not None and len(sheet):
        note(f"contact sheet of {len(sheet)} images in {contact_sheet}")
    if done.num_failed:
        raise DataError(
            f"{done.num_failed} of {done.num_failed + len(results)} inputs could not be read",
            "the lines above name them"
            + (f"; the results of the other {len(results)} are given" if len(results) else ""),
        )


def _format(form: Optional[str], json_output: bool) -> Optional[str]:
    from ipucnn.reports.infer import FORMATS

    if form is not None and form not in FORMATS:
        raise ConfigurationError(f"--format {form}: must be one of {', '.join(FORMATS)}", "--format csv")
    if json_output and form not in (None, "json"):
        raise ConfigurationError(f"--json and --format {form} are both given", "give one of them")
    return "json" if json_output else form
