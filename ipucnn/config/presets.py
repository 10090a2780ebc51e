"""Presets: named sets of options in YAML files, the built-in ones and the user's own ``configs.yml``.

The top level of a file is a mapping from names to mappings of options.  Anchors and merges work, and a name may hold
only an anchor.  Built-in presets are named after their model, or ``MODEL@DATASET``.
"""

import functools
import os
import re
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

from ipucnn import documents
from ipucnn.aliases import YamlNode
from ipucnn.config.options import compose, convert, entries_of, find_spec
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.filesystem import read_text, shown
from ipucnn.text import quoted, shown_value

# Data sets of small images, which share the preset MODEL@small of networks made for ImageNet.
SMALL_IMAGES = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100")
_NO_OPTIONS = (
    "write `key: value` lines of options, or give the config.yml of a run folder, which repeats the run"
)
_WITHOUT_NAME = "leave --config out: the file holds options, not presets with names"
BUILT_IN_FOLDER = Path(__file__).parent / "presets"


class Preset(NamedTuple):
    """A preset.

    Attributes:
        name: its name in messages and origins.
        source: the file it is in.
        values: field name -> checked value.
        beside: keys of options beside the presets of the file, which are in none of them.
    """

    name: str
    source: str
    values: Dict[str, Any]
    beside: Tuple[str, ...] = ()


class PresetFile:
    """A YAML file of presets; a preset is checked only when it is read."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self._node = compose(text, source)
        self._nodes: Dict[str, YamlNode] = {}
        for key, node in self._node.value if self._node is not None else []:
            with documents.naming(source):
                documents.check_key(key)
            if key.value in self._nodes:
                raise ConfigurationError(
                    f"{source}, line {documents.line_of(key)}: preset '{shown_value(key.value)}' is there twice",
                    "rename one of them",
                )
            self._nodes[key.value] = node

    @property
    def names(self) -> List[str]:
        """The names whose value is a mapping, in the file's order."""
        return [name for name, node in self._nodes.items() if node.id == documents.MAPPING]

    def has(self, name: str) -> bool:
        """Whether the name is in the file, be it with options or without."""
        return name in self._nodes

    @property
    def is_empty(self) -> bool:
        """Whether the file has no name at all."""
        return not self._nodes

    def names_of_presets(self) -> List[str]:
        """The names whose mappings have an option with a value, in the file's order; not those of a report."""
        return [name for name in self.names if any(map(_is_option, self._nodes[name].value))]

    @property
    def is_flat(self) -> bool:
        """Whether the file holds options rather than presets, as a run's ``config.yml`` does."""
        return bool(self._nodes) and all(
            find_spec(name) is not None for name in self._nodes if name != documents.MERGE
        )

    def get(self, name: str) -> Optional[Preset]:
        """Returns the preset of that name, checked, or None."""
        node = self._nodes.get(name)
        if node is None or node.id != documents.MAPPING:
            return None
        source = f"{self.source}, preset {name}"
        beside = tuple(
            key
            for key, node in self._nodes.items()
            if find_spec(key) is not None and node.id != documents.MAPPING
        )
        return Preset(name, self.source, convert(entries_of(node, self.source), source), beside)

    def as_preset(self, name: str) -> Preset:
        """Returns the whole flat file as one preset."""
        entries = entries_of(self._node, self.source) if self._node is not None else []
        return Preset(name, self.source, convert(entries, self.source))


def _is_option(entry: Tuple[YamlNode, YamlNode]) -> bool:
    """Whether an entry of a mapping gives an option its value, or merges another mapping."""
    key, value = entry
    if key.value == documents.MERGE:
        return True
    return isinstance(key.value, str) and find_spec(key.value) is not None and value.id != documents.MAPPING


def read_file(path: Path) -> PresetFile:
    """Reads a user's file of presets.

    Raises:
        ConfigurationError: the file is not YAML.
        DataError: the file does not exist, is not a text file, or is too large.
    """
    text = read_text(path, documents.MAX_BYTES, hint="give the path of a YAML file of presets")
    return PresetFile(text, shown(path))


def built_in_files(holding: Optional[str] = None) -> List[PresetFile]:
    """Returns the preset files shipped with the package.

    Args:
        holding: name of a preset; files that cannot contain it are left out, which saves parsing their YAML.
    """
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in sorted(BUILT_IN_FOLDER.glob("*.yml"))]
    # The text contains the name in every layout of YAML: quoted, followed by a space, or on another line.
    return [_parsed(text, name) for name, text in texts if holding is None or holding in text]


