"""Suite files: a list of rows in YAML, the built-in ones and a user's own.  Nothing is resolved here.

title: what it is
epoch-images: 50000
defaults: {host-generated-data: True}
rows:
  - lenet
  - model: resnet*
    mode: training
    for-each: {micro-batch-size: [1, 32]}
"""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ipucnn import documents
from ipucnn.aliases import YamlNode
from ipucnn.benchmarking.settings import INFERENCE, KERAS, SESSION, TRAINING
from ipucnn.config import options as run_options
from ipucnn.config.options import BY_KEY
from ipucnn.config.request import matching
from ipucnn.config.spec import EPOCH_IMAGES, EXECUTIONS, SECONDS, Number
from ipucnn.config.values import BadValue
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.filesystem import exists, expand, read_text, shown
from ipucnn.models.registry import is_own_name
from ipucnn.text import shown_value

FOLDER = Path(__file__).parent
FIT = "fit"
MODES = (INFERENCE, TRAINING, FIT)
ENGINES = (SESSION, KERAS)
# Keys of a row besides the options of a run: how it is measured; None for text.
_MEASURING: Mapping[str, Optional[Number]] = {
    "executions": EXECUTIONS,
    "min-time": SECONDS,
    "max-time": SECONDS,
    "system": None,
    "compare-with": None,
}
# The most rows that a file may have once each for-each is written out: each row takes seconds at least.
MAX_ROWS = 10_000
_ROW = ("model", "name", "mode", "engine", "for-each", *_MEASURING)
_TOP = ("title", "about", "epoch-images", "defaults", "rows")
_REFUSED = {
    "model-name": "a row names its network with 'model'",
    "run-dir": "all rows of a suite share one folder",
    "plan": "a row has pipeline-splits of its own",
}


class Choice(NamedTuple):
    """One value of a ``for-each``: the key it is of, the value as written, and checked."""

    key: str
    text: str
    value: Any


@dataclass(frozen=True)
class RowSpec:
    """One row of a suite as written, defaults included.

    Attributes:
        model: name or wildcard.
        where: "FILE, line N", for messages.
        name: what the row is called, None for one made of what it runs.
        mode: of ``MODES``.
        engine: of ``ENGINES``; what trains in mode fit.
        defaults, options: run options by field name, of the defaults block and of the row.
        measuring: ``executions``, ``min_time_s``, ``max_time_s``, ``system``, ``compare_with``, where given.
        for_each: the choices that this row stands for, one of each ``for-each`` key.
    """

    model: str
    where: str
    name: Optional[str] = None
    mode: str = INFERENCE
    engine: str = SESSION
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    measuring: Mapping[str, Any] = field(default_factory=dict)
    for_each: Tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Suite:
    """A suite as written.

    Attributes:
        name: of the file, without its ending.
        source: the file, for messages; None for a wildcard on the command line.
        title, about: what it is.
        epoch_images: training images of the epoch whose time is added up, None for no such sum.
        rows: at least one.
    """

    name: str
    source: Optional[str]
    rows: Tuple[RowSpec, ...]
    title: str = ""
    about: str = ""
    epoch_images: Optional[int] = None


