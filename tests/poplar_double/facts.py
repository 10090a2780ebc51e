"""The recorded facts of the SDK's Python API, and callables that have the recorded signatures."""

import ast
import functools
import inspect
import json
import types
from pathlib import Path
from typing import Any, Callable, Dict, List

FACTS: Dict[str, Any] = json.loads((Path(__file__).parent / "facts.json").read_text(encoding="utf-8"))

_KINDS = {
    "": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "*": inspect.Parameter.VAR_POSITIONAL,
    "**": inspect.Parameter.VAR_KEYWORD,
}


def module(name: str, **members: Any) -> types.ModuleType:
    """Makes a module."""
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


def _default(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # the name of an enum member or of another constant


def signature_of(params: List[Dict[str, Any]], absent: List[str] = ()) -> inspect.Signature:
    """Returns the signature of recorded parameters, without those that a version lacks."""
    parameters = []
    for p in params:
        if p["name"] in absent:
            continue
        kind = _KINDS[p.get("kind", "")]
        default = _default(p["default"]) if "default" in p else inspect.Parameter.empty
        parameters.append(inspect.Parameter(p["name"], kind, default=default))
    return inspect.Signature(parameters)


def checked(signature: inspect.Signature, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts ``function(**arguments)`` behind a recorded signature: TypeError wherever Python itself would raise it."""
    variable = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for key in variable:
            arguments.update(arguments.pop(key))
        return function(**arguments)

    return call


def like(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function the recorded signature of a callable of the SDK."""
    return lambda function: checked(signature_of(FACTS["callables"][name]["params"]), name, function)
