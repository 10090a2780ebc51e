"""Joins the options of a run, which ``shared_options.py`` declares, and reads and writes them as YAML.

``RunConfig`` joins the panel classes of declarations and is the immutable result.  YAML keys and flags are
the field names with ``-`` for ``_``; ``_`` is accepted too.  Errors in a YAML text have its line.  Nothing here needs
TensorFlow.
"""

import dataclasses
import re
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Type

from ipucnn import documents
from ipucnn.aliases import PlainValue, YamlNode
from ipucnn.config.shared_options import (
    BatchingOptions,
    DataOptions,
    EvaluationOptions,
    GeneralOptions,
    HostOptions,
    IpuOptions,
    ModelOptions,
    PipelineOptions,
    TrainingOptions,
    WorkerOptions,
)
from ipucnn.config.spec import OptionSpec, convert_value, specs_of
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import shown_value

PANELS: Tuple[Type, ...] = (
    GeneralOptions,
    DataOptions,
    ModelOptions,
    TrainingOptions,
    BatchingOptions,
    PipelineOptions,
    EvaluationOptions,
    IpuOptions,
    HostOptions,
    WorkerOptions,
)


@dataclasses.dataclass(frozen=True)
class RunConfig(
    WorkerOptions,
    HostOptions,
    IpuOptions,
    EvaluationOptions,
    PipelineOptions,
    BatchingOptions,
    TrainingOptions,
    ModelOptions,
    DataOptions,
    GeneralOptions,
):
    """Every option of a run, each value legal by itself; ``rules`` checks combinations of options.

    Do not change its dictionaries: use :func:`dataclasses.replace`.
    """

    @property
    def named_splits(self) -> Tuple[str, ...]:
        """The pipeline splits; none if the planner chooses them."""
        return () if self.pipeline_splits == (AUTO,) else tuple(self.pipeline_splits)

    def to_yaml(self) -> str:
        """Returns ``config.yml``: every key that a YAML file may hold, under a comment per panel."""
        import yaml

        texts = []
        for panel in PANELS:
            values = {
                spec.key: spec.yaml_value(getattr(self, spec.name))
                for spec in SPECS
                if spec.panel == panel.PANEL and spec.in_yaml
            }
            # Lists and dictionaries go on one line.
            flow = None if any(isinstance(value, (list, dict)) for value in values.values()) else False
            # PyYAML writes some characters as line breaks, which are blanks when they are read again: they are escaped.
            for is_escaped in (False, True):
                text = yaml.safe_dump(
                    values, sort_keys=False, default_flow_style=flow, allow_unicode=not is_escaped, width=100
                )
                if not re.search("[\x85\u2028\u2029]", text):
                    break
            texts.append(f"# {panel.PANEL}\n{text}")
        return "\n".join(texts)

    @classmethod
    def from_yaml(cls, text: str, source: str = "config.yml") -> "RunConfig":
        """Returns the configuration in a text of :meth:`to_yaml`, or in any subset of its keys.

        Raises:
            ConfigurationError: a key or value is wrong; the message has ``source`` and the line.
        """
        node = compose(text, source)
        return cls() if node is None else cls(**convert(entries_of(node, source), source))


# Value of pipeline-splits, in place of layers, that lets the planner choose them.
AUTO = "auto"

SPECS: List[OptionSpec] = [spec for panel in PANELS for spec in specs_of(panel)]
BY_NAME: Mapping[str, OptionSpec] = {spec.name: spec for spec in SPECS}
BY_KEY: Mapping[str, OptionSpec] = {key: spec for spec in SPECS for key in spec.keys}


def specs_for(command: str) -> Iterator[OptionSpec]:
    """Yields the options that ``command`` takes as flags."""
    return (spec for spec in SPECS if command in spec.commands)


def find_spec(key: str) -> Optional[OptionSpec]:
    """Returns the option of a key in any spelling; None if there is none."""
    return BY_KEY.get(key.strip().lower().replace("_", "-"))


def find_meant(word: str) -> Optional[OptionSpec]:
    """Returns the option of a key, or of a name that it has in other programs; None if there is none."""
    name = word.strip().lower().replace("_", "-")
    return find_spec(name) or next((spec for spec in SPECS if name in spec.synonyms.split()), None)


# -- YAML -----------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One key of a YAML mapping as written."""

    key: str
    value: Any
    line: int


def compose(text: str, source: str) -> Optional[YamlNode]:
    """Returns the YAML node of a text's top-level mapping, or None for an empty text.

    Raises:
        ConfigurationError: the text is not readable, or its top level is not a mapping.
    """
    with documents.naming(source):
        node = documents.compose(text)
    if node is not None and node.id != documents.MAPPING:
        raise ConfigurationError(
            f"{source}: its top level is not a mapping of names", "write `key: value` lines"
        )
    return node


def entries_of(node: YamlNode, source: str) -> List[Entry]:
    """Returns the entries of a mapping node in the order of ``documents.pairs``, without those that others override.

    Raises:
        ConfigurationError: for example a key given twice; the message has ``source`` and the line.
    """
    with documents.naming(source):
        entries = [
            Entry(key.value, documents.plain(value), documents.line_of(key))
            for key, value in documents.pairs(node)
        ]
    num_own = sum(key.value != documents.MERGE for key, _ in node.value)
    first: Dict[str, Entry] = {}
    for entry in entries[len(entries) - num_own :]:
        spec = find_spec(entry.key)
        other = first.setdefault(spec.name, entry) if spec is not None else entry
        if other is not entry:
            raise ConfigurationError(
                f"{source}, line {entry.line}: '{entry.key}' is the option '{other.key}' of line {other.line}",
                "keep one of the two",
            )
    last: Dict[str, Entry] = {}
    for entry in entries:
        spec = find_spec(entry.key)
        name = entry.key if spec is None else spec.name
        last.pop(name, None)
        last[name] = entry
    return [*last.values()]


def convert(entries: List[Entry], source: str) -> Dict[str, Any]:
    """Returns field names and checked values of a mapping's entries; the last entry of a field wins.

    Raises:
        ConfigurationError: an unknown key (did you mean), a key that is only a flag, or a bad value.
    """
    settings: Dict[str, Any] = {}
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
                f"take it out of the file, and type {spec.flag}",
            )
        where = f"{source}, line {entry.line}: "
        settings[spec.name] = convert_value(spec, entry.value, entry.key, where)
        _check_leading_zeros(entry.value, settings[spec.name], where, f"{entry.key}: ")
    return settings


def _check_leading_zeros(written: PlainValue, read: PlainValue, where: str, name: str) -> None:
    """Refuses a whole number that begins with 0, other than 0 itself.

    Args:
        written: a value of the file.
        read: the same value after conversion.
        where: the place, for messages.
        name: the key and a colon; "" in a list.
    """
    if isinstance(written, dict) and isinstance(read, dict):
        for key in written:
            _check_leading_zeros(written[key], read.get(key), f"{where}{name}", f"{key}: ")
    elif isinstance(written, list) and isinstance(read, (list, tuple)):
        for item, value in zip(written, read):
            _check_leading_zeros(item, value, f"{where}{name}", "")
    elif isinstance(written, str) and re.fullmatch("[-+]?0[0-9]+", written) and str(read) != written:
        # Not text, such as a name or a path.
        raise ConfigurationError(
            f"{where}{name}{shown_value(written)}: has a leading zero; without quotes, other readers of YAML may take "
            "it as octal",
            f"write it without the 0: {name}{shown_value(int(written))}",
        )
