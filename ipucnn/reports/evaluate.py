"""Output of ``ipucnn evaluate``: figures, classes, and the classes that are confused.

For a segmentation network the figures stand beside those of a single class everywhere, and the worst images are listed
and drawn.  ``--plot`` draws the confusion matrix and a reliability diagram with matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Tuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ipucnn.aliases import PlainDict
from ipucnn.reports import units
from ipucnn.reports.console import (
    NUMBER,
    TEXT,
    console,
    fact_table,
    fits,
    plain_table,
    text_table,
    titled,
)
from ipucnn.reports.figures import label, new_figure, save_figure
from ipucnn.reports.sheets import PanelSheet, compared, legend_of_errors
from ipucnn.runs.evaluate import mean_dice
from ipucnn.runs.network_input import allowed_difference, compared_with, least_agreement, shape_text
from ipucnn.runs.records import Evaluation, plain
from ipucnn.text import counted, printable
from ipucnn.training.segment_scores import SCORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ipucnn.runs.images.segmentation import Segmented, SegmentedImage

MOST_CLASSES = 20
"""Most classes that are listed one by one; if there are more, only those with the lowest accuracy are."""
WORST = 10
WORST_IMAGES, WORST_DRAWN = 6, 12
"""Numbers of images of a segmentation with the lowest mean Dice that are listed and drawn."""
MOST_COLUMNS = 4
"""Most classes of a segmentation that get a column each in the table of the worst images."""
MOST_NUMBERS, MOST_NAMES = 15, 40
"""Most classes for which the figure's matrix has counts in its cells, and class names on its axes."""


def evaluation_json(result: Evaluation) -> str:
    """Returns the result as indented JSON, the confusion matrix with one line per true class."""
    rows = ",\n".join("    " + json.dumps(row) for row in result.confusion_matrix)
    parts = []
    for key, value in plain(result).items():
        # Further lines are indented by two blanks, because they are inside an object.
        text = (
            f"[\n{rows}\n  ]"
            if key == "confusion_matrix"
            else json.dumps(value, indent=2).replace("\n", "\n  ")
        )
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"


def print_export(record: PlainDict) -> None:
    """Prints the exported file, and the results of its verification."""
    verified, size = record["verification"], sum(file["bytes"] for file in record["files"].values())
    least = verified["wanted_samples"]
    few = "" if verified["samples"] >= least else f" (fewer than {least}: the data set has no more)"
    what = "pixels" if record["task"] == "segmentation" else "samples"
    described = record["input"]
    rows = [
        ("network", f"{record['model']}, weights of {record['weights']['checkpoint']}"),
        ("file", f"{record['folder']}/{record['file']}, {units.mebibytes(size)}"),
        ("input", f"{described['name']}, {described['dtype']}, {shape_text(described['shape'])}"),
        ("output", f"{record['output']['name']}, float32"),
        *(
            [("8-bit integers", f"calibrated with {record['calibration_images']:,} training inputs")]
            if record["int8"]
            else []
        ),
        ("loaded in", verified["runtime"]),
        ("samples run", f"{verified['samples']:,}: {verified['of']}{few}"),
        ("largest difference", allowed_difference(verified)),
        ("compared with", compared_with(verified)),
        ("same class", f"for {verified['agreement']:.2%} of the {what}{least_agreement(verified)}"),
    ]
    console(sys.stdout).print(fact_table(rows))


def print_evaluation(result: Evaluation) -> None:
    """Prints the evaluation as tables on stdout."""
    out = console(sys.stdout)
    title = f"{result.model} on {result.dataset.name} ({result.dataset.location})"
    if result.segmentation is not None:
        out.print(titled(title, Group(_mask_figures(result), fact_table(_mask_facts(result)))))
        out.print(_worst_images(result))
        return
    out.print(titled(title, fact_table(_facts(result))))
    out.print(_classes(result))
    matrix = _confusion_matrix(result)
    if matrix is None or not fits(matrix, out):
        matrix = _worst_pairs(result)
    if matrix is not None:
        out.print(matrix)


