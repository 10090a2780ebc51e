"""Text from outside (file names, classes, messages) as text that any terminal, table and UTF-8 file can hold."""

import unicodedata


def printable(text: str) -> str:
    """The text on one line of valid UTF-8; what is neither visible nor a space is written as an escape.

    That is: control characters (a terminal would obey them), line breaks, and surrogates, which stand for the
    bytes of file names that are no UTF-8 and which no file or pipe takes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def to_ascii(text: str) -> str:
    """The text in letters that every font has: without accents, and ``?`` for what has no such letter."""
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return "".join(c if " " <= c <= "~" else "?" for c in plain)
