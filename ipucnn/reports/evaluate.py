"""What ``ipucnn evaluate`` shows: figures, classes, and which classes are taken for which."""

import json
import sys
from typing import Any, Dict, List, Optional, Tuple

from ipucnn.reports import units
from ipucnn.reports.console import console

MOST_CLASSES = 20
"""Classes listed one by one; of more, those with the lowest accuracy."""
WORST = 10


def evaluation_json(result: Dict[str, Any]) -> str:
    """The result as indented JSON, the confusion matrix with one line per true class."""
    rows = ",\n".join("    " + json.dumps(row) for row in result["confusion_matrix"])
    parts = []
    for key, value in result.items():
        # Lines of the other values move in by the two blanks of the object around them.
        text = (
            f"[\n{rows}\n  ]"
            if key == "confusion_matrix"
            else json.dumps(value, indent=2).replace("\n", "\n  ")
        )
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"


def plain_table(**details: Any) -> Any:
    """A table with a line below its head and nothing else."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, **details)


def titled(title: str, table: Any) -> Any:
    """A title above a table; Rich's own is wrapped to the table's width."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table)


def print_evaluation(result: Dict[str, Any]) -> None:
    """The evaluation as tables on stdout."""
    out = console(sys.stdout)
    out.print(_figures(result))
    out.print(_classes(result))
    matrix = _confusion_matrix(result)
    if matrix is None or _width(matrix, out) > out.width:
        matrix = _worst_pairs(result)
    if matrix is not None:
        out.print(matrix)


def _figures(result: Dict[str, Any]) -> Any:
    from rich.text import Text

    measured, data = result["measured"], result["dataset"]
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    segments = result["task"] == "segmentation"
    rows = [
        ("samples seen", _samples_seen(measured["samples"], data)),
        ("loss", f"{measured['loss']:.4f}"),
        ("pixel accuracy" if segments else "top-1 accuracy", f"{measured['accuracy']:.2%}"),
    ]
    if segments:
        rows.append(("Dice, IoU", f"{measured['dice']:.4f}, {measured['iou']:.4f}"))
    else:
        rows.append(("top-5 accuracy", f"{measured['top5']:.2%}"))
    calibration = f"{measured['calibration_error']:.4f} (ECE, {len(result['calibration'])} bins)"
    rows.append(("calibration error", calibration))
    rows.append(("time", f"{units.duration(measured['wall_s'])}, measured on {result['device'].upper()}"))
    updates = result["weight_updates"]
    checkpoint = result["checkpoint"] + ("" if updates is None else f" ({updates} weight updates)")
    rows.append(("weights" if updates is None else "checkpoint", checkpoint))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    return titled(f"{result['model']} on {data['name']} ({data['location']})", table)


def _samples_seen(seen: int, data: Dict[str, Any]) -> str:
    text = f"{seen} of {data['size']}"
    stored = data["stored"]
    return text if stored == data["size"] else f"{text} (--limit-eval; the data set has {stored})"


def _percent(share: Optional[float]) -> str:
    return "" if share is None else f"{share:.2%}"


def _classes(result: Dict[str, Any]) -> Any:
    """A row per class, or the classes of the lowest accuracy where there are many."""
    from rich.text import Text

    segments = result["task"] == "segmentation"
    classes = result["classes"]
    title = "classes"
    if len(classes) > MOST_CLASSES:
        known = [row for row in classes if row["accuracy"] is not None]
        shown = sorted(known, key=lambda row: (row["accuracy"], row["class"]))[:WORST]
        title = f"the {len(shown)} of {len(classes)} classes with the lowest accuracy"
        if len(known) < len(classes):
            title += f" ({len(classes) - len(known)} have no samples)"
    else:
        shown = classes
    table = plain_table()
    table.add_column("class", overflow="fold")
    table.add_column("pixels" if segments else "samples", justify="right")
    table.add_column("accuracy", justify="right")
    table.add_column("precision", justify="right")
    if segments:
        table.add_column("IoU", justify="right")
    else:
        table.add_column("most often taken for", overflow="fold")
    for row in shown:
        cells = [str(row["count"]), _percent(row["accuracy"]), _percent(row["precision"])]
        cells.append(_percent(row["iou"]) if segments else _most_often(result, row["class"]))
        table.add_row(Text(row["name"]), *(Text(cell) for cell in cells))
    return titled(title, table)


def _most_often(result: Dict[str, Any], true: int) -> str:
    """The class that samples of ``true`` are most often mistaken for."""
    row = result["confusion_matrix"][true]
    wrong = [(count, -i) for i, count in enumerate(row) if i != true and count]
    if not wrong:
        return ""
    count, negative = max(wrong)
    return f"{result['classes'][-negative]['name']} ({count})"


def _confusion_matrix(result: Dict[str, Any]) -> Any:
    """The whole matrix as a table, rows true and columns predicted; None for very many classes."""
    from rich.text import Text

    names = [row["name"] for row in result["classes"]]
    counts = result["confusion_matrix"]
    if len(names) > 100:
        return None
    widest = max(len(str(count)) for row in counts for count in row)
    short = max(len(name) for name in names) <= max(widest, 3)
    table = plain_table(padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for i, name in enumerate(names):
        table.add_column(Text(name if short else str(i)), justify="right", no_wrap=True)
    for i, (name, row) in enumerate(zip(names, counts)):
        cells = [
            Text(str(count) if count else "·", style="bold" if i == j else "" if count else "dim")
            for j, count in enumerate(row)
        ]
        table.add_row(Text(name if short else f"{i} {name}"), *cells)
    return titled("confusion matrix: rows true, columns predicted", table)


def _width(table: Any, out: Any) -> int:
    """Columns a table takes where there is room for all of it."""
    from rich.measure import Measurement

    return int(Measurement.get(out, out.options.update(width=100_000), table).maximum)


def _worst_pairs(result: Dict[str, Any]) -> Any:
    """The pairs of classes that are confused most often; None if none is."""
    from rich.text import Text

    pairs = worst_pairs(result["confusion_matrix"])
    if not pairs:
        return None
    classes = result["classes"]
    table = plain_table()
    table.add_column("true", overflow="fold")
    table.add_column("predicted", overflow="fold")
    table.add_column("pixels" if result["task"] == "segmentation" else "samples", justify="right")
    table.add_column("of the true class", justify="right")
    for count, true, predicted in pairs:
        share = count / classes[true]["count"]
        names = (Text(classes[true]["name"]), Text(classes[predicted]["name"]))
        table.add_row(*names, str(count), f"{share:.2%}")
    return titled(f"the {len(pairs)} pairs of classes confused most often", table)


def worst_pairs(matrix: List[List[int]]) -> List[Tuple[int, int, int]]:
    """(count, true, predicted) of the most frequent mistakes, at most ten, the most frequent first."""
    cells = (
        (count, true, predicted)
        for true, row in enumerate(matrix)
        for predicted, count in enumerate(row)
        if count and true != predicted
    )
    return sorted(cells, key=lambda cell: (-cell[0], cell[1], cell[2]))[:WORST]