def _facts(result: Evaluation) -> List[Tuple[str, str]]:
    measured = result.measured
    top5 = [("top-5 accuracy", f"{measured['top5']:.2%}")] if "top5" in measured else []
    return [
        ("samples seen", _samples_seen(result)),
        ("loss", f"{measured['loss']:.4f}"),
        ("top-1 accuracy", f"{measured['accuracy']:.2%}"),
        *top5,
        (
            "calibration error",
            f"{measured['calibration_error']:.4f} (ECE, {len(result.calibration)} bins)",
        ),
        ("time", f"{units.duration(measured['wall_s'])}, measured on {result.device.upper()}"),
        _weights(result),
    ]


def _weights(result: Evaluation) -> Tuple[str, str]:
    """Returns the kind of the weights and their origin."""
    updates = result.weight_updates
    if updates is None:
        return "weights", result.checkpoint
    return "checkpoint", f"{result.checkpoint} ({counted(updates, 'weight update')})"


def _samples_seen(result: Evaluation) -> str:
    data = result.dataset
    text = f"{result.measured['samples']} of {data.size}"
    stored = data.stored
    return text if stored == data.size else f"{text} (--limit-eval; the data set has {stored})"


def _percent(share: Optional[float]) -> str:
    return "" if share is None else f"{share:.2%}"


def _score(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.4f}"


def _classes(result: Evaluation) -> Group:
    """Returns a table with a row per class; if there are many, only those with the lowest accuracy."""
    shown = classes = result.classes
    title = "classes"
    if len(classes) > MOST_CLASSES:
        known = [row for row in classes if row.accuracy is not None]
        shown = sorted(known, key=lambda row: (row.accuracy or 0.0, row.number))[:WORST]
        title = f"the {len(shown)} of {counted(len(classes), 'class')} with the lowest accuracy"
        if len(known) < len(classes):
            title += f" ({len(classes) - len(known)} have no samples)"
    columns = {
        "class": TEXT,
        "samples": NUMBER,
        "accuracy": NUMBER,
        "precision": NUMBER,
        "F1": NUMBER,
        "most often taken for": TEXT,
    }
    rows = (
        (
            row.name,
            str(row.count),
            _percent(row.accuracy),
            _percent(row.precision),
            _score(row.f1),
            _most_often(result, row.number),
        )
        for row in shown
    )
    return titled(title, text_table(columns, rows))


def _most_often(result: Evaluation, true: int) -> str:
    """Returns the class that samples of ``true`` are most often mistaken for."""
    row = result.confusion_matrix[true]
    wrong = [(count, -i) for i, count in enumerate(row) if i != true and count]
    if not wrong:
        return ""
    count, negative = max(wrong)
    return f"{result.classes[-negative].name} ({count})"


def _confusion_matrix(result: Evaluation) -> Optional[Group]:
    """Returns the whole matrix as a table, rows true and columns predicted; None for very many classes."""
    names = [row.name for row in result.classes]
    counts = result.confusion_matrix
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


def _worst_pairs(result: Evaluation) -> Optional[Group]:
    """Returns a table of the pairs of classes that are confused most often; None if there are none."""
    pairs, classes = worst_pairs(result.confusion_matrix), result.classes
    if not pairs:
        return None
    rows = (
        (
            classes[true].name,
            classes[predicted].name,
            str(count),
            f"{count / classes[true].count:.2%}",
        )
        for count, true, predicted in pairs
    )
    columns = {"true": TEXT, "predicted": TEXT, "samples": NUMBER, "of the true class": NUMBER}
    return titled(f"the {len(pairs)} pairs of classes confused most often", text_table(columns, rows))


def worst_pairs(matrix: List[List[int]]) -> List[Tuple[int, int, int]]:
    """Returns (count, true, predicted) of at most ten mistakes, the most frequent first."""
    cells = (
        (count, true, predicted)
        for true, row in enumerate(matrix)
        for predicted, count in enumerate(row)
        if count and true != predicted
    )
    return sorted(cells, key=lambda cell: (-cell[0], cell[1], cell[2]))[:WORST]


# --- masks


