"""``ipucnn infer``: the most probable classes of images, or their masks."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, Optional

import typer

from ipucnn.aliases import PlainDict
from ipucnn.commands.run_arguments import (
    RUN,
    THRESHOLD,
    TILE_SIZE,
    VIEWS,
    WEIGHTS,
    WHICH,
    in_instances,
    own_option,
    own_output,
)
from ipucnn.config import spec
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.text import counted, shown_value

if TYPE_CHECKING:
    from ipucnn.runs.infer import Masks

IMAGES = typer.Argument(
    None,
    metavar="IMAGE...",
    help="Image files, folders (with everything below them), or quoted patterns such as 'photos/**/*.jpg'.",
)
SPLIT = own_option("--split", "eval|train", "Take the images of this part of the data set, instead of files.")
TOP = own_option("--top", "N", "Classes to show per image.", number=spec.TOP, shown="5")
OUTPUT = own_option(
    "--output",
    "FILE|DIR",
    "Write the results to this .csv, .json or .jsonl file, instead of printing them; for a segmentation network, write "
    "the masks into this folder.",
)
OVERLAY = typer.Option(
    False, "--overlay", help="Segmentation: also write each image with its mask in colour over it."
)
FORMAT = own_option("--format", "csv|json|jsonl", "Print the results in this format.", shown="a table")
SHEET = own_option(
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
@in_instances
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
    tile_size: Optional[int] = TILE_SIZE,
    views: int = VIEWS,
    threshold: Optional[float] = THRESHOLD,
    overlay: bool = OVERLAY,
    only_mistakes: bool = MISTAKES,
) -> None:
    """Classify or segment images: the most probable labels with their probabilities, or masks.

    A segmentation network takes images of any size and volumes (TIFF files of several pages), and writes a mask and a
    probability map of each into --output. Inputs that cannot be read are reported and skipped; the exit code
    is then 3.
    """
    from ipucnn.filesystem import expand, write_output
    from ipucnn.runs.trained import Named, open_trained, task_of

    output_to = own_output(None if output is None else expand(output))
    sheet_to = own_output(None if contact_sheet is None else expand(contact_sheet))
    named = Named("infer", run, flags, which=checkpoint, weights=weights)
    task = task_of(named)
    if task is None:
        # Which options fit depends on what the network does; what hides that is said before they are judged.
        open_trained(named)
    if only_mistakes and (split is None or contact_sheet is None):
        raise ConfigurationError(
            "--only-mistakes draws images whose true class is known, on a contact sheet",
            "add --split eval --contact-sheet sheet.png",
        )
    if task == "segmentation":
        if only_mistakes:
            raise ConfigurationError(f"--only-mistakes: {run} segments images, it has no labels", "drop it")
        for option, given in (("--top", top), ("--format", form)):
            if given is not None:
                raise ConfigurationError(
                    f"{option} {given}: {run} segments images, it has no labels", "drop it"
                )
        if output_to is None:
            raise ConfigurationError(
                f"{run} segments images, and there is no folder for the masks", "add --output masks"
            )
        from ipucnn.runs.infer import infer_masks

        segment = partial(
            infer_masks,
            named,
            images or [],
            output=output_to,
            subset=split,
            tile_size=tile_size,
            views=views,
            threshold=threshold,
            with_overlay=overlay,
            contact_sheet=sheet_to,
            verbose=verbose,
        )
        _segment(segment, json_output, output_to, sheet_to)
        return
    for option, is_typed in (
        ("--overlay", overlay),
        (f"--views {views}", views != 1),
        (f"--tile-size {tile_size}", tile_size is not None),
        (f"--threshold {threshold}", threshold is not None),
    ):
        if is_typed:
            raise ConfigurationError(f"{option}: {run} classifies images, it makes no masks", "drop it")
    from ipucnn.reports.console import LOADING, ItemProgress, note, telling_of_indexing
    from ipucnn.reports.infer import print_predictions, save_results, write_results
    from ipucnn.reports.sheets import ContactSheet
    from ipucnn.runs.images.outputs import format_of
    from ipucnn.runs.infer import OUTPUTS, infer_run

    form = _format(form, json_output)
    sheet = ContactSheet(f"classified by {run}", only_mistakes)
    with telling_of_indexing(), ItemProgress("classifying", LOADING) as progress:
        done = infer_run(
            named,
            images or [],
            subset=split,
            top=5 if top is None else top,
            outputs=(("--output", output_to, OUTPUTS), ("--contact-sheet", sheet_to, (".png",))),
            verbose=verbose,
            say=progress.line,
            on_images=progress.update,
            on_total=sheet.expect,
            on_image=None if sheet_to is None else sheet.add,
        )
    results, truth = done.results, done.with_truth
    if output_to is not None and len(results):
        ending = format_of(output_to, OUTPUTS)
        write_output(output_to, lambda into: save_results(results, ending, done.top, truth, into))
    if sheet_to is not None and len(sheet):
        write_output(sheet_to, sheet.save)
    if form is not None:
        write_results(results, form, sys.stdout, done.top, truth)
    elif output_to is None:
        print_predictions(results, truth)
    if output_to is not None and len(results):
        note(f"predictions of {counted(len(results), 'image')} in {output_to}")
    if sheet_to is not None and len(sheet):
        note(f"contact sheet of {counted(len(sheet), 'image')} in {sheet_to}")
    elif only_mistakes:
        note(f"no mistakes among {counted(len(results), 'image')}: no contact sheet")
    _check_failed(done.num_failed, len(results))


def _segment(
    segment: Callable[..., "Masks"], json_output: bool, output: Path, contact_sheet: Optional[Path]
) -> None:
    """The masks of images, as ``infer_masks`` makes them; what it is told of the command line, it has already."""
    from ipucnn.filesystem import write_atomically, write_output
    from ipucnn.reports.console import LOADING, ItemProgress, note
    from ipucnn.reports.infer import MaskSheet, masks_json, print_masks, speed_line
    from ipucnn.runs.infer import CONTACT_SHEET
    from ipucnn.sessions.host.workers import group_of_environment

    sheet = MaskSheet()
    with ItemProgress("segmenting", LOADING) as progress:
        done = segment(
            say=progress.line, on_total=sheet.expect, on_pages=progress.update, on_page=sheet.add_page
        )
    path = contact_sheet or output / CONTACT_SHEET
    if not group_of_environment().is_writer:
        pass  # of several processes the first one writes
    elif contact_sheet is not None:
        write_output(path, sheet.save)
    else:
        write_atomically(path, sheet.save)
    if json_output:
        print(masks_json(done))
    else:
        print_masks(done)
    note(speed_line(done))
    note(f"contact sheet in {path}")
    _check_failed(done.num_failed, len(done.results))


def _check_failed(failed: int, done: int) -> None:
    """Raises DataError where some inputs could not be read."""
    if failed:
        raise DataError(
            f"{failed} of {failed + done} inputs could not be read",
            "the lines above name them" + (f"; the results of the other {done} are given" if done else ""),
        )


def _format(form: Optional[str], json_output: bool) -> Optional[str]:
    from ipucnn.reports.infer import FORMATS

    if form is not None and form not in FORMATS:
        raise ConfigurationError(
            f"--format {shown_value(form)}: must be one of {', '.join(FORMATS)}", "--format csv"
        )
    if json_output and form not in (None, "json"):
        raise ConfigurationError(f"--json and --format {form} are both given", "give one of them")
    return "json" if json_output else form
