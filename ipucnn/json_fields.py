"""Whether values from JSON files, which anybody may have written, are of the types that ipucnn writes; if not, why."""

import math
import reprlib
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Tuple

from ipucnn.aliases import PlainValue
from ipucnn.text import printable

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

Check = Callable[[Any], bool]
Fields = Mapping[str, Tuple[str, Check]]
"""Name of a field -> (what it should be, for messages; whether a value is that)."""


def wrong_field(value: Mapping[str, PlainValue], fields: Fields, needed: Iterable[str] = ()) -> str:
    """What is wrong with the first field that is, in words; "" if nothing is.

    Args:
        value: a mapping from a file.
        fields: what its fields should be, of those that are there.
        needed: names of those that must be there.
    """
    for name in needed:
        if name not in value:
            return f"lacks {name}"
    for name, (what, is_right) in fields.items():
        if name in value and not is_right(value[name]):
            return f"has the {name} {brief(value[name])}, not {what}"
    return ""


def brief(value: object) -> str:
    """A value as a message repeats it: shortened where it is long or deep."""
    return printable(_SHORT.repr(value))


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_count(value: object) -> bool:
    """A whole number of 0 or more, below 2**63."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: object) -> bool:
    """A finite number."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value))
    )


def is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def list_of(check: Check) -> Check:
    """Whether a value is a list of which every item passes ``check``."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def optional(check: Check) -> Check:
    """Whether a value is None or passes ``check``."""
    return lambda value: value is None or check(value)


def metrics(value: object) -> bool:
    """Whether a value is a mapping of figures: numbers, or None where there is nothing to measure."""
    return isinstance(value, dict) and all(
        item is None or isinstance(item, float) or is_number(item) for item in value.values()
    )


def all_of(needed: Dict[str, Check], others: Optional[Dict[str, Check]] = None) -> Check:
    """Whether a value is a mapping with all ``needed`` fields, and they and those of ``others`` it has are right."""

    def check(value: object) -> bool:
        if not isinstance(value, dict) or not set(needed) <= set(value):
            return False
        checks = {**needed, **(others or {})}
        return all(is_right(value[name]) for name, is_right in checks.items() if name in value)

    return check