def _mask_figures(result: Evaluation) -> Table:
    """Returns a table of figures, with the baseline's beside them, and of the challenge's scores, if any."""
    segmentation, measured = result.segmentation or {}, result.measured
    names, trivial = [row.name for row in result.classes], segmentation["baseline"]
    is_binary = len(names) == 2
    rows = [("pixel accuracy", f"{measured['accuracy']:.2%}", f"{trivial['accuracy']:.2%}")]
    for key, title in (("dice", "Dice"), ("iou", "IoU")):
        if not is_binary:
            known = [value for value in trivial[key][1:] if value is not None]
            mean = sum(known) / len(known) if known else None
            rows.append((f"mean {title}, without {names[0]}", _score(measured[key]), _score(mean)))
        for i in _class_order(len(names)):
            rows.append((f"{title}, {names[i]}", _score(segmentation[key][i]), _score(trivial[key][i])))
    which = "both classes" if is_binary else f"all {len(names)} classes"
    rows.append((f"soft Dice, mean of {which}", _score(segmentation["soft_dice"]), ""))
    scores = segmentation["scores"] or {}
    for key, title in zip(SCORES, ("V^Rand", "V^Info", "V^Rand, thinned", "V^Info, thinned")):
        if key in scores:
            part, best = scores[key], scores[key]["best"]
            details = f"{part['score']:.4f} (split {part['split']:.4f}, merge {part['merge']:.4f})"
            rows.append((f"{title} at 0.5", details, _score((trivial["scores"] or {}).get(key))))
            rows.append((f"{title}, best", f"{best['score']:.4f} at {best['threshold']:g}", ""))
    columns = {"": TEXT, "measured": TEXT, f"every pixel {trivial['class']}": TEXT}
    return text_table(columns, ((Text(name, style="bold"), *cells) for name, *cells in rows))


def _class_order(num_classes: int) -> List[int]:
    """Returns the classes in order; for two classes the second comes first, because it is usually the object."""
    return [1, 0] if num_classes == 2 else list(range(num_classes))


def _mask_facts(result: Evaluation) -> List[Tuple[str, str]]:
    measured, segmentation = result.measured, result.segmentation or {}
    patches = ", ".join("x".join(map(str, size)) for size in segmentation["patch_sizes"])
    versions = segmentation["test_time_augmentation"]
    averaged = f", {versions} versions of each averaged" if versions > 1 else ""
    time = f"{units.duration(measured['wall_s'])}: network {units.duration(segmentation['network_s'])}"
    if segmentation["scores"] is not None:
        time += f", V^Rand and V^Info {units.duration(segmentation['scores_s'])}"
    best, threshold = segmentation["threshold"], []
    if best is not None:
        score = f"{best['score']:.4f} (at 0.5: {best['at_half']:.4f})"
        text = f"{best['value']:g} has the best {best['of']} of those tried: {score}"
        threshold = [("threshold", text + ("; infer takes it" if best.get("kept") else ""))]
    return [
        *threshold,
        ("loss", f"{measured['loss']:.4f}"),
        ("calibration error", f"{measured['calibration_error']:.4f}"),
        ("images", f"{_samples_seen(result)}, whole, by patches of {patches}{averaged}"),
        ("time", f"{time}, measured on {result.device.upper()}"),
        _weights(result),
    ]


def _worst_images(result: Evaluation) -> Group:
    """Returns a table of the images with the lowest mean Dice."""
    names, images = [row.name for row in result.classes], (result.segmentation or {})["images"]
    order, has_column_each = _class_order(len(names)), len(names) <= MOST_COLUMNS
    columns = {"image": TEXT}
    if has_column_each:
        columns.update({f"Dice, {names[i]}": NUMBER for i in order})
    else:
        columns.update({"mean Dice": NUMBER, "lowest Dice": TEXT})
    scores = {"rand": "V^Rand", "info": "V^Info"} if "rand" in images[0] else {}
    columns.update(dict.fromkeys(scores.values(), NUMBER))
    shown = sorted(images, key=lambda row: mean_dice(row["dice"]))[:WORST_IMAGES]
    rows = []
    for row in shown:
        cells = [_score(row["dice"][i]) for i in order]
        if not has_column_each:
            lowest, name = min((value, name) for value, name in zip(row["dice"], names) if value is not None)
            cells = [_score(mean_dice(row["dice"])), f"{_score(lowest)}, {name}"]
        rows.append([printable(row["image"]), *cells, *(_score(row[key]) for key in scores)])
    title = f"the worst {len(shown)} of {counted(len(images), 'image')}"
    return titled(title, text_table(columns, rows))


