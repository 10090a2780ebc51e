"""How a command declares its options: a frozen dataclass, from which the command line and the Python interface follow.

A command takes its own options, which are fields of its class, and those options of runs (``options.py``) that name it.
"""

from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar

from ipucnn.aliases import PlainValue
from ipucnn.config.options import specs_for
from ipucnn.config.presets import keys_in_presets
from ipucnn.config.request import RunRequest
from ipucnn.config.resolve import ReadPlan
from ipucnn.config.spec import WORD, WORDS, OptionSpec, convert_value, option, specs_of

GENERAL = "General"
RUN_DEFAULT = "the run's"
_Options = TypeVar("_Options", bound="CommandOptions")


def argument(metavar: str, help: str, default: PlainValue = "", required: bool = False) -> Any:
    """Declares an argument of a command, as a field of its class.

    Args:
        metavar: its name in the usage; ``NAME...`` takes several words.
        help: its help.
        default: the value if it is not typed.
        required: whether it must be typed.
    """
    kind = WORDS if metavar.rstrip("]").endswith("...") else WORD
    return option(default, help, metavar=metavar, kind=kind, argument=True, is_required=required)


def word(metavar: str, help: str, **details: PlainValue) -> Any:
    """Declares an option of a command that takes any text; it is None if it was not typed."""
    return option(None, help, metavar=metavar, kind=WORD, **details)


def words(metavar: str, help: str, **details: PlainValue) -> Any:
    """Declares an option of a command that takes several texts."""
    return option((), help, metavar=metavar, kind=WORDS, **details)


@dataclass(frozen=True)
class CommandOptions:
    """The options of every command."""

    PANEL: ClassVar[str] = ""
    EACH: ClassVar[Dict[str, Any]] = {"optional": False, "off": (), "commands": (), "in_yaml": False}

    json: bool = option(False, "Print the result as JSON.", panel=GENERAL)
    verbose: bool = option(False, "Say more on stderr.", panel=GENERAL)

    def values(self) -> Dict[str, Any]:
        """Returns the value of each option, and the text of each option of runs that was given."""
        own = dict(vars(self))
        flags = own.pop("flags", {})
        return {**own, **flags}


@dataclass(frozen=True)
class RunOptions(CommandOptions):
    """The options of a command that takes options of runs.

    Attributes:
        flags: field name -> text of the options of runs that were given.
    """

    FROM_RUN: ClassVar[bool] = False
    """Whether the defaults of the options of runs are those of a saved run."""

    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkOptions(RunOptions):
    """The options of a command that takes MODEL and presets."""

    model: Optional[str] = argument(
        "MODEL", "Network, see `ipucnn models`.  [default: the preset's, else toy_model]", default=None
    )
    config: Optional[str] = word(
        "NAME",
        "Preset to start from; flags override it.",
        default_text="the model's own",
        panel=GENERAL,
    )
    config_path: Optional[str] = word(
        "FILE", "YAML file to take the preset from.", default_text="the built-in ones", panel=GENERAL
    )
    print_config: bool = option(
        False, "Print every option's value and where it came from, and stop.", panel=GENERAL
    )

    def request(self, command: str, read_plan: Optional[ReadPlan] = None) -> RunRequest:
        """Returns the run that is requested from a command."""
        return RunRequest(
            command, self.flags, self.model, self.config, self.config_path, self.print_config, read_plan
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
    values: Dict[str, Any] = {
        spec.name: convert_value(spec, typed[spec.name], spec.metavar if spec.argument else spec.flag)
        for spec in own_options(of)
        if spec.name in typed
    }
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
