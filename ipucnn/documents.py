"""Reader of YAML and JSON from users, in files and in flags; it limits their size and returns only plain values.

A document is at most ``MAX_BYTES`` long, and twice as long with its aliases written out, and ``MAX_DEPTH`` deep.
Values are text, numbers, true and false, null, lists, and mappings with text keys. Tags are refused. Dates stay text.
Depth is checked on the events of PyYAML's parser before its composer runs, because 100,000 brackets would crash the
process there.
"""

import contextlib
import functools
import itertools
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type, TypeVar

import msgspec

from ipucnn.aliases import Annotated, PlainValue, YamlEvent, YamlNode
from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean
from ipucnn.filesystem import read_text, shown
from ipucnn.text import quoted, shown_value

MAX_BYTES = 1_000_000
"""Largest document that a person writes."""
MAX_DEPTH = 50
"""Most levels of nested lists and mappings."""
MAX_RECORD_BYTES = 64_000_000
"""Largest file that ipucnn wrote and reads again, such as the report of a long benchmark."""
MAX_NUMBER_CHARACTERS = 308
"""Most digits of an integer that fits into a double; the time to read one grows with the square of its digits."""

SCALAR, SEQUENCE, MAPPING = "scalar", "sequence", "mapping"
"""Values of ``id`` of a node."""
MERGE = "<<"

Record = TypeVar("Record")
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Above0 = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Figures = Dict[str, Optional[float]]
"""Measured values by name; None where there is nothing to measure."""

UNREADABLE = "not readable as YAML"
"""Beginning of the reason if a text is not YAML at all."""
_PLAIN_HINT = "remove the tag; write the value plainly, or in quotes if it is text"
_SPLIT_HINT = "give a smaller file"


class BadDocument(ValueError):
    """A text that this reader refuses.

    Args:
        reason: why it is refused, on one line.
        hint: what to change.
        line, column: the place, from 1; None if unknown.
    """

    def __init__(
        self, reason: str, hint: str, line: Optional[int] = None, column: Optional[int] = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.hint, self.line, self.column = reason, hint, line, column


@contextlib.contextmanager
def naming(source: str, error: Type[UserError] = ConfigurationError) -> Iterator[None]:
    """Converts a :class:`BadDocument` of the block into an error that names the source of the document.

    Args:
        source: the file, as messages show it.
        error: class of the error to raise, which determines the exit code.
    """
    try:
        yield
    except RecursionError:
        raise error(f"{source}: {_too_deep().reason}", _too_deep().hint) from None
    except BadDocument as bad:
        where = source if bad.line is None else f"{source}, line {bad.line}"
        if bad.column is not None:
            where += f", column {bad.column}"
        raise error(f"{where}: {bad.reason}", bad.hint) from None


# -- YAML -----------------------------------------------------------------------------------------------------


def compose(text: str) -> Optional[YamlNode]:
    """Composes PyYAML's node of a text (``id``, ``tag``, ``value``, ``start_mark``); None for an empty text.

    Raises:
        BadDocument: the text is not readable as YAML, is too large, or has other than plain values.
    """
    import yaml

    if len(text) > MAX_BYTES:
        raise BadDocument(f"it is longer than {MAX_BYTES:,} characters", _SPLIT_HINT)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader))
        node = yaml.compose(text, Loader=loader)
        if node is not None:
            _check_aliases(node, {})
        return node
    except RecursionError:  # aliases inside of each other, or of themselves
        raise _too_deep() from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise _unreadable(text, error) from None


def _check_events(events: Iterator[YamlEvent]) -> None:
    """Refuses tags and deep documents."""
    import yaml

    depth = 0
    for event in events:
        line, tag = event.start_mark.line + 1, getattr(event, "tag", None)
        if tag is not None:
            raise BadDocument(f"the tag {shown_value(tag)} is not read", _PLAIN_HINT, line)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _too_deep(line)


def _check_aliases(node: YamlNode, known: Dict[YamlNode, int]) -> int:
    """Refuses aliases that multiply the document; returns the number of its characters with all aliases written out.

    Args:
        known: the numbers for the nodes that were counted before; a node that aliases repeat is counted only once.
    """
    if node not in known:
        size = 1
        if node.id == SCALAR:
            size += len(node.value)
        else:
            for child in itertools.chain(*node.value) if node.id == MAPPING else node.value:
                size += _check_aliases(child, known)
        if size > 2 * MAX_BYTES:
            what = f"with its aliases written out, it is longer than {2 * MAX_BYTES:,} characters"
            raise BadDocument(what, "use fewer aliases (*name) of lists and mappings", line_of(node))
        known[node] = size
    return known[node]


def line_of(node: YamlNode) -> int:
    """The first line of a node, from 1."""
    return int(node.start_mark.line) + 1


