"""The command line of a command that runs networks, before it is resolved: MODEL may still be a wildcard."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, List, Mapping, Optional

from ipucnn.config.resolve import ReadPlan, Resolved, resolve


@dataclass(frozen=True)
class RunRequest:
    """The parts of a command line that determine a run.

    Attributes:
        command: the command's name.
        flags: field name -> text of the flags that were given.
        model: the argument MODEL, None if there is none.
        config_name: ``--config``.
        config_path: ``--config-path``.
        print_config: ``--print-config``.
        read_plan: see ``resolve.resolve``.
    """

    command: str
    flags: Mapping[str, Any]
    model: Optional[str] = None
    config_name: Optional[str] = None
    config_path: Optional[Path] = None
    print_config: bool = False
    read_plan: Optional[ReadPlan] = None

    @property
    def is_wildcard(self) -> bool:
        """Whether MODEL is a wildcard, which stands for any number of networks."""
        return self.model is not None and is_wildcard(self.model)

    def with_named_model(self) -> "RunRequest":
        """Returns the same request with the value of ``--model-name``, if given, as MODEL."""
        named = self.flags.get("model_name")
        if self.model is not None or named is None:
            return self
        return replace(self, model=named, flags={k: v for k, v in self.flags.items() if k != "model_name"})

    def resolve(self) -> Resolved:
        """Resolves the single run of this request.

        Raises:
            UserError: see ``resolve.resolve``.
        """
        return resolve(
            self.command,
            self.flags,
            model=self.model,
            config_name=self.config_name,
            config_path=self.config_path,
            needs_data=not self.print_config,
            read_plan=self.read_plan,
        )


def is_wildcard(name: str) -> bool:
    """Whether a name is a shell wildcard."""
    return any(character in name for character in "*?[")


def matching(pattern: str) -> List[Any]:
    """Returns the records of a name or wildcard.

    Raises:
        ConfigurationError: there are none.
    """
    from ipucnn.errors import ConfigurationError
    from ipucnn.models.registry import get_model, list_models

    if not is_wildcard(pattern):
        return [get_model(pattern)]
    records = list_models(pattern)
    if not records:
        raise ConfigurationError(f"no network matches '{pattern}'", "`ipucnn models` lists them all")
    return records
