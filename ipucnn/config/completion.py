"""What shell completion offers for models, data sets, presets and choices."""

from typing import Callable, List, Sequence


def complete_model(incomplete: str) -> List[str]:
    """Names of registered models that begin with ``incomplete``."""
    from ipucnn.models.registry import list_models

    return _starting([record.name for record in list_models()], incomplete)


def complete_dataset(incomplete: str) -> List[str]:
    """Names of data sets that begin with ``incomplete``."""
    from ipucnn.datasets.catalog import DATASETS

    return _starting(list(DATASETS), incomplete)


def complete_preset(incomplete: str) -> List[str]:
    """Names of built-in presets that begin with ``incomplete``."""
    from ipucnn.config.presets import built_in_names

    return _starting(built_in_names(), incomplete)


def completer(choices: Sequence[str]) -> Callable[[str], List[str]]:
    """A completion function for a fixed set of choices, whatever the case."""

    def complete(incomplete: str) -> List[str]:
        return [choice for choice in choices if choice.lower().startswith(incomplete.lower())]

    return complete


def _starting(names: Sequence[str], incomplete: str) -> List[str]:
    return [name for name in names if name.startswith(incomplete)]
