"""HTML and SVG as strings that are escaped unless they were made here."""

import html
import math
import re
from typing import List

__all__ = ["Markup", "element", "join", "nice_ticks", "number"]

# What neither XML nor HTML may contain, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Markup(str):
    """Text that is markup already."""


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element; well-formed as XML too, so an element without children closes itself.

    Args:
        children: ``Markup``, or anything else, whose text is escaped.
        attributes: ``class_`` and ``stroke_width`` stand for ``class`` and ``stroke-width``; None is left out, floats
            are rounded to what a screen can show.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else str(value)
            parts.append(f' {name.rstrip("_").replace("_", "-")}="{_escape(text)}"')
    if not children:
        return Markup("".join(parts) + "/>")
    return Markup("".join(parts) + ">" + join(children) + f"</{tag}>")


def join(children: object) -> Markup:
    """Children of an element, one after the other."""
    return Markup(
        "".join(child if isinstance(child, Markup) else _escape(str(child)) for child in children)  # type: ignore[attr-defined]
    )


def _escape(text: str) -> str:
    return html.escape(_FORBIDDEN.sub("\ufffd", text), quote=True)


def number(value: float) -> str:
    """Two decimals, without trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def nice_ticks(end: float, most: int) -> List[float]:
    """At most ``most`` + 1 multiples of 1, 2 or 5 times a power of ten, from 0 to ``end``."""
    if not end > 0 or not math.isfinite(end):
        return [0.0]
    step = 10.0 ** math.floor(math.log10(end / most))
    while end / step > most:
        # 1 -> 2 -> 5 -> 10
        step *= 2.5 if f"{step:e}".startswith("2") else 2.0
    return [i * step for i in range(int(end / step + 1e-9) + 1)]
