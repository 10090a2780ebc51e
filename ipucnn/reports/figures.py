"""Figures that matplotlib draws: without a display, and with the same bytes each time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Optional

from ipucnn.errors import MissingError
from ipucnn.runs.overwriting import SOFTWARE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_can_plot(asked: str) -> None:
    """Checks that figures can be drawn.

    Args:
        asked: the option or command that draws.

    Raises:
        MissingError: matplotlib is not installed.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingError(
            f"{asked} draws with matplotlib, which is not installed",
            "install it with: python -m pip install matplotlib",
        )


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in inches.

    ``pyplot`` is avoided: it keeps figures in a global state and looks for a display.
    """
    from ipucnn.sessions.host.environment import import_matplotlib

    import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)
    return figure


def label(text: str) -> str:
    """Returns a text that matplotlib draws as it is, not as a formula."""
    return text.replace("$", r"\$")


def metadata_of(suffix: str) -> Dict[str, Optional[str]]:
    """Returns what a figure of a format says of itself: no date, and in a PNG that ipucnn wrote it."""
    date = {".svg": "Date", ".pdf": "CreationDate"}.get(suffix.lower())
    return {"Software": SOFTWARE} if date is None else {date: None}


def save_figure(figure: Figure, path: Path, suffix: str, bottom: float = 0.0) -> None:
    """Writes a figure; the name of the file does not decide the format.

    Args:
        figure: the figure.
        path: file to write.
        suffix: the format: ".png", ".pdf" or ".svg".
        bottom: share of the height that is kept free at the bottom, for a legend.
    """
    import matplotlib

    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; the tables have the names.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.tight_layout(rect=(0, bottom, 1, 1))
        # Ids in SVG are random without a salt.
        with matplotlib.rc_context({"svg.hashsalt": "ipucnn"}):
            figure.savefig(str(path), format=suffix.lower().lstrip("."), metadata=metadata_of(suffix))