_parsed = functools.lru_cache(maxsize=None)(PresetFile)


def built_in_names() -> List[str]:
    """Returns the names of all built-in presets."""
    return [name for file in built_in_files() for name in file.names]


def keys_in_presets() -> FrozenSet[str]:
    """Returns the keys of the options that some built-in preset sets; help shows "the preset's" for them."""
    return _keys_in(BUILT_IN_FOLDER)


@functools.lru_cache(maxsize=None)
def _keys_in(folder: Path) -> FrozenSet[str]:
    # Parsing the YAML would be too slow for a help page; each option begins an indented line in these files.
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("*.yml"))
    written = {key for text in texts for key in re.findall(r"^ +([a-z0-9-]+):", text, re.MULTILINE)}
    return frozenset(spec.key for spec in map(find_spec, written) if spec is not None)


def candidates(
    model: str, dataset: Optional[str], ipus_per_replica: Optional[int] = None, command: str = "train"
) -> List[str]:
    """Returns the built-in presets that suit a model and data set, the best first.

    Args:
        dataset: name of the data set; None without data.
        ipus_per_replica: number given as a flag: MODEL@DATASET-podN is made for N.
        command: command that runs.  MODEL@folder, for the user's own photographs, applies only to training: other
            commands must not use its image size for existing weights.
    """
    if dataset is None:
        return [model]
    small = [f"{model}@small"] if dataset in SMALL_IMAGES else []
    if dataset == "imagefolder" and command == "train":
        small = [f"{model}@folder"]
    pod = [f"{model}@{dataset}-pod{ipus_per_replica}"] if ipus_per_replica else []
    return [*pod, f"{model}@{dataset}", *small, model]


def is_of_application(preset: Preset) -> bool:
    """Whether a built-in preset is a configuration of Graphcore's public application for CNNs."""
    return preset.source == "public.yml" and preset.name.startswith(("public_", "mk2_"))


def find_built_in(*names: str) -> Optional[Preset]:
    """Returns the first of ``names`` that is a built-in preset, or None."""
    for name in names:
        for file in built_in_files(holding=name):
            preset = file.get(name)
            if preset is not None:
                return preset
    return None


def load_preset(name: Optional[str], path: Optional[Path]) -> Optional[Preset]:
    """Returns the preset that ``--config NAME`` and ``--config-path FILE`` select, or None if neither is given.

    Raises:
        ConfigurationError: an unknown name (did you mean), or a file without a name.
    """
    if path is None:
        if name is None:
            return None
        preset = find_built_in(name)
        if preset is not None:
            return preset
        close = did_you_mean(name, built_in_names())
        hint = f"{close + ' ' if close else ''}For a configuration in a file of yours add --config-path FILE"
        if os.path.isfile(name):
            file = read_file(Path(name))
            preset_name = "" if file.is_flat or not file.names else f" --config {quoted(file.names[0])}"
            hint = f"it is a file: --config-path {quoted(name)}{preset_name}"
        raise ConfigurationError(f"--config {shown_value(name)}: no built-in preset of this name", hint)
    file = read_file(path)
    if name is None:
        if file.is_flat or (not file.names and not file.is_empty):
            return file.as_preset(str(path))
        presets = file.names_of_presets()
        if presets:
            raise ConfigurationError(
                f"--config-path {shown(path)}: no preset named from it",
                f"add --config NAME, one of {_some(presets)}",
            )
        raise ConfigurationError(f"--config-path {shown(path)}: no option of ipucnn in it", _NO_OPTIONS)
    preset = file.get(name)
    if preset is not None:
        return preset
    if file.has(name):
        others = "".join(f", or take --config {quoted(other)}" for other in file.names[:1])
        raise ConfigurationError(
            f"--config {shown_value(name)}: this preset in {shown(path)} has no options",
            f"write options below its name{others}",
        )
    raise ConfigurationError(
        f"--config {shown_value(name)}: no such preset in {shown(path)}",
        did_you_mean(name, file.names) or (f"it has {_some(file.names)}" if file.names else _WITHOUT_NAME),
    )


def _some(names: List[str], count: int = 8) -> str:
    return ", ".join(map(shown_value, names[:count])) + (
        f" and {len(names) - count} more" if len(names) > count else ""
    )
