"""What a cross-validation shows: a line per fold, mean and standard deviation."""

import sys
from typing import Any, Dict, List, Optional

from ipucnn.reports.console import console, human_time
from ipucnn.text import printable

_COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "{:.2%}"),
    ("top5", "top 5", "{:.2%}"),
    ("dice", "Dice", "{:.4f}"),
    ("dice_background", "Dice of {background}", "{:.4f}"),
    ("iou", "IoU", "{:.4f}"),
)


def fold_line(row: Dict[str, Any], num_folds: int) -> str:
    """One finished fold, for stderr."""
    figures = ", ".join(
        f"{title.split(' of ')[0] if key != 'dice_background' else 'background'} {text.format(row['validation'][key])}"
        for key, title, text in _COLUMNS
        if row["validation"] and key in row["validation"]
    )
    return f"fold {row['fold']} of {num_folds}: {figures or 'not validated'}"


def print_folds(report: Dict[str, Any], folder: str, background: str) -> None:
    """The folds as a table on stdout.

    Args:
        report: what ``folds.json`` holds.
        folder: the cross-validation's.
        background: the name of class 0.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console(sys.stdout)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold")
    table.title = printable(f"{report['model']} on {report['dataset']}, {report['kfold']} folds, measured")
    columns = [c for c in _COLUMNS if c[0] in report["mean"]]
    table.add_column("fold")
    table.add_column("held out", overflow="fold")
    for _, title, _ in columns:
        table.add_column(printable(title.format(background=background)), justify="right")
    table.add_column("time", justify="right")
    for row in report["folds"]:
        cells = [
            text.format(row["validation"][key]) if row["validation"] else "-" for key, _, text in columns
        ]
        held_out = held_out_text(row["held_out"])
        table.add_row(str(row["fold"]), held_out, *cells, human_time(row["train_s"]))
    if len(report["folds"]) > 1 and columns:
        for name, values in (("mean", report["mean"]), ("std", report["std"])):
            table.add_row(name, "", *(_cell(values[key], text) for key, _, text in columns), "")
    out.print(table)
    if report["missing"]:
        out.print(Text(f"not trained: fold {', '.join(map(str, report['missing']))}"))
    out.print(
        Text(printable(f"saved in {folder}; evaluate one: ipucnn evaluate {folder}/fold-1")), soft_wrap=True
    )


def held_out_text(numbers: List[int]) -> str:
    """24-29 where the numbers follow each other, else how many there are."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    return f"{len(numbers)} examples"


def _cell(value: Optional[float], text: str) -> str:
    return "-" if value is None else text.format(value)