def check_key(key: YamlNode) -> None:
    """Refuses a key that is no text.

    Raises:
        BadDocument: the key is a list, a mapping or empty.
    """
    if key.id != SCALAR or _kind(key) == "null":
        what = {SEQUENCE: "a list", MAPPING: "a mapping"}.get(key.id, "empty")
        raise BadDocument(
            f"a key is {what}, and keys are text", "write `name: value`, the name in quotes", line_of(key)
        )


def pairs(node: YamlNode) -> List[Tuple[YamlNode, YamlNode]]:
    """The keys and values of a mapping; merged (``<<``) ones come first, so that later ones win.

    Several ``<<`` in one mapping apply in order, because public files rely on it; in a list of merges the earliest
    wins.  Any other repeated key is an error, because one of the two values would be dropped silently.

    Raises:
        BadDocument: a repeated key, or ``<<`` with anything but mappings.
    """
    merged: List[Tuple[YamlNode, YamlNode]] = []
    named: List[Tuple[YamlNode, YamlNode]] = []
    first_line: Dict[str, int] = {}
    for key, value in node.value:
        if _kind(key) == "merge":
            for part in reversed(value.value) if value.id == SEQUENCE else [value]:
                if part.id != MAPPING:
                    raise BadDocument(
                        "'<<' must merge other mappings",
                        "write `<<: *name` with the anchor of a mapping",
                        line_of(part),
                    )
                merged.extend(pairs(part))
            continue
        check_key(key)
        if key.value in first_line:
            raise BadDocument(
                f"'{shown_value(key.value)}' is given twice, first on line {first_line[key.value]}",
                "keep one of the two",
                line_of(key),
            )
        first_line[key.value] = line_of(key)
        named.append((key, value))
    return merged + named


_NOT_DECIMAL = re.compile(r"[-+]?(0[0-9_]+|0[xXbB].*|[0-9_]+(:[0-9_.]+)+)")
"""Numbers that YAML 1.1 takes for octal (010 is 8), hexadecimal, binary, or of base 60 (1:30 is 90)."""


def plain(node: YamlNode) -> Any:
    """The plain value of a node.

    Raises:
        BadDocument: as :func:`pairs`; or a number is too long.
    """
    if node.id == SEQUENCE:
        return [plain(item) for item in node.value]
    if node.id == MAPPING:
        return {key.value: plain(value) for key, value in pairs(node)}
    kind = _kind(node)
    if kind == "null":
        return None
    if kind not in ("bool", "int", "float"):
        return node.value
    if len(node.value) > MAX_NUMBER_CHARACTERS:
        raise _too_long(len(node.value), line_of(node))
    if kind != "bool" and _NOT_DECIMAL.fullmatch(node.value):
        return node.value  # text, as on the command line
    try:
        return getattr(_constructor(), f"construct_yaml_{kind}")(node)
    except ValueError:  # 0x_ has no digits
        return node.value


def _kind(node: YamlNode) -> str:
    """The YAML 1.1 type of a scalar: ``int`` for the tag ``tag:yaml.org,2002:int``."""
    return str(node.tag).rpartition(":")[2]


@functools.lru_cache(maxsize=None)
def _constructor() -> Any:
    from yaml.constructor import SafeConstructor

    return SafeConstructor()


def load(text: str) -> Any:
    """Reads the value of a YAML text; None for an empty text.

    Raises:
        BadDocument: as :func:`compose` and :func:`plain`.
    """
    node = compose(text)
    return None if node is None else plain(node)


def _too_long(length: int, line: Optional[int] = None) -> BadDocument:
    return BadDocument(
        f"a number of {length:,} characters",
        f"write it in at most {MAX_NUMBER_CHARACTERS}, or in quotes if it is text",
        line,
    )


def _unreadable(text: str, error: Exception) -> BadDocument:
    """Converts an error of LibYAML into a :class:`BadDocument` with its place in the text."""
    problem = shown_value(getattr(error, "problem", None) or str(error).split("\n")[0])
    mark = getattr(error, "problem_mark", None)
    if "nesting depth" in problem:  # LibYAML's own limit (0.2.6 and newer), reached while it looks ahead
        return _too_deep(None if mark is None else mark.line + 1)
    if mark is None:  # a character, which has no place in the parsed text
        hint = "remove the character, or write it in double quotes as an escape"
        return BadDocument(f"{UNREADABLE}: {problem}", hint)
    if type(error).__name__ == "ComposerError":
        problem = shown_value(getattr(error, "context", None) or problem)
        hint = "define an anchor (&name) once, above its aliases (*name); keep one document, without `---`"
        return BadDocument(f"{UNREADABLE}: {problem}", hint, mark.line + 1)
    lines = text.split("\n")
    hint = "check the indentation and quotes there"
    if mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        hint = "indent with spaces: YAML takes no tabs there"
    return BadDocument(f"{UNREADABLE}: {problem}", hint, mark.line + 1, mark.column + 1)


