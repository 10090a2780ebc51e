"""Output of ``ipucnn runs``, ``diff`` and ``plot``, and the page of a run.

The page (``report.html`` in the run folder, from ``run.html.j2``) is self-contained: figures are inline SVG, and its
style is that of a plan's page.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.aliases import PlainValue
from ipucnn.filesystem import read_bytes
from ipucnn.reports import units
from ipucnn.reports.console import NUMBER, TEXT, console, plain_table, print_table, text_table
from ipucnn.reports.figures import label, new_figure, save_figure
from ipucnn.runs.compare import FIGURES, RunRecord, data_label, read_run
from ipucnn.runs.folder import PAGE, PREDICTIONS, REPORT
from ipucnn.runs.records import Evaluation, Report
from ipucnn.text import counted, distinguishable, printable, shown_value

if TYPE_CHECKING:
    from markupsafe import Markup
    from rich.table import Table

    from ipucnn.runs.train import TrainingRun
    from ipucnn.runs.writer import RunWriter

TEMPLATE = "run.html.j2"
_MOST_PICTURE_BYTES = 16 * 2**20
MOST_CLASSES = 100
"""The largest number of classes for which a page has a confusion matrix."""


# --- the list


_LIST = {
    "run": TEXT,
    "network": TEXT,
    "data set": TEXT,
    "best": NUMBER,
    "state": TEXT,
    "updates": NUMBER,
    "time": NUMBER,
    "size": NUMBER,
    "age": NUMBER,
}
# Columns that a narrow terminal leaves out, in this order.
_LEFT_OUT = ("age", "size", "time", "network", "updates", "data set")


def print_runs(rows: List[Dict[str, PlainValue]]) -> None:
    """Prints runs as a table on stdout, with as many columns as fit without cutting the names of folders."""
    print_table(
        console(sys.stdout), text_table(_LIST, map(_cells, rows), whole_numbers=True), left_out=_LEFT_OUT
    )


def _cells(row: Dict[str, PlainValue]) -> List[str]:
    total = row["num_weight_updates"]
    cells = (
        row["run"],
        row["model"],
        row["dataset"] or "",
        "" if row["value"] is None else _best_text(row["figure"], row["value"], row["class"]),
        row["state"],
        f"{row['weight_updates']:,}" + ("" if total is None else f"/{total:,}"),
        units.duration(row["time_s"]),
        units.mebibytes(row["size_bytes"]),
        "" if row["age_s"] is None else _age(row["age_s"]),
    )
    return list(map(printable, cells))


def _best_text(figure: str, value: float, of_class: Optional[str]) -> str:
    if figure != "dice":
        return f"{value:.2%}"
    return f"mean Dice {value:.4f}" if of_class is None else f"Dice of {of_class} {value:.4f}"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return counted(int(seconds // size), unit)
    return "now"


# --- the differences


def print_diff(differences: Dict[str, PlainValue]) -> None:
    """Prints the differences of two runs as tables on stdout, and the conclusion in the last line."""
    from rich.text import Text

    out = console(sys.stdout)
    for name in ("options", "places", "program", "data", "versions"):
        # The run folders are left out, because they are the headings of the columns.
        rows = {key: values for key, values in differences[name].items() if values != differences["runs"]}
        if rows:
            out.print(
                _pairs({"places": "without effect on the result"}.get(name, name), differences["runs"], rows)
            )
    out.print(_pairs("at the end", differences["runs"], differences["final"]))
    history = differences["history"]
    if history is not None:
        figures = {name: _distinct(*values) for name, values in history["figures"].items()}
        out.print(_pairs(f"the first row that differs ({history['event']})", differences["runs"], figures))
    for line in _conclusions(differences):
        out.print(Text(printable(line)))


def _pairs(title: str, runs: Sequence[str], pairs: Dict[str, List[PlainValue]]) -> Table:
    from rich.text import Text

    table = plain_table(title=title)
    for heading in ("", *runs):
        table.add_column(printable(heading), overflow="fold")
    for name, values in pairs.items():
        table.add_row(*(Text(printable(cell)) for cell in (name, *map(_value, values))))
    return table


def _value(value: PlainValue) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else shown_value(json.dumps(value))


def _conclusions(differences: Dict[str, PlainValue]) -> List[str]:
    history = differences["history"]
    if history is not None:
        after, until = history["after"], history["weight_updates"]
        first = (
            f"at weight update {until}"
            if until - after <= 1
            else f"between weight updates {after + 1:,} and {until:,}, one row of the history"
        )
        lines = [f"the histories first differ {first}"]
    elif differences["compared"]:
        rows = "the one row" if differences["compared"] == 1 else f"all {differences['compared']:,} rows"
        lines = [f"the histories have the same bytes in {rows} that both have"]
    else:
        lines = ["the histories have no row in common"]
    if None in differences["data_sha256"]:
        lines.append("whether the samples are the same is not known: a run has no checkpoint that says it")
    if differences["equal"]:
        lines.append("equal")
    else:
        parts = [name for name in ("options", "program", "data") if differences[name]]
        parts += ["histories"] if history is not None else []
        lines.append(f"different: {', '.join(parts)}" if parts else _unknown_equality(differences))
    return lines


def _unknown_equality(differences: Dict[str, PlainValue]) -> str:
    """Returns the conclusion for two runs without a difference that are not known to be equal."""
    if not differences["compared"]:
        return "not comparable"
    fewest, most = sorted(differences["final"]["weight updates"])
    if differences["warnings"]:
        return "equal as far as can be read"
    if fewest < most:
        return f"equal as far as both go ({fewest:,} of {most:,} weight updates)"
    if differences["rows"] != [differences["compared"]] * 2:
        common, most = differences["compared"], max(differences["rows"])
        return f"equal as far as both go ({common:,} of {most:,} rows of the history)"
    return "equal as far as is known: of the samples it is not"


def _distinct(*values: PlainValue) -> List[Any]:
    """Formats two values with the fewest digits that distinguish them, but at least four."""
    if all(isinstance(value, float) for value in values):
        return distinguishable(*values, digits=4)
    return list(map(repr, values)) if None not in values else list(values)


# --- curves


class Curve(NamedTuple):
    """A line of a figure: its name, its points (epoch or weight update, value), and whether it is of validations."""

    name: str
    points: List[Tuple[float, float]]
    is_validation: bool


def _curves(run: RunRecord, figure: str) -> List[Curve]:
    """Returns the curves of training and validation for one figure, over epochs if the Program has their length."""
    per_epoch = run.program.get("weight_updates_per_epoch") or 1
    curves = []
    for event, is_validation in (("execution", False), ("validation", True)):
        points = [
            (row["weight_updates"] / per_epoch, float(row[figure]))
            for row in run.rows(event)
            if isinstance(row.get(figure), (int, float))
        ]
        if points:
            curves.append(Curve("validation" if is_validation else "training", points, is_validation))
    return curves


def _figures_of(runs: Sequence[RunRecord]) -> List[Tuple[str, str]]:
    """Returns (key, title) of the figures to draw: loss, Dice or accuracy, and learning rate."""
    has_dice = any("dice" in row for run in runs for row in run.rows("validation"))
    main = "dice" if has_dice else "accuracy"
    return [("loss", "loss"), (main, "Dice" if has_dice else "accuracy"), ("learning_rate", "learning rate")]


def draw_curves(runs: Sequence[RunRecord], path: Path, suffix: str) -> None:
    """Draws the curves of runs into one picture: training dashed, validation solid, a colour for each run.

    Args:
        runs: the runs.
        path: the file to write; its name does not decide the format.
        suffix: the format: ".png", ".pdf" or ".svg".
    """
    picture = new_figure(13, 4.2)
    figures = _figures_of(runs)
    for axis, (key, title) in zip(picture.subplots(1, len(figures)), figures):
        for number, run in enumerate(runs):
            for curve in _curves(run, key):
                name = run.path.name if len(runs) > 1 else curve.name
                axis.plot(
                    *zip(*curve.points),
                    color=f"C{number % 10}",
                    linestyle="-" if curve.is_validation or key == "learning_rate" else "--",
                    marker="o" if len(curve.points) == 1 else "",
                    fillstyle="full" if curve.is_validation else "none",
                    label=label(printable(name)),
                )
        axis.set(xlabel="epoch", ylabel=title)
        values = [y for run in runs for curve in _curves(run, key) for _, y in curve.points]
        if key == "loss" and values and 0 < 10 * min(values) < max(values):
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    handles, labels = picture.axes[1].get_legend_handles_labels()
    shown = dict(zip(labels, handles))  # one line per label; for two curves of a run, that of validation
    picture.legend(shown.values(), shown.keys(), loc="lower center", ncol=min(len(shown), 4) or 1)
    how = "training dashed, validation solid"
    picture.suptitle(
        f"{runs[0].config.model_name}: {how}" if len(runs) == 1 else f"{counted(len(runs), 'run')}: {how}"
    )
    save_figure(picture, path, suffix, bottom=0.06 * (1 + (len(shown) - 1) // 4))


# --- the page

_WIDTH, _HEIGHT = 520.0, 260.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 14.0, 12.0, 40.0


class PageContent(NamedTuple):
    """The content of a page, as the template takes it."""

    title: str
    subtitle: str
    cards: List[Tuple[str, str, str]]
    remarks: List[str]
    curves: List[Tuple[str, Markup]]
    classes: Optional[Markup]
    counted: str
    evaluated: str
    masks: str
    program: List[Tuple[str, str]]
    machine: List[Tuple[str, str]]
    commands: List[str]
    policy: str


def write_page(folder: RunWriter, evaluation: Optional[Evaluation] = None) -> None:
    """Writes the page of a run into its folder; see :func:`run_page`."""
    if folder.writes:
        page = run_page(read_run(folder.path), evaluation).encode("utf-8")
        folder.write_file(PAGE, lambda path: path.write_bytes(page))


def write_page_of(run: TrainingRun) -> None:
    """Writes the page of a finished run, unless it has one already."""
    folder = run.context.folder
    if (folder.path / REPORT).is_file() and not (folder.path / PAGE).is_file():
        write_page(folder)


def run_page(run: RunRecord, evaluation: Optional[Evaluation] = None) -> str:
    """Returns the page of a run that ended, as HTML.

    Args:
        run: the run.
        evaluation: the result of ``ipucnn evaluate``, for the confusion matrix; None: the page has none.
    """
    from ipucnn.reports.plan_html import page_environment

    environment = page_environment()
    environment.globals.update(page=_facts(run, evaluation))
    return str(environment.get_template(TEMPLATE).render())


def _facts(run: RunRecord, evaluation: Optional[Evaluation]) -> PageContent:
    report = run.report
    best, validations = run.best(), run.rows("validation")
    dataset = data_label(run.config.dataset, run.config.dataset_path) or (report and report.dataset.name)
    cards = []
    if best is not None:
        cards.append(
            (f"best validation {best[0]}", _best_text(*best, run.dice_class()), "of all validations")
        )
    if validations:
        last = validations[-1]
        when = f"after {counted(last['weight_updates'], 'weight update')}"
        cards.append(("validation loss", f"{last['loss']:.4f}", when))
    progress = (report and report.ended_early) or counted(run.weight_updates, "weight update")
    cards.append(("state", run.state, progress))
    if report is not None:
        measured, device = report.measured, report.compilation.device
        continued = measured.first_weight_update
        part = f"since weight update {continued:,}" if continued else "from start to end"
        if measured.images_per_s:
            cards.append(("throughput", f"{units.rate(measured.images_per_s)} images/s", f"on {device.name}"))
        cards.append(("time", units.duration(measured.wall_s), part))
    names = ("cpu", "threads", "platform", "tensorflow", "keras", "numpy", "python", "ipucnn")
    return PageContent(
        title=f"{run.config.model_name} on {dataset}",
        subtitle=f"run {run.path.name}, seed {run.program.get('seed')}; measured, not predicted",
        cards=cards,
        remarks=[] if report is None else [printable(line) for line in _remarks(report)],
        curves=[(title, _svg(run, key, title)) for key, title in _figures_of([run]) if _curves(run, key)],
        classes=None if evaluation is None else _confusion(evaluation),
        counted="" if evaluation is None else _counted(evaluation) + "s",
        evaluated="" if evaluation is None else _evaluated(evaluation),
        masks=_picture(run.path / PREDICTIONS),
        program=[
            (name.replace("_", " "), _shown(value))
            for name, value in sorted(run.program.items())
            if value  # 0 and empty: the run does not use the setting
        ],
        machine=[(name, _value(run.environment.get(name))) for name in names],
        commands=[printable(str(process["command"])) for process in run.processes if "command" in process],
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    )


def _remarks(report: Report) -> List[str]:
    """Returns what was taken, left out, assumed and converted, as the run said."""
    choice = [f"{report.dataset.name}: {report.dataset.choice}"] if report.dataset.choice else []
    return [*choice, *report.dataset.warnings, *report.notes]


def _picture(path: Path) -> str:
    """Returns a picture as a data URL; empty if there is no picture."""
    if not path.is_file():
        return ""
    return "data:image/png;base64," + base64.b64encode(read_bytes(path, _MOST_PICTURE_BYTES)).decode()


def _svg(run: RunRecord, key: str, title: str) -> Markup:
    """Draws one figure over epochs: training in the colour of forward passes, validation in that of backward passes."""
    from ipucnn.reports import plan_figures as draw

    curves = _curves(run, key)
    values = [y for curve in curves for _, y in curve.points]
    end = max(x for curve in curves for x, _ in curve.points) or 1.0
    top = 1.0 if key in FIGURES else max(values) * 1.05 or 1.0
    bottom = _HEIGHT - _BOTTOM

    def x(epoch: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * epoch / end

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * min(max(value / top, 0.0), 1.0)

    marks: List[Markup] = []
    for tick in draw.nice_ticks(top, 5):
        marks.append(draw.line(_LEFT, y(tick), _WIDTH - _RIGHT, y(tick), "grid"))
        marks.append(draw.text(_LEFT - 6, y(tick) + 4, f"{tick:.4g}", "small end"))
    for tick in draw.nice_ticks(end, 6):
        marks.append(draw.line(x(tick), bottom, x(tick), bottom + 5, "axis"))
        marks.append(draw.text(x(tick), bottom + 18, f"{tick:.4g}", "small middle"))
    marks.append(draw.line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "axis"))
    marks.append(draw.text(_WIDTH / 2, _HEIGHT - 4, "epoch", "small middle"))
    for curve in curves:
        class_ = "curve validation" if curve.is_validation else "curve training"
        points = " ".join(f"{x(a):.2f},{y(b):.2f}" for a, b in curve.points)
        marks.append(draw.element("polyline", points=points, class_=class_))
        for a, b in curve.points if len(curve.points) <= 60 else ():
            tip = draw.element("title", f"{curve.name}, epoch {a:.4g}: {b:.6g}")
            marks.append(draw.element("circle", tip, cx=x(a), cy=y(b), r=3.0, class_=class_ + " mark"))
    about = ", ".join(f"{curve.name} ends at {curve.points[-1][1]:.4g}" for curve in curves)
    return draw.svg(key.replace("_", "-"), title, about, _HEIGHT, marks, _WIDTH)


def _evaluated(evaluation: Evaluation) -> str:
    number, data = sum(map(sum, evaluation.confusion_matrix)), evaluation.dataset
    label = data_label(data.name, Path(data.location))
    text = f"{counted(number, _counted(evaluation))} of {label}, checkpoint {evaluation.checkpoint}"
    if evaluation.task == "segmentation":
        dice, iou = (f"{evaluation.measured[key]:.4f}" for key in ("dice", "iou"))
        background, *foreground = [row.name for row in evaluation.classes]
        if len(foreground) == 1:
            text += f"; Dice of {foreground[0]} {dice}, IoU {iou}"
        else:
            text += f"; mean Dice {dice} and IoU {iou}, without {background}"
    return printable(text)


def _counted(evaluation: Evaluation) -> str:
    return "pixel" if evaluation.task == "segmentation" else "sample"


def _shown(value: PlainValue) -> str:
    """Returns a value of the Program as text; counts have separators of thousands."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else _value(value)


# Percentage of the colour of a cell that has all samples of its class; text on it has a contrast of 4.5 and more.
_DARKEST = 40


def _confusion(evaluation: Evaluation) -> Optional[Markup]:
    """Returns the confusion matrix as a table; None for more than MOST_CLASSES classes.

    Each cell is shaded by its share of the true class.
    """
    from ipucnn.reports import plan_figures as draw

    counts, names = evaluation.confusion_matrix, [row.name for row in evaluation.classes]
    if len(names) > MOST_CLASSES:
        return None
    cell: Callable[..., Markup] = draw.element
    columns = [cell("th", name, scope="col", class_="n") for name in names]
    head = cell("tr", cell("th", "true \\ predicted", scope="col"), *columns)
    rows = []
    for name, row in zip(names, counts):
        total = max(sum(row), 1)
        cells = [
            cell("td", f"{count:,}", class_="n", style=f"--share: {_DARKEST * count / total:.0f}%")
            for count in row
        ]
        rows.append(cell("tr", cell("th", name, scope="row"), *cells))
    return cell("table", cell("thead", head), cell("tbody", *rows), class_="confusion")
