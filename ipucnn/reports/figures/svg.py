"""What the figures of a plan's page share: an SVG with title and description, lines, labels.

Colours are classes that the page's style sheet defines.  Marks carry the exact number they stand for in a ``data-``
attribute, and a ``title`` that browsers show as a tooltip.
"""

from typing import Sequence

from ipucnn.reports.markup import Markup, element, join

__all__ = ["STAGE_COLOURS", "WIDTH", "group", "line", "svg", "text", "text_width"]

WIDTH = 1080.0

# Stages take the style sheet's colours in turn.
STAGE_COLOURS = 8

# Width of a character over the size of its font, rather too large.
_CHARACTER = 0.62


def text_width(label: str, size: float = 12) -> float:
    """About how wide a label is."""
    return _CHARACTER * size * len(label)


def svg(
    name: str, title: str, description: str, height: float, children: Sequence[Markup], width: float = WIDTH
) -> Markup:
    """A figure; ``name`` is its own on the page."""
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_="figure" if width == WIDTH else "figure half",
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text(x: float, y: float, label: str, class_: str = "label") -> Markup:
    return element("text", label, x=x, y=y, class_=class_)


def group(class_: str, children: Sequence[Markup]) -> Markup:
    return element("g", join(children), class_=class_)
