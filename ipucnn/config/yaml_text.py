"""Options as YAML, written and read, with the line of a wrong key or value."""

from typing import Any, Dict, List, NamedTuple, Optional

from ipucnn import documents
from ipucnn.config.options import BY_KEY, PANELS, SPECS, RunConfig, find_spec
from ipucnn.config.spec import convert_value
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import shown_value


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
    import yaml

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


def compose(text: str, source: str) -> Optional[documents.Node]:
    """The YAML node of a text's top-level mapping, or None for an empty text.

    Raises:
        ConfigurationError: not readable, or not such a mapping.
    """
    with documents.naming(source):
        node = documents.compose(text)
    if node is not None and node.kind != documents.MAPPING:
        raise ConfigurationError(
            f"{source}: its top level is not a mapping of names", "write `key: value` lines"
        )
    return node


def entries_of(node: documents.Node, source: str) -> List[Entry]:
    """The entries of a mapping node in the order of ``documents.pairs``: later ones win.

    Raises:
        ConfigurationError: with ``source`` and the line, for a key given twice and the like.
    """
    with documents.naming(source):
        return [Entry(key.value, documents.plain(value), key.line) for key, value in documents.pairs(node)]


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
                f"{source}, line {entry.line}: unknown key '{shown_value(entry.key)}'",
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
