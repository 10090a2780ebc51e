"""What ``ipucnn infer`` shows and writes: a table, CSV, JSON or JSON lines."""

import csv
import json
import sys
from itertools import chain, islice
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, TextIO

from ipucnn.reports.console import console
from ipucnn.reports.evaluate import plain_table

FORMATS = ("csv", "json", "jsonl")
TABLE_IMAGES = 1000
"""Images of one table; more make several, so that memory does not grow with their number."""


def print_predictions(results: Iterable[Dict[str, Any]], with_truth: bool) -> None:
    """The predictions on stdout, one row per image and class."""
    rows = iter(results)
    for first in rows:
        _print_table(chain([first], islice(rows, TABLE_IMAGES - 1)), with_truth)


def _print_table(results: Iterator[Dict[str, Any]], with_truth: bool) -> None:
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
    results: Iterable[Dict[str, Any]], form: str, handle: TextIO, top: int, with_truth: bool
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


def _csv_row(result: Dict[str, Any]) -> List[str]:
    row = [result["image"]]
    if "truth" in result:
        row.append(result["truth"])
    for prediction in result["predictions"]:
        row += [prediction["label"], f"{prediction['probability']:.6f}"]
    return row


def save_results(
    results: Iterable[Dict[str, Any]], ending: str, top: int, with_truth: bool, into: Path
) -> None:
    """Writes results into the file ``into`` in the format of an ending, for example ``.csv``."""
    with open(into, "w", encoding="utf-8", newline="") as handle:
        write_results(results, ending.lstrip("."), handle, top, with_truth)
