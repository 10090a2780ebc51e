"""What ``ipucnn infer`` shows and writes: a table, CSV, JSON or JSON lines; of masks a table, JSON and a sheet."""

from __future__ import annotations

import csv
import json
import sys
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Iterable, Iterator, List, TextIO

import numpy as np

from ipucnn.aliases import PlainValue
from ipucnn.reports.console import console, plain_table
from ipucnn.reports.sheets import PanelSheet
from ipucnn.text import counted

if TYPE_CHECKING:
    from ipucnn.runs.infer import Masks, Page

FORMATS = ("csv", "json", "jsonl")
TABLE_IMAGES = 1000
"""Images of one table; more make several, so that memory does not grow with their number."""


def print_predictions(results: Iterable[Dict[str, PlainValue]], with_truth: bool) -> None:
    """The predictions on stdout, one row per image and class."""
    rows = iter(results)
    for first in rows:
        _print_table(chain([first], islice(rows, TABLE_IMAGES - 1)), with_truth)


def _print_table(results: Iterator[Dict[str, PlainValue]], with_truth: bool) -> None:
    from rich.text import Text

    table = plain_table()
    table.add_column("image", overflow="fold")
    if with_truth:
        table.add_column("truth", overflow="fold")
    table.add_column("label", overflow="fold")
    table.add_column("probability", justify="right")
    for result in results:
        for rank, prediction in enumerate(result["predictions"]):
            cells = [result["image"]]
            if with_truth:
                cells.append(result["truth"] + ("" if result["correct"] else " (wrong)"))
            shown = cells if rank == 0 else [""] * len(cells)
            probability = f"{prediction['probability']:.2%}"
            table.add_row(*(Text(cell) for cell in [*shown, prediction["label"], probability]))
    console(sys.stdout).print(table)


def write_results(
    results: Iterable[Dict[str, PlainValue]], form: str, handle: TextIO, top: int, with_truth: bool
) -> None:
    """Writes results one by one.

    Args:
        results: of ``ipucnn.runs.infer``.
        form: csv (a row per image), json (a list) or jsonl (an object per line).
        handle: where to.
        top: predictions per image.
        with_truth: whether the results have ``truth``.
    """
    if form == "jsonl":
        handle.writelines(json.dumps(result) + "\n" for result in results)
    elif form == "json":
        separator = "[\n"
        for result in results:
            handle.write(separator + json.dumps(result))
            separator = ",\n"
        handle.write("[]\n" if separator == "[\n" else "\n]\n")
    else:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(_columns(top, with_truth))
        writer.writerows(_csv_row(result) for result in results)


def _columns(top: int, with_truth: bool) -> List[str]:
    columns = ["image", "truth"] if with_truth else ["image"]
    for rank in range(1, top + 1):
        columns += [f"label_{rank}", f"probability_{rank}"]
    return columns


def _csv_row(result: Dict[str, PlainValue]) -> List[str]:
    row = [result["image"]]
    if "truth" in result:
        row.append(result["truth"])
    for prediction in result["predictions"]:
        row += [prediction["label"], f"{prediction['probability']:.6f}"]
    return row


def save_results(
    results: Iterable[Dict[str, PlainValue]], ending: str, top: int, with_truth: bool, into: Path
) -> None:
    """Writes results into the file ``into`` in the format of an ending, for example ``.csv``."""
    with open(into, "w", encoding="utf-8", newline="") as handle:
        write_results(results, ending.lstrip("."), handle, top, with_truth)


def masks_json(done: Masks) -> str:
    """The results as indented JSON."""
    rows = []
    for row in done.results:
        shares = row["shares"]
        # Of two classes one share says both.
        several = {name: round(share, 6) for name, share in shares.items()} if len(shares) > 2 else {}
        own = {key: value for key, value in row.items() if key != "shares"}
        rows.append({**own, "share": round(row["share"], 6), **({"shares": several} if several else {})})
    measured = {
        "pages": done.num_pages,
        "wall_s": done.wall_s,
        "images_per_s": done.images_per_s,
        "device": done.device,
        "tile_sizes": done.tile_sizes,
    }
    found = {"results": rows, "share_of": done.shown_name, "threshold": done.threshold, "measured": measured}
    return json.dumps(found, indent=2)


def print_masks(done: Masks) -> None:
    """A row per input on stdout."""
    from rich.text import Text

    table = plain_table()
    table.add_column("image", overflow="fold")
    table.add_column("pages", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    if len(done.results[0]["shares"]) == 2:
        table.add_column(done.shown_name, justify="right")
    else:
        table.add_column("share of each class", overflow="fold")
    table.add_column("mask", overflow="fold")
    for row in done.results:
        shares = list(row["shares"].items())
        each = ", ".join(f"{name} {share:.1%}" for name, share in shares[1:])
        cells = [
            row["image"],
            str(row["pages"]),
            f"{row['height']}x{row['width']}",
            f"{row['share']:.1%}" if len(shares) == 2 else each,
            row["files"]["mask"],
        ]
        table.add_row(*(Text(cell) for cell in cells))
    console(sys.stdout).print(table)


def speed_line(done: Masks) -> str:
    """How fast it went, and with which tiles."""
    tiles = ", ".join(f"{size}x{size}" for size in done.tile_sizes)
    return (
        f"{counted(done.num_pages, 'image')} in {done.wall_s:.1f} s: {done.images_per_s:.3g} images/s, measured on "
        f"{done.device.upper()}, tiles of {tiles}"
    )


class MaskSheet(PanelSheet):
    """The contact sheet of masks; takes pages as they are segmented."""

    def __init__(self) -> None:
        super().__init__(("image", "probability", "overlay"), side=384, columns=3)
        self._given = 0

    def add_page(self, page: Page) -> None:
        """Takes a page if it is one of those shown."""
        from ipucnn.runs.images.outputs import class_overlay, overlay

        is_binary = len(page.class_names) == 2
        of = page.class_names[1] if is_binary else "the class shown"
        self.heads = ("image", f"probability of {of}", "overlay")
        wanted = self.wants(self._given)
        self._given += 1
        if not wanted:
            return
        image = page.image
        grey = image[..., 0] if image.shape[-1] == 1 else image
        probability = np.round(255 * page.probability).astype(np.uint8)
        last = page.name.rpartition("/")[2]
        number = f", page {page.number + 1} of {page.pages}" if page.pages > 1 else ""
        if is_binary:
            shown = page.predicted == page.shown_class
            name, colour = page.class_names[page.shown_class], page.colours[page.shown_class]
            text, tinted = f"{shown.mean():.1%} {name}", overlay(image, shown, colour)
            self.legend = ((colour, name),)
        else:
            counts = (
                np.bincount(page.predicted.reshape(-1), minlength=len(page.class_names)) / page.predicted.size
            )
            text = ", ".join(f"{share:.1%} {name}" for share, name in zip(counts[1:], page.class_names[1:]))
            tinted = class_overlay(image, page.predicted, page.colours)
            self.legend = tuple(zip(page.colours, page.class_names))[1:]
        self.add(f"{last}{number}: {text}", [grey, probability, tinted])
