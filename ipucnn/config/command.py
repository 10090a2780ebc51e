"""How a command's options are read, and how its help describes them: from its class, a frozen dataclass.

A command takes its own options, which are fields of its class, and those options of runs (``options.py``) that name it.
"""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar

from ipucnn.aliases import PlainValue
from ipucnn.config.options import specs_for
from ipucnn.config.presets import keys_in_presets
from ipucnn.config.request import RunRequest
from ipucnn.config.resolve import ReadPlan
from ipucnn.config.shared_options import GENERAL, CommandOptions, NetworkOptions, RunOptions
from ipucnn.config.spec import OptionSpec, check_paths, convert_value, specs_of

RUN_DEFAULT = "the run's"
_Options = TypeVar("_Options", bound="CommandOptions")


def request_of(options: NetworkOptions, command: str, read_plan: Optional[ReadPlan] = None) -> RunRequest:
    """Returns the run that the options of a command request."""
    return RunRequest(
        command,
        options.flags,
        options.model,
        options.config,
        options.config_path,
        options.print_config,
        read_plan,
    )


def own_options(of: Type[CommandOptions]) -> List[OptionSpec]:
    """Returns a command's own arguments and options in the order of its help, the general ones last."""
    return sorted(specs_of(of), key=_order)


def _order(spec: OptionSpec) -> Tuple[bool, bool, bool]:
    return not spec.argument, spec.panel == GENERAL, spec.name in ("json", "verbose")


def run_options(of: Type[CommandOptions], command: str) -> List[OptionSpec]:
    """Returns the options of runs that a command takes."""
    return list(specs_for(command)) if issubclass(of, RunOptions) else []


def read_options(of: Type[_Options], command: str, typed: Mapping[str, PlainValue]) -> _Options:
    """Returns the options of a command.

    Args:
        of: the class of its options.
        command: its name.
        typed: field name -> text, texts or truth value of the options that were given.

    Raises:
        ConfigurationError: a value is not legal; the message has the option as written, the value and the reason.
    """
    values: Dict[str, Any] = {}
    for spec in own_options(of):
        if spec.name in typed:
            shown = spec.metavar.strip("[].") if spec.argument else spec.flag
            values[spec.name] = convert_value(spec, typed[spec.name], shown)
            check_paths(spec, values[spec.name], shown)
    if issubclass(of, RunOptions):
        flags = run_options(of, command)
        values["flags"] = {spec.name: typed[spec.name] for spec in flags if spec.name in typed}
    return of(**values)


def help_of(spec: OptionSpec, of: Type[CommandOptions], command: str) -> str:
    """Returns the help of an option of a command, with its default."""
    if not spec.commands:
        return f"{spec.help}  [default: {spec.default_text}]" if spec.default_text else spec.help
    if issubclass(of, RunOptions) and of.FROM_RUN:
        default = RUN_DEFAULT
    elif command == "plan-splits" and spec.plan_default:
        default = spec.plan_default
    else:
        default = shown_default(spec) if issubclass(of, NetworkOptions) else default_text(spec)
    return f"{spec.help}  [default: {default}]"


def shown_default(spec: OptionSpec) -> str:
    """Returns the default of an option of a run, with the preset's before the declared one if some preset sets it."""
    text = default_text(spec)
    return f"the preset's, else {text}" if spec.key in keys_in_presets() else text


def default_text(spec: OptionSpec) -> str:
    """Returns the default as a user would type it, or a description of the behaviour without the option."""
    return spec.typed_text(spec.default) or spec.default_text or "none"


# Shell completion.


def completer(spec: OptionSpec) -> Optional[Callable[[str], List[str]]]:
    """Returns the function that completes a value of an option in the shell; None if there is none."""
    names = _COMPLETED.get(spec.name)
    if spec.choices:
        names = lambda: spec.choices  # noqa: E731
    if names is None:
        return None
    listed = names

    # Typer identifies the parameters of a completion function by their names.
    def complete(incomplete: str) -> List[str]:
        return [name for name in listed() if name.lower().startswith(incomplete.lower())]

    return complete


def _model_names() -> Sequence[str]:
    from ipucnn.models.registry import list_models

    return [record.name for record in list_models()]


def _dataset_names() -> Sequence[str]:
    from ipucnn.datasets.registry import DATASETS

    return list(DATASETS)


def _preset_names() -> Sequence[str]:
    from ipucnn.config.presets import built_in_names

    return built_in_names()


_COMPLETED: Dict[str, Callable[[], Sequence[str]]] = {
    "model": _model_names,
    "model_name": _model_names,
    "dataset": _dataset_names,
    "name": _dataset_names,
    "config": _preset_names,
}
"""Name of an option -> function that lists its values."""
