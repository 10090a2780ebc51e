"""What a suite shows: progress over its rows, one table, the time of an epoch of all of them."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from ipucnn.reports import units
from ipucnn.reports.console import (
    COUNT,
    SHORT_BAR,
    ProgressBar,
    console,
    fact_table,
    plain_table,
)
from ipucnn.text import counted, printable

if TYPE_CHECKING:
    from ipucnn.benchmarking.records import Row, SuiteResult
    from ipucnn.benchmarking.suites.plan import SuitePlan
    from ipucnn.benchmarking.suites.result import Speedups

_RATE = "measured\nimages/s"
# Columns that a narrow terminal goes without, in the order in which they are left out.
_SPARE = (
    "FLOP per\nparam.",
    "predicted\nimages/s",
    "measured\nstep",
    "predicted\nstep",
    "times\nKeras",
    "size",
    "repl.",
    "stages",
    "GA",
)
# Of these, the ones that stay where they tell rows apart.
_TELLING = ("size", "repl.", "stages", "GA")
# Options with a column of their own.
_COLUMN_OPTIONS = ("micro-batch-size", "gradient-accumulation-count", "num-replicas", "image-size")
# Between columns: a space and the box's.
_GAP = 2
_SHORT = {"inference": "infer", "training": "train", "fit": "fit"}


class SuiteProgress(ProgressBar):
    """A bar over rows on a terminal, with the time left; in a pipe a line for each finished row.

    Args:
        done, total: rows finished before, and in all.
    """

    def __init__(self, done: int, total: int) -> None:
        self._done, self._first, self._total = done, done, total
        self._began = time.monotonic()

    def __enter__(self) -> SuiteProgress:
        if self._done < self._total:
            columns = (COUNT, SHORT_BAR, "{task.fields[left]}", "{task.description}")
            self._start(columns, self._total, completed=self._done, left="")
        return self

    def update(self, what: str, done: int, of: int, figures: str) -> None:
        """Progress within a row."""
        self._update(description=printable(f"{what} {figures}"))

    def row(self, done: int, total: int, row: Row) -> None:
        """A row has finished."""
        self._done = done
        left = self._left()
        line = f"[{done}/{total}] {row.id}: {_outcome(row)} ({units.duration(row.wall_s or 0.0)})"
        # The bar itself says what is left.
        self.line(line + (f", {left}" if left and self._bar is None else ""))
        self._update(completed=done, left=left)

    def _left(self) -> str:
        finished = self._done - self._first
        if not finished or self._done >= self._total:
            return ""
        seconds = (time.monotonic() - self._began) / finished * (self._total - self._done)
        return f"about {units.duration(max(1.0, round(seconds)))} left"


def _outcome(row: Row) -> str:
    if row.status == "failed":
        return f"failed: {row.error}"
    text = f"{units.number(row.images_per_s)} images/s"
    return text + (f", accuracy {row.accuracy:.2%}" if row.accuracy is not None else "")


def _size(row: Row) -> str:
    if row.image_height is None:
        return ""
    height, width = row.image_height, row.image_width
    return f"{height}" if height == width else f"{height}x{width}"


def _predicted(row: Row, key: str) -> Optional[float]:
    return getattr(row.predicted[0], key) if row.predicted else None


def columns(result: SuiteResult, speedup: Speedups) -> Tuple[List[str], List[List[str]]]:
    """Titles and rows of the table; columns in which no row has anything are left out."""
    factors = {point.id: point.speedup for point in speedup.points}
    first = next((row.step_s for row in result.rows if row.step_s is not None), None)
    is_ladder = any(row.mode == "fit" for row in result.rows)
    labels = row_labels(result.rows)

    def faster(row: Row) -> str:
        return f"{units.number(first / row.step_s)}x" if first and row.step_s else ""

    kinds: List[Tuple[str, bool, Callable[[Row], str]]] = [
        ("row", True, lambda row: labels[row.id]),
        ("mode", not is_ladder, lambda row: _SHORT[row.mode]),
        ("batch", True, lambda row: str(row.micro_batch_size)),
        ("GA", True, lambda row: _above_one(row.gradient_accumulation_count)),
        ("repl.", True, lambda row: _above_one(row.num_replicas)),
        ("stages", True, lambda row: _above_one(row.num_stages)),
        ("size", not is_ladder, _size),
        (_RATE, True, lambda row: units.number(row.images_per_s)),
        ("measured\nstep", True, lambda row: units.seconds(row.step_s)),
        ("against\nthe first", is_ladder, faster),
        ("accuracy", is_ladder, lambda row: "" if row.accuracy is None else f"{row.accuracy:.2%}"),
        ("times\nKeras", True, lambda row: units.number(row.ratio_to_keras)),
        ("FLOP per\nparam.", not is_ladder, lambda row: units.number(row.flop_per_parameter)),
        ("predicted\nimages/s", True, lambda row: units.number(_predicted(row, "images_per_s"))),
        ("predicted\nstep", is_ladder, lambda row: units.seconds(_predicted_step(row))),
        ("speed-up", not is_ladder, lambda row: units.number(factors.get(row.id))),
    ]
    titles: List[str] = []
    cells: List[List[str]] = [[] for _ in result.rows]
    for title, wanted, text in kinds:
        if not wanted:
            continue
        column = [text(row) for row in result.rows]
        if not any(column) and title != _RATE:
            continue
        titles.append(title)
        for line, cell in zip(cells, column):
            line.append(cell)
    for line, row in zip(cells, result.rows):
        if row.status != "done":
            line[titles.index(_RATE)] = row.status
    return titles, cells


def row_labels(rows: List[Row]) -> Dict[str, str]:
    """What the table calls each row, by id: its name, and in lines below it what tells it from others of that name.

    These are the fewest options, shortest values first, that do, beside those that have a column of their own.
    """
    from ipucnn.benchmarking.suites.result import option_text

    labels = {}
    for name in dict.fromkeys(row.name for row in rows):
        same = [row for row in rows if row.name == name]
        texts = {key: [option_text(row, key) for row in same] for row in same for key in row.options}
        told: List[Tuple[Any, ...]] = [
            (row.mode, *(option_text(row, key) for key in _COLUMN_OPTIONS)) for row in same
        ]
        lines = [printable(str(name)) for _ in same]
        for key in sorted(texts, key=lambda key: max(map(len, texts[key]))):
            finer = [(*before, text) for before, text in zip(told, texts[key])]
            if key not in _COLUMN_OPTIONS and len(set(finer)) > len(set(told)):
                told = finer
                lines = [line + "\n" + printable(f"  {key} {text}") for line, text in zip(lines, texts[key])]
        labels.update({row.id: line for row, line in zip(same, lines)})
    return labels


def _fitting(titles: List[str], rows: List[List[str]], width: int) -> Tuple[List[str], List[List[str]]]:
    """Without the columns that a narrow terminal has no room for; the files have them all."""
    for spare in _SPARE:
        if _width(titles, rows) <= width:
            break
        if spare not in titles:
            continue
        place = titles.index(spare)
        if spare in _TELLING and len({row[place] for row in rows}) > 1:
            continue
        titles = titles[:place] + titles[place + 1 :]
        rows = [row[:place] + row[place + 1 :] for row in rows]
    return titles, rows


def _width(titles: List[str], rows: List[List[str]]) -> int:
    """How wide a table is in which no cell is broken."""
    widest = [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(titles, *rows)]
    return sum(widest) + _GAP * len(widest)


def _above_one(number: Optional[int]) -> str:
    return str(number) if number is not None and number > 1 else ""


def _predicted_step(row: Row) -> Optional[float]:
    """The predicted time of one micro-batch, which is what the measured step of a fit is."""
    rate = _predicted(row, "images_per_s")
    return row.micro_batch_size / rate if rate else None


def print_suite(result: SuiteResult, speedup: Speedups) -> None:
    """The table and the sums on stdout."""
    from rich.text import Text

    out = console(sys.stdout)
    titles, rows = _fitting(*columns(result, speedup), out.width)
    fits = _width(titles, rows) <= out.width
    title = f"{result.suite}: {result.title}" if result.title not in ("", result.suite) else result.suite
    table = plain_table(title=title, padding=(0, 1, 0, 0))
    for index, name in enumerate(titles):
        # Where nothing more can be left out, what tells rows apart is broken, and no figure.
        whole = fits or index > 0
        table.add_column(
            Text(name), justify="left" if index == 0 else "right", overflow="fold", no_wrap=whole
        )
    for cells in rows:
        table.add_row(*(Text(cell) for cell in cells))
    out.print(table)
    out.print(fact_table((name, printable(value)) for name, value in facts(result, speedup)))


def facts(result: SuiteResult, speedup: Speedups) -> List[Tuple[str, str]]:
    """What the table is of, as (name, value)."""
    done = [row for row in result.rows if row.status == "done"]
    machine = result.machine
    rows = [("suite", result.about)] if result.about else []
    rows += [
        (
            "rows",
            f"{len(done)} of {len(result.rows)} measured, each in a process of its own; seed {result.seed}",
        ),
        ("device", f"{machine.cpu}, {counted(machine.num_cores, 'core')}; TensorFlow {machine.tensorflow}"),
    ]
    data = dict.fromkeys(f"{row.data_kind} ({row.data_name})" for row in done)
    rows += [("data", ", ".join(data))] if data else []
    sizes = [n for row in done for n in (row.image_height, row.image_width) if n]
    if "image-size" in result.options and sizes:
        spread = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        rows.append(
            ("image size", f"set by --image-size {result.options['image-size']}; taken: {spread} pixels")
        )
    totals = result.totals
    if totals.measured_s is not None:
        missing = totals.num_rows - totals.num_measured
        count = f"{counted(totals.num_measured, 'training row')}" + (
            f" ({missing} more {'has' if missing == 1 else 'have'} no result)" if missing else ""
        )
        what = f"one epoch of {counted(totals.epoch_images or 0, 'image')} on each of {count}, one after the other"
        rows.append(("total epoch time", f"measured {units.duration(totals.measured_s)}: {what}"))
    both = speedup.totals
    if totals.measured_s is not None and both["second_s"] is not None:
        rows.append(
            (
                "",
                f"{speedup.second}: {units.duration(both['second_s'])} for {both['num_rows']} of them, "
                f"which take {units.duration(both['first_s'])} here",
            )
        )
    is_ladder = any(row.mode == "fit" for row in result.rows)
    if speedup.points and not is_ladder:
        rows.append(("speed-up", f"of {speedup.second} over {speedup.first}"))
        if speedup.differences:
            rows.append(("", f"the two differ in {_some(list(speedup.differences), 4)}"))
        if speedup.num_without:
            rows.append(("", f"{speedup.num_without} of the measured rows have nothing to compare with"))
    if is_ladder:
        rows.append(
            ("step", "one micro-batch, on whichever replica; the first epoch compiles and is not counted")
        )
    texts: Dict[str, List[str]] = {}
    for row in result.rows:
        for text in row.notes:
            if text not in (row.error, None):
                texts.setdefault(text, []).append(row.id)
    for text, ids in texts.items():
        which = "all rows" if len(ids) == len(result.rows) else _some(ids)
        rows.append(("note", f"{which}: {text}"))
    rows += [("failed", f"{row.id}: {row.error}") for row in result.rows if row.status == "failed"]
    return rows


def _some(names: List[str], count: int = 2) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def print_plan(plan: SuitePlan, as_json: bool) -> None:
    """The rows that would run, for ``--print-config``."""
    if as_json:
        print(json.dumps({"suite": plan.suite.name, "rows": [row.identity() for row in plan.rows]}, indent=2))
        return
    from rich.text import Text

    from ipucnn.config.options import SPECS
    from ipucnn.config.show import value_text

    out = console(sys.stdout)
    table = plain_table()
    short = max(len(row.id) for row in plan.rows) <= out.width // 2
    table.add_column("row", overflow="fold", no_wrap=short)
    table.add_column("mode", no_wrap=True)
    table.add_column("what differs from the defaults", overflow="fold")
    for row in plan.rows:
        given = [
            f"{spec.key} {value_text(spec, getattr(row.resolved.config, spec.name))}"
            for spec in SPECS
            if row.resolved.given(spec.name) or spec.name in ("model_name", "seed")
        ]
        what = row.mode if row.engine == "session" else f"{row.mode}, {row.engine}"
        table.add_row(Text(row.id), what, Text(", ".join(given)))
    out.print(table)