class WorstSheet(PanelSheet):
    """A contact sheet of the images with the lowest mean Dice, the worst first."""

    def __init__(self) -> None:
        super().__init__(("image", "truth", "prediction", "difference"), side=512, columns=3)
        self._worst: List[SegmentedImage] = []

    def take(self, item: Segmented) -> None:
        """Takes an image if it is one of the worst so far."""
        self.expect(item.total)
        self._worst = sorted([*self._worst, item.image], key=lambda image: image.mean_dice)[:WORST_DRAWN]

    def save(self, path: Path) -> None:
        """Draws the sheet, see :meth:`Sheet.save`."""
        self.legend = legend_of_errors(self._worst)
        for image in self._worst:
            self.add(f"{image.name}: mean Dice {image.mean_dice:.4f}", compared(image))
        super().save(path)


# --- the figure


def draw_evaluation(result: Evaluation, path: Path, suffix: str) -> None:
    """Draws the figure.

    Args:
        result: result of ``ipucnn.runs.evaluate.evaluate_run``.
        path: file to write, of any name.
        suffix: ".png", ".pdf" or ".svg".
    """
    figure = new_figure(11, 5.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1]})
    _confusion(left, figure, result)
    _reliability(right, result)
    measured, data = result.measured, result.dataset
    of = "" if result.task == "classification" else "the pixels of "
    samples = counted(measured["samples"], "sample")
    figure.suptitle(f"{result.model} on {data.name}: {measured['accuracy']:.2%} of {of}{samples}")
    save_figure(figure, path, suffix)


def _confusion(axis: Axes, figure: Figure, result: Evaluation) -> None:
    """Draws the confusion matrix; rows are true classes, and the colour is the share of the true class."""
    counts = result.confusion_matrix
    names = [row.name for row in result.classes]
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    drawn = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(drawn, ax=axis, fraction=0.046, pad=0.03, label="share of the true class")
    axis.set(xlabel="predicted class", ylabel="true class", title="confusion matrix")
    if len(names) <= MOST_NAMES:
        ticks = list(range(len(names)))
        shown = [label(name if len(name) <= 14 else name[:13] + "…") for name in names]
        size = 9 if len(names) <= MOST_NUMBERS else 6
        upright = max(len(name) for name in shown) > 3
        axis.set_xticks(ticks)
        axis.set_xticklabels(
            shown, rotation=45 if upright else 0, ha="right" if upright else "center", size=size
        )
        axis.set_yticks(ticks)
        axis.set_yticklabels(shown, size=size)
    if len(names) <= MOST_NUMBERS:
        for i, row in enumerate(counts):
            for j, count in enumerate(row):
                if count:
                    colour = "white" if shares[i][j] > 0.5 else "black"
                    axis.text(j, i, str(count), ha="center", va="center", color=colour, size=8)


def _reliability(axis: Axes, result: Evaluation) -> None:
    """Draws accuracy against confidence per bin (Guo et al. 2017, figure 1), with the bin's count above each bar."""
    bins = [row for row in result.calibration if row.count]
    width = 1 / len(result.calibration)
    lower = [row.lower for row in bins]
    total = sum(row.count for row in bins)
    axis.bar(
        lower, [row.accuracy for row in bins], width, align="edge", color="#4c72b0", edgecolor="white",
        label="accuracy",
    )  # fmt: skip
    axis.plot(
        [row.confidence for row in bins], [row.accuracy for row in bins], "o", color="#dd8452",
        markersize=4, label="at the mean confidence",
    )  # fmt: skip
    axis.plot([0, 1], [0, 1], "--", color="grey", linewidth=1, label="perfectly calibrated")
    shares = [row.count / total for row in result.calibration]
    axis.step(
        [i * width for i in range(len(shares) + 1)], [*shares, shares[-1]], where="post", color="black",
        linewidth=1, label="share of predictions",
    )  # fmt: skip
    axis.set(
        xlim=(0, 1), ylim=(0, 1.14), xlabel="confidence (largest probability)", ylabel="accuracy",
        title=f"reliability: expected calibration error {result.measured['calibration_error']:.4f}",
    )  # fmt: skip
    for row in bins:
        axis.annotate(
            f"{row.count:,}", (row.lower + width / 2, row.accuracy), (0, 5), textcoords="offset points",
            ha="center", va="bottom", size=7, rotation=90, annotation_clip=False,
        )  # fmt: skip
    axis.grid(alpha=0.3)
    # The legend is below the diagram, so that it hides no bar.
    axis.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2, fontsize=8, title_fontsize=8,
        title="above each bar: its number of predictions",
    )  # fmt: skip
