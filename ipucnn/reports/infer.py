"""Output of ``ipucnn infer``: a table, CSV, JSON or JSON lines; for masks a table, JSON and a contact sheet."""

from __future__ import annotations

import csv
import json
import sys
from itertools import chain, islice
from typing import TYPE_CHECKING, Dict, Iterator, List, TextIO

import numpy as np

from ipucnn.aliases import PlainValue
from ipucnn.reports import units
from ipucnn.reports.console import NUMBER, TEXT, console, text_table
from ipucnn.reports.sheets import ContactSheet, PanelSheet
from ipucnn.runs.images.outputs import overlay
from ipucnn.text import counted, printable

if TYPE_CHECKING:
    from ipucnn.runs.images.segmentation import Segmented
    from ipucnn.runs.infer import ClassifiedImage, InferenceResult, Masks

FORMATS = ("csv", "json", "jsonl")
TABLE_IMAGES = 1000
"""Images of one table; more images make several tables, so that memory does not grow with their number."""


def print_predictions(done: InferenceResult) -> None:
    """Prints the predictions on stdout, one row per image and class."""
    results = iter(done.results)
    for first in results:
        _print_table(chain([first], islice(results, TABLE_IMAGES - 1)), done.with_truth)


def _print_table(results: Iterator[Dict[str, PlainValue]], with_truth: bool) -> None:
    def rows() -> Iterator[List[str]]:
        for result in results:
            cells = [printable(result["image"])]
            if with_truth:
                cells.append(result["truth"] + ("" if result["correct"] else " (wrong)"))
            for prediction in result["predictions"]:
                yield [*cells, prediction["label"], f"{prediction['probability']:.2%}"]
                cells = [""] * len(cells)

    truth = {"truth": TEXT} if with_truth else {}
    table = text_table({"image": TEXT, **truth, "label": TEXT, "probability": NUMBER}, rows())
    console(sys.stdout).print(table)


def write_results(done: InferenceResult, form: str, handle: TextIO) -> None:
    """Writes the predictions one by one.

    Args:
        done: the predictions.
        form: csv (a row per image), json (``results`` and ``notes``) or jsonl (an object per line).
        handle: file to write to.
    """
    results = done.results
    if form == "jsonl":
        handle.writelines(json.dumps(result) + "\n" for result in results)
    elif form == "json":
        separator = '{"results": ['
        for result in results:
            handle.write(f"{separator}\n{json.dumps(result)}")
            separator = ","
        handle.write(f'\n], "notes": {json.dumps(done.notes)}}}\n')
    else:
        writer = csv.writer(handle, lineterminator="\n")
        columns = ["image", "truth"] if done.with_truth else ["image"]
        for rank in range(1, done.top + 1):
            columns += [f"label_{rank}", f"probability_{rank}"]
        writer.writerow(columns)
        text = printable if handle.isatty() else str  # a terminal would execute control characters
        writer.writerows([text(cell) for cell in _csv_row(result)] for result in results)


def _csv_row(result: Dict[str, PlainValue]) -> List[str]:
    row = [result["image"]]
    if "truth" in result:
        row.append(result["truth"])
    for prediction in result["predictions"]:
        row += [prediction["label"], f"{prediction['probability']:.6f}"]
    return row


def masks_json(done: Masks) -> str:
    """Returns the results as indented JSON."""
    rows = []
    for row in done.results:
        shares = {name: round(share, 6) for name, share in row["shares"].items()}
        shown = {**row, "share": round(row["share"], 6), "shares": shares}
        if len(shares) == 2:
            del shown["shares"]  # of two classes, "share" determines both
        rows.append(shown)
    measured = {
        "pages": done.num_pages,
        "wall_s": done.wall_s,
        "images_per_s": done.images_per_s,
        "device": done.device,
        "patch_sizes": done.patch_sizes,
    }
    result = {
        "results": rows,
        "share_of": done.shown_name,
        "threshold": done.threshold,
        "notes": done.notes,
        "measured": measured,
    }
    return json.dumps(result, indent=2)


def print_masks(done: Masks) -> None:
    """Prints a row per input on stdout."""
    is_binary = len(done.results[0]["shares"]) == 2
    share = {done.shown_name: NUMBER} if is_binary else {"share of each class": TEXT}
    rows = []
    for row in done.results:
        each = ", ".join(f"{name} {share:.1%}" for name, share in list(row["shares"].items())[1:])
        cells = [
            printable(row["image"]),
            str(row["pages"]),
            "several" if "sizes" in row else f"{row['height']}x{row['width']}",
        ]
        rows.append([*cells, f"{row['share']:.1%}" if is_binary else each, printable(row["files"]["mask"])])
    columns = {"image": TEXT, "pages": NUMBER, "size": NUMBER, **share, "mask": TEXT}
    console(sys.stdout).print(text_table(columns, rows))
    for row in done.results:
        if "page_names" in row:
            names = [*map(printable, row["page_names"])]
            names = names if len(names) < 4 else [names[0], names[1], f"... {names[-1]} (--json has all)"]
            console(sys.stdout).print(
                f"{printable(row['image'])} has, in this order: {', '.join(names)}", markup=False
            )


def speed_line(done: Masks) -> str:
    """Returns a line with the speed and the patch sizes."""
    patches = ", ".join("x".join(map(str, size)) for size in done.patch_sizes)
    return (
        f"{counted(done.num_pages, 'image')} in {units.duration(done.wall_s)}: {units.rate(done.images_per_s)} "
        f"images/s, measured on {done.device.upper()}, patches of {patches}"
    )


def draw(sheet: ContactSheet, item: ClassifiedImage) -> None:
    """Draws a classified image on a contact sheet, if it is one of those shown."""
    sheet.expect(item.total)
    sheet.take(item.position, item.result, item.pixels)


class MaskSheet(PanelSheet):
    """A contact sheet of masks, which takes pages as they are segmented."""

    def __init__(self) -> None:
        super().__init__(("image", "probability", "overlay"), side=384, columns=3)

    def take(self, item: Segmented) -> None:
        """Takes a page if it is one of those shown."""
        self.expect(item.total)
        if not self.wants(item.position):
            return
        page = item.image
        classes, predicted = page.classes, page.predicted
        of = classes.names[1] if classes.is_binary else "the class shown"
        self.heads, self.legend = ("image", f"probability of {of}", "overlay"), classes.legend
        shares = np.bincount(predicted.reshape(-1), minlength=len(classes.names)) / predicted.size
        shown = [classes.shown] if classes.is_binary else range(1, len(classes.names))
        text = ", ".join(f"{shares[k]:.1%} {classes.names[k]}" for k in shown)
        assert page.probability is not None
        probability = np.round(255 * page.probability).astype(np.uint8)
        tinted = overlay(page.image, predicted, classes.colours, classes.shown)
        self.add(f"{page.name}: {text}", [page.image, probability, tinted])
