"""Output of a suite: progress over its rows, one table, the total time of an epoch of all rows, and a figure."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ipucnn.benchmarking.suite_run import RowBegan, RowFinished
from ipucnn.events import Event, Note, Progress
from ipucnn.reports import units
from ipucnn.reports.console import (
    console,
    fact_table,
    plain_table,
    print_table,
)
from ipucnn.reports.figures import metadata_of
from ipucnn.text import counted, is_interactive, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase

    from ipucnn.benchmarking.records import Row, SuiteResult
    from ipucnn.benchmarking.suite_run import Speedups

_RATE = "measured\nimages/s"
# Marker and colour (Okabe and Ito's, also for colour-blind people) by micro-batch size, the smallest first.
_MARKS = (("o", "#0072b2"), ("s", "#d55e00"), ("^", "#009e73"), ("D", "#cc79a7"), ("v", "#56b4e9"))


class RowLines:
    """Describes the rows of a suite as they begin and end, with the time that the others may take."""

    def __init__(self) -> None:
        self._began, self._num_ended, self._left = time.monotonic(), 0, ""

    def take(self, item: Union[RowBegan, RowFinished]) -> Iterator[Event]:
        """Yields the progress of the suite, and the line of a finished row."""
        if isinstance(item, RowBegan):
            yield Progress(printable(item.name), item.position, item.total, self._left)
            return
        row, done = item.row, item.position + 1
        self._num_ended += 1
        seconds = (time.monotonic() - self._began) / self._num_ended * (item.total - done)
        self._left = f"about {units.duration(max(1.0, round(seconds)))} left" if done < item.total else ""
        line = f"[{done}/{item.total}] {row.id}: {_outcome(row)} ({units.duration(row.wall_s or 0.0)})"
        # The bar itself shows the time left.
        yield Note(f"{line}, {self._left}" if self._left and not is_interactive(sys.stderr) else line)
        yield Progress(printable(row.id), done, item.total, self._left)


def _outcome(row: Row) -> str:
    if row.status == "failed":
        return f"failed: {row.error}"
    text = f"{units.number(row.images_per_s)} images/s"
    return text + (f", accuracy {row.accuracy:.2%}" if row.accuracy is not None else "")


def columns(result: SuiteResult, compared: Speedups) -> Dict[str, List[str]]:
    """Returns column by title, without columns that are empty in all rows."""
    times = {row.id: speedup for row, speedup, _ in compared.pairs}
    is_ladder = any(row.training_accuracy is not None for row in result.rows)

    def above_one(number: Optional[int]) -> str:
        return str(number) if number is not None and number > 1 else ""

    def share(value: Optional[float]) -> str:
        return "" if value is None else f"{value:.2%}"

    def size(row: Row) -> str:
        sides = dict.fromkeys(side for side in (row.image_height, row.image_width) if side)
        return "x".join(map(str, sides))

    kinds: List[Tuple[str, bool, Callable[[Row], str]]] = [
        ("row", True, lambda row: printable(row.id)),
        ("batch", True, lambda row: str(row.micro_batch_size or "")),
        ("GA", True, lambda row: above_one(row.gradient_accumulation_count)),
        ("repl.", True, lambda row: above_one(row.num_replicas)),
        ("stages", True, lambda row: above_one(row.num_stages)),
        ("size", not is_ladder, size),
        (_RATE, True, lambda row: units.number(row.images_per_s) if row.status == "done" else row.status),
        ("measured\nstep", True, lambda row: units.seconds(row.step_s)),
        ("training\naccuracy", is_ladder, lambda row: share(row.training_accuracy)),
        ("held-out\naccuracy", is_ladder, lambda row: share(row.accuracy)),
        ("times\nKeras", True, lambda row: units.number(row.ratio_to_keras)),
        ("FLOP per\nparam.", not is_ladder, lambda row: units.number(row.flop_per_parameter)),
        ("predicted\nimages/s", True, lambda row: units.number(row.predicted_images_per_s)),
        ("speed-up", True, lambda row: units.number(times.get(row.id))),
    ]
    by_title = {title: [text(row) for row in result.rows] for title, is_shown, text in kinds if is_shown}
    return {title: cells for title, cells in by_title.items() if any(cells)}


def print_suite(result: SuiteResult, compared: Speedups) -> None:
    """Prints the table and the sums on stdout."""
    from rich.text import Text

    out = console(sys.stdout)
    cells = columns(result, compared)
    title = f"{result.suite}: {result.title}" if result.title not in ("", result.suite) else result.suite
    table = plain_table(title=title, padding=(0, 1, 0, 0))
    for index, name in enumerate(cells):
        table.add_column(name, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    for row in zip(*cells.values()):
        table.add_row(*map(Text, row))
    print_table(out, table)
    out.print(fact_table((name, printable(value)) for name, value in facts(result, compared)))


def facts(result: SuiteResult, compared: Speedups) -> List[Tuple[str, str]]:
    """Returns the conditions and totals of the table, as (name, value)."""
    done = [row for row in result.rows if row.status == "done"]
    machine = result.machine
    rows = [("suite", result.about)] if result.about else []
    rows += [
        ("rows", f"{len(done)} of {len(result.rows)} measured, each in a process of its own"),
        ("device", f"{machine.cpu}, {counted(machine.num_cores, 'core')}; TensorFlow {machine.tensorflow}"),
    ]
    data = dict.fromkeys(row.data for row in done if row.data)
    rows += [("data", ", ".join(data))] if data else []
    timed = [row.epoch_s for row in done if row.epoch_s is not None]
    if timed:
        images = counted(result.epoch_images or 0, "image")
        what = f"one epoch of {images} on each of {counted(len(timed), 'training row')}, one after the other"
        rows.append(("total epoch time", f"measured {units.duration(math.fsum(timed))}: {what}"))
        if compared.first_s and compared.second_s:
            those = f"{compared.second}: {units.duration(compared.second_s)} for those that have a figure"
            rows.append(("", f"{those}, which take {units.duration(compared.first_s)} here"))
    if compared.pairs:
        rows.append(("speed-up", f"of {compared.second} over what is measured here"))
        without = len(done) - len(compared.pairs)
        rows += [("", f"{without} of the measured rows have nothing to compare with")] if without else []
    ids_by_note: Dict[str, List[str]] = {}
    for row in result.rows:
        for text in row.notes:
            ids_by_note.setdefault(text, []).append(row.id)
    for text, ids in ids_by_note.items():
        more = f" and {len(ids) - 2} more" if len(ids) > 2 else ""
        which = "all rows" if len(ids) == len(result.rows) else ", ".join(ids[:2]) + more
        rows.append(("note", f"{which}: {text}"))
    rows += [("failed", f"{row.id}: {row.error}") for row in result.rows if row.status == "failed"]
    return rows


def print_plan(plan: SuiteResult, as_json: bool) -> None:
    """Prints the rows that would run, for ``--print-config``."""
    if as_json:
        rows = [{"id": row.id, "command": shlex.split(row.command)} for row in plan.rows]
        print(json.dumps({"suite": plan.suite, "rows": rows}, indent=2))
        return
    from rich.text import Text

    table = plain_table()
    table.add_column("row", overflow="fold")
    table.add_column("ipucnn ...", overflow="fold")
    for row in plan.rows:
        table.add_row(Text(row.id), Text(printable(row.command)))
    console(sys.stdout).print(table)


def points(compared: Speedups) -> List[Tuple[Row, float, Optional[int]]]:
    """Returns the pairs in the figure: networks of known arithmetic, except those of a ladder of steps."""
    return [
        pair for pair in compared.pairs if pair[0].flop_per_parameter and pair[0].training_accuracy is None
    ]


def draw_speedups(compared: Speedups, suffix: str, path: Path) -> None:
    """Draws speed-up against arithmetic intensity, forward and training side by side.

    Args:
        compared: speed-ups with at least one pair.
        suffix: ".png" or ".svg".
        path: file to write, of any name.
    """
    from ipucnn.sessions.host.environment import import_matplotlib

    matplotlib = import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pairs = points(compared)
    panels = [(name, [p for p in pairs if p[0].mode == name]) for name in ("inference", "training")]
    panels = [panel for panel in panels if panel[1]]
    batches = sorted({row.micro_batch_size or 0 for row, _, _ in pairs})
    # Ids in SVG are random without a salt; with it, the same figure has the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "ipucnn", "svg.fonttype": "path"}):
        figure = Figure(figsize=(7.6 * len(panels), 7.2), dpi=110)
        renderer = FigureCanvasAgg(figure).get_renderer()  # it measures texts, in an SVG, too
        axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        for axis, (name, shown) in zip(axes, panels):
            axis.set(xscale="log", yscale="log", title=name, ylabel="times as fast (speed-up)")
            axis.set_xlabel("arithmetic intensity: FLOP per parameter, forward pass of one micro-batch")
            axis.grid(which="major", alpha=0.3)
            axis.axhline(1.0, color="black", linewidth=1.2, linestyle="--", zorder=1)
            for row, times, ipus in shown:
                marker, colour = _MARKS[batches.index(row.micro_batch_size or 0) % len(_MARKS)]
                face = "white" if (ipus or 1) > 1 else colour
                x = row.flop_per_parameter
                axis.scatter([x], [times], s=26, marker=marker, c=face, edgecolors=colour, zorder=3)
        handles = [
            matplotlib.lines.Line2D([], [], color=colour, marker=marker, linestyle="", label=f"batch {batch}")
            for batch, (marker, colour) in zip(batches, _MARKS)
        ]
        figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False)
        title = f"How many times as fast: {compared.second}, compared with what is measured here"
        hollow = " (hollow: more than one IPU)" if any((ipus or 1) > 1 for _, _, ipus in pairs) else ""
        figure.suptitle((title + hollow).replace("$", r"\$"), fontsize=12, wrap=True)
        figure.tight_layout(rect=(0, 0.035, 1, 0.98))
        for axis, (_, shown) in zip(axes, panels):
            names = [(row.name, (row.flop_per_parameter or 0.0, times)) for row, times, _ in shown]
            _name_points(axis, renderer, names)
        figure.savefig(str(path), format=suffix.lstrip("."), metadata=metadata_of(suffix), dpi=110)


def _name_points(
    axes: Axes, renderer: RendererBase, points: Sequence[Tuple[str, Tuple[float, float]]]
) -> None:
    """Names points, each at the nearest place that covers no point or name; a line leads to one that is farther off."""
    places = [axes.transData.transform(place) for _, place in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    frame = axes.get_window_extent(renderer)
    for name, place in sorted(points, key=lambda point: point[1]):
        text = axes.annotate(name, place, (0, 0), textcoords="offset points", fontsize=7)
        extent = text.get_window_extent(renderer)
        x, y = axes.transData.transform(place)
        box = (0.0, 0.0, 0.0, 0.0)
        for distance, angle in itertools.product((6, 14, 24, 36, 50, 66), range(30, 390, 30)):
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            left = x + distance * across - (extent.width if across < 0 else 0)
            low = y + distance * up - extent.height / 2
            box = (left, low, left + extent.width, low + extent.height)
            is_inside = frame.x0 < box[0] and box[2] < frame.x1 and frame.y0 < box[1] and box[3] < frame.y1
            if is_inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        text.remove()
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": "0.5"} if distance > 6 else None
        pixels = 72 / axes.figure.dpi
        offset = ((box[0] - x) * pixels, (box[1] - y) * pixels)
        axes.annotate(name, place, offset, textcoords="offset points", fontsize=7, arrowprops=line)


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