def built_in_names() -> List[str]:
    """The suites that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def find_suite(name: str) -> Suite:
    """The suite that ``--suite`` names: a built-in one, or a file.

    Raises:
        ConfigurationError: there is none, or it is wrong: with file, line and what was meant.
    """
    if name in built_in_names():
        path = FOLDER / f"{name}.yml"
        return parse_suite(path.read_text(encoding="utf-8"), path.name, name)
    path = expand(name, "--suite")
    if path.suffix.lower() not in (".yml", ".yaml") and not exists(path, "--suite", ConfigurationError):
        raise ConfigurationError(
            f"--suite {shown(name)}: there is no such suite",
            did_you_mean(name, built_in_names())
            or f"the built-in ones are {' and '.join(built_in_names())}; or give a file, FILE.yml",
        )
    hint = "give the path of a YAML file with rows"
    text = read_text(path, documents.MAX_BYTES, "--suite", ConfigurationError, hint)
    return parse_suite(text, shown(path), path.stem)


def parse_suite(text: str, source: str, name: str) -> Suite:
    """A suite from YAML.

    Raises:
        ConfigurationError: with ``source`` and the line.
    """
    node = run_options.compose(text, source)
    with documents.naming(source):
        found = [] if node is None else documents.pairs(node)
    nodes = {key.value: value for key, value in found}
    for key, value in found:
        if key.value not in _TOP:
            # Other top-level names may hold anchors, as in files of presets.
            if value.id == documents.MAPPING:
                continue
            raise ConfigurationError(
                f"{source}, line {documents.line_of(key)}: unknown key '{shown_value(key.value)}'",
                did_you_mean(key.value, _TOP) or f"a suite has {', '.join(_TOP)}",
            )
    rows = nodes.get("rows")
    if rows is None or rows.id != documents.SEQUENCE or not rows.value:
        raise ConfigurationError(
            f"{source}: it has no rows", "write `rows:` and below it `- model: NAME` for each benchmark"
        )
    base = RowSpec("", source)
    if "defaults" in nodes:
        node = _mapping(nodes["defaults"], source, "defaults")
        base = _with_row(base, run_options.entries_of(node, source), source, are_defaults=True)
    made: List[RowSpec] = []
    for row in rows.value:
        line = documents.line_of(row)
        if row.id == documents.SCALAR:
            row_entries = [run_options.Entry("model", row.value, line)]
        else:
            row_entries = run_options.entries_of(_mapping(row, source, "a row"), source)
        spec = _with_row(replace(base, where=f"{source}, line {line}"), row_entries, source)
        made += _expanded(spec, MAX_ROWS - len(made))
    with documents.naming(source):
        images, title, about = (
            run_options.Entry(key, documents.plain(nodes[key]), documents.line_of(nodes[key]))
            if key in nodes
            else None
            for key in ("epoch-images", "title", "about")
        )
    return Suite(
        name,
        source,
        tuple(made),
        title=str(title.value) if title is not None else "",
        about=" ".join(str(about.value).split()) if about is not None else "",
        epoch_images=None if images is None else _number(images, EPOCH_IMAGES, source),
    )


def wildcard_suite(pattern: str) -> Suite:
    """The suite of the networks that MODEL matches; mode and options are the command line's."""
    import re

    matching(pattern)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", pattern).strip("-") or "all"
    return Suite(name, None, (RowSpec(pattern, "MODEL"),), title=pattern)


def _mapping(node: YamlNode, source: str, what: str) -> YamlNode:
    if node.id != documents.MAPPING:
        raise ConfigurationError(
            f"{source}, line {documents.line_of(node)}: {what} must be a mapping", "write `key: value` lines"
        )
    return node


def _with_row(
    base: RowSpec, entries: List[run_options.Entry], source: str, are_defaults: bool = False
) -> RowSpec:
    """The defaults with a row's entries over them."""
    own: Dict[str, run_options.Entry] = {}
    options: List[run_options.Entry] = []
    for entry in entries:
        key = entry.key.strip().lower().replace("_", "-")
        if key in _ROW:
            own[key] = entry
        elif key in _REFUSED:
            raise ConfigurationError(
                f"{source}, line {entry.line}: '{entry.key}' is no key of a row", _REFUSED[key]
            )
        elif key not in BY_KEY:
            raise ConfigurationError(
                f"{source}, line {entry.line}: unknown key '{shown_value(entry.key)}'",
                did_you_mean(entry.key, [*_ROW, *BY_KEY])
                or "`ipucnn benchmark --help` lists the options; keys are the same names",
            )
        else:
            options.append(entry)
    values = run_options.convert(options, source)
    changes: Dict[str, Any] = {"defaults" if are_defaults else "options": values}
    for key, choices in (("mode", MODES), ("engine", ENGINES)):
        if key in own:
            changes[key] = _choice(own[key], choices, source)
    for key in ("model", "name"):
        if key in own:
            changes[key] = str(own[key].value)
    if "model" in own:
        _check_model(own["model"], source)
    elif not are_defaults and not base.model:
        raise ConfigurationError(f"{base.where}: the row has no model", "add `model: NAME`, or a wildcard")
    measuring = dict(base.measuring)
    for key, number in _MEASURING.items():
        if key in own:
            name = key.replace("-", "_") + ("_s" if key.endswith("time") else "")
            entry = own[key]
            measuring[name] = str(entry.value) if number is None else _number(entry, number, source)
    changes["measuring"] = measuring
    row = replace(base, **changes)
    if "for-each" in own:
        row = replace(row, for_each=_for_each(own["for-each"], source))
    elif not are_defaults:
        # A row that settles a key of the defaults' for-each has that one value.
        settled = {entry.key.strip().lower().replace("_", "-") for entry in entries}
        row = replace(row, for_each=tuple(c for c in row.for_each if c.key not in settled))
    return row


