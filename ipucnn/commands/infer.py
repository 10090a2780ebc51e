"""``ipucnn infer``: predict the classes or the masks of images."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Tuple

from ipucnn.config import bounds
from ipucnn.config.shared_options import PatchOptions
from ipucnn.config.spec import argument, option, word
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.text import counted, shown_value

if TYPE_CHECKING:
    from ipucnn.runs.requests import InferRequest


@dataclass(frozen=True)
class Infer(PatchOptions):
    """The options of ``ipucnn infer``."""

    images: Tuple[str, ...] = argument(
        "IMAGE...",
        "Image files, folders (with everything below them), or quoted patterns such as 'photos/**/*.jpg'.",
        default=(),
    )
    split: Optional[str] = word(
        "eval|train", "Take the images of this part of the data set, instead of files."
    )
    top: Optional[int] = option(
        None,
        "Classes to show per image.",
        metavar="N",
        within=bounds.CLASSES,
        default_text=str(bounds.DEFAULT_TOP),
    )
    output: Optional[Path] = option(
        None,
        "Write the results to this .csv, .json or .jsonl file, instead of printing them; for a segmentation network, "
        "write the masks into this folder.",
        metavar="FILE|DIR",
    )
    format: Optional[str] = word(
        "csv|json|jsonl", "Print the results in this format.", default_text="a table"
    )
    contact_sheet: Optional[Path] = option(
        None,
        "Draw up to 100 of the images with their predictions (up to 30 with their masks).",
        default_text="for masks contact-sheet.png in --output",
        metavar="FILE.png",
    )
    threshold: Optional[float] = option(
        None,
        "Segmentation of two classes: the probability of the second class above which a pixel belongs to it. "
        "`evaluate` recommends one, and saves it in the run.",
        metavar="P",
        within=bounds.THRESHOLD,
        default_text="as evaluate recommends, else 0.5",
    )
    overlay: bool = option(False, "Segmentation: also write each image with its mask in colour over it.")
    only_mistakes: bool = option(
        False, "With --split and --contact-sheet: draw only images that were classified wrongly."
    )


def infer(options: Infer) -> None:
    """Classify or segment images: the most probable labels with their probabilities, or masks.

    A segmentation network takes images of any size and volumes (TIFF files of several pages), and writes a mask and a
    probability map of each into --output. Inputs that cannot be read are reported and skipped; the exit code
    is then 3.
    """
    from ipucnn.commands.rules import INFER_RULES
    from ipucnn.config.rules import OfTask, check_rules
    from ipucnn.runs.requests import InferRequest
    from ipucnn.runs.sources import WeightsArgument, task_of
    from ipucnn.runs.trained import open_trained
    from ipucnn.sessions.role import find_role

    role, run = find_role(), options.run
    named = WeightsArgument("infer", run, options.flags, which=options.checkpoint, weights=options.weights)
    task = task_of(named)
    if task is None:
        # The options depend on the task.  If the task is unknown, this reports what is wrong with RUN first.
        open_trained(named)
    segments = task == "segmentation"
    check_rules(INFER_RULES, options, OfTask(segments, run))
    output = role.path(options.output)
    request = InferRequest(
        named,
        list(options.images),
        bounds.DEFAULT_TOP if options.top is None else options.top,
        subset=options.split,
        output=output,
        contact_sheet=role.path(options.contact_sheet),
        verbose=options.verbose,
        patch_size=options.patch_size,
        test_time_augmentation=options.test_time_augmentation,
        threshold=options.threshold,
        with_overlay=options.overlay,
    )
    if not segments:
        _classify(request, options.json, options.format, options.only_mistakes)
    elif output is None:
        raise ConfigurationError(
            f"{run} segments images, and there is no folder for the masks", "add --output masks"
        )
    else:
        _segment(request, output, options.json)


def _classify(request: "InferRequest", json_output: bool, form: Optional[str], only_mistakes: bool) -> None:
    """Predicts classes, and prints or writes them.

    Args:
        request: the network, the images and the outputs.
        json_output: whether to print JSON, as with the format json.
        form: the format to print: csv, json or jsonl; None: a table, unless the predictions go to a file.
        only_mistakes: whether the contact sheet has only images that were classified wrongly.
    """
    from ipucnn.events import show
    from ipucnn.filesystem import write_output
    from ipucnn.reports.console import Screen, note
    from ipucnn.reports.infer import FORMATS, draw, print_predictions, write_results
    from ipucnn.reports.sheets import ContactSheet
    from ipucnn.runs.images.outputs import format_of
    from ipucnn.runs.infer import OUTPUTS, infer_classes

    output_to, sheet_to = request.output, request.contact_sheet
    if form is not None and form not in FORMATS:
        raise ConfigurationError(
            f"--format {shown_value(form)}: must be one of {', '.join(FORMATS)}", "--format csv"
        )
    form = "json" if json_output else form
    sheet = ContactSheet(f"classified by {request.named.target}", only_mistakes)
    screen = Screen() if sheet_to is None else Screen(take=partial(draw, sheet))
    predictions = show(infer_classes(request), screen)

    def save(form: str, into: Path) -> None:
        with open(into, "w", encoding="utf-8", newline="") as handle:
            write_results(predictions, form, handle)

    count = len(predictions.results)
    if output_to is not None and count:
        write_output(output_to, partial(save, format_of(output_to, OUTPUTS).lstrip(".")))
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


def _segment(request: "InferRequest", folder: Path, json_output: bool) -> None:
    """Writes the masks of images into a folder, and prints a summary of them."""
    from ipucnn.events import show
    from ipucnn.filesystem import write_atomically, write_output
    from ipucnn.reports.console import Screen, note
    from ipucnn.reports.infer import MaskSheet, masks_json, print_masks, speed_line
    from ipucnn.runs.infer import CONTACT_SHEET, infer_masks

    sheet = MaskSheet()
    masks = show(infer_masks(request, folder), Screen(take=sheet.take))
    path = request.contact_sheet or folder / CONTACT_SHEET
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
