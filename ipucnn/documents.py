"""The one reader of YAML and JSON that users give, in files and in flags: bounded, and of plain values only.

A document is at most ``MAX_BYTES`` long, ``MAX_DEPTH`` deep, and stands for at most ``MAX_NODES`` values after
aliases and merges are written out, which is counted while it is read and before anything is made of it.  Its
values are text, numbers, true and false, null, lists and mappings with text keys; there are no tags.  A date is
the text it was written as.

YAML is read event by event from LibYAML's parser: PyYAML's own composers call themselves for each level, which
ends the process for a text of 100,000 brackets, and they follow aliases without counting.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type

from ipucnn.aliases import Numbers, PlainValue, YamlEvent
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import named, read_text
from ipucnn.text import shown_value

MAX_BYTES = 1_000_000
"""Of a document that a person writes."""
MAX_DEPTH = 50
"""Lists and mappings inside of each other."""
MAX_NODES = 100_000
"""Keys and values of a document, everything that an alias repeats counted each time."""
MAX_RECORD_BYTES = 64_000_000
"""Of a file that ipucnn itself wrote and reads again, such as the report of a long benchmark."""
MAX_RECORD_NODES = 5_000_000
"""Keys and values of such a file."""
MAX_NUMBER_CHARACTERS = 400
"""A double has at most 309 digits before the point; the time to read a whole number grows with their square."""

SCALAR, SEQUENCE, MAPPING = "scalar", "sequence", "mapping"
MERGE = "<<"

_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)
# What plain scalars mean, as YAML 1.1 has it and PyYAML reads it (https://yaml.org/type/).
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {
    form: value
    for word, value in (("yes", True), ("no", False), ("true", True), ("false", False), ("on", True), ("off", False))
    for form in (word, word.capitalize(), word.upper())
}  # fmt: skip
_INT = re.compile(
    r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|[1-9][0-9_]*(:[0-5]?[0-9])+)", re.ASCII
)
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*|\.(inf|Inf|INF))"
    r"|\.[0-9][0-9_]*([eE][-+][0-9]+)?|\.(nan|NaN|NAN)",
    re.ASCII,
)
# Where a string of JSON begins, and what makes another value.
_JSON_TOKEN = re.compile(r'["\[\]{},:]')

UNREADABLE = "not readable as YAML"
"""How the reason begins where a text is no YAML at all."""
_PLAIN_HINT = "remove the tag; write the value plainly, or in quotes if it is text"
_SPLIT_HINT = "give a smaller file"


class BadDocument(ValueError):
    """A text that is no document this reader takes.

    Args:
        reason: why, on one line.
        hint: what to change.
        line, column: from 1, where that is known.
    """

    def __init__(
        self, reason: str, hint: str, line: Optional[int] = None, column: Optional[int] = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.hint, self.line, self.column = reason, hint, line, column


@contextlib.contextmanager
def naming(source: str, error: Type[UserError] = ConfigurationError) -> Iterator[None]:
    """Makes a :class:`BadDocument` of the block an error that names where the document is from.

    Args:
        source: the file, as messages are to show it.
        error: what is raised; its class decides about the exit code.
    """
    try:
        yield
    except BadDocument as bad:
        where = source if bad.line is None else f"{source}, line {bad.line}"
        if bad.column is not None:
            where += f", column {bad.column}"
        raise error(f"{where}: {bad.reason}", bad.hint) from None


# -- YAML -----------------------------------------------------------------------------------------------------


class Node:
    """A part of a YAML document as written.

    Attributes:
        kind: SCALAR, SEQUENCE or MAPPING.
        value: its text; the list of its items; or the list of its (key, value) pairs, ``<<`` among them.
        line: that it begins on, from 1.
        is_quoted: of a scalar, whether it is text whatever it looks like.
    """

    __slots__ = ("is_quoted", "kind", "line", "value")

    def __init__(self, kind: str, value: Any, line: int, is_quoted: bool = False) -> None:
        self.kind, self.value, self.line, self.is_quoted = kind, value, line, is_quoted

    @property
    def is_merge(self) -> bool:
        """Whether it is the key ``<<``, which stands for the keys of the mappings that are its value."""
        return self.value == MERGE and not self.is_quoted


class _Open:
    """A list or mapping that is being read: its node, what it stands for so far, and its key that has no value yet."""

    __slots__ = ("anchor", "height", "key", "node", "size")

    def __init__(self, node: Node, anchor: Optional[str]) -> None:
        self.node, self.anchor = node, anchor
        self.size, self.height = 1, 1
        self.key: Optional[Node] = None


def compose(text: str) -> Optional[Node]:
    """The tree of a YAML text; None for an empty one.

    Raises:
        BadDocument: not readable as YAML, too large, or more than plain values.
    """
    import yaml

    _check_text(text)
    composer = _Composer()
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            composer.take(event)
    except yaml.YAMLError as error:
        raise _unreadable(text, error) from None
    return composer.root


class _Composer:
    """Makes nodes of LibYAML's events and keeps count of what they stand for."""

    def __init__(self) -> None:
        self.root: Optional[Node] = None
        self._open: List[_Open] = []
        self._count = 0
        # Of each anchor: its node, the number of values it stands for, and how deep they are; None while it is open.
        self._anchors: Dict[str, Optional[Tuple[Node, int, int]]] = {}

    def take(self, event: YamlEvent) -> None:
        name = type(event).__name__
        line = event.start_mark.line + 1
        if name == "ScalarEvent":
            self._check(event, line)
            node = Node(SCALAR, event.value, line, not event.implicit[0])
            if event.anchor is not None:
                self._anchors[event.anchor] = (node, 1, 0)
            self._add(node, 1, 0)
        elif name in ("SequenceEndEvent", "MappingEndEvent"):
            done = self._open.pop()
            if done.anchor is not None:
                self._anchors[done.anchor] = (done.node, done.size, done.height)
            self._add(done.node, done.size, done.height)
        elif name in ("SequenceStartEvent", "MappingStartEvent"):
            self._check(event, line)
            self._begin(SEQUENCE if name == "SequenceStartEvent" else MAPPING, event.anchor, line)
        elif name == "AliasEvent":
            self._add_alias(event.anchor, line)
        elif name == "DocumentStartEvent" and self.root is not None:
            raise BadDocument("it holds several documents", "keep one of them: no `---` between", line)

    def _begin(self, kind: str, anchor: Optional[str], line: int) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise BadDocument(
                f"more than {MAX_DEPTH} lists and mappings inside of each other", "write it flatter", line
            )
        self._open.append(_Open(Node(kind, [], line), anchor))

    def _check(self, event: YamlEvent, line: int) -> None:
        """Counts a value and refuses its tag, and an anchor that is there twice."""
        if event.tag is not None:
            raise BadDocument(f"the tag {shown_value(event.tag)} is not read", _PLAIN_HINT, line)
        if event.anchor is not None:
            if event.anchor in self._anchors:
                name = shown_value(event.anchor)
                raise BadDocument(f"the anchor &{name} is there twice", "rename one of them", line)
            self._anchors[event.anchor] = None
        self._add_to_count(1, line)

    def _add_to_count(self, size: int, line: int) -> None:
        self._count += size
        if self._count > MAX_NODES:
            raise BadDocument(
                f"more than {MAX_NODES:,} values, counting what aliases repeat", _SPLIT_HINT, line
            )

    def _add_alias(self, anchor: str, line: int) -> None:
        name = shown_value(anchor)
        if anchor not in self._anchors:
            raise BadDocument(f"*{name}: there is no anchor &{name} above", "check the name", line)
        known = self._anchors[anchor]
        if known is None:
            raise BadDocument(
                f"*{name} stands inside of the value that it names", "use it after that value", line
            )
        node, size, height = known
        self._add_to_count(size, line)
        if len(self._open) + height > MAX_DEPTH:
            raise BadDocument(
                f"with *{name} more than {MAX_DEPTH} lists and mappings are inside of each other",
                "write it flatter",
                line,
            )
        self._add(node, size, height)

    def _add(self, node: Node, size: int, height: int) -> None:
        """Puts a value into the list or mapping it is in."""
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        parent.size += size
        parent.height = max(parent.height, height + 1)
        if parent.node.kind == SEQUENCE:
            parent.node.value.append(node)
        elif parent.key is None:
            if node.kind != SCALAR or (node.value in _NULLS and not node.is_quoted):
                what = {SEQUENCE: "a list", MAPPING: "a mapping"}.get(node.kind, "empty")
                raise BadDocument(
                    f"a key is {what}, and keys are text",
                    "write `name: value`, the name in quotes",
                    node.line,
                )
            parent.key = node
        else:
            parent.node.value.append((parent.key, node))
            parent.key = None


