"""Text from outside (file names, classes, messages) as text that any terminal, table and UTF-8 file can hold."""

import unicodedata
from decimal import ROUND_HALF_UP, Decimal
from typing import List, Optional

SHOWN_CHARACTERS = 200
"""How much of a path or value a message repeats."""


def printable(text: str) -> str:
    """The text on one line of valid UTF-8; what is neither visible nor a space is written as an escape.

    That is: control characters (a terminal would obey them), line breaks, and surrogates, which stand for the
    bytes of file names that are no UTF-8 and which no file or pipe takes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def shown_value(value: object) -> str:
    """A value as a message repeats it: on one line, and shortened in the middle where it is very long."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        # The time to write out a whole number grows with the square of its digits, and Python refuses 4,300.
        return f"a number of about {value.bit_length() * 3 // 10:,} digits"
    text = value if isinstance(value, str) else str(value)
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        return f"{printable(text[:half])}...{printable(text[-half:])} ({len(text):,} characters)"
    return printable(text)


def counted(number: int, noun: str) -> str:
    """``1 image``, ``1,437 images``, ``4 micro-batches``: a number of things, the noun given in the singular."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "tch", "nch", "sh")):  # batches and branches, but epochs
        return f"{number:,} {noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}s"


def size_text(num_bytes: float) -> str:
    """Three digits in KiB, GiB or TiB, whole MiB between them."""
    if num_bytes >= 2**60:
        return "more than a million TiB"
    if num_bytes >= 1000 * 2**30:
        return f"{num_bytes / 2**40:.3g} TiB"
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.3g} GiB"
    if num_bytes >= 2**20 or not num_bytes:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.3g} KiB"


def told_apart(*values: float, digits: int) -> List[str]:
    """Numbers with as few digits as tell them apart, at least ``digits``."""
    for count in range(digits, 17):
        texts = [f"{value:.{count}g}" for value in values]
        if len(set(texts)) == len(texts):
            return texts
    return list(map(repr, values))


def number(value: Optional[float]) -> str:
    """Four significant digits, without an exponent from 0.001 on: 15,370, 151.3, 0.1234; nothing where unknown."""
    if value is None:
        return ""
    if value >= 1000:
        digits = max(0, len(str(int(value))) - 4)
        return f"{round(value, -digits):,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """0.804 -> ``80%``, 0.145 -> ``15%``, 0.0414 -> ``4.1%``: whole ones from 10 % on, else two digits, halves go up.

    The number that is rounded is the one that the share is written as: 0.145 is not the float a little below it.
    """
    value = 100 * Decimal(repr(float(share)))
    digits = Decimal(1)
    if value and value.is_finite() and abs(value) < Decimal("9.95"):
        digits = Decimal(1).scaleb(max(-12, value.adjusted() - 1))
    if not value.is_finite():
        return f"{value}%"
    text = f"{value.quantize(digits, ROUND_HALF_UP):f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def to_ascii(text: str) -> str:
    """The text in letters that every font has: without accents, and ``?`` for what has no such letter."""
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return "".join(c if " " <= c <= "~" else "?" for c in plain)
