"""Formats numbers for reports: counts, times, sizes, shares and rates."""

from typing import Optional

from ipucnn import text
from ipucnn.text import number as number
from ipucnn.text import percent as percent

_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """Formats a count with three significant digits: 4049571 -> ``4.05 M``; trailing zeros are shown from 1000 on."""
    for size, unit in _COUNTS:
        scaled = value / size
        if abs(scaled) >= 0.9995:
            digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
            return f"{scaled:.{digits}f} {unit}"
    return f"{value:.3g}"


def size(num_bytes: Optional[float]) -> str:
    """Formats bytes as :func:`ipucnn.text.size_text` does; "" if unknown."""
    return "" if num_bytes is None else text.size_text(num_bytes)


def mebibytes(num_bytes: float) -> str:
    """Formats MiB with three digits, or whole ones from 100 on: Graphcore gives an IPU's memory in MiB."""
    value = num_bytes / 2**20
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.3g} MiB"


def seconds(value: Optional[float]) -> str:
    """Formats the time of one operation in s, ms or us, with four digits; "" if unknown."""
    if value is None:
        return ""
    if value >= 1:
        return f"{number(value)} s"
    return f"{number(1e3 * value)} ms" if value >= 1e-3 or not value else f"{number(1e6 * value)} us"


def milliseconds(value: float) -> str:
    """Formats seconds as milliseconds: 0.00213 -> ``2.13 ms``; in µs below 0.1 ms, and in s from 10 s on.

    Predictions are not exact to less than 0.05 µs, so that is ``0.0 µs``.
    """
    if value >= 10:
        return f"{value:.3g} s"
    if value and value < 1e-4:
        return f"{1e6 * value:.3g} \u00b5s" if value >= 5e-8 else "0.0 \u00b5s"
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{1e3 * value:,.0f} ms"


def column_milliseconds(value: float) -> str:
    """Formats seconds as milliseconds without the unit, for a column: 0.02, 2.13, 21.3, 213."""
    scaled = 1e3 * value
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f}"


def duration(value: float) -> str:
    """Formats a duration: 75.2 -> ``1 min 15 s``; below a minute with one decimal."""
    if round(value, 1) < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def images(images_per_s: float) -> str:
    """Formats predicted images per second: three digits, or whole numbers from 100 on."""
    return f"{images_per_s:,.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"


def rate(images_per_s: float) -> str:
    """Formats measured images per second: whole numbers; below ten, two decimals, as large patches take seconds."""
    return f"{images_per_s:,.0f}" if images_per_s >= 9.995 or not images_per_s else f"{images_per_s:.2f}"
