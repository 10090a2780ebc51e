"""Makes outside text (file names, classes, messages) fit for any terminal, table and UTF-8 file; formats numbers.

Also whether a person watches a stream.
"""

import os
import shlex
import unicodedata
from decimal import ROUND_HALF_UP, Decimal
from typing import List, Optional, TextIO

SHOWN_CHARACTERS = 200
"""The most characters of a path or value that a message repeats."""


def is_interactive(stream: Optional[TextIO]) -> bool:
    """Whether a person watches the stream: it is a terminal, outside CI, and not a dumb one."""
    is_terminal = stream is not None and stream.isatty()
    return is_terminal and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """The text as one line of valid UTF-8, with escapes for characters that are neither visible nor a space.

    Escaped are control characters, which a terminal would execute, line breaks, and surrogates, which stand for bytes
    of file names that are not UTF-8 and cannot be written to a file or pipe.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def exact(name: str) -> str:
    """The name of a file for JSON and CSV: as it is, or printable if UTF-8 cannot hold it."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return printable(name)
    return name


def shown_value(value: object) -> str:
    """The text of a value for messages: on one line, and shortened in the middle if it is very long."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        # The time to print an integer grows with the square of its digits, and Python refuses more than 4,300.
        return f"a number of about {value.bit_length() * 3 // 10:,} digits"
    text = value if isinstance(value, str) else str(value)
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        return f"{printable(text[:half])}...{printable(text[-half:])} ({len(text):,} characters)"
    return printable(text)


def quoted(value: object) -> str:
    """A path or a name as a shell takes it, on one line: part of a command that a hint shows.

    Characters that are not printed are spelt as Bash, and other shells since POSIX of 2024, read them: $'a\\x0a'.
    """
    text = str(value)
    if text.startswith("~") or (text.startswith("-") and isinstance(value, os.PathLike)):
        text = f"./{text}"  # neither a home nor an option
    if printable(text) == text:
        return shlex.quote(text)
    spelt = "".join(
        f"\\{one}" if one in "\\'" else one if printable(one) == one else _spelt(one) for one in text
    )
    return f"$'{spelt}'"


def _spelt(character: str) -> str:
    is_byte = "\udc80" <= character <= "\udcff"  # of a name that is not UTF-8
    data = os.fsencode(character) if is_byte else character.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)


def counted(number: int, noun: str) -> str:
    """A number with its noun, which is given in the singular: ``1 image``, ``1,437 images``, ``4 micro-batches``."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "tch", "nch", "sh")):  # batches and branches, but epochs
        return f"{number:,} {noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}s"


def size_text(num_bytes: float) -> str:
    """A size as text: three digits in KiB, GiB or TiB, whole numbers in MiB."""
    if num_bytes >= 2**60:
        return "more than a million TiB"
    if num_bytes >= 1000 * 2**30:
        return f"{num_bytes / 2**40:.3g} TiB"
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.3g} GiB"
    if num_bytes >= 2**20 or not num_bytes:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.3g} KiB"


def distinguishable(*values: float, digits: int) -> List[str]:
    """Formats numbers with the fewest significant digits that make them differ, at least ``digits``."""
    for count in range(digits, 17):
        texts = [f"{value:.{count}g}" for value in values]
        if len(set(texts)) == len(texts):
            return texts
    return list(map(repr, values))


def number(value: Optional[float]) -> str:
    """Formats four significant digits, without an exponent from 0.001 on: 15,370, 151.3, 0.1234; "" for None."""
    if value is None:
        return ""
    if value >= 1000:
        digits = max(0, len(str(int(value))) - 4)
        return f"{round(value, -digits):,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """A share as a percentage, whole from 10 % on, else with two digits: 0.804 -> ``80%``, 0.0414 -> ``4.1%``.

    Halves are rounded up.  The decimal text of the share is rounded, not the float, which can be slightly below it:
    0.145 -> ``15%``.
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