def pairs(node: Node) -> List[Tuple[Node, Node]]:
    """The keys and values of a mapping, merged (``<<``) ones first so that later ones win.

    Several ``<<`` in one mapping are taken in order, as public files rely on; of a list of merges the earliest
    wins.  Any other key given twice is an error, because one of the two would be silently dropped.

    Raises:
        BadDocument: such a key, or ``<<`` with something else than mappings.
    """
    merged: List[Tuple[Node, Node]] = []
    own: List[Tuple[Node, Node]] = []
    first_line: Dict[str, int] = {}
    for key, value in node.value:
        if key.is_merge:
            for part in reversed(value.value) if value.kind == SEQUENCE else [value]:
                if part.kind != MAPPING:
                    raise BadDocument(
                        "'<<' must merge other mappings",
                        "write `<<: *name` with the anchor of a mapping",
                        part.line,
                    )
                merged.extend(pairs(part))
            continue
        if key.value in first_line:
            raise BadDocument(
                f"'{shown_value(key.value)}' is given twice, first on line {first_line[key.value]}",
                "keep one of the two",
                key.line,
            )
        first_line[key.value] = key.line
        own.append((key, value))
    return merged + own


def plain(node: Node) -> Any:
    """The value that a node stands for.

    Raises:
        BadDocument: see :func:`pairs`; or a number too long to be read.
    """
    if node.kind == SEQUENCE:
        return [plain(item) for item in node.value]
    if node.kind == MAPPING:
        return {key.value: plain(value) for key, value in pairs(node)}
    return node.value if node.is_quoted else _scalar(node.value, node.line)


