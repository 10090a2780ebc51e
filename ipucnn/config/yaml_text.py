"""Options as YAML: line numbers in messages, merges and anchors as public files use them."""

from typing import Any, Dict, List, NamedTuple, Tuple

import yaml

from ipucnn.config.options import BY_KEY, PANELS, SPECS, RunConfig, find_spec
from ipucnn.config.spec import convert_value
from ipucnn.errors import ConfigurationError, did_you_mean

MERGE_TAG = "tag:yaml.org,2002:merge"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Entry(NamedTuple):
    """One key of a YAML mapping as written."""

    key: str
    value: Any
    line: int


def dump(config: RunConfig) -> str:
    """Every key that a YAML file may hold, under a comment per panel; :func:`load` reads it back exactly."""
    text = ""
    for panel in PANELS:
        text += ("\n" if text else "") + f"# {panel.PANEL}\n"
        for spec in SPECS:
            if spec.panel == panel.PANEL and spec.in_yaml:
                text += _dump_entry(spec.key, spec.yaml_value(getattr(config, spec.name)))
    return text


def _dump_entry(key: str, value: Any) -> str:
    """``key: value`` with lists and dictionaries on one line."""
    flow = None if isinstance(value, (list, dict)) else False
    return str(
        yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=100)
    )


def load(text: str, source: str) -> Dict[str, Any]:
    """Field names and values of a YAML text whose top level is one mapping of options.

    Raises:
        ConfigurationError: with ``source`` and the line, for unreadable YAML and wrong keys or values.
    """
    node = compose(text, source)
    if node is None:
        return {}
    return convert(entries_of(node, source), source)


def compose(text: str, source: str) -> Any:
    """The YAML node of a text's top-level mapping, or None for an empty text."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).split("\n")[0]
        raise ConfigurationError(
            f"{where}: not readable as YAML: {problem}", "check the indentation and quotes there"
        ) from error
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(
            f"{source}: its top level is not a mapping of names", "write `key: value` lines"
        )
    return node


def entries_of(node: Any, source: str) -> List[Entry]:
    """The entries of a mapping node, merged (``<<``) ones first so that later ones win.

    Several ``<<`` in one mapping are taken in order, as public files rely on; any other key given twice
    is an error, because one of the two would be silently dropped.
    """
    first_line: Dict[str, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == MERGE_TAG:
            continue
        line = key_node.start_mark.line + 1
        if key_node.value in first_line:
            raise ConfigurationError(
                f"{source}, line {line}: '{key_node.value}' is given twice, "
                f"first on line {first_line[key_node.value]}",
                "keep one of the two",
            )
        first_line[key_node.value] = line
    constructor = yaml.constructor.SafeConstructor()
    try:
        return [
            Entry(
                str(key_node.value),
                constructor.construct_object(value_node, deep=True),
                key_node.start_mark.line + 1,
            )
            for key_node, value_node in _merged(node, source, ())
        ]
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else node.start_mark.line + 1
        raise ConfigurationError(
            f"{source}, line {line}: {error.problem}", "only plain YAML is read: no tags"
        ) from error


def _merged(node: Any, source: str, within: Tuple[int, ...]) -> List[Tuple[Any, Any]]:
    """Key and value nodes with ``<<`` resolved: merged ones first; of a list of merges the earliest wins.

    The nodes are left as they are, unlike PyYAML's own flattening: presets share them.
    """
    if node.id != "mapping" or id(node) in within:
        line = node.start_mark.line + 1
        raise ConfigurationError(
            f"{source}, line {line}: '<<' must merge other mappings",
            "write `<<: *name` with the anchor of a mapping",
        )
    merged: List[Tuple[Any, Any]] = []
    own: List[Tuple[Any, Any]] = []
    for key_node, value_node in node.value:
        if key_node.tag != MERGE_TAG:
            own.append((key_node, value_node))
            continue
        for part in reversed(value_node.value) if value_node.id == "sequence" else [value_node]:
            merged.extend(_merged(part, source, (*within, id(node))))
    return merged + own


def convert(entries: List[Entry], source: str) -> Dict[str, Any]:
    """Field names and checked values of a mapping's entries; the last entry for a field wins.

    Raises:
        ConfigurationError: for an unknown key (did you mean), one that is a flag only, or a bad value.
    """
    found: Dict[str, Any] = {}
    for entry in entries:
        spec = find_spec(entry.key)
        if spec is None:
            raise ConfigurationError(
                f"{source}, line {entry.line}: unknown key '{entry.key}'",
                did_you_mean(entry.key, BY_KEY)
                or "`ipucnn train --help` lists the options; keys are the same names",
            )
        if not spec.in_yaml:
            raise ConfigurationError(
                f"{source}, line {entry.line}: '{entry.key}' is a flag, not a key",
                f"give {spec.flag} on the command line",
            )
        found[spec.name] = convert_value(spec, entry.value, entry.key, f"{source}, line {entry.line}: ")
    return found
