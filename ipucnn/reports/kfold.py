"""What a cross-validation shows: a line per fold, mean and standard deviation."""

import sys
from typing import Any, Dict, List, Optional, Sequence

from ipucnn.reports.console import console
from ipucnn.text import printable

_COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "{:.2%}"),
    ("top5", "top 5", "{:.2%}"),
    ("dice", "Dice of {foreground}", "{:.4f}"),
    ("dice_background", "Dice of {background}", "{:.4f}"),
    ("iou", "IoU", "{:.4f}"),
)


def _titles(class_names: Sequence[str]) -> Dict[str, str]:
    """The figures' names; of two classes of pixels the first is the background."""
    background, foreground = class_names if len(class_names) == 2 else ("background", "foreground")
    return {key: title.format(background=background, foreground=foreground) for key, title, _ in _COLUMNS}


def fold_line(row: Dict[str, Any], num_folds: int, class_names: Sequence[str]) -> str:
    """One finished fold, for stderr."""
    titles = _titles(class_names)
    figures = ", ".join(
        f"{titles[key]} {text.format(row['validation'][key])}"
        for key, _, text in _COLUMNS
        if row["validation"] and key in row["validation"]
    )
    return f"fold {row['fold']} of {num_folds}: {figures or 'not validated'}"


def print_folds(report: Dict[str, Any], folder: str, class_names: Sequence[str]) -> None:
    """The folds as a table on stdout.

    Args:
        report: what ``folds.json`` holds.
        folder: the cross-validation's.
        class_names: one per class.
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
    titles = _titles(class_names)
    for key, _, _ in columns:
        table.add_column(printable(titles[key]), justify="right")
    table.add_column("time", justify="right")
    for row in report["folds"]:
        cells = [
            text.format(row["validation"][key]) if row["validation"] else "-" for key, _, text in columns
        ]
        held_out = held_out_text(row["held_out"])
        table.add_row(str(row["fold"]), held_out, *cells, f"{row['train_s']:.0f} s")
    if len(report["folds"]) > 1 and columns:
        for name, values in (("mean", report["mean"]), ("std", report["std"])):
            table.add_row(name, "", *(_cell(values[key], text) for key, _, text in columns), "")
    out.print(table)
    trivial = [row["validation"].get("dice_all_foreground") for row in report["folds"] if row["validation"]]
    if trivial and None not in trivial:
        text = f"calling every pixel {class_names[-1]} scores a Dice of {sum(trivial) / len(trivial):.4f}"
        out.print(Text(printable(text)))
    if report["missing"]:
        out.print(Text(f"not trained: fold {', '.join(map(str, report['missing']))}"))
    example = report["folds"][0]["run"] if report["folds"] else "fold-1"
    out.print(
        Text(printable(f"saved in {folder}; evaluate one: ipucnn evaluate {folder}/{example}")),
        soft_wrap=True,
    )


def held_out_text(numbers: List[int]) -> str:
    """24-29 where the numbers follow each other, else how many there are."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    return f"{len(numbers)} examples"


def _cell(value: Optional[float], text: str) -> str:
    return "-" if value is None else text.format(value)