def load(text: str) -> Any:
    """The value of a YAML text; None for an empty one.

    Raises:
        BadDocument: see :func:`compose` and :func:`plain`.
    """
    node = compose(text)
    return None if node is None else plain(node)


def _scalar(text: str, line: int) -> Any:
    """What a scalar without quotes means."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if text[0] not in "+-.0123456789":
        return text
    whole = _INT.fullmatch(text) is not None
    if not whole and _FLOAT.fullmatch(text) is None:
        return text
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise _too_long(len(text), line)
    digits = text.replace("_", "").lower()
    sign = -1 if digits[0] == "-" else 1
    digits = digits.lstrip("+-")
    try:
        return sign * (_whole(digits) if whole else _real(digits))
    except ValueError:  # 0x_ has no digits
        return text


def _whole(digits: str) -> int:
    if digits.startswith(("0b", "0x")):
        return int(digits[2:], 2 if digits[1] == "b" else 16)
    if ":" in digits:
        return int(_sexagesimal(digits, int))
    return int(digits, 8 if digits[0] == "0" else 10)


def _real(digits: str) -> float:
    if digits in (".inf", ".nan"):
        return float(digits[1:])
    return float(_sexagesimal(digits, float)) if ":" in digits else float(digits)


def _sexagesimal(digits: str, kind: Type[Numbers]) -> Numbers:
    """``1:30`` is 90: YAML 1.1 counts minutes and seconds."""
    value = kind(0)
    for part in digits.split(":"):
        value = value * 60 + kind(part)
    return value


def _too_long(length: int, line: Optional[int] = None) -> BadDocument:
    return BadDocument(
        f"a number of {length:,} characters",
        f"write it in at most {MAX_NUMBER_CHARACTERS}, or in quotes if it is text",
        line,
    )


def _check_text(text: str) -> None:
    """Refuses texts that are too long, have characters that no YAML may have, or directives."""
    if len(text) > MAX_BYTES:
        raise BadDocument(f"it is longer than {MAX_BYTES:,} characters", _SPLIT_HINT)
    match = _NOT_TEXT.search(text)
    if match is not None:
        raise BadDocument(
            f"{UNREADABLE}: the character U+{ord(match.group()):04X} is no text",
            "remove it, or write it in double quotes as an escape",
            text.count("\n", 0, match.start()) + 1,
        )
    match = _DIRECTIVE.search(text)
    if match is not None:
        line = text.count("\n", 0, match.start()) + 1
        raise BadDocument("a line begins with %", "remove it: directives are not read", line)


def _unreadable(text: str, error: Exception) -> BadDocument:
    """What LibYAML says of a text, with the place."""
    problem = shown_value(getattr(error, "problem", None) or str(error).split("\n")[0])
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return BadDocument(f"{UNREADABLE}: {problem}", "check the indentation and quotes")
    lines = text.split("\n")
    hint = "check the indentation and quotes there"
    if mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        hint = "indent with spaces: YAML takes no tabs there"
    return BadDocument(f"{UNREADABLE}: {problem}", hint, mark.line + 1, mark.column + 1)


# -- JSON -----------------------------------------------------------------------------------------------------


class NotJson(ValueError):
    """A text that is no JSON; of this reader's other refusals it is none."""


