"""The Typer signature of a command, derived from the declaration of the options.

Typer passes every option of a run as text, and the option's own declaration converts it, so that flags and YAML follow
the same rules.  ``command_group.RunCommand`` rewrites what was typed into the forms Typer knows.
"""

import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence

import typer

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.config.options import specs_for
from ipucnn.config.presets import keys_in_presets
from ipucnn.config.spec import OptionSpec

if TYPE_CHECKING:
    from ipucnn.config.resolve import ReadPlan

MODEL_ARGUMENT = "model"
RUN_DEFAULT = "the run's"


def with_run_options(
    command: str,
    *,
    from_run: bool = False,
    read_plan: Optional["ReadPlan"] = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command's function so that Typer gives it all options of ``command``.

    The function is called with keyword arguments: its own parameters, and

    - ``request`` (a ``request.RunRequest``); or, if it has a parameter of that name, only the ``flags`` (field name ->
      text, for ``resolve.resolve_saved`` or ``resolve.convert_flags``), without MODEL and presets;
    - ``json_output`` and ``verbose`` if it has parameters of these names.

    Args:
        command: the command's name, which selects the options.
        from_run: whether the command takes the configuration of a run folder, whose values are the defaults.
        read_plan: function that reads the file of ``--plan``, for commands that take one.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., Any]:
        declared = inspect.signature(function).parameters
        only_flags = "flags" in declared
        specs = {spec.name: spec for spec in specs_for(command)}

        @functools.wraps(function)
        def run(**arguments: PlainValue) -> Any:
            flags = _given_flags(arguments, specs)
            others = {name: arguments[name] for name in declared if name in arguments}
            if only_flags:
                return function(flags=flags, **others)
            from ipucnn.config.request import RunRequest

            request = RunRequest(
                command,
                flags,
                arguments.get(MODEL_ARGUMENT),
                arguments["config"],
                arguments["config_path"],
                arguments["print_config"],
                read_plan,
            )
            return function(request=request, **others)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in declared.items()
            if name not in ("request", "flags", "json_output", "verbose")
        ]
        if not only_flags:
            parameters.insert(0, _model_parameter(command == "benchmark"))
        parameters += _general_parameters(only_flags)
        parameters += [
            _parameter(spec, _default_of(spec, command, from_run, only_flags)) for spec in specs.values()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate


def _given_flags(arguments: PlainDict, specs: Dict[str, OptionSpec]) -> PlainDict:
    # Typer passes None or, for lists, an empty list for an option that was not typed.
    return {
        name: arguments[name] for name in specs if arguments.get(name) is not None and arguments[name] != []
    }


def _keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _model_parameter(many: bool) -> inspect.Parameter:
    what = "Network, or a wildcard for several" if many else "Network"
    argument = typer.Argument(
        None,
        metavar="MODEL",
        help=f"{what}, see `ipucnn models`.  [default: the preset's, else toy_model]",
        show_default=False,
        autocompletion=complete_model,
    )
    return _keyword(MODEL_ARGUMENT, Optional[str], argument)


def _general_parameters(only_flags: bool) -> List[inspect.Parameter]:
    def general(default: Optional[bool], *names: str, **details: PlainValue) -> Any:
        return typer.Option(default, *names, rich_help_panel="General", show_default=False, **details)

    preset = general(
        None,
        "--config",
        metavar="NAME",
        help="Preset to start from; flags override it.  [default: the model's own]",
        autocompletion=complete_preset,
    )
    file = general(
        None,
        "--config-path",
        metavar="FILE",
        help="YAML file to take the preset from.  [default: the built-in ones]",
    )
    printing = general(
        False, "--print-config", help="Print every option's value and where it came from, and stop."
    )
    of_presets = [
        _keyword("config", Optional[str], preset),
        _keyword("config_path", Optional[str], file),
        _keyword("print_config", bool, printing),
    ]
    as_json = general(False, "--json", help="Print the result as JSON.")
    verbose = general(False, "--verbose", "-v", help="Say more on stderr.")
    return [
        *(() if only_flags else of_presets),
        _keyword("json_output", bool, as_json),
        _keyword("verbose", bool, verbose),
    ]


def _default_of(spec: OptionSpec, command: str, from_run: bool, only_flags: bool) -> str:
    """Returns the default in the help of a command that takes a run folder, only flags, or presets."""
    if from_run:
        return RUN_DEFAULT
    if command == "plan-splits" and spec.plan_default:
        return spec.plan_default
    return default_text(spec) if only_flags else shown_default(spec)


def _parameter(spec: OptionSpec, default: str) -> inspect.Parameter:
    flags = ["--" + key for key in spec.keys]
    details: PlainDict = {
        "help": f"{spec.help}  [default: {default}]",
        "rich_help_panel": spec.panel,
        "show_default": False,
    }
    if spec.is_bool:
        flags[0] += f"/--no-{spec.key}"
        return _keyword(spec.name, Optional[bool], typer.Option(None, *flags, **details))
    of_names = {"model_name": complete_model, "dataset": complete_dataset}.get(spec.name)
    complete = _completer(spec.choices) if spec.choices else of_names
    annotation = Optional[List[str]] if spec.kind.is_list else Optional[str]
    typed = typer.Option(None, *flags, metavar=spec.metavar, autocompletion=complete, **details)
    return _keyword(spec.name, annotation, typed)


def shown_default(spec: OptionSpec) -> str:
    """Returns the default of an option of a run, with the preset's before the declared one if some preset sets it."""
    text = default_text(spec)
    return f"the preset's, else {text}" if spec.key in keys_in_presets() else text


def default_text(spec: OptionSpec) -> str:
    """Returns the default as a user would type it, or a description of the behaviour without the option."""
    return spec.typed_text(spec.default) or spec.default_text or "none"


# Shell completion of models, data sets, presets and choices.


def complete_model(incomplete: str) -> List[str]:
    """Returns names of registered models that begin with ``incomplete``."""
    from ipucnn.models.registry import list_models

    return _starting([record.name for record in list_models()], incomplete)


def complete_dataset(incomplete: str) -> List[str]:
    """Returns names of data sets that begin with ``incomplete``."""
    from ipucnn.datasets.registry import DATASETS

    return _starting(list(DATASETS), incomplete)


def complete_preset(incomplete: str) -> List[str]:
    """Returns names of built-in presets that begin with ``incomplete``."""
    from ipucnn.config.presets import built_in_names

    return _starting(built_in_names(), incomplete)


def _starting(names: Sequence[str], incomplete: str) -> List[str]:
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def _completer(choices: Sequence[str]) -> Callable[[str], List[str]]:
    # Typer identifies the parameters of a completion function by their names.
    def complete(incomplete: str) -> List[str]:
        return _starting(choices, incomplete)

    return complete
