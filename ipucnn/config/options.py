"""Every option of a run, declared once: flag, YAML key, type, bounds, default and help.

The declarations are the panel classes; ``RunConfig`` joins them and is the immutable result.  YAML keys and
flags are the field names with ``-`` for ``_``; ``_`` is accepted too.  Nothing here needs TensorFlow.
"""

import dataclasses
from typing import Iterator, List, Mapping, Optional, Tuple, Type

from ipucnn.config.panels_ipu import HostSession, IpuOnly, Pipeline
from ipucnn.config.panels_run import Data, Evaluation, General, Model
from ipucnn.config.panels_training import Batching, Training
from ipucnn.config.spec import OptionSpec, specs_of

PANELS: Tuple[Type, ...] = (
    General,
    Data,
    Model,
    Training,
    Batching,
    Pipeline,
    Evaluation,
    IpuOnly,
    HostSession,
)


@dataclasses.dataclass(frozen=True)
class RunConfig(HostSession, IpuOnly, Evaluation, Pipeline, Batching, Training, Model, Data, General):
    """Every option of a run, each value legal by itself; ``checks`` has the rules between options.

    Dictionaries in it are to be read, not changed: use :func:`dataclasses.replace`.
    """

    def to_yaml(self) -> str:
        """``config.yml``: every key that a YAML file may hold, grouped by panel."""
        from ipucnn.config.yaml_text import dump

        return dump(self)

    @classmethod
    def from_yaml(cls, text: str, source: str = "config.yml") -> "RunConfig":
        """The configuration a text of :meth:`to_yaml` (or any subset of its keys) stands for.

        Raises:
            ConfigurationError: naming ``source`` and the line, if a key or value is wrong.
        """
        from ipucnn.config.yaml_text import load

        return cls(**load(text, source))


# Instead of layers in pipeline-splits: the planner chooses them.
AUTO = "auto"

SPECS: List[OptionSpec] = [spec for panel in PANELS for spec in specs_of(panel)]
BY_NAME: Mapping[str, OptionSpec] = {spec.name: spec for spec in SPECS}
BY_KEY: Mapping[str, OptionSpec] = {key: spec for spec in SPECS for key in spec.keys}


def specs_for(command: str) -> Iterator[OptionSpec]:
    """The options that ``command`` takes as flags."""
    return (spec for spec in SPECS if command in spec.commands)


def find_spec(key: str) -> Optional[OptionSpec]:
    """The option a key names, in whatever spelling; None if there is none."""
    return BY_KEY.get(key.strip().lower().replace("_", "-"))