def _check_model(entry: run_options.Entry, source: str) -> None:
    try:
        name = str(entry.value)
        if is_own_name(name) or any(record.own is not None for record in matching(name)):
            raise ConfigurationError(
                f"{shown_value(name)} is a network of one's own, and suites have registered ones",
                f"measure it by itself: ipucnn benchmark {shown_value(name)}",
            )
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}, line {entry.line}: {error.message}", error.hint) from None


def _for_each(entry: run_options.Entry, source: str) -> Tuple[Choice, ...]:
    """All choices of all keys; :func:`_expanded` makes rows of them."""
    if not isinstance(entry.value, dict) or not entry.value:
        raise ConfigurationError(
            f"{source}, line {entry.line}: for-each must map keys to lists of values",
            "for example `for-each: {micro-batch-size: [1, 32]}`",
        )
    choices: List[Choice] = []
    for key, given in entry.value.items():
        key = str(key).strip().lower().replace("_", "-")
        if not isinstance(given, list) or not given:
            raise ConfigurationError(
                f"{source}, line {entry.line}: for-each: {shown_value(key)} must be a list of values",
                f"for example `for-each: {{{shown_value(key)}: [{shown_value(given)}]}}`",
            )
        for value in given:
            one = run_options.Entry(key, value, entry.line)
            if key == "mode":
                choices.append(Choice(key, str(value), _choice(one, MODES, source)))
            elif key in BY_KEY and key not in _REFUSED:
                checked = run_options.convert([one], source)
                choices.append(Choice(BY_KEY[key].key, str(value), next(iter(checked.values()))))
            else:
                raise ConfigurationError(
                    f"{source}, line {entry.line}: for-each: unknown key '{shown_value(key)}'",
                    did_you_mean(key, ["mode", *BY_KEY]) or "for-each takes mode and the options of a run",
                )
    return tuple(choices)


def _expanded(spec: RowSpec, at_most: int) -> List[RowSpec]:
    """One row for each combination of the choices, the first key varying slowest.

    Raises:
        ConfigurationError: more rows than there may be.
    """
    by_key: Dict[str, List[Choice]] = {}
    for choice in spec.for_each:
        by_key.setdefault(choice.key, []).append(choice)
    count = 1
    for choices in by_key.values():
        count *= len(choices)
    if count > at_most:
        raise ConfigurationError(
            f"{spec.where}: its for-each makes {shown_value(count)} rows, and a suite has at most {MAX_ROWS:,}",
            "give fewer values, or make several suites",
        )
    return [replace(spec, for_each=combination) for combination in itertools.product(*by_key.values())]


def _choice(entry: run_options.Entry, choices: Tuple[str, ...], source: str) -> str:
    value = str(entry.value).strip().lower()
    if value not in choices:
        given = shown_value(entry.value)
        raise ConfigurationError(
            f"{source}, line {entry.line}: {entry.key}: '{given}' is not one of {', '.join(choices)}",
            did_you_mean(value, choices) or f"{entry.key}: {choices[0]}",
        )
    return value


def _number(entry: run_options.Entry, number: Number, source: str) -> Any:
    try:
        return number.convert(entry.value)
    except BadValue as bad:
        nearest = bad.nearest if bad.nearest is not None else "10"
        raise ConfigurationError(
            f"{source}, line {entry.line}: {entry.key}: {shown_value(entry.value)}: {bad.reason}",
            f"{entry.key}: {nearest}",
        ) from None
