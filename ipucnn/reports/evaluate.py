"""What ``ipucnn evaluate`` and ``ipucnn infer`` show."""

import sys
from typing import Any, Dict, List

from ipucnn.reports.console import console, human_time


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")


def print_evaluation(result: Dict[str, Any]) -> None:
    """The metrics of an evaluation on stdout."""
    from rich.text import Text

    measured, data = result["measured"], result["dataset"]
    table = _table(f"{result['model']} on {data['name']} ({data['location']})")
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    segments = "dice" in measured
    rows = [
        ("samples seen", f"{measured['samples']} of {data['size']}"),
        ("loss", f"{measured['loss']:.4f}"),
        ("pixel accuracy" if segments else "top-1 accuracy", f"{measured['accuracy']:.2%}"),
    ]
    if "top5" in measured:
        rows.append(("top-5 accuracy", f"{measured['top5']:.2%}"))
    if segments:
        rows.append(("Dice, IoU", f"{measured['dice']:.4f}, {measured['iou']:.4f}"))
    rows.append(("time", f"{human_time(measured['wall_s'])}, measured on {result['device'].upper()}"))
    rows.append(("checkpoint", f"{result['checkpoint']} ({result['weight_updates']} weight updates)"))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    console(sys.stdout).print(table)


def print_predictions(results: List[Dict[str, Any]]) -> None:
    """The predictions on stdout, one row per image and class."""
    from rich.text import Text

    table = _table("predictions")
    table.add_column("image", overflow="fold")
    table.add_column("label", overflow="fold")
    table.add_column("probability", justify="right")
    for result in results:
        for rank, prediction in enumerate(result["predictions"]):
            name = result["image"] if rank == 0 else ""
            table.add_row(Text(name), Text(prediction["label"]), f"{prediction['probability']:.2%}")
    console(sys.stdout).print(table)