# -- JSON -----------------------------------------------------------------------------------------------------


class NotJson(ValueError):
    """A text that is not JSON; texts that this reader refuses for other reasons raise :class:`BadDocument`."""


def _too_deep(line: Optional[int] = None) -> BadDocument:
    return BadDocument(
        f"more than {MAX_DEPTH} lists and mappings inside of each other", "write it flatter", line
    )


def _json_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise _too_long(len(digits))
    return int(digits)


def _json_object(items: List[Tuple[str, PlainValue]]) -> Dict[str, Any]:
    mapping = dict(items)
    if len(mapping) < len(items):
        counts = Counter(key for key, _ in items)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise BadDocument(f"'{shown_value(repeated)}' is given twice", "keep one of the two")
    return mapping


def load_record(text: str, at_most: int = MAX_RECORD_BYTES) -> Any:
    """Reads the value of a JSON text; ``NaN`` and ``Infinity`` are numbers, as in Python's ``json``.

    Args:
        at_most: largest number of characters.

    Raises:
        NotJson: it is not JSON.
        BadDocument: it is too long or too deep, repeats a key, or has a number that is too long.
    """
    if len(text) > at_most:
        raise BadDocument(f"it is longer than {at_most:,} characters", _SPLIT_HINT)
    try:
        return json.loads(text, parse_int=_json_int, object_pairs_hook=_json_object)
    except BadDocument:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise NotJson(shown_value(str(error))) from None


def read_record_if_present(path: Path, without: str, kind: Type[Record]) -> Optional[Record]:
    """Reads a JSON file that ipucnn wrote; None if there is no file of that name.

    Args:
        without: what happens if the user moves a damaged file away, for the hint.
        kind: the type to convert the value to, such as a struct of msgspec.

    Raises:
        DataError: it is not a file, cannot be read, is not JSON, or does not fit the type.
    """
    if not path.exists() and not path.is_symlink():
        return None
    name = shown(path)
    hint = f"restore it, or move it away: mv {quoted(name)} {quoted(name)}.damaged; {without}"
    return read_struct(path, kind, hint)


def read_struct(path: Path, kind: Type[Record], hint: str) -> Record:
    """Reads a JSON file that ipucnn wrote, and converts it to a type; raises as :func:`read_record_if_present`."""
    value = read_record(path, hint)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{shown(path)} is damaged: {shown_value(str(error))}", hint) from None


def read_record(path: Path, hint: str) -> Any:
    """Reads the value of a JSON file that ipucnn wrote, such as a report; it may be larger than what people write.

    Args:
        hint: what to give instead of an unusable file.

    Raises:
        DataError: it is not a file, is too large, or is not JSON.
    """
    text = read_text(path, MAX_RECORD_BYTES, hint=hint)
    name = shown(path)
    with naming(name, DataError):
        try:
            return load_record(text)
        except NotJson as error:
            raise DataError(f"{name} is not JSON: {error}", hint) from None


# -- records ---------------------------------------------------------------------------------------------------


def mismatch(value: PlainValue, kind: object) -> str:
    """Says why a value from a file does not fit a type, which may be a struct of msgspec; "" if it fits.

    Fields that the type does not have are ignored.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return shown_value(str(error))
    return ""


def to_record(data: PlainValue, record: Type[Record], where: str, hint: str) -> Record:
    """Converts the plain values of a file to a dataclass or a msgspec struct, checked against its annotations.

    Args:
        where: the file, for messages.
        hint: what to do about a damaged file.

    Raises:
        DataError: a value does not fit; the message names the file, the place in it, and the problem.
    """
    try:
        converted = msgspec.convert(data, record)
    except msgspec.ValidationError as error:
        raise DataError(f"{where} is damaged: {shown_value(str(error))}", hint) from None
    _check_values(data, msgspec.to_builtins(converted), f"{where} is damaged: ", "$", hint)
    return converted


def _check_values(data: PlainValue, kept: PlainValue, damaged: str, place: str, hint: str) -> None:
    """Refuses what msgspec ignores: keys that a dataclass does not have, and numbers that no array can hold."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key not in kept:
                what = f"{damaged}Object contains unknown field `{shown_value(key)}` - at `{place}`"
                raise DataError(what, did_you_mean(str(key), kept) or hint)
            _check_values(value, kept[key], damaged, f"{place}.{key}", hint)
    elif isinstance(data, (list, tuple)):
        for number, (value, other) in enumerate(zip(data, kept)):
            _check_values(value, other, damaged, f"{place}[{number}]", hint)
    elif isinstance(data, int) and abs(data) >= 2**63:
        raise DataError(f"{damaged}Expected `int` of at most 64 bits - at `{place}`", hint)
    elif isinstance(data, float) and not math.isfinite(data):
        raise DataError(f"{damaged}Expected a finite number - at `{place}`", hint)
