"""Frozen dataclasses to plain values (for JSON and YAML) and back, every value checked on the way in."""

import dataclasses
import sys
import typing
from typing import Any, Dict, List, Type, TypeVar

from ipucnn.errors import DataError, did_you_mean
from ipucnn.text import shown_value

__all__ = ["from_plain", "to_plain"]

# Counts and sizes in bytes; arithmetic with larger ones ends in numbers that no array holds.
MAX_INTEGER = 2**63 - 1
_HINT = "it was changed by hand, or made by another version of ipucnn: make it again"

Record = TypeVar("Record")


def to_plain(value: Any) -> Any:
    """A record as dictionaries, lists, numbers, text and None."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    # NumPy's numbers are not what JSON and YAML know.
    return int(value) if isinstance(value, int) or hasattr(value, "bit_length") else float(value)


def from_plain(kind: Type[Record], data: Any, where: str) -> Record:
    """The record that ``to_plain`` made ``data`` of.

    Args:
        kind: a dataclass whose fields are annotated with int, float, str, bool, Any, Optional, Tuple, Dict[str, ...]
            and such dataclasses.  Fields with a default may be absent.
        where: what the data is, for messages.

    Raises:
        DataError: naming the place and what is wrong with it.
    """
    if not isinstance(data, dict):
        raise DataError(f"{where} is {_short(data)}, wanted a mapping", _HINT)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise DataError(
                f"{where} has an unknown key '{shown_value(key)}'", did_you_mean(str(key), fields) or _HINT
            )
    values: Dict[str, Any] = {}
    for name, declared in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{where}: {name}")
        elif declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING:
            raise DataError(
                f"{where} lacks '{name}'",
                "it was cut short, or made by another version of ipucnn: make it again",
            )
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin: Any = typing.get_origin(hint)
    arguments: List[Any] = list(typing.get_args(hint))
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    if origin is typing.Union:
        return None if value is None else _convert(arguments[0], value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise DataError(f"{where} is {_short(value)}, wanted a list", _HINT)
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise DataError(f"{where} has {len(value)} entries, wanted {len(arguments)}", _HINT)
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise DataError(f"{where} is {_short(value)}, wanted a mapping", _HINT)
        return {
            str(key): _convert(arguments[1], item, f"{where}.{shown_value(key)}")
            for key, item in value.items()
        }
    wanted = (int, float) if hint is float else hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise DataError(f"{where} is {_short(value)}, wanted {_named(hint)}", _HINT)
    if hint is int and abs(value) > MAX_INTEGER:
        raise DataError(f"{where} is {shown_value(value)}, wanted a whole number of at most 64 bits", _HINT)
    if hint is float and not (abs(value) <= sys.float_info.max):
        raise DataError(f"{where} is {shown_value(value)}, wanted a finite number", _HINT)
    return float(value) if hint is float else value


def _named(kind: Any) -> str:
    """What a value should be, in words."""
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]


def _short(value: Any) -> str:
    text = shown_value(repr(value) if isinstance(value, str) else value)
    return text if len(text) <= 40 else text[:37] + "..."
