"""The figure of an evaluation: confusion matrix and reliability diagram, drawn with matplotlib."""

import warnings
from pathlib import Path
from typing import Any, Dict

from ipucnn.errors import MissingError

MOST_NUMBERS, MOST_NAMES = 15, 40
"""Classes up to which the matrix's cells carry their counts, and its axes the classes' names."""


def check_can_plot() -> None:
    """Raises:
    MissingError: matplotlib is not installed.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingError(
            "--plot draws with matplotlib, which is not installed",
            "install it with: python -m pip install matplotlib",
        )


def draw_evaluation(result: Dict[str, Any], path: Path, suffix: str) -> None:
    """Draws the figure.

    Args:
        result: of ``ipucnn.runs.evaluate.evaluate_run``.
        path: the file to write, whatever its name.
        suffix: ".png", ".pdf" or ".svg".
    """
    from ipucnn.sessions.host.environment import import_matplotlib

    import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which keeps figures in a global state and looks for a display.
    figure = Figure(figsize=(11, 5.4))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1]})
    _confusion(left, figure, result)
    _reliability(right, result)
    measured, data = result["measured"], result["dataset"]
    figure.suptitle(
        f"{result['model']} on {data['name']}: {measured['accuracy']:.2%} of {measured['samples']} samples"
        if result["task"] == "classification"
        else f"{result['model']} on {data['name']}: {measured['accuracy']:.2%} of the pixels of "
        f"{measured['samples']} samples"
    )
    with warnings.catch_warnings():
        # A script that the font lacks is drawn as boxes; the tables have the names.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.tight_layout()
        figure.savefig(str(path), dpi=120, format=suffix.lower().lstrip("."))


def _confusion(axis: Any, figure: Any, result: Dict[str, Any]) -> None:
    """Rows are true classes; colour is the share of the true class."""
    counts = result["confusion_matrix"]
    names = [row["name"] for row in result["classes"]]
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    drawn = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(drawn, ax=axis, fraction=0.046, pad=0.03, label="share of the true class")
    axis.set(xlabel="predicted class", ylabel="true class", title="confusion matrix")
    if len(names) <= MOST_NAMES:
        ticks = list(range(len(names)))
        shown = [name if len(name) <= 14 else name[:13] + "…" for name in names]
        shown = [name.replace("$", r"\$") for name in shown]  # no formulas
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


def _reliability(axis: Any, result: Dict[str, Any]) -> None:
    """Accuracy against confidence per bin (Guo et al. 2017, figure 1), and how many fall into each bin."""
    bins = [row for row in result["calibration"] if row["count"]]
    width = 1 / len(result["calibration"])
    lower = [row["lower"] for row in bins]
    total = sum(row["count"] for row in bins)
    axis.bar(
        lower, [row["accuracy"] for row in bins], width, align="edge", color="#4c72b0", edgecolor="white",
        label="accuracy",
    )  # fmt: skip
    axis.plot(
        [row["confidence"] for row in bins], [row["accuracy"] for row in bins], "o", color="#dd8452",
        markersize=4, label="at the mean confidence",
    )  # fmt: skip
    axis.plot([0, 1], [0, 1], "--", color="grey", linewidth=1, label="perfectly calibrated")
    shares = [row["count"] / total for row in result["calibration"]]
    axis.step(
        [i * width for i in range(len(shares) + 1)], [*shares, shares[-1]], where="post", color="black",
        linewidth=1, label="share of predictions",
    )  # fmt: skip
    axis.set(
        xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence (largest probability)", ylabel="accuracy",
        title=f"reliability: expected calibration error {result['measured']['calibration_error']:.4f}",
    )  # fmt: skip
    axis.grid(alpha=0.3)
    axis.legend(loc="best", fontsize=8)