def load_json(text: str, *, at_most: int = MAX_BYTES, max_nodes: int = MAX_NODES) -> Any:
    """The value of a JSON text.

    Args:
        at_most: characters.
        max_nodes: keys and values.

    Raises:
        NotJson: it is not JSON.
        BadDocument: too large or too deep, a key given twice, or a number too long to be read.
    """
    if len(text) > at_most:
        raise BadDocument(f"it is longer than {at_most:,} characters", _SPLIT_HINT)
    depth, nodes = 0, 1
    match = _JSON_TOKEN.search(text)
    while match is not None:
        token, end = match.group(), match.end()
        if token == '"':
            # Not a pattern for the whole string: it would take some hundred bytes of memory for each escape.
            try:
                _, end = json.decoder.scanstring(text, end)  # type: ignore[attr-defined]
            except ValueError:
                break  # which the reader below tells
        elif token in ("[", "{"):
            depth += 1
        elif token in ("]", "}"):
            depth -= 1
        elif token in (",", ":"):
            nodes += 1
        if depth > MAX_DEPTH or nodes > max_nodes:
            line = text.count("\n", 0, match.start()) + 1
            if depth > MAX_DEPTH:
                raise BadDocument(
                    f"more than {MAX_DEPTH} lists and mappings inside of each other", "write it flatter", line
                )
            raise BadDocument(f"more than {max_nodes:,} values", _SPLIT_HINT, line)
        match = _JSON_TOKEN.search(text, end)
    try:
        return json.loads(text, parse_int=_json_int, object_pairs_hook=_json_object)
    except BadDocument:
        raise
    except ValueError as error:
        raise NotJson(shown_value(str(error))) from None


def _json_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise _too_long(len(digits))
    return int(digits)


def _json_object(items: List[Tuple[str, PlainValue]]) -> Dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):
        seen: Dict[str, Any] = {}
        twice = next(key for key, _ in items if key in seen or seen.update({key: None}))
        raise BadDocument(f"'{shown_value(twice)}' is given twice", "keep one of the two")
    return found


def load_record(text: str, at_most: int = MAX_RECORD_BYTES) -> Any:
    """The value of a JSON text that ipucnn wrote; ``NaN`` and ``Infinity`` are numbers, as Python has it.

    Args:
        at_most: characters.

    Raises:
        NotJson, BadDocument: as :func:`load_json` does.
    """
    return load_json(text, at_most=at_most, max_nodes=MAX_RECORD_NODES)


def read_record_if_whole(path: Path) -> Any:
    """The value of a JSON file that ipucnn wrote: None if it is absent, damaged or too large."""
    try:
        return load_record(read_text(path, MAX_RECORD_BYTES))
    except (DataError, NotJson, BadDocument):
        return None


def read_record(path: Path, what: str, hint: str) -> Any:
    """The value in a JSON file that ipucnn wrote, such as a report, which may be larger than what people write.

    Args:
        what: the option that names it, for messages; may be empty.
        hint: what to give instead.

    Raises:
        DataError: it is not a file, too large, or not JSON.
    """
    text = read_text(path, MAX_RECORD_BYTES, what, DataError, hint)
    name = named(path, what)
    with naming(name, DataError):
        try:
            return load_record(text)
        except NotJson as error:
            raise DataError(f"{name} is not JSON: {error}", hint) from None
